//! Chooses the slot of the wheel for a due time: the hierarchical timing wheel of Varghese and Lauck (SOSP 1987), with
//! queues as slots.
//!
//! Pure arithmetic over the database's time: no I/O. Only the worker may publish into a slot, because a publisher has
//! only its own clock. All messages of a slot fall due in the same unit, so they expire together and none waits behind
//! another.
//!
//! As long as clocks agree, messages are written into a slot in the order in which they expire: a slot's next lap is
//! written only after its last one should have left, and leftovers of that one (the broker was away) are in front and
//! leave first. So a slot that was not released in time delays no message for longer than that lasts.

use std::time::Duration;

use super::Placement;
use crate::order::Timestamp;

/// One ring: `slots` queues, one for each `unit` of time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ring {
    /// The ring's name in queue names, such as `5s-22`: its unit and its number of slots.
    pub name: String,
    /// The span of one slot, at least 100 ms.
    pub unit: Duration,
    /// 6 to 1000; a sixth of them stays free.
    pub slots: u16,
    /// How long before its unit begins a slot releases its alarms.
    pub early: Duration,
}

/// Why a set of rings cannot make a wheel, as one sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WheelError(String);

/// All rings, finest first. In a wheel that [`Wheel::new`] accepts no alarm can loop, and a slot's next lap is written
/// only after its last one should have left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wheel {
    rings: Vec<Ring>,
}

impl Ring {
    /// The number of the unit that contains this time.
    fn unit_of(&self, moment: Timestamp) -> i64 {
        moment.unix_micros().div_euclid(self.unit_micros())
    }

    fn unit_micros(&self) -> i64 {
        i64::try_from(self.unit.as_micros()).unwrap_or(i64::MAX)
    }

    /// How many units ahead a slot may be written. A sixth of the ring stays free, so that a slot is empty long before
    /// its next lap is written even if it was released late.
    fn reach_units(&self) -> i64 {
        i64::from(self.slots) * 5 / 6
    }

    /// The furthest unit whose slot may be written now. Counted by when slots are released, which is `early` before
    /// their unit begins: this slot is released at most a reach from now and more than a reach less one unit, and its
    /// last lap should have left `slots` units before, a sixth of the ring ago. If it were counted from the unit that
    /// contains `now`, a ring with an `early` as long as its reach would have no slot to write into, and every alarm
    /// would come back at once.
    fn furthest_unit(&self, now: Timestamp) -> i64 {
        self.unit_of(now + self.early) + self.reach_units()
    }

    /// The first unit whose slot is released at this time or later, and so less than a unit after it.
    fn first_unit_from(&self, moment: Timestamp) -> i64 {
        let release_time = moment + self.early;
        let begins_before = release_time.unix_micros().rem_euclid(self.unit_micros()) != 0;
        self.unit_of(release_time) + i64::from(begins_before)
    }

    /// The longest wait for which there is always a slot.
    pub(super) fn longest_wait(&self) -> Duration {
        self.reach().saturating_sub(self.unit)
    }

    /// The whole ring: longer than any TTL in one of its slots.
    #[must_use]
    pub fn span(&self) -> Duration {
        self.unit.saturating_mul(u32::from(self.slots))
    }

    pub(super) fn reach(&self) -> Duration {
        self.unit.saturating_mul(u32::try_from(self.reach_units()).unwrap_or(u32::MAX))
    }

    fn release_at(&self, unit: i64) -> Timestamp {
        Timestamp::from_unix_micros(unit.saturating_mul(self.unit_micros())) - self.early
    }

    fn slot_of(&self, unit: i64) -> u16 {
        u16::try_from(unit.rem_euclid(i64::from(self.slots))).expect("less than slots, which is a u16")
    }

    /// In the slot of this unit, unless it has been released already.
    fn place(&self, unit: i64, now: Timestamp) -> Placement {
        let release_at = self.release_at(unit);
        if release_at <= now {
            return Placement::Due;
        }
        // The broker counts whole milliseconds; if the rest were cut off, the slot would be released too early.
        let millis = release_at.since(now).as_micros().div_ceil(1_000);
        let ttl = Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX));
        Placement::Slot { ring: self.name.clone(), slot: self.slot_of(unit), ttl }
    }
}

