//! Which orders go to a closer together, and when; and what happens to a batch that fails.

use super::*;

#[test]
fn held_alarms_wake_together_within_linger() {
    let mut engine = Engine::new(policy());
    for (tag, ms) in [(1, 5_000), (2, 5_001), (3, 5_003)] {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(ms), 1, tag), at_ms(1_000));
    }
    assert_eq!(engine.next_wakeup(), Some(at_ms(5_001)), "none is woken only to linger");
    assert_eq!(batches(&mut engine, at_ms(5_000)), Vec::<Batch>::new());
    assert_eq!(batches(&mut engine, at_ms(5_001)).remove(0).items.len(), 2);
    assert_eq!(engine.next_wakeup(), Some(at_ms(5_003)), "none comes after it, so it does not linger");
    assert_eq!(batches(&mut engine, at_ms(5_003)).len(), 1);
}

#[test]
fn late_alarm_lingers() {
    let mut engine = Engine::new(policy());
    engine.handle(delivered("a", at_ms(5_000), 1, 1), at_ms(5_001));
    assert_eq!(batches(&mut engine, at_ms(5_001)), Vec::<Batch>::new());
    assert_eq!(engine.next_wakeup(), Some(at_ms(5_003)));
    assert_eq!(batches(&mut engine, at_ms(5_003)).len(), 1);
}

#[test]
fn full_batches_go_at_once_per_closer() {
    let mut engine = Engine::new(policy());
    for tag in 1..=10 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let sizes: Vec<usize> = batches(&mut engine, at_ms(1_000)).iter().map(|batch| batch.items.len()).collect();
    assert_eq!(sizes, [3, 3]);
    assert!(engine.next_wakeup().unwrap() > at_ms(1_000_000), "with no closer idle only the sweep is to wake for");
}

#[test]
fn late_alarm_never_waits_for_locks() {
    let mut engine = Engine::new(policy());
    let deadline = at_ms(1_000);
    let in_time = deadline + policy().sweep_grace;
    let late = in_time + Duration::from_millis(1);
    engine.handle(delivered("in time", deadline, 1, 1), in_time);
    engine.handle(delivered("late", deadline, 1, 2), late);
    let tried: Vec<_> = batches(&mut engine, late + policy().linger)
        .into_iter()
        .map(|batch| (names(&batch).join(", "), batch.lock_mode))
        .collect();
    assert_eq!(tried, [("in time".to_owned(), LockMode::WaitFresh), ("late".to_owned(), LockMode::NoWait)]);
}

#[test]
fn late_alarms_wait_for_timely_ones_but_not_forever() {
    let mut engine = Engine::new(Policy { closers: 1, ..policy() });
    let deadline = at_ms(1_000);
    let mut now = deadline + policy().sweep_grace + Duration::from_millis(1);
    for tag in 1..=9 {
        engine.handle(delivered(&format!("late-{tag}"), deadline, 1, tag), now);
    }
    let until = now + 3 * policy().longest_overdue_pause();
    let mut taken = Vec::new();
    for tag in 10.. {
        if now > until {
            break;
        }
        engine.handle(delivered(&format!("timely-{tag}"), now, 1, tag), now);
        now = now + policy().linger;
        for action in actions(&mut engine, now) {
            let Action::Close(batch) = action else { continue };
            taken.push(names(&batch)[0].split('-').next().unwrap().to_owned());
            finish(&mut engine, batch, &found(Outcome::Closed), now);
        }
    }
    assert_eq!(taken[0], "timely");
    assert_eq!(taken.iter().filter(|first| *first == "late").count(), 3, "{taken:?}");
}

#[test]
fn late_crowd_waits_for_locks_like_fresh() {
    let waits = |engine: &mut Engine, now| {
        let waits: Vec<_> =
            batches(engine, now).iter().map(|batch| (batch.by, batch.items.len(), batch.lock_mode)).collect();
        waits
    };
    let mut engine = Engine::new(policy());
    let late = at_ms(1_000) + policy().sweep_grace + Duration::from_millis(1);
    for tag in 1..=6 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), late);
    }
    let last_of_them = (ClosedBy::Alarm, 3, LockMode::NoWait);
    assert_eq!(waits(&mut engine, late), [(ClosedBy::Alarm, 3, LockMode::WaitFresh), last_of_them]);

    let mut engine = sweeping_engine();
    engine.handle(swept(&[("a", 1), ("b", 2), ("c", 3), ("d", 4)]), at_ms(252));
    let last_of_them = (ClosedBy::Sweep, 1, LockMode::NoWait);
    let actions = engine.poll_actions(at_ms(252)).into_iter().filter_map(|action| match action {
        Action::Close(batch) => Some((batch.by, batch.items.len(), batch.lock_mode)),
        _ => None,
    });
    assert_eq!(actions.collect::<Vec<_>>(), [(ClosedBy::Sweep, 3, LockMode::WaitFresh), last_of_them]);
}

