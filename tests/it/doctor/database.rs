//! One fault of the database after the other.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use order_timeout::operations::doctor::examine;
use order_timeout::postgres;
use order_timeout_core::delay::Strategy;
use order_timeout_core::problem::Cause;
use order_timeout_testkit::TestEnv;
use order_timeout_testkit::away::on_private_database;
use order_timeout_testkit::payment_service::{PaymentService, wide_limits};
use order_timeout_testkit::process::call_with;
use sqlx::{ConnectOptions, Connection};

use super::{Stack, execute, here, only, register};
use crate::poolers::pgbouncer::Pooler;

/// One way in which a database is broken.
struct Broken {
    check: Cause,
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

const fn broken(check: Cause, breaks: &'static str, says: &'static str, cure: Cure) -> Broken {
    Broken { check, breaks, says, cure }
}

/// Broken in SQL, and fixed in SQL.
const IN_SQL: [Broken; 16] = {
    use Cause as C;
    use Cure::{AsSaid, FirstAsSaid, Sql};
    [
        broken(C::Schema, "DROP INDEX orders_unpaid_by_deadline", "deadline index is missing", AsSaid),
        broken(C::Schema, "DROP INDEX an_order_is_closed_once", "refuses a second close is missing", AsSaid),
        broken(
            C::Schema,
            "ALTER TABLE orders DROP CONSTRAINT no_order_is_closed_early",
            "refuses an early close is missing",
            AsSaid,
        ),
        broken(
            C::Schema,
            "ALTER TABLE alarm_outbox RENAME COLUMN traceparent TO other",
            "the column alarm_outbox.traceparent is missing",
            Sql("add it", "ALTER TABLE alarm_outbox RENAME COLUMN other TO traceparent"),
        ),
        broken(C::DatabaseRights, "REVOKE INSERT ON order_events FROM {role}", "lacks INSERT ON order_events", AsSaid),
        broken(C::DatabaseRights, "REVOKE SELECT ON alarm_outbox FROM {role}", "lacks SELECT ON alarm_outbox", AsSaid),
        broken(C::DatabaseRights, "REVOKE ALL ON event_outbox FROM {role}", "lacks SELECT ON event_outbox", AsSaid),
        broken(
            C::DatabaseRights,
            "REVOKE SELECT ON order_timeout_migrations FROM {role}",
            "lacks SELECT ON public.order_timeout_migrations",
            AsSaid,
        ),
        broken(
            C::DatabaseRights,
            "REVOKE USAGE ON SCHEMA public FROM {role}, PUBLIC",
            "lacks USAGE ON SCHEMA public",
            AsSaid,
        ),
        broken(
            C::DatabaseRights,
            "ALTER TABLE orders ENABLE ROW LEVEL SECURITY",
            "row security may hide rows of orders",
            FirstAsSaid,
        ),
        broken(
            C::ReadOnly,
            "ALTER DATABASE {database} SET default_transaction_read_only = on",
            "default_transaction_read_only is on",
            Sql("switch it off", "ALTER DATABASE {database} RESET default_transaction_read_only"),
        ),
        broken(C::Schema, "ALTER TABLE event_outbox SET UNLOGGED", "event_outbox is unlogged", AsSaid),
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
            C::SlowOverdueQuery,
            "BEGIN; INSERT INTO orders (id, expires_at)
                 SELECT gen_random_uuid(), now() + interval '1 day' FROM generate_series(1, 40000); COMMIT;
             DROP INDEX orders_unpaid_by_deadline;
             CREATE INDEX others ON orders (expires_at, id) WHERE status = 'unpaid' AND status = 'paid'",
            "reads",
            AsSaid,
        ),
    ]
};

#[test]
fn each_broken_database_is_found() {
    on_private_database(&["-c", "max_prepared_transactions=5"], async |env, _server| {
        here(broken_databases_are_found(env))
    });
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
    taken_connections_are_found(&stack).await;
    first_backlog_is_found(&mut stack).await;
    holders_of_locks_are_found(&mut stack).await;
    forged_close_is_found(&mut stack).await;
    missing_execute_is_found(&mut stack).await;
    unusable_addresses_are_found(&mut stack).await;
    missing_setup_is_found(&stack).await;
    stack.assert_nothing_found("the end").await;
}

/// By sessions of another role, whose state is hidden from the worker's.
async fn taken_connections_are_found(stack: &Stack) {
    let limit =
        "SELECT current_setting('max_connections')::bigint - current_setting('superuser_reserved_connections')::bigint
                 - count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'";
    let mut taken = Vec::new();
    while stack.env.count(limit).await > 8 {
        let options = (*stack.env.pool.connect_options()).clone();
        taken.push(options.connect().await.unwrap());
    }
    let finding = stack.found(Cause::DatabaseConnections).await;
    assert!(finding.what.contains("are left by max_connections"), "{finding:?}");
    for connection in taken {
        connection.close().await.unwrap();
    }
    stack.wait_until_nothing_found("the connections closed").await;
}

async fn first_backlog_is_found(stack: &mut Stack) {
    // Too young to count as overdue for long.
    let overdue = "INSERT INTO orders (id, expires_at) VALUES (gen_random_uuid(), now() - interval '65 seconds')";
    stack.sql(overdue).await;
    stack.settings.sweep.grace = Duration::from_secs(600);
    stack.settings.sweep.first_backlog = 0;
    let finding = stack.found(Cause::FirstBacklog).await;
    assert!(finding.what.contains("1 orders of the table orders"), "{finding:?}");
    assert!(finding.fix.contains("adopt --accept-backlog"), "{finding:?}");
    let (code, _, stderr) = call_with(&stack.settings, &["adopt", "--accept-backlog"]).await;
    assert_eq!((code, stderr.as_str()), (0, ""));
    stack.assert_nothing_found("the backlog accepted").await;
    stack.sql("TRUNCATE orders CASCADE").await;
}

