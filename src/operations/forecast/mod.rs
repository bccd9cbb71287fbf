//! What falls due in each of the next minutes (orders, money, stock), beside what can be closed in a minute; and which
//! orders these are (`orders.rs`).
//!
//! Reads only. What cannot be known is left out, and listed with the reason.

mod orders;

use std::collections::BTreeMap;
use std::time::Duration;

use order_timeout_core::message::{read_rfc3339, write_rfc3339};
use order_timeout_core::order::Timestamp;
use serde::Serialize;

use super::close_rate::{CloseRate, close_rate};
use super::orders_table::due::{DueMinute, DueMinutes, Money, Window};
use super::orders_table::{OrdersTable, Unknown};
use super::pause_closing::lasting;
use super::{NotKnown, known};
use crate::postgres::Database;
use crate::postgres::closing_pauses::Pause;

pub use orders::{DueOrders, OrdersQuery, due_orders};

/// How far a forecast reaches, if the caller does not say.
pub const USUAL_REACH: Duration = Duration::from_secs(6 * 3_600);
/// How far it may reach: each minute is a line of the answer.
pub const FURTHEST_REACH: Duration = Duration::from_secs(7 * 86_400);
const MINUTE: Duration = Duration::from_secs(60);

/// Why there is no forecast.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ForecastError {
    /// A reach.
    #[error("a forecast for {0:?} is not possible; ask for 1m to 7d")]
    Reach(Duration),
    /// An empty window.
    #[error("the window ends at {until}, which is not after its beginning {from}; give a later end")]
    EmptyWindow {
        /// RFC 3339.
        from: String,
        /// RFC 3339.
        until: String,
    },
    /// A place that no page ends with.
    #[error("{0:?} is not the end of a page; give `next` of the page before, as it was printed")]
    Place(String),
    /// The database.
    #[error("no forecast is possible: {0}")]
    Unknown(Unknown),
}

/// What falls due. `None` is unknown, and `not_known` says why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct Forecast {
    /// The database's time, RFC 3339.
    pub at: String,
    /// The end of the forecast, RFC 3339.
    pub until: String,
    /// All minutes together.
    pub total: Due,
    /// Minutes in which orders fall due; those without are left out. The first one is the minute of `at`, and counts only
    /// what has not been due yet.
    pub minutes: Vec<ForecastMinute>,
    /// Unpaid orders that are overdue already, and are closed first; absent if not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overdue: Option<u64>,
    /// How many orders a minute can be closed; absent if not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub can_close: Option<CloseRate>,
    /// The pauses because of which nothing of the kind is closed; absent if not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paused: Option<Vec<Pause>>,
    /// Whether all of them can be closed on time; absent if that is not known, or closing is paused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outlook: Option<Outlook>,
    /// What could not be found out, and why.
    pub not_known: Vec<NotKnown>,
}

impl Forecast {
    /// What falls due until the minute that this many minutes from now are in has ended, and that end as RFC 3339.
    #[must_use]
    pub fn within(&self, minutes: u32) -> (Due, String) {
        let sum = add_up(self.minutes.iter().filter(|minute| minute.number <= minutes).map(|minute| &minute.due));
        let now = read_rfc3339(&self.at).unwrap_or(Timestamp::from_unix_micros(0));
        let first = Window { from: now, until: now }.first_minute();
        (sum, write_rfc3339(first + MINUTE * (minutes + 1)))
    }
}

fn add_up<'a>(parts: impl Iterator<Item = &'a Due>) -> Due {
    let (mut sum, mut money) = (Due { units: Some(0), ..Due::default() }, BTreeMap::<&str, i64>::new());
    for part in parts {
        sum.orders += part.orders;
        sum.without_amount += part.without_amount;
        sum.units = sum.units.zip(part.units).map(|(sum, units)| sum.saturating_add(units));
        for Money { currency, amount_minor } in &part.money {
            let sum = money.entry(currency).or_default();
            *sum = sum.saturating_add(*amount_minor);
        }
    }
    let written = |(currency, amount_minor): (&str, i64)| Money { currency: currency.to_owned(), amount_minor };
    sum.money = money.into_iter().map(written).collect();
    sum
}

