//! Orders that are being closed and that a payment provider's answers could not decide: lists them, and has them asked
//! about again. What a person has found out outside is recorded elsewhere (`payment_received`, an update of the order).
//!
//! Decides about no order.

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::OrderId;
use serde::Serialize;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

use crate::postgres::{Database, DatabaseError, Operator, one_line};

/// An order that waits for a person.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct UnresolvedOrder {
    /// The order, which is `closing`.
    pub order_id: String,
    /// The word in `close_attempts`.
    pub reason: String,
    /// RFC 3339.
    pub unresolved_at: String,
    /// Rounds without an answer.
    pub rounds: i32,
    /// What the providers answered in the last round.
    pub answers: Option<String>,
}

/// A page of the list, oldest first.
#[derive(Debug, Clone, Copy)]
pub struct UnresolvedPage<'a> {
    /// Only those after this order, as the previous page ended.
    pub after: Option<&'a str>,
    /// At most this many.
    pub limit: i64,
}

/// The orders that wait for a person.
///
/// # Errors
/// sqlx's.
pub async fn list(database: &Database, page: &UnresolvedPage<'_>) -> Result<Vec<UnresolvedOrder>, sqlx::Error> {
    let query = sqlx::query(
        "SELECT c.order_id, c.unresolved_reason, c.unresolved_at, c.rounds, c.last_answers
         FROM close_attempts c
         WHERE c.unresolved_at IS NOT NULL
           AND ($1::text IS NULL OR (c.unresolved_at, c.order_id) >
                (SELECT a.unresolved_at, a.order_id FROM close_attempts a WHERE a.kind = 'order' AND a.order_id = $1))
         ORDER BY c.unresolved_at, c.order_id
         LIMIT $2",
    )
    .bind(page.after)
    .bind(page.limit);
    let rows = database.run(async |connection| query.fetch_all(connection).await).await?;
    rows.iter().map(read).collect()
}

/// Orders that wait for a person for one reason.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct UnresolvedForReason {
    /// The word in `close_attempts`.
    pub reason: String,
    /// How many.
    pub orders: u64,
    /// Seconds since the oldest of them is unresolved.
    pub oldest_s: f64,
}

/// How many orders wait for a person, by reason.
///
/// # Errors
/// sqlx's.
pub async fn count_by_reason(database: &Database) -> Result<Vec<UnresolvedForReason>, sqlx::Error> {
    let query = sqlx::query(
        "SELECT unresolved_reason, count(*) AS orders,
                greatest(extract(epoch FROM clock_timestamp() - min(unresolved_at)), 0)::float8 AS oldest_s
         FROM close_attempts WHERE unresolved_at IS NOT NULL GROUP BY unresolved_reason ORDER BY unresolved_reason",
    );
    let rows = database.run(async |connection| query.fetch_all(connection).await).await?;
    let read = |row: &PgRow| {
        let orders: i64 = row.try_get("orders")?;
        Ok(UnresolvedForReason {
            reason: row.try_get("unresolved_reason")?,
            orders: orders.unsigned_abs(),
            oldest_s: row.try_get("oldest_s")?,
        })
    };
    rows.iter().map(read).collect()
}

/// Orders that are being closed and wait for the answers of one payment provider.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct WaitingAtProvider {
    /// Its name in the settings; empty for orders without an attempt to pay.
    pub provider: String,
    /// How many.
    pub orders: u64,
    /// Those among them about which it gave no answer when it was last asked, or could not be asked.
    pub without_answer: u64,
    /// Seconds since the oldest of those without an answer fell due; 0 if there is none.
    pub oldest_s: f64,
}

/// The orders that payment providers are asked about now, by provider. Unresolved ones are not among them.
///
/// # Errors
/// sqlx's.
pub async fn waiting(database: &Database) -> Result<Vec<WaitingAtProvider>, sqlx::Error> {
    let query = sqlx::query(
        "SELECT queue, count(*) AS orders, count(*) FILTER (WHERE step = 'no_answer') AS without_answer,
                coalesce(greatest(extract(epoch FROM clock_timestamp()
                    - min(claimed_at) FILTER (WHERE step = 'no_answer')), 0), 0)::float8 AS oldest_s
         FROM close_attempts WHERE unresolved_at IS NULL GROUP BY queue ORDER BY queue",
    );
    let rows = database.run(async |connection| query.fetch_all(connection).await).await?;
    let read = |row: &PgRow| {
        let count = |column| row.try_get(column).map(i64::unsigned_abs);
        let (orders, without_answer) = (count("orders")?, count("without_answer")?);
        Ok(WaitingAtProvider {
            provider: row.try_get("queue")?,
            orders,
            without_answer,
            oldest_s: row.try_get("oldest_s")?,
        })
    };
    rows.iter().map(read).collect()
}

