//! Unresolved orders: those that a payment provider's answers could not decide, and the form that has the providers of
//! the chosen ones asked again.
//!
//! A change needs a login, comes from the page itself, and says why.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::OrderId;
use serde::Deserialize;

use super::super::api::unresolved::ask_again;
use super::super::site::Shared;
use super::changes::{ChoiceList, Fields, Filled, Permitted, answer, chosen};
use super::layout::{Visitor, order_link};
use super::words::{count, shown, since, with_code};
use super::{PAGE_SIZE, show};
use crate::operations::Page;
use crate::operations::unresolved::{self, UnresolvedOrder, what_to_do};
use crate::postgres::selection::Selection;

/// Which ones, and what was done to the ones before.
#[derive(Debug, Deserialize)]
pub(super) struct Listed {
    after: Option<OrderId>,
    retried: Option<u64>,
}

pub(super) async fn page(
    State(shared): State<Arc<Shared>>,
    visitor: Visitor,
    Filled(asked): Filled<Listed>,
) -> Response {
    let read = async {
        let found = unresolved::list(&shared.sources().await?.database, asked.after.as_ref(), PAGE_SIZE).await?;
        Ok(contents(&asked, &found, &visitor))
    };
    show(&visitor, "Unresolved", read.await)
}

fn contents(asked: &Listed, found: &Page<UnresolvedOrder>, visitor: &Visitor) -> Markup {
    let list = ChoiceList {
        path: "/unresolved",
        name: "Unresolved orders",
        row: "order",
        id: |order: &UnresolvedOrder| order.order_id.clone(),
        columns: vec![
            ("since", false, Box::new(|order| since(&order.unresolved_at, &visitor.at))),
            ("order", false, Box::new(|order| order_link(&Kind::ORDER, &order.order_id))),
            ("reason", false, Box::new(|order| html! { (shown(&order.reason)) })),
            (
                "last answers",
                false,
                Box::new(|order| html! { (order.answers.as_deref().map_or("nothing was answered".into(), shown)) }),
            ),
            ("what to do", false, Box::new(|order| with_code(what_to_do(&order.reason)))),
        ],
        buttons: html! { button formaction="/unresolved/retry" { "Ask their providers again" } },
        change: ("have their providers asked again", "order-timeout closing retry"),
    };
    html! {
        h1 { "Unresolved orders" }
        p { "Orders that fell due and that the answers of their payment providers could not decide, the longest waiting first.
             They are not closed, and keep what they have reserved." }
        @if let Some(retried) = asked.retried {
            p.ok role="status" { (count(retried, "order")) (if retried == 1 { " is" } else { " are" }) " asked about again." }
        }
        (list.render(found, visitor))
    }
}

pub(super) async fn retry(
    State(shared): State<Arc<Shared>>,
    Permitted { visitor, who }: Permitted,
    Filled(fields): Filled<Fields>,
) -> Response {
    let done = async {
        let (ids, operator) = chosen(who, &fields)?;
        let asked = ask_again(&shared, &Selection::Ids(ids), &operator).await?;
        Ok(format!("/unresolved?retried={}", asked.retried.len()))
    };
    answer(&visitor, done.await)
}
