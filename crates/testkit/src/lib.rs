//! What the tests share: an environment of its own for each (database and namespace, removed afterwards), its orders,
//! workers in this process or as child processes, servers and networks that a test may break, and waiting for a condition
//! with a timeout.
//!
//! No mocks, and no fixed sleeps instead of conditions. An environment is removed even if its test panics. Nothing here
//! knows a single test, and no published crate may depend on this one. Helpers panic where a test must fail.

pub mod away;
pub mod checkout;
pub mod degraded;
pub mod figures;
pub mod frames;
pub mod ledger;
pub mod linux;
pub mod machine_stall_probe;
pub mod page;
pub mod paths;
pub mod payment_service;
pub mod private;
pub mod process;
pub mod proxy;
pub mod raw;
pub mod skip;
mod template;

use std::future::Future;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use lapin::options::{
    BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeleteOptions, QueueDeclareOptions,
    QueueDeleteOptions,
};
use lapin::{BasicProperties, Channel, Connection};
use order_timeout::Settings;
use order_timeout::config::Listen;
use order_timeout::handler::Handlers;
use order_timeout::runtime::{StartError, Worker};
use order_timeout_amqp::AmqpSettings;
use order_timeout_amqp::connect::{self, BrokerError};
use order_timeout_amqp::topology::{self, DUE_KEY, Names, Slot};
use order_timeout_client::Publisher;
use order_timeout_core::delay::{Lane, RingSettings, Strategy};
use order_timeout_core::message::Alarm;
use order_timeout_core::order::{OrderId, Timestamp};
use secrecy::{ExposeSecret, SecretString};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, PgPool, Row};
use time::OffsetDateTime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use ledger::Ledger;
use template::Template;

/// Long enough for the slowest machine, even if it stalls for half a minute; a test that waits this long has failed.
pub const TIMEOUT: Duration = Duration::from_secs(120);

/// A database, a namespace, and the settings that name them.
pub struct TestEnv {
    /// They name the environment's namespace and database, and the servers.
    pub settings: Settings,
    /// On the environment's database.
    pub pool: PgPool,
    /// `None` if the test talks to no broker.
    broker: Option<TestBroker>,
}

/// A connection of the test, not of a worker.
struct TestBroker {
    connection: Connection,
    /// With confirms.
    channel: Channel,
}

impl TestBroker {
    async fn connect(settings: &Settings) -> Self {
        let connection = connect_to_broker(settings, "test").await;
        let channel = connection.create_channel().await.unwrap();
        channel.confirm_select(ConfirmSelectOptions::default()).await.unwrap();
        Self { connection, channel }
    }
}

/// An environment that is not created yet. Made by [`TestEnv::builder`].
pub struct EnvBuilder {
    settings: Settings,
    has_broker: bool,
    has_clock: bool,
}

impl EnvBuilder {
    /// Changes the settings before anything is created.
    #[must_use]
    pub fn settings(mut self, adjust: impl FnOnce(&mut Settings)) -> Self {
        adjust(&mut self.settings);
        self
    }

    /// For a test that talks to no broker: nothing is declared, and a worker reaches none.
    #[must_use]
    pub fn without_broker(mut self) -> Self {
        self.settings.amqp.url = unreachable(&self.settings.amqp.url);
        self.has_broker = false;
        self
    }

    /// With a clock that [`TestEnv::advance`] moves.
    #[must_use]
    pub fn with_clock(mut self) -> Self {
        self.has_clock = true;
        self
    }

    /// Creates the environment, runs the test on it, and removes it, even if the test panics.
    pub fn run<T, F>(self, test: T)
    where
        T: FnOnce(Arc<TestEnv>) -> F,
        F: Future<Output = ()> + Send + 'static,
    {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(self.run_here(test));
    }

