//! Postgres: how it is reached, brought up to date, and what its errors mean.
//!
//! Shared by the steps that speak SQL; knows none of their statements.

use std::sync::LazyLock;
use std::time::Duration;

use secrecy::ExposeSecret;
use sqlx::migrate::{Migrate, MigrateError, Migrator};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection, PgPool};
use time::OffsetDateTime;

use crate::config::DatabaseSettings;
use crate::order::Moment;

/// A name of our own, so that a shop that uses sqlx itself keeps its `_sqlx_migrations`.
const MIGRATIONS_TABLE: &str = "order_timeout_migrations";

static MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| {
    let mut migrator = sqlx::migrate!();
    migrator.dangerous_set_table_name(MIGRATIONS_TABLE);
    // A newer worker may have run further migrations; expand-contract keeps them harmless to this one.
    migrator.set_ignore_missing(true);
    migrator
});

/// Why the database cannot be used, in one sentence without the password.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DatabaseFault(pub String);

/// A pool of at most `connections`, with every timeout set that keeps one stuck statement from stopping the worker.
///
/// # Errors
/// [`DatabaseFault`] if the first connection cannot be made.
pub async fn connect(settings: &DatabaseSettings, connections: u32) -> Result<PgPool, DatabaseFault> {
    let options = connect_options(settings)?;
    let place = address(&options);
    let refused = |error: sqlx::Error| DatabaseFault(why_not_connected(&error, &place));
    // Once by hand: a pool would go on trying for `acquire_timeout` and then hide the cause.
    let first = tokio::time::timeout(settings.acquire_timeout, sqlx::PgConnection::connect_with(&options)).await;
    let first = first.map_err(|_| {
        DatabaseFault(format!(
            "the database at {place} did not answer within {:?}; is it running there?",
            settings.acquire_timeout
        ))
    })?;
    // Said goodbye to properly or not, it has served its purpose.
    let _ = first.map_err(refused)?.close().await;
    let pool = PgPoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(settings.acquire_timeout)
        .connect_with(options)
        .await;
    pool.map_err(refused)
}

fn connect_options(settings: &DatabaseSettings) -> Result<PgConnectOptions, DatabaseFault> {
    let parsed = settings.url.expose_secret().parse::<PgConnectOptions>();
    let options = parsed.map_err(|_| DatabaseFault("database.url is not a Postgres address".into()))?;
    let millis = |duration: Duration| duration.as_millis().max(1).to_string();
    Ok(options.application_name("order-timeout").options([
        // sqlx sends no cancel request when a future is dropped: the server must end what nobody waits for.
        ("statement_timeout", millis(settings.statement_timeout)),
        ("lock_timeout", millis(settings.lock_timeout)),
        ("idle_in_transaction_session_timeout", millis(settings.statement_timeout)),
    ]))
}

fn address(options: &PgConnectOptions) -> String {
    let database = options.get_database().unwrap_or("(the user's)");
    format!("{}:{}, database {database:?}", options.get_host(), options.get_port())
}

fn why_not_connected(error: &sqlx::Error, place: &str) -> String {
    match error.as_database_error() {
        Some(fault) => {
            let hint = match fault.code().as_deref() {
                Some("3D000") => "create it with createdb, or correct database.url",
                Some("28P01" | "28000") => "check the user and password in database.url",
                Some("53300") => "it has no connection left; raise max_connections or run fewer workers",
                _ => "correct database.url or mend the database",
            };
            format!("the database at {place} refuses: {}; {hint}", fault.message())
        }
        None => format!("the database at {place} cannot be reached ({error}); is it running there?"),
    }
}

/// Brings the schema up to date. Idempotent; returns the names of what was applied now.
///
/// # Errors
/// [`DatabaseFault`] names the migration.
pub async fn migrate(pool: &PgPool) -> Result<Vec<String>, DatabaseFault> {
    let pending = pending_migrations(pool).await?;
    MIGRATOR.run(pool).await.map_err(|error| DatabaseFault(why_not_migrated(&error)))?;
    Ok(pending)
}

