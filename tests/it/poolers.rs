//! A pooler between the worker and Postgres: with session pooling the worker runs as without it; any other mode is
//! refused at startup by an error that names the pooler, and nothing is written.

pub mod pgbouncer;

use std::time::Duration;

use order_timeout::Settings;
use order_timeout::postgres::Database;
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::skip::skipped;
use order_timeout_testkit::{TestEnv, wait_for};
use secrecy::{ExposeSecret, SecretString};
use sqlx::{AssertSqlSafe, Row};

use pgbouncer::Pooler;

/// Runs a test behind a PgBouncer with this configuration, or skips it if none is installed.
fn behind<F: Future<Output = ()> + Send + 'static>(
    name: &str,
    configuration: &'static str,
    test: impl FnOnce(std::sync::Arc<TestEnv>, Pooler) -> F + Send + 'static,
) {
    let name = format!("poolers::{name}");
    TestEnv::builder().run(async move |env| match Pooler::start(&env.settings.database.url, configuration) {
        Some(pooler) => test(env, pooler).await,
        None => skipped(&name, "pgbouncer is not installed; install it with: apt-get install pgbouncer"),
    });
}

fn with_url(env: &TestEnv, url: SecretString) -> Settings {
    let mut settings = env.settings.clone();
    settings.database.url = url;
    settings
}

/// The address of the pooler, with the worker's own schema on the search path.
fn with_schema(pooler: &Pooler, env: &TestEnv) -> SecretString {
    let url = pooler.url_of(&env.settings.database.url);
    format!("{}?options=-csearch_path%3Downers_schema", url.expose_secret()).into()
}

/// The settings of the sessions in a worker's pool.
async fn session_settings(settings: &Settings) -> Vec<String> {
    let database = Database::connect(&settings.database, 2).await.unwrap();
    let read = "SELECT current_setting('statement_timeout'), current_setting('lock_timeout'),
                       current_setting('idle_in_transaction_session_timeout'), current_setting('enable_seqscan'),
                       current_setting('plan_cache_mode'), current_setting('jit'), current_setting('search_path')";
    let row = database.run(async |connection| sqlx::query(read).fetch_one(connection).await).await.unwrap();
    (0..row.len()).map(|at| row.get(at)).collect()
}

/// Closes an order by its alarm while another article is locked.
async fn assert_closes(env: &TestEnv, settings: Settings) {
    let worker = order_timeout_testkit::RunningWorker::start(settings).await;
    let publisher = env.publisher().await;
    env.stock("locked", 10).await;
    let held_up = env.orders_of("locked", 1, Duration::from_secs(1)).await.remove(0);
    let order = env.order(Duration::from_secs(1)).await;
    let mut payment = env.pool.begin().await.unwrap();
    sqlx::query("SELECT FROM stock WHERE article_id = 'locked' FOR UPDATE").execute(&mut *payment).await.unwrap();
    for order in [&held_up, &order] {
        publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
    }
    wait_for("the close", async || env.status(&order).await == "closed").await;
    assert_eq!(env.status(&held_up).await, "unpaid");
    payment.rollback().await.unwrap();
    wait_for("the close of the other", async || env.status(&held_up).await == "closed").await;
    worker.stop().await;
    env.assert_ledger().await;
}

#[test]
fn session_mode_needs_no_configuration() {
    behind("session_mode_needs_no_configuration", "pool_mode = session", async |env, pooler| {
        let settings = with_url(&env, pooler.url_of(&env.settings.database.url));
        let (code, said, error) = call_with(&settings, &["setup"]).await;
        assert!(code == 0 && said.contains("up to date"), "{said}{error}");
        assert_eq!(
            session_settings(&settings).await[..6],
            ["20s", "200ms", "20s", "off", "force_generic_plan", "off"],
            "as without a pooler"
        );
        assert_closes(&env, settings).await;
    });
}

