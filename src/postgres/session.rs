//! A Postgres session: the parameters set after connecting, and the check that a pooler does not share it.
//!
//! Sets parameters after connecting, because a pooler may drop startup parameters. Runs no statement of the steps, and
//! uses no prepared statements, which fail behind a pooler in transaction mode.

use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Row};

use super::test_clock;

/// The parameter that defines how a `timestamp` without a zone is read.
const TIME_ZONE: &str = "timezone";

/// The parameter that says in which schemas a name is looked up.
const SEARCH_PATH: &str = "search_path";

/// How often the sessions of two connections are compared. A pooler in transaction mode usually gives both the same
/// session the first time; other clients of the pooler can hide that.
const COMPARISONS: usize = 3;

/// Why a pooler in this mode cannot be used, and what to do.
const SHARED_SESSIONS: &str = "a pooler shares its server connections among clients there, as PgBouncer does with pool_mode = transaction or statement; let it use pool_mode = session for this user and database, or give database.url the address of Postgres itself";

/// Identifies a session among all of a server's, independent of the time zone that the same statement may set.
const IDENTITY: &str =
    // A session with another role (`options=-c role=…`) may not read its own start; the process id alone identifies it. The
    // function and not the view pg_stat_activity, which also reads users and databases: that costs a quarter of a new session.
    "(SELECT concat_ws(' ', pid, extract(epoch FROM backend_start)) FROM pg_stat_get_activity(pg_backend_pid()))";

/// The parameters of each session of a pool.
#[derive(Debug, Clone)]
pub(crate) struct Session {
    /// Name and value, in the order in which they are set.
    parameters: Vec<(String, String)>,
    time_zone: TimeZone,
    /// Whether the database's clock can be moved.
    is_for_tests: bool,
}

/// The time zone of the sessions, and where it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TimeZone {
    pub name: String,
    /// In words.
    pub origin: &'static str,
}

/// The origin if this role may not read the configuration: `initdb` sets `log_timezone` to the same.
pub(super) const ASSUMED: &str = "assumed from the server's log_timezone";

impl Session {
    /// Determines the parameters of sessions: those in the address' `options`, then `ours`, which win; and the time
    /// zone that a plain session of this role and database would have, unless `time_zone` names one. The client library
    /// requests UTC at the start of every session, whatever the address says.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn find(
        connection: &mut PgConnection,
        options: &PgConnectOptions,
        time_zone: &str,
        ours: impl IntoIterator<Item = (&'static str, String)>,
    ) -> Result<Self, sqlx::Error> {
        let mut parameters = settable(connection, parameters_in(options.get_options().unwrap_or_default())).await?;
        let of_address = parameters.iter().rfind(|(name, _)| name == TIME_ZONE).map(|(_, zone)| zone.clone());
        parameters.retain(|(name, _)| name != TIME_ZONE);
        let time_zone = match (time_zone, of_address) {
            ("", None) => zone_of_session(connection).await?,
            ("", Some(name)) => TimeZone { name, origin: "options in database.url" },
            (name, _) => TimeZone { name: name.to_owned(), origin: "database.time_zone" },
        };
        parameters.push((TIME_ZONE.to_owned(), time_zone.name.clone()));
        let path = parameters.iter().rfind(|(name, _)| name == SEARCH_PATH).map(|(_, path)| path.clone());
        let path = test_clock::search_path(connection, path).await?;
        let is_for_tests = path.is_some();
        parameters.extend(path.map(|path| (SEARCH_PATH.to_owned(), path)));
        parameters.extend(ours.into_iter().map(|(name, value)| (name.to_owned(), value)));
        Ok(Self { parameters: last_of_each(parameters), time_zone, is_for_tests })
    }

    pub const fn time_zone(&self) -> &TimeZone {
        &self.time_zone
    }

    pub const fn is_for_tests(&self) -> bool {
        self.is_for_tests
    }

