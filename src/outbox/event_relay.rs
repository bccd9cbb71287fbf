//! Step 6, ANNOUNCE: events from the outbox to `order.events`, to the shop's webhook, or to listeners in Postgres, then marked
//! as sent.
//!
//! At least once, under one message id per event. `relay.rs` empties an outbox.

use std::collections::HashMap;
use std::time::Duration;

use order_timeout_amqp::envelope;
use order_timeout_amqp::publisher::{ConfirmedPublisher, Outgoing};
use order_timeout_amqp::topology::Names;
use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::message::CONTENT_TYPE;
use order_timeout_providers::webhook::{self, Webhook};
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use crate::outbox::destination::{Destination, HEADER_KIND};
use crate::outbox::relay::{Outbox, OutboxTable, RelayError, Relayed};
use crate::outbox::trace_contexts::{OrderOfKind, TraceContexts};
use crate::postgres::Database;

const TABLE: OutboxTable = OutboxTable {
    name: "event_outbox",
    // Every try gives every other queue that is bound for the event one more copy: three within the first half minute,
    // then one every five minutes.
    pauses_s: &[1.0, 30.0, 120.0, 300.0],
    is_paced: true,
    // Limited by bytes as well as by rows, because events of a shop's own statement could make a batch of half a gigabyte.
    // Stored bytes are known without unpacking: 256 KiB, a thousand of our own events. Data that Postgres has compressed
    // may be 255 times as large (LZ4's limit), 64 MiB. The first event is sent whatever its size.
    // statement_timestamp(): a volatile function could not bound an index scan.
    unsent: "SELECT id, routing_key, type, payload::text AS payload, payload ->> 'order_id' AS order_id, kind,
                    traceparent, created_at, refusals, found, clock_timestamp() AS now
             FROM (
                 SELECT *, count(*) OVER () AS found,
                        sum(pg_column_size(payload)) OVER (ORDER BY refusals = 0, created_at, id)
                            - pg_column_size(payload) AS ahead
                 FROM (
                     (SELECT id, routing_key, type, payload, kind, traceparent, created_at, refusals FROM event_outbox
                      WHERE sent_at IS NULL AND next_attempt_at = '-infinity' AND id <> ALL ($2::uuid[])
                      ORDER BY created_at, id LIMIT $1)
                     UNION ALL
                     (SELECT id, routing_key, type, payload, kind, traceparent, created_at, refusals FROM event_outbox
                      WHERE sent_at IS NULL AND next_attempt_at > '-infinity' AND next_attempt_at <= statement_timestamp()
                            AND id <> ALL ($2::uuid[])
                      ORDER BY next_attempt_at, created_at, id LIMIT $3)
                 ) AS oldest
             ) AS weighed
             WHERE ahead < 262144 ORDER BY refusals = 0, created_at, id",
};

/// Sends the events in `event_outbox`.
#[derive(Debug)]
pub struct EventRelay {
    /// The table, for what both outboxes have in common.
    pub outbox: Outbox,
    trace_contexts: TraceContexts,
    receiver: Receiver,
}

/// What the events are sent to.
#[derive(Debug, Clone)]
pub enum Receiver {
    /// The exchange of this name.
    Exchange(String),
    /// The webhook on this host.
    Webhook(String),
    /// The sessions that listen on this channel of Postgres; there is none if it is empty.
    Channel(String),
}

impl EventRelay {
    /// `batch_size` events at most are sent at once; sent ones are deleted after `keep`.
    #[must_use]
    pub fn new(
        database: Database,
        confirmed: ConfirmedPublisher,
        names: &Names,
        batch_size: usize,
        keep: Duration,
    ) -> Self {
        Self::to(Destination::Broker(confirmed), Receiver::Exchange(names.events()), database, batch_size, keep)
    }

    fn to(destination: Destination, receiver: Receiver, database: Database, batch_size: usize, keep: Duration) -> Self {
        let trace_contexts = TraceContexts::new(database.clone());
        Self { outbox: Outbox::new(database, destination, TABLE, batch_size, keep), trace_contexts, receiver }
    }

    /// Announces events on this channel of Postgres; if it is empty, they stay.
    #[must_use]
    pub fn by_notify(database: Database, channel: &str, batch_size: usize, keep: Duration) -> Self {
        let destination = match channel {
            "" => Destination::Nowhere,
            channel => Destination::Channel(database.clone(), channel.to_owned()),
        };
        Self::to(destination, Receiver::Channel(channel.to_owned()), database, batch_size, keep)
    }

    /// Sends events to a webhook, [`webhook::BATCH_SIZE`] of them at once, or `batch_size` if that is less.
    #[must_use]
    pub fn by_webhook(database: Database, webhook: Webhook, batch_size: usize, keep: Duration) -> Self {
        let receiver = Receiver::Webhook(webhook.host().to_owned());
        let size = batch_size.min(webhook::BATCH_SIZE);
        Self::to(Destination::Webhook(Box::new(webhook)), receiver, database, size, keep)
    }

    /// Sends one batch.
    ///
    /// # Errors
    /// As of [`Outbox::unsent`] and [`Outbox::send`].
    pub async fn round(&mut self) -> Result<Relayed, RelayError> {
        let unsent = self.outbox.unsent().await?;
        // A notification carries no trace context: only a span needs one.
        let contexts = match self.receiver {
            Receiver::Channel(_) if !self.outbox.is_traced() => HashMap::new(),
            _ => self.trace_contexts.of(&unsent).await?,
        };
        let receiver = &self.receiver;
        self.outbox.send(unsent, |row| message(receiver, &contexts, row).map(Some)).await
    }

    /// What the events are sent to.
    #[must_use]
    pub fn receiver(&self) -> &Receiver {
        &self.receiver
    }
}

fn message(receiver: &Receiver, contexts: &HashMap<OrderOfKind, String>, row: &PgRow) -> Result<Outgoing, sqlx::Error> {
    let id: Uuid = row.try_get("id")?;
    let Timestamptz(created_at) = row.try_get("created_at")?;
    let payload: String = row.try_get("payload")?;
    let (own, order_id): (Option<String>, Option<String>) = (row.try_get("traceparent")?, row.try_get("order_id")?);
    let kind: String = row.try_get("kind")?;
    let traceparent = own.or_else(|| contexts.get(&(order_id?, kind.clone())).cloned());
    let mut headers: Vec<_> = traceparent.map(envelope::traceparent).into_iter().collect();
    let exchange = match receiver {
        Receiver::Exchange(exchange) => exchange,
        Receiver::Webhook(host) => {
            headers.push(envelope::text_header(HEADER_KIND, kind));
            host
        }
        Receiver::Channel(channel) => channel,
    };
    Ok(Outgoing {
        exchange: exchange.to_owned(),
        routing_key: row.try_get("routing_key")?,
        body: payload.into_bytes(),
        message_id: id.to_string(),
        message_type: row.try_get("type")?,
        content_type: CONTENT_TYPE,
        timestamp_s: u64::try_from(created_at.unix_micros() / 1_000_000).unwrap_or(0),
        ttl: None,
        headers,
        // An event needs no listener.
        mandatory: false,
        sender_declares_queue: false,
    })
}
