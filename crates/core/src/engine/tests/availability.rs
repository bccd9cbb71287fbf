//! When the database counts as unavailable or as closing nothing, and which batches go out meanwhile.

use super::*;

fn closes_nothing(engine: &Engine, now: Timestamp) -> bool {
    engine.snapshot(now).unavailable.is_some()
}

#[test]
fn unavailable_database_is_probed_without_orders() {
    let (mut engine, batch) = engine_with_one_closing();
    let unavailable = Err(CloseError::Unavailable("gone".into()));
    finish(&mut engine, batch, &unavailable, at_ms(1_010));
    let probe = batches(&mut engine, at_ms(1_060)).remove(0);
    engine.drain();
    finish(&mut engine, probe, &unavailable, at_ms(1_070));
    assert_eq!(engine.next_wakeup(), None, "a draining worker asks no more");
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
fn outage_leaves_one_prober_and_stops_intake() {
    let mut engine = Engine::new(policy());
    for tag in 1..=9 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let mut out = batches(&mut engine, at_ms(1_000));
    let unavailable = Err(CloseError::Unavailable("gone".into()));
    finish(&mut engine, out.remove(0), &unavailable, at_ms(1_010));
    assert_eq!(batches(&mut engine, at_ms(1_400)), Vec::<Batch>::new(), "the other closer has not finished yet");
    finish(&mut engine, out.remove(0), &unavailable, at_ms(1_410));
    assert!(engine.wants_deliveries(at_ms(1_410)));
    assert_eq!(batches(&mut engine, at_ms(3_000)).len(), 1, "one closer asks");
    assert!(!engine.wants_deliveries(at_ms(11_011)));
}

#[test]
fn unavailable_database_is_probed_at_sweep_rate() {
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
        finish(&mut engine, batch, &Err(CloseError::Unavailable("gone".into())), asked_at);
    }
}

#[test]
fn database_answer_ends_outage() {
    let (mut engine, batch) = engine_with_one_closing();
    finish(&mut engine, batch, &Err(CloseError::Unavailable("gone".into())), at_ms(1_010));
    assert_eq!(batches(&mut engine, at_ms(1_059)), Vec::<Batch>::new());
    let batch = (1_060..1_070).find_map(|ms| batches(&mut engine, at_ms(ms)).pop()).unwrap();
    finish(&mut engine, batch, &found(Outcome::Closed), at_ms(20_000));
    assert!(engine.wants_deliveries(at_ms(20_000)));
}

#[test]
fn reports_stall_until_close_or_no_tries() {
    let mut engine = Engine::new(policy());
    let mut now = at_ms(1_000);
    for (tag, order) in [(1, "a"), (2, "c")] {
        engine.handle(delivered(order, now, 1, tag), now);
    }
    let mut fail_until = |engine: &mut Engine, end: Timestamp| {
        while now < end {
            for batch in batches(engine, now) {
                finish(engine, batch, &Err(CloseError::Locked("a lock".into())), now);
            }
            now = now + Duration::from_millis(10);
        }
    };
    fail_until(&mut engine, at_ms(5_000));
    assert!(!closes_nothing(&engine, at_ms(5_000)));
    fail_until(&mut engine, at_ms(7_000));
    assert!(closes_nothing(&engine, at_ms(7_000)));
    assert!(!closes_nothing(&engine, at_ms(20_000)), "no try for long");
    engine.handle(delivered("b", at_ms(7_000), 1, 3), at_ms(7_000));
    let batch = batches(&mut engine, at_ms(7_002)).remove(0);
    finish(&mut engine, batch.clone(), &found(Outcome::Busy), at_ms(7_010));
    assert!(closes_nothing(&engine, at_ms(7_010)), "a batch that only reads is not stalled");
    engine.handle(delivered("d", at_ms(7_000), 1, 4), at_ms(7_010));
    let batch = batches(&mut engine, at_ms(7_012)).remove(0);
    finish(&mut engine, batch, &found(Outcome::Closed), at_ms(7_020));
    assert!(!closes_nothing(&engine, at_ms(7_020)));
}

