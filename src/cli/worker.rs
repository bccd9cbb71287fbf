//! `order-timeout worker`: runs until SIGTERM or Ctrl-C, then drains.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::cli::Answer;
use crate::config::Settings;
use crate::telemetry;
use crate::worker::Worker;

/// # Errors
/// If the worker cannot start.
pub async fn run(settings: Settings) -> anyhow::Result<Answer> {
    telemetry::install(&settings.log);
    end_the_process_on_a_panic();
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
    Ok(Answer { code: u8::from(!in_time), ..Answer::default() })
}

/// A worker that has lost one of its tasks would stand still with its alarms unacknowledged; a dead one is restarted,
/// and the broker delivers them again.
fn end_the_process_on_a_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::exit(1);
    }));
}
