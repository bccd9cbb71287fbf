//! The publisher: an alarm that resolves is confirmed and in a queue; everything else is an error that says "not
//! scheduled" within bounded time.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lapin::options::QueueDeleteOptions;
use lapin::types::FieldTable;
use order_timeout_amqp::publisher::{ConfirmedPublisher, Outgoing};
use order_timeout_amqp::topology::Binding;
use order_timeout_client::{
    BrokerError, ConnectError, PublishError, Publisher, PublisherBuilder, ScheduleError, ScheduleManyError,
};
use order_timeout_core::delay::Lane;
use order_timeout_core::order::{OrderId, Timestamp};
use order_timeout_core::with_causes;
use order_timeout_testkit::frames::FrameProxy;
use order_timeout_testkit::private::Private;
use order_timeout_testkit::{TIMEOUT, TestEnv, promised, wait_for};
use sqlx::AssertSqlSafe;
use uuid::Uuid;

const SECOND: Duration = Duration::from_secs(1);
/// The time that a busy machine may add to a bound.
const SLACK: Duration = Duration::from_secs(3);

fn fresh_id() -> OrderId {
    OrderId::new(Uuid::now_v7().to_string()).unwrap()
}

fn ahead(delay: Duration) -> Timestamp {
    Timestamp::now_by_local_clock() + delay
}

/// The bindings of one lane.
fn bindings_of(env: &TestEnv, lane: &str) -> Vec<Binding> {
    let (delay, prefix) = (env.names().delay(), format!("{lane}."));
    let topology = env.settings.topology();
    topology.bindings.into_iter().filter(|b| b.exchange == delay && b.routing_key.starts_with(&prefix)).collect()
}

/// Messages in all queues of a lane.
async fn lane_depth(env: &TestEnv, lane: &str) -> usize {
    let mut depth = 0;
    for binding in bindings_of(env, lane) {
        depth += env.depth(binding.destination.name()).await as usize;
    }
    depth
}

async fn unbind(env: &TestEnv, binding: &Binding) {
    let (queue, exchange, key) = (binding.destination.name(), binding.exchange.as_str(), binding.routing_key.as_str());
    env.channel().queue_unbind(queue.into(), exchange.into(), key.into(), FieldTable::default()).await.unwrap();
}

fn lane(name: &str) -> Lane {
    Lane::try_from(name.to_owned()).unwrap()
}

/// Asserts that an error says that nothing was scheduled, and why.
fn assert_says(error: &ScheduleError, why: &str) {
    let text = with_causes(error);
    assert!(text.starts_with("not scheduled: ") && text.contains(why), "{text:?} does not say {why:?}");
}

