//! Step 1, schedule, inside the order's own transaction: the alarm is inserted with the order, and the worker's relay
//! publishes it. An order and its alarm are committed together or not at all, with or without a broker.

use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::PgRow;
use tracing::warn;

use super::lane::Lanes;
use crate::alarm::Returns;
use crate::config::Settings;
use crate::confirm::{ConfirmedPublisher, Outgoing};
use crate::database::{Database, Timestamptz};
use crate::envelope::{self, AlarmHeaders};
use crate::message::Alarm;
use crate::order::{Deadline, OrderId, OrderIdError, Timestamp};
use crate::relay::{Backlog, Outbox, OutboxSql, RelayError, Relayed, outbox_sql};

const SQL: OutboxSql = outbox_sql!(
    "alarm_outbox",
    // A try gives no other queue a copy, and each alarm has a deadline.
    pauses_s: &[1.0, 5.0, 20.0, 60.0],
    is_paced: false,
    // statement_timestamp(): a volatile function could not bound an index scan.
    unsent: "SELECT id, order_id, deadline, refusals, clock_timestamp() AS now, count(*) OVER () AS found
             FROM (
                 (SELECT id, order_id, deadline, refusals, created_at FROM alarm_outbox
                  WHERE sent_at IS NULL AND next_attempt_at = '-infinity' AND id <> ALL ($2::uuid[])
                  ORDER BY created_at, id LIMIT $1)
                 UNION ALL
                 (SELECT id, order_id, deadline, refusals, created_at FROM alarm_outbox
                  WHERE sent_at IS NULL AND next_attempt_at > '-infinity' AND next_attempt_at <= statement_timestamp()
                        AND id <> ALL ($2::uuid[])
                  ORDER BY next_attempt_at, created_at, id LIMIT $3)
             ) AS oldest
             ORDER BY refusals = 0, created_at, id"
);

/// Why an alarm was not written into the outbox.
#[derive(Debug, thiserror::Error)]
pub enum OutboxError {
    #[error("not scheduled: {0}")]
    OrderId(#[from] OrderIdError),
    #[error("not scheduled: {}", crate::database::one_line(.0))]
    Database(#[from] sqlx::Error),
}

/// Schedules an alarm as part of the caller's transaction: it exists if, and only if, that transaction commits. One row,
/// no broker. In any other language the same is
/// `INSERT INTO alarm_outbox (order_id, deadline) VALUES ($1, $2)`.
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool, id: uuid::Uuid) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::{Duration, SystemTime};
///
/// let deadline = SystemTime::now() + Duration::from_secs(30 * 60);
/// let mut tx = pool.begin().await?;
/// // … INSERT INTO orders …
/// order_timeout::schedule_in(&mut *tx, id.to_string(), deadline).await?;
/// tx.commit().await?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`OutboxError`]; the transaction is to be rolled back then.
pub async fn schedule_in(
    transaction: impl sqlx::PgExecutor<'_>,
    order_id: impl AsRef<str>,
    deadline: impl Into<Deadline>,
) -> Result<(), OutboxError> {
    let order_id = OrderId::new(order_id)?;
    sqlx::query("INSERT INTO alarm_outbox (order_id, deadline) VALUES ($1, $2)")
        .bind(order_id.as_str())
        .bind(Timestamptz(deadline.into()))
        .execute(transaction)
        .await?;
    Ok(())
}

/// Publishes the alarms in `alarm_outbox`.
#[derive(Debug)]
pub struct AlarmRelay {
    outbox: Outbox,
    lanes: Lanes,
}

impl AlarmRelay {
    #[must_use]
    pub fn new(
        database: Database,
        confirmed: ConfirmedPublisher,
        settings: &Settings,
        batch_size: usize,
        keep: Duration,
    ) -> Self {
        Self { outbox: Outbox::new(database, confirmed, SQL, batch_size, keep), lanes: Lanes::new(settings) }
    }

    /// Publishes one batch.
    ///
    /// # Errors
    /// As of [`Outbox::round`].
    pub async fn round(&mut self) -> Result<Relayed, RelayError> {
        let lanes = &self.lanes;
        self.outbox.round(|row| message(lanes, row)).await
    }

    /// The backlog of the outbox.
    ///
    /// # Errors
    /// As of [`Outbox::backlog`].
    pub async fn backlog(&self) -> Result<Backlog, RelayError> {
        self.outbox.backlog().await
    }

    /// Deletes some of the alarms that were published long enough ago; returns whether there are more.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn forget_old(&self) -> Result<bool, sqlx::Error> {
        self.outbox.forget_old().await
    }
}

fn message(lanes: &Lanes, row: &PgRow) -> Result<Option<Outgoing>, sqlx::Error> {
    let (Timestamptz(deadline), Timestamptz(now)) = (row.try_get("deadline")?, row.try_get("now")?);
    let order_id: String = row.try_get("order_id")?;
    let order_id = match OrderId::new(&order_id) {
        Ok(order_id) => order_id,
        // The table's CHECK refuses such ids, so it was dropped. The sweep closes the order all the same.
        Err(fault) => {
            warn!(%fault, "an alarm in alarm_outbox has an invalid order id; it is not sent");
            return Ok(None);
        }
    };
    Ok(alarm(lanes, order_id, deadline, now))
}

/// `None` for an alarm whose deadline has passed: the sweep closes its order.
fn alarm(lanes: &Lanes, order_id: OrderId, deadline: Deadline, now: Timestamp) -> Option<Outgoing> {
    if deadline <= now {
        return None;
    }
    let route = lanes.route(&order_id, deadline, now);
    let headers = AlarmHeaders { attempt: 0, first_published_at: now, traceparent: None, returns: Returns::default() };
    Some(envelope::address(&Alarm { order_id, deadline }, route, headers))
}
