//! A run: the shop opens, the plan's faults come one after the other, everything comes to rest, and the books are
//! compared.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use order_timeout::order::Timestamp;
use order_timeout::{Publisher, Settings};
use tokio::task::JoinSet;

use crate::crew::WORKERS;
use crate::ear::Ear;
use crate::faults::{Carried, carry_out};
use crate::ledger::{Evidence, PROMISED, Report, Verdict, but_for_faults, judge};
use crate::plan::{Plan, Step};
use crate::premises::{Premises, on_premises};
use crate::shop::{Books, Shop};
use crate::support::TestEnv;
use crate::support::away::{COMING_BACK, consumers, meanwhile};

/// What a run is asked for.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    seed: u64,
    length: Duration,
    orders_per_second: f64,
    /// How much later than excused a close may be.
    lateness: Duration,
    /// How long the disk may stand still in all.
    standing_still: Duration,
    /// How long the sweep leaves an alarm to come.
    grace: Duration,
}

/// A while in which nothing is broken, and everybody had come back to work before it began.
#[derive(Debug, Clone, Copy)]
pub struct Rest {
    pub from: Timestamp,
    pub until: Timestamp,
}

/// Where the report goes, beside the logs.
pub const REPORT: &str = "report.json";
/// How long after the sweep's grace an order may still be open without anybody being amiss.
const SWEPT_WITHIN: Duration = Duration::from_millis(500);
/// How often it is asked whether everybody works.
const ASK_EVERY: Duration = Duration::from_millis(20);
/// How often a run says how far it is.
const SAY_EVERY: Duration = Duration::from_secs(15);
/// One in so many alarms may come late in a rest, or not be known to have come, by what was broken around it.
const FEW: usize = 20;
/// The disk may stand still for one part in so many.
const STANDSTILL_SHARE: u32 = 100;
/// For a machine that is busy with other things: the short run is about what is right, the long ones about when.
const GENEROUS: Duration = Duration::from_secs(15);
/// Nor is an alarm lost on such a machine that is a little late.
const GENEROUS_GRACE: Duration = Duration::from_secs(5);
/// After so many steps there is a rest, so that it is seen what became of the alarms.
const STEPS_BETWEEN_RESTS: usize = 4;
const REST: Duration = Duration::from_secs(6);
/// A seed whose first faults are a mixed lot that takes the machine little time.
const SEED_OF_THE_SHORT_RUN: u64 = 4;

#[test]
fn a_short_run_of_faults_at_random_loses_and_doubles_nothing() {
    let length = Duration::from_secs(30);
    run(
        "short",
        Wanted {
            seed: SEED_OF_THE_SHORT_RUN,
            length,
            orders_per_second: 20.0,
            lateness: GENEROUS,
            standing_still: GENEROUS,
            grace: GENEROUS_GRACE,
        },
    );
}

/// As long as `scripts/chaos` says.
#[test]
#[ignore = "takes as long as it is told to; run by scripts/chaos"]
fn a_long_run_of_faults_at_random_loses_and_doubles_nothing() {
    let seed = asked_for("SEED", 1);
    let length = Duration::from_secs_f64(60.0 * asked_for("MINUTES", 20.0));
    let orders_per_second = asked_for("RATE", 25.0);
    let (standing_still, grace) = (length / STANDSTILL_SHARE, Settings::defaults().sweep.grace);
    let wanted = Wanted { seed, length, orders_per_second, lateness: PROMISED, standing_still, grace };
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
    on_premises(
        name,
        |settings| settings.sweep.grace = wanted.grace,
        move |premises| async move {
            let broken = attend(&premises, wanted).await;
            assert!(broken.is_empty(), "{} promises broken; read {}", broken.len(), premises.logs.display());
            assert!(!premises.interrupted.is_cancelled(), "interrupted before its time");
        },
    );
}

