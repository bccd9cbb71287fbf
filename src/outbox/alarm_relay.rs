//! Step 1, schedule, inside the order's own transaction: publishes the alarms that were inserted into `alarm_outbox`
//! with their orders.
//!
//! Places each alarm as a publisher would, by the database's clock. Decides nothing about orders.

use std::time::Duration;

use order_timeout_amqp::envelope::{self, Route};
use order_timeout_amqp::publisher::{ConfirmedPublisher, Outgoing};
use order_timeout_amqp::topology::Names;
use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::alarm::DeliveredAlarm;
use order_timeout_core::delay::KindLanes;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::Alarm;
use order_timeout_core::order::{OrderId, Timestamp};
use sqlx::Row;
use sqlx::postgres::PgRow;
use tracing::warn;

use crate::config::Settings;
use crate::outbox::destination::Destination;
use crate::outbox::relay::{Outbox, OutboxTable, RelayError, Relayed};
use crate::postgres::Database;

const TABLE: OutboxTable = OutboxTable {
    name: "alarm_outbox",
    // A try gives no other queue a copy, and each alarm has a deadline.
    pauses_s: &[1.0, 5.0, 20.0, 60.0],
    is_paced: false,
    // statement_timestamp(): a volatile function could not bound an index scan.
    unsent:
        "SELECT id, kind, order_id, deadline, traceparent, refusals, clock_timestamp() AS now, count(*) OVER () AS found
             FROM (
                 (SELECT id, kind, order_id, deadline, traceparent, refusals, created_at FROM alarm_outbox
                  WHERE sent_at IS NULL AND next_attempt_at = '-infinity' AND id <> ALL ($2::uuid[])
                  ORDER BY created_at, id LIMIT $1)
                 UNION ALL
                 (SELECT id, kind, order_id, deadline, traceparent, refusals, created_at FROM alarm_outbox
                  WHERE sent_at IS NULL AND next_attempt_at > '-infinity' AND next_attempt_at <= statement_timestamp()
                        AND id <> ALL ($2::uuid[])
                  ORDER BY next_attempt_at, created_at, id LIMIT $3)
             ) AS oldest
             ORDER BY refusals = 0, created_at, id",
};

/// `$1` limit. By primary key, as in `relay.rs`.
const SETTLE: &str = "
UPDATE alarm_outbox SET sent_at = clock_timestamp() WHERE id = ANY (ARRAY(
    SELECT id FROM alarm_outbox WHERE sent_at IS NULL AND deadline < statement_timestamp()
    LIMIT $1 FOR UPDATE SKIP LOCKED))";
const SETTLED_AT_ONCE: i64 = 10_000;

/// Publishes the alarms in `alarm_outbox`.
#[derive(Debug)]
pub struct AlarmRelay {
    /// The table, for what both outboxes have in common.
    pub outbox: Outbox,
    names: Names,
    lanes: KindLanes,
}

impl AlarmRelay {
    /// `batch_size` alarms at most are sent at once; sent ones are deleted after `keep`. Without a broker (`confirmed`), alarms
    /// stay until their deadline, for the day on which there is one.
    #[must_use]
    pub fn new(
        database: Database,
        confirmed: Option<ConfirmedPublisher>,
        settings: &Settings,
        batch_size: usize,
        keep: Duration,
    ) -> Self {
        let destination = confirmed.map_or(Destination::Nowhere, Destination::Broker);
        let outbox = Outbox::new(database, destination, TABLE, batch_size, keep);
        Self { outbox, names: settings.names(), lanes: settings.lanes() }
    }

    /// Publishes one batch.
    ///
    /// # Errors
    /// As of [`Outbox::unsent`] and [`Outbox::send`].
    pub async fn round(&mut self) -> Result<Relayed, RelayError> {
        let unsent = self.outbox.unsent().await?;
        let (names, lanes) = (&self.names, &self.lanes);
        self.outbox.send(unsent, |row| message(names, lanes, row)).await
    }

    /// Deletes some of the alarms that were published long enough ago; returns whether there are more. Without a broker, one
    /// whose deadline has passed is marked first: it is of no use to a broker any more.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn forget_old(&self) -> Result<bool, sqlx::Error> {
        let mut has_settled_all = true;
        if self.outbox.is_kept() {
            let settle = sqlx::query(SETTLE).bind(SETTLED_AT_ONCE);
            let settled = self.outbox.database().run(async |connection| settle.execute(connection).await).await?;
            has_settled_all = settled.rows_affected() < SETTLED_AT_ONCE.unsigned_abs();
        }
        Ok(self.outbox.forget_old().await? || !has_settled_all)
    }
}

fn message(names: &Names, lanes: &KindLanes, row: &PgRow) -> Result<Option<Outgoing>, sqlx::Error> {
    let (Timestamptz(deadline), Timestamptz(now)) = (row.try_get("deadline")?, row.try_get("now")?);
    let (order_id, traceparent): (String, Option<String>) = (row.try_get("order_id")?, row.try_get("traceparent")?);
    let (order_id, kind) = match (OrderId::new(&order_id), Kind::new(row.try_get("kind")?)) {
        (Ok(order_id), Ok(kind)) => (order_id, kind),
        // The table's CHECKs refuse both, so one was dropped. The sweep closes the order all the same.
        (order_id, kind) => {
            let (order_id, kind) = (order_id.err(), kind.err());
            warn!(?order_id, ?kind, "an alarm in alarm_outbox has an invalid order id or kind; it is not sent");
            return Ok(None);
        }
    };
    // `None` for an alarm whose deadline has passed: the sweep closes its order.
    let is_ahead = deadline > now;
    Ok(is_ahead.then(|| alarm(names, lanes, Alarm { kind, order_id, deadline }, now, traceparent)))
}

fn alarm(names: &Names, lanes: &KindLanes, alarm: Alarm, now: Timestamp, traceparent: Option<String>) -> Outgoing {
    let route = Route::to(&lanes.place(&alarm.kind, &alarm.order_id, alarm.deadline, now), &alarm.kind, names);
    envelope::address(DeliveredAlarm { traceparent, ..alarm.into() }, route, now)
}
