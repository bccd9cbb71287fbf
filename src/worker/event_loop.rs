//! The loop around the engine: passes inputs in, with the time, and runs the actions that come out.
//!
//! Forwards, times and logs; decides nothing about an alarm.

use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::broker_inspections::BrokerInput;
use super::effects::{Effects, Note};
use super::supervisor::Phase;
use super::{GiveUp, Recorder, inspections, policy};
use crate::alarm::{Delivered, Receipt, Settlement};
use crate::clock::DatabaseClock;
use crate::config::Settings;
use crate::database;
use crate::degraded::Cause;
use crate::engine::{Action, Batch, Engine, Input};
use crate::health::{BEAT_EVERY, Lifecycle, Loop};
use crate::inspect::contract_watch::ContractWatch;
use crate::logging::LogThrottle;
use crate::order::{CloseError, ClosedBy, OrderId, Timestamp};

/// Deliveries that are passed in before actions are polled: enough to amortise the cost, few enough not to delay a batch.
const INPUTS_AT_ONCE: usize = 256;
/// How long the query for overdue orders may fail before the database is reported as unavailable.
const LONGEST_UNSWEPT: Duration = Duration::from_secs(5);

/// The channels from the event loop to the other tasks.
pub(super) struct Outputs {
    pub settlements: mpsc::UnboundedSender<Vec<(Receipt, Settlement)>>,
    pub phase: watch::Sender<Phase>,
    pub inspections: mpsc::UnboundedSender<BrokerInput>,
    /// Whether a closer is busy, for tasks that wait for idle closers.
    pub closing: watch::Sender<bool>,
}

pub(super) struct EventLoop {
    engine: Engine,
    clock: DatabaseClock,
    effects: Effects,
    outputs: Outputs,
    closes_nothing: bool,
    /// Why the last reading of the database's clock failed.
    why_unanswered: Option<String>,
    unswept: Option<Unswept>,
    /// Whether the query for overdue orders has succeeded since it last failed.
    has_swept: bool,
    contract: ContractWatch,
    not_swept: Warning<String>,
    /// How many orders the sweep has closed since this was last logged.
    swept: Warning<usize>,
    /// An overdue order that the sweep could not close, and why.
    stuck: Warning<Option<(OrderId, String)>>,
    recorder: Recorder,
}

/// The query for overdue orders fails again and again: since when, last when, and why.
#[derive(Debug)]
struct Unswept {
    first: Instant,
    last: Instant,
    why: String,
}

/// The subject of a warning, collected since it was last logged.
#[derive(Debug, Default)]
struct Warning<T> {
    about: T,
    said: LogThrottle,
}

impl<T: Default + PartialEq> Warning<T> {
    /// What to log now, if there is anything and it was not logged just before.
    fn take_due(&mut self) -> Option<T> {
        let is_due = self.about != T::default() && self.said.is_due();
        is_due.then(|| std::mem::take(&mut self.about))
    }
}

impl EventLoop {
    pub fn new(
        settings: &Settings,
        clock: DatabaseClock,
        effects: Effects,
        outputs: Outputs,
        recorder: Recorder,
    ) -> Self {
        let (close_name, overdue_name) = inspections::names(settings);
        let contract = ContractWatch::new(close_name, overdue_name, std::time::Instant::now());
        Self {
            engine: Engine::new(policy(settings)),
            clock,
            effects,
            outputs,
            closes_nothing: false,
            why_unanswered: None,
            unswept: None,
            has_swept: false,
            contract,
            not_swept: Warning::default(),
            swept: Warning::default(),
            stuck: Warning::default(),
            recorder,
        }
    }

