//! Load scenarios, each with its limits and its competitors measured in the same run:
//! `cargo bench --bench load -- SCENARIO [--orders N] [--strategy S] [--json]`.
//!
//! Everything runs on a private Postgres and a private RabbitMQ that are removed afterwards, and the program that
//! closes orders has its own process. Prints ratios, because machines differ. Judges no figure; but a lost order, or
//! one closed twice or early, ends it with exit code 1.

mod bench_env;
mod competitors;
mod controls;
mod limits;
mod measurement;
mod progress;
mod report;
mod scenarios;
mod scheduling;
mod transactions;
mod watching;

use std::process::ExitCode;
use std::time::Duration;

use bench_env::servers::Servers;
use clap::{Args, Parser, Subcommand, ValueEnum};
use competitors::Competitor;
use scenarios::{burst, flash_sale, flood, kinds, mixed, moved, outage, pending, provider, publish, shards, steady};
use tokio::signal::unix::{SignalKind, signal};

/// Load scenarios of order-timeout.
#[derive(Debug, Parser)]
struct Arguments {
    #[command(subcommand)]
    scenario: Scenario,
    #[command(flatten)]
    options: Options,
}

/// The strategy without a broker, for `burst` and `steady`.
pub const DATABASE: &str = "database";

/// The options of every scenario.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// How many orders, or how many bulk alarms; each scenario has its own default
    #[arg(long, global = true)]
    orders: Option<usize>,
    /// How alarms are delayed
    #[arg(long, global = true, default_value = "dead-letter", value_parser = ["dead-letter", "delayed-exchange", DATABASE])]
    strategy: String,
    /// Print one JSON line and nothing else on standard output
    #[arg(long, global = true)]
    json: bool,
    /// A setting of the worker that differs from the defaults, such as --set worker.closers=4. The broker's limit is
    /// measured with it too; Postgres and the competitors do not use it
    #[arg(long = "set", global = true, value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// A broker to use instead of a private one: newer, or with a plugin; it must have no other users
    #[arg(long, global = true, value_name = "URL")]
    amqp: Option<String>,
    /// Let worker and competitors connect to Postgres by its socket, like the limits, instead of TCP
    #[arg(long, global = true)]
    socket: bool,
    /// The worker alone, without limits and competitors: for analysis, not for comparison
    #[arg(long, global = true)]
    alone: bool,
    /// With the default tables as a mapping in a settings file, as a shop's own table is
    #[arg(long, global = true)]
    mapped: bool,
    /// For burst and steady: also with so many browsers that have the worker's page open
    #[arg(long, global = true, default_value_t = 0)]
    pages: usize,
    /// For burst and steady: also with a page open, the metrics scraped each five seconds, and traces
    #[arg(long, global = true)]
    everything: bool,
    /// cargo passes it to every bench
    #[arg(long, global = true, hide = true)]
    bench: bool,
}

#[derive(Debug, Subcommand)]
enum Scenario {
    /// Orders due at one instant, but for a lane also with delay.lead = 0, against pollers (20 000)
    Burst {
        #[arg(long = "route", value_enum, default_value = "wheel")]
        route: AlarmRoute,
    },
    /// The same with a single article, against a burst of many articles (20 000)
    Flash {
        #[arg(long = "route", value_enum, default_value = "wheel")]
        route: AlarmRoute,
    },
    /// A burst that the brake has foreseen, with paid orders in between and two workers (100 000)
    FlashSale,
    /// A constant rate of orders, all with one delay, against pollers
    Steady {
        /// Orders per second
        #[arg(long, default_value_t = 1_000)]
        rate: u32,
        /// For how long
        #[arg(long, default_value_t = 30)]
        seconds: u32,
        /// The one delay
        #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
        delay: Duration,
        #[arg(long = "route", value_enum, default_value = "lane")]
        route: AlarmRoute,
    },
    /// Random delays of 1 to 120 s behind long ones, against other designs for delaying (2 000)
    Mixed,
    /// Deadlines moved later three times and then earlier than the first (1 000)
    Moved,
    /// The broker is stopped while orders fall due
    Outage {
        /// Orders per second
        #[arg(long, default_value_t = 500)]
        rate: u32,
        /// How long it is stopped
        #[arg(long, default_value_t = 120)]
        seconds: u32,
    },
    /// Two kinds beside one that fails, one that is locked and one that is flooded
    Kinds {
        /// Orders of the flooded kind
        #[arg(long, default_value_t = 50_000)]
        flood: usize,
    },
    /// A payment provider is asked about each order that falls due
    Provider {
        /// Orders per second
        #[arg(long, default_value_t = 500)]
        rate: u32,
        /// For how long
        #[arg(long, default_value_t = 30)]
        seconds: u32,
        /// How long the provider takes for each call
        #[arg(long, default_value_t = 50)]
        answer_ms: u64,
        /// So many more orders fall due together after a second, and the provider fails each call about them
        #[arg(long, default_value_t = 0)]
        failing: u32,
        /// The settings also name a provider with one request a second, which no order uses
        #[arg(long)]
        idle_provider: bool,
    },
    /// How fast alarms are scheduled, against a bare client that publishes the same (50 000)
    Publish,
    /// Memory per pending alarm, and what an idle broker costs (200 000)
    Pending,
    /// The burst with one processing queue and with more (20 000)
    Shards,
    /// 200 good orders a second beside a flood by a publisher with publish rights only
    Flood {
        #[arg(long, value_enum, default_value = "unknown")]
        sort: flood::Sort,
    },
    /// What this program starts in a separate process
    #[command(hide = true)]
    Compete {
        #[command(flatten)]
        competitor: Competitor,
    },
}

