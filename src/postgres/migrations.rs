//! Brings the schema up to date, and refuses one that this version cannot work with.
//!
//! The tables are in `migrations/`, of which none is edited after a release. The functions are in `sql/functions/`, and those
//! of the default tables that are rendered from their mapping; each setup replaces all of them.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use sqlx::migrate::{Migrate, MigrateError, Migration, MigrationType, Migrator};
use sqlx::{AssertSqlSafe, Connection, PgConnection, SqlSafeStr};

use super::connect::{address, connect_options, first_connection};
use super::error::{DatabaseError, is_forbidden, one_line, sqlstate};
use super::test_clock::from_clock_of_owner;
use super::{Database, ErrorClass, Target, classify, kind_functions};
use crate::config::DatabaseSettings;
use crate::mapping::{default_tables, quote};

/// Our own name, so that a shop that uses sqlx itself keeps its `_sqlx_migrations`.
const MIGRATIONS_TABLE: &str = "order_timeout_migrations";

/// Name and SQL of each file, in their order.
const MIGRATIONS: &[(&str, &str)] = &include!(concat!(env!("OUT_DIR"), "/migrations.rs"));

static MIGRATOR: LazyLock<Migrator> = LazyLock::new(|| {
    let mut migrator = Migrator::with_migrations(MIGRATIONS.iter().copied().map(migration).collect());
    migrator.dangerous_set_table_name(MIGRATIONS_TABLE);
    // A newer worker may have run further migrations; expand-contract keeps them compatible with this one.
    migrator.set_ignore_missing(true);
    migrator
});

/// The path of our functions, as an expression. A database for tests has its own clock before that of Postgres.
macro_rules! search_path {
    () => {
        concat!(
            "concat_ws(', ', quote_ident(current_schema()), (SELECT 'order_timeout_clock, pg_catalog' ",
            from_clock_of_owner!(),
            "), 'pg_temp')"
        )
    };
}

/// One query of several statements, which is one transaction. Each file finds what it uses in those before it.
///
/// Functions get the `search_path` of this transaction (`SET search_path FROM CURRENT`), so that they work on the tables of
/// this schema, whatever that of their caller is: a shop may have tables of the same names. `pg_temp` is last, so that no
/// temporary table takes the place of one of ours. The lock is there because Postgres refuses one of two sessions that
/// replace a function at once. Rights that were granted on a function stay.
const FUNCTIONS: &str = concat!(
    "SELECT pg_advisory_xact_lock(hashtextextended('order-timeout setup ' || current_schema(), 0));",
    "SELECT set_config('search_path', ",
    search_path!(),
    ", true);",
    include_str!("../../sql/functions/effective_status.sql"),
    include_str!("../../sql/functions/order_keys.sql"),
    include_str!("../../sql/functions/move_deadline.sql"),
    include_str!("../../sql/functions/late_money.sql"),
    include_str!("../../sql/functions/orders_to_ask_about.sql"),
    include_str!("../../sql/functions/payment_received.sql"),
    include_str!("../../sql/functions/settle_asked_order.sql"),
    include_str!("../../sql/functions/paid_without_report.sql"),
    include_str!("../../sql/functions/release.sql"),
);

fn migration((name, sql): (&'static str, &'static str)) -> Migration {
    let (version, description) = name.split_once('_').expect("a test checks the names");
    let version = version.parse().expect("a test checks the names");
    Migration::new(version, description.replace('_', " ").into(), MigrationType::Simple, sql.into_sql_str(), false)
}

/// The name of the migration that creates this table, and what stands between its parentheses.
fn table(name: &str) -> (&'static str, &'static str) {
    let begin = format!("CREATE TABLE {name} (\n");
    let found = MIGRATIONS.iter().find_map(|(file, sql)| Some((*file, sql.split_once(&begin)?.1)));
    let (file, rest) = found.expect("a test looks for every table that a worker needs");
    (file, rest.split("\n);").next().unwrap_or_default())
}

/// The name of the migration that creates this table of ours.
pub fn creates(name: &str) -> &'static str {
    table(name).0
}

/// The columns that this table of ours was created with: each begins a line, in small letters.
pub fn columns_of(name: &str) -> Vec<&'static str> {
    let begins = table(name).1.lines().filter_map(|line| line.strip_prefix("    ")?.split(' ').next());
    begins.filter(|word| word.starts_with(|first: char| first.is_ascii_lowercase())).collect()
}

/// An index as its migration creates it.
#[derive(Debug)]
pub struct NewIndex {
    statement: &'static str,
    pub table: &'static str,
    pub first_column: &'static str,
    pub is_unique: bool,
    /// A part of its condition; empty if it has none.
    pub condition: &'static str,
}

