//! A message that the AMQP client cannot read ends at most one session: it is found, named and moved aside, and the
//! orders beside it are closed by their alarms.

use std::sync::Arc;
use std::time::Duration;

use lapin::BasicProperties;
use lapin::options::QueueDeleteOptions;
use order_timeout::Settings;
use order_timeout::http::READYZ;
use order_timeout_amqp::topology::{DUE_KEY, Names};
use order_timeout_core::kind::Kind;
use order_timeout_testkit::figures::{Figures, get, serve_http, wait_for_figure};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::process::{order_timeout, run};
use order_timeout_testkit::raw::{self, Properties};
use order_timeout_testkit::{Order, RunningWorker, TestEnv, alarms_alone, wait_for, wait_within};

const SECOND: Duration = Duration::from_secs(1);
/// Flags of properties (AMQP 0-9-1, class "basic").
const CORRELATION_ID: u16 = 1 << 10;
const MESSAGE_ID: u16 = 1 << 7;
const TYPE: u16 = 1 << 5;
/// The size of a header frame without the text of its only header "stack": its own 8 bytes and 14 of fixed fields, the
/// sizes of table and text, the key, the type.
const AROUND_THE_TEXT: usize = 8 + 14 + 4 + 6 + 1 + 4;
/// The largest frame that RabbitMQ accepts by default.
const FRAME_MAX: usize = 131_072;

/// A message with one fault.
#[derive(Clone, Copy)]
enum Defect {
    Type,
    MessageId,
    CorrelationId,
    HeaderKey,
    RoutingKey,
    /// Grows too large for a frame when it leaves its lane.
    LaneHeaders,
    /// Grows too large for a frame when it is returned.
    ReturnedHeaders,
}

impl Defect {
    const ALL: [Self; 7] = [
        Self::Type,
        Self::MessageId,
        Self::CorrelationId,
        Self::HeaderKey,
        Self::RoutingKey,
        Self::LaneHeaders,
        Self::ReturnedHeaders,
    ];

    /// Publishes one, and waits until the broker would deliver it. Returns its queue.
    async fn publish(self, env: &TestEnv, body: &[u8]) -> String {
        let (names, settings) = (env.names(), &env.settings);
        let to_arm = |key: &[u8], properties: &Properties| {
            raw::publish_with(settings, &names.schedule(), key, properties, body);
            names.schedule()
        };
        let to_due = |properties: &Properties| {
            raw::publish_with(settings, &names.due(), DUE_KEY.as_bytes(), properties, body);
            names.timeout()
        };
        match self {
            Self::Type => to_due(&Properties::text(TYPE, b"order.\xff\xfe")),
            Self::MessageId => to_due(&Properties::text(MESSAGE_ID, &[0xd4, 0x3a, 0xf9, 0x46])),
            Self::CorrelationId => to_arm(b"", &Properties::text(CORRELATION_ID, b"\xc3\x28")),
            Self::HeaderKey => to_due(&Properties::header(b"caf\xe9", 3)),
            Self::RoutingKey => to_arm(b"\xe4", &Properties::none()),
            Self::LaneHeaders => {
                let key = Names::lane_key(&Kind::ORDER, "2s", 0);
                let properties = Properties::header(b"stack", 130_950);
                raw::publish_with(settings, &names.delay(), key.as_bytes(), &properties, body);
                names.timeout()
            }
            Self::ReturnedHeaders => {
                let queue = to_arm(b"", &Properties::header(b"stack", FRAME_MAX - AROUND_THE_TEXT));
                raw::return_once(settings, &queue);
                queue
            }
        }
    }

    fn reason(self) -> &'static str {
        match self {
            Self::Type => "its property type is not UTF-8",
            Self::MessageId => "its property message_id is not UTF-8",
            Self::CorrelationId => "its property correlation_id is not UTF-8",
            Self::HeaderKey => "the key of a header is not UTF-8",
            Self::RoutingKey => "its routing key is not UTF-8",
            Self::LaneHeaders | Self::ReturnedHeaders => "send smaller headers",
        }
    }
}

