//! What went wrong with the orders of the last days, found in the orders table itself: before its adoption, or every night as a
//! proof of the worker's own closes.
//!
//! Reads only (`read.rs`), and needs no table of ours. What a mapping does not tell is listed by name, and never shown as zero.

mod read;

use order_timeout_core::kind::Kind;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::Timestamp;
use serde::{Deserialize, Serialize};

use super::NotKnown;
use super::orders_table::due::Money;
use crate::config::Settings;
use crate::config::kinds::OrdersOf;
use crate::mapping::render::{AuditStatements, Fault};
use crate::postgres::DatabaseError;
use read::{Page, Reader};

/// Examples of each fault.
const MOST_EXAMPLES: usize = 20;

/// The bounds of the buckets of lateness in milliseconds, as a person names them: to a second, a minute, an hour, and a day.
const BOUNDS_MS: [u64; 37] = [
    1, 2, 3, 5, 7, 10, 20, 30, 50, 70, 100, 200, 300, 500, 700, 1_000, 2_000, 3_000, 5_000, 10_000, 15_000, 20_000,
    30_000, 45_000, 60_000, 120_000, 180_000, 300_000, 600_000, 900_000, 1_200_000, 1_800_000, 3_600_000, 7_200_000,
    10_800_000, 21_600_000, 86_400_000,
];

/// The result of an audit. All times are RFC 3339.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Audit {
    /// As the mapping writes it.
    pub orders_table: String,
    /// The zone of the hours.
    pub time_zone: String,
    /// The database's time.
    pub at: String,
    /// Orders with an earlier deadline are left out.
    pub since: String,
    /// Rows that were read.
    pub rows: u64,
    /// Those with a deadline since then.
    pub orders: u64,
    /// Of these.
    pub open: u64,
    /// Of these.
    pub closed: u64,
    /// Every fault that can be known, also those of which there are none.
    pub faults: Vec<Found>,
    /// Null if not known, or if there were no closes.
    pub lateness: Option<Lateness>,
    /// What could not be found out, and why.
    pub not_known: Vec<NotKnown>,
}

impl Audit {
    /// Whether nothing is wrong, as far as that is known.
    #[must_use]
    pub fn is_right(&self) -> bool {
        self.faults.iter().all(|found| found.count == 0)
    }
}

/// How often a fault was found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Found {
    /// Which.
    pub fault: Fault,
    /// Orders, or rows of stock.
    pub count: u64,
    /// What these orders cost, or what was kept; a sum for each currency.
    pub money: Vec<Money>,
    /// Up to 20 of them, the furthest from their deadline first.
    pub examples: Vec<Example>,
}

/// An order, or a row of stock; null is what is not known.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Example {
    /// The order's id; for stock its table and key.
    pub id: String,
    /// Of the order.
    pub deadline: Option<String>,
    /// When it was closed.
    pub closed_at: Option<String>,
    /// When it was paid.
    pub paid_at: Option<String>,
    /// How long after its deadline it was closed, or is open now; negative before it.
    pub after_ms: Option<f64>,
    /// What it costs, or what was kept, in the currency's smallest unit.
    pub amount_minor: Option<i64>,
    /// Of the amount.
    pub currency: Option<String>,
    /// What the row of stock reserves.
    pub reserves: Option<String>,
    /// What the open orders need of it.
    pub needs: Option<String>,
    /// What it reserves more; negative if less.
    pub difference: Option<String>,
}

impl Example {
    /// What it costs, or what was kept.
    #[must_use]
    pub fn money(&self) -> Option<Money> {
        Some(Money { currency: self.currency.clone()?, amount_minor: self.amount_minor? })
    }

    fn distance_ms(&self) -> f64 {
        self.after_ms.map_or(0.0, f64::abs)
    }
}

/// How late closes were. Those before the deadline are not among them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Lateness {
    /// How many.
    pub closes: u64,
    /// Half of them were at most this late; as the next two, rounded up to the bound of a bucket.
    pub p50_ms: u64,
    /// 90 in a hundred.
    pub p90_ms: u64,
    /// 99 in a hundred.
    pub p99_ms: u64,
    /// The latest.
    pub max_ms: u64,
    /// By lateness.
    pub buckets: Vec<Bucket>,
    /// The hours of the day, 24 of them.
    pub hours: [Hour; 24],
}

/// Closes that were about as late.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Bucket {
    /// All were less late; null for the last bucket, which has no bound.
    pub below_ms: Option<u64>,
    /// How many.
    pub closes: u64,
}

/// The closes in one hour of the day.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Hour {
    /// How many.
    pub closes: u64,
    /// Those that were more than a minute late.
    pub late: u64,
}

/// Audits the orders of a kind with a deadline in the last `days`, or later.
///
/// # Errors
/// [`DatabaseError`] names the rights that the role lacks, or the setting that does not fit the table.
pub async fn audit(settings: &Settings, kind: &Kind, days: u16) -> Result<Audit, DatabaseError> {
    let Some(OrdersOf::Table(table)) = settings.orders_of(kind) else { return Err(DatabaseError(why_not(kind))) };
    let mut reader = Reader::open(settings, kind, table).await?;
    let now = reader.now().await?;
    let since = Timestamp::from_unix_micros(now.unix_micros() - i64::from(days) * 86_400_000_000);
    let AuditStatements { known, not_known, stock, .. } = reader.statements.clone();
    let mut audit = Audit {
        orders_table: table.table.clone(),
        time_zone: table.time_zone.clone().unwrap_or_else(|| "UTC".to_owned()),
        at: write_rfc3339(now),
        since: write_rfc3339(since),
        rows: 0,
        orders: 0,
        open: 0,
        closed: 0,
        faults: known.into_iter().map(|fault| Found { fault, count: 0, money: vec![], examples: vec![] }).collect(),
        lateness: None,
        not_known: not_known.into_iter().map(|(what, why)| NotKnown { what, why }).collect(),
    };
    let (mut after, mut lateness) = (Some(String::new()), Lateness::none());
    while let Some(place) = after {
        let mut page = reader.page(&place, since).await?;
        after = page.last.take();
        lateness.add(&page);
        audit.add(page);
    }
    audit.lateness = lateness.finished();
    for (table, statement) in &stock {
        let found = match shares_stock(settings, kind, table) {
            true => Err(format!("orders of another kind reserve {table} as well, and are not counted here")),
            false => reader.stock(table, statement).await,
        };
        match found {
            Ok(rows) => rows.into_iter().for_each(|row| audit.add_stock(row)),
            Err(why) => audit.not_known.push(NotKnown { what: "stock", why }),
        }
    }
    Ok(audit)
}

