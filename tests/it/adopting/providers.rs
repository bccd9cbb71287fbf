//! Seven shops with a payment provider, from configuration alone: 300 orders fall due at once, three in ten are paid at
//! the provider while they close, half of the callbacks are lost, and the provider fails for some orders at first. Then late
//! money reopens closed orders of four of them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use order_timeout::config::kinds::TableSettings;
use order_timeout::operations::{late_payments, orders_statements};
use order_timeout::postgres::{Database, Operator, kind_functions};
use order_timeout_core::kind::Kind;
use order_timeout_testkit::payment_service::{Fault, PaymentService, Truth, wide_limits};
use order_timeout_testkit::{TestEnv, wait_for};
use sqlx::AssertSqlSafe;
use uuid::Uuid;

use super::{execute, map, text};
use crate::providers::adjust;

/// Each order has an attempt with its id as the reference, to pay what an order of the shop with prices costs.
const BEGIN: &str = "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
                     SELECT 'card', id, id, 4990, 'CNY' FROM unnest($1::text[]) AS o (id)";

/// The same in the shop's own table of attempts.
const BEGIN_SPREE: &str =
    "INSERT INTO spree.payments (order_id, number) SELECT id::bigint, id FROM unnest($1::text[]) AS o (id)";

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

/// How late money reopens orders of a shop, where the shop's file does not say it, and which it reopens.
#[derive(Default)]
struct Reopening {
    /// What the mapping has besides.
    mapping: Option<fn(&mut TableSettings)>,
    /// What is done to the shop's tables, before and after there are orders.
    schema: &'static str,
    orders: &'static str,
    /// Closed orders; without it, any.
    closed: Option<&'static str>,
}

/// What is taken again and is left, of the first stock; and what a reopened order's row gets.
fn reopen(table: &mut TableSettings, (column, take): (&str, &str), left: &str, row: &[(&str, &str)]) {
    let stock = &mut table.stock[0];
    stock.take = [(column.to_owned(), take.to_owned())].into();
    stock.left = Some(left.to_owned());
    table.reopen = Some(row.iter().map(|(column, value)| ((*column).to_owned(), (*value).to_owned())).collect());
}

/// Its `also` gives coupons and points back, which a reopened order would not take again.
const MALL: Reopening = Reopening {
    mapping: Some(|table| reopen(table, ("lock_stock", "lock_stock + quantity"), "stock - lock_stock", &[])),
    schema: "",
    orders: "",
    closed: Some("SELECT id::text FROM public.oms_order WHERE status = 4 AND id % 4 <> 0 AND use_integration = 0"),
};

/// Its `also` deletes reservations: what an order reserves again is in its lines, and a trigger writes the reservations anew.
const HEADLESS: Reopening = Reopening {
    mapping: Some(|table| {
        let left = "stocked_quantity - reserved_quantity";
        reopen(table, ("reserved_quantity", "reserved_quantity + item.quantity"), left, &[("canceledAt", "null")]);
        table.stock[0].items = "medusa.line_item".into();
    }),
    schema: "CREATE TABLE medusa.line_item (order_id text, inventory_item_id text, location_id text, quantity numeric);
        CREATE INDEX line_item_order ON medusa.line_item (order_id);
        CREATE FUNCTION medusa.reserve_again() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO medusa.reservation_item
            SELECT 'again_' || l.order_id || l.inventory_item_id, l.* FROM medusa.line_item l WHERE l.order_id = NEW.id;
            RETURN NULL;
        END $$;
        CREATE TRIGGER reserve_again AFTER UPDATE ON medusa.\"order\" FOR EACH ROW
            WHEN (OLD.payment_state = 'void' AND NEW.payment_state = 'paid') EXECUTE FUNCTION medusa.reserve_again()",
    orders: "INSERT INTO medusa.line_item
        SELECT order_id, inventory_item_id, location_id, quantity FROM medusa.reservation_item",
    closed: None,
};

const TENANTS: Reopening = Reopening {
    mapping: Some(|table| {
        reopen(table, ("reserved", "reserved + quantity"), "10000 - reserved", &[("closed_at", "null")])
    }),
    schema: "",
    orders: "",
    closed: None,
};

async fn prepare(env: &TestEnv, shop: &str, further: &str) {
    execute(env, &text(shop, "schema.sql")).await;
    execute(env, further).await;
    let database = Database::connect(&env.settings.database, 2).await.unwrap();
    let statements = orders_statements::statements(&database, &env.settings, &Kind::ORDER).await.unwrap();
    kind_functions::install(&database, &statements.functions).await.unwrap();
}

