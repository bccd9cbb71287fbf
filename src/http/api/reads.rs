//! The API's questions.
//!
//! Each calls one operation. Nothing is changed.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use order_timeout_core::duration;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::read_rfc3339;
use order_timeout_core::order::{OrderId, Timestamp};
use serde::{Deserialize, Serialize};
use utoipa::IntoParams;

use super::super::site::Shared;
use super::Problem;
use super::described::{KindName, OrderIdText, PlainText};
use super::extract::{InPath, Parameters};
use crate::observe::last_hour::ClosedMinute;
use crate::operations::explain::Explanation;
use crate::operations::forecast::Forecast;
use crate::operations::pending::{CheckedQuery, Pending, PendingQuery};
use crate::operations::reminders::SentReminders;
use crate::operations::status::Status;
use crate::operations::{explain, forecast, pause_closing, pending, reminders, status};
use crate::postgres::one_line;
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

fn order_id(text: &str) -> Result<OrderId, Problem> {
    OrderId::new(text).map_err(|fault| Problem::bad_request(fault.to_string()))
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
    let found = status::status(&sources.database, &sources.all_orders().await).await;
    json(&found.map_err(|error| Problem::unavailable(one_line(&error)))?)
}

/// Which kinds of deadlines together.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct LastHourParameters {
    /// Only this kind; all together if it is not given.
    #[param(value_type = Option<KindName>, inline)]
    kind: Option<Kind>,
}

/// What this worker closed in each minute of the last hour, and how late. Minutes without closes are left out.
#[utoipa::path(get, path = "/last-hour", tag = "state", params(LastHourParameters), responses(
    (status = 200, body = Vec<ClosedMinute>),
))]
pub(super) async fn last_hour(
    State(shared): State<Arc<Shared>>,
    Parameters(LastHourParameters { kind }): Parameters<LastHourParameters>,
) -> Result<Response, Problem> {
    pause_closing::require_known(&shared.settings, kind.as_ref())?;
    json(&shared.served.last_hour(kind.as_ref(), Instant::now()))
}

/// One order's story in time, why it is still open, and what to do.
#[utoipa::path(get, path = "/orders/{order_id}", tag = "orders",
    params(("order_id" = inline(OrderIdText), Path, description = "As the orders table has it"), KindParameter),
    responses(
        (status = 200, body = Explanation, description = "`exists` is false if there is no such order"),
    ))]
pub(super) async fn order(
    State(shared): State<Arc<Shared>>,
    InPath(id): InPath<String>,
    Parameters(KindParameter { kind }): Parameters<KindParameter>,
) -> Result<Response, Problem> {
    let (id, sources) = (order_id(&id)?, shared.sources().await?);
    let found = explain::explain(&sources.database, sources.orders(&kind).await?, &kind, &id).await;
    json(&found.map_err(|error| Problem::unavailable(one_line(&error)))?)
}

/// Which orders of which window.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(in crate::http) struct PendingParameters {
    /// The kind of the deadlines, as the settings name it; `order` if it is not given.
    #[serde(default)]
    #[param(value_type = Option<KindName>, inline)]
    pub kind: Kind,
    /// The first deadline, RFC 3339; now if it is not given.
    #[param(format = DateTime)]
    from: Option<String>,
    /// The end of the window, excluded, RFC 3339; an hour after its beginning if it is not given.
    #[param(format = DateTime)]
    until: Option<String>,
    /// A part of an order's id, or of the id of one of its articles.
    #[param(value_type = Option<PlainText>, inline)]
    pub text: Option<String>,
    /// `next` of the page before; give `from` and `until` of that page as well.
    after: Option<String>,
    /// Orders on the page, 1 to 1000; 100 if it is not given.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
}

impl PendingParameters {
    /// Empty fields of a form are as good as none.
    pub(in crate::http) fn without_empty(self) -> Self {
        let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
        Self { from: filled(self.from), until: filled(self.until), after: filled(self.after), ..self }
    }

    /// # Errors
    /// A sentence about the first that cannot be read.
    pub(in crate::http) fn query(self) -> Result<CheckedQuery, Problem> {
        let query = PendingQuery {
            from: time("from", self.from.as_deref())?,
            until: time("until", self.until.as_deref())?,
            text: self.text,
            after: self.after,
            limit: self.limit,
        };
        Ok(query.checked()?)
    }
}

fn time(name: &str, text: Option<&str>) -> Result<Option<Timestamp>, Problem> {
    let Some(text) = text else { return Ok(None) };
    let why = || {
        Problem::bad_request(format!(
            "{name}={text} is not a time; write an RFC 3339 time with its offset, such as 2026-11-20T10:30:00Z"
        ))
    };
    read_rfc3339(text).map(Some).ok_or_else(why)
}

/// What falls due, page by page.
#[utoipa::path(get, path = "/pending", tag = "orders", params(PendingParameters), responses(
    (status = 200, body = Pending),
    (status = 409, body = Problem, content_type = "application/problem+json", description = "`until` is not after `from`"),
))]
pub(super) async fn pending(
    State(shared): State<Arc<Shared>>,
    Parameters(asked): Parameters<PendingParameters>,
) -> Result<Response, Problem> {
    let kind = asked.kind.clone();
    let query = asked.query()?;
    json(&pending::pending(shared.sources().await?.orders(&kind).await?, query).await?)
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

/// Reminders that were announced in the last hour.
#[utoipa::path(get, path = "/reminders", tag = "state", responses(
    (status = 200, body = Vec<SentReminders>),
))]
pub(super) async fn sent_reminders(State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    let sources = shared.sources().await?;
    let found = reminders::sent_in_last_hour(&sources.database).await;
    json(&found.map_err(|error| Problem::unavailable(one_line(&error)))?)
}
