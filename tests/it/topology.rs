//! The broker's objects are declared once: missing ones are created, differing ones are named and left alone, and an
//! alarm in a lane is in exactly one queue.

use std::collections::BTreeMap;
use std::time::Duration;

use lapin::options::{ExchangeDeclareOptions, ExchangeDeleteOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, ExchangeKind};
use order_timeout::Settings;
use order_timeout::runtime::Worker;
use order_timeout_amqp::envelope::carbon_copy;
use order_timeout_amqp::topology::{self, Argument, DUE_KEY, Queue, Slot, TopologyError};
use order_timeout_core::delay::{Lane, RingSettings};
use order_timeout_core::order::{OrderId, Timestamp};
use order_timeout_testkit::{TestEnv, process, wait_for};
use uuid::Uuid;

/// A lane so long that nothing in it expires during a test.
fn with_a_long_lane(settings: &mut Settings) {
    settings.delay.lanes = vec![Lane::try_from("30m".to_owned()).unwrap()];
    settings.delay.lane_shards = 4;
}

/// With it, an alarm that a busy machine sends seconds late still belongs to its lane.
fn with_the_usual_lead(settings: &mut Settings) {
    let usual = Settings::defaults();
    (settings.delay.lead, settings.delay.rings) = (usual.delay.lead, usual.delay.rings);
    settings.worker.hold_max = usual.worker.hold_max;
}

/// The queues with this prefix after the namespace.
fn queues(env: &TestEnv, beginning: &str) -> Vec<Queue> {
    let beginning = format!("{}.{beginning}", env.settings.namespace);
    let slots = env.settings.slots();
    let all = env.settings.topology().queues.into_iter().chain(slots.all().map(|slot| slot.queue));
    all.filter(|queue| queue.name.starts_with(&beginning)).collect()
}

async fn delete_queue(env: &TestEnv, name: &str) {
    env.channel().queue_delete(name.into(), QueueDeleteOptions::default()).await.unwrap();
}

async fn declare_queue(env: &TestEnv, name: &str, arguments: &BTreeMap<&'static str, Argument>) {
    let mut table = FieldTable::default();
    for (key, value) in arguments {
        let value = match value {
            Argument::Text(text) => AMQPValue::LongString(text.as_str().into()),
            Argument::Number(number) => AMQPValue::LongLongInt(*number),
        };
        table.insert((*key).into(), value);
    }
    let options = QueueDeclareOptions { durable: true, ..Default::default() };
    env.channel().queue_declare(name.into(), options, table).await.unwrap();
}

/// Everything, and the slots of the wheel, as a worker declares them when they are needed.
async fn declare(env: &TestEnv) -> Result<(), TopologyError> {
    env.settings.topology().declare(env.broker()).await?;
    let slots: Vec<Slot> = env.settings.slots().all().collect();
    topology::declare_slots(&env.names(), &slots, env.broker()).await.fault.map_or(Ok(()), Err)
}

/// Leaves a message in this queue.
async fn leave_a_message_in(env: &TestEnv, queue: &str) {
    // The default exchange routes to every queue by its name.
    env.publish_raw("", queue, b"kept", BasicProperties::default().with_delivery_mode(2)).await;
    wait_for("the message in its queue", async || env.depth(queue).await == 1).await;
}

/// The error says what differs and how to migrate.
fn assert_tells_how_to_move_over(sentence: &str, object: &str, difference: &str) {
    let removal = if object.starts_with("exchange") {
        "`rabbitmqadmin delete exchange`"
    } else {
        "let it run empty, delete it with `rabbitmqctl delete_queue "
    };
    for part in [object, difference, "namespace", removal, "order-timeout setup"] {
        assert!(sentence.contains(part), "{sentence:?} lacks {part:?}");
    }
    assert!(!sentence.contains('\n'), "{sentence:?} is more than a line");
}

