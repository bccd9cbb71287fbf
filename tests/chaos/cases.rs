//! Two fixed cases with figures instead of random faults: a broker that is away for two minutes while orders fall due,
//! and orders that cannot be closed ahead of those that can.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use order_timeout_client::Publisher;
use order_timeout_client::postgres;
use order_timeout_testkit::away::{meanwhile, schedule};
use order_timeout_testkit::machine_stall_probe::total_duration;
use order_timeout_testkit::{TestEnv, checkout, wait_for};
use serde::Serialize;
use time::OffsetDateTime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::environment::{Environment, with_environment};
use crate::event_listener::EventListener;
use crate::ledger::ms;
use crate::run::{REPORT, overdue, settle, write_file};

const SECOND: Duration = Duration::from_secs(1);
/// How long the broker is away.
const AWAY: Duration = Duration::from_secs(120);
/// How long the workers' load on the database is measured, before the broker goes and after it is back.
const MEASURED: Duration = Duration::from_secs(20);
/// Orders that fall due each second in addition to those scheduled before.
const CREATED_PER_SECOND: usize = 15;
/// Orders scheduled before the broker goes, for each second that it is away.
const SCHEDULED_PER_SECOND: usize = 10;
/// The workers' queries in one second after the broker is back, at most this many times those of a busy second before.
const MOST_TIMES_BEFORE: usize = 3;

#[derive(Debug, Serialize)]
struct BrokerAway {
    case: &'static str,
    away_s: u64,
    /// Due while the broker was away: orders with alarms in the broker, and those created meanwhile with `postgres::schedule`.
    due_while_away: usize,
    created_while_away: usize,
    closed: usize,
    closed_twice: i64,
    lateness_p50_ms: f64,
    lateness_p99_ms: f64,
    lateness_max_ms: f64,
    stood_still_ms: f64,
    created_while_away_p99_ms: f64,
    /// Closed only after the broker came back, though due at least a second before.
    closed_after_return: usize,
    /// The workers' queries in the busiest second: before the broker went, and after it came back.
    asked_in_busiest_second_before: usize,
    asked_in_busiest_second_after: usize,
}

#[test]
#[ignore = "takes three minutes; run by scripts/chaos --case broker-away"]
fn two_minute_broker_outage_delays_no_order() {
    with_environment(
        "broker-away",
        None,
        |_| {},
        async |environment: Arc<Environment>| {
            let env = environment.env.clone();
            let listener = EventListener::open(&env).await;
            environment.workers.start_all().await;
            let publisher = env.publisher().await;
            let (stop, meter) = (CancellationToken::new(), Meter::start(environment.clone()));
            let taking = tokio::spawn(create_orders_without_broker(environment.clone(), stop.clone()));
            environment.wait(MEASURED).await;
            let before = meter.busiest_second();
            let scheduled = schedule_for_each_second(&environment, &publisher).await;

            environment.print_line("the broker is stopped");
            meanwhile(|| environment.broker.stop());
            let (gone, gone_at) = (Instant::now(), OffsetDateTime::now_utc());
            environment.wait(AWAY).await;
            let away_s = gone.elapsed().as_secs();
            let (unclosed, due_meanwhile) = (overdue(&env, SECOND).await.unwrap(), ids_due_since(&env, gone_at).await);
            meter.reset();
            meanwhile(|| environment.broker.restart());
            environment.print_line("the broker is back");
            wait_for("a consumer session", async || environment.to_broker.open() >= 2).await;
            environment.wait(MEASURED).await;
            let after = meter.busiest_second();
            stop.cancel();
            let created = taking.await.unwrap();
            settle(&environment, &listener).await;

            let due: Vec<Uuid> = scheduled.into_iter().filter(|id| due_meanwhile.contains(id)).collect();
            let created: Vec<Uuid> = created
                .into_iter()
                .filter(|(at, id)| *at > gone && due_meanwhile.contains(id))
                .map(|(_, id)| id)
                .collect();
            let all: Vec<Uuid> = due.iter().chain(&created).copied().collect();
            let (late, late_created) =
                (lateness_ms(&environment, &all).await, lateness_ms(&environment, &created).await);
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
                stood_still_ms: stood_still_ms(&environment),
                created_while_away_p99_ms: percentile(&late_created, 0.99),
                closed_after_return: unclosed,
                asked_in_busiest_second_before: before,
                asked_in_busiest_second_after: after,
            };
            write_report(&environment, &figures);
            assert!(!environment.interrupted.is_cancelled(), "interrupted before its time");
            assert_eq!(environment.workers.stop_all(), [0, 0]);
            env.assert_ledger().await;
            assert_eq!(figures.closed, figures.due_while_away, "every order closed");
            assert_eq!(i64::try_from(listener.count()).unwrap(), env.closed().await, "each close announced once");
            assert_eq!((figures.closed_twice, figures.closed_after_return), (0, 0));
            assert!(figures.lateness_p99_ms < 500.0 && figures.created_while_away_p99_ms < 500.0, "{figures:?}");
            assert!(figures.lateness_max_ms < 1_000.0, "{figures:?}");
            assert!(after <= MOST_TIMES_BEFORE * before, "a storm: {figures:?}");
        },
    );
}

