//! Whether the database closes anything: it is away, or batch after batch fails for reasons that are hardly its orders'.
//!
//! Pure, like the whole desk. Only takes note; who is asked meanwhile is decided in `batches.rs`.

use std::collections::HashSet;
use std::time::Duration;

use super::sweep::LONGEST_REST;
use super::{Answer, Batch, Policy};
use crate::order::{CloseFault, Finding, Moment, OrderId, Outcome};

/// How long batch after batch may fail, and none be closed, before the database is said to close nothing.
const LONGEST_STALL: Duration = Duration::from_secs(5);

/// With nothing more to close nobody finds out that something could be. Longer where a try may take longer than that.
const FORGETS_A_STALL_AFTER: Duration = Duration::from_secs(10);

/// So many orders must meet a lock or a timeout: of one alone it may be its own trigger that waits.
const SEVERAL: usize = 2;

/// So many must be refused: of a few it is their own fault, of all that are tried somebody's who has changed the tables.
const MANY: usize = 10;

#[derive(Debug, Default)]
pub(super) struct Outage {
    away: Option<Away>,
    held_up: Option<Stall>,
    refused: Option<Stall>,
}

/// The database does not close anything: since when, and when it is asked next.
#[derive(Debug, Clone, Copy)]
struct Away {
    since: Moment,
    ask_again_at: Moment,
    asked: u32,
}

/// Orders fail and none is closed: since when, and when one did last.
#[derive(Debug)]
struct Stall {
    since: Moment,
    last: Moment,
    /// Which ones, up to [`MANY`].
    orders: HashSet<OrderId>,
}

impl Stall {
    fn befalls(&self, orders: usize) -> bool {
        self.orders.len() >= orders
    }

    fn is_long(&self) -> bool {
        self.last.since(self.since) >= LONGEST_STALL
    }

    fn goes_on(&self, forgotten_after: Duration, now: Moment) -> bool {
        now.since(self.last) < forgotten_after
    }
}

/// When a lock or a timeout that befell somebody is forgotten, if it befalls nobody else.
fn forgets_a_hold_up_after(policy: &Policy) -> Duration {
    FORGETS_A_STALL_AFTER.max(2 * policy.longest_try)
}

/// The same of a refusal: whoever is refused is left alone for long.
fn forgets_a_refusal_after(policy: &Policy) -> Duration {
    forgets_a_hold_up_after(policy) + LONGEST_REST
}

impl Outage {
    /// Returns whether this ends a time in which nothing was closed.
    pub fn note(&mut self, batch: &Batch, answer: &Answer, policy: &Policy, now: Moment) -> bool {
        self.note_whether_away(answer, policy, now);
        self.note_whether_stalled(batch, answer, policy, now)
    }

    pub fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// When an absent database is asked whether it is back; `None` while it is here.
    pub fn ask_again_at(&self) -> Option<Moment> {
        self.away.map(|away| away.ask_again_at)
    }

    /// How long the database has been away; `None` while it is not.
    pub fn away_for(&self, now: Moment) -> Option<Duration> {
        self.away.map(|away| now.since(away.since))
    }

    /// Whether more than one order has met a lock or a timeout since one was last closed.
    pub fn befalls_several(&self) -> bool {
        self.held_up.as_ref().is_some_and(|stall| stall.befalls(SEVERAL))
    }

    /// Whether orders are due and nothing that is tried is closed: the database is away, or locks, timeouts or refusals
    /// befall too many to be their own.
    pub fn closes_nothing(&self, policy: &Policy, now: Moment) -> bool {
        self.is_away() || self.is_stalled(policy, now)
    }

    fn is_stalled(&self, policy: &Policy, now: Moment) -> bool {
        let is_one = |stall: &Option<Stall>, enough: usize, forgotten_after: Duration| {
            let is_one =
                |stall: &Stall| stall.befalls(enough) && stall.is_long() && stall.goes_on(forgotten_after, now);
            stall.as_ref().is_some_and(is_one)
        };
        is_one(&self.held_up, SEVERAL, forgets_a_hold_up_after(policy))
            || is_one(&self.refused, MANY, forgets_a_refusal_after(policy))
    }

    /// The sweep knows of no order any more that could not be closed.
    pub fn nobody_is_left(&mut self) {
        self.refused = None;
    }

    pub fn clock_was_set_back(&mut self, now: Moment) {
        self.held_up = None;
        self.refused = None;
        if let Some(away) = &mut self.away {
            away.since = now.min(away.since);
            away.ask_again_at = now.min(away.ask_again_at);
        }
    }

    fn note_whether_away(&mut self, answer: &Answer, policy: &Policy, now: Moment) {
        if !matches!(answer, Err(CloseFault::Away(_))) {
            self.away = None;
            return;
        }
        let (since, asked) = self.away.map_or((now, 0), |away| (away.since, away.asked + 1));
        let pause = policy.pause(asked).min(policy.longest_while_overdue());
        self.away = Some(Away { since, asked, ask_again_at: now + pause });
    }

    /// Only a close ends it. Whoever just looks, at a batch without orders or at orders that are paid or busy, is not held
    /// up by what holds up commits. Returns whether it has been long, and ends.
    fn note_whether_stalled(&mut self, batch: &Batch, answer: &Answer, policy: &Policy, now: Moment) -> bool {
        match answer {
            Ok(findings) if findings.values().any(is_a_close) => {
                let was_stalled = self.is_stalled(policy, now);
                self.held_up = None;
                self.refused = None;
                return was_stalled;
            }
            // Tried again at once without waiting: only then it is known whether it was one article's lock.
            Err(CloseFault::Locked(_)) if batch.patient => {}
            Err(CloseFault::Locked(_) | CloseFault::Transient(_) | CloseFault::Away(_)) => {
                note_stall(&mut self.held_up, batch, forgets_a_hold_up_after(policy), now);
            }
            // Of several together, nobody knows yet which of them is to blame.
            Err(CloseFault::OfTheOrder(_)) if batch.cases.len() == 1 => {
                note_stall(&mut self.refused, batch, forgets_a_refusal_after(policy), now);
            }
            Ok(_) | Err(CloseFault::OfTheOrder(_)) => {}
        }
        false
    }
}

fn note_stall(stall: &mut Option<Stall>, batch: &Batch, forgotten_after: Duration, now: Moment) {
    if batch.cases.is_empty() {
        return;
    }
    let known = stall.take().filter(|known| known.goes_on(forgotten_after, now));
    let mut noted = known.unwrap_or_else(|| Stall { since: now, last: now, orders: HashSet::new() });
    noted.last = now;
    for case in batch.cases.iter().take(MANY - noted.orders.len()) {
        noted.orders.insert(case.alarm.order_id().clone());
    }
    *stall = Some(noted);
}

fn is_a_close(finding: &Finding) -> bool {
    finding.as_ref().is_ok_and(|found| found.outcome == Outcome::Closed)
}
