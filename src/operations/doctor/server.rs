//! What the database says about itself: its settings, our role, our tables, its sessions, and what was closed lately.
//!
//! Reads only, with few statements; judges nothing (`database.rs`).

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
    /// Rights of the role on the whole server, by the words of ALTER ROLE.
    pub server_rights: Vec<String>,
    /// Settings with which a commit may be lost, by name and value.
    pub unsafe_settings: Vec<String>,
    pub is_autovacuum_on: bool,
    /// The age of the oldest transaction id in this database.
    pub transaction_age: i64,
    /// Connections that this role can still open in this database.
    pub connections_left: i64,
    /// What ends them: `max_connections`, or a limit of the role or the database.
    pub connections_limited_by: String,
    /// Whether the role sees the sessions of others.
    pub sees_sessions: bool,
    /// Whether there are sessions of others.
    pub has_other_sessions: bool,
}

const FACTS: &str = "
WITH used AS (
    SELECT count(*) FILTER (WHERE backend_type = 'client backend') AS of_server,
           count(*) FILTER (WHERE usename = session_user AND backend_type = 'client backend') AS of_role,
           count(*) FILTER (WHERE datname = current_database() AND backend_type = 'client backend') AS of_database,
           count(*) FILTER (WHERE datname = current_database() AND usename <> session_user) > 0 AS has_others
    FROM pg_stat_activity),
role AS (SELECT * FROM pg_roles WHERE rolname = session_user),
database AS (SELECT * FROM pg_database WHERE datname = current_database()),
limits AS (
    SELECT 'max_connections'::text AS name,
           current_setting('max_connections')::bigint
           - CASE WHEN rolsuper THEN 0 ELSE current_setting('superuser_reserved_connections')::bigint END - of_server AS left_over
    FROM used, role
    UNION ALL SELECT 'CONNECTION LIMIT of role ' || rolname, rolconnlimit - of_role FROM used, role
    WHERE rolconnlimit >= 0 AND NOT rolsuper
    UNION ALL SELECT 'CONNECTION LIMIT of database ' || datname, datconnlimit - of_database FROM used, database, role
    WHERE datconnlimit >= 0 AND NOT rolsuper)
SELECT current_setting('server_version_num')::integer AS version_number,
       current_setting('server_version') AS version,
       session_user::text AS role,
       array_remove(ARRAY[
           CASE WHEN rolsuper THEN 'SUPERUSER' END, CASE WHEN rolcreaterole THEN 'CREATEROLE' END,
           CASE WHEN rolcreatedb THEN 'CREATEDB' END, CASE WHEN rolreplication THEN 'REPLICATION' END], NULL) AS server_rights,
       array_remove(ARRAY[
           CASE WHEN current_setting('fsync') = 'off' THEN 'fsync' END,
           CASE WHEN current_setting('full_page_writes') = 'off' THEN 'full_page_writes' END,
           CASE WHEN current_setting('synchronous_commit') = 'off' THEN 'synchronous_commit' END], NULL) AS unsafe_settings,
       current_setting('autovacuum') = 'on' AS is_autovacuum_on,
       age(datfrozenxid)::bigint AS transaction_age,
       (SELECT left_over FROM limits ORDER BY left_over LIMIT 1) AS connections_left,
       (SELECT name FROM limits ORDER BY left_over LIMIT 1) AS connections_limited_by,
       rolsuper OR pg_has_role('pg_read_all_stats', 'USAGE') AS sees_sessions,
       has_others AS has_other_sessions
FROM role, database, used";

/// # Errors
/// One sentence.
pub(super) async fn facts(database: &Database) -> Result<Facts, String> {
    let row = database.run(async |connection| sqlx::query(FACTS).fetch_one(connection).await).await;
    let read = |row: PgRow| {
        Ok(Facts {
            version_number: row.try_get("version_number")?,
            version: row.try_get("version")?,
            role: row.try_get("role")?,
            server_rights: row.try_get("server_rights")?,
            unsafe_settings: row.try_get("unsafe_settings")?,
            is_autovacuum_on: row.try_get("is_autovacuum_on")?,
            transaction_age: row.try_get("transaction_age")?,
            connections_left: row.try_get("connections_left")?,
            connections_limited_by: row.try_get("connections_limited_by")?,
            sees_sessions: row.try_get("sees_sessions")?,
            has_other_sessions: row.try_get("has_other_sessions")?,
        })
    };
    row.and_then(read).map_err(|error| one_line(&error))
}

/// A table and its statistics.
#[derive(Debug, Clone)]
pub(super) struct Table {
    pub name: String,
    pub is_unlogged: bool,
    /// Whether `autovacuum_enabled` is off for it.
    pub is_left_out: bool,
    pub live_rows: i64,
    pub dead_rows: i64,
    /// Seconds since it was vacuumed.
    pub vacuumed_s: Option<f64>,
}

