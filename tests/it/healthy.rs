//! Nothing is said where nothing is wrong: on each of these healthy deployments, and in each state that it passes through,
//! the doctor has neither a warning nor an error, and `/readyz` names no cause.
//!
//! States of one deployment follow one another on one worker. Each is reached by a condition, never by a time. Each state that was
//! quiet is printed: `cargo test --test it -- healthy:: --nocapture | grep -o 'quiet: .*' | sort -u` lists them.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lapin::options::{QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use order_timeout::Settings;
use order_timeout::config::kinds::Remind;
use order_timeout::handler::Handlers;
use order_timeout::http::READYZ;
use order_timeout::operations::doctor::{Options, examine};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::Timestamp;
use order_timeout_core::problem::{Cause, Problem};
use order_timeout_testkit::away::{expiring_queue_arguments, meanwhile, on_private_database};
use order_timeout_testkit::figures::{get, serve_http};
use order_timeout_testkit::paths::repository;
use order_timeout_testkit::payment_service::{PaymentService, wide_limits};
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{RunningWorker, TestEnv, wait_for, with_parts};
use secrecy::{ExposeSecret, SecretString};
use sqlx::AssertSqlSafe;
use time::OffsetDateTime;

use crate::adopting::types::{MAPPING, map_to, tables};
use crate::doctor::here;
use crate::handlers::Memory;
use crate::kinds::kind;
use crate::look_ahead::without_broker;
use crate::poolers::pgbouncer::Pooler;
use crate::webhook::{Receiver, announcing_to};

const OPEN: &str = "SELECT count(*) FROM orders WHERE status = 'unpaid' AND expires_at < now() + interval '1 hour'";
/// Without a problem and without a cause.
const READY: &str = "ready\n";
const UNSENT: &str = "SELECT count(*) FROM event_outbox WHERE sent_at IS NULL";

/// A deployment with one worker.
struct Deployment {
    /// What it is, in the list of states.
    name: &'static str,
    env: Arc<TestEnv>,
    settings: Settings,
    options: Options,
    worker: Option<RunningWorker>,
}

async fn execute(env: &TestEnv, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned()))
        .execute(&env.pool)
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error}"));
}

impl Deployment {
    /// As it is after `order-timeout setup`, and then with a worker.
    async fn start(name: &'static str, env: Arc<TestEnv>, settings: Settings) -> Self {
        Self::start_with(name, env, settings, Options::default()).await
    }

    async fn start_with(name: &'static str, env: Arc<TestEnv>, settings: Settings, options: Options) -> Self {
        let mut deployment = Self { name, env, settings, options, worker: None };
        deployment.assert_quiet("no worker").await;
        deployment.worker = Some(RunningWorker::start(deployment.settings.clone()).await);
        deployment.wait_until_quiet("idle").await;
        deployment
    }

    /// A worker that has just started has not recorded its consumers yet, and one that has lost a server reconnects.
    async fn wait_until_quiet(&self, state: &str) {
        wait_for(state, async || self.readyz().await == READY && self.problems().await.is_empty()).await;
        self.assert_quiet(state).await;
    }

    async fn problems(&self) -> Vec<Problem> {
        examine(&self.settings, &self.options).await.problems().cloned().collect()
    }

    /// Its worker is followed by another one.
    async fn replace_worker(&mut self) {
        let next = RunningWorker::start(self.settings.clone()).await;
        self.worker.replace(next).unwrap().stop().await;
    }

    async fn readyz(&self) -> String {
        get(self.worker.as_ref().unwrap(), READYZ).await.1
    }

    async fn assert_quiet(&self, state: &str) {
        assert_eq!(self.problems().await, [], "{}: {state}", self.name);
        if self.worker.is_some() {
            assert_eq!(self.readyz().await, READY, "{}: {state}", self.name);
        }
        println!("quiet: {}: {state}", self.name);
    }

    /// Runs SQL, and asserts that it leaves nothing to be named.
    async fn assert_quiet_after(&self, state: &str, sql: &str) {
        execute(&self.env, sql).await;
        self.assert_quiet(state).await;
    }

