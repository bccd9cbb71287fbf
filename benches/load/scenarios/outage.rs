//! The broker is stopped for some time while orders go on falling due: how late the closes are before, meanwhile and
//! afterwards. All alarms were in the broker.

use std::time::Duration;

use anyhow::ensure;
use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::order::Timestamp;
use serde_json::json;
use sqlx::PgPool;

use crate::Options;
use crate::bench_env::ledger::{self, histogram, lateness_ms};
use crate::bench_env::servers::Servers;
use crate::bench_env::{BenchEnv, MANY_ARTICLES, sleep_until};
use crate::progress;

/// Orders fall due for so long before the broker stops, and after it is back.
const AROUND: Duration = Duration::from_secs(20);
/// From the start until the first deadline: for filling the tables, and for publishing.
const PREPARING: Duration = Duration::from_secs(40);

pub async fn run(servers: &Servers, options: &Options, rate: u32, seconds: u32) -> anyhow::Result<()> {
    let env = BenchEnv::for_worker(servers, options, &[]).await?;
    let printed = run_in(&env, servers, rate, Duration::from_secs(seconds.into())).await;
    env.clean_up().await?;
    let line = printed?;
    println!("{line}");
    Ok(())
}

async fn run_in(
    env: &BenchEnv<'_>,
    servers: &Servers,
    rate: u32,
    stopped_for: Duration,
) -> anyhow::Result<serde_json::Value> {
    let first = Timestamp::now_by_local_clock() + PREPARING;
    let stop_at = first + AROUND;
    let last = stop_at + stopped_for + AROUND;
    let orders = rate * u32::try_from(last.since(first).as_secs())?;
    let deadlines: Vec<Timestamp> = (0..orders).map(|number| first + Duration::from_secs(1) * number / rate).collect();
    progress::say(format!("outage: writing {orders} orders"));
    let alarms = env.fill(&deadlines, MANY_ARTICLES).await?;
    let mut worker = env.start_worker(&servers.output.join("outage.log")).await?;
    env.publisher().await?.schedule_all(alarms).await?;
    ensure!(Timestamp::now_by_local_clock() < first, "scheduling took longer than planned; is the machine busy?");

    sleep_until(stop_at).await;
    progress::say(format!("outage: stopping the broker for {} s", stopped_for.as_secs()));
    servers.broker.stop()?;
    let stopped = Timestamp::now_by_local_clock();
    sleep_until(stop_at + stopped_for).await;
    let back = Timestamp::now_by_local_clock();
    servers.broker.start_again()?;
    progress::say("outage: the broker is back");
    env.wait_until_closed(last, &mut worker).await?;
    env.wait_until_announced(&mut worker).await?;
    worker.stop().await?;

    let ledger = env.ledger(last).await?;
    ledger.ensure_kept("worker")?;
    let [before, meanwhile, after] = [(first, stop_at), (stop_at, back), (back, last)];
    Ok(json!({
        "scenario": "outage",
        "rate_per_s": rate,
        "stopped_s": back.since(stopped).as_secs_f64(),
        "orders": ledger.orders,
        "lost": ledger.lost,
        "closed_twice": ledger.closed_twice,
        "early": ledger.early,
        "closed_by": ledger.closed_by,
        "lateness_before_ms": lateness(&env.pool, before).await?,
        "lateness_while_stopped_ms": lateness(&env.pool, meanwhile).await?,
        "lateness_afterwards_ms": lateness(&env.pool, after).await?,
    }))
}

/// Of the orders that fell due in this time.
async fn lateness(pool: &PgPool, (from, to): (Timestamp, Timestamp)) -> anyhow::Result<serde_json::Value> {
    let mut lateness_us = histogram();
    for late_us in ledger::lateness(pool, Timestamptz(from), Timestamptz(to)).await? {
        // The ledger counts those that were early.
        lateness_us.record(u64::try_from(late_us).unwrap_or_default())?;
    }
    Ok(lateness_ms(&lateness_us))
}
