//! Alarms that the broker returns before their time, and what it gave up.

use super::*;
use crate::alarm::Death;

const SLOT_S: i64 = 60;

/// An alarm due in an hour, back from a slot that was to let it go a minute later; with so many early returns before.
fn early(order: &str, before: u32, tag: u64, now: Timestamp) -> Delivered {
    let alarm = Alarm { order_id: OrderId::new(order).unwrap(), deadline: at_ms(3_600_000) };
    let returns = Returns { due_at: Some(now + Duration::from_secs(SLOT_S.unsigned_abs())), early: before };
    Delivered {
        receipt: Receipt { session: 1, channel: 0, tag },
        source: SourceQueue::Timeout,
        content: Ok(DeliveredAlarm { alarm, attempt: 0, first_published_at: None, traceparent: None, returns }),
        death: Some(Death { reason: DeathReason::Expired, queue: "order.wheel.1m.07".into() }),
    }
}

fn open_desk() -> Engine {
    let mut engine = Engine::new(policy());
    engine.handle(Input::SessionOpened(1), at_ms(0));
    engine
}

fn armed(engine: &mut Engine, now: Timestamp) -> Vec<Rearm> {
    let jobs = engine.poll_actions(now).into_iter().filter_map(|errand| match errand {
        Action::Rearm(jobs) => Some(jobs),
        _ => None,
    });
    jobs.flatten().collect()
}

#[test]
fn first_early_return_is_armed_at_once() {
    let mut engine = open_desk();
    engine.handle(Input::Delivered(early("a", 0, 1, at_ms(1_000))), at_ms(1_000));
    let jobs = armed(&mut engine, at_ms(1_000));
    assert_eq!((jobs.len(), jobs[0].alarm.returns.early), (1, 1));
    assert_eq!(engine.why_alarms_circulate(at_ms(1_000)), None);
}

#[test]
fn return_on_time_ends_the_count() {
    let mut engine = open_desk();
    let mut delivered = early("a", 7, 1, at_ms(1_000));
    delivered.content.as_mut().unwrap().returns.due_at = Some(at_ms(1_400));
    engine.handle(Input::Delivered(delivered), at_ms(1_000));
    assert_eq!(armed(&mut engine, at_ms(1_000))[0].alarm.returns, Returns::default());
}

/// All of them come back early each time they are armed, at once.
#[test]
fn circulating_alarms_are_armed_ten_a_second() {
    const ALARMS: u64 = 900;
    let (mut engine, mut tags) = (open_desk(), 0..);
    let mut deliver = |engine: &mut Engine, order: String, before: u32, now: Timestamp| {
        engine.handle(Input::Delivered(early(&order, before, tags.next().unwrap(), now)), now);
    };
    (0..ALARMS).for_each(|n| deliver(&mut engine, n.to_string(), 1, at_ms(0)));
    let (mut ms, mut written) = (0, 0);
    while ms < 60_000 {
        for job in armed(&mut engine, at_ms(ms)) {
            written += 1;
            let alarm = job.alarm;
            deliver(&mut engine, alarm.order_id().as_str().to_owned(), alarm.returns.early, at_ms(ms));
        }
        ms = engine.next_wakeup().map_or(ms + 10, |at| (at.unix_micros() / 1_000).max(ms + 10));
    }
    assert!((60..=600).contains(&written), "{written} in a minute");
    let why = engine.why_alarms_circulate(at_ms(ms)).expect("they go round");
    assert!(why.contains("order.wheel.1m.07") && why.contains("message-ttl") && why.contains("900"), "{why}");
}

#[test]
fn cured_circulation_is_over_within_seconds() {
    let mut engine = open_desk();
    (0..900).for_each(|n| engine.handle(Input::Delivered(early(&n.to_string(), 1, n, at_ms(0))), at_ms(0)));
    let written: usize = (0..100).map(|step| armed(&mut engine, at_ms(step * 100)).len()).sum();
    assert_eq!((written, engine.held_back()), (900, 0));
    assert_eq!(engine.why_alarms_circulate(at_ms(10_000)), None);
}

