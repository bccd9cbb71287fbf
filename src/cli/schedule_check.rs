//! Checks an alarm that `schedule` has sent: its id, its deadline, and whether they match the order's row.
//!
//! Only reports. Without a database, or if it does not answer, fewer checks are made; that is not an error, because a
//! publisher needs no database.

use std::time::Duration;

use anyhow::bail;
use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::Timestamp;
use sqlx::{PgConnection, Row};

use crate::config::Settings;
use crate::postgres::{self, Database, one_line};

/// How long connecting and answering may each take: a user waits for the command.
const TIME_LIMIT: Duration = Duration::from_secs(2);

/// Deadlines that differ by less are the same: their clocks were read at slightly different times.
const SAME_DEADLINE: Duration = Duration::from_secs(1);

/// An order's row in the default orders table.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OrderRow {
    status: String,
    /// `None`: it is never closed.
    deadline: Option<Timestamp>,
}

/// The database's time, and the order's row if there is one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OrderFacts {
    now: Timestamp,
    row: Option<OrderRow>,
}

/// One sentence for each problem.
pub(super) async fn remarks(order_id: &str, deadline: Timestamp, settings: &Settings) -> Vec<String> {
    // The shop's own table is not read here.
    if !settings.has_default_orders() {
        return passed(deadline, Timestamp::now_by_local_clock());
    }
    if !is_uuid(order_id) {
        let not_uuid = "the order's id is not a UUID in the usual form, as in the table orders; a worker parks this alarm (for your own table set orders.close_sql here as well)";
        return [not_uuid.to_owned()].into_iter().chain(passed(deadline, Timestamp::now_by_local_clock())).collect();
    }
    if !settings.database.is_given() {
        return passed(deadline, Timestamp::now_by_local_clock());
    }
    match look(order_id, settings).await {
        Ok(found) => odd(deadline, &found),
        Err(fault) => {
            let unread = format!("the order's row was not compared with this alarm: {fault}");
            passed(deadline, Timestamp::now_by_local_clock()).into_iter().chain([unread]).collect()
        }
    }
}

/// The deadline that the order's row has, for a command line without one.
///
/// # Errors
/// One sentence that says why there is none, and to give it.
pub(super) async fn deadline_of(order_id: &str, settings: &Settings) -> anyhow::Result<Timestamp> {
    const GIVE_IT: &str = "give the deadline with --in 30m or --deadline TIME";
    if !settings.has_default_orders() {
        bail!(
            "the deadline of an order in a table of your own (orders.close_sql or kinds.order.table) is not read from there; {GIVE_IT}"
        );
    }
    if !settings.database.is_given() {
        bail!("no database is named, so the order's deadline cannot be read; set database.url, or {GIVE_IT}");
    }
    if !is_uuid(order_id) {
        bail!("{order_id:?} is no UUID, which the ids of the table orders are; correct it, or {GIVE_IT}");
    }
    match look(order_id, settings).await {
        Ok(OrderFacts { row: Some(OrderRow { deadline: Some(deadline), .. }), .. }) => Ok(deadline),
        Ok(OrderFacts { row: Some(_), .. }) => {
            bail!(
                "order {order_id} has no deadline, so it is never closed; {GIVE_IT} if it shall have an alarm all the same"
            )
        }
        Ok(OrderFacts { row: None, .. }) => {
            bail!("there is no order {order_id} in the table orders; create it first, or {GIVE_IT}")
        }
        Err(fault) => bail!("the order's deadline cannot be read: {fault}; {GIVE_IT}"),
    }
}

fn passed(deadline: Timestamp, now: Timestamp) -> Vec<String> {
    let sentence = || {
        let deadline = write_rfc3339(deadline);
        format!("the deadline {deadline} has passed; a worker checks the order as soon as the alarm arrives")
    };
    (deadline <= now).then(sentence).into_iter().collect()
}

