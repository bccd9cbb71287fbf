//! Which work items go to a closer next: full batches at once, small ones after a linger, and what failed before behind
//! the rest.
//!
//! Pure, like the whole engine. Only picks items; what happens to them is decided elsewhere.

use std::time::Duration;

use super::ready_queues::{ReadyQueue, ReadySource};
use super::{Batch, Engine, LockMode, WorkItem};
use crate::order::{ClosedBy, Timestamp};

/// How many parts a failed batch is split into. Ten: an order that fails alone among eight hundred is found in three
/// rounds, and eight hundred that all fail cost little more than one statement each.
const SPLIT_INTO: usize = 10;

/// How long the session that has locked an order, or its article, gets to finish: mostly a statement of some
/// milliseconds.
const BUSY_PAUSE: Duration = Duration::from_millis(25);

impl Engine {
    /// What a closer takes now, if one is free and anything is ready.
    pub(super) fn next_batch(&mut self, now: Timestamp) -> Option<Batch> {
        let room = self.brake.room();
        if self.is_paused() || room == 0 {
            return None;
        }
        let batch = match self.availability.probe_at() {
            // One closer asks whether the database is back; the others wait for its result.
            Some(probe_at) if now < probe_at || !self.closers_are_idle() || self.draining => return None,
            Some(_) => {
                self.ready.longest_waiting().map_or_else(empty_batch, |source| self.take_from(source, room, now))
            }
            None => {
                let ready = |source: &ReadySource| self.source_ready_at(*source).is_some_and(|at| at <= now);
                // An order that was read ahead is known to be due. Alarms may be a flood for orders that do not exist, most
                // likely those that came after their deadlines; if they are not, they are late already.
                let looked_ahead = ready(&ReadySource::LookedAhead);
                let timely = looked_ahead || ready(&ReadySource::Fresh);
                let late_has_waited = self.late_has_waited_at().is_some_and(|at| at <= now);
                let waits = |source| match source {
                    ReadySource::Fresh => looked_ahead && self.may_be_flooded(),
                    ReadySource::Late => timely && !late_has_waited,
                    _ => false,
                };
                let ready = ReadySource::ALL.into_iter().filter(ready);
                let source =
                    ready.min_by_key(|source| (waits(*source), self.yields(*source), self.ready.since(*source)))?;
                if self.idle_closers == 1 {
                    self.retries_had_last_closer = source.is_retry();
                }
                if source == ReadySource::Late {
                    self.late_taken_at = Some(now);
                }
                self.take_from(source, room, now)
            }
        };
        self.idle_closers -= 1;
        self.brake.note_out(&batch);
        Some(batch)
    }

    /// When there is a batch for a closer even without another input.
    pub(super) fn batch_ready_at(&self) -> Option<Timestamp> {
        // With the result of what is out, or with the next limits, there is room again.
        if self.is_paused() || self.brake.room() == 0 {
            return None;
        }
        match self.availability.probe_at() {
            Some(probe_at) => (self.closers_are_idle() && !self.draining).then_some(probe_at),
            None => ReadySource::ALL.into_iter().filter_map(|source| self.source_ready_at(source)).min(),
        }
    }

    /// Retries that have waited long may take the last closer, but not twice in a row while others wait: as long as
    /// there are many of them they are older than the others, which would wait until all of them were tried.
    fn yields(&self, source: ReadySource) -> bool {
        source.is_retry() && self.idle_closers == 1 && self.retries_had_last_closer
    }

    /// When a closer may take from this queue; `None` while it is empty or no closer is free for it.
    fn source_ready_at(&self, source: ReadySource) -> Option<Timestamp> {
        let (size, linger) = (self.policy.batch_size, self.policy.linger);
        match source {
            _ if self.idle_closers == 0 => None,
            ReadySource::Fresh => self.ready.fresh.ready_at(size, linger),
            ReadySource::LookedAhead => self.ready.looked_ahead.ready_at(size, linger),
            // What falls due next finds a closer, however many alarms came late.
            ReadySource::Late if self.may_be_flooded() && !self.leaves_a_closer() => self.late_has_waited_at(),
            ReadySource::Late => self.ready.late.ready_at(size, linger),
            ReadySource::Overdue => self.ready.overdue.ready_at(size, Duration::ZERO),
            // Not sooner for a full batch: all of them wait only for another session to finish.
            ReadySource::Busy => self.ready.busy.ready_at(usize::MAX, BUSY_PAUSE),
            ReadySource::RetryNowait => self.ready.since(ReadySource::RetryNowait),
            ReadySource::Retries => self.retry_ready_at(self.ready.retries.ready_at(size, linger)),
            ReadySource::SplitBatches => self.retry_ready_at(self.ready.since(ReadySource::SplitBatches)),
        }
    }

    /// Retries leave one closer to the rest, so that failing orders do not delay the others; but they do not wait for
    /// that forever.
    fn retry_ready_at(&self, ready_at: Option<Timestamp>) -> Option<Timestamp> {
        if self.leaves_a_closer() { ready_at } else { Some(ready_at? + self.policy.longest_overdue_pause()) }
    }

    /// When late alarms no longer wait for timely ones: one batch of them goes however many there are.
    fn late_has_waited_at(&self) -> Option<Timestamp> {
        let since = self.ready.late.since()?;
        Some(self.late_taken_at.map_or(since, |taken| taken.max(since)) + self.policy.longest_overdue_pause())
    }

    /// Whether alarms arrive, and not in time.
    fn may_be_flooded(&self) -> bool {
        self.is_consuming && self.reads_ahead()
    }

