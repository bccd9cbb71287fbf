//! The log: one subscriber that writes to standard error, human-readable or as JSON.
//!
//! Logging never blocks: lines that are not read are eventually dropped, and orders are still closed.
//!
//! Field names are the same everywhere: `order_id`, `deadline`, `lateness_ms`, `closed_by`, `reason`, `session`. No
//! filter makes it show a secret, and external text adds only visible characters to a line.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing::{Level, Metadata, Subscriber};
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FormatFields, MakeWriter};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

use crate::config::{LogFormat, LogSettings};
use crate::sanitize;

/// Lines buffered while standard error is blocked, some megabytes; further lines are dropped.
const MOST_LINES_WAITING: usize = 16_384;
/// How long an exiting process waits for its last lines to be read.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// How often, at most, the same warning is logged.
const SAME_WARNING_EVERY: Duration = Duration::from_secs(60);

/// Throttles a recurring warning: the first is logged at once, then one per minute.
#[derive(Debug, Default)]
pub struct LogThrottle(Option<Instant>);

impl LogThrottle {
    /// Whether to log it now; if so, it counts as logged.
    pub fn is_due(&mut self) -> bool {
        let is_due = self.0.is_none_or(|logged| logged.elapsed() >= SAME_WARNING_EVERY);
        if is_due {
            self.0 = Some(Instant::now());
        }
        is_due
    }
}

/// Dropping it writes the buffered lines, and waits for that for about a second at most.
#[must_use]
#[derive(Debug)]
pub struct Log {
    _flush: WorkerGuard,
}

/// Installs the subscriber for this process. Call once.
///
/// # Panics
/// If the filter does not parse, which `Settings::validate` refuses, or if the system starts no further thread.
pub fn install(settings: &LogSettings) -> Log {
    let wanted = EnvFilter::try_new(&settings.filter).expect("validated settings have a filter that parses");
    // Written by its own thread: a full pipe would otherwise block every thread that logs, and soon the worker.
    let (writer, flush) =
        NonBlockingBuilder::default().buffered_lines_limit(MOST_LINES_WAITING).lossy(true).finish(io::stderr());
    // Colours are for a terminal; in a file they are noise.
    let lines = lines(settings.format, std::io::stderr().is_terminal(), writer);
    // Global filters, not per-layer ones: with those an event is lost on a thread that has just checked whether another
    // event is enabled, as sqlx does before it logs a statement.
    tracing_subscriber::registry().with(wanted).with(filter_fn(shows_no_secret)).with(lines).init();
    Log { _flush: flush }
}

fn lines<S, W>(format: LogFormat, in_colour: bool, writer: W) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    match format {
        LogFormat::Human => {
            let lines = fmt::layer().with_writer(writer).with_ansi(in_colour).with_target(false);
            lines.fmt_fields(VisibleFields).boxed()
        }
        LogFormat::Json => fmt::layer().with_writer(VisibleWriter(writer)).json().boxed(),
    }
}

/// Fields as tracing-subscriber shows them, but escaped and in one line. Whole lines cannot be escaped: they have
/// colours.
struct VisibleFields;

impl<'w> FormatFields<'w> for VisibleFields {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'w>, fields: R) -> std::fmt::Result {
        let mut visitor = VisibleVisitor { writer, is_first: true, result: Ok(()) };
        fields.record(&mut visitor);
        visitor.result
    }
}

struct VisibleVisitor<'w> {
    writer: Writer<'w>,
    is_first: bool,
    result: std::fmt::Result,
}

impl VisibleVisitor<'_> {
    fn write(&mut self, name: &str, value: &str) -> std::fmt::Result {
        let space = if std::mem::take(&mut self.is_first) { "" } else { " " };
        let value = sanitize::one_line(value);
        match name.trim_start_matches("r#") {
            "message" => write!(self.writer, "{space}{value}"),
            // The name in italics, the equals sign dimmed.
            name if self.writer.has_ansi_escapes() => {
                write!(self.writer, "{space}\x1b[3m{name}\x1b[0m\x1b[2m=\x1b[0m{value}")
            }
            name => write!(self.writer, "{space}{name}={value}"),
        }
    }
}

