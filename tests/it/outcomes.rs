//! What the worker does with one alarm, row by row of the design's table.

use std::time::Duration;

use order_timeout::order::Timestamp;
use order_timeout::topology::{Names, Topology};
use sqlx::{AssertSqlSafe, PgPool, Postgres, Transaction};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::support::disk_stall_probe::DiskStallProbe;
use crate::support::{Order, TestEnv, wait_for, wait_within, with_env};

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
    Order { deadline: order_timeout::database::moment(deadline), ..*order }
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

/// Waits until the worker has heard every alarm that was delivered so far. It hears of them in their order on each of its
/// two channels, among which the broker shares them out in turn, and these behind them are for orders that are due. An
/// empty queue would say too little, for what has left it may be on its way.
async fn wait_until_heard(env: &TestEnv) {
    let witnesses = env.orders(8, Duration::ZERO).await;
    env.deliver(&witnesses).await;
    for witness in &witnesses {
        wait_until_closed(env, witness).await;
    }
}

/// Delivers the alarm of an order that is due but not the worker's to close, and insists that it changes nothing.
fn assert_untouched(prepare: &'static str) {
    with_env(
        |_| {},
        async move |env| {
            let order = env.order(Duration::ZERO).await;
            sqlx::raw_sql(prepare).execute(&env.pool).await.unwrap();
            let before = row(&env, &order).await;
            let witness = env.order(SECOND).await;
            env.deliver([&order, &witness]).await;
            let worker = env.worker().await;
            wait_until_closed(&env, &witness).await;
            worker.stop().await;
            assert_eq!(row(&env, &order).await, before);
            assert_eq!(env.count("SELECT count(*) FROM event_outbox").await, 1, "the witness' event alone");
            assert_eq!(env.parked().await, []);
            env.assert_drained().await;
            env.assert_ledger().await;
        },
    );
}

#[test]
fn the_alarm_of_a_paid_order_is_acknowledged_and_nothing_else() {
    assert_untouched(
        "UPDATE orders SET status = 'paid', paid_at = clock_timestamp();
         UPDATE stock SET reserved = 0",
    );
}

#[test]
fn the_alarm_of_an_order_that_was_closed_before_is_acknowledged_and_nothing_else() {
    assert_untouched(
        "UPDATE orders SET status = 'closed', closed_at = clock_timestamp(), closed_by = 'manual', close_reason = 'unpaid';
         INSERT INTO order_events (order_id, event, by, reason) SELECT id, 'closed', 'manual', 'unpaid' FROM orders;
         UPDATE stock SET available = available + reserved, reserved = 0",
    );
}

#[test]
fn the_alarm_of_a_cancelled_order_is_acknowledged_and_nothing_else() {
    assert_untouched(
        "UPDATE orders SET status = 'cancelled';
         INSERT INTO order_events (order_id, event) SELECT id, 'cancelled' FROM orders;
         UPDATE stock SET available = available + reserved, reserved = 0",
    );
}

#[test]
fn the_alarm_of_an_order_whose_provider_is_being_asked_is_acknowledged_and_nothing_else() {
    assert_untouched("UPDATE orders SET status = 'closing', next_attempt_at = clock_timestamp()");
}

/// The constraints are what is left should a statement be wrong, ours or a shop's own.
#[test]
fn the_tables_refuse_a_second_close_and_an_early_one() {
    with_env(
        |_| {},
        async |env| {
            let order = env.order(60 * SECOND).await;
            let refused_by = async |sql: &'static str| {
                let refused = sqlx::query(sql).bind(order.id).execute(&env.pool).await.expect_err(sql);
                refused.as_database_error().unwrap().constraint().map(str::to_owned)
            };
            let close = "UPDATE orders SET status = 'closed', closed_at = now(), closed_by = 'manual',
                                           close_reason = 'unpaid' WHERE id = $1";
            assert_eq!(refused_by(close).await.as_deref(), Some("no_order_is_closed_early"));
            let note =
                "INSERT INTO order_events (order_id, event, by, reason) VALUES ($1, 'closed', 'manual', 'unpaid')";
            sqlx::query(note).bind(order.id).execute(&env.pool).await.unwrap();
            assert_eq!(refused_by(note).await.as_deref(), Some("an_order_is_closed_once"));
        },
    );
}

#[test]
fn an_alarm_that_comes_early_is_held_until_the_deadline() {
    with_env(
        |_| {},
        async |env| {
            let worker = env.worker().await;
            let order = env.order(3 * SECOND).await;
            env.deliver([&order]).await;
            wait_until_heard(&env).await;
            assert_eq!(env.status(&order).await, "unpaid");
            assert_eq!(wheel_depth(&env, "1s").await, 0, "held, not armed");
            wait_until_closed(&env, &order).await;
            worker.stop().await;
            env.assert_drained().await;
            env.assert_ledger().await;
        },
    );
}

