//! Unpaid orders by the time at which they fall due: a page of them, and counts for each minute.
//!
//! Follows the deadline index. Statements of the shop's own tell ids and deadlines and nothing else. Reads only.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::{OrderId, SweepPage, SweepPlace, SweepReach, Timestamp};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row};

use super::{OrdersTable, PAGE_SIZE, Unknown};
use crate::effects::sweep::Sweeper;
use crate::operations::NotKnown;
use crate::postgres::{self, one_line};

/// Rows that a search by text reads at most, for one page: without an index on the text, a word that matches nothing
/// would otherwise read every unpaid order. The next page continues behind them.
const MOST_SEARCHED: usize = 20_000;
/// Orders behind statements of the shop's own that are counted: they are read one by one.
const MOST_COUNTED: usize = 100_000;
/// One minute in microseconds.
const MINUTE_MICROS: i64 = 60_000_000;

/// Deadlines from `from` on, and before `until`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Included.
    pub from: Timestamp,
    /// Excluded.
    pub until: Timestamp,
}

impl Window {
    /// The beginning of its first minute, as a clock shows minutes.
    #[must_use]
    pub fn first_minute(&self) -> Timestamp {
        let micros = self.from.unix_micros();
        Timestamp::from_unix_micros(micros - micros.rem_euclid(MINUTE_MICROS))
    }
}

/// Which orders of a window are listed.
#[derive(Debug, Clone)]
pub struct DueQuery {
    /// The deadlines.
    pub window: Window,
    /// A part of the order's id, or of the id of one of its articles; case is ignored.
    pub text: Option<String>,
    /// The row behind which the page begins.
    pub after: Option<SweepPlace>,
    /// Orders on the page.
    pub limit: usize,
}

/// An order that falls due.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, utoipa::ToSchema)]
pub struct DueOrder {
    /// As the orders table has it.
    #[schema(value_type = String)]
    pub order_id: OrderId,
    /// RFC 3339.
    #[serde(serialize_with = "as_rfc3339")]
    #[schema(value_type = String)]
    pub deadline: Timestamp,
    /// What it costs, if the table says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub money: Option<Money>,
    /// Units of stock that it reserves, if the table says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub units: Option<i64>,
}

fn as_rfc3339<S: serde::Serializer>(deadline: &Timestamp, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&write_rfc3339(*deadline))
}

/// An amount of money.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, utoipa::ToSchema)]
pub struct Money {
    /// Three letters (ISO 4217), or as the shop's own table has it.
    pub currency: String,
    /// In the currency's smallest unit.
    pub amount_minor: i64,
}

impl fmt::Display for Money {
    /// In the currency's usual unit, such as `49.99 EUR`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = minor_digits(&self.currency);
        let (whole, sign) = (self.amount_minor.unsigned_abs(), if self.amount_minor < 0 { "-" } else { "" });
        let unit = 10_u64.pow(digits);
        let text = match digits {
            0 => format!("{sign}{whole} {}", self.currency),
            _ => format!("{sign}{}.{:0width$} {}", whole / unit, whole % unit, self.currency, width = digits as usize),
        };
        f.pad(&text)
    }
}

/// Decimal places of a currency's smallest unit (ISO 4217, the list of active codes).
fn minor_digits(currency: &str) -> u32 {
    match currency {
        "BIF" | "CLP" | "DJF" | "GNF" | "ISK" | "JPY" | "KMF" | "KRW" | "PYG" | "RWF" | "UGX" | "UYI" | "VND"
        | "VUV" | "XAF" | "XOF" | "XPF" => 0,
        "BHD" | "IQD" | "JOD" | "KWD" | "LYD" | "OMR" | "TND" => 3,
        "CLF" | "UYW" => 4,
        _ => 2,
    }
}

/// A page of due orders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DuePage {
    /// By deadline, then by id.
    pub orders: Vec<DueOrder>,
    /// Where the next page begins; `None` at the end.
    pub next: Option<SweepPlace>,
}

/// What falls due in one minute.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DueMinute {
    /// How many orders.
    pub orders: u64,
    /// The sum of their amounts by currency.
    pub money: BTreeMap<String, i64>,
    /// Those among them without an amount.
    pub without_amount: u64,
    /// Units of stock that they reserve; `None` if that is not known.
    pub units: Option<i64>,
}

/// What falls due, by the number of the minute since the beginning of the window's first. Minutes without orders are left
/// out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DueMinutes {
    /// By minute.
    pub minutes: BTreeMap<u32, DueMinute>,
    /// Whether orders were left uncounted because there are too many: then the last minutes are missing.
    pub is_cut: bool,
}

impl OrdersTable {
    /// The database's time.
    ///
    /// # Errors
    /// [`Unknown`] if it cannot be read.
    pub async fn now(&self) -> Result<Timestamp, Unknown> {
        self.read(postgres::now).await
    }

