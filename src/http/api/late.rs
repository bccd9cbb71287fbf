//! The API's late money: listing it, and settling each piece once. A change needs the token, and says who asks for it and
//! why.
//!
//! Calls the operations; logs each change.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use tracing::info;
use utoipa::{IntoParams, ToSchema};

use super::super::site::Shared;
use super::Problem;
use super::change::{not_too_many, operator};
use super::described::{NameOrReason, PageSize, integers};
use super::extract::{Body, InPath, Parameters, WithToken};
use super::reads::json;
use crate::operations::Page;
use crate::operations::late_payments::{self, LatePayment, Refunded, ReopenedOrder};
use crate::postgres::Operator;

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
    #[serde(default)]
    #[param(value_type = Option<i64>, minimum = 1, maximum = 1000)]
    limit: PageSize,
}

/// Payments that paid for nothing and are not settled, in the order in which they were recorded.
#[utoipa::path(get, path = "/late-payments", tag = "late money", params(LateParameters), responses(
    (status = 200, body = Page<LatePayment>),
))]
pub(super) async fn list(
    State(shared): State<Arc<Shared>>,
    Parameters(LateParameters { all, after, limit }): Parameters<LateParameters>,
) -> Result<Response, Problem> {
    let database = &shared.sources().await?.database;
    json(&late_payments::list(database, all, after.unwrap_or(0), limit.0).await?)
}

/// Payments to settle.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RefundDue {
    /// These.
    #[serde(deserialize_with = "integers")]
    #[schema(min_items = 1, max_items = 1000)]
    ids: Vec<i64>,
    /// The operator's name, for the record.
    who: NameOrReason,
    /// Why, for the record.
    why: NameOrReason,
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
    let RefundDue { ids, who, why } = change;
    json(&settle_refund_due(&shared, &not_too_many(ids)?, &operator(who, why)).await?)
}

/// Who reopens an order, and why.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Reopening {
    /// The operator's name, for the record.
    who: NameOrReason,
    /// Why, for the record.
    why: NameOrReason,
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
    Body(Reopening { who, why }): Body<Reopening>,
) -> Result<Response, Problem> {
    json(&reopen_order(&shared, id, &operator(who, why)).await?)
}

/// For callers that were authorised, as of [`refund_due`].
pub(in crate::http) async fn settle_refund_due(
    shared: &Shared,
    ids: &[i64],
    operator: &Operator,
) -> Result<Refunded, Problem> {
    let done = late_payments::refund_due(&shared.sources().await?.database, ids, operator).await?;
    let (Operator { who, why, run }, Refunded { settled, not_open }) = (operator, &done);
    info!(who, why, %run, ?settled, ?not_open, "late payments were settled as due to be given back over HTTP");
    Ok(done)
}

/// For callers that were authorised, as of [`reopen`].
pub(in crate::http) async fn reopen_order(
    shared: &Shared,
    id: i64,
    operator: &Operator,
) -> Result<ReopenedOrder, Problem> {
    let reopened = late_payments::reopen(&shared.sources().await?.database, &shared.settings, id, operator).await?;
    let Operator { who, why, run } = operator;
    info!(who, why, %run, late_payment = id, order_id = %reopened.order_id, "an order was reopened over HTTP");
    Ok(reopened)
}
