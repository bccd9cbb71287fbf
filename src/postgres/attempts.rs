//! Attempts to pay that a payment provider has to be asked about.
//!
//! Counts them; decides nothing.

use order_timeout_core::kind::Kind;

use super::Database;

/// How many may bring money, as far as this role can see: a shop with tables of its own may have dropped ours.
///
/// # Errors
/// sqlx's.
pub async fn count_open(database: &Database, kind: &Kind) -> Result<i64, sqlx::Error> {
    let sees = "SELECT coalesce(has_table_privilege(to_regclass('payment_attempts'), 'SELECT'), false)";
    let open = "SELECT count(*) FROM payment_attempts WHERE kind = $1 AND state IN ('open', 'paid')";
    let count = database.run(async |connection| match sqlx::query_scalar(sees).fetch_one(&mut *connection).await? {
        true => sqlx::query_scalar(open).bind(kind.as_str()).fetch_one(connection).await,
        false => Ok(0),
    });
    count.await
}
