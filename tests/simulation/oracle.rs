//! The oracle: what must hold after every step, in every calm period, and in the end.

use std::collections::BTreeSet;
use std::time::Duration;

use order_timeout_core::order::{ClosedBy, OrderId, Timestamp};

use crate::events::Event;
use crate::steps::{MAX_SKEW_MS, MISSED_TOGETHER};
use crate::world::{PendingSort, Row, Status, Truth, WORKERS, World, policy};

/// How long workers may need to notice that a fault is over. Backoffs of up to a second end by themselves. If the clock
/// is set back by two seconds, a worker that next checks the time a second later sees it one second behind, and takes
/// that for jitter: what it planned then comes two seconds late.
const RECOVERY: Duration = Duration::from_secs(2);
/// How long orders are read ahead after one was closed without its alarm (`engine/look_ahead.rs`).
const READ_AHEAD_FOR: Duration = Duration::from_secs(30);
/// After this long every paused alarm is back in its place.
const PAUSES_OVER: Duration = Duration::from_millis(2_500);
/// How long it may take until every order is closed once all faults are over: the furthest deadline is 25 s away, or as
/// much further as the clock was set back; an order that was refused again and again is backed off for five minutes.
const MAX_SETTLING: Duration = Duration::from_secs(25 + 1_200 + 300 + 60);
/// After this long an order that is still open waits for something far away, and time passes in steps.
const CALM_WHILE_SETTLING: Duration = Duration::from_secs(40);
const COARSE_STEP: Duration = Duration::from_secs(5);

/// What must hold after every step.
pub fn check(world: &World) -> Result<(), String> {
    let orders_with_alarm = world.orders_with_alarm();
    for (order_id, row) in &world.rows {
        let paid = row.status == Status::Paid;
        if paid && row.closes > 0 {
            return Err(format!("{order_id} is paid and was closed"));
        }
        if row.closes > 1 {
            return Err(format!("{order_id} was closed {} times", row.closes));
        }
        if row.closed_early {
            return Err(format!("{order_id} was closed early"));
        }
        if row.stock_returned != row.closes || row.events != row.closes {
            return Err(format!(
                "{order_id}: stock returned {} times, {} events, {} closes",
                row.stock_returned, row.events, row.closes
            ));
        }
        check_money(order_id, row)?;
        if row.has_alarm && row.status == Status::Unpaid && !orders_with_alarm.contains(order_id) {
            return Err(format!("{order_id} has lost its alarm"));
        }
    }
    let most_blocked = Duration::from_millis(2 * MAX_SKEW_MS.unsigned_abs());
    if world.worst_blocked > most_blocked {
        return Err(format!("a slot kept an alarm for {:?} behind another", world.worst_blocked));
    }
    [&world.misplaced_retry, &world.cancelled_unasked, &world.closed_in_pause]
        .into_iter()
        .flatten()
        .next()
        .cloned()
        .map_or(Ok(()), Err)
}

/// What must hold for an order whose attempts to pay are asked about at a provider.
fn check_money(order_id: &OrderId, row: &Row) -> Result<(), String> {
    if row.status == Status::Closed {
        // Anything else is money that was taken, or may still be.
        let open = row.attempts.iter().find(|attempt| attempt.truth != Truth::Closed);
        if let Some(open) = open {
            return Err(format!("{order_id} was closed and its attempt {} is {:?}", open.reference, open.truth));
        }
    }
    if row.settled + row.payments > 1 {
        return Err(format!("{order_id} was settled {} times and paid {} times", row.settled, row.payments));
    }
    // Its money may have been given back since.
    let has_money = row.attempts.iter().any(|attempt| matches!(attempt.truth, Truth::Paid | Truth::Refunded));
    if row.settled > 0 && !has_money {
        return Err(format!("{order_id} was settled as paid without money"));
    }
    Ok(())
}

/// A period in which nothing disturbs the world, so that every order that falls due in it is closed on time.
struct Calm {
    began: Timestamp,
    /// Whether any order can be closed in it.
    is_healthy: bool,
    /// How often closing was paused before it. The brake may trip in it.
    pauses_before: u32,
    /// How long the sweep leaves an order to its alarm: if no alarm can be delivered, only until a batch has lingered.
    grace: Duration,
    /// By how much the workers' time is behind. They hold an alarm for longer by that, and the sweep leaves an order to
    /// the alarm that is held for it.
    behind: Duration,
    /// Orders closed before it began. `closed` does not tell: the clock may have been set back since.
    closed_before: BTreeSet<OrderId>,
    /// Orders with an alarm that comes in time.
    with_timely_alarm: BTreeSet<OrderId>,
    /// Orders without an alarm fall due at this moment, so many that it is known before.
    missed_at: Option<Timestamp>,
}

