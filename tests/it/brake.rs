//! The brake pauses closing when what is closed looks unusual: callbacks that do not arrive, deadlines that are all in the
//! past. It stays paused over a restart, and a flash sale that was known does not touch it. What it counts delays no pause.

use std::time::Duration;

use order_timeout::Settings;
use order_timeout_testkit::figures::{Figures, serve_http, wait_for_figure};
use order_timeout_testkit::payment_service::{PaymentService, wide_limits};
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{RunningWorker, TestEnv, wait_for, wait_promised};
use serde_json::Value;
use sqlx::AssertSqlSafe;
use tempfile::NamedTempFile;
use time::OffsetDateTime;
use uuid::Uuid;

const BRAKED: &str = "SELECT count(*) FROM closing_pauses WHERE cause = 'brake'";
const UNFINISHED: &str = "SELECT count(*) FROM orders WHERE status IN ('unpaid', 'closing')";
const UNPAID: &str = "SELECT count(*) FROM orders WHERE status = 'unpaid'";

async fn execute(env: &TestEnv, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&env.pool).await.unwrap();
}

/// A shop that has closed some orders in each of the last minutes, of which alarms woke these.
async fn history(env: &TestEnv, closed: u32, woken_closed: u32, woken_paid: u32) {
    execute(
        env,
        &format!(
            "INSERT INTO closing_minutes (kind, minute, closed, woken_closed, woken_paid, foreseen, closed_of_due)
             SELECT 'order', date_trunc('minute', clock_timestamp()) - ago * interval '1 minute',
                    {closed}, {woken_closed}, {woken_paid}, {closed}, {closed}
             FROM generate_series(1, 1500) AS ago"
        ),
    )
    .await;
}

async fn braked_because(env: &TestEnv) -> String {
    wait_for("the brake", async || env.count(BRAKED).await == 1).await;
    sqlx::query_scalar("SELECT reason FROM closing_pauses").fetch_one(&env.pool).await.unwrap()
}

async fn resume(env: &TestEnv) {
    let (code, said, why) = call_with(&env.settings, &["resume", "--yes", "--why", "the cause is gone"]).await;
    assert_eq!(code, 0, "{said}{why}");
}

/// Orders that should have been closed, had no brake stopped that.
const BEHIND: &str =
    "SELECT count(*) FROM orders WHERE status = 'unpaid' AND expires_at < clock_timestamp() - interval '0.3 s'
                        AND NOT EXISTS (SELECT FROM closing_pauses WHERE cause = 'brake' AND resumed_at IS NULL)";

/// Closes by alarms that the workers' brakes have counted since that minute began.
async fn counted(env: &TestEnv, since: OffsetDateTime) -> i64 {
    let sum = "SELECT coalesce(sum(closed), 0)::bigint FROM closing_minutes WHERE minute >= date_trunc('minute', $1)";
    sqlx::query_scalar(sum).bind(since).fetch_one(&env.pool).await.unwrap()
}

/// Closes by alarms of orders created since then, so long ago that a turn of the brake should have counted them.
async fn to_be_counted(env: &TestEnv, since: OffsetDateTime) -> i64 {
    let count = "SELECT count(*) FROM orders WHERE created_at >= $1 AND closed_by = 'alarm'
                   AND closed_at < clock_timestamp() - interval '1.2 s'";
    sqlx::query_scalar(count).bind(since).fetch_one(&env.pool).await.unwrap()
}

/// Thirty orders a second fall due until there are so many of something, and customers pay seven of ten. Returns those of
/// which no callback arrived.
async fn sell(env: &TestEnv, callbacks_arrive: bool, least: i64, of: &'static str) -> Vec<Uuid> {
    let (mut numbers, mut missing) = (0_u32.., Vec::new());
    let mut tenths = tokio::time::interval(Duration::from_millis(100));
    // A machine that stalls must not sell in one moment what it did not sell meanwhile.
    tenths.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let began = sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&env.pool).await.unwrap();
    let counted_before = counted(env, began).await;
    while env.count(of).await < least {
        tenths.tick().await;
        // Nor may it sell on while the workers are behind, with their closes or with counting them.
        wait_for("closes in time", async || {
            let uncounted = to_be_counted(env, began).await - (counted(env, began).await - counted_before);
            env.count(BEHIND).await == 0 && uncounted <= 0 || env.count(of).await >= least
        })
        .await;
        let orders = env.orders(3, Duration::from_millis(400)).await;
        env.deliver(&orders).await;
        for order in orders.iter().filter(|_| numbers.next().is_some_and(|number| number % 10 < 7)) {
            if callbacks_arrive {
                env.pay(order).await;
            } else {
                missing.push(order.id);
            }
        }
    }
    missing
}

