//! `order-timeout deadline`: moves the deadline of an order by hand.

use anyhow::{anyhow, bail};
use clap::Args;
use order_timeout_client::postgres::{MoveDeadlineError, Moved, move_deadline_by};
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::OrderId;
use serde_json::json;

use crate::cli::{CommandOutcome, Order, When};
use crate::config::Settings;
use crate::operations::orders_statements::{self, DeadlineStatement};
use crate::postgres::{self, Database, one_line};

/// Arguments of `deadline`.
#[derive(Debug, Args)]
#[command(mut_group(When::GROUP, |group| group.required(true)))]
pub struct DeadlineArgs {
    #[command(flatten)]
    order: Order,
    #[command(flatten)]
    when: When,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the database cannot be used, or the orders table is not ours. Exit code 1 also if the deadline is unchanged.
pub async fn run(args: DeadlineArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let order_id = OrderId::new(args.order.id()).map_err(MoveDeadlineError::from)?;
    let database = Database::connect(&settings.database, 1).await?;
    postgres::require_migrated(&database).await?;
    let statement = orders_statements::statements(&database, &settings).await?.deadline;
    let statement = match statement {
        DeadlineStatement::Sql(sql) => sql,
        DeadlineStatement::CannotBeMoved(why) => bail!("{why}"),
    };
    // By the database's clock, which closes the order, not by this machine's.
    let now = database.run(postgres::now).await.map_err(|error| with_one_line(error.into()))?;
    let deadline = args.when.deadline(now);
    // The alarm of a deadline beyond it would be parked, which raises an alert.
    if deadline > now + settings.delay.max_delay {
        bail!(
            "the deadline is unchanged: the new one is further ahead than delay.max_delay allows; choose a nearer one, or raise that setting for workers and publishers"
        );
    }
    if deadline <= now {
        bail!(
            "the deadline is unchanged: the order would be closed at once, because {} has passed; choose a later one, such as --in 1s if you mean at once, or run `order-timeout close ID` if the order is already overdue",
            write_rfc3339(deadline)
        );
    }
    let moved =
        database.run(async |connection| match move_deadline_by(connection, &statement, &order_id, deadline).await {
            // For the pool, which adds the server's address to an error of the connection.
            Err(MoveDeadlineError::Database(error)) => Err(error),
            moved => Ok(moved),
        });
    let moved = moved.await.map_err(MoveDeadlineError::from).and_then(|moved| moved).map_err(with_one_line)?;
    let wanted = write_rfc3339(deadline);
    let (word, sentence) = match &moved {
        Moved::Later => (
            "later",
            format!("order {order_id} has time until {wanted}; an alarm that was already scheduled adapts to it"),
        ),
        Moved::Earlier => ("earlier", format!("order {order_id} has time until {wanted}; an alarm for it is written")),
        Moved::Unchanged { status, .. } if status == "unpaid" => (
            "unchanged",
            format!("order {order_id} is unpaid, but a trigger in the database keeps its deadline unchanged"),
        ),
        Moved::Unchanged { status, .. } => {
            ("unchanged", format!("order {order_id} is {status}; its deadline is unchanged"))
        }
        Moved::Unknown => ("unknown", format!("there is no order {order_id}")),
    };
    // The row's deadline now, unless a trigger has changed the requested one.
    let (code, status, deadline) = match &moved {
        Moved::Later | Moved::Earlier => (0, Some("unpaid"), Some(wanted)),
        Moved::Unchanged { status, deadline } => (1, Some(status.as_str()), Some(write_rfc3339(*deadline))),
        Moved::Unknown => (1, None, None),
    };
    let mut output = CommandOutcome { code, ..CommandOutcome::default() };
    if args.json {
        output.line(json!({ "order_id": order_id.as_str(), "status": status, "deadline": deadline, "outcome": word }));
    } else {
        output.line(sentence);
    }
    Ok(output)
}

/// The sentence with the database's own words, on one line and with their SQLSTATE.
fn with_one_line(fault: MoveDeadlineError) -> anyhow::Error {
    match &fault {
        MoveDeadlineError::Database(error) => anyhow!("{fault}: {}", one_line(error)),
        _ => fault.into(),
    }
}
