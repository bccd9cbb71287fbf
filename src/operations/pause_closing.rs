//! Pauses and resumes closing for an operator, of one kind or of all; says before it resumes what is closed then.
//!
//! Changes no order. Workers notice within about a second; what is with a closer at that moment is still closed.

use order_timeout_core::brake::{FEW, MinuteCounts, Usual, Woken, minute_of};
use order_timeout_core::kind::Kind;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::Timestamp;
use serde::Serialize;

use super::orders_table::{OrdersTable, Unknown};
use crate::config::Settings;
use crate::postgres::closing_minutes::{self, KEPT_MINUTES};
use crate::postgres::closing_pauses::{self, EndedPause, Pause, PauseCause};
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{self, Database, DatabaseError, ErrorClass, classify, one_line};

/// What to do while closing is paused: a sentence without its end.
pub const HOW_TO_RESUME: &str =
    "remove the cause for which closing was paused, then `order-timeout resume --who NAME --why TEXT`";

/// So many orders that alarms woke say how many are paid now.
const LAST_WOKEN: u64 = 100;

/// Why nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum PauseError {
    /// No setting names the kind.
    #[error("no kind \"{0}\" is configured; it must be one of {1}")]
    UnknownKind(Kind, String),
    /// Orders would be closed although closing is paused.
    #[error("{0}; end it with `order-timeout resume`, or add --although-paused to close these orders now")]
    IsPaused(String),
    /// The database cannot be used.
    #[error(transparent)]
    Database(#[from] DatabaseError),
}

/// What is paused, and what was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct Pauses {
    /// Those that last, the oldest first.
    pub lasting: Vec<Pause>,
    /// The newest of those that are over, the newest first.
    pub ended: Vec<EndedPause>,
}

/// Pauses after a request to pause.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct Paused {
    /// Whether this request began one.
    pub began: bool,
    /// Those that apply now.
    pub pauses: Vec<Pause>,
}

/// What is closed as soon as closing is resumed, of one kind, and what was found of its payments.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct DueAtResume {
    /// Of which kind.
    pub kind: String,
    /// Orders that are due and unpaid; absent if not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub orders: Option<u64>,
    /// Whether there may be more than `orders`.
    pub is_at_least: bool,
    /// The last orders that alarms woke, a hundred or more.
    pub woken: u64,
    /// Those among them that were paid.
    pub woken_paid: u64,
    /// The usual share of paid ones; absent if not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usual_paid_share: Option<f64>,
    /// The minute in which an alarm last found a paid order, RFC 3339; absent if none did within a week.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_paid_in: Option<String>,
    /// Why something is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_known: Option<String>,
}

impl DueAtResume {
    /// The sentence for the page and the command line.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // for people
    pub fn sentence(&self) -> String {
        let Self { kind, orders, is_at_least, woken, woken_paid, usual_paid_share, last_paid_in, not_known } = self;
        let least = if *is_at_least { "at least " } else { "" };
        let mut sentence = match orders {
            Some(orders) => format!("kind {kind}: {least}{orders} order(s) are due and are closed when it is resumed"),
            None => format!("kind {kind}: how many orders are closed when it is resumed is not known"),
        };
        if *woken > 0 {
            let share = *woken_paid as f64 / *woken as f64 * 100.0;
            sentence += &format!("; of the last {woken} that alarms woke, {share:.1} % were paid");
        }
        if let Some(usual) = usual_paid_share {
            sentence += &format!(", and usually it is {:.0} %", usual * 100.0);
        }
        if let Some(minute) = last_paid_in {
            sentence += &format!("; the last paid one was found in the minute of {minute}");
        }
        if let Some(why) = not_known {
            sentence += &format!("; {why}");
        }
        sentence
    }
}

/// Whether so much is due that it must be said that it is to be closed: more than a few orders, or an unknown number.
#[must_use]
pub fn needs_yes(due: &[DueAtResume]) -> bool {
    due.iter().map(|of| of.orders.unwrap_or(u64::MAX)).fold(0, u64::saturating_add) > FEW
}

/// Pauses after a request to resume.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct Resumed {
    /// Whether nothing was changed, because more than a few orders are due and `yes` was not given.
    pub needs_yes: bool,
    /// What was due, of each kind whose pause was to end.
    pub due: Vec<DueAtResume>,
    /// Those that this request ended.
    pub ended: Vec<Pause>,
    /// Those that still apply to the kind: a pause of all kinds is not ended for one.
    pub still_paused: Vec<Pause>,
}

/// Refuses a kind that no setting names.
///
/// # Errors
/// [`PauseError::UnknownKind`].
pub fn require_known(settings: &Settings, kind: Option<&Kind>) -> Result<(), PauseError> {
    let known = settings.all_kinds();
    match kind {
        Some(kind) if !known.contains(kind) => {
            let known: Vec<String> = known.iter().map(Kind::to_string).collect();
            Err(PauseError::UnknownKind(kind.clone(), known.join(", ")))
        }
        _ => Ok(()),
    }
}

/// The pauses that last and apply to this kind, or to any if none is given.
///
/// # Errors
/// One sentence.
pub(super) async fn lasting(database: &Database, kind: Option<&Kind>) -> Result<Vec<Pause>, Unknown> {
    let read = database.run(async |connection| closing_pauses::current(connection, kind).await);
    read.await.map_err(|error| one_line(&error))
}

/// The pauses that last, and the newest `ended` of those that are over.
///
/// # Errors
/// [`PauseError::Database`].
pub async fn list(database: &Database, ended: i64) -> Result<Pauses, PauseError> {
    let read = database.run(async |connection| {
        let lasting = closing_pauses::current(connection, None).await?;
        Ok(Pauses { lasting, ended: closing_pauses::ended(connection, None, None, ended).await? })
    });
    read.await.map_err(|error| unavailable(&error))
}