/// A worker handles both the messages in its queues at startup, between the alarms of orders, and those that arrive
/// later.
fn worker_closes_beside(defects: &'static [Defect], orders: usize) {
    TestEnv::builder()
        .settings(|settings| {
            settings.worker.hold_max = 60 * SECOND;
            // While the worker has no session, it would close orders that it reads ahead.
            alarms_alone(settings);
            serve_http(settings);
        })
        .run(async move |env| {
            let others = env.orders(orders, 20 * SECOND).await;
            let named = env.orders(defects.len(), 60 * SECOND).await;
            let (before, after) = others.split_at(orders / 2);
            env.deliver(before).await;
            let mut expected = Vec::new();
            for (defect, order) in defects.iter().zip(&named) {
                expected.push((defect.publish(&env, &order.body()).await, defect.reason(), order.id.to_string()));
            }
            env.deliver(after).await;
            let worker = env.worker().await;
            assert_degraded(&worker).await;
            let closed = "SELECT count(*) FROM orders WHERE closed_by = 'alarm'";
            wait_for("the closes", async || env.count(closed).await == i64::try_from(orders).unwrap()).await;
            env.assert_closed_by_alarms().await;
            assert_named(&env, &expected, &[]).await;
            assert_degraded_ends(&worker).await;
            worker.stop().await;
            env.assert_drained().await;
            env.assert_ledger().await;
        });
}

/// Each is parked once, with its queue, its position and the reason: alarms by their order, others by the queue alone.
async fn assert_named(env: &TestEnv, alarms: &[(String, &str, String)], others: &[(String, &str)]) {
    let parked = env.parked().await;
    assert_eq!(parked.len(), alarms.len() + others.len(), "{parked:#?}");
    let alarms = alarms.iter().map(|(queue, why, order_id)| (queue, why, Some(order_id.as_str())));
    for (queue, why, order_id) in alarms.chain(others.iter().map(|(queue, why)| (queue, why, None))) {
        let found = parked.iter().find(|(.., parked)| parked.as_deref() == order_id);
        let (reason, detail, _) = found.unwrap_or_else(|| panic!("{why} is not parked: {parked:#?}"));
        assert_eq!(reason, "unreadable");
        assert!(detail.starts_with("at position ") && detail.contains(&format!(" of {queue},")), "{detail}");
        assert!(detail.contains(why), "{detail}");
    }
}

const CAUSE: &str = "degraded{cause=\"unreadable_message\"}";

async fn assert_degraded(worker: &RunningWorker) {
    let line = async || get(worker, READYZ).await.1.contains("degraded: unreadable_message: ");
    wait_within(15 * SECOND, "the cause on the page", line).await;
    assert_eq!(Figures::of(worker).await.get(CAUSE), 1.0);
}

async fn assert_degraded_ends(worker: &RunningWorker) {
    wait_within(15 * SECOND, "the cause withdrawn", async || Figures::of(worker).await.get(CAUSE) == 0.0).await;
    let (status, page) = get(worker, READYZ).await;
    assert!(status == 200 && !page.contains("degraded: unreadable_message"), "{page}");
}

#[test]
fn type_outside_utf8_is_moved_aside() {
    worker_closes_beside(&[Defect::Type], 50);
}

#[test]
fn raw_message_id_is_moved_aside() {
    worker_closes_beside(&[Defect::MessageId, Defect::CorrelationId], 50);
}

#[test]
fn invalid_header_key_is_moved_aside() {
    worker_closes_beside(&[Defect::HeaderKey], 50);
}

#[test]
fn invalid_routing_key_is_moved_aside() {
    worker_closes_beside(&[Defect::RoutingKey], 50);
}

#[test]
fn headers_grown_beyond_frame_are_moved_aside() {
    worker_closes_beside(&[Defect::LaneHeaders], 50);
}

#[test]
fn returned_headers_beyond_frame_are_moved_aside() {
    worker_closes_beside(&[Defect::ReturnedHeaders], 50);
}

#[test]
fn all_defects_at_once_are_moved_aside() {
    worker_closes_beside(&Defect::ALL, 500);
}

#[test]
fn two_workers_search_at_once() {
    let adjust = |settings: &mut Settings| {
        settings.worker.hold_max = 60 * SECOND;
        // While a worker has no session, it would close orders that it reads ahead.
        alarms_alone(settings);
    };
    TestEnv::builder().settings(adjust).run(async |env| {
        let orders = env.orders(100, 20 * SECOND).await;
        env.deliver(&orders).await;
        let mut expected = Vec::new();
        for (defect, order) in Defect::ALL.iter().zip(env.orders(Defect::ALL.len(), 60 * SECOND).await) {
            expected.push((defect.publish(&env, &order.body()).await, defect.reason(), order.id.to_string()));
        }
        let workers = [env.worker().await, env.worker().await];
        wait_for("the closes", async || env.closed().await == 100).await;
        env.assert_closed_by_alarms().await;
        assert_named(&env, &expected, &[]).await;
        for worker in workers {
            worker.stop().await;
        }
        // The session of one may have ended between the last close and its acknowledgement.
        env.assert_nothing_left_undone().await;
        env.assert_ledger().await;
    });
}

