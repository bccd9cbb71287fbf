//! What is looked at while orders are closed: whether the database still has what the promises rest on, whether the two
//! statements of the orders contract agree, whether the outboxes get through, and whether the workers agree.
//!
//! Finds causes and says how to remove them; changes nothing but this worker's own row in `order_timeout_workers`.
//! `worker/inspections.rs` says when the database is asked; `contract_watch.rs`, `relay_watch.rs` and the judgement in
//! `plan.rs` are pure and are told what happened.

pub mod contract_watch;
pub mod plan;
pub mod registration;
pub mod relay_watch;
pub mod schema;

use crate::config::{DatabaseSettings, OrdersSettings};
use crate::database::{Database, DatabaseError, one_line};
use schema::Schema;

/// Insists that the database has what a worker with these settings needs.
///
/// # Errors
/// [`DatabaseError`], one sentence that says what is missing.
pub async fn require_complete(settings: &DatabaseSettings, orders: &OrdersSettings) -> Result<(), DatabaseError> {
    let database = Database::connect(settings, 1).await?;
    let found = Schema::new(orders).look(&database).await;
    let found = found.map_err(|error| DatabaseError(format!("the schema cannot be checked: {}", one_line(&error))))?;
    let missing: Vec<String> = found.into_iter().filter_map(|(_, why)| why).collect();
    if missing.is_empty() { Ok(()) } else { Err(DatabaseError(missing.join("; "))) }
}

/// At most so many are named; the rest is counted.
const NAMED: usize = 4;

/// `a, b and 3 more`
fn listed(things: &[String]) -> String {
    let (named, rest) = things.split_at(things.len().min(NAMED));
    let named = named.join(", ");
    if rest.is_empty() { named } else { format!("{named} and {} more", rest.len()) }
}
