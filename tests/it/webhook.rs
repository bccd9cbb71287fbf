//! Without a broker, events go to the shop's webhook: signed, at least once under one id, each with a pause of its own.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use order_timeout::Settings;
use order_timeout::http::READYZ;
use order_timeout_testkit::figures::{get, serve_http};
use order_timeout_testkit::process::WorkerProcess;
use order_timeout_testkit::{RunningWorker, TIMEOUT, TestEnv, wait_for, wait_promised};
use serde_json::Value;
use tempfile::NamedTempFile;

use crate::look_ahead::without_broker;

const SECOND: Duration = Duration::from_secs(1);
const KEY: [u8; 32] = [7; 32];
const UNSENT: &str = "SELECT count(*) FROM event_outbox WHERE sent_at IS NULL";
/// How soon a cause must be shown, and withdrawn.
const NOTICED_WITHIN: Duration = Duration::from_secs(20);
/// A refused event waits for at most 38 s after its second refusal.
const SENT_AGAIN_WITHIN: Duration = Duration::from_secs(90);

/// A request that arrived.
#[derive(Debug, Clone)]
struct Received {
    headers: HashMap<String, String>,
    body: String,
}

impl Received {
    fn id(&self) -> &str {
        &self.headers["webhook-id"]
    }
}

#[derive(Debug, Default)]
struct State {
    received: Vec<Received>,
    /// What is answered to an event that contains this text; 0: nothing.
    statuses: HashMap<String, u16>,
    /// How long the body of each answer is.
    body_bytes: usize,
    is_closed: bool,
}

/// A receiver of events. Ends when dropped.
pub struct Receiver {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Receiver {
    pub fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap())
    }

    fn start_at(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let (address, state) = (listener.local_addr().unwrap(), Arc::<Mutex<State>>::default());
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let shared = shared.clone();
                if shared.lock().unwrap().is_closed {
                    return;
                }
                // An error ends this connection alone.
                std::thread::spawn(move || drop(answer(&stream.unwrap(), &shared)));
            }
        });
        Self { address, state }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn answer_with(&self, text: &str, status: u16) {
        self.state().statuses.insert(text.to_owned(), status);
    }

    fn accept_all(&self) {
        self.state().statuses.clear();
    }

    fn received(&self) -> Vec<Received> {
        self.state().received.clone()
    }

    /// How many requests were about an event with this text.
    fn count(&self, text: &str) -> usize {
        self.received().iter().filter(|received| received.body.contains(text)).count()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.state().is_closed = true;
        // So that it looks.
        drop(TcpStream::connect(self.address));
    }
}

