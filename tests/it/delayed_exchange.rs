//! The strategy `delayed-exchange` closes orders on time if the broker has the exchange type, and is refused in one
//! sentence if it has not. A lost connection is never reported as a missing plugin.

use std::fs::File;
use std::process::Stdio;
use std::sync::OnceLock;
use std::time::Duration;

use lapin::options::{ExchangeDeclareOptions, ExchangeDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, ExchangeKind};
use order_timeout::Settings;
use order_timeout::deliver::{OpenError, Opening, Session};
use order_timeout::runtime::Worker;
use order_timeout_amqp::connect::{self, BrokerError};
use order_timeout_amqp::envelope::{self, Delay, LONGEST_X_DELAY_MS, Route};
use order_timeout_amqp::topology::{DUE_KEY, TopologyError};
use order_timeout_client::ConnectError;
use order_timeout_core::delay::Strategy;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::Alarm;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::process::WorkerProcess;
use order_timeout_testkit::skip::skipped;
use order_timeout_testkit::{Order, RunningWorker, TIMEOUT, TestEnv, process, wait_for, with_parts};
use secrecy::ExposeSecret;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use uuid::Uuid;

const DAY: Duration = Duration::from_secs(86_400);

/// Whether the tests' broker has the exchange type. Asked once, on a connection that the broker may close in reply.
fn broker_has_type() -> bool {
    static HAS_TYPE: OnceLock<bool> = OnceLock::new();
    *HAS_TYPE.get_or_init(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let settings = Settings::load(None, &[]).unwrap();
            let connection = connect::connect(&settings.amqp, "probe").await.expect("the broker answers");
            let channel = connection.create_channel().await.unwrap();
            let name = format!("order-timeout-probe-{}", Uuid::now_v7().simple());
            let mut arguments = FieldTable::default();
            arguments.insert("x-delayed-type".into(), AMQPValue::LongString("direct".into()));
            let options = ExchangeDeclareOptions { auto_delete: true, ..Default::default() };
            let kind = ExchangeKind::Custom("x-delayed-message".to_owned());
            match channel.exchange_declare(name.as_str().into(), kind, options, arguments).await {
                Ok(()) => {
                    channel.exchange_delete(name.as_str().into(), ExchangeDeleteOptions::default()).await.unwrap();
                    connect::close(&connection, Duration::from_secs(2)).await;
                    true
                }
                Err(error) => {
                    assert!(error.to_string().contains("exchange type"), "unexpected error: {error}");
                    false
                }
            }
        })
    })
}

fn delayed_exchange(settings: &mut Settings) {
    settings.delay.strategy = Strategy::DelayedExchange;
}

/// Runs a test on an environment with the strategy's objects if the broker has the type, else reports it as skipped.
fn with_type<F: Future<Output = ()> + Send + 'static>(
    name: &str,
    test: impl FnOnce(std::sync::Arc<TestEnv>) -> F + Send + 'static,
) {
    if !broker_has_type() {
        return skipped(&format!("delayed_exchange::{name}"), "this broker has no exchange type x-delayed-message");
    }
    TestEnv::builder().settings(delayed_exchange).run(|env| async move {
        env.settings.topology().declare(env.broker()).await.unwrap();
        test(env).await;
    });
}

/// Runs a test if the broker lacks the type, else reports it as skipped.
fn without_type<F: Future<Output = ()> + Send + 'static>(
    name: &str,
    test: impl FnOnce(std::sync::Arc<TestEnv>) -> F + Send + 'static,
) {
    if broker_has_type() {
        return skipped(&format!("delayed_exchange::{name}"), "this broker has the exchange type x-delayed-message");
    }
    TestEnv::builder().settings(delayed_exchange).run(test);
}

#[test]
fn delayed_exchange_closes_order_on_time() {
    with_type("delayed_exchange_closes_order_on_time", async |env| {
        let publisher = env.publisher().await;
        // Longest first: in a plain queue with TTLs it would delay all the others.
        let delays = [6_000, 4_500, 700, 3_000, 1_500, 2_000].map(Duration::from_millis);
        let mut orders = Vec::new();
        for delay in delays {
            let order = env.order(delay).await;
            publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
            orders.push(order);
        }
        let paid = env.order(Duration::from_secs(2)).await;
        publisher.schedule(paid.id.to_string(), paid.deadline).await.unwrap();
        assert!(env.pay(&paid).await);

        let worker = env.worker().await;
        wait_for("all closes", async || env.closed().await == 6).await;
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 6);
        assert_eq!(env.status(&paid).await, "paid");
        env.assert_on_time().await;
        env.assert_ledger().await;
        worker.stop().await;
    });
}

