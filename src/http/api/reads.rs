//! The API's questions.
//!
//! Each calls one operation. Nothing is changed.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use order_timeout_core::duration;
use order_timeout_core::kind::Kind;
use order_timeout_core::order::{OrderId, Timestamp};
use serde::{Deserialize, Serialize};
use utoipa::IntoParams;

use super::super::site::Shared;
use super::Problem;
use super::described::{KindName, OrderIdText, PageSize, PlainText, time};
use super::extract::{InPath, Parameters};
use crate::operations::explain::Explanation;
use crate::operations::forecast::{DueOrders, Forecast, OrdersQuery};
use crate::operations::status::Status;
use crate::operations::{explain, forecast, status};
use crate::sanitize;

/// JSON without hidden characters, which are escaped in it.
pub(super) fn json<T: Serialize>(answer: &T) -> Result<Response, Problem> {
    let text = serde_json::to_string(answer)
        .map_err(|error| Problem::new(axum::http::StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))?;
    let mut response = sanitize::visible(&text).into_owned().into_response();
    let json = axum::http::HeaderValue::from_static("application/json");
    response.headers_mut().insert(axum::http::header::CONTENT_TYPE, json);
    Ok(response)
}

/// Which kind of deadline.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(in crate::http) struct KindParameter {
    /// As the settings name it; `order` if it is not given.
    #[serde(default)]
    #[param(value_type = Option<KindName>, inline)]
    pub kind: Kind,
}

/// Whether orders of every kind are closed on time right now, what waits, and which workers run.
#[utoipa::path(get, path = "/status", tag = "state", responses(
    (status = 200, body = Status),
))]
pub(super) async fn status(State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let sources = shared.sources().await?;
    json(&status::status(&sources.database, &sources.all_orders().await).await?)
}

/// One order's story in time, why it is still open, and what to do.
#[utoipa::path(get, path = "/orders/{order_id}", tag = "orders",
    params(("order_id" = inline(OrderIdText), Path, description = "As the orders table has it"), KindParameter),
    responses(
        (status = 200, body = Explanation, description = "`exists` is false if there is no such order"),
    ))]
pub(super) async fn order(
    State(shared): State<Arc<Shared>>,
    InPath(id): InPath<OrderId>,
    Parameters(KindParameter { kind }): Parameters<KindParameter>,
) -> Result<Response, Problem> {
    let sources = shared.sources().await?;
    json(&explain::explain(&sources.database, sources.orders(&kind).await?, &kind, &id).await?)
}

/// Which orders of which window.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(in crate::http) struct OrdersParameters {
    /// The kind of the deadlines, as the settings name it; `order` if it is not given.
    #[serde(default)]
    #[param(value_type = Option<KindName>, inline)]
    pub kind: Kind,
    /// The first deadline, RFC 3339; now if it is not given. An earlier time shows overdue orders as well.
    #[serde(default, deserialize_with = "time")]
    #[param(value_type = Option<String>, format = DateTime)]
    from: Option<Timestamp>,
    /// The end of the window, excluded, RFC 3339; six hours after its beginning if it is not given.
    #[serde(default, deserialize_with = "time")]
    #[param(value_type = Option<String>, format = DateTime)]
    until: Option<Timestamp>,
    /// A part of an order's id, or of the id of one of its articles.
    #[param(inline)]
    text: Option<PlainText>,
    /// `next` of the page before; give `from` and `until` of that page as well.
    after: Option<String>,
    /// Orders on the page, 1 to 1000; 100 if it is not given.
    #[serde(default)]
    #[param(value_type = Option<i64>, minimum = 1, maximum = 1000)]
    limit: PageSize,
}

impl OrdersParameters {
    /// The text that is searched for.
    pub(in crate::http) fn text(&self) -> &str {
        self.text.as_ref().map_or("", |PlainText(text)| text)
    }

    pub(in crate::http) fn query(self) -> OrdersQuery {
        let Self { from, until, text, after, limit: PageSize(limit), .. } = self;
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        OrdersQuery { from, until, text: text.map(String::from), after, limit }
    }
}

/// The orders that fall due, page by page.
#[utoipa::path(get, path = "/forecast/orders", tag = "orders", params(OrdersParameters), responses(
    (status = 200, body = DueOrders),
    (status = 409, body = Problem, content_type = "application/problem+json", description = "`until` is not after `from`"),
))]
pub(super) async fn forecast_orders(
    State(shared): State<Arc<Shared>>,
    Parameters(asked): Parameters<OrdersParameters>,
) -> Result<Response, Problem> {
    let orders = shared.sources().await?.orders(&asked.kind).await?;
    json(&forecast::due_orders(orders, asked.query()).await?)
}

/// Which kind, and how far to look.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ForecastParameters {
    /// The kind of the deadlines, as the settings name it; `order` if it is not given.
    #[serde(default)]
    #[param(value_type = Option<KindName>, inline)]
    kind: Kind,
    /// With its unit, 1m to 7d; 6h if it is not given.
    #[param(pattern = "^([1-9][0-9]{0,3}m|([1-9][0-9]?|1[0-5][0-9]|16[0-8])h|[1-7]d)$")]
    next: Option<String>,
}

/// What falls due in each of the next minutes, beside what can be closed in a minute.
#[utoipa::path(get, path = "/forecast", tag = "orders", params(ForecastParameters), responses(
    (status = 200, body = Forecast),
))]
pub(super) async fn forecast(
    State(shared): State<Arc<Shared>>,
    Parameters(asked): Parameters<ForecastParameters>,
) -> Result<Response, Problem> {
    let next = match &asked.next {
        None => forecast::USUAL_REACH,
        Some(text) => duration::parse(text).map_err(|fault| {
            Problem::bad_request(format!("next: {fault}; write a number and its unit, such as 30m or 6h"))
        })?,
    };
    let sources = shared.sources().await?;
    json(&forecast::forecast(&sources.database, sources.orders(&asked.kind).await?, next).await?)
}
