//! A payment service behind the HTTP contract of `docs/PROVIDERS.md`, on a local port: with a truth for each attempt,
//! with faults of single attempts, and with outages of the whole service.
//!
//! On a thread of its own, so that settings can name it before an environment exists. Checks no signature.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use order_timeout::config::Settings;
use order_timeout_core::kind::Kind;
use order_timeout_providers::ProviderSettings;
use order_timeout_providers::settings::{HttpSettings, LimitsSettings};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// What the service knows of an attempt. One that it was never told of is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Truth {
    /// It can be paid.
    Open,
    /// Its money was taken.
    Paid,
    /// It can never be paid.
    Closed,
}

/// How the service fails calls about an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It answers HTTP 500.
    Error,
    /// It never answers.
    Hang,
}

/// How the whole service fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outage {
    /// Its process is gone: connections end, and new ones are refused.
    Refusing,
    /// It accepts requests and does nothing with them until the outage is over. Then it carries them out, also those whose
    /// clients have given up.
    Hanging,
    /// It answers HTTP 500, and does nothing.
    Failing,
    /// Something in front of it answers HTTP 200 with a page of HTML.
    Html,
    /// It carries requests out, and the connection ends before the answer.
    LosingAnswers,
}

#[derive(Debug, Default)]
struct State {
    truths: HashMap<String, Truth>,
    faults: HashMap<String, Fault>,
    /// Every connection is closed without an answer.
    is_dead: bool,
    pause: Duration,
    asked: usize,
    cancelled: usize,
    load: LoadWatch,
    /// Each call that was carried out, with the state that was answered.
    answered: Vec<String>,
}

/// The load as the service sees it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SeenLoad {
    /// The most calls under way at a time, from the last byte of a request to the first of its answer.
    pub concurrency: usize,
    /// The most requests that arrived within any second.
    pub requests_per_s: usize,
}

#[derive(Debug, Default)]
struct LoadWatch {
    under_way: usize,
    /// The arrivals of the last second.
    arrivals: VecDeque<Instant>,
    most: SeenLoad,
}

impl LoadWatch {
    fn note_arrival(&mut self, now: Instant) {
        self.under_way += 1;
        self.arrivals.push_back(now);
        while self.arrivals.front().is_some_and(|first| now.duration_since(*first) >= Duration::from_secs(1)) {
            self.arrivals.pop_front();
        }
        self.most.concurrency = self.most.concurrency.max(self.under_way);
        self.most.requests_per_s = self.most.requests_per_s.max(self.arrivals.len());
    }
}

/// A call that is under way.
struct UnderWay<'a>(&'a Mutex<State>);

impl<'a> UnderWay<'a> {
    fn begin(state: &'a Mutex<State>) -> Self {
        state.lock().expect("no holder panics").load.note_arrival(Instant::now());
        Self(state)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.lock().expect("no holder panics").load.under_way -= 1;
    }
}

/// What the service's connections share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    outage: watch::Sender<Option<Outage>>,
    /// Requests that have met an outage.
    failed: AtomicUsize,
}

/// A running service. Ends when dropped.
#[derive(Debug)]
pub struct PaymentService {
    address: SocketAddr,
    token: NamedTempFile,
    shared: Arc<Shared>,
    end: CancellationToken,
    /// Bound, and never listening: keeps the port for the time in which connections are refused.
    _port: TcpSocket,
}

