//! Alarms that the broker returns early again and again: they are held back here and rearmed a few at a time, so that a
//! policy on our queues does not make all of them circulate as fast as the broker can. Also records which messages the
//! broker itself took out of the inbox or the processing queue.
//!
//! Pure, like the whole engine. Each alarm that waits here is still unacknowledged, and leaves in time for its
//! deadline.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::Policy;
use crate::alarm::{Death, DeathReason, DeliveredAlarm, Receipt};
use crate::order::Timestamp;

/// How long before its time an alarm must come back to count as early: clocks that agree differ by less.
const EARLY_BY: Duration = Duration::from_millis(500);
/// How many early returns in a row are ignored: the first may be due to a clock that was set back.
const IGNORED_EARLY_RETURNS: u32 = 1;
/// How often some alarms are rearmed.
const REARM_INTERVAL: Duration = Duration::from_millis(200);
/// After this long without an early return, twice as many are rearmed each time.
const QUIET_PERIOD: Duration = Duration::from_secs(2);
/// The most that are rearmed at a time.
const MAX_AT_ONCE: usize = 1_024;
/// The longest wait here: well below the broker's consumer_timeout.
const LONGEST_WAIT: Duration = Duration::from_secs(600);
/// How long a condition counts as going on after it was last seen, if it is seen often.
const SEEN_RECENTLY: Duration = Duration::from_secs(8);
/// Sightings further apart than this are not taken for one condition that goes on.
const LONGEST_GAP: Duration = Duration::from_secs(300);

/// An alarm that waits to be rearmed.
#[derive(Debug)]
struct Waiting {
    alarm: DeliveredAlarm,
    receipt: Receipt,
    leaves_at: Timestamp,
}

/// A condition that is seen again and again while it goes on.
#[derive(Debug, Default)]
struct Sightings {
    last: Option<Timestamp>,
    /// The longest time between two sightings, so that a rare condition is not reported as over after each one.
    longest_gap: Duration,
}

impl Sightings {
    fn note(&mut self, now: Timestamp) {
        if let Some(last) = self.last {
            let gap = now.since(last);
            self.longest_gap = if gap > LONGEST_GAP { Duration::ZERO } else { self.longest_gap.max(gap) };
        }
        self.last = Some(now);
    }

    fn is_current(&self, now: Timestamp) -> bool {
        self.last.is_some_and(|last| now.since(last) < SEEN_RECENTLY.max(2 * self.longest_gap))
    }

    fn clock_was_set_back(&mut self, now: Timestamp) {
        self.last = self.last.map(|last| now.min(last));
    }
}

/// The alarms that are held back, and what was seen of early returns and policies.
#[derive(Debug)]
pub(super) struct Circulation {
    /// In order of arrival.
    waiting: BTreeMap<u64, Waiting>,
    by_leave_time: BTreeSet<(Timestamp, u64)>,
    arrivals: u64,
    next_rearm_at: Timestamp,
    at_once: usize,
    early_returns: Sightings,
    /// The last early return: by how much, and after which death.
    last_early: Option<(Duration, Option<Death>)>,
    policies: Sightings,
    last_policy: String,
    /// Early returns so far.
    early_return_count: u64,
}

impl Default for Circulation {
    fn default() -> Self {
        Self {
            waiting: BTreeMap::new(),
            by_leave_time: BTreeSet::new(),
            arrivals: 0,
            next_rearm_at: Timestamp::from_unix_micros(0),
            at_once: 1,
            early_returns: Sightings::default(),
            last_early: None,
            policies: Sightings::default(),
            last_policy: String::new(),
            early_return_count: 0,
        }
    }
}

/// Whether an alarm has come back early too often to be rearmed at once.
pub(super) fn circulates(alarm: &DeliveredAlarm) -> bool {
    alarm.returns.early > IGNORED_EARLY_RETURNS
}

