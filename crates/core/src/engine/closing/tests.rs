//! The closing protocol of many orders: taking over, limits, ends, and what a worker keeps when it stops.

use super::*;
use crate::order::CloseError;
use crate::payment::{Answer, Attempt, Currency, Money, Unknown};

pub(super) fn money(amount_minor: i64, currency: &str) -> Money {
    Money { amount_minor, currency: Currency::new(currency).unwrap() }
}

pub(super) fn attempt(reference: &str) -> ClaimedAttempt {
    attempt_at("stripe", reference)
}

fn attempt_at(provider: &str, reference: &str) -> ClaimedAttempt {
    let money = money(1_999, "EUR");
    let attempt = Attempt { provider: provider.into(), reference: reference.into(), money };
    ClaimedAttempt { attempt, recorded: Recorded::Open, begun_at: at_ms(0), payable_until: None }
}

#[test]
fn order_with_lost_lease_counts_once() {
    let mut closing = resumed(vec![claim("1", &["pi_1"])]);
    answer_all(&mut closing, &paid(), at_ms(1));
    // Its verdict is not written when its lease is over.
    closing.handle(ClosingInput::Resumed(vec![Claim { lease: Lease(2), ..claim("1", &["pi_1"]) }]), at_ms(2));
    answer_all(&mut closing, &paid(), at_ms(3));
    assert_eq!(closing.take_answer_counts(), ProviderCounts { asked: 1, paid: 1, unknown: 0 });
}

pub(super) fn key(reference: &str) -> AttemptKey {
    AttemptKey { provider: "stripe".into(), reference: reference.into() }
}

pub(super) fn claim(order: &str, attempts: &[&str]) -> Claim {
    Claim {
        order_id: id(order),
        lease: Lease(1),
        queue: if attempts.is_empty() { String::new() } else { "stripe".into() },
        rounds: 0,
        has_waited: false,
        was_judged: false,
        attempts: attempts.iter().map(|reference| attempt(reference)).collect(),
    }
}

pub(super) fn paid() -> Answer {
    Answer::Paid { money: Some(money(1_999, "EUR")) }
}

pub(super) fn unknown(retry_after: Option<Duration>) -> Answer {
    Answer::Unknown(Unknown { why: "no answer in time".into(), retry_after, was_asked: true })
}

fn id(order: &str) -> OrderId {
    OrderId::new(order).unwrap()
}

fn at_ms(ms: i64) -> Timestamp {
    Timestamp::from_unix_micros(ms * 1_000)
}

fn policy() -> ClosingPolicy {
    ClosingPolicy {
        queues: ["", "http", "stripe"].map(|queue| (queue.to_owned(), 2)).into(),
        lease: Duration::from_secs(60),
        resume_every: Duration::from_secs(1),
        in_progress_wait: Duration::from_secs(5),
        retry_first: Duration::from_secs(1),
        retry_longest: Duration::from_secs(60),
        max_rounds: 3,
        batch_size: 10,
    }
}

/// A state that has asked for its first page at the time 0.
fn closing() -> Closing {
    let mut closing = Closing::new(policy(), 1.0);
    let limits = ["", "http", "stripe"].map(|queue| (queue.to_owned(), 2)).into();
    let page = ResumePage { lease: policy().lease, limits, renewed: vec![] };
    assert_eq!(closing.poll_actions(at_ms(0)), vec![ClosingAction::Resume(page)]);
    closing
}

fn resumed(claims: Vec<Claim>) -> Closing {
    let mut closing = closing();
    closing.handle(ClosingInput::Resumed(claims), at_ms(0));
    closing
}

/// The calls among the actions.
fn calls(closing: &mut Closing, now: Timestamp) -> Vec<Call> {
    let actions = closing.poll_actions(now).into_iter();
    actions.filter_map(|action| if let ClosingAction::Call(call) = action { Some(call) } else { None }).collect()
}

