//! `order-timeout doctor` finds nothing on a healthy deployment. On one that is broken in one way it finds exactly that,
//! and nothing any more when its fix was applied.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use lapin::options::{BasicConsumeOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::{AMQPValue, FieldTable};
use order_timeout::Settings;
use order_timeout::operations::doctor::{CheckName, Finding, Options, Report, examine};
use order_timeout::postgres;
use order_timeout_amqp::topology::{Argument, DUE_KEY};
use order_timeout_core::delay::Strategy;
use order_timeout_core::kind::Kind;
use order_timeout_testkit::away::{meanwhile, on_private_database};
use order_timeout_testkit::paths::{repository, scratch_folder};
use order_timeout_testkit::private::Private;
use order_timeout_testkit::process::{WorkerProcess, call_with};
use order_timeout_testkit::{RunningWorker, TIMEOUT, TestEnv, wait_for, with_parts};
use regex::Regex;
use secrecy::ExposeSecret;
use serde_json::Value;
use sqlx::{AssertSqlSafe, PgPool};

use crate::poolers::pgbouncer::Pooler;

const SECOND: Duration = Duration::from_secs(1);
/// Of the role of the worker and the doctor.
const PASSWORD: &str = "s3cret-4711";

/// Runs a test's future on this thread. Its tables of borrowed texts keep it from being sent to another.
fn here<T>(test: impl Future<Output = T>) -> T {
    meanwhile(|| tokio::runtime::Handle::current().block_on(test))
}

/// A deployment on private servers, as its doctor sees it.
struct Stack {
    env: Arc<TestEnv>,
    role: String,
    settings: Settings,
    options: Options,
}

async fn execute(pool: &PgPool, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(pool).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
}

impl Stack {
    /// With a role of its own, as docs/operating/deploy.md says under "Rights".
    async fn new(env: Arc<TestEnv>) -> Self {
        let role = format!("worker_{}", env.settings.namespace);
        let stack = Self { role, settings: env.settings.clone(), options: Options::default(), env };
        stack
            .sql(
                "CREATE ROLE {role} LOGIN PASSWORD 's3cret-4711'; GRANT pg_read_all_stats TO {role};
                 GRANT USAGE ON SCHEMA public TO {role};
                 GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}",
            )
            .await;
        let settings = stack.with_account(PASSWORD);
        Self { settings, ..stack }
    }

    fn with_account(&self, password: &str) -> Settings {
        let mut settings = self.settings.clone();
        settings.database.url =
            with_parts(&settings.database.url, Some(&format!("{}:{password}", self.role)), None, None);
        settings
    }

    /// Runs SQL as a superuser. `{role}` is the worker's role, `{database}` its database.
    async fn sql(&self, sql: &str) {
        let database = format!("order_timeout_{}", self.env.settings.namespace);
        execute(&self.env.pool, &sql.replace("{role}", &self.role).replace("{database}", &database)).await;
    }

    async fn report(&self) -> Report {
        examine(&self.settings, &self.options).await
    }

    async fn assert_nothing_found(&self, after: &str) {
        let report = self.report().await;
        assert_eq!(report.findings().collect::<Vec<_>>(), [], "{after}");
    }

    /// The same, as soon as something is found.
    async fn found_in_time(&self, name: CheckName) -> Finding {
        let mut report = self.report().await;
        let began = Instant::now();
        while report.exit_code() == 0 {
            assert!(began.elapsed() < TIMEOUT, "{name:?} is not found");
            report = self.report().await;
        }
        only(&report, name)
    }

    async fn wait_until_nothing_found(&self, after: &str) {
        wait_for(after, async || self.report().await.exit_code() == 0).await;
    }

    /// The first finding of this check, if it is the only check that finds something.
    async fn found(&self, name: CheckName) -> Finding {
        only(&self.report().await, name)
    }
}

/// The first finding of this check, if it is the only check that finds something.
fn only(report: &Report, name: CheckName) -> Finding {
    let names: BTreeSet<CheckName> = report.findings().map(|(name, _)| name).collect();
    assert_eq!(names, BTreeSet::from([name]), "{:#?}", report.findings().collect::<Vec<_>>());
    let (_, finding) = report.findings().next().expect("a finding");
    assert!(!finding.what.is_empty() && !finding.why.is_empty() && !finding.fix.is_empty(), "{finding:?}");
    finding.clone()
}

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
            "ALTER TABLE canaries RENAME COLUMN queue TO former",
            "the column canaries.queue is missing",
            Sql("add it", "ALTER TABLE canaries RENAME COLUMN former TO queue"),
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

