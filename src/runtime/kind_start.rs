//! Starts each kind of the worker. Of several kinds, one whose tables or statements cannot be used does not keep the
//! others: it is reported, and its start is tried again.
//!
//! Decides when to try; `kind_worker.rs` prepares and starts. The only kind of a worker ends the start, as do all of them
//! together: such a worker would do nothing.

use std::sync::Arc;
use std::time::Duration;

use order_timeout_core::kind::Kind;
use tokio::time::Instant;
use tracing::{Instrument, info};

use super::StartError;
use super::kind_worker::{KindWorker, RunningKind, Shared};
use crate::config::Settings;
use crate::handler::Handlers;
use crate::loop_backoff::Backoff;
use crate::observe::degraded::Cause;
use crate::observe::recorder::{KindRecorder, Recorder};
use crate::postgres::{Database, without_server_message};

/// Counting a backlog may take seconds of the database's time, so the pause is this many times as long as the try took.
const TIMES_AS_LONG: u32 = 5;
/// A longer try counts as this long, so that a kind waits a minute at most.
const LONGEST_COUNTED: Duration = Duration::from_secs(12);

/// A kind whose start is tried again.
#[derive(Debug)]
pub(super) struct UnusableKind {
    kind: Kind,
    recorder: KindRecorder,
}

/// Prepares these kinds; returns those that are ready, and those that are not.
///
/// # Errors
/// [`StartError`] of the first one if none is ready.
pub(super) async fn prepare_all(
    settings: &Settings,
    kinds: impl IntoIterator<Item = Kind>,
    database: &Database,
    handlers: &Handlers,
    recorder: &Recorder,
) -> Result<(Vec<KindWorker>, Vec<UnusableKind>), StartError> {
    let (mut ready, mut unusable) = (Vec::new(), Vec::new());
    for kind in kinds {
        let recorder = recorder.of_kind(&kind);
        match KindWorker::prepare(settings, &kind, database, handlers, recorder.clone()).await {
            Ok(prepared) => ready.push(prepared),
            Err(fault) => unusable.push((UnusableKind { kind, recorder }, fault)),
        }
    }
    if ready.is_empty() && !unusable.is_empty() {
        return Err(unusable.swap_remove(0).1);
    }
    let report = |(kind, fault): (UnusableKind, StartError)| {
        kind.report(&fault);
        kind
    };
    Ok((ready, unusable.into_iter().map(report).collect()))
}

impl UnusableKind {
    fn report(&self, fault: &StartError) {
        let why = fault.to_string();
        let what = format!(
            "it could not start, so no order of it is closed ({why}); the start is tried again every few seconds, correct what the sentence names"
        );
        self.recorder.degraded(Cause::KindNotStarted, Some(&what));
        self.recorder.health.note_database(Some(&without_server_message(&why)));
    }

    /// Tries until the kind is started; `None` if the worker stops before.
    pub async fn start(self, shared: Arc<Shared>) -> Option<RunningKind> {
        let (mut backoff, mut took) = (Backoff::new(), Duration::ZERO);
        let span = shared.span_of(&self.kind);
        loop {
            tokio::select! {
                () = shared.stop.cancelled() => return None,
                () = tokio::time::sleep(backoff.next_pause().max(TIMES_AS_LONG * took)) => {}
            }
            let began = Instant::now();
            let Shared { settings, database, handlers, .. } = &*shared;
            let prepared = KindWorker::prepare(settings, &self.kind, database, handlers, self.recorder.clone());
            let prepared = tokio::select! {
                () = shared.stop.cancelled() => return None,
                prepared = prepared.instrument(span.clone()) => prepared,
            };
            took = began.elapsed().min(LONGEST_COUNTED);
            match prepared {
                Ok(mut kind) => {
                    self.recorder.degraded(Cause::KindNotStarted, None);
                    self.recorder.health.note_database(None);
                    if settings.delay.strategy.needs_broker() {
                        kind.expect_sessions();
                    }
                    info!(kind = %self.kind, "the kind is started");
                    return Some(kind.start(&shared));
                }
                Err(fault) => self.report(&fault),
            }
        }
    }
}
