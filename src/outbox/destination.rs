//! Where the messages of an outbox go: to the broker, or to the shop's webhook.
//!
//! Sends each message once; `relay.rs` knows what to send again.

use std::time::Duration;

use order_timeout_amqp::publisher::{ConfirmedPublisher, Outgoing, PublishError};
use order_timeout_core::message::HEADER_TRACEPARENT;
use order_timeout_providers::webhook::{Event, Webhook, WebhookError};

/// The header of a request with the event's kind; as a header of a message it goes to no broker.
pub(super) const HEADER_KIND: &str = "order-timeout-kind";
const HEADER_KEY: &str = "order-timeout-key";
const HEADER_TYPE: &str = "order-timeout-type";

/// The receiver of an outbox's messages.
#[derive(Debug)]
pub(super) enum Destination {
    Broker(ConfirmedPublisher),
    Webhook(Box<Webhook>),
}

/// Why a message is not known to have arrived.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The broker did not confirm it.
    #[error(transparent)]
    Broker(#[from] PublishError),
    /// The webhook did not accept it.
    #[error(transparent)]
    Webhook(#[from] WebhookError),
}

impl SendError {
    /// Whether this message was refused individually, so that others may be accepted.
    #[must_use]
    pub fn is_message_specific(&self) -> bool {
        match self {
            Self::Broker(fault) => fault.is_message_specific(),
            Self::Webhook(fault) => fault.is_event_specific(),
        }
    }

    /// How long the receiver asks to be left alone with this message.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Broker(_) => None,
            Self::Webhook(fault) => fault.retry_after(),
        }
    }
}

impl Destination {
    /// Sends messages; returns one result for each, in their order.
    pub async fn send_all(&self, messages: Vec<Outgoing>) -> Vec<Result<(), SendError>> {
        fn own<E: Into<SendError>>(results: Vec<Result<(), E>>) -> Vec<Result<(), SendError>> {
            results.into_iter().map(|result| result.map_err(Into::into)).collect()
        }
        match self {
            Self::Broker(confirmed) => own(confirmed.publish_all(messages).await),
            Self::Webhook(webhook) => own(webhook.send_all(messages.into_iter().map(event).collect()).await),
        }
    }

    /// As traces name it (OpenTelemetry, `messaging.system`).
    pub fn system(&self) -> &'static str {
        match self {
            Self::Broker(_) => "rabbitmq",
            Self::Webhook(_) => "webhook",
        }
    }
}

fn event(message: Outgoing) -> Event {
    let mut headers = Vec::new();
    for name in [HEADER_TRACEPARENT, HEADER_KIND] {
        headers.extend(message.text_header(name).map(|text| (name, text)));
    }
    headers.push((HEADER_KEY, message.routing_key));
    headers.push((HEADER_TYPE, message.message_type));
    Event { id: message.message_id, headers, body: message.body }
}
