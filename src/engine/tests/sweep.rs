//! What the sweep looks at, whom it leaves alone and for how long.

use super::*;

#[test]
fn a_pass_through_what_the_closers_are_at_ends_early_but_not_for_ever() {
    let mut engine = sweeping_desk();
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
fn the_sweep_closes_what_no_alarm_speaks_for_and_waits_for_alarms_only_while_they_can_come() {
    let mut engine = sweeping_desk();
    assert_eq!(engine.next_wakeup(), Some(at_ms(250)));
    let page = swept_page(&mut engine, at_ms(250));
    assert_eq!((page.grace, page.after), (policy().sweep_grace, None));
    // One waits for its own deadline here already, as does one that was shortened.
    engine.handle(delivered("held", at_ms(400), 1, 1), at_ms(251));
    engine.handle(delivered("shortened", at_ms(9_000), 1, 2), at_ms(251));
    engine.handle(swept(&[("forgotten", 1), ("shortened", 2), ("held", 400)]), at_ms(252));
    let out = batches(&mut engine, at_ms(252));
    let names: Vec<&str> = out[0].items.iter().map(|item| item.alarm.order_id().as_str()).collect();
    assert_eq!((out[0].by, names), (ClosedBy::Sweep, vec!["forgotten", "shortened"]));
    engine.handle(Input::SessionEnded, at_ms(300));
    let mut actions = engine.poll_actions(at_ms(500));
    let Some(Action::Sweep(page)) = actions.pop() else { panic!("{actions:?}") };
    assert_eq!(page.grace, Duration::ZERO);
}

#[test]
fn a_pass_goes_on_to_the_end_past_orders_that_cannot_be_closed() {
    let mut engine = sweeping_desk();
    assert_eq!(swept_page(&mut engine, at_ms(250)).after, None);
    let first = [("bad-1", 1), ("bad-2", 2), ("bad-3", 3), ("bad-4", 4)];
    engine.handle(swept(&first), at_ms(251));
    let mut actions = engine.poll_actions(at_ms(251));
    assert_eq!(actions.len(), 3, "both closers have work, and the next page is wanted: {actions:?}");
    let fault = Err(CloseError::Rejected("a trigger says no".into()));
    let mut now = at_ms(252);
    let mut page = None;
    while let Some(errand) = actions.pop() {
        match errand {
            Action::Close(batch) => answer(&mut engine, batch, &fault, now),
            Action::Sweep(asked) => page = Some(asked),
            other => panic!("{other:?}"),
        }
        now = now + Duration::from_millis(1);
        actions.extend(engine.poll_actions(now));
    }
    assert_eq!(page.unwrap().after, Some(place(&("bad-4", 4))));
    assert_eq!(engine.backed_off(), 4);
    engine.handle(swept(&[("good", 5)]), now);
    assert_eq!(batches(&mut engine, now)[0].items[0].alarm.order_id().as_str(), "good");
    // The next pass leaves the bad ones alone, for a while.
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
    assert_eq!(names(&batch), ["late"], "those that failed before do not take it with them");
    answer(&mut engine, batch, &found(Outcome::Closed), now);
    // The other closer still has the good one, so they wait for this one.
    now = now + policy().retry_longest;
    let Some(Action::Close(batch)) = engine.poll_actions(now).into_iter().next() else { panic!("nobody tries again") };
    assert_eq!((batch.by, names(&batch)), (ClosedBy::Sweep, vec!["bad-1", "bad-2", "bad-3"]));
}

/// Finds this order overdue and has every try fail until then; returns how often it was tried.
fn tries_of_a_swept_order(fault: &CloseError, orders: &[(&str, i64)], until: Timestamp) -> usize {
    let (mut engine, mut now, mut tries) = (sweeping_desk(), at_ms(250), 0);
    run_until(&mut engine, &mut now, until, orders, |batch, _| {
        tries += usize::from(names(batch) == [orders[0].0]);
        Err(fault.clone())
    });
    tries
}

#[test]
fn an_overdue_order_that_is_not_to_blame_is_tried_as_often_as_the_sweep_looks() {
    let minute = at_ms(60_000);
    let tries = |fault: CloseError, orders: &[(&str, i64)]| tries_of_a_swept_order(&fault, orders, minute);
    let several = [("a", 1), ("b", 2)];
    assert!(tries(CloseError::Locked("a table".into()), &several[..1]) > 100);
    assert!(tries(CloseError::Transient("a timeout".into()), &several) > 100, "everybody's");
    assert!(tries(CloseError::Transient("a timeout".into()), &several[..1]) < 20, "it may be its own trigger");
    assert!(tries(CloseError::Rejected("a trigger says no".into()), &several) < 20);
}

#[test]
fn a_page_without_a_usable_id_does_not_end_the_pass() {
    let mut engine = sweeping_desk();
    swept_page(&mut engine, at_ms(250));
    let next = Some(place(&("\t", 7)));
    engine.handle(Input::Swept(SweptPage { orders: vec![], next: next.clone() }), at_ms(251));
    assert_eq!(swept_page(&mut engine, at_ms(251)).after, next);
}

#[test]
fn an_article_that_stays_locked_under_the_sweep_is_no_outage_and_keeps_no_alarm_from_waiting() {
    let (mut engine, mut now, mut waited) = (sweeping_desk(), at_ms(250), 0);
    run_until(&mut engine, &mut now, at_ms(20_000), &[("a", 1), ("b", 1)], |batch, _| {
        waited += usize::from(batch.waits_for_locks());
        if batch.waits_for_locks() { Err(CloseError::Locked("a lock".into())) } else { found(Outcome::Busy) }
    });
    assert!((10..=25).contains(&waited), "{waited} times: once a second, when it is known who fails the others");
    assert_eq!(engine.unavailable_reason(now), None);
    engine.handle(delivered("c", now, 1, 1), now);
    let closes = |errand| if let Action::Close(batch) = errand { Some(batch) } else { None };
    let later = now + Duration::from_millis(2);
    let mut alarms =
        engine.poll_actions(later).into_iter().filter_map(closes).filter(|batch| batch.by == ClosedBy::Alarm);
    assert!(alarms.next().expect("an alarm's batch").waits_for_locks());
}

#[test]
fn the_sweep_waits_for_locks_once_it_is_known_who_needs_to_and_where_that_leaves_a_closer_to_the_others() {
    let timeout_for = |busy_closers: u64| {
        let mut engine = sweeping_desk();
        for tag in 1..=busy_closers {
            engine.handle(delivered("takes long", at_ms(240), 1, tag), at_ms(240));
            assert_eq!(batches(&mut engine, at_ms(242)).len(), 1);
        }
        swept_page(&mut engine, at_ms(250));
        engine.handle(swept(&[("overdue", 1)]), at_ms(250));
        [250, 275, 300].map(|at| {
            let batch = batches(&mut engine, at_ms(at)).remove(0);
            let patient = batch.waits_for_locks();
            answer(&mut engine, batch, &found(Outcome::Busy), at_ms(at));
            patient
        })
    };
    assert_eq!(timeout_for(0), [false, false, true]);
    assert_eq!(timeout_for(1), [false; 3]);
}

#[test]
fn an_overdue_order_waits_for_nobody_elses_lock() {
    let mut engine = sweeping_desk();
    swept_page(&mut engine, at_ms(250));
    engine.handle(swept(&[("free", 1), ("of a locked article", 2), ("at another worker", 3)]), at_ms(250));
    let mut rounds = Vec::new();
    for at in [250, 275, 300] {
        let batch = batches(&mut engine, at_ms(at)).remove(0);
        rounds.push((names(&batch).join(", "), batch.waits_for_locks()));
        let finding = |item: &WorkItem| match item.alarm.order_id().as_str() {
            "free" => found(Outcome::Closed),
            "at another worker" if at > 250 => found(Outcome::AlreadyClosed),
            _ => found(Outcome::Busy),
        };
        let findings = batch.items.iter().map(|item| (item.alarm.order_id().clone(), finding(item))).collect();
        engine.handle(Input::Closed(batch, Ok(findings)), at_ms(at));
    }
    let round = |names: &str, waits_for_locks| (names.to_owned(), waits_for_locks);
    let of_all = round("free, of a locked article, at another worker", false);
    let of_two = round("of a locked article, at another worker", false);
    assert_eq!(rounds, [of_all, of_two, round("of a locked article", true)]);
}

#[test]
fn an_order_that_somebody_else_has_is_not_tried_again_with_those_never_tried() {
    let mut engine = sweeping_desk();
    assert_eq!(swept_page(&mut engine, at_ms(250)).after, None);
    engine.handle(swept(&[("refused-elsewhere", 1)]), at_ms(251));
    let batch = batches(&mut engine, at_ms(251)).remove(0);
    answer(&mut engine, batch, &found(Outcome::Busy), at_ms(252));
    for at in [277, 302] {
        let batch = batches(&mut engine, at_ms(at)).remove(0);
        answer(&mut engine, batch, &found(Outcome::Busy), at_ms(at));
    }
    assert_eq!(swept_page(&mut engine, at_ms(500)).after, None);
    engine.handle(swept(&[("refused-elsewhere", 1), ("good", 2)]), at_ms(501));
    let tried =
        |engine: &mut Engine, at| batches(engine, at).iter().map(|batch| names(batch).join(" ")).collect::<Vec<_>>();
    assert_eq!(tried(&mut engine, at_ms(501)), ["good"]);
    assert_eq!(tried(&mut engine, at_ms(526)), ["refused-elsewhere"]);
}

#[test]
fn an_order_that_somebody_else_has_is_tried_twice_more_before_the_next_pass() {
    let mut engine = sweeping_desk();
    let mut pass = |at: i64| {
        assert_eq!(swept_page(&mut engine, at_ms(at)).after, None);
        engine.handle(swept(&[("busy", 1)]), at_ms(at));
        let mut tries = Vec::new();
        for later in 0..250 {
            for errand in engine.poll_actions(at_ms(at + later)) {
                let Action::Close(batch) = errand else { panic!("{errand:?}") };
                tries.push(later);
                answer(&mut engine, batch, &found(Outcome::Busy), at_ms(at + later));
            }
        }
        tries
    };
    assert_eq!(pass(250), [0, 25, 50], "whoever has it keeps it for milliseconds, mostly");
    assert_eq!(pass(500), [25], "or for long");
    assert_eq!(pass(750), [25]);
}

/// How often an order is tried in a minute, of which the close says this again and again.
fn tries_of_a_settled_order(outcome: Outcome) -> usize {
    let (mut engine, mut now, mut tries) = (sweeping_desk(), at_ms(250), 0);
    run_until(&mut engine, &mut now, at_ms(60_000), &[("a", 1)], |_, _| {
        tries += 1;
        found(outcome)
    });
    tries
}

#[test]
fn settled_order_found_again_rests_longer() {
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
    let (mut engine, mut now) = (sweeping_desk(), at_ms(250));
    run_until(&mut engine, &mut now, at_ms(60_000), &[("a", 1)], |_, _| found(Outcome::Paid));
    let closed = run_until(&mut engine, &mut now, at_ms(60_600), &[("a", 2)], |_, _| found(Outcome::Closed));
    assert_eq!(closed, ["a"]);
}

#[test]
fn repeated_page_ends_the_pass() {
    let mut engine = sweeping_desk();
    let page = [("a", 1), ("b", 2), ("c", 3), ("d", 4)];
    assert_eq!(swept_page(&mut engine, at_ms(250)).after, None);
    engine.handle(swept(&page), at_ms(251));
    // An overdue statement without $2 and $3 returns the same page each time.
    for now in 251.. {
        let actions = engine.poll_actions(at_ms(now));
        let Some(Action::Sweep(asked)) = actions.into_iter().find(|errand| matches!(errand, Action::Sweep(_))) else {
            break;
        };
        assert!(now < 260 && asked.after == Some(place(&page[3])), "{asked:?}");
        engine.handle(swept(&page), at_ms(now));
    }
}

#[test]
fn pass_over_resting_orders_is_seldom() {
    let policy = Policy { sweep_every: Duration::from_millis(250), ..policy() };
    let mut sweep = Sweep::new();
    assert_eq!(sweep.page(&policy, true, at_ms(0)), None);
    let page = |sweep: &mut Sweep, at: i64| sweep.page(&policy, true, at_ms(at)).expect("a page").after;
    let found = |sweep: &mut Sweep, orders: &[(&str, i64)], at: i64| {
        let Input::Swept(page) = swept(orders) else { unreachable!() };
        sweep.found(page, &policy, at_ms(at)).len()
    };
    let resting = [("a", 1), ("b", 2), ("c", 3), ("d", 4)];
    for (id, _) in resting {
        for _ in 0..12 {
            sweep.leave_alone(OrderId::new(id).unwrap(), Duration::from_secs(300), at_ms(0));
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
        assert_eq!(found(&mut sweep, &[("new", 5)], at), 1, "what falls due is found as soon as ever");
    }
    assert_eq!(page(&mut sweep, 2_250), None);
    assert_eq!(found(&mut sweep, &resting[..3], 2_250), 0);
    assert_eq!(page(&mut sweep, 2_500), None, "a pass that takes no time rests no longer");
}

#[test]
fn long_pass_gives_way_to_newcomers() {
    let policy = Policy { sweep_every: Duration::from_millis(250), ..policy() };
    let mut sweep = Sweep::new();
    assert_eq!(sweep.page(&policy, true, at_ms(0)), None);
    let resting = [("a", 1), ("b", 2), ("c", 3), ("d", 4), ("e", 5), ("f", 6), ("g", 7), ("h", 8)];
    for (id, _) in resting {
        for _ in 0..12 {
            sweep.leave_alone(OrderId::new(id).unwrap(), Duration::from_secs(300), at_ms(0));
        }
    }
    let (middle, end) = (Some(place(&resting[3])), Some(place(&resting[7])));
    // Each page takes so long; after which page is the next one asked for, and how many does it have to try?
    let mut now = 250;
    let mut turn = |after: &Option<SweepPlace>, orders: &[(&str, i64)]| {
        assert_eq!(&sweep.page(&policy, true, at_ms(now)).expect("a page").after, after, "at {now} ms");
        now += 300;
        let Input::Swept(page) = swept(orders) else { unreachable!() };
        sweep.found(page, &policy, at_ms(now)).len()
    };
    assert_eq!(turn(&None, &resting[..4]), 0);
    assert_eq!(turn(&middle, &resting[4..]), 0);
    assert_eq!(turn(&end, &[]), 0);
    for _ in 0..14 {
        assert_eq!(turn(&end, &[("new", 9)]), 1, "short passes, for nine times as long");
    }
    assert_eq!(turn(&None, &resting[..4]), 0);
    assert_eq!(turn(&end, &[("new", 9)]), 1, "it gives way");
    assert_eq!(turn(&middle, &resting[4..]), 0);
    assert_eq!(turn(&end, &[("new", 9)]), 1, "and again");
    assert_eq!(turn(&end, &[("new", 9)]), 1, "its own end");
}
