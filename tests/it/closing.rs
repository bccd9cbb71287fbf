//! The closing protocol with a payment provider, on a real database: no order is closed despite money, stock comes back
//! only with proof, an order is settled once, and a worker that is killed between any two steps leaves work that another
//! one finishes in the same way.

#[path = "closing/driver.rs"]
mod driver;
#[path = "closing/mapped.rs"]
mod mapped;
#[path = "closing/money.rs"]
mod money;

use std::sync::Arc;
use std::time::Duration;

use order_timeout::effects::closing::ClosingEffects;
use order_timeout::observe::inspect::schema::Schema;
use order_timeout::observe::inspect::sentence;
use order_timeout::operations::orders_statements::claimed_kind;
use order_timeout::postgres::Database;
use order_timeout_core::engine::{CallKind, ClosingAction, ClosingInput, ClosingPolicy, Lease, ResumePage};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::OrderId;
use order_timeout_core::payment::{Answer, Currency, Money, Unknown};
use order_timeout_testkit::payment_service::{PaymentService, wide_limits};
use order_timeout_testkit::{Order, TestEnv, wait_for};

use driver::{Driver, LEASE, Provider, Step, closing_policy};

fn eur(amount_minor: i64) -> Money {
    Money { amount_minor, currency: Currency::new("EUR").unwrap() }
}

fn paid() -> Answer {
    Answer::Paid { money: Some(eur(1_999)) }
}

fn unknown() -> Answer {
    Answer::Unknown(Unknown { why: "no answer in time".into(), retry_after: None, was_asked: true })
}

/// An attempt to pay the order with 19.99 EUR at the provider `stripe`.
async fn begin_attempt(env: &TestEnv, order: &Order, reference: &str) {
    begin_attempt_at(env, order, "stripe", reference).await;
}

async fn begin_attempt_at(env: &TestEnv, order: &Order, provider: &str, reference: &str) {
    sqlx::query(
        "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
         VALUES ($1, $2, $3, 1999, 'EUR')",
    )
    .bind(provider)
    .bind(reference)
    .bind(order.id.to_string())
    .execute(&env.pool)
    .await
    .unwrap();
}

/// An overdue order with one attempt of this reference.
async fn order_with_attempt(env: &TestEnv, reference: &str) -> Order {
    let order = env.order(Duration::ZERO).await;
    begin_attempt(env, &order, reference).await;
    order
}

/// An attempt for each of these orders, which can never be paid any more.
async fn begin_closed_attempts(env: &TestEnv, orders: &[Order], provider: &Provider) {
    for order in orders {
        let reference = format!("pi_{}", order.id);
        begin_attempt(env, order, &reference).await;
        provider.always(&reference, &Answer::Closed);
    }
}

/// Orders that have not ended, and claims that are left.
const UNFINISHED: &str = "SELECT (SELECT count(*) FROM orders WHERE status IN ('unpaid', 'closing'))
                               + (SELECT count(*) FROM close_attempts)";

const UNRESOLVED: &str = "SELECT count(*) FROM close_attempts WHERE unresolved_at IS NOT NULL";

async fn run_to_end(env: &TestEnv, driver: &mut Driver) {
    driver.run_until(env, UNFINISHED, 0).await;
}

/// Everything that the end of an order leaves: status, stock, histories, events, attempts.
async fn end_state(env: &TestEnv) -> String {
    sqlx::query_scalar(
        "SELECT concat_ws(' | ',
             (SELECT string_agg(status::text, ' ' ORDER BY id) FROM orders),
             (SELECT string_agg(available || '/' || reserved, ' ') FROM stock),
             (SELECT string_agg(event || ' by ' || by, ', ' ORDER BY id) FROM order_events),
             (SELECT string_agg(type, ', ' ORDER BY created_at) FROM event_outbox),
             (SELECT string_agg(reference || ' ' || state, ', ' ORDER BY reference) FROM payment_attempts),
             (SELECT count(*) FROM close_attempts) || ' left')",
    )
    .fetch_one(&env.pool)
    .await
    .unwrap()
}

