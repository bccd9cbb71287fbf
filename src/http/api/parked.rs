//! The API's parked alarms: listing, retrying and dropping them. A change needs the token, and says who asks for it and
//! why.
//!
//! Calls the operations; logs each change.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use order_timeout_amqp::publisher::ConfirmedPublisher;
use order_timeout_core::alarm::ParkReason;
use serde::Deserialize;
use tracing::info;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::super::site::Shared;
use super::described::{NameOrReason, ParkedReason, Yes, given, yes};
use super::extract::{Body, Parameters, WithToken};
use super::reads::json;
use super::{Problem, not_too_many, operator};
use crate::operations::parked::{self, Dropped, ParkedPage, Retried};
use crate::postgres::Operator;
use crate::postgres::parked_alarms::Selection;

/// Alarms on a page, if the caller does not say, and at most.
const PAGE: i64 = 100;
const LARGEST_PAGE: i64 = 1_000;

/// Which parked alarms.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ParkedParameters {
    /// Only those that were parked for this reason.
    #[param(value_type = Option<ParkedReason>, inline)]
    reason: Option<String>,
    /// `next` of the page before.
    after: Option<Uuid>,
    /// Alarms on the page, 1 to 1000; 100 if it is not given.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<i64>,
}

/// Parked alarms, the oldest first.
#[utoipa::path(get, path = "/parked", tag = "parked alarms", params(ParkedParameters), responses(
    (status = 200, body = ParkedPage),
    (status = 404, body = Problem, content_type = "application/problem+json",
     description = "the alarm of `after` is no longer parked"),
))]
pub(super) async fn list(
    State(shared): State<Arc<Shared>>,
    Parameters(asked): Parameters<ParkedParameters>,
) -> Result<Response, Problem> {
    let limit = asked.limit.unwrap_or(PAGE);
    if !(1..=LARGEST_PAGE).contains(&limit) {
        return Err(Problem::bad_request(format!("{limit} alarms do not fit on a page; ask for 1 to 1000")));
    }
    let selection = asked.reason.map(known_reason).transpose()?.map_or(Selection::All, Selection::Reason);
    json(&parked::list(&shared.sources().await?.database, &selection, asked.after, limit).await?)
}

/// A change of parked alarms: exactly one of `ids`, `reason` and `all`.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(min_properties = 3, max_properties = 3)]
pub(in crate::http) struct ParkedChange {
    /// These.
    #[serde(default, deserialize_with = "given")]
    #[schema(nullable = false, min_items = 1, max_items = 1000)]
    pub ids: Option<Vec<Uuid>>,
    /// All that were parked for this reason.
    #[serde(default, deserialize_with = "given")]
    #[schema(nullable = false, value_type = Option<ParkedReason>)]
    pub reason: Option<String>,
    /// All of them.
    #[serde(default, deserialize_with = "yes")]
    #[schema(value_type = Yes)]
    pub all: bool,
    /// The operator's name, for the record.
    #[schema(value_type = NameOrReason)]
    pub who: String,
    /// Why, for the record.
    #[schema(value_type = NameOrReason)]
    pub why: String,
}

impl ParkedChange {
    fn checked(self) -> Result<(Selection, Operator), Problem> {
        let selection = match (self.ids, self.reason, self.all) {
            (Some(ids), None, false) => Selection::Ids(not_too_many(ids)?),
            (None, Some(reason), false) => Selection::Reason(known_reason(reason)?),
            (None, None, true) => Selection::All,
            _ => return Err(Problem::bad_request("give exactly one of ids, reason and all")),
        };
        Ok((selection, operator(&self.who, &self.why)?))
    }
}

fn known_reason(reason: String) -> Result<String, Problem> {
    match ParkReason::WORDS.contains(&reason.as_str()) {
        true => Ok(reason),
        false => {
            Err(Problem::bad_request(format!("{reason} is no reason; give one of {}", ParkReason::WORDS.join(", "))))
        }
    }
}

/// Sends parked alarms back to the workers. Those that cannot be sent stay parked.
#[utoipa::path(post, path = "/parked/retry", tag = "parked alarms", request_body = ParkedChange,
    security(("token" = [])), responses(
    (status = 200, body = Retried),
    (status = 409, body = Problem, content_type = "application/problem+json", description = "there is no broker"),
))]
pub(super) async fn retry(WithToken(shared): WithToken, Body(change): Body<ParkedChange>) -> Result<Response, Problem> {
    json(&retry_alarms(&shared, change).await?)
}

/// Deletes parked alarms. No order depends on them: the sweep closes it.
#[utoipa::path(post, path = "/parked/drop", tag = "parked alarms", operation_id = "drop", request_body = ParkedChange,
    security(("token" = [])), responses(
    (status = 200, body = Dropped),
))]
pub(super) async fn drop_alarms(
    WithToken(shared): WithToken,
    Body(change): Body<ParkedChange>,
) -> Result<Response, Problem> {
    json(&drop_selected(&shared, change).await?)
}

/// For callers that were authorised, as of [`retry`].
pub(in crate::http) async fn retry_alarms(shared: &Shared, change: ParkedChange) -> Result<Retried, Problem> {
    let (selection, operator) = change.checked()?;
    let settings = &shared.settings;
    if !settings.delay.strategy.needs_broker() {
        let why = "delay.strategy is \"database\", so there is no broker to send alarms to; drop them, the sweep closes their orders";
        return Err(Problem::new(axum::http::StatusCode::CONFLICT, why));
    }
    let database = &shared.sources().await?.database;
    let confirmed = ConfirmedPublisher::connect(&settings.amqp, "parked retry").await;
    let confirmed = confirmed.map_err(|error| Problem::unavailable(error.to_string()))?;
    let retried = parked::retry_parked(database, &confirmed, &settings.names(), &selection, &operator).await?;
    let Operator { who, why, run } = &operator;
    info!(who, why, %run, alarms = retried.sent, kept = retried.kept.len(), "parked alarms were sent back over HTTP");
    Ok(retried)
}

/// For callers that were authorised, as of [`drop_alarms`].
pub(in crate::http) async fn drop_selected(shared: &Shared, change: ParkedChange) -> Result<Dropped, Problem> {
    let (selection, operator) = change.checked()?;
    let dropped = parked::drop_parked(&shared.sources().await?.database, &selection, &operator).await?;
    let Operator { who, why, run } = &operator;
    info!(who, why, %run, alarms = dropped.dropped, "parked alarms were dropped over HTTP");
    Ok(dropped)
}
