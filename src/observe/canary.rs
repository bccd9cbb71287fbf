//! Canaries: messages that a worker sends itself through the broker's delay queues, to detect that alarms no longer
//! arrive. Defines the paths, the message, and what a missing canary means.
//!
//! Pure: reads no clock and does no I/O; `store.rs` records what was sent and what arrived. A canary is not an alarm:
//! it names no order, and the engine never sees one.

pub mod store;

use std::time::Duration;

use order_timeout_amqp::envelope::{Delay, Route, carbon_copy, x_delay};
use order_timeout_amqp::publisher::Outgoing;
use order_timeout_amqp::topology::{Names, SeenQueue, Sight};
use order_timeout_core::delay::wheel::Wheel;
use order_timeout_core::delay::{Placement, Strategy};
use order_timeout_core::kind::Kind;
use order_timeout_core::message::CONTENT_TYPE;
use order_timeout_core::order::Timestamp;
use uuid::Uuid;

use crate::config::Settings;

/// AMQP property `type` of a canary. Its `message_id` is its id.
pub const CANARY_TYPE: &str = "order.timeout.canary.v1";

/// How long a canary may take beyond its wait in its queue.
pub const GRACE: Duration = Duration::from_millis(2_500);
/// The longest wait of a quick path, on which a failure is detected and cleared within seconds.
const QUICK_WAIT: Duration = Duration::from_secs(10);
/// A canary is published to a slot of the wheel at least this long before the slot expires.
const AHEAD: Duration = Duration::from_millis(300);
/// The shortest interval between two canaries of one path while no failure is suspected.
const REGULAR_INTERVAL: Duration = Duration::from_secs(60);
/// The same while a failure is suspected.
const SUSPECTED_INTERVAL: Duration = Duration::from_secs(4);

/// A path of alarms through the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    /// Unique in the database, even if several namespaces share it.
    pub name: String,
    way: Way,
    longest_wait: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Way {
    /// Directly to the processing queues.
    Due,
    Ring(usize),
    Lane {
        lane: String,
        shard: u8,
        wait: Duration,
    },
    Delayed,
}

/// The route, queue and wait of one canary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Journey {
    /// Where it waits.
    pub placement: Placement,
    /// How it is published.
    pub route: Route,
    /// The queue in which it waits.
    pub queue: String,
    /// How long it waits there.
    pub wait: Duration,
}

impl Journey {
    /// Whether it waits in a slot of the wheel, which exists only after an alarm has needed it.
    #[must_use]
    pub const fn is_in_slot(&self) -> bool {
        matches!(self.placement, Placement::Slot { .. })
    }
}

/// All paths of one kind's alarms.
#[derive(Debug, Clone)]
pub struct Paths {
    names: Names,
    kind: Kind,
    wheel: Option<Wheel>,
    paths: Vec<Path>,
}

impl Paths {
    /// # Panics
    /// If the rings of `settings` do not mesh, which `Settings::validate` refuses.
    #[must_use]
    pub fn new(settings: &Settings, kind: &Kind) -> Self {
        let names = settings.names();
        // Exchanges and the wheel are shared, and the queue behind them is not.
        let name_of = |what: String| if kind.is_default() { what } else { format!("{what} ({kind})") };
        let mut paths = vec![Path { name: name_of(names.due()), way: Way::Due, longest_wait: Duration::ZERO }];
        let wheel = match settings.delay.strategy {
            Strategy::Database => None,
            Strategy::DelayedExchange => {
                let name = name_of(names.delayed());
                paths.push(Path { name, way: Way::Delayed, longest_wait: DELAYED_WAIT });
                None
            }
            Strategy::DeadLetter => {
                let wheel = settings.delay.wheel().expect("validated settings have rings that mesh");
                for (index, ring) in wheel.rings().iter().enumerate() {
                    let name = name_of(format!("{}.{}", names.wheel(), ring.name));
                    paths.push(Path { name, way: Way::Ring(index), longest_wait: AHEAD + ring.unit });
                }
                let lanes = settings.lanes();
                let of_kind = lanes.iter().filter(|(known, _)| *known == kind).map(|(_, lanes)| lanes);
                for (lane, lanes) in of_kind.flat_map(|lanes| lanes.lanes.iter().map(move |lane| (lane, lanes))) {
                    let wait = lane.delay.saturating_sub(lanes.lead);
                    for shard in 0..lanes.shards {
                        let name = names.lane_queue(kind, &lane.name, shard);
                        let way = Way::Lane { lane: lane.name.clone(), shard, wait };
                        paths.push(Path { name, way, longest_wait: wait });
                    }
                }
                Some(wheel)
            }
        };
        Self { names, kind: kind.clone(), wheel, paths }
    }