/// What falls due in some time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct Due {
    /// How many orders.
    pub orders: u64,
    /// Their amounts, a sum for each currency.
    pub money: Vec<Money>,
    /// Orders without a known amount, which no sum contains.
    pub without_amount: u64,
    /// Units of stock that they reserve; absent if not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub units: Option<i64>,
}

/// A minute of the forecast.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct ForecastMinute {
    /// Its beginning, RFC 3339.
    pub at: String,
    /// Minutes since the forecast's first one.
    pub number: u32,
    /// What falls due in it.
    #[serde(flatten)]
    pub due: Due,
}

/// Whether closing keeps up, by orders a minute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct Outlook {
    /// Whether in each minute all that falls due can be closed.
    pub is_on_time: bool,
    /// The most orders that wait for a later minute at once.
    pub most_waiting: u64,
    /// The end of the minute in which that is, RFC 3339; absent if none wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<String>,
    /// How long the last of them waits about, in seconds.
    pub longest_wait_s: u64,
}

/// Counts what falls due within `reach`.
///
/// # Errors
/// [`ForecastError`]. Anything but the orders that cannot be read is listed in `not_known`.
pub async fn forecast(database: &Database, orders: &OrdersTable, reach: Duration) -> Result<Forecast, ForecastError> {
    if !(MINUTE..=FURTHEST_REACH).contains(&reach) {
        return Err(ForecastError::Reach(reach));
    }
    let now = orders.now().await.map_err(ForecastError::Unknown)?;
    // What was due before is overdue.
    let window = Window { from: now, until: now + reach };
    let first = window.first_minute();
    let mut not_known = orders.untold();
    let counted = orders.due_minutes(window).await.map_err(ForecastError::Unknown)?;
    if counted.is_cut {
        let why = "the orders table is behind statements of your own, and only so many of its orders are read; ask for less time";
        not_known.push(NotKnown { what: "later minutes", why: why.to_owned() });
    }
    let minutes = with_units(orders, window, counted, &mut not_known).await;
    let overdue = known("overdue", orders.overdue().await, &mut not_known).map(|found| found.orders);
    let can_close = known("close rate", close_rate(database).await, &mut not_known);
    let paused = known("paused", lasting(database, Some(orders.kind())).await, &mut not_known);
    let is_paused = paused.as_ref().is_some_and(|pauses| !pauses.is_empty());
    let outlook = can_close.as_ref().filter(|_| !is_paused).zip(overdue).map(|(rate, overdue)| {
        let due = minutes.iter().map(|(number, minute)| (*number, minute.orders)).collect();
        outlook(first, overdue, rate.per_minute, &due)
    });
    let minutes: Vec<_> = minutes.iter().map(|(number, minute)| forecast_minute(first, *number, minute)).collect();
    Ok(Forecast {
        at: write_rfc3339(now),
        until: write_rfc3339(window.until),
        total: add_up(minutes.iter().map(|minute| &minute.due)),
        minutes,
        overdue,
        can_close,
        paused,
        outlook,
        not_known,
    })
}

async fn with_units(
    orders: &OrdersTable,
    window: Window,
    counted: DueMinutes,
    not_known: &mut Vec<NotKnown>,
) -> BTreeMap<u32, DueMinute> {
    let mut minutes = counted.minutes;
    if let Some(units) = known("stock", orders.units_by_minute(window).await, not_known).flatten() {
        for (number, minute) in &mut minutes {
            // Orders without items reserve nothing.
            minute.units = Some(units.get(number).copied().unwrap_or(0));
        }
    }
    minutes
}

fn forecast_minute(first: Timestamp, number: u32, minute: &DueMinute) -> ForecastMinute {
    ForecastMinute { at: write_rfc3339(first + MINUTE * number), number, due: due(minute) }
}

fn due(minute: &DueMinute) -> Due {
    let money = minute.money.iter();
    let money = money.map(|(currency, amount)| Money { currency: currency.clone(), amount_minor: *amount });
    Due { orders: minute.orders, money: money.collect(), without_amount: minute.without_amount, units: minute.units }
}

