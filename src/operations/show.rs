//! One order's story out of the database: its row, alarms, events, parked alarms and history, and why it is still open.
//!
//! Reads only, apart from a row lock that is given back at once. What cannot be known is listed with the reason.

use std::fmt;
use std::time::Duration;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::{OrderId, Timestamp};
use serde::Serialize;
use sqlx::postgres::PgRow;
use sqlx::{Connection, PgConnection, Row};
use uuid::Uuid;

use super::orders_table::{OrderRow, OrdersTable, is_uuid};
use super::status::workers;
use super::{NotKnown, known};
use crate::postgres::{self, Database, one_line};

/// The newest rows of each table that are read.
const MOST_ROWS: i64 = 100;

/// How long after its deadline an order may be open without a particular cause: the sweep's grace, a pass and a batch.
const USUALLY_CLOSED_WITHIN: Duration = Duration::from_secs(2);

/// An order's story. `None` is unknown, and `not_known` says why; an empty list is known to be empty.
#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
pub struct OrderStory {
    /// As it was asked for.
    #[schema(value_type = String)]
    pub kind: Kind,
    /// As it was asked for.
    #[schema(value_type = String)]
    pub order_id: OrderId,
    /// The database's time, RFC 3339.
    pub at: String,
    /// Whether the orders table has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exists: Option<bool>,
    /// `None` if there is none, or it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub row: Option<ShownRow>,
    /// One sentence, if the order is open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open_because: Option<String>,
    /// The same as a value.
    #[serde(skip)]
    pub open_cause: Option<OpenCause>,
    /// Those of `alarm_outbox`, which forgets them some time after they were sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alarms: Option<Vec<AlarmRow>>,
    /// Events of this order in `event_outbox`; `None` if not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events: Option<Vec<EventRow>>,
    /// Its rows in `parked_alarms`; `None` if not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parked: Option<Vec<ParkedRow>>,
    /// Its history, oldest first; `None` if not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<Vec<HistoryRow>>,
    /// What could not be found out, and why.
    pub not_known: Vec<NotKnown>,
}

/// The order's row.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct ShownRow {
    /// `None` in a table of the shop's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// RFC 3339; `None` if the order has none.
    pub deadline: Option<String>,
    /// Seconds until the deadline by the database's clock, negative if it has passed.
    pub remaining_s: Option<f64>,
}

/// A row of `alarm_outbox`. The times are RFC 3339.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct AlarmRow {
    /// RFC 3339.
    pub deadline: String,
    /// RFC 3339.
    pub created_at: String,
    /// RFC 3339; `None` if it waits.
    pub sent_at: Option<String>,
    /// How often the broker refused it.
    pub refusals: i32,
}

/// A row of `event_outbox`. The times are RFC 3339.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct EventRow {
    /// The message id on the wire.
    pub id: Uuid,
    /// The event's type, such as `order.closed.v1`.
    pub r#type: String,
    /// RFC 3339.
    pub created_at: String,
    /// RFC 3339; `None` if it waits.
    pub sent_at: Option<String>,
    /// How often the broker refused it.
    pub refusals: i32,
}

/// A row of `parked_alarms`. The times are RFC 3339.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct ParkedRow {
    /// As `parked list` shows it.
    pub id: Uuid,
    /// The word of its reason.
    pub reason: String,
    /// One sentence.
    pub detail: String,
    /// RFC 3339; `None` if the message named none.
    pub deadline: Option<String>,
    /// RFC 3339.
    pub parked_at: String,
    /// How often it went back through the broker.
    pub attempts: i32,
}

/// A row of `order_events`. The time is RFC 3339.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct HistoryRow {
    /// RFC 3339.
    pub at: String,
    /// What happened, as the schema names it.
    pub event: String,
    /// The path that closed it; `None` for other events.
    pub by: Option<String>,
    /// Why, in a word.
    pub reason: Option<String>,
    /// The operator; `None` for a worker or a shop.
    pub who: Option<String>,
    /// The operator's reason.
    pub why: Option<String>,
    /// The bulk command that it belongs to.
    pub run: Option<Uuid>,
}