    /// A page of unpaid orders by deadline.
    ///
    /// # Errors
    /// [`Unknown`] if the query fails.
    pub async fn due(&self, query: &DueQuery) -> Result<DuePage, Unknown> {
        let questions = match self.questions() {
            Ok(questions) => questions,
            Err(sweeper) => return self.due_by_statement(sweeper, query).await,
        };
        let searched = if query.text.is_some() { MOST_SEARCHED } else { query.limit };
        let (after_deadline, after_id) = match &query.after {
            Some(place) => (place.deadline, place.id.as_str()),
            // The window's first row is not before it.
            None => (Timestamp::from_unix_micros(i64::MIN), ""),
        };
        let select = sqlx::query(AssertSqlSafe(questions.due.clone()))
            .bind(Timestamptz(query.window.from))
            .bind(Timestamptz(query.window.until))
            .bind(Timestamptz(after_deadline))
            .bind(after_id)
            .bind(query.text.as_deref())
            .bind(signed(searched))
            .bind(signed(query.limit));
        let rows = self.read(async |connection| select.fetch_all(connection).await).await?;
        let rows = rows.iter().map(Found::read).collect::<Result<Vec<_>, _>>().map_err(|error| one_line(&error))?;
        let is_full = rows.len() == query.limit || rows.last().is_some_and(|row| row.number == signed(searched));
        let place = |found: &Found| SweepPlace { deadline: found.order.deadline, id: found.order.order_id.to_string() };
        let next = rows.last().filter(|_| is_full).map(place);
        Ok(DuePage { orders: rows.into_iter().filter(|row| row.matches).map(|row| row.order).collect(), next })
    }

    async fn due_by_statement(&self, sweeper: &Sweeper, query: &DueQuery) -> Result<DuePage, Unknown> {
        let (mut orders, mut searched) = (Vec::new(), 0);
        let mut after = query.after.clone();
        let reach = SweepReach::Ahead(query.window.until.since(self.now().await?));
        loop {
            let limit = if query.text.is_some() { PAGE_SIZE } else { query.limit };
            let page = SweepPage { reach, after: after.or_else(|| Some(before(query.window.from))), limit };
            let swept = sweeper.overdue(&page).await.map_err(|error| one_line(&error))?;
            searched += swept.orders.len();
            for found in swept.orders {
                let is_in = (query.window.from..query.window.until).contains(&found.deadline);
                let id = found.order_id.as_str().to_lowercase();
                if is_in && query.text.as_ref().is_none_or(|text| id.contains(&text.to_lowercase())) {
                    let place = SweepPlace { deadline: found.deadline, id: found.order_id.to_string() };
                    orders.push(DueOrder {
                        order_id: found.order_id,
                        deadline: found.deadline,
                        money: None,
                        units: None,
                    });
                    if orders.len() == query.limit {
                        return Ok(DuePage { orders, next: Some(place) });
                    }
                }
            }
            match swept.next {
                None => return Ok(DuePage { orders, next: None }),
                Some(next) if searched >= MOST_SEARCHED => return Ok(DuePage { orders, next: Some(next) }),
                next => after = next,
            }
        }
    }

    /// Counts what falls due in each minute of the window; by statements of the shop's own, up to 100 000 orders.
    ///
    /// # Errors
    /// [`Unknown`] if the query fails.
    pub async fn due_minutes(&self, window: Window) -> Result<DueMinutes, Unknown> {
        let questions = match self.questions() {
            Ok(questions) => questions,
            Err(sweeper) => return self.count_by_statement(sweeper, window).await,
        };
        let rows = self.ask_window(&questions.due_minutes, window).await?;
        let mut minutes: BTreeMap<u32, DueMinute> = BTreeMap::new();
        for row in &rows {
            add_row(row, &mut minutes).map_err(|error| one_line(&error))?;
        }
        Ok(DueMinutes { minutes, is_cut: false })
    }

    /// The units of stock that unpaid orders reserve, by the minute of the window in which they fall due; `None` if nothing
    /// says how much stock an order reserves.
    ///
    /// # Errors
    /// [`Unknown`] if the query fails.
    pub async fn units_by_minute(&self, window: Window) -> Result<Option<BTreeMap<u32, i64>>, Unknown> {
        let Some(sql) = self.questions().ok().and_then(|questions| questions.units_by_minute.as_ref()) else {
            return Ok(None);
        };
        let rows = self.ask_window(sql, window).await?;
        let read = |row: &PgRow| Ok((row.try_get::<i64, _>("minute")?, row.try_get::<Option<i64>, _>("units")?));
        let rows: Result<Vec<_>, sqlx::Error> = rows.iter().map(read).collect();
        let rows = rows.map_err(|error| one_line(&error))?;
        Ok(Some(rows.into_iter().filter_map(|(minute, units)| Some((u32::try_from(minute).ok()?, units?))).collect()))
    }

