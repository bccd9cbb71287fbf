//! The answer table: what a provider's answer means for one attempt to pay. It is one total match for each call.
//!
//! Pure: no state of its own. What the attempts of an order mean together is in `claimed_order.rs`.

use super::{CallKind, ClaimedAttempt, Recorded, UnresolvedReason};
use crate::payment::{Answer, Money};

/// What is known of one attempt when no call about it is under way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The money was taken.
    Paid,
    /// Not paid, and it cannot be paid any more: the only proof on which an order is closed.
    Closed,
    /// The customer may be paying at this moment.
    InProgress,
    /// Nothing is known; asked again later. How long the provider wants to be left alone, if it said so.
    Unknown(Option<std::time::Duration>),
    /// A person must look at it.
    Unresolved(UnresolvedReason),
}

/// What follows from an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Next {
    /// Cancel the attempt at the provider; the answer to that call is the verdict.
    Cancel,
    Rest(Verdict),
}

/// `has_waited`: whether the order has had its wait for a customer who is paying.
pub(super) fn decide(call: CallKind, answer: &Answer, attempt: &ClaimedAttempt, has_waited: bool) -> Next {
    let verdict = match (answer, call) {
        (Answer::Paid { money }, _) => paid(*money, attempt.attempt.money),
        (Answer::Refunded, _) => Verdict::Unresolved(UnresolvedReason::Refunded),
        (Answer::Unknown(unknown), _) => Verdict::Unknown(unknown.retry_after),
        (Answer::InProgress, _) if !has_waited => Verdict::InProgress,
        // The shop has recorded its money, and the provider knows of none.
        (Answer::Open | Answer::Absent | Answer::InProgress | Answer::Closed, _)
            if attempt.recorded == Recorded::Paid =>
        {
            Verdict::Unresolved(UnresolvedReason::RecordedPaid)
        }
        (Answer::Closed, _) => Verdict::Closed,
        // Absent is no proof: the customer may be about to confirm an attempt that the provider will then know.
        (Answer::Open | Answer::Absent | Answer::InProgress, CallKind::Ask) => return Next::Cancel,
        // The attempt is still not closed, so its money may still come.
        (Answer::Open | Answer::Absent | Answer::InProgress, CallKind::Cancel) => Verdict::Unknown(None),
    };
    Next::Rest(verdict)
}

/// An answer without an amount says that the attempt is paid, and the attempt says how much that is.
fn paid(found: Option<Money>, wanted: Money) -> Verdict {
    if found.is_none_or(|found| found == wanted) {
        Verdict::Paid
    } else {
        Verdict::Unresolved(UnresolvedReason::AmountDiffers)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::{attempt, money, unknown};
    use super::*;

    fn decided(call: CallKind, answer: &Answer) -> Next {
        decide(call, answer, &attempt("pi_1"), false)
    }

    fn both(answer: &Answer) -> [Next; 2] {
        [decided(CallKind::Ask, answer), decided(CallKind::Cancel, answer)]
    }

    fn rest(verdict: Verdict) -> Next {
        Next::Rest(verdict)
    }

    #[test]
    fn whole_amount_is_paid_by_both_calls() {
        for money in [None, Some(money(1_999, "EUR"))] {
            assert_eq!(both(&Answer::Paid { money }), [rest(Verdict::Paid), rest(Verdict::Paid)]);
        }
    }

    #[test]
    fn other_amount_or_currency_is_unresolved() {
        let differs = rest(Verdict::Unresolved(UnresolvedReason::AmountDiffers));
        for money in [money(1_998, "EUR"), money(2_000, "EUR"), money(1_999, "USD"), money(0, "EUR")] {
            assert_eq!(both(&Answer::Paid { money: Some(money) }), [differs.clone(), differs.clone()]);
        }
    }

    #[test]
    fn refunded_is_unresolved() {
        let refunded = rest(Verdict::Unresolved(UnresolvedReason::Refunded));
        assert_eq!(both(&Answer::Refunded), [refunded.clone(), refunded]);
    }

    #[test]
    fn only_closed_is_proof() {
        assert_eq!(both(&Answer::Closed), [rest(Verdict::Closed), rest(Verdict::Closed)]);
        for answer in [Answer::Open, Answer::Absent] {
            assert_eq!(both(&answer), [Next::Cancel, rest(Verdict::Unknown(None))], "{answer:?}");
        }
        let told = Some(Duration::from_secs(7));
        assert_eq!(both(&unknown(told)), [rest(Verdict::Unknown(told)), rest(Verdict::Unknown(told))]);
    }

    #[test]
    fn payment_in_progress_waits_once() {
        assert_eq!(both(&Answer::InProgress), [rest(Verdict::InProgress), rest(Verdict::InProgress)]);
        let after = |call| decide(call, &Answer::InProgress, &attempt("pi_1"), true);
        assert_eq!(after(CallKind::Ask), Next::Cancel);
        assert_eq!(after(CallKind::Cancel), rest(Verdict::Unknown(None)));
    }

    #[test]
    fn recorded_payment_is_never_cancelled() {
        let recorded = ClaimedAttempt { recorded: Recorded::Paid, ..attempt("pi_1") };
        for call in [CallKind::Ask, CallKind::Cancel] {
            for answer in [Answer::Open, Answer::Absent, Answer::InProgress, Answer::Closed] {
                let contradiction = rest(Verdict::Unresolved(UnresolvedReason::RecordedPaid));
                assert_eq!(decide(call, &answer, &recorded, true), contradiction, "{answer:?}");
            }
            assert_eq!(decide(call, &Answer::Paid { money: None }, &recorded, true), rest(Verdict::Paid));
        }
    }
}
