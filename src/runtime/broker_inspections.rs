//! Inspects the broker, seldom and cheaply, and reports why alarms do not arrive: whether the declared objects still
//! exist, whether unroutable messages are returned, and whether canaries arrive.
//!
//! Lets the supervisor declare missing objects again; changes nothing else on the broker. Does nothing per order, and
//! no close waits for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use order_timeout_amqp::publisher::{ConfirmedPublisher, MissingRoute, PublishError};
use order_timeout_amqp::topology::{Sight, TopologyError};
use order_timeout_core::delay::Strategy;
use order_timeout_core::kind::Kind;
use order_timeout_core::order::Timestamp;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;
use uuid::Uuid;

use super::kind_worker::Publishing;
use crate::config::Settings;
use crate::deliver::Inspector;
use crate::effects::slots::SlotDeclarer;
use crate::give_way::GiveWay;
use crate::observe::canary::store::{CanaryStore, Known, READER_NOTED_EVERY, Sent, StoreError};
use crate::observe::canary::{self, GRACE, Late, Path, Paths};
use crate::observe::degraded::Cause;
use crate::observe::recorder::KindRecorder;
use crate::postgres::Database;

/// How long after a session was opened the broker is first checked.
const FIRST_LOOK_AFTER: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// The same while something is wrong, so that its end is noticed soon.
const LOOK_AGAIN_AFTER: Duration = Duration::from_secs(4);
const ROUND_EVERY: Duration = Duration::from_secs(5);
/// The same while a canary is expected within seconds.
const ROUND_AGAIN_AFTER: Duration = Duration::from_millis(500);
/// When the first canaries are sent, unless something is suspected before.
const FIRST_CANARIES_AFTER: Duration = Duration::from_secs(60);
/// The shortest interval of canaries that are sent because the sweep had to close orders.
const SUSPECT_EVERY: Duration = Duration::from_secs(10);
/// How long consumers that are not workers of this version may exist before they are reported, because an upgrade has
/// them.
const UNKNOWN_NAMED_AFTER: Duration = Duration::from_secs(60);
/// How long a close by the sweep counts as recent.
const SWEPT_LATELY: Duration = Duration::from_secs(60);
/// How long the number of consumers is valid for sending canaries.
const SIGHT_LASTS: Duration = Duration::from_secs(1);
/// If the table answers later than this, its content may be outdated: an arrival may be missing.
const STORE_STALLS_AFTER: Duration = Duration::from_secs(2);
/// How many ids of arrived canaries are kept until the table accepts them.
const KEPT_AT_MOST: usize = 1_000;
/// How long a stopping worker tries to delete its reader row.
pub(super) const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long after its return a broker may deliver late what waited meanwhile.
const COMING_BACK: Duration = Duration::from_secs(8);

/// The events that inspections react to.
#[derive(Debug)]
pub(super) enum BrokerInput {
    SessionOpened(Inspector),
    SessionEnded,
    /// No session was opened, because an object of this kind differs or may not be declared.
    NotDeclared(String),
    /// A message was unroutable: its route, and whether the missing objects that this kind needs were declared again.
    DeclaredAgain(String, Result<(), TopologyError>),
    /// The sweep had to close orders although a session is open.
    Swept,
}

pub(super) struct BrokerInspections {
    paths: Paths,
    path_names: Vec<String>,
    store: CanaryStore,
    confirmed: ConfirmedPublisher,
    slots: SlotDeclarer,
    missing_route: Arc<MissingRoute>,
    /// Whether the next declaration was requested here.
    declaring: bool,
    give_way: GiveWay,
    recorder: KindRecorder,
    /// How many consumers this worker has on the processing queues.
    consumers: usize,
    /// Whether exchanges return unroutable messages; the delayed exchange returns everything.
    tests_alternates: bool,
    began: Instant,
    session: Option<Watched>,
    findings: Findings,
    next_look: Instant,
    next_round: Instant,
    reader_noted: Option<Instant>,
    /// Canaries that have arrived and are not in the table yet.
    arrived: Vec<Uuid>,
    /// When the table last failed or stalled: a missing canary may have arrived.
    store_failed: Option<Instant>,
    swept: Option<Instant>,
    /// Since when there are consumers that are no workers of this version.
    unknown_since: Option<Instant>,
    /// When canaries are to be sent because of a suspicion, and when that happened last.
    suspicion: Option<Instant>,
    suspected: Option<Instant>,
}

