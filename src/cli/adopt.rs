//! `order-timeout adopt`: proposes a mapping for an orders table of the shop's own, proves the configured one, or allows
//! a worker to close the orders that are overdue already.

use clap::Args;
use order_timeout_core::kind::Kind;
use serde_json::json;

use crate::cli::{CommandOutcome, OfKind};
use crate::config::Settings;
use crate::effects::sweep::Sweeper;
use crate::operations::adopt::check::{self, CheckReport};
use crate::operations::adopt::propose::{self, Proposal};
use crate::operations::adopt::{Finding, Level};
use crate::operations::{first_backlog, orders_statements};
use crate::postgres::{self, Database};

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
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl AdoptArgs {
    pub(super) fn is_proposal(&self) -> bool {
        !self.check && !self.accept_backlog
    }
}

/// # Errors
/// If the database cannot be used. Exit code 1 also if a check finds something wrong.
pub async fn run(args: AdoptArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let database = Database::connect(&settings.database, 2).await?;
    if args.check {
        postgres::require_migrated(&database).await?;
        let report = check::check(&database, &settings, &args.of.kind).await?;
        return Ok(show_check(&report, args.json));
    }
    if args.accept_backlog {
        postgres::require_migrated(&database).await?;
        return accept(&database, &settings, &args.of.kind, args.json).await;
    }
    let proposal = propose::propose(&database, &args.of.kind, args.table.as_deref()).await?;
    Ok(show_proposal(&proposal, &args.of.kind, args.json))
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

fn show_check(report: &CheckReport, json: bool) -> CommandOutcome {
    let mut outcome = CommandOutcome { code: u8::from(!report.is_right()), ..CommandOutcome::default() };
    if json {
        outcome.line(json!(report));
        return outcome;
    }
    for Finding { level, key, file, sentence } in &report.findings {
        let word = match level {
            Level::Wrong => "wrong",
            Level::Note => "note",
            Level::Proven => "proven",
        };
        let from = file.as_ref().map_or_else(String::new, |file| format!(" (from {file})"));
        outcome.line(format!("{word:<7} {key}{from}: {sentence}"));
    }
    outcome
}

fn show_proposal(proposal: &Proposal, kind: &Kind, json: bool) -> CommandOutcome {
    let mut outcome = CommandOutcome::default();
    if json {
        outcome.line(json!(proposal));
        return outcome;
    }
    let of_kind = if kind.is_default() { String::new() } else { format!(" --kind {kind}") };
    outcome.line(format!(
        "# A proposal for {}. Correct what is guessed, then run `order-timeout adopt{of_kind} --check`.",
        proposal.table
    ));
    if !proposal.others.is_empty() {
        outcome.line(format!("# Other tables that could be meant (--table): {}", proposal.others.join(", ")));
    }
    outcome.lines(&proposal.toml);
    outcome.line("");
    for statement in &proposal.ddl {
        let commented: Vec<String> = statement.lines().map(|line| format!("# {line}")).collect();
        outcome.lines(commented.join("\n"));
    }
    outcome
}
