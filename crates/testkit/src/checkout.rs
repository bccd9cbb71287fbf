//! The writes of a shop: orders with the stock they reserve, and payments. Each can be repeated, because a lost answer
//! leaves open whether the transaction was committed.

use std::time::Duration;

use order_timeout_core::order::Timestamp;
use sqlx::PgConnection;
use time::OffsetDateTime;
use uuid::Uuid;

/// Inserts unpaid orders of one article each and reserves their stock, in one statement. They are due after `delay` by
/// the database's clock. Returns the deadlines in their rows.
pub async fn take_orders(
    connection: &mut PgConnection,
    ids: &[Uuid],
    article: &str,
    delay: Duration,
) -> Result<Vec<(Uuid, Timestamp)>, sqlx::Error> {
    sqlx::query(
        "WITH new AS (
             INSERT INTO orders (id, expires_at)
             SELECT id, clock_timestamp() + make_interval(secs => $3) FROM unnest($1::uuid[]) AS id
             ON CONFLICT (id) DO NOTHING RETURNING id
         ), items AS (
             INSERT INTO order_items (order_id, article_id, quantity) SELECT id, $2, 1 FROM new
         )
         UPDATE stock SET available = available - n, reserved = reserved + n
         FROM (SELECT count(*) AS n FROM new) AS counted WHERE article_id = $2",
    )
    .bind(ids)
    .bind(article)
    .bind(delay.as_secs_f64())
    .execute(&mut *connection)
    .await?;
    let rows: Vec<(Uuid, OffsetDateTime)> =
        sqlx::query_as("SELECT id, expires_at FROM orders WHERE id = ANY ($1)").bind(ids).fetch_all(connection).await?;
    Ok(rows.into_iter().map(|(id, at)| (id, Timestamp::from(at))).collect())
}

/// Pays as a shop should: guarded by the status, in the caller's transaction. Returns whether the order was still
/// unpaid.
pub async fn pay(transaction: &mut PgConnection, id: Uuid) -> Result<bool, sqlx::Error> {
    let paid = sqlx::query(
        "UPDATE orders SET status = 'paid', paid_at = clock_timestamp() WHERE id = $1 AND status = 'unpaid'",
    )
    .bind(id)
    .execute(&mut *transaction)
    .await?
    .rows_affected();
    if paid == 1 {
        sqlx::query(
            "UPDATE stock s SET reserved = reserved - i.quantity
             FROM order_items i WHERE i.order_id = $1 AND i.article_id = s.article_id",
        )
        .bind(id)
        .execute(transaction)
        .await?;
    }
    Ok(paid == 1)
}
