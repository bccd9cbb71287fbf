//! Runs the engine's actions, each as a task of its own, and reports the result.
//!
//! One try each: the engine decides whether and when to retry.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use super::Recorder;
use crate::alarm::{DeadLetter, ParkReason, Rearm, Receipt};
use crate::clock::{ClockSample, DatabaseClock};
use crate::close::Closer;
use crate::database::{Database, ErrorClass, classify, one_line};
use crate::engine::{Batch, BatchResult, Input};
use crate::logging::LogThrottle;
use crate::order::{ClosedBy, OddAnswer, OrderId, Outcome, SweepPage, Timestamp};
use crate::park;
use crate::rearm::{Rearmer, Written};
use crate::sweep::Sweeper;

/// How often the database's clock is read.
const CLOCK_SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// The pause after a closer's connection could not be opened. If the server has no free connection, each try takes
/// `database.acquire_timeout`, and the clock is not read meanwhile.
const WARM_UP_PAUSE: Duration = Duration::from_secs(10);

/// What the tasks report to the event loop.
#[derive(Debug)]
pub(super) enum Note {
    Input(Input),
    Clock(ClockSample),
    /// The database's clock could not be read: why.
    NoClock(String),
    /// The query for overdue orders failed: why.
    NotSwept(String),
    /// The sweep has closed so many orders without an alarm.
    ClosedBySweep(usize),
    /// The close statement has returned a row that violates the contract.
    OddAnswer(OddAnswer),
}

/// A dead letter, and the receipt of its delivery.
type Addressed = (DeadLetter, Receipt);

/// What the effects need, and the channel for their results.
pub(super) struct Effects {
    closer: Closer,
    sweeper: Sweeper,
    database: Database,
    rearmer: Rearmer,
    notes: mpsc::UnboundedSender<Note>,
    recorder: Recorder,
    pub parked: Arc<Mutex<ParkedWarnings>>,
    pub tasks: TaskTracker,
}

impl Effects {
    pub fn new(
        closer: Closer,
        sweeper: Sweeper,
        database: Database,
        rearmer: Rearmer,
        notes: mpsc::UnboundedSender<Note>,
        recorder: Recorder,
    ) -> Self {
        let parked = Arc::default();
        Self { closer, sweeper, database, rearmer, notes, recorder, parked, tasks: TaskTracker::new() }
    }

    fn spawn(&self, effect: impl Future<Output = Vec<Note>> + Send + 'static) {
        let notes = self.notes.clone();
        self.tasks.spawn(async move {
            for note in effect.await {
                // Without the event loop the result is not needed.
                let _ = notes.send(note);
            }
        });
    }

    pub fn close(&self, batch: Batch, clock: DatabaseClock) {
        let (closer, recorder) = (self.closer.clone(), self.recorder.clone());
        self.spawn(async move {
            let ids: Vec<OrderId> = batch.items.iter().map(|item| item.alarm.order_id().clone()).collect();
            let began = clock.now();
            let answer = closer.close(&ids, batch.by, batch.waits_for_locks()).await;
            let now = clock.now();
            let took = now.since(began);
            debug!(orders = ids.len(), took_ms = took.as_secs_f64() * 1e3, "batch executed");
            recorder.record_batch(&batch, &answer, took, now);
            let closed = log_answer(&batch, &answer, now);
            let by_sweep = (batch.by == ClosedBy::Sweep && closed > 0).then_some(Note::ClosedBySweep(closed));
            let odd = closer.take_odd_answer().map(Note::OddAnswer);
            by_sweep.into_iter().chain(odd).chain([Note::Input(Input::Closed(batch, answer))]).collect()
        });
    }

    pub fn arm(&self, jobs: Vec<Rearm>, clock: DatabaseClock) {
        let rearmer = self.rearmer.clone();
        self.spawn(async move {
            let Written { confirmed, refused, failed } = rearmer.write(jobs, clock).await;
            [
                input_about(confirmed, Input::Rearmed),
                input_about(refused, Input::RearmRefused),
                input_about(failed, Input::NotRearmed),
            ]
            .into_iter()
            .flatten()
            .collect()
        });
    }

