//! Reads what an audit needs: orders page by page, and stock at one moment.
//!
//! Every statement is a transaction of its own that can only read, so that neither locks nor a snapshot are held, and ends at
//! [`LONGEST_STATEMENT`]. Judges nothing.

use std::time::{Duration, Instant};

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::kind::Kind;
use order_timeout_core::order::Timestamp;
use serde::Deserialize;
use sqlx::types::Json;
use sqlx::{AssertSqlSafe, PgConnection};

use super::{BOUNDS_MS, Example, MOST_EXAMPLES};
use crate::config::Settings;
use crate::config::kinds::TableSettings;
use crate::mapping::render::{AuditStatements, Fault, audit};
use crate::mapping::{Facts, Relation, default_tables};
use crate::observe::inspect::hides_rows;
use crate::operations::orders_statements::unfit;
use crate::postgres::catalog::{self, CatalogError};
use crate::postgres::{self, Database, DatabaseError, Lease, grants, one_line};

/// Rows of a page, which takes about a tenth of a second.
const PAGE_ROWS: i64 = 20_000;
const LONGEST_STATEMENT: Duration = Duration::from_secs(30);
/// Nothing is locked, but a migration of the shop may hold the table.
const LONGEST_LOCK_WAIT: Duration = Duration::from_secs(1);
/// How long rows of stock that do not match are left, until they are read again: a shop moves stock all the time.
const BETWEEN_READS: Duration = Duration::from_secs(1);
/// Rows of stock that do not match. With more of them the mapping is wrong.
const MOST_STOCK_ROWS: i64 = 10_000;

const SESSION: &str = "SET default_transaction_read_only = on; SET max_parallel_workers_per_gather = 0";
/// Open orders may be most of the table. For the pages a scan is never right, also without statistics.
const FOR_STOCK: &str = "SET enable_seqscan = on; SET plan_cache_mode = auto";

/// A page of orders, as its statement returns it.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Page {
    pub rows: u64,
    /// The id behind which the next page begins; `None` at the end.
    pub last: Option<String>,
    pub orders: u64,
    pub open: u64,
    pub closed: u64,
    pub latest_ms: Option<f64>,
    /// Fault, currency, orders, and their amounts.
    pub found: Vec<(Fault, Option<String>, u64, i64)>,
    pub examples: Vec<(Fault, Example)>,
    /// Bucket and closes.
    pub lateness: Vec<(usize, u64)>,
    /// Hour, closes, and late ones.
    pub hours: Vec<(usize, u64, u64)>,
}

/// A connection that only reads, and what it asks.
pub(super) struct Reader {
    database: Database,
    connection: Lease,
    pub statements: AuditStatements,
    orders_table: String,
    /// How long the last page took.
    took: Duration,
}

impl Reader {
    pub async fn open(settings: &Settings, kind: &Kind, table: &TableSettings) -> Result<Self, DatabaseError> {
        let mut own = settings.database.clone();
        (own.statement_timeout, own.lock_timeout) = (LONGEST_STATEMENT, LONGEST_LOCK_WAIT);
        let database = Database::connect(&own, 1).await?;
        let unread = |error: sqlx::Error| DatabaseError(format!("the tables cannot be read: {}", one_line(&error)));
        let mut connection = database.connection().await.map_err(unread)?;
        let looked = database.run_on(&mut connection, async |connection| {
            sqlx::raw_sql(SESSION).execute(&mut *connection).await?;
            Ok((grants::missing_to_read(connection, table).await?, has_payments(connection).await?))
        });
        let (lacking, has_payments) = looked.await.map_err(unread)?;
        if !lacking.is_empty() {
            return Err(DatabaseError(grants::sentence(&lacking)));
        }
        let looked = database.run_on(&mut connection, async |connection| {
            let facts = match table.is_built_in {
                true => Ok(default_tables::facts()),
                false => catalog::facts(connection, table).await,
            };
            let hidden = match &facts {
                Ok(facts) => hidden(connection, facts).await?,
                Err(_) => Vec::new(),
            };
            Ok((facts, hidden))
        });
        let (facts, hidden) = looked.await.map_err(unread)?;
        if !hidden.is_empty() {
            let why = "row-level security may hide rows from this role, of which an audit needs all; give it BYPASSRLS, or a policy USING (true)";
            return Err(DatabaseError(format!("{}: {why}", hidden.join(", "))));
        }
        let rendered = facts.and_then(|facts| Ok(audit(&settings.words_of(kind), table, &facts, has_payments)?));
        let statements = rendered.map_err(|fault| match fault {
            CatalogError::Mapping(fault) => unfit(settings, kind, &fault),
            CatalogError::Database(_) => DatabaseError(fault.to_string()),
        })?;
        Ok(Self { database, connection, statements, orders_table: table.table.clone(), took: Duration::ZERO })
    }