fn answer(stream: &TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let (mut headers, mut line) = (HashMap::new(), String::new());
    reader.read_line(&mut line)?;
    assert_eq!(line, "POST /order-events/ HTTP/1.1\r\n");
    loop {
        line.clear();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let mut body = vec![0; headers["content-length"].parse().unwrap()];
    reader.read_exact(&mut body)?;
    let body = String::from_utf8(body).unwrap();
    let (status, body_bytes) = {
        let mut state = state.lock().unwrap();
        let status = state.statuses.iter().find(|(text, _)| body.contains(*text)).map_or(204, |(_, status)| *status);
        state.received.push(Received { headers, body });
        (status, state.body_bytes)
    };
    if status == 0 {
        // Until the client gives up.
        return reader.read_line(&mut line).map(drop);
    }
    let head =
        format!("HTTP/1.1 {status} x\r\nlocation: /\r\ncontent-length: {body_bytes}\r\nconnection: close\r\n\r\n");
    (&mut &*stream).write_all(&[head.as_bytes(), &vec![b' '; body_bytes]].concat())
}

/// Settings without a broker that announce to this address, and the file with their key.
pub fn announcing_to(settings: &Settings, address: SocketAddr) -> (Settings, NamedTempFile) {
    let key = NamedTempFile::new().unwrap();
    std::fs::write(key.path(), format!("whsec_{}\n", STANDARD.encode(KEY))).unwrap();
    let mut settings = without_broker(settings);
    settings.announce.webhook = format!("http://{address}/order-events/");
    settings.announce.webhook_key_file = key.path().display().to_string();
    (settings, key)
}

/// By another program than the worker's library.
fn signature(received: &Received) -> String {
    let signed = format!("{}.{}.{}", received.id(), received.headers["webhook-timestamp"], received.body);
    let key: String = KEY.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut openssl = Command::new("openssl");
    openssl.args(["dgst", "-sha256", "-mac", "HMAC", "-macopt", &format!("hexkey:{key}"), "-binary"]);
    let mut child = openssl.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(signed.as_bytes()).unwrap();
    format!("v1,{}", STANDARD.encode(child.wait_with_output().unwrap().stdout))
}

async fn is_degraded(worker: &RunningWorker, cause: &str, words: &str) -> bool {
    let (status, page) = get(worker, READYZ).await;
    let found = page.lines().find(|line| line.contains(&format!("degraded: {cause}: ")));
    status == 200 && found.is_some_and(|line| line.contains(words))
}

#[test]
fn webhook_gets_each_signed_event_once() {
    TestEnv::builder().run(async |env| {
        let receiver = Receiver::start();
        let (settings, _key) = announcing_to(&env.settings, receiver.address);
        let worker = RunningWorker::start(settings).await;
        let orders = env.orders(20, SECOND).await;
        wait_for("the events", async || receiver.received().len() >= 20).await;
        wait_for("the marks", async || env.count(UNSENT).await == 0).await;
        worker.stop().await;
        let received = receiver.received();
        assert_eq!(received.len(), 20);
        assert!(orders.iter().all(|order| receiver.count(&order.id.to_string()) == 1));
        for event in &received {
            let row = "SELECT payload::text FROM event_outbox WHERE id = $1";
            let id: uuid::Uuid = event.id().parse().unwrap();
            let body: String = sqlx::query_scalar(row).bind(id).fetch_one(&env.pool).await.unwrap();
            assert_eq!(event.body, body);
            let closed: Value = serde_json::from_str(&body).unwrap();
            assert_eq!(closed["closed_by"], "look_ahead");
            for (name, value) in [
                ("content-type", "application/json"),
                ("order-timeout-key", "order.closed"),
                ("order-timeout-type", "order.closed.v1"),
                ("order-timeout-kind", "order"),
            ] {
                assert_eq!(event.headers[name], value);
            }
            assert_eq!(event.headers["webhook-signature"], signature(event));
        }
    });
}

#[test]
fn status_decides_whatever_the_body_has() {
    TestEnv::builder().run(async |env| {
        let receiver = Receiver::start();
        receiver.answer_with("order_id", 200);
        receiver.state().body_bytes = 10 * 1024 * 1024;
        let (settings, _key) = announcing_to(&env.settings, receiver.address);
        let worker = RunningWorker::start(settings).await;
        env.order(SECOND).await;
        wait_for("the mark", async || {
            env.count("SELECT count(*) FROM event_outbox WHERE sent_at IS NOT NULL").await == 1
        })
        .await;
        worker.stop().await;
        assert_eq!(receiver.received().len(), 1);
    });
}

#[test]
fn trace_context_reaches_webhook() {
    TestEnv::builder().run(async |env| {
        let receiver = Receiver::start();
        let (settings, _key) = announcing_to(&env.settings, receiver.address);
        let worker = RunningWorker::start(settings).await;
        let order = env.order(SECOND).await;
        let context = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        sqlx::query("INSERT INTO alarm_outbox (order_id, deadline, traceparent) VALUES ($1, $2, $3)")
            .bind(order.id.to_string())
            .bind(time::OffsetDateTime::now_utc() + SECOND)
            .bind(context)
            .execute(&env.pool)
            .await
            .unwrap();
        wait_for("the event", async || !receiver.received().is_empty()).await;
        assert_eq!(receiver.received()[0].headers["traceparent"], context);
        worker.stop().await;
    });
}

#[test]
fn receiver_away_loses_no_event() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let away = Receiver::start();
        let address = away.address;
        drop(away);
        let (settings, _key) = announcing_to(&env.settings, address);
        let worker = RunningWorker::start(settings).await;
        let orders = env.orders(30, SECOND).await;
        wait_for("the closes", async || env.closed().await == 30).await;
        let why = "cannot be reached";
        wait_promised(NOTICED_WITHIN, "the cause", async || is_degraded(&worker, "relay_stalled", why).await).await;
        assert_eq!(env.count(UNSENT).await, 30);
        assert_eq!(env.count("SELECT count(*) FROM event_outbox WHERE refusals > 0").await, 0);

        let receiver = Receiver::start_at(address);
        wait_for("the marks", async || env.count(UNSENT).await == 0).await;
        assert!(orders.iter().all(|order| receiver.count(&order.id.to_string()) == 1));
        wait_promised(NOTICED_WITHIN, "no cause", async || !is_degraded(&worker, "relay_stalled", "").await).await;
        worker.stop().await;
    });
}

#[test]
fn refused_event_delays_no_other() {
    TestEnv::builder().settings(serve_http).run(async |env| {
        let receiver = Receiver::start();
        let (mut settings, _key) = announcing_to(&env.settings, receiver.address);
        settings.announce.webhook_timeout = 2 * SECOND;
        let refused = env.orders(4, SECOND).await;
        for (order, status) in refused.iter().zip([500, 410, 302, 0]) {
            receiver.answer_with(&order.id.to_string(), status);
        }
        let worker = RunningWorker::start(settings).await;
        let others = env.orders(30, SECOND).await;
        wait_for("the closes", async || env.closed().await == 34).await;
        wait_for("the others' marks", async || env.count(UNSENT).await == 4).await;
        assert!(others.iter().all(|order| receiver.count(&order.id.to_string()) >= 1));
        let why = "127.0.0.1 refuses events";
        wait_promised(NOTICED_WITHIN, "the cause", async || is_degraded(&worker, "events_refused", why).await).await;

        receiver.accept_all();
        wait_promised(SENT_AGAIN_WITHIN, "the marks", async || env.count(UNSENT).await == 0).await;
        let ids: HashSet<String> = receiver.received().iter().map(|event| event.id().to_owned()).collect();
        assert_eq!(ids.len(), 34, "one id for each event, however often it is sent");
        worker.stop().await;
    });
}

#[test]
fn killed_worker_sends_same_id_again() {
    TestEnv::builder().run(async |env| {
        let receiver = Receiver::start();
        let (settings, _key) = announcing_to(&env.settings, receiver.address);
        receiver.answer_with("order_id", 0);
        let worker = WorkerProcess::start(&settings);
        let order = env.order(SECOND).await.id.to_string();
        wait_for("the event", async || receiver.count(&order) > 0).await;
        worker.kill();
        assert_eq!(env.count(UNSENT).await, 1);
        let before = receiver.received().len();
        receiver.accept_all();
        let worker = WorkerProcess::start(&settings);
        wait_for("the mark", async || env.count(UNSENT).await == 0).await;
        let received = receiver.received();
        assert!(received.len() > before);
        assert!(received.iter().all(|event| event.id() == received[0].id()));
        assert_eq!(worker.terminate(TIMEOUT), 0);
    });
}
