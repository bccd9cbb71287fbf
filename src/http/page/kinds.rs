//! The kinds of deadlines: a row for each, with what is overdue, what falls due, what was closed, and what is wrong.
//!
//! Renders what was read; decides nothing.

use std::time::Instant;

use maud::{Markup, html};
use order_timeout_core::kind::Kind;
use order_timeout_core::problem::Problem;

use super::super::site::{Shared, View};
use super::layout::table;
use super::words::{lateness, number, shown};
use crate::observe::last_hour::{ClosedMinute, read_as_one};
use crate::operations::status::OverdueOfKind;

pub(super) fn section(shared: &Shared, view: Option<&View>, now: Instant) -> Markup {
    let heads = [
        ("kind", false),
        ("overdue", true),
        ("due in six hours", true),
        ("closed in the last hour", true),
        ("p99 late", true),
        ("latest", true),
        ("state", false),
    ];
    let rows = html! { @for kind in shared.kinds() { (row(shared, view, kind, now)) } };
    html! {
        section #kinds {
            h2 { "Kinds of deadlines" }
            (table("Kinds of deadlines", "cards", &heads, &rows))
        }
    }
}

fn row(shared: &Shared, view: Option<&View>, kind: &Kind, now: Instant) -> Markup {
    let status = view.and_then(|view| view.status.as_ref().ok());
    let of_kind = status.and_then(|status| status.kinds.iter().find(|of| of.kind == *kind));
    let forecast = view.and_then(|view| view.forecasts.get(kind)).and_then(|forecast| forecast.as_ref().ok());
    let served = shared.served.list().into_iter().find(|served| served.kind == *kind);
    let hour = served.as_ref().and_then(|served| read_as_one(&served.last_hour, now));
    html! {
        tr {
            th scope="row" data-name="kind" { a href=(format!("/forecast?kind={kind}")) { (kind) } }
            td data-name="overdue" class=(if of_kind.is_some_and(OverdueOfKind::is_late) { "number bad" } else { "number" }) {
                (overdue(of_kind))
            }
            td.number data-name="due in 6 h" {
                @match forecast { Some(forecast) => (number(forecast.total.orders)), None => "–" }
            }
            (closes(hour.as_ref()))
            td data-name="state" {
                @if status.is_some_and(|status| status.is_paused(kind)) { p.bad { "closing is paused" } }
                @else { (state(shared, kind, served.is_some(), of_kind)) }
            }
        }
    }
}

fn overdue(of_kind: Option<&OverdueOfKind>) -> String {
    match of_kind.and_then(|of| of.overdue.as_ref()) {
        Some(overdue) if overdue.is_at_least => format!("at least {}", number(overdue.orders)),
        Some(overdue) => number(overdue.orders),
        None => "–".to_owned(),
    }
}

fn closes(hour: Option<&ClosedMinute>) -> Markup {
    let ms = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), lateness);
    html! {
        td.number data-name="closed" { (number(hour.map_or(0, ClosedMinute::closed))) }
        td.number data-name="p99 late" { (ms(hour.and_then(|hour| hour.p99_ms))) }
        td.number data-name="latest" { (ms(hour.and_then(|hour| hour.max_ms))) }
    }
}

fn state(shared: &Shared, kind: &Kind, is_served: bool, of_kind: Option<&OverdueOfKind>) -> Markup {
    let mut problems: Vec<String> = shared.pages.health.problems_of(kind).iter().map(Problem::title).collect();
    problems.extend(of_kind.and_then(|of| of.not_known.as_ref()).map(|why| format!("not known: {why}")));
    html! {
        @if !is_served { span { "not served by this worker" } }
        @else if problems.is_empty() { span.ok { "ok" } }
        @for problem in &problems { p.bad { (shown(problem)) } }
    }
}
