//! The broker parts with a consumer that keeps a delivery too long (`consumer_timeout`, 30 minutes where nobody set it).
//! Whatever a worker cannot finish it gives back before that.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::{BasicConsumeOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Connection};
use order_timeout::Settings;
use order_timeout::topology::DUE_KEY;
use secrecy::SecretString;
use tokio::time::timeout;

use crate::support::away::{
    COMING_BACK, assert_all_closed_and_announced, expiring_queue_arguments, keep_events, meanwhile, shorten_timeouts,
    with_broker_behind,
};
use crate::support::private::Private;
use crate::support::proxy::{Count, Direction, Proxy};
use crate::support::{RunningWorker, TestEnv, wait_for, wait_within, with_env};

const SECOND: Duration = Duration::from_secs(1);
/// How often [`LeftLying`] is taken away.
const LOSSES: usize = 2;

/// Runs a test on a broker that waits five seconds for an acknowledgement, and looks five times a second.
fn on_impatient_broker<F: Future<Output = ()> + Send + 'static>(
    test: impl FnOnce(Arc<TestEnv>, Arc<Private>) -> F + Send + 'static,
) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = directory.path().join("impatient.config");
    let terms = "[{rabbit, [{consumer_timeout, 5000}, {channel_tick_interval, 200}]}].\n";
    std::fs::write(&file, terms).unwrap();
    let broker = Arc::new(Private::broker(&["--config", name(&file)]));
    let adjust = |settings: &mut Settings| {
        shorten_timeouts(settings);
        settings.amqp.url = broker.url.clone().into();
    };
    let for_test = broker.clone();
    with_env(adjust, move |env| test(env, for_test));
}

fn name(path: &Path) -> &str {
    path.to_str().expect("a path of letters")
}

/// The broker's words on a network's wire that end a consumer. Up to RabbitMQ 4.2 the channel loses timeout and closes
/// itself, and from 4.3 on the queue, which cancels the consumer; only the former is written into the broker's log.
struct Endings([Count; 2]);

impl Endings {
    /// `channel.close` and `basic.cancel`: the numbers of class and method, of 16 bits each, that a frame's payload begins
    /// with. A delivery has them, too, if its tag ends in 20 or 60 and its exchange's name has 40 or 30 characters; the
    /// exchanges that these workers' alarms come by have others.
    const METHODS: [&str; 2] = ["\0\x14\0\x28", "\0\x3c\0\x1e"];

    fn on(network: &Proxy) -> Self {
        Self(Self::METHODS.map(|method| network.count(Direction::ToClient, method)))
    }

    fn count(&self) -> usize {
        self.0.iter().map(Count::get).sum()
    }
}

/// A message that is left unacknowledged on purpose: when the broker takes it away, its timeout has ended for whatever
/// was delivered earlier.
struct LeftLying {
    queue: String,
    broker: Connection,
    endings: Endings,
    _network: Proxy,
}

impl LeftLying {
    async fn prepare(env: &TestEnv) -> Self {
        let queue = format!("{}.timeout", env.settings.namespace);
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        env.channel.queue_declare(queue.as_str().into(), options, expiring_queue_arguments()).await.unwrap();
        env.publish_raw("", &queue, b"left lying", BasicProperties::default()).await;
        let network = Proxy::before(&env.settings.amqp.url).await;
        let broker =
            order_timeout::broker::connect(&with_broker_behind(env, &network).amqp, "left lying").await.unwrap();
        Self { queue, broker, endings: Endings::on(&network), _network: network }
    }

    /// Takes it, waits until the broker has lost its timeout, and once more: channels and queues are looked at each in
    /// their own time, so the first loss says little about others.
    async fn outwait_the_broker(self) {
        for loss in 1..=LOSSES {
            let channel = self.broker.create_channel().await.unwrap();
            let options = BasicConsumeOptions::default();
            let consumer = channel.basic_consume(self.queue.as_str().into(), "".into(), options, FieldTable::default());
            let mut consumer = consumer.await.unwrap();
            let hears = async { while let Some(Ok(_unacknowledged)) = consumer.next().await {} };
            timeout(COMING_BACK, hears).await.expect("the broker loses its timeout");
            assert!(self.endings.count() >= loss, "the end of a consumer went by unseen");
        }
    }
}

/// A worker, and what the broker said to it.
struct Watched {
    worker: RunningWorker,
    endings: Endings,
    _network: Proxy,
}

impl Watched {
    async fn start(env: &TestEnv) -> Self {
        Self::with_database_at(env, env.settings.database.url.clone()).await
    }