struct Watched {
    inspector: Inspector,
    since: Instant,
    sight: Option<(Instant, Sight)>,
    /// When the processing queues were last checked because of a late canary.
    looked_for_late: Option<Instant>,
    alternates_tested: bool,
}

/// What the last check has found, and what was reported.
#[derive(Default)]
struct Findings {
    missing: Option<String>,
    not_declared: Option<String>,
    /// By path.
    unroutable: BTreeMap<String, String>,
    alternate: Option<String>,
    not_arriving: Option<String>,
    /// Why canaries could not be published, by path, and how often in a row.
    not_published: BTreeMap<String, (u32, String)>,
    unknown_readers: Option<String>,
    said: Vec<Cause>,
}

impl BrokerInspections {
    pub fn new(
        settings: &Settings,
        kind: &Kind,
        database: Database,
        Publishing { confirmed, slots }: Publishing,
        give_way: GiveWay,
        recorder: KindRecorder,
    ) -> Self {
        let (paths, now) = (Paths::new(settings, kind), Instant::now());
        Self {
            path_names: paths.all().iter().map(|path| path.name.clone()).collect(),
            paths,
            store: CanaryStore::new(database, &settings.namespace, kind),
            missing_route: confirmed.missing_route(),
            confirmed,
            slots,
            declaring: false,
            give_way,
            recorder,
            consumers: settings.worker.queue_of_each_channel(&settings.names(), kind).len(),
            tests_alternates: settings.delay.strategy == Strategy::DeadLetter,
            began: now,
            session: None,
            findings: Findings::default(),
            next_look: now,
            next_round: now,
            reader_noted: None,
            arrived: Vec::new(),
            store_failed: None,
            swept: None,
            unknown_since: None,
            suspicion: None,
            suspected: None,
        }
    }

    /// Runs until `stop`, or until the event channel is closed.
    pub async fn run(
        mut self,
        mut inputs: mpsc::UnboundedReceiver<BrokerInput>,
        mut arrived: mpsc::UnboundedReceiver<Uuid>,
        stop: CancellationToken,
    ) {
        loop {
            let wake_at = self.next_look.min(self.next_round).min(self.suspicion.unwrap_or(self.next_round));
            tokio::select! {
                // Judgement comes after all arrivals are noted.
                biased;
                () = stop.cancelled() => break,
                id = arrived.recv() => match id {
                    None => break,
                    Some(id) => self.take_arrived(Some(id), &mut arrived).await,
                },
                one = inputs.recv() => match one {
                    None => break,
                    Some(one) => self.handle(one).await,
                },
                () = self.give_way.due(wake_at), if self.session.is_some() => self.inspect(&mut arrived).await,
            }
            self.say();
        }
        self.leave().await;
    }

    /// Without deleting the row, a consumer of an older version would count as this worker's.
    async fn leave(&mut self) {
        if let Err(error) = self.store.forget_reader().await {
            debug!(%error, "this worker is forgotten as a reader later");
        }
    }

    async fn handle(&mut self, inputs: BrokerInput) {
        let now = Instant::now();
        match inputs {
            BrokerInput::SessionOpened(inspector) => {
                // Opening it has declared everything.
                self.findings.not_declared = None;
                self.session = Some(Watched {
                    inspector,
                    since: now,
                    sight: None,
                    looked_for_late: None,
                    alternates_tested: false,
                });
                self.next_look = now + FIRST_LOOK_AFTER;
                self.next_round = self.next_look;
                // It is not known whether that still holds.
                self.reader_noted = None;
            }
            BrokerInput::SessionEnded => {
                self.session = None;
                // The next session declares everything, and the next check finds what is wrong then.
                self.findings.forget_topology();
                self.findings.forget_arrival();
                self.unknown_since = None;
                self.leave().await;
            }
            BrokerInput::NotDeclared(why) => self.findings.not_declared = Some(why),
            BrokerInput::DeclaredAgain(what, Ok(())) => {
                self.forget_slow_canaries().await;
                self.findings.not_declared = None;
                if !std::mem::take(&mut self.declaring)
                    && self.findings.missing.is_none()
                    && self.findings.unroutable.is_empty()
                {
                    self.note_missing(&what);
                }
            }
            BrokerInput::DeclaredAgain(_, Err(fault)) => {
                self.declaring = false;
                self.findings.not_declared = Some(fault.to_string());
                self.next_look = now + LOOK_AGAIN_AFTER;
            }
            BrokerInput::Swept => {
                self.swept = Some(now);
                let not_before = self.suspected.map_or(now, |last| now.max(last + SUSPECT_EVERY));
                self.suspicion.get_or_insert(not_before);
            }
        }
    }

