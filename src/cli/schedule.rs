//! `order-timeout schedule`: the publisher function by hand.

use clap::Args;
use serde_json::json;

use crate::cli::{Answer, When};
use crate::config::Settings;
use crate::message::write_rfc3339;
use crate::order::Moment;
use crate::schedule::Publisher;

/// Arguments of `schedule`.
#[derive(Debug, Args)]
pub struct ScheduleArgs {
    /// The order's id, as the orders table has it
    #[arg(long, value_name = "ID")]
    order_id: String,
    #[command(flatten)]
    when: When,
    /// Print what was scheduled as JSON
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the broker cannot be reached or does not confirm.
pub async fn run(args: ScheduleArgs, settings: Settings) -> anyhow::Result<Answer> {
    let publisher = Publisher::connect(&settings).await?;
    // Nobody here has asked a database; the order's row has the deadline that counts.
    let deadline = args.when.moment(Moment::now_by_local_clock());
    publisher.schedule(&args.order_id, deadline).await?;
    let deadline = write_rfc3339(deadline);
    let mut answer = Answer::default();
    if args.json {
        answer.line(json!({ "order_id": args.order_id, "deadline": deadline }));
    } else {
        answer.line(format!("scheduled: order {} at {deadline}", args.order_id));
    }
    Ok(answer)
}
