//! The production engine; or one that breaks a rule of its own, by news that it hears otherwise than it was told, and
//! actions that it gives otherwise than it was meant to.
//!
//! Nothing in production knows of this. With [`Mutant::Sound`] news and actions pass as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use order_timeout::alarm::{Delivered, DeliveredAlarm, Receipt, Settlement};
use order_timeout::engine::{Action, Batch, BatchResult, Engine, Input};
use order_timeout::order::{CloseError, CloseOutcome, ClosedBy, Deadline, OrderId, Outcome, SweptPage, Timestamp};

use super::{Mutant, policy};

/// Shorter than the sweep waits for alarms, so that it is not the sweep which closes the order.
const HELD_TOO_LONG_FOR: Duration = Duration::from_millis(5);

pub struct MutantEngine {
    engine: Engine,
    bug: Mutant,
    /// What was delivered and is neither settled nor on its way elsewhere: it waits here or is being closed.
    in_flight: BTreeMap<Receipt, (OrderId, Deadline)>,
    settlements: Vec<(Receipt, Settlement)>,
    /// Orders that the sweep tried alone and could not close.
    backed_off: BTreeSet<OrderId>,
}

impl MutantEngine {
    pub fn new(bug: Mutant) -> Self {
        let mut policy = policy();
        if bug == Mutant::SweepsEveryMinute {
            policy.sweep_every = Duration::from_secs(60);
        }
        let engine = Engine::new(policy);
        Self { engine, bug, in_flight: BTreeMap::new(), settlements: Vec::new(), backed_off: BTreeSet::new() }
    }

    pub fn handle(&mut self, news: Input, now: Timestamp) {
        let news = match news {
            Input::Delivered(delivered) => self.bend_delivery(delivered).map(Input::Delivered),
            Input::Closed(batch, answer) => {
                let answer = self.bend_answer(&batch, answer);
                Some(Input::Closed(batch, answer))
            }
            Input::Swept(page) => Some(Input::Swept(self.bend_page(page))),
            others => Some(others),
        };
        if let Some(news) = news {
            self.engine.handle(news, now);
        }
    }

    pub fn poll_actions(&mut self, now: Timestamp) -> Vec<Action> {
        let mut actions = self.engine.poll_actions(now);
        if !self.settlements.is_empty() {
            actions.push(Action::Settle(std::mem::take(&mut self.settlements)));
        }
        for errand in &actions {
            let receipts: Vec<Receipt> = match errand {
                Action::Settle(settlements) => settlements.iter().map(|(receipt, _)| *receipt).collect(),
                Action::Rearm(rearms) => rearms.iter().map(|rearm| rearm.receipt).collect(),
                Action::Park(dead_letters) => dead_letters.iter().map(|(_, receipt)| *receipt).collect(),
                Action::Close(_) | Action::Sweep(_) => Vec::new(),
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

    pub fn drain(&mut self) {
        self.engine.drain();
    }

    pub fn closers_are_idle(&self) -> bool {
        self.engine.closers_are_idle()
    }

    /// The session in which this alarm came that waits here or is being closed.
    pub fn session_of(&self, alarm: &DeliveredAlarm) -> Option<u64> {
        let same =
            |(order_id, deadline): &(OrderId, Deadline)| order_id == alarm.order_id() && *deadline == alarm.deadline();
        self.in_flight.iter().filter(|(_, key)| same(key)).map(|(receipt, _)| receipt.session).max()
    }

    fn bend_delivery(&mut self, mut delivered: Delivered) -> Option<Delivered> {
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
            alarm.alarm.deadline = alarm.alarm.deadline + HELD_TOO_LONG_FOR;
        }
        Some(delivered)
    }

    fn bend_answer(&mut self, batch: &Batch, mut answer: BatchResult) -> BatchResult {
        let (from, to) = match self.bug {
            Mutant::DropsNotDue => (Outcome::NotDue, Outcome::AlreadyClosed),
            Mutant::TakesBusyForClosed => (Outcome::Busy, Outcome::Closed),
            _ => (Outcome::Closed, Outcome::Closed),
        };
        match &mut answer {
            Ok(findings) => {
                let found = findings.values_mut().flatten().filter(|CloseOutcome { outcome, .. }| *outcome == from);
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
        answer
    }

    fn bend_page(&mut self, mut page: SweptPage) -> SweptPage {
        match self.bug {
            Mutant::ForgetsTrouble => page.orders.retain(|overdue| !self.backed_off.contains(&overdue.order_id)),
            Mutant::TroubleEndsThePass => {
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
