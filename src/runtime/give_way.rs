//! Lets work that can wait give way to closing, for a bounded time.
//!
//! Decides nothing about orders; a continuous load delays an inspection, and never prevents it.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// How long an inspection waits for closers that are busy. A burst of 100 000 orders takes less on most machines, and a
/// cause of degradation is still reported within its fifteen seconds.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// Sees whether closers are busy.
#[derive(Debug, Clone)]
pub(super) struct GiveWay {
    closing: watch::Receiver<bool>,
}

impl GiveWay {
    pub fn to(closing: watch::Receiver<bool>) -> Self {
        Self { closing }
    }

    /// Resolves at `due` if all closers are idle then, otherwise when they are, at most two seconds later. May be dropped
    /// and called again with the same `due`.
    pub async fn due(&mut self, due: Instant) {
        tokio::time::sleep_until(due).await;
        // Timed out or without an event loop: it is time either way.
        let _ = tokio::time::timeout_at(due + LONGEST_WAIT, self.closing.wait_for(|closing| !closing)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn waits_for_closers_but_not_forever() {
        let (closing, seen) = watch::channel(true);
        let mut give_way = GiveWay::to(seen);
        let due = Instant::now() + Duration::from_secs(3);
        give_way.due(due).await;
        assert_eq!(Instant::now(), due + LONGEST_WAIT);

        let due = Instant::now() + Duration::from_secs(3);
        let idle_at = due + Duration::from_millis(200);
        let idle = async {
            tokio::time::sleep_until(idle_at).await;
            closing.send_replace(false);
        };
        tokio::join!(give_way.due(due), idle);
        assert_eq!(Instant::now(), idle_at);

        let due = Instant::now() + Duration::from_secs(3);
        give_way.due(due).await;
        assert_eq!(Instant::now(), due, "nothing to give way to");
    }
}
