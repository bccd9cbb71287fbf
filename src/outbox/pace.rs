//! How many refused messages are retried at a time: a few while they are refused again, more while they are accepted.
//!
//! Pure arithmetic on the time and the results of the retries. When a single message may be retried is in its row. Without
//! this limit, all messages that a full queue has refused would be retried at the same time, and every other queue that is
//! bound to their exchange would get one more copy of each.

use std::time::{Duration, Instant};

/// Retries per second at the start.
const FIRST_RATE: f64 = 10.0;
/// The lowest and the highest rate.
const SLOWEST_RATE: f64 = 1.0;
const FASTEST_RATE: f64 = 5_000.0;
/// Within this time all refused messages are retried, however many there are: some may be for a queue that accepts them.
const LONGEST_TURN: Duration = Duration::from_secs(600);
/// By how much the rate grows with each accepted message, and at most in one round.
const GROWTH: f64 = 1.1;
const MOST_GROWTH: f64 = 2.0;
/// The factor applied to the rate after a round with refusals. Seven accepted messages compensate for one such round, so a
/// slow queue refuses about one retry in eight.
const AFTER_REFUSAL: f64 = 0.5;

/// The pace of one outbox.
#[derive(Debug)]
pub(super) struct Pace {
    /// Retries per second.
    rate: f64,
    /// Retries that are allowed now.
    saved: f64,
    looked: Instant,
    /// Refused messages that wait, as last counted.
    waiting: u64,
}

impl Pace {
    pub fn new(now: Instant) -> Self {
        Self { rate: FIRST_RATE, saved: 1.0, looked: now, waiting: 0 }
    }

    /// How many may be retried now, `limit` at most.
    pub fn allowance(&mut self, most: usize, now: Instant) -> usize {
        let since = now.saturating_duration_since(self.looked).as_secs_f64();
        self.looked = now;
        // At most two rounds are saved up, or a quiet period would end with a burst.
        self.saved = (self.saved + self.rate * since).min((2.0 * self.rate * since).max(1.0));
        (self.saved as usize).min(most)
    }

    /// Records the results of one round.
    pub fn note(&mut self, taken: usize, refused: usize) {
        self.saved = (self.saved - (taken + refused) as f64).max(0.0);
        if refused > 0 {
            self.rate *= AFTER_REFUSAL;
        } else if taken > 0 {
            self.rate *= GROWTH.powf(taken as f64).min(MOST_GROWTH);
        }
        self.keep_within_bounds();
    }

    pub fn note_waiting(&mut self, rows: u64) {
        self.waiting = rows;
        self.keep_within_bounds();
    }

    fn keep_within_bounds(&mut self) {
        let least = (self.waiting as f64 / LONGEST_TURN.as_secs_f64()).clamp(SLOWEST_RATE, FASTEST_RATE);
        self.rate = self.rate.clamp(least, FASTEST_RATE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND: Duration = Duration::from_millis(100);

    /// A queue with a capacity and a rate at which messages leave it.
    struct SlowQueue {
        room: f64,
        length: f64,
        per_second: f64,
    }

    impl SlowQueue {
        fn pass(&mut self, time: Duration) {
            self.room = (self.room + self.per_second * time.as_secs_f64()).min(self.length);
        }

        fn takes(&mut self) -> bool {
            let takes = self.room >= 1.0;
            self.room -= f64::from(u8::from(takes));
            takes
        }
    }

    /// How many of these messages are refused once more, and after how many rounds all were retried.
    fn refused_again(mut queue: SlowQueue, messages: usize) -> (usize, u32) {
        let (mut pace, mut now) = (Pace::new(Instant::now()), Instant::now());
        let (mut tried, mut refused, mut rounds) = (0, 0, 0);
        while tried < messages {
            now += ROUND;
            rounds += 1;
            queue.pass(ROUND);
            let tries = pace.allowance(500, now).min(messages - tried);
            let taken = (0..tries).filter(|_| queue.takes()).count();
            pace.note(taken, tries - taken);
            refused += tries - taken;
            tried += tries;
        }
        (refused, rounds)
    }

    #[test]
    fn slow_queues_refuse_few_retries() {
        for (length, per_second, messages) in [(5.0, 20.0, 395), (1.0, 5.0, 200), (50.0, 200.0, 4_000), (5.0, 1.5, 100)]
        {
            let (refused, rounds) = refused_again(SlowQueue { room: 0.0, length, per_second }, messages);
            assert!(refused * 4 <= messages, "{refused} of {messages} refused by {length} at {per_second}/s");
            let seconds = f64::from(rounds) * ROUND.as_secs_f64();
            let least = messages as f64 / per_second;
            assert!(seconds <= 2.0 * least + 5.0, "{seconds} s for {messages} at {per_second}/s");
        }
    }

    #[test]
    fn a_cured_queue_gets_all_within_seconds() {
        let endless = SlowQueue { room: 1e9, length: 1e9, per_second: 1e9 };
        let (refused, rounds) = refused_again(endless, 100_000);
        assert_eq!(refused, 0);
        assert!(rounds <= 300, "{rounds} rounds");
    }

    #[test]
    fn full_queue_is_tried_once_a_second() {
        let (refused, rounds) = refused_again(SlowQueue { room: 0.0, length: 0.0, per_second: 0.0 }, 100);
        assert_eq!(refused, 100);
        assert!(rounds >= 900, "{rounds} rounds");
    }

    #[test]
    fn many_waiting_messages_all_get_their_turn() {
        let mut pace = Pace::new(Instant::now());
        pace.note_waiting(100_000);
        (0..100).for_each(|_| pace.note(0, 1));
        assert!(pace.rate >= 100_000.0 / LONGEST_TURN.as_secs_f64());
    }
}
