//! Inspects the broker every few seconds: whether the declared objects still exist and have our arguments, whether an
//! alternate exchange hides what is missing, and whether slots that confirmed nothing confirm again.
//!
//! Lets the supervisor declare missing objects again; changes nothing else on the broker. Does nothing per order, and
//! no close waits for it. What else may be wrong with a broker is the doctor's to find.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use order_timeout_amqp::connect::Connection;
use order_timeout_amqp::publisher::{ConfirmedPublisher, MissingRoute};
use order_timeout_amqp::topology::{Names, Topology, TopologyError};
use order_timeout_core::delay::Strategy;
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
/// How often alternate exchanges are looked for. Brokers count returned messages, and operators have alerts on that.
const ALTERNATES_EVERY: Duration = Duration::from_secs(60);

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
    names: Names,
    topology: Topology,
    confirmed: ConfirmedPublisher,
    slots: SlotDeclarer,
    missing_route: Arc<MissingRoute>,
    /// Whether the next declaration was requested here.
    declaring: bool,
    /// Whether exchanges return unroutable messages; the delayed exchange returns everything.
    returns_unroutable: bool,
    give_way: GiveWay,
    recorder: KindRecorder,
    session: Option<Arc<Connection>>,
    next_at: Instant,
    next_alternates_at: Instant,
    /// Whether a binding may be missing, which cannot be seen: orders were closed without their alarms.
    swept: bool,
    missing: Option<String>,
    not_declared: Option<String>,
    alternate: Option<String>,
    /// Why nothing may be published to an exchange.
    not_published: Option<String>,
    reported: BTreeSet<Cause>,
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
            names: settings.names(),
            topology: topology_of_workers(settings).seen_by(kind),
            missing_route: confirmed.missing_route(),
            confirmed,
            slots,
            declaring: false,
            returns_unroutable: settings.delay.strategy == Strategy::DeadLetter,
            give_way,
            recorder,
            session: None,
            next_at: Instant::now(),
            next_alternates_at: Instant::now(),
            swept: false,
            missing: None,
            not_declared: None,
            alternate: None,
            not_published: None,
            reported: BTreeSet::new(),
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
                self.next_alternates_at = now;
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
        let now = Instant::now();
        let is_found = self.alternate.is_some() || self.not_published.is_some();
        if self.returns_unroutable && (is_found || now >= self.next_alternates_at) {
            self.next_alternates_at = now + ALTERNATES_EVERY;
            self.look_for_alternates().await;
        }
        self.slots.probe().await;
        let pause = if self.has_finding() { AGAIN_AFTER } else { EVERY };
        self.next_at = Instant::now() + pause;
    }

    fn declare_again(&mut self, what: &str) {
        self.declaring = true;
        // Only if something is missing does an alternate exchange divert alarms.
        self.next_alternates_at = Instant::now();
        self.missing_route.note(what.to_owned());
    }

    /// Over the connection that publishes: while RabbitMQ blocks publishers, it stops reading from it, and the settlements of
    /// a session on it would wait.
    async fn look_for_alternates(&mut self) {
        let connection = match self.confirmed.connection().await {
            Ok(connection) => connection,
            Err(fault) => return debug!(%fault, "alternate exchanges could not be looked for"),
        };
        match self.topology.exchange_with_alternate(&connection).await {
            Ok(found) => {
                self.not_published = None;
                let is_new = found.is_some() && self.alternate.is_none();
                self.alternate = found.map(|exchange| {
                    format!(
                        "exchange {exchange:?} has an alternate exchange: an alarm whose queue or binding is missing goes there, and its publisher is told that it is scheduled; remove the policy with alternate-exchange that matches it (`rabbitmqctl list_policies{}`), and look for alarms where it leads",
                        self.names.vhost_option()
                    )
                });
                if is_new {
                    // It hides a missing binding from the publishers.
                    self.declare_again("an alternate exchange hides what is missing");
                }
            }
            Err(fault @ TopologyError::Refused { .. }) => self.not_published = Some(fault.to_string()),
            Err(fault) => debug!(%fault, "alternate exchanges could not be looked for"),
        }
    }

    fn findings(&self) -> [(Cause, Option<String>); 3] {
        [
            (Cause::Topology, self.topology_fault()),
            (Cause::AlternateExchange, self.alternate.clone()),
            (Cause::SlotNotConfirming, self.slots.why_avoided()),
        ]
    }

    fn topology_fault(&self) -> Option<String> {
        let found = self.not_declared.as_ref().or(self.missing.as_ref()).or(self.not_published.as_ref());
        found.cloned().or_else(|| self.slots.why_refused())
    }

    fn has_finding(&self) -> bool {
        self.findings().iter().any(|(_, why)| why.is_some())
    }

    /// Reports findings, and those that have ended; never the causes of other checks.
    fn report(&mut self) {
        for (cause, why) in self.findings() {
            let has_changed = if why.is_some() { self.reported.insert(cause) } else { self.reported.remove(&cause) };
            if why.is_some() || has_changed {
                self.recorder.degraded(cause, why.as_deref());
            }
        }
    }
}
