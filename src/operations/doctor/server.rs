//! What the database says about itself: its version, the connections that it has left, and what was closed lately.
//!
//! Reads only, with few statements; judges nothing (`database.rs`, `workers.rs`).

use std::time::Duration;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::order::Timestamp;
use order_timeout_core::payment::{Attempt, Currency, Money};
use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::postgres::{Database, one_line};

/// The server and our role.
#[derive(Debug, Clone, Default)]
pub(super) struct Facts {
    pub version_number: i32,
    pub version: String,
    pub role: String,
    /// What the role may not use and without which it cannot be known which migrations are applied, as GRANT names it.
    pub forbidden: Vec<String>,
    /// Connections that this role can still open in this database.
    pub connections_left: i64,
    /// What ends them: `max_connections`, or a limit of the role or the database.
    pub connections_limited_by: String,
}

/// The type of another role's session is NULL to a role without `pg_read_all_stats`. Its database and its role are not,
/// and only a client's session has both.
const FACTS: &str = "
WITH sessions AS (
    SELECT usename, datname FROM pg_stat_activity
    WHERE coalesce(backend_type = 'client backend', datid IS NOT NULL AND usesysid IS NOT NULL)),
used AS (
    SELECT count(*) AS of_server, count(*) FILTER (WHERE usename = session_user) AS of_role,
           count(*) FILTER (WHERE datname = current_database()) AS of_database
    FROM sessions),
role AS (SELECT * FROM pg_roles WHERE rolname = session_user),
database AS (SELECT * FROM pg_database WHERE datname = current_database()),
reserved AS (
    SELECT coalesce(sum(setting::bigint), 0)::bigint AS connections FROM pg_settings
    WHERE name IN ('superuser_reserved_connections', 'reserved_connections')),
limits AS (
    SELECT 'max_connections'::text AS name,
           current_setting('max_connections')::bigint - CASE WHEN rolsuper THEN 0 ELSE reserved.connections END - of_server
               AS left_over
    FROM used, role, reserved
    UNION ALL SELECT 'CONNECTION LIMIT of role ' || rolname, rolconnlimit - of_role FROM used, role
    WHERE rolconnlimit >= 0 AND NOT rolsuper
    UNION ALL SELECT 'CONNECTION LIMIT of database ' || datname, datconnlimit - of_database FROM used, database, role
    WHERE datconnlimit >= 0 AND NOT rolsuper)
