//! The workers of the world: what surrounds the engine in production, step by step.

use std::collections::HashMap;

use order_timeout_core::alarm::{DeadLetter, Delivered, Rearm, Receipt, Settlement, SourceQueue, Wanted};
use order_timeout_core::brake::OtherWorkers;
use order_timeout_core::engine::{
    Action, Batch, BatchResult, Call, CallKind, Claim, ClosingAction, ClosingInput, Ended, EndingKind, Input, Origin,
    ResumePage,
};
use order_timeout_core::order::{CloseResult, OrderId, SweepPage, SweptPage, Timestamp};
use order_timeout_core::payment::Answer;

use super::closing::Ends;
use super::mutant_engine::MutantEngine;
use super::{Mutant, World, shifted};
use crate::events::Event;

/// How many workers there are, running or not.
pub const WORKERS: usize = 2;
/// How many rounds a worker may take until it must be idle: several times what all orders of a history need, tried once
/// each and found again by the sweep.
const MAX_ROUNDS: u32 = 200;

/// An action between its hand-out and its report.
#[derive(Debug)]
enum PendingAction {
    Close { batch: Batch, read: Option<HashMap<OrderId, CloseResult>>, result: Option<BatchResult> },
    Rearm { rearms: Vec<Rearm>, written: bool },
    Park { dead_letters: Vec<(DeadLetter, Receipt)>, written: bool },
    Sweep { page: SweepPage, found: Option<SweptPage> },
    TakeOver { page: ResumePage, claims: Option<Vec<Claim>> },
    Call { call: Call, answer: Option<Answer> },
    End { kind: EndingKind, ends: Ends, ended: Option<Vec<Ended>> },
}

/// What undisturbed time may stop at, so that the next step hits it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PendingSort {
    Close,
    Ask,
    Cancel,
    CloseClaimed,
    SettlePaid,
}

/// A fault injected into the next stage of an action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// It happens, and the worker gets a connection error instead of the result.
    ResultLost,
    /// A deadlock or a timeout: nothing happens. Only a close can have it.
    Transient,
}

impl PendingAction {
    fn can_have(&self, fault: Fault) -> bool {
        let is_to_be_closed = matches!(self, Self::Close { result: None, .. } | Self::End { ended: None, .. });
        let is_to_be_made = matches!(self, Self::TakeOver { claims: None, .. } | Self::Call { answer: None, .. });
        match fault {
            Fault::None => true,
            Fault::ResultLost => {
                is_to_be_closed || is_to_be_made || matches!(self, Self::Rearm { .. } | Self::Park { .. })
            }
            Fault::Transient => is_to_be_closed,
        }
    }
}

/// A running worker.
pub struct Worker {
    pub(super) engine: MutantEngine,
    pub(super) others: OtherWorkers,
    /// `None` while the broker is away, or while the engine wants no deliveries.
    session: Option<u64>,
    next_tag: u64,
    pending: Vec<PendingAction>,
    stopping: bool,
    /// Whether it has read if closing is paused; until then it has not started.
    has_looked: bool,
    /// The pause that its engine knows.
    known_pause: Option<u32>,
    /// The number of pauses when it was started.
    pauses_before: u32,
    /// Its engine has found that closing must pause, and the pause is not written.
    has_tripped: bool,
}

impl World {
    pub fn start(&mut self, worker: usize) {
        self.note_if(self.workers[worker].is_none() && self.sessions > 0, Event::Restarted);
        self.starts += u32::from(self.workers[worker].is_none());
        // The other worker sometimes has settings without the providers.
        let asks = self.has_provider && (worker == 0 || !self.starts.is_multiple_of(3));
        self.workers[worker].get_or_insert_with(|| Worker {
            engine: MutantEngine::new(self.mutant, asks),
            others: OtherWorkers::default(),
            session: None,
            next_tag: 1,
            pending: Vec::new(),
            stopping: false,
            has_looked: false,
            known_pause: None,
            pauses_before: self.pauses,
            has_tripped: false,
        });
    }

    /// kill -9: what was executed stays executed, and nothing is reported.
    pub fn crash(&mut self, worker: usize) {
        self.note_if(self.is_at_work(worker), Event::CrashedAtWork);
        if let Some(session) = self.workers[worker].take().and_then(|worker| worker.session) {
            self.end_session(session);
        }
    }

    /// SIGTERM: it accepts nothing new, finishes what it has begun, and ends.
    pub fn stop(&mut self, worker: usize) {
        let is_at_work = self.is_at_work(worker);
        if let Some(worker) = self.workers[worker].as_mut().filter(|worker| !worker.stopping) {
            worker.stopping = true;
            worker.engine.drain();
            self.note_if(is_at_work, Event::StoppedAtWork);
        }
    }

