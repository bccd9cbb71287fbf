//! Good orders beside a flood by a publisher with publish rights only: how late their closes are while the flood is
//! worked off and afterwards, and what of it is left at the broker.

use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use order_timeout_amqp::publisher::{ConfirmedPublisher, Outgoing};
use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::message::{ALARM_TYPE, Alarm};
use order_timeout_core::order::{OrderId, Timestamp};
use order_timeout_testkit::linux;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use crate::Options;
use crate::bench_env::ledger::{self, histogram, lateness_ms};
use crate::bench_env::servers::Servers;
use crate::bench_env::{BenchEnv, MANY_ARTICLES, OrderDeadline, SETTLING, sleep_until};
use crate::{progress, report};

/// Good orders.
const ORDERS_PER_S: u32 = 200;
/// From a good order's publication to its deadline.
const AHEAD: Duration = Duration::from_secs(15);
/// Good orders fall due for so long before the flood begins.
const BEFORE: Duration = Duration::from_secs(10);
/// What falls due in this time after it began counts as during it.
const DURING: Duration = Duration::from_secs(30);
/// And for so long afterwards.
const AFTER: Duration = Duration::from_secs(60);
/// The flood's orders that exist are due so much later: an alarm for them is early.
const MUCH_LATER: Duration = Duration::from_secs(3_600);
const PUBLISH_EVERY: Duration = Duration::from_millis(20);

/// What the flood consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// Alarms for orders that do not exist
    Unknown,
    /// Alarms for orders that are due an hour later
    Others,
    /// Alarms for one order, each with another deadline
    OneOrder,
    /// Alarms for the year 9999
    Far,
    /// Bodies of a megabyte
    Large,
}

impl Sort {
    fn usual_size(self) -> usize {
        match self {
            Self::Unknown | Self::Others => 50_000,
            Self::OneOrder => 100_000,
            Self::Far => 20_000,
            Self::Large => 100,
        }
    }
}

pub async fn run(servers: &Servers, options: &Options, sort: Sort) -> anyhow::Result<()> {
    let size = options.orders.unwrap_or_else(|| sort.usual_size());
    let env = BenchEnv::for_worker(servers, options, &[]).await?;
    let measured = run_in(&env, servers, sort, size).await;
    env.clean_up().await?;
    let sort = sort.to_possible_value().context("every sort has a name")?.get_name().to_owned();
    let (ledger, mut more) = measured?;
    more.extend([("sort".to_owned(), json!(sort)), ("size".to_owned(), json!(size))]);
    report::print_ledger("flood", servers, options, &ledger, more)
}

async fn run_in(
    env: &BenchEnv<'_>,
    servers: &Servers,
    sort: Sort,
    size: usize,
) -> anyhow::Result<(ledger::Ledger, Map<String, Value>)> {
    let begin = Timestamp::now_by_local_clock() + SETTLING + AHEAD + Duration::from_secs(15);
    let number = ORDERS_PER_S * u32::try_from((BEFORE + DURING + AFTER).as_secs())?;
    let deadlines: Vec<Timestamp> =
        (0..number).map(|number| begin + Duration::from_secs(1) * number / ORDERS_PER_S).collect();
    let good = env.fill(&deadlines, MANY_ARTICLES).await?;
    let existing = match sort {
        Sort::Others => size,
        Sort::OneOrder => 1,
        Sort::Unknown | Sort::Far | Sort::Large => 0,
    };
    let existing = env.fill(&vec![begin + MUCH_LATER; existing], MANY_ARTICLES).await?;
    let mut worker = env.start_worker(&servers.output.join("flood.log")).await?;
    let flooded_at = begin + BEFORE;
    let publishing = tokio::spawn(publish_live(env.publisher().await?, good));
    let flood = ConfirmedPublisher::connect(&env.settings.amqp, "flood").await?;
    sleep_until(flooded_at).await;
    progress::say(format!("flood: publishing {size} messages of sort {sort:?}"));
    let exchange = env.settings.names().schedule();
    let messages = (0..size).map(|number| message(&exchange, sort, number, &existing, flooded_at));
    let began = Timestamp::now_by_local_clock();
    flood.publish_all(messages).await.into_iter().collect::<Result<(), _>>()?;
    progress::say(format!("flood: published in {:?}", Timestamp::now_by_local_clock().since(began)));
    let over_at = flooded_at + DURING;
    sleep_until(over_at).await;
    let peak_mib = broker_mib(servers)?;
    publishing.await??;
    let last = begin + BEFORE + DURING + AFTER;
    env.wait_until_closed(last, &mut worker).await?;
    let unacknowledged = unacknowledged(servers, &env.settings.namespace)?;
    let (worker_mib, broker_mib) = (linux::peak_rss_mib(worker.pid())?, broker_mib(servers)?);
    worker.stop().await?;
    let mut figures = Map::new();
    for (phase, from, to) in
        [("before", begin, flooded_at), ("during", flooded_at, over_at), ("afterwards", over_at, last)]
    {
        figures.insert(format!("lateness_{phase}_ms"), lateness(env, from, to).await?);
        figures.insert(format!("closed_by_{phase}"), closed_by(env, from, to).await?);
    }
    figures.insert("swept_due_s_after_the_flood_began".into(), swept_between(env, flooded_at, last).await?);
    figures.insert("unacknowledged_at_the_end".into(), json!(unacknowledged));
    figures.insert("worker_peak_rss_mib".into(), json!(report::whole(worker_mib)));
    figures.insert("broker_rss_mib".into(), json!([peak_mib, broker_mib]));
    Ok((env.ledger(last).await?, figures))
}

