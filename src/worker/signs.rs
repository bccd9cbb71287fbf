//! What the worker shows of itself: its health, and its figures as the loops and steps report them.
//!
//! Translates the words of desk and steps into counts; decides nothing, and nothing depends on what it holds.

use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use crate::alarm::{Delivered, Inlet};
use crate::clock::DatabaseClock;
use crate::degraded::{Cause, Change};
use crate::desk::{Answer, Batch};
use crate::health::Health;
use crate::http::Pages;
use crate::metrics::Metrics;
use crate::order::{Finding, Moment, Outcome};

/// Cheap to clone: everybody counts in the same place.
#[derive(Debug, Clone)]
pub(super) struct Signs {
    pub health: Arc<Health>,
    pub metrics: Arc<Metrics>,
}

impl Signs {
    pub fn new(longest_turn: Duration) -> Self {
        Self { health: Arc::new(Health::new(longest_turn)), metrics: Arc::default() }
    }

    pub fn pages(&self) -> Pages {
        Pages { health: self.health.clone(), metrics: self.metrics.clone() }
    }

    pub fn session_opened(&self) {
        self.metrics.sessions_opened.inc();
        self.metrics.session_open.set(1);
        self.health.note_session(None);
    }

    pub fn session_ended(&self, why: &str) {
        self.metrics.session_open.set(0);
        self.health.note_session(Some(why));
    }

    /// A check has found why a cause holds, or that it does not: shown, counted, and warned of seldom.
    pub fn degraded(&self, cause: Cause, why: Option<&str>) {
        self.metrics.degraded.with_label_values(&[cause.as_str()]).set(i64::from(why.is_some()));
        match self.health.note_degraded(cause, why) {
            Change::Warn => warn!(cause = cause.as_str(), why = why.unwrap_or_default(), "the worker is degraded"),
            Change::Cleared => info!(cause = cause.as_str(), "the worker is no longer degraded by this cause"),
            Change::Nothing => {}
        }
    }

    /// `now` is the database's time.
    pub fn delivered(&self, delivered: &Delivered, now: Moment) {
        self.metrics.alarms_delivered.with_label_values(&[delivered.inlet.as_str()]).inc();
        if let (Inlet::Timeout, Ok(alarm)) = (delivered.inlet, &delivered.content) {
            self.metrics.alarm_earliness.observe(alarm.deadline().since(now).as_secs_f64());
        }
    }

    /// A batch's statement came to an answer at `now`, which is just after its commit, by the database's clock.
    pub fn looked_at(&self, batch: &Batch, answer: &Answer, took: Duration, now: Moment) {
        self.metrics.batch_duration.with_label_values(&[batch.by.as_str()]).observe(took.as_secs_f64());
        let count = |outcome: &str, orders: usize| {
            self.metrics.orders_looked_at.with_label_values(&[outcome]).inc_by(orders as u64);
        };
        match answer {
            Err(fault) => count(fault.as_str(), batch.cases.len()),
            Ok(findings) => {
                for finding in findings.values() {
                    count(word(finding), 1);
                    if let Ok(found) = finding
                        && found.outcome == Outcome::Closed
                    {
                        self.metrics.closed(batch.by, found.deadline.map(|deadline| now.since(deadline)));
                    }
                }
                let without_row = batch.cases.iter().filter(|case| !findings.contains_key(case.alarm.order_id()));
                count(Outcome::Unknown.as_str(), without_row.count());
            }
        }
    }

    /// How far the database's clock is from the wall clock, which is read for this alone: nothing goes by it.
    pub fn clock(&self, clock: &DatabaseClock) {
        let (database, local) = (clock.now(), Moment::now_by_local_clock());
        let offset_micros = database.unix_micros().saturating_sub(local.unix_micros());
        self.metrics.clock_offset.show(Some(offset_micros as f64 / 1e6));
        self.metrics.clock_uncertainty.show(Some(clock.uncertainty().as_secs_f64()));
    }

    /// The database's clock could not be read.
    pub fn no_clock(&self) {
        self.metrics.clock_offset.show(None);
        self.metrics.clock_uncertainty.show(None);
    }
}

fn word(finding: &Finding) -> &'static str {
    match finding {
        Ok(found) => found.outcome.as_str(),
        Err(fault) => fault.as_str(),
    }
}
