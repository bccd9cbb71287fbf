//! Orders that are being closed and that a payment provider's answers could not decide: lists them, has them asked
//! about again, and ends one as an operator says, through the statements of a worker.
//!
//! Decides about no order.

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::engine::{AttemptKey, EndOutcome, Ending, Lease, PaidEnding, UnresolvedReason};
use order_timeout_core::kind::Kind;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::OrderId;
use serde::Serialize;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

use super::Page;
use crate::effects::closing::{ClaimedKind, EndByHand, end_by_hand};
use crate::postgres::selection::Selection;
use crate::postgres::{Database, DatabaseError, Operator, unusable};

/// An order that waits for a person.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct UnresolvedOrder {
    /// The order, which is being closed.
    pub order_id: String,
    /// Its kind.
    pub kind: String,
    /// The word in `close_attempts`.
    pub reason: String,
    /// RFC 3339.
    pub unresolved_at: String,
    /// Rounds without an answer.
    pub rounds: i32,
    /// What the providers answered in the last round.
    pub answers: Option<String>,
}

/// A page of the orders that wait for a person, the one that has waited longest first.
///
/// # Errors
/// [`DatabaseError`].
pub async fn list(
    database: &Database,
    after: Option<&OrderId>,
    limit: i64,
) -> Result<Page<UnresolvedOrder>, DatabaseError> {
    let query = sqlx::query(
        "SELECT c.order_id, c.kind, c.unresolved_reason, c.unresolved_at, c.rounds, c.last_answers
         FROM close_attempts c
         WHERE c.unresolved_at IS NOT NULL
           AND ($1::text IS NULL OR (c.unresolved_at, c.order_id) >
                (SELECT a.unresolved_at, a.order_id FROM close_attempts a
                 WHERE a.order_id = $1 ORDER BY a.unresolved_at DESC NULLS LAST LIMIT 1))
         ORDER BY c.unresolved_at, c.order_id
         LIMIT $2",
    )
    .bind(after.map(OrderId::as_str))
    .bind(limit);
    let rows = database.run(async |connection| query.fetch_all(connection).await).await;
    let orders = rows.and_then(|rows| rows.iter().map(read).collect()).map_err(|error| unavailable(&error))?;
    Ok(Page::of(orders, limit, |last: &UnresolvedOrder| last.order_id.clone()))
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

/// Lists the orders that wait for a provider which no live worker has, and takes that back when one has it again. Returns why
/// orders wait, if some do.
///
/// # Errors
/// sqlx's.
pub async fn without_provider(database: &Database) -> Result<Option<String>, sqlx::Error> {
    let query = sqlx::query_as::<_, (String, i64)>(include_str!("../../sql/orders_without_provider.sql"));
    let waiting = database.run(async |connection| query.fetch_all(connection).await).await?;
    let sentences = waiting.iter().map(|(provider, orders)| {
        format!(
            "{orders} orders wait, with their stock reserved, because no live worker has their payment provider {provider}; \
             add it to kinds.order.providers, with a table [providers.{provider}], in the settings of all workers"
        )
    });
    Ok((!waiting.is_empty()).then(|| sentences.collect::<Vec<_>>().join("; ")))
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
        kind: row.try_get("kind")?,
        reason: row.try_get("unresolved_reason")?,
        unresolved_at: write_rfc3339(since),
        rounds: row.try_get("rounds")?,
        answers: row.try_get("last_answers")?,
    })
}

/// Has these orders, of whatever kind, asked about again at once, as if they had just been claimed. Returns those that were unresolved.
///
/// # Errors
/// [`DatabaseError`].
pub async fn retry(
    database: &Database,
    which: &Selection<OrderId>,
    operator: &Operator,
) -> Result<Vec<String>, DatabaseError> {
    let ids = which.ids().map(|ids| ids.iter().map(OrderId::as_str).collect::<Vec<_>>());
    let query = sqlx::query_scalar(
        "UPDATE close_attempts c
         SET step = 'claimed', rounds = 0, has_waited = false, next_attempt_at = clock_timestamp(), lease = NULL,
             unresolved_reason = NULL, unresolved_at = NULL, who = $3, why = $4
         WHERE c.unresolved_at IS NOT NULL
           AND ($1::text[] IS NULL OR c.order_id = ANY ($1)) AND ($2::text IS NULL OR c.unresolved_reason = $2)
         RETURNING c.order_id",
    )
    .bind(ids)
    .bind(which.reason())
    .bind(&operator.who)
    .bind(&operator.why);
    let retried = database.run(async |connection| query.fetch_all(connection).await).await;
    retried.map_err(|error| unavailable(&error))
}

