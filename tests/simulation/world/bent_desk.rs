//! The production desk; or one that breaks a rule of its own, by news that it hears otherwise than it was told, and
//! errands that it gives otherwise than it was meant to.
//!
//! Nothing in production knows of this. With [`Mutant::Sound`] news and errands pass as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use order_timeout::alarm::{Alarm, Delivered, Receipt, Settlement};
use order_timeout::desk::{Answer, Batch, Desk, Errand, News};
use order_timeout::order::{CloseFault, ClosedBy, Deadline, Found, Moment, OrderId, Outcome, SweptPage};

use super::{Mutant, policy};

/// Shorter than the sweep waits for alarms, so that it is not the sweep which closes the order.
const HELD_TOO_LONG_FOR: Duration = Duration::from_millis(5);

pub struct BentDesk {
    desk: Desk,
    bug: Mutant,
    /// What was delivered and is neither settled nor on its way elsewhere: it waits here or is being closed.
    in_hand: BTreeMap<Receipt, (OrderId, Deadline)>,
    settlements: Vec<(Receipt, Settlement)>,
    /// Orders that the sweep tried alone and could not close.
    troubled: BTreeSet<OrderId>,
}

impl BentDesk {
    pub fn new(bug: Mutant) -> Self {
        let mut policy = policy();
        if bug == Mutant::SweepsEveryMinute {
            policy.sweep_every = Duration::from_secs(60);
        }
        let desk = Desk::new(policy);
        Self { desk, bug, in_hand: BTreeMap::new(), settlements: Vec::new(), troubled: BTreeSet::new() }
    }

    pub fn hear(&mut self, news: News, now: Moment) {
        let news = match news {
            News::Delivered(delivered) => self.bend_delivery(delivered).map(News::Delivered),
            News::Closed(batch, answer) => {
                let answer = self.bend_answer(&batch, answer);
                Some(News::Closed(batch, answer))
            }
            News::Swept(page) => Some(News::Swept(self.bend_page(page))),
            others => Some(others),
        };
        if let Some(news) = news {
            self.desk.hear(news, now);
        }
    }

    pub fn errands(&mut self, now: Moment) -> Vec<Errand> {
        let mut errands = self.desk.errands(now);
        if !self.settlements.is_empty() {
            errands.push(Errand::Settle(std::mem::take(&mut self.settlements)));
        }
        for errand in &errands {
            let receipts: Vec<Receipt> = match errand {
                Errand::Settle(settlements) => settlements.iter().map(|(receipt, _)| *receipt).collect(),
                Errand::Arm(jobs) => jobs.iter().map(|job| job.receipt).collect(),
                Errand::Park(parcels) => parcels.iter().map(|(_, receipt)| *receipt).collect(),
                Errand::Close(_) | Errand::Sweep(_) => Vec::new(),
            };
            self.in_hand.retain(|receipt, _| !receipts.contains(receipt));
        }
        errands
    }

    pub fn wants_deliveries(&self, now: Moment) -> bool {
        self.desk.wants_deliveries(now)
    }

    pub fn wake_at(&self) -> Option<Moment> {
        self.desk.wake_at()
    }

    pub fn drain(&mut self) {
        self.desk.drain();
    }

    pub fn closers_are_idle(&self) -> bool {
        self.desk.closers_are_idle()
    }

    /// The session in which this alarm came that waits here or is being closed.
    pub fn session_of(&self, alarm: &Alarm) -> Option<u64> {
        let same =
            |(order_id, deadline): &(OrderId, Deadline)| order_id == alarm.order_id() && *deadline == alarm.deadline();
        self.in_hand.iter().filter(|(_, key)| same(key)).map(|(receipt, _)| receipt.session).max()
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
        self.in_hand.retain(|receipt, other| *other != key || receipt.session >= delivered.receipt.session);
        self.in_hand.insert(delivered.receipt, key);
        if self.bug == Mutant::HoldsTooLong {
            alarm.due.deadline = alarm.due.deadline + HELD_TOO_LONG_FOR;
        }
        Some(delivered)
    }

    fn bend_answer(&mut self, batch: &Batch, mut answer: Answer) -> Answer {
        let (from, to) = match self.bug {
            Mutant::DropsNotDue => (Outcome::NotDue, Outcome::AlreadyClosed),
            Mutant::TakesBusyForClosed => (Outcome::Busy, Outcome::Closed),
            _ => (Outcome::Closed, Outcome::Closed),
        };
        match &mut answer {
            Ok(findings) => {
                let found = findings.values_mut().flatten().filter(|Found { outcome, .. }| *outcome == from);
                found.for_each(|found| found.outcome = to);
            }
            Err(CloseFault::Locked(_) | CloseFault::Transient(_) | CloseFault::OfTheOrder(_))
                if batch.by == ClosedBy::Sweep =>
            {
                if let [case] = &batch.cases[..] {
                    self.troubled.insert(case.alarm.order_id().clone());
                }
            }
            Err(_) => {}
        }
        answer
    }

    fn bend_page(&mut self, mut page: SweptPage) -> SweptPage {
        match self.bug {
            Mutant::ForgetsTrouble => page.orders.retain(|overdue| !self.troubled.contains(&overdue.order_id)),
            Mutant::TroubleEndsThePass => {
                if let Some(at) = page.orders.iter().position(|overdue| self.troubled.contains(&overdue.order_id)) {
                    page.orders.truncate(at + 1);
                    page.next = None;
                }
            }
            _ => {}
        }
        page
    }
}
