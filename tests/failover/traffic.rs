//! A careful shop that creates orders continuously: every operation that is not known to have succeeded is repeated.

use std::sync::Arc;
use std::time::Duration;

use order_timeout_client::Publisher;
use order_timeout_core::order::{OrderId, Timestamp};
use order_timeout_testkit::away::assert_every_event_received;
use order_timeout_testkit::{TestEnv, checkout, wait_for};
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Ten batches a second.
const INTERVAL: Duration = Duration::from_millis(100);
/// The pause before a retry.
const PAUSE: Duration = Duration::from_millis(200);
/// Several, so that closes do not all wait for the same stock row.
const ARTICLES: usize = 20;

/// A running stream of orders.
pub struct Traffic {
    stop: CancellationToken,
    running: JoinHandle<Taken>,
}

/// What the shop was told: these orders are committed and scheduled.
#[derive(Debug, Default)]
pub struct Taken {
    pub orders: Vec<Uuid>,
    /// Alarms that `schedule_all` reported as not scheduled, and that were scheduled again.
    pub scheduled_again: usize,
    /// Commits that failed or went unanswered, and were repeated.
    pub committed_again: usize,
}

impl Traffic {
    /// Creates orders; the batches use these delays in turn.
    pub async fn start(env: Arc<TestEnv>, delays: &'static [Duration]) -> Self {
        for article in 0..ARTICLES {
            env.stock(&article_name(article), 1_000_000).await;
        }
        let publisher = env.publisher().await;
        let stop = CancellationToken::new();
        let (pool, size) = (env.pool.clone(), orders_per_second() / 10);
        Self { running: tokio::spawn(take_orders(pool, publisher, size, delays, stop.clone())), stop }
    }

    /// Creates no more orders, and waits until the existing ones are committed and scheduled.
    pub async fn stop(self) -> Taken {
        self.stop.cancel();
        self.running.await.unwrap()
    }
}

/// 500, unless `scripts/test-failover --rate` says otherwise: a busy machine cannot pass 500 a second through three
/// nodes, and lateness would then only show that.
fn orders_per_second() -> usize {
    std::env::var("ORDER_TIMEOUT_FAILOVER_RATE").map_or(500, |rate| rate.parse().expect("a number of orders"))
}

fn article_name(number: usize) -> String {
    format!("article-{number}")
}

async fn take_orders(
    pool: PgPool,
    publisher: Publisher,
    size: usize,
    delays: &'static [Duration],
    stop: CancellationToken,
) -> Taken {
    let mut batches = JoinSet::new();
    let mut ticks = tokio::time::interval(INTERVAL);
    for number in 0_usize.. {
        tokio::select! {
            () = stop.cancelled() => break,
            _ = ticks.tick() => {}
        }
        let (article, delay) = (article_name(number % ARTICLES), delays[number % delays.len()]);
        batches.spawn(take_batch(pool.clone(), publisher.clone(), article, size, delay));
    }
    let mut taken = Taken::default();
    while let Some(batch) = batches.join_next().await {
        let batch = batch.unwrap();
        taken.orders.extend(batch.orders);
        taken.scheduled_again += batch.scheduled_again;
        taken.committed_again += batch.committed_again;
    }
    taken
}

async fn take_batch(pool: PgPool, publisher: Publisher, article: String, size: usize, delay: Duration) -> Taken {
    let mut taken = Taken { orders: (0..size).map(|_| Uuid::now_v7()).collect(), ..Taken::default() };
    let deadlines = loop {
        match commit(&pool, &taken.orders, &article, delay).await {
            Ok(deadlines) => break deadlines,
            Err(_) => taken.committed_again += 1,
        }
        tokio::time::sleep(PAUSE).await;
    };
    let mut alarms = deadlines;
    while let Err(error) = publisher.schedule_all(alarms.clone()).await {
        let failed: Vec<String> = error.failed.into_iter().map(|(id, _)| id).collect();
        alarms.retain(|(id, _)| failed.iter().any(|failed| failed == id.as_str()));
        taken.scheduled_again += alarms.len();
        tokio::time::sleep(PAUSE).await;
    }
    taken
}

