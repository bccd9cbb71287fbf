//! What falls due of one kind: figures, a plot, and the busiest minutes.
//!
//! Renders a forecast.

use std::sync::Arc;

use maud::{Markup, html};
use order_timeout_core::kind::Kind;

use super::overview::not_known;
use super::plots;
use super::words::{age, clock, count, money, number, shown, time};
use crate::operations::forecast::{Forecast, Outlook};

/// `names_kind`: whether there are others.
pub(super) fn section(kind: &Kind, forecast: Option<&Result<Arc<Forecast>, String>>, names_kind: bool) -> Markup {
    html! {
        section id=(format!("due-{kind}")) {
            h2 { "Due in the next six hours" @if names_kind { ": " (kind) } }
            @match forecast {
                None => p { "Being counted." },
                Some(Err(why)) => p.bad { (shown(why)) },
                Some(Ok(forecast)) => (figures(forecast, kind)),
            }
        }
    }
}

fn figures(forecast: &Forecast, kind: &Kind) -> Markup {
    let total = &forecast.total;
    html! {
        @if let Some(outlook) = &forecast.outlook { p class=(if outlook.is_on_time { "ok" } else { "bad" }) { (in_words(outlook)) } }
        dl.figures {
            div { dt { "orders" } dd { (number(total.orders)) } }
            @for sum in &total.money { div { dt { "money" } dd { (money(sum)) } } }
            @if !total.money.is_empty() && total.without_amount > 0 {
                div { dt { "without an amount" } dd { (count(total.without_amount, "order")) } }
            }
            @if let Some(units) = total.units { div { dt { "units of stock held" } dd { (number(units.unsigned_abs())) } } }
            @if let Some(rate) = &forecast.can_close {
                div { dt { "can be closed a minute" } dd title=(rate.why) { (number(rate.per_minute)) } }
            }
        }
        (plots::due(forecast))
        @if let Some(rate) = &forecast.can_close { p.note { "What can be closed: " (rate.why) "." } }
        @if !forecast.minutes.is_empty() {
            details id=(format!("due-table-{kind}")) {
                summary { "The busiest minutes as a table" }
                (due_table(forecast))
            }
        }
        (not_known(&forecast.not_known))
    }
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
    html! {
        div.scroll {
            table {
                thead { tr { th scope="col" { "minute" } th.number scope="col" { "orders" } th.number scope="col" { "money" }
                    th.number scope="col" { "units" } } }
                tbody {
                    @for minute in busiest {
                        tr {
                            th scope="row" { (time(&minute.at)) }
                            td.number { (number(minute.due.orders)) }
                            td.number { @for sum in &minute.due.money { (money(sum)) " " } }
                            td.number { @if let Some(units) = minute.due.units { (units) } @else { "–" } }
                        }
                    }
                }
            }
        }
    }
}
