//! What this worker closed in each minute of the last hour, by path, and how late: for the page.
//!
//! In memory, bounded, and gone with the worker; Prometheus keeps the metrics for longer. No clock: time comes in as an
//! argument.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use order_timeout_core::order::ClosedBy;

/// Minutes that are kept.
const MINUTES: u64 = 60;
/// Lateness is counted in steps of 100 µs.
const STEP: Duration = Duration::from_micros(100);
/// A day: later ones count as this late.
const MOST_STEPS: u64 = 86_400 * 10_000;

/// How late orders were closed: bounded, however many they are.
#[derive(Debug, Clone)]
pub(super) struct Lateness(Histogram<u32>);

impl Default for Lateness {
    fn default() -> Self {
        Self(Histogram::new_with_bounds(1, MOST_STEPS, 2).expect("these bounds are valid"))
    }
}

impl Lateness {
    pub fn note(&mut self, lateness: Duration) {
        let steps = u64::try_from(lateness.as_micros() / STEP.as_micros()).unwrap_or(MOST_STEPS);
        self.0.saturating_record(steps.clamp(1, MOST_STEPS));
    }

    /// This part of them was closed at most so many milliseconds late; `None` if there are none.
    pub fn ms_at(&self, quantile: f64) -> Option<f64> {
        (!self.0.is_empty()).then(|| self.0.value_at_quantile(quantile) as f64 * STEP.as_secs_f64() * 1e3)
    }
}

/// Shared by the closers, which write, and the page, which reads.
#[derive(Debug, Clone)]
pub struct SharedLastHour(Arc<Mutex<LastHour>>);

impl SharedLastHour {
    /// Begins with nothing closed.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self(Arc::new(Mutex::new(LastHour { began: now, minutes: VecDeque::new() })))
    }

    /// Counts the closes of a batch.
    pub fn note(&self, by: ClosedBy, lateness: impl IntoIterator<Item = Option<Duration>>, now: Instant) {
        let mut lateness = lateness.into_iter().peekable();
        // A batch that closed nothing is no minute with closes.
        if lateness.peek().is_none() {
            return;
        }
        let mut hour = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let minute = hour.minute(now);
        for lateness in lateness {
            minute.closed[index(by)] += 1;
            lateness.into_iter().for_each(|lateness| minute.lateness.note(lateness));
        }
    }

    /// Counts orders that were closed after their payment providers had been asked.
    pub fn note_asked(&self, orders: u64, now: Instant) {
        if orders > 0 {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).minute(now).asked += orders;
        }
    }
}

/// The minutes in which something was closed, the oldest first: of all these together. They must have begun at the same
/// time.
#[must_use]
pub fn read_together<'a>(hours: impl IntoIterator<Item = &'a SharedLastHour>, now: Instant) -> Vec<ClosedMinute> {
    let (mut minutes, mut current): (BTreeMap<u64, Minute>, _) = (BTreeMap::new(), 0);
    for hour in hours {
        let mut hour = hour.0.lock().unwrap_or_else(PoisonError::into_inner);
        hour.forget(now);
        current = hour.number(now);
        for minute in &hour.minutes {
            minutes.entry(minute.number).and_modify(|sum| sum.add(minute)).or_insert_with(|| minute.clone());
        }
    }
    minutes.values().map(|minute| minute.read(current)).collect()
}

/// All minutes of the last hour as one; `None` if nothing was closed.
#[must_use]
pub fn read_as_one(hour: &SharedLastHour, now: Instant) -> Option<ClosedMinute> {
    let mut hour = hour.0.lock().unwrap_or_else(PoisonError::into_inner);
    hour.forget(now);
    let sum = hour.minutes.iter().cloned().reduce(|mut sum, minute| {
        sum.add(&minute);
        sum
    });
    sum.map(|sum| sum.read(0))
}

/// What was closed in a minute, and how late. Lateness is commit time minus deadline.
#[derive(Debug, Clone, PartialEq)]
pub struct ClosedMinute {
    /// Minutes before now: 0 is the current one.
    pub minutes_ago: u64,
    /// Orders closed by their alarms.
    pub alarm: u64,
    /// Orders closed by reading ahead.
    pub look_ahead: u64,
    /// Orders closed by the sweep.
    pub sweep: u64,
    /// Orders closed after their payment providers were asked. How late that was is not known here.
    pub asked: u64,
    /// Half of them were closed at most this late, in milliseconds; `None` if no lateness is known.
    pub p50_ms: Option<f64>,
    /// 99 of 100 were.
    pub p99_ms: Option<f64>,
    /// All were.
    pub max_ms: Option<f64>,
}

impl ClosedMinute {
    /// All paths.
    #[must_use]
    pub const fn closed(&self) -> u64 {
        self.alarm + self.look_ahead + self.sweep + self.asked
    }
}

#[derive(Debug)]
struct LastHour {
    began: Instant,
    /// By number, at most [`MINUTES`].
    minutes: VecDeque<Minute>,
}