    async fn run_here<T, F>(self, test: T)
    where
        T: FnOnce(Arc<TestEnv>) -> F,
        F: Future<Output = ()> + Send + 'static,
    {
        let Self { settings, has_broker, has_clock } = self;
        let template = Template::acquire(&settings, has_clock).await;
        let env = match AssertUnwindSafe(TestEnv::build(settings.clone(), has_broker, &template)).catch_unwind().await {
            Ok(env) => Arc::new(env),
            Err(panic) => {
                // Remove what was created. Errors are ignored: the first panic is the one to report.
                let _ = tokio::spawn(tokio::time::timeout(TIMEOUT, clean_up(settings.clone(), has_broker))).await;
                let _ = tokio::spawn(tokio::time::timeout(TIMEOUT, template.release(settings))).await;
                std::panic::resume_unwind(panic);
            }
        };
        // In a task of its own, so that a panic ends the test and not the cleanup.
        let outcome = tokio::spawn(test(env.clone())).await;
        // The cleanup too: a server that the test left broken must not hide the test's failure.
        let cleanup = async move { tokio::time::timeout(2 * TIMEOUT, env.clean_up()).await.expect("cleaned up") };
        let cleaned_up = tokio::spawn(cleanup).await;
        let release = async { tokio::time::timeout(TIMEOUT, template.release(settings)).await.expect("released") };
        let released = tokio::spawn(release).await;
        if let Err(error) = outcome.and(cleaned_up).and(released) {
            std::panic::resume_unwind(error.into_panic());
        }
    }
}

/// Settings for a test: the addresses from the environment variables, a namespace and a database of its own, one lane
/// of two seconds, a short lead and small rings, so that every step of the flow happens within seconds.
pub fn small_settings() -> Settings {
    let mut settings = Settings::load(None, &[]).expect("the environment's settings are valid");
    let name = format!("t{}", &Uuid::now_v7().simple().to_string()[..]);
    settings.namespace = name.clone();
    settings.database.url = settings.database.url_of(&format!("order_timeout_{name}"));
    settings.delay.lanes = vec![Lane::try_from("2s".to_owned()).unwrap()];
    settings.delay.lane_shards = 2;
    settings.delay.lead = Duration::from_millis(500);
    settings.delay.rings = vec![
        RingSettings { unit: Duration::from_secs(1), slots: 12, early: None },
        RingSettings { unit: Duration::from_secs(5), slots: 12, early: Some(Duration::from_secs(1)) },
    ];
    settings.worker.hold_max = Duration::from_millis(3_500);
    // Most tests are about alarms, and on a busy machine the sweep would be faster. But it closes an order in time for the
    // test whose alarm was not sent, because the machine stalled until after the deadline.
    settings.sweep.grace = TIMEOUT / 4;
    // Many tests begin with orders that are overdue. Tests of the first backlog set their own.
    settings.sweep.first_backlog = u32::MAX;
    // A busy machine needs long for a thousand confirms. Tests of this timeout set their own.
    settings.amqp.confirm_timeout = Duration::from_secs(20);
    // And for a connection: a command gives up after it, and a worker that starts.
    settings.amqp.connect_timeout = Duration::from_secs(20);
    // A machine that stalls for seconds would cost the worker its session, and what closes orders until the next one is
    // not what most tests are about. Tests of silent connections set their own.
    settings.amqp.heartbeat = Duration::from_secs(60);
    // For the same reason: a worker that gets no connection when it starts ends.
    settings.database.acquire_timeout = Duration::from_secs(10);
    // A statement that a busy machine cancels is one more path. Tests of this timeout set their own.
    settings.database.statement_timeout = Duration::from_secs(20);
    settings.retry.missing_for = Duration::from_secs(2);
    settings.retry.max_attempts = 1;
    // Tests run in parallel, and few read their worker's pages.
    settings.http.listen = Listen(None);
    settings.validate().expect("the tests' settings are valid");
    settings
}

/// Disables the sweep: if an alarm is lost, its order stays unpaid forever. A long grace would not be enough, because
/// none applies while the broker is unavailable.
pub fn alarms_alone(settings: &mut Settings) {
    let path = |file: &str| paths::repository().join(file).to_str().expect("a path in plain letters").to_owned();
    // Both or neither must be given; this one is the default statement.
    settings.orders.close_sql = path("tests/fixtures/mapping/default_close.sql");
    settings.orders.overdue_sql = path("tests/fixtures/nothing_overdue.sql");
}

