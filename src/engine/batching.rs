//! Who goes to a closer next: full batches at once, small ones after a linger, and what failed before behind the rest.
//!
//! Pure, like the whole engine. Only picks items; what becomes of them is decided elsewhere.

use std::time::Duration;

use super::{Batch, Engine, LockMode, ReadyQueue, WorkItem};
use crate::order::{ClosedBy, Timestamp};

/// How many split_batches a failed batch is taken into. Ten: an order that fails alone among eight hundred is found in three
/// rounds, and eight hundred that all fail cost little more than one statement each.
const PARTS: usize = 10;

/// How long whoever has an order, or its article, is left to finish with it: mostly a statement of some milliseconds.
const LEFT_TO_FINISH: Duration = Duration::from_millis(25);

/// The queues a batch may come from.
#[derive(Debug, Clone, Copy)]
enum ReadySource {
    Fresh,
    Late,
    Overdue,
    Busy,
    RetryNowait,
    Retries,
    SplitBatches,
}

impl ReadySource {
    /// Whether what waits there was tried before.
    fn is_trouble(self) -> bool {
        match self {
            // What waited for a lock in vain is as good as fresh: most of it needs no lock, and it does not wait again.
            Self::Fresh | Self::Late | Self::Overdue | Self::Busy | Self::RetryNowait => false,
            Self::Retries | Self::SplitBatches => true,
        }
    }
}

impl Engine {
    /// What a closer takes now, if one is free and anything is ready.
    pub(super) fn next_batch(&mut self, now: Timestamp) -> Option<Batch> {
        let batch = match self.availability.ask_again_at() {
            // One closer asks whether the database is back; the others wait for its answer.
            Some(ask_again_at) if now < ask_again_at || !self.closers_are_idle() || self.draining => return None,
            Some(_) => self.longest_waiting().map_or_else(empty_batch, |source| self.take_from(source, now)),
            None => {
                let ready = |source: &ReadySource| self.source_ready_at(*source).is_some_and(|at| at <= now);
                let ready = self.sources().into_iter().filter(ready);
                let source = ready.min_by_key(|source| (self.gives_way(*source), self.since(*source)))?;
                if self.idle_closers == 1 {
                    self.trouble_had_last_closer = source.is_trouble();
                }
                self.take_from(source, now)
            }
        };
        self.idle_closers -= 1;
        Some(batch)
    }

    /// When there is a batch for a closer even if no news comes.
    pub(super) fn batch_ready_at(&self) -> Option<Timestamp> {
        match self.availability.ask_again_at() {
            Some(ask_again_at) => (self.closers_are_idle() && !self.draining).then_some(ask_again_at),
            None => self.sources().into_iter().filter_map(|source| self.source_ready_at(source)).min(),
        }
    }

    /// ErrorClass that has waited long may take the last closer, but not twice in a row while others wait: it is older than
    /// they are for as long as there is much of it, and they would wait until all of it was tried.
    fn gives_way(&self, source: ReadySource) -> bool {
        source.is_trouble() && self.idle_closers == 1 && self.trouble_had_last_closer
    }

    fn sources(&self) -> [ReadySource; 7] {
        use ReadySource::{Busy, Fresh, Late, Overdue, Retries, RetryNowait, SplitBatches};
        [Fresh, Late, Overdue, Busy, RetryNowait, Retries, SplitBatches]
    }

    fn longest_waiting(&self) -> Option<ReadySource> {
        let waiting = self.sources().into_iter().filter_map(|source| Some((self.since(source)?, source)));
        waiting.min_by_key(|(since, _)| *since).map(|(_, source)| source)
    }

    fn since(&self, source: ReadySource) -> Option<Timestamp> {
        match source {
            ReadySource::Fresh => self.fresh.since(),
            ReadySource::Late => self.late.since(),
            ReadySource::Overdue => self.overdue.since(),
            ReadySource::Busy => self.busy.since(),
            ReadySource::RetryNowait => self.retry_nowait.front().map(|(_, since)| *since),
            ReadySource::Retries => self.retries.since(),
            ReadySource::SplitBatches => self.split_batches.front().map(|(_, since)| *since),
        }
    }

    /// When a closer may take from here; `None` while nobody waits there or no closer is free for it.
    fn source_ready_at(&self, source: ReadySource) -> Option<Timestamp> {
        let (size, linger) = (self.policy.batch_size, self.policy.linger);
        match source {
            _ if self.idle_closers == 0 => None,
            ReadySource::Fresh => self.fresh.ready_at(size, linger),
            ReadySource::Late => self.late.ready_at(size, linger),
            ReadySource::Overdue => self.overdue.ready_at(size, Duration::ZERO),
            // Not sooner where they are many: all that they wait for is that somebody finishes.
            ReadySource::Busy => self.busy.ready_at(usize::MAX, LEFT_TO_FINISH),
            ReadySource::RetryNowait => self.since(ReadySource::RetryNowait),
            ReadySource::Retries => self.trouble_ready_at(self.retries.ready_at(size, linger)),
            ReadySource::SplitBatches => self.trouble_ready_at(self.since(ReadySource::SplitBatches)),
        }
    }

