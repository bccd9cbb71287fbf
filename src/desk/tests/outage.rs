//! When the database is said to be away or to close nothing, and who is asked meanwhile.

use super::*;

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
