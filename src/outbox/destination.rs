//! Where the messages of an outbox go: to the broker, to the shop's webhook, or to listeners on a channel of Postgres.
//!
//! Sends each message once; `relay.rs` knows what to send again.

use std::time::Duration;

use order_timeout_amqp::publisher::{ConfirmedPublisher, Outgoing, PublishError};
use order_timeout_core::message::HEADER_TRACEPARENT;
use order_timeout_providers::webhook::{Event, Webhook, WebhookError};
use serde::Serialize;
use serde_json::value::RawValue;

use crate::postgres::Database;

/// The header of a request with the event's kind; as a header of a message it goes to no broker.
pub(super) const HEADER_KIND: &str = "order-timeout-kind";
const HEADER_KEY: &str = "order-timeout-key";
const HEADER_TYPE: &str = "order-timeout-type";

/// NOTIFY refuses payloads of 8000 bytes and more (PostgreSQL documentation, NOTIFY). The rest of the message takes some
/// hundred.
const LONGEST_NOTIFIED_BYTES: usize = 7_000;

/// The receiver of an outbox's messages.
#[derive(Debug)]
pub(super) enum Destination {
    Broker(ConfirmedPublisher),
    Webhook(Box<Webhook>),
    /// The sessions that listen on this channel.
    Channel(Database, String),
    /// None: the messages stay in their outbox.
    Nowhere,
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
    ///
    /// # Errors
    /// sqlx's, if the database did not take a batch of notifications.
    pub async fn send_all(&self, messages: Vec<Outgoing>) -> Result<Vec<Result<(), SendError>>, sqlx::Error> {
        fn own<E: Into<SendError>>(results: Vec<Result<(), E>>) -> Vec<Result<(), SendError>> {
            results.into_iter().map(|result| result.map_err(Into::into)).collect()
        }
        Ok(match self {
            Self::Broker(confirmed) => own(confirmed.publish_all(messages).await),
            Self::Webhook(webhook) => own(webhook.send_all(messages.into_iter().map(event).collect()).await),
            Self::Channel(database, channel) => {
                let count = messages.len();
                notify(database, channel, messages).await?;
                vec![Ok(()); count]
            }
            Self::Nowhere => Vec::new(),
        })
    }

    /// As traces name it (OpenTelemetry, `messaging.system`).
    pub fn system(&self) -> &'static str {
        match self {
            Self::Broker(_) => "rabbitmq",
            Self::Webhook(_) => "webhook",
            Self::Channel(..) | Self::Nowhere => "postgresql",
        }
    }
}

/// What a listener receives.
#[derive(Serialize)]
struct Notification {
    /// One event is notified at least once, always with the same id.
    id: String,
    r#type: String,
    routing_key: String,
    /// As Postgres prints it, with every digit of an amount. An event that is too long is announced without its payload,
    /// which is in its row.
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Box<RawValue>>,
}

fn notification(event: Outgoing) -> Result<String, sqlx::Error> {
    let Outgoing { message_id: id, message_type: r#type, routing_key, body, .. } = event;
    let json = |error: serde_json::Error| sqlx::Error::Decode(error.into());
    let is_short = body.len() <= LONGEST_NOTIFIED_BYTES;
    let payload = is_short.then(|| serde_json::from_slice(&body)).transpose().map_err(json)?;
    serde_json::to_string(&Notification { id, r#type, routing_key, payload }).map_err(json)
}

async fn notify(database: &Database, channel: &str, events: Vec<Outgoing>) -> Result<(), sqlx::Error> {
    if events.is_empty() {
        return Ok(());
    }
    let texts = events.into_iter().map(notification).collect::<Result<Vec<_>, _>>()?;
    let notify = sqlx::query("SELECT pg_notify($1, event) FROM unnest($2::text[]) AS event");
    let notify = notify.bind(channel).bind(texts);
    database.run(async |connection| notify.execute(connection).await).await.map(drop)
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
