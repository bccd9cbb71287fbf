//! Commands name the database that they use: before writing tables, when something is missing there, and when they take
//! the time from it.

use std::time::Duration;

use order_timeout::Settings;
use order_timeout_core::message::read_rfc3339;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::process::{bare, call_with, run};
use order_timeout_testkit::{TestEnv, host_and_port, with_parts};
use secrecy::ExposeSecret;
use serde_json::Value;
use sqlx::AssertSqlSafe;

async fn execute(env: &TestEnv, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&env.pool).await.unwrap();
}

async fn assert_fails(settings: &Settings, command: &str, parts: &[&str]) {
    let (code, said, error) = call_with(settings, &["--set", "log.filter=off", command]).await;
    assert_eq!((code, said.as_str()), (1, ""), "{command}: {error}");
    for part in parts {
        assert!(error.contains(part), "{command}: {error:?} lacks {part:?}");
    }
}

#[test]
fn setup_without_address_is_refused() {
    let (code, said, error) = run(bare().arg("setup"));
    assert_eq!((code, said.as_str()), (2, ""), "{error}");
    for part in ["database.url", "127.0.0.1:5432, database \"postgres\"", "ORDER_TIMEOUT__DATABASE__URL"] {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
}

#[test]
fn hash_in_password_is_explained() {
    for command in ["setup", "worker"] {
        let mut program = bare();
        program.env("ORDER_TIMEOUT__DATABASE__URL", "postgres://user:sesame#4711@localhost/shop");
        let (code, _, error) = run(program.arg(command));
        assert!(code == 2 && error.contains("%23") && !error.contains("sesame"), "{error}");
    }
}

#[test]
fn missing_migrations_name_database() {
    TestEnv::builder().run(async |env| {
        let delete = "DELETE FROM order_timeout_migrations WHERE version > 20261129100000";
        let missing = sqlx::query(delete).execute(&env.pool).await.unwrap().rows_affected();
        let place = host_and_port(&env.settings.database.url);
        let database = format!("database \"order_timeout_{}\"", env.settings.namespace);
        assert_fails(
            &env.settings,
            "worker",
            &[&format!("lacks {missing} migration(s)"), &place, &database, "order-timeout setup"],
        )
        .await;
    });
}

#[test]
fn unfinished_migration_names_our_table() {
    TestEnv::builder().run(async |env| {
        execute(&env, "UPDATE order_timeout_migrations SET success = false WHERE version = 20261129100100").await;
        for command in ["setup", "worker"] {
            let remedy = "DELETE FROM order_timeout_migrations WHERE version = 20261129100100";
            assert_fails(&env.settings, command, &["began and did not finish", remedy]).await;
        }
    });
}

#[test]
fn unreleased_schema_is_refused() {
    TestEnv::builder().run(async |env| {
        execute(&env, "UPDATE order_timeout_migrations SET version = 20261120100000 WHERE version = 20261129100000")
            .await;
        for command in ["setup", "worker"] {
            let parts = ["the table order_timeout_migrations", "before the first release", "create an empty database"];
            assert_fails(&env.settings, command, &parts).await;
        }
    });
}

#[test]
fn missing_schema_says_create_schema() {
    TestEnv::builder().run(async |env| {
        let mut settings = env.settings.clone();
        let url = format!("{}?options=-csearch_path%3Dno_such_schema", settings.database.url.expose_secret());
        settings.database.url = url.into();
        assert_fails(&settings, "setup", &["(SQLSTATE 3F000)", "CREATE SCHEMA"]).await;
    });
}

/// How far an alarm scheduled in ten minutes is ahead of this machine's clock.
async fn scheduled_ahead(settings: &Settings) -> Duration {
    let arguments = ["schedule", "018f2d3e-0000-7000-8000-000000000000", "--in", "10m", "--json"];
    let (code, said, error) = call_with(settings, &arguments).await;
    assert_eq!(code, 0, "{error}");
    let answer: Value = serde_json::from_str(&said).unwrap();
    read_rfc3339(answer["deadline"].as_str().unwrap()).unwrap().since(Timestamp::now_by_local_clock())
}

#[test]
fn scheduling_uses_database_clock() {
    TestEnv::builder().with_clock().run(async |env| {
        env.advance(Duration::from_secs(3_600)).await;
        let ahead = scheduled_ahead(&env.settings).await;
        assert!(ahead > Duration::from_secs(3_600) && ahead <= Duration::from_secs(4_200), "{ahead:?}");

        let mut settings = env.settings.clone();
        // No server listens on port 9 (discard).
        settings.database.url = with_parts(&settings.database.url, None, Some("127.0.0.1:9"), None);
        let ahead = scheduled_ahead(&settings).await;
        assert!(ahead <= Duration::from_secs(600), "by the clock here where no database answers: {ahead:?}");
        settings.database.url = "mysql://elsewhere/shop".to_owned().into();
        assert!(scheduled_ahead(&settings).await <= Duration::from_secs(600), "a publisher needs no database");
    });
}
