//! What the sweep looks at, which orders it skips, and for how long.

use super::*;
use crate::order::SweepReach;

/// That of a worker with a session.
const REACH: SweepReach = SweepReach::Overdue(Duration::from_millis(500));

#[test]
fn pass_over_orders_in_flight_ends_early() {
    let mut engine = sweeping_engine();
    let ids: Vec<String> = (1..=12).map(|tag| format!("order-{tag}")).collect();
    for (id, tag) in ids.iter().zip(1..) {
        engine.handle(delivered(id, at_ms(1), 1, tag), at_ms(2));
    }
    assert_eq!(batches(&mut engine, at_ms(2)).len(), 2, "both closers are busy, and others wait");
    let page: Vec<(&str, i64)> = ids.iter().take(4).map(|id| (id.as_str(), 1)).collect();
    let mut now = 250;
    for _ in 0..7 {
        assert_eq!(swept_page(&mut engine, at_ms(now)).after, None);
        engine.handle(swept(&page), at_ms(now + 1));
        assert_eq!(engine.poll_actions(at_ms(now + 1)), vec![]);
        now += 250;
    }
    assert_eq!(swept_page(&mut engine, at_ms(now)).after, None);
    engine.handle(swept(&page), at_ms(now + 1));
    assert_eq!(swept_page(&mut engine, at_ms(now + 1)).after, Some(place(&page[3])), "the eighth goes on");
}

#[test]
fn sweep_closes_orders_without_alarms() {
    let mut engine = sweeping_engine();
    assert_eq!(engine.next_wakeup(), Some(at_ms(250)));
    let page = swept_page(&mut engine, at_ms(250));
    assert_eq!((page.reach, page.after), (SweepReach::Overdue(policy().sweep_grace), None));
    // One waits for its own deadline here already, as does one whose deadline was moved earlier.
    engine.handle(delivered("held", at_ms(400), 1, 1), at_ms(251));
    engine.handle(delivered("shortened", at_ms(9_000), 1, 2), at_ms(251));
    engine.handle(swept(&[("forgotten", 1), ("shortened", 2), ("held", 400)]), at_ms(252));
    let out = batches(&mut engine, at_ms(252));
    let names: Vec<&str> = out[0].items.iter().map(|item| item.alarm.order_id().as_str()).collect();
    assert_eq!((out[0].by, names), (ClosedBy::Sweep, vec!["forgotten", "shortened"]));
    engine.handle(Input::SessionEnded, at_ms(300));
    let mut actions = engine.poll_actions(at_ms(500));
    let Some(Action::Sweep(page)) = actions.pop() else { panic!("{actions:?}") };
    assert_eq!(page.reach, SweepReach::Ahead(policy().look_ahead));
}

#[test]
fn pass_continues_past_failing_orders() {
    let mut engine = sweeping_engine();
    assert_eq!(swept_page(&mut engine, at_ms(250)).after, None);
    let first = [("bad-1", 1), ("bad-2", 2), ("bad-3", 3), ("bad-4", 4)];
    engine.handle(swept(&first), at_ms(251));
    let mut actions = engine.poll_actions(at_ms(251));
    assert_eq!(actions.len(), 3, "both closers have work, and the next page is wanted: {actions:?}");
    let error = Err(CloseError::Rejected("a trigger says no".into()));
    let mut now = at_ms(252);
    let mut page = None;
    while let Some(action) = actions.pop() {
        match action {
            Action::Close(batch) => finish(&mut engine, batch, &error, now),
            Action::Sweep(asked) => page = Some(asked),
            other => panic!("{other:?}"),
        }
        now = now + Duration::from_millis(1);
        actions.extend(engine.poll_actions(now));
    }
    assert_eq!(page.unwrap().after, Some(place(&("bad-4", 4))));
    assert_eq!(engine.sweep.backed_off(), 4);
    engine.handle(swept(&[("good", 5)]), now);
    assert_eq!(batches(&mut engine, now)[0].items[0].alarm.order_id().as_str(), "good");
    // The next pass skips the bad ones for a while.
    now = at_ms(501);
    assert_eq!(swept_page(&mut engine, now).after, None);
    engine.handle(swept(&first), now);
    let actions = engine.poll_actions(now);
    assert!(matches!(&actions[..], [Action::Sweep(_)]), "{actions:?}");
    engine.handle(swept(&[]), now);
    now = at_ms(2_000);
    assert_eq!(swept_page(&mut engine, now).after, None);
    engine.handle(swept(&[first[0], first[1], first[2], ("late", 5)]), now);
    let Some(Action::Close(batch)) = engine.poll_actions(now).into_iter().next() else { panic!("nothing to close") };
    assert_eq!(names(&batch), ["late"], "those that failed before are in another batch");
    finish(&mut engine, batch, &found(Outcome::Closed), now);
    // The other closer still has the good one, so they wait for this one.
    now = now + policy().retry_longest;
    let Some(Action::Close(batch)) = engine.poll_actions(now).into_iter().next() else { panic!("no retry") };
    assert_eq!((batch.by, names(&batch)), (ClosedBy::Sweep, vec!["bad-1", "bad-2", "bad-3"]));
}

