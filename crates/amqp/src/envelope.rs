//! The message of an alarm: its route into the broker, and its properties.
//!
//! Every publisher of alarms uses it (the client's, and the worker's when it relays, rearms or releases one), so that
//! an alarm has one form on the wire. Decides nothing.

use std::time::Duration;

use lapin::types::AMQPValue;
use uuid::Uuid;

use crate::publisher::Outgoing;
use crate::topology::Names;
use order_timeout_core::alarm::DeliveredAlarm;
use order_timeout_core::delay::Placement;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::{
    ALARM_TYPE, CONTENT_TYPE, HEADER_ATTEMPT, HEADER_EARLY_RETURNS, HEADER_RETURNS_AT, HEADER_TRACEPARENT,
};
use order_timeout_core::order::Timestamp;

/// The longest delay that the plugin for delayed messages can hold, in milliseconds (2³² − 1); a longer one would fire
/// at once.
pub const LONGEST_X_DELAY_MS: u64 = 4_294_967_295;

/// The route of one alarm into the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// One of the exchanges in [`Names`].
    pub exchange: String,
    /// The inbox is a fanout, for which the key has no effect.
    pub routing_key: String,
    /// Header `CC`: a second key, which routes the message when it is dead-lettered. RabbitMQ's extension: "sender-selected
    /// distribution".
    pub key_after_delay: Option<String>,
    /// Goes into the message's properties or headers.
    pub delay: Delay,
}

/// What makes the alarm wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delay {
    /// Nothing: its queue has a consumer.
    None,
    /// The queue, by the message's TTL.
    Ttl(Duration),
    /// The delayed exchange, by header `x-delay`; at most [`LONGEST_X_DELAY_MS`].
    XDelayMs(u64),
}

impl Route {
    /// The route of an alarm of this kind to this place.
    #[must_use]
    pub fn to(placement: &Placement, kind: &Kind, names: &Names) -> Self {
        let route = |exchange, routing_key, delay| Self { exchange, routing_key, key_after_delay: None, delay };
        match placement {
            Placement::Due => route(names.due(), Names::due_key(kind), Delay::None),
            Placement::Inbox => route(names.schedule(), "schedule".to_owned(), Delay::None),
            Placement::Lane { lane, shard, ttl } => {
                route(names.delay(), Names::lane_key(kind, lane, *shard), Delay::Ttl(*ttl))
            }
            // All kinds share the slot, so it cannot know the key with which the alarm leaves it.
            Placement::Slot { ring, slot, ttl } => Self {
                key_after_delay: Some(Names::due_key(kind)),
                ..route(names.wheel(), Names::slot_key(ring, *slot), Delay::Ttl(*ttl))
            },
            // For as long as the plugin can hold it: the worker publishes it again when it returns early.
            Placement::DelayedExchange(wait) => {
                let delay_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).min(LONGEST_X_DELAY_MS);
                route(names.delayed(), Names::due_key(kind), Delay::XDelayMs(delay_ms))
            }
        }
    }
}

/// The header that the delayed exchange reads, as a signed 64-bit integer.
#[must_use]
pub fn x_delay(delay_ms: u64) -> (&'static str, AMQPValue) {
    ("x-delay", AMQPValue::LongLongInt(i64::try_from(delay_ms).unwrap_or(i64::MAX)))
}

/// The header with a further routing key: an array of long strings, as RabbitMQ requires.
#[must_use]
pub fn carbon_copy(key: String) -> (&'static str, AMQPValue) {
    ("CC", AMQPValue::FieldArray(vec![AMQPValue::LongString(key.into())].into()))
}

/// The header with a W3C trace context, of alarms and of events.
#[must_use]
pub fn traceparent(context: String) -> (&'static str, AMQPValue) {
    text_header(HEADER_TRACEPARENT, context)
}

/// A header of text.
#[must_use]
pub fn text_header(name: &'static str, value: String) -> (&'static str, AMQPValue) {
    (name, AMQPValue::LongString(value.into()))
}

