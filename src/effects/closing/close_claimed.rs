//! The action CLOSE CLAIMED: closes orders of which every attempt is proved to be closed, by the statement that closes all
//! orders of their kind. One batch, one transaction.
//!
//! Never reports "closed" before the commit is answered.

use std::collections::BTreeMap;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::engine::{EndOutcome, Ending};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::ClosedBy;
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::types::Json;
use sqlx::{Connection, Row, SqlStr};

use super::ended_orders::{EndedOrder, EndedOrders};
use super::outcomes::{EndStatement, Outcomes};
use super::{AttemptColumns, answers_by_order};
use crate::postgres::{self, Database, ErrorClass, classify};

/// The statement before the close.
pub const HOLD_CLAIMED_SQL: &str = include_str!("../../../sql/hold_claimed.sql");
/// The statement behind it.
pub const END_CLAIMED_SQL: &str = include_str!("../../../sql/end_claimed.sql");

/// A kind whose orders are claimed, and the statement that closes them.
#[derive(Debug, Clone)]
pub struct ClaimedKind {
    /// Its name.
    pub kind: Kind,
    /// With the parameters of `sql/close.sql`.
    pub close: SqlStr,
}

/// Runs it on this database.
pub(super) struct CloseClaimed<'a>(pub &'a Database, pub &'a ClaimedKind, pub &'a EndedOrders);

impl EndStatement for CloseClaimed<'_> {
    type Item = Ending;

    fn ending(item: &Ending) -> &Ending {
        item
    }

    async fn run(&self, endings: &[Ending]) -> Result<Outcomes, sqlx::Error> {
        let close = async |waits| {
            let work = async |connection: &mut PgConnection| {
                let mut transaction = connection.begin().await?;
                let ended = close(&mut transaction, self.1, endings, waits).await?;
                transaction.commit().await?;
                Ok(ended)
            };
            self.0.run(work).await
        };
        let ended = match close(true).await {
            // The others must not wait again for an article that another session holds; its orders are reported as busy.
            Err(error) if classify(&error) == ErrorClass::Locked => close(false).await?,
            answer => answer?,
        };
        self.2.add(ended.iter().filter_map(|claimed| claimed.closed));
        Ok(ended.into_iter().map(|claimed| (claimed.order_id, claimed.outcome)).collect())
    }
}

/// What became of a claimed order.
pub(super) struct EndedClaim {
    order_id: String,
    pub outcome: EndOutcome,
    /// `None` if it was not closed.
    closed: Option<EndedOrder>,
}

/// Closes the orders whose claims the worker still has, in a transaction of the caller's, which commits.
pub(super) async fn close(
    transaction: &mut PgConnection,
    of: &ClaimedKind,
    endings: &[Ending],
    waits: bool,
) -> Result<Vec<EndedClaim>, sqlx::Error> {
    let mut ended = Vec::with_capacity(endings.len());
    for (claimed_by, ids) in hold(transaction, of, endings).await? {
        let close = sqlx::query(of.close.clone()).bind(&ids).bind(&claimed_by).bind(waits).bind(true);
        let rows = close.fetch_all(&mut *transaction).await?;
        let mut found: BTreeMap<String, EndedClaim> = BTreeMap::new();
        for row in &rows {
            let claim = read(transaction, row, &claimed_by).await?;
            found.insert(claim.order_id.clone(), claim);
        }
        // An order without a row is deleted.
        let deleted = |order_id: String| EndedClaim { order_id, outcome: EndOutcome::AlreadyClosed, closed: None };
        ended.extend(ids.into_iter().map(|id| found.remove(&id).unwrap_or_else(|| deleted(id))));
    }
    let is_over = |claim: &&EndedClaim| {
        matches!(claim.outcome, EndOutcome::Closed | EndOutcome::AlreadyPaid | EndOutcome::AlreadyClosed)
    };
    let id = |claim: &EndedClaim| claim.order_id.clone();
    sqlx::query(END_CLAIMED_SQL)
        .bind(of.kind.as_str())
        .bind(ended.iter().filter(is_over).map(id).collect::<Vec<_>>())
        .bind(ended.iter().filter(|claim| claim.closed.is_some()).map(id).collect::<Vec<_>>())
        .bind(Json(answers_by_order(endings)))
        .execute(transaction)
        .await?;
    Ok(ended)
}

/// The orders whose lease is still held, by the path that claimed them. Without any, one path without orders: so that the close
/// statement is run in any case, and its faults are found.
async fn hold(
    transaction: &mut PgConnection,
    of: &ClaimedKind,
    endings: &[Ending],
) -> Result<BTreeMap<String, Vec<String>>, sqlx::Error> {
    let closed = AttemptColumns::closed(endings);
    let rows: Vec<(String, String)> = sqlx::query_as(HOLD_CLAIMED_SQL)
        .bind(of.kind.as_str())
        .bind(endings.iter().map(|ending| ending.order_id.as_str()).collect::<Vec<_>>())
        .bind(endings.iter().map(|ending| ending.lease.0).collect::<Vec<_>>())
        .bind(closed.orders)
        .bind(closed.providers)
        .bind(closed.references)
        .fetch_all(transaction)
        .await?;
    let mut held: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (order_id, claimed_by) in rows {
        held.entry(claimed_by).or_default().push(order_id);
    }
    if held.is_empty() {
        held.insert(ClosedBy::Sweep.as_str().to_owned(), Vec::new());
    }
    Ok(held)
}

async fn read(connection: &mut PgConnection, row: &PgRow, claimed_by: &str) -> Result<EndedClaim, sqlx::Error> {
    let (order_id, word): (String, String) = (row.try_get("order_id")?, row.try_get("outcome")?);
    let deadline: Option<Timestamptz> = row.try_get("deadline")?;
    let deadline = deadline.map(|Timestamptz(moment)| moment);
    let outcome = match (word.as_str(), deadline) {
        ("closed", _) => EndOutcome::Closed,
        ("paid", _) => EndOutcome::AlreadyPaid,
        ("already_closed", _) => EndOutcome::AlreadyClosed,
        ("busy", _) => EndOutcome::Busy,
        // An attempt that was written after the order was taken over, and about which nothing was asked.
        ("claimed" | "closing", _) => EndOutcome::AttemptsChanged,
        ("not_due", None) => EndOutcome::NoDeadline,
        // A trigger has skipped the update.
        ("not_due", Some(deadline)) if deadline <= postgres::now(connection).await? => EndOutcome::Kept,
        ("not_due", Some(deadline)) => EndOutcome::NotDue(deadline),
        _ => return Err(sqlx::Error::Decode(format!("the close statement returns the outcome {word:?}").into())),
    };
    let closed_by = ClosedBy::from_word(claimed_by);
    let closed = (outcome == EndOutcome::Closed).then_some(EndedOrder { closed_by, deadline });
    Ok(EndedClaim { order_id, outcome, closed })
}
