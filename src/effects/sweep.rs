//! The safety net: asks the database for unpaid orders past their deadline, page by page along the deadline index; and the
//! look-ahead, which asks for those that fall due next as well.
//!
//! Reads only. The engine decides which orders to close or skip; they are closed by the same statement as orders with
//! an alarm.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::order::{OrderId, Overdue, SweepPage, SweepPlace, SweptPage, Timestamp};
use sqlx::Row;
use sqlx::postgres::PgRow;
use tracing::{debug, warn};

use crate::postgres::contract::{Contract, ContractStatement, StatementSource};
use crate::postgres::{Database, DatabaseError};

const CONTRACT: Contract = Contract {
    setting: "orders.overdue_sql",
    parameters: &[&["FLOAT8", "TIMESTAMPTZ", "TEXT", "INT8"]],
    columns: &[("order_id", &["TEXT", "VARCHAR"]), ("deadline", &["TIMESTAMPTZ"])],
};

/// Looks for overdue orders. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Sweeper {
    database: Database,
    statement: ContractStatement,
    warned: Arc<AtomicBool>,
}

impl Sweeper {
    /// Prepares the statement (a text names its file) and checks it against the contract.
    ///
    /// # Errors
    /// [`DatabaseError`] names the file and the column.
    pub async fn prepare(database: Database, source: impl Into<StatementSource>) -> Result<Self, DatabaseError> {
        let statement = ContractStatement::load(&database, &CONTRACT, &source.into()).await?;
        Ok(Self { database, statement, warned: Arc::default() })
    }

    /// The statement.
    #[must_use]
    pub fn statement(&self) -> sqlx::SqlStr {
        self.statement.sql.clone()
    }

    /// The statement that creates the index for it, where that is known.
    #[must_use]
    pub fn index(&self) -> Option<String> {
        self.statement.index.clone()
    }

    /// One page, ordered by (deadline, id). A row with an unusable id is left out, and the pass continues behind it.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn overdue(&self, page: &SweepPage) -> Result<SweptPage, sqlx::Error> {
        let (after_deadline, after_id) = match &page.after {
            Some(last) => (last.deadline, last.id.as_str()),
            None => (Timestamp::from_unix_micros(i64::MIN), ""),
        };
        let select = sqlx::query(self.statement.sql.clone())
            .bind(page.reach.grace_s())
            .bind(Timestamptz(after_deadline))
            .bind(after_id)
            .bind(i64::try_from(page.limit).unwrap_or(i64::MAX));
        let rows = self.database.run(async |connection| select.fetch_all(connection).await).await?;
        let read = rows.iter().map(read_row).collect::<Result<Vec<_>, _>>()?;
        let (mut places, orders): (Vec<_>, Vec<_>) = read.into_iter().unzip();
        let orders: Vec<Overdue> = orders.into_iter().flatten().collect();
        self.warn_once(places.len() - orders.len());
        let next = if places.len() < page.limit { None } else { places.pop() };
        Ok(SweptPage { orders, next })
    }

    /// Each pass finds the same rows again, several times a second.
    fn warn_once(&self, unusable: usize) {
        if unusable > 0 && !self.warned.swap(true, Ordering::Relaxed) {
            warn!(
                unusable,
                "overdue orders have ids or deadlines that cannot be used, and are never closed: an id has 1 to 200 bytes of UTF-8 without control characters, a deadline is of the years 1 to 9999; correct their rows"
            );
        }
    }
}

/// A row by the names of its columns, which may be in any order: its place, and the order if its id and deadline can be used.
/// No other id may leave, in whichever message.
pub(crate) fn read_row(row: &PgRow) -> Result<(SweepPlace, Option<Overdue>), sqlx::Error> {
    // A database without an encoding has any bytes.
    let id = row.try_get_raw("order_id")?.as_bytes().map_err(sqlx::Error::Decode)?;
    let text = String::from_utf8_lossy(id).into_owned();
    let Some(Timestamptz(deadline)) = row.try_get("deadline")? else {
        let why = format!(
            "orders.overdue_sql returns order {text:?} without a deadline; such an order is never due, leave it out"
        );
        return Err(sqlx::Error::Decode(why.into()));
    };
    let order_id = std::str::from_utf8(id).ok().and_then(|id| OrderId::new(id).ok()).filter(|_| deadline.can_be_due());
    if order_id.is_none() {
        debug!(id = text, "an overdue order is skipped: its id or its deadline cannot be used");
    }
    Ok((SweepPlace { deadline, id: text }, order_id.map(|order_id| Overdue { order_id, deadline })))
}