    /// Runs until `stop`, then until all work in flight is finished or given up.
    pub async fn work(
        mut self,
        mut inbox: mpsc::UnboundedReceiver<Delivered>,
        mut notes: mpsc::UnboundedReceiver<Note>,
        stop: CancellationToken,
        give_up: GiveUp,
    ) {
        let mut delivered = Vec::with_capacity(INPUTS_AT_ONCE);
        let mut stopping = false;
        let mut inbox_is_open = true;
        self.recorder.clock(&self.clock);
        loop {
            self.recorder.health.beat(Loop::EventLoop);
            if self.run_actions() || self.has_more_to_do() {
                // Tasks that were started go first. In a burst the engine has more to wake for many rounds that do not wait for
                // anything: without this, the first batches would be sent, and their results read, only after the last round.
                tokio::task::yield_now().await;
            }
            // A task ends only after it has sent its notes.
            if stopping && self.engine.closers_are_idle() && self.effects.tasks.is_empty() && notes.is_empty() {
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
                Some(note) = notes.recv() => self.take(note),
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
        self.outputs.phase.send_replace(Phase::Close);
    }

    fn has_more_to_do(&self) -> bool {
        self.engine.next_wakeup().is_some_and(|at| at <= self.clock.now())
    }

    fn begin_draining(&mut self) {
        info!(held = self.engine.held(), "stopping: accepting nothing new, finishing work in flight");
        self.recorder.health.note_lifecycle(Lifecycle::Stopping);
        self.outputs.phase.send_replace(Phase::Drain);
        self.engine.drain();
        self.effects.tasks.close();
    }

    fn take(&mut self, note: Note) {
        match note {
            Note::Input(news) => {
                match &news {
                    Input::Closed(batch, Err(fault)) => self.record_stuck_order(batch, fault),
                    Input::Closed(batch, answer) => self.contract.answered(batch, answer, std::time::Instant::now()),
                    Input::Rearmed(receipts) => self.recorder.metrics.alarms_rearmed.inc_by(receipts.len() as u64),
                    Input::Swept(page) => {
                        self.unswept = None;
                        self.has_swept = true;
                        self.contract.page_found(page, std::time::Instant::now());
                    }
                    _ => {}
                }
                self.engine.handle(news, self.clock.now());
            }
            Note::Clock(sample) => {
                self.clock.learn(sample);
                self.why_unanswered = None;
                self.recorder.clock(&self.clock);
                // Arrives each second, so that collected counts are logged even if nothing else happens.
                self.log_swept_orders();
                self.log_stuck_orders();
                self.effects.parked.lock().expect("no holder panics").log_due();
                self.report_broker_behaviour();
                let why = self.contract.why(std::time::Instant::now());
                self.recorder.degraded(Cause::OrdersContract, why.as_deref());
            }
            Note::NoClock(why) => {
                self.why_unanswered = Some(why);
                self.recorder.no_clock();
                self.report_broker_behaviour();
            }
            Note::OddAnswer(odd) => self.contract.odd_answer(&odd, std::time::Instant::now()),
            Note::NotSwept(why) => {
                self.has_swept = false;
                self.recorder.metrics.sweep_failures.inc();
                self.record_failed_sweep(why);
                self.engine.handle(Input::NotSwept, self.clock.now());
            }
            // Without the broker no alarm is expected.
            Note::ClosedBySweep(orders) if self.engine.is_consuming() => {
                self.swept.about += orders;
                // They end with the worker's stop.
                let _ = self.outputs.inspections.send(BrokerInput::Swept);
                self.log_swept_orders();
            }
            Note::ClosedBySweep(_) => {}
        }
    }

    fn record_stuck_order(&mut self, batch: &Batch, fault: &CloseError) {
        match (fault, batch.by, &batch.items[..]) {
            (CloseError::Unavailable(_), ..) => {}
            // Only an order that was alone in its batch has caused the error.
            (fault, ClosedBy::Sweep, [item]) => {
                self.stuck.about = Some((item.alarm.order_id().clone(), fault.to_string()));
            }
            _ => {}
        }
    }

    /// Logs at once, and then at most once a minute, that the query for overdue orders fails.
    fn record_failed_sweep(&mut self, why: String) {
        let now = Instant::now();
        let first = self.unswept.take().map_or(now, |unswept| unswept.first);
        self.not_swept.about.clone_from(&why);
        self.unswept = Some(Unswept { first, last: now, why });
        if let Some(why) = self.not_swept.take_due() {
            warn!(why, "the query for overdue orders failed; retrying");
        }
    }

    /// Logs at most once a minute that the sweep closed orders whose alarm had not arrived.
    fn log_swept_orders(&mut self) {
        if let Some(orders) = self.swept.take_due() {
            warn!(
                orders,
                "the sweep closed overdue orders whose alarm had not arrived in time; is every order scheduled, and is the broker keeping up?"
            );
        }
    }

    /// The same for orders that the sweep cannot close. Without an alarm, nothing is parked for them.
    fn log_stuck_orders(&mut self) {
        // Most orders that fail once are closed a moment later.
        self.stuck.about.take_if(|(order_id, _)| !self.engine.is_backed_off(order_id));
        if let Some((order_id, why)) = self.stuck.take_due().flatten() {
            let orders = self.engine.backed_off();
            warn!(orders, %order_id, %why, "overdue orders cannot be closed, this one among them; retrying at most five minutes apart");
        }
    }

    fn report_broker_behaviour(&self) {
        let now = self.clock.now();
        self.recorder.degraded(Cause::AlarmsCirculate, self.engine.circulation_reason(now).as_deref());
        self.recorder.degraded(Cause::BrokerPolicy, self.engine.broker_policy_reason(now));
    }

    /// Runs what the engine asks for; returns whether there was anything.
    fn run_actions(&mut self) -> bool {
        let now = self.clock.now();
        let actions = self.engine.poll_actions(now);
        let were_any = !actions.is_empty();
        for action in actions {
            match action {
                Action::Close(batch) => self.effects.close(batch, self.clock),
                Action::Rearm(jobs) => self.effects.arm(jobs, self.clock),
                Action::Park(dead_letters) => self.effects.park(dead_letters),
                Action::Sweep(page) => {
                    self.contract.page_asked(&page, std::time::Instant::now());
                    self.effects.sweep(page);
                }
                // Without the supervisor there is no session, and every receipt is void.
                Action::Settle(settlements) => drop(self.outputs.settlements.send(settlements)),
            }
        }
        let closing = !self.engine.closers_are_idle();
        self.outputs.closing.send_if_modified(|known| std::mem::replace(known, closing) != closing);
        self.record_availability(now);
        self.update_phase(self.engine.wants_deliveries(now));
        self.update_metrics(now);
        were_any
    }

    /// Publishes the engine's counts and whether the database is usable.
    fn update_metrics(&self, now: Timestamp) {
        let metrics = &self.recorder.metrics;
        metrics.alarms_held.set(self.engine.held() as i64);
        metrics.alarms_held_back.set(self.engine.held_back() as i64);
        metrics.early_returns.inc_by(self.engine.early_returns() - metrics.early_returns.get());
        metrics.orders_swept.inc_by(self.engine.swept() - metrics.orders_swept.get());
        metrics.orders_backed_off.set(self.engine.backed_off() as i64);
        // An unavailable database is not queried.
        let is_known = self.has_swept && !self.engine.database_is_unavailable();
        let overdue_for = self.engine.oldest_overdue().map_or(Duration::ZERO, |deadline| now.since(deadline));
        metrics.oldest_overdue.show(is_known.then_some(overdue_for.as_secs_f64()));
        // With a long `sweep.every` it may have been a single failure, long ago.
        let unswept = self.unswept.as_ref().filter(|unswept| unswept.last - unswept.first >= LONGEST_UNSWEPT);
        let why_nothing = self.engine.unavailable_reason(now).or(self.why_unanswered.as_deref());
        let why = why_nothing.or(unswept.map(|unswept| unswept.why.as_str()));
        metrics.database_unavailable.set(i64::from(why.is_some()));
        self.recorder.health.note_database(why.map(database::without_server_message).as_deref());
    }

    fn record_availability(&mut self, now: Timestamp) {
        let why_nothing = self.engine.unavailable_reason(now);
        match why_nothing {
            Some(why) if !self.closes_nothing => warn!(why, "the database closes nothing; retrying"),
            None if self.closes_nothing => info!("the database closes orders again"),
            _ => {}
        }
        self.closes_nothing = why_nothing.is_some();
    }

    fn update_phase(&self, wanted: bool) {
        self.outputs.phase.send_if_modified(|phase| {
            let next = match (*phase, wanted) {
                (Phase::Consume, false) => {
                    warn!("nothing could be closed, re-armed or parked for worker.requeue_after, as the previous warnings say; alarms are returned to the broker until that changes");
                    self.recorder.health.note_lifecycle(Lifecycle::Paused);
                    Phase::Rest
                }
                (Phase::Rest, true) => {
                    self.recorder.health.note_lifecycle(Lifecycle::Running);
                    Phase::Consume
                }
                (unchanged, _) => unchanged,
            };
            std::mem::replace(phase, next) != next
        });
    }
}
