//! Actions that failed and are tried again all together after a pause.
//!
//! Pure bookkeeping: when to try again and since when something fails. What follows from it is decided by the engine.

use std::collections::HashMap;
use std::time::Duration;

use super::Policy;
use crate::alarm::{DeadLetter, Rearm, Receipt};
use crate::order::Timestamp;

/// Why something could not be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FailureScope {
    /// Nothing of the kind can be done: a server is away.
    Shared,
    /// Others could be.
    Individual,
}

/// What speaks for a delivery.
pub(super) trait OfDelivery {
    fn receipt(&self) -> Receipt;
}

impl OfDelivery for Rearm {
    fn receipt(&self) -> Receipt {
        self.receipt
    }
}

impl OfDelivery for (DeadLetter, Receipt) {
    fn receipt(&self) -> Receipt {
        self.1
    }
}

/// What failed for a reason of ours, and is tried again all together after a pause that doubles.
#[derive(Debug)]
pub(super) struct RetryList<T> {
    items: Vec<T>,
    at: Timestamp,
    failures: u32,
    /// Since when nothing can be done; `None` as soon as something was, or something failed for a reason of its own.
    failing_since: Option<Timestamp>,
    /// When each was first found to fail. Also of those that are just being tried again.
    waiting_since: HashMap<Receipt, Timestamp>,
}

impl<T> Default for RetryList<T> {
    fn default() -> Self {
        let never = Timestamp::from_unix_micros(0);
        Self { items: Vec::new(), at: never, failures: 0, failing_since: None, waiting_since: HashMap::new() }
    }
}

impl<T: OfDelivery> RetryList<T> {
    pub fn put(&mut self, items: Vec<T>, cause: FailureScope, now: Timestamp, policy: &Policy) {
        if items.is_empty() {
            return;
        }
        // Those who wait already are not put off by those who join them.
        if self.items.is_empty() {
            self.at = now + policy.pause(self.failures);
            self.failures = self.failures.saturating_add(1);
        }
        match cause {
            FailureScope::Shared => _ = self.failing_since.get_or_insert(now),
            FailureScope::Individual => self.failing_since = None,
        }
        for item in &items {
            self.waiting_since.entry(item.receipt()).or_insert(now);
        }
        self.items.extend(items);
    }

    /// These are done. The next failure is the first again, once nobody is left who failed before.
    pub fn succeeded(&mut self, receipts: &[Receipt]) {
        self.failing_since = None;
        for receipt in receipts {
            self.waiting_since.remove(receipt);
        }
        if self.waiting_since.is_empty() {
            self.failures = 0;
        }
    }

    /// Those that have waited for so long while others fared better: the broker does not wait for an acknowledgement for
    /// ever. Where nobody has fared better for so long the session is to end, and with it everybody's wait.
    pub fn take_expired(&mut self, now: Timestamp, timeout: Duration) -> Vec<T> {
        if self.failing_for(now).is_some_and(|failing_for| failing_for >= timeout) {
            return Vec::new();
        }
        let since = &self.waiting_since;
        let is_over = |item: &mut T| since.get(&item.receipt()).is_some_and(|since| now.since(*since) >= timeout);
        let taken: Vec<T> = self.items.extract_if(.., is_over).collect();
        for item in &taken {
            self.waiting_since.remove(&item.receipt());
        }
        // With nobody left to try again nothing would ever be found to succeed.
        if self.waiting_since.is_empty() {
            self.failing_since = None;
        }
        taken
    }

    /// The pause ends now, and nothing has begun to fail later than now.
    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        self.at = now.min(self.at);
        self.failing_since = self.failing_since.map(|since| now.min(since));
        for since in self.waiting_since.values_mut() {
            *since = now.min(*since);
        }
    }

    /// How long nothing could be done.
    pub fn failing_for(&self, now: Timestamp) -> Option<Duration> {
        self.failing_since.map(|since| now.since(since))
    }

    /// The session has ended, and what was delivered in it comes again. One is kept, to find out when it can be done.
    pub fn keep_one(&mut self) {
        self.items.truncate(1);
        self.waiting_since.clear();
    }

    /// Keeps those of this session and later ones. Where nobody is left, nothing is failing.
    pub fn keep_from(&mut self, session: u64) {
        self.items.retain(|item| item.receipt().session >= session);
        self.waiting_since.retain(|receipt, _| receipt.session >= session);
        if self.items.is_empty() {
            self.failing_since = None;
            self.failures = 0;
        }
    }

    pub fn ready_at(&self) -> Option<Timestamp> {
        (!self.items.is_empty()).then_some(self.at)
    }

    pub fn take_ready(&mut self, now: Timestamp) -> Vec<T> {
        if self.at <= now { self.drain() } else { Vec::new() }
    }

    pub fn drain(&mut self) -> Vec<T> {
        std::mem::take(&mut self.items)
    }
}
