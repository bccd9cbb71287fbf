//! A fault of one kind stops no other: each is named, and over as soon as its reason is.

use std::time::Duration;

use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use order_timeout::config::kinds::Remind;
use order_timeout::http::READYZ;
use order_timeout::{Settings, Worker};
use order_timeout_testkit::figures::{Figures, get, serve_http};
use order_timeout_testkit::{RunningWorker, TestEnv, wait_for, wait_long_for_locks};

use crate::kinds::{closed, create, create_table, kind, mapped};

const SECOND: Duration = Duration::from_secs(1);

fn with_acceptance(settings: &mut Settings) {
    mapped(settings, "acceptance");
    serve_http(settings);
    settings.sweep.grace = SECOND / 5;
}

async fn says(worker: &RunningWorker, what: &str) -> bool {
    get(worker, READYZ).await.1.contains(what)
}

fn degraded(cause: &str) -> String {
    format!("degraded{{cause=\"{cause}\"}}")
}

async fn close_an_order(env: &TestEnv) {
    let order = env.order(SECOND).await;
    env.publisher().await.schedule(order.id.to_string(), order.deadline).await.unwrap();
    wait_for("the order's close", async || env.status(&order).await == "closed").await;
}

#[test]
fn unusable_kind_starts_later() {
    TestEnv::builder().settings(with_acceptance).run(async |env| {
        let worker = env.worker().await;
        close_an_order(&env).await;
        let (status, text) = get(&worker, READYZ).await;
        assert!(
            status == 503 && text.contains("degraded: kind_not_started: kind acceptance: it could not start"),
            "{text}"
        );
        assert!(text.contains("kind acceptance: database: ") && text.contains("there is no table"), "{text}");
        assert_eq!(Figures::of(&worker).await.get(&degraded("kind_not_started")), 1.0);

        create_table(&env, "acceptance").await;
        wait_for("both kinds ready", async || get(&worker, READYZ).await.0 == 200).await;
        let (id, deadline) = create(&env, "acceptance", 2 * SECOND).await;
        env.publisher().await.schedule_kind(&kind("acceptance"), id, deadline).await.unwrap();
        wait_for("the other kind's close", async || closed(&env, "acceptance").await == 1).await;
        assert_eq!(Figures::of(&worker).await.get(&degraded("kind_not_started")), 0.0);
        worker.stop().await;
        env.assert_drained().await;
    });
}

#[test]
fn worker_stops_while_kind_waits() {
    TestEnv::builder().settings(with_acceptance).run(async |env| {
        let worker = env.worker().await;
        wait_for("the fault", async || says(&worker, "kind_not_started").await).await;
        worker.stop().await;
    });
}

#[test]
fn only_unusable_kind_ends_start() {
    TestEnv::builder().settings(with_acceptance).run(async |env| {
        let mut settings = env.settings.clone();
        settings.worker.kinds = vec![kind("acceptance")];
        let fault = Worker::start(settings).await.unwrap_err().to_string();
        assert!(fault.contains("there is no table"), "{fault}");

        let mut settings = env.settings.clone();
        let acceptance = settings.kinds.get_mut(&kind("acceptance")).unwrap();
        acceptance.table = None;
        (acceptance.close_sql, acceptance.overdue_sql) = ("no/close.sql".into(), "no/overdue.sql".into());
        let fault = Worker::start(settings).await.unwrap_err().to_string();
        assert!(fault.contains("kinds.acceptance.close_sql: no/close.sql cannot be read"), "{fault}");
    });
}

