//! The worker's side of the brake: adds its counts to those of all workers, has counted what falls due, and has the whole
//! judged.
//!
//! Decides nothing: `order_timeout_core::brake` judges. About one turn a second while orders are closed, of a few short
//! statements on the closers' connections; nothing of it is in a close's transaction. `due_count.rs` counts what falls due.

use std::time::{Duration, Instant};

use order_timeout_core::brake::{
    Bounds, Counts, FORESEE_AHEAD, FORESEEN_MINUTES_BEFORE, Limits, Minute, MinuteCounts, OtherWorkers, Trip, Usual,
    Window, Woken, foreseen_of_gap, minute_of,
};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::Timestamp;
use sqlx::PgConnection;
use tokio_util::task::AbortOnDropHandle;
use tracing::{Instrument, debug};

use super::due_count::{DueCounter, Wanted};
use crate::postgres::closing_minutes::{self, KEPT_MINUTES};
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{now, one_line};

/// A worker that closes nothing still records that it runs, and reads what the others have counted.
const IDLE_TURN_EVERY: Duration = Duration::from_secs(10);
/// What is usual changes slowly.
const LEARN_EVERY: Duration = Duration::from_secs(300);
/// Orders that fall due are counted each minute. If they were counted longer ago, some were foreseen by no worker.
const GAP_AFTER: Duration = Duration::from_secs(180);
/// The minutes that are judged.
const TWO_HOURS: Minute = 120;

#[derive(Debug)]
pub(crate) struct Brake {
    kind: Kind,
    connections: WarmConnections,
    counter: DueCounter,
    bounds: Bounds,
    usual: Usual,
    learned: Option<Instant>,
    others: OtherWorkers,
    /// The minute of the last count of orders that fall due.
    counted_in: Option<Minute>,
    /// When such a count was last complete.
    counted: Option<Instant>,
    /// The count that is running.
    counting: Option<AbortOnDropHandle<Result<(), sqlx::Error>>>,
    /// What was counted since the last turn that added it.
    held: Counts,
    /// What this worker has added since it last read what all have: none of it is the others'.
    added: Woken,
    last_turn: Option<Instant>,
}

impl Brake {
    pub fn new(kind: Kind, connections: WarmConnections, counter: DueCounter, bounds: Bounds) -> Self {
        Self {
            kind,
            connections,
            counter,
            bounds,
            usual: Usual::default(),
            learned: None,
            others: OtherWorkers::default(),
            counted_in: None,
            counted: None,
            counting: None,
            held: Counts::default(),
            added: Woken::default(),
            last_turn: None,
        }
    }

    /// Whether there is something to do: a report of nothing is not written each second.
    pub fn wants_turn(&self, counts: &Counts) -> bool {
        let is_due = self.last_turn.is_none_or(|last| last.elapsed() >= IDLE_TURN_EVERY);
        is_due || self.counting.is_some() || !counts.is_empty()
    }

    /// Adds these counts, and judges what all workers have counted. `None` while orders that fall due must be counted
    /// first, because no worker may have counted them: then the counts are kept, and the former limits hold.
    ///
    /// # Errors
    /// sqlx's. Then the counts are kept, and the former limits hold.
    pub async fn turn(&mut self, counts: &Counts) -> Result<Option<Result<Limits, Trip>>, sqlx::Error> {
        self.held.append(counts);
        if self.counting.as_ref().is_some_and(|task| task.is_finished()) {
            self.finish_count().await;
        }
        let at = self.connections.run_on_oldest(now).await?;
        if self.counted.is_none_or(|counted| counted.elapsed() >= GAP_AFTER) {
            self.count_after_gap(at).await?;
            return Ok(None);
        }
        self.learn(minute_of(at)).await?;
        self.add_and_judge(at).await.map(Some)
    }

    /// Waits for the count of orders that fall due, if one is running.
    pub async fn finish_count(&mut self) {
        let Some(task) = self.counting.take() else { return };
        match task.await {
            Ok(Ok(())) => self.counted = Some(Instant::now()),
            Ok(Err(error)) => {
                debug!(
                    error = one_line(&error),
                    "orders that fall due could not be counted for the brake; the next turn counts again"
                );
                self.counted_in = None;
            }
            // It has panicked, which was printed.
            Err(_) => self.counted_in = None,
        }
    }

