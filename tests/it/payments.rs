//! A payment counts exactly once, whatever it finds: it pays, adds up, or is late money that is recorded, announced and
//! settled once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use order_timeout::mapping::default_tables;
use order_timeout::operations::late_payments::{self, ReopenError};
use order_timeout::postgres::{Database, Operator, shop_settings};
use order_timeout_client::payment::{Attempt, Currency, Money};
use order_timeout_client::postgres::{LateReason, PaymentError, PaymentOutcome, PaymentVerdict, payment_received};
use order_timeout_core::with_causes;
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{Order, TestEnv, wait_for, wait_long_for_locks};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, PgConnection, PgPool};
use uuid::Uuid;

const GUIDE: &str = include_str!("../../docs/PAYMENTS.md");
const MINUTE: Duration = Duration::from_secs(60);
const PAID: PaymentVerdict = PaymentVerdict::Paid { surplus_minor: 0 };

fn payment(reference: &str, amount_minor: i64, currency: &str) -> Attempt {
    let money = Money { amount_minor, currency: Currency::new(currency).unwrap() };
    Attempt { provider: "stripe".into(), reference: reference.into(), money }
}

/// Reports a payment in euros.
async fn report(pool: &PgPool, order_id: impl ToString, reference: &str, amount_minor: i64) -> PaymentOutcome {
    payment_received(pool, order_id.to_string(), &payment(reference, amount_minor, "EUR")).await.unwrap()
}

fn late(reason: LateReason) -> PaymentVerdict {
    PaymentVerdict::Late { reason }
}

async fn execute(env: &TestEnv, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&env.pool).await.unwrap();
}

async fn price(env: &TestEnv, amount_minor: i64) {
    execute(env, &format!("UPDATE orders SET amount_minor = {amount_minor}, currency = 'EUR'")).await;
}

/// Closes the orders as a worker does, without waiting for locked stock if `waits` is false. Returns the outcomes.
async fn close(pool: &PgPool, orders: &[Order], waits: bool) -> Vec<String> {
    let ids: Vec<String> = orders.iter().map(|order| order.id.to_string()).collect();
    let close = sqlx::query_as::<_, (String, String, Option<time::OffsetDateTime>)>(&*default_tables::rendered().close);
    let found = close.bind(&ids).bind("alarm").bind(waits).bind(false).fetch_all(pool).await.unwrap();
    let by_id: BTreeMap<String, String> = found.into_iter().map(|(id, outcome, _)| (id, outcome)).collect();
    ids.iter().map(|id| by_id[id].clone()).collect()
}

async fn closed_orders(env: &TestEnv, count: usize) -> Vec<Order> {
    let orders = env.orders(count, Duration::ZERO).await;
    assert!(close(&env.pool, &orders, true).await.iter().all(|outcome| outcome == "closed"));
    orders
}

/// Reserves a coupon and a hundred points for each order.
async fn reserve_resources(env: &TestEnv, orders: &[Order]) {
    let count = orders.len();
    execute(
        env,
        &format!(
            "INSERT INTO reserved_resources VALUES ('coupon', 'SUMMER', 0, {count}), ('points', 'customer', 0, {count} * 100);
             INSERT INTO order_resources SELECT o.id, 'coupon', 'SUMMER', 1 FROM orders o;
             INSERT INTO order_resources SELECT o.id, 'points', 'customer', 100 FROM orders o"
        ),
    )
    .await;
}

async fn resources(env: &TestEnv) -> Vec<(String, i64, i64)> {
    let select = "SELECT kind, available, reserved FROM reserved_resources ORDER BY kind";
    sqlx::query_as(select).fetch_all(&env.pool).await.unwrap()
}

/// The payloads of the events of this type, oldest first.
async fn events(env: &TestEnv, key: &str) -> Vec<Value> {
    let select = "SELECT payload FROM event_outbox WHERE routing_key = $1 ORDER BY created_at, id";
    sqlx::query_scalar(select).bind(key).fetch_all(&env.pool).await.unwrap()
}

async fn late_reasons(env: &TestEnv) -> Vec<String> {
    let select = "SELECT reason FROM late_payments ORDER BY id";
    sqlx::query_scalar(select).fetch_all(&env.pool).await.unwrap()
}

/// What holds of money whatever happened: each payment counts, or is late, and never both.
async fn assert_money_adds_up(env: &TestEnv) {
    let lost = "SELECT count(*) FROM received_payments p
                WHERE p.amount_minor <> p.counted_minor + coalesce((
                    SELECT sum(l.amount_minor) FROM late_payments l
                    WHERE l.provider = p.provider AND l.reference = p.reference AND l.state <> 'reopened'), 0)";
    assert_eq!(env.count(lost).await, 0, "money that neither counts nor is late, or both");
    let unannounced = "SELECT (SELECT count(*) FROM late_payments)
                              - (SELECT count(*) FROM event_outbox WHERE routing_key = 'order.payment_late')";
    assert_eq!(env.count(unannounced).await, 0, "one event for each");
    env.assert_ledger().await;
}

