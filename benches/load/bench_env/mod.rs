//! The environment of one candidate: a database and, where alarms are needed, its own namespace on the run's servers;
//! orders with chosen deadlines; the worker under test. Removed afterwards.

pub mod ledger;
pub mod process;
pub mod servers;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::ensure;
use lapin::Connection;
use lapin::options::{ExchangeDeleteOptions, QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use order_timeout::Settings;
use order_timeout::mapping::default_tables;
use order_timeout::operations::orders_statements;
use order_timeout::postgres::{self, Database, kind_functions};
use order_timeout_amqp::connect;
use order_timeout_client::Publisher;
use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::kind::Kind;
use order_timeout_core::order::{OrderId, Timestamp};
use secrecy::{ExposeSecret, SecretString};
use sqlx::{AssertSqlSafe, PgPool};
use uuid::Uuid;

use crate::{DATABASE, Options};
use ledger::Ledger;
use process::Program;
use servers::Servers;

/// After this time an order that is still unpaid counts as lost, and a server without an answer as stuck.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The time for a broker to settle after queues have been declared or messages have arrived: until then it is busy with
/// work that must not be measured, such as garbage collection.
pub const SETTLING: Duration = Duration::from_secs(5);
/// How long the idle broker is measured: /proc counts in hundredths of a second, of which an idle broker uses few.
pub const IDLE_WATCH: Duration = Duration::from_secs(10);
/// The articles of an ordinary shop; a flash sale has one.
pub const MANY_ARTICLES: usize = 1_000;
/// Rows per INSERT when the tables are filled.
const ROWS_AT_ONCE: usize = 10_000;

/// An order and its deadline, as passed to a publisher.
pub type OrderDeadline = (OrderId, Timestamp);

/// The built-in mapping as a shop would write it: its `also` knows neither the path nor the moment.
fn mapping_of_default_tables() -> String {
    let (mapping, _) = default_tables::MAPPING.split_once("[[also]]").expect("it writes the history");
    let stock =
        mapping.replace("[[", "[[kinds.order.table.").replace("table = \"orders\"", "table = \"public.orders\"");
    let history = "INSERT INTO order_events (order_id, event, at, by, reason)
        SELECT c.id, 'closed', clock_timestamp(), 'alarm', 'unpaid' FROM closed c";
    format!("[kinds.order.table]\n{stock}\n[[kinds.order.table.also]]\nsql = \"\"\"{history}\"\"\"\n")
}

/// Where one candidate runs.
#[derive(Debug)]
pub struct BenchEnv<'a> {
    servers: &'a Servers,
    /// The settings of publisher and worker: the defaults, except for the addresses and `overrides`.
    pub settings: Settings,
    overrides: Vec<String>,
    /// The worker's file of settings, if it has one.
    file: Option<PathBuf>,
    pub pool: PgPool,
    database: String,
    has_queues: bool,
}

impl<'a> BenchEnv<'a> {
    /// For the worker: with exchanges and queues, unless its strategy needs none.
    pub async fn for_worker(servers: &'a Servers, options: &Options, more: &[String]) -> anyhow::Result<Self> {
        let mut overrides = vec![format!("delay.strategy={}", options.strategy)];
        // The candidate's own settings come last, so that options cannot override them.
        overrides.extend(options.overrides.iter().chain(more).cloned());
        if options.strategy == DATABASE {
            // So that it announces its events, as a worker with a broker does.
            overrides.push("announce.notify=load_events".to_owned());
        }
        let file = options.mapped.then(|| servers.output.join("mapped.toml"));
        if let Some(file) = &file {
            std::fs::write(file, mapping_of_default_tables())?;
        }
        let env = Self::build(servers, overrides, options.socket, file.as_deref()).await?;
        if options.strategy == DATABASE { Ok(env) } else { env.with_queues().await }
    }

    /// The same with a file of settings, which `overrides` cannot say.
    pub async fn for_worker_with_file(servers: &'a Servers, options: &Options, file: &Path) -> anyhow::Result<Self> {
        let env = Self::build(servers, options.overrides.clone(), options.socket, Some(file)).await?;
        env.with_queues().await
    }

    async fn with_queues(mut self) -> anyhow::Result<Self> {
        let connection = self.connect().await?;
        self.settings.topology().declare(&connection).await?;
        connect::close(&connection, Duration::from_secs(1)).await;
        self.has_queues = true;
        Ok(self)
    }

    /// With only a database, for candidates that need no broker; reached by its socket, or else by TCP.
    pub async fn without_broker(servers: &'a Servers, by_socket: bool) -> anyhow::Result<Self> {
        Self::build(servers, Vec::new(), by_socket, None).await
    }

