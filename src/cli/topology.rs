//! `order-timeout topology`: prints `definitions.json`; `topology prune` deletes empty slots of the wheel.

use clap::{Args, Subcommand};
use order_timeout_amqp::topology::Pruned;
use order_timeout_core::delay::{RingSettings, Strategy};
use serde_json::json;

use crate::cli::CommandOutcome;
use crate::config::Settings;
use crate::operations::prune_slots::{Does, prune_slots};

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
    /// Delete slots of the wheel that are empty; without --yes only shows them. A worker declares a slot again when an alarm needs it
    Prune(PruneArgs),
}

/// Arguments of `topology prune`.
#[derive(Debug, Args)]
struct PruneArgs {
    /// A ring that delay.rings no longer has, as its queues are named, such as 5s-24; may be repeated
    #[arg(long = "ring", value_name = "UNIT-SLOTS", value_parser = parse_ring)]
    rings: Vec<RingSettings>,
    /// Delete them, instead of showing what would be deleted
    #[arg(long)]
    yes: bool,
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
    let does = if args.yes { Does::Delete } else { Does::Look };
    let Pruned { deleted, kept, unknown } = prune_slots(settings, &args.rings, does).await?;
    let mut answer = CommandOutcome { code: u8::from(!unknown.is_empty()), ..CommandOutcome::default() };
    if args.json {
        let kept: Vec<_> =
            kept.iter().map(|(queue, messages)| json!({ "queue": queue, "messages": messages })).collect();
        let unknown: Vec<_> = unknown.iter().map(|(queue, why)| json!({ "queue": queue, "why": why })).collect();
        let (empty, deleted) = if args.yes { (vec![], deleted) } else { (deleted, vec![]) };
        answer.line(json!({ "empty": empty, "deleted": deleted, "kept": kept, "unknown": unknown }));
        return Ok(answer);
    }
    let word = if args.yes { "deleted" } else { "empty  " };
    deleted.iter().for_each(|queue| answer.line(format!("{word} {queue}")));
    kept.iter().for_each(|(queue, messages)| answer.line(format!("kept    {queue}: {messages} messages")));
    unknown.iter().for_each(|(queue, why)| answer.line(format!("kept    {queue}: {why}")));
    let (empty, kept) = (deleted.len(), kept.len());
    answer.line(match args.yes {
        true => format!("{empty} empty queues deleted, {kept} with messages kept"),
        false => {
            format!("{empty} empty queues, {kept} with messages, nothing done; add --yes to delete the empty ones")
        }
    });
    Ok(answer)
}
