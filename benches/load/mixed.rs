//! Random delays, and one ten times as long as the longest of them scheduled first: nobody waits behind anybody.

use std::time::Duration;

use serde_json::json;

use crate::stage::Stage;

pub async fn run(orders: usize, as_json: bool) -> anyhow::Result<()> {
    let stage = Stage::build().await?;
    let outcome = stage.beside_a_worker(play(&stage, orders, as_json)).await;
    stage.clear_away().await?;
    outcome
}

async fn play(stage: &Stage, orders: usize, as_json: bool) -> anyhow::Result<()> {
    let publisher = stage.publisher().await?;
    publisher.schedule_all(stage.orders(&[Duration::from_secs(600)]).await?).await?;
    let mut random = fastrand::Rng::with_seed(1);
    let delays: Vec<Duration> = (0..orders).map(|_| Duration::from_millis(random.u64(2_000..90_000))).collect();
    let alarms = stage.orders(&delays).await?;
    let last = alarms.iter().map(|(_, deadline)| *deadline).max().unwrap_or(alarms[0].1);
    publisher.schedule_all(alarms).await?;
    stage.wait_until_closed(last).await?;
    stage.ledger(last).await?.print("mixed", json!({ "orders": orders }), as_json)
}
