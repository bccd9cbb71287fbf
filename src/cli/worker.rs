//! `order-timeout worker`: runs until SIGTERM or Ctrl-C, then drains.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::config::Settings;
use crate::telemetry;
use crate::worker::Worker;

/// # Errors
/// If the worker cannot start.
pub async fn run(settings: Settings) -> anyhow::Result<u8> {
    telemetry::install(&settings.log);
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let worker = Worker::start(settings).await?;
    let stop = CancellationToken::new();
    let stopped = tokio::spawn(worker.run(stop.clone()));
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    stop.cancel();
    let in_time = stopped.await?;
    // What was not finished is delivered again, so nothing is lost; but the orchestrator should know.
    Ok(u8::from(!in_time))
}
