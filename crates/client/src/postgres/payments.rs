//! Reports that a payment was received, or that none will come, inside the caller's Postgres transaction.
//!
//! One call of the function `payment_received` or `release`, which decides; asks no provider and refunds nothing.

use std::borrow::Cow;
use std::fmt;

use order_timeout_core::kind::Kind;
use order_timeout_core::payment::Attempt;
use sqlx::postgres::PgRow;
use sqlx::{PgExecutor, Row};

/// What became of a payment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct PaymentOutcome {
    /// What the payment did. A repeated report gets the answer of the first one.
    pub verdict: PaymentVerdict,
    /// Whether this is the first report of this provider's reference.
    pub is_new: bool,
}

/// What a payment did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PaymentVerdict {
    /// It has paid the order, or completed it.
    Paid {
        /// What was paid too much, in the smallest unit. It is recorded as late money, and announced.
        surplus_minor: i64,
    },
    /// It has paid a part. The order is still open and is closed at its deadline.
    Partial {
        /// What the order still lacks, in the smallest unit.
        missing_minor: i64,
    },
    /// It has paid for nothing. It is recorded as late money, and announced.
    Late {
        /// Why.
        reason: LateReason,
    },
}

/// Why money paid for nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LateReason {
    /// The order was closed.
    Closed,
    /// The order was cancelled.
    Cancelled,
    /// The order has another status of the shop's own.
    NotOpen,
    /// The deadline had passed, and `orders.pay_after_deadline` is false.
    AfterDeadline,
    /// Another payment has paid the order.
    AlreadyPaid,
    /// The order is to be paid in another currency.
    OtherCurrency,
    /// `payment_attempts` has this reference for another order.
    OtherOrder,
    /// There is no such order.
    UnknownOrder,
}

impl LateReason {
    const ALL: [Self; 8] = [
        Self::Closed,
        Self::Cancelled,
        Self::NotOpen,
        Self::AfterDeadline,
        Self::AlreadyPaid,
        Self::OtherCurrency,
        Self::OtherOrder,
        Self::UnknownOrder,
    ];

    /// The word in the table `late_payments`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Cancelled => "cancelled",
            Self::NotOpen => "not_open",
            Self::AfterDeadline => "after_deadline",
            Self::AlreadyPaid => "already_paid",
            Self::OtherCurrency => "other_currency",
            Self::OtherOrder => "other_order",
            Self::UnknownOrder => "unknown_order",
        }
    }
}

impl fmt::Display for LateReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Why a payment is not known to be recorded. Roll the transaction back. Report the payment again, which is always safe,
/// unless [`Self::is_final`]. The cause is in `source()`.
#[derive(Debug, thiserror::Error)]
#[error("the payment is not known to be recorded{}", hint(.0, "payment_received"))]
pub struct PaymentError(#[from] sqlx::Error);

/// invalid_parameter_value and unique_violation: what was reported can never be recorded.
const FINAL: [&str; 2] = ["22023", "23505"];

impl PaymentError {
    /// Whether no repetition can succeed, because of what was reported (SQLSTATE 22023 or 23505). Show it to an operator, and
    /// answer the provider that its report has arrived.
    #[must_use]
    pub fn is_final(&self) -> bool {
        code(&self.0).is_some_and(|code| FINAL.contains(&code.as_ref()))
    }
}

fn code(error: &sqlx::Error) -> Option<Cow<'_, str>> {
    error.as_database_error().and_then(sqlx::error::DatabaseError::code)
}

fn hint(error: &sqlx::Error, function: &str) -> String {
    let hint = match code(error).as_deref() {
        // lock_not_available, what ends a statement that takes too long, serialization_failure, deadlock_detected
        Some("55P03" | "57014" | "40001" | "40P01") => "; another session holds the order, report it again",
        // admin_shutdown, crash_shutdown, cannot_connect_now
        Some("57P01" | "57P02" | "57P03") => "; the database is restarting, report it again",
        // read_only_sql_transaction
        Some("25006") => "; this is a standby, connect to the primary",
        // insufficient_privilege
        Some("42501") => return format!("; GRANT EXECUTE ON FUNCTION {function} to this user"),
        // undefined_function
        Some("42883") => "; run `order-timeout setup`, and put its schema on the search_path",
        // unique_violation
        Some("23505") => ", and cannot be; this reference was reported before with another amount or order",
        // invalid_parameter_value
        Some("22023") => ", and cannot be; correct what is reported",
        _ => "; report it again",
    };
    hint.to_owned()
}

