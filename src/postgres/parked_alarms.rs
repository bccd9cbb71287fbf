//! The table of alarms that could not be handled, with the reason: a table, not a queue, so that they can be listed,
//! sorted and chosen.
//!
//! Writes, lists and deletes rows; publishes nothing. What an operator does to them is recorded in `operator_actions`, in
//! the same statement.

use std::time::Duration;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::alarm::DeadLetter;
use order_timeout_core::message::{Alarm, Unreadable, write_rfc3339};
use order_timeout_core::order::Timestamp;
use serde::Serialize;
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::selection::Selection;
use super::{Database, Operator};

/// Rows deleted by one statement because they are old: each may hold 16 KiB.
const DELETE_BATCH_SIZE: u64 = 1_000;

/// A parked alarm as it is listed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct Parked {
    /// Its key in the table.
    pub id: Uuid,
    /// Why it was parked, as one of the words of `ParkReason`.
    pub reason: String,
    /// What was found, in a sentence.
    pub detail: String,
    /// The kind that the alarm names; the default one if it could not be read.
    pub kind: String,
    /// The order's id, if the alarm could be read.
    pub order_id: Option<String>,
    /// RFC 3339.
    pub deadline: Option<String>,
    /// How often closing its order had been tried.
    pub attempts: i32,
    /// RFC 3339.
    pub parked_at: String,
    /// Seconds since it was parked.
    pub age_s: i64,
    /// The message's body, if it is text.
    #[serde(rename = "body", skip_serializing_if = "Option::is_none")]
    pub body_text: Option<String>,
    /// The message's body in hexadecimal digits, if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body_hex: Option<String>,
    /// The message's body, as much of it as is stored.
    #[serde(skip)]
    pub body: Vec<u8>,
    /// When it was parked.
    #[serde(skip)]
    pub since: Timestamp,
}

impl Parked {
    /// Reads the alarm again.
    ///
    /// # Errors
    /// [`Unreadable`], as at its arrival.
    pub fn alarm(&self) -> Result<Alarm, Unreadable> {
        Alarm::read(&self.body, None)
    }
}

/// Inserts dead letters, all or none. The same message again is the same row: a delivery whose acknowledgement was
/// lost, or a second identical alarm.
///
/// # Errors
/// sqlx's; nothing is inserted then.
pub async fn insert(database: &Database, dead_letters: &[&DeadLetter]) -> Result<(), sqlx::Error> {
    let reasons: Vec<&str> = dead_letters.iter().map(|p| p.reason.as_str()).collect();
    // NUL is the only character that a Postgres text cannot hold.
    let details: Vec<String> = dead_letters.iter().map(|p| p.detail.replace('\0', "\u{fffd}")).collect();
    let order_ids: Vec<Option<&str>> =
        dead_letters.iter().map(|p| p.order_id.as_ref().map(order_timeout_core::order::OrderId::as_str)).collect();
    let deadlines: Vec<Option<Timestamptz>> = dead_letters.iter().map(|p| p.deadline.map(Timestamptz)).collect();
    let kinds: Vec<&str> = dead_letters.iter().map(|p| p.kind.as_str()).collect();
    let attempts: Vec<i32> = dead_letters.iter().map(|p| i32::try_from(p.attempts).unwrap_or(i32::MAX)).collect();
    let bodies: Vec<&[u8]> = dead_letters.iter().map(|p| p.body.as_slice()).collect();
    let insert = sqlx::query(
        "INSERT INTO parked_alarms (id, reason, detail, kind, order_id, deadline, attempts, body)
         SELECT DISTINCT ON (id) id, reason, detail, kind, order_id, deadline, attempts, body
         FROM (SELECT encode(substr(sha256(body), 1, 16), 'hex')::uuid AS id, *
               FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[], $5::int[], $6::bytea[], $7::text[])
                    AS dead_letter (reason, detail, order_id, deadline, attempts, body, kind)) AS dead_letters
         ORDER BY id, attempts DESC
         ON CONFLICT (id) DO UPDATE
             SET reason = excluded.reason, detail = excluded.detail, attempts = excluded.attempts,
                 parked_at = clock_timestamp()",
    )
    .bind(reasons)
    .bind(details)
    .bind(order_ids)
    .bind(deadlines)
    .bind(attempts)
    .bind(bodies)
    .bind(kinds);
    database.run(async |connection| insert.execute(connection).await).await.map(drop)
}

