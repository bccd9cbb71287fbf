//! Two cases with figures, instead of faults at random: a broker that is away for two minutes while orders fall due,
//! and orders that cannot be closed in front of those that can.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use order_timeout::{Publisher, schedule_in};
use serde::Serialize;
use time::OffsetDateTime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::ear::Ear;
use crate::ledger::ms;
use crate::premises::{Premises, on_premises};
use crate::run::{REPORT, come_to_rest, keep, overdue};
use crate::support::away::{meanwhile, schedule};
use crate::support::disk_stall_probe::total_duration;
use crate::support::{TestEnv, checkout, wait_for};

const SECOND: Duration = Duration::from_secs(1);
/// How long the broker is away.
const AWAY: Duration = Duration::from_secs(120);
/// How long it is looked at how much everybody asks, before the broker goes and after it has come back.
const WATCHED: Duration = Duration::from_secs(20);
/// Orders that fall due each second in addition to those scheduled before.
const TAKEN_AT_ONCE: usize = 15;
/// Orders scheduled before the broker goes, for each second that it is away.
const SCHEDULED_AHEAD: usize = 10;
/// A broker that is back may cost so many times the questions of a busy second before it went, for one second.
const NO_STORM: usize = 3;

#[derive(Debug, Serialize)]
struct BrokerAway {
    case: &'static str,
    away_s: u64,
    /// Due while the broker was away: those whose alarms were in it, and those created meanwhile with `schedule_in`.
    due_while_away: usize,
    created_while_away: usize,
    closed: usize,
    closed_twice: i64,
    lateness_p50_ms: f64,
    lateness_p99_ms: f64,
    lateness_max_ms: f64,
    stood_still_ms: f64,
    created_while_away_p99_ms: f64,
    /// Closed only after the broker came back, though due a second before.
    closed_after_return: usize,
    /// What the workers ask the database in a second: the busiest before the broker went, and after it came back.
    asked_in_busiest_second_before: usize,
    asked_in_busiest_second_after: usize,
}

#[test]
#[ignore = "takes three minutes; run by scripts/chaos --case broker-away"]
fn a_broker_away_for_two_minutes_makes_nobody_late() {
    on_premises(
        "broker-away",
        |_| {},
        async |premises: Arc<Premises>| {
            let env = premises.env.clone();
            let ear = Ear::open(&env).await;
            premises.crew.start_all().await;
            let publisher = env.publisher().await;
            let (stop, meter) = (CancellationToken::new(), Meter::start(premises.clone()));
            let taking = tokio::spawn(take_orders_without_the_broker(premises.clone(), stop.clone()));
            premises.wait(WATCHED).await;
            let before = meter.busiest_second();
            let scheduled = fall_due_each_second(&premises, &publisher).await;

            premises.say("the broker is stopped");
            meanwhile(|| premises.broker.stop());
            let (gone, gone_at) = (Instant::now(), OffsetDateTime::now_utc());
            premises.wait(AWAY).await;
            let away_s = gone.elapsed().as_secs();
            let (unclosed, due_meanwhile) = (overdue(&env, SECOND).await.unwrap(), ids_due_since(&env, gone_at).await);
            meter.reset();
            meanwhile(|| premises.broker.restart());
            premises.say("the broker is back");
            wait_for("a consumer session", async || premises.to_broker.open() >= 2).await;
            premises.wait(WATCHED).await;
            let after = meter.busiest_second();
            stop.cancel();
            let created = taking.await.unwrap();
            come_to_rest(&premises, &ear).await;

            let due: Vec<Uuid> = scheduled.into_iter().filter(|id| due_meanwhile.contains(id)).collect();
            let created: Vec<Uuid> = created
                .into_iter()
                .filter(|(at, id)| *at > gone && due_meanwhile.contains(id))
                .map(|(_, id)| id)
                .collect();
            let all: Vec<Uuid> = due.iter().chain(&created).copied().collect();
            let (late, late_created) = (lateness_ms(&premises, &all).await, lateness_ms(&premises, &created).await);
            let twice = "SELECT count(*) FROM (SELECT FROM order_events WHERE event = 'closed'
                     GROUP BY order_id HAVING count(*) > 1) AS twice";
            let figures = BrokerAway {
                case: "broker-away",
                away_s,
                due_while_away: all.len(),
                created_while_away: created.len(),
                closed: late.len(),
                closed_twice: env.count(twice).await,
                lateness_p50_ms: percentile(&late, 0.5),
                lateness_p99_ms: percentile(&late, 0.99),
                lateness_max_ms: percentile(&late, 1.0),
                stood_still_ms: stood_still_ms(&premises),
                created_while_away_p99_ms: percentile(&late_created, 0.99),
                closed_after_return: unclosed,
                asked_in_busiest_second_before: before,
                asked_in_busiest_second_after: after,
            };
            hand_over(&premises, &figures);
            assert!(!premises.interrupted.is_cancelled(), "interrupted before its time");
            assert_eq!(premises.crew.dismiss(), [0, 0]);
            env.assert_ledger().await;
            assert_eq!(figures.closed, figures.due_while_away, "every order closed");
            assert_eq!(i64::try_from(ear.count()).unwrap(), env.closed().await, "each close announced once");
            assert_eq!((figures.closed_twice, figures.closed_after_return), (0, 0));
            assert!(figures.lateness_p99_ms < 500.0 && figures.created_while_away_p99_ms < 500.0, "{figures:?}");
            assert!(figures.lateness_max_ms < 1_000.0, "{figures:?}");
            assert!(after <= NO_STORM * before, "a storm: {figures:?}");
        },
    );
}

