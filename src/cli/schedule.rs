//! `order-timeout schedule`: the publisher function by hand.

use std::time::Duration;

use clap::Args;
use secrecy::ExposeSecret;
use serde_json::json;

use crate::cli::{Answer, When};
use crate::config::{DatabaseSettings, Settings};
use crate::database;
use crate::message::write_rfc3339;
use crate::order::Moment;
use crate::schedule::Publisher;

/// How long a database may take to say what time it is. Without an answer this machine's clock will do.
const TIME_PATIENCE: Duration = Duration::from_secs(2);

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
    let deadline = args.when.moment(now(&args.when, &settings.database).await);
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

/// By the clock that closes the order, where a database is named and answers; else by the one here.
async fn now(when: &When, database: &DatabaseSettings) -> Moment {
    let is_named = !database.url.expose_secret().is_empty();
    let asked = match when.is_counted_from_now() && is_named {
        true => database::ask_time(database, TIME_PATIENCE.min(database.acquire_timeout)).await.ok(),
        false => None,
    };
    asked.unwrap_or_else(Moment::now_by_local_clock)
}