/// Finds this order overdue and fails every try until then; returns how often it was tried.
fn tries_of_a_swept_order(error: &CloseError, orders: &[(&str, i64)], until: Timestamp) -> usize {
    let (mut engine, mut now, mut tries) = (sweeping_engine(), at_ms(250), 0);
    run_until(&mut engine, &mut now, until, orders, |batch, _| {
        tries += usize::from(names(batch) == [orders[0].0]);
        Err(error.clone())
    });
    tries
}

#[test]
fn blameless_overdue_order_is_retried_every_pass() {
    let minute = at_ms(60_000);
    let tries = |error: CloseError, orders: &[(&str, i64)]| tries_of_a_swept_order(&error, orders, minute);
    let several = [("a", 1), ("b", 2)];
    assert!(tries(CloseError::Locked("a table".into()), &several[..1]) > 100);
    assert!(tries(CloseError::Transient("a timeout".into()), &several) > 100, "shared failure");
    assert!(tries(CloseError::Transient("a timeout".into()), &several[..1]) < 20, "it may be its own trigger");
    assert!(tries(CloseError::Rejected("a trigger says no".into()), &several) < 20);
}

#[test]
fn page_without_usable_ids_continues_pass() {
    let mut engine = sweeping_engine();
    swept_page(&mut engine, at_ms(250));
    let next = Some(place(&("\t", 7)));
    engine.handle(Input::Swept(SweptPage { orders: vec![], next: next.clone() }), at_ms(251));
    assert_eq!(swept_page(&mut engine, at_ms(251)).after, next);
}

#[test]
fn locked_article_under_sweep_is_no_outage() {
    let (mut engine, mut now, mut waited) = (sweeping_engine(), at_ms(250), 0);
    run_until(&mut engine, &mut now, at_ms(20_000), &[("a", 1), ("b", 1)], |batch, _| {
        waited += usize::from(batch.waits_for_locks());
        if batch.waits_for_locks() { Err(CloseError::Locked("a lock".into())) } else { found(Outcome::Busy) }
    });
    assert!((10..=25).contains(&waited), "{waited} times: once a second, once the failing order is known");
    assert_eq!(engine.snapshot(now).unavailable, None);
    engine.handle(delivered("c", now, 1, 1), now);
    let closes = |action| if let Action::Close(batch) = action { Some(batch) } else { None };
    let later = now + Duration::from_millis(2);
    let mut alarms =
        engine.poll_actions(later).into_iter().filter_map(closes).filter(|batch| batch.by == ClosedBy::Alarm);
    assert!(alarms.next().expect("an alarm's batch").waits_for_locks());
}

#[test]
fn sweep_waits_for_locks_with_spare_closer() {
    let waits_with = |busy_closers: u64| {
        let mut engine = sweeping_engine();
        for tag in 1..=busy_closers {
            engine.handle(delivered("takes long", at_ms(240), 1, tag), at_ms(240));
            assert_eq!(batches(&mut engine, at_ms(242)).len(), 1);
        }
        swept_page(&mut engine, at_ms(250));
        engine.handle(swept(&[("overdue", 1)]), at_ms(250));
        [250, 275, 300].map(|at| {
            let batch = batches(&mut engine, at_ms(at)).remove(0);
            let waits = batch.waits_for_locks();
            finish(&mut engine, batch, &found(Outcome::Busy), at_ms(at));
            waits
        })
    };
    assert_eq!(waits_with(0), [false, false, true]);
    assert_eq!(waits_with(1), [false; 3]);
}

