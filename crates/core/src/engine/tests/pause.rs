//! While closing is paused nothing is closed by any path, and the broker keeps the alarms.

use super::*;
use crate::brake::{Limits, Woken};

#[test]
fn paused_engine_closes_nothing() {
    let mut engine = sweeping_engine();
    engine.handle(delivered("held", at_ms(200), 1, 1), at_ms(0));
    engine.handle(delivered("due", at_ms(100), 1, 2), at_ms(101));
    engine.handle(Input::ClosingPaused, at_ms(101));
    assert!(!engine.wants_deliveries(at_ms(101)));
    for ms in [101, 200, 300, 5_000, 60_000] {
        assert_eq!(engine.poll_actions(at_ms(ms)), vec![], "neither alarm nor sweep, at {ms} ms");
        assert!(engine.next_wakeup().is_none_or(|wake| wake > at_ms(ms)), "it does not ask to be woken at once");
    }
    assert!(engine.snapshot(at_ms(60_000)).closing_is_paused);
    engine.handle(Input::ClosingResumed, at_ms(60_000));
    assert!(engine.wants_deliveries(at_ms(60_000)));
    let actions = engine.poll_actions(at_ms(60_000));
    let closed: Vec<&str> = actions.iter().flat_map(closing_names).collect();
    assert_eq!(closed, ["due", "held"], "everything that is due");
    assert!(actions.iter().any(|action| matches!(action, Action::Sweep(_))), "{actions:?}");
}

fn closing_names(action: &Action) -> Vec<&str> {
    match action {
        Action::Close(batch) => names(batch),
        _ => Vec::new(),
    }
}

#[test]
fn retries_wait_for_end_of_pause() {
    let (mut engine, batch) = engine_with_one_closing();
    engine.handle(Input::ClosingPaused, at_ms(1_003));
    finish(&mut engine, batch, &found(Outcome::Busy), at_ms(1_003));
    assert_eq!(engine.poll_actions(at_ms(9_000)), vec![]);
    engine.handle(Input::ClosingResumed, at_ms(9_000));
    assert_eq!(names(&batches(&mut engine, at_ms(9_000))[0]), ["a"]);
}

#[test]
fn look_ahead_waits_for_end_of_pause() {
    let mut engine = sweeping_engine();
    engine.handle(Input::SessionEnded, at_ms(0));
    engine.handle(Input::ClosingPaused, at_ms(1));
    assert_eq!(engine.poll_actions(at_ms(250)), vec![]);
    engine.handle(Input::ClosingResumed, at_ms(251));
    assert!(matches!(&engine.poll_actions(at_ms(251))[..], [Action::Sweep(_)]));
}

fn limits(paid_share: Option<f64>, closes_left: Option<u64>) -> Limits {
    Limits { paid_share, others: Woken::default(), closes_left, counted: 0, known_until: Some(at_ms(10)) }
}

/// With small batches, and a session in which alarms arrive.
fn consuming_engine() -> Engine {
    let mut engine = Engine::new(Policy { batch_size: 80, ..policy() });
    engine.handle(Input::SessionOpened(1), at_ms(0));
    engine
}

/// Alarms of orders that fall due at this time.
fn deliver(engine: &mut Engine, orders: std::ops::Range<u64>, due_ms: i64) {
    for order in orders {
        engine.handle(delivered(&format!("{order:04}"), at_ms(due_ms), 1, order), at_ms(due_ms));
    }
}

/// Closes what the engine hands out until it hands out nothing; returns how many orders, and whether it has tripped.
fn close_all(engine: &mut Engine, ms: i64) -> (usize, bool) {
    let (mut closed, mut tripped) = (0, false);
    loop {
        let actions = engine.poll_actions(at_ms(ms));
        let had_batch = actions.iter().any(|action| matches!(action, Action::Close(_)));
        for action in actions {
            match action {
                Action::Close(batch) => {
                    closed += batch.items.len();
                    finish(engine, batch, &found(Outcome::Closed), at_ms(ms));
                }
                Action::PauseClosing(_) => tripped = true,
                _ => {}
            }
        }
        if !had_batch {
            return (closed, tripped);
        }
    }
}

