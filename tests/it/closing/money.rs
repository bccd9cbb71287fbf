//! What the closing protocol does with money: each payment counts once, by a callback or by a provider's answer, and everything that pays for
//! nothing is in `late_payments`; all that an order has reserved comes back or is consumed.

use order_timeout::operations::unresolved::{self, Decision, DecisionError};
use order_timeout::postgres::Operator;
use order_timeout::postgres::selection::Selection;
use order_timeout_client::postgres::{LateReason, PaymentOutcome, PaymentVerdict, payment_received};
use order_timeout_core::payment::Attempt;
use sqlx::AssertSqlSafe;
use uuid::Uuid;

use super::*;

async fn execute(env: &TestEnv, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&env.pool).await.unwrap();
}

/// A callback of the provider `stripe`.
async fn report(env: &TestEnv, order: &Order, reference: &str, amount_minor: i64) -> PaymentOutcome {
    let attempt = Attempt { provider: "stripe".into(), reference: reference.into(), money: eur(amount_minor) };
    payment_received(&env.pool, order.id.to_string(), &attempt).await.unwrap()
}

/// What is late, with its reason, in the order in which it was recorded.
async fn late(env: &TestEnv) -> Vec<(String, String, i64)> {
    let select = "SELECT reference, reason, amount_minor FROM late_payments ORDER BY id";
    sqlx::query_as(select).fetch_all(&env.pool).await.unwrap()
}

fn one_late(reference: &str, reason: &str, amount_minor: i64) -> Vec<(String, String, i64)> {
    vec![(reference.to_owned(), reason.to_owned(), amount_minor)]
}

/// Each payment counts, or is late, and never both; no more counts toward an order than it costs.
async fn assert_money_adds_up(env: &TestEnv) {
    let wrong = "SELECT (SELECT count(*) FROM received_payments p
                         WHERE p.amount_minor <> p.counted_minor + coalesce((
                             SELECT sum(l.amount_minor) FROM late_payments l
                             WHERE l.provider = p.provider AND l.reference = p.reference AND l.state <> 'reopened'), 0))
                      + (SELECT count(*) FROM orders o
                         WHERE o.amount_minor < (
                             SELECT sum(p.counted_minor) FROM received_payments p WHERE p.order_id = o.id::text))";
    assert_eq!(env.count(wrong).await, 0);
    env.assert_ledger().await;
}

/// Reserves a coupon for each order.
async fn reserve_coupons(env: &TestEnv) {
    let reserve = "INSERT INTO reserved_resources SELECT 'coupon', 'SUMMER', 0, count(*) FROM orders;
                   INSERT INTO order_resources SELECT id, 'coupon', 'SUMMER', 1 FROM orders";
    execute(env, reserve).await;
}

async fn coupons(env: &TestEnv) -> (i64, i64) {
    sqlx::query_as("SELECT available, reserved FROM reserved_resources").fetch_one(&env.pool).await.unwrap()
}

#[test]
fn callback_after_settlement_counts_nothing() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        reserve_coupons(&env).await;
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &paid());
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        let again = report(&env, &order, "pi_1", 1_999).await;
        assert_eq!(again, PaymentOutcome { verdict: PaymentVerdict::Paid { surplus_minor: 0 }, is_new: false });
        let other = report(&env, &order, "pi_2", 1_999).await;
        let is_late = PaymentVerdict::Late { reason: LateReason::AlreadyPaid };
        assert_eq!(other, PaymentOutcome { verdict: is_late, is_new: true });
        assert_eq!(late(&env).await, one_late("pi_2", "already_paid", 1_999));
        assert_eq!(coupons(&env).await, (0, 0));
        assert_money_adds_up(&env).await;
    });
}

