//! Traces: what became of an order, as spans in the trace of the code that scheduled it (`traceparent`).
//!
//! Each span is a child of the scheduling code's own span, so schedule, deliver, close and announce are one trace, whichever
//! worker did them. An alarm without a trace context, or with one that is not sampled, has no span. No order waits for a
//! span: those that cannot be exported are dropped. `queue.rs` holds spans while closers are busy, `otlp.rs` exports them;
//! nothing here decides anything about an order.

#[cfg(feature = "otel")]
mod otlp;
mod queue;
#[cfg(not(feature = "otel"))]
mod without;

use std::borrow::Cow;
use std::sync::Arc;

use order_timeout_core::alarm::{Delivered, SourceQueue};
use order_timeout_core::engine::{Batch, BatchResult};
use order_timeout_core::order::{Outcome, Timestamp};

#[cfg(feature = "otel")]
use otlp::Exporter;
use queue::SpanQueue;
#[cfg(not(feature = "otel"))]
use without::Exporter;

use crate::config::TracesSettings;
use crate::give_way::GiveWay;

/// Spans that are exported at once, by one request to the collector.
const AT_ONCE: usize = 512;

/// Why traces cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum TracesError {
    /// The exporter cannot be started.
    #[error("traces cannot be exported: {0}")]
    NotStarted(String),
    /// This program was built without the feature `otel`.
    #[error(
        "this program was built without the feature `otel`; build it with that feature, or leave traces.endpoint empty"
    )]
    NotBuilt,
}

/// What a worker records of orders that are traced. Cheap to clone. Does nothing unless `traces.endpoint` is set.
#[derive(Debug, Clone, Default)]
pub struct Traces {
    queue: Option<Arc<SpanQueue>>,
}

/// A step that became a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The relay published the alarm, and the broker confirmed it.
    Schedule,
    /// A worker received the alarm.
    Deliver,
    /// A statement decided about the order.
    Close,
    /// The relay published the event, and the broker or the webhook confirmed it.
    Announce,
}

/// One span. Times are the database's.
#[derive(Debug)]
#[cfg_attr(not(feature = "otel"), expect(dead_code, reason = "without the feature nothing is exported"))]
struct Span {
    step: Step,
    traceparent: String,
    kind: String,
    order_id: String,
    began: Timestamp,
    ended: Timestamp,
    attributes: Vec<(&'static str, Value)>,
}

/// The value of a span's attribute.
#[derive(Debug, Clone, PartialEq)]
enum Value {
    Text(Cow<'static, str>),
    Count(i64),
    Number(f64),
}

/// A message that a relay has published.
#[derive(Debug)]
pub struct Published {
    /// Of an alarm or of an event.
    pub step: Step,
    /// What received it: `rabbitmq`, `webhook` or `postgresql`.
    pub system: &'static str,
    /// The trace context it carries.
    pub traceparent: String,
    /// The kind in its row.
    pub kind: String,
    /// The order in its row.
    pub order_id: String,
    /// Its type, as `order.closed`.
    pub message_type: String,
    /// Its message id.
    pub message_id: String,
    /// The exchange, the webhook's host, or the channel.
    pub exchange: String,
}

impl Traces {
    /// Starts to export, if an endpoint is set, while the closers that `give_way` sees are idle. To be called on a runtime.
    ///
    /// # Errors
    /// [`TracesError`] if the exporter cannot be started.
    pub(crate) fn start(settings: &TracesSettings, give_way: GiveWay) -> Result<Self, TracesError> {
        if settings.endpoint.is_empty() {
            return Ok(Self::default());
        }
        Exporter::start(settings).map(|exporter| Self { queue: Some(Arc::new(SpanQueue::start(exporter, give_way))) })
    }

    /// Whether spans are exported at all.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.queue.is_some()
    }

    /// The queue, if spans of this trace are exported.
    fn queue_of(&self, traceparent: &str) -> Option<&SpanQueue> {
        self.queue.as_deref().filter(|_| is_sampled(traceparent))
    }

