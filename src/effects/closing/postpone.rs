//! The action POSTPONE: writes down what claimed orders wait for, and gives their leases back. Unresolved orders are
//! announced and logged.
//!
//! Touches no order and no stock.

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::engine::{EndOutcome, Ending, Postponement, Step, UnresolvedReason};
use order_timeout_core::kind::Kind;
use sqlx::Row;
use tracing::warn;

use super::outcomes::{EndStatement, Outcomes};
use super::{AttemptColumns, without_nul};
use crate::postgres::Database;

/// The statement.
pub const POSTPONE_SQL: &str = include_str!("../../../sql/postpone_closing.sql");

/// Runs it on this database.
pub(super) struct Postpone<'a>(pub &'a Database, pub &'a Kind);

impl EndStatement for Postpone<'_> {
    type Item = Postponement;

    fn ending(item: &Postponement) -> &Ending {
        &item.ending
    }

    async fn run(&self, ends: &[Postponement]) -> Result<Outcomes, sqlx::Error> {
        let outcomes = write(self.0, self.1, ends).await?;
        log_unresolved(ends, &outcomes);
        Ok(outcomes)
    }
}

async fn write(database: &Database, kind: &Kind, ends: &[Postponement]) -> Result<Outcomes, sqlx::Error> {
    let closed = AttemptColumns::closed(ends.iter().map(|end| &end.ending));
    let query = sqlx::query(POSTPONE_SQL)
        .bind(kind.as_str())
        .bind(ends.iter().map(|end| end.ending.order_id.as_str()).collect::<Vec<_>>())
        .bind(ends.iter().map(|end| end.ending.lease.0).collect::<Vec<_>>())
        .bind(ends.iter().map(|end| end.step.as_str()).collect::<Vec<_>>())
        .bind(ends.iter().map(|end| end.step.reason().map(UnresolvedReason::as_str)).collect::<Vec<_>>())
        .bind(ends.iter().map(|end| Timestamptz(end.until)).collect::<Vec<_>>())
        .bind(ends.iter().map(|end| end.queue.as_str()).collect::<Vec<_>>())
        .bind(ends.iter().map(|end| i32::try_from(end.rounds).unwrap_or(i32::MAX)).collect::<Vec<_>>())
        .bind(ends.iter().map(|end| end.has_waited).collect::<Vec<_>>())
        .bind(ends.iter().map(|end| without_nul(&end.ending.answers)).collect::<Vec<_>>())
        .bind(closed.orders)
        .bind(closed.providers)
        .bind(closed.references);
    let rows = database.run(async |connection| query.fetch_all(connection).await).await?;
    rows.iter().map(|row| Ok((row.try_get("order_id")?, EndOutcome::Postponed))).collect()
}

/// One line for all of a batch: a provider that does not answer for long leaves many.
fn log_unresolved(ends: &[Postponement], outcomes: &Outcomes) {
    let written = ends.iter().filter(|end| outcomes.contains_key(end.ending.order_id.as_str()));
    let unresolved: Vec<&Postponement> = written.filter(|end| matches!(end.step, Step::Unresolved(_))).collect();
    if let Some(first) = unresolved.first() {
        let (order_id, reason) = (&first.ending.order_id, first.step.reason().map(UnresolvedReason::as_str));
        let (orders, answers) = (unresolved.len(), &first.ending.answers);
        warn!(
            orders,
            %order_id,
            reason,
            answers,
            "orders cannot be closed or settled, this one among them; they stay open, with their stock reserved, until a person looks at close_attempts"
        );
    }
}
