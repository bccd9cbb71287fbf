//! What falls due, page by page.
//!
//! Renders what `pending` answers.

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use maud::{Markup, html};
use order_timeout_core::kind::Kind;
use url::form_urlencoded::Serializer;

use super::super::api::Problem;
use super::super::api::reads::PendingParameters;
use super::super::site::Shared;
use super::failed;
use super::layout::{Layout, Visitor, kind_choice, order_path};
use super::overview::not_known;
use super::words::{money, shown, time, when};
use crate::operations::pending::{Pending, PendingOrder, pending};

pub(super) async fn page(
    State(shared): State<Arc<Shared>>,
    visitor: Visitor,
    asked: Result<Query<PendingParameters>, axum::extract::rejection::QueryRejection>,
) -> Response {
    match read(&shared, asked).await {
        Ok((page, kind, text)) => {
            let contents = contents(&page, &kind, text.as_deref().unwrap_or_default(), &visitor.kinds);
            (StatusCode::OK, Layout::new("Pending", &visitor).render(contents)).into_response()
        }
        Err(problem) => failed(&visitor, &problem),
    }
}

async fn read(
    shared: &Shared,
    asked: Result<Query<PendingParameters>, axum::extract::rejection::QueryRejection>,
) -> Result<(Pending, Kind, Option<String>), Problem> {
    let Query(asked) = asked?;
    let (kind, text) = (asked.kind.clone(), asked.text.clone());
    let query = asked.without_empty().query()?;
    let page = pending(shared.sources().await?.orders(&kind).await?, query).await?;
    Ok((page, kind, text))
}

fn contents(page: &Pending, kind: &Kind, text: &str, kinds: &[Kind]) -> Markup {
    html! {
        h1 { "Pending" }
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
            div.scroll tabindex="0" role="region" aria-label="Orders that fall due" {
                table.cards {
                    thead { tr { th scope="col" { "deadline" } th scope="col" { "order" } th.number scope="col" { "amount" }
                        th.number scope="col" { "units" } } }
                    tbody { @for order in &page.orders { (row(order, kind, &page.at)) } }
                }
            }
        }
        @if let Some(next) = &page.next { p { a href=(next_page(page, kind, text, next)) { "Next page" } } }
        (not_known(&page.not_known))
    }
}

fn row(order: &PendingOrder, kind: &Kind, now: &str) -> Markup {
    let id = order.order_id.as_str();
    html! {
        tr {
            td data-name="deadline" { (when(&order.deadline, now)) }
            td data-name="order" { a href=(order_path(kind, id)) { code { (shown(id)) } } }
            td.number data-name="amount" { @if let Some(amount) = &order.money { (money(amount)) } @else { "–" } }
            td.number data-name="units" { @if let Some(units) = order.units { (units) } @else { "–" } }
        }
    }
}

fn next_page(page: &Pending, kind: &Kind, text: &str, next: &str) -> String {
    let mut query = of_kind(kind);
    query.append_pair("from", &page.from).append_pair("until", &page.until);
    query.append_pair("text", text).append_pair("after", next);
    query.finish()
}

/// The page of what falls due between these times, RFC 3339.
pub(super) fn pending_between(kind: &Kind, from: &str, until: &str) -> String {
    of_kind(kind).append_pair("from", from).append_pair("until", until).finish()
}

/// The page of what falls due soon and has this text in its id.
pub(super) fn pending_with(kind: &Kind, text: &str) -> String {
    of_kind(kind).append_pair("text", text).finish()
}

fn of_kind(kind: &Kind) -> Serializer<'static, String> {
    let mut query = Serializer::for_suffix(String::from("/pending?"), "/pending?".len());
    if !kind.is_default() {
        query.append_pair("kind", kind.as_str());
    }
    query
}