#[test]
fn retries_go_behind_fresh_alarms() {
    let (mut engine, batch) = engine_with_one_closing();
    finish(&mut engine, batch, &found(Outcome::Unknown), at_ms(1_010));
    for tag in 2..=4 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_060), 1, tag), at_ms(1_050));
    }
    let out = batches(&mut engine, at_ms(1_062));
    let names: Vec<&str> = out[0].items.iter().map(|item| item.alarm.order_id().as_str()).collect();
    assert_eq!(names, ["order-2", "order-3", "order-4"]);
}

#[test]
fn failed_batch_splits_until_failing_order_alone() {
    let mut engine = Engine::new(Policy { batch_size: 100, ..policy() });
    for tag in 1..=100 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let error = Err(CloseError::Rejected("a trigger says no".into()));
    let mut now = at_ms(1_000);
    let mut out = batches(&mut engine, now);
    assert_eq!(out[0].items.len(), 100);
    let (mut statements, mut closed, mut retried) = (0, 0, false);
    while let Some(batch) = out.pop() {
        statements += 1;
        let is_at_fault = batch.items.iter().any(|item| item.alarm.order_id().as_str() == "order-42");
        if !is_at_fault {
            closed += batch.items.len();
            finish(&mut engine, batch, &found(Outcome::Closed), now);
        } else {
            assert!(statements == 1 || batch.lock_mode != LockMode::WaitFresh, "its parts are retries");
            retried |= batch.items.len() == 1;
            finish(&mut engine, batch, &error, now);
        }
        now = now + Duration::from_millis(1);
        let more = engine.poll_actions(now).into_iter().filter_map(|action| match action {
            Action::Close(batch) => Some(batch),
            _ => None,
        });
        out.extend(more);
    }
    assert_eq!((closed, retried), (99, true));
    assert!(statements <= 1 + 8 + 8 + 8, "{statements} statements");
}

#[test]
fn locked_batch_retries_whole_without_waiting() {
    let mut engine = Engine::new(Policy { batch_size: 100, ..policy() });
    for tag in 1..=10 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let waited = batches(&mut engine, at_ms(1_002)).remove(0);
    assert!(waited.waits_for_locks());
    engine.handle(delivered("slow statement", at_ms(1_000), 1, 11), at_ms(1_003));
    assert_eq!(batches(&mut engine, at_ms(1_005)).len(), 1);
    finish(&mut engine, waited, &Err(CloseError::Locked("a lock".into())), at_ms(1_200));

    let retry_nowait = batches(&mut engine, at_ms(1_200)).remove(0);
    assert_eq!(
        (retry_nowait.items.len(), retry_nowait.waits_for_locks()),
        (10, false),
        "by the only closer that is idle"
    );
    finish(&mut engine, retry_nowait, &found(Outcome::Closed), at_ms(1_205));
    for (order, ms, waits) in [("soon", 1_300, false), ("later", 2_201, true)] {
        engine.handle(delivered(order, at_ms(ms), 1, 20), at_ms(ms));
        let Some(Action::Close(batch)) = engine.poll_actions(at_ms(ms + 2)).into_iter().next() else { panic!() };
        assert_eq!(batch.waits_for_locks(), waits, "{order}");
        finish(&mut engine, batch, &found(Outcome::Closed), at_ms(ms + 5));
    }
}

#[test]
fn split_batches_leave_closer_to_fresh() {
    let mut engine = Engine::new(policy());
    for tag in 1..=3 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let batch = batches(&mut engine, at_ms(1_000)).remove(0);
    finish(&mut engine, batch, &Err(CloseError::Rejected("a trigger says no".into())), at_ms(1_010));
    let split_batches = batches(&mut engine, at_ms(1_010));
    assert_eq!(split_batches.iter().map(|part| part.items.len()).collect::<Vec<_>>(), [1], "one of two closers");
    for tag in 4..=6 {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(1_011), 1, tag), at_ms(1_011));
    }
    assert_eq!(batches(&mut engine, at_ms(1_011)).len(), 1, "the other is there for the fresh");
    let waited_long = at_ms(1_010) + policy().retry_longest;
    let (mut starved, batch) = engine_with_one_closing();
    finish(&mut starved, batch, &found(Outcome::Busy), at_ms(1_010));
    assert_eq!(batches(&mut starved, waited_long).len(), 1, "with none fresh it goes");
}

