//! What an alarm adds to the transaction that creates its order: orders per second on one connection, with and without.

use std::time::{Duration, Instant};

use order_timeout_client::postgres::{Timestamptz, schedule};
use order_timeout_core::order::Timestamp;
use sqlx::{PgConnection, PgPool};
use uuid::Uuid;

const DELAY: Duration = Duration::from_secs(3_600);

/// How the alarm is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AlarmWrite {
    None,
    /// `postgres::schedule`: a separate statement.
    ScheduleIn,
    /// By the statement that inserts the order.
    InTheSameStatement,
}

/// Orders per second, each in its own transaction.
pub async fn per_second(pool: &PgPool, orders: usize, alarm: AlarmWrite) -> anyhow::Result<f64> {
    let mut connection = pool.acquire().await?;
    // Prepared before the clock starts.
    create(&mut connection, alarm).await?;
    let began = Instant::now();
    for _ in 0..orders {
        create(&mut connection, alarm).await?;
    }
    Ok(orders as f64 / began.elapsed().as_secs_f64())
}

async fn create(connection: &mut PgConnection, alarm: AlarmWrite) -> anyhow::Result<()> {
    let (id, deadline) = (Uuid::now_v7(), Timestamp::now_by_local_clock() + DELAY);
    let expires_at = Timestamptz(deadline);
    let mut transaction = sqlx::Connection::begin(connection).await?;
    match alarm {
        AlarmWrite::None | AlarmWrite::ScheduleIn => {
            insert("INSERT INTO orders (id, expires_at) VALUES ($1, $2)", &mut transaction, id, expires_at).await?;
        }
        AlarmWrite::InTheSameStatement => {
            let both = "WITH created AS (INSERT INTO orders (id, expires_at) VALUES ($1, $2) RETURNING id, expires_at)
                        INSERT INTO alarm_outbox (order_id, deadline) SELECT id::text, expires_at FROM created";
            insert(both, &mut transaction, id, expires_at).await?;
        }
    }
    if alarm == AlarmWrite::ScheduleIn {
        schedule(&mut transaction, id.to_string(), deadline).await?;
    }
    Ok(transaction.commit().await?)
}

async fn insert(
    statement: &'static str,
    transaction: &mut PgConnection,
    id: Uuid,
    expires_at: Timestamptz,
) -> Result<(), sqlx::Error> {
    sqlx::query(statement).bind(id).bind(expires_at).execute(transaction).await.map(drop)
}
