//! The action CLOSE CLAIMED: closes orders of which every attempt is proved to be closed, by the statement that closes all
//! orders of their kind. One batch, one transaction.
//!
//! Never reports "closed" before the commit is answered.

use std::collections::BTreeMap;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::engine::{EndOutcome, Ending};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::{ClosedBy, Timestamp};
use sqlx::postgres::{PgConnection, PgRow};
use sqlx::types::Json;
use sqlx::{AssertSqlSafe, Connection, Row};

use super::ended_orders::{EndedOrder, EndedOrders};
use super::outcomes::{EndStatement, Outcomes};
use super::{AttemptColumns, answers_by_order};
use crate::postgres::{self, Database, ErrorClass, classify};

/// The statement before the close.
pub const HOLD_CLAIMED_SQL: &str = include_str!("../../../sql/hold_claimed.sql");

/// A kind whose orders are claimed, and the statement that closes them.
#[derive(Debug, Clone)]
pub struct ClaimedKind {
    /// Its name.
    pub kind: Kind,
    /// With the parameters of a close statement (docs/OWN-SQL.md).
    pub close: String,
}

/// Runs it on this database.
pub(super) struct CloseClaimed<'a>(pub &'a Database, pub &'a ClaimedKind, pub &'a EndedOrders);

impl EndStatement for CloseClaimed<'_> {
    type Item = Ending;

    fn ending(item: &Ending) -> &Ending {
        item
    }

    /// One transaction for each path that has claimed some of them: of two close statements in one, the second could wait for
    /// stock while the first has locked some.
    async fn run(&self, endings: &[Ending]) -> Result<Outcomes, sqlx::Error> {
        let (mut outcomes, mut left) = (Outcomes::new(), endings.to_vec());
        loop {
            let (ended, others) = self.close_in_transaction(&left).await?;
            self.2.add(ended.iter().filter_map(|claimed| claimed.closed));
            outcomes.extend(ended.into_iter().map(|claimed| (claimed.order_id, claimed.outcome)));
            left.retain(|ending| others.iter().any(|id| id == ending.order_id.as_str()));
            if left.is_empty() {
                return Ok(outcomes);
            }
        }
    }
}

impl CloseClaimed<'_> {
    async fn close_in_transaction(&self, endings: &[Ending]) -> Result<(Vec<EndedClaim>, Vec<String>), sqlx::Error> {
        let close = async |waits| {
            let work = async |connection: &mut PgConnection| {
                let mut transaction = connection.begin().await?;
                let ended = close(&mut transaction, self.1, endings, waits).await?;
                transaction.commit().await?;
                Ok(ended)
            };
            self.0.run(work).await
        };
        match close(true).await {
            // The others must not wait again for an article that another session holds; its orders are reported as busy.
            Err(error) if classify(&error) == ErrorClass::Locked => close(false).await,
            answer => answer,
        }
    }
}

/// What became of a claimed order.
pub(super) struct EndedClaim {
    order_id: String,
    pub outcome: EndOutcome,
    /// `None` if it was not closed.
    closed: Option<EndedOrder>,
}

/// Closes orders whose claims the worker still has and that were claimed on one path, in a transaction of the caller's, which
/// commits. Returns also those that were claimed on others.
pub(super) async fn close(
    transaction: &mut PgConnection,
    of: &ClaimedKind,
    endings: &[Ending],
    waits: bool,
) -> Result<(Vec<EndedClaim>, Vec<String>), sqlx::Error> {
    let Held { claimed_by, ids, others } = hold(transaction, of, endings).await?;
    // Rendered from the operator's configuration, or from ours.
    let close = sqlx::query(AssertSqlSafe(of.close.clone())).bind(&ids).bind(&claimed_by).bind(waits).bind(true);
    let rows = close.fetch_all(&mut *transaction).await?;
    // Behind the close: what was due by then and is still there was kept by a trigger.
    let now = postgres::now(transaction).await?;
    let mut found: BTreeMap<String, EndedClaim> = BTreeMap::new();
    for row in &rows {
        let claim = read(row, &claimed_by, now)?;
        found.insert(claim.order_id.clone(), claim);
    }
    // An order without a row is deleted.
    let deleted = |order_id: String| EndedClaim { order_id, outcome: EndOutcome::AlreadyClosed, closed: None };
    let ended: Vec<_> = ids.into_iter().map(|id| found.remove(&id).unwrap_or_else(|| deleted(id))).collect();
    end_claims(transaction, of, endings, &ended).await?;
    Ok((ended, others))
}

async fn end_claims(
    transaction: &mut PgConnection,
    of: &ClaimedKind,
    endings: &[Ending],
    ended: &[EndedClaim],
) -> Result<(), sqlx::Error> {
    let is_over = |claim: &&EndedClaim| {
        matches!(claim.outcome, EndOutcome::Closed | EndOutcome::AlreadyPaid | EndOutcome::AlreadyClosed)
    };
    let id = |claim: &EndedClaim| claim.order_id.clone();
    sqlx::query("SELECT end_claims($1, $2, $3, $4)")
        .bind(of.kind.as_str())
        .bind(ended.iter().filter(is_over).map(id).collect::<Vec<_>>())
        .bind(ended.iter().filter(|claim| claim.closed.is_some()).map(id).collect::<Vec<_>>())
        .bind(Json(answers_by_order(endings)))
        .execute(transaction)
        .await
        .map(drop)
}

/// The orders whose lease is still held: those that one path has claimed, and the others.
struct Held {
    claimed_by: String,
    ids: Vec<String>,
    others: Vec<String>,
}

/// Without any, a path without orders: so that the close statement is run in any case, and its faults are found.
async fn hold(transaction: &mut PgConnection, of: &ClaimedKind, endings: &[Ending]) -> Result<Held, sqlx::Error> {
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
    let claimed_by = rows.first().map_or(ClosedBy::Sweep.as_str(), |(_, path)| path).to_owned();
    let (of_path, of_others): (Vec<_>, Vec<_>) = rows.into_iter().partition(|(_, path)| *path == claimed_by);
    let ids = |rows: Vec<(String, String)>| rows.into_iter().map(|(id, _)| id).collect();
    Ok(Held { claimed_by, ids: ids(of_path), others: ids(of_others) })
}

fn read(row: &PgRow, claimed_by: &str, now: Timestamp) -> Result<EndedClaim, sqlx::Error> {
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
        ("not_due", Some(deadline)) if deadline <= now => EndOutcome::Kept,
        ("not_due", Some(deadline)) => EndOutcome::NotDue(deadline),
        _ => return Err(sqlx::Error::Decode(format!("the close statement returns the outcome {word:?}").into())),
    };
    let closed_by = ClosedBy::from_word(claimed_by);
    let closed = (outcome == EndOutcome::Closed).then_some(EndedOrder { closed_by, deadline });
    Ok(EndedClaim { order_id, outcome, closed })
}
