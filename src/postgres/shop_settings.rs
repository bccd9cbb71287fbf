//! The table `order_timeout_settings`: the settings that functions in the database must know.
//!
//! Stores; decides nothing. The last worker or `order-timeout setup` to start wins, as with every shared table.

use std::collections::BTreeMap;
use std::time::Duration;

use sqlx::PgConnection;
use sqlx::types::Json;

use super::error::is_read_only;
use super::one_line;
use super::{Database, DatabaseError};
use crate::config::Settings;

/// Writes the settings, if they differ from what is stored. What is stored of kinds that are not served here stays.
///
/// # Errors
/// [`DatabaseError`] if the table cannot be written.
pub async fn write(database: &Database, settings: &Settings) -> Result<(), DatabaseError> {
    let seconds = |extension: Option<Duration>| extension.map(|extension| extension.as_secs_f64());
    let extensions: BTreeMap<String, Option<f64>> =
        settings.extensions().into_iter().map(|(kind, extension)| (kind.to_string(), seconds(extension))).collect();
    // Nothing is written in the usual case: a start must not wait for a payment that reads the row.
    let upsert = sqlx::query(
        "INSERT INTO order_timeout_settings AS s (pay_after_deadline, extend_max)
         SELECT $1, jsonb_strip_nulls($2) WHERE NOT EXISTS (
             SELECT FROM order_timeout_settings s
             WHERE s.pay_after_deadline = $1 AND s.extend_max = jsonb_strip_nulls(s.extend_max || $2))
         ON CONFLICT (is_the_only_row) DO UPDATE
             SET pay_after_deadline = excluded.pay_after_deadline, extend_max = jsonb_strip_nulls(s.extend_max || $2)",
    );
    let upsert = upsert.bind(settings.orders.pay_after_deadline).bind(Json(extensions));
    let written = database.run(async |connection: &mut PgConnection| upsert.execute(connection).await).await;
    written.map(drop).or_else(|error| {
        // A standby: `/readyz` says that it is read-only. A worker that waits there for the server to be promoted closes
        // nothing meanwhile, and the guard is not weakened by what the primary's workers have written.
        if is_read_only(&error) {
            return Ok(());
        }
        Err(DatabaseError(format!(
            "order_timeout_settings cannot be written: {}; GRANT SELECT, INSERT, UPDATE ON order_timeout_settings to the worker's role",
            one_line(&error)
        )))
    })
}
