//! A broker that is there and no good: blocked, cut off, half open, slow, short of its objects or of our rights. Callers
//! of the publisher hear "not scheduled" in bounded time, the worker comes back by itself, and nothing is lost.

use std::sync::Arc;
use std::time::Duration;

use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use order_timeout::{Publisher, Settings};

use crate::support::away::{
    COMING_BACK, HELD_LONG, assert_all_closed_and_heard, assert_nothing_is_scheduled, be_impatient, behind,
    held_by_the_worker, hold_long, is_consumed, keep_events, meanwhile, on_private_broker_with, schedule,
    wait_until_scheduling_works,
};
use crate::support::private::Private;
use crate::support::proxy::{Direction, Proxy};
use crate::support::{Order, RunningWorker, Stage, alarms_alone, on_stage, wait_for, wait_within};

const SECOND: Duration = Duration::from_secs(1);

fn impatient_and_without_the_sweep(settings: &mut Settings) {
    be_impatient(settings);
    alarms_alone(settings);
}

/// Insists that each of these is closed, for that takes no broker.
async fn assert_closed(stage: &Stage, held: &[Order]) {
    for order in held {
        wait_for("a held order's close", async || stage.status(order).await == "closed").await;
    }
}

/// Insists that everything was closed once, by its alarm, and announced.
async fn assert_all_closed_by_alarms(stage: &Stage) {
    let unpaid = async || stage.count("SELECT count(*) FROM orders WHERE status = 'unpaid'").await;
    wait_within(COMING_BACK, "every order's close", async || unpaid().await == 0).await;
    let unsent = async || stage.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await;
    wait_within(COMING_BACK, "every event sent", async || unsent().await == 0).await;
    assert_eq!(stage.parked().await, []);
    stage.assert_closed_by_alarms().await;
    stage.assert_ledger().await;
}

#[test]
fn a_broker_that_blocks_publishers_for_want_of_memory_costs_no_alarm() {
    let held_long_and_without_the_sweep = |settings: &mut Settings| {
        alarms_alone(settings);
        hold_long(settings);
    };
    on_private_broker_with(&[], held_long_and_without_the_sweep, async |stage: Arc<Stage>, broker: Arc<Private>| {
        let kept_events = keep_events(&stage).await;
        let publisher = stage.publisher().await;
        let worker = stage.worker().await;
        schedule(&stage, &publisher, 20, 3 * SECOND).await;
        schedule(&stage, &publisher, 20, 14 * SECOND).await;
        let held = held_by_the_worker(&stage, 20, HELD_LONG).await;
        meanwhile(|| broker.ctl(&["set_vm_memory_high_watermark", "0.00001"]));
        assert_nothing_is_scheduled(&stage, &publisher).await;
        // Consuming is not blocked, and closing takes no publishing.
        assert_closed(&stage, &held).await;
        wait_for("an event that waits", async || {
            stage.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await > 0
        })
        .await;
        meanwhile(|| broker.ctl(&["set_vm_memory_high_watermark", "0.6"]));
        wait_until_scheduling_works(&stage, &publisher).await;
        assert_all_closed_and_heard(&stage, &kept_events).await;
        stage.assert_closed_by_alarms().await;
        worker.stop().await;
        stage.reconnected().await.assert_nothing_left_undone().await;
    });
}

#[test]
fn a_broker_that_stands_still_costs_no_alarm() {
    on_private_broker_with(&[], alarms_alone, async |stage: Arc<Stage>, broker: Arc<Private>| {
        let publisher = stage.publisher().await;
        let worker = stage.worker().await;
        let kept_events = keep_events(&stage.reconnected().await).await;
        schedule(&stage, &publisher, 20, 12 * SECOND).await;
        let held = held_by_the_worker(&stage, 20, 3 * SECOND).await;
        broker.halt();
        assert_nothing_is_scheduled(&stage, &publisher).await;
        assert_closed(&stage, &held).await;
        broker.go_on();
        wait_until_scheduling_works(&stage, &publisher).await;
        assert_all_closed_and_heard(&stage, &kept_events).await;
        stage.assert_closed_by_alarms().await;
        worker.stop().await;
        stage.reconnected().await.assert_nothing_left_undone().await;
    });
}