    /// Orders that fall due while the doctor looks, each with its alarm, until they are closed and announced.
    async fn assert_quiet_while_orders_close(&self, count: usize) {
        self.have_orders(count).await;
        self.assert_quiet("busy").await;
        wait_for("the closes", async || self.env.count(OPEN).await == 0).await;
        self.assert_quiet("just after a burst").await;
        if self.settings.delay.strategy.needs_broker() {
            wait_for("the events", async || self.env.count(UNSENT).await == 0).await;
            self.assert_quiet("after the events").await;
        }
    }

    /// So many orders that fall due now, as many in a second, and as many later, each with its alarm.
    async fn have_orders(&self, count: usize) {
        let publisher = match self.settings.delay.strategy.needs_broker() {
            true => Some(self.env.publisher().await),
            false => None,
        };
        for delay_ms in [3_000, 1_000, 0] {
            for order in self.env.orders(count, Duration::from_millis(delay_ms)).await {
                if let Some(publisher) = &publisher {
                    publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
                }
            }
        }
    }

    async fn stop(self) {
        self.worker.unwrap().stop().await;
        // Roles belong to the whole server.
        let role = role_of(&self.env);
        let exists: bool = sqlx::query_scalar("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)")
            .bind(&role)
            .fetch_one(&self.env.pool)
            .await
            .unwrap();
        if exists {
            execute(&self.env, &format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
        }
    }
}

/// Runs a deployment's states on an environment of its own.
fn deployed<F: Future<Output = Deployment>>(
    adjust: impl FnOnce(&mut Settings),
    states: impl FnOnce(Arc<TestEnv>) -> F + Send + 'static,
) {
    let adjust = |settings: &mut Settings| {
        serve_http(settings);
        adjust(settings);
    };
    TestEnv::builder().settings(adjust).run(async move |env| here(async { states(env).await.stop().await }));
}

/// With the default tables and this change of the settings: fresh, idle, busy and after a burst.
fn closes_quietly(name: &'static str, adjust: impl FnOnce(&mut Settings)) {
    deployed(adjust, async move |env| {
        let settings = env.settings.clone();
        let deployment = Deployment::start(name, env, settings).await;
        deployment.assert_quiet_while_orders_close(20).await;
        deployment
    });
}

/// What a shop's database may have in it, one after the other.
const STATES: [(&str, &str); 12] = [
    ("tables just analysed while empty", "ANALYZE orders, alarm_outbox, event_outbox, parked_alarms, order_events"),
    (
        "an order beyond the longest lane, with its alarm in the wheel",
        "WITH o AS (INSERT INTO orders (id, expires_at) VALUES (gen_random_uuid(), now() + interval '70 seconds') RETURNING *)
             INSERT INTO alarm_outbox (order_id, deadline) SELECT id::text, expires_at FROM o",
    ),
    ("deadlines moved without a new alarm", "UPDATE orders SET expires_at = expires_at + interval '2 days' WHERE status = 'unpaid'"),
    (
        "orders far away",
        "INSERT INTO orders (id, expires_at) SELECT gen_random_uuid(), now() + interval '60 days' FROM generate_series(1, 50)",
    ),
    ("orders without a deadline", "INSERT INTO orders (id, expires_at) VALUES (gen_random_uuid(), NULL)"),
    (
        "an alarm scheduled far away",
        "INSERT INTO alarm_outbox (order_id, deadline) SELECT id::text, expires_at FROM orders WHERE expires_at IS NOT NULL LIMIT 1",
    ),
    (
        "orders paid long ago",
        "INSERT INTO orders (id, status, expires_at, paid_at)
             SELECT gen_random_uuid(), 'paid', now() - interval '1 day', now() - interval '2 days' FROM generate_series(1, 50)",
    ),
    (
        "orders closed long ago by the sweep",
        "INSERT INTO orders (id, status, expires_at, closed_at, closed_by, close_reason)
             SELECT gen_random_uuid(), 'closed', now() - interval '2 hours', now() - interval '1 hour', 'sweep', 'unpaid'
             FROM generate_series(1, 50)",
    ),
    (
        "events sent long ago",
        "INSERT INTO event_outbox (routing_key, type, payload, created_at, sent_at)
             SELECT 'order.closed', 'order.closed.v1', '{}', now() - interval '1 hour', now() - interval '1 hour'
             FROM generate_series(1, 50)",
    ),
    ("tables of other programs", "CREATE SCHEMA reports; CREATE UNLOGGED TABLE reports.orders (id bigint); CREATE TABLE invoices (id bigint)"),
    ("more indexes", "CREATE INDEX by_status ON orders (status, expires_at); ANALYZE"),
    (
        "a pause that is over",
        "INSERT INTO closing_pauses (cause, reason, paused_by, paused_at, resumed_at, resumed_by, resume_reason)
             VALUES ('operator', 'r', 'mei', now() - interval '2 h', now() - interval '1 h', 'mei', 'over')",
    ),
];

#[test]
fn default_tables_are_quiet_in_each_state() {
    deployed(
        |settings| settings.http.page = true,
        async |env| {
            let settings = env.settings.clone();
            let deployment = Deployment::start("default tables", env, settings).await;
            for (state, sql) in STATES {
                deployment.assert_quiet_after(state, sql).await;
            }
            deployment.assert_quiet_while_orders_close(20).await;
            deployment
        },
    );
}

const WORKERS: &str = "SELECT count(*) FROM order_timeout_workers";

/// What an operator does with workers and orders.
#[test]
fn operation_is_quiet() {
    // The sweep must be as soon as it usually is.
    deployed(
        |settings| settings.sweep.grace = Settings::defaults().sweep.grace,
        async |env| {
            let mut settings = env.settings.clone();
            settings.sweep.first_backlog = 10;
            let overdue = "INSERT INTO orders (id, expires_at)
                           SELECT gen_random_uuid(), now() - interval '5 seconds' FROM generate_series(1, 50)";
            execute(&env, overdue).await;
            let (code, _, stderr) = call_with(&settings, &["adopt", "--accept-backlog"]).await;
            assert_eq!((code, stderr.as_str()), (0, ""));
            let mut deployment = Deployment::start("operated", env, settings).await;
            wait_for("the backlog", async || deployment.env.count(OPEN).await == 0).await;
            deployment.assert_quiet("a backlog that was accepted is closed").await;

            deployment.have_orders(10).await;
            deployment.replace_worker().await;
            deployment.wait_until_quiet("a worker replaced while orders fall due").await;
            wait_for("the closes", async || deployment.env.count(OPEN).await == 0).await;
            deployment.assert_quiet("after that").await;
            let others = [deployment.env.worker().await, deployment.env.worker().await];
            wait_for("three workers", async || deployment.env.count(WORKERS).await == 3).await;
            deployment.assert_quiet("three workers").await;
            deployment.assert_quiet_while_orders_close(10).await;
            for (other, state) in others.into_iter().zip(["two workers", "one worker again"]) {
                other.stop().await;
                deployment.wait_until_quiet(state).await;
            }

            let call = async |arguments: &[&str]| {
                let (code, _, stderr) = call_with(&deployment.settings, arguments).await;
                assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}");
            };
            call(&["pause", "--why", "a test"]).await;
            // Not quiet: a pause that is forgotten costs all stock. It is named, and nothing else is.
            wait_for("the pause", async || deployment.readyz().await.contains("closing is paused")).await;
            deployment.have_orders(10).await;
            let causes: Vec<Cause> = deployment.problems().await.into_iter().map(|problem| problem.cause).collect();
            assert_eq!(causes, [Cause::ClosingPaused]);
            assert_eq!(deployment.readyz().await.lines().count(), 2, "ready, and the pause");
            call(&["resume", "--yes"]).await;
            deployment.wait_until_quiet("a pause that has just ended").await;
            wait_for("the closes", async || deployment.env.count(OPEN).await == 0).await;
            deployment.assert_quiet("what fell due in a pause is closed").await;

            let far = deployment.env.order(Duration::from_secs(3_600)).await.id.to_string();
            call(&["deadline", &far, "--in", "2h"]).await;
            deployment.assert_quiet("an order moved by hand").await;
            let many = "INSERT INTO orders (id, expires_at)
                        SELECT gen_random_uuid(), now() + interval '1 day' FROM generate_series(1, 100000)";
            deployment.assert_quiet_after("100 000 orders that are not due, never analysed", many).await;
            deployment.assert_quiet_after("100 000 orders, analysed", "ANALYZE orders").await;
            deployment
                .assert_quiet_after("emptied tables with the statistics of full ones", "TRUNCATE orders CASCADE")
                .await;
            deployment
        },
    );
}

