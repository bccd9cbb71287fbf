//! Alarms that come back from the broker before their time, again and again: held back here and armed a few at a time, so
//! that a policy on our queues does not have all of them go round as fast as the broker can. And what the broker says of
//! messages that it took out of the inbox or the processing queue by itself.
//!
//! Pure, like the whole engine. Each alarm that waits here is still unacknowledged, and leaves in time for its deadline.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::Policy;
use crate::alarm::{Death, DeathReason, DeliveredAlarm, Receipt};
use crate::order::Timestamp;

/// How long before its time an alarm must come back to count as early: clocks that agree differ by less.
const EARLY: Duration = Duration::from_millis(500);
/// So many early returns in a row are let pass: the first may be a clock that was set back.
const EARLY_RETURNS_LET_PASS: u32 = 1;
/// How often some are armed.
const EVERY: Duration = Duration::from_millis(200);
/// While none came back early for so long, twice as many are armed each time.
const QUIET: Duration = Duration::from_secs(2);
/// The most that are armed at a time.
const MOST_AT_ONCE: usize = 1_024;
/// The longest that one waits here: well below the broker's consumer_timeout.
const LONGEST_WAIT: Duration = Duration::from_secs(600);
/// How long something counts as going on after it was last seen, if it is seen often.
const SEEN_RECENTLY: Duration = Duration::from_secs(8);
/// What is seen less often than this is not taken for one thing that goes on.
const LONGEST_GAP: Duration = Duration::from_secs(300);

/// An alarm that waits to be armed.
#[derive(Debug)]
struct Waiting {
    alarm: DeliveredAlarm,
    receipt: Receipt,
    leaves_at: Timestamp,
}

/// Something that is seen again and again while it goes on.
#[derive(Debug, Default)]
struct Sightings {
    last: Option<Timestamp>,
    /// The longest time between two, so that what is seen seldom is not said to be over each time.
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

    fn go_on(&self, now: Timestamp) -> bool {
        self.last.is_some_and(|last| now.since(last) < SEEN_RECENTLY.max(2 * self.longest_gap))
    }

    fn clock_was_set_back(&mut self, now: Timestamp) {
        self.last = self.last.map(|last| now.min(last));
    }
}

/// The alarms that are held back, and what was seen of their kind.
#[derive(Debug)]
pub(super) struct Circulation {
    /// In the order in which they came.
    waiting: BTreeMap<u64, Waiting>,
    by_leaving: BTreeSet<(Timestamp, u64)>,
    arrivals: u64,
    arms_next_at: Timestamp,
    at_once: usize,
    early_returns: Sightings,
    /// The last of those: how much too early, and by which death.
    last_early: Option<(Duration, Option<Death>)>,
    policies: Sightings,
    last_policy: String,
    /// Early returns so far.
    counted: u64,
}

impl Default for Circulation {
    fn default() -> Self {
        Self {
            waiting: BTreeMap::new(),
            by_leaving: BTreeSet::new(),
            arrivals: 0,
            arms_next_at: Timestamp::from_unix_micros(0),
            at_once: 1,
            early_returns: Sightings::default(),
            last_early: None,
            policies: Sightings::default(),
            last_policy: String::new(),
            counted: 0,
        }
    }
}

/// Whether an alarm has come back early too often to be armed at once.
pub(super) fn circulates(alarm: &DeliveredAlarm) -> bool {
    alarm.returns.early > EARLY_RETURNS_LET_PASS
}

impl Circulation {
    /// An alarm has come out of the broker: counts whether it was early.
    pub fn note_return(&mut self, alarm: &mut DeliveredAlarm, death: Option<&Death>, now: Timestamp) {
        match alarm.returns.due_at.take() {
            Some(due_at) if now + EARLY < due_at => self.note_early(alarm, due_at.since(now), death, now),
            Some(_) => alarm.returns.early = 0,
            // It was not to wait, so it can say nothing new.
            None => {}
        }
    }

    fn note_early(&mut self, alarm: &mut DeliveredAlarm, by: Duration, death: Option<&Death>, now: Timestamp) {
        alarm.returns.early = alarm.returns.early.saturating_add(1);
        self.counted += 1;
        if circulates(alarm) {
            self.early_returns.note(now);
            self.last_early = Some((by, death.cloned()));
        }
    }

    /// The broker took an alarm out of the inbox or the processing queue by itself, and it is not to be parked for that.
    pub fn note_rescued(&mut self, alarm: &mut DeliveredAlarm, early_before: u32, death: &Death, now: Timestamp) {
        if alarm.returns.early <= early_before {
            alarm.returns.early = early_before.saturating_add(1);
        }
        self.note_policy(death, now);
    }

