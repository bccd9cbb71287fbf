//! Which slot of the wheel for which due time: the hierarchical timing wheel of Varghese and Lauck (SOSP 1987), its
//! slots being queues.
//!
//! Pure arithmetic over the database's time: no I/O, and nobody but `arm.rs` may write into a slot by it. A slot's
//! messages all fall due in the same unit, so they expire together and none waits behind another.

use std::time::Duration;

use crate::order::Moment;

/// One ring: `slots` queues, each standing for one `unit` of time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ring {
    /// The ring's name in queue names, such as `5s`.
    pub name: String,
    pub unit: Duration,
    pub slots: u16,
    /// How long before its unit begins a slot lets its alarms go.
    pub early: Duration,
}

/// Where an alarm waits until it is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Its slot has let go already: straight to the processing queue.
    Due,
    /// Into this slot of this ring (an index into [`Wheel::rings`]), to be let go after `ttl`.
    Slot { ring: usize, slot: u16, ttl: Duration },
}

/// Why a set of rings cannot make a wheel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadWheel {
    #[error("delay.rings is empty; keep at least one ring, such as {{ unit = \"5s\", slots = 20 }}")]
    NoRings,
    #[error("ring {0} needs a unit of at least 100 ms and between 6 and 1000 slots")]
    BadRing(String),
    #[error("ring {coarse} must have a longer unit than ring {fine}: list the rings from fine to coarse")]
    NotAscending { fine: String, coarse: String },
    #[error(
        "ring {fine} reaches {reach:?}, not beyond the {needed:?} that ring {coarse} hands over at once; give ring {fine} more slots, or an alarm re-armed from {coarse} would fall back into it"
    )]
    Gap { fine: String, coarse: String, reach: Duration, needed: Duration },
}

/// All rings, finest first. What [`Wheel::new`] accepts cannot loop and never holds two laps in a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wheel {
    rings: Vec<Ring>,
}

impl Ring {
    /// The number of the unit that holds this moment.
    fn unit_of(&self, moment: Moment) -> i64 {
        moment.unix_micros().div_euclid(self.unit_micros())
    }

    fn unit_micros(&self) -> i64 {
        i64::try_from(self.unit.as_micros()).unwrap_or(i64::MAX)
    }

    /// How many units ahead a slot may be written. A sixth of the ring stays free, so that a slot is empty long
    /// before its next lap is written even if it was let go late.
    fn reach_units(&self) -> i64 {
        i64::from(self.slots) * 5 / 6
    }

    /// The whole ring: longer than any TTL in one of its slots.
    #[must_use]
    pub fn span(&self) -> Duration {
        self.unit.saturating_mul(u32::from(self.slots))
    }

    fn reach(&self) -> Duration {
        self.unit.saturating_mul(u32::try_from(self.reach_units()).unwrap_or(u32::MAX))
    }

    fn fires_at(&self, unit: i64) -> Moment {
        Moment::from_unix_micros(unit.saturating_mul(self.unit_micros())) - self.early
    }

    fn slot_of(&self, unit: i64) -> u16 {
        u16::try_from(unit.rem_euclid(i64::from(self.slots))).expect("less than slots, which is a u16")
    }
}

impl Wheel {
    /// # Errors
    /// [`BadWheel`] where an alarm could loop between two rings, or a slot could hold two laps.
    pub fn new(rings: Vec<Ring>) -> Result<Self, BadWheel> {
        if rings.is_empty() {
            return Err(BadWheel::NoRings);
        }
        for ring in &rings {
            if ring.unit < Duration::from_millis(100) || !(6..=1_000).contains(&ring.slots) {
                return Err(BadWheel::BadRing(ring.name.clone()));
            }
        }
        for pair in rings.windows(2) {
            let (fine, coarse) = (&pair[0], &pair[1]);
            if fine.unit >= coarse.unit {
                return Err(BadWheel::NotAscending { fine: fine.name.clone(), coarse: coarse.name.clone() });
            }
            // When a coarse slot lets go, its alarms are due at most one coarse unit plus its margin later.
            let needed = coarse.unit.saturating_add(coarse.early);
            if fine.reach() <= needed {
                let (fine_name, coarse_name) = (fine.name.clone(), coarse.name.clone());
                return Err(BadWheel::Gap { fine: fine_name, coarse: coarse_name, reach: fine.reach(), needed });
            }
        }
        Ok(Self { rings })
    }

    #[must_use]
    pub fn rings(&self) -> &[Ring] {
        &self.rings
    }

    /// Where an alarm for `due` waits, seen from `now`.
    #[must_use]
    pub fn place(&self, due: Moment, now: Moment) -> Place {
        let finest_that_reaches =
            self.rings.iter().position(|ring| ring.unit_of(due) - ring.unit_of(now) <= ring.reach_units());
        match finest_that_reaches {
            Some(ring) => self.slot(ring, self.rings[ring].unit_of(due), now),
            None => {
                // Beyond the coarsest ring: its furthest slot, and again from there.
                let ring = self.rings.len() - 1;
                let coarsest = &self.rings[ring];
                self.slot(ring, coarsest.unit_of(now) + coarsest.reach_units(), now)
            }
        }
    }

    /// Where an alarm waits that must not come back before `wake_at`, but may come up to a unit later: a retry.
    #[must_use]
    pub fn place_retry(&self, wake_at: Moment, now: Moment) -> Place {
        let finest = &self.rings[0];
        // The first unit whose slot lets go at or after `wake_at`.
        let unit = finest.unit_of(wake_at + finest.early) + 1;
        let furthest = finest.unit_of(now) + finest.reach_units();
        self.slot(0, unit.min(furthest), now)
    }