#[test]
fn declaring_twice_changes_nothing() {
    TestEnv::builder().settings(with_a_long_lane).run(async |env| {
        let lane = &queues(&env, "delay.")[0].name;
        leave_a_message_in(&env, lane).await;
        declare(&env).await.unwrap();
        declare(&env).await.unwrap();
        assert_eq!(env.depth(lane).await, 1, "what waited still waits");
    });
}

#[test]
fn differing_queue_argument_is_named() {
    TestEnv::builder().settings(with_a_long_lane).run(async |env| {
        env.declare_slots().await;
        let everything = env.settings.topology().queues;
        let one_of = |beginning: &str| queues(&env, beginning).remove(0);
        let mut checked = Vec::new();
        for queue in [
            one_of("delay."),
            one_of("wheel.1s-12."),
            one_of("wheel.5s-12."),
            one_of("timeout"),
            one_of("schedule"),
            one_of("parked"),
        ] {
            // Each argument in turn is changed.
            for key in queue.arguments.keys() {
                let mut arguments = queue.arguments.clone();
                match *key {
                    "x-queue-type" => {
                        arguments.insert(key, Argument::Text("classic".into()));
                        // Arguments that a classic queue does not support.
                        arguments.retain(|key, _| !["x-dead-letter-strategy", "x-delivery-limit"].contains(key));
                    }
                    "x-delivery-limit" => drop(arguments.insert(key, Argument::Number(7))),
                    "x-message-ttl" => drop(arguments.insert(key, Argument::Number(7_200_000))),
                    "x-overflow" => drop(arguments.insert(key, Argument::Text("drop-head".into()))),
                    "x-dead-letter-strategy" => drop(arguments.insert(key, Argument::Text("at-most-once".into()))),
                    _ => drop(arguments.insert(key, Argument::Text("elsewhere".into()))),
                }
                delete_queue(&env, &queue.name).await;
                declare_queue(&env, &queue.name, &arguments).await;
                leave_a_message_in(&env, &queue.name).await;

                let fault = declare(&env).await.expect_err(&format!("{} differs in {key}", queue.name));
                assert!(matches!(fault, TopologyError::Differs { .. }), "{} with another {key}: {fault:?}", queue.name);
                assert_tells_how_to_move_over(&fault.to_string(), &format!("{:?}", queue.name), key);
                assert_eq!(env.depth(&queue.name).await, 1, "{} and its message are still there", queue.name);
                checked.push(*key);
            }
            delete_queue(&env, &queue.name).await;
            declare(&env).await.unwrap();
        }
        checked.sort_unstable();
        checked.dedup();
        let mut used: Vec<_> = everything.iter().flat_map(|queue| queue.arguments.keys().copied()).collect();
        used.sort_unstable();
        used.dedup();
        assert_eq!(checked, used, "every argument that is used was once another");
    });
}

#[test]
fn differing_exchange_type_is_named() {
    TestEnv::builder().run(async |env| {
        let (name, events) = (env.names().due(), env.names().events());
        for (exchange, other, now) in
            [(&name, ExchangeKind::Fanout, "'fanout'"), (&events, ExchangeKind::Direct, "'direct'")]
        {
            env.channel().exchange_delete(exchange.as_str().into(), ExchangeDeleteOptions::default()).await.unwrap();
            let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
            env.channel()
                .exchange_declare(exchange.as_str().into(), other.clone(), options, FieldTable::default())
                .await
                .unwrap();

            let fault = declare(&env).await.expect_err("the exchange is of another type");
            assert!(matches!(fault, TopologyError::Differs { .. }), "{fault:?}");
            assert_tells_how_to_move_over(&fault.to_string(), &format!("exchange {exchange:?}"), "'type'");
            assert!(fault.to_string().contains(now), "{fault} does not say what the type is");
            // Re-declaring it with its old arguments succeeds, so it is unchanged.
            let channel = env.broker().create_channel().await.unwrap();
            channel.exchange_declare(exchange.as_str().into(), other, options, FieldTable::default()).await.unwrap();

            env.channel().exchange_delete(exchange.as_str().into(), ExchangeDeleteOptions::default()).await.unwrap();
            declare(&env).await.unwrap();
        }
    });
}

