//! The first page: whether orders are closed on time, what falls due, how late closes were, what is parked, and what runs.
//!
//! Rendered from what was read in the background, so it is fast however large the tables are.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use maud::{Markup, PreEscaped, html};
use order_timeout_amqp::connect;
use order_timeout_core::kind::Kind;

use super::super::site::{Shared, View};
use super::forecast::due_between;
use super::layout::{Layout, PARKED_FOR, Visitor, order_link, table};
use super::plots;
use super::words::{age, capitalised, count, lateness, money, number, shown, time, when, with_code};
use super::{due, kinds, providers, reminders};
use crate::observe::degraded::{Cause, Problem};
use crate::observe::inspect::registration;
use crate::observe::last_hour::ClosedMinute;
use crate::operations::NotKnown;
use crate::operations::late_payments::OpenLateMoney;
use crate::operations::recent_closes::RecentClose;
use crate::operations::status::{Outbox, ParkedForReason, RegisteredWorker, Status, Verdict, verdict};
use crate::operations::unresolved::UnresolvedForReason;
use crate::postgres;

pub(super) async fn page(State(shared): State<Arc<Shared>>, visitor: Visitor) -> Markup {
    let view = shared.feed.view().await;
    Layout::new("Status", &visitor).live().render(html! {
        div #live { (PreEscaped(&rendered(&shared, view.as_deref()))) }
        p.connection #connection role="status" {}
    })
}

/// What changes while the page is open: sections with an id each. Rendered once for each view.
pub(super) fn rendered(shared: &Shared, view: Option<&View>) -> Arc<str> {
    let render = || sections(shared, view).into_string().into();
    view.map_or_else(render, |view| view.rendered.get_or_init(render).clone())
}

fn sections(shared: &Shared, view: Option<&View>) -> Markup {
    let read = match view {
        Some(view) => view.status.as_ref().map_err(String::as_str),
        None => Err("the database has not answered yet"),
    };
    let problems = problems(shared);
    let now = Instant::now();
    html! {
        (verdict_section(&verdict(read, &problems), read.ok(), &problems))
        @if shared.kinds().len() > 1 { (kinds::section(shared, view, now)) }
        // An older forecast beside a database that does not answer would look like the present.
        @for kind in shared.kinds().iter().filter(|_| read.is_ok()) {
            (due::section(
                kind,
                view.and_then(|view| view.forecasts.get(kind)),
                shared.kinds().len() > 1,
                read.is_ok_and(|status| status.is_paused(kind)),
                &reminders::part(kind, &shared.settings.reminders_of(kind), view),
            ))
        }
        (late_section(&shared.served.last_hour(now), read.ok()))
        @if let Ok(status) = read {
            (providers::section(status.at_providers.as_deref()))
            (workers_section(status, shared.kinds().len() > 1))
        }
        (facts_section(shared, read.ok()))
        @if let Ok(status) = read { (not_known_section(&status.not_known)) }
    }
}

/// What `/readyz` says, but for pauses: those of all kinds are read from the database.
fn problems(shared: &Shared) -> Vec<Problem> {
    let problems = shared.pages.health.is_ready().problems;
    problems.into_iter().filter(|problem| problem.cause != Cause::ClosingPaused).collect()
}

/// What is wrong, and what to do about it.
fn reason(problem: &Problem) -> Markup {
    html! { li { (with_code(&problem.title())) p.todo { (with_code(&capitalised(&problem.fix))) } } }
}

fn verdict_section(verdict: &Verdict, status: Option<&Status>, problems: &[Problem]) -> Markup {
    let (class, mark, reasons): (_, _, &[Problem]) = match verdict {
        Verdict::OnTime => ("ok", "✓", &[]),
        Verdict::Degraded(reasons) => ("warn", "!", reasons),
        Verdict::Paused(reasons) => ("bad", "‖", reasons),
        Verdict::Late(reasons) => ("bad", "✗", reasons),
        Verdict::Unknown(_) => ("unknown", "?", &[]),
    };
    html! {
        section #verdict class=(format!("verdict {class}")) aria-label="Verdict" {
            h1 { span.mark aria-hidden="true" { (mark) } " " (sentence(verdict, status)) }
            @if !reasons.is_empty() { ul { @for problem in reasons { (reason(problem)) } } }
            @if let Some(status) = status {
                (waiting(status))
                @for of in &status.not_known { p { "Not known: " (of.what) "." } }
            }
            @if let (Verdict::Paused(_) | Verdict::Late(_), Some(status)) = (verdict, status) { (overdue_links(status)) }
            @if let Verdict::Unknown(why) = verdict {
                p { (shown(why)) }
                p.todo { (with_code(&Cause::Database.remedy())) }
                // What is known of the database is said already.
                @let others: Vec<_> = problems.iter().filter(|problem| problem.cause != Cause::Database).collect();
                @if !others.is_empty() { ul { @for problem in others { (reason(problem)) } } }
            }
        }
    }
}