    /// Whether another closer stays free if one is taken now. A single closer is always taken.
    fn leaves_a_closer(&self) -> bool {
        self.idle_closers > usize::from(self.policy.closers > 1)
    }

    /// `room`: how many orders the brake lets out.
    fn take_from(&mut self, source: ReadySource, room: usize, now: Timestamp) -> Batch {
        let size = self.policy.batch_size.min(room);
        let since = self.ready.since(source).unwrap_or(now);
        match source {
            ReadySource::Fresh => Batch {
                by: ClosedBy::Alarm,
                lock_mode: self.lock_mode_of_fresh(now),
                items: self.ready.fresh.take(size),
            },
            ReadySource::LookedAhead => Batch {
                by: ClosedBy::LookAhead,
                lock_mode: self.lock_mode_of_fresh(now),
                items: self.ready.looked_ahead.take(size),
            },
            ReadySource::RetryNowait => self.ready.retry_nowait.take(1).pop().unwrap_or_else(empty_batch),
            ReadySource::Late => Batch {
                by: ClosedBy::Alarm,
                lock_mode: self.lock_mode_of_late(&self.ready.late, now),
                items: self.ready.late.take(size),
            },
            ReadySource::Overdue => Batch {
                by: ClosedBy::Sweep,
                lock_mode: self.lock_mode_of_late(&self.ready.overdue, now),
                items: self.ready.overdue.take(size),
            },
            ReadySource::Busy => self.take_busy(size, since, now),
            ReadySource::Retries => {
                let items = self.ready.retries.take(size);
                let (batch, rest) = self.choose_retries(ClosedBy::Alarm, items, now);
                self.ready.retries.put_back(rest, since);
                batch
            }
            ReadySource::SplitBatches => {
                let Some(part) = self.ready.split_batches.take(1).pop() else { return empty_batch() };
                let (batch, rest) = self.choose_retries(part.by, part.items, now);
                if !rest.is_empty() {
                    let rest = Batch { by: part.by, items: rest, lock_mode: LockMode::NoWait };
                    self.ready.split_batches.put_back(vec![rest], since);
                }
                batch
            }
        }
    }

    fn lock_mode_of_fresh(&self, now: Timestamp) -> LockMode {
        if self.lock_waits.fresh_may_wait(now) { LockMode::WaitFresh } else { LockMode::NoWait }
    }

    /// The orders are late already, so none of them waits for another's lock: tried at once, every order without a lock
    /// is closed, and only the locked ones come back to wait. But if there is more than one batch, the next one is as
    /// urgent, and two batches that do not wait interfere with each other: such a statement locks its articles from its
    /// beginning, and of an article that both need the other would close nothing.
    fn lock_mode_of_late(&self, late: &ReadyQueue, now: Timestamp) -> LockMode {
        if late.len() > self.policy.batch_size { self.lock_mode_of_fresh(now) } else { LockMode::NoWait }
    }

    /// Orders that were busy once go first, and without waiting: mostly another worker had them for some milliseconds.
    /// The others may need an article that is always locked.
    fn take_busy(&mut self, size: usize, since: Timestamp, now: Timestamp) -> Batch {
        let (once, repeatedly): (Vec<WorkItem>, Vec<WorkItem>) =
            self.ready.busy.take(size).into_iter().partition(|item| item.pauses == 1);
        let (batch, rest) = if once.is_empty() {
            self.choose_retries(ClosedBy::Sweep, repeatedly, now)
        } else {
            (Batch { by: ClosedBy::Sweep, items: once, lock_mode: LockMode::NoWait }, repeatedly)
        };
        self.ready.busy.put_back(rest, since);
        batch
    }

    /// Of items that are tried again and again, picks those that go together now, and returns the rest. They wait for
    /// locks only if that leaves a closer to the others, where there are several closers.
    fn choose_retries(&self, by: ClosedBy, mut items: Vec<WorkItem>, now: Timestamp) -> (Batch, Vec<WorkItem>) {
        if self.lock_waits.retries_may_wait(now) && self.leaves_a_closer() {
            let chosen = self.lock_waits.take_from(&mut items, now);
            if !chosen.is_empty() {
                return (Batch { by, items: chosen, lock_mode: LockMode::WaitRetried }, items);
            }
        }
        (Batch { by, items, lock_mode: LockMode::NoWait }, Vec::new())
    }

    /// Queues orders that failed before in batches of their own: they will most likely fail again, and would make a
    /// batch that they share with others fail.
    pub(super) fn queue_failed_before(&mut self, items: Vec<WorkItem>, now: Timestamp) {
        self.queue_in_parts(ClosedBy::Sweep, items, self.policy.batch_size, now);
    }

    /// An order in the batch cannot be closed: its parts are tried one by one, behind what waits already.
    pub(super) fn split(&mut self, batch: Batch, now: Timestamp) {
        let size = batch.items.len().div_ceil(SPLIT_INTO);
        self.queue_in_parts(batch.by, batch.items, size, now);
    }

    fn queue_in_parts(&mut self, by: ClosedBy, items: Vec<WorkItem>, size: usize, now: Timestamp) {
        let mut items = items.into_iter().peekable();
        while items.peek().is_some() {
            let part = items.by_ref().take(size).collect();
            self.ready.split_batches.push(Batch { by, items: part, lock_mode: LockMode::NoWait }, now);
        }
    }
}

fn empty_batch() -> Batch {
    Batch { by: ClosedBy::Alarm, items: Vec::new(), lock_mode: LockMode::NoWait }
}
