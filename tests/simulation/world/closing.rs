//! The statements of the closing protocol, as far as they matter to an order: claim, take over, close, settle, postpone.

use std::collections::BTreeMap;

use order_timeout_core::engine::{
    AttemptKey, Claim, ClaimedAttempt, EndOutcome, Ended, Ending, Lease, PaidEnding, Postponement, Recorded,
    ResumePage, Step, UnresolvedReason,
};
use order_timeout_core::order::{CloseError, ClosedBy, OrderId, Timestamp};

use super::database::{Row, Status};
use super::provider::{AttemptState, SimulatedAttempt};
use super::worker::Fault;
use super::{Mutant, World};
use crate::events::Event;

/// A row of `close_attempts`.
#[derive(Debug, Clone)]
pub struct CloseAttempt {
    by: ClosedBy,
    queue: String,
    step: Step,
    rounds: u32,
    has_waited: bool,
    next_attempt_at: Timestamp,
    lease: Option<Lease>,
}

impl CloseAttempt {
    fn is_unresolved(&self) -> bool {
        matches!(self.step, Step::Unresolved(_))
    }
}

/// One of the three ends of an order.
#[derive(Debug, Clone)]
pub enum Ends {
    Close(Vec<Ending>),
    SettlePaid(Vec<PaidEnding>),
    Postpone(Vec<Postponement>),
}

impl Ends {
    fn endings(&self) -> Vec<&Ending> {
        match self {
            Self::Close(endings) => endings.iter().collect(),
            Self::SettlePaid(endings) => endings.iter().map(|paid| &paid.ending).collect(),
            Self::Postpone(ends) => ends.iter().map(|end| &end.ending).collect(),
        }
    }
}

impl World {
    /// What `default_close.sql` does with an order that is unpaid and due and has an attempt that may bring money.
    pub(super) fn claim(&mut self, order_id: &OrderId, by: ClosedBy, now: Timestamp) {
        let row = self.rows.get_mut(order_id).expect("it was looked at");
        row.status = Status::Closing;
        let newest = row.attempts.iter().rev().find(|attempt| attempt.state != AttemptState::Closed);
        let queue = newest.map_or("", |attempt| attempt.provider).to_owned();
        let step = Step::Claimed;
        let claimed = CloseAttempt { by, queue, step, rounds: 0, has_waited: false, next_attempt_at: now, lease: None };
        self.close_attempts.insert(order_id.clone(), claimed);
        self.note(Event::Claimed);
    }

    /// What `sql/resume_closing.sql` does.
    pub(super) fn take_over(&mut self, page: &ResumePage) -> Vec<Claim> {
        let now = self.database_time();
        for (order_id, lease) in &page.renewed {
            let held = self.close_attempts.get_mut(order_id).filter(|claimed| claimed.lease == Some(*lease));
            if let Some(claimed) = held.filter(|claimed| !claimed.is_unresolved()) {
                claimed.next_attempt_at = now + page.lease;
            }
        }
        let mut due: Vec<(Timestamp, OrderId)> = Vec::new();
        for (order_id, claimed) in &self.close_attempts {
            if !claimed.is_unresolved() && claimed.next_attempt_at <= now {
                due.push((claimed.next_attempt_at, order_id.clone()));
            }
        }
        due.sort();
        let mut left: BTreeMap<String, usize> = page.limits.iter().cloned().collect();
        let mut claims = Vec::new();
        for (_, order_id) in due {
            let queue = self.close_attempts[&order_id].queue.clone();
            let left = left.entry(queue).or_default();
            if *left > 0 {
                *left -= 1;
                claims.push(self.lease(order_id, now + page.lease));
            } else {
                self.note(Event::QueueWasFull);
            }
        }
        self.has_changed |= !claims.is_empty();
        claims
    }

