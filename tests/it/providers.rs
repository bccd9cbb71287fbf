//! A worker that asks payment providers before it closes orders, against a payment service over HTTP: money that is there
//! is settled, stock comes back only with proof, and one sick provider delays no order of another.

use std::time::{Duration, Instant};

use order_timeout::config::Settings;
use order_timeout::effects::close::Closer;
use order_timeout::operations::doctor::{Options, examine};
use order_timeout::operations::{close_orders, orders_statements};
use order_timeout::postgres::warm_connections::WarmConnections;
use order_timeout::postgres::{Database, Operator};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::Outcome;
use order_timeout_core::problem::Cause;
use order_timeout_providers::settings::LimitsSettings;
use order_timeout_testkit::figures::{Figures, get, serve_http, wait_for_figure};
use order_timeout_testkit::payment_service::{Fault, Outage, PaymentService, Truth, wide_limits};
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{Order, RunningWorker, TestEnv, promised, wait_for, wait_promised};
use uuid::Uuid;

/// Short pauses, and orders that the sweep finds at once.
pub fn adjust(settings: &mut Settings) {
    settings.sweep.grace = Duration::ZERO;
    settings.closing.retry_first = Duration::from_millis(50);
    settings.closing.retry_longest = Duration::from_millis(200);
    settings.closing.max_rounds = 3;
}

/// An attempt for each order, with the order's id as its reference.
pub async fn begin_attempts(env: &TestEnv, orders: &[Order], provider: &str) {
    let ids: Vec<String> = orders.iter().map(|order| order.id.to_string()).collect();
    sqlx::query(
        "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
         SELECT $2, id, id, 1999, 'EUR' FROM unnest($1::text[]) AS o (id)",
    )
    .bind(ids)
    .bind(provider)
    .execute(&env.pool)
    .await
    .unwrap();
}

async fn in_state(env: &TestEnv, status: &str) -> i64 {
    let count = sqlx::query_scalar("SELECT count(*) FROM orders WHERE status::text = $1").bind(status);
    count.fetch_one(&env.pool).await.unwrap()
}

const UNFINISHED: &str = "SELECT count(*) FROM orders WHERE status IN ('unpaid', 'closing')";

/// With few orders, to be quick; `ORDER_TIMEOUT_DEAD_WEBHOOK_ORDERS=3000` for a longer run.
#[test]
fn dead_webhook_closes_no_paid_order() {
    let orders = std::env::var("ORDER_TIMEOUT_DEAD_WEBHOOK_ORDERS").ok();
    let orders: usize = orders.map_or(300, |count| count.parse().expect("a number"));
    let service = PaymentService::start();
    TestEnv::builder()
        .settings(|settings| {
            adjust(settings);
            service.join(settings, "card", wide_limits());
        })
        .run(async move |env| {
            let paid = env.orders(orders, Duration::ZERO).await;
            begin_attempts(&env, &paid, "card").await;
            paid.iter().for_each(|order| assert!(service.pay(&order.id.to_string())));
            let worker = env.worker().await;
            wait_for("the settlements", async || env.count(UNFINISHED).await == 0).await;
            let announced = "SELECT count(*) FROM event_outbox WHERE type = 'order.paid_late_settled.v1'";
            assert_eq!((in_state(&env, "closed").await, in_state(&env, "paid").await), (0, orders as i64));
            assert_eq!(env.count(announced).await, orders as i64);
            assert_eq!(env.count("SELECT count(*) FROM late_payments").await, 0);
            worker.stop().await;
            assert_eq!(service.calls(), (orders, 0), "asked once each");
            env.assert_ledger().await;
        });
}

#[test]
fn unpaid_orders_are_cancelled_then_closed() {
    let service = PaymentService::start();
    TestEnv::builder()
        .settings(|settings| {
            adjust(settings);
            service.join(settings, "card", wide_limits());
        })
        .run(async move |env| {
            let orders = env.orders(50, Duration::ZERO).await;
            begin_attempts(&env, &orders, "card").await;
            let without_attempt = env.order(Duration::ZERO).await;
            let worker = env.worker().await;
            wait_for("the closes", async || env.closed().await == 51).await;
            worker.stop().await;
            assert!(orders.iter().all(|order| service.truth(&order.id.to_string()) == Truth::Closed));
            assert_eq!(env.status(&without_attempt).await, "closed");
            assert_eq!(service.calls(), (50, 50));
            assert_eq!(env.count("SELECT count(*) FROM close_attempts").await, 0);
            env.assert_ledger().await;
        });
}