    pub async fn now(&mut self) -> Result<Timestamp, DatabaseError> {
        let now = self.database.run_on(&mut self.connection, postgres::now).await;
        now.map_err(|error| self.why_unread(&error))
    }

    /// Reads a page, after a pause that is half as long as the page before took: with random keys 5 million orders would
    /// otherwise take more than two minutes.
    pub async fn page(&mut self, after: &str, since: Timestamp) -> Result<Page, DatabaseError> {
        tokio::time::sleep(self.took / 2).await;
        let began = Instant::now();
        // Rendered from the operator's configuration.
        let select = sqlx::query_scalar(AssertSqlSafe(self.statements.page.clone()))
            .bind(after)
            .bind(Timestamptz(since))
            .bind(PAGE_ROWS)
            .bind(MOST_EXAMPLES as i64)
            .bind(BOUNDS_MS.map(|bound| bound as f64));
        let read = self.database.run_on(&mut self.connection, async |connection| select.fetch_one(connection).await);
        let Json(mut page): Json<Page> = read.await.map_err(|error| self.why_unread(&error))?;
        page.last = page.last.filter(|_| page.rows == PAGE_ROWS.unsigned_abs());
        self.took = began.elapsed();
        Ok(page)
    }

    fn why_unread(&self, error: &sqlx::Error) -> DatabaseError {
        let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code);
        let fix = match code.as_deref() {
            // undefined_table
            Some("42P01") => {
                "; name your orders table in [kinds.order.table] (docs/ADOPTING.md), or its schema in options of database.url"
            }
            // query_canceled
            Some("57014") => {
                "; the index of its primary key must find 20 000 rows within 30 seconds: ANALYZE the table"
            }
            _ => "; fix the database and try again",
        };
        DatabaseError(format!("{} cannot be audited: {}{fix}", self.orders_table, one_line(error)))
    }

    /// The rows of stock that differ by the same amount when they are read again.
    ///
    /// # Errors
    /// One sentence that says why they are not known.
    pub async fn stock(&mut self, stock: &str, statement: &str) -> Result<Vec<Example>, String> {
        let mut read = async || {
            // Rendered from the operator's configuration.
            let select = sqlx::query_scalar(AssertSqlSafe(statement.to_owned())).bind(MOST_STOCK_ROWS);
            let rows = self.database.run_on(&mut self.connection, async |connection| {
                sqlx::raw_sql(FOR_STOCK).execute(&mut *connection).await?;
                select.fetch_one(connection).await
            });
            let rows: Result<Json<Vec<Example>>, _> = rows.await;
            rows.map_err(|error| format!("{stock} cannot be compared with the open orders: {}", one_line(&error)))
        };
        let Json(mut rows) = read().await?;
        if !rows.is_empty() {
            tokio::time::sleep(BETWEEN_READS).await;
            let Json(again) = read().await?;
            rows.retain(|row| again.iter().any(|other| other.id == row.id && other.difference == row.difference));
        }
        Ok(rows)
    }
}

/// Whether our own tables of payments are there, and may be read.
async fn has_payments(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let ask = "SELECT count(*) = 2 FROM unnest(ARRAY[to_regclass('received_payments'), to_regclass('late_payments')]) t
               WHERE t IS NOT NULL AND has_table_privilege(t, 'SELECT')";
    sqlx::query_scalar(ask).fetch_one(connection).await
}

/// The tables of which row-level security may hide rows from the role.
async fn hidden(connection: &mut PgConnection, facts: &Facts) -> Result<Vec<String>, sqlx::Error> {
    let of_stock = facts.stock.iter().flat_map(|(items, stock)| [items, stock]);
    let tables: Vec<String> = std::iter::once(&facts.orders).chain(of_stock).map(Relation::qualified).collect();
    let is_hidden = hides_rows("to_regclass(n.t)", "'SELECT'");
    let ask = format!("SELECT n.t FROM unnest($1::text[]) AS n(t) WHERE {is_hidden}");
    sqlx::query_scalar(AssertSqlSafe(ask)).bind(tables).fetch_all(connection).await
}
