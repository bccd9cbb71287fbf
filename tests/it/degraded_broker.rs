//! A cause that keeps alarms from arriving is named while orders are still closed, and no longer named after its cure.
//!
//! Each test: a worker closes orders, something breaks, `/readyz` names the cause within fifteen seconds, it is cured,
//! and the cause is gone within fifteen seconds.

use std::sync::Arc;
use std::time::Duration;

use lapin::BasicProperties;
use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldArray, FieldTable, LongString};
use order_timeout::Settings;
use order_timeout::http::READYZ;
use order_timeout::operations::doctor::{Options, examine};
use order_timeout_amqp::topology::DUE_KEY;
use order_timeout_core::kind::Kind;
use order_timeout_core::problem::Cause;
use order_timeout_testkit::away::consumers;
use order_timeout_testkit::degraded::{NAMED_WITHIN, wait_until_cured, wait_until_named, why_degraded};
use order_timeout_testkit::figures::{Figures, get, serve_http};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::process::WorkerProcess;
use order_timeout_testkit::skip::skipped;
use order_timeout_testkit::{TIMEOUT, TestEnv, wait_for, wait_promised};
use tokio::task::JoinHandle;

/// Serves the worker's pages, and uses the default grace of the sweep.
fn pages_and_sweep(settings: &mut Settings) {
    serve_http(settings);
    settings.sweep.grace = Duration::from_millis(500);
}

