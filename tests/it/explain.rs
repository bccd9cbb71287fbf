//! `explain` tells one order's story in time, out of every table that has a part of it, says why the order is still open
//! and what to do, and lists what no table tells.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use order_timeout::Settings;
use order_timeout_testkit::away::{meanwhile, on_private_broker_with};
use order_timeout_testkit::figures::{serve_http, wait_for_figure};
use order_timeout_testkit::payment_service::{Fault, PaymentService, wide_limits};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{Order, TestEnv, wait_for};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Executor};
use uuid::Uuid;

use crate::providers::{adjust, begin_attempts};

const SECOND: Duration = Duration::from_secs(1);

async fn explained(settings: &Settings, order: &Order) -> Value {
    let (code, stdout, stderr) = call_with(settings, &["explain", &order.id.to_string(), "--json"]).await;
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    serde_json::from_str(&stdout).unwrap()
}

async fn execute(env: &TestEnv, sql: &str) {
    env.pool.execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))).await.unwrap();
}

/// The story as (table, what happened), in its order.
fn moments(told: &Value) -> Vec<(String, String)> {
    let text = |moment: &Value, key: &str| moment[key].as_str().unwrap().to_owned();
    told["moments"].as_array().unwrap().iter().map(|one| (text(one, "source"), text(one, "what"))).collect()
}

/// Where in the story a table says this.
fn place(told: &Value, source: &str, what: &str) -> usize {
    let found = moments(told).iter().position(|(from, said)| from == source && said.contains(what));
    found.unwrap_or_else(|| panic!("{source} does not say {what:?}: {told:#}"))
}

#[test]
fn explain_orders_whole_story_by_time() {
    TestEnv::builder().run(async |env| {
        let worker = env.worker().await;
        // Long enough for the attempt to pay to begin before it is due, on a busy machine as well.
        let order = env.order(4 * SECOND).await;
        env.write_alarm(&order).await;
        let pays = "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency, state)
                    VALUES ('psp', 'cs_1', $1, 4999, 'EUR', 'closed')";
        sqlx::query(pays).bind(order.id.to_string()).execute(&env.pool).await.unwrap();
        wait_for("the announcement", async || {
            env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NOT NULL").await == 1
        })
        .await;
        let told = explained(&env.settings, &order).await;
        worker.stop().await;
        assert!(told.get("open").is_none(), "{told:#}");
        assert!(told["summary"].as_str().unwrap().starts_with("it is closed: by "), "{told:#}");
        let places = [
            place(&told, "orders", "created"),
            place(&told, "payment_attempts", "49.99 EUR with psp began"),
            place(&told, "orders", "its deadline"),
            place(&told, "order_events", " ms after its deadline; reason: unpaid"),
            place(&told, "event_outbox", "the event order.closed.v1 was announced"),
        ];
        assert!(places.is_sorted(), "{places:?}: {told:#}");
        place(&told, "alarm_outbox", "was written");
        place(&told, "alarm_outbox", "was handed to the broker");
        let unknown: Vec<_> = told["not_known"].as_array().unwrap().iter().map(|one| &one["what"]).collect();
        assert_eq!(unknown, ["alarms from publishers", "deliveries"]);
    });
}

#[test]
fn explain_tells_provider_errors_in_order() {
    let service = PaymentService::start();
    TestEnv::builder()
        .settings(|settings| {
            adjust(settings);
            settings.closing.max_rounds = 1_000;
            service.join(settings, "card", wide_limits());
        })
        .run(async move |env| {
            let order = env.order(3_600 * SECOND).await;
            let id = order.id.to_string();
            begin_attempts(&env, &[order], "card").await;
            service.fail(&id, Some(Fault::Error));
            for (left, why) in [("2h", "the customer asked"), ("1s", "a mistake")] {
                let arguments = ["deadline", &id, "--in", left, "--who", "night shift", "--why", why];
                let (code, said, fault) = call_with(&env.settings, &arguments).await;
                assert_eq!(code, 0, "{said}{fault}");
            }
            // Its alarms are lost: only the sweep finds it.
            execute(&env, "DELETE FROM alarm_outbox").await;
            let worker = env.worker().await;
            let rounds = "SELECT count(*) FROM close_attempts WHERE rounds >= 2";
            wait_for("two rounds without an answer", async || env.count(rounds).await == 1).await;
            let told = explained(&env.settings, &order).await;
            let because = told["open"]["because"].as_str().unwrap();
            assert!(because.starts_with("card gave no answer in ") && because.contains("unknown ("), "{told:#}");
            assert!(told["open"]["what_to_do"].as_str().unwrap().contains("payment provider answers"), "{told:#}");
            let claimed = place(&told, "close_attempts", "claimed to be closed (sweep): card is asked first");
            let next = place(&told, "close_attempts", "card is asked again, after ");
            assert!(place(&told, "orders", "its deadline") < claimed && claimed < next, "{told:#}");

            service.fail(&id, None);
            wait_for("the announcement", async || {
                env.count("SELECT count(*) FROM event_outbox WHERE type = 'order.closed.v1' AND sent_at IS NOT NULL")
                    .await
                    == 1
            })
            .await;
            worker.stop().await;
            let told = explained(&env.settings, &order).await;
            assert!(told.get("open").is_none(), "{told:#}");
            let places = [
                place(&told, "orders", "created"),
                place(&told, "payment_attempts", "with card began, reference "),
                place(&told, "order_events", "; who: night shift; why: the customer asked"),
                place(&told, "order_events", "; who: night shift; why: a mistake"),
                place(&told, "orders", "its deadline"),
                place(&told, "order_events", "closed by the sweep, "),
                place(&told, "event_outbox", "the event order.closed.v1 was announced"),
            ];
            assert!(places.is_sorted(), "{places:?}: {told:#}");
            place(&told, "payment_attempts", "; it is closed");
            let (_, closed) = &moments(&told)[places[5]];
            let answers = closed.split_once("answers: ").unwrap().1;
            assert!(
                answers.starts_with("rounds without an answer: ")
                    && answers.contains(", the last: card ")
                    && answers.ends_with("cancel: closed"),
                "{answers}"
            );
        });
}

