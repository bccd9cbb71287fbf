//! The closing protocol on a table of the shop's own: the same promises as on the default tables, with a status for orders
//! whose provider is asked and without one; and payments, which the functions of its mapping count.

use config::{Config, File, FileFormat};
use order_timeout::Settings;
use order_timeout::config::kinds::TableSettings;
use order_timeout::effects::sweep::Sweeper;
use order_timeout::operations::late_payments::{self, ReopenedOrder};
use order_timeout::operations::orders_statements;
use order_timeout::operations::unresolved::{self, Decision};
use order_timeout::postgres::{Operator, kind_functions};
use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::order::{SweepPage, SweepReach, Timestamp};
use order_timeout_testkit::EnvBuilder;
use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use super::*;

const SHOP: &str = "
    CREATE SCHEMA shop;
    CREATE TABLE shop.orders (
        nr bigint PRIMARY KEY, state text NOT NULL DEFAULT 'open', total numeric(10, 2) NOT NULL DEFAULT 19.99,
        until timestamptz, paid_at timestamptz, closed_at timestamptz);
    CREATE TABLE shop.items (nr bigint NOT NULL, sku text NOT NULL, qty integer NOT NULL);
    CREATE TABLE shop.stock (
        sku text PRIMARY KEY, free integer NOT NULL CHECK (free >= 0), held integer NOT NULL CHECK (held >= 0));
    INSERT INTO shop.stock VALUES ('pen', 1000, 0)";

const MAPPING: &str = r#"
    table = "shop.orders"
    id = "nr"
    open = "state = 'open'"
    paid = "state = 'paid'"
    deadline = "until"
    amount = "total"
    minor_units = 2
    currency = "'EUR'"
    close = { state = "closed", closed_at = "now" }
    pay = { state = "paid", paid_at = "now" }
    reopen = { closed_at = "null" }
    stock = [{ items = "shop.items", order = "nr", key = "sku", quantity = "qty", table = "shop.stock", stock_key = "sku",
               give_back = { free = "free + quantity", held = "held - quantity" }, consume = { held = "held - quantity" },
               take = { free = "free - quantity", held = "held + quantity" }, left = "free" }]
"#;

/// With this, the order says that its provider is asked.
const CLOSING: &str = "closing = { state = \"asking\" }\n";

/// Whose orders are in a table of the shop's own.
fn environment(further: &str) -> EnvBuilder {
    environment_of(&Kind::ORDER, &format!("{further}{MAPPING}"))
}

fn environment_of(kind: &Kind, mapping: &str) -> EnvBuilder {
    let read = Config::builder().add_source(File::from_str(mapping, FileFormat::Toml)).build().unwrap();
    let (kind, table): (Kind, TableSettings) = (kind.clone(), read.try_deserialize().unwrap());
    TestEnv::builder().without_broker().settings(|settings| settings.kinds.entry(kind).or_default().table = Some(table))
}

/// Creates the shop's tables, and the functions for payments.
async fn install(env: &TestEnv) {
    install_for(env, &Kind::ORDER).await;
}

async fn install_for(env: &TestEnv, kind: &Kind) {
    execute(env, SHOP).await;
    let database = Database::connect(&env.settings.database, 2).await.unwrap();
    let statements = orders_statements::statements(&database, &env.settings, kind).await.unwrap();
    let refused = orders_statements::require_functions(&database, kind, &statements.functions).await;
    assert!(refused.unwrap_err().to_string().contains(&format!("adopt --kind {kind} --install")));
    kind_functions::install(&database, &statements.functions).await.unwrap();
    orders_statements::require_functions(&database, kind, &statements.functions).await.unwrap();
}

async fn execute(env: &TestEnv, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&env.pool).await.unwrap();
}

