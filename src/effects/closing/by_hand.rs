//! Ends one claimed order as an operator has found out, through the statements of a worker.
//!
//! Decides nothing; the caller has the lease, and commits.

use order_timeout_core::engine::{EndOutcome, Ending, PaidEnding};
use sqlx::PgConnection;

use super::{ClaimedKind, close_claimed, settle_paid};

/// Ends one claimed order for an operator, in a transaction of the caller's that has given it this lease.
pub(crate) async fn end_by_hand(
    connection: &mut PgConnection,
    of: &ClaimedKind,
    end: &EndByHand,
) -> Result<EndOutcome, sqlx::Error> {
    let ended = match end {
        EndByHand::Close(ending) => close_claimed::close(connection, of, std::slice::from_ref(ending), true)
            .await?
            .0
            .first()
            .map(|claimed| Ok(claimed.outcome)),
        EndByHand::SettlePaid(ending) => settle_paid::settle(connection, of, std::slice::from_ref(ending))
            .await?
            .first()
            .map(settle_paid::read_outcome),
    };
    ended.unwrap_or(Ok(EndOutcome::LeaseLost))
}

/// How an operator ends an order.
pub(crate) enum EndByHand {
    Close(Ending),
    SettlePaid(PaidEnding),
}