    /// What was tried before leaves one closer to the rest, so that trouble does not delay them; but it does not wait
    /// for that for ever.
    fn trouble_ready_at(&self, ready_at: Option<Timestamp>) -> Option<Timestamp> {
        if self.spares_one() { ready_at } else { Some(ready_at? + self.policy.longest_while_overdue()) }
    }

    /// Whether whoever takes a closer now leaves one to the others. Where there is but one, nothing can be left.
    fn spares_one(&self) -> bool {
        self.idle_closers > usize::from(self.policy.closers > 1)
    }

    fn take_from(&mut self, source: ReadySource, now: Timestamp) -> Batch {
        let size = self.policy.batch_size;
        let since = self.since(source).unwrap_or(now);
        match source {
            ReadySource::Fresh => {
                Batch { by: ClosedBy::Alarm, wait: self.wait_of_fresh(now), items: self.fresh.take(size) }
            }
            ReadySource::RetryNowait => self.retry_nowait.pop_front().map_or_else(empty_batch, |(batch, _)| batch),
            ReadySource::Late => {
                Batch { by: ClosedBy::Alarm, wait: self.wait_of_late(&self.late, now), items: self.late.take(size) }
            }
            ReadySource::Overdue => Batch {
                by: ClosedBy::Sweep,
                wait: self.wait_of_late(&self.overdue, now),
                items: self.overdue.take(size),
            },
            ReadySource::Busy => self.take_busy(size, since, now),
            ReadySource::Retries => {
                let items = self.retries.take(size);
                let (batch, rest) = self.who_goes(ClosedBy::Alarm, items, now);
                self.retries.put_back(rest, since);
                batch
            }
            ReadySource::SplitBatches => {
                let Some((part, _)) = self.split_batches.pop_front() else { return empty_batch() };
                let (batch, rest) = self.who_goes(part.by, part.items, now);
                if !rest.is_empty() {
                    self.split_batches.push_front((Batch { by: part.by, items: rest, wait: LockMode::NoWait }, since));
                }
                batch
            }
        }
    }

    fn wait_of_fresh(&self, now: Timestamp) -> LockMode {
        if self.lock_waits.is_with_fresh(now) { LockMode::WaitFresh } else { LockMode::NoWait }
    }

    /// Late already, so none of these waits with somebody whose article is locked: tried at once, who is free is closed,
    /// and only who is not comes back to wait. But of more than one batch the next one is in as much of a hurry, and two
    /// that do not wait get in each other's way: such a statement has its articles locked from its beginning, and of one
    /// article the other would close nothing.
    fn wait_of_late(&self, late: &ReadyQueue, now: Timestamp) -> LockMode {
        if late.len() > self.policy.batch_size { self.wait_of_fresh(now) } else { LockMode::NoWait }
    }

    /// Whoever was busy once goes first, and without waiting: mostly another worker was at it for some milliseconds. The
    /// others may be of an article that is never free.
    fn take_busy(&mut self, size: usize, since: Timestamp, now: Timestamp) -> Batch {
        let (once, oftener): (Vec<WorkItem>, Vec<WorkItem>) =
            self.busy.take(size).into_iter().partition(|item| item.pauses == 1);
        let (batch, rest) = if once.is_empty() {
            self.who_goes(ClosedBy::Sweep, oftener, now)
        } else {
            (Batch { by: ClosedBy::Sweep, items: once, wait: LockMode::NoWait }, oftener)
        };
        self.busy.put_back(rest, since);
        batch
    }

    /// Of those who come again and again, who goes together now, and who stays. They wait for locks only where that leaves
    /// a closer to the rest, if there are several.
    fn who_goes(&self, by: ClosedBy, mut items: Vec<WorkItem>, now: Timestamp) -> (Batch, Vec<WorkItem>) {
        if self.lock_waits.is_with_others(now) && self.spares_one() {
            let waiting = self.lock_waits.take_from(&mut items, now);
            if !waiting.is_empty() {
                return (Batch { by, items: waiting, wait: LockMode::WaitRetried }, items);
            }
        }
        (Batch { by, items, wait: LockMode::NoWait }, Vec::new())
    }

    /// In batches of their own: most likely they fail again, and in a batch with others they would take those apart.
    pub(super) fn try_again_apart(&mut self, items: Vec<WorkItem>, now: Timestamp) {
        self.wait_in_parts(ClosedBy::Sweep, items, self.policy.batch_size, now);
    }

    /// Somebody in it cannot be closed: its split_batches are tried one by one, behind whatever waits already.
    pub(super) fn take_apart(&mut self, batch: Batch, now: Timestamp) {
        let size = batch.items.len().div_ceil(PARTS);
        self.wait_in_parts(batch.by, batch.items, size, now);
    }

    fn wait_in_parts(&mut self, by: ClosedBy, items: Vec<WorkItem>, size: usize, now: Timestamp) {
        let mut items = items.into_iter().peekable();
        while items.peek().is_some() {
            let part = items.by_ref().take(size).collect();
            self.split_batches.push_back((Batch { by, items: part, wait: LockMode::NoWait }, now));
        }
    }
}

fn empty_batch() -> Batch {
    Batch { by: ClosedBy::Alarm, items: Vec::new(), wait: LockMode::NoWait }
}
