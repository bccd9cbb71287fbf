//! The outcome tables: what happens next once an order was looked at. All of it stands in two total matches,
//! [`decide_after_close`] for whom an alarm woke, and [`decide_after_sweep`] for whom the sweep found.
//!
//! Pure: no state of its own, no I/O. The engine carries out what is decided here.

use std::time::Duration;

use super::sweep::{LONGEST_BLAMELESS_REST, LONGEST_REST};
use super::{Policy, WorkItem};
use crate::alarm::ParkReason;
use crate::order::{CloseError, CloseOutcome, CloseResult, Deadline, Outcome, Timestamp};

/// What happens next with a item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Decision {
    /// Nothing left to do.
    Ack,
    /// LockMode for this deadline, in the hold or in the wheel.
    AwaitDeadline(Deadline),
    /// Due by our reckoning, not yet by the database's: ask again very soon.
    AskAgain,
    /// Back in a moment; nobody is to blame.
    Pause,
    /// Something is wrong with this one; back after a while that grows.
    Retry,
    Park(ParkReason, String),
}

/// How often "not due" is taken as a difference between clocks: waits of 1, 2, … 128 ms, a quarter of a second in all.
const DISAGREEMENTS: u32 = 8;

pub(super) fn decide_after_close(policy: &Policy, item: &WorkItem, finding: CloseResult, now: Timestamp) -> Decision {
    match finding {
        Ok(CloseOutcome { outcome, deadline }) => match outcome {
            Outcome::Closed | Outcome::Paid | Outcome::AlreadyClosed => Decision::Ack,
            // Driven from its own index by whoever asks the provider, never from an unacknowledged message.
            Outcome::Closing => Decision::Ack,
            Outcome::NotDue => not_due(policy, item, deadline, now),
            Outcome::Busy => Decision::Pause,
            Outcome::Malformed => Decision::Park(
                ParkReason::MalformedId,
                "the order id is not of the form the orders table uses; correct it at the publisher".into(),
            ),
            Outcome::Unknown if now.since(item.alarm.first_published_at.unwrap_or(now)) <= policy.missing_for => Decision::Retry,
            Outcome::Unknown => Decision::Park(
                ParkReason::UnknownOrder,
                "no such order in the orders table; was its transaction rolled back, or does the publisher use another database?".into(),
            ),
        },
        Err(CloseError::Locked(_) | CloseError::Transient(_) | CloseError::Unavailable(_)) => Decision::Pause,
        Err(CloseError::Rejected(why)) => failed(policy, item, why),
    }
}

/// What happens next with an order that the sweep found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SweepDecision {
    /// It needs no close. One that is found overdue again all the same is left alone for a while that grows, up to this.
    Settled(Duration),
    /// Nothing was found out about it; the next pass finds it again.
    Drop,
    /// Somebody else has it, or its article.
    BackOff,
    /// It is overdue, and what keeps it from being closed is nobody's fault: tried again very soon, apart from the rest.
    RetrySoon,
    /// The same, but it may be its own fault: tried again soon.
    RetryLater,
    /// It is overdue and cannot be closed: left alone for a while that grows.
    LeaveAlone,
}

/// The same for an order that no alarm speaks for: its row is what brings it back. `others_fail_too`: whether nothing has
/// been closed since the same befell another order.
pub(super) fn decide_after_sweep(finding: &CloseResult, others_fail_too: bool) -> SweepDecision {
    match finding {
        Ok(CloseOutcome { outcome, .. }) => match outcome {
            Outcome::Closed | Outcome::Paid | Outcome::AlreadyClosed => SweepDecision::Settled(LONGEST_REST),
            // It may be unpaid again at any time.
            Outcome::Closing => SweepDecision::Settled(LONGEST_BLAMELESS_REST),
            Outcome::Busy => SweepDecision::BackOff,
            Outcome::NotDue | Outcome::Malformed | Outcome::Unknown => SweepDecision::LeaveAlone,
        },
        Err(CloseError::Unavailable(_)) => SweepDecision::Drop,
        // It costs a closer `lock_timeout` at most to see whether the table is still locked.
        Err(CloseError::Locked(_)) => SweepDecision::RetrySoon,
        Err(CloseError::Transient(_)) if others_fail_too => SweepDecision::RetrySoon,
        // Alone with that, it may be the trigger of this one, which takes a closer's time at every try.
        Err(CloseError::Transient(_)) => SweepDecision::RetryLater,
        Err(CloseError::Rejected(_)) => SweepDecision::LeaveAlone,
    }
}

fn not_due(policy: &Policy, item: &WorkItem, deadline: Option<Deadline>, now: Timestamp) -> Decision {
    let deadline = deadline.unwrap_or(item.alarm.deadline());
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