/// Answers every call with this until there is none.
fn answer_all(closing: &mut Closing, answer: &Answer, now: Timestamp) -> Vec<ClosingAction> {
    let mut others = Vec::new();
    loop {
        let actions = closing.poll_actions(now);
        let had_calls = actions.iter().any(|action| matches!(action, ClosingAction::Call(_)));
        for action in actions {
            match action {
                ClosingAction::Call(call) => closing.handle(ClosingInput::Answered(call, answer.clone()), now),
                other => others.push(other),
            }
        }
        if !had_calls {
            return others;
        }
    }
}

fn ended(order: &str, outcome: EndOutcome) -> Vec<Ended> {
    vec![Ended { order_id: id(order), lease: Lease(1), outcome: Ok(outcome) }]
}

fn postponed(actions: &[ClosingAction]) -> &Postponement {
    let [ClosingAction::Postpone(ends)] = actions else { panic!("{actions:?}") };
    let [end] = &ends[..] else { panic!("{ends:?}") };
    end
}

#[test]
fn order_without_attempts_closes_at_once() {
    let mut closing = resumed(vec![claim("1", &[])]);
    let actions = closing.poll_actions(at_ms(0));
    let [ClosingAction::CloseClaimed(ends)] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!((ends[0].order_id.clone(), ends[0].lease), (id("1"), Lease(1)));
    closing.handle(ClosingInput::Ended(EndingKind::Close, ended("1", EndOutcome::Closed)), at_ms(1));
    assert_eq!(closing.len(), 0);
}

#[test]
fn unknown_answers_back_off_then_unresolved() {
    for (rounds, step, pause_s) in [(0, Step::NoAnswer, 1), (1, Step::NoAnswer, 2)] {
        let mut closing = resumed(vec![Claim { rounds, ..claim("1", &["pi_1"]) }]);
        let actions = answer_all(&mut closing, &unknown(None), at_ms(10));
        let end = postponed(&actions);
        assert_eq!((end.step, end.rounds), (step, rounds + 1));
        assert_eq!(end.until, at_ms(10) + Duration::from_secs(pause_s));
    }
    let mut closing = resumed(vec![Claim { rounds: 2, ..claim("1", &["pi_1"]) }]);
    let actions = answer_all(&mut closing, &unknown(None), at_ms(10));
    assert_eq!(postponed(&actions).step, Step::Unresolved(UnresolvedReason::NoAnswer));
}

#[test]
fn requested_pause_is_kept_within_bounds() {
    for (asked_for_s, waited_s) in [(0, 1), (30, 30), (3_600, 60)] {
        let mut closing = resumed(vec![claim("1", &["pi_1"])]);
        let answer = unknown(Some(Duration::from_secs(asked_for_s)));
        let actions = answer_all(&mut closing, &answer, at_ms(0));
        assert_eq!(postponed(&actions).until, at_ms(0) + Duration::from_secs(waited_s));
    }
}

#[test]
fn payment_in_progress_is_waited_for_once() {
    let mut closing = resumed(vec![claim("1", &["pi_1"])]);
    let actions = answer_all(&mut closing, &Answer::InProgress, at_ms(0));
    let end = postponed(&actions);
    assert_eq!((end.step, end.until, end.rounds), (Step::InProgress, at_ms(5_000), 0));
    assert!(end.has_waited);
    let mut closing = resumed(vec![Claim { has_waited: true, ..claim("1", &["pi_1"]) }]);
    let actions = answer_all(&mut closing, &Answer::InProgress, at_ms(0));
    assert_eq!(postponed(&actions).step, Step::NoAnswer, "cancelled, and still in progress");
}

#[test]
fn refunded_order_is_unresolved_at_once() {
    let mut closing = resumed(vec![claim("1", &["pi_1"])]);
    let actions = answer_all(&mut closing, &Answer::Refunded, at_ms(0));
    assert_eq!(postponed(&actions).step, Step::Unresolved(UnresolvedReason::Refunded));
}

