//! Where work items and batches wait for a closer.
//!
//! Pure bookkeeping: what waits since when. What is closed next is decided in `batching.rs`.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Batch, WorkItem};
use crate::order::Timestamp;

/// Work items that are due and wait for a batch to fill, or whole batches that are tried again, each with the time since
/// which it waits.
#[derive(Debug)]
pub(super) struct ReadyQueue<T = WorkItem> {
    items: VecDeque<(T, Timestamp)>,
}

impl<T> Default for ReadyQueue<T> {
    fn default() -> Self {
        Self { items: VecDeque::new() }
    }
}

impl<T> ReadyQueue<T> {
    pub fn push(&mut self, item: T, now: Timestamp) {
        self.items.push_back((item, now));
    }

    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// No item can have arrived later than now.
    fn clock_was_set_back(&mut self, now: Timestamp) {
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

    pub fn take(&mut self, batch_size: usize) -> Vec<T> {
        let size = self.items.len().min(batch_size);
        self.items.drain(..size).map(|(item, _)| item).collect()
    }

    /// Puts items back to the front, where they have been since `since`.
    pub fn put_back(&mut self, items: Vec<T>, since: Timestamp) {
        for item in items.into_iter().rev() {
            self.items.push_front((item, since));
        }
    }
}

/// The queues that a batch may come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadySource {
    Fresh,
    LookedAhead,
    Late,
    Overdue,
    Busy,
    RetryNowait,
    Retries,
    SplitBatches,
}

impl ReadySource {
    pub const ALL: [Self; 8] = [
        Self::Fresh,
        Self::LookedAhead,
        Self::Late,
        Self::Overdue,
        Self::Busy,
        Self::RetryNowait,
        Self::Retries,
        Self::SplitBatches,
    ];

    /// Whether the orders there failed before.
    pub const fn is_retry(self) -> bool {
        match self {
            // Batches that did not get a lock count as fresh: most of their orders need no lock, and they do not wait
            // again.
            Self::Fresh | Self::LookedAhead | Self::Late | Self::Overdue | Self::Busy | Self::RetryNowait => false,
            Self::Retries | Self::SplitBatches => true,
        }
    }
}

/// All of them, and what holds for each.
#[derive(Debug, Default)]
pub(super) struct ReadyQueues {
    /// Due, not yet tried.
    pub fresh: ReadyQueue,
    /// The same, without a delivery: read from the database before they were due.
    pub looked_ahead: ReadyQueue,
    /// The same, but delivered so late that the sweep finds these orders as well. Separate from `fresh`: while a batch
    /// waits for a lock, no other batch can close the orders in it.
    pub late: ReadyQueue,
    /// Found by the sweep, not yet tried.
    pub overdue: ReadyQueue,
    /// Found by the sweep, and locked by another session when they were tried. Separate from `overdue`: the other
    /// session may be a worker that cannot close them either, and they would make the batch that they share fail.
    pub busy: ReadyQueue,
    /// Batches that waited for a lock and did not get it: tried again whole, without waiting.
    pub retry_nowait: ReadyQueue<Batch>,
    /// Due, tried before.
    pub retries: ReadyQueue,
    /// Parts of batches that failed.
    pub split_batches: ReadyQueue<Batch>,
}

impl ReadyQueues {
    /// Since when the first of this queue waits; `None` if it is empty.
    pub fn since(&self, source: ReadySource) -> Option<Timestamp> {
        match source {
            ReadySource::Fresh => self.fresh.since(),
            ReadySource::LookedAhead => self.looked_ahead.since(),
            ReadySource::Late => self.late.since(),
            ReadySource::Overdue => self.overdue.since(),
            ReadySource::Busy => self.busy.since(),
            ReadySource::RetryNowait => self.retry_nowait.since(),
            ReadySource::Retries => self.retries.since(),
            ReadySource::SplitBatches => self.split_batches.since(),
        }
    }

    /// The queue whose first has waited longest.
    pub fn longest_waiting(&self) -> Option<ReadySource> {
        let waiting = ReadySource::ALL.into_iter().filter_map(|source| Some((self.since(source)?, source)));
        waiting.min_by_key(|(since, _)| *since).map(|(_, source)| source)
    }

    /// Overdue orders that the sweep found and no closer has taken yet.
    pub fn swept_len(&self) -> usize {
        self.overdue.len() + self.busy.len()
    }

    /// Whether due orders wait that were never tried, other than those that the sweep found overdue.
    pub fn has_fresh_alarms(&self) -> bool {
        self.fresh.len() + self.looked_ahead.len() + self.late.len() > 0
    }

    /// Nothing can have arrived later than now.
    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        let Self { fresh, looked_ahead, late, overdue, busy, retry_nowait, retries, split_batches } = self;
        [fresh, looked_ahead, late, overdue, busy, retries].into_iter().for_each(|queue| queue.clock_was_set_back(now));
        [retry_nowait, split_batches].into_iter().for_each(|queue| queue.clock_was_set_back(now));
    }

    /// Empties all of them.
    pub fn drain(&mut self) -> impl Iterator<Item = WorkItem> {
        let Self { fresh, looked_ahead, late, overdue, busy, retry_nowait, retries, split_batches } =
            std::mem::take(self);
        let items = [fresh, looked_ahead, late, overdue, busy, retries].into_iter().flat_map(|queue| queue.items);
        let batches = [retry_nowait, split_batches].into_iter().flat_map(|queue| queue.items);
        items.map(|(item, _)| item).chain(batches.flat_map(|(batch, _)| batch.items))
    }
}
