//! Who goes to a closer with whom, and when; and what becomes of a batch that fails.

use super::*;

#[test]
fn an_early_alarm_waits_for_its_deadline_and_for_those_who_fall_due_soon_after_it() {
    let mut engine = Engine::new(policy());
    for (tag, ms) in [(1, 5_000), (2, 5_001), (3, 5_003)] {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(ms), 1, tag), at_ms(1_000));
    }
    assert_eq!(engine.next_wakeup(), Some(at_ms(5_001)), "nobody is woken only to linger");
    assert_eq!(batches(&mut engine, at_ms(5_000)), Vec::<Batch>::new());
    assert_eq!(batches(&mut engine, at_ms(5_001)).remove(0).items.len(), 2);
    assert_eq!(engine.next_wakeup(), Some(at_ms(5_003)), "nobody comes after it, so it waits for nobody");
    assert_eq!(batches(&mut engine, at_ms(5_003)).len(), 1);
}

#[test]
fn an_alarm_that_comes_late_lingers_for_those_who_come_with_it() {
    let mut engine = Engine::new(policy());
    engine.handle(delivered("a", at_ms(5_000), 1, 1), at_ms(5_001));
    assert_eq!(batches(&mut engine, at_ms(5_001)), Vec::<Batch>::new());
    assert_eq!(engine.next_wakeup(), Some(at_ms(5_003)));
    assert_eq!(batches(&mut engine, at_ms(5_003)).len(), 1);
}

#[test]
fn a_full_batch_does_not_linger_and_no_more_batches_go_out_than_there_are_closers() {
    let mut engine = Engine::new(policy());
    for tag in 1..=10 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let sizes: Vec<usize> = batches(&mut engine, at_ms(1_000)).iter().map(|batch| batch.items.len()).collect();
    assert_eq!(sizes, [3, 3]);
    assert!(engine.next_wakeup().unwrap() > at_ms(1_000_000), "with no closer idle only the sweep is to wake for");
}

#[test]
fn what_is_delivered_late_waits_for_nobody_elses_lock() {
    let mut engine = Engine::new(policy());
    let deadline = at_ms(1_000);
    let in_time = deadline + policy().sweep_grace;
    let late = in_time + Duration::from_millis(1);
    engine.handle(delivered("in time", deadline, 1, 1), in_time);
    engine.handle(delivered("late", deadline, 1, 2), late);
    let tried: Vec<_> = batches(&mut engine, late + policy().linger)
        .into_iter()
        .map(|batch| (names(&batch).join(", "), batch.wait))
        .collect();
    assert_eq!(tried, [("in time".to_owned(), LockMode::WaitFresh), ("late".to_owned(), LockMode::NoWait)]);
}

#[test]
fn what_is_late_in_crowds_waits_for_locks_as_what_is_fresh_does() {
    let waits = |engine: &mut Engine, now| {
        let waits: Vec<_> =
            batches(engine, now).iter().map(|batch| (batch.by, batch.items.len(), batch.wait)).collect();
        waits
    };
    let mut engine = Engine::new(policy());
    let late = at_ms(1_000) + policy().sweep_grace + Duration::from_millis(1);
    for tag in 1..=6 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), late);
    }
    let last_of_them = (ClosedBy::Alarm, 3, LockMode::NoWait);
    assert_eq!(waits(&mut engine, late), [(ClosedBy::Alarm, 3, LockMode::WaitFresh), last_of_them]);

    let mut engine = sweeping_desk();
    engine.handle(swept(&[("a", 1), ("b", 2), ("c", 3), ("d", 4)]), at_ms(252));
    let last_of_them = (ClosedBy::Sweep, 1, LockMode::NoWait);
    let actions = engine.poll_actions(at_ms(252)).into_iter().filter_map(|errand| match errand {
        Action::Close(batch) => Some((batch.by, batch.items.len(), batch.wait)),
        _ => None,
    });
    assert_eq!(actions.collect::<Vec<_>>(), [(ClosedBy::Sweep, 3, LockMode::WaitFresh), last_of_them]);
}

#[test]
fn what_was_tried_before_waits_behind_what_is_fresh() {
    let (mut engine, batch) = desk_with_one_closing();
    answer(&mut engine, batch, &found(Outcome::Unknown), at_ms(1_010));
    for tag in 2..=4 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_060), 1, tag), at_ms(1_050));
    }
    let out = batches(&mut engine, at_ms(1_062));
    let names: Vec<&str> = out[0].items.iter().map(|item| item.alarm.order_id().as_str()).collect();
    assert_eq!(names, ["order-2", "order-3", "order-4"]);
}

