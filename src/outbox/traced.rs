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
use crate::observe::traces::{Published, Step, Traces};

/// Empty unless traces are exported and a message carries a trace context.
#[derive(Debug, Default)]
pub(super) struct TracedBatch {
    /// With their places among those that are sent.
    messages: Vec<(usize, Published)>,
    /// The database's time when the first of them was read, and this machine's.
    read: Option<(Timestamp, Instant)>,
}

impl TracedBatch {
    /// Notes the message of this row, if it carries a trace context. `index` is its place among those that are sent;
    /// `system`: as traces name the receiver.
    ///
    /// # Errors
    /// sqlx's, if the row lacks a column of [`super::relay::OutboxTable::unsent`].
    pub fn note(
        &mut self,
        index: usize,
        row: &PgRow,
        message: &Outgoing,
        step: Step,
        system: &'static str,
    ) -> Result<(), sqlx::Error> {
        let Some(traceparent) = message.traceparent() else { return Ok(()) };
        if self.read.is_none() {
            let Timestamptz(now) = row.try_get("now")?;
            self.read = Some((now, Instant::now()));
        }
        let published = Published {
            step,
            system,
            traceparent,
            kind: row.try_get("kind")?,
            // An event of a shop's own statement may name no order.
            order_id: row.try_get::<Option<String>, _>("order_id")?.unwrap_or_default(),
            message_type: message.message_type.clone(),
            message_id: message.message_id.clone(),
            exchange: message.exchange.clone(),
        };
        self.messages.push((index, published));
        Ok(())
    }

    /// Exports those that were confirmed. `answers` has one entry for each message that was sent.
    pub fn export(self, traces: &Traces, answers: &[Result<(), SendError>]) {
        let Some((began, read_at)) = self.read else { return };
        let ended = began + read_at.elapsed();
        for (index, message) in self.messages {
            if matches!(answers.get(index), Some(Ok(()))) {
                traces.published(message, began, ended);
            }
        }
    }
}
