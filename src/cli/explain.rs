//! `order-timeout explain`: one order's story in time, why it is still open, and what to do; as text or JSON.

use clap::Args;
use order_timeout_core::order::OrderId;

use crate::cli::{CommandOutcome, OfKind, connect};
use crate::config::Settings;
use crate::operations::explain::{Explanation, Moment, explain};
use crate::operations::orders_table::OrdersTable;

/// Arguments of `explain`.
#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// The order's id, as the orders table has it
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    pub(super) of: OfKind,
    /// Print one JSON object; what is not known is left out, and listed in not_known
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the database cannot be used. Exit code 1 also if there is no such order.
pub async fn run(args: &ExplainArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let order_id = OrderId::new(&args.id)?;
    let database = connect(&settings, 1).await?;
    let kind = &args.of.kind;
    let orders = OrdersTable::open(database.clone(), &settings, kind).await?;
    let told = explain(&database, &orders, kind, &order_id).await?;
    let code = u8::from(told.story.exists == Some(false));
    Ok(CommandOutcome { code, ..CommandOutcome::of(&told, args.json, write_story) })
}

fn write_story(told: &Explanation, to: &mut CommandOutcome) {
    to.line(format!("order {}: {}", told.story.order_id, told.summary));
    if let Some(open) = &told.story.open {
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
    to.not_known(&told.story.not_known);
}
