//! `order-timeout adopt`: proposes a mapping for an orders table of the shop's own, proves the configured one, or allows
//! a worker to close the orders that are overdue already.

use anyhow::bail;
use clap::Args;
use order_timeout_core::kind::Kind;
use serde_json::json;

use crate::cli::{CommandOutcome, OfKind, connect};
use crate::config::Settings;
use crate::effects::sweep::Sweeper;
use crate::operations::adopt::check::{self, CheckReport};
use crate::operations::adopt::propose::{self, Proposal};
use crate::operations::adopt::{Finding, Level};
use crate::operations::{first_backlog, orders_statements};
use crate::postgres::{Database, kind_functions};

/// Arguments of `adopt`.
#[derive(Debug, Args)]
pub struct AdoptArgs {
    #[command(flatten)]
    pub(super) of: OfKind,
    /// The orders table, with its schema; without it the one that looks most like orders
    #[arg(long, value_name = "TABLE", conflicts_with_all = ["check", "accept_backlog"])]
    table: Option<String>,
    /// Prove the configured mapping on the live database, and change nothing
    #[arg(long, conflicts_with = "accept_backlog")]
    check: bool,
    /// Allow workers to close the orders that are overdue already, however many they are
    #[arg(long)]
    accept_backlog: bool,
    /// Create the functions that move deadlines, release orders and let payments pay them, as the mapping says: in the schema of
    /// our own tables, by its owner. `order-timeout sql` prints them
    #[arg(long, conflicts_with_all = ["table", "check", "accept_backlog"])]
    install: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl AdoptArgs {
    pub(super) fn is_proposal(&self) -> bool {
        !self.check && !self.accept_backlog && !self.install
    }
}

/// # Errors
/// If the database cannot be used. Exit code 1 also if a check finds something wrong.
pub async fn run(args: AdoptArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    if args.check {
        let report = check::check(&connect(&settings, 2).await?, &settings, &args.of.kind).await?;
        let code = u8::from(!report.is_right());
        return Ok(CommandOutcome { code, ..CommandOutcome::of(&report, args.json, write_check) });
    }
    if args.accept_backlog {
        return accept(&connect(&settings, 2).await?, &settings, &args.of.kind, args.json).await;
    }
    if args.install {
        return install(&connect(&settings, 2).await?, &settings, &args.of.kind, args.json).await;
    }
    let database = Database::connect(&settings.database, 2).await?;
    let proposal = propose::propose(&database, &args.of.kind, args.table.as_deref()).await?;
    Ok(CommandOutcome::of(&proposal, args.json, |proposal, to| write_proposal(proposal, &args.of.kind, to)))
}

async fn accept(database: &Database, settings: &Settings, kind: &Kind, json: bool) -> anyhow::Result<CommandOutcome> {
    let statements = orders_statements::statements(database, settings, kind).await?;
    let sweeper = Sweeper::prepare(database.clone(), statements.overdue).await?;
    let orders = first_backlog::adoptable(&statements.orders, &statements.defined_by, &sweeper);
    let backlog = first_backlog::accept(database, &sweeper, &orders).await?;
    let mut outcome = CommandOutcome::default();
    if json {
        outcome.line(json!({ "orders": statements.orders, "backlog": backlog }));
    } else {
        outcome.line(format!(
            "{}: workers may close the {} orders that have been overdue for more than a minute",
            statements.orders, backlog.overdue
        ));
    }
    Ok(outcome)
}

async fn install(database: &Database, settings: &Settings, kind: &Kind, json: bool) -> anyhow::Result<CommandOutcome> {
    let functions = orders_statements::statements(database, settings, kind).await?.functions;
    if functions.is_empty() {
        bail!(
            "there is nothing to create, because [kinds.{kind}.table] is not given: `order-timeout setup` creates the functions of the default tables, and statements of your own have none"
        );
    }
    kind_functions::install(database, &functions).await?;
    let paid = if settings.claims_orders(kind) { ", and payment_received pays them" } else { "" };
    let names: Vec<String> = functions.into_iter().map(|function| function.name).collect();
    let mut outcome = CommandOutcome::default();
    if json {
        outcome.line(json!({ "functions": names }));
    } else {
        outcome.line(format!(
            "created {}: move_deadline and release work for orders of kind {kind} now{paid}; a service needs EXECUTE on them",
            names.join(", ")
        ));
    }
    Ok(outcome)
}

fn write_check(report: &CheckReport, to: &mut CommandOutcome) {
    for Finding { level, key, file, sentence } in &report.findings {
        let word = match level {
            Level::Wrong => "wrong",
            Level::Note => "note",
            Level::Proven => "proven",
        };
        let from = file.as_ref().map_or_else(String::new, |file| format!(" (from {file})"));
        to.line(format!("{word:<7} {key}{from}: {sentence}"));
    }
}

fn write_proposal(proposal: &Proposal, kind: &Kind, to: &mut CommandOutcome) {
    let of_kind = if kind.is_default() { String::new() } else { format!(" --kind {kind}") };
    to.line(format!(
        "# A proposal for {}. Correct what is guessed, then run `order-timeout adopt{of_kind} --check`.",
        proposal.table
    ));
    if !proposal.others.is_empty() {
        to.line(format!("# Other tables that could be meant (--table): {}", proposal.others.join(", ")));
    }
    to.lines(&proposal.toml);
    to.line("");
    for statement in &proposal.ddl {
        let commented: Vec<String> = statement.lines().map(|line| format!("# {line}")).collect();
        to.lines(commented.join("\n"));
    }
}
