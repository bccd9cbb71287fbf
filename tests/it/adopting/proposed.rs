//! `adopt` proposes a mapping from what the database says, and it may be used where nothing had to be guessed.

use order_timeout::Settings;
use order_timeout::operations::adopt::{Level, check, propose};
use order_timeout::postgres::Database;

use super::{execute, text};
use order_timeout_core::kind::Kind;
use order_timeout_testkit::TestEnv;
use order_timeout_testkit::process::call_with;

#[test]
fn proposal_for_clear_shop_is_right() {
    TestEnv::builder().run(async |env| {
            execute(&env, &text("partitioned", "schema.sql")).await;
            execute(&env, &text("partitioned", "orders.sql")).await;
            execute(&env, "UPDATE sales.orders SET status = 'paid' WHERE id IN (SELECT id FROM sales.orders LIMIT 9);
                UPDATE sales.orders SET status = 'cancelled' WHERE id IN (SELECT id FROM sales.orders WHERE status = 'pending' LIMIT 2)").await;
            let database = Database::connect(&env.settings.database, 2).await.unwrap();
            let proposal = propose::propose(&database, &Kind::ORDER, None).await.unwrap();
            assert_eq!(proposal.table, "sales.orders");
            for part in [
                "id = [\"id\", \"created_at\"]",
                "created_at is timestamp with time zone, which an id cannot be",
                "# Found in status: pending (289), paid (9), cancelled (2).",
                "open = \"status = 'pending'\"",
                "paid = \"status = 'paid'\"",
                "deadline = \"expires_at\"",
                "close = { status = \"cancelled\", updated_at = \"now\" }",
            ] {
                assert!(proposal.toml.contains(part), "{part}: {}", proposal.toml);
            }
            assert!(
                proposal.ddl[0].contains("(expires_at, id, created_at) WHERE status = 'pending'"),
                "{:?}",
                proposal.ddl
            );
            // With the id corrected as the comment asks.
            let corrected = proposal.toml.replace("[\"id\", \"created_at\"]", "[\"id\"]");
            let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
            std::io::Write::write_all(&mut file, corrected.as_bytes()).unwrap();
            let mut settings = env.settings.clone();
            settings.kinds = Settings::load(Some(file.path()), &[]).unwrap().kinds;
            let report = check::check(&database, &settings, &Kind::ORDER).await.unwrap();
            let wrong: Vec<_> = report.findings.iter().filter(|finding| finding.level == Level::Wrong).collect();
            assert!(wrong.is_empty(), "{wrong:#?}");
        });
}

#[test]
fn proposal_finds_stock_by_foreign_keys() {
    TestEnv::builder().run(async |env| {
        execute(&env, &text("tenants", "schema.sql")).await;
        let (code, said, error) = call_with(&env.settings, &["adopt", "--table", "platform.orders"]).await;
        assert_eq!(code, 0, "{error}");
        for part in [
            "id = [\"tenant\", \"number\"]",
            "order = [\"tenant\", \"number\"]",
            "key = [\"tenant\", \"sku\"]",
            "set = { reserved = \"reserved - quantity\" }",
            "how long may an order stay unpaid?",
            "# CREATE INDEX CONCURRENTLY",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        let (code, _, error) = call_with(&env.settings, &["adopt", "--table", "platform.order"]).await;
        assert!(code == 1 && error.contains("there is no table"), "{error}");
    });
}

/// Seats that are held for a range of time; the table names neither a deadline nor the usual statuses.
const SEATS: &str = "CREATE SCHEMA box;
    CREATE TABLE box.bookings (event_id uuid, seat_no text, hold tstzrange, status text, PRIMARY KEY (event_id, seat_no));
    INSERT INTO box.bookings SELECT gen_random_uuid(), 'R/1', tstzrange(now(), NULL), unnest('{held,sold,released}'::text[]);
    CREATE TABLE box.reservations (id bigint PRIMARY KEY, payment_due timestamptz, placed_at timestamptz)";

#[test]
fn proposal_recognises_ranges_and_due_columns() {
    TestEnv::builder().run(async |env| {
        execute(&env, SEATS).await;
        let database = Database::connect(&env.settings.database, 2).await.unwrap();
        let proposal = propose::propose(&database, &Kind::ORDER, Some("box.bookings")).await.unwrap();
        for part in [
            "# ANALYZE has not counted its rows yet.",
            "open = \"status = 'held'\"",
            "paid = \"status = 'sold'\"",
            "deadline = \"upper(hold)\"",
            "close = { status = \"released\" }",
        ] {
            assert!(proposal.toml.contains(part), "{part}: {}", proposal.toml);
        }
        execute(&env, &proposal.ddl[0].replace("CONCURRENTLY ", "")).await;
        let proposal = propose::propose(&database, &Kind::ORDER, Some("box.reservations")).await.unwrap();
        assert!(proposal.toml.contains("deadline = \"payment_due\""), "{}", proposal.toml);
    });
}
