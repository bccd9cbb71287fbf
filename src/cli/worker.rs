//! `order-timeout worker`: runs until SIGTERM or Ctrl-C, then drains; a second signal ends it at once. With `--dry-run` it
//! logs what it would close, and there is nothing to drain.

use std::time::{Duration, Instant};

use clap::Args;
use order_timeout_core::message::write_rfc3339;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::cli::CommandOutcome;
use crate::cli::signals::Signals;
use crate::config::Settings;
use crate::observe::logging;
use crate::operations::dry_run::{Decision, DryRun, Findings, Verdict};
use crate::runtime::Worker;

/// Arguments of `worker`.
#[derive(Debug, Args)]
#[command(after_help = "\
With --dry-run each due order is a log line `would close` with order_id, deadline, kind and reason, once for each
deadline. The close statement runs in a transaction that is rolled back at once. A pause, or a backlog with which a
worker would not start, is a warning. There is no broker, no page and no registration; other workers are not disturbed.")]
pub struct WorkerArgs {
    /// Close nothing: log each second which orders it would close, and why
    #[arg(long)]
    dry_run: bool,
}

/// A dry run looks as often as this, or less often where a look takes long: a tenth of the time.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const PAUSE_PER_LOOK: u32 = 9;

/// # Errors
/// If the worker cannot start, or a second signal arrives before it has stopped.
pub async fn run(args: &WorkerArgs, settings: Settings) -> anyhow::Result<CommandOutcome> {
    let _log = logging::install(&settings.log);
    exit_on_panic();
    let mut signals = Signals::listen()?;
    for problem in settings.writable_secret_files() {
        warn!(what = problem.what, fix = problem.fix, "a secret can be replaced");
    }
    if args.dry_run {
        return tokio::select! {
            failed = dry_run(settings) => failed,
            // What is cut short is rolled back.
            () = signals.next() => Ok(CommandOutcome::default()),
        };
    }
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

/// Looks until it is cancelled.
async fn dry_run(settings: Settings) -> anyhow::Result<CommandOutcome> {
    let mut dry_run = DryRun::prepare(settings).await?;
    info!("dry run: nothing is closed");
    loop {
        let began = Instant::now();
        match dry_run.look().await {
            Ok(findings) => log(&findings),
            Err(error) => warn!(%error, "this look failed; the next one follows"),
        }
        tokio::time::sleep((began.elapsed() * PAUSE_PER_LOOK).max(LOOK_EVERY)).await;
    }
}

fn log(findings: &Findings) {
    for (kind, held) in &findings.holds {
        match held {
            Some(why) => warn!(%kind, why, "no order of this kind would be closed"),
            None => info!(%kind, "orders of this kind would be closed again"),
        }
    }
    for Decision { kind, order_id, deadline, verdict, held } in &findings.decisions {
        let deadline = write_rfc3339(*deadline);
        match verdict {
            Verdict::WouldClose { reason } => info!(%order_id, deadline, %kind, reason, held, "would close"),
            Verdict::WouldNotClose { why } => warn!(%order_id, deadline, %kind, why, "due, and could not be closed"),
        }
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
