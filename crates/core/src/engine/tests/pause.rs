//! While closing is paused nothing is closed by any path, and the broker keeps the alarms.

use super::*;

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
