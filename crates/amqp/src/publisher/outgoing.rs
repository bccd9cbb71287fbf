//! A message to be published, and its AMQP properties.
//!
//! No I/O. Refuses what AMQP cannot express, because lapin would panic or the broker would close the channel.

use std::time::Duration;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use order_timeout_core::message::{AMQP_MAX_SHORT_STRING_BYTES, HEADER_TRACEPARENT, LONGEST_TTL};

use super::PublishError;

/// AMQP delivery mode 2: written to disk. A dead letter keeps the mode of its message.
const PERSISTENT: u8 = 2;

/// A message to be published.
#[derive(Debug, Clone, PartialEq)]
pub struct Outgoing {
    /// At most 255 bytes.
    pub exchange: String,
    /// At most 255 bytes.
    pub routing_key: String,
    /// In the form that `content_type` names.
    pub body: Vec<u8>,
    /// Identifies the message to its receiver, and its return to the publisher. Unique within a window; at most 255
    /// bytes.
    pub message_id: String,
    /// AMQP property `type`; at most 255 bytes.
    pub message_type: String,
    /// AMQP property `content-type`, such as `application/json`.
    pub content_type: &'static str,
    /// AMQP property `timestamp`: seconds since the Unix epoch.
    pub timestamp_s: u64,
    /// AMQP property `expiration`, in whole milliseconds, rounded down; at most [`LONGEST_TTL`]. `None` sets none.
    pub ttl: Option<Duration>,
    /// Names of at most 255 bytes, and their values. Of two with one name the last counts.
    pub headers: Vec<(&'static str, AMQPValue)>,
    /// Whether a message that reaches no queue is returned, and so fails with [`PublishError::Unroutable`].
    pub mandatory: bool,
    /// Whether the sender itself declares the queue that is missing if it reaches none, so that [`MissingRoute`] need
    /// not say so.
    ///
    /// [`MissingRoute`]: super::MissingRoute
    pub sender_declares_queue: bool,
}

impl Outgoing {
    /// The W3C trace context among its headers.
    #[must_use]
    pub fn traceparent(&self) -> Option<String> {
        self.text_header(HEADER_TRACEPARENT)
    }

    /// A header whose value is text.
    #[must_use]
    pub fn text_header(&self, name: &str) -> Option<String> {
        let (_, value) = self.headers.iter().find(|(own, _)| *own == name)?;
        match value {
            AMQPValue::LongString(text) => Some(text.to_string()),
            _ => None,
        }
    }
}

/// AMQP's short strings hold 255 bytes; lapin panics on a longer one.
pub(super) fn short(what: &'static str, text: &str) -> Result<ShortString, PublishError> {
    ShortString::try_new(text).map_err(|_| {
        let why = format!("it has {} bytes, more than the {AMQP_MAX_SHORT_STRING_BYTES} that AMQP allows", text.len());
        PublishError::Unsendable { what, why }
    })
}

/// The AMQP properties of a message.
///
/// # Errors
/// [`PublishError::Unsendable`] if AMQP cannot express one of them.
///
/// # Panics
/// If `content_type` or the name of a header has more than 255 bytes.
pub fn properties(message: &Outgoing) -> Result<BasicProperties, PublishError> {
    let mut properties = BasicProperties::default()
        .with_delivery_mode(PERSISTENT)
        .with_content_type(message.content_type.into())
        .with_type(short("type", &message.message_type)?)
        .with_message_id(short("message id", &message.message_id)?)
        .with_timestamp(message.timestamp_s)
        .with_app_id("order-timeout".into());
    if let Some(ttl) = message.ttl {
        properties = properties.with_expiration(expiration(ttl)?);
    }
    if !message.headers.is_empty() {
        let mut table = FieldTable::default();
        for (key, value) in &message.headers {
            table.insert((*key).into(), value.clone());
        }
        properties = properties.with_headers(table);
    }
    Ok(properties)
}

/// A decimal string of milliseconds. An invalid one would close the channel and so fail the other messages of the
/// window.
fn expiration(ttl: Duration) -> Result<ShortString, PublishError> {
    if ttl > LONGEST_TTL {
        let [ttl, longest] = [ttl, LONGEST_TTL].map(|duration| duration.as_millis());
        let why = format!("{ttl} ms are more than the {longest} for which RabbitMQ keeps a message");
        return Err(PublishError::Unsendable { what: "expiration", why });
    }
    short("expiration", &ttl.as_millis().to_string())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn message() -> Outgoing {
        Outgoing {
            exchange: "order.events".into(),
            routing_key: "order.closed".into(),
            body: Vec::new(),
            message_id: "1".into(),
            message_type: "order.closed.v1".into(),
            content_type: "application/json",
            timestamp_s: 0,
            ttl: None,
            headers: Vec::new(),
            mandatory: false,
            sender_declares_queue: false,
        }
    }

    #[test]
    fn property_beyond_amqp_limit_is_named() {
        let long = "ü".repeat(128);
        for (what, outgoing) in [
            ("type", Outgoing { message_type: long.clone(), ..message() }),
            ("message id", Outgoing { message_id: long.clone(), ..message() }),
            ("expiration", Outgoing { ttl: Some(Duration::MAX), ..message() }),
            ("expiration", Outgoing { ttl: Some(LONGEST_TTL + Duration::from_millis(1)), ..message() }),
        ] {
            let fault = properties(&outgoing).unwrap_err().to_string();
            assert!(fault.starts_with(&format!("its {what} cannot be sent: ")), "{fault}");
        }
        assert!(properties(&Outgoing { ttl: Some(LONGEST_TTL), message_id: "x".repeat(255), ..message() }).is_ok());
    }
}
