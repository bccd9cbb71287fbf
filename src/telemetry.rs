//! What the worker says while it runs: one subscriber, to standard error, for a person or as JSON.
//!
//! Nobody waits for the log: lines that are not read are dropped in the end, and orders are closed meanwhile.
//!
//! Field names are the same everywhere: `order_id`, `deadline`, `lateness_ms`, `closed_by`, `reason`, `session`. No
//! filter makes it show a secret.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use tracing::{Level, Metadata};
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

use crate::config::{LogFormat, LogSettings};

/// Lines that wait while standard error takes none, some megabytes of them; what comes after is dropped.
const MOST_LINES_WAITING: usize = 16_384;
/// How long a process that ends waits for somebody to read why.
const LONGEST_FAREWELL: Duration = Duration::from_secs(1);

/// How often, at most, the same warning is worth saying.
const SAME_WARNING_EVERY: Duration = Duration::from_secs(60);

/// A warning that comes again and again while something lasts, and is said at once and then seldom.
#[derive(Debug, Default)]
pub struct Seldom(Option<Instant>);

impl Seldom {
    /// Whether to say it now; then it counts as said.
    pub fn is_due(&mut self) -> bool {
        let is_due = self.0.is_none_or(|said| said.elapsed() >= SAME_WARNING_EVERY);
        if is_due {
            self.0 = Some(Instant::now());
        }
        is_due
    }
}

/// Keeps the log going; dropped, it writes what waits, for a second at most.
#[must_use]
#[derive(Debug)]
pub struct Log {
    _writer: WorkerGuard,
}

/// Installs the subscriber for this process. Call once.
///
/// # Panics
/// If the filter does not parse, which `Settings::validate` refuses.
pub fn install(settings: &LogSettings) -> Log {
    let wanted = EnvFilter::try_new(&settings.filter).expect("validated settings have a filter that parses");
    // Written by a thread of its own: behind a full pipe every thread that logs would stand still, and soon the worker.
    let (writer, guard) = NonBlockingBuilder::default()
        .lossy(true)
        .buffered_lines_limit(MOST_LINES_WAITING)
        .thread_name("log")
        .finish(std::io::stderr());
    // Colours are for a terminal; in a file they are noise.
    let lines = fmt::layer().with_writer(writer).with_ansi(std::io::stderr().is_terminal());
    let lines = match settings.format {
        LogFormat::Human => lines.with_target(false).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    // Filters of the whole subscriber, not of this layer: with the latter an event is lost on a thread where somebody has
    // just asked whether another would be heard, as sqlx does before it logs a statement.
    tracing_subscriber::registry().with(wanted).with(filter_fn(shows_no_secret)).with(lines).init();
    Log { _writer: guard }
}

/// Ends the process in a second with this code, should it still be saying why it ends to somebody who does not read.
pub fn end_even_if_nobody_reads(code: u8) {
    let end = move || {
        std::thread::sleep(LONGEST_FAREWELL);
        std::process::exit(code.into());
    };
    // Where there is no thread to be had, the end waits for whoever reads.
    let _ = std::thread::Builder::new().spawn(end);
}

/// At TRACE the AMQP client prints addresses and frames, and with them its password; what others print there, or will
/// in their next version, nobody promises. So only our own code is heard at that level.
fn shows_no_secret(metadata: &Metadata<'_>) -> bool {
    *metadata.level() != Level::TRACE || metadata.target().starts_with("order_timeout")
}
