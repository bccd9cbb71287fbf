//! How long a loop waits before it tries a server again: a consumer session, an outbox. Pauses of orders are in the
//! engine (`engine/order_backoff.rs`).
//!
//! Only computes the pause; waiting, and deciding whether to try at all, is up to the caller.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Jitter included.
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Pauses that double up to the longest and never end: jittered, so that workers do not come back in step.
#[derive(Debug)]
pub struct Backoff(backon::ExponentialBackoff);

impl Backoff {
    /// Begins with the shortest pause.
    #[must_use]
    pub fn new() -> Self {
        // backon adds the jitter, which is as long as the delay at most.
        let growing = ExponentialBuilder::default().with_min_delay(FIRST_PAUSE).with_max_delay(LONGEST_PAUSE / 2);
        Self(growing.with_jitter().without_max_times().build())
    }

    /// The next pause.
    pub fn next_pause(&mut self) -> Duration {
        self.0.next().unwrap_or(LONGEST_PAUSE)
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_longest_and_continue() {
        let mut backoff = Backoff::new();
        assert!((FIRST_PAUSE..=2 * FIRST_PAUSE).contains(&backoff.next_pause()));
        let later: Vec<Duration> = (0..1_000).map(|_| backoff.next_pause()).skip(10).collect();
        assert!(later.iter().all(|pause| (LONGEST_PAUSE / 2..=LONGEST_PAUSE).contains(pause)), "{later:?}");
        assert!(later.windows(2).any(|two| two[0] != two[1]), "not in step");
    }
}
