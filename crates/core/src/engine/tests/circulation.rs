//! Alarms that the broker returns early, and messages that it dead-lettered.

use std::ops::Range;

use super::*;
use crate::alarm::Death;

const SLOT_S: i64 = 60;

/// An alarm due in an hour, back from a slot that should have released it a minute later, with `before` earlier early
/// returns.
fn early(order: &str, before: u32, tag: u64, now: Timestamp) -> Delivered {
    let alarm = Alarm::new(OrderId::new(order).unwrap(), at_ms(3_600_000));
    let returns = Returns { due_at: Some(now + Duration::from_secs(SLOT_S.unsigned_abs())), early: before };
    Delivered {
        receipt: Receipt { session: 1, channel: 0, tag },
        source: SourceQueue::Timeout,
        content: Ok(DeliveredAlarm { alarm, attempt: 0, first_published_at: None, traceparent: None, returns }),
        death: Some(Death { reason: DeathReason::Expired, queue: "order.wheel.1m.07".into() }),
    }
}

fn open_engine() -> Engine {
    let mut engine = Engine::new(policy());
    engine.handle(Input::SessionOpened(1), at_ms(0));
    engine
}

fn rearmed(engine: &mut Engine, now: Timestamp) -> Vec<Rearm> {
    let rearms = engine.poll_actions(now).into_iter().filter_map(|action| match action {
        Action::Rearm(rearms) => Some(rearms),
        _ => None,
    });
    rearms.flatten().collect()
}

#[test]
fn first_early_return_is_armed_at_once() {
    let mut engine = open_engine();
    engine.handle(Input::Delivered(early("a", 0, 1, at_ms(1_000))), at_ms(1_000));
    let rearms = rearmed(&mut engine, at_ms(1_000));
    assert_eq!((rearms.len(), rearms[0].alarm.returns.early), (1, 1));
    assert_eq!(engine.snapshot(at_ms(1_000)).circulation, None);
}

#[test]
fn return_on_time_resets_count() {
    let mut engine = open_engine();
    let mut delivered = early("a", 7, 1, at_ms(1_000));
    delivered.content.as_mut().unwrap().returns.due_at = Some(at_ms(1_400));
    engine.handle(Input::Delivered(delivered), at_ms(1_000));
    assert_eq!(rearmed(&mut engine, at_ms(1_000))[0].alarm.returns, Returns::default());
}

/// Alarms of these numbers, early for the second time.
fn deliver_circulating(engine: &mut Engine, numbers: Range<u64>, now: Timestamp) {
    numbers.for_each(|n| engine.handle(Input::Delivered(early(&n.to_string(), 1, n, now)), now));
}

/// All of them come back early, at once, each time they are rearmed.
#[test]
fn circulating_alarms_are_rearmed_slowly() {
    let (mut engine, mut tags) = (open_engine(), 900..);
    deliver_circulating(&mut engine, 0..900, at_ms(0));
    let (mut ms, mut count) = (0, 0);
    while ms < 60_000 {
        for rearm in rearmed(&mut engine, at_ms(ms)) {
            count += 1;
            let (order, before) = (rearm.alarm.order_id().as_str(), rearm.alarm.returns.early);
            engine.handle(Input::Delivered(early(order, before, tags.next().unwrap(), at_ms(ms))), at_ms(ms));
        }
        ms = engine.next_wakeup().map_or(ms + 10, |at| (at.unix_micros() / 1_000).max(ms + 10));
    }
    assert!((250..=320).contains(&count), "{count} in a minute");
    let why = engine.snapshot(at_ms(ms)).circulation.expect("they circulate");
    assert!(why.contains("message-ttl") && why.contains("max-length"), "{why}");
}

#[test]
fn waiting_alarms_are_rearmed_in_turn() {
    let mut engine = open_engine();
    deliver_circulating(&mut engine, 0..900, at_ms(0));
    let rearmed: usize = (0..1_810).map(|step| rearmed(&mut engine, at_ms(step * 100)).len()).sum();
    assert_eq!((rearmed, engine.hold.len()), (900, 0));
    assert_eq!(engine.snapshot(at_ms(181_000)).circulation, None);
}

#[test]
fn waiting_alarm_is_held_for_its_deadline() {
    let mut engine = open_engine();
    deliver_circulating(&mut engine, 0..900, at_ms(0));
    let mut delivered = early("due", 1, 900, at_ms(0));
    delivered.content.as_mut().unwrap().alarm.deadline = at_ms(0) + policy().hold_max + Duration::from_secs(1);
    engine.handle(Input::Delivered(delivered), at_ms(0));
    for step in 0..20 {
        let rearms = rearmed(&mut engine, at_ms(step * 100));
        assert!(rearms.iter().all(|rearm| rearm.alarm.order_id().as_str() != "due"), "within hold_max it stays");
    }
}

#[test]
fn circulating_alarm_leaves_inbox() {
    let mut engine = open_engine();
    let delivered = Delivered { source: SourceQueue::Inbox, ..early("a", 1, 1, at_ms(0)) };
    engine.handle(Input::Delivered(delivered), at_ms(0));
    assert_eq!(rearmed(&mut engine, at_ms(0))[0].wanted, Wanted::AtOnce);
}

#[test]
fn waiting_alarms_end_with_their_session() {
    let mut engine = open_engine();
    deliver_circulating(&mut engine, 0..50, at_ms(0));
    rearmed(&mut engine, at_ms(0));
    engine.handle(Input::SessionEnded, at_ms(1));
    assert_eq!((rearmed(&mut engine, at_ms(10_000)).len(), engine.hold.len()), (0, 0));
}

#[test]
fn draining_requeues_waiting_alarms() {
    let mut engine = open_engine();
    deliver_circulating(&mut engine, 0..5, at_ms(0));
    engine.drain();
    let actions = engine.poll_actions(at_ms(0));
    let Some(Action::Settle(settled)) = actions.first() else { panic!("{actions:?}") };
    assert_eq!(settled.iter().filter(|(_, settlement)| *settlement == Settlement::Requeue).count(), 5);
}

/// For each reason of a dead letter: whether the alarm goes on, and what is said of one that is parked.
#[test]
fn death_reason_decides_about_parking() {
    for (reason, goes_on, expected) in [
        (Some(DeathReason::Expired), true, ""),
        (Some(DeathReason::MaxLength), true, ""),
        (Some(DeathReason::DeliveryLimit), false, "delivery-limit"),
        (Some(DeathReason::Rejected), false, "not a worker rejected it"),
        (None, false, "dead-lettered"),
    ] {
        let mut engine = open_engine();
        let death = reason.map(|reason| Death { reason, queue: "order.timeout".into() });
        let mut delivered = Delivered { source: SourceQueue::Parked, death, ..early("a", 0, 1, at_ms(0)) };
        delivered.content.as_mut().unwrap().returns = Returns::default();
        engine.handle(Input::Delivered(delivered), at_ms(0));
        let actions = engine.poll_actions(at_ms(0));
        match &actions[..] {
            [Action::Rearm(rearms)] => {
                assert!(goes_on, "{reason:?}");
                assert_eq!((rearms[0].wanted, rearms[0].alarm.returns.early), (Wanted::BeforeDeadline, 1));
            }
            [Action::Park(dead_letters)] => {
                assert!(!goes_on, "{reason:?}");
                let dead_letter = &dead_letters[0].0;
                assert_eq!(dead_letter.reason, ParkReason::BrokerGaveUp);
                assert!(dead_letter.detail.contains(expected), "{}", dead_letter.detail);
            }
            other => panic!("{other:?}"),
        }
    }
}