/// Creates and schedules some orders each second, until the task is aborted.
fn keep_ordering(env: &Arc<TestEnv>, due_in: Duration) -> JoinHandle<()> {
    let env = env.clone();
    tokio::spawn(async move {
        let publisher = env.publisher().await;
        loop {
            for order in env.orders(2, due_in).await {
                // A broken broker may refuse the alarm; then the sweep closes the order.
                let _ = publisher.schedule(order.id.to_string(), order.deadline).await;
            }
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    })
}

async fn unbind_due(env: &TestEnv) {
    let (queue, due) = (env.names().timeout(), env.names().due());
    let arguments = FieldTable::default();
    env.channel().queue_unbind(queue.as_str().into(), due.as_str().into(), DUE_KEY.into(), arguments).await.unwrap();
}

async fn closed_by(env: &TestEnv, by: &'static str) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM orders WHERE closed_by::text = $1")
        .bind(by)
        .fetch_one(&env.pool)
        .await
        .unwrap()
}

#[test]
fn unbound_processing_queue_is_named_and_bound() {
    TestEnv::builder().settings(pages_and_sweep).run(async |env| {
        let worker = env.worker().await;
        // Long enough for a slot of the wheel, so that no alarm goes straight to the processing queue.
        let ordering = keep_ordering(&env, Duration::from_secs(3));
        wait_for("a close by alarm", async || closed_by(&env, "alarm").await > 0).await;
        unbind_due(&env).await;
        wait_until_named(&worker, "alarms_not_arriving", "closed without their alarms").await;
        let before = closed_by(&env, "alarm").await;
        wait_for("closes by alarm again", async || closed_by(&env, "alarm").await > before + 5).await;
        wait_promised(NAMED_WITHIN, "nothing degraded", async || get(&worker, READYZ).await.1 == "ready\n").await;
        ordering.abort();
        worker.stop().await;
    });
}

#[test]
fn deleted_delay_queue_is_named_and_declared() {
    TestEnv::builder().settings(pages_and_sweep).run(async |env| {
        let worker = env.worker().await;
        let lane = format!("{}.delay.2s.1", env.settings.namespace);
        env.channel().queue_delete(lane.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        wait_until_named(&worker, "topology", &format!("{lane:?}")).await;
        wait_until_cured(&worker, "topology").await;
        assert_eq!(env.depth(&lane).await, 0, "it exists");
        worker.stop().await;
    });
}

/// Creates orders without alarms, and waits until the sweep has closed them.
async fn have_orders_swept(env: &TestEnv) {
    let closed = async || closed_by(env, "sweep").await + closed_by(env, "look_ahead").await;
    let before = closed().await;
    env.orders(3, Duration::ZERO).await;
    wait_for("closes without an alarm", async || closed().await >= before + 3).await;
}

#[test]
fn orders_without_alarms_are_named() {
    TestEnv::builder().settings(pages_and_sweep).run(async |env| {
        let worker = env.worker().await;
        // What is overdue when a worker starts is no fault of the broker.
        have_orders_swept(&env).await;
        assert_eq!(why_degraded(&worker, "alarms_not_arriving").await.1, None);
        wait_for("the cause", async || {
            have_orders_swept(&env).await;
            why_degraded(&worker, "alarms_not_arriving")
                .await
                .1
                .is_some_and(|why| why.contains("schedule an alarm for every order"))
        })
        .await;
        assert!(Figures::of(&worker).await.get("orders_closed_without_alarm_total") >= 3.0);
        // The worker tells it. It ends there as it does here.
        let is_found = async || {
            let report = examine(&env.settings, &Options::default()).await;
            report.problems().any(|problem| problem.cause == Cause::AlarmsNotArriving)
        };
        wait_promised(NAMED_WITHIN, "the doctor's warning", is_found).await;
        let ordering = keep_ordering(&env, Duration::from_secs(1));
        wait_until_cured(&worker, "alarms_not_arriving").await;
        wait_promised(NAMED_WITHIN, "no warning of the doctor", async || !is_found().await).await;
        ordering.abort();
        worker.stop().await;
    });
}

#[test]
fn lane_declared_as_classic_is_named() {
    TestEnv::builder().settings(pages_and_sweep).run(async |env| {
        let worker = env.worker().await;
        let lane = env.names().lane_queue(&Kind::ORDER, "2s", 1);
        env.channel().queue_delete(lane.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        env.channel().queue_declare(lane.as_str().into(), durable, FieldTable::default()).await.unwrap();
        wait_until_named(&worker, "topology", &format!("queue {lane:?} exists with other arguments")).await;
        env.channel().queue_delete(lane.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        wait_until_cured(&worker, "topology").await;
        assert_eq!(env.depth(&lane).await, 0, "it exists");
        worker.stop().await;
    });
}

/// Runs a test on an environment with a private broker, on which it may set policies and cause faults.
fn on_private_broker<F: Future<Output = ()> + Send + 'static>(test: impl FnOnce(Arc<TestEnv>, Arc<Private>) -> F) {
    let broker = Arc::new(Private::broker(&[]));
    let adjust = |settings: &mut Settings| {
        pages_and_sweep(settings);
        settings.amqp.url = broker.url.clone().into();
    };
    let for_test = broker.clone();
    TestEnv::builder().settings(adjust).run(move |env| test(env, for_test));
}

async fn ctl(broker: &Arc<Private>, arguments: &'static [&'static str]) -> String {
    let broker = broker.clone();
    tokio::task::spawn_blocking(move || broker.ctl(arguments)).await.unwrap()
}

#[test]
fn refused_declaring_is_named() {
    on_private_broker(async |env, broker| {
        let worker = env.worker().await;
        ctl(&broker, &["set_permissions", "guest", "^$", ".*", ".*"]).await;
        wait_until_named(&worker, "topology", "does not let this user declare or use").await;
        ctl(&broker, &["set_permissions", "guest", ".*", ".*", ".*"]).await;
        wait_until_cured(&worker, "topology").await;
        worker.stop().await;
    });
}

/// Publishes a message that crashes the dead-letter worker of RabbitMQ 3.10.
async fn publish_malformed_death(env: &TestEnv) {
    let mut deaths = FieldArray::default();
    deaths.push(AMQPValue::LongString(LongString::from("foo")));
    let mut headers = FieldTable::default();
    headers.insert("x-death".into(), AMQPValue::FieldArray(deaths));
    let properties =
        BasicProperties::default().with_delivery_mode(2).with_expiration("100".into()).with_headers(headers);
    env.publish_raw(&env.names().delay(), "2s.0", b"{}", properties).await;
}

#[test]
fn stopped_dead_lettering_is_named_and_cured() {
    on_private_broker(async |env, broker| {
        if !ctl(&broker, &["version"]).await.starts_with("3.") {
            return skipped(
                "degraded_broker::stopped_dead_lettering_is_named_and_cured",
                "from 4.0 on RabbitMQ survives a malformed x-death header",
            );
        }
        let worker = env.worker().await;
        let ordering = keep_ordering(&env, Duration::from_millis(1_300));
        wait_for("a close by alarm", async || closed_by(&env, "alarm").await > 0).await;
        publish_malformed_death(&env).await;
        let before = closed_by(&env, "sweep").await;
        wait_for("a close by the sweep", async || closed_by(&env, "sweep").await > before).await;
        wait_until_named(&worker, "alarms_not_arriving", "closed without their alarms").await;

        // As docs/operating/troubleshoot.md says under "Dead-lettering has stopped".
        let poisoned = env.names().lane_queue(&Kind::ORDER, "2s", 0);
        env.channel().queue_delete(poisoned.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        ctl(&broker, &["stop_app"]).await;
        ctl(&broker, &["start_app"]).await;
        wait_for("a session", async || get(&worker, READYZ).await.0 == 200).await;
        wait_until_cured(&worker, "alarms_not_arriving").await;
        ordering.abort();
        let env = env.reconnected().await;
        let before = closed_by(&env, "alarm").await;
        for order in env.orders(10, Duration::from_secs(3)).await {
            env.publisher().await.schedule(order.id.to_string(), order.deadline).await.unwrap();
        }
        wait_for("closes by alarm again", async || closed_by(&env, "alarm").await >= before + 10).await;
        wait_until_cured(&worker, "topology").await;
        worker.stop().await;
    });
}

#[test]
fn alarms_fill_new_slots() {
    on_private_broker(async |env, _broker| {
        let worker = env.worker().await;
        // RabbitMQ 3.10 refuses messages for a moment after a queue was declared. Each alarm is for another slot.
        for minutes in 1..=20 {
            env.deliver(&env.orders(1, Duration::from_secs(50 * minutes)).await).await;
        }
        wait_for("every alarm in its slot", async || env.depth_of_all("wheel.").await == 20).await;
        worker.stop().await;
    });
}

#[test]
fn full_vhost_is_named() {
    on_private_broker(async |env, broker| {
        let worker = env.worker().await;
        ctl(&broker, &["set_vhost_limits", r#"{"max-queues": 1}"#]).await;
        env.deliver(&env.orders(1, Duration::from_secs(200)).await).await;
        wait_until_named(&worker, "topology", "queue limit").await;
        let sentence = why_degraded(&worker, "topology").await.1.expect("named");
        let for_cure = broker.clone();
        tokio::task::spawn_blocking(move || for_cure.run_printed(&sentence)).await.unwrap();
        wait_until_cured(&worker, "topology").await;
        worker.stop().await;
    });
}

#[test]
fn limit_of_unacknowledged_messages_is_named() {
    on_private_broker(async |env, broker| {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let worker = WorkerProcess::start_with_log(&env.settings, &log);
        let timeout = env.names().timeout();
        wait_for("a session", async || consumers(&env, &timeout).await > 0).await;
        ctl(&broker, &["close_all_connections", "limit of 1000 unacknowledged messages exceeded"]).await;
        let logged = || std::fs::read_to_string(&log).unwrap();
        wait_for("the setting named", async || logged().contains("set worker.prefetch")).await;
        assert_eq!(worker.terminate(TIMEOUT), 0);
    });
}