/// An order whose first attempt is paid, and what is late and in the history if the second is answered in this way.
fn settled_beside(answer: Answer, late_money: Vec<(String, String, i64)>, state: &'static str) {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        begin_attempt(&env, &order, "pi_2").await;
        execute(&env, "UPDATE orders SET amount_minor = 1999, currency = 'EUR'").await;
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &paid());
        provider.always("pi_2", &answer);
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(env.status(&order).await, "paid");
        assert_eq!(late(&env).await, late_money);
        let select = "SELECT state FROM payment_attempts WHERE reference = 'pi_2'";
        let found: String = sqlx::query_scalar(select).fetch_one(&env.pool).await.unwrap();
        assert_eq!(found, state);
        let refunds = env.count("SELECT count(*) FROM order_events WHERE event = 'payment_refunded'").await;
        assert_eq!(refunds, i64::from(state == "refunded"));
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn second_payment_is_late() {
    settled_beside(paid(), one_late("pi_2", "already_paid", 1_999), "late");
}

#[test]
fn differing_second_payment_is_late() {
    settled_beside(Answer::Paid { money: Some(eur(77)) }, one_late("pi_2", "already_paid", 77), "late");
}

#[test]
fn refunded_second_payment_is_in_history() {
    settled_beside(Answer::Refunded, vec![], "refunded");
}

#[test]
fn part_payment_and_attempt_pay_order() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        execute(&env, "UPDATE orders SET amount_minor = 3000, currency = 'EUR'").await;
        let _ = report(&env, &order, "pi_0", 1_500).await;
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &paid());
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(env.status(&order).await, "paid");
        assert_eq!(late(&env).await, one_late("pi_1", "surplus", 499));
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn money_for_closed_order_is_late() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &paid());
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        driver.run_until_step(Step::Asked).await;
        let close =
            "UPDATE orders SET status = 'closed', closed_at = now(), closed_by = 'manual', close_reason = 'test';
                     UPDATE stock SET reserved = 0, available = 1000000 WHERE article_id = 'article'";
        execute(&env, close).await;
        drop(driver);
        let mut other = Driver::start(&env, provider.clone()).await;
        run_to_end(&env, &mut other).await;
        assert_eq!(late(&env).await, one_late("pi_1", "closed", 1_999));
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn close_returns_all_that_is_reserved() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        execute(&env, "UPDATE orders SET amount_minor = 1999, currency = 'EUR'").await;
        reserve_coupons(&env).await;
        let _ = report(&env, &order, "pi_0", 500).await;
        let provider = Arc::new(Provider::default());
        provider.open("pi_1");
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(env.status(&order).await, "closed");
        assert_eq!(coupons(&env).await, (1, 0));
        assert_eq!(late(&env).await, one_late("pi_0", "part_payment", 500));
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn locked_stock_delays_no_other_settlement() {
    TestEnv::builder()
        .without_broker()
        .settings(|settings| settings.database.lock_timeout = Duration::from_millis(200))
        .run(async move |env| {
            env.stock("locked", 10).await;
            let locked = env.orders_of("locked", 1, Duration::ZERO).await;
            let others = env.orders(5, Duration::ZERO).await;
            let provider = Arc::new(Provider::default());
            for (n, order) in locked.iter().chain(&others).enumerate() {
                begin_attempt(&env, order, &format!("pi_{n}")).await;
                provider.always(&format!("pi_{n}"), &paid());
            }
            let mut holder = env.pool.begin().await.unwrap();
            sqlx::raw_sql("SELECT FROM stock WHERE article_id = 'locked' FOR UPDATE")
                .execute(&mut *holder)
                .await
                .unwrap();
            let mut driver = Driver::start(&env, provider.clone()).await;
            driver.deliver(&locked).await;
            driver.deliver(&others).await;
            driver.run_until(&env, "SELECT count(*) FROM orders WHERE status = 'paid'", 5).await;
            assert_eq!(env.status(&locked[0]).await, "closing");
            holder.rollback().await.unwrap();
            run_to_end(&env, &mut driver).await;
            assert_eq!(env.count("SELECT count(*) FROM orders WHERE status = 'paid'").await, 6);
            assert_money_adds_up(&env).await;
        });
}

