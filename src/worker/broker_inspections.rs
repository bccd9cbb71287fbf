//! Looks at the broker, seldom and cheaply, and says for which cause alarms do not arrive: whether what was declared is
//! still there, whether messages that cannot be routed come back, and whether canaries do.
//!
//! Has missing objects declared again by the supervisor; changes nothing else on the broker. Nothing here is done per
//! order, and no close waits for it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;
use uuid::Uuid;

use super::Signs;
use crate::canary::store::{CanaryStore, Known, READER_NOTED_EVERY, Sent, StoreError};
use crate::canary::{self, GRACE, Path, Paths};
use crate::config::{Settings, Strategy};
use crate::confirm::{ConfirmedPublisher, MissingWay, NotConfirmed};
use crate::database::Database;
use crate::degraded::Cause;
use crate::deliver::Inspector;
use crate::order::Moment;
use crate::topology::{Sight, TopologyFault};

/// How long after a session's opening the broker is looked at first.
const FIRST_LOOK_AFTER: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// The same while something is wrong, so that its end is noticed soon.
const LOOK_AGAIN_AFTER: Duration = Duration::from_secs(4);
const ROUND_EVERY: Duration = Duration::from_secs(5);
/// The same while a canary is out that is back within seconds.
const ROUND_AGAIN_AFTER: Duration = Duration::from_millis(500);
/// The first canaries, unless something is suspected before.
const FIRST_CANARIES_AFTER: Duration = Duration::from_secs(60);
/// How often orders that the sweep had to close lead to canaries, at most.
const SUSPECT_EVERY: Duration = Duration::from_secs(10);
/// A broker that has just come back hands on late what waited meanwhile.
const COMING_BACK: Duration = Duration::from_secs(8);

/// What the inspections hear of.
#[derive(Debug)]
pub(super) enum BrokerNews {
    SessionOpened(Inspector),
    SessionEnded,
    /// A message found no way: which, and whether whatever was missing has been declared again.
    DeclaredAgain(String, Result<(), TopologyFault>),
    /// The sweep had to close orders although a session is open.
    Swept,
}

pub(super) struct BrokerInspections {
    paths: Paths,
    path_names: Vec<String>,
    store: CanaryStore,
    confirmed: ConfirmedPublisher,
    way_is_missing: Arc<MissingWay>,
    /// Whether the next declaration is one that was asked for here.
    declaring: bool,
    signs: Signs,
    /// Consumers that this worker has on the processing queues.
    consumers: usize,
    /// Whether exchanges return what cannot be routed; the delayed exchange returns everything.
    tests_alternates: bool,
    began: Instant,
    session: Option<Watched>,
    findings: Findings,
    next_look: Instant,
    next_round: Instant,
    reader_noted: Option<Instant>,
    /// When canaries are to be sent at once, and when that was last so.
    suspicion: Option<Instant>,
    suspected: Option<Instant>,
}

struct Watched {
    inspector: Inspector,
    since: Instant,
    sight: Option<Sight>,
    alternates_tested: bool,
}

/// What is wrong by the last look, and what was said of it.
#[derive(Default)]
struct Findings {
    missing: Option<String>,
    not_declared: Option<String>,
    /// By path.
    unroutable: BTreeMap<String, String>,
    alternate: Option<String>,
    not_arriving: Option<String>,
    said: Vec<Cause>,
}

impl BrokerInspections {
    pub fn new(settings: &Settings, database: Database, confirmed: ConfirmedPublisher, signs: Signs) -> Self {
        let (paths, now) = (Paths::new(settings), Instant::now());
        Self {
            path_names: paths.all().iter().map(|path| path.name.clone()).collect(),
            paths,
            store: CanaryStore::new(database, &settings.namespace),
            way_is_missing: confirmed.way_is_missing(),
            confirmed,
            declaring: false,
            signs,
            consumers: settings.worker.shard_of_each_channel().len(),
            tests_alternates: settings.delay.strategy == Strategy::DeadLetter,
            began: now,
            session: None,
            findings: Findings::default(),
            next_look: now,
            next_round: now,
            reader_noted: None,
            suspicion: None,
            suspected: None,
        }
    }

