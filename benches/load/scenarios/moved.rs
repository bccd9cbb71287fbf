//! Orders with deadlines moved later three times and then earlier than the first: how late after the last deadline they
//! close.

use std::time::Duration;

use anyhow::ensure;
use order_timeout_client::postgres::{Moved, move_deadline};
use order_timeout_core::order::Timestamp;
use serde_json::Map;

use crate::Options;
use crate::bench_env::ledger::Ledger;
use crate::bench_env::servers::Servers;
use crate::bench_env::{BenchEnv, MANY_ARTICLES, OrderDeadline};
use crate::report;

/// From now to the earliest of the last deadlines: all orders are moved before.
const LAST: Duration = Duration::from_secs(15);
/// How much later than its last deadline each order's first one is: longer than `delay.lead` and a slot, so that the
/// alarm scheduled for the first cannot close it.
const FIRST: Duration = Duration::from_secs(40);
/// The orders' deadlines are spread over this time, so that there is no burst.
const SPREAD: Duration = Duration::from_secs(20);
/// Later three times and then earlier, each counted from the last deadline.
const MOVES: [(Duration, Moved); 4] = [
    (Duration::from_secs(60), Moved::Later),
    (Duration::from_secs(80), Moved::Later),
    (Duration::from_secs(100), Moved::Later),
    (Duration::ZERO, Moved::Earlier),
];

pub async fn run(servers: &Servers, options: &Options, orders: usize) -> anyhow::Result<()> {
    let env = BenchEnv::for_worker(servers, options, &[]).await?;
    let outcome = run_scenario(&env, servers, orders).await;
    env.clean_up().await?;
    report::print_ledger("moved", servers, options, &outcome?, Map::new())
}

async fn run_scenario(env: &BenchEnv<'_>, servers: &Servers, orders: usize) -> anyhow::Result<Ledger> {
    let mut worker = env.start_worker(&servers.output.join("worker.log")).await?;
    let last = Timestamp::now_by_local_clock() + LAST;
    let firsts: Vec<Timestamp> = (0..orders).map(|n| last + FIRST + SPREAD.mul_f64(n as f64 / orders as f64)).collect();
    let alarms = env.fill(&firsts, MANY_ARTICLES).await?;
    env.publisher().await?.schedule_all(alarms.clone()).await?;
    for (after_last, expected) in MOVES {
        move_all(env, &alarms, after_last, &expected).await?;
    }
    ensure!(Timestamp::now_by_local_clock() < last, "moving {orders} orders took longer than planned");
    env.wait_until_closed(last + SPREAD, &mut worker).await?;
    worker.stop().await?;
    env.ledger(last + SPREAD).await
}

async fn move_all(
    env: &BenchEnv<'_>,
    alarms: &[OrderDeadline],
    after_last: Duration,
    expected: &Moved,
) -> anyhow::Result<()> {
    for (order_id, first) in alarms {
        let moved = move_deadline(&env.pool, order_id, *first - FIRST + after_last).await?;
        ensure!(moved == *expected, "moved to {after_last:?} after the last deadline: {moved:?}");
    }
    Ok(())
}