/// Overdue orders of two pens each, with these numbers.
async fn overdue(env: &TestEnv, numbers: std::ops::RangeInclusive<i64>) {
    let (first, last) = (numbers.start(), numbers.end());
    let create = format!(
        "INSERT INTO shop.orders (nr, until) SELECT n, now() FROM generate_series({first}, {last}) n;
         INSERT INTO shop.items SELECT n, 'pen', 2 FROM generate_series({first}, {last}) n;
         UPDATE shop.stock SET free = free - 2 * {orders}, held = held + 2 * {orders}",
        orders = last - first + 1
    );
    execute(env, &create).await;
}

/// An attempt to pay order 1 with its price.
async fn attempt(env: &TestEnv) {
    execute(env, "INSERT INTO payment_attempts VALUES ('stripe', 'pi_1', '1', 1999, 'EUR')").await;
}

async fn end_state(env: &TestEnv) -> String {
    sqlx::query_scalar(
        "SELECT concat_ws(' | ',
             (SELECT string_agg(state, ' ' ORDER BY nr) FROM shop.orders),
             (SELECT free || '/' || held FROM shop.stock),
             (SELECT string_agg(type, ', ' ORDER BY created_at) FROM event_outbox),
             (SELECT string_agg(reference || ' ' || state, ', ' ORDER BY reference) FROM payment_attempts),
             (SELECT string_agg(reference || ' ' || reason || ' ' || amount_minor, ', ' ORDER BY id) FROM late_payments),
             (SELECT count(*) FROM close_attempts) || ' left')",
    )
    .fetch_one(&env.pool)
    .await
    .unwrap()
}

const UNFINISHED: &str = "SELECT (SELECT count(*) FROM shop.orders WHERE state NOT IN ('closed', 'paid'))
                               + (SELECT count(*) FROM close_attempts)";
const CLOSED: &str = "closed | 1000/0 | order.closed.v1 | pi_1 closed | 0 left";
const SETTLED: &str = "paid | 998/0 | order.paid_late_settled.v1 | pi_1 paid | 0 left";

async fn alarms(env: &TestEnv) -> Vec<(OrderId, Timestamp)> {
    let select = "SELECT nr::text, until FROM shop.orders ORDER BY nr";
    let found: Vec<(String, Timestamptz)> = sqlx::query_as(select).fetch_all(&env.pool).await.unwrap();
    found.into_iter().map(|(id, Timestamptz(deadline))| (OrderId::new(id).unwrap(), deadline)).collect()
}

/// Runs one overdue order with an attempt to its end, with these answers.
async fn run_one(env: &TestEnv, ask: Answer, cancel: Answer) -> String {
    overdue(env, 1..=1).await;
    attempt(env).await;
    let provider = Arc::new(Provider::default());
    provider.script("pi_1", CallKind::Ask, [ask]);
    provider.script("pi_1", CallKind::Cancel, [cancel]);
    let mut driver = Driver::start(env, provider).await;
    driver.deliver_alarms(&alarms(env).await).await;
    driver.run_until(env, UNFINISHED, 0).await;
    end_state(env).await
}

#[test]
fn answers_decide_mapped_orders() {
    for further in ["", CLOSING] {
        for (ask, cancel, end) in
            [(Answer::Open, Answer::Closed, CLOSED), (Answer::Open, paid(), SETTLED), (paid(), paid(), SETTLED)]
        {
            environment(further).run(async move |env| {
                install(&env).await;
                assert_eq!(run_one(&env, ask, cancel).await, end, "{further}");
            });
        }
    }
}

