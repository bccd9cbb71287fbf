//! One fault of the broker after the other, and the command on a healthy deployment.

use std::path::PathBuf;
use std::sync::Arc;

use lapin::BasicProperties;
use lapin::options::{BasicConsumeOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use order_timeout::Settings;
use order_timeout::operations::doctor::CHECKED;
use order_timeout_amqp::topology::{Argument, DUE_KEY, declare_slots};
use order_timeout_core::kind::Kind;
use order_timeout_core::problem::Cause;
use order_timeout_testkit::away::meanwhile;
use order_timeout_testkit::paths::{repository, scratch_folder};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::process::{WorkerProcess, call_with};
use order_timeout_testkit::{TIMEOUT, TestEnv, unreachable, wait_for, with_parts};
use secrecy::ExposeSecret;
use serde_json::Value;

use super::{Stack, here};

/// The compose stack's configuration, with the management API on this port of the loopback interface, and statistics that
/// are half a second old instead of five.
fn with_management(port: u16) -> PathBuf {
    let deployed = std::fs::read_to_string(repository().join("deploy/rabbitmq/advanced.config")).unwrap();
    let sections = format!(
        "{{rabbitmq_management, [{{tcp_config, [{{port, {port}}}, {{ip, \"127.0.0.1\"}}]}}]}},
         {{rabbit, [{{collect_statistics_interval, 500}},"
    );
    let path = scratch_folder().join(format!("management-{port}.config"));
    std::fs::write(&path, deployed.replacen("{rabbit, [", &sections, 1)).unwrap();
    path
}

/// Not the default one, and not a word to a shell.
const VHOST: &str = "shop's orders";

fn ctl(broker: &Private, arguments: &[&str]) {
    meanwhile(|| broker.ctl(arguments));
}

/// A command about [`VHOST`].
fn ctl_there(broker: &Private, command: &str, arguments: &[&str]) {
    ctl(broker, &[&[command, "-p", VHOST], arguments].concat());
}

#[test]
fn each_broken_broker_is_found() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let config = with_management(port);
    let broker = Arc::new(Private::broker(&["--config", config.to_str().unwrap(), "--plugin", "rabbitmq_management"]));
    std::fs::remove_file(&config).unwrap();
    broker.ctl(&["add_vhost", VHOST]);
    broker.ctl(&["set_permissions", "-p", VHOST, "guest", ".*", ".*", ".*"]);
    let database = Arc::new(Private::postgres(&[]));
    let adjust = |settings: &mut Settings| {
        settings.amqp.url = with_parts(&broker.url.clone().into(), None, None, Some("shop%27s%20orders"));
        let name = settings.database.url.expose_secret().rsplit('/').next().unwrap().to_owned();
        settings.database.url = database.url.clone().into();
        settings.database.url = settings.database.url_of(&name);
    };
    let for_test = broker.clone();
    TestEnv::builder().settings(adjust).run(async move |env| here(broken_brokers_are_found(env, &for_test, port)));
}

async fn broken_brokers_are_found(env: Arc<TestEnv>, broker: &Private, port: u16) {
    let mut stack = Stack::new(env).await;
    stack.options.management = Some(format!("http://127.0.0.1:{port}").parse().unwrap());
    stack.wait_until_nothing_found("the start").await;
    policies_are_found(&stack, broker).await;
    wrong_queues_are_found(&stack, broker).await;
    lost_and_stuck_messages_are_found(&stack, broker).await;
    full_vhost_is_found(&stack, broker).await;
    foreign_consumer_is_found(&stack).await;
    wrong_accounts_are_found(&stack, broker).await;
    healthy_stack_has_no_finding(&stack, port).await;
    stack.settings.amqp.url = unreachable(&stack.settings.amqp.url);
    stack.options.management = None;
    stack.found(Cause::Broker).await;
}

async fn policies_are_found(stack: &Stack, broker: &Private) {
    // What is unroutable goes there.
    let channel = stack.env.channel();
    channel.queue_declare("lost".into(), QueueDeclareOptions::default(), FieldTable::default()).await.unwrap();
    let none = FieldTable::default();
    channel.queue_bind("lost".into(), "amq.fanout".into(), "".into(), Default::default(), none).await.unwrap();
    let pattern = format!("^{}\\.", stack.env.settings.namespace);
    for (check, set, clear, definition, apply_to) in [
        (Cause::BrokerPolicy, "set_policy", "clear_policy", r#"{"message-ttl": 60000}"#, "queues"),
        (Cause::BrokerPolicy, "set_policy", "clear_policy", r#"{"delivery-limit": 20}"#, "queues"),
        (Cause::BrokerPolicy, "set_policy", "clear_policy", r#"{"dead-letter-exchange": "lost"}"#, "queues"),
        (Cause::BrokerPolicy, "set_operator_policy", "clear_operator_policy", r#"{"max-length": 1000}"#, "queues"),
        (Cause::BrokerPolicy, "set_operator_policy", "clear_operator_policy", r#"{"expires": 3600000}"#, "queues"),
        (Cause::AlternateExchange, "set_policy", "clear_policy", ALTERNATE, "exchanges"),
    ] {
        ctl_there(broker, set, &["too wide", &pattern, definition, "--apply-to", apply_to]);
        let finding = stack.found_in_time(check).await;
        assert!(finding.fix.contains(clear), "{finding:?}");
        meanwhile(|| broker.run_printed(&finding.fix));
        stack.wait_until_nothing_found("the policy cleared").await;
    }
    let events = format!("^{}\\.events$", stack.env.settings.namespace);
    ctl_there(broker, "set_policy", &["events", &events, ALTERNATE, "--apply-to", "exchanges"]);
    let finding = stack.found_in_time(Cause::AlternateExchange).await;
    assert!(finding.what.contains(".events"), "{finding:?}");
    meanwhile(|| broker.run_printed(&finding.fix));
    stack.wait_until_nothing_found("that policy cleared").await;
}

const ALTERNATE: &str = r#"{"alternate-exchange": "amq.fanout"}"#;

/// Events that reach no queue, and alarms behind a message that does not expire.
async fn lost_and_stuck_messages_are_found(stack: &Stack, broker: &Private) {
    let (env, none) = (&stack.env, FieldTable::default());
    let events = env.names().events();
    stack
        .sql("INSERT INTO event_outbox (routing_key, type, payload, sent_at) VALUES ('order.closed', 't', '{}', now())")
        .await;
    let finding = stack.found_in_time(Cause::Topology).await;
    assert!(finding.what.contains(&events) && finding.why.contains("every event is lost"), "{finding:?}");
    let (to, from) = ("lost", events.as_str());
    env.channel().queue_bind(to.into(), from.into(), "#".into(), Default::default(), none).await.unwrap();
    stack.wait_until_nothing_found("a queue bound").await;
    stack.sql("DELETE FROM event_outbox").await;

    let slot = env.settings.slots().all().last().expect("a slot");
    assert_eq!(declare_slots(&env.names(), std::slice::from_ref(&slot), env.broker()).await.fault, None);
    let stuck = BasicProperties::default().with_app_id("shop".into());
    env.publish_raw(&slot.binding.exchange, &slot.binding.routing_key, b"{}", stuck).await;
    wait_for("the message", async || env.depth(&slot.queue.name).await == 1).await;
    let finding = stack.found(Cause::AlarmsNotArriving).await;
    assert!(finding.what.contains(&slot.queue.name) && finding.what.contains("\"shop\""), "{finding:?}");
    assert_eq!(env.depth(&slot.queue.name).await, 1, "it was given back");
    meanwhile(|| broker.run_printed(&finding.fix));
    stack.assert_nothing_found("the queue empty").await;
}

async fn full_vhost_is_found(stack: &Stack, broker: &Private) {
    let queues = meanwhile(|| broker.ctl(&["list_queues", "-q", "-p", VHOST, "name"])).lines().count();
    // One line has the headers. A smaller limit than there are queues is reached as well.
    ctl_there(broker, "set_vhost_limits", &[&format!(r#"{{"max-queues": {}}}"#, queues - 1)]);
    let finding = stack.found(Cause::Topology).await;
    assert!(finding.what.contains("queue limit"), "{finding:?}");
    meanwhile(|| broker.run_printed(&finding.fix));
    stack.assert_nothing_found("the limit raised").await;
}

fn text(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

async fn wrong_queues_are_found(stack: &Stack, broker: &Private) {
    let (env, names) = (&stack.env, stack.env.names());
    let lane = names.lane_queue(&Kind::ORDER, "2s", 1);
    let delete =
        async || env.channel().queue_delete(lane.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
    // What `order-timeout setup` does.
    let set_up = async || stack.settings.topology().declare(env.broker()).await.unwrap();
    delete().await;
    // A queue takes its bindings with it.
    assert!(stack.found(Cause::Topology).await.what.contains(&lane));
    set_up().await;
    stack.assert_nothing_found("the queue declared").await;

    let declared = stack.settings.topology().queues.into_iter().find(|queue| queue.name == lane).unwrap();
    let usual: Vec<(&str, AMQPValue)> = declared
        .arguments
        .iter()
        .map(|(name, value)| match value {
            Argument::Text(value) => (*name, text(value)),
            Argument::Number(value) => (*name, AMQPValue::LongLongInt(*value)),
        })
        .collect();
    for differs in [
        ("x-queue-type", text("classic")),
        ("x-dead-letter-strategy", text("at-most-once")),
        ("x-overflow", text("drop-head")),
        ("x-message-ttl", AMQPValue::LongLongInt(9)),
    ] {
        delete().await;
        let mut arguments = FieldTable::default();
        let is_classic = differs.0 == "x-queue-type";
        for (name, value) in usual.iter().filter(|(name, _)| !is_classic || *name != "x-dead-letter-strategy") {
            arguments.insert((*name).into(), if *name == differs.0 { differs.1.clone() } else { value.clone() });
        }
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        env.channel().queue_declare(lane.as_str().into(), durable, arguments).await.unwrap();
        let (exchange, none) = (names.delay(), FieldTable::default());
        let bound = env.channel().queue_bind(
            lane.as_str().into(),
            exchange.as_str().into(),
            "2s.1".into(),
            Default::default(),
            none,
        );
        bound.await.unwrap();
        let finding = stack.found(Cause::Topology).await;
        assert!(finding.what.contains(&lane) && finding.fix.contains("rabbitmqctl delete_queue"), "{finding:?}");
        meanwhile(|| broker.run_printed(&finding.fix));
        set_up().await;
        stack.assert_nothing_found("the queue declared again").await;
    }

    let (queue, due) = (names.timeout(), names.due());
    let none = FieldTable::default();
    env.channel().queue_unbind(queue.as_str().into(), due.as_str().into(), DUE_KEY.into(), none).await.unwrap();
    assert!(stack.found(Cause::Topology).await.fix.contains("order-timeout setup"));
    set_up().await;
    stack.assert_nothing_found("the binding declared").await;
}

async fn foreign_consumer_is_found(stack: &Stack) {
    let lane = stack.env.names().lane_queue(&Kind::ORDER, "2s", 0);
    for queue in [lane, stack.env.names().timeout()] {
        let channel = stack.env.broker().create_channel().await.unwrap();
        let (options, none) = (BasicConsumeOptions::default(), FieldTable::default());
        let consumer = channel.basic_consume(queue.as_str().into(), "foreign".into(), options, none).await.unwrap();
        let finding = stack.found(Cause::ForeignConsumers).await;
        assert!(finding.what.contains(&queue) && finding.fix.contains("rabbitmqctl list_consumers"), "{finding:?}");
        channel.basic_cancel("foreign".into(), Default::default()).await.unwrap();
        drop(consumer);
        channel.close(200, "done".into()).await.unwrap();
        stack.assert_nothing_found("the consumer stopped").await;
    }
}

async fn wrong_accounts_are_found(stack: &Stack, broker: &Private) {
    // What may be declared, then what may be published to.
    for (configure, write) in [("^$", ".*"), (".*", r"^(?!.*\.wheel$).*")] {
        ctl_there(broker, "set_permissions", &["guest", configure, write, ".*"]);
        let finding = stack.found_in_time(Cause::BrokerRights).await;
        meanwhile(|| broker.run_printed(&finding.fix));
        stack.wait_until_nothing_found("the rights given").await;
    }
}

/// As an operator sees it: with a worker, over the command line.
async fn healthy_stack_has_no_finding(stack: &Stack, port: u16) {
    let worker = WorkerProcess::start(&stack.settings);
    stack.wait_until_nothing_found("a worker").await;
    wait_for("a worker", async || stack.env.count("SELECT count(*) FROM order_timeout_workers").await > 0).await;
    let management = format!("http://127.0.0.1:{port}");
    let arguments = ["doctor", "--management", &management];
    let (code, stdout, stderr) = call_with(&stack.settings, &[&arguments[..], &["--json"]].concat()).await;
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    assert_eq!(checks.len(), CHECKED.len());
    for check in checks {
        assert_eq!(check["status"], "ok", "{check}");
    }
    let (code, stdout, stderr) = call_with(&stack.settings, &["doctor"]).await;
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    assert!(stdout.contains("give its address with --management"), "{stdout}");
    assert!(stdout.ends_with(" checks passed\n"), "{stdout}");
    stack.sql("INSERT INTO parked_alarms (reason, detail, body) VALUES ('too_far', 'd', '')").await;
    let (code, stdout, _) = call_with(&stack.settings, &["doctor"]).await;
    assert_eq!(code, 1, "{stdout}");
    assert!(
        stdout.contains("warning: parked_alarms: alarms are parked: 1 too_far\n  why: ")
            && stdout.contains("\n  fix: "),
        "{stdout}"
    );
    stack.sql("DELETE FROM parked_alarms").await;
    assert_eq!(meanwhile(|| worker.terminate(TIMEOUT)), 0);
}