#[derive(Debug, Clone)]
struct Minute {
    number: u64,
    closed: [u64; 4],
    asked: u64,
    lateness: Lateness,
}

const fn index(by: ClosedBy) -> usize {
    match by {
        ClosedBy::Alarm => 0,
        ClosedBy::LookAhead => 1,
        ClosedBy::Sweep => 2,
        ClosedBy::Manual | ClosedBy::Released => 3,
    }
}

impl LastHour {
    fn number(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.began).as_secs() / 60
    }

    fn forget(&mut self, now: Instant) {
        let current = self.number(now);
        while self.minutes.front().is_some_and(|oldest| oldest.number + MINUTES <= current) {
            self.minutes.pop_front();
        }
    }

    fn minute(&mut self, now: Instant) -> &mut Minute {
        self.forget(now);
        let number = self.number(now);
        if self.minutes.back().is_none_or(|latest| latest.number < number) {
            self.minutes.push_back(Minute { number, closed: [0; 4], asked: 0, lateness: Lateness::default() });
        }
        self.minutes.back_mut().expect("it was just added")
    }
}

impl Minute {
    fn add(&mut self, other: &Self) {
        for (sum, more) in self.closed.iter_mut().zip(other.closed) {
            *sum += more;
        }
        self.asked += other.asked;
        self.lateness.0.add(&other.lateness.0).expect("all minutes have the same bounds");
    }

    fn read(&self, current: u64) -> ClosedMinute {
        let [alarm, look_ahead, sweep, _] = self.closed;
        ClosedMinute {
            minutes_ago: current.saturating_sub(self.number),
            alarm,
            look_ahead,
            sweep,
            asked: self.asked,
            p50_ms: self.lateness.ms_at(0.5),
            p99_ms: self.lateness.ms_at(0.99),
            max_ms: self.lateness.ms_at(1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minutes_have_quantiles_and_paths() {
        let now = Instant::now();
        let hour = SharedLastHour::new(now);
        hour.note(ClosedBy::Alarm, (1..=100).map(|ms| Some(Duration::from_millis(ms))), now);
        hour.note(ClosedBy::Sweep, [None, Some(Duration::from_secs(1_000_000))], now + Duration::from_secs(61));
        let read = read_together([&hour], now + Duration::from_secs(125));
        assert_eq!(read.len(), 2);
        assert_eq!((read[0].minutes_ago, read[0].alarm, read[0].closed()), (2, 100, 100));
        let near = |found: Option<f64>, expected: f64| (found.unwrap() / expected - 1.0).abs() < 0.02;
        assert!(near(read[0].p50_ms, 50.0) && near(read[0].p99_ms, 99.0) && near(read[0].max_ms, 100.0), "{read:?}");
        assert_eq!((read[1].minutes_ago, read[1].sweep), (1, 2));
        assert!(near(read[1].max_ms, 86_400e3), "later ones count as a day late: {read:?}");
    }

    #[test]
    fn kinds_are_read_together() {
        let now = Instant::now();
        let (one, other) = (SharedLastHour::new(now), SharedLastHour::new(now));
        let late = |ms| [Some(Duration::from_millis(ms))];
        one.note(ClosedBy::Alarm, late(5), now);
        other.note(ClosedBy::Sweep, late(900), now);
        other.note(ClosedBy::Sweep, late(900), now + Duration::from_secs(60));
        let read = read_together([&one, &other], now + Duration::from_secs(60));
        let counts: Vec<_> = read.iter().map(|minute| (minute.minutes_ago, minute.alarm, minute.sweep)).collect();
        assert_eq!(counts, [(1, 1, 1), (0, 0, 1)]);
        let hour = read_as_one(&other, now + Duration::from_secs(60)).unwrap();
        assert_eq!((hour.closed(), hour.p50_ms), (2, hour.max_ms));
        assert!(read[0].p50_ms.unwrap() < 6.0 && read[0].max_ms.unwrap() > 890.0, "{read:?}");
    }

    #[test]
    fn orders_closed_after_asking_count() {
        let now = Instant::now();
        let hour = SharedLastHour::new(now);
        // Of a batch of claims, none is closed.
        hour.note(ClosedBy::Alarm, [], now);
        hour.note_asked(0, now);
        assert!(read_together([&hour], now).is_empty());
        hour.note_asked(3, now);
        let read = read_together([&hour], now);
        assert_eq!((read[0].asked, read[0].closed(), read[0].p50_ms), (3, 3, None));
        assert_eq!(read_as_one(&hour, now).unwrap().closed(), 3);
    }

    #[test]
    fn older_minutes_are_forgotten() {
        let now = Instant::now();
        let hour = SharedLastHour::new(now);
        for minute in 0..200 {
            hour.note(ClosedBy::Alarm, [None], now + Duration::from_secs(60 * minute));
        }
        let read = read_together([&hour], now + Duration::from_secs(60 * 199));
        assert_eq!((read.len(), read[0].minutes_ago, read[0].p50_ms), (60, 59, None));
        assert!(read_together([&hour], now + Duration::from_secs(60 * 300)).is_empty());
    }
}
