//! Seven shops with a payment provider, from configuration alone: 300 orders fall due at once, three in ten are paid at
//! the provider while they close, half of the callbacks are lost, and the provider fails for some orders at first.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use order_timeout::operations::orders_statements;
use order_timeout::postgres::{Database, kind_functions};
use order_timeout_core::kind::Kind;
use order_timeout_testkit::payment_service::{Fault, PaymentService, Truth, wide_limits};
use order_timeout_testkit::{TestEnv, wait_for};
use sqlx::AssertSqlSafe;

use super::{execute, map, text};
use crate::providers::adjust;

/// Each order has an attempt with its id as the reference, to pay what an order of the shop with prices costs.
const BEGIN: &str = "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
                     SELECT 'card', id, id, 4990, 'CNY' FROM unnest($1::text[]) AS o (id)";

const CALLBACK: &str = "SELECT outcome FROM payment_received($1, 'card', $2, $3, 'CNY')";

/// Ids and states of all orders.
async fn states(env: &TestEnv, shop: &str) -> Vec<(String, String)> {
    let select = format!("SELECT s.id, s.state FROM ({}) AS s (id, state, deadline)", text(shop, "state.sql"));
    sqlx::query_as(AssertSqlSafe(select)).fetch_all(&env.pool).await.unwrap()
}

async fn callback(env: &TestEnv, order: &str, reference: &str, amount_minor: i64) -> String {
    let report = sqlx::query_scalar(CALLBACK).bind(order).bind(reference).bind(amount_minor);
    report.fetch_one(&env.pool).await.unwrap()
}

/// Customers pay around the deadline; each second callback is lost.
async fn customers_pay(env: Arc<TestEnv>, service: Arc<PaymentService>, ids: Vec<String>) {
    for (number, id) in ids.into_iter().enumerate() {
        tokio::time::sleep(Duration::from_millis(25)).await;
        if service.pay(&id) && number % 2 == 0 {
            let _outcome = callback(&env, &id, &id, 4_990).await;
        }
    }
}

async fn prepare(env: &TestEnv, shop: &str) {
    execute(env, &text(shop, "schema.sql")).await;
    let database = Database::connect(&env.settings.database, 2).await.unwrap();
    let statements = orders_statements::statements(&database, &env.settings, &Kind::ORDER).await.unwrap();
    kind_functions::install(&database, &statements.functions).await.unwrap();
}

/// `pay`: what a paid order's row says, where the shop's file does not.
fn asks_provider(shop: &'static str, pay: Option<(&'static str, &'static str)>) {
    let service = Arc::new(PaymentService::start());
    TestEnv::builder()
        .settings(|settings| {
            map(settings, shop);
            let table = settings.kinds.get_mut(&Kind::ORDER).and_then(|kind| kind.table.as_mut()).unwrap();
            table.pay = pay.map(|(column, word)| [(column.to_owned(), word.to_owned())].into()).or(table.pay.take());
            adjust(settings);
            settings.closing.max_rounds = 1_000;
            service.join(settings, "card", wide_limits());
        })
        .run(async move |env| {
            prepare(&env, shop).await;
            execute(&env, &text(shop, "orders.sql")).await;
            let ids: Vec<String> = states(&env, shop).await.into_iter().map(|(id, _)| id).collect();
            sqlx::query(BEGIN).bind(&ids).execute(&env.pool).await.unwrap();
            let failing: Vec<&String> = ids.iter().step_by(10).collect();
            failing.iter().for_each(|id| service.fail(id, Some(Fault::Error)));
            // A part is reported for some; only three shops say what an order costs, in the others it pays the order.
            if ["mall", "spree", "booking"].contains(&shop) {
                for id in ids.iter().skip(5).step_by(10) {
                    assert_eq!(callback(&env, id, &format!("part {id}"), 1_000).await, "partial");
                }
            }
            let to_pay = ids.iter().enumerate().filter(|(place, _)| [0, 3, 5].contains(&(place % 10)));
            let to_pay = to_pay.map(|(_, id)| id.clone()).collect();
            let worker = env.worker().await;
            let paying = tokio::spawn(customers_pay(env.clone(), service.clone(), to_pay));
            wait_for("some closes", async || {
                states(&env, shop).await.iter().filter(|(_, state)| state == "closed").count() > 50
            })
            .await;
            failing.iter().for_each(|id| service.fail(id, None));
            paying.await.unwrap();
            wait_for("the end of all orders", async || {
                let is_open = states(&env, shop).await.iter().any(|(_, state)| state == "open");
                !is_open && env.count("SELECT count(*) FROM close_attempts").await == 0
            })
            .await;
            worker.stop().await;
            assert_ends(&env, shop, &service).await;
        });
}

/// An order is paid if its money is at the provider, and closed otherwise; each closed one was announced once; money and the
/// shop's books balance.
async fn assert_ends(env: &TestEnv, shop: &str, service: &PaymentService) {
    let (mut paid, mut closed) = (BTreeSet::new(), BTreeSet::new());
    for (id, state) in states(env, shop).await {
        assert_eq!(state == "paid", service.truth(&id) == Truth::Paid, "{shop}: {id} is {state}");
        if state == "paid" {
            paid.insert(id)
        } else {
            closed.insert(id)
        };
    }
    assert!(paid.len() > 10 && closed.len() >= 210, "{shop}: {} paid, {} closed", paid.len(), closed.len());
    let announced: Vec<String> =
        sqlx::query_scalar("SELECT payload ->> 'order_id' FROM event_outbox WHERE type = 'order.closed.v1' ORDER BY 1")
            .fetch_all(&env.pool)
            .await
            .unwrap();
    assert_eq!(announced.len(), closed.len(), "{shop}: once each");
    assert_eq!(announced.into_iter().collect::<BTreeSet<_>>(), closed, "{shop}");
    let unbalanced = "SELECT count(*) FROM received_payments p
        WHERE p.amount_minor <> p.counted_minor + (SELECT coalesce(sum(l.amount_minor), 0) FROM late_payments l
              WHERE l.provider = p.provider AND l.reference = p.reference AND l.state = 'open')";
    assert_eq!(env.count(unbalanced).await, 0, "{shop}");
    let counted: Vec<String> =
        sqlx::query_scalar("SELECT DISTINCT order_id FROM received_payments WHERE counted_minor > 0")
            .fetch_all(&env.pool)
            .await
            .unwrap();
    assert_eq!(counted.into_iter().collect::<BTreeSet<_>>(), paid, "{shop}: money counts for paid orders alone");
    let odd: Vec<String> =
        sqlx::query_scalar(AssertSqlSafe(text(shop, "books.sql"))).fetch_all(&env.pool).await.unwrap();
    assert_eq!(odd, Vec::<String>::new(), "{shop}");
    assert_eq!(env.parked().await, []);
}

#[test]
fn mall_shop_asks_its_provider() {
    asks_provider("mall", Some(("status", "1")));
}

#[test]
fn ticket_shop_asks_its_provider() {
    asks_provider("ticketing", Some(("status", "p")));
}

#[test]
fn headless_shop_asks_its_provider() {
    asks_provider("headless", Some(("payment_state", "paid")));
}

#[test]
fn shop_of_tenants_asks_its_provider() {
    asks_provider("tenants", Some(("state", "paid")));
}

#[test]
fn partitioned_shop_asks_its_provider() {
    asks_provider("partitioned", Some(("status", "paid")));
}

#[test]
fn spree_shop_asks_its_provider() {
    asks_provider("spree", None);
}

#[test]
fn booking_shop_asks_its_provider() {
    asks_provider("booking", None);
}
