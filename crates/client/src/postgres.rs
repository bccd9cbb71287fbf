//! Schedules an alarm, moves a deadline, reports a payment, or releases an order, inside the caller's Postgres transaction.
//!
//! For a database with the tables and functions of `order-timeout setup`, which must be on the connection's `search_path`:
//! [`schedule`] writes into `alarm_outbox`, and [`move_deadline`] calls the function of that name. Opens no connection and
//! commits nothing.
//!
//! The row decides, so a later deadline changes only the row: after any number of extensions the order has one alarm.
//! Only an earlier deadline needs an alarm of its own. [`payment_received`] and [`release`] are for the callback of a payment provider.
//! Cancelling an order needs nothing from here.

mod payments;

use order_timeout_core::kind::Kind;
use order_timeout_core::message::is_traceparent;
use order_timeout_core::order::{OrderId, OrderIdError, Timestamp};
use sqlx::encode::IsNull;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{PgArgumentBuffer, PgHasArrayType, PgTypeInfo, PgValueRef};
use sqlx::{PgConnection, PgExecutor, Postgres, Row};

pub use payments::{
    LateReason, PaymentError, PaymentOutcome, PaymentVerdict, ReleaseError, Released, payment_received, release,
};

/// Why an alarm was not written into the outbox. Roll the transaction back; the cause is in `source()`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// The text cannot be an order id. Nothing was sent; a retry will not help.
    #[error("not scheduled")]
    OrderId(#[from] OrderIdError),
    /// The database refused the row, for example for a deadline outside the years 1 to 9999, or was not reached.
    #[error("not scheduled")]
    Database(#[from] sqlx::Error),
}

/// Schedules an alarm as part of the caller's transaction: it exists if, and only if, that transaction commits.
/// `deadline` is the one in the order's row. Inserts one row, which a worker publishes. In any other language the same
/// is `INSERT INTO alarm_outbox (order_id, deadline) VALUES ($1, $2)`. [`NewAlarm`] schedules one with a trace context.
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool, id: &str) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::{Duration, SystemTime};
///
/// let deadline = SystemTime::now() + Duration::from_secs(30 * 60);
/// let mut tx = pool.begin().await?;
/// // … INSERT INTO orders …, with this deadline …
/// order_timeout_client::postgres::schedule(&mut tx, id, deadline).await?;
/// tx.commit().await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`ScheduleError`]; roll the transaction back.
pub async fn schedule(
    transaction: &mut PgConnection,
    order_id: impl AsRef<str>,
    deadline: impl Into<Timestamp>,
) -> Result<(), ScheduleError> {
    NewAlarm::new(order_id, deadline).schedule(transaction).await
}

/// Schedules many alarms as part of the caller's transaction, with one statement. An alarm is a pair of order id and
/// deadline, or a [`NewAlarm`].
///
/// # Errors
/// [`ScheduleError`]; roll the transaction back.
pub async fn schedule_all<A: Into<NewAlarm>>(
    transaction: &mut PgConnection,
    alarms: impl IntoIterator<Item = A>,
) -> Result<(), ScheduleError> {
    let (mut ids, mut deadlines, mut traceparents, mut kinds) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for alarm in alarms {
        let NewAlarm { kind, order_id, deadline, traceparent } = alarm.into();
        ids.push(OrderId::new(order_id)?.as_str().to_owned());
        deadlines.push(Timestamptz(deadline));
        traceparents.push(traceparent);
        kinds.push(kind.as_str().to_owned());
    }
    let insert = sqlx::query(
        "INSERT INTO alarm_outbox (order_id, deadline, traceparent, kind)
         SELECT * FROM unnest($1::text[], $2::timestamptz[], $3::text[], $4::text[])",
    );
    let insert = insert.bind(ids).bind(deadlines).bind(traceparents).bind(kinds);
    insert.execute(transaction).await?;
    Ok(())
}

/// An alarm to be scheduled, with what an alarm need not have.
///
/// ```no_run
/// # async fn example(tx: &mut sqlx::PgConnection, id: &str, traceparent: &str) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::{Duration, SystemTime};
///
/// use order_timeout_client::postgres::NewAlarm;
///
/// let deadline = SystemTime::now() + Duration::from_secs(30 * 60);
/// NewAlarm::new(id, deadline).traceparent(traceparent).schedule(tx).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewAlarm {
    kind: Kind,
    order_id: String,
    deadline: Timestamp,
    traceparent: Option<String>,
}

