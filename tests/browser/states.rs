//! What the page shows in each state of a deployment, in both schemes and on a phone, without being loaded again.

use std::time::Duration;

use order_timeout::Settings;
use order_timeout::config::kinds::{CloseSettings, KindSettings, Names, TableSettings};
use order_timeout_core::kind::Kind;
use order_timeout_testkit::TestEnv;
use order_timeout_testkit::figures::wait_for_figure;
use order_timeout_testkit::page::TOKEN;
use serde_json::json;
use thirtyfour::common::keys::Key;

use crate::browser;
use crate::{MINUTE, ON_TIME, Opened, SECOND, Server, fill, log_in, page_test, park, write_alarms};

#[test]
fn idle_page_is_calm_and_accessible() {
    page_test("states::idle_page_is_calm_and_accessible").run(async |Opened { env, worker, browser, .. }| {
        fill(&env).await;
        env.orders(40, SECOND).await;
        write_alarms(&env).await;
        browser.wait_for_text("#due-order", "2,100").await;
        browser.wait_for_text("#late", "40 orders").await;
        browser.wait_for_text("#late", "by all workers").await;
        browser.wait_for_text("#late", " s ago").await;
        browser.assert_accessible().await;
        if browser::are_pictures_wanted() {
            close_for_minutes(&env, 8).await;
        }
        browser.picture_of_top("page", 1_400).await;
        browser.be_dark(true).await;
        let ground = "return getComputedStyle(document.body).backgroundColor;";
        assert_eq!(browser.run(ground, Vec::new()).await, json!("rgb(15, 19, 24)"));
        browser.assert_accessible().await;
        browser.be_phone().await;
        browser.picture("phone-dark").await;
        for path in ["/", "/forecast", "/parked", "/late", "/unresolved", "/pauses", "/login", "/orders/17"] {
            browser.visit(path).await;
            assert!(browser.overhang().await <= 0, "{path} is wider than a phone");
            browser.assert_accessible().await;
        }
        // A page that is not there is an answer, not a refusal by the page's policy.
        let errors = browser.console_errors().await;
        assert!(errors.iter().all(|error| error.contains("404")), "{errors:?}");
        worker.stop().await;
    });
}

/// So that the plots have something to show: some orders each second, most in the middle.
async fn close_for_minutes(env: &TestEnv, minutes: u64) {
    for second in 0..60 * minutes {
        let orders = 1 + usize::try_from(second * (60 * minutes - second) / 3_000).expect("a small number");
        env.orders(orders, SECOND).await;
        write_alarms(env).await;
        tokio::time::sleep(SECOND).await;
    }
}

#[test]
fn burst_is_shown_as_it_closes() {
    page_test("states::burst_is_shown_as_it_closes").run(async |Opened { env, worker, browser, .. }| {
        env.orders(2_000, 4 * SECOND).await;
        write_alarms(&env).await;
        browser.wait_for_text("#late", "2,000 orders").await;
        browser.wait_for_text("#verdict", ON_TIME).await;
        browser.assert_not_loaded_again().await;
        browser.assert_accessible().await;
        browser.picture("burst").await;
        worker.stop().await;
        // Its worker is gone.
        browser.wait_for_text("#connection", "Not updated for").await;
    });
}

#[test]
fn missing_broker_is_named() {
    page_test("states::missing_broker_is_named").behind(Server::Broker).run(
        async |Opened { env, worker, browser, network }| {
            let to_broker = network.expect("a network before it");
            to_broker.cut();
            browser.wait_for_text("#verdict", "broker: no consumer session is open").await;
            // The look-ahead closes on time without it.
            let orders = env.orders(3, 2 * SECOND).await;
            browser.wait_for_text("#late", "3 orders").await;
            assert_eq!(orders.len(), 3);
            browser.wait_for_text("#verdict", "but something needs attention").await;
            browser.assert_accessible().await;
            browser.picture("broker-down").await;
            to_broker.restore();
            browser.wait_for_text("#verdict", ON_TIME).await;
            browser.assert_not_loaded_again().await;
            worker.stop().await;
        },
    );
}

#[test]
fn missing_database_is_named() {
    page_test("states::missing_database_is_named").behind(Server::Database).run(
        async |Opened { worker, browser, network, .. }| {
            let to_database = network.expect("a network before it");
            to_database.cut();
            browser.wait_for_text("#verdict", "It is not known whether orders are closed on time.").await;
            browser.assert_accessible().await;
            browser.picture("database-down").await;
            browser.wait_for_text("#verdict", "Start the database").await;
            to_database.restore();
            browser.wait_for_text("#verdict", ON_TIME).await;
            // In the order in which they were before.
            let ids = "return [...document.querySelectorAll('#live > section')].map(section => section.id).join(' ');";
            let shown = async || browser.run(ids, Vec::new()).await;
            let whole = "verdict due-order late workers facts";
            order_timeout_testkit::wait_for("every section", async || shown().await == json!(whole)).await;
            browser.assert_not_loaded_again().await;
            worker.stop().await;
        },
    );
}

