//! What the sweep looks at, whom it leaves alone and for how long.

use super::*;

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
    run_until(&mut desk, &mut now, until, orders, |batch, _| {
        tries += usize::from(names(batch) == [orders[0].0]);
        Err(fault.clone())
    });
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
fn a_page_without_a_usable_id_does_not_end_the_pass() {
    let mut desk = sweeping_desk();
    swept_page(&mut desk, at_ms(250));
    let next = Some(place(&("\t", 7)));
    desk.hear(News::Swept(SweptPage { orders: vec![], next: next.clone() }), at_ms(251));
    assert_eq!(swept_page(&mut desk, at_ms(251)).after, next);
}

#[test]
fn an_article_that_stays_locked_under_the_sweep_is_no_outage_and_keeps_no_alarm_from_waiting() {
    let (mut desk, mut now, mut waited) = (sweeping_desk(), at_ms(250), 0);
    run_until(&mut desk, &mut now, at_ms(20_000), &[("a", 1), ("b", 1)], |batch, _| {
        waited += usize::from(batch.is_patient());
        if batch.is_patient() { Err(CloseFault::Locked("a lock".into())) } else { found(Outcome::Busy) }
    });
    assert!((10..=25).contains(&waited), "{waited} times: once a second, when it is known who fails the others");
    assert_eq!(desk.why_it_closes_nothing(now), None);
    desk.hear(delivered("c", now, 1, 1), now);
    let closes = |errand| if let Errand::Close(batch) = errand { Some(batch) } else { None };
    let later = now + Duration::from_millis(2);
    let mut alarms = desk.errands(later).into_iter().filter_map(closes).filter(|batch| batch.by == ClosedBy::Alarm);
    assert!(alarms.next().expect("an alarm's batch").is_patient());
}

#[test]
fn the_sweep_waits_for_locks_once_it_is_known_who_needs_to_and_where_that_leaves_a_closer_to_the_others() {
    let patience_with = |busy_closers: u64| {
        let mut desk = sweeping_desk();
        for tag in 1..=busy_closers {
            desk.hear(delivered("takes long", at_ms(240), 1, tag), at_ms(240));
            assert_eq!(batches(&mut desk, at_ms(242)).len(), 1);
        }
        swept_page(&mut desk, at_ms(250));
        desk.hear(swept(&[("overdue", 1)]), at_ms(250));
        [250, 275, 300].map(|at| {
            let batch = batches(&mut desk, at_ms(at)).remove(0);
            let patient = batch.is_patient();
            answer(&mut desk, batch, &found(Outcome::Busy), at_ms(at));
            patient
        })
    };
    assert_eq!(patience_with(0), [false, false, true]);
    assert_eq!(patience_with(1), [false; 3]);
}

#[test]
fn an_overdue_order_waits_for_nobody_elses_lock() {
    let mut desk = sweeping_desk();
    swept_page(&mut desk, at_ms(250));
    desk.hear(swept(&[("free", 1), ("of a locked article", 2), ("at another worker", 3)]), at_ms(250));
    let mut rounds = Vec::new();
    for at in [250, 275, 300] {
        let batch = batches(&mut desk, at_ms(at)).remove(0);
        rounds.push((names(&batch).join(", "), batch.is_patient()));
        let finding = |case: &Case| match case.alarm.order_id().as_str() {
            "free" => found(Outcome::Closed),
            "at another worker" if at > 250 => found(Outcome::AlreadyClosed),
            _ => found(Outcome::Busy),
        };
        let findings = batch.cases.iter().map(|case| (case.alarm.order_id().clone(), finding(case))).collect();
        desk.hear(News::Closed(batch, Ok(findings)), at_ms(at));
    }
    let round = |names: &str, is_patient| (names.to_owned(), is_patient);
    let of_all = round("free, of a locked article, at another worker", false);
    let of_two = round("of a locked article, at another worker", false);
    assert_eq!(rounds, [of_all, of_two, round("of a locked article", true)]);
}

