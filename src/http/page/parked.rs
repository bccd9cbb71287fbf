//! Parked alarms: a page of them, and the form that retries or drops the chosen ones.
//!
//! A change needs a login, comes from the page itself, and says why.

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use maud::{Markup, html};
use order_timeout_core::alarm::ParkReason;
use order_timeout_core::kind::Kind;
use serde::Deserialize;
use url::form_urlencoded::Serializer;
use uuid::Uuid;

use super::super::api::Problem;
use super::super::api::parked::{ParkedChange, drop_selected, retry_alarms};
use super::super::site::Shared;
use super::changes::{self, Asked, Fields, Filled, Permitted, answer, choice, field, form, how_to_change};
use super::failed;
use super::layout::{Layout, PARKED_FOR, Visitor, order_path};
use super::words::{age, count, shown};
use crate::operations::parked::{self, ParkedPage};
use crate::postgres::parked_alarms::{Parked, Selection};

/// Alarms on the page.
const PAGE: i64 = 100;

/// Which ones, and what was done to the ones before.
#[derive(Debug, Deserialize)]
pub(super) struct Listed {
    #[serde(default)]
    reason: Option<String>,
    #[serde(default)]
    after: Option<Uuid>,
    #[serde(default)]
    sent: Option<u64>,
    #[serde(default)]
    kept: Option<u64>,
    #[serde(default)]
    dropped: Option<u64>,
}

pub(super) async fn page(
    State(shared): State<Arc<Shared>>,
    visitor: Visitor,
    asked: Result<Query<Listed>, QueryRejection>,
) -> Response {
    match read(&shared, asked).await {
        Ok((asked, page)) => {
            let contents = contents(&asked, &page, &visitor);
            Layout::new("Parked alarms", &visitor).render(contents).into_response()
        }
        Err(problem) => failed(&visitor, &problem),
    }
}

async fn read(shared: &Shared, asked: Result<Query<Listed>, QueryRejection>) -> Result<(Listed, ParkedPage), Problem> {
    let Query(asked) = asked?;
    let selection = known_reason(&asked).map_or(Selection::All, |reason| Selection::Reason(reason.to_owned()));
    let page = parked::list(&shared.sources().await?.database, &selection, asked.after, PAGE).await?;
    Ok((asked, page))
}

fn contents(asked: &Listed, page: &ParkedPage, visitor: &Visitor) -> Markup {
    html! {
        h1 { "Parked alarms" }
        p { "Alarms that could not be handled, the oldest first. Retrying sends them to the workers again; dropping deletes
             them, which cannot be undone. Their orders, if there are any, are closed by the sweep where that is possible." }
        (result(asked))
        (filter(asked.reason.as_deref()))
        @if page.alarms.is_empty() {
            p { "None." }
        } @else if visitor.session.is_some() {
            (form(&table(&page.alarms, true, visitor.kinds.len() > 1), &html! {
                button formaction="/parked/retry" { "Retry the chosen" }
                @if let Some(reason) = known_reason(asked) {
                    button formaction="/parked/retry" name="reason" value=(reason) { "Retry all that are " (reason) }
                }
                button.bad formaction="/parked/drop" { "Drop the chosen" }
            }))
        } @else {
            (table(&page.alarms, false, visitor.kinds.len() > 1))
            (how_to_change(visitor, &address(asked), "retry or drop them", "order-timeout parked"))
        }
        @if let Some(next) = page.next { p { a href=(next_page(asked, next)) { "Next page" } } }
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

fn table(alarms: &[Parked], is_choosable: bool, names_kinds: bool) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label="Parked alarms" {
            table.cards {
                thead { tr {
                    @if is_choosable { th scope="col" { "chosen" } }
                    th scope="col" { "reason" }
                    @if names_kinds { th scope="col" { "kind" } }
                    th scope="col" { "order" } th.number scope="col" { "age" }
                    th.number scope="col" { "attempts" } th scope="col" { "what was found" }
                } }
                tbody { @for alarm in alarms { (row(alarm, is_choosable, names_kinds)) } }
            }
        }
    }
}

fn row(alarm: &Parked, is_choosable: bool, names_kinds: bool) -> Markup {
    // One that this version cannot read is in no settings.
    let kind = Kind::new(&alarm.kind).unwrap_or_default();
    html! {
        tr {
            @if is_choosable { (choice(alarm.id, "alarm")) }
            td data-name="reason" { (shown(&alarm.reason)) }
            @if names_kinds { td data-name="kind" { (shown(&alarm.kind)) } }
            td data-name="order" {
                @match &alarm.order_id {
                    Some(id) => a href=(order_path(&kind, id)) { code { (shown(id)) } },
                    None => "–",
                }
            }
            td.number data-name="age" { (age(alarm.age_s as f64)) }
            td.number data-name="attempts" { (alarm.attempts) }
            td data-name="found" { (shown(&alarm.detail)) }
        }
    }
}

fn next_page(asked: &Listed, next: Uuid) -> String {
    let mut query = Serializer::new(String::from("/parked?"));
    query.append_pair("after", &next.to_string());
    if let Some(reason) = &asked.reason {
        query.append_pair("reason", reason);
    }
    query.finish()
}

pub(super) async fn retry(
    State(shared): State<Arc<Shared>>,
    Permitted { visitor, who }: Permitted,
    Filled(fields): Filled<Fields>,
) -> Response {
    let done = async {
        let change = match field(&fields, "reason") {
            reason if reason.is_empty() => change(who, &fields)?,
            reason => ParkedChange { reason: Some(reason), who, why: field(&fields, "why"), ..ParkedChange::default() },
        };
        let retried = retry_alarms(&shared, change).await?;
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
        let change = change(who, &fields)?;
        Ok(format!("/parked?dropped={}", drop_selected(&shared, change).await?.dropped))
    };
    answer(&visitor, done.await)
}

/// The change that the form asks for.
fn change(who: String, fields: &Fields) -> Result<ParkedChange, Problem> {
    let Asked { ids, who, why } = changes::asked::<Uuid>(who, fields)?;
    Ok(ParkedChange { ids: Some(ids), who, why, ..ParkedChange::default() })
}
