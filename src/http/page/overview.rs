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
use super::layout::{Layout, Visitor, order_path};
use super::pending::pending_between;
use super::plots;
use super::words::{age, capitalised, count, lateness, money, number, shown, time, when, with_code};
use super::{due, kinds, pauses, providers, reminders, unresolved};
use crate::observe::degraded::{Cause, Problem};
use crate::observe::inspect::registration;
use crate::observe::last_hour::ClosedMinute;
use crate::operations::NotKnown;
use crate::operations::late_payments::OpenLateMoney;
use crate::operations::recent_closes::RecentClose;
use crate::operations::status::{Outbox, ParkedForReason, RegisteredWorker, Status, Verdict, Waiting, verdict};
use crate::postgres;

pub(super) async fn page(State(shared): State<Arc<Shared>>, visitor: Visitor) -> Markup {
    let view = shared.feed.view().await;
    Layout::new("Overview", &visitor).live().render(html! {
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
        Some(view) => view.overview.as_ref().map_err(String::as_str),
        None => Err("the database has not answered yet"),
    };
    let problems = problems(shared);
    let now = Instant::now();
    html! {
        (verdict_section(&verdict(read, &problems), read.ok(), &problems))
        @if let Ok(overview) = read { @for section in of_people(overview, true) { (section) } }
        @if shared.kinds().len() > 1 { (kinds::section(shared, view, now)) }
        // An older forecast beside a database that does not answer would look like the present.
        @for kind in shared.kinds().iter().filter(|_| read.is_ok()) {
            (due::section(
                kind,
                view.and_then(|view| view.forecasts.get(kind)),
                shared.kinds().len() > 1,
                read.is_ok_and(|overview| overview.is_paused(kind)),
                &reminders::part(kind, &shared.settings.reminders_of(kind), view),
            ))
        }
        (late_section(&shared.served.last_hour(None, now), read.ok()))
        @if let Ok(overview) = read {
            (providers::section(overview.at_providers.as_deref()))
            @for section in of_people(overview, false) { (section) }
            (workers_section(overview, shared.kinds().len() > 1))
        }
        (facts_section(shared, read.ok()))
        @if let Ok(overview) = read { (not_known_section(&overview.not_known)) }
    }
}

/// The sections about what waits for a person: above the charts where something does, and below them otherwise.
fn of_people(overview: &Status, is_waiting: bool) -> Vec<Markup> {
    let waiting = overview.waiting();
    [
        (waiting.pauses, pauses::section(overview.paused.as_deref(), &overview.at)),
        (waiting.parked, parked_section(overview.parked.as_deref())),
        (waiting.unresolved, unresolved::section(overview.unresolved.as_deref())),
        (waiting.late_money, late_money_section(overview.late_money.as_deref())),
    ]
    .into_iter()
    .filter_map(|(count, section)| ((count > 0) == is_waiting).then_some(section))
    .collect()
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

fn verdict_section(verdict: &Verdict, overview: Option<&Status>, problems: &[Problem]) -> Markup {
    let (class, mark, reasons): (_, _, &[Problem]) = match verdict {
        Verdict::OnTime => ("ok", "✓", &[]),
        Verdict::Degraded(reasons) => ("warn", "!", reasons),
        Verdict::Paused(reasons) => ("bad", "‖", reasons),
        Verdict::Late(reasons) => ("bad", "✗", reasons),
        Verdict::Unknown(_) => ("unknown", "?", &[]),
    };
    html! {
        section #verdict class=(format!("verdict {class}")) aria-label="Verdict" {
            h1 { span.mark aria-hidden="true" { (mark) } " " (sentence(verdict, overview)) }
            @if !reasons.is_empty() { ul { @for problem in reasons { (reason(problem)) } } }
            @if let Some(overview) = overview {
                (waiting_links(&overview.waiting()))
                @for of in &overview.not_known { p { "Not known: " (of.what) "." } }
            }
            @if let (Verdict::Paused(_) | Verdict::Late(_), Some(overview)) = (verdict, overview) { (overdue_links(overview)) }
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

/// Links to what waits for a person and is not said by the pauses among the reasons.
fn waiting_links(waiting: &Waiting) -> Markup {
    html! {
        @for (number, noun, page, what) in [
            (waiting.parked, "parked alarm", "/parked", "which could not be handled"),
            (waiting.unresolved, "unresolved order", "/unresolved", "which a payment provider's answers could not decide"),
        ] {
            @if number > 0 { p { a href=(page) { (count(number, noun)) } ", " (what) "." } }
        }
    }
}

/// Links to the overdue orders of each kind.
fn overdue_links(overview: &Status) -> Markup {
    let overdue = overview.kinds.iter().filter_map(|of| {
        let oldest = of.overdue.as_ref().filter(|overdue| overdue.orders > 0)?.oldest.as_deref()?;
        Some((&of.kind, pending_between(&of.kind, oldest, &overview.at)))
    });
    html! {
        @for (kind, page) in overdue {
            p { a href=(page) {
                "The overdue orders" @if overview.kinds.len() > 1 { " of the kind " (kind) } ", the oldest first"
            } }
        }
    }
}

fn sentence(verdict: &Verdict, overview: Option<&Status>) -> String {
    match verdict {
        Verdict::OnTime => "Orders are closed on time.".to_owned(),
        Verdict::Degraded(reasons) => match overview.map(Status::without_answer) {
            Some((orders @ 1.., oldest_s)) => providers::sentence(orders, oldest_s),
            _ if reasons.is_empty() && overview.is_some_and(|overview| overview.not_known.is_empty()) => {
                "Orders are closed on time, but something waits for a person.".to_owned()
            }
            _ => "Orders are closed on time, but something needs attention.".to_owned(),
        },
        Verdict::Unknown(_) => "It is not known whether orders are closed on time.".to_owned(),
        Verdict::Paused(_) => paused_sentence(overview),
        Verdict::Late(_) => match overview.and_then(Status::overdue) {
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
fn paused_sentence(overview: Option<&Status>) -> String {
    let pauses = overview.map(Status::pauses).unwrap_or_default();
    let kinds: Vec<&str> = pauses.iter().filter_map(|pause| pause.kind.as_deref()).collect();
    let what = if kinds.len() < pauses.len() {
        "Closing is paused".to_owned()
    } else {
        let plural = if kinds.len() == 1 { "" } else { "s" };
        format!("Closing of the kind{plural} {} is paused", kinds.join(", "))
    };
    match overview.and_then(Status::overdue).filter(|overdue| overdue.orders > 0) {
        Some(overdue) => {
            let at_least = if overdue.is_at_least { "at least " } else { "" };
            let wait = if overdue.orders == 1 { "waits" } else { "wait" };
            format!("{what}: {at_least}{} {wait} to be closed.", count(overdue.orders, "overdue order"))
        }
        None => format!("{what}: no order is closed until it is resumed."),
    }
}

fn late_section(minutes: &[ClosedMinute], overview: Option<&Status>) -> Markup {
    let closed: u64 = minutes.iter().map(ClosedMinute::closed).sum();
    html! {
        section #late {
            h2 { "Closed in the last hour by this worker" }
            p.note { (whose_hour(overview)) }
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
            @if let Some(overview) = overview { (recent_table(overview)) }
        }
    }
}

/// Which worker shows its hour, and how many others have one.
fn whose_hour(overview: Option<&Status>) -> String {
    let (host, pid) = (registration::host(), std::process::id());
    let live = overview.and_then(|overview| overview.workers.as_ref());
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
fn recent_table(overview: &Status) -> Markup {
    let by = |word: &str| match word {
        "alarm" => "its alarm",
        "look_ahead" => "reading ahead",
        "sweep" => "the sweep",
        _ => "hand",
    };
    let closes = overview.recently_closed.as_deref().unwrap_or_default();
    let row = |close: &RecentClose| {
        let kind = Kind::new(&close.kind).unwrap_or(Kind::ORDER);
        html! { tr {
            td data-name="closed" { (when(&close.closed_at, &overview.at)) }
            td data-name="order" { a href=(order_path(&kind, &close.order_id)) { code { (shown(&close.order_id)) } } }
            td.number data-name="late" { (close.late_ms.map_or_else(|| "–".to_owned(), lateness)) }
            td data-name="by" { (close.closed_by.as_deref().map_or("–", by)) }
        } }
    };
    html! {
        @if !closes.is_empty() {
            h3 { "The last orders that were closed, by all workers" }
            div.scroll tabindex="0" role="region" aria-label="The last orders that were closed" {
                table.cards {
                    thead { tr { th scope="col" { "closed" } th scope="col" { "order" } th.number scope="col" { "late" } th scope="col" { "by" } } }
                    tbody { @for close in closes { (row(close)) } }
                }
            }
        }
    }
}

fn late_table(minutes: &[ClosedMinute]) -> Markup {
    let ms = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), lateness);
    html! {
        div.scroll tabindex="0" role="region" aria-label="Lateness by minute" {
            table {
                thead { tr {
                    th scope="col" { "minutes ago" }
                    @for name in ["p50", "p99", "latest", "by alarms", "by reading ahead", "by the sweep", "after asking providers"] {
                        th.number scope="col" { (name) }
                    }
                } }
                tbody {
                    @for minute in minutes.iter().rev() {
                        tr {
                            th scope="row" { (minute.minutes_ago) }
                            @for late in [minute.p50_ms, minute.p99_ms, minute.max_ms] { td.number { (ms(late)) } }
                            @for closed in [minute.alarm, minute.look_ahead, minute.sweep, minute.asked] { td.number { (number(closed)) } }
                        }
                    }
                }
            }
        }
    }
}

fn parked_section(parked: Option<&[ParkedForReason]>) -> Markup {
    html! {
        section #parked {
            h2 { "Parked alarms" }
            @match parked {
                None => p { "Not known." },
                Some([]) => p { "None." },
                Some(parked) => {
                    p { "Alarms that could not be handled. Their orders are closed by the sweep where that is possible." }
                    table {
                        thead { tr { th scope="col" { "reason" } th.number scope="col" { "alarms" } th.number scope="col" { "oldest" } } }
                        tbody {
                            @for ParkedForReason { reason, alarms, oldest_s } in parked {
                                tr {
                                    th scope="row" { a href=(format!("/parked?reason={reason}")) { (shown(reason)) } }
                                    td.number { (number(*alarms)) }
                                    td.number { (age(*oldest_s)) }
                                }
                            }
                        }
                    }
                },
            }
        }
    }
}

fn late_money_section(open: Option<&[OpenLateMoney]>) -> Markup {
    html! {
        section #late-money {
            h2 { "Late money" }
            @match open {
                None => p { "Not known." },
                Some([]) => p { "None: every payment paid for something." },
                Some(open) => {
                    @for OpenLateMoney { payments, sum } in open {
                        p { (count(*payments, "payment")) ", " strong { (money(sum)) } ", paid for nothing." }
                    }
                    p { a href="/late" { "Settle late money" } }
                },
            }
        }
    }
}

fn workers_section(overview: &Status, names_kinds: bool) -> Markup {
    html! {
        section #workers {
            h2 { "Workers" }
            @match overview.workers.as_deref() {
                None => p { "Not known." },
                Some([]) => p.bad { "None is registered." },
                Some(workers) => div.scroll tabindex="0" role="region" aria-label="Workers" {
                    table {
                        thead { tr { th scope="col" { "host" } th.number scope="col" { "pid" } th scope="col" { "version" }
                            @if names_kinds { th scope="col" { "kinds" } }
                            th scope="col" { "since" } th scope="col" { "seen" } } }
                        tbody { @for worker in workers { (worker_row(worker, names_kinds, &overview.at)) } }
                    }
                },
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

fn facts_section(shared: &Shared, overview: Option<&Status>) -> Markup {
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
                @if let Some(overview) = overview {
                    dt { "database time" } dd { (time(&overview.at)) }
                    (outbox("alarms to send", overview.alarm_outbox.as_ref()))
                    (outbox("events to announce", overview.event_outbox.as_ref()))
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
        let overview = Status { kinds, ..Status::default() };
        let said = sentence(&Verdict::Late(Vec::new()), Some(&overview));
        assert_eq!(said, "Orders are late: at least 1,200 orders are overdue, the oldest for 1m 5s.");
    }

    #[test]
    fn foreign_text_is_escaped() {
        let entry = NotKnown { what: "stock", why: "<script>\u{202e}".into() };
        let text = not_known(&[entry]).into_string();
        assert!(text.contains("&lt;script&gt;\\u202e") && !text.contains("<script>"), "{text}");
    }
}