/// Whether closing keeps up if each minute closes `per_minute` orders at most, those that were due before first.
fn outlook(first: Timestamp, overdue: u64, per_minute: u64, due: &BTreeMap<u32, u64>) -> Outlook {
    let (mut waiting, mut most, mut minute) = (overdue, (0, None), 0);
    for (&number, &orders) in due {
        // Minutes in which nothing is due only reduce what waits.
        waiting = waiting.saturating_sub(per_minute.saturating_mul(u64::from(number.saturating_sub(minute))));
        waiting = waiting.saturating_add(orders).saturating_sub(per_minute);
        minute = number + 1;
        if waiting > most.0 {
            most = (waiting, Some(minute));
        }
    }
    let (most_waiting, at) = most;
    Outlook {
        is_on_time: most_waiting == 0,
        most_waiting,
        at: at.map(|minute| write_rfc3339(first + MINUTE * minute)),
        longest_wait_s: most_waiting.saturating_mul(60).div_ceil(per_minute.max(1)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const START: Timestamp = Timestamp::from_unix_micros(0);

    #[test]
    fn outlook_names_worst_minute() {
        let due = BTreeMap::from([(0, 10), (2, 300), (3, 50), (9, 20)]);
        let found = outlook(START, 0, 100, &due);
        assert_eq!((found.is_on_time, found.most_waiting, found.longest_wait_s), (false, 200, 120));
        assert_eq!(found.at.as_deref(), Some("1970-01-01T00:03:00.000Z"));
        let found = outlook(START, 0, 300, &due);
        assert_eq!((found.is_on_time, found.most_waiting, found.at), (true, 0, None));
    }

    #[test]
    fn overdue_orders_are_closed_first() {
        let due = BTreeMap::from([(0, 60)]);
        assert!(outlook(START, 40, 100, &due).is_on_time);
        assert_eq!(outlook(START, 90, 100, &due).most_waiting, 50);
    }

    proptest! {
        #[test]
        fn waiting_orders_match_minute_by_minute(
            overdue in 0_u64..500,
            per_minute in 1_u64..200,
            due in prop::collection::btree_map(0_u32..60, 1_u64..400, 0..20),
        ) {
            let (mut waiting, mut most) = (overdue, 0);
            for minute in 0..60 {
                let orders = due.get(&minute).copied();
                waiting = (waiting + orders.unwrap_or(0)).saturating_sub(per_minute);
                // Minutes in which nothing is due are no news.
                most = if orders.is_some() { most.max(waiting) } else { most };
            }
            prop_assert_eq!(outlook(START, overdue, per_minute, &due).most_waiting, most);
        }
    }

    fn minute(number: u32, units: Option<i64>) -> ForecastMinute {
        let money = vec![Money { currency: "EUR".into(), amount_minor: 500 }];
        let due = Due { orders: 2, units, money, without_amount: 1 };
        ForecastMinute { at: write_rfc3339(START + MINUTE * number), number, due }
    }

    fn forecast(minutes: Vec<ForecastMinute>) -> Forecast {
        let total = add_up(minutes.iter().map(|minute| &minute.due));
        let at = write_rfc3339(START + Duration::from_secs(20));
        let (until, not_known) = (at.clone(), Vec::new());
        Forecast { at, until, total, minutes, overdue: None, can_close: None, paused: None, outlook: None, not_known }
    }

    #[test]
    fn totals_are_unknown_where_parts_are() {
        let total = forecast(vec![minute(0, Some(3)), minute(7, Some(4))]).total;
        assert_eq!((total.orders, total.units, total.without_amount), (4, Some(7), 2));
        assert_eq!(total.money, [Money { currency: "EUR".into(), amount_minor: 1_000 }]);
        assert_eq!(forecast(vec![minute(0, Some(3)), minute(7, None)]).total.units, None);
    }

    #[test]
    fn horizons_end_with_whole_minutes() {
        let forecast = forecast(vec![minute(0, Some(1)), minute(30, Some(2)), minute(31, Some(4))]);
        let (due, until) = forecast.within(30);
        assert_eq!((due.orders, due.units, until.as_str()), (4, Some(3), "1970-01-01T00:31:00.000Z"));
        assert_eq!(forecast.within(60).0.orders, 6);
    }
}