    /// Whether a worker has pending actions or unacknowledged alarms.
    fn is_at_work(&self, worker: usize) -> bool {
        self.workers[worker].as_ref().is_some_and(|worker| {
            let is_its_own = |receipt: &Receipt| worker.session == Some(receipt.session);
            !worker.pending.is_empty() || self.unacknowledged.keys().any(is_its_own)
        })
    }

    /// Whether a worker has a pending action of this sort that has not reached its server.
    pub(super) fn has_pending(&self, worker: usize, sort: PendingSort) -> bool {
        let is_such = |action: &PendingAction| match action {
            PendingAction::Close { batch, result: None, .. } => sort == PendingSort::Close && !batch.items.is_empty(),
            PendingAction::Call { call, answer: None } => match call.kind {
                CallKind::Ask => sort == PendingSort::Ask,
                CallKind::Cancel => sort == PendingSort::Cancel,
            },
            PendingAction::End { kind, ended: None, .. } => match kind {
                EndingKind::Close => sort == PendingSort::CloseClaimed,
                EndingKind::SettlePaid => sort == PendingSort::SettlePaid,
                EndingKind::Postpone => false,
            },
            _ => false,
        };
        self.workers[worker].as_ref().is_some_and(|worker| worker.pending.iter().any(is_such))
    }

    /// The attempts about which a worker is about to call.
    pub(super) fn pending_calls(&self) -> Vec<String> {
        let pending = self.workers.iter().flatten().flat_map(|worker| &worker.pending);
        let reference = |action: &PendingAction| match action {
            PendingAction::Call { call, answer: None } => Some(call.attempt.reference.clone()),
            _ => None,
        };
        pending.filter_map(reference).collect()
    }

    /// Whether any worker runs and is not stopping.
    pub fn any_worker_runs(&self) -> bool {
        self.workers.iter().flatten().any(|worker| !worker.stopping)
    }

    /// Whether every worker takes deliveries.
    pub fn all_are_consuming(&self) -> bool {
        self.workers.iter().all(|worker| worker.as_ref().is_some_and(|worker| worker.session.is_some()))
    }

    pub fn lose_session(&mut self, worker: usize) {
        let now = self.worker_time();
        let Some(worker) = &mut self.workers[worker] else { return };
        if let Some(session) = worker.session.take() {
            worker.engine.handle(Input::SessionEnded, now);
            self.end_session(session);
            self.note(Event::SessionLost);
        }
    }

    /// Opens and closes the session as the engine wants it and the broker allows it. Returns whether it has just been
    /// opened.
    fn supervise(&mut self, worker: &mut Worker, now: Timestamp) -> bool {
        match (worker.session, worker.engine.wants_deliveries(now)) {
            _ if worker.stopping => {}
            (Some(session), false) => {
                worker.session = None;
                worker.engine.handle(Input::SessionEnded, now);
                self.end_session(session);
                self.note(Event::SessionClosedByWorker);
            }
            (None, true) if !self.broker_is_away => {
                self.sessions += 1;
                (worker.session, worker.next_tag) = (Some(self.sessions), 1);
                return true;
            }
            (None, _) | (Some(_), true) => {}
        }
        false
    }

    /// One turn of a worker's loop: take deliveries, hand out actions.
    pub fn turn(&mut self, n: usize) {
        let now = self.worker_time();
        let Some(mut worker) = self.workers[n].take() else { return };
        self.look_at_pause(&mut worker, now);
        if !worker.has_looked && !worker.stopping {
            self.workers[n] = Some(worker);
            return;
        }
        let has_opened = self.supervise(&mut worker, now);
        // The opening of a session and its deliveries are separate inputs in no fixed order: for every other session,
        // the opening comes after the first deliveries.
        let opens_late = self.sessions % 2 == 1;
        if has_opened && !opens_late {
            worker.engine.handle(Input::SessionOpened(self.sessions), now);
        }
        if let Some(session) = worker.session.filter(|_| !worker.stopping) {
            self.deliver(&mut worker, session, now);
        }
        self.hand_out(&mut worker, now);
        if has_opened && opens_late {
            worker.engine.handle(Input::SessionOpened(self.sessions), now);
        }
        if worker.stopping && worker.pending.is_empty() && worker.engine.closers_are_idle() {
            if let Some(session) = worker.session {
                self.end_session(session);
            }
            self.note(Event::ShutDownCleanly);
        } else {
            self.workers[n] = Some(worker);
        }
    }

