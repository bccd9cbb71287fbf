//! Nothing is said where nothing is wrong: on each of these healthy deployments, and in each state that it passes through,
//! the doctor has neither a warning nor an error, and `/readyz` names no cause.
//!
//! States of one deployment follow one another on one worker. Each is reached by a condition, never by a time.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lapin::options::{QueueBindOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use order_timeout::Settings;
use order_timeout::config::kinds::Remind;
use order_timeout::http::READYZ;
use order_timeout::operations::doctor::{Options, examine};
use order_timeout::postgres;
use order_timeout_core::kind::Kind;
use order_timeout_core::problem::Problem;
use order_timeout_testkit::away::expiring_queue_arguments;
use order_timeout_testkit::figures::{get, serve_http};
use order_timeout_testkit::paths::repository;
use order_timeout_testkit::payment_service::{PaymentService, wide_limits};
use order_timeout_testkit::process::call_with;
use order_timeout_testkit::{RunningWorker, TestEnv, wait_for, with_parts};
use secrecy::ExposeSecret;
use sqlx::AssertSqlSafe;
use time::OffsetDateTime;

use crate::doctor::here;
use crate::look_ahead::without_broker;

const OPEN: &str = "SELECT count(*) FROM orders WHERE status = 'unpaid' AND expires_at < now() + interval '1 hour'";
/// Without a problem and without a cause.
const READY: &str = "ready\n";
const UNSENT: &str = "SELECT count(*) FROM event_outbox WHERE sent_at IS NULL";

/// A deployment with one worker.
struct Deployment {
    env: Arc<TestEnv>,
    settings: Settings,
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
    async fn start(env: Arc<TestEnv>, settings: Settings) -> Self {
        let mut deployment = Self { env, settings, worker: None };
        deployment.assert_quiet("no worker").await;
        deployment.worker = Some(RunningWorker::start(deployment.settings.clone()).await);
        // A worker that has just started has not recorded its consumers yet.
        wait_for("a worker that is seen", async || {
            deployment.readyz().await == READY && deployment.problems().await.is_empty()
        })
        .await;
        deployment.assert_quiet("idle").await;
        deployment
    }

    async fn problems(&self) -> Vec<Problem> {
        examine(&self.settings, &Options::default()).await.problems().cloned().collect()
    }

    async fn readyz(&self) -> String {
        get(self.worker.as_ref().unwrap(), READYZ).await.1
    }

    async fn assert_quiet(&self, state: &str) {
        assert_eq!(self.problems().await, [], "{state}");
        if self.worker.is_some() {
            assert_eq!(self.readyz().await, READY, "{state}");
        }
    }

    /// Runs SQL, and asserts that it leaves nothing to be named.
    async fn assert_quiet_after(&self, state: &str, sql: &str) {
        execute(&self.env, sql).await;
        self.assert_quiet(state).await;
    }

    /// Orders that fall due while the doctor looks, each with its alarm, until they are closed and announced.
    async fn assert_quiet_while_orders_close(&self, count: usize) {
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
        self.assert_quiet("busy").await;
        wait_for("the closes", async || self.env.count(OPEN).await == 0).await;
        self.assert_quiet("just after a burst").await;
        if publisher.is_some() {
            wait_for("the events", async || self.env.count(UNSENT).await == 0).await;
            self.assert_quiet("after the events").await;
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
fn closes_quietly(adjust: impl FnOnce(&mut Settings)) {
    deployed(adjust, async |env| {
        let settings = env.settings.clone();
        let deployment = Deployment::start(env, settings).await;
        deployment.assert_quiet_while_orders_close(20).await;
        deployment
    });
}

/// What a shop's database may have in it, one after the other.
const STATES: [(&str, &str); 9] = [
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
            let deployment = Deployment::start(env, settings).await;
            for (state, sql) in STATES {
                deployment.assert_quiet_after(state, sql).await;
            }
            deployment.assert_quiet_while_orders_close(20).await;
            let second = deployment.env.worker().await;
            wait_for("the second worker", async || {
                deployment.env.count("SELECT count(*) FROM order_timeout_workers").await == 2
            })
            .await;
            deployment.assert_quiet("two workers").await;
            second.stop().await;
            deployment.assert_quiet("one of them stopped").await;
            deployment
        },
    );
}

#[test]
fn other_settings_are_quiet() {
    closes_quietly(|settings| {
        settings.delay.lane_shards = 3;
        let before = Duration::from_secs(600);
        settings.kinds.entry(Kind::ORDER).or_default().remind = vec![Remind(before)];
    });
}

/// A broker with queues, exchanges and consumers of other programs, another namespace of ours, and listeners.
#[test]
fn shared_broker_is_quiet() {
    deployed(
        |_| {},
        async |env| {
            let (settings, channel) = (env.settings.clone(), env.channel.clone());
            let deployment = Deployment::start(env.clone(), settings.clone()).await;
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
            other.topology().declare(&env.broker).await.unwrap();
            deployment.assert_quiet("another namespace on the broker").await;
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
        let deployment = Deployment::start(env, settings).await;
        for (state, sql) in KEPT_WITHOUT_BROKER {
            deployment.assert_quiet_after(state, sql).await;
        }
        deployment.assert_quiet_while_orders_close(20).await;
        for (state, sql) in STATES {
            deployment.assert_quiet_after(state, sql).await;
        }
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
        let deployment = Deployment::start(env, settings).await;
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
    closes_quietly(|settings| {
        let path = |file: &str| repository().join(file).to_str().unwrap().to_owned();
        (settings.orders.close_sql, settings.orders.overdue_sql) = (path("sql/close.sql"), path("sql/overdue.sql"));
    });
}

#[test]
fn provider_is_quiet() {
    let service = PaymentService::start();
    closes_quietly(|settings| {
        service.join(settings, "card", wide_limits());
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
        let deployment = Deployment::start(env, settings).await;
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
            let deployment = Deployment::start(env, settings).await;
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

/// The schema is one of its own, and the role owns it.
#[test]
fn owner_of_own_schema_is_quiet() {
    deployed(
        |_| {},
        async |env| {
            execute(&env, "CREATE SCHEMA order_timeout").await;
            let mut settings = env.settings.clone();
            let url = settings.database.url.expose_secret().to_owned();
            settings.database.url = format!("{url}?options=-csearch_path%3Dorder_timeout").into();
            let (code, _, stderr) = call_with(&settings, &["setup"]).await;
            assert_eq!((code, stderr.as_str()), (0, ""));
            let deployment = Deployment::start(env, settings).await;
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
        let deployment = Deployment::start(env.clone(), settings).await;
        execute(&env, &fixture(shop, "orders.sql")).await;
        let publisher = env.publisher().await;
        let states = async || -> Vec<(String, String, OffsetDateTime)> {
            sqlx::query_as(AssertSqlSafe(fixture(shop, "state.sql"))).fetch_all(&env.pool).await.unwrap()
        };
        for (id, _, deadline) in states().await {
            publisher.schedule(&id, postgres::moment(deadline)).await.unwrap();
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
