//! The orders contract: the statements that access an orders table, loaded from a file or rendered, and checked against
//! the required parameters and columns before the first order depends on them.
//!
//! Knows parameters and columns, not the purpose of the statements.

use std::path::Path;

use sqlx::postgres::{PgConnection, PgDatabaseError, PgErrorPosition};
use sqlx::{AssertSqlSafe, Column, Either, Executor, SqlSafeStr, SqlStr, Statement as _, TypeInfo};

use crate::postgres::{Database, DatabaseError, one_line};

/// What a statement must take and return, with Postgres' type names.
#[derive(Debug)]
pub struct Contract {
    /// The setting of the default kind that may name a file with another statement.
    pub setting: &'static str,
    /// The accepted lists of parameters.
    pub parameters: &'static [&'static [&'static str]],
    /// The required columns: name, and the accepted types.
    pub columns: &'static [(&'static str, &'static [&'static str])],
}

/// Where a statement of the contract comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StatementSource {
    /// A file with a statement of the shop's own.
    File {
        /// Where it is.
        path: String,
        /// The setting that names it; `None` for that of the default kind.
        setting: Option<String>,
    },
    /// Rendered from a mapping; `name` says which one, for errors.
    Rendered {
        /// As errors name it.
        name: String,
        /// Its text.
        sql: String,
        /// The statement that creates the index for it, if it needs one.
        index: Option<String>,
    },
}

impl StatementSource {
    /// The text of the file, or of the mapping's statement.
    ///
    /// # Errors
    /// [`DatabaseError`] names the setting and the file.
    pub async fn text(&self) -> Result<String, DatabaseError> {
        match self {
            Self::File { path, setting } => read_statement(setting.as_deref().unwrap_or("the statement"), path).await,
            Self::Rendered { sql, .. } => Ok(sql.clone()),
        }
    }
}

/// The value of a setting that names a file.
impl From<&str> for StatementSource {
    fn from(file: &str) -> Self {
        Self::File { path: file.to_owned(), setting: None }
    }
}

impl From<&String> for StatementSource {
    fn from(file: &String) -> Self {
        file.as_str().into()
    }
}

/// A statement that fulfils its contract.
#[derive(Debug, Clone)]
pub struct ContractStatement {
    /// The statement's text.
    pub sql: SqlStr,
    /// How many parameters it takes.
    pub parameters: usize,
    /// The statement that creates the index for it, where that is known.
    pub index: Option<String>,
}

impl ContractStatement {
    /// Loads the statement, prepares it and checks it.
    ///
    /// # Errors
    /// [`DatabaseError`] names the file and the parameter or column.
    pub async fn load(
        database: &Database,
        contract: &Contract,
        source: &StatementSource,
    ) -> Result<Self, DatabaseError> {
        let (name, source, index) = match source {
            StatementSource::File { path, setting } => {
                let text = read_statement(setting.as_deref().unwrap_or(contract.setting), path).await?;
                (path.as_str(), text, None)
            }
            StatementSource::Rendered { name, sql, index } => (name.as_str(), sql.clone(), index.clone()),
        };
        // The statement is configuration: the operator who sets it may run any SQL anyway.
        let sql = AssertSqlSafe(source).into_sql_str();
        let check = database.run(async |connection| Ok(contract.check(connection, sql.clone(), name).await));
        let parameters = check.await.map_err(|error| DatabaseError(format!("{name}: {}", one_line(&error))))??;
        Ok(Self { sql, parameters, index })
    }
}