impl Circulation {
    /// Records that the broker delivered an alarm, and counts it if it was early.
    pub fn note_return(&mut self, alarm: &mut DeliveredAlarm, death: Option<&Death>, now: Timestamp) {
        match alarm.returns.due_at.take() {
            Some(due_at) if now + EARLY_BY < due_at => self.note_early(alarm, due_at.since(now), death, now),
            Some(_) => alarm.returns.early = 0,
            // It was not to wait, so it cannot be early.
            None => {}
        }
    }

    fn note_early(&mut self, alarm: &mut DeliveredAlarm, by: Duration, death: Option<&Death>, now: Timestamp) {
        alarm.returns.early = alarm.returns.early.saturating_add(1);
        self.early_return_count += 1;
        if circulates(alarm) {
            self.early_returns.note(now);
            self.last_early = Some((by, death.cloned()));
        }
    }

    /// Records that the broker itself took an alarm out of the inbox or the processing queue, and that it is not parked
    /// for that.
    pub fn note_rescued(&mut self, alarm: &mut DeliveredAlarm, early_before: u32, death: &Death, now: Timestamp) {
        if alarm.returns.early <= early_before {
            alarm.returns.early = early_before.saturating_add(1);
        }
        self.note_policy(death, now);
    }

    /// Records that the broker itself took a message out of the inbox or the processing queue.
    pub fn note_policy(&mut self, death: &Death, now: Timestamp) {
        self.policies.note(now);
        self.last_policy = explain_death(death);
    }

    /// Holds an alarm back. If there is no room for more, returns the one that has waited longest.
    pub fn hold_back(
        &mut self,
        alarm: DeliveredAlarm,
        receipt: Receipt,
        policy: &Policy,
        now: Timestamp,
    ) -> Option<(DeliveredAlarm, Receipt)> {
        let leaves_at = (alarm.deadline() - policy.hold_max).min(now + LONGEST_WAIT);
        self.arrivals += 1;
        self.by_leave_time.insert((leaves_at, self.arrivals));
        self.waiting.insert(self.arrivals, Waiting { alarm, receipt, leaves_at });
        if self.waiting.len() > policy.held_back_max { self.take_oldest() } else { None }
    }

    fn take_oldest(&mut self) -> Option<(DeliveredAlarm, Receipt)> {
        let (number, Waiting { alarm, receipt, leaves_at }) = self.waiting.pop_first()?;
        self.by_leave_time.remove(&(leaves_at, number));
        Some((alarm, receipt))
    }

    /// Takes out the alarms that are to be rearmed now.
    pub fn take_ready(&mut self, now: Timestamp) -> Vec<(DeliveredAlarm, Receipt)> {
        if self.waiting.is_empty() || now < self.next_rearm_at {
            return Vec::new();
        }
        self.next_rearm_at = now + REARM_INTERVAL;
        let is_quiet = self.early_returns.last.is_none_or(|last| now.since(last) >= QUIET_PERIOD);
        self.at_once = if is_quiet { (2 * self.at_once).min(MAX_AT_ONCE) } else { 1 };
        (0..self.at_once).map_while(|_| self.take_oldest()).collect()
    }

    /// Takes out the alarms whose deadline is near, or that have waited as long as allowed.
    pub fn take_leaving(&mut self, now: Timestamp) -> Vec<(DeliveredAlarm, Receipt)> {
        let mut leaving = Vec::new();
        while let Some((_, number)) = self.by_leave_time.first().copied().filter(|(leaves_at, _)| *leaves_at <= now) {
            self.by_leave_time.pop_first();
            leaving.extend(self.waiting.remove(&number).map(|waiting| (waiting.alarm, waiting.receipt)));
        }
        leaving
    }

    pub fn ready_at(&self) -> Option<Timestamp> {
        let leaves_at = self.by_leave_time.first().map(|(leaves_at, _)| *leaves_at)?;
        Some(leaves_at.min(self.next_rearm_at))
    }

