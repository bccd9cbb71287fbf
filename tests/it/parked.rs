//! Messages that cannot be handled are parked with a reason that names the fault, and the worker continues; an operator
//! lists, retries and drops them. Messages that other programs publish by the documented contract are handled like our
//! own.

use std::time::Duration;

use lapin::BasicProperties;
use lapin::options::{BasicGetOptions, BasicPublishOptions, BasicRejectOptions};
use lapin::types::{AMQPValue, FieldTable};
use order_timeout::config::Listen;
use order_timeout::http::{self, METRICS};
use order_timeout::postgres::parked_alarms;
use order_timeout::postgres::selection::Selection;
use order_timeout::postgres::{Database, Operator};
use order_timeout_amqp::topology::DUE_KEY;
use order_timeout_core::alarm::{DeadLetter, ParkReason};
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::process::{WorkerProcess, order_timeout, run};
use order_timeout_testkit::{Order, TIMEOUT, TestEnv, wait_for};
use serde_json::Value;
use sqlx::PgPool;
use uuid::Uuid;

use crate::health::free_address;

const SECOND: Duration = Duration::from_secs(1);

/// A message that is not an alarm the worker can handle, and what is recorded about it.
struct Fault {
    body: Vec<u8>,
    message_type: Option<&'static str>,
    reason: &'static str,
    /// Part of the detail.
    names: &'static str,
}

impl Fault {
    fn of(body: impl Into<Vec<u8>>, reason: &'static str, names: &'static str) -> Self {
        Self { body: body.into(), message_type: None, reason, names }
    }

    fn properties(&self) -> BasicProperties {
        let properties = BasicProperties::default().with_content_type("application/json".into());
        match self.message_type {
            Some(message_type) => properties.with_type(message_type.into()),
            None => properties,
        }
    }
}

fn alarm_json(order_id: &str, deadline: &str) -> Vec<u8> {
    serde_json::to_vec(&serde_json::json!({ "order_id": order_id, "deadline": deadline })).unwrap()
}

