//! The commands that only ask: `status` and `show` say what the database knows, leave out what it does not, and say why
//! an order is still open. And the worker's own line about what it has closed.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use order_timeout::Settings;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Executor};
use uuid::Uuid;

use order_timeout_testkit::process::{WorkerProcess, call_with};
use order_timeout_testkit::{Order, TIMEOUT, TestEnv, wait_for};

const SECOND: Duration = Duration::from_secs(1);

async fn ask(settings: &Settings, arguments: &[&str]) -> Value {
    let (code, stdout, stderr) = call_with(settings, &[arguments, &["--json"]].concat()).await;
    assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}: {stdout}");
    serde_json::from_str(&stdout).unwrap()
}

async fn text(env: &TestEnv, arguments: &[&str]) -> String {
    let (code, stdout, stderr) = call_with(&env.settings, arguments).await;
    assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}: {stdout}");
    stdout
}

async fn execute(env: &TestEnv, sql: &str) {
    env.pool.execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))).await.unwrap();
}

/// The reasons for which something is not known, by name.
fn not_known(answer: &Value, what: &str) -> String {
    let entries = answer["not_known"].as_array().unwrap();
    let entry = entries.iter().find(|entry| entry["what"] == what);
    entry.unwrap_or_else(|| panic!("{what} is known: {answer}"))["why"].as_str().unwrap().to_owned()
}

/// With statements of its own, which happen to be the default ones.
fn own_statements(env: &TestEnv) -> Settings {
    let path = |file: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join(file).to_str().unwrap().to_owned();
    let mut settings = env.settings.clone();
    (settings.orders.close_sql, settings.orders.overdue_sql) =
        (path("tests/fixtures/mapping/default_close.sql"), path("tests/fixtures/mapping/default_overdue.sql"));
    settings
}

/// A worker on another host that has just been seen.
const ANOTHER_WORKER: &str = "INSERT INTO order_timeout_workers (id, host, pid, version, namespace, kinds, delays)
     VALUES ('01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4c', 'shop-2', 17, '0.1.0', 'order', '{order}', '{}')";

#[test]
fn status_counts_overdue_orders_outboxes_and_parked() {
    TestEnv::builder().without_broker().run(async |env| {
        env.orders(3, 90 * SECOND).await;
        let overdue = env.orders(2, Duration::ZERO).await;
        assert!(env.pay(&env.order(60 * SECOND).await).await);
        execute(&env, "UPDATE orders SET expires_at = now() - interval '2 hours' WHERE expires_at < now()").await;
        env.write_alarm(&overdue[0]).await;
        execute(
            &env,
            "INSERT INTO event_outbox (routing_key, type, payload, created_at, refusals) VALUES
                     ('k', 't', '{}', now() - interval '1 minute', 3), ('k', 't', '{}', now(), 0);
                 INSERT INTO parked_alarms (reason, detail, body, parked_at) VALUES
                     ('too_far', 'd', '', now() - interval '3 hours'), ('unknown_order', 'd', '', now()),
                     ('too_far', 'd', '', now())",
        )
        .await;
        execute(&env, ANOTHER_WORKER).await;

        let status = ask(&env.settings, &["status"]).await;
        let overdue = &status["kinds"][0]["overdue"];
        assert_eq!((&overdue["orders"], &overdue["is_at_least"]), (&json!(2), &json!(false)));
        let age = |value: &Value| value.as_f64().unwrap_or(-1.0);
        assert!((7_200.0..7_300.0).contains(&age(&overdue["oldest_s"])), "{status}");
        let (alarms, events) = (&status["alarm_outbox"], &status["event_outbox"]);
        assert_eq!((&alarms["unsent"], &alarms["refused"]), (&json!(1), &json!(0)));
        assert_eq!((&events["unsent"], &events["refused"]), (&json!(2), &json!(1)));
        assert!((60.0..100.0).contains(&age(&events["oldest_refused_s"])), "{status}");
        assert_eq!((&status["parked"][0]["reason"], &status["parked"][0]["alarms"]), (&json!("too_far"), &json!(2)));
        assert!(age(&status["parked"][0]["oldest_s"]) >= 10_800.0);
        let worker = &status["workers"][0];
        assert_eq!((&worker["host"], &worker["pid"], &worker["is_live"]), (&json!("shop-2"), &json!(17), &json!(true)));

        let text = text(&env, &["status"]).await;
        for part in [
            "overdue               2, the oldest since ",
            "1 of them refused by the broker",
            "2 too_far, the oldest for 3h",
            "shop-2 pid 17, version 0.1.0",
        ] {
            assert!(text.contains(part), "lacks {part:?}: {text}");
        }
    });
}

