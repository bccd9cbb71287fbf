//! How the orders of a kind are timed out and found: by statements, or by the embedding program's own code.
//!
//! Only chooses between the two. Both keep the connections on which the database's clock is read.

use order_timeout_core::engine::{Batch, BatchResult};
use order_timeout_core::order::{OddAnswer, OrderId, SweepPage, SweptPage, Timestamp};

use super::close::Closer;
use super::handled::HandledOrders;
use super::sweep::Sweeper;
use crate::handler::Due;
use crate::postgres::one_line;
use crate::postgres::warm_connections::WarmConnections;

/// Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) enum Orders {
    Statements { closer: Closer, sweeper: Sweeper },
    Handled { handled: HandledOrders, connections: WarmConnections },
}

impl Orders {
    pub fn connections(&self) -> &WarmConnections {
        match self {
            Self::Statements { closer, .. } => closer.connections(),
            Self::Handled { connections, .. } => connections,
        }
    }

    /// The statements, if there are any.
    pub fn statements(&self) -> Option<(&Closer, &Sweeper)> {
        match self {
            Self::Statements { closer, sweeper } => Some((closer, sweeper)),
            Self::Handled { .. } => None,
        }
    }

    /// Keeps what closes ready. A failure is no reason to stop: the next close opens what it needs.
    pub async fn warm_up(&self) -> Result<(), String> {
        match self {
            Self::Statements { closer, .. } => closer.warm_up().await.map_err(|error| one_line(&error)),
            Self::Handled { .. } => Ok(()),
        }
    }

    /// Whether overdue orders are found at all.
    pub fn finds_overdue(&self) -> bool {
        match self {
            Self::Statements { .. } => true,
            Self::Handled { handled, .. } => handled.finds_overdue(),
        }
    }

    pub async fn close(&self, batch: &Batch) -> BatchResult {
        match self {
            Self::Statements { closer, .. } => {
                let ids: Vec<OrderId> = batch.items.iter().map(|item| item.alarm.order_id().clone()).collect();
                closer.close(&ids, batch.by, batch.waits_for_locks()).await
            }
            Self::Handled { handled, .. } => {
                let due = batch
                    .items
                    .iter()
                    .map(|item| Due { order_id: item.alarm.order_id().clone(), deadline: item.alarm.deadline() });
                handled.time_out(due.collect(), batch.by).await
            }
        }
    }

    pub fn take_odd_answers(&self) -> Vec<OddAnswer> {
        match self {
            Self::Statements { closer, .. } => closer.take_odd_answers(),
            Self::Handled { handled, .. } => handled.take_odd_answers(),
        }
    }

    /// One page of overdue orders, or why there is none.
    pub async fn overdue(&self, page: &SweepPage, now: Timestamp) -> Result<SweptPage, String> {
        match self {
            Self::Statements { sweeper, .. } => sweeper.overdue(page).await.map_err(|error| one_line(&error)),
            Self::Handled { handled, .. } => handled.overdue(page, now).await,
        }
    }
}