#[test]
fn retries_never_take_last_closer_twice() {
    let mut engine = Engine::new(policy());
    for (order, tag) in [("bad-1", 1), ("bad-2", 2), ("bad-3", 3)] {
        engine.handle(delivered(order, at_ms(1_000), 1, tag), at_ms(1_000));
    }
    let together = batches(&mut engine, at_ms(1_000)).remove(0);
    engine.handle(delivered("slow statement", at_ms(1_000), 1, 4), at_ms(1_000));
    assert_eq!(batches(&mut engine, at_ms(1_002)).len(), 1);
    let error = Err(CloseError::Rejected("a trigger says no".into()));
    finish(&mut engine, together, &error, at_ms(1_010));

    let parted = batches(&mut engine, at_ms(2_100)).remove(0);
    assert_eq!(names(&parted), ["bad-1"], "it has waited long");
    engine.handle(delivered("good", at_ms(2_100), 1, 5), at_ms(2_100));
    finish(&mut engine, parted, &error, at_ms(2_110));
    let good = batches(&mut engine, at_ms(2_110)).remove(0);
    assert_eq!(names(&good), ["good"], "though the others are older");
    finish(&mut engine, good, &error, at_ms(2_120));
    assert_eq!(names(&batches(&mut engine, at_ms(2_120))[0]), ["bad-2"]);
}

#[test]
fn full_batch_of_held_alarms_wakes_early() {
    let mut engine = Engine::new(policy());
    for (tag, ms) in [(1, 5_000), (2, 5_000), (3, 5_001), (4, 5_002)] {
        engine.handle(delivered(&format!("order-{tag}"), at_ms(ms), 1, tag), at_ms(1_000));
    }
    assert_eq!(engine.next_wakeup(), Some(at_ms(5_001)), "the third fills the batch");
    assert_eq!(batches(&mut engine, at_ms(5_001)).remove(0).items.len(), 3);
}

#[test]
fn only_failed_lock_wait_stops_waiting() {
    for (fault, waits) in
        [(CloseError::Locked("a lock".into()), false), (CloseError::Transient("a deadlock".into()), true)]
    {
        let (mut engine, batch) = engine_with_one_closing();
        finish(&mut engine, batch, &Err(fault), at_ms(1_010));
        engine.handle(delivered("b", at_ms(1_000), 1, 2), at_ms(1_010));
        let waiting: Vec<bool> =
            batches(&mut engine, at_ms(1_012)).iter().map(|batch| batch.waits_for_locks()).collect();
        assert!(waiting.contains(&false), "what has failed is tried again without waiting");
        assert_eq!(waiting.contains(&true), waits);
    }
}

/// The result of a batch of an article that is always locked for a moment, beside one that stays locked. A batch that
/// waits is closed, unless an order in it is `held` by the second lock, `refused` by a trigger, or `slow`; a batch that
/// does not wait is busy.
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
fn hot_article_closes_beside_failing_orders() {
    let hot = ["hot-1", "hot-2", "hot-3", "hot-4"];
    for others in [["held-1", "held-2"], ["refused-1", "refused-2"], ["slow-1", "slow-2"]] {
        let mut engine = Engine::new(Policy { batch_size: 100, ..policy() });
        for (order, tag) in others.into_iter().chain(hot).zip(1..) {
            engine.handle(delivered(order, at_ms(1_000), 1, tag), at_ms(1_000));
        }
        let closed = run_until(&mut engine, &mut at_ms(1_000), at_ms(10_000), &[], |batch, _| never_free(batch));
        assert_eq!(closed, hot, "beside {others:?}");

        let overdue: Vec<(&str, i64)> = others.into_iter().chain(hot).map(|id| (id, 1)).collect();
        let mut engine = sweeping_engine();
        let closed = run_until(&mut engine, &mut at_ms(250), at_ms(10_000), &overdue, |batch, _| never_free(batch));
        assert_eq!(closed, hot, "beside {others:?}");
    }
}

#[test]
fn failed_overdue_order_later_waits_for_lock() {
    let hot = [("hot", 1)];
    let closed = run_until(&mut sweeping_engine(), &mut at_ms(250), at_ms(20_000), &hot, |batch, now| {
        if now < at_ms(2_000) { Err(CloseError::Rejected("a trigger says no".into())) } else { never_free(batch) }
    });
    assert_eq!(closed, ["hot"]);
}