type Change = fn(&mut Settings);

/// Changes of the settings that shops make, one deployment each: what goes together is changed together.
const OTHER_SETTINGS: [(&str, Change); 3] = [
    (
        "shards, reminders, a worker that is told its kinds, few deliveries at once, events kept for a minute",
        |settings| {
            settings.delay.lane_shards = 3;
            let before = Duration::from_secs(600);
            settings.kinds.entry(Kind::ORDER).or_default().remind = vec![Remind(before)];
            settings.worker.kinds = vec![Kind::ORDER];
            settings.worker.prefetch = 10;
            settings.announce.keep = Duration::from_secs(60);
        },
    ),
    ("three lanes, no brake, payments before the deadline alone, a page for one name", |settings| {
        settings.delay.lanes = [1, 2, 3].map(|seconds| Duration::from_secs(seconds).into()).to_vec();
        settings.brake.enabled = false;
        settings.orders.pay_after_deadline = false;
        settings.http.page = true;
        settings.http.hosts = vec!["orders.example".to_owned().try_into().unwrap()];
    }),
    ("the wheel alone", |settings| settings.delay.lanes.clear()),
];

#[test]
fn other_settings_are_quiet() {
    for (name, adjust) in OTHER_SETTINGS {
        closes_quietly(name, adjust);
    }
}

