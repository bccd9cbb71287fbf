//! The engine's decisions, one by one, without any I/O.

use super::*;
use crate::alarm::Returns;
use crate::message::Alarm;
use crate::order::{CloseError, CloseOutcome, ClosedBy, SweepPage, SweepPlace};

mod arrivals;
mod availability;
mod batching;
mod circulation;
mod closing;
mod kinds;
mod look_ahead;
mod pause;
mod sweep;

pub(crate) fn policy() -> Policy {
    Policy {
        kind: Kind::ORDER,
        other_kinds: [Kind::new("acceptance").unwrap()].into(),
        hold_max: Duration::from_secs(15),
        max_delay: Duration::from_secs(86_400),
        batch_size: 3,
        linger: Duration::from_millis(2),
        closers: 2,
        retry_first: Duration::from_millis(50),
        retry_longest: Duration::from_secs(1),
        missing_for: Duration::from_secs(30),
        max_attempts: 2,
        requeue_after: Duration::from_secs(10),
        longest_try: Duration::from_secs(4),
        // Far away, for the tests that are not about the sweep.
        sweep_every: Duration::from_secs(100_000),
        sweep_grace: Duration::from_millis(500),
        sweep_page: 4,
        look_ahead: Duration::from_millis(500),
        lead: Duration::from_secs(20),
        has_no_alarms: false,
        pause_share: 1.0,
    }
}

fn at_ms(ms: i64) -> Timestamp {
    Timestamp::from_unix_micros(ms * 1_000)
}

fn delivered(order: &str, deadline: Timestamp, session: u64, tag: u64) -> Input {
    let alarm = Alarm::new(OrderId::new(order).unwrap(), deadline);
    Input::Delivered(Delivered {
        receipt: Receipt { session, channel: 0, tag },
        source: SourceQueue::Timeout,
        content: Ok(DeliveredAlarm {
            alarm,
            attempt: 0,
            first_published_at: None,
            traceparent: None,
            returns: Returns::default(),
        }),
        death: None,
    })
}

/// What is to be done at this time. Where the engine looks at arrivals first, no order is about to fall due.
fn actions(engine: &mut Engine, now: Timestamp) -> Vec<Action> {
    let mut actions = engine.poll_actions(now);
    if let Some(at) = actions.iter().position(|action| matches!(action, Action::Sweep(page) if is_look(page, now))) {
        actions.remove(at);
        engine.handle(swept(&[]), now);
        actions.extend(engine.poll_actions(now));
    }
    actions
}

/// Whether this page is a look at arrivals, and none of a pass.
fn is_look(page: &SweepPage, now: Timestamp) -> bool {
    page.after.as_ref().is_some_and(|after| after.deadline > now)
}

/// The batches among the actions at this time; there must be no other action.
fn batches(engine: &mut Engine, now: Timestamp) -> Vec<Batch> {
    let only_batches = |action| match action {
        Action::Close(batch) => batch,
        other => panic!("unexpected {other:?}"),
    };
    actions(engine, now).into_iter().map(only_batches).collect()
}

fn found(outcome: Outcome) -> CloseResult {
    Ok(CloseOutcome { outcome, deadline: None })
}

/// Gives every item of a batch the same result; an error is the whole batch's.
fn finish(engine: &mut Engine, batch: Batch, result: &CloseResult, now: Timestamp) {
    let each = |found: &CloseOutcome| {
        batch.items.iter().map(|item| (item.alarm.order_id().clone(), Ok(found.clone()))).collect()
    };
    let result = result.as_ref().map(each).map_err(Clone::clone);
    engine.handle(Input::Closed(batch, result), now);
}

fn receipt(item: &WorkItem) -> Receipt {
    receipt_of(item).expect("a delivered item")
}

/// One alarm, due and with a closer.
fn engine_with_one_closing() -> (Engine, Batch) {
    let mut engine = Engine::new(policy());
    engine.handle(delivered("a", at_ms(1_000), 1, 1), at_ms(1_000));
    let batch = batches(&mut engine, at_ms(1_002)).remove(0);
    (engine, batch)
}

