//! Step 5, CLOSE: one batch, one statement, one transaction.
//!
//! Runs the close statement of the orders contract and reports what it found, order by order. Never decides what
//! becomes of an alarm, never speaks to the broker, and never reports "closed" before the commit is answered.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, Instant};

use sqlx::postgres::{PgConnection, PgRow};
use sqlx::{AssertSqlSafe, Column, Either, Executor, PgPool, Row, SqlSafeStr, SqlStr, Statement, TypeInfo};
use time::OffsetDateTime;

use crate::clock::ClockSample;
use crate::database::{DatabaseFault, Trouble, moment, trouble};
use crate::desk::{CloseFault, Finding, Found};
use crate::order::{ClosedBy, OrderId, Outcome};

/// The close statement for our own schema.
pub const DEFAULT_CLOSE_SQL: &str = include_str!("../sql/close.sql");

/// The columns `close.sql` must have: name, and the types that will do.
const COLUMNS: [(&str, &[&str]); 3] =
    [("order_id", &["TEXT", "VARCHAR"]), ("outcome", &["TEXT", "VARCHAR"]), ("deadline", &["TIMESTAMPTZ"])];

/// How long a lock may be waited for while a batch is taken apart. Short, for its neighbours wait as well.
const LOCK_TIMEOUT_WHEN_ALONE: Duration = Duration::from_millis(20);

/// Closes batches. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Closer {
    pool: PgPool,
    statement: SqlStr,
    takes_path: bool,
}

impl Closer {
    /// Prepares the close statement (`close_sql` names a file; empty means ours) and checks it against the contract.
    ///
    /// # Errors
    /// [`DatabaseFault`] names the file and the column.
    pub async fn prepare(pool: PgPool, close_sql: &str) -> Result<Self, DatabaseFault> {
        let (source, name) = if close_sql.is_empty() {
            (DEFAULT_CLOSE_SQL.to_owned(), "sql/close.sql")
        } else {
            let read = tokio::fs::read_to_string(Path::new(close_sql)).await;
            (
                read.map_err(|error| DatabaseFault(format!("orders.close_sql: {close_sql} cannot be read: {error}")))?,
                close_sql,
            )
        };
        // The statement is configuration: whoever may set it may run any SQL anyhow.
        let statement = AssertSqlSafe(source).into_sql_str();
        let mut connection = pool.acquire().await.map_err(|error| DatabaseFault(format!("{name}: {error}")))?;
        let takes_path = check_contract(&mut connection, statement.clone(), name).await?;
        drop(connection);
        Ok(Self { pool, statement, takes_path })
    }

    /// Closes those of `ids` that are unpaid and due, and says of each what it found; an order without an entry is
    /// unknown. A batch that fails is halved until the order that fails it stands alone.
    pub async fn close(&self, ids: &[OrderId], by: ClosedBy) -> HashMap<OrderId, Finding> {
        let mut findings = HashMap::with_capacity(ids.len());
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.dedup();
        let mut parts = vec![ids];
        let mut is_whole = true;
        while let Some(part) = parts.pop() {
            let error = match self.close_at_once(&part, by, is_whole).await {
                Ok(found) => {
                    findings.extend(found.into_iter().map(|(id, found)| (id, Ok(found))));
                    continue;
                }
                Err(error) => error,
            };
            let fault = self.fault(&error).await;
            let is_away = matches!(fault, CloseFault::Away(_));
            if !is_away && part.len() > 1 {
                is_whole = false;
                let (left, right) = part.split_at(part.len() / 2);
                parts.extend([right.to_vec(), left.to_vec()]);
                continue;
            }
            if is_away {
                // Nobody else in the batch would fare better.
                findings.extend(parts.drain(..).flatten().map(|id| (id, Err(fault.clone()))));
            }
            findings.extend(part.into_iter().map(|id| (id, Err(fault.clone()))));
        }
        findings
    }

