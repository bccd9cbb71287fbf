//! A checkout service: `POST /orders` creates an order that times out, `POST /orders/ID/payment` pays it in time.
//!
//! ```sh
//! cargo run -p order-timeout-client --features postgres --example axum_checkout
//! curl -X POST http://127.0.0.1:3000/orders
//! ```
//!
//! Reads `DATABASE_URL` and `LISTEN` (127.0.0.1:3000). Run `order-timeout setup` first.

use std::time::{Duration, SystemTime};

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use order_timeout_client::postgres::{self, Timestamptz};
use serde_json::{Value, json};
use sqlx::PgPool;
use uuid::Uuid;

/// How long a customer has to pay.
const TIME_TO_PAY: Duration = Duration::from_secs(30 * 60);

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let listen = std::env::var("LISTEN").unwrap_or("127.0.0.1:3000".into());
    let app = Router::new().route("/orders", post(create)).route("/orders/{id}/payment", post(pay)).with_state(pool);
    let listener = tokio::net::TcpListener::bind(listen).await?;
    println!("listening: http://{}", listener.local_addr()?);
    axum::serve(listener, app).await?;
    Ok(())
}

async fn create(State(pool): State<PgPool>) -> Result<(StatusCode, Json<Value>), StatusCode> {
    let id = create_order(&pool).await.map_err(unavailable)?;
    Ok((StatusCode::CREATED, Json(json!({ "id": id }))))
}

async fn create_order(pool: &PgPool) -> Result<Uuid, Box<dyn std::error::Error>> {
    let (id, deadline) = (Uuid::now_v7(), SystemTime::now() + TIME_TO_PAY);
    let mut transaction = pool.begin().await?;
    sqlx::query("INSERT INTO orders (id, expires_at) VALUES ($1, $2)")
        .bind(id)
        .bind(Timestamptz(deadline.into()))
        .execute(&mut *transaction)
        .await?;
    postgres::schedule(&mut transaction, id.to_string(), deadline).await?;
    transaction.commit().await?;
    Ok(id)
}

/// The guard `status = 'unpaid'` decides between a payment and the close; the number of rows says which was first.
async fn pay(State(pool): State<PgPool>, Path(id): Path<Uuid>) -> Result<StatusCode, StatusCode> {
    let paid = "UPDATE orders SET status = 'paid', paid_at = now() WHERE id = $1 AND status = 'unpaid'";
    match sqlx::query(paid).bind(id).execute(&pool).await.map_err(|error| unavailable(error.into()))?.rows_affected() {
        1 => Ok(StatusCode::OK),
        // Paid already, closed, or no such order.
        _ => Ok(StatusCode::CONFLICT),
    }
}

fn unavailable(error: Box<dyn std::error::Error>) -> StatusCode {
    eprintln!("{}", order_timeout_client::with_causes(&*error));
    StatusCode::SERVICE_UNAVAILABLE
}
