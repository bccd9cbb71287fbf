//! The limits within which the engine decides.
//!
//! Pure. Only holds the limits and the pauses that follow from them; the other files decide.

use std::time::Duration;

/// Each limit is in `config/default.toml` with its reason.
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
    /// How many alarms are held back at a time because the broker returns them early.
    pub held_back_max: usize,
    /// About how long a batch may take to fail: the wait for a connection, and the statement.
    pub longest_try: Duration,
    pub sweep_every: Duration,
    pub sweep_grace: Duration,
    pub sweep_page: usize,
    /// Which share of a pause after a failure this worker takes, at most 1. Each worker has its own share, so that
    /// workers that lost the same server do not come back in step.
    pub pause_share: f64,
}

impl Policy {
    pub(super) fn doubling(&self, times: u32) -> Duration {
        self.retry_first * 2_u32.saturating_pow(times.min(16))
    }

    /// The pause before a retry after a failure that concerns every order.
    pub(super) fn pause(&self, times: u32) -> Duration {
        self.doubling(times).min(self.retry_longest).mul_f64(self.pause_share)
    }

    /// The longest pause for an overdue order. No longer than between two sweeps: with a pause of a second, an order
    /// would be closed more than a second late after its obstacle is gone.
    pub(super) fn longest_overdue_pause(&self) -> Duration {
        self.retry_longest.min(self.sweep_every)
    }
}
