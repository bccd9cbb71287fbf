//! How long the commit of one row takes on this machine during the run: the reference for lateness, because no close
//! can be faster.

use std::time::Duration;

use anyhow::Context;
use hdrhistogram::Histogram;
use sqlx::{PgConnection, PgPool};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::task::AbortOnDropHandle;

use crate::report::rounded_ms;

const COMMITS: u32 = 200;

/// Runs beside the customers; ends before the last deadline.
#[derive(Debug)]
pub struct CommitProbe {
    task: AbortOnDropHandle<anyhow::Result<Histogram<u64>>>,
}

impl CommitProbe {
    /// Commits [`COMMITS`] rows one by one, spread over `length`.
    pub fn start(pool: PgPool, mark: String, length: Duration) -> Self {
        let probing = tokio::spawn(async move { probe(&pool, &mark, length / COMMITS).await });
        Self { task: AbortOnDropHandle::new(probing) }
    }

    pub async fn p99_ms(self) -> anyhow::Result<f64> {
        let measured = self.task.await.context("the commit probe panicked")?.context("the commit probe failed")?;
        Ok(rounded_ms(measured.value_at_quantile(0.99)))
    }
}

async fn probe(pool: &PgPool, mark: &str, every: Duration) -> anyhow::Result<Histogram<u64>> {
    let mut connection = pool.acquire().await?;
    let mut commit_us = Histogram::new(3)?;
    // The first one also prepares the statement.
    commit_one(&mut connection, mark, COMMITS).await?;
    let mut ticks = interval(every.max(Duration::from_millis(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for number in 0..COMMITS {
        ticks.tick().await;
        let began = Instant::now();
        commit_one(&mut connection, mark, number).await?;
        commit_us.record(u64::try_from(began.elapsed().as_micros())?)?;
    }
    // A shared database must not keep these.
    sqlx::query("DELETE FROM stock WHERE article_id LIKE 'commit-probe-' || $1 || '-%'")
        .bind(mark)
        .execute(&mut *connection)
        .await?;
    Ok(commit_us)
}

/// An article without orders: one row, one commit, no contended lock.
async fn commit_one(connection: &mut PgConnection, mark: &str, number: u32) -> sqlx::Result<()> {
    sqlx::query("INSERT INTO stock (article_id, available) VALUES ('commit-probe-' || $1 || '-' || $2, 0)")
        .bind(mark)
        .bind(number.to_string())
        .execute(connection)
        .await?;
    Ok(())
}