/// Adds a ring in which an alarm for the next minutes keeps its slot while a test waits.
pub fn add_coarse_ring(settings: &mut Settings) {
    let (unit, early) = (Duration::from_secs(30), Some(Duration::from_secs(3)));
    settings.delay.rings.push(RingSettings { unit, slots: 12, early });
}

/// A close waits for a lock as long as a test may last, and a stopping worker for that close.
pub fn wait_long_for_locks(settings: &mut Settings) {
    (settings.database.lock_timeout, settings.database.statement_timeout) = (TIMEOUT, 2 * TIMEOUT);
    settings.worker.shutdown_grace = TIMEOUT;
}

/// The address with some of its parts replaced: user and password, host and port, and the path.
pub fn with_parts(url: &SecretString, user: Option<&str>, host: Option<&str>, path: Option<&str>) -> SecretString {
    let (scheme, rest) = url.expose_secret().split_once("://").expect("an address");
    let (authority, old_path) = rest.split_once('/').unwrap_or((rest, ""));
    let (old_user, old_host) = authority.rsplit_once('@').unwrap_or(("guest:guest", authority));
    let (user, host, path) = (user.unwrap_or(old_user), host.unwrap_or(old_host), path.unwrap_or(old_path));
    format!("{scheme}://{user}@{host}/{path}").into()
}

/// The address of a broker with a port on which no process listens, the discard port.
pub fn unreachable(broker: &SecretString) -> SecretString {
    with_parts(broker, None, Some("127.0.0.1:9"), None)
}

/// Host and port of an address.
pub fn host_and_port(url: &SecretString) -> String {
    let (_, rest) = url.expose_secret().split_once("://").expect("an address");
    let authority = rest.split_once('/').map_or(rest, |(authority, _)| authority);
    authority.rsplit_once('@').map_or(authority, |(_, host)| host).to_owned()
}

fn database_name(settings: &Settings) -> String {
    let url = url::Url::parse(settings.database.url.expose_secret()).expect("a valid address");
    url.path().trim_start_matches('/').to_owned()
}

/// The address from the environment variables.
fn usual_database_url() -> SecretString {
    Settings::load(None, &[]).unwrap().database.url
}

/// Whether the database is on a server of the test's own.
fn is_on_private_database(settings: &Settings) -> bool {
    host_and_port(&usual_database_url()) != host_and_port(&settings.database.url)
}

/// Runs a statement in the server's own database: it creates or drops others.
async fn execute_on_server(settings: &Settings, statement: String) {
    let is_private = is_on_private_database(settings);
    let url = if is_private { settings.database.url_of("postgres") } else { usual_database_url() };
    let connecting = PgConnection::connect(url.expose_secret()).await;
    let mut server = connecting.expect("the database answers; run scripts/services");
    let done = sqlx::query(AssertSqlSafe(statement)).execute(&mut server).await;
    done.expect("databases can be created and dropped");
    server.close().await.unwrap();
}

/// A connection of the test's own. It survives a machine that stalls, however short the worker's timeouts are.
pub async fn connect_to_broker(settings: &Settings, purpose: &str) -> Connection {
    let (heartbeat, connect_timeout) = (Duration::from_secs(60), Duration::from_secs(20));
    let amqp = AmqpSettings { heartbeat, connect_timeout, ..settings.amqp.clone() };
    connect::connect(&amqp, purpose).await.expect("the broker answers; run scripts/services")
}

