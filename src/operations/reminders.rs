//! The reminders that were announced lately, by kind and by how long before the deadline.
//!
//! Reads `event_outbox`, which keeps sent events for `announce.keep`; what was deleted since is not counted.

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::message::write_rfc3339;
use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::outbox::reminders::EXPIRING;
use crate::postgres::{Database, DatabaseError, one_line};

/// Reminders of one kind that were announced in the last hour.
#[derive(Debug, Clone, PartialEq)]
pub struct SentReminders {
    /// The kind's name.
    pub kind: String,
    /// How long before the deadline, in seconds.
    pub before_s: f64,
    /// How many were handed to the broker.
    pub sent: u64,
    /// When the last one was, RFC 3339.
    pub last: String,
}

/// Counts them. Reads each event that was sent in the last hour, by an index.
///
/// # Errors
/// [`DatabaseError`].
pub async fn sent_in_last_hour(database: &Database) -> Result<Vec<SentReminders>, DatabaseError> {
    let (_, event_type) = EXPIRING;
    let query = sqlx::query(
        "SELECT kind, (payload ->> 'remind_s')::float8 AS before_s, count(*) AS sent, max(sent_at) AS last
         FROM event_outbox WHERE sent_at > statement_timestamp() - interval '1 hour' AND type = $1
         GROUP BY 1, 2 ORDER BY 1, 2",
    )
    .bind(event_type);
    let rows = database.run(async |connection| query.fetch_all(connection).await).await;
    let read = |row: &PgRow| {
        let (sent, Timestamptz(last)): (i64, _) = (row.try_get("sent")?, row.try_get("last")?);
        let (kind, before_s) = (row.try_get("kind")?, row.try_get("before_s")?);
        Ok(SentReminders { kind, before_s, sent: sent.unsigned_abs(), last: write_rfc3339(last) })
    };
    rows.and_then(|rows| rows.iter().map(read).collect()).map_err(|error| DatabaseError(one_line(&error)))
}
