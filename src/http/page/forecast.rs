//! The orders that fall due, page by page.
//!
//! Renders what `forecast` answers.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use order_timeout_core::kind::Kind;
use order_timeout_core::message::write_rfc3339;
use url::form_urlencoded::Serializer;

use super::super::api::reads::OrdersParameters;
use super::super::site::Shared;
use super::changes::Filled;
use super::layout::{Visitor, kind_choice, order_link, table};
use super::show;
use super::status::not_known;
use super::words::{money, shown, time, when};
use crate::operations::forecast::{DueOrders, due_orders};
use crate::operations::orders_table::due::DueOrder;

pub(super) async fn page(
    State(shared): State<Arc<Shared>>,
    visitor: Visitor,
    Filled(asked): Filled<OrdersParameters>,
) -> Response {
    let read = async {
        let (kind, text) = (asked.kind.clone(), asked.text().to_owned());
        let page = due_orders(shared.sources().await?.orders(&kind).await?, asked.query()).await?;
        Ok(contents(&page, &kind, &text, &visitor.kinds))
    };
    show(&visitor, "Forecast", read.await)
}

fn contents(page: &DueOrders, kind: &Kind, text: &str, kinds: &[Kind]) -> Markup {
    let heads = [("deadline", false), ("order", false), ("amount", true), ("units", true)];
    html! {
        h1 { "Forecast" }
        p { "Unpaid orders that fall due from " (time(&page.from)) " until " (time(&page.until)) "." }
        form.filter method="get" {
            @if kinds.len() > 1 { div { span { "Kind " } (kind_choice(kinds, Some(kind))) } }
            div { label for="from" { "From" } input #from name="from" value=(page.from) size="26"; }
            div { label for="until" { "Until" } input #until name="until" value=(page.until) size="26"; }
            div {
                label for="text" { "Order or article contains" }
                input #text name="text" value=(shown(text)) maxlength="200";
            }
            button { "Show" }
        }
        @if page.orders.is_empty() {
            p { (if page.next.is_some() { "None among the orders that were searched." } else { "None." }) }
        } @else {
            (table("Orders that fall due", "cards", &heads, &html! {
                @for order in &page.orders { (row(order, kind, &page.at)) }
            }))
        }
        @if let Some(next) = &page.next { p { a href=(next_page(page, kind, text, next)) { "Next page" } } }
        (not_known(&page.not_known))
    }
}

fn row(order: &DueOrder, kind: &Kind, now: &str) -> Markup {
    html! {
        tr {
            td data-name="deadline" { (when(&write_rfc3339(order.deadline), now)) }
            td data-name="order" { (order_link(kind, order.order_id.as_str())) }
            td.number data-name="amount" { @if let Some(amount) = &order.money { (money(amount)) } @else { "–" } }
            td.number data-name="units" { @if let Some(units) = order.units { (units) } @else { "–" } }
        }
    }
}

fn next_page(page: &DueOrders, kind: &Kind, text: &str, next: &str) -> String {
    let mut query = of_kind(kind);
    query.append_pair("from", &page.from).append_pair("until", &page.until);
    query.append_pair("text", text).append_pair("after", next);
    query.finish()
}

/// The page of what falls due between these times, RFC 3339.
pub(super) fn due_between(kind: &Kind, from: &str, until: &str) -> String {
    of_kind(kind).append_pair("from", from).append_pair("until", until).finish()
}

/// The page of what falls due soon and has this text in its id.
pub(super) fn due_with(kind: &Kind, text: &str) -> String {
    of_kind(kind).append_pair("text", text).finish()
}

fn of_kind(kind: &Kind) -> Serializer<'static, String> {
    let mut query = Serializer::for_suffix(String::from("/forecast?"), "/forecast?".len());
    if !kind.is_default() {
        query.append_pair("kind", kind.as_str());
    }
    query
}
