//! Traces: what becomes of an order is in the trace of the code that scheduled it, as a collector receives it by OTLP.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use order_timeout_client::postgres::{NewAlarm, schedule_all};
use order_timeout_testkit::{Order, RunningWorker, TestEnv, wait_for};
use prost::Message;
use tokio::net::TcpListener;

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SPAN: &str = "00f067aa0ba902b7";

/// A collector: keeps the spans that it receives.
#[derive(Clone, Default)]
struct Collector {
    /// How long it takes to answer.
    answers_after: Duration,
    spans: Arc<Mutex<Vec<Span>>>,
    paths: Arc<Mutex<Vec<String>>>,
}

impl Collector {
    /// Returns the address at which it receives.
    async fn start(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let collector = self.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let collector = collector.clone();
                let service = service_fn(move |request| {
                    let collector = collector.clone();
                    async move { Ok::<_, std::convert::Infallible>(collector.receive(request).await) }
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        format!("http://{address}")
    }

    async fn receive(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        self.paths.lock().unwrap().push(request.uri().path().to_owned());
        let body = request.into_body().collect().await.unwrap().to_bytes();
        tokio::time::sleep(self.answers_after).await;
        let received = ExportTraceServiceRequest::decode(body).unwrap();
        let scopes = received.resource_spans.into_iter().flat_map(|resource| resource.scope_spans);
        self.spans.lock().unwrap().extend(scopes.flat_map(|scope| scope.spans));
        Response::new(Full::default())
    }

    fn spans(&self) -> Vec<Span> {
        let mut spans = self.spans.lock().unwrap().clone();
        spans.sort_by_key(|span| span.start_time_unix_nano);
        spans
    }

    /// How many orders have a span of this name.
    fn orders_with(&self, name: &str) -> usize {
        let spans = self.spans.lock().unwrap();
        let named = spans.iter().filter(|span| span.name == name);
        named.map(|span| attribute(span, "order_timeout.order_id")).collect::<HashSet<_>>().len()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A span's attribute, as text.
fn attribute(span: &Span, key: &str) -> Option<String> {
    let found = span.attributes.iter().find(|attribute| attribute.key == key)?;
    match found.value.clone()?.value? {
        Value::StringValue(text) => Some(text),
        Value::IntValue(number) => Some(number.to_string()),
        Value::DoubleValue(number) => Some(number.to_string()),
        _ => None,
    }
}

async fn schedule(env: &TestEnv, order: &Order, traceparent: &str) {
    let mut connection = env.pool.acquire().await.unwrap();
    let alarm = NewAlarm::new(order.id.to_string(), order.deadline).traceparent(traceparent);
    alarm.schedule(&mut connection).await.unwrap();
}

fn sampled() -> String {
    format!("00-{TRACE}-{SPAN}-01")
}

#[test]
fn order_is_traced_from_schedule_to_announcement() {
    TestEnv::builder().run(async |env| {
        let collector = Collector::default();
        let mut settings = env.settings.clone();
        settings.traces.endpoint = collector.start().await;
        let worker = RunningWorker::start(settings).await;
        let [traced, unsampled, untraced] =
            <[Order; 3]>::try_from(env.orders(3, Duration::from_secs(6)).await).unwrap();
        schedule(&env, &traced, &sampled()).await;
        schedule(&env, &unsampled, &format!("00-{TRACE}-{SPAN}-00")).await;
        env.write_alarm(&untraced).await;
        wait_for("the closes", async || env.closed().await == 3).await;
        wait_for("the events", async || {
            env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NULL").await == 0
        })
        .await;
        worker.stop().await;

        let spans = collector.spans();
        let mut steps: Vec<_> = spans.iter().map(|span| span.name.as_str()).collect();
        // Received once for each ring of the wheel.
        steps.dedup();
        assert_eq!(steps, ["schedule", "deliver", "close", "announce"]);
        assert!(collector.paths.lock().unwrap().iter().all(|path| path == "/v1/traces"));
        for span in &spans {
            assert_eq!((hex(&span.trace_id), hex(&span.parent_span_id)), (TRACE.to_owned(), SPAN.to_owned()));
            assert_eq!(attribute(span, "order_timeout.order_id"), Some(traced.id.to_string()), "{}", span.name);
            assert!(span.start_time_unix_nano <= span.end_time_unix_nano);
        }
        let close = spans.iter().find(|span| span.name == "close").unwrap();
        assert_eq!(attribute(close, "order_timeout.outcome").as_deref(), Some("closed"));
        assert_eq!(attribute(close, "order_timeout.path").as_deref(), Some("alarm"));
        let deadline_ns = u64::try_from(traced.deadline.unix_micros()).unwrap() * 1_000;
        assert!(spans[1].start_time_unix_nano < deadline_ns && close.end_time_unix_nano >= deadline_ns);
    });
}

#[test]
fn missing_collector_delays_no_order() {
    TestEnv::builder().run(async |env| {
        let mut settings = env.settings.clone();
        // A port that nothing listens at.
        settings.traces.endpoint = "http://127.0.0.1:1".to_owned();
        let worker = RunningWorker::start(settings).await;
        let orders = env.orders(20, Duration::from_secs(6)).await;
        for order in &orders {
            schedule(&env, order, &sampled()).await;
        }
        wait_for("the closes", async || env.closed().await == 20).await;
        env.assert_closed_by_alarms().await;
        worker.stop().await;
    });
}

/// A burst has more spans than the SDK's own queue holds, and faster than this collector takes them.
#[test]
fn slow_collector_loses_no_span() {
    const ORDERS: usize = 3_000;
    TestEnv::builder().run(async |env| {
        let collector = Collector { answers_after: Duration::from_millis(200), ..Collector::default() };
        let mut settings = env.settings.clone();
        settings.traces.endpoint = collector.start().await;
        let worker = RunningWorker::start(settings).await;
        let orders = env.orders(ORDERS, Duration::from_secs(15)).await;
        let mut connection = env.pool.acquire().await.unwrap();
        let alarm = |order: &Order| NewAlarm::new(order.id.to_string(), order.deadline).traceparent(sampled());
        schedule_all(&mut connection, orders.iter().map(alarm)).await.unwrap();
        wait_for("the spans", async || {
            ["schedule", "deliver", "close", "announce"].iter().all(|name| collector.orders_with(name) == ORDERS)
        })
        .await;
        worker.stop().await;
    });
}
