//! Step 1, schedule, repeated: another deadline for an order of the default schema, inside the caller's transaction.
//!
//! The row decides, so an extension changes only the row: after any number of extensions the order has one alarm. Only
//! an earlier deadline needs an alarm of its own. Paying or cancelling an order needs nothing from here.

use sqlx::{PgExecutor, Row};

use crate::database::{self, Timestamptz};
use crate::order::{Deadline, OrderId, OrderIdError};

/// The statement, for services in other languages too.
const DEADLINE_SQL: &str = include_str!("../../sql/deadline.sql");

/// The result of changing a deadline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Moved {
    /// The same as before, or later; the existing alarm suffices.
    Later,
    /// The relay publishes an alarm for it.
    Earlier,
    /// The order has this status, so its deadline is unchanged. If it is unpaid, a trigger in the database kept the
    /// deadline.
    Stands { status: String, deadline: Deadline },
    /// There is no such order.
    Unknown,
}

/// Why a deadline is not known to have changed.
#[derive(Debug, thiserror::Error)]
pub enum MoveDeadlineError {
    #[error("the deadline is unchanged: {0}")]
    OrderId(#[from] OrderIdError),
    #[error("{}", describe(.0))]
    Database(#[from] sqlx::Error),
}

fn describe(error: &sqlx::Error) -> String {
    let Some(refusal) = error.as_database_error() else {
        // The reply may have been lost.
        return format!("the deadline is not known to have moved; try again: {}", database::one_line(error));
    };
    let hint = match refusal.code().as_deref() {
        // invalid_text_representation
        Some("22P02") => "; give the id as the orders table has it, a UUID",
        // lock_not_available, and what ends a statement that takes too long
        Some("55P03" | "57014") => "; another session holds the order, try again",
        // admin_shutdown, crash_shutdown, cannot_connect_now
        Some("57P01" | "57P02" | "57P03") => "; the database is restarting, try again",
        // read_only_sql_transaction
        Some("25006") => "; this is a standby, give database.url of the primary",
        // insufficient_privilege
        Some("42501") => "; grant this user SELECT and UPDATE on orders and INSERT on alarm_outbox",
        // check_violation
        Some("23514") => "; choose a deadline before the year 9999",
        _ => "",
    };
    format!("the deadline is unchanged: {}{hint}", database::one_line(error))
}

/// Gives an unpaid order another deadline as part of the caller's transaction.
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool, id: uuid::Uuid) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::{Duration, SystemTime};
///
/// // Five minutes more to pay.
/// let moved = order_timeout::move_deadline_in(&pool, id.to_string(), SystemTime::now() + Duration::from_secs(300)).await?;
/// if let order_timeout::Moved::Stands { status, .. } = moved {
///     println!("too late: the order is {status}");
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`MoveDeadlineError`]; the transaction is to be rolled back then.
pub async fn move_deadline_in(
    transaction: impl PgExecutor<'_>,
    order_id: impl AsRef<str>,
    deadline: impl Into<Deadline>,
) -> Result<Moved, MoveDeadlineError> {
    Ok(move_deadline(transaction, &OrderId::new(order_id)?, deadline.into()).await?)
}

/// The same for an id that is one.
///
/// # Errors
/// sqlx's.
pub(crate) async fn move_deadline(
    transaction: impl PgExecutor<'_>,
    order_id: &OrderId,
    deadline: Deadline,
) -> Result<Moved, sqlx::Error> {
    let found = sqlx::query(DEADLINE_SQL)
        .bind(order_id.as_str())
        .bind(Timestamptz(deadline))
        .fetch_optional(transaction)
        .await?;
    let Some(row) = found else { return Ok(Moved::Unknown) };
    let (status, Timestamptz(before)): (String, _) = (row.try_get("status")?, row.try_get("deadline")?);
    let moved_to: Option<Timestamptz> = row.try_get("moved_to")?;
    Ok(match moved_to {
        Some(Timestamptz(now)) if now < before => Moved::Earlier,
        Some(_) => Moved::Later,
        None => Moved::Stands { status, deadline: before },
    })
}