/// Commits orders and their alarms. A lost answer does not tell whether the commit succeeded, so this may be called
/// again.
async fn commit(
    pool: &PgPool,
    ids: &[Uuid],
    article: &str,
    delay: Duration,
) -> Result<Vec<(OrderId, Timestamp)>, sqlx::Error> {
    let taken = checkout::take_orders(&mut *pool.acquire().await?, ids, article, delay).await?;
    Ok(taken.into_iter().map(|(id, deadline)| (OrderId::new(id.to_string()).unwrap(), deadline)).collect())
}

/// The database's time, which lateness is measured by.
pub async fn database_time(env: &TestEnv) -> OffsetDateTime {
    sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&env.pool).await.unwrap()
}

/// Orders not closed yet, if the database answers.
pub async fn unpaid(env: &TestEnv) -> Option<i64> {
    sqlx::query_scalar("SELECT count(*) FROM orders WHERE status = 'unpaid'").fetch_one(&env.pool).await.ok()
}

/// Asserts that every created order was closed once and not early, and that every close was announced.
pub async fn assert_each_closed_once(env: &TestEnv, taken: &Taken, kept_events: &str) {
    wait_for("every order's close", async || unpaid(env).await == Some(0)).await;
    assert_every_event_received(env, kept_events).await;
    let closed: i64 = sqlx::query_scalar("SELECT count(*) FROM orders WHERE id = ANY ($1) AND status = 'closed'")
        .bind(&taken.orders)
        .fetch_one(&env.pool)
        .await
        .unwrap();
    let orders = i64::try_from(taken.orders.len()).unwrap();
    assert_eq!(closed, orders, "of the orders that the shop was told are committed");
    assert_eq!(env.count("SELECT count(*) FROM orders").await, orders);
    assert_eq!(env.count("SELECT count(*) FROM order_events WHERE event = 'closed'").await, orders);
    assert_eq!(env.count("SELECT count(DISTINCT payload ->> 'order_id') FROM event_outbox").await, orders);
    assert_eq!(env.count("SELECT count(*) FROM event_outbox").await, orders);
    assert_eq!(env.parked().await, []);
    env.assert_ledger().await;
}

/// Orders that were not closed by their alarm in time.
pub async fn by_sweep(env: &TestEnv) -> i64 {
    env.count("SELECT count(*) FROM orders WHERE closed_by = 'sweep'").await
}

/// Prints the lateness of the orders that fell due in this span, and its longest time without a close.
pub async fn print_lateness(env: &TestEnv, what: &str, from: OffsetDateTime, until: OffsetDateTime) {
    let (count, very_late, p50, p99, max): (i64, i64, f64, f64, f64) = sqlx::query_as(
        "SELECT count(*), count(*) FILTER (WHERE late > 1000),
                coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY late), 0)::float8,
                coalesce(percentile_cont(0.99) WITHIN GROUP (ORDER BY late), 0)::float8, coalesce(max(late), 0)::float8
         FROM (SELECT extract(epoch FROM closed_at - expires_at) * 1000 AS late FROM orders
               WHERE status = 'closed' AND expires_at BETWEEN $1 AND $2) AS closes",
    )
    .bind(from)
    .bind(until)
    .fetch_one(&env.pool)
    .await
    .unwrap();
    let pause: f64 = sqlx::query_scalar(
        "SELECT coalesce(max(extract(epoch FROM gap) * 1000), 0)::float8
         FROM (SELECT closed_at - lag(closed_at) OVER (ORDER BY closed_at) AS gap FROM orders
               WHERE closed_at BETWEEN $1 AND $2) AS gaps",
    )
    .bind(from)
    .bind(until)
    .fetch_one(&env.pool)
    .await
    .unwrap();
    println!(
        "  {what:<46} {count:>6} orders   late p50 {p50:>7.1} ms  p99 {p99:>8.1} ms  max {max:>8.1} ms   {very_late:>5} by more than 1 s   longest pause {pause:>8.1} ms"
    );
}
