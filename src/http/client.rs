//! A client for the pages of a worker, for `order-timeout health` in images without one, and for tests.
//!
//! Asks one question on a connection of its own, within a time limit.

use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::{BodyExt, Empty};
use hyper::Request;
use hyper::body::Bytes;
use hyper::header::HOST;
use hyper_util::rt::TokioIo;
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
