//! When the database is said to be away or to close nothing, and who is asked meanwhile.

use super::*;

fn closes_nothing(desk: &Desk, now: Moment) -> bool {
    desk.why_it_closes_nothing(now).is_some()
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
    assert!(!closes_nothing(&desk, at_ms(5_000)));
    fail_until(&mut desk, at_ms(7_000));
    assert!(closes_nothing(&desk, at_ms(7_000)));
    assert!(!closes_nothing(&desk, at_ms(20_000)), "nobody has asked for long");
    desk.hear(delivered("b", at_ms(7_000), 1, 3), at_ms(7_000));
    let batch = batches(&mut desk, at_ms(7_002)).remove(0);
    answer(&mut desk, batch.clone(), &found(Outcome::Busy), at_ms(7_010));
    assert!(closes_nothing(&desk, at_ms(7_010)), "who only looks is held up by nothing");
    desk.hear(delivered("d", at_ms(7_000), 1, 4), at_ms(7_010));
    let batch = batches(&mut desk, at_ms(7_012)).remove(0);
    answer(&mut desk, batch, &found(Outcome::Closed), at_ms(7_020));
    assert!(!closes_nothing(&desk, at_ms(7_020)));
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
    assert!(closes_nothing(&desk, now));
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
        assert!(!closes_nothing(&desk, now));
        now = now + Duration::from_millis(10);
    }
}

#[test]
fn why_nothing_is_closed_is_said_of_what_holds_up_and_not_of_a_lock_that_one_waited_for() {
    let mut desk = Desk::new(Policy { closers: 3, ..policy() });
    let mut now = at_ms(1_000);
    for (tag, order) in [(1, "a"), (2, "b")] {
        desk.hear(delivered(order, now, 1, tag), now);
    }
    while now < at_ms(9_000) {
        for batch in batches(&mut desk, now) {
            let fault = if batch.is_patient() {
                CloseFault::Locked("a lock".into())
            } else {
                CloseFault::Transient("slow".into())
            };
            answer(&mut desk, batch, &Err(fault), now);
        }
        now = now + Duration::from_millis(10);
    }
    assert_eq!(desk.why_it_closes_nothing(now), Some("slow"));
}

fn twelve_orders() -> Vec<String> {
    (0..12).map(|index| format!("order-{index}")).collect()
}

/// Has the sweep find these orders again and again, and refuses every close. Returns how often one was tried by itself.
fn refuse_until(desk: &mut Desk, orders: &[(&str, i64)], now: &mut Moment, until: Moment) -> usize {
    let mut tries = 0;
    run_until(desk, now, until, orders, |batch, _| {
        tries += usize::from(batch.cases.len() == 1);
        Err(CloseFault::OfTheOrder("a trigger says no".into()))
    });
    tries
}

/// Closes an order by its alarm.
fn close_one(desk: &mut Desk, now: &mut Moment) {
    desk.hear(delivered("good", *now, 1, 1), *now);
    let mut is_closed = false;
    while !is_closed {
        *now = *now + Duration::from_millis(1);
        for errand in desk.errands(*now) {
            match errand {
                Errand::Sweep(_) => desk.hear(News::NotSwept, *now),
                Errand::Close(batch) => {
                    is_closed |= batch.by == ClosedBy::Alarm;
                    answer(desk, batch, &found(Outcome::Closed), *now);
                }
                other => panic!("unexpected {other:?}"),
            }
        }
    }
}

#[test]
fn a_close_has_all_tried_again_that_a_database_has_refused_one_after_the_other() {
    let ids = twelve_orders();
    let orders: Vec<(&str, i64)> = ids.iter().map(|id| (id.as_str(), 1)).collect();
    for (count, tried) in [(9, false), (12, true)] {
        let (mut desk, mut now) = (sweeping_desk(), at_ms(250));
        let orders = &orders[..count];
        // They are left alone for minutes by then.
        refuse_until(&mut desk, orders, &mut now, at_ms(600_000));
        assert!(!closes_nothing(&desk, now), "the database answers, and a worker that starts now is as good as any");
        close_one(&mut desk, &mut now);
        let soon = now + Duration::from_secs(2);
        assert_eq!(refuse_until(&mut desk, orders, &mut now, soon) > 0, tried, "{count} orders");
    }
}

#[test]
fn orders_that_are_refused_again_are_not_tried_at_every_close() {
    let ids = twelve_orders();
    let orders: Vec<(&str, i64)> = ids.iter().map(|id| (id.as_str(), 1)).collect();
    let (mut desk, mut now) = (sweeping_desk(), at_ms(250));
    refuse_until(&mut desk, &orders, &mut now, at_ms(600_000));
    let mut tries = 0;
    for _ in 0..4 {
        close_one(&mut desk, &mut now);
        let next_close = now + Duration::from_secs(60);
        tries += refuse_until(&mut desk, &orders, &mut now, next_close);
    }
    assert!((1..=2 * orders.len()).contains(&tries), "{tries} tries in four minutes");
}
