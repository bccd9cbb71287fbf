//! Faults are visible: the pages tell whether the worker is alive and ready, and why not; the metrics follow what
//! happens, and each of them is documented.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use lapin::BasicProperties;
use order_timeout::Settings;
use order_timeout::config::Listen;
use order_timeout::http::{self, HttpServer, LIVEZ, Pages, READYZ};
use order_timeout::observe::health::Health;
use order_timeout::observe::metrics::{Listed, listed};
use order_timeout::runtime::Worker;
use order_timeout_amqp::topology::DUE_KEY;
use order_timeout_core::kind::Kind;
use order_timeout_core::order::{OrderId, Timestamp};
use order_timeout_testkit::away::{shorten_timeouts, with_broker_behind};
use order_timeout_testkit::figures::{Figures, get, serve_http, wait_for_figure};
use order_timeout_testkit::payment_service::{PaymentService, wide_limits};
use order_timeout_testkit::process::{WorkerProcess, order_timeout, run};
use order_timeout_testkit::proxy::Proxy;
use order_timeout_testkit::{
    RunningWorker, TIMEOUT, TestEnv, host_and_port, promised, small_settings, wait_for, wait_long_for_locks,
};
use regex::Regex;
use tokio::net::TcpStream;
use uuid::Uuid;

const SECOND: Duration = Duration::from_secs(1);

async fn is_ready(worker: &RunningWorker) -> bool {
    get(worker, READYZ).await == (200, "ready\n".into())
}

/// What the prometheus crate reads from /proc, on Linux.
pub const PROCESS_METRICS: &[Listed] = &[
    process_metric("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds."),
    process_metric("process_open_fds", "gauge", "Number of open file descriptors."),
    process_metric("process_max_fds", "gauge", "Maximum number of open file descriptors."),
    process_metric("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes."),
    process_metric("process_resident_memory_bytes", "gauge", "Resident memory size in bytes."),
    process_metric("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds."),
    process_metric("process_threads", "gauge", "Number of OS threads in the process."),
];

const fn process_metric(name: &'static str, kind: &'static str, help: &'static str) -> Listed {
    Listed { name, kind, of: &[], label: None, help, is_reading: false }
}

#[test]
fn exposes_exactly_listed_metrics() {
    let service = PaymentService::start();
    let settings = |settings: &mut Settings| {
        serve_http(settings);
        service.join(settings, "card", wide_limits());
    };
    TestEnv::builder().settings(settings).run(async |env| {
        let worker = env.worker().await;
        // Gauges appear with their first reading.
        for reading in [
            "oldest_overdue_seconds",
            "outbox_age_seconds{outbox=\"alarm\"}",
            "clock_offset_seconds",
            "orders_unresolved",
        ] {
            wait_for_figure(&worker, reading, |_| true).await;
        }
        let text = Figures::of(&worker).await.text;
        worker.stop().await;
        let described = |word: &str| -> BTreeSet<(String, String)> {
            let lines = text.lines().filter_map(|line| line.strip_prefix(&format!("# {word} ")));
            lines.map(|line| line.split_once(' ').unwrap()).map(|(name, rest)| (name.into(), rest.into())).collect()
        };
        let listed = || listed().chain(PROCESS_METRICS);
        assert_eq!(described("HELP"), listed().map(|one| (one.name.into(), one.help.into())).collect());
        assert_eq!(described("TYPE"), listed().map(|one| (one.name.into(), one.kind.into())).collect());
        assert_labels_are_listed(&text);
    });
}

