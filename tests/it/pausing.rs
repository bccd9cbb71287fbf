//! `order-timeout pause`: no order is closed by any path, alarms wait in the broker, every worker knows it within a second
//! and after a restart, and `resume` closes everything that is due.

use std::time::Duration;

use order_timeout::Settings;
use order_timeout::http::{CLOSINGZ, READYZ};
use order_timeout_testkit::figures::{get, serve_http, wait_for_figure};
use order_timeout_testkit::page::{TOKEN, with_page};
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{TestEnv, wait_for};
use serde_json::{Value, json};
use tempfile::NamedTempFile;

use crate::api;
use crate::page::{log_in, origin, submit};

const WHY: &str = "the callbacks of the provider are missing";

async fn call(env: &TestEnv, arguments: &[&str]) -> (i32, String, String) {
    call_with(&env.settings, arguments).await
}

async fn succeed(env: &TestEnv, arguments: &[&str]) -> String {
    let (code, stdout, stderr) = call(env, arguments).await;
    assert_eq!(code, 0, "{arguments:?}: {stdout}{stderr}");
    stdout
}

fn swept_at_once(settings: &mut Settings) {
    settings.sweep.grace = Duration::ZERO;
    serve_http(settings);
}

const OVERDUE: &str = "SELECT count(*) FROM orders WHERE expires_at < clock_timestamp() - interval '1 second'";

#[test]
fn paused_workers_close_nothing() {
    TestEnv::builder().settings(swept_at_once).run(async |env| {
        let worker = env.worker().await;
        let first = env.order(Duration::ZERO).await;
        wait_for("the first close", async || env.status(&first).await == "closed").await;
        let said = succeed(&env, &["pause", "--why", WHY, "--who", "night shift"]).await;
        assert!(said.contains("by night shift") && said.contains(WHY), "{said}");
        wait_for_figure(&worker, "closing_paused{cause=\"operator\"}", |value| value == 1.0).await;
        // By the sweep, by alarms, and by alarms that a worker holds.
        let orders = env.orders(30, Duration::from_millis(300)).await;
        env.deliver(&orders[..20]).await;
        wait_for("all of them are overdue", async || env.count(OVERDUE).await >= 31).await;
        assert_eq!(env.closed().await, 1);
        // One that starts now, and one without a broker, which would read ahead.
        let (second, third) = (env.worker().await, env.worker_without_broker().await);
        let queue = env.names().shard(0);
        wait_for("the alarms are back in the broker", async || env.depth(&queue).await >= 20).await;
        let (status, page) = get(&second, READYZ).await;
        assert_eq!(status, 200, "an upgrade must not wait for the end of the pause: {page}");
        assert!(page.contains(WHY), "{page}");
        let (status, page) = get(&worker, CLOSINGZ).await;
        assert!(status == 503 && page.contains("by night shift"), "{status} {page}");
        // A restart of everything.
        for worker in [worker, second, third] {
            worker.stop().await;
        }
        let worker = env.worker().await;
        wait_for_figure(&worker, "closing_paused{cause=\"operator\"}", |value| value == 1.0).await;
        let more = env.orders(5, Duration::ZERO).await;
        env.deliver(&more).await;
        wait_for("they are overdue as well", async || env.count(OVERDUE).await == 36).await;
        assert_eq!(env.closed().await, 1);
        let status: Value = serde_json::from_str(&succeed(&env, &["status", "--json"]).await).unwrap();
        assert_eq!((&status["paused"][0]["cause"], &status["paused"][0]["reason"]), (&json!("operator"), &json!(WHY)));

        let forecast = succeed(&env, &["forecast"]).await;
        assert!(
            forecast.contains("not closed: closing is paused since") && !forecast.contains("on time"),
            "{forecast}"
        );
        let (_, found, _) = call(&env, &["doctor", "--json"]).await;
        let found: Value = serde_json::from_str(&found).unwrap();
        let finding =
            found["checks"].as_array().unwrap().iter().find(|check| check["cause"] == "closing_paused").unwrap();
        assert!(finding.to_string().contains(WHY), "{finding}");
        let (code, said, _) = call(&env, &["resume", "--why", "they are back"]).await;
        assert!(code == 1 && said.starts_with("kind order: 35 order(s) are due") && said.contains("--yes"), "{said}");
        let said = succeed(&env, &["resume", "--why", "they are back", "--yes"]).await;
        assert!(said.contains("\nresumed; closing was paused since"), "{said}");
        wait_for("everything that is due is closed", async || env.closed().await == 36).await;
        wait_for_figure(&worker, "closing_paused{cause=\"operator\"}", |value| value == 0.0).await;
        wait_for("the page says so", async || get(&worker, CLOSINGZ).await == (200, "closing\n".into())).await;
        worker.stop().await;
        env.assert_ledger().await;
        env.assert_nothing_left_undone().await;
        let announced = "SELECT count(*) FROM event_outbox WHERE type LIKE 'closing.%' AND sent_at IS NOT NULL";
        assert_eq!(env.count(announced).await, 2, "both are announced");
        let kept =
            "SELECT count(*) FROM closing_pauses WHERE resumed_at IS NOT NULL AND resume_reason = 'they are back'";
        assert_eq!(env.count(kept).await, 1, "the history is kept");
    });
}

