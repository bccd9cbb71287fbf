//! An audit as one HTML file that can be handed round: with the page's stylesheet in it, without script, and with nothing from
//! elsewhere.
//!
//! Renders only.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::STYLE;
use super::words::{count, lateness, money, number, precise, shown, time};
use crate::operations::audit::{Audit, Example, Found, Lateness};

/// The height of a plot in its own units.
const HEIGHT: f64 = 100.0;

/// The file's text.
#[must_use]
pub fn audit_file(audit: &Audit) -> String {
    let title = format!("Audit of {}", shown(&audit.orders_table));
    let wrong: u64 = audit.faults.iter().map(|found| found.count).sum();
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                main {
                    h1 { (title) }
                    p {
                        (number(audit.rows)) " rows were read on " (time(&audit.at)) ". " (count(audit.orders, "order"))
                        " have a deadline since " (time(&audit.since)) ": " (number(audit.open)) " are open, "
                        (number(audit.closed)) " closed."
                    }
                    @if wrong == 0 { p.verdict.ok { "Nothing wrong was found, as far as it is known." } }
                    @else { p.verdict.bad { (count(wrong, "fault")) " found." } }
                    (faults(&audit.faults))
                    @if let Some(lateness) = &audit.lateness { (plots(lateness, &audit.time_zone)) }
                    @if !audit.not_known.is_empty() {
                        h2 { "Not known" }
                        ul.not-known { @for one in &audit.not_known { li { (one.what) ": " (shown(&one.why)) } } }
                    }
                }
                footer { p { "order-timeout " (env!("ORDER_TIMEOUT_VERSION")) ". All times are UTC." } }
            }
        }
    };
    page.into_string()
}

fn faults(faults: &[Found]) -> Markup {
    html! {
        table {
            @for Found { fault, count, money: sums, .. } in faults {
                tr {
                    th { (fault.title()) }
                    td.number { @if *count > 0 { strong.bad { (number(*count)) } } @else { "none" } }
                    td { @for sum in sums { (shown(&money(sum))) " " } }
                }
            }
        }
        @for Found { fault, count, examples, .. } in faults.iter().filter(|found| found.count > 0) {
            h3 { (fault.title()) ": " (number(examples.len() as u64)) " of " (number(*count)) }
            div.scroll { table { @for example in examples { (row(example)) } } }
        }
    }
}

fn row(example: &Example) -> Markup {
    let times = [("deadline", &example.deadline), ("closed", &example.closed_at), ("paid", &example.paid_at)];
    let stock = [("reserves", &example.reserves), ("needed", &example.needs)];
    html! {
        tr {
            td { code { (shown(&example.id)) } }
            @for (word, at) in times { @if let Some(at) = at { td { (word) " " (precise(at)) } } }
            @for (word, units) in stock { @if let Some(units) = units { td { (word) " " (units) } } }
            @if let Some(sum) = example.money() { td.number { (shown(&money(&sum))) } }
        }
    }
}

fn plots(late: &Lateness, zone: &str) -> Markup {
    let text = |ms: u64| lateness(ms as f64);
    let below = |ms: Option<u64>| ms.map_or_else(|| "later".to_owned(), |ms| format!("below {}", text(ms)));
    let by_bucket: Vec<_> = late.buckets.iter().map(|bucket| (below(bucket.below_ms), bucket.closes)).collect();
    let by_hour: Vec<_> = (0..).zip(&late.hours).map(|(at, hour)| (format!("{at}:00"), hour.late)).collect();
    html! {
        h2 { "How late " (count(late.closes, "close")) " were" }
        p {
            "Half of them " strong { (text(late.p50_ms)) } " or less, 90 in a hundred " strong { (text(late.p90_ms)) }
            ", 99 in a hundred " strong { (text(late.p99_ms)) } ", the latest " strong { (text(late.max_ms)) } "."
        }
        (bars("Closes by lateness", &by_bucket))
        (bars(&format!("Closes more than a minute late, by hour of the day ({zone})"), &by_hour))
    }
}

/// A bar for each value, and the same figures in words.
fn bars(name: &str, values: &[(String, u64)]) -> Markup {
    let most = values.iter().map(|(_, value)| *value).max().unwrap_or_default();
    // A single close is visible, however many others there are.
    let height = |value: u64| if value == 0 { 0.0 } else { (HEIGHT * value as f64 / most as f64).max(1.5) };
    html! {
        div.plot {
            p.scale { (shown(name)) ", at most " strong { (number(most)) } }
            svg viewBox=(format!("0 0 {} {HEIGHT}", values.len())) preserveAspectRatio="none" role="img" aria-label=(name) {
                @for (at, (label, value)) in values.iter().enumerate() {
                    rect.due x=(at) width="0.9" y=(format!("{:.2}", HEIGHT - height(*value)))
                        height=(format!("{:.2}", height(*value))) { title { (label) ": " (number(*value)) } }
                }
            }
            details {
                summary { "The figures" }
                table { @for (label, value) in values.iter().filter(|(_, value)| *value > 0) {
                    tr { th { (label) } td.number { (number(*value)) } }
                } }
            }
        }
    }
}