/// Returns the broken promises.
async fn attend(premises: &Arc<Premises>, wanted: Wanted) -> Vec<String> {
    premises.say(&format!("{wanted:?}"));
    let ear = Ear::open(&premises.env).await;
    meanwhile(|| premises.broker.flush_declarations());
    premises.crew.start_all().await;
    let publisher = Publisher::connect(&premises.behind_the_network()).await.expect("a broker in order");
    let shop = Shop::open(&premises.env, publisher, wanted.seed, wanted.orders_per_second).await;

    let Trouble { carried, rests } = make_trouble(premises, &shop, wanted).await;
    if premises.interrupted.is_cancelled() {
        return Vec::new();
    }
    premises.say("no more faults: waiting until everything is closed and heard of");
    let books = shop.shut().await;
    come_to_rest(premises, &ear).await;
    let codes = premises.crew.dismiss();

    let heard = ear.heard();
    let late = premises.crew.alarmed_too_late();
    let (Books { lives, declined }, carried) = (&books, &carried[..]);
    let standstills = but_for_faults(&premises.witness.stalls(), carried);
    keep(&premises.logs, "standstills.log", &format!("{standstills:#?}\n"));
    let (rests, standstills) = (&rests[..], &standstills[..]);
    let (seed, heard, late) = (wanted.seed, &heard, &late);
    let evidence = Evidence { seed, lives, carried, declined, rests, standstills, heard, late };
    let mut verdict = judge(&premises.env.pool, evidence).await;
    if codes.iter().any(|code| *code != 0) {
        verdict.violations.push(format!("workers asked to stop ended with {codes:?}"));
    }
    verdict.violations.extend(premises.crew.deserted());
    let bound_ms = wanted.lateness.as_secs_f64() * 1e3;
    if verdict.report.max_lateness_beyond_fault_ms >= bound_ms {
        let latest = verdict.latest.first().cloned().unwrap_or_default();
        verdict.violations.push(format!("late by more than {bound_ms} ms: {latest}"));
    }
    let stood_still_ms = verdict.report.stood_still_ms;
    if stood_still_ms > wanted.standing_still.as_secs_f64() * 1e3 {
        let what = "the machine's disk stood still for too much of this run; run it where nothing else is at work";
        verdict.violations.push(format!("{what}: {stood_still_ms} ms"));
    }
    let Report { alarms_owed, alarms_late, alarms_undecided, .. } = verdict.report;
    if (alarms_late + alarms_undecided) * FEW > alarms_owed {
        let which = format!("{alarms_late} late and {alarms_undecided} undecided");
        verdict.violations.push(format!("of {alarms_owed} alarms owed {which}, which is more than a few"));
    }
    if verdict.report.alarms_lost > 0 {
        verdict.violations.push(format!("alarms lost: {}", verdict.alarms_lost.join("; ")));
    }
    verdict.violations.extend(too_little(wanted, &verdict.report, carried));
    hand_over(premises, &verdict, carried, &books);
    verdict.violations
}

/// Why a run says less than it seems to: hardly any orders or faults, or faults that had nothing to hit.
fn too_little(wanted: Wanted, report: &Report, carried: &[Carried]) -> Vec<String> {
    let seconds = wanted.length.as_secs_f64();
    #[allow(clippy::cast_precision_loss)] // some thousands
    let (orders, faults) = (report.orders as f64, report.faults as f64);
    let mut too_little = Vec::new();
    if orders < seconds * wanted.orders_per_second * 2.0 / 3.0 {
        too_little.push(format!("only {orders} orders in {seconds} s"));
    }
    if faults < seconds / 12.0 {
        too_little.push(format!("only {faults} faults in {seconds} s"));
    }
    if report.alarms_owed == 0 {
        too_little.push("no order fell due in a rest, so nothing is known of alarms".to_owned());
    }
    let mut hits = BTreeMap::<String, usize>::new();
    for fault in carried {
        if let Some(some) = fault.hits {
            *hits.entry(fault.kind.name()).or_default() += some;
        }
    }
    too_little.extend(hits.into_iter().filter(|(_, hits)| *hits == 0).map(|(kind, _)| format!("{kind} hit nobody")));
    too_little
}

/// What was done, and when nothing was.
#[derive(Default)]
struct Trouble {
    carried: Vec<Carried>,
    rests: Vec<Rest>,
}