/// The messages ready in a queue; `None` if there is none of this name.
async fn find_queue(connection: &Connection, name: &str) -> Option<u32> {
    loop {
        let channel = connection.create_channel().await.unwrap();
        let options = QueueDeclareOptions { passive: true, ..Default::default() };
        match channel.queue_declare(name.into(), options, Default::default()).await {
            Ok(seen) => {
                channel.close(connect::reply_code::CONTENT_OK, "seen".into()).await.unwrap();
                return Some(seen.message_count());
            }
            Err(error) => match connect::reply(&error) {
                Some((connect::reply_code::NOT_FOUND, text)) if text.contains(&format!("'{name}'")) => return None,
                // The end of an earlier channel: the client may report it to the next one, which has the same number.
                Some((connect::reply_code::NOT_FOUND, _)) => {}
                _ => panic!("{name}: {error}"),
            },
        }
    }
}

/// Removes everything that an environment with these settings has created.
async fn clean_up(settings: Settings, has_broker: bool) {
    // It exists only if the test ran a worker as a child process.
    let _ = std::fs::remove_file(process::rings_file(&settings));
    let drop = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", database_name(&settings));
    execute_on_server(&settings, drop).await;
    if !has_broker {
        return;
    }
    // On a new connection: the test may have lost the environment's.
    let connection = connect_to_broker(&settings, "test cleanup").await;
    let channel = connection.create_channel().await.unwrap();
    for queue in settings.queue_names() {
        channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await.unwrap();
    }
    for exchange in &settings.topology().exchanges {
        channel.exchange_delete(exchange.name.as_str().into(), ExchangeDeleteOptions::default()).await.unwrap();
    }
    connect::close(&connection, Duration::from_secs(2)).await;
}

impl TestEnv {
    /// An environment of a test's own, with [`small_settings`].
    pub fn builder() -> EnvBuilder {
        EnvBuilder { settings: small_settings(), has_broker: true, has_clock: false }
    }

    async fn build(settings: Settings, has_broker: bool, template: &Template) -> Self {
        // First, so that a broker that does not answer leaves no database behind.
        let broker = if has_broker { Some(TestBroker::connect(&settings).await) } else { None };
        template.create_database(&database_name(&settings), &settings).await;
        let pool = PgPool::connect(settings.database.url.expose_secret()).await.unwrap();
        if let Some(broker) = broker.as_ref().filter(|_| settings.delay.strategy == Strategy::DeadLetter) {
            settings.topology().declare(&broker.connection).await.unwrap();
        }
        let env = Self { settings, pool, broker };
        env.stock("article", 1_000_000).await;
        env
    }

    async fn clean_up(&self) {
        self.pool.close().await;
        clean_up(self.settings.clone(), self.broker.is_some()).await;
    }

    fn test_broker(&self) -> &TestBroker {
        self.broker.as_ref().expect("this environment was built without a broker")
    }

    /// The test's own connection to the broker.
    pub fn broker(&self) -> &Connection {
        &self.test_broker().connection
    }

    /// The test's own channel, with confirms.
    pub fn channel(&self) -> &Channel {
        &self.test_broker().channel
    }

    /// The same environment on a new connection, for tests that stop the broker.
    pub async fn reconnected(&self) -> Self {
        let broker = Some(TestBroker::connect(&self.settings).await);
        Self { settings: self.settings.clone(), pool: self.pool.clone(), broker }
    }

    /// The names of the namespace's exchanges and queues.
    pub fn names(&self) -> Names {
        self.settings.names()
    }

    /// Declares every slot of the wheel, for tests that fill or count slots before a worker has needed them.
    pub async fn declare_slots(&self) {
        let slots: Vec<Slot> = self.settings.slots().all().collect();
        assert_eq!(topology::declare_slots(&self.names(), &slots, self.broker()).await.fault, None);
    }

    /// The queues that a worker consumes.
    pub fn consumed_queues(&self) -> Vec<String> {
        let shards = (0..self.settings.worker.shards).map(|shard| self.names().shard(shard));
        let others = self.settings.all_kinds().into_iter().filter(|kind| !kind.is_default());
        let others = others.map(|kind| self.names().timeout_of(&kind));
        shards.chain(others).chain([self.names().schedule(), self.names().parked()]).collect()
    }

