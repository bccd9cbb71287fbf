//! How fast alarms are scheduled: `schedule_all` and concurrent `schedule` against a bare lapin loop that publishes
//! the same messages into the same queue with the same number of confirms outstanding.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lapin::BasicProperties;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueuePurgeOptions};
use order_timeout::confirm::WINDOW;
use order_timeout::message::TimeoutDue;
use order_timeout::topology::{Names, Topology};
use order_timeout::{Moment, OrderId, Publisher, Settings, broker};
use serde_json::json;
use uuid::Uuid;

use crate::stage;

/// Each way is measured this often, in turn, and the median counts: the machine's speed drifts.
const ROUNDS: usize = 3;
/// Callers of `schedule` at the same time.
const CALLERS: usize = 100;

pub async fn run(orders: usize, as_json: bool) -> anyhow::Result<()> {
    let mut settings = Settings::load(None, &[])?;
    settings.namespace = format!("bench-{}", Uuid::now_v7().simple());
    let topology = Topology::new(&settings);
    let connection = broker::connect(&settings.amqp, "bench").await?;
    topology.declare(&connection).await?;
    let measured = measure(&settings, &connection, orders).await;
    stage::remove(&connection, &topology).await?;
    let [bare, all, concurrent] = measured?;
    let (all_ratio, concurrent_ratio) = (all / bare, concurrent / bare);
    if as_json {
        println!(
            "{}",
            json!({
                "scenario": "publish", "orders": orders, "window": WINDOW,
                "bare_lapin_per_s": bare.round(), "schedule_all_per_s": all.round(), "schedule_concurrent_per_s": concurrent.round(),
                "schedule_all_ratio": (all_ratio * 100.0).round() / 100.0,
                "schedule_concurrent_ratio": (concurrent_ratio * 100.0).round() / 100.0,
            })
        );
        return Ok(());
    }
    println!("{orders} alarms into one quorum queue, {WINDOW} confirms outstanding, median of {ROUNDS}\n");
    println!("bare lapin loop           {bare:>9.0}/s");
    println!("schedule_all              {all:>9.0}/s   {all_ratio:.2} of it");
    println!("schedule, {CALLERS} callers     {concurrent:>9.0}/s   {concurrent_ratio:.2} of it");
    Ok(())
}

async fn measure(settings: &Settings, connection: &lapin::Connection, orders: usize) -> anyhow::Result<[f64; 3]> {
    let publisher = Publisher::connect(settings).await?;
    let purge = async || -> anyhow::Result<()> {
        let channel = connection.create_channel().await?;
        channel.queue_purge(Names::new(&settings.namespace).arm().into(), QueuePurgeOptions::default()).await?;
        Ok(())
    };
    let mut rates = [Vec::new(), Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        rates[0].push(bare_loop(settings, connection, orders).await?);
        purge().await?;
        rates[1].push(schedule_all(&publisher, orders).await?);
        purge().await?;
        rates[2].push(schedule_concurrently(&publisher, orders).await?);
        purge().await?;
    }
    Ok(rates.map(|mut rates| {
        rates.sort_by(f64::total_cmp);
        rates[ROUNDS / 2]
    }))
}

fn rate(orders: usize, took: Duration) -> f64 {
    orders as f64 / took.as_secs_f64()
}

/// Ids and deadline are made before the clock starts, for every way alike.
fn alarms(orders: usize) -> Vec<(OrderId, Moment)> {
    let deadline = Moment::now_by_local_clock() + Duration::from_secs(3_600);
    (0..orders).map(|_| (OrderId::new(Uuid::now_v7().to_string()).expect("a uuid is a good id"), deadline)).collect()
}

async fn bare_loop(settings: &Settings, connection: &lapin::Connection, orders: usize) -> anyhow::Result<f64> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let exchange = Names::new(&settings.namespace).arm();
    let alarms = alarms(orders);
    let mut outstanding = VecDeque::with_capacity(WINDOW);
    let began = Instant::now();
    for (order_id, deadline) in alarms {
        if outstanding.len() == WINDOW {
            let confirm: lapin::PublisherConfirm = outstanding.pop_front().expect("it is full");
            confirm.await?;
        }
        let body = TimeoutDue { order_id, deadline }.to_bytes();
        let properties =
            BasicProperties::default().with_delivery_mode(2).with_message_id(Uuid::now_v7().to_string().into());
        let options = BasicPublishOptions { mandatory: true, immediate: false };
        outstanding.push_back(
            channel.basic_publish(exchange.as_str().into(), "arm".into(), options, &body, properties).await?,
        );
    }
    for confirm in outstanding {
        confirm.await?;
    }
    Ok(rate(orders, began.elapsed()))
}

async fn schedule_all(publisher: &Publisher, orders: usize) -> anyhow::Result<f64> {
    let alarms = alarms(orders);
    let began = Instant::now();
    publisher.schedule_all(alarms).await?;
    Ok(rate(orders, began.elapsed()))
}

async fn schedule_concurrently(publisher: &Publisher, orders: usize) -> anyhow::Result<f64> {
    let alarms = alarms(orders);
    let began = Instant::now();
    let mut calls = FuturesUnordered::new();
    for (order_id, deadline) in alarms {
        if calls.len() == CALLERS {
            calls.next().await.expect("it is full")?;
        }
        calls.push(async move { publisher.schedule(order_id.as_str(), deadline).await });
    }
    while let Some(done) = calls.next().await {
        done?;
    }
    Ok(rate(orders, began.elapsed()))
}
