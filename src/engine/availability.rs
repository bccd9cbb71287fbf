//! Whether the database closes anything: it is away, or batch after batch fails for reasons that are hardly its orders'.
//!
//! Pure, like the whole engine. Only takes note; who is asked meanwhile is decided in `batching.rs`.

use std::collections::HashSet;
use std::time::Duration;

use super::{Batch, BatchResult, Policy};
use crate::order::{CloseError, CloseResult, OrderId, Outcome, Timestamp};

/// How long batch after batch may fail, and none be closed, before the database is said to close nothing.
const LONGEST_STALL: Duration = Duration::from_secs(5);

/// With nothing more to close nobody finds out that something could be. Longer where a try may take longer than that.
const FORGETS_A_STALL_AFTER: Duration = Duration::from_secs(10);

/// So many orders must meet a lock or a timeout: of one alone it may be its own trigger that waits.
const SEVERAL: usize = 2;

/// So many must be refused: of a few it is their own fault, of all that are tried somebody's who has changed the tables.
const MANY: usize = 10;

#[derive(Debug, Default)]
pub(super) struct Availability {
    away: Option<Away>,
    held_up: Option<Stalled>,
    refused: Option<Rejected>,
}

/// The database does not answer: since when, and when it is asked next.
#[derive(Debug)]
struct Away {
    since: Timestamp,
    ask_again_at: Timestamp,
    asked: u32,
    why: String,
}

/// Locks or timeouts befall orders and none is closed: since when, when one did last, and which.
#[derive(Debug)]
struct Stalled {
    since: Timestamp,
    last: Timestamp,
    why: String,
    orders: SampledIds,
}

/// Orders are refused, each for itself, and none is closed. No availability, and nobody is less ready for it: of a quiet shop's
/// orders it may be all that are overdue, and a worker that starts beside them is as good as any.
#[derive(Debug)]
struct Rejected {
    since: Timestamp,
    orders: SampledIds,
}

/// Which orders, up to [`MANY`].
#[derive(Debug, Default)]
struct SampledIds(HashSet<OrderId>);

impl SampledIds {
    fn add(&mut self, batch: &Batch) {
        for item in batch.items.iter().take(MANY - self.0.len()) {
            self.0.insert(item.alarm.order_id().clone());
        }
    }

    fn are(&self, orders: usize) -> bool {
        self.0.len() >= orders
    }
}

impl Stalled {
    fn goes_on(&self, policy: &Policy, now: Timestamp) -> bool {
        now.since(self.last) < FORGETS_A_STALL_AFTER.max(2 * policy.longest_try)
    }

    fn is_an_outage(&self, policy: &Policy, now: Timestamp) -> bool {
        self.orders.are(SEVERAL) && self.last.since(self.since) >= LONGEST_STALL && self.goes_on(policy, now)
    }
}

impl Availability {
    /// Returns whether this ends a time in which everybody was refused.
    pub fn note(&mut self, batch: &Batch, answer: &BatchResult, policy: &Policy, now: Timestamp) -> bool {
        self.note_whether_away(answer, policy, now);
        match answer {
            // Only a close ends it. Whoever just looks, at a batch without orders or at orders that are paid or busy, is
            // not held up by what holds up commits.
            Ok(findings) if findings.values().any(is_a_close) => {
                self.held_up = None;
                let ended = self.refused.take();
                return ended.is_some_and(|ended| ended.orders.are(MANY) && now.since(ended.since) >= LONGEST_STALL);
            }
            // Tried again at once without waiting: only then it is known whether it was one article's lock.
            Err(CloseError::Locked(_)) if batch.waits_for_locks() => {}
            Err(CloseError::Locked(why) | CloseError::Transient(why) | CloseError::Unavailable(why)) => {
                self.note_held_up(batch, why, policy, now);
            }
            // Of several together, nobody knows yet which of them is to blame.
            Err(CloseError::Rejected(_)) if batch.items.len() == 1 => {
                self.refused
                    .get_or_insert_with(|| Rejected { since: now, orders: SampledIds::default() })
                    .orders
                    .add(batch);
            }
            Ok(_) | Err(CloseError::Rejected(_)) => {}
        }
        false
    }

    pub fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// When an absent database is asked whether it is back; `None` while it is here.
    pub fn ask_again_at(&self) -> Option<Timestamp> {
        self.away.as_ref().map(|away| away.ask_again_at)
    }

    /// How long the database has been away; `None` while it is not.
    pub fn away_for(&self, now: Timestamp) -> Option<Duration> {
        self.away.as_ref().map(|away| now.since(away.since))
    }

    /// Whether more than one order has met a lock or a timeout since one was last closed.
    pub fn befalls_several(&self) -> bool {
        self.held_up.as_ref().is_some_and(|held_up| held_up.orders.are(SEVERAL))
    }

    /// Why nothing that is due is closed, if that is so: the database is away, or locks or timeouts befall too many to be
    /// their own.
    pub fn why_nothing(&self, policy: &Policy, now: Timestamp) -> Option<&str> {
        let held_up = || self.held_up.as_ref().filter(|held_up| held_up.is_an_outage(policy, now));
        self.away.as_ref().map(|away| away.why.as_str()).or_else(|| held_up().map(|held_up| held_up.why.as_str()))
    }

    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        self.held_up = None;
        self.refused = None;
        if let Some(away) = &mut self.away {
            away.since = now.min(away.since);
            away.ask_again_at = now.min(away.ask_again_at);
        }
    }

    fn note_whether_away(&mut self, answer: &BatchResult, policy: &Policy, now: Timestamp) {
        let Err(CloseError::Unavailable(why)) = answer else {
            self.away = None;
            return;
        };
        let (since, asked) = self.away.take().map_or((now, 0), |away| (away.since, away.asked + 1));
        let pause = policy.pause(asked).min(policy.longest_while_overdue());
        self.away = Some(Away { since, ask_again_at: now + pause, asked, why: why.clone() });
    }

    fn note_held_up(&mut self, batch: &Batch, why: &str, policy: &Policy, now: Timestamp) {
        if batch.items.is_empty() {
            return;
        }
        let known = self.held_up.take().filter(|known| known.goes_on(policy, now));
        let (since, mut orders) =
            known.map_or_else(|| (now, SampledIds::default()), |known| (known.since, known.orders));
        orders.add(batch);
        self.held_up = Some(Stalled { since, last: now, why: why.to_owned(), orders });
    }
}

fn is_a_close(finding: &CloseResult) -> bool {
    finding.as_ref().is_ok_and(|found| found.outcome == Outcome::Closed)
}