async fn closed_among(env: &TestEnv, ids: &[Uuid]) -> i64 {
    let count = "SELECT count(*) FROM orders WHERE status = 'closed' AND id = ANY ($1)";
    sqlx::query_scalar(count).bind(ids).fetch_one(&env.pool).await.unwrap()
}

/// Of these, how many were closed before the brake's last pause began. Another worker closes on until it has read the pause,
/// and a machine that stalls lets it do so for longer.
async fn closed_until_braked(env: &TestEnv, ids: &[Uuid]) -> i64 {
    let count = "SELECT count(*) FROM orders WHERE status = 'closed' AND id = ANY ($1)
                   AND closed_at <= (SELECT max(paused_at) FROM closing_pauses WHERE cause = 'brake')";
    sqlx::query_scalar(count).bind(ids).fetch_one(&env.pool).await.unwrap()
}

async fn is_braked(worker: &RunningWorker) {
    wait_for_figure(worker, "closing_paused{cause=\"brake\"}", |value| value == 1.0).await;
}

#[test]
fn dead_callbacks_close_at_most_fifty_paid_orders() {
    for workers in [1, 2] {
        TestEnv::builder().settings(serve_http).run(async move |env| {
            history(&env, 3, 3, 7).await;
            let mut running = Vec::new();
            for _ in 0..workers {
                running.push(env.worker().await);
            }
            sell(&env, true, 90, "SELECT count(*) FROM orders").await;
            let missing = sell(&env, false, 1, BRAKED).await;
            for worker in &running {
                is_braked(worker).await;
            }
            let closed = closed_among(&env, &missing).await;
            println!("sudden stop, {workers} workers: {closed} orders of customers who have paid");
            assert!(workers > 1 || (1..=50).contains(&closed), "{closed} by {workers}");
            let until_braked = closed_until_braked(&env, &missing).await;
            assert!((1..=50).contains(&until_braked), "{until_braked} by {workers}");

            let due = "SELECT count(*) FROM orders WHERE status = 'unpaid' AND expires_at <= clock_timestamp()";
            sell(&env, false, 61, due).await;
            let resume = ["resume", "--why", "they arrive again"];
            let (code, said, _) = call_with(&env.settings, &resume).await;
            assert!(code == 1 && said.contains("order(s) are due and are closed when it is resumed"), "{said}");
            assert!(
                said.contains("usually it is 70 %") && said.contains("the last paid one was found in the minute of"),
                "{said}"
            );
            assert!(said.contains("nothing resumed; add --yes"), "{said}");
            assert_eq!(closed_among(&env, &missing).await, closed);
            // They do not.
            wait_for("all are due", async || env.count(UNPAID).await == env.count(due).await).await;
            let (code, said, why) = call_with(&env.settings, &[&resume[..], &["--yes", "--json"]].concat()).await;
            let said: Value = serde_json::from_str(&said).unwrap();
            assert!(code == 0 && said["due"][0]["orders"].as_i64() > Some(60), "{said}{why}");
            let missing = sell(&env, false, 2, BRAKED).await;
            for worker in &running {
                is_braked(worker).await;
            }
            let closed = closed_among(&env, &missing).await;
            println!("after resume, {workers} workers: {closed} orders of customers who have paid");
            assert!(workers > 1 || (1..=50).contains(&closed), "{closed} by {workers} after resume");
            let until_braked = closed_until_braked(&env, &missing).await;
            assert!((1..=50).contains(&until_braked), "{until_braked} by {workers} after resume");
            for worker in running {
                worker.stop().await;
            }
            env.assert_ledger().await;
        });
    }
}

#[test]
fn burst_without_callbacks_trips_and_stays_paused() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        history(&env, 3, 3, 7).await;
        let workers = [env.worker().await, env.worker().await];
        let orders = env.orders(1_000, Duration::from_millis(500)).await;
        env.deliver(&orders).await;
        let why = braked_because(&env).await;
        assert!(why.contains("0.0 % were paid") && why.contains("usually it is 70 %"), "{why}");
        for worker in &workers {
            is_braked(worker).await;
        }
        let closed = env.closed().await;
        assert!((1..=56).contains(&closed), "{closed} by two workers, of which seven of ten may be paid");
        // A restart of everything does not forget it.
        for worker in workers {
            worker.stop().await;
        }
        let worker = env.worker().await;
        is_braked(&worker).await;
        assert_eq!(env.closed().await, closed);
        // The callbacks arrive.
        let mut paid = 0;
        for order in &orders[..700] {
            paid += i64::from(env.pay(order).await);
        }
        resume(&env).await;
        wait_for("each order ends", async || env.count(UNPAID).await == 0).await;
        assert_eq!(env.closed().await, 1_000 - paid);
        assert_eq!(env.count(BRAKED).await, 1, "what was due when it was resumed is not judged again");
        worker.stop().await;
        env.assert_ledger().await;
        env.assert_nothing_left_undone().await;
        assert_eq!(env.count("SELECT count(*) FROM event_outbox WHERE type LIKE 'closing.%'").await, 2);
    });
}

