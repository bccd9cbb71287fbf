//! Moving an order's deadline: the row decides, an early alarm waits again, and an earlier deadline gets an alarm of its
//! own.

use std::time::Duration;

use order_timeout_client::postgres::{self, Moved, Timestamptz};
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::away::{shorten_timeouts, with_database_behind};
use order_timeout_testkit::process::{call_with, order_timeout, run};
use order_timeout_testkit::proxy::{Proxy, Then};
use order_timeout_testkit::{Order, TIMEOUT, TestEnv, wait_for};
use serde_json::{Value, json};

/// Moves the order's deadline and returns the outcome.
async fn move_to(env: &TestEnv, order: &Order, deadline: Timestamp) -> Moved {
    postgres::move_deadline(&env.pool, order.id.to_string(), deadline).await.unwrap()
}

/// Messages in all queues of the environment.
async fn alarms_at_the_broker(env: &TestEnv) -> u32 {
    env.depth_of_all("").await
}

#[test]
fn repeated_extension_keeps_one_alarm() {
    TestEnv::builder().run(async |env| {
        let order = env.order(Duration::from_secs(2)).await;
        env.publisher().await.schedule(order.id.to_string(), order.deadline).await.unwrap();
        let mut transaction = env.pool.begin().await.unwrap();
        let mut last = order.deadline;
        for _ in 0..1_000 {
            last = last + Duration::from_millis(4);
            let moved = postgres::move_deadline(&mut *transaction, order.id.to_string(), last).await.unwrap();
            assert_eq!(moved, Moved::Later);
        }
        transaction.commit().await.unwrap();
        assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 0);
        // The alarm may be between two queues.
        wait_for("one alarm", async || alarms_at_the_broker(&env).await == 1).await;

        let worker = env.worker().await;
        wait_for("the close", async || env.closed().await == 1).await;
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 1);
        worker.stop().await;
        assert_eq!(alarms_at_the_broker(&env).await, 0);
        env.assert_ledger().await;
    });
}

#[test]
fn alarm_closes_shortened_order() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let order = env.order(Duration::from_secs(600)).await;
        env.publisher().await.schedule(order.id.to_string(), order.deadline).await.unwrap();
        let sooner = order.deadline - Duration::from_secs(598);
        assert_eq!(move_to(&env, &order, sooner).await, Moved::Earlier);
        wait_for("the close", async || env.closed().await == 1).await;
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 1);
        worker.stop().await;
        env.assert_ledger().await;
    });
}

#[test]
fn only_unpaid_order_gets_new_deadline() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(Duration::from_secs(60)).await;
        assert!(env.pay(&order).await);
        let sooner = order.deadline - Duration::from_secs(1);
        let unchanged = Moved::Unchanged { status: "paid".into(), deadline: order.deadline };
        assert_eq!(move_to(&env, &order, sooner).await, unchanged);
        let unknown_order = Order { id: uuid::Uuid::now_v7(), deadline: order.deadline };
        assert_eq!(move_to(&env, &unknown_order, order.deadline).await, Moved::Unknown);
        assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 0);
    });
}

#[test]
fn move_waits_for_concurrent_status_change() {
    TestEnv::builder().without_broker().run(async |env| {
        for wanted_in in [Duration::from_secs(7_200), Duration::from_secs(1_800)] {
            let order = env.order(Duration::from_secs(3_600)).await;
            let close_soon = "UPDATE orders SET status = 'closing' WHERE id = $1";
            sqlx::query(close_soon).bind(order.id).execute(&env.pool).await.unwrap();
            let mut other = env.pool.begin().await.unwrap();
            let make_unpaid = "UPDATE orders SET status = 'unpaid' WHERE id = $1";
            sqlx::query(make_unpaid).bind(order.id).execute(&mut *other).await.unwrap();
            let wanted = order.deadline - Duration::from_secs(3_600) + wanted_in;
            let commit_when_blocked = async {
                env.wait_for_lock_waiter().await;
                other.commit().await.unwrap();
            };
            let (moved, ()) = tokio::join!(move_to(&env, &order, wanted), commit_when_blocked);
            assert_eq!(moved, if wanted > order.deadline { Moved::Later } else { Moved::Earlier });
            assert_eq!(deadline_of(&env, &order).await, wanted, "the outcome matches the row");
        }
        assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 1, "of the earlier one");
    });
}