/// Its alarm comes before the deadline, which was moved, and is re-armed. When it is due, its payment
/// provider does not answer, and the broker restarts meanwhile.
#[test]
fn explain_tells_story_across_outages() {
    let service = Arc::new(PaymentService::start());
    let provider = service.clone();
    let settings = move |settings: &mut Settings| {
        adjust(settings);
        serve_http(settings);
        settings.closing.max_rounds = 1_000;
        provider.join(settings, "card", wide_limits());
    };
    on_private_broker_with(&[], settings, async move |env: Arc<TestEnv>, broker: Arc<Private>| {
        let order = env.order(1_800 * SECOND).await;
        let id = order.id.to_string();
        begin_attempts(&env, std::slice::from_ref(&order), "card").await;
        service.fail(&id, Some(Fault::Error));
        let worker = env.worker().await;
        let move_deadline = async |left: &str, why: &str| {
            let arguments = ["deadline", &id, "--in", left, "--who", "night shift", "--why", why];
            let (code, said, fault) = call_with(&env.settings, &arguments).await;
            assert_eq!(code, 0, "{said}{fault}");
        };
        move_deadline("1h", "the customer asked").await;
        move_deadline("2h", "and asked again").await;
        env.deliver([&order]).await;
        wait_for_figure(&worker, "alarms_rearmed_total", |value| value >= 1.0).await;
        worker.stop().await;
        move_deadline("1s", "a mistake").await;
        // Its alarm is lost: only the sweep finds it.
        execute(&env, "DELETE FROM alarm_outbox").await;
        let worker = env.worker().await;
        let rounds = "SELECT count(*) FROM close_attempts WHERE rounds >= 2";
        wait_for("two rounds without an answer", async || env.count(rounds).await == 1).await;
        let told = explained(&env.settings, &order).await;
        let claimed = place(&told, "close_attempts", "claimed to be closed (sweep): card is asked first");
        assert!(place(&told, "orders", "its deadline") < claimed, "{told:#}");
        meanwhile(|| broker.stop());
        meanwhile(|| broker.restart());
        service.fail(&id, None);
        let announced = "SELECT count(*) FROM event_outbox WHERE type = 'order.closed.v1' AND sent_at IS NOT NULL";
        wait_for("the announcement", async || env.count(announced).await == 1).await;
        worker.stop().await;
        let told = explained(&env.settings, &order).await;
        assert!(told.get("open").is_none(), "{told:#}");
        let places = [
            place(&told, "orders", "created"),
            place(&told, "payment_attempts", "with card began, reference "),
            place(&told, "order_events", "; why: the customer asked"),
            place(&told, "order_events", "; why: and asked again"),
            place(&told, "order_events", "; why: a mistake"),
            place(&told, "orders", "its deadline"),
            place(&told, "order_events", "closed by the sweep, "),
            place(&told, "event_outbox", "the event order.closed.v1 was announced"),
        ];
        assert!(places.is_sorted(), "{places:?}: {told:#}");
        let (_, closed) = &moments(&told)[places[6]];
        assert!(closed.contains("answers: rounds without an answer: "), "{closed}");
        // The early delivery and its return to the broker leave no row, which the story says.
        let unknown: Vec<_> = told["not_known"].as_array().unwrap().iter().map(|one| &one["what"]).collect();
        assert_eq!(unknown, ["alarms from publishers", "deliveries"]);
    });
}

