//! The route of an alarm into the broker: the lane of its standard delay, the inbox for any other delay, or the delayed
//! exchange.
//!
//! Pure: settings, a deadline and a time go in, a route comes out. Uses the publisher's clock only for the TTL: if that
//! makes an alarm early, the worker holds it; if it makes it late, the order is closed late.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use crate::config::{Lane, Settings, Strategy};
use crate::envelope::{Delay, Route};
use crate::order::{Deadline, OrderId, Timestamp};
use crate::topology::Names;

/// Alarms leave a lane in steps of this length, each at most so much before its lead begins: fifty at once cost broker
/// and worker little more than one. Like all alarms, they wait in the worker's memory until their exact deadline.
const LANE_STEP: Duration = Duration::from_millis(50);

/// What a publisher needs to know about delays.
#[derive(Debug, Clone)]
pub struct Lanes {
    names: Names,
    strategy: Strategy,
    lanes: Vec<Lane>,
    shards: u8,
    lead: Duration,
    tolerance: Duration,
    max_delay: Duration,
}

impl Lanes {
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        Self {
            names: Names::new(&settings.namespace),
            strategy: settings.delay.strategy,
            lanes: settings.delay.lanes.clone(),
            shards: settings.delay.lane_shards,
            lead: settings.delay.lead,
            tolerance: settings.delay.lane_tolerance(),
            max_delay: settings.delay.max_delay,
        }
    }

    #[must_use]
    pub fn max_delay(&self) -> Duration {
        self.max_delay
    }

    /// Every exchange that alarms may be published to.
    #[must_use]
    pub fn route_exchanges(&self) -> Vec<String> {
        match self.strategy {
            Strategy::DeadLetter => vec![self.names.arm(), self.names.delay()],
            Strategy::DelayedExchange => vec![self.names.delayed()],
        }
    }

    /// The route of an alarm for this order at `now`.
    #[must_use]
    pub fn route(&self, order_id: &OrderId, deadline: Deadline, now: Timestamp) -> Route {
        let remaining = deadline.since(now);
        match self.strategy {
            Strategy::DelayedExchange => Route::delayed(&self.names, remaining.saturating_sub(self.lead)),
            Strategy::DeadLetter => match self.lane_for(remaining) {
                Some(lane) => self.lane_route(lane, order_id, deadline, now),
                // No TTL: only the worker publishes into the wheel, by the database's clock.
                None => Route::inbox(&self.names),
            },
        }
    }

    /// The lane whose delay is within the tolerance of this one.
    fn lane_for(&self, remaining: Duration) -> Option<&Lane> {
        self.lanes.iter().find(|lane| lane.delay.abs_diff(remaining) <= self.tolerance)
    }

    fn lane_route(&self, lane: &Lane, order_id: &OrderId, deadline: Deadline, now: Timestamp) -> Route {
        let leaves_at = round_down_to_step(deadline - self.lead);
        Route {
            exchange: self.names.delay(),
            routing_key: Names::lane_key(&lane.name, self.shard_of(order_id)),
            delay: Delay::Ttl(leaves_at.since(now)),
        }
    }

    /// Distributes orders over a lane's queues. Any even distribution will do: publishers need not agree on it.
    fn shard_of(&self, order_id: &OrderId) -> u8 {
        let mut hasher = DefaultHasher::new();
        order_id.hash(&mut hasher);
        u8::try_from(hasher.finish() % u64::from(self.shards)).expect("less than shards, which is a u8")
    }
}

fn round_down_to_step(moment: Timestamp) -> Timestamp {
    let step_micros = i64::try_from(LANE_STEP.as_micros()).expect("some milliseconds");
    Timestamp::from_unix_micros(moment.unix_micros().div_euclid(step_micros).saturating_mul(step_micros))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn route_for(remaining_ms: u64, overrides: &[&str]) -> Route {
        let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
        let settings = Settings::load_with_environment(None, Default::default(), &overrides).unwrap();
        let now = Timestamp::from_unix_micros(1_000_000_000);
        let id = OrderId::new("order-1").unwrap();
        Lanes::new(&settings).route(&id, now + Duration::from_millis(remaining_ms), now)
    }

    #[test]
    fn standard_delay_uses_lane_within_tolerance() {
        let route = route_for(1_800_000 - 12, &[]);
        assert_eq!(
            (route.exchange.as_str(), route.delay),
            ("order.delay", Delay::Ttl(Duration::from_millis(1_779_950)))
        );
        assert!(route.routing_key.starts_with("30m."), "{route:?}");
    }

    #[test]
    fn other_delays_use_inbox_without_ttl() {
        for remaining_ms in [0, 1, 59_999, 1_798_900, 1_801_100, 63_072_000_000] {
            let route = route_for(remaining_ms, &[]);
            assert_eq!((route.exchange.as_str(), route.delay), ("order.arm", Delay::None), "{remaining_ms}");
        }
    }

    proptest! {
        #[test]
        fn alarms_leave_lane_in_step(millis in 0_u64..1_000) {
            let remaining = Duration::from_millis(1_799_500 + millis);
            let Delay::Ttl(ttl) = route_for(1_799_500 + millis, &[]).delay else { panic!("a lane") };
            let shortened_by = remaining - Duration::from_secs(20) - ttl;
            prop_assert!(shortened_by < LANE_STEP, "{shortened_by:?}");
            // The test's time is a multiple of the step.
            prop_assert_eq!(ttl.as_micros() % LANE_STEP.as_micros(), 0);
        }
    }

    #[test]
    fn ttl_is_never_negative() {
        let route = route_for(4_000, &["delay.lanes=4s"]);
        assert_eq!(route.delay, Delay::Ttl(Duration::ZERO));
    }

    #[test]
    fn longest_lane_ttl_is_reached() {
        let route = route_for(4_100, &["delay.lanes=4s", "delay.lead=0s"]);
        let lane = Lane::try_from("4s".to_owned()).unwrap();
        assert_eq!(route.delay, Delay::Ttl(lane.longest_ttl()));
    }

    proptest! {
        /// Values near the limit: hardly any lead, and a delay at the end of the tolerance.
        #[test]
        fn no_ttl_exceeds_queue_limit(
            lead_ms in prop_oneof![0_u64..250, 0_u64..3_000, 0_u64..600_000],
            remaining_ms in prop_oneof![3_900_u64..4_300, 6_900_u64..7_300, 0_u64..10_000],
        ) {
            let route = route_for(remaining_ms, &["delay.lanes=4s,7s", &format!("delay.lead={lead_ms}ms"), "worker.hold_max=620s"]);
            if let Delay::Ttl(ttl) = route.delay {
                let name = route.routing_key.split('.').next().unwrap();
                let lane = Lane::try_from(name.to_owned()).unwrap();
                prop_assert!(ttl <= lane.longest_ttl(), "{ttl:?} in lane {name}");
            }
        }
    }

    #[test]
    fn x_delay_is_capped_at_plugin_limit() {
        let strategy = "delay.strategy=delayed-exchange";
        assert_eq!(route_for(75_000, &[strategy]).delay, Delay::XDelayMs(55_000));
        let far = route_for(90 * 86_400_000, &[strategy]);
        assert_eq!(far.delay, Delay::XDelayMs(4_294_967_295));
    }
}
