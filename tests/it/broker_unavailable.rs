//! A broker that runs but cannot be used: blocked, cut off, half open, slow, or without its objects or our rights.
//! Callers of the publisher get "not scheduled" in bounded time, the worker recovers by itself, and nothing is lost.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use order_timeout::Settings;
use order_timeout_testkit::away::{
    HELD_LONG, assert_all_closed_and_announced, assert_nothing_is_scheduled, held_by_the_worker, is_consumed,
    keep_events, meanwhile, on_private_broker_with, schedule, shorten_timeouts, wait_until_scheduling_works,
    with_broker_behind,
};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::proxy::{Direction, Proxy};
use order_timeout_testkit::{Order, RunningWorker, TestEnv, alarms_alone, wait_for};

const SECOND: Duration = Duration::from_secs(1);

fn short_timeouts_without_sweep(settings: &mut Settings) {
    shorten_timeouts(settings);
    alarms_alone(settings);
}

/// Waits until each of these orders is closed, which needs no broker.
async fn assert_closed(env: &TestEnv, held: &[Order]) {
    for order in held {
        wait_for("a held order's close", async || env.status(order).await == "closed").await;
    }
}

/// Asserts that every order was closed once, by its alarm, and announced.
async fn assert_all_closed_by_alarms(env: &TestEnv) {
    let unpaid = async || env.count("SELECT count(*) FROM orders WHERE status = 'unpaid'").await;
    wait_for("every order's close", async || unpaid().await == 0).await;
    let unsent = async || env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await;
    wait_for("every event sent", async || unsent().await == 0).await;
    assert_eq!(env.parked().await, []);
    env.assert_closed_by_alarms().await;
    env.assert_ledger().await;
}

#[test]
fn blocked_publishers_lose_no_alarm() {
    let longer_hold_without_sweep = |settings: &mut Settings| {
        alarms_alone(settings);
        settings.worker.hold_max = 4 * HELD_LONG;
    };
    on_private_broker_with(&[], longer_hold_without_sweep, async |env: Arc<TestEnv>, broker: Arc<Private>| {
        let kept_events = keep_events(&env).await;
        let publisher = env.publisher().await;
        let worker = env.worker().await;
        schedule(&env, &publisher, 20, 3 * SECOND).await;
        schedule(&env, &publisher, 20, 14 * SECOND).await;
        // The first events behind the block are still taken, and rabbitmqctl may take long on a busy machine.
        let mut held = Vec::new();
        for due_in in [HELD_LONG, 2 * HELD_LONG, 3 * HELD_LONG] {
            held.extend(held_by_the_worker(&env, 20, due_in).await);
        }
        meanwhile(|| broker.ctl(&["set_vm_memory_high_watermark", "0.00001"]));
        assert_nothing_is_scheduled(&env, &publisher).await;
        // Consuming is not blocked, and closing needs no publishing.
        assert_closed(&env, &held).await;
        wait_for("an event that waits", async || {
            env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await > 0
        })
        .await;
        meanwhile(|| broker.ctl(&["set_vm_memory_high_watermark", "0.6"]));
        wait_until_scheduling_works(&env, &publisher).await;
        assert_all_closed_and_announced(&env, &kept_events).await;
        env.assert_closed_by_alarms().await;
        worker.stop().await;
        env.reconnected().await.assert_nothing_left_undone().await;
    });
}

#[test]
fn frozen_broker_loses_no_alarm() {
    // Short enough that the worker gives its session up.
    let adjust = |settings: &mut Settings| {
        alarms_alone(settings);
        settings.amqp.heartbeat = Settings::defaults().amqp.heartbeat;
    };
    on_private_broker_with(&[], adjust, async |env: Arc<TestEnv>, broker: Arc<Private>| {
        let publisher = env.publisher().await;
        let worker = env.worker().await;
        let kept_events = keep_events(&env.reconnected().await).await;
        schedule(&env, &publisher, 20, 12 * SECOND).await;
        let held = held_by_the_worker(&env, 20, 3 * SECOND).await;
        broker.halt();
        assert_nothing_is_scheduled(&env, &publisher).await;
        assert_closed(&env, &held).await;
        broker.go_on();
        wait_until_scheduling_works(&env, &publisher).await;
        assert_all_closed_and_announced(&env, &kept_events).await;
        env.assert_closed_by_alarms().await;
        worker.stop().await;
        env.reconnected().await.assert_nothing_left_undone().await;
    });
}

