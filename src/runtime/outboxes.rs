//! Empties the outboxes: first alarms on their way to the broker, then events for the rest of the shop.
//!
//! Decides when; `relay.rs` does it. Polls, defers events while closers are busy, and backs off if their receiver accepts
//! nothing.

use std::time::Duration;

use order_timeout_amqp::publisher::PublishError;
use order_timeout_core::with_causes;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use super::events_turns::EventsTurns;
use crate::give_way::BusyKinds;
use crate::loop_backoff::Backoff;
use crate::observe::degraded::Cause;
use crate::observe::inspect::relay_watch::RelayWatch;
use crate::observe::logging::LogThrottle;
use crate::observe::metrics::{ALARMS, EVENTS};
use crate::observe::recorder::Recorder;
use crate::outbox::alarm_relay::AlarmRelay;
use crate::outbox::destination::SendError;
use crate::outbox::event_relay::{EventRelay, Receiver};
use crate::outbox::relay::{Backlog, LeaderLock, RelayError, Relayed};
use crate::postgres::parked_alarms;
use crate::postgres::{Database, one_line};

/// How often rows that were sent long ago are deleted.
const FORGET_EVERY: Duration = Duration::from_secs(60);
/// How often refused events are counted.
const COUNT_REFUSED_EVERY: Duration = Duration::from_secs(5);
/// How long after the last refusal the cause is cleared, if events were accepted since.
const REFUSED_RECENTLY: Duration = Duration::from_secs(8);
/// How often the outboxes' ages are read.
const MEASURE_EVERY: Duration = Duration::from_secs(1);
/// How often a worker without the relay lock requests it.
const ASK_FOR_LOCK_EVERY: Duration = Duration::from_secs(1);
/// The longest pause after a database error. Short, because orders may depend on the alarms.
const LONGEST_PAUSE_FOR_DATABASE: Duration = Duration::from_secs(1);

pub(super) struct Outboxes {
    database: Database,
    /// How long parked alarms are kept; zero: until they are dropped by hand.
    keep_parked: Duration,
    refused_events: RefusedEvents,
    count_refused_at: Instant,
    lock: LeaderLock,
    alarms: AlarmRelay,
    events: EventRelay,
    poll: Duration,
    busy_kinds: BusyKinds,
    not_asked: LogThrottle,
    alarms_rest: Rest,
    events_rest: Rest,
    /// Whether the database answered in this round.
    database_answers: bool,
    events_turns: EventsTurns,
    forget_at: Instant,
    measure_at: Instant,
    alarms_watch: RelayWatch,
    events_watch: RelayWatch,
    recorder: Recorder,
}

/// What a round did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Round {
    /// All rows are sent, except those that were written meanwhile.
    Emptied,
    /// A batch was full, so there may be more.
    More,
    /// Another worker is the leader, or the lock cannot be requested.
    NotOurs,
}

impl Outboxes {
    pub fn new(
        database: Database,
        alarms: AlarmRelay,
        events: EventRelay,
        poll: Duration,
        keep_parked: Duration,
        busy_kinds: BusyKinds,
        recorder: Recorder,
    ) -> Self {
        let (now, lock) = (Instant::now(), LeaderLock::new(database.clone()));
        let (forget_at, measure_at) = (now + FORGET_EVERY, now);
        Self {
            database,
            keep_parked,
            refused_events: RefusedEvents::default(),
            count_refused_at: now,
            lock,
            alarms,
            events,
            poll,
            busy_kinds,
            not_asked: LogThrottle::default(),
            alarms_rest: Rest::default(),
            events_rest: Rest::default(),
            database_answers: true,
            events_turns: EventsTurns::default(),
            forget_at,
            measure_at,
            alarms_watch: RelayWatch::new("alarm_outbox", false, now.into_std()),
            events_watch: RelayWatch::new("event_outbox", true, now.into_std()),
            recorder,
        }
    }

