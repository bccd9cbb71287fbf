//! The API's unresolved orders: listing them, and having their providers asked again. A change needs the token, and says
//! who asks for it and why.
//!
//! Calls the operations; logs each change.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use order_timeout_core::order::OrderId;
use serde::{Deserialize, Serialize};
use tracing::info;
use utoipa::{IntoParams, ToSchema};

use super::super::site::Shared;
use super::described::{NameOrReason, OrderIdText, PlainText, Yes, given, yes};
use super::extract::{Body, Parameters, WithToken};
use super::reads::json;
use super::{Problem, not_too_many, operator, plain};
use crate::operations::unresolved::{self, Decision, DecisionError, UnresolvedOrder, UnresolvedPage, Which};
use crate::postgres::Operator;

/// Orders on a page, if the caller does not say, and at most.
const PAGE: i64 = 100;
const LARGEST_PAGE: i64 = 1_000;

/// Which orders.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct UnresolvedParameters {
    /// `next` of the page before.
    #[param(value_type = Option<OrderIdText>, inline)]
    after: Option<String>,
    /// Orders on the page, 1 to 1000; 100 if it is not given.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<i64>,
}

/// A page of orders that wait for a person.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::http) struct UnresolvedOrders {
    /// The one that has waited longest first.
    pub orders: Vec<UnresolvedOrder>,
    /// The parameter `after` of the next page; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// Orders that a payment provider's answers could not decide. They keep what they have reserved.
#[utoipa::path(get, path = "/unresolved", tag = "unresolved orders", params(UnresolvedParameters), responses(
    (status = 200, body = UnresolvedOrders),
))]
pub(super) async fn list(
    State(shared): State<Arc<Shared>>,
    Parameters(asked): Parameters<UnresolvedParameters>,
) -> Result<Response, Problem> {
    let limit = asked.limit.unwrap_or(PAGE);
    if !(1..=LARGEST_PAGE).contains(&limit) {
        return Err(Problem::bad_request(format!("{limit} orders do not fit on a page; ask for 1 to 1000")));
    }
    json(&page(&shared, asked.after.as_deref(), limit).await?)
}

/// A page of them.
pub(in crate::http) async fn page(
    shared: &Shared,
    after: Option<&str>,
    limit: i64,
) -> Result<UnresolvedOrders, Problem> {
    let after = after.map(OrderId::new).transpose();
    let after = after.map_err(|fault| Problem::bad_request(format!("after: {fault}")))?;
    let after = after.as_ref().map(OrderId::as_str);
    let orders = unresolved::list(&shared.sources().await?.database, &UnresolvedPage { after, limit }).await;
    let orders = orders.map_err(|error| unresolved::unavailable(&error))?;
    let is_full = i64::try_from(orders.len()).is_ok_and(|shown| shown >= limit);
    let next = orders.last().filter(|_| is_full).map(|last| last.order_id.clone());
    Ok(UnresolvedOrders { orders, next })
}

/// Unresolved orders to ask about again: exactly one of `ids`, `reason` and `all`.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(min_properties = 3, max_properties = 3)]
pub(in crate::http) struct UnresolvedChange {
    /// These.
    #[serde(default, deserialize_with = "given")]
    #[schema(nullable = false, value_type = Option<Vec<OrderIdText>>, min_items = 1, max_items = 1000)]
    pub ids: Option<Vec<String>>,
    /// All that are unresolved for this reason.
    #[serde(default, deserialize_with = "given")]
    #[schema(nullable = false, value_type = Option<PlainText>)]
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

/// What became of the orders.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::http) struct AskedAgain {
    /// Their providers are asked again.
    pub retried: Vec<String>,
}

/// Has the payment providers of these orders asked again, as if the orders had just fallen due. Orders that are not
/// unresolved are left out of the answer.
#[utoipa::path(post, path = "/unresolved/retry", tag = "unresolved orders", operation_id = "retry_unresolved",
    request_body = UnresolvedChange, security(("token" = [])), responses(
    (status = 200, body = AskedAgain),
))]
pub(super) async fn retry(
    WithToken(shared): WithToken,
    Body(change): Body<UnresolvedChange>,
) -> Result<Response, Problem> {
    json(&ask_again(&shared, change).await?)
}

/// How an unresolved order ends.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct UnresolvedDecision {
    /// The order.
    #[schema(value_type = OrderIdText)]
    id: String,
    /// What was found out at its provider.
    r#as: UnresolvedEnd,
    /// With `paid`: the attempt that was paid, if there are several.
    #[serde(default, deserialize_with = "given")]
    #[schema(nullable = false, value_type = Option<PlainText>)]
    reference: Option<String>,
    /// The operator's name, for the record.
    #[schema(value_type = NameOrReason)]
    who: String,
    /// Why, for the record.
    #[schema(value_type = NameOrReason)]
    why: String,
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
    (status = 409, body = Problem, content_type = "application/problem+json", description = "it cannot end so: why"),
))]
pub(super) async fn settle(
    WithToken(shared): WithToken,
    Body(asked): Body<UnresolvedDecision>,
) -> Result<StatusCode, Problem> {
    let operator = operator(&asked.who, &asked.why)?;
    let id = OrderId::new(&asked.id).map_err(|fault| Problem::bad_request(format!("id: {fault}")))?;
    let reference = asked.reference.as_deref().map(|text| plain("reference", text)).transpose()?;
    let decision = match asked.r#as {
        UnresolvedEnd::Closed => Decision::Closed,
        UnresolvedEnd::Paid => Decision::Paid { reference },
    };
    unresolved::decide(&shared.sources().await?.database, &id, decision, &operator).await.map_err(
        |error| match error {
            DecisionError::Unavailable(error) => error.into(),
            other => Problem::new(StatusCode::CONFLICT, other.to_string()),
        },
    )?;
    let Operator { who, why, run } = &operator;
    info!(who, why, %run, order_id = %id, end = ?asked.r#as, "an unresolved order is ended, over HTTP");
    Ok(StatusCode::NO_CONTENT)
}

/// For callers that were authorised, as of [`retry`].
pub(in crate::http) async fn ask_again(shared: &Shared, change: UnresolvedChange) -> Result<AskedAgain, Problem> {
    let operator = operator(&change.who, &change.why)?;
    let ids = change.ids.iter().flatten().map(OrderId::new).collect::<Result<Vec<_>, _>>();
    let ids = ids.map_err(|fault| Problem::bad_request(format!("ids: {fault}")))?;
    let ids = change.ids.is_some().then(|| not_too_many(ids)).transpose()?;
    let which = match (&ids, &change.reason, change.all) {
        (Some(ids), None, false) => Which::Orders(ids),
        (None, Some(reason), false) => Which::All { reason: Some(plain("reason", reason)?) },
        (None, None, true) => Which::All { reason: None },
        _ => return Err(Problem::bad_request("give exactly one of ids, reason and all")),
    };
    let retried = unresolved::retry(&shared.sources().await?.database, &which, &operator).await;
    let retried = retried.map_err(|error| unresolved::unavailable(&error))?;
    let Operator { who, why, run } = &operator;
    info!(who, why, %run, ?retried, "unresolved orders are asked about again, over HTTP");
    Ok(AskedAgain { retried })
}