impl Calm {
    fn begin(world: &World) -> Self {
        // With a provider no time is promised: it may take any time to answer.
        let is_healthy =
            !world.database_is_away() && world.any_worker_runs() && !world.has_provider() && !world.closing_is_paused();
        let grace = if world.broker_is_away() { policy().linger } else { policy().sweep_grace };
        let closed = world.rows.iter().filter(|(_, row)| row.status == Status::Closed);
        let closed_before = closed.map(|(order_id, _)| order_id.clone()).collect();
        let (began, behind, with_timely_alarm) =
            (world.database_time(), world.workers_are_behind(), world.with_timely_alarm());
        let pauses_before = world.pauses();
        Self { began, is_healthy, pauses_before, grace, behind, closed_before, with_timely_alarm, missed_at: None }
    }

    /// A calm period at whose end orders without an alarm fall due. If others fall due shortly before, those are looked at
    /// instead.
    fn with_missed(world: &World, at: Timestamp) -> Self {
        let open = world.rows.values().filter(|row| row.status == Status::Unpaid);
        let looked_at = open.filter(|row| row.deadline <= at && row.deadline + 2 * policy().look_ahead > at).count();
        let is_known = looked_at == MISSED_TOGETHER && world.clocks_agree();
        Self { missed_at: Some(at).filter(|_| is_known), ..Self::begin(world) }
    }

    /// When the sweep first closed an order in it that fell due in it: from then on the worker that did it reads orders
    /// ahead.
    fn reads_ahead_from(&self, world: &World) -> Option<Timestamp> {
        let fell_due = |row: &&Row| row.deadline > self.began + RECOVERY && !row.has_failed && !row.paying;
        let swept = world.rows.iter().filter(|(order_id, _)| !self.closed_before.contains(*order_id));
        let swept = swept.map(|(_, row)| row).filter(fell_due);
        let swept = swept.filter_map(|row| row.closed.filter(|(_, by)| *by == ClosedBy::Sweep));
        swept.map(|(at, _)| at).min().filter(|_| world.clocks_agree())
    }

    /// When an order must be closed at the latest, and by which path; `None` if it had an obstacle before, or is not to
    /// be closed.
    fn must_be_closed_by(
        &self,
        order_id: &OrderId,
        row: &Row,
        reads_ahead_from: Option<Timestamp>,
    ) -> Option<(Timestamp, ClosedBy)> {
        let is_new = row.deadline > self.began + RECOVERY;
        let is_irrelevant = row.status == Status::Paid || self.closed_before.contains(order_id);
        let has_obstacle = row.paying || row.refuses || (row.has_failed && !is_new);
        if !self.is_healthy || is_irrelevant || has_obstacle {
            return None;
        }
        // A close takes no time here, and a worker wakes when it wants to: so these times are exactly what the engine
        // promises.
        if self.with_timely_alarm.contains(order_id) && row.deadline >= self.began + PAUSES_OVER {
            return Some((row.deadline + policy().linger, ClosedBy::Alarm));
        }
        if self.missed_at == Some(row.deadline) {
            return Some((row.deadline + policy().linger, ClosedBy::LookAhead));
        }
        if reads_ahead_from
            .is_some_and(|from| from + 2 * policy().sweep_every <= row.deadline && row.deadline < from + READ_AHEAD_FOR)
        {
            return Some((row.deadline + policy().linger, ClosedBy::LookAhead));
        }
        // The sweep finds it in its next pass after its alarm has had its grace.
        let sweep = (self.grace + policy().sweep_every).max(self.behind + policy().linger);
        Some((row.deadline.max(self.began + RECOVERY) + sweep, ClosedBy::Sweep))
    }

    fn check(&self, world: &World) -> Result<(), String> {
        if world.pauses() > self.pauses_before {
            return Ok(());
        }
        let (now, reads_ahead_from) = (world.database_time(), self.reads_ahead_from(world));
        for (order_id, row) in &world.rows {
            let Some((by, path)) = self.must_be_closed_by(order_id, row, reads_ahead_from) else { continue };
            let closed_at = row.closed.map_or(now, |(at, _)| at);
            if closed_at > by {
                let late = closed_at.since(row.deadline);
                return Err(format!("{order_id} is {late:?} late, and should have been closed by {path:?}"));
            }
        }
        Ok(())
    }

