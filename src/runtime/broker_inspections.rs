//! Inspects the broker every few seconds: whether the declared objects still exist and have our arguments, and whether slots
//! that confirmed nothing confirm again.
//!
//! Lets the supervisor declare missing objects again; changes nothing else on the broker. Does nothing per order, and
//! no close waits for it. What else may be wrong with a broker is the doctor's to find.

use std::sync::Arc;
use std::time::Duration;

use order_timeout_amqp::connect::Connection;
use order_timeout_amqp::publisher::MissingRoute;
use order_timeout_amqp::topology::{Topology, TopologyError};
use order_timeout_core::kind::Kind;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::kind_worker::Publishing;
use crate::config::Settings;
use crate::deliver::topology_of_workers;
use crate::effects::slots::SlotDeclarer;
use crate::give_way::GiveWay;
use crate::observe::degraded::Cause;
use crate::observe::recorder::KindRecorder;

/// How long after a session was opened the broker is first inspected.
const FIRST_AFTER: Duration = Duration::from_secs(1);
const EVERY: Duration = Duration::from_secs(10);
/// The same while something is wrong, so that its end is noticed soon.
const AGAIN_AFTER: Duration = Duration::from_secs(4);

/// The events that inspections react to.
#[derive(Debug)]
pub(super) enum BrokerInput {
    SessionOpened(Arc<Connection>),
    SessionEnded,
    /// No session was opened, because an object of this kind differs or may not be declared.
    NotDeclared(String),
    /// A route was missing: which, and whether the objects that this kind needs were declared again.
    DeclaredAgain(String, Result<(), TopologyError>),
    /// Orders were closed without their alarms although a session is open.
    WithoutAlarm,
}

pub(super) struct BrokerInspections {
    topology: Topology,
    slots: SlotDeclarer,
    missing_route: Arc<MissingRoute>,
    /// Whether the next declaration was requested here.
    declaring: bool,
    give_way: GiveWay,
    recorder: KindRecorder,
    session: Option<Arc<Connection>>,
    next_at: Instant,
    /// Whether a binding may be missing, which cannot be seen: orders were closed without their alarms.
    swept: bool,
    missing: Option<String>,
    not_declared: Option<String>,
}

impl BrokerInspections {
    pub fn new(
        settings: &Settings,
        kind: &Kind,
        Publishing { confirmed, slots }: Publishing,
        give_way: GiveWay,
        recorder: KindRecorder,
    ) -> Self {
        Self {
            topology: topology_of_workers(settings).seen_by(kind),
            missing_route: confirmed.missing_route(),
            slots,
            declaring: false,
            give_way,
            recorder,
            session: None,
            next_at: Instant::now(),
            swept: false,
            missing: None,
            not_declared: None,
        }
    }

    /// Runs until `stop`, or until the channel is closed.
    pub async fn run(mut self, mut inputs: mpsc::UnboundedReceiver<BrokerInput>, stop: CancellationToken) {
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                input = inputs.recv() => match input {
                    None => break,
                    Some(input) => self.handle(input),
                },
                () = self.give_way.due(self.next_at), if self.session.is_some() => self.inspect().await,
            }
            self.report();
        }
    }

    fn handle(&mut self, input: BrokerInput) {
        let now = Instant::now();
        match input {
            BrokerInput::SessionOpened(connection) => {
                // Opening it has declared everything.
                (self.missing, self.not_declared) = (None, None);
                self.session = Some(connection);
                self.next_at = now + FIRST_AFTER;
            }
            // The next session declares everything, and the next inspection finds what is wrong then.
            BrokerInput::SessionEnded => (self.session, self.missing, self.not_declared) = (None, None, None),
            BrokerInput::NotDeclared(why) => self.not_declared = Some(why),
            BrokerInput::DeclaredAgain(what, Ok(())) => {
                self.not_declared = None;
                if !std::mem::take(&mut self.declaring) && self.missing.is_none() {
                    self.note_missing(&what);
                }
            }
            BrokerInput::DeclaredAgain(_, Err(fault)) => {
                self.declaring = false;
                self.not_declared = Some(fault.to_string());
                self.next_at = now + AGAIN_AFTER;
            }
            BrokerInput::WithoutAlarm => self.swept = true,
        }
    }

    fn note_missing(&mut self, what: &str) {
        self.missing = Some(format!(
            "{what}; what is missing is declared again. What was published there meanwhile was returned to its publisher, or went to an alternate exchange; find out who deletes exchanges, queues or bindings of this namespace"
        ));
        self.next_at = Instant::now() + AGAIN_AFTER;
    }

    async fn inspect(&mut self) {
        let Some(connection) = self.session.clone() else { return };
        match self.topology.inspect(&connection).await {
            // What could not be declared is right by now.
            Ok(()) => (self.missing, self.not_declared) = (None, None),
            Err(fault @ TopologyError::Missing { .. }) => {
                self.note_missing(&fault.to_string());
                self.declare_again(&fault.to_string());
            }
            // A broken connection is reported by the end of the session.
            Err(fault @ TopologyError::Failed { .. }) => debug!(%fault, "the broker could not be inspected"),
            Err(fault) => self.not_declared = Some(fault.to_string()),
        }
        if std::mem::take(&mut self.swept) {
            self.declare_again("orders were closed whose alarms did not arrive");
        }
        let pause = if self.topology_fault().is_some() { AGAIN_AFTER } else { EVERY };
        self.next_at = Instant::now() + pause;
    }

    fn declare_again(&mut self, what: &str) {
        self.declaring = true;
        self.missing_route.note(what.to_owned());
    }

    fn topology_fault(&self) -> Option<String> {
        let found = self.not_declared.as_ref().or(self.missing.as_ref());
        found.cloned().or_else(|| self.slots.why_refused())
    }

    /// Reports what is wrong, and what is no more.
    fn report(&self) {
        self.recorder.degraded(Cause::Topology, self.topology_fault().as_deref());
    }
}