#[test]
fn foreseen_flash_sale_is_closed_on_time() {
    TestEnv::builder().run(async |env| {
        history(&env, 3, 0, 0).await;
        let orders = env.orders(4_000, Duration::from_secs(3)).await;
        let worker = env.worker().await;
        env.deliver(&orders).await;
        wait_for("the closes", async || env.closed().await == 4_000).await;
        assert_eq!(env.count("SELECT count(*) FROM closing_pauses").await, 0);
        // They are counted, and none of them was a surprise.
        let counted = "SELECT coalesce(sum(closed) FILTER (WHERE unforeseen = 0), 0)::bigint FROM closing_minutes
                       WHERE minute > clock_timestamp() - interval '2 minutes'";
        wait_for("the counts", async || env.count(counted).await >= 4_000).await;
        worker.stop().await;
        env.assert_ledger().await;
    });
}

fn swept_at_once(settings: &mut Settings) {
    settings.sweep.grace = Duration::ZERO;
    settings.brake.always_allowed = 300;
}

#[test]
fn deadlines_moved_to_past_trip() {
    TestEnv::builder().settings(swept_at_once).run(async |env| {
        history(&env, 3, 0, 0).await;
        env.orders(2_000, Duration::from_secs(3_600)).await;
        let worker = env.worker().await;
        execute(&env, "UPDATE orders SET expires_at = clock_timestamp() - interval '3 hours'").await;
        let why = braked_because(&env).await;
        assert!(why.contains("not known to fall due") && why.contains("usually 3"), "{why}");
        worker.stop().await;
        let closed = env.closed().await;
        assert!((300..=301).contains(&closed), "{closed}");
        // The deadlines were right after all.
        let worker = env.worker().await;
        assert_eq!(env.closed().await, closed);
        resume(&env).await;
        wait_for("the rest", async || env.closed().await == 2_000).await;
        assert_eq!(env.count(BRAKED).await, 1);
        worker.stop().await;
        env.assert_ledger().await;
    });
}

