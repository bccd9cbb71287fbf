//! Keeps one consumer session open, whatever happens to the broker, and writes the settlements of its deliveries.
//!
//! Decides when to consume from the phase alone; what becomes of a delivery is the engine's business.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{info, warn};

use super::Recorder;
use super::ack_batcher::AckBatcher;
use super::broker_inspections::BrokerNews;
use super::effects::Note;
use super::quarantine::Quarantine;
use crate::backoff::Backoff;
use crate::config::Settings;
use crate::confirm::MissingWay;
use crate::deliver::{Inboxes, OpenError, Opening, Session, SessionEnd};
use crate::engine::Input;
use crate::health::{BEAT_EVERY, Loop};

/// The number of the session that is opened at the start.
pub(super) const FIRST_SESSION: u64 = 1;
/// A session that ends sooner is no sign that the next will fare better.
const LIVED: Duration = Duration::from_secs(5);
/// How long a stopping worker waits for a session that is being opened, so as to close it.
const LAST_OPENING: Duration = Duration::from_secs(2);
/// How long a session that has ended may take to say what it still owes.
const LAST_SETTLING: Duration = Duration::from_secs(1);

/// What the supervisor is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Keep a session open.
    Consume,
    /// Keep none: what cannot be closed must not stay unacknowledged.
    Rest,
    /// Take nothing new, but go on ack_batcher.
    Drain,
    /// Write the last settlements and close.
    Close,
}

/// The tasks that are told when a session begins and ends.
pub(super) struct Listeners {
    pub notes: mpsc::UnboundedSender<Note>,
    pub inspections: mpsc::UnboundedSender<BrokerNews>,
}

pub(super) struct Supervisor {
    settings: Settings,
    inboxes: Inboxes,
    ack_batcher: AckBatcher,
    phase: watch::Receiver<Phase>,
    listeners: Listeners,
    next_session: u64,
    /// Whether a session has been open: the deployment was set up then.
    had_session: bool,
    /// Woken when an exchange or a queue is found to be missing.
    way_is_missing: Arc<MissingWay>,
    quarantine: Quarantine,
    recorder: Recorder,
}

impl Supervisor {
    pub fn new(
        settings: Settings,
        inboxes: Inboxes,
        ack_batcher: AckBatcher,
        phase: watch::Receiver<Phase>,
        listeners: Listeners,
        way_is_missing: Arc<MissingWay>,
        quarantine: Quarantine,
    ) -> Self {
        let (next_session, had_session, recorder) = (FIRST_SESSION + 1, false, quarantine.recorder.clone());
        Self {
            settings,
            inboxes,
            ack_batcher,
            phase,
            listeners,
            next_session,
            had_session,
            way_is_missing,
            quarantine,
            recorder,
        }
    }

    pub async fn run(mut self, first: Option<Session>) {
        let mut session = first;
        let mut backoff = Backoff::new();
        loop {
            self.recorder.health.beat(Loop::Supervisor);
            if let Some(open) = session.take() {
                let opened = Instant::now();
                self.had_session = true;
                self.tell(Input::SessionOpened(open.number()));
                self.tell_inspections(BrokerNews::SessionOpened(open.inspector(&self.settings)));
                self.recorder.session_opened();
                let end = self.attend(open).await;
                self.recorder.session_ended(&end.why);
                self.tell(Input::SessionEnded);
                self.tell_inspections(BrokerNews::SessionEnded);
                let cause_is_gone = self.see_to(&end).await;
                if cause_is_gone || opened.elapsed() >= LIVED {
                    backoff = Backoff::new();
                } else {
                    self.pause(backoff.next_pause()).await;
                }
            }
            if !self.wait_until_wanted().await {
                return;
            }
            session = match self.open().await {
                None => return,
                Some(Ok(open)) => {
                    info!(session = self.next_session, "consuming again");
                    Some(open)
                }
                Some(Err(fault)) => {
                    let pause = backoff.next_pause();
                    self.recorder.health.note_session(Some(&fault.to_string()));
                    warn!(%fault, again_in_ms = pause.as_millis(), "no consumer session");
                    let cause_is_gone = match &fault {
                        OpenError::Ended(end) => self.see_to(end).await,
                        OpenError::Broker(_) => false,
                    };
                    if !cause_is_gone {
                        self.pause(pause).await;
                    }
                    None
                }
            };
            self.next_session += 1;
        }
    }

