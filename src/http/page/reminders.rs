//! Reminders of one kind: which are configured, and how many were sent in the last hour.
//!
//! Renders settings and what was read from the events.

use std::time::Duration;

use maud::{Markup, html};
use order_timeout_core::kind::Kind;

use super::super::site::View;
use super::layout::table;
use super::words::{age, clock, number, shown};
use crate::operations::reminders::SentReminders;

/// A part of the kind's section; nothing for a kind without reminders.
pub(super) fn part(kind: &Kind, configured: &[Duration], view: Option<&View>) -> Markup {
    let sent = view.and_then(|view| view.reminders.as_ref());
    let heads = [("before the deadline", false), ("sent in the last hour", true), ("the last at", false)];
    html! {
        @if !configured.is_empty() {
            h3 { "Reminders" }
            @if let Some(Err(why)) = sent { p.bad { "Not known how many were sent: " (shown(why)) } }
            (table(&format!("Reminders of the kind {kind}"), "", &heads, &html! {
                @for before in configured {
                    (row(*before, sent.and_then(|sent| sent.as_ref().ok()).map(|sent| of(sent, kind, *before))))
                }
            }))
        }
    }
}

/// What was sent of one reminder; zero and nothing if none was.
fn of<'a>(sent: &'a [SentReminders], kind: &Kind, before: Duration) -> (u64, Option<&'a str>) {
    let is_it = |one: &&SentReminders| one.kind == kind.as_str() && (one.before_s - before.as_secs_f64()).abs() < 0.001;
    sent.iter().find(is_it).map_or((0, None), |one| (one.sent, Some(one.last.as_str())))
}

fn row(before: Duration, sent: Option<(u64, Option<&str>)>) -> Markup {
    html! {
        tr {
            th scope="row" { (age(before.as_secs_f64())) }
            td.number { (sent.map_or_else(|| "–".to_owned(), |(sent, _)| number(sent))) }
            td { (sent.and_then(|(_, last)| last).map_or("–", clock)) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reminders_are_told_apart() {
        let one = |kind: &str, before_s, sent| SentReminders { kind: kind.into(), before_s, sent, last: "T".into() };
        let sent = [one("order", 300.0, 7), one("order", 60.0, 5), one("seat", 300.0, 9)];
        assert_eq!(of(&sent, &Kind::ORDER, Duration::from_secs(300)), (7, Some("T")));
        assert_eq!(of(&sent, &Kind::ORDER, Duration::from_secs(30)), (0, None));
        assert!(part(&Kind::ORDER, &[], None).into_string().is_empty());
        let unread = part(&Kind::ORDER, &[Duration::from_secs(300)], None).into_string();
        assert!(unread.contains("5m") && unread.contains("–"), "{unread}");
    }
}