    /// A publisher of the namespace.
    pub async fn publisher(&self) -> Publisher {
        self.settings.publisher().connect().await.unwrap()
    }

    /// Starts a worker in this process.
    pub async fn worker(&self) -> RunningWorker {
        RunningWorker::start(self.settings.clone()).await
    }

    /// Starts a worker that cannot reach its broker.
    pub async fn worker_without_broker(&self) -> RunningWorker {
        let mut settings = self.settings.clone();
        settings.amqp.url = unreachable(&settings.amqp.url);
        RunningWorker::start(settings).await
    }

    /// Moves the clock of an environment that was built with one.
    pub async fn advance(&self, step: Duration) {
        order_timeout_client::testing::advance(&self.pool, step).await.unwrap();
    }

    /// Creates an article with this stock.
    pub async fn stock(&self, article: &str, available: i64) {
        sqlx::query("INSERT INTO stock (article_id, available) VALUES ($1, $2)")
            .bind(article)
            .bind(available)
            .execute(&self.pool)
            .await
            .unwrap();
    }

    /// Creates unpaid orders of one article each, all due after this delay by the database's clock.
    pub async fn orders(&self, count: usize, delay: Duration) -> Vec<Order> {
        self.orders_of("article", count, delay).await
    }

    /// Like [`Self::orders`], of this article.
    pub async fn orders_of(&self, article: &str, count: usize, delay: Duration) -> Vec<Order> {
        let ids: Vec<Uuid> = (0..count).map(|_| Uuid::now_v7()).collect();
        let mut transaction = self.pool.begin().await.unwrap();
        sqlx::query("UPDATE stock SET available = available - $2, reserved = reserved + $2 WHERE article_id = $1")
            .bind(article)
            .bind(i64::try_from(count).unwrap())
            .execute(&mut *transaction)
            .await
            .unwrap();
        let rows = sqlx::query(
            "INSERT INTO orders (id, expires_at) SELECT id, clock_timestamp() + make_interval(secs => $2)
             FROM unnest($1::uuid[]) AS id RETURNING id, expires_at",
        )
        // A test may change the type of this column, and then a kept statement fails on the connection that has it.
        .persistent(false)
        .bind(&ids)
        .bind(delay.as_secs_f64())
        .fetch_all(&mut *transaction)
        .await
        .unwrap();
        sqlx::query(
            "INSERT INTO order_items (order_id, article_id, quantity) SELECT id, $2, 1 FROM unnest($1::uuid[]) AS id",
        )
        .bind(&ids)
        .bind(article)
        .execute(&mut *transaction)
        .await
        .unwrap();
        transaction.commit().await.unwrap();
        rows.iter()
            .map(|row| {
                let expires_at: OffsetDateTime = row.get("expires_at");
                Order { id: row.get("id"), deadline: Timestamp::from(expires_at) }
            })
            .collect()
    }

    /// Like [`Self::orders`], one order.
    pub async fn order(&self, delay: Duration) -> Order {
        self.orders(1, delay).await.remove(0)
    }

    /// Writes the order's alarm into the outbox, as its own transaction would.
    pub async fn write_alarm(&self, order: &Order) {
        let mut connection = self.pool.acquire().await.unwrap();
        order_timeout_client::postgres::schedule(&mut connection, order.id.to_string(), order.deadline).await.unwrap();
    }

    /// Pays as a shop should. Returns whether the order was still unpaid.
    pub async fn pay(&self, order: &Order) -> bool {
        let mut transaction = self.pool.begin().await.unwrap();
        let paid = checkout::pay(&mut transaction, order.id).await.unwrap();
        transaction.commit().await.unwrap();
        paid
    }

    /// The status in the order's row.
    pub async fn status(&self, order: &Order) -> String {
        sqlx::query_scalar("SELECT status::text FROM orders WHERE id = $1")
            .bind(order.id)
            .fetch_one(&self.pool)
            .await
            .unwrap()
    }