    async fn with_database_at(env: &TestEnv, url: SecretString) -> Self {
        let network = Proxy::before(&env.settings.amqp.url).await;
        let endings = Endings::on(&network);
        let mut settings = with_broker_behind(env, &network);
        settings.database.url = url;
        Self { worker: RunningWorker::start(settings).await, endings, _network: network }
    }

    /// Insists that the broker lost its timeout with nobody but [`LeftLying`].
    async fn stop_never_having_kept_it_waiting(self) {
        self.worker.stop().await;
        assert_eq!(self.endings.count(), 0, "the broker ended a consumer of the worker's");
    }
}

#[test]
fn unavailable_database_returns_alarms_before_ack_timeout() {
    on_impatient_broker(async |env: Arc<TestEnv>, _broker: Arc<Private>| {
        let left_lying = LeftLying::prepare(&env).await;
        let kept_events = keep_events(&env).await;
        let network = Proxy::before(&env.settings.database.url).await;
        let database = network.address(&env.settings.database.url);
        let worker = Watched::with_database_at(&env, database).await;
        let orders = env.orders(30, 2 * SECOND).await;
        env.deliver(&orders).await;
        wait_for("the alarms taken", async || env.depth(&env.names().timeout()).await == 0).await;
        network.cut();
        left_lying.outwait_the_broker().await;
        network.restore();
        assert_all_closed_and_announced(&env, &kept_events).await;
        worker.stop_never_having_kept_it_waiting().await;
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn locked_order_returns_alarms_before_ack_timeout() {
    on_impatient_broker(async |env: Arc<TestEnv>, _broker: Arc<Private>| {
        let left_lying = LeftLying::prepare(&env).await;
        let kept_events = keep_events(&env).await;
        let worker = Watched::start(&env).await;
        let locked = env.order(SECOND).await;
        let mut transaction = env.pool.begin().await.unwrap();
        let lock = sqlx::query("SELECT 1 FROM orders WHERE id = $1 FOR UPDATE").bind(locked.id);
        lock.execute(&mut *transaction).await.unwrap();
        env.deliver([&locked]).await;
        left_lying.outwait_the_broker().await;
        transaction.rollback().await.unwrap();
        assert_all_closed_and_announced(&env, &kept_events).await;
        worker.stop_never_having_kept_it_waiting().await;
        env.assert_nothing_left_undone().await;
    });
}

#[test]
fn unparkable_alarms_return_before_ack_timeout() {
    on_impatient_broker(async |env: Arc<TestEnv>, _broker: Arc<Private>| {
        let left_lying = LeftLying::prepare(&env).await;
        let network = Proxy::before(&env.settings.database.url).await;
        let database = network.address(&env.settings.database.url);
        let worker = Watched::with_database_at(&env, database).await;
        network.cut();
        env.publish_raw(&env.names().due(), DUE_KEY, b"no alarm", BasicProperties::default()).await;
        wait_for("the alarm taken", async || env.depth(&env.names().timeout()).await == 0).await;
        left_lying.outwait_the_broker().await;
        network.restore();
        wait_within(COMING_BACK, "the alarm parked", async || !env.parked().await.is_empty()).await;
        // One try is kept to find out when parking works again; the delivery itself may come after it.
        wait_within(COMING_BACK, "the alarm taken again", async || env.depth(&env.names().timeout()).await == 0).await;
        worker.stop_never_having_kept_it_waiting().await;
        assert_eq!(env.parked().await.len(), 1, "once");
    });
}

#[test]
fn blocked_publishing_returns_alarms_before_ack_timeout() {
    on_impatient_broker(async |env: Arc<TestEnv>, broker: Arc<Private>| {
        let left_lying = LeftLying::prepare(&env).await;
        let kept_events = keep_events(&env).await;
        let order = env.order(20 * SECOND).await;
        env.publish_raw("", &env.names().arm(), &order.body(), BasicProperties::default()).await;
        meanwhile(|| broker.ctl(&["set_vm_memory_high_watermark", "0.00001"]));
        let worker = Watched::start(&env).await;
        wait_for("the alarm taken", async || env.depth(&env.names().arm()).await == 0).await;
        left_lying.outwait_the_broker().await;
        meanwhile(|| broker.ctl(&["set_vm_memory_high_watermark", "0.6"]));
        assert_all_closed_and_announced(&env, &kept_events).await;
        worker.stop_never_having_kept_it_waiting().await;
    });
}
