//! One fault of the database after the other.

use std::collections::BTreeSet;
use std::sync::Arc;

use order_timeout::operations::doctor::{CheckName, Options, examine};
use order_timeout::postgres;
use order_timeout_core::delay::Strategy;
use order_timeout_testkit::away::on_private_database;
use order_timeout_testkit::payment_service::{PaymentService, wide_limits};
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{TestEnv, wait_for};
use regex::Regex;

use super::{SECOND, Stack, execute, here, only};
use crate::poolers::pgbouncer::Pooler;

/// One way in which a database is broken.
struct Broken {
    check: CheckName,
    breaks: &'static str,
    /// A part of what is found.
    says: &'static str,
    cure: Cure,
}

enum Cure {
    /// The fix that is found, run as it is.
    AsSaid,
    /// The first of two that are found.
    FirstAsSaid,
    /// This SQL, of which the fix has the first part.
    Sql(&'static str, &'static str),
}

const fn broken(check: CheckName, breaks: &'static str, says: &'static str, cure: Cure) -> Broken {
    Broken { check, breaks, says, cure }
}

/// Broken in SQL, and fixed in SQL.
const IN_SQL: [Broken; 15] = {
    use CheckName as C;
    use Cure::{AsSaid, FirstAsSaid, Sql};
    [
        broken(C::SchemaComplete, "DROP INDEX orders_unpaid_by_deadline", "deadline index is missing", AsSaid),
        broken(C::SchemaComplete, "DROP INDEX an_order_is_closed_once", "refuses a second close is missing", AsSaid),
        broken(
            C::SchemaComplete,
            "ALTER TABLE orders DROP CONSTRAINT no_order_is_closed_early",
            "refuses an early close is missing",
            AsSaid,
        ),
        broken(
            C::SchemaComplete,
            "ALTER TABLE alarm_outbox RENAME COLUMN traceparent TO other",
            "the column alarm_outbox.traceparent is missing",
            Sql("add it", "ALTER TABLE alarm_outbox RENAME COLUMN other TO traceparent"),
        ),
        broken(
            C::RoleRights,
            "REVOKE INSERT ON order_events FROM {role}",
            "lacks INSERT ON order_events",
            Sql("GRANT it", "GRANT INSERT ON order_events TO {role}"),
        ),
        broken(
            C::RoleRights,
            "ALTER TABLE orders ENABLE ROW LEVEL SECURITY",
            "row security may hide rows of orders",
            FirstAsSaid,
        ),
        broken(C::RoleLeastPrivilege, "ALTER ROLE {role} SUPERUSER CREATEDB", "SUPERUSER, CREATEDB", FirstAsSaid),
        broken(
            C::DatabaseWritable,
            "ALTER DATABASE {database} SET default_transaction_read_only = on",
            "default_transaction_read_only is on",
            Sql("switch it off", "ALTER DATABASE {database} RESET default_transaction_read_only"),
        ),
        broken(C::SchemaLogged, "ALTER TABLE event_outbox SET UNLOGGED", "event_outbox is unlogged", AsSaid),
        broken(
            C::Vacuum,
            "ALTER TABLE orders SET (autovacuum_enabled = false)",
            "autovacuum is off for the table orders",
            AsSaid,
        ),
        broken(
            C::DatabaseDurability,
            "ALTER ROLE {role} SET synchronous_commit = off",
            "synchronous_commit is off",
            Sql("RESET it for the role", "ALTER ROLE {role} RESET synchronous_commit"),
        ),
        broken(
            C::DatabaseConnections,
            "ALTER ROLE {role} CONNECTION LIMIT 5",
            "CONNECTION LIMIT of role",
            Sql("raise that limit", "ALTER ROLE {role} CONNECTION LIMIT -1"),
        ),
        broken(
            C::DatabaseConnections,
            "ALTER DATABASE {database} CONNECTION LIMIT 9",
            "CONNECTION LIMIT of database",
            Sql("raise that limit", "ALTER DATABASE {database} CONNECTION LIMIT -1"),
        ),
        broken(
            C::ParkedAlarms,
            "INSERT INTO parked_alarms (reason, detail, body) VALUES ('too_far', 'd', '')",
            "1 too_far",
            Sql("order-timeout parked", "DELETE FROM parked_alarms"),
        ),
        broken(
            C::OverduePlan,
            "INSERT INTO orders (id, expires_at)
                 SELECT gen_random_uuid(), now() + interval '1 day' FROM generate_series(1, 40000);
             DROP INDEX orders_unpaid_by_deadline;
             CREATE INDEX others ON orders (expires_at, id) WHERE status = 'unpaid' AND status = 'paid'",
            "reads",
            AsSaid,
        ),
    ]
};

