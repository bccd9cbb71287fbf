//! The clock of a database that was made for tests, which can be moved: `sql/clock_for_tests.sql` creates it, and
//! `order_timeout_client::testing` moves it.
//!
//! No statement knows it. All of them read `clock_timestamp()` and its like, and the `search_path` says whose.

use sqlx::{AssertSqlSafe, PgConnection, Row};

use super::error::{DatabaseError, one_line};
use super::session::one_row;
use super::{Database, DatabaseSettings};

const CREATE: &str = include_str!("../../sql/clock_for_tests.sql");

/// Behind the schemas of tables, so that no object is created in it; before Postgres' own functions.
const END_OF_PATH: &str = "order_timeout_clock, pg_catalog";

/// Whether there is such a clock, as the end of a query: made by the database's owner, because its functions run with the worker's
/// rights. `n` is its schema.
macro_rules! from_clock_of_owner {
    () => {
        "FROM pg_namespace n, pg_roles r, pg_database d
         WHERE n.nspname = 'order_timeout_clock' AND r.oid = n.nspowner AND d.datname = current_database()
           AND (r.oid = d.datdba OR r.rolsuper)"
    };
}
pub(super) use from_clock_of_owner;

/// The shop's own sessions read the same clock. The setting of a database is not copied with it, so it is made again.
const FOR_OTHER_SESSIONS: &str = "DO $$ BEGIN
    EXECUTE format('ALTER DATABASE %I SET search_path = %s, order_timeout_clock, pg_catalog', current_database(),
        coalesce((SELECT split_part(substr(entry, length('search_path=') + 1), ', order_timeout_clock', 1)
                  FROM pg_db_role_setting s CROSS JOIN LATERAL unnest(s.setconfig) AS entry
                  WHERE s.setrole = 0 AND entry LIKE 'search_path=%'
                    AND s.setdatabase = (SELECT oid FROM pg_database WHERE datname = current_database())),
                 (SELECT boot_val FROM pg_settings WHERE name = 'search_path')));
END $$";

/// Whether there are tables, ours or a shop's, besides those of extensions.
const HAS_TABLES: &str = "
    SELECT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                   WHERE c.relkind IN ('r', 'p') AND n.nspname !~ '^(pg_|information_schema$)'
                     AND NOT EXISTS (SELECT FROM pg_depend d WHERE d.objid = c.oid AND d.deptype = 'e'))";

/// Gives a database that holds no table a clock that can be moved. Idempotent.
///
/// # Errors
/// [`DatabaseError`] if it has tables, and is not for tests.
pub async fn create(settings: &DatabaseSettings) -> Result<(), DatabaseError> {
    let database = Database::connect(settings, 1).await?;
    let is_for_tests = database.is_for_tests();
    let create = async |connection: &mut PgConnection| {
        if !is_for_tests && sqlx::query_scalar(HAS_TABLES).fetch_one(&mut *connection).await? {
            return Ok(false);
        }
        // One query, which is one transaction: what fails leaves no mark.
        let create = if is_for_tests { FOR_OTHER_SESSIONS.to_owned() } else { [CREATE, FOR_OTHER_SESSIONS].concat() };
        sqlx::raw_sql(AssertSqlSafe(create)).execute(connection).await?;
        Ok(true)
    };
    match database.run(create).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(DatabaseError(
            "this database has tables, so its clock stays that of Postgres; create an empty database for tests, and run `order-timeout setup --for-tests` there before any table is created".into(),
        )),
        Err(error) => Err(DatabaseError(format!(
            "the database cannot be made one for tests: {}; use the role that owns it",
            one_line(&error)
        ))),
    }
}

/// The `search_path` of a session on a database for tests; `None` on any other. `given`: the one in its address.
///
/// # Errors
/// sqlx's.
pub(super) async fn search_path(
    connection: &mut PgConnection,
    given: Option<String>,
) -> Result<Option<String>, sqlx::Error> {
    // Without a schema for tables, objects would be created in that of the clock.
    let ask = concat!(
        "SELECT (SELECT current_setting('search_path') ",
        from_clock_of_owner!(),
        " AND current_schema() <> n.nspname)"
    );
    let path: Option<String> = one_row(connection, ask.to_owned()).await?.try_get(0)?;
    let path = path.map(|path| given.unwrap_or(path));
    Ok(path.map(|path| if path.contains(END_OF_PATH) { path } else { format!("{path}, {END_OF_PATH}") }))
}