    /// Runs a query for one number.
    pub async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    /// Waits until a session in the environment's database waits for a lock.
    pub async fn wait_for_lock_waiter(&self) {
        let waits = "SELECT count(*) FROM pg_stat_activity
                     WHERE datname = current_database() AND wait_event_type = 'Lock'
                       -- A worker's inspections of plans and catalogs wait for a locked table as well.
                       AND query NOT LIKE 'EXPLAIN %' AND query NOT LIKE '%pg\\_%'";
        wait_for("a session that waits for a lock", async || self.count(waits).await > 0).await;
    }

    /// How many orders are closed.
    pub async fn closed(&self) -> i64 {
        self.count("SELECT count(*) FROM orders WHERE status = 'closed'").await
    }

    /// Asserts that every closed order was closed by its alarm.
    pub async fn assert_closed_by_alarms(&self) {
        let others = "SELECT count(*) FROM orders WHERE closed_by <> 'alarm'";
        assert_eq!(self.count(others).await, 0, "closed, but not by an alarm");
    }

    /// Asserts the invariants that hold after every test, whatever it did.
    pub async fn assert_ledger(&self) {
        Ledger::read(&self.pool).await.unwrap().assert_balanced();
    }

    /// Makes closing orders of this article fail from now on, by a trigger.
    pub async fn refuse_to_close(&self, article: &str) {
        self.refuse_to_close_by(article, "raise_exception").await;
    }

    /// Like [`Self::refuse_to_close`], with an error of this name (PostgreSQL documentation, appendix A).
    pub async fn refuse_to_close_by(&self, article: &str, error: &str) {
        let trigger = format!(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 IF EXISTS (SELECT FROM order_items WHERE order_id = NEW.id AND article_id = '{article}')
                 THEN RAISE 'this order stays' USING ERRCODE = '{error}'; END IF;
                 RETURN NEW; END $$;
             CREATE TRIGGER refuse BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION refuse()"
        );
        sqlx::raw_sql(AssertSqlSafe(trigger)).execute(&self.pool).await.unwrap();
    }

    /// Parked alarms as (reason, detail, order id).
    pub async fn parked(&self) -> Vec<(String, String, Option<String>)> {
        sqlx::query_as("SELECT reason, detail, order_id FROM parked_alarms ORDER BY parked_at, id")
            .fetch_all(&self.pool)
            .await
            .unwrap()
    }

    /// Publishes as a foreign program would.
    pub async fn publish_raw(&self, exchange: &str, routing_key: &str, body: &[u8], properties: BasicProperties) {
        let options = BasicPublishOptions { mandatory: true, ..Default::default() };
        let confirm =
            self.channel().basic_publish(exchange.into(), routing_key.into(), options, body, properties).await.unwrap();
        let confirmation = confirm.await.unwrap();
        assert!(confirmation.is_ack() && confirmation.take_message().is_none(), "not routed");
    }