    fn have_declared_again(&mut self, what: &str) {
        self.declaring = true;
        self.missing_route.note(what.to_owned());
    }

    fn note_missing(&mut self, what: &str) {
        self.findings.missing = Some(format!(
            "{what}; what is missing is declared again. What was published there meanwhile was returned to its publisher, or went to an alternate exchange; find out who deletes exchanges, queues or bindings of this namespace"
        ));
        self.next_look = Instant::now() + LOOK_AGAIN_AFTER;
    }

    /// Canaries in a deleted queue are lost, which proves nothing about the new queue.
    async fn forget_slow_canaries(&mut self) {
        let slow = self.paths.all().iter().filter(|path| !path.is_quick()).map(|path| path.name.clone());
        if let Err(error) = self.store.forget_unarrived(&slow.collect::<Vec<_>>()).await {
            debug!(%error, "canaries of deleted queues are still waited for");
        }
    }

    /// Notes `id` and all others that have arrived.
    async fn take_arrived(&mut self, id: Option<Uuid>, more: &mut mpsc::UnboundedReceiver<Uuid>) {
        self.arrived.extend(id);
        while let Ok(id) = more.try_recv() {
            self.arrived.push(id);
        }
        let surplus = self.arrived.len().saturating_sub(KEPT_AT_MOST);
        self.arrived.drain(..surplus);
        if let Err(error) = self.note_arrived().await {
            debug!(%error, "canaries arrived; that is noted later");
        }
    }

    /// Arrivals that cannot be noted are kept for the next try.
    async fn note_arrived(&mut self) -> Result<(), StoreError> {
        if self.arrived.is_empty() {
            return Ok(());
        }
        let began = Instant::now();
        let noted = self.store.note_arrived(&self.arrived).await;
        self.note_store(began, noted.is_ok());
        noted?;
        self.arrived.clear();
        // A finding ends as soon as its canary arrives.
        self.next_round = self.next_round.min(Instant::now() + ROUND_AGAIN_AFTER);
        Ok(())
    }

    fn note_store(&mut self, began: Instant, answered: bool) {
        let now = Instant::now();
        if !answered || now - began > STORE_STALLS_AFTER {
            self.store_failed = Some(now);
        }
    }

    async fn inspect(&mut self, arrived: &mut mpsc::UnboundedReceiver<Uuid>) {
        let now = Instant::now();
        if now >= self.next_look {
            self.next_look = now + LOOK_EVERY;
            self.look().await;
        }
        let suspected = self.suspicion.is_some_and(|at| now >= at);
        if suspected || now >= self.next_round {
            self.next_round = now + ROUND_EVERY;
            if suspected {
                (self.suspicion, self.suspected) = (None, Some(now));
                self.look_for_alternates().await;
            }
            self.take_arrived(None, arrived).await;
            if let Err(error) = self.send_and_judge(suspected, arrived).await {
                (self.store_failed, self.unknown_since) = (Some(Instant::now()), None);
                debug!(%error, "no canary was sent");
            }
        }
        if self.findings.are_any() {
            self.next_look = self.next_look.min(now + LOOK_AGAIN_AFTER);
        }
    }

    /// Checks that all declared objects exist.
    async fn look(&mut self) {
        let Some(session) = &mut self.session else { return };
        let began = Instant::now();
        match session.inspector.look().await {
            Ok(sight) => {
                debug!(took_ms = began.elapsed().as_millis(), ?sight, "looked at the broker");
                session.sight = Some((Instant::now(), sight));
                self.findings.missing = None;
            }
            Err(fault @ TopologyError::Missing { .. }) => {
                self.note_missing(&fault.to_string());
                self.have_declared_again(&fault.to_string());
                // Only if an object is missing does an alternate exchange divert alarms.
                self.session.iter_mut().for_each(|session| session.alternates_tested = false);
            }
            // A broken connection is reported by the end of the session.
            Err(fault) => debug!(%fault, "the broker could not be looked at"),
        }
        if let Some(fault) = self.findings.not_declared.clone() {
            self.have_declared_again(&fault);
        }
        let is_tested = self.session.as_ref().is_none_or(|session| session.alternates_tested);
        if !is_tested || self.findings.alternate.is_some() {
            self.look_for_alternates().await;
        }
    }

