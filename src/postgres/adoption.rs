//! The table `order_timeout_adoption`: on which orders tables workers may close.
//!
//! Stores and reads; decides nothing.

use sqlx::PgConnection;

use super::one_line;
use super::{Database, DatabaseError};

/// Orders on which workers may close, or may not yet.
#[derive(Debug, Clone)]
pub struct Adoptable {
    /// The table.
    pub orders: String,
    /// What decides which of them are overdue; another text is another question. `None`: the table alone.
    pub defined_by: Option<String>,
}

/// Whether workers may close these orders.
///
/// # Errors
/// [`DatabaseError`] if the table cannot be read.
pub async fn is_adopted(database: &Database, what: &Adoptable) -> Result<bool, DatabaseError> {
    let exists = sqlx::query_scalar(
        "SELECT EXISTS (SELECT FROM order_timeout_adoption WHERE orders = $1 || coalesce(' ' || md5($2), ''))",
    );
    let exists = exists.bind(&what.orders).bind(&what.defined_by);
    let read = database.run(async |connection: &mut PgConnection| exists.fetch_one(connection).await).await;
    read.map_err(|error| fault("read", "SELECT", &error))
}

/// Allows workers to close these orders. `by`: what allowed it; `overdue`: how many were overdue.
///
/// # Errors
/// [`DatabaseError`] if the table cannot be written.
pub async fn adopt(database: &Database, what: &Adoptable, by: &str, overdue: i64) -> Result<(), DatabaseError> {
    let insert = sqlx::query(
        "INSERT INTO order_timeout_adoption (orders, by, overdue) VALUES ($1 || coalesce(' ' || md5($2), ''), $3, $4)
         ON CONFLICT (orders) DO NOTHING",
    );
    let insert = insert.bind(&what.orders).bind(&what.defined_by).bind(by).bind(overdue);
    let written = database.run(async |connection: &mut PgConnection| insert.execute(connection).await).await;
    written.map(drop).map_err(|error| fault("written", "SELECT, INSERT", &error))
}

fn fault(done: &str, rights: &str, error: &sqlx::Error) -> DatabaseError {
    DatabaseError(format!(
        "order_timeout_adoption cannot be {done}: {}; GRANT {rights} ON order_timeout_adoption to the worker's role",
        one_line(error)
    ))
}
