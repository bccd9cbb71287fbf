//! Exports spans by OTLP over HTTP, from a thread of its own.
//!
//! Blocks its caller until the collector has answered, and repeats nothing: what the collector does not take is lost.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span as _, SpanKind, Tracer, TracerProvider};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{RetryPolicy, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{BatchConfigBuilder, BatchSpanProcessor, Sampler, SdkTracer, SdkTracerProvider};
use order_timeout_core::message::HEADER_TRACEPARENT;

use super::{AT_ONCE, Span, Step, TracesError, Value};
use crate::config::TracesSettings;

/// How long one request to the collector may take, which also delays the end of a stopping worker.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// The SDK's timer; a day is as long as never, because an export comes before.
const NEVER: Duration = Duration::from_secs(24 * 3_600);
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
        let exporter = exporter.with_retry_policy(RetryPolicy::disabled());
        let exporter = exporter.build().map_err(|error| TracesError::NotStarted(error.to_string()))?;
        // Neither the number of spans nor the time begins an export: `export` does, for those that it was given.
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(2 * AT_ONCE)
            .with_max_export_batch_size(2 * AT_ONCE)
            .with_scheduled_delay(NEVER)
            .build();
        let provider = SdkTracerProvider::builder()
            .with_span_processor(BatchSpanProcessor::builder(exporter).with_batch_config(batches).build())
            // The scheduling code decides, by the flag in its trace context. An invalid one is no parent: no span.
            .with_sampler(Sampler::ParentBased(Box::new(Sampler::AlwaysOff)))
            .with_resource(Resource::builder().with_service_name(settings.service_name.clone()).build())
            .build();
        let tracer = provider.tracer("order-timeout");
        Ok(Self { provider, tracer, propagator: TraceContextPropagator::new() })
    }

    /// Exports at most [`AT_ONCE`] spans; the error says why the collector did not take them.
    pub fn export(&self, spans: &[Span]) -> Result<(), String> {
        for span in spans {
            self.make(span);
        }
        self.provider.force_flush().map_err(|error| error.to_string())
    }

    fn make(&self, span: &Span) {
        let parent = self.parent(&span.traceparent);
        let (name, kind) = match span.step {
            Step::Schedule => ("schedule", SpanKind::Producer),
            Step::Deliver => ("deliver", SpanKind::Consumer),
            Step::Close => ("close", SpanKind::Client),
            Step::Announce => ("announce", SpanKind::Producer),
        };
        let named = [("order_timeout.kind", &span.kind), ("order_timeout.order_id", &span.order_id)];
        let named = named.into_iter().map(|(key, value)| KeyValue::new(key, value.clone()));
        let attributes = named.chain(span.attributes.iter().map(|(key, value)| match value {
            Value::Text(text) => KeyValue::new(*key, text.clone()),
            Value::Count(count) => KeyValue::new(*key, *count),
            Value::Number(number) => KeyValue::new(*key, *number),
        }));
        let builder = self.tracer.span_builder(name).with_kind(kind).with_start_time(SystemTime::from(span.began));
        let builder = builder.with_attributes(attributes.collect::<Vec<_>>());
        builder.start_with_context(&self.tracer, &parent).end_with_timestamp(span.ended.into());
    }

    fn parent(&self, traceparent: &str) -> Context {
        let carrier = HashMap::from([(HEADER_TRACEPARENT.to_owned(), traceparent.to_owned())]);
        self.propagator.extract_with_context(&Context::new(), &carrier)
    }

    pub fn finish(&self) {
        // Nothing is left to export.
        let _ended = self.provider.shutdown_with_timeout(REQUEST_TIMEOUT);
    }
}
