//! Measures one candidate that closes one set of orders: which candidate, when the orders fall due, and what it cost.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use hdrhistogram::Histogram;
use order_timeout_amqp::connect;
use order_timeout_core::delay::Strategy;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::linux;
use secrecy::ExposeSecret;

use crate::Options;
use crate::bench_env::ledger::Ledger;
use crate::bench_env::process::{self, Program};
use crate::bench_env::servers::Servers;
use crate::bench_env::{BenchEnv, IDLE_WATCH, OrderDeadline, SETTLING, queue_state, sleep_until};
use crate::competitors::{self, Competitor, Kind};
use crate::limits::postgres::CommitProbe;
use crate::progress;
use crate::scheduling::Scheduler;
use crate::watching::{Watch, Watching};

/// A slow machine's rate of inserting orders, used to choose the start.
const SLOWEST_FILLING_PER_S: f64 = 8_000.0;
/// The time for starting a worker or a competitor.
const STARTING: Duration = Duration::from_secs(6);
/// The publishing interval of live plans.
const LIVE_EVERY: Duration = Duration::from_millis(10);

/// What closes the orders.
#[derive(Debug, Clone)]
pub enum Candidate {
    /// `order-timeout worker`, with these settings besides the defaults.
    Worker(Vec<String>),
    /// The same, while it is watched.
    Watched(Vec<String>, Watch),
    Poller {
        every: Duration,
        connections: u32,
    },
    LookAhead {
        connections: u32,
    },
}

impl Candidate {
    fn is_worker(&self) -> bool {
        matches!(self, Self::Worker(_) | Self::Watched(..))
    }
}

/// When orders fall due, and when their alarms are published.
#[derive(Debug, Clone)]
pub struct Plan {
    /// From the start of publishing to the first deadline.
    pub ahead: Duration,
    /// Each order's deadline after the first deadline, in the order of scheduling.
    pub after_first: Vec<Duration>,
    /// Whether each alarm is published `ahead` of its own deadline, instead of all at the start.
    pub live: bool,
    /// The lane that all alarms must use, if they are published at the start.
    pub lane: Option<Duration>,
    /// The first deadline is a multiple of this.
    pub aligned_to: Option<Duration>,
    /// Orders due later than this after the first deadline are not waited for.
    pub horizon: Duration,
    pub articles: usize,
}

/// The results.
#[derive(Debug)]
pub struct Figures {
    pub name: String,
    pub ledger: Ledger,
    /// Orders that were not waited for.
    pub pending: usize,
    /// Processor time of the candidate, from the start of publishing.
    pub cpu_s: f64,
    pub peak_rss_mib: f64,
    /// Processor time from the first deadline until everything was done (for the worker: announced too), and that
    /// duration.
    pub working_cpu_s: f64,
    pub postgres_cpu_s: f64,
    pub working_s: f64,
    /// Processor time of the broker from the start of publishing, minus its idle use.
    pub broker_cpu_s: Option<f64>,
    /// From the first deadline until the last event was announced; only the worker announces.
    pub announced_s: Option<f64>,
    /// The longest delay of publishing behind the plan.
    pub published_late: Duration,
    /// The duration of single-row commits meanwhile.
    pub commit_us: Histogram<u64>,
    /// What watched the worker, and what it received.
    pub watched: Option<serde_json::Value>,
}

/// Lets one candidate close the orders of a plan.
pub async fn measure(
    servers: &Servers,
    options: &Options,
    name: &str,
    candidate: &Candidate,
    plan: &Plan,
) -> anyhow::Result<Figures> {
    let mut watching = None;
    let env = match candidate {
        Candidate::Worker(overrides) => BenchEnv::for_worker(servers, options, overrides).await?,
        Candidate::Watched(overrides, watch) => {
            let prepared = Watching::prepare(*watch).await?;
            let settings = [overrides.clone(), prepared.settings()].concat();
            watching = Some(prepared);
            BenchEnv::for_worker(servers, options, &settings).await?
        }
        Candidate::Poller { .. } | Candidate::LookAhead { .. } => {
            BenchEnv::without_broker(servers, options.socket).await?
        }
    };
    let figures = measure_in(&env, servers, name, candidate, plan, watching).await;
    env.clean_up().await?;
    figures
}

