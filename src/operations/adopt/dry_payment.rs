//! Pays up to ten overdue orders in a transaction that is rolled back: each gets an attempt that may bring money, is claimed
//! by the close, and is paid as a callback would pay it. In another, they are closed and reopened.
//!
//! Uses the statements and functions in effect. Holds its locks for the time of one batch; asks no provider.

use order_timeout_core::kind::Kind;
use sqlx::{Connection, PgConnection, Row, SqlStr};

use super::dry_close::{FAR, StockChange, TRIED, close_tried, compare, ids_due_by, needed_stock, overdue_ids};
use crate::config::kinds::{StockSettings, TableSettings};
use crate::mapping::Facts;
use crate::operations::late_payments::{all, take_and_pay};
use crate::postgres::{ErrorClass, classify, one_line};

/// The provider of the attempts, which no settings need to have: it is not asked.
const PROVIDER: &str = "adopt";

/// Orders whose attempts are read.
const READ: i64 = 1_000;

/// What the payments have shown.
#[derive(Debug, Default)]
pub struct DryPayment {
    /// How many orders were tried.
    pub tried: usize,
    /// How many of them the close claimed.
    pub claimed: usize,
    /// What it said of others; an error's sentence where it failed.
    pub unclaimed: Vec<(String, Result<String, String>)>,
    /// Claimed orders that the overdue statement found again.
    pub found_again: Vec<String>,
    /// How many were paid.
    pub paid: usize,
    /// What a payment of others was answered; an error's sentence where it failed.
    pub unpaid: Vec<(String, Result<String, String>)>,
    /// For each `consume`, by the place of its stock: rows that the paid orders need, and how many of them changed.
    pub stock: Vec<(usize, StockChange)>,
}

/// What reopening closed orders has shown.
#[derive(Debug, Default)]
pub struct DryReopening {
    /// How many orders were tried, and closed.
    pub tried: usize,
    pub closed: usize,
    /// How many of them were reopened.
    pub reopened: usize,
    /// Why others were not.
    pub refused: Vec<(String, String)>,
    /// For each `take`, by the place of its stock: rows that the orders need, and how many of them their items name after the
    /// close. Whether they change is not asked: what is taken may be consumed at once.
    pub stock: Vec<(usize, StockChange)>,
}

/// Takes the attempts of the next orders over, due or not: reading them needs rights, and each must say what a provider is asked.
///
/// # Errors
/// sqlx's.
pub async fn read_attempts(connection: &mut PgConnection, overdue: &SqlStr, kind: &Kind) -> Result<(), sqlx::Error> {
    let mut transaction = connection.begin().await?;
    wait_briefly(&mut transaction).await?;
    let ids = ids_due_by(&mut transaction, overdue, READ, FAR).await?;
    let read = sqlx::query("SELECT take_over_attempts($1, $2)").bind(ids).bind(kind.as_str());
    match read.execute(&mut *transaction).await {
        Err(error) if !is_held(&error) => Err(error),
        _ => transaction.rollback().await,
    }
}

/// Runs it.
///
/// # Errors
/// sqlx's, if the overdue statement fails, the attempts cannot be written, or the database does not answer.
pub async fn run(
    connection: &mut PgConnection,
    close: (&SqlStr, usize),
    overdue: &SqlStr,
    (kind, table, facts): (&Kind, &TableSettings, &Facts),
) -> Result<DryPayment, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    wait_briefly(&mut transaction).await?;
    let tried = overdue_ids(&mut transaction, overdue, TRIED).await?;
    let mut dry = DryPayment { tried: tried.len(), ..DryPayment::default() };
    begin_attempts(&mut transaction, kind, &tried).await?;
    let mut claimed = Vec::new();
    for (id, outcome) in close_tried(&mut transaction, close, &tried).await {
        match outcome {
            Ok(word) if word == "claimed" => claimed.push(id),
            Err(error) if is_held(&error) => {}
            outcome => dry.unclaimed.push((id, outcome.map_err(|error| one_line(&error)))),
        }
    }
    dry.claimed = claimed.len();
    let found = overdue_ids(&mut transaction, overdue, TRIED * 2).await?;
    dry.found_again = found.into_iter().filter(|id| claimed.contains(id)).collect();
    let before = needed_stock(&mut transaction, table, facts, |stock| !stock.consume.is_empty(), &claimed).await?;
    for id in claimed {
        match pay(&mut transaction, kind, &id).await? {
            Ok(outcome) if outcome == "paid" => dry.paid += 1,
            Err(error) if is_held(&error) => {}
            answer => dry.unpaid.push((id, answer.map_err(|error| one_line(&error)))),
        }
    }
    dry.stock = compare(&mut transaction, before).await?;
    transaction.rollback().await?;
    Ok(dry)
}

