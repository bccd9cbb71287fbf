//! How long an order waits before the next try: an alarm's order here or at the broker, an overdue order of the sweep by
//! its number of failures.
//!
//! Whether there is a next try is decided elsewhere (`decide.rs`).

use std::time::Duration;

use super::circulation::circulates;
use super::{Engine, Policy, WorkItem};
use crate::alarm::Wanted;
use crate::order::Timestamp;

/// How often the wait at the broker doubles.
const MAX_DOUBLINGS: u32 = 5;
/// How many times `retry_longest` a retry waits at the broker at most.
pub const LONGEST_RETRY_FACTOR: u32 = 2_u32.pow(MAX_DOUBLINGS);

/// How long an order is backed off after its first failure; it doubles up to [`MAX_BACKOFF`] if the order is at fault.
/// Short, because the first failure may have been a deadlock.
const FIRST_BACKOFF: Duration = Duration::from_millis(250);
pub(super) const MAX_BACKOFF: Duration = Duration::from_secs(300);
/// The maximum for an order that is the only one to meet a timeout: it may be its own trigger, or a disk that is full
/// for a while.
pub(super) const MAX_BLAMELESS_BACKOFF: Duration = Duration::from_secs(8);

/// The backoff of an overdue order after this many earlier failures, without its maximum.
pub(super) fn overdue_backoff(failures: u32) -> Duration {
    FIRST_BACKOFF * 2_u32.saturating_pow(failures.min(11))
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

impl Engine {
    /// Asks again after a millisecond, the next time after two.
    pub(super) fn ask_again(&mut self, mut item: WorkItem, now: Timestamp) {
        let wait = Duration::from_millis(1) * 2_u32.saturating_pow(item.disagreements);
        item.disagreements += 1;
        self.pause_for(item, wait, now);
    }

    /// Tries again after a pause, the next time after twice that, up to `longest`; not counted as a failure.
    pub(super) fn pause(&mut self, mut item: WorkItem, longest: Duration, now: Timestamp) {
        let wait = self.policy.doubling(item.pauses).min(longest);
        item.pauses = item.pauses.saturating_add(1);
        self.pause_for(item, wait, now);
    }

    /// Waits here, and after `requeue_after` at the broker, which limits how long a message stays unacknowledged.
    fn pause_for(&mut self, mut item: WorkItem, wait: Duration, now: Timestamp) {
        // min: the clock may have been set back since.
        let since = item.paused_since.map_or(now, |since| now.min(since));
        item.paused_since = Some(since);
        if now.since(since) >= self.policy.requeue_after {
            return self.rearm(item, Wanted::NotBefore(now + self.policy.retry_longest));
        }
        self.hold_until(now + wait, item);
    }

    /// Tries again after a wait that doubles: the short waits here, the long ones at the broker, so that failing alarms
    /// do not fill the prefetch window.
    pub(super) fn retry(&mut self, mut item: WorkItem, now: Timestamp) {
        if item.alarm.attempt == 0 && self.policy.doubling(item.pauses) <= self.policy.retry_longest {
            return self.pause(item, self.policy.retry_longest, now);
        }
        let wait = self.policy.retry_longest * 2_u32.saturating_pow(item.alarm.attempt.min(MAX_DOUBLINGS));
        // Saturating: the first attempt's number came with the message.
        item.alarm.attempt = item.alarm.attempt.saturating_add(1);
        if circulates(&item.alarm) {
            // The broker would return it early.
            return self.hold_until(now + wait, item);
        }
        self.rearm(item, Wanted::NotBefore(now + wait));
    }
}
