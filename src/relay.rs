//! From an outbox table to the broker: what stands there unsent is published, confirmed, and only then marked as sent.
//!
//! At least once: a crash between confirm and mark sends a message again. One relay at a time for each schema, by an
//! advisory lock. No transaction is open while the broker is waited for. What a row means is its outbox's business.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Postgres, Row};
use tracing::{debug, warn};
use uuid::Uuid;

use crate::confirm::{ConfirmedPublisher, NotConfirmed, Outgoing};
use crate::database::{self, Database, Trouble, trouble, why};

/// The upper half of the number of the relay's advisory lock, "otim" as a number, so that a shop's own locks are not
/// met. The lower half is the outbox table's, for several schemas of one database each need a relay.
const RELAY_LOCK: i64 = 0x6f74_696d << 32;
/// How long the server keeps the lock for a worker that it does not hear from: one whose host has vanished, or that was
/// halted. The lock's connection speaks each second, but not while the broker keeps a round waiting.
const LOCK_OUTLIVES_ITS_WORKER: Duration = Duration::from_secs(15);
/// How long the connection that holds the lock may take to answer before it counts as lost.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// How long the lock is taken for ours without asking. Two relays for so long send some messages twice.
const LOCK_TRUSTED_FOR: Duration = Duration::from_secs(1);
/// How long a row is left out that was sent and that somebody keeps locked.
const LEAVES_LOCKED_ROWS_FOR: Duration = Duration::from_secs(30);
/// Rows deleted by one statement.
const FORGOTTEN_AT_ONCE: u64 = 10_000;

/// The statements of one outbox.
#[derive(Debug, Clone, Copy)]
pub struct OutboxSql {
    /// `$1` limit, `$2` ids to leave out; returns `id uuid`, `found bigint` and whatever a message is made of, oldest first.
    /// Of as many as were found within the limit it may leave out the last, where they are too large to go together.
    pub unsent: &'static str,
    /// Returns `age_s` and `last_sent_s`: how many seconds ago the oldest unsent row was written and a row was last sent, as
    /// `float8`; null if there is none.
    pub backlog: &'static str,
    /// `$1` ids.
    pub mark_sent: &'static str,
    /// `$1` ids; leaves out those that somebody else keeps locked, and returns the others' `id`.
    pub mark_free: &'static str,
    /// `$1` seconds since they were sent, `$2` limit.
    pub forget: &'static str,
}

/// The statements of the outbox in a table, which differ in what a message is made of alone.
macro_rules! outbox_sql {
    ($table:literal, unsent: $unsent:literal) => {
        $crate::relay::OutboxSql {
            unsent: $unsent,
            // The first entry of the index of the unsent, and the last one of the index of the sent.
            backlog: concat!(
                "SELECT extract(epoch FROM clock_timestamp() - (SELECT min(created_at) FROM ",
                $table,
                " WHERE sent_at IS NULL))::float8 AS age_s,
                 extract(epoch FROM clock_timestamp() - (SELECT max(sent_at) FROM ",
                $table,
                " WHERE sent_at IS NOT NULL))::float8 AS last_sent_s"
            ),
            // By primary key and nothing else: `sent_at IS NULL` would let the planner walk the index of the unsent.
            mark_sent: concat!("UPDATE ", $table, " SET sent_at = clock_timestamp() WHERE id = ANY ($1)"),
            mark_free: concat!(
                "UPDATE ",
                $table,
                " SET sent_at = clock_timestamp() WHERE id IN (SELECT id FROM ",
                $table,
                " WHERE id = ANY ($1) FOR NO KEY UPDATE SKIP LOCKED) RETURNING id"
            ),
            // statement_timestamp(): a volatile function could not bound an index scan.
            forget: concat!(
                "DELETE FROM ",
                $table,
                " WHERE id IN (SELECT id FROM ",
                $table,
                " WHERE sent_at < statement_timestamp() - make_interval(secs => $1) LIMIT $2)"
            ),
        }
    };
}
pub(crate) use outbox_sql;

/// Why a round came to nothing. The rows stay in their outbox.
#[derive(Debug, thiserror::Error)]
pub enum NotRelayed {
    #[error("an outbox cannot be read or written: {}", why(.0))]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    Broker(#[from] NotConfirmed),
}

impl NotRelayed {
    /// Whether the database has not said anything at all.
    #[must_use]
    pub fn is_unanswered(&self) -> bool {
        matches!(self, Self::Database(error) if error.as_database_error().is_none())
    }

    /// Whether the database is of no use at all, rather than this outbox.
    #[must_use]
    pub fn is_of_the_whole_database(&self) -> bool {
        matches!(self, Self::Database(error) if trouble(error) == Trouble::Away)
    }

    /// The cause alone.
    #[must_use]
    pub fn cause(&self) -> String {
        match self {
            Self::Database(error) => why(error),
            Self::Broker(fault) => fault.to_string(),
        }
    }

    /// Whether the database accepts no writes, so that what was sent cannot be marked.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        matches!(self, Self::Database(error) if database::is_read_only(error))
    }
}

/// What waits in an outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backlog {
    /// How long the oldest unsent row has been waiting; nothing if none is.
    pub age: Duration,
    /// How long ago a row was last sent, of those that are still there.
    pub last_sent: Option<Duration>,
}

