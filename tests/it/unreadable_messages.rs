//! A message that ends every session is named with the command that removes it, and orders are closed on time meanwhile.

use std::sync::Arc;
use std::time::Duration;

use lapin::BasicProperties;
use order_timeout::http::READYZ;
use order_timeout_testkit::figures::{Figures, get, serve_http};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::raw::{self, Properties};
use order_timeout_testkit::{RunningWorker, TestEnv, wait_promised};

const SECOND: Duration = Duration::from_secs(1);
const CAUSE: &str = "degraded{cause=\"unreadable_message\"}";
/// Flag of a property (AMQP 0-9-1, class "basic").
const TYPE: u16 = 1 << 5;

/// The worker names `queue`, closes orders on time, and goes on once the queue is purged.
async fn is_named_until_purged(env: &TestEnv, broker: &Private, worker: &RunningWorker, queue: &str, why: &str) {
    let line = async || get(worker, READYZ).await.1.lines().find(|line| line.contains(CAUSE_LINE)).map(str::to_owned);
    wait_promised(15 * SECOND, "the cause on the page", async || line().await.is_some()).await;
    let shown = line().await.unwrap_or_default();
    assert!(shown.contains(why) && shown.contains(&format!("`rabbitmqctl purge_queue {queue}`")), "{shown}");
    assert_eq!(Figures::of(worker).await.get(CAUSE), 1.0);
    // No session stays open, so orders are read ahead of their deadlines.
    env.orders(50, 3 * SECOND).await;
    wait_promised(15 * SECOND, "every close", async || env.closed().await == 50).await;
    assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'look_ahead'").await, 50);
    let gone = async || {
        broker.ctl(&["purge_queue", queue]);
        Figures::of(worker).await.get(CAUSE) == 0.0
    };
    wait_promised(30 * SECOND, "the cause withdrawn", gone).await;
    let (status, page) = get(worker, READYZ).await;
    assert!(status == 200 && !page.contains(CAUSE_LINE), "{page}");
}

const CAUSE_LINE: &str = "degraded: unreadable_message: ";

/// With a broker of its own, of this version.
fn in_a_broker<F: Future<Output = ()> + Send + 'static>(
    arguments: &[&str],
    test: impl FnOnce(Arc<TestEnv>, Arc<Private>) -> F + Send + 'static,
) {
    let broker = Arc::new(Private::broker(arguments));
    // Kept until the test environment is cleaned up.
    let (url, in_the_test) = (broker.url.clone(), broker.clone());
    let settings = move |settings: &mut order_timeout::Settings| {
        settings.amqp.url = url.into();
        serve_http(settings);
    };
    TestEnv::builder().settings(settings).run(async move |env| test(env, in_the_test).await);
}

#[test]
fn unreadable_message_is_named_with_its_purge() {
    in_a_broker(&[], |env, broker| async move {
        let worker = env.worker().await;
        let order = env.order(60 * SECOND).await;
        let properties = Properties::text(TYPE, b"order.\xff\xfe");
        raw::publish_with(&env.settings, &env.names().due(), b"due", &properties, &order.body());
        let queue = env.names().timeout();
        is_named_until_purged(&env, &broker, &worker, &queue, "the AMQP client cannot read a message").await;
        worker.stop().await;
    });
}

#[test]
fn undeliverable_message_is_named_with_its_purge() {
    // In this version AMQP 1.0 is a plugin, with which a message id may be a number, which AMQP 0-9-1 cannot represent.
    in_a_broker(&["--rabbitmq", "3.10", "--plugin", "rabbitmq_amqp1_0"], |env, broker| async move {
        let (queue, order) = (env.names().schedule(), env.order(60 * SECOND).await);
        env.publish_raw(&queue, "", &order.body(), BasicProperties::default()).await;
        broker.ctl(&["eval", &publish_with_number_as_id(&queue)]);
        let worker = env.worker().await;
        is_named_until_purged(&env, &broker, &worker, &queue, "the broker itself failed").await;
        worker.stop().await;
    });
}

/// Does what the plugin does for a publisher whose message has the correlation id 7.
fn publish_with_number_as_id(queue: &str) -> String {
    format!(
        "{{ok, C}} = amqp_connection:start({{amqp_params_direct, <<\"guest\">>, none, <<\"/\">>, node(), none, []}}),
         {{ok, Channel}} = amqp_connection:open_channel(C),
         U = undefined,
         Properties = {{'P_basic', U, U, U, 2, U, {{ulong, 7}}, U, U, U, U, U, U, U, U}},
         ok = amqp_channel:call(Channel, {{'basic.publish', 0, <<>>, <<\"{queue}\">>, false, false}},
                                {{amqp_msg, Properties, <<\"an alarm\">>}}),
         amqp_connection:close(C)."
    )
}
