//! Orders close on time without alarms: with `delay.strategy = "database"`, which uses no broker at all, while the broker is
//! unavailable, and while a flood keeps alarms from arriving.

use std::collections::HashMap;
use std::time::Duration;

use order_timeout::Settings;
use order_timeout_client::postgres::{self, Moved};
use order_timeout_core::delay::Strategy;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{RunningWorker, TIMEOUT, TestEnv, unreachable, wait_for};
use serde_json::Value;
use sqlx::postgres::PgListener;

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3_600);

/// As in a configuration that names no broker.
pub fn without_broker(settings: &Settings) -> Settings {
    let mut settings = settings.clone();
    settings.delay.strategy = Strategy::Database;
    settings.sweep.grace = Settings::defaults().sweep.grace;
    settings.amqp.url = unreachable(&settings.amqp.url);
    settings
}

async fn closed_by(env: &TestEnv) -> Vec<(String, i64)> {
    let count = "SELECT closed_by, count(*) FROM orders WHERE status = 'closed' GROUP BY 1 ORDER BY 1";
    sqlx::query_as(count).fetch_all(&env.pool).await.unwrap()
}

#[test]
fn database_strategy_closes_on_time() {
    TestEnv::builder().without_broker().run(async |env| {
        let worker = RunningWorker::start(without_broker(&env.settings)).await;
        env.orders(50, 2 * SECOND).await;
        let paid = env.order(2 * SECOND).await;
        assert!(env.pay(&paid).await);
        wait_for("the closes", async || env.closed().await == 50).await;
        env.assert_on_time().await;
        assert_eq!(closed_by(&env).await, [("look_ahead".to_owned(), 50)]);
        assert_eq!(env.status(&paid).await, "paid");
        env.assert_ledger().await;
        worker.stop().await;
    });
}

#[test]
fn moved_deadline_counts_without_broker() {
    TestEnv::builder().without_broker().with_clock().run(async |env| {
        let worker = RunningWorker::start(without_broker(&env.settings)).await;
        let [later, earlier] = [env.order(HOUR).await, env.order(24 * HOUR).await];
        let now = Timestamp::now_by_local_clock();
        for (order, deadline) in [(&later, now + 4 * HOUR), (&earlier, now + 2 * HOUR)] {
            let moved = postgres::move_deadline(&env.pool, order.id.to_string(), deadline).await.unwrap();
            assert!(matches!(moved, Moved::Later | Moved::Earlier), "{moved:?}");
        }
        env.advance(2 * HOUR).await;
        wait_for("the earlier one", async || env.status(&earlier).await == "closed").await;
        assert_eq!(env.status(&later).await, "unpaid");
        env.advance(2 * HOUR).await;
        wait_for("the later one", async || env.status(&later).await == "closed").await;
        env.assert_ledger().await;
        worker.stop().await;
    });
}

#[test]
fn events_go_to_notify_channel() {
    TestEnv::builder().without_broker().run(async |env| {
        let mut listener = PgListener::connect_with(&env.pool).await.unwrap();
        listener.listen("shop_events").await.unwrap();
        let mut settings = without_broker(&env.settings);
        settings.announce.notify = "shop_events".into();
        let worker = RunningWorker::start(settings).await;
        let order = env.order(SECOND).await;
        let heard = tokio::time::timeout(TIMEOUT, listener.recv()).await.expect("an event").unwrap();
        let event: Value = serde_json::from_str(heard.payload()).unwrap();
        assert_eq!(event["type"], "order.closed.v1");
        assert_eq!(event["payload"]["order_id"], order.id.to_string());
        assert_eq!(event["payload"]["closed_by"], "look_ahead");
        wait_for("the mark", async || env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await == 0)
            .await;
        worker.stop().await;
    });
}

#[test]
fn events_stay_without_channel() {
    TestEnv::builder().without_broker().run(async |env| {
        let worker = RunningWorker::start(without_broker(&env.settings)).await;
        env.orders(3, SECOND).await;
        wait_for("the closes", async || env.closed().await == 3).await;
        worker.stop().await;
        assert_eq!(env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await, 3);
    });
}