#[test]
fn settled_order_leaves() {
    let mut closing = resumed(vec![claim("1", &["pi_1"])]);
    let actions = answer_all(&mut closing, &paid(), at_ms(0));
    let [ClosingAction::SettlePaid(ends)] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!(ends[0].paid, vec![key("pi_1")]);
    closing.handle(ClosingInput::Ended(EndingKind::SettlePaid, ended("1", EndOutcome::Settled)), at_ms(1));
    assert_eq!(closing.len(), 0);
}

#[test]
fn order_that_cannot_be_settled_is_unresolved() {
    for (outcome, reason) in [
        (EndOutcome::NoDeadline, UnresolvedReason::NoDeadline),
        (EndOutcome::AmountDiffers, UnresolvedReason::AmountDiffers),
    ] {
        let mut closing = resumed(vec![claim("1", &["pi_1"])]);
        answer_all(&mut closing, &paid(), at_ms(0));
        closing.handle(ClosingInput::Ended(EndingKind::SettlePaid, ended("1", outcome)), at_ms(1));
        assert_eq!(postponed(&closing.poll_actions(at_ms(1))).step, Step::Unresolved(reason));
    }
}

#[test]
fn unavailable_database_is_tried_again() {
    let mut closing = resumed(vec![claim("1", &[])]);
    assert_eq!(closing.poll_actions(at_ms(0)).len(), 1);
    let lost = || CloseError::Unavailable("the connection is gone".into());
    let away = Ended { order_id: id("1"), lease: Lease(1), outcome: Err(lost()) };
    closing.handle(ClosingInput::Ended(EndingKind::Close, vec![away]), at_ms(0));
    assert_eq!(closing.poll_actions(at_ms(24)), vec![]);
    assert_eq!(closing.next_wakeup(), Some(at_ms(25)));
    assert!(matches!(&closing.poll_actions(at_ms(25))[..], [ClosingAction::CloseClaimed(_)]));
}

#[test]
fn refused_close_is_unresolved_after_rounds() {
    for (rounds, step) in [(0, Step::NoAnswer), (2, Step::Unresolved(UnresolvedReason::Refused))] {
        let mut closing = resumed(vec![Claim { rounds, ..claim("1", &[]) }]);
        assert_eq!(closing.poll_actions(at_ms(0)).len(), 1);
        let refused = CloseError::Rejected("a trigger says no".into());
        let refused = Ended { order_id: id("1"), lease: Lease(1), outcome: Err(refused) };
        closing.handle(ClosingInput::Ended(EndingKind::Close, vec![refused]), at_ms(0));
        assert_eq!(postponed(&closing.poll_actions(at_ms(0))).step, step);
    }
}

#[test]
fn lost_lease_ends_work() {
    let mut closing = resumed(vec![claim("1", &["pi_1"])]);
    let old = calls(&mut closing, at_ms(0)).remove(0);
    closing.handle(ClosingInput::Resumed(vec![Claim { lease: Lease(2), ..claim("1", &["pi_1"]) }]), at_ms(1));
    closing.handle(ClosingInput::Answered(old, Answer::Closed), at_ms(2));
    let new = calls(&mut closing, at_ms(2)).remove(0);
    assert_eq!((new.lease, new.kind), (Lease(2), CallKind::Ask), "asked again under the new lease");
    closing.handle(ClosingInput::Answered(new, Answer::Closed), at_ms(3));
    assert_eq!(closing.poll_actions(at_ms(3)).len(), 1);
    let lost = Ended { order_id: id("1"), lease: Lease(2), outcome: Ok(EndOutcome::LeaseLost) };
    closing.handle(ClosingInput::Ended(EndingKind::Close, vec![lost]), at_ms(4));
    assert_eq!(closing.len(), 0);
}

