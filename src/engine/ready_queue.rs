//! Where work items wait for a batch to fill.
//!
//! Pure bookkeeping: what waits since when. What is closed next is decided by the engine.

use std::collections::VecDeque;
use std::time::Duration;

use super::WorkItem;
use crate::order::Timestamp;

/// Work items that are due and wait for a batch to fill.
#[derive(Debug, Default)]
pub(super) struct ReadyQueue {
    items: VecDeque<(WorkItem, Timestamp)>,
}

impl ReadyQueue {
    pub fn push(&mut self, item: WorkItem, now: Timestamp) {
        self.items.push_back((item, now));
    }

    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// No item can have arrived later than now.
    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        for (_, arrived) in &mut self.items {
            *arrived = now.min(*arrived);
        }
    }

    /// When the longest-waiting item arrived.
    pub fn since(&self) -> Option<Timestamp> {
        self.items.front().map(|(_, arrived)| *arrived)
    }

    /// A full batch is ready at once, a smaller one after `linger`.
    pub fn ready_at(&self, batch_size: usize, linger: Duration) -> Option<Timestamp> {
        let linger = if self.items.len() >= batch_size { Duration::ZERO } else { linger };
        Some(self.since()? + linger)
    }

    pub fn take(&mut self, batch_size: usize) -> Vec<WorkItem> {
        let size = self.items.len().min(batch_size);
        self.items.drain(..size).map(|(item, _)| item).collect()
    }

    /// Puts items back to the front, where they have been since `since`.
    pub fn put_back(&mut self, items: Vec<WorkItem>, since: Timestamp) {
        for item in items.into_iter().rev() {
            self.items.push_front((item, since));
        }
    }
}