    fn lease(&mut self, order_id: OrderId, until: Timestamp) -> Claim {
        self.leases += 1;
        let lease = Lease(self.leases);
        let claimed = self.close_attempts.get_mut(&order_id).expect("it was found");
        let had_lease = claimed.lease.replace(lease).is_some();
        claimed.next_attempt_at = until;
        let CloseAttempt { queue, rounds, has_waited, .. } = claimed.clone();
        self.note(if had_lease { Event::TakenOverAfterLease } else { Event::TakenOver });
        let skips_verdicts = self.skips_verdicts();
        let attempts = self.rows.get_mut(&order_id).map(|row| &mut row.attempts).into_iter().flatten();
        let mut open = Vec::new();
        for attempt in attempts {
            if skips_verdicts && attempt.cancel_sent {
                attempt.state = AttemptState::Closed;
            }
            let recorded = if attempt.state == AttemptState::Paid { Recorded::Paid } else { Recorded::Open };
            if attempt.state != AttemptState::Closed {
                let begun_at = Timestamp::from_unix_micros(0);
                open.push(ClaimedAttempt { attempt: attempt.to_attempt(), recorded, begun_at, payable_until: None });
            }
        }
        let was_judged = rounds > 0 || has_waited;
        Claim { order_id, lease, queue, rounds, has_waited, was_judged, attempts: open }
    }

    /// What the statements of the three ends do.
    pub(super) fn end_orders(&mut self, ends: &Ends, fault: Fault) -> Vec<Ended> {
        let gone = || CloseError::Unavailable("the connection is gone".into());
        let failed = |error: CloseError| {
            let failed =
                |end: &Ending| Ended { order_id: end.order_id.clone(), lease: end.lease, outcome: Err(error.clone()) };
            ends.endings().into_iter().map(failed).collect()
        };
        self.has_changed = true;
        if self.database_is_away {
            return failed(gone());
        }
        if fault == Fault::Transient {
            return failed(CloseError::Transient("deadlock detected".into()));
        }
        let ended = match ends {
            Ends::Close(endings) => endings.iter().map(|end| self.ended(end, Self::close_claimed)).collect(),
            Ends::SettlePaid(endings) => {
                let settle = |paid: &PaidEnding| self.ended(&paid.ending, |world, _| world.settle_paid(paid));
                endings.iter().map(settle).collect()
            }
            Ends::Postpone(ends) => {
                let postpone = |end: &Postponement| self.ended(&end.ending, |world, _| Ok(world.postpone(end)));
                ends.iter().map(postpone).collect()
            }
        };
        if fault == Fault::ResultLost {
            self.note(Event::EndAnswerLost);
            return failed(gone());
        }
        ended
    }

    fn ended(
        &mut self,
        ending: &Ending,
        end: impl FnOnce(&mut Self, &Ending) -> Result<EndOutcome, CloseError>,
    ) -> Ended {
        let outcome = end(self, ending);
        self.note_if(outcome == Ok(EndOutcome::LeaseLost), Event::LeaseLost);
        Ended { order_id: ending.order_id.clone(), lease: ending.lease, outcome }
    }

    /// Whether the order still belongs to the worker with this lease.
    fn is_held(&self, ending: &Ending) -> bool {
        let claimed = self.close_attempts.get(&ending.order_id);
        claimed.is_some_and(|claimed| claimed.lease == Some(ending.lease) && !claimed.is_unresolved())
    }

    /// What `effects/closing/close_claimed.rs` does.
    fn close_claimed(&mut self, ending: &Ending) -> Result<EndOutcome, CloseError> {
        let (now, is_held) = (self.database_time(), self.is_held(ending));
        let Some(row) = self.rows.get_mut(&ending.order_id) else { return Ok(EndOutcome::AlreadyClosed) };
        if row.paying {
            return Ok(EndOutcome::Busy);
        }
        if !is_held {
            return Ok(EndOutcome::LeaseLost);
        }
        let outcome = match row.status {
            Status::Paid => EndOutcome::AlreadyPaid,
            Status::Closed | Status::Unpaid => EndOutcome::AlreadyClosed,
            Status::Closing if row.deadline > now => return Ok(EndOutcome::NotDue(row.deadline)),
            Status::Closing if row.refuses => return Err(CloseError::Rejected("a trigger says no".into())),
            Status::Closing if has_unproved(row, &ending.closed) => return Ok(EndOutcome::AttemptsChanged),
            Status::Closing => EndOutcome::Closed,
        };
        let claimed = self.close_attempts.remove(&ending.order_id);
        if let (EndOutcome::Closed, Some(claimed)) = (outcome, claimed) {
            mark_closed(row, &ending.closed);
            row.record_close(now, claimed.by);
            self.note(Event::ClosedWithProof);
        }
        Ok(outcome)
    }

