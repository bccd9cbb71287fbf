//! What operators ask about a mapped table: the forecast and the list of what falls due, with money and stock as far as the
//! mapping says.

use order_timeout::Settings;
use order_timeout_testkit::TestEnv;
use order_timeout_testkit::process::call_with;
use serde_json::{Value, json};

use super::{execute, map, text};

/// The answer of a command, as JSON.
async fn ask(settings: &Settings, arguments: &[&str]) -> Value {
    let (code, stdout, stderr) = call_with(settings, &[arguments, &["--json"]].concat()).await;
    assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}: {stdout}");
    serde_json::from_str(&stdout).unwrap()
}

/// Creates a shop whose 300 orders fall due at this moment.
async fn open_shop(env: &TestEnv, shop: &str, postpone: &str) {
    for file in ["schema.sql", "orders.sql"] {
        execute(env, &text(shop, file)).await;
    }
    execute(env, postpone).await;
}

/// Every page of the list, and how many there were.
async fn listed(settings: &Settings, text: &str) -> Vec<Value> {
    let page = ["forecast", "--orders", "--next=1h", "--limit=70", "--text", text];
    let mut found = ask(settings, &page).await;
    let window = ["from", "until"].map(|end| found[end].as_str().unwrap().to_owned());
    let mut orders = found["orders"].as_array().unwrap().clone();
    while let Some(next) = found["next"].as_str().map(str::to_owned) {
        let again = ["forecast", "--orders", "--limit=70", "--text", text, "--from", &window[0], "--until", &window[1]];
        found = ask(settings, &[&again[..], &["--after", &next]].concat()).await;
        orders.extend(found["orders"].as_array().unwrap().clone());
    }
    orders
}

#[test]
fn mapped_money_and_stock_are_foreseen() {
    TestEnv::builder().without_broker().run(async |env| {
        let mut settings = env.settings.clone();
        map(&mut settings, "mall");
        open_shop(&env, "mall", "UPDATE public.oms_order SET create_time = create_time + interval '20 minutes'").await;
        execute(&env, "UPDATE public.oms_order SET status = 1 WHERE id % 3 = 0").await;
        let (orders, units): (i64, i64) = sqlx::query_as(
            "SELECT count(DISTINCT o.id), sum(i.product_quantity)::bigint
             FROM public.oms_order o JOIN public.oms_order_item i ON i.order_id = o.id WHERE o.status = 0",
        )
        .fetch_one(&env.pool)
        .await
        .unwrap();
        let found = ask(&settings, &["forecast"]).await;
        let total = &found["total"];
        assert_eq!(
            (&total["orders"], &total["units"], &total["without_amount"]),
            (&json!(orders), &json!(units), &json!(0))
        );
        assert_eq!(total["money"], json!([{ "currency": "CNY", "amount_minor": orders * 4_990 }]));
        assert_eq!((&found["overdue"], &found["not_known"]), (&json!(0), &json!([])));

        let all = listed(&settings, "").await;
        assert_eq!(all.len() as i64, orders);
        assert_eq!(all[0]["money"], json!({ "currency": "CNY", "amount_minor": 4_990 }));
        let id = all[7]["order_id"].as_str().unwrap();
        assert_eq!(listed(&settings, &id[10..]).await, [all[7].clone()]);
        // The id of an article.
        let with_article: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM public.oms_order o WHERE status = 0 AND (o.id::text LIKE '%7%' OR EXISTS (
                 SELECT FROM public.oms_order_item i WHERE i.order_id = o.id AND i.product_sku_id::text LIKE '%7%'))",
        )
        .fetch_one(&env.pool)
        .await
        .unwrap();
        assert_eq!(listed(&settings, "7").await.len() as i64, with_article);

        execute(&env, "UPDATE public.oms_order SET create_time = create_time - interval '2 hours'").await;
        let found = ask(&settings, &["status"]).await;
        assert_eq!(found["kinds"][0]["overdue"]["orders"], json!(orders), "{found:#}");
    });
}

#[test]
fn unmapped_money_is_not_known() {
    TestEnv::builder().without_broker().run(async |env| {
        let mut settings = env.settings.clone();
        map(&mut settings, "tenants");
        let later = "UPDATE platform.orders SET created_at = created_at + interval '40 minutes'";
        open_shop(&env, "tenants", later).await;
        let found = ask(&settings, &["forecast"]).await;
        assert!(found["total"]["units"].as_i64().is_some_and(|units| units > 0), "{found:#}");
        assert_eq!((&found["total"]["money"], found["not_known"].as_array().unwrap().len()), (&json!([]), 1));
        let why = found["not_known"][0]["why"].as_str().unwrap();
        assert!(why.starts_with("kinds.order.table.amount is not given; "), "{why}");
        let all = listed(&settings, "").await;
        assert_eq!(json!(all.len()), found["total"]["orders"]);
        assert!(all.iter().all(|order| order["units"].as_i64().is_some() && order.get("money").is_none()), "{all:?}");
    });
}