#[test]
fn brake_trips_after_unpaid_orders() {
    let mut engine = consuming_engine();
    let share = limits(Some(0.7), None);
    deliver(&mut engine, 0..3_000, 1_000);
    for round in 1..=6 {
        engine.handle(Input::BrakeLimits(share), at_ms(1_002));
        assert_eq!(close_all(&mut engine, 1_002), (7, round == 6), "no more until the other workers know of them");
        assert_eq!(engine.take_counts().woken, Woken { closed: 7, paid: 0 });
    }
    assert!(engine.snapshot(at_ms(1_002)).closing_is_paused && !engine.wants_deliveries(at_ms(1_002)));
    // A stale answer that closing is not paused does not end it before the pause is written.
    engine.handle(Input::ClosingResumed, at_ms(1_003));
    assert_eq!(close_all(&mut engine, 1_003), (0, false));
    engine.handle(Input::ClosingPaused, at_ms(1_004));
    engine.handle(Input::BrakeLimits(Limits { known_until: Some(at_ms(9_000)), ..share }), at_ms(9_000));
    engine.handle(Input::ClosingResumed, at_ms(9_000));
    assert_eq!(close_all(&mut engine, 9_000), (2_958, false), "what was due when it was resumed");
}

#[test]
fn brake_trips_by_what_other_workers_found() {
    let mut engine = consuming_engine();
    let share = limits(Some(0.7), None);
    engine.handle(Input::BrakeLimits(share), at_ms(0));
    deliver(&mut engine, 0..3_000, 1_000);
    assert_eq!(close_all(&mut engine, 1_002), (7, false));
    let others = Woken { closed: 35, paid: 0 };
    engine.handle(Input::BrakeLimits(Limits { others, ..share }), at_ms(1_003));
    assert_eq!(close_all(&mut engine, 1_003), (0, true));
}

#[test]
fn worker_judges_alone_if_counts_are_not_shared() {
    let mut engine = consuming_engine();
    engine.handle(Input::BrakeLimits(limits(Some(0.7), None)), at_ms(0));
    deliver(&mut engine, 0..3_000, 1_000);
    for round in 1..=6 {
        assert_eq!(close_all(&mut engine, 1_002), (7, round == 6), "closing does not stop, and trips as it would");
        engine.handle(Input::BrakeNotJudged, at_ms(1_002));
    }
}

fn batch_of(action: Action) -> Option<Batch> {
    match action {
        Action::Close(batch) => Some(batch),
        _ => None,
    }
}

#[test]
fn burst_opens_up_while_orders_are_paid() {
    let mut engine = consuming_engine();
    engine.handle(Input::BrakeLimits(limits(Some(0.7), None)), at_ms(0));
    deliver(&mut engine, 0..1_000, 1_000);
    let mut rounds = Vec::new();
    for _ in 0..6 {
        let batches: Vec<Batch> = engine.poll_actions(at_ms(1_002)).into_iter().filter_map(batch_of).collect();
        rounds.push(batches.iter().map(|batch| batch.items.len()).sum::<usize>());
        for batch in batches {
            finish(&mut engine, batch, &found(Outcome::Paid), at_ms(1_002));
        }
    }
    assert_eq!(rounds, [7, 14, 28, 56, 112, 160], "twice as many each time, up to two full batches");
}

#[test]
fn closes_stop_at_limit_until_next() {
    let mut engine = consuming_engine();
    engine.handle(Input::BrakeLimits(limits(None, Some(250))), at_ms(0));
    deliver(&mut engine, 0..1_000, 1_000);
    assert_eq!(close_all(&mut engine, 1_002), (250, false));
    assert!(engine.next_wakeup().is_none_or(|wake| wake > at_ms(1_002)), "it does not ask to be woken at once");
    let next = Limits { counted: 250, known_until: None, ..limits(None, Some(10_000)) };
    engine.handle(Input::BrakeLimits(next), at_ms(2_000));
    assert_eq!(close_all(&mut engine, 2_000), (750, false));
    assert_eq!(engine.take_counts().closed_by_due.values().sum::<u64>(), 1_000);
}
