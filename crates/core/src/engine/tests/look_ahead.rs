//! Orders that were read before they were due: closed on time without an alarm, once, by one worker.

use super::*;
use crate::order::SweepReach;

/// An engine without a session, whose first page is due at 250 ms.
fn engine_without_session() -> Engine {
    let mut engine = Engine::new(Policy { sweep_every: Duration::from_millis(250), ..policy() });
    assert_eq!(engine.poll_actions(at_ms(0)), vec![]);
    engine
}

/// The batches at this time; pages that are asked for as well are empty.
fn batches_between_pages(engine: &mut Engine, now: Timestamp) -> Vec<Batch> {
    let mut found = Vec::new();
    for action in engine.poll_actions(now) {
        match action {
            Action::Close(batch) => found.push(batch),
            Action::Sweep(_) => engine.handle(swept(&[]), now),
            other => panic!("unexpected {other:?}"),
        }
    }
    found
}

#[test]
fn order_read_ahead_closes_on_time() {
    let mut engine = engine_without_session();
    assert_eq!(swept_page(&mut engine, at_ms(250)).reach, SweepReach::Ahead(policy().look_ahead));
    engine.handle(swept(&[("overdue", -300), ("next", 600)]), at_ms(251));
    let overdue = batches(&mut engine, at_ms(251)).remove(0);
    assert_eq!((overdue.by, names(&overdue)), (ClosedBy::Sweep, vec!["overdue"]));
    finish(&mut engine, overdue, &found(Outcome::Closed), at_ms(252));
    assert_eq!(engine.snapshot(at_ms(252)).oldest_overdue, Some(at_ms(-300)));
    // The next page finds it again, and it is held once.
    assert_eq!(swept_page(&mut engine, at_ms(500)).after, None);
    engine.handle(swept(&[("next", 600)]), at_ms(501));
    assert_eq!(engine.snapshot(at_ms(501)).oldest_overdue, None, "it is not overdue");
    assert_eq!(batches(&mut engine, at_ms(599)), vec![]);
    let next = batches_between_pages(&mut engine, at_ms(602)).remove(0);
    assert_eq!((next.by, names(&next)), (ClosedBy::LookAhead, vec!["next"]));
    finish(&mut engine, next, &found(Outcome::Closed), at_ms(603));
    assert_eq!(engine.snapshot(at_ms(603)).held, 0);
}

#[test]
fn extended_order_is_held_again() {
    let mut engine = engine_without_session();
    swept_page(&mut engine, at_ms(250));
    engine.handle(swept(&[("a", 600)]), at_ms(251));
    let batch = batches_between_pages(&mut engine, at_ms(602)).remove(0);
    let extended = Ok(CloseOutcome { outcome: Outcome::NotDue, deadline: Some(at_ms(5_000)) });
    finish(&mut engine, batch, &extended, at_ms(603));
    assert_eq!(engine.snapshot(at_ms(603)).held, 1);
    assert!(!engine.is_backed_off(&OrderId::new("a").unwrap()));
    assert_eq!(names(&batches_between_pages(&mut engine, at_ms(5_002))[0]), vec!["a"]);
}

#[test]
fn early_database_clock_is_asked_again() {
    let mut engine = engine_without_session();
    swept_page(&mut engine, at_ms(250));
    engine.handle(swept(&[("a", 600)]), at_ms(251));
    let batch = batches_between_pages(&mut engine, at_ms(602)).remove(0);
    let not_yet = Ok(CloseOutcome { outcome: Outcome::NotDue, deadline: Some(at_ms(600)) });
    finish(&mut engine, batch, &not_yet, at_ms(602));
    let again = batches_between_pages(&mut engine, at_ms(605));
    assert_eq!(names(&again[0]), vec!["a"], "a few milliseconds later");
}

#[test]
fn delivery_takes_over_order_read_ahead() {
    let mut engine = engine_without_session();
    swept_page(&mut engine, at_ms(250));
    engine.handle(swept(&[("a", 600)]), at_ms(251));
    engine.handle(Input::SessionOpened(1), at_ms(300));
    engine.handle(delivered("a", at_ms(600), 1, 7), at_ms(301));
    assert_eq!(engine.poll_actions(at_ms(301)), vec![], "nothing is settled before the close");
    let batch = batches_between_pages(&mut engine, at_ms(602)).remove(0);
    assert_eq!((batch.by, batch.items.len()), (ClosedBy::Alarm, 1));
    finish(&mut engine, batch, &found(Outcome::Closed), at_ms(603));
    let settled = Action::Settle(vec![(Receipt { session: 1, channel: 0, tag: 7 }, Settlement::Ack)]);
    assert!(engine.poll_actions(at_ms(603)).contains(&settled));
}

