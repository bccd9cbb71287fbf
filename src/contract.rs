//! The orders contract: the statements by which we know any orders table, loaded from a file or our own, and checked
//! against what we will ask of them before the first order depends on it.
//!
//! Knows parameters and columns, not what the statements are for.

use std::path::Path;

use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Column, Either, Executor, SqlSafeStr, SqlStr, Statement as _, TypeInfo};

use crate::database::{Database, DatabaseFault, why};

/// What a statement must take and return, in Postgres' names of types.
#[derive(Debug)]
pub struct Contract {
    /// The setting that may name a file with another statement.
    pub setting: &'static str,
    /// Our own file, and what stands in it.
    pub default: (&'static str, &'static str),
    /// The lists of parameters that will do.
    pub parameters: &'static [&'static [&'static str]],
    /// The columns it must have: name, and the types that will do.
    pub columns: &'static [(&'static str, &'static [&'static str])],
}

/// A statement that keeps its contract.
#[derive(Debug, Clone)]
pub struct ContractStatement {
    pub sql: SqlStr,
    /// How many parameters it takes.
    pub parameters: usize,
}

impl ContractStatement {
    /// Loads the statement (`file` is the setting's value; empty means ours), prepares it and compares.
    ///
    /// # Errors
    /// [`DatabaseFault`] names the file and the parameter or column.
    pub async fn load(database: &Database, contract: &Contract, file: &str) -> Result<Self, DatabaseFault> {
        let (name, source) = if file.is_empty() {
            (contract.default.0, contract.default.1.to_owned())
        } else {
            let read = tokio::fs::read_to_string(Path::new(file)).await;
            let unread = |error| DatabaseFault(format!("{}: {file} cannot be read: {error}", contract.setting));
            (file, read.map_err(unread)?)
        };
        // The statement is configuration: whoever may set it may run any SQL anyhow.
        let sql = AssertSqlSafe(source).into_sql_str();
        let check = database.run(async |connection| Ok(contract.check(connection, sql.clone(), name).await));
        let parameters = check.await.map_err(|error| DatabaseFault(format!("{name}: {}", why(&error))))??;
        Ok(Self { sql, parameters })
    }
}

impl Contract {
    /// Returns how many parameters the statement takes.
    async fn check(&self, connection: &mut PgConnection, sql: SqlStr, name: &str) -> Result<usize, DatabaseFault> {
        let prepared = connection.prepare(sql).await.map_err(|error| {
            let why = why(&error);
            DatabaseFault(format!("{name} cannot be prepared: {why}; correct the statement, or bring back the table or column that it misses"))
        })?;
        let parameters: Vec<&str> = match prepared.parameters() {
            Some(Either::Left(types)) => types.iter().map(TypeInfo::name).collect(),
            Some(Either::Right(_)) | None => Vec::new(),
        };
        if !self.parameters.contains(&parameters.as_slice()) {
            let wanted: Vec<String> = self.parameters.iter().map(|types| signature(types)).collect();
            let (found, wanted) = (parameters.join(", "), wanted.join(" or "));
            return Err(DatabaseFault(format!("{name} takes ({found}), not {wanted}; cast its parameters")));
        }
        for (column, types) in self.columns {
            let Some(found) = prepared.columns().iter().find(|c| c.name() == *column) else {
                return Err(DatabaseFault(format!("{name} returns no column {column}; add it with type {}", types[0])));
            };
            let is = found.type_info().name();
            if !types.contains(&is) {
                return Err(DatabaseFault(format!(
                    "{name} returns column {column} as {is}, not {}; cast it",
                    types[0]
                )));
            }
        }
        Ok(parameters.len())
    }
}

/// `($1 text[], $2 text)`
fn signature(types: &[&str]) -> String {
    let numbered: Vec<String> = (1..).zip(types).map(|(n, name)| format!("${n} {}", name.to_lowercase())).collect();
    format!("({})", numbered.join(", "))
}
