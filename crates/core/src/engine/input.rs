//! What the engine is told.
//!
//! Data only: nothing is decided here.

use super::closing::ClosingInput;
use super::{Batch, BatchResult, Share};
use crate::alarm::{DeadLetter, Delivered, Rearm, Receipt};
use crate::brake::Limits;
use crate::order::SweptPage;

/// What happened, as it is reported to the engine.
#[derive(Debug)]
pub enum Input {
    /// A message has arrived in a consumer session.
    Delivered(Delivered),
    /// A closer has finished this batch: it is closed, or claimed.
    Closed(Batch, BatchResult),
    /// A step of the closing protocol has ended.
    Closing(ClosingInput),
    /// The broker has confirmed a new message for each of these alarms.
    Rearmed(Vec<Receipt>),
    /// Rearming these failed, and any other would fail: the broker is away or does not answer.
    NotRearmed(Vec<Rearm>),
    /// Rearming these failed for a reason of their own: their queue is missing or rejects messages.
    RearmRefused(Vec<Rearm>),
    /// These are committed in `parked_alarms`.
    Parked(Vec<Receipt>),
    /// Parking these failed, and any other would fail: the database is away.
    NotParked(Vec<(DeadLetter, Receipt)>),
    /// Parking these failed for a reason of their own: the database rejects their rows.
    ParkRefused(Vec<(DeadLetter, Receipt)>),
    /// The database has returned this page of overdue orders.
    Swept(SweptPage),
    /// The query for overdue orders failed, for this reason.
    NotSwept(String),
    /// The share of orders that this worker reads ahead has changed.
    ShareChanged(Share),
    /// Closing is paused: by a person, or because the brake tripped. It is so until the next input says otherwise.
    ClosingPaused,
    /// Closing is not paused any more.
    ClosingResumed,
    /// How much may be closed until the next limits. Without any the brake is off.
    BrakeLimits(Limits),
    /// What was counted could not be shared with the other workers, or not be judged.
    BrakeNotJudged,
    /// The database's clock was read.
    ClockRead,
    /// The database's clock was set ahead: the alarms of what fell due meanwhile come late.
    ClockSetAhead,
    /// The database's clock could not be read, for this reason.
    ClockNotRead(String),
    /// The consumer session of this number is open.
    SessionOpened(u64),
    /// No consumer session is open: no alarm can be delivered.
    SessionEnded,
}