    pub fn park(&self, dead_letters: Vec<Addressed>) {
        let (database, recorder, said) = (self.database.clone(), self.recorder.clone(), self.parked.clone());
        self.spawn(async move {
            let to = Parking { database, recorder, said };
            let ParkResult { parked, refused, failed } = park_all(&to, dead_letters).await;
            [
                input_about(parked, Input::Parked),
                input_about(refused, Input::ParkRefused),
                input_about(failed, Input::NotParked),
            ]
            .into_iter()
            .flatten()
            .collect()
        });
    }

    pub fn sweep(&self, page: SweepPage) {
        let sweeper = self.sweeper.clone();
        self.spawn(async move {
            vec![match sweeper.overdue(&page).await {
                Ok(overdue) => Note::Input(Input::Swept(overdue)),
                Err(error) => Note::NotSwept(one_line(&error)),
            }]
        });
    }
}

/// Returns how many orders were closed.
fn log_answer(batch: &Batch, answer: &BatchResult, now: Timestamp) -> usize {
    let findings = match answer {
        Ok(findings) => findings,
        Err(fault) => {
            let (orders, first) =
                (batch.items.len(), batch.items.first().map_or("", |item| item.alarm.order_id().as_str()));
            debug!(orders, first, ?fault, "a batch could not be closed; it is retried");
            return 0;
        }
    };
    let closed_by = batch.by.as_str();
    for unknown in batch.items.iter().map(|item| item.alarm.order_id()).filter(|id| !findings.contains_key(*id)) {
        let outcome = Outcome::Unknown.as_str();
        debug!(order_id = %unknown, outcome, asked_by = closed_by, "order {unknown} is unchanged: {outcome}");
    }
    let mut closed = 0;
    for (order_id, finding) in findings {
        match finding {
            Ok(found) if found.outcome == Outcome::Closed => {
                closed += 1;
                let lateness_ms = found.deadline.map(|deadline| now.since(deadline).as_secs_f64() * 1e3);
                debug!(%order_id, lateness_ms, closed_by, "order {order_id} closed");
            }
            Ok(found) => {
                let outcome = found.outcome.as_str();
                debug!(%order_id, outcome, asked_by = closed_by, "order {order_id} is unchanged: {outcome}");
            }
            Err(fault) => debug!(%order_id, ?fault, "order {order_id} could not be closed; it is retried"),
        }
    }
    closed
}

/// The result of parking dead letters.
#[derive(Default)]
struct ParkResult {
    parked: Vec<Receipt>,
    /// The database rejects their rows.
    refused: Vec<Addressed>,
    /// The database is unavailable.
    failed: Vec<Addressed>,
}

/// Parks all together, or one by one if the database rejects a row, so that the others are parked.
async fn park_all(to: &Parking, dead_letters: Vec<Addressed>) -> ParkResult {
    let mut result = ParkResult::default();
    let mut alone = match park_together(to, dead_letters, &mut result).await {
        Ok(()) => return result,
        Err(dead_letters) => dead_letters.into_iter(),
    };
    while let Some(dead_letter) = alone.next() {
        if let Err(refused) = park_together(to, vec![dead_letter], &mut result).await {
            result.refused.extend(refused);
        } else if !result.failed.is_empty() {
            result.failed.extend(alone);
            break;
        }
    }
    result
}

/// Parks all by one statement.
///
/// # Errors
/// The dead letters, at least one of which is rejected.
async fn park_together(
    to: &Parking,
    dead_letters: Vec<Addressed>,
    result: &mut ParkResult,
) -> Result<(), Vec<Addressed>> {
    let contents: Vec<&DeadLetter> = dead_letters.iter().map(|(dead_letter, _)| dead_letter).collect();
    let Err(error) = park::park(&to.database, &contents).await else {
        to.note_parked(&contents);
        result.parked.extend(dead_letters.into_iter().map(|(_, receipt)| receipt));
        return Ok(());
    };
    let alarms = dead_letters.len();
    if classify(&error) != ErrorClass::Data || alarms == 1 {
        warn!(error = one_line(&error), alarms, "alarms could not be parked; they stay unacknowledged and are retried");
    }
    if classify(&error) == ErrorClass::Data {
        return Err(dead_letters);
    }
    result.failed.extend(dead_letters);
    Ok(())
}

