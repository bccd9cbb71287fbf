//! The outcome tables: what happens next after an order was tried. All of it is in two total matches,
//! [`decide_after_close`] for orders that an alarm woke, and [`decide_after_sweep`] for orders that the sweep found.
//!
//! Pure: no state of its own, no I/O. `apply.rs` carries out what is decided here.

use std::time::Duration;

use super::order_backoff::{MAX_BACKOFF, MAX_BLAMELESS_BACKOFF};
use super::{Policy, WorkItem};
use crate::alarm::ParkReason;
use crate::order::{CloseError, CloseOutcome, CloseResult, Deadline, Outcome, Timestamp};

/// What happens next with a work item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Decision {
    /// Nothing left to do.
    Ack,
    /// Wait for this deadline, in the hold or in the wheel.
    AwaitDeadline(Deadline),
    /// Due by the worker's clock, not yet by the database's: ask again very soon.
    AskAgain,
    /// Back after a short pause; the order is not at fault.
    Pause,
    /// Something is wrong with this order; back after a pause that grows.
    Retry,
    Park(ParkReason, String),
}

/// How often "not due" counts as a difference between clocks: waits of 1, 2, … 128 ms, a quarter of a second in all.
const DISAGREEMENTS: u32 = 8;

pub(super) fn decide_after_close(policy: &Policy, item: &WorkItem, result: CloseResult, now: Timestamp) -> Decision {
    match result {
        Ok(CloseOutcome { outcome, deadline }) => match outcome {
            Outcome::Closed | Outcome::Paid | Outcome::AlreadyClosed => Decision::Ack,
            // Handled by the process that asks the provider, from its own index, never from an unacknowledged message.
            Outcome::Claimed | Outcome::Closing => Decision::Ack,
            Outcome::NotDue => not_due(policy, item, deadline, now),
            Outcome::Busy => Decision::Pause,
            Outcome::Malformed => Decision::Park(
                ParkReason::MalformedId,
                "the order id is not of the form the orders table uses; correct it at the publisher".into(),
            ),
            Outcome::Unknown if now.since(item.alarm.first_published_at.unwrap_or(now)) <= policy.missing_for => Decision::Retry,
            Outcome::Unknown => Decision::Park(
                ParkReason::UnknownOrder,
                "no such order in the orders table: either its transaction was rolled back, or the publisher uses another database, or row security hides it from the worker".into(),
            ),
        },
        Err(CloseError::Locked(_) | CloseError::Transient(_) | CloseError::Unavailable(_)) => Decision::Pause,
        Err(CloseError::Rejected(why)) => failed(policy, item, why),
    }
}

/// What happens next with an order that the sweep found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SweepDecision {
    /// It needs no close. If it is found overdue again, it is backed off for a time that grows up to this.
    Settled(Duration),
    /// Nothing is known about it; the next pass finds it again.
    Drop,
    /// Another session has a lock on it or on its article.
    RetryBusy,
    /// It is overdue and cannot be closed now: backed off for a time that grows up to this, which is short if the obstacle is
    /// not its fault.
    BackOff(Duration),
}

/// The same for an order without an alarm: its row brings it back. `others_fail_too`: whether another order failed in
/// the same way and none has been closed since.
pub(super) fn decide_after_sweep(policy: &Policy, result: &CloseResult, others_fail_too: bool) -> SweepDecision {
    let soon = SweepDecision::BackOff(policy.longest_overdue_pause());
    match result {
        Ok(CloseOutcome { outcome, .. }) => match outcome {
            Outcome::Closed | Outcome::Paid | Outcome::AlreadyClosed => SweepDecision::Settled(MAX_BACKOFF),
            // It may be unpaid again at any time.
            Outcome::Claimed | Outcome::Closing => SweepDecision::Settled(MAX_BLAMELESS_BACKOFF),
            Outcome::Busy => SweepDecision::RetryBusy,
            Outcome::NotDue | Outcome::Malformed | Outcome::Unknown => SweepDecision::BackOff(MAX_BACKOFF),
        },
        Err(CloseError::Unavailable(_)) => SweepDecision::Drop,
        // It costs a closer `lock_timeout` at most to see whether the table is still locked.
        Err(CloseError::Locked(_)) => soon,
        Err(CloseError::Transient(_)) if others_fail_too => soon,
        // If no other order fails so, it may be a trigger on this one, which takes a closer's time at every try.
        Err(CloseError::Transient(_)) => SweepDecision::BackOff(MAX_BLAMELESS_BACKOFF),
        Err(CloseError::Rejected(_)) => SweepDecision::BackOff(MAX_BACKOFF),
    }
}

fn not_due(policy: &Policy, item: &WorkItem, deadline: Option<Deadline>, now: Timestamp) -> Decision {
    // Its row has no deadline, so it never falls due. One that is set later is scheduled then.
    let Some(deadline) = deadline else { return Decision::Ack };
    if deadline > now + policy.max_delay {
        return Decision::Park(
            ParkReason::TooFar,
            "the deadline in the order's row lies further ahead than delay.max_delay allows; correct the row and retry"
                .into(),
        );
    }
    if deadline > now {
        return Decision::AwaitDeadline(deadline);
    }
    if item.disagreements < DISAGREEMENTS {
        return Decision::AskAgain;
    }
    failed(
        policy,
        item,
        "the close statement says not_due though the deadline has passed; does a trigger on the orders table suppress the update?".into(),
    )
}

fn failed(policy: &Policy, item: &WorkItem, why: String) -> Decision {
    if item.alarm.attempt >= policy.max_attempts {
        Decision::Park(ParkReason::CloseFailed, why)
    } else {
        Decision::Retry
    }
}