/// Every series has the label that its metric is listed with, and one of the listed values.
fn assert_labels_are_listed(text: &str) {
    let series = Regex::new(r#"(?m)^(\w+?)(?:_bucket|_sum|_count)?(?:\{(.*)\})? "#).unwrap();
    let label = Regex::new(r#"(\w+)="([^"]*)""#).unwrap();
    for found in series.captures_iter(text) {
        let Some(listed) = listed().find(|one| one.name == &found[1]) else { continue };
        let labels = found.get(2).map_or("", |labels| labels.as_str());
        for (name, value) in [("kind", "order"), ("provider", "card")] {
            let has_label = labels.contains(&format!("{name}=\"{value}\""));
            assert_eq!(has_label, listed.of.contains(&name), "{}", &found[0]);
        }
        let mut labels = label.captures_iter(labels).filter(|one| !["le", "kind", "provider"].contains(&&one[1]));
        let allowed = |one: &regex::Captures<'_>| {
            listed.label.is_some_and(|label| label.name == &one[1] && label.values.contains(&&one[2]))
        };
        let one = labels.next();
        assert_eq!(one.is_some(), listed.label.is_some(), "{}", &found[0]);
        assert!(one.as_ref().is_none_or(allowed) && labels.next().is_none(), "{} has an unlisted label", &found[0]);
    }
}

#[test]
fn documented_metrics_match_listed_metrics() {
    let document = include_str!("../../docs/operating/monitor.md");
    let handbook = [
        document,
        include_str!("../../docs/operating/change.md"),
        include_str!("../../docs/operating/deploy.md"),
        include_str!("../../docs/operating/kubernetes.md"),
        include_str!("../../docs/operating/troubleshoot.md"),
    ];
    let documented: Vec<&str> = document
        .lines()
        .filter(|line| line.starts_with("| `order_timeout_") || line.starts_with("| `process_"))
        .collect();
    let row = |one: &Listed| {
        let label = one.label.map_or_else(String::new, |label| {
            // The version changes with each release.
            let values = if label.name == "version" { String::new() } else { format!(": {}", label.values.join(", ")) };
            format!("`{}`{values}", label.name)
        });
        let of: Vec<String> = one.of.iter().map(|name| format!("`{name}`")).collect();
        let labels =
            [of.join(", "), label].into_iter().filter(|label| !label.is_empty()).collect::<Vec<_>>().join("; ");
        format!("| `{}` | {} | {labels} | {} |", one.name, one.kind, one.help)
    };
    let rows: Vec<String> = listed().chain(PROCESS_METRICS).map(row).collect();
    assert_eq!(documented, rows, "the table in docs/operating/monitor.md (left) and src/observe/metrics.rs (right)");
    let name = Regex::new(r"\border_timeout_\w+").unwrap();
    for found in handbook.into_iter().flat_map(|document| name.find_iter(document)) {
        let family = ["_bucket", "_sum", "_count"].into_iter().find_map(|end| found.as_str().strip_suffix(end));
        // `order_timeout_workers` is a table.
        let known = |name: &str| name == "order_timeout_workers" || listed().any(|one| one.name == name);
        assert!(
            known(found.as_str()) || family.is_some_and(known),
            "docs/operating mentions {}, which is not a metric",
            found.as_str()
        );
    }
}

#[test]
fn readyz_names_lost_server() {
    let adjust = |settings: &mut Settings| {
        serve_http(settings);
        shorten_timeouts(settings);
    };
    TestEnv::builder().settings(adjust).run(async |env| {
        let to_broker = Proxy::before(&env.settings.amqp.url).await;
        let to_database = Proxy::before(&env.settings.database.url).await;
        let mut settings = with_broker_behind(&env, &to_broker);
        settings.database.url = to_database.address(&settings.database.url);
        let worker = RunningWorker::start(settings).await;
        wait_for("a worker that is ready", async || is_ready(&worker).await).await;

        to_broker.cut();
        wait_for("the report of the lost broker", async || !is_ready(&worker).await).await;
        let (status, why) = get(&worker, READYZ).await;
        assert_eq!((status, why.lines().count()), (503, 1), "{why}");
        assert!(why.starts_with("broker: no consumer session is open: "), "{why}");
        wait_for_figure(&worker, "session_open", |open| open == 0.0).await;
        // Meanwhile an alarm waits in its outbox.
        let order = env.order(600 * SECOND).await;
        env.write_alarm(&order).await;
        wait_for_figure(&worker, "alarms_refused_total", |refused| refused > 0.0).await;
        wait_for_figure(&worker, "outbox_age_seconds{outbox=\"alarm\"}", |age_s| age_s > 0.0).await;
        to_broker.restore();
        wait_for("ready again", async || is_ready(&worker).await).await;
        wait_for_figure(&worker, "alarms_scheduled_total", |scheduled| scheduled == 1.0).await;
        wait_for_figure(&worker, "outbox_age_seconds{outbox=\"alarm\"}", |age_s| age_s == 0.0).await;
        wait_for_figure(&worker, "sessions_opened_total", |opened| opened == 2.0).await;

        to_database.cut();
        wait_for("the report of the lost database", async || !is_ready(&worker).await).await;
        let (status, why) = get(&worker, READYZ).await;
        assert!(status == 503 && why.starts_with("database: ") && why.lines().count() == 1, "{why}");
        let place = host_and_port(&to_database.address(&env.settings.database.url));
        let (_, why) = get(&worker, READYZ).await;
        assert!(why.contains(&place), "{why}");
        wait_for_figure(&worker, "database_unavailable", |away| away == 1.0).await;
        wait_for_figure(&worker, "sweep_failures_total", |failures| failures > 0.0).await;
        assert_eq!(get(&worker, LIVEZ).await, (200, "alive\n".into()), "the worker itself is healthy");
        to_database.restore();
        wait_for("ready again", async || is_ready(&worker).await).await;
        wait_for_figure(&worker, "database_unavailable", |away| away == 0.0).await;

        // The database's host vanishes: no connection is closed, and no call is answered.
        to_database.stall();
        wait_for("the report of the lost database", async || get(&worker, READYZ).await.1.starts_with("database: "))
            .await;
        to_database.restore();
        wait_for("ready again", async || is_ready(&worker).await).await;
        worker.stop().await;
    });
}

#[test]
fn readyz_reports_broker_missing_at_start() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let worker = env.worker_without_broker().await;
        let missed = "broker: no consumer session is open: the broker at 127.0.0.1:9, ";
        wait_for("the report of the lost broker", async || get(&worker, READYZ).await.1.starts_with(missed)).await;
        assert_eq!(get(&worker, LIVEZ).await, (200, "alive\n".into()));
        worker.stop().await;
    });
}

