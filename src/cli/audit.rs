//! `order-timeout audit`: what went wrong with the orders of the last days, as text, as JSON and as an HTML file.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;

use crate::cli::{CommandOutcome, OfKind, UsageError, short_duration};
use crate::config::Settings;
use crate::config::kinds::OrdersOf;
use crate::http::audit_file;
use crate::operations::audit::{self, Audit, Bucket, Example, Found, Lateness};

/// Arguments of `audit`.
#[derive(Debug, Args)]
pub struct AuditArgs {
    #[command(flatten)]
    pub(super) of: OfKind,
    /// Orders with a deadline in the last days or later, 1 to 3650
    #[arg(long, value_name = "DAYS", default_value_t = 90, value_parser = clap::value_parser!(u16).range(1..=3_650))]
    days: u16,
    /// Write a page with pictures to this file as well
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print one JSON object; what is not known is left out, and listed in not_known
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the orders cannot be read, or the file cannot be written. Exit code 1 also if something is wrong.
pub async fn run(args: AuditArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    if !matches!(settings.orders_of(&args.of.kind), Some(OrdersOf::Table(_))) {
        return Err(UsageError::of(audit::why_not(&args.of.kind)));
    }
    // Before some minutes of reading.
    if let Some(file) = &args.html {
        let opened = OpenOptions::new().append(true).create(true).open(file);
        opened.map_err(|error| {
            let file = file.display();
            UsageError::of(format!("--html {file} cannot be written ({error}); name a file in a folder that exists"))
        })?;
    }
    let found = audit::audit(&settings, &args.of.kind, args.days).await?;
    if let Some(file) = &args.html {
        std::fs::write(file, audit_file(&found)).with_context(|| format!("{} cannot be written", file.display()))?;
    }
    let code = u8::from(!found.is_right());
    Ok(CommandOutcome { code, ..CommandOutcome::of(&found, args.json, write_audit) })
}

fn write_audit(found: &Audit, to: &mut CommandOutcome) {
    let Audit { orders_table, since, rows, orders, open, closed, .. } = found;
    to.line(format!(
        "{orders_table}: {rows} rows read, {orders} orders with a deadline since {since}: {open} open, {closed} closed"
    ));
    for Found { fault, count, money, examples } in &found.faults {
        let money: String = money.iter().map(|money| format!(", {money}")).collect();
        let word = if *count == 0 { "none" } else { "wrong" };
        to.line(format!("{word:<7} {}: {count}{money}", fault.title()));
        for example in examples {
            to.indented(format!("      {}", in_words(example)));
        }
    }
    if let Some(lateness) = &found.lateness {
        write_lateness(lateness, &found.time_zone, to);
    }
    to.not_known(&found.not_known);
}

fn in_words(example: &Example) -> String {
    let money = example.money().map(|money| money.to_string());
    let told = [
        ("deadline ", &example.deadline),
        ("closed ", &example.closed_at),
        ("paid ", &example.paid_at),
        ("reserves ", &example.reserves),
        ("needed ", &example.needs),
        ("", &money),
    ];
    let told = told.into_iter().filter_map(|(word, told)| Some(format!(", {word}{}", told.as_ref()?)));
    std::iter::once(example.id.clone()).chain(told).collect()
}

fn write_lateness(lateness: &Lateness, zone: &str, to: &mut CommandOutcome) {
    let Lateness { closes, p50_ms, p90_ms, p99_ms, max_ms, buckets, hours } = lateness;
    let words = |ms: u64| short_duration(Duration::from_millis(ms));
    let [p50, p90, p99, max] = [*p50_ms, *p90_ms, *p99_ms, *max_ms].map(words);
    to.line(format!("lateness of {closes} closes: p50 {p50}, p90 {p90}, p99 {p99}, at most {max}"));
    for Bucket { below_ms, closes } in buckets.iter().filter(|bucket| bucket.closes > 0) {
        let below = below_ms.map_or_else(|| "later".to_owned(), |ms| format!("below {}", words(ms)));
        to.indented(format!("      {below:<14} {closes:>9}"));
    }
    let late = (0..).zip(hours).filter(|(_, hour)| hour.late > 0).map(|(at, hour)| format!(" {at}h {},", hour.late));
    let late: String = late.collect();
    if !late.is_empty() {
        to.line(format!("more than a minute late, by hour of the day ({zone}):{}", late.trim_end_matches(',')));
    }
}
