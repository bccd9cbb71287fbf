//! A plain poller: asks Postgres again and again which orders are overdue, and closes them in the same statement.

use std::time::Duration;

use sqlx::PgPool;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::BATCH_SIZE;

/// The close of `sql/close.sql`, but for how the orders are found.
const CLOSE_OVERDUE: &str = include_str!("poller.sql");

pub async fn run(pool: PgPool, loops: u32, every: Duration) -> anyhow::Result<()> {
    let mut running = JoinSet::new();
    for _ in 0..loops {
        running.spawn(poll(pool.clone(), every));
    }
    while let Some(ended) = running.join_next().await {
        ended??;
    }
    Ok(())
}

async fn poll(pool: PgPool, every: Duration) -> anyhow::Result<()> {
    let mut connection = pool.acquire().await?;
    let limit = i64::try_from(BATCH_SIZE)?;
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // While batches are full there is more: no sleep.
        while sqlx::query_scalar::<_, i64>(CLOSE_OVERDUE).bind(limit).fetch_one(&mut *connection).await? == limit {}
    }
}
