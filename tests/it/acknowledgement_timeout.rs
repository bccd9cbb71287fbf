//! The broker ends a consumer that keeps a delivery unacknowledged for too long (`consumer_timeout`, 30 minutes by
//! default). A worker returns every delivery that it cannot finish before that.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::{BasicConsumeOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Connection};
use order_timeout::Settings;
use order_timeout_amqp::topology::DUE_KEY;
use order_timeout_testkit::away::{
    assert_all_closed_and_announced, expiring_queue_arguments, keep_events, meanwhile, shorten_timeouts,
    with_broker_behind,
};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::process::WorkerProcess;
use order_timeout_testkit::proxy::{Count, Direction, Proxy};
use order_timeout_testkit::{RunningWorker, TIMEOUT, TestEnv, connect_to_broker, wait_for};
use secrecy::SecretString;
use tokio::time::timeout;

const SECOND: Duration = Duration::from_secs(1);
/// How often the broker ends the consumer of [`UnackedMessage`].
const TIMEOUTS: usize = 2;

/// Runs a test on a broker that waits five seconds for an acknowledgement, and checks five times a second.
fn with_short_ack_timeout<F: Future<Output = ()> + Send + 'static>(
    test: impl FnOnce(Arc<TestEnv>, Arc<Private>) -> F + Send + 'static,
) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = directory.path().join("short-timeout.config");
    let terms = "[{rabbit, [{consumer_timeout, 5000}, {channel_tick_interval, 200}]}].\n";
    std::fs::write(&file, terms).unwrap();
    let broker = Arc::new(Private::broker(&["--config", name(&file)]));
    let adjust = |settings: &mut Settings| {
        shorten_timeouts(settings);
        settings.amqp.url = broker.url.clone().into();
    };
    let for_test = broker.clone();
    TestEnv::builder().settings(adjust).run(move |env| test(env, for_test));
}

fn name(path: &Path) -> &str {
    path.to_str().expect("a path in plain letters")
}

/// Counts the methods by which the broker ends a consumer, as seen on the wire. Up to RabbitMQ 4.2 the channel times
/// out and closes itself; from 4.3 on the queue times out and cancels the consumer. Only the former is written to the
/// broker's log.
struct ConsumerEnds([Count; 2]);

impl ConsumerEnds {
    /// `channel.close` and `basic.cancel`: the numbers of class and method, of 16 bits each, at the start of a frame's
    /// payload. A delivery contains them too if its tag ends in 20 or 60 and its exchange's name has 40 or 30 characters;
    /// the names of these workers' exchanges have other lengths.
    const METHODS: [&str; 2] = ["\0\x14\0\x28", "\0\x3c\0\x1e"];

    fn on(network: &Proxy) -> Self {
        Self(Self::METHODS.map(|method| network.count(Direction::ToClient, method)))
    }

    fn count(&self) -> usize {
        self.0.iter().map(Count::get).sum()
    }
}

/// A message left unacknowledged on purpose: when the broker ends its consumer, the timeout of everything delivered
/// earlier has passed too.
struct UnackedMessage {
    queue: String,
    broker: Connection,
    ends: ConsumerEnds,
    _network: Proxy,
}

impl UnackedMessage {
    async fn prepare(env: &TestEnv) -> Self {
        let queue = format!("{}.unacked", env.settings.namespace);
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        env.channel().queue_declare(queue.as_str().into(), options, expiring_queue_arguments()).await.unwrap();
        env.publish_raw("", &queue, b"unacked", BasicProperties::default()).await;
        let network = Proxy::before(&env.settings.amqp.url).await;
        let broker = connect_to_broker(&with_broker_behind(env, &network), "unacked").await;
        Self { queue, broker, ends: ConsumerEnds::on(&network), _network: network }
    }

    /// Consumes it until the broker ends the consumer, twice: the broker checks each channel and queue at its own
    /// times, so the first timeout says little about the others.
    async fn wait_for_ack_timeout(self) {
        for end in 1..=TIMEOUTS {
            let channel = self.broker.create_channel().await.unwrap();
            let options = BasicConsumeOptions::default();
            let consumer = channel.basic_consume(self.queue.as_str().into(), "".into(), options, FieldTable::default());
            let mut consumer = consumer.await.unwrap();
            let consume = async { while let Some(Ok(_unacknowledged)) = consumer.next().await {} };
            timeout(TIMEOUT, consume).await.expect("the broker ends the consumer");
            assert!(self.ends.count() >= end, "the end of a consumer was not counted");
        }
    }
}

/// A worker, and the count of the consumers that the broker ended.
struct ObservedWorker {
    worker: RunningWorker,
    ends: ConsumerEnds,
    _network: Proxy,
}

impl ObservedWorker {
    async fn start(env: &TestEnv) -> Self {
        Self::with_database_at(env, env.settings.database.url.clone()).await
    }

    async fn with_database_at(env: &TestEnv, url: SecretString) -> Self {
        let network = Proxy::before(&env.settings.amqp.url).await;
        let ends = ConsumerEnds::on(&network);
        let mut settings = with_broker_behind(env, &network);
        settings.database.url = url;
        let worker = RunningWorker::start(settings).await;
        Self { worker, ends, _network: network }
    }

    /// Asserts that the broker ended no consumer of the worker, only that of [`UnackedMessage`].
    async fn stop_without_ack_timeout(self) {
        self.worker.stop().await;
        assert_eq!(self.ends.count(), 0, "the broker ended a consumer of the worker's");
    }
}