fn faults() -> Vec<Fault> {
    const ID: &str = "01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4b";
    const PAST: &str = "2020-01-01T00:00:00Z";
    let unreadable = |body: &[u8], names| Fault::of(body, "unreadable", names);
    vec![
        unreadable(b"", "the body is empty"),
        unreadable(br#"{"order_id": "1", "dead"#, "not valid JSON"),
        unreadable(b"\xff\xfe\x00 not text", "not valid JSON"),
        unreadable(b"[1, 2]", "not valid JSON of the expected shape"),
        unreadable(b"17", "not valid JSON of the expected shape"),
        unreadable(br#"{"order_id": 17, "deadline": "2020-01-01T00:00:00Z"}"#, "expected a string"),
        unreadable(br#"{"order_id": "1"}"#, "missing field `deadline`"),
        unreadable(br#"{"order_id": "1", "deadline": null}"#, "null"),
        unreadable(br#"{"order_id": "1", "deadline": 1795170600}"#, "1795170600"),
        unreadable(br#"{"deadline": "2020-01-01T00:00:00Z"}"#, "missing field `order_id`"),
        unreadable(&alarm_json(ID, "tomorrow"), "\"tomorrow\" is not an RFC 3339 time"),
        unreadable(&alarm_json("", PAST), "the order id is empty"),
        unreadable(&alarm_json(&"x".repeat(201), PAST), "201 bytes"),
        unreadable(&alarm_json("a\0b", PAST), "control character"),
        unreadable(
            br#"{"order_id": "1", "deadline": "2020-01-01T00:00:00Z", "kind": "trial.ended"}"#,
            "\"trial.ended\"",
        ),
        unreadable(&vec![b'x'; 1024 * 1024], "1048576 bytes"),
        unreadable(&vec![b' '; 16 * 1024 + 1], "16385 bytes"),
        Fault {
            body: alarm_json(ID, PAST),
            message_type: Some("order.timeout.v2"),
            reason: "unreadable",
            names: "\"order.timeout.v2\"",
        },
        Fault::of(alarm_json(ID, "9999-12-31T23:59:59Z"), "too_far", "delay.max_delay"),
        Fault::of(alarm_json("'; DROP TABLE orders; --", PAST), "malformed_id", "not of the form"),
        Fault::of(alarm_json("\"order\" 'ü' \\ %s $1 {0}", PAST), "malformed_id", "not of the form"),
        Fault::of(alarm_json(&format!("{ID}0"), PAST), "malformed_id", "not of the form"),
        // Of the right length, but with one hyphen too many, an invalid digit, or a letter of two bytes.
        Fault::of(alarm_json(&format!("{}-", &ID[..35]), PAST), "malformed_id", "not of the form"),
        Fault::of(alarm_json(&format!("{}g", &ID[..35]), PAST), "malformed_id", "not of the form"),
        Fault::of(alarm_json(&format!("{}ü", &ID[..35]), PAST), "malformed_id", "not of the form"),
    ]
}

/// Publishes every fault through this exchange and key; each is parked with its reason, and the worker continues.
fn assert_parked_from(exchange: fn(&TestEnv) -> String, routing_key: &'static str) {
    TestEnv::builder().run(async move |env| {
        let worker = env.worker().await;
        let exchange = exchange(&env);
        for (parked_before, fault) in faults().into_iter().enumerate() {
            env.publish_raw(&exchange, routing_key, &fault.body, fault.properties()).await;
            wait_for(fault.names, async || env.parked().await.len() > parked_before).await;
            let parked = env.parked().await;
            assert_eq!(parked.len(), parked_before + 1);
            let (reason, detail, order_id) = &parked[parked_before];
            assert_eq!(reason, fault.reason, "{detail}");
            assert!(detail.contains(fault.names), "{detail:?} does not name the fault, {:?}", fault.names);
            assert_eq!(order_id.is_some(), fault.reason != "unreadable");
            let kept: Vec<u8> =
                sqlx::query_scalar("SELECT body FROM parked_alarms ORDER BY parked_at DESC, id DESC LIMIT 1")
                    .fetch_one(&env.pool)
                    .await
                    .unwrap();
            if fault.reason == "unreadable" {
                assert_eq!(kept, fault.body[..fault.body.len().min(16 * 1024)], "the body as it came");
            }
        }
        let good = env.order(SECOND).await;
        env.deliver([&good]).await;
        wait_for("the good order's close", async || env.status(&good).await == "closed").await;
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn invalid_messages_in_timeout_queue_are_parked() {
    assert_parked_from(|env| env.names().due(), "due");
}

#[test]
fn invalid_messages_in_inbox_are_parked() {
    assert_parked_from(|env| env.names().schedule(), "any key");
}

#[test]
fn invalid_messages_do_not_delay_alarms() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let orders = env.orders(20, 2 * SECOND).await;
        let faults = faults();
        for (order, fault) in orders.iter().zip(faults.iter().cycle()) {
            env.publish_raw(&env.names().due(), "due", &fault.body, fault.properties()).await;
            env.deliver([order]).await;
        }
        wait_for("the good orders' close", async || env.closed().await == 20).await;
        wait_for("the parking", async || env.parked().await.len() == 20).await;
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

fn header(key: &str, value: AMQPValue) -> BasicProperties {
    let mut headers = FieldTable::default();
    headers.insert(key.into(), value);
    BasicProperties::default().with_headers(headers)
}

#[test]
fn odd_header_types_do_not_delay_alarms() {
    let odd_attempts = || {
        [
            AMQPValue::LongString("three".into()),
            AMQPValue::LongString("3".into()),
            AMQPValue::Double(2.5),
            AMQPValue::Float(1e30),
            AMQPValue::Boolean(true),
            AMQPValue::Void,
            AMQPValue::LongInt(-1),
            AMQPValue::LongLongInt(i64::MIN),
            AMQPValue::LongLongInt(i64::MAX),
            AMQPValue::LongLongInt(i64::from(u32::MAX)),
            AMQPValue::FieldTable(FieldTable::default()),
        ]
    };
    TestEnv::builder()
        .settings(
            // An alarm that claims many attempts waits 32 times as long.
            |settings| settings.retry.longest = Duration::from_millis(200),
        )
        .run(async move |env| {
            let worker = env.worker().await;
            let due = env.names().due();
            let mut properties: Vec<BasicProperties> =
                odd_attempts().into_iter().map(|value| header("attempt", value)).collect();
            properties.push(header("traceparent", AMQPValue::LongLongInt(7)));
            properties.push(header("traceparent", AMQPValue::LongString(vec![b'0'; 10_000].into())));
            properties.push(header("traceparent", AMQPValue::LongString(vec![0xff, 0xfe].into())));
            for timestamp in [0, 1, 253_402_300_800, 9_223_372_036_854_775_807, u64::MAX] {
                properties.push(BasicProperties::default().with_timestamp(timestamp));
            }
            // Each once for an order that gets closed, and once for one that does not exist and is retried or parked.
            let orders = env.orders(properties.len(), SECOND).await;
            for (order, properties) in orders.iter().zip(properties) {
                let unknown = Order { id: Uuid::now_v7(), ..*order };
                env.publish_raw(&due, "due", &order.body(), properties.clone()).await;
                env.publish_raw(&due, "due", &unknown.body(), properties).await;
            }
            let all = i64::try_from(orders.len()).unwrap();
            wait_for("the orders' close", async || env.closed().await == all).await;
            wait_for("the parking of the others", async || env.parked().await.len() == orders.len()).await;
            assert!(env.parked().await.iter().all(|(reason, ..)| reason == "unknown_order"));
            let good = env.order(Duration::ZERO).await;
            env.deliver([&good]).await;
            wait_for("the good order's close", async || env.status(&good).await == "closed").await;
            worker.stop().await;
            env.assert_drained().await;
            env.assert_ledger().await;
        });
}

/// The body of the contract's golden file for this order, as a program in another language writes it.
fn foreign_body(order: &Order) -> Vec<u8> {
    let golden = include_str!("../../crates/core/tests/fixtures/timeout_due.v1.json").trim_ascii();
    let body = golden
        .replace("01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4b", &order.id.to_string())
        .replace("2026-11-20T10:30:00.000Z", &write_rfc3339(order.deadline));
    assert_ne!(body, golden);
    body.into_bytes()
}

#[test]
fn foreign_publisher_uses_plain_lane_key() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let order = env.order(2 * SECOND).await;
        let properties =
            BasicProperties::default().with_content_type("application/json".into()).with_expiration("1500".into());
        env.publish_raw(&env.names().delay(), "2s", &foreign_body(&order), properties).await;
        wait_for("the close", async || env.status(&order).await == "closed").await;
        env.assert_closed_by_alarms().await;
        env.assert_on_time().await;
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn foreign_publisher_uses_inbox_without_ttl() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        // One for the next slots, one for later ones.
        let orders = [env.order(2 * SECOND).await, env.order(7 * SECOND).await];
        for (order, key) in orders.iter().zip(["", "shop.checkout"]) {
            let properties = BasicProperties::default().with_content_type("application/json".into());
            env.publish_raw(&env.names().schedule(), key, &foreign_body(order), properties).await;
        }
        wait_for("the close", async || env.closed().await == 2).await;
        env.assert_closed_by_alarms().await;
        env.assert_on_time().await;
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn dead_lettered_messages_move_into_table() {
    TestEnv::builder().run(async |env| {
        let order = env.order(3_600 * SECOND).await;
        let fault = b"not even JSON";
        env.deliver([&order]).await;
        env.publish_raw(&env.names().due(), "due", fault, BasicProperties::default()).await;
        // Dead-lettered by the broker itself, with the headers that it adds.
        for _ in 0..2 {
            let got = env.channel().basic_get(env.names().timeout().as_str().into(), BasicGetOptions::default()).await;
            let message = got.unwrap().expect("an alarm in the processing queue");
            message.reject(BasicRejectOptions { requeue: false }).await.unwrap();
        }
        wait_for("the dead letters", async || env.depth(&env.names().parked()).await == 2).await;
        let worker = env.worker().await;
        wait_for("the parking", async || env.parked().await.len() == 2).await;
        let mut parked = env.parked().await;
        parked.sort();
        assert_eq!((parked[0].0.as_str(), parked[0].2.clone()), ("broker_gave_up", Some(order.id.to_string())));
        assert!(parked[0].1.contains("dead-lettered"), "{}", parked[0].1);
        assert_eq!(parked[1].0, "unreadable");
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

/// `order-timeout parked …` as (exit code, standard output).
fn parked_command(env: &TestEnv, arguments: &[&str]) -> (i32, String) {
    let (code, stdout, stderr) =
        tokio::task::block_in_place(|| run(order_timeout(&env.settings).arg("parked").args(arguments)));
    assert!(matches!(code, 0 | 1), "{arguments:?} ended with {code}: {stderr}");
    (code, stdout)
}

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn failed_parking_does_not_block_others() {
    TestEnv::builder().run(async |env| {
        sqlx::query("ALTER TABLE parked_alarms ADD CHECK (body <> 'bad')").execute(&env.pool).await.unwrap();
        for body in ["bad", "first", "second"] {
            env.publish_raw(&env.names().due(), DUE_KEY, body.as_bytes(), BasicProperties::default()).await;
        }
        let worker = env.worker().await;
        let parked = async || env.count("SELECT count(*) FROM parked_alarms").await;
        wait_for("the two that can be parked", async || parked().await == 2).await;
        sqlx::query("ALTER TABLE parked_alarms DROP CONSTRAINT parked_alarms_body_check")
            .execute(&env.pool)
            .await
            .unwrap();
        wait_for("the third, once it can be parked", async || parked().await == 3).await;
        worker.stop().await;
        env.assert_drained().await;
    });
}

/// Parks a row as the worker would.
async fn insert_parked(pool: &PgPool, reason: &str, body: &[u8]) -> Uuid {
    sqlx::query_scalar("INSERT INTO parked_alarms (reason, detail, body) VALUES ($1, 'for the test', $2) RETURNING id")
        .bind(reason)
        .bind(body)
        .fetch_one(pool)
        .await
        .unwrap()
}

#[test]
fn parked_list_shows_reason_and_age() {
    TestEnv::builder().run(async |env| {
        assert_eq!(parked_command(&env, &["list"]), (0, "nothing is parked\n".into()));
        assert_eq!(parked_command(&env, &["list", "--json"]), (0, String::new()));
        let worker = env.worker().await;
        env.publish_raw(&env.names().due(), "due", b"\x1b[2J{", BasicProperties::default()).await;
        wait_for("the first", async || env.parked().await.len() == 1).await;
        let body = alarm_json("no-uuid", "2020-01-01T00:00:00Z");
        env.publish_raw(&env.names().due(), "due", &body, BasicProperties::default()).await;
        wait_for("the second", async || env.parked().await.len() == 2).await;
        worker.stop().await;

        let (code, output) = parked_command(&env, &["list", "--json"]);
        let rows = json_lines(&output);
        assert_eq!((code, rows.len()), (0, 2));
        assert_eq!((&rows[0]["reason"], &rows[0]["order_id"]), (&"unreadable".into(), &Value::Null));
        assert_eq!((&rows[1]["reason"], &rows[1]["order_id"]), (&"malformed_id".into(), &"no-uuid".into()));
        assert_eq!((&rows[1]["deadline"], &rows[1]["attempts"]), (&"2020-01-01T00:00:00.000Z".into(), &0.into()));
        assert!(rows.iter().all(|row| row["id"].as_str().is_some_and(|id| Uuid::parse_str(id).is_ok())));
        assert!(rows.iter().all(|row| row["age_s"].as_i64().is_some_and(|age| (0..60).contains(&age))));
        assert!(rows[0]["detail"].as_str().unwrap().contains("not valid JSON"));

        let ids = |arguments: &[&str]| -> Vec<Value> {
            json_lines(&parked_command(&env, arguments).1).iter().map(|row| row["id"].clone()).collect()
        };
        assert_eq!(ids(&["list", "--json", "--reason", "malformed_id"]), [rows[1]["id"].clone()]);
        assert_eq!(ids(&["list", "--json", "--limit", "1"]), [rows[0]["id"].clone()]);

        let (code, table) = parked_command(&env, &["list"]);
        assert_eq!((code, table.lines().count()), (0, 3));
        assert!(!table.contains('\x1b'), "what came from a message does not steer the terminal");
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn parked_retry_closes_order_that_appeared() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let order = Order { id: Uuid::now_v7(), deadline: Timestamp::now_by_local_clock() };
        env.deliver([&order]).await;
        wait_for("the parking", async || env.parked().await.len() == 1).await;
        let insert = "INSERT INTO orders (id, expires_at) VALUES ($1, clock_timestamp())";
        sqlx::query(insert).bind(order.id).execute(&env.pool).await.unwrap();

        let (code, output) = parked_command(&env, &["retry", "--all"]);
        assert_eq!(code, 0);
        assert!(output.contains("1 alarm(s) selected, nothing done; add --yes"), "{output}");
        let (code, output) = parked_command(&env, &["retry", "--all", "--json"]);
        assert_eq!(
            (code, json_lines(&output)),
            (0, vec![serde_json::json!({ "selected": 1, "done": 0, "missing": [] })])
        );
        assert_eq!((env.parked().await.len(), env.status(&order).await), (1, "unpaid".into()));

        let (code, output) = parked_command(&env, &["retry", "--all", "--yes", "--json"]);
        assert_eq!(
            (code, json_lines(&output)),
            (0, vec![serde_json::json!({ "retried": 1, "kept": [], "missing": [] })])
        );
        wait_for("the close", async || env.status(&order).await == "closed").await;
        assert_eq!(env.parked().await, []);
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn parked_retry_keeps_alarm_parked_again() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        let far = Timestamp::now_by_local_clock() + 20_000 * 86_400 * SECOND;
        let orders: Vec<Order> = (0..50).map(|_| Order { id: Uuid::now_v7(), deadline: far }).collect();
        env.deliver(&orders).await;
        wait_for("the parking", async || env.parked().await.len() == 50).await;
        let (code, output) = parked_command(&env, &["retry", "--reason", "too_far", "--yes"]);
        assert_eq!(code, 0, "{output}");
        wait_for("them parked again", async || env.parked().await.len() == 50).await;
        worker.stop().await;
        env.assert_drained().await;
        assert_eq!(env.parked().await.len(), 50);
    });
}

/// Both lock many rows of the table, and the operator's statement must not be chosen as the deadlock's victim.
#[test]
fn retry_and_drop_delete_while_worker_parks() {
    TestEnv::builder()
        .without_broker()
        .settings(
            // Only a deadlock may end a statement here, not a stalled disk.
            |settings| {
                (settings.database.statement_timeout, settings.database.lock_timeout) = (60 * SECOND, 30 * SECOND)
            },
        )
        .run(async |env| {
            let database = Database::connect(&env.settings.database, 2).await.unwrap();
            let dead_letter =
                |n: usize| DeadLetter::unread(ParkReason::MalformedId, "nonsense", format!("no alarm {n}").as_bytes());
            let dead_letters: Vec<DeadLetter> = (0..300).map(dead_letter).collect();
            let dead_letters: Vec<&DeadLetter> = dead_letters.iter().collect();
            parked_alarms::insert(&database, &dead_letters).await.unwrap();
            let operator = Operator { who: "test".into(), why: None, run: Uuid::now_v7() };
            for _ in 0..50 {
                let mut rows = parked_alarms::list(&database, &Selection::All, i64::MAX).await.unwrap();
                rows.sort_by_key(|row| std::cmp::Reverse(row.id));
                let listed: Vec<_> = rows.iter().map(|row| (row.id, row.since)).collect();
                let ids: Vec<_> = rows.iter().map(|row| row.id).collect();
                let (parked, retried) = tokio::join!(
                    parked_alarms::insert(&database, &dead_letters),
                    parked_alarms::drop_retried(&database, &listed, &operator)
                );
                parked.unwrap();
                retried.unwrap();
                let (parked, dropped) = tokio::join!(
                    parked_alarms::insert(&database, &dead_letters),
                    parked_alarms::drop_rows(&database, &ids, &operator)
                );
                parked.unwrap();
                dropped.unwrap();
                parked_alarms::insert(&database, &dead_letters).await.unwrap();
            }
        });
}

#[test]
fn parked_retry_keeps_unreadable_alarms() {
    TestEnv::builder().run(async |env| {
        let order = env.order(SECOND).await;
        let readable = insert_parked(&env.pool, "unknown_order", &order.body()).await;
        let unreadable = insert_parked(&env.pool, "unreadable", b"{").await;

        let (code, output) = parked_command(&env, &["retry", "--all", "--yes", "--json"]);
        let answer = &json_lines(&output)[0];
        assert_eq!((code, &answer["retried"]), (1, &1.into()));
        assert_eq!(answer["kept"][0]["id"], unreadable.to_string());
        assert!(answer["kept"][0]["why"].as_str().unwrap().contains("not valid JSON"), "{answer}");
        let left: Vec<Uuid> = sqlx::query_scalar("SELECT id FROM parked_alarms").fetch_all(&env.pool).await.unwrap();
        assert_eq!(left, [unreadable]);
        assert_ne!(readable, unreadable);

        let (code, output) = parked_command(&env, &["retry", &unreadable.to_string(), "--yes"]);
        assert_eq!(code, 1);
        assert!(output.contains("0 alarm(s) sent back") && output.contains(&format!("kept {unreadable}")), "{output}");
        // Only the beginning of an oversized message was kept, which tells nothing about the rest.
        let cut = insert_parked(&env.pool, "unreadable", &[b'['; 16 * 1024]).await;
        let (_, output) = parked_command(&env, &["retry", &cut.to_string(), "--yes"]);
        assert!(output.contains(&format!("kept {cut}: for the test")), "{output}");

        let worker = env.worker().await;
        wait_for("the close of the one that was sent", async || env.status(&order).await == "closed").await;
        worker.stop().await;
        env.assert_drained().await;
        env.assert_ledger().await;
    });
}

#[test]
fn parked_drop_deletes_only_selected_alarms() {
    TestEnv::builder().run(async |env| {
        let mut ids = Vec::new();
        for reason in ["unreadable", "unreadable", "too_far", "close_failed", "close_failed"] {
            ids.push(insert_parked(&env.pool, reason, b"{").await);
        }
        let left = async || env.count("SELECT count(*) FROM parked_alarms").await;
        let done = |(code, output): (i32, String)| {
            assert_eq!(code, 0);
            json_lines(&output)[0]["dropped"].as_i64().expect("a count")
        };
        let (code, output) = parked_command(&env, &["drop", "--all"]);
        assert_eq!((code, left().await), (0, 5), "a preview drops nothing: {output}");
        assert!(output.contains("5 alarm(s) selected, nothing done"), "{output}");

        let id = ids[0].to_string();
        assert_eq!(done(parked_command(&env, &["drop", &id, "--yes", "--json"])), 1);
        for action in [&["drop"][..], &["drop", "--yes"], &["retry", "--yes"]] {
            let (code, output) = parked_command(&env, &[action, &[&id]].concat());
            assert!(code == 1 && output.contains(&format!("no alarm {id} is parked")), "it is gone: {output}");
            let (code, output) = parked_command(&env, &[action, &[&id, "--json"]].concat());
            assert_eq!((code, &json_lines(&output)[0]["missing"][0]), (1, &id.as_str().into()));
        }
        assert_eq!(done(parked_command(&env, &["drop", "--reason", "close_failed", "--yes", "--json"])), 2);
        let reasons: Vec<String> =
            sqlx::query_scalar("SELECT reason FROM parked_alarms ORDER BY 1").fetch_all(&env.pool).await.unwrap();
        assert_eq!(reasons, ["too_far", "unreadable"]);
        assert_eq!(done(parked_command(&env, &["drop", "--all", "--yes", "--json"])), 2);
        assert_eq!(left().await, 0);
        env.assert_ledger().await;
    });
}

/// An alarm of a nonexistent order, so old that it is parked at once.
fn unknown_alarm() -> (Vec<u8>, BasicProperties) {
    (alarm_json(&Uuid::now_v7().to_string(), "2020-01-01T00:00:00Z"), BasicProperties::default().with_timestamp(1))
}

#[test]
fn parked_flood_is_counted_not_listed() {
    const ALARMS: usize = 20_000;
    TestEnv::builder().settings(|settings| settings.http.listen = Listen(Some(free_address()))).run(async |env| {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let worker = WorkerProcess::start_with_log(&env.settings, &log);
        let (mut confirms, due) = (Vec::new(), env.names().due());
        for _ in 0..ALARMS {
            let (body, properties) = unknown_alarm();
            let options = BasicPublishOptions::default();
            let sent = env.channel().basic_publish(due.as_str().into(), DUE_KEY.into(), options, &body, properties);
            confirms.push(sent.await.unwrap());
        }
        for confirm in confirms {
            assert!(confirm.await.unwrap().is_ack());
        }
        let parked = async || env.count("SELECT count(*) FROM parked_alarms").await;
        wait_for("the parking", async || parked().await == ALARMS as i64).await;
        let address = env.settings.http.listen.0.unwrap();
        let counted =
            format!("order_timeout_alarms_parked_total{{kind=\"order\",reason=\"unknown_order\"}} {ALARMS}\n");
        // They are counted after the commit.
        wait_for("the metric that counts all", async || {
            http::get(address, METRICS, TIMEOUT).await.unwrap().1.contains(&counted)
        })
        .await;
        assert_eq!(worker.terminate(TIMEOUT), 0);
        let text = std::fs::read_to_string(&log).unwrap();
        let lines = text.lines().filter(|line| line.contains("alarms parked")).count();
        println!("{ALARMS} parked alarms: {} bytes of log, {lines} lines about them", text.len());
        assert!((1..=5).contains(&lines), "{lines} lines:\n{text}");
        assert!(text.len() < 64 * 1024, "{} bytes of log", text.len());
    });
}

#[test]
fn old_parked_alarms_are_deleted() {
    TestEnv::builder().without_broker().settings(|settings| settings.parked.keep = 3_600 * SECOND).run(async |env| {
        let park = "INSERT INTO parked_alarms (reason, detail, body, parked_at)
                        SELECT 'unreadable', 'for the test', '{', now() - make_interval(mins => age)
                        FROM generate_series(1, 120) AS age, generate_series(1, 40)";
        sqlx::query(park).execute(&env.pool).await.unwrap();
        let database = Database::connect(&env.settings.database, 1).await.unwrap();
        let (mut deleted, mut more) = (0, true);
        while more {
            let page = parked_alarms::forget_old(&database, env.settings.parked.keep).await.unwrap();
            assert!(page.0 <= 1_000, "{} at once", page.0);
            deleted += page.0;
            more = page.1;
        }
        let left = env.count("SELECT count(*) FROM parked_alarms").await;
        let young = env.count("SELECT count(*) FROM parked_alarms WHERE parked_at > now() - interval '1 hour'").await;
        assert_eq!((left, left + deleted as i64), (young, 4_800));
        assert!((2_300..=2_400).contains(&left), "{left}");
    });
}

#[test]
fn parked_list_is_paged_and_shows_bodies() {
    TestEnv::builder().without_broker().run(async |env| {
        let mut ids = Vec::new();
        for body in [&b"{\"order_id\": \"1\"}"[..], b"\xff\x1b[2J", "a\u{202e}b".as_bytes(), b"4", b"5"] {
            ids.push(insert_parked(&env.pool, "unreadable", body).await.to_string());
        }
        let (code, page) = parked_command(&env, &["list", "--limit", "2"]);
        assert_eq!((code, page.lines().count()), (0, 4), "{page}");
        assert!(page.contains("{\"order_id\": \"1\"}") && page.contains("\\xff\\u001b[2J"), "{page}");
        assert!(page.contains(&format!("there may be more; the next: add --after {}", ids[1])), "{page}");
        let (_, page) = parked_command(&env, &["list", "--limit", "2", "--after", &ids[1], "--json"]);
        let rows = json_lines(&page);
        assert_eq!((&rows[0]["id"], &rows[1]["id"]), (&ids[2].as_str().into(), &ids[3].as_str().into()));
        assert_eq!(rows[0]["body"], "a\u{202e}b");
        assert!(!page.contains('\u{202e}'), "as an escape");
        let (_, page) = parked_command(&env, &["list", "--json"]);
        let rows = json_lines(&page);
        assert_eq!((&rows[1]["body"], &rows[1]["body_hex"]), (&Value::Null, &"ff1b5b324a".into()));
        let (_, page) = parked_command(&env, &["list", "--after", &ids[4]]);
        assert_eq!(page, "nothing more is parked\n");
        let (code, _) = parked_command(&env, &["list", "--after", &Uuid::now_v7().to_string()]);
        assert_eq!(code, 1);
    });
}
