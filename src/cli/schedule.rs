//! `order-timeout schedule`: the publisher function by hand.

use std::time::Duration;

use clap::Args;
use serde_json::json;

use crate::cli::Answer;
use crate::config::Settings;
use crate::message::{read_rfc3339, write_rfc3339};
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

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct When {
    /// The deadline, counted from now, with its unit: 90s, 30m, 2h
    #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
    r#in: Option<Duration>,
    /// The deadline as a time: 2026-11-20T10:30:00Z
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    deadline: Option<Moment>,
}

fn parse_time(text: &str) -> Result<Moment, String> {
    read_rfc3339(text).ok_or_else(|| "write an RFC 3339 time with its offset, such as 2026-11-20T10:30:00Z".into())
}

/// # Errors
/// If the broker cannot be reached or does not confirm.
pub async fn run(args: ScheduleArgs, settings: Settings) -> anyhow::Result<Answer> {
    let publisher = Publisher::connect(&settings).await?;
    let deadline = match (args.when.r#in, args.when.deadline) {
        (Some(delay), _) => Moment::now_by_local_clock() + delay,
        (None, Some(deadline)) => deadline,
        (None, None) => unreachable!("clap requires one of the two"),
    };
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
