//! A few good orders among bulk alarms: for orders that do not exist, or for far deadlines.

use std::time::Duration;

use order_timeout_core::order::{OrderId, Timestamp};
use serde_json::{Map, json};
use uuid::Uuid;

use crate::Options;
use crate::bench_env::ledger::Ledger;
use crate::bench_env::servers::Servers;
use crate::bench_env::{BenchEnv, MANY_ARTICLES, OrderDeadline};
use crate::report;

/// The orders that are measured.
const GOOD_ORDERS: u32 = 200;

/// The kind of bulk alarms.
#[derive(Debug, Clone, Copy)]
pub enum Crowd {
    /// Alarms for orders that do not exist, all due with the first good order.
    Unknown,
    /// Alarms ten days ahead, on their route into the wheel.
    Far,
}

pub async fn run(servers: &Servers, options: &Options, crowd: Crowd, size: usize) -> anyhow::Result<()> {
    let env = BenchEnv::for_worker(servers, options, &[]).await?;
    let outcome = run_scenario(&env, servers, crowd, size).await;
    env.clean_up().await?;
    let scenario = match crowd {
        Crowd::Unknown => "crowd-unknown",
        Crowd::Far => "crowd-far",
    };
    report::print_ledger(scenario, servers, options, &outcome?, Map::from_iter([("size".into(), json!(size))]))
}

async fn run_scenario(env: &BenchEnv<'_>, servers: &Servers, crowd: Crowd, size: usize) -> anyhow::Result<Ledger> {
    let mut worker = env.start_worker(&servers.output.join("worker.log")).await?;
    let publisher = env.publisher().await?;
    let first = Timestamp::now_by_local_clock() + Duration::from_secs(8);
    // Spread over the retries of the unknown orders and beyond their parking.
    let deadlines: Vec<Timestamp> =
        (0..GOOD_ORDERS).map(|n| first + Duration::from_secs(40) * n / GOOD_ORDERS).collect();
    let alarms = env.fill(&deadlines, MANY_ARTICLES).await?;
    let last = deadlines[deadlines.len() - 1];
    let bulk_due = match crowd {
        Crowd::Unknown => first,
        Crowd::Far => first + Duration::from_secs(10 * 86_400),
    };
    publisher.schedule_all(bulk_alarms(size, bulk_due)).await?;
    publisher.schedule_all(alarms).await?;
    env.wait_until_closed(last, &mut worker).await?;
    worker.stop().await?;
    env.ledger(last).await
}

fn bulk_alarms(size: usize, deadline: Timestamp) -> Vec<OrderDeadline> {
    (0..size).map(|_| (OrderId::new(Uuid::now_v7().to_string()).expect("a uuid is a good id"), deadline)).collect()
}