#[test]
fn overdue_order_never_waits_for_others_lock() {
    let mut engine = sweeping_engine();
    swept_page(&mut engine, at_ms(250));
    engine.handle(swept(&[("free", 1), ("of a locked article", 2), ("at another worker", 3)]), at_ms(250));
    let mut rounds = Vec::new();
    for at in [250, 275, 300] {
        let batch = batches(&mut engine, at_ms(at)).remove(0);
        rounds.push((names(&batch).join(", "), batch.waits_for_locks()));
        let result = |item: &WorkItem| match item.alarm.order_id().as_str() {
            "free" => found(Outcome::Closed),
            "at another worker" if at > 250 => found(Outcome::AlreadyClosed),
            _ => found(Outcome::Busy),
        };
        let results = batch.items.iter().map(|item| (item.alarm.order_id().clone(), result(item))).collect();
        engine.handle(Input::Closed(batch, Ok(results)), at_ms(at));
    }
    let round = |names: &str, waits_for_locks| (names.to_owned(), waits_for_locks);
    let of_all = round("free, of a locked article, at another worker", false);
    let of_two = round("of a locked article, at another worker", false);
    assert_eq!(rounds, [of_all, of_two, round("of a locked article", true)]);
}

#[test]
fn busy_order_is_retried_in_own_batch() {
    let mut engine = sweeping_engine();
    assert_eq!(swept_page(&mut engine, at_ms(250)).after, None);
    engine.handle(swept(&[("refused-elsewhere", 1)]), at_ms(251));
    let batch = batches(&mut engine, at_ms(251)).remove(0);
    finish(&mut engine, batch, &found(Outcome::Busy), at_ms(252));
    for at in [277, 302] {
        let batch = batches(&mut engine, at_ms(at)).remove(0);
        finish(&mut engine, batch, &found(Outcome::Busy), at_ms(at));
    }
    assert_eq!(swept_page(&mut engine, at_ms(500)).after, None);
    engine.handle(swept(&[("refused-elsewhere", 1), ("good", 2)]), at_ms(501));
    let tried =
        |engine: &mut Engine, at| batches(engine, at).iter().map(|batch| names(batch).join(" ")).collect::<Vec<_>>();
    assert_eq!(tried(&mut engine, at_ms(501)), ["good"]);
    assert_eq!(tried(&mut engine, at_ms(526)), ["refused-elsewhere"]);
}

#[test]
fn busy_order_is_retried_twice_per_pass() {
    let mut engine = sweeping_engine();
    let mut pass = |at: i64| {
        assert_eq!(swept_page(&mut engine, at_ms(at)).after, None);
        engine.handle(swept(&[("busy", 1)]), at_ms(at));
        let mut tries = Vec::new();
        for later in 0..250 {
            for action in engine.poll_actions(at_ms(at + later)) {
                let Action::Close(batch) = action else { panic!("{action:?}") };
                tries.push(later);
                finish(&mut engine, batch, &found(Outcome::Busy), at_ms(at + later));
            }
        }
        tries
    };
    assert_eq!(pass(250), [0, 25, 50], "a lock is mostly held for milliseconds");
    assert_eq!(pass(500), [25], "or for long");
    assert_eq!(pass(750), [25]);
}

/// How often an order is tried in a minute if the close returns this outcome every time.
fn tries_of_a_settled_order(outcome: Outcome) -> usize {
    let (mut engine, mut now, mut tries) = (sweeping_engine(), at_ms(250), 0);
    run_until(&mut engine, &mut now, at_ms(60_000), &[("a", 1)], |_, _| {
        tries += 1;
        found(outcome)
    });
    tries
}

#[test]
fn settled_order_found_again_backs_off() {
    for outcome in [Outcome::Paid, Outcome::AlreadyClosed] {
        let tries = tries_of_a_settled_order(outcome);
        assert!((5..=12).contains(&tries), "{outcome:?}: {tries} tries");
    }
    // It may be unpaid again at any time.
    let tries = tries_of_a_settled_order(Outcome::Closing);
    assert!((10..=16).contains(&tries), "{tries} tries");
}

#[test]
fn settled_order_with_new_deadline_is_tried() {
    let (mut engine, mut now) = (sweeping_engine(), at_ms(250));
    run_until(&mut engine, &mut now, at_ms(60_000), &[("a", 1)], |_, _| found(Outcome::Paid));
    let closed = run_until(&mut engine, &mut now, at_ms(60_600), &[("a", 2)], |_, _| found(Outcome::Closed));
    assert_eq!(closed, ["a"]);
}

