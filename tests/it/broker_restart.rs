//! A broker that stops, for any reason: confirmed alarms are not lost, unconfirmed ones are not reported as scheduled,
//! and worker and publisher recover by themselves.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::{ExchangeDeleteOptions, QueueDeleteOptions};
use order_timeout_testkit::away::{
    HELD_LONG, assert_all_closed_and_announced, assert_nothing_is_scheduled, hold_long, is_consumed, keep_events,
    meanwhile, on_private_broker, on_private_broker_with, schedule, wait_until_scheduling_works,
};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::{TestEnv, wait_for};

const SECOND: Duration = Duration::from_secs(1);

/// Stops and restarts the broker while alarms wait in every place.
async fn survive(env: &TestEnv, broker: &Private, stop: fn(&Private)) {
    let publisher = env.publisher().await;
    let worker = env.worker().await;
    let kept_events = keep_events(&env.reconnected().await).await;
    // For the test's own queue of events: the worker re-declares its own objects, but not that queue. Before anything is
    // scheduled, because it may take seconds.
    meanwhile(|| broker.flush_declarations());
    schedule(env, &publisher, 20, 2 * SECOND).await;
    schedule(env, &publisher, 20, 14 * SECOND).await;
    schedule(env, &publisher, 20, 25 * SECOND).await;
    let held = env.orders(20, HELD_LONG).await;
    let connected = env.reconnected().await;
    connected.deliver(&held).await;
    for queue in [env.names().schedule(), env.names().timeout()] {
        wait_for("every alarm taken in", async || connected.depth(&queue).await == 0).await;
    }
    meanwhile(|| stop(broker));

    assert_nothing_is_scheduled(env, &publisher).await;
    // The worker closes the orders it holds, which needs no broker. Only their events do.
    for order in &held {
        wait_for("a held order's close", async || env.status(order).await == "closed").await;
    }
    assert!(env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await >= 20, "events wait");

    meanwhile(|| broker.restart());
    wait_until_scheduling_works(env, &publisher).await;
    schedule(env, &publisher, 20, 6 * SECOND).await;
    assert_all_closed_and_announced(env, &kept_events).await;
    worker.stop().await;
    env.reconnected().await.assert_nothing_left_undone().await;
}

#[test]
fn restarted_broker_loses_nothing() {
    on_private_broker_with(&[], hold_long, async |env: Arc<TestEnv>, broker: Arc<Private>| {
        survive(&env, &broker, Private::stop).await;
    });
}

#[test]
fn killed_broker_loses_nothing() {
    on_private_broker_with(&[], hold_long, async |env: Arc<TestEnv>, broker: Arc<Private>| {
        survive(&env, &broker, Private::kill).await;
    });
}

#[test]
fn worker_starts_before_broker() {
    on_private_broker(async |env: Arc<TestEnv>, broker: Arc<Private>| {
        let kept_events = keep_events(&env).await;
        let publisher = env.publisher().await;
        schedule(&env, &publisher, 20, 2 * SECOND).await;
        meanwhile(|| broker.stop());
        let worker = env.worker().await;
        meanwhile(|| broker.restart());
        wait_for("the close", async || env.closed().await == 20).await;
        // The broker is also unavailable when it closes the connections.
        schedule(&env, &env.publisher().await, 20, 6 * SECOND).await;
        let held = env.orders(20, 3 * SECOND).await;
        env.reconnected().await.deliver(&held).await;
        meanwhile(|| broker.ctl(&["close_all_connections", "for the test"]));
        wait_until_scheduling_works(&env, &publisher).await;
        assert_all_closed_and_announced(&env, &kept_events).await;
        assert_eq!(env.status(&held[0]).await, "closed");
        worker.stop().await;
        env.reconnected().await.assert_nothing_left_undone().await;
    });
}

#[test]
fn deleted_wheel_is_declared_again() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let publisher = env.publisher().await;
        schedule(&env, &publisher, 10, 8 * SECOND).await;
        wait_for("every close", async || env.closed().await == 10).await;
        assert_ne!(env.depths("wheel.").await, [], "the alarms were in the wheel");
        for queue in env.settings.queue_names().into_iter().filter(|name| name.contains(".wheel.")) {
            env.channel().queue_delete(queue.into(), QueueDeleteOptions::default()).await.unwrap();
        }
        schedule(&env, &publisher, 10, 8 * SECOND).await;
        wait_for("every close", async || env.closed().await == 20).await;
        // Also the exchange through which they are written.
        let (wheel, options) = (env.names().wheel(), ExchangeDeleteOptions::default());
        env.channel().exchange_delete(wheel.as_str().into(), options).await.unwrap();
        schedule(&env, &publisher, 10, 8 * SECOND).await;
        wait_for("every other close", async || env.closed().await == 30).await;
        worker.stop().await;
        env.assert_nothing_left_undone().await;
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 30);
    });
}

#[test]
fn deleted_queue_is_declared_again_and_consumed() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let publisher = env.publisher().await;
        for queue in [env.names().timeout(), env.names().schedule(), env.names().parked()] {
            let closed_before = env.closed().await;
            // One is held and loses its alarm with the queue; one is in the wheel.
            let held = env.order(3 * SECOND).await;
            env.deliver([&held]).await;
            schedule(&env, &publisher, 1, 7 * SECOND).await;
            wait_for("the alarms taken in", async || {
                env.depth(&env.names().timeout()).await + env.depth(&env.names().schedule()).await == 0
            })
            .await;
            env.channel().queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
            wait_for("the queue, consumed again", async || is_consumed(&env, &queue).await).await;
            let later = env.order(SECOND).await;
            env.deliver([&later]).await;
            schedule(&env, &publisher, 1, 6 * SECOND).await;
            wait_for("every close", async || env.closed().await == closed_before + 4).await;
        }
        assert_eq!(env.parked().await, []);
        worker.stop().await;
        env.assert_nothing_left_undone().await;
        env.assert_ledger().await;
    });
}
