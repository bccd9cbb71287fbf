//! Who closes orders without a broker: the simplest programs that do the same work, on sessions set up as the worker's.
//! Each runs as a process of its own (this program, called with `compete`), so that what it costs is its own.

mod look_ahead;
mod poller;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use order_timeout::Settings;
use order_timeout::config::DatabaseSettings;
use order_timeout::database::{Database, ErrorClass, classify};
use sqlx::PgPool;
use tokio::signal::unix::{SignalKind, signal};

use crate::bench_env::process::Program;

/// What [`Database`] calls its sessions in `pg_stat_activity`. Nobody else's are in a competitor's database.
const APPLICATION_NAME: &str = "order-timeout";

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

/// Runs until it is told to end, which is no failure then.
pub async fn run(competitor: Competitor) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        failed = compete(competitor) => failed,
        _ = terminate.recv() => Ok(()),
    }
}

async fn compete(competitor: Competitor) -> anyhow::Result<()> {
    let Competitor { kind, database, connections, every } = competitor;
    // As the worker and the limits: a plan that is kept, or an index that is used, is no merit of a design.
    let settings = DatabaseSettings { url: database.into(), ..Settings::defaults().database };
    // One more, for what is not closing.
    let database = Database::connect(&settings, connections + 1).await?;
    match kind {
        Kind::Poller => poller::run(database, connections, every).await,
        Kind::LookAhead => look_ahead::run(database, connections).await,
    }
}

/// Whether a time limit of the session, or a deadlock, has cut a close short. Then it is tried again at once: the worker,
/// whose limits these are, does not give up either.
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
