//! How fast alarms are scheduled, against a bare client that makes the same messages and publishes them into the same
//! queue, with at most as many confirms outstanding on as many channels.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use lapin::Connection;
use lapin::options::QueuePurgeOptions;
use order_timeout_amqp::connect;
use order_timeout_amqp::envelope::Route;
use order_timeout_amqp::publisher::Outgoing;
use order_timeout_client::Publisher;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::Alarm;
use order_timeout_core::order::{OrderId, Timestamp};
use serde_json::{Map, json};
use uuid::Uuid;

use crate::Options;
use crate::bench_env::servers::Servers;
use crate::bench_env::{BenchEnv, OrderDeadline, SETTLING};
use crate::limits::broker::{Confirms, fresh, publish};
use crate::report::{self, round, whole};
use crate::{progress, transactions};

/// Each method is measured this often, in turn, and the median counts, because the machine's speed drifts.
const ROUNDS: usize = 3;
/// Concurrent callers of `schedule`.
const CALLERS: usize = 100;
/// Scheduling one by one takes this many times as long, so that many times fewer are published.
const FEWER_ONE_BY_ONE: usize = 10;

/// A method of scheduling alarms, and the bare client that it is compared with.
struct Comparison {
    name: &'static str,
    method: ScheduleMethod,
    /// Those of the bare client.
    confirms: Confirms,
}

#[derive(Clone, Copy)]
enum ScheduleMethod {
    /// `schedule`, each after the last is confirmed.
    OneByOne,
    /// `schedule` by many concurrent callers.
    Concurrent,
    All,
}

const CONTENDERS: [Comparison; 3] = [
    Comparison {
        name: "schedule_one_by_one",
        method: ScheduleMethod::OneByOne,
        confirms: Confirms { channels: 1, window: 1 },
    },
    Comparison {
        name: "schedule_concurrent",
        method: ScheduleMethod::Concurrent,
        // Our publisher distributes its callers' alarms over both channels.
        confirms: Confirms { channels: 2, window: CALLERS / 2 },
    },
    Comparison { name: "schedule_all", method: ScheduleMethod::All, confirms: Confirms::AS_OURS },
];

pub async fn run(servers: &Servers, options: &Options, orders: usize) -> anyhow::Result<()> {
    let env = BenchEnv::for_worker(servers, options, &[]).await?;
    // Otherwise the first round, including the bare client's, would meet a broker that is still busy with its queues.
    tokio::time::sleep(SETTLING).await;
    let connection = env.connect().await?;
    let measured = measure(&env, &connection, orders).await;
    let created = in_transactions(&env, orders.div_ceil(FEWER_ONE_BY_ONE)).await;
    connect::close(&connection, Duration::from_secs(1)).await;
    env.clean_up().await?;
    let mut line = Map::new();
    line.insert("scenario".into(), json!("publish"));
    line.insert("strategy".into(), json!(options.strategy));
    line.insert("broker".into(), json!(servers.broker.version()?));
    line.insert("orders".into(), json!(orders));
    for (Comparison { name, confirms, .. }, (ours, bare)) in CONTENDERS.iter().zip(measured?) {
        let figures = json!({
            "per_s": whole(ours), "bare_per_s": whole(bare), "ratio": round(ours / bare, 3),
            "bare_channels": confirms.channels, "bare_window": confirms.window,
        });
        line.insert((*name).into(), figures);
    }
    let [without, schedule_in, in_one] = created?;
    let figures = json!({
        "orders_per_s": whole(schedule_in), "without_alarm_per_s": whole(without), "ratio": round(schedule_in / without, 3),
        "in_the_same_statement_per_s": whole(in_one), "in_the_same_statement_ratio": round(in_one / without, 3),
    });
    line.insert("schedule_in".into(), figures);
    report::print_line(&line.into(), options.json);
    Ok(())
}

