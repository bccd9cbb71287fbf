//! `order-timeout pending`: what falls due, as a table or JSON, page by page.

use std::time::Duration;

use clap::Args;
use order_timeout_core::order::Timestamp;
use serde_json::json;

use crate::cli::{CommandOutcome, OfKind, parse_duration, parse_time};
use crate::config::Settings;
use crate::operations::NotKnown;
use crate::operations::orders_table::OrdersTable;
use crate::operations::pending::{Pending, PendingOrder, PendingQuery, pending};
use crate::postgres::{self, Database};

/// Arguments of `pending`.
#[derive(Debug, Args)]
pub struct PendingArgs {
    #[command(flatten)]
    pub(super) of: OfKind,
    /// Deadlines within this time from the beginning of the window; 1h if --until is not given either
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, conflicts_with = "until")]
    next: Option<Duration>,
    /// The first deadline; now if it is not given. An earlier time shows overdue orders as well
    #[arg(long, value_name = "TIME", value_parser = parse_time, allow_hyphen_values = true)]
    from: Option<Timestamp>,
    /// The end of the window
    #[arg(long, value_name = "TIME", value_parser = parse_time, allow_hyphen_values = true)]
    until: Option<Timestamp>,
    /// Only orders with this in their id, or in the id of one of their articles
    #[arg(long, value_name = "TEXT")]
    text: Option<String>,
    /// Only those after this place: what the page before printed
    #[arg(long, value_name = "PLACE")]
    after: Option<String>,
    /// At most this many, 1 to 1000
    #[arg(long)]
    limit: Option<usize>,
    /// Print one JSON object; what is not known is left out, and listed in not_known
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the database cannot be used, or the question makes no sense.
pub async fn run(args: PendingArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let database = Database::connect(&settings.database, 1).await?;
    postgres::require_migrated(&database).await?;
    let orders = OrdersTable::open(database.clone(), &settings, &args.of.kind).await?;
    let from = match (args.from, args.next) {
        (None, Some(_)) => Some(orders.now().await.map_err(postgres::DatabaseError)?),
        (from, _) => from,
    };
    let until = args.until.or_else(|| Some(from? + args.next?));
    let query = PendingQuery { from, until, text: args.text, after: args.after, limit: args.limit };
    let page = pending(&orders, query.checked()?).await?;
    let mut output = CommandOutcome::default();
    if args.json {
        output.line(json!(page));
    } else {
        write_page(&page, &mut output);
    }
    Ok(output)
}

fn write_page(page: &Pending, to: &mut CommandOutcome) {
    if page.orders.is_empty() {
        to.line(format!("nothing found that falls due from {} until {}", page.from, page.until));
    } else {
        to.line(format!("{:<27}  {:<36}  {:>16}  {:>6}", "DEADLINE", "ORDER", "AMOUNT", "UNITS"));
    }
    for PendingOrder { order_id, deadline, money, units } in &page.orders {
        let money = money.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string);
        let units = units.map_or_else(|| "-".to_owned(), |units| units.to_string());
        to.line(format!("{deadline:<27}  {order_id:<36}  {money:>16}  {units:>6}"));
    }
    if let Some(next) = &page.next {
        let shown = page.orders.len();
        to.line(format!(
            "{shown} shown; there may be more: the same again, with --from {} --until {} --after {next}",
            page.from, page.until
        ));
    }
    for NotKnown { what, why } in &page.not_known {
        to.line(format!("not known: {what}: {why}"));
    }
}
