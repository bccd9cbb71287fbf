//! `order-timeout schedule`: publishes an alarm by hand.

use anyhow::Context;
use clap::Args;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::OrderId;
use serde_json::json;

use crate::cli::schedule_check::ScheduleCheck;
use crate::cli::{CommandOutcome, OfKind, UsageError, When};
use crate::config::Settings;

/// Arguments of `schedule`.
#[derive(Debug, Args)]
pub struct ScheduleArgs {
    /// The order's id, as the orders table has it
    #[arg(value_name = "ID")]
    id: String,
    #[command(flatten)]
    when: Option<When>,
    #[command(flatten)]
    of: OfKind,
    /// Print what was scheduled as JSON
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the broker cannot be reached or does not confirm.
pub async fn run(args: ScheduleArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let (order_id, kind) = (&OrderId::new(&args.id).context("not scheduled")?, &args.of.kind);
    // A worker parks an alarm of a kind that it does not know, and an operator is there to correct the name now.
    if !settings.all_kinds().contains(kind) {
        return Err(UsageError::of(format!(
            "not scheduled: there is no kind \"{kind}\" in the settings; add [kinds.{kind}], or correct --kind"
        )));
    }
    let check = ScheduleCheck::of(order_id, kind, &settings).await?;
    let deadline = match &args.when {
        Some(when) if when.is_counted_from_now() => when.deadline(check.now().await),
        Some(when) => when.deadline(ScheduleCheck::local_now()),
        None => check.deadline()?,
    };
    let publisher = settings.publisher().connect().await?;
    publisher.schedule_kind(kind, order_id, deadline).await?;
    let mut answer = CommandOutcome::default();
    // The alarm is already sent, so anything odd is only a remark.
    check.remarks(deadline).iter().for_each(|remark| answer.remark(remark));
    let deadline = write_rfc3339(deadline);
    if args.json {
        // As in the message: only a kind that is not the default one is named.
        let mut scheduled = json!({ "order_id": order_id, "deadline": deadline });
        if !kind.is_default() {
            scheduled["kind"] = json!(kind);
        }
        answer.line(scheduled);
    } else {
        let of_kind = if kind.is_default() { String::new() } else { format!(" of kind {kind}") };
        answer.line(format!("scheduled: order {order_id}{of_kind} at {deadline}"));
    }
    Ok(answer)
}