    /// What `sql/settle_paid.sql` does.
    fn settle_paid(&mut self, paid: &PaidEnding) -> Result<EndOutcome, CloseError> {
        let PaidEnding { ending, paid, .. } = paid;
        let (now, is_held) = (self.database_time(), self.is_held(ending));
        let ignores_status = self.mutant == Mutant::SettlesTwice;
        let Some(row) = self.rows.get_mut(&ending.order_id) else { return Ok(EndOutcome::AlreadyClosed) };
        if row.paying {
            return Ok(EndOutcome::Busy);
        }
        if !is_held && !ignores_status {
            return Ok(EndOutcome::LeaseLost);
        }
        let outcome = match row.status {
            Status::Paid if !ignores_status => EndOutcome::AlreadyPaid,
            Status::Closed | Status::Unpaid => EndOutcome::AlreadyClosed,
            Status::Closing if row.refuses => return Err(CloseError::Rejected("a trigger says no".into())),
            Status::Closing | Status::Paid => EndOutcome::Settled,
        };
        if outcome == EndOutcome::AlreadyClosed {
            return Ok(outcome);
        }
        self.close_attempts.remove(&ending.order_id);
        mark_closed(row, &ending.closed);
        if outcome == EndOutcome::Settled {
            row.status = Status::Paid;
            row.settled += 1;
            row.paid_at = Some(now);
            let is_paid = |attempt: &&mut SimulatedAttempt| names(paid, attempt);
            row.attempts.iter_mut().filter(is_paid).for_each(|attempt| attempt.state = AttemptState::Paid);
            self.note(Event::SettledAsPaid);
        }
        self.note_if(outcome == EndOutcome::AlreadyPaid, Event::PaymentBeatSettlement);
        Ok(outcome)
    }

    /// What `sql/postpone_closing.sql` does.
    fn postpone(&mut self, end: &Postponement) -> EndOutcome {
        if !self.is_held(&end.ending) {
            return EndOutcome::LeaseLost;
        }
        let claimed = self.close_attempts.get_mut(&end.ending.order_id).expect("it is held");
        (claimed.step, claimed.next_attempt_at, claimed.queue) = (end.step, end.until, end.queue.clone());
        (claimed.rounds, claimed.has_waited, claimed.lease) = (end.rounds, end.has_waited, None);
        if let Some(row) = self.rows.get_mut(&end.ending.order_id) {
            mark_closed(row, &end.ending.closed);
        }
        self.note(match end.step {
            Step::Claimed => Event::GivenBack,
            Step::InProgress => Event::WaitedForCustomer,
            Step::NoAnswer => Event::AskedAgainLater,
            Step::Unresolved(UnresolvedReason::NoAnswer) => Event::UnresolvedWithoutAnswer,
            Step::Unresolved(UnresolvedReason::AmountDiffers) => Event::UnresolvedAmount,
            Step::Unresolved(_) => Event::UnresolvedForOtherReason,
        });
        EndOutcome::Postponed
    }

    /// Whether this order waits for a person.
    pub fn is_unresolved(&self, order_id: &OrderId) -> bool {
        self.close_attempts.get(order_id).is_some_and(CloseAttempt::is_unresolved)
    }
}

/// Whether an attempt was begun about which nothing was asked.
fn has_unproved(row: &Row, closed: &[AttemptKey]) -> bool {
    row.attempts.iter().any(|attempt| attempt.state != AttemptState::Closed && !names(closed, attempt))
}

fn mark_closed(row: &mut Row, closed: &[AttemptKey]) {
    for attempt in row.attempts.iter_mut().filter(|attempt| names(closed, attempt)) {
        attempt.state = AttemptState::Closed;
    }
}

fn names(keys: &[AttemptKey], attempt: &SimulatedAttempt) -> bool {
    keys.iter().any(|key| key.reference == attempt.reference)
}
