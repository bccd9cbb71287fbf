//! An alarm written in the order's own transaction: committed with it or not at all, broker or no broker.

use std::time::Duration;

use order_timeout::{NotWritten, schedule_in};

use crate::support::{on_stage, wait_for};

const UNSENT: &str = "SELECT count(*) FROM alarm_outbox WHERE sent_at IS NULL";

#[test]
fn an_alarm_scheduled_in_the_transaction_closes_its_order() {
    on_stage(
        |_| {},
        async |stage| {
            let worker = stage.worker().await;
            // One for the lane, one for the wheel; the sweep is out of the way.
            for delay_ms in [2_000, 1_300] {
                let order = stage.order(Duration::from_millis(delay_ms)).await;
                let mut transaction = stage.pool.begin().await.unwrap();
                schedule_in(&mut *transaction, order.id.to_string(), order.deadline).await.unwrap();
                transaction.commit().await.unwrap();
            }
            wait_for("the closes", async || stage.closed().await == 2).await;
            assert_eq!(stage.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 2);
            assert_eq!(stage.count(UNSENT).await, 0);
            stage.assert_ledger().await;
            worker.stop().await;
        },
    );
}

#[test]
fn the_documented_insert_does_the_same() {
    on_stage(
        |_| {},
        async |stage| {
            let worker = stage.worker().await;
            let order = stage.order(Duration::from_secs(2)).await;
            sqlx::query(
                "INSERT INTO alarm_outbox (order_id, deadline) SELECT id::text, expires_at FROM orders WHERE id = $1",
            )
            .bind(order.id)
            .execute(&stage.pool)
            .await
            .unwrap();
            wait_for("the close", async || stage.closed().await == 1).await;
            assert_eq!(stage.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 1);
            worker.stop().await;
        },
    );
}

#[test]
fn an_alarm_goes_with_its_transaction() {
    on_stage(
        |_| {},
        async |stage| {
            let order = stage.order(Duration::from_secs(2)).await;
            let mut transaction = stage.pool.begin().await.unwrap();
            schedule_in(&mut *transaction, order.id.to_string(), order.deadline).await.unwrap();
            transaction.rollback().await.unwrap();
            assert_eq!(stage.count("SELECT count(*) FROM alarm_outbox").await, 0);
        },
    );
}

#[test]
fn orders_created_while_the_broker_is_away_are_closed_and_their_alarms_follow_when_it_is_back() {
    on_stage(
        |_| {},
        async |stage| {
            let lonely = stage.worker_without_broker().await;
            for order in stage.orders(5, Duration::from_millis(300)).await {
                schedule_in(&stage.pool, order.id.to_string(), order.deadline).await.unwrap();
            }
            let later = stage.order(Duration::from_secs(4)).await;
            schedule_in(&stage.pool, later.id.to_string(), later.deadline).await.unwrap();
            wait_for("the closes", async || stage.closed().await == 5).await;
            assert_eq!(
                stage.count("SELECT count(*) FROM alarm_outbox WHERE sent_at IS NULL AND deadline > now()").await,
                1
            );
            lonely.stop().await;

            let worker = stage.worker().await;
            wait_for("the last close", async || stage.closed().await == 6).await;
            assert_eq!(stage.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 1);
            wait_for("an empty outbox", async || stage.count(UNSENT).await == 0).await;
            stage.assert_ledger().await;
            worker.stop().await;
            stage.assert_nothing_left_undone().await;
        },
    );
}

#[test]
fn an_order_id_that_no_message_could_carry_is_refused_in_the_transaction() {
    on_stage(
        |_| {},
        async |stage| {
            let now = std::time::SystemTime::now();
            let refused = schedule_in(&stage.pool, "", now).await;
            assert!(matches!(refused, Err(NotWritten::BadOrderId(_))), "{refused:?}");
            for bad in ["", "a\tb", &"x".repeat(201)] {
                let inserted = sqlx::query("INSERT INTO alarm_outbox (order_id, deadline) VALUES ($1, now())")
                    .bind(bad)
                    .execute(&stage.pool)
                    .await;
                let error = inserted.unwrap_err().to_string();
                assert!(error.contains("the_order_id_fits_a_message"), "{bad:?}: {error}");
            }
        },
    );
}
