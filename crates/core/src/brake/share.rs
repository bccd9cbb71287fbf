//! The share of orders that are found paid when their alarm wakes them. It drops to about nothing when the provider's
//! callbacks do not arrive: then all orders look unpaid, and closing them takes goods from customers who have paid.
//!
//! Pure. [`SlowStart`] is each worker's own: few orders are out until it is known that their share is usual.

use std::time::Duration;

use super::Trip;
use crate::order::Timestamp;

/// A share below one tenth of the usual one trips: from 70 % to less than 7 %. A campaign whose customers pay half as often
/// as usual is far from that.
const UNUSUAL_BELOW: f64 = 0.1;

/// So many paid orders must be expected. If the share is the usual one, two or fewer of twenty are found less than once in
/// a million samples (Poisson).
const LEAST_EXPECTED: f64 = 20.0;

/// A worker that has closed nothing for so long begins with few orders again.
const START_AGAIN_AFTER: Duration = Duration::from_secs(60);

/// By how much the number of orders that may be out grows with each sample that is as usual.
const GROWTH: u64 = 4;

/// From so many times the sample on the number is not limited.
const UNLIMITED_FROM: u64 = 64;

/// The usual share, and how many orders tell whether it has dropped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PaidShare {
    usual: f64,
    sample: u64,
}

impl PaidShare {
    /// `None` if so few orders are paid when their alarm comes that no sample tells anything.
    #[must_use]
    pub fn new(usual: f64, sample: u32) -> Option<Self> {
        // A hundredth: then the sample is 2 000 orders.
        (0.01..=1.0).contains(&usual).then(|| {
            let expected_in = (LEAST_EXPECTED / usual).ceil();
            // At most 2 000.
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
            Self { usual, sample: u64::from(sample).max(expected_in as u64).max(1) }
        })
    }

    /// How many orders are needed.
    #[must_use]
    pub const fn sample(&self) -> u64 {
        self.sample
    }

    /// Judges a number of orders that alarms woke. `None` if they are too few, or as usual.
    #[must_use]
    pub fn judge(&self, closed: u64, paid: u64) -> Option<Trip> {
        let woken = closed + paid;
        #[allow(clippy::cast_precision_loss)] // small numbers
        let share = paid as f64 / woken.max(1) as f64;
        (woken >= self.sample && share < self.usual * UNUSUAL_BELOW).then(|| {
            Trip(format!(
                "of the last {woken} orders that fell due, {:.1} % were paid, and usually it is {:.0} %: do the provider's callbacks arrive?",
                share * 100.0,
                self.usual * 100.0
            ))
        })
    }
}

/// How many orders may be out, and what became of those that were.
#[derive(Debug, Default)]
pub struct SlowStart {
    /// Since the last sample that was judged.
    closed: u64,
    paid: u64,
    /// The number of samples that may be out; 0: it has not begun.
    samples: u64,
    last_out: Option<Timestamp>,
}

impl SlowStart {
    /// How many more orders may go out while `out` are out.
    #[must_use]
    pub fn room(&self, share: &PaidShare, out: u64, now: Timestamp) -> u64 {
        let samples = self.samples_at(now);
        if samples >= UNLIMITED_FROM {
            return u64::MAX;
        }
        (samples * share.sample()).saturating_sub(self.closed + self.paid + out)
    }

    fn samples_at(&self, now: Timestamp) -> u64 {
        let is_old = self.last_out.is_none_or(|last| now.since(last) >= START_AGAIN_AFTER);
        if is_old { 1 } else { self.samples.max(1) }
    }

    /// Orders go out.
    pub fn note_out(&mut self, now: Timestamp) {
        self.samples = self.samples_at(now);
        self.last_out = Some(now);
    }

    /// The outcome of orders that alarms woke.
    pub fn note_woken(&mut self, share: &PaidShare, closed: u64, paid: u64) -> Option<Trip> {
        self.closed += closed;
        self.paid += paid;
        if self.closed + self.paid < share.sample() {
            return None;
        }
        let trip = share.judge(self.closed, self.paid);
        (self.closed, self.paid) = (0, 0);
        self.samples = (self.samples.max(1) * GROWTH).min(UNLIMITED_FROM);
        trip
    }

    /// After a pause, or when the clock was set back: begins again.
    pub fn begin_again(&mut self) {
        *self = Self::default();
    }
}
