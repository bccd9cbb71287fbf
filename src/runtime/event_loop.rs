//! The loop around the engine of one kind: passes inputs in, with the time, and runs the actions that come out.
//!
//! Forwards and times; decides nothing about an alarm. `warnings.rs` logs.

use std::time::Duration;

use order_timeout_core::alarm::{Delivered, Receipt, Settlement};
use order_timeout_core::clock::DatabaseClock;
use order_timeout_core::engine::{
    Action, Batch, BatchResult, ClosingInput, ClosingPolicy, Engine, Input, Policy, Snapshot, Unavailable,
};
use order_timeout_core::order::Timestamp;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::GiveUp;
use super::broker_inspections::BrokerInput;
use super::supervisor::Phase;
use super::warnings::Warnings;
use crate::effects::Effects;
use crate::effects::clock::ClockReading;
use crate::effects::closing_watch::ClosingReport;
use crate::give_way::ClosingFlag;
use crate::observe::degraded::Cause;
use crate::observe::health::BEAT_EVERY;
use crate::observe::inspect::contract_watch::ContractWatch;
use crate::observe::inspect::sweep_watch::SweepWatch;
use crate::observe::recorder::KindRecorder;
use crate::postgres;

/// Deliveries that are passed in before actions are polled: enough to amortise the cost, few enough not to delay a batch.
const INPUTS_AT_ONCE: usize = 256;

/// The channels from the event loop to the other tasks.
pub(super) struct Outputs {
    pub settlements: mpsc::UnboundedSender<Vec<(Receipt, Settlement)>>,
    pub phase: watch::Sender<Phase>,
    pub inspections: mpsc::UnboundedSender<BrokerInput>,
    /// What the engine has closed, and that closing must pause.
    pub closing_reports: mpsc::UnboundedSender<ClosingReport>,
    /// Whether a closer is busy, for tasks that wait for idle closers.
    pub closing: ClosingFlag,
}

pub(super) struct EventLoop {
    engine: Engine,
    clock: DatabaseClock,
    effects: Effects,
    outputs: Outputs,
    counted: Counted,
    contract: ContractWatch,
    sweep: SweepWatch,
    warnings: Warnings,
    recorder: KindRecorder,
}

/// The engine's counts as they were last added to the metrics.
#[derive(Debug, Default)]
struct Counted {
    early_returns: u64,
    without_alarm: u64,
    in_time: u64,
}

impl EventLoop {
    pub fn new(
        policy: Policy,
        closing: Option<ClosingPolicy>,
        contract: ContractWatch,
        clock: DatabaseClock,
        effects: Effects,
        outputs: Outputs,
        recorder: KindRecorder,
    ) -> Self {
        Self {
            engine: match closing {
                Some(closing) => Engine::with_provider(policy, closing),
                None => Engine::new(policy),
            },
            clock,
            effects,
            outputs,
            counted: Counted::default(),
            contract,
            sweep: SweepWatch::default(),
            warnings: Warnings::default(),
            recorder,
        }
    }

    /// Runs until `stop`, then until all work in flight is finished or given up.
    pub async fn work(
        mut self,
        mut inbox: mpsc::UnboundedReceiver<Delivered>,
        mut inputs: mpsc::UnboundedReceiver<Input>,
        mut clock_readings: mpsc::UnboundedReceiver<ClockReading>,
        stop: CancellationToken,
        give_up: GiveUp,
    ) {
        let mut delivered = Vec::with_capacity(INPUTS_AT_ONCE);
        let mut stopping = false;
        let mut inbox_is_open = true;
        self.recorder.clock(Some(&self.clock));
        loop {
            self.recorder.health.event_loop.note();
            if self.run_actions() || self.has_more_to_do() {
                // Tasks that were started go first. In a burst the engine has more to wake for many rounds that do not wait for
                // anything: without this, the first batches would be sent, and their results read, only after the last round.
                tokio::task::yield_now().await;
            }
            // A task ends only after it has sent its inputs.
            if stopping && self.engine.closers_are_idle() && self.effects.tasks.is_empty() && inputs.is_empty() {
                break;
            }
            let beat_at = Instant::now() + BEAT_EVERY;
            let wake_at =
                self.engine.next_wakeup().map_or(beat_at, |moment| beat_at.min(self.clock.instant_of(moment).into()));
            tokio::select! {
                biased;
                () = stop.cancelled(), if !stopping => {
                    stopping = true;
                    self.begin_draining();
                }
                () = give_up.moment() => break,
                // One a second; before inputs, of which a burst has no end.
                Some(reading) = clock_readings.recv() => self.take_clock(reading),
                Some(input) = inputs.recv() => self.take(input),
                count = inbox.recv_many(&mut delivered, INPUTS_AT_ONCE), if inbox_is_open => {
                    // Closed when the supervisor has ended, which may be before the other tasks during a shutdown.
                    inbox_is_open = count > 0;
                    let now = self.clock.now();
                    for one in delivered.drain(..) {
                        self.recorder.delivered(&one, now);
                        self.engine.handle(Input::Delivered(one), now);
                    }
                }
                // The last task to end may have sent nothing.
                () = self.effects.tasks.wait(), if stopping && !self.effects.tasks.is_empty() => {}
                () = tokio::time::sleep_until(wake_at) => {}
            }
        }
        self.recorder.log_last_closed();
        self.outputs.phase.send_replace(Phase::Close);
    }

