//! Limits how fast alarms are rearmed that the broker returns early again and again: a token bucket, so that a policy on our
//! queues does not make all of them circulate as fast as the broker can. Also says what a dead letter's reason means.
//!
//! Pure, like the whole engine. An alarm that has no token yet is held, still unacknowledged, and leaves the hold in time for
//! its deadline.

use std::time::Duration;

use crate::alarm::{Death, DeathReason, DeliveredAlarm};
use crate::order::Timestamp;

/// How long before its time an alarm must come back to count as early: clocks that agree differ by less.
const EARLY_BY: Duration = Duration::from_millis(500);
/// How many early returns in a row are ignored: the first may be due to a clock that was set back.
const IGNORED_EARLY_RETURNS: u32 = 1;
/// One token in this time. An alarm of a coarse ring is published twice for it, because it comes back through the inbox.
const TOKEN_EVERY: Duration = Duration::from_millis(200);
/// Tokens that are saved up at most.
const BURST: u32 = 10;
/// The longest wait for a token: well below the broker's consumer_timeout.
const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// Whether an alarm has come back early too often to be rearmed without a token.
pub(super) fn circulates(alarm: &DeliveredAlarm) -> bool {
    alarm.returns.early > IGNORED_EARLY_RETURNS
}

/// The token bucket, and how often the broker was early.
#[derive(Debug)]
pub(super) struct Circulation {
    /// When the bucket will have every token that was promised.
    paid_until: Timestamp,
    early_return_count: u64,
}

impl Default for Circulation {
    fn default() -> Self {
        Self { paid_until: Timestamp::from_unix_micros(0), early_return_count: 0 }
    }
}

impl Circulation {
    /// Notes in an alarm whether the broker has delivered it early, if it was to wait at all.
    pub fn note_return(&mut self, alarm: &mut DeliveredAlarm, now: Timestamp) {
        match alarm.returns.due_at.take() {
            Some(due_at) if now + EARLY_BY < due_at => {
                alarm.returns.early = alarm.returns.early.saturating_add(1);
                self.early_return_count += 1;
            }
            Some(_) => alarm.returns.early = 0,
            None => {}
        }
    }

    /// Takes a token; returns when it can be used.
    pub fn take_token(&mut self, now: Timestamp) -> Timestamp {
        let promised_until = self.paid_until.max(now - TOKEN_EVERY * BURST) + TOKEN_EVERY;
        self.paid_until = promised_until.min(now + LONGEST_WAIT);
        self.paid_until.max(now)
    }

    /// How many early returns there were so far.
    pub fn early_return_count(&self) -> u64 {
        self.early_return_count
    }

    /// No wait becomes longer.
    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        self.paid_until = self.paid_until.min(now);
    }

    /// Why alarms circulate; `None` while no token is waited for.
    pub fn reason(&self, now: Timestamp) -> Option<&'static str> {
        (self.paid_until > now).then_some(
            "alarms come back from the broker before their time, faster than they are written again: a policy with message-ttl, or with max-length and overflow drop-head, matches delay queues, or a consumer that is not a worker takes from them; `order-timeout doctor --management URL` finds it; leave our queues out of it",
        )
    }
}

/// What it means that the broker took a message out of the inbox or the processing queue.
pub(super) fn explain_death(death: &Death) -> String {
    let queue = &death.queue;
    match death.reason {
        DeathReason::Expired => format!(
            "a message expired in {queue} before a worker took it: a policy with message-ttl matches that queue, or its publisher has set expiration, which only a lane may have; alarms among such messages are taken up again"
        ),
        DeathReason::MaxLength => format!(
            "a message was dropped from {queue} because the queue was full: a policy with max-length or max-length-bytes and overflow drop-head matches it; leave our queues out of it; alarms among such messages are taken up again"
        ),
        DeathReason::DeliveryLimit => format!(
            "the delivery limit of {queue} was reached: a policy with delivery-limit matches it (ours allow a million), or every worker that takes the message crashes; look at the workers' logs around its deliveries, then retry it"
        ),
        DeathReason::Rejected => format!(
            "a consumer that is not a worker rejected it, so that it was dead-lettered out of {queue}; find that consumer, then retry it"
        ),
    }
}
