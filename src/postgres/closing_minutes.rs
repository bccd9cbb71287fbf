//! The table `closing_minutes`: what all workers together have closed in each minute, and what was known to fall due.
//!
//! Stores; judges nothing. A few rows a second for each kind that closes orders, none of them in a close's transaction.

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::brake::{Counts, Minute, MinuteCounts, ProviderCounts, Woken, unforeseen};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::Timestamp;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

/// How long minutes are kept: a week tells what is usual on each of its days.
pub const KEPT_MINUTES: Minute = 7 * 24 * 60;

/// In the order of the minutes, so that two workers cannot deadlock.
const ADD_DUE: &str = "
INSERT INTO closing_minutes AS m (kind, minute, closed_of_due)
SELECT $1, to_timestamp(d.minute * 60), d.closed FROM unnest($2::bigint[], $3::bigint[]) AS d (minute, closed) ORDER BY 2
ON CONFLICT (kind, minute) DO UPDATE SET closed_of_due = m.closed_of_due + excluded.closed_of_due
RETURNING (extract(epoch FROM minute) / 60)::bigint AS minute, closed_of_due, foreseen";

const ADD: &str = "
INSERT INTO closing_minutes AS m (kind, minute, closed, unforeseen, woken_closed, woken_paid, asked, asked_paid, asked_unknown)
VALUES ($1, to_timestamp($2::bigint * 60), $3, $4, $5, $6, $7, $8, $9)
ON CONFLICT (kind, minute) DO UPDATE SET
    closed = m.closed + excluded.closed, unforeseen = m.unforeseen + excluded.unforeseen,
    woken_closed = m.woken_closed + excluded.woken_closed, woken_paid = m.woken_paid + excluded.woken_paid,
    asked = m.asked + excluded.asked, asked_paid = m.asked_paid + excluded.asked_paid,
    asked_unknown = m.asked_unknown + excluded.asked_unknown";

const SINCE: &str = "
SELECT (extract(epoch FROM minute) / 60)::bigint AS minute, closed, unforeseen, woken_closed, woken_paid, foreseen, closed_of_due,
       asked, asked_paid, asked_unknown
FROM closing_minutes WHERE kind = $1 AND minute >= to_timestamp($2::bigint * 60) ORDER BY minute";

const FORESEE: &str = "
INSERT INTO closing_minutes AS m (kind, minute, foreseen)
SELECT $1, to_timestamp(f.minute * 60), f.orders FROM unnest($2::bigint[], $3::bigint[]) AS f (minute, orders) ORDER BY 2
ON CONFLICT (kind, minute) DO UPDATE SET foreseen = greatest(m.foreseen, excluded.foreseen)";

const FORGET: &str = "DELETE FROM closing_minutes WHERE kind = $1 AND minute < to_timestamp($2::bigint * 60)";

const RESUMED: &str = "SELECT max(resumed_at) AS resumed_at FROM closing_pauses WHERE resumed_at IS NOT NULL AND (kind IS NULL OR kind = $1)";

