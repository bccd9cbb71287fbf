//! The types that every crate of the project uses: an order, its deadline, and the result of a close.
//!
//! Imports no other module of this crate, because most of them import this one. No I/O.

use std::fmt;
use std::ops::{Add, Sub};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The longest order id accepted, in bytes. An AMQP short string holds 255; the rest is room for prefixes.
pub const MAX_ORDER_ID_BYTES: usize = 200;

/// An order's identity as text: 1 to [`MAX_ORDER_ID_BYTES`] bytes, no control characters.
///
/// Text because the shop decides what its keys are; the SQL statements cast it. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct OrderId(Arc<str>);

/// Why a text cannot be an order id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OrderIdError {
    /// The text has no bytes.
    #[error("the order id is empty; send the id the orders table knows the order by")]
    Empty,
    /// The text has this many bytes, more than [`MAX_ORDER_ID_BYTES`].
    #[error(
        "the order id has {0} bytes, more than the {MAX_ORDER_ID_BYTES} allowed; send the key itself, not a document"
    )]
    TooLong(usize),
    /// At least one character is of the Unicode category Cc, such as NUL or a line break.
    #[error("the order id contains a control character; send the id as the orders table prints it")]
    ControlCharacter,
}

impl OrderId {
    /// Checks the length and the characters; takes the text unchanged.
    ///
    /// # Errors
    /// [`OrderIdError`] says what is wrong with the text.
    pub fn new(text: impl AsRef<str>) -> Result<Self, OrderIdError> {
        let text = text.as_ref();
        if text.is_empty() {
            return Err(OrderIdError::Empty);
        }
        if text.len() > MAX_ORDER_ID_BYTES {
            return Err(OrderIdError::TooLong(text.len()));
        }
        // NUL in particular cannot be stored in a Postgres text.
        if text.chars().any(char::is_control) {
            return Err(OrderIdError::ControlCharacter);
        }
        Ok(Self(text.into()))
    }

    /// The text as it was given, and as messages and statements contain it.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for OrderId {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl FromStr for OrderId {
    type Err = OrderIdError;
    fn from_str(text: &str) -> Result<Self, OrderIdError> {
        Self::new(text)
    }
}

impl TryFrom<String> for OrderId {
    type Error = OrderIdError;
    fn try_from(text: String) -> Result<Self, OrderIdError> {
        Self::new(text)
    }
}

impl From<OrderId> for String {
    fn from(id: OrderId) -> Self {
        id.0.as_ref().to_owned()
    }
}

impl fmt::Display for OrderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for OrderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

/// A point in time in microseconds since the Unix epoch: Postgres' own resolution, so that a deadline read from a row
/// and the deadline in an alarm are the same number.
///
/// Saturates at the ends instead of panicking: deadlines come from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(i64);

/// When an unpaid order expires.
pub type Deadline = Timestamp;

impl Timestamp {
    /// Takes microseconds since the Unix epoch; negative before it. Every value is a valid time.
    #[must_use]
    pub const fn from_unix_micros(micros: i64) -> Self {
        Self(micros)
    }

    /// Microseconds since the Unix epoch; negative before it.
    #[must_use]
    pub const fn unix_micros(self) -> i64 {
        self.0
    }

    /// Whether it can be a deadline: from the year 1 to 9999, as messages have times. An order with another one, such as
    /// `-infinity` where an unset time is written so, is never due.
    #[must_use]
    pub const fn can_be_due(self) -> bool {
        const FIRST: i64 = -62_135_596_800_000_000;
        const LAST: i64 = 253_402_300_799_999_999;
        FIRST <= self.0 && self.0 <= LAST
    }

    /// Rounded up to the microsecond; saturates.
    fn from_unix_nanos(nanos: i128) -> Self {
        let micros = nanos.div_euclid(1_000) + i128::from(nanos.rem_euclid(1_000) != 0);
        Self(micros.try_into().unwrap_or(if micros < 0 { i64::MIN } else { i64::MAX }))
    }