/// Orders for each second of the time to come, in the books of the broker.
async fn fall_due_each_second(premises: &Premises, publisher: &Publisher) -> Vec<Uuid> {
    let mut orders = Vec::new();
    for second in 0..AWAY.as_secs() {
        let delay = Duration::from_secs(6 + second);
        orders.extend(schedule(&premises.env, publisher, SCHEDULED_AHEAD, delay).await);
    }
    orders.into_iter().map(|order| order.id).collect()
}

/// A shop that knows no broker. Returns its orders, and when each was committed.
async fn take_orders_without_the_broker(premises: Arc<Premises>, stop: CancellationToken) -> Vec<(Instant, Uuid)> {
    let (mut taken, mut beat) = (Vec::new(), tokio::time::interval(SECOND));
    while !stop.is_cancelled() && !premises.interrupted.is_cancelled() {
        beat.tick().await;
        let ids: Vec<Uuid> = (0..TAKEN_AT_ONCE).map(|_| Uuid::now_v7()).collect();
        let mut transaction = premises.env.pool.begin().await.unwrap();
        for (id, deadline) in checkout::take_orders(&mut transaction, &ids, "article", 4 * SECOND).await.unwrap() {
            schedule_in(&mut *transaction, id.to_string(), deadline).await.unwrap();
        }
        transaction.commit().await.unwrap();
        taken.extend(ids.into_iter().map(|id| (Instant::now(), id)));
    }
    taken
}

/// How much the workers ask the database, second by second.
struct Meter {
    busiest: Arc<AtomicUsize>,
    running: JoinHandle<()>,
}

impl Meter {
    fn start(premises: Arc<Premises>) -> Self {
        let busiest = Arc::<AtomicUsize>::default();
        let noted = busiest.clone();
        let running = tokio::spawn(async move {
            let (mut beat, mut before) = (tokio::time::interval(SECOND), premises.to_database.asked());
            loop {
                beat.tick().await;
                let asked = premises.to_database.asked();
                noted.fetch_max(asked - before, Ordering::SeqCst);
                before = asked;
            }
        });
        Self { busiest, running }
    }

    fn busiest_second(&self) -> usize {
        self.busiest.load(Ordering::SeqCst)
    }

    fn reset(&self) {
        self.busiest.store(0, Ordering::SeqCst);
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.running.abort();
    }
}

async fn ids_due_since(env: &TestEnv, since: OffsetDateTime) -> HashSet<Uuid> {
    let due = sqlx::query_scalar("SELECT id FROM orders WHERE expires_at BETWEEN $1 AND clock_timestamp()").bind(since);
    due.fetch_all(&env.pool).await.unwrap().into_iter().collect()
}

/// Of those of these orders that are closed, sorted; without what the machine's disk added by standing still.
async fn lateness_ms(premises: &Premises, ids: &[Uuid]) -> Vec<f64> {
    let closed = premises.witness.lateness_ms(&premises.env).await;
    closed.into_iter().filter(|(id, _)| ids.contains(id)).map(|(_, late)| late).collect()
}

fn stood_still_ms(premises: &Premises) -> f64 {
    ms(total_duration(&premises.witness.stalls()))
}

fn percentile(sorted: &[f64], part: f64) -> f64 {
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let place = (part * sorted.len() as f64).ceil() as usize;
    let found = sorted.get(place.saturating_sub(1)).copied().unwrap_or(0.0);
    (found * 10.0).round() / 10.0
}

fn hand_over(premises: &Premises, figures: &impl Serialize) {
    let line = serde_json::to_string(figures).expect("plain numbers");
    premises.say(&line);
    keep(&premises.logs, REPORT, &format!("{line}\n"));
}

#[derive(Debug, Serialize)]
struct Unclosable {
    case: &'static str,
    unclosable: usize,
    good: usize,
    good_closed: usize,
    lateness_p50_ms: f64,
    lateness_p99_ms: f64,
    lateness_max_ms: f64,
    stood_still_ms: f64,
}

#[test]
#[ignore = "is about figures; run by scripts/chaos --case unclosable"]
fn orders_that_cannot_be_closed_make_nobody_late() {
    on_premises(
        "unclosable",
        |_| {},
        async |premises: Arc<Premises>| {
            let env = premises.env.clone();
            env.stock("unclosable", 1_000_000).await;
            env.refuse_to_close("unclosable").await;
            let unclosable = env.orders_of("unclosable", 2_000, Duration::ZERO).await.len();
            // Nobody schedules anything: all of it is the sweep's. The first good ones are due while the workers meet all
            // the bad ones for the first time.
            premises.crew.start_all().await;
            let mut good = Vec::new();
            for tenth in 0..10 {
                good.extend(env.orders(10, Duration::from_millis(50 + 500 * tenth)).await);
            }
            wait_for("the good ones", async || env.closed().await == 100).await;

            let good: Vec<Uuid> = good.iter().map(|order| order.id).collect();
            let late = lateness_ms(&premises, &good).await;
            let figures = Unclosable {
                case: "unclosable",
                unclosable,
                good: good.len(),
                good_closed: late.len(),
                lateness_p50_ms: percentile(&late, 0.5),
                lateness_p99_ms: percentile(&late, 0.99),
                lateness_max_ms: percentile(&late, 1.0),
                stood_still_ms: stood_still_ms(&premises),
            };
            hand_over(&premises, &figures);
            assert_eq!(premises.crew.dismiss(), [0, 0]);
            env.assert_ledger().await;
            assert_eq!(
                env.count("SELECT count(*) FROM orders WHERE status = 'unpaid'").await,
                2_000,
                "nothing is forced"
            );
            assert!(figures.lateness_max_ms < 1_000.0, "{figures:?}");
        },
    );
}