    /// Sets the parameters, and reads them back in a separate transaction.
    ///
    /// # Errors
    /// sqlx's; an I/O error with a sentence that names the pooler if the session has not kept them.
    pub async fn settle(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        let set =
            |(name, value): &(String, String)| format!("set_config({}, {}, false)", literal(name), literal(value));
        let read = |(name, _): &(String, String)| format!("current_setting({})", literal(name));
        let wanted = self.answers(connection, set).await?;
        let found = self.answers(connection, read).await?;
        match wanted.iter().zip(&found).position(|(wanted, found)| wanted != found) {
            None => Ok(()),
            Some(0) => Err(refused(SHARED_SESSIONS)),
            Some(at) => {
                let ((name, _), wanted, found) = (&self.parameters[at - 1], &wanted[at], &found[at]);
                Err(refused(&format!(
                    "a session does not keep its parameter {name}: it was set to {wanted:?} and is {found:?}; {SHARED_SESSIONS}"
                )))
            }
        }
    }

    /// The session's identity, then one answer for each parameter.
    async fn answers(
        &self,
        connection: &mut PgConnection,
        ask: impl Fn(&(String, String)) -> String,
    ) -> Result<Vec<String>, sqlx::Error> {
        let questions: Vec<String> =
            std::iter::once(IDENTITY.to_owned()).chain(self.parameters.iter().map(ask)).collect();
        let row = one_row(connection, format!("SELECT {}", questions.join(", "))).await?;
        (0..questions.len()).map(|at| row.try_get(at)).collect()
    }
}

/// If a parameter is given more than once, the last wins, as in Postgres: each is compared with the session's value.
fn last_of_each(parameters: Vec<(String, String)>) -> Vec<(String, String)> {
    let mut kept: Vec<(String, String)> = Vec::with_capacity(parameters.len());
    for (name, value) in parameters {
        kept.retain(|(known, _)| !known.eq_ignore_ascii_case(&name));
        kept.push((name, value));
    }
    kept
}

/// Refuses two simultaneous connections that do not each have their own, unchanging session.
///
/// # Errors
/// sqlx's; an I/O error with a sentence that names the pooler.
pub(crate) async fn refuse_shared_sessions(
    one: &mut PgConnection,
    other: &mut PgConnection,
) -> Result<(), sqlx::Error> {
    let (first, second) = (identity(one).await?, identity(other).await?);
    for _ in 0..COMPARISONS {
        // One of them twice in a row: a pooler that gives two sessions in turn would give each of two that ask in turn always
        // the same.
        let is_shared = first == second
            || identity(one).await? != first
            || identity(one).await? != first
            || identity(other).await? != second;
        if is_shared {
            return Err(refused(SHARED_SESSIONS));
        }
    }
    Ok(())
}

async fn identity(connection: &mut PgConnection) -> Result<String, sqlx::Error> {
    one_row(connection, format!("SELECT {IDENTITY}")).await?.try_get(0)
}

/// The fix for an error that comes from a pooler, recognised by SQLSTATE and message.
#[must_use]
pub(crate) fn pooler_hint(code: &str, message: &str) -> Option<String> {
    if let Some((_, parameter)) =
        message.split_once("unsupported startup parameter").and_then(|(_, rest)| rest.rsplit_once(": "))
    {
        return Some(format!(
            "a pooler, such as PgBouncer, does not pass it on: add {parameter} to ignore_startup_parameters in pgbouncer.ini (it is set again after connecting), or give database.url the address of Postgres itself"
        ));
    }
    // duplicate_prepared_statement, invalid_sql_statement_name
    matches!(code, "42P05" | "26000").then(|| SHARED_SESSIONS.to_owned())
}

/// Whether a pooler that shares sessions keeps the database from being used.
#[must_use]
pub fn is_about_pooler(fault: &super::DatabaseError) -> bool {
    fault.0.contains(SHARED_SESSIONS)
}

/// Our own sentence as an error of the client library.
fn refused(why: &str) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::other(why.to_owned()))
}

