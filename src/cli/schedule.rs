//! `order-timeout schedule`: the publisher function by hand.

use std::time::Duration;

use clap::Args;
use serde_json::json;

use crate::cli::{CommandOutcome, Order, When, schedule_check};
use crate::config::{DatabaseSettings, Settings};
use crate::database;
use crate::message::write_rfc3339;
use crate::order::Timestamp;
use crate::schedule::Publisher;

/// How long a database may take to say what time it is. Without an answer this machine's clock will do.
const TIME_TIMEOUT: Duration = Duration::from_secs(2);

/// Arguments of `schedule`.
#[derive(Debug, Args)]
pub struct ScheduleArgs {
    #[command(flatten)]
    order: Order,
    #[command(flatten)]
    when: Option<When>,
    /// Print what was scheduled as JSON
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the broker cannot be reached or does not confirm.
pub async fn run(args: ScheduleArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let order_id = args.order.id();
    let deadline = match &args.when {
        Some(when) => when.moment(now(when, &settings.database).await),
        None => schedule_check::deadline_of(order_id, &settings).await?,
    };
    let publisher = Publisher::connect(&settings).await?;
    publisher.schedule(order_id, deadline).await?;
    let mut answer = CommandOutcome::default();
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

/// By the clock that closes the order, where a database is named and answers; else by the one here.
async fn now(when: &When, database: &DatabaseSettings) -> Timestamp {
    let asked = match when.is_counted_from_now() && database.is_given() {
        true => database::ask_time(database, TIME_TIMEOUT.min(database.acquire_timeout)).await.ok(),
        false => None,
    };
    asked.unwrap_or_else(Timestamp::now_by_local_clock)
}
