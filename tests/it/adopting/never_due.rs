//! Ids and deadlines that no message can carry: such orders are never closed nor announced, and are named.

use std::time::Duration;

use order_timeout::Settings;
use order_timeout::effects::sweep::Sweeper;
use order_timeout::operations::orders_statements;
use order_timeout::outbox::reminders::Reminders;
use order_timeout::postgres::Database;
use order_timeout_core::kind::Kind;
use order_timeout_testkit::figures::{serve_http, wait_for_figure};
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{TestEnv, wait_for};

use super::{execute, map};

const TABLES: &str = "CREATE SCHEMA medusa;
    CREATE TYPE medusa.payment_state AS ENUM ('balance_due', 'paid', 'void');
    CREATE TABLE medusa.\"order\" (id text PRIMARY KEY, payment_state medusa.payment_state NOT NULL DEFAULT 'balance_due',
        payment_method text NOT NULL DEFAULT 'card', \"expiresAt\" timestamptz, \"canceledAt\" timestamptz);
    CREATE TABLE medusa.inventory_level (inventory_item_id text, location_id text, reserved_quantity numeric, quantity numeric,
        PRIMARY KEY (inventory_item_id, location_id));
    CREATE TABLE medusa.reservation_item (order_id text, inventory_item_id text, location_id text, quantity numeric);
    CREATE INDEX ON medusa.reservation_item (order_id);
    CREATE INDEX ON medusa.\"order\" (\"expiresAt\", id)
        WHERE payment_state = 'balance_due' AND \"canceledAt\" IS NULL AND payment_method <> 'invoice'";

/// Deadlines as Postgres prints them, in UTC.
const NEVER: [&str; 4] = ["-infinity", "infinity", "0044-03-15 00:00:00+00 BC", "10000-01-01 00:00:00+00"];

#[test]
fn unset_deadlines_are_never_due_and_named() {
    let settings = |settings: &mut Settings| {
        map(settings, "headless");
        settings.sweep.grace = Duration::ZERO;
        serve_http(settings);
    };
    TestEnv::builder().settings(settings).run(async |env| {
        execute(&env, TABLES).await;
        for (number, deadline) in (1..).zip(NEVER) {
            execute(
                &env,
                &format!("INSERT INTO medusa.\"order\" (id, \"expiresAt\") VALUES ('{number}', '{deadline}')"),
            )
            .await;
        }
        execute(&env, "INSERT INTO medusa.\"order\" (id, \"expiresAt\") VALUES ('due', now() - interval '1 s')").await;
        let (_, said, error) = call_with(&env.settings, &["adopt", "--check"]).await;
        assert!(said.contains("4 open orders have a deadline such as "), "{said}{error}");
        assert!(said.contains("1 of 1 overdue orders were closed"), "{said}");
        let worker = env.worker().await;
        let publisher = env.publisher().await;
        for number in 1..=NEVER.len() {
            publisher
                .schedule(number.to_string(), order_timeout_core::order::Timestamp::now_by_local_clock())
                .await
                .unwrap();
        }
        wait_for("the close", async || {
            env.count("SELECT count(*) FROM medusa.\"order\" WHERE payment_state = 'void'").await == 1
        })
        .await;
        wait_for_figure(&worker, "close_results_total{outcome=\"not_due\"}", |alarms| alarms >= 4.0).await;
        worker.stop().await;
        env.assert_drained().await;
        assert_eq!(env.count("SELECT count(*) FROM medusa.\"order\" WHERE payment_state = 'void'").await, 1);
        assert_eq!(env.parked().await, []);
        for (number, deadline) in (1..).zip(NEVER) {
            let (_, said, error) = call_with(&env.settings, &["explain", &number.to_string()]).await;
            assert!(said.contains(deadline) && said.contains("never times out"), "{said}{error}");
        }
        let (_, said, _) = call_with(&env.settings, &["status"]).await;
        assert!(said.contains("overdue               0\n"), "{said}");
    });
}

#[test]
fn unusable_ids_leave_in_no_message() {
    TestEnv::builder()
        .settings(|settings| {
            map(settings, "headless");
            settings.sweep.grace = Duration::ZERO;
        })
        .run(async |env| {
            execute(&env, TABLES).await;
            let database = Database::connect(&env.settings.database, 2).await.unwrap();
            let overdue = orders_statements::statements(&database, &env.settings, &Kind::ORDER).await.unwrap().overdue;
            let sweeper = Sweeper::prepare(database.clone(), overdue).await.unwrap();
            let reminders = Reminders::new(database, sweeper.statement(), "order", vec![Duration::from_secs(7_200)]);
            reminders.announce().await.unwrap();
            let long = "x".repeat(201);
            let ids = ["", "tab\there", &long, "good"];
            for id in ids {
                let insert = "INSERT INTO medusa.\"order\" (id, \"expiresAt\") VALUES ($1, now() + interval '7201 s')";
                sqlx::query(insert).bind(id).execute(&env.pool).await.unwrap();
            }
            wait_for("the reminder", async || {
                reminders.announce().await.unwrap();
                env.count("SELECT count(*) FROM event_outbox WHERE type = 'order.expiring.v1'").await > 0
            })
            .await;
            let (_, said, error) = call_with(&env.settings, &["adopt", "--check"]).await;
            assert!(said.contains("3 open orders have an id that no message can carry"), "{said}{error}");
            let (_, listed, error) = call_with(&env.settings, &["forecast", "--orders", "--next=3h"]).await;
            assert!(
                listed.contains("  good  ") && !listed.contains("here") && !listed.contains("xx"),
                "{listed}{error}"
            );
            execute(&env, "UPDATE medusa.\"order\" SET \"expiresAt\" = now() - interval '1 s'").await;
            let worker = env.worker().await;
            let closed = "SELECT count(*) FROM event_outbox WHERE type = 'order.closed.v1'";
            wait_for("the close", async || env.count(closed).await == 1).await;
            worker.stop().await;
            let (_, said, _) = call_with(&env.settings, &["status"]).await;
            assert!(said.contains("overdue               0\n"), "{said}");
            reminders.announce().await.unwrap();
            assert_eq!(env.count("SELECT count(*) FROM event_outbox WHERE payload ->> 'order_id' <> 'good'").await, 0);
            assert_eq!(env.count("SELECT count(*) FROM event_outbox WHERE type = 'order.expiring.v1'").await, 1);
            assert_eq!(env.count("SELECT count(*) FROM alarm_outbox").await, 0);
        });
}