/// Pauses closing, of all kinds if none is given.
///
/// # Errors
/// [`PauseError::Database`].
pub async fn pause(database: &Database, kind: Option<&Kind>, reason: &str, who: &str) -> Result<Paused, PauseError> {
    let work = database.run(async |connection| {
        let began = closing_pauses::begin(connection, kind, PauseCause::Operator, reason, who).await?;
        Ok(Paused { began, pauses: closing_pauses::current(connection, kind).await? })
    });
    work.await.map_err(|error| unavailable(&error))
}

/// What is closed when the pause of this kind is ended, or every pause if no kind is given.
///
/// # Errors
/// [`PauseError::Database`]. What is not known of a kind is said in its place.
pub async fn due_at_resume(
    database: &Database,
    settings: &Settings,
    kind: Option<&Kind>,
) -> Result<Vec<DueAtResume>, PauseError> {
    let lasting = database.run(async |connection| closing_pauses::current(connection, None).await).await;
    let lasting = lasting.map_err(|error| unavailable(&error))?;
    let is_for = |pause: &Pause, of: &Kind| pause.kind.as_ref().is_none_or(|paused| paused == of.as_str());
    let (ends, stays): (Vec<&Pause>, Vec<&Pause>) =
        lasting.iter().partition(|pause| kind.is_none_or(|of| pause.kind.as_deref() == Some(of.as_str())));
    let mut due = Vec::new();
    for of in settings.all_kinds().iter().filter(|of| settings.orders_of(of).is_some()) {
        if ends.iter().any(|pause| is_for(pause, of)) && !stays.iter().any(|pause| is_for(pause, of)) {
            due.push(due_of(database, settings, of).await);
        }
    }
    Ok(due)
}

async fn due_of(database: &Database, settings: &Settings, kind: &Kind) -> DueAtResume {
    let (overdue, counted) = (overdue(database, settings, kind).await, last_woken(database, kind).await);
    let not_known = overdue.as_ref().err().or(counted.as_ref().err()).cloned();
    let (orders, is_at_least) = overdue.map_or((None, false), |(orders, is_at_least)| (Some(orders), is_at_least));
    let (woken, usual_paid_share, last_paid_in) = counted.unwrap_or_default();
    DueAtResume {
        kind: kind.to_string(),
        orders,
        is_at_least,
        woken: woken.orders(),
        woken_paid: woken.paid,
        usual_paid_share,
        last_paid_in,
        not_known,
    }
}

async fn overdue(database: &Database, settings: &Settings, kind: &Kind) -> Result<(u64, bool), Unknown> {
    let table = OrdersTable::open(database.clone(), settings, kind).await.map_err(|error| error.to_string())?;
    let found = table.overdue().await?;
    Ok((found.orders, found.is_at_least))
}

/// The last orders that alarms woke, their usual share of paid ones, and when one of them was last paid.
async fn last_woken(database: &Database, kind: &Kind) -> Result<(Woken, Option<f64>, Option<String>), Unknown> {
    let read = async |connection: &mut sqlx::PgConnection| {
        let now = minute_of(postgres::now(connection).await?);
        Ok((closing_minutes::read_since(connection, kind, now - KEPT_MINUTES).await?, now))
    };
    let (minutes, now) = database.run(read).await.map_err(|error: sqlx::Error| one_line(&error))?;
    let mut woken = Woken::default();
    for minute in minutes.iter().rev() {
        if woken.orders() < LAST_WOKEN {
            woken.add(&minute.woken);
        }
    }
    let last_paid = minutes.iter().rfind(|one| one.woken.paid > 0).map(begin_of);
    Ok((woken, Usual::of(&minutes, now).paid_share, last_paid))
}

fn begin_of(minute: &MinuteCounts) -> String {
    write_rfc3339(Timestamp::from_unix_micros(minute.minute * 60_000_000))
}

/// Ends the pause of this kind, or every pause if no kind is given. Without `yes` only if few orders are due.
///
/// # Errors
/// [`PauseError::Database`].
pub async fn resume(
    database: &Database,
    settings: &Settings,
    kind: Option<&Kind>,
    reason: Option<&str>,
    who: &str,
    yes: bool,
) -> Result<Resumed, PauseError> {
    let due = due_at_resume(database, settings, kind).await?;
    let needs_yes = !yes && needs_yes(&due);
    let work = database.run(async |connection| {
        let ended = if needs_yes { Vec::new() } else { closing_pauses::end(connection, kind, reason, who).await? };
        Ok((ended, closing_pauses::current(connection, kind).await?))
    });
    let (ended, still_paused) = work.await.map_err(|error| unavailable(&error))?;
    Ok(Resumed { needs_yes, due, ended, still_paused })
}

/// Refuses to close orders of this kind by hand while its closing is paused.
///
/// # Errors
/// [`PauseError::IsPaused`], or [`PauseError::Database`].
pub async fn refuse_while_paused(connections: &WarmConnections, kind: &Kind) -> Result<(), PauseError> {
    let read = async |connection: &mut sqlx::PgConnection| closing_pauses::current(connection, Some(kind)).await;
    let pauses = connections.run_on_latest(read).await.map_err(|error| unavailable(&error))?;
    match pauses.first() {
        Some(pause) => Err(PauseError::IsPaused(pause.sentence())),
        None => Ok(()),
    }
}

fn unavailable(error: &sqlx::Error) -> PauseError {
    let fix = match classify(error) {
        ErrorClass::Away => "",
        _ => "; the user of database.url needs SELECT, INSERT, UPDATE ON closing_pauses and INSERT ON event_outbox",
    };
    PauseError::Database(DatabaseError(format!("closing_pauses cannot be used: {}{fix}", one_line(error))))
}
