//! What an error of Postgres means, and how a log line or a page shows it.
//!
//! Pure: by SQLSTATE. Retries nothing.

use std::borrow::Cow;

use sqlx::postgres::{PgDatabaseError, PgSeverity};

use super::session::pooler_hint;
use crate::sanitize;

/// Why the database cannot be used, in one sentence without the password.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct DatabaseError(pub String);

/// The class of an error, which decides whether a retry makes sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorClass {
    /// A lock could not be acquired in time.
    Locked,
    /// A deadlock, a serialization failure, a timeout, a full disk: retry.
    Transient,
    /// The data: a constraint, a trigger, a value.
    Data,
    /// A statement that was valid when it was prepared is no longer valid because a table or a right was removed; or
    /// one row's trigger is broken, or cannot reach another server. Running the statement without rows tells which.
    Broken,
    /// Nothing works at present: unreachable, read-only, or no connection left.
    Away,
}

/// Classifies an error by its SQLSTATE (PostgreSQL documentation, appendix A "Error Codes").
#[must_use]
pub fn classify(error: &sqlx::Error) -> ErrorClass {
    if matches!(error, sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_) | sqlx::Error::ColumnNotFound(_)) {
        // The result does not have the columns or types that the prepared statement announced.
        return ErrorClass::Broken;
    }
    let Some(fault) = error.as_database_error().and_then(|fault| fault.try_downcast_ref::<PgDatabaseError>()) else {
        // Network, pool, protocol: no answer from the database at all.
        return ErrorClass::Away;
    };
    match fault.code() {
        // lock_not_available
        "55P03" => ErrorClass::Locked,
        // query_canceled, feature_not_supported (a cached plan after an ALTER TABLE)
        "57014" | "0A000" => ErrorClass::Transient,
        // read_only_sql_transaction
        "25006" => ErrorClass::Away,
        // duplicate_prepared_statement: a pooler has changed servers
        "42P05" => ErrorClass::Transient,
        // invalid transaction state, invalid statement name (a pooler has changed servers), transaction rollback
        code if ["25", "26", "40"].contains(&&code[..2]) => ErrorClass::Transient,
        // insufficient resources, system error (a bad disk). If the connection stays open, the cause may be one order's
        // unreadable page, or another server that a trigger writes to: other orders are not affected.
        code if ["53", "58"].contains(&&code[..2]) => match fault.severity() {
            PgSeverity::Panic | PgSeverity::Fatal => ErrorClass::Away,
            _ => ErrorClass::Transient,
        },
        // connection exception, invalid authorization, operator intervention: the server's own error if it ends the
        // connection. Otherwise it may come from a trigger that failed to reach another server.
        code if ["08", "28", "57"].contains(&&code[..2]) => match fault.severity() {
            PgSeverity::Panic | PgSeverity::Fatal => ErrorClass::Away,
            _ => ErrorClass::Broken,
        },
        // data exception, integrity constraint violation, WITH CHECK OPTION violation, PL/pgSQL error (RAISE)
        code if ["22", "23", "44", "P0"].contains(&&code[..2]) => ErrorClass::Data,
        _ => ErrorClass::Broken,
    }
}

/// Whether the error says that the database accepts no writes.
#[must_use]
pub fn is_read_only(error: &sqlx::Error) -> bool {
    // read_only_sql_transaction
    sqlstate(error).as_deref() == Some("25006")
}

/// Whether a statement that this connection has prepared no longer matches its tables: sqlx would reuse the same plan
/// again and again.
pub(super) fn is_stale_plan(error: &sqlx::Error) -> bool {
    // feature_not_supported ("cached plan must not change result type"), invalid_sql_statement_name,
    // duplicate_prepared_statement
    matches!(sqlstate(error).as_deref(), Some("0A000" | "26000" | "42P05"))
}

/// The SQLSTATE of an error that the server sent (PostgreSQL documentation, appendix A "Error Codes").
pub(super) fn sqlstate(error: &sqlx::Error) -> Option<Cow<'_, str>> {
    error.as_database_error().and_then(sqlx::error::DatabaseError::code)
}

