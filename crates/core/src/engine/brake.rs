//! The brake within the engine: how many orders may be with closers, and whether closing must pause at once.
//!
//! Pure, like the whole engine. What is judged is in `crate::brake`; without limits the brake is off.

use super::{Batch, BatchResult};
use crate::brake::{Counts, Evidence, Limits, PaidShare, Trip, Woken};
use crate::order::{CloseOutcome, ClosedBy, Deadline, Outcome};

#[derive(Debug, Default)]
pub(super) struct Brake {
    /// Batches claim orders for the closing protocol with a payment provider: then what a provider says is paid tells more
    /// than what alarms find paid.
    claims: bool,
    limits: Option<(Limits, Option<PaidShare>)>,
    evidence: Evidence,
    counts: Counts,
    /// Orders that are with a closer.
    out: u64,
    /// How many came back and speak for the usual share, or for none: since the last limits, and between those and the ones
    /// before.
    as_usual: [u64; 2],
    /// Closing is paused by a pause that outlives this worker.
    is_paused: bool,
    /// It has tripped, and the pause is not known to be written.
    has_tripped: bool,
    /// What was not handed out yet.
    trip: Option<Trip>,
    /// What was found must be shared before more orders go out, and that was not asked for yet.
    wants_report: bool,
}

impl Brake {
    /// Of an engine that claims.
    pub fn of_claims() -> Self {
        Self { claims: true, ..Self::default() }
    }

    pub fn set_limits(&mut self, limits: Limits) {
        let share = limits.paid_share.filter(|_| !self.claims).map(PaidShare::new);
        self.limits = Some((limits, share));
        self.judge(&limits.others);
        self.evidence.note_shared();
        self.as_usual = [0, self.as_usual[0]];
    }

    /// What was found could not be shared: this worker judges alone, so that closing does not wait for the table of counts.
    pub fn note_not_judged(&mut self) {
        self.evidence.note_shared();
    }

    /// What was found before is over with the pause.
    pub fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        self.has_tripped &= !is_paused;
        self.evidence = Evidence::default();
        self.evidence.note_shared();
    }

    /// By a pause that outlives this worker, or by a trip, whose pause is being written.
    pub fn is_paused(&self) -> bool {
        self.is_paused || self.has_tripped
    }

    pub fn take_trip(&mut self) -> Option<Trip> {
        self.trip.take()
    }

    pub fn take_wants_report(&mut self) -> bool {
        std::mem::take(&mut self.wants_report)
    }

    /// What was counted since the last call.
    pub fn take_counts(&mut self) -> Counts {
        self.counts.take()
    }

    /// How many more orders may be given to a closer: twice as many with each round that is as usual, so that the first
    /// ones of a burst tell what the others are.
    pub fn room(&self) -> usize {
        let Some((limits, share)) = &self.limits else { return usize::MAX };
        let judged = share.as_ref().map_or(u64::MAX, |share| match self.evidence.room(share) {
            0 => 0,
            room => (room + self.as_usual.iter().sum::<u64>()).saturating_sub(self.out),
        });
        let closed = self.counts.total.saturating_sub(limits.counted);
        let left = limits.closes_left.map_or(u64::MAX, |left| left.saturating_sub(closed + self.out));
        usize::try_from(judged.min(left)).unwrap_or(usize::MAX)
    }

    pub fn note_out(&mut self, batch: &Batch) {
        self.out += batch.items.len() as u64;
    }

    pub fn note_result(&mut self, batch: &Batch, result: &BatchResult) {
        self.out = self.out.saturating_sub(batch.items.len() as u64);
        let Ok(results) = result else { return };
        let mut woken = Woken::default();
        for item in &batch.items {
            let Some(Ok(CloseOutcome { outcome, deadline })) = results.get(item.alarm.order_id()) else { continue };
            let deadline = deadline.unwrap_or(item.alarm.deadline());
            if self.was_known(deadline) {
                continue;
            }
            match outcome {
                Outcome::Closed => {
                    self.counts.note_closed(deadline);
                    woken.closed += u64::from(batch.by == ClosedBy::Alarm);
                }
                // Not `Closing`: it was counted when it was claimed.
                Outcome::Claimed => self.counts.note_closed(deadline),
                Outcome::Paid => woken.paid += u64::from(batch.by == ClosedBy::Alarm),
                _ => {}
            }
        }
        if !self.claims {
            self.counts.woken.add(&woken);
        }
        let undecided = self.evidence.orders();
        self.judge(&woken);
        self.as_usual[0] += undecided + batch.items.len() as u64 - self.evidence.orders();
        if let Some((_, Some(share))) = &self.limits
            && self.evidence.room(share) == 0
        {
            (self.wants_report, self.as_usual) = (true, [0, 0]);
        }
    }

    fn judge(&mut self, woken: &Woken) {
        if let Some((_, Some(share))) = &self.limits
            && !self.is_paused()
        {
            self.trip = self.evidence.add(share, woken);
            self.has_tripped = self.trip.is_some();
        }
    }

    fn was_known(&self, deadline: Deadline) -> bool {
        self.limits.as_ref().and_then(|(limits, _)| limits.known_until).is_some_and(|until| deadline <= until)
    }
}