#[test]
fn reading_ahead_ends_after_catching_up() {
    let mut engine = engine_without_session();
    swept_page(&mut engine, at_ms(250));
    engine.handle(swept(&[]), at_ms(251));
    engine.handle(Input::SessionOpened(1), at_ms(300));
    assert_eq!(swept_page(&mut engine, at_ms(500)).reach, SweepReach::Ahead(policy().look_ahead));
    engine.handle(swept(&[]), at_ms(501));
    assert_eq!(swept_page(&mut engine, at_ms(31_000)).reach, SweepReach::Overdue(policy().sweep_grace));
    engine.handle(swept(&[]), at_ms(31_001));
    engine.handle(Input::SessionEnded, at_ms(31_002));
    assert_eq!(swept_page(&mut engine, at_ms(31_500)).reach, SweepReach::Ahead(policy().look_ahead));
}

#[test]
fn clock_set_ahead_begins_reading_ahead() {
    let mut engine = sweeping_engine();
    let now = at_ms(3_600_000);
    engine.handle(Input::ClockSetAhead, now);
    assert_eq!(swept_page(&mut engine, now).reach, SweepReach::Ahead(policy().look_ahead));
    engine.handle(swept(&[("a", 1_800_000)]), now);
    let batch = batches(&mut engine, now).remove(0);
    finish(&mut engine, batch, &found(Outcome::Closed), now);
    assert_eq!(engine.snapshot(now).closed_without_alarm, 0, "no alarm of it had to be here");
}

#[test]
fn session_from_start_reads_nothing_ahead() {
    let mut engine = sweeping_engine();
    assert_eq!(swept_page(&mut engine, at_ms(250)).reach, SweepReach::Overdue(policy().sweep_grace));
}

#[test]
fn other_workers_share_is_taken_late() {
    let mut engines = [engine_without_session(), engine_without_session()];
    let orders: Vec<(String, i64)> = (0..4).map(|n| (format!("order-{n}"), 600)).collect();
    let page: Vec<(&str, i64)> = orders.iter().map(|(id, at)| (id.as_str(), *at)).collect();
    let mut closed: Vec<String> = Vec::new();
    for (index, engine) in (0..).zip(&mut engines) {
        engine.handle(Input::ShareChanged(Share::new(index, 2)), at_ms(1));
        swept_page(engine, at_ms(250));
        engine.handle(swept(&page), at_ms(251));
        engine.handle(swept(&[]), at_ms(251));
        for batch in batches_between_pages(engine, at_ms(603)) {
            closed.extend(names(&batch).into_iter().map(str::to_owned));
        }
    }
    closed.sort();
    assert_eq!(closed, orders.iter().map(|(id, _)| id.clone()).collect::<Vec<_>>(), "each by one worker");

    // The other worker has ended without closing its own.
    let mut alone = engine_without_session();
    alone.handle(Input::ShareChanged(Share::new(0, 2)), at_ms(1));
    swept_page(&mut alone, at_ms(250));
    alone.handle(swept(&page[..3]), at_ms(251));
    let own = batches_between_pages(&mut alone, at_ms(603)).iter().map(|batch| batch.items.len()).sum::<usize>();
    swept_page(&mut alone, at_ms(1_200));
    alone.handle(swept(&page[..3]), at_ms(1_201));
    let late = batches_between_pages(&mut alone, at_ms(1_201)).iter().map(|batch| batch.items.len()).sum::<usize>();
    assert_eq!((own < 3, own + late), (true, 3));
}

/// An engine with a session that has just closed an order by the sweep, half a second late.
fn engine_that_swept() -> Engine {
    let mut engine = sweeping_engine();
    assert_eq!(swept_page(&mut engine, at_ms(250)).reach, SweepReach::Overdue(policy().sweep_grace));
    close_swept(&mut engine, "late", Outcome::Closed, at_ms(251));
    engine
}

/// The page that is being read has this order, whose close has this outcome.
fn close_swept(engine: &mut Engine, order: &str, outcome: Outcome, now: Timestamp) {
    engine.handle(swept(&[(order, -300)]), now);
    let batch = batches(engine, now).remove(0);
    assert_eq!(batch.by, ClosedBy::Sweep);
    finish(engine, batch, &found(outcome), now);
}

fn reads_ahead(engine: &mut Engine, now: Timestamp) -> bool {
    let reach = swept_page(engine, now).reach;
    engine.handle(swept(&[]), now);
    reach == SweepReach::Ahead(policy().look_ahead)
}

/// Reads this order ahead, has its alarm delivered if `tag` is given, and closes it at its deadline.
fn close_read_ahead(engine: &mut Engine, order: &str, deadline_ms: i64, tag: Option<u64>) {
    swept_page(engine, at_ms(deadline_ms - 300));
    engine.handle(swept(&[(order, deadline_ms)]), at_ms(deadline_ms - 299));
    if let Some(tag) = tag {
        engine.handle(delivered(order, at_ms(deadline_ms), 1, tag), at_ms(deadline_ms - 298));
    }
    let batch = batches_between_pages(engine, at_ms(deadline_ms + 2)).remove(0);
    assert_eq!(batch.by, if tag.is_some() { ClosedBy::Alarm } else { ClosedBy::LookAhead });
    finish(engine, batch, &found(Outcome::Closed), at_ms(deadline_ms + 3));
    let settled = engine.poll_actions(at_ms(deadline_ms + 3));
    assert_eq!(settled.len(), usize::from(tag.is_some()));
}

