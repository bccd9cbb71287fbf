//! The worker's health and metrics, as the loops and effects report them.
//!
//! Turns inputs and results into counts, and closes into a log line. Decides nothing, and nothing depends on its state.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use order_timeout_core::alarm::{Delivered, SourceQueue};
use order_timeout_core::clock::DatabaseClock;
use order_timeout_core::engine::{Batch, BatchResult, Call, EndOutcome, Ended};
use order_timeout_core::kind::Kind;
use order_timeout_core::order::{CloseOutcome, CloseResult, ClosedBy, OrderId, Outcome, Timestamp};
use order_timeout_core::payment::Answer;
use order_timeout_providers::Load;
use tracing::{info, warn};

use super::close_log::CloseLog;
use super::last_hour::SharedLastHour;
use super::served_kinds::ServedKinds;
use super::zones::ZoneComparison;
use crate::effects::closing::EndedOrder;
use crate::http::Pages;
use crate::observe::degraded::{Cause, Change, Problem};
use crate::observe::health::{Health, KindHealth};
use crate::observe::inspect::sentence;
use crate::observe::metrics::{KindMetrics, Metrics, ProviderMetrics};
use crate::observe::traces::Traces;
use crate::postgres::closing_pauses::{Pause, PauseCause};

/// What is recorded of the worker as a whole. Cheap to clone: all clones share their counts.
#[derive(Debug, Clone)]
pub(crate) struct Recorder {
    pub health: Arc<Health>,
    pub metrics: Arc<Metrics>,
    pub traces: Traces,
    pub kinds: ServedKinds,
}

/// What is recorded of one kind. Cheap to clone as well.
#[derive(Debug, Clone)]
pub(crate) struct KindRecorder {
    worker: Recorder,
    kind: Kind,
    pub health: Arc<KindHealth>,
    pub metrics: Arc<KindMetrics>,
    zones: Arc<Mutex<Zones>>,
    close_log: Arc<Mutex<CloseLog>>,
    providers: Arc<Mutex<BTreeMap<String, Arc<ProviderMetrics>>>>,
    last_hour: SharedLastHour,
}

#[derive(Debug, Default)]
struct Zones {
    comparison: ZoneComparison,
    /// Whether it was last reported that they differ.
    differ: bool,
}

impl Recorder {
    pub fn new(longest_turn: Duration, traces: Traces) -> Self {
        Self {
            health: Arc::new(Health::new(longest_turn)),
            metrics: Arc::default(),
            traces,
            kinds: ServedKinds::new(Instant::now()),
        }
    }

    /// Begins to record a kind; once for each.
    pub fn of_kind(&self, kind: &Kind) -> KindRecorder {
        let metrics = Arc::new(self.metrics.of_kind(kind));
        KindRecorder {
            worker: self.clone(),
            kind: kind.clone(),
            health: self.health.of_kind(kind),
            last_hour: self.kinds.add(kind, metrics.clone()),
            metrics,
            zones: Arc::default(),
            close_log: Arc::default(),
            providers: Arc::default(),
        }
    }

    pub fn pages(&self) -> Pages {
        Pages { health: self.health.clone(), metrics: self.metrics.clone() }
    }

    /// Records that a cause holds for the whole worker, and why, or that it does not.
    pub fn degraded(&self, cause: Cause, why: Option<&str>) {
        self.problems(cause, None, described(cause, why));
    }

    /// The problems of a cause, or none, of the whole worker or of one kind, which this worker need not serve: in health,
    /// metric, and a throttled warning.
    pub fn problems(&self, cause: Cause, kind: Option<&Kind>, problems: Vec<Problem>) {
        let gauge = self.metrics.degraded.with_label_values(&[cause.as_str()]);
        let why = sentence(&problems);
        let change = self.health.note_degraded(cause, kind, problems, |holds| gauge.set(i64::from(holds)));
        match change {
            Change::Warn => warn!(cause = cause.as_str(), why, "the worker is degraded"),
            Change::Cleared => info!(cause = cause.as_str(), "the worker is no longer degraded by this cause"),
            Change::Nothing => {}
        }
    }
}

