//! Who goes to a closer next: full batches at once, small ones after a linger, and what failed before behind the rest.
//!
//! Pure, like the whole desk. Only picks cases; what becomes of them is decided elsewhere.

use std::time::Duration;

use super::{Batch, Case, Desk, Lingering, Wait};
use crate::order::{ClosedBy, Moment};

/// How many parts a failed batch is taken into. Ten: an order that fails alone among eight hundred is found in three
/// rounds, and eight hundred that all fail cost little more than one statement each.
const PARTS: usize = 10;

/// How long whoever has an order, or its article, is left to finish with it: mostly a statement of some milliseconds.
const LEFT_TO_FINISH: Duration = Duration::from_millis(25);

/// The queues a batch may come from.
#[derive(Debug, Clone, Copy)]
enum Source {
    Fresh,
    Late,
    Overdue,
    Busy,
    Hurried,
    Again,
    Parts,
}

impl Source {
    /// Whether what waits there was tried before.
    fn is_trouble(self) -> bool {
        match self {
            // What waited for a lock in vain is as good as fresh: most of it needs no lock, and it does not wait again.
            Self::Fresh | Self::Late | Self::Overdue | Self::Busy | Self::Hurried => false,
            Self::Again | Self::Parts => true,
        }
    }
}

impl Desk {
    /// What a closer takes now, if one is free and anything is ready.
    pub(super) fn next_batch(&mut self, now: Moment) -> Option<Batch> {
        let batch = match self.outage.ask_again_at() {
            // One closer asks whether the database is back; the others wait for its answer.
            Some(ask_again_at) if now < ask_again_at || !self.closers_are_idle() || self.draining => return None,
            Some(_) => self.longest_waiting().map_or_else(empty_batch, |source| self.take_from(source, now)),
            None => {
                let ready = |source: &Source| self.source_ready_at(*source).is_some_and(|at| at <= now);
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
    pub(super) fn batch_ready_at(&self) -> Option<Moment> {
        match self.outage.ask_again_at() {
            Some(ask_again_at) => (self.closers_are_idle() && !self.draining).then_some(ask_again_at),
            None => self.sources().into_iter().filter_map(|source| self.source_ready_at(source)).min(),
        }
    }

    /// Trouble that has waited long may take the last closer, but not twice in a row while others wait: it is older than
    /// they are for as long as there is much of it, and they would wait until all of it was tried.
    fn gives_way(&self, source: Source) -> bool {
        source.is_trouble() && self.idle_closers == 1 && self.trouble_had_last_closer
    }

    fn sources(&self) -> [Source; 7] {
        use Source::{Again, Busy, Fresh, Hurried, Late, Overdue, Parts};
        [Fresh, Late, Overdue, Busy, Hurried, Again, Parts]
    }

    fn longest_waiting(&self) -> Option<Source> {
        let waiting = self.sources().into_iter().filter_map(|source| Some((self.since(source)?, source)));
        waiting.min_by_key(|(since, _)| *since).map(|(_, source)| source)
    }

    fn since(&self, source: Source) -> Option<Moment> {
        match source {
            Source::Fresh => self.fresh.since(),
            Source::Late => self.late.since(),
            Source::Overdue => self.overdue.since(),
            Source::Busy => self.busy.since(),
            Source::Hurried => self.hurried.front().map(|(_, since)| *since),
            Source::Again => self.again.since(),
            Source::Parts => self.parts.front().map(|(_, since)| *since),
        }
    }

    /// When a closer may take from here; `None` while nobody waits there or no closer is free for it.
    fn source_ready_at(&self, source: Source) -> Option<Moment> {
        let (size, linger) = (self.policy.batch_size, self.policy.linger);
        match source {
            _ if self.idle_closers == 0 => None,
            Source::Fresh => self.fresh.ready_at(size, linger),
            Source::Late => self.late.ready_at(size, linger),
            Source::Overdue => self.overdue.ready_at(size, Duration::ZERO),
            // Not sooner where they are many: all that they wait for is that somebody finishes.
            Source::Busy => self.busy.ready_at(usize::MAX, LEFT_TO_FINISH),
            Source::Hurried => self.since(Source::Hurried),
            Source::Again => self.trouble_ready_at(self.again.ready_at(size, linger)),
            Source::Parts => self.trouble_ready_at(self.since(Source::Parts)),
        }
    }

    /// What was tried before leaves one closer to the rest, so that trouble does not delay them; but it does not wait
    /// for that for ever.
    fn trouble_ready_at(&self, ready_at: Option<Moment>) -> Option<Moment> {
        if self.spares_one() { ready_at } else { Some(ready_at? + self.policy.longest_while_overdue()) }
    }

    /// Whether whoever takes a closer now leaves one to the others. Where there is but one, nothing can be left.
    fn spares_one(&self) -> bool {
        self.idle_closers > usize::from(self.policy.closers > 1)
    }

    fn take_from(&mut self, source: Source, now: Moment) -> Batch {
        let size = self.policy.batch_size;
        let since = self.since(source).unwrap_or(now);
        match source {
            Source::Fresh => Batch { by: ClosedBy::Alarm, wait: self.wait_of_fresh(now), cases: self.fresh.take(size) },
            Source::Hurried => self.hurried.pop_front().map_or_else(empty_batch, |(batch, _)| batch),
            Source::Late => {
                Batch { by: ClosedBy::Alarm, wait: self.wait_of_late(&self.late, now), cases: self.late.take(size) }
            }
            Source::Overdue => Batch {
                by: ClosedBy::Sweep,
                wait: self.wait_of_late(&self.overdue, now),
                cases: self.overdue.take(size),
            },
            Source::Busy => self.take_busy(size, since, now),
            Source::Again => {
                let cases = self.again.take(size);
                let (batch, rest) = self.who_goes(ClosedBy::Alarm, cases, now);
                self.again.put_back(rest, since);
                batch
            }
            Source::Parts => {
                let Some((part, _)) = self.parts.pop_front() else { return empty_batch() };
                let (batch, rest) = self.who_goes(part.by, part.cases, now);
                if !rest.is_empty() {
                    self.parts.push_front((Batch { by: part.by, cases: rest, wait: Wait::Not }, since));
                }
                batch
            }
        }
    }

    fn wait_of_fresh(&self, now: Moment) -> Wait {
        if self.patience.is_with_fresh(now) { Wait::Fresh } else { Wait::Not }
    }

    /// Late already, so none of these waits with somebody whose article is locked: tried at once, who is free is closed,
    /// and only who is not comes back to wait. But of more than one batch the next one is in as much of a hurry, and two
    /// that do not wait get in each other's way: such a statement has its articles locked from its beginning, and of one
    /// article the other would close nothing.
    fn wait_of_late(&self, late: &Lingering, now: Moment) -> Wait {
        if late.len() > self.policy.batch_size { self.wait_of_fresh(now) } else { Wait::Not }
    }

    /// Whoever was busy once goes first, and without waiting: mostly another worker was at it for some milliseconds. The
    /// others may be of an article that is never free.
    fn take_busy(&mut self, size: usize, since: Moment, now: Moment) -> Batch {
        let (once, oftener): (Vec<Case>, Vec<Case>) =
            self.busy.take(size).into_iter().partition(|case| case.pauses == 1);
        let (batch, rest) = if once.is_empty() {
            self.who_goes(ClosedBy::Sweep, oftener, now)
        } else {
            (Batch { by: ClosedBy::Sweep, cases: once, wait: Wait::Not }, oftener)
        };
        self.busy.put_back(rest, since);
        batch
    }

    /// Of those who come again and again, who goes together now, and who stays. They wait for locks only where that leaves
    /// a closer to the rest, if there are several.
    fn who_goes(&self, by: ClosedBy, mut cases: Vec<Case>, now: Moment) -> (Batch, Vec<Case>) {
        if self.patience.is_with_others(now) && self.spares_one() {
            let waiting = self.patience.take_from(&mut cases, now);
            if !waiting.is_empty() {
                return (Batch { by, cases: waiting, wait: Wait::Again }, cases);
            }
        }
        (Batch { by, cases, wait: Wait::Not }, Vec::new())
    }

    /// In batches of their own: most likely they fail again, and in a batch with others they would take those apart.
    pub(super) fn try_again_apart(&mut self, cases: Vec<Case>, now: Moment) {
        self.wait_in_parts(ClosedBy::Sweep, cases, self.policy.batch_size, now);
    }

    /// Somebody in it cannot be closed: its parts are tried one by one, behind whatever waits already.
    pub(super) fn take_apart(&mut self, batch: Batch, now: Moment) {
        let size = batch.cases.len().div_ceil(PARTS);
        self.wait_in_parts(batch.by, batch.cases, size, now);
    }

    fn wait_in_parts(&mut self, by: ClosedBy, cases: Vec<Case>, size: usize, now: Moment) {
        let mut cases = cases.into_iter().peekable();
        while cases.peek().is_some() {
            let part = cases.by_ref().take(size).collect();
            self.parts.push_back((Batch { by, cases: part, wait: Wait::Not }, now));
        }
    }
}

fn empty_batch() -> Batch {
    Batch { by: ClosedBy::Alarm, cases: Vec::new(), wait: Wait::Not }
}
