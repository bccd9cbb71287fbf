//! Empties the outboxes of a worker without a broker, as far as that is possible.
//!
//! Decides when; `outbox/local.rs` does it.

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use super::events_turns::EventsTurns;
use crate::give_way::BusyKinds;
use crate::observe::health::BEAT_EVERY;
use crate::observe::logging::LogThrottle;
use crate::observe::metrics::EVENTS;
use crate::observe::recorder::Recorder;
use crate::outbox::local::LocalOutboxes;
use crate::outbox::relay::RelayError;

/// How often old rows are deleted.
const CLEAN_UP_EVERY: Duration = Duration::from_secs(60);

pub(super) struct LocalOutboxesLoop {
    outboxes: LocalOutboxes,
    poll: Duration,
    busy_kinds: BusyKinds,
    events_turns: EventsTurns,
    clean_up_at: Instant,
    measure_at: Instant,
    fault_throttle: LogThrottle,
    recorder: Recorder,
}

impl LocalOutboxesLoop {
    pub fn new(outboxes: LocalOutboxes, poll: Duration, busy_kinds: BusyKinds, recorder: Recorder) -> Self {
        let now = Instant::now();
        let clean_up_at = now + CLEAN_UP_EVERY;
        let (events_turns, fault_throttle) = (EventsTurns::default(), LogThrottle::default());
        Self { outboxes, poll, busy_kinds, events_turns, clean_up_at, measure_at: now, fault_throttle, recorder }
    }

    /// Runs until `ends`, then announces what is left.
    pub async fn keep_empty(mut self, ends: CancellationToken) {
        loop {
            self.recorder.health.outboxes.note();
            let is_last = ends.is_cancelled();
            // Each by itself: events that cannot be announced do not keep old rows.
            let announced = self.announce_in_turn(is_last).await;
            let cleaned = self.clean_up_due().await;
            let measured = self.measure_due().await;
            let more = self.note(announced) | self.note(cleaned);
            self.note(measured.map(|()| false));
            if is_last && !more {
                return;
            }
            if !more {
                tokio::select! {
                    () = ends.cancelled() => {}
                    () = tokio::time::sleep(self.poll.min(BEAT_EVERY)) => {}
                }
            }
        }
    }

    /// Whether there is more to do at once.
    fn note(&mut self, done: Result<bool, RelayError>) -> bool {
        done.unwrap_or_else(|fault| {
            if self.fault_throttle.is_due() {
                warn!(%fault, "the outboxes cannot be read or written; events stay in event_outbox and are tried again");
            } else {
                debug!(%fault, "the outboxes cannot be read or written");
            }
            false
        })
    }

    /// Events wait for busy closers, which need the same database.
    async fn announce_in_turn(&mut self, is_last: bool) -> Result<bool, RelayError> {
        if !is_last && !self.events_turns.is_turn_of_events(self.busy_kinds.load(), Instant::now()) {
            return Ok(false);
        }
        let announced = self.announce().await;
        if !matches!(announced, Ok(true)) {
            self.events_turns.begin_anew();
        }
        announced
    }

    async fn announce(&self) -> Result<bool, RelayError> {
        let (announced, more) = self.outboxes.announce().await?;
        self.recorder.metrics.events_announced.inc_by(announced);
        Ok(more)
    }

    async fn clean_up_due(&mut self) -> Result<bool, RelayError> {
        if Instant::now() < self.clean_up_at {
            return Ok(false);
        }
        let cleaned = self.outboxes.clean_up().await.map_err(RelayError::from);
        if !matches!(cleaned, Ok(true)) {
            self.clean_up_at = Instant::now() + CLEAN_UP_EVERY;
        }
        cleaned
    }

    async fn measure_due(&mut self) -> Result<(), RelayError> {
        if Instant::now() < self.measure_at {
            return Ok(());
        }
        self.measure_at = Instant::now() + BEAT_EVERY;
        let age = self.outboxes.age().await;
        self.recorder.metrics.outbox_age.show(&[EVENTS], age.as_ref().ok().map(Duration::as_secs_f64));
        age.map(drop)
    }
}