#[test]
fn attempt_in_upper_case_is_asked_about() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = env.order(Duration::ZERO).await;
        let insert = "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
                      VALUES ('stripe', 'pi_1', $1, 1999, 'EUR')";
        sqlx::query(insert).bind(order.id.to_string().to_uppercase()).execute(&env.pool).await.unwrap();
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &paid());
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(env.status(&order).await, "paid");
    });
}

#[test]
fn late_attempt_is_not_asked_about() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        execute(&env, "UPDATE order_timeout_settings SET pay_after_deadline = false").await;
        let _ = report(&env, &order, "pi_1", 1_999).await;
        let provider = Arc::new(Provider::default());
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(env.status(&order).await, "closed");
        assert_eq!(late(&env).await, one_late("pi_1", "after_deadline", 1_999));
    });
}

#[test]
fn absent_attempt_that_expired_is_closed() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        execute(&env, "UPDATE payment_attempts SET payable_until = now() - interval '1 hour'").await;
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &Answer::Absent);
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(env.status(&order).await, "closed");
    });
}

#[test]
fn calls_not_made_never_end_in_unresolved() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        let not_asked = Answer::Unknown(Unknown { why: "circuit open".into(), retry_after: None, was_asked: false });
        let answers = vec![not_asked; 5].into_iter().chain([Answer::Open]);
        provider.script("pi_1", CallKind::Ask, answers);
        provider.script("pi_1", CallKind::Cancel, [Answer::Closed]);
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(env.status(&order).await, "closed");
        assert_eq!(provider.calls(CallKind::Ask), 6);
    });
}

#[test]
fn unresolved_order_is_retried() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &unknown());
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        driver.run_until(&env, UNRESOLVED, 1).await;
        let database = Database::connect(&env.settings.database, 1).await.unwrap();
        let listed = unresolved::list(&database, None, 10).await.unwrap().rows;
        assert_eq!((listed[0].order_id.as_str(), listed[0].reason.as_str()), (&*order.id.to_string(), "no_answer"));
        provider.open("pi_1");
        let operator = Operator { who: "ann".into(), why: Some("it answers again".into()), run: Uuid::now_v7() };
        let ids = vec![order.order_id()];
        let chosen = Selection::Ids(ids);
        let retried = unresolved::retry(&database, &chosen, &operator).await.unwrap();
        assert_eq!(retried, [order.id.to_string()]);
        assert_eq!(unresolved::retry(&database, &chosen, &operator).await.unwrap(), Vec::<String>::new());
        run_to_end(&env, &mut driver).await;
        assert_eq!(env.status(&order).await, "closed");
        assert_eq!(env.count("SELECT count(*) FROM order_events WHERE event = 'closed' AND who = 'ann'").await, 1);
    });
}

/// An order that is unresolved because its provider gave no answer, and the operator who decides it.
async fn without_answer(env: &TestEnv) -> (Order, Database, Operator) {
    let order = order_with_attempt(env, "pi_1").await;
    execute(env, "UPDATE orders SET amount_minor = 1999, currency = 'EUR'").await;
    let provider = Arc::new(Provider::default());
    provider.always("pi_1", &unknown());
    let mut driver = Driver::start(env, provider).await;
    driver.deliver(&[order]).await;
    driver.run_until(env, UNRESOLVED, 1).await;
    let operator = Operator { who: "ann".into(), why: Some("asked the bank".into()), run: Uuid::now_v7() };
    (order, Database::connect(&env.settings.database, 1).await.unwrap(), operator)
}

