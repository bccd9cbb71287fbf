//! The shop's own table of attempts to pay: what it says when an order falls due decides who asks, and what a provider has
//! decided stays.

use order_timeout::Settings;
use order_timeout::operations::orders_statements;
use order_timeout::postgres::{Database, kind_functions};
use order_timeout_core::kind::Kind;
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{EnvBuilder, TestEnv};

use sqlx::AssertSqlSafe;

use super::{execute, map, text};

/// Three overdue orders.
const OVERDUE: &str = "INSERT INTO spree.orders (number, expires_at)
    SELECT 'R' || n, clock_timestamp() AT TIME ZONE 'UTC' - interval '1 s' FROM generate_series(1, 3) n";

fn shop() -> EnvBuilder {
    TestEnv::builder().without_broker().settings(|settings| map(settings, "spree"))
}

async fn prepare(env: &TestEnv) {
    execute(env, &text("spree", "schema.sql")).await;
    let database = Database::connect(&env.settings.database, 2).await.unwrap();
    let statements = orders_statements::statements(&database, &env.settings, &Kind::ORDER).await.unwrap();
    kind_functions::install(&database, &statements.functions).await.unwrap();
    execute(env, OVERDUE).await;
}

/// What the close says of the three.
async fn close(env: &TestEnv) -> Result<Vec<String>, sqlx::Error> {
    sqlx::query_scalar("SELECT outcome FROM kind_order_close('{1,2,3}', 'sweep', false, false) ORDER BY order_id")
        .fetch_all(&env.pool)
        .await
}

async fn release(env: &TestEnv, order: i64) -> String {
    sqlx::query_scalar("SELECT release($1::text, 'the card was declined')")
        .bind(order)
        .fetch_one(&env.pool)
        .await
        .unwrap()
}

async fn ours(env: &TestEnv) -> Vec<(String, String, i64, String)> {
    sqlx::query_as("SELECT order_id, reference, amount_minor, state FROM payment_attempts ORDER BY reference")
        .fetch_all(&env.pool)
        .await
        .unwrap()
}

#[test]
fn open_attempt_of_shop_is_asked_about() {
    shop().run(async |env| {
        let env = &*env;
        prepare(env).await;
        let begin = "INSERT INTO spree.payments (order_id, number, amount, state, created_at) VALUES
            (1, 'P1', 49.90, 'pending', '2026-01-02 03:04:05'), (2, 'P2', 49.90, 'failed', '2026-01-02 03:04:05')";
        execute(env, begin).await;
        assert_eq!(close(env).await.unwrap(), ["claimed", "closed", "closed"]);
        assert_eq!(ours(env).await, [("1".into(), "P1".into(), 4_990, "open".into())]);
        let began =
            "SELECT count(*) FROM payment_attempts WHERE created_at = '2026-01-02 03:04:05+00' AND currency = 'CNY'";
        assert_eq!(env.count(began).await, 1);
        // While its provider is asked, the shop's word ends no attempt.
        execute(env, "UPDATE spree.payments SET state = 'failed'").await;
        assert_eq!(close(env).await.unwrap()[0], "closing");
        assert_eq!(ours(env).await.len(), 1);
    });
}

#[test]
fn failed_attempt_of_shop_can_be_retried() {
    shop().run(async |env| {
        let env = &*env;
        prepare(env).await;
        execute(env, "UPDATE spree.orders SET expires_at = expires_at + interval '1 h'").await;
        execute(env, "INSERT INTO spree.payments (order_id, number) VALUES (1, 'P1'), (2, 'P2')").await;
        assert_eq!(release(env, 1).await, "attempt_open");
        execute(env, "UPDATE spree.payments SET state = 'failed'").await;
        execute(env, "SELECT take_over_attempts('{1}', 'order')").await;
        assert_eq!(ours(env).await, []);
        execute(env, "UPDATE spree.payments SET state = 'processing' WHERE number = 'P1'").await;
        assert_eq!(release(env, 1).await, "attempt_open");
        assert_eq!(release(env, 2).await, "closed");
    });
}