async fn measure_in(
    env: &BenchEnv<'_>,
    servers: &Servers,
    name: &str,
    candidate: &Candidate,
    plan: &Plan,
    mut watching: Option<Watching>,
) -> anyhow::Result<Figures> {
    let first = plan.first_deadline();
    let begin = first - plan.ahead;
    let deadlines: Vec<Timestamp> = plan.after_first.iter().map(|after| first + *after).collect();
    let last = *deadlines.iter().filter(|due| **due <= first + plan.horizon).max().expect("a plan has orders");
    let pending = deadlines.iter().filter(|due| **due > last).count();
    progress::say(format!("{name}: writing {} orders", deadlines.len()));
    let alarms = env.fill(&deadlines, plan.articles).await?;
    let probe = CommitProbe::start(env.pool.clone()).await?;
    let mut program = start(env, servers, name, candidate).await?;
    if let Some(watching) = &mut watching {
        watching.begin(env.http_of(&log_of(servers, name)).await?);
    }
    let is_traced = watching.as_ref().is_some_and(Watching::is_traced);

    let settled = begin - IDLE_WATCH;
    let in_time = Timestamp::now_by_local_clock() + SETTLING <= settled;
    ensure!(in_time, "preparing {} orders took longer than planned; is the machine busy?", alarms.len());
    let wait = settled.since(Timestamp::now_by_local_clock());
    progress::say(format!("{name}: started; alarms are published in {:.0} s", wait.as_secs_f64()));
    sleep_until(settled).await;
    let before = Readings::take(servers, &program)?;
    sleep_until(begin).await;
    let beginning = Readings::take(servers, &program)?;
    let watch = watch_at(first, servers, &program);
    let publish = async {
        match candidate {
            Candidate::Worker(_) | Candidate::Watched(..) if env.settings.delay.strategy.needs_broker() => {
                publish(env, plan, begin, alarms, is_traced).await
            }
            // They read the deadlines from the rows.
            _ => Ok(Duration::ZERO),
        }
    };
    progress::say(format!("{name}: the first order is due in {:.0} s", plan.ahead.as_secs_f64()));
    let (published_late, due) = tokio::try_join!(publish, watch)?;
    env.wait_until_closed(last, &mut program).await?;
    progress::say(format!("{name}: every order is closed"));
    let is_worker = candidate.is_worker();
    if is_worker {
        env.wait_until_announced(&mut program).await?;
    }
    let end = Readings::take(servers, &program)?;
    let commit_us = probe.stop().await?;
    let peak_rss_mib = linux::peak_rss_mib(program.pid())?;
    let watched = watching.map(Watching::end).transpose()?;
    program.stop().await?;
    Ok(Figures {
        name: name.to_owned(),
        ledger: env.ledger(last).await?,
        pending,
        cpu_s: end.own_cpu_s - beginning.own_cpu_s,
        peak_rss_mib,
        working_cpu_s: end.own_cpu_s - due.own_cpu_s,
        postgres_cpu_s: end.postgres_cpu_s - due.postgres_cpu_s,
        working_s: end.at.since(first).as_secs_f64(),
        broker_cpu_s: end.broker_cpu_beyond_idle(&beginning, &before).filter(|_| is_worker),
        announced_s: is_worker.then(|| end.at.since(first).as_secs_f64()),
        published_late,
        commit_us,
        watched,
    })
}

async fn start(env: &BenchEnv<'_>, servers: &Servers, name: &str, candidate: &Candidate) -> anyhow::Result<Program> {
    let log = log_of(servers, name);
    let (kind, connections, every) = match candidate {
        Candidate::Worker(_) | Candidate::Watched(..) => return env.start_worker(&log).await,
        Candidate::Poller { every, connections } => (Kind::Poller, *connections, *every),
        Candidate::LookAhead { connections } => (Kind::LookAhead, *connections, Duration::ZERO),
    };
    let competitor =
        Competitor { kind, database: env.settings.database.url.expose_secret().to_owned(), connections, every };
    competitors::start(&competitor, &log, &env.pool).await
}

fn log_of(servers: &Servers, name: &str) -> PathBuf {
    servers.output.join(format!("{}.log", name.replace([',', ' '], "")))
}

async fn watch_at(moment: Timestamp, servers: &Servers, program: &Program) -> anyhow::Result<Readings> {
    sleep_until(moment).await;
    Readings::take(servers, program)
}