    async fn close_at_once(
        &self,
        ids: &[OrderId],
        by: ClosedBy,
        is_whole: bool,
    ) -> Result<Vec<(OrderId, Found)>, sqlx::Error> {
        let mut connection = self.pool.acquire().await?;
        if is_whole {
            // One statement outside a transaction block is a transaction. `fetch_all` returns when the server is ready
            // for the next one, which is after the commit.
            return self.run(&mut connection, ids, by).await;
        }
        let mut transaction = sqlx::Connection::begin(&mut *connection).await?;
        sqlx::query("SELECT set_config('lock_timeout', $1, true)")
            .bind(LOCK_TIMEOUT_WHEN_ALONE.as_millis().to_string())
            .execute(&mut *transaction)
            .await?;
        let found = self.run(&mut transaction, ids, by).await?;
        transaction.commit().await?;
        Ok(found)
    }

    /// Whose fault an error is: nobody's, the order's, or everybody's.
    async fn fault(&self, error: &sqlx::Error) -> CloseFault {
        let why = error.to_string();
        match trouble(error) {
            Trouble::Transient => CloseFault::Transient(why),
            Trouble::Data => CloseFault::OfTheOrder(why),
            // With no order to close, no row's trigger can be at fault.
            Trouble::Broken if self.close_at_once(&[], ClosedBy::Alarm, true).await.is_ok() => {
                CloseFault::OfTheOrder(why)
            }
            Trouble::Broken | Trouble::Away => CloseFault::Away(why),
        }
    }

    async fn run(
        &self,
        connection: &mut PgConnection,
        ids: &[OrderId],
        by: ClosedBy,
    ) -> Result<Vec<(OrderId, Found)>, sqlx::Error> {
        let texts: Vec<&str> = ids.iter().map(OrderId::as_str).collect();
        let mut query = sqlx::query(self.statement.clone()).bind(texts);
        if self.takes_path {
            query = query.bind(by.as_str());
        }
        query.fetch_all(connection).await?.iter().map(read_row).collect()
    }

    /// Asks the database what time it is.
    ///
    /// # Errors
    /// sqlx's, if it cannot be asked.
    pub async fn sample_clock(&self) -> Result<ClockSample, sqlx::Error> {
        let mut connection = self.pool.acquire().await?;
        let asked = Instant::now();
        let said: OffsetDateTime = sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&mut *connection).await?;
        Ok(ClockSample { asked, answered: Instant::now(), database: moment(said) })
    }
}

fn read_row(row: &PgRow) -> Result<(OrderId, Found), sqlx::Error> {
    let order_id: String = row.try_get("order_id")?;
    let word: String = row.try_get("outcome")?;
    let deadline: Option<OffsetDateTime> = row.try_get("deadline")?;
    let order_id = OrderId::new(order_id).map_err(|fault| sqlx::Error::Decode(Box::new(fault)))?;
    let outcome = Outcome::from_contract(&word).ok_or_else(|| {
        sqlx::Error::Decode(
            format!("the close statement's column outcome says {word:?}, which the contract does not know").into(),
        )
    })?;
    Ok((order_id, Found { outcome, deadline: deadline.map(moment) }))
}

/// Returns whether the statement takes the path as a second parameter.
async fn check_contract(connection: &mut PgConnection, statement: SqlStr, name: &str) -> Result<bool, DatabaseFault> {
    let prepared = connection.prepare(statement).await.map_err(|error| {
        DatabaseFault(format!("{name} cannot be prepared: {error}; correct the statement, or run `order-timeout setup` if a table is missing"))
    })?;
    let parameters: Vec<String> = match prepared.parameters() {
        Some(Either::Left(types)) => types.iter().map(|info| info.name().to_owned()).collect(),
        Some(Either::Right(_)) | None => Vec::new(),
    };
    let parameters: Vec<&str> = parameters.iter().map(String::as_str).collect();
    let takes_path = match parameters.as_slice() {
        ["TEXT[]"] => false,
        ["TEXT[]", "TEXT"] => true,
        other => {
            let found = other.join(", ");
            return Err(DatabaseFault(format!(
                "{name} takes ({found}), not ($1 text[]) or ($1 text[], $2 text); cast its parameters"
            )));
        }
    };
    for (column, types) in COLUMNS {
        let Some(found) = prepared.columns().iter().find(|c| c.name() == column) else {
            return Err(DatabaseFault(format!("{name} returns no column {column}; add it with type {}", types[0])));
        };
        if !types.contains(&found.type_info().name()) {
            let is = found.type_info().name();
            return Err(DatabaseFault(format!("{name} returns column {column} as {is}, not {}; cast it", types[0])));
        }
    }
    Ok(takes_path)
}