/// What a shop may have set for its database or done to our tables, one deployment each: what goes together is set together.
/// `{database}` is its name.
const OTHER_DATABASES: [(&str, &str); 3] = [
    (
        "serializable transactions, and a table that refers to orders",
        "ALTER DATABASE {database} SET default_transaction_isolation = 'serializable';
         CREATE TABLE parcels (order_id uuid NOT NULL REFERENCES orders (id))",
    ),
    (
        "timeouts of the database, commits that do not wait for the disk, German dates, a publication of all tables",
        "ALTER DATABASE {database} SET statement_timeout = '60s'; ALTER DATABASE {database} SET lock_timeout = '30s';
         ALTER DATABASE {database} SET idle_in_transaction_session_timeout = '30s';
         ALTER DATABASE {database} SET synchronous_commit = off;
         ALTER DATABASE {database} SET datestyle = 'German'; ALTER DATABASE {database} SET intervalstyle = 'sql_standard';
         CREATE PUBLICATION everything FOR ALL TABLES",
    ),
    (
        "generic plans, hints against other scans, a trigger that records each change",
        "ALTER DATABASE {database} SET plan_cache_mode = 'force_generic_plan'; ALTER DATABASE {database} SET enable_seqscan = off;
         CREATE TABLE audit (at timestamptz, row jsonb);
         CREATE FUNCTION record() RETURNS trigger LANGUAGE plpgsql AS
             'BEGIN INSERT INTO audit VALUES (now(), to_jsonb(NEW)); RETURN NEW; END';
         CREATE TRIGGER record AFTER UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION record()",
    ),
];

#[test]
fn other_databases_are_quiet() {
    for (name, sql) in OTHER_DATABASES {
        deployed(
            |_| {},
            async move |env| {
                let database: String =
                    sqlx::query_scalar("SELECT current_database()").fetch_one(&env.pool).await.unwrap();
                execute(&env, &sql.replace("{database}", &database)).await;
                let settings = env.settings.clone();
                let deployment = Deployment::start(name, env, settings).await;
                deployment.assert_quiet_while_orders_close(20).await;
                deployment
            },
        );
    }
}

