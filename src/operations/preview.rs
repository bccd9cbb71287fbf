//! What a change of many orders is about to do: shown before it begins.
//!
//! Pure.

use order_timeout_core::message::write_rfc3339;
use order_timeout_core::order::{OrderId, Timestamp};
use serde::Serialize;

use super::orders_table::{ChosenOrder, ChosenOrders};

/// How many orders are shown by id.
const MOST_EXAMPLES: usize = 10;

/// The chosen orders in figures, and some of them by id. The times are RFC 3339.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Preview {
    /// How many are selected.
    pub orders: usize,
    /// Those among them whose deadline has passed.
    pub overdue: usize,
    /// The earliest deadline, RFC 3339; `None` if no selected order has one.
    pub first_deadline: Option<String>,
    /// The latest, in the same form.
    pub last_deadline: Option<String>,
    /// Lines of all selected orders; `None` if nothing says what they reserve.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub items: Option<u64>,
    /// Units of stock that they reserve.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub units: Option<i64>,
    /// The first of them.
    pub examples: Vec<Example>,
}

/// One of the chosen orders.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Example {
    /// As the row has it.
    pub order_id: OrderId,
    /// RFC 3339; `None` if it has none.
    pub deadline: Option<String>,
    /// Its deadline after the change, if the change is about deadlines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub becomes: Option<String>,
}

impl Preview {
    /// `becomes` says which deadline an order with this one gets.
    #[must_use]
    pub fn of(chosen: &ChosenOrders, becomes: impl Fn(Option<Timestamp>) -> Option<Timestamp>) -> Self {
        let deadline = |order: Option<&ChosenOrder>| order.and_then(|order| order.deadline).map(write_rfc3339);
        // Those without a deadline come last.
        let last = chosen.orders.iter().rev().find(|order| order.deadline.is_some());
        let example = |order: &ChosenOrder| Example {
            order_id: order.id.clone(),
            deadline: order.deadline.map(write_rfc3339),
            becomes: becomes(order.deadline).map(write_rfc3339),
        };
        let (items, units) = chosen.reserved.unzip();
        Self {
            orders: chosen.orders.len(),
            overdue: chosen.orders.iter().filter(|order| order.is_overdue(chosen.now)).count(),
            first_deadline: deadline(chosen.orders.first()),
            last_deadline: deadline(last),
            items,
            units,
            examples: chosen.orders.iter().take(MOST_EXAMPLES).map(example).collect(),
        }
    }
}
