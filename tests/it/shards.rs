//! Several processing queues: due alarms are distributed over them, each to one; workers consume some or all of them;
//! changing their number in any direction loses nothing.

use std::time::Duration;

use lapin::BasicProperties;
use order_timeout::Settings;
use order_timeout_amqp::topology::{DUE_KEY, TopologyError};
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::away::on_private_broker_with;
use order_timeout_testkit::{Order, RunningWorker, TestEnv, wait_for};
use uuid::Uuid;

/// The exchange type ships with RabbitMQ but is not enabled by default.
const WITH_THE_TYPE: [&str; 2] = ["--plugin", "rabbitmq_consistent_hash_exchange"];
const SHARDS: u8 = 3;

fn sharded(settings: &mut Settings) {
    settings.worker.shards = SHARDS;
}

fn on_shards<F: Future<Output = ()> + Send + 'static>(
    test: impl FnOnce(std::sync::Arc<TestEnv>) -> F + Send + 'static,
) {
    on_private_broker_with(&WITH_THE_TYPE, sharded, |env, _| test(env));
}

/// Publishes like a dead letter, with the message id that its publisher gave it.
async fn deliver(env: &TestEnv, orders: &[Order]) {
    let due = env.names().due();
    for order in orders {
        let id = Uuid::now_v7().to_string();
        let properties = BasicProperties::default().with_delivery_mode(2).with_message_id(id.as_str().into());
        env.publish_raw(&due, DUE_KEY, &order.body(), properties).await;
    }
}

async fn depths(env: &TestEnv) -> Vec<u32> {
    let mut depths = Vec::new();
    for shard in 0..SHARDS {
        depths.push(env.depth(&env.names().shard(shard)).await);
    }
    depths
}

async fn worker_taking(env: &TestEnv, shards: &[u8]) -> RunningWorker {
    let mut settings = env.settings.clone();
    settings.worker.take_shards = shards.to_vec();
    RunningWorker::start(settings).await
}

async fn declare(env: &TestEnv, shards: u8) {
    let mut settings = env.settings.clone();
    settings.worker.shards = shards;
    settings.topology().declare(env.broker()).await.unwrap();
}

#[test]
fn alarms_spread_over_all_shards() {
    on_shards(async |env| {
        let orders = env.orders(300, Duration::from_secs(2)).await;
        let publisher = env.publisher().await;
        // Each deadline is taken when its alarm is sent: on a stalled machine the row's would be outside the lane's
        // tolerance of 250 ms.
        for order in &orders {
            let deadline = Timestamp::now_by_local_clock() + Duration::from_secs(2);
            publisher.schedule(order.order_id(), deadline).await.unwrap();
        }
        let all = async || {
            let (depths, inbox) = (depths(&env).await, env.depth(&env.names().schedule()).await);
            (depths.iter().sum::<u32>(), depths, inbox)
        };
        // What a stall put outside the tolerance nevertheless is in the inbox, which no worker consumes yet.
        wait_for("all alarms handed over", async || matches!(all().await, (over, _, inbox) if over + inbox == 300))
            .await;
        let (over, depths, inbox) = all().await;
        assert!(over >= 200, "{inbox} of 300 alarms took no lane");
        let fair = over / u32::from(SHARDS);
        assert!(
            depths.iter().all(|depth| (fair * 3 / 5..fair * 7 / 5).contains(depth)),
            "distributed unevenly: {depths:?}"
        );
        let worker = env.worker().await;
        wait_for("every order's close", async || env.closed().await == 300).await;
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
        let by_alarm = env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await;
        assert_eq!(by_alarm, 300);
    });
}

#[test]
fn workers_on_different_shards_close_everything() {
    on_shards(async |env| {
        let publisher = env.publisher().await;
        let (one, others) = (worker_taking(&env, &[0]).await, worker_taking(&env, &[2, 1]).await);
        let orders = env.orders(100, Duration::from_secs(2)).await;
        let alarms = orders.iter().map(|order| (order.order_id(), order.deadline));
        assert_eq!(publisher.schedule_all(alarms).await, Ok(()));
        // Through the inbox and the wheel, which each worker serves.
        let later = env.orders(100, Duration::from_millis(4_500)).await;
        let alarms = later.iter().map(|order| (order.order_id(), order.deadline));
        assert_eq!(publisher.schedule_all(alarms).await, Ok(()));
        wait_for("every order's close", async || env.closed().await == 200).await;
        others.stop().await;
        one.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 200);
    });
}

#[test]
fn unconsumed_shard_delays_but_loses_nothing() {
    let settings = |settings: &mut Settings| {
        sharded(settings);
        settings.sweep.grace = Duration::from_millis(500);
    };
    on_private_broker_with(&WITH_THE_TYPE, settings, async |env, _| {
        let worker = worker_taking(&env, &[1]).await;
        let orders = env.orders(60, Duration::from_secs(1)).await;
        deliver(&env, &orders).await;
        wait_for("every order's close", async || env.closed().await == 60).await;
        worker.stop().await;
        env.assert_ledger().await;
        let swept = env.count("SELECT count(*) FROM orders WHERE closed_by = 'sweep'").await;
        assert!((1..60).contains(&swept), "{swept} of 60 by the sweep, which takes two of three shards");
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn changing_shard_count_keeps_single_route() {
    on_shards(async |env| {
        for shards in [1, SHARDS, 2, SHARDS, 1] {
            declare(&env, shards).await;
            let orders = env.orders(90, Duration::ZERO).await;
            deliver(&env, &orders).await;
            let depths = depths(&env).await;
            assert_eq!(depths.iter().sum::<u32>(), 90, "each once with {shards} shards: {depths:?}");
            let filled = depths.iter().filter(|depth| **depth > 0).count();
            assert_eq!(filled, usize::from(shards), "{depths:?}");
            let worker = env.worker().await;
            wait_for("every order's close", async || {
                env.count("SELECT count(*) FROM orders WHERE status = 'unpaid'").await == 0
            })
            .await;
            worker.stop().await;
            env.assert_drained().await;
        }
        env.assert_ledger().await;
    });
}

#[test]
fn missing_exchange_type_names_plugin() {
    on_private_broker_with(
        &[],
        |_| {},
        async |env, _| {
            let mut settings = env.settings.clone();
            sharded(&mut settings);
            let fault = settings.topology().declare(env.broker()).await.unwrap_err();
            assert!(matches!(fault, TopologyError::NoHashExchange { .. }), "{fault:?}");
            let sentence = fault.to_string();
            assert!(sentence.contains("rabbitmq-plugins enable rabbitmq_consistent_hash_exchange"), "{sentence}");
            assert!(!sentence.contains('\n'), "{sentence}");
        },
    );
}
