//! Pauses and resumes closing for an operator, of one kind or of all.
//!
//! Changes no order. Workers notice within about a second; what is with a closer at that moment is still closed.

use order_timeout_core::kind::Kind;
use serde::Serialize;

use crate::config::Settings;
use crate::postgres::closing_pauses::{self, EndedPause, Pause, PauseCause};
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{Database, DatabaseError, ErrorClass, classify, one_line};

/// What to do while closing is paused: a sentence without its end.
pub const HOW_TO_RESUME: &str =
    "remove the cause for which closing was paused, then `order-timeout resume --who NAME --why TEXT`";

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

/// Pauses after a request to resume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct Resumed {
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

/// Ends the pause of this kind, or every pause if no kind is given.
///
/// # Errors
/// [`PauseError::Database`].
pub async fn resume(
    database: &Database,
    kind: Option<&Kind>,
    reason: Option<&str>,
    who: &str,
) -> Result<Resumed, PauseError> {
    let work = database.run(async |connection| {
        let ended = closing_pauses::end(connection, kind, reason, who).await?;
        Ok(Resumed { ended, still_paused: closing_pauses::current(connection, kind).await? })
    });
    work.await.map_err(|error| unavailable(&error))
}

/// Refuses to close orders of this kind by hand while its closing is paused.
///
/// # Errors
/// [`PauseError::IsPaused`], or [`PauseError::Database`].
pub async fn refuse_while_paused(database: &Database, kind: &Kind) -> Result<(), PauseError> {
    refuse(database.run(async |connection| closing_pauses::current(connection, Some(kind)).await).await)
}

/// The same on a closer's connections, between two of its batches.
///
/// # Errors
/// As of [`refuse_while_paused`].
pub async fn refuse_batch_while_paused(connections: &WarmConnections, kind: &Kind) -> Result<(), PauseError> {
    refuse(connections.run_on_latest(async |connection| closing_pauses::current(connection, Some(kind)).await).await)
}

fn refuse(pauses: Result<Vec<Pause>, sqlx::Error>) -> Result<(), PauseError> {
    match pauses.map_err(|error| unavailable(&error))?.first() {
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