/// Reads the story of an order of this kind.
///
/// # Errors
/// sqlx's, if the database's time cannot be read. Anything else that cannot be read is listed in `not_known`.
pub async fn show(
    database: &Database,
    orders: &OrdersTable,
    kind: &Kind,
    order_id: &OrderId,
) -> Result<OrderStory, sqlx::Error> {
    let mut not_known = Vec::new();
    let found = known("row", orders.row(order_id).await, &mut not_known);
    let now = database.run(postgres::now).await?;
    let alarms = known("alarms", alarms(database, kind, order_id).await, &mut not_known);
    let events = known("events", events(database, kind, order_id).await, &mut not_known);
    let parked = known("parked", parked(database, kind, order_id).await, &mut not_known);
    let history = known("history", history(database, kind, order_id).await, &mut not_known);
    let row = found.as_ref().and_then(Option::as_ref);
    let mut open_cause = None;
    if let Some(row) = row {
        let live = known("workers", workers(database).await, &mut not_known);
        let live_workers = live.map(|workers| workers.iter().filter(|worker| worker.is_live).count());
        // Only an order that should be closed by now is asked for its lock.
        let is_locked = match is_open(row) && is_overdue(row, now) {
            true => known("lock", orders.is_locked(order_id).await, &mut not_known),
            false => None,
        };
        let (alarms, parked) = (alarms.as_deref(), parked.as_deref());
        open_cause = why_open(&Facts { now, row, is_locked, live_workers, alarms, parked });
    }
    Ok(OrderStory {
        kind: kind.clone(),
        order_id: order_id.clone(),
        at: write_rfc3339(now),
        exists: found.as_ref().map(Option::is_some),
        row: row.map(|row| shown(row, now)),
        open_because: open_cause.as_ref().map(OpenCause::to_string),
        open_cause,
        alarms,
        events,
        parked,
        history,
        not_known,
    })
}

fn shown(row: &OrderRow, now: Timestamp) -> ShownRow {
    let remaining = |deadline: Timestamp| deadline.since(now).as_secs_f64() - now.since(deadline).as_secs_f64();
    ShownRow {
        status: row.status.clone(),
        deadline: row.deadline.map(write_rfc3339),
        remaining_s: row.deadline.map(remaining),
    }
}

/// What the reason that an order is open depends on. `None` is unknown.
struct Facts<'a> {
    now: Timestamp,
    row: &'a OrderRow,
    is_locked: Option<bool>,
    live_workers: Option<usize>,
    alarms: Option<&'a [AlarmRow]>,
    parked: Option<&'a [ParkedRow]>,
}

/// In a table of the shop's own, only open orders are found.
fn is_open(row: &OrderRow) -> bool {
    row.status.as_deref().is_none_or(|status| ["unpaid", "closing"].contains(&status))
}

fn is_overdue(row: &OrderRow, now: Timestamp) -> bool {
    row.deadline.is_some_and(|deadline| deadline <= now)
}

/// Why an order is open. As text it is one sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OpenCause {
    /// The shop decides whether it was paid.
    Closing,
    /// It never times out.
    NoDeadline,
    /// Its deadline has not passed.
    NotDue {
        /// Until the deadline.
        remaining: Duration,
        /// Whether its alarm has not been sent yet.
        alarm_waits: bool,
    },
    /// It is overdue.
    Overdue {
        /// Since the deadline.
        by: Duration,
        /// The first cause that holds.
        cause: OverdueCause,
    },
}

/// Why an overdue order is not closed yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OverdueCause {
    /// No worker runs.
    NoWorker,
    /// Another session holds a lock that the close would need.
    Locked,
    /// Its alarm was given up.
    Parked {
        /// The word of the reason.
        reason: String,
        /// One sentence.
        detail: String,
    },
    /// Its deadline has only just passed.
    Recent,
    /// Nothing in the database tells.
    NotVisible,
}

impl fmt::Display for OpenCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closing => f.write_str(
                "its status is closing: its payment provider is asked, or the shop decides whether it was paid; `order-timeout closing list` shows it if a person must decide",
            ),
            Self::NoDeadline => f.write_str("it has no deadline, so it never times out"),
            Self::NotDue { remaining, alarm_waits } => {
                write!(f, "its deadline is in {}", rounded(*remaining))?;
                match alarm_waits {
                    true => f.write_str(
                        "; an alarm for it waits in alarm_outbox, and the sweep closes it if that is not sent in time",
                    ),
                    false => Ok(()),
                }
            }
            Self::Overdue { by, cause } => write!(f, "it is overdue by {}: {cause}", rounded(*by)),
        }
    }
}

impl fmt::Display for OverdueCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoWorker => f.write_str("no worker is running; start one"),
            Self::Locked => f.write_str(
                "another session holds a lock on its row (pg_stat_activity lists it); it is closed when that ends",
            ),
            Self::Parked { reason, detail } => write!(f, "its alarm was parked as {reason}, because {detail}"),
            Self::Recent => f.write_str("it is closed within a second or two"),
            Self::NotVisible => f.write_str(
                "no cause is visible in the database; `order-timeout close ID` tries to close it and says what is wrong, and the workers' logs name orders that cannot be closed",
            ),
        }
    }
}

