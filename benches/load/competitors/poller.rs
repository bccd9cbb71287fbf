//! A plain poller: queries Postgres repeatedly for overdue orders, and closes them in the same statement.

use std::time::Duration;

use order_timeout::postgres::Database;
use sqlx::PgConnection;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::is_cut_short;

/// The close of `default_close.sql`, except for how the orders are found.
const CLOSE_OVERDUE: &str = include_str!("poller.sql");
/// Orders closed by one statement: a common size for a poller, not tuned like the worker's.
const BATCH_SIZE: i64 = 500;

pub async fn run(database: Database, loops: u32, every: Duration) -> anyhow::Result<()> {
    let mut running = JoinSet::new();
    for _ in 0..loops {
        running.spawn(poll(database.clone(), every));
    }
    while let Some(ended) = running.join_next().await {
        ended??;
    }
    Ok(())
}

async fn poll(database: Database, every: Duration) -> anyhow::Result<()> {
    let mut connection = database.connection().await?;
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // A full batch means that there is more: no sleep.
        while close_overdue(&mut connection).await? == BATCH_SIZE {}
    }
}

async fn close_overdue(connection: &mut PgConnection) -> sqlx::Result<i64> {
    loop {
        match sqlx::query_scalar(CLOSE_OVERDUE).bind(BATCH_SIZE).fetch_one(&mut *connection).await {
            Err(error) if is_cut_short(&error) => {}
            answer => return answer,
        }
    }
}
