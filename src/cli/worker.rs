//! `order-timeout worker`: runs until SIGTERM or Ctrl-C, then drains; at the second one it ends at once.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::cli::CommandOutcome;
use crate::config::Settings;
use crate::logging;
use crate::worker::Worker;

/// # Errors
/// If the worker cannot start, or is told a second time to stop before it has.
pub async fn run(settings: Settings) -> anyhow::Result<CommandOutcome> {
    let _log = logging::install(&settings.log);
    end_the_process_on_a_panic();
    let mut signals = Signals::listen()?;
    let worker = tokio::select! {
        started = Worker::start(settings) => started?,
        // Nothing is begun yet.
        () = signals.next() => return Ok(CommandOutcome::default()),
    };
    let stop = CancellationToken::new();
    let mut stopped = tokio::spawn(worker.run(stop.clone()));
    signals.next().await;
    stop.cancel();
    tokio::select! {
        in_time = &mut stopped => {
            // What was not finished is delivered again, so nothing is lost; but the orchestrator should know.
            Ok(CommandOutcome { code: u8::from(!in_time?), ..CommandOutcome::default() })
        }
        () = signals.next() => Err(anyhow::anyhow!(
            "told to stop a second time, so it ends at once; what it had not finished is delivered again"
        )),
    }
}

/// SIGTERM and Ctrl-C, which mean the same.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// A worker that has lost one of its tasks would stand still with its alarms unacknowledged; a dead one is restarted,
/// and the broker delivers them again.
fn end_the_process_on_a_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        logging::exit_even_if_unread(1);
        report(panic);
        std::process::exit(1);
    }));
}
