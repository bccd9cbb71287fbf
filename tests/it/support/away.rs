//! What the tests share that take a server away: stages on private servers, scheduling that must fail in bounded time,
//! and the insistence that everything was closed and heard of in the end.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lapin::options::{BasicGetOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use order_timeout::order::{OrderId, Timestamp};
use order_timeout::{Publisher, Settings};
use secrecy::{ExposeSecret, SecretString};
use uuid::Uuid;

use super::private::Private;
use super::proxy::Proxy;
use super::{Order, RunningWorker, TestEnv, wait_for, wait_within, with_env};

const SECOND: Duration = Duration::from_secs(1);
/// Long enough for the longest pause between two tries, and for alarms that wait in the wheel.
pub const COMING_BACK: Duration = Duration::from_secs(60);
/// So long that a server which is taken away is gone by then, on a busy machine too. For settings with [`hold_long`].
pub const HELD_LONG: Duration = Duration::from_secs(8);

/// How long a queue of the test's own stays that nobody uses any more, in milliseconds.
const GONE_AFTER_MS: i32 = 600_000;

/// The arguments of a queue of the test's own. Where the broker outlives the test, it goes by itself; a node that dies does
/// not take it along.
pub fn for_a_while() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    arguments.insert("x-expires".into(), AMQPValue::LongInt(GONE_AFTER_MS));
    arguments
}

/// Has workers hold alarms for [`HELD_LONG`].
pub fn hold_long(settings: &mut Settings) {
    settings.worker.hold_max = HELD_LONG + SECOND;
}

/// Runs a test on a env whose broker it may take away.
pub fn on_private_broker<F: Future<Output = ()> + Send + 'static>(
    test: impl FnOnce(Arc<TestEnv>, Arc<Private>) -> F + Send + 'static,
) {
    on_private_broker_with(&[], |_| {}, test);
}

/// The same with `options` of `scripts/private broker start`; `adjust` changes the settings before anything is created.
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
    with_env(adjust_all, move |env| test(env, for_test));
}

/// Runs a test on a env whose database it may take away. The broker is the usual one.
pub fn on_private_database<F: Future<Output = ()> + Send + 'static>(
    options: &[&str],
    test: impl FnOnce(Arc<TestEnv>, Arc<Private>) -> F + Send + 'static,
) {
    let database = Arc::new(Private::postgres(options));
    let adjust = |settings: &mut Settings| {
        let name = settings.database.url.expose_secret().rsplit('/').next().expect("a name").to_owned();
        settings.database.url = SecretString::from(database.url.clone());
        settings.database.url = settings.database.url_of(&name);
        be_impatient(settings);
    };
    let for_test = database.clone();
    with_env(adjust, move |env| test(env, for_test));
}

/// Everything that a worker waits for is given up soon, so that a test sees the end of it.
pub fn be_impatient(settings: &mut Settings) {
    settings.database.acquire_timeout = SECOND;
    settings.database.statement_timeout = SECOND;
    settings.worker.requeue_after = 2 * SECOND;
    settings.amqp.heartbeat = SECOND;
    settings.amqp.connect_timeout = 2 * SECOND;
    settings.amqp.confirm_timeout = 2 * SECOND;
}

/// A worker that reaches the database through this network.
pub async fn worker_through(env: &TestEnv, to_database: &Proxy) -> RunningWorker {
    RunningWorker::start(with_database_behind(env, to_database)).await
}

/// The env's settings with the database behind this network.
pub fn with_database_behind(env: &TestEnv, to_database: &Proxy) -> Settings {
    let mut settings = env.settings.clone();
    settings.database.url = to_database.address(&settings.database.url);
    settings
}

/// The env's settings with the broker behind this network.
pub fn behind(env: &TestEnv, to_broker: &Proxy) -> Settings {
    let mut settings = env.settings.clone();
    settings.amqp.url = to_broker.address(&settings.amqp.url);
    settings
}

/// Does something slow to the broker without stopping everybody else in this process.
pub fn meanwhile<T>(slow: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(slow)
}

/// Orders that are due after this delay, and scheduled.
pub async fn schedule(env: &TestEnv, publisher: &Publisher, count: usize, delay: Duration) -> Vec<Order> {
    let orders = env.orders(count, delay).await;
    let alarms = orders.iter().map(|order| (order.order_id(), order.deadline));
    assert_eq!(publisher.schedule_all(alarms).await, Ok(count));
    orders
}

/// Orders whose alarms the worker holds unacknowledged.
pub async fn held_by_the_worker(env: &TestEnv, count: usize, delay: Duration) -> Vec<Order> {
    let orders = env.orders(count, delay).await;
    env.deliver(&orders).await;
    let waiting = async || env.depth(&env.names().timeout()).await;
    wait_for("the alarms in the worker's hands", async || waiting().await == 0).await;
    orders
}

