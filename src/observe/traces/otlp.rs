//! Exports spans by OTLP over HTTP, from a thread of its own, in batches.
//!
//! Never blocks its callers: a full queue drops spans. Whether a trace is sampled is decided by the code that scheduled the
//! order: the flag in its trace context.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span as _, SpanKind, TraceContextExt, Tracer, TracerProvider};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracer, SdkTracerProvider};
use order_timeout_core::message::HEADER_TRACEPARENT;

use super::{Span, Step, TracesError, Value};
use crate::config::TracesSettings;

/// How long a stopping worker waits for the collector.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);
/// How long one request to the collector may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Where OTLP over HTTP takes spans, by its specification.
const SPANS_PATH: &str = "/v1/traces";

#[derive(Debug)]
pub(super) struct Exporter {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    propagator: TraceContextPropagator,
}

impl Exporter {
    pub fn start(settings: &TracesSettings) -> Result<Self, TracesError> {
        let endpoint = format!("{}{SPANS_PATH}", settings.endpoint.trim_end_matches('/'));
        let exporter = SpanExporter::builder().with_http().with_endpoint(endpoint).with_timeout(REQUEST_TIMEOUT);
        let exporter = exporter.build().map_err(|error| TracesError::NotStarted(error.to_string()))?;
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(exporter)
            // The scheduling code decides; a trace context is always there.
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::AlwaysOff)))
            .with_resource(Resource::builder().with_service_name(settings.service_name.clone()).build())
            .build();
        let tracer = provider.tracer("order-timeout");
        Ok(Self { provider, tracer, propagator: TraceContextPropagator::new() })
    }

    pub fn export(&self, span: Span<'_>) {
        let Some(parent) = self.sampled_parent(span.traceparent) else { return };
        let (name, kind) = match span.step {
            Step::Schedule => ("schedule", SpanKind::Producer),
            Step::Deliver => ("deliver", SpanKind::Consumer),
            Step::Close => ("close", SpanKind::Client),
            Step::Announce => ("announce", SpanKind::Producer),
        };
        let named = [("order_timeout.kind", span.kind), ("order_timeout.order_id", span.order_id)];
        let named = named.into_iter().map(|(key, value)| KeyValue::new(key, value.to_owned()));
        let attributes = named.chain(span.attributes.into_iter().map(|(key, value)| match value {
            Value::Text(text) => KeyValue::new(key, text),
            Value::Count(count) => KeyValue::new(key, count),
            Value::Number(number) => KeyValue::new(key, number),
        }));
        let builder = self.tracer.span_builder(name).with_kind(kind).with_start_time(SystemTime::from(span.began));
        let builder = builder.with_attributes(attributes.collect::<Vec<_>>());
        builder.start_with_context(&self.tracer, &parent).end_with_timestamp(span.ended.into());
    }

    /// `None` if the trace context is invalid or not sampled.
    fn sampled_parent(&self, traceparent: &str) -> Option<Context> {
        let carrier = HashMap::from([(HEADER_TRACEPARENT.to_owned(), traceparent.to_owned())]);
        let parent = self.propagator.extract_with_context(&Context::new(), &carrier);
        let is_sampled = parent.span().span_context().is_sampled();
        is_sampled.then_some(parent)
    }

    pub fn finish(&self) {
        // What is not exported by then is dropped, and the exporter has reported why.
        let _dropped = self.provider.shutdown_with_timeout(FINISH_TIMEOUT);
    }
}
