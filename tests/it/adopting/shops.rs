//! Six foreign shops, each with its own tables and from configuration alone: 300 orders fall due at once, and three in
//! ten are paid while they close.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use order_timeout::operations::adopt::Level;
use order_timeout::operations::adopt::check::{self, CheckReport};
use order_timeout::postgres::Database;
use order_timeout_core::kind::Kind;
use order_timeout_core::order::Timestamp;
use sqlx::AssertSqlSafe;
use time::OffsetDateTime;

use super::{execute, map, text, without_payments};
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{TestEnv, wait_for};

/// Orders of a shop.
const ORDERS: usize = 300;

/// An order's state and deadline, by its id on the wire.
type Orders = BTreeMap<String, (String, Timestamp)>;

async fn orders(env: &TestEnv, shop: &str) -> Orders {
    let rows: Vec<(String, String, OffsetDateTime)> =
        sqlx::query_as(AssertSqlSafe(text(shop, "state.sql"))).fetch_all(&env.pool).await.unwrap();
    rows.into_iter().map(|(id, state, deadline)| (id, (state, Timestamp::from(deadline)))).collect()
}

/// Pays an order if it is still open, as often as a deadlock requires. Returns whether it was paid.
async fn pay(env: &TestEnv, sql: &str, id: &str) -> bool {
    loop {
        match sqlx::query(AssertSqlSafe(sql.to_owned())).bind(id).execute(&env.pool).await {
            Ok(done) => return done.rows_affected() == 1,
            Err(error) => assert!(error.to_string().contains("deadlock"), "{error}"),
        }
    }
}

/// The orders to be paid, in groups that are paid one after another around the deadline.
async fn pay_some(env: Arc<TestEnv>, shop: &'static str, all: Vec<(String, Timestamp)>) -> Vec<String> {
    let sql = text(shop, "pay.sql");
    let mut paid = Vec::new();
    for (number, (id, deadline)) in (0_i64..).zip(all) {
        // From 200 ms before the deadline to 100 ms after it.
        let at = deadline.unix_micros() + (number * 3_300) - 200_000;
        let wait = at - Timestamp::now_by_local_clock().unix_micros();
        tokio::time::sleep(Duration::from_micros(u64::try_from(wait).unwrap_or(0))).await;
        if pay(&env, &sql, &id).await {
            paid.push(id);
        }
    }
    paid
}

async fn report(env: &TestEnv) -> CheckReport {
    let database = Database::connect(&env.settings.database, 2).await.unwrap();
    check::check(&database, &env.settings, &Kind::ORDER).await.unwrap()
}

