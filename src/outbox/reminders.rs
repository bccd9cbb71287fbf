//! Announces that an order's deadline is near: the event `order.expiring`, at most once for an order, a deadline and a
//! reminder.
//!
//! Reads the overdue statement with a horizon, as the look-ahead does, and writes events; closes nothing. One row for each
//! reminder says how far the deadlines have been read, and is locked meanwhile, so that several workers need no leader.

use std::time::Duration;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::{Overdue, SweepPlace};
use sqlx::{PgConnection, SqlStr};

use crate::effects::sweep::read_row;
use crate::postgres::Database;

/// The event's routing key, and its type.
pub const EXPIRING: (&str, &str) = ("order.expiring", "order.expiring.v1");

/// Orders that are read by one transaction.
const ORDERS_AT_ONCE: i64 = 1_000;

/// Without a row the reminder is new: what is due to be reminded of already stays unannounced. now(), the begin of the
/// transaction, here and below: an overdue statement may use it too, and then finds nothing that is due later.
const BEGIN: &str = "
INSERT INTO reminder_progress (kind, before_ms, reached)
VALUES ($1, $2, now() + make_interval(secs => $2::float8 / 1000))
ON CONFLICT DO NOTHING";

/// Nothing while another worker has it. Deadlines that have passed are left out: those orders are being closed.
const REACHED: &str = "
SELECT greatest(reached, now()), CASE WHEN reached > now() THEN reached_id ELSE '' END,
       now() + make_interval(secs => before_ms::float8 / 1000)
FROM reminder_progress WHERE kind = $1 AND before_ms = $2 FOR UPDATE SKIP LOCKED";

const ANNOUNCE: &str = "
INSERT INTO event_outbox (routing_key, type, kind, payload)
SELECT $1, $2, $3, jsonb_build_object('order_id', order_id, 'deadline', deadline, 'kind', $3::text, 'remind_s', $4::float8)
FROM unnest($5::text[], $6::text[]) AS expiring (order_id, deadline)";

/// Never back, as when the clock was set back: what was announced would be announced again.
const ADVANCE: &str = "
UPDATE reminder_progress SET reached = $3, reached_id = $4
WHERE kind = $1 AND before_ms = $2 AND (reached, reached_id) < ($3, $4)";

/// The reminders of one kind.
#[derive(Debug, Clone)]
pub struct Reminders {
    database: Database,
    overdue: SqlStr,
    kind: String,
    before: Vec<Duration>,
}

impl Reminders {
    /// `overdue`: the kind's overdue statement. `before`: how long before the deadline, for each reminder.
    #[must_use]
    pub fn new(database: Database, overdue: SqlStr, kind: impl Into<String>, before: Vec<Duration>) -> Self {
        Self { database, overdue, kind: kind.into(), before }
    }

    /// Announces what is due, one page of each reminder. Returns how many events were written, and whether there may be
    /// more.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn announce(&self) -> Result<(u64, bool), sqlx::Error> {
        let (mut announced, mut more, mut fault) = (0, false, None);
        // One that fails does not keep the others.
        for before in &self.before {
            match self.database.run(async |connection| self.announce_page(connection, *before).await).await {
                Ok(page) => {
                    announced += page;
                    more |= page >= ORDERS_AT_ONCE.unsigned_abs();
                }
                Err(error) => fault = fault.or(Some(error)),
            }
        }
        fault.map_or(Ok((announced, more)), Err)
    }

    async fn announce_page(&self, connection: &mut PgConnection, before: Duration) -> Result<u64, sqlx::Error> {
        let before_ms = i64::try_from(before.as_millis()).unwrap_or(i64::MAX);
        let mut transaction = sqlx::Connection::begin(connection).await?;
        sqlx::query(BEGIN).bind(&self.kind).bind(before_ms).execute(&mut *transaction).await?;
        let reached: Option<(Timestamptz, String, Timestamptz)> =
            sqlx::query_as(REACHED).bind(&self.kind).bind(before_ms).fetch_optional(&mut *transaction).await?;
        let Some((Timestamptz(reached), reached_id, Timestamptz(horizon))) = reached else { return Ok(0) };
        let rows = sqlx::query(self.overdue.clone())
            .bind(-before.as_secs_f64())
            .bind(Timestamptz(reached))
            .bind(reached_id)
            .bind(ORDERS_AT_ONCE)
            .fetch_all(&mut *transaction)
            .await?;
        let found = rows.iter().map(read_row).collect::<Result<Vec<_>, _>>()?;
        let (found, expiring): (Vec<SweepPlace>, Vec<Option<Overdue>>) = found.into_iter().unzip();
        let expiring: Vec<Overdue> = expiring.into_iter().flatten().collect();
        // A statement that ignores where the page begins would be announced again and again.
        if found.iter().any(|place| place.deadline < reached) {
            let why = "the overdue statement returns orders before ($2, $3), so their reminders would be repeated; compare with them as docs/OWN-SQL.md says";
            return Err(sqlx::Error::Protocol(why.into()));
        }
        self.write_events(&mut transaction, &expiring, before).await?;
        let (last, last_id) = match found.last() {
            // Whatever appears before the horizon from now on has missed its moment.
            None => (horizon, ""),
            Some(last) if is_last_page(&found) && last.deadline < horizon => (horizon, ""),
            Some(last) => (last.deadline, last.id.as_str()),
        };
        let advance = sqlx::query(ADVANCE).bind(&self.kind).bind(before_ms).bind(Timestamptz(last)).bind(last_id);
        advance.execute(&mut *transaction).await?;
        transaction.commit().await?;
        Ok(found.len() as u64)
    }

    async fn write_events(
        &self,
        connection: &mut PgConnection,
        expiring: &[Overdue],
        before: Duration,
    ) -> Result<(), sqlx::Error> {
        if expiring.is_empty() {
            return Ok(());
        }
        let (ids, deadlines): (Vec<&str>, Vec<String>) =
            expiring.iter().map(|order| (order.order_id.as_str(), write_rfc3339(order.deadline))).unzip();
        let (routing_key, event_type) = EXPIRING;
        sqlx::query(ANNOUNCE)
            .bind(routing_key)
            .bind(event_type)
            .bind(&self.kind)
            .bind(before.as_secs_f64())
            .bind(ids)
            .bind(deadlines)
            .execute(connection)
            .await
            .map(drop)
    }
}

fn is_last_page(found: &[SweepPlace]) -> bool {
    i64::try_from(found.len()).unwrap_or(i64::MAX) < ORDERS_AT_ONCE
}
