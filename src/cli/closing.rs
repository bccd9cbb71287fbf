//! `order-timeout closing list | retry | settle`: orders that a payment provider's answers could not decide.

use anyhow::bail;
use clap::{Args, Subcommand, ValueEnum};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::OrderId;
use serde_json::json;
use uuid::Uuid;

use crate::cli::operator::OperatorArgs;
use crate::cli::{CommandOutcome, ListOptions, OfKind, UsageError, connect};
use crate::config::Settings;
use crate::operations::orders_statements;
use crate::operations::unresolved::{self, Decision, UnresolvedOrder};
use crate::postgres::Database;
use crate::postgres::selection::Selection;

/// What to do with orders that are being closed.
#[derive(Debug, Subcommand)]
pub enum ClosingCommand {
    /// Show orders that the provider's answers could not decide, oldest first: they keep their stock
    List(ListArgs),
    /// Have their providers asked again, as if they had just fallen due
    Retry(RetryArgs),
    /// End one as closed or as paid, as you have found out at its provider
    Settle(SettleArgs),
}

/// Arguments of `closing list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Only those after this one: the last order of the previous page
    #[arg(long, value_name = "ID")]
    after: Option<String>,
    #[command(flatten)]
    options: ListOptions,
}

/// Arguments of `closing retry`.
#[derive(Debug, Args)]
pub struct RetryArgs {
    #[command(flatten)]
    which: Given,
    #[command(flatten)]
    operator: OperatorArgs,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Arguments of `closing settle`.
#[derive(Debug, Args)]
pub struct SettleArgs {
    /// The order that `closing list` shows
    #[arg(value_name = "ID")]
    id: String,
    /// closed: no attempt was paid, and none can be paid any more; paid: its provider has the money
    #[arg(long = "as", value_name = "END")]
    end: End,
    /// With --as paid: the attempt that was paid, if there are several
    #[arg(long, value_name = "REFERENCE")]
    reference: Option<String>,
    #[command(flatten)]
    of: OfKind,
    #[command(flatten)]
    operator: OperatorArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum End {
    Closed,
    Paid,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Given {
    /// The orders that `closing list` shows
    #[arg(value_name = "ID")]
    ids: Vec<String>,
    /// All of this reason, such as no_answer
    #[arg(long, value_name = "REASON")]
    reason: Option<String>,
    /// All of them
    #[arg(long)]
    all: bool,
}

/// # Errors
/// If the database cannot be used. Exit code 1 also if an order was not unresolved.
pub async fn run(command: ClosingCommand, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let database = connect(&settings, 1).await?;
    match command {
        ClosingCommand::List(args) => list(&database, &args).await,
        ClosingCommand::Retry(args) => retry(&database, &args).await,
        ClosingCommand::Settle(args) => settle(&database, &settings, &args).await,
    }
}

async fn list(database: &Database, args: &ListArgs) -> anyhow::Result<CommandOutcome> {
    let after = args.after.as_ref().map(OrderId::new).transpose()?;
    let found = unresolved::list(database, after.as_ref(), args.options.limit).await?;
    args.options.show(&found, "no order is unresolved", |orders, to| {
        for UnresolvedOrder { order_id, kind, reason, unresolved_at, answers, .. } in orders {
            let answers = answers.as_deref().unwrap_or("nothing was answered");
            let of_kind = if kind == Kind::ORDER.as_str() { String::new() } else { format!(" of kind {kind}") };
            to.line(format!("{order_id}{of_kind}: {reason} since {unresolved_at}: {answers}"));
        }
    })
}

async fn settle(database: &Database, settings: &Settings, args: &SettleArgs) -> anyhow::Result<CommandOutcome> {
    let id = OrderId::new(&args.id)?;
    let reference = args.reference.as_deref();
    let (decision, word) = match args.end {
        End::Closed if reference.is_some() => return Err(UsageError::of("--reference is for --as paid; leave it out")),
        End::Closed => (Decision::Closed, "closed"),
        End::Paid => (Decision::Paid { reference }, "paid"),
    };
    let operator = args.operator.operator(Uuid::now_v7());
    if operator.why.is_none() {
        return Err(UsageError::of("say why with --why, for the history of the order"));
    }
    let of = orders_statements::claimed_kind(database, settings, &args.of.kind).await?;
    unresolved::decide(database, &of, &id, decision, &operator).await?;
    let mut output = CommandOutcome::default();
    output.line(format!("{id}: {word}"));
    Ok(output)
}

async fn retry(database: &Database, args: &RetryArgs) -> anyhow::Result<CommandOutcome> {
    let ids = args.which.ids.iter().map(OrderId::new).collect::<Result<Vec<_>, _>>()?;
    let which = match &args.which.reason {
        Some(reason) => Selection::Reason(reason.clone()),
        None if args.which.all => Selection::All,
        None => Selection::Ids(ids.clone()),
    };
    let retried = unresolved::retry(database, &which, &args.operator.operator(Uuid::now_v7())).await?;
    let mut output = CommandOutcome::default();
    if args.json {
        output.line(json!({ "retried": retried.len() }));
    } else {
        output.line(format!("{} orders are asked about again", retried.len()));
    }
    for id in ids.iter().filter(|id| !retried.iter().any(|one| one == id.as_str())) {
        output.code = 1;
        output.remark(format!("order {id} is not unresolved; `order-timeout explain {id}` says what it is"));
    }
    if args.which.reason.is_some() && retried.is_empty() {
        bail!("no order is unresolved for this reason; `order-timeout closing list` shows the reasons");
    }
    Ok(output)
}
