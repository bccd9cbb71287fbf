//! What is recorded of each kind that this worker serves, for the page: its metrics, and what it closed in the last hour.
//!
//! A list that grows while the worker starts. Decides nothing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use order_timeout_core::kind::Kind;

use crate::observe::last_hour::{ClosedMinute, SharedLastHour, read_together};
use crate::observe::metrics::KindMetrics;

/// What is recorded of one kind.
#[derive(Debug, Clone)]
pub struct ServedKind {
    /// Its name.
    pub kind: Kind,
    /// Its metrics.
    pub metrics: Arc<KindMetrics>,
    /// What it closed.
    pub last_hour: SharedLastHour,
}

/// The kinds of this worker. Cheap to clone: all clones share the list.
#[derive(Debug, Clone)]
pub struct ServedKinds {
    began: Instant,
    kinds: Arc<Mutex<Vec<ServedKind>>>,
}

impl ServedKinds {
    /// No kind yet. The minutes of all kinds are counted from `now`.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self { began: now, kinds: Arc::default() }
    }

    /// Adds a kind, and returns where its closes are counted.
    pub fn add(&self, kind: &Kind, metrics: Arc<KindMetrics>) -> SharedLastHour {
        let last_hour = SharedLastHour::new(self.began);
        let added = ServedKind { kind: kind.clone(), metrics, last_hour: last_hour.clone() };
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner).push(added);
        last_hour
    }

    /// The kinds, in the order in which they were added.
    #[must_use]
    pub fn list(&self) -> Vec<ServedKind> {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What was closed in each minute of the last hour, of all kinds together.
    #[must_use]
    pub fn last_hour(&self, now: Instant) -> Vec<ClosedMinute> {
        read_together(self.list().iter().map(|served| &served.last_hour), now)
    }
}