/// Why the orders of a kind without a mapping cannot be audited.
#[must_use]
pub fn why_not(kind: &Kind) -> String {
    format!(
        "orders of kind \"{kind}\" are known by statements of your own or by a handler, which tell nothing of closed orders; describe their table in [kinds.{kind}.table] of a settings file for this command (docs/ADOPTING.md)"
    )
}

/// Whether orders of another kind reserve the same stock.
fn shares_stock(settings: &Settings, kind: &Kind, stock: &str) -> bool {
    let others = settings.all_kinds().into_iter().filter(|other| other != kind);
    let tables: Vec<_> = others.filter_map(|other| settings.table_of(&other)).collect();
    tables.iter().any(|table| table.stock.iter().any(|entry| entry.table == stock))
}

impl Audit {
    fn of(&mut self, fault: Fault) -> Option<&mut Found> {
        self.faults.iter_mut().find(|found| found.fault == fault)
    }

    fn add(&mut self, page: Page) {
        self.rows += page.rows;
        self.orders += page.orders;
        self.open += page.open;
        self.closed += page.closed;
        for (fault, currency, orders, minor) in page.found {
            let Some(Found { count, money, .. }) = self.of(fault) else { continue };
            *count += orders;
            let Some(currency) = currency else { continue };
            match money.iter_mut().find(|sum| sum.currency == currency) {
                Some(sum) => sum.amount_minor = sum.amount_minor.saturating_add(minor),
                None => money.push(Money { currency, amount_minor: minor }),
            }
        }
        for (fault, example) in page.examples {
            let Some(Found { examples, .. }) = self.of(fault) else { continue };
            let place = examples.partition_point(|other| other.distance_ms() >= example.distance_ms());
            examples.insert(place, example);
            examples.truncate(MOST_EXAMPLES);
        }
    }

    fn add_stock(&mut self, row: Example) {
        let is_less = row.difference.as_ref().is_some_and(|difference| difference.starts_with('-'));
        let fault = if is_less { Fault::StockGivenBackTwice } else { Fault::StockNotGivenBack };
        let Some(Found { count, examples, .. }) = self.of(fault) else { return };
        *count += 1;
        examples.push(row);
        examples.truncate(MOST_EXAMPLES);
    }
}

impl Lateness {
    fn none() -> Self {
        let bounds = BOUNDS_MS.into_iter().map(Some).chain([None]);
        let buckets = bounds.map(|below_ms| Bucket { below_ms, closes: 0 }).collect();
        Self { closes: 0, p50_ms: 0, p90_ms: 0, p99_ms: 0, max_ms: 0, buckets, hours: [Hour::default(); 24] }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a positive number of milliseconds
    fn add(&mut self, page: &Page) {
        self.max_ms = self.max_ms.max(page.latest_ms.unwrap_or_default().ceil() as u64);
        for (bucket, closes) in &page.lateness {
            self.closes += closes;
            self.buckets[*bucket].closes += closes;
        }
        for (hour, closes, late) in &page.hours {
            self.hours[*hour].closes += closes;
            self.hours[*hour].late += late;
        }
    }

    /// `None` if there was no close.
    fn finished(mut self) -> Option<Self> {
        [self.p50_ms, self.p90_ms, self.p99_ms] = [50, 90, 99].map(|hundredth| self.at_most(hundredth));
        let has_closes = |bucket: &Bucket| bucket.closes > 0;
        let (first, last) = (self.buckets.iter().position(has_closes)?, self.buckets.iter().rposition(has_closes)?);
        self.buckets = self.buckets[first..=last].to_vec();
        Some(self)
    }

    fn at_most(&self, hundredth: u64) -> u64 {
        let (wanted, mut seen) = ((self.closes * hundredth).div_ceil(100), 0);
        let reached = self.buckets.iter().find(|bucket| {
            seen += bucket.closes;
            seen >= wanted
        });
        reached.and_then(|bucket| bucket.below_ms).map_or(self.max_ms, |bound| bound.min(self.max_ms))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_bounds_of_buckets() {
        let mut lateness = Lateness::none();
        lateness.add(&Page { latest_ms: Some(7.5), lateness: vec![(0, 50), (5, 9)], ..Page::default() });
        lateness.add(&Page { latest_ms: Some(90_500.2), lateness: vec![(5, 40), (25, 1)], ..Page::default() });
        let lateness = lateness.finished().unwrap();
        assert_eq!((lateness.closes, lateness.p50_ms, lateness.p90_ms, lateness.p99_ms), (100, 1, 10, 10));
        assert_eq!((lateness.max_ms, lateness.buckets.len()), (90_501, 26));
        assert_eq!(lateness.buckets[25], Bucket { below_ms: Some(120_000), closes: 1 });
        assert_eq!(Lateness::none().finished(), None);
        assert!(BOUNDS_MS.is_sorted_by(|one, next| one < next));
    }
}