    /// Until `stop`, or until there is no more news.
    pub async fn run(
        mut self,
        mut news: mpsc::UnboundedReceiver<BrokerNews>,
        mut arrived: mpsc::UnboundedReceiver<Uuid>,
        stop: CancellationToken,
    ) {
        let mut ids = Vec::new();
        loop {
            let wake_at = self.next_look.min(self.next_round).min(self.suspicion.unwrap_or(self.next_round));
            tokio::select! {
                () = stop.cancelled() => return,
                one = news.recv() => match one {
                    None => return,
                    Some(one) => self.hear(one),
                },
                count = arrived.recv_many(&mut ids, 64) => {
                    if count == 0 {
                        return;
                    }
                    self.note_arrived(&std::mem::take(&mut ids)).await;
                }
                () = tokio::time::sleep_until(wake_at), if self.session.is_some() => self.inspect().await,
            }
            self.say();
        }
    }

    fn hear(&mut self, news: BrokerNews) {
        let now = Instant::now();
        match news {
            BrokerNews::SessionOpened(inspector) => {
                self.session = Some(Watched { inspector, since: now, sight: None, alternates_tested: false });
                self.next_look = now + FIRST_LOOK_AFTER;
                self.next_round = self.next_look;
                // Whether that is still so is not known.
                self.reader_noted = None;
            }
            BrokerNews::SessionEnded => {
                self.session = None;
                // The next declares everything; what holds then is found then.
                self.findings.forget_topology();
                self.findings.not_arriving = None;
            }
            BrokerNews::DeclaredAgain(what, Ok(())) => {
                self.findings.not_declared = None;
                if !std::mem::take(&mut self.declaring)
                    && self.findings.missing.is_none()
                    && self.findings.unroutable.is_empty()
                {
                    self.note_missing(&what);
                }
            }
            BrokerNews::DeclaredAgain(_, Err(fault)) => {
                self.declaring = false;
                self.findings.not_declared = Some(fault.to_string());
                self.next_look = now + LOOK_AGAIN_AFTER;
            }
            BrokerNews::Swept => {
                let not_before = self.suspected.map_or(now, |last| now.max(last + SUSPECT_EVERY));
                self.suspicion.get_or_insert(not_before);
            }
        }
    }

    fn have_declared_again(&mut self, what: &str) {
        self.declaring = true;
        self.way_is_missing.note(what.to_owned());
    }

    fn note_missing(&mut self, what: &str) {
        self.findings.missing = Some(format!(
            "{what}; what is missing is declared again. What was published there meanwhile was returned to its publisher, or went to an alternate exchange; find out who deletes exchanges, queues or bindings of this namespace"
        ));
        self.next_look = Instant::now() + LOOK_AGAIN_AFTER;
    }

    async fn note_arrived(&mut self, ids: &[Uuid]) {
        if let Err(error) = self.store.note_arrived(ids).await {
            debug!(%error, "canaries arrived");
        }
    }

