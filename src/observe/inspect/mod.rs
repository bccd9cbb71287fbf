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

use order_timeout_core::problem::{Cause, Problem};

use crate::config::Settings;
use crate::postgres::{Database, DatabaseError, one_line};
use schema::Schema;

/// The result of an inspection for each cause: its problems. Without one the cause does not hold.
pub type Found = Vec<(Cause, Vec<Problem>)>;

/// The sentence about a cause with these problems; `None` if it has none.
#[must_use]
pub fn sentence(problems: &[Problem]) -> Option<String> {
    (!problems.is_empty()).then(|| problems.iter().map(Problem::sentence).collect::<Vec<_>>().join("; "))
}

/// What a worker with these settings needs and the database lacks.
///
/// # Errors
/// [`DatabaseError`] if it cannot be looked at.
pub async fn missing(settings: &Settings) -> Result<Vec<Problem>, DatabaseError> {
    let database = Database::connect(&settings.database, 1).await?;
    let found = Schema::new(settings).look(&database).await;
    let found = found.map_err(|error| DatabaseError(format!("the schema cannot be checked: {}", one_line(&error))))?;
    Ok(found.into_iter().flat_map(|(_, problems)| problems).collect())
}

/// The most items that are named; the rest is counted.
const MOST_NAMED: usize = 4;

/// `a, b and 3 more`
fn listed(items: &[String]) -> String {
    let (named, rest) = items.split_at(items.len().min(MOST_NAMED));
    let named = named.join(", ");
    if rest.is_empty() { named } else { format!("{named} and {} more", rest.len()) }
}

/// The SQL condition that policies may hide rows of `table` from this role where it uses this right on it: expressions of
/// SQL. Only a permissive policy that lets through every row, without a restrictive one beside it, hides nothing.
pub(crate) fn hides_rows(table: &str, right: &str) -> String {
    format!(
        "row_security_active({table}) AND (
             EXISTS (SELECT FROM pg_policy p WHERE p.polrelid = {table} AND NOT p.polpermissive)
             OR NOT EXISTS (
                 SELECT FROM pg_policy p
                 WHERE p.polrelid = {table} AND p.polpermissive
                   AND p.polcmd IN ('*', CASE {right} WHEN 'SELECT' THEN 'r' WHEN 'INSERT' THEN 'a' WHEN 'UPDATE' THEN 'w' ELSE 'd' END)
                   AND (0 = ANY (p.polroles) OR EXISTS (SELECT FROM unnest(p.polroles) AS r WHERE pg_has_role(r, 'USAGE')))
                   AND coalesce(pg_get_expr(CASE {right} WHEN 'INSERT' THEN coalesce(p.polwithcheck, p.polqual) ELSE p.polqual END, p.polrelid), 'true') = 'true'))"
    )
}