#[test]
fn dropped_options_are_set_again() {
    let configuration = "pool_mode = session\nignore_startup_parameters = extra_float_digits,options";
    behind("dropped_options_are_set_again", configuration, async |env, pooler| {
        sqlx::raw_sql("CREATE SCHEMA owners_schema").execute(&env.pool).await.unwrap();
        let settings = with_url(&env, with_schema(&pooler, &env));
        let (code, said, error) = call_with(&settings, &["setup"]).await;
        assert!(code == 0 && said.contains("applied"), "{said}{error}");
        let there = "SELECT count(*) FROM pg_tables WHERE schemaname = 'owners_schema' AND tablename = 'orders'";
        assert_eq!(env.count(there).await, 1, "the tables are in the schema that the address names");
        let found = session_settings(&settings).await;
        assert_eq!((found[0].as_str(), found[6].as_str()), ("20s", "owners_schema"));
        assert_closes(&env, with_url(&env, pooler.url_of(&env.settings.database.url))).await;
    });
}

#[test]
fn refused_options_name_pooler() {
    behind("refused_options_name_pooler", "pool_mode = session", async |env, pooler| {
        let settings = with_url(&env, with_schema(&pooler, &env));
        assert_refused(&settings, &["PgBouncer", "to ignore_startup_parameters"]).await;
    });
}

/// Every command that uses the database is refused with these words.
async fn assert_refused(settings: &Settings, parts: &[&str]) {
    for command in [&["setup"][..], &["--set", "log.filter=off", "worker"], &["close", "x"]] {
        let (code, said, error) = call_with(settings, command).await;
        assert_eq!((code, said.as_str()), (1, ""), "{command:?}: {error}");
        for part in parts {
            assert!(error.contains(part), "{command:?}: {error:?} lacks {part:?}");
        }
    }
}

/// `servers`: how many server connections the pooler has opened, and keeps, before it is used, so that settings left behind
/// on them would be found.
fn assert_shared_sessions_are_refused(name: &'static str, configuration: &'static str, servers: usize) {
    behind(name, configuration, async move |env, pooler| {
        let url = pooler.url_of(&env.settings.database.url);
        let options: sqlx::postgres::PgConnectOptions = url.expose_secret().parse().unwrap();
        let pool = sqlx::postgres::PgPoolOptions::new().max_connections(servers.try_into().unwrap());
        let pool = pool.connect_with(options.extra_float_digits(None)).await.unwrap();
        let busy = (0..servers).map(|_| sqlx::raw_sql("SELECT pg_sleep(0.1)").execute(&pool));
        futures_util::future::try_join_all(busy).await.unwrap();
        assert_refused(&with_url(&env, url.clone()), &["PgBouncer", "pool_mode = session"]).await;
        let changed =
            "SELECT count(*)::text FROM pg_settings WHERE name IN ('enable_seqscan', 'plan_cache_mode', 'jit')
                       AND setting <> reset_val";
        for _ in 0..servers {
            let changed: String = sqlx::raw_sql(AssertSqlSafe(changed)).fetch_one(&pool).await.unwrap().get(0);
            assert_eq!(changed, "0", "other clients' sessions stay as they are");
        }
        pool.close().await;
    });
}

#[test]
fn transaction_mode_is_refused() {
    assert_shared_sessions_are_refused("transaction_mode_is_refused", "pool_mode = transaction", 1);
}

#[test]
fn transaction_mode_that_ignores_options_is_refused() {
    assert_shared_sessions_are_refused(
        "transaction_mode_that_ignores_options_is_refused",
        "pool_mode = transaction\nignore_startup_parameters = extra_float_digits,options",
        1,
    );
}

#[test]
fn round_robin_transaction_mode_is_refused() {
    assert_shared_sessions_are_refused(
        "round_robin_transaction_mode_is_refused",
        "pool_mode = transaction\nserver_round_robin = 1\nmin_pool_size = 3",
        3,
    );
}

#[test]
fn statement_mode_is_refused() {
    assert_shared_sessions_are_refused("statement_mode_is_refused", "pool_mode = statement", 1);
}

/// Two clients that ask in turn each meet the same one of two servers again and again.
#[test]
fn round_robin_of_two_servers_is_refused() {
    assert_shared_sessions_are_refused(
        "round_robin_of_two_servers_is_refused",
        "pool_mode = transaction\nserver_round_robin = 1\ndefault_pool_size = 2",
        2,
    );
}