#[test]
fn parked_alarms_are_retried_by_form() {
    page_test("states::parked_alarms_are_retried_by_form").run(async |Opened { env, worker, browser, .. }| {
        let order = env.order(60 * MINUTE).await;
        park(&env, "close_failed", &order.id.to_string(), &order.body()).await;
        park(&env, "unreadable", "17", b"{").await;
        browser.wait_for_text("#verdict", "1 parked alarm, which could not be handled: close_failed").await;
        browser.wait_for_text("#verdict", "unreadable, the oldest for").await;
        browser.wait_for_text("#pages", "Parked alarms 2").await;
        browser.assert_not_loaded_again().await;
        browser.assert_accessible().await;
        browser.picture_of_top("page-waiting", 700).await;
        browser.click("#verdict a[href='/parked?reason=close_failed']").await;
        browser.wait_for_text("main", "a trigger refuses it").await;
        log_in(&browser, "night shift").await;
        browser.assert_accessible().await;
        browser.picture("parked").await;
        browser.click("input[type=checkbox]").await;
        browser.click("#why").await;
        browser.type_text("the trigger is fixed").await;
        browser.click("button[formaction='/parked/retry']").await;
        browser.wait_for_text("main", "1 alarm sent back to the workers").await;
        let left = env.count("SELECT count(*) FROM parked_alarms").await;
        assert_eq!((left, env.parked().await[0].0.as_str()), (1, "unreadable"));
        worker.stop().await;
    });
}

#[test]
fn unresolved_orders_are_shown_with_remedies() {
    page_test("states::unresolved_orders_are_shown_with_remedies").run(
        async |Opened { env, worker, browser, .. }| {
            for (reason, answer) in [
                ("refunded", "refunded"),
                ("no_answer", "unknown (no complete answer came within 10.0 s)"),
                ("amount_differs", "paid 39.99 EUR"),
            ] {
                unresolved(&env, reason, answer).await;
            }
            browser.wait_for_text("#verdict", "amount_differs").await;
            browser.click("#verdict a[href='/unresolved']").await;
            browser.wait_for_text("h1", "Unresolved orders").await;
            browser.wait_for_text("main", "check that the provider answers").await;
            log_in(&browser, "night shift").await;
            browser.visit("/unresolved").await;
            browser.wait_for_text("main", "Ask their providers again").await;
            browser.assert_accessible().await;
            browser.picture("unresolved").await;
            browser.be_phone().await;
            assert!(browser.overhang().await <= 0);
            worker.stop().await;
        },
    );
}

/// An order that its payment provider's answer could not decide.
async fn unresolved(env: &TestEnv, reason: &str, answer: &str) {
    let order = env.order(60 * MINUTE).await;
    let sql = "WITH o AS (UPDATE orders SET status = 'closing' WHERE id = $1)
               INSERT INTO close_attempts (order_id, claimed_by, queue, step, rounds, last_answers, unresolved_reason,
                                           unresolved_at)
               VALUES ($1::text, 'alarm', 'card', 'unresolved', 3, 'card pi_' || left($1::text, 8) || ' ask: ' || $2, $3,
                       clock_timestamp())";
    sqlx::query(sql).bind(order.id).bind(answer).bind(reason).execute(&env.pool).await.unwrap();
}

