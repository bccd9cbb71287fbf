//! Settlements on their way to the broker: together, and not while orders wait to be closed.
//!
//! Says when; nobody waits for a settlement, and what is not settled in time is only delivered again. Writing them is
//! the session's.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};

use crate::alarm::{Receipt, Settlement};

/// Settlements go out together, so often: each journey costs worker and broker as much as a hundred at once. As many as
/// fall due in this time are redelivered more if the worker is killed, and found closed.
const EVERY: Duration = Duration::from_millis(20);
/// How long they wait for closers that have work in hand.
const LONGEST_WAY: Duration = Duration::from_millis(500);

pub(super) struct Settling {
    from: mpsc::UnboundedReceiver<Vec<(Receipt, Settlement)>>,
    closing: watch::Receiver<bool>,
    waiting: Vec<(Receipt, Settlement)>,
    next_at: Instant,
}

impl Settling {
    pub fn new(from: mpsc::UnboundedReceiver<Vec<(Receipt, Settlement)>>, closing: watch::Receiver<bool>) -> Self {
        Self { from, closing, waiting: Vec::new(), next_at: Instant::now() }
    }

    /// Until there are settlements and it is time for them. `cannot_wait` says whose are wanted even by a broker that would
    /// rather leave the machine to closers. Loses nothing if it is dropped.
    pub async fn due(&mut self, cannot_wait: impl Fn(&Receipt) -> bool) {
        sleep_until(self.next_at).await;
        if self.waiting.is_empty() {
            match self.from.recv().await {
                Some(settlements) => self.waiting.extend(settlements),
                // The floor is gone, and there will be none.
                None => std::future::pending().await,
            }
        }
        self.take_in();
        while self.gives_way(&cannot_wait, Instant::now()) {
            let closers_rest = self.closing.wait_for(|closing| !closing);
            let _ = timeout(EVERY, closers_rest).await;
            self.take_in();
        }
    }

    fn gives_way(&self, cannot_wait: impl Fn(&Receipt) -> bool, now: Instant) -> bool {
        // With the floor gone nobody says when closers rest.
        let floor_is_there = self.closing.has_changed().is_ok();
        (floor_is_there && *self.closing.borrow())
            && now < self.next_at + LONGEST_WAY
            && !self.waiting.iter().any(|(receipt, _)| cannot_wait(receipt))
    }

    /// All there are, due or not.
    pub fn take(&mut self) -> Vec<(Receipt, Settlement)> {
        self.take_in();
        self.next_at = Instant::now() + EVERY;
        std::mem::take(&mut self.waiting)
    }

    fn take_in(&mut self) {
        while let Ok(settlements) = self.from.try_recv() {
            self.waiting.extend(settlements);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALARM: Receipt = Receipt { session: 1, channel: 0, tag: 1 };
    const OF_INBOX: Receipt = Receipt { session: 1, channel: 1, tag: 1 };

    fn of_inbox(receipt: &Receipt) -> bool {
        *receipt == OF_INBOX
    }

    fn acks(receipts: &[Receipt]) -> Vec<(Receipt, Settlement)> {
        receipts.iter().map(|receipt| (*receipt, Settlement::Ack)).collect()
    }

    #[tokio::test]
    async fn settlements_give_way_to_closing_but_not_for_ever_and_those_of_the_inbox_never() {
        let (_sender, from) = mpsc::unbounded_channel();
        let (closing, seen) = watch::channel(true);
        let mut settling = Settling::new(from, seen);
        let begin = settling.next_at;
        settling.waiting = acks(&[ALARM]);
        assert!(settling.gives_way(of_inbox, begin));
        assert!(settling.gives_way(of_inbox, begin + LONGEST_WAY - EVERY));
        assert!(!settling.gives_way(of_inbox, begin + LONGEST_WAY));
        settling.waiting = acks(&[ALARM, OF_INBOX]);
        assert!(!settling.gives_way(of_inbox, begin));
        settling.waiting = acks(&[ALARM]);
        closing.send_replace(false);
        assert!(!settling.gives_way(of_inbox, begin));
        closing.send_replace(true);
        drop(closing);
        assert!(!settling.gives_way(of_inbox, begin));
    }

    #[tokio::test]
    async fn what_waits_when_waiting_is_given_up_is_not_lost() {
        let (sender, from) = mpsc::unbounded_channel();
        let (closing, seen) = watch::channel(true);
        let mut settling = Settling::new(from, seen);
        sender.send(acks(&[ALARM])).unwrap();
        tokio::select! {
            biased;
            () = settling.due(of_inbox) => panic!("closers are at work"),
            () = std::future::ready(()) => {}
        }
        sender.send(acks(&[OF_INBOX])).unwrap();
        closing.send_replace(false);
        settling.due(of_inbox).await;
        assert_eq!(settling.take(), acks(&[ALARM, OF_INBOX]));
    }
}
