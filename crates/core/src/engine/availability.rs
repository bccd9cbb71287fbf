//! The verdict on the database: it is unavailable, batch after batch fails for reasons that are hardly the orders' own,
//! its clock cannot be read, or the query for overdue orders fails.
//!
//! Pure, like the whole engine. Only records; which batches go out meanwhile is decided in `batching.rs`.

use std::collections::HashSet;
use std::time::Duration;

use super::{Batch, BatchResult, Policy};
use crate::order::{CloseError, CloseResult, OrderId, Outcome, Timestamp};

/// How long batch after batch may fail without a single close before the database counts as closing nothing.
const STALL_IS_OUTAGE_AFTER: Duration = Duration::from_secs(5);

/// How long a stall counts after the last failure: with nothing more to close, its end would go unnoticed. Longer if
/// one try may take longer than that.
const STALL_LIFETIME: Duration = Duration::from_secs(10);

/// How many orders must meet a lock or a timeout: a single one may wait for its own trigger.
const SEVERAL: usize = 2;

/// How many orders must be rejected: a few are at fault themselves, but if all that are tried are rejected, the tables
/// were changed.
const MANY: usize = 10;

/// How long the query for overdue orders may fail before the database counts as unavailable.
const LONGEST_UNSWEPT: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(super) struct Availability {
    outage: Option<Outage>,
    stalled: Option<Stalled>,
    rejected: Option<Rejected>,
    unswept: Option<Unswept>,
    /// Why the last reading of the database's clock failed.
    clock_fault: Option<String>,
}

