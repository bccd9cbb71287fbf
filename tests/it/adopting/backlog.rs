//! A newcomer's first run does not close a shop's years-old unpaid orders without being told to.

use std::time::Duration;

use order_timeout::{StartError, Worker};

use super::{execute, map, text};
use order_timeout_core::kind::Kind;
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{TestEnv, wait_for};

const OLD: i64 = 50_000;

/// A shop with old unpaid orders.
const OLD_ORDERS: &str = "INSERT INTO tickets.pretixbase_order (code, expires)
    SELECT 'O' || n, now() - interval '5 years' + n * interval '1 minute' FROM generate_series(1, 50000) n";

async fn closed(env: &TestEnv) -> i64 {
    env.count("SELECT count(*) FROM tickets.pretixbase_order WHERE status = 'e'").await
}

async fn refusal(env: &TestEnv) -> String {
    match Worker::start(env.settings.clone()).await {
        Err(StartError::Database(fault)) => fault.to_string(),
        other => panic!("started: {:?}", other.map(drop)),
    }
}

#[test]
fn old_backlog_is_not_closed_unasked() {
    TestEnv::builder()
        .settings(|settings| {
            map(settings, "ticketing");
            settings.sweep.first_backlog = 1_000;
            // 50 000 events are announced before the worker ends.
            settings.worker.shutdown_grace = Duration::from_secs(60);
        })
        .run(async |env| {
            execute(&env, &text("ticketing", "schema.sql")).await;
            execute(&env, OLD_ORDERS).await;
            for _ in 0..2 {
                let why = refusal(&env).await;
                for part in [
                    "50000 orders",
                    "the oldest since 20",
                    "adopt --accept-backlog",
                    "kinds.order.table.open",
                    "sweep.first_backlog = 1000",
                ] {
                    assert!(why.contains(part), "{part}: {why}");
                }
            }
            let (code, said, _) = call_with(&env.settings, &["adopt", "--check"]).await;
            assert!(code == 1 && said.contains("wrong   sweep.first_backlog"), "{said}");
            assert_eq!(closed(&env).await, 0);
            let (code, said, error) = call_with(&env.settings, &["adopt", "--accept-backlog"]).await;
            assert!(code == 0 && said.contains("50000"), "{said}{error}");
            let worker = env.worker().await;
            wait_for("the closes", async || closed(&env).await == OLD).await;
            worker.stop().await;
        });
}

#[test]
fn narrowed_mapping_leaves_old_orders_alone() {
    TestEnv::builder()
        .settings(|settings| {
            map(settings, "ticketing");
            settings.sweep.first_backlog = 10;
            settings.sweep.grace = Duration::ZERO;
            let table = settings.kinds.get_mut(&Kind::ORDER).and_then(|kind| kind.table.as_mut()).unwrap();
            table.open = "status = 'n' AND expires > '2026-01-01'".into();
        })
        .run(async |env| {
            execute(&env, &text("ticketing", "schema.sql")).await;
            execute(&env, OLD_ORDERS).await;
            execute(&env, "INSERT INTO tickets.pretixbase_order (code, expires) VALUES ('N', now() + interval '1 s')")
                .await;
            let worker = env.worker().await;
            wait_for("the close", async || closed(&env).await == 1).await;
            worker.stop().await;
            assert_eq!(closed(&env).await, 1);
            // Widened: the old orders are a new question.
            let mut widened = env.settings.clone();
            widened.kinds.get_mut(&Kind::ORDER).and_then(|kind| kind.table.as_mut()).unwrap().open =
                "status = 'n'".into();
            match Worker::start(widened).await {
                Err(StartError::Database(fault)) => assert!(fault.to_string().contains("50000 orders"), "{fault}"),
                other => panic!("started: {:?}", other.map(drop)),
            }
        });
}

#[test]
fn started_table_is_never_asked_about_again() {
    TestEnv::builder()
        .settings(|settings| {
            map(settings, "ticketing");
            settings.sweep.first_backlog = 1_000;
            // 50 000 events are announced before the worker ends.
            settings.worker.shutdown_grace = Duration::from_secs(60);
        })
        .run(async |env| {
            execute(&env, &text("ticketing", "schema.sql")).await;
            env.worker().await.stop().await;
            assert_eq!(env.count("SELECT count(*) FROM order_timeout_adoption WHERE by = 'first start'").await, 1);
            execute(&env, OLD_ORDERS).await;
            let worker = env.worker().await;
            wait_for("the closes", async || closed(&env).await == OLD).await;
            worker.stop().await;
        });
}

#[test]
fn default_table_is_guarded_as_well() {
    TestEnv::builder().settings(|settings| settings.sweep.first_backlog = 3).run(async |env| {
            execute(&env, "INSERT INTO orders (id, expires_at) SELECT gen_random_uuid(), now() - interval '1 year' FROM generate_series(1, 4)").await;
            let why = refusal(&env).await;
            assert!(why.contains("4 orders of the table orders") && why.contains("status = 'cancelled'"), "{why}");
            execute(&env, "UPDATE orders SET status = 'cancelled' WHERE expires_at < now() - interval '1 day'").await;
            env.worker().await.stop().await;
            assert_eq!(env.closed().await, 0);
        });
}
