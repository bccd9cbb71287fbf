//! The payment provider of the world: what is really paid, and what it answers.
//!
//! The truth about money is here and nowhere else: rows and answers may be behind it.

use order_timeout_core::engine::{Call, CallKind};
use order_timeout_core::order::OrderId;
use order_timeout_core::payment::{Answer, Attempt, Currency, Money, Unknown};

use super::database::Status;
use super::{Mutant, World};
use crate::events::Event;

/// What each attempt is to pay, in cents.
const PRICE: i64 = 1_999;

/// What is true of an attempt at the provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Truth {
    /// The customer has not confirmed it yet.
    Absent,
    Open,
    InProgress,
    Paid,
    PaidOtherAmount,
    Refunded,
    Closed,
}

/// What a customer does, or the shop for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CustomerAct {
    Confirm,
    BeginToPay,
    GiveUp,
    Pay,
    PayOtherAmount,
    GetRefund,
}

/// What the shop has recorded of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptState {
    Open,
    Paid,
    Closed,
}

/// An attempt to pay.
#[derive(Debug, Clone)]
pub struct SimulatedAttempt {
    pub reference: String,
    pub provider: &'static str,
    pub truth: Truth,
    pub state: AttemptState,
    /// Whether it was ever to be cancelled, by any worker.
    pub cancel_sent: bool,
}

impl SimulatedAttempt {
    pub fn to_attempt(&self) -> Attempt {
        Attempt { provider: self.provider.to_owned(), reference: self.reference.clone(), money: money(PRICE) }
    }
}

fn money(amount_minor: i64) -> Money {
    Money { amount_minor, currency: Currency::new("EUR").expect("a currency") }
}

impl World {
    /// Whether orders are asked about before they are closed.
    pub fn has_provider(&self) -> bool {
        self.has_provider
    }

    /// A customer begins to pay an order that the shop still offers: it looks at the row under its lock.
    pub fn begin_attempt(&mut self, n: usize, is_confirmed: bool) {
        let count = self.rows.len();
        let Some((order_id, row)) = n.checked_rem(count).and_then(|n| self.rows.iter_mut().nth(n)) else { return };
        if row.status != Status::Unpaid || row.paying {
            return;
        }
        let number = row.attempts.len();
        row.attempts.push(SimulatedAttempt {
            reference: format!("{order_id}/{number}"),
            // The second attempt is at another provider.
            provider: if number % 2 == 0 { "stripe" } else { "paypal" },
            truth: if is_confirmed { Truth::Open } else { Truth::Absent },
            state: AttemptState::Open,
            cancel_sent: false,
        });
        self.note(if number == 0 { Event::AttemptBegun } else { Event::FurtherAttemptBegun });
    }

    /// `prefers_closing`: it is about an attempt that a worker is about to call about, or else about one of an order that
    /// is being closed, if there is any.
    pub fn customer_acts(&mut self, n: usize, prefers_closing: bool, act: CustomerAct) {
        let called = self.pending_calls();
        let mut attempts: Vec<(bool, &mut SimulatedAttempt)> = Vec::new();
        for row in self.rows.values_mut() {
            let is_closing = row.status == Status::Closing;
            attempts.extend(row.attempts.iter_mut().map(|attempt| (is_closing, attempt)));
        }
        if prefers_closing && attempts.iter().any(|(_, attempt)| called.contains(&attempt.reference)) {
            attempts.retain(|(_, attempt)| called.contains(&attempt.reference));
        } else if prefers_closing && attempts.iter().any(|(is_closing, _)| *is_closing) {
            attempts.retain(|(is_closing, _)| *is_closing);
        }
        let count = attempts.len();
        let Some(n) = n.checked_rem(count) else { return };
        let (is_closing, attempt) = &mut attempts[n];
        let truth = match (act, attempt.truth) {
            (CustomerAct::Confirm, Truth::Absent) => Truth::Open,
            (CustomerAct::BeginToPay, Truth::Absent | Truth::Open) => Truth::InProgress,
            (CustomerAct::GiveUp, Truth::InProgress) => Truth::Open,
            (CustomerAct::Pay, Truth::Absent | Truth::Open | Truth::InProgress) => Truth::Paid,
            (CustomerAct::PayOtherAmount, Truth::Open | Truth::InProgress) => Truth::PaidOtherAmount,
            // Paid, and given back at once.
            (CustomerAct::GetRefund, Truth::Open | Truth::InProgress | Truth::Paid) => Truth::Refunded,
            _ => return,
        };
        attempt.truth = truth;
        let event = match act {
            CustomerAct::Pay if *is_closing => Event::CustomerPaidWhileClosing,
            CustomerAct::Pay => Event::CustomerPaid,
            CustomerAct::PayOtherAmount => Event::CustomerPaidOtherAmount,
            CustomerAct::GetRefund => Event::CustomerGotRefund,
            CustomerAct::Confirm | CustomerAct::BeginToPay | CustomerAct::GiveUp => Event::CustomerIsPaying,
        };
        self.note(event);
    }