/// A broker with queues, exchanges and consumers of other programs, another namespace of ours, and listeners.
#[test]
fn shared_broker_is_quiet() {
    deployed(
        |_| {},
        async |env| {
            let (settings, channel) = (env.settings.clone(), env.channel().clone());
            let deployment = Deployment::start("shared broker", env.clone(), settings.clone()).await;
            let (foreign, listener) =
                (format!("foreign.{}", settings.namespace), format!("shop.{}", settings.namespace));
            for queue in [&foreign, &listener] {
                let options = QueueDeclareOptions { durable: true, ..Default::default() };
                channel.queue_declare(queue.as_str().into(), options, expiring_queue_arguments()).await.unwrap();
            }
            deployment.assert_quiet("queues of another program").await;
            let events = env.names().events();
            let (options, none) = (QueueBindOptions::default(), FieldTable::default());
            channel
                .queue_bind(listener.as_str().into(), events.as_str().into(), "order.closed".into(), options, none)
                .await
                .unwrap();
            deployment.assert_quiet_while_orders_close(10).await;
            assert!(env.depth(&listener).await > 0, "events that no listener has read yet");
            let mut other = settings.clone();
            other.namespace = format!("{}b", settings.namespace);
            other.database.url = in_schema(&env, "other").await;
            let (code, _, stderr) = call_with(&other, &["setup"]).await;
            assert_eq!((code, stderr.as_str()), (0, ""));
            deployment.assert_quiet("another namespace on the broker").await;
            let neighbour = RunningWorker::start(other.clone()).await;
            deployment.assert_quiet("another namespace with its worker").await;
            deployment.assert_quiet_while_orders_close(10).await;
            neighbour.stop().await;
            for queue in [foreign, listener].into_iter().chain(other.queue_names()) {
                channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
            }
            for exchange in &other.topology().exchanges {
                channel.exchange_delete(exchange.name.as_str().into(), Default::default()).await.unwrap();
            }
            deployment
        },
    );
}

/// What no broker takes, as the guide has it inserted, and what the shop reads itself.
const KEPT_WITHOUT_BROKER: [(&str, &str); 2] = [
    (
        "alarms",
        "INSERT INTO alarm_outbox (order_id, deadline, created_at)
             SELECT gen_random_uuid()::text, now() - interval '5 min', now() - interval '10 min' FROM generate_series(1, 50)",
    ),
    (
        "events",
        "INSERT INTO event_outbox (routing_key, type, payload, created_at)
             SELECT 'order.closed', 'order.closed.v1', '{}', now() - interval '10 min' FROM generate_series(1, 50)",
    ),
];

#[test]
fn postgres_alone_is_quiet() {
    let states = async |env: Arc<TestEnv>| {
        let settings = without_broker(&env.settings);
        let mut deployment = Deployment::start("postgres alone", env, settings).await;
        for (state, sql) in KEPT_WITHOUT_BROKER {
            deployment.assert_quiet_after(state, sql).await;
        }
        deployment.assert_quiet_while_orders_close(20).await;
        for (state, sql) in STATES {
            deployment.assert_quiet_after(state, sql).await;
        }
        deployment.have_orders(10).await;
        deployment.replace_worker().await;
        deployment.wait_until_quiet("a worker replaced while orders fall due").await;
        deployment
    };
    deployed(|_| {}, states);
}

/// Events go to the shop's webhook.
#[test]
fn webhook_is_quiet() {
    let states = async |env: Arc<TestEnv>| {
        let receiver = Receiver::start();
        let (settings, _key) = announcing_to(&env.settings, receiver.address());
        let deployment = Deployment::start("webhook", env, settings).await;
        deployment.assert_quiet_while_orders_close(20).await;
        wait_for("the events", async || deployment.env.count(UNSENT).await == 0).await;
        deployment.assert_quiet("after the events").await;
        deployment
    };
    deployed(|_| {}, states);
}

/// Listeners are notified by Postgres.
#[test]
fn notifications_are_quiet() {
    let states = async |env: Arc<TestEnv>| {
        let mut settings = without_broker(&env.settings);
        settings.announce.notify = "closed_orders".into();
        let deployment = Deployment::start("notifications", env, settings).await;
        deployment.assert_quiet_while_orders_close(20).await;
        wait_for("the events", async || deployment.env.count(UNSENT).await == 0).await;
        deployment.assert_quiet("after the events").await;
        deployment
    };
    deployed(|_| {}, states);
}