    /// Has the brake judge, and reads whether closing is paused, as a worker does before its first order and then each
    /// second.
    fn look_at_pause(&mut self, worker: &mut Worker, now: Timestamp) {
        if self.database_is_away {
            return;
        }
        self.turn_brake(worker, now);
        let has_tripped = std::mem::take(&mut worker.has_tripped);
        if has_tripped {
            self.trip_brake();
        }
        let forgets = self.mutant == Mutant::BrakeForgetsOnRestart;
        let found = self.pause.filter(|pause| !forgets || *pause > worker.pauses_before);
        self.note_if(!worker.has_looked && found.is_some(), Event::StartedWhilePaused);
        worker.has_looked = true;
        if worker.known_pause != found || has_tripped {
            worker.known_pause = found;
            self.has_changed = true;
            let input = if found.is_some() { Input::ClosingPaused } else { Input::ClosingResumed };
            worker.engine.handle(input, now);
        }
    }

    /// Between its reading of the pauses and this no time has passed.
    fn check_pause(&mut self, action: &Action, has_tripped: bool) {
        let closes = match action {
            Action::Close(batch) => !batch.items.is_empty(),
            Action::Closing(ClosingAction::SettlePaid(_) | ClosingAction::Postpone(_)) => false,
            Action::Closing(_) | Action::Sweep(_) => true,
            _ => false,
        };
        if closes && (has_tripped || self.pause.is_some() && !self.database_is_away) {
            self.closed_in_pause = Some(format!("during a pause a worker wants {action:?}"));
        }
    }

    /// Lets every worker do what there is to do at this moment, until no worker has left anything for another.
    ///
    /// If a worker does not become idle, or would be woken at once again.
    pub(super) fn run_workers(&mut self) -> Result<(), String> {
        self.first_worker = (self.first_worker + 1) % WORKERS;
        for _ in 0..MAX_ROUNDS {
            let had_changed = std::mem::take(&mut self.has_changed);
            for n in 0..WORKERS {
                self.run_until_idle((self.first_worker + n) % WORKERS)?;
            }
            let is_idle = !self.has_changed;
            self.has_changed |= had_changed;
            if self.stops_at.is_some() {
                return Ok(());
            }
            if is_idle {
                return self.check_no_busy_loop();
            }
        }
        Err("the workers do not become idle".to_owned())
    }

    fn check_no_busy_loop(&self) -> Result<(), String> {
        match self.next_wake() {
            Some(moment) if moment <= self.now => {
                Err("a worker that has nothing to do wants to be woken now".to_owned())
            }
            Some(_) | None => Ok(()),
        }
    }

    /// When the next worker wants to be woken, in the broker's time.
    pub(super) fn next_wake(&self) -> Option<Timestamp> {
        let started = self.workers.iter().flatten().filter(|worker| worker.has_looked);
        let wakes = started.filter_map(|worker| worker.engine.next_wakeup());
        wakes.map(|wake_at| shifted(wake_at, -self.clock_set_ms - self.skew_ms)).min()
    }

    /// Turns until there is nothing to do before time passes.
    fn run_until_idle(&mut self, n: usize) -> Result<(), String> {
        for _ in 0..MAX_ROUNDS {
            self.turn(n);
            let actions = self.workers[n].as_ref().map_or(0, |worker| worker.pending.len());
            if actions == 0 || self.stops_at.is_some_and(|sort| self.has_pending(n, sort)) {
                return Ok(());
            }
            while self.workers[n].as_ref().is_some_and(|worker| !worker.pending.is_empty()) {
                self.progress(n, 0, Fault::None);
            }
        }
        Err(format!("worker {n} does not become idle"))
    }

    fn deliver(&mut self, worker: &mut Worker, session: u64, now: Timestamp) {
        for source in [SourceQueue::Timeout, SourceQueue::Inbox] {
            let queue = if source == SourceQueue::Inbox { &mut self.arm } else { &mut self.timeout };
            for alarm in std::mem::take(queue) {
                self.has_changed = true;
                let receipt = Receipt { session, channel: 0, tag: worker.next_tag };
                worker.next_tag += 1;
                if source == SourceQueue::Timeout {
                    self.note(if alarm.deadline() > now { Event::DeliveredEarly } else { Event::DeliveredLate });
                }
                let known_session = worker.engine.session_of(&alarm);
                self.note_if(known_session.is_some_and(|old| old < session), Event::RedeliveredWhileInFlight);
                self.note_if(known_session == Some(session), Event::DuplicateWhileInFlight);
                self.unacknowledged.insert(receipt, (source, alarm.clone()));
                worker
                    .engine
                    .handle(Input::Delivered(Delivered { receipt, source, content: Ok(alarm), death: None }), now);
            }
        }
    }