#[test]
fn each_broken_database_is_found() {
    on_private_database(&[], async |env, _server| here(broken_databases_are_found(env)));
}

async fn broken_databases_are_found(env: Arc<TestEnv>) {
    let mut stack = Stack::new(env).await;
    // Without a broker, because these faults are the database's.
    stack.settings.delay.strategy = Strategy::Database;
    stack.assert_nothing_found("the start").await;
    for Broken { check, breaks, says, cure } in IN_SQL {
        stack.sql(breaks).await;
        let finding = stack.found(check).await;
        assert!(finding.what.contains(says), "{finding:?}");
        match cure {
            Cure::AsSaid => execute(&stack.env.pool, &finding.fix).await,
            Cure::FirstAsSaid => execute(&stack.env.pool, finding.fix.split_once(", or").unwrap().0).await,
            Cure::Sql(part, sql) => {
                assert!(finding.fix.contains(part), "{finding:?}");
                stack.sql(sql).await;
            }
        }
        stack.assert_nothing_found(breaks).await;
    }
    dead_rows_are_found(&stack).await;
    long_transaction_is_found(&mut stack).await;
    first_backlog_is_found(&mut stack).await;
    swept_orders_are_found(&mut stack).await;
    missing_execute_is_found(&mut stack).await;
    unusable_addresses_are_found(&mut stack).await;
    missing_setup_is_found(&stack).await;
    stack.assert_nothing_found("the end").await;
}

async fn dead_rows_are_found(stack: &Stack) {
    stack
        .sql(
            "ALTER TABLE event_outbox SET (autovacuum_vacuum_threshold = 2000000000);
             INSERT INTO event_outbox (routing_key, type, payload, sent_at)
                 SELECT 'k', 't', '{}', now() FROM generate_series(1, 12000);
             DELETE FROM event_outbox",
        )
        .await;
    // Statistics are written some time after the transaction.
    wait_for("the statistics", async || stack.report().await.findings().next().is_some()).await;
    let finding = stack.found(CheckName::Vacuum).await;
    assert!(finding.what.contains("event_outbox has 12000 dead rows"), "{finding:?}");
    execute(&stack.env.pool, finding.fix.split_once(';').unwrap().0).await;
    wait_for("the statistics", async || stack.report().await.findings().next().is_none()).await;
}

async fn long_transaction_is_found(stack: &mut Stack) {
    let mut idle = stack.env.pool.begin().await.unwrap();
    sqlx::query("SELECT count(*) FROM orders").execute(&mut *idle).await.unwrap();
    stack.options.long_transaction = SECOND / 10;
    wait_for("an old transaction", async || stack.report().await.findings().next().is_some()).await;
    let finding = stack.found(CheckName::LongTransactions).await;
    assert!(finding.what.contains("idle in transaction"), "{finding:?}");
    let end = Regex::new(r"SELECT pg_terminate_backend\(\d+\)").unwrap();
    execute(&stack.env.pool, end.find(&finding.fix).unwrap().as_str()).await;
    assert!(sqlx::query("SELECT 1").execute(&mut *idle).await.is_err(), "it was ended");
    stack.assert_nothing_found("the end of the transaction").await;
    stack.options = Options::default();
}

async fn first_backlog_is_found(stack: &mut Stack) {
    // Too young to count as overdue for long.
    let overdue = "INSERT INTO orders (id, expires_at) VALUES (gen_random_uuid(), now() - interval '65 seconds')";
    stack.sql(overdue).await;
    stack.settings.sweep.first_backlog = 0;
    let finding = stack.found(CheckName::FirstBacklog).await;
    assert!(finding.what.contains("1 orders of the table orders"), "{finding:?}");
    assert!(finding.fix.contains("adopt --accept-backlog"), "{finding:?}");
    let (code, _, stderr) = call_with(&stack.settings, &["adopt", "--accept-backlog"]).await;
    assert_eq!((code, stderr.as_str()), (0, ""));
    stack.assert_nothing_found("the backlog accepted").await;
    stack.sql("TRUNCATE orders CASCADE").await;
}