    async fn build(
        servers: &'a Servers,
        overrides: Vec<String>,
        by_socket: bool,
        file: Option<&Path>,
    ) -> anyhow::Result<Self> {
        let name = format!("load_{}", Uuid::now_v7().simple());
        let mut settings = Settings::load_with_environment(file, Default::default(), &overrides)?;
        settings.namespace = name.clone();
        settings.amqp.url = servers.broker.url.clone().into();
        settings.database.url = servers.postgres.url_by_socket()?.into();
        let server = PgPool::connect(settings.database.url.expose_secret()).await?;
        sqlx::query(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&server).await?;
        server.close().await;
        let pool = PgPool::connect(settings.database.url_of(&name).expose_secret()).await?;
        if !by_socket {
            settings.database.url = SecretString::from(servers.postgres.url_by_tcp());
        }
        settings.database.url = settings.database.url_of(&name);
        postgres::migrate(&settings.database).await?;
        if settings.table_of(&Kind::ORDER).is_some() {
            let database = Database::connect(&settings.database, 1).await?;
            let statements = orders_statements::statements(&database, &settings, &Kind::ORDER).await?;
            kind_functions::install(&database, &statements.functions).await?;
        }
        let file = file.map(Path::to_owned);
        Ok(Self { servers, settings, overrides, file, pool, database: name, has_queues: false })
    }

    pub async fn clean_up(self) -> anyhow::Result<()> {
        if self.has_queues {
            let connection = self.connect().await?;
            remove(&connection, &self.settings).await?;
            connect::close(&connection, Duration::from_secs(1)).await;
        }
        self.pool.close().await;
        let server = PgPool::connect(&self.servers.postgres.url_by_socket()?).await?;
        sqlx::query(AssertSqlSafe(format!("DROP DATABASE {} WITH (FORCE)", self.database))).execute(&server).await?;
        server.close().await;
        Ok(())
    }

    pub async fn connect(&self) -> anyhow::Result<Connection> {
        Ok(connect::connect(&self.settings.amqp, "load").await?)
    }

    pub async fn publisher(&self) -> anyhow::Result<Publisher> {
        Ok(self.settings.publisher().connect().await?)
    }

    /// Starts `order-timeout worker`, which writes to `log`, and waits until it consumes.
    pub async fn start_worker(&self, log: &Path) -> anyhow::Result<Program> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_order-timeout"));
        command.arg("worker").args(["--set", &format!("namespace={}", self.settings.namespace)]);
        // It serves its pages as usual, on a port that no other worker uses.
        command.args(["--set", "http.listen=127.0.0.1:0"]);
        if let Some(file) = &self.file {
            command.arg("--config").arg(file);
        }
        for setting in &self.overrides {
            command.args(["--set", setting]);
        }
        // Settings in the caller's environment must not be measured.
        for (key, _) in std::env::vars().filter(|(key, _)| key.starts_with("ORDER_TIMEOUT__")) {
            command.env_remove(key);
        }
        command.env("ORDER_TIMEOUT__AMQP__URL", self.settings.amqp.url.expose_secret());
        command.env("ORDER_TIMEOUT__DATABASE__URL", self.settings.database.url.expose_secret());
        let mut worker = Program::start("the worker", command, log)?;
        let began = tokio::time::Instant::now();
        while !self.is_working().await? {
            worker.ensure_runs()?;
            ensure!(began.elapsed() < TIMEOUT, "the worker does not begin; its log lies in target/load");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(worker)
    }

