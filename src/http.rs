//! The HTTP server for `/livez`, `/readyz`, `/closingz` and `/metrics`, and a client for them.
//!
//! Renders what it is given; changes nothing and decides nothing. A request has no side effect and a time limit, and
//! connections without a request never delay one that has sent a request.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HOST, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::{AbortHandle, JoinHandle, JoinSet};
use tracing::{debug, error};

use crate::observe::health::{Health, Report};
use crate::observe::metrics::{self, Metrics};
use crate::sanitize;

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
/// closed when a new one needs its place.
const LONGEST_REQUEST: Duration = Duration::from_secs(1);
/// The listen backlog. Beyond it the kernel drops the SYN and the client retries a second later; large enough for a
/// probe to get through while another client opens a thousand connections at once on a busy machine.
const LONGEST_QUEUE: u32 = 4_096;
/// The pause after a failure to accept, such as a lack of file handles, so that the loop does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
const PLAIN_TEXT: &str = "text/plain; charset=utf-8";

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
    pub async fn open(listen: SocketAddr, pages: Pages) -> Result<Self, HttpError> {
        let cannot = |error: std::io::Error| match error.kind() {
            ErrorKind::AddrInUse => HttpError::Taken(listen),
            _ => HttpError::CannotListen(listen, error),
        };
        let listener = bind(listen).map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        Ok(Self { address, serving: tokio::spawn(serve(listener, pages)) })
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

fn bind(listen: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if listen.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // As `TcpListener::bind` does: a restarted worker need not wait for connections of its predecessor to time out.
    socket.set_reuseaddr(true)?;
    socket.bind(listen)?;
    socket.listen(LONGEST_QUEUE)
}

async fn serve(listener: TcpListener, pages: Pages) {
    let mut connections = Connections::default();
    loop {
        tokio::select! {
            () = connections.one_ends() => {}
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.make_room().await;
                    connections.add(|asked| attend(stream, pages.clone(), asked));
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
    /// Whether the head of its request was received in full.
    asked: Arc<AtomicBool>,
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
            let idle = self.open.iter().position(|one| !one.asked.load(Ordering::Relaxed));
            self.open.remove(idle.unwrap_or(0)).inspect(|one| one.task.abort());
        }
        // Until the aborted one has released its file handle.
        while self.tasks.len() >= MOST_CONNECTIONS && self.tasks.join_next().await.is_some() {}
    }

    fn add<F: Future<Output = ()> + Send + 'static>(&mut self, attend: impl FnOnce(Arc<AtomicBool>) -> F) {
        let asked = Arc::new(AtomicBool::new(false));
        let task = self.tasks.spawn(attend(asked.clone()));
        self.open.push_back(Open { task, asked });
    }
}

async fn attend(stream: TcpStream, pages: Pages, asked: Arc<AtomicBool>) {
    let service = service_fn(async |request| {
        asked.store(true, Ordering::Relaxed);
        Ok::<_, std::convert::Infallible>(answer(&request, &pages))
    });
    let connection =
        hyper::server::conn::http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(LONGEST_REQUEST, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(%error, "a request to http.listen failed"),
        Err(_) => debug!("a request to http.listen timed out"),
    }
}

fn answer(request: &Request<Incoming>, pages: &Pages) -> Response<Full<Bytes>> {
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        return page(StatusCode::METHOD_NOT_ALLOWED, PLAIN_TEXT, "only GET and HEAD are supported\n".into());
    }
    match request.uri().path() {
        LIVEZ => report(&pages.health.is_alive()),
        READYZ => report(&pages.health.is_ready()),
        CLOSINGZ => report(&pages.health.is_closing()),
        METRICS => match pages.metrics.render() {
            Ok(text) => page(StatusCode::OK, metrics::CONTENT_TYPE, text),
            Err(error) => {
                error!(%error, "the metrics cannot be rendered");
                page(StatusCode::INTERNAL_SERVER_ERROR, PLAIN_TEXT, format!("{error}\n"))
            }
        },
        _ => {
            page(StatusCode::NOT_FOUND, PLAIN_TEXT, format!("there are {LIVEZ}, {READYZ}, {CLOSINGZ} and {METRICS}\n"))
        }
    }
}

fn report(report: &Report) -> Response<Full<Bytes>> {
    let status = if report.is_healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    page(status, PLAIN_TEXT, report.lines.join("\n") + "\n")
}

fn page(status: StatusCode, content_type: &'static str, text: String) -> Response<Full<Bytes>> {
    let text = sanitize::visible(&text).into_owned();
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Fetches a page from a worker; returns status and text.
///
/// # Errors
/// [`HttpError`] if there is no answer within `timeout`.
pub async fn get(address: SocketAddr, path: &str, timeout: Duration) -> Result<(u16, String), HttpError> {
    let no_answer = |why: String| HttpError::NoAnswer(address, why);
    match tokio::time::timeout(timeout, ask(address, path)).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(no_answer(error.to_string())),
        Err(_) => Err(no_answer(format!("no response within {timeout:?}"))),
    }
}

async fn ask(address: SocketAddr, path: &str) -> Result<(u16, String), Box<dyn std::error::Error + Send + Sync>> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let request = Request::get(path).header(HOST, address.to_string()).body(Empty::<Bytes>::new())?;
    let exchange = async move {
        let response = sender.send_request(request).await?;
        let status = response.status().as_u16();
        let body = response.into_body().collect().await?.to_bytes();
        Ok((status, String::from_utf8_lossy(&body).into_owned()))
    };
    // The connection's future does the reading and writing, and ends when the sender is dropped.
    let (answer, _ended) = tokio::join!(exchange, connection);
    answer
}
