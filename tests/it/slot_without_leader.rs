//! A quorum queue without a leader confirms nothing. Such a slot of the wheel delays no order: reading ahead closes those whose
//! alarms belong into it.
//!
//! Needs `rabbitmqctl`, and so a private broker.

use std::sync::Arc;
use std::time::Duration;

use order_timeout::Settings;
use order_timeout_testkit::private::Private;
use order_timeout_testkit::{TestEnv, add_coarse_ring, wait_for};

/// Well above what a busy machine needs for a confirm.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(5);

fn on_private_broker<F: Future<Output = ()> + Send + 'static>(test: impl FnOnce(Arc<TestEnv>, Arc<Private>) -> F) {
    let broker = Arc::new(Private::broker(&[]));
    let adjust = |settings: &mut Settings| {
        settings.amqp.url = broker.url.clone().into();
        settings.amqp.confirm_timeout = CONFIRM_TIMEOUT;
        // So that the deadlines keep their slots while a test waits for several of these timeouts.
        add_coarse_ring(settings);
    };
    let for_test = broker.clone();
    TestEnv::builder().settings(adjust).run(move |env| test(env, for_test));
}

async fn ctl(broker: &Arc<Private>, arguments: &[&str]) -> String {
    let (broker, arguments) = (broker.clone(), arguments.iter().map(ToString::to_string).collect::<Vec<_>>());
    let call = move || broker.ctl(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    tokio::task::spawn_blocking(call).await.unwrap()
}

/// The queue's only Raft member answers nothing from now on, like that of a queue during whose declaration RabbitMQ 3.10 was
/// killed.
async fn silence_leader(broker: &Arc<Private>, queue: &str) {
    let script = format!(
        "{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<\"/\">>, queue, <<\"{queue}\">>)),
         {{Name, _}} = amqqueue:get_pid(Q), ok = sys:suspend(Name)."
    );
    let said = ctl(broker, &["eval", &script]).await;
    assert!(said.trim().ends_with("ok"), "{said}");
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
        silence_leader(&broker, &queue).await;

        env.deliver(&orders[1..]).await;
        wait_for("all closed", async || env.closed().await == 21).await;
        env.assert_on_time().await;
        worker.stop().await;
    });
}