/// With the broker away, scheduling is an error in bounded time, alone and in a crowd.
pub async fn assert_nothing_is_scheduled(env: &TestEnv, publisher: &Publisher) {
    let bound = env.settings.amqp.connect_timeout + env.settings.amqp.confirm_timeout + 2 * SECOND;
    // So far ahead that one which arrives all the same, unheard, does not come back during the test.
    let deadline = Timestamp::now_by_local_clock() + 3600 * SECOND;
    for _ in 0..3 {
        let began = Instant::now();
        let error = publisher.schedule(Uuid::now_v7().to_string(), deadline).await.expect_err("there is no broker");
        assert!(began.elapsed() <= bound, "it took {:?} to say {error}", began.elapsed());
        assert!(error.to_string().starts_with("not scheduled: "), "{error}");
    }
    let began = Instant::now();
    let alarms = (0..100).map(|_| (OrderId::new(Uuid::now_v7().to_string()).unwrap(), deadline));
    let error = publisher.schedule_all(alarms).await.expect_err("there is no broker");
    assert!(began.elapsed() <= bound, "it took {:?} to say {error}", began.elapsed());
    assert_eq!((error.scheduled, error.failed.len()), (0, 100));
}

pub async fn wait_until_scheduling_works(env: &TestEnv, publisher: &Publisher) {
    let order = env.order(2 * SECOND).await;
    let scheduled = async || publisher.schedule(order.id.to_string(), order.deadline).await.is_ok();
    wait_within(COMING_BACK, "scheduling again", scheduled).await;
}

/// A queue that hears every event and outlives the broker.
pub async fn keep_events(env: &TestEnv) -> String {
    let (queue, events) = (format!("{}.heard", env.settings.namespace), env.names().events());
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    env.channel.queue_declare(queue.as_str().into(), durable, for_a_while()).await.unwrap();
    let options = QueueBindOptions::default();
    let bound = env.channel.queue_bind(
        queue.as_str().into(),
        events.as_str().into(),
        "#".into(),
        options,
        FieldTable::default(),
    );
    bound.await.unwrap();
    queue
}

/// Insists that every order was closed once and that every close was heard of, and of nothing else.
pub async fn assert_all_closed_and_heard(env: &TestEnv, kept_events: &str) {
    let unpaid = async || env.count("SELECT count(*) FROM orders WHERE status = 'unpaid'").await;
    wait_within(COMING_BACK, "every order's close", async || unpaid().await == 0).await;
    assert_every_event_was_heard(env, kept_events).await;
    assert_eq!(env.count("SELECT count(*) FROM event_outbox").await, env.closed().await);
    assert_eq!(env.parked().await, []);
    env.assert_ledger().await;
}

/// Insists that what was kept is what stands in the outbox, each under its id, once it is sent.
pub async fn assert_every_event_was_heard(env: &TestEnv, kept_events: &str) {
    let unsent = async || env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await;
    wait_within(COMING_BACK, "every event sent", async || unsent().await == 0).await;
    let env = env.reconnected().await;
    let mut heard = BTreeSet::new();
    let no_ack = BasicGetOptions { no_ack: true };
    while let Some(event) = env.channel.basic_get(kept_events.into(), no_ack).await.unwrap() {
        // Twice is allowed where a confirm was lost; then under the same id.
        heard.insert(Uuid::parse_str(event.properties.message_id().as_ref().unwrap().as_str()).unwrap());
    }
    let rows: Vec<Uuid> =
        sqlx::query_scalar("SELECT id FROM event_outbox ORDER BY 1").fetch_all(&env.pool).await.unwrap();
    let (unheard, unknown): (Vec<_>, Vec<_>) = (
        rows.iter().filter(|id| !heard.contains(id)).collect(),
        heard.iter().filter(|id| rows.binary_search(id).is_err()).collect(),
    );
    assert!(unheard.is_empty() && unknown.is_empty(), "not heard of: {unheard:?}; of nothing: {unknown:?}");
}

/// Whether somebody consumes this queue.
pub async fn is_consumed(env: &TestEnv, queue: &str) -> bool {
    consumers(env, queue).await > 0
}

/// How many consume this queue; none if it is not there.
pub async fn consumers(env: &TestEnv, queue: &str) -> u32 {
    let channel = env.broker.create_channel().await.unwrap();
    let passive = QueueDeclareOptions { passive: true, ..Default::default() };
    let queue = channel.queue_declare(queue.into(), passive, FieldTable::default()).await;
    queue.map_or(0, |queue| queue.consumer_count())
}
