//! Whether the brake would pause closing, of the number of closes: what the dry run would have closed and what it has seen
//! fall due, kept in memory in the place of the table, and compared with what the table says is usual.
//!
//! Writes nothing. The share of paid orders is not known: no alarm wakes a dry run.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use order_timeout_core::brake::{
    Bounds, FORESEE_AHEAD, FORESEEN_MINUTES_BEFORE, Minute, MinuteCounts, Trip, Usual, Window, foreseen_of_gap,
    minute_of, unforeseen,
};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::Deadline;

use crate::effects::due_count::count_due;
use crate::effects::sweep::Sweeper;
use crate::postgres::closing_minutes::{self, KEPT_MINUTES};
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{DatabaseError, now, one_line};

/// What is usual changes slowly.
const LEARN_EVERY: Duration = Duration::from_secs(300);

/// The counts of a kind.
#[derive(Debug)]
pub(super) struct DryBrake {
    kind: Kind,
    bounds: Bounds,
    usual: Usual,
    learned: Option<Instant>,
    now: Minute,
    /// The minute in which orders that fall due were last counted.
    foreseen_in: Option<Minute>,
    minutes: BTreeMap<Minute, MinuteCounts>,
    trip: Option<String>,
}

impl DryBrake {
    pub fn new(kind: Kind, bounds: Bounds) -> Self {
        let (minutes, usual) = (BTreeMap::new(), Usual::default());
        Self { kind, bounds, usual, learned: None, now: 0, foreseen_in: None, minutes, trip: None }
    }

    /// Why it would have paused closing, until a person resumes it.
    pub fn trip(&self) -> Option<&String> {
        self.trip.as_ref()
    }

    /// Reads the time and what is usual, and once a minute counts what falls due, as workers do.
    pub async fn look(&mut self, connections: &WarmConnections, sweeper: &Sweeper) -> Result<(), DatabaseError> {
        let failed = |why: String| DatabaseError(format!("what the brake compares with cannot be read: {why}"));
        let at = connections.run_on_oldest(now).await.map_err(|error| failed(one_line(&error)))?;
        self.now = minute_of(at);
        let is_first = self.foreseen_in.is_none();
        if self.learned.is_none_or(|learned| learned.elapsed() >= LEARN_EVERY) {
            let (kind, since) = (&self.kind, self.now - KEPT_MINUTES);
            let kept = connections.run_on_oldest(async |on| closing_minutes::read_since(on, kind, since).await).await;
            let kept = kept.map_err(|error| failed(one_line(&error)))?;
            self.usual = Usual::of(&kept, self.now);
            self.learned = Some(Instant::now());
            if is_first {
                let last = kept.iter().map(|one| one.minute).filter(|minute| *minute <= self.now).max();
                for (minute, orders) in foreseen_of_gap(last, self.now, &self.usual, &self.bounds) {
                    self.minute(minute).foreseen = Some(orders);
                }
            }
        }
        if self.foreseen_in.is_some_and(|counted| counted >= self.now) {
            return Ok(());
        }
        let counted = count_due(connections.database(), &sweeper.statement(), at).await;
        let counted = counted.map_err(|error| failed(one_line(&error)))?;
        let first = if is_first { self.now } else { self.now + FORESEEN_MINUTES_BEFORE };
        for minute in first..=minute_of(at + FORESEE_AHEAD) {
            let orders = counted.get(&minute).copied();
            let known = self.minute(minute);
            known.foreseen = known.foreseen.max(orders);
        }
        self.foreseen_in = Some(self.now);
        let kept = self.now - KEPT_MINUTES;
        self.minutes.retain(|minute, _| *minute >= kept);
        Ok(())
    }

    /// Orders with these deadlines would have been closed since the last call.
    pub fn note(&mut self, would_close: impl Iterator<Item = Deadline>) {
        for deadline in would_close {
            let due = self.minute(minute_of(deadline));
            due.closed_of_due += 1;
            let not_foreseen = unforeseen(1, due.closed_of_due, due.foreseen);
            let closed_in = self.minute(self.now);
            closed_in.closed += 1;
            closed_in.unforeseen += not_foreseen;
        }
        let minutes: Vec<MinuteCounts> = self.minutes.values().copied().collect();
        let window = Window { minutes: &minutes, now: self.now, resumed_in: None };
        if let Err(Trip(why)) = window.judge(&self.usual, &self.bounds)
            && self.trip.is_none()
        {
            self.trip = Some(format!("the brake would have paused closing: {why}"));
        }
    }

    fn minute(&mut self, minute: Minute) -> &mut MinuteCounts {
        self.minutes.entry(minute).or_insert(MinuteCounts { minute, ..MinuteCounts::default() })
    }
}