/// An input about these items, unless there are none.
fn input_about<T>(items: Vec<T>, input: impl FnOnce(Vec<T>) -> Input) -> Option<Note> {
    (!items.is_empty()).then(|| Note::Input(input(items)))
}

/// Parks dead letters, counts and logs them.
struct Parking {
    database: Database,
    recorder: Recorder,
    said: Arc<Mutex<ParkedWarnings>>,
}

impl Parking {
    fn note_parked(&self, dead_letters: &[&DeadLetter]) {
        let mut said = self.said.lock().expect("no holder panics");
        for dead_letter in dead_letters {
            self.recorder.metrics.alarms_parked.with_label_values(&[dead_letter.reason.as_str()]).inc();
            let order_id = dead_letter.order_id.as_ref().map_or("", OrderId::as_str);
            debug!(order_id, reason = dead_letter.reason.as_str(), detail = %dead_letter.detail, "alarm parked");
            said.note(dead_letter);
        }
        said.log_due();
    }
}

/// What was parked since it was last logged, by reason: a flood of invalid messages must not become a flood of log lines.
#[derive(Debug, Default)]
pub(super) struct ParkedWarnings {
    by_reason: HashMap<ParkReason, ParkedWarning>,
}

#[derive(Debug, Default)]
struct ParkedWarning {
    alarms: u64,
    /// An example: the order's id and the detail.
    example: (String, String),
    said: LogThrottle,
}

impl ParkedWarnings {
    fn note(&mut self, dead_letter: &DeadLetter) {
        let warning = self.by_reason.entry(dead_letter.reason).or_default();
        if warning.alarms == 0 {
            let order_id = dead_letter.order_id.as_ref().map_or("", OrderId::as_str);
            warning.example = (order_id.to_owned(), dead_letter.detail.clone());
        }
        warning.alarms += 1;
    }

    /// Logs at once, and then at most once a minute for each reason.
    pub fn log_due(&mut self) {
        for (reason, warning) in &mut self.by_reason {
            if warning.alarms > 0 && warning.said.is_due() {
                let (alarms, (order_id, detail)) = (std::mem::take(&mut warning.alarms), &warning.example);
                warn!(alarms, reason = reason.as_str(), order_id, detail, "alarms parked, this one among them");
            }
        }
    }
}

/// Keeps the connections of closers open and warm. A failure is only logged: a closer without a connection opens its own.
#[derive(Default)]
struct WarmUp {
    paused_until: Option<Instant>,
}

impl WarmUp {
    async fn warm_up(&mut self, closer: &Closer) {
        if self.paused_until.is_some_and(|until| Instant::now() < until) {
            return;
        }
        self.paused_until = None;
        if let Err(error) = closer.warm_up().await {
            debug!(error = one_line(&error), "connections for closers could not be warmed up");
            self.paused_until = Some(Instant::now() + WARM_UP_PAUSE);
        }
    }
}

/// Reads the database's clock until the worker ends, and keeps the connections of closers warm.
pub(super) async fn sample_clock(closer: Closer, notes: mpsc::UnboundedSender<Note>) {
    let mut ticks = tokio::time::interval(CLOCK_SAMPLE_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut warm_up = WarmUp::default();
    loop {
        ticks.tick().await;
        match closer.sample_clock().await {
            Ok(sample) if notes.send(Note::Clock(sample)).is_err() => return,
            Ok(_) => warm_up.warm_up(&closer).await,
            Err(error) => {
                let why = one_line(&error);
                debug!(error = why, "the database's clock could not be read; the last reading is carried forward");
                // Without the event loop the result is not needed; the next reading ends this task.
                let _ = notes.send(Note::NoClock(format!("its clock cannot be read: {why}")));
            }
        }
    }
}
