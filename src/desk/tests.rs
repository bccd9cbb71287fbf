//! The desk's decisions, one by one, without any I/O.

use super::*;
use crate::message::TimeoutDue;
use crate::order::{CloseFault, ClosedBy, Finding, Found, Outcome, SweepPage, SweepPlace};

mod batches;
mod circulation;
mod outage;
mod sweep;

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
        held_back_most: 1_000,
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
        content: Ok(Alarm { due, attempt: 0, born: None, traceparent: None, returns: Returns::default() }),
        death: None,
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

/// A desk whose sweep is due every 250 ms, past its first pause.
fn sweeping_desk() -> Desk {
    let mut desk = Desk::new(Policy { sweep_every: Duration::from_millis(250), ..policy() });
    desk.hear(News::SessionOpened(1), at_ms(0));
    assert_eq!(desk.errands(at_ms(0)), vec![]);
    desk
}

/// Runs a desk until `end`, ten milliseconds at a time. Its sweep finds what of `overdue` is not closed; `close` says what
/// becomes of a batch. Returns who was closed, sorted.
fn run_until(
    desk: &mut Desk,
    now: &mut Moment,
    end: Moment,
    overdue: &[(&str, i64)],
    mut close: impl FnMut(&Batch, Moment) -> Finding,
) -> Vec<String> {
    let mut closed: Vec<String> = Vec::new();
    while *now < end {
        for errand in desk.errands(*now) {
            match errand {
                Errand::Sweep(_) => {
                    let is_open = |(id, _): &&(&str, i64)| !closed.iter().any(|one| one == id);
                    let open: Vec<(&str, i64)> = overdue.iter().filter(is_open).copied().collect();
                    desk.hear(swept(&open), *now);
                }
                Errand::Close(batch) => {
                    let finding = close(&batch, *now);
                    if finding == found(Outcome::Closed) {
                        closed.extend(names(&batch).into_iter().map(str::to_owned));
                    }
                    answer(desk, batch, &finding, *now);
                }
                Errand::Settle(_) | Errand::Arm(_) => {}
                other => panic!("unexpected {other:?}"),
            }
        }
        *now = *now + Duration::from_millis(10);
    }
    closed.sort();
    closed
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

fn names(batch: &Batch) -> Vec<&str> {
    batch.cases.iter().map(|case| case.alarm.order_id().as_str()).collect()
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
    answer(&mut desk, Batch { by: ClosedBy::Alarm, cases: vec![case], wait: Wait::Fresh }, &fault, now);
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