/// An engine whose sweep is due every 250 ms, past its first pause.
fn sweeping_engine() -> Engine {
    let mut engine = Engine::new(Policy { sweep_every: Duration::from_millis(250), ..policy() });
    engine.handle(Input::SessionOpened(1), at_ms(0));
    assert_eq!(engine.poll_actions(at_ms(0)), vec![]);
    engine
}

/// Runs an engine until `end`, ten milliseconds at a time. Its sweep finds what of `overdue` is not closed; `close`
/// returns the result of a batch. Returns the closed orders, sorted.
fn run_until(
    engine: &mut Engine,
    now: &mut Timestamp,
    end: Timestamp,
    overdue: &[(&str, i64)],
    mut close: impl FnMut(&Batch, Timestamp) -> CloseResult,
) -> Vec<String> {
    let mut closed: Vec<String> = Vec::new();
    while *now < end {
        for action in actions(engine, *now) {
            match action {
                Action::Sweep(_) => {
                    let is_open = |(id, _): &&(&str, i64)| !closed.iter().any(|one| one == id);
                    let open: Vec<(&str, i64)> = overdue.iter().filter(is_open).copied().collect();
                    engine.handle(swept(&open), *now);
                }
                Action::Close(batch) => {
                    let result = close(&batch, *now);
                    if result == found(Outcome::Closed) {
                        closed.extend(names(&batch).into_iter().map(str::to_owned));
                    }
                    finish(engine, batch, &result, *now);
                }
                Action::Settle(_) | Action::Rearm(_) => {}
                other => panic!("unexpected {other:?}"),
            }
        }
        *now = *now + Duration::from_millis(10);
    }
    closed.sort();
    closed
}

fn swept_page(engine: &mut Engine, now: Timestamp) -> SweepPage {
    let mut actions = actions(engine, now);
    let Some(Action::Sweep(page)) = actions.pop() else { panic!("{actions:?}") };
    page
}

/// A page with these orders; the last of the pass if it is not full.
fn swept(orders: &[(&str, i64)]) -> Input {
    let overdue = |(id, deadline_ms): &(&str, i64)| Overdue {
        order_id: OrderId::new(id).unwrap(),
        deadline: at_ms(*deadline_ms),
    };
    let next = orders.last().filter(|_| orders.len() == policy().sweep_page);
    Input::Swept(SweptPage { orders: orders.iter().map(overdue).collect(), next: next.map(place) })
}

fn place((id, deadline_ms): &(&str, i64)) -> SweepPlace {
    SweepPlace { deadline: at_ms(*deadline_ms), id: (*id).to_owned() }
}

fn names(batch: &Batch) -> Vec<&str> {
    batch.items.iter().map(|item| item.alarm.order_id().as_str()).collect()
}

#[test]
fn far_alarm_is_acknowledged_after_rearm_confirm() {
    let mut engine = Engine::new(policy());
    engine.handle(delivered("a", at_ms(60_000), 1, 7), at_ms(1_000));
    let [Action::Rearm(rearms)] = &engine.poll_actions(at_ms(1_000))[..] else { panic!() };
    assert_eq!(rearms[0].wanted, Wanted::BeforeDeadline);
    engine.handle(Input::Rearmed(vec![rearms[0].receipt]), at_ms(1_001));
    assert_eq!(engine.poll_actions(at_ms(1_001)), vec![Action::Settle(vec![(rearms[0].receipt, Settlement::Ack)])]);
}

#[test]
fn alarms_sent_to_broker_are_bounded() {
    let mut engine = Engine::new(policy());
    let rearms = |engine: &mut Engine, now: Timestamp| {
        let handed_out = engine.poll_actions(now).into_iter().find_map(|action| match action {
            Action::Rearm(rearms) => Some(rearms),
            _ => None,
        });
        handed_out.unwrap_or_default()
    };
    let Input::Delivered(far) = delivered("retried", at_ms(1_000), 1, 1) else { unreachable!() };
    let Ok(mut alarm) = far.content else { unreachable!() };
    alarm.attempt = 1;
    for tag in 1..=u64::try_from(MAX_REARMING).unwrap() {
        let receipt = Receipt { session: 1, channel: 0, tag };
        engine.retry(WorkItem::new(alarm.clone(), Origin::Delivered(receipt)), at_ms(1_000));
    }
    engine.handle(delivered("far", at_ms(60_000), 1, 9_999), at_ms(1_000));
    let first = rearms(&mut engine, at_ms(1_000));
    assert_eq!((first.len(), first[0].alarm.order_id().as_str()), (MAX_REARMING, "far"), "retries wait behind it");
    assert!(rearms(&mut engine, at_ms(1_001)).is_empty());
    engine.handle(Input::Rearmed(vec![first[0].receipt]), at_ms(1_002));
    engine.handle(Input::NotRearmed(vec![first[1].clone()]), at_ms(1_002));
    assert_eq!(rearms(&mut engine, at_ms(1_002)).len(), 1);
}