    async fn add_and_judge(&mut self, at: Timestamp) -> Result<Result<Limits, Trip>, sqlx::Error> {
        let now = minute_of(at);
        let counts = self.held.take();
        let kind = &self.kind;
        let add = async |connection: &mut PgConnection| closing_minutes::add(connection, kind, &counts, now).await;
        if let Err(error) = self.connections.run_on_oldest(add).await {
            self.held.append(&counts);
            return Err(error);
        }
        self.added.add(&counts.woken);
        let read = async |connection: &mut PgConnection| {
            let minutes = closing_minutes::read_since(connection, kind, now - TWO_HOURS).await?;
            Ok((minutes, closing_minutes::last_resumed(connection, kind).await?))
        };
        let (minutes, known_until) = self.connections.run_on_oldest(read).await?;
        self.last_turn = Some(Instant::now());
        self.count_once_a_minute(at, &minutes);
        let window = Window { minutes: &minutes, now, resumed_in: known_until.map(minute_of) };
        let others = self.others.found(&window, &std::mem::take(&mut self.added));
        // In a new shop these hours are all that is known.
        self.usual.paid_share = self.usual.paid_share.or_else(|| Usual::of(&minutes, now).paid_share);
        Ok(window.judge(&self.usual, &self.bounds).map(|closes_left| Limits {
            paid_share: self.usual.paid_share,
            others,
            closes_left,
            counted: counts.total,
            known_until,
        }))
    }

    /// Reads what is usual, and deletes what is too old.
    async fn learn(&mut self, now: Minute) -> Result<(), sqlx::Error> {
        if self.learned.is_none_or(|learned| learned.elapsed() >= LEARN_EVERY) {
            self.learn_anew(now).await?;
        }
        Ok(())
    }

    /// Returns the last minute that any worker has recorded.
    async fn learn_anew(&mut self, now: Minute) -> Result<Option<Minute>, sqlx::Error> {
        let kind = &self.kind;
        let read = async |connection: &mut PgConnection| {
            closing_minutes::forget_old(connection, kind, now).await?;
            closing_minutes::read_since(connection, kind, now - KEPT_MINUTES).await
        };
        let kept = self.connections.run_on_oldest(read).await?;
        self.usual = Usual::of(&kept, now);
        self.learned = Some(Instant::now());
        Ok(kept.iter().map(|one| one.minute).filter(|minute| *minute <= now).max())
    }

    /// No worker may have counted before, so what falls due at once counts as foreseen, too.
    async fn count_after_gap(&mut self, at: Timestamp) -> Result<(), sqlx::Error> {
        if self.counting.is_some() {
            return Ok(());
        }
        let now = minute_of(at);
        let last = self.learn_anew(now).await?;
        let earlier = foreseen_of_gap(last, now, &self.usual, &self.bounds);
        self.start_count(Wanted { at, minutes: now..=last_ahead(at), earlier });
        Ok(())
    }

    /// `known`: the minutes that were just read.
    fn count_once_a_minute(&mut self, at: Timestamp, known: &[MinuteCounts]) {
        let now = minute_of(at);
        if self.counting.is_some() || self.counted_in == Some(now) {
            return;
        }
        let last = last_ahead(at);
        if known.iter().any(|one| one.minute == last && one.foreseen.is_some()) {
            // Another worker has counted them in this minute.
            (self.counted_in, self.counted) = (Some(now), Some(Instant::now()));
        } else {
            self.start_count(Wanted { at, minutes: now + FORESEEN_MINUTES_BEFORE..=last, earlier: Vec::new() });
        }
    }

    fn start_count(&mut self, wanted: Wanted) {
        self.counted_in = Some(minute_of(wanted.at));
        let counting = tokio::spawn(self.counter.clone().count(wanted).in_current_span());
        self.counting = Some(AbortOnDropHandle::new(counting));
    }
}

/// The last minute of which orders are counted.
fn last_ahead(at: Timestamp) -> Minute {
    minute_of(at + FORESEE_AHEAD)
}
