//! The keyboard alone reaches and does everything: Tab moves, Space chooses, Enter acts.

use order_timeout_testkit::page::TOKEN;
use thirtyfour::common::keys::Key;

use crate::{MINUTE, Opened, page_test, park};

#[test]
fn keyboard_finds_orders() {
    page_test("keyboard::keyboard_finds_orders").run(async |Opened { env, worker, browser, .. }| {
        let order = env.order(60 * MINUTE).await;
        // The first stop leads over the navigation.
        browser.press(Key::Tab).await;
        assert_eq!(browser.focused().await, "Skip to contents");
        browser.press(Key::Enter).await;
        assert_eq!(browser.path().await, "/#contents");
        browser.visit("/").await;
        browser.tab_to("Order").await;
        browser.type_text(&order.id.to_string()).await;
        browser.press(Key::Enter).await;
        browser.wait_for_text("main", "Why it is open").await;
        browser.wait_for_text("main", "Its deadline is in").await;
        browser.assert_accessible().await;
        browser.picture("order").await;
        browser.tab_to("Forecast").await;
        browser.press(Key::Enter).await;
        browser.tab_to(&order.id.to_string()).await;
        browser.press(Key::Enter).await;
        browser.wait_for_text("main", "Why it is open").await;
        worker.stop().await;
    });
}

#[test]
fn keyboard_logs_in_and_changes() {
    page_test("keyboard::keyboard_logs_in_and_changes").run(async |Opened { env, worker, browser, .. }| {
        let order = env.order(60 * MINUTE).await;
        park(&env, "close_failed", &order.id.to_string(), &order.body()).await;
        park(&env, "unreadable", "17", b"{").await;
        browser.visit("/parked").await;
        browser.tab_to("Log in").await;
        browser.press(Key::Enter).await;
        browser.tab_to("Your name").await;
        browser.type_text("night shift").await;
        browser.press(Key::Tab).await;
        browser.type_text("no such token at all").await;
        browser.press(Key::Enter).await;
        browser.wait_for_text("[role=alert]", "the token is wrong").await;
        browser.tab_to("Your name").await;
        browser.type_text("night shift").await;
        browser.press(Key::Tab).await;
        browser.type_text(TOKEN).await;
        browser.press(Key::Enter).await;
        browser.wait_for_text("header", "Log out").await;
        for (button, result) in
            [("Retry the chosen", "1 alarm sent back to the workers"), ("Drop the chosen", "1 alarm dropped.")]
        {
            let id: uuid::Uuid = sqlx::query_scalar("SELECT id FROM parked_alarms ORDER BY parked_at, id LIMIT 1")
                .fetch_one(&env.pool)
                .await
                .unwrap();
            browser.tab_to(&format!("choose alarm {id}")).await;
            browser.type_text(" ").await;
            browser.tab_to("Why").await;
            browser.type_text("the trigger is fixed").await;
            browser.tab_to(button).await;
            browser.press(Key::Enter).await;
            browser.wait_for_text("main", result).await;
        }
        assert_eq!(env.count("SELECT count(*) FROM operator_actions WHERE who = 'night shift'").await, 2);
        browser.tab_to("Log out").await;
        browser.press(Key::Enter).await;
        browser.wait_for_text("header", "Log in").await;
        worker.stop().await;
    });
}