fn operator() -> Operator {
    Operator { who: "ann".into(), why: Some("a test".into()), run: Uuid::now_v7() }
}

async fn database(env: &TestEnv) -> Database {
    Database::connect(&env.settings.database, 4).await.unwrap()
}

#[test]
fn payment_consumes_all_that_is_reserved() {
    TestEnv::builder().without_broker().run(async |env| {
        let orders = env.orders(2, MINUTE).await;
        price(&env, 1_999).await;
        reserve_resources(&env, &orders).await;
        let (first, second) = (&orders[0], &orders[1]);
        execute(&env, "INSERT INTO payment_attempts SELECT 'stripe', 'pi_' || id, id::text, 1999, 'EUR' FROM orders")
            .await;
        let closing = "UPDATE orders SET status = 'closing' WHERE id = $1";
        sqlx::query(closing).bind(second.id).execute(&env.pool).await.unwrap();
        for (order, id) in [(first, first.id.to_string().to_uppercase()), (second, second.id.to_string())] {
            let paid = report(&env.pool, id, &format!("pi_{}", order.id), 1_999).await;
            assert_eq!(paid, PaymentOutcome { verdict: PAID, is_new: true });
            assert_eq!(env.status(order).await, "paid");
        }
        assert_eq!(resources(&env).await, [("coupon".into(), 0, 0), ("points".into(), 0, 0)]);
        assert_eq!(env.count("SELECT count(*) FROM payment_attempts WHERE state = 'paid'").await, 2);
        assert_eq!(env.count("SELECT count(*) FROM order_events WHERE event = 'paid' AND by = 'payment'").await, 2);
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn concurrent_reports_of_payment_count_once() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(MINUTE).await;
        price(&env, 500).await;
        for (id, verdict) in [
            (order.id.to_string(), PAID),
            (order.id.to_string(), late(LateReason::AlreadyPaid)),
            (Uuid::now_v7().to_string(), late(LateReason::UnknownOrder)),
            ("no order".to_owned(), late(LateReason::UnknownOrder)),
        ] {
            let reference = Uuid::now_v7().to_string();
            let outcomes = join_all((0..24).map(|_| {
                let (pool, id, reference) = (env.pool.clone(), id.clone(), reference.clone());
                tokio::spawn(async move { report(&pool, id, &reference, 500).await })
            }))
            .await;
            let outcomes: Vec<PaymentOutcome> = outcomes.into_iter().map(Result::unwrap).collect();
            assert!(outcomes.iter().all(|outcome| outcome.verdict == verdict), "{outcomes:?}");
            assert_eq!(outcomes.iter().filter(|outcome| outcome.is_new).count(), 1, "{verdict:?}");
        }
        assert_eq!(late_reasons(&env).await, ["already_paid", "unknown_order", "unknown_order"]);
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn concurrent_payments_pay_order_once() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(MINUTE).await;
        price(&env, 1_000).await;
        let outcomes = join_all((0..16).map(|n| {
            let (pool, id) = (env.pool.clone(), order.id);
            tokio::spawn(async move { report(&pool, id, &format!("pi_{n}"), 300).await.verdict })
        }))
        .await;
        let verdicts: Vec<PaymentVerdict> = outcomes.into_iter().map(Result::unwrap).collect();
        let count = |verdict| verdicts.iter().filter(|found| **found == verdict).count();
        assert_eq!(count(PaymentVerdict::Paid { surplus_minor: 200 }), 1, "{verdicts:?}");
        for missing_minor in [700, 400, 100] {
            assert_eq!(count(PaymentVerdict::Partial { missing_minor }), 1, "{verdicts:?}");
        }
        assert_eq!(count(late(LateReason::AlreadyPaid)), 12, "{verdicts:?}");
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn changed_report_of_reference_is_refused() {
    TestEnv::builder().without_broker().run(async |env| {
        let orders = env.orders(2, MINUTE).await;
        let refuse = async |order: &Order, payment: Attempt, hint: &str| {
            let refused: PaymentError = payment_received(&env.pool, order.id.to_string(), &payment).await.unwrap_err();
            let said = with_causes(&refused);
            assert!(said.contains(hint) && said.contains("final: ") && refused.is_final(), "{said}");
        };
        let _paid = report(&env.pool, orders[0].id, "pi_1", 500).await;
        refuse(&orders[0], payment("pi_1", 501, "EUR"), "was recorded as 500 EUR").await;
        refuse(&orders[0], payment("pi_1", 500, "USD"), "another amount or order").await;
        refuse(&orders[1], payment("pi_1", 500, "EUR"), "for order").await;
        refuse(&orders[1], payment("pi_2", -1, "EUR"), "report what was received").await;
        refuse(&orders[1], payment("pi_2", 0, "EUR"), "which is not free").await;
        refuse(&orders[1], payment("", 5, "EUR"), "1 to 200 bytes").await;
        assert_eq!(env.count("SELECT count(*) FROM received_payments").await, 1);
        assert_eq!(env.status(&orders[1]).await, "unpaid");
        price(&env, 0).await;
        assert_eq!(report(&env.pool, orders[1].id, "free", 0).await.verdict, PAID, "an order of 0");
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn unpayable_money_is_late_with_reason() {
    TestEnv::builder().without_broker().run(async |env| {
        let closed = closed_orders(&env, 1).await.remove(0);
        let [cancelled, paid, dollars, attempted, euros] = &env.orders(5, MINUTE).await[..] else { unreachable!() };
        assert!(env.pay(paid).await);
        let set = async |sql: &'static str, order: &Order| {
            sqlx::query(sql).bind(order.id).execute(&env.pool).await.unwrap();
        };
        set("UPDATE orders SET status = 'cancelled' WHERE id = $1", cancelled).await;
        set("UPDATE stock SET reserved = reserved - 1, available = available + 1 WHERE $1::uuid IS NOT NULL", paid)
            .await;
        set("UPDATE orders SET amount_minor = 10, currency = 'USD' WHERE id = $1", dollars).await;
        set("UPDATE orders SET amount_minor = 1000 WHERE id = $1", euros).await;
        set("INSERT INTO payment_attempts VALUES ('stripe', 'pi_5', $1::uuid::text, 10, 'EUR')", paid).await;
        let _partial = report(&env.pool, euros.id, "pi_0", 10).await;
        for (n, order, reason) in [
            (1, &closed, LateReason::Closed),
            (2, cancelled, LateReason::Cancelled),
            (3, paid, LateReason::AlreadyPaid),
            (4, dollars, LateReason::OtherCurrency),
            (5, attempted, LateReason::OtherOrder),
        ] {
            let found = report(&env.pool, order.id, &format!("pi_{n}"), 10).await;
            assert_eq!(found, PaymentOutcome { verdict: late(reason), is_new: true });
        }
        let mixed = payment_received(&env.pool, euros.id.to_string(), &payment("pi_6", 990, "USD")).await.unwrap();
        assert_eq!(mixed.verdict, late(LateReason::OtherCurrency), "amounts of two currencies are not added up");
        let announced = events(&env, "order.payment_late").await;
        assert_eq!(announced[0]["order_id"], json!(closed.id));
        assert_eq!((&announced[0]["reason"], &announced[0]["amount_minor"]), (&json!("closed"), &json!(10)));
        assert_eq!(env.count("SELECT count(*) FROM order_events WHERE event = 'payment_late'").await, 6);
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn lowered_price_leaves_surplus_of_parts() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(MINUTE).await;
        price(&env, 1_000).await;
        let _ = report(&env.pool, order.id, "pi_1", 600).await;
        price(&env, 500).await;
        assert_eq!(env.status(&order).await, "paid", "nothing is owed any more");
        let paid = report(&env.pool, order.id, "pi_2", 10).await;
        assert_eq!(paid.verdict, late(LateReason::AlreadyPaid));
        assert_eq!(late_reasons(&env).await, ["surplus", "already_paid"]);
        assert_eq!(env.count("SELECT sum(counted_minor)::bigint FROM received_payments").await, 500);
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn parts_are_released_each_time() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(MINUTE).await;
        price(&env, 1_000).await;
        let _ = report(&env.pool, order.id, "pi_1", 400).await;
        let release = async |status: &str| {
            execute(&env, &format!("UPDATE orders SET status = '{status}'")).await;
            let release = sqlx::query_scalar::<_, i64>("SELECT release_part_payments($1)").bind(order.id.to_string());
            release.fetch_one(&env.pool).await.unwrap()
        };
        assert_eq!(release("cancelled").await, 1);
        execute(
            &env,
            "UPDATE late_payments SET state = 'reopened', settled_at = now(), settled_by = 'ann';
             UPDATE received_payments SET counted_minor = 400; UPDATE orders SET status = 'unpaid'",
        )
        .await;
        assert_eq!(release("cancelled").await, 1);
        assert_eq!(late_reasons(&env).await, ["part_payment", "part_payment"]);
    });
}

#[test]
fn money_of_another_order_reopens_nothing() {
    TestEnv::builder().without_broker().run(async |env| {
        let orders = closed_orders(&env, 2).await;
        price(&env, 1_000).await;
        let insert = "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
                      VALUES ('stripe', 'pi_1', $1, 600, 'EUR')";
        sqlx::query(insert).bind(orders[1].id.to_string()).execute(&env.pool).await.unwrap();
        let _ = report(&env.pool, orders[0].id, "pi_1", 600).await;
        let _ = report(&env.pool, orders[0].id, "pi_2", 600).await;
        let database = database(&env).await;
        let refused = late_payments::reopen(&database, &env.settings, 1, &operator()).await.unwrap_err();
        assert!(matches!(refused, ReopenError::OtherOrder(1)), "{refused}");
        let refused = late_payments::reopen(&database, &env.settings, 2, &operator()).await.unwrap_err();
        let ReopenError::TooLittle { order_id, missing_minor } = refused else { panic!("{refused}") };
        assert_eq!((order_id, missing_minor), (orders[0].id.to_string(), 400));
    });
}

#[test]
fn close_gives_everything_back_once() {
    // On a busy machine an alarm is written after its deadline, and then the sweep closes the order.
    TestEnv::builder().settings(|settings| settings.sweep.grace = Duration::ZERO).run(async |env| {
        let orders = env.orders(40, Duration::from_secs(1)).await;
        price(&env, 1_000).await;
        reserve_resources(&env, &orders).await;
        for order in &orders[..20] {
            let partial = report(&env.pool, order.id, &format!("pi_{}", order.id), 400).await;
            assert_eq!(partial.verdict, PaymentVerdict::Partial { missing_minor: 600 });
        }
        for order in &orders {
            env.write_alarm(order).await;
        }
        let worker = env.worker().await;
        wait_for("the closes", async || env.closed().await == 40).await;
        worker.stop().await;
        assert_eq!(resources(&env).await, [("coupon".into(), 40, 0), ("points".into(), 4_000, 0)]);
        assert_eq!(env.count("SELECT available FROM stock").await, 1_000_000);
        assert_eq!(late_reasons(&env).await, vec!["part_payment"; 20]);
        let again = close(&env.pool, &orders, true).await;
        assert!(again.iter().all(|outcome| outcome == "already_closed"));
        assert_eq!(resources(&env).await, [("coupon".into(), 40, 0), ("points".into(), 4_000, 0)]);
        assert_money_adds_up(&env).await;
    });
}

/// Its plan begins with the stock, finds none and reads nothing further.
#[test]
fn close_without_stock_releases_part_payments() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(Duration::ZERO).await;
        price(&env, 1_000).await;
        let _partial = report(&env.pool, order.id, "pi_1", 400).await;
        execute(&env, "DELETE FROM order_items; DELETE FROM stock").await;
        execute(&env, "VACUUM ANALYZE stock").await;
        for plans in ["force_generic_plan", "force_custom_plan"] {
            let mut transaction = env.pool.begin().await.unwrap();
            sqlx::raw_sql(AssertSqlSafe(format!("SET LOCAL plan_cache_mode = {plans}")))
                .execute(&mut *transaction)
                .await
                .unwrap();
            let sql = &*default_tables::rendered().close;
            let close = sqlx::query(sql).bind([order.id.to_string()]).bind("alarm").bind(true).bind(false);
            close.fetch_all(&mut *transaction).await.unwrap();
            let late: Vec<String> =
                sqlx::query_scalar("SELECT reason FROM late_payments").fetch_all(&mut *transaction).await.unwrap();
            assert_eq!(late, ["part_payment"], "{plans}");
        }
    });
}

#[test]
fn cancelled_order_releases_part_payments() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(MINUTE).await;
        price(&env, 1_000).await;
        let _partial = report(&env.pool, order.id, "pi_1", 400).await;
        let release = async |pool: &PgPool| {
            let release = sqlx::query_scalar::<_, i64>("SELECT release_part_payments($1)").bind(order.id.to_string());
            release.fetch_one(pool).await.unwrap()
        };
        assert_eq!(release(&env.pool).await, 0, "the order is still open");
        execute(&env, "UPDATE orders SET status = 'cancelled'; UPDATE stock SET reserved = 0").await;
        assert_eq!((release(&env.pool).await, release(&env.pool).await), (1, 0));
        assert_eq!(late_reasons(&env).await, ["part_payment"]);
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn locked_coupon_makes_only_its_orders_busy() {
    TestEnv::builder().run(async |env| {
        let orders = env.orders(3, Duration::ZERO).await;
        reserve_resources(&env, &orders[..2]).await;
        sqlx::query("DELETE FROM order_resources WHERE order_id = $1")
            .bind(orders[2].id)
            .execute(&env.pool)
            .await
            .unwrap();
        execute(&env, "DELETE FROM order_resources WHERE kind = 'points'").await;
        let mut other = env.pool.begin().await.unwrap();
        let hold = "SELECT FROM reserved_resources WHERE kind = 'coupon' FOR UPDATE";
        sqlx::query(hold).execute(&mut *other).await.unwrap();
        assert_eq!(close(&env.pool, &orders, false).await, ["busy", "busy", "closed"]);
        other.rollback().await.unwrap();
        assert_eq!(close(&env.pool, &orders, false).await, ["closed", "closed", "already_closed"]);
        assert_eq!(resources(&env).await[0], ("coupon".into(), 2, 0));
    });
}

#[test]
fn guard_refuses_payments_after_deadline() {
    TestEnv::builder()
        .settings(|settings| {
            settings.orders.pay_after_deadline = false;
        })
        .run(async |env| {
            let setting = "SELECT count(*) FROM order_timeout_settings WHERE pay_after_deadline";
            assert_eq!(env.count(setting).await, 1, "the migration's default");
            let worker = env.worker().await;
            assert_eq!(env.count(setting).await, 0, "a worker has written the setting");
            worker.stop().await;
            let [due, closing] = &env.orders(2, Duration::ZERO).await[..] else { unreachable!() };
            let open = env.order(MINUTE).await;
            let never = env.order(MINUTE).await;
            for (sql, order) in [
                ("UPDATE orders SET status = 'closing' WHERE id = $1", closing),
                ("UPDATE orders SET expires_at = NULL WHERE id = $1", &never),
            ] {
                sqlx::query(sql).bind(order.id).execute(&env.pool).await.unwrap();
            }
            let found = report(&env.pool, due.id, "pi_1", 10).await;
            assert_eq!(found.verdict, late(LateReason::AfterDeadline));
            for (reference, order) in [("pi_2", closing), ("pi_3", &open), ("pi_4", &never)] {
                assert_eq!(report(&env.pool, order.id, reference, 10).await.verdict, PAID);
            }
            let mut lenient = env.settings.clone();
            lenient.orders.pay_after_deadline = true;
            shop_settings::write(&database(&env).await, &lenient).await.unwrap();
            assert_eq!(report(&env.pool, due.id, "pi_5", 10).await.verdict, PAID);
            assert_money_adds_up(&env).await;
        });
}

#[test]
fn unpaid_order_reads_expired_after_deadline() {
    TestEnv::builder().without_broker().run(async |env| {
        let due = env.order(Duration::ZERO).await;
        let [open, paid, never] = &env.orders(3, MINUTE).await[..] else { unreachable!() };
        assert!(env.pay(paid).await);
        sqlx::query("UPDATE orders SET expires_at = NULL WHERE id = $1")
            .bind(never.id)
            .execute(&env.pool)
            .await
            .unwrap();
        for (order, status, remaining) in [
            (&due, "expired", Some(0.0..=0.0)),
            (open, "unpaid", Some(1.0..=60.0)),
            (paid, "paid", Some(0.0..=0.0)),
            (never, "unpaid", None),
        ] {
            for select in [
                "SELECT effective_status, extract(epoch FROM remaining)::float8 FROM orders_effective WHERE id = $1",
                "SELECT o.effective_status, extract(epoch FROM o.remaining)::float8 FROM orders o WHERE o.id = $1",
            ] {
                let row: (String, Option<f64>) =
                    sqlx::query_as(select).bind(order.id).fetch_one(&env.pool).await.unwrap();
                assert_eq!(row.0, status);
                assert_eq!(row.1.is_some(), remaining.is_some());
                assert!(remaining.iter().all(|range| range.contains(&row.1.unwrap())), "{row:?}");
            }
        }
    });
}

#[test]
fn callback_needs_only_execute() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(MINUTE).await;
        let grant = GUIDE.split("```sql\n").find(|block| block.starts_with("GRANT ")).unwrap();
        let role = format!("callback_{}", env.settings.namespace);
        let grant = grant.lines().next().unwrap().replace("TO shop;", &format!("TO {role};"));
        execute(&env, &format!("CREATE ROLE {role}")).await;
        let mut callback = env.pool.acquire().await.unwrap().detach();
        // A table of the role's own must not take the place of ours.
        sqlx::raw_sql(AssertSqlSafe(format!("CREATE TEMPORARY TABLE orders (id uuid); SET ROLE {role}")))
            .execute(&mut callback)
            .await
            .unwrap();
        let call = async |callback: &mut PgConnection| {
            payment_received(callback, order.id.to_string(), &payment("pi_1", 10, "EUR")).await
        };
        let refused = with_causes(&call(&mut callback).await.unwrap_err());
        execute(&env, &grant).await;
        let paid = call(&mut callback).await;
        let mut allowed = Vec::new();
        for sql in [
            "SELECT FROM public.orders",
            "SELECT FROM received_payments",
            "UPDATE late_payments SET state = 'open'",
            "INSERT INTO event_outbox (routing_key, type, payload) VALUES ('a', 'b', '{}')",
            "SELECT count_payment('order', 'a', 1, true, 'b')",
            "SELECT record_late_payment('order', 'a', 'b', 'c', 1, 'EUR', 'closed')",
        ] {
            allowed.extend(sqlx::raw_sql(sql).execute(&mut callback).await.ok().map(|_| sql));
        }
        drop(callback);
        // Before any assertion: a role outlives the test environment's database.
        execute(&env, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
        assert!(refused.contains("GRANT EXECUTE"), "{refused}");
        assert_eq!(paid.unwrap().verdict, PAID);
        assert_eq!(allowed, Vec::<&str>::new());
    });
}