SELECT current_setting('server_version_num')::integer AS version_number,
       current_setting('server_version') AS version, quote_ident(session_user) AS role,
       ARRAY(
           SELECT CASE WHEN has_schema_privilege(n.oid, 'USAGE') THEN format('SELECT ON %I.%I', n.nspname, c.relname)
                       ELSE format('USAGE ON SCHEMA %I', n.nspname) END
           FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
           WHERE c.relname = 'order_timeout_migrations'
             AND coalesce(to_regclass(c.relname) = c.oid, true)
             AND NOT (has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'))
       ) AS forbidden,
       left_over AS connections_left, name AS connections_limited_by
FROM limits ORDER BY left_over LIMIT 1";

/// # Errors
/// One sentence.
pub(super) async fn facts(database: &Database) -> Result<Facts, String> {
    let row = database.run(async |connection| sqlx::query(FACTS).fetch_one(connection).await).await;
    let read = |row: PgRow| {
        Ok(Facts {
            version_number: row.try_get("version_number")?,
            version: row.try_get("version")?,
            role: row.try_get("role")?,
            forbidden: row.try_get("forbidden")?,
            connections_left: row.try_get("connections_left")?,
            connections_limited_by: row.try_get("connections_limited_by")?,
        })
    };
    row.and_then(read).map_err(|error| one_line(&error))
}

/// How orders of the default table were closed lately.
#[derive(Debug, Clone, Default)]
pub(super) struct Closes {
    pub closed: i64,
    pub swept: i64,
    /// In how many different minutes the sweep closed them.
    pub swept_minutes: i64,
    /// When the sweep closed the last of them.
    pub last_swept: Option<Timestamp>,
    /// How long ago that was, and the mean time between two of them.
    pub last_swept_ago: Duration,
    pub mean_gap: Duration,
    /// How many were closed since then.
    pub closed_since: i64,
}

const CLOSES: &str = "
WITH closes AS (
    SELECT closed_at, closed_by = 'sweep' AS is_swept FROM orders
    WHERE status = 'closed' AND closed_at > clock_timestamp() - make_interval(secs => $1)),
swept AS (
    SELECT count(*) AS swept, count(DISTINCT date_trunc('minute', closed_at)) AS swept_minutes,
           min(closed_at) AS first, max(closed_at) AS last
    FROM closes WHERE is_swept)
SELECT swept, swept_minutes, last, (SELECT count(*) FROM closes) AS closed, (SELECT count(*) FROM closes WHERE closed_at > last) AS closed_since,
       coalesce(greatest(extract(epoch FROM clock_timestamp() - last), 0), 0)::float8 AS ago_s,
       coalesce(extract(epoch FROM last - first) / nullif(swept - 1, 0), 0)::float8 AS gap_s
FROM swept";

/// What was closed in the last `within`.
///
/// # Errors
/// One sentence.
pub(super) async fn closes(database: &Database, within: Duration) -> Result<Closes, String> {
    let select = sqlx::query(CLOSES).bind(within.as_secs_f64());
    let row = database.run(async |connection| select.fetch_one(connection).await).await;
    let read = |row: PgRow| {
        let last: Option<Timestamptz> = row.try_get("last")?;
        Ok(Closes {
            closed: row.try_get("closed")?,
            swept: row.try_get("swept")?,
            swept_minutes: row.try_get("swept_minutes")?,
            last_swept: last.map(|Timestamptz(last)| last),
            last_swept_ago: Duration::from_secs_f64(row.try_get("ago_s")?),
            mean_gap: Duration::from_secs_f64(row.try_get("gap_s")?),
            closed_since: row.try_get("closed_since")?,
        })
    };
    row.and_then(read).map_err(|error| one_line(&error))
}

/// Whether an event was published and is not deleted yet; not if that cannot be read.
pub(super) async fn has_sent_events(database: &Database) -> bool {
    let select = sqlx::query_scalar("SELECT EXISTS (SELECT FROM event_outbox WHERE sent_at IS NOT NULL)");
    database.run(async |connection| select.fetch_one(connection).await).await.unwrap_or(false)
}

/// Of the hundred unpaid orders that fall due last, so that the deadline index finds them. Younger than what a provider forgets.
const NEWEST_ATTEMPTS: &str = "SELECT DISTINCT ON (p.provider) p.provider, p.reference, p.amount_minor, p.currency
    FROM (SELECT id FROM orders WHERE status = 'unpaid' AND expires_at > now() ORDER BY expires_at DESC LIMIT 100) AS o
    JOIN payment_attempts p ON p.order_id = o.id::text
    WHERE p.state = 'open' AND p.created_at > now() - interval '1 hour'
    ORDER BY p.provider, p.created_at DESC";

/// The newest attempt of each provider. None without such tables, or the right to read them.
pub(super) async fn newest_attempts(database: &Database) -> Vec<Attempt> {
    let rows = database.run(async |connection| sqlx::query(NEWEST_ATTEMPTS).fetch_all(connection).await).await;
    rows.unwrap_or_default().iter().filter_map(|row| read_attempt(row).ok()).collect()
}

fn read_attempt(row: &PgRow) -> anyhow::Result<Attempt> {
    let currency: String = row.try_get("currency")?;
    let money = Money { amount_minor: row.try_get("amount_minor")?, currency: Currency::new(&currency)? };
    Ok(Attempt { provider: row.try_get("provider")?, reference: row.try_get("reference")?, money })
}
