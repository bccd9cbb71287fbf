//! The shop's side of the world: orders come in, are paid, get another deadline, or cannot be closed.

use std::time::Duration;

use order_timeout_core::order::OrderId;

use super::database::{OutboxRow, Row, Status};
use super::provider::{AttemptState, Truth};
use super::{World, alarm};
use crate::events::Event;

/// How an order's alarm is scheduled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheduling {
    /// Published after the commit.
    Published,
    /// In the order's transaction.
    InTransaction,
    /// Its publisher crashed: only the sweep can find it.
    Forgotten,
    /// Published, and the order's transaction rolled back.
    WithoutAnOrder,
}

impl World {
    pub fn create(&mut self, delay: Duration, scheduling: Scheduling) {
        let order_id = OrderId::new(format!("order-{}", self.rows.len())).expect("a good id");
        let now = self.database_time();
        let deadline = now + delay;
        let event = match scheduling {
            Scheduling::WithoutAnOrder => return self.alarm_without_order(delay),
            Scheduling::Published if self.broker_is_away => Event::AlarmNotPublished,
            Scheduling::Published => {
                self.arm.push_back(alarm(&order_id, deadline, now));
                Event::AlarmPublished
            }
            Scheduling::InTransaction => {
                self.alarm_outbox.push(OutboxRow::new(order_id.clone(), deadline));
                Event::AlarmInTransaction
            }
            Scheduling::Forgotten => Event::AlarmForgotten,
        };
        let has_alarm = matches!(event, Event::AlarmPublished | Event::AlarmInTransaction);
        self.rows.insert(order_id, Row::unpaid(deadline, has_alarm));
        self.note(event);
    }

    fn alarm_without_order(&mut self, delay: Duration) {
        if self.broker_is_away {
            return;
        }
        self.alarms_without_order += 1;
        let order_id = OrderId::new(format!("missing-{}", self.alarms_without_order)).expect("a good id");
        let now = self.database_time();
        self.arm.push_back(alarm(&order_id, now + delay, now));
        self.note(Event::AlarmForNoOrder);
    }

    fn nth_row(&mut self, n: usize) -> Option<&mut Row> {
        let count = self.rows.len();
        self.rows.values_mut().nth(n.checked_rem(count)?)
    }

    /// With a provider, a payment is its callback: there is money for one of the attempts.
    fn nth_row_with_money(&mut self, n: usize) -> Option<&mut Row> {
        let mut rows: Vec<&mut Row> = self.rows.values_mut().filter(|row| row.has_money() && row.is_open()).collect();
        // The first is one that is being closed, if there is any.
        rows.sort_by_key(|row| row.status != Status::Closing);
        let n = n.checked_rem(rows.len())?;
        Some(rows.swap_remove(n))
    }

    /// Takes the row's lock and finds it unpaid, or gives up.
    pub fn begin_payment(&mut self, n: usize) {
        let now = self.database_time();
        let row = if self.has_provider { self.nth_row_with_money(n) } else { self.nth_row(n) };
        let Some(row) = row else { return };
        let (was_paying, status, is_late) = (row.paying, row.status, row.deadline <= now);
        let is_payable = status == Status::Unpaid || status == Status::Closing;
        row.paying |= is_payable;
        self.note_if(status == Status::Closed, Event::PaymentFoundOrderClosed);
        let begins = is_payable && !was_paying;
        self.note_if(begins && status == Status::Closing, Event::PaymentBegunWhileClosing);
        self.note_if(begins, if is_late { Event::PaymentBegunLate } else { Event::PaymentBegun });
    }

    /// Commits every payment that is under way.
    pub fn commit_payments(&mut self) {
        self.end_payments(true, Event::PaymentCommitted);
    }

    /// The provider declines, or the shop's process crashed.
    pub fn roll_back_payments(&mut self) {
        self.end_payments(false, Event::PaymentRolledBack);
    }

    fn end_payments(&mut self, is_committed: bool, event: Event) {
        let paying: Vec<&mut Row> = self.rows.values_mut().filter(|row| row.paying).collect();
        let took_effect = !paying.is_empty();
        for row in paying {
            row.paying = false;
            if is_committed {
                row.status = Status::Paid;
                row.payments += 1;
                let paid = row.attempts.iter_mut().filter(|attempt| attempt.truth == Truth::Paid);
                paid.for_each(|attempt| attempt.state = AttemptState::Paid);
            }
        }
        self.note_if(took_effect, event);
    }

    /// Sets another deadline as `move_deadline` does: an earlier one gets an alarm of its own.
    pub fn move_deadline(&mut self, n: usize, delay: Duration) {
        let deadline = self.database_time() + delay;
        let count = self.rows.len();
        let Some((order_id, row)) = n.checked_rem(count).and_then(|n| self.rows.iter_mut().nth(n)) else { return };
        if row.status != Status::Unpaid || row.paying {
            return;
        }
        let is_earlier = deadline < row.deadline;
        row.deadline = deadline;
        if is_earlier {
            row.has_alarm = true;
            self.alarm_outbox.push(OutboxRow::new(order_id.clone(), deadline));
        }
        self.note(if is_earlier { Event::DeadlineMovedEarlier } else { Event::DeadlineMovedLater });
    }

    /// A trigger on the orders table begins, or stops, to refuse this order's close.
    pub fn refuse(&mut self, n: usize, refuses: bool) {
        let Some(row) = self.nth_row(n).filter(|row| row.is_open() && row.refuses != refuses) else {
            return;
        };
        row.refuses = refuses;
        self.note(if refuses { Event::RefusalBegun } else { Event::RefusalEnded });
    }
}
