//! `order-timeout sql`: prints the statements in effect.

use clap::Args;

use crate::cli::{CommandOutcome, OfKind};
use crate::config::Settings;
use crate::operations::orders_statements::{self, StatementTexts};
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
    Ok(CommandOutcome::of(&texts, args.json, write_texts))
}

fn write_texts(texts: &StatementTexts, to: &mut CommandOutcome) {
    for (name, sql) in [("close", &texts.close), ("overdue", &texts.overdue)] {
        to.lines(format!("-- {name}\n{}\n;\n", sql.trim_end()));
    }
    for function in &texts.functions {
        to.lines(format!("-- created by adopt --install, or by setup for the default tables\n{function};\n"));
    }
}