#[test]
fn plugin_alarm_closes_order_after_move() {
    with_type("plugin_alarm_closes_order_after_move", async |env| {
        // As docs/FROM-THE-PLUGIN.md says: an alarm that waits in the plugin reaches workers of the other strategy.
        let order = env.order(Duration::from_secs(6)).await;
        env.publisher().await.schedule(order.id.to_string(), order.deadline).await.unwrap();
        let mut settings = env.settings.clone();
        settings.delay.strategy = Strategy::DeadLetter;
        settings.topology().declare(env.broker()).await.unwrap();
        let worker = RunningWorker::start(settings).await;
        wait_for("the close", async || env.closed().await == 1).await;
        env.assert_closed_by_alarms().await;
        worker.stop().await;
    });
}

#[test]
fn setup_calls_plugin_deprecated() {
    with_type("setup_calls_plugin_deprecated", async |env| {
        let (code, stdout, stderr) = command(&env.settings, &["setup"]).await;
        assert_eq!(code, 0, "{stderr}");
        assert!(stdout.contains("is deprecated") && stdout.contains("docs/FROM-THE-PLUGIN.md"), "{stdout}");
    });
}

/// The warning comes before the worker connects, so no broker needs the plugin for it.
#[test]
fn worker_calls_plugin_deprecated_once() {
    TestEnv::builder().settings(delayed_exchange).run(async |env| {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let mut settings = env.settings.clone();
        // No process listens on this port (tcpmux).
        settings.amqp.url = "amqp://guest:guest@127.0.0.1:1/%2f".to_owned().into();
        let mut command = process::order_timeout(&settings);
        command.args(["--set", "delay.strategy=delayed-exchange", "worker"]);
        let worker = WorkerProcess::of(command.stdout(Stdio::null()).stderr(File::create(&log).unwrap()));
        let text = || std::fs::read_to_string(&log).unwrap();
        wait_for("the start", async || text().contains("worker started")).await;
        worker.terminate(TIMEOUT);
        assert_eq!(text().matches("is deprecated").count(), 1, "{}", text());
    });
}

#[test]
fn default_strategy_is_not_deprecated() {
    assert_eq!(Strategy::DeadLetter.deprecation(), None);
    assert_eq!(Settings::defaults().delay.strategy, Strategy::DeadLetter);
}

#[test]
fn inbox_alarm_uses_delayed_exchange() {
    with_type("inbox_alarm_uses_delayed_exchange", async |env| {
        // Later than the worker holds alarms, so it must wait in the exchange.
        let order = env.order(Duration::from_secs(6)).await;
        env.publish_raw(&env.names().schedule(), "", &body(&order), BasicProperties::default().with_delivery_mode(2))
            .await;
        assert_waits_in_exchange(&env, &order).await;
    });
}

#[test]
fn early_alarm_is_rearmed() {
    with_type("early_alarm_is_rearmed", async |env| {
        // Like the first chunk of a delay that is longer than the plugin's maximum.
        let order = env.order(Duration::from_secs(6)).await;
        env.publish_raw(&env.names().due(), DUE_KEY, &body(&order), BasicProperties::default().with_delivery_mode(2))
            .await;
        assert_waits_in_exchange(&env, &order).await;
    });
}

fn body(order: &Order) -> Vec<u8> {
    Alarm::new(order.order_id(), order.deadline).to_bytes()
}

/// Asserts that a worker publishes the alarm to the exchange, that no worker holds it until shortly before the
/// deadline, and that its order is closed then.
async fn assert_waits_in_exchange(env: &TestEnv, order: &Order) {
    let (timeout, inbox) = (env.names().timeout(), env.names().schedule());
    let worker = env.worker().await;
    wait_for("the alarm consumed", async || env.depth(&timeout).await + env.depth(&inbox).await == 0).await;
    // The worker would return the alarm here if it held it.
    worker.stop().await;
    assert_eq!(env.depth(&timeout).await + env.depth(&inbox).await, 0, "it was held, not re-armed");
    assert_eq!(env.status(order).await, "unpaid");
    wait_for("the alarm to come out of the exchange", async || env.depth(&timeout).await == 1).await;
    let worker = env.worker().await;
    wait_for("the close", async || env.status(order).await == "closed").await;
    env.assert_ledger().await;
    worker.stop().await;
}

