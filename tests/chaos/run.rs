//! A run: the shop opens, the plan's faults follow one another, everything settles, and the shop's records are compared
//! with the tables.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use order_timeout::Settings;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::away::{consumers, meanwhile};
use order_timeout_testkit::payment_service::PaymentService;
use order_timeout_testkit::{TIMEOUT, TestEnv};
use tokio::task::JoinSet;

use crate::environment::{Environment, with_environment};
use crate::event_listener::EventListener;
use crate::faults::{CompletedFault, carry_out};
use crate::ledger::{
    AskedProvider, CheckResult, Observations, PROMISED, Report, check_run, outside_faults, pauses_of_closing,
};
use crate::own_tables;
use crate::plan::{Plan, Step};
use crate::provider_ledger::{ProviderReport, Waits};
use crate::shop::{Shop, ShopRecords};
use crate::workers::WORKERS;

/// The parameters of a run.
#[derive(Debug, Clone, Copy)]
struct RunOptions {
    seed: u64,
    length: Duration,
    orders_per_second: f64,
    /// How late a close may be beyond its excuse.
    lateness: Duration,
    /// How long the machine may stall in total.
    standing_still: Duration,
    /// How long the sweep waits for an alarm.
    grace: Duration,
    /// Whether a payment provider is asked before an order is closed, and is among what breaks. Without one, orders are
    /// closed in one statement.
    has_provider: bool,
    /// Whether the orders are in tables of the shop's own.
    is_mapped: bool,
}

/// A period without faults that began when every worker was working again.
#[derive(Debug, Clone, Copy)]
pub struct QuietPeriod {
    pub from: Timestamp,
    pub until: Timestamp,
}

/// The file of the report, beside the logs.
pub const REPORT: &str = "report.json";
/// How long after the sweep's grace an order may still be open in normal operation.
const SWEPT_WITHIN: Duration = Duration::from_millis(500);
/// How often the state is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How often a run prints its progress.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(15);
/// In quiet periods, one of this many alarms may be late or undecided because of earlier faults.
const FEW_ONE_IN: usize = 20;
/// One of this many orders may have waited for a lease: a database that ends all sessions four times a second loses each
/// page of orders that was taken over meanwhile.
const LEASES_ONE_IN: usize = 8;
/// The machine may stall for one part of this many of a run.
const STANDSTILL_ONE_IN: u32 = 100;
/// For a busy machine: the short run checks correctness, the long ones also lateness.
const LENIENT_BOUND: Duration = Duration::from_secs(15);
/// On such a machine, a slightly late alarm is not lost either.
const LENIENT_GRACE: Duration = Duration::from_secs(5);
/// The number of steps before a quiet period, which shows what happened to the alarms.
const STEPS_BETWEEN_QUIET_PERIODS: usize = 4;
const QUIET_PERIOD: Duration = Duration::from_secs(6);
/// A seed with varied and quick first faults.
const SHORT_RUN_SEED: u64 = 4;
/// The same for a run with a payment provider; three of them are faults of it.
const SHORT_RUN_SEED_WITH_PROVIDER: u64 = 4;

#[test]
fn short_random_run_keeps_invariants() {
    run("short", short_run(SHORT_RUN_SEED, false));
}

#[test]
fn short_run_with_provider_keeps_invariants() {
    run("short-with-provider", short_run(SHORT_RUN_SEED_WITH_PROVIDER, true));
}

fn short_run(seed: u64, has_provider: bool) -> RunOptions {
    RunOptions {
        seed,
        length: Duration::from_secs(30),
        orders_per_second: 20.0,
        lateness: LENIENT_BOUND,
        standing_still: LENIENT_BOUND,
        grace: LENIENT_GRACE,
        has_provider,
        is_mapped: false,
    }
}

/// As long as `scripts/chaos` says.
#[test]
#[ignore = "takes as long as it is told to; run by scripts/chaos"]
fn long_random_run_keeps_invariants() {
    let seed = variable_or("SEED", 1);
    let length = Duration::from_secs_f64(60.0 * variable_or("MINUTES", 20.0));
    let orders_per_second = variable_or("RATE", 25.0);
    let (standing_still, grace) = (length / STANDSTILL_ONE_IN, Settings::defaults().sweep.grace);
    let (has_provider, is_mapped) = (variable_or("PROVIDER", true), variable_or("MAPPED", false));
    let lateness = PROMISED;
    let options =
        RunOptions { seed, length, orders_per_second, lateness, standing_still, grace, has_provider, is_mapped };
    let without_provider = if has_provider { "" } else { "-without-provider" };
    run(&format!("seed-{seed}{without_provider}{}", if is_mapped { "-mapped" } else { "" }), options);
}

