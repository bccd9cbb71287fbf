//! The brake's side of the world: what all workers count together, as `src/effects/brake.rs` and the table `closing_minutes`
//! keep it, and the pause that a trip writes.
//!
//! Judges nothing: `order_timeout_core::brake` does. What is usual is drawn, because no history lasts for days.

use std::collections::BTreeMap;

use order_timeout_core::brake::{Bounds, Counts, Limits, Minute, MinuteCounts, Usual, Window, minute_of, unforeseen};
use order_timeout_core::engine::Input;
use order_timeout_core::order::Timestamp;

use super::World;
use super::worker::Worker;
use crate::events::Event;

/// The minutes that are judged.
const TWO_HOURS: Minute = 120;

/// What the brake is given.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BrakeSetup {
    pub bounds: Bounds,
    /// How many closes of a minute are usual.
    pub closes_per_minute: f64,
    /// Which share of those that alarms wake is usually found paid, and of those that are asked about, paid at the provider.
    pub paid_share: f64,
}

impl BrakeSetup {
    fn usual(&self) -> Usual {
        let (closes_per_minute, paid_share) = (Some(self.closes_per_minute), Some(self.paid_share));
        Usual { closes_per_minute, paid_share, paid_at_provider: paid_share }
    }
}

/// The rows that all workers share.
#[derive(Debug)]
pub(super) struct Brake {
    pub setup: BrakeSetup,
    minutes: BTreeMap<Minute, MinuteCounts>,
    /// When closing was last resumed.
    pub resumed_at: Option<Timestamp>,
}

impl Brake {
    pub fn new(setup: BrakeSetup) -> Self {
        Self { setup, minutes: BTreeMap::new(), resumed_at: None }
    }

    fn minute(&mut self, minute: Minute) -> &mut MinuteCounts {
        self.minutes.entry(minute).or_insert_with(|| MinuteCounts { minute, ..MinuteCounts::default() })
    }

    /// What `closing_minutes::add` does.
    fn add(&mut self, counts: &Counts, now: Minute) {
        let mut not_foreseen = 0;
        for (due, closed) in &counts.closed_by_due {
            let of_due = self.minute((*due).min(now + 1));
            of_due.closed_of_due += closed;
            not_foreseen += unforeseen(*closed, of_due.closed_of_due, of_due.foreseen);
        }
        let of_now = self.minute(now);
        of_now.closed += counts.closed_by_due.values().sum::<u64>();
        of_now.unforeseen += not_foreseen;
        of_now.woken.add(&counts.woken);
        of_now.answers.add(&counts.answers);
    }
}

impl World {
    /// Adds what a worker has counted, and has all of it judged: the worker is told its limits, or closing is paused.
    pub(super) fn turn_brake(&mut self, worker: &mut Worker, now: Timestamp) {
        let (at, is_away) = (self.database_time(), self.database_is_away());
        let Some(brake) = self.brake.as_mut().filter(|_| !is_away) else { return };
        let counts = worker.engine.take_counts();
        let minute = minute_of(at);
        brake.add(&counts, minute);
        let minutes: Vec<MinuteCounts> = brake.minutes.range(minute - TWO_HOURS..).map(|(_, one)| *one).collect();
        let window = Window { minutes: &minutes, now: minute, resumed_in: brake.resumed_at.map(minute_of) };
        let (usual, bounds) = (brake.setup.usual(), brake.setup.bounds);
        match window.judge(&usual, &bounds) {
            Ok(closes_left) => {
                let (paid_share, known_until) = (usual.paid_share, brake.resumed_at);
                let others = worker.others.found(&window, &counts.woken);
                let limits = Limits { paid_share, others, closes_left, counted: counts.total, known_until };
                worker.engine.handle(Input::BrakeLimits(limits), now);
            }
            Err(_) => self.trip_brake(),
        }
    }

    /// Writes the pause.
    pub(super) fn trip_brake(&mut self) {
        if !self.closing_is_paused() {
            self.note(Event::BrakeTripped);
        }
        self.pause_closing();
    }
}
