//! Runs the desk's errands, each as a task of its own, and sends back what came of it.
//!
//! One try each: whether and when to try again is the desk's to say.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use super::Signs;
use crate::alarm::{ArmJob, Parcel, Receipt};
use crate::arm::Armer;
use crate::clock::{ClockSample, DatabaseClock};
use crate::close::Closer;
use crate::database::{Database, Trouble, trouble, why};
use crate::desk::{Answer, Batch, News};
use crate::order::{ClosedBy, Moment, OrderId, Outcome, SweepPage};
use crate::park;
use crate::sweep::Sweeper;

/// Alarms parked by one statement: their bodies are 16 KiB at most, so some megabytes.
const PARKED_AT_ONCE: usize = 256;
/// How often the database's clock is read.
const CLOCK_SAMPLE_EVERY: Duration = Duration::from_secs(1);

/// What the floor hears from its own tasks.
#[derive(Debug)]
pub(super) enum Note {
    News(News),
    Clock(ClockSample),
    /// It could not be read: why.
    NoClock(String),
    /// The sweep has closed so many orders that no alarm had woken.
    ClosedBySweep(usize),
}

/// A parcel, and the delivery it came in.
type Addressed = (Parcel, Receipt);

/// The steps, and the way back for what they found.
pub(super) struct Steps {
    closer: Closer,
    sweeper: Sweeper,
    database: Database,
    armer: Armer,
    notes: mpsc::UnboundedSender<Note>,
    signs: Signs,
    pub tasks: TaskTracker,
}

impl Steps {
    pub fn new(
        closer: Closer,
        sweeper: Sweeper,
        database: Database,
        armer: Armer,
        notes: mpsc::UnboundedSender<Note>,
        signs: Signs,
    ) -> Self {
        Self { closer, sweeper, database, armer, notes, signs, tasks: TaskTracker::new() }
    }

    fn spawn(&self, errand: impl Future<Output = Vec<Note>> + Send + 'static) {
        let notes = self.notes.clone();
        self.tasks.spawn(async move {
            for note in errand.await {
                // With the floor gone nobody needs the news.
                let _ = notes.send(note);
            }
        });
    }

    pub fn close(&self, batch: Batch, clock: DatabaseClock) {
        let (closer, signs) = (self.closer.clone(), self.signs.clone());
        self.spawn(async move {
            let ids: Vec<OrderId> = batch.cases.iter().map(|case| case.alarm.order_id().clone()).collect();
            let began = clock.now();
            let answer = closer.close(&ids, batch.by, batch.patient).await;
            let now = clock.now();
            let took = now.since(began);
            debug!(orders = ids.len(), took_ms = took.as_secs_f64() * 1e3, "batch looked at");
            signs.looked_at(&batch, &answer, took, now);
            let closed = log_answer(&batch, &answer, now);
            let by_sweep = (batch.by == ClosedBy::Sweep && closed > 0).then_some(Note::ClosedBySweep(closed));
            by_sweep.into_iter().chain([Note::News(News::Closed(batch, answer))]).collect()
        });
    }

    pub fn arm(&self, jobs: Vec<ArmJob>, clock: DatabaseClock) {
        let armer = self.armer.clone();
        self.spawn(async move {
            let (confirmed, failed) = armer.write(jobs, clock).await;
            let armed = (!confirmed.is_empty()).then_some(Note::News(News::Armed(confirmed)));
            let not_armed = (!failed.is_empty()).then_some(Note::News(News::NotArmed(failed)));
            [armed, not_armed].into_iter().flatten().collect()
        });
    }

    pub fn park(&self, parcels: Vec<Addressed>) {
        let (database, signs) = (self.database.clone(), self.signs.clone());
        self.spawn(async move {
            let (parked, not_parked) = park_all(&database, &signs, parcels).await;
            let parked = (!parked.is_empty()).then_some(Note::News(News::Parked(parked)));
            let not_parked = (!not_parked.is_empty()).then_some(Note::News(News::NotParked(not_parked)));
            [parked, not_parked].into_iter().flatten().collect()
        });
    }