/// What waits for a person, with links to the pages for it. Pauses are among the verdict's reasons.
fn waiting(status: &Status) -> Markup {
    html! {
        @for ParkedForReason { reason, alarms, oldest_s } in status.parked.iter().flatten() {
            p {
                a href=(format!("{PARKED_FOR}{reason}")) { (count(*alarms, "parked alarm")) } ", which could not be handled: "
                (shown(reason)) ", the oldest for " (age(*oldest_s)) "."
            }
        }
        @for UnresolvedForReason { reason, orders, oldest_s } in status.unresolved.iter().flatten() {
            p {
                a href="/unresolved" { (count(*orders, "unresolved order")) }
                ", which a payment provider's answers could not decide: " (shown(reason)) ", the oldest for " (age(*oldest_s)) "."
            }
        }
        @for OpenLateMoney { payments, sum } in status.late_money.iter().flatten() {
            p { a href="/late" { (count(*payments, "late payment")) } ", " strong { (money(sum)) } ", paid for nothing." }
        }
    }
}

/// Links to the overdue orders of each kind.
fn overdue_links(status: &Status) -> Markup {
    let overdue = status.kinds.iter().filter_map(|of| {
        let oldest = of.overdue.as_ref().filter(|overdue| overdue.orders > 0)?.oldest.as_deref()?;
        Some((&of.kind, due_between(&of.kind, oldest, &status.at)))
    });
    html! {
        @for (kind, page) in overdue {
            p { a href=(page) {
                "The overdue orders" @if status.kinds.len() > 1 { " of the kind " (kind) } ", the oldest first"
            } }
        }
    }
}

fn sentence(verdict: &Verdict, status: Option<&Status>) -> String {
    match verdict {
        Verdict::OnTime => "Orders are closed on time.".to_owned(),
        Verdict::Degraded(reasons) => match status.map(Status::without_answer) {
            Some((orders @ 1.., oldest_s)) => providers::sentence(orders, oldest_s),
            _ if reasons.is_empty() && status.is_some_and(|status| status.not_known.is_empty()) => {
                "Orders are closed on time, but something waits for a person.".to_owned()
            }
            _ => "Orders are closed on time, but something needs attention.".to_owned(),
        },
        Verdict::Unknown(_) => "It is not known whether orders are closed on time.".to_owned(),
        Verdict::Paused(_) => paused_sentence(status),
        Verdict::Late(_) => match status.and_then(Status::overdue) {
            Some(overdue) => {
                let at_least = if overdue.is_at_least { "at least " } else { "" };
                let oldest = age(overdue.oldest_s.unwrap_or_default());
                let are = if overdue.orders == 1 { "is" } else { "are" };
                format!(
                    "Orders are late: {at_least}{} {are} overdue, the oldest for {oldest}.",
                    count(overdue.orders, "order")
                )
            }
            None => "Orders are late.".to_owned(),
        },
    }
}

/// What does not go on, and what that has left so far.
fn paused_sentence(status: Option<&Status>) -> String {
    let pauses = status.map(Status::pauses).unwrap_or_default();
    let kinds: Vec<&str> = pauses.iter().filter_map(|pause| pause.kind.as_deref()).collect();
    let what = if kinds.len() < pauses.len() {
        "Closing is paused".to_owned()
    } else {
        let plural = if kinds.len() == 1 { "" } else { "s" };
        format!("Closing of the kind{plural} {} is paused", kinds.join(", "))
    };
    match status.and_then(Status::overdue).filter(|overdue| overdue.orders > 0) {
        Some(overdue) => {
            let at_least = if overdue.is_at_least { "at least " } else { "" };
            let wait = if overdue.orders == 1 { "waits" } else { "wait" };
            format!("{what}: {at_least}{} {wait} to be closed.", count(overdue.orders, "overdue order"))
        }
        None => format!("{what}: no order is closed until it is resumed."),
    }
}

