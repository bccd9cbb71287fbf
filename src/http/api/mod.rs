//! The API below `/api/v1`: the operations as JSON. `docs/openapi.yaml` is generated from the routes and types in this
//! folder, and a test keeps it equal.
//!
//! Reads parameters, calls an operation, and answers; decides nothing else.

pub(super) mod change;
mod described;
mod extract;
pub(super) mod late;
pub(super) mod parked;
pub(super) mod pauses;
mod problem;
pub(super) mod reads;
pub(super) mod unresolved;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{Method, StatusCode};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{Info, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::site::Shared;
pub(super) use problem::Problem;

/// Where it begins.
const ROOT: &str = "/api/v1";
/// A thousand order ids of 200 bytes, each byte escaped, and a reason. Read only from clients with the token.
const LARGEST_BODY_BYTES: usize = 1024 * 1024;

fn described() -> OpenApiRouter<Arc<Shared>> {
    let routes = OpenApiRouter::new()
        .routes(routes!(reads::status))
        .routes(routes!(reads::order))
        .routes(routes!(reads::forecast))
        .routes(routes!(reads::forecast_orders))
        .routes(routes!(parked::list))
        .routes(routes!(parked::retry))
        .routes(routes!(parked::drop_alarms))
        .routes(routes!(late::list))
        .routes(routes!(late::refund_due))
        .routes(routes!(late::reopen))
        .routes(routes!(unresolved::list))
        .routes(routes!(unresolved::retry))
        .routes(routes!(unresolved::settle))
        .routes(routes!(pauses::list, pauses::pause))
        .routes(routes!(pauses::resume));
    OpenApiRouter::new().nest(ROOT, routes)
}

/// The routes.
pub(super) fn router() -> Router<Arc<Shared>> {
    let (router, _) = described().split_for_parts();
    router
        .route(&format!("{ROOT}/{{*path}}"), axum::routing::any(no_such_path))
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(LARGEST_BODY_BYTES))
}

async fn no_such_path() -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "there is no such path; docs/openapi.yaml lists them")
}

async fn wrong_method(method: Method) -> Problem {
    let why = format!("{method} is not possible here; docs/openapi.yaml says what is");
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, why)
}

/// The API's description, as of `docs/openapi.yaml`.
#[must_use]
pub fn openapi() -> OpenApi {
    let mut api = described().into_openapi();
    let mut info = Info::new("order-timeout", "1");
    info.description = Some(
        "What falls due, why an order is open, parked alarms, late money, unresolved orders and pauses of closing. Served below http.listen if http.page is true. \
         Errors are application/problem+json (RFC 9457). Text from outside, such as ids, names, reasons and bodies, is data: it is what was stored. \
         Characters that are invisible or change the direction of text are written as JSON escapes (such as \\u202e), and a program that shows them must do so too; \
         in `detail`, which is for people, they are shown as such."
            .to_owned(),
    );
    api.info = info;
    described::add_errors(&mut api);
    let bearer = SecurityScheme::Http(
        HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("The token in http.token_file. Without that setting nothing can be changed."))
            .build(),
    );
    api.components.get_or_insert_default().add_security_scheme("token", bearer);
    api
}
