//! `order-timeout late list | settle`: money that paid for nothing, and what becomes of it.

use order_timeout_core::kind::Kind;
use std::num::NonZeroU32;

use clap::{Args, Subcommand};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::cli::operator::OperatorArgs;
use crate::cli::signals::Signals;
use crate::cli::{CommandOutcome, UsageError};
use crate::config::Settings;
use crate::operations::late_payments::{
    LatePage, LatePayment, SettledAll, list, refund_all_due, refund_due, reopen, unavailable,
};
use crate::postgres::{self, Database, Operator};

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
    /// At most this many
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(i64).range(1..=100_000))]
    limit: i64,
    /// Only those after this one: the last id of the previous page
    #[arg(long, value_name = "ID", default_value_t = 0, hide_default_value = true)]
    after: i64,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
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
    /// With --all: at most this many a second
    #[arg(long, value_name = "PAYMENTS", default_value = "200", requires = "all")]
    rate: NonZeroU32,
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
    if let LateCommand::Settle(SettleArgs { how: How { reopen: true, .. }, .. }) = &command
        && !settings.has_default_orders(&Kind::ORDER)
    {
        return Err(UsageError::of(
            "only orders of the default table can be reopened, and the settings name another: what your order needs to be open again is not known here; settle the payment with --refund-due, or reopen the order yourself",
        ));
    }
    let database = Database::connect(&settings.database, 1).await?;
    postgres::require_migrated(&database).await?;
    match command {
        LateCommand::List(args) => list_late(&database, &args).await,
        LateCommand::Settle(args) => {
            let operator = args.operator.operator(Uuid::now_v7());
            match (&args.how, args.which.all) {
                (How { reopen: true, .. }, _) => reopen_orders(&database, &args, &operator).await,
                (_, true) => settle_all(&database, &args, &operator).await,
                (_, false) => settle_given(&database, &args, &operator).await,
            }
        }
    }
}

async fn list_late(database: &Database, args: &ListArgs) -> anyhow::Result<CommandOutcome> {
    let page = LatePage { with_settled: args.all, after: args.after, limit: args.limit };
    let rows = list(database, &page).await.map_err(unavailable)?;
    let mut output = CommandOutcome::default();
    if args.json {
        for row in &rows {
            output.line(serde_json::to_string(row)?);
        }
        return Ok(output);
    }
    if rows.is_empty() {
        output.line(if args.after > 0 { "no more late payments" } else { "no late payments" });
        return Ok(output);
    }
    write_table(&rows, &mut output);
    if let Some(last) = rows.last().filter(|_| i64::try_from(rows.len()).is_ok_and(|shown| shown >= args.limit)) {
        output.line(format!("there may be more; the next: add --after {}", last.id));
    }
    Ok(output)
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

async fn reopen_orders(database: &Database, args: &SettleArgs, operator: &Operator) -> anyhow::Result<CommandOutcome> {
    let mut output = CommandOutcome::default();
    for id in &args.which.ids {
        match reopen(database, *id, operator).await.map_err(unavailable)? {
            Ok(reopened) if args.json => output.line(json!({ "id": id, "outcome": "reopened", "order": reopened })),
            Ok(reopened) => output.line(format!("order {} is reopened and paid", reopened.order_id)),
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

async fn settle_given(database: &Database, args: &SettleArgs, operator: &Operator) -> anyhow::Result<CommandOutcome> {
    let settled = refund_due(database, &args.which.ids, operator).await.map_err(unavailable)?;
    let others: Vec<i64> = args.which.ids.iter().filter(|id| !settled.contains(id)).copied().collect();
    let mut output = CommandOutcome { code: u8::from(!others.is_empty()), ..CommandOutcome::default() };
    if args.json {
        output.line(json!({ "settled": settled, "not_open": others }));
        return Ok(output);
    }
    output.line(format!("{} payment(s) are to be given back", settled.len()));
    for id in others {
        output.line(format!("late payment {id} is not open; `order-timeout late list --all` shows what became of it"));
    }
    Ok(output)
}

async fn settle_all(database: &Database, args: &SettleArgs, operator: &Operator) -> anyhow::Result<CommandOutcome> {
    let mut output = CommandOutcome::default();
    if !args.yes {
        let page = LatePage { with_settled: false, after: 0, limit: i64::MAX };
        let open = list(database, &page).await.map_err(unavailable)?.len();
        if args.json {
            output.line(json!({ "open": open, "settled": 0 }));
        } else {
            output.line(format!("{open} payment(s) are open, nothing done; add --yes to settle them"));
        }
        return Ok(output);
    }
    let stop = CancellationToken::new();
    let mut signals = Signals::listen()?;
    let mut work = std::pin::pin!(refund_all_due(database, operator, args.rate, &stop));
    let done = tokio::select! {
        done = &mut work => done,
        () = signals.next() => {
            stop.cancel();
            work.await
        }
    };
    let SettledAll { settled, interrupted } = done.map_err(unavailable)?;
    output.code = u8::from(interrupted);
    if args.json {
        output.line(json!({ "settled": settled, "interrupted": interrupted }));
    } else {
        let rest = if interrupted { "; interrupted: run the same command again for the rest" } else { "" };
        output.line(format!("{settled} payment(s) are to be given back{rest}"));
    }
    Ok(output)
}