#[test]
fn silent_provider_keeps_stock_reserved() {
    let service = PaymentService::start();
    TestEnv::builder()
        .settings(|settings| {
            adjust(settings);
            let timeout = Duration::from_millis(100);
            service.join(settings, "card", LimitsSettings { timeout, ..wide_limits() });
        })
        .run(async move |env| {
            let orders = env.orders(6, Duration::ZERO).await;
            begin_attempts(&env, &orders, "card").await;
            for (n, order) in orders.iter().take(4).enumerate() {
                let fault = if n % 2 == 0 { Fault::Hang } else { Fault::Error };
                service.fail(&order.id.to_string(), Some(fault));
            }
            let worker = env.worker().await;
            let unresolved = "SELECT count(*) FROM close_attempts WHERE unresolved_reason = 'no_answer' AND rounds = 3";
            wait_for("the list", async || env.count(unresolved).await == 4).await;
            wait_for("the others", async || env.closed().await == 2).await;
            assert_eq!(env.count("SELECT reserved FROM stock").await, 4);
            assert_eq!(in_state(&env, "closing").await, 4);
            assert_eq!(env.count("SELECT count(*) FROM event_outbox WHERE type = 'order.unresolved.v1'").await, 4);
            worker.stop().await;
            env.assert_ledger().await;
        });
}

#[test]
fn dead_provider_delays_no_other() {
    let (bank, card) = (PaymentService::start(), PaymentService::start());
    bank.set_dead(true);
    TestEnv::builder()
        .settings(|settings| {
            adjust(settings);
            settings.closing.max_rounds = 1_000;
            let limits = LimitsSettings { failures_to_open: 3, ..wide_limits() };
            bank.join(settings, "bank", limits);
            card.join(settings, "card", wide_limits());
        })
        .run(async move |env| {
            let of_bank = env.orders(100, Duration::ZERO).await;
            begin_attempts(&env, &of_bank, "bank").await;
            let worker = env.worker().await;
            wait_for("the claims", async || in_state(&env, "closing").await == 100).await;
            let of_card = env.orders(100, Duration::from_secs(3_600)).await;
            begin_attempts(&env, &of_card, "card").await;
            let due = "UPDATE orders SET expires_at = now() WHERE status = 'unpaid'";
            sqlx::raw_sql(due).execute(&env.pool).await.unwrap();
            wait_for("the healthy provider's orders", async || env.closed().await == 100).await;
            assert_eq!(in_state(&env, "closing").await, 100);
            assert_eq!(env.count("SELECT reserved FROM stock").await, 100);
            bank.set_dead(false);
            wait_for("the others", async || env.closed().await == 200).await;
            assert_eq!(env.count("SELECT count(*) FROM close_attempts").await, 0, "none is unresolved");
            worker.stop().await;
            env.assert_ledger().await;
        });
}

#[test]
fn stopped_worker_waits_for_no_provider() {
    let service = PaymentService::start();
    TestEnv::builder()
        .settings(|settings| {
            adjust(settings);
            service.join(settings, "card", LimitsSettings { timeout: Duration::from_secs(60), ..wide_limits() });
        })
        .run(async move |env| {
            let order = env.order(Duration::ZERO).await;
            begin_attempts(&env, &[order], "card").await;
            service.fail(&order.id.to_string(), Some(Fault::Hang));
            let worker = env.worker().await;
            wait_for("the call", async || service.calls().0 == 1).await;
            let began = Instant::now();
            worker.stop().await;
            assert!(began.elapsed() < promised(env.settings.worker.shutdown_grace), "{:?}", began.elapsed());
            assert_eq!(env.count("SELECT count(*) FROM close_attempts WHERE lease IS NOT NULL").await, 0);
            service.fail(&order.id.to_string(), None);
            let worker = env.worker().await;
            wait_for("the close", async || env.closed().await == 1).await;
            worker.stop().await;
        });
}