#[test]
fn a_batch_that_fails_is_taken_apart_behind_what_waits_until_the_one_to_blame_stands_alone() {
    let mut engine = Engine::new(Policy { batch_size: 100, ..policy() });
    for tag in 1..=100 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let fault = Err(CloseError::Rejected("a trigger says no".into()));
    let mut now = at_ms(1_000);
    let mut out = batches(&mut engine, now);
    assert_eq!(out[0].items.len(), 100);
    let (mut statements, mut closed, mut retried) = (0, 0, false);
    while let Some(batch) = out.pop() {
        statements += 1;
        let to_blame = batch.items.iter().any(|item| item.alarm.order_id().as_str() == "order-42");
        if !to_blame {
            closed += batch.items.len();
            answer(&mut engine, batch, &found(Outcome::Closed), now);
        } else {
            assert!(statements == 1 || batch.wait != LockMode::WaitFresh, "its split_batches come again");
            retried |= batch.items.len() == 1;
            answer(&mut engine, batch, &fault, now);
        }
        now = now + Duration::from_millis(1);
        let more = engine.poll_actions(now).into_iter().filter_map(|errand| match errand {
            Action::Close(batch) => Some(batch),
            _ => None,
        });
        out.extend(more);
    }
    assert_eq!((closed, retried), (99, true));
    assert!(statements <= 1 + 8 + 8 + 8, "{statements} statements");
}

#[test]
fn a_batch_that_waited_for_a_lock_in_vain_is_tried_again_whole_and_for_a_second_nobody_waits() {
    let mut engine = Engine::new(Policy { batch_size: 100, ..policy() });
    for tag in 1..=10 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let waited = batches(&mut engine, at_ms(1_002)).remove(0);
    assert!(waited.waits_for_locks());
    engine.handle(delivered("takes long", at_ms(1_000), 1, 11), at_ms(1_003));
    assert_eq!(batches(&mut engine, at_ms(1_005)).len(), 1);
    answer(&mut engine, waited, &Err(CloseError::Locked("a lock".into())), at_ms(1_200));

    let retry_nowait = batches(&mut engine, at_ms(1_200)).remove(0);
    assert_eq!(
        (retry_nowait.items.len(), retry_nowait.waits_for_locks()),
        (10, false),
        "by the only closer that is idle"
    );
    answer(&mut engine, retry_nowait, &found(Outcome::Closed), at_ms(1_205));
    for (order, ms, patient) in [("soon", 1_300, false), ("later", 2_201, true)] {
        engine.handle(delivered(order, at_ms(ms), 1, 20), at_ms(ms));
        let Some(Action::Close(batch)) = engine.poll_actions(at_ms(ms + 2)).into_iter().next() else { panic!() };
        assert_eq!(batch.waits_for_locks(), patient, "{order}");
        answer(&mut engine, batch, &found(Outcome::Closed), at_ms(ms + 5));
    }
}

#[test]
fn parts_of_a_failed_batch_leave_a_closer_to_what_is_fresh() {
    let mut engine = Engine::new(policy());
    for tag in 1..=3 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let batch = batches(&mut engine, at_ms(1_000)).remove(0);
    answer(&mut engine, batch, &Err(CloseError::Rejected("a trigger says no".into())), at_ms(1_010));
    let split_batches = batches(&mut engine, at_ms(1_010));
    assert_eq!(split_batches.iter().map(|part| part.items.len()).collect::<Vec<_>>(), [1], "one of two closers");
    for tag in 4..=6 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_011), 1, tag), at_ms(1_011));
    }
    assert_eq!(batches(&mut engine, at_ms(1_011)).len(), 1, "the other is there for the fresh");
    let waited_long = at_ms(1_010) + policy().retry_longest;
    let (mut starved, batch) = desk_with_one_closing();
    answer(&mut starved, batch, &found(Outcome::Busy), at_ms(1_010));
    assert_eq!(batches(&mut starved, waited_long).len(), 1, "with nobody fresh it goes");
}