/// An order that a session keeps open, then one that a prepared transaction does. Another role sees neither state nor age.
async fn holders_of_locks_are_found(stack: &mut Stack) {
    let grace = std::mem::replace(&mut stack.settings.sweep.grace, Duration::ZERO);
    let order = stack.env.order(Duration::ZERO).await;
    stack.sql("UPDATE orders SET expires_at = now() - interval '90 seconds'").await;
    register(stack, "{order}", "{}").await;
    let mut idle = stack.env.pool.begin().await.unwrap();
    let pid: i32 =
        sqlx::query_scalar("SELECT pg_backend_pid() FROM orders FOR UPDATE").fetch_one(&mut *idle).await.unwrap();
    let problem = stack.found(Cause::OrdersOverdue).await;
    assert!(problem.what.contains(&order.id.to_string()), "one as an example: {problem:?}");
    assert!(problem.what.contains(&format!("pid {pid} (")), "{problem:?}");
    assert!(problem.what.contains("only pg_read_all_stats shows"), "{problem:?}");
    let end = problem.fix.rsplit(": ").next().unwrap();
    execute(&stack.env.pool, end).await;
    assert!(sqlx::query("SELECT 1").execute(&mut *idle).await.is_err(), "it was ended");
    drop(idle);
    stack.sql("BEGIN; SELECT FROM orders FOR UPDATE; PREPARE TRANSACTION 'left behind'").await;
    let problem = stack.found(Cause::OrdersOverdue).await;
    assert!(problem.what.contains("the prepared transaction \"left behind\" since 20"), "{problem:?}");
    let end = problem.fix.rsplit(": ").next().unwrap();
    execute(&stack.env.pool, end).await;
    assert!(stack.found(Cause::OrdersOverdue).await.fix.contains("order-timeout explain"));
    stack.sql("DELETE FROM order_timeout_workers; TRUNCATE orders CASCADE").await;
    stack.settings.sweep.grace = grace;
    stack.assert_nothing_found("no lock is held").await;
}

/// A row of the history that another program wrote keeps an order from being closed.
async fn forged_close_is_found(stack: &mut Stack) {
    let grace = std::mem::replace(&mut stack.settings.sweep.grace, Duration::ZERO);
    let order = stack.env.order(Duration::ZERO).await;
    stack
        .sql(
            "UPDATE orders SET expires_at = now() - interval '90 seconds';
             INSERT INTO order_events (order_id, event, by, reason) SELECT id, 'closed', 'alarm', 'forged' FROM orders",
        )
        .await;
    register(stack, "{order}", "{}").await;
    let problem = stack.found(Cause::OrdersOverdue).await;
    let id = order.id.to_string();
    assert!(problem.what.contains(&id) && problem.fix.contains("order-timeout explain"), "{problem:?}");
    let (_, shown, _) = call_with(&stack.settings, &["explain", &id]).await;
    assert!(shown.contains("order_events says that it was closed at 20"), "{shown}");
    stack.sql("DELETE FROM order_timeout_workers; TRUNCATE orders CASCADE").await;
    stack.settings.sweep.grace = grace;
    stack.assert_nothing_found("no order is overdue").await;
}

async fn missing_execute_is_found(stack: &mut Stack) {
    let (service, without) = (PaymentService::start(), stack.settings.clone());
    service.join(&mut stack.settings, "card", wide_limits());
    let finding = stack.found(Cause::DatabaseRights).await;
    let lacks = "lacks EXECUTE ON FUNCTION settle_asked_order(text";
    assert!(finding.what.contains(lacks) && finding.what.contains("consume_for_orders(text, text[])"), "{finding:?}");
    execute(&stack.env.pool, &finding.fix).await;
    stack.assert_nothing_found("the grant").await;
    stack.sql("ALTER FUNCTION lock_free_order(text, text) RENAME TO former").await;
    let finding = stack.found(Cause::Schema).await;
    assert!(finding.what.contains("the function lock_free_order(text, text) is missing"), "{finding:?}");
    stack.sql("ALTER FUNCTION former(text, text) RENAME TO lock_free_order").await;
    stack.assert_nothing_found("the function").await;
    stack.settings = without;
}

async fn unusable_addresses_are_found(stack: &mut Stack) {
    let good = stack.settings.clone();
    stack.settings = stack.with_account("wrong");
    let finding = stack.report().await;
    let names: BTreeSet<_> = finding.problems().map(|problem| problem.cause).collect();
    assert!(names.contains(&Cause::Database), "{names:?}");
    assert_eq!(finding.exit_code(), 2);
    stack.settings = good.clone();
    stack.assert_nothing_found("another password").await;
    let Some(pooler) = Pooler::start(&good.database.url, "pool_mode = transaction") else { return };
    stack.settings.database.url = pooler.url_of(&good.database.url);
    stack.found(Cause::DatabasePooler).await;
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
    let found = only(&examine(&settings, &stack.options).await, Cause::Schema);
    assert!(found.fix.contains("order-timeout setup"), "{found:?}");
    postgres::migrate(&settings.database).await.unwrap();
    assert_eq!(examine(&settings, &stack.options).await.problems().count(), 0);
    execute(&stack.env.pool, &format!("DROP DATABASE {name} WITH (FORCE)")).await;
}
