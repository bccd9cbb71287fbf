//! The page for people: whether orders are closed on time, what falls due, one order's story, parked alarms, and pauses.
//!
//! HTML rendered here, one stylesheet, one small script, and nothing from elsewhere. Every text from outside is escaped
//! by the template, and hidden characters are made visible. Each page calls an operation; decides nothing.

mod audit;
mod changes;
mod due;
mod forecast;
mod kinds;
mod late;
mod layout;
mod live;
mod login;
mod order;
mod parked;
mod pauses;
mod plots;
mod providers;
mod reminders;
mod status;
mod unresolved;
mod words;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use maud::{Markup, html};

use super::api::Problem;
use super::site::Shared;
pub use audit::audit_file;
use layout::{Layout, Visitor};

/// The only stylesheet.
const STYLE: &str = include_str!("page.css");

/// A thousand checked alarms are 50 kB.
const LARGEST_FORM_BYTES: usize = 64 * 1024;

/// Rows on a page of a list.
const PAGE_SIZE: i64 = 100;

/// Its routes.
pub(super) fn router() -> Router<Arc<Shared>> {
    Router::new()
        .route("/", get(status::page))
        .route("/live", get(live::stream))
        .route("/forecast", get(forecast::page))
        .route("/orders", get(order::find))
        .route("/orders/{order_id}", get(order::page))
        .route("/parked", get(parked::page))
        .route("/parked/retry", post(parked::retry))
        .route("/parked/drop", post(parked::drop_alarms))
        .route("/late", get(late::page))
        .route("/late/refund-due", post(late::refund_due))
        .route("/late/reopen", post(late::reopen))
        .route("/unresolved", get(unresolved::page))
        .route("/unresolved/retry", post(unresolved::retry))
        .route("/pauses", get(pauses::page).post(pauses::pause))
        .route("/pauses/resume", post(pauses::resume))
        .route("/login", get(login::page).post(login::begin))
        .route("/logout", post(login::end))
        .route("/assets/page.css", get(async || asset("text/css; charset=utf-8", STYLE)))
        .route("/assets/page.js", get(async || asset("text/javascript; charset=utf-8", include_str!("page.js"))))
        .route("/assets/icon.svg", get(async || asset("image/svg+xml", include_str!("icon.svg"))))
        .layer(DefaultBodyLimit::max(LARGEST_FORM_BYTES))
        .method_not_allowed_fallback(wrong_method)
        .fallback(not_found)
}

fn asset(content_type: &'static str, text: &'static str) -> Response {
    ([(CONTENT_TYPE, HeaderValue::from_static(content_type))], text).into_response()
}

async fn not_found(visitor: Visitor) -> Response {
    failed(&visitor, &Problem::new(StatusCode::NOT_FOUND, "there is no such page"))
}

/// Such as when the address of a form is opened again.
async fn wrong_method(visitor: Visitor, method: Method) -> Response {
    let why = format!("{method} is not possible here; go to the page with the form, or back to the status");
    failed(&visitor, &Problem::new(StatusCode::METHOD_NOT_ALLOWED, why))
}

/// A page with these contents, or one that says what is wrong.
fn show(visitor: &Visitor, title: &str, contents: Result<Markup, Problem>) -> Response {
    match contents {
        Ok(contents) => Layout::new(title, visitor).render(contents).into_response(),
        Err(problem) => failed(visitor, &problem),
    }
}

/// A page that says what is wrong.
fn failed(visitor: &Visitor, problem: &Problem) -> Response {
    let page = Layout::new(&problem.title, visitor).render(html! {
        h1 { (problem.title) }
        p.bad { (words::shown(&problem.detail)) }
        p { a href="/" { "Status" } }
    });
    (StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), page).into_response()
}
