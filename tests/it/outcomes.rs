//! What the worker does with one alarm, row by row of the design's table.

use std::time::Duration;

use order_timeout_amqp::topology::Names;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::{Order, TestEnv, wait_for, wait_promised};
use sqlx::{AssertSqlSafe, PgPool, Postgres, Transaction};
use time::OffsetDateTime;
use uuid::Uuid;

const SECOND: Duration = Duration::from_secs(1);

/// The order's whole row as text.
async fn row(env: &TestEnv, order: &Order) -> String {
    sqlx::query_scalar("SELECT orders::text FROM orders WHERE id = $1")
        .bind(order.id)
        .fetch_one(&env.pool)
        .await
        .unwrap()
}

/// Moves an order's deadline.
async fn extend(env: &TestEnv, order: &Order, by: Duration) -> Order {
    let deadline: OffsetDateTime = sqlx::query_scalar(
        "UPDATE orders SET expires_at = expires_at + make_interval(secs => $2) WHERE id = $1 RETURNING expires_at",
    )
    .bind(order.id)
    .bind(by.as_secs_f64())
    .fetch_one(&env.pool)
    .await
    .unwrap();
    Order { deadline: Timestamp::from(deadline), ..*order }
}

/// A transaction that holds a lock on one row until it ends.
async fn lock(pool: &PgPool, sql: &'static str, key: &str) -> Transaction<'static, Postgres> {
    let mut transaction = pool.begin().await.unwrap();
    let locked = sqlx::query(sql).bind(key).execute(&mut *transaction).await.unwrap();
    assert_eq!(locked.rows_affected(), 1, "the row to lock is there");
    transaction
}

async fn lock_order(env: &TestEnv, order: &Order) -> Transaction<'static, Postgres> {
    lock(&env.pool, "SELECT FROM orders WHERE id = $1::uuid FOR UPDATE", &order.id.to_string()).await
}

async fn wait_until_closed(env: &TestEnv, order: &Order) {
    wait_for("the close", async || env.status(order).await == "closed").await;
}

async fn wait_until(moment: Timestamp) {
    tokio::time::sleep(moment.since(Timestamp::now_by_local_clock())).await;
}

/// Waits until the worker has received every alarm that was delivered so far. The broker distributes alarms over the
/// worker's two channels in turn, each in order, and the alarms sent here are the last ones, for orders that are due.
/// An empty queue would prove less, because messages that left it may still be in flight.
async fn wait_until_received(env: &TestEnv) {
    let sentinels = env.orders(8, Duration::ZERO).await;
    env.deliver(&sentinels).await;
    for sentinel in &sentinels {
        wait_until_closed(env, sentinel).await;
    }
}

