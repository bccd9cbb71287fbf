//! Where the shop runs: a namespace on the broker, a database, and a worker; its own, created for this run and removed
//! afterwards, or with `--no-worker` existing ones.

use std::time::Duration;

use anyhow::Context;
use lapin::Connection;
use lapin::options::{ExchangeDeleteOptions, QueueDeleteOptions};
use order_timeout::Settings;
use order_timeout::config::{DatabaseSettings, Listen};
use order_timeout::postgres::{self, Database};
use order_timeout::runtime::Worker;
use order_timeout_amqp::connect;
use order_timeout_amqp::connect::reply_code;
use order_timeout_client::Publisher;
use order_timeout_core::delay::{Lane, RingSettings};
use sqlx::{AssertSqlSafe, PgPool};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::args::Args;
use crate::plan::Terms;

/// A short standard delay, because a demo cannot wait half an hour.
const DEMO_LANE: &str = "3s";
/// So short that every alarm of the demo lane waits in the broker for 2.5 s and is dead-lettered by it.
const DEMO_LEAD: Duration = Duration::from_millis(500);
/// The other delays of the demo: longer than `hold_max`, so that each waits in a slot of the wheel.
const DEMO_OTHER_MS: std::ops::RangeInclusive<u64> = 4_000..=8_000;
/// The other delays with an external worker, which may be configured to hold alarms for up to 30 s in memory.
const SHARED_OTHER_MS: std::ops::RangeInclusive<u64> = 8_000..=40_000;
/// The longest standard delay that a demo waits for.
const LONGEST_LANE: Duration = Duration::from_secs(60);
/// On which the events are announced if there is no broker.
pub const EVENT_CHANNEL: &str = "order_events";
/// Concurrent customers at the checkout.
const CHECKOUT_CONNECTIONS: u32 = 16;
/// Creating or dropping a database copies files and waits for a checkpoint.
const ADMINISTRATION_TIMEOUT: Duration = Duration::from_secs(60);
const CLOSING_TIMEOUT: Duration = Duration::from_secs(2);
/// The broker user that may only publish, as in a real shop.
const PUBLISHER_URL: &str = "SHOP_PUBLISHER_AMQP_URL";

/// See the module's comment.
#[derive(Debug)]
pub struct Environment {
    pub settings: Settings,
    /// Eight unique hexadecimal digits.
    pub mark: String,
    pools: Vec<PgPool>,
    ownership: Ownership,
}

#[derive(Debug)]
enum Ownership {
    /// Created and removed by the demo. The flags say what may have to be removed; they are set before the creation, so
    /// that a failure halfway leaves nothing behind.
    Own {
        server: Box<DatabaseSettings>,
        database: String,
        topology_made: bool,
        database_made: bool,
        worker: Option<RunningWorker>,
    },
    /// Existing ones.
    Shared,
}

#[derive(Debug)]
struct RunningWorker {
    stop: CancellationToken,
    task: JoinHandle<bool>,
}

impl Environment {
    /// Prepares the shop's own environment; nothing is created yet.
    pub fn own(mut settings: Settings, args: &Args) -> anyhow::Result<Self> {
        let mark = draw_mark();
        let database = format!("order_timeout_shop_{mark}");
        let server = DatabaseSettings {
            statement_timeout: ADMINISTRATION_TIMEOUT,
            lock_timeout: ADMINISTRATION_TIMEOUT,
            ..settings.database.clone()
        };
        settings.namespace = format!("shop-{mark}");
        settings.database.url = settings.database.url_of(&database);
        settings.delay.strategy = args.strategy().unwrap_or(settings.delay.strategy);
        settings.delay.lanes = vec![Lane::try_from(DEMO_LANE.to_owned()).map_err(anyhow::Error::msg)?];
        settings.delay.lane_shards = 2;
        settings.delay.lead = DEMO_LEAD;
        settings.delay.rings = vec![
            RingSettings { unit: Duration::from_secs(1), slots: 12, early: None },
            RingSettings { unit: Duration::from_secs(5), slots: 12, early: Some(Duration::from_secs(1)) },
        ];
        settings.worker.hold_max = DEMO_LEAD + Duration::from_secs(3);
        settings.worker.shutdown_grace = Duration::from_secs(5);
        if !settings.delay.strategy.needs_broker() {
            EVENT_CHANNEL.clone_into(&mut settings.announce.notify);
        }
        settings.validate().context("the demo's settings do not fit together")?;
        let ownership = Ownership::Own {
            server: Box::new(server),
            database,
            topology_made: false,
            database_made: false,
            worker: None,
        };
        Ok(Self { settings, mark, pools: Vec::new(), ownership })
    }