#[test]
fn command_lists_then_moves() {
    TestEnv::builder().run(async |env| {
        let orders = env.orders(4, 60 * SECOND).await;
        env.deliver(&orders[..2]).await;
        let due = Defect::HeaderKey.publish(&env, &orders[3].body()).await;
        env.deliver(&orders[2..3]).await;
        let inbox = Defect::RoutingKey.publish(&env, b"not even JSON").await;

        let (code, out, err) = run(order_timeout(&env.settings).arg("quarantine"));
        assert_eq!((code, err.as_str()), (0, ""));
        assert!(out.contains(&format!("{due}: 4 message(s) read, 1 of them unreadable")), "{out}");
        assert!(out.contains("position 3, ") && out.contains(Defect::HeaderKey.reason()), "{out}");
        assert!(out.contains(&orders[3].id.to_string()), "{out}");
        assert!(out.contains(&format!("{inbox}: 1 message(s) read, 1 of them unreadable")), "{out}");
        assert!(out.ends_with("2 message(s) found, nothing moved; add --move to move them into parked_alarms\n"));
        assert_eq!(env.parked().await, []);

        let (code, out, err) = run(order_timeout(&env.settings).args(["quarantine", "--move", "--json"]));
        assert_eq!((code, err.as_str()), (0, ""));
        let reports: Vec<serde_json::Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let of = |queue: &str| reports.iter().find(|report| report["queue"] == queue).unwrap();
        assert_eq!((&of(&due)["searched"], &of(&due)["unreadable"]), (&4.into(), &1.into()));
        assert_eq!(of(&inbox)["found"][0]["moved"], true);
        assert_named(
            &env,
            &[(due.clone(), Defect::HeaderKey.reason(), orders[3].id.to_string())],
            &[(inbox.clone(), Defect::RoutingKey.reason())],
        )
        .await;

        // The other messages are where they were, in order, and the alarm can be retried.
        let bodies: Vec<_> = orders[..3].iter().map(Order::body).collect();
        assert_eq!(env.take_out(&due).await, bodies);
        let (code, out, _) = run(order_timeout(&env.settings).args(["parked", "retry", "--all", "--yes"]));
        assert_eq!(code, 1, "one of the two is no alarm: {out}");
        assert!(out.starts_with("1 alarm(s) sent back to the worker;"), "{out}");
        assert_eq!(env.take_out(&inbox).await, [orders[3].body()]);
    });
}

#[test]
fn lost_queue_starts_no_search() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let worker = env.worker().await;
        env.channel.queue_delete(env.names().parked().into(), QueueDeleteOptions::default()).await.unwrap();
        wait_for_figure(&worker, "sessions_opened_total", |sessions| sessions >= 2.0).await;
        // A search would show the cause for five seconds.
        assert_eq!(Figures::of(&worker).await.get(CAUSE), 0.0);
        worker.stop().await;
    });
}

#[test]
fn failing_broker_is_named_with_remedy() {
    // In this version AMQP 1.0 is a plugin, with which a message id may be a number, which AMQP 0-9-1 cannot represent.
    let broker = Arc::new(Private::broker(&["--rabbitmq", "3.10", "--plugin", "rabbitmq_amqp1_0"]));
    // Kept until the test environment is cleaned up.
    let (url, in_the_test) = (broker.url.clone(), broker.clone());
    TestEnv::builder()
        .settings(move |settings| {
            settings.amqp.url = url.into();
            serve_http(settings);
        })
        .run(async move |env| {
            let broker = in_the_test;
            let (queue, order) = (env.names().schedule(), env.order(60 * SECOND).await);
            env.publish_raw(&queue, "", &order.body(), BasicProperties::default()).await;
            broker.ctl(&["eval", &publish_with_number_as_id(&queue)]);
            let (code, out, _) = run(order_timeout(&env.settings).arg("quarantine"));
            assert_eq!(code, 1);
            let sentence = format!("fails on the message at position 2 of {queue} (541 INTERNAL_ERROR)");
            assert!(out.contains(&sentence) && out.contains("A message that the broker cannot deliver"), "{out}");

            let worker = env.worker().await;
            let line = async || get(&worker, READYZ).await.1.contains("the broker itself failed");
            wait_within(15 * SECOND, "the cause on the page", line).await;
            assert_eq!(Figures::of(&worker).await.get(CAUSE), 1.0);
            assert_eq!(env.parked().await, [], "it could not be read");
            // No session stays open, so orders are read ahead of their deadlines.
            env.orders(500, 3 * SECOND).await;
            wait_within(15 * SECOND, "every close", async || env.closed().await == 500).await;
            broker.ctl(&["purge_queue", &queue]);
            assert_degraded_ends(&worker).await;
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
