//! `order-timeout close`: closes orders by hand, through the worker's statement. It closes unpaid, overdue orders and
//! nothing else.

use std::collections::HashMap;

use clap::Args;
use order_timeout_core::order::{CloseResult, ClosedBy, OrderId, Outcome};
use serde_json::json;

use crate::cli::CommandOutcome;
use crate::config::Settings;
use crate::effects::close::Closer;
use crate::operations::orders_statements;
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{self, Database};

/// Arguments of `close`.
#[derive(Debug, Args)]
pub struct CloseArgs {
    /// The orders' ids, as the orders table has them
    #[arg(required = true, value_name = "ID")]
    ids: Vec<String>,
    /// Print one JSON object per order
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the database cannot be used. Exit code 1 also if an order was not found or could not be closed.
pub async fn run(args: CloseArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let ids = args.ids.iter().map(OrderId::new).collect::<Result<Vec<_>, _>>()?;
    let database = Database::connect(&settings.database, 1).await?;
    postgres::require_migrated(&database).await?;
    let statements = orders_statements::statements(&database, &settings).await?;
    let closer = Closer::prepare(WarmConnections::new(database), statements.close).await?;
    let mut findings = HashMap::new();
    // One by one: an order that cannot be closed must not prevent the others from being closed.
    for id in &ids {
        match closer.close(std::slice::from_ref(id), ClosedBy::Manual, true).await {
            Ok(found) => findings.extend(found),
            Err(fault) => drop(findings.insert(id.clone(), Err(fault))),
        }
    }
    let mut output = CommandOutcome::default();
    let mut all_settled = true;
    for id in &ids {
        let (word, why, settled) = describe(id, &findings);
        all_settled &= settled;
        match why {
            Some(why) if args.json => output.line(json!({ "order_id": id, "outcome": word, "why": why })),
            None if args.json => output.line(json!({ "order_id": id, "outcome": word })),
            Some(why) => output.line(format!("{id}: {word}: {why}")),
            None => output.line(format!("{id}: {word}")),
        }
    }
    output.code = u8::from(!all_settled);
    Ok(output)
}

/// The outcome in a word, the reason if it failed, and whether the order is settled: closed now or before, or paid.
fn describe(id: &OrderId, findings: &HashMap<OrderId, CloseResult>) -> (String, Option<String>, bool) {
    match findings.get(id) {
        Some(Ok(found)) => {
            let settled = matches!(found.outcome, Outcome::Closed | Outcome::AlreadyClosed | Outcome::Paid);
            let word = serde_json::to_value(found.outcome).expect("a word");
            (word.as_str().unwrap_or_default().to_owned(), None, settled)
        }
        Some(Err(fault)) => ("failed".to_owned(), Some(fault.to_string()), false),
        None => ("unknown".to_owned(), None, false),
    }
}
