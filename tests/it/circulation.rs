//! Policies on our queues that make the broker return alarms early, drop them or dead-letter them: orders are closed on
//! time, and the alarms do not circulate at full speed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lapin::BasicProperties;
use lapin::options::{BasicGetOptions, BasicRejectOptions};
use order_timeout::Settings;
use order_timeout_core::message::Alarm;
use order_timeout_testkit::away::{meanwhile, on_private_broker_with, schedule};
use order_timeout_testkit::degraded::{wait_until_cured, wait_until_named, why_degraded};
use order_timeout_testkit::figures::{Figures, serve_http};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::{RunningWorker, TestEnv, wait_for, wait_promised};

const SECOND: Duration = Duration::from_secs(1);
/// A pattern for the names of all delay queues.
const DELAY_QUEUES: &str = r"\.(wheel|delay)\.";

/// As in production: an order without an alarm is closed half a second late.
fn with_sweep(settings: &mut Settings) {
    serve_http(settings);
    settings.sweep.grace = SECOND / 2;
}

/// Re-arms in a second while the policy lasts, once all alarms have come back early twice.
async fn rearms_per_second(worker: &RunningWorker) -> f64 {
    const WATCHED: Duration = Duration::from_secs(5);
    let rearmed = async || Figures::of(worker).await.get("alarms_rearmed_total");
    let began = Instant::now();
    let before = rearmed().await;
    tokio::time::sleep(WATCHED).await;
    (rearmed().await - before) / began.elapsed().as_secs_f64()
}

