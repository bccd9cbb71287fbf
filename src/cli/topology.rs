//! `order-timeout topology`: prints `definitions.json`; `topology prune` deletes empty slots of the wheel.

use clap::{Args, Subcommand};
use order_timeout_core::delay::{RingSettings, Strategy};
use serde_json::json;

use crate::cli::CommandOutcome;
use crate::config::Settings;
use crate::operations::prune_slots::prune_slots;

/// Arguments of `topology`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct TopologyArgs {
    #[command(subcommand)]
    command: Option<TopologyCommand>,
    /// Print the objects of the delayed-exchange strategy instead (for brokers with the plugin)
    #[arg(long)]
    plugin: bool,
    /// The virtual host that the objects belong to
    #[arg(long, default_value = "orders", value_name = "NAME")]
    vhost: String,
}

/// The subcommands of `topology`.
#[derive(Debug, Subcommand)]
enum TopologyCommand {
    /// Delete slots of the wheel that are empty; a worker declares a slot again when an alarm needs it
    Prune(PruneArgs),
}

/// Arguments of `topology prune`.
#[derive(Debug, Args)]
struct PruneArgs {
    /// A ring that delay.rings no longer has, as its queues are named, such as 5s-24; may be repeated
    #[arg(long = "ring", value_name = "UNIT-SLOTS", value_parser = parse_ring)]
    rings: Vec<RingSettings>,
    /// Print the deleted and the kept queues as JSON
    #[arg(long)]
    json: bool,
}

fn parse_ring(text: &str) -> Result<RingSettings, String> {
    text.parse().map_err(|fault| format!("{fault}"))
}

/// # Errors
/// Printing never fails. `prune` fails if the broker cannot be reached, or does not let this user delete queues.
pub async fn run(args: TopologyArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    match &args.command {
        Some(TopologyCommand::Prune(prune_args)) => prune(prune_args, &settings).await,
        None => Ok(print(&args, settings)),
    }
}

fn print(args: &TopologyArgs, mut settings: Settings) -> CommandOutcome {
    if args.plugin {
        settings.delay.strategy = Strategy::DelayedExchange;
    }
    let mut answer = CommandOutcome::default();
    answer.lines(format!("{:#}", settings.topology().definitions(&args.vhost)));
    answer
}

async fn prune(args: &PruneArgs, settings: &Settings) -> anyhow::Result<CommandOutcome> {
    let pruned = prune_slots(settings, &args.rings).await?;
    let mut answer = CommandOutcome::default();
    if args.json {
        let kept = pruned.kept.iter().map(|(queue, messages)| json!({ "queue": queue, "messages": messages }));
        answer.line(json!({ "deleted": pruned.deleted, "kept": kept.collect::<Vec<_>>() }));
        return Ok(answer);
    }
    pruned.deleted.iter().for_each(|queue| answer.line(format!("deleted {queue}")));
    pruned.kept.iter().for_each(|(queue, messages)| answer.line(format!("kept    {queue}: {messages} messages")));
    let (deleted, kept) = (pruned.deleted.len(), pruned.kept.len());
    answer.line(format!("{deleted} empty queues deleted, {kept} with messages kept"));
    Ok(answer)
}
