//! The oracle: what must hold after every step, in every calm stretch, and in the end.

use std::collections::BTreeSet;
use std::time::Duration;

use order_timeout::order::{ClosedBy, OrderId, Timestamp};

use crate::events::Event;
use crate::steps::MOST_SKEW_MS;
use crate::world::{Row, Status, WORKERS, World, policy};

/// How long workers may need to find out that a fault is over. Backoff of up to a second end by themselves. Where somebody
/// sets the clock back by two seconds, a worker that next looks around a second later sees it a second behind, and takes
/// that for jitter: what it planned then comes two seconds late.
const RECOVERY: Duration = Duration::from_secs(2);
/// After this long every alarm that was put off for a moment is back in its place.
const BACK_ON_COURSE: Duration = Duration::from_millis(2_500);
/// How long it may take until every order is closed once all faults are over: the furthest deadline is 25 s away, or as
/// much further as the clock was set back; an order that refused again and again is left alone for five minutes.
const LONGEST_SETTLING: Duration = Duration::from_secs(25 + 1_200 + 300 + 60);
/// After this long whoever is not closed waits for something far away, and time goes in steps.
const CALM_WHILE_SETTLING: Duration = Duration::from_secs(40);
const COARSE_STEP: Duration = Duration::from_secs(5);

/// What must hold after every step.
pub fn check(world: &World) -> Result<(), String> {
    let spoken_for = world.spoken_for();
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
        if row.has_alarm && row.status == Status::Unpaid && !spoken_for.contains(order_id) {
            return Err(format!("{order_id} has lost its alarm"));
        }
    }
    let most_blocked = Duration::from_millis(2 * MOST_SKEW_MS.unsigned_abs());
    if world.worst_blocked > most_blocked {
        return Err(format!("a slot kept an alarm for {:?} behind another", world.worst_blocked));
    }
    world.misplaced_retry.clone().map_or(Ok(()), Err)
}

/// A stretch in which nothing disturbs the world, so that whatever falls due in it is closed on time.
struct Calm {
    began: Timestamp,
    /// Whether anybody can close anything in it.
    is_healthy: bool,
    /// How long the sweep leaves an order to its alarm: not at all where none can come.
    grace: Duration,
    /// By how much the workers believe that it is earlier than it is. They hold an alarm for longer by that, and the sweep
    /// leaves an order to the alarm that is held for it.
    behind: Duration,
    /// Who was closed before it began. Not to be told by when: somebody may have set the clock back since.
    closed_before: BTreeSet<OrderId>,
    /// Whose alarm comes in time.
    on_course: BTreeSet<OrderId>,
}

impl Calm {
    fn begin(world: &World) -> Self {
        let is_healthy = !world.database_is_away() && world.somebody_works();
        let grace = if world.broker_is_away() { Duration::ZERO } else { policy().sweep_grace };
        let closed = world.rows.iter().filter(|(_, row)| row.status == Status::Closed);
        let closed_before = closed.map(|(order_id, _)| order_id.clone()).collect();
        let (began, behind, on_course) = (world.database_time(), world.workers_are_behind(), world.on_course());
        Self { began, is_healthy, grace, behind, closed_before, on_course }
    }

    /// When an order must be closed, and by what at the latest; `None` if it was in trouble before, or is not to be closed.
    fn must_be_closed_by(&self, order_id: &OrderId, row: &Row) -> Option<(Timestamp, ClosedBy)> {
        let is_new = row.deadline > self.began + RECOVERY;
        let is_no_matter = row.status == Status::Paid || self.closed_before.contains(order_id);
        let is_in_trouble = row.paying || row.refuses || (row.has_failed && !is_new);
        if !self.is_healthy || is_no_matter || is_in_trouble {
            return None;
        }
        // A close takes no time here, and a worker wakes when it wants to: so these are what the engine promises, and no more.
        if self.on_course.contains(order_id) && row.deadline >= self.began + BACK_ON_COURSE {
            return Some((row.deadline + policy().linger, ClosedBy::Alarm));
        }
        // The sweep finds it at its next look after its alarm has had its grace.
        let sweep = (self.grace + policy().sweep_every).max(self.behind + policy().linger);
        Some((row.deadline.max(self.began + RECOVERY) + sweep, ClosedBy::Sweep))
    }

    fn check(&self, world: &World) -> Result<(), String> {
        let now = world.database_time();
        for (order_id, row) in &world.rows {
            let Some((by, path)) = self.must_be_closed_by(order_id, row) else { continue };
            let closed_at = row.closed.map_or(now, |(at, _)| at);
            if closed_at > by {
                let late = closed_at.since(row.deadline);
                return Err(format!("{order_id} is {late:?} late, and should have been closed by {path:?}"));
            }
        }
        Ok(())
    }

    /// Notes what has fallen due in it and was closed.
    fn note(&self, world: &mut World) {
        let mut events = Vec::new();
        for (order_id, row) in &world.rows {
            let Some((_, closed_by)) = row.closed else { continue };
            match self.must_be_closed_by(order_id, row) {
                Some((_, ClosedBy::Alarm)) => events.push(Event::ClosedToTheMomentInCalm),
                Some(_) if closed_by == ClosedBy::Sweep => events.push(Event::ClosedBySweepInCalm),
                Some(_) | None => {}
            }
        }
        events.into_iter().for_each(|event| world.note(event));
    }
}

/// Lets time pass without a disturbance.
///
/// # Errors
/// If somebody is closed late in it, or a rule is broken.
pub fn calm(world: &mut World, time: Duration) -> Result<(), String> {
    let (calm, end) = (Calm::begin(world), world.now() + time);
    while world.now() < end {
        go_on(world, &calm, end)?;
    }
    calm.note(world);
    Ok(())
}

/// The same for so long, or until a worker is about to close something: so that what is next befalls it then.
///
/// # Errors
/// As above.
pub fn calm_until_a_close(world: &mut World, time: Duration) -> Result<(), String> {
    let (calm, end) = (Calm::begin(world), world.now() + time);
    while world.now() < end {
        let is_about_to_close = world.go_on_until_a_close(end)?;
        check(world)?;
        if is_about_to_close {
            break;
        }
        calm.check(world)?;
    }
    Ok(())
}

fn go_on(world: &mut World, calm: &Calm, end: Timestamp) -> Result<(), String> {
    if world.go_on(end)? {
        check(world)?;
    }
    calm.check(world)
}

/// Every fault ends; then every order that was not paid must close, on time if it was not in trouble before, and the
/// workers must be at work again.
///
/// # Errors
/// If they are not.
pub fn settle(world: &mut World) -> Result<(), String> {
    world.mend();
    (0..WORKERS).for_each(|worker| world.start(worker));
    let is_settled =
        |world: &World| world.rows.values().all(|row| row.status != Status::Unpaid) && world.all_are_consuming();
    let (calm, end) = (Calm::begin(world), world.now() + CALM_WHILE_SETTLING);
    while world.now() < end && !is_settled(world) {
        go_on(world, &calm, end)?;
        // Those that were about to stop.
        (0..WORKERS).for_each(|worker| world.start(worker));
    }
    for _ in 0..LONGEST_SETTLING.as_millis() / COARSE_STEP.as_millis() {
        if is_settled(world) {
            return Ok(());
        }
        world.skip(COARSE_STEP)?;
        check(world)?;
    }
    let open: Vec<_> = world.rows.iter().filter(|(_, row)| row.status == Status::Unpaid).collect();
    Err(format!("never closed, or never consuming again: {open:?}"))
}