fn odd(deadline: Timestamp, OrderFacts { now, row }: &OrderFacts) -> Vec<String> {
    let mut odd = passed(deadline, *now);
    match row {
        None => odd.push("there is no such order in the table orders; without one a worker parks this alarm when retry.missing_for has passed".to_owned()),
        Some(row) if row.status != "unpaid" => {
            odd.push(format!("the order is {}, so this alarm closes nothing", row.status));
        }
        Some(OrderRow { deadline: None, .. }) => {
            odd.push("the order has no deadline, so this alarm closes nothing".to_owned());
        }
        Some(OrderRow { deadline: Some(row), .. }) => {
            if row.since(deadline).max(deadline.since(*row)) > SAME_DEADLINE {
                let (row, alarm) = (write_rfc3339(*row), write_rfc3339(deadline));
                odd.push(format!("the order's row has the deadline {row} and this alarm {alarm}; the order is closed when the row says"));
            }
        }
    }
    odd
}

/// The same check as in `sql/close.sql`: hexadecimal digits, and hyphens in their places.
fn is_uuid(text: &str) -> bool {
    let hyphens = [8, 13, 18, 23];
    let is_in_place =
        |(at, byte): (usize, u8)| if hyphens.contains(&at) { byte == b'-' } else { byte.is_ascii_hexdigit() };
    text.len() == 36 && text.bytes().enumerate().all(is_in_place)
}

async fn look(order_id: &str, settings: &Settings) -> Result<OrderFacts, String> {
    let mut settings = settings.database.clone();
    settings.acquire_timeout = settings.acquire_timeout.min(TIME_LIMIT);
    settings.statement_timeout = settings.statement_timeout.min(TIME_LIMIT);
    settings.lock_timeout = settings.lock_timeout.min(TIME_LIMIT / 2);
    let database = Database::connect(&settings, 1).await.map_err(|fault| fault.to_string())?;
    database.run(async |connection| read(connection, order_id).await).await.map_err(|error| one_line(&error))
}

async fn read(connection: &mut PgConnection, order_id: &str) -> Result<OrderFacts, sqlx::Error> {
    let now = postgres::now(connection).await?;
    let row = sqlx::query("SELECT status::text AS status, expires_at FROM orders WHERE id = $1::uuid")
        .bind(order_id)
        .fetch_optional(connection)
        .await?;
    let row = row.map(|row| {
        let deadline: Option<Timestamptz> = row.try_get("expires_at")?;
        let deadline = deadline.map(|Timestamptz(deadline)| deadline);
        Ok::<_, sqlx::Error>(OrderRow { status: row.try_get("status")?, deadline })
    });
    Ok(OrderFacts { now, row: row.transpose()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_unix_micros(seconds * 1_000_000)
    }

    fn odd_of(status: &str, row_deadline: i64, deadline: i64, now: i64) -> String {
        let row = Some(OrderRow { status: status.to_owned(), deadline: Some(at(row_deadline)) });
        odd(at(deadline), &OrderFacts { now: at(now), row }).join("\n")
    }

    #[test]
    fn remarks_only_on_what_is_odd() {
        assert_eq!(odd_of("unpaid", 100, 100, 50), "");
        assert_eq!(odd_of("unpaid", 101, 100, 50), "");
        assert!(odd_of("unpaid", 102, 100, 50).contains("closed when the row says"));
        assert!(odd_of("unpaid", 100, 102, 50).contains("closed when the row says"));
        assert!(odd_of("paid", 100, 100, 50).contains("the order is paid"));
        assert!(odd_of("unpaid", 100, 100, 100).contains("has passed"));
        let never = Some(OrderRow { status: "unpaid".to_owned(), deadline: None });
        assert!(odd(at(9), &OrderFacts { now: at(1), row: never }).concat().contains("no deadline"));
        assert!(odd(at(9), &OrderFacts { now: at(1), row: None }).concat().contains("no such order"));
    }

    #[test]
    fn accepts_same_uuids_as_close_statement() {
        assert!(is_uuid("01939f6e-7a3c-7C11-9d1a-6b1f0e2d3c4b"));
        for other in [
            "",
            "17",
            "01939f6e7a3c7c119d1a6b1f0e2d3c4b",
            "{01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4}",
            "01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4g",
        ] {
            assert!(!is_uuid(other), "{other}");
        }
    }
}
