//! `order-timeout late list | settle`: money that paid for nothing, and what becomes of it.

use anyhow::Context;
use clap::{Args, Subcommand};
use serde_json::json;
use uuid::Uuid;

use crate::cli::operator::OperatorArgs;
use crate::cli::{CommandOutcome, ListOptions, connect};
use crate::config::Settings;
use crate::operations::late_payments::{self, LatePayment, Refunded, ReopenError};
use crate::postgres::{Database, Operator};

/// What to do with late money.
#[derive(Debug, Subcommand)]
pub enum LateCommand {
    /// Show payments that paid for nothing and are not settled, oldest first
    List(ListArgs),
    /// Settle payments that paid for nothing: to be given back, or by reopening the closed order; each only once
    Settle(SettleArgs),
}

/// Arguments of `late list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Also those that are settled
    #[arg(long)]
    all: bool,
    /// Only those after this one: the last id of the previous page
    #[arg(long, value_name = "ID", default_value_t = 0, hide_default_value = true)]
    after: i64,
    #[command(flatten)]
    options: ListOptions,
}

/// Arguments of `late settle`.
#[derive(Debug, Args)]
#[command(after_help = "\
--refund-due gives no money back: it announces order.refund_due, on which your payment service does.

--reopen pays the closed order with the late money, if all that it had reserved can be taken again; otherwise nothing
is changed, and the sentence names what lacks.")]
pub struct SettleArgs {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    how: How,
    #[command(flatten)]
    operator: OperatorArgs,
    /// With --all: do it, instead of saying what would be done
    #[arg(long, requires = "all")]
    yes: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// The ids that `late list` shows
    #[arg(value_name = "ID")]
    ids: Vec<i64>,
    /// All that are open
    #[arg(long, requires = "refund_due")]
    all: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct How {
    /// They are to be given back
    #[arg(long, requires = "why")]
    refund_due: bool,
    /// Pay the closed order with it, and take its stock again
    #[arg(long, requires = "why")]
    reopen: bool,
}

/// # Errors
/// If the database cannot be used. Exit code 1 also if something could not be settled.
pub async fn run(command: LateCommand, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let database = connect(&settings, 1).await?;
    match command {
        LateCommand::List(args) => list_late(&database, &args).await,
        LateCommand::Settle(args) => {
            let operator = args.operator.operator(Uuid::now_v7());
            match args.how.reopen {
                true => reopen_orders(&database, &settings, &args, &operator).await,
                false => settle(&database, &args, &operator).await,
            }
        }
    }
}

async fn list_late(database: &Database, args: &ListArgs) -> anyhow::Result<CommandOutcome> {
    let page = late_payments::list(database, args.all, args.after, args.options.limit).await?;
    let none = if args.after > 0 { "no more late payments" } else { "no late payments" };
    args.options.show(&page, none, write_table)
}

fn write_table(rows: &[LatePayment], to: &mut CommandOutcome) {
    to.line(format!(
        "{:>6}  {:<36}  {:>16}  {:<14}  {:<10}  {:<27}  PROVIDER REFERENCE",
        "ID", "ORDER", "AMOUNT (minor)", "REASON", "STATE", "RECORDED"
    ));
    for late in rows {
        let amount = format!("{} {}", late.amount_minor, late.currency);
        let LatePayment { id, order_id, provider, reference, reason, state, recorded_at, .. } = late;
        to.line(format!(
            "{id:>6}  {order_id:<36}  {amount:>16}  {reason:<14}  {state:<10}  {recorded_at:<27}  {provider} {reference}"
        ));
    }
}

async fn reopen_orders(
    database: &Database,
    settings: &Settings,
    args: &SettleArgs,
    operator: &Operator,
) -> anyhow::Result<CommandOutcome> {
    let mut output = CommandOutcome::default();
    for id in &args.which.ids {
        match late_payments::reopen(database, settings, *id, operator).await {
            Ok(reopened) if args.json => output.line(json!({ "id": id, "outcome": "reopened", "order": reopened })),
            Ok(reopened) => output.line(format!("order {} is reopened and paid", reopened.order_id)),
            Err(error @ ReopenError::Database(_)) => return Err(error.into()),
            Err(why) => {
                output.code = 1;
                if args.json {
                    output.line(json!({ "id": id, "outcome": "refused", "why": why.to_string() }));
                } else {
                    output.line(why);
                }
            }
        }
    }
    Ok(output)
}

async fn settle(database: &Database, args: &SettleArgs, operator: &Operator) -> anyhow::Result<CommandOutcome> {
    let ids = if args.which.all { late_payments::open(database).await? } else { args.which.ids.clone() };
    let mut output = CommandOutcome::default();
    if args.which.all && !args.yes {
        let open = ids.len();
        output.line(match args.json {
            true => json!({ "open": open, "settled": [], "not_open": [] }).to_string(),
            false => format!("{open} payment(s) are open, nothing done; add --yes to settle them"),
        });
        return Ok(output);
    }
    // A given list is settled as a whole, or not at all.
    let at_once = if args.which.all { late_payments::MOST_AT_ONCE } else { ids.len().max(1) };
    let mut all = Refunded::default();
    for batch in ids.chunks(at_once) {
        let done = late_payments::refund_due(database, batch, operator).await;
        let done =
            done.with_context(|| format!("{} payment(s) are settled, and the rest is not", all.settled.len()))?;
        all.settled.extend(done.settled);
        all.not_open.extend(done.not_open);
    }
    // One of all that is settled by another session meanwhile is no fault of this command line.
    output.code = u8::from(!all.not_open.is_empty() && !args.which.all);
    if args.json {
        output.line(json!(all));
        return Ok(output);
    }
    output.line(format!("{} payment(s) are to be given back", all.settled.len()));
    for id in all.not_open {
        output.line(format!("late payment {id} is not open; `order-timeout late list --all` shows what became of it"));
    }
    Ok(output)
}
