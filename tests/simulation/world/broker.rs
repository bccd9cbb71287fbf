//! The broker's side of the world: queues, slots that release their head, sessions, and redelivery.

use std::time::Duration;

use order_timeout_core::alarm::{DeliveredAlarm, Rearm, Receipt, Settlement, SourceQueue, Wanted};
use order_timeout_core::delay::Placement;
use order_timeout_core::delay::testing::index_of;
use order_timeout_core::order::Timestamp;

use super::worker::WORKERS;
use super::{Mutant, World, policy};
use crate::events::Event;

/// How many times `retry.longest` a retry waits at most (`RetrySettings::longest_wait`).
const DOUBLINGS: u32 = 32;

/// An alarm in a slot.
#[derive(Debug, Clone)]
pub struct Waiting {
    pub alarm: DeliveredAlarm,
    pub fires_at: Timestamp,
    /// It waits after a failure.
    pub is_retry: bool,
}

impl World {
    /// Lets time pass and slots release their heads.
    pub fn advance(&mut self, by: Duration) {
        self.now = self.now + by;
        if self.broker_is_away {
            return;
        }
        let now = self.now;
        let mut events = Vec::new();
        for ((ring, _), slot) in &mut self.slots {
            while slot.front().is_some_and(|head| head.fires_at <= now) {
                let released = slot.pop_front().expect("it has a head");
                let is_fine = *ring == 0;
                events.push(if is_fine { Event::ReleasedByFineSlot } else { Event::ReleasedByCoarseSlot });
                let target = if is_fine { &mut self.timeout } else { &mut self.arm };
                target.push_back(released.alarm);
            }
            // What waits behind a head that fires later is blocked.
            let blocked = slot.iter().map(|waiting| now.since(waiting.fires_at)).max().unwrap_or_default();
            if !self.clock_was_set {
                self.worst_blocked = self.worst_blocked.max(blocked);
            }
        }
        self.has_changed |= !events.is_empty();
        self.seen.extend(events);
    }

    /// When the next slot releases its head.
    pub(super) fn next_release(&self) -> Option<Timestamp> {
        let heads = self.slots.values().filter_map(|slot| slot.front()).map(|head| head.fires_at);
        heads.filter(|_| !self.broker_is_away).min()
    }

    pub(super) fn write_alarm(&mut self, rearm: &Rearm) {
        let now = self.worker_time();
        // As `rearm.rs` does.
        let (place, is_retry) = match rearm.wanted {
            Wanted::AtOnce => (Placement::Due, false),
            Wanted::BeforeDeadline => (self.wheel.place(rearm.alarm.deadline(), now), false),
            Wanted::NotBefore(moment) => {
                let wake_at = moment.min(now + DOUBLINGS * policy().retry_longest);
                let place = self.wheel.place_retry(wake_at, now);
                let place = if self.mutant == Mutant::RetriesAtOnce { Placement::Due } else { place };
                self.check_retry(wake_at.since(now), &place);
                (place, true)
            }
        };
        match place {
            Placement::Due => self.timeout.push_back(rearm.alarm.clone()),
            Placement::Slot { ring, slot, ttl } => {
                let ring = index_of(&self.wheel, &ring);
                let slot = if self.mutant == Mutant::TwoLapsInOneSlot { slot % 3 } else { slot };
                let waiting = Waiting { alarm: rearm.alarm.clone(), fires_at: self.now + ttl, is_retry };
                self.slots.entry((ring, slot)).or_default().push_back(waiting);
            }
            other => panic!("{other:?} is no place in the wheel"),
        }
    }

    fn check_retry(&mut self, wanted: Duration, place: &Placement) {
        let (kept, unit) = match place {
            Placement::Due => (Duration::ZERO, Duration::ZERO),
            Placement::Slot { ring, ttl, .. } => (*ttl, self.wheel.rings()[index_of(&self.wheel, ring)].unit),
            other => panic!("{other:?} is no place in the wheel"),
        };
        if kept < wanted || kept > wanted + unit {
            self.misplaced_retry = Some(format!("a retry that should wait {wanted:?} waits {kept:?}"));
        }
    }

    pub fn broker_is_away(&self) -> bool {
        self.broker_is_away
    }

    /// Makes the broker go away with every session, or come back.
    pub fn set_broker_away(&mut self, away: bool) {
        let was_away = std::mem::replace(&mut self.broker_is_away, away);
        self.note_if(away && !was_away, Event::BrokerWentAway);
        self.note_if(was_away && !away, Event::BrokerCameBack);
        if away {
            (0..WORKERS).for_each(|worker| self.lose_session(worker));
        }
    }

    /// The broker delivers, and confirms nothing: it blocks publishers.
    pub fn set_broker_silent(&mut self, silent: bool) {
        self.note_if(silent && !self.broker_is_silent, Event::BrokerStoppedConfirming);
        self.broker_is_silent = silent;
    }

    pub fn set_broker_refuses(&mut self, refuses: bool) {
        self.note_if(refuses && !self.broker_refuses, Event::BrokerBeganRefusing);
        self.broker_refuses = refuses;
    }

    /// Redelivers a message of which the acknowledgement was lost.
    pub fn duplicate(&mut self, n: usize) {
        let messages: Vec<DeliveredAlarm> =
            self.timeout.iter().chain(self.unacknowledged.values().map(|(_, alarm)| alarm)).cloned().collect();
        if let Some(which) = n.checked_rem(messages.len()) {
            self.timeout.push_back(messages[which].clone());
            self.note(Event::Duplicated);
        }
    }

    /// Redelivers what was not acknowledged in this session.
    pub(super) fn end_session(&mut self, session: u64) {
        let mut ended = Vec::new();
        self.unacknowledged.retain(|receipt, message| {
            let stays = receipt.session != session;
            if !stays {
                ended.push(message.clone());
            }
            stays
        });
        self.note_if(!ended.is_empty(), Event::DeliveredAgain);
        for (source, alarm) in ended.into_iter().rev() {
            self.put_back(source, alarm);
        }
    }

    pub(super) fn settle(&mut self, settlements: Vec<(Receipt, Settlement)>) {
        for (receipt, settlement) in settlements {
            let Some((source, alarm)) = self.unacknowledged.remove(&receipt) else { continue };
            self.has_changed = true;
            if settlement == Settlement::Requeue {
                self.put_back(source, alarm);
                self.note(Event::Requeued);
            }
        }
    }

    fn put_back(&mut self, source: SourceQueue, alarm: DeliveredAlarm) {
        if source == SourceQueue::Inbox { self.arm.push_front(alarm) } else { self.timeout.push_front(alarm) }
    }
}
