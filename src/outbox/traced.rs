//! Steps 1 and 6, traced: the messages of one batch that carry a trace context: what a relay publishes becomes a span in that trace.
//!
//! Reads rows and messages; sends and changes nothing.

use std::time::Instant;

use order_timeout_amqp::publisher::Outgoing;
use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::order::Timestamp;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::destination::SendError;
use crate::observe::traces::{Outboxed, Published, Traces};

/// Empty unless traces are exported and a message carries a trace context.
#[derive(Debug, Default)]
pub(super) struct TracedBatch {
    messages: Vec<TracedMessage>,
    /// The database's time when the first of them was read, and this machine's.
    read: Option<(Timestamp, Instant)>,
}

#[derive(Debug)]
struct TracedMessage {
    /// Its place in the batch.
    index: usize,
    traceparent: String,
    kind: String,
    order_id: String,
    message_type: String,
    message_id: String,
    exchange: String,
}

impl TracedBatch {
    /// Notes the message of this row, if it carries a trace context. `index` is its place among those that are sent.
    ///
    /// # Errors
    /// sqlx's, if the row lacks a column of [`super::relay::OutboxSql::unsent`].
    pub fn note(&mut self, index: usize, row: &PgRow, message: &Outgoing) -> Result<(), sqlx::Error> {
        let Some(traceparent) = message.traceparent() else { return Ok(()) };
        if self.read.is_none() {
            let Timestamptz(now) = row.try_get("now")?;
            self.read = Some((now, Instant::now()));
        }
        self.messages.push(TracedMessage {
            index,
            traceparent,
            kind: row.try_get("kind")?,
            // An event of a shop's own statement may name no order.
            order_id: row.try_get::<Option<String>, _>("order_id")?.unwrap_or_default(),
            message_type: message.message_type.clone(),
            message_id: message.message_id.clone(),
            exchange: message.exchange.clone(),
        });
        Ok(())
    }

    /// Exports those that were confirmed. `system`: as traces name the receiver. `answers` has one entry for each message that was sent.
    pub fn export(self, from: Outboxed, system: &'static str, traces: &Traces, answers: &[Result<(), SendError>]) {
        let Some((began, read_at)) = self.read else { return };
        let ended = began + read_at.elapsed();
        for message in self.messages.iter().filter(|message| matches!(answers.get(message.index), Some(Ok(())))) {
            let TracedMessage { traceparent, kind, order_id, message_type, message_id, exchange, .. } = message;
            traces.published(
                &Published { from, system, traceparent, kind, order_id, message_type, message_id, exchange },
                began,
                ended,
            );
        }
    }
}
