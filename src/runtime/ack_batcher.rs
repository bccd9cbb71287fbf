//! Batches settlements on their way to the broker, and defers them while orders wait to be closed.
//!
//! Decides which and when; the session writes them. A delivery that is not settled in time is only redelivered, so a
//! settlement is urgent only for the deliveries behind it in the prefetch window.

use std::collections::HashMap;
use std::time::Duration;

use order_timeout_core::alarm::{Receipt, Settlement};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};

/// Settlements go out together, so often: each journey costs worker and broker as much as a hundred at once.
const EVERY: Duration = Duration::from_millis(20);
/// How long they give way to closers that have work in hand: a burst of 100 000 on a slow day. What is done in this time is
/// delivered again if the worker is killed, and found closed, or armed as it was.
const MAX_DEFERRAL: Duration = Duration::from_secs(5);

/// A delivery, and how it is settled.
type Settled = (Receipt, Settlement);

pub(super) struct AckBatcher {
    from: mpsc::UnboundedReceiver<Vec<Settled>>,
    closing: watch::Receiver<bool>,
    /// So many of one channel give way at most: nine in ten of those that the broker may have delivered on it, so that it
    /// can go on delivering.
    most: usize,
    waiting: Vec<Settled>,
    /// How many of them are of each channel: counted, for in a burst they are many.
    waiting_by_channel: HashMap<u8, usize>,
    waiting_since: Instant,
    next_at: Instant,
}

impl AckBatcher {
    /// `prefetch`: of each channel.
    pub fn new(from: mpsc::UnboundedReceiver<Vec<Settled>>, closing: watch::Receiver<bool>, prefetch: usize) -> Self {
        let now = Instant::now();
        Self {
            from,
            closing,
            most: prefetch * 9 / 10,
            waiting: Vec::new(),
            waiting_by_channel: HashMap::new(),
            waiting_since: now,
            next_at: now,
        }
    }

    /// Resolves with the next settlements when they are due. Cancel-safe. `may_defer` says which acknowledgements may wait
    /// while closers are busy.
    pub async fn next(&mut self, may_defer: impl Fn(Receipt) -> bool) -> Vec<Settled> {
        sleep_until(self.next_at).await;
        // Those before `checked` are deferred. In a burst they are many, and checking them every 20 ms would take the
        // closers' time.
        let mut checked = self.waiting.len();
        if self.waiting.is_empty() {
            match self.from.recv().await {
                Some(settlements) => self.take_in(settlements),
                // The event loop has ended, so there will be none.
                None => std::future::pending().await,
            }
        }
        loop {
            self.take_in_all();
            let now = Instant::now();
            // Another worker may need a requeued alarm at once. A requeue alone would be slow: for each of them RabbitMQ walks over
            // all earlier unsettled deliveries of its channel (rabbit_channel.erl, `collect_acks`).
            let is_requeue = |(_, settlement): &Settled| *settlement == Settlement::Requeue;
            if !self.defers(now) || self.waiting[checked..].iter().any(is_requeue) {
                return self.take();
            }
            let urgent: Vec<Settled> =
                self.waiting.extract_if(checked.., |(receipt, _)| !may_defer(*receipt)).collect();
            if !urgent.is_empty() {
                for (receipt, _) in &urgent {
                    *self.waiting_by_channel.entry(receipt.channel).or_default() -= 1;
                }
                self.next_at = now + EVERY;
                return urgent;
            }
            checked = self.waiting.len();
            let closers_rest = self.closing.wait_for(|closing| !closing);
            let _ = timeout(EVERY, closers_rest).await;
        }
    }

    /// All settlements, due or not.
    pub fn take(&mut self) -> Vec<Settled> {
        self.take_in_all();
        self.next_at = Instant::now() + EVERY;
        self.waiting_by_channel.clear();
        std::mem::take(&mut self.waiting)
    }

    fn defers(&self, now: Instant) -> bool {
        // Without the event loop there is no report of idle closers.
        let loop_is_running = self.closing.has_changed().is_ok();
        let closing = loop_is_running && *self.closing.borrow();
        let within_limits = self.waiting_by_channel.values().all(|count| *count <= self.most);
        closing && now < self.waiting_since + MAX_DEFERRAL && within_limits
    }

    fn take_in_all(&mut self) {
        while let Ok(settlements) = self.from.try_recv() {
            self.take_in(settlements);
        }
    }