/// Lists the oldest first.
///
/// # Errors
/// sqlx's.
pub async fn list(database: &Database, selection: &Selection, limit: i64) -> Result<Vec<Parked>, sqlx::Error> {
    list_after(database, selection, None, limit).await
}

/// Lists the oldest first, after the row `after` if one is given.
///
/// # Errors
/// sqlx's.
pub async fn list_after(
    database: &Database,
    selection: &Selection,
    after: Option<Place>,
    limit: i64,
) -> Result<Vec<Parked>, sqlx::Error> {
    let (since, id) = after.map(|place| (Timestamptz(place.since), place.id)).unzip();
    let select = sqlx::query(
        "SELECT id, reason, detail, kind, order_id, deadline, attempts, parked_at, body,
                extract(epoch FROM clock_timestamp() - parked_at)::bigint AS age_s
         FROM parked_alarms
         WHERE ($1::text IS NULL OR reason = $1) AND ($2::uuid[] IS NULL OR id = ANY ($2))
               AND ($4::timestamptz IS NULL OR (parked_at, id) > ($4, $5::uuid))
         ORDER BY parked_at, id LIMIT $3",
    )
    .bind(selection.reason())
    .bind(selection.ids())
    .bind(limit)
    .bind(since)
    .bind(id);
    let rows = database.run(async |connection| select.fetch_all(connection).await).await?;
    rows.iter().map(parked).collect()
}

fn parked(row: &PgRow) -> Result<Parked, sqlx::Error> {
    let written = |Timestamptz(moment)| write_rfc3339(moment);
    let body: Vec<u8> = row.try_get("body")?;
    let text = std::str::from_utf8(&body).ok().map(str::to_owned);
    Ok(Parked {
        id: row.try_get("id")?,
        reason: row.try_get("reason")?,
        detail: row.try_get("detail")?,
        kind: row.try_get("kind")?,
        order_id: row.try_get("order_id")?,
        deadline: row.try_get::<Option<Timestamptz>, _>("deadline")?.map(written),
        attempts: row.try_get("attempts")?,
        parked_at: written(row.try_get("parked_at")?),
        age_s: row.try_get("age_s")?,
        body_hex: text.is_none().then(|| hex(&body)),
        body_text: text,
        body,
        since: row.try_get::<Timestamptz, _>("parked_at")?.0,
    })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The position of a row in the list.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    since: Timestamp,
    id: Uuid,
}

/// The position of this row, if it exists.
///
/// # Errors
/// sqlx's.
pub async fn place_of(database: &Database, id: Uuid) -> Result<Option<Place>, sqlx::Error> {
    let select = sqlx::query_scalar("SELECT parked_at FROM parked_alarms WHERE id = $1").bind(id);
    let since: Option<Timestamptz> = database.run(async |connection| select.fetch_optional(connection).await).await?;
    Ok(since.map(|Timestamptz(since)| Place { since, id }))
}

/// How many alarms are parked for each reason, and since when the oldest of them is.
///
/// # Errors
/// sqlx's.
pub async fn count_by_reason(database: &Database) -> Result<Vec<(String, u64, Timestamp)>, sqlx::Error> {
    let select =
        sqlx::query_as("SELECT reason, count(*), min(parked_at) FROM parked_alarms GROUP BY reason ORDER BY reason");
    let rows: Vec<(String, i64, Timestamptz)> =
        database.run(async |connection| select.fetch_all(connection).await).await?;
    Ok(rows.into_iter().map(|(reason, alarms, Timestamptz(oldest))| (reason, alarms.unsigned_abs(), oldest)).collect())
}

/// The ids of the selected alarms, oldest first.
///
/// # Errors
/// sqlx's.
pub async fn ids(database: &Database, selection: &Selection) -> Result<Vec<Uuid>, sqlx::Error> {
    let select = sqlx::query_scalar(
        "SELECT id FROM parked_alarms
         WHERE ($1::text IS NULL OR reason = $1) AND ($2::uuid[] IS NULL OR id = ANY ($2))
         ORDER BY parked_at, id",
    )
    .bind(selection.reason())
    .bind(selection.ids());
    database.run(async |connection| select.fetch_all(connection).await).await
}

