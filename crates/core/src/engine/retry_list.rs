//! Actions that failed and are tried again all together after a pause.
//!
//! Pure bookkeeping: when to try again and since when something fails. What follows from it is decided by the engine.

use std::collections::HashMap;
use std::time::Duration;

use super::Policy;
use crate::alarm::{DeadLetter, Rearm, Receipt};
use crate::order::Timestamp;

/// How far a failure reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FailureScope {
    /// Every action of this kind fails: a server is away.
    Shared,
    /// Only these failed; others may succeed.
    Individual,
}

/// Something that belongs to a delivery.
pub(super) trait HasReceipt {
    fn receipt(&self) -> Receipt;
}

impl HasReceipt for Rearm {
    fn receipt(&self) -> Receipt {
        self.receipt
    }
}

impl HasReceipt for (DeadLetter, Receipt) {
    fn receipt(&self) -> Receipt {
        self.1
    }
}

/// Actions that failed although their alarms are good. They are tried again all together after a pause that doubles.
#[derive(Debug)]
pub(super) struct RetryList<T> {
    items: Vec<T>,
    retry_at: Timestamp,
    failures: u32,
    /// Since when every action fails; `None` as soon as one succeeded, or one failed for a reason of its own.
    failing_since: Option<Timestamp>,
    /// When each first failed. Contains those that are being tried again right now.
    failed_since: HashMap<Receipt, Timestamp>,
}

impl<T> Default for RetryList<T> {
    fn default() -> Self {
        let never = Timestamp::from_unix_micros(0);
        Self { items: Vec::new(), retry_at: never, failures: 0, failing_since: None, failed_since: HashMap::new() }
    }
}

impl<T: HasReceipt> RetryList<T> {
    pub fn put(&mut self, items: Vec<T>, scope: FailureScope, now: Timestamp, policy: &Policy) {
        if items.is_empty() {
            return;
        }
        // Newcomers do not delay the ones that wait already.
        if self.items.is_empty() {
            self.retry_at = now + policy.pause(self.failures);
            self.failures = self.failures.saturating_add(1);
        }
        match scope {
            FailureScope::Shared => _ = self.failing_since.get_or_insert(now),
            FailureScope::Individual => self.failing_since = None,
        }
        for item in &items {
            self.failed_since.entry(item.receipt()).or_insert(now);
        }
        self.items.extend(items);
    }

    /// These succeeded. The next failure counts as the first again once none is left that failed before.
    pub fn succeeded(&mut self, receipts: &[Receipt]) {
        self.failing_since = None;
        for receipt in receipts {
            self.failed_since.remove(receipt);
        }
        if self.failed_since.is_empty() {
            self.failures = 0;
        }
    }

    /// Takes out the ones that have failed for `timeout` while others succeeded: the broker limits how long a message
    /// stays unacknowledged. If everything has failed for that long, the session ends, and that ends every wait.
    pub fn take_expired(&mut self, now: Timestamp, timeout: Duration) -> Vec<T> {
        if self.failing_for(now).is_some_and(|failing_for| failing_for >= timeout) {
            return Vec::new();
        }
        let since = &self.failed_since;
        let is_over = |item: &mut T| since.get(&item.receipt()).is_some_and(|since| now.since(*since) >= timeout);
        let taken: Vec<T> = self.items.extract_if(.., is_over).collect();
        for item in &taken {
            self.failed_since.remove(&item.receipt());
        }
        // With nothing left to retry, no success would ever be noticed.
        if self.failed_since.is_empty() {
            self.failing_since = None;
        }
        taken
    }

    /// The pause ends now, and no failure can have begun later than now.
    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        self.retry_at = now.min(self.retry_at);
        self.failing_since = self.failing_since.map(|since| now.min(since));
        for since in self.failed_since.values_mut() {
            *since = now.min(*since);
        }
    }

    /// For how long every action has failed.
    pub fn failing_for(&self, now: Timestamp) -> Option<Duration> {
        self.failing_since.map(|since| now.since(since))
    }

    /// The session has ended and its messages are redelivered. One action is kept, to find out when it succeeds again.
    pub fn keep_one(&mut self) {
        self.items.truncate(1);
        self.failed_since.clear();
    }

    /// Keeps the actions of this session and later ones. If none is left, nothing is failing.
    pub fn keep_from(&mut self, session: u64) {
        self.items.retain(|item| item.receipt().session >= session);
        self.failed_since.retain(|receipt, _| receipt.session >= session);
        if self.items.is_empty() {
            self.failing_since = None;
            self.failures = 0;
        }
    }

    pub fn ready_at(&self) -> Option<Timestamp> {
        (!self.items.is_empty()).then_some(self.retry_at)
    }

    pub fn take_ready(&mut self, now: Timestamp) -> Vec<T> {
        if self.retry_at <= now { self.drain() } else { Vec::new() }
    }

    pub fn drain(&mut self) -> Vec<T> {
        std::mem::take(&mut self.items)
    }
}