fn assert_right(report: &CheckReport) {
    let wrong: Vec<_> = report.findings.iter().filter(|finding| finding.level == Level::Wrong).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn adopts(shop: &'static str) {
    TestEnv::builder()
        .settings(|settings| {
            map(settings, shop);
            // With a provider its orders are in providers.rs.
            without_payments(settings);
            // Every second order has no alarm.
            settings.sweep.grace = Duration::from_millis(300);
        })
        .run(async move |env| {
            execute(&env, &text(shop, "schema.sql")).await;
            assert_right(&report(&env).await);
            let worker = env.worker().await;
            let publisher = env.publisher().await;
            execute(&env, &text(shop, "orders.sql")).await;
            let before = orders(&env, shop).await;
            assert_eq!(before.len(), ORDERS);
            // Three in ten.
            let to_pay = before.iter().enumerate().filter(|(place, _)| [0, 3, 7].contains(&(place % 10)));
            let to_pay: Vec<_> = to_pay.map(|(_, (id, (_, deadline)))| (id.clone(), *deadline)).collect();
            let paying = tokio::spawn(pay_some(env.clone(), shop, to_pay));
            let alarms = before.iter().step_by(2).map(|(id, (_, deadline))| (id.clone(), *deadline));
            for (id, deadline) in alarms {
                publisher.schedule(&id, deadline).await.unwrap();
            }
            let paid = paying.await.unwrap();
            let is_open = |orders: &Orders| orders.values().any(|(state, _)| state == "open");
            wait_for("the closes", async || !is_open(&orders(&env, shop).await)).await;
            wait_for("the events", async || {
                env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await == 0
            })
            .await;
            worker.stop().await;
            assert_books(&env, shop, &before, &paid).await;
        });
}

/// No paid order is closed, each closed one was announced once with its id and deadline, and the shop's books balance.
async fn assert_books(env: &TestEnv, shop: &str, before: &Orders, paid: &[String]) {
    let after = orders(env, shop).await;
    assert!(!paid.is_empty() && paid.len() <= 90, "{} were paid", paid.len());
    for (id, (state, _)) in &after {
        let wanted = if paid.contains(id) { "paid" } else { "closed" };
        assert_eq!(state, wanted, "{shop}: {id}");
    }
    let announced: Vec<(String, OffsetDateTime, bool)> = sqlx::query_as(
        "SELECT payload ->> 'order_id', (payload ->> 'deadline')::timestamptz,
                (payload ->> 'closed_at')::timestamptz >= (payload ->> 'deadline')::timestamptz
         FROM event_outbox WHERE routing_key = 'order.closed' AND type = 'order.closed.v1'",
    )
    .fetch_all(&env.pool)
    .await
    .unwrap();
    assert_eq!(announced.len(), ORDERS - paid.len(), "{shop}");
    for (id, deadline, in_time) in announced {
        assert_eq!(before[&id].1, Timestamp::from(deadline), "{shop}: {id}");
        assert!(in_time && !paid.contains(&id), "{shop}: {id}");
    }
    let odd: Vec<String> =
        sqlx::query_scalar(AssertSqlSafe(text(shop, "books.sql"))).fetch_all(&env.pool).await.unwrap();
    assert_eq!(odd, Vec::<String>::new(), "{shop}");
    assert_eq!(env.parked().await, []);
}

#[test]
fn mall_shop_is_adopted() {
    adopts("mall");
}

#[test]
fn ticket_shop_is_adopted() {
    adopts("ticketing");
}

#[test]
fn headless_shop_is_adopted() {
    adopts("headless");
}

#[test]
fn shop_of_tenants_is_adopted() {
    adopts("tenants");
}

#[test]
fn partitioned_shop_is_adopted() {
    adopts("partitioned");
}

/// A hold is a row that goes, and an alarm that finds none is done.
#[test]
fn booking_shop_is_adopted() {
    adopts("booking");
}

#[test]
fn check_changes_nothing() {
    for shop in ["mall", "headless"] {
        TestEnv::builder().without_broker().settings(|settings| map(settings, shop)).run(async move |env| {
            execute(&env, &text(shop, "schema.sql")).await;
            execute(&env, &text(shop, "orders.sql")).await;
            wait_for("overdue orders", async || {
                orders(&env, shop).await.values().all(|(_, at)| *at < Timestamp::now_by_local_clock())
            })
            .await;
            let report = report(&env).await;
            assert_right(&report);
            let sentences: Vec<&str> = report.findings.iter().map(|finding| finding.sentence.as_str()).collect();
            let all = sentences.join("\n");
            assert!(all.contains("10 of 10 overdue orders were closed and rolled back"), "{all}");
            assert!(all.contains("two of the orders have the same one"), "{all}");
            assert!(orders(&env, shop).await.values().all(|(state, _)| state == "open"));
            assert_eq!(env.count("SELECT count(*) FROM event_outbox").await, 0);
            let odd: Vec<String> =
                sqlx::query_scalar(AssertSqlSafe(text(shop, "books.sql"))).fetch_all(&env.pool).await.unwrap();
            assert!(!odd.iter().any(|odd| odd.starts_with("stock")), "{odd:?}");
        });
    }
}

#[test]
fn statements_of_mapping_are_printed() {
    TestEnv::builder().without_broker().settings(|settings| map(settings, "ticketing")).run(async |env| {
        execute(&env, &text("ticketing", "schema.sql")).await;
        let (code, said, error) = call_with(&env.settings, &["sql"]).await;
        assert_eq!(code, 0, "{error}");
        for part in [
            "FOR NO KEY UPDATE OF o SKIP LOCKED",
            "\"status\" = 'e'",
            "statement_timestamp()",
            "FUNCTION kind_order_move(",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
    });
}

#[test]
fn deadline_of_mapped_order_moves() {
    TestEnv::builder().without_broker().settings(|settings| map(settings, "ticketing")).run(async |env| {
            execute(&env, &text("ticketing", "schema.sql")).await;
            let (code, said, error) = call_with(&env.settings, &["adopt", "--install"]).await;
            assert_eq!(code, 0, "{said}{error}");
            execute(&env, "INSERT INTO tickets.pretixbase_order (code, status, expires) VALUES ('A', 'n', NULL), ('B', 'p', now()), ('C', 'n', now() + interval '1 d')").await;
            for (id, said_wanted, code_wanted) in [
                ("1", "an alarm for it is written", 0),
                ("2", "is paid", 1),
                ("3", "an alarm for it is written", 0),
                ("4", "no order", 1),
                ("x", "no order", 1),
            ] {
                let (code, said, error) = call_with(&env.settings, &["deadline", id, "--in", "1h"]).await;
                assert!(code == code_wanted && said.contains(said_wanted), "{id}: {said}{error}");
            }
            assert_eq!(env.count("SELECT count(*) FROM alarm_outbox WHERE order_id IN ('1', '3')").await, 2);
        });
}

#[test]
fn order_without_deadline_stays_open() {
    TestEnv::builder().settings(|settings| map(settings, "ticketing")).run(async |env| {
        execute(&env, &text("ticketing", "schema.sql")).await;
        execute(
            &env,
            "INSERT INTO tickets.pretixbase_order (code, expires) VALUES ('A', NULL), ('B', now() + interval '1 s')",
        )
        .await;
        let worker = env.worker().await;
        let publisher = env.publisher().await;
        let now = Timestamp::now_by_local_clock();
        // The close of the second proves that the first alarm was handled.
        for (id, millis) in [("1", 700), ("2", 1_500)] {
            publisher.schedule(id, now + Duration::from_millis(millis)).await.unwrap();
        }
        wait_for("the close", async || {
            env.count("SELECT count(*) FROM tickets.pretixbase_order WHERE status = 'e'").await == 1
        })
        .await;
        worker.stop().await;
        env.assert_drained().await;
        assert_eq!(
            env.count("SELECT count(*) FROM tickets.pretixbase_order WHERE status = 'n' AND expires IS NULL").await,
            1
        );
        assert_eq!(env.parked().await, []);
    });
}