    fn has_more_to_do(&self) -> bool {
        self.engine.next_wakeup().is_some_and(|at| at <= self.clock.now())
    }

    fn begin_draining(&mut self) {
        info!(
            held = self.engine.snapshot(self.clock.now()).held,
            "stopping: accepting nothing new, finishing work in flight"
        );
        self.recorder.note_stopping();
        self.outputs.phase.send_replace(Phase::Drain);
        self.engine.drain();
        self.effects.end_calls();
        self.effects.tasks.close();
    }

    /// Records an input for operators, and passes it in.
    fn take(&mut self, input: Input) {
        match &input {
            Input::Closed(batch, result) => self.record_batch(batch, result),
            Input::Rearmed(receipts) => self.recorder.metrics.alarms_rearmed.inc_by(receipts.len() as u64),
            Input::Swept(page) => self.contract.page_found(page, std::time::Instant::now()),
            Input::NotSwept(why) => {
                self.recorder.metrics.sweep_failures.inc();
                self.warnings.note_not_swept(why);
            }
            Input::Closing(ClosingInput::Ended(_, ended)) => self.recorder.ended(ended),
            Input::Closing(ClosingInput::NotResumed(why)) => self.recorder.not_taken_over(why),
            _ => {}
        }
        self.engine.handle(input, self.clock.now());
    }

    fn take_clock(&mut self, reading: ClockReading) {
        match reading {
            Ok(sample) => {
                if self.clock.learn(sample) {
                    self.engine.handle(Input::ClockSetAhead, self.clock.now());
                }
                self.recorder.clock(Some(&self.clock));
                self.engine.handle(Input::ClockRead, self.clock.now());
                self.report_counts();
                // Arrives each second, so that collected counts are logged even if nothing else happens.
                self.warnings.log_due(&self.engine, &self.engine.snapshot(self.clock.now()));
                self.effects.parked.lock().expect("no holder panics").log_due();
                self.recorder.log_closed();
                self.contract.clock_read(&self.clock, std::time::Instant::now());
                let why = self.contract.why(std::time::Instant::now());
                self.recorder.degraded(Cause::OrdersContract, why.as_deref());
            }
            Err(why) => {
                self.recorder.clock(None);
                self.engine.handle(Input::ClockNotRead(why), self.clock.now());
            }
        }
        let snapshot = self.engine.snapshot(self.clock.now());
        self.recorder.degraded(Cause::AlarmsCirculate, snapshot.circulation);
        self.recorder.degraded(Cause::AlarmsNotArriving, self.sweep.why(std::time::Instant::now()).as_deref());
        self.recorder.degraded(Cause::ProviderAway, self.effects.sick_provider().as_deref());
        self.recorder.provider_loads(&self.effects.provider_loads());
    }

    fn report_counts(&mut self) {
        // It ends with the worker's stop.
        let _ = self.outputs.closing_reports.send(ClosingReport::Counts(self.engine.take_counts()));
    }