#[test]
fn an_extended_order_is_closed_at_its_new_deadline_only() {
    with_env(
        |_| {},
        async |env| {
            let worker = env.worker().await;
            let publisher = env.publisher().await;
            // Before its alarm falls due; the second beyond what the worker holds, so that it goes back to the wheel.
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
            // `closed_at < expires_at` is looked for there, and expires_at is the new deadline.
            env.assert_ledger().await;
        },
    );
}

#[test]
fn two_alarms_for_one_order_close_it_once_and_are_both_acknowledged() {
    with_env(
        |_| {},
        async |env| {
            let worker = env.worker().await;
            // Due already: both may be in a closer's hands at once, or one after the other.
            let order = env.order(Duration::ZERO).await;
            env.deliver([&order, &order]).await;
            wait_until_closed(&env, &order).await;
            let witness = env.order(SECOND).await;
            env.deliver([&order, &witness]).await;
            wait_until_closed(&env, &witness).await;
            worker.stop().await;
            assert_eq!(env.count("SELECT count(*) FROM order_events WHERE event = 'closed'").await, 2);
            assert_eq!(env.count("SELECT count(*) FROM event_outbox").await, 2);
            env.assert_drained().await;
            env.assert_ledger().await;
        },
    );
}

#[test]
fn of_five_alarms_that_come_while_the_order_waits_one_is_held() {
    with_env(
        |settings| settings.worker.hold_max = 60 * SECOND,
        async |env| {
            let order = env.order(30 * SECOND).await;
            let worker = env.worker().await;
            env.deliver([&order; 5]).await;
            wait_until_heard(&env).await;
            // What is held is given back; what was acknowledged as a double is not.
            worker.stop().await;
            assert_eq!(env.take_out(&env.names().timeout()).await.len(), 1);
            assert_eq!(env.status(&order).await, "unpaid");
            env.assert_ledger().await;
        },
    );
}

#[test]
fn doubles_that_come_while_the_order_waits_do_not_close_it_twice() {
    with_env(
        |_| {},
        async |env| {
            let worker = env.worker().await;
            let orders = env.orders(20, 2 * SECOND).await;
            for _ in 0..3 {
                env.deliver(&orders).await;
            }
            wait_for("all closed", async || env.closed().await == 20).await;
            worker.stop().await;
            env.assert_drained().await;
            env.assert_ledger().await;
        },
    );
}

#[test]
fn a_locked_order_waits_for_its_lock_and_its_neighbours_do_not() {
    with_env(
        // A failure that counted as an attempt would be parked at once.
        |settings| settings.retry.max_attempts = 0,
        async |env| {
            let worker = env.worker().await;
            let orders = env.orders(10, SECOND).await;
            let held = lock_order(&env, &orders[4]).await;
            env.deliver(&orders).await;
            wait_for("the neighbours' close", async || env.closed().await == 9).await;
            // Past the longest pause, so that pausing again and again is seen too.
            wait_until(orders[4].deadline + 3 * SECOND).await;
            assert_eq!((env.status(&orders[4]).await, env.closed().await), ("unpaid".into(), 9));
            held.rollback().await.unwrap();
            wait_until_closed(&env, &orders[4]).await;
            assert_eq!(env.parked().await, []);
            worker.stop().await;
            env.assert_drained().await;
            env.assert_ledger().await;
        },
    );
}

#[test]
fn a_payment_in_flight_at_the_deadline_wins() {
    with_env(
        |_| {},
        async |env| {
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
            // Its alarm is acknowledged: stopping gives nothing back.
            let witness = env.order(2 * SECOND).await;
            env.deliver([&witness]).await;
            wait_until_closed(&env, &witness).await;
            worker.stop().await;
            assert_eq!(env.status(&order).await, "paid");
            env.assert_drained().await;
            env.assert_ledger().await;
        },
    );
}

#[test]
fn a_locked_stock_row_delays_the_orders_of_its_article_alone() {
    with_env(
        |settings| settings.retry.max_attempts = 0,
        async |env| {
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
            // New orders of the other article are not held up by those that wait.
            let later = env.order(SECOND).await;
            env.deliver([&later]).await;
            wait_until_closed(&env, &later).await;
            held.rollback().await.unwrap();
            wait_for("the article's orders", async || env.closed().await == 31).await;
            assert_eq!(env.parked().await, []);
            worker.stop().await;
            env.assert_drained().await;
            env.assert_ledger().await;
        },
    );
}

#[test]
fn an_order_that_commits_after_its_alarm_fell_due_is_closed() {
    with_env(
        |_| {},
        async |env| {
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
            let order = Order { id, deadline: order_timeout::database::moment(deadline) };
            env.deliver([&order]).await;
            wait_until(order.deadline + SECOND).await;
            assert_eq!(env.parked().await, []);
            creating.commit().await.unwrap();
            wait_until_closed(&env, &order).await;
            worker.stop().await;
            env.assert_drained().await;
            env.assert_ledger().await;
        },
    );
}

