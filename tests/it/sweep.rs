//! An unpaid order is closed whatever happens to its alarm: the sweep over the deadline index finds it.

use std::time::Duration;

use order_timeout::Settings;
use order_timeout_testkit::{TIMEOUT, TestEnv, wait_for};
use tokio_util::sync::CancellationToken;

/// As in the defaults; other tests use a grace so long that the sweep does not interfere.
fn usual_grace(settings: &mut Settings) {
    settings.sweep.grace = Settings::defaults().sweep.grace;
}

#[test]
fn order_without_alarm_is_swept() {
    TestEnv::builder().settings(usual_grace).run(async |env| {
        let worker = env.worker().await;
        env.orders(20, Duration::from_millis(300)).await;
        let paid = env.order(Duration::from_millis(300)).await;
        assert!(env.pay(&paid).await);
        wait_for("the closes", async || env.closed().await == 20).await;
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'sweep'").await, 20);
        assert_eq!(env.count("SELECT count(*) FROM order_events WHERE by = 'sweep'").await, 20);
        assert_eq!(env.status(&paid).await, "paid");
        env.assert_on_time().await;
        env.assert_ledger().await;
        worker.stop().await;
    });
}

#[test]
fn sweep_skips_grace_during_broker_outage() {
    // Longer than this test: it must not apply.
    TestEnv::builder().without_broker().settings(|settings| settings.sweep.grace = 2 * TIMEOUT).run(async |env| {
        let worker = env.worker().await;
        env.orders(20, Duration::from_millis(300)).await;
        wait_for("the closes", async || env.closed().await == 20).await;
        env.assert_on_time().await;
        env.assert_ledger().await;
        worker.stop().await;
    });
}

#[test]
fn overdue_order_extended_is_not_closed() {
    TestEnv::builder().settings(usual_grace).with_clock().run(async |env| {
        let order = env.order(Duration::ZERO).await;
        let mut extending = env.pool.begin().await.unwrap();
        sqlx::query("UPDATE orders SET expires_at = clock_timestamp() + interval '1 hour' WHERE id = $1")
            .bind(order.id)
            .execute(&mut *extending)
            .await
            .unwrap();
        let worker = env.worker().await;
        // Another overdue order is closed, so the sweep has met this older one at its old deadline.
        env.order(Duration::ZERO).await;
        wait_for("a pass of the sweep", async || env.closed().await == 1).await;
        extending.commit().await.unwrap();
        env.order(Duration::ZERO).await;
        wait_for("a further pass", async || env.closed().await == 2).await;
        assert_eq!(env.status(&order).await, "unpaid", "it has been given more time");
        env.advance(Duration::from_secs(3_600)).await;
        wait_for("the close", async || env.closed().await == 3).await;
        env.assert_ledger().await;
        worker.stop().await;
    });
}

#[test]
fn failing_orders_do_not_block_sweep() {
    TestEnv::builder().settings(usual_grace).run(async |env| {
        env.stock("unclosable", 1_000_000).await;
        env.refuse_to_close("unclosable").await;
        env.orders_of("unclosable", 2_000, Duration::ZERO).await;
        env.orders(100, Duration::from_millis(700)).await;
        let worker = env.worker().await;
        wait_for("the good ones", async || env.closed().await == 100).await;
        let open = env.count("SELECT count(*) FROM orders WHERE status = 'unpaid'").await;
        assert_eq!(open, 2_000, "nothing is forced");
        env.assert_ledger().await;
        assert_eq!(env.parked().await, vec![], "no alarm, nothing to park");
        worker.stop().await;
    });
}

/// Like the error of a trigger that cannot reach another server: of the same class as errors when the database itself
/// goes away.
#[test]
fn trigger_connection_error_is_no_database_outage() {
    assert_error_delays_no_order("sqlclient_unable_to_establish_sqlconnection");
}

/// Like another server's error passed on by a trigger, or an unreadable page that only this order needs.
#[test]
fn disk_error_of_one_order_delays_none() {
    for error in ["disk_full", "io_error"] {
        assert_error_delays_no_order(error);
    }
}

fn assert_error_delays_no_order(error: &'static str) {
    TestEnv::builder().settings(usual_grace).run(async move |env| {
        env.stock("unclosable", 1_000).await;
        env.refuse_to_close_by("unclosable", error).await;
        let unclosable = env.orders_of("unclosable", 10, Duration::ZERO).await;
        let worker = env.worker().await;
        // With alarms and without.
        env.deliver(&unclosable[..5]).await;
        for orders in 1..=5 {
            env.orders(10, Duration::from_millis(50)).await;
            wait_for("the good ones", async || env.closed().await == 10 * orders).await;
        }
        env.assert_on_time().await;
        worker.stop().await;
        env.assert_ledger().await;
    });
}

