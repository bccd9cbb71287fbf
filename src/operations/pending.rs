//! What falls due: unpaid orders by deadline, by window and text, page by page.
//!
//! Reads only. What a table of the shop's own does not tell is left out, and listed with the reason.

use std::fmt;
use std::time::Duration;

use order_timeout_core::message::{read_rfc3339, write_rfc3339};
use order_timeout_core::order::{OrderId, SweepPlace, Timestamp};
use serde::Serialize;

use super::NotKnown;
use super::orders_table::due::{DueOrder, DueQuery, Money, Window};
use super::orders_table::{OrdersTable, Unknown};

/// Orders on a page, if the caller does not say.
pub const PAGE: usize = 100;
/// Orders on a page at most.
pub const LARGEST_PAGE: usize = 1_000;
/// How far the window reaches, if the caller does not say.
pub const USUAL_REACH: Duration = Duration::from_secs(3_600);
/// Characters of a text that is searched for.
const LONGEST_TEXT: usize = 200;

/// Why a question cannot be asked.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PendingError {
    /// An empty window.
    #[error("the window ends at {until}, which is not after its beginning {from}; give a later end")]
    EmptyWindow {
        /// RFC 3339.
        from: String,
        /// RFC 3339.
        until: String,
    },
    /// A page size.
    #[error("{0} orders do not fit on a page; ask for 1 to 1000")]
    PageSize(usize),
    /// A text that no order has.
    #[error("the text to search for has {0} characters; give 1 to 200")]
    Text(usize),
    /// A text that no database keeps.
    #[error("the text to search for contains a NUL character; leave that out")]
    Nul,
    /// A place that no page ends with.
    #[error("{0:?} is not the end of a page; give `next` of the page before, as it was printed")]
    Place(String),
    /// The database.
    #[error("pending orders cannot be read: {0}")]
    Unknown(Unknown),
}

/// A question. `None` is the usual.
#[derive(Debug, Clone, Default)]
pub struct PendingQuery {
    /// The first deadline; now.
    pub from: Option<Timestamp>,
    /// The end of the window, excluded; [`USUAL_REACH`] after its beginning.
    pub until: Option<Timestamp>,
    /// A part of the order's id, or of one of its articles.
    pub text: Option<String>,
    /// Where the page begins: `next` of the page before.
    pub after: Option<String>,
    /// Orders on the page; [`PAGE`].
    pub limit: Option<usize>,
}

/// A question that can be asked.
#[derive(Debug)]
pub struct CheckedQuery {
    from: Option<Timestamp>,
    until: Option<Timestamp>,
    text: Option<String>,
    after: Option<SweepPlace>,
    limit: usize,
}

impl PendingQuery {
    /// # Errors
    /// [`PendingError`] for what makes no sense whenever it is asked.
    pub fn checked(self) -> Result<CheckedQuery, PendingError> {
        let limit = self.limit.unwrap_or(PAGE);
        if !(1..=LARGEST_PAGE).contains(&limit) {
            return Err(PendingError::PageSize(limit));
        }
        let text = self.text.as_deref().map(str::trim).filter(|text| !text.is_empty());
        if let Some(length) = text.map(|text| text.chars().count()).filter(|length| *length > LONGEST_TEXT) {
            return Err(PendingError::Text(length));
        }
        if text.is_some_and(|text| text.contains('\0')) {
            return Err(PendingError::Nul);
        }
        let text = text.map(str::to_owned);
        let after = match self.after {
            None => None,
            Some(text) => Some(read_place(&text).ok_or(PendingError::Place(text))?),
        };
        Ok(CheckedQuery { from: self.from, until: self.until, text, after, limit })
    }
}

/// A page of orders that fall due.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct Pending {
    /// The database's time, RFC 3339.
    pub at: String,
    /// The beginning of the window, RFC 3339.
    pub from: String,
    /// Its end, excluded, RFC 3339.
    pub until: String,
    /// By deadline, then by id.
    pub orders: Vec<PendingOrder>,
    /// The parameter `after` of the next page; absent at the end. A page may have few orders, or none, and a next one:
    /// a search reads 20 000 orders at a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// What could not be found out, and why.
    pub not_known: Vec<NotKnown>,
}