#[test]
fn mapped_order_without_answer_keeps_its_stock() {
    for (further, state) in [("", "open"), (CLOSING, "asking")] {
        environment(further).run(async move |env| {
            install(&env).await;
            overdue(&env, 1..=1).await;
            attempt(&env).await;
            let provider = Arc::new(Provider::default());
            provider.always("pi_1", &unknown());
            let mut driver = Driver::start(&env, provider).await;
            driver.deliver_alarms(&alarms(&env).await).await;
            driver.run_until(&env, UNRESOLVED, 1).await;
            assert_eq!(end_state(&env).await, format!("{state} | 998/2 | order.unresolved.v1 | pi_1 open | 1 left"));
            let database = Database::connect(&env.settings.database, 1).await.unwrap();
            let statements = orders_statements::statements(&database, &env.settings, &Kind::ORDER).await.unwrap();
            let page = SweepPage { reach: SweepReach::Overdue(Duration::ZERO), after: None, limit: 10 };
            let sweeper = Sweeper::prepare(database.clone(), statements.overdue).await.unwrap();
            assert_eq!(sweeper.overdue(&page).await.unwrap().orders, [], "it has fallen due, and waits");
            let of = claimed_kind(&database, &env.settings, &Kind::ORDER).await.unwrap();
            let operator = Operator { who: "ann".into(), why: Some("asked the bank".into()), run: Uuid::now_v7() };
            let id = OrderId::new("1").unwrap();
            unresolved::decide(&database, &of, &id, Decision::Closed, &operator).await.unwrap();
            assert_eq!(
                end_state(&env).await,
                format!("closed | 1000/0 | order.unresolved.v1, order.closed.v1 | pi_1 closed | 0 left")
            );
        });
    }
}

#[test]
fn kill_at_each_step_ends_mapped_order_once() {
    let closes = [Step::Claimed, Step::TakenOver, Step::Asked, Step::Cancelled, Step::Closed];
    let closes = closes.map(|step| (step, Answer::Open, Answer::Closed, CLOSED));
    let settles = [Step::Claimed, Step::TakenOver, Step::Asked, Step::SettledAsPaid];
    let settles = settles.map(|step| (step, paid(), paid(), SETTLED));
    for further in ["", CLOSING] {
        for (step, ask, cancel, end) in closes.clone().into_iter().chain(settles.clone()) {
            environment(further).run(async move |env| {
                install(&env).await;
                overdue(&env, 1..=1).await;
                attempt(&env).await;
                let provider = Arc::new(Provider::default());
                provider.script("pi_1", CallKind::Ask, [ask]);
                provider.script("pi_1", CallKind::Cancel, [cancel]);
                let mut killed = Driver::start(&env, provider.clone()).await;
                killed.deliver_alarms(&alarms(&env).await).await;
                killed.run_until_step(step).await;
                drop(killed);
                let mut other = Driver::start(&env, provider).await;
                other.deliver_alarms(&alarms(&env).await).await;
                other.run_until(&env, UNFINISHED, 0).await;
                assert_eq!(end_state(&env).await, end, "killed after {step:?}, {further}");
            });
        }
    }
}

/// Reports money for order 1, as its callback does.
async fn report(env: &TestEnv, reference: &str, amount_minor: i64) -> (String, Option<String>, i64, i64) {
    sqlx::query_as(
        "SELECT outcome, reason, missing_minor, surplus_minor FROM payment_received('1', 'stripe', $1, $2, 'EUR')",
    )
    .bind(reference)
    .bind(amount_minor)
    .fetch_one(&env.pool)
    .await
    .unwrap()
}

#[test]
fn reported_payments_pay_mapped_order() {
    for further in ["", CLOSING] {
        environment(further).run(async move |env| {
            install(&env).await;
            let late = |reason: &str| ("late".to_owned(), Some(reason.to_owned()), 0, 0);
            assert_eq!(report(&env, "pi_0", 500).await, late("unknown_order"));
            overdue(&env, 1..=1).await;
            attempt(&env).await;
            assert_eq!(report(&env, "pi_1", 1_000).await, ("partial".to_owned(), None, 999, 0));
            // It was late before there was an order, and is judged again.
            assert_eq!(report(&env, "pi_0", 500).await, ("partial".to_owned(), None, 499, 0));
            assert_eq!(report(&env, "pi_2", 600).await, ("paid".to_owned(), None, 0, 101));
            assert_eq!(report(&env, "pi_2", 600).await, ("paid".to_owned(), None, 0, 101), "once");
            assert_eq!(report(&env, "pi_3", 1_999).await, late("already_paid"));
            let late = "pi_0 unknown_order 500, pi_2 surplus 101, pi_3 already_paid 1999";
            let told = "order.payment_late.v1, order.payment_late.v1, order.payment_late.v1";
            assert_eq!(end_state(&env).await, format!("paid | 998/0 | {told} | pi_1 counted | {late} | 0 left"));
        });
    }
}