    async fn inspect(&mut self) {
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
            if let Err(error) = self.send_and_judge(suspected).await {
                debug!(%error, "no canary was sent");
            }
        }
        if self.findings.are_any() {
            self.next_look = self.next_look.min(now + LOOK_AGAIN_AFTER);
        }
    }

    /// Whether everything is there that was declared.
    async fn look(&mut self) {
        let Some(session) = &mut self.session else { return };
        let began = Instant::now();
        match session.inspector.look().await {
            Ok(sight) => {
                debug!(took_ms = began.elapsed().as_millis(), ?sight, "looked at the broker");
                session.sight = Some(sight);
                self.findings.missing = None;
            }
            Err(fault @ TopologyFault::Missing { .. }) => {
                self.note_missing(&fault.to_string());
                self.have_declared_again(&fault.to_string());
                // Only now does an alternate exchange take alarms away.
                self.session.iter_mut().for_each(|session| session.alternates_tested = false);
            }
            // The session's own end tells of a connection that broke.
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
                    // A binding may be missing as well, which cannot be looked for.
                    self.have_declared_again("an alternate exchange hides what is missing");
                }
            }
            Err(fault) => debug!(%fault, "alternate exchanges could not be looked for"),
        }
    }

    async fn send_and_judge(&mut self, suspected: bool) -> Result<(), StoreError> {
        let now = Instant::now();
        if self.reader_noted.is_none_or(|noted| now - noted >= READER_NOTED_EVERY) {
            self.store.note_reader(self.consumers).await?;
            self.reader_noted = Some(now);
        }
        let known = self.store.known(&self.path_names).await?;
        let read_at = Instant::now();
        if self.may_send(&known) {
            let is_time = |path: &&Path| {
                let regularly = now >= self.began + FIRST_CANARIES_AFTER;
                (regularly || (suspected && path.is_quick())) && self.is_to_be_sent(path, &known, suspected)
            };
            let paths: Vec<Path> = self.paths.all().iter().filter(is_time).cloned().collect();
            for path in paths {
                self.send(&path, known.now + read_at.elapsed(), suspected).await?;
            }
        }
        self.judge(&known).await;
        Ok(())
    }

    /// Whether all who may be given a canary know one: a worker that does not would park it.
    fn may_send(&self, known: &Known) -> bool {
        let sight = self.session.as_ref().and_then(|session| session.sight);
        sight.is_some_and(|sight| i64::from(sight.consumers) <= known.readers)
    }

    fn is_to_be_sent(&self, path: &Path, known: &Known, suspected: bool) -> bool {
        let Some(last) = known.sent.iter().find(|sent| sent.path == path.name) else { return true };
        // The table has the last word, for other workers look at it as well.
        if last.has_arrived {
            known.now > last.sent_at + path.sent_every(suspected)
        } else {
            self.is_overdue(last, known.now)
        }
    }

    fn is_overdue(&self, sent: &Sent, now: Moment) -> bool {
        let Some(session) = &self.session else { return false };
        let came_back_at = now - session.since.elapsed() + COMING_BACK;
        !sent.has_arrived && now > sent.waiting_since.max(came_back_at) + GRACE
    }

    async fn send(&mut self, path: &Path, now: Moment, suspected: bool) -> Result<(), StoreError> {
        let (id, journey) = (Uuid::now_v7(), self.paths.journey(path, now));
        if !self.store.claim(id, path, &journey.queue, journey.wait, path.sent_every(suspected)).await? {
            return Ok(());
        }
        self.next_round = self.next_round.min(Instant::now() + ROUND_AGAIN_AFTER);
        match self.confirmed.publish(canary::outgoing(id, &journey, now)).await {
            Ok(()) => {
                self.findings.unroutable.remove(&path.name);
            }
            Err(fault @ (NotConfirmed::Unroutable(_) | NotConfirmed::NoExchange(_))) => {
                let (exchange, key) = (&journey.entry.exchange, &journey.entry.routing_key);
                let what = format!(
                    "exchange {exchange:?} led to no queue for routing key {key:?} ({fault}); exchanges, queues and bindings are declared again"
                );
                self.findings.unroutable.insert(path.name.clone(), what);
                self.store.release(id).await?;
                let quick = self.paths.all().iter().filter(|path| path.is_quick()).map(|path| path.name.clone());
                self.store.forget_unarrived(&quick.collect::<Vec<_>>()).await?;
                self.suspicion = Some(Instant::now() + LOOK_AGAIN_AFTER);
            }
            Err(fault) if fault.is_of_the_broker() => self.store.release(id).await?,
            // As good as lost: alarms would fare no better there.
            Err(fault) => debug!(%fault, path = path.name, "a canary could not be sent"),
        }
        Ok(())
    }

    /// Says whether canaries are missing.
    async fn judge(&mut self, known: &Known) {
        let is_quick = |sent: &&Sent| self.paths.find(&sent.path).is_some_and(Path::is_quick);
        if known.sent.iter().filter(is_quick).any(|sent| !sent.has_arrived) {
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
        let direct_arrives =
            known.sent.iter().any(|sent| sent.has_arrived && self.paths.find(&sent.path).is_some_and(Path::is_direct));
        let found = path.why_missing(&sent.queue, direct_arrives);
        if self.findings.not_arriving.is_some() {
            self.findings.not_arriving = Some(found);
            return;
        }
        // Behind alarms that wait for a busy worker a canary waits as well.
        let Some(session) = &self.session else { return };
        match session.inspector.look().await {
            Ok(Sight { ready: 0, .. }) => self.findings.not_arriving = Some(found),
            Ok(_) => debug!(path = path.name, "a canary waits in the processing queue"),
            Err(fault) => debug!(%fault, "the broker could not be looked at"),
        }
        // A canary of each quick path tells more.
        self.suspicion.get_or_insert(Instant::now());
    }

    /// Reports what is wrong and what no longer is; nothing of causes that others found.
    fn say(&mut self) {
        let found = [
            (Cause::Topology, self.findings.topology()),
            (Cause::AlternateExchange, self.findings.alternate.clone()),
            (Cause::AlarmsNotArriving, self.findings.not_arriving.clone()),
        ];
        for (cause, why) in found {
            let was_said = self.findings.said.contains(&cause);
            if why.is_some() || was_said {
                self.signs.degraded(cause, why.as_deref());
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

    fn are_any(&self) -> bool {
        self.topology().is_some() || self.alternate.is_some() || self.not_arriving.is_some()
    }
}
