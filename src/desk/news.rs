//! What the desk hears and what it wants done, and the cases and batches that go between it and the closers.
//!
//! Words only: nothing is decided here.

use std::collections::HashMap;

use crate::alarm::{Alarm, ArmJob, Delivered, Parcel, Receipt, Settlement};
use crate::order::{CloseFault, ClosedBy, Finding, Moment, OrderId, SweepPage, SweptPage};

/// An order under way through the worker, with the alarm that speaks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    pub alarm: Alarm,
    pub origin: Origin,
    /// How often it was put back for a moment without going through the broker.
    pub pauses: u32,
    /// How often the database found it not due when it was, by our reckoning.
    pub disagreements: u32,
    /// Since when it is put back again and again.
    pub paused_since: Option<Moment>,
}

impl Case {
    pub(super) fn new(alarm: Alarm, origin: Origin) -> Self {
        Self { alarm, origin, pauses: 0, disagreements: 0, paused_since: None }
    }

    /// Whether it was with a closer already. Of one that went by way of the broker because nobody was to blame, its
    /// message does not tell.
    pub(super) fn was_tried(&self) -> bool {
        self.pauses > 0 || self.alarm.attempt > 0
    }
}

/// What brought a case here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A message; the receipt settles it.
    Delivered(Receipt),
    /// The safety net found the order overdue.
    Swept,
}

/// Orders to be closed by one statement. Without any it asks whether the database closes at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    pub by: ClosedBy,
    pub cases: Vec<Case>,
    pub wait: Wait,
}

impl Batch {
    /// Whether its statement may wait for a lock on stock.
    #[must_use]
    pub fn is_patient(&self) -> bool {
        self.wait != Wait::Not
    }
}

/// On whose behalf a batch's statement waits for a lock on stock, if it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    Not,
    /// Of those that were never tried.
    Fresh,
    /// Of those who come again and again.
    Again,
}

/// What a batch's statement said of each order, or why it failed. An order without an entry is unknown.
pub type Answer = Result<HashMap<OrderId, Finding>, CloseFault>;

/// What the desk hears.
#[derive(Debug)]
pub enum News {
    Delivered(Delivered),
    /// A batch came back from a closer.
    Closed(Batch, Answer),
    /// These alarms stand confirmed in the broker under a new message.
    Armed(Vec<Receipt>),
    /// These do not, and no other would: the broker is away, or does not answer.
    NotArmed(Vec<ArmJob>),
    /// These do not, for a reason of their own: their queue is not there, or takes nothing.
    ArmRefused(Vec<ArmJob>),
    /// These stand committed in `parked_alarms`.
    Parked(Vec<Receipt>),
    /// These do not, and no other would: the database is away.
    NotParked(Vec<(Parcel, Receipt)>),
    /// These do not, for a reason of their own: the database refuses their row.
    ParkRefused(Vec<(Parcel, Receipt)>),
    Swept(SweptPage),
    /// The database could not be asked for overdue orders.
    NotSwept,
    /// The consumer session of this number is open.
    SessionOpened(u64),
    /// No consumer session is open: no alarm can come.
    SessionEnded,
}

/// What the desk wants done.
#[derive(Debug, PartialEq, Eq)]
pub enum Errand {
    /// Then report [`News::Closed`].
    Close(Batch),
    /// Publish a fresh alarm each, then report [`News::Armed`] for what is confirmed, and [`News::NotArmed`] or
    /// [`News::ArmRefused`] for the rest.
    Arm(Vec<ArmJob>),
    /// Then report [`News::Parked`] once committed, and [`News::NotParked`] or [`News::ParkRefused`] for the rest. No
    /// other is given out before all of it is reported.
    Park(Vec<(Parcel, Receipt)>),
    Settle(Vec<(Receipt, Settlement)>),
    /// Then report [`News::Swept`] or [`News::NotSwept`].
    Sweep(SweepPage),
}