/// Delivers the alarm of an order that is due but that the worker must not close, and asserts that nothing changes.
fn assert_untouched(prepare: &'static str) {
    TestEnv::builder().run(async move |env| {
        let order = env.order(Duration::ZERO).await;
        sqlx::raw_sql(prepare).execute(&env.pool).await.unwrap();
        let before = row(&env, &order).await;
        let sentinel = env.order(SECOND).await;
        env.deliver([&order, &sentinel]).await;
        let worker = env.worker().await;
        wait_until_closed(&env, &sentinel).await;
        worker.stop().await;
        assert_eq!(row(&env, &order).await, before);
        assert_eq!(env.count("SELECT count(*) FROM event_outbox").await, 1, "only the sentinel's event");
        assert_eq!(env.parked().await, []);
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn paid_order_stays_untouched() {
    assert_untouched(
        "UPDATE orders SET status = 'paid', paid_at = clock_timestamp();
         UPDATE stock SET reserved = 0",
    );
}

#[test]
fn closed_order_stays_untouched() {
    assert_untouched(
        "UPDATE orders SET status = 'closed', closed_at = clock_timestamp(), closed_by = 'manual', close_reason = 'unpaid';
         INSERT INTO order_events (order_id, event, by, reason) SELECT id, 'closed', 'manual', 'unpaid' FROM orders;
         UPDATE stock SET available = available + reserved, reserved = 0",
    );
}

#[test]
fn cancelled_order_stays_untouched() {
    assert_untouched(
        "UPDATE orders SET status = 'cancelled';
         INSERT INTO order_events (order_id, event) SELECT id, 'cancelled' FROM orders;
         UPDATE stock SET available = available + reserved, reserved = 0",
    );
}

#[test]
fn order_in_closing_stays_untouched() {
    assert_untouched("UPDATE orders SET status = 'closing'");
}

/// The constraints are the last protection if a close statement is wrong, ours or the shop's.
#[test]
fn constraints_reject_early_and_second_close() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(60 * SECOND).await;
        let refused_by = async |sql: &'static str| {
            let refused = sqlx::query(sql).bind(order.id).execute(&env.pool).await.expect_err(sql);
            refused.as_database_error().unwrap().constraint().map(str::to_owned)
        };
        let close = "UPDATE orders SET status = 'closed', closed_at = now(), closed_by = 'manual',
                                           close_reason = 'unpaid' WHERE id = $1";
        assert_eq!(refused_by(close).await.as_deref(), Some("no_order_is_closed_early"));
        let note = "INSERT INTO order_events (order_id, event, by, reason) VALUES ($1, 'closed', 'manual', 'unpaid')";
        sqlx::query(note).bind(order.id).execute(&env.pool).await.unwrap();
        assert_eq!(refused_by(note).await.as_deref(), Some("an_order_is_closed_once"));
    });
}

#[test]
fn early_alarm_is_held_until_deadline() {
    TestEnv::builder().with_clock().run(async |env| {
        let worker = env.worker().await;
        let order = env.order(3 * SECOND).await;
        env.deliver([&order]).await;
        wait_until_received(&env).await;
        assert_eq!(env.status(&order).await, "unpaid");
        assert_eq!(wheel_depth(&env, "1s").await, 0, "held, not armed");
        env.advance(3 * SECOND).await;
        wait_until_closed(&env, &order).await;
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn extended_order_closes_at_new_deadline() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let publisher = env.publisher().await;
        // Before its alarm is due. The second moves beyond what the worker holds, so that its alarm returns to the
        // wheel.
        let near = env.order(2 * SECOND).await;
        let far = env.order(2 * SECOND).await;
        for order in [&near, &far] {
            publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
        }
        let near = extend(&env, &near, 2 * SECOND).await;
        let far = extend(&env, &far, 6 * SECOND).await;
        wait_for("the alarm back in the wheel", async || wheel_depth(&env, "1s").await == 1).await;
        wait_until_closed(&env, &near).await;
        assert_eq!(env.status(&far).await, "unpaid");
        wait_until_closed(&env, &far).await;
        worker.stop().await;
        env.assert_drained().await;
        // The check includes `closed_at < expires_at`, where expires_at is the new deadline.
        env.assert_ledger().await;
    });
}

#[test]
fn two_alarms_close_order_once() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        // Due already: both may be in one batch, or one after the other.
        let order = env.order(Duration::ZERO).await;
        env.deliver([&order, &order]).await;
        wait_until_closed(&env, &order).await;
        let sentinel = env.order(SECOND).await;
        env.deliver([&order, &sentinel]).await;
        wait_until_closed(&env, &sentinel).await;
        worker.stop().await;
        assert_eq!(env.count("SELECT count(*) FROM order_events WHERE event = 'closed'").await, 2);
        assert_eq!(env.count("SELECT count(*) FROM event_outbox").await, 2);
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn duplicate_alarms_of_waiting_order_are_dropped() {
    TestEnv::builder().settings(|settings| settings.worker.hold_max = 60 * SECOND).run(async |env| {
        let order = env.order(30 * SECOND).await;
        let worker = env.worker().await;
        env.deliver([&order; 5]).await;
        wait_until_received(&env).await;
        // Held alarms are requeued; acknowledged duplicates are not.
        worker.stop().await;
        assert_eq!(env.take_out(&env.names().timeout()).await.len(), 1);
        assert_eq!(env.status(&order).await, "unpaid");
        env.assert_ledger().await;
    });
}

