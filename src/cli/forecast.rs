//! `order-timeout forecast`: what falls due in the next hours, beside what can be closed; as text or JSON.

use std::time::Duration;

use clap::Args;
use serde_json::json;

use crate::cli::{CommandOutcome, OfKind, parse_duration, short_duration};
use crate::config::Settings;
use crate::operations::NotKnown;
use crate::operations::forecast::{Due, Forecast, ForecastMinute, Outlook, forecast};
use crate::operations::orders_table::OrdersTable;
use crate::postgres::{self, Database};

/// Lines of the table: more than that are summed up in equal parts of the time.
const MOST_LINES: u32 = 24;

/// Arguments of `forecast`.
#[derive(Debug, Args)]
pub struct ForecastArgs {
    #[command(flatten)]
    pub(super) of: OfKind,
    /// How far to look, 1m to 7d
    #[arg(long, value_name = "DURATION", default_value = "6h", value_parser = parse_duration)]
    next: Duration,
    /// Print one JSON object with each minute; what is not known is left out, and listed in not_known
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the database cannot be used.
pub async fn run(args: &ForecastArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let database = Database::connect(&settings.database, 1).await?;
    postgres::require_migrated(&database).await?;
    let orders = OrdersTable::open(database.clone(), &settings, &args.of.kind).await?;
    let found = forecast(&database, &orders, args.next).await?;
    let mut output = CommandOutcome::default();
    if args.json {
        output.line(json!(found));
    } else {
        write_forecast(&found, args.next, &mut output);
    }
    Ok(output)
}

fn write_forecast(found: &Forecast, reach: Duration, to: &mut CommandOutcome) {
    to.line(format!("due until {}: {}", found.until, due_in_words(&found.total)));
    if let Some(overdue) = found.overdue {
        to.line(format!("overdue already: {overdue}"));
    }
    if let Some(rate) = &found.can_close {
        to.line(format!("can close: {} a minute: {}", rate.per_minute, rate.why));
    }
    for pause in found.paused.iter().flatten() {
        to.line(format!("not closed: {}; what falls due stays open until it is resumed", pause.sentence()));
    }
    if let Some(outlook) = &found.outlook {
        to.line(outlook_in_words(outlook));
    }
    if !found.minutes.is_empty() {
        let minutes = u32::try_from(reach.as_secs() / 60).unwrap_or(u32::MAX).div_ceil(MOST_LINES).max(1);
        to.line(format!("{:<24}  {:>9}  {:>14}  {:>9}", "FROM", "DUE", "AT MOST A MIN", "UNITS"));
        for part in found.minutes.chunk_by(|one, next| one.number / minutes == next.number / minutes) {
            to.line(part_in_words(part));
        }
    }
    for NotKnown { what, why } in &found.not_known {
        to.line(format!("not known: {what}: {why}"));
    }
}

fn part_in_words(part: &[ForecastMinute]) -> String {
    let from = part.first().map_or("", |minute| minute.at.as_str());
    let orders: u64 = part.iter().map(|minute| minute.due.orders).sum();
    let most = part.iter().map(|minute| minute.due.orders).max().unwrap_or_default();
    let units: Option<i64> = part.iter().map(|minute| minute.due.units).sum();
    let units = units.map_or_else(|| "-".to_owned(), |units| units.to_string());
    format!("{from:<24}  {orders:>9}  {most:>14}  {units:>9}")
}

fn due_in_words(due: &Due) -> String {
    let mut words = vec![format!("{} orders", due.orders)];
    words.extend(due.money.iter().map(ToString::to_string));
    if !due.money.is_empty() && due.without_amount > 0 {
        words.push(format!("{} without an amount", due.without_amount));
    }
    words.extend(due.units.map(|units| format!("{units} units of stock")));
    words.join(", ")
}

fn outlook_in_words(outlook: &Outlook) -> String {
    match (&outlook.at, outlook.is_on_time) {
        (Some(at), false) => format!(
            "not on time: about {} orders wait at {at}, the last of them for {}",
            outlook.most_waiting,
            short_duration(Duration::from_secs(outlook.longest_wait_s))
        ),
        _ => "on time: each minute closes what falls due in it".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outlook_is_one_sentence() {
        let outlook = Outlook { is_on_time: false, most_waiting: 90, at: Some("T".into()), longest_wait_s: 75 };
        assert_eq!(outlook_in_words(&outlook), "not on time: about 90 orders wait at T, the last of them for 1m 15s");
        let on_time = Outlook { is_on_time: true, most_waiting: 0, at: None, longest_wait_s: 0 };
        assert!(outlook_in_words(&on_time).starts_with("on time"));
    }
}
