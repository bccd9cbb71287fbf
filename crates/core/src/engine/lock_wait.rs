//! Whether a batch waits for a lock that another session has on stock, and which orders wait together.
//!
//! Pure, like the whole engine. Some articles are locked for milliseconds again and again, and a statement that does
//! not wait never gets them; others are locked for minutes, and a statement that waits keeps a closer busy. Only trying
//! tells them apart.

use std::collections::HashMap;
use std::time::Duration;

use super::{Batch, BatchResult, LockMode, WorkItem};
use crate::order::{CloseError, OrderId, Timestamp};

/// How long no fresh alarm waits after a batch of fresh alarms did not get a lock: the holder may keep it, and each
/// batch with an order that needs it would keep a closer busy for as long again.
const FRESH_WAIT_PAUSE: Duration = Duration::from_secs(1);
/// The same for retried orders, which wait only if that leaves a closer to the rest. Short, because they wait one by
/// one until it is known which of them makes the others fail.
const RETRIED_WAIT_PAUSE: Duration = Duration::from_millis(400);

/// How long an order that waited alone and did not get its lock stays out of the waiting batches: it would make them
/// fail.
const FAILED_ORDER_PAUSE: Duration = Duration::from_secs(30);

/// By how much the number of orders that wait together grows after a wait that succeeded. After a failed wait each
/// waits alone.
const GROWTH: usize = 8;

#[derive(Debug, Default)]
pub(super) struct LockWaitBudget {
    /// Until when no fresh alarm waits.
    fresh_paused_until: Option<Timestamp>,
    /// Until when no retried order waits. They must not keep the fresh ones from waiting.
    retries_paused_until: Option<Timestamp>,
    /// How many retried orders wait together; `None`: all of them.
    together: Option<usize>,
    /// The orders that waited alone and did not get their lock, and when. Only a few: one every [`RETRIED_WAIT_PAUSE`].
    failed_waits: HashMap<OrderId, Timestamp>,
    /// Until when none of these waits again.
    failed_paused_until: Option<Timestamp>,
}

impl LockWaitBudget {
    pub fn fresh_may_wait(&self, now: Timestamp) -> bool {
        has_passed(self.fresh_paused_until, now)
    }

    pub fn retries_may_wait(&self, now: Timestamp) -> bool {
        has_passed(self.retries_paused_until, now)
    }

    /// Takes the items that wait together now, if any, out of `items`. An order that waited alone without success does
    /// so again, now and then, when no other order wants to wait.
    pub fn take_from(&self, items: &mut Vec<WorkItem>, now: Timestamp) -> Vec<WorkItem> {
        let may_wait = |item: &mut WorkItem| !self.has_just_failed(item.alarm.order_id(), now);
        let waiting: Vec<WorkItem> = items.extract_if(.., may_wait).take(self.together.unwrap_or(usize::MAX)).collect();
        if !waiting.is_empty() || !has_passed(self.failed_paused_until, now) {
            return waiting;
        }
        let longest_ago = (0..items.len()).min_by_key(|index| self.failed_waits.get(items[*index].alarm.order_id()));
        longest_ago.map(|index| items.remove(index)).into_iter().collect()
    }

    /// Whether this order waited alone without success not long ago.
    pub fn has_just_failed(&self, order_id: &OrderId, now: Timestamp) -> bool {
        self.failed_waits.get(order_id).is_some_and(|failed| now.since(*failed) < FAILED_ORDER_PAUSE)
    }

    /// Records whether this batch waited without success. A timeout counts, too: an order that waited together with the
    /// one at fault finds its article locked when it is tried without waiting, and would wait with that one again.
    pub fn note(&mut self, batch: &Batch, result: &BatchResult, now: Timestamp) {
        match (batch.lock_mode, result) {
            (LockMode::WaitFresh, Err(CloseError::Locked(_))) => {
                self.fresh_paused_until = Some(now + FRESH_WAIT_PAUSE);
                self.retries_wait_one_by_one(now + RETRIED_WAIT_PAUSE);
            }
            (LockMode::WaitRetried, Err(CloseError::Locked(_) | CloseError::Transient(_))) => match &batch.items[..] {
                [item] => self.note_failed_wait(item, now),
                _ => self.retries_wait_one_by_one(now + RETRIED_WAIT_PAUSE),
            },
            // Rejected for another reason than a lock.
            (LockMode::WaitRetried, Ok(_) | Err(CloseError::Rejected(_))) => {
                self.together = self.together.map(|together| together.saturating_mul(GROWTH))
            }
            (LockMode::NoWait | LockMode::WaitFresh | LockMode::WaitRetried, _) => {}
        }
    }

    fn note_failed_wait(&mut self, item: &WorkItem, now: Timestamp) {
        self.failed_waits.retain(|_, failed| now.since(*failed) < FAILED_ORDER_PAUSE);
        self.failed_paused_until = Some(now + FRESH_WAIT_PAUSE);
        let known = self.failed_waits.insert(item.alarm.order_id().clone(), now);
        if known.is_none() {
            self.retries_wait_one_by_one(now + RETRIED_WAIT_PAUSE);
        }
    }

    fn retries_wait_one_by_one(&mut self, from: Timestamp) {
        self.retries_paused_until = Some(from);
        self.together = Some(1);
    }

    pub fn clock_was_set_back(&mut self) {
        *self = Self::default();
    }
}

fn has_passed(until: Option<Timestamp>, now: Timestamp) -> bool {
    until.is_none_or(|until| until <= now)
}
