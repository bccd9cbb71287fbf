//! The database's side of the world: rows, what the close and the sweep's statements do, and the outbox of alarms.

use std::collections::HashMap;

use order_timeout_core::engine::{Batch, BatchResult};
use order_timeout_core::order::{
    CloseError, CloseOutcome, CloseResult, ClosedBy, Deadline, OrderId, Outcome, Overdue, SweepPage, SweepPlace,
    SweepReach, SweptPage, Timestamp,
};

use super::provider::{AttemptState, SimulatedAttempt, Truth};
use super::worker::Fault;
use super::{Mutant, World, alarm};
use crate::events::Event;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Unpaid,
    /// Claimed: its attempts are asked about at the provider.
    Closing,
    Paid,
    Closed,
}

#[derive(Debug, Clone)]
pub struct Row {
    pub status: Status,
    pub deadline: Deadline,
    /// A payment holds the row's lock.
    pub paying: bool,
    pub closes: u32,
    pub stock_returned: u32,
    pub events: u32,
    /// When it was last closed, by the database's clock, and by which path.
    pub closed: Option<(Timestamp, ClosedBy)>,
    pub closed_early: bool,
    /// Whether its alarm reached the broker or the outbox, so that it must never be without one.
    pub has_alarm: bool,
    /// A trigger refuses its close and makes any batch with it fail.
    pub refuses: bool,
    /// A batch with it has failed: it may have been paused.
    pub has_failed: bool,
    /// Attempts to pay it, in the order in which they were begun.
    pub attempts: Vec<SimulatedAttempt>,
    /// How often it was settled as paid because its provider said so.
    pub settled: u32,
    /// How often a payment of the shop's own made it paid.
    pub payments: u32,
    pub paid_at: Option<Timestamp>,
}

impl Row {
    pub fn unpaid(deadline: Deadline, has_alarm: bool) -> Self {
        Self {
            status: Status::Unpaid,
            deadline,
            paying: false,
            closes: 0,
            stock_returned: 0,
            events: 0,
            closed: None,
            closed_early: false,
            has_alarm,
            refuses: false,
            has_failed: false,
            attempts: Vec::new(),
            settled: 0,
            payments: 0,
            paid_at: None,
        }
    }

    /// Neither paid nor closed.
    pub fn is_open(&self) -> bool {
        matches!(self.status, Status::Unpaid | Status::Closing)
    }

    pub(super) fn record_close(&mut self, now: Timestamp, by: ClosedBy) {
        self.status = Status::Closed;
        self.closes += 1;
        self.stock_returned += 1;
        self.events += 1;
        self.closed = Some((now, by));
        self.closed_early |= self.deadline > now;
    }

    /// Whether the provider has the whole amount for one of its attempts.
    pub(super) fn has_money(&self) -> bool {
        self.attempts.iter().any(|attempt| attempt.truth == Truth::Paid)
    }
}

/// A row of the outbox of alarms.
pub struct OutboxRow {
    pub order_id: OrderId,
    pub deadline: Deadline,
    /// The broker has confirmed it.
    pub confirmed: bool,
    /// How often it was published: by relays that crashed before they marked the row, and once more.
    pub times_published: u32,
}

impl OutboxRow {
    pub fn new(order_id: OrderId, deadline: Deadline) -> Self {
        Self { order_id, deadline, confirmed: false, times_published: 0 }
    }
}

impl World {
    pub fn database_is_away(&self) -> bool {
        self.database_is_away
    }

    pub fn set_database_away(&mut self, away: bool) {
        let was_away = std::mem::replace(&mut self.database_is_away, away);
        self.note_if(away && !was_away, Event::DatabaseWentAway);
        self.note_if(was_away && !away, Event::DatabaseCameBack);
    }