#[test]
fn unresolved_order_is_closed_by_hand() {
    TestEnv::builder().without_broker().run(async move |env| {
        let (order, database, operator) = without_answer(&env).await;
        let of = claimed_kind(&database, &env.settings, &Kind::ORDER).await.unwrap();
        let decide = async || unresolved::decide(&database, &of, &order.order_id(), Decision::Closed, &operator).await;
        decide().await.unwrap();
        assert_eq!(env.status(&order).await, "closed");
        let history = "SELECT count(*) FROM order_events
                       WHERE event = 'closed' AND by = 'manual' AND who = 'ann' AND why = 'asked the bank'";
        assert_eq!(env.count(history).await, 1);
        assert_eq!(env.count("SELECT count(*) FROM payment_attempts WHERE state = 'closed'").await, 1);
        assert_eq!(env.count("SELECT count(*) FROM close_attempts").await, 0);
        let again = decide().await.unwrap_err();
        assert!(matches!(again, DecisionError::NotUnresolved(_)), "{again}");
        assert_money_adds_up(&env).await;
        env.assert_ledger().await;
    });
}

#[test]
fn unresolved_order_is_paid_by_hand() {
    TestEnv::builder().without_broker().run(async move |env| {
        let (order, database, operator) = without_answer(&env).await;
        let of = claimed_kind(&database, &env.settings, &Kind::ORDER).await.unwrap();
        let decide = async |decision| unresolved::decide(&database, &of, &order.order_id(), decision, &operator).await;
        let other = decide(Decision::Paid { reference: Some("pi_2") }).await.unwrap_err();
        assert!(matches!(other, DecisionError::NoSuchAttempt { .. }), "{other}");
        assert_eq!(env.count(UNRESOLVED).await, 1, "as it was");
        decide(Decision::Paid { reference: None }).await.unwrap();
        assert_eq!(env.status(&order).await, "paid");
        let history =
            "SELECT count(*) FROM order_events WHERE event = 'paid' AND answers = 'decided by ann: asked the bank'";
        assert_eq!(env.count(history).await, 1);
        // The callback that was missing.
        assert!(!report(&env, &order, "pi_1", 1_999).await.is_new);
        assert_eq!(late(&env).await, []);
        assert_money_adds_up(&env).await;
        env.assert_ledger().await;
    });
}

#[test]
fn callback_ends_unresolved_order() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &unknown());
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        driver.run_until(&env, UNRESOLVED, 1).await;
        let _ = report(&env, &order, "pi_1", 1_999).await;
        assert_eq!(env.count(UNFINISHED).await, 0);
        assert_money_adds_up(&env).await;
    });
}

#[test]
fn kept_order_is_listed_as_refused() {
    TestEnv::builder().without_broker().run(async move |env| {
        let orders = env.orders(3, Duration::ZERO).await;
        let keep = "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS
                    $$ BEGIN IF OLD.status = 'closing' AND OLD.id = ANY (TG_ARGV::uuid[]) THEN RETURN NULL; END IF;
                       RETURN NEW; END $$;";
        let trigger = format!(
            "CREATE TRIGGER keep BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION keep('{}')",
            orders[0].id
        );
        execute(&env, &format!("{keep} {trigger}")).await;
        let provider = Arc::new(Provider::default());
        begin_closed_attempts(&env, &orders, &provider).await;
        let mut driver = Driver::start(&env, provider).await;
        driver.deliver(&orders).await;
        driver.run_until(&env, "SELECT count(*) FROM close_attempts WHERE unresolved_reason = 'refused'", 1).await;
        assert_eq!(env.closed().await, 2);
    });
}

#[test]
fn order_without_deadline_is_listed_alone() {
    TestEnv::builder().without_broker().run(async move |env| {
        let orders = env.orders(3, Duration::ZERO).await;
        let provider = Arc::new(Provider::default());
        begin_closed_attempts(&env, &orders, &provider).await;
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&orders).await;
        driver.run_until_step(Step::Claimed).await;
        drop(driver);
        execute(&env, &format!("UPDATE orders SET expires_at = NULL WHERE id = '{}'", orders[0].id)).await;
        let mut driver = Driver::start(&env, provider).await;
        driver.run_until(&env, "SELECT count(*) FROM close_attempts WHERE unresolved_reason = 'no_deadline'", 1).await;
        driver.run_until(&env, "SELECT count(*) FROM orders WHERE status = 'closed'", 2).await;
    });
}
