//! The orders that fall due in a window, by deadline and text, page by page.
//!
//! Reads only. What a table of the shop's own does not tell is left out, and listed with the reason.

use order_timeout_core::message::{read_rfc3339, write_rfc3339};
use order_timeout_core::order::{OrderId, SweepPlace, Timestamp};
use serde::Serialize;

use super::{ForecastError, USUAL_REACH};
use crate::operations::NotKnown;
use crate::operations::orders_table::OrdersTable;
use crate::operations::orders_table::due::{DueOrder, DueQuery, Window};

/// Which orders of which window. `None` is the usual.
#[derive(Debug, Clone)]
pub struct OrdersQuery {
    /// The first deadline; now.
    pub from: Option<Timestamp>,
    /// The end of the window, excluded; [`USUAL_REACH`] after its beginning.
    pub until: Option<Timestamp>,
    /// A part of the order's id, or of one of its articles.
    pub text: Option<String>,
    /// Where the page begins: `next` of the page before.
    pub after: Option<String>,
    /// Orders on the page.
    pub limit: usize,
}

/// A page of orders that fall due.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, utoipa::ToSchema)]
pub struct DueOrders {
    /// The database's time, RFC 3339.
    pub at: String,
    /// The beginning of the window, RFC 3339.
    pub from: String,
    /// Its end, excluded, RFC 3339.
    pub until: String,
    /// By deadline, then by id.
    pub orders: Vec<DueOrder>,
    /// The parameter `after` of the next page; absent at the end. A page may have few orders, or none, and a next one:
    /// a search reads 20 000 orders at a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// What could not be found out, and why.
    pub not_known: Vec<NotKnown>,
}

/// Reads a page.
///
/// # Errors
/// [`ForecastError`].
pub async fn due_orders(orders: &OrdersTable, query: OrdersQuery) -> Result<DueOrders, ForecastError> {
    let after = match query.after {
        None => None,
        Some(text) => Some(read_place(&text).ok_or(ForecastError::Place(text))?),
    };
    let now = orders.now().await.map_err(ForecastError::Unknown)?;
    let window = window(query.from.unwrap_or(now), query.until)?;
    let text = query.text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    let page = orders.due(&DueQuery { window, text, after, limit: query.limit }).await;
    let page = page.map_err(ForecastError::Unknown)?;
    Ok(DueOrders {
        at: write_rfc3339(now),
        from: write_rfc3339(window.from),
        until: write_rfc3339(window.until),
        orders: page.orders,
        next: page.next.as_ref().map(write_place),
        not_known: orders.untold(),
    })
}

fn window(from: Timestamp, until: Option<Timestamp>) -> Result<Window, ForecastError> {
    let until = until.unwrap_or(from + USUAL_REACH);
    if until <= from {
        return Err(ForecastError::EmptyWindow { from: write_rfc3339(from), until: write_rfc3339(until) });
    }
    Ok(Window { from, until })
}

/// A row's position as text: `DEADLINE/ID`.
fn write_place(SweepPlace { deadline, id }: &SweepPlace) -> String {
    format!("{}/{id}", write_rfc3339(*deadline))
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
        assert_eq!(read_place(&write_place(&place)), Some(place));
        for other in ["", "17", "2026-11-20T10:30:00Z/", "yesterday/17"] {
            assert_eq!(read_place(other), None, "{other}");
        }
    }

    #[test]
    fn empty_windows_are_refused() {
        assert!(window(at(60), Some(at(60))).unwrap_err().to_string().contains("give a later end"));
        assert_eq!(window(at(60), None).unwrap().until, at(60) + USUAL_REACH);
    }
}
