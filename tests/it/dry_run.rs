//! `order-timeout worker --dry-run`: names each due unpaid order once for each deadline, and leaves rows, history, outboxes
//! and queues as they are.

use std::collections::BTreeSet;
use std::time::Duration;

use order_timeout::operations::dry_run::{Decision, DryRun, Findings, Verdict};
use order_timeout_testkit::payment_service::{PaymentService, wide_limits};
use order_timeout_testkit::process::{WorkerProcess, call_with, order_timeout};
use order_timeout_testkit::{Order, TIMEOUT, TestEnv, wait_for};
use sqlx::AssertSqlSafe;

const HOUR: Duration = Duration::from_secs(3_600);

/// Every row of every table.
async fn rows(env: &TestEnv) -> Vec<(String, String)> {
    let select = "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables
                  WHERE schemaname NOT IN ('pg_catalog', 'information_schema') ORDER BY 1";
    let tables: Vec<String> = sqlx::query_scalar(select).fetch_all(&env.pool).await.unwrap();
    let mut all = Vec::new();
    for table in tables {
        let rows = format!("SELECT coalesce(string_agg(t::text, E'\\n' ORDER BY t::text), '') FROM {table} t");
        let rows: String = sqlx::query_scalar(AssertSqlSafe(rows)).fetch_one(&env.pool).await.unwrap();
        all.push((table, rows));
    }
    all
}

fn named(findings: &Findings) -> BTreeSet<String> {
    let would_close = |one: &&Decision| matches!(one.verdict, Verdict::WouldClose { .. });
    findings.decisions.iter().filter(would_close).map(|one| one.order_id.to_string()).collect()
}

fn ids<'a>(orders: impl IntoIterator<Item = &'a Order>) -> BTreeSet<String> {
    orders.into_iter().map(|order| order.id.to_string()).collect()
}

#[test]
fn due_unpaid_orders_are_named_once() {
    TestEnv::builder().run(async |env| {
        let due = env.orders(3, Duration::from_millis(200)).await;
        let later = env.order(HOUR).await;
        let paid = env.order(Duration::from_millis(200)).await;
        assert!(env.pay(&paid).await);
        env.deliver(&due).await;
        let (queue, overdue) =
            (env.names().shard(0), "SELECT count(*) FROM orders WHERE expires_at <= clock_timestamp()");
        wait_for("the alarms wait", async || env.depth(&queue).await == 3).await;
        wait_for("they are due", async || env.count(overdue).await == 4).await;
        let before = rows(&env).await;

        let mut dry_run = DryRun::prepare(env.settings.clone()).await.unwrap();
        assert_eq!(named(&dry_run.look().await.unwrap()), ids(&due), "neither the paid one nor the later one");
        assert_eq!(dry_run.look().await.unwrap(), Findings::default(), "each is named once");

        let log = tempfile::NamedTempFile::new().unwrap();
        let mut command = order_timeout(&env.settings);
        command.args(["worker", "--dry-run"]).stderr(log.reopen().unwrap()).stdout(log.reopen().unwrap());
        let process = WorkerProcess::of(&mut command);
        let lines = || std::fs::read_to_string(log.path()).unwrap();
        let named_in_log = || lines().lines().filter(|line| line.contains("would close")).count();
        wait_for("the log", async || named_in_log() == 3).await;
        assert_eq!(rows(&env).await, before);
        assert_eq!(env.depth(&queue).await, 3, "no alarm is taken");

        // Another deadline is another decision.
        let earlier = "UPDATE orders SET expires_at = clock_timestamp() - interval '1 second' WHERE id = $1";
        for order in [&due[0], &later] {
            sqlx::query(earlier).bind(order.id).execute(&env.pool).await.unwrap();
        }
        wait_for("the log", async || named_in_log() == 5).await;
        assert_eq!(named(&dry_run.look().await.unwrap()), ids([&due[0], &later]));
        assert_eq!(process.terminate(TIMEOUT), 0);
        let text = lines();
        for part in ["order_id=", "deadline=", "kind=order", "reason=", &later.id.to_string()] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains(&paid.id.to_string()), "{text}");
        assert_eq!(env.closed().await, 0);
    });
}

#[test]
fn held_closing_is_reported_as_held() {
    TestEnv::builder().run(async |env| {
        let order = env.order(Duration::ZERO).await;
        let (code, _, why) = call_with(&env.settings, &["pause", "--why", "the callbacks are missing"]).await;
        assert_eq!(code, 0, "{why}");
        let mut dry_run = DryRun::prepare(env.settings.clone()).await.unwrap();
        let findings = dry_run.look().await.unwrap();
        assert_eq!(named(&findings), ids([&order]));
        let (held, hold) = (findings.decisions[0].held.as_deref().unwrap(), findings.holds[0].1.as_deref());
        assert!(held.contains("the callbacks are missing") && hold == Some(held), "{findings:?}");
        assert_eq!(call_with(&env.settings, &["resume"]).await.0, 0);
        let findings = dry_run.look().await.unwrap();
        assert!(findings.decisions.is_empty() && findings.holds[0].1.is_none(), "{findings:?}");
    });
}

