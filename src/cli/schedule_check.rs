//! Checks an alarm that `schedule` sends: its id, its deadline, and whether they match the order's row.
//!
//! Only reports, and opens the database at most once. Without a database, or if it does not answer, fewer checks are
//! made; that is not an error, because a publisher needs no database.

use std::time::Duration;

use anyhow::bail;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::{OrderId, Timestamp};

use crate::cli::UsageError;
use crate::config::Settings;
use crate::operations::orders_table::{OrderRow, OrdersTable, is_uuid};
use crate::postgres::{self, Database};

/// How long connecting and answering may each take: a user waits for the command.
const TIME_LIMIT: Duration = Duration::from_secs(2);

/// Deadlines that differ by less are the same: their clocks were read at slightly different times.
const SAME_DEADLINE: Duration = Duration::from_secs(1);

/// The database's time, and the order's row if there is one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct OrderFacts {
    now: Timestamp,
    row: Option<OrderRow>,
    is_malformed: bool,
}

/// The check of one order's alarm.
pub(super) struct ScheduleCheck<'a> {
    order_id: &'a OrderId,
    settings: &'a Settings,
    /// Whether the settings tell where the order's row is. Statements of the shop's own do not.
    has_rows: bool,
    /// What the database has said, or why it has not; `None` if there is none to ask.
    found: Option<Result<OrderFacts, String>>,
}

impl<'a> ScheduleCheck<'a> {
    /// Reads the order's row, if the settings tell where it is. Refuses an id that no order of the kind can have: a worker
    /// would park its alarm.
    ///
    /// # Errors
    /// One sentence.
    pub async fn of(order_id: &'a OrderId, kind: &Kind, settings: &'a Settings) -> anyhow::Result<Self> {
        let is_default = settings.has_built_in_table(kind);
        if is_default && !is_uuid(order_id.as_str()) {
            return Err(UsageError::of(format!(
                "not scheduled: {:?} is no UUID, which the ids of the table orders are; correct it, or name your own table in the settings (kinds.order.table or orders.close_sql) here as well",
                order_id.as_str()
            )));
        }
        let has_rows = is_default || settings.table_of(kind).is_some();
        let found = match has_rows && settings.database.is_given() {
            true => Some(look(order_id, kind, settings).await),
            false => None,
        };
        if let Some(Ok(OrderFacts { is_malformed: true, .. })) = found {
            return Err(UsageError::of(format!(
                "not scheduled: {:?} has a form that no id of kinds.{kind}.table has; write it as that table prints it",
                order_id.as_str()
            )));
        }
        Ok(Self { order_id, settings, has_rows, found })
    }

    /// The time by the database's clock, which closes the order, if a database is named and answers; else by this
    /// machine's.
    pub async fn now(&self) -> Timestamp {
        if let Some(Ok(OrderFacts { now, .. })) = self.found {
            return now;
        }
        // It needs neither the table nor a session of its own.
        let database = &self.settings.database;
        let asked = match database.is_given() {
            true => postgres::ask_time(database, TIME_LIMIT.min(database.acquire_timeout)).await.ok(),
            false => None,
        };
        asked.unwrap_or_else(Timestamp::now_by_local_clock)
    }

    /// The time by this machine's clock.
    pub fn local_now() -> Timestamp {
        Timestamp::now_by_local_clock()
    }

    /// The deadline that the order's row has, for a command line without one.
    ///
    /// # Errors
    /// One sentence that says why there is none, and to give it.
    pub fn deadline(&self) -> anyhow::Result<Timestamp> {
        const GIVE_IT: &str = "give the deadline with --in 30m or --deadline TIME";
        let order_id = self.order_id;
        match &self.found {
            None if !self.has_rows => Err(UsageError::of(format!(
                "the deadline of an order in a table behind your own statements is not read from there; {GIVE_IT}"
            ))),
            None => Err(UsageError::of(format!(
                "no database is named, so the order's deadline cannot be read; set database.url, or {GIVE_IT}"
            ))),
            Some(Ok(OrderFacts { row: Some(OrderRow { deadline: Some(deadline), .. }), .. }))
                if deadline.can_be_due() =>
            {
                Ok(*deadline)
            }
            Some(Ok(OrderFacts { row: Some(_), .. })) => {
                bail!(
                    "order {order_id} has no deadline, so it is never closed; {GIVE_IT} if it shall have an alarm all the same"
                )
            }
            Some(Ok(OrderFacts { row: None, .. })) => {
                bail!("there is no order {order_id} in the orders table; create it first, or {GIVE_IT}")
            }
            Some(Err(fault)) => bail!("the order's deadline cannot be read: {fault}; {GIVE_IT}"),
        }
    }

