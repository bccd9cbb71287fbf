//! Whether canaries arrive in time: those that workers send, and, where that is asked for, one more on each path that
//! answers within seconds.
//!
//! Never declares a queue. A canary is sent only where all consumers know one.

use std::time::Duration;

use order_timeout_amqp::publisher::{ConfirmedPublisher, PublishError};
use order_timeout_core::kind::Kind;
use order_timeout_core::message::read_rfc3339;
use order_timeout_core::order::Timestamp;
use tokio::time::Instant;
use uuid::Uuid;

use super::check::{CheckName, Checks, Finding};
use crate::config::Settings;
use crate::observe::canary::store::{CanaryStore, Known, Sent};
use crate::observe::canary::{self, GRACE, Path, Paths};
use crate::operations::status::RegisteredWorker;
use crate::postgres::Database;

/// A worker may be given late what waited while no worker ran.
const COMING_BACK: Duration = Duration::from_secs(10);
/// How often the table is read while canaries are awaited.
const POLL: Duration = Duration::from_millis(100);
/// How long they are awaited beyond their grace: a worker notes arrivals every half second.
const NOTED_WITHIN: Duration = Duration::from_secs(1);

const WHY: &str = "alarms take the same way: they do not arrive either, and the sweep closes their orders late";

/// The paths of one kind.
struct OfKind<'a> {
    paths: Paths,
    store: CanaryStore,
    /// Since when a live worker serves the kind.
    served_since: Option<Timestamp>,
    settings: &'a Settings,
}

/// `workers`: the live ones. `is_read`: whether canaries may be sent to this kind's queues.
pub(super) async fn examine(
    settings: &Settings,
    kind: &Kind,
    database: &Database,
    workers: &[RegisteredWorker],
    is_to_be_sent: bool,
    checks: &mut Checks,
) {
    let serves = |worker: &&RegisteredWorker| worker.kinds.iter().any(|served| served == kind.as_str());
    let since = workers.iter().filter(serves).filter_map(|worker| read_rfc3339(&worker.since)).min();
    let of_kind = OfKind {
        paths: Paths::new(settings, kind),
        store: CanaryStore::new(database.clone(), &settings.namespace, kind),
        served_since: since,
        settings,
    };
    if since.is_none() {
        return checks.not_known(CheckName::Canaries, format!("no worker runs that takes canaries of kind {kind}"));
    }
    let sent = match is_to_be_sent {
        true => of_kind.send_all(checks).await,
        false => Ok(()),
    };
    let known = match sent {
        Ok(()) => of_kind.known().await,
        Err(why) => Err(why),
    };
    match known {
        Ok(known) => of_kind.judge(&known, checks),
        Err(why) => checks.not_known(CheckName::Canaries, why),
    }
}

impl OfKind<'_> {
    async fn known(&self) -> Result<Known, String> {
        let names: Vec<String> = self.paths.all().iter().map(|path| path.name.clone()).collect();
        self.store.known(&names).await.map_err(|fault| fault.to_string())
    }

    /// Sends one on each quick path, and waits until all have arrived or are late.
    async fn send_all(&self, checks: &mut Checks) -> Result<(), String> {
        let publisher =
            ConfirmedPublisher::connect(&self.settings.amqp, "doctor").await.map_err(|fault| fault.to_string())?;
        let known = self.known().await?;
        let mut last_due = known.now;
        for path in self.paths.all().iter().filter(|path| path.is_quick()) {
            if let Some(due) = self.send(&publisher, path, known.now, checks).await? {
                last_due = last_due.max(due);
            }
        }
        let until = Instant::now() + last_due.since(known.now) + GRACE + NOTED_WITHIN;
        while Instant::now() < until {
            let known = self.known().await?;
            let is_quick = |sent: &&Sent| self.paths.find(&sent.path).is_some_and(Path::is_quick);
            if known.sent.iter().filter(is_quick).all(Sent::has_arrived) {
                break;
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }

    /// When it is expected back; `None` if none was sent on this path.
    async fn send(
        &self,
        publisher: &ConfirmedPublisher,
        path: &Path,
        now: Timestamp,
        checks: &mut Checks,
    ) -> Result<Option<Timestamp>, String> {
        let (id, journey) = (Uuid::now_v7(), self.paths.journey(path, now));
        let claimed = self.store.claim(id, path, &journey.queue, journey.wait, Duration::ZERO, false).await;
        // A worker's canary is on its way, which is awaited instead.
        if !claimed.map_err(|fault| fault.to_string())? {
            return Ok(Some(now + journey.wait));
        }
        match publisher.publish(canary::outgoing(id, &journey, now)).await {
            Ok(()) => return Ok(Some(now + journey.wait)),
            // A slot that no alarm has needed yet does not exist; if it exists, its binding is looked at elsewhere.
            Err(PublishError::Unroutable(_)) if journey.is_in_slot() => {}
            Err(fault) => checks.error(
                CheckName::Canaries,
                Finding::new(
                    format!("a canary could not be published on the path {}: {fault}", path.name),
                    WHY,
                    "run `order-timeout setup`, which declares exchanges, queues and bindings that are missing, and check the user's rights",
                ),
            ),
        }
        self.store.release(id).await.map_err(|fault| fault.to_string())?;
        Ok(None)
    }

    fn judge(&self, known: &Known, checks: &mut Checks) {
        if known.sent.is_empty() {
            return checks.not_known(
                CheckName::Canaries,
                "no worker has sent any yet, which it does after a minute; --canary sends them now",
            );
        }
        let late: Vec<&Sent> = known.sent.iter().filter(|sent| self.is_late(sent, known.now)).collect();
        let is_direct = |sent: &&&Sent| self.paths.find(&sent.path).is_some_and(Path::is_direct);
        // A missing direct one explains all others.
        let named: Vec<&&Sent> = match late.iter().find(is_direct) {
            Some(direct) => vec![direct],
            None => late.iter().collect(),
        };
        for sent in named {
            let direct_arrives =
                !is_direct(&sent) && known.sent.iter().filter(|sent| is_direct(&sent)).any(Sent::has_arrived);
            let Some(path) = self.paths.find(&sent.path) else { continue };
            let fix = match path.is_direct() {
                true => {
                    "restart the worker that does not read, or stop the foreign consumer (rabbitmqctl list_consumers)"
                }
                false => "see \"Dead-lettering has stopped\" in docs/operating/troubleshoot.md",
            };
            let due = order_timeout_core::message::write_rfc3339(sent.due_at);
            let what =
                format!("path {}, expected at {due}: {}", path.name, path.why_missing(&sent.queue, direct_arrives));
            checks.error(CheckName::Canaries, Finding::new(what, WHY, fix));
        }
        let arrived = known.sent.iter().filter_map(|sent| Some((sent, sent.arrived_at?)));
        let facts: Vec<String> = arrived
            .map(|(sent, at)| {
                let late_ms = (at.unix_micros() - sent.due_at.unix_micros()) / 1_000;
                format!("{} {late_ms} ms after its time", sent.path)
            })
            .collect();
        if late.is_empty() && !facts.is_empty() {
            checks.fact(CheckName::Canaries, facts.join(", "));
        }
    }

    fn is_late(&self, sent: &Sent, now: Timestamp) -> bool {
        let (Some(path), Some(since)) = (self.paths.find(&sent.path), self.served_since) else { return false };
        let grace = if path.is_quick() { GRACE } else { path.given_up_after() };
        !sent.has_arrived() && now > sent.waiting_since.max(since + COMING_BACK) + grace
    }
}