/// An error for the log: the server's message and SQLSTATE, without the line in the server's source. Always one line,
/// because a trigger's message must not add lines to our log.
#[must_use]
pub fn one_line(error: &sqlx::Error) -> String {
    sanitize::one_line(&words(error)).into_owned()
}

/// The sentence for an operator about rows that cannot be read or changed.
#[must_use]
pub fn unusable(what: &str, error: &sqlx::Error) -> DatabaseError {
    let fix = match classify(error) {
        ErrorClass::Locked | ErrorClass::Transient => "another session holds what this needs, try again",
        _ => "fix the database and try again",
    };
    DatabaseError(format!("{what} cannot be read or changed: {}; {fix}", one_line(error)))
}

/// A sentence of [`one_line`] as a page may show it. The pages show no order, and the server's message may come from a
/// trigger and contain ids: it is replaced by the SQLSTATE and its class. A sentence without SQLSTATE is our own.
#[must_use]
pub fn without_server_message(why: &str) -> Cow<'_, str> {
    let code = why.rsplit_once("(SQLSTATE ").and_then(|(_, behind)| behind.get(..5));
    let Some(code) = code.filter(|code| code.bytes().all(|byte| byte.is_ascii_alphanumeric())) else {
        return why.into();
    };
    let class = class_of(code);
    format!("the server reports an error of class {class:?} (SQLSTATE {code}); its message is in the worker's log")
        .into()
}

/// PostgreSQL documentation, appendix A "Error Codes".
fn class_of(code: &str) -> &'static str {
    match (code, &code[..2]) {
        ("25006", _) => "read-only transaction",
        ("40P01", _) => "deadlock",
        ("42501", _) => "insufficient privilege",
        ("42P01", _) => "undefined table",
        ("53100", _) => "disk full",
        ("53300", _) => "too many connections",
        ("55P03", _) => "lock timeout",
        ("57014", _) => "statement timeout or cancellation",
        ("57P01" | "57P02", _) => "server is shutting down",
        ("57P03", _) => "server is starting up",
        (_, "08") => "connection exception",
        (_, "0A") => "feature not supported",
        (_, "22") => "data exception",
        (_, "23") => "integrity constraint violation",
        (_, "25") => "invalid transaction state",
        (_, "26") => "invalid statement name",
        (_, "28") => "invalid authorization",
        (_, "40") => "transaction rollback",
        (_, "42") => "syntax error or access rule violation",
        (_, "53") => "insufficient resources",
        (_, "54") => "program limit exceeded",
        (_, "55") => "object not in prerequisite state",
        (_, "57") => "operator intervention",
        (_, "58") => "system error",
        (_, "P0") => "PL/pgSQL error",
        (_, "XX") => "internal error",
        _ => "other",
    }
}

fn words(error: &sqlx::Error) -> String {
    match error.as_database_error() {
        Some(fault) => match fault.code() {
            Some(code) => {
                let hint = pooler_hint(&code, fault.message()).map_or_else(String::new, |hint| format!("; {hint}"));
                format!("{} (SQLSTATE {code}){hint}", fault.message())
            }
            None => fault.message().to_owned(),
        },
        None => match error {
            // One of our own sentences.
            sqlx::Error::Io(fault) if fault.get_ref().is_some() => fault.to_string(),
            error => error.to_string(),
        },
    }
}

/// Whether the user lacks a right.
pub fn is_forbidden(error: &sqlx::Error) -> bool {
    // insufficient_privilege
    sqlstate(error).as_deref() == Some("42501")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_show_class_instead_of_message() {
        let of = |why: &str| without_server_message(why).into_owned();
        for (why, class) in [
            ("order 17 is guarded (SQLSTATE 25006)", "\"read-only transaction\" (SQLSTATE 25006)"),
            ("order 17 (SQLSTATE 00000) (SQLSTATE 57P05)", "\"operator intervention\" (SQLSTATE 57P05)"),
            ("order 17 (SQLSTATE ZZ999)", "\"other\" (SQLSTATE ZZ999)"),
        ] {
            let shown = of(why);
            assert!(shown.contains(class) && !shown.contains("17"), "{shown}");
        }
        let ours = "the database at h:5432 did not answer within 6s";
        assert_eq!(of(ours), ours);
    }
}