    /// The broker took a message out of the inbox or the processing queue by itself.
    pub fn note_policy(&mut self, death: &Death, now: Timestamp) {
        self.policies.note(now);
        self.last_policy = given_up(death);
    }

    /// Holds an alarm back. Where there is no room for more, the one that waits longest is handed out at once.
    pub fn hold_back(
        &mut self,
        alarm: DeliveredAlarm,
        receipt: Receipt,
        policy: &Policy,
        now: Timestamp,
    ) -> Option<(DeliveredAlarm, Receipt)> {
        let leaves_at = (alarm.deadline() - policy.hold_max).min(now + LONGEST_WAIT);
        self.arrivals += 1;
        self.by_leaving.insert((leaves_at, self.arrivals));
        self.waiting.insert(self.arrivals, Waiting { alarm, receipt, leaves_at });
        if self.waiting.len() > policy.held_back_most { self.take_oldest() } else { None }
    }

    fn take_oldest(&mut self) -> Option<(DeliveredAlarm, Receipt)> {
        let (number, Waiting { alarm, receipt, leaves_at }) = self.waiting.pop_first()?;
        self.by_leaving.remove(&(leaves_at, number));
        Some((alarm, receipt))
    }

    /// Those that are to be armed now.
    pub fn take_ready(&mut self, now: Timestamp) -> Vec<(DeliveredAlarm, Receipt)> {
        if self.waiting.is_empty() || now < self.arms_next_at {
            return Vec::new();
        }
        self.arms_next_at = now + EVERY;
        let is_quiet = self.early_returns.last.is_none_or(|last| now.since(last) >= QUIET);
        self.at_once = if is_quiet { (2 * self.at_once).min(MOST_AT_ONCE) } else { 1 };
        (0..self.at_once).map_while(|_| self.take_oldest()).collect()
    }

    /// Those whose deadline is near, or that have waited for as long as any may.
    pub fn take_leaving(&mut self, now: Timestamp) -> Vec<(DeliveredAlarm, Receipt)> {
        let mut leaving = Vec::new();
        while let Some((_, number)) = self.by_leaving.first().copied().filter(|(leaves_at, _)| *leaves_at <= now) {
            self.by_leaving.pop_first();
            leaving.extend(self.waiting.remove(&number).map(|waiting| (waiting.alarm, waiting.receipt)));
        }
        leaving
    }

    pub fn ready_at(&self) -> Option<Timestamp> {
        let leaves_at = self.by_leaving.first().map(|(leaves_at, _)| *leaves_at)?;
        Some(leaves_at.min(self.arms_next_at))
    }

    /// How many are held back.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// How many early returns there were so far.
    pub fn counted(&self) -> u64 {
        self.counted
    }

    /// Those of a session that has ended are delivered again.
    pub fn keep_from(&mut self, session: u64) {
        let by_leaving = &mut self.by_leaving;
        self.waiting.retain(|number, waiting| {
            let stays = waiting.receipt.session >= session;
            if !stays {
                by_leaving.remove(&(waiting.leaves_at, *number));
            }
            stays
        });
    }

    pub fn drain(&mut self) -> Vec<Receipt> {
        self.by_leaving.clear();
        std::mem::take(&mut self.waiting).into_values().map(|waiting| waiting.receipt).collect()
    }

    /// No wait becomes longer by it. What seems to come back early now is let pass the first time.
    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        self.arms_next_at = now.min(self.arms_next_at);
        self.early_returns.clock_was_set_back(now);
        self.policies.clock_was_set_back(now);
        self.by_leaving.clear();
        for (number, waiting) in &mut self.waiting {
            waiting.leaves_at = waiting.leaves_at.min(now + LONGEST_WAIT);
            self.by_leaving.insert((waiting.leaves_at, *number));
        }
    }

    /// Why alarms go round, if they do.
    pub fn why_alarms_circulate(&self, now: Timestamp) -> Option<String> {
        if self.waiting.is_empty() && !self.early_returns.go_on(now) {
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

    /// What the broker does with messages of the inbox and the processing queue that it should not, if it does.
    pub fn why_broker_policy(&self, now: Timestamp) -> Option<&str> {
        self.policies.go_on(now).then_some(self.last_policy.as_str())
    }
}

/// What it means that the broker took a message out of the inbox or the processing queue.
pub(super) fn given_up(death: &Death) -> String {
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
