//! Pauses of closing: those that last and those that are over, and the forms that begin and end one.
//!
//! A change needs a login, comes from the page itself, and says why.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use maud::{Markup, html};
use order_timeout_core::kind::Kind;
use serde::Deserialize;

use super::super::api::Problem;
use super::super::api::change::operator_of_form;
use super::super::api::pauses::{ENDED, begin_pause, end_pauses};
use super::super::site::Shared;
use super::changes::{Fields, Filled, Permitted, answer, field, how_to_change};
use super::layout::{Visitor, table};
use super::show;
use super::words::{capitalised, count, shown, since};
use crate::operations::pause_closing::{self, DueAtResume, Pauses};
use crate::postgres::closing_pauses::{EndedPause, Pause};

/// What was done before.
#[derive(Debug, Deserialize)]
pub(super) struct Done {
    began: Option<bool>,
    ended: Option<u64>,
    left: Option<u64>,
}

const HEADS: [(&str, bool); 4] = [("paused", false), ("since", false), ("by", false), ("why", false)];

fn lasting(pauses: &[Pause], now: &str) -> Markup {
    table("Pauses that last", "cards", &HEADS, &html! { @for pause in pauses { tr { (cells(pause, now)) } } })
}

fn cells(pause: &Pause, now: &str) -> Markup {
    let Pause { kind, cause, reason, paused_by, paused_at } = pause;
    html! {
        td data-name="paused" { (kind.as_deref().map_or("every kind".into(), shown)) }
        td data-name="since" { (since(paused_at, now)) }
        td data-name="by" { (cause.as_str()) ": " (shown(paused_by)) }
        td data-name="why" { (shown(reason)) }
    }
}

fn over(ended: &[EndedPause], now: &str) -> Markup {
    let heads = [&HEADS[..], &[("until", false), ("resumed by", false), ("why resumed", false)]].concat();
    let rows = html! {
        @for EndedPause { pause, resumed_by, resume_reason, resumed_at } in ended { tr {
            (cells(pause, now))
            td data-name="until" { (since(resumed_at, now)) }
            td data-name="resumed by" { (shown(resumed_by)) }
            td data-name="why resumed" { (resume_reason.as_deref().map_or("–".into(), shown)) }
        } }
    };
    table("Pauses that are over", "cards", &heads, &rows)
}

pub(super) async fn page(State(shared): State<Arc<Shared>>, visitor: Visitor, Filled(done): Filled<Done>) -> Response {
    let read = async {
        let database = &shared.sources().await?.database;
        let due = pause_closing::due_at_resume(database, &shared.settings, None).await?;
        Ok(contents(&shared, &done, &pause_closing::list(database, ENDED).await?, &due, &visitor))
    };
    show(&visitor, "Pauses", read.await)
}

fn contents(shared: &Shared, done: &Done, pauses: &Pauses, due: &[DueAtResume], visitor: &Visitor) -> Markup {
    html! {
        h1 { "Pauses of closing" }
        p { "While closing is paused, no worker closes an order, also after a restart. Orders can still be paid, and keep what
             they have reserved. A pause begins because a person asks for it, or because the brake found that what is closed
             looks unusual. It lasts until a person resumes closing; what is due then is closed at once." }
        (result(done))
        @if pauses.lasting.is_empty() { p { "Closing is not paused." } } @else { (lasting(&pauses.lasting, &visitor.at)) }
        @for of in due { p { (capitalised(&shown(&of.sentence()))) "." } }
        @if visitor.session.is_some() {
            @if !pauses.lasting.is_empty() {
                (form("/pauses/resume", "Resume closing", "resume", "every pause", &paused_kinds(pauses), &html! {
                    @if pause_closing::needs_yes(due) {
                        input #yes type="checkbox" name="yes" value="true" required;
                        label for="yes" { "Close what is due" }
                    }
                }))
            }
            // Nothing is left to pause while every kind is.
            @if pauses.lasting.iter().all(|pause| pause.kind.is_some()) {
                (form("/pauses", "Pause closing", "pause", "every kind", &Vec::from_iter(shared.settings.all_kinds()), &html! {}))
            }
        } @else {
            (how_to_change(visitor, "/pauses", "pause or resume closing", "order-timeout pause"))
        }
        @if !pauses.ended.is_empty() {
            h2 { "Pauses that are over" }
            (over(&pauses.ended, &visitor.at))
        }
    }
}

/// The kinds with a pause of their own.
fn paused_kinds(pauses: &Pauses) -> Vec<Kind> {
    pauses.lasting.iter().filter_map(|pause| Kind::new(pause.kind.as_deref()?).ok()).collect()
}

/// A form for a change of one kind or of all. `name` is a part of its fields' ids.
fn form(action: &str, title: &str, name: &str, all: &str, kinds: &[Kind], confirmation: &Markup) -> Markup {
    let (kind_id, why_id) = (format!("kind-{name}"), format!("why-{name}"));
    html! {
        form.change action=(action) method="post" aria-label=(title) {
            label for=(kind_id) { "What" }
            select id=(kind_id) name="kind" {
                option value="" { (all) }
                @for kind in kinds { option value=(kind) { "the kind " (kind) } }
            }
            label for=(why_id) { "Why" }
            input id=(why_id) name="why" required maxlength="500" autocomplete="off";
            (confirmation)
            button { (title) }
        }
    }
}

fn result(done: &Done) -> Markup {
    html! {
        @match done.began {
            Some(true) => p.ok role="status" { "Closing is paused." },
            Some(false) => p.bad role="status" { "It was paused before; nothing changed." },
            None => {},
        }
        @match done.ended {
            Some(0) => p.bad role="status" { "Nothing of that was paused." },
            Some(ended) => p.ok role="status" { (count(ended, "pause")) " ended. What is overdue is closed now, where nothing else holds it." },
            None => {},
        }
        @if let Some(1..) = done.left {
            p.bad role="status" { "Closing is still paused: a pause of every kind is not ended for one." }
        }
    }
}

pub(super) async fn pause(
    State(shared): State<Arc<Shared>>,
    Permitted { visitor, who }: Permitted,
    Filled(fields): Filled<Fields>,
) -> Response {
    let done = async {
        let kind = kind(&fields)?;
        let operator = operator_of_form(who, field(&fields, "why"))?;
        Ok(format!("/pauses?began={}", begin_pause(&shared, kind.as_ref(), &operator).await?.began))
    };
    answer(&visitor, done.await)
}

pub(super) async fn resume(
    State(shared): State<Arc<Shared>>,
    Permitted { visitor, who }: Permitted,
    Filled(fields): Filled<Fields>,
) -> Response {
    let done = async {
        let (kind, yes) = (kind(&fields)?, field(&fields, "yes") == "true");
        let operator = operator_of_form(who, field(&fields, "why"))?;
        let resumed = end_pauses(&shared, kind.as_ref(), &operator, yes).await?;
        Ok(format!("/pauses?ended={}&left={}", resumed.ended.len(), resumed.still_paused.len()))
    };
    answer(&visitor, done.await)
}

/// The kind that was chosen; every kind if none was.
fn kind(fields: &Fields) -> Result<Option<Kind>, Problem> {
    match field(fields, "kind").as_str() {
        "" => Ok(None),
        kind => Kind::new(kind).map(Some).map_err(|fault| Problem::bad_request(fault.to_string())),
    }
}
