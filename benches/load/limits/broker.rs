//! The broker alone, with the same queues and messages but without closing orders: publish with a TTL, dead-letter,
//! consume and acknowledge. And a bare client that publishes with as many outstanding confirms as ours.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures_util::StreamExt;
use futures_util::stream::select_all;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, Consumer, PublisherConfirm};
use order_timeout_amqp::envelope::{self, Delay, Route};
use order_timeout_amqp::publisher::{self, Outgoing, WINDOW};
use order_timeout_amqp::topology::{DUE_KEY, Names, declare_slots};
use order_timeout_core::delay::Strategy;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::Alarm;
use order_timeout_core::order::{OrderId, Timestamp};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::bench_env::servers::Servers;
use crate::bench_env::{BenchEnv, SETTLING};
use crate::progress;
use crate::{AlarmRoute, Options};

/// A slow machine's publishing rate, used to choose the instant at which all messages expire.
const SLOWEST_PUBLISHING_PER_S: f64 = 8_000.0;
/// Deliveries that are acknowledged by one frame.
const ACK_EVERY: usize = 200;
/// After this time without a delivery the run has failed.
const TIMEOUT: Duration = Duration::from_secs(60);

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
    route: AlarmRoute,
) -> anyhow::Result<BrokerLimit> {
    progress::say("measuring the broker's own limit");
    let env = BenchEnv::for_worker(servers, options, settings).await?;
    tokio::time::sleep(SETTLING).await;
    let connection = env.connect().await?;
    declare_slot(&env, &connection).await?;
    let limit = hand_over(&env, &connection, messages, route).await;
    order_timeout_amqp::connect::close(&connection, Duration::from_secs(1)).await;
    env.clean_up().await?;
    limit
}

async fn hand_over(
    env: &BenchEnv<'_>,
    connection: &Connection,
    messages: usize,
    route: AlarmRoute,
) -> anyhow::Result<BrokerLimit> {
    let publishing = Duration::from_secs_f64(messages as f64 / SLOWEST_PUBLISHING_PER_S);
    let expiry = Timestamp::now_by_local_clock() + publishing + Duration::from_secs(2);
    let published = publish(connection, Confirms::AS_OURS, waiting(env, route, messages, expiry)).await?;
    let published_per_s = messages as f64 / published.as_secs_f64();
    ensure!(Timestamp::now_by_local_clock() < expiry, "publishing took longer than planned; is the machine busy?");
    consume(env, connection, messages).await?;
    let took = Timestamp::now_by_local_clock().since(expiry);
    Ok(BrokerLimit { published_per_s, handed_over_per_s: messages as f64 / took.as_secs_f64() })
}

/// Declares the slot that [`places`] names, as a worker does for its first alarm.
async fn declare_slot(env: &BenchEnv<'_>, connection: &Connection) -> anyhow::Result<()> {
    if env.settings.delay.strategy == Strategy::DeadLetter {
        let slot = env.settings.slots().find(&env.settings.delay.rings[0].name(), 0).context("the first slot")?;
        declare_slots(&env.settings.names(), &[slot], connection).await.fault.map_or(Ok(()), Err)?;
    }
    Ok(())
}

/// As the worker (or, in a lane, the publisher) writes them, so that all are dead-lettered at once.
fn waiting(
    env: &BenchEnv<'_>,
    route: AlarmRoute,
    messages: usize,
    expiry: Timestamp,
) -> impl Iterator<Item = Outgoing> + Send + use<> {
    let places = places(env, route).into_iter().cycle();
    let by_the_plugin = env.settings.delay.strategy == Strategy::DelayedExchange;
    let wheel = env.settings.names().wheel();
    // Created before the clock starts: a publisher has its orders already.
    let alarms: Vec<Alarm> = (0..messages).map(|_| alarm(expiry)).collect();
    alarms.into_iter().zip(places).map(move |(alarm, (exchange, routing_key))| {
        let now = Timestamp::now_by_local_clock();
        let left = expiry.since(now);
        let left_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let delay = if by_the_plugin { Delay::XDelayMs(left_ms) } else { Delay::Ttl(left) };
        // A slot has no dead-letter key of its own.
        let key_after_delay = (exchange == wheel).then(|| DUE_KEY.to_owned());
        fresh(&alarm, Route { exchange, routing_key, key_after_delay, delay }, now)
    })
}

/// The exchange and routing key of each place where alarms with the same delay wait.
fn places(env: &BenchEnv<'_>, route: AlarmRoute) -> Vec<(String, String)> {
    let settings = &env.settings;
    let names = settings.names();
    match (settings.delay.strategy, route) {
        (Strategy::DelayedExchange, _) => vec![(names.delayed(), DUE_KEY.into())],
        (Strategy::Database, _) => Vec::new(),
        (Strategy::DeadLetter, AlarmRoute::Lane) => {
            let lane = &settings.delay.lanes[0].name;
            (0..settings.delay.lane_shards)
                .map(|shard| (names.delay(), Names::lane_key(&Kind::ORDER, lane, shard)))
                .collect()
        }
        (Strategy::DeadLetter, AlarmRoute::Wheel | AlarmRoute::Far) => {
            vec![(names.wheel(), Names::slot_key(&settings.delay.rings[0].name(), 0))]
        }
    }
}