fn late_section(minutes: &[ClosedMinute], status: Option<&Status>) -> Markup {
    let closed: u64 = minutes.iter().map(ClosedMinute::closed).sum();
    html! {
        section #late {
            h2 { "Closed in the last hour by this worker" }
            p.note { (whose_hour(status)) }
            @if minutes.is_empty() {
                p { "Nothing. A worker that has just started has not closed anything yet." }
            } @else {
                p { (count(closed, "order")) "." }
                (plots::late(minutes))
                details #late-table {
                    summary { "The same as a table" }
                    (late_table(minutes))
                }
            }
            @if let Some(status) = status { (recent_table(status)) }
        }
    }
}

/// Which worker shows its hour, and how many others have one.
fn whose_hour(status: Option<&Status>) -> String {
    let (host, pid) = (registration::host(), std::process::id());
    let live = status.and_then(|status| status.workers.as_ref());
    let live = live.map_or(0, |workers| workers.iter().filter(|worker| worker.is_live).count());
    let others = match live.saturating_sub(1) {
        0 => String::new(),
        others => {
            format!(" {} in this database; what they closed is on their pages.", count(others as u64, "more worker"))
        }
    };
    format!("{}, process {pid}.{others}", shown(&host))
}

/// Of all workers.
fn recent_table(status: &Status) -> Markup {
    let by = |word: &str| match word {
        "alarm" => "its alarm",
        "look_ahead" => "reading ahead",
        "sweep" => "the sweep",
        "released" => "a release",
        _ => "hand",
    };
    let closes = status.recently_closed.as_deref().unwrap_or_default();
    let row = |close: &RecentClose| {
        let kind = Kind::new(&close.kind).unwrap_or(Kind::ORDER);
        html! { tr {
            td data-name="closed" { (when(&close.closed_at, &status.at)) }
            td data-name="order" { (order_link(&kind, &close.order_id)) }
            td.number data-name="late" { (close.late_ms.map_or_else(|| "–".to_owned(), lateness)) }
            td data-name="by" { (close.closed_by.as_deref().map_or("–", by)) }
        } }
    };
    let heads = [("closed", false), ("order", false), ("late", true), ("by", false)];
    html! {
        @if !closes.is_empty() {
            h3 { "The last orders that were closed, by all workers" }
            (table("The last orders that were closed", "cards", &heads, &html! { @for close in closes { (row(close)) } }))
        }
    }
}

fn late_table(minutes: &[ClosedMinute]) -> Markup {
    let ms = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), lateness);
    let numbers = ["p50", "p99", "latest", "by alarms", "by reading ahead", "by the sweep", "after asking providers"];
    let heads: Vec<_> = std::iter::once(("minutes ago", false)).chain(numbers.map(|name| (name, true))).collect();
    let rows = html! {
        @for minute in minutes.iter().rev() {
            tr {
                th scope="row" { (minute.minutes_ago) }
                @for late in [minute.p50_ms, minute.p99_ms, minute.max_ms] { td.number { (ms(late)) } }
                @for closed in [minute.alarm, minute.look_ahead, minute.sweep, minute.asked] { td.number { (number(closed)) } }
            }
        }
    };
    table("Lateness by minute", "", &heads, &rows)
}

fn workers_section(status: &Status, names_kinds: bool) -> Markup {
    let mut heads = vec![("host", false), ("pid", true), ("version", false), ("since", false), ("seen", false)];
    if names_kinds {
        heads.insert(3, ("kinds", false));
    }
    html! {
        section #workers {
            h2 { "Workers" }
            @match status.workers.as_deref() {
                None => p { "Not known." },
                Some([]) => p.bad { "None is registered." },
                Some(workers) => (table("Workers", "", &heads, &html! {
                    @for worker in workers { (worker_row(worker, names_kinds, &status.at)) }
                })),
            }
        }
    }
}

