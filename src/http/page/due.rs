//! What falls due of one kind: figures, a plot, and the busiest minutes.
//!
//! Renders a forecast.

use std::sync::Arc;

use maud::{Markup, html};
use order_timeout_core::kind::Kind;

use super::layout::table;
use super::plots;
use super::status::not_known;
use super::words::{age, clock, count, money, number, shown, time};
use crate::operations::forecast::{Forecast, Outlook};

/// `names_kind`: whether there are others.
pub(super) fn section(
    kind: &Kind,
    forecast: Option<&Result<Arc<Forecast>, String>>,
    names_kind: bool,
    is_paused: bool,
    reminders: &Markup,
) -> Markup {
    html! {
        section id=(format!("due-{kind}")) {
            h2 { "Due in the next six hours" @if names_kind { ": " (kind) } }
            @match forecast {
                None => p { "Being counted." },
                Some(Err(why)) => p.bad { (shown(why)) },
                Some(Ok(forecast)) => (figures(forecast, kind, is_paused)),
            }
            (reminders)
        }
    }
}

fn figures(forecast: &Forecast, kind: &Kind, is_paused: bool) -> Markup {
    html! {
        @if is_paused { p.bad { "Closing is paused: what falls due stays open until it is resumed." } }
        @else if let Some(outlook) = &forecast.outlook { p class=(if outlook.is_on_time { "ok" } else { "bad" }) { (in_words(outlook)) } }
        @if forecast.total.orders == 0 { p { "Nothing." } }
        @else {
            (horizons(forecast))
            (plots::due(forecast))
        }
        @if let Some(rate) = &forecast.can_close { p.note { (number(rate.per_minute)) " a minute can be closed: " (rate.why) "." } }
        @if !forecast.minutes.is_empty() {
            details id=(format!("due-table-{kind}")) {
                summary { "The busiest minutes as a table" }
                (due_table(forecast))
            }
        }
        (not_known(&forecast.not_known))
    }
}

/// How far ahead the figures are added up, in minutes.
const HORIZONS: [(&str, u32); 2] = [("next 30 minutes", 30), ("next hour", 60)];

/// Orders, money and stock that fall due soon, later, and in all.
fn horizons(forecast: &Forecast) -> Markup {
    let soon = HORIZONS.map(|(name, minutes)| (name, forecast.within(minutes)));
    let all = ("next six hours", (forecast.total.clone(), forecast.until.clone()));
    let is_without_amount = forecast.total.without_amount > 0 && !forecast.total.money.is_empty();
    let mut heads = vec![("due in the", false), ("orders", true), ("money", true), ("stock held", true)];
    if is_without_amount {
        heads.insert(3, ("without an amount", true));
    }
    let rows = html! {
        @for (name, (due, until)) in soon.into_iter().chain([all]) {
            tr {
                th scope="row" { (name) " " span.note { "until " (clock(&until)) } }
                td.number { strong { (number(due.orders)) } }
                td.number { @for sum in &due.money { div { (money(sum)) } } @if due.money.is_empty() { "–" } }
                @if is_without_amount { td.number { (number(due.without_amount)) } }
                td.number { @if let Some(units) = due.units { (number(units.unsigned_abs())) } @else { "–" } }
            }
        }
    };
    table("What falls due", "figures", &heads, &rows)
}

fn in_words(outlook: &Outlook) -> String {
    match &outlook.at {
        Some(at) if !outlook.is_on_time => format!(
            "Closing falls behind: about {} wait at {}, the last of them for {}.",
            count(outlook.most_waiting, "order"),
            clock(at),
            age(outlook.longest_wait_s as f64)
        ),
        _ => "Each minute closes what falls due in it.".to_owned(),
    }
}

/// Rows of the table beside the plot.
const BUSIEST: usize = 10;

fn due_table(forecast: &Forecast) -> Markup {
    let mut busiest: Vec<_> = forecast.minutes.iter().collect();
    busiest.sort_by_key(|minute| (std::cmp::Reverse(minute.due.orders), minute.number));
    busiest.truncate(BUSIEST);
    let heads = [("minute", false), ("orders", true), ("money", true), ("units", true)];
    let rows = html! {
        @for minute in busiest {
            tr {
                th scope="row" { (time(&minute.at)) }
                td.number { (number(minute.due.orders)) }
                td.number { @for sum in &minute.due.money { (money(sum)) " " } }
                td.number { @if let Some(units) = minute.due.units { (units) } @else { "–" } }
            }
        }
    };
    table("The busiest minutes", "", &heads, &rows)
}
