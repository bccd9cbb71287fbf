//! Announces reminders each second.
//!
//! Decides when; `outbox/reminders.rs` does it.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::observe::degraded::Cause;
use crate::observe::logging::LogThrottle;
use crate::observe::recorder::KindRecorder;
use crate::outbox::reminders::Reminders;
use crate::postgres::one_line;

/// A reminder is this late at most, and half of it on average.
const ANNOUNCE_EVERY: Duration = Duration::from_secs(1);

/// A shorter failure delays reminders, and loses none.
const REPORTED_AFTER: Duration = Duration::from_secs(3);

/// Runs until `ends`.
pub(super) async fn keep_announcing(reminders: Reminders, recorder: KindRecorder, ends: CancellationToken) {
    let mut throttle = LogThrottle::default();
    let mut failing_since: Option<Instant> = None;
    loop {
        let more = match reminders.announce().await {
            Ok((events, more)) => {
                if events > 0 {
                    debug!(events, "reminders announced");
                }
                if failing_since.take().is_some() {
                    recorder.degraded(Cause::Reminders, None);
                }
                more
            }
            Err(error) => {
                if throttle.is_due() {
                    warn!(fault = one_line(&error), "reminders cannot be announced; they are tried again each second");
                }
                let since = *failing_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= REPORTED_AFTER {
                    let why = format!(
                        "reminders cannot be announced ({}); each waits until its order is due, and is left out then",
                        one_line(&error)
                    );
                    recorder.degraded(Cause::Reminders, Some(&why));
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
