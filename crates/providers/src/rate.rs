//! How many requests a second one provider gets: evenly spaced, in the order in which they came.
//!
//! Knows nothing of what is sent.

use std::num::NonZeroU32;

use governor::clock::{Clock, MonotonicClock};
use governor::middleware::NoOpMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use tokio::sync::Mutex;

/// The rate limit of one provider.
pub(crate) struct Rate {
    // `until_ready` of the library is not used: it sleeps on a thread of its own instead of tokio's timer.
    limiter: RateLimiter<NotKeyed, InMemoryState, MonotonicClock, NoOpMiddleware<std::time::Instant>>,
    clock: MonotonicClock,
    /// Held by the first of the queue. tokio's mutex is fair, so no request overtakes another.
    first: Mutex<()>,
}

impl Rate {
    pub(crate) fn new(requests_per_s: u32) -> Self {
        // Settings are checked before; 0 would have no meaning here.
        let requests_per_s = NonZeroU32::new(requests_per_s).unwrap_or(NonZeroU32::MIN);
        // A burst of one: requests that were not sent are not caught up on, so no second has more than its share.
        let quota = Quota::per_second(requests_per_s).allow_burst(NonZeroU32::MIN);
        Self {
            limiter: RateLimiter::direct_with_clock(quota, MonotonicClock),
            clock: MonotonicClock,
            first: Mutex::default(),
        }
    }

    /// Waits until one more request may be sent.
    pub(crate) async fn turn(&self) {
        let _first = self.first.lock().await;
        while let Err(not_until) = self.limiter.check() {
            tokio::time::sleep(not_until.wait_time_from(self.clock.now())).await;
        }
    }
}
