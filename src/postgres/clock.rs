//! Reads the database's clock, which decides when a deadline has passed.
//!
//! Only reads; `order-timeout-core` carries the readings forward.

use std::time::{Duration, Instant};

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::clock::ClockSample;
use order_timeout_core::order::Timestamp;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};

use super::DIAGNOSIS_TIMEOUT;
use super::connect::{connect_once, connect_options, in_time};
use super::error::DatabaseError;
use super::test_clock::search_path;
use crate::config::DatabaseSettings;

/// The time by the database's clock, which decides when a deadline has passed.
///
/// # Errors
/// sqlx's.
pub async fn now(connection: &mut PgConnection) -> Result<Timestamp, sqlx::Error> {
    let Timestamptz(now): Timestamptz = sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(connection).await?;
    Ok(now)
}

/// The same with our own time before and after it.
///
/// # Errors
/// sqlx's.
pub async fn sample(connection: &mut PgConnection) -> Result<ClockSample, sqlx::Error> {
    let asked = Instant::now();
    let database = now(connection).await?;
    Ok(ClockSample { asked, answered: Instant::now(), database })
}

/// The time by the clock of a database that is used for nothing else, over one connection.
///
/// # Errors
/// [`DatabaseError`] if it does not answer within `timeout`.
pub async fn ask_time(settings: &DatabaseSettings, timeout: Duration) -> Result<Timestamp, DatabaseError> {
    let options = connect_options(settings)?;
    let mut connection = connect_once(&options, timeout, settings.tls_files()).await?;
    // Not prepared, so that it works with any pooler.
    let ask = async {
        if let Some(path) = search_path(&mut connection, None).await? {
            let set = format!("SET search_path = {path}");
            sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut connection).await?;
        }
        let micros = sqlx::raw_sql("SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint::text");
        let micros: String = micros.fetch_one(&mut connection).await?.try_get(0)?;
        micros.parse().map(Timestamp::from_unix_micros).map_err(|fault| sqlx::Error::Decode(Box::new(fault)))
    };
    let now = in_time(&options, timeout, ask).await?;
    // The answer is known, so an error while closing is ignored.
    let _ = tokio::time::timeout(DIAGNOSIS_TIMEOUT, connection.close()).await;
    Ok(now)
}
