//! An engine with a provider: claims beside closes, and what an alarm waits for.

use super::*;
use crate::brake::Woken;

fn closing_policy() -> ClosingPolicy {
    ClosingPolicy {
        queues: [("stripe".to_owned(), 10)].into(),
        lease: Duration::from_secs(60),
        resume_every: Duration::from_secs(1),
        in_progress_wait: Duration::from_secs(5),
        retry_first: Duration::from_secs(1),
        retry_longest: Duration::from_secs(60),
        max_rounds: 3,
        batch_size: 10,
    }
}

/// An engine that has asked for its first page of claimed orders, and found none.
fn engine() -> Engine {
    let mut engine = Engine::with_provider(policy(), closing_policy());
    let actions = engine.poll_actions(at_ms(0));
    assert!(matches!(&actions[..], [Action::Closing(ClosingAction::Resume(_))]), "{actions:?}");
    engine.handle(Input::Closing(ClosingInput::Resumed(vec![])), at_ms(0));
    engine
}

#[test]
fn due_order_is_claimed_then_taken_over() {
    let mut engine = engine();
    engine.handle(delivered("a", at_ms(100), 1, 1), at_ms(100));
    let mut actions = engine.poll_actions(at_ms(102));
    let Some(Action::Close(batch)) = actions.pop() else { panic!("{actions:?}") };
    let receipt = receipt(&batch.items[0]);
    finish(&mut engine, batch, &found(Outcome::Claimed), at_ms(103));
    let actions = engine.poll_actions(at_ms(103));
    let [Action::Closing(ClosingAction::Resume(_)), Action::Settle(settled)] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert_eq!(settled, &vec![(receipt, Settlement::Ack)], "the claim is committed");
}

#[test]
fn failed_claim_is_retried_like_close() {
    let mut engine = engine();
    engine.handle(delivered("a", at_ms(100), 1, 1), at_ms(100));
    let Some(Action::Close(batch)) = engine.poll_actions(at_ms(102)).pop() else { panic!("no claim") };
    finish(&mut engine, batch, &found(Outcome::Busy), at_ms(103));
    let actions = engine.poll_actions(at_ms(200));
    assert!(matches!(&actions[..], [Action::Close(_)]), "{actions:?}");
}

#[test]
fn engine_without_provider_leaves_claimed_orders() {
    let mut engine = Engine::new(policy());
    engine.handle(delivered("a", at_ms(100), 1, 1), at_ms(100));
    let Some(Action::Close(batch)) = engine.poll_actions(at_ms(102)).pop() else { panic!("no close") };
    let receipt = receipt(&batch.items[0]);
    finish(&mut engine, batch, &found(Outcome::Claimed), at_ms(103));
    assert_eq!(engine.poll_actions(at_ms(103)), [Action::Settle(vec![(receipt, Settlement::Ack)])]);
}

#[test]
fn claims_count_as_closes_for_brake() {
    let mut engine = engine();
    for (order, outcome) in [("a", Outcome::Claimed), ("a", Outcome::Closing), ("b", Outcome::Paid)] {
        engine.handle(delivered(order, at_ms(100), 1, 1), at_ms(100));
        let Some(Action::Close(batch)) = engine.poll_actions(at_ms(102)).pop() else { panic!("no claim") };
        finish(&mut engine, batch, &found(outcome), at_ms(103));
        engine.poll_actions(at_ms(103));
    }
    let counts = engine.take_counts();
    assert_eq!((counts.total, counts.closed_by_due.get(&0)), (1, Some(&1)));
    assert_eq!(counts.woken, Woken::default(), "the provider says what is paid");
}
