//! Where items wait on the engine: for a batch to fill, or for a pause to end.
//!
//! Pure bookkeeping: who waits since when. Who goes first is decided by the engine.

use std::collections::VecDeque;
use std::time::Duration;

use super::WorkItem;
use crate::order::Timestamp;

/// Those who are due and wait for a batch to fill.
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

    /// Nobody has come later than now.
    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        for (_, came) in &mut self.items {
            *came = now.min(*came);
        }
    }

    /// When the longest-waiting of them came.
    pub fn since(&self) -> Option<Timestamp> {
        self.items.front().map(|(_, came)| *came)
    }

    /// A full batch at once, a smaller one after `linger`.
    pub fn ready_at(&self, batch_size: usize, linger: Duration) -> Option<Timestamp> {
        let linger = if self.items.len() >= batch_size { Duration::ZERO } else { linger };
        Some(self.since()? + linger)
    }

    pub fn take(&mut self, batch_size: usize) -> Vec<WorkItem> {
        let size = self.items.len().min(batch_size);
        self.items.drain(..size).map(|(item, _)| item).collect()
    }

    /// To the front again, where they have been since then.
    pub fn put_back(&mut self, items: Vec<WorkItem>, since: Timestamp) {
        for item in items.into_iter().rev() {
            self.items.push_front((item, since));
        }
    }
}
