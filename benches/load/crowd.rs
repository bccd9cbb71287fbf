//! A few good orders in a crowd: of alarms for orders that do not exist, or of alarms for far deadlines.

use std::time::Duration;

use order_timeout::{Moment, OrderId};
use serde_json::json;
use uuid::Uuid;

use crate::stage::Stage;

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

pub async fn run(crowd: Crowd, size: usize, as_json: bool) -> anyhow::Result<()> {
    let stage = Stage::build().await?;
    let outcome = stage.beside_a_worker(play(&stage, crowd, size, as_json)).await;
    stage.clear_away().await?;
    outcome
}

async fn play(stage: &Stage, crowd: Crowd, size: usize, as_json: bool) -> anyhow::Result<()> {
    let publisher = stage.publisher().await?;
    let first = Duration::from_secs(8);
    // Spread over the retries of the unknown and beyond their parking.
    let delays: Vec<Duration> = (0..GOOD_ORDERS).map(|n| first + Duration::from_secs(40) * n / GOOD_ORDERS).collect();
    let alarms = stage.orders(&delays).await?;
    let last = alarms.iter().map(|(_, deadline)| *deadline).max().unwrap_or(alarms[0].1);
    let crowd_due = match crowd {
        Crowd::Unknown => alarms[0].1,
        Crowd::Far => alarms[0].1 + Duration::from_secs(10 * 86_400),
    };
    publisher.schedule_all(crowd_of(size, crowd_due)).await?;
    publisher.schedule_all(alarms).await?;
    stage.wait_until_closed(last).await?;
    stage.ledger(last).await?.print("crowd", json!({ "crowd": format!("{crowd:?}"), "size": size }), as_json)
}

fn crowd_of(size: usize, deadline: Moment) -> Vec<(OrderId, Moment)> {
    (0..size).map(|_| (OrderId::new(Uuid::now_v7().to_string()).expect("a uuid is a good id"), deadline)).collect()
}