#[test]
fn unavailable_database_returns_alarms_before_ack_timeout() {
    with_short_ack_timeout(async |env: Arc<TestEnv>, _broker: Arc<Private>| {
        let unacked = UnackedMessage::prepare(&env).await;
        let kept_events = keep_events(&env).await;
        let network = Proxy::before(&env.settings.database.url).await;
        let database = network.address(&env.settings.database.url);
        let worker = ObservedWorker::with_database_at(&env, database).await;
        let orders = env.orders(30, 2 * SECOND).await;
        env.deliver(&orders).await;
        wait_for("the alarms consumed", async || env.depth(&env.names().timeout()).await == 0).await;
        network.cut();
        unacked.wait_for_ack_timeout().await;
        network.restore();
        assert_all_closed_and_announced(&env, &kept_events).await;
        worker.stop_without_ack_timeout().await;
        env.assert_nothing_left_undone().await;
    });
}

/// The alarm is held for longer than the broker waits for its acknowledgement.
#[test]
fn hold_beyond_ack_timeout_is_named() {
    with_short_ack_timeout(async |env: Arc<TestEnv>, _broker: Arc<Private>| {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let mut settings = env.settings.clone();
        settings.worker.hold_max = 30 * SECOND;
        let worker = WorkerProcess::start_with_log(&settings, &log);
        let order = env.order(15 * SECOND).await;
        env.deliver([&order]).await;
        let logged = || std::fs::read_to_string(&log).unwrap();
        let hint = "consumer-timeout in a policy, consumer_timeout in rabbitmq.conf";
        wait_for("the cause in the log", async || logged().contains(hint)).await;
        // Up to RabbitMQ 4.2 the former, from 4.3 on the latter; the handbook has both.
        let handbook = include_str!("../../docs/operating/troubleshoot.md");
        let sentences = [
            "the broker closed a channel because an alarm was not acknowledged in time",
            "the broker cancelled the consumer",
        ];
        assert!(sentences.iter().all(|sentence| handbook.contains(sentence)));
        assert!(sentences.iter().any(|sentence| logged().contains(sentence)), "{}", logged());
        assert_eq!(env.closed().await, 0, "before the deadline");
        wait_for("the close", async || env.closed().await == 1).await;
        assert_eq!(worker.terminate(TIMEOUT), 0);
        env.assert_ledger().await;
    });
}

#[test]
fn locked_order_returns_alarms_before_ack_timeout() {
    with_short_ack_timeout(async |env: Arc<TestEnv>, _broker: Arc<Private>| {
        let unacked = UnackedMessage::prepare(&env).await;
        let kept_events = keep_events(&env).await;
        let worker = ObservedWorker::start(&env).await;
        let locked = env.order(SECOND).await;
        let mut transaction = env.pool.begin().await.unwrap();
        let lock = sqlx::query("SELECT 1 FROM orders WHERE id = $1 FOR UPDATE").bind(locked.id);
        lock.execute(&mut *transaction).await.unwrap();
        env.deliver([&locked]).await;
        unacked.wait_for_ack_timeout().await;
        transaction.rollback().await.unwrap();
        assert_all_closed_and_announced(&env, &kept_events).await;
        worker.stop_without_ack_timeout().await;
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn unparkable_alarms_return_before_ack_timeout() {
    with_short_ack_timeout(async |env: Arc<TestEnv>, _broker: Arc<Private>| {
        let unacked = UnackedMessage::prepare(&env).await;
        let network = Proxy::before(&env.settings.database.url).await;
        let database = network.address(&env.settings.database.url);
        let worker = ObservedWorker::with_database_at(&env, database).await;
        network.cut();
        env.publish_raw(&env.names().due(), DUE_KEY, b"no alarm", BasicProperties::default()).await;
        wait_for("the alarm consumed", async || env.depth(&env.names().timeout()).await == 0).await;
        unacked.wait_for_ack_timeout().await;
        network.restore();
        wait_for("the alarm parked", async || !env.parked().await.is_empty()).await;
        // The worker keeps one delivery to find out when parking works again; its redelivery may come after it.
        wait_for("the alarm consumed again", async || env.depth(&env.names().timeout()).await == 0).await;
        worker.stop_without_ack_timeout().await;
        assert_eq!(env.parked().await.len(), 1, "once");
    });
}

#[test]
fn blocked_publishing_returns_alarms_before_ack_timeout() {
    with_short_ack_timeout(async |env: Arc<TestEnv>, broker: Arc<Private>| {
        let unacked = UnackedMessage::prepare(&env).await;
        let kept_events = keep_events(&env).await;
        let order = env.order(20 * SECOND).await;
        env.publish_raw("", &env.names().schedule(), &order.body(), BasicProperties::default()).await;
        meanwhile(|| broker.ctl(&["set_vm_memory_high_watermark", "0.00001"]));
        let worker = ObservedWorker::start(&env).await;
        wait_for("the alarm consumed", async || env.depth(&env.names().schedule()).await == 0).await;
        unacked.wait_for_ack_timeout().await;
        meanwhile(|| broker.ctl(&["set_vm_memory_high_watermark", "0.6"]));
        assert_all_closed_and_announced(&env, &kept_events).await;
        worker.stop_without_ack_timeout().await;
    });
}