#[test]
fn readonly_database_requeues_alarms_and_ends_readiness() {
    let adjust = |settings: &mut Settings| {
        serve_http(settings);
        shorten_timeouts(settings);
    };
    TestEnv::builder().settings(adjust).run(async |env| {
        let worker = env.worker().await;
        wait_for("a worker that is ready", async || is_ready(&worker).await).await;
        // Like a standby or a demoted primary: the database answers but accepts no writes.
        let database: String = sqlx::query_scalar("SELECT current_database()").fetch_one(&env.pool).await.unwrap();
        let read_only = |to: &str| {
            format!(
                "ALTER DATABASE {database} SET default_transaction_read_only = {to};
                 SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                 WHERE datname = '{database}' AND pid <> pg_backend_pid()"
            )
        };
        let order = env.order(Duration::from_millis(1)).await;
        sqlx::raw_sql(sqlx::AssertSqlSafe(read_only("on"))).execute(&env.pool).await.unwrap();
        env.deliver([&order]).await;
        wait_for("resting", async || get(&worker, READYZ).await.1.contains("worker.requeue_after")).await;
        let (status, why) = get(&worker, READYZ).await;
        assert!(status == 503 && why.contains("\ndatabase: ") && why.contains("read-only"), "{why}");
        assert!(Figures::of(&worker).await.get("close_results_total{outcome=\"away\"}") > 0.0);
        let reset = format!("SET default_transaction_read_only = off; {}", read_only("off"));
        // The pool may hand out a connection that was terminated.
        wait_for("the reset", async || {
            sqlx::raw_sql(sqlx::AssertSqlSafe(reset.clone())).execute(&env.pool).await.is_ok()
        })
        .await;
        wait_for("ready again", async || is_ready(&worker).await).await;
        // Either by its redelivered alarm or by the sweep, which does not wait for alarms while none can arrive.
        wait_for("the close", async || env.closed().await == 1).await;
        worker.stop().await;
        env.assert_ledger().await;
    });
}

