//! The three pages that the worker shows of itself, `/livez`, `/readyz` and `/metrics`, and a client that asks for them.
//!
//! Shows what it is given; changes nothing and decides nothing. A request has no effect, and one that does not come to
//! an end is given up, so nobody can hold the worker up from here.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HOST, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tracing::{debug, error};

use crate::health::{Health, Report};
use crate::metrics::{self, Metrics};

pub const LIVEZ: &str = "/livez";
pub const READYZ: &str = "/readyz";
pub const METRICS: &str = "/metrics";

/// Far more than a scraper and two probes need.
const MOST_CONNECTIONS: usize = 128;
/// A connection serves one request and ends. Less than probes wait for an answer, so that somebody who says nothing on
/// more connections than there are does not make the worker look dead.
const LONGEST_REQUEST: Duration = Duration::from_secs(1);
/// After a failure to accept, such as a lack of file handles: so that it does not spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);
const PLAIN_TEXT: &str = "text/plain; charset=utf-8";

/// Why the pages cannot be shown, or were not to be had.
#[derive(Debug, thiserror::Error)]
pub enum HttpFault {
    #[error(
        "http.listen: {0} is taken, perhaps by another worker on this machine; set http.listen to another port, or to \"\" to show no health and metrics"
    )]
    Taken(SocketAddr),
    #[error(
        "http.listen: this machine cannot listen at {0} ({1}); set http.listen to an address of its own, or to \"\""
    )]
    CannotListen(SocketAddr, std::io::Error),
    #[error("no worker answers at {0} ({1}); is it running, with the same http.listen?")]
    NoAnswer(SocketAddr, String),
}

/// What is shown.
#[derive(Debug, Clone)]
pub struct Pages {
    pub health: Arc<Health>,
    pub metrics: Arc<Metrics>,
}

/// Shows the pages until it is dropped.
#[derive(Debug)]
pub struct HttpServer {
    address: SocketAddr,
    serving: JoinHandle<()>,
}

impl HttpServer {
    /// # Errors
    /// [`HttpFault`], if it cannot listen there.
    pub async fn open(listen: SocketAddr, pages: Pages) -> Result<Self, HttpFault> {
        let cannot = |error: std::io::Error| match error.kind() {
            ErrorKind::AddrInUse => HttpFault::Taken(listen),
            _ => HttpFault::CannotListen(listen, error),
        };
        let listener = TcpListener::bind(listen).await.map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        Ok(Self { address, serving: tokio::spawn(serve(listener, pages)) })
    }

    /// Where it listens: the port that was chosen, where `http.listen` left that open with a zero.
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

async fn serve(listener: TcpListener, pages: Pages) {
    // Dropped with everything it has begun.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            Some(_ended) = connections.join_next() => {}
            accepted = listener.accept(), if connections.len() < MOST_CONNECTIONS => match accepted {
                Ok((stream, _)) => drop(connections.spawn(attend(stream, pages.clone()))),
                Err(error) => {
                    debug!(%error, "a connection to http.listen could not be accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            },
        }
    }
}

async fn attend(stream: TcpStream, pages: Pages) {
    let service = service_fn(async |request| Ok::<_, std::convert::Infallible>(answer(&request, &pages)));
    let connection =
        hyper::server::conn::http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(LONGEST_REQUEST, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(%error, "a request to http.listen failed"),
        Err(_) => debug!("a request to http.listen did not come to an end"),
    }
}

fn answer(request: &Request<Incoming>, pages: &Pages) -> Response<Full<Bytes>> {
    if ![Method::GET, Method::HEAD].contains(request.method()) {
        return page(StatusCode::METHOD_NOT_ALLOWED, PLAIN_TEXT, "only GET is understood here\n".into());
    }
    match request.uri().path() {
        LIVEZ => report(&pages.health.is_alive()),
        READYZ => report(&pages.health.is_ready()),
        METRICS => match pages.metrics.render() {
            Ok(text) => page(StatusCode::OK, metrics::CONTENT_TYPE, text),
            Err(error) => {
                error!(%error, "the metrics cannot be written");
                page(StatusCode::INTERNAL_SERVER_ERROR, PLAIN_TEXT, format!("{error}\n"))
            }
        },
        _ => page(StatusCode::NOT_FOUND, PLAIN_TEXT, format!("there are {LIVEZ}, {READYZ} and {METRICS}\n")),
    }
}

fn report(report: &Report) -> Response<Full<Bytes>> {
    let status = if report.is_well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    page(status, PLAIN_TEXT, report.lines.join("\n") + "\n")
}

fn page(status: StatusCode, content_type: &'static str, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Asks a worker for a page; returns status and text.
///
/// # Errors
/// [`HttpFault`], if there is no answer within `patience`.
pub async fn get(address: SocketAddr, path: &str, patience: Duration) -> Result<(u16, String), HttpFault> {
    let no_answer = |why: String| HttpFault::NoAnswer(address, why);
    match tokio::time::timeout(patience, ask(address, path)).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(no_answer(error.to_string())),
        Err(_) => Err(no_answer(format!("nothing within {patience:?}"))),
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
    // The connection does the reading and writing, and ends when nobody asks any more.
    let (answer, _ended) = tokio::join!(exchange, connection);
    answer
}
