//! The desk's decisions, one by one, without any I/O.

use super::*;
use crate::message::TimeoutDue;

fn policy() -> Policy {
    Policy {
        hold_max: Duration::from_secs(15),
        max_delay: Duration::from_secs(86_400),
        batch_size: 3,
        linger: Duration::from_millis(2),
        closers: 2,
        retry_first: Duration::from_millis(50),
        retry_longest: Duration::from_secs(1),
        missing_for: Duration::from_secs(30),
        max_attempts: 2,
        away_patience: Duration::from_secs(10),
    }
}

fn at_ms(ms: i64) -> Moment {
    Moment::from_unix_micros(ms * 1_000)
}

fn delivered(order: &str, deadline: Moment, session: u64, tag: u64) -> News {
    let due = TimeoutDue { order_id: OrderId::new(order).unwrap(), deadline };
    News::Delivered(Delivered {
        receipt: Receipt { session, channel: 0, tag },
        inlet: Inlet::Timeout,
        content: Ok(Alarm { due, attempt: 0, born: None, traceparent: None }),
    })
}

/// The batches among the errands at this time; everything else the desk wants must be empty.
fn batches(desk: &mut Desk, now: Moment) -> Vec<Vec<Case>> {
    let only_batches = |errand| match errand {
        Errand::Close(batch) => batch,
        other => panic!("unexpected {other:?}"),
    };
    desk.errands(now).into_iter().map(only_batches).collect()
}

fn found(outcome: Outcome) -> Finding {
    Ok(Found { outcome, deadline: None })
}

/// Lets every case of a batch have the same finding.
fn answer(desk: &mut Desk, batch: Vec<Case>, finding: &Finding, now: Moment) {
    desk.hear(News::Closed(batch.into_iter().map(|case| (case, finding.clone())).collect()), now);
}

/// One alarm, due and in a closer's hands.
fn desk_with_one_closing() -> (Desk, Vec<Case>) {
    let mut desk = Desk::new(policy());
    desk.hear(delivered("a", at_ms(1_000), 1, 1), at_ms(1_000));
    let batch = batches(&mut desk, at_ms(1_002)).remove(0);
    (desk, batch)
}

#[test]
fn an_early_alarm_waits_for_its_deadline_and_lingers_for_company() {
    let mut desk = Desk::new(policy());
    desk.hear(delivered("a", at_ms(5_000), 1, 1), at_ms(1_000));
    assert_eq!(desk.wake_at(), Some(at_ms(5_000)));
    assert_eq!(desk.errands(at_ms(4_999)), vec![]);
    assert_eq!(batches(&mut desk, at_ms(5_000)), Vec::<Vec<Case>>::new(), "2 ms for others to fall due");
    assert_eq!(desk.wake_at(), Some(at_ms(5_002)));
    assert_eq!(batches(&mut desk, at_ms(5_002)).len(), 1);
}