/// The plan, until the time is up.
async fn make_trouble(premises: &Arc<Premises>, shop: &Shop, wanted: Wanted) -> Trouble {
    let (began, mut said, mut trouble) = (Instant::now(), Instant::now(), Trouble::default());
    for (number, step) in Plan::of(wanted.seed).enumerate() {
        if number % STEPS_BETWEEN_RESTS == STEPS_BETWEEN_RESTS - 1 {
            trouble.rests.push(rest(premises).await);
        }
        let left = wanted.length.saturating_sub(began.elapsed());
        premises.wait(step.calm.min(left)).await;
        if began.elapsed() >= wanted.length || premises.interrupted.is_cancelled() {
            break;
        }
        let done = carry_out_step(premises, &step).await;
        let what: Vec<String> = done.iter().map(Carried::to_string).collect();
        premises.say(&format!("{:7.1} s  {}", began.elapsed().as_secs_f64(), what.join(", beside ")));
        trouble.carried.extend(done);
        if said.elapsed() > SAY_EVERY {
            said = Instant::now();
            premises.say(&progress(shop, trouble.carried.len()));
        }
    }
    premises.say(&progress(shop, trouble.carried.len()));
    trouble
}

/// Waits until everybody works again, and then leaves them alone for a while.
async fn rest(premises: &Premises) -> Rest {
    let began = Instant::now();
    // Whoever is interrupted asks nobody any more: the servers may be gone.
    while !premises.interrupted.is_cancelled()
        && let Some(amiss) = what_is_amiss(premises).await
    {
        assert!(began.elapsed() < COMING_BACK, "not everybody is back at work after {COMING_BACK:?}: {amiss}");
        tokio::time::sleep(ASK_EVERY).await;
    }
    let from = Timestamp::now_by_local_clock();
    premises.wait(REST).await;
    Rest { from, until: Timestamp::now_by_local_clock() }
}

/// Which worker does not consume, or which order or alarm has been waiting for one; `None` if everybody works.
async fn what_is_amiss(premises: &Premises) -> Option<String> {
    let (env, names) = (premises.at_the_broker().await, premises.env.names());
    // A session is open when the last of its queues is consumed.
    let open_sessions = consumers(&env, &names.parked()).await;
    // An order that lost its alarm is the sweep's, which leaves the alarm its grace first.
    let overdue = overdue(&env, env.settings.sweep.grace + SWEPT_WITHIN).await;
    let unsent = "SELECT count(*) FROM alarm_outbox
                  WHERE sent_at IS NULL AND created_at < clock_timestamp() - interval '1 s'";
    let unsent = count(&env, unsent).await;
    let all_works = usize::try_from(open_sessions) == Ok(WORKERS) && overdue == Some(0) && unsent == Some(0);
    (!all_works).then(|| format!("{open_sessions} sessions, {overdue:?} orders overdue, {unsent:?} alarms unsent"))
}

/// Orders that are still open so long after they fell due, if the database answers.
pub async fn overdue(env: &TestEnv, by: Duration) -> Option<usize> {
    let sql = "SELECT count(*) FROM orders
               WHERE status = 'unpaid' AND expires_at < clock_timestamp() - make_interval(secs => $1)";
    let counted: i64 = sqlx::query_scalar(sql).bind(by.as_secs_f64()).fetch_one(&env.pool).await.ok()?;
    usize::try_from(counted).ok()
}

/// What such a statement counts, if the database answers.
pub async fn count(env: &TestEnv, sql: &'static str) -> Option<usize> {
    let counted: i64 = sqlx::query_scalar(sql).fetch_one(&env.pool).await.ok()?;
    usize::try_from(counted).ok()
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
    let count = async |sql| count(&premises.env, sql).await;
    while began.elapsed() < COMING_BACK && !premises.interrupted.is_cancelled() {
        let unpaid = count("SELECT count(*) FROM orders WHERE status = 'unpaid'").await;
        let unsent = count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await;
        let events = count("SELECT count(*) FROM event_outbox").await;
        if (unpaid, unsent, events) == (Some(0), Some(0), Some(ear.count())) {
            return;
        }
        premises.wait(Duration::from_millis(200)).await;
    }
}

/// Everything for whoever reads it later, and the report's line.
fn hand_over(premises: &Premises, verdict: &Verdict, carried: &[Carried], books: &Books) {
    let mut faults = String::new();
    for fault in carried {
        let _ = writeln!(faults, "{fault:?}");
    }
    keep(&premises.logs, "faults.log", &faults);
    keep(&premises.logs, "latest.log", &verdict.latest.join("\n"));
    keep(&premises.logs, "violations.log", &verdict.violations.join("\n"));
    keep(&premises.logs, "books.log", &books.lives.iter().map(|life| format!("{life:?}\n")).collect::<String>());
    keep(&premises.logs, "declined.log", &format!("{:#?}\n", books.declined));
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