/// Schedules orders for each second of the time to come through the broker.
async fn schedule_for_each_second(environment: &Environment, publisher: &Publisher) -> Vec<Uuid> {
    let mut orders = Vec::new();
    for second in 0..AWAY.as_secs() {
        let delay = Duration::from_secs(6 + second);
        orders.extend(schedule(&environment.env, publisher, SCHEDULED_PER_SECOND, delay).await);
    }
    orders.into_iter().map(|order| order.id).collect()
}

/// A shop that uses no broker. Returns its orders, and when each was committed.
async fn create_orders_without_broker(environment: Arc<Environment>, stop: CancellationToken) -> Vec<(Instant, Uuid)> {
    let (mut taken, mut beat) = (Vec::new(), tokio::time::interval(SECOND));
    while !stop.is_cancelled() && !environment.interrupted.is_cancelled() {
        beat.tick().await;
        let ids: Vec<Uuid> = (0..CREATED_PER_SECOND).map(|_| Uuid::now_v7()).collect();
        let mut transaction = environment.env.pool.begin().await.unwrap();
        for (id, deadline) in checkout::take_orders(&mut transaction, &ids, "article", 4 * SECOND).await.unwrap() {
            postgres::schedule(&mut transaction, id.to_string(), deadline).await.unwrap();
        }
        transaction.commit().await.unwrap();
        taken.extend(ids.into_iter().map(|id| (Instant::now(), id)));
    }
    taken
}

/// Counts the workers' queries second by second.
struct Meter {
    busiest: Arc<AtomicUsize>,
    running: JoinHandle<()>,
}

impl Meter {
    fn start(environment: Arc<Environment>) -> Self {
        let busiest = Arc::<AtomicUsize>::default();
        let shared = busiest.clone();
        let running = tokio::spawn(async move {
            let (mut beat, mut before) = (tokio::time::interval(SECOND), environment.to_database.asked());
            loop {
                beat.tick().await;
                let asked = environment.to_database.asked();
                shared.fetch_max(asked - before, Ordering::SeqCst);
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

/// The lateness of those of these orders that are closed, sorted, without what stalls of the machine added.
async fn lateness_ms(environment: &Environment, ids: &[Uuid]) -> Vec<f64> {
    let closed = environment.witness.lateness_ms(&environment.env).await;
    closed.into_iter().filter(|(id, _)| ids.contains(id)).map(|(_, late)| late).collect()
}

fn stood_still_ms(environment: &Environment) -> f64 {
    ms(total_duration(&environment.witness.stalls()))
}

fn percentile(sorted: &[f64], part: f64) -> f64 {
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let place = (part * sorted.len() as f64).ceil() as usize;
    let found = sorted.get(place.saturating_sub(1)).copied().unwrap_or(0.0);
    (found * 10.0).round() / 10.0
}

fn write_report(environment: &Environment, figures: &impl Serialize) {
    let line = serde_json::to_string(figures).expect("plain numbers");
    environment.print_line(&line);
    write_file(&environment.logs, REPORT, &format!("{line}\n"));
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
fn failing_orders_delay_no_others() {
    with_environment(
        "unclosable",
        None,
        |_| {},
        async |environment: Arc<Environment>| {
            let env = environment.env.clone();
            env.stock("unclosable", 1_000_000).await;
            env.refuse_to_close("unclosable").await;
            let unclosable = env.orders_of("unclosable", 2_000, Duration::ZERO).await.len();
            // Nothing is scheduled, so only the sweep closes orders. The first good ones are due while the workers meet
            // all the failing ones for the first time.
            environment.workers.start_all().await;
            let mut good = Vec::new();
            for tenth in 0..10 {
                good.extend(env.orders(10, Duration::from_millis(50 + 500 * tenth)).await);
            }
            wait_for("the good ones", async || env.closed().await == 100).await;

            let good: Vec<Uuid> = good.iter().map(|order| order.id).collect();
            let late = lateness_ms(&environment, &good).await;
            let figures = Unclosable {
                case: "unclosable",
                unclosable,
                good: good.len(),
                good_closed: late.len(),
                lateness_p50_ms: percentile(&late, 0.5),
                lateness_p99_ms: percentile(&late, 0.99),
                lateness_max_ms: percentile(&late, 1.0),
                stood_still_ms: stood_still_ms(&environment),
            };
            write_report(&environment, &figures);
            assert_eq!(environment.workers.stop_all(), [0, 0]);
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