/// Why the order is open; `None` if it is not.
fn why_open(facts: &Facts<'_>) -> Option<OpenCause> {
    let Facts { now, row, .. } = *facts;
    if !is_open(row) {
        return None;
    }
    if row.status.as_deref() == Some("closing") {
        return Some(OpenCause::Closing);
    }
    Some(match row.deadline {
        None => OpenCause::NoDeadline,
        Some(deadline) if deadline > now => {
            let alarm_waits = facts.alarms.is_some_and(|alarms| alarms.iter().any(|alarm| alarm.sent_at.is_none()));
            OpenCause::NotDue { remaining: deadline.since(now), alarm_waits }
        }
        Some(deadline) => OpenCause::Overdue { by: now.since(deadline), cause: why_overdue(facts, deadline) },
    })
}

fn why_overdue(facts: &Facts<'_>, deadline: Timestamp) -> OverdueCause {
    if facts.live_workers == Some(0) {
        return OverdueCause::NoWorker;
    }
    if facts.is_locked == Some(true) {
        return OverdueCause::Locked;
    }
    if let Some(parked) = facts.parked.and_then(<[ParkedRow]>::last) {
        return OverdueCause::Parked { reason: parked.reason.clone(), detail: parked.detail.clone() };
    }
    match facts.now.since(deadline) <= USUALLY_CLOSED_WITHIN {
        true => OverdueCause::Recent,
        false => OverdueCause::NotVisible,
    }
}

fn rounded(duration: Duration) -> humantime::FormattedDuration {
    let seconds = duration.as_secs();
    humantime::format_duration(if seconds == 0 {
        Duration::from_millis(u64::from(duration.subsec_millis()))
    } else {
        Duration::from_secs(seconds)
    })
}

/// Reads rows of an order without an index of ours, which a worker's sessions avoid. `$1` is the order's id, `$2` how many.
pub(super) async fn scan<T>(
    database: &Database,
    sql: &'static str,
    kind: Option<&Kind>,
    order_id: &OrderId,
    read: fn(&PgRow) -> Result<T, sqlx::Error>,
) -> Result<Vec<T>, String> {
    let rows = database.run(async |connection: &mut PgConnection| {
        let mut transaction = connection.begin().await?;
        sqlx::query("SELECT set_config('enable_seqscan', 'on', true)").execute(&mut *transaction).await?;
        let select = sqlx::query(sql).bind(order_id.as_str()).bind(MOST_ROWS);
        let select = if let Some(kind) = kind { select.bind(kind.as_str()) } else { select };
        let rows = select.fetch_all(&mut *transaction).await?;
        transaction.rollback().await?;
        rows.iter().map(read).collect()
    });
    let mut rows: Vec<T> = rows.await.map_err(|error| one_line(&error))?;
    // The newest are read; the story is told from its beginning.
    rows.reverse();
    Ok(rows)
}

pub(super) fn time(row: &PgRow, column: &str) -> Result<String, sqlx::Error> {
    let Timestamptz(time) = row.try_get(column)?;
    Ok(write_rfc3339(time))
}

pub(super) fn time_if_any(row: &PgRow, column: &str) -> Result<Option<String>, sqlx::Error> {
    let time: Option<Timestamptz> = row.try_get(column)?;
    Ok(time.map(|Timestamptz(time)| write_rfc3339(time)))
}

async fn alarms(database: &Database, kind: &Kind, order_id: &OrderId) -> Result<Vec<AlarmRow>, String> {
    // Each half has an index of its own.
    let select = "SELECT deadline, created_at, sent_at, refusals FROM (
                      SELECT * FROM alarm_outbox WHERE order_id = $1 AND sent_at IS NULL
                      UNION ALL SELECT * FROM alarm_outbox WHERE order_id = $1 AND sent_at IS NOT NULL) a
                  WHERE kind = $3
                  ORDER BY created_at DESC, id DESC LIMIT $2";
    let read = |row: &PgRow| {
        Ok(AlarmRow {
            deadline: time(row, "deadline")?,
            created_at: time(row, "created_at")?,
            sent_at: time_if_any(row, "sent_at")?,
            refusals: row.try_get("refusals")?,
        })
    };
    scan(database, select, Some(kind), order_id, read).await
}