    async fn ask_window(&self, sql: &str, window: Window) -> Result<Vec<PgRow>, Unknown> {
        // Rendered from the operator's configuration.
        let select = sqlx::query(AssertSqlSafe(sql.to_owned()))
            .bind(Timestamptz(window.from))
            .bind(Timestamptz(window.until))
            .bind(Timestamptz(window.first_minute()));
        self.read(async |connection| select.fetch_all(connection).await).await
    }

    /// What is not known of these orders, `money` and `stock`, each with the reason.
    #[must_use]
    pub fn untold(&self) -> Vec<NotKnown> {
        let of = |what, why: &str| NotKnown { what, why: why.to_owned() };
        match self.questions() {
            Ok(questions) => questions.why_no_money.iter().map(|why| of("money", why)).collect(),
            Err(_) => {
                let why = "the orders table is known by statements of your own, which return ids and deadlines only";
                vec![of("money", why), of("stock", why)]
            }
        }
    }

    async fn count_by_statement(&self, sweeper: &Sweeper, window: Window) -> Result<DueMinutes, Unknown> {
        let reach = SweepReach::Ahead(window.until.since(self.now().await?));
        let (mut minutes, mut counted): (BTreeMap<u32, DueMinute>, _) = (BTreeMap::new(), 0);
        let mut after = Some(before(window.from));
        loop {
            let page = SweepPage { reach, after, limit: PAGE_SIZE };
            let swept = sweeper.overdue(&page).await.map_err(|error| one_line(&error))?;
            counted += swept.orders.len();
            for found in swept.orders.iter().filter(|found| found.deadline >= window.from) {
                if let Some(minute) = minute_of(window, found.deadline) {
                    let minute = minutes.entry(minute).or_default();
                    (minute.orders, minute.without_amount) = (minute.orders + 1, minute.without_amount + 1);
                }
            }
            after = swept.next;
            if after.is_none() || counted >= MOST_COUNTED {
                return Ok(DueMinutes { minutes, is_cut: after.is_some() });
            }
        }
    }
}

/// The position in front of every row with this deadline.
fn before(deadline: Timestamp) -> SweepPlace {
    SweepPlace { deadline: deadline - Duration::from_micros(1), id: String::new() }
}

fn minute_of(window: Window, deadline: Timestamp) -> Option<u32> {
    let micros = deadline.unix_micros().checked_sub(window.first_minute().unix_micros())?;
    u32::try_from(micros.div_euclid(MINUTE_MICROS)).ok().filter(|_| deadline < window.until)
}

fn add_row(row: &PgRow, minutes: &mut BTreeMap<u32, DueMinute>) -> Result<(), sqlx::Error> {
    let (orders, without_amount): (i64, i64) = (row.try_get("orders")?, row.try_get("without_amount")?);
    let (currency, amount): (Option<String>, Option<i64>) = (row.try_get("currency")?, row.try_get("amount_minor")?);
    let Ok(minute) = u32::try_from(row.try_get::<i64, _>("minute")?) else { return Ok(()) };
    let minute = minutes.entry(minute).or_default();
    minute.orders += orders.unsigned_abs();
    minute.without_amount += without_amount.unsigned_abs();
    if let (Some(currency), Some(amount)) = (currency, amount) {
        let sum = minute.money.entry(currency).or_default();
        *sum = sum.saturating_add(amount);
    }
    Ok(())
}

/// A row of the search.
struct Found {
    order: DueOrder,
    matches: bool,
    number: i64,
}

impl Found {
    fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        let (id, Timestamptz(deadline)): (String, Timestamptz) = (row.try_get("order_id")?, row.try_get("deadline")?);
        let order_id = OrderId::new(id).map_err(|fault| sqlx::Error::Decode(Box::new(fault)))?;
        let (currency, amount): (Option<String>, Option<i64>) =
            (row.try_get("currency")?, row.try_get("amount_minor")?);
        let money = currency.zip(amount).map(|(currency, amount_minor)| Money { currency, amount_minor });
        let order = DueOrder { order_id, deadline, money, units: row.try_get("units")? };
        Ok(Self { order, matches: row.try_get("matches")?, number: row.try_get("number")? })
    }
}

fn signed(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn money_has_digits_of_its_currency() {
        let money = |currency: &str, amount_minor| Money { currency: currency.into(), amount_minor }.to_string();
        assert_eq!([money("EUR", 4_999), money("EUR", 5), money("EUR", -250)], ["49.99 EUR", "0.05 EUR", "-2.50 EUR"]);
        assert_eq!([money("JPY", 500), money("KWD", 1_500)], ["500 JPY", "1.500 KWD"]);
    }

    #[test]
    fn minutes_are_those_of_clock() {
        let at = |seconds: i64| Timestamp::from_unix_micros(seconds * 1_000_000);
        let window = Window { from: at(30), until: at(150) };
        let minutes = [29, 30, 89, 90, 149, 150].map(|second| minute_of(window, at(second)));
        assert_eq!(minutes, [Some(0), Some(0), Some(1), Some(1), Some(2), None]);
        assert_eq!(window.first_minute(), at(0));
        assert!(before(at(30)).deadline < at(30));
    }
}