#[test]
fn status_never_shows_unknown_as_zero() {
    TestEnv::builder().without_broker().run(async |env| {
        env.orders(3, Duration::ZERO).await;
        env.order(90 * SECOND).await;
        let status = ask(&own_statements(&env), &["status"]).await;
        assert_eq!(status["kinds"][0]["overdue"]["orders"], 3, "orders.overdue_sql tells it");
        // A table that cannot be read does not hide the rest.
        execute(&env, "ALTER TABLE parked_alarms RENAME TO put_away").await;
        let status = ask(&env.settings, &["status"]).await;
        assert!(status.get("parked").is_none() && not_known(&status, "parked").contains("parked_alarms"));
        assert_eq!(status["kinds"][0]["overdue"]["orders"], 3);
        let text = text(&env, &["status"]).await;
        assert!(!text.contains("parked alarms ") && text.contains("not known: parked: "), "{text}");
    });
}

#[test]
fn status_lists_running_worker() {
    TestEnv::builder().run(async |env| {
        assert!(text(&env, &["status"]).await.contains("workers               none"));
        let worker = env.worker().await;
        let registered = "SELECT count(*) FROM order_timeout_workers";
        wait_for("the registration", async || env.count(registered).await == 1).await;
        let status = ask(&env.settings, &["status"]).await;
        let shown = &status["workers"][0];
        assert_eq!((&shown["pid"], &shown["is_live"]), (&json!(std::process::id()), &json!(true)), "{status}");
        assert_eq!(shown["namespace"], env.settings.namespace.as_str());
        worker.stop().await;
    });
}

async fn story(env: &TestEnv, order: &Order) -> Value {
    ask(&env.settings, &["explain", &order.id.to_string()]).await
}

async fn why_open(env: &TestEnv, order: &Order) -> String {
    let story = story(env, order).await;
    story["open"]["because"].as_str().unwrap_or_else(|| panic!("not open: {story}")).to_owned()
}

#[test]
fn explain_says_why_order_is_open() {
    TestEnv::builder().run(async |env| {
        let early = env.order(3_600 * SECOND).await;
        assert!(why_open(&env, &early).await.contains("its deadline is in 59m"));
        env.write_alarm(&early).await;
        assert!(why_open(&env, &early).await.contains("waits in alarm_outbox"));

        let late = env.order(Duration::ZERO).await;
        execute(&env, "UPDATE orders SET expires_at = now() - interval '1 minute' WHERE expires_at < now()").await;
        assert!(why_open(&env, &late).await.contains("no worker is running"));
        execute(&env, ANOTHER_WORKER).await;
        let why = why_open(&env, &late).await;
        assert!(why.contains("no cause is visible"), "{why}");
        let parked =
            "INSERT INTO parked_alarms (reason, detail, order_id, body) VALUES ('close_failed', 'guarded', $1, '')";
        sqlx::query(parked).bind(late.id.to_string()).execute(&env.pool).await.unwrap();
        assert!(why_open(&env, &late).await.contains("parked as close_failed, because guarded"));
        let mut other = env.pool.begin().await.unwrap();
        sqlx::query("SELECT FROM orders WHERE id = $1 FOR UPDATE").bind(late.id).execute(&mut *other).await.unwrap();
        let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *other).await.unwrap();
        let why = why_open(&env, &late).await;
        assert!(why.contains(&format!("pid {pid} (")) && why.contains("idle in transaction) since 20"), "{why}");
        assert!(why.contains("holds a lock on its row"), "{why}");
        other.rollback().await.unwrap();

        assert!(env.pay(&early).await);
        let paid = story(&env, &early).await;
        assert!(paid.get("open").is_none() && paid["row"]["status"] == "paid", "{paid}");
    });
}

