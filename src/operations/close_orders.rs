//! Closes orders for an operator, through the worker's close statement: unpaid orders that are overdue, or released.
//!
//! Chooses no order, and closes none that the statement does not.

use std::collections::HashMap;

use order_timeout_core::kind::Kind;
use order_timeout_core::order::{CloseResult, OrderId};

use sqlx::Connection;

use super::pause_closing::{self, PauseError};
use crate::effects::close::Closer;
use crate::postgres::{Database, Operator, one_line};

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

/// Closes an order before its deadline, as a shop does by the function `release`, which answers with a word.
///
/// # Errors
/// One sentence; nothing has changed then.
pub async fn release(database: &Database, kind: &Kind, id: &OrderId, operator: &Operator) -> Result<String, String> {
    let released = database.run(async |connection| {
        let mut transaction = connection.begin().await?;
        operator.name_in_transaction(&mut transaction).await?;
        let release = sqlx::query_scalar("SELECT release($1, $2, $3)").bind(id.as_str()).bind(&operator.why);
        let word: String = release.bind(kind.as_str()).fetch_one(&mut *transaction).await?;
        transaction.commit().await?;
        Ok(word)
    });
    released.await.map_err(|error| one_line(&error))
}