impl NewIndex {
    /// The statement that creates it while others write.
    pub fn create_concurrently(&self) -> String {
        self.statement.replacen("INDEX ", "INDEX CONCURRENTLY ", 1)
    }
}

/// The index of this name.
pub fn index(name: &str) -> NewIndex {
    let named = format!("INDEX {name} ON ");
    let mut statements = MIGRATIONS.iter().flat_map(|(_, sql)| sql.lines()).filter_map(|line| line.strip_suffix(';'));
    let found = statements.find_map(|statement| Some((statement, statement.split_once(&named)?.1)));
    let (statement, rest) = found.expect("a test looks for every index that a worker needs");
    let (table, columns) = rest.split_once(" (").unwrap_or((rest, ""));
    let condition = rest.split_once(" WHERE ").map_or("", |(_, condition)| condition);
    NewIndex {
        statement,
        table,
        first_column: columns.split([',', ')']).next().unwrap_or_default(),
        is_unique: statement.starts_with("CREATE UNIQUE"),
        // Postgres writes a comparison with a word in its own way.
        condition: condition.split('\'').nth(1).unwrap_or(condition),
    }
}

/// Identifies connections that change the schema, which has no time limit.
const SETUP_NAME: &str = "order-timeout setup";

/// How long a schema change may wait for a table lock. Closing waits behind it for as long.
const SETUP_LOCK_TIMEOUT: &str = "2s";

/// Brings the schema up to date. Idempotent; returns the names of the migrations that were applied now.
///
/// # Errors
/// [`DatabaseError`] names the migration.
pub async fn migrate(settings: &DatabaseSettings) -> Result<Vec<String>, DatabaseError> {
    let (mut connection, pending) = connect_for_setup(settings).await?;
    MIGRATOR.run(&mut connection).await.map_err(|error| DatabaseError(why_not_migrated(&error)))?;
    let replaced = sqlx::raw_sql(AssertSqlSafe(functions())).execute(&mut connection).await;
    if let Err(error) = replaced
        && !is_lack_of_table(&error)
    {
        return Err(DatabaseError(why_not_migrated(&error.into())));
    }
    // The migrations are committed, so an error while closing is ignored.
    let _ = connection.close().await;
    Ok(pending)
}

/// Without the worker's statement timeout, because a migration may take long. But with a lock timeout: all workers wait behind a
/// migration that waits for a table lock. Returns also which migrations are pending there.
async fn connect_for_setup(settings: &DatabaseSettings) -> Result<(PgConnection, Vec<String>), DatabaseError> {
    let options = connect_options(settings)?.application_name(SETUP_NAME);
    let parameters = [("lock_timeout", SETUP_LOCK_TIMEOUT.to_owned())];
    let (mut connection, _) = first_connection(&options, settings, parameters).await?;
    let pending = pending_migrations(&mut connection).await?;
    Ok((connection, pending))
}

/// `undefined_table`, `undefined_object`: a shop with a table of its own may have dropped ours. What a worker lacks is named by the
/// inspection of the schema.
fn is_lack_of_table(error: &sqlx::Error) -> bool {
    matches!(sqlstate(error).as_deref(), Some("42P01" | "42704"))
}

fn functions() -> String {
    [FUNCTIONS, &kind_functions::creates(&default_tables::rendered().functions)].concat()
}