#[test]
fn stall_is_found_even_with_slow_tries() {
    let mut engine = Engine::new(Policy { longest_try: Duration::from_secs(33), ..policy() });
    let mut now = at_ms(1_000);
    for (tag, order) in [(1, "a"), (2, "b")] {
        engine.handle(delivered(order, now, 1, tag), now);
    }
    let mut fails = 0;
    while fails < 3 {
        for batch in batches(&mut engine, now) {
            now = now + Duration::from_secs(31);
            finish(&mut engine, batch, &Err(CloseError::Transient("a timeout".into())), now);
            fails += 1;
        }
        now = now + Duration::from_millis(10);
    }
    assert!(closes_nothing(&engine, now));
}

#[test]
fn single_failing_order_is_no_outage() {
    let mut engine = Engine::new(policy());
    let mut now = at_ms(1_000);
    engine.handle(delivered("a", now, 1, 1), now);
    while now < at_ms(9_000) {
        for batch in batches(&mut engine, now) {
            finish(&mut engine, batch, &Err(CloseError::Transient("a timeout".into())), now);
        }
        assert!(!closes_nothing(&engine, now));
        now = now + Duration::from_millis(10);
    }
}

#[test]
fn stall_reason_ignores_locks_waited_for() {
    let mut engine = Engine::new(Policy { closers: 3, ..policy() });
    let mut now = at_ms(1_000);
    for (tag, order) in [(1, "a"), (2, "b")] {
        engine.handle(delivered(order, now, 1, tag), now);
    }
    while now < at_ms(9_000) {
        for batch in batches(&mut engine, now) {
            let error = if batch.waits_for_locks() {
                CloseError::Locked("a lock".into())
            } else {
                CloseError::Transient("slow".into())
            };
            finish(&mut engine, batch, &Err(error), now);
        }
        now = now + Duration::from_millis(10);
    }
    assert_eq!(engine.snapshot(now).unavailable, Some(Unavailable::ClosesNothing("slow")));
}

fn twelve_orders() -> Vec<String> {
    (0..12).map(|index| format!("order-{index}")).collect()
}

/// Lets the sweep find these orders again and again, and rejects every close. Returns how often one was tried alone.
fn reject_until(engine: &mut Engine, orders: &[(&str, i64)], now: &mut Timestamp, until: Timestamp) -> usize {
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
        for action in engine.poll_actions(*now) {
            match action {
                Action::Sweep(_) => engine.handle(Input::NotSwept("away".into()), *now),
                Action::Close(batch) => {
                    is_closed |= batch.by == ClosedBy::Alarm;
                    finish(engine, batch, &found(Outcome::Closed), *now);
                }
                other => panic!("unexpected {other:?}"),
            }
        }
    }
}

#[test]
fn close_after_many_rejections_retries_all() {
    let ids = twelve_orders();
    let orders: Vec<(&str, i64)> = ids.iter().map(|id| (id.as_str(), 1)).collect();
    for (count, tried) in [(9, false), (12, true)] {
        let (mut engine, mut now) = (sweeping_engine(), at_ms(250));
        let orders = &orders[..count];
        // They are backed off for minutes by then.
        reject_until(&mut engine, orders, &mut now, at_ms(600_000));
        assert!(!closes_nothing(&engine, now), "the database answers, so no worker is unready");
        close_one(&mut engine, &mut now);
        let soon = now + Duration::from_secs(2);
        assert_eq!(reject_until(&mut engine, orders, &mut now, soon) > 0, tried, "{count} orders");
    }
}

#[test]
fn rejected_orders_are_not_retried_every_close() {
    let ids = twelve_orders();
    let orders: Vec<(&str, i64)> = ids.iter().map(|id| (id.as_str(), 1)).collect();
    let (mut engine, mut now) = (sweeping_engine(), at_ms(250));
    reject_until(&mut engine, &orders, &mut now, at_ms(600_000));
    let mut tries = 0;
    for _ in 0..4 {
        close_one(&mut engine, &mut now);
        let next_close = now + Duration::from_secs(60);
        tries += reject_until(&mut engine, &orders, &mut now, next_close);
    }
    assert!((1..=2 * orders.len()).contains(&tries), "{tries} tries in four minutes");
}
