//! `order-timeout topology`: prints `definitions.json`.

use clap::Args;
use order_timeout_core::delay::Strategy;

use crate::cli::CommandOutcome;
use crate::config::Settings;

/// Arguments of `topology`.
#[derive(Debug, Args)]
pub struct TopologyArgs {
    /// Print the objects of the delayed-exchange strategy instead (for brokers with the plugin)
    #[arg(long)]
    plugin: bool,
    /// The virtual host that the objects belong to
    #[arg(long, default_value = "orders", value_name = "NAME")]
    vhost: String,
}

/// Prints the definitions file.
pub fn run(args: &TopologyArgs, mut settings: Settings) -> CommandOutcome {
    if args.plugin {
        settings.delay.strategy = Strategy::DelayedExchange;
    }
    let mut answer = CommandOutcome::default();
    answer.lines(format!("{:#}", settings.topology().definitions(&args.vhost)));
    answer
}
