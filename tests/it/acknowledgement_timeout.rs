//! The broker takes a channel away from a consumer that keeps a delivery too long (`consumer_timeout`, 30 minutes where
//! nobody set it). Whatever a worker cannot finish it gives back before that.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lapin::BasicProperties;
use lapin::options::{BasicConsumeOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use order_timeout::Settings;
use order_timeout::topology::DUE_KEY;

use crate::support::away::{
    COMING_BACK, assert_all_closed_and_heard, be_impatient, keep_events, meanwhile, worker_through,
};
use crate::support::private::Private;
use crate::support::proxy::Proxy;
use crate::support::{Stage, on_stage, wait_for, wait_within};

const SECOND: Duration = Duration::from_secs(1);
/// How often [`LeftLying`] is taken away.
const LOSSES: usize = 2;
/// The name of a connection that is opened when everything is over.
const LAST_WORD: &str = "the last word";

/// Runs a test on a broker that waits five seconds for an acknowledgement, and looks five times a second.
fn on_impatient_broker<F: Future<Output = ()> + Send + 'static>(
    test: impl FnOnce(Arc<Stage>, Arc<Private>) -> F + Send + 'static,
) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = directory.path().join("impatient.config");
    let terms = "[{rabbit, [{consumer_timeout, 5000}, {channel_tick_interval, 200}]}].\n";
    std::fs::write(&file, terms).unwrap();
    let broker = Arc::new(Private::broker(&["--config", name(&file)]));
    let adjust = |settings: &mut Settings| {
        be_impatient(settings);
        settings.amqp.url = broker.url.clone().into();
    };
    let for_test = broker.clone();
    on_stage(adjust, move |stage| test(stage, for_test));
}

fn name(path: &Path) -> &str {
    path.to_str().expect("a path of letters")
}

/// A message that is left unacknowledged on purpose: when the broker takes it away, its patience has ended for whatever
/// was delivered earlier.
struct LeftLying<'a> {
    stage: &'a Stage,
    queue: String,
}

impl<'a> LeftLying<'a> {
    async fn prepare(stage: &'a Stage) -> Self {
        let queue = format!("{}.patience", stage.settings.namespace);
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        let mut quorum = FieldTable::default();
        quorum.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        stage.channel.queue_declare(queue.as_str().into(), options, quorum).await.unwrap();
        stage.publish_raw("", &queue, b"left lying", BasicProperties::default()).await;
        Self { stage, queue }
    }

    /// Takes it, waits until the broker has lost its patience, and once more: the broker looks at every channel in its
    /// own time, so the first loss says little about others.
    async fn outwait_the_broker(self) {
        for _ in 0..LOSSES {
            let channel = self.stage.broker.create_channel().await.unwrap();
            let options = BasicConsumeOptions::default();
            let consumer = channel.basic_consume(self.queue.as_str().into(), "".into(), options, FieldTable::default());
            let _consumer = consumer.await.unwrap();
            let is_over = async || !channel.status().connected();
            wait_within(COMING_BACK, "the end of the broker's patience", is_over).await;
        }
    }
}

/// Insists that the broker lost its patience with nobody but [`LeftLying`]. The broker writes its log in order, but
/// seconds after the fact; and of one channel twice, if it looks again before the client has answered that it is closed.
async fn assert_no_worker_kept_it_waiting(stage: &Stage, broker: &Private) {
    let losses = || -> BTreeSet<String> {
        let log = broker.log();
        let losses = log.lines().filter(|line| line.contains("has timed out waiting"));
        // The Erlang process that is the channel: "2026-01-31 12:00:00.000000+00:00 [warning] <0.1096.0> Consumer 1 on …".
        losses.map(|line| line.split(' ').nth(3).expect("a line of the broker's log").to_owned()).collect()
    };
    wait_for("the broker's word of its patience's end", async || losses().len() >= LOSSES).await;
    // What it has written down by then, too.
    order_timeout::broker::connect(&stage.settings.amqp, LAST_WORD).await.unwrap();
    wait_for("the broker's last word", async || broker.log().contains(LAST_WORD)).await;
    assert_eq!(losses().len(), LOSSES, "a worker lost its channel: {}", broker.log());
}

