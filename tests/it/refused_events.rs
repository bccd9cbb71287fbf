//! A queue that refuses events gets all of them eventually, other queues get few copies, and new events do not wait.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lapin::options::{BasicGetOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use order_timeout::http::READYZ;
use order_timeout::outbox::event_relay::EventRelay;
use order_timeout::postgres::Database;
use order_timeout_amqp::publisher::ConfirmedPublisher;
use order_timeout_testkit::figures::{Figures, get, serve_http};
use order_timeout_testkit::{Order, RunningWorker, TestEnv, promised, wait_for, wait_promised};

const SECOND: Duration = Duration::from_secs(1);
/// How soon a cause must be shown, and withdrawn.
const NOTICED_WITHIN: Duration = Duration::from_secs(15);
const UNSENT: &str = "SELECT count(*) FROM event_outbox WHERE sent_at IS NULL";

/// A queue bound for every event; with a length limit it refuses the rest.
async fn bound_queue(env: &TestEnv, name: &str, length: Option<i32>) -> String {
    let queue = format!("{}.{name}", env.settings.namespace);
    let mut arguments = FieldTable::default();
    if let Some(length) = length {
        arguments.insert("x-max-length".into(), length.into());
        arguments.insert("x-overflow".into(), AMQPValue::LongString("reject-publish".into()));
    }
    let exclusive = QueueDeclareOptions { exclusive: true, ..Default::default() };
    env.channel().queue_declare(queue.as_str().into(), exclusive, arguments).await.unwrap();
    let (events, options) = (env.names().events(), QueueBindOptions::default());
    let (to, from) = (queue.as_str().into(), events.as_str().into());
    env.channel().queue_bind(to, from, "#".into(), options, FieldTable::default()).await.unwrap();
    queue
}

/// Takes one event out of a queue and returns its message id.
async fn take(env: &TestEnv, queue: &str) -> Option<String> {
    let got = env.channel().basic_get(queue.into(), BasicGetOptions { no_ack: true }).await.unwrap();
    got.map(|event| event.delivery.properties.message_id().as_ref().expect("a message id").to_string())
}

async fn copies(env: &TestEnv, queue: &str) -> HashMap<String, usize> {
    let mut copies = HashMap::new();
    while let Some(id) = take(env, queue).await {
        *copies.entry(id).or_default() += 1;
    }
    copies
}

async fn is_degraded(worker: &RunningWorker, cause: &str) -> bool {
    let (status, page) = get(worker, READYZ).await;
    status == 200 && page.contains(&format!("degraded: {cause}: "))
}

async fn close(env: &TestEnv, count: usize) -> Vec<Order> {
    let (before, orders) = (env.closed().await, env.orders(count, Duration::ZERO).await);
    env.deliver(&orders).await;
    let all = before + i64::try_from(count).unwrap();
    wait_for("the close", async || env.closed().await == all).await;
    orders
}

/// One queue holds `length` events and its consumer takes `per_second` of them; the other queue takes everything.
fn assert_few_copies(length: i32, per_second: u32, closes: usize) {
    TestEnv::builder().settings(serve_http).run(async move |env: Arc<TestEnv>| {
        let slow = bound_queue(&env, "slow", Some(length)).await;
        let endless = bound_queue(&env, "endless", None).await;
        let worker = env.worker().await;
        close(&env, closes).await;
        let mut ticks = tokio::time::interval(SECOND / per_second);
        let (began, mut slow_copies, mut was_degraded) = (Instant::now(), HashMap::new(), false);
        while slow_copies.len() < closes {
            ticks.tick().await;
            if let Some(id) = take(&env, &slow).await {
                *slow_copies.entry(id).or_insert(0) += 1;
            }
            was_degraded = was_degraded || is_degraded(&worker, "events_refused").await;
            assert!(began.elapsed() < promised(150 * SECOND), "the slow queue has {} of {closes}", slow_copies.len());
        }
        assert!(was_degraded);
        wait_for("every event marked as sent", async || env.count(UNSENT).await == 0).await;
        let (copies, refused) = (copies(&env, &endless).await, Figures::of(&worker).await.get("events_refused_total"));
        let (most, all) = (copies.values().max().copied().unwrap_or(0), copies.values().sum::<usize>());
        println!("{closes} closes: {all} copies, {most} of one at most, {refused} refusals, {:?}", began.elapsed());
        assert_eq!(copies.len(), closes);
        assert!(most <= 3, "{most} copies of one event");
        assert!(slow_copies.values().all(|times| *times == 1));
        wait_promised(NOTICED_WITHIN, "no cause any more", async || !is_degraded(&worker, "events_refused").await)
            .await;
        worker.stop().await;
    });
}

