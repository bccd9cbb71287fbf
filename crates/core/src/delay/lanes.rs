//! Where a publisher puts an alarm: in the lane of its standard delay, in the inbox for any other delay, or in the
//! delayed exchange.
//!
//! Pure. Uses the publisher's clock only for the TTL: if that makes an alarm early, the worker holds it; if it makes it
//! late, the order is closed late.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use super::settings::whole_millis;
use super::{DelaySettings, Lane, Placement, Strategy};
use crate::kind::Kind;
use crate::message::LONGEST_TTL;
use crate::order::{Deadline, OrderId, Timestamp};
use crate::setting::InvalidSetting;

/// Each lane has up to 16 queues, and every queue costs the broker resources.
const MAX_LANES: usize = 64;
/// The bounds of the lane tolerance, which is half the lead: how far a delay may be from its lane's. So two alarms of a lane
/// differ by at most the lead, or by 200 ms: the most that one waits behind another.
pub(super) const LANE_TOLERANCE: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(1);
/// Alarms leave a lane in steps of this length, each at most so much before its lead begins: fifty at once cost broker
/// and worker little more than one. Like all alarms, they wait in the worker's memory until their exact deadline.
const LANE_STEP: Duration = Duration::from_millis(50);

/// Queues for each lane of a kind other than the default one: its alarms are one flow among several, and every queue
/// costs the broker resources.
const SHARDS_OF_KIND: u8 = 1;

/// The lanes of each kind that is known, with what else decides how its alarms are delayed.
#[derive(Debug, Clone)]
pub struct KindLanes(BTreeMap<Kind, DelaySettings>);

impl KindLanes {
    /// Those of the default kind, and the lanes of the others, which differ from it in nothing else.
    #[must_use]
    pub fn new(of_order: DelaySettings, others: impl IntoIterator<Item = (Kind, Vec<Lane>)>) -> Self {
        let of_other = |lanes| DelaySettings { lanes, lane_shards: SHARDS_OF_KIND, ..of_order.clone() };
        let mut all: BTreeMap<Kind, DelaySettings> =
            others.into_iter().map(|(kind, lanes)| (kind, of_other(lanes))).collect();
        all.insert(Kind::ORDER, of_order);
        Self(all)
    }

    /// The kinds and their lanes, the default kind first.
    pub fn iter(&self) -> impl Iterator<Item = (&Kind, &DelaySettings)> {
        self.0.iter()
    }

    /// Where an alarm of this kind waits, published at `now`. One of a kind that is not known here goes through the inbox,
    /// where a worker knows more.
    #[must_use]
    pub fn place(&self, kind: &Kind, order_id: &OrderId, deadline: Deadline, now: Timestamp) -> Placement {
        self.0.get(kind).map_or(Placement::Inbox, |lanes| lanes.place(order_id, deadline, now))
    }

    /// Every rule for the lanes of each kind.
    ///
    /// # Errors
    /// [`InvalidSetting`] for the first rule that is broken; it names `delay.lanes`, or `kinds.NAME.lanes`.
    pub fn validate(&self) -> Result<(), InvalidSetting> {
        self.iter().try_for_each(|(kind, lanes)| {
            lanes.validate_lanes().map_err(|fault| match fault.key.as_str() {
                "delay.lanes" if !kind.is_default() => InvalidSetting { key: format!("kinds.{kind}.lanes"), ..fault },
                _ => fault,
            })
        })
    }
}

impl DelaySettings {
    /// Every rule for lanes.
    pub(super) fn validate_lanes(&self) -> Result<(), InvalidSetting> {
        InvalidSetting::between("delay.lane_shards", self.lane_shards, 1, 16)?;
        InvalidSetting::within("delay.lead", self.lead, Duration::ZERO, Duration::from_secs(600))?;
        let (least, most) = (Duration::from_secs(1), Duration::from_secs(36_500 * 86_400));
        InvalidSetting::within("delay.max_delay", self.max_delay, least, most)?;
        let lanes = &self.lanes;
        let key = "delay.lanes";
        if lanes.len() > MAX_LANES {
            let why = format!("{} lanes are more than {MAX_LANES}; the wheel takes every other delay", lanes.len());
            return Err(InvalidSetting::new(key, why));
        }
        for lane in lanes {
            InvalidSetting::within(key, lane.delay, Duration::from_millis(1), self.max_delay)?;
            InvalidSetting::within(key, lane.longest_ttl(), Duration::ZERO, LONGEST_TTL)?;
            whole_millis(key, lane.delay)?;
            if lanes.iter().filter(|other| other.delay == lane.delay).count() > 1 {
                return Err(InvalidSetting::new(key, format!("{} is named twice; name it once", lane.name)));
            }
        }
        Ok(())
    }