/// What came of one batch.
#[derive(Debug, Default)]
pub struct Relayed {
    /// Confirmed and marked.
    pub sent: usize,
    /// Marked without being sent.
    pub dropped: usize,
    /// Not confirmed: they stay for the next round.
    pub refused: usize,
    /// Why the first of those was not.
    pub fault: Option<NotConfirmed>,
    /// The batch was full: there is more, or may be.
    pub more: bool,
}

impl Relayed {
    /// How many rows need not be looked at again.
    ///
    /// # Errors
    /// [`NotRelayed`] if messages were to be sent and not one was.
    pub fn settled(self) -> Result<usize, NotRelayed> {
        let settled = self.sent + self.dropped;
        match self.fault {
            Some(fault) if self.sent == 0 => Err(fault.into()),
            // Those behind a few that are refused must not wait for them.
            Some(fault) => {
                debug!(%fault, "part of an outbox could not be sent; the rest goes on");
                Ok(settled)
            }
            None => Ok(settled),
        }
    }
}

/// Publishes what stands in one outbox.
#[derive(Debug)]
pub struct Outbox {
    database: Database,
    confirmed: ConfirmedPublisher,
    sql: OutboxSql,
    batch_size: usize,
    keep: Duration,
    /// Rows that were sent and could not be marked, until when they are left out.
    set_aside: Vec<(Uuid, Instant)>,
}

impl Outbox {
    /// `batch_size`: rows sent before their confirms are awaited. `keep`: how long rows stay once they are sent.
    #[must_use]
    pub fn new(
        database: Database,
        confirmed: ConfirmedPublisher,
        sql: OutboxSql,
        batch_size: usize,
        keep: Duration,
    ) -> Self {
        Self { database, confirmed, sql, batch_size, keep, set_aside: Vec::new() }
    }

    /// Sends one batch. A row for which `message` says `None` is marked without being sent. One that
    /// the broker refuses stays for the next round; the others are marked.
    ///
    /// # Errors
    /// [`NotRelayed::Database`]; what was confirmed may then be sent again.
    pub async fn round(
        &mut self,
        message: impl Fn(&PgRow) -> Result<Option<Outgoing>, sqlx::Error>,
    ) -> Result<Relayed, NotRelayed> {
        self.set_aside.retain(|(_, until)| *until > Instant::now());
        let left_out: Vec<Uuid> = self.set_aside.iter().map(|(id, _)| *id).collect();
        let limit = i64::try_from(self.batch_size).unwrap_or(i64::MAX);
        let select = sqlx::query(self.sql.unsent).bind(limit).bind(left_out);
        let unsent = self.database.run(async |connection| select.fetch_all(connection).await).await?;
        let (mut settled, mut ids, mut messages) = (Vec::new(), Vec::new(), Vec::new());
        for row in &unsent {
            let id: Uuid = row.try_get("id")?;
            match message(row)? {
                Some(message) => {
                    ids.push(id);
                    messages.push(message);
                }
                None => settled.push(id),
            }
        }
        let answers = self.confirmed.publish_all(messages).await;
        let dropped = settled.len();
        settled.extend(ids.iter().zip(&answers).filter(|(_, answer)| answer.is_ok()).map(|(id, _)| *id));
        let refused = answers.iter().filter(|answer| answer.is_err()).count();
        let sent = self.mark_sent(&settled).await?.saturating_sub(dropped);
        let found: i64 = unsent.first().map_or(Ok(0), |row| row.try_get("found"))?;
        let more = found >= limit || usize::try_from(found).is_ok_and(|found| found > unsent.len());
        Ok(Relayed { sent, dropped, refused, fault: answers.into_iter().find_map(Result::err), more })
    }

    /// How long the oldest unsent row has been waiting, and when a row was last sent.
    ///
    /// # Errors
    /// [`NotRelayed::Database`].
    pub async fn backlog(&self) -> Result<Backlog, NotRelayed> {
        let select = sqlx::query(self.sql.backlog);
        let row = self.database.run(async |connection| select.fetch_one(connection).await).await?;
        // Negative if the server's clock was set back.
        let duration = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let (age_s, last_sent_s): (Option<f64>, Option<f64>) = (row.try_get("age_s")?, row.try_get("last_sent_s")?);
        Ok(Backlog { age: age_s.map_or(Duration::ZERO, duration), last_sent: last_sent_s.map(duration) })
    }

    /// Returns how many are marked now.
    async fn mark_sent(&mut self, ids: &[Uuid]) -> Result<usize, sqlx::Error> {
        if ids.is_empty() {
            return Ok(0);
        }
        let update = sqlx::query(self.sql.mark_sent).bind(ids);
        match self.database.run(async |connection| update.execute(connection).await).await {
            Err(error) if trouble(&error) == Trouble::Locked => self.mark_free(ids).await,
            marked => marked.map(|_| ids.len()),
        }
    }

