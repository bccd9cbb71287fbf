//! Counts the orders that fall due in the next minutes, for the brake. In a task of its own and on a connection of its own:
//! a million orders take seconds, and neither a pause nor the database's clock is read later because of them.
//!
//! Reads orders and writes `closing_minutes`; judges nothing.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::brake::{FORESEE_AHEAD, Minute, minute_of};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::{SweepPlace, Timestamp};
use sqlx::{PgConnection, SqlStr};

use super::sweep::read_row;
use crate::postgres::{Database, closing_minutes};

/// Orders that fall due, per query: as few as a page of the sweep, because orders are closed on the thread that reads them.
const PAGE: i64 = 1_000;
/// So many pages are counted at most: a million orders within minutes.
const MOST_PAGES: usize = 1_000;

/// What counts. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct DueCounter {
    kind: Kind,
    database: Database,
    overdue: SqlStr,
}

/// What is to be counted.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// The present.
    pub at: Timestamp,
    /// The minutes that are written.
    pub minutes: RangeInclusive<Minute>,
    /// Earlier minutes, of which it is known already.
    pub earlier: Vec<(Minute, u64)>,
}

impl DueCounter {
    /// `overdue`: the kind's overdue statement. `database` has one connection for it.
    pub fn new(kind: Kind, database: Database, overdue: SqlStr) -> Self {
        Self { kind, database, overdue }
    }

    /// Counts, and writes how many orders are known to fall due in each of these minutes.
    ///
    /// # Errors
    /// sqlx's. Then nothing is written.
    pub(super) async fn count(self, wanted: Wanted) -> Result<(), sqlx::Error> {
        let counted = count_due(&self.database, &self.overdue, wanted.at).await?;
        let mut due = wanted.earlier;
        due.extend(wanted.minutes.map(|minute| (minute, counted.get(&minute).copied().unwrap_or(0))));
        let write = async |on: &mut PgConnection| closing_minutes::foresee(on, &self.kind, &due).await;
        self.database.run(write).await
    }
}

/// The orders that fall due after `at`, by minute.
pub(crate) async fn count_due(
    database: &Database,
    overdue: &SqlStr,
    at: Timestamp,
) -> Result<BTreeMap<Minute, u64>, sqlx::Error> {
    let mut by_minute = BTreeMap::new();
    let mut after = SweepPlace { deadline: at, id: String::new() };
    for _ in 0..MOST_PAGES {
        let page = sqlx::query(overdue.clone())
            .bind(-FORESEE_AHEAD.as_secs_f64())
            .bind(Timestamptz(after.deadline))
            .bind(after.id.clone())
            .bind(PAGE);
        let rows = database.run(async |on| page.fetch_all(on).await).await?;
        let is_last = i64::try_from(rows.len()).is_ok_and(|found| found < PAGE);
        for row in &rows {
            let (place, order) = read_row(row)?;
            *by_minute.entry(minute_of(place.deadline)).or_default() += u64::from(order.is_some());
            after = place;
        }
        if is_last {
            break;
        }
    }
    Ok(by_minute)
}
