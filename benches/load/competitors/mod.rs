//! Who closes orders without a broker: the simplest programs that do the same work. Each runs as a process of its own
//! (this program, called with `compete`), so that what it costs is its own.

mod look_ahead;
mod poller;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use crate::stage::process::Program;

/// How it is told from others in `pg_stat_activity`.
const APPLICATION_NAME: &str = "competitor";
/// Orders closed by one statement, as the worker's default.
const BATCH_SIZE: usize = 500;

/// Which one, and how it is set up.
#[derive(Debug, Clone, Args)]
pub struct Competitor {
    #[arg(value_enum)]
    pub kind: Kind,
    #[arg(long)]
    pub database: String,
    /// Loops side by side, each with a connection
    #[arg(long)]
    pub connections: u32,
    /// How often a poller looks
    #[arg(long, default_value = "100ms", value_parser = humantime::parse_duration)]
    pub every: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    Poller,
    LookAhead,
}

/// Runs until the process is ended.
pub async fn run(competitor: Competitor) -> anyhow::Result<()> {
    let options: PgConnectOptions = competitor.database.parse()?;
    // One more, for what is not closing.
    let pool = PgPoolOptions::new()
        .min_connections(competitor.connections + 1)
        .max_connections(competitor.connections + 1)
        .connect_with(options.application_name(APPLICATION_NAME))
        .await?;
    match competitor.kind {
        Kind::Poller => poller::run(pool, competitor.connections, competitor.every).await,
        Kind::LookAhead => look_ahead::run(pool, competitor.connections).await,
    }
}

/// Starts one and waits until it is connected.
pub async fn start(competitor: &Competitor, log: &Path, pool: &PgPool) -> anyhow::Result<Program> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("compete").arg(competitor.kind.to_possible_value().expect("none is skipped").get_name());
    command.args(["--database", &competitor.database]);
    command.args(["--connections", &competitor.connections.to_string()]);
    command.args(["--every", &humantime::format_duration(competitor.every).to_string()]);
    let mut program = Program::start("a competitor", command, log)?;
    let began = tokio::time::Instant::now();
    while !is_connected(pool).await? {
        program.ensure_runs()?;
        ensure!(began.elapsed() < Duration::from_secs(10), "a competitor does not connect");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(program)
}

async fn is_connected(pool: &PgPool) -> anyhow::Result<bool> {
    let query = sqlx::query_scalar(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1 AND datname = current_database())",
    );
    Ok(query.bind(APPLICATION_NAME).fetch_one(pool).await?)
}
