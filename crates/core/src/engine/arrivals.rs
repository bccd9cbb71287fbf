//! Whether alarms arrive in time: looks at a few of the orders that fall due next, so that it is known before the first of
//! them is late.
//!
//! Pure. Says which orders are looked at and counts those whose alarms are missing; `look_ahead.rs` holds what follows.

use super::Policy;
use crate::order::{Overdue, SweepPage, SweepPlace, SweepReach, Timestamp};

/// So many orders in a row without their alarms here, for each live worker, are no coincidence: of k workers each has one alarm in
/// k, and (1 - 1/k)^15k is below one in three million: by chance that happens once in hours at a thousand orders a second.
const MISSING_IN_ROW: usize = 15;

#[derive(Debug, Default)]
pub(super) struct Arrivals {
    /// How far the last look reached.
    until: Option<Timestamp>,
    is_looking: bool,
    /// The last order that was looked at: none counts twice.
    last: Option<SweepPlace>,
    missing_in_row: usize,
}

impl Arrivals {
    /// The page to look at, if it is time: the first orders that fall due after the next pass. If orders are read ahead from now
    /// on, none of these is late.
    pub fn page(&mut self, policy: &Policy, workers: usize, now: Timestamp) -> Option<SweepPage> {
        let next_pass_reaches = now + policy.look_ahead - policy.sweep_every;
        // With so short a lead no alarm is here yet.
        let has_no_lead = policy.lead <= policy.look_ahead;
        if policy.look_ahead.is_zero() || has_no_lead || self.until.is_some_and(|until| next_pass_reaches < until) {
            return None;
        }
        // A look that comes late begins where the last one ended.
        let deadline = self.until.filter(|until| *until > now).unwrap_or(next_pass_reaches);
        let first = SweepPlace { deadline, id: String::new() };
        let after = self.last.take().filter(|last| last.deadline > first.deadline).unwrap_or(first);
        self.until = Some(now + policy.look_ahead);
        self.is_looking = true;
        let limit = MISSING_IN_ROW * workers;
        Some(SweepPage { reach: SweepReach::Ahead(policy.look_ahead), after: Some(after), limit })
    }

    pub fn is_looking(&self) -> bool {
        self.is_looking
    }

    /// Whether the page that came, or failed, was to be looked at.
    pub fn take_looking(&mut self) -> bool {
        std::mem::take(&mut self.is_looking)
    }

    /// Notes whether the alarm of this order is here. Returns whether so many in a row are missing that orders must be read
    /// ahead.
    pub fn note(&mut self, order: &Overdue, is_here: bool, workers: usize) -> bool {
        self.last = Some(SweepPlace { deadline: order.deadline, id: order.order_id.as_str().to_owned() });
        self.missing_in_row = if is_here { 0 } else { self.missing_in_row + 1 };
        let is_enough = self.missing_in_row >= MISSING_IN_ROW * workers;
        if is_enough {
            self.missing_in_row = 0;
        }
        is_enough
    }

    pub fn clock_was_set_back(&mut self) {
        (self.until, self.last) = (None, None);
    }
}
