//! What payment providers answer about orders that fall due: unknown for most, or paid for far more than usual, means that
//! something is wrong with the provider or with its callbacks.
//!
//! Pure. Trips although no order would be closed wrongly: every such order is blocked for its customer while it is asked
//! about.

use super::Trip;

/// The answers about orders in a window, each order once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProviderCounts {
    /// Orders about which a provider was asked.
    pub asked: u64,
    /// Those among them that the provider says are paid.
    pub paid: u64,
    /// Those without an answer that has a documented meaning.
    pub unknown: u64,
}

impl ProviderCounts {
    /// Adds others.
    pub fn add(&mut self, others: &Self) {
        self.asked += others.asked;
        self.paid += others.paid;
        self.unknown += others.unknown;
    }

    /// Whether there is no answer for most.
    #[must_use]
    #[allow(clippy::cast_precision_loss)] // small numbers
    pub fn most_are_unknown(&self) -> bool {
        self.unknown as f64 > self.asked as f64 * MOST
    }
}

/// Fewer orders tell nothing.
pub(super) const LEAST_ANSWERS: u64 = 100;
/// More than two thirds without an answer is most. Where one of two providers that have half of the orders each is dead, it is
/// about half, and the other one's orders go on.
const MOST: f64 = 2.0 / 3.0;
/// So many times the usual share of paid orders is unusual, but never a share below [`LEAST_PAID`].
const TIMES_USUAL_PAID: f64 = 5.0;
const LEAST_PAID: f64 = 0.3;

/// Judges the answers; `None` if they are too few, or as usual. `usual_paid`: [`super::Usual::paid_at_provider`].
#[must_use]
#[allow(clippy::cast_precision_loss)] // small numbers
pub fn provider_trip(counts: &ProviderCounts, usual_paid: Option<f64>) -> Option<Trip> {
    let ProviderCounts { asked, paid, unknown } = *counts;
    if asked < LEAST_ANSWERS {
        return None;
    }
    let share = |orders: u64| orders as f64 / asked as f64;
    if counts.most_are_unknown() {
        return Some(Trip(format!(
            "of the last {asked} orders, the payment provider gave no usable answer about {unknown}: is it reachable, and are its keys right?"
        )));
    }
    let usual = usual_paid?;
    (share(paid) > (usual * TIMES_USUAL_PAID).max(LEAST_PAID)).then(|| {
        Trip(format!(
            "of the last {asked} orders that fell due unpaid, the payment provider says that {paid} are paid, and usually it is {:.1} %: do its callbacks arrive?",
            usual * 100.0
        ))
    })
}