#[test]
fn duplicate_alarms_do_not_close_twice() {
    TestEnv::builder().with_clock().run(async |env| {
        let worker = env.worker().await;
        let orders = env.orders(20, 2 * SECOND).await;
        for _ in 0..3 {
            env.deliver(&orders).await;
        }
        env.advance(2 * SECOND).await;
        wait_for("all closed", async || env.closed().await == 20).await;
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn locked_order_does_not_delay_its_batch() {
    TestEnv::builder()
        .settings(
            // If a lock counted as a failed attempt, the alarm would be parked at once.
            |settings| settings.retry.max_attempts = 0,
        )
        .run(async |env| {
            let worker = env.worker().await;
            let orders = env.orders(10, SECOND).await;
            let held = lock_order(&env, &orders[4]).await;
            env.deliver(&orders).await;
            wait_for("the neighbours' close", async || env.closed().await == 9).await;
            // Longer than the longest backoff, so that repeated backoff is covered too.
            wait_until(orders[4].deadline + 3 * SECOND).await;
            assert_eq!((env.status(&orders[4]).await, env.closed().await), ("unpaid".into(), 9));
            held.rollback().await.unwrap();
            wait_until_closed(&env, &orders[4]).await;
            assert_eq!(env.parked().await, []);
            worker.stop().await;
            env.assert_drained().await;
            env.assert_ledger().await;
        });
}

#[test]
fn payment_in_flight_at_deadline_wins() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let order = env.order(SECOND).await;
        let mut payment = lock_order(&env, &order).await;
        env.deliver([&order]).await;
        wait_until(order.deadline + SECOND).await;
        for sql in [
            "UPDATE orders SET status = 'paid', paid_at = clock_timestamp()",
            "UPDATE stock SET reserved = reserved - 1",
        ] {
            sqlx::query(sql).execute(&mut *payment).await.unwrap();
        }
        payment.commit().await.unwrap();
        // Its alarm is acknowledged: stopping requeues nothing.
        let sentinel = env.order(2 * SECOND).await;
        env.deliver([&sentinel]).await;
        wait_until_closed(&env, &sentinel).await;
        worker.stop().await;
        assert_eq!(env.status(&order).await, "paid");
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn locked_stock_row_delays_only_its_article() {
    TestEnv::builder().settings(|settings| settings.retry.max_attempts = 0).run(async |env| {
        env.stock("rare", 1_000).await;
        let worker = env.worker().await;
        let mut orders = env.orders_of("rare", 15, SECOND).await;
        let common = env.orders(15, SECOND).await;
        let deadline = common[0].deadline;
        let held = lock(&env.pool, "SELECT FROM stock WHERE article_id = $1 FOR UPDATE", "rare").await;
        orders.extend(common);
        env.deliver(&orders).await;
        wait_for("the other article's orders", async || env.closed().await == 15).await;
        // Many times lock_timeout.
        wait_until(deadline + 4 * SECOND).await;
        assert_eq!(env.closed().await, 15, "no order is closed without its stock");
        // New orders of the other article are not delayed by the waiting ones.
        let later = env.order(SECOND).await;
        env.deliver([&later]).await;
        wait_until_closed(&env, &later).await;
        held.rollback().await.unwrap();
        wait_for("the article's orders", async || env.closed().await == 31).await;
        assert_eq!(env.parked().await, []);
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn order_committed_after_its_alarm_is_closed() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let mut creating = env.pool.begin().await.unwrap();
        let id = Uuid::now_v7();
        let deadline: OffsetDateTime = sqlx::query_scalar(
            "INSERT INTO orders (id, expires_at) VALUES ($1, clock_timestamp()) RETURNING expires_at",
        )
        .bind(id)
        .fetch_one(&mut *creating)
        .await
        .unwrap();
        let order = Order { id, deadline: Timestamp::from(deadline) };
        env.deliver([&order]).await;
        wait_until(order.deadline + SECOND).await;
        assert_eq!(env.parked().await, []);
        creating.commit().await.unwrap();
        wait_until_closed(&env, &order).await;
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn unknown_order_is_parked_after_missing_for() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let began = std::time::Instant::now();
        let order = Order { id: Uuid::now_v7(), deadline: Timestamp::now_by_local_clock() };
        env.deliver([&order]).await;
        wait_for("the parking", async || !env.parked().await.is_empty()).await;
        assert!(began.elapsed() >= env.settings.retry.missing_for, "parked after {:?}", began.elapsed());
        let parked = env.parked().await;
        assert_eq!(parked.len(), 1);
        assert_eq!((parked[0].0.as_str(), parked[0].2.clone()), ("unknown_order", Some(order.id.to_string())));
        assert!(parked[0].1.contains("no such order"), "{}", parked[0].1);
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

/// Makes the close of one order fail, with this kind of trigger and this statement.
async fn make_fail(env: &TestEnv, order: &Order, trigger: &str, statement: &str) {
    let sql = format!(
        "CREATE SEQUENCE tries;
         CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
             $$ BEGIN PERFORM nextval('tries'); {statement}; RETURN NEW; END $$;
         CREATE {trigger} FOR EACH ROW WHEN (OLD.id = '{}') EXECUTE FUNCTION refuse()",
        order.id
    );
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&env.pool).await.unwrap();
}

/// One order of fifty cannot be closed: the others are closed, and it is retried and parked with the database's
/// message.
fn assert_isolated(trigger: &'static str, statement: &'static str, words: &'static str) {
    TestEnv::builder().run(async move |env| {
        let worker = env.worker().await;
        let orders = env.orders(50, SECOND).await;
        make_fail(&env, &orders[20], trigger, statement).await;
        env.deliver(&orders).await;
        wait_for("the neighbours' close", async || env.closed().await == 49).await;
        wait_for("the parking", async || !env.parked().await.is_empty()).await;
        worker.stop().await;
        let parked = env.parked().await;
        assert_eq!(parked.len(), 1);
        assert_eq!((parked[0].0.as_str(), parked[0].2.clone()), ("close_failed", Some(orders[20].id.to_string())));
        assert!(parked[0].1.contains(words), "{}", parked[0].1);
        assert_eq!(env.count("SELECT attempts::bigint FROM parked_alarms").await, 1, "max_attempts");
        let tries = env.count("SELECT last_value FROM tries").await;
        assert!(tries > 2, "tried {tries} times");
        assert_eq!((env.status(&orders[20]).await, env.closed().await), ("unpaid".into(), 49));
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn order_rejected_by_trigger_is_parked() {
    assert_isolated(
        "TRIGGER refuse BEFORE UPDATE ON orders",
        "RAISE EXCEPTION 'order % is under investigation', NEW.id",
        "is under investigation",
    );
}

#[test]
fn failure_at_commit_is_no_close() {
    assert_isolated(
        "CONSTRAINT TRIGGER refuse AFTER UPDATE ON orders DEFERRABLE INITIALLY DEFERRED",
        "RAISE EXCEPTION 'the ledger of % does not balance', NEW.id",
        "does not balance",
    );
}

/// SQLSTATE class 42, which for the close statement itself means that no order can be closed.
#[test]
fn broken_trigger_does_not_stop_other_orders() {
    assert_isolated("TRIGGER refuse BEFORE UPDATE ON orders", "PERFORM no_such_function()", "no_such_function");
}

#[test]
fn order_is_never_paid_and_closed() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        for round in 1..=3_usize {
            let orders = env.orders(200, SECOND).await;
            env.deliver(&orders).await;
            let payments: Vec<_> = orders
                .into_iter()
                .map(|order| {
                    let env = env.clone();
                    tokio::spawn(async move {
                        let jitter = Duration::from_micros(fastrand::u64(0..20_000));
                        wait_until(order.deadline - Duration::from_millis(5) + jitter).await;
                        env.pay(&order).await
                    })
                })
                .collect();
            for payment in payments {
                payment.await.unwrap();
            }
            let settled = i64::try_from(round * 200).unwrap();
            wait_for("every order paid or closed", async || {
                env.count("SELECT count(*) FROM orders WHERE status IN ('paid', 'closed')").await == settled
            })
            .await;
            env.assert_ledger().await;
        }
        let paid = env.count("SELECT count(*) FROM orders WHERE status = 'paid'").await;
        assert!((1..600).contains(&paid), "{paid} paid: there was no race");
        // Longer than the longest backoff of an alarm that met a payment's lock.
        let sentinel = env.order(2 * SECOND).await;
        env.deliver([&sentinel]).await;
        wait_until_closed(&env, &sentinel).await;
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

/// Messages waiting in a ring of the wheel.
async fn wheel_depth(env: &TestEnv, ring: &str) -> u32 {
    env.depth_of_all(&format!("wheel.{ring}-")).await
}

#[test]
fn near_alarm_waits_in_fine_ring() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let publisher = env.publisher().await;
        let order = env.order(8 * SECOND).await;
        publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
        let second = order.deadline.unix_micros().div_euclid(1_000_000);
        let slot = Names::slot_key("1s-12", u16::try_from(second.rem_euclid(12)).unwrap());
        let queue = format!("{}.{slot}", env.names().wheel());
        wait_for("the alarm in its slot", async || env.depth_if_any(&queue).await == Some(1)).await;
        assert_eq!((wheel_depth(&env, "1s").await, wheel_depth(&env, "5s").await), (1, 0));
        wait_until_closed(&env, &order).await;
        env.assert_closed_by_alarms().await;
        env.assert_on_time().await;
        assert_eq!(wheel_depth(&env, "1s").await, 0);
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn far_alarm_passes_coarse_ring_first() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let publisher = env.publisher().await;
        // Late in its coarse unit of five seconds, so that the alarm stays in the fine ring long enough to be seen.
        let earliest = Timestamp::now_by_local_clock() + 20 * SECOND;
        let into_unit = Duration::from_micros(earliest.unix_micros().rem_euclid(5_000_000).unsigned_abs());
        let order = env.order(20 * SECOND + (5 * SECOND - into_unit) + 4 * SECOND).await;
        publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
        wait_for("the coarse ring", async || wheel_depth(&env, "5s").await == 1).await;
        assert_eq!(wheel_depth(&env, "1s").await, 0);
        wait_for("the fine ring", async || wheel_depth(&env, "1s").await == 1).await;
        assert_eq!(wheel_depth(&env, "5s").await, 0);
        wait_promised(20 * SECOND, "the close", async || env.status(&order).await == "closed").await;
        env.assert_closed_by_alarms().await;
        env.assert_on_time().await;
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn order_without_deadline_is_never_closed() {
    TestEnv::builder().settings(|settings| settings.sweep.grace = Duration::from_millis(100)).run(async |env| {
        let order = env.order(Duration::from_secs(1)).await;
        sqlx::query("UPDATE orders SET expires_at = NULL WHERE id = $1")
            .bind(order.id)
            .execute(&env.pool)
            .await
            .unwrap();
        let other = env.order(Duration::from_millis(1_500)).await;
        let worker = env.worker().await;
        env.deliver([&order, &other]).await;
        wait_for("the close of the other", async || env.status(&other).await == "closed").await;
        worker.stop().await;
        env.assert_drained().await;
        assert_eq!(env.status(&order).await, "unpaid");
        assert_eq!(env.parked().await, []);
    });
}