/// Runs a statement as a simple query, which needs no prepared statement.
pub(super) async fn one_row(connection: &mut PgConnection, sql: String) -> Result<PgRow, sqlx::Error> {
    sqlx::raw_sql(AssertSqlSafe(sql)).fetch_one(connection).await
}

/// A text as an SQL literal, valid with any `standard_conforming_strings`.
fn literal(text: &str) -> String {
    format!("E'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}

/// Removes the parameters that can only be set at a session's start.
async fn settable(
    connection: &mut PgConnection,
    parameters: Vec<(String, String)>,
) -> Result<Vec<(String, String)>, sqlx::Error> {
    if parameters.is_empty() {
        return Ok(parameters);
    }
    let names: Vec<String> = parameters.iter().map(|(name, _)| literal(name)).collect();
    let sql = format!(
        "SELECT coalesce(string_agg(lower(name), ' '), '') FROM pg_settings
         WHERE context NOT IN ('user', 'superuser') AND lower(name) IN ({})",
        names.join(", ")
    );
    let fixed: String = one_row(connection, sql).await?.try_get(0)?;
    Ok(parameters.into_iter().filter(|(name, _)| !fixed.split(' ').any(|fixed| fixed == name)).collect())
}

/// The default time zone of a session of this role and database. A session that has requested another cannot ask
/// Postgres for it, so it is looked up in the places where Postgres looks.
async fn zone_of_session(connection: &mut PgConnection) -> Result<TimeZone, sqlx::Error> {
    // In Postgres' order: the role in this database, the role, the database, all of them.
    let of_role = optional(
        connection,
        "SELECT (SELECT substr(entry, length('timezone=') + 1)
         FROM pg_db_role_setting s CROSS JOIN LATERAL unnest(s.setconfig) AS entry
         WHERE s.setrole IN (0, (SELECT r.oid FROM pg_roles r WHERE r.rolname = session_user))
           AND s.setdatabase IN (0, (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()))
           AND lower(entry) LIKE 'timezone=%'
         ORDER BY s.setrole = 0, s.setdatabase = 0
         LIMIT 1)",
    );
    if let Some(name) = of_role.await? {
        return Ok(TimeZone { name, origin: "the role or the database" });
    }
    if let Some(name) = zone_of_server(connection).await? {
        return Ok(TimeZone { name, origin: "the server's configuration" });
    }
    let name = one_row(connection, "SELECT current_setting('log_timezone')".to_owned()).await?.try_get(0)?;
    Ok(TimeZone { name, origin: ASSUMED })
}

/// The server's time zone from its command line or configuration, if this role may read those.
async fn zone_of_server(connection: &mut PgConnection) -> Result<Option<String>, sqlx::Error> {
    let row = one_row(
        connection,
        "SELECT has_function_privilege('pg_read_file(text)', 'EXECUTE')::text,
                (has_table_privilege('pg_file_settings', 'SELECT')
                 AND has_function_privilege('pg_show_all_file_settings()', 'EXECUTE'))::text"
            .to_owned(),
    );
    let row = row.await?;
    let may = |at: usize| row.try_get::<String, _>(at).map(|word| word == "true");
    let (may_read_command_line, may_read_file) = (may(0)?, may(1)?);
    if may_read_command_line {
        let of_command_line = optional(
            connection,
            r#"SELECT (regexp_match(pg_read_file('postmaster.opts'), '"(?:-c|--)?timezone=([^"]*)"', 'i'))[1]"#,
        );
        // Depending on how the server was started, the file may not exist.
        if let Ok(Some(name)) = of_command_line.await {
            return Ok(Some(name));
        }
    }
    if !may_read_file {
        return Ok(None);
    }
    // Without an entry in a file it is Postgres' built-in default.
    let of_file = "SELECT coalesce((SELECT setting FROM pg_file_settings WHERE lower(name) = 'timezone' AND applied
                                    ORDER BY seqno DESC LIMIT 1), boot_val)
                   FROM pg_settings WHERE name = 'TimeZone'";
    optional(connection, of_file).await
}

