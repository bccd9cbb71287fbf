//! The action CLOSE CLAIMED: closes orders of which every attempt is proved to be closed. One batch, one statement, one
//! transaction.
//!
//! Never reports "closed" before the commit is answered.

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::engine::{EndOutcome, Ending};
use order_timeout_core::order::ClosedBy;
use sqlx::Row;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::types::Json;

use super::ended_orders::{EndedOrder, EndedOrders};
use super::outcomes::{EndStatement, Outcomes};
use super::statements::close_claimed_sql;
use super::{AttemptColumns, answers_by_order};
use crate::postgres::{Database, ErrorClass, classify};

/// Runs it on this database.
pub(super) struct CloseClaimed<'a>(pub &'a Database, pub &'a EndedOrders);

impl EndStatement for CloseClaimed<'_> {
    type Item = Ending;

    fn ending(item: &Ending) -> &Ending {
        item
    }

    async fn run(&self, endings: &[Ending]) -> Result<Outcomes, sqlx::Error> {
        let close = async |waits| self.0.run(async |connection| close(connection, endings, waits).await).await;
        let rows = match close(true).await {
            // The others must not wait again for an article that another session holds; its orders are reported as busy.
            Err(error) if classify(&error) == ErrorClass::Locked => close(false).await?,
            answer => answer?,
        };
        self.1.add(rows.iter().filter_map(read_closed));
        rows.iter().map(|row| Ok((row.try_get("order_id")?, read_outcome(row)?))).collect()
    }
}

pub(super) async fn close(
    connection: &mut PgConnection,
    endings: &[Ending],
    waits: bool,
) -> Result<Vec<PgRow>, sqlx::Error> {
    let closed = AttemptColumns::closed(endings);
    let query = sqlx::query(close_claimed_sql())
        .bind(endings.iter().map(|ending| ending.order_id.as_str()).collect::<Vec<_>>())
        .bind(endings.iter().map(|ending| ending.lease.0).collect::<Vec<_>>())
        .bind(waits)
        .bind(Json(answers_by_order(endings)))
        .bind(closed.orders)
        .bind(closed.providers)
        .bind(closed.references);
    query.fetch_all(connection).await
}

/// `None` if the order was not closed. What cannot be read is not counted.
fn read_closed(row: &PgRow) -> Option<EndedOrder> {
    let closed_by = ClosedBy::from_word(row.try_get::<Option<&str>, _>("closed_by").ok()??)?;
    let deadline: Option<Timestamptz> = row.try_get("deadline").ok()?;
    Some(EndedOrder { closed_by: Some(closed_by), deadline: deadline.map(|Timestamptz(moment)| moment) })
}

pub(super) fn read_outcome(row: &PgRow) -> Result<EndOutcome, sqlx::Error> {
    let word: String = row.try_get("outcome")?;
    Ok(match word.as_str() {
        "closed" => EndOutcome::Closed,
        "already_paid" => EndOutcome::AlreadyPaid,
        "already_closed" => EndOutcome::AlreadyClosed,
        "busy" => EndOutcome::Busy,
        "attempts_changed" => EndOutcome::AttemptsChanged,
        "kept" => EndOutcome::Kept,
        "no_deadline" => EndOutcome::NoDeadline,
        "lease_lost" => EndOutcome::LeaseLost,
        "not_due" => {
            let Timestamptz(deadline) = row.try_get("deadline")?;
            EndOutcome::NotDue(deadline)
        }
        _ => return Err(sqlx::Error::Decode(format!("sql/close_claimed.sql returns the outcome {word:?}").into())),
    })
}
