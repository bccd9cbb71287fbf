//! The API's pauses of closing: listing, beginning and ending them. A change needs the token, and says who asks for it and
//! why; the table `closing_pauses` keeps both.
//!
//! Calls the operations; logs each change.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use order_timeout_core::kind::Kind;
use serde::Deserialize;
use tracing::info;
use utoipa::ToSchema;

use super::super::site::Shared;
use super::Problem;
use super::change::operator;
use super::described::{KindName, NameOrReason};
use super::extract::{Body, WithToken};
use super::reads::json;
use crate::operations::pause_closing::{self, DueAtResume, Paused, Pauses, Resumed};
use crate::postgres::Operator;

/// Pauses that are over, in an answer.
pub(in crate::http) const ENDED: i64 = 20;

/// The pauses that last, and the newest of those that are over.
#[utoipa::path(get, path = "/pauses", tag = "pauses", responses(
    (status = 200, body = Pauses),
))]
pub(super) async fn list(State(shared): State<Arc<Shared>>) -> Result<Response, Problem> {
    json(&pause_closing::list(&shared.sources().await?.database, ENDED).await?)
}

/// Which kind is paused.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct PauseChange {
    /// As the settings name it; every kind if it is not given.
    #[schema(value_type = Option<KindName>)]
    kind: Option<Kind>,
    /// The operator's name, for the record.
    who: NameOrReason,
    /// Why, for the record.
    why: NameOrReason,
}

/// Which kind is resumed.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ResumeChange {
    /// As the settings name it; every kind if it is not given.
    #[schema(value_type = Option<KindName>)]
    kind: Option<Kind>,
    /// The operator's name, for the record.
    who: NameOrReason,
    /// Why, for the record.
    why: NameOrReason,
    /// Whether more than 20 orders that are due are to be closed.
    #[serde(default)]
    yes: bool,
}

/// Pauses closing: no worker closes an order of the kind until it is resumed, also after a restart.
#[utoipa::path(post, path = "/pauses", tag = "pauses", request_body = PauseChange, security(("token" = [])), responses(
    (status = 200, body = Paused, description = "`began` is false if it was paused before"),
    (status = 404, body = Problem, content_type = "application/problem+json", description = "there is no such kind"),
))]
pub(super) async fn pause(WithToken(shared): WithToken, Body(change): Body<PauseChange>) -> Result<Response, Problem> {
    json(&begin_pause(&shared, change.kind.as_ref(), &operator(change.who, change.why)).await?)
}

/// Ends the pause of a kind, or every pause: what is due is closed then.
#[utoipa::path(post, path = "/pauses/resume", tag = "pauses", request_body = ResumeChange,
    security(("token" = [])), responses(
    (status = 200, body = Resumed, description = "`still_paused` has a pause of every kind, which is not ended for one"),
    (status = 404, body = Problem, content_type = "application/problem+json", description = "there is no such kind"),
    (status = 409, body = Problem, content_type = "application/problem+json",
        description = "more than 20 orders are due, and `yes` is not true"),
))]
pub(super) async fn resume(
    WithToken(shared): WithToken,
    Body(change): Body<ResumeChange>,
) -> Result<Response, Problem> {
    let ResumeChange { kind, who, why, yes } = change;
    json(&end_pauses(&shared, kind.as_ref(), &operator(who, why), yes).await?)
}

/// For callers that were authorised, as of [`pause`].
pub(in crate::http) async fn begin_pause(
    shared: &Shared,
    kind: Option<&Kind>,
    operator: &Operator,
) -> Result<Paused, Problem> {
    pause_closing::require_known(&shared.settings, kind)?;
    let (who, why) = (&operator.who, operator.why.as_deref().unwrap_or_default());
    let paused = pause_closing::pause(&shared.sources().await?.database, kind, why, who).await?;
    info!(who, why, kind = kind.map(Kind::as_str), began = paused.began, "closing was paused over HTTP");
    Ok(paused)
}

/// For callers that were authorised, as of [`resume`].
pub(in crate::http) async fn end_pauses(
    shared: &Shared,
    kind: Option<&Kind>,
    operator: &Operator,
    yes: bool,
) -> Result<Resumed, Problem> {
    pause_closing::require_known(&shared.settings, kind)?;
    let (who, why, database) = (&operator.who, operator.why.as_deref(), &shared.sources().await?.database);
    let resumed = pause_closing::resume(database, &shared.settings, kind, why, who, yes).await?;
    if resumed.needs_yes {
        let due: Vec<String> = resumed.due.iter().map(DueAtResume::sentence).collect();
        let why = format!(
            "{}; nothing was resumed; to close them, load the page again and check its box, or send `yes`",
            due.join("; ")
        );
        return Err(Problem::new(StatusCode::CONFLICT, why));
    }
    info!(who, why, kind = kind.map(Kind::as_str), ended = resumed.ended.len(), "closing was resumed over HTTP");
    Ok(resumed)
}
