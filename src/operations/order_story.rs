//! What the tables keep of one order: its row, alarms, events, parked alarms and history, and why it is still open.
//!
//! Reads only, apart from a row lock that is given back at once. What cannot be known is listed with the reason.

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::{OrderId, Timestamp};
use serde::Serialize;
use sqlx::postgres::PgRow;
use sqlx::{Connection, PgConnection, Row};
use uuid::Uuid;

use super::open_cause::{Facts, Open, is_open, is_overdue, why_open};
use super::orders_table::{OrderRow, OrdersTable, is_uuid};
use super::pause_closing::lasting;
use super::status::workers;
use super::{NotKnown, known};
use crate::postgres::closing_pauses::Pause;
use crate::postgres::{self, Database, one_line};

/// The newest rows of each table that are read.
const MOST_ROWS: i64 = 100;

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
    /// Present if the order is open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub open: Option<Open>,
    /// Those of `alarm_outbox`, which forgets them some time after they were sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alarms: Option<Vec<AlarmRow>>,
    /// Events of this order in `event_outbox`; `None` if not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub events: Option<Vec<EventRow>>,
    /// Its rows in `parked_alarms`; `None` if not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parked: Option<Vec<ParkedRow>>,
    /// Its claim, if a payment provider is asked about it, or its answers could not decide.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<ClaimRow>,
    /// The pauses that last and apply to its kind; `None` if not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<Vec<Pause>>,
    /// Its history, oldest first; `None` if not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<Vec<HistoryRow>>,
    /// What could not be found out, and why.
    pub not_known: Vec<NotKnown>,
}

/// The order's row.
#[derive(Debug, Clone, PartialEq, Serialize, utoipa::ToSchema)]
pub struct ShownRow {
    /// `None` behind statements of the shop's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<String>,
    /// RFC 3339; `None` if the order has none.
    pub deadline: Option<String>,
    /// Seconds until the deadline by the database's clock, negative if it has passed; `None` if it is never due.
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
    /// The reason of an operator, or of a release.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
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

/// A row of `close_attempts`: there until the order has ended. The times are RFC 3339.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct ClaimRow {
    /// The path that claimed it.
    pub claimed_by: String,
    /// RFC 3339.
    pub claimed_at: String,
    /// The provider that is asked next; empty if the order has no attempt to pay.
    pub queue: String,
    /// What the order waits for.
    pub step: String,
    /// How many rounds ended without an answer.
    pub rounds: i32,
    /// RFC 3339. While a worker has it, until when.
    pub next_attempt_at: String,
    /// What the providers answered in the last round; `None` if none has ended.
    pub last_answers: Option<String>,
    /// Why a person must look at it.
    pub unresolved_reason: Option<String>,
    /// RFC 3339.
    pub unresolved_at: Option<String>,
    /// The operator who had it claimed or asked about again.
    pub who: Option<String>,
    /// The operator's reason.
    pub why: Option<String>,
}

impl ClaimRow {
    /// The provider, as a noun.
    #[must_use]
    pub fn provider(&self) -> &str {
        if self.queue.is_empty() { "its payment provider" } else { &self.queue }
    }

    /// What the last answers were.
    #[must_use]
    pub fn answers(&self) -> &str {
        self.last_answers.as_deref().unwrap_or("nothing was answered")
    }
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
    /// What its payment providers answered before.
    pub answers: Option<String>,
}