/// A worker on another host that has just been seen, with these settings that must agree.
async fn register(stack: &Stack, kinds: &str, delays: &str) {
    let namespace = &stack.env.settings.namespace;
    stack
        .sql(&format!(
            "INSERT INTO order_timeout_workers (id, host, pid, version, namespace, kinds, delays)
             VALUES (gen_random_uuid(), 'shop-2', 17, '0.1.0', '{namespace}', '{kinds}', '{delays}')"
        ))
        .await;
}

#[test]
fn each_fault_of_workers_is_found() {
    on_private_database(&[], async |env, _server| here(faults_of_workers_are_found(env)));
}

async fn faults_of_workers_are_found(env: Arc<TestEnv>) {
    let mut stack = Stack::new(env).await;
    // No worker runs, and its alarms wait.
    stack.sql("INSERT INTO alarm_outbox (order_id, deadline, created_at) VALUES ('1', now() + interval '1 h', now() - interval '5 min')").await;
    assert!(stack.found(CheckName::AlarmOutbox).await.fix.contains("start a worker"));
    let worker = WorkerProcess::start(&stack.settings);
    wait_for("the alarm sent", async || stack.report().await.findings().next().is_none()).await;

    // Another worker has another lead; then it is stopped.
    register(&stack, "{order}", r#"{"delay.lead": "99s"}"#).await;
    assert!(stack.found(CheckName::WorkersAgree).await.what.contains("host shop-2 (pid 17) has delay.lead \"99s\""));
    stack.sql("DELETE FROM order_timeout_workers WHERE host = 'shop-2'").await;
    stack.assert_nothing_found("that worker stopped").await;

    // An order that a trigger keeps open; the sweep's grace is short.
    stack.settings.sweep.grace = Duration::ZERO;
    stack.env.refuse_to_close("article").await;
    stack.env.order(Duration::ZERO).await;
    stack
        .sql("ALTER TABLE orders DISABLE TRIGGER refuse; UPDATE orders SET expires_at = now() - interval '90 seconds'")
        .await;
    stack.sql("ALTER TABLE orders ENABLE TRIGGER refuse").await;
    assert_eq!(meanwhile(|| worker.terminate(20 * SECOND)), 0);
    stack.found(CheckName::WorkersAlive).await;
    let worker = WorkerProcess::start(&stack.settings);
    wait_for("a worker registered", async || {
        !stack.report().await.findings().any(|(name, _)| name == CheckName::WorkersAlive)
    })
    .await;
    stack.found(CheckName::OrdersOverdue).await;
    stack.sql("DROP TRIGGER refuse ON orders").await;
    wait_for("the order closed", async || stack.report().await.findings().next().is_none()).await;

    // A worker that is frozen reads nothing; it is resumed.
    stack.options.canary = true;
    wait_for("canaries", async || stack.report().await.exit_code() == 0).await;
    let older = "SELECT count(*) FROM order_timeout_workers WHERE started_at < now() - interval '11 seconds'";
    wait_for("a worker that has run for a while", async || stack.env.count(older).await == 1).await;
    worker.halt();
    let found = stack.found(CheckName::Canaries).await;
    worker.go_on();
    assert!(found.what.contains("did not reach a worker"), "{found:?}");
    wait_for("canaries again", async || stack.report().await.exit_code() == 0).await;

    // A kind that no worker serves, until one does.
    stack.options.canary = false;
    assert_eq!(meanwhile(|| worker.terminate(20 * SECOND)), 0);
    kind_without_worker_is_found(&stack).await;

    // A worker that is alive and has no session, until one has.
    register(&stack, "{order}", "{}").await;
    assert!(stack.found(CheckName::QueuesRead).await.what.contains("no worker reads"));
    let worker = WorkerProcess::start(&stack.settings);
    stack.sql("DELETE FROM order_timeout_workers WHERE host = 'shop-2'").await;
    wait_for("a session", async || stack.report().await.findings().next().is_none()).await;
    assert_eq!(meanwhile(|| worker.terminate(20 * SECOND)), 0);
}

async fn kind_without_worker_is_found(stack: &Stack) {
    let kind = Kind::new("acceptance").unwrap();
    let mut settings = stack.settings.clone();
    settings.kinds.entry(kind.clone()).or_default();
    settings.topology().declare(&stack.env.broker).await.unwrap();
    let worker = RunningWorker::start(settings.clone()).await;
    let report = async || examine(&settings, &stack.options).await;
    wait_for("a worker", async || report().await.findings().map(|(name, _)| name).eq([CheckName::KindsServed])).await;
    assert!(only(&report().await, CheckName::KindsServed).what.contains("no worker serves the kind acceptance"));

    let mut of_kind = settings.clone();
    let path = |file: &str| repository().join(file).to_str().unwrap().to_owned();
    let entry = of_kind.kinds.get_mut(&kind).unwrap();
    (entry.close_sql, entry.overdue_sql) = (path("sql/close.sql"), path("tests/fixtures/nothing_overdue.sql"));
    of_kind.worker.kinds = vec![kind.clone()];
    let other = RunningWorker::start(of_kind).await;
    wait_for("its worker", async || report().await.findings().next().is_none()).await;
    worker.stop().await;
    other.stop().await;
    let queue = stack.env.names().timeout_of(&kind);
    stack.env.channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
}

/// The compose stack's configuration, with the management API on this port of the loopback interface, and statistics that
/// are half a second old instead of five.
fn with_management(port: u16) -> PathBuf {
    let deployed = std::fs::read_to_string(repository().join("deploy/rabbitmq/advanced.config")).unwrap();
    let sections = format!(
        "{{rabbitmq_management, [{{tcp_config, [{{port, {port}}}, {{ip, \"127.0.0.1\"}}]}}]}},
         {{rabbit, [{{collect_statistics_interval, 500}},"
    );
    let path = scratch_folder().join(format!("management-{port}.config"));
    std::fs::write(&path, deployed.replacen("{rabbit, [", &sections, 1)).unwrap();
    path
}

fn ctl(broker: &Private, arguments: &[&str]) {
    meanwhile(|| broker.ctl(arguments));
}

#[test]
fn each_broken_broker_is_found() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let config = with_management(port);
    let broker = Arc::new(Private::broker(&["--config", config.to_str().unwrap(), "--plugin", "rabbitmq_management"]));
    std::fs::remove_file(&config).unwrap();
    let database = Arc::new(Private::postgres(&[]));
    let adjust = |settings: &mut Settings| {
        settings.amqp.url = broker.url.clone().into();
        let name = settings.database.url.expose_secret().rsplit('/').next().unwrap().to_owned();
        settings.database.url = database.url.clone().into();
        settings.database.url = settings.database.url_of(&name);
    };
    let for_test = broker.clone();
    TestEnv::builder().settings(adjust).run(async move |env| here(broken_brokers_are_found(env, &for_test, port)));
}

async fn broken_brokers_are_found(env: Arc<TestEnv>, broker: &Private, port: u16) {
    let mut stack = Stack::new(env).await;
    stack.options.management = Some(format!("http://127.0.0.1:{port}").parse().unwrap());
    stack.wait_until_nothing_found("the start").await;
    policies_are_found(&stack, broker).await;
    wrong_queues_are_found(&stack).await;
    foreign_consumer_is_found(&stack).await;
    wrong_accounts_are_found(&mut stack, broker).await;
    ctl(broker, &["set_disk_free_limit", "900000GB"]);
    assert!(stack.found_in_time(CheckName::BrokerResources).await.what.contains("disk alarm"));
    ctl(broker, &["set_disk_free_limit", "1MB"]);
    stack.wait_until_nothing_found("the limit lowered").await;
    healthy_stack_has_no_finding(&stack, port).await;
    stack.settings.amqp.url = with_parts(&stack.settings.amqp.url, None, Some("127.0.0.1:9"), None);
    stack.options.management = None;
    stack.found(CheckName::BrokerReachable).await;
}

async fn policies_are_found(stack: &Stack, broker: &Private) {
    // What is unroutable goes there.
    let channel = &stack.env.channel;
    channel.queue_declare("lost".into(), QueueDeclareOptions::default(), FieldTable::default()).await.unwrap();
    let none = FieldTable::default();
    channel.queue_bind("lost".into(), "amq.fanout".into(), "".into(), Default::default(), none).await.unwrap();
    let pattern = format!("^{}\\.", stack.env.settings.namespace);
    for (check, set, clear, definition, apply_to) in [
        (CheckName::Policies, "set_policy", "clear_policy", r#"{"message-ttl": 60000}"#, "queues"),
        (CheckName::Policies, "set_policy", "clear_policy", r#"{"delivery-limit": 20}"#, "queues"),
        (CheckName::Policies, "set_policy", "clear_policy", r#"{"dead-letter-exchange": "lost"}"#, "queues"),
        (CheckName::Policies, "set_operator_policy", "clear_operator_policy", r#"{"max-length": 1000}"#, "queues"),
        (CheckName::Policies, "set_operator_policy", "clear_operator_policy", r#"{"expires": 3600000}"#, "queues"),
        (
            CheckName::AlternateExchange,
            "set_policy",
            "clear_policy",
            r#"{"alternate-exchange": "amq.fanout"}"#,
            "exchanges",
        ),
    ] {
        ctl(broker, &[set, "wide", &pattern, definition, "--apply-to", apply_to]);
        let finding = stack.found_in_time(check).await;
        assert!(finding.fix.contains(clear), "{finding:?}");
        ctl(broker, &[clear, "wide"]);
        stack.wait_until_nothing_found("the policy cleared").await;
    }
}

fn text(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

async fn wrong_queues_are_found(stack: &Stack) {
    let (env, names) = (&stack.env, stack.env.names());
    let lane = names.lane_queue(&Kind::ORDER, "2s", 1);
    let delete = async || env.channel.queue_delete(lane.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
    // What `order-timeout setup` does.
    let set_up = async || stack.settings.topology().declare(&env.broker).await.unwrap();
    delete().await;
    // A queue takes its bindings with it.
    assert!(stack.found(CheckName::TopologyComplete).await.what.contains(&lane));
    set_up().await;
    stack.assert_nothing_found("the queue declared").await;

    let declared = stack.settings.topology().queues.into_iter().find(|queue| queue.name == lane).unwrap();
    let usual: Vec<(&str, AMQPValue)> = declared
        .arguments
        .iter()
        .map(|(name, value)| match value {
            Argument::Text(value) => (*name, text(value)),
            Argument::Number(value) => (*name, AMQPValue::LongLongInt(*value)),
        })
        .collect();
    for (check, differs) in [
        (CheckName::QueueType, ("x-queue-type", text("classic"))),
        (CheckName::DeadLettering, ("x-dead-letter-strategy", text("at-most-once"))),
        (CheckName::DeadLettering, ("x-overflow", text("drop-head"))),
        (CheckName::TopologyArguments, ("x-message-ttl", AMQPValue::LongLongInt(9))),
    ] {
        delete().await;
        let mut arguments = FieldTable::default();
        let is_classic = check == CheckName::QueueType;
        for (name, value) in usual.iter().filter(|(name, _)| !is_classic || *name != "x-dead-letter-strategy") {
            arguments.insert((*name).into(), if *name == differs.0 { differs.1.clone() } else { value.clone() });
        }
        let durable = QueueDeclareOptions { durable: true, ..Default::default() };
        env.channel.queue_declare(lane.as_str().into(), durable, arguments).await.unwrap();
        let (exchange, none) = (names.delay(), FieldTable::default());
        let bound = env.channel.queue_bind(
            lane.as_str().into(),
            exchange.as_str().into(),
            "2s.1".into(),
            Default::default(),
            none,
        );
        bound.await.unwrap();
        let report = stack.report().await;
        // Of several arguments the broker names the first that differs, which for a classic queue is its strategy.
        let named = report.findings().map(|(name, _)| name).find(|_| is_classic);
        let finding = only(&report, named.filter(|name| *name == CheckName::DeadLettering).unwrap_or(check));
        assert!(finding.what.contains(&lane) && finding.fix.contains("rabbitmqctl delete_queue"), "{finding:?}");
        delete().await;
        set_up().await;
        stack.assert_nothing_found("the queue declared again").await;
    }

    let (queue, due) = (names.timeout(), names.due());
    let none = FieldTable::default();
    env.channel.queue_unbind(queue.as_str().into(), due.as_str().into(), DUE_KEY.into(), none).await.unwrap();
    assert!(stack.found(CheckName::TopologyBindings).await.fix.contains("order-timeout setup"));
    set_up().await;
    stack.assert_nothing_found("the binding declared").await;
}

async fn foreign_consumer_is_found(stack: &Stack) {
    let lane = stack.env.names().lane_queue(&Kind::ORDER, "2s", 0);
    for (queue, has_worker) in [(lane, false), (stack.env.names().timeout(), true)] {
        let channel = stack.env.broker.create_channel().await.unwrap();
        let (options, none) = (BasicConsumeOptions::default(), FieldTable::default());
        let consumer = channel.basic_consume(queue.as_str().into(), "foreign".into(), options, none).await.unwrap();
        if has_worker {
            register(stack, "{order}", "{}").await;
        }
        let finding = stack.found(CheckName::ForeignConsumers).await;
        assert!(finding.what.contains(&queue) && finding.fix.contains("rabbitmqctl list_consumers"), "{finding:?}");
        channel.basic_cancel("foreign".into(), Default::default()).await.unwrap();
        drop(consumer);
        channel.close(200, "done".into()).await.unwrap();
        stack.sql("DELETE FROM order_timeout_workers").await;
        stack.assert_nothing_found("the consumer stopped").await;
    }
}

async fn wrong_accounts_are_found(stack: &mut Stack, broker: &Private) {
    ctl(broker, &["set_permissions", "guest", "^$", ".*", ".*"]);
    assert!(stack.found_in_time(CheckName::BrokerRights).await.fix.contains("set_permissions"));
    ctl(broker, &["set_permissions", "guest", ".*", ".*", ".*"]);
    stack.wait_until_nothing_found("the rights given").await;

    let good = stack.settings.clone();
    ctl(broker, &["add_user", "order-worker", "worker-dev"]);
    ctl(broker, &["set_permissions", "order-worker", ".*", ".*", ".*"]);
    ctl(broker, &["set_user_tags", "order-worker", "monitoring"]);
    stack.settings.amqp.url = with_parts(&good.amqp.url, Some("order-worker:worker-dev"), None, None);
    let finding = stack.found(CheckName::BrokerPassword).await;
    assert!(finding.fix.contains("rabbitmqctl change_password order-worker"), "{finding:?}");
    let change =
        r#"ok = rabbit_auth_backend_internal:change_password(<<"order-worker">>, <<"s3cret-4711">>, <<"test">>)."#;
    ctl(broker, &["eval", change]);
    stack.settings.amqp.url = with_parts(&good.amqp.url, Some(&format!("order-worker:{PASSWORD}")), None, None);
    stack.assert_nothing_found("another password").await;
    stack.settings = good;
}

/// As an operator sees it: with a worker, over the command line.
async fn healthy_stack_has_no_finding(stack: &Stack, port: u16) {
    let worker = WorkerProcess::start(&stack.settings);
    wait_for("a worker", async || stack.env.count("SELECT count(*) FROM canary_readers").await > 0).await;
    let management = format!("http://127.0.0.1:{port}");
    let arguments = ["doctor", "--canary", "--management", &management];
    let (code, stdout, stderr) = call_with(&stack.settings, &[&arguments[..], &["--json"]].concat()).await;
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    let report: Value = serde_json::from_str(&stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    assert_eq!(checks.len(), CheckName::ALL.len());
    for check in checks {
        assert_eq!(check["status"], "ok", "{check}");
    }
    let canaries =
        checks.iter().find(|check| check["name"] == "canaries").unwrap()["what"].as_str().unwrap().to_owned();
    let direct = format!("{} ", stack.env.names().due());
    assert!(canaries.contains(&direct) && canaries.contains("ms after its time"), "{canaries}");
    let (code, stdout, stderr) = call_with(&stack.settings, &["doctor"]).await;
    assert_eq!((code, stderr.as_str()), (0, ""), "{stdout}");
    assert!(stdout.contains("give its address with --management"), "{stdout}");
    assert!(stdout.ends_with(" checks passed\n"), "{stdout}");
    stack.sql("INSERT INTO parked_alarms (reason, detail, body) VALUES ('too_far', 'd', '')").await;
    let (code, stdout, _) = call_with(&stack.settings, &["doctor"]).await;
    assert_eq!(code, 1, "{stdout}");
    assert!(
        stdout.contains("warning: parked_alarms: alarms are parked: 1 too_far\n  why: ")
            && stdout.contains("\n  fix: "),
        "{stdout}"
    );
    stack.sql("DELETE FROM parked_alarms").await;
    assert_eq!(meanwhile(|| worker.terminate(20 * SECOND)), 0);
}

#[test]
fn documents_list_every_check() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/operating/doctor.md");
    let row = Regex::new(r"(?m)^\| `(\w+)` \|").unwrap();
    let text = std::fs::read_to_string(path).unwrap();
    let listed: Vec<&str> = row.captures_iter(&text).map(|found| found.get(1).unwrap().as_str()).collect();
    assert_eq!(listed, CheckName::ALL.map(CheckName::as_str));
}