    /// Publishes alarms directly to the processing queue, as a lane or a slot does when its delay ends.
    pub async fn deliver<'a>(&self, orders: impl IntoIterator<Item = &'a Order>) {
        let (due, mut confirms) = (self.names().due(), Vec::new());
        for order in orders {
            let options = BasicPublishOptions { mandatory: true, ..Default::default() };
            let (body, properties) = (order.body(), BasicProperties::default().with_delivery_mode(2));
            let sent = self.channel().basic_publish(due.as_str().into(), DUE_KEY.into(), options, &body, properties);
            confirms.push(sent.await.unwrap());
        }
        for confirm in confirms {
            let confirmation = confirm.await.unwrap();
            assert!(confirmation.is_ack() && confirmation.take_message().is_none(), "not routed");
        }
    }

    /// Asserts that every delivery was acknowledged: the queues that the worker consumed are empty. Call it after the
    /// worker has stopped.
    pub async fn assert_drained(&self) {
        for queue in self.consumed_queues() {
            assert_eq!(self.take_out(&queue).await.len(), 0, "messages left in {queue}");
        }
    }

    /// Asserts that no work is left: every message in the queues that the worker consumed is the alarm of an order that
    /// is closed or paid. For use after a fault: the sweep may have closed an order before its alarm was delivered
    /// again, and a worker that stops at that time returns the alarm.
    pub async fn assert_nothing_left_undone(&self) {
        for queue in self.consumed_queues() {
            for body in self.take_out(&queue).await {
                let alarm = Alarm::read(&body, None).unwrap_or_else(|error| panic!("left in {queue}: {error}"));
                let unpaid: bool = sqlx::query_scalar("SELECT status = 'unpaid' FROM orders WHERE id::text = $1")
                    .bind(alarm.order_id.as_str())
                    .fetch_one(&self.pool)
                    .await
                    .unwrap();
                assert!(!unpaid, "the alarm of {} is left in {queue}", alarm.order_id);
            }
        }
    }

    /// Empties a queue and returns the bodies. Includes what a closed consumer returned,
    /// even if the queue has not yet requeued it: a marker is published after it, and everything up to the marker is
    /// taken.
    pub async fn take_out(&self, queue: &str) -> Vec<Vec<u8>> {
        const MARKER: &[u8] = b"marker";
        self.publish_raw("", queue, MARKER, BasicProperties::default()).await;
        let mut taken = Vec::new();
        loop {
            let next = self.channel().basic_get(queue.into(), BasicGetOptions { no_ack: true }).await.unwrap();
            match next {
                Some(message) if message.delivery.data == MARKER => return taken,
                Some(message) => taken.push(message.delivery.data),
                None => panic!("{queue} has another consumer"),
            }
        }
    }

    /// Messages ready in a queue.
    pub async fn depth(&self, queue: &str) -> u32 {
        self.depth_if_any(queue).await.unwrap_or_else(|| panic!("there is no queue {queue}"))
    }

    /// Messages ready in a queue; `None` if there is none of this name.
    pub async fn depth_if_any(&self, queue: &str) -> Option<u32> {
        find_queue(self.broker(), queue).await
    }

    /// The existing queues whose names begin so after the namespace, each with its ready messages.
    pub async fn depths(&self, beginning: &str) -> Vec<(String, u32)> {
        let beginning = format!("{}.{beginning}", self.settings.namespace);
        // A connection of its own: each queue that does not exist uses up one of its 2 047 channels.
        let connection = connect_to_broker(&self.settings, "test queues").await;
        let mut depths = Vec::new();
        for queue in self.settings.queue_names().into_iter().filter(|queue| queue.starts_with(&beginning)) {
            if let Some(ready) = find_queue(&connection, &queue).await {
                depths.push((queue, ready));
            }
        }
        connect::close(&connection, Duration::from_secs(2)).await;
        depths
    }

    /// Messages ready in all queues whose names begin so after the namespace.
    pub async fn depth_of_all(&self, beginning: &str) -> u32 {
        self.depths(beginning).await.iter().map(|(_, depth)| depth).sum()
    }

    /// Asserts that no order was closed early, and, where punctuality is tested, none late by a second.
    pub async fn assert_on_time(&self) {
        self.assert_on_time_within(Duration::from_secs(1)).await;
    }

    /// [`Self::assert_on_time`] with this bound.
    pub async fn assert_on_time_within(&self, limit: Duration) {
        let lateness_ms = self.lateness_ms().await;
        let (first, last) = (lateness_ms.first().expect("a closed order"), lateness_ms.last().expect("a closed order"));
        assert!(*first >= 0.0, "closed {first} ms early");
        assert!(*last < promised(limit).as_secs_f64() * 1e3, "closed {last} ms late");
    }

    /// Lateness of every closed order in milliseconds, sorted.
    pub async fn lateness_ms(&self) -> Vec<f64> {
        sqlx::query_scalar(
            "SELECT (extract(epoch FROM closed_at - expires_at) * 1000)::float8 FROM orders WHERE status = 'closed' ORDER BY 1",
        )
        .fetch_all(&self.pool)
        .await
        .unwrap()
    }
}

