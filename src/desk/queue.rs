//! Where cases wait on the desk: for a batch to fill, or for a pause to end.
//!
//! Pure bookkeeping: who waits since when. Who goes first is decided by the desk.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Case, Policy};
use crate::order::Moment;

/// Those who are due and wait for a batch to fill.
#[derive(Debug, Default)]
pub(super) struct Lingering {
    cases: VecDeque<(Case, Moment)>,
}

impl Lingering {
    pub fn push(&mut self, case: Case, now: Moment) {
        self.cases.push_back((case, now));
    }

    pub fn len(&self) -> usize {
        self.cases.len()
    }

    /// Nobody has come later than now.
    pub fn clock_was_set_back(&mut self, now: Moment) {
        for (_, came) in &mut self.cases {
            *came = now.min(*came);
        }
    }

    /// When the longest-waiting of them came.
    pub fn since(&self) -> Option<Moment> {
        self.cases.front().map(|(_, came)| *came)
    }

    /// A full batch at once, a smaller one after `linger`.
    pub fn ready_at(&self, batch_size: usize, linger: Duration) -> Option<Moment> {
        let linger = if self.cases.len() >= batch_size { Duration::ZERO } else { linger };
        Some(self.since()? + linger)
    }

    pub fn take(&mut self, batch_size: usize) -> Vec<Case> {
        let size = self.cases.len().min(batch_size);
        self.cases.drain(..size).map(|(case, _)| case).collect()
    }
}

/// What failed for a reason of ours, and is tried again all together after a pause that doubles.
#[derive(Debug)]
pub(super) struct Later<T> {
    items: Vec<T>,
    at: Moment,
    failures: u32,
    failing_since: Option<Moment>,
}

impl<T> Default for Later<T> {
    fn default() -> Self {
        Self { items: Vec::new(), at: Moment::from_unix_micros(0), failures: 0, failing_since: None }
    }
}

impl<T> Later<T> {
    pub fn put(&mut self, items: Vec<T>, now: Moment, policy: &Policy) {
        if items.is_empty() {
            return;
        }
        // Those who wait already are not put off by those who join them.
        if self.items.is_empty() {
            self.at = now + policy.doubling(self.failures).min(policy.retry_longest);
            self.failures = self.failures.saturating_add(1);
        }
        self.failing_since.get_or_insert(now);
        self.items.extend(items);
    }

    /// The next failure is the first again.
    pub fn succeeded(&mut self) {
        self.failures = 0;
        self.failing_since = None;
    }

    /// The pause ends now, and nothing has begun to fail later than now.
    pub fn clock_was_set_back(&mut self, now: Moment) {
        self.at = now.min(self.at);
        self.failing_since = self.failing_since.map(|since| now.min(since));
    }

    /// How long nothing has succeeded.
    pub fn failing_for(&self, now: Moment) -> Option<Duration> {
        self.failing_since.map(|since| now.since(since))
    }

    pub fn keep_one(&mut self) {
        self.items.truncate(1);
    }

    /// Keeps those for whom this holds. Where nobody is left, nothing is failing.
    pub fn retain(&mut self, holds: impl FnMut(&T) -> bool) {
        self.items.retain(holds);
        if self.items.is_empty() {
            self.succeeded();
        }
    }

    pub fn ready_at(&self) -> Option<Moment> {
        (!self.items.is_empty()).then_some(self.at)
    }

    pub fn take_ready(&mut self, now: Moment) -> Vec<T> {
        if self.at <= now { self.drain() } else { Vec::new() }
    }

    pub fn drain(&mut self) -> Vec<T> {
        std::mem::take(&mut self.items)
    }
}
