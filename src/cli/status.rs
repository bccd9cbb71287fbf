//! `order-timeout status`: what the deployment is doing, as text or JSON.

use clap::Args;

use crate::cli::{CommandOutcome, connect, short_duration};
use crate::config::Settings;
use crate::operations::late_payments::OpenLateMoney;
use crate::operations::orders_table::OrdersTable;
use crate::operations::status::{Outbox, Overdue, OverdueOfKind, ParkedForReason, RegisteredWorker, Status, status};
use crate::operations::unresolved::{UnresolvedForReason, WaitingAtProvider};

/// Arguments of `status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    /// Print one JSON object; what is not known is left out, and listed in not_known
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the database cannot be used.
pub async fn run(args: &StatusArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let database = connect(&settings, 1).await?;
    let mut tables = Vec::new();
    for kind in settings.all_kinds() {
        let table = OrdersTable::open(database.clone(), &settings, &kind).await;
        tables.push((kind, table.map_err(|error| error.to_string())));
    }
    Ok(CommandOutcome::of(&status(&database, &tables).await?, args.json, write_status))
}

fn write_status(status: &Status, to: &mut CommandOutcome) {
    let mut entry = |name: &str, value: String| to.line(format!("{name:<22}{value}"));
    entry("database time", status.at.clone());
    for pause in status.paused.iter().flatten() {
        entry("closing", pause.sentence());
    }
    for OverdueOfKind { kind, overdue, not_known } in &status.kinds {
        let name = if status.kinds.len() == 1 { "overdue".to_owned() } else { format!("overdue, {kind}") };
        match (overdue, not_known) {
            (Some(overdue), _) => entry(&name, overdue_in_words(overdue)),
            (None, why) => entry(&name, format!("not known: {}", why.as_deref().unwrap_or_default())),
        }
    }
    for (name, outbox) in [("outbox of alarms", &status.alarm_outbox), ("outbox of events", &status.event_outbox)] {
        if let Some(outbox) = outbox {
            entry(name, outbox_in_words(outbox));
        }
    }
    if let Some(parked) = &status.parked {
        entry("parked alarms", parked_in_words(parked));
    }
    for OpenLateMoney { payments, sum } in status.late_money.iter().flatten() {
        entry("late money", format!("{payments} payments, {sum}"));
    }
    for UnresolvedForReason { reason, orders, .. } in status.unresolved.iter().flatten() {
        entry("unresolved", format!("{orders} {reason}"));
    }
    for at in status.at_providers.iter().flatten() {
        entry("at a provider", at_provider_in_words(at));
    }
    for (number, worker) in status.workers.iter().flatten().enumerate() {
        entry(if number == 0 { "workers" } else { "" }, worker_in_words(worker));
    }
    if status.workers.as_ref().is_some_and(Vec::is_empty) {
        entry("workers", "none".to_owned());
    }
    to.not_known(&status.not_known);
}

fn age(seconds: f64) -> String {
    short_duration(std::time::Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

fn overdue_in_words(Overdue { orders, is_at_least, oldest, oldest_s }: &Overdue) -> String {
    let at_least = if *is_at_least { "at least " } else { "" };
    match (oldest, oldest_s) {
        (Some(oldest), Some(seconds)) => format!("{at_least}{orders}, the oldest since {oldest} ({})", age(*seconds)),
        _ => format!("{at_least}{orders}"),
    }
}

fn outbox_in_words(outbox: &Outbox) -> String {
    let mut words = format!("{} unsent", outbox.unsent);
    if let Some(oldest) = outbox.oldest_s {
        words += &format!(", the oldest for {}", age(oldest));
    }
    if outbox.refused > 0 {
        words += &format!("; {} of them refused by the broker", outbox.refused);
    }
    if let Some(oldest) = outbox.oldest_refused_s {
        words += &format!(", the oldest for {}", age(oldest));
    }
    words
}

fn parked_in_words(parked: &[ParkedForReason]) -> String {
    let of_reason = |parked: &ParkedForReason| {
        format!("{} {}, the oldest for {}", parked.alarms, parked.reason, age(parked.oldest_s))
    };
    if parked.is_empty() { "0".to_owned() } else { parked.iter().map(of_reason).collect::<Vec<_>>().join("; ") }
}

fn at_provider_in_words(at: &WaitingAtProvider) -> String {
    let WaitingAtProvider { provider, orders, without_answer, oldest_s } = at;
    let provider = if provider.is_empty() { "none" } else { provider };
    match without_answer {
        0 => format!("{orders} asked about at {provider}"),
        _ => format!(
            "{orders} asked about at {provider}, {without_answer} without an answer, the oldest for {}",
            age(*oldest_s)
        ),
    }
}

fn worker_in_words(worker: &RegisteredWorker) -> String {
    let RegisteredWorker { host, pid, version, namespace, kinds, since, last_seen_s, is_live } = worker;
    let kinds = if *kinds == ["order"] { String::new() } else { format!(", kinds {}", kinds.join(" and ")) };
    let ended = if *is_live { "" } else { ": it has ended without signing off" };
    format!(
        "{host} pid {pid}, version {version}, namespace {namespace}{kinds}, since {since}, seen {} ago{ended}",
        age(*last_seen_s)
    )
}
