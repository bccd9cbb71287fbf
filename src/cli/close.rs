//! `order-timeout close`: closes orders by hand, through the worker's statement. It closes unpaid, overdue orders and
//! nothing else: those with these ids, or those that a condition chooses.

use std::collections::HashMap;

use clap::Args;
use order_timeout_core::kind::Kind;
use order_timeout_core::order::{CloseResult, OrderId, Outcome};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::cli::bulk::{self, Bulk, BulkArgs};
use crate::cli::operator::OperatorArgs;
use crate::cli::{CommandOutcome, OfKind, UsageError};
use crate::config::Settings;
use crate::effects::close::Closer;
use crate::operations::close_orders::{EachClosed, close_each, close_each_unless_paused, close_many};
use crate::operations::orders_table::{Choice, OrdersTable};
use crate::operations::paced::Progress;
use crate::operations::pause_closing::{self, PauseError};
use crate::operations::preview::Preview;
use crate::operations::{orders_statements, unresolved};
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{self, Database};

/// Arguments of `close`.
#[derive(Debug, Args)]
#[command(after_help = "\
--where takes a condition on the columns of the table orders:

  order-timeout close --where \"channel = 'app'\" --why 'promotion ended' --yes

It shows what it chooses and asks before it closes, at --rate orders a second. Orders that are not due yet are counted
as not_due and stay open. Ctrl-C ends it after the current batch; run it again for the rest.")]
pub struct CloseArgs {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    pub(super) of: OfKind,
    #[command(flatten)]
    operator: OperatorArgs,
    #[command(flatten)]
    bulk: BulkArgs,
    /// Close them even while closing is paused
    #[arg(long)]
    although_paused: bool,
    /// Print one JSON object per order; with --where one in all
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// The orders' ids, as the orders table has them
    #[arg(value_name = "ID")]
    ids: Vec<String>,
    /// All overdue orders for which this condition holds
    #[arg(long = "where", value_name = "SQL", requires = "why")]
    condition: Option<String>,
}

/// # Errors
/// If the database cannot be used. Exit code 1 also if an order was not found or could not be closed.
pub async fn run(args: CloseArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    match &args.which.condition {
        Some(condition) => close_chosen(condition, &args, &settings).await,
        None => close_named(&args, &settings).await,
    }
}

async fn close_named(args: &CloseArgs, settings: &Settings) -> anyhow::Result<CommandOutcome> {
    let ids = args.which.ids.iter().map(OrderId::new).collect::<Result<Vec<_>, _>>()?;
    // The closer keeps one.
    let database = Database::connect(&settings.database, 2).await?;
    postgres::require_migrated(&database).await?;
    refuse_while_paused(&database, args).await?;
    let closer = closer_of(database, settings, &args.of.kind).await?;
    let operator = args.operator.operator(Uuid::now_v7());
    let EachClosed { findings, tried, paused } = match args.although_paused {
        true => EachClosed { findings: close_each(&closer, &ids, &operator).await, tried: ids.len(), paused: None },
        false => close_each_unless_paused(&closer, &ids, &operator, &args.of.kind).await,
    };
    let mut output = CommandOutcome::default();
    let mut all_settled = true;
    for id in &ids[..tried] {
        let (word, mut why, mut settled) = describe(id, &findings);
        if [Outcome::Claimed, Outcome::Closing].iter().any(|one| word == one.as_str()) {
            let progress = unresolved::progress(closer.connections().database(), id).await;
            let progress = progress.map_err(|error| unresolved::unavailable(&error))?;
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

async fn refuse_while_paused(database: &Database, args: &CloseArgs) -> Result<(), PauseError> {
    if args.although_paused {
        return Ok(());
    }
    pause_closing::refuse_while_paused(database, &args.of.kind).await
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

async fn close_chosen(condition: &str, args: &CloseArgs, settings: &Settings) -> anyhow::Result<CommandOutcome> {
    if !settings.has_default_orders(&args.of.kind) {
        return Err(UsageError::of(
            "--where chooses from the default orders table, and the settings name another: SELECT the ids yourself, and give them to `order-timeout close ID…`",
        ));
    }
    let database = bulk::connect(&settings.database).await?;
    refuse_while_paused(&database, args).await?;
    let table = OrdersTable::open(database.clone(), settings, &args.of.kind).await?;
    let choice = Choice { condition: condition.to_owned(), amount: args.bulk.amount.clone(), not_changed_by: None };
    let chosen = table.choose(&choice).await?;
    let overdue: Vec<OrderId> =
        chosen.orders.iter().filter(|order| order.is_overdue(chosen.now)).map(|order| order.id.clone()).collect();
    let not_due = chosen.orders.len() - overdue.len();
    let bulk = Bulk {
        args: &args.bulk,
        run: Uuid::now_v7(),
        what: format!("close {} overdue orders", overdue.len()),
        preview: Preview::of(&chosen, |_| None),
        json: args.json,
    };
    if overdue.is_empty() {
        return Ok(bulk.nothing(&with_not_due(Progress::default(), not_due), "none of them is overdue"));
    }
    bulk.ask()?;
    let closer = closer_of(database, settings, &args.of.kind).await?;
    let (operator, stop) = (args.operator.operator(bulk.run), CancellationToken::new());
    let unless_paused = (!args.although_paused).then_some(&args.of.kind);
    let work = close_many(&closer, &overdue, &operator, bulk.rate(), unless_paused, &stop, bulk.shows_progress());
    let progress = with_not_due(Bulk::until_stopped(&stop, work).await?, not_due);
    Ok(bulk.report(&progress, "run the same command again to close the rest"))
}

async fn closer_of(database: Database, settings: &Settings, kind: &Kind) -> anyhow::Result<Closer> {
    let statements = orders_statements::statements(&database, settings, kind).await?;
    orders_statements::require_attempts_are_asked_about(&database, kind, &statements.close).await?;
    Ok(Closer::prepare(WarmConnections::new(database), statements.close).await?)
}

/// The statement would answer the same for orders that were not due when they were chosen.
fn with_not_due(mut progress: Progress, not_due: usize) -> Progress {
    if not_due > 0 {
        *progress.outcomes.entry(Outcome::NotDue.as_str()).or_default() += not_due;
    }
    progress
}
