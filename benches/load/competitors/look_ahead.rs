//! A look-ahead poller: loads the deadlines of the next seconds into a timer and closes each order on time with the
//! worker's own statement, in the worker's batch size. No broker at all.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use order_timeout::Settings;
use order_timeout::config::WorkerSettings;
use order_timeout::mapping::default_tables;
use order_timeout::postgres::Database;
use order_timeout_core::order::Timestamp;
use sqlx::PgConnection;
use time::OffsetDateTime;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use uuid::Uuid;

use super::is_cut_short;

/// How often deadlines are loaded.
const EVERY: Duration = Duration::from_secs(5);
/// How far ahead deadlines are loaded: twice the interval, so that a load may be late.
const AHEAD: Duration = Duration::from_secs(10);

pub async fn run(database: Database, closers: u32) -> anyhow::Result<()> {
    let timer = Arc::new(Timer::new(&Settings::defaults().worker));
    let mut running = JoinSet::new();
    running.spawn(load(database.clone(), timer.clone()));
    for _ in 0..closers {
        running.spawn(close(database.clone(), timer.clone()));
    }
    while let Some(ended) = running.join_next().await {
        ended??;
    }
    Ok(())
}

/// Deadlines in order.
struct Timer {
    waiting: Mutex<BTreeSet<(Timestamp, Uuid)>>,
    loaded: Notify,
    /// The worker's: both send ids to the same statement, so a good batch for one is good for the other.
    batch_size: usize,
    /// The worker's too. Both know in advance which order is due next.
    linger: Duration,
}

impl Timer {
    fn new(worker: &WorkerSettings) -> Self {
        let (waiting, loaded) = Default::default();
        Self { waiting, loaded, batch_size: worker.batch_size, linger: worker.linger }
    }

    /// Orders that are due, or else when to check again.
    fn take_due(&self, now: Timestamp) -> Result<Vec<Uuid>, Option<Timestamp>> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut due = Vec::new();
        while due.len() < self.batch_size && waiting.first().is_some_and(|(deadline, _)| *deadline <= now) {
            due.extend(waiting.pop_first().map(|(_, id)| id));
        }
        if due.is_empty() { Err(self.next_batch_at(&waiting)) } else { Ok(due) }
    }

    /// The last deadline of the next batch: as in the worker, a single order does not wait for others.
    fn next_batch_at(&self, waiting: &BTreeSet<(Timestamp, Uuid)>) -> Option<Timestamp> {
        let (first, _) = waiting.first()?;
        let together = waiting.range(..=(*first + self.linger, Uuid::max()));
        together.take(self.batch_size).last().map(|(deadline, _)| *deadline)
    }
}

async fn load(database: Database, timer: Arc<Timer>) -> anyhow::Result<()> {
    let mut connection = database.connection().await?;
    let mut ticks = tokio::time::interval(EVERY);
    loop {
        ticks.tick().await;
        // Orders being closed may be loaded again: the statement finds them closed.
        let rows: Vec<(Uuid, OffsetDateTime)> = sqlx::query_as(
            "SELECT id, expires_at FROM orders WHERE status = 'unpaid' AND expires_at <= now() + make_interval(secs => $1)",
        )
        .bind(AHEAD.as_secs_f64())
        .fetch_all(&mut *connection)
        .await?;
        let entries = rows.into_iter().map(|(id, deadline)| (Timestamp::from(deadline), id));
        timer.waiting.lock().unwrap_or_else(PoisonError::into_inner).extend(entries);
        timer.loaded.notify_waiters();
    }
}

async fn close(database: Database, timer: Arc<Timer>) -> anyhow::Result<()> {
    let mut connection = database.connection().await?;
    loop {
        // Registered before the check, so that no load is missed.
        let loaded = timer.loaded.notified();
        match timer.take_due(Timestamp::now_by_local_clock()) {
            Ok(due) => close_batch(&mut connection, &due).await?,
            Err(next) => {
                let wait = next.map_or(EVERY, |next| next.since(Timestamp::now_by_local_clock()));
                let _loaded_or_due = tokio::time::timeout(wait, loaded).await;
            }
        }
    }
}

async fn close_batch(connection: &mut PgConnection, due: &[Uuid]) -> sqlx::Result<()> {
    let ids: Vec<String> = due.iter().map(Uuid::to_string).collect();
    loop {
        match sqlx::query(&*default_tables::rendered().close)
            .bind(&ids)
            .bind("sweep")
            .bind(true)
            .bind(false)
            .fetch_all(&mut *connection)
            .await
        {
            Err(error) if is_cut_short(&error) => {}
            answer => return answer.map(drop),
        }
    }
}