    fn hand_out(&mut self, worker: &mut Worker, now: Timestamp) {
        let actions = worker.engine.poll_actions(now);
        worker.has_tripped |= actions.iter().any(|action| matches!(action, Action::PauseClosing(_)));
        for action in actions {
            self.check_pause(&action, worker.has_tripped);
            match action {
                Action::Settle(settlements) => self.settle(settlements),
                Action::Close(batch) => {
                    if self.mutant == Mutant::AckBeforeCommit {
                        self.settle(receipts(&batch).map(|receipt| (receipt, Settlement::Ack)).collect());
                    }
                    worker.pending.push(PendingAction::Close { batch, read: None, result: None });
                }
                Action::Rearm(rearms) => {
                    if self.mutant == Mutant::AckBeforeConfirm {
                        self.settle(rearms.iter().map(|rearm| (rearm.receipt, Settlement::Ack)).collect());
                    }
                    worker.pending.push(PendingAction::Rearm { rearms, written: false });
                }
                Action::Park(dead_letters) => worker.pending.push(PendingAction::Park { dead_letters, written: false }),
                Action::Sweep(page) => worker.pending.push(PendingAction::Sweep { page, found: None }),
                Action::Closing(action) => worker.pending.push(pending_closing(action)),
                // When the worker looks next.
                Action::PauseClosing(_) | Action::ReportCounts => self.has_changed = true,
            }
        }
    }

    /// Takes the nth action of a worker that this fault can hit one stage further: it happens, then it is reported.
    pub fn progress(&mut self, worker: usize, n: usize, fault: Fault) {
        let Some(mut running) = self.workers[worker].take() else { return };
        let able: Vec<usize> = (0..running.pending.len()).filter(|at| running.pending[*at].can_have(fault)).collect();
        if let Some(which) = n.checked_rem(able.len()) {
            let action = running.pending.swap_remove(able[which]);
            let now = self.worker_time();
            match self.next_stage(action, fault) {
                Ok(pending) => running.pending.push(pending),
                Err(input) => running.engine.handle(input, now),
            }
        }
        self.workers[worker] = Some(running);
    }

    /// The same for whichever worker has an action that this fault can hit.
    pub fn progress_any(&mut self, n: usize, fault: Fault) {
        let is_able = |worker: &Worker| worker.pending.iter().any(|action| action.can_have(fault));
        let able: Vec<usize> =
            (0..WORKERS).filter(|worker| self.workers[*worker].as_ref().is_some_and(is_able)).collect();
        if let Some(which) = n.checked_rem(able.len()) {
            self.progress(able[which], n / able.len(), fault);
        }
    }