    fn slot(&self, ring: usize, unit: i64, now: Moment) -> Place {
        let fires_at = self.rings[ring].fires_at(unit);
        if fires_at <= now {
            return Place::Due;
        }
        Place::Slot { ring, slot: self.rings[ring].slot_of(unit), ttl: fires_at.since(now) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ring(name: &str, unit_s: u64, slots: u16, early_s: u64) -> Ring {
        Ring { name: name.into(), unit: Duration::from_secs(unit_s), slots, early: Duration::from_secs(early_s) }
    }

    fn wheel() -> Wheel {
        Wheel::new(vec![ring("5s", 5, 20, 5), ring("1m", 60, 90, 10), ring("1h", 3_600, 36, 300)]).unwrap()
    }

    fn at(seconds: i64) -> Moment {
        Moment::from_unix_micros(seconds * 1_000_000)
    }

    #[test]
    fn rings_that_could_loop_are_refused() {
        // 16 units of 5 s reach 80 s; a 1 m slot hands over up to 70 s ahead; a 2 m slot up to 130 s.
        assert!(Wheel::new(vec![ring("5s", 5, 20, 5), ring("1m", 60, 90, 10)]).is_ok());
        let gap = Wheel::new(vec![ring("5s", 5, 20, 5), ring("2m", 120, 90, 10)]).unwrap_err();
        assert!(matches!(gap, BadWheel::Gap { .. }), "{gap}");
        assert_eq!(Wheel::new(vec![]), Err(BadWheel::NoRings));
    }

    #[test]
    fn a_slot_lets_go_its_margin_before_its_unit_begins() {
        let Place::Slot { ring: 0, slot, ttl } = wheel().place(at(1_033), at(1_000)) else { panic!() };
        assert_eq!((slot, ttl), (206 % 20, Duration::from_secs(1_030 - 5 - 1_000)));
    }

    #[test]
    fn what_is_due_soon_goes_straight_to_processing() {
        assert_eq!(wheel().place(at(1_003), at(1_000)), Place::Due);
        assert_eq!(wheel().place(at(900), at(1_000)), Place::Due);
    }

    #[test]
    fn a_retry_never_comes_back_before_its_time() {
        let Place::Slot { ring: 0, ttl, .. } = wheel().place_retry(at(1_002), at(1_000)) else { panic!() };
        assert!(ttl >= Duration::from_secs(2) && ttl <= Duration::from_secs(7), "{ttl:?}");
    }

    /// Follows an alarm from slot to slot, each handed over `late` after its time, until it is due.
    fn walk(wheel: &Wheel, due: Moment, mut now: Moment, late: Duration) -> (u32, Moment) {
        for hops in 0.. {
            match wheel.place(due, now) {
                Place::Due => return (hops, now),
                Place::Slot { ttl, .. } => now = now + ttl + late,
            }
        }
        unreachable!()
    }

    proptest! {
        #[test]
        fn an_alarm_reaches_the_worker_before_it_is_due_and_never_loops(
            now_us in 0_i64..4_000_000_000_000_000, ahead_ms in 0_i64..3_650 * 86_400_000, late_ms in 0_u64..900,
        ) {
            let (now, due) = (Moment::from_unix_micros(now_us), Moment::from_unix_micros(now_us + ahead_ms * 1_000));
            let (hops, arrived) = walk(&wheel(), due, now, Duration::from_millis(late_ms));
            prop_assert!(arrived <= due, "arrived {:?} after it was due", arrived.since(due));
            prop_assert!(due.since(arrived) <= Duration::from_secs(10), "arrived {:?} early", due.since(arrived));
            // 30 units of an hour at a time, then at most one stay in each finer ring.
            prop_assert!(i64::from(hops) <= ahead_ms / (29 * 3_600_000) + 3, "{hops} hops");
        }

        #[test]
        fn a_slot_never_holds_two_laps(
            now_us in 0_i64..4_000_000_000_000_000, a_ms in 0_i64..400_000_000, b_ms in 0_i64..400_000_000, gap_ms in 0_i64..400_000_000,
        ) {
            let wheel = wheel();
            let now = Moment::from_unix_micros(now_us);
            let later = Moment::from_unix_micros(now_us + gap_ms * 1_000);
            let first = wheel.place(Moment::from_unix_micros(now_us + a_ms * 1_000), now);
            let second = wheel.place(Moment::from_unix_micros(later.unix_micros() + b_ms * 1_000), later);
            if let (Place::Slot { ring: ra, slot: sa, ttl: ta }, Place::Slot { ring: rb, slot: sb, ttl: tb }) = (first, second)
                && (ra, sa) == (rb, sb) && now + ta > later
            {
                // Both are in the slot at once: then they are let go together.
                prop_assert_eq!(now + ta, later + tb);
            }
        }

        #[test]
        fn no_ttl_is_longer_than_its_ring(
            now_us in 0_i64..4_000_000_000_000_000, ahead_ms in 0_i64..3_650 * 86_400_000,
        ) {
            let wheel = wheel();
            let (now, due) = (Moment::from_unix_micros(now_us), Moment::from_unix_micros(now_us + ahead_ms * 1_000));
            for place in [wheel.place(due, now), wheel.place_retry(due, now)] {
                if let Place::Slot { ring, ttl, .. } = place {
                    prop_assert!(ttl < wheel.rings()[ring].span(), "{ttl:?} in ring {ring}");
                }
            }
        }
    }
}
