//! Other designs for delayed messages in RabbitMQ, as controls: one queue for every TTL, and the binary ladder of
//! queues that NServiceBus and Celery build. They delay the same messages as ours. No orders are closed here: lateness
//! is the delivery's.

use std::time::Duration;

use futures_util::StreamExt;
use hdrhistogram::Histogram;
use lapin::options::{
    BasicConsumeOptions, ExchangeBindOptions, ExchangeDeclareOptions, ExchangeDeleteOptions, QueueBindOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, Consumer, ExchangeKind};
use order_timeout_amqp::connect;
use order_timeout_amqp::envelope::{Delay, Route};
use order_timeout_amqp::publisher::{Outgoing, WINDOW};
use order_timeout_core::message::Alarm;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::linux;
use serde_json::{Value, json};

use crate::bench_env::servers::Servers;
use crate::bench_env::{IDLE_WATCH, SETTLING, ledger, process};
use crate::limits::broker::{Confirms, alarm, fresh, publish};
use crate::report::round;

/// The ladder's finest rung; each further one doubles it.
const FINEST_RUNG: Duration = Duration::from_millis(125);
/// Enough for delays of half an hour.
const RUNGS: u32 = 14;
const DUE: &str = "control.due";
const TTL_QUEUE: &str = "control.ttl";
/// How long after the last deadline deliveries still count.
const GRACE: Duration = Duration::from_secs(5);
/// On one channel, so that the long delays are ahead of the others.
const IN_ORDER: Confirms = Confirms { channels: 1, window: WINDOW };

/// A design for delaying messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// One quorum queue with per-message TTLs.
    OneQueue,
    /// A quorum queue per power of two; a message passes through those that make up its delay.
    BinaryLadder,
}

/// Publishes a message per delay, in this order, and waits until those due by `horizon` could have arrived.
pub async fn measure(
    servers: &Servers,
    control: Control,
    delays: &[Duration],
    horizon: Duration,
) -> anyhow::Result<Value> {
    let settings = {
        let mut settings = order_timeout::Settings::defaults();
        settings.amqp.url = servers.broker.url.clone().into();
        settings
    };
    let connection = connect::connect(&settings.amqp, "control").await?;
    let channel = connection.create_channel().await?;
    declare(&channel, control).await?;
    let measured = watch(servers, &connection, control, delays, horizon).await;
    delete(&channel, control).await?;
    connect::close(&connection, Duration::from_secs(1)).await;
    measured
}

async fn watch(
    servers: &Servers,
    connection: &Connection,
    control: Control,
    delays: &[Duration],
    horizon: Duration,
) -> anyhow::Result<Value> {
    let channel = connection.create_channel().await?;
    let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
    let consumer = channel.basic_consume(DUE.into(), "".into(), options, FieldTable::default()).await?;
    let broker_cpu_s = || servers.broker.pid().map(linux::cpu_s).transpose();
    tokio::time::sleep(SETTLING).await;
    let idle_from = broker_cpu_s()?;
    tokio::time::sleep(IDLE_WATCH).await;
    let begin_cpu_s = broker_cpu_s()?;
    let begin = Timestamp::now_by_local_clock();
    let deadlines: Vec<Timestamp> = delays.iter().map(|delay| begin + *delay).collect();
    publish(connection, IN_ORDER, deadlines.into_iter().map(move |due| control.message(due))).await?;
    let waited_for = delays.iter().filter(|delay| **delay <= horizon).count();
    let last = delays.iter().filter(|delay| **delay <= horizon).max().copied().unwrap_or_default();
    let late_us = deliveries(consumer, waited_for, begin + last + GRACE).await?;
    let end = Timestamp::now_by_local_clock();
    let cpu_s = match (idle_from, begin_cpu_s, broker_cpu_s()?) {
        (Some(from), Some(begin_s), Some(end_s)) => {
            Some(process::cpu_beyond_idle_s((begin_s - from, IDLE_WATCH), (end_s - begin_s, end.since(begin))))
        }
        _ => None,
    };
    let first_due = begin + delays.iter().min().copied().unwrap_or_default();
    let stuck = waited_for as u64 - late_us.len();
    Ok(json!({
        "due": waited_for,
        "delivered": late_us.len(),
        "undelivered": stuck,
        "undelivered_late_so_far_at_most_ms": (stuck > 0).then(|| end.since(first_due).as_millis()),
        "lateness_ms": (!late_us.is_empty()).then(|| ledger::lateness_ms(&late_us)),
        "broker_cpu_ms_per_message": cpu_s.map(|cpu_s| round(cpu_s * 1e3 / delays.len() as f64, 3)),
    }))
}

