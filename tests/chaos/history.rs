//! What happens to an order: how it is scheduled, whether its deadline moves, whether and when it is paid.
//!
//! Pure: drawn from the run's seed and the order's number, so that a seed reproduces the same orders.

use std::time::Duration;

use fastrand::Rng;

/// Several, so that closes do not all wait for the same stock row.
pub const ARTICLES: usize = 20;

/// How an alarm is scheduled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScheduleMethod {
    /// `Publisher::schedule`, after the commit.
    Publisher,
    /// `postgres::schedule`, within the order's transaction.
    ScheduleIn,
    /// Like a shop in another language: a plain INSERT into `alarm_outbox`, within the order's transaction.
    PlainInsert,
}

/// What happens to the deadline, after this part of the delay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Change {
    None,
    /// Later: only the row is updated.
    Extended {
        after: f64,
        by: Duration,
    },
    /// Sooner: the row, and an alarm for the new deadline.
    Shortened {
        after: f64,
        left: Duration,
    },
}

/// Whether and when a payment is attempted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Payment {
    Never,
    /// After this part of the remaining time.
    Early(f64),
    /// This long before the deadline, less than a millisecond.
    LastMillisecond(Duration),
    /// This long after the deadline, while the order is being closed. It may be too late.
    DuringTheClose(Duration),
    /// Holds the order's row and its article's stock row for this long around the deadline, and is declined: the order
    /// must still be closed.
    Declined(Duration),
}

impl Payment {
    /// Whether its transaction holds the order's row at the deadline.
    pub fn is_at_the_deadline(self) -> bool {
        match self {
            Self::Never | Self::Early(_) => false,
            Self::LastMillisecond(_) | Self::DuringTheClose(_) | Self::Declined(_) => true,
        }
    }
}

/// The history of one order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct History {
    pub article: usize,
    pub delay: Duration,
    pub method: ScheduleMethod,
    pub change: Change,
    pub payment: Payment,
    /// How long the paying transaction stays open.
    pub pays_for: Duration,
    /// Whether the payment is repeated after it succeeded.
    pub pays_again: bool,
}

impl History {
    pub fn of(seed: u64, order: u64) -> Self {
        let mut rng = Rng::with_seed(seed ^ order.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let millis = |rng: &mut Rng, range: std::ops::Range<u64>| Duration::from_millis(rng.u64(range));
        let micros = |rng: &mut Rng, range: std::ops::Range<u64>| Duration::from_micros(rng.u64(range));
        let delay = match rng.u32(0..100) {
            // The lane.
            0..40 => Duration::from_secs(2),
            // Due before its alarm can have arrived anywhere.
            40..45 => millis(&mut rng, 1..500),
            45..85 => millis(&mut rng, 2_500..10_000),
            _ => millis(&mut rng, 10_000..18_000),
        };
        let change = match rng.u32(0..100) {
            0..10 => Change::Extended { after: rng.f64() * 0.95, by: millis(&mut rng, 1_000..5_000) },
            10..18 => Change::Shortened { after: rng.f64() * 0.5, left: millis(&mut rng, 100..1_500) },
            _ => Change::None,
        };
        let payment = match rng.u32(0..100) {
            0..28 => Payment::Early(rng.f64()),
            28..36 => Payment::LastMillisecond(micros(&mut rng, 0..1_000)),
            36..46 => Payment::DuringTheClose(micros(&mut rng, 0..12_000)),
            46..48 => Payment::Declined(millis(&mut rng, 5..300)),
            _ => Payment::Never,
        };
        let method =
            [ScheduleMethod::Publisher, ScheduleMethod::ScheduleIn, ScheduleMethod::PlainInsert][rng.usize(0..3)];
        let pays_for = if rng.u32(0..10) == 0 { millis(&mut rng, 1..60) } else { Duration::ZERO };
        let (article, pays_again) = (rng.usize(0..ARTICLES), rng.u32(0..10) == 0);
        Self { article, delay, method, change, payment, pays_for, pays_again }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histories_are_reproducible_and_cover_every_kind() {
        let histories: Vec<History> = (0..10_000).map(|order| History::of(1, order)).collect();
        assert_eq!(histories, (0..10_000).map(|order| History::of(1, order)).collect::<Vec<_>>());
        let share = |holds: fn(&History) -> bool| histories.iter().filter(|history| holds(history)).count() / 100;
        for method in [ScheduleMethod::Publisher, ScheduleMethod::ScheduleIn, ScheduleMethod::PlainInsert] {
            let of_this_method = histories.iter().filter(|history| history.method == method).count() / 100;
            assert!((30..37).contains(&of_this_method), "{method:?}: {of_this_method} %");
        }
        assert!((40..50).contains(&share(|history| !matches!(history.payment, Payment::Never | Payment::Declined(_)))));
        assert!(share(|history| matches!(history.payment, Payment::LastMillisecond(_))) >= 6);
        assert!(share(|history| matches!(history.payment, Payment::DuringTheClose(_))) >= 8);
        assert!(share(|history| matches!(history.change, Change::Extended { .. })) >= 8);
        assert!(share(|history| matches!(history.change, Change::Shortened { .. })) >= 6);
    }
}