    /// Now, by this machine's clock. Only a publisher may trust it; the worker asks the database's clock.
    #[must_use]
    pub fn now_by_local_clock() -> Self {
        SystemTime::now().into()
    }

    /// How long after `earlier` this is; zero if it is not after it.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

fn micros_of(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

impl Add<Duration> for Timestamp {
    type Output = Self;
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(micros_of(duration)))
    }
}

impl Sub<Duration> for Timestamp {
    type Output = Self;
    fn sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(micros_of(duration)))
    }
}

impl From<SystemTime> for Timestamp {
    /// Rounds up to the microsecond, so that an alarm never names a time before the row's deadline.
    fn from(time: SystemTime) -> Self {
        match time.duration_since(UNIX_EPOCH) {
            Ok(after) => Self(i64::try_from(after.as_nanos().div_ceil(1_000)).unwrap_or(i64::MAX)),
            Err(before) => Self(-micros_of(before.duration())),
        }
    }
}

impl From<Timestamp> for SystemTime {
    /// Saturates where this machine's clock cannot represent the time.
    fn from(time: Timestamp) -> Self {
        let length = Duration::from_micros(time.0.unsigned_abs());
        let moved = if time.0 < 0 { UNIX_EPOCH.checked_sub(length) } else { UNIX_EPOCH.checked_add(length) };
        moved.unwrap_or(UNIX_EPOCH)
    }
}

impl From<time::OffsetDateTime> for Timestamp {
    /// Rounds up to the microsecond, as from [`SystemTime`].
    fn from(time: time::OffsetDateTime) -> Self {
        Self::from_unix_nanos(time.unix_timestamp_nanos())
    }
}

#[cfg(feature = "chrono")]
impl<Tz: chrono::TimeZone> From<chrono::DateTime<Tz>> for Timestamp {
    /// Rounds up to the microsecond, as from [`SystemTime`].
    fn from(time: chrono::DateTime<Tz>) -> Self {
        Self::from_unix_nanos(i128::from(time.timestamp()) * 1_000_000_000 + i128::from(time.timestamp_subsec_nanos()))
    }
}

/// Which path closed an order. Stored with the order, its history and its event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClosedBy {
    /// A message from the broker woke the worker: the normal path.
    Alarm,
    /// The worker read its deadline from the database shortly before, because no alarm could be expected.
    LookAhead,
    /// The safety net found an overdue order that no alarm had woken.
    Sweep,
    /// A person asked for it on the command line.
    Manual,
    /// Before its deadline: the shop said that its payment has failed for good. No worker does it.
    Released,
}

impl ClosedBy {
    /// The word that the database and the events use.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Alarm => "alarm",
            Self::LookAhead => "look_ahead",
            Self::Sweep => "sweep",
            Self::Manual => "manual",
            Self::Released => "released",
        }
    }

    /// Reads that word; `None` for any other.
    #[must_use]
    pub fn from_word(word: &str) -> Option<Self> {
        let all = [Self::Alarm, Self::LookAhead, Self::Sweep, Self::Manual, Self::Released];
        all.into_iter().find(|by| by.as_str() == word)
    }
}

/// What the close statement found for one order. The words are those of the column `outcome`;
/// [`Outcome::Unknown`] is the absence of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It was unpaid and due, and is closed now.
    Closed,
    /// Paid in time.
    Paid,
    /// Closed before, by another alarm, the sweep or a person.
    AlreadyClosed,
    /// A payment provider is being asked; the worker must not touch it.
    Closing,
    /// It was unpaid and due, and has an attempt to pay that may bring money: its payment provider is asked from now on.
    Claimed,
    /// Unpaid, but its deadline lies in the future (it was extended, or the alarm came early).
    NotDue,
    /// Its row is locked by another session, most likely a payment.
    Busy,
    /// The id is not of the form the orders table uses, so no such order can exist.
    Malformed,
    /// No such order is visible (yet).
    Unknown,
}

