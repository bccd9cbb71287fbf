//! The parts of a deployment's status: overdue orders, outboxes, parked alarms, workers.
//!
//! Reads only, and asks no worker.

use std::time::Duration;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::Timestamp;
use serde::Serialize;
use sqlx::{AssertSqlSafe, Row};

use crate::operations::orders_table::OverdueOrders;
use crate::postgres::{Database, one_line, parked_alarms};

/// A registered worker that was not seen for longer has ended: three of its heartbeats.
pub const SEEN_WITHIN: Duration = Duration::from_secs(10);

/// Unpaid orders whose deadline has passed.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct Overdue {
    /// How many.
    pub orders: u64,
    /// Whether there may be more than `orders`.
    pub is_at_least: bool,
    /// The deadline of the oldest, RFC 3339.
    pub oldest: Option<String>,
    /// Seconds since then.
    pub oldest_s: Option<f64>,
}

/// Rows of an outbox that were not sent yet.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct Outbox {
    /// Rows that wait.
    pub unsent: u64,
    /// The age of the oldest in seconds.
    pub oldest_s: Option<f64>,
    /// Those among them that the broker has refused.
    pub refused: u64,
    /// The age of the oldest refused one in seconds.
    pub oldest_refused_s: Option<f64>,
}

/// Alarms that were parked for one reason.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct ParkedForReason {
    /// The word of the reason.
    pub reason: String,
    /// How many are parked for it.
    pub alarms: u64,
    /// Seconds since the oldest was parked.
    pub oldest_s: f64,
}

/// A worker as it has registered itself.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct RegisteredWorker {
    /// The name of its machine.
    pub host: String,
    /// Its process id there.
    pub pid: i32,
    /// Its version.
    pub version: String,
    /// Its `namespace`.
    pub namespace: String,
    /// The kinds that it serves.
    pub kinds: Vec<String>,
    /// RFC 3339.
    pub since: String,
    /// Seconds since it was last seen.
    pub last_seen_s: f64,
    /// Whether it was seen lately. One that was not has ended without signing off.
    pub is_live: bool,
}

pub(super) fn overdue_at(now: Timestamp, found: &OverdueOrders) -> Overdue {
    Overdue {
        orders: found.orders,
        is_at_least: found.is_at_least,
        oldest: found.oldest.map(write_rfc3339),
        oldest_s: found.oldest.map(|oldest| seconds(now, oldest)),
    }
}

fn seconds(now: Timestamp, then: Timestamp) -> f64 {
    now.since(then).as_secs_f64()
}

pub(in crate::operations) async fn outbox(
    database: &Database,
    table: &'static str,
    now: Timestamp,
) -> Result<Outbox, String> {
    let select = sqlx::query(AssertSqlSafe(format!(
        "SELECT count(*) AS unsent, min(created_at) AS oldest,
                count(*) FILTER (WHERE refusals > 0) AS refused,
                min(created_at) FILTER (WHERE refusals > 0) AS oldest_refused
         FROM {table} WHERE sent_at IS NULL"
    )));
    let read = async {
        let row = database.run(async |connection| select.fetch_one(connection).await).await?;
        let count = |column| row.try_get(column).map(i64::unsigned_abs);
        let age = |column| {
            let since: Option<Timestamptz> = row.try_get(column)?;
            Ok::<_, sqlx::Error>(since.map(|Timestamptz(since)| seconds(now, since)))
        };
        let (unsent, refused) = (count("unsent")?, count("refused")?);
        Ok(Outbox { unsent, oldest_s: age("oldest")?, refused, oldest_refused_s: age("oldest_refused")? })
    };
    read.await.map_err(|error: sqlx::Error| one_line(&error))
}

pub(super) async fn parked_by_reason(database: &Database, now: Timestamp) -> Result<Vec<ParkedForReason>, String> {
    let counts = parked_alarms::count_by_reason(database).await.map_err(|error| one_line(&error))?;
    let of_reason = |(reason, alarms, oldest)| ParkedForReason { reason, alarms, oldest_s: seconds(now, oldest) };
    Ok(counts.into_iter().map(of_reason).collect())
}

/// The registered workers, the longest running first.
///
/// # Errors
/// One sentence.
pub(in crate::operations) async fn workers(database: &Database) -> Result<Vec<RegisteredWorker>, String> {
    let select = sqlx::query(
        "SELECT host, pid, version, namespace, kinds, started_at,
                greatest(extract(epoch FROM pg_catalog.clock_timestamp() - last_seen), 0)::float8 AS last_seen_s
         FROM order_timeout_workers ORDER BY started_at, id",
    );
    let rows = database.run(async |connection| select.fetch_all(connection).await).await;
    let read = |row: &sqlx::postgres::PgRow| {
        let (Timestamptz(since), last_seen_s): (_, f64) = (row.try_get("started_at")?, row.try_get("last_seen_s")?);
        Ok(RegisteredWorker {
            host: row.try_get("host")?,
            pid: row.try_get("pid")?,
            version: row.try_get("version")?,
            namespace: row.try_get("namespace")?,
            kinds: row.try_get("kinds")?,
            since: write_rfc3339(since),
            last_seen_s,
            is_live: last_seen_s <= SEEN_WITHIN.as_secs_f64(),
        })
    };
    rows.and_then(|rows| rows.iter().map(read).collect()).map_err(|error| one_line(&error))
}
