//! With definitions.json imported, a publisher can schedule and do nothing else, and a worker can do its work on our
//! objects and touch no others.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::{
    BasicConsumeOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions,
    ExchangeDeleteOptions, QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions, QueuePurgeOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection, ExchangeKind};
use order_timeout::Settings;
use order_timeout_amqp::connect::{self, BrokerError, reply, reply_code};
use order_timeout_amqp::topology::Names;
use order_timeout_client::{PublishError, ScheduleError};
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::private::Private;
use order_timeout_testkit::{RunningWorker, TestEnv, wait_for};
use secrecy::ExposeSecret;
use serde_json::Value;

/// The users of definitions.json with their development passwords, encoded as in a URL.
pub const PUBLISHER: &str = "order-publisher:publisher-dev";
pub const WORKER: &str = "order-worker:worker-dev";
/// The virtual host of definitions.json.
pub const VHOST: &str = "orders";

fn definitions() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("definitions.json")).unwrap()
}

#[test]
fn definitions_have_two_untagged_users() {
    let definitions: Value = serde_json::from_str(&definitions()).unwrap();
    let users = definitions["users"].as_array().unwrap();
    let names: Vec<_> = users.iter().map(|user| user["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["order-publisher", "order-worker"]);
    for user in users {
        // A tag would grant access to the management interface, or to everything.
        assert_eq!(user["tags"], Value::Array(Vec::new()), "{user}");
        assert!(user.get("password").is_none(), "{user} says its password");
    }
    let mut permitted: Vec<_> =
        definitions["permissions"].as_array().unwrap().iter().map(|p| p["user"].as_str().unwrap()).collect();
    permitted.sort_unstable();
    assert_eq!(permitted, names, "each has the permissions of one line, and no other user has any");
}

/// One broker for all checks, because starting one takes seconds.
#[test]
fn imported_users_have_least_privilege() {
    TestEnv::builder().run(async |env| {
        let broker = tokio::task::spawn_blocking(import).await.unwrap();
        refuses_wrong_passwords(&broker).await;
        users_cannot_enter_another_virtual_host(&broker).await;
        publisher_can_schedule(&broker).await;
        publisher_can_do_nothing_else(&broker).await;
        worker_cannot_touch_foreign_objects(&broker).await;
        worker_runs_whole_flow(&broker, &env).await;
        listener_receives_events_and_no_more(&broker).await;
        publisher_names_missing_write_permission(&broker).await;
        errors_distinguish_limits_from_missing_rights(&broker).await;
    });
}

/// A fresh broker with the definitions of the repository.
fn import() -> Private {
    let broker = Private::broker(&[]);
    // A copy that the broker's operating system user can read.
    let mut file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    std::io::Write::write_all(&mut file, definitions().as_bytes()).unwrap();
    std::fs::set_permissions(file.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
    broker.ctl(&["import_definitions", file.path().to_str().unwrap()]);
    broker
}

/// The default settings, which definitions.json is generated from, with this user at this broker.
fn settings(broker: &Private, user: &str) -> Settings {
    settings_for(broker, user, VHOST)
}

fn settings_for(broker: &Private, user: &str, vhost: &str) -> Settings {
    let (_, rest) = broker.url.split_once('@').unwrap();
    let (place, _) = rest.split_once('/').unwrap();
    let mut settings = Settings::defaults();
    settings.amqp.url = format!("amqp://{user}@{place}/{vhost}").into();
    settings.validate().unwrap();
    settings
}

async fn connect(broker: &Private, user: &str) -> Connection {
    connect::connect(&settings(broker, user).amqp, "test").await.unwrap()
}

async fn refuses_wrong_passwords(broker: &Private) {
    for user in ["order-publisher:worker-dev", "order-worker:publisher-dev", "order-publisher:", "guest:guest"] {
        let refused = connect::connect(&settings(broker, user).amqp, "test").await.map(drop);
        assert!(matches!(refused, Err(BrokerError::Refused(_))), "{user}: {refused:?}");
    }
}

async fn users_cannot_enter_another_virtual_host(broker: &Private) {
    let of_another_application = "stock-taking";
    broker.ctl(&["add_vhost", of_another_application]);
    for vhost in ["%2f", of_another_application] {
        for user in [PUBLISHER, WORKER] {
            let refused = connect::connect(&settings_for(broker, user, vhost).amqp, "test").await.map(drop);
            assert!(matches!(refused, Err(BrokerError::Refused(_))), "{user} at {vhost}: {refused:?}");
        }
        // A user with the permission gets in, so the virtual host exists.
        let owner = settings_for(broker, &broker.account(), vhost);
        broker.ctl(&["set_permissions", "-p", &vhost.replace("%2f", "/"), "guest", ".*", ".*", ".*"]);
        connect::connect(&owner.amqp, "test").await.unwrap();
    }
}

/// A listener with the permissions that the handbook gives it.
async fn listener_receives_events_and_no_more(broker: &Private) {
    let handbook = include_str!("../../docs/operating/deploy.md");
    let line = handbook.lines().find(|line| line.starts_with("rabbitmqctl set_permissions -p orders shop-listener"));
    let rights: Vec<&str> = line.expect("the listener's rights").split('\'').skip(1).step_by(2).collect();
    broker.ctl(&["add_user", "shop-listener", "listener-dev"]);
    broker.ctl(&[&["set_permissions", "-p", VHOST, "shop-listener"], &rights[..]].concat());

    let connection = connect(broker, "shop-listener:listener-dev").await;
    let channel = connection.create_channel().await.unwrap();
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare("shop.closed".into(), durable, FieldTable::default()).await.unwrap();
    let (closed, events, key) = ("shop.closed".into(), "order.events".into(), "order.closed".into());
    channel.queue_bind(closed, events, key, QueueBindOptions::default(), FieldTable::default()).await.unwrap();
    let of_worker = connect(broker, WORKER).await;
    let worker = confirming(&of_worker).await;
    publish(&worker, "order.events", "order.closed", b"{}", None).await.unwrap();
    let received =
        async || channel.basic_get("shop.closed".into(), BasicGetOptions { no_ack: true }).await.unwrap().is_some();
    wait_for("the event", received).await;

    let channel = connection.create_channel().await.unwrap();
    let timeouts = channel.basic_get("order.timeout".into(), BasicGetOptions::default()).await;
    assert_refused("reading alarms", timeouts);
    let channel = confirming(&connection).await;
    assert_refused("publishing alarms", publish(&channel, "order.schedule", "", b"{}", None).await);
}

async fn errors_distinguish_limits_from_missing_rights(broker: &Private) {
    let limit = |limit: &str| broker.ctl(&["set_vhost_limits", "-p", VHOST, limit]);
    let connection = connect(broker, WORKER).await;
    let channel = connection.create_channel().await.unwrap();
    let gone = Settings::defaults().topology().queues.pop().expect("a queue").name;
    channel.queue_delete(gone.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
    limit(r#"{"max-queues": 1}"#);
    let refused = Settings::defaults().topology().declare(&connection).await.unwrap_err().to_string();
    assert!(refused.contains("raise the limit with `rabbitmqctl set_vhost_limits"), "{refused}");
    limit(r#"{"max-connections": 0}"#);
    let refused = connect::connect(&settings(broker, WORKER).amqp, "test").await.map(drop);
    let Err(BrokerError::Away(why)) = &refused else { panic!("{refused:?}") };
    assert!(why.contains("raise the limit with rabbitmqctl set_vhost_limits"), "{why}");
    broker.ctl(&["clear_vhost_limits", "-p", VHOST]);
    Settings::defaults().topology().declare(&connection).await.unwrap();
}

/// A publisher that has lost its write permission names the missing permission.
async fn publisher_names_missing_write_permission(broker: &Private) {
    let publisher = settings(broker, PUBLISHER).publisher().connect().await.unwrap();
    let rights = |write: &str| broker.ctl(&["set_permissions", "-p", VHOST, "order-publisher", "^$", write, "^$"]);
    // From a folder that only the current user may enter, such as a checkout under /root: rabbitmqctl must not
    // complain.
    let ours_alone = tempfile::tempdir().unwrap();
    let listed = broker.ctl_from(ours_alone.path(), &["-q", "--formatter=json", "list_permissions", "-p", VHOST]);
    let permissions: Value = serde_json::from_str(&listed).unwrap();
    let before = permissions.as_array().unwrap().iter().find(|line| line["user"] == "order-publisher").unwrap();
    rights("^$");
    let soon = Timestamp::now_by_local_clock() + Duration::from_secs(7 * 60);
    let refused = publisher.schedule("order-without-rights", soon).await.unwrap_err();
    assert!(matches!(refused, ScheduleError::Publish(PublishError::Refused(_))), "{refused}");
    rights(before["write"].as_str().unwrap());
    publisher.schedule("order-with-rights", soon).await.unwrap();
}

/// Messages in all queues whose names have this prefix.
async fn depth(connection: &Connection, beginning: &str) -> u32 {
    let mut sum = 0;
    for queue in Settings::defaults().queue_names().into_iter().filter(|queue| queue.starts_with(beginning)) {
        // A channel of its own, because a queue that does not exist closes it.
        let channel = connection.create_channel().await.unwrap();
        let options = QueueDeclareOptions { passive: true, ..Default::default() };
        let seen = channel.queue_declare(queue.into(), options, FieldTable::default()).await;
        sum += seen.map_or(0, |seen| seen.message_count());
    }
    sum
}

async fn publisher_can_schedule(broker: &Private) {
    let publisher = settings(broker, PUBLISHER).publisher().connect().await.unwrap();
    let now = Timestamp::now_by_local_clock();
    publisher.schedule("order-in-a-lane", now + Duration::from_secs(30 * 60)).await.unwrap();
    publisher.schedule("order-with-another-delay", now + Duration::from_secs(7 * 60)).await.unwrap();
    let watcher = connect(broker, WORKER).await;
    wait_for("one alarm in a lane", async || depth(&watcher, "order.delay.30m.").await == 1).await;
    wait_for("one alarm in the inbox", async || depth(&watcher, "order.schedule").await == 1).await;

    // Publishers in other languages may also use the plain key and the inbox.
    let channel = connect(broker, PUBLISHER).await;
    let channel = confirming(&channel).await;
    for (exchange, key) in [("order.delay", "30m"), ("order.schedule", "")] {
        publish(&channel, exchange, key, b"{}", None).await.unwrap();
    }
    wait_for("the second alarm in the lane", async || depth(&watcher, "order.delay.30m.").await == 2).await;
    wait_for("the second alarm in the inbox", async || depth(&watcher, "order.schedule").await == 2).await;
    for queue in ["order.schedule", "order.delay.30m.0", "order.delay.30m.1", "order.delay.30m.2", "order.delay.30m.3"]
    {
        confirming(&watcher).await.queue_purge(queue.into(), QueuePurgeOptions::default()).await.unwrap();
    }
}

async fn confirming(connection: &Connection) -> Channel {
    let channel = connection.create_channel().await.unwrap();
    channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
    channel
}

/// Publishes and waits for the confirm. A returned message panics; a refusal is the error.
async fn publish(channel: &Channel, exchange: &str, key: &str, body: &[u8], ttl_ms: Option<u32>) -> lapin::Result<()> {
    let options = BasicPublishOptions { mandatory: true, ..Default::default() };
    let mut properties = BasicProperties::default().with_delivery_mode(2);
    if let Some(ttl_ms) = ttl_ms {
        properties = properties.with_expiration(ttl_ms.to_string().into());
    }
    let confirmation = channel.basic_publish(exchange.into(), key.into(), options, body, properties).await?.await?;
    assert!(confirmation.is_ack() && confirmation.take_message().is_none(), "{exchange} {key}: not routed");
    Ok(())
}

/// The broker answered 403 and nothing else.
fn assert_refused<T>(what: &str, result: lapin::Result<T>) {
    match result {
        Ok(_) => panic!("allowed: {what}"),
        Err(error) => {
            assert_eq!(reply(&error).map(|(code, _)| code), Some(reply_code::ACCESS_REFUSED), "{what}: {error}")
        }
    }
}

async fn publisher_can_do_nothing_else(broker: &Private) {
    let connection = connect(broker, PUBLISHER).await;
    for (exchange, key) in [
        ("order.due", "due"),
        ("order.wheel", "5s.00"),
        ("order.parked", "parked"),
        ("order.events", "order.closed"),
        // The default exchange: with it, a user could write to every queue.
        ("", "order.timeout"),
        ("amq.direct", "due"),
    ] {
        let channel = confirming(&connection).await;
        assert_refused(&format!("publishing to {exchange:?}"), publish(&channel, exchange, key, b"{}", None).await);
    }
    for queue in ["order.timeout", "order.schedule", "order.parked", "order.delay.30m.0"] {
        let channel = || async { connection.create_channel().await.unwrap() };
        let name = || queue.into();
        let consumed = channel()
            .await
            .basic_consume(name(), "test".into(), BasicConsumeOptions::default(), FieldTable::default())
            .await;
        assert_refused(&format!("consuming from {queue}"), consumed);
        let got = channel().await.basic_get(name(), BasicGetOptions::default()).await;
        assert_refused(&format!("getting from {queue}"), got);
        let purged = channel().await.queue_purge(name(), QueuePurgeOptions::default()).await;
        assert_refused(&format!("purging {queue}"), purged);
        let deleted = channel().await.queue_delete(name(), QueueDeleteOptions::default()).await;
        assert_refused(&format!("deleting {queue}"), deleted);
        let bound = channel()
            .await
            .queue_bind(name(), "order.delay".into(), "spy".into(), QueueBindOptions::default(), FieldTable::default())
            .await;
        assert_refused(&format!("binding {queue}"), bound);
    }
    assert_cannot_declare(&connection, &["order.spy", "spy", ""]).await;
}

/// Queues and exchanges of these names; with the empty name the broker chooses one.
async fn assert_cannot_declare(connection: &Connection, names: &[&str]) {
    for name in names {
        let channel = connection.create_channel().await.unwrap();
        let options = QueueDeclareOptions { durable: true, ..Default::default() };
        let declared = channel.queue_declare((*name).into(), options, FieldTable::default()).await;
        assert_refused(&format!("declaring a queue {name:?}"), declared);
        if name.is_empty() {
            continue;
        }
        let channel = connection.create_channel().await.unwrap();
        let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
        let declared =
            channel.exchange_declare((*name).into(), ExchangeKind::Direct, options, FieldTable::default()).await;
        assert_refused(&format!("declaring an exchange {name:?}"), declared);
    }
}

async fn worker_cannot_touch_foreign_objects(broker: &Private) {
    // A queue of another application on the same virtual host.
    let foreign = "payments.inbox";
    let administrator = "administrator:sesame";
    let (name, password) = administrator.split_once(':').unwrap();
    for arguments in [&["add_user", name, password][..], &["set_permissions", "-p", VHOST, name, ".*", ".*", ".*"]] {
        broker.ctl(arguments);
    }
    let owner = connect(broker, administrator).await;
    let options = QueueDeclareOptions { durable: true, ..Default::default() };
    confirming(&owner).await.queue_declare(foreign.into(), options, FieldTable::default()).await.unwrap();

    let connection = connect(broker, WORKER).await;
    // "orders.…" begins with our namespace but not with its dot.
    assert_cannot_declare(&connection, &["payments.outbox", "orders.spy", "ordering", ""]).await;
    let channel = || async { connection.create_channel().await.unwrap() };
    let consumed = channel()
        .await
        .basic_consume(foreign.into(), "test".into(), BasicConsumeOptions::default(), FieldTable::default())
        .await;
    assert_refused("consuming from a foreign queue", consumed);
    let got = channel().await.basic_get(foreign.into(), BasicGetOptions::default()).await;
    assert_refused("getting from a foreign queue", got);
    let deleted = channel().await.queue_delete(foreign.into(), QueueDeleteOptions::default()).await;
    assert_refused("deleting a foreign queue", deleted);
    let bound = channel()
        .await
        .queue_bind(
            foreign.into(),
            "order.events".into(),
            "#".into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        )
        .await;
    assert_refused("binding a foreign queue", bound);
    let deleted = channel().await.exchange_delete("amq.topic".into(), ExchangeDeleteOptions::default()).await;
    assert_refused("deleting a foreign exchange", deleted);
    assert_refused(
        "publishing to the default exchange",
        publish(&confirming(&connection).await, "", foreign, b"{}", None).await,
    );
    assert_refused(
        "publishing to a foreign exchange",
        publish(&confirming(&connection).await, "amq.topic", "x", b"{}", None).await,
    );
}

/// Every route that an alarm can take, with the permissions of definitions.json and no objects declared by other users.
async fn worker_runs_whole_flow(broker: &Private, env: &TestEnv) {
    let mut settings = settings(broker, WORKER);
    settings.database.url = env.settings.database.url.expose_secret().to_owned().into();
    // Short, so that an alarm a few seconds ahead already passes the wheel.
    settings.delay.lead = Duration::from_millis(500);
    settings.worker.hold_max = Duration::from_millis(7_500);
    settings.validate().unwrap();
    let names = settings.names();
    let connection = connect(broker, WORKER).await;
    let mut events = consume_events(&connection, &names).await;
    let worker = RunningWorker::start(settings.clone()).await;

    let (held, armed, in_a_lane) = (
        env.order(Duration::from_secs(2)).await,
        env.order(Duration::from_secs(11)).await,
        env.order(Duration::from_secs(3)).await,
    );
    settings.amqp.url = self::settings(broker, PUBLISHER).amqp.url;
    let publisher = settings.publisher().connect().await.unwrap();
    for order in [&held, &armed] {
        publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
    }
    // Like a foreign publisher's message, with a TTL shorter than the lane's, so that the test need not take half an
    // hour.
    let body = order_timeout_core::message::Alarm::new(in_a_lane.order_id(), in_a_lane.deadline).to_bytes();
    let of_publisher = connect(broker, PUBLISHER).await;
    publish(&confirming(&of_publisher).await, "order.delay", "30m", &body, Some(1_000)).await.unwrap();
    wait_for("an alarm in the wheel", async || depth(&connection, "order.wheel.").await > 0).await;

    for order in [&held, &in_a_lane, &armed] {
        wait_for("the close", async || env.status(order).await == "closed").await;
    }
    assert_eq!(env.count("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").await, 3);
    let mut announced = Vec::new();
    for _ in 0..3 {
        let delivery = tokio::time::timeout(order_timeout_testkit::TIMEOUT, events.next())
            .await
            .expect("an event")
            .unwrap()
            .unwrap();
        let event: Value = serde_json::from_slice(&delivery.data).unwrap();
        announced.push(event["order_id"].as_str().unwrap().to_owned());
    }
    announced.sort_unstable();
    let mut expected = [held, armed, in_a_lane].map(|order| order.id.to_string());
    expected.sort_unstable();
    assert_eq!(announced, expected, "each close is announced");
    env.assert_ledger().await;
    worker.stop().await;
}

async fn consume_events(connection: &Connection, names: &Names) -> lapin::Consumer {
    let channel = connection.create_channel().await.unwrap();
    let queue = "order.test-events";
    let options = QueueDeclareOptions { exclusive: true, ..Default::default() };
    channel.queue_declare(queue.into(), options, FieldTable::default()).await.unwrap();
    channel
        .queue_bind(
            queue.into(),
            names.events().as_str().into(),
            "#".into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        )
        .await
        .unwrap();
    let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
    channel.basic_consume(queue.into(), "test".into(), options, FieldTable::default()).await.unwrap()
}