#[test]
fn pause_is_shown_and_ended_by_keyboard() {
    page_test("states::pause_is_shown_and_ended_by_keyboard").run(async |Opened { env, worker, browser, .. }| {
        let why = "60 of 60 orders closed in 5m, and 0.0 % were paid; usually it is 70 %";
        let pause = "INSERT INTO closing_pauses (kind, cause, reason, paused_by)
                     VALUES ('order', 'brake', $1, 'the worker on shop-1')";
        sqlx::query(pause).bind(why).execute(&env.pool).await.unwrap();
        browser.wait_for_text("#verdict", "the worker on shop-1").await;
        let command = ["resume", "--why", "a test of the command"];
        let (code, said, fault) = order_timeout_testkit::process::call_with(&env.settings, &command).await;
        assert_eq!(code, 0, "{said}{fault}");
        browser.wait_for_text("#verdict", ON_TIME).await;
        let command = ["pause", "--why", "the callbacks of the provider are missing", "--who", "night shift"];
        let (code, said, fault) = order_timeout_testkit::process::call_with(&env.settings, &command).await;
        assert_eq!(code, 0, "{said}{fault}");
        browser.wait_for_text("#verdict", "Closing is paused: no order is closed until it is resumed.").await;
        wait_for_figure(&worker, "closing_paused{cause=\"operator\"}", |value| value == 1.0).await;
        let orders = env.orders(12, SECOND).await;
        let later = env.order(600 * SECOND).await;
        let stuck = "UPDATE orders SET expires_at = expires_at - interval '3 hours' WHERE id = $1";
        sqlx::query(stuck).bind(orders[0].id).execute(&env.pool).await.unwrap();
        browser.wait_for_text("#verdict", "Closing is paused: 12 overdue orders wait to be closed.").await;
        browser.wait_for_text("#verdict", "by night shift: the callbacks of the provider are missing").await;
        browser.wait_for_text("#due-order", "Closing is paused: what falls due stays open").await;
        browser.assert_not_loaded_again().await;
        browser.assert_accessible().await;
        browser.picture("paused").await;

        // With the keyboard alone, beginning at the verdict.
        browser.tab_to("The overdue orders, the oldest first").await;
        browser.press(Key::Enter).await;
        browser.wait_for_text("h1", "Forecast").await;
        for order in &orders {
            browser.wait_for_text("main", &order.id.to_string()).await;
        }
        assert!(!browser.text("main").await.contains(&later.id.to_string()), "it is not overdue");
        browser.visit("/").await;
        browser.tab_to("Pauses").await;
        browser.press(Key::Enter).await;
        browser.wait_for_text("h1", "Pauses of closing").await;
        browser.tab_to("Log in").await;
        browser.press(Key::Enter).await;
        browser.tab_to("Your name").await;
        browser.type_text("day shift").await;
        browser.press(Key::Tab).await;
        browser.type_text(TOKEN).await;
        browser.press(Key::Enter).await;
        browser.wait_for_text("header", "Log out").await;
        browser.wait_for_text("h1", "Pauses of closing").await;
        browser.assert_accessible().await;
        browser.picture("pauses").await;
        browser.tab_to("Why").await;
        browser.type_text("the callbacks arrive again").await;
        browser.tab_to("Resume closing").await;
        browser.press(Key::Enter).await;
        browser.wait_for_text("main", "1 pause ended.").await;
        browser.wait_for_text("main", "the callbacks arrive again").await;
        order_timeout_testkit::wait_for("the closes", async || env.closed().await == 12).await;
        let who = "SELECT count(*) FROM closing_pauses WHERE resumed_by = 'day shift'";
        assert_eq!(env.count(who).await, 1);
        browser.visit("/").await;
        browser.wait_for_text("#verdict", ON_TIME).await;
        browser.be_phone().await;
        browser.visit("/pauses").await;
        assert!(browser.overhang().await <= 0);
        worker.stop().await;
    });
}

fn with_acceptance(settings: &mut Settings) {
    let text = |text: &str| text.to_owned();
    let table = TableSettings {
        table: text("public.acceptance"),
        id: Names(vec![text("id")]),
        open: text("state = 'open'"),
        paid: text("state = 'done'"),
        deadline: text("until"),
        time_zone: None,
        amount: None,
        currency: None,
        minor_units: None,
        close: CloseSettings::Set([(text("state"), text("closed"))].into()),
        closing: None,
        pay: None,
        reopen: None,
        attempts: None,
        stock: Vec::new(),
        also: Vec::new(),
        is_built_in: false,
    };
    let kind = settings.kinds.entry(Kind::new("acceptance").unwrap()).or_default();
    *kind = KindSettings { table: Some(table), ..KindSettings::default() };
}

#[test]
fn each_kind_has_a_row() {
    const ACCEPTANCE: &str = "
        CREATE TABLE public.acceptance (id bigserial PRIMARY KEY, state text NOT NULL DEFAULT 'open',
                                        until timestamptz NOT NULL);
        CREATE INDEX ON public.acceptance (until, id) WHERE state = 'open';
        INSERT INTO public.acceptance (until) SELECT now() + interval '1 minute' * n FROM generate_series(10, 40) n;
        INSERT INTO public.acceptance (until) VALUES (now() + interval '1 second')";
    let test = page_test("states::each_kind_has_a_row").settings(with_acceptance).prepared_by(ACCEPTANCE);
    test.run(async |Opened { env, worker, browser, .. }| {
        env.orders(5, 20 * MINUTE).await;
        browser.wait_for_text("#kinds", "acceptance").await;
        let closed = |text: String| text.lines().any(|line| line.starts_with("acceptance\t0\t31\t1\t"));
        order_timeout_testkit::wait_for("the close", async || closed(browser.text("#kinds").await)).await;
        browser.assert_accessible().await;
        browser.picture("kinds").await;
        browser.click("#kinds a[href='/forecast?kind=acceptance']").await;
        browser.wait_for_text("main", "Unpaid orders that fall due").await;
        browser.click("main td a").await;
        // Its row is known by the mapping.
        browser.wait_for_text("main", "Why it is open").await;
        assert!(!browser.text("main").await.contains("Not known: row"));
        assert!(browser.path().await.ends_with("?kind=acceptance"), "{}", browser.path().await);
        browser.assert_accessible().await;
        browser.be_phone().await;
        browser.visit("/").await;
        assert!(browser.overhang().await <= 0);
        tokio::time::timeout(Duration::from_secs(20), worker.stop()).await.unwrap();
    });
}