const CLOSED: &str = "closed | 1000000/0 | closed by alarm | order.closed.v1 | pi_1 closed | 0 left";
const SETTLED: &str = "paid | 999999/0 | paid by provider | order.paid_late_settled.v1 | pi_1 paid | 0 left";

#[test]
fn unpaid_order_is_cancelled_then_closed() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.open("pi_1");
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(end_state(&env).await, CLOSED);
        assert_eq!((provider.calls(CallKind::Ask), provider.calls(CallKind::Cancel)), (1, 1));
        assert_eq!(driver.acknowledged(), 1);
        let answers: String =
            sqlx::query_scalar("SELECT answers FROM order_events").fetch_one(&env.pool).await.unwrap();
        assert_eq!(answers, "stripe pi_1 ask: open; stripe pi_1 cancel: closed");
        env.assert_ledger().await;
    });
}

#[test]
fn paid_order_is_settled() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &paid());
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(end_state(&env).await, SETTLED);
        assert_eq!((provider.calls(CallKind::Ask), provider.calls(CallKind::Cancel)), (1, 0));
        let attempts = "SELECT count(*) FROM event_outbox WHERE payload->'attempts'->0->>'reference' = 'pi_1'";
        assert_eq!(env.count(attempts).await, 1);
        env.assert_ledger().await;
    });
}

#[test]
fn payment_that_beats_cancel_is_settled() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.script("pi_1", CallKind::Ask, [Answer::Open]);
        provider.script("pi_1", CallKind::Cancel, [paid()]);
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(end_state(&env).await, SETTLED);
    });
}

#[test]
fn order_without_attempts_is_closed() {
    TestEnv::builder().without_broker().run(async move |env| {
        let orders = env.orders(250, Duration::ZERO).await;
        let provider = Arc::new(Provider::default());
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&orders).await;
        run_to_end(&env, &mut driver).await;
        while driver.acknowledged() < 250 {
            driver.turn(None).await;
        }
        assert_eq!((env.closed().await, driver.acknowledged()), (250, 250));
        env.assert_ledger().await;
    });
}

// ------------------------------------------------------------------------------------------------ kill -9

/// Ends a worker after this step; another one must bring the order to the same end.
fn killed_after(step: Step, answers: (Answer, Answer), end: &'static str, calls: (usize, usize)) {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.script("pi_1", CallKind::Ask, [answers.0]);
        provider.script("pi_1", CallKind::Cancel, [answers.1]);
        let mut killed = Driver::start(&env, provider.clone()).await;
        killed.deliver(&[order]).await;
        killed.run_until_step(step).await;
        drop(killed);
        let mut other = Driver::start(&env, provider.clone()).await;
        // The broker delivers what was not acknowledged again.
        other.deliver(&[order]).await;
        run_to_end(&env, &mut other).await;
        assert_eq!(end_state(&env).await, end);
        assert_eq!((provider.calls(CallKind::Ask), provider.calls(CallKind::Cancel)), calls);
        env.assert_ledger().await;
    });
}

#[test]
fn kill_after_claim_closes_once() {
    killed_after(Step::Claimed, (Answer::Open, Answer::Closed), CLOSED, (1, 1));
}

#[test]
fn kill_after_takeover_closes_once() {
    killed_after(Step::TakenOver, (Answer::Open, Answer::Closed), CLOSED, (1, 1));
}

#[test]
fn kill_after_ask_closes_once() {
    killed_after(Step::Asked, (Answer::Open, Answer::Closed), CLOSED, (2, 1));
}

#[test]
fn kill_after_cancel_closes_once() {
    killed_after(Step::Cancelled, (Answer::Open, Answer::Closed), CLOSED, (2, 1));
}

#[test]
fn kill_after_paid_cancel_settles() {
    killed_after(Step::Cancelled, (Answer::Open, paid()), SETTLED, (2, 1));
}

#[test]
fn kill_after_close_closes_once() {
    killed_after(Step::Closed, (Answer::Open, Answer::Closed), CLOSED, (1, 1));
}

#[test]
fn kill_after_paid_answer_settles_once() {
    killed_after(Step::Asked, (paid(), paid()), SETTLED, (2, 0));
}

