//! The final state of the database: how late each order was closed, by which path, and which invariants were broken.
//!
//! Lateness is the commit's time minus the deadline. `closed_at` is written before the commit and would hide a slow one.

use std::collections::BTreeMap;

use anyhow::ensure;
use hdrhistogram::Histogram;
use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::order::Timestamp;
use serde_json::{Value, json};
use sqlx::PgPool;

/// The orders that were due, and how they ended.
#[derive(Debug)]
pub struct Ledger {
    pub orders: u64,
    pub closed: u64,
    /// Still unpaid.
    pub lost: u64,
    /// According to the history, which the tables protect, or to stock given back more than once.
    pub closed_twice: u64,
    /// According to the commit's time or `closed_at`; the tables protect the latter.
    pub early: u64,
    pub closed_by: BTreeMap<String, u64>,
    pub lateness_us: Histogram<u64>,
    /// From the first deadline to the last commit.
    pub took_s: f64,
}

impl Ledger {
    pub fn closed_per_s(&self) -> f64 {
        self.closed as f64 / self.took_s
    }

    pub fn lateness_ms(&self) -> Value {
        lateness_ms(&self.lateness_us)
    }

    pub fn share_by_alarm(&self) -> f64 {
        self.closed_by.get("alarm").map_or(0.0, |alarm| *alarm as f64 / self.closed as f64)
    }

    /// # Errors
    /// If an order was lost, closed twice or closed early.
    pub fn ensure_kept(&self, name: &str) -> anyhow::Result<()> {
        let Self { lost, closed_twice, early, .. } = self;
        ensure!(
            *lost == 0 && *closed_twice == 0 && *early == 0,
            "{name}: {lost} lost, {closed_twice} closed twice, {early} closed early"
        );
        Ok(())
    }
}

/// Microseconds, to three digits.
pub fn histogram() -> Histogram<u64> {
    Histogram::new(3).expect("three digits are within bounds")
}

/// The percentiles that every report prints.
pub fn lateness_ms(lateness_us: &Histogram<u64>) -> Value {
    let at = |quantile| millis(lateness_us.value_at_quantile(quantile));
    json!({ "p50": at(0.5), "p99": at(0.99), "p999": at(0.999), "max": millis(lateness_us.max()) })
}

/// With two decimals.
pub fn millis(micros: u64) -> f64 {
    (micros as f64 / 10.0).round() / 100.0
}

pub async fn read(pool: &PgPool, last: Timestamp) -> anyhow::Result<Ledger> {
    let last = Timestamptz(last);
    let mut lateness_us = histogram();
    let mut early = 0;
    let began = Timestamptz(Timestamp::from_unix_micros(0));
    for late_us in lateness(pool, began, last).await? {
        match u64::try_from(late_us) {
            Ok(late_us) => lateness_us.record(late_us)?,
            Err(_) => early += 1,
        }
    }
    let (orders, lost, took_s): (i64, i64, Option<f64>) = sqlx::query_as(
        "SELECT count(*), count(*) FILTER (WHERE status <> 'closed'),
                extract(epoch FROM max(pg_xact_commit_timestamp(xmin)) FILTER (WHERE status = 'closed') - min(expires_at))::float8
         FROM orders WHERE expires_at <= $1",
    )
    .bind(last)
    .fetch_one(pool)
    .await?;
    Ok(Ledger {
        orders: count(orders),
        closed: count(orders - lost),
        lost: count(lost),
        closed_twice: closed_twice(pool).await?,
        early,
        closed_by: closed_by(pool).await?,
        lateness_us,
        took_s: took_s.unwrap_or(f64::NAN),
    })
}

/// In microseconds, of the closed orders with a deadline from `first` to `last`; negative for those closed early.
pub async fn lateness(pool: &PgPool, first: Timestamptz, last: Timestamptz) -> anyhow::Result<Vec<i64>> {
    let query = sqlx::query_scalar(
        "SELECT (extract(epoch FROM least(closed_at, pg_xact_commit_timestamp(xmin)) - expires_at) * 1000000)::bigint
         FROM orders WHERE status = 'closed' AND expires_at BETWEEN $1 AND $2 AND closed_at < expires_at
         UNION ALL
         SELECT (extract(epoch FROM pg_xact_commit_timestamp(xmin) - expires_at) * 1000000)::bigint
         FROM orders WHERE status = 'closed' AND expires_at BETWEEN $1 AND $2 AND closed_at >= expires_at",
    );
    Ok(query.bind(first).bind(last).fetch_all(pool).await?)
}

/// An order with two closes in its history, or an article with more stock given back than was ordered and closed.
async fn closed_twice(pool: &PgPool) -> anyhow::Result<u64> {
    let (in_history, in_stock): (i64, i64) = sqlx::query_as(
        "SELECT (SELECT count(*) - count(DISTINCT order_id) FROM order_events WHERE event = 'closed'),
                (SELECT coalesce(sum(available), 0)::bigint FROM stock)
                    - (SELECT coalesce(sum(quantity), 0)::bigint FROM order_items
                       JOIN orders ON orders.id = order_id WHERE status = 'closed')",
    )
    .fetch_one(pool)
    .await?;
    ensure!(in_stock >= 0, "{} articles of closed orders were not given back", -in_stock);
    Ok(count(in_history.max(in_stock)))
}

async fn closed_by(pool: &PgPool) -> anyhow::Result<BTreeMap<String, u64>> {
    let query = sqlx::query_as("SELECT closed_by, count(*) FROM orders WHERE status = 'closed' GROUP BY closed_by");
    let rows: Vec<(String, i64)> = query.fetch_all(pool).await?;
    Ok(rows.into_iter().map(|(path, orders)| (path, count(orders))).collect())
}

fn count(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