#[test]
fn trouble_that_has_waited_long_does_not_take_the_last_closer_twice_while_others_wait() {
    let mut engine = Engine::new(policy());
    for (order, tag) in [("bad-1", 1), ("bad-2", 2), ("bad-3", 3)] {
        engine.handle(delivered(order, at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let together = batches(&mut engine, at_ms(1_000)).remove(0);
    engine.handle(delivered("takes long", at_ms(1_000), 1, 4), at_ms(1_000));
    assert_eq!(batches(&mut engine, at_ms(1_002)).len(), 1);
    let fault = Err(CloseError::Rejected("a trigger says no".into()));
    answer(&mut engine, together, &fault, at_ms(1_010));

    let parted = batches(&mut engine, at_ms(2_100)).remove(0);
    assert_eq!(names(&parted), ["bad-1"], "it has waited long");
    engine.handle(delivered("good", at_ms(2_100), 1, 5), at_ms(2_100));
    answer(&mut engine, parted, &fault, at_ms(2_110));
    let good = batches(&mut engine, at_ms(2_110)).remove(0);
    assert_eq!(names(&good), ["good"], "though the others are older");
    answer(&mut engine, good, &fault, at_ms(2_120));
    assert_eq!(names(&batches(&mut engine, at_ms(2_120))[0]), ["bad-2"]);
}

#[test]
fn a_full_batch_of_those_who_are_held_waits_for_nobody_else() {
    let mut engine = Engine::new(policy());
    for (tag, ms) in [(1, 5_000), (2, 5_000), (3, 5_001), (4, 5_002)] {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(ms), 1, tag), at_ms(1_000));
    }
    assert_eq!(engine.next_wakeup(), Some(at_ms(5_001)), "the third fills the batch");
    assert_eq!(batches(&mut engine, at_ms(5_001)).remove(0).items.len(), 3);
}

#[test]
fn only_a_lock_that_was_waited_for_in_vain_makes_others_not_wait() {
    for (fault, waits) in
        [(CloseError::Locked("a lock".into()), false), (CloseError::Transient("a deadlock".into()), true)]
    {
        let (mut engine, batch) = desk_with_one_closing();
        answer(&mut engine, batch, &Err(fault), at_ms(1_010));
        engine.handle(delivered("b", at_ms(1_000), 1, 2), at_ms(1_010));
        let patient: Vec<bool> =
            batches(&mut engine, at_ms(1_012)).iter().map(|batch| batch.waits_for_locks()).collect();
        assert!(patient.contains(&false), "what has failed is tried again without waiting");
        assert_eq!(patient.contains(&true), waits);
    }
}

/// What becomes of a batch of an article that is never free, beside one that stays locked: who waits for the first is
/// closed, unless somebody he waits with is `held` by the second, `refused` by a trigger, or `slow`; who does not is busy.
fn never_free(batch: &Batch) -> CloseResult {
    let has = |kind: &str| batch.items.iter().any(|item| item.alarm.order_id().as_str().starts_with(kind));
    match () {
        () if !batch.waits_for_locks() => found(Outcome::Busy),
        () if has("held") => Err(CloseError::Locked("a lock".into())),
        () if has("refused") => Err(CloseError::Rejected("a trigger says no".into())),
        () if has("slow") => Err(CloseError::Transient("a timeout".into())),
        () => found(Outcome::Closed),
    }
}

#[test]
fn orders_of_a_hot_article_are_closed_whoever_else_cannot_be() {
    let hot = ["hot-1", "hot-2", "hot-3", "hot-4"];
    for others in [["held-1", "held-2"], ["refused-1", "refused-2"], ["slow-1", "slow-2"]] {
        let mut engine = Engine::new(Policy { batch_size: 100, ..policy() });
        for (order, tag) in others.into_iter().chain(hot).zip(1..) {
            engine.handle(delivered(order, at_ms(1_000), 1, tag), at_ms(1_000));
        }
        let closed = run_until(&mut engine, &mut at_ms(1_000), at_ms(10_000), &[], |batch, _| never_free(batch));
        assert_eq!(closed, hot, "beside {others:?}");

        let overdue: Vec<(&str, i64)> = others.into_iter().chain(hot).map(|id| (id, 1)).collect();
        let mut engine = sweeping_desk();
        let closed = run_until(&mut engine, &mut at_ms(250), at_ms(10_000), &overdue, |batch, _| never_free(batch));
        assert_eq!(closed, hot, "beside {others:?}");
    }
}

#[test]
fn an_overdue_order_that_was_in_trouble_and_is_only_busy_now_waits_for_its_lock_like_any_other() {
    let hot = [("hot", 1)];
    let closed = run_until(&mut sweeping_desk(), &mut at_ms(250), at_ms(20_000), &hot, |batch, now| {
        if now < at_ms(2_000) { Err(CloseError::Rejected("a trigger says no".into())) } else { never_free(batch) }
    });
    assert_eq!(closed, ["hot"]);
}
