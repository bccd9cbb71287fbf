//! Postgres alone: the worker's close statement in batches of the worker's size, on sessions set up like the worker's,
//! over long overdue orders, through the socket; and how long a single small commit takes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use order_timeout::config::DatabaseSettings;
use order_timeout::mapping::default_tables;
use order_timeout::postgres::Database;
use order_timeout_core::order::Timestamp;
use sqlx::PgPool;
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use crate::bench_env::servers::Servers;
use crate::bench_env::{BenchEnv, ledger};
use crate::progress;

/// The best of these counts is used, because the best number of connections depends on the machine.
const CONNECTIONS: [usize; 3] = [1, 2, 4];

/// Orders closed per second.
pub struct PostgresLimit {
    pub by_connections: BTreeMap<usize, f64>,
}

impl PostgresLimit {
    pub fn best(&self) -> f64 {
        self.by_connections.values().copied().fold(0.0, f64::max)
    }
}

pub async fn measure(
    servers: &Servers,
    orders: usize,
    articles: usize,
    batch_size: usize,
) -> anyhow::Result<PostgresLimit> {
    progress::say("measuring the database's own limit");
    let mut by_connections = BTreeMap::new();
    for connections in CONNECTIONS {
        let env = BenchEnv::without_broker(servers, true).await?;
        let overdue = vec![Timestamp::now_by_local_clock() - Duration::from_secs(60); orders];
        let ids: Vec<String> =
            env.fill(&overdue, articles).await?.iter().map(|(id, _)| id.as_str().to_owned()).collect();
        let batches = ids.chunks(batch_size).rev().map(<[String]>::to_vec).collect();
        let took = close_all(&env.settings.database, batches, connections).await?;
        env.ledger(overdue[0]).await?.ensure_kept("Postgres alone")?;
        by_connections.insert(connections, orders as f64 / took.as_secs_f64());
        env.clean_up().await?;
    }
    Ok(PostgresLimit { by_connections })
}

async fn close_all(
    settings: &DatabaseSettings,
    batches: Vec<Vec<String>>,
    connections: usize,
) -> anyhow::Result<Duration> {
    let database = Database::connect(settings, u32::try_from(connections)?).await?;
    let batches = Arc::new(Mutex::new(batches));
    let mut closers = JoinSet::new();
    let mut open = Vec::new();
    for _ in 0..connections {
        let mut connection = database.connection().await?;
        // Prepared before the clock starts, as in a worker.
        sqlx::query(&*default_tables::rendered().close)
            .bind(Vec::<String>::new())
            .bind("alarm")
            .bind(true)
            .bind(false)
            .fetch_all(&mut *connection)
            .await?;
        open.push(connection);
    }
    let began = Instant::now();
    for mut connection in open {
        let batches = batches.clone();
        closers.spawn(async move {
            let next = || batches.lock().unwrap_or_else(PoisonError::into_inner).pop();
            while let Some(batch) = next() {
                sqlx::query(&*default_tables::rendered().close)
                    .bind(batch)
                    .bind("alarm")
                    .bind(true)
                    .bind(false)
                    .fetch_all(&mut *connection)
                    .await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(ended) = closers.join_next().await {
        ended??;
    }
    let took = began.elapsed();
    Ok(took)
}

/// Commits one row repeatedly during a measurement: the cost of any commit on this machine at that time.
///
/// Ends when it is dropped, so that a failing measurement can drop its database.
pub struct CommitProbe {
    probing: AbortOnDropHandle<anyhow::Result<()>>,
    took_us: Arc<Mutex<Histogram<u64>>>,
}

impl CommitProbe {
    const EVERY: Duration = Duration::from_millis(20);

    pub async fn start(pool: PgPool) -> anyhow::Result<Self> {
        sqlx::query("CREATE TABLE commit_probe (n bigint)").execute(&pool).await?;
        sqlx::query("INSERT INTO commit_probe VALUES (0)").execute(&pool).await?;
        let took_us = Arc::new(Mutex::new(ledger::histogram()));
        let probing = AbortOnDropHandle::new(tokio::spawn(Self::probe(pool, took_us.clone())));
        Ok(Self { probing, took_us })
    }

    async fn probe(pool: PgPool, took_us: Arc<Mutex<Histogram<u64>>>) -> anyhow::Result<()> {
        let mut connection = pool.acquire().await?;
        let mut ticks = tokio::time::interval(Self::EVERY);
        loop {
            ticks.tick().await;
            let began = Instant::now();
            sqlx::query("UPDATE commit_probe SET n = n + 1").execute(&mut *connection).await?;
            let us = u64::try_from(began.elapsed().as_micros())?;
            took_us.lock().unwrap_or_else(PoisonError::into_inner).record(us)?;
        }
    }

    /// # Errors
    /// The reason, if it ended early: its values do not cover the rest of the run then.
    pub async fn stop(self) -> anyhow::Result<Histogram<u64>> {
        if self.probing.is_finished() {
            self.probing.await??;
        }
        Ok(self.took_us.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
}