#[test]
fn kill_after_settlement_settles_once() {
    killed_after(Step::SettledAsPaid, (paid(), paid()), SETTLED, (1, 0));
}

#[test]
fn kill_after_postponement_closes_once() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.script("pi_1", CallKind::Ask, [unknown(), Answer::Open]);
        provider.script("pi_1", CallKind::Cancel, [Answer::Closed]);
        let mut killed = Driver::start(&env, provider.clone()).await;
        killed.deliver(&[order]).await;
        killed.run_until_step(Step::Postponed).await;
        drop(killed);
        assert_eq!(env.count("SELECT rounds::bigint FROM close_attempts WHERE step = 'no_answer'").await, 1);
        let mut other = Driver::start(&env, provider.clone()).await;
        run_to_end(&env, &mut other).await;
        assert_eq!(end_state(&env).await, CLOSED);
        assert_eq!((provider.calls(CallKind::Ask), provider.calls(CallKind::Cancel)), (2, 1));
    });
}

// --------------------------------------------------------------------------------------------- no guessing

/// The order stays `closing` with its stock, and is listed for this reason.
async fn assert_unresolved(env: &TestEnv, driver: &mut Driver, reason: &'static str) {
    driver.run_until(env, UNRESOLVED, 1).await;
    let found: String =
        sqlx::query_scalar("SELECT unresolved_reason FROM close_attempts").fetch_one(&env.pool).await.unwrap();
    assert_eq!(found, reason);
    assert_eq!(env.count("SELECT count(*) FROM orders WHERE status = 'closing'").await, 1);
    assert_eq!(env.count("SELECT reserved FROM stock WHERE article_id = 'article'").await, 1);
    assert_eq!(env.count("SELECT count(*) FROM event_outbox WHERE type = 'order.unresolved.v1'").await, 1);
    assert_eq!(env.count("SELECT count(*) FROM event_outbox").await, 1);
}

/// An order of 19.99 EUR whose only attempt has this answer to both calls.
fn unresolved_by(answer: Answer, reason: &'static str) {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &answer);
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        assert_unresolved(&env, &mut driver, reason).await;
        env.assert_ledger().await;
    });
}

#[test]
fn missing_answers_keep_stock_reserved() {
    unresolved_by(unknown(), "no_answer");
}

#[test]
fn unknown_attempt_keeps_stock_reserved() {
    unresolved_by(Answer::Absent, "no_answer");
}

#[test]
fn payment_forever_in_progress_is_listed() {
    unresolved_by(Answer::InProgress, "no_answer");
}

#[test]
fn other_amount_is_listed() {
    unresolved_by(Answer::Paid { money: Some(eur(1_998)) }, "amount_differs");
}

#[test]
fn refunded_payment_is_listed() {
    unresolved_by(Answer::Refunded, "refunded");
}

#[test]
fn part_of_total_never_pays_order() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        sqlx::raw_sql("UPDATE orders SET amount_minor = 5000, currency = 'EUR'").execute(&env.pool).await.unwrap();
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &paid());
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        assert_unresolved(&env, &mut driver, "amount_differs").await;
    });
}

/// The documented case: a part was paid and reported, and the attempt at the rest was abandoned.
#[test]
fn reported_part_is_late_after_the_close() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        begin_attempt(&env, &order, "pi_2").await;
        sqlx::raw_sql("UPDATE orders SET amount_minor = 5000, currency = 'EUR'").execute(&env.pool).await.unwrap();
        let report = "SELECT payment_received($1, 'stripe', 'pi_1', 1999, 'EUR')";
        sqlx::query(report).bind(order.id.to_string()).execute(&env.pool).await.unwrap();
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &paid());
        provider.always("pi_2", &Answer::Closed);
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(env.status(&order).await, "closed");
        assert_eq!(env.count("SELECT amount_minor FROM late_payments WHERE reason = 'part_payment'").await, 1_999);
        assert_eq!(env.count("SELECT count(*) FROM payment_attempts WHERE state IN ('open', 'paid')").await, 0);
    });
}