#[test]
fn the_alarm_of_an_order_that_never_appears_is_parked_after_missing_for() {
    with_env(
        |_| {},
        async |env| {
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
        },
    );
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

/// One order of fifty cannot be closed: the others are, and it is tried again and parked with the database's words.
fn assert_isolated(trigger: &'static str, statement: &'static str, words: &'static str) {
    with_env(
        |_| {},
        async move |env| {
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
        },
    );
}

#[test]
fn an_order_that_a_trigger_refuses_is_isolated_retried_and_parked() {
    assert_isolated(
        "TRIGGER refuse BEFORE UPDATE ON orders",
        "RAISE EXCEPTION 'order % is under investigation', NEW.id",
        "is under investigation",
    );
}

#[test]
fn an_order_that_fails_at_commit_is_not_taken_for_closed() {
    assert_isolated(
        "CONSTRAINT TRIGGER refuse AFTER UPDATE ON orders DEFERRABLE INITIALLY DEFERRED",
        "RAISE EXCEPTION 'the ledger of % does not balance', NEW.id",
        "does not balance",
    );
}

/// SQLSTATE class 42, which for the close statement as a whole means that nothing can be closed.
#[test]
fn an_order_whose_trigger_is_broken_does_not_stop_the_others() {
    assert_isolated("TRIGGER refuse BEFORE UPDATE ON orders", "PERFORM no_such_function()", "no_such_function");
}

#[test]
fn an_order_paid_at_its_deadline_is_either_paid_or_closed() {
    with_env(
        |_| {},
        async |env| {
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
            // Longer than the longest pause of an alarm that met a payment's lock.
            let witness = env.order(2 * SECOND).await;
            env.deliver([&witness]).await;
            wait_until_closed(&env, &witness).await;
            worker.stop().await;
            env.assert_drained().await;
            env.assert_ledger().await;
        },
    );
}

/// Messages waiting in a ring of the wheel.
async fn wheel_depth(env: &TestEnv, ring: &str) -> u32 {
    let prefix = format!("{}.{ring}.", env.names().wheel());
    let mut depth = 0;
    for queue in Topology::new(&env.settings).queues.iter().filter(|queue| queue.name.starts_with(&prefix)) {
        depth += env.depth(&queue.name).await;
    }
    depth
}

#[test]
fn an_order_some_seconds_ahead_waits_in_the_slot_of_its_second() {
    with_env(
        |_| {},
        async |env| {
            let witness = DiskStallProbe::open(&env).await;
            let worker = env.worker().await;
            let publisher = env.publisher().await;
            let order = env.order(8 * SECOND).await;
            publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
            let second = order.deadline.unix_micros().div_euclid(1_000_000);
            let slot = Names::slot_key("1s", u16::try_from(second.rem_euclid(12)).unwrap());
            let queue = format!("{}.{slot}", env.names().wheel());
            wait_for("the alarm in its slot", async || env.depth(&queue).await == 1).await;
            assert_eq!((wheel_depth(&env, "1s").await, wheel_depth(&env, "5s").await), (1, 0));
            wait_until_closed(&env, &order).await;
            witness.assert_on_time(&env).await;
            assert_eq!(wheel_depth(&env, "1s").await, 0);
            worker.stop().await;
            env.assert_drained().await;
            env.assert_ledger().await;
        },
    );
}

#[test]
fn an_order_beyond_the_fine_ring_passes_the_coarse_one_first() {
    with_env(
        |_| {},
        async |env| {
            let witness = DiskStallProbe::open(&env).await;
            let worker = env.worker().await;
            let publisher = env.publisher().await;
            // Late in its coarse unit of five seconds, so that it stays in the fine ring for long enough to be seen.
            let earliest = Timestamp::now_by_local_clock() + 20 * SECOND;
            let into_unit = Duration::from_micros(earliest.unix_micros().rem_euclid(5_000_000).unsigned_abs());
            let order = env.order(20 * SECOND + (5 * SECOND - into_unit) + 4 * SECOND).await;
            publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
            wait_for("the coarse ring", async || wheel_depth(&env, "5s").await == 1).await;
            assert_eq!(wheel_depth(&env, "1s").await, 0);
            wait_for("the fine ring", async || wheel_depth(&env, "1s").await == 1).await;
            assert_eq!(wheel_depth(&env, "5s").await, 0);
            wait_within(20 * SECOND, "the close", async || env.status(&order).await == "closed").await;
            witness.assert_on_time(&env).await;
            worker.stop().await;
            env.assert_drained().await;
            env.assert_ledger().await;
        },
    );
}
