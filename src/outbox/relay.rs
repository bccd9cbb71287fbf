//! From an outbox table to the broker, a webhook, or a channel of Postgres: unsent rows are sent, confirmed, and only then
//! marked as sent.
//!
//! At least once: a crash between confirm and mark sends a message again. One relay at a time for each schema, by an
//! advisory lock. No transaction is open while the broker confirms. What a row means is defined by its outbox.
//!
//! A message that the broker refuses individually waits in its row for a time that grows with each refusal; the messages
//! behind it are sent. `pace.rs` limits how many refused messages are retried at a time.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use order_timeout_amqp::publisher::Outgoing;
use order_timeout_core::with_causes;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row};
use tracing::{debug, warn};
use uuid::Uuid;

use super::destination::{Destination, SendError};
use super::pace::Pace;
use super::traced::TracedBatch;
use crate::observe::traces::{Step, Traces};
use crate::postgres::{self, Database, ErrorClass, Lease, classify, one_line};

/// The upper half of the number of the relay's advisory lock, "otim" as a number, so that it does
/// not collide with a shop's own locks. The lower half is the outbox table's oid, because each schema of a database needs a
/// relay.
const RELAY_LOCK: i64 = 0x6f74_696d << 32;
/// How long the server keeps the lock of a silent worker, whose host has vanished or which was halted. The lock's
/// connection is used each second, but not while a round waits for the broker.
const LOCK_OUTLIVES_ITS_WORKER: Duration = Duration::from_secs(15);
/// How long the connection that holds the lock may take to answer before it counts as lost.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the lock counts as held without asking. If two workers relay for so long, some messages are sent twice.
const LOCK_TRUSTED_FOR: Duration = Duration::from_secs(1);
/// How long a row that was sent and is locked by another session is skipped.
const LEAVES_LOCKED_ROWS_FOR: Duration = Duration::from_secs(30);
/// A receiver that asks for a longer pause gets this one: the longest that a refused event has anyway.
const LONGEST_ASKED_PAUSE: Duration = Duration::from_secs(300);
/// Rows deleted by one statement.
const FORGOTTEN_AT_ONCE: u64 = 10_000;

/// What one outbox has of its own. The columns that every outbox has are read and written here.
#[derive(Debug, Clone, Copy)]
pub struct OutboxTable {
    /// As the statements name it.
    pub name: &'static str,
    /// `$1` limit of rows that were never refused, `$2` ids to skip, `$3` limit of refused rows whose pause is over;
    /// returns `id uuid`, `refusals int`, `found bigint`, `now timestamptz`, `kind text`, `order_id text` (may be null) and the
    /// columns of a message, refused rows first, then the oldest. It may omit the last of the found rows if they are too large for one batch.
    pub unsent: &'static str,
    /// How long a message waits after its first refusal, its second, and so on, in seconds; then always the last value.
    pub pauses_s: &'static [f64],
    /// Whether refused messages are retried a few at a time, because other queues get a copy with each try.
    pub is_paced: bool,
}

impl OutboxTable {
    /// A statement on this table, with `{table}` for its name: safe, because the name is a constant of this crate.
    fn sql(&self, statement: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(statement.replace("{table}", self.name))
    }
}

/// Why a round failed. The rows stay in their outbox.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// The database refused a statement, or is unavailable.
    #[error("an outbox cannot be read or written: {}", one_line(.0))]
    Database(sqlx::Error),
    /// The broker did not confirm a message, or the webhook did not accept an event.
    #[error(transparent)]
    Send(#[from] SendError),
}

// Not `#[from]`, which would make it the source as well: the sentence contains the database's words on one line.
impl From<sqlx::Error> for RelayError {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

impl RelayError {
    /// Whether the database did not answer.
    #[must_use]
    pub fn is_unanswered(&self) -> bool {
        matches!(self, Self::Database(error) if error.as_database_error().is_none())
    }

    /// Whether the whole database is unusable, and not only this outbox.
    #[must_use]
    pub fn is_of_the_whole_database(&self) -> bool {
        matches!(self, Self::Database(error) if classify(error) == ErrorClass::Away)
    }

    /// The cause, without the sentence.
    #[must_use]
    pub fn cause(&self) -> String {
        match self {
            Self::Database(error) => one_line(error),
            Self::Send(fault) => fault.to_string(),
        }
    }

    /// Whether the database accepts no writes, so that sent rows cannot be marked.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        matches!(self, Self::Database(error) if postgres::is_read_only(error))
    }
}

