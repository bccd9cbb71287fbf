//! Whether a batch waits for a lock that somebody else has on stock, and who waits together.
//!
//! Pure, like the whole desk. Some articles are locked for milliseconds again and again, and whoever does not wait never
//! has them; others are locked for minutes, and whoever waits holds up a closer. Only trying tells them apart.

use std::collections::HashMap;
use std::time::Duration;

use super::{Answer, Batch, Case};
use crate::order::{CloseFault, ClosedBy, Moment, OrderId};

/// For so long after a batch waited in vain none of its kind waits: the lock's holder may keep it, and each batch with an
/// order that needs it would hold up a closer for as long again.
const NO_WAITING_AFTER_A_LOCK: Duration = Duration::from_secs(1);
/// The same for whoever waits only where that leaves a closer to the rest.
const NO_WAITING_OF_OTHERS: Duration = Duration::from_millis(400);

/// For so long whoever waited in vain alone does not wait: he fails all he waits with. Not for ever, for the queue for his
/// article may just have been long.
const NO_WAITING_OF_ONE: Duration = Duration::from_secs(30);

/// How many more wait together after a wait that was not in vain. After one that was, each waits by himself.
const MORE: usize = 8;

#[derive(Debug)]
pub(super) struct Patience {
    /// Until when no alarm that was never tried waits.
    fresh_lost_until: Option<Moment>,
    /// The same for everybody else. They come again and again: they must not keep the fresh ones from waiting.
    others_lost_until: Option<Moment>,
    /// How many of everybody else wait together.
    together: usize,
    /// Who of them has waited alone in vain, and until when he does not again. Few: one every `NO_WAITING_OF_OTHERS`.
    in_vain: HashMap<OrderId, Moment>,
}

impl Default for Patience {
    fn default() -> Self {
        Self { fresh_lost_until: None, others_lost_until: None, together: usize::MAX, in_vain: HashMap::new() }
    }
}

impl Patience {
    pub fn is_with_fresh(&self, now: Moment) -> bool {
        has_passed(self.fresh_lost_until, now)
    }

    pub fn is_with_others(&self, now: Moment) -> bool {
        has_passed(self.others_lost_until, now)
    }

    /// Of those others, how many wait together in batches of `full`.
    pub fn together(&self, full: usize) -> usize {
        self.together.min(full)
    }

    /// Whether this one of them may wait.
    pub fn is_with(&self, case: &Case, now: Moment) -> bool {
        has_passed(self.in_vain.get(case.alarm.order_id()).copied(), now)
    }

    /// Takes note of whether this batch has waited in vain.
    pub fn note(&mut self, batch: &Batch, answer: &Answer, now: Moment) {
        if !batch.patient || batch.cases.is_empty() {
            return;
        }
        let is_fresh = batch.by == ClosedBy::Alarm && !batch.cases.iter().any(Case::was_tried);
        match answer {
            Err(CloseFault::Locked(_)) => {
                self.others_lost_until = Some(now + NO_WAITING_OF_OTHERS);
                self.together = 1;
                if is_fresh {
                    self.fresh_lost_until = Some(now + NO_WAITING_AFTER_A_LOCK);
                } else if let [case] = &batch.cases[..] {
                    self.in_vain.retain(|_, until| *until > now);
                    self.in_vain.insert(case.alarm.order_id().clone(), now + NO_WAITING_OF_ONE);
                }
            }
            Ok(_) if !is_fresh => self.together = self.together.saturating_mul(MORE),
            Ok(_) | Err(_) => {}
        }
    }

    pub fn clock_was_set_back(&mut self) {
        *self = Self::default();
    }
}

fn has_passed(until: Option<Moment>, now: Moment) -> bool {
    until.is_none_or(|until| until <= now)
}