impl Contract {
    /// Returns how many parameters the statement takes.
    async fn check(&self, connection: &mut PgConnection, sql: SqlStr, name: &str) -> Result<usize, DatabaseError> {
        let prepared = connection.prepare(sql.clone()).await;
        let prepared = prepared.map_err(|error| DatabaseError(why_not_prepared(&error, name, sql.as_str())))?;
        let parameters: Vec<&str> = match prepared.parameters() {
            Some(Either::Left(types)) => types.iter().map(TypeInfo::name).collect(),
            Some(Either::Right(_)) | None => Vec::new(),
        };
        if prepared.columns().is_empty() && parameters.is_empty() {
            return Err(DatabaseError(format!(
                "{name} holds no statement that returns rows; write the statement of {} into it, see docs/OWN-SQL.md",
                self.setting
            )));
        }
        if !self.parameters.contains(&parameters.as_slice()) {
            let wanted: Vec<String> = self.parameters.iter().map(|types| signature(types)).collect();
            let (found, wanted) = (parameters.join(", "), wanted.join(" or "));
            return Err(DatabaseError(format!("{name} takes ({found}), not {wanted}; cast its parameters")));
        }
        for (column, types) in self.columns {
            let Some(found) = prepared.columns().iter().find(|c| c.name() == *column) else {
                return Err(DatabaseError(format!("{name} returns no column {column}; add it with type {}", types[0])));
            };
            let is = found.type_info().name();
            if is == "TIMESTAMP" && types.contains(&"TIMESTAMPTZ") {
                return Err(DatabaseError(format!(
                    "{name} returns column {column} as TIMESTAMP, which has no time zone; write AT TIME ZONE 'the zone that the column is written in' behind it, such as p.{column} AT TIME ZONE 'America/New_York', wherever the statement returns, compares or sorts by it. A cast would take the session's zone, and close orders early or late"
                )));
            }
            if !types.contains(&is) {
                return Err(DatabaseError(format!(
                    "{name} returns column {column} as {is}, not {}; cast it",
                    types[0]
                )));
            }
        }
        Ok(parameters.len())
    }
}

/// The text of a statement's file, without the byte order mark that some editors write.
async fn read_statement(setting: &str, file: &str) -> Result<String, DatabaseError> {
    let fault = |why: String| DatabaseError(format!("{setting}: {file} {why}"));
    let bytes = tokio::fs::read(Path::new(file)).await.map_err(|error| fault(format!("cannot be read: {error}")))?;
    let Ok(text) = String::from_utf8(bytes) else {
        return Err(fault("is not UTF-8; save it as UTF-8".into()));
    };
    if text.contains('\0') {
        return Err(fault("contains a NUL, as a file saved as UTF-16 does; save it as UTF-8".into()));
    }
    let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
    if text.trim().is_empty() {
        return Err(fault("is empty; write the statement into it, or leave the setting empty for our own".into()));
    }
    Ok(text.to_owned())
}

fn why_not_prepared(error: &sqlx::Error, name: &str, sql: &str) -> String {
    let fault = error.as_database_error().and_then(|fault| fault.try_downcast_ref::<PgDatabaseError>());
    let place = match fault.and_then(PgDatabaseError::position) {
        Some(PgErrorPosition::Original(position)) => {
            let (line, column) = line_and_column(sql, position);
            format!(", line {line}, column {column},")
        }
        _ => String::new(),
    };
    let hint = match fault.map(PgDatabaseError::code) {
        // insufficient_privilege
        Some("42501") => {
            "GRANT the user of database.url what the statement needs: USAGE on the schema, and on each table what is done to it"
        }
        // invalid_schema_name
        Some("3F000") => "create the schema with CREATE SCHEMA, or correct its name",
        // undefined_table, undefined_column, undefined_function
        Some("42P01" | "42703" | "42883") => {
            "correct the name, write the table with its schema, or restore what the statement refers to"
        }
        _ => "correct the statement",
    };
    format!("{name}{place} cannot be prepared: {}; {hint}", one_line(error))
}

/// The line and column of the character at this position, all counted from 1, as in editors.
fn line_and_column(text: &str, position: usize) -> (usize, usize) {
    let before: String = text.chars().take(position.saturating_sub(1)).collect();
    let line = before.rsplit('\n').next().unwrap_or_default();
    (before.matches('\n').count() + 1, line.chars().count() + 1)
}

/// `($1 text[], $2 text)`
fn signature(types: &[&str]) -> String {
    let numbered: Vec<String> = (1..).zip(types).map(|(n, name)| format!("${n} {}", name.to_lowercase())).collect();
    format!("({})", numbered.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_line_and_column() {
        assert_eq!(line_and_column("SELECT 1", 1), (1, 1));
        assert_eq!(line_and_column("-- ü\nSELEKT 1", 6), (2, 1));
        assert_eq!(line_and_column("a\nb\ncd", 6), (3, 2));
        assert_eq!(line_and_column("a\n", 99), (2, 1));
    }
}