    /// One sentence for each problem of an alarm with this deadline.
    pub fn remarks(&self, deadline: Timestamp) -> Vec<String> {
        let local_now = Self::local_now();
        match &self.found {
            None => passed(deadline, local_now),
            Some(Ok(found)) => odd(deadline, found),
            Some(Err(fault)) => {
                let unread = format!("the order's row was not compared with this alarm: {fault}");
                passed(deadline, local_now).into_iter().chain([unread]).collect()
            }
        }
    }
}

fn passed(deadline: Timestamp, now: Timestamp) -> Vec<String> {
    let sentence = || {
        let deadline = write_rfc3339(deadline);
        format!("the deadline {deadline} has passed; a worker checks the order as soon as the alarm arrives")
    };
    (deadline <= now).then(sentence).into_iter().collect()
}

fn odd(deadline: Timestamp, OrderFacts { now, row, .. }: &OrderFacts) -> Vec<String> {
    let mut odd = passed(deadline, *now);
    match row {
        None => odd.push("there is no such order in the orders table; without one a worker parks this alarm when retry.missing_for has passed".to_owned()),
        Some(OrderRow { status: Some(status), .. }) if status != "unpaid" => {
            odd.push(format!("the order is {status}, so this alarm closes nothing"));
        }
        Some(OrderRow { deadline: None, .. }) => {
            odd.push("the order's row has no deadline, so this alarm closes nothing".to_owned());
        }
        Some(OrderRow { deadline: Some(row), .. }) if row.since(deadline).max(deadline.since(*row)) > SAME_DEADLINE => {
            let (row, alarm) = (write_rfc3339(*row), write_rfc3339(deadline));
            odd.push(format!("the order's row has the deadline {row} and this alarm {alarm}; the order is closed when the row says"));
        }
        Some(_) => {}
    }
    odd
}

async fn look(order_id: &OrderId, kind: &Kind, settings: &Settings) -> Result<OrderFacts, String> {
    let mut limited = settings.clone();
    let limits = &mut limited.database;
    limits.acquire_timeout = limits.acquire_timeout.min(TIME_LIMIT);
    limits.statement_timeout = limits.statement_timeout.min(TIME_LIMIT);
    limits.lock_timeout = limits.lock_timeout.min(TIME_LIMIT / 2);
    let database = Database::connect(&limited.database, 1).await.map_err(|fault| fault.to_string())?;
    let orders = OrdersTable::open(database, &limited, kind).await.map_err(|fault| fault.to_string())?;
    Ok(OrderFacts {
        now: orders.now().await?,
        row: orders.row(order_id).await?,
        is_malformed: orders.is_malformed(order_id).await?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_unix_micros(seconds * 1_000_000)
    }

    fn odd_of(status: &str, row_deadline: i64, deadline: i64, now: i64) -> String {
        let row = Some(OrderRow { status: Some(status.to_owned()), deadline: Some(at(row_deadline)) });
        odd(at(deadline), &OrderFacts { now: at(now), row, is_malformed: false }).join("\n")
    }

    #[test]
    fn remarks_only_on_what_is_odd() {
        assert_eq!(odd_of("unpaid", 100, 100, 50), "");
        assert_eq!(odd_of("unpaid", 101, 100, 50), "");
        assert!(odd_of("unpaid", 102, 100, 50).contains("closed when the row says"));
        assert!(odd_of("unpaid", 100, 102, 50).contains("closed when the row says"));
        assert!(odd_of("paid", 100, 100, 50).contains("the order is paid"));
        assert!(odd_of("unpaid", 100, 100, 100).contains("has passed"));
        let never = Some(OrderRow { status: Some("unpaid".to_owned()), deadline: None });
        assert!(
            odd(at(9), &OrderFacts { now: at(1), row: never, is_malformed: false }).concat().contains("no deadline")
        );
        assert!(
            odd(at(9), &OrderFacts { now: at(1), row: None, is_malformed: false }).concat().contains("no such order")
        );
    }
}
