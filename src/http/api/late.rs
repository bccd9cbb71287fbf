//! The API's late money: listing it, and settling each piece once. A change needs the token, and says who asks for it and
//! why.
//!
//! Calls the operations; logs each change.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use order_timeout_core::kind::Kind;
use serde::{Deserialize, Serialize};
use tracing::info;
use utoipa::{IntoParams, ToSchema};

use super::super::site::Shared;
use super::described::{NameOrReason, integers};
use super::extract::{Body, InPath, Parameters, WithToken};
use super::reads::json;
use super::{Problem, not_too_many, operator};
use crate::operations::late_payments::{self, LatePage, LatePayment, ReopenedOrder};
use crate::postgres::Operator;

/// Payments on a page, if the caller does not say, and at most.
const PAGE: i64 = 100;
const LARGEST_PAGE: i64 = 1_000;

/// Which payments.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct LateParameters {
    /// Also those that are settled.
    #[serde(default)]
    all: bool,
    /// `next` of the page before.
    after: Option<i64>,
    /// Payments on the page, 1 to 1000; 100 if it is not given.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<i64>,
}

/// A page of payments that paid for nothing.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct LatePayments {
    /// In the order in which they were recorded.
    payments: Vec<LatePayment>,
    /// The parameter `after` of the next page; absent at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<i64>,
}

/// Payments that paid for nothing and are not settled.
#[utoipa::path(get, path = "/late-payments", tag = "late money", params(LateParameters), responses(
    (status = 200, body = LatePayments),
))]
pub(super) async fn list(
    State(shared): State<Arc<Shared>>,
    Parameters(asked): Parameters<LateParameters>,
) -> Result<Response, Problem> {
    let limit = asked.limit.unwrap_or(PAGE);
    if !(1..=LARGEST_PAGE).contains(&limit) {
        return Err(Problem::bad_request(format!("{limit} payments do not fit on a page; ask for 1 to 1000")));
    }
    let page = LatePage { with_settled: asked.all, after: asked.after.unwrap_or(0), limit };
    let payments = late_payments::list(&shared.sources().await?.database, &page).await;
    let payments = payments.map_err(late_payments::unavailable)?;
    let is_full = i64::try_from(payments.len()).is_ok_and(|shown| shown >= limit);
    let next = payments.last().filter(|_| is_full).map(|last| last.id);
    json(&LatePayments { payments, next })
}

/// Payments to settle.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::http) struct RefundDue {
    /// These.
    #[serde(deserialize_with = "integers")]
    #[schema(min_items = 1, max_items = 1000)]
    pub ids: Vec<i64>,
    /// The operator's name, for the record.
    #[schema(value_type = NameOrReason)]
    pub who: String,
    /// Why, for the record.
    #[schema(value_type = NameOrReason)]
    pub why: String,
}

/// What became of the payments.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::http) struct Refunded {
    /// They are to be given back; each is announced once.
    pub settled: Vec<i64>,
    /// They were settled before, or do not exist.
    pub not_open: Vec<i64>,
}

/// Settles payments as due to be given back, and announces each. Gives no money back itself.
#[utoipa::path(post, path = "/late-payments/refund-due", tag = "late money", request_body = RefundDue,
    security(("token" = [])), responses(
    (status = 200, body = Refunded),
))]
pub(super) async fn refund_due(
    WithToken(shared): WithToken,
    Body(change): Body<RefundDue>,
) -> Result<Response, Problem> {
    json(&settle_refund_due(&shared, change).await?)
}

/// Who reopens an order, and why.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::http) struct Reopening {
    /// The operator's name, for the record.
    #[schema(value_type = NameOrReason)]
    pub who: String,
    /// Why, for the record.
    #[schema(value_type = NameOrReason)]
    pub why: String,
}

/// Pays the closed order of a late payment with it, and takes again what the order had reserved; all of that or nothing.
#[utoipa::path(post, path = "/late-payments/{id}/reopen", tag = "late money", request_body = Reopening,
    params(("id" = i64, Path, description = "Of the late payment")),
    security(("token" = [])), responses(
    (status = 200, body = ReopenedOrder),
    (status = 409, body = Problem, content_type = "application/problem+json", description = "it cannot be reopened: why"),
))]
pub(super) async fn reopen(
    WithToken(shared): WithToken,
    InPath(id): InPath<i64>,
    Body(change): Body<Reopening>,
) -> Result<Response, Problem> {
    json(&reopen_order(&shared, id, change).await?)
}

/// For callers that were authorised, as of [`refund_due`].
pub(in crate::http) async fn settle_refund_due(shared: &Shared, change: RefundDue) -> Result<Refunded, Problem> {
    let (operator, ids) = (operator(&change.who, &change.why)?, not_too_many(change.ids)?);
    let database = &shared.sources().await?.database;
    let settled = late_payments::refund_due(database, &ids, &operator).await;
    let settled = settled.map_err(late_payments::unavailable)?;
    let not_open: Vec<i64> = ids.into_iter().filter(|id| !settled.contains(id)).collect();
    let Operator { who, why, run } = &operator;
    info!(who, why, %run, ?settled, ?not_open, "late payments were settled as due to be given back over HTTP");
    Ok(Refunded { settled, not_open })
}

/// For callers that were authorised, as of [`reopen`].
pub(in crate::http) async fn reopen_order(
    shared: &Shared,
    id: i64,
    change: Reopening,
) -> Result<ReopenedOrder, Problem> {
    let operator = operator(&change.who, &change.why)?;
    if !shared.settings.has_default_orders(&Kind::ORDER) {
        let why = "only orders of the default table can be reopened, and the settings name another; settle the payment as due to be given back, or reopen the order yourself";
        return Err(Problem::new(StatusCode::CONFLICT, why));
    }
    let reopened = late_payments::reopen(&shared.sources().await?.database, id, &operator).await;
    let reopened = reopened.map_err(late_payments::unavailable)?;
    let reopened = reopened.map_err(|why| Problem::new(StatusCode::CONFLICT, why.to_string()))?;
    let Operator { who, why, run } = &operator;
    info!(who, why, %run, late_payment = id, order_id = %reopened.order_id, "an order was reopened over HTTP");
    Ok(reopened)
}
