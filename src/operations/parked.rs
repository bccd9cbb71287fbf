//! Parked alarms: a page of them, sending them back to the workers, and dropping them.
//!
//! A row is deleted only after its new alarm is confirmed. What cannot be sent stays, with the reason. Who retried or
//! dropped them, and why, is recorded in the same transaction.

use order_timeout_amqp::envelope::{self, Route};
use order_timeout_amqp::publisher::ConfirmedPublisher;
use order_timeout_amqp::topology::Names;
use order_timeout_core::delay::Placement;
use order_timeout_core::message::{Alarm, MAX_BODY_BYTES};
use order_timeout_core::order::Timestamp;
use order_timeout_core::with_causes;
use serde::Serialize;
use uuid::Uuid;

use super::Page;
use crate::postgres::parked_alarms::{self, Parked};
use crate::postgres::selection::Selection;
use crate::postgres::{Database, DatabaseError, Operator, unusable};

/// Rows per page: bounds memory, and how much is published between two deletions.
const AT_ONCE: usize = 1_000;

/// Why parked alarms were not read or changed.
#[derive(Debug, thiserror::Error)]
pub enum ParkedError {
    /// A place that is gone.
    #[error("alarm {0} is no longer parked, so nothing can be listed after it; list from the beginning")]
    Gone(Uuid),
    /// The database.
    #[error(transparent)]
    Database(#[from] DatabaseError),
}

impl From<sqlx::Error> for ParkedError {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(unusable("parked alarms", &error))
    }
}

/// A page of the selected alarms, behind the alarm `after`.
///
/// # Errors
/// [`ParkedError`].
pub async fn list(
    database: &Database,
    selection: &Selection,
    after: Option<Uuid>,
    limit: i64,
) -> Result<Page<Parked>, ParkedError> {
    let after = match after {
        None => None,
        Some(id) => Some(parked_alarms::place_of(database, id).await?.ok_or(ParkedError::Gone(id))?),
    };
    let alarms = parked_alarms::list_after(database, selection, after, limit).await?;
    Ok(Page::of(alarms, limit, |last| last.id.to_string()))
}

/// The result of dropping the selected alarms.
#[derive(Debug, Default, Serialize, utoipa::ToSchema)]
pub struct Dropped {
    /// Their ids, as they were read at the start.
    #[serde(skip)]
    pub selected: Vec<Uuid>,
    /// How many are no longer parked because of this.
    pub dropped: u64,
}

/// Deletes the selected alarms. No order depends on them: the sweep closes it.
///
/// # Errors
/// [`ParkedError`]. Those of the pages before are then deleted.
pub async fn drop_parked(
    database: &Database,
    selection: &Selection,
    operator: &Operator,
) -> Result<Dropped, ParkedError> {
    let selected = parked_alarms::ids(database, selection).await?;
    let mut dropped = 0;
    for page in selected.chunks(AT_ONCE) {
        dropped += parked_alarms::drop_rows(database, page, operator).await?;
    }
    Ok(Dropped { selected, dropped })
}

/// The results for the selected alarms.
#[derive(Debug, Default, Serialize, utoipa::ToSchema)]
pub struct Retried {
    /// Their ids, as they were read at the start.
    #[serde(skip)]
    pub selected: Vec<Uuid>,
    /// How many were sent, and are no longer parked.
    #[serde(rename = "retried")]
    pub sent: usize,
    /// Those that stay parked.
    pub kept: Vec<Kept>,
}

/// An alarm that stays parked.
#[derive(Debug, Serialize, utoipa::ToSchema)]
pub struct Kept {
    /// Of its row.
    pub id: Uuid,
    /// One sentence.
    pub why: String,
}

/// Publishes the selected alarms into the inbox, and deletes the rows of those that are confirmed.
///
/// # Errors
/// [`ParkedError`]. Alarms of the page that was published last may then still have their rows; a second alarm does no harm.
pub async fn retry_parked(
    database: &Database,
    confirmed: &ConfirmedPublisher,
    names: &Names,
    selection: &Selection,
    operator: &Operator,
) -> Result<Retried, ParkedError> {
    // The ids are read once: an alarm that is kept must not be selected again.
    let selected = parked_alarms::ids(database, selection).await?;
    let (mut sent, mut kept) = (0, Vec::new());
    for page in selected.chunks(AT_ONCE) {
        let mut readable = Vec::new();
        for row in parked_alarms::list(database, &Selection::Ids(page.to_vec()), i64::MAX).await? {
            match readable_alarm(&row) {
                Ok(alarm) => readable.push((row.id, row.since, alarm)),
                Err(why) => kept.push(Kept { id: row.id, why }),
            }
        }
        let mut messages = Vec::with_capacity(readable.len());
        for (.., alarm) in &readable {
            let route = Route::to(&Placement::Inbox, &alarm.kind, names);
            // As of a new alarm.
            messages.push(envelope::address(alarm.clone().into(), route, Timestamp::now_by_local_clock()));
        }
        let results = confirmed.publish_all(messages).await;
        let mut published = Vec::new();
        for ((id, since, _), result) in readable.into_iter().zip(results) {
            match result {
                Ok(()) => published.push((id, since)),
                Err(fault) => kept.push(Kept { id, why: with_causes(&fault) }),
            }
        }
        sent += published.len();
        parked_alarms::drop_retried(database, &published, operator).await?;
    }
    Ok(Retried { selected, sent, kept })
}

fn readable_alarm(row: &Parked) -> Result<Alarm, String> {
    row.alarm().map_err(|fault| {
        // The row has only the beginning of a body that was too large; its parse error would be misleading.
        if row.body.len() >= MAX_BODY_BYTES { row.detail.clone() } else { fault.to_string() }
    })
}