#[test]
fn a_full_batch_does_not_linger_and_no_more_batches_go_out_than_there_are_closers() {
    let mut desk = Desk::new(policy());
    for tag in 1..=10 {
        desk.hear(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let sizes: Vec<usize> = batches(&mut desk, at_ms(1_000)).iter().map(Vec::len).collect();
    assert_eq!(sizes, [3, 3]);
    assert_eq!(desk.wake_at(), None, "with no closer idle there is nothing to wake for");
}

#[test]
fn a_far_alarm_is_armed_and_acknowledged_only_when_that_is_confirmed() {
    let mut desk = Desk::new(policy());
    desk.hear(delivered("a", at_ms(60_000), 1, 7), at_ms(1_000));
    let [Errand::Arm(jobs)] = &desk.errands(at_ms(1_000))[..] else { panic!() };
    assert_eq!(jobs[0].wanted, Wanted::BeforeDeadline);
    desk.hear(News::Armed(vec![jobs[0].receipt]), at_ms(1_001));
    assert_eq!(desk.errands(at_ms(1_001)), vec![Errand::Settle(vec![(jobs[0].receipt, Settlement::Ack)])]);
}

#[test]
fn the_inbox_is_never_held_back() {
    let mut desk = Desk::new(policy());
    let News::Delivered(mut near) = delivered("a", at_ms(2_000), 1, 7) else { unreachable!() };
    near.inlet = Inlet::Arm;
    desk.hear(News::Delivered(near), at_ms(1_000));
    assert!(matches!(&desk.errands(at_ms(1_000))[..], [Errand::Arm(jobs)] if jobs[0].wanted == Wanted::BeforeDeadline));
    assert_eq!(desk.held(), 0);
}

#[test]
fn a_second_alarm_is_acknowledged_at_once_but_a_second_delivery_takes_the_place_of_the_first() {
    let mut desk = Desk::new(policy());
    let (deadline, now) = (at_ms(5_000), at_ms(1_000));
    desk.hear(delivered("a", deadline, 1, 1), now);
    desk.hear(delivered("a", deadline, 1, 2), now);
    let second = Receipt { session: 1, channel: 0, tag: 2 };
    assert_eq!(desk.errands(now), vec![Errand::Settle(vec![(second, Settlement::Ack)])]);
    // The session is lost; the broker delivers the first again.
    desk.hear(delivered("a", deadline, 2, 1), now);
    assert_eq!(desk.errands(now), vec![], "acknowledging it would leave the order without an alarm at the broker");
    assert_eq!(batches(&mut desk, at_ms(5_000)), Vec::<Vec<Case>>::new());
    let batch = batches(&mut desk, at_ms(5_002)).remove(0);
    assert_eq!(batch[0].receipt, Receipt { session: 2, channel: 0, tag: 1 });
}

#[test]
fn what_was_tried_before_waits_behind_what_is_fresh() {
    let (mut desk, batch) = desk_with_one_closing();
    answer(&mut desk, batch, &found(Outcome::Unknown), at_ms(1_010));
    for tag in 2..=4 {
        desk.hear(delivered(&format!("order-{tag}"), at_ms(1_060), 1, tag), at_ms(1_050));
    }
    let out = batches(&mut desk, at_ms(1_062));
    let names: Vec<&str> = out[0].iter().map(|case| case.alarm.order_id().as_str()).collect();
    assert_eq!(names, ["order-2", "order-3", "order-4"]);
}

#[test]
fn a_locked_order_comes_back_within_a_second_for_ever_and_counts_no_attempt() {
    let (mut desk, mut batch) = desk_with_one_closing();
    let mut now = at_ms(1_010);
    for round in 0..40 {
        answer(&mut desk, batch, &found(Outcome::Busy), now);
        let wake_at = desk.wake_at().unwrap();
        assert!(wake_at.since(now) <= Duration::from_secs(1), "round {round}");
        assert_eq!(batches(&mut desk, wake_at).len(), 0);
        now = wake_at + Duration::from_millis(2);
        batch = batches(&mut desk, now).remove(0);
        assert_eq!(batch[0].alarm.attempt, 0);
    }
}

#[test]
fn an_order_that_cannot_be_closed_goes_through_the_broker_and_is_parked_in_the_end() {
    let (mut desk, mut batch) = desk_with_one_closing();
    let fault = Err(CloseFault::OfTheOrder("a trigger says no".into()));
    let mut now = at_ms(1_010);
    // 50, 100, … 800 ms here, then a second or more at the broker.
    let job = loop {
        answer(&mut desk, batch, &fault, now);
        now = desk.wake_at().unwrap_or(now) + Duration::from_millis(2);
        match desk.errands(now).into_iter().next() {
            Some(Errand::Arm(jobs)) => break jobs[0].clone(),
            Some(Errand::Close(next)) => batch = next,
            None => batch = batches(&mut desk, now + Duration::from_millis(2)).remove(0),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(job.alarm.attempt, 1);
    assert!(matches!(job.wanted, Wanted::NotBefore(moment) if moment.since(now) <= Duration::from_secs(2)));
    let mut last = job.alarm;
    last.attempt = policy().max_attempts;
    let case = Case { alarm: last, receipt: job.receipt, pauses: 0 };
    answer(&mut desk, vec![case], &fault, now);
    let [Errand::Park(parcels)] = &desk.errands(now)[..] else { panic!() };
    assert_eq!((parcels[0].0.reason, parcels[0].0.detail.as_str()), (ParkReason::CloseFailed, "a trigger says no"));
}

#[test]
fn an_unknown_order_is_parked_when_its_transaction_must_have_ended() {
    let (mut desk, mut batch) = desk_with_one_closing();
    batch[0].alarm.born = Some(at_ms(0));
    answer(&mut desk, batch, &found(Outcome::Unknown), at_ms(30_001));
    let [Errand::Park(parcels)] = &desk.errands(at_ms(30_001))[..] else { panic!() };
    assert_eq!(parcels[0].0.reason, ParkReason::UnknownOrder);
}

#[test]
fn an_extended_order_is_held_or_armed_for_its_new_deadline_and_never_spun_on() {
    let (mut desk, batch) = desk_with_one_closing();
    let extended = |deadline| Ok(Found { outcome: Outcome::NotDue, deadline: Some(deadline) });
    answer(&mut desk, batch.clone(), &extended(at_ms(3_000)), at_ms(1_010));
    assert_eq!(desk.wake_at(), Some(at_ms(3_000)));

    let (mut desk, batch) = desk_with_one_closing();
    answer(&mut desk, batch, &extended(at_ms(90_000)), at_ms(1_010));
    assert!(
        matches!(&desk.errands(at_ms(1_010))[..], [Errand::Arm(jobs)] if jobs[0].alarm.deadline() == at_ms(90_000))
    );

    let (mut desk, batch) = desk_with_one_closing();
    answer(&mut desk, batch, &extended(at_ms(1_005)), at_ms(1_010));
    assert_eq!(desk.wake_at(), Some(at_ms(1_011)), "due by our reckoning, not by the database's: wait, do not spin");
}

#[test]
fn while_the_database_is_away_one_closer_asks_and_intake_stops_after_a_while() {
    let mut desk = Desk::new(policy());
    for tag in 1..=9 {
        desk.hear(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let mut out = batches(&mut desk, at_ms(1_000));
    let away = Err(CloseFault::Away("gone".into()));
    answer(&mut desk, out.remove(0), &away, at_ms(1_010));
    assert_eq!(batches(&mut desk, at_ms(1_400)), Vec::<Vec<Case>>::new(), "the other closer has not answered yet");
    answer(&mut desk, out.remove(0), &away, at_ms(1_410));
    assert!(desk.wants_deliveries(at_ms(1_410)));
    assert_eq!(batches(&mut desk, at_ms(3_000)).len(), 1, "one asks");
    assert!(!desk.wants_deliveries(at_ms(11_011)));
}

#[test]
fn an_answer_of_the_database_ends_its_absence() {
    let (mut desk, batch) = desk_with_one_closing();
    answer(&mut desk, batch, &Err(CloseFault::Away("gone".into())), at_ms(1_010));
    assert_eq!(batches(&mut desk, at_ms(1_059)), Vec::<Vec<Case>>::new());
    let batch = (1_060..1_070).find_map(|ms| batches(&mut desk, at_ms(ms)).pop()).unwrap();
    answer(&mut desk, batch, &found(Outcome::Closed), at_ms(20_000));
    assert!(desk.wants_deliveries(at_ms(20_000)));
}

#[test]
fn draining_gives_back_what_waits_and_finishes_what_is_begun() {
    let (mut desk, batch) = desk_with_one_closing();
    desk.hear(delivered("held", at_ms(9_000), 1, 2), at_ms(1_002));
    desk.drain();
    desk.hear(delivered("late", at_ms(1_000), 1, 3), at_ms(1_003));
    let receipt = |tag| Receipt { session: 1, channel: 0, tag };
    let given_back = vec![(receipt(2), Settlement::Requeue), (receipt(3), Settlement::Requeue)];
    assert_eq!(desk.errands(at_ms(1_003)), vec![Errand::Settle(given_back)]);
    assert!(!desk.closers_are_idle());
    answer(&mut desk, batch, &found(Outcome::Closed), at_ms(1_004));
    assert!(desk.closers_are_idle());
    assert_eq!(desk.errands(at_ms(1_004)), vec![Errand::Settle(vec![(receipt(1), Settlement::Ack)])]);
}

#[test]
fn a_deadline_in_the_year_9999_is_parked() {
    let mut desk = Desk::new(policy());
    desk.hear(delivered("a", at_ms(253_370_764_800_000), 1, 1), at_ms(1_000));
    assert!(
        matches!(&desk.errands(at_ms(1_000))[..], [Errand::Park(parcels)] if parcels[0].0.reason == ParkReason::TooFar)
    );
}
