//! The workers of the world: what stands around the engine in production, step by step.

use std::collections::HashMap;

use order_timeout::alarm::{DeadLetter, Delivered, Rearm, Receipt, Settlement, SourceQueue, Wanted};
use order_timeout::engine::{Action, Batch, BatchResult, Input, Origin};
use order_timeout::order::{CloseResult, OrderId, SweepPage, SweptPage, Timestamp};

use super::mutant_engine::MutantEngine;
use super::{Mutant, World, shifted};
use crate::events::Event;

/// How many workers there are, running or not.
pub const WORKERS: usize = 2;
/// How often a worker may be asked whether there is more to do before it must be at rest: several times what all orders
/// of a history need, tried once each and found again by the sweep.
const MOST_ROUNDS: u32 = 200;

/// An errand between its hand-out and its report.
#[derive(Debug)]
enum Underway {
    Close { batch: Batch, read: Option<HashMap<OrderId, CloseResult>>, answer: Option<BatchResult> },
    Arm { rearms: Vec<Rearm>, written: bool },
    Park { dead_letters: Vec<(DeadLetter, Receipt)>, written: bool },
    Sweep { page: SweepPage, found: Option<SweptPage> },
}

/// What becomes of an errand's next stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Done,
    /// It happens, and the worker hears of a broken connection.
    AnswerIsLost,
    /// A deadlock or a timeout: nothing happens. Only a close can have it.
    Transient,
}

impl Underway {
    fn can_have(&self, fate: Fate) -> bool {
        let is_to_be_closed = matches!(self, Self::Close { answer: None, .. });
        match fate {
            Fate::Done => true,
            Fate::AnswerIsLost => is_to_be_closed || matches!(self, Self::Arm { .. } | Self::Park { .. }),
            Fate::Transient => is_to_be_closed,
        }
    }
}

/// A running worker.
pub struct Worker {
    engine: MutantEngine,
    /// `None` while the broker is away, or while the engine wants no deliveries.
    session: Option<u64>,
    next_tag: u64,
    underway: Vec<Underway>,
    stopping: bool,
}

impl World {
    pub fn start(&mut self, worker: usize) {
        self.note_if(self.workers[worker].is_none() && self.sessions > 0, Event::StartedAgain);
        self.workers[worker].get_or_insert_with(|| Worker {
            engine: MutantEngine::new(self.mutant),
            session: None,
            next_tag: 1,
            underway: Vec::new(),
            stopping: false,
        });
    }

    /// kill -9: what was executed stays executed, nobody is told.
    pub fn crash(&mut self, worker: usize) {
        self.note_if(self.is_at_work(worker), Event::CrashedAtWork);
        if let Some(session) = self.workers[worker].take().and_then(|worker| worker.session) {
            self.end_session(session);
        }
    }

    /// SIGTERM: it takes nothing new, finishes what it has begun, and ends.
    pub fn stop(&mut self, worker: usize) {
        let is_at_work = self.is_at_work(worker);
        if let Some(worker) = self.workers[worker].as_mut().filter(|worker| !worker.stopping) {
            worker.stopping = true;
            worker.engine.drain();
            self.note_if(is_at_work, Event::StoppedAtWork);
        }
    }

    /// Whether a worker has actions under way or alarms that it has not acknowledged.
    fn is_at_work(&self, worker: usize) -> bool {
        self.workers[worker].as_ref().is_some_and(|worker| {
            let is_its_own = |receipt: &Receipt| worker.session == Some(receipt.session);
            !worker.underway.is_empty() || self.unacknowledged.keys().any(is_its_own)
        })
    }

    /// Whether a worker has a close under way that has not reached the database.
    pub(super) fn closes_something(&self, worker: usize) -> bool {
        let is_such = |errand: &Underway| match errand {
            Underway::Close { batch, answer: None, .. } => !batch.items.is_empty(),
            _ => false,
        };
        self.workers[worker].as_ref().is_some_and(|worker| worker.underway.iter().any(is_such))
    }