/// Policies under which alarms return early, and what names each: its queues, its definition, a part of the cause.
///
/// The first is not on the inbox and the parked queue: an alarm that both drop returns to no worker.
const HARMFUL: [(&str, &str, &str); 2] = [
    (DELAY_QUEUES, r#"{"max-length":3,"overflow":"drop-head"}"#, "max-length"),
    (".*", r#"{"message-ttl":1000}"#, "message-ttl"),
];

#[test]
fn harmful_policies_are_named_and_slowed() {
    on_private_broker_with(&[], with_sweep, async move |env: Arc<TestEnv>, broker: Arc<Private>| {
        let worker = env.worker().await;
        let publisher = env.publisher().await;
        for (queues, definition, part) in HARMFUL {
            meanwhile(|| broker.ctl(&["set_policy", "harmful", queues, definition, "--apply-to", "queues"]));
            schedule(&env, &publisher, 30, 600 * SECOND).await;
            wait_until_named(&worker, "alarms_circulate", part).await;
            let (_, why) = why_degraded(&worker, "alarms_circulate").await;
            assert!(why.as_ref().is_some_and(|why| why.contains("order-timeout doctor")), "{why:?}");
            // Each goes back twice before it waits for a token.
            wait_for("few re-arms", async || rearms_per_second(&worker).await <= 11.0).await;
            meanwhile(|| broker.ctl(&["clear_policy", "harmful"]));
            wait_until_cured(&worker, "alarms_circulate").await;
        }
        assert_eq!(env.closed().await, 0, "they still wait");
        wait_for("every alarm in its slot", async || env.depth_of_all("wheel.").await == 60).await;
        sqlx::query("UPDATE orders SET expires_at = clock_timestamp()").execute(&env.pool).await.unwrap();
        wait_for("every close", async || env.closed().await == 60).await;
        worker.stop().await;
        env.assert_ledger().await;
    });
}

/// Keeps the policy on all delay queues to the end. Not on the inbox: if an alarm is dropped there and then from the
/// parked queue too, the sweep closes its order.
fn assert_on_time_under(definition: &'static str, alarms: usize, delay: Duration) {
    on_private_broker_with(&[], with_sweep, async move |env: Arc<TestEnv>, broker: Arc<Private>| {
        meanwhile(|| broker.ctl(&["set_policy", "harmful", DELAY_QUEUES, definition, "--apply-to", "queues"]));
        let worker = env.worker().await;
        let publisher = env.publisher().await;
        schedule(&env, &publisher, alarms, delay).await;
        // Each alarm returns twice before it waits for a token, which takes long on a busy machine.
        let named = async || why_degraded(&worker, "alarms_circulate").await.1.is_some();
        wait_promised(45 * SECOND, "the cause", named).await;
        let few = async || rearms_per_second(&worker).await <= 11.0;
        wait_promised(45 * SECOND, "few re-arms", few).await;
        let rearmed = Figures::of(&worker).await.get("alarms_rearmed_total");
        println!("{alarms} alarms, {definition}: {rearmed} re-arms so far");
        assert!(rearmed <= 5.0 * alarms as f64, "{rearmed} re-arms");
        let all = i64::try_from(alarms).unwrap();
        wait_for("every close", async || env.closed().await == all).await;
        // The sweep closes the orders of lost alarms half a second late, or somewhat later on a busy machine.
        env.assert_on_time_within(3 * SECOND).await;
        worker.stop().await;
        env.assert_ledger().await;
    });
}

#[test]
#[ignore = "loads the machine for a minute; cargo test --test it -- --ignored runs it, a smaller one runs always"]
fn many_alarms_survive_message_ttl() {
    assert_on_time_under(r#"{"message-ttl":1000}"#, 2_000, 60 * SECOND);
}

#[test]
#[ignore = "loads the machine for a minute; cargo test --test it -- --ignored runs it, a smaller one runs always"]
fn many_alarms_survive_drop_head() {
    assert_on_time_under(r#"{"max-length":200,"overflow":"drop-head"}"#, 2_000, 60 * SECOND);
}

async fn wait_for_dead_letters(env: &TestEnv, count: u32) {
    wait_for("the dead letters", async || env.depth(&env.names().parked()).await == count).await;
}

#[test]
fn expired_alarm_still_closes_its_order() {
    TestEnv::builder().settings(with_sweep).run(async |env| {
        // Due after the worker has started, so that this alarm or, half a second late, the sweep closes the order.
        let orders = [env.order(8 * SECOND).await, env.order(12 * SECOND).await];
        for order in &orders {
            let properties = BasicProperties::default().with_expiration("200".into());
            env.publish_raw(&env.names().schedule(), "", &order.body(), properties).await;
        }
        wait_for_dead_letters(&env, 2).await;
        let worker = env.worker().await;
        wait_for("the closes", async || env.closed().await == 2).await;
        env.assert_closed_by_alarms().await;
        assert_eq!(env.parked().await, []);
        worker.stop().await;
        env.assert_drained().await;
    });
}

#[test]
fn alarm_expired_after_its_deadline_closes() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let order = env.order(SECOND / 5).await;
        let properties = BasicProperties::default().with_expiration("300".into());
        env.publish_raw(&env.names().due(), "due", &order.body(), properties).await;
        wait_for_dead_letters(&env, 1).await;
        let worker = env.worker().await;
        wait_for("the close", async || env.closed().await == 1).await;
        env.assert_closed_by_alarms().await;
        assert_eq!(env.parked().await, []);
        worker.stop().await;
    });
}

#[test]
fn alarm_dropped_by_max_length_still_closes() {
    on_private_broker_with(&[], serve_http, async |env: Arc<TestEnv>, broker: Arc<Private>| {
        let definition = r#"{"max-length":1,"overflow":"drop-head"}"#;
        let pattern = format!("^{}$", env.names().timeout().replace('.', "\\."));
        meanwhile(|| broker.ctl(&["set_policy", "short", &pattern, definition, "--apply-to", "queues"]));
        let orders = env.orders(3, SECOND).await;
        env.deliver(&orders).await;
        wait_for_dead_letters(&env, 2).await;
        let worker = env.worker().await;
        wait_for("the closes", async || env.closed().await == 3).await;
        env.assert_closed_by_alarms().await;
        assert_eq!(env.parked().await, []);
        worker.stop().await;
    });
}

#[test]
fn alarm_beyond_delivery_limit_is_parked() {
    on_private_broker_with(&[], serve_http, async |env: Arc<TestEnv>, broker: Arc<Private>| {
        let definition = r#"{"delivery-limit":2}"#;
        meanwhile(|| broker.ctl(&["set_policy", "limit", ".*timeout", definition, "--apply-to", "queues"]));
        let order = env.order(3_600 * SECOND).await;
        env.deliver([&order]).await;
        // basic.reject, not basic.nack: from 4.3 on RabbitMQ counts only the former toward the limit.
        let requeue = BasicRejectOptions { requeue: true };
        wait_for("the dead letter", async || {
            let timeout = env.names().timeout();
            if let Some(got) =
                env.channel().basic_get(timeout.as_str().into(), BasicGetOptions::default()).await.unwrap()
            {
                got.reject(requeue).await.unwrap();
            }
            env.depth(&env.names().parked()).await == 1
        })
        .await;
        let worker = env.worker().await;
        wait_for("the parking", async || env.parked().await.len() == 1).await;
        let (reason, detail, _) = env.parked().await.remove(0);
        assert_eq!(reason, "broker_gave_up");
        assert!(detail.contains("delivery limit") && detail.contains("policy with delivery-limit"), "{detail}");
        worker.stop().await;
    });
}

#[test]
fn alarm_rejected_by_another_consumer_is_parked() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let order = env.order(3_600 * SECOND).await;
        env.deliver([&order]).await;
        let timeout = env.names().timeout();
        let got = env.channel().basic_get(timeout.as_str().into(), BasicGetOptions::default()).await.unwrap();
        got.expect("the alarm").reject(BasicRejectOptions { requeue: false }).await.unwrap();
        wait_for_dead_letters(&env, 1).await;
        let worker = env.worker().await;
        wait_for("the parking", async || env.parked().await.len() == 1).await;
        let (reason, detail, _) = env.parked().await.remove(0);
        assert_eq!(reason, "broker_gave_up");
        assert!(detail.contains("not a worker rejected it") && detail.contains(&timeout), "{detail}");
        worker.stop().await;
    });
}

/// An alarm that returns on time is re-armed as before: the worker does not trust a publisher's headers.
#[test]
fn forged_early_returns_delay_no_close() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let mut headers = lapin::types::FieldTable::default();
        headers.insert("early-returns".into(), lapin::types::AMQPValue::LongInt(i32::MAX));
        headers.insert("returns-at".into(), lapin::types::AMQPValue::LongLongInt(i64::MAX));
        let worker = env.worker().await;
        let orders = env.orders(2, 7 * SECOND).await;
        for (order, exchange) in orders.iter().zip([env.names().schedule(), env.names().due()]) {
            let properties = BasicProperties::default().with_headers(headers.clone());
            assert!(Alarm::read(&order.body(), None).is_ok());
            env.publish_raw(&exchange, "due", &order.body(), properties).await;
        }
        wait_for("the closes", async || env.closed().await == 2).await;
        env.assert_closed_by_alarms().await;
        env.assert_on_time().await;
        worker.stop().await;
        env.assert_drained().await;
    });
}