/// An order of the shop.
#[derive(Debug, Clone, Copy)]
pub struct Order {
    /// Its key in the table `orders`.
    pub id: Uuid,
    /// The deadline in its row when it was created.
    pub deadline: Timestamp,
}

impl Order {
    /// Its id as alarms contain it.
    pub fn order_id(&self) -> OrderId {
        OrderId::new(self.id.to_string()).unwrap()
    }

    /// The body of its alarm.
    pub fn body(&self) -> Vec<u8> {
        Alarm::new(self.order_id(), self.deadline).to_bytes()
    }
}

/// A worker in this process.
pub struct RunningWorker {
    stop: CancellationToken,
    running: JoinHandle<bool>,
    /// The address of its pages of health and metrics.
    pub http: Option<SocketAddr>,
}

impl RunningWorker {
    /// Starts a worker with these settings. Tries three times if a server does not answer, as what supervises a worker
    /// does: a machine may stall for longer than a test's short timeouts.
    pub async fn start(settings: Settings) -> Self {
        Self::start_with(settings, Handlers::none).await
    }

    /// The same with handlers of the test, which are made for each try.
    pub async fn start_with(settings: Settings, handlers: impl Fn() -> Handlers) -> Self {
        let mut attempt = 1;
        let worker = loop {
            match Worker::start_with(settings.clone(), handlers()).await {
                Err(StartError::Database(_) | StartError::Broker(BrokerError::Away(_))) if attempt < 3 => attempt += 1,
                started => break started.unwrap(),
            }
        };
        let (stop, http) = (CancellationToken::new(), worker.http_address());
        Self { running: tokio::spawn(worker.run(stop.clone())), stop, http }
    }

    /// Asks the worker to stop, as SIGTERM would, without waiting for its end.
    pub fn begin_to_stop(&self) {
        self.stop.cancel();
    }

    /// Stops the worker as SIGTERM would, and asserts that it finished in time.
    pub async fn stop(self) {
        self.stop.cancel();
        assert!(self.running.await.unwrap(), "the worker did not drain within its grace");
    }
}

/// Polls `condition` until it holds; panics with `what` after [`TIMEOUT`].
pub async fn wait_for<F: Future<Output = bool>>(what: &str, condition: impl FnMut() -> F) {
    wait_within(TIMEOUT, what, condition).await;
}

/// [`wait_for`] for what is promised within this time.
pub async fn wait_promised<F: Future<Output = bool>>(limit: Duration, what: &str, condition: impl FnMut() -> F) {
    wait_within(promised(limit), what, condition).await;
}

/// How long something may take that is promised within this time: that time where punctuality is tested, by
/// `scripts/test --punctual` on a machine with nothing else to do. Otherwise [`TIMEOUT`] at least: a machine that stalls, or
/// runs ten tests at once, keeps no time.
pub fn promised(limit: Duration) -> Duration {
    let is_punctual = std::env::var_os("ORDER_TIMEOUT_PUNCTUAL").is_some();
    if is_punctual { limit } else { limit.max(TIMEOUT) }
}

const SHORTEST_PAUSE: Duration = Duration::from_millis(20);

async fn wait_within<F: Future<Output = bool>>(timeout: Duration, what: &str, mut condition: impl FnMut() -> F) {
    let began = Instant::now();
    loop {
        let asked = Instant::now();
        if condition().await {
            return;
        }
        assert!(began.elapsed() < timeout, "not within {timeout:?}: {what}");
        // Asked once more when the time is up, not later.
        let left = timeout.saturating_sub(began.elapsed()).max(SHORTEST_PAUSE);
        tokio::time::sleep(pause_after(asked.elapsed()).min(left)).await;
    }
}

/// Asking takes a fifth of the time at most: a condition that looks at a whole deployment would otherwise keep a processor
/// busy that the worker needs.
fn pause_after(asking: Duration) -> Duration {
    (asking * 4).clamp(SHORTEST_PAUSE, Duration::from_secs(1))
}
