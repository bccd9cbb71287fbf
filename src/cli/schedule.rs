//! `order-timeout schedule`: the publisher function by hand.

use clap::Args;
use serde_json::json;

use crate::cli::{Answer, Order, When, schedule_check};
use crate::config::Settings;
use crate::message::write_rfc3339;
use crate::order::Moment;
use crate::schedule::Publisher;

/// Arguments of `schedule`.
#[derive(Debug, Args)]
pub struct ScheduleArgs {
    #[command(flatten)]
    order: Order,
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
    let order_id = args.order.id();
    publisher.schedule(order_id, deadline).await?;
    let mut answer = Answer::default();
    // The alarm is sent, whatever is odd about it.
    schedule_check::remarks(order_id, deadline, &settings).await.iter().for_each(|remark| answer.remark(remark));
    let deadline = write_rfc3339(deadline);
    if args.json {
        answer.line(json!({ "order_id": order_id, "deadline": deadline }));
    } else {
        answer.line(format!("scheduled: order {order_id} at {deadline}"));
    }
    Ok(answer)
}