/// The queues in which an alarm waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AlarmRoute {
    /// Its delay is a standard delay: one of the queues of its lane, for what is published within a second and a half
    Lane,
    /// Its delay is any other: the inbox, then a slot of the wheel
    Wheel,
    /// Its delay is longer than the wheel's finest ring: the inbox, a slot of the next ring, and both again
    Far,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    if matches!(arguments.scenario, Scenario::Compete { .. }) {
        // As in the worker, where it is faster and cheaper (docs/decisions/0013-one-thread.md).
        runtime.worker_threads(1);
    }
    let runtime = runtime.enable_all().build().expect("a runtime can start where this program could");
    match runtime.block_on(run(arguments)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without a backtrace: the error is a sentence for the user.
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(Arguments { scenario, options }: Arguments) -> anyhow::Result<()> {
    if let Scenario::Compete { competitor } = scenario {
        return competitors::run(competitor).await;
    }
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    progress::say("starting a private broker and a private database");
    let servers = Servers::start(&options)?;
    // On a signal it returns instead of dying, so that the private servers are removed.
    tokio::select! {
        outcome = run_scenario(scenario, &servers, &options) => outcome,
        _ = interrupt.recv() => anyhow::bail!("interrupted"),
        _ = terminate.recv() => anyhow::bail!("terminated"),
    }
}

async fn run_scenario(scenario: Scenario, servers: &Servers, options: &Options) -> anyhow::Result<()> {
    progress::say("the servers answer");
    if options.strategy == DATABASE && !matches!(scenario, Scenario::Burst { .. } | Scenario::Steady { .. }) {
        anyhow::bail!("--strategy database is measured by burst and steady; the other scenarios are about alarms");
    }
    let is_watched = watching::Watch::of(options).is_some();
    if is_watched && !matches!(scenario, Scenario::Burst { .. } | Scenario::Steady { .. }) {
        anyhow::bail!("--pages and --everything are measured by burst and steady");
    }
    let orders = |default| options.orders.unwrap_or(default);
    match scenario {
        Scenario::Burst { route } => burst::burst(servers, options, orders(20_000), route).await,
        Scenario::Flash { route } => burst::flash(servers, options, orders(20_000), route).await,
        Scenario::FlashSale => flash_sale::run(servers, options, orders(100_000)).await,
        Scenario::Provider { rate, seconds, answer_ms, failing, idle_provider } => {
            let answer = Duration::from_millis(answer_ms);
            provider::run(servers, options, provider::Load { rate, seconds, answer, failing, idle_provider }).await
        }
        Scenario::Steady { rate, seconds, delay, route } => {
            steady::run(servers, options, steady::Load { rate, seconds, delay, route }).await
        }
        Scenario::Mixed => mixed::run(servers, options, orders(2_000)).await,
        Scenario::Moved => moved::run(servers, options, orders(1_000)).await,
        Scenario::Outage { rate, seconds } => outage::run(servers, options, rate, seconds).await,
        Scenario::Kinds { flood } => kinds::run(servers, options, flood).await,
        Scenario::Publish => publish::run(servers, options, orders(50_000)).await,
        Scenario::Pending => pending::run(servers, options, orders(200_000)).await,
        Scenario::Shards => shards::run(servers, options, orders(20_000)).await,
        Scenario::Flood { sort } => flood::run(servers, options, sort).await,
        Scenario::Compete { .. } => unreachable!("handled before any server is started"),
    }
}
