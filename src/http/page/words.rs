//! Numbers, times and foreign text as the page shows them.
//!
//! Pure.

use std::borrow::Cow;
use std::time::Duration;

use maud::{Markup, html};
use order_timeout_core::message::read_rfc3339;

use crate::operations::orders_table::due::Money;
use crate::sanitize;

/// Text from outside in one line, with hidden characters made visible. The template escapes it for HTML.
pub(super) fn shown(text: &str) -> Cow<'_, str> {
    sanitize::one_line(text)
}

/// The page on which a command's work is done as well, and its name.
const PAGES_OF_COMMANDS: [(&str, &str, &str); 5] = [
    ("order-timeout resume", "/pauses", "Pauses"),
    ("order-timeout pause", "/pauses", "Pauses"),
    ("order-timeout parked", "/parked", "Parked alarms"),
    ("order-timeout late", "/late", "Late money"),
    ("order-timeout closing", "/unresolved", "Unresolved"),
];

/// Text from outside with what is between backticks as code, followed by a link to the page that does the same.
pub(super) fn with_code(text: &str) -> Markup {
    let text = shown(text);
    html! {
        @for (number, part) in text.split('`').enumerate() {
            @if number % 2 == 0 { (part) }
            @else {
                code { (part) }
                @if let Some((_, page, name)) = PAGES_OF_COMMANDS.iter().find(|(command, ..)| part.starts_with(command)) {
                    " (or on the page " a href=(page) { (name) } ")"
                }
            }
        }
    }
}

/// With a comma between thousands.
pub(super) fn number(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// An amount with a comma between thousands.
pub(super) fn money(money: &Money) -> String {
    let text = money.to_string();
    let end = text.find(['.', ' ']).unwrap_or(text.len());
    let (whole, rest) = text.split_at(end);
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |digits| ("-", digits));
    format!("{sign}{}{rest}", digits.parse().map_or_else(|_| digits.to_owned(), number))
}

/// A number and its noun: `1 order`, `2 orders`.
pub(super) fn count(orders: u64, noun: &str) -> String {
    let plural = if orders == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", number(orders))
}

/// At most two terms: `3h 5m`.
pub(super) fn age(seconds: f64) -> String {
    let duration = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default();
    let whole = Duration::from_secs(duration.as_secs());
    humantime::format_duration(whole).to_string().split(' ').take(2).collect::<Vec<_>>().join(" ")
}