    /// The environment that the settings name, with a worker that runs elsewhere.
    pub fn shared(mut settings: Settings, args: &Args) -> Self {
        settings.delay.strategy = args.strategy().unwrap_or(settings.delay.strategy);
        Self { settings, mark: draw_mark(), pools: Vec::new(), ownership: Ownership::Shared }
    }

    pub fn terms(&self) -> Terms {
        let lanes = &self.settings.delay.lanes;
        let lane = lanes.iter().map(|lane| lane.delay).find(|delay| *delay <= LONGEST_LANE);
        let other_ms = match self.ownership {
            Ownership::Own { .. } => DEMO_OTHER_MS,
            Ownership::Shared => SHARED_OTHER_MS,
        };
        Terms { lane, other_ms, mark: self.mark.clone() }
    }

    /// Creates the own environment, or checks the shared one.
    pub async fn open(&mut self) -> anyhow::Result<()> {
        let Ownership::Own { server, database, topology_made, database_made, worker } = &mut self.ownership else {
            return self.check_shared().await;
        };
        // Both are reached before either is changed.
        let administration = Database::connect(server, 1).await?.pool().clone();
        if self.settings.delay.strategy.needs_broker() {
            let connection = connect::connect(&self.settings.amqp, "shop setup").await?;
            *topology_made = true;
            let topology = self.settings.topology();
            let declaring = timeout(ADMINISTRATION_TIMEOUT, topology.declare(&connection));
            declaring.await.context("the broker does not finish declaring queues")??;
            connect::close(&connection, self.settings.amqp.connect_timeout).await;
        }

        *database_made = true;
        create_database(&administration, database).await?;
        administration.close().await;
        postgres::migrate(&self.settings.database).await?;

        // The pages are not needed, and another worker may be running on this machine.
        let mut settings = self.settings.clone();
        settings.http.listen = Listen(None);
        let ready = Worker::start(settings).await?;
        let stop = CancellationToken::new();
        *worker = Some(RunningWorker { stop: stop.clone(), task: tokio::spawn(ready.run(stop)) });
        Ok(())
    }

    async fn check_shared(&self) -> anyhow::Result<()> {
        let database = Database::connect(&self.settings.database, 1).await?;
        Ok(postgres::require_migrated(&database).await?)
    }

    /// Connections for the customers. They wait for a locked stock row as long as necessary, as in a real shop.
    pub async fn pool(&mut self) -> anyhow::Result<PgPool> {
        let settings = DatabaseSettings {
            acquire_timeout: ADMINISTRATION_TIMEOUT,
            lock_timeout: self.settings.database.statement_timeout,
            ..self.settings.database.clone()
        };
        self.connect_pool(&settings, CHECKOUT_CONNECTIONS).await
    }

    /// A connection that is not shared.
    pub async fn probe_pool(&mut self) -> anyhow::Result<PgPool> {
        let settings = self.settings.database.clone();
        self.connect_pool(&settings, 1).await
    }

    async fn connect_pool(&mut self, settings: &DatabaseSettings, connections: u32) -> anyhow::Result<PgPool> {
        let pool = Database::connect(settings, connections).await?.pool().clone();
        self.pools.push(pool.clone());
        Ok(pool)
    }

