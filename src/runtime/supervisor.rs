//! Keeps one consumer session open across broker failures, and sends the settlements of its deliveries.
//!
//! Decides only from the phase when to consume; the engine decides about deliveries.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use order_timeout_amqp::connect::EndKind;
use order_timeout_amqp::publisher::MissingRoute;
use order_timeout_core::alarm::Delivered;
use order_timeout_core::engine::Input;
use order_timeout_core::kind::Kind;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tracing::{info, warn};

use super::ack_batcher::AckBatcher;
use super::active_kinds::ActiveKinds;
use super::broker_inspections::BrokerInput;
use crate::config::Settings;
use crate::deliver::{DeclaredAgain, OpenError, Opening, Session, SessionEnd, purge_commands};
use crate::loop_backoff::Backoff;
use crate::observe::degraded::Cause;
use crate::observe::health::BEAT_EVERY;
use crate::observe::recorder::KindRecorder;

/// The number of the session that is opened at the start.
pub(super) const FIRST_SESSION: u64 = 1;
/// A session that ends sooner does not reset the backoff.
const STABLE_AFTER: Duration = Duration::from_secs(5);
/// How long a stopping worker waits for a session that is being opened, in order to close it.
const LAST_OPENING: Duration = Duration::from_secs(2);
/// How long the last settlements of an ended session may take.
const LAST_SETTLING: Duration = Duration::from_secs(1);

/// What the supervisor does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Keep a session open.
    Consume,
    /// Keep none: alarms that cannot be closed must not stay unacknowledged.
    Rest,
    /// Accept nothing new, but go on settling.
    Drain,
    /// Send the last settlements and close.
    Close,
}

/// The channels to the tasks that need to know when a session begins and ends.
pub(super) struct Listeners {
    pub inputs: mpsc::UnboundedSender<Input>,
    pub inspections: mpsc::UnboundedSender<BrokerInput>,
    /// What is declared again is declared for all of them.
    pub active_kinds: ActiveKinds,
}

/// What is consumed, and where it goes.
pub(super) struct Consumption {
    pub settings: Settings,
    pub kind: Kind,
    pub alarms: mpsc::UnboundedSender<Delivered>,
}

pub(super) struct Supervisor {
    what: Consumption,
    ack_batcher: AckBatcher,
    phase: watch::Receiver<Phase>,
    listeners: Listeners,
    next_session: u64,
    /// Whether a session has been open: the deployment was set up then.
    had_session: bool,
    /// Notified when an exchange or a queue is missing.
    missing_route: Arc<MissingRoute>,
    /// Whether a message is known that ends every session.
    unreadable: bool,
    /// Whether an internal error of the broker ended the last session.
    broker_failed: bool,
    recorder: KindRecorder,
}

impl Supervisor {
    pub fn new(
        what: Consumption,
        ack_batcher: AckBatcher,
        phase: watch::Receiver<Phase>,
        listeners: Listeners,
        missing_route: Arc<MissingRoute>,
        recorder: KindRecorder,
    ) -> Self {
        let (next_session, had_session, unreadable, broker_failed) = (FIRST_SESSION + 1, false, false, false);
        Self {
            what,
            ack_batcher,
            phase,
            listeners,
            next_session,
            had_session,
            missing_route,
            unreadable,
            broker_failed,
            recorder,
        }
    }

    pub async fn run(mut self, first: Option<Session>) {
        let mut session = first;
        let mut backoff = Backoff::new();
        loop {
            self.recorder.health.supervisor.note();
            if let Some(open) = session.take() {
                let opened = Instant::now();
                self.had_session = true;
                self.send_to_event_loop(Input::SessionOpened(open.number()));
                self.send_to_inspections(BrokerInput::SessionOpened(open.connection()));
                self.recorder.session_opened();
                let end = self.attend(open).await;
                self.recorder.session_ended(&end.why);
                self.send_to_event_loop(Input::SessionEnded);
                self.send_to_inspections(BrokerInput::SessionEnded);
                self.note_unreadable(&end);
                if opened.elapsed() >= STABLE_AFTER {
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
                    match &fault {
                        OpenError::Ended(end) => self.note_unreadable(end),
                        OpenError::OwnObjects(why) => {
                            self.send_to_inspections(BrokerInput::NotDeclared(why.clone()));
                        }
                        OpenError::Broker(_) => {}
                    }
                    self.pause(pause).await;
                    None
                }
            };
            self.next_session += 1;
        }
    }

    /// Opens a session; `None` if the worker stops meanwhile.
    async fn open(&mut self) -> Option<Result<Session, OpenError>> {
        let opening = Opening { number: self.next_session, must_be_set_up: !self.had_session };
        let Consumption { settings, kind, alarms } = &self.what;
        let mut opening = pin!(Session::open(settings, kind, opening, alarms.clone()));
        tokio::select! {
            opened = &mut opening => return Some(opened),
            _ = self.phase.wait_for(|phase| matches!(phase, Phase::Drain | Phase::Close)) => {}
        }
        // It may be consuming already; dropping it would not end that.
        if let Ok(Ok(session)) = tokio::time::timeout(LAST_OPENING, opening).await {
            session.close().await;
        }
        None
    }

