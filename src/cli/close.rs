//! `order-timeout close`: closes orders by hand, through the worker's statement. It closes unpaid, overdue orders and
//! nothing else.

use std::collections::HashMap;

use clap::Args;
use order_timeout_core::order::{CloseResult, OrderId, Outcome};
use serde_json::json;
use uuid::Uuid;

use crate::cli::operator::OperatorArgs;
use crate::cli::{CommandOutcome, OfKind, connect};
use crate::config::Settings;
use crate::effects::close::Closer;
use crate::operations::close_orders::{EachClosed, close_each};
use crate::operations::{orders_statements, unresolved};
use crate::postgres::warm_connections::WarmConnections;

/// Arguments of `close`.
#[derive(Debug, Args)]
pub struct CloseArgs {
    /// The orders' ids, as the orders table has them
    #[arg(value_name = "ID", required = true)]
    ids: Vec<String>,
    #[command(flatten)]
    pub(super) of: OfKind,
    #[command(flatten)]
    operator: OperatorArgs,
    /// Close them even while closing is paused
    #[arg(long)]
    although_paused: bool,
    /// Print one JSON object per order
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the database cannot be used. Exit code 1 also if an order was not found or could not be closed.
pub async fn run(args: CloseArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let ids = args.ids.iter().map(OrderId::new).collect::<Result<Vec<_>, _>>()?;
    // The closer keeps one.
    let (database, kind) = (connect(&settings, 2).await?, &args.of.kind);
    let statements = orders_statements::statements(&database, &settings, kind).await?;
    orders_statements::require_attempts_are_asked_about(&database, kind, &statements.close).await?;
    let closer = Closer::prepare(WarmConnections::new(database), statements.close).await?;
    let operator = args.operator.operator(Uuid::now_v7());
    let unless_paused = (!args.although_paused).then_some(kind);
    let EachClosed { findings, tried, paused } = close_each(&closer, &ids, &operator, unless_paused).await;
    let mut output = CommandOutcome::default();
    let mut all_settled = true;
    for id in &ids[..tried] {
        let (word, mut why, mut settled) = describe(id, &findings);
        if [Outcome::Claimed, Outcome::Closing].iter().any(|one| word == one.as_str()) {
            let progress = unresolved::progress(closer.connections().database(), kind, id).await?;
            (why, settled) = (Some(progress.why), progress.goes_on);
        }
        all_settled &= settled;
        match why {
            Some(why) if args.json => output.line(json!({ "order_id": id, "outcome": word, "why": why })),
            None if args.json => output.line(json!({ "order_id": id, "outcome": word })),
            Some(why) => output.line(format!("{id}: {word}: {why}")),
            None => output.line(format!("{id}: {word}")),
        }
    }
    if let Some(paused) = paused {
        if tried == 0 {
            return Err(paused.into());
        }
        all_settled = false;
        let is_closed = |found: &CloseResult| matches!(found, Ok(found) if found.outcome == Outcome::Closed);
        let (closed, left) = (findings.values().filter(|found| is_closed(found)).count(), ids.len() - tried);
        match args.json {
            true => output.line(json!({ "stopped": paused.to_string(), "closed": closed, "left": left })),
            false => output.line(format!("stopped with {left} orders left and {closed} closed: {paused}")),
        }
    }
    output.code = u8::from(!all_settled);
    Ok(output)
}

/// The outcome in a word, the reason if it failed, and whether the order is settled: closed now or before, or paid.
fn describe(id: &OrderId, findings: &HashMap<OrderId, CloseResult>) -> (&'static str, Option<String>, bool) {
    match findings.get(id) {
        Some(Ok(found)) => {
            let settled = matches!(found.outcome, Outcome::Closed | Outcome::AlreadyClosed | Outcome::Paid);
            (found.outcome.as_str(), None, settled)
        }
        Some(Err(fault)) => ("failed", Some(fault.to_string()), false),
        None => (Outcome::Unknown.as_str(), None, false),
    }
}
