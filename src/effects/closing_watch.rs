//! Reads twice a second whether closing of a kind is paused, and tells the engine; takes the engine's counts to the brake,
//! and writes the pause when it trips.
//!
//! Decides nothing. One task does all of it, so that what was read before a pause was written is never told after it. It
//! uses the closers' connections, because it must not wait for another. What takes longer than a short statement, as counting
//! what falls due, is a task of its own.

use order_timeout_core::brake::{Counts, Trip};
use order_timeout_core::engine::Input;
use order_timeout_core::kind::Kind;
use tokio::sync::mpsc;
use tracing::{debug, error, warn};

use super::brake::Brake;
use crate::observe::inspect::registration::host;
use crate::observe::logging::LogThrottle;
use crate::observe::recorder::KindRecorder;
use crate::postgres::closing_pauses::{self, Pause, PauseCause};
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{ErrorClass, classify, one_line};

/// What the engine reports.
#[derive(Debug)]
pub(crate) enum ClosingReport {
    /// What it has closed since the last report.
    Counts(Counts),
    /// It has found that closing must pause.
    Trip(Trip),
}

/// What is known of a kind's pauses.
#[derive(Debug)]
pub(crate) struct ClosingWatch {
    kind: Kind,
    connections: WarmConnections,
    inputs: mpsc::UnboundedSender<Input>,
    reports: (mpsc::UnboundedSender<ClosingReport>, mpsc::UnboundedReceiver<ClosingReport>),
    /// `None` if it is off.
    brake: Option<Brake>,
    recorder: KindRecorder,
    known: Vec<Pause>,
    /// Whether the engine was last told that closing is paused.
    told_paused: bool,
    /// A pause that is not written yet.
    trip: Option<Trip>,
    fault_throttle: LogThrottle,
}

impl ClosingWatch {
    /// Of a worker that has read nothing yet.
    pub fn new(
        kind: Kind,
        connections: WarmConnections,
        inputs: mpsc::UnboundedSender<Input>,
        brake: Option<Brake>,
        recorder: KindRecorder,
    ) -> Self {
        let reports = mpsc::unbounded_channel();
        Self {
            kind,
            connections,
            inputs,
            reports,
            brake,
            recorder,
            known: Vec::new(),
            told_paused: false,
            trip: None,
            fault_throttle: LogThrottle::default(),
        }
    }

    /// Where the engine's reports go.
    pub fn reports(&self) -> mpsc::UnboundedSender<ClosingReport> {
        self.reports.0.clone()
    }

    /// The next report of the engine.
    pub async fn next_report(&mut self) -> Option<ClosingReport> {
        self.reports.1.recv().await
    }

    /// Reads the pauses, and has the brake judge what was counted before. To be called before the engine is given its first
    /// order.
    ///
    /// # Errors
    /// sqlx's, if the pauses cannot be read.
    pub async fn begin(&mut self) -> Result<(), sqlx::Error> {
        self.look().await?;
        self.count(&Counts::default()).await;
        if let Some(brake) = &mut self.brake {
            brake.finish_count().await;
        }
        self.count(&Counts::default()).await;
        Ok(())
    }

    /// Takes a report in.
    pub async fn take(&mut self, report: ClosingReport) {
        match report {
            ClosingReport::Counts(counts) => self.count(&counts).await,
            ClosingReport::Trip(trip) => {
                self.trip = Some(trip);
                self.look_again().await;
            }
        }
    }

    /// Reads the pauses again; an error changes nothing, because an unavailable database is reported elsewhere.
    pub async fn look_again(&mut self) {
        if let Err(error) = self.look().await {
            debug!(error = one_line(&error), "whether closing is paused could not be read; it stays as it was");
        }
    }

    async fn look(&mut self) -> Result<(), sqlx::Error> {
        let has_tripped = self.trip.is_some();
        self.write_trip().await?;
        let kind = &self.kind;
        let found = self.connections.run_on_oldest(async |on| closing_pauses::current(on, Some(kind)).await).await?;
        if self.known == found && !has_tripped && self.told_paused != found.is_empty() {
            return Ok(());
        }
        if !found.is_empty() || has_tripped {
            self.tell(Input::ClosingPaused);
            self.told_paused = true;
        }
        if found.is_empty() {
            // First, so that what was due when it was resumed does not trip the brake again.
            if !self.judge(&Counts::default()).await? {
                return Ok(());
            }
            self.tell(Input::ClosingResumed);
            self.told_paused = false;
        }
        if self.known != found {
            self.recorder.closing_paused(&found);
        }
        self.known = found;
        Ok(())
    }

    async fn count(&mut self, counts: &Counts) {
        if !self.brake.as_ref().is_some_and(|brake| brake.wants_turn(counts)) {
            return;
        }
        let judged = self.judge(counts).await;
        if !matches!(judged, Ok(true)) {
            self.tell(Input::BrakeNotJudged);
        }
        if let Err(error) = judged
            && self.fault_throttle.is_due()
        {
            warn!(
                error = one_line(&error),
                "what the brake counts could not be written or read; each worker judges alone meanwhile; said once a minute at most"
            );
        }
        if self.trip.is_some() {
            self.look_again().await;
        }
    }

    /// Whether it could be judged: not while orders that fall due must be counted first.
    async fn judge(&mut self, counts: &Counts) -> Result<bool, sqlx::Error> {
        let Some(brake) = &mut self.brake else { return Ok(true) };
        match brake.turn(counts).await? {
            Some(Ok(limits)) => self.tell(Input::BrakeLimits(limits)),
            // It is written even if closing is paused already, and then changes nothing.
            Some(Err(trip)) => self.trip = Some(trip),
            None => return Ok(false),
        }
        Ok(true)
    }

    async fn write_trip(&mut self) -> Result<(), sqlx::Error> {
        let Some(Trip(reason)) = &self.trip else { return Ok(()) };
        let (kind, by) = (&self.kind, format!("the worker on {}", host()));
        let write = async |on: &mut sqlx::PgConnection| {
            closing_pauses::begin(on, Some(kind), PauseCause::Brake, reason, &by).await
        };
        let written = match self.connections.run_on_oldest(write).await {
            // The pause matters more than its event, for which a right may be missing.
            Err(fault) if classify(&fault) != ErrorClass::Away => {
                let write = async |on: &mut sqlx::PgConnection| {
                    closing_pauses::begin_unannounced(on, kind, PauseCause::Brake, reason, &by).await
                };
                self.connections.run_on_oldest(write).await?
            }
            written => written?,
        };
        if written {
            error!(reason, "the brake has paused closing; find the cause, then `order-timeout resume`");
        }
        self.trip = None;
        Ok(())
    }

    fn tell(&self, input: Input) {
        // Without the event loop the input is not needed.
        let _ = self.inputs.send(input);
    }
}
