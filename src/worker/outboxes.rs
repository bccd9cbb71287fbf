//! Keeps the outboxes empty: alarms on their way to the broker first, then events for the rest of the shop.
//!
//! Says when; how is `relay.rs`. Polls, gives way to closing, and after a failure waits longer each time.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::Signs;
use crate::announce::Announcer;
use crate::database::Database;
use crate::health::Loop;
use crate::metrics::{ALARMS, EVENTS};
use crate::patience::Pauses;
use crate::relay::{NotRelayed, RelayLock, Relayed};
use crate::schedule::outbox::AlarmRelay;

/// How often what was sent long ago is deleted.
const FORGET_EVERY: Duration = Duration::from_secs(60);
/// How often the outboxes' ages are read.
const MEASURE_EVERY: Duration = Duration::from_secs(1);
/// How long events wait for closers that have work in hand.
const LONGEST_WAY: Duration = Duration::from_millis(500);
/// How often a worker that is not the relay asks whether it should be.
const ASK_FOR_LOCK_EVERY: Duration = Duration::from_secs(1);

pub(super) struct Outboxes {
    lock: RelayLock,
    alarms: AlarmRelay,
    events: Announcer,
    poll: Duration,
    closing: watch::Receiver<bool>,
    /// Since when events give way to closing.
    gives_way_since: Option<Instant>,
    forget_at: Instant,
    measure_at: Instant,
    signs: Signs,
}

/// What a round did.
enum Round {
    /// There may be more.
    Sent,
    Empty,
    /// Another worker is the relay.
    NotOurs,
}

impl Outboxes {
    pub fn new(
        database: Database,
        alarms: AlarmRelay,
        events: Announcer,
        poll: Duration,
        closing: watch::Receiver<bool>,
        signs: Signs,
    ) -> Self {
        let (now, lock) = (Instant::now(), RelayLock::new(database));
        let (forget_at, measure_at) = (now + FORGET_EVERY, now);
        Self { lock, alarms, events, poll, closing, gives_way_since: None, forget_at, measure_at, signs }
    }

    /// Until told to end; then sends what is left.
    pub async fn keep_empty(mut self, ends: CancellationToken) {
        let mut pauses = Pauses::new();
        loop {
            self.signs.health.beat(Loop::Outboxes);
            let round = self.round().await;
            // Not of a database that has just failed: it would be waited for twice over.
            if !matches!(round, Err(NotRelayed::Database(_))) {
                self.measure().await;
            }
            if ends.is_cancelled() && !matches!(round, Ok(Round::Sent)) {
                return self.lock.resign().await;
            }
            if round.is_ok() {
                pauses = Pauses::new();
            }
            let pause = match round {
                Ok(Round::Sent) => continue,
                Ok(Round::Empty) => self.poll,
                Ok(Round::NotOurs) => self.poll.max(ASK_FOR_LOCK_EVERY),
                Err(fault) => {
                    let pause = pauses.next_pause();
                    warn!(%fault, again_in_ms = pause.as_millis(), "an outbox could not be emptied; its rows stay and are tried again");
                    pause
                }
            };
            tokio::select! {
                () = ends.cancelled() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    async fn round(&mut self) -> Result<Round, NotRelayed> {
        let is_ours = self.lock.is_ours().await;
        self.signs.metrics.relaying.set(i64::from(matches!(is_ours, Ok(true))));
        if !is_ours? {
            return Ok(Round::NotOurs);
        }
        // Both are tried, whatever comes of the first: an alarm that cannot be sent must not hold up an event.
        let alarms = self.alarms.round().await.inspect(|alarms| self.count_alarms(alarms));
        let events = if self.events_give_way() { Ok(Relayed::default()) } else { self.events.round().await };
        let events = events.inspect(|events| self.count_events(events));
        let (alarms, events) = (alarms?.settled()?, events?.settled()?);
        if alarms + events > 0 {
            debug!(alarms, events, "outboxes relayed");
        }
        self.forget_old().await?;
        Ok(if alarms + events > 0 { Round::Sent } else { Round::Empty })
    }

    /// Events can wait for a burst of closes; but not for ever, and no alarm waits with them.
    fn events_give_way(&mut self) -> bool {
        if !*self.closing.borrow() {
            self.gives_way_since = None;
            return false;
        }
        let since = self.gives_way_since.get_or_insert_with(Instant::now);
        if since.elapsed() < LONGEST_WAY {
            return true;
        }
        *since = Instant::now();
        false
    }

    fn count_alarms(&self, alarms: &Relayed) {
        let metrics = &self.signs.metrics;
        metrics.alarms_scheduled.inc_by(alarms.sent as u64);
        metrics.alarms_expired.inc_by(alarms.dropped as u64);
        metrics.alarms_refused.inc_by(alarms.refused as u64);
    }

    fn count_events(&self, events: &Relayed) {
        self.signs.metrics.events_announced.inc_by(events.sent as u64);
        self.signs.metrics.events_refused.inc_by(events.refused as u64);
    }

    /// Reads the outboxes' ages, whoever relays them: a relay that fails is best seen by the others.
    async fn measure(&mut self) {
        if Instant::now() < self.measure_at {
            return;
        }
        self.measure_at = Instant::now() + MEASURE_EVERY;
        for (outbox, age) in [(ALARMS, self.alarms.age().await), (EVENTS, self.events.age().await)] {
            match age {
                Ok(age) => self.signs.metrics.outbox_age.with_label_values(&[outbox]).set(age.as_secs_f64()),
                Err(error) => debug!(%error, outbox, "the age of an outbox could not be read"),
            }
        }
    }

    /// Some rows a turn: what a night has left behind, or a shorter `announce.keep`, must not keep alarms waiting.
    async fn forget_old(&mut self) -> Result<(), NotRelayed> {
        if Instant::now() < self.forget_at {
            return Ok(());
        }
        let (more_alarms, more_events) = (self.alarms.forget_old().await?, self.events.forget_old().await?);
        if !more_alarms && !more_events {
            self.forget_at = Instant::now() + FORGET_EVERY;
        }
        Ok(())
    }
}