#[test]
fn killed_worker_leaves_orders_to_next() {
    let service = PaymentService::start();
    TestEnv::builder()
        .with_clock()
        .settings(|settings| {
            adjust(settings);
            let (timeout, queue_timeout) = (Duration::from_millis(100), Duration::from_millis(100));
            service.join(settings, "card", LimitsSettings { timeout, queue_timeout, ..wide_limits() });
        })
        .run(async move |env| {
            let orders = env.orders(20, Duration::ZERO).await;
            begin_attempts(&env, &orders, "card").await;
            orders.iter().take(10).for_each(|order| assert!(service.pay(&order.id.to_string())));
            let worker = env.worker().await;
            wait_for("the end", async || env.count(UNFINISHED).await == 0).await;
            worker.stop().await;
            // What a worker that was killed after its takeover leaves: a lease, which ends.
            let late = env.orders(5, Duration::ZERO).await;
            begin_attempts(&env, &late, "card").await;
            let claim = "UPDATE orders SET status = 'closing' WHERE status = 'unpaid'";
            sqlx::raw_sql(claim).execute(&env.pool).await.unwrap();
            sqlx::raw_sql(
                "INSERT INTO close_attempts (order_id, claimed_by, queue, lease, next_attempt_at)
                 SELECT id::text, 'alarm', 'card', 1, now() + interval '1 hour' FROM orders WHERE status = 'closing'",
            )
            .execute(&env.pool)
            .await
            .unwrap();
            let worker = env.worker().await;
            env.advance(Duration::from_secs(3_600)).await;
            wait_for("the rest", async || env.count(UNFINISHED).await == 0).await;
            worker.stop().await;
            assert_eq!((in_state(&env, "paid").await, in_state(&env, "closed").await), (10, 15));
            env.assert_ledger().await;
        });
}

#[test]
fn manual_close_claims_where_provider_is_asked() {
    let service = PaymentService::start();
    TestEnv::builder()
        .settings(|settings| {
            adjust(settings);
            service.join(settings, "card", wide_limits());
        })
        .run(async move |env| {
            let order = env.order(Duration::ZERO).await;
            begin_attempts(&env, &[order], "card").await;
            let database = Database::connect(&env.settings.database, 1).await.unwrap();
            let statements = orders_statements::statements(&database, &env.settings, &Kind::ORDER).await.unwrap();
            let connections = WarmConnections::new(database);
            let closer = Closer::prepare(connections, statements.close).await.unwrap();
            let operator = Operator { who: "ann".into(), why: Some("a test".into()), run: Uuid::now_v7() };
            let found = close_orders::close_each(&closer, &[order.order_id()], &operator, None).await.findings;
            assert_eq!(found[&order.order_id()].as_ref().unwrap().outcome, Outcome::Claimed);
            assert_eq!((env.status(&order).await.as_str(), service.calls()), ("closing", (0, 0)));
            let worker = env.worker().await;
            wait_for("the close", async || env.closed().await == 1).await;
            worker.stop().await;
            let history = "SELECT count(*) FROM order_events WHERE by = 'manual' AND who = 'ann' AND why = 'a test'";
            assert_eq!(env.count(history).await, 1);
        });
}

/// The same settings without any provider, as of a worker that was forgotten.
fn without_providers(env: &TestEnv) -> Settings {
    let mut settings = env.settings.clone();
    settings.providers.0.clear();
    settings.kinds.clear();
    settings
}

async fn why_degraded(worker: &RunningWorker, cause: &str) -> String {
    let beginning = format!("degraded: {cause}: ");
    let (_, text) = get(worker, "/readyz").await;
    text.lines().filter_map(|line| line.strip_prefix(&beginning)).collect::<Vec<_>>().join("; ")
}

async fn wait_until_named(worker: &RunningWorker, cause: &str, part: &str) {
    wait_promised(Duration::from_secs(15), part, async || why_degraded(worker, cause).await.contains(part)).await;
}