const TABLES: &str = "
SELECT c.oid::regclass::text AS name, c.relpersistence = 'u' AS is_unlogged,
       EXISTS (SELECT FROM unnest(c.reloptions) AS o WHERE lower(o) IN ('autovacuum_enabled=false', 'autovacuum_enabled=off'))
           AS is_left_out,
       coalesce(pg_stat_get_live_tuples(c.oid), 0) AS live_rows, coalesce(pg_stat_get_dead_tuples(c.oid), 0) AS dead_rows,
       extract(epoch FROM clock_timestamp()
           - greatest(pg_stat_get_last_vacuum_time(c.oid), pg_stat_get_last_autovacuum_time(c.oid)))::float8 AS vacuumed_s
FROM unnest($1::text[]) AS n(t) JOIN pg_class c ON c.oid = to_regclass(n.t) ORDER BY 1";

/// # Errors
/// One sentence.
pub(super) async fn tables(database: &Database, names: &[&str]) -> Result<Vec<Table>, String> {
    let select = sqlx::query(TABLES).bind(names);
    let rows = database.run(async |connection| select.fetch_all(connection).await).await;
    let read = |row: &PgRow| {
        Ok(Table {
            name: row.try_get("name")?,
            is_unlogged: row.try_get("is_unlogged")?,
            is_left_out: row.try_get("is_left_out")?,
            live_rows: row.try_get("live_rows")?,
            dead_rows: row.try_get("dead_rows")?,
            vacuumed_s: row.try_get("vacuumed_s")?,
        })
    };
    rows.and_then(|rows| rows.iter().map(read).collect()).map_err(|error| one_line(&error))
}

/// A transaction that is open for long.
#[derive(Debug, Clone)]
pub(super) struct OpenTransaction {
    /// The process of its session; `None` for a prepared transaction.
    pub pid: Option<i32>,
    /// The session's user and application, or the prepared transaction's name.
    pub of: String,
    /// Its state in `pg_stat_activity`, or `prepared`.
    pub state: String,
    pub age_s: f64,
}

const OPEN_TRANSACTIONS: &str = "
SELECT pid, concat_ws(' ', usename, nullif(application_name, '')) AS of, coalesce(state, 'unknown') AS state,
       extract(epoch FROM clock_timestamp() - xact_start)::float8 AS age_s
FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
  AND xact_start < clock_timestamp() - make_interval(secs => $1)
UNION ALL
SELECT NULL, gid, 'prepared', extract(epoch FROM clock_timestamp() - prepared)::float8
FROM pg_prepared_xacts WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => $1)
ORDER BY age_s DESC LIMIT 5";

/// The longest of them, in this database.
///
/// # Errors
/// One sentence.
pub(super) async fn open_transactions(
    database: &Database,
    longer_than: Duration,
) -> Result<Vec<OpenTransaction>, String> {
    let select = sqlx::query(OPEN_TRANSACTIONS).bind(longer_than.as_secs_f64());
    let rows = database.run(async |connection| select.fetch_all(connection).await).await;
    let read = |row: &PgRow| {
        Ok(OpenTransaction {
            pid: row.try_get("pid")?,
            of: row.try_get("of")?,
            state: row.try_get("state")?,
            age_s: row.try_get("age_s")?,
        })
    };
    rows.and_then(|rows| rows.iter().map(read).collect()).map_err(|error| one_line(&error))
}

/// How many orders of the default table were closed in the last `within`: by the sweep, and in all.
///
/// # Errors
/// One sentence.
pub(super) async fn closes(database: &Database, within: Duration) -> Result<(i64, i64), String> {
    let select = sqlx::query(
        "SELECT count(*) FILTER (WHERE closed_by = 'sweep') AS swept, count(*) AS closed FROM orders
         WHERE status = 'closed' AND closed_at > clock_timestamp() - make_interval(secs => $1)",
    );
    let select = select.bind(within.as_secs_f64());
    let row = database.run(async |connection| select.fetch_one(connection).await).await;
    row.and_then(|row| Ok((row.try_get("swept")?, row.try_get("closed")?))).map_err(|error| one_line(&error))
}

/// Whether an event was published and is not deleted yet; not if that cannot be read.
pub(super) async fn has_sent_events(database: &Database) -> bool {
    let select = sqlx::query_scalar("SELECT EXISTS (SELECT FROM event_outbox WHERE sent_at IS NOT NULL)");
    database.run(async |connection| select.fetch_one(connection).await).await.unwrap_or(false)
}

/// The database's time, between our own before and after it.
///
/// # Errors
/// One sentence.
pub(super) async fn now(database: &Database) -> Result<Timestamp, String> {
    let select = sqlx::query_scalar("SELECT clock_timestamp()");
    let now = database.run(async |connection| select.fetch_one(connection).await).await;
    now.map(|Timestamptz(now)| now).map_err(|error| one_line(&error))
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