/// What [`migrate`] would run on this database now, for a tool that runs it in one transaction. A worker finds the migrations
/// recorded as if `migrate` had run them.
///
/// # Errors
/// [`DatabaseError`].
pub async fn script(settings: &DatabaseSettings) -> Result<String, DatabaseError> {
    let (mut connection, pending) = connect_for_setup(settings).await?;
    let path: Option<String> =
        sqlx::query_scalar(concat!("SELECT ", search_path!(), " WHERE current_schema() IS NOT NULL"))
            .fetch_optional(&mut connection)
            .await
            .map_err(|error| unreadable_migrations(&error))?;
    let path = path.ok_or_else(|| {
        DatabaseError(format!("search_path in database.url names no schema that exists; {NO_SCHEMA_HINT}"))
    })?;
    let _ = connection.close().await;
    let mut script = format!(
        "-- order-timeout {}: what `order-timeout setup` would run. One transaction, of the schema's owner.\nSELECT set_config('order_timeout.search_path', current_setting('search_path'), true);\nSET LOCAL search_path = {path};\nDO $$ BEGIN IF current_setting('search_path') NOT LIKE '%pg_temp' THEN RAISE 'run this in one transaction, such as with psql -1'; END IF; END $$;\nCREATE TABLE IF NOT EXISTS {MIGRATIONS_TABLE} (version bigint PRIMARY KEY, description text NOT NULL, installed_on timestamptz NOT NULL DEFAULT now(), success boolean NOT NULL, checksum bytea NOT NULL, execution_time bigint NOT NULL);\n",
        env!("ORDER_TIMEOUT_VERSION")
    );
    for migration in MIGRATOR.iter().filter(|migration| pending.iter().any(|name| *name == *migration.description)) {
        let checksum: String = migration.checksum.iter().map(|byte| format!("{byte:02x}")).collect();
        script += &format!(
            "\n-- {description}\n{sql}\nINSERT INTO {MIGRATIONS_TABLE} (version, description, success, checksum, execution_time) VALUES ({version}, {named}, true, '\\x{checksum}', 0);\n",
            description = migration.description,
            sql = migration.sql.as_str(),
            version = migration.version,
            named = quote::literal(&migration.description),
        );
    }
    // The tool writes its own record in the same transaction.
    Ok(script
        + "\n"
        + &functions().replace("SET search_path FROM CURRENT", &format!("SET search_path = {path}"))
        + "\nSELECT set_config('search_path', current_setting('order_timeout.search_path'), true);")
}

/// What setup creates anew, and its definition with its rights.
const DEFINED: &str = "
    SELECT concat('function ', p.proname, '(', pg_get_function_identity_arguments(p.oid), ')'),
           concat(pg_get_functiondef(p.oid), p.proacl)
    FROM pg_proc p WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.prokind = 'f'
    UNION ALL
    SELECT concat('view ', c.relname), pg_get_viewdef(c.oid)
    FROM pg_class c WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND c.relkind = 'v'
    UNION ALL
    SELECT concat('trigger ', t.tgname), pg_get_triggerdef(t.oid)
    FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
    WHERE c.relnamespace = quote_ident(current_schema())::regnamespace AND NOT t.tgisinternal";

/// How this database differs from what [`migrate`] would leave behind, in words: migrations that are pending; without
/// any, functions, views and triggers. Changes nothing: they are replaced in a transaction that is rolled back.
///
/// # Errors
/// [`DatabaseError`].
pub async fn differences(settings: &DatabaseSettings) -> Result<Vec<String>, DatabaseError> {
    let (mut connection, pending) = connect_for_setup(settings).await?;
    if !pending.is_empty() {
        return Ok(pending.iter().map(|name| format!("the migration {name:?} is missing")).collect());
    }
    let other = match other_definitions(&mut connection).await {
        Ok(other) => other,
        Err(error) if is_lack_of_table(&error) => Vec::new(),
        Err(error) => return Err(DatabaseError(why_not_migrated(&error.into()))),
    };
    let _ = connection.close().await;
    Ok(other.iter().map(|name| format!("the {name} is not as this version creates it")).collect())
}

async fn other_definitions(connection: &mut PgConnection) -> Result<Vec<String>, sqlx::Error> {
    let mut transaction = connection.begin().await?;
    let before: BTreeMap<String, String> =
        sqlx::query_as(DEFINED).fetch_all(&mut *transaction).await?.into_iter().collect();
    sqlx::raw_sql(AssertSqlSafe(functions())).execute(&mut *transaction).await?;
    let after: Vec<(String, String)> = sqlx::query_as(DEFINED).fetch_all(&mut *transaction).await?;
    transaction.rollback().await?;
    let differs = |(name, definition): (String, String)| (before.get(&name) != Some(&definition)).then_some(name);
    Ok(after.into_iter().filter_map(differs).collect())
}

fn why_not_migrated(error: &MigrateError) -> String {
    let hint = match error {
        MigrateError::VersionMismatch(_) => "an applied migration was edited; restore it, migrations are never edited",
        MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _)
            // duplicate_table
            if sqlstate(inner).as_deref() == Some("42P07") =>
        {
            "a table of that name is there already; run CREATE SCHEMA order_timeout, add ?options=-csearch_path%3Dorder_timeout to database.url, and name statements for your own orders in orders.close_sql and orders.overdue_sql"
        }
        MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _) if classify(inner) == ErrorClass::Locked => {
            "another session, such as a dump or another setup, holds a lock on one of our tables (pg_stat_activity lists it); run `order-timeout setup` again when it has ended"
        }
        MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _) if is_forbidden(inner) => {
            OWN_SCHEMA_HINT
        }
        // invalid_schema_name
        MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _)
            if sqlstate(inner).as_deref() == Some("3F000") =>
        {
            NO_SCHEMA_HINT
        }
        _ => "correct the cause and run `order-timeout setup` again",
    };
    let why = match error {
        MigrateError::Execute(inner) | MigrateError::ExecuteMigration(inner, _) => one_line(inner),
        error => error.to_string(),
    };
    format!("the database schema could not be brought up to date: {why}; {hint}")
}