#[test]
fn longest_delay_does_not_fire_immediately() {
    with_type("longest_delay_does_not_fire_immediately", async |env| {
        let publisher = env.publisher().await;
        let now = Timestamp::now_by_local_clock();
        // Both exceed the plugin's maximum. A delay of one millisecond above it would be delivered at once.
        publisher.schedule("in fifty days", now + 50 * DAY).await.unwrap();
        publisher.schedule("in nine years", now + 9 * 365 * DAY).await.unwrap();
        publisher.schedule("soon", now + Duration::from_secs(2)).await.unwrap();
        let timeout = env.names().timeout();
        wait_for("the near alarm", async || env.depth(&timeout).await > 0).await;
        assert_eq!(env.depth(&timeout).await, 1, "only the near one");
        let got = env.channel().basic_get(timeout.as_str().into(), Default::default()).await.unwrap().unwrap();
        assert!(String::from_utf8_lossy(&got.delivery.data).contains("\"soon\""), "{:?}", got.delivery.data);
    });
}

/// Needs no broker. A far alarm goes through the plugin in chunks of at most its maximum.
#[test]
fn delay_beyond_plugin_limit_is_capped() {
    let mut settings = Settings::defaults();
    settings.delay.strategy = Strategy::DelayedExchange;
    let now = Timestamp::now_by_local_clock();
    let id = order_timeout_core::order::OrderId::new("order-1").unwrap();
    let lead = settings.delay.lead;
    let longest = Duration::from_millis(LONGEST_X_DELAY_MS);
    assert_eq!(LONGEST_X_DELAY_MS, u64::from(u32::MAX), "the plugin counts to 2^32 - 1");
    for (remaining, expected) in [
        (Duration::ZERO, Duration::ZERO),
        (lead, Duration::ZERO),
        (lead + Duration::from_millis(1), Duration::from_millis(1)),
        (lead + longest, longest),
        (lead + longest + Duration::from_millis(1), longest),
        (3_649 * DAY, longest),
    ] {
        let route = Route::to(&settings.delay.place(&id, now + remaining, now), &Kind::ORDER, &settings.names());
        assert_eq!(route.delay, Delay::XDelayMs(u64::try_from(expected.as_millis()).unwrap()), "{remaining:?}");
        let due = Alarm::new(id.clone(), now + remaining);
        let message = envelope::address(due.into(), route, now);
        assert!(!message.mandatory, "a delayed message reaches no queue yet and would be returned");
        assert_eq!(message.ttl, None);
        let header = message.headers.iter().find(|(name, _)| *name == "x-delay").map(|(_, value)| value);
        assert_eq!(header, Some(&AMQPValue::LongLongInt(i64::try_from(expected.as_millis()).unwrap())));
    }
}

/// Asserts that the sentence names the plugin and both fixes.
fn assert_names_the_plugin(sentence: &str) {
    for part in ["rabbitmq_delayed_message_exchange", "4.2", "delay.strategy = \"dead-letter\""] {
        assert!(sentence.contains(part), "{sentence:?} lacks {part:?}");
    }
}

#[test]
fn publisher_refuses_strategy_without_plugin() {
    without_type("publisher_refuses_strategy_without_plugin", async |env| {
        let declared = env.settings.topology().declare(env.broker()).await;
        assert!(matches!(declared, Err(TopologyError::NoDelayedExchange { .. })), "{declared:?}");
        assert_names_the_plugin(&declared.unwrap_err().to_string());

        let published = env.settings.publisher().connect().await.map(drop);
        assert!(matches!(published, Err(ConnectError::Broker(BrokerError::Refused(_)))), "{published:?}");
        assert_names_the_plugin(&published.unwrap_err().to_string());

        // Refused, not unavailable: a worker that kept retrying would appear to run.
        let (alarms, _deliveries) = tokio::sync::mpsc::unbounded_channel();
        let opening = Opening { number: 1, must_be_set_up: false };
        let opened = Session::open(&env.settings, &Kind::ORDER, opening, alarms).await.map(drop);
        assert!(matches!(opened, Err(OpenError::Broker(BrokerError::Refused(_)))), "{opened:?}");
        assert_names_the_plugin(&opened.unwrap_err().to_string());
        let started = Worker::start(env.settings.clone()).await.map(drop);
        assert_names_the_plugin(&started.expect_err("a worker that cannot delay").to_string());
    });
}