#[test]
fn parts_that_cover_total_pay_order() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        begin_attempt(&env, &order, "pi_2").await;
        sqlx::raw_sql("UPDATE orders SET amount_minor = 3000, currency = 'EUR'").execute(&env.pool).await.unwrap();
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &paid());
        provider.always("pi_2", &paid());
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(env.status(&order).await, "paid");
        let surplus = "SELECT (payload->>'surplus_minor')::bigint FROM event_outbox WHERE routing_key = 'order.paid_late_settled'";
        assert_eq!(env.count(surplus).await, 998);
    });
}

#[test]
fn closed_attempt_does_not_decide_order() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "cs_old").await;
        begin_attempt(&env, &order, "cs_new").await;
        let provider = Arc::new(Provider::default());
        provider.always("cs_old", &Answer::Closed);
        provider.always("cs_new", &paid());
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(env.status(&order).await, "paid");
        assert_eq!(env.count("SELECT count(*) FROM payment_attempts WHERE state = 'closed'").await, 1);
    });
}

#[test]
fn proved_attempt_is_not_asked_again() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "a").await;
        begin_attempt(&env, &order, "b").await;
        let provider = Arc::new(Provider::default());
        provider.open("a");
        provider.script("b", CallKind::Ask, [unknown(), Answer::Open]);
        provider.script("b", CallKind::Cancel, [Answer::Closed]);
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(env.status(&order).await, "closed");
        assert_eq!(provider.calls_about("a", CallKind::Ask), 1);
        assert_eq!(provider.calls_about("b", CallKind::Ask), 2);
    });
}

#[test]
fn attempt_begun_meanwhile_is_asked_about() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.open("pi_1");
        provider.open("pi_2");
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        while provider.calls(CallKind::Ask) == 0 {
            driver.turn(None).await;
        }
        // By a shop that does not look at the order's row under its lock.
        begin_attempt(&env, &order, "pi_2").await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(env.status(&order).await, "closed");
        assert_eq!(provider.calls_about("pi_2", CallKind::Cancel), 1);
        assert_eq!(provider.calls_about("pi_1", CallKind::Ask), 1, "proved before");
    });
}

#[test]
fn refused_close_is_listed_alone() {
    TestEnv::builder().without_broker().run(async move |env| {
        env.stock("refused", 10).await;
        let refused = env.orders_of("refused", 1, Duration::ZERO).await;
        let others = env.orders(20, Duration::ZERO).await;
        let provider = Arc::new(Provider::default());
        begin_closed_attempts(&env, &refused, &provider).await;
        begin_closed_attempts(&env, &others, &provider).await;
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&refused).await;
        driver.deliver(&others).await;
        driver.run_until_step(Step::Claimed).await;
        env.refuse_to_close("refused").await;
        drop(driver);
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&refused).await;
        driver.deliver(&others).await;
        driver.run_until(&env, "SELECT count(*) FROM close_attempts WHERE unresolved_reason = 'refused'", 1).await;
        driver.run_until(&env, "SELECT count(*) FROM orders WHERE status = 'closed'", 20).await;
    });
}

// ------------------------------------------------------------------------------------- others, meanwhile

#[test]
fn payment_while_closing_wins() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.open("pi_1");
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        driver.run_until_step(Step::Asked).await;
        let pay = "UPDATE orders SET status = 'paid', paid_at = clock_timestamp() WHERE status = 'closing';
                   UPDATE stock SET reserved = reserved - 1 WHERE article_id = 'article'";
        sqlx::raw_sql(pay).execute(&env.pool).await.unwrap();
        drop(driver);
        let mut other = Driver::start(&env, provider.clone()).await;
        run_to_end(&env, &mut other).await;
        assert_eq!(env.status(&order).await, "paid");
        assert_eq!(env.count("SELECT count(*) FROM event_outbox").await, 0);
        env.assert_ledger().await;
    });
}

