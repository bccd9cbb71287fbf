//! The clock of a database for tests: what is due is done as soon as it has moved, and on no other database it moves.

use std::time::Duration;

use order_timeout::config::kinds::Remind;
use order_timeout_core::kind::Kind;
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{TestEnv, wait_for, wait_promised};
use secrecy::ExposeSecret;
use sqlx::{Connection, PgConnection};

const MINUTE: Duration = Duration::from_secs(60);

async fn execute(env: &TestEnv, sql: &str) {
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned())).execute(&env.pool).await.unwrap();
}

#[test]
fn advance_closes_what_falls_due() {
    let shown = "SELECT count(*) FROM event_outbox WHERE type = 'order.closed.v1' AND sent_at IS NOT NULL";
    let remind = |settings: &mut order_timeout::Settings| {
        settings.kinds.entry(Kind::ORDER).or_default().remind = vec![Remind(10 * MINUTE)];
    };
    TestEnv::builder().with_clock().settings(remind).run(async move |env| {
        let worker = env.worker().await;
        wait_for("the reminders to begin", async || env.count("SELECT count(*) FROM reminder_progress").await == 1)
            .await;
        for round in 1..=3 {
            let (order, later) = (env.order(30 * MINUTE).await, env.order(40 * MINUTE).await);
            env.write_alarm(&order).await;
            env.write_alarm(&later).await;
            wait_for("the alarms on their way", async || {
                env.count("SELECT count(*) FROM alarm_outbox WHERE sent_at IS NULL").await == 0
            })
            .await;
            env.advance(21 * MINUTE).await;
            let reminded = "SELECT count(*) FROM event_outbox WHERE type = 'order.expiring.v1'";
            wait_for("the reminder", async || env.count(reminded).await == 2 * round - 1).await;
            env.advance(9 * MINUTE).await;
            wait_promised(Duration::from_secs(1), "the close", async || env.status(&order).await == "closed").await;
            wait_promised(Duration::from_secs(1), "its event", async || env.count(shown).await == 2 * round - 1).await;
            assert_eq!(env.status(&later).await, "unpaid");
            wait_for("the other reminder", async || env.count(reminded).await == 2 * round).await;
            env.advance(10 * MINUTE).await;
            wait_promised(Duration::from_secs(1), "the other", async || env.count(shown).await == 2 * round).await;
        }
        worker.stop().await;
        env.assert_ledger().await;
    });
}

#[test]
fn database_for_tests_is_made_once() {
    TestEnv::builder().run(async |env| {
        let fails = async |arguments: &[&str], part: &str| {
            let (code, _, why) = call_with(&env.settings, arguments).await;
            assert!(code == 1 && why.contains(part), "{arguments:?}: {code} {why}");
        };
        fails(&["setup", "--for-tests"], "this database has tables").await;
        fails(&["testing", "advance", "30m"], "create one with `order-timeout setup --for-tests`").await;
        let advance = "SELECT order_timeout_clock.advance('1 hour')";
        assert!(sqlx::query(advance).execute(&env.pool).await.is_err(), "there is no such clock");

        // An empty database, where our tables are to be in a schema of their own.
        execute(&env, "DROP SCHEMA public CASCADE; CREATE SCHEMA public; CREATE SCHEMA ours").await;
        let mut settings = env.settings.clone();
        settings.database.url =
            format!("{}?options=-csearch_path%3Dours", settings.database.url.expose_secret()).into();
        for _ in 0..2 {
            let (code, _, why) = call_with(&settings, &["setup", "--for-tests"]).await;
            assert_eq!(code, 0, "{why}");
        }
        let (code, said, why) = call_with(&settings, &["testing", "advance", "30m"]).await;
        assert!(code == 0 && said.starts_with("the database's clock says 20"), "{said}{why}");
        let (code, _, why) = call_with(&settings, &["testing", "advance", "-30m"]).await;
        assert!(code == 2 && why.contains("the clock moves forward only"), "{why}");
        // It outlives the transaction.
        execute(&env, "BEGIN; SELECT order_timeout_clock.advance('10 minutes'); ROLLBACK").await;
        let back = "SELECT order_timeout_clock.advance('-1 minute')";
        let refused = sqlx::query(back).execute(&env.pool).await.unwrap_err().to_string();
        assert!(refused.contains("give a time from 0 to 100 years"), "{refused}");

        // Columns have it, and what a new session of the shop reads.
        let row = "INSERT INTO ours.alarm_outbox (order_id, deadline) VALUES ('7', now())
                   RETURNING round(extract(epoch FROM created_at - pg_catalog.now()) / 60)::bigint";
        assert_eq!(sqlx::query_scalar::<_, i64>(row).fetch_one(&env.pool).await.unwrap(), 40);
        let mut session = PgConnection::connect(env.settings.database.url.expose_secret()).await.unwrap();
        let ahead = "SELECT (extract(epoch FROM now() - pg_catalog.now()) / 60)::bigint";
        assert_eq!(sqlx::query_scalar::<_, i64>(ahead).fetch_one(&mut session).await.unwrap(), 40);
        session.close().await.unwrap();
    });
}