#[test]
fn dead_channels_are_reopened() {
    on_private_broker_with(&[], alarms_alone, async |env: Arc<TestEnv>, broker: Arc<Private>| {
        let publisher = env.publisher().await;
        let worker = env.worker().await;
        let kept_events = keep_events(&env.reconnected().await).await;
        for _ in 0..3 {
            schedule(&env, &publisher, 10, 6 * SECOND).await;
            let held = env.orders(10, 2 * SECOND).await;
            env.reconnected().await.deliver(&held).await;
            meanwhile(|| broker.ctl(&["eval", "[exit(Channel, kill) || Channel <- rabbit_channel:list()], ok."]));
            wait_until_scheduling_works(&env, &publisher).await;
            assert_closed(&env, &held).await;
        }
        assert_all_closed_and_announced(&env, &kept_events).await;
        env.assert_closed_by_alarms().await;
        worker.stop().await;
        env.reconnected().await.assert_nothing_left_undone().await;
    });
}

#[test]
fn revoked_rights_lose_no_alarm() {
    on_private_broker_with(&[], alarms_alone, async |env: Arc<TestEnv>, broker: Arc<Private>| {
        let kept_events = keep_events(&env).await;
        let publisher = env.publisher().await;
        let worker = env.worker().await;
        schedule(&env, &publisher, 20, 8 * SECOND).await;
        let held = held_by_the_worker(&env, 20, 3 * SECOND).await;
        meanwhile(|| {
            broker.ctl(&["clear_permissions", "guest"]);
            broker.ctl(&["close_all_connections", "for the test"]);
        });
        assert_nothing_is_scheduled(&env, &publisher).await;
        assert_closed(&env, &held).await;
        meanwhile(|| {
            broker.change_password("another");
            broker.ctl(&["close_all_connections", "for the test"]);
        });
        assert_nothing_is_scheduled(&env, &publisher).await;
        meanwhile(|| {
            broker.change_password(&broker.recorded("PASSWORD"));
            broker.ctl(&["set_permissions", "guest", ".*", ".*", ".*"]);
        });
        wait_until_scheduling_works(&env, &publisher).await;
        assert_all_closed_and_announced(&env, &kept_events).await;
        env.assert_closed_by_alarms().await;
        worker.stop().await;
        env.reconnected().await.assert_nothing_left_undone().await;
    });
}

/// Breaks the network between the broker and both worker and publisher, and repairs it; the broker runs all the time.
async fn survive(env: &TestEnv, break_network: impl FnOnce(&Proxy)) {
    let network = Proxy::before(&env.settings.amqp.url).await;
    let settings = with_broker_behind(env, &network);
    let publisher = settings.publisher().connect().await.unwrap();
    let worker = RunningWorker::start(settings).await;
    schedule(env, &publisher, 20, 2 * SECOND).await;
    schedule(env, &publisher, 20, 12 * SECOND).await;
    let held = held_by_the_worker(env, 20, 3 * SECOND).await;
    // An alarm that has left the queue may still be in the network. The close of a later one shows that it has arrived.
    let later = env.order(Duration::ZERO).await;
    env.deliver([&later]).await;
    assert_closed(env, &[later]).await;
    break_network(&network);
    assert_nothing_is_scheduled(env, &publisher).await;
    assert_closed(env, &held).await;
    network.restore();
    wait_until_scheduling_works(env, &publisher).await;
    schedule(env, &publisher, 20, 6 * SECOND).await;
    assert_all_closed_by_alarms(env).await;
    // The broker redelivers unacknowledged alarms once it has given up the old connections. Three remain: that of the
    // session, that of the worker's publishing, and that of the publisher.
    wait_for("the end of the old connections", async || network.open() <= 3).await;
    let sentinel = env.order(SECOND).await;
    env.deliver([&sentinel]).await;
    assert_closed(env, &[sentinel]).await;
    worker.stop().await;
    env.assert_nothing_left_undone().await;
}

