//! How many requests a second one provider gets: evenly spaced, to a hundredth of a second, in the order in which they came.
//!
//! Knows nothing of what is sent.

use std::num::NonZeroU32;

use governor::clock::{Clock, MonotonicClock};
use governor::middleware::NoOpMiddleware;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};
use tokio::sync::Mutex;

/// Requests of so small a part of a second may be sent together. tokio's timer has ticks of a millisecond: one sleep for each
/// request would be less than a thousand a second, whatever is allowed.
const PARTS_OF_SECOND: u32 = 100;

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
        let at_once = NonZeroU32::new(requests_per_s.get() / PARTS_OF_SECOND).unwrap_or(NonZeroU32::MIN);
        // Requests that were not sent are not caught up on, except for a part of a second, which the rate is lowered by: so
        // no second has more than its share.
        let spaced = requests_per_s.get() - at_once.get() + 1;
        let quota = Quota::per_second(NonZeroU32::new(spaced).unwrap_or(NonZeroU32::MIN)).allow_burst(at_once);
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

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[tokio::test]
    async fn thousands_a_second_are_carried() {
        let (rate, began) = (Rate::new(10_000), Instant::now());
        for _ in 0..3_000 {
            rate.turn().await;
        }
        // A third of a second; three with a tick of the timer for each.
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn no_second_has_more_than_its_share() {
        let rate = Rate::new(1_000);
        let mut sent = Vec::new();
        while sent.first().is_none_or(|first: &Instant| first.elapsed() < Duration::from_millis(1_500)) {
            rate.turn().await;
            sent.push(Instant::now());
        }
        for (number, first) in sent.iter().enumerate() {
            let within = sent[number..].iter().take_while(|one| one.duration_since(*first) < Duration::from_secs(1));
            // The first is noted a moment after its turn.
            assert!(within.count() <= 1_001);
        }
    }
}
