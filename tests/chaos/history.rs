//! What happens to an order: how it is scheduled, whether its deadline moves, whether and when it is paid, and where.
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

/// What happens to an order whose customer is sent to the payment provider.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum AtProvider {
    /// The customer goes away.
    NeverPaid,
    /// The customer goes away, and the provider fails every call about this attempt: a person must look at it.
    NeverAnswered,
    /// Paid after this part of the remaining time, and the callback comes so long after it.
    Paid { after: f64, callback: Duration },
    /// The same, and the callback never comes: the worker must find it paid.
    DeadWebhook { after: f64 },
    /// Paid so long after [`Self::RACE_BEGINS_BEFORE`] before the deadline, if the provider still takes the money: the
    /// worker asks and cancels at the same time. The callback may never come.
    Race { after: Duration, callback: Option<Duration> },
}

impl AtProvider {
    pub const RACE_BEGINS_BEFORE: Duration = Duration::from_millis(20);

    fn draw(rng: &mut Rng) -> Self {
        let callback = |rng: &mut Rng| Duration::from_millis(rng.u64(0..300));
        match rng.u32(0..100) {
            0..30 => Self::NeverPaid,
            30..33 => Self::NeverAnswered,
            33..55 => Self::Paid { after: rng.f64() * 0.9, callback: callback(rng) },
            55..75 => Self::DeadWebhook { after: rng.f64() },
            _ => {
                let after = Duration::from_micros(rng.u64(0..120_000));
                let callback = rng.bool().then(|| callback(rng));
                Self::Race { after, callback }
            }
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
    /// Instead of `payment`, for a third of the orders of a run with a payment provider.
    pub at_provider: Option<AtProvider>,
}

impl History {
    /// `has_provider`: whether the run has a payment provider.
    pub fn of(seed: u64, order: u64, has_provider: bool) -> Self {
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
        // Last, so that everything else is the same in a run without a provider.
        let at_provider = (has_provider && rng.u32(0..3) == 0).then(|| AtProvider::draw(&mut rng));
        let payment = if at_provider.is_some() { Payment::Never } else { payment };
        Self { article, delay, method, change, payment, pays_for, pays_again, at_provider }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histories_are_reproducible_and_cover_every_kind() {
        let histories: Vec<History> = (0..10_000).map(|order| History::of(1, order, false)).collect();
        assert_eq!(histories, (0..10_000).map(|order| History::of(1, order, false)).collect::<Vec<_>>());
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
    #[test]
    fn third_of_histories_is_at_provider() {
        let histories: Vec<History> = (0..10_000).map(|order| History::of(1, order, true)).collect();
        let at_provider: Vec<AtProvider> = histories.iter().filter_map(|history| history.at_provider).collect();
        assert!((3_000..3_700).contains(&at_provider.len()), "{}", at_provider.len());
        let share = |holds: fn(&AtProvider) -> bool| {
            at_provider.iter().filter(|one| holds(one)).count() * 100 / at_provider.len()
        };
        assert!(share(|one| matches!(one, AtProvider::NeverPaid)) >= 25);
        assert!((1..6).contains(&share(|one| matches!(one, AtProvider::NeverAnswered))));
        assert!(share(|one| matches!(one, AtProvider::Paid { .. })) >= 18);
        assert!(share(|one| matches!(one, AtProvider::DeadWebhook { .. })) >= 15);
        assert!(share(|one| matches!(one, AtProvider::Race { callback: Some(_), .. })) >= 8);
        assert!(share(|one| matches!(one, AtProvider::Race { callback: None, .. })) >= 8);
        for (order, history) in histories.iter().enumerate() {
            let plain = History::of(1, order as u64, false);
            let payment = if history.at_provider.is_some() { Payment::Never } else { plain.payment };
            assert_eq!(*history, History { payment, at_provider: history.at_provider, ..plain });
        }
    }
}