/// The backlog of an outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backlog {
    /// The age of the oldest unsent row; zero if there is none.
    pub age: Duration,
    /// The same for rows that were never refused.
    pub new_age: Duration,
    /// How long ago a row was last sent, of those that are still in the table.
    pub last_sent: Option<Duration>,
}

/// The result of one batch.
#[derive(Debug, Default)]
pub struct Relayed {
    /// Confirmed and marked.
    pub sent: usize,
    /// Marked without being sent.
    pub dropped: usize,
    /// Not confirmed: they stay; individually refused ones until their pause is over.
    pub refused: usize,
    /// Why the first of those was not confirmed, or why the broker accepts no message at all. In a round with nothing to send
    /// while refused rows wait for their pause: why those were refused.
    pub fault: Option<SendError>,
    /// The batch was full, so there may be more.
    pub more: bool,
}

impl Relayed {
    /// How many rows are done.
    ///
    /// # Errors
    /// [`RelayError`] if messages were to be sent and not one was.
    pub fn settled(self) -> Result<usize, RelayError> {
        let settled = self.sent + self.dropped;
        match self.fault {
            Some(fault) if self.sent == 0 => Err(fault.into()),
            // The messages behind a few refused ones must not wait for them.
            Some(fault) => {
                debug!(
                    fault = with_causes(&fault),
                    "some messages of an outbox were not confirmed; the others were sent"
                );
                Ok(settled)
            }
            None => Ok(settled),
        }
    }
}

/// Publishes the rows of one outbox.
#[derive(Debug)]
pub struct Outbox {
    database: Database,
    destination: Destination,
    table: OutboxTable,
    batch_size: usize,
    keep: Duration,
    /// Rows that were sent or refused and could not be marked, and until when they are skipped.
    set_aside: Vec<(Uuid, Instant)>,
    pace: Pace,
    /// Why messages were refused, until the last of them may be retried.
    backing_off: Option<(SendError, Instant)>,
    traces: Option<(Step, Traces)>,
}

/// A message of one round.
struct Sending {
    id: Uuid,
    /// How often it was refused so far.
    refusals: usize,
}

impl Outbox {
    /// `batch_size`: rows sent before their confirms are awaited. `keep`: how long rows stay once they are sent.
    #[must_use]
    pub(super) fn new(
        database: Database,
        destination: Destination,
        table: OutboxTable,
        batch_size: usize,
        keep: Duration,
    ) -> Self {
        let pace = Pace::new(Instant::now());
        Self {
            database,
            destination,
            table,
            batch_size,
            keep,
            set_aside: Vec::new(),
            pace,
            backing_off: None,
            traces: None,
        }
    }

    /// The database of its table.
    pub(super) fn database(&self) -> &Database {
        &self.database
    }

    /// Records what this outbox sends as spans.
    pub fn trace(&mut self, step: Step, traces: Traces) {
        self.traces = traces.is_on().then_some((step, traces));
    }

    /// Whether what it sends is recorded as spans.
    pub(super) fn is_traced(&self) -> bool {
        self.traces.is_some()
    }