/// An order that falls due.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct PendingOrder {
    /// As the orders table has it.
    #[schema(value_type = String)]
    pub order_id: OrderId,
    /// RFC 3339.
    pub deadline: String,
    /// What it costs, if the table says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub money: Option<Money>,
    /// Units of stock that it reserves, if the table says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub units: Option<i64>,
}

impl From<DueOrder> for PendingOrder {
    fn from(DueOrder { order_id, deadline, money, units }: DueOrder) -> Self {
        Self { order_id, deadline: write_rfc3339(deadline), money, units }
    }
}

/// Reads a page.
///
/// # Errors
/// [`PendingError`].
pub async fn pending(orders: &OrdersTable, query: CheckedQuery) -> Result<Pending, PendingError> {
    let now = orders.now().await.map_err(PendingError::Unknown)?;
    let CheckedQuery { from, until, text, after, limit } = query;
    let window = window(from.unwrap_or(now), until)?;
    let query = DueQuery { window, text, after, limit };
    let page = orders.due(&query).await.map_err(PendingError::Unknown)?;
    let not_known = if orders.is_of_the_shop() { money_and_stock() } else { Vec::new() };
    Ok(Pending {
        at: write_rfc3339(now),
        from: write_rfc3339(window.from),
        until: write_rfc3339(window.until),
        orders: page.orders.into_iter().map(PendingOrder::from).collect(),
        next: page.next.as_ref().map(|place| Place(place).to_string()),
        not_known,
    })
}

/// What no statement of the orders contract tells.
pub(super) fn money_and_stock() -> Vec<NotKnown> {
    let why = "the orders table is your own, and its overdue statement returns ids and deadlines only";
    ["money", "stock"].into_iter().map(|what| NotKnown { what, why: why.to_owned() }).collect()
}

fn window(from: Timestamp, until: Option<Timestamp>) -> Result<Window, PendingError> {
    let until = until.unwrap_or(from + USUAL_REACH);
    if until <= from {
        let (from, until) = (write_rfc3339(from), write_rfc3339(until));
        return Err(PendingError::EmptyWindow { from, until });
    }
    Ok(Window { from, until })
}

/// A row's position as text: `DEADLINE/ID`.
struct Place<'a>(&'a SweepPlace);

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", write_rfc3339(self.0.deadline), self.0.id)
    }
}

fn read_place(text: &str) -> Option<SweepPlace> {
    let (deadline, id) = text.split_once('/')?;
    let id = OrderId::new(id).ok()?;
    Some(SweepPlace { deadline: read_rfc3339(deadline)?, id: id.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_unix_micros(seconds * 1_000_000 + 250)
    }

    #[test]
    fn places_survive_being_printed() {
        // A slash in an id of several columns does not end it.
        let place = SweepPlace { deadline: at(1_000), id: "shop/17".into() };
        assert_eq!(read_place(&Place(&place).to_string()), Some(place));
        for other in ["", "17", "2026-11-20T10:30:00Z/", "yesterday/17"] {
            assert_eq!(read_place(other), None, "{other}");
        }
    }

    #[test]
    fn questions_are_checked_before_asking() {
        let ask = |query: PendingQuery| query.checked().map(drop);
        assert!(ask(PendingQuery::default()).is_ok());
        assert_eq!(ask(PendingQuery { limit: Some(0), ..Default::default() }), Err(PendingError::PageSize(0)));
        assert_eq!(ask(PendingQuery { limit: Some(1_001), ..Default::default() }), Err(PendingError::PageSize(1_001)));
        let text = Some("x".repeat(201));
        assert_eq!(ask(PendingQuery { text, ..Default::default() }), Err(PendingError::Text(201)));
        let text = Some("a\0b".to_owned());
        assert_eq!(ask(PendingQuery { text, ..Default::default() }), Err(PendingError::Nul));
        assert!(ask(PendingQuery { after: Some("17".into()), ..Default::default() }).is_err());
        assert!(window(at(60), Some(at(60))).unwrap_err().to_string().contains("give a later end"));
    }
}
