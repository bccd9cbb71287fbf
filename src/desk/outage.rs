//! Whether the database closes anything: it is away, or batch after batch fails for reasons that are not its orders'.
//!
//! Pure, like the whole desk. Only takes note; who is asked meanwhile is decided in `batches.rs`.

use std::time::Duration;

use super::{Answer, Batch, Policy};
use crate::order::{CloseFault, Finding, Moment, OrderId, Outcome};

/// How long batch after batch may fail for locks, deadlocks or timeouts before the database is said to close nothing.
const LONGEST_STALL: Duration = Duration::from_secs(5);

/// With nothing more to close nobody finds out that something could be. Longer where a try may take longer than that.
const FORGETS_A_STALL_AFTER: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct Outage {
    away: Option<Away>,
    stalled: Option<Stalled>,
}

/// The database does not close anything: since when, and when it is asked next.
#[derive(Debug, Clone, Copy)]
struct Away {
    since: Moment,
    ask_again_at: Moment,
    asked: u32,
}

/// Batches fail for reasons that are not their orders': since when, and when one did last.
#[derive(Debug, Clone)]
struct Stalled {
    since: Moment,
    last: Moment,
    first: OrderId,
    /// Whether it befell another order, too. Of one alone it may be the trigger or the lock of that one.
    several: bool,
}

impl Outage {
    pub fn note(&mut self, batch: &Batch, answer: &Answer, policy: &Policy, now: Moment) {
        self.note_whether_away(answer, policy, now);
        self.note_whether_stalled(batch, answer, policy, now);
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

    /// Whether batches of more than one order have failed since one was last closed, for reasons that are not theirs.
    pub fn befalls_several(&self) -> bool {
        self.stalled.as_ref().is_some_and(|stalled| stalled.several)
    }

    /// Whether orders are due and all that is tried fails for reasons that are not the orders': an absence, locks, timeouts.
    pub fn closes_nothing(&self, policy: &Policy, now: Moment) -> bool {
        let is_stalled = |stalled: &Stalled| {
            stalled.several
                && stalled.last.since(stalled.since) >= LONGEST_STALL
                && now.since(stalled.last) < forgets_a_stall_after(policy)
        };
        self.is_away() || self.stalled.as_ref().is_some_and(is_stalled)
    }

    pub fn clock_was_set_back(&mut self, now: Moment) {
        self.stalled = None;
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
    /// up by what holds up commits.
    fn note_whether_stalled(&mut self, batch: &Batch, answer: &Answer, policy: &Policy, now: Moment) {
        let Some(first) = batch.cases.first().map(|case| case.alarm.order_id()) else { return };
        match answer {
            Ok(findings) if findings.values().any(is_a_close) => self.stalled = None,
            Ok(_) | Err(CloseFault::OfTheOrder(_)) => {}
            Err(CloseFault::Locked(_) | CloseFault::Transient(_) | CloseFault::Away(_)) => {
                let known = self.stalled.take().filter(|known| now.since(known.last) < forgets_a_stall_after(policy));
                let mut stalled =
                    known.unwrap_or_else(|| Stalled { since: now, last: now, first: first.clone(), several: false });
                stalled.last = now;
                stalled.several |= batch.cases.iter().any(|case| *case.alarm.order_id() != stalled.first);
                self.stalled = Some(stalled);
            }
        }
    }
}

fn forgets_a_stall_after(policy: &Policy) -> Duration {
    FORGETS_A_STALL_AFTER.max(2 * policy.longest_try)
}

fn is_a_close(finding: &Finding) -> bool {
    finding.as_ref().is_ok_and(|found| found.outcome == Outcome::Closed)
}