/// Takes deliveries until all have arrived or it is `until`; returns how late they were.
async fn deliveries(mut consumer: Consumer, expected: usize, until: Timestamp) -> anyhow::Result<Histogram<u64>> {
    let mut late_us = ledger::histogram();
    while late_us.len() < expected as u64 {
        let left = until.since(Timestamp::now_by_local_clock());
        let Ok(Some(delivery)) = tokio::time::timeout(left, consumer.next()).await else { break };
        let due = Alarm::read(&delivery?.data, None)?.deadline;
        late_us.record(u64::try_from(Timestamp::now_by_local_clock().since(due).as_micros())?)?;
    }
    Ok(late_us)
}

impl Control {
    fn message(self, due: Timestamp) -> Outgoing {
        let now = Timestamp::now_by_local_clock();
        let wait = due.since(now);
        let entry = match self {
            Self::OneQueue => Route {
                exchange: String::new(),
                routing_key: TTL_QUEUE.into(),
                key_after_delay: None,
                delay: Delay::Ttl(wait),
            },
            Self::BinaryLadder => {
                let (exchange, routing_key) = ladder_entry(wait);
                Route { exchange, routing_key, key_after_delay: None, delay: Delay::None }
            }
        };
        fresh(&alarm(due), entry, now)
    }
}

/// The highest rung in a delay, and the rungs below as a routing key: `0.1.0.…`, the highest first.
fn ladder_entry(wait: Duration) -> (String, String) {
    let rungs = wait.as_millis().div_ceil(FINEST_RUNG.as_millis()).clamp(1, (1 << RUNGS) - 1);
    let bits = (0..RUNGS).rev().map(|rung| ((rungs >> rung) & 1).to_string());
    (rung(rungs.ilog2()), bits.collect::<Vec<_>>().join("."))
}

fn rung(number: u32) -> String {
    format!("control.ladder.{number}")
}

async fn declare(channel: &Channel, control: Control) -> anyhow::Result<()> {
    queue(channel, DUE, &[]).await?;
    match control {
        Control::OneQueue => {
            let arguments = [("x-dead-letter-exchange", text("")), ("x-dead-letter-routing-key", text(DUE))];
            queue(channel, TTL_QUEUE, &arguments).await
        }
        Control::BinaryLadder => declare_ladder(channel).await,
    }
}

/// On each rung's exchange, a bit decides whether a message waits in the rung's queue or passes to the next finer
/// exchange.
async fn declare_ladder(channel: &Channel) -> anyhow::Result<()> {
    exchange(channel, DUE).await?;
    channel.queue_bind(DUE.into(), DUE.into(), "#".into(), QueueBindOptions::default(), FieldTable::default()).await?;
    let mut finer = DUE.to_owned();
    for number in 0..RUNGS {
        let name = rung(number);
        let ttl_ms = i64::try_from(FINEST_RUNG.as_millis())? << number;
        let arguments = [("x-message-ttl", AMQPValue::LongLongInt(ttl_ms)), ("x-dead-letter-exchange", text(&finer))];
        exchange(channel, &name).await?;
        queue(channel, &name, &arguments).await?;
        let key = |bit: char| {
            let place = RUNGS - 1 - number;
            let words = (0..RUNGS).map(|at| if at == place { bit.to_string() } else { "*".to_owned() });
            words.collect::<Vec<_>>().join(".")
        };
        let (name, none) = (name.as_str(), FieldTable::default);
        channel
            .queue_bind(name.into(), name.into(), key('1').as_str().into(), QueueBindOptions::default(), none())
            .await?;
        let options = ExchangeBindOptions::default();
        channel.exchange_bind(finer.as_str().into(), name.into(), key('0').as_str().into(), options, none()).await?;
        finer = name.to_owned();
    }
    Ok(())
}

fn text(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

async fn exchange(channel: &Channel, name: &str) -> anyhow::Result<()> {
    let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
    Ok(channel.exchange_declare(name.into(), ExchangeKind::Topic, options, FieldTable::default()).await?)
}

/// A quorum queue that dead-letters at least once, like ours.
async fn queue(channel: &Channel, name: &str, arguments: &[(&str, AMQPValue)]) -> anyhow::Result<()> {
    let mut table = FieldTable::default();
    table.insert("x-queue-type".into(), text("quorum"));
    if !arguments.is_empty() {
        table.insert("x-dead-letter-strategy".into(), text("at-least-once"));
        table.insert("x-overflow".into(), text("reject-publish"));
    }
    for (key, value) in arguments {
        table.insert((*key).into(), value.clone());
    }
    let options = QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare(name.into(), options, table).await?;
    Ok(())
}

async fn delete(channel: &Channel, control: Control) -> anyhow::Result<()> {
    let rungs: Vec<String> = (0..RUNGS).map(rung).collect();
    let waiting = match control {
        Control::OneQueue => vec![TTL_QUEUE.to_owned()],
        Control::BinaryLadder => rungs.clone(),
    };
    for queue in waiting.iter().map(String::as_str).chain([DUE]) {
        channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
    }
    if control == Control::BinaryLadder {
        for exchange in rungs.iter().map(String::as_str).chain([DUE]) {
            channel.exchange_delete(exchange.into(), ExchangeDeleteOptions::default()).await?;
        }
    }
    Ok(())
}
