//! `order-timeout parked list | retry | drop`: what could not be handled, for the person who decides.

use clap::{Args, Subcommand};
use serde_json::json;
use sqlx::PgPool;
use uuid::Uuid;

use crate::config::Settings;
use crate::confirm::ConfirmedPublisher;
use crate::database;
use crate::envelope::{self, Entry, Stamp};
use crate::order::Moment;
use crate::park::{self, Parked, Selection};
use crate::topology::Names;

/// Rows taken at a time: bounds memory, and how much is published between two deletions.
const AT_ONCE: i64 = 1_000;

/// What to do with parked alarms.
#[derive(Debug, Subcommand)]
pub enum ParkedCommand {
    /// Show parked alarms, oldest first
    List(ListArgs),
    /// Send parked alarms back to the worker; shows what would be sent unless --yes is given
    Retry(ActArgs),
    /// Delete parked alarms; shows what would be deleted unless --yes is given
    Drop(ActArgs),
}

/// Arguments of `parked list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Only those parked for this reason: unreadable, malformed_id, too_far, unknown_order, close_failed, broker_gave_up
    #[arg(long)]
    reason: Option<String>,
    /// At most this many
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    limit: i64,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

/// Arguments of `parked retry` and `parked drop`.
#[derive(Debug, Args)]
pub struct ActArgs {
    #[command(flatten)]
    which: Which,
    /// Do it, instead of showing what would be done
    #[arg(long)]
    yes: bool,
    /// Print counts as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// The ids that `parked list` shows
    #[arg(value_name = "ID")]
    ids: Vec<Uuid>,
    /// All that were parked for this reason
    #[arg(long)]
    reason: Option<String>,
    /// All of them
    #[arg(long)]
    all: bool,
}

impl ActArgs {
    fn selection(&self) -> Selection {
        match &self.which.reason {
            Some(reason) => Selection::Reason(reason.clone()),
            None if self.which.all => Selection::All,
            None => Selection::Ids(self.which.ids.clone()),
        }
    }
}

/// # Errors
/// If the database or, for a retry, the broker cannot be used.
pub async fn run(command: ParkedCommand, settings: Settings) -> anyhow::Result<u8> {
    let pool = database::connect(&settings.database, 1).await?;
    match command {
        ParkedCommand::List(args) => list(&pool, &args).await,
        ParkedCommand::Retry(args) if args.yes => retry(&pool, &settings, &args).await,
        ParkedCommand::Drop(args) if args.yes => drop_parked(&pool, &args).await,
        ParkedCommand::Retry(args) | ParkedCommand::Drop(args) => preview(&pool, &args).await,
    }
}

async fn list(pool: &PgPool, args: &ListArgs) -> anyhow::Result<u8> {
    let selection = args.reason.clone().map_or(Selection::All, Selection::Reason);
    let rows = park::list(pool, &selection, args.limit).await?;
    if args.json {
        for row in &rows {
            println!("{}", serde_json::to_string(row)?);
        }
    } else {
        print_table(&rows);
    }
    Ok(0)
}

fn print_table(rows: &[Parked]) {
    if rows.is_empty() {
        println!("nothing is parked");
        return;
    }
    println!("{:<36}  {:<14}  {:>8}  {:>8}  {:<36}  DETAIL", "ID", "REASON", "AGE", "ATTEMPTS", "ORDER");
    for row in rows {
        let age = humantime::format_duration(std::time::Duration::from_secs(row.age_s.unsigned_abs())).to_string();
        let age = age.split(' ').take(2).collect::<String>();
        let order = printable(row.order_id.as_deref().unwrap_or("-"));
        println!(
            "{}  {:<14}  {age:>8}  {:>8}  {order:<36}  {}",
            row.id,
            row.reason,
            row.attempts,
            printable(&row.detail)
        );
    }
}

/// What came from a message must not steer the terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

async fn preview(pool: &PgPool, args: &ActArgs) -> anyhow::Result<u8> {
    let rows = park::list(pool, &args.selection(), AT_ONCE).await?;
    if args.json {
        println!("{}", json!({ "selected": rows.len(), "done": 0 }));
    } else {
        print_table(&rows);
        println!("{} alarm(s) selected, nothing done; add --yes to do it", rows.len());
    }
    Ok(0)
}

async fn retry(pool: &PgPool, settings: &Settings, args: &ActArgs) -> anyhow::Result<u8> {
    let confirmed = ConfirmedPublisher::connect(&settings.amqp, "parked retry").await?;
    let names = Names::new(&settings.namespace);
    let (mut sent, mut kept) = (0, Vec::new());
    // What is sent is deleted, so the next page begins where this one ended; what is kept must not be met again.
    let mut selected = ids_of(&park::list(pool, &args.selection(), i64::MAX).await?);
    while !selected.is_empty() {
        let page: Vec<Uuid> = selected.drain(..selected.len().min(AT_ONCE.unsigned_abs() as usize)).collect();
        let rows = park::list(pool, &Selection::Ids(page), AT_ONCE).await?;
        let mut readable = Vec::new();
        for row in rows {
            match row.alarm() {
                Ok(due) => readable.push((row.id, due)),
                Err(fault) => kept.push((row.id, fault.to_string())),
            }
        }
        let stamp = || Stamp { attempt: 0, born: Moment::now_by_local_clock(), traceparent: None };
        let messages = readable.iter().map(|(_, due)| envelope::address(due, Entry::arm(&names), stamp())).collect();
        let answers = confirmed.publish_all(messages).await;
        let mut safe = Vec::new();
        for ((id, _), answer) in readable.into_iter().zip(answers) {
            match answer {
                Ok(()) => safe.push(id),
                Err(fault) => kept.push((id, fault.to_string())),
            }
        }
        sent += park::drop_rows(pool, &safe).await?;
    }
    if args.json {
        let kept: Vec<_> = kept.iter().map(|(id, why)| json!({ "id": id, "why": why })).collect();
        println!("{}", json!({ "retried": sent, "kept": kept }));
    } else {
        println!("{sent} alarm(s) sent back to the worker");
        for (id, why) in &kept {
            println!("kept {id}: {}", printable(why));
        }
    }
    Ok(u8::from(!kept.is_empty()))
}

fn ids_of(rows: &[Parked]) -> Vec<Uuid> {
    rows.iter().map(|row| row.id).collect()
}

async fn drop_parked(pool: &PgPool, args: &ActArgs) -> anyhow::Result<u8> {
    let ids = ids_of(&park::list(pool, &args.selection(), i64::MAX).await?);
    let dropped = park::drop_rows(pool, &ids).await?;
    if args.json {
        println!("{}", json!({ "dropped": dropped }));
    } else {
        println!("{dropped} alarm(s) dropped");
    }
    Ok(0)
}
