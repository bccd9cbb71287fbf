//! `order-timeout status`: what the deployment is doing, as text or JSON.

use clap::Args;
use serde_json::json;

use crate::cli::{CommandOutcome, OfKind, short_duration};
use crate::config::Settings;
use crate::operations::NotKnown;
use crate::operations::orders_table::OrdersTable;
use crate::operations::status::{Outbox, Overdue, ParkedForReason, RegisteredWorker, Status, status};
use crate::operations::unresolved::WaitingAtProvider;
use crate::postgres::{self, Database, DatabaseError, one_line};

/// Heights of a bar, in eighths of the highest.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
/// A minute in which no order is due.
const NO_BAR: char = '·';

/// Arguments of `status`.
#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    pub(super) of: OfKind,
    /// Print one JSON object; what is not known is left out, and listed in not_known
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the database cannot be used.
pub async fn run(args: &StatusArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let database = Database::connect(&settings.database, 1).await?;
    postgres::require_migrated(&database).await?;
    let orders = OrdersTable::open(database.clone(), &settings, &args.of.kind).await?;
    let status = status(&database, &orders).await.map_err(|error| DatabaseError(one_line(&error)))?;
    let mut output = CommandOutcome::default();
    if args.json {
        output.line(json!(status));
    } else {
        write_status(&status, &mut output);
    }
    Ok(output)
}

fn write_status(status: &Status, to: &mut CommandOutcome) {
    let mut entry = |name: &str, value: String| to.line(format!("{name:<22}{value}"));
    entry("database time", status.at.clone());
    if let Some(unpaid) = status.unpaid {
        entry("unpaid orders", unpaid.to_string());
    }
    for pause in status.paused.iter().flatten() {
        entry("closing", pause.sentence());
    }
    if let Some(overdue) = &status.overdue {
        entry("overdue", overdue_in_words(overdue));
    }
    if let Some(minutes) = &status.due_by_minute {
        entry("due in the next hour", due_in_words(minutes));
        if minutes.iter().any(|orders| *orders > 0) {
            entry("", bars(minutes));
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
    for at in status.at_providers.iter().flatten() {
        entry("at a provider", at_provider_in_words(at));
    }
    for (number, worker) in status.workers.iter().flatten().enumerate() {
        entry(if number == 0 { "workers" } else { "" }, worker_in_words(worker));
    }
    if status.workers.as_ref().is_some_and(Vec::is_empty) {
        entry("workers", "none".to_owned());
    }
    for NotKnown { what, why } in &status.not_known {
        to.line(format!("not known: {what}: {why}"));
    }
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

fn due_in_words(minutes: &[u64]) -> String {
    let (all, most) = (minutes.iter().sum::<u64>(), minutes.iter().max().copied().unwrap_or_default());
    match minutes.iter().position(|orders| *orders == most) {
        Some(minute) if most > 0 => format!("{all}, at most {most} in a minute, {minute} min from now"),
        _ => all.to_string(),
    }
}

/// A column for each minute.
fn bars(minutes: &[u64]) -> String {
    let most = minutes.iter().max().copied().unwrap_or_default();
    let bar = |orders: &u64| match orders * BARS.len() as u64 {
        0 => NO_BAR,
        // The highest is the last bar; any order is at least the first.
        scaled => usize::try_from(scaled.div_ceil(most) - 1).ok().and_then(|at| BARS.get(at)).copied().unwrap_or('█'),
    };
    minutes.iter().map(bar).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_show_minutes_in_proportion() {
        assert_eq!(bars(&[0, 1, 400, 800]), "·▁▄█");
        assert_eq!(bars(&[0, 1]), "·█");
        assert_eq!(due_in_words(&[0, 3, 9]), "12, at most 9 in a minute, 2 min from now");
        assert_eq!(due_in_words(&[0, 0]), "0");
    }
}