#[test]
fn alarms_go_back_in_time_while_the_database_is_away() {
    on_impatient_broker(async |stage: Arc<Stage>, broker: Arc<Private>| {
        let left_lying = LeftLying::prepare(&stage).await;
        let kept_events = keep_events(&stage).await;
        let network = Proxy::before(&stage.settings.database.url).await;
        let worker = worker_through(&stage, &network).await;
        let orders = stage.orders(30, 2 * SECOND).await;
        stage.deliver(&orders).await;
        wait_for("the alarms taken", async || stage.depth(&stage.names().timeout()).await == 0).await;
        network.cut();
        left_lying.outwait_the_broker().await;
        network.restore();
        assert_all_closed_and_heard(&stage, &kept_events).await;
        worker.stop().await;
        assert_no_worker_kept_it_waiting(&stage, &broker).await;
        stage.assert_nothing_left_undone().await;
    });
}

#[test]
fn alarms_of_an_order_that_somebody_keeps_locked_go_back_in_time() {
    on_impatient_broker(async |stage: Arc<Stage>, broker: Arc<Private>| {
        let left_lying = LeftLying::prepare(&stage).await;
        let kept_events = keep_events(&stage).await;
        let worker = stage.worker().await;
        let locked = stage.order(SECOND).await;
        let mut transaction = stage.pool.begin().await.unwrap();
        let lock = sqlx::query("SELECT 1 FROM orders WHERE id = $1 FOR UPDATE").bind(locked.id);
        lock.execute(&mut *transaction).await.unwrap();
        stage.deliver([&locked]).await;
        left_lying.outwait_the_broker().await;
        transaction.rollback().await.unwrap();
        assert_all_closed_and_heard(&stage, &kept_events).await;
        worker.stop().await;
        assert_no_worker_kept_it_waiting(&stage, &broker).await;
        stage.assert_nothing_left_undone().await;
    });
}

#[test]
fn alarms_that_cannot_be_parked_go_back_in_time() {
    on_impatient_broker(async |stage: Arc<Stage>, broker: Arc<Private>| {
        let left_lying = LeftLying::prepare(&stage).await;
        let network = Proxy::before(&stage.settings.database.url).await;
        let worker = worker_through(&stage, &network).await;
        network.cut();
        stage.publish_raw(&stage.names().due(), DUE_KEY, b"no alarm", BasicProperties::default()).await;
        wait_for("the alarm taken", async || stage.depth(&stage.names().timeout()).await == 0).await;
        left_lying.outwait_the_broker().await;
        network.restore();
        wait_within(COMING_BACK, "the alarm parked", async || !stage.parked().await.is_empty()).await;
        // One try is kept to find out when parking works again; the delivery itself may come after it.
        wait_within(COMING_BACK, "the alarm taken again", async || stage.depth(&stage.names().timeout()).await == 0)
            .await;
        worker.stop().await;
        assert_no_worker_kept_it_waiting(&stage, &broker).await;
        assert_eq!(stage.parked().await.len(), 1, "once");
    });
}

#[test]
fn alarms_on_their_way_into_the_wheel_go_back_in_time_while_the_broker_blocks_publishers() {
    on_impatient_broker(async |stage: Arc<Stage>, broker: Arc<Private>| {
        let left_lying = LeftLying::prepare(&stage).await;
        let kept_events = keep_events(&stage).await;
        let order = stage.order(20 * SECOND).await;
        stage.publish_raw("", &stage.names().arm(), &order.body(), BasicProperties::default()).await;
        meanwhile(|| broker.ctl(&["set_vm_memory_high_watermark", "0.00001"]));
        let worker = stage.worker().await;
        wait_for("the alarm taken", async || stage.depth(&stage.names().arm()).await == 0).await;
        left_lying.outwait_the_broker().await;
        meanwhile(|| broker.ctl(&["set_vm_memory_high_watermark", "0.6"]));
        assert_all_closed_and_heard(&stage, &kept_events).await;
        worker.stop().await;
        assert_no_worker_kept_it_waiting(&stage, &broker).await;
    });
}
