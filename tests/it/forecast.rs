//! `forecast` counts what falls due and lists it, for the default tables and for a table of the shop's own, of
//! which neither invents what its statements do not tell.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use order_timeout::Settings;
use order_timeout_testkit::TestEnv;
use order_timeout_testkit::process::call_with;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Executor};

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

async fn ask(settings: &Settings, arguments: &[&str]) -> Value {
    let (code, stdout, stderr) = call_with(settings, &[arguments, &["--json"]].concat()).await;
    assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}: {stdout}");
    serde_json::from_str(&stdout).unwrap()
}

async fn execute(env: &TestEnv, sql: &str) {
    env.pool.execute(sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))).await.unwrap();
}

fn own_statements(env: &TestEnv) -> Settings {
    let path = |file: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join(file).to_str().unwrap().to_owned();
    let mut settings = env.settings.clone();
    (settings.orders.close_sql, settings.orders.overdue_sql) =
        (path("tests/fixtures/mapping/default_close.sql"), path("tests/fixtures/mapping/default_overdue.sql"));
    settings
}

fn ids(page: &Value) -> Vec<String> {
    page["orders"].as_array().unwrap().iter().map(|order| order["order_id"].as_str().unwrap().to_owned()).collect()
}

/// Every page of an answer, as ids.
async fn all_pages(settings: &Settings, arguments: &[&str]) -> Vec<String> {
    let mut page = ask(settings, arguments).await;
    let window = |page: &Value, key: &str| page[key].as_str().unwrap().to_owned();
    let (from, until) = (window(&page, "from"), window(&page, "until"));
    let mut found = ids(&page);
    while let Some(next) = page.get("next").map(|next| next.as_str().unwrap().to_owned()) {
        let rest: Vec<&str> = arguments.iter().copied().filter(|one| !one.starts_with("--next")).collect();
        let arguments = [&rest[..], &["--from", &from, "--until", &until, "--after", &next]].concat();
        page = ask(settings, &arguments).await;
        found.extend(ids(&page));
    }
    found
}

#[test]
fn listed_pages_are_complete_and_sorted() {
    TestEnv::builder().run(async |env| {
        // Many of one deadline: a page ends in the middle of them.
        execute(
            &env,
            "INSERT INTO orders (id, expires_at)
             SELECT gen_random_uuid(), date_trunc('minute', now()) + interval '10 minutes' FROM generate_series(1, 7)",
        )
        .await;
        let mut soon = env.orders(3, 5 * MINUTE).await;
        soon.sort_by_key(|order| (order.deadline, order.id));
        env.orders(2, 3 * 60 * MINUTE).await;
        env.orders(2, Duration::ZERO).await;
        assert!(env.pay(&env.order(5 * MINUTE).await).await);
        for settings in [env.settings.clone(), own_statements(&env)] {
            let found = all_pages(&settings, &["forecast", "--orders", "--next=1h", "--limit", "3"]).await;
            assert_eq!(found.iter().collect::<BTreeSet<_>>().len(), 10, "{found:?}");
            assert_eq!(found[..3], soon.iter().map(|order| order.id.to_string()).collect::<Vec<_>>());
            assert_eq!(found.len(), 10);
            let overdue =
                ask(&settings, &["forecast", "--orders", "--from", "2000-01-01T00:00:00Z", "--limit", "1000"]).await;
            assert_eq!(ids(&overdue).len(), 0, "its window ends six hours after its beginning");
            let all = ["forecast", "--orders", "--from", "2000-01-01T00:00:00Z", "--until", "2100-01-01T00:00:00Z"];
            assert_eq!(ids(&ask(&settings, &all).await).len(), 14);
        }
    });
}

#[test]
fn list_finds_ids_and_articles() {
    TestEnv::builder().run(async |env| {
        env.stock("Sale-Shoe", 10).await;
        let (shoe, other) = (&env.orders_of("Sale-Shoe", 1, MINUTE).await[0], env.order(MINUTE).await);
        execute(&env, "UPDATE orders SET amount_minor = 4999, currency = 'EUR'").await;
        let found = ask(&env.settings, &["forecast", "--orders", "--text", "sale-"]).await;
        assert_eq!(ids(&found), [shoe.id.to_string()]);
        assert_eq!(found["orders"][0]["money"], json!({ "currency": "EUR", "amount_minor": 4_999 }));
        assert_eq!((&found["orders"][0]["units"], &found["not_known"]), (&json!(1), &json!([])));
        let part = &other.id.to_string().to_uppercase()[24..];
        assert_eq!(ids(&ask(&env.settings, &["forecast", "--orders", "--text", part]).await), [other.id.to_string()]);

        let own = ask(&own_statements(&env), &["forecast", "--orders", "--text", part]).await;
        assert_eq!(ids(&own), [other.id.to_string()]);
        assert!(own["orders"][0].get("money").is_none() && own["orders"][0].get("units").is_none(), "{own}");
        assert_eq!(own["not_known"][0]["what"], "money");

        let (_, text, _) = call_with(&env.settings, &["forecast", "--orders", "--limit", "1"]).await;
        assert!(text.contains("49.99 EUR       1\n") && text.contains("1 shown; there may be more"), "{text}");
        for (arguments, fix) in [
            (&["--after", "17"][..], "`next` of the page before"),
            (&["--until", "2000-01-01T00:00:00Z"], "give a later end"),
        ] {
            let (code, _, stderr) = call_with(&env.settings, &[&["forecast", "--orders"], arguments].concat()).await;
            assert!(code == 2 && stderr.contains(fix) && stderr.lines().count() == 1, "{stderr}");
        }
    });
}

