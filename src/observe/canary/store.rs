//! Records in the database, for all workers, which canaries were sent and which arrived.
//!
//! One row for each path and one for each worker; unlogged tables, so that no commit waits for them. Sends nothing and
//! decides nothing.

use std::time::Duration;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::kind::Kind;
use order_timeout_core::order::Timestamp;
use sqlx::Row;
use time::OffsetDateTime;
use uuid::Uuid;

use super::Path;
use crate::postgres::{Database, moment, one_line};

/// How often a worker records that it recognises canaries.
pub const READER_NOTED_EVERY: Duration = Duration::from_secs(4);
/// A worker without a record for this long does not count: two may be missed. A stopping worker deletes its record.
const READER_FORGOTTEN_AFTER: Duration = Duration::from_secs(12);
/// A canary that is later than this was sent by workers that have stopped since.
const STALE_AFTER: Duration = Duration::from_secs(60);

/// Why the tables could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("the tables of canaries cannot be used: {}", one_line(.0))]
pub struct StoreError(#[from] sqlx::Error);

/// The last canary of one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sent {
    /// The path's name.
    pub path: String,
    /// The queue in which it waits.
    pub queue: String,
    /// When it was sent, by the database's clock.
    pub sent_at: Timestamp,
    /// When it is expected back, by the database's clock.
    pub due_at: Timestamp,
    /// When the first of the consecutive missing canaries was due.
    pub waiting_since: Timestamp,
    /// When it came back, by the database's clock; `None` if it has not yet.
    pub arrived_at: Option<Timestamp>,
}

impl Sent {
    /// Whether it came back.
    #[must_use]
    pub const fn has_arrived(&self) -> bool {
        self.arrived_at.is_some()
    }
}

/// The tables' contents at one time of the database's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// That time.
    pub now: Timestamp,
    /// The last canary of each path.
    pub sent: Vec<Sent>,
    /// Consumers of the processing queues that recognise canaries.
    pub readers: i64,
}

/// The tables `canaries` and `canary_readers`.
#[derive(Debug, Clone)]
pub struct CanaryStore {
    database: Database,
    namespace: String,
    worker: Uuid,
}

impl CanaryStore {
    /// For one more worker. Counted together are the readers of one kind's processing queues.
    #[must_use]
    pub fn new(database: Database, namespace: &str, kind: &Kind) -> Self {
        let namespace = if kind.is_default() { namespace.to_owned() } else { format!("{namespace}/{kind}") };
        Self { database, namespace, worker: Uuid::now_v7() }
    }

    /// # Errors
    /// [`StoreError`].
    pub async fn known(&self, paths: &[String]) -> Result<Known, StoreError> {
        let select = "SELECT path, queue, sent_at, due_at, waiting_since, arrived_at
                      FROM canaries WHERE path = ANY ($1)";
        let readers = "SELECT clock_timestamp() AS now, coalesce(sum(consumers), 0) AS readers
                       FROM canary_readers
                       WHERE namespace = $1 AND seen_at > clock_timestamp() - make_interval(secs => $2)";
        let (rows, readers) = self
            .database
            .run(async |connection| {
                let rows = sqlx::query(select).bind(paths).fetch_all(&mut *connection).await?;
                let readers = sqlx::query(readers).bind(&self.namespace).bind(READER_FORGOTTEN_AFTER.as_secs_f64());
                Ok((rows, readers.fetch_one(connection).await?))
            })
            .await?;
        let sent = rows.iter().map(|row| {
            let [Timestamptz(sent_at), Timestamptz(due_at), Timestamptz(waiting_since)] =
                [row.try_get("sent_at")?, row.try_get("due_at")?, row.try_get("waiting_since")?];
            let (path, queue) = (row.try_get("path")?, row.try_get("queue")?);
            let arrived_at: Option<Timestamptz> = row.try_get("arrived_at")?;
            let arrived_at = arrived_at.map(|Timestamptz(at)| at);
            Ok(Sent { path, queue, sent_at, due_at, waiting_since, arrived_at })
        });
        let sent = sent.collect::<Result<_, sqlx::Error>>()?;
        let now: OffsetDateTime = readers.try_get("now")?;
        Ok(Known { now: moment(now), sent, readers: readers.try_get("readers")? })
    }

