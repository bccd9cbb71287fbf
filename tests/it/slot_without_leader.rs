//! A quorum queue without a leader confirms nothing. Such a slot of the wheel must delay no alarm: neither those for
//! other slots, nor those that belong into it.
//!
//! Needs `rabbitmqctl`, and so a private broker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use order_timeout::Settings;
use order_timeout::effects::rearm::Rearmer;
use order_timeout::effects::slots::SlotDeclarer;
use order_timeout::http::READYZ;
use order_timeout_amqp::publisher::ConfirmedPublisher;
use order_timeout_core::alarm::{Rearm, Receipt, Wanted};
use order_timeout_core::clock::{ClockSample, DatabaseClock};
use order_timeout_core::delay::Placement;
use order_timeout_core::message::Alarm;
use order_timeout_core::order::{Deadline, OrderId, Timestamp};
use order_timeout_testkit::figures::{get, serve_http};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::{TestEnv, add_coarse_ring, alarms_alone, promised, wait_for};
use uuid::Uuid;

/// Well above what a busy machine needs for a confirm.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);

fn on_private_broker<F: Future<Output = ()> + Send + 'static>(test: impl FnOnce(Arc<TestEnv>, Arc<Private>) -> F) {
    let broker = Arc::new(Private::broker(&[]));
    let adjust = |settings: &mut Settings| {
        settings.amqp.url = broker.url.clone().into();
        settings.amqp.confirm_timeout = CONFIRM_TIMEOUT;
        // Otherwise the order whose alarm is in the silent slot would be closed by reading ahead.
        alarms_alone(settings);
        // So that the deadlines keep their slots while a test waits for several of these timeouts.
        add_coarse_ring(settings);
        serve_http(settings);
    };
    let for_test = broker.clone();
    TestEnv::builder().settings(adjust).run(move |env| test(env, for_test));
}

async fn ctl(broker: &Arc<Private>, arguments: &[&str]) -> String {
    let (broker, arguments) = (broker.clone(), arguments.iter().map(ToString::to_string).collect::<Vec<_>>());
    let call = move || broker.ctl(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    tokio::task::spawn_blocking(call).await.unwrap()
}

/// What the queue's only Raft member does from now on.
#[derive(Clone, Copy)]
enum Leader {
    /// Answers nothing, like the member of a queue during whose declaration RabbitMQ 3.10 was killed.
    Silent,
    /// Is not there, so that the broker refuses messages.
    Stopped,
}

async fn have_leader(broker: &Arc<Private>, queue: &str, leader: Leader) {
    let effect = match leader {
        Leader::Silent => "ok = sys:suspend(Name)",
        Leader::Stopped => "ok = ra:stop_server(quorum_queues, {Name, Node})",
    };
    let script = format!(
        "{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<\"/\">>, queue, <<\"{queue}\">>)),
         {{Name, Node}} = amqqueue:get_pid(Q), _ = Node, {effect}."
    );
    let said = ctl(broker, &["eval", &script]).await;
    assert!(said.trim().ends_with("ok"), "{said}");
}

fn rearm(deadline: Deadline) -> Rearm {
    let alarm = Alarm::new(OrderId::new(Uuid::now_v7().to_string()).unwrap(), deadline);
    Rearm { alarm: alarm.into(), receipt: Receipt { session: 1, channel: 0, tag: 1 }, wanted: Wanted::BeforeDeadline }
}

/// The queue in which an alarm for this deadline waits.
fn queue_of(env: &TestEnv, deadline: Deadline, now: Timestamp) -> String {
    let wheel = env.settings.delay.wheel().unwrap();
    let Placement::Slot { ring, slot, .. } = wheel.place(deadline, now) else { panic!("no slot") };
    env.settings.slots().find(&ring, slot).expect("a slot of the wheel").queue.name
}

/// `after_s`: the deadlines of the alarm for the slot without a leader, and of another one.
async fn assert_avoided(env: &TestEnv, broker: &Arc<Private>, leader: Leader, after_s: [u64; 2]) {
    let confirmed = ConfirmedPublisher::connect_lazily(&env.settings.amqp, "rearmer");
    let slots = SlotDeclarer::new(&env.settings, confirmed.clone());
    let rearmer = Rearmer::new(&env.settings, confirmed, slots.clone());
    let (asked, database) = (Instant::now(), Timestamp::now_by_local_clock());
    let clock = DatabaseClock::new(ClockSample { asked, answered: asked, database });
    let [broken, healthy] = after_s.map(|seconds| database + Duration::from_secs(seconds));
    let both = || vec![rearm(broken), rearm(healthy)];
    wait_for("both slots in use", async || rearmer.write(both(), clock).await.confirmed.len() == 2).await;

    let queue = queue_of(env, broken, clock.now());
    have_leader(broker, &queue, leader).await;
    // A batch for both may fail altogether: RabbitMQ itself waits for a silent leader, with the whole channel.
    wait_for("only that slot avoided", async || {
        let written = rearmer.write(both(), clock).await;
        assert_eq!(written.confirmed.len() + written.refused.len() + written.failed.len(), 2, "{written:?}");
        slots.why_avoided().is_some_and(|why| why.starts_with("1 of ") && why.contains(&queue))
    })
    .await;

    let began = Instant::now();
    let written = rearmer.write(both(), clock).await;
    assert_eq!(written.confirmed.len(), 2, "{written:?}");
    assert!(began.elapsed() < promised(CONFIRM_TIMEOUT), "it did not wait for that slot again");
}

#[test]
fn slot_without_leader_is_avoided() {
    on_private_broker(async |env, broker| {
        assert_avoided(&env, &broker, Leader::Stopped, [160, 220]).await;
        assert_avoided(&env, &broker, Leader::Silent, [300, 240]).await;
    });
}

#[test]
fn silent_slot_delays_no_order() {
    on_private_broker(async |env, broker| {
        let worker = env.worker().await;
        // All have one deadline, and belong into one slot.
        let orders = env.orders(21, Duration::from_secs(40)).await;
        env.deliver(&orders[..1]).await;
        let filled = async || env.depths("wheel.").await.into_iter().find(|(_, depth)| *depth > 0);
        wait_for("an alarm in its slot", async || filled().await.is_some()).await;
        let (queue, _) = filled().await.unwrap();
        have_leader(&broker, &queue, Leader::Silent).await;

        env.deliver(&orders[1..]).await;
        wait_for("the slot named", async || {
            get(&worker, READYZ).await.1.contains("degraded: slot_not_confirming: 1 of the wheel's queues")
        })
        .await;
        wait_for("the others closed", async || env.closed().await == 20).await;
        env.assert_closed_by_alarms().await;
        env.assert_on_time().await;
        worker.stop().await;
    });
}