    /// The database's result for a batch.
    pub(super) fn close_batch(
        &mut self,
        batch: &Batch,
        read: Option<HashMap<OrderId, CloseResult>>,
        fault: Fault,
    ) -> BatchResult {
        let unavailable = || CloseError::Unavailable("the connection is gone".into());
        if self.database_is_away {
            self.note(Event::CloseFoundDatabaseAway);
            return Err(unavailable());
        }
        if let Some(error) = self.close_error(batch, fault) {
            for item in &batch.items {
                if let Some(row) = self.rows.get_mut(item.alarm.order_id()) {
                    row.has_failed = true;
                }
            }
            return Err(error);
        }
        let found = self.close(batch, read);
        if fault != Fault::ResultLost {
            return Ok(found);
        }
        let has_closed =
            found.values().flatten().any(|found| matches!(found.outcome, Outcome::Closed | Outcome::Claimed));
        self.note_if(has_closed, Event::CommitAnswerLost);
        Err(unavailable())
    }

    fn close_error(&mut self, batch: &Batch, fault: Fault) -> Option<CloseError> {
        if fault == Fault::Transient {
            self.note_if(!batch.items.is_empty(), Event::CloseDeadlocked);
            // A batch that waits for locks may fail to get one; one that does not wait may still deadlock.
            return Some(match batch.waits_for_locks() {
                true => CloseError::Locked("canceling statement due to lock timeout".into()),
                false => CloseError::Transient("deadlock detected".into()),
            });
        }
        let is_refused =
            |id: &OrderId| self.rows.get(id).is_some_and(|row| row.refuses && row.status == Status::Unpaid);
        if batch.items.iter().any(|item| is_refused(item.alarm.order_id())) {
            self.note(Event::CloseRefused);
            return Some(CloseError::Rejected("a trigger says no".into()));
        }
        None
    }

    pub(super) fn read_row(&self, order_id: &OrderId) -> Option<(OrderId, CloseResult)> {
        let row = self.rows.get(order_id)?;
        let outcome = match row.status {
            _ if row.paying => Outcome::Busy,
            Status::Paid => Outcome::Paid,
            Status::Closed => Outcome::AlreadyClosed,
            Status::Closing => Outcome::Closing,
            Status::Unpaid if row.deadline > self.database_time() => Outcome::NotDue,
            Status::Unpaid => Outcome::Closed,
        };
        Some((order_id.clone(), Ok(CloseOutcome { outcome, deadline: Some(row.deadline) })))
    }

    /// What `default_close.sql` does; or, with `read`, acts on what was read before, whatever has happened since.
    fn close(&mut self, batch: &Batch, read: Option<HashMap<OrderId, CloseResult>>) -> HashMap<OrderId, CloseResult> {
        let (now, mut results) = (self.database_time(), HashMap::new());
        let closes_unasked = self.mutant == Mutant::ClosesUnasked;
        self.has_changed |= !batch.items.is_empty();
        let (mut closed, mut without_attempts) = (0, 0);
        for order_id in batch.items.iter().map(|item| &item.alarm.alarm.order_id) {
            if results.contains_key(order_id) {
                continue;
            }
            let seen = read.as_ref().map_or_else(
                || self.read_row(order_id),
                |read| read.get_key_value(order_id).map(|(id, result)| (id.clone(), result.clone())),
            );
            let Some((order_id, Ok(mut found))) = seen else {
                self.note(Event::FoundUnknown);
                continue;
            };
            let row = self.rows.get_mut(&order_id).expect("it was looked at");
            let ignores_lock = self.mutant == Mutant::SweepIgnoresPayment && batch.by == ClosedBy::Sweep;
            if ignores_lock && found.outcome == Outcome::Busy && row.deadline <= now {
                found.outcome = Outcome::Closed;
            }
            if self.mutant == Mutant::StockPerDelivery && found.outcome == Outcome::AlreadyClosed {
                row.stock_returned += 1;
            }
            let has_open = row.attempts.iter().any(|attempt| attempt.state != AttemptState::Closed);
            if found.outcome == Outcome::Closed && has_open && !closes_unasked {
                self.claim(&order_id, batch.by, now);
                found.outcome = Outcome::Claimed;
            } else if found.outcome == Outcome::Closed {
                row.record_close(now, batch.by);
                closed += 1;
                without_attempts += u32::from(self.has_provider);
            } else if found.outcome == Outcome::Closing {
                self.note(Event::FoundClosing);
            }
            self.note_outcome(found.outcome, batch.by);
            results.insert(order_id, Ok(found));
        }
        self.note_if(closed > 1, Event::ClosedInBatch);
        self.note_if(without_attempts > 0, Event::ClosedWithoutAttempts);
        results
    }

