//! This machine's clock, for protocols that sign the time of a request.
//!
//! Only for signatures and dates of HTTP: no deadline may be compared with it.

use std::time::{SystemTime, UNIX_EPOCH};

use order_timeout_core::order::Timestamp;

/// Now.
pub(crate) fn now() -> SystemTime {
    Timestamp::now_by_local_clock().into()
}

/// Whole seconds since the Unix epoch; 0 before it.
pub(crate) fn unix_seconds() -> u64 {
    now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
