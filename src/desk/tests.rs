//! The desk's decisions, one by one, without any I/O.

use super::*;
use crate::message::TimeoutDue;
use crate::order::{ClosedBy, SweepPage, SweepPlace};

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
        longest_try: Duration::from_secs(4),
        // Far away, for the tests that are not about the sweep.
        sweep_every: Duration::from_secs(100_000),
        sweep_grace: Duration::from_millis(500),
        sweep_page: 4,
        pause_share: 1.0,
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
fn batches(desk: &mut Desk, now: Moment) -> Vec<Batch> {
    let only_batches = |errand| match errand {
        Errand::Close(batch) => batch,
        other => panic!("unexpected {other:?}"),
    };
    desk.errands(now).into_iter().map(only_batches).collect()
}

fn found(outcome: Outcome) -> Finding {
    Ok(Found { outcome, deadline: None })
}

/// Lets every case of a batch have the same finding; a fault is the whole batch's.
fn answer(desk: &mut Desk, batch: Batch, finding: &Finding, now: Moment) {
    let each =
        |found: &Found| batch.cases.iter().map(|case| (case.alarm.order_id().clone(), Ok(found.clone()))).collect();
    let answer = finding.as_ref().map(each).map_err(Clone::clone);
    desk.hear(News::Closed(batch, answer), now);
}

fn receipt(case: &Case) -> Receipt {
    receipt_of(case).expect("a delivered case")
}

/// One alarm, due and in a closer's hands.
fn desk_with_one_closing() -> (Desk, Batch) {
    let mut desk = Desk::new(policy());
    desk.hear(delivered("a", at_ms(1_000), 1, 1), at_ms(1_000));
    let batch = batches(&mut desk, at_ms(1_002)).remove(0);
    (desk, batch)
}

#[test]
fn an_early_alarm_waits_for_its_deadline_and_for_those_who_fall_due_soon_after_it() {
    let mut desk = Desk::new(policy());
    for (tag, ms) in [(1, 5_000), (2, 5_001), (3, 5_003)] {
        desk.hear(delivered(&format!("order-{tag}"), at_ms(ms), 1, tag), at_ms(1_000));
    }
    assert_eq!(desk.wake_at(), Some(at_ms(5_001)), "nobody is woken only to linger");
    assert_eq!(batches(&mut desk, at_ms(5_000)), Vec::<Batch>::new());
    assert_eq!(batches(&mut desk, at_ms(5_001)).remove(0).cases.len(), 2);
    assert_eq!(desk.wake_at(), Some(at_ms(5_003)), "nobody comes after it, so it waits for nobody");
    assert_eq!(batches(&mut desk, at_ms(5_003)).len(), 1);
}

#[test]
fn an_alarm_that_comes_late_lingers_for_those_who_come_with_it() {
    let mut desk = Desk::new(policy());
    desk.hear(delivered("a", at_ms(5_000), 1, 1), at_ms(5_001));
    assert_eq!(batches(&mut desk, at_ms(5_001)), Vec::<Batch>::new());
    assert_eq!(desk.wake_at(), Some(at_ms(5_003)));
    assert_eq!(batches(&mut desk, at_ms(5_003)).len(), 1);
}

