//! When the database is said to be away or to close nothing, and who is asked meanwhile.

use super::*;

fn closes_nothing(engine: &Engine, now: Timestamp) -> bool {
    engine.unavailable_reason(now).is_some()
}

#[test]
fn while_the_database_is_away_it_is_asked_even_if_nobody_waits() {
    let (mut engine, batch) = desk_with_one_closing();
    let away = Err(CloseError::Unavailable("gone".into()));
    answer(&mut engine, batch, &away, at_ms(1_010));
    let probe = batches(&mut engine, at_ms(1_060)).remove(0);
    engine.drain();
    answer(&mut engine, probe, &away, at_ms(1_070));
    assert_eq!(engine.next_wakeup(), None, "a stopping worker asks no more");
    assert!(engine.closers_are_idle());

    let mut engine = Engine::new(policy());
    engine.handle(delivered("a", at_ms(1_000), 1, 1), at_ms(1_000));
    let batch = batches(&mut engine, at_ms(1_002)).remove(0);
    engine.handle(
        Input::Closed(Batch { items: vec![], ..batch }, Err(CloseError::Unavailable("gone".into()))),
        at_ms(1_010),
    );
    let probe = batches(&mut engine, at_ms(1_060)).remove(0);
    assert_eq!(probe.items, vec![]);
}

#[test]
fn while_the_database_is_away_one_closer_asks_and_intake_stops_after_a_while() {
    let mut engine = Engine::new(policy());
    for tag in 1..=9 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let mut out = batches(&mut engine, at_ms(1_000));
    let away = Err(CloseError::Unavailable("gone".into()));
    answer(&mut engine, out.remove(0), &away, at_ms(1_010));
    assert_eq!(batches(&mut engine, at_ms(1_400)), Vec::<Batch>::new(), "the other closer has not answered yet");
    answer(&mut engine, out.remove(0), &away, at_ms(1_410));
    assert!(engine.wants_deliveries(at_ms(1_410)));
    assert_eq!(batches(&mut engine, at_ms(3_000)).len(), 1, "one asks");
    assert!(!engine.wants_deliveries(at_ms(11_011)));
}

#[test]
fn a_database_that_is_away_for_long_is_asked_as_often_as_the_sweep_asks_one_that_is_well() {
    let mut engine = Engine::new(Policy { sweep_every: Duration::from_millis(250), ..policy() });
    engine.handle(delivered("a", at_ms(1_000), 1, 1), at_ms(1_000));
    let mut asked_at = at_ms(1_000);
    for _ in 0..10 {
        let batch = loop {
            let next = engine.next_wakeup().expect("it is asked again");
            assert!(next.since(asked_at) <= Duration::from_millis(250), "after {:?}", next.since(asked_at));
            if let Some(batch) = batches(&mut engine, next).pop() {
                asked_at = next;
                break batch;
            }
        };
        answer(&mut engine, batch, &Err(CloseError::Unavailable("gone".into())), asked_at);
    }
}

#[test]
fn an_answer_of_the_database_ends_its_absence() {
    let (mut engine, batch) = desk_with_one_closing();
    answer(&mut engine, batch, &Err(CloseError::Unavailable("gone".into())), at_ms(1_010));
    assert_eq!(batches(&mut engine, at_ms(1_059)), Vec::<Batch>::new());
    let batch = (1_060..1_070).find_map(|ms| batches(&mut engine, at_ms(ms)).pop()).unwrap();
    answer(&mut engine, batch, &found(Outcome::Closed), at_ms(20_000));
    assert!(engine.wants_deliveries(at_ms(20_000)));
}

#[test]
fn a_database_that_closes_nothing_for_seconds_is_said_to_until_it_closes_something_or_nobody_asks_any_more() {
    let mut engine = Engine::new(policy());
    let mut now = at_ms(1_000);
    for (tag, order) in [(1, "a"), (2, "c")] {
        engine.handle(delivered(order, now, 1, tag), now);
    }
    let mut fail_until = |engine: &mut Engine, end: Timestamp| {
        while now < end {
            for batch in batches(engine, now) {
                answer(engine, batch, &Err(CloseError::Locked("a lock".into())), now);
            }
            now = now + Duration::from_millis(10);
        }
    };
    fail_until(&mut engine, at_ms(5_000));
    assert!(!closes_nothing(&engine, at_ms(5_000)));
    fail_until(&mut engine, at_ms(7_000));
    assert!(closes_nothing(&engine, at_ms(7_000)));
    assert!(!closes_nothing(&engine, at_ms(20_000)), "nobody has asked for long");
    engine.handle(delivered("b", at_ms(7_000), 1, 3), at_ms(7_000));
    let batch = batches(&mut engine, at_ms(7_002)).remove(0);
    answer(&mut engine, batch.clone(), &found(Outcome::Busy), at_ms(7_010));
    assert!(closes_nothing(&engine, at_ms(7_010)), "who only looks is held up by nothing");
    engine.handle(delivered("d", at_ms(7_000), 1, 4), at_ms(7_010));
    let batch = batches(&mut engine, at_ms(7_012)).remove(0);
    answer(&mut engine, batch, &found(Outcome::Closed), at_ms(7_020));
    assert!(!closes_nothing(&engine, at_ms(7_020)));
}

