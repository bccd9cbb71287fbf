//! `order-timeout show`: one order's story, as text or JSON.

use std::time::Duration;

use clap::Args;
use order_timeout_core::order::OrderId;
use serde_json::json;

use crate::cli::{CommandOutcome, OfKind, Order, short_duration};
use crate::config::Settings;
use crate::operations::NotKnown;
use crate::operations::orders_table::OrdersTable;
use crate::operations::show::{AlarmRow, EventRow, HistoryRow, OrderStory, ParkedRow, ShownRow, show};
use crate::postgres::{self, Database, DatabaseError, one_line};

/// Arguments of `show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    #[command(flatten)]
    order: Order,
    #[command(flatten)]
    pub(super) of: OfKind,
    /// Print one JSON object; what is not known is left out, and listed in not_known
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the database cannot be used. Exit code 1 also if there is no such order.
pub async fn run(args: &ShowArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let order_id = OrderId::new(args.order.id())?;
    let database = Database::connect(&settings.database, 1).await?;
    postgres::require_migrated(&database).await?;
    let orders = OrdersTable::open(database.clone(), &settings, &args.of.kind).await?;
    let story =
        show(&database, &orders, &args.of.kind, &order_id).await.map_err(|error| DatabaseError(one_line(&error)))?;
    let mut output = CommandOutcome { code: u8::from(story.exists == Some(false)), ..CommandOutcome::default() };
    if args.json {
        output.line(json!(story));
    } else {
        write_story(&story, &mut output);
    }
    Ok(output)
}

fn write_story(story: &OrderStory, to: &mut CommandOutcome) {
    let id = &story.order_id;
    match &story.row {
        Some(row) => to.line(format!("order {id} {}", row_in_words(row))),
        None if story.exists == Some(false) => to.line(format!("there is no order {id}")),
        None => to.line(format!("order {id}")),
    }
    if let Some(why) = &story.open_because {
        to.line(format!("open because {why}"));
    }
    list("alarms in alarm_outbox", story.alarms.as_deref(), alarm_in_words, to);
    list("events in event_outbox", story.events.as_deref(), event_in_words, to);
    list("parked alarms", story.parked.as_deref(), parked_in_words, to);
    list("history", story.history.as_deref(), history_in_words, to);
    for NotKnown { what, why } in &story.not_known {
        to.line(format!("not known: {what}: {why}"));
    }
}

fn list<T>(name: &str, rows: Option<&[T]>, in_words: fn(&T) -> String, to: &mut CommandOutcome) {
    let Some(rows) = rows else { return };
    to.line(format!("{name}: {}", if rows.is_empty() { "none" } else { "" }));
    // Text from outside is escaped line by line.
    rows.iter().for_each(|row| to.indented(in_words(row)));
}

fn row_in_words(ShownRow { status, deadline, remaining_s }: &ShownRow) -> String {
    let status = status.as_deref().map_or_else(|| "is overdue".to_owned(), |status| format!("is {status}"));
    let duration = |seconds: f64| short_duration(Duration::try_from_secs_f64(seconds.abs()).unwrap_or_default());
    match (deadline, remaining_s) {
        (Some(deadline), Some(seconds)) if *seconds > 0.0 => {
            format!("{status}; its deadline {deadline} is in {}", duration(*seconds))
        }
        (Some(deadline), Some(seconds)) => format!("{status}; its deadline {deadline} was {} ago", duration(*seconds)),
        (Some(deadline), None) => format!("{status}; its deadline {deadline} is never due"),
        (None, _) => format!("{status}; it has no deadline"),
    }
}

fn sent(sent_at: Option<&str>, refusals: i32) -> String {
    match sent_at {
        Some(sent_at) => format!("sent {sent_at}"),
        None if refusals > 0 => format!("not sent, refused {refusals} times"),
        None => "not sent".to_owned(),
    }
}

fn alarm_in_words(alarm: &AlarmRow) -> String {
    let AlarmRow { deadline, created_at, sent_at, refusals } = alarm;
    format!("for {deadline}, written {created_at}, {}", sent(sent_at.as_deref(), *refusals))
}

fn event_in_words(event: &EventRow) -> String {
    let EventRow { id, r#type, created_at, sent_at, refusals } = event;
    format!("{type} {id}, written {created_at}, {}", sent(sent_at.as_deref(), *refusals), type = r#type)
}

fn parked_in_words(parked: &ParkedRow) -> String {
    let ParkedRow { id, reason, detail, deadline, parked_at, attempts } = parked;
    let deadline = deadline.as_deref().map_or_else(String::new, |deadline| format!(" for {deadline}"));
    format!("{id}{deadline}, parked {parked_at} as {reason} after {attempts} attempts: {detail}")
}

fn history_in_words(entry: &HistoryRow) -> String {
    let HistoryRow { at, event, by, reason, who, why, run, answers } = entry;
    let run = run.map(|run| run.to_string());
    let parts = [("by", by), ("reason", reason), ("who", who), ("why", why), ("run", &run), ("answers", answers)];
    let parts = parts.into_iter().filter_map(|(name, value)| Some(format!("{name}: {}", value.as_ref()?)));
    [format!("{at} {event}")].into_iter().chain(parts).collect::<Vec<_>>().join("; ")
}