impl Outcome {
    /// The word in the column `outcome`, in logs and in metric labels; that column never has `unknown`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Paid => "paid",
            Self::AlreadyClosed => "already_closed",
            Self::Closing => "closing",
            Self::Claimed => "claimed",
            Self::NotDue => "not_due",
            Self::Busy => "busy",
            Self::Malformed => "malformed",
            Self::Unknown => "unknown",
        }
    }

    /// Reads the word in the column `outcome`; `None` for a word the contract does not know.
    #[must_use]
    pub fn from_contract(word: &str) -> Option<Self> {
        Some(match word {
            "closed" => Self::Closed,
            "paid" => Self::Paid,
            "already_closed" => Self::AlreadyClosed,
            "closing" => Self::Closing,
            "claimed" => Self::Claimed,
            "not_due" => Self::NotDue,
            "busy" => Self::Busy,
            "malformed" => Self::Malformed,
            _ => return None,
        })
    }
}

/// One row that the close statement returned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloseOutcome {
    /// What the statement found; [`Outcome::Unknown`] if it returned no row for the order.
    pub outcome: Outcome,
    /// The deadline in the row, if the order exists.
    pub deadline: Option<Deadline>,
}

/// Why a close has no outcome.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CloseError {
    /// Another session holds a lock on what an order needs, and may go on holding it: try again, but wait for no lock.
    #[error("{0}")]
    Locked(String),
    /// A deadlock, a serialization failure, a timeout: try again, no order is at fault.
    #[error("{0}")]
    Transient(String),
    /// An order cannot be closed as it is: a constraint, a trigger, a value.
    #[error("{0}")]
    Rejected(String),
    /// No order can be closed: the database is away, read-only, or does not know our statement.
    #[error("{0}")]
    Unavailable(String),
}

impl CloseError {
    /// The word for [`CloseError::Locked`] in metric labels, beside the words of [`Outcome`].
    pub const LOCKED: &'static str = "locked";
    /// The word for [`CloseError::Transient`].
    pub const TRANSIENT: &'static str = "transient";
    /// The word for [`CloseError::Rejected`].
    pub const REJECTED: &'static str = "failed";
    /// The word for [`CloseError::Unavailable`].
    pub const AWAY: &'static str = "away";

    /// The word for this kind of error, without its reason.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Locked(_) => Self::LOCKED,
            Self::Transient(_) => Self::TRANSIENT,
            Self::Rejected(_) => Self::REJECTED,
            Self::Unavailable(_) => Self::AWAY,
        }
    }
}

/// The outcome of the close statement for one order, or why there is none.
pub type CloseResult = Result<CloseOutcome, CloseError>;

/// A result of a close statement that the orders contract does not allow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OddAnswer {
    /// NULL, or a word that is no outcome.
    #[error(
        "answers {word:?} as the outcome of order {order_id}; the outcomes are closed, paid, already_closed, closing, not_due, busy and malformed"
    )]
    Word {
        /// The order that the row is for.
        order_id: OrderId,
        /// The column `outcome`; `None` for NULL.
        word: Option<String>,
    },
    /// A row whose order id is not among the requested ones.
    #[error(
        "returns a row for {order_id:?}, an order that it was not asked for; return the ids of $1 only, as they were given"
    )]
    NotAsked {
        /// The column `order_id` as it is: it need not be a valid [`OrderId`].
        order_id: String,
    },
    /// More than one row for an order, so that its outcome is ambiguous.
    #[error("returns two rows for order {order_id}; return one for each order")]
    Twice {
        /// The requested order that has several rows.
        order_id: OrderId,
    },
}

impl OddAnswer {
    /// The words of all kinds, in the order of the variants.
    pub const KINDS: [&'static str; 3] = ["word", "not asked", "twice"];

    /// One of [`OddAnswer::KINDS`]; the worker reports the last result of each kind.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Word { .. } => Self::KINDS[0],
            Self::NotAsked { .. } => Self::KINDS[1],
            Self::Twice { .. } => Self::KINDS[2],
        }
    }
}