    /// In a fixed order.
    #[must_use]
    pub fn all(&self) -> &[Path] {
        &self.paths
    }

    /// The path of this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&Path> {
        self.paths.iter().find(|path| path.name == name)
    }

    /// The journey of a canary that is sent on this path at `now`, by the database's clock.
    #[must_use]
    pub fn journey(&self, path: &Path, now: Timestamp) -> Journey {
        let waiting = |placement, queue, wait| {
            let route = Route::to(&placement, &self.kind, &self.names);
            Journey { placement, route, queue, wait }
        };
        match &path.way {
            Way::Due => waiting(Placement::Due, self.names.timeout_of(&self.kind), Duration::ZERO),
            Way::Delayed => waiting(Placement::DelayedExchange(DELAYED_WAIT), self.names.delayed(), DELAYED_WAIT),
            Way::Lane { lane, shard, wait } => {
                let placement = Placement::Lane { lane: lane.clone(), shard: *shard, ttl: *wait };
                waiting(placement, path.name.clone(), *wait)
            }
            Way::Ring(ring) => {
                let wheel = self.wheel.as_ref().expect("a path with a ring has a wheel");
                // With the same expiry as the slot's alarms, so that it never delays one.
                let placement = wheel.placement(wheel.place_in_ring(*ring, now + AHEAD, now));
                match &placement {
                    Placement::Slot { ring, slot, ttl } => {
                        let (queue, wait) = (self.names.slot_queue(ring, *slot), *ttl);
                        waiting(placement, queue, wait)
                    }
                    _ => waiting(Placement::Due, self.names.timeout_of(&self.kind), Duration::ZERO),
                }
            }
        }
    }
}

/// How long a canary waits in the delayed exchange.
const DELAYED_WAIT: Duration = Duration::from_secs(1);

impl Path {
    /// Whether its canary returns within seconds.
    #[must_use]
    pub fn is_quick(&self) -> bool {
        self.longest_wait <= QUICK_WAIT
    }

    /// Whether it leads directly to the processing queues, without a delay queue.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.way == Way::Due
    }

    /// The interval between two of its canaries. On a slow path the next is sent when the last has returned.
    #[must_use]
    pub fn sent_every(&self, suspected: bool) -> Duration {
        if suspected && self.is_quick() { SUSPECTED_INTERVAL } else { REGULAR_INTERVAL.max(self.longest_wait) }
    }

    /// How late a canary may be before the next is sent. On a quick path the next soon shows whether the failure lasts;
    /// on a slow path it shows nothing until its own wait is over.
    #[must_use]
    pub fn given_up_after(&self) -> Duration {
        if self.is_quick() { GRACE } else { REGULAR_INTERVAL }
    }

    /// The sentence about a canary that did not return.
    #[must_use]
    pub fn why_missing(&self, queue: &str, direct_arrives: bool) -> String {
        if self.is_direct() {
            return format!(
                "a canary that was published directly to {queue:?} did not reach a worker; a foreign consumer takes messages from that queue, or a worker has stopped reading its deliveries (rabbitmqctl list_consumers)"
            );
        }
        let direct = if direct_arrives { " although one that was published directly to the workers did" } else { "" };
        format!(
            "a canary did not come back through {queue:?} in time{direct}; dead-lettering has stopped on the broker (a message with a malformed x-death header is a known cause on RabbitMQ 3.10), or a message without expiration holds up that queue; see \"Dead-lettering has stopped\" in docs/operating/troubleshoot.md"
        )
    }
}

/// What a late canary means, depending on the processing queues.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Late<'a> {
    /// None of the queues that it may be in contains messages.
    Lost,
    /// It may be queued behind alarms that wait for busy workers.
    Waits,
    /// This queue contains messages, and no worker reads it.
    Unread(&'a SeenQueue),
}

/// If there are several processing queues, a canary may be in any of them.
#[must_use]
pub fn judge_late(sight: &Sight) -> Late<'_> {
    let full = || sight.queues.iter().filter(|queue| queue.ready > 0);
    if let Some(unread) = full().find(|queue| queue.consumers == 0) {
        return Late::Unread(unread);
    }
    if full().next().is_some() { Late::Waits } else { Late::Lost }
}

