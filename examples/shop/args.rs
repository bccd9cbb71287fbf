//! The shop's command line.

use std::io::IsTerminal;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use order_timeout::Settings;
use order_timeout::config::LogSettings;
use order_timeout_core::delay::Strategy;

/// A shop that takes orders, gets some of them paid, watches the rest close on time, and checks the result.
///
/// Broker and database come from the usual settings (ORDER_TIMEOUT__AMQP__URL, ORDER_TIMEOUT__DATABASE__URL or
/// DATABASE_URL). It makes queues and a database of its own there and removes them at the end.
///
/// Exit codes: 0 all promises held, 1 one was broken or something failed, 2 wrong usage or settings.
#[derive(Debug, Parser)]
#[command(name = "shop", verbatim_doc_comment)]
pub struct Args {
    /// How many orders are created
    #[arg(long, value_name = "N", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub orders: u32,
    /// Over how many seconds they are created, evenly
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    seconds: u32,
    /// How alarms are delayed [default: what the settings say, dead-letter if nothing]
    #[arg(long, value_enum)]
    strategy: Option<StrategyName>,
    /// Print one line of JSON and nothing else on standard output
    #[arg(long)]
    pub json: bool,
    /// Rely on a worker that runs elsewhere: use the configured namespace and database as they are, start and remove
    /// nothing
    #[arg(long)]
    pub no_worker: bool,
    /// Log to standard error what the worker does, as log.filter says, instead of warnings only
    #[arg(long)]
    verbose: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum StrategyName {
    DeadLetter,
    DelayedExchange,
    Database,
}

impl Args {
    pub fn duration(&self) -> Duration {
        Duration::from_secs(self.seconds.into())
    }

    pub fn strategy(&self) -> Option<Strategy> {
        self.strategy.map(|name| match name {
            StrategyName::DeadLetter => Strategy::DeadLetter,
            StrategyName::DelayedExchange => Strategy::DelayedExchange,
            StrategyName::Database => Strategy::Database,
        })
    }

    /// Bars are for a terminal, and log lines would break them.
    pub fn shows_progress(&self) -> bool {
        !self.json && !self.verbose && std::io::stderr().is_terminal()
    }

    pub fn log(&self, settings: &Settings) -> LogSettings {
        let mut log = settings.log.clone();
        if !self.verbose {
            // lapin logs every lost connection as an error, but the code that used the connection reports it too. sqlx
            // warns of slow statements; this program measures them itself.
            "warn,lapin=off,sqlx=error".clone_into(&mut log.filter);
        }
        log
    }
}
