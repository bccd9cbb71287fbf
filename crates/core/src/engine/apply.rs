//! Applies the result of a batch: decides about each of its work items and carries that out. An item is settled, waits
//! for its deadline, is asked about again, is retried, or is parked; an order that the sweep found may be backed off.
//!
//! Pure, like the whole engine. What an order's outcome means is in `decide.rs`; what happens to a batch that failed as
//! a whole, before any of its orders has an outcome, is here.

use super::decide::{Decision, SweepDecision, decide_after_close, decide_after_sweep};
use super::sweep::LastTry;
use super::{Batch, BatchResult, Engine, LockMode, Origin, WorkItem};
use crate::alarm::{DeadLetter, Receipt};
use crate::order::{CloseError, CloseOutcome, CloseResult, Deadline, OrderId, Outcome, Timestamp};
use std::collections::HashMap;

/// How often one pass of the sweep retries an order that another session has locked.
const TRIES_WHILE_BUSY: u32 = 2;

impl Engine {
    pub(super) fn apply_results(&mut self, batch: Batch, result: BatchResult, now: Timestamp) {
        self.idle_closers += 1;
        self.lock_waits.note(&batch, &result, now);
        if self.availability.note(&batch, &result, &self.policy, now) {
            self.sweep.end_backoffs_early(now);
        }
        match (result, batch.lock_mode) {
            (Ok(results), _) => self.apply_each(batch.items, &results, now),
            // Not a retried batch that met a timeout: tried at once, it would most likely meet it again.
            (Err(CloseError::Locked(_)), LockMode::WaitFresh | LockMode::WaitRetried)
            | (Err(CloseError::Transient(_)), LockMode::WaitFresh)
                if !self.draining =>
            {
                self.ready.retry_nowait.push(Batch { lock_mode: LockMode::NoWait, ..batch }, now);
            }
            (Err(CloseError::Locked(_) | CloseError::Transient(_) | CloseError::Rejected(_)), _)
                if batch.items.len() > 1 && !self.draining =>
            {
                self.split(batch, now);
            }
            (Err(error), _) => self.apply_error(batch.items, &error, now),
        }
    }

    fn apply_error(&mut self, items: Vec<WorkItem>, error: &CloseError, now: Timestamp) {
        for item in items {
            self.apply_one(item, Err(error.clone()), now);
        }
    }

    fn apply_each(&mut self, items: Vec<WorkItem>, results: &HashMap<OrderId, CloseResult>, now: Timestamp) {
        let unknown = Ok(CloseOutcome { outcome: Outcome::Unknown, deadline: None });
        for item in items {
            let result = results.get(item.alarm.order_id()).unwrap_or(&unknown).clone();
            self.apply_one(item, result, now);
        }
    }

    fn apply_one(&mut self, item: WorkItem, result: CloseResult, now: Timestamp) {
        self.clear_in_flight(item.alarm.order_id());
        self.note_path(&item, &result, now);
        match item.origin {
            Origin::Delivered(receipt) => {
                let decision = decide_after_close(&self.policy, &item, result, now);
                self.apply_decision(item, receipt, decision, now);
            }
            Origin::LookedAhead if matches!(&result, Ok(found) if found.outcome == Outcome::NotDue) => {
                self.apply_not_due(item, result, now);
            }
            Origin::LookedAhead | Origin::Swept => {
                match decide_after_sweep(&self.policy, &result, self.availability.stalls_several()) {
                    SweepDecision::Settled(longest) => {
                        self.sweep.note_settled(item.alarm.alarm.order_id, item.alarm.alarm.deadline, longest, now);
                    }
                    SweepDecision::Drop => {}
                    SweepDecision::RetryBusy => self.retry_busy(item, now),
                    SweepDecision::BackOff(longest) => self.sweep.back_off(item.alarm.alarm.order_id, longest, now),
                }
            }
        }
    }

    /// Notes whether the order's alarm has come in time. An order that was tried before tells nothing about that.
    fn note_path(&mut self, item: &WorkItem, result: &CloseResult, now: Timestamp) {
        let Ok(CloseOutcome { outcome, .. }) = result else { return };
        let is_done = matches!(outcome, Outcome::Closed | Outcome::Claimed);
        match item.origin {
            Origin::Delivered(_) if is_done && now < item.alarm.deadline() + self.policy.sweep_grace => {
                self.look_ahead.note_in_time(item.alarm.deadline(), now);
            }
            Origin::LookedAhead if is_done => self.look_ahead.note_read_ahead(item.alarm.deadline(), now),
            // Another worker may have found it at the same moment.
            Origin::Swept
                if (is_done || matches!(outcome, Outcome::AlreadyClosed | Outcome::Closing))
                    && !item.was_tried()
                    && self.sweep.last_try(item.alarm.order_id()) == LastTry::None =>
            {
                self.look_ahead.note_without_alarm(item.alarm.deadline(), now);
            }
            Origin::Delivered(_) | Origin::LookedAhead | Origin::Swept => {}
        }
    }

    /// The deadline was moved since it was read, or the worker's reading of the clock is ahead of the database's.
    fn apply_not_due(&mut self, item: WorkItem, result: CloseResult, now: Timestamp) {
        match decide_after_close(&self.policy, &item, result, now) {
            Decision::AwaitDeadline(deadline) => self.await_deadline(item, deadline, now),
            Decision::AskAgain => self.ask_again(item, now),
            // The next pass finds it.
            _ => {}
        }
    }

    /// The order will be free in a moment, and the next pass is far off: an order that is busy for the first time is
    /// tried twice more before that pass.
    fn retry_busy(&mut self, mut item: WorkItem, now: Timestamp) {
        let order_id = item.alarm.order_id().clone();
        let is_new = self.sweep.last_try(&order_id) == LastTry::None || item.pauses > 0;
        item.pauses += 1;
        if is_new && item.pauses <= TRIES_WHILE_BUSY && !self.draining {
            self.mark_in_flight(&order_id);
            self.ready.busy.push(item, now);
        }
        self.sweep.note_busy(order_id, now);
    }

    fn apply_decision(&mut self, item: WorkItem, receipt: Receipt, decision: Decision, now: Timestamp) {
        if self.draining && decision != Decision::Ack {
            return self.requeue([receipt]);
        }
        match decision {
            Decision::Ack => self.acknowledge([receipt]),
            Decision::AwaitDeadline(deadline) => self.await_deadline(item, deadline, now),
            Decision::AskAgain => self.ask_again(item, now),
            Decision::Pause => self.pause(item, self.policy.longest_overdue_pause(), now),
            Decision::Retry => self.retry(item, now),
            Decision::Park(reason, why) => {
                self.dead_letters.push_back((DeadLetter::of(&item.alarm, reason, why), receipt))
            }
        }
    }

    fn await_deadline(&mut self, mut item: WorkItem, deadline: Deadline, now: Timestamp) {
        item.alarm.alarm.deadline = deadline;
        item.pauses = 0;
        item.disagreements = 0;
        item.paused_since = None;
        self.place(item, now, now);
    }
}
