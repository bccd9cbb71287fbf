//! The log line about closed orders: how many, by which path, and how late.
//!
//! At info, at most once a minute; the first close of a worker is logged at once, and the last ones when it stops. Counts
//! only, and names no order.

use std::time::Duration;

use order_timeout_core::order::ClosedBy;
use tracing::info;

use crate::observe::logging::LogThrottle;

/// Latenesses that are kept for the median, however many orders are closed in a minute.
const MOST_SAMPLES: usize = 1_024;

/// Closed orders since the last log line.
#[derive(Debug, Default)]
pub(super) struct CloseLog {
    closed: Closed,
    throttle: LogThrottle,
}

#[derive(Debug, Default, PartialEq)]
struct Closed {
    by_alarm: usize,
    by_look_ahead: usize,
    by_sweep: usize,
    /// Of those above, after a payment provider was asked.
    after_provider: usize,
    /// Not closed: a payment provider says that they are paid.
    settled: usize,
    /// Those with a known lateness.
    measured: usize,
    /// A uniform sample of the latenesses, and all of them while they are few.
    sample: Vec<Duration>,
    longest: Duration,
}

impl CloseLog {
    /// An order was closed; `lateness` if its deadline is known.
    pub fn note(&mut self, by: ClosedBy, lateness: Option<Duration>) {
        self.closed.note(by, lateness);
    }

    /// An order was closed after a payment provider was asked, or settled as paid.
    pub fn note_at_provider(&mut self, closed_by: Option<ClosedBy>) {
        match closed_by {
            Some(by) => {
                self.closed.note(by, None);
                self.closed.after_provider += 1;
            }
            None => self.closed.settled += 1,
        }
    }

    /// Logs what was noted, if there is anything and nothing was logged within the last minute.
    pub fn log_due(&mut self) {
        if self.closed != Closed::default() && self.throttle.is_due() {
            self.log();
        }
    }

    /// Logs what was noted, if there is anything: of a worker that stops.
    pub fn log_last(&mut self) {
        if self.closed != Closed::default() {
            self.log();
        }
    }

    fn log(&mut self) {
        let mut closed = std::mem::take(&mut self.closed);
        let (lateness_p50_ms, lateness_max_ms) = (millis(closed.median()), millis(closed.longest));
        let Closed { by_alarm, by_look_ahead, by_sweep, after_provider, settled, .. } = closed;
        info!(
            by_alarm,
            by_look_ahead,
            by_sweep,
            after_provider,
            settled,
            lateness_p50_ms,
            lateness_max_ms,
            "orders closed since the last line like this one"
        );
    }
}

impl Closed {
    fn note(&mut self, by: ClosedBy, lateness: Option<Duration>) {
        match by {
            ClosedBy::Alarm => self.by_alarm += 1,
            ClosedBy::LookAhead => self.by_look_ahead += 1,
            ClosedBy::Sweep => self.by_sweep += 1,
            // Not by a worker.
            ClosedBy::Manual => {}
        }
        if let Some(lateness) = lateness {
            self.measured += 1;
            self.longest = self.longest.max(lateness);
            self.keep(lateness);
        }
    }

    /// Reservoir sampling: each lateness is in the sample with the same probability.
    fn keep(&mut self, lateness: Duration) {
        if self.sample.len() < MOST_SAMPLES {
            self.sample.push(lateness);
        } else if let Some(kept) = self.sample.get_mut(fastrand::usize(..self.measured)) {
            *kept = lateness;
        }
    }

    fn median(&mut self) -> Duration {
        if self.sample.is_empty() {
            return Duration::ZERO;
        }
        let middle = (self.sample.len() - 1) / 2;
        *self.sample.select_nth_unstable(middle).1
    }
}

/// In milliseconds with one decimal place.
fn millis(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e4).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_paths_and_lateness() {
        let mut closed = Closed::default();
        for millis in [5, 1, 3] {
            closed.note(ClosedBy::Alarm, Some(Duration::from_millis(millis)));
        }
        closed.note(ClosedBy::Sweep, None);
        assert_eq!((closed.by_alarm, closed.by_sweep, closed.measured), (3, 1, 3));
        assert_eq!((closed.median(), closed.longest), (Duration::from_millis(3), Duration::from_millis(5)));
        assert_eq!(millis(Duration::from_micros(1_234)), 1.2);
    }

    #[test]
    fn closes_after_provider_have_no_lateness() {
        let mut log = CloseLog::default();
        log.note_at_provider(Some(ClosedBy::Alarm));
        log.note_at_provider(None);
        let Closed { by_alarm, after_provider, settled, measured, .. } = log.closed;
        assert_eq!((by_alarm, after_provider, settled, measured), (1, 1, 1, 0));
    }

    #[test]
    fn sample_of_latenesses_is_bounded() {
        let mut closed = Closed::default();
        for millis in 0..20_000 {
            closed.note(ClosedBy::Alarm, Some(Duration::from_millis(millis)));
        }
        assert_eq!((closed.sample.len(), closed.longest), (MOST_SAMPLES, Duration::from_millis(19_999)));
        let median = closed.median();
        assert!(median > Duration::from_secs(8) && median < Duration::from_secs(12), "{median:?}");
    }
}