#[test]
fn differing_queue_stops_own_kind() {
    TestEnv::builder().settings(with_acceptance).run(async |env| {
        create_table(&env, "acceptance").await;
        let queues = env.settings.topology().queues;
        let named = |part: &str| queues.iter().find(|queue| queue.name.contains(part)).unwrap().name.clone();
        let (differing, deleted) = (named("timeout.acceptance"), named(".delay.2s."));
        let delete = async |queue: &str| {
            env.channel().queue_delete(queue.into(), QueueDeleteOptions::default()).await.unwrap();
        };
        delete(&differing).await;
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        env.channel().queue_declare(differing.as_str().into(), durable, FieldTable::default()).await.unwrap();

        let worker = env.worker().await;
        wait_for("the cause", async || says(&worker, "degraded: topology: kind acceptance: queue").await).await;
        assert!(says(&worker, &differing).await);
        close_an_order(&env).await;
        // What the other kind lacks is declared again, although this kind's queue still differs.
        delete(&deleted).await;
        wait_for("the deleted queue", async || env.depth_if_any(&deleted).await.is_some()).await;
        assert!(!says(&worker, "kind order: broker").await);

        delete(&differing).await;
        wait_for("the kind's session", async || get(&worker, READYZ).await.0 == 200).await;
        let (id, deadline) = create(&env, "acceptance", SECOND).await;
        env.publisher().await.schedule_kind(&kind("acceptance"), id, deadline).await.unwrap();
        wait_for("the other kind's close", async || closed(&env, "acceptance").await == 1).await;
        wait_for("no cause", async || !says(&worker, "degraded: topology: kind acceptance").await).await;
        worker.stop().await;
    });
}

#[test]
fn kind_without_worker_is_named() {
    TestEnv::builder().settings(with_acceptance).run(async |env| {
        create_table(&env, "acceptance").await;
        let mut settings = env.settings.clone();
        settings.kinds.get_mut(&kind("acceptance")).unwrap().table = None;
        let orders = RunningWorker::start(settings).await;
        let named = "degraded: kind_not_served: kind acceptance: no worker serves";
        wait_for("the cause", async || says(&orders, named).await).await;
        let mut settings = env.settings.clone();
        settings.worker.kinds = vec![kind("acceptance")];
        let acceptance = RunningWorker::start(settings).await;
        wait_for("no cause", async || !says(&orders, named).await).await;
        assert!(!says(&acceptance, "kind_not_served").await);
        acceptance.stop().await;
        orders.stop().await;
    });
}

#[test]
fn draining_worker_gives_its_share_up() {
    // The registration without kinds exists only until the worker has drained: as long as the close in flight waits.
    let drain_long = |settings: &mut Settings| {
        serve_http(settings);
        wait_long_for_locks(settings);
    };
    TestEnv::builder().settings(drain_long).run(async |env| {
        let worker = env.worker().await;
        let rows = "SELECT count(*) FROM order_timeout_workers WHERE kinds = '{order}'";
        wait_for("its registration", async || env.count(rows).await == 1).await;
        let order = env.order(SECOND).await;
        let mut lock = env.pool.begin().await.unwrap();
        sqlx::raw_sql("LOCK TABLE orders IN ACCESS EXCLUSIVE MODE").execute(&mut *lock).await.unwrap();
        env.publisher().await.schedule(order.id.to_string(), order.deadline).await.unwrap();
        // The sweep's query waits as well, and does not keep a stopping worker: only a close in flight does.
        let closes = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
                      AND wait_event_type = 'Lock' AND query LIKE '-- Closes orders of%'";
        wait_for("a close that waits for the lock", async || env.count(closes).await == 1).await;
        worker.begin_to_stop();
        let without = "SELECT count(*) FROM order_timeout_workers WHERE kinds = '{}'";
        wait_for("a registration without kinds", async || env.count(without).await == 1).await;
        lock.rollback().await.unwrap();
        worker.stop().await;
    });
}

#[test]
fn failing_reminders_are_named() {
    let adjust = |settings: &mut Settings| {
        with_acceptance(settings);
        let acceptance = settings.kinds.get_mut(&kind("acceptance")).unwrap();
        acceptance.remind = vec![Remind(60 * SECOND)];
    };
    TestEnv::builder().settings(adjust).run(async |env| {
        create_table(&env, "acceptance").await;
        let worker = env.worker().await;
        let rename = async |from: &str, to: &str| {
            let rename = sqlx::AssertSqlSafe(format!("ALTER TABLE {from} RENAME TO {to}"));
            sqlx::raw_sql(rename).execute(&env.pool).await.unwrap();
        };
        rename("reminder_progress", "elsewhere").await;
        let named = "degraded: reminders: kind acceptance: reminders cannot be announced";
        wait_for("the cause", async || says(&worker, named).await).await;
        assert_eq!(Figures::of(&worker).await.get(&degraded("reminders")), 1.0);
        rename("elsewhere", "reminder_progress").await;
        wait_for("no cause", async || !says(&worker, named).await).await;
        worker.stop().await;
    });
}