fn variable_or<T: std::str::FromStr>(what: &str, default: T) -> T {
    let name = format!("ORDER_TIMEOUT_CHAOS_{what}");
    match std::env::var(&name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, which is no such value")),
        Err(_) => default,
    }
}

fn run(name: &str, options: RunOptions) {
    with_environment(
        name,
        options.has_provider.then(PaymentService::start),
        |settings| {
            settings.sweep.grace = options.grace;
            if options.is_mapped {
                own_tables::map(settings);
            }
        },
        move |environment| async move {
            let broken = run_and_check(&environment, options).await;
            assert!(broken.is_empty(), "{} promises broken; read {}", broken.len(), environment.logs.display());
            assert!(!environment.interrupted.is_cancelled(), "interrupted before its time");
        },
    );
}

/// Returns the broken promises.
async fn run_and_check(environment: &Arc<Environment>, options: RunOptions) -> Vec<String> {
    environment.print_line(&format!("{options:?}"));
    if options.is_mapped {
        own_tables::install(&environment.env).await;
    }
    let listener = EventListener::open(&environment.env).await;
    meanwhile(|| environment.broker.flush_declarations());
    environment.workers.start_all().await;
    let publisher = environment.settings_through_proxy().publisher().connect().await.expect("a broker in order");
    let (provider, seed, rate) = (environment.provider.clone(), options.seed, options.orders_per_second);
    let shop = Shop::open(&environment.env, publisher, provider, seed, rate).await;

    let FaultLog { completed, quiet_periods } = run_plan(environment, &shop, options).await;
    if environment.interrupted.is_cancelled() {
        return Vec::new();
    }
    environment.print_line("no more faults: waiting until every order has ended and every event is received");
    let shop_records = shop.shut().await;
    settle(environment, &listener).await;
    let codes = environment.workers.stop_all();

    let received = listener.received();
    let alarmed_after_close = environment.workers.orders_alarmed_after_close();
    let (ShopRecords { records, declined }, completed) = (&shop_records, &completed[..]);
    let standstills = outside_faults(&environment.witness.stalls(), completed);
    write_file(&environment.logs, "standstills.log", &format!("{standstills:#?}\n"));
    let (quiet_periods, standstills) = (&quiet_periods[..], &standstills[..]);
    let (seed, received, alarmed_after_close) = (options.seed, &received, &alarmed_after_close);
    let sweep_grace = environment.env.settings.sweep.grace;
    let truth = |id: uuid::Uuid| environment.provider.as_ref().expect("a provider").truth(&id.to_string());
    let waits = Waits::of(&environment.env.settings);
    let provider = waits.map(|waits| AskedProvider { waits, truth: &truth });
    let observations = Observations {
        seed,
        records,
        completed,
        declined,
        quiet_periods,
        standstills,
        received,
        alarmed_after_close,
        sweep_grace,
        provider,
    };
    let mut result = check_run(&environment.env.pool, observations).await;
    if codes.iter().any(|code| *code != 0) {
        result.violations.push(format!("workers asked to stop ended with {codes:?}"));
    }
    result.violations.extend(environment.workers.unexpected_exits());
    if options.is_mapped {
        result.violations.extend(own_tables::violations(&environment.env).await);
    }
    let bound_ms = options.lateness.as_secs_f64() * 1e3;
    if result.report.max_lateness_beyond_fault_ms >= bound_ms {
        let latest = result.latest.first().cloned().unwrap_or_default();
        result.violations.push(format!("late by more than {bound_ms} ms: {latest}"));
    }
    let stood_still_ms = result.report.stood_still_ms;
    if stood_still_ms > options.standing_still.as_secs_f64() * 1e3 {
        let what = "the machine stalled for too much of this run; run it on an idle machine";
        result.violations.push(format!("{what}: {stood_still_ms} ms"));
    }
    let Report { alarms_owed, alarms_late, alarms_undecided, .. } = result.report;
    if (alarms_late + alarms_undecided) * FEW_ONE_IN > alarms_owed {
        let which = format!("{alarms_late} late and {alarms_undecided} undecided");
        result.violations.push(format!("of {alarms_owed} alarms owed {which}, which is more than a few"));
    }
    if result.report.alarms_lost > 0 {
        result.violations.push(format!("alarms lost: {}", result.alarms_lost.join("; ")));
    }
    result.violations.extend(coverage_gaps(options, &result.report, completed));
    write_report(environment, &result, completed, &shop_records);
    result.violations
}

