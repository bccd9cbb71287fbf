//! How long to wait before the next try, again and again.
//!
//! Says how long; waiting, and deciding whether to try at all, is the caller's.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Pauses that double up to the longest and never end: jittered, so that workers do not come back in step.
#[derive(Debug)]
pub struct Pauses(backon::ExponentialBackoff);

impl Pauses {
    #[must_use]
    pub fn new() -> Self {
        let growing = ExponentialBuilder::default().with_min_delay(FIRST_PAUSE).with_max_delay(LONGEST_PAUSE);
        Self(growing.with_jitter().without_max_times().build())
    }

    /// The next pause.
    pub fn next_pause(&mut self) -> Duration {
        self.0.next().unwrap_or(LONGEST_PAUSE)
    }
}

impl Default for Pauses {
    fn default() -> Self {
        Self::new()
    }
}
