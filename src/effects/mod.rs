//! Runs the engine's actions, each as a task of its own, and reports the result. One file for each action; settlements
//! go to the consumer session (`runtime/ack_batcher.rs`).
//!
//! One try each: the engine decides whether and when to retry.

pub(crate) mod brake;
pub(crate) mod clock;
pub mod close;
pub mod closing;
pub(crate) mod closing_watch;
pub(crate) mod handled;
pub(crate) mod orders;
pub(crate) mod park;
pub mod rearm;
pub mod slots;
pub mod sweep;

use std::sync::{Arc, Mutex};

use futures_util::future::BoxFuture;
use order_timeout_core::alarm::Rearm;
use order_timeout_core::clock::DatabaseClock;
use order_timeout_core::engine::{Batch, BatchResult, ClosingAction, Input};
use order_timeout_core::order::{OddAnswer, SweepPage, Timestamp};
use tokio::sync::mpsc;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, debug};

use crate::observe::recorder::KindRecorder;
use crate::postgres::Database;
use close::{Closer, log_results};
use closing::ClosingEffects;
use orders::Orders;
use park::{Addressed, ParkResult, ParkedWarnings, Parking, park_all};
use rearm::{Rearmer, Written};

/// What the effects need, and the channel for their results.
pub(crate) struct Effects {
    orders: Orders,
    /// `None` if no payment provider is asked: then nothing is claimed.
    closing: Option<ClosingWithProvider>,
    database: Database,
    /// `None` without a broker, where there is no alarm to rearm.
    rearmer: Option<Rearmer>,
    inputs: mpsc::UnboundedSender<Input>,
    recorder: KindRecorder,
    pub parked: Arc<Mutex<ParkedWarnings>>,
    pub tasks: TaskTracker,
}

/// What orders need that a payment provider is asked about.
pub(crate) struct ClosingWithProvider {
    /// Claims orders, instead of the closer that closes them.
    pub claimer: Closer,
    pub effects: ClosingEffects,
}

impl Effects {
    pub fn new(
        orders: Orders,
        database: Database,
        rearmer: Option<Rearmer>,
        inputs: mpsc::UnboundedSender<Input>,
        recorder: KindRecorder,
    ) -> Self {
        let parked = Arc::default();
        Self { orders, closing: None, database, rearmer, inputs, recorder, parked, tasks: TaskTracker::new() }
    }

    fn spawn(&self, effect: impl Future<Output = Vec<Input>> + Send + 'static) {
        let inputs = self.inputs.clone();
        let report = async move {
            for input in effect.await {
                // Without the event loop the result is not needed.
                let _ = inputs.send(input);
            }
        };
        // So that its log lines name the kind.
        self.tasks.spawn(report.in_current_span());
    }

    /// Rows of the close statement that violate the contract, since the last call.
    pub fn take_odd_answers(&self) -> Vec<OddAnswer> {
        self.orders.take_odd_answers()
    }

    pub fn close(&self, batch: Batch, clock: DatabaseClock) {
        let orders = self.orders.clone();
        self.run_batch(batch, clock, |batch| {
            Box::pin(async move {
                let result = orders.close(&batch).await;
                (batch, result)
            })
        });
    }

    /// Runs only for an engine that has a provider, which has these effects.
    pub fn claim(&self, batch: Batch, clock: DatabaseClock) {
        let Some(closing) = &self.closing else { return };
        let claimer = closing.claimer.clone();
        self.run_batch(batch, clock, |batch| {
            Box::pin(async move {
                let result = orders::close(&claimer, &batch).await;
                (batch, result)
            })
        });
    }

    /// As above.
    pub fn closing(&self, action: ClosingAction) {
        let Some(closing) = &self.closing else { return };
        let effects = closing.effects.clone();
        self.spawn(async move { vec![Input::Closing(effects.run(action).await)] });
    }

    fn run_batch<F>(&self, batch: Batch, clock: DatabaseClock, close: F)
    where
        F: FnOnce(Batch) -> BoxFuture<'static, (Batch, BatchResult)> + Send + 'static,
    {
        let recorder = self.recorder.clone();
        self.spawn(async move {
            let began = clock.now();
            let (batch, result) = close(batch).await;
            let now = clock.now();
            let took = now.since(began);
            debug!(orders = batch.items.len(), took_ms = took.as_secs_f64() * 1e3, "batch executed");
            recorder.record_batch(&batch, &result, began, now);
            log_results(&batch, &result, now);
            vec![Input::Closed(batch, result)]
        });
    }

    pub fn rearm(&self, jobs: Vec<Rearm>, clock: DatabaseClock) {
        let Some(rearmer) = self.rearmer.clone() else { return };
        self.spawn(async move {
            let Written { confirmed, refused, failed } = rearmer.write(jobs, clock).await;
            let (done, refused) = (about(confirmed, Input::Rearmed), about(refused, Input::RearmRefused));
            [done, refused, about(failed, Input::NotRearmed)].into_iter().flatten().collect()
        });
    }

    pub fn park(&self, dead_letters: Vec<Addressed>) {
        let (database, recorder, said) = (self.database.clone(), self.recorder.clone(), self.parked.clone());
        self.spawn(async move {
            let to = Parking { database, recorder, said };
            let ParkResult { parked, refused, failed } = park_all(&to, dead_letters).await;
            let (done, refused) = (about(parked, Input::Parked), about(refused, Input::ParkRefused));
            [done, refused, about(failed, Input::NotParked)].into_iter().flatten().collect()
        });
    }

    /// Whether overdue orders are found at all.
    pub fn finds_overdue(&self) -> bool {
        self.orders.finds_overdue()
    }

    pub fn sweep(&self, page: SweepPage, now: Timestamp) {
        let orders = self.orders.clone();
        self.spawn(async move {
            vec![match orders.overdue(&page, now).await {
                Ok(overdue) => Input::Swept(overdue),
                Err(why) => Input::NotSwept(why),
            }]
        });
    }
}

/// An input about these items, unless there are none.
fn about<T>(items: Vec<T>, input: impl FnOnce(Vec<T>) -> Input) -> Option<Input> {
    (!items.is_empty()).then(|| input(items))
}