fn why_not_migrated(error: &MigrateError) -> String {
    let hint = match error {
        MigrateError::VersionMismatch(_) => "an applied migration was edited; restore it, migrations are never edited",
        MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _)
            if inner.as_database_error().and_then(sqlx::error::DatabaseError::code).as_deref() == Some("42P07") =>
        {
            "a table of that name is there already; give order-timeout a database or schema of its own (options=-csearch_path%3Dorder_timeout in database.url)"
        }
        _ => "mend the cause and run `order-timeout setup` again",
    };
    format!("the database schema could not be brought up to date: {error}; {hint}")
}

/// Refuses a schema that this version cannot work with.
///
/// # Errors
/// [`DatabaseFault`] counts the migrations that are missing.
pub async fn require_migrated(pool: &PgPool) -> Result<(), DatabaseFault> {
    let pending = pending_migrations(pool).await?;
    let Some(first) = pending.first() else { return Ok(()) };
    let count = pending.len();
    Err(DatabaseFault(format!(
        "the database lacks {count} migration(s), the first: {first:?}; run `order-timeout setup`"
    )))
}

async fn pending_migrations(pool: &PgPool) -> Result<Vec<String>, DatabaseFault> {
    let fault =
        |error: &dyn std::fmt::Display| DatabaseFault(format!("the applied migrations cannot be read: {error}"));
    let exists: bool = sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL")
        .bind(MIGRATIONS_TABLE)
        .fetch_one(pool)
        .await
        .map_err(|error| fault(&error))?;
    let applied = if exists {
        let mut connection = pool.acquire().await.map_err(|error| fault(&error))?;
        connection.list_applied_migrations(MIGRATIONS_TABLE).await.map_err(|error| fault(&error))?
    } else {
        Vec::new()
    };
    let is_pending = |version: i64| !applied.iter().any(|migration| migration.version == version);
    Ok(MIGRATOR.iter().filter(|m| is_pending(m.version)).map(|m| m.description.to_string()).collect())
}

/// A Postgres timestamp as a moment: both count microseconds.
#[must_use]
pub fn moment(time: OffsetDateTime) -> Moment {
    Moment::from_unix_micros(i64::try_from(time.unix_timestamp_nanos() / 1_000).unwrap_or(i64::MAX))
}

/// A moment as a Postgres timestamp; `None` beyond the years the calendar has.
#[must_use]
pub fn timestamp(moment: Moment) -> Option<OffsetDateTime> {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(moment.unix_micros()) * 1_000).ok()
}

/// What kind of trouble an error is, for whoever must decide whether to try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// A lock, a deadlock, a serialization failure, a timeout: try again.
    Transient,
    /// The data at hand: a constraint, a trigger, a value.
    Data,
    /// A statement that was in order when it was prepared is not any more: a table or a right was taken away, or the
    /// trigger of one row is broken. Which of the two, only trying it without rows can tell.
    Broken,
    /// Nothing will work as things stand: away, read-only, out of resources.
    Away,
}

/// Sorts an error by its SQLSTATE (PostgreSQL documentation, appendix A "Error Codes").
#[must_use]
pub fn trouble(error: &sqlx::Error) -> Trouble {
    let Some(code) = error.as_database_error().and_then(|fault| fault.code().map(|code| code.into_owned())) else {
        // Network, pool, protocol: no answer from the database at all.
        return Trouble::Away;
    };
    match code.as_str() {
        // lock_not_available, deadlock_detected, serialization_failure, query_canceled
        "55P03" | "40P01" | "40001" | "57014" => Trouble::Transient,
        // read_only_sql_transaction; admin_shutdown, crash_shutdown, cannot_connect_now
        "25006" | "57P01" | "57P02" | "57P03" => Trouble::Away,
        // syntax error or access rule violation; internal error, data corrupted
        code if ["42", "XX"].contains(&&code[..2]) => Trouble::Broken,
        // connection exception; insufficient resources; system error; invalid authorization, catalog or schema name
        code if ["08", "53", "58", "28", "3D", "3F"].contains(&&code[..2]) => Trouble::Away,
        _ => Trouble::Data,
    }
}