    /// The action one stage further, or the input that reports its end.
    #[allow(clippy::result_large_err)] // it is no error, and few are on their way
    fn next_stage(&mut self, action: PendingAction, fault: Fault) -> Result<PendingAction, Input> {
        match action {
            PendingAction::Close { batch, result: Some(result), .. } => Err(Input::Closed(batch, result)),
            PendingAction::Close { batch, read: None, .. } if self.mutant == Mutant::NoStatusGuard => {
                let read =
                    Some(batch.items.iter().filter_map(|item| self.read_row(&item.alarm.alarm.order_id)).collect());
                Ok(PendingAction::Close { batch, read, result: None })
            }
            PendingAction::Close { batch, read, .. } => {
                let result = Some(self.close_batch(&batch, read, fault));
                Ok(PendingAction::Close { batch, read: None, result })
            }
            PendingAction::Rearm { rearms, written: false } if self.broker_is_away || self.broker_is_silent => {
                self.note(Event::RearmUnconfirmed);
                Err(Input::NotRearmed(rearms))
            }
            PendingAction::Rearm { rearms, written: false } if self.broker_refuses => {
                self.note(Event::RearmRefused);
                Err(Input::RearmRefused(rearms))
            }
            PendingAction::Rearm { rearms, written: false } => {
                for rearm in &rearms {
                    self.note(self.kind_of(rearm));
                    self.write_alarm(rearm);
                }
                self.confirmed(rearms, fault)
            }
            PendingAction::Rearm { rearms, .. } if fault == Fault::ResultLost => self.confirmed(rearms, fault),
            PendingAction::Rearm { rearms, .. } => {
                Err(Input::Rearmed(rearms.into_iter().map(|rearm| rearm.receipt).collect()))
            }
            PendingAction::Park { dead_letters, written: false } if self.database_is_away => {
                Err(Input::NotParked(dead_letters))
            }
            PendingAction::Park { dead_letters, written: false } => {
                self.parked.extend(dead_letters.iter().filter_map(|(dead_letter, _)| dead_letter.order_id.clone()));
                self.note(Event::Parked);
                if fault == Fault::ResultLost {
                    Err(Input::NotParked(dead_letters))
                } else {
                    Ok(PendingAction::Park { dead_letters, written: true })
                }
            }
            PendingAction::Park { dead_letters, .. } if fault == Fault::ResultLost => {
                Err(Input::NotParked(dead_letters))
            }
            PendingAction::Park { dead_letters, .. } => {
                Err(Input::Parked(dead_letters.into_iter().map(|(_, receipt)| receipt).collect()))
            }
            PendingAction::Sweep { found: None, .. } if self.database_is_away => {
                self.note(Event::SweepFoundDatabaseAway);
                Err(Input::NotSwept("the database is away".into()))
            }
            PendingAction::Sweep { page, found: None } => {
                let found = Some(self.overdue(&page));
                Ok(PendingAction::Sweep { page, found })
            }
            PendingAction::Sweep { found: Some(found), .. } => Err(Input::Swept(found)),
            PendingAction::TakeOver { claims: None, .. } if self.database_is_away => {
                Err(Input::Closing(ClosingInput::NotResumed("the database is away".into())))
            }
            PendingAction::TakeOver { page, claims: None } => {
                let claims = self.take_over(&page);
                if fault == Fault::ResultLost {
                    return Err(Input::Closing(ClosingInput::NotResumed("the connection is gone".into())));
                }
                Ok(PendingAction::TakeOver { page, claims: Some(claims) })
            }
            PendingAction::TakeOver { claims: Some(claims), .. } => Err(Input::Closing(ClosingInput::Resumed(claims))),
            PendingAction::Call { call, answer: None } => {
                let answer = Some(self.call(&call, fault == Fault::ResultLost));
                Ok(PendingAction::Call { call, answer })
            }
            PendingAction::Call { call, answer: Some(answer) } => {
                Err(Input::Closing(ClosingInput::Answered(call, answer)))
            }
            PendingAction::End { kind, ends, ended: None } => {
                let ended = Some(self.end_orders(&ends, fault));
                Ok(PendingAction::End { kind, ends, ended })
            }
            PendingAction::End { kind, ended: Some(ended), .. } => {
                Err(Input::Closing(ClosingInput::Ended(kind, ended)))
            }
        }
    }

    /// The write is about to be reported, or its confirm is lost.
    #[allow(clippy::result_large_err)] // it is no error, and few are on their way
    fn confirmed(&mut self, rearms: Vec<Rearm>, fault: Fault) -> Result<PendingAction, Input> {
        if fault != Fault::ResultLost {
            return Ok(PendingAction::Rearm { rearms, written: true });
        }
        self.note(Event::ConfirmLost);
        Err(Input::NotRearmed(rearms))
    }

    fn kind_of(&self, rearm: &Rearm) -> Event {
        match (rearm.wanted, self.unacknowledged.get(&rearm.receipt)) {
            (Wanted::AtOnce, _) => Event::Rearmed,
            (Wanted::NotBefore(_), _) => Event::RetriedThroughBroker,
            (Wanted::BeforeDeadline, Some((SourceQueue::Timeout, _))) => Event::Rearmed,
            (Wanted::BeforeDeadline, _) => Event::RearmedFromInbox,
        }
    }
}

fn pending_closing(action: ClosingAction) -> PendingAction {
    let end = |kind, ends| PendingAction::End { kind, ends, ended: None };
    match action {
        ClosingAction::Resume(page) => PendingAction::TakeOver { page, claims: None },
        ClosingAction::Call(call) => PendingAction::Call { call, answer: None },
        ClosingAction::CloseClaimed(endings) => end(EndingKind::Close, Ends::Close(endings)),
        ClosingAction::SettlePaid(endings) => end(EndingKind::SettlePaid, Ends::SettlePaid(endings)),
        ClosingAction::Postpone(ends) => end(EndingKind::Postpone, Ends::Postpone(ends)),
    }
}

fn receipts(batch: &Batch) -> impl Iterator<Item = Receipt> {
    batch.items.iter().filter_map(|item| match item.origin {
        Origin::Delivered(receipt) => Some(receipt),
        Origin::LookedAhead | Origin::Swept => None,
    })
}