/// The statements are the shop's own, though they are the default ones.
#[test]
fn own_statements_are_quiet() {
    closes_quietly("statements in files", |settings| {
        let path = |file: &str| repository().join(file).to_str().unwrap().to_owned();
        (settings.orders.close_sql, settings.orders.overdue_sql) =
            (path("tests/fixtures/mapping/default_close.sql"), path("tests/fixtures/mapping/default_overdue.sql"));
    });
}

/// Each example of docs/OWN-SQL.md: its folder, and one order that falls due.
const EXAMPLES: [(&str, &str, &str); 3] = [
    (
        "payments in a table of their own",
        "own_orders",
        "INSERT INTO public.purchases (id, pay_until) VALUES (1, now() - interval '2 s')",
    ),
    (
        "orders in two tables",
        "two_tables",
        "INSERT INTO public.web_orders (id, pay_until) VALUES (1, now() - interval '2 s');
         INSERT INTO public.phone_orders (id, pay_until) VALUES (1, now() + interval '1 h')",
    ),
    (
        "a computed deadline",
        "derived_deadline",
        "INSERT INTO public.bookings (id, created_at, minutes_to_pay) VALUES (1, now() - interval '62 s', 1)",
    ),
];

#[test]
fn own_statements_over_own_tables_are_quiet() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        here(async {
            for (name, folder, overdue) in EXAMPLES {
                let path = |file: &str| repository().join("examples").join(folder).join(file);
                execute(&env, &std::fs::read_to_string(path("schema.sql")).unwrap()).await;
                let mut settings = env.settings.clone();
                settings.sweep.grace = Settings::defaults().sweep.grace;
                settings.orders.close_sql = path("close.sql").to_str().unwrap().to_owned();
                settings.orders.overdue_sql = path("overdue.sql").to_str().unwrap().to_owned();
                let deployment = Deployment::start(name, env.clone(), settings).await;
                assert_quiet_with_overdue_order(&deployment, overdue).await;
                execute(&env, "DELETE FROM event_outbox").await;
                deployment.stop().await;
            }
        });
    });
}

async fn assert_quiet_with_overdue_order(deployment: &Deployment, overdue: &str) {
    deployment.assert_quiet_after("an overdue order", overdue).await;
    wait_for("the event", async || deployment.env.count("SELECT count(*) FROM event_outbox").await > 0).await;
    deployment.assert_quiet("after its close").await;
}

/// A table with a key of fixed length, a deadline without a zone, and stock with a key of that sort.
#[test]
fn unusual_types_are_quiet() {
    deployed(
        |_| {},
        async |env| {
            execute(&env, &tables("character(5)", "character(6)")).await;
            let mapping =
                MAPPING.replace("deadline = \"due\"", "deadline = \"local\"").replace("local = \"now\", ", "");
            let (mut settings, _file) = map_to(&env, &mapping);
            settings.sweep.grace = Settings::defaults().sweep.grace;
            let index = "CREATE INDEX ON shop.orders ((local AT TIME ZONE 'Asia/Shanghai'), id) WHERE state = 'open'";
            execute(&env, index).await;
            let name = "keys of fixed length and a deadline without a zone";
            let deployment = Deployment::start(name, env, settings).await;
            let overdue = "INSERT INTO shop.stock VALUES ('A-1', 2);
                INSERT INTO shop.orders (id, local) VALUES ('o1', now() AT TIME ZONE 'Asia/Shanghai' - interval '2 s');
                INSERT INTO shop.items VALUES ('o1', 'A-1', 1); INSERT INTO shop.notes VALUES ('o1', '')";
            assert_quiet_with_overdue_order(&deployment, overdue).await;
            deployment
        },
    );
}

#[test]
fn providers_are_quiet() {
    let services = [PaymentService::start(), PaymentService::start()];
    closes_quietly("two payment providers", |settings| {
        for (service, name) in services.iter().zip(["card", "wallet"]) {
            service.join(settings, name, wide_limits());
        }
    });
}