    /// One row that somebody keeps locked must not have all of them sent again, and again.
    async fn mark_free(&mut self, ids: &[Uuid]) -> Result<usize, sqlx::Error> {
        let update = sqlx::query_scalar(self.sql.mark_free).bind(ids);
        let marked: Vec<Uuid> = self.database.run(async |connection| update.fetch_all(connection).await).await?;
        // Whoever kept them may have let go meanwhile.
        if marked.len() == ids.len() {
            return Ok(marked.len());
        }
        let until = Instant::now() + LEAVES_LOCKED_ROWS_FOR;
        let marked: HashSet<Uuid> = marked.into_iter().collect();
        self.set_aside.extend(ids.iter().filter(|id| !marked.contains(id)).map(|id| (*id, until)));
        let (rows, again_in_s) = (self.set_aside.len(), LEAVES_LOCKED_ROWS_FOR.as_secs());
        warn!(
            rows,
            again_in_s,
            "sent rows of an outbox cannot be marked because somebody keeps them locked; they are sent again"
        );
        Ok(marked.len())
    }

    /// Deletes some of what was sent long enough ago; returns whether there is more.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn forget_old(&self) -> Result<bool, sqlx::Error> {
        let delete = sqlx::query(self.sql.forget)
            .bind(self.keep.as_secs_f64())
            .bind(i64::try_from(FORGOTTEN_AT_ONCE).unwrap_or(i64::MAX));
        let deleted = self.database.run(async |connection| delete.execute(connection).await).await?;
        Ok(deleted.rows_affected() >= FORGOTTEN_AT_ONCE)
    }
}

/// The right to relay: one worker has it at a time.
#[derive(Debug)]
pub struct RelayLock {
    database: Database,
    held: Option<PoolConnection<Postgres>>,
    /// When the held connection last answered.
    answered: Instant,
}

impl RelayLock {
    #[must_use]
    pub fn new(database: Database) -> Self {
        Self { database, held: None, answered: Instant::now() }
    }

    /// Whether this worker is the relay. The lock lives as long as its connection, so a relay that dies hands over by
    /// itself. No worker is the relay of a database that accepts no writes: what it sent could not be marked, and a standby
    /// has locks of its own, so the primary's relay would send the same.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn is_ours(&mut self) -> Result<bool, sqlx::Error> {
        if let Some(held) = &mut self.held {
            if self.answered.elapsed() < LOCK_TRUSTED_FOR {
                return Ok(true);
            }
            let answer = tokio::time::timeout(LOCK_PATIENCE, sqlx::Connection::ping(&mut **held)).await;
            if matches!(answer, Ok(Ok(()))) {
                self.answered = Instant::now();
                return Ok(true);
            }
            warn!("the connection that held the relay's lock is gone; asking for the lock again");
            self.let_go();
        }
        let mut connection = self.database.connection().await?;
        let answer = tokio::time::timeout(LOCK_PATIENCE, ask_for_lock(&mut connection)).await;
        // Not returned to the pool unless it is certain that it does not hold the lock.
        let Ok(Ok(is_ours)) = answer else {
            connection.close_on_drop();
            return answer.unwrap_or_else(|_| Err(self.database.no_answer_within(LOCK_PATIENCE)));
        };
        if is_ours {
            debug!("this worker relays the outboxes");
            self.held = Some(connection);
            self.answered = Instant::now();
        }
        Ok(is_ours)
    }

    /// Lets another worker relay.
    pub async fn resign(&mut self) {
        if let Some(connection) = self.held.take() {
            // Closed rather than returned to the pool: the session's end releases the lock.
            let _answered_or_given_up = tokio::time::timeout(LOCK_PATIENCE, connection.close()).await;
        }
    }

    /// A connection that is worth no goodbye.
    fn let_go(&mut self) {
        if let Some(mut connection) = self.held.take() {
            connection.close_on_drop();
        }
    }
}

async fn ask_for_lock(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let is_ours = sqlx::query_scalar(
        "SELECT CASE WHEN current_setting('transaction_read_only') = 'on' THEN false
                     ELSE pg_try_advisory_lock($1 | 'event_outbox'::regclass::oid::bigint) END",
    )
    .bind(RELAY_LOCK)
    .fetch_one(&mut *connection)
    .await?;
    if is_ours {
        // Selected rather than set: the setting is there since PostgreSQL 14, and before that keep-alive must do.
        sqlx::query("SELECT set_config(name, $1, false) FROM pg_settings WHERE name = 'idle_session_timeout'")
            .bind(LOCK_OUTLIVES_ITS_WORKER.as_millis().to_string())
            .execute(connection)
            .await?;
    }
    Ok(is_ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_that_sends_nothing_and_is_refused_is_a_failure_whatever_it_leaves_out() {
        let round = |sent, dropped, fault| Relayed { sent, dropped, refused: 1, fault, more: false }.settled().is_err();
        assert!(round(0, 7, Some(NotConfirmed::Blocked)));
        assert!(!round(1, 7, Some(NotConfirmed::Blocked)), "those behind it go on");
        assert!(!round(0, 7, None));
    }
}