/// The default statement; each page of what falls due takes as long as the table `slowness` says.
fn slow_overdue_statement() -> NamedTempFile {
    let slow =
        "WHERE CASE WHEN $1::float8 < 0 THEN (SELECT pg_sleep(seconds)::text = '' FROM public.slowness) ELSE true END
                AND (status";
    let file = NamedTempFile::new().unwrap();
    std::fs::write(file.path(), include_str!("../fixtures/mapping/default_overdue.sql").replace("WHERE (status", slow))
        .unwrap();
    file
}

#[test]
fn slow_count_delays_no_pause() {
    let (file, close) =
        (slow_overdue_statement(), concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/mapping/default_close.sql"));
    let overdue = file.path().to_str().unwrap().to_owned();
    let settings = move |settings: &mut Settings| {
        serve_http(settings);
        (settings.orders.close_sql, settings.orders.overdue_sql) = (close.to_owned(), overdue);
    };
    TestEnv::builder().settings(settings).run(async |env| {
        execute(&env, "CREATE TABLE public.slowness AS SELECT 0.0::float8 AS seconds").await;
        let worker = env.worker().await;
        let due = "INSERT INTO orders (id, expires_at)
                   SELECT gen_random_uuid(), clock_timestamp() + interval '4 minutes' FROM generate_series(1, 300000)";
        execute(&env, due).await;
        execute(&env, "UPDATE public.slowness SET seconds = 0.5").await;
        let counts = "SELECT count(*) FROM pg_stat_activity
                      WHERE datname = current_database() AND wait_event = 'PgSleep'";
        // Once a minute.
        wait_for("the count", async || env.count(counts).await > 0).await;
        let pause =
            "INSERT INTO closing_pauses (kind, cause, reason, paused_by) VALUES (NULL, 'operator', 'a test', 'it')";
        execute(&env, pause).await;
        let is_paused = async || Figures::of(&worker).await.find("closing_paused{cause=\"operator\"}") == Some(1.0);
        wait_promised(Duration::from_secs(3), "the pause", is_paused).await;
        let counted = "SELECT coalesce(sum(foreseen), 0)::bigint FROM closing_minutes";
        assert_eq!(env.count(counted).await, 0, "the count is still running");
        execute(&env, "UPDATE public.slowness SET seconds = 0").await;
        wait_for("all are counted", async || env.count(counted).await == 300_000).await;
        worker.stop().await;
    });
}

#[test]
fn silent_provider_trips_and_keeps_stock() {
    let service = PaymentService::start();
    let settings = |settings: &mut Settings| {
        swept_at_once(settings);
        settings.closing.retry_first = Duration::from_millis(50);
        settings.closing.retry_longest = Duration::from_millis(500);
        service.join(settings, "card", wide_limits());
    };
    TestEnv::builder().settings(settings).run(async move |env| {
        service.set_dead(true);
        // What another worker has counted: too few, and in the next minute as well, which may begin.
        let counted = "INSERT INTO closing_minutes (kind, minute, asked, asked_unknown)
                       SELECT 'order', date_trunc('minute', clock_timestamp()) - ago * interval '1 minute', 30, 30
                       FROM generate_series(-1, 3) AS ago";
        execute(&env, counted).await;
        let orders = env.orders(150, Duration::ZERO).await;
        let attempts = "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
                        SELECT 'card', id::text, id::text, 1999, 'EUR' FROM orders";
        execute(&env, attempts).await;
        let worker = env.worker().await;
        let why = braked_because(&env).await;
        assert!(why.contains("gave no usable answer"), "{why}");
        assert_eq!(env.closed().await, 0);
        env.assert_ledger().await;
        // The provider answers again, and has taken money meanwhile.
        service.set_dead(false);
        orders[..50].iter().for_each(|order| assert!(service.pay(&order.id.to_string())));
        assert_eq!(env.count(UNFINISHED).await, 150, "what is reserved stays so");
        resume(&env).await;
        wait_for("each order ends", async || env.count(UNFINISHED).await == 0).await;
        for (n, order) in orders.iter().enumerate() {
            assert_eq!(env.status(order).await, if n < 50 { "paid" } else { "closed" });
        }
        assert_eq!(env.count(BRAKED).await, 1);
        worker.stop().await;
        env.assert_ledger().await;
    });
}

#[test]
fn missing_callbacks_trip_by_paid_answers() {
    let service = PaymentService::start();
    let settings = |settings: &mut Settings| {
        swept_at_once(settings);
        serve_http(settings);
        service.join(settings, "card", wide_limits());
    };
    TestEnv::builder().settings(settings).run(async move |env| {
        // Callbacks arrive, so that a provider says of one order in ten that it is paid.
        let usual = "INSERT INTO closing_minutes (kind, minute, asked, asked_paid)
                     SELECT 'order', date_trunc('minute', clock_timestamp()) - ago * interval '1 minute', 10, 1
                     FROM generate_series(1, 1500) AS ago";
        execute(&env, usual).await;
        let orders = env.orders(150, Duration::ZERO).await;
        orders.iter().for_each(|order| assert!(service.pay(&order.id.to_string())));
        let attempts = "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
                        SELECT 'card', id::text, id::text, 1999, 'EUR' FROM orders";
        execute(&env, attempts).await;
        let worker = env.worker().await;
        let why = braked_because(&env).await;
        assert!(why.contains("says that") && why.contains("paid"), "{why}");
        is_braked(&worker).await;
        let later = env.orders(20, Duration::ZERO).await;
        resume(&env).await;
        wait_for("each order ends", async || env.count(UNFINISHED).await == 0).await;
        for order in &orders {
            assert_eq!(env.status(order).await, "paid");
        }
        assert_eq!((env.closed().await, env.count(BRAKED).await), (later.len() as i64, 1));
        worker.stop().await;
        env.assert_ledger().await;
        // Each order is counted once, with its first answer.
        let asked = "SELECT sum(asked)::bigint FROM closing_minutes WHERE asked_paid <> 1";
        assert!((100..=150).contains(&env.count(asked).await));
    });
}

#[test]
fn new_shop_and_disabled_brake_close_all() {
    for enabled in [true, false] {
        let settings = move |settings: &mut Settings| {
            swept_at_once(settings);
            settings.brake.enabled = enabled;
        };
        TestEnv::builder().settings(settings).run(async move |env| {
            if !enabled {
                history(&env, 3, 3, 7).await;
            }
            let worker = env.worker().await;
            env.orders(1_500, Duration::ZERO).await;
            wait_for("the closes", async || env.closed().await == 1_500).await;
            assert_eq!(env.count("SELECT count(*) FROM closing_pauses").await, 0);
            worker.stop().await;
        });
    }
}