/// `pay`: what a paid order's row says, where the shop's file does not.
fn asks_provider(shop: &'static str, pay: Option<(&'static str, &'static str)>, reopening: Reopening) {
    let service = Arc::new(PaymentService::start());
    TestEnv::builder()
        .settings(|settings| {
            map(settings, shop);
            let table = settings.kinds.get_mut(&Kind::ORDER).and_then(|kind| kind.table.as_mut()).unwrap();
            table.pay = pay.map(|(column, word)| [(column.to_owned(), word.to_owned())].into()).or(table.pay.take());
            if let Some(change) = reopening.mapping {
                change(table);
            }
            adjust(settings);
            settings.closing.max_rounds = 1_000;
            service.join(settings, "card", wide_limits());
        })
        .run(async move |env| {
            prepare(&env, shop, reopening.schema).await;
            execute(&env, &text(shop, "orders.sql")).await;
            execute(&env, reopening.orders).await;
            let ids: Vec<String> = states(&env, shop).await.into_iter().map(|(id, _)| id).collect();
            let begin = if shop == "spree" { BEGIN_SPREE } else { BEGIN };
            sqlx::query(begin).bind(&ids).execute(&env.pool).await.unwrap();
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
            if env.settings.table_of(&Kind::ORDER).is_some_and(|table| table.reopen.is_some()) {
                late_money_reopens(&env, shop, reopening.closed).await;
            }
        });
}

/// Ten closed orders are paid late, reopened, and then as any paid order.
async fn late_money_reopens(env: &TestEnv, shop: &str, closed: Option<&'static str>) {
    let mut ids: Vec<String> = match closed {
        Some(closed) => sqlx::query_scalar(closed).fetch_all(&env.pool).await.unwrap(),
        None => states(env, shop).await.into_iter().filter(|(_, state)| state == "closed").map(|(id, _)| id).collect(),
    };
    ids.truncate(10);
    for id in &ids {
        assert_eq!(callback(env, id, &format!("late {id}"), 5_000).await, "late");
    }
    let late = "SELECT id FROM late_payments WHERE reference LIKE 'late %' AND state = 'open' ORDER BY id";
    let pieces: Vec<i64> = sqlx::query_scalar(late).fetch_all(&env.pool).await.unwrap();
    assert_eq!(pieces.len(), 10);
    let database = Database::connect(&env.settings.database, 1).await.unwrap();
    let operator = Operator { who: "ann".into(), why: None, run: Uuid::now_v7() };
    for piece in pieces {
        late_payments::reopen(&database, &env.settings, piece, &operator).await.unwrap();
    }
    let all = states(env, shop).await;
    assert!(ids.iter().all(|id| all.contains(&(id.clone(), "paid".to_owned()))), "{shop}: {ids:?}");
    assert_eq!(env.count("SELECT count(*) FROM event_outbox WHERE type = 'order.reopened.v1'").await, 10);
    assert_balances(env, shop).await;
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
    let counted: Vec<String> =
        sqlx::query_scalar("SELECT DISTINCT order_id FROM received_payments WHERE counted_minor > 0")
            .fetch_all(&env.pool)
            .await
            .unwrap();
    assert_eq!(counted.into_iter().collect::<BTreeSet<_>>(), paid, "{shop}: money counts for paid orders alone");
    assert_balances(env, shop).await;
    assert_eq!(env.parked().await, []);
}

/// All money counts or is late, and the shop's books balance.
async fn assert_balances(env: &TestEnv, shop: &str) {
    let unbalanced = "SELECT count(*) FROM received_payments p
        WHERE p.amount_minor <> p.counted_minor + (SELECT coalesce(sum(l.amount_minor), 0) FROM late_payments l
              WHERE l.provider = p.provider AND l.reference = p.reference AND l.state = 'open')";
    assert_eq!(env.count(unbalanced).await, 0, "{shop}");
    let odd: Vec<String> =
        sqlx::query_scalar(AssertSqlSafe(text(shop, "books.sql"))).fetch_all(&env.pool).await.unwrap();
    assert_eq!(odd, Vec::<String>::new(), "{shop}");
}

#[test]
fn mall_shop_asks_its_provider() {
    asks_provider("mall", Some(("status", "1")), MALL);
}

#[test]
fn ticket_shop_asks_its_provider() {
    asks_provider("ticketing", Some(("status", "p")), Reopening::default());
}

#[test]
fn headless_shop_asks_its_provider() {
    asks_provider("headless", Some(("payment_state", "paid")), HEADLESS);
}

#[test]
fn shop_of_tenants_asks_its_provider() {
    asks_provider("tenants", Some(("state", "paid")), TENANTS);
}

#[test]
fn partitioned_shop_asks_its_provider() {
    asks_provider("partitioned", Some(("status", "paid")), Reopening::default());
}

#[test]
fn spree_shop_asks_its_provider() {
    asks_provider("spree", None, Reopening::default());
}

#[test]
fn booking_shop_asks_its_provider() {
    asks_provider("booking", None, Reopening::default());
}