#[test]
fn backed_off_order_closes_after_fix() {
    TestEnv::builder().settings(usual_grace).run(async |env| {
        env.stock("unclosable", 1_000).await;
        env.refuse_to_close("unclosable").await;
        env.orders_of("unclosable", 10, Duration::ZERO).await;
        let worker = env.worker().await;
        env.order(Duration::ZERO).await;
        wait_for("a pass of the sweep", async || env.closed().await == 1).await;
        sqlx::raw_sql("DROP TRIGGER refuse ON orders").execute(&env.pool).await.unwrap();
        wait_for("the others", async || env.closed().await == 11).await;
        env.assert_ledger().await;
        worker.stop().await;
    });
}

#[test]
fn several_workers_sweep_without_closing_anything_twice() {
    TestEnv::builder().settings(usual_grace).run(async |env| {
        env.orders(5_000, Duration::ZERO).await;
        let workers = [env.worker().await, env.worker().await, env.worker_without_broker().await];
        wait_for("every close", async || env.closed().await == 5_000).await;
        env.assert_ledger().await;
        for worker in workers {
            worker.stop().await;
        }
    });
}

#[test]
fn sweep_leaves_locked_order_to_payment() {
    TestEnv::builder().settings(usual_grace).run(async |env| {
        let order = env.order(Duration::ZERO).await;
        let mut payment = env.pool.begin().await.unwrap();
        sqlx::query("SELECT FROM orders WHERE id = $1 FOR UPDATE").bind(order.id).execute(&mut *payment).await.unwrap();
        let worker = env.worker().await;
        // Another overdue order is closed, so the sweep has met the locked one, which is older.
        env.order(Duration::ZERO).await;
        wait_for("a pass of the sweep", async || env.closed().await == 1).await;
        sqlx::query("UPDATE orders SET status = 'paid', paid_at = clock_timestamp() WHERE id = $1")
            .bind(order.id)
            .execute(&mut *payment)
            .await
            .unwrap();
        sqlx::query("UPDATE stock SET reserved = reserved - 1").execute(&mut *payment).await.unwrap();
        payment.commit().await.unwrap();
        env.order(Duration::ZERO).await;
        wait_for("a further pass", async || env.closed().await == 2).await;
        assert_eq!(env.status(&order).await, "paid");
        env.assert_ledger().await;
        worker.stop().await;
    });
}

/// Keeps the article's stock row locked until `stop`, in short consecutive transactions: a session that waits for the
/// lock gets it soon, one that does not wait never gets it.
async fn keep_locked_in_turns(env: &TestEnv, stop: &CancellationToken) {
    let take_turns = async || {
        while !stop.is_cancelled() {
            let mut buying = env.pool.begin().await.unwrap();
            let lock = "SELECT FROM stock WHERE article_id = 'popular' FOR UPDATE";
            sqlx::query(lock).execute(&mut *buying).await.unwrap();
            sqlx::query("SELECT pg_sleep(0.02)").execute(&mut *buying).await.unwrap();
            buying.commit().await.unwrap();
        }
    };
    tokio::join!(take_turns(), take_turns(), take_turns());
}

#[test]
fn orders_of_hot_article_still_close() {
    TestEnv::builder().settings(usual_grace).run(async |env| {
        env.stock("popular", 1_000).await;
        let worker = env.worker().await;
        env.orders_of("popular", 50, Duration::from_millis(300)).await;
        let stop = CancellationToken::new();
        let closes = async {
            wait_for("the closes", async || env.closed().await == 50).await;
            stop.cancel();
        };
        tokio::join!(keep_locked_in_turns(&env, &stop), closes);
        env.assert_on_time().await;
        env.assert_ledger().await;
        worker.stop().await;
    });
}

#[test]
fn hot_article_closes_despite_locked_one() {
    TestEnv::builder().settings(usual_grace).run(async |env| {
        env.stock("popular", 1_000).await;
        let worker = env.worker().await;
        let in_a_moment = Duration::from_millis(500);
        let held = env.orders(4, in_a_moment).await;
        let popular = env.orders_of("popular", 40, in_a_moment).await;
        let mut payment = env.pool.begin().await.unwrap();
        sqlx::query("SELECT FROM stock WHERE article_id = 'article' FOR UPDATE").execute(&mut *payment).await.unwrap();
        // Half of the orders of each article have an alarm; the sweep finds the others.
        env.deliver(&held[..2]).await;
        env.deliver(&popular[..20]).await;
        let stop = CancellationToken::new();
        let closes = async {
            wait_for("the closes", async || env.closed().await == 40).await;
            stop.cancel();
        };
        tokio::join!(keep_locked_in_turns(&env, &stop), closes);
        payment.rollback().await.unwrap();
        wait_for("the others", async || env.closed().await == 44).await;
        env.assert_ledger().await;
        worker.stop().await;
    });
}
