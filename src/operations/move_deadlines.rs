//! Gives open orders other deadlines, and records who asked for it and why.
//!
//! One call of the function `move_deadlines` for each batch is one transaction: row, alarm and history. Decides nothing about an
//! order's close.

use std::num::NonZeroU32;
use std::time::Duration;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::kind::Kind;
use order_timeout_core::order::{OrderId, Timestamp};
use serde::Serialize;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::paced::{BatchError, BatchOutcomes, Progress, in_batches};
use crate::postgres::{Database, ErrorClass, Operator, classify, one_line};

/// Its parameters and columns are explained in `sql/functions/move_deadline.sql`.
const MOVE_SQL: &str = "SELECT * FROM move_deadlines($8, $1, $2, $3, $4, $5, $6, $7)";

/// Another deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewDeadline {
    /// The same for all orders.
    At(Timestamp),
    /// This much after each order's present deadline.
    Later(Duration),
    /// This much before each order's present deadline.
    Earlier(Duration),
}

impl NewDeadline {
    /// The deadline of an order that has this one; `None` if it depends on one that the order does not have.
    #[must_use]
    pub fn of(self, present: Option<Timestamp>) -> Option<Timestamp> {
        match self {
            Self::At(deadline) => Some(deadline),
            Self::Later(duration) => present.map(|present| present + duration),
            Self::Earlier(duration) => present.map(|present| present - duration),
        }
    }

    /// The parameters `deadline` and `shift` of the function.
    fn parameters(self) -> (Option<Timestamptz>, Option<f64>) {
        match self {
            Self::At(deadline) => (Some(Timestamptz(deadline)), None),
            Self::Later(duration) => (None, Some(duration.as_secs_f64())),
            Self::Earlier(duration) => (None, Some(-duration.as_secs_f64())),
        }
    }
}

/// A request to move deadlines.
#[derive(Debug, Clone)]
pub struct Move {
    /// Whose deadlines.
    pub kind: Kind,
    /// The new deadline of each order.
    pub to: NewDeadline,
    /// `delay.max_delay`: no deadline may be further ahead.
    pub furthest: Duration,
    /// Who asks for it, and why.
    pub operator: Operator,
}

/// What became of an order's deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MoveOutcome {
    /// It is later now; the alarm that exists suffices.
    Later,
    /// It is earlier now; a new alarm is in `alarm_outbox`.
    Earlier,
    /// It was the requested one already.
    Same,
    /// The requested one has passed.
    Passed,
    /// The requested one is too far ahead, or further than `extend_max` allows.
    TooFar,
    /// The order has no deadline to which something could be added.
    NoDeadline,
    /// The order is no longer unpaid.
    NotUnpaid,
    /// A trigger keeps it.
    Kept,
    /// There is no such order.
    Unknown,
}

impl MoveOutcome {
    /// The word in the function's column `outcome`; that column never has `unknown`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Later => "later",
            Self::Earlier => "earlier",
            Self::Same => "same",
            Self::Passed => "passed",
            Self::TooFar => "too_far",
            Self::NoDeadline => "no_deadline",
            Self::NotUnpaid => "not_unpaid",
            Self::Kept => "kept",
            Self::Unknown => "unknown",
        }
    }

    fn from_word(word: &str) -> Option<Self> {
        use MoveOutcome as O;
        let all = [O::Later, O::Earlier, O::Same, O::Passed, O::TooFar, O::NoDeadline, O::NotUnpaid, O::Kept];
        all.into_iter().find(|outcome| outcome.as_str() == word)
    }
}

/// An order after the attempt to move its deadline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MovedOrder {
    /// As the row has it.
    pub order_id: OrderId,
    /// What was done.
    pub outcome: MoveOutcome,
    /// The status in the row, as the schema names it.
    pub status: String,
    /// The deadline before.
    pub before: Option<Timestamp>,
    /// The requested one; `None` if the order is not unpaid or has no deadline.
    pub wanted: Option<Timestamp>,
    /// The deadline in the row now, if it was moved.
    pub moved_to: Option<Timestamp>,
    /// The latest that `extend_max` of the kind allows, if there is one.
    pub latest: Option<Timestamp>,
}