impl PaymentService {
    /// Starts it on a free port.
    pub fn start() -> Self {
        let port = reusable_socket("127.0.0.1:0".parse().expect("an address"));
        let address = port.local_addr().expect("it is bound");
        let shared =
            Arc::new(Shared { state: Mutex::default(), outage: watch::Sender::new(None), failed: AtomicUsize::new(0) });
        let (told, end, (listening, listens)) = (shared.clone(), CancellationToken::new(), std::sync::mpsc::channel());
        let ends = end.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async move {
                let listener = listen(address);
                listening.send(()).expect("the starting thread waits");
                tokio::select! {
                    () = ends.cancelled() => {}
                    () = serve(address, listener, told) => {}
                }
            });
        });
        listens.recv().expect("it listens");
        let token = NamedTempFile::new().expect("a file for the token");
        std::fs::write(token.path(), "a-token-of-the-tests\n").expect("the token is written");
        Self { address, token, shared, end, _port: port }
    }

    /// Has orders of the default kind asked about at this service, besides those that are named already. `limits`: as in
    /// the settings.
    pub fn join(&self, settings: &mut Settings, name: &str, limits: LimitsSettings) {
        let provider = HttpSettings {
            url: self.url(),
            bearer_token_file: Some(self.token_file().to_owned()),
            hmac_key_file: None,
            ca_file: None,
            limits,
        };
        settings.providers.0.insert(name.to_owned(), ProviderSettings::Http(provider));
        settings.kinds.entry(Kind::ORDER).or_default().providers.push(name.to_owned());
    }

    /// Its address, for a worker in a process of its own.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The file with the token that it is sent.
    pub fn token_file(&self) -> &Path {
        self.token.path()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().expect("no holder panics")
    }

    /// A customer pays. Returns whether the service took the money.
    pub fn pay(&self, reference: &str) -> bool {
        let mut state = self.state();
        let truth = state.truths.entry(reference.to_owned()).or_insert(Truth::Open);
        if *truth == Truth::Open {
            *truth = Truth::Paid;
        }
        *truth == Truth::Paid
    }

    /// What became of the attempt.
    pub fn truth(&self, reference: &str) -> Truth {
        self.state().truths.get(reference).copied().unwrap_or(Truth::Open)
    }

    /// Fails every call about this attempt, or none any more.
    pub fn fail(&self, reference: &str, fault: Option<Fault>) {
        match fault {
            Some(fault) => drop(self.state().faults.insert(reference.to_owned(), fault)),
            None => drop(self.state().faults.remove(reference)),
        }
    }

    /// Closes every connection without an answer, or no longer.
    pub fn set_dead(&self, is_dead: bool) {
        self.state().is_dead = is_dead;
    }

    /// Begins an outage, or ends it. It has ended when [`Self::is_listening`].
    pub fn set_outage(&self, outage: Option<Outage>) {
        self.shared.outage.send_replace(outage);
    }

    /// Whether it accepts connections.
    pub fn is_listening(&self) -> bool {
        std::net::TcpStream::connect(self.address).is_ok()
    }

    /// How many requests have met an outage so far; refused connections are not among them.
    pub fn failed_requests(&self) -> usize {
        self.shared.failed.load(Ordering::SeqCst)
    }

    /// Answers after this pause.
    pub fn set_pause(&self, pause: Duration) {
        self.state().pause = pause;
    }

    /// How many calls of each sort arrived: asked, cancelled.
    pub fn calls(&self) -> (usize, usize) {
        let state = self.state();
        (state.asked, state.cancelled)
    }

    /// The largest load so far.
    pub fn seen_load(&self) -> SeenLoad {
        self.state().load.most
    }

    /// What was answered to each call, in order: `ask: open`, `cancel: closed`.
    pub fn answered(&self) -> Vec<String> {
        self.state().answered.clone()
    }
}

impl Drop for PaymentService {
    fn drop(&mut self) {
        self.end.cancel();
    }
}

/// Limits that no test meets by its load.
pub fn wide_limits() -> LimitsSettings {
    LimitsSettings {
        concurrency: 200,
        requests_per_s: 10_000,
        // A machine that stalls repeats no call. Tests of these timeouts set their own.
        timeout: Duration::from_secs(20),
        queue_timeout: Duration::from_secs(20),
        failures_to_open: 1_000,
        open_for: Duration::from_millis(500),
    }
}

/// A socket on this address that lets other sockets have it too, as long as only one listens.
fn reusable_socket(address: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.set_reuseaddr(true).expect("an option of sockets");
    socket.bind(address).expect("a free port");
    socket
}

fn listen(address: SocketAddr) -> TcpListener {
    reusable_socket(address).listen(1_024).expect("a port on which no other socket listens")
}

async fn serve(address: SocketAddr, listener: TcpListener, shared: Arc<Shared>) {
    let (mut listener, mut outage) = (Some(listener), shared.outage.subscribe());
    loop {
        if *outage.borrow_and_update() == Some(Outage::Refusing) {
            listener = None;
        } else {
            listener = Some(listener.unwrap_or_else(|| listen(address)));
        }
        let accepted = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = outage.changed() => {}
            accepted = accepted => {
                let Ok((stream, _)) = accepted else { continue };
                let shared = shared.clone();
                // An error ends this connection alone.
                tokio::spawn(async move { drop(answer_all(stream, &shared).await) });
            }
        }
    }
}

async fn answer_all(stream: TcpStream, shared: &Shared) -> std::io::Result<()> {
    let (mut stream, mut outage) = (BufReader::new(stream), shared.outage.subscribe());
    loop {
        let refuses = async { drop(outage.wait_for(|outage| *outage == Some(Outage::Refusing)).await) };
        let request = tokio::select! {
            request = read_request(&mut stream) => request?,
            () = refuses => return Ok(()),
        };
        let Some((path, asked)) = request else { return Ok(()) };
        let (pause, is_dead) = {
            let state = shared.state.lock().expect("no holder panics");
            (state.pause, state.is_dead)
        };
        if is_dead {
            return Ok(());
        }
        let under_way = UnderWay::begin(&shared.state);
        tokio::time::sleep(pause).await;
        let met = *outage.borrow_and_update();
        shared.failed.fetch_add(usize::from(met.is_some()), Ordering::SeqCst);
        if met == Some(Outage::Hanging) {
            drop(outage.wait_for(|outage| *outage != Some(Outage::Hanging)).await);
        }
        let (status, sort, said) = match met {
            Some(Outage::Refusing) => return Ok(()),
            Some(Outage::Failing) => ("500 Internal Server Error", "application/json", "{}".to_owned()),
            Some(Outage::Html) => ("200 OK", "text/html", "<html><body>Please log in</body></html>".to_owned()),
            None | Some(Outage::Hanging | Outage::LosingAnswers) => match decide(&path, &asked, &shared.state) {
                Err(Fault::Hang) => std::future::pending().await,
                Err(Fault::Error) => ("500 Internal Server Error", "application/json", "{}".to_owned()),
                Ok(_) if met == Some(Outage::LosingAnswers) => return Ok(()),
                Ok(answer) => ("200 OK", "application/json", answer.to_string()),
            },
        };
        let head = format!("HTTP/1.1 {status}\r\ncontent-type: {sort}\r\ncontent-length: {}\r\n\r\n", said.len());
        // Before the answer, behind which the worker may send the next call at once.
        drop(under_way);
        stream.write_all((head + &said).as_bytes()).await?;
        stream.flush().await?;
    }
}

