//! Where cases wait on the desk: for a batch to fill, or for a pause to end.
//!
//! Pure bookkeeping: who waits since when. Who goes first is decided by the desk.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use super::{Case, Policy};
use crate::alarm::{ArmJob, Parcel, Receipt};
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

    /// To the front again, where they have been since then.
    pub fn put_back(&mut self, cases: Vec<Case>, since: Moment) {
        for case in cases.into_iter().rev() {
            self.cases.push_front((case, since));
        }
    }
}

/// Why something could not be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// Nothing of the kind can be done: a server is away.
    Everybodys,
    /// Others could be.
    Its,
}

/// What speaks for a delivery.
pub(super) trait OfDelivery {
    fn receipt(&self) -> Receipt;
}

impl OfDelivery for ArmJob {
    fn receipt(&self) -> Receipt {
        self.receipt
    }
}

impl OfDelivery for (Parcel, Receipt) {
    fn receipt(&self) -> Receipt {
        self.1
    }
}

/// What failed for a reason of ours, and is tried again all together after a pause that doubles.
#[derive(Debug)]
pub(super) struct Later<T> {
    items: Vec<T>,
    at: Moment,
    failures: u32,
    /// Since when nothing can be done; `None` as soon as something was, or something failed for a reason of its own.
    failing_since: Option<Moment>,
    /// When each was first found to fail. Also of those that are just being tried again.
    waiting_since: HashMap<Receipt, Moment>,
}

impl<T> Default for Later<T> {
    fn default() -> Self {
        let never = Moment::from_unix_micros(0);
        Self { items: Vec::new(), at: never, failures: 0, failing_since: None, waiting_since: HashMap::new() }
    }
}

impl<T: OfDelivery> Later<T> {
    pub fn put(&mut self, items: Vec<T>, cause: Cause, now: Moment, policy: &Policy) {
        if items.is_empty() {
            return;
        }
        // Those who wait already are not put off by those who join them.
        if self.items.is_empty() {
            self.at = now + policy.pause(self.failures);
            self.failures = self.failures.saturating_add(1);
        }
        match cause {
            Cause::Everybodys => _ = self.failing_since.get_or_insert(now),
            Cause::Its => self.failing_since = None,
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
    pub fn take_impatient(&mut self, now: Moment, patience: Duration) -> Vec<T> {
        if self.failing_for(now).is_some_and(|failing_for| failing_for >= patience) {
            return Vec::new();
        }
        let since = &self.waiting_since;
        let is_over = |item: &mut T| since.get(&item.receipt()).is_some_and(|since| now.since(*since) >= patience);
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
    pub fn clock_was_set_back(&mut self, now: Moment) {
        self.at = now.min(self.at);
        self.failing_since = self.failing_since.map(|since| now.min(since));
        for since in self.waiting_since.values_mut() {
            *since = now.min(*since);
        }
    }

    /// How long nothing could be done.
    pub fn failing_for(&self, now: Moment) -> Option<Duration> {
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
