//! What becomes of an order: how it is scheduled, whether its deadline moves, whether and when it is paid.
//!
//! Pure: drawn from the run's seed and the order's number, so that a seed gives the same orders again.

use std::time::Duration;

use fastrand::Rng;

/// So that closes do not wait for one another's stock alone.
pub const ARTICLES: usize = 20;

/// How an alarm is scheduled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// `Publisher::schedule`, after the commit.
    Publisher,
    /// `schedule_in`, within the order's transaction.
    ScheduleIn,
    /// What a shop in another language does: a plain INSERT into `alarm_outbox`, within the order's transaction.
    PlainInsert,
}

/// What happens to the deadline, after this part of the delay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Change {
    None,
    /// Later: an update of the row and nothing else.
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

/// When, and whether, somebody tries to pay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Payment {
    Never,
    /// After this part of the time that is left.
    Early(f64),
    /// So long before the deadline, less than a millisecond.
    LastMillisecond(Duration),
    /// So long after the deadline, while it is being closed. It may come too late.
    DuringTheClose(Duration),
    /// Holds the order's row, and its article's stock, for so long around the deadline, and is declined: the order is to
    /// be closed after all.
    Declined(Duration),
}

impl Payment {
    /// Whether its transaction holds the order's row while the order is to be closed.
    pub fn is_at_the_deadline(self) -> bool {
        match self {
            Self::Never | Self::Early(_) => false,
            Self::LastMillisecond(_) | Self::DuringTheClose(_) | Self::Declined(_) => true,
        }
    }
}

/// One order's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fate {
    pub article: usize,
    pub delay: Duration,
    pub way: Way,
    pub change: Change,
    pub payment: Payment,
    /// How long the transaction that pays stays open.
    pub pays_for: Duration,
    /// Whether the payment is said again though it succeeded.
    pub pays_again: bool,
}

impl Fate {
    pub fn of(seed: u64, order: u64) -> Self {
        let mut rng = Rng::with_seed(seed ^ order.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let millis = |rng: &mut Rng, range: std::ops::Range<u64>| Duration::from_millis(rng.u64(range));
        let micros = |rng: &mut Rng, range: std::ops::Range<u64>| Duration::from_micros(rng.u64(range));
        let delay = match rng.u32(0..100) {
            // The lane.
            0..40 => Duration::from_secs(2),
            // Due before its alarm can be anywhere.
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
        let way = [Way::Publisher, Way::ScheduleIn, Way::PlainInsert][rng.usize(0..3)];
        let pays_for = if rng.u32(0..10) == 0 { millis(&mut rng, 1..60) } else { Duration::ZERO };
        let (article, pays_again) = (rng.usize(0..ARTICLES), rng.u32(0..10) == 0);
        Self { article, delay, way, change, payment, pays_for, pays_again }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histories_are_reproducible_and_cover_every_kind() {
        let fates: Vec<Fate> = (0..10_000).map(|order| Fate::of(1, order)).collect();
        assert_eq!(fates, (0..10_000).map(|order| Fate::of(1, order)).collect::<Vec<_>>());
        let share = |holds: fn(&Fate) -> bool| fates.iter().filter(|fate| holds(fate)).count() / 100;
        for way in [Way::Publisher, Way::ScheduleIn, Way::PlainInsert] {
            let of_this_way = fates.iter().filter(|fate| fate.way == way).count() / 100;
            assert!((30..37).contains(&of_this_way), "{way:?}: {of_this_way} %");
        }
        assert!((40..50).contains(&share(|fate| !matches!(fate.payment, Payment::Never | Payment::Declined(_)))));
        assert!(share(|fate| matches!(fate.payment, Payment::LastMillisecond(_))) >= 6);
        assert!(share(|fate| matches!(fate.payment, Payment::DuringTheClose(_))) >= 8);
        assert!(share(|fate| matches!(fate.change, Change::Extended { .. })) >= 8);
        assert!(share(|fate| matches!(fate.change, Change::Shortened { .. })) >= 6);
    }
}
