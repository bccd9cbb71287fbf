//! A run: the shop opens, the plan's faults come one after the other, everything comes to rest, and the books are
//! compared.

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use order_timeout::Publisher;
use tokio::task::JoinSet;

use crate::ear::Ear;
use crate::faults::{Carried, carry_out};
use crate::ledger::{Evidence, PROMISED, Verdict, judge};
use crate::plan::{Plan, Step};
use crate::premises::{Premises, on_premises};
use crate::shop::{Life, Shop};
use crate::support::away::COMING_BACK;

/// What a run is asked for.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    seed: u64,
    length: Duration,
    orders_per_second: f64,
    /// How much later than excused a close may be.
    lateness: Duration,
}

/// Where the report goes, beside the logs.
pub const REPORT: &str = "report.json";
/// How often a run says how far it is.
const SAY_EVERY: Duration = Duration::from_secs(15);
/// For a machine that is busy with other things: the short run is about what is right, the long ones about when.
const GENEROUS: Duration = Duration::from_secs(15);
/// A seed whose first faults are a mixed lot that takes the machine little time.
const SEED_OF_THE_SHORT_RUN: u64 = 4;

#[test]
fn a_short_run_of_faults_at_random_loses_and_doubles_nothing() {
    let length = Duration::from_secs(30);
    run("short", Wanted { seed: SEED_OF_THE_SHORT_RUN, length, orders_per_second: 20.0, lateness: GENEROUS });
}

/// As long as `scripts/chaos` says.
#[test]
#[ignore = "takes as long as it is told to; run by scripts/chaos"]
fn a_long_run_of_faults_at_random_loses_and_doubles_nothing() {
    let seed = asked_for("SEED", 1);
    let length = Duration::from_secs_f64(60.0 * asked_for("MINUTES", 20.0));
    let wanted = Wanted { seed, length, orders_per_second: asked_for("RATE", 25.0), lateness: PROMISED };
    run(&format!("seed-{seed}"), wanted);
}

fn asked_for<T: std::str::FromStr>(what: &str, otherwise: T) -> T {
    let name = format!("ORDER_TIMEOUT_CHAOS_{what}");
    match std::env::var(&name) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, which is no number")),
        Err(_) => otherwise,
    }
}

fn run(name: &str, wanted: Wanted) {
    on_premises(name, move |premises| async move {
        let broken = attend(&premises, wanted).await;
        assert!(broken.is_empty(), "{} promises broken; read {}", broken.len(), premises.logs.display());
        assert!(!premises.interrupted.is_cancelled(), "interrupted before its time");
    });
}

/// Returns the broken promises.
async fn attend(premises: &Arc<Premises>, wanted: Wanted) -> Vec<String> {
    premises.say(&format!("{wanted:?}"));
    let ear = Ear::open(&premises.stage).await;
    premises.crew.start_all().await;
    let publisher = Publisher::connect(&premises.behind_the_network()).await.expect("a broker in order");
    let shop = Shop::open(&premises.stage, publisher, wanted.seed, wanted.orders_per_second).await;

    let carried = make_trouble(premises, &shop, wanted).await;
    if premises.interrupted.is_cancelled() {
        return Vec::new();
    }
    premises.say("no more faults: waiting until everything is closed and heard of");
    let lives = shop.shut().await;
    come_to_rest(premises, &ear).await;
    let codes = premises.crew.dismiss();

    let heard = ear.heard();
    let evidence = Evidence { seed: wanted.seed, lives: &lives, carried: &carried, heard: &heard };
    let mut verdict = judge(&premises.stage.pool, evidence).await;
    if codes.iter().any(|code| *code != 0) {
        verdict.violations.push(format!("workers asked to stop ended with {codes:?}"));
    }
    verdict.violations.extend(premises.crew.deserted());
    let bound_ms = wanted.lateness.as_secs_f64() * 1e3;
    if verdict.report.max_lateness_beyond_fault_ms >= bound_ms {
        let latest = verdict.latest.first().cloned().unwrap_or_default();
        verdict.violations.push(format!("late by more than {bound_ms} ms: {latest}"));
    }
    hand_over(premises, &verdict, &carried, &lives);
    verdict.violations
}

