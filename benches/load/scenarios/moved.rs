//! Orders whose deadline is moved later three times and then earlier once: how late after the last of them they close.

use std::time::Duration;

use anyhow::ensure;
use order_timeout::{Moment, Moved, move_deadline_in};
use serde_json::Map;

use crate::Options;
use crate::report;
use crate::stage::ledger::Ledger;
use crate::stage::servers::Servers;
use crate::stage::{Alarm, MANY_ARTICLES, Stage};

/// From now to the first of the first deadlines: all are moved before.
const FIRST: Duration = Duration::from_secs(15);
/// Over so long the orders' deadlines are spread, or it were a burst.
const SPREAD: Duration = Duration::from_secs(20);
/// Later three times and then earlier, each counted from the first deadline.
const MOVES: [(Duration, Moved); 4] = [
    (Duration::from_secs(20), Moved::Later),
    (Duration::from_secs(40), Moved::Later),
    (Duration::from_secs(60), Moved::Later),
    (Duration::from_secs(10), Moved::Earlier),
];

pub async fn run(servers: &Servers, options: &Options, orders: usize) -> anyhow::Result<()> {
    let stage = Stage::with_broker(servers, options, &[]).await?;
    let outcome = play(&stage, servers, orders).await;
    stage.clear_away().await?;
    report::print_ledger("moved", servers, options, &outcome?, Map::new())
}

async fn play(stage: &Stage<'_>, servers: &Servers, orders: usize) -> anyhow::Result<Ledger> {
    let mut worker = stage.start_worker(&servers.output.join("worker.log")).await?;
    let first = Moment::now_by_local_clock() + FIRST;
    let deadlines: Vec<Moment> = (0..orders).map(|n| first + SPREAD.mul_f64(n as f64 / orders as f64)).collect();
    let alarms = stage.fill(&deadlines, MANY_ARTICLES).await?;
    stage.publisher().await?.schedule_all(alarms.clone()).await?;
    for (by, expected) in MOVES {
        move_all(stage, &alarms, by, &expected).await?;
    }
    ensure!(Moment::now_by_local_clock() < first, "moving {orders} orders took longer than planned");
    stage.wait_until_closed(first + SPREAD + MOVES[MOVES.len() - 1].0, &mut worker).await?;
    worker.stop().await?;
    stage.ledger(first + SPREAD + FIRST).await
}

async fn move_all(stage: &Stage<'_>, alarms: &[Alarm], by: Duration, expected: &Moved) -> anyhow::Result<()> {
    for (order_id, deadline) in alarms {
        let moved = move_deadline_in(&stage.pool, order_id, *deadline + by).await?;
        ensure!(moved == *expected, "moved by {by:?}: {moved:?}");
    }
    Ok(())
}