/// Orders created per second: without an alarm, with `postgres::schedule`, and with the alarm in the order's statement.
async fn in_transactions(env: &BenchEnv<'_>, orders: usize) -> anyhow::Result<[f64; 3]> {
    use transactions::AlarmWrite::{InTheSameStatement, None, ScheduleIn};
    let mut rates: [Vec<f64>; 3] = Default::default();
    for round in 1..=ROUNDS {
        progress::say(format!("orders with and without an alarm in their transaction, round {round} of {ROUNDS}"));
        for (alarm, rates) in [None, ScheduleIn, InTheSameStatement].into_iter().zip(&mut rates) {
            rates.push(transactions::per_second(&env.pool, orders, alarm).await?);
        }
    }
    Ok(rates.map(median))
}

/// The rates of our publisher and of the bare client, per comparison.
async fn measure(env: &BenchEnv<'_>, connection: &Connection, orders: usize) -> anyhow::Result<Vec<(f64, f64)>> {
    let publisher = env.publisher().await?;
    let mut rates: Vec<(Vec<f64>, Vec<f64>)> = CONTENDERS.iter().map(|_| Default::default()).collect();
    for round in 1..=ROUNDS {
        for (comparison, (ours, bare)) in CONTENDERS.iter().zip(&mut rates) {
            let orders = match comparison.method {
                ScheduleMethod::OneByOne => orders.div_ceil(FEWER_ONE_BY_ONE),
                ScheduleMethod::Concurrent | ScheduleMethod::All => orders,
            };
            progress::say(format!("{}, round {round} of {ROUNDS}", comparison.name));
            let rate = |took: Duration| orders as f64 / took.as_secs_f64();
            bare.push(rate(publish(connection, comparison.confirms, messages(env, orders)).await?));
            purge(env, connection).await?;
            ours.push(rate(comparison.method.schedule(&publisher, orders).await?));
            purge(env, connection).await?;
        }
    }
    Ok(rates.into_iter().map(|(ours, bare)| (median(ours), median(bare))).collect())
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// The messages that `schedule` publishes, created like there: one by one while the clock runs, from existing ids and
/// deadlines.
fn messages(env: &BenchEnv<'_>, orders: usize) -> impl Iterator<Item = Outgoing> + Send + use<> {
    let (delay, names) = (env.settings.delay.clone(), env.settings.names());
    alarms(orders).into_iter().map(move |(order_id, deadline)| {
        let now = Timestamp::now_by_local_clock();
        let route = Route::to(&delay.place(&order_id, deadline, now), &Kind::ORDER, &names);
        fresh(&Alarm::new(order_id, deadline), route, now)
    })
}

async fn purge(env: &BenchEnv<'_>, connection: &Connection) -> anyhow::Result<()> {
    let channel = connection.create_channel().await?;
    let queue = env.settings.names().schedule();
    channel.queue_purge(queue.as_str().into(), QueuePurgeOptions::default()).await?;
    channel.close(connect::reply_code::CONTENT_OK, "purged".into()).await?;
    Ok(())
}

impl ScheduleMethod {
    async fn schedule(self, publisher: &Publisher, orders: usize) -> anyhow::Result<Duration> {
        // Created before the clock starts, as for the bare client.
        let alarms = alarms(orders);
        let began = Instant::now();
        match self {
            Self::OneByOne => one_by_one(publisher, alarms).await?,
            Self::Concurrent => concurrently(publisher, alarms).await?,
            Self::All => drop(publisher.schedule_all(alarms).await?),
        }
        Ok(began.elapsed())
    }
}

fn alarms(orders: usize) -> Vec<OrderDeadline> {
    let deadline = Timestamp::now_by_local_clock() + Duration::from_secs(3_600);
    (0..orders).map(|_| (OrderId::new(Uuid::now_v7().to_string()).expect("a uuid is a good id"), deadline)).collect()
}

async fn one_by_one(publisher: &Publisher, alarms: Vec<OrderDeadline>) -> anyhow::Result<()> {
    for (order_id, deadline) in alarms {
        publisher.schedule(order_id, deadline).await?;
    }
    Ok(())
}

async fn concurrently(publisher: &Publisher, alarms: Vec<OrderDeadline>) -> anyhow::Result<()> {
    let mut calls = FuturesUnordered::new();
    for (order_id, deadline) in alarms {
        if calls.len() == CALLERS {
            calls.next().await.expect("it is full")?;
        }
        calls.push(async move { publisher.schedule(order_id, deadline).await });
    }
    while let Some(done) = calls.next().await {
        done?;
    }
    Ok(())
}