/// One problem whose sentence says all of it, or none.
fn described(cause: Cause, why: Option<&str>) -> Vec<Problem> {
    why.into_iter().map(|why| Problem::described(cause, why)).collect()
}

impl KindRecorder {
    pub fn session_opened(&self) {
        self.metrics.sessions_opened.inc();
        self.metrics.session_open.set(1);
        self.health.note_session(None);
    }

    pub fn session_ended(&self, why: &str) {
        self.metrics.session_open.set(0);
        self.health.note_session(Some(why));
    }

    /// Records that a cause holds for this kind, and why, or that it does not.
    pub fn degraded(&self, cause: Cause, why: Option<&str>) {
        self.problems(cause, described(cause, why));
    }

    /// Records the problems of a cause of this kind, or none.
    pub fn problems(&self, cause: Cause, problems: Vec<Problem>) {
        self.worker.problems(cause, Some(&self.kind), problems);
    }

    /// Closing is paused, or not: in health, metric, and the log. To be called when it changes.
    pub fn closing_paused(&self, pauses: &[Pause]) {
        let sentences: Vec<String> = pauses.iter().map(Pause::sentence).collect();
        for cause in [PauseCause::Operator, PauseCause::Brake] {
            let holds = pauses.iter().any(|pause| pause.cause == cause);
            self.metrics.closing_paused.with_label_values(&[cause.as_str()]).set(i64::from(holds));
        }
        self.health.note_closing_paused(&sentences);
        if sentences.is_empty() {
            info!("closing is resumed; everything that is due is closed now");
        }
        for why in sentences {
            warn!(why, "closing is paused; alarms wait in the broker until `order-timeout resume`");
        }
    }

    /// The worker begins to finish its work in flight.
    pub fn note_stopping(&self) {
        self.worker.health.mark_stopping();
    }

    /// `now` is the database's time.
    pub fn delivered(&self, delivered: &Delivered, now: Timestamp) {
        self.metrics.alarms_delivered.with_label_values(&[delivered.source.as_str()]).inc();
        if let (SourceQueue::Timeout, Ok(alarm)) = (delivered.source, &delivered.content) {
            self.metrics.alarm_earliness.observe(alarm.deadline().since(now).as_secs_f64());
        }
        self.worker.traces.delivered(delivered, now);
    }

    /// Records a batch's result. `began` is when its statement was sent, `now` just after its commit, by the database's
    /// clock.
    pub fn record_batch(&self, batch: &Batch, answer: &BatchResult, began: Timestamp, now: Timestamp) {
        let took = now.since(began);
        self.worker.traces.decided(batch, answer, began, now);
        self.metrics.batch_duration.with_label_values(&[batch.by.as_str()]).observe(took.as_secs_f64());
        let count = |outcome: &str, orders: usize| {
            self.metrics.close_results.with_label_values(&[outcome]).inc_by(orders as u64);
        };
        match answer {
            Err(fault) => count(fault.as_str(), batch.items.len()),
            Ok(findings) => {
                let mut close_log = self.close_log.lock().unwrap_or_else(PoisonError::into_inner);
                let mut latenesses = Vec::with_capacity(findings.len());
                for finding in findings.values() {
                    count(word(finding), 1);
                    if let Ok(found) = finding
                        && found.outcome == Outcome::Closed
                    {
                        let lateness = found.deadline.map(|deadline| now.since(deadline));
                        self.metrics.closed(batch.by, lateness);
                        close_log.note(batch.by, lateness);
                        latenesses.push(lateness);
                    }
                }
                close_log.log_due();
                drop(close_log);
                self.last_hour.note(batch.by, latenesses, Instant::now());
                let without_row = batch.items.iter().filter(|item| !findings.contains_key(item.alarm.order_id()));
                count(Outcome::Unknown.as_str(), without_row.count());
                self.compare_zones(batch, findings);
            }
        }
    }

    /// Counts a provider's answer to one call. `took`: with the wait for its turn.
    pub fn answered(&self, call: &Call, answer: &Answer, took: Duration) {
        // A provider that is in no settings is not asked.
        let Some(metrics) = self.provider(&call.attempt.provider) else { return };
        metrics.answers.with_label_values(&[answer.as_str()]).inc();
        if !matches!(answer, Answer::Unknown(unknown) if !unknown.was_asked) {
            metrics.call_duration.with_label_values(&[call.kind.as_str()]).observe(took.as_secs_f64());
        }
    }

