//! Late money: payments that paid for nothing, and the form that settles the chosen ones.
//!
//! A change needs a login, comes from the page itself, and says why.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use order_timeout_core::kind::Kind;
use serde::Deserialize;

use super::super::api::late::{reopen_order, settle_refund_due};
use super::super::site::Shared;
use super::changes::{ChoiceList, Fields, Filled, Permitted, answer, chosen};
use super::layout::{Visitor, order_link};
use super::words::{count, money, shown, since};
use super::{PAGE_SIZE, show};
use crate::operations::Page;
use crate::operations::late_payments::{self, LatePayment};
use crate::operations::orders_table::due::Money;

/// Which ones, and what was done to the ones before.
#[derive(Debug, Deserialize)]
pub(super) struct Asked {
    #[serde(default)]
    after: i64,
    refund_due: Option<u64>,
    not_open: Option<u64>,
    reopened: Option<u64>,
}

pub(super) async fn page(
    State(shared): State<Arc<Shared>>,
    visitor: Visitor,
    Filled(asked): Filled<Asked>,
) -> Response {
    let read = async {
        let database = &shared.sources().await?.database;
        let payments = late_payments::list(database, false, asked.after, PAGE_SIZE).await?;
        Ok(contents(&asked, &payments, &visitor))
    };
    show(&visitor, "Late money", read.await)
}

fn contents(asked: &Asked, payments: &Page<LatePayment>, visitor: &Visitor) -> Markup {
    let amount = |late: &LatePayment| Money { currency: late.currency.clone(), amount_minor: late.amount_minor };
    let list = ChoiceList {
        path: "/late",
        name: "Late money",
        row: "payment",
        id: |late: &LatePayment| late.id.to_string(),
        columns: vec![
            ("recorded", false, Box::new(|late| since(&late.recorded_at, &visitor.at))),
            ("order", false, Box::new(|late| order_link(&Kind::ORDER, &late.order_id))),
            ("amount", true, Box::new(move |late| html! { (money(&amount(late))) })),
            ("reason", false, Box::new(|late| html! { (shown(&late.reason)) })),
            (
                "payment",
                false,
                Box::new(|late| html! { (shown(&late.provider)) " " code { (shown(&late.reference)) } }),
            ),
        ],
        buttons: html! {
            button formaction="/late/refund-due" { "To be given back" }
            button formaction="/late/reopen" { "Reopen the orders" }
        },
        change: ("settle them", "order-timeout late settle"),
    };
    html! {
        h1 { "Late money" }
        p { "Payments that paid for nothing and are not settled, the oldest first. " strong { "To be given back" }
            " announces each once, on which your payment service gives it back. " strong { "Reopen" } " pays the closed
            order with it, if all that the order had reserved can be taken again." }
        (result(asked))
        (list.render(payments, visitor))
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

pub(super) async fn refund_due(
    State(shared): State<Arc<Shared>>,
    Permitted { visitor, who }: Permitted,
    Filled(fields): Filled<Fields>,
) -> Response {
    let done = async {
        let (ids, operator) = chosen(who, &fields)?;
        let done = settle_refund_due(&shared, &ids, &operator).await?;
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
        let (ids, operator) = chosen::<i64>(who, &fields)?;
        // One payment may have paid an order together with another that was chosen as well.
        let (mut used, mut reopened) = (Vec::new(), 0);
        for id in ids {
            if !used.contains(&id) {
                used.extend(reopen_order(&shared, id, &operator).await?.late_payments);
                reopened += 1;
            }
        }
        Ok(format!("/late?reopened={reopened}"))
    };
    answer(&visitor, done.await)
}
