//! `order-timeout testing`: moves the clock of a database for tests.
//!
//! The database decides whether it may be moved.

use std::time::Duration;

use clap::Subcommand;
use order_timeout_client::testing;
use order_timeout_core::duration;
use order_timeout_core::message::write_rfc3339;

use super::{CommandOutcome, connect};
use crate::config::Settings;

/// The subcommands of `testing`.
#[derive(Debug, Subcommand)]
pub enum TestingCommand {
    /// Move the clock forward: all that falls due meanwhile is due at once
    Advance {
        /// How far, with its unit: 90s, 30m, 2h
        #[arg(value_name = "DURATION", value_parser = parse_step, allow_hyphen_values = true)]
        step: Duration,
    },
}

fn parse_step(text: &str) -> Result<Duration, String> {
    duration::parse(text).map_err(|fault| {
        format!("{fault}; the clock moves forward only: write a number and its unit, such as 90s, 30m or 2h")
    })
}

/// # Errors
/// If the database was not made for tests.
pub async fn run(
    TestingCommand::Advance { step }: TestingCommand,
    settings: Settings,
) -> anyhow::Result<CommandOutcome> {
    let database = connect(&settings, 1).await?;
    let now = testing::advance(database.pool(), step).await?;
    let mut answer = CommandOutcome::default();
    answer.line(format!("the database's clock says {}", write_rfc3339(now)));
    Ok(answer)
}