    /// Shows what the limits of each provider do. The first call of each begins its series.
    pub fn provider_loads(&self, loads: &[(String, Load)]) {
        for (name, load) in loads {
            let mut providers = self.providers.lock().unwrap_or_else(PoisonError::into_inner);
            let begin = || Arc::new(self.worker.metrics.of_provider(&self.kind, name));
            providers.entry(name.clone()).or_insert_with(begin).show(load);
        }
    }

    fn provider(&self, name: &str) -> Option<Arc<ProviderMetrics>> {
        self.providers.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// Counts orders that were closed or settled after a provider was asked. Their lateness is not that of other closes: it
    /// has the provider's answers in it.
    pub fn ended_at_provider(&self, ended: &[EndedOrder], now: Timestamp) {
        let mut close_log = self.close_log.lock().unwrap_or_else(PoisonError::into_inner);
        for EndedOrder { closed_by, deadline } in ended {
            self.metrics.ended_at_provider(*closed_by, deadline.map(|deadline| now.since(deadline)));
            close_log.note_at_provider(*closed_by);
        }
        close_log.log_due();
    }

    /// Counts how claimed orders ended.
    pub fn ended(&self, ended: &[Ended]) {
        let closed = ended.iter().filter(|one| matches!(one.outcome, Ok(EndOutcome::Closed))).count();
        self.last_hour.note_asked(closed as u64, Instant::now());
        for one in ended {
            let word = match &one.outcome {
                Ok(outcome) => outcome.as_str(),
                Err(fault) => fault.as_str(),
            };
            self.metrics.claimed_results.with_label_values(&[word]).inc();
        }
    }

    /// The query for claimed orders failed; it is repeated after a pause.
    pub fn not_taken_over(&self, why: &str) {
        warn!(kind = %self.kind, why, "claimed orders could not be taken over; they stay closing, with their stock reserved, until they can");
    }

    /// Logs the closes that were not logged yet, even if no order is closed now.
    pub fn log_closed(&self) {
        self.close_log.lock().unwrap_or_else(PoisonError::into_inner).log_due();
    }

    /// Logs the last ones, of a worker that stops.
    pub fn log_last_closed(&self) {
        self.close_log.lock().unwrap_or_else(PoisonError::into_inner).log_last();
    }

    /// Compares each alarm's deadline with its row's. Orders that the sweep found have no alarm.
    fn compare_zones(&self, batch: &Batch, findings: &HashMap<OrderId, CloseResult>) {
        if batch.by != ClosedBy::Alarm {
            return;
        }
        let mut zones = self.zones.lock().unwrap_or_else(PoisonError::into_inner);
        for item in &batch.items {
            let order_id = item.alarm.order_id();
            if let Some(Ok(CloseOutcome { deadline: Some(by_row), .. })) = findings.get(order_id) {
                zones.comparison.note(order_id, item.alarm.deadline(), *by_row);
            }
        }
        let why = zones.comparison.why();
        if why.is_some() || zones.differ {
            zones.differ = why.is_some();
            self.degraded(Cause::TimeZone, why.as_deref());
        }
    }

    /// The difference between the database's clock and the wall clock, which is read only for this; `None` if the database's
    /// could not be read.
    pub fn clock(&self, clock: Option<&DatabaseClock>) {
        let offset_s = |clock: &DatabaseClock| {
            let local = Timestamp::now_by_local_clock();
            clock.now().unix_micros().saturating_sub(local.unix_micros()) as f64 / 1e6
        };
        self.metrics.clock_offset.show(&[], clock.map(offset_s));
        self.metrics.clock_uncertainty.show(&[], clock.map(|clock| clock.uncertainty().as_secs_f64()));
    }
}

fn word(finding: &CloseResult) -> &'static str {
    match finding {
        Ok(found) => found.outcome.as_str(),
        Err(fault) => fault.as_str(),
    }
}