#[test]
fn worker_without_provider_closes_no_paid_order() {
    let service = PaymentService::start();
    TestEnv::builder()
        .settings(|settings| {
            adjust(settings);
            serve_http(settings);
            service.join(settings, "card", wide_limits());
        })
        .run(async move |env| {
            let forgotten = RunningWorker::start(without_providers(&env)).await;
            let worker = env.worker().await;
            let orders = env.orders(200, Duration::from_secs(3_600)).await;
            orders.iter().for_each(|order| assert!(service.pay(&order.id.to_string())));
            begin_attempts(&env, &orders, "card").await;
            sqlx::raw_sql("UPDATE orders SET expires_at = now()").execute(&env.pool).await.unwrap();
            for one in [&worker, &forgotten] {
                wait_until_named(one, "workers_disagree", "kinds.order.providers").await;
            }
            wait_for("the settlements", async || env.count(UNFINISHED).await == 0).await;
            assert_eq!((in_state(&env, "closed").await, in_state(&env, "paid").await), (0, 200));
            worker.stop().await;
            forgotten.stop().await;
            env.assert_ledger().await;
        });
}

#[test]
fn orders_without_provider_are_listed_then_asked() {
    let service = PaymentService::start();
    TestEnv::builder()
        .settings(|settings| {
            adjust(settings);
            serve_http(settings);
            service.join(settings, "card", wide_limits());
        })
        .run(async move |env| {
            let order = env.order(Duration::ZERO).await;
            begin_attempts(&env, &[order], "card").await;
            let without_attempt = env.order(Duration::ZERO).await;
            let settings = without_providers(&env);
            let worker = RunningWorker::start(settings.clone()).await;
            wait_until_named(&worker, "provider_away", "1 orders wait").await;
            assert_eq!(
                (env.status(&order).await.as_str(), env.status(&without_attempt).await.as_str()),
                ("closing", "closed")
            );
            let id = order.id.to_string();
            let (code, listed, _) = call_with(&settings, &["closing", "list"]).await;
            assert!(code == 0 && listed.contains(&format!("{id}: no_provider")), "{listed}");
            let (_, why, _) = call_with(&settings, &["explain", &id]).await;
            assert!(why.contains("no live worker has its payment provider card"), "{why}");
            let (code, said, _) = call_with(&settings, &["close", &id]).await;
            assert!(code == 1 && said.contains("it is unresolved (no_provider)"), "{said}");
            let announced = "SELECT count(*) FROM event_outbox WHERE payload ->> 'reason' = 'no_provider'";
            assert_eq!(env.count(announced).await, 1);
            let asking = env.worker().await;
            wait_for("the close", async || env.closed().await == 2).await;
            asking.stop().await;
            worker.stop().await;
            assert_eq!(service.calls(), (1, 1));
            env.assert_ledger().await;
        });
}

/// A breaker that opens stays open for longer than this test; so it must be tested by an order that has not failed.
#[test]
fn failing_orders_delay_no_others() {
    let service = PaymentService::start();
    TestEnv::builder()
        .settings(|settings| {
            adjust(settings);
            settings.closing.max_rounds = 1_000;
            let limits = LimitsSettings { failures_to_open: 5, open_for: Duration::from_secs(3_600), ..wide_limits() };
            service.join(settings, "card", limits);
        })
        .run(async move |env| {
            let failing = env.orders(12, Duration::ZERO).await;
            failing.iter().for_each(|order| service.fail(&order.id.to_string(), Some(Fault::Error)));
            begin_attempts(&env, &failing, "card").await;
            let worker = env.worker().await;
            wait_for("their failures", async || service.calls().0 >= 5).await;
            for _ in 0..6 {
                let healthy = env.orders(10, Duration::from_secs(3_600)).await;
                begin_attempts(&env, &healthy, "card").await;
                let closed = env.closed().await;
                sqlx::raw_sql("UPDATE orders SET expires_at = now() WHERE status = 'unpaid'")
                    .execute(&env.pool)
                    .await
                    .unwrap();
                wait_for("the others", async || env.closed().await == closed + 10).await;
            }
            assert_eq!((env.closed().await, in_state(&env, "closing").await), (60, 12));
            worker.stop().await;
        });
}

