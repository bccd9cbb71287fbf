//! Shared by the tests that make a server unavailable: environments on private servers, scheduling that must fail in
//! bounded time, and the check that every order was closed and announced in the end.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lapin::options::{BasicGetOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use order_timeout::Settings;
use order_timeout_client::Publisher;
use order_timeout_core::order::{OrderId, Timestamp};
use order_timeout_core::with_causes;
use secrecy::{ExposeSecret, SecretString};
use uuid::Uuid;

use crate::private::Private;
use crate::proxy::Proxy;
use crate::{Order, RunningWorker, TestEnv, promised, wait_for};

const SECOND: Duration = Duration::from_secs(1);
/// A deadline that comes only after a server has been stopped, even on a busy machine. For settings with [`hold_long`].
pub const HELD_LONG: Duration = Duration::from_secs(8);

/// A test's own queue is deleted after this long without use.
const EXPIRES_AFTER_MS: i32 = 600_000;

/// The arguments of a test's own queue. It expires where the broker outlives the test, and is replicated, so the loss
/// of a node does not delete it.
pub fn expiring_queue_arguments() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    arguments.insert("x-expires".into(), AMQPValue::LongInt(EXPIRES_AFTER_MS));
    arguments
}

/// Has workers hold alarms for [`HELD_LONG`].
pub fn hold_long(settings: &mut Settings) {
    settings.worker.hold_max = HELD_LONG + SECOND;
}

/// Runs a test on an environment with a private broker, which it may stop.
pub fn on_private_broker<F: Future<Output = ()> + Send + 'static>(
    test: impl FnOnce(Arc<TestEnv>, Arc<Private>) -> F + Send + 'static,
) {
    on_private_broker_with(&[], |_| {}, test);
}

/// Like [`on_private_broker`], with `options` of `scripts/private broker start`. `adjust` changes the settings before
/// anything is created.
pub fn on_private_broker_with<F: Future<Output = ()> + Send + 'static>(
    options: &[&str],
    adjust: impl FnOnce(&mut Settings),
    test: impl FnOnce(Arc<TestEnv>, Arc<Private>) -> F + Send + 'static,
) {
    let broker = Arc::new(Private::broker(options));
    let adjust_all = |settings: &mut Settings| {
        settings.amqp.url = broker.url.clone().into();
        settings.amqp.connect_timeout = 2 * SECOND;
        settings.amqp.confirm_timeout = 2 * SECOND;
        adjust(settings);
    };
    let for_test = broker.clone();
    TestEnv::builder().settings(adjust_all).run(move |env| test(env, for_test));
}

/// Runs a test on an environment with a private database server, which it may stop. The broker is the shared one.
pub fn on_private_database<F: Future<Output = ()> + Send + 'static>(
    options: &[&str],
    test: impl FnOnce(Arc<TestEnv>, Arc<Private>) -> F + Send + 'static,
) {
    let database = Arc::new(Private::postgres(options));
    let adjust = |settings: &mut Settings| {
        let name = settings.database.url.expose_secret().rsplit('/').next().expect("a name").to_owned();
        settings.database.url = SecretString::from(database.url.clone());
        settings.database.url = settings.database.url_of(&name);
        shorten_database_timeouts(settings);
    };
    let for_test = database.clone();
    TestEnv::builder().settings(adjust).run(move |env| test(env, for_test));
}

/// Shortens the timeouts of a worker for the database, so that they end during a test.
pub fn shorten_database_timeouts(settings: &mut Settings) {
    settings.database.acquire_timeout = SECOND;
    settings.database.statement_timeout = SECOND;
    settings.worker.requeue_after = 2 * SECOND;
}

/// Shortens the timeouts of a worker for both servers.
pub fn shorten_timeouts(settings: &mut Settings) {
    shorten_database_timeouts(settings);
    settings.amqp.heartbeat = SECOND;
    settings.amqp.connect_timeout = 2 * SECOND;
    settings.amqp.confirm_timeout = 2 * SECOND;
}

/// Starts a worker that connects to the database through this proxy.
pub async fn worker_through(env: &TestEnv, to_database: &Proxy) -> RunningWorker {
    RunningWorker::start(with_database_behind(env, to_database)).await
}

/// The environment's settings, with the database behind this proxy.
pub fn with_database_behind(env: &TestEnv, to_database: &Proxy) -> Settings {
    let mut settings = env.settings.clone();
    settings.database.url = to_database.address(&settings.database.url);
    settings
}

/// The environment's settings, with the broker behind this proxy.
pub fn with_broker_behind(env: &TestEnv, to_broker: &Proxy) -> Settings {
    let mut settings = env.settings.clone();
    settings.amqp.url = to_broker.address(&settings.amqp.url);
    settings
}

/// Runs something slow without blocking the other tasks of this process.
pub fn meanwhile<T>(slow: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(slow)
}

/// Creates and schedules orders that are due after this delay.
pub async fn schedule(env: &TestEnv, publisher: &Publisher, count: usize, delay: Duration) -> Vec<Order> {
    let orders = env.orders(count, delay).await;
    // Again if the broker is slower than the short limit of these tests: a second alarm closes no order twice.
    wait_for("confirmed alarms", async || {
        let alarms = orders.iter().map(|order| (order.order_id(), order.deadline));
        publisher.schedule_all(alarms).await.is_ok()
    })
    .await;
    orders
}

