//! The answer table: what a provider's answer means for one attempt to pay. It is one total match for each call.
//!
//! Pure: no state of its own. What the attempts of an order mean together is in `claimed_order.rs`.

use std::time::Duration;

use super::{CallKind, ClaimedAttempt, Recorded, UnresolvedReason};
use crate::order::Timestamp;
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
    /// Nothing is known; asked again later.
    Unknown(Missing),
    /// Another amount was received than the attempt was to pay. A person must look at it, unless the order is paid.
    Differs(Money),
    /// It was paid and given back. The same.
    Refunded,
    /// A person must look at it.
    Unresolved(UnresolvedReason),
}

/// Why an attempt is asked about again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Missing {
    /// How long nothing can be learnt: what the provider asks for, or until the attempt cannot be paid any more.
    pub retry_after: Option<Duration>,
    /// Whether it counts towards the rounds after which a person must look at the order. Not if the provider was not
    /// asked, or if it is known until when to wait.
    pub is_round: bool,
}

/// After so long an attempt that could be paid until a moment, and that the provider does not know, is closed: the
/// provider's clock may differ, and a payment of the last second needs time to become visible.
const ABSENT_MARGIN: Duration = Duration::from_secs(60);

/// What follows from an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Next {
    /// Cancel the attempt at the provider; the answer to that call is the verdict.
    Cancel,
    Rest(Verdict),
}

/// `has_waited`: whether the order has had its wait for a customer who is paying. `rounds`: how many ended without an answer.
pub(super) fn decide(
    call: CallKind,
    answer: &Answer,
    attempt: &ClaimedAttempt,
    has_waited: bool,
    rounds: u32,
    now: Timestamp,
) -> Next {
    let verdict = match (answer, call) {
        (Answer::Paid { money }, _) => paid(*money, attempt.attempt.money),
        (Answer::Refunded, _) => Verdict::Refunded,
        (Answer::Unknown(unknown), _) => {
            Verdict::Unknown(Missing { retry_after: unknown.retry_after, is_round: unknown.was_asked })
        }
        // A bank decides: there is nothing to cancel, however long it takes.
        (Answer::Pending, _) => Verdict::InProgress,
        (Answer::InProgress, _) if !has_waited => Verdict::InProgress,
        // The shop has recorded its money, and the provider knows of none.
        (Answer::Open | Answer::Absent | Answer::Forgotten { .. } | Answer::InProgress | Answer::Closed, _)
            if attempt.recorded == Recorded::Paid =>
        {
            Verdict::Unresolved(UnresolvedReason::RecordedPaid)
        }
        (Answer::Closed, _) => Verdict::Closed,
        // Absent is no proof: the customer may be about to confirm an attempt that the provider will then know.
        (Answer::Open | Answer::Absent | Answer::InProgress, CallKind::Ask) => return Next::Cancel,
        (Answer::Absent, CallKind::Cancel) => absent(attempt.payable_until, now),
        (Answer::Forgotten { after }, _) if rounds == 0 && attempt.begun_at + *after + ABSENT_MARGIN <= now => {
            Verdict::Closed
        }
        // Its key is one of another account, or was in an earlier round.
        (Answer::Forgotten { .. }, _) => Verdict::Unknown(Missing { retry_after: None, is_round: true }),
        // The attempt is still not closed, so its money may still come.
        (Answer::Open | Answer::InProgress, CallKind::Cancel) => {
            Verdict::Unknown(Missing { retry_after: None, is_round: true })
        }
    };
    Next::Rest(verdict)
}

/// An answer without an amount says that the attempt is paid, and the attempt says how much that is.
fn paid(found: Option<Money>, wanted: Money) -> Verdict {
    if found.is_none_or(|found| found == wanted) { Verdict::Paid } else { Verdict::Differs(found.unwrap_or(wanted)) }
}

