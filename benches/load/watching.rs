//! What watches a worker while it closes orders: browsers with the page open, a scrape of its metrics, and a collector that
//! its traces are sent to.
//!
//! Asks as they ask, and counts what it gets; measures no lateness.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use order_timeout::http::{self, METRICS};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::Options;

/// How often Prometheus scrapes a worker of which a short burst is to be seen.
const SCRAPE_EVERY: Duration = Duration::from_secs(5);
/// An answer that takes longer is an error.
const TIMEOUT: Duration = Duration::from_secs(30);
/// What a browser fetches once.
const PAGE: [&str; 3] = ["/", "/assets/page.css", "/assets/page.js"];
/// The stream of the page's sections, which `page.js` follows.
const LIVE: &str = "/live";

/// What is to watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watch {
    /// Browsers with the page open.
    pub pages: usize,
    /// Whether metrics are scraped and traces sent, too.
    pub everything: bool,
}

impl Watch {
    /// As the options ask for; `None` if nothing is to watch.
    pub fn of(options: &Options) -> Option<Self> {
        let Options { pages, everything, .. } = *options;
        // The page is served, so one is open.
        let pages = pages.max(usize::from(everything));
        (pages > 0).then_some(Self { pages, everything })
    }
}

/// What was received.
#[derive(Debug, Default)]
struct Received {
    sections: AtomicU64,
    scrapes: AtomicU64,
    exports: AtomicU64,
    exported_bytes: AtomicU64,
}

/// Watches until it is dropped.
#[derive(Debug)]
pub struct Watching {
    watch: Watch,
    collector: SocketAddr,
    received: Arc<Received>,
    /// Each ends only with an error.
    tasks: JoinSet<anyhow::Result<()>>,
}

impl Watching {
    /// Starts the collector, whose address the worker's settings name.
    pub async fn prepare(watch: Watch) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (collector, received) = (listener.local_addr()?, Arc::<Received>::default());
        let mut tasks = JoinSet::new();
        tasks.spawn(collect(listener, received.clone()));
        Ok(Self { watch, collector, received, tasks })
    }

    /// The worker's settings.
    pub fn settings(&self) -> Vec<String> {
        let mut settings = vec!["http.page=true".to_owned()];
        if self.watch.everything {
            settings.push(format!("traces.endpoint=http://{}", self.collector));
        }
        settings
    }

    /// Whether alarms have a trace context.
    pub fn is_traced(&self) -> bool {
        self.watch.everything
    }

    /// Watches the worker at this address.
    pub fn begin(&mut self, worker: SocketAddr) {
        for _ in 0..self.watch.pages {
            self.tasks.spawn(browse(worker, self.received.clone()));
        }
        if self.watch.everything {
            self.tasks.spawn(scrape(worker, self.received.clone()));
        }
    }

    /// What was received.
    ///
    /// # Errors
    /// If anything failed, or no page was updated.
    pub fn end(mut self) -> anyhow::Result<Value> {
        while let Some(ended) = self.tasks.try_join_next() {
            ended?.context("what watches the worker failed")?;
        }
        let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let Received { sections, scrapes, exports, exported_bytes } = &*self.received;
        ensure!(count(sections) >= self.watch.pages as u64, "not every page was updated");
        Ok(json!({
            "pages": self.watch.pages, "page_updates": count(sections), "scrapes": count(scrapes),
            "trace_exports": count(exports), "trace_bytes": count(exported_bytes),
        }))
    }
}

/// Opens the page and follows it, as `page.js` does.
async fn browse(worker: SocketAddr, received: Arc<Received>) -> anyhow::Result<()> {
    for path in PAGE {
        fetch(worker, path).await?;
    }
    loop {
        follow(worker, &received).await?;
    }
}

async fn fetch(worker: SocketAddr, path: &str) -> anyhow::Result<()> {
    let (status, _) = http::get(worker, path, TIMEOUT).await?;
    ensure!(status == 200, "GET {path} was answered with {status}");
    Ok(())
}

/// Until the worker ends the stream; then a browser connects again.
async fn follow(worker: SocketAddr, received: &Received) -> anyhow::Result<()> {
    let mut stream = BufReader::new(TcpStream::connect(worker).await?);
    let request = format!("GET {LIVE} HTTP/1.1\r\nHost: {worker}\r\nAccept: text/event-stream\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut line = Vec::new();
    stream.read_until(b'\n', &mut line).await?;
    ensure!(
        line.starts_with(b"HTTP/1.1 200"),
        "GET {LIVE} was answered with {}",
        String::from_utf8_lossy(&line).trim()
    );
    while !line.is_empty() {
        if line.starts_with(b"event: sections") {
            received.sections.fetch_add(1, Ordering::Relaxed);
        }
        line.clear();
        stream.read_until(b'\n', &mut line).await?;
    }
    Ok(())
}

async fn scrape(worker: SocketAddr, received: Arc<Received>) -> anyhow::Result<()> {
    let mut ticks = tokio::time::interval(SCRAPE_EVERY);
    loop {
        ticks.tick().await;
        fetch(worker, METRICS).await?;
        received.scrapes.fetch_add(1, Ordering::Relaxed);
    }
}

/// A collector that takes every export.
async fn collect(listener: TcpListener, received: Arc<Received>) -> anyhow::Result<()> {
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await?;
        connections.spawn(take_exports(stream, received.clone()));
    }
}

/// An error ends this connection alone: the worker opens another.
async fn take_exports(stream: TcpStream, received: Arc<Received>) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let (mut line, mut length) = (String::new(), 0);
        while stream.read_line(&mut line).await? > 0 && line != "\r\n" {
            let value = line.to_ascii_lowercase().strip_prefix("content-length:").map(|value| value.trim().parse());
            length = value.and_then(Result::ok).unwrap_or(length);
            line.clear();
        }
        if line.is_empty() {
            return Ok(());
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        received.exports.fetch_add(1, Ordering::Relaxed);
        received.exported_bytes.fetch_add(length as u64, Ordering::Relaxed);
        let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n";
        stream.write_all(answer.as_bytes()).await?;
        stream.flush().await?;
    }
}
