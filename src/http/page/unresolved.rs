//! Unresolved orders: those that a payment provider's answers could not decide, and the form that has the providers of
//! the chosen ones asked again.
//!
//! A change needs a login, comes from the page itself, and says why.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use maud::{Markup, html};
use order_timeout_core::kind::Kind;
use serde::Deserialize;
use url::form_urlencoded::Serializer;

use super::super::api::Problem;
use super::super::api::unresolved::{self as api, UnresolvedChange, UnresolvedOrders, ask_again};
use super::super::site::Shared;
use super::changes::{Fields, Filled, Permitted, answer, asked, choice, form, how_to_change};
use super::failed;
use super::layout::{Layout, Visitor, order_path};
use super::words::{age, count, number, shown, since, with_code};
use crate::operations::unresolved::{UnresolvedForReason, UnresolvedOrder, what_to_do};

/// Orders on the page.
const PAGE: i64 = 100;

/// Which ones, and what was done to the ones before.
#[derive(Debug, Deserialize)]
pub(super) struct Listed {
    #[serde(default)]
    after: Option<String>,
    #[serde(default)]
    retried: Option<u64>,
}

/// On the first page: how many, by reason.
pub(super) fn section(unresolved: Option<&[UnresolvedForReason]>) -> Markup {
    html! {
        section #unresolved {
            h2 { "Unresolved at a payment provider" }
            @match unresolved {
                None => p { "Not known." },
                Some([]) => p { "None: the providers' answers have decided every order." },
                Some(unresolved) => {
                    p { "Their providers' answers could not decide these orders. They keep their stock, and wait for a person." }
                    table {
                        thead { tr {
                            th scope="col" { "reason" } th.number scope="col" { "orders" } th.number scope="col" { "oldest" }
                        } }
                        tbody { @for UnresolvedForReason { reason, orders, oldest_s } in unresolved { tr {
                            th scope="row" { (shown(reason)) }
                            td.number { (number(*orders)) }
                            td.number { (age(*oldest_s)) }
                        } } }
                    }
                    p { a href="/unresolved" { "Look at them" } }
                },
            }
        }
    }
}

pub(super) async fn page(
    State(shared): State<Arc<Shared>>,
    visitor: Visitor,
    asked: Result<Query<Listed>, QueryRejection>,
) -> Response {
    match read(&shared, asked).await {
        Ok((asked, found)) => {
            Layout::new("Unresolved", &visitor).render(contents(&asked, &found, &visitor)).into_response()
        }
        Err(problem) => failed(&visitor, &problem),
    }
}

async fn read(
    shared: &Shared,
    asked: Result<Query<Listed>, QueryRejection>,
) -> Result<(Listed, UnresolvedOrders), Problem> {
    let Query(asked) = asked?;
    let found = api::page(shared, asked.after.as_deref(), PAGE).await?;
    Ok((asked, found))
}

fn contents(asked: &Listed, found: &UnresolvedOrders, visitor: &Visitor) -> Markup {
    html! {
        h1 { "Unresolved orders" }
        p { "Orders that fell due and that the answers of their payment providers could not decide, the longest waiting first.
             They are not closed, and keep what they have reserved." }
        @if let Some(retried) = asked.retried {
            p.ok role="status" { (count(retried, "order")) (if retried == 1 { " is" } else { " are" }) " asked about again." }
        }
        @if found.orders.is_empty() {
            p { "None." }
        } @else if visitor.session.is_some() {
            (form(&table(&found.orders, true, &visitor.at), &html! { button formaction="/unresolved/retry" { "Ask their providers again" } }))
        } @else {
            (table(&found.orders, false, &visitor.at))
            (how_to_change(visitor, "/unresolved", "have their providers asked again", "order-timeout closing retry"))
        }
        @if let Some(next) = &found.next {
            p { a href=(Serializer::new(String::from("/unresolved?")).append_pair("after", next).finish()) { "Next page" } }
        }
    }
}

fn table(orders: &[UnresolvedOrder], is_choosable: bool, now: &str) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label="Unresolved orders" {
            table.cards {
                thead { tr {
                    @if is_choosable { th scope="col" { "chosen" } }
                    @for name in ["since", "order", "reason", "last answers", "what to do"] { th scope="col" { (name) } }
                } }
                tbody { @for order in orders { (row(order, is_choosable, now)) } }
            }
        }
    }
}

fn row(order: &UnresolvedOrder, is_choosable: bool, now: &str) -> Markup {
    let UnresolvedOrder { order_id, reason, unresolved_at, answers, .. } = order;
    html! {
        tr {
            @if is_choosable { (choice(order_id, "order")) }
            td data-name="since" { (since(unresolved_at, now)) }
            td data-name="order" { a href=(order_path(&Kind::ORDER, order_id)) { code { (shown(order_id)) } } }
            td data-name="reason" { (shown(reason)) }
            td data-name="last answers" { (answers.as_deref().map_or("nothing was answered".into(), shown)) }
            td data-name="what to do" { (with_code(what_to_do(reason))) }
        }
    }
}

pub(super) async fn retry(
    State(shared): State<Arc<Shared>>,
    Permitted { visitor, who }: Permitted,
    Filled(fields): Filled<Fields>,
) -> Response {
    let done = async {
        let asked = asked::<String>(who, &fields)?;
        let change =
            UnresolvedChange { ids: Some(asked.ids), who: asked.who, why: asked.why, ..UnresolvedChange::default() };
        Ok(format!("/unresolved?retried={}", ask_again(&shared, change).await?.retried.len()))
    };
    answer(&visitor, done.await)
}