/// The path and the body of the next request; `None` at the end of the stream.
async fn read_request(stream: &mut BufReader<TcpStream>) -> std::io::Result<Option<(String, Value)>> {
    let (mut line, mut path, mut length) = (String::new(), String::new(), 0);
    while stream.read_line(&mut line).await? > 0 && line != "\r\n" {
        let lower = line.to_ascii_lowercase();
        if let Some(value) = lower.strip_prefix("content-length:") {
            length = value.trim().parse().unwrap_or(0);
        } else if lower.starts_with("post ") {
            path = lower.split(' ').nth(1).unwrap_or_default().to_owned();
        }
        line.clear();
    }
    if path.is_empty() {
        return Ok(None);
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    Ok(Some((path, serde_json::from_slice(&body).unwrap_or_default())))
}

fn decide(path: &str, asked: &Value, state: &Mutex<State>) -> Result<Value, Fault> {
    let reference = asked["reference"].as_str().unwrap_or_default().to_owned();
    let mut state = state.lock().expect("no holder panics");
    let cancels = path.ends_with("/cancel");
    *if cancels { &mut state.cancelled } else { &mut state.asked } += 1;
    if let Some(fault) = state.faults.get(&reference) {
        return Err(*fault);
    }
    let truth = state.truths.entry(reference.clone()).or_insert(Truth::Open);
    if cancels && *truth == Truth::Open {
        *truth = Truth::Closed;
    }
    let truth = *truth;
    let word = match truth {
        Truth::Open => "open",
        Truth::Closed => "closed",
        Truth::Paid => "paid",
    };
    state.answered.push(format!("{}: {word}", if cancels { "cancel" } else { "ask" }));
    Ok(match truth {
        Truth::Open => json!({ "reference": reference, "state": "open" }),
        Truth::Closed => json!({ "reference": reference, "state": "closed" }),
        Truth::Paid => json!({
            "reference": reference, "state": "paid", "amount_minor": asked["amount_minor"], "currency": asked["currency"],
        }),
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    /// What the service answers to this call; an error if it does not.
    fn call(service: &PaymentService, path: &str) -> std::io::Result<String> {
        let mut stream = std::net::TcpStream::connect(service.address)?;
        stream.set_read_timeout(Some(Duration::from_millis(200)))?;
        let body = r#"{"reference":"att-1","amount_minor":1999,"currency":"EUR"}"#;
        write!(stream, "POST {path} HTTP/1.1\r\ncontent-length: {}\r\n\r\n{body}", body.len())?;
        stream.shutdown(std::net::Shutdown::Write)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }

    fn until_listening(service: &PaymentService) {
        while !service.is_listening() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn refusing_service_comes_back_on_its_port() {
        let service = PaymentService::start();
        for _ in 0..3 {
            assert!(call(&service, "/ask").unwrap().contains("open"));
            service.set_outage(Some(Outage::Refusing));
            while service.is_listening() {
                std::thread::yield_now();
            }
            assert_eq!(call(&service, "/ask").unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
            service.set_outage(None);
            until_listening(&service);
        }
    }

    #[test]
    fn lost_answers_are_carried_out() {
        let service = PaymentService::start();
        service.set_outage(Some(Outage::LosingAnswers));
        assert_eq!(call(&service, "/cancel").unwrap_or_default(), "");
        service.set_outage(None);
        assert_eq!((service.truth("att-1"), service.failed_requests()), (Truth::Closed, 1));
        assert!(!service.pay("att-1"), "it was promised that it cannot be paid");
    }

    #[test]
    fn failing_service_carries_nothing_out() {
        let service = PaymentService::start();
        for (outage, said) in [(Outage::Failing, "HTTP/1.1 500"), (Outage::Html, "<html>")] {
            service.set_outage(Some(outage));
            assert!(call(&service, "/cancel").unwrap().contains(said), "{outage:?}");
        }
        assert_eq!(service.truth("att-1"), Truth::Open);
    }

    #[test]
    fn hanging_service_carries_out_late() {
        let service = PaymentService::start();
        service.set_outage(Some(Outage::Hanging));
        assert!(call(&service, "/cancel").is_err(), "no answer in time");
        assert_eq!(service.truth("att-1"), Truth::Open);
        service.set_outage(None);
        while service.truth("att-1") == Truth::Open {
            std::thread::yield_now();
        }
    }
}
