//! Reads each second whether closing of a kind is paused, and tells the engine.
//!
//! Decides nothing. Uses the closers' connections, because it must not wait for another.

use order_timeout_core::engine::Input;
use order_timeout_core::kind::Kind;
use tokio::sync::mpsc;
use tracing::debug;

use crate::observe::recorder::KindRecorder;
use crate::postgres::closing_pauses::{self, Pause};
use crate::postgres::one_line;
use crate::postgres::warm_connections::WarmConnections;

/// What is known of a kind's pauses.
#[derive(Debug)]
pub(crate) struct ClosingWatch {
    kind: Kind,
    connections: WarmConnections,
    inputs: mpsc::UnboundedSender<Input>,
    recorder: KindRecorder,
    known: Vec<Pause>,
}

impl ClosingWatch {
    /// Of a worker that has read nothing yet.
    pub fn new(
        kind: Kind,
        connections: WarmConnections,
        inputs: mpsc::UnboundedSender<Input>,
        recorder: KindRecorder,
    ) -> Self {
        Self { kind, connections, inputs, recorder, known: Vec::new() }
    }

    /// Reads the pauses. To be called before the engine is given its first order, and then each second.
    ///
    /// # Errors
    /// sqlx's; what was known is still assumed.
    pub async fn look(&mut self) -> Result<(), sqlx::Error> {
        let kind = &self.kind;
        let found = self.connections.run_on_oldest(async |on| closing_pauses::current(on, Some(kind)).await).await?;
        if self.known != found {
            // Without the event loop the input is not needed.
            let _ = self.inputs.send(if found.is_empty() { Input::ClosingResumed } else { Input::ClosingPaused });
            self.recorder.closing_paused(&found);
            self.known = found;
        }
        Ok(())
    }

    /// The same; an error changes nothing, because an unavailable database is reported elsewhere.
    pub async fn look_again(&mut self) {
        if let Err(error) = self.look().await {
            debug!(error = one_line(&error), "whether closing is paused could not be read; it stays as it was");
        }
    }
}