/// As a shop does: each alarm when its order is created, whatever the broker is doing.
async fn publish_live(publisher: order_timeout_client::Publisher, alarms: Vec<OrderDeadline>) -> anyhow::Result<()> {
    let mut alarms = alarms.into_iter().peekable();
    while alarms.peek().is_some() {
        let now = Timestamp::now_by_local_clock();
        let ready: Vec<OrderDeadline> =
            std::iter::from_fn(|| alarms.next_if(|(_, deadline)| *deadline - AHEAD <= now)).collect();
        publisher.schedule_all(ready).await?;
        tokio::time::sleep(PUBLISH_EVERY).await;
    }
    Ok(())
}

fn message(exchange: &str, sort: Sort, number: usize, existing: &[OrderDeadline], now: Timestamp) -> Outgoing {
    let id = match sort {
        Sort::Others | Sort::OneOrder => existing[number % existing.len()].0.clone(),
        Sort::Unknown | Sort::Far | Sort::Large => {
            OrderId::new(Uuid::now_v7().to_string()).expect("a uuid is a good id")
        }
    };
    let deadline = match sort {
        Sort::Far => Timestamp::from_unix_micros(253_402_300_000_000_000),
        Sort::OneOrder => now + Duration::from_micros(number as u64),
        Sort::Unknown | Sort::Others | Sort::Large => now,
    };
    let body = match sort {
        Sort::Large => vec![b'x'; 1_000_000],
        _ => Alarm::new(id, deadline).to_bytes(),
    };
    Outgoing {
        exchange: exchange.to_owned(),
        routing_key: String::new(),
        body,
        message_id: number.to_string(),
        message_type: ALARM_TYPE.to_owned(),
        content_type: "application/json",
        timestamp_s: u64::try_from(now.unix_micros() / 1_000_000).unwrap_or(0),
        ttl: None,
        headers: Vec::new(),
        mandatory: true,
        sender_declares_queue: false,
    }
}

async fn lateness(env: &BenchEnv<'_>, from: Timestamp, to: Timestamp) -> anyhow::Result<Value> {
    let mut lateness_us = histogram();
    for late_us in ledger::lateness(&env.pool, Timestamptz(from), Timestamptz(to)).await? {
        // The ledger counts those that were early.
        lateness_us.record(u64::try_from(late_us).unwrap_or_default())?;
    }
    Ok(lateness_ms(&lateness_us))
}

/// By which path, of the good orders that fell due in this time.
async fn closed_by(env: &BenchEnv<'_>, from: Timestamp, to: Timestamp) -> anyhow::Result<Value> {
    let count = sqlx::query_as(
        "SELECT closed_by, count(*) FROM orders
         WHERE status = 'closed' AND expires_at >= $1 AND expires_at < $2 GROUP BY closed_by",
    );
    let by: Vec<(String, i64)> = count.bind(Timestamptz(from)).bind(Timestamptz(to)).fetch_all(&env.pool).await?;
    Ok(by.into_iter().map(|(by, orders)| (by, json!(orders))).collect::<Map<_, _>>().into())
}

/// The first and the last deadline of those that the sweep closed.
async fn swept_between(env: &BenchEnv<'_>, from: Timestamp, to: Timestamp) -> anyhow::Result<Value> {
    let found = sqlx::query_as(
        "SELECT extract(epoch FROM min(expires_at) - $1)::float8, extract(epoch FROM max(expires_at) - $1)::float8
         FROM orders WHERE closed_by = 'sweep' AND expires_at >= $1 AND expires_at < $2",
    );
    let (first, last): (Option<f64>, Option<f64>) =
        found.bind(Timestamptz(from)).bind(Timestamptz(to)).fetch_one(&env.pool).await?;
    Ok(json!([first, last]))
}

/// Deliveries of this namespace, held alarms included.
fn unacknowledged(servers: &Servers, namespace: &str) -> anyhow::Result<Value> {
    let listed = servers.broker.ctl(&["-q", "list_queues", "name", "messages_ready", "messages_unacknowledged"])?;
    let of_queue = listed.lines().filter(|line| line.starts_with(namespace)).filter_map(|line| {
        let mut fields = line.split('\t');
        let name = fields.next()?.trim_start_matches(namespace).to_owned();
        let counts: Vec<u64> = fields.filter_map(|field| field.trim().parse().ok()).collect();
        counts.iter().any(|count| *count > 0).then(|| (name, json!(counts)))
    });
    Ok(Value::Object(of_queue.collect()))
}

fn broker_mib(servers: &Servers) -> anyhow::Result<Option<u64>> {
    Ok(servers.broker.pid().map(linux::rss_mib).transpose()?.map(report::whole))
}
