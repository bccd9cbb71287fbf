//! The message of an alarm: its route into the broker, and its properties.
//!
//! Shared by the publisher and the rearmer, so that an alarm has one form on the wire. Decides nothing.

use std::time::Duration;

use lapin::types::AMQPValue;
use uuid::Uuid;

use crate::alarm::Returns;
use crate::confirm::Outgoing;
use crate::message::{
    ALARM_TYPE, Alarm, CONTENT_TYPE, HEADER_ATTEMPT, HEADER_EARLY_RETURNS, HEADER_RETURNS_AT, HEADER_TRACEPARENT,
};
use crate::order::Timestamp;
use crate::topology::{DUE_KEY, Names};

/// The longest delay that the plugin can hold, in milliseconds; a longer one would fire at once.
pub const LONGEST_X_DELAY_MS: u64 = 4_294_967_295;

/// The route of one alarm into the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    pub exchange: String,
    pub routing_key: String,
    pub delay: Delay,
}

/// What makes the alarm wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delay {
    /// Nothing: its queue has a consumer.
    None,
    /// The queue, by the message's TTL.
    Ttl(Duration),
    /// The delayed exchange, by header `x-delay`.
    XDelayMs(u64),
}

impl Route {
    /// Into the inbox: the worker publishes it into the wheel.
    #[must_use]
    pub fn inbox(names: &Names) -> Self {
        Self { exchange: names.arm(), routing_key: "arm".into(), delay: Delay::None }
    }

    /// Directly to the processing queue.
    #[must_use]
    pub fn due(names: &Names) -> Self {
        Self { exchange: names.due(), routing_key: DUE_KEY.into(), delay: Delay::None }
    }

    /// Into the delayed exchange for this long, or for as long as the plugin can hold it: the worker publishes it again
    /// when it returns early.
    #[must_use]
    pub fn delayed(names: &Names, wait: Duration) -> Self {
        let delay_ms = u64::try_from(wait.as_millis()).unwrap_or(u64::MAX).min(LONGEST_X_DELAY_MS);
        Self { exchange: names.delayed(), routing_key: DUE_KEY.into(), delay: Delay::XDelayMs(delay_ms) }
    }
}

/// The header that the delayed exchange reads.
#[must_use]
pub fn x_delay(delay_ms: u64) -> (&'static str, AMQPValue) {
    ("x-delay", AMQPValue::LongLongInt(i64::try_from(delay_ms).unwrap_or(i64::MAX)))
}

/// What a message says about an alarm besides its body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AlarmHeaders {
    /// Failures so far; re-arming does not count.
    pub attempt: u32,
    /// When the alarm, not this message, was first published: limits how long a missing order is retried.
    pub first_published_at: Timestamp,
    pub traceparent: Option<String>,
    pub returns: Returns,
}

/// Makes a new message: without `x-death` and old `x-delay`, so that the broker cannot take it for a routing cycle.
#[must_use]
pub fn address(alarm: &Alarm, route: Route, alarm_headers: AlarmHeaders) -> Outgoing {
    let mut headers =
        vec![(HEADER_ATTEMPT, AMQPValue::LongInt(i32::try_from(alarm_headers.attempt).unwrap_or(i32::MAX)))];
    let mut ttl = None;
    match route.delay {
        Delay::None => {}
        Delay::Ttl(duration) => ttl = Some(duration),
        Delay::XDelayMs(delay_ms) => headers.push(x_delay(delay_ms)),
    }
    if let Some(due_at) = alarm_headers.returns.due_at {
        headers.push((HEADER_RETURNS_AT, AMQPValue::LongLongInt(due_at.unix_micros() / 1_000)));
    }
    if alarm_headers.returns.early > 0 {
        let early = i32::try_from(alarm_headers.returns.early).unwrap_or(i32::MAX);
        headers.push((HEADER_EARLY_RETURNS, AMQPValue::LongInt(early)));
    }
    if let Some(traceparent) = alarm_headers.traceparent {
        headers.push((HEADER_TRACEPARENT, AMQPValue::LongString(traceparent.into())));
    }
    Outgoing {
        exchange: route.exchange,
        routing_key: route.routing_key,
        body: alarm.to_bytes(),
        message_id: Uuid::now_v7().to_string(),
        message_type: ALARM_TYPE.to_owned(),
        content_type: CONTENT_TYPE,
        timestamp_s: u64::try_from(alarm_headers.first_published_at.unix_micros() / 1_000_000).unwrap_or(0),
        ttl,
        headers,
        // The plugin does not route a message while it delays it, so a mandatory message would always be returned.
        mandatory: !matches!(route.delay, Delay::XDelayMs(_)),
    }
}
