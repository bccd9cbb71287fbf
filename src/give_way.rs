//! Lets work that can wait give way to closing, for a bounded time.
//!
//! Decides nothing about orders; a continuous load delays an inspection or the page, and never prevents them.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// How long an inspection waits for closers that are busy. A burst of 100 000 orders takes less on most machines, and a
/// cause of degradation is still reported within its fifteen seconds.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// How many kinds have a busy closer, among those that run.
#[derive(Debug, Clone)]
pub(crate) struct BusyKinds(watch::Sender<Counts>);

#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    busy: usize,
    all: usize,
}

/// Whose closers are busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Load {
    Idle,
    SomeKinds,
    AllKinds,
}

impl BusyKinds {
    pub fn new() -> Self {
        Self(watch::channel(Counts::default()).0)
    }

    /// For the event loop of one kind; and whether that kind has a busy closer.
    pub fn flag(&self) -> (ClosingFlag, watch::Receiver<bool>) {
        let (own, seen) = watch::channel(false);
        self.0.send_modify(|counts| counts.all += 1);
        (ClosingFlag { own, all: self.clone() }, seen)
    }

    pub fn load(&self) -> Load {
        match *self.0.borrow() {
            Counts { busy: 0, .. } => Load::Idle,
            Counts { busy, all } if busy < all => Load::SomeKinds,
            Counts { .. } => Load::AllKinds,
        }
    }
}

/// Tells whether closers of one kind are busy.
#[derive(Debug)]
pub(crate) struct ClosingFlag {
    own: watch::Sender<bool>,
    all: BusyKinds,
}

impl ClosingFlag {
    pub fn set(&self, closing: bool) {
        if self.own.send_if_modified(|known| std::mem::replace(known, closing) != closing) {
            self.all.0.send_modify(|counts| if closing { counts.busy += 1 } else { counts.busy -= 1 });
        }
    }
}

/// Without its event loop a kind closes nothing.
impl Drop for ClosingFlag {
    fn drop(&mut self) {
        self.set(false);
        self.all.0.send_modify(|counts| counts.all -= 1);
    }
}

/// Sees whether closers of any kind are busy.
#[derive(Debug, Clone)]
pub(crate) struct GiveWay {
    busy_kinds: watch::Receiver<Counts>,
}

impl GiveWay {
    pub fn to(busy_kinds: &BusyKinds) -> Self {
        Self { busy_kinds: busy_kinds.0.subscribe() }
    }

    /// Resolves at `due` if all closers are idle then, otherwise when they are, at most two seconds later. May be dropped
    /// and called again with the same `due`.
    pub async fn due(&mut self, due: Instant) {
        tokio::time::sleep_until(due).await;
        // Timed out or without an event loop: it is time either way.
        let _ = tokio::time::timeout_at(due + LONGEST_WAIT, self.busy_kinds.wait_for(|counts| counts.busy == 0)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn waits_for_closers_but_not_forever() {
        let busy_kinds = BusyKinds::new();
        let [(closing, _), (other, _)] = [busy_kinds.flag(), busy_kinds.flag()];
        let mut give_way = GiveWay::to(&busy_kinds);
        closing.set(true);
        other.set(true);
        assert_eq!(busy_kinds.load(), Load::AllKinds);
        let due = Instant::now() + Duration::from_secs(3);
        give_way.due(due).await;
        assert_eq!(Instant::now(), due + LONGEST_WAIT);

        let due = Instant::now() + Duration::from_secs(3);
        let idle_at = due + Duration::from_millis(200);
        let idle = async {
            tokio::time::sleep_until(idle_at).await;
            closing.set(false);
            assert_eq!(busy_kinds.load(), Load::SomeKinds);
            drop(other);
            assert_eq!(busy_kinds.load(), Load::Idle);
        };
        tokio::join!(give_way.due(due), idle);
        assert_eq!(Instant::now(), idle_at);

        let due = Instant::now() + Duration::from_secs(3);
        give_way.due(due).await;
        assert_eq!(Instant::now(), due, "nothing to give way to");
    }
}