#[test]
fn every_command_refuses_strategy_without_plugin() {
    without_type("every_command_refuses_strategy_without_plugin", async |env| {
        for arguments in
            [&["setup"][..], &["schedule", "01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4c", "--in", "30m"], &["worker"]]
        {
            let (code, stdout, stderr) = command(&env.settings, arguments).await;
            assert_eq!((code, stdout.as_str(), stderr.lines().count()), (1, "", 1), "{arguments:?}: {stderr}");
            assert_names_the_plugin(&stderr);
            assert!(!stderr.contains("is it running there"), "{arguments:?}: {stderr}");
        }
    });
}

async fn command(settings: &Settings, arguments: &[&str]) -> (i32, String, String) {
    let mut command = process::order_timeout(settings);
    // Without the worker's log, standard error has only the final sentence. The time limit turns a worker that does not
    // give up into a failed test instead of an endless one.
    command.args(["--set", "delay.strategy=delayed-exchange", "--set", "log.filter=off"]).args(arguments);
    let mut limited = std::process::Command::new("timeout");
    limited.arg("20").arg(command.get_program()).args(command.get_args());
    for (key, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(key, value),
            None => limited.env_remove(key),
        };
    }
    tokio::task::spawn_blocking(move || process::run(&mut limited)).await.unwrap()
}

#[test]
fn unreachable_broker_is_not_missing_plugin() {
    TestEnv::builder().settings(delayed_exchange).run(async |env| {
        let mut settings = env.settings.clone();
        // No process listens on this port (tcpmux).
        settings.amqp.url = "amqp://guest:guest@127.0.0.1:1/%2f".to_owned().into();
        for arguments in [&["setup"][..], &["schedule", "01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4c", "--in", "30m"]] {
            let (code, _, stderr) = command(&settings, arguments).await;
            assert_eq!(code, 1, "{stderr}");
            assert!(stderr.contains("is it running there?") && !stderr.contains("plugin"), "{arguments:?}: {stderr}");
        }
    });
}

/// The connection breaks when the delayed exchange is declared, whether or not the broker has the type.
#[test]
fn lost_connection_is_not_missing_plugin() {
    TestEnv::builder().settings(delayed_exchange).run(async |env| {
        let url = &env.settings.amqp.url;
        if url.expose_secret().starts_with("amqps://") {
            let test = "delayed_exchange::lost_connection_is_not_missing_plugin";
            return skipped(test, "the connection to this broker is encrypted, so the test cannot read it");
        }
        let target = url.expose_secret().parse::<lapin::uri::AMQPUri>().unwrap().authority;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let cutting = tokio::spawn(cut_at(listener, (target.host, target.port), b"x-delayed-message"));

        let mut settings = env.settings.clone();
        settings.amqp.url = with_parts(url, None, Some(&address), None);
        let connection = connect::connect(&settings.amqp, "test").await.unwrap();
        let declared = settings.topology().declare(&connection).await;
        assert!(cutting.await.unwrap(), "the connection was cut where it should be");
        let error = declared.expect_err("the connection is gone");
        assert!(matches!(error, TopologyError::Failed { .. }), "{error:?}");
        assert!(!error.to_string().contains("plugin"), "{error}");
    });
}

/// Forwards one connection to `target` until the client sends these bytes, which the target never receives. Returns
/// whether it sent them.
async fn cut_at(listener: TcpListener, target: (String, u16), bytes: &'static [u8]) -> bool {
    let (client, _) = listener.accept().await.unwrap();
    let (mut from_client, mut to_client) = client.into_split();
    let (mut from_target, mut to_target) = TcpStream::connect(target).await.unwrap().into_split();
    let answers = tokio::spawn(async move { tokio::io::copy(&mut from_target, &mut to_client).await });
    let mut buffer = vec![0; 64 * 1024];
    let mut was_sent = false;
    while let Ok(count @ 1..) = from_client.read(&mut buffer).await {
        was_sent = buffer[..count].windows(bytes.len()).any(|window| window == bytes);
        if was_sent || to_target.write_all(&buffer[..count]).await.is_err() {
            break;
        }
    }
    answers.abort();
    was_sent
}
