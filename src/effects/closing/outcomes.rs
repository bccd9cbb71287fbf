//! Runs the statement of an order's end for a batch, and reports the outcome of each order.
//!
//! A batch with an order that the database rejects is tried order by order, so that the others end. Nothing else is
//! tried again here.

use std::collections::HashMap;

use order_timeout_core::engine::{EndOutcome, Ended, Ending};
use order_timeout_core::order::CloseError;
use tracing::debug;

use crate::postgres::{ErrorClass, classify, one_line};

/// The outcome of each order, by its id. An order without an entry has lost its lease.
pub(super) type Outcomes = HashMap<String, EndOutcome>;

/// The statement of one way to end.
pub(super) trait EndStatement: Sync {
    /// What it takes for each order.
    type Item: Sync;

    /// What every ending has.
    fn ending(item: &Self::Item) -> &Ending;

    /// Runs the statement for these orders, in one transaction.
    fn run(&self, items: &[Self::Item]) -> impl Future<Output = Result<Outcomes, sqlx::Error>> + Send;
}

/// Ends these orders, in the order in which the statements lock them.
pub(super) async fn end_each<S: EndStatement>(statement: &S, mut items: Vec<S::Item>) -> Vec<Ended> {
    items.sort_unstable_by(|a, b| S::ending(a).order_id.cmp(&S::ending(b).order_id));
    let error = match statement.run(&items).await {
        Ok(outcomes) => return items.iter().map(|item| ended(S::ending(item), &Ok(&outcomes))).collect(),
        Err(error) => fault(&error, statement).await,
    };
    if items.len() <= 1 || !matches!(error, CloseError::Rejected(_)) {
        return items.iter().map(|item| ended(S::ending(item), &Err(error.clone()))).collect();
    }
    let mut all = Vec::with_capacity(items.len());
    for item in &items {
        all.push(match statement.run(std::slice::from_ref(item)).await {
            Ok(outcomes) => ended(S::ending(item), &Ok(&outcomes)),
            Err(error) => ended(S::ending(item), &Err(fault(&error, statement).await)),
        });
    }
    all
}

fn ended(ending: &Ending, result: &Result<&Outcomes, CloseError>) -> Ended {
    let order_id = ending.order_id.clone();
    let outcome = match result {
        Ok(outcomes) => Ok(outcomes.get(order_id.as_str()).copied().unwrap_or(EndOutcome::LeaseLost)),
        Err(error) => Err(error.clone()),
    };
    debug!(%order_id, ?outcome, "end of a claimed order");
    Ended { order_id, lease: ending.lease, outcome }
}

/// What an error affects: no order for long, this order, or all orders.
async fn fault<S: EndStatement>(error: &sqlx::Error, statement: &S) -> CloseError {
    let why = one_line(error);
    match classify(error) {
        ErrorClass::Locked => CloseError::Locked(why),
        ErrorClass::Transient => CloseError::Transient(why),
        ErrorClass::Data => CloseError::Rejected(why),
        // Without an order, no row's trigger can be the cause.
        ErrorClass::Broken if statement.run(&[]).await.is_ok() => CloseError::Rejected(why),
        ErrorClass::Broken | ErrorClass::Away => CloseError::Unavailable(why),
    }
}
