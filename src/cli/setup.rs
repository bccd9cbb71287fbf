//! `order-timeout setup`: migrations and topology, idempotent.

use anyhow::anyhow;
use clap::Args;
use order_timeout_amqp::connect;
use order_timeout_amqp::topology::Topology;
use serde_json::json;

use crate::cli::CommandOutcome;
use crate::config::Settings;
use crate::observe::inspect;
use crate::postgres;

/// Arguments of `setup`.
#[derive(Debug, Args)]
pub struct SetupArgs {
    /// Print what was done as JSON
    #[arg(long)]
    json: bool,
}

async fn declare(topology: &Topology, settings: &Settings) -> anyhow::Result<()> {
    let connection = connect::connect(&settings.amqp, "setup").await?;
    topology.declare(&connection).await?;
    let another = connect::require_another_connection(&settings.amqp, &connection).await;
    connect::close(&connection, settings.amqp.connect_timeout).await;
    another.map_err(|fault| anyhow!("all exchanges, queues and bindings are declared, but {fault}"))
}

/// # Errors
/// If the database or the broker cannot be reached or refuses, or the schema is incomplete.
pub async fn run(args: SetupArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let applied = postgres::migrate(&settings.database).await?;
    // Objects of an applied migration may have been dropped since.
    inspect::require_complete(&settings).await?;
    let topology = settings.topology();
    let declared = declare(&topology, &settings).await;
    declared.map_err(|fault| anyhow!("{fault}; the database is set up"))?;
    let mut answer = CommandOutcome::default();
    if args.json {
        let counts = json!({
            "migrations_applied": applied,
            "exchanges": topology.exchanges.len(),
            "queues": topology.queues.len(),
            "bindings": topology.bindings.len(),
        });
        answer.line(counts);
        return Ok(answer);
    }
    let (database, broker) = (postgres::place(&settings.database)?, connect::place(&settings.amqp)?);
    match applied.as_slice() {
        [] => answer.line(format!("database: {database}: up to date")),
        names => answer.line(format!("database: {database}: applied {}", names.join(", "))),
    }
    answer.line(format!(
        "broker:   {broker}: declared {} exchanges, {} queues and {} bindings; any that already existed are unchanged (AMQP does not say which)",
        topology.exchanges.len(),
        topology.queues.len(),
        topology.bindings.len()
    ));
    Ok(answer)
}