    fn take_in(&mut self, settlements: Vec<Settled>) {
        if self.waiting.is_empty() {
            self.waiting_since = Instant::now();
        }
        for (receipt, _) in &settlements {
            *self.waiting_by_channel.entry(receipt.channel).or_default() += 1;
        }
        self.waiting.extend(settlements);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFETCH: usize = 3;

    fn ack(tag: u64) -> Settled {
        ack_on(0, tag)
    }

    fn ack_on(channel: u8, tag: u64) -> Settled {
        (Receipt { session: 1, channel, tag }, Settlement::Ack)
    }

    fn requeue(tag: u64) -> Settled {
        (Receipt { session: 1, channel: 0, tag }, Settlement::Requeue)
    }

    fn is_odd(receipt: Receipt) -> bool {
        receipt.tag % 2 == 1
    }

    struct EventLoop {
        settlements: mpsc::UnboundedSender<Vec<Settled>>,
        closing: watch::Sender<bool>,
    }

    fn while_closing() -> (EventLoop, AckBatcher) {
        let (settlements, from) = mpsc::unbounded_channel();
        let (closing, seen) = watch::channel(true);
        (EventLoop { settlements, closing }, AckBatcher::new(from, seen, PREFETCH))
    }

    #[test]
    fn deferred_settlements_are_bounded() {
        let (event_loop, mut ack_batcher) = while_closing();
        ack_batcher.take_in(vec![ack(1), ack(2)]);
        let begin = ack_batcher.waiting_since;
        assert!(ack_batcher.defers(begin + MAX_DEFERRAL - EVERY));
        assert!(!ack_batcher.defers(begin + MAX_DEFERRAL));
        event_loop.closing.send_replace(false);
        assert!(!ack_batcher.defers(begin), "closers rest");
        event_loop.closing.send_replace(true);
        assert!(ack_batcher.defers(begin));
        ack_batcher.take_in(vec![ack_on(1, 1), ack_on(1, 2)]);
        assert!(ack_batcher.defers(begin), "of each channel some may be delivered");
        ack_batcher.take_in(vec![ack(3)]);
        assert!(!ack_batcher.defers(begin), "hardly any may be delivered on the first channel");
        ack_batcher.take();
        ack_batcher.take_in(vec![ack(4), ack(5)]);
        assert!(ack_batcher.defers(begin), "what was settled counts no more");
        drop(event_loop);
        assert!(!ack_batcher.defers(begin), "the event loop has ended");
    }

    #[tokio::test]
    async fn settled_deliveries_are_not_counted() {
        let (event_loop, mut ack_batcher) = while_closing();
        event_loop.settlements.send(vec![ack(1), ack(2), ack(4)]).unwrap();
        assert_eq!(ack_batcher.next(|receipt| receipt.tag == 1).await, [ack(1), ack(2), ack(4)], "three are too many");
        event_loop.settlements.send(vec![ack(5), ack(6)]).unwrap();
        assert_eq!(ack_batcher.next(is_odd).await, [ack(6)]);
        ack_batcher.take_in(vec![ack(7)]);
        assert!(ack_batcher.defers(ack_batcher.waiting_since));
    }

    #[tokio::test]
    async fn urgent_settlement_is_sent_alone() {
        let (event_loop, mut ack_batcher) = while_closing();
        event_loop.settlements.send(vec![ack(1), ack(2)]).unwrap();
        assert_eq!(ack_batcher.next(is_odd).await, [ack(2)]);
        event_loop.closing.send_replace(false);
        assert_eq!(ack_batcher.next(is_odd).await, [ack(1)]);
    }

    #[tokio::test]
    async fn requeues_are_sent_immediately() {
        let (event_loop, mut ack_batcher) = while_closing();
        event_loop.settlements.send(vec![ack(1), requeue(3)]).unwrap();
        assert_eq!(ack_batcher.next(is_odd).await, [ack(1), requeue(3)]);
    }

    #[tokio::test]
    async fn cancelled_wait_loses_no_settlement() {
        let (event_loop, mut ack_batcher) = while_closing();
        event_loop.settlements.send(vec![ack(1)]).unwrap();
        assert!(timeout(3 * EVERY, ack_batcher.next(is_odd)).await.is_err());
        assert_eq!(ack_batcher.waiting, [ack(1)]);
        event_loop.settlements.send(vec![ack(3)]).unwrap();
        event_loop.closing.send_replace(false);
        assert_eq!(ack_batcher.next(is_odd).await, [ack(1), ack(3)]);
    }
}
