//! `order-timeout setup`: migrations and topology, idempotent; or prints or checks them.

use anyhow::anyhow;
use clap::Args;
use order_timeout_amqp::connect;
use order_timeout_amqp::topology::Topology;
use serde_json::json;

use crate::cli::CommandOutcome;
use crate::config::Settings;
use crate::observe::inspect;
use crate::postgres::{self, Database, migrations, shop_settings, test_clock};

/// Arguments of `setup`.
#[derive(Debug, Args)]
pub struct SetupArgs {
    /// Make this empty database one for tests, whose clock `testing advance` moves; it stays one
    #[arg(long, conflicts_with_all = ["print_sql", "check"])]
    for_tests: bool,
    /// Print what was done as JSON
    #[arg(long)]
    json: bool,
    /// Print the SQL that would be run on the database, for a tool that runs your migrations, and run nothing
    #[arg(long, conflicts_with_all = ["json", "check"])]
    print_sql: bool,
    /// Change nothing, and name what is missing or differs on database and broker; exit code 1 if anything does
    #[arg(long, conflicts_with = "json")]
    check: bool,
}

/// Names what `setup` would create or change.
async fn check(settings: &Settings) -> anyhow::Result<CommandOutcome> {
    let mut differs = migrations::differences(&settings.database).await?;
    if differs.is_empty() {
        differs.extend(inspect::missing(settings).await?.into_iter().map(|problem| problem.what));
    }
    if settings.delay.strategy.needs_broker() {
        let connection = connect::connect(&settings.amqp, "setup").await?;
        let compared = settings.topology().compare(&connection).await;
        connect::close(&connection, settings.amqp.connect_timeout).await;
        differs.extend(compared?.faults.iter().map(ToString::to_string));
    }
    let mut answer = CommandOutcome { code: u8::from(!differs.is_empty()), ..CommandOutcome::default() };
    match differs.as_slice() {
        [] => answer.line("database and broker are as this version sets them up"),
        differs => {
            differs.iter().for_each(|what| answer.line(what));
            answer.line("run `order-timeout setup`, or what `order-timeout setup --print-sql` prints");
        }
    }
    Ok(answer)
}

/// Returns why the broker may not keep what was declared.
async fn declare(topology: &Topology, settings: &Settings) -> anyhow::Result<Option<String>> {
    let connection = connect::connect(&settings.amqp, "setup").await?;
    topology.declare(&connection).await?;
    let another = connect::require_another_connection(&settings.amqp, &connection).await;
    connect::close(&connection, settings.amqp.connect_timeout).await;
    another.map_err(|fault| anyhow!("all exchanges, queues and bindings are declared, but {fault}"))?;
    Ok(connect::server(&settings.amqp).await.ok().and_then(|server| server.why_unsuitable()))
}

/// # Errors
/// If the database or the broker cannot be reached or refuses, or the schema is incomplete.
pub async fn run(args: SetupArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    if args.print_sql {
        let mut answer = CommandOutcome::default();
        answer.lines(migrations::script(&settings.database).await?);
        return Ok(answer);
    }
    if args.check {
        return check(&settings).await;
    }
    if args.for_tests {
        test_clock::create(&settings.database).await?;
    }
    let applied = postgres::migrate(&settings.database).await?;
    // Objects of an applied migration may have been dropped since.
    let missing = inspect::missing(&settings).await?;
    if !missing.is_empty() {
        let mut refused = CommandOutcome { code: 1, ..CommandOutcome::default() };
        missing.iter().for_each(|problem| refused.problem(problem));
        return Ok(refused);
    }
    shop_settings::write(&Database::connect(&settings.database, 1).await?, &settings).await?;
    let topology = settings.delay.strategy.needs_broker().then(|| settings.topology());
    let mut notes: Vec<String> = settings.delay.strategy.deprecation().map(Into::into).into_iter().collect();
    if let Some(topology) = &topology {
        let declared = declare(topology, &settings).await;
        notes.extend(declared.map_err(|fault| anyhow!("{fault}; the database is set up"))?);
    }
    let mut answer = CommandOutcome::default();
    if args.json {
        answer.line(counts(&applied, topology.as_ref()));
        return Ok(answer);
    }
    let database = postgres::place(&settings.database)?;
    match applied.as_slice() {
        [] => answer.line(format!("database: {database}: up to date")),
        names => answer.line(format!("database: {database}: applied {}", names.join(", "))),
    }
    match &topology {
        Some(Topology { exchanges, queues, bindings, .. }) => answer.line(format!(
            "broker:   {}: declared {} exchanges, {} queues and {} bindings; any that already existed are unchanged (AMQP does not say which)",
            connect::place(&settings.amqp)?,
            exchanges.len(),
            queues.len(),
            bindings.len()
        )),
        None => answer.line("broker:   none, because delay.strategy is \"database\""),
    }
    notes.iter().for_each(|why| answer.line(format!("note:     {why}")));
    Ok(answer)
}

fn counts(applied: &[String], topology: Option<&Topology>) -> serde_json::Value {
    let count = |count: fn(&Topology) -> usize| topology.map_or(0, count);
    json!({
        "migrations_applied": applied,
        "exchanges": count(|topology| topology.exchanges.len()),
        "queues": count(|topology| topology.queues.len()),
        "bindings": count(|topology| topology.bindings.len()),
    })
}