/// The sentence about a processing queue that no worker reads.
#[must_use]
pub fn why_unread(queue: &SeenQueue) -> String {
    let SeenQueue { name, ready, .. } = queue;
    format!(
        "{ready} messages are waiting in {name:?} and no worker reads it; start a worker with that queue in worker.take_shards, and compare worker.shards of all workers"
    )
}

/// The sentence about consumers that are not workers of this version.
#[must_use]
pub fn why_unknown(consumers: i64, sight: &Sight) -> String {
    let queues: Vec<String> = sight.queues.iter().map(|queue| format!("{:?}", queue.name)).collect();
    let queues = queues.join(", ");
    format!(
        "{consumers} consumers of {queues} are not workers of this version; no canary can be sent, and the sweep closes orders. Find them with rabbitmqctl list_consumers: stop a consumer that is not a worker, upgrade older workers, restart a worker that hangs"
    )
}

/// The message of a canary. `now` is the database's time.
#[must_use]
pub fn outgoing(id: Uuid, journey: &Journey, now: Timestamp) -> Outgoing {
    let mut headers: Vec<_> = journey.route.key_after_delay.clone().map(carbon_copy).into_iter().collect();
    let ttl = match journey.route.delay {
        Delay::None => None,
        Delay::Ttl(ttl) => Some(ttl),
        Delay::XDelayMs(delay_ms) => {
            headers.push(x_delay(delay_ms));
            None
        }
    };
    Outgoing {
        exchange: journey.route.exchange.clone(),
        routing_key: journey.route.routing_key.clone(),
        body: BODY.to_vec(),
        message_id: id.to_string(),
        message_type: CANARY_TYPE.to_owned(),
        content_type: CONTENT_TYPE,
        timestamp_s: u64::try_from(now.unix_micros() / 1_000_000).unwrap_or(0),
        ttl,
        headers,
        mandatory: !matches!(journey.route.delay, Delay::XDelayMs(_)),
        sender_declares_queue: matches!(journey.placement, Placement::Slot { .. }),
    }
}

/// An explanation for the operator, if one is found in a queue.
const BODY: &[u8] = br#"{"note":"sent by an order-timeout worker to test the way of its alarms; it names no order"}"#;