    /// Records which orders fell due in it and were closed.
    fn note(&self, world: &mut World) {
        if world.pauses() > self.pauses_before {
            return;
        }
        let (mut events, reads_ahead_from) = (Vec::new(), self.reads_ahead_from(world));
        for (order_id, row) in &world.rows {
            let Some((_, closed_by)) = row.closed else { continue };
            match self.must_be_closed_by(order_id, row, reads_ahead_from) {
                Some((_, ClosedBy::Alarm)) => events.push(Event::ClosedOnTimeInCalm),
                Some((_, ClosedBy::LookAhead)) if self.missed_at == Some(row.deadline) => {
                    events.push(Event::MissingAlarmsSeen);
                }
                Some((_, ClosedBy::LookAhead)) => events.push(Event::ReadAheadInCalm),
                Some(_) if closed_by == ClosedBy::Sweep => events.push(Event::ClosedBySweepInCalm),
                Some(_) | None => {}
            }
        }
        events.into_iter().for_each(|event| world.note(event));
    }
}

/// Lets time pass without a disturbance.
///
/// If an order is closed late in it, or a rule is broken.
pub fn calm(world: &mut World, time: Duration) -> Result<(), String> {
    let calm = Calm::begin(world);
    play(calm, world, time)
}

/// The same, and orders without an alarm, so many that it is known before, fall due after this time.
///
/// # Errors
/// As above.
pub fn calm_with_missed(world: &mut World, time: Duration) -> Result<(), String> {
    let calm = Calm::with_missed(world, world.database_time() + time);
    play(calm, world, time + Duration::from_secs(1))
}

fn play(calm: Calm, world: &mut World, time: Duration) -> Result<(), String> {
    let end = world.now() + time;
    while world.now() < end {
        run_to_next_event(world, &calm, end)?;
    }
    calm.note(world);
    Ok(())
}

/// The same for this long, or until a worker is about to do something of this sort, so that the next step hits that.
///
/// # Errors
/// As above.
pub fn calm_until(world: &mut World, sort: PendingSort, time: Duration) -> Result<(), String> {
    let (calm, end) = (Calm::begin(world), world.now() + time);
    while world.now() < end {
        let is_about_to = world.run_to_next(sort, end)?;
        check(world)?;
        if is_about_to {
            break;
        }
        calm.check(world)?;
    }
    Ok(())
}

fn run_to_next_event(world: &mut World, calm: &Calm, end: Timestamp) -> Result<(), String> {
    if world.run_to_next_event(end)? {
        check(world)?;
    }
    calm.check(world)
}

/// Ends every fault; then every unpaid order must be closed, on time if it had no obstacle before, and the workers must
/// consume again. If the brake trips, closing is resumed, and the same holds from then on. With a provider, an order may also be settled as paid, or be listed for a person.
///
/// # Errors
/// If they are not.
pub fn settle(world: &mut World) -> Result<(), String> {
    world.end_faults();
    (0..WORKERS).for_each(|worker| world.start(worker));
    let has_ended = |world: &World, (id, row): (&OrderId, &Row)| !row.is_open() || world.is_unresolved(id);
    let is_settled = |world: &World| world.rows.iter().all(|row| has_ended(world, row)) && world.all_are_consuming();
    let (mut calm, end) = (Calm::begin(world), world.now() + CALM_WHILE_SETTLING);
    while world.now() < end && !is_settled(world) {
        run_to_next_event(world, &calm, end)?;
        if world.closing_is_paused() {
            world.resume_closing();
            calm = Calm::begin(world);
        }
        // Restarts the workers that were about to stop.
        (0..WORKERS).for_each(|worker| world.start(worker));
    }
    for _ in 0..MAX_SETTLING.as_millis() / COARSE_STEP.as_millis() {
        if is_settled(world) {
            return Ok(());
        }
        world.resume_closing();
        world.skip(COARSE_STEP)?;
        check(world)?;
    }
    let open: Vec<_> = world.rows.iter().filter(|row| !has_ended(world, *row)).collect();
    Err(format!("never closed, or never consuming again: {open:?}"))
}
