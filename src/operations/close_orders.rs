//! Closes orders for an operator, through the worker's close statement: unpaid, overdue orders and nothing else.
//!
//! Chooses no order, and closes none that the statement does not.

use std::collections::HashMap;
use std::num::NonZeroU32;

use order_timeout_core::kind::Kind;
use order_timeout_core::order::{CloseError, CloseResult, OrderId, Outcome};
use tokio_util::sync::CancellationToken;

use super::paced::{BatchError, BatchOutcomes, FAILED, Progress, Waits, in_batches};
use super::pause_closing::{self, PauseError};
use crate::effects::close::Closer;
use crate::postgres::Operator;

/// Closes these orders one by one: an order that cannot be closed does not prevent the others from being closed. An
/// order without an entry does not exist.
pub async fn close_each(closer: &Closer, ids: &[OrderId], operator: &Operator) -> HashMap<OrderId, CloseResult> {
    let mut findings = HashMap::new();
    for id in ids {
        match closer.close_for(operator, std::slice::from_ref(id), true).await {
            Ok(found) => findings.extend(found),
            Err(fault) => drop(findings.insert(id.clone(), Err(fault))),
        }
    }
    findings
}

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

/// The same as [`close_each`], until closing of this kind is paused.
pub async fn close_each_unless_paused(
    closer: &Closer,
    ids: &[OrderId],
    operator: &Operator,
    kind: &Kind,
) -> EachClosed {
    let mut closed = EachClosed::default();
    for id in ids {
        if let Err(paused) = pause_closing::refuse_batch_while_paused(closer.connections(), kind).await {
            closed.paused = Some(paused);
            break;
        }
        closed.findings.extend(close_each(closer, std::slice::from_ref(id), operator).await);
        closed.tried += 1;
    }
    closed
}

/// Closes many orders in batches, at most `rate` orders a second. Stops before a batch if closing of the kind
/// `unless_paused` is paused meanwhile. `each` is told the progress.
pub async fn close_many(
    closer: &Closer,
    ids: &[OrderId],
    operator: &Operator,
    rate: NonZeroU32,
    unless_paused: Option<&Kind>,
    stop: &CancellationToken,
    each: impl FnMut(&Progress),
) -> Progress {
    let change = async |batch: &[OrderId], waits| {
        if let Some(kind) = unless_paused
            && let Err(paused) = pause_closing::refuse_batch_while_paused(closer.connections(), kind).await
        {
            return Err(BatchError::Unavailable(paused.to_string()));
        }
        close_batch(closer, batch, operator, waits).await
    };
    in_batches(ids, rate, stop, change, each).await
}

async fn close_batch(closer: &Closer, batch: &[OrderId], operator: &Operator, waits: Waits) -> BatchOutcomes {
    match closer.close_for(operator, batch, waits == Waits::Yes).await {
        Ok(found) => Ok(batch.iter().map(|id| (id.clone(), word(found.get(id)))).collect()),
        Err(fault) => Err(match fault {
            CloseError::Locked(why) | CloseError::Transient(why) => BatchError::Busy(why),
            CloseError::Rejected(why) => BatchError::Failed(why),
            CloseError::Unavailable(why) => BatchError::Unavailable(why),
        }),
    }
}

fn word(found: Option<&CloseResult>) -> &'static str {
    match found {
        Some(Ok(found)) => found.outcome.as_str(),
        // The statement's answer for this order alone is outside the contract.
        Some(Err(_)) => FAILED,
        None => Outcome::Unknown.as_str(),
    }
}