#[test]
fn expired_lease_changes_nothing() {
    TestEnv::builder().without_broker().with_clock().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.script("pi_1", CallKind::Ask, [Answer::Open, unknown()]);
        provider.script("pi_1", CallKind::Cancel, [unknown(), unknown()]);
        let mut slow = Driver::start(&env, provider.clone()).await;
        slow.deliver(&[order]).await;
        // Its next step is to write down that an answer is missing.
        slow.turn(None).await;
        while provider.calls(CallKind::Cancel) == 0 {
            slow.turn(None).await;
        }
        env.advance(LEASE).await;
        let mut other = Driver::start(&env, provider.clone()).await;
        other.run_until_step(Step::TakenOver).await;
        let lease = env.count("SELECT lease FROM close_attempts").await;
        slow.turn(None).await;
        slow.turn(None).await;
        assert_eq!(env.count("SELECT rounds::bigint FROM close_attempts").await, 0, "nothing was written");
        assert_eq!(env.count("SELECT lease FROM close_attempts").await, lease);
    });
}

#[test]
fn workers_share_orders_without_repeating_calls() {
    TestEnv::builder().without_broker().run(async move |env| {
        let orders = env.orders(200, Duration::ZERO).await;
        let provider = Arc::new(Provider::default());
        for (n, order) in orders.iter().enumerate() {
            begin_attempt(&env, order, &format!("pi_{n}")).await;
            provider.open(&format!("pi_{n}"));
        }
        let policy = || ClosingPolicy {
            lease: Duration::from_secs(60),
            queues: [("stripe".to_owned(), 20)].into(),
            ..closing_policy()
        };
        let mut drivers = Vec::new();
        for _ in 0..2 {
            let mut driver = Driver::start_with(&env, provider.clone(), policy()).await;
            driver.deliver(&orders).await;
            drivers.push(driver);
        }
        let (mut second, mut first) = (drivers.pop().unwrap(), drivers.pop().unwrap());
        tokio::join!(run_to_end(&env, &mut first), run_to_end(&env, &mut second));
        assert_eq!((provider.calls(CallKind::Ask), provider.calls(CallKind::Cancel)), (200, 200));
        assert_eq!((env.closed().await, first.acknowledged(), second.acknowledged()), (200, 200, 200));
        env.assert_ledger().await;
    });
}

#[test]
fn stopped_worker_gives_orders_back() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.open("pi_1");
        let policy = || ClosingPolicy { lease: Duration::from_secs(3_600), ..closing_policy() };
        let mut driver = Driver::start_with(&env, provider.clone(), policy()).await;
        driver.deliver(&[order]).await;
        let leased = "SELECT count(*) FROM close_attempts WHERE lease IS NOT NULL";
        while env.count(leased).await == 0 {
            driver.turn(None).await;
        }
        driver.stop().await;
        assert_eq!(env.count(leased).await, 0);
        let mut other = Driver::start_with(&env, provider.clone(), policy()).await;
        run_to_end(&env, &mut other).await;
        assert_eq!(env.status(&order).await, "closed");
    });
}

#[test]
fn lease_outlives_no_crash_for_long() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.open("pi_1");
        let mut killed = Driver::start(&env, provider.clone()).await;
        killed.deliver(&[order]).await;
        killed.run_until_step(Step::TakenOver).await;
        drop(killed);
        let left =
            "SELECT (extract(epoch FROM next_attempt_at - clock_timestamp()) * 1000)::bigint FROM close_attempts";
        assert!(env.count(left).await <= i64::try_from(LEASE.as_millis()).unwrap());
    });
}

