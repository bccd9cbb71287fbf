//! Alarms written in the order's own transaction: committed with it or not at all, whether or not the broker is
//! available.

use std::time::{Duration, Instant};

use lapin::options::{BasicGetOptions, QueueDeleteOptions};
use lapin::types::AMQPValue;
use order_timeout::config::DatabaseSettings;
use order_timeout::outbox::alarm_relay::AlarmRelay;
use order_timeout::outbox::destination::SendError;
use order_timeout::outbox::event_relay::EventRelay;
use order_timeout::outbox::relay::{LeaderLock, RelayError};
use order_timeout::postgres::Database;
use order_timeout_amqp::publisher::{ConfirmedPublisher, PublishError};
use order_timeout_client::postgres::{self, NewAlarm};
use order_timeout_core::delay::Lane;
use order_timeout_testkit::away::{is_consumed, keep_events};
use order_timeout_testkit::{TIMEOUT, TestEnv, wait_for};
use secrecy::ExposeSecret;
use sqlx::AssertSqlSafe;

const UNSENT: &str = "SELECT count(*) FROM alarm_outbox WHERE sent_at IS NULL";

#[test]
fn alarm_scheduled_in_transaction_closes_order() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        // One for the lane, one for the wheel; the sweep's grace is too long to interfere.
        for delay_ms in [2_000, 1_300] {
            let order = env.order(Duration::from_millis(delay_ms)).await;
            let mut transaction = env.pool.begin().await.unwrap();
            postgres::schedule(&mut transaction, order.id.to_string(), order.deadline).await.unwrap();
            transaction.commit().await.unwrap();
        }
        wait_for("the closes", async || env.closed().await == 2).await;
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 2);
        assert_eq!(env.count(UNSENT).await, 0);
        env.assert_ledger().await;
        worker.stop().await;
    });
}

#[test]
fn documented_insert_schedules_alarm() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let order = env.order(Duration::from_secs(2)).await;
        sqlx::query(
            "INSERT INTO alarm_outbox (order_id, deadline) SELECT id::text, expires_at FROM orders WHERE id = $1",
        )
        .bind(order.id)
        .execute(&env.pool)
        .await
        .unwrap();
        wait_for("the close", async || env.closed().await == 1).await;
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 1);
        worker.stop().await;
    });
}

#[test]
fn rollback_discards_alarm() {
    TestEnv::builder().run(async |env| {
        let order = env.order(Duration::from_secs(2)).await;
        let mut transaction = env.pool.begin().await.unwrap();
        postgres::schedule(&mut transaction, order.id.to_string(), order.deadline).await.unwrap();
        transaction.rollback().await.unwrap();
        assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 0);
    });
}

