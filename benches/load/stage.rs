//! A stage for one scenario: a namespace and a database of its own, a worker, orders with chosen deadlines, and how
//! late they were closed. Removed afterwards.

use std::time::{Duration, Instant};

use anyhow::Context;
use lapin::options::{ExchangeDeleteOptions, QueueDeleteOptions};
use order_timeout::topology::Topology;
use order_timeout::worker::Worker;
use order_timeout::{Moment, OrderId, Publisher, Settings, broker, database};
use secrecy::ExposeSecret;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, PgPool, Row};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// After this long an order that is still unpaid counts as lost.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Stage {
    pub settings: Settings,
    pub pool: PgPool,
    server: PgPool,
    database: String,
}

impl Stage {
    /// The settings are the defaults but for namespace and database.
    pub async fn build() -> anyhow::Result<Self> {
        let mut settings = Settings::load(None, &[])?;
        let name = format!("bench_{}", Uuid::now_v7().simple());
        let server =
            PgPool::connect(settings.database.url.expose_secret()).await.context("the database does not answer")?;
        sqlx::query(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&server).await?;
        settings.database.url = settings.database.url_of(&name);
        settings.namespace = name.clone();
        let pool = PgPool::connect(settings.database.url.expose_secret()).await?;
        database::migrate(&pool).await?;
        let connection = broker::connect(&settings.amqp, "bench").await?;
        Topology::new(&settings).declare(&connection).await?;
        broker::close(&connection, Duration::from_secs(1)).await;
        Ok(Self { settings, pool, server, database: name })
    }

    pub async fn clear_away(self) -> anyhow::Result<()> {
        self.pool.close().await;
        sqlx::query(AssertSqlSafe(format!("DROP DATABASE {} WITH (FORCE)", self.database)))
            .execute(&self.server)
            .await?;
        let connection = broker::connect(&self.settings.amqp, "bench").await?;
        remove(&connection, &Topology::new(&self.settings)).await
    }

    pub async fn publisher(&self) -> anyhow::Result<Publisher> {
        Ok(Publisher::connect(&self.settings).await?)
    }

    /// Runs a scenario beside a worker; the worker is stopped afterwards.
    pub async fn beside_a_worker<T>(&self, scenario: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
        let worker = Worker::start(self.settings.clone()).await?;
        let stop = CancellationToken::new();
        let running = tokio::spawn(worker.run(stop.clone()));
        let outcome = scenario.await;
        stop.cancel();
        running.await?;
        outcome
    }

    /// Creates unpaid orders of one article each, due so long from now by the database's clock.
    pub async fn orders(&self, delays: &[Duration]) -> anyhow::Result<Vec<(OrderId, Moment)>> {
        let ids: Vec<Uuid> = delays.iter().map(|_| Uuid::now_v7()).collect();
        let seconds: Vec<f64> = delays.iter().map(Duration::as_secs_f64).collect();
        let count = i64::try_from(ids.len())?;
        let mut transaction = self.pool.begin().await?;
        sqlx::query(
            "INSERT INTO stock (article_id, available, reserved) VALUES ('article', 0, $1)
             ON CONFLICT (article_id) DO UPDATE SET reserved = stock.reserved + $1",
        )
        .bind(count)
        .execute(&mut *transaction)
        .await?;
        let rows = sqlx::query(
            "INSERT INTO orders (id, expires_at) SELECT id, clock_timestamp() + make_interval(secs => delay)
             FROM unnest($1::uuid[], $2::float8[]) AS given (id, delay) RETURNING id, expires_at",
        )
        .bind(&ids)
        .bind(seconds)
        .fetch_all(&mut *transaction)
        .await?;
        sqlx::query("INSERT INTO order_items (order_id, article_id, quantity) SELECT id, 'article', 1 FROM unnest($1::uuid[]) AS id")
            .bind(&ids)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        rows.iter()
            .map(|row| {
                let id: Uuid = row.try_get("id")?;
                Ok((OrderId::new(id.to_string())?, database::moment(row.try_get("expires_at")?)))
            })
            .collect()
    }