/// What a run with a payment provider does not show, and what it shows too seldom.
fn provider_gaps(report: &ProviderReport, orders: usize) -> Vec<String> {
    let ProviderReport { closed, paid_by_callback, settled_as_paid, waited_for_lease, .. } = *report;
    let unresolved = report.unresolved.values().sum();
    let mut gaps = Vec::new();
    for (how, count) in [
        ("closed after it was asked", closed),
        ("paid by a callback", paid_by_callback),
        ("settled as paid", settled_as_paid),
        ("listed for a person", unresolved),
    ] {
        if count == 0 {
            gaps.push(format!("no order at the payment provider was {how}"));
        }
    }
    if waited_for_lease * LEASES_ONE_IN > orders {
        gaps.push(format!("{waited_for_lease} of {orders} orders waited for a lease, which is too many"));
    }
    gaps
}

/// Why a run proves less than it seems to: too few orders or faults, or faults without a target.
fn coverage_gaps(options: RunOptions, report: &Report, completed: &[CompletedFault]) -> Vec<String> {
    let seconds = options.length.as_secs_f64();
    #[allow(clippy::cast_precision_loss)] // some thousands
    let (orders, faults) = (report.orders as f64, report.faults as f64);
    let mut coverage_gaps = Vec::new();
    if orders < seconds * options.orders_per_second * 2.0 / 3.0 {
        coverage_gaps.push(format!("only {orders} orders in {seconds} s"));
    }
    if faults < seconds / 12.0 {
        coverage_gaps.push(format!("only {faults} faults in {seconds} s"));
    }
    if report.alarms_owed == 0 {
        coverage_gaps.push("no order fell due in a quiet period, so alarms were not checked".to_owned());
    }
    coverage_gaps.extend(report.provider.iter().flat_map(|provider| provider_gaps(provider, report.orders)));
    let mut hits = BTreeMap::<String, usize>::new();
    for fault in completed {
        if let Some(some) = fault.hits {
            *hits.entry(fault.kind.name()).or_default() += some;
        }
    }
    coverage_gaps
        .extend(hits.into_iter().filter(|(_, hits)| *hits == 0).map(|(kind, _)| format!("{kind} hit no target")));
    coverage_gaps
}

/// The faults carried out, and the quiet periods.
#[derive(Default)]
struct FaultLog {
    completed: Vec<CompletedFault>,
    quiet_periods: Vec<QuietPeriod>,
}

/// Runs the plan until the time is up.
async fn run_plan(environment: &Arc<Environment>, shop: &Shop, options: RunOptions) -> FaultLog {
    let (began, mut printed_at, mut fault_log) = (Instant::now(), Instant::now(), FaultLog::default());
    for (number, step) in Plan::of(options.seed, options.has_provider).enumerate() {
        if number % STEPS_BETWEEN_QUIET_PERIODS == STEPS_BETWEEN_QUIET_PERIODS - 1 {
            fault_log.quiet_periods.push(quiet_period(environment).await);
        }
        let left = options.length.saturating_sub(began.elapsed());
        environment.wait(step.calm.min(left)).await;
        if began.elapsed() >= options.length || environment.interrupted.is_cancelled() {
            break;
        }
        let done = carry_out_step(environment, &step).await;
        let what: Vec<String> = done.iter().map(CompletedFault::to_string).collect();
        environment.print_line(&format!("{:7.1} s  {}", began.elapsed().as_secs_f64(), what.join(", beside ")));
        fault_log.completed.extend(done);
        // Nothing would be closed any more. The checks report it.
        if let Some(pause) = pause_of_closing(environment).await {
            environment.print_line(&format!("the run ends early, because closing was paused: {pause}"));
            break;
        }
        if printed_at.elapsed() > PROGRESS_INTERVAL {
            printed_at = Instant::now();
            environment.print_line(&progress(shop, fault_log.completed.len()));
        }
    }
    environment.print_line(&progress(shop, fault_log.completed.len()));
    fault_log
}

