//! A payment that commits between the start of the close statement and its lock counts, for a mapped table as well.

use std::time::Duration;

use order_timeout::config::kinds::CloseSettings;
use order_timeout::operations::orders_statements;
use order_timeout::postgres::Database;

use super::{execute, map, text};
use order_timeout_core::kind::Kind;
use order_timeout_testkit::figures::{Figures, serve_http};
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{TestEnv, wait_for};

/// One overdue order, and a function that a statement calls to wait between its snapshot and its lock.
const SETUP: &str = "CREATE FUNCTION tickets.slowly(id integer) RETURNS integer LANGUAGE plpgsql VOLATILE AS $$
    BEGIN PERFORM pg_sleep(1); RETURN id; END $$;
    CREATE TABLE tickets.payments (order_id integer PRIMARY KEY REFERENCES tickets.pretixbase_order);
    CREATE FUNCTION tickets.is_paid(id integer) RETURNS boolean LANGUAGE plpgsql VOLATILE AS $$
    BEGIN RETURN EXISTS (SELECT FROM tickets.payments p WHERE p.order_id = is_paid.id); END $$;
    INSERT INTO tickets.pretixbase_order (code, expires) VALUES ('A', now() - interval '1 s')";

/// The close statement in effect, which waits for a second before it locks.
async fn slow_close(env: &TestEnv) -> String {
    let database = Database::connect(&env.settings.database, 2).await.unwrap();
    let close = orders_statements::texts(&database, &env.settings, &Kind::ORDER).await.unwrap().close;
    let keys = "ANY (ARRAY(SELECT t.k1 FROM ot_there t))";
    let slowly = "ANY (ARRAY(SELECT tickets.slowly(t.k1) FROM ot_there t))";
    assert_eq!(close.matches(keys).count(), 1, "{close}");
    close.replace(keys, slowly)
}

fn payment_counts(paid: &'static str, payment: &'static str) {
    TestEnv::builder()
        .settings(move |settings| {
            map(settings, "ticketing");
            settings.kinds.get_mut(&Kind::ORDER).and_then(|kind| kind.table.as_mut()).unwrap().paid = paid.into();
        })
        .run(async move |env| {
            execute(&env, &text("ticketing", "schema.sql")).await;
            execute(&env, SETUP).await;
            let mut file = tempfile::NamedTempFile::new().unwrap();
            std::io::Write::write_all(&mut file, slow_close(&env).await.as_bytes()).unwrap();
            let mut settings = env.settings.clone();
            settings.kinds.clear();
            settings.orders.close_sql = file.path().display().to_string();
            // Not run here, but there must be one.
            settings.orders.overdue_sql = "tests/fixtures/nothing_overdue.sql".into();
            let closing = tokio::spawn(async move { call_with(&settings, &["close", "1"]).await });
            let begun =
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'";
            wait_for("the statement", async || env.count(begun).await == 1).await;
            execute(&env, payment).await;
            let (_, said, error) = closing.await.unwrap();
            assert_eq!(said, "1: paid\n", "{error}");
            assert_eq!(env.count("SELECT count(*) FROM tickets.pretixbase_order WHERE status = 'e'").await, 0);
        });
}

#[test]
fn payment_in_row_counts_until_lock() {
    payment_counts("status = 'p'", "UPDATE tickets.pretixbase_order SET status = 'p' WHERE id = 1 AND status = 'n'");
}

#[test]
fn payment_row_counts_through_volatile_function() {
    payment_counts(
        "tickets.is_paid(id)",
        "BEGIN; SELECT FROM tickets.pretixbase_order WHERE id = 1 FOR NO KEY UPDATE;
         INSERT INTO tickets.payments VALUES (1); COMMIT",
    );
}

#[test]
fn close_that_leaves_order_open_fails() {
    TestEnv::builder()
        .settings(|settings| {
            serve_http(settings);
            settings.sweep.grace = Duration::ZERO;
            map(settings, "ticketing");
            let table = settings.kinds.get_mut(&Kind::ORDER).and_then(|kind| kind.table.as_mut()).unwrap();
            // Mistyped: `open` still accepts it.
            table.close = CloseSettings::Set([("status".to_owned(), "n".to_owned())].into());
        })
        .run(async |env| {
            execute(&env, &text("ticketing", "schema.sql")).await;
            execute(
                &env,
                "INSERT INTO tickets.pretixbase_quota VALUES (1, 10, 1);
                 INSERT INTO tickets.pretixbase_order (code, expires) VALUES ('A', now() - interval '1 s');
                 INSERT INTO tickets.pretixbase_orderposition (order_id, quota_id) VALUES (1, 1)",
            )
            .await;
            let worker = env.worker().await;
            wait_for("a failed close", async || {
                Figures::of(&worker).await.get("close_results_total{outcome=\"failed\"}") > 0.0
            })
            .await;
            worker.stop().await;
            assert_eq!(env.count("SELECT booked::bigint FROM tickets.pretixbase_quota").await, 1);
            assert_eq!(env.count("SELECT count(*) FROM event_outbox").await, 0);
        });
}