#[test]
fn parts_of_closed_mapped_order_are_late() {
    environment("").run(async move |env| {
        install(&env).await;
        overdue(&env, 1..=2).await;
        assert_eq!(report(&env, "pi_1", 1_000).await.0, "partial");
        execute(&env, "SELECT release_parts_of(ARRAY['1'], 'order')").await;
        assert_eq!(env.count("SELECT count(*) FROM late_payments").await, 0, "it is open");
        let mut driver = Driver::start(&env, Arc::new(Provider::default())).await;
        driver.deliver_alarms(&alarms(&env).await).await;
        driver.run_until(&env, UNFINISHED, 0).await;
        assert_eq!(report(&env, "pi_2", 999).await.1.as_deref(), Some("closed"));
        let late =
            "SELECT string_agg(reference || ' ' || reason || ' ' || amount_minor, ', ' ORDER BY id) FROM late_payments";
        let late: String = sqlx::query_scalar(late).fetch_one(&env.pool).await.unwrap();
        assert_eq!(late, "pi_1 part_payment 1000, pi_2 closed 999");
        assert_eq!(env.count("SELECT free::bigint FROM shop.stock").await, 1_000);
    });
}

/// Of 200 races between the callback of a payment and the close, each has one winner.
#[test]
fn callback_and_close_race_for_mapped_orders() {
    const ORDERS: i64 = 200;
    for further in ["", CLOSING] {
        environment(further).run(async move |env| {
            install(&env).await;
            overdue(&env, 1..=ORDERS).await;
            execute(&env, "INSERT INTO payment_attempts SELECT 'stripe', 'pi_' || nr, nr::text, 1999, 'EUR' FROM shop.orders").await;
            let provider = Arc::new(Provider::default());
            for order in 1..=ORDERS {
                // Each second one is paid just before it is cancelled.
                let cancel = if order % 2 == 0 { paid() } else { Answer::Closed };
                provider.script(&format!("pi_{order}"), CallKind::Ask, [Answer::Open]);
                provider.script(&format!("pi_{order}"), CallKind::Cancel, [cancel]);
            }
            let mut driver = Driver::start(&env, provider).await;
            driver.deliver_alarms(&alarms(&env).await).await;
            let pool = env.pool.clone();
            let callbacks = tokio::spawn(async move {
                for order in (1..=ORDERS).rev() {
                    let report = "SELECT payment_received($1, 'stripe', 'pi_' || $1, 1999, 'EUR')::text";
                    let _outcome: String = sqlx::query_scalar(report).bind(order.to_string()).fetch_one(&pool).await.unwrap();
                }
            });
            driver.run_until(&env, UNFINISHED, 0).await;
            callbacks.await.unwrap();
            let wrong = "SELECT count(*) FROM shop.orders o
                LEFT JOIN received_payments p ON p.order_id = o.nr::text
                WHERE (o.state = 'paid') IS DISTINCT FROM (p.outcome = 'paid')
                   OR (o.state = 'closed') <> EXISTS (SELECT FROM late_payments l WHERE l.order_id = o.nr::text)
                   OR (SELECT count(*) FROM event_outbox e WHERE e.type = 'order.closed.v1' AND e.payload ->> 'order_id' = o.nr::text)
                      <> (o.state = 'closed')::integer";
            assert_eq!(env.count(wrong).await, 0, "{further}");
            let stock = "SELECT count(*) FROM shop.stock WHERE held = 0
                AND free = 1000 - 2 * (SELECT count(*) FROM shop.orders WHERE state = 'paid')";
            assert_eq!(env.count(stock).await, 1, "{further}");
            assert!(env.count("SELECT count(*) FROM shop.orders WHERE state = 'paid'").await >= ORDERS / 2);
        });
    }
}

