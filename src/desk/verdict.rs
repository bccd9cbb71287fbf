//! The outcome tables: what happens next once an order was looked at. All of it stands in two total matches,
//! [`after_close`] for whom an alarm woke, and [`after_sweep`] for whom the sweep found.
//!
//! Pure: no state of its own, no I/O. The desk carries out what is decided here.

use std::time::Duration;

use super::sweep::{LONGEST_BLAMELESS_REST, LONGEST_REST};
use super::{Case, Policy};
use crate::alarm::ParkReason;
use crate::order::{CloseFault, Deadline, Finding, Found, Moment, Outcome};

/// What happens next with a case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing left to do.
    Ack,
    /// Wait for this deadline, in the hold or in the wheel.
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

pub(super) fn after_close(policy: &Policy, case: &Case, finding: Finding, now: Moment) -> Next {
    match finding {
        Ok(Found { outcome, deadline }) => match outcome {
            Outcome::Closed | Outcome::Paid | Outcome::AlreadyClosed => Next::Ack,
            // Driven from its own index by whoever asks the provider, never from an unacknowledged message.
            Outcome::Closing => Next::Ack,
            Outcome::NotDue => not_due(policy, case, deadline, now),
            Outcome::Busy => Next::Pause,
            Outcome::Malformed => Next::Park(
                ParkReason::MalformedId,
                "the order id is not of the form the orders table uses; correct it at the publisher".into(),
            ),
            Outcome::Unknown if now.since(case.alarm.born.unwrap_or(now)) <= policy.missing_for => Next::Retry,
            Outcome::Unknown => Next::Park(
                ParkReason::UnknownOrder,
                "no such order in the orders table; was its transaction rolled back, or does the publisher use another database?".into(),
            ),
        },
        Err(CloseFault::Locked(_) | CloseFault::Transient(_) | CloseFault::Away(_)) => Next::Pause,
        Err(CloseFault::OfTheOrder(why)) => failed(policy, case, why),
    }
}

/// What happens next with an order that the sweep found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterSweep {
    /// It needs no close. One that is found overdue again all the same is left alone for a while that grows, up to this.
    Settled(Duration),
    /// Nothing was found out about it; the next pass finds it again.
    LetGo,
    /// Somebody else has it, or its article.
    LeaveToWhoHasIt,
    /// It is overdue, and what keeps it from being closed is nobody's fault: tried again very soon, apart from the rest.
    LookAgain,
    /// The same, but it may be its own fault: tried again soon.
    LookAgainLater,
    /// It is overdue and cannot be closed: left alone for a while that grows.
    LeaveAlone,
}

/// The same for an order that no alarm speaks for: its row is what brings it back. `others_fail_too`: whether nothing has
/// been closed since the same befell another order.
pub(super) fn after_sweep(finding: &Finding, others_fail_too: bool) -> AfterSweep {
    match finding {
        Ok(Found { outcome, .. }) => match outcome {
            Outcome::Closed | Outcome::Paid | Outcome::AlreadyClosed => AfterSweep::Settled(LONGEST_REST),
            // It may be unpaid again at any time.
            Outcome::Closing => AfterSweep::Settled(LONGEST_BLAMELESS_REST),
            Outcome::Busy => AfterSweep::LeaveToWhoHasIt,
            Outcome::NotDue | Outcome::Malformed | Outcome::Unknown => AfterSweep::LeaveAlone,
        },
        Err(CloseFault::Away(_)) => AfterSweep::LetGo,
        // It costs a closer `lock_timeout` at most to see whether the table is still locked.
        Err(CloseFault::Locked(_)) => AfterSweep::LookAgain,
        Err(CloseFault::Transient(_)) if others_fail_too => AfterSweep::LookAgain,
        // Alone with that, it may be the trigger of this one, which takes a closer's time at every try.
        Err(CloseFault::Transient(_)) => AfterSweep::LookAgainLater,
        Err(CloseFault::OfTheOrder(_)) => AfterSweep::LeaveAlone,
    }
}

fn not_due(policy: &Policy, case: &Case, deadline: Option<Deadline>, now: Moment) -> Next {
    let deadline = deadline.unwrap_or(case.alarm.deadline());
    if deadline > now + policy.max_delay {
        return Next::Park(
            ParkReason::TooFar,
            "the deadline in the order's row lies further ahead than delay.max_delay allows; correct the row and retry"
                .into(),
        );
    }
    if deadline > now {
        return Next::AwaitDeadline(deadline);
    }
    if case.disagreements < DISAGREEMENTS {
        return Next::AskAgain;
    }
    failed(
        policy,
        case,
        "the close statement says not_due though the deadline has passed; does a trigger on the orders table suppress the update?".into(),
    )
}

fn failed(policy: &Policy, case: &Case, why: String) -> Next {
    if case.alarm.attempt >= policy.max_attempts { Next::Park(ParkReason::CloseFailed, why) } else { Next::Retry }
}