/// An unpaid order past its deadline, as the sweep finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overdue {
    /// Read from the row, and valid: the worker skips rows whose id is not.
    pub order_id: OrderId,
    /// The deadline in the row, which an alarm for the order need not name.
    pub deadline: Deadline,
}

/// A page of overdue orders to be read from the database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SweepPage {
    /// Which orders are included.
    pub reach: SweepReach,
    /// Where the previous page ended; `None` begins a pass.
    pub after: Option<SweepPlace>,
    /// The most rows that the page may have.
    pub limit: usize,
}

/// How far a page of the sweep reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SweepReach {
    /// Orders that have been overdue for this long: until then their alarms may still come.
    Overdue(Duration),
    /// All overdue orders, and those that fall due within this time: no alarm is expected for them.
    Ahead(Duration),
}

impl SweepReach {
    /// How long after its deadline an order is included, in seconds; negative: before it.
    #[must_use]
    pub fn grace_s(self) -> f64 {
        match self {
            Self::Overdue(grace) => grace.as_secs_f64(),
            Self::Ahead(ahead) => -ahead.as_secs_f64(),
        }
    }
}

/// A row's position in the order (deadline, id). The id as the row has it: an id that is no [`OrderId`] must not stop a
/// pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SweepPlace {
    /// The row's deadline, which sorts first.
    pub deadline: Deadline,
    /// The row's id as text. Rows of the same deadline are sorted by id, as the database compares ids.
    pub id: String,
}

/// A page of overdue orders that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SweptPage {
    /// The rows with a valid order id, in the order in which the statement returned them.
    pub orders: Vec<Overdue>,
    /// Where the next page begins; `None` at the end of the pass.
    pub next: Option<SweepPlace>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_id_is_short_printable_and_nonempty() {
        assert_eq!(OrderId::new(""), Err(OrderIdError::Empty));
        assert_eq!(OrderId::new("a\0b"), Err(OrderIdError::ControlCharacter));
        assert_eq!(OrderId::new("x".repeat(201)), Err(OrderIdError::TooLong(201)));
        assert!(OrderId::new("'; DROP TABLE orders; --").is_ok());
    }

    #[test]
    fn timestamp_saturates_instead_of_overflowing() {
        let end = Timestamp::from_unix_micros(i64::MAX);
        assert_eq!(end + Duration::MAX, end);
        assert_eq!(Timestamp::from_unix_micros(5).since(Timestamp::from_unix_micros(9)), Duration::ZERO);
    }

    #[test]
    fn calendar_times_round_up_to_microsecond() {
        for (nanos, micros) in [(1_795_170_600_000_000_001_i128, 1_795_170_600_000_001), (-1_001, -1), (0, 0)] {
            let time = time::OffsetDateTime::from_unix_timestamp_nanos(nanos).unwrap();
            assert_eq!(Timestamp::from(time), Timestamp::from_unix_micros(micros));
            assert_eq!(Timestamp::from(SystemTime::from(Timestamp::from(time))), Timestamp::from(time));
            #[cfg(feature = "chrono")]
            {
                let nanos_in_range = i64::try_from(nanos).unwrap();
                let time = chrono::DateTime::from_timestamp_nanos(nanos_in_range);
                assert_eq!(Timestamp::from(time), Timestamp::from_unix_micros(micros));
            }
        }
        assert_eq!(Timestamp::from_unix_nanos(i128::MAX), Timestamp::from_unix_micros(i64::MAX));
    }

    #[test]
    fn local_time_rounds_up_to_microsecond() {
        let time = UNIX_EPOCH + Duration::from_nanos(1_001);
        assert_eq!(Timestamp::from(time).unix_micros(), 2);
    }
}
