//! A client for the pages of a worker, for `order-timeout health` in images without one, and for tests; and one for the JSON
//! of other servers.
//!
//! Asks one question on a connection of its own, within a time limit.

use std::net::SocketAddr;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper::header::{AUTHORIZATION, HOST};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::HttpError;

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

type ExchangeError = Box<dyn std::error::Error + Send + Sync>;

async fn ask(address: SocketAddr, path: &str) -> Result<(u16, String), ExchangeError> {
    let stream = TcpStream::connect(address).await?;
    let request = Request::get(path).header(HOST, address.to_string()).body(Empty::<Bytes>::new())?;
    let response = exchange(stream, request).await?;
    Ok((response.status().as_u16(), response.into_body()))
}

/// Asks another server for a JSON document, over a connection that is open. `account`: name and password.
///
/// # Errors
/// One sentence if there is no answer within `timeout`, or another one than status 200.
pub async fn get_json(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    (host, path): (&str, &str),
    (user, password): (&str, &str),
    timeout: Duration,
) -> Result<serde_json::Value, String> {
    let credentials = STANDARD.encode(format!("{user}:{password}"));
    let asking = async {
        let request = Request::get(path).header(HOST, host).header(AUTHORIZATION, format!("Basic {credentials}"));
        let response = exchange(stream, request.body(Empty::<Bytes>::new())?).await?;
        if response.status() != StatusCode::OK {
            return Err(format!("GET {path} was answered with {}", response.status()).into());
        }
        Ok::<_, ExchangeError>(serde_json::from_str(response.body())?)
    };
    match tokio::time::timeout(timeout, asking).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no response within {timeout:?}")),
    }
}

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Empty<Bytes>>,
) -> Result<Response<String>, ExchangeError> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let exchange = async move {
        let (head, body) = sender.send_request(request).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Response::from_parts(head, String::from_utf8_lossy(&body).into_owned()))
    };
    // The connection's future does the reading and writing, and ends when the sender is dropped.
    let (answer, _ended) = tokio::join!(exchange, connection);
    answer
}
