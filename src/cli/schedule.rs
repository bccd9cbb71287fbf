//! `order-timeout schedule`: publishes an alarm by hand.

use std::time::Duration;

use clap::Args;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::Timestamp;
use serde_json::json;

use crate::cli::{CommandOutcome, Order, When, schedule_check};
use crate::config::{DatabaseSettings, Settings};
use crate::postgres;

/// How long reading the database's clock may take. If it fails, this machine's clock is used.
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
        Some(when) => when.deadline(now(when, &settings.database).await),
        None => schedule_check::deadline_of(order_id, &settings).await?,
    };
    let publisher = settings.publisher().connect().await?;
    publisher.schedule(order_id, deadline).await?;
    let mut answer = CommandOutcome::default();
    // The alarm is already sent, so anything odd is only a remark.
    schedule_check::remarks(order_id, deadline, &settings).await.iter().for_each(|remark| answer.remark(remark));
    let deadline = write_rfc3339(deadline);
    if args.json {
        answer.line(json!({ "order_id": order_id, "deadline": deadline }));
    } else {
        answer.line(format!("scheduled: order {order_id} at {deadline}"));
    }
    Ok(answer)
}

/// The time by the database's clock, which closes the order, if a database is named and answers; else by this
/// machine's.
async fn now(when: &When, database: &DatabaseSettings) -> Timestamp {
    let asked = match when.is_counted_from_now() && database.is_given() {
        true => postgres::ask_time(database, TIME_TIMEOUT.min(database.acquire_timeout)).await.ok(),
        false => None,
    };
    asked.unwrap_or_else(Timestamp::now_by_local_clock)
}