    /// Records that a canary of this path is about to be sent, unless another worker has just done so. `is_missed`, for
    /// a slow path: the last did not arrive, which stays recorded until one does.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn claim(
        &self,
        id: Uuid,
        path: &Path,
        queue: &str,
        wait: Duration,
        every: Duration,
        is_missed: bool,
    ) -> Result<bool, StoreError> {
        let claim = sqlx::query(
            "INSERT INTO canaries AS last (path, id, queue, sent_at, due_at, waiting_since)
             SELECT $1, $2, $3, now, now + make_interval(secs => $4), now + make_interval(secs => $4)
             FROM clock_timestamp() AS now
             ON CONFLICT (path) DO UPDATE SET
                 id = EXCLUDED.id, queue = EXCLUDED.queue, sent_at = EXCLUDED.sent_at, due_at = EXCLUDED.due_at,
                 waiting_since = CASE
                     WHEN last.arrived_at IS NULL
                          AND ($9 OR ($7 AND last.due_at > EXCLUDED.sent_at - make_interval(secs => $8)))
                     THEN last.waiting_since ELSE EXCLUDED.due_at END,
                 arrived_at = NULL
             WHERE CASE WHEN last.arrived_at IS NULL THEN last.due_at + make_interval(secs => $6) < EXCLUDED.sent_at
                        ELSE last.sent_at + make_interval(secs => $5) < EXCLUDED.sent_at END",
        );
        let claim = claim
            .bind(&path.name)
            .bind(id)
            .bind(queue)
            .bind(wait.as_secs_f64())
            .bind(every.as_secs_f64())
            .bind(path.given_up_after().as_secs_f64())
            .bind(path.is_quick())
            .bind(STALE_AFTER.as_secs_f64())
            .bind(is_missed && !path.is_quick());
        let claimed = self.database.run(async |connection| claim.execute(connection).await).await?;
        Ok(claimed.rows_affected() > 0)
    }

    /// Removes the claim of a canary that could not be sent.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn release(&self, id: Uuid) -> Result<(), StoreError> {
        let delete = sqlx::query("DELETE FROM canaries WHERE id = $1").bind(id);
        self.database.run(async |connection| delete.execute(connection).await).await?;
        Ok(())
    }

    /// Forgets canaries that have not arrived: after a repair the broker may hold them back for minutes, so their
    /// absence proves nothing.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn forget_unarrived(&self, paths: &[String]) -> Result<(), StoreError> {
        let delete = sqlx::query("DELETE FROM canaries WHERE path = ANY ($1) AND arrived_at IS NULL").bind(paths);
        self.database.run(async |connection| delete.execute(connection).await).await?;
        Ok(())
    }

    /// # Errors
    /// [`StoreError`].
    pub async fn note_arrived(&self, ids: &[Uuid]) -> Result<(), StoreError> {
        let update = sqlx::query(
            "UPDATE canaries SET arrived_at = clock_timestamp() WHERE id = ANY ($1) AND arrived_at IS NULL",
        );
        let update = update.bind(ids);
        self.database.run(async |connection| update.execute(connection).await).await?;
        Ok(())
    }

    /// Records that this worker has stopped consuming.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn forget_reader(&self) -> Result<(), StoreError> {
        let delete = sqlx::query("DELETE FROM canary_readers WHERE worker = $1").bind(self.worker);
        self.database.run(async |connection| delete.execute(connection).await).await?;
        Ok(())
    }

    /// Records the number of this worker's consumers on the processing queues, and deletes rows of workers that are
    /// gone.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn note_reader(&self, consumers: usize) -> Result<(), StoreError> {
        let upsert = "INSERT INTO canary_readers (worker, namespace, consumers, seen_at)
                      VALUES ($1, $2, $3, clock_timestamp())
                      ON CONFLICT (worker) DO UPDATE SET consumers = EXCLUDED.consumers, seen_at = EXCLUDED.seen_at";
        let forget = "DELETE FROM canary_readers WHERE seen_at < clock_timestamp() - interval '1 hour'";
        let consumers = i32::try_from(consumers).unwrap_or(i32::MAX);
        let noted = self
            .database
            .run(async |connection| {
                let upsert = sqlx::query(upsert).bind(self.worker).bind(&self.namespace).bind(consumers);
                upsert.execute(&mut *connection).await?;
                sqlx::query(forget).execute(connection).await
            })
            .await;
        noted?;
        Ok(())
    }
}