#[test]
fn forecast_counts_orders_money_and_stock() {
    TestEnv::builder().run(async |env| {
        env.orders(3, 90 * SECOND).await;
        execute(&env, "UPDATE orders SET amount_minor = 1000, currency = 'EUR'").await;
        env.orders(2, 90 * MINUTE).await;
        env.orders(1, 8 * 60 * MINUTE).await;
        env.orders(4, Duration::ZERO).await;
        let found = ask(&env.settings, &["forecast"]).await;
        let total = &found["total"];
        assert_eq!((&total["orders"], &total["units"], &total["without_amount"]), (&json!(5), &json!(5), &json!(2)));
        assert_eq!(total["money"], json!([{ "currency": "EUR", "amount_minor": 3_000 }]));
        assert_eq!((&found["overdue"], &found["not_known"]), (&json!(4), &json!([])));
        let minutes = found["minutes"].as_array().unwrap();
        let orders: u64 = minutes.iter().map(|minute| minute["orders"].as_u64().unwrap()).sum();
        assert!(orders == 5 && (2..=3).contains(&minutes.len()), "{found:#}");
        assert!(minutes[0]["number"].as_u64().unwrap() <= 2, "{found:#}");
        assert_eq!(found["can_close"]["basis"], "benchmark");
        assert_eq!(found["outlook"]["is_on_time"], true);
        let (_, text, _) = call_with(&env.settings, &["forecast", "--next", "2h"]).await;
        for part in ["5 orders, 30.00 EUR, 2 without an amount, 5 units of stock", "overdue already: 4", "on time: "] {
            assert!(text.contains(part), "lacks {part:?}: {text}");
        }
        for reach in ["10s", "8d"] {
            let (code, _, stderr) = call_with(&env.settings, &["forecast", "--next", reach]).await;
            assert!(code == 2 && stderr.contains("ask for 1m to 7d"), "{stderr}");
        }
    });
}

#[test]
fn forecast_measures_close_rate_while_late() {
    TestEnv::builder().run(async |env| {
        // As 300 closes in one second, two seconds late; and as ten that waited for a lock.
        execute(
            &env,
            "INSERT INTO event_outbox (routing_key, type, payload, sent_at)
             SELECT 'order.closed', 'order.closed.v1',
                    jsonb_build_object('closed_at', now() - interval '1 minute' * (1 + n / 300),
                                       'deadline', now() - interval '1 minute' * (1 + n / 300) - interval '2 seconds'),
                    now() - interval '1 minute'
             FROM generate_series(0, 309) n",
        )
        .await;
        env.orders(600 * 60, 2 * MINUTE).await;
        let found = ask(&env.settings, &["forecast"]).await;
        assert_eq!(
            (&found["can_close"]["per_minute"], &found["can_close"]["basis"]),
            (&json!(18_000), &json!("measured"))
        );
        assert_eq!(
            (&found["outlook"]["is_on_time"], &found["outlook"]["most_waiting"]),
            (&json!(false), &json!(18_000))
        );
        assert_eq!(found["outlook"]["longest_wait_s"], 60);
        let (_, text, _) = call_with(&env.settings, &["forecast"]).await;
        assert!(text.contains("not on time: about 18000 orders wait at "), "{text}");
    });
}

#[test]
fn forecast_invents_nothing_about_own_tables() {
    TestEnv::builder().run(async |env| {
        env.orders(2_500, 5 * MINUTE).await;
        env.orders(3, Duration::ZERO).await;
        let found = ask(&own_statements(&env), &["forecast", "--next", "10m"]).await;
        assert_eq!((&found["total"]["orders"], &found["overdue"]), (&json!(2_500), &json!(3)));
        assert!(found["total"].get("units").is_none(), "{found:#}");
        assert_eq!(found["total"]["money"], json!([]));
        let unknown: Vec<_> = found["not_known"].as_array().unwrap().iter().map(|one| &one["what"]).collect();
        assert_eq!(unknown, ["money", "stock"]);
    });
}