fn worker_row(worker: &RegisteredWorker, names_kinds: bool, now: &str) -> Markup {
    html! {
        tr {
            th scope="row" { (shown(&worker.host)) }
            td.number { (worker.pid) }
            td { (shown(&worker.version)) }
            @if names_kinds { td { (shown(&worker.kinds.join(", "))) } }
            td { (when(&worker.since, now)) }
            @if worker.is_live { td { "now" } }
            @else { td.bad { (age(worker.last_seen_s)) " ago: ended without signing off" } }
        }
    }
}

fn facts_section(shared: &Shared, status: Option<&Status>) -> Markup {
    let settings = &shared.settings;
    let database = postgres::place(&settings.database).unwrap_or_else(|_| "not known".into());
    let broker = match settings.delay.strategy.needs_broker() {
        true => connect::place(&settings.amqp).unwrap_or_else(|_| "not known".into()),
        false => "none: deadlines are read from the database".into(),
    };
    let ready = shared.pages.health.is_ready();
    html! {
        section #facts {
            h2 { "This worker" }
            dl {
                dt { "ready" }
                @for line in &ready.lines() { dd { (with_code(line)) } }
                dt { "namespace" } dd { (shown(&settings.namespace)) }
                dt { "consumer session" }
                dd { (session(shared)) }
                dt { "alarms in memory" }
                dd { (shared.served.list().iter().map(|served| served.metrics.alarms_held.get()).sum::<i64>()) }
                dt { "broker" } dd { (shown(&broker)) }
                dt { "database" } dd { (shown(&database)) }
                @if let Some(status) = status {
                    dt { "database time" } dd { (time(&status.at)) }
                    (outbox("alarms to send", status.alarm_outbox.as_ref()))
                    (outbox("events to announce", status.event_outbox.as_ref()))
                }
            }
        }
    }
}

/// Of all kinds: each has a session of its own.
fn session(shared: &Shared) -> String {
    let served = shared.served.list();
    let open = served.iter().filter(|served| served.metrics.session_open.get() == 1).count();
    let is_paused = shared.pages.health.is_ready().problems.iter().any(|problem| problem.cause == Cause::ClosingPaused);
    match (shared.settings.delay.strategy.needs_broker(), open, served.len()) {
        (false, ..) => "not needed".to_owned(),
        (true, 0, _) if is_paused => "closed while closing is paused: alarms wait in the broker".to_owned(),
        (true, 0, _) => "none".to_owned(),
        (true, open, all) if open == all => "open".to_owned(),
        (true, open, all) => format!("{open} of {all} open"),
    }
}

fn outbox(name: &str, outbox: Option<&Outbox>) -> Markup {
    let Some(outbox) = outbox else { return html! {} };
    html! {
        dt { (name) }
        dd {
            (number(outbox.unsent))
            @if let Some(oldest_s) = outbox.oldest_s { ", the oldest for " (age(oldest_s)) }
            @if outbox.refused > 0 { "; " (number(outbox.refused)) " refused by the broker" }
        }
    }
}

fn not_known_section(entries: &[NotKnown]) -> Markup {
    html! {
        @if !entries.is_empty() {
            section #not-known { h2 { "Not known" } (not_known(entries)) }
        }
    }
}

/// What an answer leaves out.
pub(super) fn not_known(entries: &[NotKnown]) -> Markup {
    html! {
        @if !entries.is_empty() {
            ul.not-known { @for NotKnown { what, why } in entries { li { "Not known: " (what) ": " (shown(why)) } } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::status::{Overdue, OverdueOfKind};

    #[test]
    fn sentence_tells_how_late() {
        let overdue = Overdue { orders: 1_200, is_at_least: true, oldest: None, oldest_s: Some(65.0) };
        let kinds = vec![OverdueOfKind { kind: Kind::ORDER, overdue: Some(overdue), not_known: None }];
        let status = Status { kinds, ..Status::default() };
        let said = sentence(&Verdict::Late(Vec::new()), Some(&status));
        assert_eq!(said, "Orders are late: at least 1,200 orders are overdue, the oldest for 1m 5s.");
    }

    #[test]
    fn foreign_text_is_escaped() {
        let entry = NotKnown { what: "stock", why: "<script>\u{202e}".into() };
        let text = not_known(&[entry]).into_string();
        assert!(text.contains("&lt;script&gt;\\u202e") && !text.contains("<script>"), "{text}");
    }
}