/// How many orders wait for a person.
///
/// # Errors
/// sqlx's.
pub async fn count(database: &Database) -> Result<i64, sqlx::Error> {
    let query = sqlx::query_scalar("SELECT count(*) FROM close_attempts WHERE unresolved_at IS NOT NULL");
    database.run(async |connection| query.fetch_one(connection).await).await
}

fn read(row: &PgRow) -> Result<UnresolvedOrder, sqlx::Error> {
    let Timestamptz(since) = row.try_get("unresolved_at")?;
    Ok(UnresolvedOrder {
        order_id: row.try_get("order_id")?,
        reason: row.try_get("unresolved_reason")?,
        unresolved_at: write_rfc3339(since),
        rounds: row.try_get("rounds")?,
        answers: row.try_get("last_answers")?,
    })
}

/// Has these orders asked about again at once, as if they had just been claimed; `None` stands for all of one reason or
/// of every reason. Returns the orders that were unresolved.
///
/// # Errors
/// sqlx's.
pub async fn retry(database: &Database, which: &Which<'_>, operator: &Operator) -> Result<Vec<String>, sqlx::Error> {
    let (ids, reason) = match which {
        Which::Orders(ids) => (Some(ids.iter().map(OrderId::as_str).collect::<Vec<_>>()), None),
        Which::All { reason } => (None, *reason),
    };
    let query = sqlx::query_scalar(
        "UPDATE close_attempts c
         SET step = 'claimed', rounds = 0, has_waited = false, next_attempt_at = clock_timestamp(), lease = NULL,
             unresolved_reason = NULL, unresolved_at = NULL, who = $3, why = $4
         WHERE c.kind = 'order' AND c.unresolved_at IS NOT NULL
           AND ($1::text[] IS NULL OR c.order_id = ANY ($1)) AND ($2::text IS NULL OR c.unresolved_reason = $2)
         RETURNING c.order_id",
    )
    .bind(ids)
    .bind(reason)
    .bind(&operator.who)
    .bind(&operator.why);
    database.run(async |connection| query.fetch_all(connection).await).await
}

/// What a person does about an order that is unresolved for this reason. One sentence without its end.
#[must_use]
pub fn what_to_do(reason: &str) -> &'static str {
    match reason {
        "amount_differs" => {
            "compare what the provider has received with what the order costs; report it with payment_received, or give the money back there, and ask again"
        }
        "refunded" | "paid_after_close" => {
            "find out at the provider whether the customer still wants the order, then pay or close it yourself"
        }
        "recorded_paid" => {
            "find out why the shop has recorded a payment that the provider does not know, correct the record, and ask again"
        }
        "no_answer" => {
            "check that the provider answers and that its settings are right, then ask again: `order-timeout closing retry ID`"
        }
        "refused" => "remove the constraint or trigger that refuses the order's change, then ask again",
        "no_deadline" => "give the order a deadline again, or pay or close it yourself",
        _ => "look at the answers, and ask again: `order-timeout closing retry ID`",
    }
}

/// Which unresolved orders.
#[derive(Debug, Clone)]
pub enum Which<'a> {
    /// Those with these ids.
    Orders(&'a [OrderId]),
    /// All, or all of one reason.
    All {
        /// The word in `close_attempts`.
        reason: Option<&'a str>,
    },
}

/// The sentence for an operator about an error of these use cases. What failed has changed nothing.
#[must_use]
pub fn unavailable(error: &sqlx::Error) -> DatabaseError {
    DatabaseError(format!(
        "close_attempts cannot be read or changed: {}; fix the database and try again",
        one_line(error)
    ))
}

/// The order has ended in another way, in the same transaction.
pub(super) async fn forget(connection: &mut PgConnection, order_id: &str) -> Result<(), sqlx::Error> {
    sqlx::query("DELETE FROM close_attempts WHERE kind = 'order' AND order_id = $1")
        .bind(order_id)
        .execute(connection)
        .await
        .map(drop)
}
