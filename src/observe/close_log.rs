//! The log line about closed orders: how many, by which path, and how late.
//!
//! At info, at most once a minute; the first close of a worker is logged at once, and the last ones when it stops. Counts
//! only, and names no order.

use std::time::Duration;

use order_timeout_core::order::ClosedBy;
use tracing::info;

use crate::observe::last_hour::Lateness;
use crate::observe::logging::LogThrottle;

/// Closed orders since the last log line.
#[derive(Debug, Default)]
pub(super) struct CloseLog {
    closed: Option<Closed>,
    throttle: LogThrottle,
}

#[derive(Debug, Default)]
struct Closed {
    by_alarm: usize,
    by_look_ahead: usize,
    by_sweep: usize,
    /// Of those above, after a payment provider was asked.
    after_provider: usize,
    /// Not closed: a payment provider says that they are paid.
    settled: usize,
    /// Of those with a known deadline.
    lateness: Lateness,
}

impl CloseLog {
    /// An order was closed; `lateness` if its deadline is known.
    pub fn note(&mut self, by: ClosedBy, lateness: Option<Duration>) {
        let closed = self.closed.get_or_insert_default();
        match by {
            ClosedBy::Alarm => closed.by_alarm += 1,
            ClosedBy::LookAhead => closed.by_look_ahead += 1,
            ClosedBy::Sweep => closed.by_sweep += 1,
            // Not by a worker.
            ClosedBy::Manual | ClosedBy::Released => {}
        }
        lateness.into_iter().for_each(|lateness| closed.lateness.note(lateness));
    }

    /// An order was closed after a payment provider was asked, or settled as paid.
    pub fn note_at_provider(&mut self, closed_by: Option<ClosedBy>) {
        match closed_by {
            Some(by) => {
                self.note(by, None);
                self.closed.get_or_insert_default().after_provider += 1;
            }
            None => self.closed.get_or_insert_default().settled += 1,
        }
    }

    /// Logs what was noted, if there is anything and nothing was logged within the last minute.
    pub fn log_due(&mut self) {
        if self.closed.is_some() && self.throttle.is_due() {
            self.log_last();
        }
    }

    /// Logs what was noted, if there is anything: of a worker that stops.
    pub fn log_last(&mut self) {
        let Some(closed) = self.closed.take() else { return };
        let Closed { by_alarm, by_look_ahead, by_sweep, after_provider, settled, lateness } = closed;
        let (lateness_p50_ms, lateness_max_ms) = (rounded(lateness.ms_at(0.5)), rounded(lateness.ms_at(1.0)));
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

/// To one decimal place.
fn rounded(ms: Option<f64>) -> f64 {
    (ms.unwrap_or(0.0) * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_paths_and_lateness() {
        let mut log = CloseLog::default();
        for millis in [5, 1, 3] {
            log.note(ClosedBy::Alarm, Some(Duration::from_millis(millis)));
        }
        log.note(ClosedBy::Sweep, None);
        let Closed { by_alarm, by_sweep, lateness, .. } = log.closed.unwrap();
        assert_eq!((by_alarm, by_sweep), (3, 1));
        assert_eq!((rounded(lateness.ms_at(0.5)), rounded(lateness.ms_at(1.0))), (3.0, 5.0));
    }

    #[test]
    fn closes_after_provider_have_no_lateness() {
        let mut log = CloseLog::default();
        log.note_at_provider(Some(ClosedBy::Alarm));
        log.note_at_provider(None);
        let Closed { by_alarm, after_provider, settled, lateness, .. } = log.closed.unwrap();
        assert_eq!((by_alarm, after_provider, settled, lateness.ms_at(0.5)), (1, 1, 1, None));
    }
}