#[test]
fn late_alarm_starts_reading_ahead() {
    let mut engine = engine_that_swept();
    assert_eq!(engine.snapshot(at_ms(251)).closed_without_alarm, 0, "the session is new");
    assert!(reads_ahead(&mut engine, at_ms(500)));
    assert!(reads_ahead(&mut engine, at_ms(30_250)));
    assert!(!reads_ahead(&mut engine, at_ms(30_600)));
}

#[test]
fn paid_or_locked_order_starts_nothing() {
    let mut engine = sweeping_engine();
    swept_page(&mut engine, at_ms(250));
    close_swept(&mut engine, "paid", Outcome::Paid, at_ms(251));
    swept_page(&mut engine, at_ms(500));
    close_swept(&mut engine, "locked", Outcome::Busy, at_ms(501));
    let again = batches(&mut engine, at_ms(530)).remove(0);
    finish(&mut engine, again, &found(Outcome::Closed), at_ms(531));
    assert!(!reads_ahead(&mut engine, at_ms(750)));
    assert_eq!(engine.snapshot(at_ms(750)).closed_without_alarm, 0);
}

#[test]
fn reading_ahead_lasts_while_alarms_are_late() {
    let mut engine = engine_that_swept();
    close_read_ahead(&mut engine, "a", 20_000, None);
    assert_eq!(engine.snapshot(at_ms(20_003)).closed_without_alarm, 1);
    assert!(reads_ahead(&mut engine, at_ms(49_900)), "30 s after the last one");
    assert!(!reads_ahead(&mut engine, at_ms(50_300)));
}

#[test]
fn timely_alarms_end_reading_ahead() {
    let mut engine = engine_that_swept();
    close_read_ahead(&mut engine, "a", 20_000, Some(1));
    let found = engine.snapshot(at_ms(20_003));
    assert_eq!((found.closed_without_alarm, found.closed_in_time), (0, 1));
    assert!(!reads_ahead(&mut engine, at_ms(30_600)));
}

#[test]
fn alarms_of_other_workers_are_not_late() {
    let share = Share::new(0, 2);
    let ids = (0..).map(|n| OrderId::new(format!("order-{n}")).unwrap());
    let own: Vec<String> = ids.filter(|id| share.has(id)).take(3).map(|id| id.as_str().to_owned()).collect();
    let mut engine = engine_that_swept();
    engine.handle(Input::ShareChanged(share), at_ms(300));
    close_read_ahead(&mut engine, &own[0], 15_000, Some(1));
    close_read_ahead(&mut engine, &own[1], 20_000, None);
    assert_eq!(engine.snapshot(at_ms(20_003)).closed_without_alarm, 0, "its alarm may be with the other worker");
    close_read_ahead(&mut engine, &own[2], 28_000, None);
    assert_eq!(engine.snapshot(at_ms(28_003)).closed_without_alarm, 1, "this worker gets none either");
    assert!(reads_ahead(&mut engine, at_ms(57_900)));
}

#[test]
fn order_read_ahead_goes_before_alarms() {
    let mut engine = engine_that_swept();
    swept_page(&mut engine, at_ms(500));
    engine.handle(swept(&[("real", 700)]), at_ms(501));
    for tag in 1..=20 {
        engine.handle(delivered(&format!("flood-{tag}"), at_ms(600), 1, tag), at_ms(550));
    }
    // Both closers are busy until the order is due.
    let busy = batches_between_pages(&mut engine, at_ms(602));
    assert_eq!(busy.len(), 2);
    assert_eq!(batches_between_pages(&mut engine, at_ms(703)), vec![]);
    for batch in busy {
        finish(&mut engine, batch, &found(Outcome::Unknown), at_ms(703));
    }
    let next = batches_between_pages(&mut engine, at_ms(703)).remove(0);
    assert_eq!((next.by, names(&next)), (ClosedBy::LookAhead, vec!["real"]));
}

#[test]
fn timely_alarm_goes_before_late_ones() {
    let mut engine = engine_that_swept();
    for tag in 2..=20 {
        engine.handle(delivered(&format!("flood-{tag}"), at_ms(0), 1, tag), at_ms(1_400));
    }
    let mut flood = batches_between_pages(&mut engine, at_ms(1_402));
    assert_eq!(flood.len(), 1, "the other closer is left to those in time");
    let flood = flood.remove(0);
    engine.handle(delivered("good", at_ms(1_500), 1, 1), at_ms(1_403));
    finish(&mut engine, flood, &found(Outcome::Unknown), at_ms(1_510));
    let next = batches_between_pages(&mut engine, at_ms(1_510));
    assert_eq!((next.len(), names(&next[0])), (1, vec!["good"]));
}
