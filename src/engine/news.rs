//! What the engine hears and what it wants done, and the items and batches that go between it and the closers.
//!
//! Words only: nothing is decided here.

use std::collections::HashMap;

use crate::alarm::{DeadLetter, Delivered, DeliveredAlarm, Rearm, Receipt, Settlement};
use crate::order::{CloseError, CloseResult, ClosedBy, OrderId, SweepPage, SweptPage, Timestamp};

/// An order under way through the worker, with the alarm that speaks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkItem {
    pub alarm: DeliveredAlarm,
    pub origin: Origin,
    /// How often it was put back for a moment without going through the broker.
    pub pauses: u32,
    /// How often the database found it not due when it was, by our reckoning.
    pub disagreements: u32,
    /// Since when it is put back again and again.
    pub paused_since: Option<Timestamp>,
}

impl WorkItem {
    pub(super) fn new(alarm: DeliveredAlarm, origin: Origin) -> Self {
        Self { alarm, origin, pauses: 0, disagreements: 0, paused_since: None }
    }

    /// Whether it was with a closer already. Of one that went by way of the broker because nobody was to blame, its
    /// message does not tell.
    pub(super) fn was_tried(&self) -> bool {
        self.pauses > 0 || self.alarm.attempt > 0
    }
}

/// What brought a item here.
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
    pub items: Vec<WorkItem>,
    pub wait: LockMode,
}

impl Batch {
    /// Whether its statement may wait for a lock on stock.
    #[must_use]
    pub fn waits_for_locks(&self) -> bool {
        self.wait != LockMode::NoWait
    }
}

/// On whose behalf a batch's statement waits for a lock on stock, if it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockMode {
    NoWait,
    /// Of those that were never tried.
    WaitFresh,
    /// Of those who come again and again.
    WaitRetried,
}

/// What a batch's statement said of each order, or why it failed. An order without an entry is unknown.
pub type BatchResult = Result<HashMap<OrderId, CloseResult>, CloseError>;

/// What the engine hears.
#[derive(Debug)]
pub enum Input {
    Delivered(Delivered),
    /// A batch came back from a closer.
    Closed(Batch, BatchResult),
    /// These alarms stand confirmed in the broker under a new message.
    Rearmed(Vec<Receipt>),
    /// These do not, and no other would: the broker is away, or does not answer.
    NotRearmed(Vec<Rearm>),
    /// These do not, for a reason of their own: their queue is not there, or takes nothing.
    RearmRefused(Vec<Rearm>),
    /// These stand committed in `parked_alarms`.
    Parked(Vec<Receipt>),
    /// These do not, and no other would: the database is away.
    NotParked(Vec<(DeadLetter, Receipt)>),
    /// These do not, for a reason of their own: the database refuses their row.
    ParkRefused(Vec<(DeadLetter, Receipt)>),
    Swept(SweptPage),
    /// The database could not be asked for overdue orders.
    NotSwept,
    /// The consumer session of this number is open.
    SessionOpened(u64),
    /// No consumer session is open: no alarm can come.
    SessionEnded,
}

/// What the engine wants done.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Then report [`Input::Closed`].
    Close(Batch),
    /// Publish a fresh alarm each, then report [`Input::Rearmed`] for what is confirmed, and [`Input::NotRearmed`] or
    /// [`Input::RearmRefused`] for the rest.
    Rearm(Vec<Rearm>),
    /// Then report [`Input::Parked`] once committed, and [`Input::NotParked`] or [`Input::ParkRefused`] for the rest. No
    /// other is given out before all of it is reported.
    Park(Vec<(DeadLetter, Receipt)>),
    Settle(Vec<(Receipt, Settlement)>),
    /// Then report [`Input::Swept`] or [`Input::NotSwept`].
    Sweep(SweepPage),
}
