//! The signals that ask a command to stop.
//!
//! Decides nothing: the command says what stopping means.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM and Ctrl-C, which have the same effect.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Begins to listen; from then on they no longer end the program.
    ///
    /// # Errors
    /// The system's.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for the next one.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