    async fn look_for_alternates(&mut self) {
        let Some(session) = self.session.as_mut().filter(|_| self.tests_alternates) else { return };
        match session.inspector.exchange_with_alternate().await {
            Ok(found) => {
                session.alternates_tested = true;
                let why = found.map(|exchange| {
                    format!(
                        "exchange {exchange:?} has an alternate exchange: an alarm whose queue or binding is missing goes there, and its publisher is told that it is scheduled; remove the policy with alternate-exchange that matches it (rabbitmqctl list_policies), and look for alarms where it leads"
                    )
                });
                let is_new = why.is_some() && self.findings.alternate.is_none();
                self.findings.alternate = why;
                if is_new {
                    // A binding may be missing as well, which cannot be checked.
                    self.have_declared_again("an alternate exchange hides what is missing");
                }
            }
            Err(fault) => debug!(%fault, "alternate exchanges could not be looked for"),
        }
    }

    async fn send_and_judge(
        &mut self,
        suspected: bool,
        arrived: &mpsc::UnboundedReceiver<Uuid>,
    ) -> Result<(), StoreError> {
        let now = Instant::now();
        if self.reader_noted.is_none_or(|noted| now - noted >= READER_NOTED_EVERY) {
            self.store.note_reader(self.consumers).await?;
            self.reader_noted = Some(now);
        }
        let asked = Instant::now();
        let known = self.store.known(&self.path_names).await?;
        let read_at = Instant::now();
        self.note_store(asked, true);
        self.forget_published(&known);
        let is_time = |path: &&Path| {
            let regularly = now >= self.began + FIRST_CANARIES_AFTER;
            (regularly || (suspected && path.is_quick())) && self.is_to_be_sent(path, &known, suspected)
        };
        let paths: Vec<Path> = self.paths.all().iter().filter(is_time).cloned().collect();
        if !paths.is_empty() {
            self.look_at_consumers().await;
        }
        self.judge_consumers(&known);
        if self.may_send(&known) {
            for path in paths {
                let is_missed =
                    known.sent.iter().any(|sent| sent.path == path.name && self.is_overdue(sent, known.now));
                self.send(&path, known.now + read_at.elapsed(), suspected, is_missed).await?;
            }
        }
        // After a failure of the table, a missing canary may have arrived without being noted.
        if arrived.is_empty() && self.store_failed.is_none_or(|failed| read_at >= failed + GRACE) {
            self.judge(&known).await;
        }
        Ok(())
    }

    /// Consumers of an older version may have come since the last look.
    async fn look_at_consumers(&mut self) {
        let Some(session) = &mut self.session else { return };
        if session.sight.as_ref().is_some_and(|(at, _)| at.elapsed() < SIGHT_LASTS) {
            return;
        }
        match session.inspector.look_at_processing().await {
            Ok(sight) => session.sight = Some((Instant::now(), sight)),
            Err(fault) => {
                session.sight = None;
                debug!(%fault, "the processing queues could not be looked at");
            }
        }
    }

    /// How many consumers are not workers that know canaries.
    fn unknown_consumers(&self, known: &Known) -> Option<i64> {
        let (_, sight) = self.session.as_ref()?.sight.as_ref()?;
        Some(i64::from(sight.consumers()) - known.readers)
    }

    /// Whether every possible receiver knows canaries: an older worker would park one.
    fn may_send(&self, known: &Known) -> bool {
        self.unknown_consumers(known).is_some_and(|unknown| unknown <= 0)
    }