impl Visit for VisibleVisitor<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => self.record_debug(field, &format_args!("{value}")),
            _ => self.record_debug(field, &value),
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Metadata of events that come from the `log` crate.
        if self.result.is_ok() && !field.name().starts_with("log.") {
            self.result = self.write(field.name(), &format!("{value:?}"));
        }
    }
}

/// Writes lines of JSON, each in one call. JSON itself escapes no hidden characters except the ASCII control
/// characters.
struct VisibleWriter<W>(W);

impl<'a, W: MakeWriter<'a>> MakeWriter<'a> for VisibleWriter<W> {
    type Writer = VisibleWriter<W::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        VisibleWriter(self.0.make_writer())
    }
}

impl<W: Write> Write for VisibleWriter<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        self.0.write_all(sanitize::visible(&text).as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Exits the process with this code after a second, even if writing the last error still blocks on an unread pipe.
pub fn exit_even_if_unread(code: u8) {
    let end = move || {
        std::thread::sleep(EXIT_TIMEOUT);
        std::process::exit(code.into());
    };
    // If no thread can be started, the exit waits for the reader.
    let _ = std::thread::Builder::new().spawn(end);
}

/// At TRACE the AMQP client prints addresses and frames, which contain its password; other crates make no promise about
/// that level. So TRACE is enabled for our own code only.
fn shows_no_secret(metadata: &Metadata<'_>) -> bool {
    *metadata.level() != Level::TRACE || metadata.target().starts_with("order_timeout")
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Debug, Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(format: LogFormat, in_colour: bool, log: impl FnOnce()) -> String {
        let written = Written::default();
        let writer = written.clone();
        let subscriber = tracing_subscriber::registry().with(lines(format, in_colour, move || writer.clone()));
        tracing::subscriber::with_default(subscriber, log);
        let bytes = written.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    const HOSTILE: &str = "a\u{1b}[31m\u{202e}b\nc\u{2028}d\u{9b}";

    fn log_hostile_text() {
        let span = tracing::info_span!("session", of = %HOSTILE);
        let _entered = span.enter();
        tracing::warn!(why = HOSTILE, error = %HOSTILE, debugged = ?HOSTILE, "logged: {HOSTILE}");
    }

    #[test]
    fn log_lines_hold_no_hidden_character() {
        for (format, in_colour) in [(LogFormat::Human, false), (LogFormat::Json, false), (LogFormat::Human, true)] {
            let text = logged(format, in_colour, log_hostile_text);
            let without_colours = if in_colour { without_own_styles(&text) } else { text.clone() };
            let line = without_colours.strip_suffix('\n').unwrap();
            assert!(!line.contains(sanitize::is_hidden), "{format:?}: {text:?}");
            assert!(line.contains("\\u202eb"), "{format:?}: {text:?}");
        }
    }

    /// Without the colours and styles that the subscriber sets.
    fn without_own_styles(text: &str) -> String {
        ["0", "2", "3", "1", "33"]
            .iter()
            .fold(text.to_owned(), |text, style| text.replace(&format!("\x1b[{style}m"), ""))
    }

    #[test]
    fn plain_fields_look_as_before() {
        let text = logged(LogFormat::Human, false, || {
            tracing::info!(orders = 3, why = "no  \"lock\"", error = %"gone", order_id = ?Some(1), "it is logged");
        });
        let (_, line) = text.split_once("INFO ").unwrap();
        assert_eq!(line, "it is logged orders=3 why=\"no  \\\"lock\\\"\" error=gone order_id=Some(1)\n");
    }

    #[test]
    fn json_lines_keep_their_text() {
        let text = logged(LogFormat::Json, false, || tracing::info!(why = HOSTILE, "logged"));
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["fields"]["why"], HOSTILE);
    }
}
