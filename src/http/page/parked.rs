//! Parked alarms: a page of them, and the form that retries or drops the chosen ones.
//!
//! A change needs a login, comes from the page itself, and says why.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use order_timeout_core::alarm::ParkReason;
use order_timeout_core::kind::Kind;
use serde::Deserialize;
use uuid::Uuid;

use super::super::api::change::operator_of_form;
use super::super::api::parked::{drop_selected, retry_alarms};
use super::super::site::Shared;
use super::changes::{Cell, ChoiceList, Fields, Filled, Permitted, answer, chosen, field};
use super::layout::{PARKED_FOR, Visitor, order_link};
use super::words::{age, count, shown};
use super::{PAGE_SIZE, show};
use crate::operations::{Page, parked};
use crate::postgres::parked_alarms::Parked;
use crate::postgres::selection::Selection;

/// Which ones, and what was done to the ones before.
#[derive(Debug, Deserialize)]
pub(super) struct Listed {
    reason: Option<String>,
    after: Option<Uuid>,
    sent: Option<u64>,
    kept: Option<u64>,
    dropped: Option<u64>,
}

pub(super) async fn page(
    State(shared): State<Arc<Shared>>,
    visitor: Visitor,
    Filled(asked): Filled<Listed>,
) -> Response {
    let read = async {
        let selection = known_reason(&asked).map_or(Selection::All, |reason| Selection::Reason(reason.to_owned()));
        let page = parked::list(&shared.sources().await?.database, &selection, asked.after, PAGE_SIZE).await?;
        Ok(contents(&asked, &page, &visitor))
    };
    show(&visitor, "Parked alarms", read.await)
}

fn contents(asked: &Listed, page: &Page<Parked>, visitor: &Visitor) -> Markup {
    // One that this version cannot read is in no settings.
    let kind = |alarm: &Parked| Kind::new(&alarm.kind).unwrap_or_default();
    let order = move |alarm: &Parked| {
        let link = alarm.order_id.as_ref().map(|id| order_link(&kind(alarm), id));
        link.unwrap_or_else(|| html! { "–" })
    };
    let mut columns: Vec<(_, _, Cell<'_, Parked>)> = vec![
        ("reason", false, Box::new(|alarm| html! { (shown(&alarm.reason)) })),
        ("order", false, Box::new(order)),
        ("age", true, Box::new(|alarm| html! { (age(alarm.age_s as f64)) })),
        ("attempts", true, Box::new(|alarm| html! { (alarm.attempts) })),
        ("what was found", false, Box::new(|alarm| html! { (shown(&alarm.detail)) })),
    ];
    if visitor.kinds.len() > 1 {
        columns.insert(1, ("kind", false, Box::new(|alarm| html! { (shown(&alarm.kind)) })));
    }
    let list = ChoiceList {
        path: &address(asked),
        name: "Parked alarms",
        row: "alarm",
        id: |alarm: &Parked| alarm.id.to_string(),
        columns,
        buttons: html! {
            button formaction="/parked/retry" { "Retry the chosen" }
            @if let Some(reason) = known_reason(asked) {
                button formaction="/parked/retry" name="reason" value=(reason) { "Retry all that are " (reason) }
            }
            button.bad formaction="/parked/drop" { "Drop the chosen" }
        },
        change: ("retry or drop them", "order-timeout parked"),
    };
    html! {
        h1 { "Parked alarms" }
        p { "Alarms that could not be handled, the oldest first. Retrying sends them to the workers again; dropping deletes
             them, which cannot be undone. Their orders, if there are any, are closed by the sweep where that is possible." }
        (result(asked))
        (filter(asked.reason.as_deref()))
        (list.render(page, visitor))
    }
}

/// The reason that was chosen in the filter.
fn known_reason(asked: &Listed) -> Option<&str> {
    asked.reason.as_deref().filter(|reason| ParkReason::WORDS.contains(reason))
}

/// The address of this list from its beginning.
fn address(asked: &Listed) -> String {
    known_reason(asked).map_or_else(|| "/parked".to_owned(), |reason| format!("{PARKED_FOR}{reason}"))
}

fn result(asked: &Listed) -> Markup {
    html! {
        @if let Some(sent) = asked.sent { p.ok role="status" { (count(sent, "alarm")) " sent back to the workers. What still cannot be handled is parked again, after retry.missing_for if its order is missing; while closing is paused, all of them wait." } }
        @if let Some(kept @ 1..) = asked.kept {
            p.bad role="status" { (count(kept, "alarm")) " could not be sent: " code { "order-timeout parked retry" } " says why." }
        }
        @if let Some(dropped) = asked.dropped { p.ok role="status" { (count(dropped, "alarm")) " dropped." } }
    }
}

fn filter(chosen: Option<&str>) -> Markup {
    html! {
        form.filter method="get" {
            div {
                label for="reason" { "Reason" }
                select #reason name="reason" {
                    option value="" { "all" }
                    @for word in ParkReason::WORDS {
                        option value=(word) selected[chosen == Some(word)] { (word) }
                    }
                }
            }
            button { "Show" }
        }
    }
}

pub(super) async fn retry(
    State(shared): State<Arc<Shared>>,
    Permitted { visitor, who }: Permitted,
    Filled(fields): Filled<Fields>,
) -> Response {
    let done = async {
        let (selection, operator) = match field(&fields, "reason") {
            reason if ParkReason::WORDS.contains(&reason.as_str()) => {
                (Selection::Reason(reason), operator_of_form(who, field(&fields, "why"))?)
            }
            _ => chosen(who, &fields).map(|(ids, operator)| (Selection::Ids(ids), operator))?,
        };
        let retried = retry_alarms(&shared, &selection, &operator).await?;
        Ok(format!("/parked?sent={}&kept={}", retried.sent, retried.kept.len()))
    };
    answer(&visitor, done.await)
}

pub(super) async fn drop_alarms(
    State(shared): State<Arc<Shared>>,
    Permitted { visitor, who }: Permitted,
    Filled(fields): Filled<Fields>,
) -> Response {
    let done = async {
        let (ids, operator) = chosen(who, &fields)?;
        let dropped = drop_selected(&shared, &Selection::Ids(ids), &operator).await?;
        Ok(format!("/parked?dropped={}", dropped.dropped))
    };
    answer(&visitor, done.await)
}
