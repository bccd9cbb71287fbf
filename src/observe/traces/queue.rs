//! Holds the spans that were recorded, and exports them while no closer is busy.
//!
//! Making a span and sending it costs about as much as closing an order. Delays spans, by half a second and at most two more;
//! delays no order: a full queue drops spans.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{Exporter, Span};
use crate::give_way::GiveWay;
use crate::observe::logging::LogThrottle;

/// Spans that wait at most, each of about half a kilobyte: those of a burst of 16 000 orders.
const CAPACITY: usize = 65_536;
/// How long spans are collected: few exports, and a trace that is seen soon.
const COLLECTED_FOR: Duration = Duration::from_millis(500);
/// Exported at once: one request to the collector, and fewer than the exporter itself can hold.
const AT_ONCE: usize = 512;
/// How long a stopping worker exports what is left.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(super) struct SpanQueue {
    spans: mpsc::Sender<Span>,
    dropped: Arc<AtomicU64>,
    stop: CancellationToken,
    exporting: Mutex<Option<JoinHandle<()>>>,
}

impl SpanQueue {
    pub fn start(exporter: Exporter, give_way: GiveWay) -> Self {
        let (sender, spans) = mpsc::channel(CAPACITY);
        let (dropped, stop) = (Arc::<AtomicU64>::default(), CancellationToken::new());
        let exports = Exports::new(exporter, give_way, dropped.clone());
        let exporting = tokio::spawn(exports.run(spans, stop.clone()));
        Self { spans: sender, dropped, stop, exporting: Mutex::new(Some(exporting)) }
    }

    pub fn push(&self, span: Span) {
        if self.spans.try_send(span).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Exports what is left, for at most two seconds and one more request.
    pub async fn finish(&self) {
        self.stop.cancel();
        let exporting = self.exporting.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(exporting) = exporting {
            // It has panicked, and there is nothing left to export with.
            let _ended = exporting.await;
        }
    }
}

struct Exports {
    exporter: Arc<Exporter>,
    give_way: GiveWay,
    dropped: Arc<AtomicU64>,
    drops_throttle: LogThrottle,
    /// Taken from the queue, and not exported yet.
    taken: Vec<Span>,
}

impl Exports {
    fn new(exporter: Exporter, give_way: GiveWay, dropped: Arc<AtomicU64>) -> Self {
        let (exporter, drops_throttle, taken) = (Arc::new(exporter), LogThrottle::default(), Vec::new());
        Self { exporter, give_way, dropped, drops_throttle, taken }
    }

    async fn run(mut self, mut spans: mpsc::Receiver<Span>, stop: CancellationToken) {
        stop.run_until_cancelled(self.export_as_they_come(&mut spans)).await;
        let deadline = Instant::now() + FINISH_TIMEOUT;
        while self.has_some(&spans) && Instant::now() < deadline {
            self.export_some(&mut spans).await;
        }
        let exporter = self.exporter;
        // Its client may neither wait nor be dropped on a thread of the runtime.
        let _ended = tokio::task::spawn_blocking(move || exporter.finish()).await;
    }

    /// Until no span can come any more: the worker did not start.
    async fn export_as_they_come(&mut self, spans: &mut mpsc::Receiver<Span>) {
        while spans.recv_many(&mut self.taken, 1).await > 0 {
            let due = Instant::now() + COLLECTED_FOR;
            while self.has_some(spans) {
                self.give_way.due(due).await;
                self.export_some(spans).await;
            }
        }
    }

    fn has_some(&self, spans: &mpsc::Receiver<Span>) -> bool {
        !self.taken.is_empty() || !spans.is_empty()
    }

    async fn export_some(&mut self, spans: &mut mpsc::Receiver<Span>) {
        while self.taken.len() < AT_ONCE
            && let Ok(span) = spans.try_recv()
        {
            self.taken.push(span);
        }
        let (exporter, taken) = (self.exporter.clone(), std::mem::take(&mut self.taken));
        // It has panicked, and these spans are lost.
        let _ended = tokio::task::spawn_blocking(move || exporter.export(&taken)).await;
        if self.dropped.load(Ordering::Relaxed) > 0 && self.drops_throttle.is_due() {
            let dropped = self.dropped.swap(0, Ordering::Relaxed);
            warn!(dropped, "spans were dropped, because the collector takes them more slowly than orders are closed");
        }
    }
}
