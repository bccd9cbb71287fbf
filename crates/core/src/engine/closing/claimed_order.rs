//! One order between its claim and its end: which calls its attempts need, and what their answers mean together.
//!
//! Pure. A verdict on one attempt is none on the order: it ends only when no call about any attempt is under way.

use std::time::Duration;

use super::attempt::{Missing, Next, Verdict, decide};
use super::{AttemptKey, Call, CallKind, Claim, UnresolvedReason};
use crate::order::Timestamp;
use crate::payment::{Answer, Money};

/// The longest text about the answers that is stored with an order, in bytes.
const MAX_ANSWERS_BYTES: usize = 1_000;

/// The state of one attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Progress {
    To(CallKind),
    /// The call is under way.
    In(CallKind),
    /// No call is under way; whether the attempt was cancelled on the way.
    AtRest(Verdict, WasCancelled),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct WasCancelled(bool);

/// What the attempts of an order mean together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OrderVerdict {
    /// At least one attempt is paid.
    SettlePaid { paid: Vec<AttemptKey>, differing: Vec<(AttemptKey, Money)>, refunded: Vec<AttemptKey> },
    /// Every attempt is proved to be closed.
    Close,
    /// A customer may be paying, and nothing else is missing: with which provider.
    Wait(String),
    /// At least one answer is missing. `is_round`: whether it counts towards the rounds after which a person must look at it.
    AskAgain { provider: String, retry_after: Option<Duration>, is_round: bool },
    /// A person must look at it.
    Unresolved(UnresolvedReason),
}

/// An order whose lease this worker has.
#[derive(Debug)]
pub(super) struct ClaimedOrder {
    pub claim: Claim,
    progress: Vec<Progress>,
    answers: String,
}

impl ClaimedOrder {
    /// Every attempt is asked first, whatever was known of it before the claim.
    pub fn new(claim: Claim) -> Self {
        let progress = vec![Progress::To(CallKind::Ask); claim.attempts.len()];
        Self { claim, progress, answers: String::new() }
    }

    /// The calls to be made now. Each is returned once.
    pub fn take_calls(&mut self) -> Vec<Call> {
        let mut calls = Vec::new();
        for (number, (progress, attempt)) in self.progress.iter_mut().zip(&self.claim.attempts).enumerate() {
            if let Progress::To(kind) = *progress {
                *progress = Progress::In(kind);
                let (order_id, lease) = (self.claim.order_id.clone(), self.claim.lease);
                calls.push(Call { order_id, lease, number, kind, attempt: attempt.attempt.clone() });
            }
        }
        calls
    }

    /// Takes in the answer to a call. An answer that no call waits for is ignored.
    pub fn take_answer(&mut self, number: usize, kind: CallKind, answer: &Answer, now: Timestamp) {
        let (Some(progress), Some(attempt)) = (self.progress.get_mut(number), self.claim.attempts.get(number)) else {
            return;
        };
        if *progress != Progress::In(kind) {
            return;
        }
        *progress = match decide(kind, answer, attempt, self.claim.has_waited, self.claim.rounds, now) {
            Next::Cancel => Progress::To(CallKind::Cancel),
            Next::Rest(verdict) => Progress::AtRest(verdict, WasCancelled(kind == CallKind::Cancel)),
        };
        let (provider, reference) = (&attempt.attempt.provider, &attempt.attempt.reference);
        note(&mut self.answers, &format!("{provider} {reference} {}: {}", kind.as_str(), words(answer)));
        self.cancel_rest();
    }

    /// An order that is paid by one attempt must not be paid by another as well: what may still be paid is cancelled
    /// once. Whatever the provider answers, the order is paid.
    fn cancel_rest(&mut self) {
        let is_at_rest = |progress: &Progress| matches!(progress, Progress::AtRest(..));
        let is_paid = |progress: &Progress| matches!(progress, Progress::AtRest(Verdict::Paid, _));
        if !self.progress.iter().all(is_at_rest) || !self.progress.iter().any(is_paid) {
            return;
        }
        for progress in &mut self.progress {
            if let Progress::AtRest(Verdict::InProgress | Verdict::Unknown(_), WasCancelled(false)) = progress {
                *progress = Progress::To(CallKind::Cancel);
            }
        }
    }

    /// Whether a call to this provider is under way or to be made.
    pub fn needs(&self, provider: &str) -> bool {
        let states = self.progress.iter().zip(&self.claim.attempts);
        states.into_iter().any(|(progress, attempt)| {
            !matches!(progress, Progress::AtRest(..)) && attempt.attempt.provider == provider
        })
    }

    /// What was answered so far, for the order's history.
    pub fn answers(&self) -> &str {
        &self.answers
    }