#[test]
fn sick_provider_fills_only_its_queue() {
    let mut closing = resumed(vec![claim("1", &["a"]), claim("2", &["b"])]);
    assert_eq!(calls(&mut closing, at_ms(0)).len(), 2);
    let actions = closing.poll_actions(at_ms(1_000));
    let [ClosingAction::Resume(page)] = &actions[..] else { panic!("{actions:?}") };
    let of_others: Vec<_> = ["", "http"].map(|queue| (queue.to_owned(), 2)).into();
    assert_eq!(page.limits, of_others);
    let other = Claim { queue: "http".into(), attempts: vec![attempt_at("http", "x")], ..claim("3", &[]) };
    closing.handle(ClosingInput::Resumed(vec![other]), at_ms(1_000));
    assert_eq!(calls(&mut closing, at_ms(1_000)).len(), 1);
}

#[test]
fn order_waits_in_full_providers_queue() {
    let mut closing = resumed(vec![claim("1", &["a"]), claim("2", &["b"])]);
    calls(&mut closing, at_ms(0));
    closing.poll_actions(at_ms(1_000));
    let attempts = vec![attempt_at("http", "x"), attempt("c")];
    closing
        .handle(ClosingInput::Resumed(vec![Claim { queue: "http".into(), attempts, ..claim("3", &[]) }]), at_ms(1_000));
    let actions = closing.poll_actions(at_ms(1_000));
    let end = postponed(&actions);
    assert_eq!((end.queue.as_str(), end.until, end.rounds, end.step), ("stripe", at_ms(1_000), 0, Step::Claimed));
}

#[test]
fn full_page_is_followed_by_another() {
    let mut closing = resumed(vec![claim("1", &[]), claim("2", &[])]);
    assert_eq!(closing.poll_actions(at_ms(0)).len(), 1);
    assert_eq!(closing.next_wakeup(), Some(at_ms(1_000)), "no room");
    let ends = [ended("1", EndOutcome::Closed), ended("2", EndOutcome::Closed)].concat();
    closing.handle(ClosingInput::Ended(EndingKind::Close, ends), at_ms(3));
    assert_eq!(closing.next_wakeup(), Some(at_ms(5)));
    assert!(matches!(&closing.poll_actions(at_ms(5))[..], [ClosingAction::Resume(_)]));
}

#[test]
fn claimed_orders_are_taken_over_at_once() {
    let mut closing = closing();
    closing.handle(ClosingInput::Resumed(vec![]), at_ms(1));
    assert_eq!(closing.next_wakeup(), Some(at_ms(1_000)));
    closing.note_claimed(at_ms(100));
    assert_eq!(closing.next_wakeup(), Some(at_ms(100)));
}

#[test]
fn claims_during_page_are_not_forgotten() {
    let mut closing = closing();
    closing.note_claimed(at_ms(2));
    closing.handle(ClosingInput::Resumed(vec![]), at_ms(3));
    assert_eq!(closing.next_wakeup(), Some(at_ms(5)), "the page may have been read before");
}

#[test]
fn postponed_order_wakes_at_its_time() {
    let mut closing = resumed(vec![claim("1", &["pi_1"])]);
    let answer = unknown(None);
    closing.poll_actions(at_ms(0)).into_iter().for_each(|action| {
        if let ClosingAction::Call(call) = action {
            closing.handle(ClosingInput::Answered(call, answer.clone()), at_ms(0));
        }
    });
    assert_eq!(postponed(&closing.poll_actions(at_ms(0))).until, at_ms(1_000));
    closing.handle(ClosingInput::Ended(EndingKind::Postpone, ended("1", EndOutcome::Postponed)), at_ms(1));
    assert_eq!((closing.len(), closing.next_wakeup()), (0, Some(at_ms(1_000))));
}

#[test]
fn lease_is_renewed_while_provider_is_asked() {
    let mut closing = resumed(vec![claim("1", &["pi_1"])]);
    calls(&mut closing, at_ms(0));
    for (ms, renewed) in [(19_000, 0), (20_000, 1), (21_000, 0), (40_000, 1)] {
        let actions = closing.poll_actions(at_ms(ms));
        let [ClosingAction::Resume(page)] = &actions[..] else { panic!("{actions:?}") };
        assert_eq!(page.renewed, vec![(id("1"), Lease(1)); renewed], "after {ms} ms");
        closing.handle(ClosingInput::Resumed(vec![]), at_ms(ms));
    }
}

