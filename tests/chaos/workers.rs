//! The workers: two processes of the real binary, killed, halted and replaced, and restarted when they end by
//! themselves, like under an orchestrator.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use order_timeout::Settings;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::away::meanwhile;
use order_timeout_testkit::process::WorkerProcess;
use order_timeout_testkit::wait_for;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

pub const WORKERS: usize = 2;
/// Longer than a worker's shutdown grace.
const DRAINED_WITHIN: Duration = Duration::from_secs(30);
/// How often the supervisor checks whether a worker has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

struct LoggedWorker {
    process: WorkerProcess,
    log: PathBuf,
}

impl LoggedWorker {
    fn has_started(&self) -> bool {
        std::fs::read_to_string(&self.log).is_ok_and(|log| log.contains("worker started"))
    }
}

pub struct Workers {
    settings: Settings,
    logs: PathBuf,
    started: AtomicUsize,
    /// Empty while a worker was killed on purpose and must not be restarted yet.
    slots: [Mutex<Option<LoggedWorker>>; WORKERS],
    unexpected_exits: Mutex<Vec<String>>,
}

impl Workers {
    /// No worker yet. The workers will log into this folder.
    pub fn new(settings: Settings, logs: &Path) -> Self {
        let slots = [Mutex::new(None), Mutex::new(None)];
        Self {
            settings,
            logs: logs.to_owned(),
            started: AtomicUsize::new(0),
            slots,
            unexpected_exits: Mutex::default(),
        }
    }

    /// Starts all workers, waits until they work, and from now on restarts those that end.
    pub async fn start_all(self: &Arc<Self>) {
        for slot in 0..WORKERS {
            self.start(slot);
        }
        for slot in 0..WORKERS {
            self.started(slot).await;
        }
        tokio::spawn(supervise(Arc::downgrade(self)));
    }

    pub fn start(&self, slot: usize) {
        *self.slots[slot].lock().unwrap() = Some(self.launch(slot));
    }

    fn launch(&self, slot: usize) -> LoggedWorker {
        let number = self.started.fetch_add(1, Ordering::SeqCst) + 1;
        let log = self.logs.join(format!("worker-{number:03}-in-slot-{slot}.log"));
        LoggedWorker { process: WorkerProcess::start_with_log(&self.settings, &log), log }
    }

    /// Resolves when the worker in this slot has logged its start.
    pub async fn started(&self, slot: usize) {
        wait_for("a worker that has started", async || self.has_started(slot)).await;
    }

    /// Whether the worker in this slot has logged its start.
    pub fn has_started(&self, slot: usize) -> bool {
        self.slots[slot].lock().unwrap().as_ref().is_some_and(LoggedWorker::has_started)
    }

    pub fn kill(&self, slot: usize) {
        if let Some(working) = self.slots[slot].lock().unwrap().take() {
            working.process.kill();
        }
    }

    pub fn halt(&self, slot: usize) {
        if let Some(working) = &*self.slots[slot].lock().unwrap() {
            working.process.halt();
        }
    }

    pub fn go_on(&self, slot: usize) {
        if let Some(working) = &*self.slots[slot].lock().unwrap() {
            working.process.go_on();
        }
    }

    /// SIGTERM for one worker, with its replacement started first. Returns when the old one has ended and the new one
    /// works.
    pub async fn replace(&self, slot: usize) {
        let successor = self.launch(slot);
        let predecessor = self.slots[slot].lock().unwrap().replace(successor);
        if let Some(LoggedWorker { process, log }) = predecessor {
            let code = meanwhile(|| process.terminate(DRAINED_WITHIN));
            // 1: a server was unavailable meanwhile, so the worker left something undone.
            if !matches!(code, 0 | 1) {
                self.unexpected_exits
                    .lock()
                    .unwrap()
                    .push(format!("{}, replaced, ended with exit code {code}", log.display()));
            }
        }
        self.started(slot).await;
    }

    /// SIGTERM for all; returns their exit codes.
    pub fn stop_all(&self) -> Vec<i32> {
        let stopping: Vec<LoggedWorker> = self.slots.iter().filter_map(|slot| slot.lock().unwrap().take()).collect();
        meanwhile(|| stopping.into_iter().map(|working| working.process.terminate(DRAINED_WITHIN)).collect())
    }

    /// kill -9 for all that are left.
    pub fn kill_all(&self) {
        (0..WORKERS).for_each(|slot| self.kill(slot));
    }

    /// Workers that had started and ended without being asked to.
    pub fn unexpected_exits(&self) -> Vec<String> {
        self.unexpected_exits.lock().unwrap().clone()
    }

    /// Orders that got their alarm after they had been closed, or claimed for the closing protocol with a payment provider,
    /// according to the workers' logs; and every order that an alarm claimed. With the time of the first such line.
    pub fn orders_alarmed_after_close(&self) -> HashMap<Uuid, Timestamp> {
        let logs = std::fs::read_dir(&self.logs).expect("the folder of logs").map(|entry| entry.unwrap().path());
        let mut first = HashMap::new();
        for text in logs.filter_map(|log| std::fs::read_to_string(log).ok()) {
            for (order, at) in text.lines().filter_map(order_alarmed_after_close) {
                first.entry(order).and_modify(|known: &mut Timestamp| *known = at.min(*known)).or_insert(at);
            }
        }
        first
    }

    /// A worker that finds no database at its start reports it and ends; that is expected.
    fn restart_if_ended(&self, slot: usize) {
        let mut place = self.slots[slot].lock().unwrap();
        let Some(working) = &mut *place else { return };
        let Some(code) = working.process.ended() else { return };
        if working.has_started() {
            self.unexpected_exits
                .lock()
                .unwrap()
                .push(format!("{} ended with exit code {code}", working.log.display()));
        }
        *place = Some(self.launch(slot));
    }
}

/// The order of which this log line says so, and when.
fn order_alarmed_after_close(line: &str) -> Option<(Uuid, Timestamp)> {
    let outcomes = [r#"outcome="already_closed""#, r#"outcome="closing""#];
    let is_it = outcomes.iter().any(|outcome| line.contains(outcome)) && line.contains(r#"asked_by="alarm""#);
    let (_, behind) = line.split_once("order_id=").filter(|_| is_it)?;
    let at = OffsetDateTime::parse(line.split(' ').next()?, &Rfc3339).ok()?;
    Some((behind.split(' ').next()?.parse().ok()?, at.into()))
}

async fn supervise(workers: std::sync::Weak<Workers>) {
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let Some(workers) = workers.upgrade() else { return };
        (0..WORKERS).for_each(|slot| workers.restart_if_ended(slot));
    }
}
