//! `order-timeout deadline`: another deadline for an order of the default schema, by hand.

use anyhow::bail;
use clap::Args;
use serde_json::json;

use crate::cli::{CommandOutcome, Order, When};
use crate::config::Settings;
use crate::database::{self, Database};
use crate::message::write_rfc3339;
use crate::order::OrderId;
use crate::schedule::deadline::{MoveDeadlineError, Moved, move_deadline};

/// Arguments of `deadline`.
#[derive(Debug, Args)]
#[command(mut_group(When::GROUP, |group| group.required(true)))]
pub struct DeadlineArgs {
    #[command(flatten)]
    order: Order,
    #[command(flatten)]
    when: When,
    /// Print what became of it as JSON
    #[arg(long)]
    json: bool,
}

/// # Errors
/// If the database cannot be used, or the orders table is not ours. Exit code 1 also if the deadline stands as it was.
pub async fn run(args: DeadlineArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    if !settings.orders.close_sql.is_empty() {
        bail!(
            "orders.close_sql says that the orders table is your own: update its row yourself, and for an earlier deadline run `order-timeout schedule`"
        );
    }
    let order_id = OrderId::new(args.order.id()).map_err(MoveDeadlineError::from)?;
    let database = Database::connect(&settings.database, 1).await?;
    database::require_migrated(&database).await?;
    // By the clock that closes the order, whatever the one here says.
    let now = database.run(database::now).await.map_err(MoveDeadlineError::from)?;
    let deadline = args.when.moment(now);
    // Beyond it its alarm would be parked, and somebody paged.
    if deadline > now + settings.delay.max_delay {
        bail!(
            "the deadline stands: it would lie further ahead than delay.max_delay allows; choose a nearer one, or raise that setting for workers and publishers"
        );
    }
    if deadline <= now {
        bail!(
            "the deadline stands: the order would be closed at once, for {} has passed; choose a later one, such as --in 1s if you mean at once, or run `order-timeout close ID` if the order is overdue already",
            write_rfc3339(deadline)
        );
    }
    let moved = database.run(async |connection| move_deadline(connection, &order_id, deadline).await).await;
    let moved = moved.map_err(MoveDeadlineError::from)?;
    let wanted = write_rfc3339(deadline);
    let (word, sentence) = match &moved {
        Moved::Later => {
            ("later", format!("order {order_id} has time until {wanted}; an alarm scheduled before follows"))
        }
        Moved::Earlier => ("earlier", format!("order {order_id} has time until {wanted}; an alarm for it is written")),
        Moved::Stands { status, .. } if status == "unpaid" => {
            ("stands", format!("order {order_id} is unpaid, but a trigger of the database keeps its deadline as it is"))
        }
        Moved::Stands { status, .. } => ("stands", format!("order {order_id} is {status}; its deadline stands")),
        Moved::Unknown => ("unknown", format!("there is no order {order_id}")),
    };
    // What the row says now, unless a trigger made something else of the wish.
    let (code, status, deadline) = match &moved {
        Moved::Later | Moved::Earlier => (0, Some("unpaid"), Some(wanted)),
        Moved::Stands { status, deadline } => (1, Some(status.as_str()), Some(write_rfc3339(*deadline))),
        Moved::Unknown => (1, None, None),
    };
    let mut answer = CommandOutcome { code, ..CommandOutcome::default() };
    if args.json {
        answer.line(json!({ "order_id": order_id.as_str(), "status": status, "deadline": deadline, "outcome": word }));
    } else {
        answer.line(sentence);
    }
    Ok(answer)
}