#[test]
fn full_queue_costs_few_copies() {
    assert_few_copies(1, 20, 20);
}

#[test]
#[ignore = "loads the machine for a minute; cargo test --test it -- --ignored runs it, a smaller one runs always"]
fn event_storm_costs_few_copies() {
    assert_few_copies(5, 20, 400);
}

#[test]
fn refusal_is_named_until_events_are_taken() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let full = bound_queue(&env, "full", Some(0)).await;
        let worker = env.worker().await;
        close(&env, 3).await;
        wait_promised(NOTICED_WITHIN, "the cause", async || is_degraded(&worker, "events_refused").await).await;
        let (_, page) = get(&worker, READYZ).await;
        assert!(page.contains(&env.names().events()) && page.contains("reject-publish"), "{page}");
        env.channel().queue_delete(full.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        close(&env, 1).await;
        wait_promised(NOTICED_WITHIN, "no cause any more", async || !is_degraded(&worker, "events_refused").await)
            .await;
        worker.stop().await;
    });
}

#[test]
fn next_relay_keeps_backoff() {
    TestEnv::builder().run(async |env| {
        bound_queue(&env, "full", Some(0)).await;
        let endless = bound_queue(&env, "endless", None).await;
        let worker = env.worker().await;
        close(&env, 3).await;
        let refused_twice = "SELECT count(*) FROM event_outbox WHERE refusals = 2";
        wait_for("second refusals", async || env.count(refused_twice).await == 3).await;
        worker.stop().await;
        let worker = env.worker().await;
        close(&env, 1).await;
        wait_for("the fourth tried", async || {
            env.count("SELECT count(*) FROM event_outbox WHERE refusals BETWEEN 1 AND 2").await == 4
        })
        .await;
        assert_eq!(env.count(refused_twice).await, 3, "the backoff is not over");
        worker.stop().await;
        let copies = copies(&env, &endless).await;
        // A stopping worker makes a last round, which does not retry events in backoff.
        assert!(copies.values().all(|times| *times <= 2), "{copies:?}");
    });
}

#[test]
fn backoff_beyond_maximum_is_reset() {
    TestEnv::builder().run(async |env| {
        // A row that was refused while the server's clock was a year ahead.
        let refused = "INSERT INTO event_outbox (routing_key, type, payload, refusals, next_attempt_at)
                           VALUES ('order.closed', 'order.closed.v1', '{}', 1, now() + interval '1 year')";
        sqlx::query(refused).execute(&env.pool).await.unwrap();
        let database = Database::connect(&env.settings.database, 1).await.unwrap();
        let confirmed = ConfirmedPublisher::connect(&env.settings.amqp, "test").await.unwrap();
        let mut relay = EventRelay::new(database, confirmed, &env.names(), 500, 60 * SECOND);
        assert_eq!(relay.round().await.unwrap().sent, 0);
        relay.outbox.forget_old().await.unwrap();
        assert_eq!(relay.round().await.unwrap().sent, 1);
    });
}

#[test]
fn many_refused_events_delay_no_others() {
    TestEnv::builder().run(async |env| {
            let refused = "INSERT INTO event_outbox (routing_key, type, payload, refusals, next_attempt_at, created_at)
                           SELECT 'order.closed', 'order.closed.v1', '{}', 3, now() + interval '1 hour', now() - interval '1 hour'
                           FROM generate_series(1, 100000)";
            sqlx::query(refused).execute(&env.pool).await.unwrap();
            let database = Database::connect(&env.settings.database, 1).await.unwrap();
            let confirmed = ConfirmedPublisher::connect(&env.settings.amqp, "test").await.unwrap();
            let mut relay = EventRelay::new(database, confirmed, &env.names(), 500, 60 * SECOND);
            assert_eq!(relay.outbox.count_refused().await.unwrap(), 100_000);
            let insert = "INSERT INTO event_outbox (routing_key, type, payload) VALUES ('order.closed', 'order.closed.v1', '{}')";
            for _ in 0..20 {
                sqlx::query(insert).execute(&env.pool).await.unwrap();
                assert_eq!(relay.round().await.unwrap().sent, 1);
            }
            let age = relay.outbox.backlog().await.unwrap().age;
            assert!(age >= 3_600 * SECOND, "the oldest unsent event is a refused one: {age:?}");
        });
}
