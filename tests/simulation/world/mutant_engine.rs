//! The production engine, or one that breaks a rule of its own: a mutant changes inputs before the engine handles them,
//! and actions before they are handed out.
//!
//! Nothing in production knows of this. With [`Mutant::Sound`] inputs and actions pass unchanged.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use order_timeout_core::alarm::{Delivered, DeliveredAlarm, Receipt, Settlement};
use order_timeout_core::brake::Counts;
use order_timeout_core::engine::{
    Action, Batch, BatchResult, Call, CallKind, ClosingAction, ClosingInput, Engine, Input, Lease,
};
use order_timeout_core::order::{CloseError, CloseOutcome, ClosedBy, Deadline, OrderId, Outcome, SweptPage, Timestamp};
use order_timeout_core::payment::Answer;

use super::{Mutant, closing_policy, policy};

/// Shorter than the sweep's grace, so that the sweep is not what closes the order.
const HELD_TOO_LONG_BY: Duration = Duration::from_millis(5);

pub struct MutantEngine {
    engine: Engine,
    bug: Mutant,
    /// Deliveries that are neither settled nor rearmed or parked: they are held or being closed.
    in_flight: BTreeMap<Receipt, (OrderId, Deadline)>,
    settlements: Vec<(Receipt, Settlement)>,
    /// Orders that the sweep tried alone and could not close.
    backed_off: BTreeSet<OrderId>,
    /// Leases under which one attempt was answered to be closed.
    decided: BTreeSet<Lease>,
    /// Whether the page that was asked for last is none of a pass.
    looks_at_arrivals: bool,
}

impl MutantEngine {
    pub fn new(bug: Mutant, has_provider: bool) -> Self {
        let mut policy = policy();
        if bug == Mutant::SweepsEveryMinute {
            policy.sweep_every = Duration::from_secs(60);
        }
        if bug == Mutant::ReadsNothingAhead {
            policy.look_ahead = Duration::ZERO;
        }
        let engine = if has_provider { Engine::with_provider(policy, closing_policy()) } else { Engine::new(policy) };
        let (in_flight, settlements) = (BTreeMap::new(), Vec::new());
        let (backed_off, decided) = (BTreeSet::new(), BTreeSet::new());
        Self { engine, bug, in_flight, settlements, backed_off, decided, looks_at_arrivals: false }
    }

    pub fn handle(&mut self, input: Input, now: Timestamp) {
        let input = match input {
            Input::Delivered(delivered) => self.mutate_delivery(delivered).map(Input::Delivered),
            Input::Closed(batch, result) => {
                let result = self.mutate_result(&batch, result);
                Some(Input::Closed(batch, result))
            }
            Input::Swept(page) => Some(Input::Swept(self.mutate_page(page))),
            Input::Closing(ClosingInput::Answered(call, answer)) => {
                let (call, answer) = self.mutate_answer(call, answer);
                Some(Input::Closing(ClosingInput::Answered(call, answer)))
            }
            others => Some(others),
        };
        if let Some(input) = input {
            self.engine.handle(input, now);
        }
    }

    pub fn poll_actions(&mut self, now: Timestamp) -> Vec<Action> {
        let mut actions = self.engine.poll_actions(now);
        if !self.settlements.is_empty() {
            actions.push(Action::Settle(std::mem::take(&mut self.settlements)));
        }
        for action in &mut actions {
            if let Action::Sweep(page) = action {
                self.looks_at_arrivals = page.limit != policy().sweep_page;
            }
            if let (Action::Closing(ClosingAction::Call(call)), Mutant::CancelsBeforeAsking) = (&mut *action, self.bug)
            {
                call.kind = CallKind::Cancel;
            }
            let receipts: Vec<Receipt> = match action {
                Action::Settle(settlements) => settlements.iter().map(|(receipt, _)| *receipt).collect(),
                Action::Rearm(rearms) => rearms.iter().map(|rearm| rearm.receipt).collect(),
                Action::Park(dead_letters) => dead_letters.iter().map(|(_, receipt)| *receipt).collect(),
                Action::Close(_)
                | Action::Closing(_)
                | Action::PauseClosing(_)
                | Action::ReportCounts
                | Action::Sweep(_) => Vec::new(),
            };
            self.in_flight.retain(|receipt, _| !receipts.contains(receipt));
        }
        actions
    }