/// The id of a message, if it is a canary: by its properties `type` and `message_id`.
#[must_use]
pub fn read(message_type: Option<&str>, message_id: Option<&str>) -> Option<Uuid> {
    if message_type != Some(CANARY_TYPE) {
        return None;
    }
    // A foreign one with an invalid id is still a canary; it belongs to no path.
    Some(message_id.and_then(|id| Uuid::try_parse(id).ok()).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn paths(overrides: &[&str]) -> Paths {
        let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
        Paths::new(&Settings::load_with_environment(None, Default::default(), &overrides).unwrap(), &Kind::ORDER)
    }

    #[test]
    fn rings_and_lanes_have_paths() {
        let names: Vec<String> = paths(&[]).all().iter().map(|path| path.name.clone()).collect();
        let lanes = (0..4).map(|shard| format!("order.delay.30m.{shard}"));
        let fixed = [
            "order.due",
            "order.wheel.5s-22",
            "order.wheel.1m-15",
            "order.wheel.10m-9",
            "order.wheel.1h-9",
            "order.wheel.6h-6",
            "order.wheel.24h-8",
        ]
        .map(str::to_owned);
        assert_eq!(names, fixed.into_iter().chain(lanes).collect::<Vec<_>>());
        let delayed = paths(&["delay.strategy=delayed-exchange"]);
        assert_eq!(delayed.all().iter().map(|path| &*path.name).collect::<Vec<_>>(), ["order.due", "order.delayed"]);
    }

    #[test]
    fn paths_of_kind_end_in_its_queue() {
        let mut settings = Settings::defaults();
        let kind = Kind::new("acceptance").unwrap();
        settings.kinds.entry(kind.clone()).or_default().lanes = vec!["5m".parse().unwrap()];
        let (paths, now) = (Paths::new(&settings, &kind), Timestamp::from_unix_micros(1_700_000_000_000_000));
        let journey = |name: &str| paths.journey(paths.find(name).unwrap(), now);
        let direct = journey("order.due (acceptance)");
        assert_eq!((&*direct.queue, &*direct.route.routing_key), ("order.timeout.acceptance", "due.acceptance"));
        let ring = journey("order.wheel.5s-22 (acceptance)");
        assert_eq!(ring.route.key_after_delay.as_deref(), Some("due.acceptance"));
        let lane = journey("order.delay.acceptance.5m.0");
        assert_eq!(lane.route.routing_key, "acceptance.5m.0");
        assert_eq!(paths.all().len(), 1 + 6 + 1);
    }

    #[test]
    fn canary_interval_covers_its_wait() {
        let paths = paths(&[]);
        let every = |name: &str, suspected| paths.find(name).unwrap().sent_every(suspected);
        assert_eq!(every("order.wheel.5s-22", false), REGULAR_INTERVAL);
        assert_eq!(every("order.wheel.5s-22", true), SUSPECTED_INTERVAL);
        assert_eq!(every("order.delay.30m.0", true), Duration::from_secs(30 * 60 - 20));
    }

    proptest! {
        /// The journey, the grace and half a second for the check are within ten seconds.
        #[test]
        fn finest_ring_answers_within_ten_seconds(micros in 0_i64..3_600_000_000) {
            let (paths, now) = (paths(&[]), Timestamp::from_unix_micros(1_700_000_000_000_000 + micros));
            let finest = paths.find("order.wheel.5s-22").unwrap();
            let journey = paths.journey(finest, now);
            prop_assert!(journey.wait >= AHEAD, "{:?}", journey.wait);
            prop_assert!(journey.wait + GRACE + Duration::from_secs(1) < Duration::from_secs(10), "{:?}", journey.wait);
            prop_assert!(journey.queue.starts_with("order.wheel.5s-22."));
            prop_assert_eq!(journey.route.delay, Delay::Ttl(journey.wait));
        }

        /// In the same slot as alarms that leave at that time, so that neither delays the other.
        #[test]
        fn canary_leaves_when_its_slot_does(micros in 0_i64..3_600_000_000) {
            let (paths, now) = (paths(&[]), Timestamp::from_unix_micros(1_700_000_000_000_000 + micros));
            let journey = paths.journey(paths.find("order.wheel.5s-22").unwrap(), now);
            // A slot expires `lead` before its unit of five seconds begins.
            let begins = (now + journey.wait + Duration::from_secs(20)).unix_micros();
            prop_assert!(begins.rem_euclid(5_000_000) < 1_000, "{begins}");
        }
    }

    fn sight(queues: &[(u32, u32)]) -> Sight {
        let seen = |(index, (ready, consumers)): (usize, &(u32, u32))| SeenQueue {
            name: format!("order.timeout.{index}"),
            ready: *ready,
            consumers: *consumers,
        };
        Sight { queues: queues.iter().enumerate().map(seen).collect() }
    }

    #[test]
    fn late_canary_is_judged_per_queue() {
        assert_eq!(judge_late(&sight(&[(0, 2)])), Late::Lost);
        assert_eq!(judge_late(&sight(&[(0, 0), (0, 1)])), Late::Lost);
        assert_eq!(judge_late(&sight(&[(0, 1), (3, 1)])), Late::Waits);
        let one_unread = sight(&[(5, 1), (7, 0)]);
        assert_eq!(judge_late(&one_unread), Late::Unread(&one_unread.queues[1]));
        assert!(why_unread(&one_unread.queues[1]).starts_with("7 messages are waiting in \"order.timeout.1\""));
    }

    #[test]
    fn properties_identify_canary() {
        let (paths, id) = (paths(&[]), Uuid::now_v7());
        let now = Timestamp::from_unix_micros(1_700_000_000_000_000);
        let message = outgoing(id, &paths.journey(&paths.all()[1], now), now);
        assert_eq!(read(Some(&message.message_type), Some(&message.message_id)), Some(id));
        assert!(message.mandatory && message.ttl.is_some());
        assert_eq!(read(Some(CANARY_TYPE), Some("no id")), Some(Uuid::nil()));
        assert_eq!(read(Some("order.timeout.v1"), Some(&message.message_id)), None);
        assert_eq!(read(None, None), None);
    }

    #[test]
    fn canary_is_not_read_as_alarm() {
        let fault = order_timeout_core::message::Alarm::read(BODY, None).unwrap_err();
        assert!(matches!(fault, order_timeout_core::message::Unreadable::NotTheShape(_)), "{fault}");
    }
}