/// The plan, until the time is up.
async fn make_trouble(premises: &Arc<Premises>, shop: &Shop, wanted: Wanted) -> Vec<Carried> {
    let (began, mut said, mut carried) = (Instant::now(), Instant::now(), Vec::new());
    for step in Plan::of(wanted.seed) {
        let left = wanted.length.saturating_sub(began.elapsed());
        premises.wait(step.calm.min(left)).await;
        if began.elapsed() >= wanted.length || premises.interrupted.is_cancelled() {
            break;
        }
        let done = carry_out_step(premises, &step).await;
        let what: Vec<String> = done.iter().map(Carried::to_string).collect();
        premises.say(&format!("{:7.1} s  {}", began.elapsed().as_secs_f64(), what.join(", beside ")));
        carried.extend(done);
        if said.elapsed() > SAY_EVERY {
            said = Instant::now();
            premises.say(&progress(shop, carried.len()));
        }
    }
    premises.say(&progress(shop, carried.len()));
    carried
}

async fn carry_out_step(premises: &Arc<Premises>, step: &Step) -> Vec<Carried> {
    let mut faults = JoinSet::new();
    for fault in &step.faults {
        faults.spawn(carry_out(premises.clone(), *fault));
    }
    faults.join_all().await
}

fn progress(shop: &Shop, faults: usize) -> String {
    let of = |counter: &std::sync::atomic::AtomicUsize| counter.load(Ordering::Relaxed);
    let counters = &shop.counters;
    format!(
        "           {faults} faults, {} orders, {} paid ({} in the nick of time, {} too late), {} things said again",
        of(&counters.taken),
        of(&counters.paid),
        of(&counters.paid_in_the_nick_of_time),
        of(&counters.paid_too_late),
        of(&counters.said_again)
    )
}

/// Until nothing is unpaid, every event is sent, and each was heard. What has not happened by then is for the judge.
pub async fn come_to_rest(premises: &Premises, ear: &Ear) {
    let began = Instant::now();
    let count = async |sql| sqlx::query_scalar::<_, i64>(sql).fetch_one(&premises.stage.pool).await.unwrap_or(-1);
    while began.elapsed() < COMING_BACK && !premises.interrupted.is_cancelled() {
        let unpaid = count("SELECT count(*) FROM orders WHERE status = 'unpaid'").await;
        let unsent = count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await;
        let events = count("SELECT count(*) FROM event_outbox").await;
        if unpaid == 0 && unsent == 0 && usize::try_from(events) == Ok(ear.count()) {
            return;
        }
        premises.wait(Duration::from_millis(200)).await;
    }
}

/// Everything for whoever reads it later, and the report's line.
fn hand_over(premises: &Premises, verdict: &Verdict, carried: &[Carried], lives: &[Life]) {
    let mut faults = String::new();
    for fault in carried {
        let _ = writeln!(faults, "{fault:?}");
    }
    keep(&premises.logs, "faults.log", &faults);
    keep(&premises.logs, "latest.log", &verdict.latest.join("\n"));
    keep(&premises.logs, "violations.log", &verdict.violations.join("\n"));
    keep(&premises.logs, "books.log", &lives.iter().map(|life| format!("{life:?}\n")).collect::<String>());
    for violation in verdict.violations.iter().take(10) {
        premises.say(&format!("BROKEN  {violation}"));
    }
    let line = serde_json::to_string(&verdict.report).expect("plain numbers");
    premises.say(&line);
    keep(&premises.logs, REPORT, &format!("{line}\n"));
}

pub fn keep(logs: &Path, name: &str, text: &str) {
    std::fs::write(logs.join(name), text).expect("a file beside the logs");
}