#[test]
fn table_lock_ends_readiness_and_shows_overdue() {
    let adjust = |settings: &mut Settings| {
        serve_http(settings);
        settings.sweep.grace = Settings::defaults().sweep.grace;
    };
    TestEnv::builder().settings(adjust).run(async |env| {
        let worker = env.worker().await;
        wait_for("a worker that is ready", async || is_ready(&worker).await).await;
        wait_for_figure(&worker, "oldest_overdue_seconds", |seconds| seconds.abs() < f64::EPSILON).await;
        let mut locker = env.pool.begin().await.unwrap();
        sqlx::query("LOCK TABLE order_events").execute(&mut *locker).await.unwrap();
        let orders = env.orders(3, Duration::ZERO).await;
        env.deliver(&orders[..2]).await;
        wait_for("the report", async || {
            let (status, why) = get(&worker, READYZ).await;
            status == 503 && why.contains("database: ") && why.contains("lock timeout")
        })
        .await;
        wait_for_figure(&worker, "oldest_overdue_seconds", |seconds| seconds > 1.0).await;
        assert!(Figures::of(&worker).await.get("close_results_total{outcome=\"locked\"}") > 0.0);
        locker.rollback().await.unwrap();
        wait_for("the closes", async || env.closed().await == 3).await;
        wait_for("ready again", async || is_ready(&worker).await).await;
        wait_for_figure(&worker, "oldest_overdue_seconds", |seconds| seconds.abs() < f64::EPSILON).await;
        worker.stop().await;
        env.assert_ledger().await;
    });
}

#[test]
fn stopping_worker_is_alive_but_not_ready() {
    let adjust = |settings: &mut Settings| {
        serve_http(settings);
        // The worker is stopping as long as the close in flight waits.
        wait_long_for_locks(settings);
    };
    TestEnv::builder().settings(adjust).run(async |env| {
        let worker = env.worker().await;
        let mut other = env.pool.begin().await.unwrap();
        sqlx::query("LOCK TABLE order_events").execute(&mut *other).await.unwrap();
        let order = env.order(Duration::from_millis(1)).await;
        env.deliver([&order]).await;
        env.wait_for_lock_waiter().await;
        worker.begin_to_stop();
        wait_for("not ready", async || get(&worker, READYZ).await == (503, "worker: stopping\n".into())).await;
        assert_eq!(get(&worker, LIVEZ).await, (200, "alive\n".into()));
        other.rollback().await.unwrap();
        let address = worker.http.unwrap();
        worker.stop().await;
        http::get(address, READYZ, TIMEOUT).await.expect_err("no listener is left");
        assert_eq!(env.closed().await, 1);
    });
}

#[test]
fn stalled_event_loop_is_reported() {
    TestEnv::builder().without_broker().run(async |_| {
        let health = Arc::new(Health::new(Duration::ZERO));
        health.of_kind(&Kind::ORDER).note_started();
        let pages = Pages { health: health.clone(), metrics: Arc::default() };
        let server = HttpServer::open(([127, 0, 0, 1], 0).into(), pages, None).await.unwrap();
        assert_eq!(http::get(server.address(), LIVEZ, TIMEOUT).await.unwrap().0, 200, "it has not begun");
        health.mark_running();
        let still = async || http::get(server.address(), LIVEZ, TIMEOUT).await.unwrap();
        wait_for("three stalled loops", async || still().await.1.lines().count() == 3).await;
        let (status, text) = still().await;
        assert!(status == 503 && text.contains("the supervisor loop has made no progress for"), "{text}");
    });
}