#[test]
fn refused_backlog_is_not_listed() {
    TestEnv::builder().settings(|settings| settings.sweep.first_backlog = 2).with_clock().run(async |env| {
        let orders = env.orders(3, Duration::ZERO).await;
        env.advance(Duration::from_secs(120)).await;
        let mut dry_run = DryRun::prepare(env.settings.clone()).await.unwrap();
        let findings = dry_run.look().await.unwrap();
        let why = findings.holds[0].1.as_deref().unwrap();
        assert!(findings.decisions.is_empty() && why.contains("sweep.first_backlog = 2"), "{findings:?}");
        assert_eq!(env.count("SELECT count(*) FROM order_timeout_adoption").await, 0, "nothing is remembered");
        assert_eq!(call_with(&env.settings, &["adopt", "--accept-backlog"]).await.0, 0);
        assert_eq!(named(&dry_run.look().await.unwrap()), ids(&orders));
    });
}

#[test]
fn order_that_cannot_be_closed_is_named() {
    TestEnv::builder().without_broker().run(async |env| {
        env.stock("kept", 10).await;
        let (kept, other) = (env.orders_of("kept", 1, Duration::ZERO).await, env.order(Duration::ZERO).await);
        env.refuse_to_close("kept").await;
        let findings = DryRun::prepare(env.settings.clone()).await.unwrap().look().await.unwrap();
        assert_eq!((named(&findings), findings.decisions.len()), (ids([&other]), 2));
        let refused = findings.decisions.iter().find(|one| one.order_id == kept[0].order_id()).unwrap();
        assert!(matches!(&refused.verdict, Verdict::WouldNotClose { why } if !why.is_empty()), "{refused:?}");
    });
}

#[test]
fn claim_is_rolled_back_as_well() {
    let service = PaymentService::start();
    let join = |settings: &mut _| service.join(settings, "card", wide_limits());
    TestEnv::builder().settings(join).run(async move |env| {
        let order = env.order(Duration::ZERO).await;
        let attempt = "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
                       SELECT 'card', id::text, id::text, 1999, 'EUR' FROM orders";
        sqlx::query(attempt).execute(&env.pool).await.unwrap();
        let before = rows(&env).await;
        let findings = DryRun::prepare(env.settings.clone()).await.unwrap().look().await.unwrap();
        assert_eq!(named(&findings), ids([&order]));
        let provider = |one: &Verdict| matches!(one, Verdict::WouldClose { reason } if reason.contains("provider"));
        assert!(provider(&findings.decisions[0].verdict));
        assert_eq!(rows(&env).await, before);
        assert_eq!(service.calls(), (0, 0));
    });
}

#[test]
fn brake_that_would_trip_is_reported() {
    TestEnv::builder().settings(|settings| settings.brake.always_allowed = 10).run(async |env| {
        let history = "INSERT INTO closing_minutes (kind, minute, closed, foreseen, closed_of_due)
                       SELECT 'order', date_trunc('minute', clock_timestamp()) - ago * interval '1 minute', 3, 3, 3
                       FROM generate_series(1, 1500) AS ago";
        sqlx::query(history).execute(&env.pool).await.unwrap();
        let mut dry_run = DryRun::prepare(env.settings.clone()).await.unwrap();
        assert_eq!(dry_run.look().await.unwrap(), Findings::default());
        // Five times the usual three are allowed.
        let orders = env.orders(20, HOUR).await;
        let moved = "UPDATE orders SET expires_at = clock_timestamp() - interval '3 hours'";
        sqlx::query(moved).execute(&env.pool).await.unwrap();
        let findings = dry_run.look().await.unwrap();
        assert_eq!(named(&findings), ids(&orders));
        assert!(findings.decisions.iter().all(|one| one.held.is_none()));
        let last = env.order(Duration::ZERO).await;
        let findings = dry_run.look().await.unwrap();
        let why = findings.holds[0].1.as_deref().unwrap();
        assert!(why.contains("the brake would have paused closing: 20 orders") && why.contains("usually 3"), "{why}");
        assert_eq!(named(&findings), ids([&last]));
        assert_eq!(findings.decisions[0].held.as_deref(), Some(why));
        assert_eq!(env.count("SELECT count(*) FROM closing_pauses").await, 0);
    });
}
