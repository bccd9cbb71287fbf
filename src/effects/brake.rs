//! The worker's side of the brake: adds its counts to those of all workers, counts what falls due, and has the whole
//! judged.
//!
//! Decides nothing: `order_timeout_core::brake` judges. About one turn a second while orders are closed, on the closers'
//! connections; nothing of it is in a close's transaction.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use order_timeout_client::postgres::Timestamptz;
use order_timeout_core::brake::{
    Bounds, Counts, FORESEE_AHEAD, FORESEEN_MINUTES_BEFORE, Limits, Minute, Trip, Usual, Window, foreseen_of_gap,
    minute_of,
};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::{SweepPlace, Timestamp};
use sqlx::{PgConnection, SqlStr};

use super::sweep::read_row;
use crate::postgres::closing_minutes::{self, KEPT_MINUTES};
use crate::postgres::now;
use crate::postgres::warm_connections::WarmConnections;

/// A worker that closes nothing still records that it runs, and reads what the others have counted.
const IDLE_TURN_EVERY: Duration = Duration::from_secs(10);
/// What is usual changes slowly.
const LEARN_EVERY: Duration = Duration::from_secs(300);
/// Longer without a turn, and the orders of the gap were foreseen by no worker.
const GAP_AFTER: Duration = Duration::from_secs(120);
/// Orders that fall due, per query.
const PAGE: i64 = 5_000;
/// So many pages are counted at most: a million orders within minutes.
const MOST_PAGES: usize = 200;
/// The minutes that are judged.
const TWO_HOURS: Minute = 120;

#[derive(Debug)]
pub(crate) struct Brake {
    kind: Kind,
    connections: WarmConnections,
    overdue: SqlStr,
    bounds: Bounds,
    usual: Usual,
    learned: Option<Instant>,
    /// The minute in which orders that fall due were last counted.
    foreseen_in: Option<Minute>,
    last_turn: Option<Instant>,
}

impl Brake {
    /// `overdue`: the kind's overdue statement.
    pub fn new(kind: Kind, connections: WarmConnections, overdue: SqlStr, bounds: Bounds) -> Self {
        Self {
            kind,
            connections,
            overdue,
            bounds,
            usual: Usual::default(),
            learned: None,
            foreseen_in: None,
            last_turn: None,
        }
    }

    /// Whether there is something to do: a report of nothing is not written each second.
    pub fn wants_turn(&self, counts: &Counts) -> bool {
        !counts.is_empty() || self.last_turn.is_none_or(|last| last.elapsed() >= IDLE_TURN_EVERY)
    }

    /// Adds these counts, and judges what all workers have counted.
    ///
    /// # Errors
    /// sqlx's. Then the counts are lost, and the former limits hold.
    pub async fn turn(&mut self, counts: &Counts) -> Result<Result<Limits, Trip>, sqlx::Error> {
        let at = self.connections.run_on_oldest(now).await?;
        let minute = minute_of(at);
        self.learn(minute).await?;
        let is_first = self.last_turn.is_none_or(|last| last.elapsed() >= GAP_AFTER);
        self.foresee(at, is_first).await?;
        let kind = &self.kind;
        let read = async |connection: &mut PgConnection| {
            closing_minutes::add(connection, kind, counts, minute).await?;
            let minutes = closing_minutes::read_since(connection, kind, minute - TWO_HOURS).await?;
            Ok((minutes, closing_minutes::last_resumed(connection, kind).await?))
        };
        let (minutes, known_until) = self.connections.run_on_oldest(read).await?;
        self.last_turn = Some(Instant::now());
        let window = Window { minutes: &minutes, now: minute, resumed_in: known_until.map(minute_of) };
        Ok(window.judge(&self.usual, &self.bounds).map(|closes_left| Limits {
            paid_share: self.usual.paid_share,
            closes_left,
            counted: counts.total,
            known_until,
        }))
    }

    /// Reads what is usual, and deletes what is too old.
    async fn learn(&mut self, now: Minute) -> Result<(), sqlx::Error> {
        if self.learned.is_some_and(|learned| learned.elapsed() < LEARN_EVERY) {
            return Ok(());
        }
        let kind = &self.kind;
        let read = async |connection: &mut PgConnection| {
            closing_minutes::forget_old(connection, kind, now).await?;
            closing_minutes::read_since(connection, kind, now - KEPT_MINUTES).await
        };
        self.usual = Usual::of(&self.connections.run_on_oldest(read).await?, now);
        self.learned = Some(Instant::now());
        Ok(())
    }

    /// Counts the orders that fall due in the next minutes, once a minute. `is_first`: no worker may have counted before,
    /// so what falls due at once counts as foreseen, too.
    async fn foresee(&mut self, at: Timestamp, is_first: bool) -> Result<(), sqlx::Error> {
        let now = minute_of(at);
        if !is_first && self.foreseen_in.is_some_and(|counted| counted >= now) {
            return Ok(());
        }
        let kind = self.kind.clone();
        let recent = async |on: &mut PgConnection| closing_minutes::read_since(on, &kind, now - TWO_HOURS).await;
        let known = self.connections.run_on_oldest(recent).await?;
        let last = known.iter().map(|one| one.minute).filter(|minute| *minute <= now).max();
        let mut due = if is_first { foreseen_of_gap(last, now, &self.usual, &self.bounds) } else { Vec::new() };
        let first = if is_first { now } else { now + FORESEEN_MINUTES_BEFORE };
        let last = minute_of(at + FORESEE_AHEAD);
        // Another worker has counted them in this minute.
        let is_counted = known.iter().any(|one| one.minute == last && one.foreseen.is_some());
        if is_first || !is_counted {
            let counted = count_due(&self.connections, &self.overdue, at).await?;
            due.extend((first..=last).map(|minute| (minute, counted.get(&minute).copied().unwrap_or(0))));
        }
        if !due.is_empty() {
            let write = async |on: &mut PgConnection| closing_minutes::foresee(on, &kind, &due).await;
            self.connections.run_on_oldest(write).await?;
        }
        self.foreseen_in = Some(now);
        Ok(())
    }
}

/// The orders that fall due after `at`, by minute.
pub(crate) async fn count_due(
    connections: &WarmConnections,
    overdue: &SqlStr,
    at: Timestamp,
) -> Result<BTreeMap<Minute, u64>, sqlx::Error> {
    let mut by_minute = BTreeMap::new();
    let mut after = SweepPlace { deadline: at, id: String::new() };
    for _ in 0..MOST_PAGES {
        let page = sqlx::query(overdue.clone())
            .bind(-FORESEE_AHEAD.as_secs_f64())
            .bind(Timestamptz(after.deadline))
            .bind(after.id.clone())
            .bind(PAGE);
        let rows = connections.run_on_oldest(async |on| page.fetch_all(on).await).await?;
        let is_last = i64::try_from(rows.len()).is_ok_and(|found| found < PAGE);
        for row in &rows {
            let place = read_row(row)?;
            *by_minute.entry(minute_of(place.deadline)).or_default() += 1;
            after = place;
        }
        if is_last {
            break;
        }
    }
    Ok(by_minute)
}