#[test]
fn several_kinds_are_quiet() {
    let adjust = |settings: &mut Settings| {
        let fixture = repository().join("tests/fixtures/kinds/acceptance.toml");
        settings.kinds = Settings::load(Some(&fixture), &[]).unwrap().kinds;
    };
    deployed(adjust, async |env| {
        execute(
            &env,
            "CREATE TABLE acceptance (id bigint PRIMARY KEY, state text NOT NULL, until timestamptz, closed_at timestamptz);
             CREATE INDEX ON acceptance (until, id) WHERE state = 'open'",
        )
        .await;
        let settings = env.settings.clone();
        let deployment = Deployment::start("two kinds", env, settings).await;
        let rows = "INSERT INTO acceptance SELECT n, 'open', now() + interval '1 day' FROM generate_series(1, 50) AS n";
        deployment.assert_quiet_after("orders of another kind", rows).await;
        deployment.assert_quiet_while_orders_close(10).await;
        deployment
    });
}

/// The database has another time zone, and the worker's role only what docs/operating/deploy.md grants.
#[test]
fn granted_role_is_quiet() {
    deployed(
        |_| {},
        async |env| {
            let (settings, role) = granted(&env, "Asia/Kathmandu").await;
            let deployment =
                Deployment::start("a role of least privilege, a zone of quarter hours", env, settings).await;
            deployment.assert_quiet_while_orders_close(10).await;
            execute(&deployment.env, &format!("GRANT pg_read_all_stats TO {role}")).await;
            deployment.assert_quiet("a role that sees all sessions").await;
            execute(&deployment.env, &format!("ALTER ROLE {role} CONNECTION LIMIT 60")).await;
            deployment.assert_quiet("a limit with room").await;
            deployment
        },
    );
}

fn role_of(env: &TestEnv) -> String {
    format!("worker_{}", env.settings.namespace)
}

/// A role with rights on the tables of every schema, and no others. Dropped when the deployment stops.
async fn granted(env: &TestEnv, zone: &str) -> (Settings, String) {
    let role = role_of(env);
    let database: String = sqlx::query_scalar("SELECT current_database()").fetch_one(&env.pool).await.unwrap();
    execute(
        env,
        &format!(
            "CREATE ROLE {role} LOGIN PASSWORD 's3cret-4711'; ALTER DATABASE {database} SET timezone = '{zone}';
             DO $$ DECLARE s text; BEGIN
                 FOR s IN SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema' LOOP
                     EXECUTE format('GRANT USAGE ON SCHEMA %I TO {role}', s);
                     EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA %I TO {role}', s);
                 END LOOP; END $$"
        ),
    )
    .await;
    let mut settings = env.settings.clone();
    settings.database.url = with_parts(&settings.database.url, Some(&format!("{role}:s3cret-4711")), None, None);
    (settings, role)
}

/// Creates a schema, and returns the address of a database in which it is the only one.
async fn in_schema(env: &TestEnv, schema: &str) -> SecretString {
    execute(env, &format!("CREATE SCHEMA {schema}")).await;
    let url = env.settings.database.url.expose_secret();
    format!("{url}?options=-csearch_path%3D{schema}").into()
}

/// The schema is one of its own, and the role owns it.
#[test]
fn owner_of_own_schema_is_quiet() {
    deployed(
        |_| {},
        async |env| {
            let mut settings = env.settings.clone();
            settings.database.url = in_schema(&env, "order_timeout").await;
            let (code, _, stderr) = call_with(&settings, &["setup"]).await;
            assert_eq!((code, stderr.as_str()), (0, ""));
            let deployment = Deployment::start("a schema of its own", env, settings).await;
            deployment
            .assert_quiet_after("orders there", "INSERT INTO order_timeout.orders (id, expires_at) VALUES (gen_random_uuid(), now() + interval '1 h')")
            .await;
            deployment
        },
    );
}

