//! The action RESUME: takes claimed orders over that are due, with every attempt that is not decided, and renews leases.
//!
//! Only reads the attempts. Which orders are due, and that one worker has each, is decided by the statement.

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::engine::{Claim, ClaimedAttempt, Lease, Recorded, ResumePage};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::OrderId;
use order_timeout_core::payment::{Attempt, Currency, Money};
use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::postgres::Database;

/// The statement.
pub const RESUME_SQL: &str = include_str!("../../../sql/resume_closing.sql");

pub(super) async fn resume(database: &Database, kind: &Kind, page: &ResumePage) -> Result<Vec<Claim>, sqlx::Error> {
    let (queues, limits): (Vec<&str>, Vec<i64>) =
        page.limits.iter().map(|(queue, limit)| (queue.as_str(), number(*limit))).unzip();
    let (renewed, leases): (Vec<&str>, Vec<i64>) =
        page.renewed.iter().map(|(id, lease)| (id.as_str(), lease.0)).unzip();
    let query = sqlx::query(RESUME_SQL)
        .bind(kind.as_str())
        .bind(page.lease.as_secs_f64())
        .bind(queues)
        .bind(limits)
        .bind(renewed)
        .bind(leases);
    let rows = database.run(async |connection| query.fetch_all(connection).await).await?;
    let mut claims: Vec<Claim> = Vec::new();
    for row in &rows {
        let order_id: String = row.try_get("order_id")?;
        if claims.last().is_none_or(|last| last.order_id.as_str() != order_id) {
            claims.push(read_claim(order_id, row)?);
        }
        if let (Some(attempt), Some(claim)) = (read_attempt(row)?, claims.last_mut()) {
            claim.attempts.push(attempt);
        }
    }
    Ok(claims)
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn read_claim(order_id: String, row: &PgRow) -> Result<Claim, sqlx::Error> {
    let rounds: i32 = row.try_get("rounds")?;
    Ok(Claim {
        order_id: OrderId::new(order_id).map_err(decode)?,
        lease: Lease(row.try_get("lease")?),
        queue: row.try_get("queue")?,
        rounds: u32::try_from(rounds).map_err(decode)?,
        has_waited: row.try_get("has_waited")?,
        was_judged: row.try_get("was_judged")?,
        attempts: Vec::new(),
    })
}

/// `None` if the order has no attempt that is not decided.
fn read_attempt(row: &PgRow) -> Result<Option<ClaimedAttempt>, sqlx::Error> {
    let Some(provider): Option<String> = row.try_get("provider")? else { return Ok(None) };
    let (currency, state): (String, String) = (row.try_get("currency")?, row.try_get("state")?);
    let money =
        Money { amount_minor: row.try_get("amount_minor")?, currency: Currency::new(&currency).map_err(decode)? };
    let attempt = Attempt { provider, reference: row.try_get("reference")?, money };
    let recorded = if state == "paid" { Recorded::Paid } else { Recorded::Open };
    let Timestamptz(begun_at) = row.try_get("created_at")?;
    let payable_until: Option<Timestamptz> = row.try_get("payable_until")?;
    let payable_until = payable_until.map(|Timestamptz(moment)| moment);
    Ok(Some(ClaimedAttempt { attempt, recorded, begun_at, payable_until }))
}

fn decode(fault: impl std::error::Error + Send + Sync + 'static) -> sqlx::Error {
    sqlx::Error::Decode(Box::new(fault))
}
