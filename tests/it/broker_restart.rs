//! A broker that goes away, in whatever manner: nothing that was confirmed is lost, nothing that was not is taken for
//! scheduled, and worker and publisher come back by themselves.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lapin::options::{BasicGetOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use order_timeout::order::{Moment, OrderId};
use order_timeout::{Publisher, Settings};
use uuid::Uuid;

use crate::support::private::Private;
use crate::support::{Order, Stage, on_stage, wait_for, wait_within};

const SECOND: Duration = Duration::from_secs(1);
/// Long enough for the longest pause between two tries, and for alarms that wait in the wheel.
const COMING_BACK: Duration = Duration::from_secs(60);

/// Runs a test on a stage whose broker it may take away.
fn on_private_broker<F: Future<Output = ()> + Send + 'static>(
    test: impl FnOnce(Arc<Stage>, Arc<Private>) -> F + Send + 'static,
) {
    let broker = Arc::new(Private::broker(&[]));
    let adjust = |settings: &mut Settings| {
        settings.amqp.url = broker.url.clone().into();
        settings.amqp.connect_timeout = 2 * SECOND;
        settings.amqp.confirm_timeout = 2 * SECOND;
    };
    let for_test = broker.clone();
    on_stage(adjust, move |stage| test(stage, for_test));
}

/// Does something slow to the broker without stopping everybody else in this process.
fn meanwhile<T>(slow: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(slow)
}

/// Orders that are due after this delay, and scheduled.
async fn schedule(stage: &Stage, publisher: &Publisher, count: usize, delay: Duration) -> Vec<Order> {
    let orders = stage.orders(count, delay).await;
    let alarms = orders.iter().map(|order| (order.order_id(), order.deadline));
    assert_eq!(publisher.schedule_all(alarms).await, Ok(count));
    orders
}