#[test]
fn decided_attempts_of_shop_are_not_asked_again() {
    shop().run(async |env| {
        let env = &*env;
        prepare(env).await;
        execute(env, "INSERT INTO spree.payments (order_id, number) VALUES (1, 'proved'), (2, 'reported')").await;
        execute(env, "SELECT take_over_attempts('{1,2}', 'order')").await;
        execute(env, "UPDATE payment_attempts SET state = 'closed' WHERE reference = 'proved'").await;
        execute(env, "SELECT payment_received('2', 'card', 'reported', 1000, 'CNY')").await;
        execute(env, "DELETE FROM payment_attempts WHERE reference = 'reported'").await;
        assert_eq!(close(env).await.unwrap(), ["closed", "closed", "closed"]);
        assert_eq!(env.count("SELECT count(*) FROM late_payments").await, 1, "the part that was reported");
    });
}

#[test]
fn attempt_that_names_no_payment_is_refused() {
    shop().run(async |env| {
        let env = &*env;
        prepare(env).await;
        for (payments, sentence) in [
            ("(1, 'P1'), (2, 'P1')", "for order 2, and it is known for order 1; an attempt pays one order"),
            ("(1, NULL)", "order 1 without a provider or reference; leave it out of open"),
        ] {
            execute(env, "DELETE FROM spree.payments").await;
            execute(env, &format!("INSERT INTO spree.payments (order_id, number) VALUES {payments}")).await;
            let error = close(env).await.unwrap_err().to_string();
            assert!(error.contains("kinds.order.table.attempts has") && error.contains(sentence), "{error}");
        }
        // Also where the other order has ended.
        execute(env, "DELETE FROM spree.payments").await;
        execute(env, "INSERT INTO payment_attempts VALUES ('card', 'P1', '3', 4990, 'CNY', 'late')").await;
        execute(env, "INSERT INTO spree.payments (order_id, number) VALUES (1, 'P1')").await;
        let error = close(env).await.unwrap_err().to_string();
        assert!(error.contains("for order 1, and it is known for order 3"), "{error}");
        // And where its money was reported for another order: one payment of two orders, of which the shop reports one.
        execute(env, "DELETE FROM payment_attempts; SELECT payment_received('2', 'card', 'P1', 4990, 'CNY')").await;
        let error = close(env).await.unwrap_err().to_string();
        assert!(error.contains("for order 1, and it is known for order 2"), "{error}");
        let released = sqlx::query_scalar::<_, String>("SELECT release('1', 'no payment')").fetch_one(&env.pool).await;
        assert!(released.unwrap_err().to_string().contains("an attempt pays one order"));
    });
}

#[test]
fn attempt_of_shop_is_read_anew() {
    shop().run(async |env| {
        let env = &*env;
        prepare(env).await;
        execute(env, "INSERT INTO spree.payments (order_id, number, created_at) VALUES (1, 'P1', '2026-01-02')").await;
        assert_eq!(release(env, 1).await, "attempt_open");
        execute(env, "UPDATE spree.payments SET amount = 59.90, created_at = '2026-01-03'").await;
        assert_eq!(release(env, 1).await, "attempt_open");
        assert_eq!(ours(env).await, [("1".into(), "P1".into(), 5_990, "open".into())]);
        assert_eq!(
            env.count("SELECT count(*) FROM payment_attempts WHERE created_at = '2026-01-03 00:00:00+00'").await,
            1
        );
        // The shop has seen it paid, and the order's row does not say so yet.
        execute(env, "UPDATE spree.payments SET state = 'completed'").await;
        assert_eq!(close(env).await.unwrap()[0], "claimed");
    });
}

/// One payment of two orders that are closed at the same moment.
#[test]
fn attempt_of_two_orders_is_claimed_once() {
    shop().run(async |env| {
        let env = &*env;
        prepare(env).await;
        execute(env, "INSERT INTO spree.payments (order_id, number) VALUES (1, 'P1'), (2, 'P1')").await;
        let close = |order: &str| format!("SELECT outcome FROM kind_order_close('{{{order}}}', 'sweep', false, false)");
        let mut first = env.pool.begin().await.unwrap();
        let claimed: String = sqlx::query_scalar(AssertSqlSafe(close("1"))).fetch_one(&mut *first).await.unwrap();
        assert_eq!(claimed, "claimed");
        let pool = env.pool.clone();
        let second = tokio::spawn(async move { sqlx::raw_sql(AssertSqlSafe(close("2"))).execute(&pool).await });
        env.wait_for_lock_waiter().await;
        first.commit().await.unwrap();
        let refused = second.await.unwrap().unwrap_err().to_string();
        assert!(refused.contains("for order 2, and it is known for order 1"), "{refused}");
    });
}