async fn deadline_of(env: &TestEnv, order: &Order) -> Timestamp {
    let deadline = sqlx::query_scalar("SELECT expires_at FROM orders WHERE id = $1").bind(order.id);
    let Timestamptz(deadline) = deadline.fetch_one(&env.pool).await.unwrap();
    deadline
}

#[test]
fn deadline_kept_by_trigger_is_reported() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(Duration::from_secs(60)).await;
        sqlx::raw_sql(
            "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
                 CREATE TRIGGER keep BEFORE UPDATE OF expires_at ON orders FOR EACH ROW EXECUTE FUNCTION keep();",
        )
        .execute(&env.pool)
        .await
        .unwrap();
        let second = Duration::from_secs(1);
        for wanted in [order.deadline - second, order.deadline + second] {
            let unchanged = Moved::Unchanged { status: "unpaid".into(), deadline: order.deadline };
            assert_eq!(move_to(&env, &order, wanted).await, unchanged);
        }
        assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 0);
        let id = order.id.to_string();
        let (code, output, _) = run(order_timeout(&env.settings).args(["deadline", &id, "--in", "1h"]));
        assert!(code == 1 && output.contains("a trigger in the database keeps its deadline"), "{output}");
    });
}

#[test]
fn command_counts_from_database_time() {
    TestEnv::builder().without_broker().with_clock().run(async |env| {
        let order = env.order(Duration::from_secs(7_200)).await;
        env.advance(Duration::from_secs(3_600)).await;
        let id = order.id.to_string();
        let half_an_hour_ahead = write_rfc3339(Timestamp::now_by_local_clock() + Duration::from_secs(1_800));
        let deadline = |when: [&str; 2]| run(order_timeout(&env.settings).args(["deadline", &id]).args(when));
        let (code, _, error) = deadline(["--deadline", &half_an_hour_ahead]);
        assert!(code == 1 && error.contains("has passed"), "{error}");
        let (code, output, error) = deadline(["--in", "10m"]);
        assert!(code == 0 && output.contains("an alarm for it is written"), "{output}{error}");
        let ahead = deadline_of(&env, &order).await.since(Timestamp::now_by_local_clock());
        assert!(ahead > Duration::from_secs(3_600), "{ahead:?} ahead of the local clock");
    });
}