#[test]
fn channels_that_die_in_the_broker_are_opened_again() {
    on_private_broker_with(&[], alarms_alone, async |stage: Arc<Stage>, broker: Arc<Private>| {
        let publisher = stage.publisher().await;
        let worker = stage.worker().await;
        let kept_events = keep_events(&stage.reconnected().await).await;
        for _ in 0..3 {
            schedule(&stage, &publisher, 10, 6 * SECOND).await;
            let held = stage.orders(10, 2 * SECOND).await;
            stage.reconnected().await.deliver(&held).await;
            meanwhile(|| broker.ctl(&["eval", "[exit(Channel, kill) || Channel <- rabbit_channel:list()], ok."]));
            wait_until_scheduling_works(&stage, &publisher).await;
            assert_closed(&stage, &held).await;
        }
        assert_all_closed_and_heard(&stage, &kept_events).await;
        stage.assert_closed_by_alarms().await;
        worker.stop().await;
        stage.reconnected().await.assert_nothing_left_undone().await;
    });
}

#[test]
fn rights_that_are_taken_away_and_given_back_cost_no_alarm() {
    on_private_broker_with(&[], alarms_alone, async |stage: Arc<Stage>, broker: Arc<Private>| {
        let kept_events = keep_events(&stage).await;
        let publisher = stage.publisher().await;
        let worker = stage.worker().await;
        schedule(&stage, &publisher, 20, 8 * SECOND).await;
        let held = held_by_the_worker(&stage, 20, 3 * SECOND).await;
        meanwhile(|| {
            broker.ctl(&["clear_permissions", "guest"]);
            broker.ctl(&["close_all_connections", "for the test"]);
        });
        assert_nothing_is_scheduled(&stage, &publisher).await;
        assert_closed(&stage, &held).await;
        meanwhile(|| {
            broker.change_password("another");
            broker.ctl(&["close_all_connections", "for the test"]);
        });
        assert_nothing_is_scheduled(&stage, &publisher).await;
        meanwhile(|| {
            broker.change_password(&broker.recorded("PASSWORD"));
            broker.ctl(&["set_permissions", "guest", ".*", ".*", ".*"]);
        });
        wait_until_scheduling_works(&stage, &publisher).await;
        assert_all_closed_and_heard(&stage, &kept_events).await;
        stage.assert_closed_by_alarms().await;
        worker.stop().await;
        stage.reconnected().await.assert_nothing_left_undone().await;
    });
}

/// Worker and publisher behind a network that breaks and is mended; the broker is well all the time.
async fn survive(stage: &Stage, go_wrong: impl FnOnce(&Proxy)) {
    let network = Proxy::before(&stage.settings.amqp.url).await;
    let settings = behind(stage, &network);
    let publisher = Publisher::connect(&settings).await.unwrap();
    let worker = RunningWorker::start(settings).await;
    schedule(stage, &publisher, 20, 2 * SECOND).await;
    schedule(stage, &publisher, 20, 12 * SECOND).await;
    let held = held_by_the_worker(stage, 20, 3 * SECOND).await;
    // Out of the queue, an alarm may still be in the network. What came behind it and was closed says that it has arrived.
    let behind_them = stage.order(Duration::ZERO).await;
    stage.deliver([&behind_them]).await;
    assert_closed(stage, &[behind_them]).await;
    go_wrong(&network);
    assert_nothing_is_scheduled(stage, &publisher).await;
    assert_closed(stage, &held).await;
    network.restore();
    wait_until_scheduling_works(stage, &publisher).await;
    schedule(stage, &publisher, 20, 6 * SECOND).await;
    assert_all_closed_by_alarms(stage).await;
    // The broker delivers again what was not acknowledged once it has given up the old connections: then there are
    // those of the session, of the worker's publishing, and of the publisher.
    wait_for("the end of the old connections", async || network.open() <= 3).await;
    let witness = stage.order(SECOND).await;
    stage.deliver([&witness]).await;
    assert_closed(stage, &[witness]).await;
    worker.stop().await;
    stage.assert_nothing_left_undone().await;
}