    pub fn set_provider_away(&mut self, away: bool) {
        self.note_if(away && !self.provider_is_away, Event::ProviderWentAway);
        self.provider_is_away = away;
    }

    /// Every customer who is paying gives up.
    pub(super) fn end_payments_in_progress(&mut self) {
        let attempts = self.rows.values_mut().flat_map(|row| &mut row.attempts);
        attempts.filter(|one| one.truth == Truth::InProgress).for_each(|one| one.truth = Truth::Open);
    }

    /// Makes a call. It takes effect even if its answer is lost.
    pub(super) fn call(&mut self, call: &Call, is_lost: bool) -> Answer {
        self.has_changed = true;
        self.check_asked_before(call);
        if self.provider_is_away {
            self.note(Event::CallFoundProviderAway);
            return unknown("the provider is away");
        }
        let answer = self.answer(&call.order_id, call);
        if is_lost {
            self.note(Event::AnswerLost);
            return unknown("no answer in time");
        }
        answer
    }

    fn answer(&mut self, order_id: &OrderId, call: &Call) -> Answer {
        let is_reference = |attempt: &&mut SimulatedAttempt| attempt.reference == call.attempt.reference;
        let attempt = self.rows.get_mut(order_id).and_then(|row| row.attempts.iter_mut().find(is_reference));
        let Some(attempt) = attempt else { return Answer::Absent };
        let before = attempt.truth;
        if call.kind == CallKind::Cancel {
            attempt.cancel_sent = true;
            if before == Truth::Open {
                attempt.truth = Truth::Closed;
            }
        }
        let truth = attempt.truth;
        self.note(if call.kind == CallKind::Ask { Event::Asked } else { Event::CancelCalled });
        self.note_if(call.kind == CallKind::Cancel && truth == Truth::Paid, Event::PaidBeforeCancel);
        match truth {
            Truth::Absent => Answer::Absent,
            Truth::Open => Answer::Open,
            Truth::InProgress => Answer::InProgress,
            Truth::Paid => Answer::Paid { money: Some(money(PRICE)) },
            Truth::PaidOtherAmount => Answer::Paid { money: Some(money(PRICE - 1)) },
            Truth::Refunded => Answer::Refunded,
            Truth::Closed => Answer::Closed,
        }
    }

    /// Some providers give money back when a paid attempt is cancelled, so each is asked first.
    fn check_asked_before(&mut self, call: &Call) {
        let key = (call.lease, call.attempt.reference.clone());
        match call.kind {
            CallKind::Ask => drop(self.asked.insert(key)),
            CallKind::Cancel if !self.asked.contains(&key) => {
                self.cancelled_unasked = Some(format!("{} was cancelled before it was asked about", key.1));
            }
            CallKind::Cancel => {}
        }
    }

    /// Whether the mutant takes what was to be cancelled for closed.
    pub(super) fn skips_verdicts(&self) -> bool {
        self.mutant == Mutant::ResumeSkipsVerdict
    }
}

fn unknown(why: &str) -> Answer {
    Answer::Unknown(Unknown { why: why.to_owned(), retry_after: None, was_asked: true })
}