#[test]
fn mapping_without_stock_asks_provider() {
    let (without_stock, _) = MAPPING.split_once("stock = ").unwrap();
    environment_of(&Kind::ORDER, without_stock).run(async move |env| {
        install(&env).await;
        execute(&env, "INSERT INTO shop.orders (nr, until) VALUES (1, now())").await;
        attempt(&env).await;
        let provider = Arc::new(Provider::default());
        provider.always("pi_1", &paid());
        let mut driver = Driver::start(&env, provider).await;
        driver.deliver_alarms(&alarms(&env).await).await;
        driver.run_until(&env, UNFINISHED, 0).await;
        assert_eq!(end_state(&env).await, "paid | 1000/0 | order.paid_late_settled.v1 | pi_1 paid | 0 left");
    });
}

#[test]
fn functions_of_former_mapping_are_refused() {
    environment("").run(async move |env| {
        install(&env).await;
        // Run with the owner's rights, so no temporary object of a caller may take the place of another.
        let last = "SELECT count(*) FROM pg_proc WHERE proname LIKE 'kind\\_order\\_%' AND proconfig::text LIKE '%pg\\_temp\"}'";
        assert_eq!(env.count(last).await, 7);
        let database = Database::connect(&env.settings.database, 1).await.unwrap();
        let refused = orders_statements::require_functions(&database, &Kind::ORDER, &[]).await.unwrap_err().to_string();
        assert!(refused.contains("kinds.order.table.pay") && refused.contains("DROP FUNCTION IF EXISTS kind_order_id"), "{refused}");
    });
}

/// Closes order 1.
async fn close_one(env: &TestEnv, kind: &Kind) {
    let database = Database::connect(&env.settings.database, 1).await.unwrap();
    let close = orders_statements::texts(&database, &env.settings, kind).await.unwrap().close;
    let close = sqlx::query(AssertSqlSafe(close)).bind(["1"]).bind("manual").bind(true).bind(false);
    let outcome: String = close.fetch_one(&env.pool).await.unwrap().try_get("outcome").unwrap();
    assert_eq!(outcome, "closed");
}

/// Settles a piece of late money by reopening its order; an error's sentence if it is not reopened.
async fn reopen(env: &TestEnv, settings: &Settings, id: i64) -> Result<ReopenedOrder, String> {
    let database = Database::connect(&env.settings.database, 1).await.unwrap();
    let operator = Operator { who: "ann".into(), why: None, run: Uuid::now_v7() };
    late_payments::reopen(&database, settings, id, &operator).await.map_err(|error| error.to_string())
}