#[test]
fn explain_names_pause_that_holds_order() {
    TestEnv::builder().settings(serve_http).with_clock().run(async |env| {
        let worker = env.worker().await;
        let order = env.order(3_600 * SECOND).await;
        env.write_alarm(&order).await;
        let call = async |arguments: &[&str]| {
            let (code, said, fault) = call_with(&env.settings, arguments).await;
            assert_eq!(code, 0, "{said}{fault}");
        };
        call(&["pause", "--why", "no callbacks arrive", "--who", "night shift"]).await;
        wait_for_figure(&worker, "closing_paused{cause=\"operator\"}", |value| value == 1.0).await;
        env.advance(3_600 * SECOND).await;
        let told = explained(&env.settings, &order).await;
        let because = told["open"]["because"].as_str().unwrap();
        assert!(because.contains("closing is paused since") && because.contains("no callbacks arrive"), "{told:#}");
        assert!(told["open"]["what_to_do"].as_str().unwrap().contains("order-timeout resume"), "{told:#}");
        place(&told, "closing_pauses", "closing was paused (operator) by night shift: no callbacks arrive");
        call(&["resume", "--why", "they arrive", "--who", "day shift"]).await;
        wait_for("the close", async || env.status(&order).await == "closed").await;
        worker.stop().await;
        // A pause that is over before the deadline, and one after the close, have held nothing.
        call(&["pause", "--why", "later"]).await;
        call(&["resume"]).await;
        let told = explained(&env.settings, &order).await;
        let places = [
            place(&told, "orders", "its deadline"),
            place(&told, "closing_pauses", "closing was resumed by day shift: they arrive"),
            place(&told, "order_events", "closed by "),
        ];
        assert!(places.is_sorted(), "{told:#}");
        assert!(!told.to_string().contains("later"), "{told:#}");
    });
}

#[test]
fn explain_says_what_to_do() {
    TestEnv::builder().without_broker().with_clock().run(async |env| {
        let order = env.order(Duration::ZERO).await;
        env.advance(60 * SECOND).await;
        let told = explained(&env.settings, &order).await;
        assert!(told["open"]["because"].as_str().unwrap().contains("no worker is running"), "{told:#}");
        assert!(told["open"]["what_to_do"].as_str().unwrap().contains("order-timeout worker"), "{told:#}");
        let (_, text, _) = call_with(&env.settings, &["explain", &order.id.to_string()]).await;
        for part in
            ["it is unpaid; its deadline is ", "\nopen because it is overdue by 1m", "\nwhat to do: start a worker"]
        {
            assert!(text.contains(part), "lacks {part:?}: {text}");
        }

        let early = env.order(3_600 * SECOND).await;
        let (_, text, _) = call_with(&env.settings, &["explain", &early.id.to_string()]).await;
        let lines: Vec<&str> = text.lines().collect();
        let at = |part: &str| lines.iter().position(|line| line.ends_with(part)).unwrap_or_else(|| panic!("{text}"));
        assert!(at("created") < at("now") && at("now") < at("its deadline"), "{text}");

        let unknown = Uuid::now_v7().to_string();
        let (code, stdout, stderr) = call_with(&env.settings, &["explain", &unknown]).await;
        assert_eq!((code, stderr.as_str()), (1, ""));
        assert!(stdout.contains("there is no such order"), "{stdout}");
    });
}

#[test]
fn explain_tells_what_operators_did() {
    TestEnv::builder().run(async |env| {
        let order = env.order(3_600 * SECOND).await;
        for _ in 0..2 {
            let park =
                "INSERT INTO parked_alarms (reason, detail, order_id, body) VALUES ('close_failed', 'guarded', $1, $2)";
            sqlx::query(park).bind(order.id.to_string()).bind(order.body()).execute(&env.pool).await.unwrap();
        }
        let parked: Vec<Uuid> =
            sqlx::query_scalar("SELECT id FROM parked_alarms ORDER BY id").fetch_all(&env.pool).await.unwrap();
        let call = async |action: &str, id: &Uuid| {
            let arguments = ["parked", action, &id.to_string(), "--yes", "--who", "night shift", "--why", "rule <7>"];
            let (code, stdout, stderr) = call_with(&env.settings, &arguments).await;
            assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
        };
        call("drop", &parked[0]).await;
        call("retry", &parked[1]).await;
        let told = explained(&env.settings, &order).await;
        let dropped = place(&told, "operator_actions", "its parked alarm was dropped; who: night shift; why: rule <7>");
        assert!(dropped < place(&told, "operator_actions", "its parked alarm was sent back; who: night shift"));
        assert_eq!(env.count("SELECT count(*) FROM parked_alarms").await, 0);
    });
}

#[test]
fn explain_invents_nothing_about_own_tables() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(Duration::ZERO).await;
        let path = |file: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join(file).to_str().unwrap().to_owned();
        let mut own = env.settings.clone();
        (own.orders.close_sql, own.orders.overdue_sql) =
            (path("tests/fixtures/mapping/default_close.sql"), path("tests/fixtures/mapping/default_overdue.sql"));
        let told = explained(&own, &order).await;
        assert_eq!(told["exists"], json!(true));
        assert!(told["summary"].as_str().unwrap().starts_with("it is open and overdue"), "{told:#}");
        assert_eq!(moments(&told), [("orders".to_owned(), "its deadline".to_owned())]);
        let unknown: Vec<_> = told["not_known"].as_array().unwrap().iter().map(|one| one["what"].as_str()).collect();
        for what in ["lock", "dates"] {
            assert!(unknown.contains(&Some(what)), "{told:#}");
        }
    });
}