#[test]
fn known_pause_without_round_is_kept() {
    for (known_ms, waited_ms) in [(Some(250), 250), (Some(3_600_000), 60_000), (None, 1_000)] {
        let mut closing = resumed(vec![claim("1", &["pi_1"])]);
        let retry_after = known_ms.map(Duration::from_millis);
        let answer = Answer::Unknown(Unknown { why: "its breaker is open".into(), retry_after, was_asked: false });
        let actions = answer_all(&mut closing, &answer, at_ms(0));
        assert_eq!((postponed(&actions).until, postponed(&actions).rounds), (at_ms(waited_ms), 0));
    }
}

#[test]
fn stopping_gives_leases_back() {
    let mut closing = resumed(vec![claim("1", &["pi_1"]), claim("2", &[])]);
    let call = calls(&mut closing, at_ms(0)).remove(0);
    closing.drain(at_ms(1));
    let actions = closing.poll_actions(at_ms(1));
    let end = postponed(&actions);
    assert_eq!((end.ending.order_id.clone(), end.until, end.rounds), (id("1"), at_ms(1), 0));
    closing.handle(ClosingInput::Answered(call, Answer::Closed), at_ms(2));
    closing.handle(ClosingInput::Ended(EndingKind::Postpone, ended("1", EndOutcome::Postponed)), at_ms(2));
    closing.handle(ClosingInput::Ended(EndingKind::Close, ended("2", EndOutcome::Closed)), at_ms(2));
    assert_eq!((closing.len(), closing.next_wakeup()), (0, None));
}

#[test]
fn paused_protocol_settles_and_closes_nothing() {
    let mut closing = resumed(vec![claim("1", &["pi_1"]), claim("2", &[])]);
    let Some(ask) = calls(&mut closing, at_ms(0)).pop() else { panic!("no call") };
    closing.set_paused(true);
    closing.handle(ClosingInput::Answered(ask, paid()), at_ms(1));
    closing.handle(ClosingInput::Ended(EndingKind::Close, ended("2", EndOutcome::Busy)), at_ms(1));
    let actions = closing.poll_actions(at_ms(60_000));
    assert!(matches!(&actions[..], [ClosingAction::SettlePaid(_)]), "money is not left lying: {actions:?}");
    closing.handle(ClosingInput::Ended(EndingKind::SettlePaid, ended("1", EndOutcome::Settled)), at_ms(60_001));
    assert_eq!(closing.next_wakeup(), None);
    closing.set_paused(false);
    let actions = closing.poll_actions(at_ms(60_002));
    assert!(matches!(&actions[..], [ClosingAction::Resume(_), ClosingAction::CloseClaimed(_)]), "{actions:?}");
}

#[test]
fn each_order_counts_once_for_brake() {
    let not_asked = Answer::Unknown(Unknown { why: "its breaker is open".into(), retry_after: None, was_asked: false });
    let mut closing = resumed(vec![claim("1", &["pi_1"]), claim("2", &[])]);
    answer_all(&mut closing, &not_asked, at_ms(1));
    assert_eq!(closing.take_answer_counts(), ProviderCounts { asked: 1, paid: 0, unknown: 1 }, "one has no attempt");
    // It comes again, here or at another worker.
    for answer in [not_asked, paid()] {
        let again = Claim { lease: Lease(2), was_judged: true, ..claim("1", &["pi_1"]) };
        closing.handle(ClosingInput::Resumed(vec![again]), at_ms(2));
        answer_all(&mut closing, &answer, at_ms(3));
        assert_eq!(closing.take_answer_counts(), ProviderCounts::default());
    }
    let rounds = Claim { rounds: 1, ..claim("3", &["pi_3"]) };
    closing.handle(ClosingInput::Resumed(vec![claim("4", &["pi_4"]), rounds]), at_ms(4));
    answer_all(&mut closing, &paid(), at_ms(5));
    assert_eq!(closing.take_answer_counts(), ProviderCounts { asked: 1, paid: 1, unknown: 0 });
}