/// How far the close of an order is that is claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClosingProgress {
    /// One sentence without its end.
    pub why: String,
    /// Whether workers go on with it.
    pub goes_on: bool,
}

/// How far the close of this order is.
///
/// # Errors
/// [`DatabaseError`].
pub async fn progress(database: &Database, kind: &Kind, order_id: &OrderId) -> Result<ClosingProgress, DatabaseError> {
    let query = sqlx::query_as::<_, (String, Option<String>)>(
        "SELECT queue, unresolved_reason FROM close_attempts WHERE kind = $1 AND order_id = $2",
    );
    let query = query.bind(kind.as_str()).bind(order_id.as_str());
    let found = database.run(async |connection| query.fetch_optional(connection).await).await;
    Ok(match found.map_err(|error| unavailable(&error))? {
        None => ClosingProgress {
            why: "no worker has claimed it: the shop decides whether it was paid".to_owned(),
            goes_on: false,
        },
        Some((_, Some(reason))) => {
            ClosingProgress { why: format!("it is unresolved ({reason}): {}", what_to_do(&reason)), goes_on: false }
        }
        Some((provider, None)) => ClosingProgress {
            why: format!("{provider} is asked whether it was paid, and a worker closes it if it was not"),
            goes_on: true,
        },
    })
}

/// What an operator has found out about an unresolved order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision<'a> {
    /// None of its attempts was paid, and none can be paid any more.
    Closed,
    /// The attempt with this reference was paid; `None`: the only one that may have been.
    Paid {
        /// What its provider knows it by.
        reference: Option<&'a str>,
    },
}

/// Why an order was not ended. It is as it was.
#[derive(Debug, thiserror::Error)]
pub enum DecisionError {
    /// Nothing is to be decided.
    #[error("order {0} is not unresolved; `order-timeout explain {0}` says what it is")]
    NotUnresolved(OrderId),
    /// It is not known what was paid.
    #[error(
        "order {order_id} has {} that may have paid it ({}); name the one that did by its reference, or report the payment with payment_received",
        match found.len() { 0 => "no attempt".to_owned(), count => format!("{count} attempts") },
        found.join(", ")
    )]
    NoSuchAttempt {
        /// The order.
        order_id: OrderId,
        /// References of its attempts.
        found: Vec<String>,
    },
    /// The provider has received another amount than the attempt was to pay.
    #[error(
        "the provider has received another amount for order {0} than its attempt was to pay; report what it has received with payment_received, which pays the order if that is enough"
    )]
    AmountDiffers(OrderId),
    /// The statement did not change it.
    #[error("order {order_id} is as it was, because the statement finds {}; `order-timeout explain {order_id}` says more", outcome.as_str())]
    Unchanged {
        /// The order.
        order_id: OrderId,
        /// What the statement found.
        outcome: EndOutcome,
    },
    /// The database failed.
    #[error("{}", unavailable(.0))]
    Database(#[from] sqlx::Error),
}

/// Ends an unresolved order as closed or as paid, in one transaction, with the operator in its history.
///
/// # Errors
/// [`DecisionError`]; nothing has changed then.
pub async fn decide(
    database: &Database,
    of: &ClaimedKind,
    order_id: &OrderId,
    decision: Decision<'_>,
    operator: &Operator,
) -> Result<(), DecisionError> {
    let work = async |connection: &mut PgConnection| {
        let mut transaction = sqlx::Connection::begin(connection).await?;
        match decide_in(&mut transaction, of, order_id, decision, operator).await {
            Ok(()) => transaction.commit().await.map(Ok),
            Err(DecisionError::Database(error)) => Err(error),
            Err(why) => transaction.rollback().await.map(|()| Err(why)),
        }
    };
    database.run(work).await?
}

