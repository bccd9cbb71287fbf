//! The broker alone: the same queues and messages, with nobody closing anything: publish with a TTL, dead-letter,
//! consume and acknowledge. And a bare client that publishes with a window of confirms.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures_util::StreamExt;
use futures_util::stream::select_all;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, Consumer, PublisherConfirm};
use order_timeout::config::Strategy;
use order_timeout::confirm::WINDOW;
use order_timeout::message::TimeoutDue;
use order_timeout::topology::{DUE_KEY, Names};
use order_timeout::{Moment, OrderId};
use uuid::Uuid;

use crate::stage::Stage;
use crate::stage::servers::Servers;
use crate::{Options, Way};

/// A slow machine's publishing rate, from which the instant is chosen at which all expire.
const SLOWEST_PUBLISHING_PER_S: f64 = 8_000.0;
/// Deliveries that are acknowledged by one frame.
const ACK_EVERY: usize = 200;
/// After this long without a delivery something is wrong.
const PATIENCE: Duration = Duration::from_secs(60);

/// Messages per second.
pub struct BrokerLimit {
    /// Published with confirms.
    pub published_per_s: f64,
    /// From the instant at which all expire until the last is consumed and acknowledged.
    pub handed_over_per_s: f64,
}

pub async fn measure(
    servers: &Servers,
    options: &Options,
    settings: &[String],
    messages: usize,
    way: Way,
) -> anyhow::Result<BrokerLimit> {
    let stage = Stage::with_broker(servers, options, settings).await?;
    let connection = stage.connect().await?;
    let limit = hand_over(&stage, &connection, messages, way).await;
    order_timeout::broker::close(&connection, Duration::from_secs(1)).await;
    stage.clear_away().await?;
    limit
}

async fn hand_over(
    stage: &Stage<'_>,
    connection: &Connection,
    messages: usize,
    way: Way,
) -> anyhow::Result<BrokerLimit> {
    let publishing = Duration::from_secs_f64(messages as f64 / SLOWEST_PUBLISHING_PER_S);
    let expiry = Moment::now_by_local_clock() + publishing + Duration::from_secs(2);
    let published = publish(connection, messages, WINDOW, |index| waiting(stage, way, index, expiry)).await?;
    let published_per_s = messages as f64 / published.as_secs_f64();
    ensure!(Moment::now_by_local_clock() < expiry, "publishing took longer than planned; is the machine busy?");
    consume(stage, connection, messages).await?;
    let took = Moment::now_by_local_clock().since(expiry);
    Ok(BrokerLimit { published_per_s, handed_over_per_s: messages as f64 / took.as_secs_f64() })
}

/// A message on its way out.
pub struct Message {
    pub exchange: String,
    pub routing_key: String,
    pub properties: BasicProperties,
}

/// Persistent and with an id, as every alarm is.
pub fn persistent() -> BasicProperties {
    BasicProperties::default().with_delivery_mode(2).with_message_id(Uuid::now_v7().to_string().into())
}

/// As the worker (or, in a lane, the publisher) writes it.
fn waiting(stage: &Stage<'_>, way: Way, index: usize, expiry: Moment) -> Message {
    let settings = &stage.settings;
    let names = Names::new(&settings.namespace);
    let wait_ms = expiry.since(Moment::now_by_local_clock()).as_millis();
    let with_ttl = || persistent().with_expiration(wait_ms.to_string().into());
    match (settings.delay.strategy, way) {
        (Strategy::DelayedExchange, _) => {
            let mut headers = FieldTable::default();
            headers.insert("x-delay".into(), AMQPValue::LongLongInt(i64::try_from(wait_ms).unwrap_or(i64::MAX)));
            let properties = persistent().with_headers(headers);
            Message { exchange: names.delayed(), routing_key: DUE_KEY.into(), properties }
        }
        (Strategy::DeadLetter, Way::Lane) => {
            let shard = u8::try_from(index % usize::from(settings.delay.lane_shards)).expect("shards are a u8");
            let routing_key = Names::lane_key(&settings.delay.lanes[0].name, shard);
            Message { exchange: names.delay(), routing_key, properties: with_ttl() }
        }
        (Strategy::DeadLetter, Way::Wheel) => {
            let wheel = settings.wheel().expect("validated settings have rings that mesh");
            Message {
                exchange: names.wheel(),
                routing_key: Names::slot_key(&wheel.rings()[0].name, 0),
                properties: with_ttl(),
            }
        }
    }
}