/// Reopens orders that were closed in the same transaction, as late money does.
///
/// # Errors
/// sqlx's, if the overdue statement fails or the database does not answer.
pub async fn reopen(
    connection: &mut PgConnection,
    close: (&SqlStr, usize),
    overdue: &SqlStr,
    (kind, table, facts): (&Kind, &TableSettings, &Facts),
) -> Result<DryReopening, sqlx::Error> {
    let (mut transaction, mut dry) = (connection.begin().await?, DryReopening::default());
    wait_briefly(&mut transaction).await?;
    let tried = overdue_ids(&mut transaction, overdue, TRIED).await?;
    let takes = |stock: &StockSettings| !stock.take.is_empty();
    let needed = needed_stock(&mut transaction, table, facts, takes, &tried).await?;
    let closed: Vec<String> = close_tried(&mut transaction, close, &tried)
        .await
        .into_iter()
        .filter(|(_, said)| said.as_deref().is_ok_and(|word| word == "closed"))
        .map(|(id, _)| id)
        .collect();
    (dry.tried, dry.closed) = (tried.len(), closed.len());
    // Again, because a close may take items away, and with them what says what is taken.
    let found = needed_stock(&mut transaction, table, facts, takes, &tried).await?;
    for id in closed {
        match reopen_one(&mut transaction, kind, &id).await? {
            Ok(None) => dry.reopened += 1,
            Ok(Some(why)) => dry.refused.push((id, why)),
            Err(error) if is_held(&error) => {}
            Err(error) => dry.refused.push((id, one_line(&error))),
        }
    }
    dry.stock = compare(&mut transaction, found).await?;
    for ((_, change), needed) in dry.stock.iter_mut().zip(&needed) {
        (change.needed, change.changed) = (needed.len(), change.needed);
    }
    transaction.rollback().await?;
    Ok(dry)
}

/// Why the order cannot be reopened, or the error with which it fails; then the transaction is as before.
async fn reopen_one(
    connection: &mut PgConnection,
    kind: &Kind,
    id: &str,
) -> Result<Result<Option<String>, sqlx::Error>, sqlx::Error> {
    let mut savepoint = connection.begin().await?;
    match take_and_pay(&mut savepoint, kind.as_str(), id).await {
        Ok(lacks) => {
            savepoint.commit().await?;
            Ok(Ok((!lacks.is_empty()).then(|| all(&lacks))))
        }
        Err(error) => savepoint.rollback().await.map(|()| Err(error)),
    }
}

/// Payments of several orders lock stock out of order. This session gives up before Postgres ends one of two sessions that wait
/// for each other, which could be a customer's.
async fn wait_briefly(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::raw_sql("SET LOCAL lock_timeout = '100ms'").execute(connection).await.map(drop)
}

async fn begin_attempts(connection: &mut PgConnection, kind: &Kind, ids: &[String]) -> Result<(), sqlx::Error> {
    // As if the shop had seen it paid: an open one that is not in the shop's own table of attempts would be taken back.
    let begin = sqlx::query(
        "INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency, kind, state)
         SELECT $1, 'adopt-check-' || md5(t.order_id), t.order_id, 0, 'XXX', $2, 'paid' FROM unnest($3::text[]) AS t (order_id)",
    );
    begin.bind(PROVIDER).bind(kind.as_str()).bind(ids).execute(connection).await.map(drop)
}

/// Whether another session holds what this one waited for: that says nothing of the mapping.
fn is_held(error: &sqlx::Error) -> bool {
    classify(error) == ErrorClass::Locked
}

/// Pays what the order costs. Returns the outcome, or why there is none; then the transaction is as before.
async fn pay(connection: &mut PgConnection, kind: &Kind, id: &str) -> Result<Result<String, sqlx::Error>, sqlx::Error> {
    let mut savepoint = connection.begin().await?;
    let paid = sqlx::query(
        "SELECT concat_ws(': ', r.outcome, r.reason) AS outcome
         FROM locked_order($1, $2, true) l,
              payment_received($2, $3, 'adopt-check-' || md5($2), coalesce(l.amount_minor, 1), coalesce(l.currency, 'XXX'), $1) r",
    );
    let paid = paid.bind(kind.as_str()).bind(id).bind(PROVIDER).fetch_one(&mut *savepoint).await;
    match paid.and_then(|row| row.try_get("outcome")) {
        Ok(outcome) => savepoint.commit().await.map(|()| Ok(outcome)),
        Err(error) => savepoint.rollback().await.map(|()| Err(error)),
    }
}
