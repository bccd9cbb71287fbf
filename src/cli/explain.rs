//! `order-timeout explain`: one order's story in time, why it is still open, and what to do; as text or JSON.

use clap::Args;
use order_timeout_core::order::OrderId;
use serde_json::json;

use crate::cli::{CommandOutcome, OfKind, Order};
use crate::config::Settings;
use crate::operations::NotKnown;
use crate::operations::explain::{Explanation, Moment, explain};
use crate::operations::orders_table::OrdersTable;
use crate::postgres::{self, Database, DatabaseError, one_line};

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
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
pub async fn run(args: &ExplainArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let order_id = OrderId::new(args.order.id())?;
    let database = Database::connect(&settings.database, 1).await?;
    postgres::require_migrated(&database).await?;
    let kind = &args.of.kind;
    let orders = OrdersTable::open(database.clone(), &settings, kind).await?;
    let told = explain(&database, &orders, kind, &order_id).await.map_err(|error| DatabaseError(one_line(&error)))?;
    let mut output = CommandOutcome { code: u8::from(told.story.exists == Some(false)), ..CommandOutcome::default() };
    if args.json {
        output.line(json!(told));
    } else {
        write_story(&told, &mut output);
    }
    Ok(output)
}

fn write_story(told: &Explanation, to: &mut CommandOutcome) {
    to.line(format!("order {}: {}", told.story.order_id, told.summary));
    if let Some(open) = &told.open {
        to.line(format!("open because {}", open.because));
        to.line(format!("what to do: {}", open.what_to_do));
    }
    let mut now_is_shown = false;
    for Moment { at, source, what } in &told.moments {
        if !now_is_shown && at.as_str() > told.story.at.as_str() {
            to.indented(format!("{:<27}  {:<17}  now", told.story.at, ""));
            now_is_shown = true;
        }
        // Text from outside is escaped line by line.
        to.indented(format!("{at:<27}  {:<17}  {what}", source.table()));
    }
    for NotKnown { what, why } in &told.story.not_known {
        to.line(format!("not known: {what}: {why}"));
    }
}