    /// How many alarms are held back.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// How many early returns there were so far.
    pub fn early_return_count(&self) -> u64 {
        self.early_return_count
    }

    /// Drops the alarms of earlier sessions; the broker redelivers them.
    pub fn keep_from(&mut self, session: u64) {
        let by_leave_time = &mut self.by_leave_time;
        self.waiting.retain(|number, waiting| {
            let stays = waiting.receipt.session >= session;
            if !stays {
                by_leave_time.remove(&(waiting.leaves_at, *number));
            }
            stays
        });
    }

    pub fn drain(&mut self) -> Vec<Receipt> {
        self.by_leave_time.clear();
        std::mem::take(&mut self.waiting).into_values().map(|waiting| waiting.receipt).collect()
    }

    /// No wait becomes longer. The first early return that the change may cause is ignored anyway.
    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        self.next_rearm_at = now.min(self.next_rearm_at);
        self.early_returns.clock_was_set_back(now);
        self.policies.clock_was_set_back(now);
        self.by_leave_time.clear();
        for (number, waiting) in &mut self.waiting {
            waiting.leaves_at = waiting.leaves_at.min(now + LONGEST_WAIT);
            self.by_leave_time.insert((waiting.leaves_at, *number));
        }
    }

    /// Why alarms circulate; `None` if they do not.
    pub fn circulation_reason(&self, now: Timestamp) -> Option<String> {
        if self.waiting.is_empty() && !self.early_returns.is_current(now) {
            return None;
        }
        let (by, death) = self.last_early.as_ref()?;
        let (held_back, by_s) = (self.waiting.len(), by.as_secs_f64());
        let queue = death.as_ref().map_or("a delay queue", |death| death.queue.as_str());
        let likely = match death.as_ref().map(|death| death.reason) {
            Some(DeathReason::Expired) => "a policy with message-ttl matches it",
            Some(DeathReason::MaxLength) => {
                "a policy with max-length or max-length-bytes and overflow drop-head matches it"
            }
            Some(DeathReason::DeliveryLimit | DeathReason::Rejected) => "a consumer that is not a worker takes from it",
            None => "a policy or a consumer that is not a worker takes from it",
        };
        Some(format!(
            "alarms come back from the broker before their time, the last one {by_s:.1} s too early out of {queue}: {likely}; {held_back} are held back in this worker, and a few are tried again each second; find it with `rabbitmqctl list_policies` and leave our queues out of it"
        ))
    }

    /// Which broker policy or consumer takes messages out of the inbox and the processing queue; `None` if none does.
    pub fn broker_policy_reason(&self, now: Timestamp) -> Option<&str> {
        self.policies.is_current(now).then_some(self.last_policy.as_str())
    }
}

/// What it means that the broker took a message out of the inbox or the processing queue.
pub(super) fn explain_death(death: &Death) -> String {
    let queue = &death.queue;
    match death.reason {
        DeathReason::Expired => format!(
            "a message expired in {queue} before a worker took it: a policy with message-ttl matches that queue (rabbitmqctl list_policies), or its publisher has set expiration, which only a lane may have; alarms among such messages are taken up again"
        ),
        DeathReason::MaxLength => format!(
            "a message was dropped from {queue} because the queue was full: a policy with max-length or max-length-bytes and overflow drop-head matches it (rabbitmqctl list_policies); leave our queues out of it; alarms among such messages are taken up again"
        ),
        DeathReason::DeliveryLimit => format!(
            "the delivery limit of {queue} was reached: a policy with delivery-limit matches it (rabbitmqctl list_policies; ours allow a million), or every worker that takes the message crashes; look at the workers' logs around its deliveries, then retry it"
        ),
        DeathReason::Rejected => format!(
            "a consumer that is not a worker rejected it, so that it was dead-lettered out of {queue}; find that consumer with `rabbitmqctl list_consumers`, then retry it"
        ),
    }
}
