//! The action SETTLE PAID: marks orders as paid because a provider has their money. One batch, one statement, one
//! transaction.
//!
//! Whether the money covers what the order costs is decided by the statement, on the locked row.

use order_timeout_core::engine::{EndOutcome, Ending, PaidEnding};
use sqlx::Row;
use sqlx::types::Json;

use super::outcomes::{EndStatement, Outcomes};
use super::{AttemptColumns, answers_by_order};
use crate::postgres::Database;

/// The statement.
pub const SETTLE_PAID_SQL: &str = include_str!("../../../sql/settle_paid.sql");

/// Runs it on this database.
pub(super) struct SettlePaid<'a>(pub &'a Database);

impl EndStatement for SettlePaid<'_> {
    type Item = PaidEnding;

    fn ending(item: &PaidEnding) -> &Ending {
        &item.ending
    }

    async fn run(&self, endings: &[PaidEnding]) -> Result<Outcomes, sqlx::Error> {
        settle(self.0, endings).await
    }
}

async fn settle(database: &Database, endings: &[PaidEnding]) -> Result<Outcomes, sqlx::Error> {
    let mut attempts = AttemptColumns::default();
    endings.iter().for_each(|paid| attempts.add(&paid.ending.order_id, &paid.paid));
    let mut states = vec!["paid"; attempts.orders.len()];
    endings.iter().for_each(|paid| attempts.add(&paid.ending.order_id, &paid.ending.closed));
    states.resize(attempts.orders.len(), "closed");
    let all = || endings.iter().map(|paid| &paid.ending);
    let query = sqlx::query(SETTLE_PAID_SQL)
        .bind(all().map(|ending| ending.order_id.as_str()).collect::<Vec<_>>())
        .bind(all().map(|ending| ending.lease.0).collect::<Vec<_>>())
        .bind(Json(answers_by_order(all())))
        .bind(attempts.orders)
        .bind(attempts.providers)
        .bind(attempts.references)
        .bind(states);
    let rows = database.run(async |connection| query.fetch_all(connection).await).await?;
    rows.iter().map(|row| Ok((row.try_get("order_id")?, outcome(row.try_get("outcome")?)?))).collect()
}

fn outcome(word: &str) -> Result<EndOutcome, sqlx::Error> {
    Ok(match word {
        "settled" => EndOutcome::Settled,
        "already_paid" => EndOutcome::AlreadyPaid,
        "already_closed" => EndOutcome::AlreadyClosed,
        "busy" => EndOutcome::Busy,
        "amount_differs" => EndOutcome::AmountDiffers,
        "lease_lost" => EndOutcome::LeaseLost,
        _ => return Err(sqlx::Error::Decode(format!("sql/settle_paid.sql returns the outcome {word:?}").into())),
    })
}