/// Waits until every worker is working again, and then makes no fault for a while.
async fn quiet_period(environment: &Environment) -> QuietPeriod {
    let began = Instant::now();
    // An interrupted run does not poll, because the servers may be gone.
    while !environment.interrupted.is_cancelled()
        && let Some(unsettled) = unsettled_reason(environment).await
    {
        assert!(began.elapsed() < TIMEOUT, "not all workers recovered within {TIMEOUT:?}: {unsettled}");
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    let from = Timestamp::now_by_local_clock();
    environment.wait(QUIET_PERIOD).await;
    QuietPeriod { from, until: Timestamp::now_by_local_clock() }
}

/// Which worker does not consume, or which orders or alarms are waiting; `None` if all work.
async fn unsettled_reason(environment: &Environment) -> Option<String> {
    let (env, names) = (environment.with_broker_channel().await, environment.env.names());
    // A session is open when the last of its queues is consumed.
    let open_sessions = consumers(&env, &names.parked()).await;
    // An order without an alarm is left to the sweep, which waits for its grace first.
    let overdue = overdue(&env, env.settings.sweep.grace + SWEPT_WITHIN).await;
    let unsent = "SELECT count(*) FROM alarm_outbox
                  WHERE sent_at IS NULL AND created_at < clock_timestamp() - interval '1 s'";
    let unsent = count(&env, unsent).await;
    if let Some(pause) = pause_of_closing(environment).await {
        return Some(format!("closing was paused: {pause}"));
    }
    let all_works = usize::try_from(open_sessions) == Ok(WORKERS) && overdue == Some(0) && unsent == Some(0);
    (!all_works).then(|| format!("{open_sessions} sessions, {overdue:?} orders overdue, {unsent:?} alarms unsent"))
}

/// The first pause of closing, if there is one and the database answers.
async fn pause_of_closing(environment: &Environment) -> Option<String> {
    pauses_of_closing(&environment.env.pool).await.ok()?.into_iter().next()
}

/// Orders still open this long after they fell due, if the database answers.
pub async fn overdue(env: &TestEnv, by: Duration) -> Option<usize> {
    let sql = "SELECT count(*) FROM orders
               WHERE status = 'unpaid' AND expires_at < clock_timestamp() - make_interval(secs => $1)";
    let counted: i64 = sqlx::query_scalar(sql).bind(by.as_secs_f64()).fetch_one(&env.pool).await.ok()?;
    usize::try_from(counted).ok()
}

/// The count that this statement returns, if the database answers.
pub async fn count(env: &TestEnv, sql: &'static str) -> Option<usize> {
    let counted: i64 = sqlx::query_scalar(sql).fetch_one(&env.pool).await.ok()?;
    usize::try_from(counted).ok()
}

async fn carry_out_step(environment: &Arc<Environment>, step: &Step) -> Vec<CompletedFault> {
    let mut faults = JoinSet::new();
    for fault in &step.faults {
        faults.spawn(carry_out(environment.clone(), *fault));
    }
    faults.join_all().await
}

fn progress(shop: &Shop, faults: usize) -> String {
    let of = |counter: &std::sync::atomic::AtomicUsize| counter.load(Ordering::Relaxed);
    let counters = &shop.counters;
    format!(
        "           {faults} faults, {} orders, {} paid ({} at the deadline, {} too late), {} operations repeated",
        of(&counters.taken),
        of(&counters.paid),
        of(&counters.paid_at_deadline),
        of(&counters.paid_too_late),
        of(&counters.repeated)
    )
}

/// Orders that are neither closed nor paid nor listed for a person.
const OPEN: &str = "SELECT count(*) FROM orders o
    LEFT JOIN close_attempts c ON c.kind = 'order' AND c.order_id = o.id::text AND c.unresolved_at IS NOT NULL
    WHERE o.status = 'unpaid' OR o.status = 'closing' AND c.order_id IS NULL";

/// Waits until every order has ended, every event is sent, and each was received. The checks report what is still missing
/// after a time limit.
pub async fn settle(environment: &Environment, listener: &EventListener) {
    let began = Instant::now();
    let count = async |sql| count(&environment.env, sql).await;
    while began.elapsed() < TIMEOUT && !environment.interrupted.is_cancelled() {
        let open = count(OPEN).await;
        let unsent = count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await;
        let events = count("SELECT count(*) FROM event_outbox").await;
        if (open, unsent, events) == (Some(0), Some(0), Some(listener.count())) {
            return;
        }
        environment.wait(Duration::from_millis(200)).await;
    }
}

/// Writes all logs and the report.
fn write_report(
    environment: &Environment,
    result: &CheckResult,
    completed: &[CompletedFault],
    shop_records: &ShopRecords,
) {
    let mut faults = String::new();
    for fault in completed {
        let _ = writeln!(faults, "{fault:?}");
    }
    write_file(&environment.logs, "faults.log", &faults);
    write_file(&environment.logs, "latest.log", &result.latest.join("\n"));
    write_file(&environment.logs, "violations.log", &result.violations.join("\n"));
    write_file(
        &environment.logs,
        "orders.log",
        &shop_records.records.iter().map(|record| format!("{record:?}\n")).collect::<String>(),
    );
    write_file(&environment.logs, "declined.log", &format!("{:#?}\n", shop_records.declined));
    for violation in result.violations.iter().take(10) {
        environment.print_line(&format!("BROKEN  {violation}"));
    }
    let line = serde_json::to_string(&result.report).expect("plain numbers");
    environment.print_line(&line);
    write_file(&environment.logs, REPORT, &format!("{line}\n"));
}

pub fn write_file(logs: &Path, name: &str, text: &str) {
    std::fs::write(logs.join(name), text).expect("a file beside the logs");
}