    /// Reports consumers that are not workers, if they prevent canaries while these are needed.
    fn judge_consumers(&mut self, known: &Known) {
        let now = Instant::now();
        let Some(unknown) = self.unknown_consumers(known) else { return };
        if unknown <= 0 {
            (self.unknown_since, self.findings.unknown_readers) = (None, None);
            return;
        }
        let since = *self.unknown_since.get_or_insert(now);
        let is_needed = self.swept.is_some_and(|swept| now - swept < SWEPT_LATELY);
        let sight = self.session.as_ref().and_then(|session| session.sight.as_ref());
        let is_named = is_needed && now - since >= UNKNOWN_NAMED_AFTER;
        self.findings.unknown_readers =
            sight.filter(|_| is_named).map(|(_, sight)| canary::why_unknown(unknown, sight));
    }

    /// Another worker's canary was published on that path and arrived.
    fn forget_published(&mut self, known: &Known) {
        let arrived = |path: &String| known.sent.iter().any(|sent| sent.path == *path && sent.has_arrived());
        self.findings.not_published.retain(|path, _| !arrived(path));
    }

    fn is_to_be_sent(&self, path: &Path, known: &Known, suspected: bool) -> bool {
        let Some(last) = known.sent.iter().find(|sent| sent.path == path.name) else { return true };
        // The table decides, because all workers share it.
        if last.has_arrived() {
            known.now > last.sent_at + path.sent_every(suspected)
        } else {
            self.is_overdue(last, known.now)
        }
    }

    fn is_overdue(&self, sent: &Sent, now: Timestamp) -> bool {
        let Some(session) = &self.session else { return false };
        let began_at = now - session.since.elapsed();
        let is_quick = self.paths.find(&sent.path).is_some_and(Path::is_quick);
        // A canary of a slow path that was late before this session proves nothing about now; the next one will.
        let since = if is_quick || began_at <= sent.waiting_since { sent.waiting_since } else { sent.due_at };
        !sent.has_arrived() && now > since.max(began_at + COMING_BACK) + GRACE
    }

    async fn send(&mut self, path: &Path, now: Timestamp, suspected: bool, is_missed: bool) -> Result<(), StoreError> {
        let (id, journey) = (Uuid::now_v7(), self.paths.journey(path, now));
        if self.slots.is_unknown(&journey.placement) {
            // A regular canary declares no slot: in time all slots would exist although no alarm needs them.
            if !suspected {
                return Ok(());
            }
            if let Err(fault) = self.slots.require([journey.placement.clone()]).await {
                debug!(%fault, "the slot of a canary could not be declared");
                // Other paths say more about the broker.
                return Ok(());
            }
        }
        let every = path.sent_every(suspected);
        if !self.store.claim(id, path, &journey.queue, journey.wait, every, is_missed).await? {
            return Ok(());
        }
        self.next_round = self.next_round.min(Instant::now() + ROUND_AGAIN_AFTER);
        match self.confirmed.publish(canary::outgoing(id, &journey, now)).await {
            Ok(()) => {
                self.findings.unroutable.remove(&path.name);
                self.findings.not_published.remove(&path.name);
            }
            Err(fault @ (PublishError::Unroutable(_) | PublishError::NoExchange(_))) => {
                self.slots.forget();
                let (exchange, key) = (&journey.route.exchange, &journey.route.routing_key);
                let what = format!(
                    "exchange {exchange:?} led to no queue for routing key {key:?} ({fault}); exchanges, queues and bindings are declared again"
                );
                self.findings.unroutable.insert(path.name.clone(), what);
                self.store.release(id).await?;
                let quick = self.paths.all().iter().filter(|path| path.is_quick()).map(|path| path.name.clone());
                self.store.forget_unarrived(&quick.collect::<Vec<_>>()).await?;
                self.suspicion = Some(Instant::now() + LOOK_AGAIN_AFTER);
            }
            Err(fault) if fault.is_broker_wide() => self.store.release(id).await?,
            // Alarms would be refused as well; but nothing was lost.
            Err(fault) => {
                self.store.release(id).await?;
                let (exchange, key) = (&journey.route.exchange, &journey.route.routing_key);
                let what = format!(
                    "a canary could not be published to exchange {exchange:?} with routing key {key:?}, and alarms fare no better there: {fault}"
                );
                let before = self.findings.not_published.get(&path.name).map_or(0, |(times, _)| *times);
                self.findings.not_published.insert(path.name.clone(), (before.saturating_add(1), what));
                self.suspicion.get_or_insert(Instant::now() + LOOK_AGAIN_AFTER);
            }
        }
        Ok(())
    }

