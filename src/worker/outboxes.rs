//! Keeps the outboxes empty: alarms on their way to the broker first, then events for the rest of the shop.
//!
//! Says when; how is `relay.rs`. Polls, gives way to closing, and after a failure waits longer each time.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::announce::Announcer;
use crate::database::Database;
use crate::patience::Pauses;
use crate::relay::{NotRelayed, RelayLock};
use crate::schedule::outbox::AlarmRelay;

/// How often what was sent long ago is deleted.
const FORGET_EVERY: Duration = Duration::from_secs(60);
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
    ) -> Self {
        let forget_at = Instant::now() + FORGET_EVERY;
        Self { lock: RelayLock::new(database), alarms, events, poll, closing, gives_way_since: None, forget_at }
    }

    /// Until told to end; then sends what is left.
    pub async fn keep_empty(mut self, ends: CancellationToken) {
        let mut pauses = Pauses::new();
        loop {
            let round = self.round().await;
            if ends.is_cancelled() && !matches!(round, Ok(Round::Sent)) {
                return self.lock.resign().await;
            }
            let pause = match round {
                Ok(Round::Sent) => {
                    pauses = Pauses::new();
                    continue;
                }
                Ok(Round::Empty) => self.poll,
                Ok(Round::NotOurs) => self.poll.max(ASK_FOR_LOCK_EVERY),
                Err(fault) => {
                    let pause = pauses.next_pause();
                    warn!(%fault, again_in_ms = pause.as_millis(), "an outbox could not be emptied; its rows stay and are tried again");
                    // Not cut short by new events: they would fare no better.
                    tokio::select! {
                        () = ends.cancelled() => {}
                        () = tokio::time::sleep(pause) => {}
                    }
                    continue;
                }
            };
            pauses = Pauses::new();
            tokio::select! {
                () = ends.cancelled() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
    }

    async fn round(&mut self) -> Result<Round, NotRelayed> {
        if !self.lock.is_ours().await? {
            return Ok(Round::NotOurs);
        }
        // Both are tried, whatever comes of the first: an alarm that cannot be sent must not hold up an event.
        let alarms = self.alarms.round().await;
        let events = if self.events_give_way() { Ok(0) } else { self.events.round().await };
        let (alarms, events) = (alarms?, events?);
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

    async fn forget_old(&mut self) -> Result<(), NotRelayed> {
        if Instant::now() < self.forget_at {
            return Ok(());
        }
        self.forget_at = Instant::now() + FORGET_EVERY;
        self.alarms.forget_old().await?;
        Ok(self.events.forget_old().await?)
    }
}