/// Creates orders, and waits until the worker holds their alarms unacknowledged.
pub async fn held_by_the_worker(env: &TestEnv, count: usize, delay: Duration) -> Vec<Order> {
    let orders = env.orders(count, delay).await;
    env.deliver(&orders).await;
    let waiting = async || env.depth(&env.names().timeout()).await;
    wait_for("the worker holding the alarms", async || waiting().await == 0).await;
    orders
}

/// Asserts that without the broker scheduling fails in bounded time, for one alarm and for many.
pub async fn assert_nothing_is_scheduled(env: &TestEnv, publisher: &Publisher) {
    let bound = promised(env.settings.amqp.connect_timeout + env.settings.amqp.confirm_timeout + 2 * SECOND);
    // So far ahead that an alarm which arrives although its confirm is lost does not return during the test.
    let deadline = Timestamp::now_by_local_clock() + 3600 * SECOND;
    for _ in 0..3 {
        let began = Instant::now();
        let error = publisher.schedule(Uuid::now_v7().to_string(), deadline).await.expect_err("there is no broker");
        assert!(began.elapsed() <= bound, "it took {:?} to say {error}", began.elapsed());
        assert!(with_causes(&error).starts_with("not scheduled: "), "{error}");
    }
    let began = Instant::now();
    let alarms = (0..100).map(|_| (OrderId::new(Uuid::now_v7().to_string()).unwrap(), deadline));
    let error = publisher.schedule_all(alarms).await.expect_err("there is no broker");
    assert!(began.elapsed() <= bound, "it took {:?} to say {error}", began.elapsed());
    assert_eq!((error.scheduled, error.failed.len()), (0, 100));
}

/// Waits until the publisher can schedule again.
pub async fn wait_until_scheduling_works(env: &TestEnv, publisher: &Publisher) {
    let order = env.order(2 * SECOND).await;
    let scheduled = async || publisher.schedule(order.id.to_string(), order.deadline).await.is_ok();
    wait_for("scheduling again", scheduled).await;
}

/// Declares a queue that receives every event and survives a restart of the broker. Returns its name.
pub async fn keep_events(env: &TestEnv) -> String {
    let (queue, events) = (format!("{}.heard", env.settings.namespace), env.names().events());
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    env.channel().queue_declare(queue.as_str().into(), durable, expiring_queue_arguments()).await.unwrap();
    let options = QueueBindOptions::default();
    let bound = env.channel().queue_bind(
        queue.as_str().into(),
        events.as_str().into(),
        "#".into(),
        options,
        FieldTable::default(),
    );
    bound.await.unwrap();
    queue
}

/// Asserts that every order was closed once, and that these closes and nothing else were announced.
pub async fn assert_all_closed_and_announced(env: &TestEnv, kept_events: &str) {
    let unpaid = async || env.count("SELECT count(*) FROM orders WHERE status = 'unpaid'").await;
    wait_for("every order's close", async || unpaid().await == 0).await;
    assert_every_event_received(env, kept_events).await;
    assert_eq!(env.count("SELECT count(*) FROM event_outbox").await, env.closed().await);
    assert_eq!(env.parked().await, []);
    env.assert_ledger().await;
}

/// Waits until all events are sent, and asserts that the queue received exactly those in the outbox, by their ids.
pub async fn assert_every_event_received(env: &TestEnv, kept_events: &str) {
    let unsent = async || env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await;
    wait_for("every event sent", async || unsent().await == 0).await;
    let env = env.reconnected().await;
    let mut received = BTreeSet::new();
    let no_ack = BasicGetOptions { no_ack: true };
    while let Some(event) = env.channel().basic_get(kept_events.into(), no_ack).await.unwrap() {
        // A lost confirm may lead to a duplicate, under the same id.
        received.insert(Uuid::parse_str(event.properties.message_id().as_ref().unwrap().as_str()).unwrap());
    }
    let rows: Vec<Uuid> =
        sqlx::query_scalar("SELECT id FROM event_outbox ORDER BY 1").fetch_all(&env.pool).await.unwrap();
    let (missing, unknown): (Vec<_>, Vec<_>) = (
        rows.iter().filter(|id| !received.contains(id)).collect(),
        received.iter().filter(|id| rows.binary_search(id).is_err()).collect(),
    );
    assert!(missing.is_empty() && unknown.is_empty(), "not received: {missing:?}; not in the outbox: {unknown:?}");
}

/// Whether this queue has a consumer.
pub async fn is_consumed(env: &TestEnv, queue: &str) -> bool {
    consumers(env, queue).await > 0
}

/// The number of this queue's consumers; 0 if the queue does not exist.
pub async fn consumers(env: &TestEnv, queue: &str) -> u32 {
    let channel = env.broker().create_channel().await.unwrap();
    let passive = QueueDeclareOptions { passive: true, ..Default::default() };
    let queue = channel.queue_declare(queue.into(), passive, FieldTable::default()).await;
    queue.map_or(0, |queue| queue.consumer_count())
}