    pub fn sweep(&self, page: SweepPage) {
        let sweeper = self.sweeper.clone();
        self.spawn(async move {
            let news = match sweeper.overdue(&page).await {
                Ok(overdue) => News::Swept(overdue),
                Err(error) => {
                    warn!(error = why(&error), "the database could not be asked for overdue orders; it is asked again");
                    News::NotSwept
                }
            };
            vec![Note::News(news)]
        });
    }
}

/// Returns how many orders were closed.
fn log_answer(batch: &Batch, answer: &Answer, now: Moment) -> usize {
    let findings = match answer {
        Ok(findings) => findings,
        Err(fault) => {
            let orders = batch.cases.len();
            debug!(orders, ?fault, "a batch could not be closed; it is tried again");
            return 0;
        }
    };
    let closed_by = batch.by.as_str();
    let mut closed = 0;
    for (order_id, finding) in findings {
        match finding {
            Ok(found) if found.outcome == Outcome::Closed => {
                closed += 1;
                let lateness_ms = found.deadline.map(|deadline| now.since(deadline).as_secs_f64() * 1e3);
                debug!(%order_id, lateness_ms, closed_by, "order {order_id} closed");
            }
            Ok(_) => {}
            Err(fault) => debug!(%order_id, ?fault, "order {order_id} could not be closed; it is tried again"),
        }
    }
    closed
}

/// What is parked, and what is not. One that the database refuses does not keep the others out.
async fn park_all(database: &Database, signs: &Signs, parcels: Vec<Addressed>) -> (Vec<Receipt>, Vec<Addressed>) {
    let (mut parked, mut not_parked) = (Vec::new(), Vec::new());
    let mut waiting: VecDeque<Vec<Addressed>> = parcels.chunks(PARKED_AT_ONCE).map(<[Addressed]>::to_vec).collect();
    while let Some(chunk) = waiting.pop_front() {
        let contents: Vec<&Parcel> = chunk.iter().map(|(parcel, _)| parcel).collect();
        match park::park(database, &contents).await {
            Ok(()) => {
                contents.into_iter().for_each(|parcel| note_parked(parcel, signs));
                parked.extend(chunk.into_iter().map(|(_, receipt)| receipt));
            }
            Err(error) if trouble(&error) == Trouble::Data && chunk.len() > 1 => {
                waiting.extend(chunk.into_iter().map(|one| vec![one]));
            }
            Err(error) => {
                not_parked.extend(chunk);
                if trouble(&error) != Trouble::Data {
                    not_parked.extend(waiting.drain(..).flatten());
                }
                let (error, alarms) = (why(&error), not_parked.len());
                warn!(%error, alarms, "alarms could not be parked; they stay unacknowledged and are tried again");
            }
        }
    }
    (parked, not_parked)
}

fn note_parked(parcel: &Parcel, signs: &Signs) {
    signs.metrics.alarms_parked.with_label_values(&[parcel.reason.as_str()]).inc();
    let order_id = parcel.order_id.as_ref().map_or("", OrderId::as_str);
    warn!(order_id, reason = parcel.reason.as_str(), detail = %parcel.detail, "alarm parked");
}

/// Reads the database's clock for ever.
pub(super) async fn sample_clock(closer: Closer, notes: mpsc::UnboundedSender<Note>) {
    let mut ticks = tokio::time::interval(CLOCK_SAMPLE_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match closer.sample_clock().await {
            Ok(sample) if notes.send(Note::Clock(sample)).is_err() => return,
            Ok(_) => {}
            Err(error) => {
                let why = why(&error);
                debug!(error = why, "the database's clock could not be read; the last reading is carried on");
                // With the floor gone nobody needs the news; the next reading ends this.
                let _ = notes.send(Note::NoClock(format!("it does not say what time it is: {why}")));
            }
        }
    }
}