/// Reads the story of an order of this kind.
///
/// # Errors
/// sqlx's, if the database's time cannot be read. Anything else that cannot be read is listed in `not_known`.
pub(super) async fn read(
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
    let claim = known("claim", claim(database, kind, order_id).await, &mut not_known).flatten();
    let paused = known("paused", lasting(database, Some(kind)).await, &mut not_known);
    let history = known("history", history(database, kind, order_id).await, &mut not_known);
    let row = found.as_ref().and_then(Option::as_ref);
    let mut open = None;
    if let Some(row) = row {
        let live = known("workers", workers(database).await, &mut not_known);
        let live_workers = live.map(|workers| workers.iter().filter(|worker| worker.is_live).count());
        // Only an order that should be closed by now is asked for its lock.
        let is_locked = match is_open(row) && is_overdue(row, now) {
            true => known("lock", orders.is_locked(order_id).await, &mut not_known),
            false => None,
        };
        let holders = match is_open(row) && is_overdue(row, now) {
            true => known("lock holders", orders.lock_holders(order_id).await, &mut not_known),
            false => None,
        };
        let holders = holders.as_deref();
        let (alarms, parked, pauses) = (alarms.as_deref(), parked.as_deref(), paused.as_deref());
        let closed_in_history = history.iter().flatten().find(|row| row.event == "closed").map(|row| &*row.at);
        let claim = claim.as_ref();
        open = why_open(&Facts {
            now,
            row,
            is_locked,
            holders,
            live_workers,
            alarms,
            parked,
            closed_in_history,
            pauses,
            claim,
        });
    }
    Ok(OrderStory {
        kind: kind.clone(),
        order_id: order_id.clone(),
        at: write_rfc3339(now),
        exists: found.as_ref().map(Option::is_some),
        row: row.map(|row| shown(row, now)),
        open,
        alarms,
        events,
        parked,
        claim,
        paused,
        history,
        not_known,
    })
}

fn shown(row: &OrderRow, now: Timestamp) -> ShownRow {
    let remaining = |deadline: Timestamp| deadline.since(now).as_secs_f64() - now.since(deadline).as_secs_f64();
    ShownRow {
        status: row.status.clone(),
        deadline: row.deadline.map(write_rfc3339),
        remaining_s: row.deadline.filter(|deadline| deadline.can_be_due()).map(remaining),
    }
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
    let select = "SELECT id, type, payload ->> 'why' AS why, created_at, sent_at, refusals FROM (
                      SELECT * FROM event_outbox WHERE payload ->> 'order_id' = $1 AND sent_at IS NULL
                      UNION ALL SELECT * FROM event_outbox WHERE payload ->> 'order_id' = $1 AND sent_at IS NOT NULL) e
                  WHERE kind = $3
                  ORDER BY created_at DESC, id DESC LIMIT $2";
    let read = |row: &PgRow| {
        Ok(EventRow {
            id: row.try_get("id")?,
            r#type: row.try_get("type")?,
            why: row.try_get("why")?,
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

async fn claim(database: &Database, kind: &Kind, order_id: &OrderId) -> Result<Option<ClaimRow>, String> {
    let select = "SELECT claimed_by, claimed_at, queue, step, rounds, next_attempt_at, last_answers,
                         unresolved_reason, unresolved_at, who, why
                  FROM close_attempts WHERE order_id = $1 AND kind = $3 LIMIT $2";
    let read = |row: &PgRow| {
        Ok(ClaimRow {
            claimed_by: row.try_get("claimed_by")?,
            claimed_at: time(row, "claimed_at")?,
            queue: row.try_get("queue")?,
            step: row.try_get("step")?,
            rounds: row.try_get("rounds")?,
            next_attempt_at: time(row, "next_attempt_at")?,
            last_answers: row.try_get("last_answers")?,
            unresolved_reason: row.try_get("unresolved_reason")?,
            unresolved_at: time_if_any(row, "unresolved_at")?,
            who: row.try_get("who")?,
            why: row.try_get("why")?,
        })
    };
    Ok(scan(database, select, Some(kind), order_id, read).await?.pop())
}

async fn history(database: &Database, kind: &Kind, order_id: &OrderId) -> Result<Vec<HistoryRow>, String> {
    if !kind.is_default() {
        return Err("the table order_events has orders of the kind \"order\"".into());
    }
    if !is_uuid(order_id.as_str()) {
        return Err("the table order_events has orders of the default table, whose ids are UUIDs".into());
    }
    let select =
        "SELECT at, event, by, reason, who, why, run, answers FROM order_events WHERE order_id = $1::text::uuid
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
            answers: row.try_get("answers")?,
        })
    };
    scan(database, select, None, order_id, read).await
}