#[test]
fn a_network_that_is_cut_costs_no_alarm() {
    on_stage(impatient_and_without_the_sweep, async |stage| survive(&stage, Proxy::cut).await);
}

#[test]
fn a_broker_host_that_has_vanished_costs_no_alarm() {
    on_stage(impatient_and_without_the_sweep, async |stage| survive(&stage, Proxy::stall).await);
}

#[test]
fn a_network_that_carries_nothing_to_the_broker_costs_no_alarm() {
    on_stage(impatient_and_without_the_sweep, async |stage| {
        survive(&stage, |network| network.stall_one_way(Direction::ToServer)).await;
    });
}

#[test]
fn a_network_that_carries_nothing_from_the_broker_costs_no_alarm() {
    on_stage(impatient_and_without_the_sweep, async |stage| {
        survive(&stage, |network| network.stall_one_way(Direction::ToClient)).await;
    });
}

#[test]
fn connections_that_are_reset_or_half_closed_again_and_again_cost_no_alarm() {
    on_stage(impatient_and_without_the_sweep, async |stage| {
        let network = Proxy::before(&stage.settings.amqp.url).await;
        let settings = behind(&stage, &network);
        let publisher = Publisher::connect(&settings).await.unwrap();
        let worker = RunningWorker::start(settings).await;
        for round in 0..6 {
            schedule(&stage, &publisher, 10, 2 * SECOND).await;
            schedule(&stage, &publisher, 10, 7 * SECOND).await;
            let accepted = network.accepted();
            if round % 2 == 0 {
                network.reset_connections()
            } else {
                network.half_close()
            }
            wait_for("another connection", async || network.accepted() > accepted).await;
            wait_until_scheduling_works(&stage, &publisher).await;
        }
        assert_all_closed_by_alarms(&stage).await;
        worker.stop().await;
        stage.assert_nothing_left_undone().await;
    });
}

#[test]
fn a_slow_network_costs_no_alarm() {
    on_stage(impatient_and_without_the_sweep, async |stage| {
        let network = Proxy::before(&stage.settings.amqp.url).await;
        let settings = behind(&stage, &network);
        let publisher = Publisher::connect(&settings).await.unwrap();
        network.delay(Direction::ToServer, SECOND / 20);
        network.delay(Direction::ToClient, SECOND / 20);
        let worker = RunningWorker::start(settings).await;
        let accepted = network.accepted();
        schedule(&stage, &publisher, 20, 4 * SECOND).await;
        schedule(&stage, &publisher, 20, 8 * SECOND).await;
        assert_all_closed_by_alarms(&stage).await;
        // One of them is the worker's for publishing, and with one it tests once whether alternate exchanges are set.
        assert!(network.accepted() <= accepted + 2, "no connection was given up");
        worker.stop().await;
        stage.assert_nothing_left_undone().await;
    });
}

#[test]
fn a_queue_recreated_as_something_else_is_refused_until_it_is_mended() {
    on_stage(impatient_and_without_the_sweep, async |stage| {
        let worker = stage.worker().await;
        let held = held_by_the_worker(&stage, 10, 3 * SECOND).await;
        let queue = stage.names().timeout();
        // The worker declares it again at once; who is first wins.
        wait_for("a queue of another type", async || {
            let channel = stage.broker.create_channel().await.unwrap();
            channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
            let options = QueueDeclareOptions { durable: true, ..Default::default() };
            channel.queue_declare(queue.as_str().into(), options, FieldTable::default()).await.is_ok()
        })
        .await;
        assert_closed(&stage, &held).await;
        assert!(!is_consumed(&stage, &queue).await, "a queue without the promises of ours is not worked on");
        stage.channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        wait_within(COMING_BACK, "the queue, consumed again", async || is_consumed(&stage, &queue).await).await;
        let later = stage.orders(10, SECOND).await;
        stage.deliver(&later).await;
        assert_all_closed_by_alarms(&stage).await;
        worker.stop().await;
        stage.assert_nothing_left_undone().await;
    });
}
