//! A payment service behind the HTTP contract of `docs/PROVIDERS.md`, on a local port: with a truth for each attempt,
//! and with faults.
//!
//! On a thread of its own, so that settings can name it before an environment exists. Checks no signature.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use order_timeout::config::Settings;
use order_timeout_core::kind::Kind;
use order_timeout_providers::ProviderSettings;
use order_timeout_providers::settings::{HttpSettings, LimitsSettings};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
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

#[derive(Debug, Default)]
struct State {
    truths: HashMap<String, Truth>,
    faults: HashMap<String, Fault>,
    /// Every connection is closed without an answer.
    is_dead: bool,
    pause: Duration,
    asked: usize,
    cancelled: usize,
    /// Each call that was carried out, with the state that was answered.
    answered: Vec<String>,
}

/// A running service. Ends when dropped.
#[derive(Debug)]
pub struct PaymentService {
    address: SocketAddr,
    token: NamedTempFile,
    state: Arc<Mutex<State>>,
    end: CancellationToken,
}

impl PaymentService {
    /// Starts it on a free port.
    pub fn start() -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
        listener.set_nonblocking(true).expect("a socket that tokio can use");
        let address = listener.local_addr().expect("it is bound");
        let (state, end) = (Arc::<Mutex<State>>::default(), CancellationToken::new());
        let (told, ends) = (state.clone(), end.clone());
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async move {
                let listener = TcpListener::from_std(listener).expect("a listener");
                tokio::select! {
                    () = ends.cancelled() => {}
                    () = serve(listener, told) => {}
                }
            });
        });
        let token = NamedTempFile::new().expect("a file for the token");
        std::fs::write(token.path(), "a-token-of-the-tests\n").expect("the token is written");
        Self { address, token, state, end }
    }

    /// Has orders of the default kind asked about at this service, besides those that are named already. `limits`: as in
    /// the settings.
    pub fn join(&self, settings: &mut Settings, name: &str, limits: LimitsSettings) {
        let provider = HttpSettings {
            url: self.url(),
            bearer_token_file: Some(self.token.path().to_owned()),
            hmac_key_file: None,
            ca_file: None,
            limits,
        };
        settings.providers.0.insert(name.to_owned(), ProviderSettings::Http(provider));
        settings.kinds.entry(Kind::ORDER).or_default().providers.push(name.to_owned());
    }

    /// Where it is reached.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
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

    /// Answers after this pause.
    pub fn set_pause(&self, pause: Duration) {
        self.state().pause = pause;
    }

    /// How many calls of each sort arrived: asked, cancelled.
    pub fn calls(&self) -> (usize, usize) {
        let state = self.state();
        (state.asked, state.cancelled)
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
        timeout: Duration::from_secs(1),
        queue_timeout: Duration::from_secs(5),
        failures_to_open: 1_000,
        open_for: Duration::from_millis(500),
    }
}

async fn serve(listener: TcpListener, state: Arc<Mutex<State>>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let state = state.clone();
        // An error ends this connection alone.
        tokio::spawn(async move { drop(answer_all(stream, &state).await) });
    }
}

async fn answer_all(stream: TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
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
            return Ok(());
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
        let (pause, is_dead) = {
            let state = state.lock().expect("no holder panics");
            (state.pause, state.is_dead)
        };
        if is_dead {
            return Ok(());
        }
        tokio::time::sleep(pause).await;
        let (status, said) = match decide(&path, &asked, state) {
            Err(Fault::Hang) => std::future::pending().await,
            Err(Fault::Error) => ("500 Internal Server Error", "{}".to_owned()),
            Ok(answer) => ("200 OK", answer.to_string()),
        };
        let head =
            format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", said.len());
        stream.write_all((head + &said).as_bytes()).await?;
        stream.flush().await?;
    }
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