    pub fn wants_deliveries(&self, now: Timestamp) -> bool {
        self.engine.wants_deliveries(now)
    }

    pub fn next_wakeup(&self) -> Option<Timestamp> {
        self.engine.next_wakeup()
    }

    pub fn take_counts(&mut self) -> Counts {
        self.engine.take_counts()
    }

    pub fn drain(&mut self) {
        self.engine.drain();
    }

    pub fn closers_are_idle(&self) -> bool {
        self.engine.closers_are_idle()
    }

    /// The session in which this held or closing alarm was delivered.
    pub fn session_of(&self, alarm: &DeliveredAlarm) -> Option<u64> {
        let same =
            |(order_id, deadline): &(OrderId, Deadline)| order_id == alarm.order_id() && *deadline == alarm.deadline();
        self.in_flight.iter().filter(|(_, key)| same(key)).map(|(receipt, _)| receipt.session).max()
    }

    fn mutate_delivery(&mut self, mut delivered: Delivered) -> Option<Delivered> {
        let Ok(alarm) = &mut delivered.content else { return Some(delivered) };
        let key = (alarm.order_id().clone(), alarm.deadline());
        let is_redelivery = self.session_of(alarm).is_some_and(|session| session < delivered.receipt.session);
        if is_redelivery && self.bug == Mutant::AcknowledgesRedelivery {
            self.settlements.push((delivered.receipt, Settlement::Ack));
            return None;
        }
        // The receipts of earlier sessions are void.
        self.in_flight.retain(|receipt, other| *other != key || receipt.session >= delivered.receipt.session);
        self.in_flight.insert(delivered.receipt, key);
        if self.bug == Mutant::HoldsTooLong {
            alarm.alarm.deadline = alarm.alarm.deadline + HELD_TOO_LONG_BY;
        }
        Some(delivered)
    }

    fn mutate_result(&mut self, batch: &Batch, mut result: BatchResult) -> BatchResult {
        let (from, to) = match self.bug {
            Mutant::DropsNotDue => (Outcome::NotDue, Outcome::AlreadyClosed),
            Mutant::TakesBusyForClosed => (Outcome::Busy, Outcome::Closed),
            _ => (Outcome::Closed, Outcome::Closed),
        };
        match &mut result {
            Ok(results) => {
                let found = results.values_mut().flatten().filter(|CloseOutcome { outcome, .. }| *outcome == from);
                found.for_each(|found| found.outcome = to);
            }
            Err(CloseError::Locked(_) | CloseError::Transient(_) | CloseError::Rejected(_))
                if batch.by == ClosedBy::Sweep =>
            {
                if let [item] = &batch.items[..] {
                    self.backed_off.insert(item.alarm.order_id().clone());
                }
            }
            Err(_) => {}
        }
        result
    }

    fn mutate_answer(&mut self, call: Call, answer: Answer) -> (Call, Answer) {
        let answer = match (self.bug, answer) {
            (Mutant::ReleasesOnUnknown, Answer::Unknown(_)) => Answer::Closed,
            (Mutant::OneVerdictDecides, answer) => {
                let was_decided = self.decided.contains(&call.lease);
                if answer == Answer::Closed {
                    self.decided.insert(call.lease);
                }
                if was_decided { Answer::Closed } else { answer }
            }
            // The engine waits for the answer to its question.
            (Mutant::CancelsBeforeAsking, answer) => return (Call { kind: CallKind::Ask, ..call }, answer),
            (_, answer) => answer,
        };
        (call, answer)
    }

    fn mutate_page(&mut self, mut page: SweptPage) -> SweptPage {
        match self.bug {
            Mutant::OverlooksMissingAlarms if self.looks_at_arrivals => page.orders.clear(),
            Mutant::ForgetsFailed => page.orders.retain(|overdue| !self.backed_off.contains(&overdue.order_id)),
            Mutant::FailureEndsPass => {
                if let Some(at) = page.orders.iter().position(|overdue| self.backed_off.contains(&overdue.order_id)) {
                    page.orders.truncate(at + 1);
                    page.next = None;
                }
            }
            _ => {}
        }
        page
    }
}
