//! Late money: payments that paid for nothing, and the form that settles the chosen ones.
//!
//! A change needs a login, comes from the page itself, and says why.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use maud::{Markup, html};
use order_timeout_core::kind::Kind;
use serde::Deserialize;

use super::super::api::Problem;
use super::super::api::late::{RefundDue, Reopening, reopen_order, settle_refund_due};
use super::super::site::Shared;
use super::changes::{Fields, Filled, Permitted, answer, asked, choice, form, how_to_change};
use super::failed;
use super::layout::{Layout, Visitor, order_path};
use super::words::{count, money, shown, since};
use crate::operations::late_payments::{self, LatePage, LatePayment};
use crate::operations::orders_table::due::Money;

/// Payments on the page.
const PAGE: i64 = 100;

/// Which ones, and what was done to the ones before.
#[derive(Debug, Deserialize)]
pub(super) struct Asked {
    #[serde(default)]
    after: i64,
    #[serde(default)]
    refund_due: Option<u64>,
    #[serde(default)]
    not_open: Option<u64>,
    #[serde(default)]
    reopened: Option<u64>,
}

pub(super) async fn page(
    State(shared): State<Arc<Shared>>,
    visitor: Visitor,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Response {
    match read(&shared, asked).await {
        Ok((asked, payments)) => {
            Layout::new("Late money", &visitor).render(contents(&asked, &payments, &visitor)).into_response()
        }
        Err(problem) => failed(&visitor, &problem),
    }
}

async fn read(
    shared: &Shared,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Result<(Asked, Vec<LatePayment>), Problem> {
    let Query(asked) = asked?;
    let page = LatePage { with_settled: false, after: asked.after, limit: PAGE };
    let payments = late_payments::list(&shared.sources().await?.database, &page).await;
    Ok((asked, payments.map_err(late_payments::unavailable)?))
}

fn contents(asked: &Asked, payments: &[LatePayment], visitor: &Visitor) -> Markup {
    let is_full = i64::try_from(payments.len()).is_ok_and(|shown| shown >= PAGE);
    html! {
        h1 { "Late money" }
        p { "Payments that paid for nothing and are not settled, the oldest first. " strong { "To be given back" }
            " announces each once, on which your payment service gives it back. " strong { "Reopen" } " pays the closed
            order with it, if all that the order had reserved can be taken again." }
        (result(asked))
        @if payments.is_empty() {
            p { "None." }
        } @else if visitor.session.is_some() {
            (form(&table(payments, true, &visitor.at), &html! {
                button formaction="/late/refund-due" { "To be given back" }
                button formaction="/late/reopen" { "Reopen the orders" }
            }))
        } @else {
            (table(payments, false, &visitor.at))
            (how_to_change(visitor, "/late", "settle them", "order-timeout late settle"))
        }
        @if let Some(last) = payments.last().filter(|_| is_full) {
            p { a href=(format!("/late?after={}", last.id)) { "Next page" } }
        }
    }
}

fn result(asked: &Asked) -> Markup {
    html! {
        @if let Some(settled) = asked.refund_due {
            p.ok role="status" { (count(settled, "payment")) (if settled == 1 { " is" } else { " are" }) " to be given back." }
        }
        @if let Some(others @ 1..) = asked.not_open {
            p.bad role="status" { (count(others, "payment")) (if others == 1 { " was" } else { " were" }) " settled before." }
        }
        @if let Some(reopened) = asked.reopened { p.ok role="status" { (count(reopened, "order")) " reopened and paid." } }
    }
}

fn table(payments: &[LatePayment], is_choosable: bool, now: &str) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label="Late money" {
            table.cards {
                thead { tr {
                    @if is_choosable { th scope="col" { "chosen" } }
                    th scope="col" { "recorded" } th scope="col" { "order" } th.number scope="col" { "amount" }
                    th scope="col" { "reason" } th scope="col" { "payment" }
                } }
                tbody { @for payment in payments { (row(payment, is_choosable, now)) } }
            }
        }
    }
}

fn row(payment: &LatePayment, is_choosable: bool, now: &str) -> Markup {
    let amount = Money { currency: payment.currency.clone(), amount_minor: payment.amount_minor };
    html! {
        tr {
            @if is_choosable { (choice(payment.id, "payment")) }
            td data-name="recorded" { (since(&payment.recorded_at, now)) }
            td data-name="order" { a href=(order_path(&Kind::ORDER, &payment.order_id)) { code { (shown(&payment.order_id)) } } }
            td.number data-name="amount" { (money(&amount)) }
            td data-name="reason" { (shown(&payment.reason)) }
            td data-name="payment" { (shown(&payment.provider)) " " code { (shown(&payment.reference)) } }
        }
    }
}

pub(super) async fn refund_due(
    State(shared): State<Arc<Shared>>,
    Permitted { visitor, who }: Permitted,
    Filled(fields): Filled<Fields>,
) -> Response {
    let done = async {
        let asked = asked::<i64>(who, &fields)?;
        let change = RefundDue { ids: asked.ids, who: asked.who, why: asked.why };
        let done = settle_refund_due(&shared, change).await?;
        Ok(format!("/late?refund_due={}&not_open={}", done.settled.len(), done.not_open.len()))
    };
    answer(&visitor, done.await)
}

/// One after the other; the first that cannot be reopened ends it, and says why.
pub(super) async fn reopen(
    State(shared): State<Arc<Shared>>,
    Permitted { visitor, who }: Permitted,
    Filled(fields): Filled<Fields>,
) -> Response {
    let done = async {
        let asked = asked::<i64>(who, &fields)?;
        // One payment may have paid an order together with another that was chosen as well.
        let (mut used, mut reopened) = (Vec::new(), 0);
        for id in asked.ids {
            if !used.contains(&id) {
                let by = Reopening { who: asked.who.clone(), why: asked.why.clone() };
                used.extend(reopen_order(&shared, id, by).await?.late_payments);
                reopened += 1;
            }
        }
        Ok(format!("/late?reopened={reopened}"))
    };
    answer(&visitor, done.await)
}