/// An alarm for a new order.
pub fn alarm(deadline: Timestamp) -> Alarm {
    Alarm::new(OrderId::new(Uuid::now_v7().to_string()).expect("a uuid is a good id"), deadline)
}

/// The message for an alarm that enters the broker for the first time, exactly as ours.
pub fn fresh(alarm: &Alarm, entry: Route, now: Timestamp) -> Outgoing {
    envelope::address(alarm.clone().into(), entry, now)
}

/// How many confirms may be outstanding.
#[derive(Debug, Clone, Copy)]
pub struct Confirms {
    pub channels: usize,
    /// On each channel.
    pub window: usize,
}

impl Confirms {
    /// As many as [`order_timeout_amqp::publisher`] has, which uses its two channels in turn.
    pub const AS_OURS: Self = Self { channels: 2, window: WINDOW };
}

/// Publishes messages with this many outstanding confirms, as fast as a client without our safeguards can. Returns how
/// long it took to create them, publish them and have them confirmed; the channels are open before, as ours are.
pub async fn publish(
    connection: &Connection,
    confirms: Confirms,
    messages: impl Iterator<Item = Outgoing> + Send + 'static,
) -> anyhow::Result<Duration> {
    let mut channels = Vec::new();
    for _ in 0..confirms.channels {
        let channel = connection.create_channel().await?;
        channel.confirm_select(ConfirmSelectOptions::default()).await?;
        channels.push(channel);
    }
    let messages = Arc::new(Mutex::new(messages));
    let began = Instant::now();
    let mut publishing = JoinSet::new();
    for channel in channels {
        publishing.spawn(publish_on(channel, confirms.window, messages.clone()));
    }
    while let Some(ended) = publishing.join_next().await {
        ended??;
    }
    Ok(began.elapsed())
}

/// One channel, which takes messages from the shared iterator.
async fn publish_on(
    channel: Channel,
    window: usize,
    messages: Arc<Mutex<impl Iterator<Item = Outgoing>>>,
) -> anyhow::Result<()> {
    let next = || messages.lock().unwrap_or_else(PoisonError::into_inner).next();
    let mut outstanding: VecDeque<PublisherConfirm> = VecDeque::with_capacity(window);
    while let Some(message) = next() {
        if outstanding.len() == window {
            confirmed(outstanding.pop_front().expect("it is full")).await?;
        }
        outstanding.push_back(send(&channel, &message).await?);
    }
    for confirm in outstanding {
        confirmed(confirm).await?;
    }
    Ok(())
}

async fn send(channel: &Channel, message: &Outgoing) -> anyhow::Result<PublisherConfirm> {
    let (exchange, routing_key) = (message.exchange.as_str().into(), message.routing_key.as_str().into());
    let options = BasicPublishOptions { mandatory: message.mandatory, immediate: false };
    let properties = publisher::properties(message)?;
    Ok(channel.basic_publish(exchange, routing_key, options, &message.body, properties).await?)
}

async fn confirmed(confirm: PublisherConfirm) -> anyhow::Result<()> {
    ensure!(!confirm.await?.is_nack(), "the broker refused a message");
    Ok(())
}

async fn consume(env: &BenchEnv<'_>, connection: &Connection, messages: usize) -> anyhow::Result<()> {
    let mut consumers = Vec::new();
    for (channel, queue) in queues(env).into_iter().enumerate() {
        let consumer = start_consuming(env, connection, &queue).await?;
        consumers.push(consumer.map(move |delivery| (channel, delivery)));
    }
    let mut deliveries = select_all(consumers);
    let mut unacknowledged: Vec<(usize, Option<Delivery>)> = queues(env).iter().map(|_| (0, None)).collect();
    for number in 0..messages {
        let next = tokio::time::timeout(TIMEOUT, deliveries.next()).await;
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

/// One channel each, as in the worker.
fn queues(env: &BenchEnv<'_>) -> Vec<String> {
    let names = env.settings.names();
    env.settings.worker.queue_of_each_channel(&names, &Kind::ORDER)
}

async fn start_consuming(env: &BenchEnv<'_>, connection: &Connection, queue: &str) -> anyhow::Result<Consumer> {
    let channel = connection.create_channel().await?;
    channel.basic_qos(env.settings.worker.prefetch, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    Ok(channel.basic_consume(queue.into(), "".into(), options, FieldTable::default()).await?)
}

async fn acknowledge(last: Option<Delivery>) -> anyhow::Result<()> {
    if let Some(delivery) = last {
        delivery.ack(BasicAckOptions { multiple: true }).await?;
    }
    Ok(())
}
