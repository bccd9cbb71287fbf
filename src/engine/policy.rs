//! The bounds within which the engine decides.
//!
//! Pure. Only holds them and the pauses that follow from them; what is done within them is decided in the other files.

use std::time::Duration;

/// Each stands in `config/default.toml` with its reason.
#[derive(Debug, Clone)]
pub struct Policy {
    pub hold_max: Duration,
    pub max_delay: Duration,
    pub batch_size: usize,
    pub linger: Duration,
    pub closers: usize,
    pub retry_first: Duration,
    pub retry_longest: Duration,
    pub missing_for: Duration,
    pub max_attempts: u32,
    pub requeue_after: Duration,
    /// How many alarms are held back at a time because the broker returns them before their time.
    pub held_back_most: usize,
    /// How long a batch may take to fail, about: the wait for a connection, and the statement.
    pub longest_try: Duration,
    pub sweep_every: Duration,
    pub sweep_grace: Duration,
    pub sweep_page: usize,
    /// How much of a pause after a failure this worker takes, at most 1: each its own share, so that workers that lost
    /// the same server do not come back in step.
    pub pause_share: f64,
}

impl Policy {
    pub(super) fn doubling(&self, times: u32) -> Duration {
        self.retry_first * 2_u32.saturating_pow(times.min(16))
    }

    /// Before something that failed for everybody is tried again.
    pub(super) fn pause(&self, times: u32) -> Duration {
        self.doubling(times).min(self.retry_longest).mul_f64(self.pause_share)
    }

    /// The longest that somebody who is overdue is not looked at. No longer than the sweep would leave it: with a pause of
    /// a second, an order would be more than a second late once nothing stands in its way.
    pub(super) fn longest_while_overdue(&self) -> Duration {
        self.retry_longest.min(self.sweep_every)
    }
}