#[test]
fn pause_of_another_kind_changes_nothing() {
    let kinds = |settings: &mut Settings| {
        swept_at_once(settings);
        let (file, text) = (tempfile::NamedTempFile::new().unwrap(), "[kinds.acceptance]\n");
        std::fs::write(&file, text).unwrap();
        settings.kinds = Settings::load(Some(file.path()), &[]).unwrap().kinds;
    };
    TestEnv::builder().settings(kinds).run(async |env| {
        let sql =
            "INSERT INTO closing_pauses (kind, cause, reason, paused_by) VALUES ('acceptance', 'operator', 'x', 'y')";
        sqlx::query(sql).execute(&env.pool).await.unwrap();
        let worker = env.worker().await;
        let order = env.order(Duration::ZERO).await;
        wait_for("the close", async || env.status(&order).await == "closed").await;
        // Of all kinds at once, although one is paused already.
        succeed(&env, &["pause", "--why", WHY]).await;
        wait_for_figure(&worker, "closing_paused{cause=\"operator\"}", |value| value == 1.0).await;
        let (code, said, _) = call(&env, &["resume", "--kind", "order"]).await;
        assert!(code == 1 && said.contains("pause of all kinds"), "{code} {said}");
        let said = succeed(&env, &["resume"]).await;
        assert_eq!(said.lines().count(), 2, "{said}");
        wait_for_figure(&worker, "closing_paused{cause=\"operator\"}", |value| value == 0.0).await;
        worker.stop().await;
    });
}

#[test]
fn manual_close_is_refused_while_paused() {
    TestEnv::builder().without_broker().run(async |env| {
        let (order, other) = (env.order(Duration::ZERO).await, env.order(Duration::ZERO).await);
        succeed(&env, &["pause", "--why", WHY, "--kind", "order"]).await;
        let again = succeed(&env, &["pause", "--why", "another", "--kind", "order"]).await;
        assert!(again.contains("nothing changed") && again.contains(WHY), "{again}");
        let id = order.id.to_string();
        let (code, _, why) = call(&env, &["close", &id]).await;
        assert!(code == 1 && why.contains("--although-paused") && why.contains(WHY), "{why}");
        assert_eq!(env.status(&order).await, "unpaid");
        succeed(&env, &["close", &id, "--although-paused"]).await;
        assert_eq!((env.status(&order).await, env.status(&other).await), ("closed".into(), "unpaid".into()));
        let (code, _, why) = call(&env, &["pause", "--why", "x", "--kind", "unknown"]).await;
        assert!(code == 2 && why.contains("no kind \"unknown\""), "{why}");
        let said = succeed(&env, &["resume", "--kind", "order"]).await;
        assert!(said.starts_with("kind order: 1 order(s) are due") && said.lines().count() == 2, "{said}");
        assert_eq!(succeed(&env, &["resume"]).await, "nothing is paused\n");
    });
}

#[test]
fn manual_close_stops_when_paused_meanwhile() {
    let settings = |settings: &mut Settings| settings.database.lock_timeout = Duration::from_secs(4);
    TestEnv::builder().without_broker().settings(settings).run(async |env| {
        let orders = env.orders(3, Duration::ZERO).await;
        let ids: Vec<String> = orders.iter().map(|order| order.id.to_string()).collect();
        let mut stock = env.pool.begin().await.unwrap();
        sqlx::raw_sql("SELECT FROM stock FOR UPDATE").execute(&mut *stock).await.unwrap();
        let (settings, named) = (env.settings.clone(), ids.clone());
        let close =
            tokio::spawn(async move { call_with(&settings, &["close", &named[0], &named[1], &named[2]]).await });
        env.wait_for_lock_waiter().await;
        let pause = "INSERT INTO closing_pauses (cause, reason, paused_by) VALUES ('operator', $1, 'ann')";
        sqlx::query(pause).bind(WHY).execute(&env.pool).await.unwrap();
        stock.rollback().await.unwrap();
        let (code, said, why) = close.await.unwrap();
        assert!(code == 1 && said.starts_with(&format!("{}: closed\n", ids[0])), "{said}{why}");
        assert!(said.contains("stopped with 2 orders left and 1 closed") && said.contains(WHY), "{said}");
        assert_eq!(env.closed().await, 1);
    });
}