/// Publishes alarms with at most `window` confirms outstanding: what a client without any of our care can do.
pub async fn publish(
    connection: &Connection,
    messages: usize,
    window: usize,
    message: impl Fn(usize) -> Message,
) -> anyhow::Result<Duration> {
    // Made before the clock starts.
    let bodies = bodies(messages);
    let began = Instant::now();
    publish_bodies(connection, bodies, window, message).await?;
    Ok(began.elapsed())
}

/// The same with these bodies.
pub async fn publish_bodies(
    connection: &Connection,
    bodies: Vec<Vec<u8>>,
    window: usize,
    message: impl Fn(usize) -> Message,
) -> anyhow::Result<()> {
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    let mut outstanding: VecDeque<PublisherConfirm> = VecDeque::with_capacity(window);
    for (index, body) in bodies.into_iter().enumerate() {
        if outstanding.len() == window {
            confirmed(outstanding.pop_front().expect("it is full")).await?;
        }
        let Message { exchange, routing_key, properties } = message(index);
        let (exchange, routing_key) = (exchange.as_str().into(), routing_key.as_str().into());
        let options = BasicPublishOptions::default();
        outstanding.push_back(channel.basic_publish(exchange, routing_key, options, &body, properties).await?);
    }
    for confirm in outstanding {
        confirmed(confirm).await?;
    }
    Ok(())
}

async fn confirmed(confirm: PublisherConfirm) -> anyhow::Result<()> {
    ensure!(!confirm.await?.is_nack(), "the broker refused a message");
    Ok(())
}

fn bodies(messages: usize) -> Vec<Vec<u8>> {
    let deadline = Moment::now_by_local_clock();
    let id = || OrderId::new(Uuid::now_v7().to_string()).expect("a uuid is a good id");
    (0..messages).map(|_| TimeoutDue { order_id: id(), deadline }.to_bytes()).collect()
}

async fn consume(stage: &Stage<'_>, connection: &Connection, messages: usize) -> anyhow::Result<()> {
    let mut consumers = Vec::new();
    for (channel, queue) in queues(stage).into_iter().enumerate() {
        let consumer = start_consuming(stage, connection, &queue).await?;
        consumers.push(consumer.map(move |delivery| (channel, delivery)));
    }
    let mut deliveries = select_all(consumers);
    let mut unacknowledged: Vec<(usize, Option<Delivery>)> = queues(stage).iter().map(|_| (0, None)).collect();
    for number in 0..messages {
        let next = tokio::time::timeout(PATIENCE, deliveries.next()).await;
        let next = next.with_context(|| format!("only {number} of {messages} messages were handed over"))?;
        let (channel, delivery) = next.context("the broker cancelled the consumer")?;
        let (count, last) = &mut unacknowledged[channel];
        (*count, *last) = (*count + 1, Some(delivery?));
        if *count == ACK_EVERY {
            acknowledge(std::mem::take(&mut unacknowledged[channel]).1).await?;
        }
    }
    for (_, last) in unacknowledged {
        acknowledge(last).await?;
    }
    Ok(())
}

/// A channel each, as the worker has them.
fn queues(stage: &Stage<'_>) -> Vec<String> {
    let names = Names::new(&stage.settings.namespace);
    stage.settings.worker.shard_of_each_channel().into_iter().map(|shard| names.shard(shard)).collect()
}

async fn start_consuming(stage: &Stage<'_>, connection: &Connection, queue: &str) -> anyhow::Result<Consumer> {
    let channel = connection.create_channel().await?;
    channel.basic_qos(stage.settings.worker.prefetch, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    Ok(channel.basic_consume(queue.into(), "".into(), options, FieldTable::default()).await?)
}

async fn acknowledge(last: Option<Delivery>) -> anyhow::Result<()> {
    if let Some(delivery) = last {
        delivery.ack(BasicAckOptions { multiple: true }).await?;
    }
    Ok(())
}
