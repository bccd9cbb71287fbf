//! Whether a batch waits for a lock that somebody else has on stock, and who waits together.
//!
//! Pure, like the whole engine. Some articles are locked for milliseconds again and again, and whoever does not wait never
//! has them; others are locked for minutes, and whoever waits holds up a closer. Only trying tells them apart.

use std::collections::HashMap;
use std::time::Duration;

use super::{Batch, BatchResult, LockMode, WorkItem};
use crate::order::{CloseError, OrderId, Timestamp};

/// For so long after fresh alarms waited in vain none of them waits: the lock's holder may keep it, and each batch with an
/// order that needs it would hold up a closer for as long again.
const NO_WAITING_AFTER_A_LOCK: Duration = Duration::from_secs(1);
/// The same for those who come again and again, and wait only where that leaves a closer to the rest. Short, for they
/// wait one by one until it is known who fails the others.
const NO_WAITING_OF_OTHERS: Duration = Duration::from_millis(400);

/// For so long whoever waited in vain alone lets the others wait without him: he would fail them.
const NO_WAITING_OF_ONE: Duration = Duration::from_secs(30);

/// How many more wait together after a wait that was not in vain. After one that was, each waits by himself.
const MORE: usize = 8;

#[derive(Debug)]
pub(super) struct LockWaitBudget {
    /// Until when no fresh alarm waits.
    fresh_lost_until: Option<Timestamp>,
    /// The same for everybody else. They must not keep the fresh ones from waiting.
    others_lost_until: Option<Timestamp>,
    /// How many of everybody else wait together.
    together: usize,
    /// Who of them has waited alone in vain, and when. SampledIds: one every [`NO_WAITING_OF_OTHERS`].
    in_vain: HashMap<OrderId, Timestamp>,
    /// Until when none of these waits.
    in_vain_lost_until: Option<Timestamp>,
}

impl Default for LockWaitBudget {
    fn default() -> Self {
        Self {
            fresh_lost_until: None,
            others_lost_until: None,
            together: usize::MAX,
            in_vain: HashMap::new(),
            in_vain_lost_until: None,
        }
    }
}

impl LockWaitBudget {
    pub fn is_with_fresh(&self, now: Timestamp) -> bool {
        has_passed(self.fresh_lost_until, now)
    }

    pub fn is_with_others(&self, now: Timestamp) -> bool {
        has_passed(self.others_lost_until, now)
    }

    /// Takes out of `items` those who wait together now, if any. Whoever has waited in vain does so again by himself, now
    /// and then, where there is nobody else.
    pub fn take_from(&self, items: &mut Vec<WorkItem>, now: Timestamp) -> Vec<WorkItem> {
        let may_wait = |item: &mut WorkItem| !self.has_just_failed(item.alarm.order_id(), now);
        let waiting: Vec<WorkItem> = items.extract_if(.., may_wait).take(self.together).collect();
        if !waiting.is_empty() || !has_passed(self.in_vain_lost_until, now) {
            return waiting;
        }
        let longest_ago = (0..items.len()).min_by_key(|index| self.in_vain.get(items[*index].alarm.order_id()));
        longest_ago.map(|index| items.remove(index)).into_iter().collect()
    }

    /// Whether this one has waited alone in vain not long ago.
    pub fn has_just_failed(&self, order_id: &OrderId, now: Timestamp) -> bool {
        self.in_vain.get(order_id).is_some_and(|failed| now.since(*failed) < NO_WAITING_OF_ONE)
    }

    /// Takes note of whether this batch has waited in vain. A timeout counts, too: whoever waited with the one to blame
    /// finds his article locked when he is tried without waiting, and would wait with him again.
    pub fn note(&mut self, batch: &Batch, answer: &BatchResult, now: Timestamp) {
        match (batch.wait, answer) {
            (LockMode::WaitFresh, Err(CloseError::Locked(_))) => {
                self.fresh_lost_until = Some(now + NO_WAITING_AFTER_A_LOCK);
                self.others_wait_one_by_one(now + NO_WAITING_OF_OTHERS);
            }
            (LockMode::WaitRetried, Err(CloseError::Locked(_) | CloseError::Transient(_))) => match &batch.items[..] {
                [item] => self.note_in_vain(item, now),
                _ => self.others_wait_one_by_one(now + NO_WAITING_OF_OTHERS),
            },
            // Rejected by something else: not for a lock.
            (LockMode::WaitRetried, Ok(_) | Err(CloseError::Rejected(_))) => {
                self.together = self.together.saturating_mul(MORE)
            }
            (LockMode::NoWait | LockMode::WaitFresh | LockMode::WaitRetried, _) => {}
        }
    }

    fn note_in_vain(&mut self, item: &WorkItem, now: Timestamp) {
        self.in_vain.retain(|_, failed| now.since(*failed) < NO_WAITING_OF_ONE);
        self.in_vain_lost_until = Some(now + NO_WAITING_AFTER_A_LOCK);
        let known = self.in_vain.insert(item.alarm.order_id().clone(), now);
        if known.is_none() {
            self.others_wait_one_by_one(now + NO_WAITING_OF_OTHERS);
        }
    }

    fn others_wait_one_by_one(&mut self, from: Timestamp) {
        self.others_lost_until = Some(from);
        self.together = 1;
    }

    pub fn clock_was_set_back(&mut self) {
        *self = Self::default();
    }
}

fn has_passed(until: Option<Timestamp>, now: Timestamp) -> bool {
    until.is_none_or(|until| until <= now)
}
