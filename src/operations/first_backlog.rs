//! Refuses to start closing a large backlog of old orders on a table where no worker has closed before.
//!
//! Counts with the overdue statement itself. Closes nothing.

use std::time::Duration;

use order_timeout_core::kind::Kind;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::{Deadline, SweepPage, SweepReach};
use serde::Serialize;

use super::orders_statements::{self, DefinedBy};
use crate::config::Settings;
use crate::config::kinds::OrdersOf;
use crate::effects::sweep::Sweeper;
use crate::postgres::adoption::{self, Adoptable};
use crate::postgres::{Database, DatabaseError, one_line};

/// Orders that were due more recently may belong to a worker that is about to be replaced.
const OLDER_THAN: Duration = Duration::from_secs(60);
/// Orders per query.
const PAGE: usize = 10_000;
/// Counting ends here: a larger number says nothing more.
const COUNTED: usize = 1_000_000;

/// The orders that are overdue, for more than a minute where a worker's start depends on them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Backlog {
    /// How many; `COUNTED` if there may be more.
    pub overdue: usize,
    /// Whether counting stopped before the end.
    pub may_be_more: bool,
    /// The deadline of the oldest, as an RFC 3339 time.
    pub oldest: Option<String>,
}

async fn count(sweeper: &Sweeper) -> Result<Backlog, DatabaseError> {
    count_overdue_for(sweeper, OLDER_THAN).await
}

/// Counts the orders that have been overdue for this long.
///
/// # Errors
/// [`DatabaseError`] if the overdue statement fails.
pub async fn count_overdue_for(sweeper: &Sweeper, for_longer_than: Duration) -> Result<Backlog, DatabaseError> {
    let (mut overdue, mut oldest, mut after): (usize, Option<Deadline>, _) = (0, None, None);
    loop {
        let page = SweepPage { reach: SweepReach::Overdue(for_longer_than), after, limit: PAGE };
        let page = sweeper.overdue(&page).await;
        let page =
            page.map_err(|error| DatabaseError(format!("overdue orders cannot be counted: {}", one_line(&error))))?;
        overdue += page.orders.len();
        oldest = oldest.or(page.orders.first().map(|order| order.deadline));
        after = page.next;
        if after.is_none() || overdue >= COUNTED {
            let oldest = oldest.map(write_rfc3339);
            return Ok(Backlog { overdue, may_be_more: after.is_some(), oldest });
        }
    }
}

/// The orders of these statements, as `order_timeout_adoption` remembers them.
#[must_use]
pub fn adoptable(orders: &str, defined_by: &DefinedBy, sweeper: &Sweeper) -> Adoptable {
    let defined_by = match defined_by {
        DefinedBy::Schema => None,
        DefinedBy::Statement => Some(sweeper.statement().as_str().to_owned()),
        DefinedBy::Mapping(text) => Some(text.clone()),
    };
    Adoptable { orders: orders.to_owned(), defined_by }
}

/// Refuses orders with a backlog of more than `sweep.first_backlog` that no worker may close yet. Orders with a smaller
/// one are remembered, and asked about again only if what defines them changes.
///
/// # Errors
/// [`DatabaseError`] says how many orders there are, and how to allow their close.
pub async fn require_adopted(
    database: &Database,
    sweeper: &Sweeper,
    orders: &Adoptable,
    settings: &Settings,
    kind: &Kind,
) -> Result<(), DatabaseError> {
    match judge(database, sweeper, orders, settings, kind).await? {
        Verdict::Adopted => Ok(()),
        Verdict::Small(backlog) => {
            adoption::adopt(database, orders, "first start", i64::try_from(backlog.overdue).unwrap_or(i64::MAX)).await
        }
        Verdict::Refused(why) => Err(DatabaseError(why)),
    }
}

/// Whether a worker may close orders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It was allowed before.
    Adopted,
    /// It may, because so few are overdue.
    Small(Backlog),
    /// It may not; one sentence.
    Refused(String),
}

/// Judges the backlog, and remembers nothing.
///
/// # Errors
/// [`DatabaseError`] if it cannot be counted.
pub async fn judge(
    database: &Database,
    sweeper: &Sweeper,
    orders: &Adoptable,
    settings: &Settings,
    kind: &Kind,
) -> Result<Verdict, DatabaseError> {
    if adoption::is_adopted(database, orders).await? {
        return Ok(Verdict::Adopted);
    }
    let backlog = count(sweeper).await?;
    Ok(match backlog.overdue > usize::try_from(settings.sweep.first_backlog).unwrap_or(usize::MAX) {
        true => Verdict::Refused(refusal(&backlog, &orders.orders, settings, kind)),
        false => Verdict::Small(backlog),
    })
}

/// Allows workers to close the backlog.
///
/// # Errors
/// [`DatabaseError`] if it cannot be counted, or the permission cannot be written.
pub async fn accept(database: &Database, sweeper: &Sweeper, orders: &Adoptable) -> Result<Backlog, DatabaseError> {
    let backlog = count(sweeper).await?;
    adoption::adopt(database, orders, "accepted", i64::try_from(backlog.overdue).unwrap_or(i64::MAX)).await?;
    Ok(backlog)
}

/// Why a worker does not start.
fn refusal(backlog: &Backlog, orders: &str, settings: &Settings, kind: &Kind) -> String {
    let Backlog { overdue, may_be_more, oldest } = backlog;
    let least = if *may_be_more { "at least " } else { "" };
    let oldest = oldest.as_deref().unwrap_or("an unknown time");
    let (what, narrow) = match settings.orders_of(kind) {
        Some(OrdersOf::Table(table)) if !table.is_built_in => (
            format!("the table {}", orders.strip_prefix(&format!("{kind}: ")).unwrap_or(orders)),
            format!(
                "narrow kinds.{kind}.table.open{}, by the deadline, such as open = \"… AND created_at + interval '30 minutes' > '2026-11-01'\"",
                orders_statements::from(settings, kind)
            ),
        ),
        Some(OrdersOf::Statements { .. }) => {
            let [close, overdue] =
                ["close_sql", "overdue_sql"].map(|name| orders_statements::statement_setting(kind, name));
            ("your orders table".to_owned(), format!("narrow the conditions of {close} and {overdue}"))
        }
        Some(OrdersOf::Table(_) | OrdersOf::Handler) | None => (
            "the table orders".to_owned(),
            "cancel them: UPDATE orders SET status = 'cancelled' WHERE status = 'unpaid' AND expires_at < '2026-11-01'"
                .to_owned(),
        ),
    };
    let of_kind = if kind.is_default() { String::new() } else { format!(" --kind {kind}") };
    format!(
        "{least}{overdue} orders of {what} have been overdue for more than a minute, the oldest since {oldest}, and no worker has closed orders so defined before (sweep.first_backlog = {}); to have all of them closed run `order-timeout adopt --accept-backlog{of_kind}`; to leave old ones alone {narrow}",
        settings.sweep.first_backlog
    )
}
