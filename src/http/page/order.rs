//! One order's story.
//!
//! Renders what `explain` tells.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Redirect, Response};
use maud::{Markup, html};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::OrderId;
use serde::Deserialize;

use super::super::api::reads::KindParameter;
use super::super::site::Shared;
use super::changes::Filled;
use super::forecast::due_with;
use super::layout::{Visitor, kind_choice, order_path};
use super::show;
use super::status::not_known;
use super::words::{capitalised, precise, shown, with_code};
use crate::operations::explain::{Explanation, Moment, explain};
use crate::operations::order_story::OrderStory;

#[derive(Debug, Deserialize)]
pub(super) struct Find {
    id: String,
    #[serde(default)]
    kind: Kind,
}

/// From the search to the order's own address.
pub(super) async fn find(Filled(Find { id, kind }): Filled<Find>) -> Redirect {
    Redirect::to(&order_path(&kind, id.trim()))
}

pub(super) async fn page(
    State(shared): State<Arc<Shared>>,
    visitor: Visitor,
    id: Result<Path<OrderId>, PathRejection>,
    Filled(KindParameter { kind }): Filled<KindParameter>,
) -> Response {
    let read = async {
        let (Path(id), sources) = (id?, shared.sources().await?);
        Ok(explain(&sources.database, sources.orders(&kind).await?, &kind, &id).await?)
    };
    let told = read.await;
    let is_missing = told.as_ref().is_ok_and(|told| told.story.exists == Some(false));
    let shown = show(&visitor, "Order", told.map(|told| story(&told, &visitor.kinds)));
    if is_missing { (StatusCode::NOT_FOUND, shown).into_response() } else { shown }
}

fn story(told: &Explanation, kinds: &[Kind]) -> Markup {
    let OrderStory { kind, order_id, at, exists, open, not_known: unknown, .. } = &told.story;
    html! {
        h1 { "Order " code { (shown(order_id.as_str())) } }
        @if kinds.len() > 1 {
            // The same id may be an order of another kind.
            form.filter action="/orders" method="get" {
                input type="hidden" name="id" value=(order_id.as_str());
                div { span { "Kind " } (kind_choice(kinds, Some(kind))) }
                button { "Show" }
            }
        }
        p.summary { (capitalised(&told.summary)) "." }
        @if *exists == Some(false) {
            p { "An order is found by its whole id. " a href=(due_with(kind, order_id.as_str())) { "Forecast" }
                " finds unpaid orders by a part of it, in a window of time." }
        }
        @if let Some(open) = open {
            section.open {
                h2 { "Why it is open" }
                p { (with_code(&capitalised(&open.because))) "." }
                h2 { "What to do" }
                p { (with_code(&capitalised(&open.what_to_do))) "." }
            }
        }
        section {
            h2 { "In the order of time" }
            @if told.moments.is_empty() { p { "No table tells." } }
            ol.story { @for (number, moment) in told.moments.iter().enumerate() {
                @if moment.at > *at && (number == 0 || told.moments[number - 1].at <= *at) { (now(at)) }
                (line(moment))
            } }
        }
        (not_known(unknown))
    }
}

fn now(at: &str) -> Markup {
    html! { li.now { (precise(at)) " " span { "now" } } }
}

fn line(moment: &Moment) -> Markup {
    html! {
        li {
            (precise(&moment.at)) " "
            span.what { (shown(&moment.what)) } " "
            span.source title="the table that says so" { (moment.source.table()) }
        }
    }
}