/// Publishes the alarms of a plan; returns the longest delay behind it.
async fn publish(
    env: &BenchEnv<'_>,
    plan: &Plan,
    begin: Timestamp,
    alarms: Vec<OrderDeadline>,
    is_traced: bool,
) -> anyhow::Result<Duration> {
    let scheduler = Scheduler::connect(env, is_traced).await?;
    if !plan.live {
        scheduler.schedule_all(alarms).await?;
        let took = Timestamp::now_by_local_clock().since(begin);
        if let Some(lane) = plan.lane.filter(|_| env.settings.delay.strategy == Strategy::DeadLetter) {
            ensure_by_lane(lane, env.settings.delay.tolerance(), plan.ahead, took)?;
        }
        ensure_all_waiting(env, plan, begin).await?;
        return Ok(Duration::ZERO);
    }
    let mut behind = Duration::ZERO;
    let mut alarms = alarms.into_iter().peekable();
    while alarms.peek().is_some() {
        let now = Timestamp::now_by_local_clock();
        let mut ready = Vec::new();
        while let Some(alarm) = alarms.next_if(|(_, deadline)| *deadline - plan.ahead <= now) {
            behind = behind.max(now.since(alarm.1 - plan.ahead));
            ready.push(alarm);
        }
        scheduler.schedule_all(ready).await?;
        tokio::time::sleep(LIVE_EVERY).await;
    }
    Ok(behind)
}

/// Alarms that are published too early or too late for the lane's delay take another route.
fn ensure_by_lane(lane: Duration, tolerance: Duration, ahead: Duration, took: Duration) -> anyhow::Result<()> {
    let [first, last] = [ahead, ahead.saturating_sub(took)];
    let are_in_time = [first, last].iter().all(|delay| delay.abs_diff(lane) <= tolerance);
    ensure!(are_in_time, "published over {took:?}, not all alarms took the lane; take fewer --orders or a longer lead");
    Ok(())
}

/// Alarms of one instant must all be waiting before the first of them leaves the broker; otherwise something else is
/// measured.
async fn ensure_all_waiting(env: &BenchEnv<'_>, plan: &Plan, begin: Timestamp) -> anyhow::Result<()> {
    if plan.ahead.is_zero() {
        return Ok(());
    }
    let connection = env.connect().await?;
    let inbox = env.settings.names().schedule();
    while queue_state(&connection, &inbox).await?.ready > 0 {
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    connect::close(&connection, Duration::from_secs(1)).await;
    let leave_at = begin + plan.ahead - env.settings.delay.lead;
    ensure!(Timestamp::now_by_local_clock() < leave_at, "scheduling took longer than planned; is the machine busy?");
    Ok(())
}

impl Plan {
    fn first_deadline(&self) -> Timestamp {
        let filling = Duration::from_secs_f64(self.after_first.len() as f64 / SLOWEST_FILLING_PER_S);
        let preparing = filling + STARTING + SETTLING + IDLE_WATCH;
        let earliest = Timestamp::now_by_local_clock() + preparing + self.ahead;
        let Some(unit) = self.aligned_to else { return earliest };
        let unit_us = i64::try_from(unit.as_micros()).expect("a unit is short");
        Timestamp::from_unix_micros((earliest.unix_micros() / unit_us + 1) * unit_us)
    }
}

/// Processor time used so far.
#[derive(Debug, Clone, Copy)]
struct Readings {
    at: Timestamp,
    own_cpu_s: f64,
    postgres_cpu_s: f64,
    broker_cpu_s: Option<f64>,
}

impl Readings {
    fn take(servers: &Servers, program: &Program) -> anyhow::Result<Self> {
        Ok(Self {
            at: Timestamp::now_by_local_clock(),
            own_cpu_s: linux::cpu_s(program.pid())?,
            postgres_cpu_s: linux::tree_cpu_s(servers.postgres.pid())?,
            broker_cpu_s: servers.broker.pid().map(linux::cpu_s).transpose()?,
        })
    }

    /// The broker's use since `beginning` beyond its idle use, which was measured between `before` and `beginning`,
    /// after it had settled.
    fn broker_cpu_beyond_idle(&self, beginning: &Self, before: &Self) -> Option<f64> {
        let since = |now: &Self, then: &Self| Some((now.broker_cpu_s? - then.broker_cpu_s?, now.at.since(then.at)));
        Some(process::cpu_beyond_idle_s(since(beginning, before)?, since(self, beginning)?))
    }
}
