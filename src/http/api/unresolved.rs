//! The API's unresolved orders: listing them, and having their providers asked again. A change needs the token, and says
//! who asks for it and why.
//!
//! Calls the operations; logs each change.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use order_timeout_core::kind::Kind;
use order_timeout_core::order::OrderId;
use serde::{Deserialize, Serialize};
use tracing::info;
use utoipa::{IntoParams, ToSchema};

use super::super::site::Shared;
use super::Problem;
use super::change::{Change, operator};
use super::described::{KindName, NameOrReason, OrderIdText, PageSize, PlainText, given};
use super::extract::{Body, Parameters, WithToken};
use super::reads::json;
use crate::operations::Page;
use crate::operations::orders_statements;
use crate::operations::pause_closing;
use crate::operations::unresolved::{self, Decision, UnresolvedOrder};
use crate::postgres::Operator;
use crate::postgres::selection::Selection;

/// Which orders.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct UnresolvedParameters {
    /// `next` of the page before.
    #[param(inline)]
    after: Option<OrderIdText>,
    /// Orders on the page, 1 to 1000; 100 if it is not given.
    #[serde(default)]
    #[param(value_type = Option<i64>, minimum = 1, maximum = 1000)]
    limit: PageSize,
}

/// Orders that a payment provider's answers could not decide, the one that has waited longest first. They keep what they
/// have reserved.
#[utoipa::path(get, path = "/unresolved", tag = "unresolved orders", params(UnresolvedParameters), responses(
    (status = 200, body = Page<UnresolvedOrder>),
))]
pub(super) async fn list(
    State(shared): State<Arc<Shared>>,
    Parameters(UnresolvedParameters { after, limit }): Parameters<UnresolvedParameters>,
) -> Result<Response, Problem> {
    let after = after.map(OrderId::from);
    json(&unresolved::list(&shared.sources().await?.database, after.as_ref(), limit.0).await?)
}

type UnresolvedChange = Change<OrderIdText, PlainText>;

/// What became of the orders.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::http) struct AskedAgain {
    /// Their providers are asked again.
    pub retried: Vec<String>,
}

/// Has the payment providers of these orders asked again, as if the orders had just fallen due. Orders that are not
/// unresolved are left out of the answer.
#[utoipa::path(post, path = "/unresolved/retry", tag = "unresolved orders", operation_id = "retry_unresolved",
    request_body = Change<OrderIdText, PlainText>, security(("token" = [])), responses(
    (status = 200, body = AskedAgain),
))]
pub(super) async fn retry(
    WithToken(shared): WithToken,
    Body(change): Body<UnresolvedChange>,
) -> Result<Response, Problem> {
    let (which, operator) = change.checked()?;
    json(&ask_again(&shared, &which, &operator).await?)
}

/// How an unresolved order ends.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct UnresolvedDecision {
    /// The order.
    id: OrderIdText,
    /// Its kind, if it is not the default one.
    #[schema(value_type = Option<KindName>)]
    kind: Option<Kind>,
    /// What was found out at its provider.
    r#as: UnresolvedEnd,
    /// With `paid`: the attempt that was paid, if there are several.
    #[serde(default, deserialize_with = "given")]
    #[schema(nullable = false)]
    reference: Option<PlainText>,
    /// The operator's name, for the record.
    who: NameOrReason,
    /// Why, for the record.
    why: NameOrReason,
}

/// The end of an unresolved order.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum UnresolvedEnd {
    /// No attempt was paid, and none can be paid any more.
    Closed,
    /// Its provider has the money.
    Paid,
}

/// Ends an unresolved order as closed or as paid, as an operator has found out at its provider.
#[utoipa::path(post, path = "/unresolved/settle", tag = "unresolved orders", operation_id = "settle_unresolved",
    request_body = UnresolvedDecision, security(("token" = [])), responses(
    (status = 204),
    (status = 404, body = Problem, content_type = "application/problem+json", description = "there is no such kind"),
    (status = 409, body = Problem, content_type = "application/problem+json", description = "it cannot end so: why"),
))]
pub(super) async fn settle(
    WithToken(shared): WithToken,
    Body(asked): Body<UnresolvedDecision>,
) -> Result<StatusCode, Problem> {
    let UnresolvedDecision { id: OrderIdText(id), kind, r#as: end, reference, who, why } = asked;
    let operator = operator(who, why);
    let decision = match end {
        UnresolvedEnd::Closed => Decision::Closed,
        UnresolvedEnd::Paid => Decision::Paid { reference: reference.as_ref().map(|PlainText(text)| text.as_str()) },
    };
    pause_closing::require_known(&shared.settings, kind.as_ref())?;
    let database = &shared.sources().await?.database;
    let of = orders_statements::claimed_kind(database, &shared.settings, &kind.unwrap_or(Kind::ORDER)).await?;
    unresolved::decide(database, &of, &id, decision, &operator).await?;
    let Operator { who, why, run } = &operator;
    info!(who, why, %run, order_id = %id, ?end, "an unresolved order is ended, over HTTP");
    Ok(StatusCode::NO_CONTENT)
}

/// For callers that were authorised, as of [`retry`].
pub(in crate::http) async fn ask_again(
    shared: &Shared,
    which: &Selection<OrderId>,
    operator: &Operator,
) -> Result<AskedAgain, Problem> {
    let retried = unresolved::retry(&shared.sources().await?.database, which, operator).await?;
    let Operator { who, why, run } = operator;
    info!(who, why, %run, ?retried, "unresolved orders are asked about again, over HTTP");
    Ok(AskedAgain { retried })
}