/// Adds what a worker has counted, in the minute `now`.
///
/// # Errors
/// sqlx's.
pub async fn add(connection: &mut PgConnection, kind: &Kind, counts: &Counts, now: Minute) -> Result<(), sqlx::Error> {
    let mut not_foreseen = 0;
    if !counts.closed_by_due.is_empty() {
        // What fell due longer ago was not foreseen in any case; and a deadline may be before the calendar's begin.
        let minutes = counts.closed_by_due.keys().map(|minute| (*minute).clamp(now - KEPT_MINUTES, now + 1));
        let mut due: Vec<(Minute, u64)> = minutes.zip(counts.closed_by_due.values().copied()).collect();
        due.dedup_by(|(minute, closed), (kept, sum)| {
            let is_same = minute == kept;
            *sum += if is_same { *closed } else { 0 };
            is_same
        });
        let (minutes, closed): (Vec<i64>, Vec<i64>) =
            due.iter().map(|(minute, closed)| (*minute, signed(*closed))).unzip();
        let rows =
            sqlx::query(ADD_DUE).bind(kind.as_str()).bind(&minutes).bind(&closed).fetch_all(&mut *connection).await?;
        for row in rows {
            let minute: Minute = row.try_get("minute")?;
            let added = due.iter().find(|(known, _)| *known == minute).map_or(0, |(_, closed)| *closed);
            let foreseen: Option<i64> = row.try_get("foreseen")?;
            not_foreseen += unforeseen(added, count(&row, "closed_of_due")?, foreseen.map(i64::unsigned_abs));
        }
    }
    let closed: u64 = counts.closed_by_due.values().sum();
    let add = sqlx::query(ADD).bind(kind.as_str()).bind(now).bind(signed(closed)).bind(signed(not_foreseen));
    let ProviderCounts { asked, paid, unknown } = counts.answers;
    let add = add.bind(signed(counts.woken.closed)).bind(signed(counts.woken.paid));
    add.bind(signed(asked)).bind(signed(paid)).bind(signed(unknown)).execute(connection).await.map(drop)
}

/// The minutes from `since` on.
///
/// # Errors
/// sqlx's.
pub async fn read_since(
    connection: &mut PgConnection,
    kind: &Kind,
    since: Minute,
) -> Result<Vec<MinuteCounts>, sqlx::Error> {
    let rows = sqlx::query(SINCE).bind(kind.as_str()).bind(since).fetch_all(connection).await?;
    rows.iter().map(read).collect()
}

/// Records how many orders are known to fall due in these minutes.
///
/// # Errors
/// sqlx's.
pub async fn foresee(connection: &mut PgConnection, kind: &Kind, due: &[(Minute, u64)]) -> Result<(), sqlx::Error> {
    let (minutes, orders): (Vec<i64>, Vec<i64>) = due.iter().map(|(minute, orders)| (*minute, signed(*orders))).unzip();
    sqlx::query(FORESEE).bind(kind.as_str()).bind(minutes).bind(orders).execute(connection).await.map(drop)
}

/// Deletes what is older than [`KEPT_MINUTES`].
///
/// # Errors
/// sqlx's.
pub async fn forget_old(connection: &mut PgConnection, kind: &Kind, now: Minute) -> Result<(), sqlx::Error> {
    sqlx::query(FORGET).bind(kind.as_str()).bind(now - KEPT_MINUTES).execute(connection).await.map(drop)
}

/// When closing of this kind was last resumed.
///
/// # Errors
/// sqlx's.
pub async fn last_resumed(connection: &mut PgConnection, kind: &Kind) -> Result<Option<Timestamp>, sqlx::Error> {
    let row = sqlx::query(RESUMED).bind(kind.as_str()).fetch_one(connection).await?;
    let resumed: Option<Timestamptz> = row.try_get("resumed_at")?;
    Ok(resumed.map(|Timestamptz(at)| at))
}

fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn count(row: &PgRow, column: &str) -> Result<u64, sqlx::Error> {
    row.try_get(column).map(i64::unsigned_abs)
}

fn read(row: &PgRow) -> Result<MinuteCounts, sqlx::Error> {
    let foreseen: Option<i64> = row.try_get("foreseen")?;
    Ok(MinuteCounts {
        minute: row.try_get("minute")?,
        closed: count(row, "closed")?,
        unforeseen: count(row, "unforeseen")?,
        woken: Woken { closed: count(row, "woken_closed")?, paid: count(row, "woken_paid")? },
        foreseen: foreseen.map(i64::unsigned_abs),
        closed_of_due: count(row, "closed_of_due")?,
        answers: ProviderCounts {
            asked: count(row, "asked")?,
            paid: count(row, "asked_paid")?,
            unknown: count(row, "asked_unknown")?,
        },
    })
}