/// Every type that a publisher needs in its signatures is exported by the client; compiling this is the test.
#[allow(dead_code)]
struct Signatures {
    build: fn(&'static str) -> PublisherBuilder,
    connected: Result<Publisher, ConnectError>,
    scheduled: Result<(), ScheduleError>,
    all_scheduled: Result<usize, ScheduleManyError>,
    why: PublishError,
}

#[test]
fn unroutable_alarm_is_not_scheduled() {
    TestEnv::builder().run(async |env| {
        let publisher = env.publisher().await;
        let inbox = env.names().schedule();
        env.channel().queue_delete(inbox.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        let error = publisher.schedule(fresh_id().as_str(), ahead(60 * SECOND)).await.unwrap_err();
        assert_says(&error, "no queue is bound");
        assert_says(&error, "run `order-timeout setup`");
        // The connection still works: an alarm that reaches a queue is scheduled.
        publisher.schedule(fresh_id().as_str(), ahead(2 * SECOND)).await.unwrap();
        assert_eq!(lane_depth(&env, "2s").await + env.depth(&env.names().timeout()).await as usize, 1);
        env.assert_ledger().await;
    });
}

#[test]
fn publisher_survives_missing_exchange() {
    TestEnv::builder().run(async |env| {
        let publisher = env.publisher().await;
        let delay = env.names().delay();
        env.channel().exchange_delete(delay.as_str().into(), Default::default()).await.unwrap();
        let error = publisher.schedule(fresh_id().as_str(), ahead(2 * SECOND)).await.unwrap_err();
        assert_says(&error, "NOT_FOUND");
        publisher.schedule(fresh_id().as_str(), ahead(60 * SECOND)).await.unwrap();
        assert_eq!(env.depth(&env.names().schedule()).await, 1);
        env.assert_ledger().await;
    });
}

#[test]
fn connecting_reports_namespace_never_set_up() {
    TestEnv::builder().run(async |env| {
        let mut settings = env.settings.clone();
        settings.namespace.push_str("-elsewhere");
        let fault = settings.publisher().connect().await.unwrap_err();
        assert!(matches!(fault, ConnectError::Broker(BrokerError::Refused(_))), "{fault:?}");
        let text = fault.to_string();
        assert!(text.contains(&settings.namespace) && text.contains("order-timeout setup"), "{text}");
        env.assert_ledger().await;
    });
}

#[test]
fn pipelined_publishing_reports_exactly_unroutable_alarms() {
    TestEnv::builder()
        .settings(|settings| {
            // A tolerance of a second, so that the last alarm still belongs to the lane.
            settings.delay.lead = 2 * SECOND;
            settings.worker.hold_max = 5 * SECOND;
            settings.delay.lanes = vec![lane("40s"), lane("90s")];
            settings.delay.rings[1].early = Some(SECOND);
        })
        .run(async |env| {
            for binding in bindings_of(&env, "90s") {
                unbind(&env, &binding).await;
            }
            let publisher = env.publisher().await;
            let mut scheduled_before = 0;
            for round in 0..6_usize {
                let now = Timestamp::now_by_local_clock();
                let alarms: Vec<(OrderId, Timestamp, bool)> = (0..2_000)
                    .map(|index| {
                        // Few, then half, then most of them; at random, so that neighbours differ.
                        let bound = fastrand::usize(0..100) < [98, 50, 2][round % 3] || index == 0;
                        let bound = bound && index != 1;
                        (fresh_id(), now + if bound { 40 * SECOND } else { 90 * SECOND }, bound)
                    })
                    .collect();
                let error = publisher
                    .schedule_all(alarms.iter().map(|(id, deadline, _)| (id.clone(), *deadline)))
                    .await
                    .expect_err("some of them reach no queue");
                let unroutable: BTreeSet<&str> = alarms.iter().filter(|a| !a.2).map(|a| a.0.as_str()).collect();
                let failed: BTreeSet<&str> = error.failed.iter().map(|(id, _)| id.as_str()).collect();
                assert_eq!(failed, unroutable, "exactly the unroutable ones");
                assert_eq!(error.failed.len(), unroutable.len(), "each of them once");
                assert_eq!(error.scheduled, 2_000 - unroutable.len());
                for (_, why) in &error.failed {
                    assert!(matches!(why, ScheduleError::Publish(PublishError::Unroutable(_))), "{why}");
                }
                let text = error.to_string();
                assert!(text.starts_with(&format!("{} of 2000 alarms not scheduled", unroutable.len())), "{text}");
                scheduled_before += error.scheduled;
                let all_there = async || lane_depth(&env, "40s").await == scheduled_before;
                wait_for("what is said to be scheduled is in the queues", all_there).await;
            }
            env.assert_ledger().await;
        });
}

#[test]
fn invalid_order_ids_and_deadlines_are_rejected() {
    TestEnv::builder().settings(|settings| settings.delay.max_delay = 3_600 * SECOND).run(async |env| {
        let publisher = env.publisher().await;
        let minute = ahead(60 * SECOND);
        assert_says(&publisher.schedule("", minute).await.unwrap_err(), "the order id is empty");
        assert_says(&publisher.schedule("x".repeat(201), minute).await.unwrap_err(), "201 bytes");
        assert_says(&publisher.schedule("a\nb", minute).await.unwrap_err(), "control character");
        let error = publisher.schedule("1", ahead(3_601 * SECOND)).await.unwrap_err();
        assert_eq!(error, ScheduleError::TooFar);
        assert_says(&error, "delay.max_delay");
        let far = publisher.schedule("1", Timestamp::from_unix_micros(i64::MAX)).await.unwrap_err();
        assert_eq!(far, ScheduleError::TooFar);

        // Among others it is the only one that fails.
        let (bad, good) = (fresh_id(), fresh_id());
        let alarms = [(good, minute), (bad.clone(), ahead(7_200 * SECOND))];
        let error = publisher.schedule_all(alarms).await.unwrap_err();
        assert_eq!((error.scheduled, error.failed), (1, vec![(bad.to_string(), ScheduleError::TooFar)]));
        assert_eq!(env.depth(&env.names().schedule()).await, 1);
        assert_eq!(publisher.schedule_all(Vec::<(OrderId, Timestamp)>::new()).await, Ok(()));
        env.assert_ledger().await;
    });
}

#[test]
fn past_deadline_is_scheduled_and_closed() {
    TestEnv::builder().run(async |env| {
        let publisher = env.publisher().await;
        let order = env.order(Duration::ZERO).await;
        publisher.schedule(order.id.to_string(), order.deadline - 60 * SECOND).await.unwrap();
        let worker = env.worker().await;
        wait_for("the close", async || env.status(&order).await == "closed").await;
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn hundred_concurrent_tasks_schedule_all_alarms() {
    TestEnv::builder().run(async |env| {
        let publisher = env.publisher().await;
        let tasks: Vec<_> = (0..100)
            .map(|_| {
                let publisher = publisher.clone();
                tokio::spawn(async move { publisher.schedule(fresh_id().as_str(), ahead(60 * SECOND)).await })
            })
            .collect();
        for task in tasks {
            task.await.unwrap().unwrap();
        }
        wait_for("all in the inbox", async || env.depth(&env.names().schedule()).await == 100).await;
        env.assert_ledger().await;
    });
}

#[test]
fn lane_never_duplicates_messages() {
    TestEnv::builder()
        .settings(|settings| {
            settings.delay.lanes = vec![lane("40s")];
            settings.delay.lane_shards = 4;
            settings.delay.lead = 2 * SECOND;
            settings.worker.hold_max = 5 * SECOND;
        })
        .run(async |env| {
            let publisher = env.publisher().await;
            let deadline = ahead(40 * SECOND);
            publisher.schedule_all((0..1_000).map(|_| (fresh_id(), deadline))).await.unwrap();
            wait_for("all in the lane", async || lane_depth(&env, "40s").await == 1_000).await;
            for binding in bindings_of(&env, "40s") {
                let depth = env.depth(binding.destination.name()).await;
                assert!((150..350).contains(&depth), "{depth} of 1 000 in {}, one of four", binding.destination.name());
            }
            env.assert_ledger().await;
        });
}

/// The longest time a publisher may take to say that an alarm was not scheduled.
fn bound(env: &TestEnv) -> Duration {
    promised(env.settings.amqp.connect_timeout + env.settings.amqp.confirm_timeout + 2 * SECOND)
}

#[test]
fn refusing_or_blocking_broker_is_an_error() {
    let broker = Arc::new(Private::broker(&[]));
    let url = broker.url.clone();
    // Keeps the broker until the test environment is cleaned up.
    let _outlives = broker.clone();
    TestEnv::builder()
        .settings(|settings| {
            settings.amqp.url = url.into();
            settings.amqp.connect_timeout = 2 * SECOND;
            settings.amqp.confirm_timeout = 2 * SECOND;
            settings.delay.lanes = vec![lane("40s")];
            settings.delay.lane_shards = 1;
            settings.delay.lead = 2 * SECOND;
            settings.worker.hold_max = 5 * SECOND;
        })
        .run(async move |env| {
            let ctl = |arguments: &[&str]| tokio::task::block_in_place(|| broker.ctl(arguments));
            let publisher = env.publisher().await;
            refuse(&env, &publisher, &ctl).await;
            block(&env, &publisher, &ctl).await;
            env.assert_ledger().await;
        });
}

/// A full lane answers with a nack; alarms that were not nacked are in it.
async fn refuse(env: &TestEnv, publisher: &Publisher, ctl: &impl Fn(&[&str]) -> String) {
    let pattern = format!("^{}\\.delay\\.", env.settings.namespace);
    ctl(&["set_policy", "full", &pattern, r#"{"max-length": 20}"#, "--apply-to", "queues"]);
    let mut scheduled = 0;
    let mut refused = 0;
    let began = Instant::now();
    while refused < 20 {
        assert!(began.elapsed() < TIMEOUT, "{scheduled} scheduled in a lane of 20, {refused} refused");
        match publisher.schedule(fresh_id().as_str(), ahead(40 * SECOND)).await {
            Ok(()) => scheduled += 1,
            Err(error) => {
                assert_eq!(error, ScheduleError::Publish(PublishError::Nacked));
                assert_says(&error, "refused the message (nack)");
                refused += 1;
            }
        }
    }
    assert!(scheduled >= 20, "{scheduled}");
    let deadline = ahead(40 * SECOND);
    let more = publisher.schedule_all((0..200).map(|_| (fresh_id(), deadline))).await;
    let error = more.expect_err("the lane is full");
    assert!(error.failed.iter().all(|(_, why)| *why == ScheduleError::Publish(PublishError::Nacked)), "{error}");
    let safe = scheduled + error.scheduled;
    wait_for("what was confirmed, and nothing else", async || lane_depth(env, "40s").await == safe).await;
    // As soon as the lane is empty it accepts alarms again, on the same connection.
    for binding in bindings_of(env, "40s") {
        env.channel().queue_purge(binding.destination.name().into(), Default::default()).await.unwrap();
    }
    let works_again = async || publisher.schedule(fresh_id().as_str(), ahead(40 * SECOND)).await.is_ok();
    wait_for("the lane taking alarms again", works_again).await;
}

/// A broker short of memory stops reading from publishers.
async fn block(env: &TestEnv, publisher: &Publisher, ctl: &impl Fn(&[&str]) -> String) {
    let before = env.depth(&env.names().schedule()).await;
    ctl(&["set_vm_memory_high_watermark", "0.000001"]);
    // The command returns before every connection has received the memory alarm.
    let blocked = async || publisher.schedule(fresh_id().as_str(), ahead(600 * SECOND)).await.is_err();
    wait_for("the broker blocking publishers", blocked).await;
    // One alone, several in sequence, many at once, many in one call: all in bounded time.
    for _ in 0..3 {
        assert_fails_in_time(env, publisher).await;
    }
    let together = Instant::now();
    let tasks: Vec<_> = (0..50)
        .map(|_| {
            let publisher = publisher.clone();
            tokio::spawn(async move { publisher.schedule(fresh_id().as_str(), ahead(600 * SECOND)).await })
        })
        .collect();
    for task in tasks {
        assert_says(&task.await.unwrap().unwrap_err(), "");
    }
    assert!(together.elapsed() <= bound(env), "fifty took {:?}", together.elapsed());
    let deadline = ahead(600 * SECOND);
    let began = Instant::now();
    let error = publisher.schedule_all((0..500).map(|_| (fresh_id(), deadline))).await.unwrap_err();
    assert!(began.elapsed() <= bound(env), "schedule_all took {:?}", began.elapsed());
    assert_eq!((error.scheduled, error.failed.len()), (0, 500));
    // A publisher that starts now fails too, and also within the bound.
    let began = Instant::now();
    if let Ok(late) = env.settings.publisher().connect().await {
        assert_says(&late.schedule(fresh_id().as_str(), ahead(600 * SECOND)).await.unwrap_err(), "");
    }
    assert!(began.elapsed() <= 2 * bound(env), "a new publisher took {:?}", began.elapsed());

    ctl(&["set_vm_memory_high_watermark", "0.6"]);
    wait_for("scheduling again", async || publisher.schedule(fresh_id().as_str(), ahead(600 * SECOND)).await.is_ok())
        .await;
    assert!(env.depth(&env.names().schedule()).await > before);
}

async fn assert_fails_in_time(env: &TestEnv, publisher: &Publisher) {
    let began = Instant::now();
    let answer = tokio::time::timeout(60 * SECOND, publisher.schedule(fresh_id().as_str(), ahead(600 * SECOND))).await;
    let error = answer.expect("an answer at all").expect_err("a blocked broker confirms nothing");
    assert!(began.elapsed() <= bound(env), "took {:?}: {error}", began.elapsed());
    assert!(matches!(error, ScheduleError::Publish(PublishError::Blocked | PublishError::TimedOut(_))), "{error}");
    assert_says(&error, "");
}

#[test]
fn oversized_amqp_messages_are_refused_alone() {
    TestEnv::builder().run(async |env| {
        let confirmed = ConfirmedPublisher::connect(&env.settings.amqp, "test").await.unwrap();
        let to_the_inbox = || Outgoing {
            exchange: env.names().schedule(),
            routing_key: "any".into(),
            body: b"{}".to_vec(),
            message_id: Uuid::now_v7().to_string(),
            message_type: "order.timeout.v1".into(),
            content_type: "application/json",
            timestamp_s: 0,
            ttl: None,
            headers: Vec::new(),
            mandatory: true,
            sender_declares_queue: false,
        };
        let long = "x".repeat(256);
        let answers = confirmed
            .publish_all(vec![
                to_the_inbox(),
                Outgoing { exchange: long.clone(), ..to_the_inbox() },
                Outgoing { routing_key: long.clone(), ..to_the_inbox() },
                Outgoing { message_id: long.clone(), ..to_the_inbox() },
                Outgoing { message_type: long.clone(), ..to_the_inbox() },
                Outgoing { ttl: Some(Duration::MAX), ..to_the_inbox() },
                to_the_inbox(),
            ])
            .await;
        let refused: Vec<&str> = answers
            .iter()
            .map(|answer| match answer {
                Ok(()) => "",
                Err(PublishError::Unsendable { what, .. }) => what,
                Err(other) => panic!("{other}"),
            })
            .collect();
        assert_eq!(refused, ["", "exchange", "routing key", "message id", "type", "expiration", ""]);
        let inbox = env.names().schedule();
        wait_for("the two that could be sent", async || env.depth(&inbox).await == 2).await;

        // The outbox also rejects an event that could never be sent.
        for (column, other) in [("routing_key", "type"), ("type", "routing_key")] {
            let insert = format!("INSERT INTO event_outbox ({column}, {other}, payload) VALUES ($1, 'other', '{{}}')");
            for (text, fits) in [("x".repeat(255), true), ("ü".repeat(128), false)] {
                let inserted = sqlx::query(AssertSqlSafe(insert.clone())).bind(text).execute(&env.pool).await;
                assert_eq!(inserted.is_ok(), fits, "{column}: {inserted:?}");
            }
        }
    });
}

#[test]
fn connecting_checks_every_entry_exchange() {
    TestEnv::builder().run(async |env| {
        for exchange in [env.names().delay(), env.names().schedule()] {
            env.channel().exchange_delete(exchange.as_str().into(), Default::default()).await.unwrap();
            let fault = env.settings.publisher().connect().await.unwrap_err();
            assert!(matches!(fault, ConnectError::Broker(BrokerError::Refused(_))), "{fault:?}");
            let text = fault.to_string();
            assert!(text.contains(&format!("{exchange:?} is not there")) && text.contains("setup"), "{text}");
            env.settings.topology().declare(env.broker()).await.unwrap();
        }
        // A wrong type is the topology check's concern; here it is enough that an alarm can enter.
        let inbox = env.names().schedule();
        env.channel().exchange_delete(inbox.as_str().into(), Default::default()).await.unwrap();
        let kind = lapin::ExchangeKind::Topic;
        env.channel()
            .exchange_declare(inbox.as_str().into(), kind, Default::default(), Default::default())
            .await
            .unwrap();
        env.settings.publisher().connect().await.unwrap();
    });
}

#[test]
fn silent_broker_while_connecting_is_unavailable() {
    TestEnv::builder().settings(|settings| settings.amqp.connect_timeout = SECOND).run(async |env| {
        let mut silences = 0;
        for frames in 0..40 {
            let proxy = FrameProxy::start(&env.settings, frames).await;
            let began = Instant::now();
            let connected = tokio::time::timeout(30 * SECOND, proxy.settings.publisher().connect()).await;
            let took = began.elapsed();
            assert!(took < promised(SECOND + SLACK), "{took:?} with a broker that is silent after {frames} frames");
            match connected.expect("an answer at all") {
                Ok(_) => break,
                Err(fault) => {
                    assert!(
                        matches!(fault, ConnectError::Broker(BrokerError::Away(_))),
                        "after {frames} frames: {fault:?}"
                    );
                    assert!(fault.to_string().contains("did not answer within 1s"), "{fault}");
                    silences += 1;
                }
            }
        }
        // start, tune, open; for each exchange a channel and an answer; close; and the same for the publisher's own
        // connection.
        assert!((8..40).contains(&silences), "{silences} silences before it was connected");
    });
}

#[test]
fn silent_broker_fails_within_confirm_timeout() {
    TestEnv::builder()
        .settings(|settings| {
            settings.amqp.connect_timeout = 2 * SECOND;
            settings.amqp.confirm_timeout = SECOND;
        })
        .run(async |env| {
            let bound = env.settings.amqp.connect_timeout + env.settings.amqp.confirm_timeout;
            let proxy = FrameProxy::start(&env.settings, 1_000_000).await;
            let publisher = proxy.settings.publisher().connect().await.unwrap();
            publisher.schedule(fresh_id().as_str(), ahead(600 * SECOND)).await.unwrap();
            proxy.fall_silent();
            // More than fit into the windows and the queue behind them.
            let tasks: Vec<_> = (0..10_000)
                .map(|_| {
                    let publisher = publisher.clone();
                    tokio::spawn(async move {
                        let began = Instant::now();
                        let answer = publisher.schedule(fresh_id().as_str(), ahead(600 * SECOND)).await;
                        (answer, began.elapsed())
                    })
                })
                .collect();
            for task in tasks {
                let (answer, took) = task.await.unwrap();
                assert_says(&answer.unwrap_err(), "");
                // Before the end of a connection without heartbeats, which would say so too.
                assert!(took <= promised(bound + SLACK).min(env.settings.amqp.heartbeat), "a caller waited {took:?}");
            }
            // The same holds for one call.
            let publisher = publisher.clone();
            let (deadline, began) = (ahead(600 * SECOND), Instant::now());
            let fault = publisher.schedule_all((0..20_000).map(|_| (fresh_id(), deadline))).await.unwrap_err();
            assert_eq!((fault.scheduled, fault.failed.len()), (0, 20_000));
            assert!(began.elapsed() <= promised(bound + SLACK), "schedule_all took {:?}", began.elapsed());
        });
}
