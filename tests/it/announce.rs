//! Every close is announced: a real consumer receives it, under its own id, and it is not lost while the broker refuses
//! it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::StreamExt;
use lapin::Consumer;
use lapin::message::Delivery;
use lapin::options::{
    BasicConsumeOptions, ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use order_timeout::outbox::event_relay::EventRelay;
use order_timeout::postgres::Database;
use order_timeout_amqp::publisher::ConfirmedPublisher;
use order_timeout_core::message::OrderClosed;
use order_timeout_core::order::{ClosedBy, OrderId, Timestamp};
use order_timeout_testkit::{Order, TIMEOUT, TestEnv, wait_for};
use uuid::Uuid;

const SECOND: Duration = Duration::from_secs(1);

/// Consumes all events, as a program of the shop would.
pub async fn consume_events(env: &TestEnv) -> Consumer {
    let exclusive = QueueDeclareOptions { exclusive: true, ..Default::default() };
    let queue = env.channel().queue_declare("".into(), exclusive, FieldTable::default()).await.unwrap();
    bind(env, queue.name().as_str()).await;
    let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
    env.channel().basic_consume(queue.name().clone(), "".into(), options, FieldTable::default()).await.unwrap()
}

/// Makes the broker nack each event from now on: binds a queue that accepts no message. Returns its name.
async fn refuse_events(env: &TestEnv) -> String {
    let queue = format!("{}.full", env.settings.namespace);
    let options = QueueDeclareOptions { exclusive: true, ..Default::default() };
    let mut arguments = FieldTable::default();
    arguments.insert("x-max-length".into(), 0.into());
    arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    env.channel().queue_declare(queue.as_str().into(), options, arguments).await.unwrap();
    bind(env, &queue).await;
    queue
}

async fn bind(env: &TestEnv, queue: &str) {
    let (events, options) = (env.names().events(), QueueBindOptions::default());
    let bound =
        env.channel().queue_bind(queue.into(), events.as_str().into(), "#".into(), options, FieldTable::default());
    bound.await.unwrap();
}

/// Receives this many events.
pub async fn receive(consumer: &mut Consumer, count: usize) -> Vec<Delivery> {
    let mut received = Vec::new();
    while received.len() < count {
        let next = tokio::time::timeout(TIMEOUT, consumer.next()).await;
        received
            .push(next.unwrap_or_else(|_| panic!("received {} of {count} events", received.len())).unwrap().unwrap());
    }
    received
}

async fn assert_silent(consumer: &mut Consumer) {
    let next = tokio::time::timeout(Duration::from_millis(500), consumer.next()).await;
    assert!(next.is_err(), "one event too many: {next:?}");
}

pub fn message_id(event: &Delivery) -> Uuid {
    Uuid::parse_str(event.properties.message_id().as_ref().expect("a message id").as_str()).unwrap()
}

/// Asserts that these are the events of these orders' closes and of nothing else, one for each.
async fn assert_events_of(env: &TestEnv, received: &[Delivery], orders: &[Order]) {
    let ids: BTreeSet<Uuid> = received.iter().map(message_id).collect();
    assert_eq!(ids.len(), received.len(), "one message id for each event");
    let rows: Vec<Uuid> =
        sqlx::query_scalar("SELECT id FROM event_outbox ORDER BY 1").fetch_all(&env.pool).await.unwrap();
    assert_eq!(ids.into_iter().collect::<Vec<_>>(), rows, "the id in the outbox");
    let closed_at: BTreeMap<Uuid, time::OffsetDateTime> =
        sqlx::query_as("SELECT id, closed_at FROM orders WHERE status = 'closed'")
            .fetch_all(&env.pool)
            .await
            .unwrap()
            .into_iter()
            .collect();
    let mut expected: BTreeMap<OrderId, &Order> = orders.iter().map(|order| (order.order_id(), order)).collect();
    for event in received {
        assert_eq!(event.routing_key.as_str(), "order.closed");
        assert_eq!(event.properties.kind().as_ref().unwrap().as_str(), "order.closed.v1");
        assert_eq!(event.properties.content_type().as_ref().unwrap().as_str(), "application/json");
        assert_eq!(*event.properties.delivery_mode(), Some(2), "persistent");
        let closed: OrderClosed = serde_json::from_slice(&event.data).expect("the documented form");
        let order = expected.remove(&closed.order_id).expect("the first event of a closed order");
        assert_eq!(
            (closed.deadline, closed.closed_by, closed.reason.as_str()),
            (order.deadline, ClosedBy::Alarm, "unpaid")
        );
        assert_eq!(closed.closed_at, Timestamp::from(closed_at[&order.id]));
    }
    assert_eq!(expected.len(), 0, "closed and not announced: {expected:?}");
}

async fn wait_until_marked(env: &TestEnv) {
    wait_for("every event marked as sent", async || {
        env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await == 0
    })
    .await;
}

/// Otherwise a batch of the largest events that the table accepts would be half a gigabyte.
#[test]
fn large_events_are_sent_one_by_one() {
    TestEnv::builder().run(async |env| {
        // Hashes, because they cannot be compressed.
        let write = "INSERT INTO event_outbox (routing_key, type, payload)
                         SELECT 'large', 'large', (SELECT to_jsonb(string_agg(md5(word::text || number), ''))
                                                   FROM generate_series(1, $1) AS word)
                         FROM generate_series(1, 4) AS number";
        for words in [30_000, 1] {
            sqlx::query(write).bind(words).execute(&env.pool).await.unwrap();
        }
        let database = Database::connect(&env.settings.database, 1).await.unwrap();
        let confirmed = ConfirmedPublisher::connect(&env.settings.amqp, "test").await.unwrap();
        let mut relay = EventRelay::new(database, confirmed, &env.names(), 500, 60 * SECOND);
        let mut rounds = Vec::new();
        for _ in 0..5 {
            let relayed = relay.round().await.unwrap();
            rounds.push((relayed.sent, relayed.more));
        }
        assert_eq!(rounds, [(1, true), (1, true), (1, true), (1, true), (4, false)]);
    });
}

#[test]
fn announces_every_close_and_nothing_else() {
    TestEnv::builder().run(async |env| {
        let mut consumer = consume_events(&env).await;
        let worker = env.worker().await;
        let orders = env.orders(100, SECOND).await;
        let (paid, unpaid) = orders.split_at(30);
        for order in paid {
            assert!(env.pay(order).await);
        }
        env.deliver(&orders).await;
        let received = receive(&mut consumer, 70).await;
        assert_silent(&mut consumer).await;
        assert_events_of(&env, &received, unpaid).await;
        wait_until_marked(&env).await;
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn stopping_worker_announces_its_closes() {
    TestEnv::builder()
        .settings(
            // Too rare to send anything during the test.
            |settings| settings.announce.poll = 60 * SECOND,
        )
        .run(async |env| {
            let mut consumer = consume_events(&env).await;
            let worker = env.worker().await;
            let orders = env.orders(200, SECOND).await;
            env.deliver(&orders).await;
            wait_for("the close", async || env.closed().await == 200).await;
            worker.stop().await;
            assert_eq!(env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await, 0);
            let received = receive(&mut consumer, 200).await;
            assert_events_of(&env, &received, &orders).await;
            env.assert_drained().await;
            env.assert_ledger().await;
        });
}

#[test]
fn refused_events_stay_and_are_sent_later() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let full = refuse_events(&env).await;
        // One goes through the wheel: closing and re-arming do not wait for announcing.
        let mut orders = env.orders(40, SECOND).await;
        env.deliver(&orders).await;
        orders.push(env.order(5 * SECOND).await);
        env.publisher().await.schedule(orders[40].id.to_string(), orders[40].deadline).await.unwrap();
        wait_for("the close", async || env.closed().await == 41).await;
        worker.stop().await;
        assert_eq!(env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await, 41);

        env.channel().queue_delete(full.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        let mut consumer = consume_events(&env).await;
        let worker = env.worker().await;
        let received = receive(&mut consumer, 41).await;
        assert_silent(&mut consumer).await;
        assert_events_of(&env, &received, &orders).await;
        wait_until_marked(&env).await;
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn deleted_events_exchange_is_declared_again() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let (events, options) = (env.names().events(), ExchangeDeleteOptions::default());
        env.channel().exchange_delete(events.as_str().into(), options).await.unwrap();
        let orders = env.orders(10, Duration::ZERO).await;
        env.deliver(&orders).await;
        wait_for("the close", async || env.closed().await == 10).await;
        wait_until_marked(&env).await;
        assert_eq!(env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NOT NULL").await, 10);
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn locked_outbox_row_is_not_resent() {
    TestEnv::builder().run(async |env| {
        let mut consumer = consume_events(&env).await;
        let insert = "INSERT INTO event_outbox (routing_key, type, payload)
                        SELECT 'order.closed', 'order.closed.v1', '{}' FROM generate_series(1, $1)";
        sqlx::query(insert).bind(5).execute(&env.pool).await.unwrap();
        let mut other_session = env.pool.begin().await.unwrap();
        sqlx::query("SELECT FROM event_outbox LIMIT 1 FOR UPDATE").execute(&mut *other_session).await.unwrap();
        let worker = env.worker().await;
        receive(&mut consumer, 5).await;
        let unsent = "SELECT count(*) FROM event_outbox WHERE sent_at IS NULL";
        wait_for("the others to be marked", async || env.count(unsent).await == 1).await;
        sqlx::query(insert).bind(3).execute(&env.pool).await.unwrap();
        receive(&mut consumer, 3).await;
        wait_for("these to be marked", async || env.count(unsent).await == 1).await;
        assert_silent(&mut consumer).await;
        other_session.rollback().await.unwrap();
        worker.stop().await;
    });
}

#[test]
fn oversized_event_is_refused_in_transaction() {
    TestEnv::builder().run(async |env| {
        let insert = "INSERT INTO event_outbox (routing_key, type, payload)
                        SELECT 'order.closed', 'order.closed.v1', to_jsonb(repeat(gen_random_uuid()::text, $1))";
        sqlx::query(insert).bind(1_000).execute(&env.pool).await.unwrap();
        let refused = sqlx::query(insert).bind(1_000_000).execute(&env.pool).await.unwrap_err().to_string();
        assert!(refused.contains("the_payload_fits_into_a_message"), "{refused}");
    });
}

#[test]
fn standby_relay_takes_over_without_duplicates() {
    TestEnv::builder().run(async |env| {
        let mut consumer = consume_events(&env).await;
        let (first, second) = (env.worker().await, env.worker().await);
        let mut orders = env.orders(300, SECOND).await;
        env.deliver(&orders).await;
        let mut received = receive(&mut consumer, 300).await;
        assert_silent(&mut consumer).await;
        assert_events_of(&env, &received, &orders).await;
        first.stop().await;
        let more = env.orders(20, SECOND).await;
        env.deliver(&more).await;
        received.extend(receive(&mut consumer, 20).await);
        assert_silent(&mut consumer).await;
        orders.extend(more);
        assert_events_of(&env, &received, &orders).await;
        wait_until_marked(&env).await;
        second.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}