    /// Opens a session; `None` if the worker stops meanwhile.
    async fn open(&mut self) -> Option<Result<Session, OpenError>> {
        let opening = Opening { number: self.next_session, must_be_set_up: !self.had_session };
        let mut opening = pin!(Session::open(&self.settings, opening, self.inboxes.clone()));
        tokio::select! {
            opened = &mut opening => return Some(opened),
            _ = self.phase.wait_for(|phase| matches!(phase, Phase::Drain | Phase::Close)) => {}
        }
        // It may be consuming already, and would go on doing so if it were just dropped.
        if let Ok(Ok(session)) = tokio::time::timeout(LAST_OPENING, opening).await {
            session.close().await;
        }
        None
    }

    fn tell(&self, news: Input) {
        // Without the event loop the input is not needed.
        let _ = self.listeners.notes.send(Note::Input(news));
    }

    /// Where it was a message that ended the session: has it moved aside, unless the worker stops meanwhile. Returns whether
    /// the next session need not wait.
    async fn see_to(&mut self, end: &SessionEnd) -> bool {
        let mut phase = self.phase.clone();
        tokio::select! {
            cause_is_gone = self.quarantine.see_to(end) => cause_is_gone,
            _ = phase.wait_for(|phase| matches!(phase, Phase::Drain | Phase::Close)) => false,
        }
    }

    fn tell_inspections(&self, news: BrokerNews) {
        // They end with the worker's stop.
        let _ = self.listeners.inspections.send(news);
    }

    /// Settles what comes until the session ends or is no longer wanted; says which.
    async fn attend(&mut self, session: Session) -> SessionEnd {
        let opened = Instant::now();
        let mut cancelled = false;
        // Beside everything else: a broker in trouble may take a minute over it.
        let mut declaring = None;
        loop {
            self.recorder.health.beat(Loop::Supervisor);
            if opened.elapsed() >= LIVED {
                self.quarantine.session_lives();
            }
            let phase = *self.phase.borrow_and_update();
            match phase {
                Phase::Consume => {}
                Phase::Drain if cancelled => {}
                Phase::Drain => {
                    session.cancel().await;
                    cancelled = true;
                }
                Phase::Rest | Phase::Close => {
                    // In one piece, so that it goes in few frames: what a channel of RabbitMQ has not passed on to a quorum
                    // queue when it is closed is delivered again, and it passes on 32 at a time.
                    if let Err(error) = session.settle(&self.ack_batcher.take()).await {
                        warn!(%error, "the last deliveries could not be settled; the broker delivers them again");
                    }
                    session.close().await;
                    return SessionEnd::other("the worker takes no alarms");
                }
            }
            tokio::select! {
                end = session.ended(), if !cancelled => {
                    let why = &end.why;
                    warn!(%why, "the consumer session ended; the broker delivers again what was not acknowledged");
                    self.leave(session).await;
                    return end;
                }
                settlements = self.ack_batcher.next(|receipt| session.may_settle_later(receipt)) => {
                    if let Err(error) = session.settle(&settlements).await {
                        let end = session.end_after(&error).await;
                        warn!(error = %end.why, "deliveries could not be settled; the session is over");
                        self.leave(session).await;
                        return end;
                    }
                }
                what = self.way_is_missing.noted(), if declaring.is_none() => {
                    let declare = session.declare_again(&self.settings);
                    declaring = Some(Box::pin(async move { (what, declare.await) }));
                }
                (what, declared) = async { declaring.as_mut().expect("asked for only if it is").await }, if declaring.is_some() => {
                    declaring = None;
                    match &declared {
                        Ok(()) => info!(what, "a message found no way; whatever was missing has been declared again"),
                        Err(fault) => {
                            warn!(what, %fault, "a message found no way, and what is missing cannot be declared");
                        }
                    }
                    self.tell_inspections(BrokerNews::DeclaredAgain(what, declared));
                }
                _ = self.phase.changed() => {}
                () = tokio::time::sleep(BEAT_EVERY) => {}
            }
        }
    }

    /// Closes a session that has ended, mostly as a whole; but it may have ended for one of its channels alone, and what
    /// gave way to closing is seconds' worth.
    async fn leave(&mut self, session: Session) {
        let _ = tokio::time::timeout(LAST_SETTLING, session.settle(&self.ack_batcher.take())).await;
        session.close().await;
    }

    /// Returns false when there will be no further session.
    async fn wait_until_wanted(&mut self) -> bool {
        loop {
            let wanted = self.phase.wait_for(|phase| *phase != Phase::Rest);
            if let Ok(phase) = tokio::time::timeout(BEAT_EVERY, wanted).await {
                return phase.is_ok_and(|phase| *phase == Phase::Consume);
            }
            self.recorder.health.beat(Loop::Supervisor);
        }
    }

    /// Waits, but not for a worker that stops.
    async fn pause(&mut self, pause: Duration) {
        let stopping = self.phase.wait_for(|phase| matches!(phase, Phase::Drain | Phase::Close));
        let _ = tokio::time::timeout(pause, stopping).await;
    }
}
