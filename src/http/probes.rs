//! The pages `/livez`, `/readyz`, `/closingz` and `/metrics`, for probes and scrapers.
//!
//! Renders what it is given; changes nothing and decides nothing. A request has no side effect.

use axum::Router;
use axum::extract::State;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tracing::error;

use super::{CLOSINGZ, LIVEZ, METRICS, Pages, READYZ};
use crate::observe::health::Report;
use crate::observe::metrics;
use crate::sanitize;

const PLAIN_TEXT: &str = "text/plain; charset=utf-8";

/// The four pages.
pub(super) fn router(pages: Pages) -> Router {
    Router::new()
        .route(LIVEZ, get(async |State(pages): State<Pages>| report(&pages.health.is_alive())))
        .route(READYZ, get(async |State(pages): State<Pages>| report(&pages.health.is_ready())))
        .route(CLOSINGZ, get(async |State(pages): State<Pages>| report(&pages.health.is_closing())))
        .route(METRICS, get(async |State(pages): State<Pages>| render(&pages)))
        .with_state(pages)
        .method_not_allowed_fallback(read_only)
}

/// For a listener with no other pages.
pub(super) async fn not_found(method: Method) -> Response {
    if ![Method::GET, Method::HEAD].contains(&method) {
        return read_only().await;
    }
    page(StatusCode::NOT_FOUND, PLAIN_TEXT, &format!("there are {LIVEZ}, {READYZ}, {CLOSINGZ} and {METRICS}\n"))
}

async fn read_only() -> Response {
    page(StatusCode::METHOD_NOT_ALLOWED, PLAIN_TEXT, "only GET and HEAD are supported\n")
}

fn render(pages: &Pages) -> Response {
    match pages.metrics.render() {
        Ok(text) => page(StatusCode::OK, metrics::CONTENT_TYPE, &text),
        Err(error) => {
            error!(%error, "the metrics cannot be rendered");
            page(StatusCode::INTERNAL_SERVER_ERROR, PLAIN_TEXT, &format!("{error}\n"))
        }
    }
}

fn report(report: &Report) -> Response {
    let status = if report.is_healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    page(status, PLAIN_TEXT, &(report.lines().join("\n") + "\n"))
}

fn page(status: StatusCode, content_type: &'static str, text: &str) -> Response {
    let headers =
        [(CONTENT_TYPE, HeaderValue::from_static(content_type)), (CACHE_CONTROL, HeaderValue::from_static("no-store"))];
    (status, headers, sanitize::visible(text).into_owned()).into_response()
}