/// Moves the deadlines of these orders, all or none; an order without an entry does not exist. Waits for sessions that
/// hold an order's row.
///
/// # Errors
/// sqlx's.
pub async fn move_deadlines(
    database: &Database,
    ids: &[OrderId],
    request: &Move,
) -> Result<Vec<MovedOrder>, sqlx::Error> {
    let (deadline, shift) = request.to.parameters();
    let ids: Vec<&str> = ids.iter().map(OrderId::as_str).collect();
    let update = sqlx::query(MOVE_SQL)
        .bind(ids)
        .bind(deadline)
        .bind(shift)
        .bind(request.furthest.as_secs_f64())
        .bind(&request.operator.who)
        .bind(&request.operator.why)
        .bind(request.operator.run)
        .bind(request.kind.as_str());
    let rows = database.run(async |connection: &mut PgConnection| update.fetch_all(connection).await).await?;
    rows.iter().map(read_moved).collect()
}

/// Whether this run has moved a deadline.
///
/// # Errors
/// sqlx's.
pub async fn has_moved(database: &Database, run: Uuid) -> Result<bool, sqlx::Error> {
    let ask = sqlx::query_scalar(
        "SELECT EXISTS (SELECT FROM order_events WHERE run = $1 AND event = 'extended')
             OR EXISTS (SELECT FROM operator_actions WHERE run = $1 AND action = 'deadline_moved')",
    );
    let ask = ask.bind(run);
    database.run(async |connection| ask.fetch_one(connection).await).await
}

/// Moves the deadlines of many orders in batches, at most `rate` orders a second. `each` is told the progress.
pub async fn move_many(
    database: &Database,
    ids: &[OrderId],
    request: &Move,
    rate: NonZeroU32,
    stop: &CancellationToken,
    each: impl FnMut(&Progress),
) -> Progress {
    // The statement waits for locks as long as database.lock_timeout says, in the last round as in the first.
    in_batches(ids, rate, stop, async |batch| move_batch(database, batch, request).await, each).await
}

async fn move_batch(database: &Database, batch: &[OrderId], request: &Move) -> BatchOutcomes {
    match move_deadlines(database, batch, request).await {
        Ok(moved) => {
            let outcome = |id: &OrderId| moved.iter().find(|order| order.order_id == *id).map(|order| order.outcome);
            Ok(batch.iter().map(|id| outcome(id).unwrap_or(MoveOutcome::Unknown).as_str()).collect())
        }
        Err(error) => Err(scope(database, request, &error).await),
    }
}

/// What an error affects.
async fn scope(database: &Database, request: &Move, error: &sqlx::Error) -> BatchError {
    let why = one_line(error);
    match classify(error) {
        ErrorClass::Locked | ErrorClass::Transient => BatchError::Busy(why),
        ErrorClass::Data => BatchError::Failed(why),
        // Without an order, no row's trigger can be the cause.
        ErrorClass::Broken if move_deadlines(database, &[], request).await.is_ok() => BatchError::Failed(why),
        ErrorClass::Broken | ErrorClass::Away => BatchError::Unavailable(why),
    }
}

fn read_moved(row: &PgRow) -> Result<MovedOrder, sqlx::Error> {
    let time = |column| {
        let time: Option<Timestamptz> = row.try_get(column)?;
        Ok::<_, sqlx::Error>(time.map(|Timestamptz(time)| time))
    };
    let (id, word): (String, String) = (row.try_get("order_id")?, row.try_get("outcome")?);
    let outcome = MoveOutcome::from_word(&word)
        .ok_or_else(|| sqlx::Error::Decode(format!("move_deadlines has no outcome {word:?}").into()))?;
    Ok(MovedOrder {
        order_id: OrderId::new(id).map_err(|fault| sqlx::Error::Decode(Box::new(fault)))?,
        outcome,
        status: row.try_get("status")?,
        before: time("before")?,
        wanted: time("wanted")?,
        moved_to: time("moved_to")?,
        latest: time("latest")?,
    })
}