impl NewAlarm {
    /// An alarm of this order for this deadline, which is the one in the order's row.
    #[must_use]
    pub fn new(order_id: impl AsRef<str>, deadline: impl Into<Timestamp>) -> Self {
        let (order_id, deadline) = (order_id.as_ref().to_owned(), deadline.into());
        Self { kind: Kind::ORDER, order_id, deadline, traceparent: None }
    }

    /// The kind of the deadline, if it is another one than that of an unpaid order. It must be one of the worker's settings:
    /// an alarm of an unknown kind is parked there. In any other language it is the column `kind`.
    #[must_use]
    pub fn kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// The W3C trace context of the code that schedules, such as
    /// `00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01`. The worker sends it as header `traceparent` with the alarm
    /// and with the event of the order's close. Text that is no trace context is left out, because no order may fail for its
    /// trace.
    #[must_use]
    pub fn traceparent(mut self, context: impl AsRef<str>) -> Self {
        let context = context.as_ref();
        self.traceparent = is_traceparent(context).then(|| context.to_owned());
        self
    }

    /// Schedules it as part of the caller's transaction, as [`schedule`] does.
    ///
    /// # Errors
    /// [`ScheduleError`]; roll the transaction back.
    pub async fn schedule(self, transaction: &mut PgConnection) -> Result<(), ScheduleError> {
        schedule_all(transaction, [self]).await
    }
}

impl<I: AsRef<str>, D: Into<Timestamp>> From<(I, D)> for NewAlarm {
    fn from((order_id, deadline): (I, D)) -> Self {
        Self::new(order_id, deadline)
    }
}

/// The result of [`move_deadline`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Moved {
    /// The deadline is now later than before, or the same. The existing alarm suffices.
    Later,
    /// The deadline is now earlier. A new alarm is in the outbox, and the worker publishes it after the commit.
    Earlier,
    /// The deadline is unchanged, because the order is no longer unpaid, or because a trigger skipped the update.
    Unchanged {
        /// `paid`, `closed` and so on; `unpaid` if a trigger skipped the update.
        status: String,
        /// The deadline in the row; the latest timestamp of all if the row has none.
        deadline: Timestamp,
    },
    /// The deadline is unchanged, because `extend_max` of the order's kind does not allow the new one.
    TooFar {
        /// The latest deadline that it allows.
        latest: Timestamp,
    },
    /// There is no such order.
    Unknown,
}

/// Why a deadline is not known to have changed. Roll the transaction back; the cause is in `source()`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MoveDeadlineError {
    /// The text cannot be an order id. Nothing was sent; a retry will not help.
    #[error("the deadline is unchanged")]
    OrderId(#[from] OrderIdError),
    /// The database refused the statement, or its answer was lost. The sentence says what to do; a retry is always
    /// safe.
    #[error("{}", sentence(.0))]
    Database(#[from] sqlx::Error),
}

fn sentence(error: &sqlx::Error) -> String {
    let Some(refusal) = error.as_database_error() else {
        // The reply may have been lost.
        return "the deadline is not known to have moved; try again".to_owned();
    };
    let hint = match refusal.code().as_deref() {
        // lock_not_available, and what ends a statement that takes too long
        Some("55P03" | "57014") => "; another session holds the order, try again",
        // admin_shutdown, crash_shutdown, cannot_connect_now
        Some("57P01" | "57P02" | "57P03") => "; the database is restarting, try again",
        // read_only_sql_transaction
        Some("25006") => "; this is a standby, connect to the primary",
        // insufficient_privilege
        Some("42501") => "; GRANT EXECUTE ON FUNCTION move_deadline, or for a command move_deadlines, to this user",
        // undefined_function
        Some("42883") => "; run `order-timeout setup`, and put its schema on the search_path",
        // check_violation
        Some("23514") => "; choose a deadline before the year 9999",
        _ => "",
    };
    format!("the deadline is unchanged{hint}")
}

/// Gives an unpaid order another deadline as part of the caller's transaction, and an alarm if the deadline is earlier.
/// Locks the order's row, so it waits for a session that is closing or paying the order. A pool is accepted too: it is a single
/// statement. [`move_deadline_of`] is for other kinds.
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool, id: &str) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::{Duration, SystemTime};
///
/// use order_timeout_client::postgres::{Moved, move_deadline};
///
/// // Five minutes more to pay.
/// let moved = move_deadline(&pool, id, SystemTime::now() + Duration::from_secs(300)).await?;
/// if let Moved::Unchanged { status, .. } = moved {
///     println!("too late: the order is {status}");
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`MoveDeadlineError`]; roll the transaction back.
pub async fn move_deadline(
    executor: impl PgExecutor<'_>,
    order_id: impl AsRef<str>,
    deadline: impl Into<Timestamp>,
) -> Result<Moved, MoveDeadlineError> {
    move_deadline_of(executor, &Kind::ORDER, order_id, deadline).await
}

