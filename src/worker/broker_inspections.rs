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

use super::Recorder;
use super::give_way::GiveWay;
use crate::canary::store::{CanaryStore, Known, READER_NOTED_EVERY, Sent, StoreError};
use crate::canary::{self, GRACE, Late, Path, Paths};
use crate::config::{Settings, Strategy};
use crate::confirm::{ConfirmedPublisher, MissingWay, PublishError};
use crate::database::Database;
use crate::degraded::Cause;
use crate::deliver::Inspector;
use crate::order::Timestamp;
use crate::topology::{Sight, TopologyError};

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
/// How long consumers that are no workers of this version may be there before they are named: an upgrade has them.
const UNKNOWN_NAMED_AFTER: Duration = Duration::from_secs(60);
/// So recently the sweep had to close orders.
const SWEPT_LATELY: Duration = Duration::from_secs(60);
/// What the broker said of its consumers is too old to send canaries by.
const SIGHT_LASTS: Duration = Duration::from_secs(1);
/// A table that answers later than this may say what held before: an arrival is not in it yet.
const STORE_STALLS_AFTER: Duration = Duration::from_secs(2);
/// Ids of canaries that are kept until the table takes them.
const KEPT_AT_MOST: usize = 1_000;
/// How long a stopping worker tries to say that it reads no more.
pub(super) const LAST_WORD: Duration = Duration::from_secs(2);
/// A broker that has just come back hands on late what waited meanwhile.
const COMING_BACK: Duration = Duration::from_secs(8);

/// What the inspections hear of.
#[derive(Debug)]
pub(super) enum BrokerNews {
    SessionOpened(Inspector),
    SessionEnded,
    /// A message found no way: which, and whether whatever was missing has been declared again.
    DeclaredAgain(String, Result<(), TopologyError>),
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
    give_way: GiveWay,
    recorder: Recorder,
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
    /// Canaries that arrived and of which the table does not know yet.
    arrived: Vec<Uuid>,
    /// When the table last failed or stalled: what it lacks has perhaps arrived.
    store_failed: Option<Instant>,
    swept: Option<Instant>,
    /// Since when there are consumers that are no workers of this version.
    unknown_since: Option<Instant>,
    /// When canaries are to be sent at once, and when that was last so.
    suspicion: Option<Instant>,
    suspected: Option<Instant>,
}

struct Watched {
    inspector: Inspector,
    since: Instant,
    sight: Option<(Instant, Sight)>,
    /// When the processing queues were last looked at for a late canary.
    looked_for_late: Option<Instant>,
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
    /// What kept canaries from being published, by path, and how often in a row.
    not_published: BTreeMap<String, (u32, String)>,
    unknown_readers: Option<String>,
    said: Vec<Cause>,
}

