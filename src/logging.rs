//! What the worker says while it runs: one subscriber, to standard error, for a person or as JSON.
//!
//! Nobody waits for the log: lines that are not read are dropped in the end, and orders are closed meanwhile.
//!
//! Field names are the same everywhere: `order_id`, `deadline`, `lateness_ms`, `closed_by`, `reason`, `session`. No
//! filter makes it show a secret, and no text from outside writes anything but visible characters into a line.

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

/// Lines that wait while standard error takes none, some megabytes of them; what comes after is dropped.
const MOST_LINES_WAITING: usize = 16_384;
/// How long a process that ends waits for somebody to read why.
const LONGEST_FAREWELL: Duration = Duration::from_secs(1);

/// How often, at most, the same warning is worth saying.
const SAME_WARNING_EVERY: Duration = Duration::from_secs(60);

/// A warning that comes again and again while something lasts, and is said at once and then seldom.
#[derive(Debug, Default)]
pub struct LogThrottle(Option<Instant>);

impl LogThrottle {
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
    let lines = lines(settings.format, std::io::stderr().is_terminal(), writer);
    // Filters of the whole subscriber, not of this layer: with the latter an event is lost on a thread where somebody has
    // just asked whether another would be heard, as sqlx does before it logs a statement.
    tracing_subscriber::registry().with(wanted).with(filter_fn(shows_no_secret)).with(lines).init();
    Log { _writer: guard }
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

/// Fields as tracing-subscriber shows them, but visibly and in one line. Not done to whole lines, for those have colours.
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
            // In italics, the sign dimmed.
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
        // What begins so is about the line, where it comes from another kind of log.
        if self.result.is_ok() && !field.name().starts_with("log.") {
            self.result = self.write(field.name(), &format!("{value:?}"));
        }
    }
}

/// A writer of lines of JSON, each in one piece. JSON itself lets all that is hidden stand as it is, except for the
/// control characters of ASCII.
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
        tracing::warn!(why = HOSTILE, error = %HOSTILE, debugged = ?HOSTILE, "told: {HOSTILE}");
    }

    #[test]
    fn log_lines_hold_no_hidden_character() {
        for (format, in_colour) in [(LogFormat::Human, false), (LogFormat::Json, false), (LogFormat::Human, true)] {
            let text = logged(format, in_colour, log_hostile_text);
            let without_colours = if in_colour { without_ours(&text) } else { text.clone() };
            let line = without_colours.strip_suffix('\n').unwrap();
            assert!(!line.contains(sanitize::is_hidden), "{format:?}: {text:?}");
            assert!(line.contains("\\u202eb"), "{format:?}: {text:?}");
        }
    }

    /// Without the colours and styles that the subscriber sets.
    fn without_ours(text: &str) -> String {
        ["0", "2", "3", "1", "33"]
            .iter()
            .fold(text.to_owned(), |text, style| text.replace(&format!("\x1b[{style}m"), ""))
    }

    #[test]
    fn plain_fields_look_as_before() {
        let text = logged(LogFormat::Human, false, || {
            tracing::info!(orders = 3, why = "no  \"lock\"", error = %"gone", order_id = ?Some(1), "it is told");
        });
        let (_, line) = text.split_once("INFO ").unwrap();
        assert_eq!(line, "it is told orders=3 why=\"no  \\\"lock\\\"\" error=gone order_id=Some(1)\n");
    }

    #[test]
    fn json_lines_keep_their_text() {
        let text = logged(LogFormat::Json, false, || tracing::info!(why = HOSTILE, "told"));
        let line: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(line["fields"]["why"], HOSTILE);
    }
}
