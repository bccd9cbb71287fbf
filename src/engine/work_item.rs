//! An order that the engine is working on, and the batches in which orders go to the closers and come back.
//!
//! Data only: nothing is decided here.

use std::collections::HashMap;

use crate::alarm::{DeliveredAlarm, Receipt};
use crate::order::{CloseError, CloseResult, ClosedBy, OrderId, Timestamp};

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