impl BrokerInspections {
    pub fn new(
        settings: &Settings,
        database: Database,
        confirmed: ConfirmedPublisher,
        give_way: GiveWay,
        recorder: Recorder,
    ) -> Self {
        let (paths, now) = (Paths::new(settings), Instant::now());
        Self {
            path_names: paths.all().iter().map(|path| path.name.clone()).collect(),
            paths,
            store: CanaryStore::new(database, &settings.namespace),
            way_is_missing: confirmed.way_is_missing(),
            confirmed,
            declaring: false,
            give_way,
            recorder,
            consumers: settings.worker.shard_of_each_channel().len(),
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

    /// Until `stop`, or until there is no more news.
    pub async fn run(
        mut self,
        mut news: mpsc::UnboundedReceiver<BrokerNews>,
        mut arrived: mpsc::UnboundedReceiver<Uuid>,
        stop: CancellationToken,
    ) {
        loop {
            let wake_at = self.next_look.min(self.next_round).min(self.suspicion.unwrap_or(self.next_round));
            tokio::select! {
                // Nothing is judged before all that arrived is noted.
                biased;
                () = stop.cancelled() => break,
                id = arrived.recv() => match id {
                    None => break,
                    Some(id) => self.take_arrived(Some(id), &mut arrived).await,
                },
                one = news.recv() => match one {
                    None => break,
                    Some(one) => self.hear(one).await,
                },
                () = self.give_way.due(wake_at), if self.session.is_some() => self.inspect(&mut arrived).await,
            }
            self.say();
        }
        self.leave().await;
    }

    /// Without this row a consumer of an older version would be taken for one of this worker's.
    async fn leave(&mut self) {
        if let Err(error) = self.store.forget_reader().await {
            debug!(%error, "this worker is forgotten as a reader later");
        }
    }

    async fn hear(&mut self, news: BrokerNews) {
        let now = Instant::now();
        match news {
            BrokerNews::SessionOpened(inspector) => {
                self.session = Some(Watched {
                    inspector,
                    since: now,
                    sight: None,
                    looked_for_late: None,
                    alternates_tested: false,
                });
                self.next_look = now + FIRST_LOOK_AFTER;
                self.next_round = self.next_look;
                // Whether that is still so is not known.
                self.reader_noted = None;
            }
            BrokerNews::SessionEnded => {
                self.session = None;
                // The next declares everything; what holds then is found then.
                self.findings.forget_topology();
                self.findings.forget_arrival();
                self.unknown_since = None;
                self.leave().await;
            }
            BrokerNews::DeclaredAgain(what, Ok(())) => {
                self.forget_slow_canaries().await;
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
                self.swept = Some(now);
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

    /// What waited in a queue that was deleted is lost, which says nothing of the queue that is there now.
    async fn forget_slow_canaries(&mut self) {
        let slow = self.paths.all().iter().filter(|path| !path.is_quick()).map(|path| path.name.clone());
        if let Err(error) = self.store.forget_unarrived(&slow.collect::<Vec<_>>()).await {
            debug!(%error, "canaries of deleted queues are still waited for");
        }
    }

    /// Notes `id` and all that have arrived meanwhile.
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

    /// What cannot be noted is kept for the next time.
    async fn note_arrived(&mut self) -> Result<(), StoreError> {
        if self.arrived.is_empty() {
            return Ok(());
        }
        let began = Instant::now();
        let noted = self.store.note_arrived(&self.arrived).await;
        self.note_store(began, noted.is_ok());
        noted?;
        self.arrived.clear();
        // A finding ends as soon as its canary is back.
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

    /// Whether everything is there that was declared.
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
        // What is missing in a table that failed lately may have arrived; and what came meanwhile is not in it.
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

    /// Consumers beyond the workers that know canaries.
    fn unknown_consumers(&self, known: &Known) -> Option<i64> {
        let (_, sight) = self.session.as_ref()?.sight.as_ref()?;
        Some(i64::from(sight.consumers()) - known.readers)
    }

    /// Whether all who may be given a canary know one: a worker that does not would park it.
    fn may_send(&self, known: &Known) -> bool {
        self.unknown_consumers(known).is_some_and(|unknown| unknown <= 0)
    }

    /// Says whether consumers that are no workers keep canaries from being sent while these are needed.
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

    /// Another worker's canary on that path was published, and came back.
    fn forget_published(&mut self, known: &Known) {
        let arrived = |path: &String| known.sent.iter().any(|sent| sent.path == *path && sent.has_arrived);
        self.findings.not_published.retain(|path, _| !arrived(path));
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

    fn is_overdue(&self, sent: &Sent, now: Timestamp) -> bool {
        let Some(session) = &self.session else { return false };
        let began_at = now - session.since.elapsed();
        let is_quick = self.paths.find(&sent.path).is_some_and(Path::is_quick);
        // That one of a slow path was missed before the session says nothing of now; the next tells.
        let since = if is_quick || began_at <= sent.waiting_since { sent.waiting_since } else { sent.due_at };
        !sent.has_arrived && now > since.max(began_at + COMING_BACK) + GRACE
    }

    async fn send(&mut self, path: &Path, now: Timestamp, suspected: bool, is_missed: bool) -> Result<(), StoreError> {
        let (id, journey) = (Uuid::now_v7(), self.paths.journey(path, now));
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
            Err(fault) if fault.is_of_the_broker() => self.store.release(id).await?,
            // Alarms would fare no better there; but nothing was lost on the way.
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
        let is_first = self.findings.not_arriving.is_none();
        let Some(late) = self.look_for_late(found).await else { return };
        if let Some(found) = late {
            self.findings.not_arriving = Some(found);
        }
        if is_first {
            // A canary of each quick path tells more. Never at once: the next round would ask the same again.
            self.suspicion.get_or_insert(Instant::now() + LOOK_AGAIN_AFTER);
        }
    }

    /// What to say of a late canary, if anything; `None` if the processing queues were looked at just now.
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
            // What is named already is taken back when a canary arrives.
            Late::Waits => was_named.then_some(lost),
        };
        debug!(?sight, ?late, "looked for a late canary");
        session.sight = Some((now, sight));
        Some(late)
    }

    /// Reports what is wrong and what no longer is; nothing of causes that others found.
    fn say(&mut self) {
        let found = [
            (Cause::Topology, self.findings.topology()),
            (Cause::AlternateExchange, self.findings.alternate.clone()),
            (Cause::AlarmsNotArriving, self.findings.arrival()),
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

    /// Why alarms do not arrive. One refusal alone is no finding: the next canary may be taken.
    fn arrival(&self) -> Option<String> {
        let lasts = self.not_published.values().find(|(times, _)| *times > 1);
        let not_published = lasts.map(|(_, why)| why);
        not_published.or(self.not_arriving.as_ref()).or(self.unknown_readers.as_ref()).cloned()
    }

    fn forget_arrival(&mut self) {
        (self.not_arriving, self.unknown_readers) = (None, None);
        self.not_published.clear();
    }

    fn are_any(&self) -> bool {
        self.topology().is_some() || self.alternate.is_some() || self.arrival().is_some()
    }
}
