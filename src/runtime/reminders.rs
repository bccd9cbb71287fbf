//! Announces reminders each second.
//!
//! Decides when; `outbox/reminders.rs` does it.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::observe::logging::LogThrottle;
use crate::outbox::reminders::Reminders;
use crate::postgres::one_line;

/// A reminder is this late at most, and half of it on average.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(1);

/// Runs until `ends`.
pub(super) async fn keep_announcing(reminders: Reminders, ends: CancellationToken) {
    let mut throttle = LogThrottle::default();
    loop {
        let more = match reminders.announce().await {
            Ok((0, _)) => false,
            Ok((events, more)) => {
                debug!(events, "reminders announced");
                more
            }
            Err(error) => {
                if throttle.is_due() {
                    warn!(fault = one_line(&error), "reminders cannot be announced; they are tried again each second");
                }
                false
            }
        };
        if ends.is_cancelled() {
            return;
        }
        if !more {
            tokio::select! {
                () = ends.cancelled() => return,
                () = tokio::time::sleep(ANNOUNCE_EVERY) => {}
            }
        }
    }
}