async fn events(database: &Database, kind: &Kind, order_id: &OrderId) -> Result<Vec<EventRow>, String> {
    // Each half has an index of its own.
    let select = "SELECT id, type, created_at, sent_at, refusals FROM (
                      SELECT * FROM event_outbox WHERE payload ->> 'order_id' = $1 AND sent_at IS NULL
                      UNION ALL SELECT * FROM event_outbox WHERE payload ->> 'order_id' = $1 AND sent_at IS NOT NULL) e
                  WHERE kind = $3
                  ORDER BY created_at DESC, id DESC LIMIT $2";
    let read = |row: &PgRow| {
        Ok(EventRow {
            id: row.try_get("id")?,
            r#type: row.try_get("type")?,
            created_at: time(row, "created_at")?,
            sent_at: time_if_any(row, "sent_at")?,
            refusals: row.try_get("refusals")?,
        })
    };
    scan(database, select, Some(kind), order_id, read).await
}

async fn parked(database: &Database, kind: &Kind, order_id: &OrderId) -> Result<Vec<ParkedRow>, String> {
    let select = "SELECT id, reason, detail, deadline, parked_at, attempts FROM parked_alarms
                  WHERE order_id = $1 AND kind = $3
                  ORDER BY parked_at DESC, id DESC LIMIT $2";
    let read = |row: &PgRow| {
        Ok(ParkedRow {
            id: row.try_get("id")?,
            reason: row.try_get("reason")?,
            detail: row.try_get("detail")?,
            deadline: time_if_any(row, "deadline")?,
            parked_at: time(row, "parked_at")?,
            attempts: row.try_get("attempts")?,
        })
    };
    scan(database, select, Some(kind), order_id, read).await
}

async fn history(database: &Database, kind: &Kind, order_id: &OrderId) -> Result<Vec<HistoryRow>, String> {
    if !kind.is_default() {
        return Err("the table order_events has orders of the kind \"order\"".into());
    }
    if !is_uuid(order_id.as_str()) {
        return Err("the table order_events has orders of the default table, whose ids are UUIDs".into());
    }
    let select = "SELECT at, event, by, reason, who, why, run FROM order_events WHERE order_id = $1::text::uuid
                  ORDER BY id DESC LIMIT $2";
    let read = |row: &PgRow| {
        Ok(HistoryRow {
            at: time(row, "at")?,
            event: row.try_get("event")?,
            by: row.try_get("by")?,
            reason: row.try_get("reason")?,
            who: row.try_get("who")?,
            why: row.try_get("why")?,
            run: row.try_get("run")?,
        })
    };
    scan(database, select, None, order_id, read).await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_unix_micros(seconds * 1_000_000)
    }

    fn row(status: &str, deadline: Option<i64>) -> OrderRow {
        OrderRow { status: Some(status.to_owned()), deadline: deadline.map(at) }
    }

    fn facts(row: &OrderRow) -> Facts<'_> {
        Facts { now: at(100), row, is_locked: Some(false), live_workers: Some(1), alarms: Some(&[]), parked: Some(&[]) }
    }

    #[test]
    fn only_open_orders_have_a_reason() {
        for status in ["paid", "closed", "cancelled"] {
            assert_eq!(why_open(&facts(&row(status, Some(50)))), None);
        }
        let why = |row: &OrderRow| why_open(&facts(row)).unwrap().to_string();
        assert!(why(&row("closing", Some(50))).contains("the shop decides"));
        assert!(why(&row("unpaid", None)).contains("never times out"));
        assert_eq!(why(&row("unpaid", Some(160))), "its deadline is in 1m");
        assert!(why(&OrderRow { status: None, deadline: Some(at(50)) }).contains("overdue by 50s"));
    }

    #[test]
    fn reason_names_first_cause_that_holds() {
        let row = row("unpaid", Some(50));
        let parked = [ParkedRow {
            id: Uuid::nil(),
            reason: "close_failed".into(),
            detail: "a trigger refuses it".into(),
            deadline: None,
            parked_at: String::new(),
            attempts: 1,
        }];
        let why = |change: &dyn Fn(&mut Facts<'_>)| {
            let mut facts = Facts { parked: Some(&parked), ..facts(&row) };
            change(&mut facts);
            why_open(&facts).unwrap().to_string()
        };
        assert!(why(&|facts| facts.live_workers = Some(0)).contains("start one"));
        assert!(why(&|facts| facts.is_locked = Some(true)).contains("holds a lock"));
        assert!(why(&|_| {}).contains("parked as close_failed, because a trigger refuses it"));
        assert!(why(&|facts| facts.parked = None).contains("no cause is visible"));
        let unknown = |facts: &mut Facts<'_>| (facts.live_workers, facts.is_locked, facts.parked) = (None, None, None);
        assert!(why(&unknown).contains("no cause is visible"));
    }
}
