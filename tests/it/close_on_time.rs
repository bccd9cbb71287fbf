//! An unpaid order is closed at its deadline, not before it; a paid order is never closed.

use std::time::Duration;

use order_timeout_core::order::{OrderId, Timestamp};
use order_timeout_testkit::machine_stall_probe::MachineStallProbe;
use order_timeout_testkit::{Order, TIMEOUT, TestEnv, add_coarse_ring, wait_for};
use uuid::Uuid;

const SECOND: Duration = Duration::from_secs(1);

fn alarms(orders: &[Order]) -> impl Iterator<Item = (OrderId, Timestamp)> {
    orders.iter().map(|order| (order.order_id(), order.deadline))
}

async fn wait_until_closed(env: &TestEnv, orders: i64) {
    wait_for("every close", async || env.closed().await == orders).await;
    assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, orders);
}

#[test]
fn alarm_in_lane_closes_unpaid_order() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let publisher = env.publisher().await;
        let order = env.order(Duration::from_secs(2)).await;
        publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
        wait_for("the close", async || env.status(&order).await == "closed").await;
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 1);
        assert_eq!(env.count("SELECT available FROM stock").await, 1_000_000, "the stock is back");
        env.assert_ledger().await;
        worker.stop().await;
    });
}

#[test]
fn close_records_path_reason_history_and_event() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let order = env.order(SECOND).await;
        env.publisher().await.schedule(order.id.to_string(), order.deadline).await.unwrap();
        wait_until_closed(&env, 1).await;
        worker.stop().await;
        let complete = env
            .count(
                "SELECT count(*) FROM orders o
                     JOIN order_events h ON h.order_id = o.id AND h.at = o.closed_at
                     JOIN event_outbox e ON (e.payload ->> 'order_id')::uuid = o.id
                     WHERE o.close_reason = 'unpaid' AND o.closed_by = 'alarm'
                       AND h.event = 'closed' AND h.by = 'alarm' AND h.reason = 'unpaid'
                       AND e.routing_key = 'order.closed' AND e.type = 'order.closed.v1'
                       AND (e.payload ->> 'closed_at')::timestamptz = o.closed_at
                       AND (e.payload ->> 'deadline')::timestamptz = o.expires_at",
            )
            .await;
        assert_eq!(complete, 1);
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn close_returns_every_article_to_stock() {
    TestEnv::builder().run(async |env| {
            for article in ["apple", "pear"] {
                env.stock(article, 100).await;
            }
            let worker = env.worker().await;
            let orders = env.orders(3, SECOND).await;
            // The first two also hold 2 apples each, the third 5 pears; one of the first two is paid.
            sqlx::raw_sql(
                "WITH numbered AS (SELECT id, row_number() OVER (ORDER BY id) AS n FROM orders)
                 INSERT INTO order_items SELECT id, CASE WHEN n < 3 THEN 'apple' ELSE 'pear' END, CASE WHEN n < 3 THEN 2 ELSE 5 END
                 FROM numbered;
                 UPDATE stock SET available = 96, reserved = 4 WHERE article_id = 'apple';
                 UPDATE stock SET available = 95, reserved = 5 WHERE article_id = 'pear'",
            )
            .execute(&env.pool)
            .await
            .unwrap();
            assert!(env.pay(orders.iter().min_by_key(|order| order.id).unwrap()).await);
            env.publisher().await.schedule_all(alarms(&orders)).await.unwrap();
            wait_until_closed(&env, 2).await;
            worker.stop().await;
            assert_eq!(env.count("SELECT available FROM stock WHERE article_id = 'apple'").await, 98);
            assert_eq!(env.count("SELECT available FROM stock WHERE article_id = 'pear'").await, 100);
            assert_eq!(env.count("SELECT sum(reserved)::bigint FROM stock").await, 0);
            env.assert_drained().await;
            env.assert_ledger().await;
        });
}

#[test]
fn paid_order_is_never_closed() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        // Time enough for a busy machine to pay twelve of them.
        let orders = env.orders(30, 6 * SECOND).await;
        env.publisher().await.schedule_all(alarms(&orders)).await.unwrap();
        for order in &orders[..12] {
            assert!(env.pay(order).await);
        }
        wait_until_closed(&env, 18).await;
        worker.stop().await;
        for order in &orders[..12] {
            assert_eq!(env.status(order).await, "paid");
        }
        env.assert_on_time().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn far_deadline_delays_no_other_order() {
    TestEnv::builder().run(async |env| {
        let stall_probe = MachineStallProbe::open(&env).await;
        let worker = env.worker().await;
        let publisher = env.publisher().await;
        let far = env.order(600 * SECOND).await;
        publisher.schedule(far.id.to_string(), far.deadline).await.unwrap();
        // The lane, and both rings of the wheel.
        let mut orders = Vec::new();
        for _ in 0..200 {
            orders.push(env.order(Duration::from_millis(fastrand::u64(1_000..16_000))).await);
            let order = &orders[orders.len() - 1];
            publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
        }
        wait_until_closed(&env, 200).await;
        stall_probe.assert_on_time(&env).await;
        assert_eq!(env.status(&far).await, "unpaid");
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn unknown_and_far_alarms_delay_no_order() {
    TestEnv::builder()
        .settings(|settings| {
            // Longer than the test, so that the unknown ones are retried throughout.
            settings.retry.missing_for = 5 * TIMEOUT;
            // So that the far ones stay in the wheel throughout.
            add_coarse_ring(settings);
        })
        .run(async |env| {
            let worker = env.worker().await;
            let publisher = env.publisher().await;
            let now = Timestamp::now_by_local_clock();
            let unknown = || OrderId::new(Uuid::now_v7().to_string()).unwrap();
            // How long the worker takes for the first 4 000 alarms is a matter of the machine, and not of this test.
            publisher.schedule_all((0..2_000).map(|_| (unknown(), now + 3_600 * SECOND))).await.unwrap();
            let inbox = env.names().schedule();
            wait_for("the far alarms in the wheel", async || {
                env.depth(&inbox).await == 0 && env.depth_of_all("wheel.").await >= 2_000
            })
            .await;
            publisher.schedule_all((0..2_000).map(|_| (unknown(), now))).await.unwrap();
            let due = env.names().timeout();
            wait_for("the unknown ones received", async || env.depth(&due).await == 0).await;
            // These arrive before the orders' alarms.
            publisher.schedule_all((0..300).map(|_| (unknown(), now + 3_600 * SECOND))).await.unwrap();
            publisher.schedule_all((0..300).map(|_| (unknown(), now))).await.unwrap();
            let orders = env.orders(100, 3 * SECOND).await;
            publisher.schedule_all(alarms(&orders)).await.unwrap();
            let later = env.orders(100, 6 * SECOND).await;
            publisher.schedule_all(alarms(&later)).await.unwrap();
            wait_until_closed(&env, 200).await;
            env.assert_on_time().await;
            assert_eq!(env.parked().await, []);
            worker.stop().await;
            env.assert_ledger().await;
        });
}