/// [`move_deadline`] of an order of this kind. In any other language it is
/// `SELECT outcome, status, before, moved_to, latest FROM move_deadline($1, $2, $3)`.
///
/// # Errors
/// [`MoveDeadlineError`]; roll the transaction back.
pub async fn move_deadline_of(
    executor: impl PgExecutor<'_>,
    kind: &Kind,
    order_id: impl AsRef<str>,
    deadline: impl Into<Timestamp>,
) -> Result<Moved, MoveDeadlineError> {
    let order_id = OrderId::new(order_id)?;
    let found = sqlx::query("SELECT outcome, status, before, latest FROM move_deadline($1, $2, $3)")
        .bind(order_id.as_str())
        .bind(Timestamptz(deadline.into()))
        .bind(kind.as_str())
        .fetch_optional(executor)
        .await?;
    let Some(row) = found else { return Ok(Moved::Unknown) };
    let time = |column| {
        let time: Option<Timestamptz> = row.try_get(column)?;
        Ok::<_, sqlx::Error>(time.map_or(NEVER, |Timestamptz(time)| time))
    };
    let outcome: String = row.try_get("outcome")?;
    Ok(match outcome.as_str() {
        "later" => Moved::Later,
        "earlier" => Moved::Earlier,
        "too_far" => Moved::TooFar { latest: time("latest")? },
        _ => Moved::Unchanged { status: row.try_get("status")?, deadline: time("before")? },
    })
}

/// The deadline of a row that has none.
const NEVER: Timestamp = Timestamp::from_unix_micros(i64::MAX);

/// A [`Timestamp`] as a `timestamptz`, to bind to a statement of sqlx and to read from a row.
///
/// It is sent and read as its number of microseconds. `infinity`, at which sqlx's own types panic, and a year that no
/// calendar type can hold are therefore ordinary, distant times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timestamptz(pub Timestamp);

/// 2000-01-01T00:00:00Z, the epoch of Postgres (PostgreSQL source, `datatype/timestamp.h`).
const POSTGRES_EPOCH: Timestamp = Timestamp::from_unix_micros(946_684_800_000_000);

/// PostgreSQL source, `pg_type.dat`.
const TIMESTAMPTZ_OID: Oid = Oid(1184);

/// The same, of `timestamptz[]`.
const TIMESTAMPTZ_ARRAY_OID: Oid = Oid(1185);

impl PgHasArrayType for Timestamptz {
    fn array_type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(TIMESTAMPTZ_ARRAY_OID)
    }
}

impl sqlx::Type<Postgres> for Timestamptz {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(TIMESTAMPTZ_OID)
    }
}

impl<'r> sqlx::Decode<'r, Postgres> for Timestamptz {
    fn decode(value: PgValueRef<'r>) -> Result<Self, sqlx::error::BoxDynError> {
        // In the binary format of every prepared statement: microseconds since the epoch, big-endian.
        let micros = i64::from_be_bytes(value.as_bytes()?.try_into()?);
        // The minimum stays what it is: -infinity. The maximum, infinity, saturates.
        let since_epoch = if micros == i64::MIN { micros } else { micros.saturating_add(POSTGRES_EPOCH.unix_micros()) };
        Ok(Self(Timestamp::from_unix_micros(since_epoch)))
    }
}

impl<'q> sqlx::Encode<'q, Postgres> for Timestamptz {
    fn encode_by_ref(&self, buffer: &mut PgArgumentBuffer) -> Result<IsNull, sqlx::error::BoxDynError> {
        // The minimum is Postgres' -infinity, the maximum its infinity.
        let micros = match self.0.unix_micros() {
            i64::MAX => i64::MAX,
            micros => micros.saturating_sub(POSTGRES_EPOCH.unix_micros()),
        };
        buffer.extend_from_slice(&micros.to_be_bytes());
        Ok(IsNull::No)
    }
}