#[test]
fn command_reports_deadline_outcome() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(Duration::from_secs(60)).await;
        let deadline =
            |env: &TestEnv, arguments: &[&str]| run(order_timeout(&env.settings).args(["deadline"]).args(arguments));
        let id = order.id.to_string();
        let json = |arguments: &[&str]| -> (i32, Value) {
            let (code, output, _) = deadline(&env, &[arguments, &["--json"]].concat());
            (code, serde_json::from_str(&output).unwrap())
        };
        let (code, output) = json(&[&id, "--in", "1h"]);
        assert_eq!((code, &output["outcome"], &output["order_id"]), (0, &"later".into(), &id.as_str().into()));
        let (code, output, _) = deadline(&env, &[&id, "--in", "1h"]);
        assert!(code == 0 && output.contains("an alarm that was already scheduled adapts to it"), "{output}");
        for passed in [["--deadline", "2020-01-01T00:00:00Z"], ["--in", "0s"]] {
            let (code, _, error) = deadline(&env, &[&[id.as_str()][..], &passed].concat());
            assert!(code == 1 && error.contains("has passed") && error.contains("order-timeout close"), "{error}");
        }
        let (code, output, _) = deadline(&env, &[&id, "--in", "30s"]);
        assert!(code == 0 && output.contains("an alarm for it is written"), "{output}");
        assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 1);
        let (_, output) = json(&[&id, "--in", "2h"]);
        let last = &output["deadline"];

        assert!(env.pay(&order).await);
        let (code, output, _) = deadline(&env, &[&id, "--in", "1h"]);
        assert!(code == 1 && output.contains("is paid; its deadline is unchanged"), "{output}");
        let unchanged = json!({ "order_id": id, "status": "paid", "deadline": last, "outcome": "unchanged" });
        assert_eq!(json(&[&id, "--in", "1h"]), (1, unchanged), "the order's deadline, not the requested one");
        let unknown_order = uuid::Uuid::now_v7().to_string();
        let unknown = json!({ "order_id": unknown_order, "status": null, "deadline": null, "outcome": "unknown" });
        assert_eq!(json(&[&unknown_order, "--in", "1h"]), (1, unknown));
        let (code, _, error) = deadline(&env, &["no-such-order", "--in", "1h"]);
        assert!(code == 1 && error.contains("no-such-order") && error.contains("a UUID"), "{error}");
        let (code, _, error) = deadline(&env, &[&id, "--in", "4000d"]);
        assert!(code == 2 && error.contains("delay.max_delay"), "{error}");
        let (code, _, error) = deadline(&env, &[&id]);
        assert!(code == 2 && error.contains("--in"), "{error}");
        let own = ["--set", "orders.close_sql=own.sql", "--set", "orders.overdue_sql=own.sql"];
        let (code, _, error) = deadline(&env, &[&[id.as_str(), "--in", "1h"][..], &own].concat());
        assert!(code == 1 && error.contains("update its row yourself"), "{error}");
    });
}

/// The program's result, with the database behind this proxy.
async fn call_through(network: &Proxy, env: &TestEnv, arguments: &[&str]) -> (i32, String, String) {
    let settings = with_database_behind(env, network);
    // A panic drops the proxy, which ends the program.
    let result = tokio::time::timeout(TIMEOUT, call_with(&settings, arguments));
    result.await.expect("an answer within the test's timeout")
}

#[test]
fn lost_answer_leaves_outcome_unknown() {
    TestEnv::builder().run(async |env| {
        let order = env.order(Duration::from_secs(60)).await;
        let network = Proxy::before(&env.settings.database.url).await;
        // The id is sent when the statement has been prepared and is executed.
        let id = order.id.to_string();
        let is_cut = network.cut_at(&id, Then::CutAtAnswer);
        let (code, _, error) = call_through(&network, &env, &["deadline", &id, "--in", "1h"]).await;
        assert!(is_cut());
        assert!(code == 1 && error.contains("not known to have moved; try again"), "{error}");
        assert!(!error.contains("unchanged"), "{error}");
        // The statement reached the database, which may still be executing it.
        let has_moved = "SELECT count(*) FROM orders WHERE expires_at > clock_timestamp() + interval '50 minutes'";
        wait_for("the deadline moved", async || env.count(has_moved).await == 1).await;
    });
}

#[test]
fn silent_database_does_not_block_forever() {
    TestEnv::builder().settings(shorten_timeouts).run(async |env| {
        let id = env.order(Duration::from_secs(60)).await.id.to_string();
        let deadline = &["deadline", &id, "--in", "1h"][..];
        let close = &["close", &id][..];
        for (at, arguments) in [("to_regclass", deadline), (&id, deadline), ("Closes orders of", close)] {
            let network = Proxy::before(&env.settings.database.url).await;
            let has_vanished = network.cut_at(at, Then::Vanish);
            let (code, _, error) = call_through(&network, &env, arguments).await;
            assert!(has_vanished(), "{arguments:?} never says {at}");
            assert!(code == 1 && error.contains("did not answer within"), "{arguments:?} at {at}: {error}");
        }
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE status = 'unpaid'").await, 1);
    });
}