#[test]
fn repeated_page_ends_pass() {
    let mut engine = sweeping_engine();
    let page = [("a", 1), ("b", 2), ("c", 3), ("d", 4)];
    assert_eq!(swept_page(&mut engine, at_ms(250)).after, None);
    engine.handle(swept(&page), at_ms(251));
    // An overdue statement without $2 and $3 returns the same page each time.
    for now in 251.. {
        let actions = engine.poll_actions(at_ms(now));
        let Some(Action::Sweep(asked)) = actions.into_iter().find(|action| matches!(action, Action::Sweep(_))) else {
            break;
        };
        assert!(now < 260 && asked.after == Some(place(&page[3])), "{asked:?}");
        engine.handle(swept(&page), at_ms(now));
    }
}

#[test]
fn passes_over_backed_off_orders_are_rare() {
    let policy = Policy { sweep_every: Duration::from_millis(250), ..policy() };
    let mut sweep = Sweep::new();
    assert_eq!(sweep.page(&policy, REACH, at_ms(0)), None);
    let page = |sweep: &mut Sweep, at: i64| sweep.page(&policy, REACH, at_ms(at)).expect("a page").after;
    let found = |sweep: &mut Sweep, orders: &[(&str, i64)], at: i64| {
        let Input::Swept(page) = swept(orders) else { unreachable!() };
        sweep.take_page(page, &policy, at_ms(at)).len()
    };
    let resting = [("a", 1), ("b", 2), ("c", 3), ("d", 4)];
    for (id, _) in resting {
        for _ in 0..12 {
            sweep.back_off(OrderId::new(id).unwrap(), Duration::from_secs(300), at_ms(0));
        }
    }
    // A whole pass takes 200 ms, so the next one begins 1.8 s after it.
    assert_eq!(page(&mut sweep, 250), None);
    assert_eq!(found(&mut sweep, &resting, 350), 0);
    let last = Some(place(&resting[3]));
    assert_eq!(page(&mut sweep, 350), last);
    assert_eq!(found(&mut sweep, &[], 450), 0);
    for at in (500..2_250).step_by(250) {
        assert_eq!(page(&mut sweep, at), last, "at {at} ms it begins behind them");
        assert_eq!(found(&mut sweep, &[("new", 5)], at), 1, "new overdue orders are found as before");
    }
    assert_eq!(page(&mut sweep, 2_250), None);
    assert_eq!(found(&mut sweep, &resting[..3], 2_250), 0);
    assert_eq!(page(&mut sweep, 2_500), None, "a pass that takes no time is followed at once");
}

#[test]
fn long_pass_pauses_for_new_orders() {
    let policy = Policy { sweep_every: Duration::from_millis(250), ..policy() };
    let mut sweep = Sweep::new();
    assert_eq!(sweep.page(&policy, REACH, at_ms(0)), None);
    let resting = [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5), ("f", 6), ("g", 7), ("h", 8)];
    for (id, _) in resting {
        for _ in 0..12 {
            sweep.back_off(OrderId::new(id).unwrap(), Duration::from_secs(300), at_ms(0));
        }
    }
    let (middle, end) = (Some(place(&resting[3])), Some(place(&resting[7])));
    // Each page takes 300 ms; checks after which place it continues and returns how many orders it has to try.
    let mut now = 250;
    let mut turn = |after: &Option<SweepPlace>, orders: &[(&str, i64)]| {
        assert_eq!(&sweep.page(&policy, REACH, at_ms(now)).expect("a page").after, after, "at {now} ms");
        now += 300;
        let Input::Swept(page) = swept(orders) else { unreachable!() };
        sweep.take_page(page, &policy, at_ms(now)).len()
    };
    assert_eq!(turn(&None, &resting[..4]), 0);
    assert_eq!(turn(&middle, &resting[4..]), 0);
    assert_eq!(turn(&end, &[]), 0);
    for _ in 0..14 {
        assert_eq!(turn(&end, &[("new", 9)]), 1, "short passes, for nine times as long");
    }
    assert_eq!(turn(&None, &resting[..4]), 0);
    assert_eq!(turn(&end, &[("new", 9)]), 1, "it pauses");
    assert_eq!(turn(&middle, &resting[4..]), 0);
    assert_eq!(turn(&end, &[("new", 9)]), 1, "and again");
    assert_eq!(turn(&end, &[("new", 9)]), 1, "its own end");
}
