//! Runs the desk's errands, each as a task of its own, and sends back what came of it.
//!
//! One try each: whether and when to try again is the desk's to say.

use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;
use tracing::{debug, warn};

use super::Signs;
use crate::alarm::{ArmJob, Parcel, Receipt};
use crate::arm::{Armer, Written};
use crate::clock::{ClockSample, DatabaseClock};
use crate::close::Closer;
use crate::database::{Database, Trouble, trouble, why};
use crate::desk::{Answer, Batch, News};
use crate::order::{ClosedBy, Moment, OddAnswer, OrderId, Outcome, SweepPage};
use crate::park;
use crate::sweep::Sweeper;

/// How often the database's clock is read.
const CLOCK_SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// How long closers' connections are left as they are after one could not be had. Where a server has no room for it each
/// try takes `database.acquire_timeout`, and the clock is not read meanwhile.
const UNREADY_REST: Duration = Duration::from_secs(10);

/// What the floor hears from its own tasks.
#[derive(Debug)]
pub(super) enum Note {
    News(News),
    Clock(ClockSample),
    /// It could not be read: why.
    NoClock(String),
    /// The database could not be asked for overdue orders: why.
    NotSwept(String),
    /// The sweep has closed so many orders that no alarm had woken.
    ClosedBySweep(usize),
    /// The close statement has answered what the contract does not know.
    OddAnswer(OddAnswer),
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
            let answer = closer.close(&ids, batch.by, batch.is_patient()).await;
            let now = clock.now();
            let took = now.since(began);
            debug!(orders = ids.len(), took_ms = took.as_secs_f64() * 1e3, "batch looked at");
            signs.looked_at(&batch, &answer, took, now);
            let closed = log_answer(&batch, &answer, now);
            let by_sweep = (batch.by == ClosedBy::Sweep && closed > 0).then_some(Note::ClosedBySweep(closed));
            let odd = closer.take_odd_answer().map(Note::OddAnswer);
            by_sweep.into_iter().chain(odd).chain([Note::News(News::Closed(batch, answer))]).collect()
        });
    }

    pub fn arm(&self, jobs: Vec<ArmJob>, clock: DatabaseClock) {
        let armer = self.armer.clone();
        self.spawn(async move {
            let Written { confirmed, refused, failed } = armer.write(jobs, clock).await;
            [news(confirmed, News::Armed), news(refused, News::ArmRefused), news(failed, News::NotArmed)]
                .into_iter()
                .flatten()
                .collect()
        });
    }

    pub fn park(&self, parcels: Vec<Addressed>) {
        let (database, signs) = (self.database.clone(), self.signs.clone());
        self.spawn(async move {
            let Shelved { parked, refused, failed } = park_all(&database, &signs, parcels).await;
            [news(parked, News::Parked), news(refused, News::ParkRefused), news(failed, News::NotParked)]
                .into_iter()
                .flatten()
                .collect()
        });
    }

    pub fn sweep(&self, page: SweepPage) {
        let sweeper = self.sweeper.clone();
        self.spawn(async move {
            vec![match sweeper.overdue(&page).await {
                Ok(overdue) => Note::News(News::Swept(overdue)),
                Err(error) => Note::NotSwept(why(&error)),
            }]
        });
    }
}

/// Returns how many orders were closed.
fn log_answer(batch: &Batch, answer: &Answer, now: Moment) -> usize {
    let findings = match answer {
        Ok(findings) => findings,
        Err(fault) => {
            let (orders, first) =
                (batch.cases.len(), batch.cases.first().map_or("", |case| case.alarm.order_id().as_str()));
            debug!(orders, first, ?fault, "a batch could not be closed; it is tried again");
            return 0;
        }
    };
    let closed_by = batch.by.as_str();
    for unknown in batch.cases.iter().map(|case| case.alarm.order_id()).filter(|id| !findings.contains_key(*id)) {
        let outcome = Outcome::Unknown.as_str();
        debug!(order_id = %unknown, outcome, asked_by = closed_by, "order {unknown} stays as it is: {outcome}");
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
                debug!(%order_id, outcome, asked_by = closed_by, "order {order_id} stays as it is: {outcome}");
            }
            Err(fault) => debug!(%order_id, ?fault, "order {order_id} could not be closed; it is tried again"),
        }
    }
    closed
}

