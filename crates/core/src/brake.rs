//! The brake: whether what is being closed looks so unusual that closing must pause. `share.rs` tests the share of orders
//! that are found paid, `window.rs` compares the number of closes with the usual number and with what was known to fall due,
//! `provider.rs` what payment providers answer.
//!
//! Pure: told counts, limits and the time. The worker keeps the counts in a table that all workers share, and writes the
//! pause.

mod provider;
mod share;
mod window;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::order::{Deadline, Timestamp};
pub use provider::{ProviderCounts, provider_trip};
pub use share::{Evidence, OtherWorkers, PaidShare, Woken};
pub use window::{Usual, Window, foreseen_of_gap, unforeseen};

/// A minute, counted since 1970.
pub type Minute = i64;

/// The minute in which this moment is.
#[must_use]
pub const fn minute_of(moment: Timestamp) -> Minute {
    moment.unix_micros().div_euclid(60_000_000)
}

/// So many orders are few: fewer paid ones do not tell which share is usual, and `resume` closes so many without being
/// asked twice.
pub const FEW: u64 = 20;

/// The bounds, of the section `brake`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// `brake.times_usual`: how many times the usual number of closes a minute is still usual.
    pub times_usual: u32,
    /// `brake.always_allowed`: so many closes a minute are usual in every shop.
    pub floor: u32,
}

/// Why closing must pause: one sentence with the figures.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trip(pub String);

/// What all workers have counted in a minute, or of the orders that fall due in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MinuteCounts {
    /// Which minute.
    pub minute: Minute,
    /// Orders closed in it; with a payment provider: claimed.
    pub closed: u64,
    /// Those among them that were not known to fall due.
    pub unforeseen: u64,
    /// Orders that an alarm woke in it.
    pub woken: Woken,
    /// How many unpaid orders were known to fall due in it, some minutes before; `None` if they were not counted.
    pub foreseen: Option<u64>,
    /// How many of the orders that fall due in it were closed, whenever.
    pub closed_of_due: u64,
    /// What payment providers answered in it.
    pub answers: ProviderCounts,
}

/// What one worker has counted since the last report.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// Closed orders, by the minute of their deadline.
    pub closed_by_due: BTreeMap<Minute, u64>,
    /// As in [`MinuteCounts`].
    pub woken: Woken,
    /// As in [`MinuteCounts`].
    pub answers: ProviderCounts,
    /// How many orders the worker had closed up to here since its start.
    pub total: u64,
}

impl Counts {
    /// Whether nothing was counted.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.closed_by_due.is_empty() && self.woken.orders() + self.answers.asked == 0
    }

    /// Adds what was counted later.
    pub fn append(&mut self, later: &Self) {
        for (minute, closed) in &later.closed_by_due {
            *self.closed_by_due.entry(*minute).or_default() += closed;
        }
        self.woken.add(&later.woken);
        self.answers.add(&later.answers);
        self.total = self.total.max(later.total);
    }

    /// What was counted since the last call.
    #[must_use]
    pub fn take(&mut self) -> Self {
        let next = Self { total: self.total, ..Self::default() };
        std::mem::replace(self, next)
    }

    /// An order that fell due then was closed.
    pub fn note_closed(&mut self, deadline: Deadline) {
        *self.closed_by_due.entry(minute_of(deadline)).or_default() += 1;
        self.total += 1;
    }
}

/// How much a worker may close until it is told the next limits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// The usual share of paid orders among those that alarms wake; `None` if it is not known.
    pub paid_share: Option<f64>,
    /// What the other workers have found since the last limits.
    pub others: Woken,
    /// How many orders may be closed; `None`: any number.
    pub closes_left: Option<u64>,
    /// The [`Counts::total`] that `closes_left` takes into account.
    pub counted: u64,
    /// When closing was last resumed: what was due then is not counted, because a person has decided about it.
    pub known_until: Option<Timestamp>,
}

/// How far ahead orders are counted that fall due. Further ahead, a clock that was set forward would make all of them look
/// foreseen.
pub const FORESEE_AHEAD: Duration = Duration::from_secs(6 * 60);

/// An order is foreseen if it was known this many minutes before its own.
pub const FORESEEN_MINUTES_BEFORE: Minute = 2;

#[cfg(test)]
mod stream_tests;
#[cfg(test)]
mod tests;