/// A thousand payments for closed orders, each delivered three times at once.
#[test]
fn thousand_late_payments_settle_once_each() {
    const ORDERS: usize = 1_000;
    // All reopened orders take the same article, and three operators wait for its row.
    TestEnv::builder().without_broker().settings(wait_long_for_locks).run(async |env| {
        let orders = Arc::new(closed_orders(&env, ORDERS).await);
        let available = env.count("SELECT available FROM stock").await;
        let reports = join_all((0..3).map(|_| {
            let (pool, orders) = (env.pool.clone(), orders.clone());
            tokio::spawn(async move {
                let reports = orders
                    .iter()
                    .map(async |order| report(&pool, order.id, &format!("pi_{}", order.id), 10).await.is_new);
                join_all(reports).await.into_iter().filter(|is_new| *is_new).count()
            })
        }))
        .await;
        let new: usize = reports.into_iter().map(Result::unwrap).sum();
        assert_eq!(new, ORDERS);
        assert_eq!(env.count("SELECT count(*) FROM late_payments").await, 1_000);
        assert_eq!(events(&env, "order.payment_late").await.len(), ORDERS);

        // Three operators settle all of them at the same time: the even ones by reopening.
        let database = database(&env).await;
        let ids = late_payments::open(&database).await.unwrap();
        let settled = join_all((0..3).map(|_| {
            let (env, database, ids) = (env.clone(), database.clone(), ids.clone());
            tokio::spawn(async move {
                let (mut reopened, mut refunded) = (0, 0);
                for id in ids {
                    if id % 2 == 0 {
                        let done = late_payments::reopen(&database, &env.settings, id, &operator()).await;
                        assert!(!matches!(done, Err(ReopenError::Database(_))), "{done:?}");
                        reopened += usize::from(done.is_ok());
                    } else {
                        refunded +=
                            late_payments::refund_due(&database, &[id], &operator()).await.unwrap().settled.len();
                    }
                }
                (reopened, refunded)
            })
        }))
        .await;
        let settled: Vec<(usize, usize)> = settled.into_iter().map(Result::unwrap).collect();
        let sums = settled.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        assert_eq!(sums, (500, 500), "{settled:?}");
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE status = 'paid'").await, 500);
        assert_eq!(env.count("SELECT count(*) FROM late_payments WHERE state = 'open'").await, 0);
        assert_eq!(env.count("SELECT available FROM stock").await, available - 500, "reopened orders consume stock");
        for (key, event) in [("order.reopened", "reopened"), ("order.refund_due", "refund_due")] {
            assert_eq!(events(&env, key).await.len(), 500);
            let written = "SELECT count(*) FROM order_events WHERE event = $1 AND who = 'ann' AND why = 'a test'";
            let rows: i64 = sqlx::query_scalar(written).bind(event).fetch_one(&env.pool).await.unwrap();
            assert_eq!(rows, 500);
        }
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn reopening_uses_all_money_of_order() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(Duration::ZERO).await;
        price(&env, 1_000).await;
        let _part = report(&env.pool, order.id, "pi_1", 400).await;
        close(&env.pool, std::slice::from_ref(&order), true).await;
        let database = database(&env).await;
        let reopen = async |id: i64| late_payments::reopen(&database, &env.settings, id, &operator()).await;
        let too_little = reopen(1).await.unwrap_err();
        let ReopenError::TooLittle { order_id, missing_minor } = too_little else { panic!("{too_little}") };
        assert_eq!((order_id, missing_minor), (order.id.to_string(), 600));
        let _late = report(&env.pool, order.id, "pi_2", 700).await;
        let _unused = report(&env.pool, order.id, "pi_3", 5).await;
        let reopened = reopen(2).await.unwrap();
        assert_eq!((reopened.late_payments, reopened.surplus_minor), (vec![2, 1], 100));
        assert_eq!(env.status(&order).await, "paid");
        assert_eq!(late_reasons(&env).await, ["part_payment", "closed", "closed", "surplus"]);
        assert!(matches!(reopen(3).await, Err(ReopenError::NotClosed { .. })));
        assert_eq!(late_payments::refund_due(&database, &[1, 2, 3, 4], &operator()).await.unwrap().settled, [3, 4]);
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn reopening_names_what_lacks() {
    TestEnv::builder().without_broker().run(async |env| {
        let orders = env.orders(1, Duration::ZERO).await;
        reserve_resources(&env, &orders).await;
        close(&env.pool, &orders, true).await;
        let order = &orders[0];
        let _late = report(&env.pool, order.id, "pi_1", 10).await;
        let settle = async |arguments: &[&str]| {
            let arguments = [&["late", "settle"][..], arguments, &["--why", "a test"]].concat();
            call_with(&env.settings, &arguments).await
        };
        for (sold_out, lacks) in [
            ("UPDATE stock SET available = 0", "stock article has 0 left and the order needs 1"),
            (
                "UPDATE reserved_resources SET available = 99 WHERE kind = 'points'",
                "reserved_resources points/customer has 99 left and the order needs 100",
            ),
        ] {
            execute(&env, sold_out).await;
            let before = env.count("SELECT count(*) FROM order_events").await;
            let (code, said, error) = settle(&["1", "--reopen"]).await;
            assert!(code == 1 && said.contains(lacks), "{said}{error}");
            assert_eq!(env.status(order).await, "closed");
            assert_eq!(env.count("SELECT count(*) FROM order_events").await, before);
        }
        execute(&env, "UPDATE stock SET available = 1; UPDATE reserved_resources SET available = 100").await;
        let (code, said, error) = settle(&["1", "--reopen"]).await;
        assert_eq!(
            (code, said.as_str()),
            (0, format!("order {} is reopened and paid\n", order.id).as_str()),
            "{error}"
        );
        assert_eq!(resources(&env).await, [("coupon".into(), 99, 0), ("points".into(), 0, 0)]);
        for (id, why) in [("1", "the order is paid, and only a closed order"), ("7", "there is no late payment 7")] {
            let (code, said, _) = settle(&[id, "--reopen"]).await;
            let said = said.replace(&format!("order {}", order.id), "the order");
            assert!(code == 1 && said.contains(why), "{said}");
        }
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn late_command_lists_and_settles() {
    TestEnv::builder().without_broker().run(async |env| {
        let orders = closed_orders(&env, 5).await;
        for (n, order) in orders.iter().enumerate() {
            let _late = report(&env.pool, order.id, &format!("pi_{n}"), 1_000).await;
        }
        let late = async |arguments: &[&str]| call_with(&env.settings, &[&["late"][..], arguments].concat()).await;
        let (code, table, error) = late(&["list"]).await;
        assert!(code == 0 && table.lines().count() == 6 && table.contains("stripe pi_4"), "{table}{error}");
        let (_, lines, _) = late(&["list", "--json", "--after", "3", "--limit", "1"]).await;
        let row: Value = serde_json::from_str(&lines).unwrap();
        assert_eq!((&row["id"], &row["reference"], &row["state"]), (&json!(4), &json!("pi_3"), &json!("open")));
        let (code, _, error) = late(&["settle", "1", "--refund-due"]).await;
        assert!(code == 2 && error.contains("--why"), "{error}");
        let settle_two = ["settle", "1", "9", "--refund-due", "--why", "late", "--who", "ann", "--json"];
        let (code, said, _) = late(&settle_two).await;
        let parsed = |said: &str| serde_json::from_str::<Value>(said).unwrap();
        assert_eq!((code, parsed(&said)), (1, json!({ "settled": [1], "not_open": [9] })));
        assert_eq!(parsed(&late(&settle_two).await.1), json!({ "settled": [], "not_open": [1, 9] }));
        let all = ["settle", "--all", "--refund-due", "--why", "end of day"];
        assert_eq!(late(&all).await.1, "4 payment(s) are open, nothing done; add --yes to settle them\n");
        let (code, said, error) = late(&[&all[..], &["--yes"]].concat()).await;
        assert_eq!((code, said.as_str()), (0, "4 payment(s) are to be given back\n"), "{error}");
        assert_eq!(late(&["list"]).await.1, "no late payments\n");
        let (_, lines, _) = late(&["list", "--all", "--json"]).await;
        let first: Value = serde_json::from_str(lines.lines().next().unwrap()).unwrap();
        let settled = (&first["state"], &first["settled_by"], &first["settled_why"]);
        assert_eq!(settled, (&json!("refund_due"), &json!("ann"), &json!("late")));
        assert_eq!(events(&env, "order.refund_due").await.len(), 5);
    });
}

#[test]
fn own_table_gets_late_money_listed() {
    TestEnv::builder().without_broker().run(async |env| {
        for expected in [true, false] {
            let (outcome, reason, is_new): (String, String, bool) = sqlx::query_as(
                "SELECT outcome, reason, is_new FROM late_payment_received('17', 'stripe', 'pi_1', 10, 'EUR')",
            )
            .fetch_one(&env.pool)
            .await
            .unwrap();
            assert_eq!((outcome.as_str(), reason.as_str(), is_new), ("late", "not_open", expected));
        }
        let mut own = env.settings.clone();
        (own.orders.close_sql, own.orders.overdue_sql) = ("a.sql".into(), "b.sql".into());
        let (_, table, _) = call_with(&own, &["late", "list"]).await;
        assert!(table.contains("not_open") && table.contains(" 17 "), "{table}");
        let (code, said, error) = call_with(&own, &["late", "settle", "1", "--reopen", "--why", "a"]).await;
        assert!(code == 1 && said.contains("kinds.order.table.reopen is not given"), "{said}{error}");
        let (code, _, error) = call_with(&own, &["late", "settle", "1", "--refund-due", "--why", "a"]).await;
        assert_eq!(code, 0, "{error}");
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn guide_statements_run_as_printed() {
    let blocks: Vec<&str> = GUIDE.split("```sql\n").skip(1).map(|block| block.split("```").next().unwrap()).collect();
    let [grant, attempt, pay, fail, release, create, reserve, read] = blocks[..] else {
        panic!("the guide has {} SQL blocks", blocks.len())
    };
    assert!(grant.starts_with("GRANT "), "run by callback_needs_only_execute");
    TestEnv::builder().without_broker().run(async move |env| {
        let create_order = "INSERT INTO orders (id, expires_at)
                            VALUES ('01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4c', now() + interval '1 min')";
        for sql in [create_order, attempt, create, reserve, release, read, pay, read, fail] {
            execute(&env, sql).await;
        }
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE status = 'paid'").await, 1);
        assert_eq!(resources(&env).await, [("coupon".into(), 99, 0), ("points".into(), 300, 0)]);
        assert_money_adds_up(&env).await;
    });
}

async fn outcome_of(env: &TestEnv, order_id: &str, provider: &str, reference: &str, currency: &str) -> (String, bool) {
    sqlx::query_as("SELECT coalesce(reason, outcome), is_new FROM payment_received($1, $2, $3, 1000, $4)")
        .bind(order_id)
        .bind(provider)
        .bind(reference)
        .bind(currency)
        .fetch_one(&env.pool)
        .await
        .unwrap()
}

#[test]
fn every_spelling_pays_the_same_order() {
    TestEnv::builder().without_broker().run(async |env| {
        let orders = env.orders(4, MINUTE).await;
        price(&env, 1_000).await;
        execute(&env, "INSERT INTO payment_attempts SELECT 'Stripe', 'pi_' || id, replace(id::text, '-', ''), 1000, 'eur' FROM orders")
            .await;
        assert_eq!(env.count("SELECT count(*) FROM payment_attempts a JOIN orders o ON o.id::text = a.order_id").await, 4);
        let spellings: [fn(String) -> String; 4] = [
            |id| id.replace('-', ""),
            |id| format!("{{{id}}}"),
            |id| format!(" urn:uuid:{id}\n"),
            |id| id.to_uppercase(),
        ];
        for (order, spelled) in orders.iter().zip(spellings) {
            let (id, reference) = (order.id.to_string(), format!("pi_{}", order.id));
            let first = outcome_of(&env, &spelled(id.clone()), "STRIPE", &reference, "eur").await;
            assert_eq!(first, ("paid".to_owned(), true), "{}", spelled(id.clone()));
            assert_eq!(outcome_of(&env, &id, "stripe ", &reference, "Eur").await, ("paid".to_owned(), false));
        }
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn money_reported_for_wrong_order_moves() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(MINUTE).await;
        price(&env, 1_000).await;
        let (right, wrong) = (order.id.to_string(), Uuid::now_v7().to_string());
        assert_eq!(outcome_of(&env, &wrong, "stripe", "pi_1", "EUR").await, ("unknown_order".to_owned(), true));
        assert_eq!(outcome_of(&env, &wrong, "stripe", "pi_1", "EUR").await, ("unknown_order".to_owned(), false));
        assert_eq!(outcome_of(&env, &right, "stripe", "pi_1", "EUR").await, ("paid".to_owned(), true));
        assert_eq!(env.status(&order).await, "paid");
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn money_before_its_order_pays_at_commit() {
    TestEnv::builder().without_broker().run(async |env| {
        execute(&env, "INSERT INTO stock VALUES ('early', 0, 2)").await;
        let id = "01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4c";
        assert_eq!(outcome_of(&env, id, "stripe", "pi_1", "EUR").await, ("unknown_order".to_owned(), true));
        execute(
            &env,
            "BEGIN;
             INSERT INTO orders (id, expires_at) VALUES ('01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4c', now() + interval '1 min');
             UPDATE orders SET amount_minor = 1000, currency = 'EUR';
             INSERT INTO order_items SELECT id, 'early', 2 FROM orders;
             COMMIT",
        )
        .await;
        assert_eq!(env.count("SELECT sum(counted_minor)::bigint FROM received_payments").await, 1_000);
        assert_eq!(env.count("SELECT count(*) FROM orders WHERE status = 'paid'").await, 1);
        assert_eq!(env.count("SELECT reserved FROM stock WHERE article_id = 'early'").await, 0);
        assert_eq!(events(&env, "order.paid_late_settled").await.len(), 1);
        assert_eq!(outcome_of(&env, id, "stripe", "pi_1", "EUR").await, ("paid".to_owned(), false));
    });
}

#[test]
fn price_lowered_to_what_was_received_pays() {
    TestEnv::builder().without_broker().run(async |env| {
        let order = env.order(MINUTE).await;
        price(&env, 1_999).await;
        assert_eq!(outcome_of(&env, &order.id.to_string(), "stripe", "pi_1", "EUR").await.0, "partial");
        price(&env, 2_500).await;
        assert_eq!(env.status(&order).await, "unpaid");
        price(&env, 900).await;
        assert_eq!(env.status(&order).await, "paid");
        assert_eq!(env.count("SELECT amount_minor FROM late_payments WHERE reason = 'surplus'").await, 100);
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn order_refuses_what_no_payment_can_match() {
    TestEnv::builder().without_broker().run(async |env| {
        let _order = env.order(MINUTE).await;
        for (change, constraint) in [
            ("UPDATE orders SET currency = 'eur'", "the_currency_is_three_letters"),
            ("UPDATE orders SET amount_minor = -1", "an_order_costs_no_negative_amount"),
        ] {
            let refused = sqlx::raw_sql(change).execute(&env.pool).await.unwrap_err().to_string();
            assert!(refused.contains(constraint), "{refused}");
        }
    });
}