#[test]
fn inbox_alarms_are_never_held() {
    let mut engine = Engine::new(policy());
    let Input::Delivered(mut near) = delivered("a", at_ms(2_000), 1, 7) else { unreachable!() };
    near.source = SourceQueue::Inbox;
    engine.handle(Input::Delivered(near), at_ms(1_000));
    assert!(
        matches!(&engine.poll_actions(at_ms(1_000))[..], [Action::Rearm(rearms)] if rearms[0].wanted == Wanted::BeforeDeadline)
    );
    assert_eq!(engine.hold.len(), 0);
}

#[test]
fn duplicate_is_acknowledged_redelivery_replaces_first() {
    let mut engine = Engine::new(policy());
    let (deadline, now) = (at_ms(5_000), at_ms(1_000));
    engine.handle(delivered("a", deadline, 1, 1), now);
    engine.handle(delivered("a", deadline, 1, 2), now);
    let second = Receipt { session: 1, channel: 0, tag: 2 };
    assert_eq!(engine.poll_actions(now), vec![Action::Settle(vec![(second, Settlement::Ack)])]);
    // The session is lost; the broker delivers the first again.
    engine.handle(delivered("a", deadline, 2, 1), now);
    assert_eq!(engine.poll_actions(now), vec![], "acknowledging it would leave the order without an alarm");
    let batch = batches(&mut engine, at_ms(5_000)).remove(0);
    assert_eq!(receipt(&batch.items[0]), Receipt { session: 2, channel: 0, tag: 1 });
}

#[test]
fn locked_order_is_retried_without_counting_attempts() {
    let (mut engine, mut batch) = engine_with_one_closing();
    let mut now = at_ms(1_010);
    let began = now;
    for round in 0.. {
        finish(&mut engine, batch, &found(Outcome::Busy), now);
        if now.since(began) >= policy().requeue_after {
            let [Action::Rearm(rearms)] = &engine.poll_actions(now)[..] else { panic!() };
            assert!(matches!(rearms[0].wanted, Wanted::NotBefore(_)));
            assert_eq!((rearms[0].alarm.attempt, round > 10), (0, true));
            break;
        }
        let wake_at = engine.next_wakeup().unwrap();
        assert!(wake_at.since(now) <= Duration::from_secs(1) + policy().linger, "round {round}");
        now = wake_at;
        batch = batches(&mut engine, now).remove(0);
        assert_eq!(batch.items[0].alarm.attempt, 0);
    }
}