impl Wheel {
    /// Takes rings from fine to coarse.
    ///
    /// # Errors
    /// [`WheelError`] if an alarm could loop between two rings, or a slot's next lap could be written before its last
    /// one should have left.
    pub fn new(rings: Vec<Ring>) -> Result<Self, WheelError> {
        let refuse = |why: String| Err(WheelError(why));
        if rings.is_empty() {
            return refuse(
                "delay.rings is empty; keep at least one ring, such as { unit = \"5s\", slots = 22 }".to_owned(),
            );
        }
        for Ring { name, unit, slots, .. } in &rings {
            if *unit < Duration::from_millis(100) || !(6..=1_000).contains(slots) {
                return refuse(format!("ring {name} needs a unit of at least 100 ms and between 6 and 1000 slots"));
            }
        }
        for pair in rings.windows(2) {
            let (fine, coarse) = (&pair[0], &pair[1]);
            if fine.unit >= coarse.unit {
                return refuse(format!(
                    "ring {} must have a longer unit than ring {}: list the rings from fine to coarse",
                    coarse.name, fine.name
                ));
            }
            // When a coarse slot is released, its alarms are due at most one coarse unit plus its margin later; and a
            // ring's reach is counted from its own margin on.
            let (reach, needed) = (fine.reach(), coarse.unit.saturating_add(coarse.early.saturating_sub(fine.early)));
            if reach <= needed {
                let (fine, coarse) = (&fine.name, &coarse.name);
                return refuse(format!(
                    "ring {fine} reaches {reach:?}, not beyond the {needed:?} that ring {coarse} hands over at once; give ring {fine} more slots, or an alarm re-armed from {coarse} would fall back into it"
                ));
            }
        }
        Ok(Self { rings })
    }

    /// At least one, finest first.
    #[must_use]
    pub fn rings(&self) -> &[Ring] {
        &self.rings
    }

    /// Where an alarm for `due` waits, seen from `now`: in a slot, or nowhere if that slot has been released already.
    ///
    /// What a coarse slot releases is within the reach of the next finer ring ([`Wheel::new`]), and an alarm beyond
    /// every ring waits for more than the coarsest one's reach less a unit. So an alarm is written once into each ring
    /// at most, and before that once per stay in the coarsest.
    #[must_use]
    pub fn place(&self, due: Timestamp, now: Timestamp) -> Placement {
        let finest_that_reaches = self.rings.iter().find(|ring| ring.unit_of(due) <= ring.furthest_unit(now));
        match finest_that_reaches {
            Some(ring) => ring.place(ring.unit_of(due), now),
            // Beyond the coarsest ring: into its furthest slot, and again from there.
            None => self.furthest_slot(now),
        }
    }

    /// The longest wait that [`Wheel::place_retry`] can keep.
    #[must_use]
    pub fn longest_wait(&self) -> Duration {
        self.rings.iter().map(Ring::longest_wait).max().unwrap_or_default()
    }

    /// Where a retry waits, which must not come back before `wake_at`. It comes less than a unit of its ring late.
    /// `wake_at` must be at most [`Wheel::longest_wait`] away, or it comes early.
    ///
    /// It goes into the same slots as every other alarm, each with its one release time, or it would block other
    /// alarms: into the first slot that is released at `wake_at` or later, in the finest ring that has one. A coarser
    /// ring returns it through the inbox, which sends it on at once because its deadline has passed; that ring's unit
    /// is shorter than the finer one's reach, and so at most a quarter longer than the wait itself.
    #[must_use]
    pub fn place_retry(&self, wake_at: Timestamp, now: Timestamp) -> Placement {
        if wake_at <= now {
            return Placement::Due;
        }
        let finest_that_reaches =
            self.rings.iter().find(|ring| ring.first_unit_from(wake_at) <= ring.furthest_unit(now));
        match finest_that_reaches {
            Some(ring) => ring.place(ring.first_unit_from(wake_at), now),
            None => self.furthest_slot(now),
        }
    }

    fn furthest_slot(&self, now: Timestamp) -> Placement {
        let coarsest = self.rings.last().expect("one at least");
        coarsest.place(coarsest.furthest_unit(now), now)
    }
}

#[cfg(test)]
mod tests;
