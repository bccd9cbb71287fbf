//! Load scenarios, each with its limits measured in the same run: `cargo bench --bench load -- SCENARIO [--json]`.
//!
//! Prints ratios, because machines differ; takes broker and database from the usual settings and leaves nothing
//! behind. Decides nothing about passing: a person reads the figures.

mod crowd;
mod mixed;
mod publish;
mod stage;

use clap::{Parser, ValueEnum};
use crowd::Crowd;

/// Load scenarios of order-timeout.
#[derive(Debug, Parser)]
struct Arguments {
    #[arg(value_enum)]
    scenario: Scenario,
    /// How many orders, or how large the crowd; each scenario has its own default
    #[arg(long)]
    orders: Option<usize>,
    /// Print one JSON line and nothing else
    #[arg(long)]
    json: bool,
    /// cargo passes it to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Scenario {
    /// schedule_all and concurrent schedule against a bare lapin loop with the same confirm window
    Publish,
    /// Random delays of 2 to 90 s, with one of 10 minutes scheduled first
    Mixed,
    /// 200 good orders among alarms for orders that do not exist
    CrowdUnknown,
    /// 200 good orders among alarms for far deadlines
    CrowdFar,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    match arguments.scenario {
        Scenario::Publish => publish::run(arguments.orders.unwrap_or(50_000), arguments.json).await,
        Scenario::Mixed => mixed::run(arguments.orders.unwrap_or(200), arguments.json).await,
        Scenario::CrowdUnknown => crowd::run(Crowd::Unknown, arguments.orders.unwrap_or(20_000), arguments.json).await,
        Scenario::CrowdFar => crowd::run(Crowd::Far, arguments.orders.unwrap_or(50_000), arguments.json).await,
    }
}