    /// The publisher, as the broker user that a shop's checkout would have; `None` if there is no broker.
    pub async fn publisher(&self) -> anyhow::Result<Option<Publisher>> {
        if !self.settings.delay.strategy.needs_broker() {
            return Ok(None);
        }
        let Some(url) = std::env::var(PUBLISHER_URL).ok().filter(|url| !url.is_empty()) else {
            return Ok(Some(self.settings.publisher().connect().await?));
        };
        let mut settings = self.settings.clone();
        settings.amqp.url = url.into();
        let connect = async {
            settings.validate()?;
            anyhow::Ok(Some(settings.publisher().connect().await?))
        };
        connect.await.with_context(|| format!("amqp.url was taken from {PUBLISHER_URL}"))
    }

    /// Within the namespace, because the worker's broker user has permissions there.
    pub fn event_queue(&self) -> String {
        format!("{}.shop-events-{}", self.settings.namespace, self.mark)
    }

    pub fn hint_if_left_unpaid(&self) -> &'static str {
        match self.ownership {
            Ownership::Own { .. } => "",
            Ownership::Shared => "; is `order-timeout worker` running with this namespace, broker and database?",
        }
    }

    /// Stops the worker and removes what was created. May be called at any time; the event queue is exclusive to its
    /// connection and removed with it.
    pub async fn clean_up(&mut self) -> anyhow::Result<()> {
        for pool in self.pools.drain(..) {
            // An interrupted customer's transaction is rolled back; DROP DATABASE terminates the remaining connections.
            let _closed_or_given_up = timeout(CLOSING_TIMEOUT, pool.close()).await;
        }
        let Ownership::Own { server, database, topology_made, database_made, worker } = &mut self.ownership else {
            return Ok(());
        };
        if let Some(RunningWorker { stop, task }) = worker.take() {
            stop.cancel();
            if !task.await.context("the worker panicked")? {
                eprintln!("shop: the worker could not finish everything before it was stopped");
            }
        }
        // Each is attempted even if the other fails.
        let queues = if *topology_made { remove_topology(&self.settings).await } else { Ok(()) };
        let tables = if *database_made { drop_database(server, database).await } else { Ok(()) };
        queues.with_context(|| {
            format!("the queues and exchanges beginning with {:?} are left behind", self.settings.namespace)
        })?;
        tables.with_context(|| format!("the database {database:?} is left behind"))
    }
}

fn draw_mark() -> String {
    format!("{:08x}", fastrand::u32(..))
}

async fn create_database(administration: &PgPool, database: &str) -> anyhow::Result<()> {
    // template0, because it accepts no connections, while a connection to template1 would make the copy fail. The name
    // consists of our own prefix and hexadecimal digits.
    let create = format!("CREATE DATABASE {database} TEMPLATE template0");
    sqlx::query(AssertSqlSafe(create)).execute(administration).await.context(
        "the demo could not make a database of its own (the user in database.url needs the right CREATEDB, or use --no-worker)",
    )?;
    Ok(())
}

async fn drop_database(server: &DatabaseSettings, database: &str) -> anyhow::Result<()> {
    let administration = Database::connect(server, 1).await?.pool().clone();
    // FORCE: a connection of an interrupted run may still be closing.
    let drop = format!("DROP DATABASE IF EXISTS {database} WITH (FORCE)");
    sqlx::query(AssertSqlSafe(drop)).execute(&administration).await?;
    Ok(())
}

async fn remove_topology(settings: &Settings) -> anyhow::Result<()> {
    let connection = connect::connect(&settings.amqp, "shop clearing away").await?;
    let deleting = delete_all(&connection, settings);
    let deleted = timeout(ADMINISTRATION_TIMEOUT, deleting).await.context("the broker does not finish deleting them");
    connect::close(&connection, settings.amqp.connect_timeout).await;
    Ok(deleted??)
}

async fn delete_all(connection: &Connection, settings: &Settings) -> lapin::Result<()> {
    let channel = connection.create_channel().await?;
    // Deleting a nonexistent object is not an error.
    for queue in settings.queue_names() {
        channel.queue_delete(queue.into(), QueueDeleteOptions::default()).await?;
    }
    for exchange in settings.topology().exchanges {
        channel.exchange_delete(exchange.name.into(), ExchangeDeleteOptions::default()).await?;
    }
    // Closed explicitly: a channel dropped just before its connection is closed would race with it.
    channel.close(reply_code::CONTENT_OK, "done".into()).await
}