    fn note_outcome(&mut self, outcome: Outcome, by: ClosedBy) {
        self.note(match outcome {
            // Noted where it happened.
            Outcome::Claimed | Outcome::Closing => return,
            Outcome::Closed if by == ClosedBy::Sweep => Event::ClosedBySweep,
            Outcome::Closed => Event::ClosedByAlarm,
            Outcome::Paid => Event::FoundPaid,
            Outcome::AlreadyClosed => Event::FoundClosed,
            Outcome::NotDue => Event::FoundNotDue,
            Outcome::Busy => Event::FoundBusy,
            Outcome::Malformed | Outcome::Unknown => unreachable!("no row here says {outcome:?}"),
        });
    }

    /// What `default_overdue.sql` does.
    pub(super) fn overdue(&mut self, page: &SweepPage) -> SweptPage {
        let key = |overdue: &Overdue| (overdue.deadline, overdue.order_id.as_str().to_owned());
        let after = page.after.as_ref().map(|place| (place.deadline, place.id.clone()));
        self.note_if(after.is_some(), Event::SweptFurtherPage);
        let unpaid = self.rows.iter().filter(|(_, row)| row.status == Status::Unpaid);
        let mut orders: Vec<Overdue> = unpaid
            .filter(|(_, row)| match page.reach {
                SweepReach::Overdue(grace) => row.deadline + grace <= self.database_time(),
                SweepReach::Ahead(ahead) => row.deadline <= self.database_time() + ahead,
            })
            .map(|(id, row)| Overdue { order_id: id.clone(), deadline: row.deadline })
            .filter(|overdue| after.as_ref().is_none_or(|after| key(overdue) > *after))
            .collect();
        orders.sort_by_key(key);
        orders.truncate(page.limit);
        let last = orders.last().filter(|_| orders.len() == page.limit);
        let next = last.map(|last| SweepPlace { deadline: last.deadline, id: last.order_id.as_str().to_owned() });
        SweptPage { orders, next }
    }

    /// The relay's first half: publish what is in the outbox.
    pub fn relay(&mut self) {
        if self.broker_is_away || self.database_is_away {
            return;
        }
        let now = self.database_time();
        let mut events = Vec::new();
        for row in self.alarm_outbox.iter_mut().filter(|row| !row.confirmed) {
            row.confirmed = true;
            if row.deadline > now {
                self.arm.push_back(alarm(&row.order_id, row.deadline, now));
                row.times_published += 1;
                events.push(if row.times_published > 1 { Event::RelayedTwice } else { Event::Relayed });
            } else if let Some(order) = self.rows.get_mut(&row.order_id) {
                // Left to the sweep.
                order.has_alarm = false;
                events.push(Event::LeftToSweep);
            }
        }
        self.has_changed |= !events.is_empty();
        self.seen.extend(events);
    }

    /// The relay's second half: mark it. A crash between the two publishes again.
    pub fn mark_relayed(&mut self, crashed: bool) {
        let any = self.alarm_outbox.iter().any(|row| row.confirmed);
        let any_again = self.alarm_outbox.iter().any(|row| row.confirmed && row.times_published > 1);
        self.note_if(any_again && !crashed, Event::RelayMarkedAfterCrash);
        if crashed {
            self.alarm_outbox.iter_mut().for_each(|row| row.confirmed = false);
        } else {
            self.alarm_outbox.retain(|row| !row.confirmed);
        }
        self.note_if(any, if crashed { Event::RelayCrashedBeforeMarking } else { Event::RelayMarked });
    }
}