#[test]
fn outbox_bridges_broker_outage() {
    TestEnv::builder().run(async |env| {
        let without_broker = env.worker_without_broker().await;
        for order in env.orders(5, Duration::from_millis(300)).await {
            env.write_alarm(&order).await;
        }
        // Far enough ahead for a busy machine: the relay leaves overdue orders to the sweep.
        let later = env.order(Duration::from_secs(12)).await;
        env.write_alarm(&later).await;
        wait_for("the closes", async || env.closed().await == 5).await;
        assert_eq!(env.count("SELECT count(*) FROM alarm_outbox WHERE sent_at IS NULL AND deadline > now()").await, 1);
        without_broker.stop().await;

        let worker = env.worker().await;
        wait_for("the last close", async || env.closed().await == 6).await;
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 1);
        wait_for("an empty outbox", async || env.count(UNSENT).await == 0).await;
        env.assert_ledger().await;
        worker.stop().await;
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn outbox_rejects_invalid_order_ids() {
    TestEnv::builder().run(async |env| {
        let now = std::time::SystemTime::now();
        let refused = postgres::schedule(&mut env.pool.acquire().await.unwrap(), "", now).await;
        assert!(matches!(refused, Err(postgres::ScheduleError::OrderId(_))), "{refused:?}");
        for bad in ["", "a\tb", &"x".repeat(201)] {
            let inserted = sqlx::query("INSERT INTO alarm_outbox (order_id, deadline) VALUES ($1, now())")
                .bind(bad)
                .execute(&env.pool)
                .await;
            let error = inserted.unwrap_err().to_string();
            assert!(error.contains("the_order_id_fits_a_message"), "{bad:?}: {error}");
        }
    });
}

#[test]
fn unroutable_alarms_do_not_block_outbox() {
    const LANE: Duration = Duration::from_secs(30);
    TestEnv::builder().settings(|settings| settings.delay.lanes = vec![Lane::try_from("30s".to_owned()).unwrap()]).run(
        async |env| {
            // The queue of one shard is deleted: alarms for it are returned as unroutable.
            let topology = env.settings.topology();
            let lost =
                topology.queues.iter().find(|queue| queue.name.ends_with("delay.30s.0")).expect("a lane's queue");
            env.channel().queue_delete(lost.name.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
            for order in env.orders(40, LANE).await {
                env.write_alarm(&order).await;
            }
            let database = Database::connect(&env.settings.database, 1).await.unwrap();
            let confirmed = ConfirmedPublisher::connect_lazily(&env.settings.amqp, "test");
            let mut relay = AlarmRelay::new(database, Some(confirmed), &env.settings, 30, Duration::from_secs(60));
            let (mut rounds, began) = (0, Instant::now());
            let refused = loop {
                // Every round sees alarms that belong in the lane, however slow the machine is.
                sqlx::query("UPDATE alarm_outbox SET deadline = clock_timestamp() + make_interval(secs => $1)")
                    .bind(LANE.as_secs_f64())
                    .execute(&env.pool)
                    .await
                    .unwrap();
                match relay.round().await.unwrap().settled() {
                    Ok(settled) => assert!(settled > 0, "a round that settles nothing says so"),
                    // The whole suite shares this broker, so it may answer slowly.
                    Err(RelayError::Send(SendError::Broker(fault)))
                        if fault.is_broker_wide() && began.elapsed() < TIMEOUT =>
                    {
                        continue;
                    }
                    Err(fault) => break fault,
                }
                rounds += 1;
            };
            assert!(matches!(refused, RelayError::Send(SendError::Broker(PublishError::Unroutable(_)))), "{refused}");
            assert!(
                rounds > 1,
                "forty alarms in batches of thirty, the second batch goes past those refused: {refused}"
            );
            assert!((1..40).contains(&env.count(UNSENT).await), "only those of the lost shard are left");
        },
    );
}

/// RabbitMQ 3 does not tell a consumer that its queue was deleted if the queue is re-declared too soon
/// (`Topology::but_for_consumed`): the consumer stays and receives nothing.
#[test]
fn inbox_deleted_in_use_is_consumed_again() {
    TestEnv::builder().settings(|settings| {
            // One at a time, so that one of them misses the inbox as soon as it is deleted, and the worker checks what
            // is missing.
            settings.announce.batch_size = 1;
            settings.announce.poll = Duration::from_millis(1);
        }).run(async |env| {
            let inbox = env.names().schedule();
            let worker = env.worker().await;
            let (mut times, mut turns) = (0, 0);
            while times < 10 {
                turns += 1;
                assert!(turns <= 60, "alarms were in flight only {times} times: the relay is too fast for this test");
                let alarms = "INSERT INTO alarm_outbox (order_id, deadline)
                              SELECT gen_random_uuid()::text, now() + interval '30 minutes' FROM generate_series(1, 50)";
                sqlx::query(alarms).execute(&env.pool).await.unwrap();
                wait_for("some of them in flight", async || env.count(UNSENT).await < 49).await;
                env.channel().queue_delete(inbox.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
                // Otherwise none was in flight any more.
                times += i32::from(env.count(UNSENT).await > 0);
                wait_for("the inbox", async || is_consumed(&env, &inbox).await).await;
                wait_for("all of them handed over", async || env.count(UNSENT).await == 0).await;
                let consumed = format!("all of them consumed after deletion {times} of the inbox");
                wait_for(&consumed, async || env.depth(&inbox).await == 0).await;
            }
            worker.stop().await;
        });
}

/// The settings of a deployment in its own schema.
fn in_schema(settings: &DatabaseSettings, schema: &str) -> DatabaseSettings {
    let url = format!("{}?options=-csearch_path%3D{schema}", settings.url.expose_secret());
    DatabaseSettings { url: url.into(), ..settings.clone() }
}

#[test]
fn each_schema_has_its_own_relay() {
    TestEnv::builder().without_broker().run(async |env| {
        let mut locks = Vec::new();
        for schema in ["one", "two"] {
            let create = format!("CREATE SCHEMA {schema} CREATE TABLE event_outbox ()");
            sqlx::query(AssertSqlSafe(create)).execute(&env.pool).await.unwrap();
            let database = Database::connect(&in_schema(&env.settings.database, schema), 2).await.unwrap();
            let mut lock = LeaderLock::new(database.clone());
            assert!(lock.is_ours().await.unwrap(), "schema {schema} has no other relay");
            let mut second = LeaderLock::new(database);
            assert!(!second.is_ours().await.unwrap(), "a second relay of schema {schema} must wait");
            locks.push((lock, second));
        }
        for (mut lock, mut second) in locks {
            lock.resign().await;
            let taken_over = async { while !second.is_ours().await.unwrap() {} };
            tokio::time::timeout(TIMEOUT, taken_over).await.expect("the released lock");
            second.resign().await;
        }
    });
}

const TRACE_CONTEXT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// The header `traceparent` of the next message in this queue.
async fn next_trace_context(env: &TestEnv, queue: &str) -> Option<String> {
    let get = env.channel().basic_get(queue.into(), BasicGetOptions { no_ack: true });
    let message = get.await.unwrap().unwrap_or_else(|| panic!("{queue} is empty")).delivery;
    let headers = message.properties.headers().clone().unwrap_or_default();
    match headers.inner().get("traceparent") {
        Some(AMQPValue::LongString(text)) => Some(String::from_utf8(text.as_bytes().to_vec()).unwrap()),
        None => None,
        other => panic!("{other:?}"),
    }
}

/// A relay of its own, so that a test decides when a batch is sent.
async fn event_relay(env: &TestEnv) -> EventRelay {
    let database = Database::connect(&env.settings.database, 2).await.unwrap();
    let confirmed = ConfirmedPublisher::connect_lazily(&env.settings.amqp, "test");
    EventRelay::new(database, confirmed, &env.names(), 30, Duration::from_secs(60))
}

#[test]
fn trace_context_reaches_alarm_and_event() {
    TestEnv::builder().settings(|settings| settings.sweep.grace = Duration::from_secs(1)).run(async |env| {
        let kept_events = keep_events(&env).await;
        let order = env.order(Duration::from_secs(60)).await;
        let mut connection = env.pool.acquire().await.unwrap();
        let alarm = NewAlarm::new(order.id.to_string(), order.deadline).traceparent(TRACE_CONTEXT);
        alarm.schedule(&mut connection).await.unwrap();
        let database = Database::connect(&env.settings.database, 1).await.unwrap();
        let confirmed = ConfirmedPublisher::connect_lazily(&env.settings.amqp, "test");
        let mut relay = AlarmRelay::new(database, Some(confirmed), &env.settings, 30, Duration::from_secs(60));
        assert_eq!(relay.round().await.unwrap().sent, 1);
        let (inbox, expected) = (env.names().schedule(), Some(TRACE_CONTEXT.to_owned()));
        assert_eq!(next_trace_context(&env, &inbox).await, expected, "of the alarm");

        // Whatever path closes the order, and however often its deadline was moved: the last alarm with a trace
        // context counts.
        let earlier = order.deadline - Duration::from_secs(57);
        let moved = postgres::move_deadline(&mut *connection, order.id.to_string(), earlier).await.unwrap();
        assert_eq!(moved, postgres::Moved::Earlier);
        let worker = env.worker().await;
        wait_for("the close", async || env.closed().await == 1).await;
        wait_for("the event", async || env.depth(&kept_events).await == 1).await;
        worker.stop().await;
        assert_eq!(next_trace_context(&env, &kept_events).await, expected, "of the event");
    });
}

#[test]
fn event_keeps_trace_context_of_its_own() {
    TestEnv::builder().run(async |env| {
        let kept_events = keep_events(&env).await;
        let insert = "INSERT INTO alarm_outbox (order_id, deadline, traceparent) VALUES ('7', now(), $1);";
        sqlx::query(insert).bind(TRACE_CONTEXT).execute(&env.pool).await.unwrap();
        let events = r#"INSERT INTO event_outbox (routing_key, type, payload, traceparent, created_at)
                            VALUES ('k', 't', '{"order_id": "7"}', 'own', now() - interval '4 s'),
                                   ('k', 't', '{"order_id": "7"}', NULL, now() - interval '3 s'),
                                   ('k', 't', '{"order_id": "8"}', NULL, now() - interval '2 s'),
                                   ('k', 't', '"text"', NULL, now() - interval '1 s')"#;
        sqlx::query(events).execute(&env.pool).await.unwrap();
        assert_eq!(event_relay(&env).await.round().await.unwrap().sent, 4);
        let mut found = Vec::new();
        for _ in 0..4 {
            found.push(next_trace_context(&env, &kept_events).await);
        }
        assert_eq!(found, [Some("own".to_owned()), Some(TRACE_CONTEXT.to_owned()), None, None]);
    });
}

#[test]
fn invalid_trace_context_fails_no_order() {
    TestEnv::builder().run(async |env| {
        let now = std::time::SystemTime::now();
        let mut connection = env.pool.acquire().await.unwrap();
        let alarms = ["", "not a trace context", &"0".repeat(300), TRACE_CONTEXT];
        let alarms = alarms.map(|context| NewAlarm::new("7", now).traceparent(context));
        postgres::schedule_all(&mut connection, alarms).await.unwrap();
        NewAlarm::new("7", now).traceparent("none").schedule(&mut connection).await.unwrap();
        assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 5);
        assert_eq!(env.count("SELECT count(*) FROM alarm_outbox WHERE traceparent IS NOT NULL").await, 1);
        for table in [
            "alarm_outbox (order_id, deadline, traceparent) VALUES ('7', now(), $1)",
            "event_outbox (routing_key, type, payload, traceparent) VALUES ('k', 't', '{}', $1)",
        ] {
            let insert = sqlx::query(AssertSqlSafe(format!("INSERT INTO {table}"))).bind("0".repeat(201));
            let error = insert.execute(&env.pool).await.unwrap_err().to_string();
            assert!(error.contains("the_trace_context_of_an"), "{error}");
        }
    });
}

#[test]
fn locked_alarm_outbox_delays_no_event() {
    TestEnv::builder().run(async |env| {
        let kept_events = keep_events(&env).await;
        let mut transaction = env.pool.begin().await.unwrap();
        sqlx::query("LOCK TABLE alarm_outbox").execute(&mut *transaction).await.unwrap();
        let event = r#"INSERT INTO event_outbox (routing_key, type, payload) VALUES ('k', 't', '{"order_id": "7"}')"#;
        let mut relay = event_relay(&env).await;
        for _ in 0..2 {
            sqlx::query(event).execute(&env.pool).await.unwrap();
            assert_eq!(relay.round().await.unwrap().sent, 1);
        }
        transaction.rollback().await.unwrap();
        assert_eq!(env.depth(&kept_events).await, 2);
    });
}
