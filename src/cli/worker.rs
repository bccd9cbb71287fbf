//! `order-timeout worker`: runs until SIGTERM or Ctrl-C, then drains; a second signal ends it at once.

use tokio_util::sync::CancellationToken;

use crate::cli::CommandOutcome;
use crate::cli::signals::Signals;
use crate::config::Settings;
use crate::observe::logging;
use crate::runtime::Worker;

/// # Errors
/// If the worker cannot start, or a second signal arrives before it has stopped.
pub async fn run(settings: Settings) -> anyhow::Result<CommandOutcome> {
    let _log = logging::install(&settings.log);
    exit_on_panic();
    let mut signals = Signals::listen()?;
    let worker = tokio::select! {
        started = Worker::start(settings) => started?,
        // There is no work in flight yet.
        () = signals.next() => return Ok(CommandOutcome::default()),
    };
    let stop = CancellationToken::new();
    let mut stopped = tokio::spawn(worker.run(stop.clone()));
    signals.next().await;
    stop.cancel();
    tokio::select! {
        in_time = &mut stopped => {
            // Unfinished work is redelivered, so nothing is lost; but the orchestrator should see that it was cut
            // short.
            Ok(CommandOutcome { code: u8::from(!in_time?), ..CommandOutcome::default() })
        }
        () = signals.next() => Err(anyhow::anyhow!(
            "stopped at once by a second signal; the broker redelivers unfinished alarms"
        )),
    }
}

/// Without one of its tasks a worker would hang with its alarms unacknowledged; a dead process is restarted, and the
/// broker redelivers them.
fn exit_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        logging::exit_even_if_unread(1);
        report(panic);
        std::process::exit(1);
    }));
}