/// With the broker away, scheduling is an error in bounded time, alone and in a crowd.
async fn assert_nothing_is_scheduled(stage: &Stage, publisher: &Publisher) {
    let bound = stage.settings.amqp.connect_timeout + stage.settings.amqp.confirm_timeout + 2 * SECOND;
    let deadline = Moment::now_by_local_clock() + 60 * SECOND;
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

async fn wait_until_scheduling_works(stage: &Stage, publisher: &Publisher) {
    let order = stage.order(2 * SECOND).await;
    let scheduled = async || publisher.schedule(order.id.to_string(), order.deadline).await.is_ok();
    wait_within(COMING_BACK, "scheduling again", scheduled).await;
}

/// A queue that hears every event and outlives the broker.
async fn keep_events(stage: &Stage) -> String {
    let (queue, events) = (format!("{}.heard", stage.settings.namespace), stage.names().events());
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    stage.channel.queue_declare(queue.as_str().into(), durable, FieldTable::default()).await.unwrap();
    let options = QueueBindOptions::default();
    let bound = stage.channel.queue_bind(
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
async fn assert_all_closed_and_heard(stage: &Stage, kept_events: &str) {
    let unpaid = async || stage.count("SELECT count(*) FROM orders WHERE status = 'unpaid'").await;
    wait_within(COMING_BACK, "every order's close", async || unpaid().await == 0).await;
    let unsent = async || stage.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await;
    wait_within(COMING_BACK, "every event sent", async || unsent().await == 0).await;
    let stage = stage.reconnected().await;
    let mut heard = BTreeSet::new();
    let no_ack = BasicGetOptions { no_ack: true };
    while let Some(event) = stage.channel.basic_get(kept_events.into(), no_ack).await.unwrap() {
        // Twice is allowed where a confirm was lost; then under the same id.
        heard.insert(Uuid::parse_str(event.properties.message_id().as_ref().unwrap().as_str()).unwrap());
    }
    let rows: Vec<Uuid> =
        sqlx::query_scalar("SELECT id FROM event_outbox ORDER BY 1").fetch_all(&stage.pool).await.unwrap();
    assert_eq!(heard.into_iter().collect::<Vec<_>>(), rows);
    assert_eq!(i64::try_from(rows.len()).unwrap(), stage.closed().await);
    assert_eq!(stage.parked().await, []);
    stage.assert_ledger().await;
}

/// Alarms everywhere, then the broker goes, then it comes back.
async fn survive(stage: &Stage, broker: &Private, go_away: fn(&Private)) {
    let publisher = stage.publisher().await;
    let worker = stage.worker().await;
    let kept_events = keep_events(&stage.reconnected().await).await;
    schedule(stage, &publisher, 20, 2 * SECOND).await;
    schedule(stage, &publisher, 20, 9 * SECOND).await;
    schedule(stage, &publisher, 20, 25 * SECOND).await;
    let held = stage.orders(20, 3 * SECOND).await;
    let connected = stage.reconnected().await;
    connected.deliver(&held).await;
    for queue in [stage.names().arm(), stage.names().timeout()] {
        wait_for("everything where it waits", async || connected.depth(&queue).await == 0).await;
    }
    meanwhile(|| go_away(broker));

    assert_nothing_is_scheduled(stage, &publisher).await;
    // What the worker holds it closes on time: that takes no broker.
    for order in &held {
        wait_for("a held order's close", async || stage.status(order).await == "closed").await;
    }
    let late = "SELECT count(*) FROM orders WHERE status = 'closed' AND closed_at > expires_at + interval '1 second'";
    let late_before_return = stage.count(late).await;
    assert!(stage.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await > 0, "events wait");

    meanwhile(|| broker.restart());
    wait_until_scheduling_works(stage, &publisher).await;
    schedule(stage, &publisher, 20, 6 * SECOND).await;
    assert_all_closed_and_heard(stage, &kept_events).await;
    assert_eq!(late_before_return, 0, "closed late while the broker was away");
    worker.stop().await;
    stage.reconnected().await.assert_drained().await;
}

#[test]
fn a_broker_that_is_restarted_loses_nothing_and_everybody_comes_back() {
    on_private_broker(async |stage: Arc<Stage>, broker: Arc<Private>| {
        survive(&stage, &broker, Private::stop).await;
    });
}

#[test]
fn a_broker_that_is_killed_loses_nothing_and_everybody_comes_back() {
    on_private_broker(async |stage: Arc<Stage>, broker: Arc<Private>| {
        survive(&stage, &broker, Private::kill).await;
    });
}

#[test]
fn a_worker_that_starts_while_the_broker_is_away_works_when_it_comes() {
    on_private_broker(async |stage: Arc<Stage>, broker: Arc<Private>| {
        let kept_events = keep_events(&stage).await;
        let publisher = stage.publisher().await;
        schedule(&stage, &publisher, 20, 2 * SECOND).await;
        meanwhile(|| broker.stop());
        let worker = stage.worker().await;
        meanwhile(|| broker.restart());
        wait_within(COMING_BACK, "the close", async || stage.closed().await == 20).await;
        // Connections that the server closes are one more way of going away.
        schedule(&stage, &stage.publisher().await, 20, 6 * SECOND).await;
        let held = stage.orders(20, 3 * SECOND).await;
        stage.reconnected().await.deliver(&held).await;
        meanwhile(|| broker.ctl(&["close_all_connections", "for the test"]));
        wait_until_scheduling_works(&stage, &publisher).await;
        assert_all_closed_and_heard(&stage, &kept_events).await;
        assert_eq!(stage.status(&held[0]).await, "closed");
        worker.stop().await;
        stage.reconnected().await.assert_drained().await;
    });
}

/// Whether somebody consumes this queue.
async fn is_consumed(stage: &Stage, queue: &str) -> bool {
    let channel = stage.broker.create_channel().await.unwrap();
    let passive = QueueDeclareOptions { passive: true, ..Default::default() };
    match channel.queue_declare(queue.into(), passive, FieldTable::default()).await {
        Ok(queue) => queue.consumer_count() > 0,
        Err(_) => false,
    }
}

#[test]
fn a_queue_deleted_under_a_running_worker_is_declared_again_and_consumed() {
    on_stage(
        |_| {},
        async |stage| {
            let worker = stage.worker().await;
            let publisher = stage.publisher().await;
            for queue in [stage.names().timeout(), stage.names().arm(), stage.names().parked()] {
                let closed_before = stage.closed().await;
                // One that is held and loses its alarm with the queue, one in the wheel.
                let held = stage.order(3 * SECOND).await;
                stage.deliver([&held]).await;
                schedule(&stage, &publisher, 1, 7 * SECOND).await;
                wait_for("the alarms taken in", async || {
                    stage.depth(&stage.names().timeout()).await + stage.depth(&stage.names().arm()).await == 0
                })
                .await;
                stage.channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
                wait_for("the queue, consumed again", async || is_consumed(&stage, &queue).await).await;
                let later = stage.order(SECOND).await;
                stage.deliver([&later]).await;
                schedule(&stage, &publisher, 1, 6 * SECOND).await;
                wait_for("every close", async || stage.closed().await == closed_before + 4).await;
            }
            assert_eq!(stage.parked().await, []);
            worker.stop().await;
            stage.assert_drained().await;
            stage.assert_ledger().await;
        },
    );
}