    fn send_to_event_loop(&self, input: Input) {
        // Without the event loop the input is not needed.
        let _ = self.listeners.inputs.send(input);
    }

    /// If a message ended the session, it will end the next one too.
    fn note_unreadable(&mut self, end: &SessionEnd) {
        // A broker also fails for other reasons, but then not twice in a row.
        let ended_again = std::mem::replace(&mut self.broker_failed, end.kind == EndKind::BrokerFailed);
        if end.kind == EndKind::Unreadable || end.kind == EndKind::BrokerFailed && ended_again {
            self.unreadable = true;
            let purge = purge_commands(&self.what.settings, &self.what.kind);
            let why = format!(
                "{}, and it ends every session; purge the queue that holds it: {purge}. Nothing is lost: overdue orders are found in the database",
                end.why
            );
            self.recorder.degraded(Cause::UnreadableMessage, Some(&why));
        }
    }

    fn send_to_inspections(&self, news: BrokerInput) {
        // The receiver may have ended with the worker's stop.
        let _ = self.listeners.inspections.send(news);
    }

    /// Sends settlements until the session ends or is no longer wanted; returns why.
    async fn attend(&mut self, session: Session) -> SessionEnd {
        let opened = Instant::now();
        let mut cancelled = false;
        // Concurrently: an overloaded broker may take a minute to declare.
        let mut declaring = None;
        loop {
            self.recorder.health.supervisor.note();
            if opened.elapsed() >= STABLE_AFTER {
                self.broker_failed = false;
                if std::mem::take(&mut self.unreadable) {
                    self.recorder.degraded(Cause::UnreadableMessage, None);
                }
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
                    // In one piece, so that few frames are sent: RabbitMQ redelivers settlements that a channel has not passed
                    // on to a quorum queue when it is closed, and a channel passes on 32 at a time.
                    if let Err(error) = session.settle(&self.ack_batcher.take()).await {
                        warn!(%error, "the last deliveries could not be settled; the broker redelivers them");
                    }
                    session.close().await;
                    return SessionEnd::other("the worker accepts no alarms");
                }
            }
            tokio::select! {
                end = session.ended(), if !cancelled => {
                    let why = &end.why;
                    warn!(%why, "the consumer session ended; the broker redelivers unacknowledged alarms");
                    self.leave(session).await;
                    return end;
                }
                settlements = self.ack_batcher.next(|receipt| session.may_settle_later(receipt)) => {
                    if let Err(error) = session.settle(&settlements).await {
                        let end = session.end_after(&error).await;
                        warn!(error = %end.why, "deliveries could not be settled; closing the session");
                        self.leave(session).await;
                        return end;
                    }
                }
                what = self.missing_route.noted(), if declaring.is_none() => {
                    let declare = session.declare_again(&self.what.settings);
                    declaring = Some(Box::pin(async move { (what, declare.await) }));
                }
                (what, declared) = async { declaring.as_mut().expect("guarded by is_some()").await }, if declaring.is_some() => {
                    declaring = None;
                    log_declared(&what, &declared);
                    self.listeners.active_kinds.tell_declared(&what, &declared);
                }
                _ = self.phase.changed() => {}
                () = tokio::time::sleep(BEAT_EVERY) => {}
            }
        }
    }

    /// Closes a session that has ended. If only one of its channels has ended, the deferred settlements of the others, which
    /// may be seconds old, are still sent.
    async fn leave(&mut self, session: Session) {
        let _ = tokio::time::timeout(LAST_SETTLING, session.settle(&self.ack_batcher.take())).await;
        session.close().await;
    }

    /// Returns false if there will be no further session.
    async fn wait_until_wanted(&mut self) -> bool {
        loop {
            let wanted = self.phase.wait_for(|phase| *phase != Phase::Rest);
            if let Ok(phase) = tokio::time::timeout(BEAT_EVERY, wanted).await {
                return phase.is_ok_and(|phase| *phase == Phase::Consume);
            }
            self.recorder.health.supervisor.note();
        }
    }

    /// Waits, unless the worker stops.
    async fn pause(&mut self, pause: Duration) {
        let stopping = self.phase.wait_for(|phase| matches!(phase, Phase::Drain | Phase::Close));
        let _ = tokio::time::timeout(pause, stopping).await;
    }
}

fn log_declared(what: &str, declared: &DeclaredAgain) {
    let faults: Vec<String> = match declared {
        Ok(of_kinds) => {
            of_kinds.values().filter_map(|of_kind| of_kind.as_ref().err()).map(ToString::to_string).collect()
        }
        Err(shared) => vec![shared.to_string()],
    };
    if faults.is_empty() {
        info!(what, "exchanges, queues and bindings are declared again");
    }
    for fault in faults {
        warn!(what, fault, "exchanges, queues and bindings cannot be declared again");
    }
}
