//! What must hold for every accepted configuration of the wheel, as checks that tests call: no alarm comes late, no
//! retry comes early, and none loops.
//!
//! Pure: a broker's slots and a worker are modelled; time is a number. For tests of this crate and of its dependents
//! (feature `testing`), never for a running program.

use std::time::Duration;

use super::wheel::{Ring, Wheel};
use super::{DelaySettings, Placement};
use crate::order::Timestamp;

type Checked = Result<(), String>;

/// What rounding a TTL up to whole milliseconds may add.
pub const ROUNDING: Duration = Duration::from_millis(1);
/// How far ahead a deadline may be, whatever the rings: none, next to none, about a minute, an hour, months, years.
pub const DELAYS_MS: [u64; 7] = [0, 1, 59_999, 60_000, 61 * 60_000, 32 * 86_400_000, 2 * 365 * 86_400_000];
/// So that no test follows an alarm through more stays in the coarsest ring than this.
const MAX_STAYS: u32 = 300;

/// A configuration that was accepted.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Accepted by [`DelaySettings::validate`].
    pub delay: DelaySettings,
    /// Accepted by [`DelaySettings::validate_hold`].
    pub hold_max: Duration,
    /// Accepted by [`DelaySettings::validate_longest_retry`].
    pub longest_retry: Duration,
}

macro_rules! ensure {
    ($holds:expr, $($why:tt)+) => {
        if !$holds {
            return Err(format!($($why)+));
        }
    };
}

fn coarsest(wheel: &Wheel) -> &Ring {
    wheel.rings().last().expect("one at least")
}

/// The index into [`Wheel::rings`] of the ring of this name.
///
/// # Panics
/// If the wheel has no such ring.
#[must_use]
pub fn index_of(wheel: &Wheel, ring: &str) -> usize {
    wheel.rings().iter().position(|one| one.name == ring).expect("a ring of this wheel")
}

/// The longest delay through which a test follows an alarm.
#[must_use]
pub fn longest_followed(wheel: &Wheel) -> Duration {
    coarsest(wheel).longest_wait() * MAX_STAYS
}

/// In how many slots an alarm waits at most, one after the other: one for each ring, and before that one for each stay
/// in the coarsest ring, which lasts as long as its reach less a unit.
#[must_use]
pub fn max_hops(wheel: &Wheel, ahead: Duration) -> u128 {
    wheel.rings().len() as u128 + ahead.as_micros() / coarsest(wheel).longest_wait().as_micros() + 1
}

/// Returns where an alarm goes, and checks that this is an allowed place.
///
/// # Errors
/// A sentence about what is wrong.
///
/// # Panics
/// If the setup is not one that was accepted.
pub fn placed(setup: &Setup, wheel: &Wheel, due: Timestamp, now: Timestamp) -> Result<Placement, String> {
    let place = wheel.place(due, now);
    match &place {
        // With the two seconds that [`DelaySettings::validate_hold`] leaves for the way, the worker holds it: it does
        // not come back.
        Placement::Due => {
            let longest_hold = setup.hold_max - Duration::from_secs(2);
            ensure!(due.since(now) <= longest_hold, "sent on {:?} before it is due", due.since(now));
        }
        Placement::Slot { ring: name, ttl, .. } => {
            let ring = &wheel.rings()[index_of(wheel, name)];
            ensure!(now + *ttl <= due - ring.early + ROUNDING, "ring {name} releases it too late");
            ensure!(*ttl < ring.span(), "{ttl:?} in ring {name}: its queue expires before");
        }
        other => ensure!(false, "{other:?} is no place in the wheel"),
    }
    Ok(place)
}

/// Follows an alarm from slot to slot until the worker holds it. Each slot releases it, or a worker handles it, this
/// much late.
///
/// # Errors
/// A sentence about what is wrong.
///
/// # Panics
/// If the setup is not one that was accepted.
pub fn check_alarm_arrives(setup: &Setup, due: Timestamp, now: Timestamp, late: &[Duration]) -> Checked {
    let wheel = setup.delay.wheel().expect("accepted rings mesh");
    let (mut now, mut hops, most) = (now, 0, max_hops(&wheel, due.since(now)));
    let mut late = late.iter().copied().chain(std::iter::repeat(Duration::ZERO));
    let mut arrives_by = (due - setup.delay.lead).max(now) + ROUNDING;
    while let Placement::Slot { ring, ttl, .. } = placed(setup, &wheel, due, now)? {
        hops += 1;
        ensure!(hops <= most, "more than {most} slots");
        let late = late.next().unwrap_or_default();
        now = now + ttl + late;
        if late > Duration::ZERO {
            arrives_by = arrives_by.max(now);
        }
        // From the finest ring it comes to the worker directly; if it is further away than that ring reaches, it goes
        // back.
        if index_of(&wheel, &ring) == 0 && due.since(now) <= setup.hold_max {
            break;
        }
    }
    ensure!(now <= arrives_by, "it arrives {:?} too late", now.since(arrives_by));
    ensure!(due.since(now) <= setup.hold_max, "{:?} early: it goes back", due.since(now));
    Ok(())
}

/// Follows a retry until it is back: after its wait, within a unit of its ring, and after at most two hops.
///
/// # Errors
/// A sentence about what is wrong.
///
/// # Panics
/// If the setup is not one that was accepted.
pub fn check_retry_wait(setup: &Setup, wait: Duration, now: Timestamp) -> Checked {
    let wheel = setup.delay.wheel().expect("accepted rings mesh");
    let wake_at = now + wait.min(setup.longest_retry);
    // Due a while ago, like every retry.
    let due = now - Duration::from_millis(1);
    let Placement::Slot { ring, ttl, .. } = wheel.place_retry(wake_at, now) else {
        ensure!(wake_at <= now, "{:?} early, at once", wake_at.since(now));
        return Ok(());
    };
    let ring = index_of(&wheel, &ring);
    let (back, unit) = (now + ttl, wheel.rings()[ring].unit);
    ensure!(back >= wake_at, "{:?} early", wake_at.since(back));
    ensure!(back < wake_at + unit + ROUNDING, "{:?} late in units of {unit:?}", back.since(wake_at));
    ensure!(ring == 0 || unit * 4 <= wake_at.since(now) * 5, "units of {unit:?} for {:?}", wake_at.since(now));
    ensure!(ttl < wheel.rings()[ring].span(), "{ttl:?} in ring {ring}: its queue expires before");
    // From a coarse slot it comes through the inbox.
    ensure!(ring == 0 || wheel.place(due, back) == Placement::Due, "it is written a second time");
    Ok(())
}

/// Both checks, for many delays.
///
/// # Errors
/// A sentence about the first alarm that is early, late or loops.
///
/// # Panics
/// If the setup is not one that was accepted.
pub fn check_no_alarm_loops(setup: &Setup, now: Timestamp) -> Checked {
    let wheel = setup.delay.wheel().expect("accepted rings mesh");
    for delay_ms in DELAYS_MS {
        let delay = Duration::from_millis(delay_ms).min(longest_followed(&wheel));
        check_alarm_arrives(setup, now + delay, now, &[])?;
        check_retry_wait(setup, delay, now)?;
    }
    check_retry_wait(setup, setup.longest_retry, now)
}