/// Why the database is not usable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unavailable<'a> {
    /// It closes no due order, and the orders themselves are not the reason.
    ClosesNothing(&'a str),
    /// Its clock cannot be read; the last reading is carried forward.
    ClockNotRead(&'a str),
    /// The query for overdue orders has failed for some seconds.
    NotSwept(&'a str),
}

impl<'a> Unavailable<'a> {
    /// One sentence, with the server's own words.
    #[must_use]
    pub fn reason(self) -> &'a str {
        match self {
            Self::ClosesNothing(reason) | Self::ClockNotRead(reason) | Self::NotSwept(reason) => reason,
        }
    }
}

/// The query for overdue orders fails again and again: since when, last when, and why.
#[derive(Debug)]
struct Unswept {
    first: Timestamp,
    last: Timestamp,
    reason: String,
}

/// The database is unavailable: since when, and when it is probed next.
#[derive(Debug)]
struct Outage {
    since: Timestamp,
    probe_at: Timestamp,
    probes: u32,
    reason: String,
}

/// Orders meet locks or timeouts and none is closed: since when, when one did last, and which.
#[derive(Debug)]
struct Stalled {
    since: Timestamp,
    last: Timestamp,
    reason: String,
    orders: SampledIds,
}

/// Orders are rejected one by one and none is closed. This is no outage, and no worker reports itself unready for it:
/// in a quiet shop these may be all overdue orders, and a worker that starts beside them works like any other.
#[derive(Debug)]
struct Rejected {
    since: Timestamp,
    orders: SampledIds,
}

/// Ids of orders, up to [`MANY`].
#[derive(Debug, Default)]
struct SampledIds(HashSet<OrderId>);

impl SampledIds {
    fn add(&mut self, batch: &Batch) {
        for item in batch.items.iter().take(MANY - self.0.len()) {
            self.0.insert(item.alarm.order_id().clone());
        }
    }

    fn has(&self, orders: usize) -> bool {
        self.0.len() >= orders
    }
}

impl Stalled {
    fn is_current(&self, policy: &Policy, now: Timestamp) -> bool {
        now.since(self.last) < STALL_LIFETIME.max(2 * policy.longest_try)
    }

    fn is_an_outage(&self, policy: &Policy, now: Timestamp) -> bool {
        self.orders.has(SEVERAL) && self.last.since(self.since) >= STALL_IS_OUTAGE_AFTER && self.is_current(policy, now)
    }
}

impl Availability {
    /// Records a result. Returns whether it ends a time in which every order was rejected.
    pub fn note(&mut self, batch: &Batch, result: &BatchResult, policy: &Policy, now: Timestamp) -> bool {
        self.note_outage(result, policy, now);
        match result {
            // Only a close ends a stall. A batch without orders, or with orders that are paid or busy, only reads, and
            // is not stalled by what stalls commits.
            Ok(results) if results.values().any(is_a_close) => {
                self.stalled = None;
                let ended = self.rejected.take();
                return ended
                    .is_some_and(|ended| ended.orders.has(MANY) && now.since(ended.since) >= STALL_IS_OUTAGE_AFTER);
            }
            // Tried again at once without waiting: only then it is known whether the lock of a single article was the
            // reason.
            Err(CloseError::Locked(_)) if batch.waits_for_locks() => {}
            Err(CloseError::Locked(reason) | CloseError::Transient(reason) | CloseError::Unavailable(reason)) => {
                self.note_stall(batch, reason, policy, now);
            }
            // In a batch of several, it is not known yet which order is at fault.
            Err(CloseError::Rejected(_)) if batch.items.len() == 1 => {
                self.rejected
                    .get_or_insert_with(|| Rejected { since: now, orders: SampledIds::default() })
                    .orders
                    .add(batch);
            }
            Ok(_) | Err(CloseError::Rejected(_)) => {}
        }
        false
    }

    pub fn is_unavailable(&self) -> bool {
        self.outage.is_some()
    }

    /// When an unavailable database is probed next; `None` while it is available.
    pub fn probe_at(&self) -> Option<Timestamp> {
        self.outage.as_ref().map(|outage| outage.probe_at)
    }

    /// How long the database has been unavailable; `None` while it is available.
    pub fn unavailable_for(&self, now: Timestamp) -> Option<Duration> {
        self.outage.as_ref().map(|outage| now.since(outage.since))
    }

    /// Whether more than one order has met a lock or a timeout since the last close.
    pub fn stalls_several(&self) -> bool {
        self.stalled.as_ref().is_some_and(|stalled| stalled.orders.has(SEVERAL))
    }

    /// Why the database is not usable; `None` if it is. Locks and timeouts count if they hit too many orders to be the
    /// orders' own fault.
    pub fn verdict(&self, policy: &Policy, now: Timestamp) -> Option<Unavailable<'_>> {
        let stalled = self.stalled.as_ref().filter(|stalled| stalled.is_an_outage(policy, now));
        let closes_nothing =
            self.outage.as_ref().map(|outage| &outage.reason).or(stalled.map(|stalled| &stalled.reason));
        // With a long `sweep_every` it may have been a single failure, long ago.
        let unswept = self.unswept.as_ref().filter(|unswept| unswept.last.since(unswept.first) >= LONGEST_UNSWEPT);
        closes_nothing
            .map(|reason| Unavailable::ClosesNothing(reason))
            .or_else(|| self.clock_fault.as_deref().map(Unavailable::ClockNotRead))
            .or_else(|| unswept.map(|unswept| Unavailable::NotSwept(&unswept.reason)))
    }

    pub fn note_swept(&mut self) {
        self.unswept = None;
    }

    pub fn note_not_swept(&mut self, reason: String, now: Timestamp) {
        let first = self.unswept.take().map_or(now, |unswept| unswept.first);
        self.unswept = Some(Unswept { first, last: now, reason });
    }

    /// `None` if it was read.
    pub fn note_clock(&mut self, fault: Option<String>) {
        self.clock_fault = fault;
    }

    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        self.stalled = None;
        self.rejected = None;
        self.unswept = None;
        if let Some(outage) = &mut self.outage {
            outage.since = now.min(outage.since);
            outage.probe_at = now.min(outage.probe_at);
        }
    }

    fn note_outage(&mut self, result: &BatchResult, policy: &Policy, now: Timestamp) {
        let Err(CloseError::Unavailable(reason)) = result else {
            self.outage = None;
            return;
        };
        let (since, probes) = self.outage.take().map_or((now, 0), |outage| (outage.since, outage.probes + 1));
        let pause = policy.pause(probes).min(policy.longest_overdue_pause());
        self.outage = Some(Outage { since, probe_at: now + pause, probes, reason: reason.clone() });
    }

    fn note_stall(&mut self, batch: &Batch, reason: &str, policy: &Policy, now: Timestamp) {
        if batch.items.is_empty() {
            return;
        }
        let known = self.stalled.take().filter(|known| known.is_current(policy, now));
        let (since, mut orders) =
            known.map_or_else(|| (now, SampledIds::default()), |known| (known.since, known.orders));
        orders.add(batch);
        self.stalled = Some(Stalled { since, last: now, reason: reason.to_owned(), orders });
    }
}

fn is_a_close(result: &CloseResult) -> bool {
    result.as_ref().is_ok_and(|found| found.outcome == Outcome::Closed)
}
