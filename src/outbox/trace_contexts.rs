//! Looks up the trace context of an order's alarm, for the event of the order's close.
//!
//! Best effort, because no event may wait for its trace context: while `alarm_outbox` cannot be read, events are sent
//! without one, and the table is left alone for a while. Sends nothing and changes nothing.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use sqlx::Row;
use sqlx::postgres::PgRow;
use tracing::warn;

use crate::postgres::{Database, one_line};

/// How long events are sent without looking, after a look that failed.
const PAUSE: Duration = Duration::from_secs(60);

/// `$1` order ids; of an order with several alarms of a kind, the trace context of the last.
pub const TRACE_CONTEXTS: &str = "SELECT DISTINCT ON (order_id, kind) order_id, kind, traceparent FROM alarm_outbox
     WHERE traceparent IS NOT NULL AND order_id = ANY ($1)
     ORDER BY order_id, kind, created_at DESC";

/// An order's id, and the kind of the alarm or event: orders of two kinds may have one id.
pub(super) type OrderOfKind = (String, String);

/// Finds the trace contexts of alarms.
#[derive(Debug)]
pub(super) struct TraceContexts {
    database: Database,
    paused_until: Option<Instant>,
}

impl TraceContexts {
    pub fn new(database: Database) -> Self {
        Self { database, paused_until: None }
    }

    /// The trace contexts for the events in these rows that have none of their own. Each row has the columns `traceparent
    /// text` and `order_id text`, which may be null.
    ///
    /// # Errors
    /// sqlx's, if a column is missing.
    pub async fn of(&mut self, events: &[PgRow]) -> Result<HashMap<OrderOfKind, String>, sqlx::Error> {
        let mut ids = Vec::new();
        for row in events {
            let (own, order_id): (Option<String>, Option<String>) =
                (row.try_get("traceparent")?, row.try_get("order_id")?);
            ids.extend(order_id.filter(|_| own.is_none()));
        }
        if ids.is_empty() || self.paused_until.is_some_and(|until| Instant::now() < until) {
            return Ok(HashMap::new());
        }
        Ok(self.read(ids).await.unwrap_or_else(|error| {
            self.paused_until = Some(Instant::now() + PAUSE);
            let again_in_s = PAUSE.as_secs();
            warn!(
                error = one_line(&error),
                again_in_s, "trace contexts cannot be read from alarm_outbox; events are sent without them"
            );
            HashMap::new()
        }))
    }

    async fn read(&self, ids: Vec<String>) -> Result<HashMap<OrderOfKind, String>, sqlx::Error> {
        let select = sqlx::query_as(TRACE_CONTEXTS).bind(ids);
        let found: Vec<(String, String, String)> =
            self.database.run(async |connection| select.fetch_all(connection).await).await?;
        Ok(found.into_iter().map(|(order_id, kind, context)| ((order_id, kind), context)).collect())
    }
}