    /// Runs until `ends`, then sends what is left.
    pub async fn keep_empty(mut self, ends: CancellationToken) {
        loop {
            self.recorder.health.outboxes.note();
            // Rows that were committed before the end are in this round, or in the one after a full batch.
            let is_last = ends.is_cancelled();
            let round = self.round(is_last).await;
            // Skipped if the database has just failed to answer, because that would double the wait.
            if self.database_answers {
                self.measure(round != Round::NotOurs).await;
            } else {
                [ALARMS, EVENTS].into_iter().for_each(|outbox| self.recorder.metrics.outbox_age.show(&[outbox], None));
            }
            if is_last && round != Round::More {
                return self.lock.resign().await;
            }
            let pause = match round {
                Round::More => continue,
                // Not at once: under load something has always come meanwhile, and a round costs the same for one row as
                // for a hundred.
                Round::Emptied => self.poll,
                Round::NotOurs => self.poll.max(ASK_FOR_LOCK_EVERY),
            };
            tokio::select! {
                () = ends.cancelled() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    async fn round(&mut self, is_last: bool) -> Round {
        self.database_answers = true;
        let is_ours = self.is_ours().await;
        self.recorder.metrics.relaying.set(i64::from(is_ours));
        if !is_ours {
            // The leader reports it.
            self.refused_events = RefusedEvents::default();
            self.recorder.degraded(Cause::EventsRefused, None);
            return Round::NotOurs;
        }
        // Separately: an alarm that cannot be sent must not delay an event, nor the reverse.
        let (mut more, mut is_read_only) = (false, false);
        if is_last || self.alarms_rest.is_over() {
            let alarms = self.alarms.round().await.inspect(|alarms| self.count_alarms(alarms));
            self.database_answers &= !alarms.as_ref().is_err_and(RelayError::is_unanswered);
            is_read_only |= alarms.as_ref().is_err_and(RelayError::is_read_only);
            more |= self.alarms_rest.note(ALARMS, alarms, &mut self.alarms_watch);
        }
        if is_last || (self.events_rest.is_over() && self.is_turn_of_events()) {
            let events = self.events.round().await.inspect(|events| self.count_events(events));
            self.database_answers &= !events.as_ref().is_err_and(RelayError::is_unanswered);
            if let Ok(relayed) = &events {
                self.refused_events.note(relayed, Instant::now());
            }
            is_read_only |= events.as_ref().is_err_and(RelayError::is_read_only);
            let more_events = self.events_rest.note(EVENTS, events, &mut self.events_watch);
            if !more_events {
                self.events_turns.begin_anew();
            }
            more |= more_events;
        }
        // Sent rows could not be marked, and would be sent again each time.
        if is_read_only {
            self.lock.resign().await;
            return Round::NotOurs;
        }
        if self.database_answers {
            self.record_refused_events().await;
            self.forget_old().await;
        }
        if more { Round::More } else { Round::Emptied }
    }

    /// Whether this worker holds the relay lock, according to the database.
    async fn is_ours(&mut self) -> bool {
        match self.lock.is_ours().await {
            Ok(is_ours) => is_ours,
            Err(error) => {
                let fault = RelayError::from(error);
                self.database_answers = !fault.is_unanswered();
                if self.not_asked.is_due() {
                    warn!(%fault, "cannot acquire the relay lock; outbox rows are kept, retrying every second");
                }
                false
            }
        }
    }

    fn is_turn_of_events(&mut self) -> bool {
        self.events_turns.is_turn_of_events(self.busy_kinds.load(), Instant::now())
    }

    fn count_alarms(&self, alarms: &Relayed) {
        let metrics = &self.recorder.metrics;
        metrics.alarms_scheduled.inc_by(alarms.sent as u64);
        metrics.alarms_expired.inc_by(alarms.dropped as u64);
        metrics.alarms_refused.inc_by(alarms.refused as u64);
    }

    fn count_events(&self, events: &Relayed) {
        self.recorder.metrics.events_announced.inc_by(events.sent as u64);
        self.recorder.metrics.events_refused.inc_by(events.refused as u64);
    }

    /// Reads the backlogs, whichever worker is the leader, so that the others notice a leader that fails.
    async fn measure(&mut self, is_ours: bool) {
        if Instant::now() < self.measure_at {
            return;
        }
        self.measure_at = Instant::now() + MEASURE_EVERY;
        let (alarms, events) = (self.alarms.outbox.backlog().await, self.events.outbox.backlog().await);
        let now = Instant::now().into_std();
        for (outbox, backlog) in [(ALARMS, &alarms), (EVENTS, &events)] {
            if let Err(error) = backlog {
                debug!(%error, outbox, "the age of an outbox could not be read");
            }
            let age_s = |backlog: &Backlog| backlog.age.as_secs_f64();
            self.recorder.metrics.outbox_age.show(&[outbox], backlog.as_ref().ok().map(age_s));
        }
        self.alarms_watch.note_backlog(&alarms, now);
        self.events_watch.note_backlog(&events, now);
        let watches = [&self.alarms_watch, &self.events_watch];
        let unreadable = watches.map(|watch| watch.why_unreadable(now));
        let stalled = watches.map(|watch| watch.why_stalled(is_ours, now));
        for (cause, whys) in [(Cause::OutboxUnreadable, unreadable), (Cause::RelayStalled, stalled)] {
            let whys: Vec<String> = whys.into_iter().flatten().collect();
            self.recorder.degraded(cause, (!whys.is_empty()).then(|| whys.join("; ")).as_deref());
        }
    }

    /// Reports whether a queue, or the webhook, refuses events.
    async fn record_refused_events(&mut self) {
        if self.count_refused_at <= Instant::now() {
            self.count_refused_at = Instant::now() + COUNT_REFUSED_EVERY;
            match self.events.outbox.count_refused().await {
                Ok(waiting) => self.refused_events.waiting = waiting,
                Err(error) => debug!(error = one_line(&error), "the refused events could not be counted"),
            }
        }
        let sentence = self.refused_events.sentence(self.events.receiver(), Instant::now());
        self.recorder.degraded(Cause::EventsRefused, sentence.as_deref());
    }

    /// Deletes some rows per round, so that a large backlog, or a shorter `announce.keep`, does not delay alarms.
    async fn forget_old(&mut self) {
        if Instant::now() < self.forget_at {
            return;
        }
        let mut is_more = self.forget_parked().await;
        for (outbox, more) in
            [(ALARMS, self.alarms.forget_old().await), (EVENTS, self.events.outbox.forget_old().await)]
        {
            match more {
                Ok(more) => is_more |= more,
                Err(error) => warn!(
                    error = one_line(&error),
                    outbox, "old rows of an outbox could not be deleted; retrying in a minute"
                ),
            }
        }
        if !is_more {
            self.forget_at = Instant::now() + FORGET_EVERY;
        }
    }

    /// Returns whether there are more.
    async fn forget_parked(&self) -> bool {
        if self.keep_parked.is_zero() {
            return false;
        }
        match parked_alarms::forget_old(&self.database, self.keep_parked).await {
            Ok((0, is_more)) => is_more,
            Ok((alarms, is_more)) => {
                info!(alarms, "deleted parked alarms that are older than parked.keep");
                is_more
            }
            Err(error) => {
                warn!(error = one_line(&error), "old parked alarms could not be deleted; retrying in a minute");
                false
            }
        }
    }
}

/// Refusals of events by a queue that is bound to their exchange, or by the webhook.
#[derive(Debug, Default)]
struct RefusedEvents {
    /// When the last refusal was, and its reason.
    last: Option<(Instant, SendError)>,
    /// Whether an event was accepted after that.
    taken_since: bool,
    /// How many refused events wait, as last counted.
    waiting: u64,
}

impl RefusedEvents {
    fn note(&mut self, relayed: &Relayed, now: Instant) {
        let fault = relayed.fault.as_ref().filter(|fault| fault.is_message_specific() && relayed.refused > 0);
        match fault {
            Some(fault) => {
                self.last = Some((now, fault.clone()));
                self.taken_since = false;
            }
            None => self.taken_since |= relayed.sent > 0,
        }
    }

    /// What is wrong, if anything is. Waiting events no longer count as refused once others are accepted: they have a pause of
    /// their own, and count again if they are refused again.
    fn sentence(&self, receiver: &Receiver, now: Instant) -> Option<String> {
        let (at, fault) = self.last.as_ref()?;
        let is_recent = now.saturating_duration_since(*at) < REFUSED_RECENTLY;
        if !is_recent && (self.taken_since || self.waiting == 0) {
            return None;
        }
        let waiting = self.waiting;
        Some(match (receiver, fault) {
            (Receiver::Exchange(exchange), SendError::Broker(PublishError::Nacked)) => format!(
                "a queue that is bound to the exchange {exchange} refuses events (nack), {waiting} wait and are retried at most 5 minutes apart, and each try gives every other queue bound for the event one more copy; look for a full queue with overflow reject-publish, or one without a leader, among the queues that are bound to it (`rabbitmqctl list_bindings -p` and the virtual host), and consume it or raise its length"
            ),
            (Receiver::Exchange(exchange), other) => {
                format!("events cannot be published to the exchange {exchange}, {waiting} wait: {}", with_causes(other))
            }
            // The database takes them all, or none.
            (Receiver::Channel(_), _) => return None,
            (Receiver::Webhook(host), other) => format!(
                "the receiver of announce.webhook at {host} refuses events, {waiting} wait and are retried at most 5 minutes apart: {}; read its log for their webhook-id, which is the id in event_outbox",
                with_causes(other)
            ),
        })
    }
}

/// When an outbox that could not be emptied is tried again.
#[derive(Debug, Default)]
struct Rest {
    backoff: Backoff,
    until: Option<Instant>,
    said: LogThrottle,
}

impl Rest {
    fn is_over(&self) -> bool {
        self.until.is_none_or(|until| until <= Instant::now())
    }

    /// Records the result of a batch. Returns whether there may be more.
    fn note(&mut self, outbox: &'static str, relayed: Result<Relayed, RelayError>, watch: &mut RelayWatch) -> bool {
        let refused_alone = relayed.as_ref().ok().and_then(|relayed| relayed.fault.clone());
        let refused_alone = refused_alone.filter(SendError::is_message_specific).map(RelayError::from);
        let settled = relayed.and_then(|relayed| {
            let more = relayed.more;
            // Each individually refused row has its own pause, so the outbox needs none.
            if let Some(fault) = relayed.fault.as_ref().filter(|fault| fault.is_message_specific()) {
                let rows = relayed.refused;
                if rows > 0 && self.said.is_due() {
                    warn!(
                        fault = with_causes(fault),
                        outbox,
                        rows,
                        "some rows of an outbox are refused; they stay, and each is retried after a growing pause"
                    );
                }
                return Ok((relayed.sent + relayed.dropped, more));
            }
            Ok((relayed.settled()?, more))
        });
        watch.note_refusal(settled.as_ref().err().or(refused_alone.as_ref()));
        match settled {
            Ok((rows, more)) => {
                self.backoff = Backoff::new();
                self.until = None;
                if rows > 0 {
                    debug!(outbox, rows, "an outbox was emptied");
                }
                more
            }
            Err(fault) => {
                let longest = match fault {
                    RelayError::Database(_) => LONGEST_PAUSE_FOR_DATABASE,
                    RelayError::Send(_) => Duration::MAX,
                };
                self.until = Some(Instant::now() + self.backoff.next_pause().min(longest));
                let fault = with_causes(&fault);
                if self.said.is_due() {
                    warn!(fault, outbox, "an outbox could not be emptied; its rows stay and are retried");
                } else {
                    debug!(fault, outbox, "an outbox could not be emptied");
                }
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(sent: usize, fault: Option<PublishError>) -> Relayed {
        Relayed { sent, refused: usize::from(fault.is_some()), fault: fault.map(SendError::from), ..Relayed::default() }
    }

    #[test]
    fn refused_events_leave_no_pause_to_others() {
        let (mut rest, mut watch) = (Rest::default(), RelayWatch::new("event_outbox", true, Instant::now().into_std()));
        rest.note(EVENTS, Ok(round(0, Some(PublishError::Nacked))), &mut watch);
        assert!(rest.is_over());
        rest.note(EVENTS, Ok(round(0, Some(PublishError::Blocked))), &mut watch);
        assert!(!rest.is_over());
    }

    #[test]
    fn refusal_is_over_when_events_are_taken() {
        let (mut refused, began) = (RefusedEvents::default(), Instant::now());
        let says = |refused: &RefusedEvents, seconds| {
            let receiver = Receiver::Exchange("order.events".to_owned());
            refused.sentence(&receiver, began + Duration::from_secs(seconds)).is_some()
        };
        assert!(!says(&refused, 0));
        refused.note(&round(7, Some(PublishError::Nacked)), began);
        refused.waiting = 1;
        assert!(says(&refused, 3_600), "nothing was taken since");
        refused.note(&round(1, None), began);
        assert!(says(&refused, 7) && !says(&refused, 8));
        refused.note(&round(0, Some(PublishError::Nacked)), began);
        refused.waiting = 0;
        assert!(!says(&refused, 8), "nothing waits");
    }
}
