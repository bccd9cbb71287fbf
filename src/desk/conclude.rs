//! What becomes of a batch when its answer is in: the verdict on each of its cases, carried out. Settled, awaited, asked
//! again, tried later, parked; or, found by the sweep, left to itself for a while.
//!
//! Pure, like the whole desk. What an order's outcome means stands in `verdict.rs`; what a batch that failed as a whole
//! comes to, before any of its orders has an outcome, stands here.

use std::collections::HashMap;
use std::time::Duration;

use super::sweep::{LONGEST_BLAMELESS_REST, LONGEST_REST, LastTry};
use super::verdict::{AfterSweep, Next, after_close, after_sweep};
use super::{Answer, Batch, Case, Desk, Origin, Wait};
use crate::alarm::{Parcel, Receipt, Wanted};
use crate::order::{CloseFault, Deadline, Finding, Found, Moment, OrderId, Outcome};

/// How often an order that somebody else has is tried again by the same pass of the sweep.
const TRIES_WHILE_BUSY: u32 = 2;

impl Desk {
    pub(super) fn conclude(&mut self, batch: Batch, answer: Answer, now: Moment) {
        self.idle_closers += 1;
        self.patience.note(&batch, &answer, now);
        if self.outage.note(&batch, &answer, &self.policy, now) {
            self.sweep.look_again_at_all(now);
        }
        match (answer, batch.wait) {
            (Ok(findings), _) => self.conclude_each(batch.cases, &findings, now),
            // Not whoever comes again and met a timeout: at once he would most likely meet it again.
            (Err(CloseFault::Locked(_)), Wait::Fresh | Wait::Again) | (Err(CloseFault::Transient(_)), Wait::Fresh)
                if !self.draining =>
            {
                self.hurried.push_back((Batch { wait: Wait::Not, ..batch }, now));
            }
            (Err(CloseFault::Locked(_) | CloseFault::Transient(_) | CloseFault::OfTheOrder(_)), _)
                if batch.cases.len() > 1 && !self.draining =>
            {
                self.take_apart(batch, now);
            }
            (Err(fault), _) => self.conclude_all(batch.cases, &fault, now),
        }
    }

    fn conclude_all(&mut self, cases: Vec<Case>, fault: &CloseFault, now: Moment) {
        for case in cases {
            self.conclude_one(case, Err(fault.clone()), now);
        }
    }

    fn conclude_each(&mut self, cases: Vec<Case>, findings: &HashMap<OrderId, Finding>, now: Moment) {
        let unknown = Ok(Found { outcome: Outcome::Unknown, deadline: None });
        for case in cases {
            let finding = findings.get(case.alarm.order_id()).unwrap_or(&unknown).clone();
            self.conclude_one(case, finding, now);
        }
    }

    fn conclude_one(&mut self, case: Case, finding: Finding, now: Moment) {
        self.put_down(case.alarm.order_id());
        match case.origin {
            Origin::Delivered(receipt) => {
                let next = after_close(&self.policy, &case, finding, now);
                self.carry_out(case, receipt, next, now);
            }
            Origin::Swept => match after_sweep(&finding, self.outage.befalls_several()) {
                AfterSweep::Settled(longest) => {
                    self.sweep.settle(case.alarm.due.order_id, case.alarm.due.deadline, longest, now);
                }
                AfterSweep::LetGo => {}
                AfterSweep::LeaveToWhoHasIt => self.leave_to_who_has_it(case, now),
                AfterSweep::LookAgain => {
                    self.sweep.leave_alone(case.alarm.due.order_id, self.policy.longest_while_overdue(), now);
                }
                AfterSweep::LookAgainLater => {
                    self.sweep.leave_alone(case.alarm.due.order_id, LONGEST_BLAMELESS_REST, now);
                }
                AfterSweep::LeaveAlone => self.sweep.leave_alone(case.alarm.due.order_id, LONGEST_REST, now),
            },
        }
    }

    /// It will be free in a moment, and the next pass is far off: whoever meets this for the first time is tried twice more
    /// before it.
    fn leave_to_who_has_it(&mut self, mut case: Case, now: Moment) {
        let order_id = case.alarm.order_id().clone();
        let is_new = self.sweep.last_try(&order_id) == LastTry::None || case.pauses > 0;
        case.pauses += 1;
        if is_new && case.pauses <= TRIES_WHILE_BUSY && !self.draining {
            self.take_in_hand(&order_id);
            self.busy.push(case, now);
        }
        self.sweep.note_busy(order_id, now);
    }

    fn carry_out(&mut self, case: Case, receipt: Receipt, next: Next, now: Moment) {
        if self.draining && next != Next::Ack {
            return self.give_back([receipt]);
        }
        match next {
            Next::Ack => self.acknowledge([receipt]),
            Next::AwaitDeadline(deadline) => self.await_deadline(case, deadline, now),
            Next::AskAgain => self.ask_again(case, now),
            Next::Pause => self.put_back(case, self.policy.longest_while_overdue(), now),
            Next::Retry => self.retry(case, now),
            Next::Park(reason, why) => self.park.push_back((Parcel::of(&case.alarm, reason, why), receipt)),
        }
    }

    fn await_deadline(&mut self, mut case: Case, deadline: Deadline, now: Moment) {
        case.alarm.due.deadline = deadline;
        case.pauses = 0;
        case.disagreements = 0;
        case.paused_since = None;
        self.place(case, now, now);
    }

    /// Back after a millisecond, the next time after two.
    fn ask_again(&mut self, mut case: Case, now: Moment) {
        let wait = Duration::from_millis(1) * 2_u32.saturating_pow(case.disagreements);
        case.disagreements += 1;
        self.rest(case, wait, now);
    }

    /// Back after a pause, the next time after twice that, within `longest`; not counted as a failure.
    fn put_back(&mut self, mut case: Case, longest: Duration, now: Moment) {
        let wait = self.policy.doubling(case.pauses).min(longest);
        case.pauses = case.pauses.saturating_add(1);
        self.rest(case, wait, now);
    }

    /// Waits here, in the end by way of the broker, which does not wait for an acknowledgement for ever.
    fn rest(&mut self, mut case: Case, wait: Duration, now: Moment) {
        // min: the clock may have been set back since.
        let since = case.paused_since.map_or(now, |since| now.min(since));
        case.paused_since = Some(since);
        if now.since(since) >= self.policy.away_patience {
            return self.arm(case, Wanted::NotBefore(now + self.policy.retry_longest));
        }
        self.wait_until(now + wait, case);
    }

    /// Back after a wait that doubles; the short ones here, the long ones at the broker, so that troubled alarms do
    /// not fill the prefetch window.
    fn retry(&mut self, mut case: Case, now: Moment) {
        if case.alarm.attempt == 0 && self.policy.doubling(case.pauses) <= self.policy.retry_longest {
            return self.put_back(case, self.policy.retry_longest, now);
        }
        let wait = self.policy.retry_longest * 2_u32.saturating_pow(case.alarm.attempt.min(5));
        // Saturating: the first attempt's number came with the message.
        case.alarm.attempt = case.alarm.attempt.saturating_add(1);
        self.arm(case, Wanted::NotBefore(now + wait));
    }
}
