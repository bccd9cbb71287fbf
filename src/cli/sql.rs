//! `order-timeout sql`: prints the statements in effect.

use clap::Args;
use serde_json::json;

use crate::cli::{CommandOutcome, OfKind};
use crate::config::Settings;
use crate::operations::orders_statements;
use crate::postgres::Database;

/// Arguments of `sql`.
#[derive(Debug, Args)]
pub struct SqlArgs {
    #[command(flatten)]
    pub(super) of: OfKind,
    /// Print one JSON object with the statements
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the database cannot be used, or a statement cannot be prepared.
pub async fn run(args: SqlArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let database = Database::connect(&settings.database, 1).await?;
    let texts = orders_statements::texts(&database, &settings, &args.of.kind).await?;
    let mut outcome = CommandOutcome::default();
    if args.json {
        outcome.line(json!(texts));
        return Ok(outcome);
    }
    for (name, sql) in [("close", &texts.close), ("overdue", &texts.overdue)] {
        outcome.lines(format!("-- {name}\n{}\n;\n", sql.trim_end()));
    }
    match &texts.deadline {
        Some(sql) => outcome.lines(format!("-- deadline\n{}\n;", sql.trim_end())),
        None => outcome.line("-- deadline: it cannot be moved by a statement"),
    }
    Ok(outcome)
}