#[test]
fn metrics_follow_alarms_and_orders() {
    let adjust = |settings: &mut Settings| {
        serve_http(settings);
        settings.sweep.grace = Duration::from_millis(500);
    };
    TestEnv::builder().settings(adjust).run(async |env| {
        let worker = env.worker().await;
        let publisher = env.publisher().await;
        // It passes the inbox and the wheel, and closes last.
        let far = env.order(9 * SECOND).await;
        publisher.schedule(far.id.to_string(), far.deadline).await.unwrap();
        let orders = env.orders(20, 2 * SECOND).await;
        publisher.schedule_all(orders.iter().map(|order| (order.order_id(), order.deadline))).await.unwrap();
        for order in &orders[..5] {
            assert!(env.pay(order).await);
        }
        cause_failures(&env).await;
        // Three orders without an alarm, and four through the outbox, one of them overdue by then.
        env.orders(3, SECOND).await;
        for order in env.orders(3, 2 * SECOND).await {
            env.write_alarm(&order).await;
        }
        let late = env.order(Duration::ZERO).await;
        env.write_alarm(&late).await;

        let unpaid = async || env.count("SELECT count(*) FROM orders WHERE status = 'unpaid'").await;
        wait_for("every close but one", async || unpaid().await == 1).await;
        wait_for("all that is parked", async || env.parked().await.len() == 4).await;
        // One more alarm for a closed order.
        env.deliver([&far]).await;
        wait_for_figure(&worker, "close_results_total{outcome=\"already_closed\"}", |count| count >= 1.0).await;
        // One event for each close, and the metric follows the row.
        wait_for("every event announced", async || {
            let closed = env.closed().await as f64;
            Figures::of(&worker).await.get("events_announced_total") == closed
        })
        .await;
        assert_figures(&env, &Figures::of(&worker).await).await;
        worker.stop().await;
        env.assert_ledger().await;
    });
}

/// One invalid message, two alarms for orders that do not exist, one for an order that a trigger keeps from being
/// closed, and one for an order with a row locked for a while.
async fn cause_failures(env: &TestEnv) {
    let (due, now) = (env.names().due(), Timestamp::now_by_local_clock());
    let properties = || BasicProperties::default().with_delivery_mode(2);
    let alarm = |id: &str| format!("{{\"order_id\": \"{id}\", \"deadline\": \"2026-01-01T00:00:00Z\"}}");
    env.publish_raw(&due, DUE_KEY, b"no alarm", properties()).await;
    env.publish_raw(&due, DUE_KEY, alarm("no uuid").as_bytes(), properties()).await;
    let publisher = env.publisher().await;
    publisher.schedule(OrderId::new(Uuid::now_v7().to_string()).unwrap(), now).await.unwrap();

    env.stock("unclosable", 10).await;
    let refuse = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF EXISTS (SELECT FROM order_items WHERE order_id = NEW.id AND article_id = 'unclosable')
             THEN RAISE 'this order stays'; END IF;
             RETURN NEW; END $$;
         CREATE TRIGGER refuse BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION refuse()";
    sqlx::raw_sql(refuse).execute(&env.pool).await.unwrap();
    let unclosable = env.orders_of("unclosable", 1, Duration::ZERO).await;
    env.deliver(&unclosable).await;

    let locked = env.order(Duration::ZERO).await;
    let mut payment = env.pool.begin().await.unwrap();
    sqlx::query("SELECT FROM orders WHERE id = $1 FOR UPDATE").bind(locked.id).execute(&mut *payment).await.unwrap();
    env.deliver([&locked]).await;
    // This order is behind the locked one in the queue: once it is closed, the locked one has been tried.
    let next = env.order(Duration::ZERO).await;
    env.deliver([&next]).await;
    wait_for("the order behind it", async || env.status(&next).await == "closed").await;
    payment.rollback().await.unwrap();
}

