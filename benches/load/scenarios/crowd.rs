//! A few good orders in a crowd: of alarms for orders that do not exist, or of alarms for far deadlines.

use std::time::Duration;

use order_timeout::{OrderId, Timestamp};
use serde_json::{Map, json};
use uuid::Uuid;

use crate::Options;
use crate::report;
use crate::stage::ledger::Ledger;
use crate::stage::servers::Servers;
use crate::stage::{DeliveredAlarm, MANY_ARTICLES, Stage};

/// The orders whose lateness counts.
const GOOD_ORDERS: u32 = 200;

/// Who the crowd is.
#[derive(Debug, Clone, Copy)]
pub enum Crowd {
    /// Alarms for orders that do not exist, all due when the first good order is.
    Unknown,
    /// Alarms ten days ahead, on their way into the wheel.
    Far,
}

pub async fn run(servers: &Servers, options: &Options, crowd: Crowd, size: usize) -> anyhow::Result<()> {
    let stage = Stage::with_broker(servers, options, &[]).await?;
    let outcome = play(&stage, servers, crowd, size).await;
    stage.clear_away().await?;
    let scenario = match crowd {
        Crowd::Unknown => "crowd-unknown",
        Crowd::Far => "crowd-far",
    };
    report::print_ledger(scenario, servers, options, &outcome?, Map::from_iter([("size".into(), json!(size))]))
}

async fn play(stage: &Stage<'_>, servers: &Servers, crowd: Crowd, size: usize) -> anyhow::Result<Ledger> {
    let mut worker = stage.start_worker(&servers.output.join("worker.log")).await?;
    let publisher = stage.publisher().await?;
    let first = Timestamp::now_by_local_clock() + Duration::from_secs(8);
    // Spread over the retries of the unknown and beyond their parking.
    let deadlines: Vec<Timestamp> =
        (0..GOOD_ORDERS).map(|n| first + Duration::from_secs(40) * n / GOOD_ORDERS).collect();
    let alarms = stage.fill(&deadlines, MANY_ARTICLES).await?;
    let last = deadlines[deadlines.len() - 1];
    let crowd_due = match crowd {
        Crowd::Unknown => first,
        Crowd::Far => first + Duration::from_secs(10 * 86_400),
    };
    publisher.schedule_all(crowd_of(size, crowd_due)).await?;
    publisher.schedule_all(alarms).await?;
    stage.wait_until_closed(last, &mut worker).await?;
    worker.stop().await?;
    stage.ledger(last).await
}

fn crowd_of(size: usize, deadline: Timestamp) -> Vec<DeliveredAlarm> {
    (0..size).map(|_| (OrderId::new(Uuid::now_v7().to_string()).expect("a uuid is a good id"), deadline)).collect()
}
