//! `order-timeout close`: closes orders by hand, through the worker's statement. It closes unpaid orders that are overdue, or
//! released, and nothing else.

use std::collections::HashMap;

use anyhow::bail;
use clap::Args;
use order_timeout_core::order::{CloseResult, OrderId, Outcome};
use serde_json::json;
use uuid::Uuid;

use crate::cli::operator::OperatorArgs;
use crate::cli::{CommandOutcome, OfKind, connect};
use crate::config::Settings;
use crate::effects::close::Closer;
use crate::operations::close_orders::{self, EachClosed, close_each};
use crate::operations::{orders_statements, unresolved};
use crate::postgres::Database;
use crate::postgres::contract::StatementSource;
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
    /// Close them before their deadline, because no payment will come: never one with an attempt that may still bring money
    #[arg(long, requires = "why", conflicts_with = "although_paused")]
    before_deadline: bool,
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
    if args.before_deadline {
        if matches!(statements.close, StatementSource::File { .. }) {
            bail!(
                "orders of kind {kind} are closed by a statement of your own, which has no release; close the order in your own table"
            );
        }
        orders_statements::require_installed(&database, kind, &statements.functions).await?;
        return Ok(release(&args, &database, &ids).await);
    }
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
        write(&mut output, args.json, id, word, why);
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

async fn release(args: &CloseArgs, database: &Database, ids: &[OrderId]) -> CommandOutcome {
    let operator = args.operator.operator(Uuid::now_v7());
    let (mut output, settled) = (CommandOutcome::default(), SETTLED.map(Outcome::as_str));
    for id in ids {
        let (word, why) = match close_orders::release(database, &args.of.kind, id, &operator).await {
            Ok(word) => (word, None),
            Err(why) => ("failed".to_owned(), Some(why)),
        };
        output.code |= u8::from(!settled.contains(&&*word));
        write(&mut output, args.json, id, &word, why);
    }
    output
}

fn write(output: &mut CommandOutcome, json: bool, id: &OrderId, word: &str, why: Option<String>) {
    match why {
        Some(why) if json => output.line(json!({ "order_id": id, "outcome": word, "why": why })),
        None if json => output.line(json!({ "order_id": id, "outcome": word })),
        Some(why) => output.line(format!("{id}: {word}: {why}")),
        None => output.line(format!("{id}: {word}")),
    }
}

/// Closed now or before, or paid.
const SETTLED: [Outcome; 3] = [Outcome::Closed, Outcome::AlreadyClosed, Outcome::Paid];

/// The outcome in a word, the reason if it failed, and whether the order is settled.
fn describe(id: &OrderId, findings: &HashMap<OrderId, CloseResult>) -> (&'static str, Option<String>, bool) {
    match findings.get(id) {
        Some(Ok(found)) => (found.outcome.as_str(), None, SETTLED.contains(&found.outcome)),
        Some(Err(fault)) => ("failed", Some(fault.to_string()), false),
        None => (Outcome::Unknown.as_str(), None, false),
    }
}
