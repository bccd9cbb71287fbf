//! Many alarms that are not due for a long time: the memory of each, and the costs of broker and worker while they
//! wait.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, ensure};
use order_timeout_core::order::{OrderId, Timestamp};
use order_timeout_testkit::linux;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::Options;
use crate::bench_env::process::Program;
use crate::bench_env::servers::Servers;
use crate::bench_env::{BenchEnv, IDLE_WATCH, OrderDeadline, SETTLING};
use crate::report::{self, round, whole};

/// No alarm falls due during the measurement, nor returns from a coarse ring.
const SOONEST_S: u64 = 30 * 60;
const LATEST_S: u64 = 24 * 3_600;
/// After this time without all alarms in the wheel the run has failed.
const TIMEOUT: Duration = Duration::from_secs(180);
/// Quorum queues keep recent messages in a write-ahead log in memory, up to half a gigabyte for all queues together; on
/// a busy broker it rolls over by itself.
const ROLL_OVER: &str = "#{names := #{wal := Wal}} = ra_system:fetch(quorum_queues), ra_log_wal:force_roll_over(Wal).";

pub async fn run(servers: &Servers, options: &Options, alarms: usize) -> anyhow::Result<()> {
    let env = BenchEnv::for_worker(servers, options, &[]).await?;
    let outcome = measure(&env, servers, options, alarms).await;
    env.clean_up().await?;
    report::print_line(&outcome?, options.json);
    Ok(())
}

async fn measure(env: &BenchEnv<'_>, servers: &Servers, options: &Options, alarms: usize) -> anyhow::Result<Value> {
    let mut worker = env.start_worker(&servers.output.join("worker.log")).await?;
    tokio::time::sleep(SETTLING).await;
    let before = Memory::take(servers, &worker)?;
    let idle_before = Idle::watch(servers, &worker).await?;
    let began = tokio::time::Instant::now();
    env.publisher().await?.schedule_all(random_alarms(alarms)).await?;
    wait_until_armed(env, servers, &mut worker, alarms).await?;
    let armed_in = began.elapsed();
    tokio::time::sleep(SETTLING).await;
    let fresh = Memory::take(servers, &worker)?;
    servers.broker.ctl(&["eval", ROLL_OVER])?;
    tokio::time::sleep(SETTLING).await;
    let settled = Memory::take(servers, &worker)?;
    let idle = Idle::watch(servers, &worker).await?;
    let line = json!({
        "scenario": "pending", "strategy": options.strategy, "broker": servers.broker.version()?,
        "pending": alarms,
        "armed_per_s": whole(alarms as f64 / armed_in.as_secs_f64()),
        "broker_bytes_per_alarm_fresh": fresh.broker_bytes_per_alarm(&before, alarms),
        "broker_bytes_per_alarm": settled.broker_bytes_per_alarm(&before, alarms),
        "broker_rss_mib": round(settled.broker_rss_mib, 1), "broker_rss_mib_before": round(before.broker_rss_mib, 1),
        "worker_bytes_per_alarm": round((settled.worker_mib - before.worker_mib) * MIB / alarms as f64, 1),
        "worker_rss_mib": round(settled.worker_mib, 1), "worker_rss_mib_before": round(before.worker_mib, 1),
        "worker_peak_rss_mib": round(linux::peak_rss_mib(worker.pid())?, 1),
        "idle_broker_share_of_a_core": round(idle.broker, 4),
        "idle_broker_share_of_a_core_before": round(idle_before.broker, 4),
        "idle_worker_share_of_a_core": round(idle.worker, 4),
        "idle_worker_share_of_a_core_before": round(idle_before.worker, 4),
    });
    worker.stop().await?;
    Ok(line)
}

const MIB: f64 = 1024.0 * 1024.0;

/// They have no orders: none is read before its alarm is due.
fn random_alarms(alarms: usize) -> Vec<OrderDeadline> {
    let mut random = fastrand::Rng::with_seed(1);
    let now = Timestamp::now_by_local_clock();
    let mut alarm = || {
        let deadline = now + Duration::from_secs(random.u64(SOONEST_S..LATEST_S));
        (OrderId::new(Uuid::now_v7().to_string()).expect("a uuid is a good id"), deadline)
    };
    (0..alarms).map(|_| alarm()).collect()
}

/// Waits until all alarms are in their slots and none in the inbox. A quorum queue's own count is up to five seconds
/// old, and each queue updates it at a different time, so the sum is right only once nothing changes any more.
async fn wait_until_armed(
    env: &BenchEnv<'_>,
    servers: &Servers,
    worker: &mut Program,
    alarms: usize,
) -> anyhow::Result<()> {
    let began = tokio::time::Instant::now();
    let names = env.settings.names();
    loop {
        worker.ensure_runs()?;
        let messages = messages_by_queue(servers)?;
        let in_inbox = messages.get(&names.schedule()).copied().unwrap_or(0);
        let waiting: usize = messages.values().sum::<usize>() - in_inbox;
        if in_inbox == 0 && waiting == alarms {
            return Ok(());
        }
        ensure!(
            began.elapsed() < TIMEOUT,
            "after {TIMEOUT:?} {in_inbox} alarms are in the inbox and {waiting} of {alarms} wait in the broker"
        );
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

fn messages_by_queue(servers: &Servers) -> anyhow::Result<BTreeMap<String, usize>> {
    let listed = servers.broker.ctl(&["list_queues", "--quiet", "--no-table-headers", "name", "messages"])?;
    let rows = listed.lines().filter_map(|line| line.split_once('\t'));
    rows.map(|(name, messages)| Ok((name.to_owned(), messages.trim().parse()?))).collect()
}

/// The memory of broker and worker.
struct Memory {
    /// As counted by the broker's runtime, without memory that its process has not returned to the system.
    broker_bytes: f64,
    broker_rss_mib: f64,
    worker_mib: f64,
}

impl Memory {
    fn take(servers: &Servers, worker: &Program) -> anyhow::Result<Self> {
        let pid = servers.broker.pid().context("memory can be measured of a private broker alone")?;
        let collect = "[erlang:garbage_collect(P) || P <- processes()], erlang:memory(total).";
        Ok(Self {
            broker_bytes: servers.broker.ctl(&["eval", collect])?.trim().parse()?,
            broker_rss_mib: linux::rss_mib(pid)?,
            worker_mib: linux::rss_mib(worker.pid())?,
        })
    }

    fn broker_bytes_per_alarm(&self, before: &Self, alarms: usize) -> f64 {
        round((self.broker_bytes - before.broker_bytes) / alarms as f64, 1)
    }
}

/// Shares of a core while nothing happens.
struct Idle {
    broker: f64,
    worker: f64,
}

impl Idle {
    async fn watch(servers: &Servers, worker: &Program) -> anyhow::Result<Self> {
        let pid = servers.broker.pid().context("idleness can be measured of a private broker alone")?;
        let (broker_s, worker_s) = (linux::cpu_s(pid)?, linux::cpu_s(worker.pid())?);
        tokio::time::sleep(IDLE_WATCH).await;
        let share = |before: f64, after: f64| (after - before) / IDLE_WATCH.as_secs_f64();
        Ok(Self { broker: share(broker_s, linux::cpu_s(pid)?), worker: share(worker_s, linux::cpu_s(worker.pid())?) })
    }
}