    /// Where an alarm for this order waits, published at `now`.
    ///
    /// # Panics
    /// If `lane_shards` is 0, which [`DelaySettings::validate`] refuses.
    #[must_use]
    pub fn place(&self, order_id: &OrderId, deadline: Deadline, now: Timestamp) -> Placement {
        let remaining = deadline.since(now);
        match self.strategy {
            Strategy::DelayedExchange => Placement::DelayedExchange(remaining.saturating_sub(self.lead)),
            // A publisher with this strategy is refused.
            Strategy::Database => Placement::Inbox,
            Strategy::DeadLetter => match self.lane_for(remaining) {
                Some(lane) => self.in_lane(lane, order_id, deadline, now),
                // No TTL: only the worker publishes into the wheel, by the database's clock.
                None => Placement::Inbox,
            },
        }
    }

    /// How far a delay may be from a lane's and still use the lane. The TTLs in one queue then differ by at most twice
    /// as much, which is how long a message can be delayed behind another; the lead compensates for that.
    #[must_use]
    pub fn tolerance(&self) -> Duration {
        (self.lead / 2).clamp(*LANE_TOLERANCE.start(), *LANE_TOLERANCE.end())
    }

    fn lane_for(&self, remaining: Duration) -> Option<&Lane> {
        let tolerance = self.tolerance();
        self.lanes.iter().find(|lane| lane.delay.abs_diff(remaining) <= tolerance)
    }

    fn in_lane(&self, lane: &Lane, order_id: &OrderId, deadline: Deadline, now: Timestamp) -> Placement {
        let leaves_at = round_down_to_step(deadline - self.lead);
        Placement::Lane { lane: lane.name.clone(), shard: self.shard_of(order_id), ttl: leaves_at.since(now) }
    }

    /// Distributes orders over a lane's queues. Any even distribution will do: publishers need not agree on it.
    fn shard_of(&self, order_id: &OrderId) -> u8 {
        let mut hasher = DefaultHasher::new();
        order_id.hash(&mut hasher);
        u8::try_from(hasher.finish() % u64::from(self.lane_shards)).expect("less than lane_shards, which is a u8")
    }
}

