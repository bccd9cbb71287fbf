//! Alarms that are missing shortly before their deadlines: orders are read ahead before the first of them is late.

use super::*;
use crate::order::SweepReach;

/// From then on the alarms of the engine's session must be here.
const NOW_MS: i64 = 20_000;

/// An engine with a session since 0, and the page that it looks at.
fn looking(share: Share, looks_at: i64) -> (Engine, SweepPage) {
    let mut engine = sweeping_engine();
    engine.handle(Input::ShareChanged(share), at_ms(1));
    let page = look(&mut engine, looks_at);
    (engine, page)
}

fn look(engine: &mut Engine, ms: i64) -> SweepPage {
    let actions = engine.poll_actions(at_ms(ms));
    let look = actions.iter().find_map(|action| match action {
        Action::Sweep(page) if is_look(page, at_ms(ms)) => Some(page.clone()),
        _ => None,
    });
    look.unwrap_or_else(|| panic!("{actions:?}"))
}

/// So many orders that fall due, one in each millisecond, from then on.
fn due(from_ms: i64, number: usize) -> Vec<(String, i64)> {
    (from_ms..).take(number).map(|ms| (format!("order-{ms}"), ms)).collect()
}

/// Answers the look; returns whether the pass behind it, which is then over, reads ahead.
fn reads_ahead_after(engine: &mut Engine, orders: &[(String, i64)], ms: i64) -> bool {
    let orders: Vec<(&str, i64)> = orders.iter().map(|(id, at)| (id.as_str(), *at)).collect();
    engine.handle(swept(&orders), at_ms(ms));
    let actions = engine.poll_actions(at_ms(ms));
    let [Action::Sweep(page)] = &actions[..] else { panic!("{actions:?}") };
    assert_eq!(page.after, None);
    let reads_ahead = page.reach == SweepReach::Ahead(policy().look_ahead);
    engine.handle(swept(&[]), at_ms(ms));
    reads_ahead
}

#[test]
fn missing_alarms_show_before_deadlines() {
    let (mut engine, page) = looking(Share::ALL, NOW_MS);
    assert_eq!((page.reach, page.limit), (SweepReach::Ahead(policy().look_ahead), 15));
    assert_eq!(page.after, Some(place(&("", NOW_MS + 250))), "what the next pass would find too late");
    assert!(reads_ahead_after(&mut engine, &due(NOW_MS + 260, 15), NOW_MS));
    assert_eq!(engine.snapshot(at_ms(NOW_MS)).closed_without_alarm, 0, "nothing was closed");
}

#[test]
fn alarm_among_missing_ones_counts_anew() {
    let (mut engine, _) = looking(Share::ALL, NOW_MS);
    let orders = due(NOW_MS + 260, 15);
    engine.handle(delivered(&orders[2].0, at_ms(orders[2].1), 1, 1), at_ms(NOW_MS));
    assert!(!reads_ahead_after(&mut engine, &orders, NOW_MS));
    look(&mut engine, NOW_MS + 250);
    assert!(!reads_ahead_after(&mut engine, &due(NOW_MS + 510, 2), NOW_MS + 250));
    look(&mut engine, NOW_MS + 500);
    assert!(reads_ahead_after(&mut engine, &due(NOW_MS + 760, 1), NOW_MS + 500));
}

#[test]
fn no_order_is_looked_at_twice() {
    let (mut engine, _) = looking(Share::ALL, NOW_MS);
    // The database's clock is ahead of the worker's reading.
    let orders = due(NOW_MS + 502, 14);
    assert!(!reads_ahead_after(&mut engine, &orders, NOW_MS));
    let last = orders.last().map(|(id, at)| place(&(id.as_str(), *at)));
    assert_eq!(look(&mut engine, NOW_MS + 250).after, last);
    assert!(reads_ahead_after(&mut engine, &due(NOW_MS + 520, 1), NOW_MS + 250));
}

#[test]
fn several_workers_hold_some_alarms_each() {
    let (mut engine, page) = looking(Share::new(0, 3), NOW_MS);
    assert_eq!(page.limit, 45);
    assert!(!reads_ahead_after(&mut engine, &due(NOW_MS + 260, 44), NOW_MS));
    look(&mut engine, NOW_MS + 250);
    assert!(reads_ahead_after(&mut engine, &due(NOW_MS + 510, 1), NOW_MS + 250));
}

#[test]
fn alarms_before_session_are_with_others() {
    let (mut engine, _) = looking(Share::ALL, 10_000);
    assert!(!reads_ahead_after(&mut engine, &due(10_260, 15), 10_000));
}

#[test]
fn without_look_ahead_nothing_is_looked_at() {
    let policy = Policy { sweep_every: Duration::from_millis(250), look_ahead: Duration::ZERO, ..policy() };
    let mut engine = Engine::new(policy);
    engine.handle(Input::SessionOpened(1), at_ms(0));
    assert_eq!(engine.poll_actions(at_ms(0)), vec![]);
    let actions = engine.poll_actions(at_ms(NOW_MS));
    assert!(matches!(&actions[..], [Action::Sweep(page)] if page.after.is_none()), "{actions:?}");
}

#[test]
fn failed_look_is_repeated_before_next_pass() {
    let (mut engine, _) = looking(Share::ALL, NOW_MS);
    engine.handle(Input::NotSwept("away".into()), at_ms(NOW_MS + 1));
    assert_eq!(engine.poll_actions(at_ms(NOW_MS + 2)), vec![]);
    look(&mut engine, NOW_MS + 300);
}
