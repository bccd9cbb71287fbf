//! One order's story.
//!
//! Renders what `explain` tells.

use std::sync::Arc;

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Redirect, Response};
use maud::{Markup, html};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::OrderId;
use serde::Deserialize;

use super::super::api::Problem;
use super::super::api::reads::KindParameter;
use super::super::site::Shared;
use super::failed;
use super::layout::{Layout, Visitor, kind_choice, order_path};
use super::overview::not_known;
use super::pending::pending_with;
use super::words::{capitalised, precise, shown, with_code};
use crate::operations::explain::{Explanation, Moment, explain};
use crate::operations::order_story::OrderStory;
use crate::postgres::one_line;

#[derive(Debug, Deserialize)]
pub(super) struct Find {
    id: String,
    #[serde(default)]
    kind: Kind,
}

/// From the search to the order's own address.
pub(super) async fn find(visitor: Visitor, asked: Result<Query<Find>, QueryRejection>) -> Response {
    match asked {
        Ok(Query(Find { id, kind })) => Redirect::to(&order_path(&kind, id.trim())).into_response(),
        Err(fault) => failed(&visitor, &fault.into()),
    }
}

pub(super) async fn page(
    State(shared): State<Arc<Shared>>,
    visitor: Visitor,
    id: Result<Path<String>, PathRejection>,
    asked: Result<Query<KindParameter>, QueryRejection>,
) -> Response {
    match tell(&shared, id, asked).await {
        Ok(told) => {
            let status = if told.story.exists == Some(false) { StatusCode::NOT_FOUND } else { StatusCode::OK };
            (status, Layout::new("Order", &visitor).render(story(&told, &visitor.kinds))).into_response()
        }
        Err(problem) => failed(&visitor, &problem),
    }
}

async fn tell(
    shared: &Shared,
    id: Result<Path<String>, PathRejection>,
    asked: Result<Query<KindParameter>, QueryRejection>,
) -> Result<Explanation, Problem> {
    let (Path(id), Query(KindParameter { kind })) = (id?, asked?);
    let id = OrderId::new(id).map_err(|fault| Problem::bad_request(fault.to_string()))?;
    let sources = shared.sources().await?;
    let told = explain(&sources.database, sources.orders(&kind).await?, &kind, &id).await;
    told.map_err(|error| Problem::unavailable(one_line(&error)))
}

fn story(told: &Explanation, kinds: &[Kind]) -> Markup {
    let OrderStory { kind, order_id, at, exists, not_known: unknown, .. } = &told.story;
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
            p { "An order is found by its whole id. " a href=(pending_with(kind, order_id.as_str())) { "Pending" }
                " finds unpaid orders by a part of it, in a window of time." }
        }
        @if let Some(open) = &told.open {
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
