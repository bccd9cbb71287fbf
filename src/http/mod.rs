//! The HTTP server: `/livez`, `/readyz`, `/closingz` and `/metrics` (`probes.rs`), and if `http.page` is true the API (`api/`) and the
//! page (`page/`) on what both share (`site/`). `client.rs` asks a worker for a page, and other servers for
//! JSON.
//!
//! This file accepts connections and limits them. Each request has a time limit, and connections without a request never
//! delay one that has sent a request.

mod api;
mod client;
mod page;
mod probes;
mod site;

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::{Service, service_fn};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tokio::time::Instant;
use tracing::debug;

use crate::observe::health::Health;
use crate::observe::metrics::Metrics;

pub use api::openapi;
pub use client::{get, get_json};
pub use page::audit_file;
pub use site::{Site, TokenError};

/// Whether the worker's loops turn.
pub const LIVEZ: &str = "/livez";
/// Whether it is ready.
pub const READYZ: &str = "/readyz";
/// Whether orders are closed: closing is not paused.
pub const CLOSINGZ: &str = "/closingz";
/// The metrics, in Prometheus' text format.
pub const METRICS: &str = "/metrics";

/// Far more than a scraper and two probes need.
const MOST_CONNECTIONS: usize = 128;
/// A connection serves one request and ends. Idle connections do not use up [`MOST_CONNECTIONS`]: the oldest of them is
/// closed when a new one needs its place. A request for the API or the page extends it ([`Attended`]).
const LONGEST_REQUEST: Duration = Duration::from_secs(1);
/// The listen backlog. Beyond it the kernel drops the SYN and the client retries a second later; large enough for a
/// probe to get through while another client opens a thousand connections at once on a busy machine.
const LONGEST_QUEUE: u32 = 4_096;
/// The pause after a failure to accept, such as a lack of file handles, so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Why the pages cannot be served or fetched.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// Another program listens there.
    #[error(
        "http.listen: {0} is taken, perhaps by another worker on this machine; set http.listen to another port, or to \"\" to serve no health and metrics"
    )]
    Taken(SocketAddr),
    /// The address is not this machine's, or may not be used.
    #[error(
        "http.listen: this machine cannot listen at {0} ({1}); set http.listen to an address of its own, or to \"\""
    )]
    CannotListen(SocketAddr, std::io::Error),
    /// The token cannot be used.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// For a client of the pages.
    #[error("no worker answers at {0} ({1}); is it running, with the same http.listen?")]
    NoAnswer(SocketAddr, String),
}

/// What is served.
#[derive(Debug, Clone)]
pub struct Pages {
    /// For `/livez`, `/readyz` and `/closingz`.
    pub health: Arc<Health>,
    /// For `/metrics`.
    pub metrics: Arc<Metrics>,
}

/// Serves the pages until it is dropped.
#[derive(Debug)]
pub struct HttpServer {
    address: SocketAddr,
    serving: JoinHandle<()>,
}

impl HttpServer {
    /// # Errors
    /// [`HttpError`] if it cannot listen there.
    pub async fn open(listen: SocketAddr, pages: Pages, site: Option<Site>) -> Result<Self, HttpError> {
        let cannot = |error: std::io::Error| match error.kind() {
            ErrorKind::AddrInUse => HttpError::Taken(listen),
            _ => HttpError::CannotListen(listen, error),
        };
        let listener = bind(listen).map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        Ok(Self { address, serving: tokio::spawn(serve(listener, router(pages, site))) })
    }

    /// The address it listens at, with the port that the system chose if `http.listen` has port 0.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

fn router(pages: Pages, site: Option<Site>) -> Router {
    let probes = probes::router(pages);
    match site {
        None => probes.fallback(probes::not_found),
        Some(site) => probes.merge(site.router()),
    }
}

fn bind(listen: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if listen.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // As `TcpListener::bind` does: a restarted worker need not wait for connections of its predecessor to time out.
    socket.set_reuseaddr(true)?;
    socket.bind(listen)?;
    socket.listen(LONGEST_QUEUE)
}

async fn serve(listener: TcpListener, router: Router) {
    let mut connections = Connections::default();
    loop {
        tokio::select! {
            () = connections.one_ends() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    connections.make_room().await;
                    connections.add(|attended| attend(stream, peer, router.clone(), attended));
                }
                Err(error) => {
                    debug!(%error, "a connection to http.listen could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
}

/// The open connections, [`MOST_CONNECTIONS`] at most. Dropping it aborts them.
#[derive(Default)]
struct Connections {
    tasks: JoinSet<()>,
    /// Oldest first. A finished one stays until [`Connections::make_room`] removes it.
    open: VecDeque<Open>,
}

struct Open {
    task: AbortHandle,
    attended: Arc<Attended>,
}

impl Connections {
    /// Waits forever while there is none.
    async fn one_ends(&mut self) {
        if self.tasks.join_next().await.is_none() {
            std::future::pending().await
        }
    }

    /// Closes the oldest connection without a request, or the oldest of all if each has one: its client does not read.
    async fn make_room(&mut self) {
        self.open.retain(|one| !one.task.is_finished());
        if self.open.len() >= MOST_CONNECTIONS {
            let idle = self.open.iter().position(|one| !one.attended.asked.load(Ordering::Relaxed));
            self.open.remove(idle.unwrap_or(0)).inspect(|one| one.task.abort());
        }
        // Until the aborted one has released its file handle.
        while self.tasks.len() >= MOST_CONNECTIONS && self.tasks.join_next().await.is_some() {}
    }

    fn add<F: Future<Output = ()> + Send + 'static>(&mut self, attend: impl FnOnce(Arc<Attended>) -> F) {
        let attended = Arc::new(Attended::new());
        let task = self.tasks.spawn(attend(attended.clone()));
        self.open.push_back(Open { task, attended });
    }
}

/// The client's address, as an extension of each request.
#[derive(Debug, Clone, Copy)]
struct Peer(SocketAddr);

/// What is known of an open connection; as an extension of each request, so that a handler can extend its time.
#[derive(Debug)]
struct Attended {
    /// Whether the head of its request was received in full.
    asked: AtomicBool,
    /// How long the connection may stay open from its beginning, in milliseconds. It only grows.
    limit_ms: AtomicU64,
}

impl Attended {
    fn new() -> Self {
        let limit_ms = AtomicU64::new(0);
        let new = Self { asked: AtomicBool::new(false), limit_ms };
        new.extend(LONGEST_REQUEST);
        new
    }

    /// The probes' handlers leave it as it is.
    fn extend(&self, to: Duration) {
        self.limit_ms.fetch_max(u64::try_from(to.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn limit(&self) -> Duration {
        Duration::from_millis(self.limit_ms.load(Ordering::Relaxed))
    }
}

async fn attend(stream: TcpStream, peer: SocketAddr, router: Router, attended: Arc<Attended>) {
    let service = service_fn(|mut request: Request<Incoming>| {
        attended.asked.store(true, Ordering::Relaxed);
        request.extensions_mut().insert(Peer(peer));
        request.extensions_mut().insert(attended.clone());
        TowerToHyperService::new(router.clone()).call(request)
    });
    let mut connection = pin!(
        hyper::server::conn::http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), service)
    );
    let began = Instant::now();
    loop {
        let limit = attended.limit();
        match tokio::time::timeout_at(began + limit, &mut connection).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => return debug!(%error, "a request to http.listen failed"),
            // Its handler has extended it meanwhile.
            Err(_) if attended.limit() > limit => {}
            Err(_) => return debug!("a request to http.listen timed out"),
        }
    }
}
