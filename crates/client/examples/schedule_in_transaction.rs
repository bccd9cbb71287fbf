//! Creates an order and schedules its timeout in one Postgres transaction, without a broker:
//!
//! ```sh
//! cargo run -p order-timeout-client --features postgres --example schedule_in_transaction
//! ```
//!
//! Reads `DATABASE_URL`. Run `order-timeout setup` first; a worker publishes the alarm.

use std::error::Error;
use std::time::{Duration, SystemTime};

use order_timeout_client::postgres::{self, Timestamptz};
use sqlx::PgPool;
use uuid::Uuid;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let (id, deadline) = (Uuid::now_v7(), SystemTime::now() + Duration::from_secs(30 * 60));

    let mut transaction = pool.begin().await?;
    sqlx::query("INSERT INTO orders (id, expires_at) VALUES ($1, $2)")
        .bind(id)
        .bind(Timestamptz(deadline.into()))
        .execute(&mut *transaction)
        .await?;
    postgres::schedule(&mut transaction, id.to_string(), deadline).await?;
    // The order and its alarm exist from now on, or neither does.
    transaction.commit().await?;
    println!("created: order {id}");
    Ok(())
}