    /// A relay has published a message between these times.
    pub fn published(&self, message: Published, began: Timestamp, ended: Timestamp) {
        let Some(queue) = self.queue_of(&message.traceparent) else { return };
        let attributes = vec![
            ("messaging.system", Value::Text(message.system.into())),
            ("messaging.destination.name", Value::Text(message.exchange.into())),
            ("messaging.message.id", Value::Text(message.message_id.into())),
            ("order_timeout.message_type", Value::Text(message.message_type.into())),
        ];
        let Published { step, traceparent, kind, order_id, .. } = message;
        queue.push(Span { step, traceparent, kind, order_id, began, ended, attributes });
    }

    /// A worker has received an alarm. `now` is the database's time.
    pub fn delivered(&self, delivered: &Delivered, now: Timestamp) {
        let Ok(alarm) = &delivered.content else { return };
        let Some(traceparent) = alarm.traceparent.as_deref() else { return };
        let Some(queue) = self.queue_of(traceparent) else { return };
        let mut attributes = vec![
            ("order_timeout.source", Value::Text(delivered.source.as_str().into())),
            ("order_timeout.attempt", Value::Count(alarm.attempt.into())),
        ];
        if delivered.source == SourceQueue::Timeout {
            attributes.push(("order_timeout.early_ms", Value::Number(ms_between(now, alarm.deadline()))));
        }
        queue.push(Span {
            step: Step::Deliver,
            traceparent: traceparent.to_owned(),
            kind: alarm.alarm.kind.as_str().to_owned(),
            order_id: alarm.order_id().as_str().to_owned(),
            began: now,
            ended: now,
            attributes,
        });
    }

    /// A statement has decided about a batch of orders between these times.
    pub fn decided(&self, batch: &Batch, answer: &BatchResult, began: Timestamp, ended: Timestamp) {
        if !self.is_on() {
            return;
        }
        for item in &batch.items {
            let Some(traceparent) = item.alarm.traceparent.as_deref() else { continue };
            let Some(queue) = self.queue_of(traceparent) else { continue };
            let order_id = item.alarm.order_id();
            let (outcome, deadline) = match answer {
                Err(fault) => (fault.as_str(), None),
                Ok(found) => match found.get(order_id) {
                    None => (Outcome::Unknown.as_str(), None),
                    Some(Err(fault)) => (fault.as_str(), None),
                    Some(Ok(found)) => (found.outcome.as_str(), found.deadline),
                },
            };
            let mut attributes = vec![
                ("order_timeout.outcome", Value::Text(outcome.into())),
                ("order_timeout.path", Value::Text(batch.by.as_str().into())),
                ("order_timeout.batch_size", Value::Count(i64::try_from(batch.items.len()).unwrap_or(i64::MAX))),
            ];
            if let Some(deadline) = deadline {
                attributes.push(("order_timeout.lateness_ms", Value::Number(ms_between(deadline, ended))));
            }
            queue.push(Span {
                step: Step::Close,
                traceparent: traceparent.to_owned(),
                kind: item.alarm.alarm.kind.as_str().to_owned(),
                order_id: order_id.as_str().to_owned(),
                began,
                ended,
                attributes,
            });
        }
    }

    /// Exports what is left. Waits for the collector, for four seconds at most.
    pub async fn finish(self) {
        if let Some(queue) = &self.queue {
            queue.finish().await;
        }
    }
}

/// Whether the code that scheduled keeps this trace: the last bit of the last two digits of a trace context of version 00 (W3C
/// Trace Context, "sampled"). Of a later version they stand in the same place.
fn is_sampled(traceparent: &str) -> bool {
    let flags = traceparent.get(53..55).and_then(|digits| u8::from_str_radix(digits, 16).ok());
    flags.is_some_and(|flags| flags & 1 == 1)
}

/// Negative if `later` is before `earlier`.
fn ms_between(earlier: Timestamp, later: Timestamp) -> f64 {
    later.unix_micros().saturating_sub(earlier.unix_micros()) as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_flag_says_sampled() {
        let context = |flags: &str| format!("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-{flags}");
        assert!(["01", "03", "ff"].iter().all(|flags| is_sampled(&context(flags))));
        assert!(["00", "02", "", "é"].iter().all(|flags| !is_sampled(&context(flags))));
    }
}