    /// Whether a worker runs that will go on running.
    pub fn somebody_works(&self) -> bool {
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

    /// Opens and closes the session as the engine wants it, and as the broker lets it. Returns whether it is open just now.
    fn supervise(&mut self, worker: &mut Worker, now: Timestamp) -> bool {
        match (worker.session, worker.engine.wants_deliveries(now)) {
            _ if worker.stopping => {}
            (Some(session), false) => {
                worker.session = None;
                worker.engine.handle(Input::SessionEnded, now);
                self.end_session(session);
                self.note(Event::SessionGivenUp);
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

    /// One turn of a worker's loop: take what is delivered, hand out what can be done.
    pub fn turn(&mut self, n: usize) {
        let now = self.worker_time();
        let Some(mut worker) = self.workers[n].take() else { return };
        let has_opened = self.supervise(&mut worker, now);
        // Input of a session and its deliveries come by ways of their own: every other session is heard of after its first.
        let is_heard_of_late = self.sessions % 2 == 1;
        if has_opened && !is_heard_of_late {
            worker.engine.handle(Input::SessionOpened(self.sessions), now);
        }
        if let Some(session) = worker.session.filter(|_| !worker.stopping) {
            self.deliver(&mut worker, session, now);
        }
        self.hand_out(&mut worker, now);
        if has_opened && is_heard_of_late {
            worker.engine.handle(Input::SessionOpened(self.sessions), now);
        }
        if worker.stopping && worker.underway.is_empty() && worker.engine.closers_are_idle() {
            if let Some(session) = worker.session {
                self.end_session(session);
            }
            self.note(Event::EndedInOrder);
        } else {
            self.workers[n] = Some(worker);
        }
    }

    /// Lets every worker do what there is to do at this moment: until nobody has left anything for another.
    ///
    /// # Errors
    /// If a worker does not come to rest, or would be woken at once again.
    pub(super) fn work(&mut self) -> Result<(), String> {
        self.first_to_work = (self.first_to_work + 1) % WORKERS;
        for _ in 0..MOST_ROUNDS {
            let was_stirred = std::mem::take(&mut self.is_stirred);
            for n in 0..WORKERS {
                self.work_until_at_rest((self.first_to_work + n) % WORKERS)?;
            }
            let is_at_rest = !self.is_stirred;
            self.is_stirred |= was_stirred;
            if self.stops_at_a_close {
                return Ok(());
            }
            if is_at_rest {
                return self.nobody_spins();
            }
        }
        Err("the workers do not come to rest".to_owned())
    }

    fn nobody_spins(&self) -> Result<(), String> {
        match self.next_wake() {
            Some(moment) if moment <= self.now => {
                Err("a worker that has nothing to do wants to be woken now".to_owned())
            }
            Some(_) | None => Ok(()),
        }
    }

    /// When the next worker wants to be woken, in the broker's time.
    pub(super) fn next_wake(&self) -> Option<Timestamp> {
        let wakes = self.workers.iter().flatten().filter_map(|worker| worker.engine.next_wakeup());
        wakes.map(|wake_at| shifted(wake_at, -self.clock_set_ms - self.skew_ms)).min()
    }

    /// Turns until there is nothing to do before time goes on.
    fn work_until_at_rest(&mut self, n: usize) -> Result<(), String> {
        for _ in 0..MOST_ROUNDS {
            self.turn(n);
            let actions = self.workers[n].as_ref().map_or(0, |worker| worker.underway.len());
            if actions == 0 || self.stops_at_a_close && self.closes_something(n) {
                return Ok(());
            }
            while self.workers[n].as_ref().is_some_and(|worker| !worker.underway.is_empty()) {
                self.progress(n, 0, Fate::Done);
            }
        }
        Err(format!("worker {n} does not come to rest"))
    }

    fn deliver(&mut self, worker: &mut Worker, session: u64, now: Timestamp) {
        for source in [SourceQueue::Timeout, SourceQueue::Inbox] {
            let queue = if source == SourceQueue::Inbox { &mut self.arm } else { &mut self.timeout };
            for alarm in std::mem::take(queue) {
                self.is_stirred = true;
                let receipt = Receipt { session, channel: 0, tag: worker.next_tag };
                worker.next_tag += 1;
                if source == SourceQueue::Timeout {
                    self.note(if alarm.deadline() > now { Event::DeliveredEarly } else { Event::DeliveredLate });
                }
                let in_flight = worker.engine.session_of(&alarm);
                self.note_if(in_flight.is_some_and(|old| old < session), Event::RedeliveredWhileInHand);
                self.note_if(in_flight == Some(session), Event::DuplicateWhileInHand);
                self.unacknowledged.insert(receipt, (source, alarm.clone()));
                worker
                    .engine
                    .handle(Input::Delivered(Delivered { receipt, source, content: Ok(alarm), death: None }), now);
            }
        }
    }

    fn hand_out(&mut self, worker: &mut Worker, now: Timestamp) {
        for errand in worker.engine.poll_actions(now) {
            match errand {
                Action::Settle(settlements) => self.settle(settlements),
                Action::Close(batch) => {
                    if self.mutant == Mutant::AckBeforeCommit {
                        self.settle(receipts(&batch).map(|receipt| (receipt, Settlement::Ack)).collect());
                    }
                    worker.underway.push(Underway::Close { batch, read: None, answer: None });
                }
                Action::Rearm(rearms) => {
                    if self.mutant == Mutant::AckBeforeConfirm {
                        self.settle(rearms.iter().map(|rearm| (rearm.receipt, Settlement::Ack)).collect());
                    }
                    worker.underway.push(Underway::Arm { rearms, written: false });
                }
                Action::Park(dead_letters) => worker.underway.push(Underway::Park { dead_letters, written: false }),
                Action::Sweep(page) => worker.underway.push(Underway::Sweep { page, found: None }),
            }
        }
    }

    /// Takes the nth errand of a worker that can have this fate one stage further: it happens, then it is reported.
    pub fn progress(&mut self, worker: usize, n: usize, fate: Fate) {
        let Some(mut running) = self.workers[worker].take() else { return };
        let able: Vec<usize> = (0..running.underway.len()).filter(|at| running.underway[*at].can_have(fate)).collect();
        if let Some(which) = n.checked_rem(able.len()) {
            let errand = running.underway.swap_remove(able[which]);
            let now = self.worker_time();
            match self.next_stage(errand, fate) {
                Ok(underway) => running.underway.push(underway),
                Err(news) => running.engine.handle(news, now),
            }
        }
        self.workers[worker] = Some(running);
    }

    /// The same of whichever worker has an errand that can have this fate.
    pub fn befall(&mut self, n: usize, fate: Fate) {
        let is_able = |worker: &Worker| worker.underway.iter().any(|errand| errand.can_have(fate));
        let able: Vec<usize> =
            (0..WORKERS).filter(|worker| self.workers[*worker].as_ref().is_some_and(is_able)).collect();
        if let Some(which) = n.checked_rem(able.len()) {
            self.progress(able[which], n / able.len(), fate);
        }
    }

    /// The errand one stage further, or the news of its end.
    #[allow(clippy::result_large_err)] // it is no error, and few are on their way
    fn next_stage(&mut self, errand: Underway, fate: Fate) -> Result<Underway, Input> {
        match errand {
            Underway::Close { batch, answer: Some(answer), .. } => Err(Input::Closed(batch, answer)),
            Underway::Close { batch, read: None, .. } if self.mutant == Mutant::NoStatusGuard => {
                let read =
                    Some(batch.items.iter().filter_map(|item| self.look_at(&item.alarm.alarm.order_id)).collect());
                Ok(Underway::Close { batch, read, answer: None })
            }
            Underway::Close { batch, read, .. } => {
                let answer = Some(self.answer(&batch, read, fate));
                Ok(Underway::Close { batch, read: None, answer })
            }
            Underway::Arm { rearms, written: false } if self.broker_is_away || self.broker_is_silent => {
                self.note(Event::NotArmed);
                Err(Input::NotRearmed(rearms))
            }
            Underway::Arm { rearms, written: false } if self.broker_refuses => {
                self.note(Event::ArmRefused);
                Err(Input::RearmRefused(rearms))
            }
            Underway::Arm { rearms, written: false } => {
                for rearm in &rearms {
                    self.note(self.kind_of(rearm));
                    self.write_alarm(rearm);
                }
                self.confirmed(rearms, fate)
            }
            Underway::Arm { rearms, .. } if fate == Fate::AnswerIsLost => self.confirmed(rearms, fate),
            Underway::Arm { rearms, .. } => {
                Err(Input::Rearmed(rearms.into_iter().map(|rearm| rearm.receipt).collect()))
            }
            Underway::Park { dead_letters, written: false } if self.database_is_away => {
                Err(Input::NotParked(dead_letters))
            }
            Underway::Park { dead_letters, written: false } => {
                self.parked.extend(dead_letters.iter().filter_map(|(dead_letter, _)| dead_letter.order_id.clone()));
                self.note(Event::Parked);
                if fate == Fate::AnswerIsLost {
                    Err(Input::NotParked(dead_letters))
                } else {
                    Ok(Underway::Park { dead_letters, written: true })
                }
            }
            Underway::Park { dead_letters, .. } if fate == Fate::AnswerIsLost => Err(Input::NotParked(dead_letters)),
            Underway::Park { dead_letters, .. } => {
                Err(Input::Parked(dead_letters.into_iter().map(|(_, receipt)| receipt).collect()))
            }
            Underway::Sweep { found: None, .. } if self.database_is_away => {
                self.note(Event::SweepFoundDatabaseAway);
                Err(Input::NotSwept)
            }
            Underway::Sweep { page, found: None } => {
                let found = Some(self.overdue(&page));
                Ok(Underway::Sweep { page, found })
            }
            Underway::Sweep { found: Some(found), .. } => Err(Input::Swept(found)),
        }
    }

    /// What was written is about to be reported, or its confirm is lost.
    #[allow(clippy::result_large_err)] // it is no error, and few are on their way
    fn confirmed(&mut self, rearms: Vec<Rearm>, fate: Fate) -> Result<Underway, Input> {
        if fate != Fate::AnswerIsLost {
            return Ok(Underway::Arm { rearms, written: true });
        }
        self.note(Event::ConfirmLost);
        Err(Input::NotRearmed(rearms))
    }

    fn kind_of(&self, rearm: &Rearm) -> Event {
        match (rearm.wanted, self.unacknowledged.get(&rearm.receipt)) {
            (Wanted::AtOnce, _) => Event::Rearmed,
            (Wanted::NotBefore(_), _) => Event::RetriedThroughTheBroker,
            (Wanted::BeforeDeadline, Some((SourceQueue::Timeout, _))) => Event::Rearmed,
            (Wanted::BeforeDeadline, _) => Event::ArmedFromTheInbox,
        }
    }
}

fn receipts(batch: &Batch) -> impl Iterator<Item = Receipt> {
    batch.items.iter().filter_map(|item| match item.origin {
        Origin::Delivered(receipt) => Some(receipt),
        Origin::Swept => None,
    })
}