pub(super) fn capitalised(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// A lateness: `7.2 ms`, `1.2 s`.
pub(super) fn lateness(ms: f64) -> String {
    match ms {
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms if ms < 1_000.0 => format!("{ms:.0} ms"),
        ms if ms < 60_000.0 => format!("{:.1} s", ms / 1e3),
        ms => age(ms / 1e3),
    }
}

/// A time to the second, with its date: `2026-11-20 10:30:00`. The whole is in the element's title.
pub(super) fn time(rfc3339: &str) -> Markup {
    let text = rfc3339.get(..19).unwrap_or(rfc3339).replacen('T', " ", 1);
    element(rfc3339, &text)
}

/// The same to the millisecond, where the order of moments matters.
pub(super) fn precise(rfc3339: &str) -> Markup {
    let text = rfc3339.get(..23).unwrap_or(rfc3339).trim_end_matches('Z').replacen('T', " ", 1);
    element(rfc3339, &text)
}

fn element(rfc3339: &str, text: &str) -> Markup {
    html! { time datetime=(rfc3339) title=(rfc3339) { (text) } }
}

/// A time as it looks at `now`: `10:30:00 2 min ago`, with its date if that is another. As [`time()`] if `now` is empty.
pub(super) fn when(rfc3339: &str, now: &str) -> Markup {
    let (Some(at), Some(present)) = (read_rfc3339(rfc3339), read_rfc3339(now)) else { return time(rfc3339) };
    let text = match rfc3339.get(..10) == now.get(..10) {
        true => rfc3339.get(11..19).unwrap_or(rfc3339).to_owned(),
        false => rfc3339.get(..16).unwrap_or(rfc3339).replacen('T', " ", 1),
    };
    let distance = match at > present {
        true => format!("in {}", about(at.since(present))),
        false => format!("{} ago", about(present.since(at))),
    };
    html! { span { (element(rfc3339, &text)) " " span.note { (distance) } } }
}

/// A time that has passed. `now` may be some seconds old.
pub(super) fn since(rfc3339: &str, now: &str) -> Markup {
    when(rfc3339, if now.is_empty() || rfc3339 < now { now } else { rfc3339 })
}

/// In the largest unit of which there are two: `90 s`, `3 min`, `47 h`, `12 days`.
fn about(distance: Duration) -> String {
    match distance.as_secs() {
        s @ 0..120 => format!("{s} s"),
        s @ 120..7_200 => format!("{} min", s / 60),
        s @ 7_200..172_800 => format!("{} h", s / 3_600),
        s => format!("{} days", s / 86_400),
    }
}

/// Hours and minutes of a time.
pub(super) fn clock(rfc3339: &str) -> &str {
    rfc3339.get(11..16).unwrap_or(rfc3339)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_commas() {
        assert_eq!([0, 999, 1_000, 2_580_000].map(number), ["0", "999", "1,000", "2,580,000"]);
        let amount = |currency: &str, amount_minor| money(&Money { currency: currency.into(), amount_minor });
        assert_eq!([amount("EUR", 123_456_789), amount("JPY", -5_000)], ["1,234,567.89 EUR", "-5,000 JPY"]);
        assert_eq!((count(1, "order"), count(2, "order")), ("1 order".into(), "2 orders".into()));
    }

    #[test]
    fn commands_are_shown_as_code() {
        let text = with_code("run `order-timeout close ID` <now>").into_string();
        assert_eq!(text, "run <code>order-timeout close ID</code> &lt;now&gt;");
        let text = with_code("then `order-timeout resume --why TEXT`").into_string();
        let (command, link) = ("<code>order-timeout resume --why TEXT</code>", "<a href=\"/pauses\">Pauses</a>");
        assert_eq!(text, format!("then {command} (or on the page {link})"));
    }

    #[test]
    fn durations_are_short() {
        assert_eq!([0.2, 65.0, 11_100.0].map(age), ["0s", "1m 5s", "3h 5m"]);
        assert_eq!([0.4, 12.3, 1_234.0, 65_000.0].map(lateness), ["0.4 ms", "12 ms", "1.2 s", "1m 5s"]);
        assert_eq!(clock("2026-11-20T10:30:00Z"), "10:30");
        assert!(time("2026-11-20T10:30:00.004Z").into_string().contains(">2026-11-20 10:30:00<"));
        assert!(precise("2026-11-20T10:30:00.004125Z").into_string().contains(">2026-11-20 10:30:00.004<"));
        assert!(precise("2026-11-20T10:30:00Z").into_string().contains(">2026-11-20 10:30:00<"));
    }

    #[test]
    fn times_are_told_from_now() {
        let when = |at: &str| when(at, "2026-11-20T10:30:00.5Z").into_string();
        for (at, shown, distance) in [
            ("2026-11-20T10:33:01.000125Z", "10:33:01", "in 3 min"),
            ("2026-11-20T10:28:59Z", "10:28:59", "61 s ago"),
            ("2026-11-20T07:00:00Z", "07:00:00", "3 h ago"),
            ("2026-11-21T10:30:00Z", "2026-11-21 10:30", "in 23 h"),
            ("2026-11-01T10:30:00Z", "2026-11-01 10:30", "19 days ago"),
        ] {
            let text = when(at);
            assert!(text.contains(&format!(">{shown}</time>")) && text.contains(&format!(">{distance}<")), "{text}");
            assert!(text.contains(&format!("title=\"{at}\"")), "{text}");
        }
        let since = |at: &str| since(at, "2026-11-20T10:30:00.5Z").into_string();
        assert!(
            since("2026-11-20T10:30:02Z").contains(">0 s ago<") && since("2026-11-20T10:29:00Z").contains(">60 s ago<")
        );
        assert!(when("infinity").contains(">infinity<"));
    }
}
