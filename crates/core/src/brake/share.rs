//! The share of orders that are found paid when their alarm wakes them. It drops to about nothing when the provider's
//! callbacks do not arrive: then all orders look unpaid, and closing them takes goods from customers who have paid.
//!
//! Pure. A sequential test (CUSUM): each woken order weighs for one of two shares, and the sum never falls below zero.

use std::iter::Sum;

use super::{FEW, Minute, MinuteCounts, Trip, Window};

/// What is as usual: half of the usual share, so that neither a night nor a campaign counts as evidence.
const AS_USUAL: f64 = 0.5;
/// What is not: a tenth of the usual share.
const MISSING: f64 = 0.1;
/// The sum of log-likelihood ratios that trips. With a usual share of 70 % it is reached by 42 unpaid orders in a row, with
/// 30 % by 114: about thirty customers who have paid in both. At 70 % of the usual share chance reaches it once in 10^11
/// orders, at half of it once in some millions.
const TRIPS_AT: f64 = 15.0;
/// A worker shares what it has found as soon as it has a sixth of that by itself. When one trips, another has at most a sixth
/// that was not shared, and closes at most a sixth until it shares: so each further worker adds a third at most.
const SHARED_AT: f64 = TRIPS_AT / 6.0;
/// So many orders tell which share is usual, if [`FEW`] of them were paid.
const LEAST_WOKEN: u64 = 200;

/// Orders that alarms woke.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Woken {
    /// Found unpaid, and closed.
    pub closed: u64,
    /// Found paid.
    pub paid: u64,
}

impl Woken {
    /// All of them.
    #[must_use]
    pub const fn orders(&self) -> u64 {
        self.closed + self.paid
    }

    /// Adds others.
    pub const fn add(&mut self, others: &Self) {
        self.closed += others.closed;
        self.paid += others.paid;
    }

    const fn without(&self, others: &Self) -> Self {
        Self { closed: self.closed.saturating_sub(others.closed), paid: self.paid.saturating_sub(others.paid) }
    }

    /// The share of paid ones; `None` if they are too few to tell what is usual.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // far fewer orders than would lose precision
    pub fn usual_share(&self) -> Option<f64> {
        (self.orders() >= LEAST_WOKEN && self.paid >= FEW).then(|| self.paid as f64 / self.orders() as f64)
    }
}

impl<'a> Sum<&'a MinuteCounts> for Woken {
    fn sum<I: Iterator<Item = &'a MinuteCounts>>(minutes: I) -> Self {
        minutes.fold(Self::default(), |mut all, one| {
            all.add(&one.woken);
            all
        })
    }
}

/// The usual share, and what each order weighs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PaidShare {
    usual: f64,
    closed_weighs: f64,
    paid_weighs: f64,
}

impl PaidShare {
    /// `usual`: above 0, and at most 1.
    #[must_use]
    pub fn new(usual: f64) -> Self {
        let closed_weighs = ((1.0 - usual * MISSING) / (1.0 - usual * AS_USUAL)).ln();
        Self { usual, closed_weighs, paid_weighs: (MISSING / AS_USUAL).ln() }
    }
}

/// What speaks against the usual share.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Evidence {
    pub(super) sum: f64,
    of: Woken,
    /// The sum at which it must be shared before more orders go out.
    shared_at: f64,
}

impl Evidence {
    /// Adds orders, and judges.
    #[allow(clippy::cast_precision_loss)] // small numbers
    pub fn add(&mut self, share: &PaidShare, woken: &Woken) -> Option<Trip> {
        self.sum += woken.closed as f64 * share.closed_weighs + woken.paid as f64 * share.paid_weighs;
        self.of.add(woken);
        if self.sum <= 0.0 {
            (self.sum, self.of) = (0.0, Woken::default());
        }
        (self.sum >= TRIPS_AT).then(|| {
            Trip(format!(
                "of the last {} orders that fell due, {:.1} % were paid, and usually it is {:.0} %: do the provider's callbacks arrive?",
                self.of.orders(),
                self.of.paid as f64 / self.of.orders() as f64 * 100.0,
                share.usual * 100.0
            ))
        })
    }

    /// The orders since it was last zero.
    #[must_use]
    pub const fn orders(&self) -> u64 {
        self.of.orders()
    }

    /// The other workers know of it, and what they have found was added.
    pub fn note_shared(&mut self) {
        self.shared_at = self.sum + SHARED_AT;
    }

    /// How many unpaid orders may follow until it must be shared.
    #[must_use]
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // small numbers, and not negative
    pub fn room(&self, share: &PaidShare) -> u64 {
        ((self.shared_at.min(TRIPS_AT) - self.sum).max(0.0) / share.closed_weighs).ceil() as u64
    }
}

/// What the other workers have found, out of the counts of all.
#[derive(Debug, Default)]
pub struct OtherWorkers {
    /// From a minute on, when it was last looked at.
    seen: Option<(Minute, Woken)>,
}

impl OtherWorkers {
    /// What they have added since the last call; in the first, within the last two minutes. `own`: what this worker has
    /// added since then.
    pub fn found(&mut self, window: &Window<'_>, own: &Woken) -> Woken {
        let now = window.now;
        let found = match self.seen {
            // Also of minutes that have not come: a clock that was ahead counted in them, and they were seen as well.
            Some((since, seen)) => window.woken_in(since..).without(&seen),
            None => window.woken_in(window.resumed_in.map_or(now - 1, |resumed| (resumed + 1).max(now - 1))..=now),
        };
        // From the minute before: another worker may still be adding to it.
        self.seen = Some((now - 1, window.woken_in(now - 1..)));
        found.without(own)
    }
}