async fn optional(connection: &mut PgConnection, sql: &'static str) -> Result<Option<String>, sqlx::Error> {
    one_row(connection, sql.to_owned()).await?.try_get(0)
}

/// The parameters that the startup `options` set, as Postgres reads them: `-c name=value`, `-cname=value` and
/// `--name=value`. Names in lower case. Anything else is left to the server.
fn parameters_in(options: &str) -> Vec<(String, String)> {
    let mut words = words_in(options).into_iter();
    let mut parameters = Vec::new();
    while let Some(word) = words.next() {
        let assignment = match word.strip_prefix("--").or_else(|| word.strip_prefix("-c")) {
            Some("") if word == "-c" => words.next().unwrap_or_default(),
            Some(rest) => rest.to_owned(),
            None => continue,
        };
        let Some((name, value)) = assignment.split_once('=') else { continue };
        parameters.push((name.to_lowercase().replace('-', "_"), value.to_owned()));
    }
    parameters.retain(|(name, value)| !name.is_empty() && !name.contains('\0') && !value.contains('\0'));
    parameters
}

/// Words between white space; a backslash takes the next character as it is.
fn words_in(options: &str) -> Vec<String> {
    let (mut words, mut word) = (Vec::new(), None::<String>);
    let mut characters = options.chars();
    while let Some(character) = characters.next() {
        if character.is_ascii_whitespace() {
            words.extend(word.take());
            continue;
        }
        let taken = if character == '\\' { characters.next() } else { Some(character) };
        word.get_or_insert_default().extend(taken);
    }
    words.extend(word);
    words
}

/// The lock timeout of what should not wait. Short, because others wait.
const SHORT_LOCK_TIMEOUT: Duration = Duration::from_millis(20);

/// Makes the current transaction wait only shortly for locks.
///
/// # Errors
/// sqlx's.
pub async fn shorten_lock_timeout(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::query("SELECT set_config('lock_timeout', $1, true)")
        .bind(SHORT_LOCK_TIMEOUT.as_millis().to_string())
        .execute(connection)
        .await
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(options: &str) -> Vec<(String, String)> {
        parameters_in(options)
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn reads_options_as_postgres_does() {
        assert_eq!(
            parsed("-c search_path=a,b  -cTimeZone=Asia/Kathmandu --statement-timeout=5s"),
            pairs(&[("search_path", "a,b"), ("timezone", "Asia/Kathmandu"), ("statement_timeout", "5s")])
        );
        assert_eq!(parsed(r"-c search_path=a\ b\\c"), pairs(&[("search_path", r"a b\c")]));
        assert_eq!(parsed(r"-c x.y=a=b \ "), pairs(&[("x.y", "a=b")]));
    }

    #[test]
    fn ignores_options_that_set_nothing() {
        for options in ["", "   ", "-c", "-c name", "-e -d 5", "--", "-c =x", "name=value", r"\"] {
            assert_eq!(parsed(options), [], "{options:?}");
        }
    }

    #[test]
    fn literal_escapes_quotes_and_backslashes() {
        assert_eq!(literal(r"a'b\c"), r"E'a''b\\c'");
    }

    #[test]
    fn names_parameter_that_pooler_refuses() {
        let hint = pooler_hint("08P01", "unsupported startup parameter: options").unwrap();
        assert!(hint.contains("PgBouncer") && hint.contains("add options to ignore_startup_parameters"), "{hint}");
        let hint = pooler_hint("08P01", "unsupported startup parameter in options: search_path").unwrap();
        assert!(hint.contains("add search_path to"), "{hint}");
        assert!(pooler_hint("42P05", "prepared statement \"sqlx_s_1\" already exists").unwrap().contains("PgBouncer"));
        assert!(pooler_hint("26000", "prepared statement \"sqlx_s_1\" does not exist").unwrap().contains("PgBouncer"));
        assert_eq!(pooler_hint("42P01", "relation \"orders\" does not exist"), None);
    }
}