fn round_down_to_step(moment: Timestamp) -> Timestamp {
    let step_micros = i64::try_from(LANE_STEP.as_micros()).expect("some milliseconds");
    Timestamp::from_unix_micros(moment.unix_micros().div_euclid(step_micros).saturating_mul(step_micros))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop_assert, prop_assert_eq, prop_oneof, proptest};

    use super::*;

    const LEAD: Duration = Duration::from_secs(20);

    fn settings(lanes: &[&str], lead: Duration, strategy: Strategy) -> DelaySettings {
        let lanes = lanes.iter().map(|lane| lane.parse().unwrap()).collect();
        let max_delay = Duration::from_secs(86_400);
        DelaySettings { strategy, lanes, lane_shards: 4, lead, max_delay, rings: Vec::new() }
    }

    fn placed_at(now: Timestamp, remaining_ms: u64, lanes: &[&str], lead: Duration, strategy: Strategy) -> Placement {
        let id = OrderId::new("order-1").unwrap();
        settings(lanes, lead, strategy).place(&id, now + Duration::from_millis(remaining_ms), now)
    }

    fn placed(remaining_ms: u64, lanes: &[&str], lead: Duration) -> Placement {
        placed_at(Timestamp::from_unix_micros(1_000_000_000), remaining_ms, lanes, lead, Strategy::DeadLetter)
    }

    fn ttl_in_lane(placement: &Placement) -> Duration {
        let Placement::Lane { ttl, .. } = placement else { panic!("{placement:?}") };
        *ttl
    }

    #[test]
    fn standard_delay_uses_lane_within_tolerance() {
        let placement = placed(1_800_000 - 12, &["30m"], LEAD);
        assert_eq!(ttl_in_lane(&placement), Duration::from_millis(1_779_950));
        assert!(matches!(placement, Placement::Lane { lane, .. } if lane == "30m"));
    }

    #[test]
    fn other_delays_use_inbox_without_ttl() {
        for remaining_ms in [0, 1, 59_999, 1_798_900, 1_801_100, 63_072_000_000] {
            assert_eq!(placed(remaining_ms, &["30m"], LEAD), Placement::Inbox, "{remaining_ms}");
        }
    }

    proptest! {
        #[test]
        fn alarms_leave_lane_in_step(millis in 0_u64..1_000) {
            let remaining = Duration::from_millis(1_799_500 + millis);
            let ttl = ttl_in_lane(&placed(1_799_500 + millis, &["30m"], LEAD));
            let shortened_by = remaining - LEAD - ttl;
            prop_assert!(shortened_by < LANE_STEP, "{shortened_by:?}");
            // The test's time is a multiple of the step.
            prop_assert_eq!(ttl.as_micros() % LANE_STEP.as_micros(), 0);
        }
    }

    #[test]
    fn each_kind_has_lanes_of_its_own() {
        let of_order = settings(&["30m"], LEAD, Strategy::DeadLetter);
        let acceptance = Kind::new("acceptance").unwrap();
        let lanes = KindLanes::new(of_order, [(acceptance.clone(), vec!["5m".parse().unwrap()])]);
        let (id, now) = (OrderId::new("a").unwrap(), Timestamp::from_unix_micros(0));
        let lane_of =
            |kind: &Kind, minutes: u64| match lanes.place(kind, &id, now + Duration::from_secs(60 * minutes), now) {
                Placement::Lane { lane, shard, .. } => Some((lane, shard < SHARDS_OF_KIND)),
                _ => None,
            };
        assert_eq!(lane_of(&acceptance, 5), Some(("5m".to_owned(), true)));
        assert_eq!(lane_of(&acceptance, 30), None);
        assert_eq!(lane_of(&Kind::ORDER, 30).unwrap().0, "30m");
        assert_eq!(lanes.place(&Kind::new("other").unwrap(), &id, now, now), Placement::Inbox);
        let twice = KindLanes::new(lanes.0[&Kind::ORDER].clone(), [(acceptance, vec!["5m".parse().unwrap(); 2])]);
        assert_eq!(twice.validate().unwrap_err().key, "kinds.acceptance.lanes");
    }

    #[test]
    fn ttl_is_never_negative() {
        assert_eq!(ttl_in_lane(&placed(4_000, &["4s"], LEAD)), Duration::ZERO);
    }

    #[test]
    fn longest_lane_ttl_is_reached() {
        let lane: Lane = "4s".parse().unwrap();
        assert_eq!(ttl_in_lane(&placed(4_100, &["4s"], Duration::ZERO)), lane.longest_ttl());
    }

    proptest! {
        /// Values near the limit: hardly any lead, and a delay at the end of the tolerance.
        #[test]
        fn no_ttl_exceeds_queue_limit(
            lead_ms in prop_oneof![0_u64..250, 0_u64..3_000, 0_u64..600_000],
            remaining_ms in prop_oneof![3_900_u64..4_300, 6_900_u64..7_300, 0_u64..10_000],
        ) {
            let placement = placed(remaining_ms, &["4s", "7s"], Duration::from_millis(lead_ms));
            if let Placement::Lane { lane, ttl, .. } = placement {
                let longest = lane.parse::<Lane>().unwrap().longest_ttl();
                prop_assert!(ttl <= longest, "{ttl:?} in lane {lane}");
            }
        }
    }

    #[test]
    fn delayed_exchange_keeps_delay_less_lead() {
        let now = Timestamp::from_unix_micros(1_000_000_000);
        let delayed = placed_at(now, 75_000, &["30m"], LEAD, Strategy::DelayedExchange);
        assert_eq!(delayed, Placement::DelayedExchange(Duration::from_secs(55)));
    }
}
