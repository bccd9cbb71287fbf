//! Inspections of a running worker: whether the database still has what the guarantees depend on, whether the two
//! statements of the orders contract agree, whether the outboxes are emptied, whether the workers agree, and whether the
//! sweep has to close orders.
//!
//! Finds causes of degradation and names their fix; changes nothing but this worker's own row in
//! `order_timeout_workers`. `runtime/inspections.rs` decides when the database is queried; `contract_watch.rs`,
//! `relay_watch.rs`, `sweep_watch.rs` and the judgement in `plan.rs` are pure.

pub mod contract_watch;
pub mod plan;
pub mod registration;
pub mod relay_watch;
pub mod schema;
pub mod sweep_watch;

use std::fmt;

use crate::config::Settings;
use crate::observe::degraded::Cause;
use crate::postgres::{Database, DatabaseError, one_line};
use schema::Schema;

/// Something that is wrong, and how to fix it. Displayed as one sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// What is wrong.
    pub what: String,
    /// What to do, such as a statement to run.
    pub fix: String,
}

impl Fault {
    fn new(what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { what: what.into(), fix: fix.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.fix)
    }
}

/// The result of an inspection for each cause: its faults. Without a fault the cause does not hold.
pub type Found = Vec<(Cause, Vec<Fault>)>;

/// The sentence about a cause with these faults; `None` if it has none.
#[must_use]
pub fn sentence(faults: &[Fault]) -> Option<String> {
    (!faults.is_empty()).then(|| faults.iter().map(Fault::to_string).collect::<Vec<_>>().join("; "))
}

/// Checks that the database has what a worker with these settings needs.
///
/// # Errors
/// [`DatabaseError`], one sentence that names what is missing.
pub async fn require_complete(settings: &Settings) -> Result<(), DatabaseError> {
    let database = Database::connect(&settings.database, 1).await?;
    let found = Schema::new(settings).look(&database).await;
    let found = found.map_err(|error| DatabaseError(format!("the schema cannot be checked: {}", one_line(&error))))?;
    let missing: Vec<String> = found.iter().filter_map(|(_, faults)| sentence(faults)).collect();
    if missing.is_empty() { Ok(()) } else { Err(DatabaseError(missing.join("; "))) }
}

/// The most items that are named; the rest is counted.
const MOST_NAMED: usize = 4;

/// `a, b and 3 more`
fn listed(items: &[String]) -> String {
    let (named, rest) = items.split_at(items.len().min(MOST_NAMED));
    let named = named.join(", ");
    if rest.is_empty() { named } else { format!("{named} and {} more", rest.len()) }
}