/// Some providers know an attempt only when the customer has opened it. It is closed if it could not be opened any more.
fn absent(payable_until: Option<Timestamp>, now: Timestamp) -> Verdict {
    match payable_until.map(|until| until + ABSENT_MARGIN) {
        Some(until) if until <= now => Verdict::Closed,
        Some(until) => Verdict::Unknown(Missing { retry_after: Some(until.since(now)), is_round: false }),
        None => Verdict::Unknown(Missing { retry_after: None, is_round: true }),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{attempt, money, unknown};
    use super::*;
    use crate::payment::Unknown;

    fn decided(call: CallKind, answer: &Answer) -> Next {
        decide(call, answer, &attempt("pi_1"), false, 0, at(0))
    }

    fn both(answer: &Answer) -> [Next; 2] {
        [decided(CallKind::Ask, answer), decided(CallKind::Cancel, answer)]
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_unix_micros(seconds * 1_000_000)
    }

    fn missing(retry_after: Option<Duration>) -> Verdict {
        Verdict::Unknown(Missing { retry_after, is_round: true })
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
    fn other_amount_or_currency_differs() {
        for money in [money(1_998, "EUR"), money(2_000, "EUR"), money(1_999, "USD"), money(0, "EUR")] {
            let differs = rest(Verdict::Differs(money));
            assert_eq!(both(&Answer::Paid { money: Some(money) }), [differs.clone(), differs]);
        }
    }

    #[test]
    fn refunded_is_neither_paid_nor_closed() {
        assert_eq!(both(&Answer::Refunded), [rest(Verdict::Refunded), rest(Verdict::Refunded)]);
    }

    #[test]
    fn only_closed_is_proof() {
        assert_eq!(both(&Answer::Closed), [rest(Verdict::Closed), rest(Verdict::Closed)]);
        for answer in [Answer::Open, Answer::Absent] {
            assert_eq!(both(&answer), [Next::Cancel, rest(missing(None))], "{answer:?}");
        }
        let told = Some(Duration::from_secs(7));
        assert_eq!(both(&unknown(told)), [rest(missing(told)), rest(missing(told))]);
    }

    #[test]
    fn payment_in_progress_waits_once() {
        assert_eq!(both(&Answer::InProgress), [rest(Verdict::InProgress), rest(Verdict::InProgress)]);
        let after = |call| decide(call, &Answer::InProgress, &attempt("pi_1"), true, 0, at(0));
        assert_eq!(after(CallKind::Ask), Next::Cancel);
        assert_eq!(after(CallKind::Cancel), rest(missing(None)));
    }

    #[test]
    fn recorded_payment_is_never_cancelled() {
        let recorded = ClaimedAttempt { recorded: Recorded::Paid, ..attempt("pi_1") };
        for call in [CallKind::Ask, CallKind::Cancel] {
            for answer in [Answer::Open, Answer::Absent, Answer::InProgress, Answer::Closed] {
                let contradiction = rest(Verdict::Unresolved(UnresolvedReason::RecordedPaid));
                assert_eq!(decide(call, &answer, &recorded, true, 0, at(0)), contradiction, "{answer:?}");
            }
            assert_eq!(decide(call, &Answer::Paid { money: None }, &recorded, true, 0, at(0)), rest(Verdict::Paid));
        }
    }

    #[test]
    fn absent_attempt_is_closed_when_unpayable() {
        let attempt = ClaimedAttempt { payable_until: Some(at(100)), ..attempt("pi_1") };
        let decided = |call, now| decide(call, &Answer::Absent, &attempt, false, 0, now);
        assert_eq!(decided(CallKind::Ask, at(1_000)), Next::Cancel);
        assert_eq!(decided(CallKind::Cancel, at(160)), rest(Verdict::Closed));
        let wait = Missing { retry_after: Some(Duration::from_secs(10)), is_round: false };
        assert_eq!(decided(CallKind::Cancel, at(150)), rest(Verdict::Unknown(wait)));
    }

    #[test]
    fn forgotten_attempt_is_closed_when_old() {
        const AFTER: Duration = Duration::from_secs(3 * 3_600);
        let decided = |rounds, now, payable_until| {
            let attempt = ClaimedAttempt { payable_until, ..attempt("pi_1") };
            let both = [CallKind::Ask, CallKind::Cancel];
            let both = both.map(|call| decide(call, &Answer::Forgotten { after: AFTER }, &attempt, false, rounds, now));
            assert_eq!(both[0], both[1]);
            both[0].clone()
        };
        let old = at(3 * 3_600 + 60);
        assert_eq!(decided(0, old, None), rest(Verdict::Closed));
        // The shop's own end of the attempt does not make the account the right one.
        assert_eq!(decided(0, at(3 * 3_600), Some(at(10))), rest(missing(None)));
        assert_eq!(decided(1, old, Some(at(10))), rest(missing(None)));
    }

    #[test]
    fn pending_attempt_waits_without_end() {
        for (call, has_waited) in [(CallKind::Ask, false), (CallKind::Ask, true), (CallKind::Cancel, true)] {
            let next = decide(call, &Answer::Pending, &attempt("pi_1"), has_waited, 19, at(0));
            assert_eq!(next, rest(Verdict::InProgress));
        }
    }

    #[test]
    fn calls_not_made_are_no_rounds() {
        let unknown = Unknown { why: "its circuit breaker is open".into(), retry_after: None, was_asked: false };
        let missing = Verdict::Unknown(Missing { retry_after: None, is_round: false });
        assert_eq!(both(&Answer::Unknown(unknown)), [rest(missing.clone()), rest(missing)]);
    }
}
