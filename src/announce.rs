//! Step 6, ANNOUNCE: events from the outbox to `order.events`, confirmed, then marked as sent.
//!
//! At least once: a crash between confirm and mark sends an event again, under the same message id. One relay at a
//! time, by an advisory lock. No transaction is open while the broker is waited for.

use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::{PgPool, Postgres, Row};
use tracing::{debug, warn};
use uuid::Uuid;

use crate::confirm::{ConfirmedPublisher, NotConfirmed, Outgoing};
use crate::message::CONTENT_TYPE;
use crate::topology::Names;

/// Which advisory lock the relay takes: "otim" and "even" as numbers, so that a shop's own locks are not met.
const RELAY_LOCK: (i32, i32) = (0x6f74_696d, 0x6576_656e);

/// Sends what stands in `event_outbox`.
#[derive(Debug)]
pub struct Announcer {
    pool: PgPool,
    confirmed: ConfirmedPublisher,
    exchange: String,
    batch_size: i64,
    keep: Duration,
    lock: Option<PoolConnection<Postgres>>,
}

/// Why a round of announcing came to nothing. The events stay in the outbox.
#[derive(Debug, thiserror::Error)]
pub enum NotAnnounced {
    #[error("the outbox cannot be read or written: {0}")]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    Broker(#[from] NotConfirmed),
}

/// What a round did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Round {
    /// So many events were sent; there may be more.
    Sent(usize),
    /// There was nothing to send.
    Empty,
    /// Another worker is the relay.
    NotOurs,
}

impl Announcer {
    #[must_use]
    pub fn new(pool: PgPool, confirmed: ConfirmedPublisher, names: &Names, batch_size: usize, keep: Duration) -> Self {
        let batch_size = i64::try_from(batch_size).unwrap_or(i64::MAX);
        Self { pool, confirmed, exchange: names.events(), batch_size, keep, lock: None }
    }

    /// Sends one batch. An event that the broker refuses stays for the next round; the others are marked.
    ///
    /// # Errors
    /// [`NotAnnounced`]; whatever was confirmed before is marked all the same.
    pub async fn round(&mut self) -> Result<Round, NotAnnounced> {
        if !self.is_relay().await? {
            return Ok(Round::NotOurs);
        }
        let unsent = sqlx::query(
            "SELECT id, routing_key, type, payload::text AS payload, created_at FROM event_outbox
             WHERE sent_at IS NULL ORDER BY created_at, id LIMIT $1",
        )
        .bind(self.batch_size)
        .fetch_all(&self.pool)
        .await?;
        if unsent.is_empty() {
            return Ok(Round::Empty);
        }
        let ids: Vec<Uuid> = unsent.iter().map(|row| row.try_get("id")).collect::<Result<_, _>>()?;
        let messages = unsent.iter().map(|row| self.message(row)).collect::<Result<_, sqlx::Error>>()?;
        let answers = self.confirmed.publish_all(messages).await;
        let sent: Vec<Uuid> =
            ids.iter().zip(&answers).filter(|(_, answer)| answer.is_ok()).map(|(id, _)| *id).collect();
        sqlx::query("UPDATE event_outbox SET sent_at = clock_timestamp() WHERE id = ANY ($1) AND sent_at IS NULL")
            .bind(&sent)
            .execute(&self.pool)
            .await?;
        match answers.into_iter().find_map(Result::err) {
            Some(fault) => Err(fault.into()),
            None => Ok(Round::Sent(sent.len())),
        }
    }

    /// Deletes what was sent long enough ago.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn forget_old(&mut self) -> Result<u64, NotAnnounced> {
        if self.lock.is_none() {
            return Ok(0);
        }
        let deleted = sqlx::query(
            "DELETE FROM event_outbox WHERE id IN
                 (SELECT id FROM event_outbox WHERE sent_at < clock_timestamp() - make_interval(secs => $1) LIMIT 10000)",
        )
        .bind(self.keep.as_secs_f64())
        .execute(&self.pool)
        .await?;
        Ok(deleted.rows_affected())
    }

    /// The lock lives as long as its connection, so a relay that dies hands over by itself.
    async fn is_relay(&mut self) -> Result<bool, sqlx::Error> {
        if let Some(held) = &mut self.lock {
            if sqlx::Connection::ping(&mut **held).await.is_ok() {
                return Ok(true);
            }
            warn!("the connection that held the relay's lock is gone; asking for the lock again");
            self.lock = None;
        }
        let mut connection = self.pool.acquire().await?;
        let is_ours: bool = sqlx::query_scalar("SELECT pg_try_advisory_lock($1, $2)")
            .bind(RELAY_LOCK.0)
            .bind(RELAY_LOCK.1)
            .fetch_one(&mut *connection)
            .await?;
        if is_ours {
            debug!("this worker announces");
            self.lock = Some(connection);
        }
        Ok(is_ours)
    }

    /// Lets another worker announce.
    pub async fn resign(&mut self) {
        if let Some(connection) = self.lock.take() {
            // Closed rather than returned to the pool: the session's end releases the lock.
            let _ = connection.close().await;
        }
    }

    fn message(&self, row: &sqlx::postgres::PgRow) -> Result<Outgoing, sqlx::Error> {
        let id: Uuid = row.try_get("id")?;
        let created_at: time::OffsetDateTime = row.try_get("created_at")?;
        let payload: String = row.try_get("payload")?;
        Ok(Outgoing {
            exchange: self.exchange.clone(),
            routing_key: row.try_get("routing_key")?,
            body: payload.into_bytes(),
            message_id: id.to_string(),
            message_type: row.try_get("type")?,
            content_type: CONTENT_TYPE,
            timestamp_s: u64::try_from(created_at.unix_timestamp()).unwrap_or(0),
            ttl: None,
            headers: Vec::new(),
            // Nobody need be listening.
            mandatory: false,
        })
    }
}