#[test]
fn explain_has_rows_of_all_tables() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(Duration::ZERO).await;
        env.write_alarm(&order).await;
        let id = order.id.to_string();
        let closing = ["close", &id, "--why", "a test\nof history", "--who", "night shift"];
        let (code, _, stderr) = call_with(&env.settings, &closing).await;
        assert_eq!((code, stderr.as_str()), (0, ""));
        let story = story(&env, &order).await;
        assert_eq!((&story["exists"], &story["row"]["status"]), (&json!(true), &json!("closed")));
        assert!(story["row"]["remaining_s"].as_f64().unwrap() < 0.0, "{story}");
        assert_eq!(story["alarms"].as_array().unwrap().len(), 1);
        assert_eq!(story["events"][0]["type"], "order.closed.v1");
        assert_eq!(story["parked"], json!([]), "known to be empty");
        let entry = &story["history"][0];
        assert_eq!((&entry["event"], &entry["by"]), (&json!("closed"), &json!("manual")));
        assert_eq!((&entry["who"], &entry["why"]), (&json!("night shift"), &json!("a test\nof history")));
        let text = text(&env, &["explain", &id]).await;
        for part in
            [&format!("order {id}: it is closed: by hand, ")[..], "; who: night shift; why: a test of history\n"]
        {
            assert!(text.contains(part), "lacks {part:?}: {text}");
        }

        let unknown = Uuid::now_v7().to_string();
        for id in [unknown.as_str(), "17"] {
            let (code, stdout, stderr) = call_with(&env.settings, &["explain", id]).await;
            assert_eq!((code, stderr.as_str()), (1, ""));
            assert!(stdout.contains(&format!("order {id}: there is no such order")), "{stdout}");
        }
    });
}

#[test]
fn explain_knows_own_orders_by_contract() {
    TestEnv::builder().without_broker().run(async |env| {
        let (late, early) = (env.order(Duration::ZERO).await, env.order(60 * SECOND).await);
        let own = own_statements(&env);
        let story = ask(&own, &["explain", &late.id.to_string()]).await;
        assert_eq!(story["exists"], true);
        assert!(story["row"].get("status").is_none() && story["row"]["deadline"].is_string(), "{story}");
        assert!(story["open"]["because"].as_str().unwrap().contains("overdue"), "{story}");
        let story = ask(&own, &["explain", &early.id.to_string()]).await;
        assert!(story.get("exists").is_none() && story.get("row").is_none(), "{story}");
        assert!(not_known(&story, "row").contains("not among the overdue orders"), "{story}");
    });
}

#[test]
fn worker_logs_what_it_closed() {
    TestEnv::builder()
        .settings(|settings| {
            settings.sweep.grace = Duration::ZERO;
            settings.log.filter = "order_timeout=info".into();
        })
        .run(async |env| {
            let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
            let log = File::create(&path).unwrap();
            let worker = WorkerProcess::start_with_stderr(&env.settings, log.into());
            let lines = || {
                let text = std::fs::read_to_string(&path).unwrap();
                let about_closes = |line: &&str| line.contains("orders closed since");
                text.lines().filter(about_closes).map(str::to_owned).collect::<Vec<_>>()
            };
            env.order(Duration::ZERO).await;
            wait_for("the line about the first close", async || !lines().is_empty()).await;
            for part in ["INFO", "by_alarm=0", "by_sweep=1", "lateness_p50_ms=", "lateness_max_ms="] {
                assert!(lines()[0].contains(part), "{:?}", lines());
            }
            for closed in 2..5 {
                env.order(Duration::ZERO).await;
                wait_for("the close", async || env.closed().await == closed).await;
            }
            assert_eq!(worker.terminate(TIMEOUT), 0);
            let count = |line: &str, by: &str| line.split_once(by).unwrap().1[..1].parse::<u32>().unwrap();
            let closed = |line: &String| count(line, "by_look_ahead=") + count(line, "by_sweep=");
            assert_eq!(lines().iter().map(closed).sum::<u32>(), 4, "the last ones when it stops: {:?}", lines());
        });
}
