//! Writes log lines from a thread of its own, so that an output that is not read blocks no other thread.
//!
//! Formats nothing, and never waits for the output except once, at the end of the process.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

/// Enough for writing bytes; the default may be sized for the AMQP client's parser (`stack.rs`).
const STACK_BYTES: usize = 2_097_152;

/// Takes lines for the thread that writes them. Never blocks: a line is dropped if too many wait already.
#[derive(Debug)]
pub struct LogWriter {
    lines: SyncSender<Vec<u8>>,
    progress: Arc<Progress>,
}

/// Dropping it waits until the lines so far are written, but no longer than its timeout.
#[must_use]
#[derive(Debug)]
pub struct FlushOnDrop {
    progress: Arc<Progress>,
    timeout: Duration,
}

/// How far the thread has got.
#[derive(Debug, Default)]
struct Progress {
    /// Lines that wait or waited.
    accepted: AtomicU64,
    /// Lines written, or lost to an error of the output.
    written: Mutex<u64>,
    advanced: Condvar,
}

impl LogWriter {
    /// Starts the thread. At most `most_waiting` lines wait for `output`; [`FlushOnDrop`] waits for `flush_timeout`.
    ///
    /// # Errors
    /// If the system starts no further thread.
    pub fn start(
        output: impl Write + Send + 'static,
        most_waiting: usize,
        flush_timeout: Duration,
    ) -> io::Result<(Self, FlushOnDrop)> {
        let (lines, waiting) = sync_channel(most_waiting);
        let progress = Arc::new(Progress::default());
        let writing = progress.clone();
        let write = move || write_lines(&waiting, output, &writing);
        let thread = Builder::new().name("log".to_owned()).stack_size(STACK_BYTES).spawn(write)?;
        // Its drop would detach the thread, which is unsafe while the thread ends (docs/decisions/0065-threads-are-joined.md).
        std::mem::forget(thread);
        let flush = FlushOnDrop { progress: progress.clone(), timeout: flush_timeout };
        Ok((Self { lines, progress }, flush))
    }
}

/// Until the last [`LogWriter`] is dropped.
fn write_lines(waiting: &Receiver<Vec<u8>>, mut output: impl Write, progress: &Progress) {
    for line in waiting {
        // There is no other place to report that the log cannot be written.
        let _ = output.write_all(&line).and_then(|()| output.flush());
        *progress.written() += 1;
        progress.advanced.notify_all();
    }
}

impl Progress {
    fn written(&self) -> MutexGuard<'_, u64> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for FlushOnDrop {
    fn drop(&mut self) {
        let accepted = self.progress.accepted.load(Ordering::Acquire);
        let written = self.progress.written();
        let is_behind = |written: &mut u64| *written < accepted;
        let _written_or_timed_out = self.progress.advanced.wait_timeout_while(written, self.timeout, is_behind);
    }
}

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

/// One call is one line.
impl Write for &LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.lines.try_send(line.to_vec()).is_ok() {
            self.progress.accepted.fetch_add(1, Ordering::Release);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::time::Instant;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Passes on what is written, one line for each permit.
    struct Gate {
        permits: Receiver<()>,
        written: Sender<String>,
    }

    impl Write for Gate {
        fn write(&mut self, line: &[u8]) -> io::Result<usize> {
            // Without a sender every line may pass.
            let _ = self.permits.recv();
            let _ = self.written.send(String::from_utf8_lossy(line).into_owned());
            Ok(line.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn gate() -> (Gate, Sender<()>, Receiver<String>) {
        let (permit, permits) = channel();
        let (written, seen) = channel();
        (Gate { permits, written }, permit, seen)
    }

    fn log(writer: &LogWriter, line: &str) {
        writer.make_writer().write_all(line.as_bytes()).unwrap();
    }

    #[test]
    fn unread_output_drops_lines_beyond_limit() {
        let (output, permit, seen) = gate();
        let (writer, flush) = LogWriter::start(output, 3, 60 * SECOND).unwrap();
        log(&writer, "first");
        permit.send(()).unwrap();
        assert_eq!(seen.recv().unwrap(), "first");
        // The thread takes at most one of them, and three wait.
        (0..10).for_each(|line| log(&writer, &line.to_string()));
        drop(permit);
        drop(flush);
        let lines: Vec<String> = seen.try_iter().collect();
        assert!((3..=4).contains(&lines.len()), "{lines:?}");
        assert!(lines.starts_with(&["0".to_owned(), "1".to_owned(), "2".to_owned()]), "{lines:?}");
    }

    #[test]
    fn flush_writes_every_waiting_line() {
        let (output, permit, seen) = gate();
        let (writer, flush) = LogWriter::start(output, 1_000, 60 * SECOND).unwrap();
        (0..1_000).for_each(|line| log(&writer, &line.to_string()));
        drop(permit);
        drop(flush);
        assert_eq!(seen.try_iter().count(), 1_000);
    }

    #[test]
    fn flush_of_unread_output_gives_up() {
        let (output, _permit, _seen) = gate();
        let (writer, flush) = LogWriter::start(output, 10, SECOND / 10).unwrap();
        log(&writer, "unread");
        let began = Instant::now();
        drop(flush);
        assert!(began.elapsed() >= SECOND / 10);
    }
}
