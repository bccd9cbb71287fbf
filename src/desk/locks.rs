//! Whether a batch waits for a lock that somebody else has on stock, and who waits together.
//!
//! Pure, like the whole desk. Some articles are locked for milliseconds again and again, and whoever does not wait never
//! has them; others are locked for minutes, and whoever waits holds up a closer. Only trying tells them apart.

use std::collections::HashMap;
use std::time::Duration;

use super::{Answer, Batch, Case, Wait};
use crate::order::{CloseFault, Moment, OrderId};

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
pub(super) struct Patience {
    /// Until when no fresh alarm waits.
    fresh_lost_until: Option<Moment>,
    /// The same for everybody else. They must not keep the fresh ones from waiting.
    others_lost_until: Option<Moment>,
    /// How many of everybody else wait together.
    together: usize,
    /// Who of them has waited alone in vain, and when. Few: one every [`NO_WAITING_OF_OTHERS`].
    in_vain: HashMap<OrderId, Moment>,
    /// Until when none of these waits.
    in_vain_lost_until: Option<Moment>,
}

impl Default for Patience {
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

impl Patience {
    pub fn is_with_fresh(&self, now: Moment) -> bool {
        has_passed(self.fresh_lost_until, now)
    }

    pub fn is_with_others(&self, now: Moment) -> bool {
        has_passed(self.others_lost_until, now)
    }

    /// Takes out of `cases` those who wait together now, if any. Whoever has waited in vain does so again by himself, now
    /// and then, where there is nobody else.
    pub fn take_from(&self, cases: &mut Vec<Case>, now: Moment) -> Vec<Case> {
        let may_wait = |case: &mut Case| !self.has_just_failed(case.alarm.order_id(), now);
        let waiting: Vec<Case> = cases.extract_if(.., may_wait).take(self.together).collect();
        if !waiting.is_empty() || !has_passed(self.in_vain_lost_until, now) {
            return waiting;
        }
        let longest_ago = (0..cases.len()).min_by_key(|index| self.in_vain.get(cases[*index].alarm.order_id()));
        longest_ago.map(|index| cases.remove(index)).into_iter().collect()
    }

    /// Whether this one has waited alone in vain not long ago.
    pub fn has_just_failed(&self, order_id: &OrderId, now: Moment) -> bool {
        self.in_vain.get(order_id).is_some_and(|failed| now.since(*failed) < NO_WAITING_OF_ONE)
    }

    /// Takes note of whether this batch has waited in vain. A timeout counts, too: whoever waited with the one to blame
    /// finds his article locked when he is tried without waiting, and would wait with him again.
    pub fn note(&mut self, batch: &Batch, answer: &Answer, now: Moment) {
        match (batch.wait, answer) {
            (Wait::Fresh, Err(CloseFault::Locked(_))) => {
                self.fresh_lost_until = Some(now + NO_WAITING_AFTER_A_LOCK);
                self.others_wait_one_by_one(now + NO_WAITING_OF_OTHERS);
            }
            (Wait::Again, Err(CloseFault::Locked(_) | CloseFault::Transient(_))) => match &batch.cases[..] {
                [case] => self.note_in_vain(case, now),
                _ => self.others_wait_one_by_one(now + NO_WAITING_OF_OTHERS),
            },
            // Refused by something else: not for a lock.
            (Wait::Again, Ok(_) | Err(CloseFault::OfTheOrder(_))) => self.together = self.together.saturating_mul(MORE),
            (Wait::Not | Wait::Fresh | Wait::Again, _) => {}
        }
    }

    fn note_in_vain(&mut self, case: &Case, now: Moment) {
        self.in_vain.retain(|_, failed| now.since(*failed) < NO_WAITING_OF_ONE);
        self.in_vain_lost_until = Some(now + NO_WAITING_AFTER_A_LOCK);
        let known = self.in_vain.insert(case.alarm.order_id().clone(), now);
        if known.is_none() {
            self.others_wait_one_by_one(now + NO_WAITING_OF_OTHERS);
        }
    }

    fn others_wait_one_by_one(&mut self, from: Moment) {
        self.others_lost_until = Some(from);
        self.together = 1;
    }

    pub fn clock_was_set_back(&mut self) {
        *self = Self::default();
    }
}

fn has_passed(until: Option<Moment>, now: Moment) -> bool {
    until.is_none_or(|until| until <= now)
}