#[test]
fn a_full_batch_does_not_linger_and_no_more_batches_go_out_than_there_are_closers() {
    let mut desk = Desk::new(policy());
    for tag in 1..=10 {
        desk.hear(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let sizes: Vec<usize> = batches(&mut desk, at_ms(1_000)).iter().map(|batch| batch.cases.len()).collect();
    assert_eq!(sizes, [3, 3]);
    assert!(desk.wake_at().unwrap() > at_ms(1_000_000), "with no closer idle only the sweep is to wake for");
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
    let batch = batches(&mut desk, at_ms(5_000)).remove(0);
    assert_eq!(receipt(&batch.cases[0]), Receipt { session: 2, channel: 0, tag: 1 });
}

#[test]
fn what_was_tried_before_waits_behind_what_is_fresh() {
    let (mut desk, batch) = desk_with_one_closing();
    answer(&mut desk, batch, &found(Outcome::Unknown), at_ms(1_010));
    for tag in 2..=4 {
        desk.hear(delivered(&format!("order-{tag}"), at_ms(1_060), 1, tag), at_ms(1_050));
    }
    let out = batches(&mut desk, at_ms(1_062));
    let names: Vec<&str> = out[0].cases.iter().map(|case| case.alarm.order_id().as_str()).collect();
    assert_eq!(names, ["order-2", "order-3", "order-4"]);
}

#[test]
fn a_locked_order_comes_back_within_a_second_again_and_again_then_by_way_of_the_broker_and_counts_no_attempt() {
    let (mut desk, mut batch) = desk_with_one_closing();
    let mut now = at_ms(1_010);
    let began = now;
    for round in 0.. {
        answer(&mut desk, batch, &found(Outcome::Busy), now);
        if now.since(began) >= policy().away_patience {
            let [Errand::Arm(jobs)] = &desk.errands(now)[..] else { panic!() };
            assert!(matches!(jobs[0].wanted, Wanted::NotBefore(_)));
            assert_eq!((jobs[0].alarm.attempt, round > 10), (0, true));
            break;
        }
        let wake_at = desk.wake_at().unwrap();
        assert!(wake_at.since(now) <= Duration::from_secs(1) + policy().linger, "round {round}");
        now = wake_at;
        batch = batches(&mut desk, now).remove(0);
        assert_eq!(batch.cases[0].alarm.attempt, 0);
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
        now = desk.wake_at().unwrap().min(now + Duration::from_secs(2)) + Duration::from_millis(2);
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
    let case = Case::new(last, Origin::Delivered(job.receipt));
    answer(&mut desk, Batch { by: ClosedBy::Alarm, cases: vec![case], patient: true }, &fault, now);
    let [Errand::Park(parcels)] = &desk.errands(now)[..] else { panic!() };
    assert_eq!((parcels[0].0.reason, parcels[0].0.detail.as_str()), (ParkReason::CloseFailed, "a trigger says no"));
}

#[test]
fn an_unknown_order_is_parked_when_its_transaction_must_have_ended() {
    let (mut desk, mut batch) = desk_with_one_closing();
    batch.cases[0].alarm.born = Some(at_ms(0));
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
fn an_order_that_is_not_due_though_its_deadline_has_passed_is_a_failure_in_the_end() {
    let (mut desk, mut batch) = desk_with_one_closing();
    let not_due = Ok(Found { outcome: Outcome::NotDue, deadline: Some(at_ms(1_000)) });
    let mut now = at_ms(1_010);
    for rounds in 0_u32.. {
        answer(&mut desk, batch, &not_due, now);
        match desk.errands(now).pop() {
            Some(Errand::Arm(jobs)) => {
                assert_eq!(
                    (jobs[0].alarm.attempt, rounds),
                    (1, 8 + 5),
                    "eight for the clocks, five as after any failure"
                );
                break;
            }
            other => assert_eq!(other, None),
        }
        now = desk.wake_at().unwrap();
        batch = batches(&mut desk, now).remove(0);
    }
}

#[test]
fn a_deadline_moved_out_of_sight_is_parked() {
    let (mut desk, batch) = desk_with_one_closing();
    answer(
        &mut desk,
        batch,
        &Ok(Found { outcome: Outcome::NotDue, deadline: Some(at_ms(i64::MAX / 1_000)) }),
        at_ms(1_010),
    );
    let [Errand::Park(parcels)] = &desk.errands(at_ms(1_010))[..] else { panic!() };
    assert_eq!(parcels[0].0.reason, ParkReason::TooFar);
}

#[test]
fn a_batch_that_fails_is_taken_apart_behind_what_waits_until_the_one_to_blame_stands_alone() {
    let mut desk = Desk::new(Policy { batch_size: 100, ..policy() });
    for tag in 1..=100 {
        desk.hear(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let fault = Err(CloseFault::OfTheOrder("a trigger says no".into()));
    let mut now = at_ms(1_000);
    let mut out = batches(&mut desk, now);
    assert_eq!(out[0].cases.len(), 100);
    let (mut statements, mut closed, mut retried) = (0, 0, false);
    while let Some(batch) = out.pop() {
        statements += 1;
        let to_blame = batch.cases.iter().any(|case| case.alarm.order_id().as_str() == "order-42");
        if !to_blame {
            closed += batch.cases.len();
            answer(&mut desk, batch, &found(Outcome::Closed), now);
        } else {
            assert_eq!(batch.patient, statements == 1);
            retried |= batch.cases.len() == 1;
            answer(&mut desk, batch, &fault, now);
        }
        now = now + Duration::from_millis(1);
        let more = desk.errands(now).into_iter().filter_map(|errand| match errand {
            Errand::Close(batch) => Some(batch),
            _ => None,
        });
        out.extend(more);
    }
    assert_eq!((closed, retried), (99, true));
    assert!(statements <= 1 + 8 + 8 + 8, "{statements} statements");
}

#[test]
fn a_batch_that_waited_for_a_lock_in_vain_is_tried_again_whole_and_for_a_second_nobody_waits() {
    let mut desk = Desk::new(Policy { batch_size: 100, ..policy() });
    for tag in 1..=10 {
        desk.hear(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let waited = batches(&mut desk, at_ms(1_002)).remove(0);
    assert!(waited.patient);
    desk.hear(delivered("takes long", at_ms(1_000), 1, 11), at_ms(1_003));
    assert_eq!(batches(&mut desk, at_ms(1_005)).len(), 1);
    answer(&mut desk, waited, &Err(CloseFault::Locked("a lock".into())), at_ms(1_200));

    let hurried = batches(&mut desk, at_ms(1_200)).remove(0);
    assert_eq!((hurried.cases.len(), hurried.patient), (10, false), "by the only closer that is idle");
    answer(&mut desk, hurried, &found(Outcome::Closed), at_ms(1_205));
    for (order, ms, patient) in [("soon", 1_300, false), ("later", 2_201, true)] {
        desk.hear(delivered(order, at_ms(ms), 1, 20), at_ms(ms));
        let Some(Errand::Close(batch)) = desk.errands(at_ms(ms + 2)).into_iter().next() else { panic!() };
        assert_eq!(batch.patient, patient, "{order}");
        answer(&mut desk, batch, &found(Outcome::Closed), at_ms(ms + 5));
    }
}

#[test]
fn parts_of_a_failed_batch_leave_a_closer_to_what_is_fresh() {
    let mut desk = Desk::new(policy());
    for tag in 1..=3 {
        desk.hear(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let batch = batches(&mut desk, at_ms(1_000)).remove(0);
    answer(&mut desk, batch, &Err(CloseFault::OfTheOrder("a trigger says no".into())), at_ms(1_010));
    let parts = batches(&mut desk, at_ms(1_010));
    assert_eq!(parts.iter().map(|part| part.cases.len()).collect::<Vec<_>>(), [1], "one of two closers");
    for tag in 4..=6 {
        desk.hear(delivered(&format!("order-{tag}"), at_ms(1_011), 1, tag), at_ms(1_011));
    }
    assert_eq!(batches(&mut desk, at_ms(1_011)).len(), 1, "the other is there for the fresh");
    let waited_long = at_ms(1_010) + policy().retry_longest;
    let (mut starved, batch) = desk_with_one_closing();
    answer(&mut starved, batch, &found(Outcome::Busy), at_ms(1_010));
    assert_eq!(batches(&mut starved, waited_long).len(), 1, "with nobody fresh it goes");
}

#[test]
fn what_the_broker_did_not_confirm_is_armed_again_later_unless_it_was_delivered_anew() {
    let mut desk = Desk::new(policy());
    desk.hear(News::SessionOpened(1), at_ms(1_000));
    desk.hear(delivered("a", at_ms(60_000), 1, 7), at_ms(1_000));
    let Some(Errand::Arm(jobs)) = desk.errands(at_ms(1_000)).pop() else { panic!() };
    desk.hear(News::NotArmed(jobs.clone()), at_ms(1_010));
    assert_eq!(desk.errands(at_ms(1_059)), vec![]);
    assert_eq!(desk.wake_at(), Some(at_ms(1_060)));
    assert_eq!(desk.errands(at_ms(1_060)), vec![Errand::Arm(jobs.clone())]);
    desk.hear(News::NotArmed(jobs), at_ms(1_070));
    desk.hear(News::SessionOpened(2), at_ms(1_080));
    assert_eq!(desk.errands(at_ms(9_000)), vec![], "the broker delivers it again; armed here too there would be two");
    assert!(desk.wants_deliveries(at_ms(20_000)), "nothing is failing any more");
}

#[test]
fn an_alarm_that_is_refused_while_others_are_armed_goes_back_in_time_and_ends_no_intake() {
    let mut desk = Desk::new(policy());
    desk.hear(News::SessionOpened(1), at_ms(1_000));
    desk.hear(delivered("refused", at_ms(60_000), 1, 1), at_ms(1_000));
    let mut now = at_ms(1_000);
    let Some(Errand::Arm(mut jobs)) = desk.errands(now).pop() else { panic!() };
    let refused = jobs[0].receipt;
    for tag in 2.. {
        // Another is armed meanwhile.
        desk.hear(delivered(&format!("order-{tag}"), at_ms(60_000), 1, tag), now);
        let Some(Errand::Arm(other)) = desk.errands(now).pop() else { panic!() };
        desk.hear(News::Armed(vec![other[0].receipt]), now);
        let Some(Errand::Settle(_)) = desk.errands(now).pop() else { panic!() };
        desk.hear(News::ArmRefused(jobs), now);
        assert!(desk.wants_deliveries(now));
        if now.since(at_ms(1_000)) >= policy().away_patience {
            assert_eq!(desk.errands(now), vec![Errand::Settle(vec![(refused, Settlement::Requeue)])]);
            return;
        }
        let wake_at = desk.wake_at().unwrap();
        assert!(wake_at.since(now) <= policy().retry_longest, "after {:?}", wake_at.since(now));
        assert!(
            tag < 6 || wake_at.since(now) > policy().retry_first,
            "the others' success does not shorten its pauses"
        );
        now = wake_at;
        let Some(Errand::Arm(again)) = desk.errands(now).pop() else { panic!() };
        jobs = again;
    }
}

#[test]
fn a_row_that_is_refused_goes_back_in_time_and_ends_no_intake_while_a_database_that_is_away_does() {
    for refused in [true, false] {
        let mut desk = Desk::new(policy());
        desk.hear(News::SessionOpened(1), at_ms(1_000));
        desk.hear(delivered("far", at_ms(253_370_764_800_000), 1, 1), at_ms(1_000));
        let mut now = at_ms(1_000);
        while now <= at_ms(14_000) {
            match desk.errands(now).pop() {
                Some(Errand::Park(parcels)) if refused => desk.hear(News::ParkRefused(parcels), now),
                Some(Errand::Park(parcels)) => desk.hear(News::NotParked(parcels), now),
                Some(Errand::Settle(settled)) => {
                    assert_eq!((settled[0].1, refused), (Settlement::Requeue, true));
                    break;
                }
                other => panic!("{other:?}"),
            }
            now = desk.wake_at().unwrap().min(now + policy().retry_longest);
        }
        assert_eq!((desk.wants_deliveries(now), now <= at_ms(14_000)), (refused, refused), "given back if refused");
    }
}

#[test]
fn a_heap_of_nonsense_is_parked_bit_by_bit() {
    let mut desk = Desk::new(policy());
    for tag in 0..1_000 {
        desk.hear(delivered("a", at_ms(253_370_764_800_000), 1, tag), at_ms(1_000));
    }
    let mut parked = 0;
    while parked < 1_000 {
        let mut errands = desk.errands(at_ms(1_000));
        errands.retain(|errand| matches!(errand, Errand::Park(_)));
        let Some(Errand::Park(parcels)) = errands.pop() else { panic!("nothing to park") };
        assert!(errands.is_empty() && parcels.len() <= PARKED_AT_ONCE);
        assert!(!matches!(desk.errands(at_ms(1_000))[..], [Errand::Park(_), ..]), "one statement at a time");
        parked += parcels.len();
        desk.hear(News::Parked(parcels.into_iter().map(|(_, receipt)| receipt).collect()), at_ms(1_000));
    }
}

/// A desk whose sweep is due every 250 ms, past its first pause.
fn sweeping_desk() -> Desk {
    let mut desk = Desk::new(Policy { sweep_every: Duration::from_millis(250), ..policy() });
    desk.hear(News::SessionOpened(1), at_ms(0));
    assert_eq!(desk.errands(at_ms(0)), vec![]);
    desk
}

fn swept_page(desk: &mut Desk, now: Moment) -> SweepPage {
    let mut errands = desk.errands(now);
    let Some(Errand::Sweep(page)) = errands.pop() else { panic!("{errands:?}") };
    page
}

/// A page with these orders; the last of the pass if it is not full.
fn swept(orders: &[(&str, i64)]) -> News {
    let overdue = |(id, deadline_ms): &(&str, i64)| Overdue {
        order_id: OrderId::new(id).unwrap(),
        deadline: at_ms(*deadline_ms),
    };
    let next = orders.last().filter(|_| orders.len() == policy().sweep_page);
    News::Swept(SweptPage { orders: orders.iter().map(overdue).collect(), next: next.map(place) })
}

fn place((id, deadline_ms): &(&str, i64)) -> SweepPlace {
    SweepPlace { deadline: at_ms(*deadline_ms), id: (*id).to_owned() }
}

#[test]
fn a_pass_through_what_the_closers_are_at_ends_early_but_not_for_ever() {
    let mut desk = sweeping_desk();
    let ids: Vec<String> = (1..=12).map(|tag| format!("order-{tag}")).collect();
    for (id, tag) in ids.iter().zip(1..) {
        desk.hear(delivered(id, at_ms(1), 1, tag), at_ms(2));
    }
    assert_eq!(batches(&mut desk, at_ms(2)).len(), 2, "both closers are busy, and others wait");
    let page: Vec<(&str, i64)> = ids.iter().take(4).map(|id| (id.as_str(), 1)).collect();
    let mut now = 250;
    for _ in 0..7 {
        assert_eq!(swept_page(&mut desk, at_ms(now)).after, None);
        desk.hear(swept(&page), at_ms(now + 1));
        assert_eq!(desk.errands(at_ms(now + 1)), vec![]);
        now += 250;
    }
    assert_eq!(swept_page(&mut desk, at_ms(now)).after, None);
    desk.hear(swept(&page), at_ms(now + 1));
    assert_eq!(swept_page(&mut desk, at_ms(now + 1)).after, Some(place(&page[3])), "the eighth goes on");
}

#[test]
fn the_sweep_closes_what_no_alarm_speaks_for_and_waits_for_alarms_only_while_they_can_come() {
    let mut desk = sweeping_desk();
    assert_eq!(desk.wake_at(), Some(at_ms(250)));
    let page = swept_page(&mut desk, at_ms(250));
    assert_eq!((page.grace, page.after), (policy().sweep_grace, None));
    // One waits for its own deadline here already, as does one that was shortened.
    desk.hear(delivered("held", at_ms(400), 1, 1), at_ms(251));
    desk.hear(delivered("shortened", at_ms(9_000), 1, 2), at_ms(251));
    desk.hear(swept(&[("forgotten", 1), ("shortened", 2), ("held", 400)]), at_ms(252));
    let out = batches(&mut desk, at_ms(252));
    let names: Vec<&str> = out[0].cases.iter().map(|case| case.alarm.order_id().as_str()).collect();
    assert_eq!((out[0].by, names), (ClosedBy::Sweep, vec!["forgotten", "shortened"]));
    desk.hear(News::SessionEnded, at_ms(300));
    let mut errands = desk.errands(at_ms(500));
    let Some(Errand::Sweep(page)) = errands.pop() else { panic!("{errands:?}") };
    assert_eq!(page.grace, Duration::ZERO);
}

#[test]
fn a_pass_goes_on_to_the_end_past_orders_that_cannot_be_closed() {
    let mut desk = sweeping_desk();
    assert_eq!(swept_page(&mut desk, at_ms(250)).after, None);
    let first = [("bad-1", 1), ("bad-2", 2), ("bad-3", 3), ("bad-4", 4)];
    desk.hear(swept(&first), at_ms(251));
    let mut errands = desk.errands(at_ms(251));
    assert_eq!(errands.len(), 3, "both closers have work, and the next page is wanted: {errands:?}");
    let fault = Err(CloseFault::OfTheOrder("a trigger says no".into()));
    let mut now = at_ms(252);
    let mut page = None;
    while let Some(errand) = errands.pop() {
        match errand {
            Errand::Close(batch) => answer(&mut desk, batch, &fault, now),
            Errand::Sweep(asked) => page = Some(asked),
            other => panic!("{other:?}"),
        }
        now = now + Duration::from_millis(1);
        errands.extend(desk.errands(now));
    }
    assert_eq!(page.unwrap().after, Some(place(&("bad-4", 4))));
    assert_eq!(desk.troubled(), 4);
    desk.hear(swept(&[("good", 5)]), now);
    assert_eq!(batches(&mut desk, now)[0].cases[0].alarm.order_id().as_str(), "good");
    // The next pass leaves the bad ones alone, for a while.
    now = at_ms(501);
    assert_eq!(swept_page(&mut desk, now).after, None);
    desk.hear(swept(&first), now);
    let errands = desk.errands(now);
    assert!(matches!(&errands[..], [Errand::Sweep(_)]), "{errands:?}");
    desk.hear(swept(&[]), now);
    now = at_ms(2_000);
    assert_eq!(swept_page(&mut desk, now).after, None);
    desk.hear(swept(&[first[0], first[1], first[2], ("late", 5)]), now);
    let Some(Errand::Close(batch)) = desk.errands(now).into_iter().next() else { panic!("nothing to close") };
    assert_eq!(names(&batch), ["late"], "those that failed before do not take it with them");
    answer(&mut desk, batch, &found(Outcome::Closed), now);
    // The other closer still has the good one, so they wait for this one.
    now = now + policy().retry_longest;
    let Some(Errand::Close(batch)) = desk.errands(now).into_iter().next() else { panic!("nobody tries again") };
    assert_eq!((batch.by, names(&batch)), (ClosedBy::Sweep, vec!["bad-1", "bad-2", "bad-3"]));
}

/// Finds this order overdue and has every try fail until then; returns how often it was tried.
fn tries_of_a_swept_order(fault: &CloseFault, orders: &[(&str, i64)], until: Moment) -> usize {
    let (mut desk, mut now, mut tries) = (sweeping_desk(), at_ms(250), 0);
    while now < until {
        for errand in desk.errands(now) {
            match errand {
                Errand::Sweep(_) => desk.hear(swept(orders), now),
                Errand::Close(batch) => {
                    tries += usize::from(names(&batch) == [orders[0].0]);
                    answer(&mut desk, batch, &Err(fault.clone()), now);
                }
                other => panic!("unexpected {other:?}"),
            }
        }
        now = now + Duration::from_millis(10);
    }
    tries
}

#[test]
fn an_overdue_order_that_is_not_to_blame_is_tried_as_often_as_the_sweep_looks() {
    let minute = at_ms(60_000);
    let tries = |fault: CloseFault, orders: &[(&str, i64)]| tries_of_a_swept_order(&fault, orders, minute);
    let several = [("a", 1), ("b", 2)];
    assert!(tries(CloseFault::Locked("a table".into()), &several[..1]) > 100);
    assert!(tries(CloseFault::Transient("a timeout".into()), &several) > 100, "everybody's");
    assert!(tries(CloseFault::Transient("a timeout".into()), &several[..1]) < 20, "it may be its own trigger");
    assert!(tries(CloseFault::OfTheOrder("a trigger says no".into()), &several) < 20);
}

#[test]
fn trouble_that_has_waited_long_does_not_take_the_last_closer_twice_while_others_wait() {
    let mut desk = Desk::new(policy());
    for (order, tag) in [("bad-1", 1), ("bad-2", 2), ("bad-3", 3)] {
        desk.hear(delivered(order, at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let together = batches(&mut desk, at_ms(1_000)).remove(0);
    desk.hear(delivered("takes long", at_ms(1_000), 1, 4), at_ms(1_000));
    assert_eq!(batches(&mut desk, at_ms(1_002)).len(), 1);
    let fault = Err(CloseFault::OfTheOrder("a trigger says no".into()));
    answer(&mut desk, together, &fault, at_ms(1_010));

    let parted = batches(&mut desk, at_ms(2_100)).remove(0);
    assert_eq!(names(&parted), ["bad-1"], "it has waited long");
    desk.hear(delivered("good", at_ms(2_100), 1, 5), at_ms(2_100));
    answer(&mut desk, parted, &fault, at_ms(2_110));
    let good = batches(&mut desk, at_ms(2_110)).remove(0);
    assert_eq!(names(&good), ["good"], "though the others are older");
    answer(&mut desk, good, &fault, at_ms(2_120));
    assert_eq!(names(&batches(&mut desk, at_ms(2_120))[0]), ["bad-2"]);
}

fn names(batch: &Batch) -> Vec<&str> {
    batch.cases.iter().map(|case| case.alarm.order_id().as_str()).collect()
}

#[test]
fn a_page_without_a_usable_id_does_not_end_the_pass() {
    let mut desk = sweeping_desk();
    swept_page(&mut desk, at_ms(250));
    let next = Some(place(&("\t", 7)));
    desk.hear(News::Swept(SweptPage { orders: vec![], next: next.clone() }), at_ms(251));
    assert_eq!(swept_page(&mut desk, at_ms(251)).after, next);
}

#[test]
fn a_clock_that_is_set_back_makes_no_pause_longer() {
    const HOUR_MS: i64 = 3_600_000;
    let mut desk = sweeping_desk();
    let now = at_ms(2 * HOUR_MS);
    swept_page(&mut desk, now);
    desk.hear(swept(&[]), now);
    desk.hear(delivered("busy", now, 1, 1), now);
    let batch = batches(&mut desk, at_ms(2 * HOUR_MS + 2)).remove(0);
    answer(&mut desk, batch, &found(Outcome::Busy), at_ms(2 * HOUR_MS + 3));
    desk.hear(delivered("held", at_ms(2 * HOUR_MS + 9_000), 1, 2), at_ms(2 * HOUR_MS + 4));
    assert_eq!(desk.held(), 2);

    let back = at_ms(HOUR_MS);
    let errands = desk.errands(back);
    assert!(matches!(&errands[..], [Errand::Sweep(_), Errand::Arm(jobs)] if jobs.len() == 2), "{errands:?}");
}

#[test]
fn while_the_database_is_away_it_is_asked_even_if_nobody_waits() {
    let (mut desk, batch) = desk_with_one_closing();
    let away = Err(CloseFault::Away("gone".into()));
    answer(&mut desk, batch, &away, at_ms(1_010));
    let probe = batches(&mut desk, at_ms(1_060)).remove(0);
    desk.drain();
    answer(&mut desk, probe, &away, at_ms(1_070));
    assert_eq!(desk.wake_at(), None, "a stopping worker asks no more");
    assert!(desk.closers_are_idle());

    let mut desk = Desk::new(policy());
    desk.hear(delivered("a", at_ms(1_000), 1, 1), at_ms(1_000));
    let batch = batches(&mut desk, at_ms(1_002)).remove(0);
    desk.hear(News::Closed(Batch { cases: vec![], ..batch }, Err(CloseFault::Away("gone".into()))), at_ms(1_010));
    let probe = batches(&mut desk, at_ms(1_060)).remove(0);
    assert_eq!(probe.cases, vec![]);
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
    assert_eq!(batches(&mut desk, at_ms(1_400)), Vec::<Batch>::new(), "the other closer has not answered yet");
    answer(&mut desk, out.remove(0), &away, at_ms(1_410));
    assert!(desk.wants_deliveries(at_ms(1_410)));
    assert_eq!(batches(&mut desk, at_ms(3_000)).len(), 1, "one asks");
    assert!(!desk.wants_deliveries(at_ms(11_011)));
}

#[test]
fn a_database_that_is_away_for_long_is_asked_as_often_as_the_sweep_asks_one_that_is_well() {
    let mut desk = Desk::new(Policy { sweep_every: Duration::from_millis(250), ..policy() });
    desk.hear(delivered("a", at_ms(1_000), 1, 1), at_ms(1_000));
    let mut asked_at = at_ms(1_000);
    for _ in 0..10 {
        let batch = loop {
            let next = desk.wake_at().expect("it is asked again");
            assert!(next.since(asked_at) <= Duration::from_millis(250), "after {:?}", next.since(asked_at));
            if let Some(batch) = batches(&mut desk, next).pop() {
                asked_at = next;
                break batch;
            }
        };
        answer(&mut desk, batch, &Err(CloseFault::Away("gone".into())), asked_at);
    }
}

#[test]
fn an_answer_of_the_database_ends_its_absence() {
    let (mut desk, batch) = desk_with_one_closing();
    answer(&mut desk, batch, &Err(CloseFault::Away("gone".into())), at_ms(1_010));
    assert_eq!(batches(&mut desk, at_ms(1_059)), Vec::<Batch>::new());
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

#[test]
fn a_full_batch_of_those_who_are_held_waits_for_nobody_else() {
    let mut desk = Desk::new(policy());
    for (tag, ms) in [(1, 5_000), (2, 5_000), (3, 5_001), (4, 5_002)] {
        desk.hear(delivered(&format!("order-{tag}"), at_ms(ms), 1, tag), at_ms(1_000));
    }
    assert_eq!(desk.wake_at(), Some(at_ms(5_001)), "the third fills the batch");
    assert_eq!(batches(&mut desk, at_ms(5_001)).remove(0).cases.len(), 3);
}

#[test]
fn what_came_in_a_session_that_has_ended_is_not_armed_beside_its_second_delivery() {
    let mut desk = Desk::new(policy());
    desk.hear(News::SessionOpened(1), at_ms(1_000));
    desk.hear(News::SessionEnded, at_ms(1_001));
    let News::Delivered(due) = delivered("a", at_ms(90_000), 1, 1) else { unreachable!() };
    desk.hear(News::Delivered(Delivered { inlet: Inlet::Arm, ..due }), at_ms(1_002));
    assert_eq!(desk.errands(at_ms(1_002)), vec![], "it was on its way from the session to the desk");

    let not_due = Ok(Found { outcome: Outcome::NotDue, deadline: Some(at_ms(90_000)) });
    let (mut desk, batch) = desk_with_one_closing();
    desk.hear(News::SessionOpened(1), at_ms(1_004));
    desk.hear(News::SessionEnded, at_ms(1_005));
    answer(&mut desk, batch.clone(), &not_due, at_ms(1_010));
    assert_eq!(desk.errands(at_ms(1_010)), vec![]);

    let (mut desk, batch) = desk_with_one_closing();
    desk.hear(News::SessionOpened(1), at_ms(1_004));
    desk.hear(News::SessionEnded, at_ms(1_005));
    desk.hear(News::SessionOpened(2), at_ms(1_006));
    answer(&mut desk, batch, &not_due, at_ms(1_010));
    assert_eq!(desk.errands(at_ms(1_010)), vec![]);
}

#[test]
fn only_a_lock_that_was_waited_for_in_vain_makes_others_not_wait() {
    for (fault, waits) in
        [(CloseFault::Locked("a lock".into()), false), (CloseFault::Transient("a deadlock".into()), true)]
    {
        let (mut desk, batch) = desk_with_one_closing();
        answer(&mut desk, batch, &Err(fault), at_ms(1_010));
        desk.hear(delivered("b", at_ms(1_000), 1, 2), at_ms(1_010));
        let patient: Vec<bool> = batches(&mut desk, at_ms(1_012)).iter().map(|batch| batch.patient).collect();
        assert!(patient.contains(&false), "what has failed is tried again without waiting");
        assert_eq!(patient.contains(&true), waits);
    }
}

#[test]
fn a_database_that_closes_nothing_for_seconds_is_said_to_until_it_closes_something_or_nobody_asks_any_more() {
    let mut desk = Desk::new(policy());
    let mut now = at_ms(1_000);
    for (tag, order) in [(1, "a"), (2, "c")] {
        desk.hear(delivered(order, now, 1, tag), now);
    }
    let mut fail_until = |desk: &mut Desk, end: Moment| {
        while now < end {
            for batch in batches(desk, now) {
                answer(desk, batch, &Err(CloseFault::Locked("a lock".into())), now);
            }
            now = now + Duration::from_millis(10);
        }
    };
    fail_until(&mut desk, at_ms(5_000));
    assert!(!desk.closes_nothing(at_ms(5_000)));
    fail_until(&mut desk, at_ms(7_000));
    assert!(desk.closes_nothing(at_ms(7_000)));
    assert!(!desk.closes_nothing(at_ms(20_000)), "nobody has asked for long");
    desk.hear(delivered("b", at_ms(7_000), 1, 3), at_ms(7_000));
    let batch = batches(&mut desk, at_ms(7_002)).remove(0);
    answer(&mut desk, batch.clone(), &found(Outcome::Busy), at_ms(7_010));
    assert!(desk.closes_nothing(at_ms(7_010)), "who only looks is held up by nothing");
    desk.hear(delivered("d", at_ms(7_000), 1, 4), at_ms(7_010));
    let batch = batches(&mut desk, at_ms(7_012)).remove(0);
    answer(&mut desk, batch, &found(Outcome::Closed), at_ms(7_020));
    assert!(!desk.closes_nothing(at_ms(7_020)));
}

#[test]
fn a_database_that_closes_nothing_is_found_out_however_long_a_try_takes() {
    let mut desk = Desk::new(Policy { longest_try: Duration::from_secs(33), ..policy() });
    let mut now = at_ms(1_000);
    for (tag, order) in [(1, "a"), (2, "b")] {
        desk.hear(delivered(order, now, 1, tag), now);
    }
    let mut fails = 0;
    while fails < 3 {
        for batch in batches(&mut desk, now) {
            now = now + Duration::from_secs(31);
            answer(&mut desk, batch, &Err(CloseFault::Transient("a timeout".into())), now);
            fails += 1;
        }
        now = now + Duration::from_millis(10);
    }
    assert!(desk.closes_nothing(now));
}

#[test]
fn one_order_that_fails_for_long_is_not_taken_for_a_database_that_closes_nothing() {
    let mut desk = Desk::new(policy());
    let mut now = at_ms(1_000);
    desk.hear(delivered("a", now, 1, 1), now);
    while now < at_ms(9_000) {
        for batch in batches(&mut desk, now) {
            answer(&mut desk, batch, &Err(CloseFault::Transient("a timeout".into())), now);
        }
        assert!(!desk.closes_nothing(now));
        now = now + Duration::from_millis(10);
    }
}

#[test]
fn a_database_that_refuses_one_order_after_the_other_is_said_to_close_nothing_and_a_close_has_all_of_them_tried_again()
{
    let closes_nothing_with = |count: usize, until: Moment| {
        let (mut desk, mut now) = (sweeping_desk(), at_ms(250));
        let ids: Vec<String> = (0..count).map(|index| format!("order-{index}")).collect();
        let orders: Vec<(&str, i64)> = ids.iter().map(|id| (id.as_str(), 1)).collect();
        let page = || {
            let overdue =
                |(id, ms): &(&str, i64)| Overdue { order_id: OrderId::new(*id).unwrap(), deadline: at_ms(*ms) };
            News::Swept(SweptPage { orders: orders.iter().map(overdue).collect(), next: None })
        };
        let refused = Err(CloseFault::OfTheOrder("a trigger says no".into()));
        while now < until {
            for errand in desk.errands(now) {
                match errand {
                    Errand::Sweep(_) => desk.hear(page(), now),
                    Errand::Close(batch) => answer(&mut desk, batch, &refused, now),
                    other => panic!("unexpected {other:?}"),
                }
            }
            now = now + Duration::from_millis(10);
        }
        (desk.closes_nothing(now), desk, now, page())
    };
    let (said, ..) = closes_nothing_with(9, at_ms(10_000));
    assert!(!said, "a few orders may be at fault themselves");
    let (said, ..) = closes_nothing_with(12, at_ms(10_000));
    assert!(said);
    // They are left alone for minutes by then.
    let (said, mut desk, mut now, page) = closes_nothing_with(12, at_ms(600_000));
    assert!(said);

    desk.hear(delivered("good", now, 1, 1), now);
    let good = loop {
        now = now + Duration::from_millis(1);
        let alarms = |errand| matches!(&errand, Errand::Close(batch) if batch.by == ClosedBy::Alarm).then_some(errand);
        if let Some(Errand::Close(batch)) = desk.errands(now).into_iter().find_map(alarms) {
            break batch;
        }
    };
    answer(&mut desk, good, &found(Outcome::Closed), now);
    assert!(!desk.closes_nothing(now));
    now = now + Duration::from_millis(250);
    desk.errands(now);
    desk.hear(page, now);
    let is_close = |errand: &Errand| matches!(errand, Errand::Close(_));
    assert!(desk.errands(now).iter().any(is_close), "nobody is left alone any longer");
}

#[test]
fn an_article_that_stays_locked_under_the_sweep_is_no_outage_and_keeps_no_alarm_from_waiting() {
    let (mut desk, mut now, mut waited) = (sweeping_desk(), at_ms(250), 0);
    while now < at_ms(20_000) {
        for errand in desk.errands(now) {
            match errand {
                Errand::Sweep(_) => desk.hear(swept(&[("a", 1), ("b", 1)]), now),
                Errand::Close(batch) if batch.patient => {
                    waited += 1;
                    answer(&mut desk, batch, &Err(CloseFault::Locked("a lock".into())), now);
                }
                Errand::Close(batch) => answer(&mut desk, batch, &found(Outcome::Busy), now),
                other => panic!("unexpected {other:?}"),
            }
        }
        now = now + Duration::from_millis(10);
    }
    assert!((10..=20).contains(&waited), "once a second, and a closer is free for others");
    assert!(!desk.closes_nothing(now));
    desk.hear(delivered("c", now, 1, 1), now);
    let closes = |errand| if let Errand::Close(batch) = errand { Some(batch) } else { None };
    let later = now + Duration::from_millis(2);
    let mut alarms = desk.errands(later).into_iter().filter_map(closes).filter(|batch| batch.by == ClosedBy::Alarm);
    assert!(alarms.next().expect("an alarm's batch").patient);
}

#[test]
fn the_sweep_waits_for_locks_where_that_leaves_a_closer_to_the_others() {
    let patience_with = |busy_closers: u64| {
        let mut desk = sweeping_desk();
        for tag in 1..=busy_closers {
            desk.hear(delivered("takes long", at_ms(240), 1, tag), at_ms(240));
            assert_eq!(batches(&mut desk, at_ms(242)).len(), 1);
        }
        swept_page(&mut desk, at_ms(250));
        desk.hear(swept(&[("overdue", 1)]), at_ms(250));
        batches(&mut desk, at_ms(250))[0].patient
    };
    assert!(patience_with(0));
    assert!(!patience_with(1));
}