    fn record_batch(&mut self, batch: &Batch, result: &BatchResult) {
        for odd in self.effects.take_odd_answers() {
            self.contract.odd_answer(&odd, std::time::Instant::now());
        }
        if let Err(fault) = result {
            return self.warnings.note_failed_batch(batch, fault);
        }
        self.contract.answered(batch, result, std::time::Instant::now());
    }

    /// Runs what the engine asks for; returns whether there was anything.
    fn run_actions(&mut self) -> bool {
        let now = self.clock.now();
        let actions = self.engine.poll_actions(now);
        let were_any = !actions.is_empty();
        for action in actions {
            match action {
                Action::Close(batch) => self.effects.close(batch, self.clock),
                Action::Closing(action) => self.effects.closing(action, self.clock),
                // As above; then nothing is closed any more.
                Action::PauseClosing(trip) => drop(self.outputs.closing_reports.send(ClosingReport::Trip(trip))),
                Action::ReportCounts => self.report_counts(),
                Action::Rearm(jobs) => self.effects.rearm(jobs, self.clock),
                Action::Park(dead_letters) => self.effects.park(dead_letters),
                Action::Sweep(page) => {
                    self.contract.page_asked(&page, std::time::Instant::now());
                    self.effects.sweep(page, now);
                }
                // Without the supervisor there is no session, and every receipt is void.
                Action::Settle(settlements) => drop(self.outputs.settlements.send(settlements)),
            }
        }
        let closing = !self.engine.closers_are_idle();
        self.outputs.closing.set(closing);
        let snapshot = self.engine.snapshot(now);
        self.update_phase(self.engine.wants_deliveries(now), snapshot.closing_is_paused);
        self.warnings.note_availability(&snapshot);
        self.update_metrics(&snapshot, now);
        let (without_alarm, in_time) = (snapshot.closed_without_alarm, snapshot.closed_in_time);
        let missed = without_alarm - self.counted.without_alarm;
        if missed > 0 {
            // They end with the worker's stop.
            let _ = self.outputs.inspections.send(BrokerInput::WithoutAlarm);
            self.warnings.note_without_alarm(missed);
        }
        let closed_in_time = in_time - self.counted.in_time;
        if missed + closed_in_time > 0 {
            self.sweep.closed(missed, closed_in_time, std::time::Instant::now());
        }
        self.counted = Counted { early_returns: snapshot.early_returns, without_alarm, in_time };
        were_any
    }

    /// Publishes the engine's counts and whether the database is usable.
    fn update_metrics(&self, snapshot: &Snapshot<'_>, now: Timestamp) {
        let metrics = &self.recorder.metrics;
        metrics.alarms_held.set(snapshot.held as i64);
        metrics.early_returns.inc_by(snapshot.early_returns - self.counted.early_returns);
        metrics.closed_without_alarm.inc_by(snapshot.closed_without_alarm - self.counted.without_alarm);
        metrics.orders_asked_about.set(snapshot.asked_about as i64);
        metrics.orders_backed_off.set(snapshot.backed_off as i64);
        let overdue_for = snapshot.oldest_overdue.map_or(Duration::ZERO, |deadline| now.since(deadline));
        let is_known = snapshot.overdue_is_known && self.effects.finds_overdue();
        metrics.oldest_overdue.show(&[], is_known.then_some(overdue_for.as_secs_f64()));
        let why = snapshot.unavailable.map(Unavailable::reason);
        metrics.database_unavailable.set(i64::from(why.is_some()));
        self.recorder.health.note_database(why.map(postgres::without_server_message).as_deref());
    }

    fn update_phase(&self, wanted: bool, is_paused: bool) {
        self.outputs.phase.send_if_modified(|phase| {
            let next = match (*phase, wanted) {
                // `observe/recorder.rs` has logged why.
                (Phase::Consume, false) if is_paused => Phase::Rest,
                (Phase::Consume, false) => {
                    warn!("nothing could be closed, re-armed or parked for worker.requeue_after, as the previous warnings say; alarms are returned to the broker until that changes");
                    self.recorder.health.note_paused(true);
                    Phase::Rest
                }
                (Phase::Rest, true) => {
                    self.recorder.health.note_paused(false);
                    Phase::Consume
                }
                (unchanged, _) => unchanged,
            };
            std::mem::replace(phase, next) != next
        });
    }
}