async fn assert_figures(env: &TestEnv, figures: &Figures) {
    let is = |series: &str, expected: f64| assert_eq!(figures.get(series), expected, "{series}\n{}", figures.text);
    let at_least = |series: &str, least: f64| {
        assert!(figures.get(series) >= least, "{series} is {} and not {least} or more", figures.get(series));
    };
    let by_alarm = env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await as f64;
    let by_sweep = env.count("SELECT count(*) FROM orders WHERE closed_by = 'sweep'").await as f64;
    let by_look_ahead = env.count("SELECT count(*) FROM orders WHERE closed_by = 'look_ahead'").await as f64;
    assert!(by_alarm >= 1.0 && by_sweep >= 1.0, "{by_alarm} by alarm, {by_sweep} by the sweep");
    assert!(by_sweep + by_look_ahead >= 3.0, "{by_sweep} by the sweep, {by_look_ahead} by look-ahead");
    is("orders_closed_total{by=\"alarm\"}", by_alarm);
    is("orders_closed_total{by=\"sweep\"}", by_sweep);
    is("close_results_total{outcome=\"closed\"}", by_alarm + by_sweep + by_look_ahead);
    is("close_lateness_seconds_count{by=\"alarm\"}", by_alarm);
    is("close_lateness_seconds_count{by=\"sweep\"}", by_sweep);
    is("close_lateness_seconds_bucket{by=\"sweep\",le=\"60\"}", by_sweep);
    assert_lateness_matches_ledger(env, figures).await;
    at_least("close_results_total{outcome=\"paid\"}", 5.0);
    for outcome in ["unknown", "malformed", "failed", "busy"] {
        at_least(&format!("close_results_total{{outcome=\"{outcome}\"}}"), 1.0);
    }
    for reason in ["unreadable", "malformed_id", "unknown_order", "close_failed"] {
        is(&format!("alarms_parked_total{{reason=\"{reason}\"}}"), 1.0);
    }
    is("alarms_parked_total{reason=\"too_far\"}", 0.0);
    is("orders_backed_off", 1.0);
    is("alarms_scheduled_total", 3.0);
    is("alarms_expired_total", 1.0);
    is("alarms_refused_total", 0.0);
    at_least("alarms_delivered_total{queue=\"timeout\"}", 26.0);
    at_least("alarms_delivered_total{queue=\"schedule\"}", 1.0);
    at_least("alarms_rearmed_total", 1.0);
    at_least("alarm_earliness_seconds_count", 25.0);
    at_least("batch_duration_seconds_count{by=\"alarm\"}", 1.0);
    at_least("batch_duration_seconds_count{by=\"sweep\"}", 1.0);
    for (series, expected) in [("alarms_held", 0.0), ("session_open", 1.0), ("sessions_opened_total", 1.0)] {
        is(series, expected);
    }
    for (series, expected) in [("relaying", 1.0), ("database_unavailable", 0.0), ("sweep_failures_total", 0.0)] {
        is(series, expected);
    }
    // Worker and database share this machine's clock.
    assert!(figures.get("clock_offset_seconds").abs() < 1.0, "{}", figures.text);
    assert!((1e-6..1.0).contains(&figures.get("clock_uncertainty_seconds")), "{}", figures.text);
    assert_labels_are_listed(&figures.text);
}

/// The worker measures until its commit is answered, the row only until the statement: the worker's value is slightly
/// higher, never lower.
async fn assert_lateness_matches_ledger(env: &TestEnv, figures: &Figures) {
    let ledger_s = env.lateness_ms().await.iter().sum::<f64>() / 1e3;
    let shown_s =
        ["alarm", "look_ahead", "sweep"].map(|by| figures.get(&format!("close_lateness_seconds_sum{{by=\"{by}\"}}")));
    let shown_s: f64 = shown_s.iter().sum();
    // The clocks differ by less than one round trip each time.
    let orders = env.closed().await as f64;
    assert!((ledger_s - 0.01 * orders..ledger_s + 0.5 * orders).contains(&shown_s), "{shown_s} s, {ledger_s} s");
}