const NO_SCHEMA_HINT: &str = "create the schema that search_path in database.url names, such as CREATE SCHEMA order_timeout, and run `order-timeout setup` again";

/// The fix for a database user without the necessary rights. Since PostgreSQL 15 only its owner may write into
/// `public`.
const OWN_SCHEMA_HINT: &str = "give the user of database.url a schema of its own (CREATE SCHEMA order_timeout AUTHORIZATION …) and add ?options=-csearch_path%3Dorder_timeout to database.url";

/// Refuses a schema that this version cannot work with.
///
/// # Errors
/// [`DatabaseError`] counts the migrations that are missing.
pub async fn require_migrated(database: &Database) -> Result<(), DatabaseError> {
    let read = database.run(async |connection| Ok(pending_migrations(connection).await));
    let pending = read.await.map_err(|error| unreadable_migrations(&error))??;
    let Some(first) = pending.first() else { return Ok(()) };
    let (count, Target { options, settings, .. }) = (pending.len(), &*database.target);
    let fix = if settings.is_default_address() {
        "this is the default of database.url: if your database is another, set ORDER_TIMEOUT__DATABASE__URL, and then run `order-timeout setup`"
    } else {
        "run `order-timeout setup`"
    };
    Err(DatabaseError(format!(
        "the database at {} lacks {count} migration(s), the first: {first:?}; {fix}",
        address(options)
    )))
}

async fn pending_migrations(connection: &mut PgConnection) -> Result<Vec<String>, DatabaseError> {
    let exists: bool = sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL")
        .bind(MIGRATIONS_TABLE)
        .fetch_one(&mut *connection)
        .await
        .map_err(|error| unreadable_migrations(&error))?;
    let applied = if exists {
        refuse_unfinished_migration(connection).await?;
        let listed = connection.list_applied_migrations(MIGRATIONS_TABLE).await;
        listed.map_err(|error| match &error {
            MigrateError::Execute(inner) => unreadable_migrations(inner),
            error => DatabaseError(format!("the applied migrations cannot be read: {error}")),
        })?
    } else {
        Vec::new()
    };
    if applied.iter().any(|migration| MIGRATOR.iter().next().is_some_and(|first| migration.version < first.version)) {
        return Err(DatabaseError(format!(
            "the table {MIGRATIONS_TABLE} lists migrations from before the first release, whose tables this version cannot bring up to date; create an empty database, or drop the schema that has this table, and run `order-timeout setup`"
        )));
    }
    let is_pending = |version: i64| !applied.iter().any(|migration| migration.version == version);
    Ok(MIGRATOR.iter().filter(|m| is_pending(m.version)).map(|m| m.description.to_string()).collect())
}

/// Refuses a migration that began and did not finish. The client library's own error names a different table.
async fn refuse_unfinished_migration(connection: &mut PgConnection) -> Result<(), DatabaseError> {
    let unfinished = connection.dirty_version(MIGRATIONS_TABLE).await.map_err(|error| match &error {
        MigrateError::Execute(inner) => unreadable_migrations(inner),
        error => DatabaseError(format!("the applied migrations cannot be read: {error}")),
    })?;
    let Some(version) = unfinished else { return Ok(()) };
    Err(DatabaseError(format!(
        "migration {version} began and did not finish, according to the table {MIGRATIONS_TABLE}; remove what it has left behind, then DELETE FROM {MIGRATIONS_TABLE} WHERE version = {version}, and run `order-timeout setup` again"
    )))
}

fn unreadable_migrations(error: &sqlx::Error) -> DatabaseError {
    let hint = if is_forbidden(error) {
        "; GRANT SELECT ON order_timeout_migrations to the role of database.url, and for `order-timeout setup` use the owner of the schema"
    } else {
        ""
    };
    DatabaseError(format!("the applied migrations cannot be read: {}{hint}", one_line(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_file_is_run() {
        for file in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/sql/functions")).unwrap() {
            let path = file.unwrap().path();
            assert!(FUNCTIONS.contains(&std::fs::read_to_string(&path).unwrap()), "{}", path.display());
        }
    }
}
