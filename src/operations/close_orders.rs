//! Closes orders for an operator, through the worker's close statement: unpaid, overdue orders and nothing else.
//!
//! Chooses no order, and closes none that the statement does not.

use std::collections::HashMap;

use order_timeout_core::kind::Kind;
use order_timeout_core::order::{CloseResult, OrderId};

use super::pause_closing::{self, PauseError};
use crate::effects::close::Closer;
use crate::postgres::Operator;

/// What became of orders that were closed one by one.
#[derive(Debug, Default)]
pub struct EachClosed {
    /// Of those that were tried; an order without an entry does not exist.
    pub findings: HashMap<OrderId, CloseResult>,
    /// How many were tried.
    pub tried: usize,
    /// Why the rest was not.
    pub paused: Option<PauseError>,
}

/// Closes these orders one by one: an order that cannot be closed does not prevent the others from being closed. Stops
/// before an order if closing of the kind `unless_paused` is paused.
pub async fn close_each(
    closer: &Closer,
    ids: &[OrderId],
    operator: &Operator,
    unless_paused: Option<&Kind>,
) -> EachClosed {
    let mut closed = EachClosed::default();
    for id in ids {
        if let Some(kind) = unless_paused
            && let Err(paused) = pause_closing::refuse_while_paused(closer.connections(), kind).await
        {
            closed.paused = Some(paused);
            break;
        }
        match closer.close_for(operator, std::slice::from_ref(id)).await {
            Ok(found) => closed.findings.extend(found),
            Err(fault) => drop(closed.findings.insert(id.clone(), Err(fault))),
        }
        closed.tried += 1;
    }
    closed
}
