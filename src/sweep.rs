//! The safety net: asks the database for unpaid orders whose time is up, page by page along the deadline index.
//!
//! Reads only. Whom to close and whom to leave alone is decided at the desk; closing is the same close as everybody's.

use sqlx::Row;
use sqlx::postgres::PgRow;

use crate::contract::{Contract, ContractStatement};
use crate::database::{Database, DatabaseFault, Timestamptz};
use crate::order::{Moment, OrderId, Overdue, SweepPage};

const CONTRACT: Contract = Contract {
    setting: "orders.overdue_sql",
    default: ("sql/overdue.sql", include_str!("../sql/overdue.sql")),
    parameters: &[&["FLOAT8", "TIMESTAMPTZ", "TEXT", "INT8"]],
    columns: &[("order_id", &["TEXT", "VARCHAR"]), ("deadline", &["TIMESTAMPTZ"])],
};

/// Looks for overdue orders. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Sweeper {
    database: Database,
    statement: ContractStatement,
}

impl Sweeper {
    /// Prepares the statement (`overdue_sql` names a file; empty means ours) and checks it against the contract.
    ///
    /// # Errors
    /// [`DatabaseFault`] names the file and the column.
    pub async fn prepare(database: Database, overdue_sql: &str) -> Result<Self, DatabaseFault> {
        let statement = ContractStatement::load(&database, &CONTRACT, overdue_sql).await?;
        Ok(Self { database, statement })
    }

    /// One page, in the order (deadline, id).
    ///
    /// # Errors
    /// sqlx's.
    pub async fn overdue(&self, page: &SweepPage) -> Result<Vec<Overdue>, sqlx::Error> {
        let (after_deadline, after_id) = match &page.after {
            Some(last) => (last.deadline, last.order_id.as_str()),
            None => (Moment::from_unix_micros(i64::MIN), ""),
        };
        let select = sqlx::query(self.statement.sql.clone())
            .bind(page.grace.as_secs_f64())
            .bind(Timestamptz(after_deadline))
            .bind(after_id)
            .bind(i64::try_from(page.limit).unwrap_or(i64::MAX));
        let rows = self.database.run(async |connection| select.fetch_all(connection).await).await?;
        rows.iter().map(read_row).collect()
    }
}

fn read_row(row: &PgRow) -> Result<Overdue, sqlx::Error> {
    let order_id: String = row.try_get("order_id")?;
    let Timestamptz(deadline) = row.try_get("deadline")?;
    let order_id = OrderId::new(order_id).map_err(|fault| sqlx::Error::Decode(Box::new(fault)))?;
    Ok(Overdue { order_id, deadline })
}