/// Deletes rows whose alarms are confirmed by the broker again, unless they were parked again since they were listed,
/// because the worker may be faster. Records that the operator has retried them.
///
/// # Errors
/// sqlx's.
pub async fn drop_retried(
    database: &Database,
    rows: &[(Uuid, Timestamp)],
    operator: &Operator,
) -> Result<(), sqlx::Error> {
    let (ids, since): (Vec<Uuid>, Vec<Timestamptz>) = rows.iter().map(|(id, since)| (*id, Timestamptz(*since))).unzip();
    // The record has all of them: what was parked again meanwhile was retried as well.
    let delete = sqlx::query(
        "WITH retried AS MATERIALIZED (
             SELECT p.id, p.reason, p.kind, p.order_id, p.parked_at FROM parked_alarms p
             WHERE p.id = ANY ($1::uuid[])
             -- In the order in which parking locks them; otherwise the two could deadlock.
             ORDER BY p.id FOR UPDATE),
         recorded AS (
             INSERT INTO operator_actions (who, why, run, action, alarms)
             SELECT $3, $4, $5, 'parked_retried',
                    jsonb_agg(jsonb_build_object('id', r.id, 'reason', r.reason, 'kind', r.kind, 'order_id', r.order_id))
             FROM retried r HAVING count(*) > 0)
         DELETE FROM parked_alarms p
         USING retried r JOIN unnest($1::uuid[], $2::timestamptz[]) AS listed (id, since)
               ON r.id = listed.id AND r.parked_at = listed.since
         WHERE p.id = r.id",
    )
    .bind(ids)
    .bind(since)
    .bind(&operator.who)
    .bind(operator.why.as_deref())
    .bind(operator.run);
    database.run(async |connection| delete.execute(connection).await).await.map(drop)
}

/// Deletes some alarms that were parked longer ago than `keep`; returns how many, and whether there may be more.
///
/// # Errors
/// sqlx's.
pub async fn forget_old(database: &Database, keep: Duration) -> Result<(u64, bool), sqlx::Error> {
    let delete = sqlx::query(
        "WITH old AS MATERIALIZED (
             SELECT id FROM parked_alarms
             WHERE parked_at < statement_timestamp() - make_interval(secs => $1) ORDER BY parked_at LIMIT $2
             -- Skips rows that are being parked again, retried or dropped.
             FOR UPDATE SKIP LOCKED)
         DELETE FROM parked_alarms p USING old WHERE p.id = old.id",
    )
    .bind(keep.as_secs_f64())
    .bind(i64::try_from(DELETE_BATCH_SIZE).unwrap_or(i64::MAX));
    let deleted = database.run(async |connection| delete.execute(connection).await).await?.rows_affected();
    Ok((deleted, deleted >= DELETE_BATCH_SIZE))
}

/// Deletes these rows, and records that the operator has dropped them; returns how many existed.
///
/// # Errors
/// sqlx's.
pub async fn drop_rows(database: &Database, ids: &[Uuid], operator: &Operator) -> Result<u64, sqlx::Error> {
    let delete = sqlx::query_scalar(
        "WITH dropped AS MATERIALIZED (
             SELECT id FROM parked_alarms WHERE id = ANY ($1)
             -- In the order in which parking locks them; otherwise the two could deadlock.
             ORDER BY id FOR UPDATE),
         deleted AS (
             DELETE FROM parked_alarms p USING dropped WHERE p.id = dropped.id
             RETURNING p.id, p.reason, p.kind, p.order_id),
         recorded AS (
             INSERT INTO operator_actions (who, why, run, action, alarms)
             SELECT $2, $3, $4, 'parked_dropped',
                    jsonb_agg(jsonb_build_object('id', d.id, 'reason', d.reason, 'kind', d.kind, 'order_id', d.order_id))
             FROM deleted d HAVING count(*) > 0)
         SELECT count(*) FROM deleted",
    )
    .bind(ids)
    .bind(&operator.who)
    .bind(operator.why.as_deref())
    .bind(operator.run);
    let dropped: i64 = database.run(async |connection| delete.fetch_one(connection).await).await?;
    Ok(dropped.unsigned_abs())
}