#[test]
fn rejected_order_is_retried_then_parked() {
    let (mut engine, mut batch) = engine_with_one_closing();
    let error = Err(CloseError::Rejected("a trigger says no".into()));
    let mut now = at_ms(1_010);
    // 50, 100, … 800 ms here, then a second or more at the broker.
    let rearm = loop {
        finish(&mut engine, batch, &error, now);
        now = engine.next_wakeup().unwrap().min(now + Duration::from_secs(2)) + Duration::from_millis(2);
        match engine.poll_actions(now).into_iter().next() {
            Some(Action::Rearm(rearms)) => break rearms[0].clone(),
            Some(Action::Close(next)) => batch = next,
            None => batch = batches(&mut engine, now + Duration::from_millis(2)).remove(0),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(rearm.alarm.attempt, 1);
    assert!(matches!(rearm.wanted, Wanted::NotBefore(moment) if moment.since(now) <= Duration::from_secs(2)));
    let mut last = rearm.alarm;
    last.attempt = policy().max_attempts;
    let item = WorkItem::new(last, Origin::Delivered(rearm.receipt));
    finish(&mut engine, Batch { by: ClosedBy::Alarm, items: vec![item], lock_mode: LockMode::WaitFresh }, &error, now);
    let [Action::Park(dead_letters)] = &engine.poll_actions(now)[..] else { panic!() };
    assert_eq!(
        (dead_letters[0].0.reason, dead_letters[0].0.detail.as_str()),
        (ParkReason::CloseFailed, "a trigger says no")
    );
}

#[test]
fn unknown_order_is_parked_after_grace() {
    let (mut engine, mut batch) = engine_with_one_closing();
    batch.items[0].alarm.first_published_at = Some(at_ms(0));
    finish(&mut engine, batch, &found(Outcome::Unknown), at_ms(30_001));
    let [Action::Park(dead_letters)] = &engine.poll_actions(at_ms(30_001))[..] else { panic!() };
    assert_eq!(dead_letters[0].0.reason, ParkReason::UnknownOrder);
}

#[test]
fn extended_order_waits_for_its_new_deadline() {
    let (mut engine, batch) = engine_with_one_closing();
    let extended = |deadline| Ok(CloseOutcome { outcome: Outcome::NotDue, deadline: Some(deadline) });
    finish(&mut engine, batch.clone(), &extended(at_ms(3_000)), at_ms(1_010));
    assert_eq!(engine.next_wakeup(), Some(at_ms(3_000)));

    let (mut engine, batch) = engine_with_one_closing();
    finish(&mut engine, batch, &extended(at_ms(90_000)), at_ms(1_010));
    assert!(
        matches!(&engine.poll_actions(at_ms(1_010))[..], [Action::Rearm(rearms)] if rearms[0].alarm.deadline() == at_ms(90_000))
    );

    let (mut engine, batch) = engine_with_one_closing();
    finish(&mut engine, batch, &extended(at_ms(1_005)), at_ms(1_010));
    assert_eq!(engine.next_wakeup(), Some(at_ms(1_011)), "due by our clock, not by the database's: wait, do not spin");
}

#[test]
fn order_without_deadline_needs_no_alarm() {
    let (mut engine, batch) = engine_with_one_closing();
    finish(&mut engine, batch, &found(Outcome::NotDue), at_ms(1_010));
    assert!(matches!(&engine.poll_actions(at_ms(1_010))[..], [Action::Settle(_)]));
    assert!(engine.next_wakeup() > Some(at_ms(10_000)), "nothing is left but the next sweep");
}

#[test]
fn not_due_past_deadline_becomes_failure() {
    let (mut engine, mut batch) = engine_with_one_closing();
    let not_due = Ok(CloseOutcome { outcome: Outcome::NotDue, deadline: Some(at_ms(1_000)) });
    let mut now = at_ms(1_010);
    for rounds in 0_u32.. {
        finish(&mut engine, batch, &not_due, now);
        match engine.poll_actions(now).pop() {
            Some(Action::Rearm(rearms)) => {
                assert_eq!(
                    (rearms[0].alarm.attempt, rounds),
                    (1, 8 + 5),
                    "eight for the clocks, five as after any failure"
                );
                break;
            }
            other => assert_eq!(other, None),
        }
        now = engine.next_wakeup().unwrap();
        batch = batches(&mut engine, now).remove(0);
    }
}

#[test]
fn deadline_moved_too_far_is_parked() {
    let (mut engine, batch) = engine_with_one_closing();
    finish(
        &mut engine,
        batch,
        &Ok(CloseOutcome { outcome: Outcome::NotDue, deadline: Some(at_ms(i64::MAX / 1_000)) }),
        at_ms(1_010),
    );
    let [Action::Park(dead_letters)] = &engine.poll_actions(at_ms(1_010))[..] else { panic!() };
    assert_eq!(dead_letters[0].0.reason, ParkReason::TooFar);
}

#[test]
fn unconfirmed_rearm_is_retried_unless_redelivered() {
    let mut engine = Engine::new(policy());
    engine.handle(Input::SessionOpened(1), at_ms(1_000));
    engine.handle(delivered("a", at_ms(60_000), 1, 7), at_ms(1_000));
    let Some(Action::Rearm(rearms)) = engine.poll_actions(at_ms(1_000)).pop() else { panic!() };
    engine.handle(Input::NotRearmed(rearms.clone()), at_ms(1_010));
    assert_eq!(engine.poll_actions(at_ms(1_059)), vec![]);
    assert_eq!(engine.next_wakeup(), Some(at_ms(1_060)));
    assert_eq!(engine.poll_actions(at_ms(1_060)), vec![Action::Rearm(rearms.clone())]);
    engine.handle(Input::NotRearmed(rearms), at_ms(1_070));
    engine.handle(Input::SessionOpened(2), at_ms(1_080));
    assert_eq!(
        engine.poll_actions(at_ms(9_000)),
        vec![],
        "the broker redelivers it; rearmed here too there would be two"
    );
    assert!(engine.wants_deliveries(at_ms(20_000)), "nothing fails any more");
}

#[test]
fn refused_rearm_is_requeued_and_keeps_intake() {
    let mut engine = Engine::new(policy());
    engine.handle(Input::SessionOpened(1), at_ms(1_000));
    engine.handle(delivered("refused", at_ms(60_000), 1, 1), at_ms(1_000));
    let mut now = at_ms(1_000);
    let Some(Action::Rearm(mut rearms)) = engine.poll_actions(now).pop() else { panic!() };
    let refused = rearms[0].receipt;
    for tag in 2.. {
        // Another is armed meanwhile.
        engine.handle(delivered(&format!("order-{tag}"), at_ms(60_000), 1, tag), now);
        let Some(Action::Rearm(other)) = engine.poll_actions(now).pop() else { panic!() };
        engine.handle(Input::Rearmed(vec![other[0].receipt]), now);
        let Some(Action::Settle(_)) = engine.poll_actions(now).pop() else { panic!() };
        engine.handle(Input::RearmRefused(rearms), now);
        assert!(engine.wants_deliveries(now));
        if now.since(at_ms(1_000)) >= policy().requeue_after {
            assert_eq!(engine.poll_actions(now), vec![Action::Settle(vec![(refused, Settlement::Requeue)])]);
            return;
        }
        let wake_at = engine.next_wakeup().unwrap();
        assert!(wake_at.since(now) <= policy().retry_longest, "after {:?}", wake_at.since(now));
        assert!(tag < 6 || wake_at.since(now) > policy().retry_first, "others' success does not shorten its pauses");
        now = wake_at;
        let Some(Action::Rearm(again)) = engine.poll_actions(now).pop() else { panic!() };
        rearms = again;
    }
}

#[test]
fn only_database_outage_ends_intake_when_parking() {
    for refused in [true, false] {
        let mut engine = Engine::new(policy());
        engine.handle(Input::SessionOpened(1), at_ms(1_000));
        engine.handle(delivered("far", at_ms(253_370_764_800_000), 1, 1), at_ms(1_000));
        let mut now = at_ms(1_000);
        while now <= at_ms(14_000) {
            match engine.poll_actions(now).pop() {
                Some(Action::Park(dead_letters)) if refused => engine.handle(Input::ParkRefused(dead_letters), now),
                Some(Action::Park(dead_letters)) => engine.handle(Input::NotParked(dead_letters), now),
                Some(Action::Settle(settled)) => {
                    assert_eq!((settled[0].1, refused), (Settlement::Requeue, true));
                    break;
                }
                other => panic!("{other:?}"),
            }
            now = engine.next_wakeup().unwrap().min(now + policy().retry_longest);
        }
        assert_eq!((engine.wants_deliveries(now), now <= at_ms(14_000)), (refused, refused), "given back if refused");
    }
}

#[test]
fn many_dead_letters_are_parked_in_portions() {
    let mut engine = Engine::new(policy());
    for tag in 0..1_000 {
        engine.handle(delivered("a", at_ms(253_370_764_800_000), 1, tag), at_ms(1_000));
    }
    let mut parked = 0;
    while parked < 1_000 {
        let mut actions = engine.poll_actions(at_ms(1_000));
        actions.retain(|action| matches!(action, Action::Park(_)));
        let Some(Action::Park(dead_letters)) = actions.pop() else { panic!("nothing to park") };
        assert!(actions.is_empty() && dead_letters.len() <= MAX_PARKED_AT_ONCE);
        assert!(!matches!(engine.poll_actions(at_ms(1_000))[..], [Action::Park(_), ..]), "one statement at a time");
        parked += dead_letters.len();
        engine.handle(Input::Parked(dead_letters.into_iter().map(|(_, receipt)| receipt).collect()), at_ms(1_000));
    }
}

#[test]
fn clock_set_back_lengthens_no_pause() {
    const HOUR_MS: i64 = 3_600_000;
    let mut engine = sweeping_engine();
    let now = at_ms(2 * HOUR_MS);
    swept_page(&mut engine, now);
    engine.handle(swept(&[]), now);
    engine.handle(delivered("busy", now, 1, 1), now);
    let batch = batches(&mut engine, at_ms(2 * HOUR_MS + 2)).remove(0);
    finish(&mut engine, batch, &found(Outcome::Busy), at_ms(2 * HOUR_MS + 3));
    engine.handle(delivered("held", at_ms(2 * HOUR_MS + 9_000), 1, 2), at_ms(2 * HOUR_MS + 4));
    assert_eq!(engine.hold.len(), 2);

    let back = at_ms(HOUR_MS);
    let actions = engine.poll_actions(back);
    assert!(matches!(&actions[..], [Action::Sweep(_), Action::Rearm(rearms)] if rearms.len() == 2), "{actions:?}");
}

#[test]
fn draining_requeues_waiting_and_finishes_closing() {
    let (mut engine, batch) = engine_with_one_closing();
    engine.handle(delivered("held", at_ms(9_000), 1, 2), at_ms(1_002));
    engine.drain();
    engine.handle(delivered("late", at_ms(1_000), 1, 3), at_ms(1_003));
    let receipt = |tag| Receipt { session: 1, channel: 0, tag };
    let given_back = vec![(receipt(2), Settlement::Requeue), (receipt(3), Settlement::Requeue)];
    assert_eq!(engine.poll_actions(at_ms(1_003)), vec![Action::Settle(given_back)]);
    assert!(!engine.closers_are_idle());
    finish(&mut engine, batch, &found(Outcome::Closed), at_ms(1_004));
    assert!(engine.closers_are_idle());
    assert_eq!(engine.poll_actions(at_ms(1_004)), vec![Action::Settle(vec![(receipt(1), Settlement::Ack)])]);
}

#[test]
fn deadline_in_year_9999_is_parked() {
    let mut engine = Engine::new(policy());
    engine.handle(delivered("a", at_ms(253_370_764_800_000), 1, 1), at_ms(1_000));
    assert!(
        matches!(&engine.poll_actions(at_ms(1_000))[..], [Action::Park(dead_letters)] if dead_letters[0].0.reason == ParkReason::TooFar)
    );
}

#[test]
fn alarm_of_ended_session_is_not_rearmed() {
    let mut engine = Engine::new(policy());
    engine.handle(Input::SessionOpened(1), at_ms(1_000));
    engine.handle(Input::SessionEnded, at_ms(1_001));
    let Input::Delivered(near) = delivered("a", at_ms(90_000), 1, 1) else { unreachable!() };
    engine.handle(Input::Delivered(Delivered { source: SourceQueue::Inbox, ..near }), at_ms(1_002));
    assert_eq!(engine.poll_actions(at_ms(1_002)), vec![], "it was on its way from the session to the engine");

    let not_due = Ok(CloseOutcome { outcome: Outcome::NotDue, deadline: Some(at_ms(90_000)) });
    let (mut engine, batch) = engine_with_one_closing();
    engine.handle(Input::SessionOpened(1), at_ms(1_004));
    engine.handle(Input::SessionEnded, at_ms(1_005));
    finish(&mut engine, batch.clone(), &not_due, at_ms(1_010));
    assert_eq!(engine.poll_actions(at_ms(1_010)), vec![]);

    let (mut engine, batch) = engine_with_one_closing();
    engine.handle(Input::SessionOpened(1), at_ms(1_004));
    engine.handle(Input::SessionEnded, at_ms(1_005));
    engine.handle(Input::SessionOpened(2), at_ms(1_006));
    finish(&mut engine, batch, &not_due, at_ms(1_010));
    assert_eq!(engine.poll_actions(at_ms(1_010)), vec![]);
}