    /// The address of a worker's pages, which its log names as it begins to work.
    pub async fn http_of(&self, log: &Path) -> anyhow::Result<SocketAddr> {
        const BEFORE: &str = "health and metrics at http://";
        let began = tokio::time::Instant::now();
        loop {
            let text = std::fs::read_to_string(log)?;
            if let Some((address, _)) = text.split_once(BEFORE).and_then(|(_, after)| after.split_once('/')) {
                return Ok(address.parse()?);
            }
            ensure!(began.elapsed() < TIMEOUT, "the worker's log names no address; it lies in target/load");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Whether the worker consumes, or has registered if there is nothing to consume.
    async fn is_working(&self) -> anyhow::Result<bool> {
        if !self.settings.delay.strategy.needs_broker() {
            let registered = sqlx::query_scalar("SELECT EXISTS (SELECT FROM order_timeout_workers)");
            return Ok(registered.fetch_one(&self.pool).await?);
        }
        let connection = self.connect().await?;
        let consumers = queue_state(&connection, &self.settings.names().timeout()).await?.consumers;
        connect::close(&connection, Duration::from_secs(1)).await;
        Ok(consumers > 0)
    }

    /// Creates unpaid orders with these deadlines over this many articles, and leaves the tables as a busy shop has
    /// them: analysed, and written to disk.
    pub async fn fill(&self, deadlines: &[Timestamp], articles: usize) -> anyhow::Result<Vec<OrderDeadline>> {
        let mut random = fastrand::Rng::with_seed(1);
        let mut alarms = Vec::with_capacity(deadlines.len());
        for deadlines in deadlines.chunks(ROWS_AT_ONCE) {
            let ids: Vec<Uuid> = deadlines.iter().map(|_| Uuid::now_v7()).collect();
            let chosen: Vec<String> = ids.iter().map(|_| format!("article-{}", random.usize(0..articles))).collect();
            self.insert(&ids, deadlines, &chosen).await?;
            for (id, deadline) in ids.iter().zip(deadlines) {
                alarms.push((OrderId::new(id.to_string())?, *deadline));
            }
        }
        for statement in ["ANALYZE", "CHECKPOINT"] {
            sqlx::query(statement).execute(&self.pool).await?;
        }
        Ok(alarms)
    }

    async fn insert(&self, ids: &[Uuid], deadlines: &[Timestamp], articles: &[String]) -> anyhow::Result<()> {
        let deadlines: Vec<_> = deadlines.iter().map(|moment| Timestamptz(*moment)).collect();
        let mut transaction = self.pool.begin().await?;
        sqlx::query(
            "INSERT INTO stock (article_id, available, reserved)
             SELECT article, 0, count(*) FROM unnest($1::text[]) AS article GROUP BY article
             ON CONFLICT (article_id) DO UPDATE SET reserved = stock.reserved + excluded.reserved",
        )
        .bind(articles)
        .execute(&mut *transaction)
        .await?;
        sqlx::query("INSERT INTO orders (id, expires_at) SELECT * FROM unnest($1::uuid[], $2::timestamptz[])")
            .bind(ids)
            .bind(deadlines)
            .execute(&mut *transaction)
            .await?;
        sqlx::query(
            "INSERT INTO order_items (order_id, article_id, quantity)
             SELECT id, article, 1 FROM unnest($1::uuid[], $2::text[]) AS given (id, article)",
        )
        .bind(ids)
        .bind(articles)
        .execute(&mut *transaction)
        .await?;
        Ok(transaction.commit().await?)
    }

    /// Waits until no order that is due by `last` is unpaid, or the time is up.
    pub async fn wait_until_closed(&self, last: Timestamp, closing: &mut Program) -> anyhow::Result<()> {
        sleep_until(last).await;
        let timestamp = Timestamptz(last);
        while Timestamp::now_by_local_clock() < last + TIMEOUT {
            closing.ensure_runs()?;
            // From the end of the deadline index, which holds the last orders to be closed: the cheapest query.
            let open: Option<i32> = sqlx::query_scalar(
                "SELECT 1 FROM orders WHERE status = 'unpaid' AND expires_at <= $1 ORDER BY expires_at DESC, id DESC LIMIT 1",
            )
            .bind(timestamp)
            .fetch_optional(&self.pool)
            .await?;
            if open.is_none() {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// Waits until every event is marked as sent.
    pub async fn wait_until_announced(&self, worker: &mut Program) -> anyhow::Result<()> {
        let began = tokio::time::Instant::now();
        loop {
            worker.ensure_runs()?;
            let unsent: bool = sqlx::query_scalar("SELECT EXISTS (SELECT FROM event_outbox WHERE sent_at IS NULL)")
                .fetch_one(&self.pool)
                .await?;
            if !unsent {
                return Ok(());
            }
            ensure!(began.elapsed() < TIMEOUT, "events are still unsent {TIMEOUT:?} after the last close");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// The final state of the orders due by `last`.
    pub async fn ledger(&self, last: Timestamp) -> anyhow::Result<Ledger> {
        ledger::read(&self.pool, last).await
    }
}

/// Removes the environment's objects from the broker.
pub async fn remove(connection: &Connection, settings: &Settings) -> anyhow::Result<()> {
    let channel = connection.create_channel().await?;
    for queue in settings.queue_names() {
        channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
    }
    for exchange in &settings.topology().exchanges {
        channel.exchange_delete(exchange.name.as_str().into(), ExchangeDeleteOptions::default()).await?;
    }
    Ok(())
}

/// What a queue reports about itself.
pub struct QueueState {
    pub ready: u32,
    pub consumers: u32,
}

pub async fn queue_state(connection: &Connection, queue: &str) -> anyhow::Result<QueueState> {
    let channel = connection.create_channel().await?;
    let options = QueueDeclareOptions { passive: true, ..Default::default() };
    let state = channel.queue_declare(queue.into(), options, FieldTable::default()).await?;
    channel.close(connect::reply_code::CONTENT_OK, "asked".into()).await?;
    Ok(QueueState { ready: state.message_count(), consumers: state.consumer_count() })
}

/// By the machine's clock, which here is the database's too.
pub async fn sleep_until(moment: Timestamp) {
    tokio::time::sleep(moment.since(Timestamp::now_by_local_clock())).await;
}
