//! The tasks of a running worker, which are awaited at its end. One that panics ends the worker at once.
//!
//! Only waits; each task knows itself when it ends.

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use tokio::task::{JoinError, JoinHandle};
use tokio_util::sync::CancellationToken;

use super::kind_worker::RunningKind;

pub(super) struct Tasks {
    event_loops: FuturesUnordered<JoinHandle<()>>,
    supervising: FuturesUnordered<JoinHandle<()>>,
    /// Kinds that could not start yet. They end with the stop.
    starting: FuturesUnordered<JoinHandle<Option<RunningKind>>>,
    outboxes_end: CancellationToken,
    /// They end with `outboxes_end`: the outboxes, and the inspections of the database.
    until_outboxes_end: Vec<JoinHandle<()>>,
    broker_inspecting: Vec<JoinHandle<()>>,
}

impl Tasks {
    /// `of_all_kinds`: tasks that end with `outboxes_end`.
    pub fn new(of_all_kinds: Vec<JoinHandle<()>>, outboxes_end: CancellationToken) -> Self {
        Self {
            event_loops: FuturesUnordered::new(),
            supervising: FuturesUnordered::new(),
            starting: FuturesUnordered::new(),
            outboxes_end,
            until_outboxes_end: of_all_kinds,
            broker_inspecting: Vec::new(),
        }
    }

    pub fn add(&mut self, kind: RunningKind) {
        self.event_loops.push(kind.event_loop);
        self.supervising.extend(kind.supervising);
        self.until_outboxes_end.extend(kind.inspecting);
        self.until_outboxes_end.extend(kind.reminding);
        self.broker_inspecting.extend(kind.broker_inspecting);
    }

    pub fn add_starting(&mut self, kind: JoinHandle<Option<RunningKind>>) {
        self.starting.push(kind);
    }

    /// They end with the stop, each when its work in flight is finished or given up.
    ///
    /// # Errors
    /// That of the first task that panics: its kind closes nothing any more.
    pub async fn wait_for_event_loops(&mut self) -> Result<(), JoinError> {
        while !(self.event_loops.is_empty() && self.starting.is_empty()) {
            tokio::select! {
                Some(ended) = self.event_loops.next() => ended?,
                Some(ended) = self.supervising.next() => ended?,
                Some(started) = self.starting.next() => {
                    if let Some(kind) = started? {
                        self.add(kind);
                    }
                }
            }
        }
        Ok(())
    }

    pub async fn finish(self) {
        // All settlements of the event loops are sent before the connections are closed.
        join_all(self.supervising).await;
        self.outboxes_end.cancel();
        join_all(self.until_outboxes_end).await;
        // They leave nothing behind, and may wait for the broker.
        self.broker_inspecting.into_iter().for_each(|inspecting| inspecting.abort());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn panic_ends_waiting_for_others() {
        let mut tasks = Tasks::new(Vec::new(), CancellationToken::new());
        let endless = || tokio::spawn(std::future::pending::<()>());
        let running = |event_loop| RunningKind {
            event_loop,
            supervising: None,
            inspecting: Some(endless()),
            reminding: None,
            broker_inspecting: None,
        };
        tasks.add(running(endless()));
        let late = running(tokio::spawn(async { panic!("a fault of the event loop") }));
        tasks.add_starting(tokio::spawn(async { Some(late) }));
        tasks.add_starting(tokio::spawn(async { None }));
        assert!(tasks.wait_for_event_loops().await.unwrap_err().is_panic());
    }
}