/// What became of parcels.
#[derive(Default)]
struct Shelved {
    parked: Vec<Receipt>,
    /// The database refuses their rows.
    refused: Vec<Addressed>,
    /// The database is away.
    failed: Vec<Addressed>,
}

/// Together, or one by one where the database refuses a row, so that it does not keep the others out.
async fn park_all(database: &Database, signs: &Signs, parcels: Vec<Addressed>) -> Shelved {
    let mut shelved = Shelved::default();
    let mut alone = match park_together(database, signs, parcels, &mut shelved).await {
        Ok(()) => return shelved,
        Err(parcels) => parcels.into_iter(),
    };
    while let Some(parcel) = alone.next() {
        if let Err(refused) = park_together(database, signs, vec![parcel], &mut shelved).await {
            shelved.refused.extend(refused);
        } else if !shelved.failed.is_empty() {
            shelved.failed.extend(alone);
            break;
        }
    }
    shelved
}

/// By one statement.
///
/// # Errors
/// The parcels, one of which at least is refused.
async fn park_together(
    database: &Database,
    signs: &Signs,
    parcels: Vec<Addressed>,
    shelved: &mut Shelved,
) -> Result<(), Vec<Addressed>> {
    let contents: Vec<&Parcel> = parcels.iter().map(|(parcel, _)| parcel).collect();
    let Err(error) = park::park(database, &contents).await else {
        contents.into_iter().for_each(|parcel| note_parked(parcel, signs));
        shelved.parked.extend(parcels.into_iter().map(|(_, receipt)| receipt));
        return Ok(());
    };
    let alarms = parcels.len();
    if trouble(&error) != Trouble::Data || alarms == 1 {
        warn!(error = why(&error), alarms, "alarms could not be parked; they stay unacknowledged and are tried again");
    }
    if trouble(&error) == Trouble::Data {
        return Err(parcels);
    }
    shelved.failed.extend(parcels);
    Ok(())
}

/// Nothing to say of nobody.
fn news<T>(about: Vec<T>, news: impl FnOnce(Vec<T>) -> News) -> Option<Note> {
    (!about.is_empty()).then(|| Note::News(news(about)))
}

fn note_parked(parcel: &Parcel, signs: &Signs) {
    signs.metrics.alarms_parked.with_label_values(&[parcel.reason.as_str()]).inc();
    let order_id = parcel.order_id.as_ref().map_or("", OrderId::as_str);
    warn!(order_id, reason = parcel.reason.as_str(), detail = %parcel.detail, "alarm parked");
}

/// Sees to it that closers find their connections open. Nobody is told if it cannot: a closer that finds none opens its own.
#[derive(Default)]
struct Readiness {
    rests_until: Option<Instant>,
}

impl Readiness {
    async fn see_to(&mut self, closer: &Closer) {
        if self.rests_until.is_some_and(|until| Instant::now() < until) {
            return;
        }
        self.rests_until = None;
        if let Err(error) = closer.make_ready().await {
            debug!(error = why(&error), "connections for closers could not be made ready");
            self.rests_until = Some(Instant::now() + UNREADY_REST);
        }
    }
}

/// Reads the database's clock for ever, and sees to it that closers find connections that are ready.
pub(super) async fn sample_clock(closer: Closer, notes: mpsc::UnboundedSender<Note>) {
    let mut ticks = tokio::time::interval(CLOCK_SAMPLE_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut readiness = Readiness::default();
    loop {
        ticks.tick().await;
        match closer.sample_clock().await {
            Ok(sample) if notes.send(Note::Clock(sample)).is_err() => return,
            Ok(_) => readiness.see_to(&closer).await,
            Err(error) => {
                let why = why(&error);
                debug!(error = why, "the database's clock could not be read; the last reading is carried on");
                // With the floor gone nobody needs the news; the next reading ends this.
                let _ = notes.send(Note::NoClock(format!("it does not say what time it is: {why}")));
            }
        }
    }
}