    /// Whether its rows stay, because they have no receiver.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        matches!(self.destination, Destination::Nowhere)
    }

    /// The rows of the next batch, in the columns of [`OutboxTable::unsent`]; none if they stay.
    ///
    /// # Errors
    /// [`RelayError::Database`].
    pub async fn unsent(&mut self) -> Result<Vec<PgRow>, RelayError> {
        if self.is_kept() {
            return Ok(Vec::new());
        }
        let now = Instant::now();
        self.set_aside.retain(|(_, until)| *until > now);
        let left_out: Vec<Uuid> = self.set_aside.iter().map(|(id, _)| *id).collect();
        let limit = i64::try_from(self.batch_size).unwrap_or(i64::MAX);
        let retries = if self.table.is_paced { self.pace.allowance(self.batch_size, now) } else { self.batch_size };
        let retries = i64::try_from(retries).unwrap_or(i64::MAX);
        let select = sqlx::query(self.table.unsent).bind(limit).bind(left_out).bind(retries);
        Ok(self.database.run(async |connection| select.fetch_all(connection).await).await?)
    }

    /// Sends a batch that [`Outbox::unsent`] has returned. A row for which `message` says `None` is marked without being
    /// sent. One that the broker refuses stays until its pause is over; the others are marked.
    ///
    /// # Errors
    /// [`RelayError::Database`]; what was confirmed may then be sent again.
    pub async fn send(
        &mut self,
        unsent: Vec<PgRow>,
        message: impl Fn(&PgRow) -> Result<Option<Outgoing>, sqlx::Error>,
    ) -> Result<Relayed, RelayError> {
        let limit = i64::try_from(self.batch_size).unwrap_or(i64::MAX);
        let (mut settled, mut sending, mut messages) = (Vec::new(), Vec::new(), Vec::new());
        let mut traced = TracedBatch::default();
        let mut never_refused = 0;
        for row in &unsent {
            let (id, refusals): (Uuid, i32) = (row.try_get("id")?, row.try_get("refusals")?);
            never_refused += i64::from(refusals == 0);
            match message(row)? {
                Some(message) => {
                    if let Some((step, _)) = self.traces {
                        traced.note(messages.len(), row, &message, step, self.destination.system())?;
                    }
                    sending.push(Sending { id, refusals: usize::try_from(refusals).unwrap_or(0) });
                    messages.push(message);
                }
                None => settled.push(id),
            }
        }
        let answers = self.destination.send_all(messages).await?;
        if let Some((_, traces)) = &self.traces {
            traced.export(traces, &answers);
        }
        let dropped = settled.len();
        settled.extend(sending.iter().zip(&answers).filter(|(_, answer)| answer.is_ok()).map(|(one, _)| one.id));
        let refused = answers.iter().filter(|answer| answer.is_err()).count();
        // Both, even if one fails: an unmarked row would be sent again.
        let backed_off = self.mark_refused(&sending, &answers).await;
        let sent = self.mark_sent(&settled).await?.saturating_sub(dropped);
        backed_off?;
        let found: i64 = unsent.first().map_or(Ok(0), |row| row.try_get("found"))?;
        let more = never_refused >= limit || usize::try_from(found).is_ok_and(|found| found > unsent.len());
        let is_idle = answers.is_empty() && dropped == 0;
        let fault = worst(answers).or_else(|| self.backing_off.clone().filter(|_| is_idle).map(|(fault, _)| fault));
        Ok(Relayed { sent, dropped, refused, fault, more })
    }

    /// Sets the pause of each individually refused message.
    async fn mark_refused(
        &mut self,
        sending: &[Sending],
        answers: &[Result<(), SendError>],
    ) -> Result<(), sqlx::Error> {
        let now = Instant::now();
        self.backing_off.take_if(|(_, until)| *until <= now);
        let (mut ids, mut pauses_s, mut refused_again) = (Vec::new(), Vec::new(), 0);
        for (one, answer) in sending.iter().zip(answers) {
            let Err(fault) = answer else { continue };
            if !fault.is_message_specific() {
                continue;
            }
            // Up to a quarter more, so that messages that were refused together are retried apart.
            let asked_s = fault.retry_after().unwrap_or_default().min(LONGEST_ASKED_PAUSE).as_secs_f64();
            let pause_s = self.pause_s(one.refusals).max(asked_s) * (1.0 + fastrand::f64() / 4.0);
            let until = now + Duration::from_secs_f64(pause_s);
            if self.backing_off.as_ref().is_none_or(|(_, latest)| *latest < until) {
                self.backing_off = Some((fault.clone(), until));
            }
            refused_again += usize::from(one.refusals > 0);
            ids.push(one.id);
            pauses_s.push(pause_s);
        }
        let taken_again = sending.iter().zip(answers).filter(|(one, answer)| one.refusals > 0 && answer.is_ok());
        self.pace.note(taken_again.count(), refused_again);
        if ids.is_empty() {
            return Ok(());
        }
        // By primary key, as in `mark_sent`, and twice: for the join alone, a plan that was made while the table was empty
        // compares each message with each row.
        let update = self.table.sql(
            "UPDATE {table} SET refusals = refusals + 1, next_attempt_at = clock_timestamp() + make_interval(secs => pause_s)
             FROM unnest($1::uuid[], $2::float8[]) AS refused (refused_id, pause_s)
             WHERE id = refused_id AND id = ANY ($1)",
        );
        let update = sqlx::query(update).bind(&ids).bind(&pauses_s);
        let marked = self.database.run(async |connection| update.execute(connection).await).await;
        if marked.is_err() {
            // Their rows could not be updated; without this, they would be sent ten times a second.
            let until = now + LEAVES_LOCKED_ROWS_FOR;
            self.set_aside.extend(ids.into_iter().map(|id| (id, until)));
        }
        match marked {
            Err(error) if classify(&error) == ErrorClass::Locked => Ok(()),
            marked => marked.map(drop),
        }
    }

    fn pause_s(&self, refusals: usize) -> f64 {
        let pauses_s = self.table.pauses_s;
        pauses_s.get(refusals).or(pauses_s.last()).copied().unwrap_or(1.0)
    }

    /// How many refused rows wait. Updates the pace as well, because a new relay knows of none.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn count_refused(&mut self) -> Result<u64, sqlx::Error> {
        let select = self.table.sql("SELECT count(*) FROM {table} WHERE sent_at IS NULL AND refusals > 0");
        let select = sqlx::query_scalar(select);
        let rows: i64 = self.database.run(async |connection| select.fetch_one(connection).await).await?;
        let rows = u64::try_from(rows).unwrap_or(0);
        self.pace.note_waiting(rows);
        Ok(rows)
    }

    /// The age of the oldest unsent row, and when a row was last sent. No row waits where they stay.
    ///
    /// # Errors
    /// [`RelayError::Database`].
    pub async fn backlog(&self) -> Result<Backlog, RelayError> {
        if self.is_kept() {
            return Ok(Backlog { age: Duration::ZERO, new_age: Duration::ZERO, last_sent: None });
        }
        // The first entry of the index of refused rows, the first of the rows that were never refused, and the last entry of the
        // index of sent rows.
        let select = self.table.sql(
            "SELECT extract(epoch FROM now - least(new, refused))::float8 AS age_s,
                    extract(epoch FROM now - new)::float8 AS new_age_s,
                    extract(epoch FROM now - sent)::float8 AS last_sent_s
             FROM (SELECT clock_timestamp() AS now,
                 (SELECT created_at FROM {table}
                  WHERE sent_at IS NULL AND next_attempt_at = '-infinity' ORDER BY created_at LIMIT 1) AS new,
                 (SELECT min(created_at) FROM {table} WHERE sent_at IS NULL AND refusals > 0) AS refused,
                 (SELECT max(sent_at) FROM {table} WHERE sent_at IS NOT NULL) AS sent) AS found",
        );
        let select = sqlx::query(select);
        let row = self.database.run(async |connection| select.fetch_one(connection).await).await?;
        // Negative if the server's clock was set back.
        let duration = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let read = |column: &str| Ok::<_, sqlx::Error>(row.try_get::<Option<f64>, _>(column)?.map(duration));
        let (age, new_age) = (read("age_s")?.unwrap_or_default(), read("new_age_s")?.unwrap_or_default());
        Ok(Backlog { age, new_age, last_sent: read("last_sent_s")? })
    }

    /// Returns how many rows are marked.
    async fn mark_sent(&mut self, ids: &[Uuid]) -> Result<usize, sqlx::Error> {
        if ids.is_empty() {
            return Ok(0);
        }
        // By primary key and nothing else: `sent_at IS NULL` would let the planner walk the index of the unsent.
        let update = self.table.sql("UPDATE {table} SET sent_at = clock_timestamp() WHERE id = ANY ($1)");
        let update = sqlx::query(update).bind(ids);
        match self.database.run(async |connection| update.execute(connection).await).await {
            Err(error) if classify(&error) == ErrorClass::Locked => self.mark_free(ids).await,
            marked => marked.map(|_| ids.len()),
        }
    }

    /// Marks the unlocked rows: one row that another session keeps locked must not cause all rows to be sent again.
    async fn mark_free(&mut self, ids: &[Uuid]) -> Result<usize, sqlx::Error> {
        let update = self.table.sql(
            "UPDATE {table} SET sent_at = clock_timestamp() WHERE id = ANY (ARRAY(
                 SELECT id FROM {table} WHERE id = ANY ($1) FOR NO KEY UPDATE SKIP LOCKED)) RETURNING id",
        );
        let update = sqlx::query_scalar(update).bind(ids);
        let marked: Vec<Uuid> = self.database.run(async |connection| update.fetch_all(connection).await).await?;
        // The other session may have released them meanwhile.
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
            "sent rows of an outbox cannot be marked because another session keeps them locked; they will be sent again"
        );
        Ok(marked.len())
    }

    /// Deletes some of the rows that were sent long enough ago, and ends pauses that a clock change has made too long;
    /// returns whether there are more to delete.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn forget_old(&self) -> Result<bool, sqlx::Error> {
        // A pause ends by the server's clock: a change of the clock may have made it longer than any pause is.
        let end = self.table.sql(
            "UPDATE {table} SET next_attempt_at = clock_timestamp()
             WHERE sent_at IS NULL AND next_attempt_at > statement_timestamp() + interval '10 min'",
        );
        let end = sqlx::query(end);
        self.database.run(async |connection| end.execute(connection).await).await?;
        // statement_timestamp(): a volatile function could not bound an index scan.
        let delete = self.table.sql(
            "DELETE FROM {table} WHERE id = ANY (ARRAY(
                 SELECT id FROM {table} WHERE sent_at < statement_timestamp() - make_interval(secs => $1) LIMIT $2))",
        );
        let delete = sqlx::query(delete)
            .bind(self.keep.as_secs_f64())
            .bind(i64::try_from(FORGOTTEN_AT_ONCE).unwrap_or(i64::MAX));
        let deleted = self.database.run(async |connection| delete.execute(connection).await).await?;
        Ok(deleted.rows_affected() >= FORGOTTEN_AT_ONCE)
    }
}