    /// With the attempts that are proved to be closed; `None` while a call is under way or to be made.
    pub fn verdict(&self) -> Option<(OrderVerdict, Vec<AttemptKey>)> {
        let (mut paid, mut closed, mut differing, mut refunded) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut waits_for, mut unknown, mut unresolved, mut is_round) = (None, None, None, false);
        for (progress, attempt) in self.progress.iter().zip(&self.claim.attempts) {
            let Progress::AtRest(verdict, _) = progress else { return None };
            let attempt = &attempt.attempt;
            match verdict {
                Verdict::Paid => paid.push(AttemptKey::of(attempt)),
                Verdict::Closed => closed.push(AttemptKey::of(attempt)),
                Verdict::InProgress => waits_for = Some(attempt.provider.clone()),
                Verdict::Unknown(Missing { retry_after, is_round: counts }) => {
                    is_round |= counts;
                    // The longest pause that a provider asks for: until then its answer would be missing again.
                    let longest = unknown.as_ref().is_none_or(|(_, before)| before <= retry_after);
                    if longest {
                        unknown = Some((attempt.provider.clone(), *retry_after));
                    }
                }
                Verdict::Differs(money) => differing.push((AttemptKey::of(attempt), *money)),
                Verdict::Refunded => refunded.push(AttemptKey::of(attempt)),
                Verdict::Unresolved(reason) => unresolved = Some(*reason),
            }
        }
        let unresolved = unresolved
            .or((!differing.is_empty()).then_some(UnresolvedReason::AmountDiffers))
            .or((!refunded.is_empty()).then_some(UnresolvedReason::Refunded));
        let verdict = match (unresolved, unknown, waits_for) {
            _ if !paid.is_empty() => OrderVerdict::SettlePaid { paid, differing, refunded },
            (Some(reason), _, _) => OrderVerdict::Unresolved(reason),
            (None, Some((provider, retry_after)), _) => OrderVerdict::AskAgain { provider, retry_after, is_round },
            (None, None, Some(provider)) => OrderVerdict::Wait(provider),
            (None, None, None) => OrderVerdict::Close,
        };
        Some((verdict, closed))
    }
}

fn words(answer: &Answer) -> String {
    match answer {
        Answer::Paid { money: Some(money) } => format!("paid {money}"),
        Answer::Forgotten { after } => format!(
            "not known, as an attempt older than {} h that was not paid, or one of another account",
            after.as_secs() / 3_600
        ),
        Answer::Unknown(unknown) => format!("unknown ({})", unknown.why),
        answer => answer.as_str().replace('_', " "),
    }
}