    /// Waits until no order that is due before `last` is unpaid, or patience runs out.
    pub async fn wait_until_closed(&self, last: Moment) -> anyhow::Result<()> {
        let last = database::timestamp(last).context("a deadline within the calendar")?;
        let mut began = None;
        loop {
            let (open, is_over): (i64, bool) = sqlx::query_as(
                "SELECT count(*) FILTER (WHERE status = 'unpaid' AND expires_at <= $1), clock_timestamp() > $1 FROM orders",
            )
            .bind(last)
            .fetch_one(&self.pool)
            .await?;
            if is_over {
                let began = began.get_or_insert_with(Instant::now);
                if open == 0 || began.elapsed() > PATIENCE {
                    return Ok(());
                }
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    /// What the ledger says of the orders due up to `last`.
    pub async fn ledger(&self, last: Moment) -> anyhow::Result<Ledger> {
        let last = database::timestamp(last).context("a deadline within the calendar")?;
        let mut lateness_ms: Vec<f64> = sqlx::query_scalar(
            "SELECT (extract(epoch FROM closed_at - expires_at) * 1000)::float8 FROM orders
             WHERE status = 'closed' AND expires_at <= $1 ORDER BY 1",
        )
        .bind(last)
        .fetch_all(&self.pool)
        .await?;
        lateness_ms.sort_by(f64::total_cmp);
        let lost: i64 = sqlx::query_scalar("SELECT count(*) FROM orders WHERE status = 'unpaid' AND expires_at <= $1")
            .bind(last)
            .fetch_one(&self.pool)
            .await?;
        let by_alarm: i64 =
            sqlx::query_scalar("SELECT count(*) FROM orders WHERE closed_by = 'alarm'").fetch_one(&self.pool).await?;
        Ok(Ledger { lateness_ms, lost, by_alarm })
    }
}

/// Takes the objects of a scenario off the broker.
pub async fn remove(connection: &lapin::Connection, topology: &Topology) -> anyhow::Result<()> {
    let channel = connection.create_channel().await?;
    for queue in &topology.queues {
        channel.queue_delete(queue.name.as_str().into(), QueueDeleteOptions::default()).await?;
    }
    for exchange in &topology.exchanges {
        channel.exchange_delete(exchange.name.as_str().into(), ExchangeDeleteOptions::default()).await?;
    }
    Ok(())
}

/// How late, how many, and what is missing.
pub struct Ledger {
    pub lateness_ms: Vec<f64>,
    pub lost: i64,
    pub by_alarm: i64,
}

impl Ledger {
    fn quantile_ms(&self, q: f64) -> f64 {
        let last = self.lateness_ms.len().saturating_sub(1);
        let at = (q * last as f64).ceil() as usize;
        self.lateness_ms.get(at).map_or(f64::NAN, |ms| (ms * 10.0).round() / 10.0)
    }

    /// Prints the figures; an order lost or closed early is a failure of the program, not a figure.
    pub fn print(&self, scenario: &str, more: Value, as_json: bool) -> anyhow::Result<()> {
        let early = self.lateness_ms.iter().filter(|ms| **ms < 0.0).count();
        let mut line = json!({
            "scenario": scenario, "closed": self.lateness_ms.len(), "closed_by_alarm": self.by_alarm, "lost": self.lost, "early": early,
            "lateness_ms": { "p50": self.quantile_ms(0.5), "p99": self.quantile_ms(0.99), "max": self.quantile_ms(1.0) },
        });
        if let (Some(line), Value::Object(more)) = (line.as_object_mut(), more) {
            line.extend(more);
        }
        println!("{}", if as_json { line.to_string() } else { format!("{line:#}") });
        anyhow::ensure!(self.lost == 0 && early == 0, "{} lost, {early} early", self.lost);
        Ok(())
    }
}
