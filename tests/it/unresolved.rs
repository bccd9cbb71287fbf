//! Orders that a provider's answers could not decide: listed by API and page, and asked about again with the token, which
//! is written down.

use std::time::Duration;

use order_timeout_testkit::page::{TOKEN, with_page};
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{Order, TestEnv, wait_for};
use serde_json::json;
use tempfile::NamedTempFile;

use crate::api::{ask, get, post};
use crate::page::{log_in, origin, submit};

/// An order that is unresolved for this reason.
async fn unresolved(env: &TestEnv, reason: &str) -> Order {
    let order = env.order(Duration::from_secs(3_600)).await;
    let sql = "WITH o AS (UPDATE orders SET status = 'closing' WHERE id = $1)
               INSERT INTO close_attempts (order_id, claimed_by, queue, step, rounds, last_answers,
                                           unresolved_reason, unresolved_at)
               VALUES ($1::text, 'alarm', 'card', 'unresolved', 3, 'card <b> ask: unknown', $2, clock_timestamp())";
    sqlx::query(sql).bind(order.id).bind(reason).execute(&env.pool).await.unwrap();
    order
}

const WAITING: &str = "SELECT count(*) FROM close_attempts WHERE unresolved_at IS NOT NULL";

/// While a payment provider does not answer, its orders are due and not closed, and no other figure shows them.
#[test]
fn orders_without_answer_are_shown() {
    TestEnv::builder().settings(with_page(None)).run(async |env| {
        for step in ["no_answer", "no_answer", "claimed"] {
            let order = env.order(Duration::from_secs(3_600)).await;
            let sql = "WITH o AS (UPDATE orders SET status = 'closing' WHERE id = $1)
                       INSERT INTO close_attempts (order_id, claimed_by, claimed_at, queue, step, next_attempt_at)
                       VALUES ($1::text, 'alarm', now() - interval '65 s', 'card', $2, now() + interval '1 hour')";
            sqlx::query(sql).bind(order.id).bind(step).execute(&env.pool).await.unwrap();
        }
        let worker = env.worker().await;
        let at = get(&worker, "/api/v1/status").await.json()["at_providers"].clone();
        assert_eq!(
            (&at[0]["provider"], &at[0]["orders"], &at[0]["without_answer"]),
            (&json!("card"), &json!(3), &json!(2))
        );
        let said = "2 orders wait because their payment provider gives no answer, the oldest for 1m";
        wait_for("the verdict", async || get(&worker, "/").await.body.contains(said)).await;
        let (code, text, _) = call_with(&env.settings, &["status"]).await;
        assert_eq!(code, 0);
        assert!(text.contains("3 asked about at card, 2 without an answer, the oldest for 1m"), "{text}");
        worker.stop().await;
    });
}

#[test]
fn unresolved_orders_are_retried_over_http() {
    let file = NamedTempFile::new().unwrap();
    TestEnv::builder().settings(with_page(Some(&file))).run(async |env| {
        let mut orders = Vec::new();
        for reason in ["no_answer", "no_answer", "refunded"] {
            orders.push(unresolved(&env, reason).await.id.to_string());
        }
        let worker = env.worker().await;
        let status = get(&worker, "/api/v1/status").await.json();
        assert_eq!(status["unresolved"][0]["orders"], 2, "{status}");
        let first = get(&worker, "/api/v1/unresolved?limit=2").await.json();
        assert_eq!((&first["rows"][0]["order_id"], &first["next"]), (&json!(orders[0]), &json!(orders[1])));
        let next = get(&worker, &format!("/api/v1/unresolved?limit=2&after={}", orders[1])).await.json();
        assert_eq!((&next["rows"][0]["reason"], next.get("next")), (&json!("refunded"), None));

        let path = "/api/v1/unresolved/retry";
        let all = json!({ "all": true, "who": "night shift", "why": "the provider is back" });
        assert_eq!(post(&worker, path, "wrong", &all).await.status, 401);
        let both = json!({ "all": true, "reason": "refunded", "who": "a", "why": "b" });
        assert!(post(&worker, path, TOKEN, &both).await.problem().contains("exactly one of"));
        assert_eq!(env.count(WAITING).await, 3);
        let of_reason = json!({ "reason": "refunded", "who": "night shift", "why": "the provider is back" });
        assert_eq!(post(&worker, path, TOKEN, &of_reason).await.json(), json!({ "retried": [orders[2]] }));
        let recorded = "SELECT count(*) FROM close_attempts WHERE who = 'night shift' AND why = 'the provider is back'";
        assert_eq!(env.count(recorded).await, 1);

        let own = origin(&worker);
        let form = format!("id={}&why=rule+7", orders[0]);
        assert_eq!(submit(&worker, "/unresolved/retry", &own, "", &form).await.status, 401, "no login");
        let cookie = log_in(&worker).await;
        let link = "href=\"/unresolved\">2 unresolved orders</a>";
        wait_for("the count", async || get(&worker, "/").await.body.contains(link)).await;
        let page = ask(worker.http.unwrap(), "GET", "/unresolved", &[("Cookie", &cookie)], "").await.body;
        for part in ["card &lt;b&gt; ask: unknown", "check that the provider answers", &orders[1]] {
            assert!(page.contains(part), "lacks {part}: {page}");
        }
        let retried = submit(&worker, "/unresolved/retry", &own, &cookie, &form).await;
        assert_eq!(retried.header("location"), Some("/unresolved?retried=1"), "{retried:?}");
        assert_eq!(env.count(WAITING).await, 1);
        worker.stop().await;
    });
}