#[test]
fn cut_network_loses_no_alarm() {
    TestEnv::builder().settings(short_timeouts_without_sweep).run(async |env| survive(&env, Proxy::cut).await);
}

#[test]
fn vanished_broker_host_loses_no_alarm() {
    TestEnv::builder().settings(short_timeouts_without_sweep).run(async |env| survive(&env, Proxy::stall).await);
}

#[test]
fn stall_towards_broker_loses_no_alarm() {
    TestEnv::builder().settings(short_timeouts_without_sweep).run(async |env| {
        survive(&env, |network| network.stall_one_way(Direction::ToServer)).await;
    });
}

#[test]
fn stall_from_broker_loses_no_alarm() {
    TestEnv::builder().settings(short_timeouts_without_sweep).run(async |env| {
        survive(&env, |network| network.stall_one_way(Direction::ToClient)).await;
    });
}

#[test]
fn repeatedly_broken_connections_lose_no_alarm() {
    TestEnv::builder().settings(short_timeouts_without_sweep).run(async |env| {
        let network = Proxy::before(&env.settings.amqp.url).await;
        let settings = with_broker_behind(&env, &network);
        let publisher = settings.publisher().connect().await.unwrap();
        let worker = RunningWorker::start(settings).await;
        for round in 0..6 {
            schedule(&env, &publisher, 10, 2 * SECOND).await;
            schedule(&env, &publisher, 10, 7 * SECOND).await;
            let accepted = network.accepted();
            if round % 2 == 0 {
                network.reset_connections()
            } else {
                network.half_close()
            }
            wait_for("another connection", async || network.accepted() > accepted).await;
            wait_until_scheduling_works(&env, &publisher).await;
        }
        assert_all_closed_by_alarms(&env).await;
        worker.stop().await;
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn slow_network_loses_no_alarm() {
    // The delays are far below it; a machine that stalls for two seconds would end a connection.
    let long_heartbeats = |settings: &mut Settings| {
        short_timeouts_without_sweep(settings);
        settings.amqp.heartbeat = 10 * SECOND;
    };
    TestEnv::builder().settings(long_heartbeats).run(async |env| {
        let network = Proxy::before(&env.settings.amqp.url).await;
        let settings = with_broker_behind(&env, &network);
        let publisher = settings.publisher().connect().await.unwrap();
        network.delay(Direction::ToServer, SECOND / 20);
        network.delay(Direction::ToClient, SECOND / 20);
        let worker = RunningWorker::start(settings).await;
        let accepted = network.accepted();
        schedule(&env, &publisher, 20, 4 * SECOND).await;
        schedule(&env, &publisher, 20, 8 * SECOND).await;
        assert_all_closed_by_alarms(&env).await;
        // The worker opens one to publish.
        assert!(network.accepted() <= accepted + 1, "no connection was given up");
        worker.stop().await;
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn incompatible_queue_is_refused_until_fixed() {
    TestEnv::builder().settings(short_timeouts_without_sweep).run(async |env| {
        let worker = env.worker().await;
        let held = held_by_the_worker(&env, 10, 3 * SECOND).await;
        let queue = env.names().timeout();
        // The worker declares it again at once; the first declaration wins.
        wait_for("a queue of another type", async || {
            let channel = env.broker().create_channel().await.unwrap();
            channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
            let options = QueueDeclareOptions { durable: true, ..Default::default() };
            channel.queue_declare(queue.as_str().into(), options, FieldTable::default()).await.is_ok()
        })
        .await;
        assert_closed(&env, &held).await;
        assert!(!is_consumed(&env, &queue).await, "a queue without our guarantees is not consumed");
        env.channel().queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        wait_for("the queue, consumed again", async || is_consumed(&env, &queue).await).await;
        let later = env.orders(10, SECOND).await;
        env.deliver(&later).await;
        assert_all_closed_by_alarms(&env).await;
        worker.stop().await;
        env.assert_nothing_left_undone().await;
    });
}
