//! The table `order_timeout_adoption`: on which orders tables workers may close.
//!
//! Stores and reads; decides nothing.

use sqlx::PgConnection;

use super::one_line;
use super::{Database, DatabaseError};

/// Whether workers may close orders of this table.
///
/// # Errors
/// [`DatabaseError`] if the table cannot be read.
pub async fn is_adopted(database: &Database, orders: &str) -> Result<bool, DatabaseError> {
    let exists =
        sqlx::query_scalar("SELECT EXISTS (SELECT FROM order_timeout_adoption WHERE orders = $1)").bind(orders);
    let read = database.run(async |connection: &mut PgConnection| exists.fetch_one(connection).await).await;
    read.map_err(|error| fault("read", "SELECT", &error))
}

/// Allows workers to close orders of this table. `by`: what allowed it; `overdue`: how many were overdue.
///
/// # Errors
/// [`DatabaseError`] if the table cannot be written.
pub async fn adopt(database: &Database, orders: &str, by: &str, overdue: i64) -> Result<(), DatabaseError> {
    let insert = sqlx::query(
        "INSERT INTO order_timeout_adoption (orders, by, overdue) VALUES ($1, $2, $3) ON CONFLICT (orders) DO NOTHING",
    );
    let insert = insert.bind(orders).bind(by).bind(overdue);
    let written = database.run(async |connection: &mut PgConnection| insert.execute(connection).await).await;
    written.map(drop).map_err(|error| fault("written", "SELECT, INSERT", &error))
}

fn fault(done: &str, rights: &str, error: &sqlx::Error) -> DatabaseError {
    DatabaseError(format!(
        "order_timeout_adoption cannot be {done}: {}; GRANT {rights} ON order_timeout_adoption to the worker's role",
        one_line(error)
    ))
}