#[test]
fn second_worker_on_same_address_fails() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let worker = env.worker().await;
        let address = worker.http.unwrap();
        let mut settings = env.settings.clone();
        settings.http.listen = Listen(Some(address));
        let fault = Worker::start(settings).await.map(drop).expect_err("it is taken").to_string();
        assert!(fault.starts_with(&format!("http.listen: {address} is taken")) && fault.contains("set http.listen to"));
        wait_for("the first, ready", async || is_ready(&worker).await).await;
        worker.stop().await;
    });
}

#[test]
fn silent_clients_do_not_block_probes() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let worker = env.worker().await;
        let address = worker.http.unwrap();
        // More connections than are served at once, all of them silent.
        let mut silent = Vec::new();
        for _ in 0..160 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        wait_for("a worker that is ready", async || is_ready(&worker).await).await;
        let (status, text) = get(&worker, "/favicon.ico").await;
        assert!(status == 404 && text.contains("/readyz"), "{text}");
        worker.stop().await;
    });
}

#[test]
fn idle_connections_do_not_starve_probes() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let worker = env.worker().await;
        let address = worker.http.unwrap();
        for _ in 0..3 {
            // All connect at once and stay open until the round ends, far more of them than are served before the probe
            // arrives.
            let idle: Vec<_> = (0..600).map(|_| tokio::spawn(TcpStream::connect(address))).collect();
            let connected = || idle.iter().filter(|one| one.is_finished()).count();
            wait_for("idle connections", async || connected() >= 300).await;
            for _ in 0..3 {
                let probe = http::get(address, LIVEZ, promised(SECOND)).await;
                assert_eq!(probe.expect("an answer"), (200, "alive\n".into()));
            }
        }
        worker.stop().await;
    });
}

/// An address that is free now. Another process could take it before the worker does, which is unlikely.
pub fn free_address() -> SocketAddr {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

#[test]
fn health_command_reports_worker_state() {
    let listen = free_address();
    TestEnv::builder().settings(move |settings| settings.http.listen = Listen(Some(listen))).run(async |env| {
        let health = |arguments: &[&str]| {
            tokio::task::block_in_place(|| run(order_timeout(&env.settings).arg("health").args(arguments)))
        };
        let (code, stdout, stderr) = health(&[]);
        assert_eq!((code, stdout.as_str()), (1, ""));
        assert!(stderr.contains("no worker answers at ") && stderr.lines().count() == 1, "{stderr}");

        let to_broker = Proxy::before(&env.settings.amqp.url).await;
        let worker = WorkerProcess::start(&with_broker_behind(&env, &to_broker));
        wait_for("a worker that is ready", async || health(&[]) == (0, "ready\n".into(), String::new())).await;
        assert_eq!(health(&["--live"]), (0, "alive\n".into(), String::new()));
        to_broker.cut();
        wait_for("a worker that is not", async || health(&[]).0 == 1).await;
        let (code, stdout, stderr) = health(&[]);
        assert!(code == 1 && stdout.starts_with("broker: no consumer session") && stderr.is_empty(), "{stdout}");
        assert_eq!(health(&["--live"]).0, 0);
        assert_eq!(worker.terminate(TIMEOUT), 0);
    });
}

#[test]
fn health_command_needs_listen_address() {
    let settings = small_settings();
    for (listen, what) in [("", "http.listen is empty"), ("127.0.0.1:0", "http.listen leaves the port open")] {
        let set = format!("http.listen={listen}");
        let (code, stdout, stderr) = run(order_timeout(&settings).args(["health", "--set", &set]));
        assert_eq!((code, stdout.as_str()), (2, ""), "{stderr}");
        assert!(stderr.contains(what) && stderr.contains("set it to"), "{stderr}");
    }
}