#[test]
fn closes_after_provider_have_own_metrics() {
    let (card, bank) = (PaymentService::start(), PaymentService::start());
    bank.set_dead(true);
    TestEnv::builder()
        .settings(|settings| {
            adjust(settings);
            serve_http(settings);
            settings.http.page = true;
            card.join(settings, "card", wide_limits());
            bank.join(settings, "bank", LimitsSettings { failures_to_open: 1, ..wide_limits() });
        })
        .run(async move |env| {
            let orders = env.orders(3, Duration::ZERO).await;
            begin_attempts(&env, &orders, "card").await;
            assert!(card.pay(&orders[0].id.to_string()));
            let of_bank = env.order(Duration::ZERO).await;
            begin_attempts(&env, &[of_bank], "bank").await;
            let worker = env.worker().await;
            wait_for("the closes", async || env.closed().await == 2 && in_state(&env, "paid").await == 1).await;
            let count = |end: &str| format!("provider_close_lateness_seconds_count{{end=\"{end}\"}}");
            wait_for_figure(&worker, &count("closed"), |value| value == 2.0).await;
            wait_for_figure(&worker, &count("settled"), |value| value == 1.0).await;
            wait_for_figure(&worker, "provider_breaker_open{provider=\"bank\"}", |value| value == 1.0).await;
            let refused = "provider_calls_refused_total{provider=\"bank\",reason=\"breaker_open\"}";
            wait_for_figure(&worker, refused, |value| value >= 1.0).await;
            let figures = Figures::of(&worker).await;
            let by =
                |name: &str| ["alarm", "look_ahead", "sweep"].map(|by| figures.get(&format!("{name}{{by=\"{by}\"}}")));
            assert_eq!(by("orders_closed_total").iter().sum::<f64>(), 2.0);
            assert_eq!(by("close_lateness_seconds_count"), [0.0; 3], "no wait for a provider is in it");
            for (series, expected) in [
                ("provider_answers_total{answer=\"paid\",provider=\"card\"}", 1.0),
                ("provider_answers_total{answer=\"open\",provider=\"card\"}", 2.0),
                ("provider_answers_total{answer=\"closed\",provider=\"card\"}", 2.0),
                ("provider_answers_total{answer=\"open\",provider=\"bank\"}", 0.0),
                ("provider_call_seconds_count{call=\"ask\",provider=\"card\"}", 3.0),
                ("provider_call_seconds_count{call=\"cancel\",provider=\"card\"}", 2.0),
                ("provider_breaker_open{provider=\"card\"}", 0.0),
                ("provider_calls_waiting{provider=\"card\"}", 0.0),
            ] {
                assert_eq!(figures.get(series), expected, "{series}");
            }
            let is_on_page = async || get(&worker, "/").await.1.contains("<p>2 orders.</p>");
            wait_for("each close once on the page", is_on_page).await;
            worker.stop().await;
        });
}

/// The doctor asks the provider before the first deadline does.
#[test]
fn doctor_tries_keys_of_providers() {
    let (service, gone) = (PaymentService::start(), PaymentService::start());
    gone.set_outage(Some(Outage::Refusing));
    TestEnv::builder()
        .settings(|settings| {
            service.join(settings, "card", wide_limits());
            gone.join(settings, "bank", wide_limits());
        })
        .run(async move |env| {
            let order = env.order(Duration::from_secs(3_600)).await;
            begin_attempts(&env, &[order], "card").await;
            let report = examine(&env.settings, &Options::default()).await;
            let found: Vec<_> = report.problems().filter(|problem| problem.cause == Cause::ProviderAway).collect();
            let [finding] = found[..] else { panic!("{found:?}") };
            assert!(finding.what.starts_with("bank cannot be asked") && finding.fix.contains("providers.bank"));
            // A payment that cannot exist, and the newest attempt.
            assert_eq!((service.calls(), gone.calls()), ((2, 0), (0, 0)));
        });
}