/// Appends a part if there is room for it.
fn note(text: &mut String, part: &str) {
    if text.len() + part.len() + 2 <= MAX_ANSWERS_BYTES {
        if !text.is_empty() {
            text.push_str("; ");
        }
        text.push_str(part);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::tests::{attempt, claim, key, money, paid, unknown};
    use super::*;

    const NOW: Timestamp = Timestamp::from_unix_micros(0);

    fn settled(paid: &[&str]) -> (OrderVerdict, Vec<AttemptKey>) {
        let paid = paid.iter().map(|reference| key(reference)).collect();
        (OrderVerdict::SettlePaid { paid, differing: vec![], refunded: vec![] }, vec![])
    }

    fn order(attempts: &[&str]) -> ClaimedOrder {
        ClaimedOrder::new(claim("1", attempts))
    }

    /// Answers every call until none is left.
    fn run(order: &mut ClaimedOrder, mut answer: impl FnMut(&Call) -> Answer) -> Vec<(CallKind, String)> {
        let mut calls = Vec::new();
        loop {
            let next = order.take_calls();
            if next.is_empty() {
                return calls;
            }
            for call in next {
                calls.push((call.kind, call.attempt.reference.clone()));
                order.take_answer(call.number, call.kind, &answer(&call), NOW);
            }
        }
    }

    #[test]
    fn order_without_attempts_is_closed() {
        assert_eq!(order(&[]).verdict(), Some((OrderVerdict::Close, vec![])));
    }

    #[test]
    fn open_attempt_is_cancelled_then_closed() {
        let mut order = order(&["pi_1"]);
        assert_eq!(order.verdict(), None);
        let calls = run(&mut order, |call| match call.kind {
            CallKind::Ask => Answer::Open,
            CallKind::Cancel => Answer::Closed,
        });
        assert_eq!(calls, vec![(CallKind::Ask, "pi_1".into()), (CallKind::Cancel, "pi_1".into())]);
        assert_eq!(order.verdict(), Some((OrderVerdict::Close, vec![key("pi_1")])));
        assert_eq!(order.answers(), "stripe pi_1 ask: open; stripe pi_1 cancel: closed");
    }

    #[test]
    fn payment_that_beats_cancel_settles() {
        let mut order = order(&["pi_1"]);
        run(&mut order, |call| match call.kind {
            CallKind::Ask => Answer::Open,
            CallKind::Cancel => paid(),
        });
        assert_eq!(order.verdict(), Some(settled(&["pi_1"])));
    }

    #[test]
    fn closed_attempt_does_not_decide_order() {
        let mut order = order(&["cs_old", "cs_new"]);
        let calls = order.take_calls();
        order.take_answer(calls[0].number, CallKind::Ask, &Answer::Closed, NOW);
        assert_eq!(order.verdict(), None, "the other attempt was not answered yet");
        order.take_answer(calls[1].number, CallKind::Ask, &unknown(None), NOW);
        let (provider, closed) = ("stripe".into(), vec![key("cs_old")]);
        let again = OrderVerdict::AskAgain { provider, retry_after: None, is_round: true };
        assert_eq!(order.verdict(), Some((again, closed)));
    }

    #[test]
    fn paid_order_cancels_other_attempts_once() {
        let mut order = order(&["a", "b"]);
        let calls = run(&mut order, |call| if call.attempt.reference == "a" { paid() } else { unknown(None) });
        let cancelled: Vec<_> = calls.into_iter().filter(|(kind, _)| *kind == CallKind::Cancel).collect();
        assert_eq!(cancelled, vec![(CallKind::Cancel, "b".into())]);
        assert_eq!(order.verdict(), Some(settled(&["a"])));
    }

    #[test]
    fn other_money_of_paid_order_is_kept() {
        let mut order = order(&["a", "b", "c"]);
        let other = money(1, "EUR");
        let answers = [paid(), Answer::Paid { money: Some(other) }, Answer::Refunded];
        run(&mut order, |call| answers[call.number].clone());
        let (paid, differing, refunded) = (vec![key("a")], vec![(key("b"), other)], vec![key("c")]);
        assert_eq!(order.verdict(), Some((OrderVerdict::SettlePaid { paid, differing, refunded }, vec![])));
    }

    #[test]
    fn unexpected_answers_are_ignored() {
        let mut order = order(&["a"]);
        order.take_answer(0, CallKind::Ask, &Answer::Closed, NOW);
        assert_eq!(order.verdict(), None, "not asked yet");
        order.take_calls();
        order.take_answer(0, CallKind::Cancel, &Answer::Closed, NOW);
        order.take_answer(1, CallKind::Ask, &Answer::Closed, NOW);
        assert_eq!(order.verdict(), None);
    }

    #[test]
    fn longest_requested_pause_counts() {
        let mut order = order(&["a", "b", "c"]);
        let pauses = [Some(Duration::from_secs(2)), Some(Duration::from_secs(9)), None];
        run(&mut order, |call| unknown(pauses[call.number]));
        let Some((OrderVerdict::AskAgain { retry_after, .. }, _)) = order.verdict() else {
            panic!("{:?}", order.verdict())
        };
        assert_eq!(retry_after, Some(Duration::from_secs(9)));
    }

    fn any_answer() -> impl Strategy<Value = Answer> {
        prop_oneof![
            Just(paid()),
            Just(Answer::Paid { money: Some(money(1, "EUR")) }),
            Just(Answer::Open),
            Just(Answer::InProgress),
            Just(Answer::Closed),
            Just(Answer::Refunded),
            Just(Answer::Absent),
            Just(unknown(None)),
        ]
    }

    proptest! {
        /// Whatever is answered: a verdict is reached after two calls for each attempt, an order is closed only if every
        /// attempt was answered closed, settled only if one was answered paid, and no attempt is cancelled unasked.
        #[test]
        fn verdicts_rest_on_answers(
            answers in proptest::collection::vec((any_answer(), any_answer()), 0..4),
            has_waited in any::<bool>(),
        ) {
            let names: Vec<String> = (0..answers.len()).map(|n| format!("pi_{n}")).collect();
            let attempts = names.iter().map(|name| attempt(name)).collect();
            let mut order = ClaimedOrder::new(Claim { attempts, has_waited, ..claim("1", &[]) });
            let (mut said_closed, mut said_paid) = (vec![false; answers.len()], false);
            let calls = run(&mut order, |call| {
                let (asked, cancelled) = &answers[call.number];
                let answer = if call.kind == CallKind::Ask { asked } else { cancelled };
                said_closed[call.number] |= *answer == Answer::Closed;
                said_paid |= *answer == paid();
                answer.clone()
            });
            for name in &names {
                let of_one: Vec<CallKind> = calls.iter().filter(|(_, one)| one == name).map(|(kind, _)| *kind).collect();
                prop_assert!(of_one == [CallKind::Ask] || of_one == [CallKind::Ask, CallKind::Cancel]);
            }
            match order.verdict() {
                None => prop_assert!(false, "no verdict"),
                Some((OrderVerdict::Close, closed)) => {
                    prop_assert!(said_closed.iter().all(|closed| *closed));
                    prop_assert_eq!(closed.len(), answers.len());
                }
                Some((OrderVerdict::SettlePaid { paid, .. }, _)) => prop_assert!(said_paid && !paid.is_empty()),
                Some(_) => prop_assert!(!said_paid),
            }
        }
    }
}