async fn missing_execute_is_found(stack: &mut Stack) {
    let (service, without) = (PaymentService::start(), stack.settings.clone());
    service.join(&mut stack.settings, "card", wide_limits());
    let finding = stack.found(CheckName::RoleRights).await;
    let lacks = "lacks EXECUTE ON FUNCTION settle_asked_order(text";
    assert!(finding.what.contains(lacks) && finding.what.contains("consume_reserved(uuid[])"), "{finding:?}");
    execute(&stack.env.pool, &finding.fix).await;
    stack.assert_nothing_found("the grant").await;
    stack.sql("ALTER FUNCTION paid_attempts(text) RENAME TO former").await;
    let finding = stack.found(CheckName::SchemaComplete).await;
    assert!(finding.what.contains("the function paid_attempts(text) is missing"), "{finding:?}");
    stack.sql("ALTER FUNCTION former(text) RENAME TO paid_attempts").await;
    stack.assert_nothing_found("the function").await;
    stack.settings = without;
}

async fn swept_orders_are_found(stack: &mut Stack) {
    stack.settings.delay.strategy = Strategy::DeadLetter;
    let closed = "INSERT INTO orders (id, status, expires_at, closed_at, closed_by, close_reason)
                  SELECT gen_random_uuid(), 'closed', now() - interval '2 s', now(), 'sweep', 'unpaid' FROM generate_series(1, 12)";
    stack.sql(closed).await;
    let report = stack.report().await;
    assert!(only(&report, CheckName::ClosesBySweep).what.contains("closed 12 of 12"));
    assert_eq!(report.exit_code(), 1);
    // Those of the time after the fix are enough.
    stack.sql("UPDATE orders SET expires_at = now() - interval '11 min', closed_at = now() - interval '11 min'").await;
    stack.assert_nothing_found("no close by the sweep lately").await;
    stack.settings.delay.strategy = Strategy::Database;
}

async fn unusable_addresses_are_found(stack: &mut Stack) {
    let good = stack.settings.clone();
    stack.sql("ALTER ROLE {role} PASSWORD '{role}'").await;
    stack.settings = stack.with_account(&stack.role);
    let finding = stack.found(CheckName::DatabasePassword).await;
    assert!(!finding.what.contains("s3cret"), "{finding:?}");
    stack.sql("ALTER ROLE {role} PASSWORD 's3cret-4711'").await;
    let finding = stack.report().await;
    let names: BTreeSet<_> = finding.findings().map(|(name, _)| name).collect();
    assert!(names.contains(&CheckName::DatabaseReachable), "{names:?}");
    assert_eq!(finding.exit_code(), 2);
    stack.settings = good.clone();
    stack.assert_nothing_found("another password").await;
    let Some(pooler) = Pooler::start(&good.database.url, "pool_mode = transaction") else { return };
    stack.settings.database.url = pooler.url_of(&good.database.url);
    stack.found(CheckName::DatabasePooler).await;
    drop(pooler);
    let pooler = Pooler::start(&good.database.url, "pool_mode = session").unwrap();
    stack.settings.database.url = pooler.url_of(&good.database.url);
    stack.assert_nothing_found("a pooler in session mode").await;
    stack.settings = good;
}

async fn missing_setup_is_found(stack: &Stack) {
    let name = format!("fresh_{}", stack.env.settings.namespace);
    execute(&stack.env.pool, &format!("CREATE DATABASE {name} OWNER {}", stack.role)).await;
    let mut settings = stack.settings.clone();
    settings.database.url = settings.database.url_of(&name);
    let found = only(&examine(&settings, &stack.options).await, CheckName::SchemaMigrated);
    assert!(found.fix.contains("order-timeout setup"), "{found:?}");
    postgres::migrate(&settings.database).await.unwrap();
    assert_eq!(examine(&settings, &stack.options).await.findings().count(), 0);
    execute(&stack.env.pool, &format!("DROP DATABASE {name} WITH (FORCE)")).await;
}
