//! The database's time, without asking for it each time.
//!
//! Arithmetic over samples that the worker takes by queries: no I/O, no decision. Only the local monotonic clock is
//! read, never the local wall clock, so setting the latter cannot close an order early.

use std::time::{Duration, Instant};

use crate::order::Timestamp;

/// One reading of the database's clock, and our monotonic clock just before and after the query.
#[derive(Debug, Clone, Copy)]
pub struct ClockSample {
    /// The monotonic clock just before the query was sent.
    pub asked: Instant,
    /// The monotonic clock just after its result arrived; not before `asked`.
    pub answered: Instant,
    /// The database's wall clock at some time between these two.
    pub database: Timestamp,
}

impl ClockSample {
    fn uncertainty(&self) -> Duration {
        self.answered.duration_since(self.asked)
    }
}

/// The database's clock, carried forward by the local monotonic one.
#[derive(Debug, Clone, Copy)]
pub struct DatabaseClock {
    base: Timestamp,
    at: Instant,
    uncertainty: Duration,
    learned: Instant,
}

/// After this long a rougher sample replaces a finer one: two crystals drift apart by some 50 µs a second at worst.
const SAMPLE_LIFETIME: Duration = Duration::from_secs(60);

/// A clock that is further ahead of the reading before was set: readings of one clock differ by less.
const SET_AHEAD: Duration = Duration::from_secs(1);

impl DatabaseClock {
    /// A clock that relies on a single sample; [`DatabaseClock::learn`] takes further ones.
    #[must_use]
    pub fn new(sample: ClockSample) -> Self {
        // The reading was taken at some time between query and answer; the middle is off by at most half of that.
        let at = sample.asked + sample.uncertainty() / 2;
        Self { base: sample.database, at, uncertainty: sample.uncertainty(), learned: sample.answered }
    }

    /// Takes another sample if it is finer than the one in use, if that one is old, or if the two cannot both be true:
    /// then the database's clock was set, or another server answers now. Returns whether it was set ahead, by more than
    /// `SET_AHEAD`.
    pub fn learn(&mut self, sample: ClockSample) -> bool {
        let before = *self;
        let next = Self::new(sample);
        let disagreement = self.at_instant(next.at).unix_micros().abs_diff(next.base.unix_micros());
        let explained = (self.uncertainty + next.uncertainty).as_micros() + 1_000;
        if next.uncertainty <= self.uncertainty
            || next.learned.duration_since(self.learned) > SAMPLE_LIFETIME
            || u128::from(disagreement) > explained
        {
            *self = next;
        }
        self.base.since(before.at_instant(self.at)) > SET_AHEAD
    }

    /// The round trip of the reading in use. The clock is off by at most half of it, plus the drift between the two
    /// clocks since.
    #[must_use]
    pub fn uncertainty(&self) -> Duration {
        self.uncertainty
    }

    /// The database's time at a local instant.
    #[must_use]
    pub fn at_instant(&self, instant: Instant) -> Timestamp {
        match instant.checked_duration_since(self.at) {
            Some(after) => self.base + after,
            None => self.base - self.at.duration_since(instant),
        }
    }

    /// The database's time at this moment, by the monotonic clock: no query is sent.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.at_instant(Instant::now())
    }

    /// The local instant at which the database will read `moment`; an instant that has passed if `moment` has, and at
    /// most a day after the sample in use was taken.
    #[must_use]
    pub fn instant_of(&self, moment: Timestamp) -> Instant {
        self.at + moment.since(self.base).min(Duration::from_secs(86_400))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(from: Instant, at_ms: u64, round_trip_ms: u64, database_ms: i64) -> ClockSample {
        let asked = from + Duration::from_millis(at_ms);
        ClockSample {
            asked,
            answered: asked + Duration::from_millis(round_trip_ms),
            database: Timestamp::from_unix_micros(database_ms * 1_000),
        }
    }

    #[test]
    fn assumes_reading_at_middle_of_round_trip() {
        let start = Instant::now();
        let clock = DatabaseClock::new(sample(start, 0, 10, 1_000));
        assert_eq!(clock.at_instant(start + Duration::from_millis(5)).unix_micros(), 1_000_000);
        assert_eq!(clock.at_instant(start + Duration::from_millis(25)).unix_micros(), 1_020_000);
        assert_eq!(clock.instant_of(Timestamp::from_unix_micros(1_020_000)), start + Duration::from_millis(25));
    }

    #[test]
    fn rough_sample_keeps_agreeing_fine_one() {
        let start = Instant::now();
        let mut clock = DatabaseClock::new(sample(start, 0, 1, 1_000));
        let before = clock.at_instant(start);
        clock.learn(sample(start, 100, 40, 1_110));
        assert_eq!(clock.at_instant(start), before);
    }

    #[test]
    fn clock_that_was_set_is_adopted_immediately() {
        let start = Instant::now();
        let mut clock = DatabaseClock::new(sample(start, 0, 1, 1_000));
        clock.learn(sample(start, 100, 40, 500));
        assert!(clock.at_instant(start + Duration::from_millis(120)).unix_micros() <= 500_000);
    }
}