#[test]
fn renewed_lease_is_not_taken_over() {
    TestEnv::builder().without_broker().with_clock().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.open("pi_1");
        let mut killed = Driver::start(&env, provider.clone()).await;
        killed.deliver(&[order]).await;
        killed.run_until_step(Step::TakenOver).await;
        let database = Database::connect(&env.settings.database, 1).await.unwrap();
        let of = claimed_kind(&database, &env.settings, &Kind::ORDER).await.unwrap();
        let effects = ClosingEffects::new(database, of, provider);
        let page = async |lease: Duration, renewed: Vec<(OrderId, Lease)>| {
            let limits = vec![("stripe".to_owned(), 10)];
            match effects.run(ClosingAction::Resume(ResumePage { lease, limits, renewed })).await {
                ClosingInput::Resumed(claims) => claims.len(),
                other => panic!("{other:?}"),
            }
        };
        let lease = Lease(env.count("SELECT lease FROM close_attempts").await);
        let hour = Duration::from_secs(3_600);
        assert_eq!(page(hour, vec![(order.order_id(), lease)]).await, 0);
        let left = "SELECT (extract(epoch FROM next_attempt_at - clock_timestamp()))::bigint FROM close_attempts";
        assert!(env.count(left).await > 3_000);
        env.advance(hour).await;
        assert_eq!(page(hour, vec![(order.order_id(), lease)]).await, 0, "it goes on, though late");
        assert_eq!(env.count("SELECT lease FROM close_attempts").await, lease.0);
        assert_eq!(page(hour, vec![]).await, 0, "another worker finds it leased");
        sqlx::raw_sql("UPDATE close_attempts SET next_attempt_at = now(), lease = 7").execute(&env.pool).await.unwrap();
        assert_eq!(page(hour, vec![(order.order_id(), lease)]).await, 0, "its lease is lost");
        assert_eq!(page(hour, vec![]).await, 1);
    });
}

/// Of an attempt that is committed after the close statement has begun, and before it looks.
#[test]
fn attempts_are_looked_for_with_own_snapshot() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = env.order(Duration::ZERO).await;
        let mut holder = env.pool.acquire().await.unwrap();
        sqlx::raw_sql("SELECT pg_advisory_lock(7)").execute(&mut *holder).await.unwrap();
        let (pool, id) = (env.pool.clone(), order.id);
        let looking = tokio::spawn(async move {
            let look = "WITH lock AS MATERIALIZED (SELECT pg_advisory_xact_lock(7))
                        SELECT (SELECT count(*) FROM payment_attempts), count(*)
                        FROM lock CROSS JOIN LATERAL orders_to_ask_about(ARRAY[$1::uuid::text])";
            sqlx::query_as::<_, (i64, i64)>(look).bind(id).fetch_one(&pool).await.unwrap()
        });
        let waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted
                     AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
        wait_for("the statement", async || env.count(waits).await == 1).await;
        begin_attempt(&env, &order, "pi_1").await;
        sqlx::raw_sql("SELECT pg_advisory_unlock(7)").execute(&mut *holder).await.unwrap();
        assert_eq!(looking.await.unwrap(), (0, 1));
    });
}

#[test]
fn schema_has_what_provider_needs() {
    TestEnv::builder().without_broker().run(async move |env| {
        let database = Database::connect(&env.settings.database, 1).await.unwrap();
        let mut settings = env.settings.clone();
        PaymentService::start().join(&mut settings, "card", wide_limits());
        let schema = Schema::new(&settings);
        let missing = schema.look(&database).await.unwrap().into_iter().find_map(|(_, faults)| sentence(&faults));
        assert_eq!(missing, None);
        sqlx::raw_sql("DROP INDEX close_attempts_due").execute(&env.pool).await.unwrap();
        let missing = schema.look(&database).await.unwrap().into_iter().find_map(|(_, faults)| sentence(&faults));
        let says_so = |why: &String| why.contains("the index of claimed orders is missing");
        assert!(missing.as_ref().is_some_and(says_so), "{missing:?}");
    });
}

#[test]
fn order_made_unpaid_again_is_claimed_anew() {
    TestEnv::builder().without_broker().run(async move |env| {
        let order = order_with_attempt(&env, "pi_1").await;
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &Answer::Refunded);
        let mut driver = Driver::start(&env, provider.clone()).await;
        driver.deliver(&[order]).await;
        driver.run_until(&env, UNRESOLVED, 1).await;
        sqlx::raw_sql("UPDATE orders SET status = 'unpaid'").execute(&env.pool).await.unwrap();
        provider.open("pi_1");
        driver.deliver(&[order]).await;
        run_to_end(&env, &mut driver).await;
        assert_eq!(env.status(&order).await, "closed");
    });
}