#[test]
fn broker_later_publishes_pending_alarms() {
    TestEnv::builder().run(async |env| {
        let worker = RunningWorker::start(without_broker(&env.settings)).await;
        let order = env.order(3_600 * SECOND).await;
        env.write_alarm(&order).await;
        worker.stop().await;
        // One setting later.
        let worker = env.worker().await;
        wait_for("the alarm in the wheel", async || env.depth_of_all("wheel.").await == 1).await;
        worker.stop().await;
    });
}

#[test]
fn workers_share_orders_without_broker() {
    TestEnv::builder().without_broker().with_clock().run(async |env| {
        let settings = without_broker(&env.settings);
        let workers = [RunningWorker::start(settings.clone()).await, RunningWorker::start(settings).await];
        let registered = "SELECT count(*) FROM order_timeout_workers";
        wait_for("both workers registered", async || env.count(registered).await == 2).await;
        env.orders(200, HOUR).await;
        env.advance(HOUR).await;
        wait_for("the closes", async || env.closed().await == 200).await;
        env.assert_ledger().await;
        for worker in workers {
            worker.stop().await;
        }
    });
}

#[test]
fn broker_outage_costs_no_punctuality() {
    TestEnv::builder().without_broker().run(async |env| {
        let worker = env.worker().await;
        env.orders(50, 2 * SECOND).await;
        wait_for("the closes", async || env.closed().await == 50).await;
        env.assert_on_time().await;
        assert_eq!(closed_by(&env).await, [("look_ahead".to_owned(), 50)]);
        worker.stop().await;
    });
}

/// Alarms for orders that do not exist are retried, and meanwhile keep the small window full.
#[test]
fn flood_costs_no_punctuality() {
    let small_window = |settings: &mut Settings| {
        settings.worker.prefetch = 1;
        settings.sweep.grace = Settings::defaults().sweep.grace;
        settings.retry.missing_for = TIMEOUT;
    };
    TestEnv::builder().settings(small_window).run(async |env| {
        let worker = env.worker().await;
        let publisher = env.publisher().await;
        let now = Timestamp::now_by_local_clock();
        publisher.schedule_all((0..200).map(|n| (format!("unknown-{n}"), now))).await.unwrap();
        let first = env.order(SECOND).await;
        publisher.schedule(first.order_id(), first.deadline).await.unwrap();
        wait_for("the first close", async || env.status(&first).await == "closed").await;
        assert_eq!(closed_by(&env).await, [("sweep".to_owned(), 1)], "its alarm is behind the flood");
        let orders = env.orders(20, 2 * SECOND).await;
        publisher.schedule_all(orders.iter().map(|order| (order.order_id(), order.deadline))).await.unwrap();
        wait_for("the closes", async || env.closed().await == 21).await;
        env.assert_on_time().await;
        // An alarm may pass the flood; what it does not wake is read ahead, and nothing more is left to the sweep.
        let by: HashMap<String, i64> = closed_by(&env).await.into_iter().collect();
        let [swept, read_ahead, woken] =
            ["sweep", "look_ahead", "alarm"].map(|path| by.get(path).copied().unwrap_or(0));
        assert!(swept == 1 && read_ahead > woken && read_ahead + woken == 20, "{by:?}");
        env.assert_ledger().await;
        worker.stop().await;
    });
}

#[test]
fn commands_say_that_there_is_no_broker() {
    TestEnv::builder().without_broker().run(async |env| {
        let settings = without_broker(&env.settings);
        let (code, stdout, _) = call_with(&settings, &["setup"]).await;
        assert_eq!(code, 0);
        assert!(stdout.contains("broker:   none, because delay.strategy is \"database\""), "{stdout}");
        for command in [&["schedule", "01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4c", "--in", "5s"][..], &["topology"]] {
            let (code, _, stderr) = call_with(&settings, command).await;
            assert_eq!(code, 2, "{command:?}");
            assert!(stderr.contains("no alarms and no broker"), "{stderr}");
        }
    });
}