/// Reports that a provider has received this money for this order, as part of the caller's transaction. Pays an order
/// that is unpaid or `closing` if the whole amount is covered, together with part payments before; otherwise the money
/// is recorded as a part payment or as late money. Each provider's reference counts once, however often and by however
/// many sessions it is reported.
///
/// Locks the order's row, so it waits for a session that is closing the order. A pool is accepted too: it is a single
/// statement.
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool, id: &str) -> Result<(), Box<dyn std::error::Error>> {
/// use order_timeout_client::payment::{Attempt, Currency, Money};
/// use order_timeout_client::postgres::{PaymentVerdict, payment_received};
///
/// let money = Money { amount_minor: 1999, currency: Currency::new("EUR")? };
/// let received = Attempt { provider: "stripe".into(), reference: "pi_3Mtw".into(), money };
/// match payment_received(&pool, id, &received).await?.verdict {
///     PaymentVerdict::Paid { .. } => println!("ship it"),
///     PaymentVerdict::Partial { missing_minor } => println!("{missing_minor} are missing"),
///     PaymentVerdict::Late { reason } => println!("to be given back: {reason}"),
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`PaymentError`]; report the payment again unless [`PaymentError::is_final`].
pub async fn payment_received(
    executor: impl PgExecutor<'_>,
    order_id: impl AsRef<str>,
    received: &Attempt,
) -> Result<PaymentOutcome, PaymentError> {
    let row = sqlx::query(
        "SELECT outcome, reason, missing_minor, surplus_minor, is_new FROM payment_received($1, $2, $3, $4, $5)",
    )
    .bind(order_id.as_ref())
    .bind(&received.provider)
    .bind(&received.reference)
    .bind(received.money.amount_minor)
    .bind(received.money.currency.as_str())
    .fetch_one(executor)
    .await?;
    Ok(read_outcome(&row)?)
}

fn read_outcome(row: &PgRow) -> Result<PaymentOutcome, sqlx::Error> {
    let outcome: String = row.try_get("outcome")?;
    let verdict = match outcome.as_str() {
        "paid" => PaymentVerdict::Paid { surplus_minor: row.try_get("surplus_minor")? },
        "partial" => PaymentVerdict::Partial { missing_minor: row.try_get("missing_minor")? },
        "late" => {
            let word: String = row.try_get("reason")?;
            let reason = LateReason::ALL.into_iter().find(|reason| reason.as_str() == word);
            PaymentVerdict::Late { reason: reason.ok_or_else(|| unknown_word(&word))? }
        }
        _ => return Err(unknown_word(&outcome)),
    };
    Ok(PaymentOutcome { verdict, is_new: row.try_get("is_new")? })
}

fn unknown_word(word: &str) -> sqlx::Error {
    sqlx::Error::Decode(format!("the database answers {word:?}, which this version does not know").into())
}

/// What became of an order that was to be released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub enum Released {
    /// It is closed now.
    Closed,
    /// It was closed or cancelled before, or is not open for another reason.
    AlreadyClosed,
    /// It is paid.
    Paid,
    /// Its payment provider is being asked, which decides.
    Closing,
    /// An attempt to pay it may still bring money. Set the state of the one that has failed to `closed` first.
    AttemptOpen,
    /// Closing is paused: the order closes at its deadline, once the pause has ended.
    Paused,
    /// It has no deadline, with which it is never closed, or a trigger keeps it open.
    NotDue,
    /// Another session refers to its row, which was to be deleted. Release it again.
    Busy,
    /// There is no such order.
    Unknown,
    /// The id is not of the form that the orders table uses.
    Malformed,
}

impl Released {
    /// Reads the word that the function `release` answers.
    fn from_word(word: &str) -> Option<Self> {
        Some(match word {
            "closed" => Self::Closed,
            "already_closed" => Self::AlreadyClosed,
            "paid" => Self::Paid,
            "closing" => Self::Closing,
            "attempt_open" => Self::AttemptOpen,
            "paused" => Self::Paused,
            "not_due" => Self::NotDue,
            "busy" => Self::Busy,
            "unknown" => Self::Unknown,
            "malformed" => Self::Malformed,
            _ => return None,
        })
    }
}

/// Why an order is not known to be released. Roll the transaction back; the cause is in `source()`. Calling [`release`] again
/// is always safe.
#[derive(Debug, thiserror::Error)]
#[error("the order is not known to be released{}", hint(.0, "release"))]
pub struct ReleaseError(#[from] sqlx::Error);

/// Closes an open order now instead of at its deadline, as part of the caller's transaction, because its payment has failed for
/// good. Never one with an attempt that may still bring money. The event and the history say `reason`, of 1 to 200 bytes.
///
/// Locks the order's row, so it waits for a payment in flight. A pool is accepted too: it is a single statement.
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool, id: &str) -> Result<(), Box<dyn std::error::Error>> {
/// use order_timeout_client::Kind;
/// use order_timeout_client::postgres::{Released, release};
///
/// if release(&pool, id, "the card was declined", &Kind::ORDER).await? == Released::AttemptOpen {
///     println!("another attempt may still pay it");
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`ReleaseError`]; call it again.
pub async fn release(
    executor: impl PgExecutor<'_>,
    order_id: impl AsRef<str>,
    reason: &str,
    kind: &Kind,
) -> Result<Released, ReleaseError> {
    let release = sqlx::query_scalar("SELECT release($1, $2, $3)").bind(order_id.as_ref()).bind(reason);
    let word: String = release.bind(kind.as_str()).fetch_one(executor).await?;
    Ok(Released::from_word(&word).ok_or_else(|| unknown_word(&word))?)
}