/// In the default kind and in another.
#[test]
fn late_money_reopens_mapped_order() {
    for kind in ["order", "hold"] {
        let kind = Kind::new(kind).unwrap();
        environment_of(&kind, MAPPING).run(async move |env| {
            install_for(&env, &kind).await;
            overdue(&env, 1..=2).await;
            let report = async |reference: &str, amount_minor: i64| {
                let report = "SELECT outcome FROM payment_received('1', 'stripe', $1, $2, 'EUR', $3)";
                let report = sqlx::query_scalar(report).bind(reference).bind(amount_minor).bind(kind.as_str());
                let outcome: String = report.fetch_one(&env.pool).await.unwrap();
                outcome
            };
            assert_eq!(report("pi_1", 1_000).await, "partial");
            close_one(&env, &kind).await;
            let refused = async |id: i64, words: &str| {
                let before = end_state(&env).await;
                let why = reopen(&env, &env.settings, id).await.unwrap_err();
                assert!(why.contains(words), "{why}");
                assert_eq!(end_state(&env).await, before);
            };
            refused(1, "order 1 lacks 999 (smallest unit)").await;
            assert_eq!(report("pi_2", 1_500).await, "late");
            execute(&env, "UPDATE shop.stock SET free = 1").await;
            refused(2, "shop.stock pen has 1 left and the order needs 2").await;
            execute(&env, "UPDATE shop.stock SET free = 2").await;
            let reopened = reopen(&env, &env.settings, 2).await.unwrap();
            assert_eq!((reopened.order_id.as_str(), reopened.surplus_minor), ("1", 501));
            let event: serde_json::Value =
                sqlx::query_scalar("SELECT payload FROM event_outbox WHERE type = 'order.reopened.v1'")
                    .fetch_one(&env.pool)
                    .await
                    .unwrap();
            let of_kind = if kind.is_default() { serde_json::Value::Null } else { kind.as_str().into() };
            assert_eq!((&event["order_id"], &event["kind"], &event["amount_minor"]), (&"1".into(), &of_kind, &1_999.into()));
            assert_eq!(event["late_payment_ids"], serde_json::json!([2, 1]));
            let ends = "SELECT count(*) FROM shop.orders o, shop.stock s
                WHERE o.nr = 1 AND o.state = 'paid' AND o.paid_at IS NOT NULL AND o.closed_at IS NULL AND s.free = 0 AND s.held = 2";
            assert_eq!(env.count(ends).await, 1);
            let money = "SELECT count(*) FROM received_payments p LEFT JOIN late_payments l
                             ON l.reference = p.reference AND l.state = 'open' AND l.reason = 'surplus'
                WHERE (p.reference, p.counted_minor, l.amount_minor) IN (('pi_2', 1500, NULL), ('pi_1', 499, 501))
                   OR p.reference = 'pi_2' AND p.counted_minor = 1500 AND l.id IS NULL";
            assert_eq!(env.count(money).await, 2);
            refused(3, "order 1 is paid, and only a closed order").await;
        });
    }
}

/// The shop has closed the order by itself, and the part still counts.
#[test]
fn reopening_makes_counted_parts_late() {
    environment("").run(async move |env| {
        install(&env).await;
        overdue(&env, 1..=1).await;
        assert_eq!(report(&env, "pi_1", 1_000).await.0, "partial");
        execute(&env, "UPDATE shop.orders SET state = 'closed', closed_at = now()").await;
        assert_eq!(report(&env, "pi_2", 1_999).await.0, "late");
        assert_eq!(reopen(&env, &env.settings, 1).await.unwrap().late_payments, [1]);
        let money =
            "SELECT count(*) FROM late_payments l, (SELECT sum(counted_minor) AS counted FROM received_payments) p
                     WHERE l.state = 'open' AND l.reference = 'pi_1' AND l.amount_minor = 1000 AND p.counted = 1999";
        assert_eq!(env.count(money).await, 1);
    });
}

#[test]
fn late_money_reopens_only_what_settings_say() {
    environment("").run(async move |env| {
        install(&env).await;
        overdue(&env, 1..=1).await;
        close_one(&env, &Kind::ORDER).await;
        assert_eq!(report(&env, "pi_1", 1_999).await.0, "late");
        let refused = async |change: fn(&mut TableSettings), words: &str| {
            let mut settings = env.settings.clone();
            change(settings.kinds.get_mut(&Kind::ORDER).and_then(|kind| kind.table.as_mut()).unwrap());
            let why = reopen(&env, &settings, 1).await.unwrap_err();
            assert!(why.contains(words), "{why}");
        };
        refused(|table| table.reopen.as_mut().unwrap().clear(), "adopt --kind order --install").await;
        let without = |table: &mut TableSettings| {
            table.reopen = None;
            table.stock[0].take.clear();
            table.stock[0].left = None;
        };
        refused(without, "kinds.order.table.reopen is not given; settle the payment with --refund-due").await;
        execute(&env, "ALTER TABLE shop.orders ADD CHECK (state <> 'paid')").await;
        let before = end_state(&env).await;
        let why = reopen(&env, &env.settings, 1).await.unwrap_err();
        assert!(why.contains("violates check constraint"), "{why}");
        assert_eq!(end_state(&env).await, before, "all or nothing");
    });
}
