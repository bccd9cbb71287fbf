//! The outboxes of a worker without a broker: events go to listeners through NOTIFY, if a channel is named, and otherwise
//! stay; alarms stay until their deadline, for the day on which there is a broker.
//!
//! Each statement is a transaction of its own that locks what it changes, so that several workers need no leader.

use std::time::Duration;

use sqlx::Row;

use crate::outbox::relay::RelayError;
use crate::postgres::{Database, parked_alarms};

/// NOTIFY refuses payloads of 8000 bytes and more (PostgreSQL documentation, NOTIFY). The rest of the message takes some
/// hundred.
const LONGEST_PAYLOAD_BYTES: i64 = 7_000;
/// Events that are announced by one statement. The server keeps all notifications of a transaction in memory.
const EVENTS_AT_ONCE: i64 = 500;
/// Rows that are marked or deleted by one statement.
const ROWS_AT_ONCE: i64 = 10_000;

/// `$1` channel, `$2` limit, `$3` the longest payload in bytes. An event that is too long is announced without its
/// payload, which is in its row. By primary key, not by a join: a plan that is made while the table is empty compares each
/// event with each row.
pub const NOTIFY: &str = "
WITH due AS (
    SELECT id FROM event_outbox
    WHERE sent_at IS NULL ORDER BY next_attempt_at, created_at, id LIMIT $2 FOR UPDATE SKIP LOCKED),
announced AS (
    UPDATE event_outbox AS event SET sent_at = clock_timestamp() WHERE event.id = ANY (ARRAY(SELECT due.id FROM due))
    RETURNING event.id, event.type, event.routing_key, event.payload, event.created_at)
SELECT pg_notify($1, (jsonb_build_object('id', id, 'type', type, 'routing_key', routing_key)
    || CASE WHEN octet_length(payload::text) <= $3 THEN jsonb_build_object('payload', payload) ELSE '{}' END)::text)
FROM announced ORDER BY created_at, id";

/// `$1` limit. By primary key, as above. An alarm whose deadline has passed is of no use to a broker any more.
const SETTLE_ALARMS: &str = "
UPDATE alarm_outbox SET sent_at = clock_timestamp() WHERE id = ANY (ARRAY(
    SELECT id FROM alarm_outbox WHERE sent_at IS NULL AND deadline < statement_timestamp()
    LIMIT $1 FOR UPDATE SKIP LOCKED))";

/// `$1` seconds since they were sent, `$2` limit.
const FORGET: [&str; 2] = [
    "DELETE FROM event_outbox WHERE id = ANY (ARRAY(
         SELECT id FROM event_outbox WHERE sent_at < statement_timestamp() - make_interval(secs => $1)
         LIMIT $2 FOR UPDATE SKIP LOCKED))",
    "DELETE FROM alarm_outbox WHERE id = ANY (ARRAY(
         SELECT id FROM alarm_outbox WHERE sent_at < statement_timestamp() - make_interval(secs => $1)
         LIMIT $2 FOR UPDATE SKIP LOCKED))",
];

/// The outboxes, and where events go.
#[derive(Debug, Clone)]
pub struct LocalOutboxes {
    database: Database,
    channel: Option<String>,
    keep: Duration,
    keep_parked: Duration,
}

impl LocalOutboxes {
    /// `channel`: that of NOTIFY; `None`: events stay. `keep`: how long rows stay once they are sent. `keep_parked`: how
    /// long parked alarms stay, from a time with a broker; zero: until they are dropped by hand.
    #[must_use]
    pub fn new(database: Database, channel: Option<String>, keep: Duration, keep_parked: Duration) -> Self {
        Self { database, channel, keep, keep_parked }
    }

    /// Announces one batch of events. Returns how many there were, and whether there may be more.
    ///
    /// # Errors
    /// [`RelayError::Database`].
    pub async fn announce(&self) -> Result<(u64, bool), RelayError> {
        let Some(channel) = &self.channel else { return Ok((0, false)) };
        let notify = sqlx::query(NOTIFY).bind(channel).bind(EVENTS_AT_ONCE).bind(LONGEST_PAYLOAD_BYTES);
        let announced = self.database.run(async |connection| notify.fetch_all(connection).await).await?.len() as u64;
        Ok((announced, announced >= EVENTS_AT_ONCE.unsigned_abs()))
    }

    /// Marks alarms whose deadline has passed, and deletes rows that were sent long ago; returns whether there are more.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn clean_up(&self) -> Result<bool, sqlx::Error> {
        let settle = sqlx::query(SETTLE_ALARMS).bind(ROWS_AT_ONCE);
        let mut most = self.database.run(async |connection| settle.execute(connection).await).await?.rows_affected();
        for forget in FORGET {
            let delete = sqlx::query(forget).bind(self.keep.as_secs_f64()).bind(ROWS_AT_ONCE);
            let deleted = self.database.run(async |connection| delete.execute(connection).await).await?;
            most = most.max(deleted.rows_affected());
        }
        let more_parked = match self.keep_parked.is_zero() {
            true => false,
            false => parked_alarms::forget_old(&self.database, self.keep_parked).await?.1,
        };
        Ok(more_parked || most >= ROWS_AT_ONCE.unsigned_abs())
    }

    /// The age of the oldest event that is not announced; zero if there is none, or none is to be.
    ///
    /// # Errors
    /// [`RelayError::Database`].
    pub async fn age(&self) -> Result<Duration, RelayError> {
        if self.channel.is_none() {
            return Ok(Duration::ZERO);
        }
        let select = sqlx::query(
            "SELECT extract(epoch FROM clock_timestamp() - (
                 SELECT created_at FROM event_outbox WHERE sent_at IS NULL
                 ORDER BY next_attempt_at, created_at LIMIT 1))::float8 AS age_s",
        );
        let row = self.database.run(async |connection| select.fetch_one(connection).await).await?;
        let age_s: Option<f64> = row.try_get("age_s")?;
        // Negative if the server's clock was set back.
        Ok(age_s.and_then(|age_s| Duration::try_from_secs_f64(age_s).ok()).unwrap_or_default())
    }
}
