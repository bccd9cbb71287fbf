//! Moves messages aside that end every consumer session, and reports the cause until then.
//!
//! Acts only on sessions that ended because the AMQP client could not read a message. `crate::quarantine` searches the
//! queues.

use std::time::Duration;

use order_timeout_amqp::connect::EndKind;
use order_timeout_core::kind::Kind;
use tracing::{info, warn};

use crate::config::Settings;
use crate::deliver::SessionEnd;
use crate::observe::degraded::Cause;
use crate::observe::health::{BEAT_EVERY, Loop};
use crate::observe::recorder::KindRecorder;
use crate::postgres::Database;
use crate::quarantine::{self, Bounds, Found, QuarantineError, Report};

/// The pause between searches that find nothing.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(4)];
/// How many messages a search names in the log; the others are counted.
const NAMED: usize = 5;

pub(super) struct Quarantine {
    settings: Settings,
    kind: Kind,
    database: Database,
    pub recorder: KindRecorder,
    /// Whether a reported cause is not cleared yet.
    reported: bool,
}

impl Quarantine {
    pub fn new(settings: Settings, kind: Kind, database: Database, recorder: KindRecorder) -> Self {
        Self { settings, kind, database, recorder, reported: false }
    }

    /// Moves the message aside that ended a session, if a message did. Returns whether one was moved, so that the next session
    /// may be opened at once. Cancel-safe: an unacknowledged message returns to its queue.
    pub async fn see_to(&mut self, end: &SessionEnd) -> bool {
        match end.kind {
            EndKind::Other | EndKind::AckTimeout => false,
            EndKind::BrokerFailed => {
                self.report(&format!(
                    "{}; `order-timeout quarantine` names the message if it is one, docs/operating/troubleshoot.md says how to take it out",
                    end.why
                ));
                false
            }
            EndKind::Unreadable => {
                self.report(&format!("{}; the queues are searched for it", end.why));
                self.search_until_found().await
            }
        }
    }

    /// A session has been open for so long that no message ends it at once.
    pub fn session_lives(&mut self) {
        if std::mem::take(&mut self.reported) {
            self.recorder.degraded(Cause::UnreadableMessage, None);
        }
    }

    fn report(&mut self, why: &str) {
        self.reported = true;
        self.recorder.degraded(Cause::UnreadableMessage, Some(why));
    }

    /// There is such a message. If it is not found, the broker has not requeued the deliveries of the session yet, or another
    /// worker has moved the message.
    async fn search_until_found(&mut self) -> bool {
        for pause in PAUSES {
            if self.search_all().await {
                return true;
            }
            self.recorder.health.beat(Loop::Supervisor);
            tokio::time::sleep(pause).await;
        }
        self.search_all().await
    }

    async fn search_all(&mut self) -> bool {
        let mut moved = 0;
        for queue in quarantine::queues(&self.settings, [&self.kind]) {
            match self.search(queue.clone()).await {
                Ok(report) => {
                    self.tell(&report);
                    moved += report.unreadable;
                }
                Err(error) => {
                    warn!(%error, queue, "a queue could not be searched for the message that ends every session");
                    self.report(&format!(
                        "a message ends every session, and {queue} cannot be searched for it: {error}"
                    ));
                }
            }
        }
        self.recorder.moved_aside(moved);
        moved > 0
    }

    /// As a task of its own: the client's parser goes as deep as a message does, and a thread of the runtime has the stack
    /// for it.
    async fn search(&self, queue: String) -> Result<Report, QuarantineError> {
        let (amqp, database) = (self.settings.amqp.clone(), self.database.clone());
        let name = queue.clone();
        let searching = async move { quarantine::search(&amqp, &name, Bounds::WORKER, Some(&database)).await };
        let mut task = AbortOnDrop(tokio::spawn(searching));
        loop {
            self.recorder.health.beat(Loop::Supervisor);
            match tokio::time::timeout(BEAT_EVERY, &mut task.0).await {
                Ok(Ok(searched)) => return searched,
                Ok(Err(failed)) => {
                    return Err(QuarantineError::Broken { place: queue, why: failed.to_string() });
                }
                Err(_) => {}
            }
        }
    }

    fn tell(&mut self, report: &Report) {
        let Report { queue, searched, unreadable, found, stopped } = report;
        for found in found.iter().take(NAMED) {
            warn!(
                queue, position = found.position, why = %found.why, order_id = found.order_id.as_deref().unwrap_or_default(),
                "a message that the AMQP client cannot read was moved into parked_alarms"
            );
        }
        if found.len() > NAMED {
            warn!(queue, unreadable, "more messages that the AMQP client cannot read were moved into parked_alarms");
        }
        if let Some(first) = found.first() {
            let Found { position, why, .. } = first;
            self.report(&format!("{unreadable} message(s) were moved from {queue} into parked_alarms, the first from position {position}: {why}"));
        }
        match stopped {
            Some(why) => {
                warn!(queue, why, "a queue was not searched to its end; `order-timeout quarantine --move` goes further")
            }
            None => info!(queue, searched, unreadable, "a queue was searched for messages that end every session"),
        }
    }
}

/// Aborts a search that is no longer wanted, and with it its connection.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}