/// The first error that is not about its message alone, or else the first.
fn worst(answers: Vec<Result<(), SendError>>) -> Option<SendError> {
    let mut faults = answers.into_iter().filter_map(Result::err);
    let first = faults.next()?;
    if !first.is_message_specific() {
        return Some(first);
    }
    Some(faults.find(|fault| !fault.is_message_specific()).unwrap_or(first))
}

/// The lock of the relay: one worker holds it at a time.
#[derive(Debug)]
pub struct LeaderLock {
    database: Database,
    held: Option<Lease>,
    /// When the connection that holds the lock last answered.
    answered: Instant,
}

impl LeaderLock {
    /// Not acquired yet.
    #[must_use]
    pub fn new(database: Database) -> Self {
        Self { database, held: None, answered: Instant::now() }
    }

    /// Whether this worker is the leader. The lock ends with its connection, so the lock of a dead worker is released. There
    /// is no leader for a database that accepts no writes: sent rows could not be marked, and a standby has locks of its
    /// own, so the primary's leader would send the same rows.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn is_ours(&mut self) -> Result<bool, sqlx::Error> {
        if let Some(held) = &mut self.held {
            if self.answered.elapsed() < LOCK_TRUSTED_FOR {
                return Ok(true);
            }
            let answer = tokio::time::timeout(LOCK_TIMEOUT, sqlx::Connection::ping(&mut **held)).await;
            if matches!(answer, Ok(Ok(()))) {
                self.answered = Instant::now();
                return Ok(true);
            }
            warn!("lost the connection that held the relay lock; requesting the lock again");
            self.held = None;
        }
        let mut connection = self.database.connection().await?;
        let answer = tokio::time::timeout(LOCK_TIMEOUT, connection.work(ask_for_lock)).await;
        // Returned to the pool only if it certainly does not hold the lock.
        let Ok(Ok(is_ours)) = answer else {
            connection.close_on_drop();
            return answer.unwrap_or_else(|_| Err(self.database.no_answer_within(LOCK_TIMEOUT)));
        };
        if is_ours {
            debug!("acquired the relay lock; this worker empties the outboxes");
            // Never returned: the lock ends with its session.
            connection.close_on_drop();
            self.held = Some(connection);
            self.answered = Instant::now();
        }
        Ok(is_ours)
    }

    /// Releases the lock, so that another worker can relay.
    pub async fn resign(&mut self) {
        if let Some(connection) = self.held.take() {
            // Closed rather than returned to the pool: the session's end releases the lock.
            let _answered_or_given_up = tokio::time::timeout(LOCK_TIMEOUT, connection.close()).await;
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
        // Through pg_settings, because the setting exists since PostgreSQL 14; before that, keep-alive must do.
        sqlx::query("SELECT set_config(name, $1, false) FROM pg_settings WHERE name = 'idle_session_timeout'")
            .bind(LOCK_OUTLIVES_ITS_WORKER.as_millis().to_string())
            .execute(connection)
            .await?;
    }
    Ok(is_ours)
}

#[cfg(test)]
mod tests {
    use order_timeout_amqp::publisher::PublishError;

    use super::*;

    #[test]
    fn refused_round_without_sends_is_failure() {
        let round = |sent, dropped, fault| Relayed { sent, dropped, refused: 1, fault, more: false }.settled().is_err();
        assert!(round(0, 7, Some(PublishError::Blocked.into())));
        assert!(!round(1, 7, Some(PublishError::Blocked.into())), "those behind it go on");
        assert!(!round(0, 7, None));
    }
}
