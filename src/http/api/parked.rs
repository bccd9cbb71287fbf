//! The API's parked alarms: listing, retrying and dropping them. A change needs the token, and says who asks for it and
//! why.
//!
//! Calls the operations; logs each change.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use order_timeout_amqp::publisher::ConfirmedPublisher;
use serde::Deserialize;
use tracing::info;
use utoipa::IntoParams;
use uuid::Uuid;

use super::super::site::Shared;
use super::Problem;
use super::change::Change;
use super::described::{AlarmId, PageSize, ParkedReason};
use super::extract::{Body, Parameters, WithToken};
use super::reads::json;
use crate::operations::Page;
use crate::operations::parked::{self, Dropped, Retried};
use crate::postgres::Operator;
use crate::postgres::parked_alarms::Parked;
use crate::postgres::selection::Selection;

/// Which parked alarms.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ParkedParameters {
    /// Only those that were parked for this reason.
    #[param(inline)]
    reason: Option<ParkedReason>,
    /// `next` of the page before.
    after: Option<Uuid>,
    /// Alarms on the page, 1 to 1000; 100 if it is not given.
    #[serde(default)]
    #[param(value_type = Option<i64>, minimum = 1, maximum = 1000)]
    limit: PageSize,
}

/// Parked alarms, the oldest first.
#[utoipa::path(get, path = "/parked", tag = "parked alarms", params(ParkedParameters), responses(
    (status = 200, body = Page<Parked>),
    (status = 404, body = Problem, content_type = "application/problem+json",
     description = "the alarm of `after` is no longer parked"),
))]
pub(super) async fn list(
    State(shared): State<Arc<Shared>>,
    Parameters(ParkedParameters { reason, after, limit }): Parameters<ParkedParameters>,
) -> Result<Response, Problem> {
    let selection = reason.map_or(Selection::All, |ParkedReason(reason)| Selection::Reason(reason));
    json(&parked::list(&shared.sources().await?.database, &selection, after, limit.0).await?)
}

type ParkedChange = Change<AlarmId, ParkedReason>;

/// Sends parked alarms back to the workers. Those that cannot be sent stay parked.
#[utoipa::path(post, path = "/parked/retry", tag = "parked alarms", request_body = Change<AlarmId, ParkedReason>,
    security(("token" = [])), responses(
    (status = 200, body = Retried),
    (status = 409, body = Problem, content_type = "application/problem+json", description = "there is no broker"),
))]
pub(super) async fn retry(WithToken(shared): WithToken, Body(change): Body<ParkedChange>) -> Result<Response, Problem> {
    let (selection, operator) = change.checked()?;
    json(&retry_alarms(&shared, &selection, &operator).await?)
}

/// Deletes parked alarms. No order depends on them: the sweep closes it.
#[utoipa::path(post, path = "/parked/drop", tag = "parked alarms", operation_id = "drop", request_body = Change<AlarmId, ParkedReason>,
    security(("token" = [])), responses(
    (status = 200, body = Dropped),
))]
pub(super) async fn drop_alarms(
    WithToken(shared): WithToken,
    Body(change): Body<ParkedChange>,
) -> Result<Response, Problem> {
    let (selection, operator) = change.checked()?;
    json(&drop_selected(&shared, &selection, &operator).await?)
}

/// For callers that were authorised, as of [`retry`].
pub(in crate::http) async fn retry_alarms(
    shared: &Shared,
    selection: &Selection,
    operator: &Operator,
) -> Result<Retried, Problem> {
    let settings = &shared.settings;
    if !settings.delay.strategy.needs_broker() {
        let why = "delay.strategy is \"database\", so there is no broker to send alarms to; drop them, the sweep closes their orders";
        return Err(Problem::new(StatusCode::CONFLICT, why));
    }
    let database = &shared.sources().await?.database;
    let confirmed = ConfirmedPublisher::connect(&settings.amqp, "parked retry").await;
    let confirmed = confirmed.map_err(|error| Problem::unavailable(error.to_string()))?;
    let retried = parked::retry_parked(database, &confirmed, &settings.names(), selection, operator).await?;
    let Operator { who, why, run } = operator;
    info!(who, why, %run, alarms = retried.sent, kept = retried.kept.len(), "parked alarms were sent back over HTTP");
    Ok(retried)
}

/// For callers that were authorised, as of [`drop_alarms`].
pub(in crate::http) async fn drop_selected(
    shared: &Shared,
    selection: &Selection,
    operator: &Operator,
) -> Result<Dropped, Problem> {
    let dropped = parked::drop_parked(&shared.sources().await?.database, selection, operator).await?;
    let Operator { who, why, run } = operator;
    info!(who, why, %run, alarms = dropped.dropped, "parked alarms were dropped over HTTP");
    Ok(dropped)
}