#[test]
fn a_database_that_closes_nothing_is_found_out_however_long_a_try_takes() {
    let mut engine = Engine::new(Policy { longest_try: Duration::from_secs(33), ..policy() });
    let mut now = at_ms(1_000);
    for (tag, order) in [(1, "a"), (2, "b")] {
        engine.handle(delivered(order, now, 1, tag), now);
    }
    let mut fails = 0;
    while fails < 3 {
        for batch in batches(&mut engine, now) {
            now = now + Duration::from_secs(31);
            answer(&mut engine, batch, &Err(CloseError::Transient("a timeout".into())), now);
            fails += 1;
        }
        now = now + Duration::from_millis(10);
    }
    assert!(closes_nothing(&engine, now));
}

#[test]
fn one_order_that_fails_for_long_is_not_taken_for_a_database_that_closes_nothing() {
    let mut engine = Engine::new(policy());
    let mut now = at_ms(1_000);
    engine.handle(delivered("a", now, 1, 1), now);
    while now < at_ms(9_000) {
        for batch in batches(&mut engine, now) {
            answer(&mut engine, batch, &Err(CloseError::Transient("a timeout".into())), now);
        }
        assert!(!closes_nothing(&engine, now));
        now = now + Duration::from_millis(10);
    }
}

#[test]
fn why_nothing_is_closed_is_said_of_what_holds_up_and_not_of_a_lock_that_one_waited_for() {
    let mut engine = Engine::new(Policy { closers: 3, ..policy() });
    let mut now = at_ms(1_000);
    for (tag, order) in [(1, "a"), (2, "b")] {
        engine.handle(delivered(order, now, 1, tag), now);
    }
    while now < at_ms(9_000) {
        for batch in batches(&mut engine, now) {
            let fault = if batch.waits_for_locks() {
                CloseError::Locked("a lock".into())
            } else {
                CloseError::Transient("slow".into())
            };
            answer(&mut engine, batch, &Err(fault), now);
        }
        now = now + Duration::from_millis(10);
    }
    assert_eq!(engine.unavailable_reason(now), Some("slow"));
}

fn twelve_orders() -> Vec<String> {
    (0..12).map(|index| format!("order-{index}")).collect()
}

/// Has the sweep find these orders again and again, and refuses every close. Returns how often one was tried by itself.
fn refuse_until(engine: &mut Engine, orders: &[(&str, i64)], now: &mut Timestamp, until: Timestamp) -> usize {
    let mut tries = 0;
    run_until(engine, now, until, orders, |batch, _| {
        tries += usize::from(batch.items.len() == 1);
        Err(CloseError::Rejected("a trigger says no".into()))
    });
    tries
}

/// Closes an order by its alarm.
fn close_one(engine: &mut Engine, now: &mut Timestamp) {
    engine.handle(delivered("good", *now, 1, 1), *now);
    let mut is_closed = false;
    while !is_closed {
        *now = *now + Duration::from_millis(1);
        for errand in engine.poll_actions(*now) {
            match errand {
                Action::Sweep(_) => engine.handle(Input::NotSwept, *now),
                Action::Close(batch) => {
                    is_closed |= batch.by == ClosedBy::Alarm;
                    answer(engine, batch, &found(Outcome::Closed), *now);
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
        let (mut engine, mut now) = (sweeping_desk(), at_ms(250));
        let orders = &orders[..count];
        // They are left alone for minutes by then.
        refuse_until(&mut engine, orders, &mut now, at_ms(600_000));
        assert!(!closes_nothing(&engine, now), "the database answers, and a worker that starts now is as good as any");
        close_one(&mut engine, &mut now);
        let soon = now + Duration::from_secs(2);
        assert_eq!(refuse_until(&mut engine, orders, &mut now, soon) > 0, tried, "{count} orders");
    }
}

#[test]
fn orders_that_are_refused_again_are_not_tried_at_every_close() {
    let ids = twelve_orders();
    let orders: Vec<(&str, i64)> = ids.iter().map(|id| (id.as_str(), 1)).collect();
    let (mut engine, mut now) = (sweeping_desk(), at_ms(250));
    refuse_until(&mut engine, &orders, &mut now, at_ms(600_000));
    let mut tries = 0;
    for _ in 0..4 {
        close_one(&mut engine, &mut now);
        let next_close = now + Duration::from_secs(60);
        tries += refuse_until(&mut engine, &orders, &mut now, next_close);
    }
    assert!((1..=2 * orders.len()).contains(&tries), "{tries} tries in four minutes");
}