    /// Reports missing canaries.
    async fn judge(&mut self, known: &Known) {
        let is_quick = |sent: &&Sent| self.paths.find(&sent.path).is_some_and(Path::is_quick);
        if known.sent.iter().filter(is_quick).any(|sent| !sent.has_arrived()) {
            self.next_round = self.next_round.min(Instant::now() + ROUND_AGAIN_AFTER);
        }
        let overdue = |direct: bool| {
            known.sent.iter().filter(|sent| self.is_overdue(sent, known.now)).find_map(|sent| {
                let path = self.paths.find(&sent.path).filter(|path| path.is_direct() == direct)?;
                Some((path, sent))
            })
        };
        let Some((path, sent)) = overdue(true).or_else(|| overdue(false)) else {
            self.findings.not_arriving = None;
            return;
        };
        let direct_arrives = known
            .sent
            .iter()
            .any(|sent| sent.has_arrived() && self.paths.find(&sent.path).is_some_and(Path::is_direct));
        let found = path.why_missing(&sent.queue, direct_arrives);
        let is_first = self.findings.not_arriving.is_none();
        let Some(late) = self.look_for_late(found).await else { return };
        if let Some(found) = late {
            self.findings.not_arriving = Some(found);
        }
        if is_first {
            // A canary of each quick path gives more information. Not at once, or the next round would repeat it.
            self.suspicion.get_or_insert(Instant::now() + LOOK_AGAIN_AFTER);
        }
    }

    /// The finding about a late canary, if any; `None` if the processing queues were checked just before.
    async fn look_for_late(&mut self, lost: String) -> Option<Option<String>> {
        let session = self.session.as_mut()?;
        let now = Instant::now();
        if session.looked_for_late.is_some_and(|last| now < last + LOOK_AGAIN_AFTER) {
            return None;
        }
        session.looked_for_late = Some(now);
        let sight = session.inspector.look_at_processing().await;
        let sight = sight.inspect_err(|fault| debug!(%fault, "the processing queues could not be looked at")).ok()?;
        let was_named = self.findings.not_arriving.is_some();
        let late = match canary::judge_late(&sight) {
            Late::Unread(queue) => Some(canary::why_unread(queue)),
            Late::Lost => Some(lost),
            // A finding that was reported is cleared when a canary arrives.
            Late::Waits => was_named.then_some(lost),
        };
        debug!(?sight, ?late, "looked for a late canary");
        session.sight = Some((now, sight));
        Some(late)
    }

    /// Reports findings and cleared findings; never the causes of other checks.
    fn say(&mut self) {
        let found = [
            (Cause::Topology, self.findings.topology()),
            (Cause::AlternateExchange, self.findings.alternate.clone()),
            (Cause::AlarmsNotArriving, self.findings.arrival()),
            (Cause::SlotNotConfirming, self.slots.why_avoided()),
        ];
        for (cause, why) in found {
            let was_said = self.findings.said.contains(&cause);
            if why.is_some() || was_said {
                self.recorder.degraded(cause, why.as_deref());
            }
            match (&why, was_said) {
                (Some(_), false) => self.findings.said.push(cause),
                (None, true) => self.findings.said.retain(|said| *said != cause),
                _ => {}
            }
        }
    }
}

impl Findings {
    fn topology(&self) -> Option<String> {
        let found = self.not_declared.as_ref().or(self.unroutable.values().next()).or(self.missing.as_ref());
        found.cloned()
    }

    fn forget_topology(&mut self) {
        (self.missing, self.not_declared) = (None, None);
        self.unroutable.clear();
    }

    /// Why alarms do not arrive. A single refusal is no finding: the next canary may be accepted.
    fn arrival(&self) -> Option<String> {
        let lasts = self.not_published.values().find(|(times, _)| *times > 1);
        let not_published = lasts.map(|(_, why)| why);
        // A canary that was accepted and did not arrive says more than one that was refused.
        self.not_arriving.as_ref().or(not_published).or(self.unknown_readers.as_ref()).cloned()
    }

    fn forget_arrival(&mut self) {
        (self.not_arriving, self.unknown_readers) = (None, None);
        self.not_published.clear();
    }

    fn are_any(&self) -> bool {
        self.topology().is_some() || self.alternate.is_some() || self.arrival().is_some()
    }
}