fn fixture(shop: &str, file: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/shops").join(shop).join(file);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Each shop of the fixtures, in a role with no more than its rights: fresh, idle, with 300 orders that fall due, and after
/// them.
fn adopted_shop_is_quiet(shop: &'static str) {
    let adjust = |settings: &mut Settings| {
        let path = repository().join("tests/fixtures/shops").join(shop).join("order-timeout.toml");
        settings.kinds = Settings::load(Some(&path), &[]).unwrap().kinds;
    };
    deployed(adjust, async move |env| {
        execute(&env, &fixture(shop, "schema.sql")).await;
        let (settings, role) = granted(&env, "America/Sao_Paulo").await;
        // One of the shops has row security.
        execute(&env, &format!("ALTER ROLE {role} BYPASSRLS")).await;
        let deployment = Deployment::start(shop, env.clone(), settings).await;
        execute(&env, &fixture(shop, "orders.sql")).await;
        let publisher = env.publisher().await;
        let states = async || -> Vec<(String, String, OffsetDateTime)> {
            sqlx::query_as(AssertSqlSafe(fixture(shop, "state.sql"))).fetch_all(&env.pool).await.unwrap()
        };
        for (id, _, deadline) in states().await {
            publisher.schedule(&id, Timestamp::from(deadline)).await.unwrap();
        }
        deployment.assert_quiet("busy").await;
        wait_for("the closes", async || states().await.iter().all(|(_, state, _)| state != "open")).await;
        deployment.assert_quiet("just after a burst").await;
        wait_for("the events", async || env.count(UNSENT).await == 0).await;
        deployment.assert_quiet("after the events").await;
        deployment
    });
}

#[test]
fn adopted_mall_is_quiet() {
    adopted_shop_is_quiet("mall");
}

#[test]
fn adopted_ticket_shop_is_quiet() {
    adopted_shop_is_quiet("ticketing");
}

#[test]
fn adopted_headless_shop_is_quiet() {
    adopted_shop_is_quiet("headless");
}

#[test]
fn adopted_shop_of_tenants_is_quiet() {
    adopted_shop_is_quiet("tenants");
}

#[test]
fn adopted_shop_in_partitions_is_quiet() {
    adopted_shop_is_quiet("partitioned");
}

/// A database that is restarted, and one behind PgBouncer.
#[test]
fn private_database_is_quiet() {
    on_private_database(&[], async |env, server| {
        here(async {
            let mut settings = env.settings.clone();
            serve_http(&mut settings);
            settings.sweep.grace = Settings::defaults().sweep.grace;
            let mut deployment = Deployment::start("a database of its own", env, settings).await;
            deployment.have_orders(10).await;
            meanwhile(|| server.stop());
            meanwhile(|| server.restart());
            deployment.wait_until_quiet("the database has just been restarted").await;
            wait_for("the closes", async || deployment.env.count(OPEN).await == 0).await;
            deployment.assert_quiet("what fell due in a restart is closed").await;
            deployment.replace_worker().await;
            deployment.wait_until_quiet("the worker restarted as well").await;
            let Some(pooler) = Pooler::start(&deployment.settings.database.url, "pool_mode = session") else {
                return deployment.stop().await;
            };
            let mut settings = deployment.settings.clone();
            settings.database.url = pooler.url_of(&settings.database.url);
            let env = deployment.env.clone();
            deployment.stop().await;
            let deployment = Deployment::start("behind PgBouncer in session mode", env, settings).await;
            deployment.assert_quiet_while_orders_close(10).await;
            deployment.stop().await;
        });
    });
}

/// A kind whose orders the embedding program times out itself.
#[test]
fn handled_kind_is_quiet() {
    deployed(
        |settings| {
            settings.kinds.entry(kind("ticket")).or_default();
        },
        async |env| {
            let settings = env.settings.clone();
            let handlers = || Handlers::none().with(kind("ticket"), Memory::default());
            let worker = Some(RunningWorker::start_with(settings.clone(), handlers).await);
            let options = Options::default();
            let deployment = Deployment { name: "a kind with a handler", env, settings, options, worker };
            deployment.wait_until_quiet("idle").await;
            deployment.assert_quiet_while_orders_close(10).await;
            deployment
        },
    );
}
