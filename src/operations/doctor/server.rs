//! What the database says about itself: its version, and the connections that it has left.
//!
//! Reads only, with few statements; judges nothing (`database.rs`, `workers.rs`).

use order_timeout_core::payment::{Attempt, Currency, Money};
use serde::Deserialize;
use sqlx::Row;
use sqlx::postgres::PgRow;
use sqlx::types::Json;

use crate::postgres::{Database, one_line};

/// The server and our role.
#[derive(Debug, Clone, Default, Deserialize)]
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
SELECT jsonb_build_object(
       'version_number', current_setting('server_version_num')::integer,
       'version', current_setting('server_version'), 'role', quote_ident(session_user),
       'forbidden', ARRAY(
           SELECT CASE WHEN has_schema_privilege(n.oid, 'USAGE') THEN format('SELECT ON %I.%I', n.nspname, c.relname)
                       ELSE format('USAGE ON SCHEMA %I', n.nspname) END
           FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
           WHERE c.relname = 'order_timeout_migrations'
             AND coalesce(to_regclass(c.relname) = c.oid, true)
             AND NOT (has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT'))),
       'connections_left', left_over, 'connections_limited_by', name)
FROM limits ORDER BY left_over LIMIT 1";

/// # Errors
/// One sentence.
pub(super) async fn facts(database: &Database) -> Result<Facts, String> {
    let read = database.run(async |connection| sqlx::query_scalar(FACTS).fetch_one(connection).await).await;
    read.map(|Json(facts)| facts).map_err(|error| one_line(&error))
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