#[test]
fn closing_is_paused_over_http() {
    let file = NamedTempFile::new().unwrap();
    TestEnv::builder().settings(with_page(Some(&file))).run(async |env| {
        let worker = env.worker().await;
        let by = json!({ "who": "night shift", "why": WHY });
        for path in ["/api/v1/pauses", "/api/v1/pauses/resume"] {
            assert_eq!(api::post(&worker, path, "wrong", &by).await.status, 401, "{path}");
            for (bad, status, fix) in [
                (json!({ "who": "", "why": "x" }), 400, "who: it is empty"),
                (json!({ "kind": "unknown", "who": "a", "why": "b" }), 404, "no kind \"unknown\""),
            ] {
                let refused = api::post(&worker, path, TOKEN, &bad).await;
                assert!(refused.status == status && refused.problem().contains(fix), "{path} {refused:?}");
            }
        }
        let begun = api::post(&worker, "/api/v1/pauses", TOKEN, &by).await.json();
        assert_eq!((&begun["began"], &begun["pauses"][0]["paused_by"]), (&json!(true), &json!("night shift")));
        assert_eq!(api::post(&worker, "/api/v1/pauses", TOKEN, &by).await.json()["began"], false);
        wait_for_figure(&worker, "closing_paused{cause=\"operator\"}", |value| value == 1.0).await;
        let order = env.order(Duration::ZERO).await;
        wait_for("the verdict", async || {
            let page = api::get(&worker, "/").await.body;
            page.contains("Closing is paused: 1 overdue order waits") && page.contains(WHY)
        })
        .await;
        let status = api::get(&worker, "/api/v1/status").await.json();
        assert_eq!(status["paused"][0]["cause"], "operator", "{status}");
        assert_eq!(env.status(&order).await, "unpaid");

        let resumed = json!({ "kind": "order", "who": "day shift", "why": "x" });
        let still = api::post(&worker, "/api/v1/pauses/resume", TOKEN, &resumed).await.json();
        assert_eq!((&still["ended"], &still["still_paused"][0]["reason"]), (&json!([]), &json!(WHY)));
        let more = env.orders(25, Duration::ZERO).await;
        let resumed = json!({ "who": "day shift", "why": "they are back" });
        let refused = api::post(&worker, "/api/v1/pauses/resume", TOKEN, &resumed).await;
        assert!(refused.status == 409 && refused.problem().contains("26 order(s) are due"), "{refused:?}");
        assert_eq!(env.status(&more[0]).await, "unpaid");
        let resumed = json!({ "who": "day shift", "why": "they are back", "yes": true });
        let ended = api::post(&worker, "/api/v1/pauses/resume", TOKEN, &resumed).await.json();
        assert_eq!((&ended["ended"][0]["reason"], &ended["still_paused"]), (&json!(WHY), &json!([])));
        wait_for("the close", async || env.status(&order).await == "closed").await;
        let kept = api::get(&worker, "/api/v1/pauses").await.json();
        assert_eq!(kept["lasting"], json!([]));
        let ended = &kept["ended"][0];
        assert_eq!(
            (&ended["paused_by"], &ended["resumed_by"], &ended["resume_reason"]),
            (&json!("night shift"), &json!("day shift"), &json!("they are back"))
        );
        worker.stop().await;
    });
}

#[test]
fn page_pauses_and_resumes_after_login() {
    let file = NamedTempFile::new().unwrap();
    TestEnv::builder().settings(with_page(Some(&file))).run(async |env| {
        let worker = env.worker().await;
        let own = origin(&worker);
        let form = "kind=&why=%3Cb%3Eno+callbacks";
        for path in ["/pauses", "/pauses/resume"] {
            assert_eq!(submit(&worker, path, &own, "", form).await.status, 401, "no login");
        }
        let cookie = log_in(&worker).await;
        assert_eq!(submit(&worker, "/pauses", "http://evil.example", &cookie, form).await.status, 403);
        assert_eq!(submit(&worker, "/pauses", &own, &cookie, "kind=&why=+").await.status, 400, "why is empty");
        assert_eq!(env.count("SELECT count(*) FROM closing_pauses").await, 0);
        let paused = submit(&worker, "/pauses", &own, &cookie, form).await;
        assert_eq!(paused.header("location"), Some("/pauses?began=true"), "{paused:?}");
        let page = api::ask(worker.http.unwrap(), "GET", "/pauses", &[("Cookie", &cookie)], "").await.body;
        assert!(page.contains("&lt;b&gt;no callbacks") && page.contains("operator: night &lt;shift&gt;"), "{page}");
        assert!(page.contains("action=\"/pauses/resume\"") && !page.contains("name=\"yes\""), "{page}");
        wait_for_figure(&worker, "closing_paused{cause=\"operator\"}", |value| value == 1.0).await;
        env.orders(21, Duration::ZERO).await;
        let page = api::ask(worker.http.unwrap(), "GET", "/pauses", &[("Cookie", &cookie)], "").await.body;
        assert!(page.contains("Kind order: 21 order(s) are due") && page.contains("name=\"yes\""), "{page}");
        let form = "kind=&why=they+are+back";
        assert_eq!(submit(&worker, "/pauses/resume", &own, &cookie, form).await.status, 409, "not confirmed");
        let resumed = submit(&worker, "/pauses/resume", &own, &cookie, &format!("{form}&yes=true")).await;
        assert_eq!(resumed.header("location"), Some("/pauses?ended=1&left=0"), "{resumed:?}");
        let kept = "SELECT count(*) FROM closing_pauses
                    WHERE resumed_by = 'night <shift>' AND resume_reason = 'they are back'";
        assert_eq!(env.count(kept).await, 1);
        worker.stop().await;
    });
}