#[test]
fn worker_refuses_differing_queues() {
    TestEnv::builder().settings(with_a_long_lane).run(async |env| {
        let lane = queues(&env, "delay.").remove(0);
        let mut arguments = lane.arguments.clone();
        arguments.insert("x-dead-letter-exchange", Argument::Text("elsewhere".into()));
        delete_queue(&env, &lane.name).await;
        declare_queue(&env, &lane.name, &arguments).await;
        leave_a_message_in(&env, &lane.name).await;

        let mut worker = process::order_timeout(&env.settings);
        // The log also goes to standard error; this test is about the final error.
        worker.args(["--set", "log.filter=off", "worker"]);
        let (code, stdout, stderr) = tokio::task::spawn_blocking(move || process::run(&mut worker)).await.unwrap();
        assert_eq!((code, stdout.as_str()), (1, ""), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert_tells_how_to_move_over(&stderr.replace('\n', ""), &format!("{:?}", lane.name), "x-dead-letter-exchange");
        assert_eq!(env.depth(&lane.name).await, 1, "the message is still there");
    });
}

#[test]
fn lane_duplicates_none_of_thousand_alarms() {
    TestEnv::builder().settings(with_a_long_lane).settings(with_the_usual_lead).run(async |env| {
        let publisher = env.publisher().await;
        let deadline = Timestamp::now_by_local_clock() + Duration::from_secs(30 * 60);
        let alarms = (0..1_000).map(|_| (OrderId::new(Uuid::now_v7().to_string()).unwrap(), deadline));
        assert_eq!(publisher.schedule_all(alarms).await, Ok(()));

        let shards = queues(&env, "delay.30m.");
        assert_eq!(shards.len(), 4);
        wait_for("a thousand messages in the lane", async || depths(&env, &shards).await.iter().sum::<u32>() == 1_000)
            .await;
        let depths = depths(&env, &shards).await;
        // A uniform distribution of a thousand over four deviates from 250 by more than 80 less than once in ten
        // million runs.
        assert!(depths.iter().all(|depth| (170..=330).contains(depth)), "unevenly spread: {depths:?}");
        assert_eq!(env.depth(&env.names().schedule()).await, 0, "none took the other route");
        assert_eq!(env.depth(&env.names().timeout()).await, 0, "none is due");
    });
}

async fn depths(env: &TestEnv, queues: &[Queue]) -> Vec<u32> {
    let mut depths = Vec::new();
    for queue in queues {
        depths.push(env.depth(&queue.name).await);
    }
    depths
}

#[test]
fn plain_lane_key_reaches_one_queue() {
    TestEnv::builder().settings(with_a_long_lane).run(async |env| {
        let properties = BasicProperties::default().with_delivery_mode(2).with_expiration("1790000".into());
        env.publish_raw(&env.names().delay(), "30m", b"from a publisher that does not shard", properties).await;
        let all = env.settings.topology().queues;
        wait_for("the message somewhere", async || depths(&env, &all).await.iter().sum::<u32>() > 0).await;
        let holding: Vec<_> = all.iter().zip(depths(&env, &all).await).filter(|(_, depth)| *depth > 0).collect();
        let shard = &queues(&env, "delay.30m.0")[0];
        assert_eq!(holding, [(shard, 1)]);
    });
}

#[test]
fn starting_worker_declares_missing_queues() {
    TestEnv::builder().run(async |env| {
        let lost = queues(&env, "delay.2s.1").remove(0);
        delete_queue(&env, &lost.name).await;
        let worker = env.worker().await;
        assert_eq!(env.depth(&lost.name).await, 0, "it is there");
        // Mandatory: it would be returned if the queue were not bound.
        let properties = BasicProperties::default().with_delivery_mode(2).with_expiration("600000".into());
        env.publish_raw(&env.names().delay(), "2s.1", b"bound", properties).await;
        wait_for("the message in the new queue", async || env.depth(&lost.name).await == 1).await;
        worker.stop().await;
    });
}

#[test]
fn message_without_expiration_delays_none() {
    TestEnv::builder()
        .settings(|settings| {
            // The finest ring is as short as allowed, because the test waits for all of it.
            settings.delay.rings[0] = RingSettings { unit: Duration::from_millis(500), slots: 16, early: None };
        })
        .run(async |env| {
            let names = env.names();
            env.declare_slots().await;
            let routes = [(names.delay(), "2s.1"), (names.wheel(), "500ms-16.03")];
            for (exchange, key) in &routes {
                // With the key that a slot's dead letters need.
                let mut headers = FieldTable::default();
                let (name, due) = carbon_copy(DUE_KEY.to_owned());
                headers.insert(name.into(), due);
                let foreign = BasicProperties::default().with_delivery_mode(2).with_headers(headers);
                let ours = foreign.clone().with_expiration("100".into());
                env.publish_raw(exchange, key, b"from a publisher that knows no better", foreign).await;
                env.publish_raw(exchange, key, b"ours, behind it", ours).await;
            }
            wait_for("all of them handed on", async || env.depth(&names.timeout()).await == 4).await;
            for queue in ["delay.2s.1", "wheel.500ms-16.03"] {
                assert_eq!(depths(&env, &queues(&env, queue)).await, [0], "{queue}");
            }
        });
}

#[test]
fn worker_refuses_namespace_never_set_up() {
    TestEnv::builder().run(async |env| {
        let mut settings = env.settings.clone();
        settings.namespace.push_str("typo");
        let fault = Worker::start(settings.clone()).await.map(drop).expect_err("nothing is there").to_string();
        for part in [&format!("{:?}", settings.namespace), "order-timeout setup", "correct `namespace`"] {
            assert!(fault.contains(part), "{fault:?} lacks {part:?}");
        }
        // The worker declared none.
        let topology = settings.topology();
        for name in topology.queues.iter().map(|queue| queue.name.as_str()) {
            let channel = env.broker().create_channel().await.unwrap();
            let options = QueueDeclareOptions { passive: true, ..Default::default() };
            let there = channel.queue_declare(name.into(), options, FieldTable::default()).await;
            assert!(there.is_err(), "{name} is there");
        }
    });
}

#[test]
fn worker_restores_all_but_one_queue() {
    TestEnv::builder().run(async |env| {
        let topology = env.settings.topology();
        for queue in topology.queues.iter().filter(|queue| queue.name != env.names().parked()) {
            delete_queue(&env, &queue.name).await;
        }
        let worker = env.worker().await;
        for queue in &topology.queues {
            assert_eq!(env.depth(&queue.name).await, 0, "{} is there", queue.name);
        }
        worker.stop().await;
    });
}

#[test]
fn setup_declares_few_queues() {
    TestEnv::builder().run(async |env| {
        let slots: Vec<String> = queues(&env, "wheel.").into_iter().map(|queue| queue.name).collect();
        assert!(Settings::defaults().topology().queues.len() <= 16);
        // Only the slots that its alarms need come into being.
        let worker = env.worker().await;
        let order = env.order(Duration::from_secs(8)).await;
        env.publisher().await.schedule(order.id.to_string(), order.deadline).await.unwrap();
        wait_for("the close", async || env.status(&order).await == "closed").await;
        assert_eq!(env.depths("wheel.").await.len(), 1, "of {}", slots.len());
        env.assert_closed_by_alarms().await;
        worker.stop().await;
    });
}

#[test]
fn deleted_slot_is_declared_again() {
    TestEnv::builder().run(async |env| {
        env.declare_slots().await;
        for slot in queues(&env, "wheel.") {
            delete_queue(&env, &slot.name).await;
        }
        let worker = env.worker().await;
        let order = env.order(Duration::from_secs(8)).await;
        env.publisher().await.schedule(order.id.to_string(), order.deadline).await.unwrap();
        wait_for("the close", async || env.status(&order).await == "closed").await;
        env.assert_closed_by_alarms().await;
        worker.stop().await;
    });
}
