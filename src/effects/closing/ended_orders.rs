//! The orders that the statements of the closing protocol have closed or settled, as the metrics count them.
//!
//! Collects alone: written behind each commit, and taken by what counts. A commit whose answer is lost is not in it.

use std::sync::{Arc, Mutex, PoisonError};

use order_timeout_core::order::{ClosedBy, Deadline};

/// An order that is closed or paid now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct EndedOrder {
    /// The path that claimed it, if it is closed; `None` if it is settled as paid.
    pub closed_by: Option<ClosedBy>,
    pub deadline: Option<Deadline>,
}

/// Those that were not taken yet. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct EndedOrders(Arc<Mutex<Vec<EndedOrder>>>);

impl EndedOrders {
    pub fn add(&self, orders: impl IntoIterator<Item = EndedOrder>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(orders);
    }

    pub fn take(&self) -> Vec<EndedOrder> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
