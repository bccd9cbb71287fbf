//! How many orders a minute the deployment can close: measured while orders waited, or else the benchmark's figure.
//!
//! Reads only.

use serde::Serialize;
use sqlx::Row;

use super::orders_table::Unknown;
use crate::postgres::{Database, one_line};

/// What was closed per second in the slowest documented run of the benchmark on two cores
/// (docs/SCALING.md, "What runs out first").
const REFERENCE_PER_SECOND: u64 = 43_000;
/// Events that are read, the newest first: two seconds of the reference rate, so that the query stays short.
const EVENTS: i64 = 100_000;
/// Orders that must have been closed in a second for it to be a measurement: fewer may have been late because of a lock.
const LEAST_MEASURED: i64 = 100;

/// How many orders a minute can be closed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct CloseRate {
    /// Orders a minute.
    pub per_minute: u64,
    /// Where the number is from.
    pub basis: Basis,
    /// The same in one sentence.
    pub why: String,
}

/// Where a close rate is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, utoipa::ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// The busiest second of the last hour in which orders waited.
    Measured,
    /// The benchmark's figure: closing has not been busy.
    Benchmark,
}

/// The close rate of the last hour, or the benchmark's.
///
/// # Errors
/// One sentence, if the events cannot be read.
pub async fn close_rate(database: &Database) -> Result<CloseRate, Unknown> {
    // A second in which orders were closed late on average is one in which closing was the limit.
    let select = sqlx::query(
        "SELECT max(closed) AS closed FROM (
             SELECT count(*) AS closed
             FROM (SELECT (e.payload ->> 'closed_at')::timestamptz AS closed_at,
                          (e.payload ->> 'deadline')::timestamptz AS deadline
                   FROM (SELECT type, payload FROM event_outbox
                         WHERE sent_at > statement_timestamp() - interval '1 hour'
                         ORDER BY sent_at DESC LIMIT $1) e
                   -- The events of a close, of every kind.
                   WHERE e.payload ? 'closed_at') AS closes
             GROUP BY date_trunc('second', closed_at)
             HAVING count(*) >= $2 AND avg(extract(epoch FROM closed_at - deadline)) > 0.5) AS seconds",
    )
    .bind(EVENTS)
    .bind(LEAST_MEASURED);
    let row = database.run(async |connection| select.fetch_one(connection).await).await;
    let busiest: Option<i64> = row.and_then(|row| row.try_get("closed")).map_err(|error| one_line(&error))?;
    Ok(rate(busiest.map(i64::unsigned_abs)))
}

fn rate(busiest_second: Option<u64>) -> CloseRate {
    match busiest_second {
        Some(orders) => CloseRate {
            per_minute: orders * 60,
            basis: Basis::Measured,
            why: format!("in the busiest second of the last hour in which orders waited, {orders} were closed"),
        },
        None => CloseRate {
            per_minute: REFERENCE_PER_SECOND * 60,
            basis: Basis::Benchmark,
            why: format!(
                "no orders waited in the last hour, so this is the benchmark's figure for two cores ({REFERENCE_PER_SECOND} a second), and not measured here"
            ),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_names_where_it_is_from() {
        let measured = rate(Some(500));
        assert_eq!((measured.per_minute, measured.basis), (30_000, Basis::Measured));
        let reference = rate(None);
        assert_eq!((reference.per_minute, reference.basis), (2_580_000, Basis::Benchmark));
        assert!(reference.why.contains("not measured here"));
    }
}
