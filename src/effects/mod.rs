//! Runs the engine's actions, each as a task of its own, and reports the result. One file for each action; settlements
//! go to the consumer session (`runtime/ack_batcher.rs`).
//!
//! One try each: the engine decides whether and when to retry.

pub(crate) mod brake;
pub(crate) mod clock;
pub mod close;
pub mod closing;
pub(crate) mod closing_watch;
pub(crate) mod due_count;
pub(crate) mod handled;
pub(crate) mod orders;
pub(crate) mod park;
pub mod rearm;
pub mod slots;
pub mod sweep;

use std::sync::{Arc, Mutex};

use order_timeout_core::alarm::Rearm;
use order_timeout_core::clock::DatabaseClock;
use order_timeout_core::engine::{Batch, ClosingAction, ClosingInput, Input};
use order_timeout_core::order::{OddAnswer, SweepPage, Timestamp};
use order_timeout_providers::Load;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{Instrument, debug};

use crate::observe::recorder::KindRecorder;
use crate::postgres::Database;
use close::log_results;
use closing::ClosingEffects;
use orders::Orders;
use park::{Addressed, ParkResult, ParkedWarnings, Parking, park_all};
use rearm::{Rearmer, Written};

/// What the effects need, and the channel for their results.
pub(crate) struct Effects {
    orders: Orders,
    /// `None` if this worker asks no payment provider: orders that it claims are left to other workers.
    closing: Option<ClosingEffects>,
    /// Ends calls to providers, whose answers nothing waits for any more.
    calls_end: CancellationToken,
    database: Database,
    /// `None` without a broker, where there is no alarm to rearm.
    rearmer: Option<Rearmer>,
    inputs: mpsc::UnboundedSender<Input>,
    recorder: KindRecorder,
    pub parked: Arc<Mutex<ParkedWarnings>>,
    pub tasks: TaskTracker,
}

impl Effects {
    /// `closing`: for a kind of which a payment provider is asked.
    pub fn new(
        orders: Orders,
        closing: Option<ClosingEffects>,
        database: Database,
        rearmer: Option<Rearmer>,
        inputs: mpsc::UnboundedSender<Input>,
        recorder: KindRecorder,
    ) -> Self {
        let (parked, tasks, calls_end) = (Arc::default(), TaskTracker::new(), CancellationToken::new());
        Self { orders, closing, calls_end, database, rearmer, inputs, recorder, parked, tasks }
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

    /// Closes the batch, or claims the orders in it of which a provider must be asked.
    pub fn close(&self, batch: Batch, clock: DatabaseClock) {
        let (orders, recorder, inputs) = (self.orders.clone(), self.recorder.clone(), self.inputs.clone());
        let close = async move {
            let began = clock.now();
            let result = orders.close(&batch).await;
            let now = clock.now();
            // Before the batch is recorded, and the next one sent meanwhile: the worker has one thread. Ids are shared, so
            // that a copy is cheap. Without the event loop the result is not needed.
            let _ = inputs.send(Input::Closed(batch.clone(), result.clone()));
            tokio::task::yield_now().await;
            let took = now.since(began);
            debug!(orders = batch.items.len(), took_ms = took.as_secs_f64() * 1e3, "batch executed");
            recorder.record_batch(&batch, &result, began, now);
            log_results(&batch, &result, now);
        };
        self.tasks.spawn(close.in_current_span());
    }

    /// Runs only for an engine that has a provider, which has these effects.
    pub fn closing(&self, action: ClosingAction, clock: DatabaseClock) {
        let Some(effects) = self.closing.clone() else { return };
        let (recorder, began) = (self.recorder.clone(), std::time::Instant::now());
        let is_call = matches!(action, ClosingAction::Call(_));
        let calls_end = self.calls_end.clone();
        self.spawn(async move {
            tokio::select! {
                input = effects.run(action) => {
                    if let ClosingInput::Answered(call, answer) = &input {
                        recorder.answered(call, answer, began.elapsed());
                    }
                    recorder.ended_at_provider(&effects.take_ended(), clock.now());
                    vec![Input::Closing(input)]
                }
                () = calls_end.cancelled(), if is_call => Vec::new(),
            }
        });
    }

    /// Drops every call to a provider: the orders were given back, and another worker repeats the call.
    pub fn end_calls(&self) {
        self.calls_end.cancel();
    }

    /// Why a provider is not asked at the moment.
    pub fn sick_provider(&self) -> Option<String> {
        self.closing.as_ref().and_then(ClosingEffects::sick_provider)
    }

    /// What the limits of each provider do, by name.
    pub fn provider_loads(&self) -> Vec<(String, Load)> {
        self.closing.as_ref().map(ClosingEffects::provider_loads).unwrap_or_default()
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