#[test]
fn check_names_attempts_that_cannot_be_asked() {
    shop().run(async |env| {
        let env = &*env;
        prepare(env).await;
        execute(
            env,
            "UPDATE spree.orders SET expires_at = expires_at + interval '1 h'; DROP INDEX spree.payments_order",
        )
        .await;
        execute(env, "INSERT INTO spree.payments (order_id, number) VALUES (1, 'P1'), (2, 'P1')").await;
        let (code, said, error) = call_with(&env.settings, &["adopt", "--check"]).await;
        assert_eq!(code, 1, "{said}{error}");
        for part in [
            "no index of \"spree\".\"payments\" begins with \"order_id\"",
            "cannot be taken over: kinds.order.table.attempts has P1 of card for order 2, and it is known for order 1",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert_eq!(ours(env).await, []);
    });
}

/// The mapping has no status for a claimed order.
#[test]
fn claimed_order_is_explained_and_settled_with_reason() {
    let without_closing = |settings: &mut Settings| {
        map(settings, "spree");
        settings.kinds.get_mut(&Kind::ORDER).and_then(|kind| kind.table.as_mut()).unwrap().closing = None;
    };
    TestEnv::builder().without_broker().settings(without_closing).run(async |env| {
        let env = &*env;
        prepare(env).await;
        execute(env, "INSERT INTO spree.payments (order_id, number) VALUES (1, 'P1')").await;
        assert_eq!(close(env).await.unwrap()[0], "claimed");
        let refunded =
            "UPDATE close_attempts SET step = 'unresolved', unresolved_reason = 'refunded', unresolved_at = now()";
        execute(env, refunded).await;
        let (_, said, error) = call_with(&env.settings, &["explain", "1"]).await;
        assert!(said.contains("it is unresolved since") && said.contains("closing settle"), "{said}{error}");
        let settle = ["closing", "settle", "1", "--as", "closed", "--why", "the customer gave up"];
        let (code, said, error) = call_with(&env.settings, &settle).await;
        assert_eq!(code, 0, "{said}{error}");
        execute(env, "SELECT payment_received('1', 'card', 'late', 4990, 'CNY')").await;
        let (_, said, error) = call_with(&env.settings, &["explain", "1"]).await;
        for part in [
            "order.closed.v1 was written; it has not been announced yet; why: the customer gave up",
            "from card, reference late: late (closed)",
        ] {
            assert!(said.contains(part), "{part}: {said}{error}");
        }
    });
}

#[test]
fn worker_needs_one_right_for_attempts_of_shop() {
    shop().run(async |env| {
        let env = &*env;
        prepare(env).await;
        execute(env, "INSERT INTO spree.payments (order_id, number) VALUES (1, 'P1')").await;
        let ask = "DO $$ BEGIN
            CREATE ROLE ot_attempts_test; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
            GRANT USAGE ON SCHEMA public TO ot_attempts_test; GRANT SELECT ON payment_attempts TO ot_attempts_test";
        execute(env, ask).await;
        let asked = async || {
            let mut transaction = env.pool.begin().await.unwrap();
            sqlx::raw_sql("SET LOCAL ROLE ot_attempts_test").execute(&mut *transaction).await.unwrap();
            let asked: Result<String, _> =
                sqlx::query_scalar("SELECT order_id FROM orders_to_ask_about('{1}', 'order')")
                    .fetch_one(&mut *transaction)
                    .await;
            asked.map_err(|error| error.to_string())
        };
        assert!(asked().await.unwrap_err().contains("permission denied for function take_over_attempts"));
        execute(env, "GRANT EXECUTE ON FUNCTION take_over_attempts(text[], text) TO ot_attempts_test").await;
        assert_eq!(asked().await.unwrap(), "1");
        execute(env, "DROP OWNED BY ot_attempts_test; DROP ROLE ot_attempts_test").await;
    });
}