#[test]
fn an_order_that_somebody_else_has_is_not_tried_again_with_those_never_tried() {
    let mut desk = sweeping_desk();
    assert_eq!(swept_page(&mut desk, at_ms(250)).after, None);
    desk.hear(swept(&[("refused-elsewhere", 1)]), at_ms(251));
    let batch = batches(&mut desk, at_ms(251)).remove(0);
    answer(&mut desk, batch, &found(Outcome::Busy), at_ms(252));
    for at in [277, 302] {
        let batch = batches(&mut desk, at_ms(at)).remove(0);
        answer(&mut desk, batch, &found(Outcome::Busy), at_ms(at));
    }
    assert_eq!(swept_page(&mut desk, at_ms(500)).after, None);
    desk.hear(swept(&[("refused-elsewhere", 1), ("good", 2)]), at_ms(501));
    let tried = |desk: &mut Desk, at| batches(desk, at).iter().map(|batch| names(batch).join(" ")).collect::<Vec<_>>();
    assert_eq!(tried(&mut desk, at_ms(501)), ["good"]);
    assert_eq!(tried(&mut desk, at_ms(526)), ["refused-elsewhere"]);
}

#[test]
fn an_order_that_somebody_else_has_is_tried_twice_more_before_the_next_pass() {
    let mut desk = sweeping_desk();
    let mut pass = |at: i64| {
        assert_eq!(swept_page(&mut desk, at_ms(at)).after, None);
        desk.hear(swept(&[("busy", 1)]), at_ms(at));
        let mut tries = Vec::new();
        for later in 0..250 {
            for errand in desk.errands(at_ms(at + later)) {
                let Errand::Close(batch) = errand else { panic!("{errand:?}") };
                tries.push(later);
                answer(&mut desk, batch, &found(Outcome::Busy), at_ms(at + later));
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
    let (mut desk, mut now, mut tries) = (sweeping_desk(), at_ms(250), 0);
    run_until(&mut desk, &mut now, at_ms(60_000), &[("a", 1)], |_, _| {
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
    let (mut desk, mut now) = (sweeping_desk(), at_ms(250));
    run_until(&mut desk, &mut now, at_ms(60_000), &[("a", 1)], |_, _| found(Outcome::Paid));
    let closed = run_until(&mut desk, &mut now, at_ms(60_600), &[("a", 2)], |_, _| found(Outcome::Closed));
    assert_eq!(closed, ["a"]);
}

#[test]
fn repeated_page_ends_the_pass() {
    let mut desk = sweeping_desk();
    let page = [("a", 1), ("b", 2), ("c", 3), ("d", 4)];
    assert_eq!(swept_page(&mut desk, at_ms(250)).after, None);
    desk.hear(swept(&page), at_ms(251));
    // An overdue statement without $2 and $3 returns the same page each time.
    for now in 251.. {
        let errands = desk.errands(at_ms(now));
        let Some(Errand::Sweep(asked)) = errands.into_iter().find(|errand| matches!(errand, Errand::Sweep(_))) else {
            break;
        };
        assert!(now < 260 && asked.after == Some(place(&page[3])), "{asked:?}");
        desk.hear(swept(&page), at_ms(now));
    }
}

#[test]
fn pass_over_resting_orders_is_seldom() {
    let policy = Policy { sweep_every: Duration::from_millis(250), ..policy() };
    let mut sweep = Sweep::new();
    assert_eq!(sweep.page(&policy, true, at_ms(0)), None);
    let page = |sweep: &mut Sweep, at: i64| sweep.page(&policy, true, at_ms(at)).expect("a page").after;
    let found = |sweep: &mut Sweep, orders: &[(&str, i64)], at: i64| {
        let News::Swept(page) = swept(orders) else { unreachable!() };
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
        let News::Swept(page) = swept(orders) else { unreachable!() };
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
