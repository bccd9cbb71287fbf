//! The brake within the engine: how many orders may be with closers, and whether closing must pause at once.
//!
//! Pure, like the whole engine. What is judged is in `crate::brake`; without limits the brake is off.

use super::{Batch, BatchResult};
use crate::brake::{Counts, Limits, PaidShare, SlowStart, Trip};
use crate::order::{CloseOutcome, ClosedBy, Deadline, Outcome, Timestamp};

#[derive(Debug, Default)]
pub(super) struct Brake {
    /// Batches claim orders for the closing protocol with a payment provider: then what a provider says is paid tells more
    /// than what alarms find paid.
    claims: bool,
    limits: Option<(Limits, Option<PaidShare>)>,
    slow_start: SlowStart,
    counts: Counts,
    /// Orders that are with a closer.
    out: u64,
    /// It has tripped, and the pause is not known to be written.
    has_tripped: bool,
    /// What was not handed out yet.
    trip: Option<Trip>,
}

impl Brake {
    /// Of an engine that claims.
    pub fn of_claims() -> Self {
        Self { claims: true, ..Self::default() }
    }

    pub fn set_limits(&mut self, limits: Limits, sample: u32) {
        let usual = limits.paid_share.filter(|_| !self.claims);
        let share = usual.and_then(|usual| PaidShare::new(usual, sample));
        self.limits = Some((limits, share));
    }

    /// Closing is paused by a pause that outlives this worker.
    pub fn note_paused(&mut self) {
        self.has_tripped = false;
        self.slow_start.begin_again();
    }

    pub fn has_tripped(&self) -> bool {
        self.has_tripped
    }

    pub fn take_trip(&mut self) -> Option<Trip> {
        self.trip.take()
    }

    /// What was counted since the last call.
    pub fn take_counts(&mut self) -> Counts {
        self.counts.take()
    }

    /// How many more orders may be given to a closer.
    pub fn room(&self, now: Timestamp) -> usize {
        let Some((limits, share)) = &self.limits else { return usize::MAX };
        let slow = share.as_ref().map_or(u64::MAX, |share| self.slow_start.room(share, self.out, now));
        let closed = self.counts.total.saturating_sub(limits.counted);
        let left = limits.closes_left.map_or(u64::MAX, |left| left.saturating_sub(closed + self.out));
        usize::try_from(slow.min(left)).unwrap_or(usize::MAX)
    }

    pub fn note_out(&mut self, batch: &Batch, now: Timestamp) {
        self.out += batch.items.len() as u64;
        if !batch.items.is_empty() {
            self.slow_start.note_out(now);
        }
    }

    pub fn note_result(&mut self, batch: &Batch, result: &BatchResult) {
        self.out = self.out.saturating_sub(batch.items.len() as u64);
        let Ok(results) = result else { return };
        let (mut closed, mut paid) = (0, 0);
        for item in &batch.items {
            let Some(Ok(CloseOutcome { outcome, deadline })) = results.get(item.alarm.order_id()) else { continue };
            let deadline = deadline.unwrap_or(item.alarm.deadline());
            if self.was_known(deadline) {
                continue;
            }
            match outcome {
                Outcome::Closed => {
                    self.counts.note_closed(deadline);
                    closed += u64::from(batch.by == ClosedBy::Alarm);
                }
                // Not `Closing`: it was counted when it was claimed.
                Outcome::Claimed => self.counts.note_closed(deadline),
                Outcome::Paid => paid += u64::from(batch.by == ClosedBy::Alarm),
                _ => {}
            }
        }
        if self.claims {
            return;
        }
        self.counts.woken_closed += closed;
        self.counts.woken_paid += paid;
        if let Some((_, Some(share))) = &self.limits
            && let Some(trip) = self.slow_start.note_woken(share, closed, paid)
            && !self.has_tripped
        {
            self.has_tripped = true;
            self.trip = Some(trip);
        }
    }

    fn was_known(&self, deadline: Deadline) -> bool {
        self.limits.as_ref().and_then(|(limits, _)| limits.known_until).is_some_and(|until| deadline <= until)
    }
}