#[test]
fn held_back_alarm_leaves_before_its_deadline() {
    let mut engine = open_desk();
    let mut delivered = early("a", 1, 1, at_ms(0));
    delivered.content.as_mut().unwrap().alarm.deadline = at_ms(16_000);
    engine.handle(Input::Delivered(delivered), at_ms(0));
    // Early returns of another keep all waiting.
    for n in 0..9 {
        engine.handle(Input::Delivered(early("b", 1, 2 + n, at_ms(0))), at_ms(0));
    }
    assert_eq!(engine.held_back(), 10);
    engine.poll_actions(at_ms(1_000));
    assert!(engine.held() == 1 || engine.held_back() == 9, "within hold_max it is held, unless it was armed");
}

#[test]
fn held_back_alarms_have_an_upper_bound() {
    let mut engine = Engine::new(Policy { held_back_most: 10, ..policy() });
    engine.handle(Input::SessionOpened(1), at_ms(0));
    (0..15).for_each(|n| engine.handle(Input::Delivered(early(&n.to_string(), 1, n, at_ms(0))), at_ms(0)));
    let first: Vec<u64> = armed(&mut engine, at_ms(0)).iter().map(|job| job.receipt.tag).collect();
    assert_eq!(first[..5], [0, 1, 2, 3, 4], "the oldest make room");
}

#[test]
fn circulating_alarm_leaves_the_inbox() {
    let mut engine = open_desk();
    let delivered = Delivered { source: SourceQueue::Inbox, ..early("a", 1, 1, at_ms(0)) };
    engine.handle(Input::Delivered(delivered), at_ms(0));
    assert_eq!(armed(&mut engine, at_ms(0))[0].wanted, Wanted::AtOnce);
}

#[test]
fn held_back_alarms_end_with_their_session() {
    let mut engine = open_desk();
    (0..5).for_each(|n| engine.handle(Input::Delivered(early(&n.to_string(), 1, n, at_ms(0))), at_ms(0)));
    engine.handle(Input::SessionEnded, at_ms(1));
    assert_eq!((engine.held_back(), armed(&mut engine, at_ms(10_000)).len()), (0, 0));
}

#[test]
fn drained_desk_gives_held_back_alarms_back() {
    let mut engine = open_desk();
    (0..5).for_each(|n| engine.handle(Input::Delivered(early(&n.to_string(), 1, n, at_ms(0))), at_ms(0)));
    engine.drain();
    let actions = engine.poll_actions(at_ms(0));
    let Some(Action::Settle(settled)) = actions.first() else { panic!("{actions:?}") };
    assert_eq!(settled.iter().filter(|(_, settlement)| *settlement == Settlement::Requeue).count(), 5);
}

/// What the broker gave up, for each of its reasons: whether it goes on, and what is said.
#[test]
fn reason_of_death_decides_about_parking() {
    for (reason, goes_on, says) in [
        (Some(DeathReason::Expired), true, "message-ttl"),
        (Some(DeathReason::MaxLength), true, "max-length"),
        (Some(DeathReason::DeliveryLimit), false, "delivery-limit"),
        (Some(DeathReason::Rejected), false, "list_consumers"),
        (None, false, "dead-lettered"),
    ] {
        let mut engine = open_desk();
        let death = reason.map(|reason| Death { reason, queue: "order.timeout".into() });
        let mut delivered = Delivered { source: SourceQueue::Parked, death, ..early("a", 0, 1, at_ms(0)) };
        delivered.content.as_mut().unwrap().returns = Returns::default();
        engine.handle(Input::Delivered(delivered), at_ms(0));
        let actions = engine.poll_actions(at_ms(0));
        match &actions[..] {
            [Action::Rearm(jobs)] => {
                assert!(goes_on, "{reason:?}");
                assert_eq!((jobs[0].wanted, jobs[0].alarm.returns.early), (Wanted::BeforeDeadline, 1));
                assert!(engine.why_broker_policy(at_ms(0)).expect("named").contains(says));
            }
            [Action::Park(dead_letters)] => {
                assert!(!goes_on, "{reason:?}");
                let dead_letter = &dead_letters[0].0;
                assert_eq!(dead_letter.reason, ParkReason::BrokerGaveUp);
                assert!(dead_letter.detail.contains(says), "{}", dead_letter.detail);
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(engine.why_broker_policy(at_ms(8_000)), None, "seen once");
    }
}
