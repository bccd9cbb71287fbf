//! `order-timeout topology`: prints `definitions.json`.

use clap::Args;

use crate::cli::CommandOutcome;
use crate::config::Settings;

/// Arguments of `topology`.
#[derive(Debug, Args)]
pub struct TopologyArgs {
    /// The virtual host that the objects belong to
    #[arg(long, default_value = "orders", value_name = "NAME")]
    vhost: String,
}

/// Prints the definitions file.
pub fn run(args: &TopologyArgs, settings: &Settings) -> CommandOutcome {
    let mut answer = CommandOutcome::default();
    answer.lines(format!("{:#}", settings.topology().definitions(&args.vhost)));
    answer
}