async fn decide_in(
    connection: &mut PgConnection,
    of: &ClaimedKind,
    order_id: &OrderId,
    decision: Decision<'_>,
    operator: &Operator,
) -> Result<(), DecisionError> {
    // For the event, which is all that a mapped table's order has.
    operator.name_in_transaction(connection).await?;
    // The order's row first, as every payment does.
    let state: Option<String> = sqlx::query_scalar("SELECT state FROM lock_free_order($1, $2)")
        .bind(of.kind.as_str())
        .bind(order_id.as_str())
        .fetch_one(&mut *connection)
        .await?;
    if state.as_deref() == Some("busy") {
        return Err(DecisionError::Unchanged { order_id: order_id.clone(), outcome: EndOutcome::Busy });
    }
    let take = "UPDATE close_attempts c
                SET step = 'claimed', unresolved_reason = NULL, unresolved_at = NULL, claimed_by = 'manual', who = $2, why = $3,
                    lease = hashtextextended(gen_random_uuid()::text, 0)
                FROM (SELECT u.order_id, u.unresolved_reason FROM close_attempts u
                      WHERE u.kind = $4 AND u.order_id = $1 AND u.unresolved_at IS NOT NULL FOR NO KEY UPDATE) AS before
                WHERE c.kind = $4 AND c.order_id = before.order_id
                RETURNING c.lease, before.unresolved_reason";
    let taken: Option<(i64, String)> = sqlx::query_as(take)
        .bind(order_id.as_str())
        .bind(&operator.who)
        .bind(&operator.why)
        .bind(of.kind.as_str())
        .fetch_optional(&mut *connection)
        .await?;
    let (lease, reason) = taken.ok_or_else(|| DecisionError::NotUnresolved(order_id.clone()))?;
    let attempts: Vec<(String, String)> = sqlx::query_as(
        "SELECT provider, reference FROM payment_attempts
         WHERE order_id = $1 AND kind = $2 AND state IN ('open', 'paid') ORDER BY created_at, provider, reference",
    )
    .bind(order_id.as_str())
    .bind(of.kind.as_str())
    .fetch_all(&mut *connection)
    .await?;
    let attempts: Vec<AttemptKey> =
        attempts.into_iter().map(|(provider, reference)| AttemptKey { provider, reference }).collect();
    let Operator { who, why, .. } = operator;
    let answers = format!("decided by {who}: {}", why.as_deref().unwrap_or("no reason given"));
    let ending = Ending { order_id: order_id.clone(), lease: Lease(lease), closed: Vec::new(), answers };
    let (end, wanted) = match decision {
        Decision::Closed => (EndByHand::Close(Ending { closed: attempts, ..ending }), EndOutcome::Closed),
        Decision::Paid { .. } if reason == UnresolvedReason::AmountDiffers.as_str() => {
            return Err(DecisionError::AmountDiffers(order_id.clone()));
        }
        Decision::Paid { reference } => {
            let is_named = |attempt: &&AttemptKey| reference.is_none_or(|reference| attempt.reference == reference);
            let [paid] = &attempts.iter().filter(is_named).collect::<Vec<_>>()[..] else {
                let found = attempts.into_iter().map(|attempt| attempt.reference).collect();
                return Err(DecisionError::NoSuchAttempt { order_id: order_id.clone(), found });
            };
            let paid = vec![(*paid).clone()];
            let paid = PaidEnding { ending, paid, differing: Vec::new(), refunded: Vec::new() };
            (EndByHand::SettlePaid(paid), EndOutcome::Settled)
        }
    };
    let outcome = end_by_hand(connection, of, &end).await?;
    if outcome == wanted { Ok(()) } else { Err(DecisionError::Unchanged { order_id: order_id.clone(), outcome }) }
}

/// What a person does about an order that is unresolved for this reason. One sentence without its end.
#[must_use]
pub fn what_to_do(reason: &str) -> &'static str {
    match reason {
        "amount_differs" => {
            "compare what the provider has received with what the order costs; report it with payment_received, or give the money back there and close it: `order-timeout closing settle ID --as closed`"
        }
        "refunded" | "paid_after_close" => {
            "find out at the provider whether the customer still wants the order, then decide: `order-timeout closing settle ID --as closed` or `--as paid`"
        }
        "recorded_paid" => {
            "find out why the shop has recorded a payment that the provider does not know, correct the record, and ask again"
        }
        "no_answer" => {
            "check that the provider answers and that its settings are right, then ask again: `order-timeout closing retry ID`; or look there yourself, and decide: `order-timeout closing settle ID --as closed` or `--as paid`"
        }
        "no_provider" => {
            "add the provider of its attempt to kinds.order.providers, with a table in providers, in the settings of all workers; it is asked then by itself"
        }
        "refused" => "remove the constraint or trigger that refuses the order's change, then ask again",
        "no_deadline" => "give the order a deadline again, and ask again",
        _ => "look at the answers, and ask again: `order-timeout closing retry ID`",
    }
}

fn unavailable(error: &sqlx::Error) -> DatabaseError {
    unusable("close_attempts", error)
}

/// The order has ended in another way, in the same transaction.
pub(super) async fn forget(connection: &mut PgConnection, kind: &str, order_id: &str) -> Result<(), sqlx::Error> {
    sqlx::query("DELETE FROM close_attempts WHERE kind = $1 AND order_id = $2")
        .bind(kind)
        .bind(order_id)
        .execute(connection)
        .await
        .map(drop)
}
