//! What becomes of a batch when its answer is in: the verdict on each of its items, carried out. Settled, awaited, asked
//! again, tried later, parked; or, found by the sweep, left to itself for a while.
//!
//! Pure, like the whole engine. What an order's outcome means stands in `decide.rs`; what a batch that failed as a whole
//! comes to, before any of its orders has an outcome, stands here.

use std::collections::HashMap;
use std::time::Duration;

use super::circulation::circulates;
use super::decide::{Decision, SweepDecision, decide_after_close, decide_after_sweep};
use super::sweep::{LONGEST_BLAMELESS_REST, LONGEST_REST, LastTry};
use super::{Batch, BatchResult, Engine, LockMode, Origin, WorkItem};
use crate::alarm::{DeadLetter, Receipt, Wanted};
use crate::order::{CloseError, CloseOutcome, CloseResult, Deadline, OrderId, Outcome, Timestamp};

/// How often an order that somebody else has is tried again by the same pass of the sweep.
const TRIES_WHILE_BUSY: u32 = 2;

impl Engine {
    pub(super) fn apply_results(&mut self, batch: Batch, answer: BatchResult, now: Timestamp) {
        self.idle_closers += 1;
        self.lock_waits.note(&batch, &answer, now);
        if self.availability.note(&batch, &answer, &self.policy, now) {
            self.sweep.look_again_at_all(now);
        }
        match (answer, batch.wait) {
            (Ok(findings), _) => self.conclude_each(batch.items, &findings, now),
            // Not whoever comes again and met a timeout: at once he would most likely meet it again.
            (Err(CloseError::Locked(_)), LockMode::WaitFresh | LockMode::WaitRetried)
            | (Err(CloseError::Transient(_)), LockMode::WaitFresh)
                if !self.draining =>
            {
                self.retry_nowait.push_back((Batch { wait: LockMode::NoWait, ..batch }, now));
            }
            (Err(CloseError::Locked(_) | CloseError::Transient(_) | CloseError::Rejected(_)), _)
                if batch.items.len() > 1 && !self.draining =>
            {
                self.take_apart(batch, now);
            }
            (Err(fault), _) => self.conclude_all(batch.items, &fault, now),
        }
    }

    fn conclude_all(&mut self, items: Vec<WorkItem>, fault: &CloseError, now: Timestamp) {
        for item in items {
            self.conclude_one(item, Err(fault.clone()), now);
        }
    }

    fn conclude_each(&mut self, items: Vec<WorkItem>, findings: &HashMap<OrderId, CloseResult>, now: Timestamp) {
        let unknown = Ok(CloseOutcome { outcome: Outcome::Unknown, deadline: None });
        for item in items {
            let finding = findings.get(item.alarm.order_id()).unwrap_or(&unknown).clone();
            self.conclude_one(item, finding, now);
        }
    }

    fn conclude_one(&mut self, item: WorkItem, finding: CloseResult, now: Timestamp) {
        self.clear_in_flight(item.alarm.order_id());
        match item.origin {
            Origin::Delivered(receipt) => {
                let next = decide_after_close(&self.policy, &item, finding, now);
                self.apply_decision(item, receipt, next, now);
            }
            Origin::Swept => match decide_after_sweep(&finding, self.availability.befalls_several()) {
                SweepDecision::Settled(longest) => {
                    self.sweep.settle(item.alarm.alarm.order_id, item.alarm.alarm.deadline, longest, now);
                }
                SweepDecision::Drop => {}
                SweepDecision::BackOff => self.leave_to_who_has_it(item, now),
                SweepDecision::RetrySoon => {
                    self.sweep.leave_alone(item.alarm.alarm.order_id, self.policy.longest_while_overdue(), now);
                }
                SweepDecision::RetryLater => {
                    self.sweep.leave_alone(item.alarm.alarm.order_id, LONGEST_BLAMELESS_REST, now);
                }
                SweepDecision::LeaveAlone => self.sweep.leave_alone(item.alarm.alarm.order_id, LONGEST_REST, now),
            },
        }
    }

    /// It will be free in a moment, and the next pass is far off: whoever meets this for the first time is tried twice more
    /// before it.
    fn leave_to_who_has_it(&mut self, mut item: WorkItem, now: Timestamp) {
        let order_id = item.alarm.order_id().clone();
        let is_new = self.sweep.last_try(&order_id) == LastTry::None || item.pauses > 0;
        item.pauses += 1;
        if is_new && item.pauses <= TRIES_WHILE_BUSY && !self.draining {
            self.mark_in_flight(&order_id);
            self.busy.push(item, now);
        }
        self.sweep.note_busy(order_id, now);
    }

    fn apply_decision(&mut self, item: WorkItem, receipt: Receipt, next: Decision, now: Timestamp) {
        if self.draining && next != Decision::Ack {
            return self.give_back([receipt]);
        }
        match next {
            Decision::Ack => self.acknowledge([receipt]),
            Decision::AwaitDeadline(deadline) => self.await_deadline(item, deadline, now),
            Decision::AskAgain => self.ask_again(item, now),
            Decision::Pause => self.put_back(item, self.policy.longest_while_overdue(), now),
            Decision::Retry => self.retry(item, now),
            Decision::Park(reason, why) => self.park.push_back((DeadLetter::of(&item.alarm, reason, why), receipt)),
        }
    }

    fn await_deadline(&mut self, mut item: WorkItem, deadline: Deadline, now: Timestamp) {
        item.alarm.alarm.deadline = deadline;
        item.pauses = 0;
        item.disagreements = 0;
        item.paused_since = None;
        self.place(item, now, now);
    }

    /// Back after a millisecond, the next time after two.
    fn ask_again(&mut self, mut item: WorkItem, now: Timestamp) {
        let wait = Duration::from_millis(1) * 2_u32.saturating_pow(item.disagreements);
        item.disagreements += 1;
        self.rest(item, wait, now);
    }

    /// Back after a pause, the next time after twice that, within `longest`; not counted as a failure.
    fn put_back(&mut self, mut item: WorkItem, longest: Duration, now: Timestamp) {
        let wait = self.policy.doubling(item.pauses).min(longest);
        item.pauses = item.pauses.saturating_add(1);
        self.rest(item, wait, now);
    }

    /// Waits here, in the end by way of the broker, which does not wait for an acknowledgement for ever.
    fn rest(&mut self, mut item: WorkItem, wait: Duration, now: Timestamp) {
        // min: the clock may have been set back since.
        let since = item.paused_since.map_or(now, |since| now.min(since));
        item.paused_since = Some(since);
        if now.since(since) >= self.policy.requeue_after {
            return self.arm(item, Wanted::NotBefore(now + self.policy.retry_longest));
        }
        self.wait_until(now + wait, item);
    }

    /// Back after a wait that doubles; the short ones here, the long ones at the broker, so that backed_off alarms do
    /// not fill the prefetch window.
    fn retry(&mut self, mut item: WorkItem, now: Timestamp) {
        if item.alarm.attempt == 0 && self.policy.doubling(item.pauses) <= self.policy.retry_longest {
            return self.put_back(item, self.policy.retry_longest, now);
        }
        let wait = self.policy.retry_longest * 2_u32.saturating_pow(item.alarm.attempt.min(5));
        // Saturating: the first attempt's number came with the message.
        item.alarm.attempt = item.alarm.attempt.saturating_add(1);
        if circulates(&item.alarm) {
            // The broker would return it before its time.
            return self.wait_until(now + wait, item);
        }
        self.arm(item, Wanted::NotBefore(now + wait));
    }
}
