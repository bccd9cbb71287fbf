//! `order-timeout forecast`: what falls due in the next hours, beside what can be closed, or which orders these are; as
//! text or JSON.

use std::time::Duration;

use clap::Args;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::Timestamp;

use crate::cli::{CommandOutcome, OfKind, connect, parse_duration, parse_time, short_duration};
use crate::config::Settings;
use crate::operations::forecast::{
    Due, DueOrders, Forecast, ForecastMinute, OrdersQuery, Outlook, USUAL_REACH, due_orders, forecast,
};
use crate::operations::orders_table::OrdersTable;
use crate::operations::orders_table::due::DueOrder;
use crate::operations::plain_text;
use crate::postgres::DatabaseError;

/// Lines of the table: more than that are summed up in equal parts of the time.
const MOST_LINES: u32 = 24;

/// Arguments of `forecast`.
#[derive(Debug, Args)]
pub struct ForecastArgs {
    #[command(flatten)]
    pub(super) of: OfKind,
    /// How far to look, 1m to 7d; 6h if it is not given
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    next: Option<Duration>,
    /// List the orders that fall due, by deadline, page by page, instead of counting them
    #[arg(long)]
    orders: bool,
    #[command(flatten)]
    which: WhichOrders,
    /// Print one JSON object; what is not known is left out, and listed in not_known
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct WhichOrders {
    /// With --orders: the first deadline; now if it is not given. An earlier time shows overdue orders as well
    #[arg(long, value_name = "TIME", value_parser = parse_time, allow_hyphen_values = true, requires = "orders")]
    from: Option<Timestamp>,
    /// With --orders: the end of the window
    #[arg(long, value_name = "TIME", value_parser = parse_time, allow_hyphen_values = true, requires = "orders",
          conflicts_with = "next")]
    until: Option<Timestamp>,
    /// With --orders: only those with this in their id, or in the id of one of their articles
    #[arg(long, value_name = "TEXT", value_parser = plain_text, requires = "orders")]
    text: Option<String>,
    /// With --orders: only those after this place: what the page before printed
    #[arg(long, value_name = "PLACE", requires = "orders")]
    after: Option<String>,
    /// With --orders: at most this many, 1 to 1000; 100 if it is not given
    #[arg(long, value_name = "ORDERS", value_parser = clap::value_parser!(u16).range(1..=1_000), requires = "orders")]
    limit: Option<u16>,
}

/// # Errors
/// If the database cannot be used, or the question makes no sense.
pub async fn run(args: ForecastArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let database = connect(&settings, 1).await?;
    let orders = OrdersTable::open(database.clone(), &settings, &args.of.kind).await?;
    if args.orders {
        return list(args, &orders).await;
    }
    let reach = args.next.unwrap_or(USUAL_REACH);
    let found = forecast(&database, &orders, reach).await?;
    Ok(CommandOutcome::of(&found, args.json, |found, to| write_forecast(found, reach, to)))
}

async fn list(args: ForecastArgs, orders: &OrdersTable) -> anyhow::Result<CommandOutcome> {
    let WhichOrders { from, until, text, after, limit } = args.which;
    let from = match (from, args.next) {
        (None, Some(_)) => Some(orders.now().await.map_err(DatabaseError)?),
        (from, _) => from,
    };
    let until = until.or_else(|| Some(from? + args.next?));
    let query = OrdersQuery { from, until, text, after, limit: limit.unwrap_or(100).into() };
    Ok(CommandOutcome::of(&due_orders(orders, query).await?, args.json, write_orders))
}

fn write_orders(page: &DueOrders, to: &mut CommandOutcome) {
    if page.orders.is_empty() {
        to.line(format!("nothing found that falls due from {} until {}", page.from, page.until));
    } else {
        to.line(format!("{:<27}  {:<36}  {:>16}  {:>6}", "DEADLINE", "ORDER", "AMOUNT", "UNITS"));
    }
    for DueOrder { order_id, deadline, money, units } in &page.orders {
        let money = money.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string);
        let units = units.map_or_else(|| "-".to_owned(), |units| units.to_string());
        // As text: an id of its own type is printed without padding.
        let (deadline, order_id) = (write_rfc3339(*deadline), order_id.as_str());
        to.line(format!("{deadline:<27}  {order_id:<36}  {money:>16}  {units:>6}"));
    }
    if let Some(next) = &page.next {
        let shown = page.orders.len();
        to.line(format!(
            "{shown} shown; there may be more: the same again, with --from {} --until {} --after {next}",
            page.from, page.until
        ));
    }
    to.not_known(&page.not_known);
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
    to.not_known(&found.not_known);
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
