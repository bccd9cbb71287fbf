//! Holds the spans that were recorded, and exports them while no closer is busy.
//!
//! Making a span and sending it costs processor time that a burst needs for its orders. Delays spans by half a second, and by
//! two more at most while closers are busy; delays no order: a full queue drops spans.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::warn;

use super::{AT_ONCE, Exporter, Span};
use crate::give_way::GiveWay;
use crate::observe::logging::LogThrottle;

/// Spans that wait at most, each of about half a kilobyte: those of a burst of 16 000 orders.
const CAPACITY: usize = 65_536;
/// How long spans are collected: few exports, and a trace that is seen soon.
const COLLECTED_FOR: Duration = Duration::from_millis(500);
/// How long a stopping worker exports what is left.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct SpanQueue {
    spans: mpsc::Sender<Span>,
    dropped: Arc<AtomicU64>,
    stop: CancellationToken,
    /// Its one task exports.
    tasks: TaskTracker,
}

impl SpanQueue {
    pub fn start(exporter: Exporter, give_way: GiveWay) -> Self {
        let (sender, spans) = mpsc::channel(CAPACITY);
        let (dropped, stop) = (Arc::<AtomicU64>::default(), CancellationToken::new());
        let exports = Exports::new(exporter, give_way, dropped.clone());
        let tasks = TaskTracker::new();
        tasks.spawn(exports.run(spans, stop.clone()));
        tasks.close();
        Self { spans: sender, dropped, stop, tasks }
    }

    pub fn push(&self, span: Span) {
        if self.spans.try_send(span).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Exports what is left: ends after four seconds at the latest, if the collector hangs.
    pub async fn finish(&self) {
        self.stop.cancel();
        self.tasks.wait().await;
    }
}

struct Exports {
    exporter: Arc<Exporter>,
    give_way: GiveWay,
    dropped: Arc<AtomicU64>,
    drops_throttle: LogThrottle,
    failures_throttle: LogThrottle,
    /// Taken from the queue, and not exported yet.
    taken: Vec<Span>,
}

impl Exports {
    fn new(exporter: Exporter, give_way: GiveWay, dropped: Arc<AtomicU64>) -> Self {
        let (drops_throttle, failures_throttle) = Default::default();
        let (exporter, taken) = (Arc::new(exporter), Vec::new());
        Self { exporter, give_way, dropped, drops_throttle, failures_throttle, taken }
    }

    /// Until `stop`, or until no recorder is left that could record a span. Waits are cancelled, exports never: their spans
    /// would be lost.
    async fn run(mut self, mut spans: mpsc::Receiver<Span>, stop: CancellationToken) {
        while let Some(Some(due)) = stop.run_until_cancelled(self.collect(&mut spans)).await {
            // What comes meanwhile is collected again, so that a round ends, and the next one gives way again.
            for _ in 0..self.waiting(&spans).div_ceil(AT_ONCE) {
                stop.run_until_cancelled(self.give_way.due(due)).await;
                self.export_some(&mut spans).await;
            }
            self.log_dropped();
        }
        let deadline = Instant::now() + FINISH_TIMEOUT;
        while self.waiting(&spans) > 0 && Instant::now() < deadline {
            self.export_some(&mut spans).await;
        }
        self.dropped.fetch_add(self.waiting(&spans) as u64, Ordering::Relaxed);
        // The last line is not throttled.
        self.drops_throttle = LogThrottle::default();
        self.log_dropped();
        let exporter = self.exporter;
        // Its client may neither wait nor be dropped on a thread of the runtime.
        let _ended = tokio::task::spawn_blocking(move || exporter.finish()).await;
    }

    /// Waits for spans, and until those of the same time have come and the closers are idle. Returns when they were due;
    /// `None` if none can come.
    async fn collect(&mut self, spans: &mut mpsc::Receiver<Span>) -> Option<Instant> {
        if spans.recv_many(&mut self.taken, 1).await == 0 {
            return None;
        }
        let due = Instant::now() + COLLECTED_FOR;
        self.give_way.due(due).await;
        Some(due)
    }

    fn waiting(&self, spans: &mpsc::Receiver<Span>) -> usize {
        self.taken.len() + spans.len()
    }

    async fn export_some(&mut self, spans: &mut mpsc::Receiver<Span>) {
        while self.taken.len() < AT_ONCE
            && let Ok(span) = spans.try_recv()
        {
            self.taken.push(span);
        }
        let (exporter, taken) = (self.exporter.clone(), std::mem::take(&mut self.taken));
        let exported = tokio::task::spawn_blocking(move || exporter.export(&taken)).await;
        let why = match exported {
            Ok(Ok(())) => return,
            Ok(Err(why)) => why,
            Err(ended) => ended.to_string(),
        };
        if self.failures_throttle.is_due() {
            warn!(why, "spans could not be exported, and are dropped; check the collector at traces.endpoint");
        }
    }

    fn log_dropped(&mut self) {
        if self.dropped.load(Ordering::Relaxed) > 0 && self.drops_throttle.is_due() {
            let dropped = self.dropped.swap(0, Ordering::Relaxed);
            warn!(
                dropped,
                "spans were dropped, because more of them were waiting than the collector took while orders were closed"
            );
        }
    }
}
