//! Programs that close orders without a broker: the simplest ones that do the same work, on sessions set up like the
//! worker's. Each runs in its own process (this program, called with `compete`), so that its costs can be measured.

mod look_ahead;
mod poller;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use order_timeout::Settings;
use order_timeout::config::DatabaseSettings;
use order_timeout::postgres::{Database, ErrorClass, classify};
use sqlx::PgPool;
use tokio::signal::unix::{SignalKind, signal};

use crate::bench_env::process::Program;

/// The name that [`Database`] gives its sessions in `pg_stat_activity`. A competitor's database has no other sessions.
const APPLICATION_NAME: &str = "order-timeout";

/// Which competitor, and its settings.
#[derive(Debug, Clone, Args)]
pub struct Competitor {
    #[arg(value_enum)]
    pub kind: Kind,
    #[arg(long)]
    pub database: String,
    /// Number of concurrent loops, each with its own connection
    #[arg(long)]
    pub connections: u32,
    /// The polling interval
    #[arg(long, default_value = "100ms", value_parser = humantime::parse_duration)]
    pub every: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    Poller,
    LookAhead,
}

/// Runs until it is terminated, which is not an error.
pub async fn run(competitor: Competitor) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        failed = compete(competitor) => failed,
        _ = terminate.recv() => Ok(()),
    }
}

async fn compete(competitor: Competitor) -> anyhow::Result<()> {
    let Competitor { kind, database, connections, every } = competitor;
    // As for the worker and the limits: plan caching and index use must not distinguish the designs.
    let settings = DatabaseSettings { url: database.into(), ..Settings::defaults().database };
    // One more, for work other than closing.
    let database = Database::connect(&settings, connections + 1).await?;
    match kind {
        Kind::Poller => poller::run(database, connections, every).await,
        Kind::LookAhead => look_ahead::run(database, connections).await,
    }
}

/// Whether a time limit of the session, or a deadlock, has interrupted a close. It is retried at once then, as the
/// worker with the same limits does.
fn is_cut_short(error: &sqlx::Error) -> bool {
    matches!(classify(error), ErrorClass::Locked | ErrorClass::Transient)
}

/// Starts one and waits until its loops are connected.
pub async fn start(competitor: &Competitor, log: &Path, pool: &PgPool) -> anyhow::Result<Program> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("compete").arg(competitor.kind.to_possible_value().expect("none is skipped").get_name());
    command.args(["--database", &competitor.database]);
    command.args(["--connections", &competitor.connections.to_string()]);
    command.args(["--every", &humantime::format_duration(competitor.every).to_string()]);
    let mut program = Program::start("a competitor", command, log)?;
    let began = tokio::time::Instant::now();
    while connected(pool).await? < competitor.connections.into() {
        program.ensure_runs()?;
        ensure!(began.elapsed() < Duration::from_secs(10), "a competitor does not connect");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(program)
}

async fn connected(pool: &PgPool) -> anyhow::Result<i64> {
    let query = sqlx::query_scalar(
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND datname = current_database()",
    );
    Ok(query.bind(APPLICATION_NAME).fetch_one(pool).await?)
}
