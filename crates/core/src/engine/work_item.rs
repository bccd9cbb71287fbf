//! An order that the engine is working on, and the batches in which orders go to the closers and come back.
//!
//! Data only: nothing is decided here.

use std::collections::HashMap;

use crate::alarm::{DeliveredAlarm, Receipt};
use crate::order::{CloseError, CloseResult, ClosedBy, OrderId, Timestamp};

/// An order that the worker is working on, with the alarm that brought it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkItem {
    /// As it was delivered, or made from the row that the sweep found.
    pub alarm: DeliveredAlarm,
    /// Decides whether there is a delivery to settle.
    pub origin: Origin,
    /// How often it was paused without going through the broker.
    pub pauses: u32,
    /// How often the database called it not due although it was due by the worker's clock.
    pub disagreements: u32,
    /// Since when it has been paused again and again.
    pub paused_since: Option<Timestamp>,
    /// Whether it may be rearmed although it circulates.
    pub has_token: bool,
}

impl WorkItem {
    pub(super) fn new(alarm: DeliveredAlarm, origin: Origin) -> Self {
        Self { alarm, origin, pauses: 0, disagreements: 0, paused_since: None, has_token: false }
    }

    /// Whether it was with a closer before. A message does not say so if the alarm went through the broker without a
    /// fault of its own.
    pub(super) fn was_tried(&self) -> bool {
        self.pauses > 0 || self.alarm.attempt > 0
    }
}

/// Where a work item comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A message; the receipt settles it.
    Delivered(Receipt),
    /// Its deadline was read from the database before it had passed.
    LookedAhead,
    /// The safety net found the order overdue.
    Swept,
}

/// Orders that one statement closes. An empty batch asks whether the database closes at all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// The path that the closed orders are recorded with: alarm, look-ahead or sweep.
    pub by: ClosedBy,
    /// At most `Policy::batch_size`. An order may occur twice, for two alarms.
    pub items: Vec<WorkItem>,
    /// The closer passes on only whether the statement waits; the engine needs the mode again when the batch is back.
    pub lock_mode: LockMode,
}

impl Batch {
    /// Whether its statement may wait for a lock on stock.
    #[must_use]
    pub fn waits_for_locks(&self) -> bool {
        self.lock_mode != LockMode::NoWait
    }
}

/// Whether a batch's statement waits for a lock on stock, and for which orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockMode {
    /// Orders whose stock is locked are reported as busy at once.
    NoWait,
    /// For orders that were not tried before.
    WaitFresh,
    /// For orders that are tried again and again.
    WaitRetried,
}

/// What a batch's statement returned for each order, or why it failed. An order without an entry is unknown.
pub type BatchResult = Result<HashMap<OrderId, CloseResult>, CloseError>;