/// Makes a new message with an id of its own: without `x-death` and old `x-delay`, so that the broker cannot take it
/// for a routing cycle. `now`: the time of an alarm that was never published before.
#[must_use]
pub fn address(alarm: DeliveredAlarm, route: Route, now: Timestamp) -> Outgoing {
    let DeliveredAlarm { alarm, attempt, first_published_at, traceparent: context, returns } = alarm;
    let mut headers = vec![(HEADER_ATTEMPT, AMQPValue::LongInt(i32::try_from(attempt).unwrap_or(i32::MAX)))];
    headers.extend(route.key_after_delay.map(carbon_copy));
    let mut ttl = None;
    match route.delay {
        Delay::None => {}
        Delay::Ttl(duration) => ttl = Some(duration),
        Delay::XDelayMs(delay_ms) => headers.push(x_delay(delay_ms)),
    }
    if let Some(due_at) = returns.due_at {
        headers.push((HEADER_RETURNS_AT, AMQPValue::LongLongInt(due_at.unix_micros() / 1_000)));
    }
    if returns.early > 0 {
        let early = i32::try_from(returns.early).unwrap_or(i32::MAX);
        headers.push((HEADER_EARLY_RETURNS, AMQPValue::LongInt(early)));
    }
    headers.extend(context.map(traceparent));
    Outgoing {
        exchange: route.exchange,
        routing_key: route.routing_key,
        body: alarm.to_bytes(),
        message_id: Uuid::now_v7().to_string(),
        message_type: ALARM_TYPE.to_owned(),
        content_type: CONTENT_TYPE,
        // Of the alarm, not of this message: it limits how long a missing order is retried.
        timestamp_s: u64::try_from(first_published_at.unwrap_or(now).unix_micros() / 1_000_000).unwrap_or(0),
        ttl,
        headers,
        // The plugin does not route a message while it delays it, so a mandatory message would always be returned.
        mandatory: !matches!(route.delay, Delay::XDelayMs(_)),
        sender_declares_queue: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x_delay_is_capped_at_plugin_limit() {
        let delay_of = |wait| Route::to(&Placement::DelayedExchange(wait), &Kind::ORDER, &Names::new("order")).delay;
        assert_eq!(delay_of(Duration::from_secs(55)), Delay::XDelayMs(55_000));
        assert_eq!(delay_of(Duration::from_secs(90 * 86_400)), Delay::XDelayMs(4_294_967_295));
    }

    fn acceptance() -> Kind {
        Kind::new("acceptance").unwrap()
    }

    #[test]
    fn slot_route_carries_key_of_kind() {
        let slot = Placement::Slot { ring: "5s-22".into(), slot: 7, ttl: Duration::from_secs(1) };
        for (kind, key) in [(Kind::ORDER, "due"), (acceptance(), "due.acceptance")] {
            let route = Route::to(&slot, &kind, &Names::new("order"));
            assert_eq!((&*route.exchange, &*route.routing_key), ("order.wheel", "5s-22.07"));
            assert_eq!(route.key_after_delay.as_deref(), Some(key));
            assert_eq!(Route::to(&Placement::Due, &kind, &Names::new("order")).routing_key, key);
        }
    }

    #[test]
    fn lane_route_names_exchange_and_shard() {
        let ttl = Duration::from_secs(1);
        let (names, lane) = (Names::new("order"), Placement::Lane { lane: "30m".into(), shard: 3, ttl });
        let expected = Route {
            exchange: "order.delay".into(),
            routing_key: "30m.3".into(),
            key_after_delay: None,
            delay: Delay::Ttl(ttl),
        };
        assert_eq!(Route::to(&lane, &Kind::ORDER, &names), expected);
        let of_kind = Route::to(&lane, &acceptance(), &names);
        assert_eq!(of_kind, Route { routing_key: "acceptance.30m.3".into(), ..expected });
        let inbox = Route::to(&Placement::Inbox, &acceptance(), &names);
        assert_eq!((inbox.exchange.as_str(), inbox.delay), ("order.schedule", Delay::None));
    }
}
