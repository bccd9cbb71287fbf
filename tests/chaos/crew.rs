//! The workers: two processes of the real binary, killed, halted and replaced, and started again when they end by
//! themselves, as any orchestrator does.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use order_timeout::Settings;
use uuid::Uuid;

use crate::support::away::meanwhile;
use crate::support::process::WorkerProcess;
use crate::support::wait_for;

pub const WORKERS: usize = 2;
/// Longer than a worker's own grace.
const DRAINED_WITHIN: Duration = Duration::from_secs(30);
/// How often an orchestrator looks whether somebody has ended.
const LOOK_EVERY: Duration = Duration::from_millis(200);

struct Working {
    process: WorkerProcess,
    log: PathBuf,
}

impl Working {
    fn has_started(&self) -> bool {
        std::fs::read_to_string(&self.log).is_ok_and(|log| log.contains("worker started"))
    }
}

pub struct Crew {
    settings: Settings,
    logs: PathBuf,
    started: AtomicUsize,
    /// Empty where a worker was killed on purpose and is not to be started yet.
    seats: [Mutex<Option<Working>>; WORKERS],
    deserted: Mutex<Vec<String>>,
}

impl Crew {
    /// Nobody yet. These workers will log into this folder.
    pub fn new(settings: Settings, logs: &Path) -> Self {
        let seats = [Mutex::new(None), Mutex::new(None)];
        Self { settings, logs: logs.to_owned(), started: AtomicUsize::new(0), seats, deserted: Mutex::default() }
    }

    /// Starts everybody, waits until they work, and from now on sees to it that they do.
    pub async fn start_all(self: &Arc<Self>) {
        for seat in 0..WORKERS {
            self.start(seat);
        }
        for seat in 0..WORKERS {
            self.started(seat).await;
        }
        tokio::spawn(supervise(Arc::downgrade(self)));
    }

    pub fn start(&self, seat: usize) {
        *self.seats[seat].lock().unwrap() = Some(self.launch(seat));
    }

    fn launch(&self, seat: usize) -> Working {
        let number = self.started.fetch_add(1, Ordering::SeqCst) + 1;
        let log = self.logs.join(format!("worker-{number:03}-in-seat-{seat}.log"));
        Working { process: WorkerProcess::start_with_log(&self.settings, &log), log }
    }

    /// Resolves when whoever sits there says that it works.
    pub async fn started(&self, seat: usize) {
        wait_for("a worker that has started", async || self.has_started(seat)).await;
    }

    /// Whether whoever sits there has said that it works.
    pub fn has_started(&self, seat: usize) -> bool {
        self.seats[seat].lock().unwrap().as_ref().is_some_and(Working::has_started)
    }

    pub fn kill(&self, seat: usize) {
        if let Some(working) = self.seats[seat].lock().unwrap().take() {
            working.process.kill();
        }
    }

    pub fn halt(&self, seat: usize) {
        if let Some(working) = &*self.seats[seat].lock().unwrap() {
            working.process.halt();
        }
    }

    pub fn go_on(&self, seat: usize) {
        if let Some(working) = &*self.seats[seat].lock().unwrap() {
            working.process.go_on();
        }
    }

    /// SIGTERM, and another in its place at once. Returns when the first has ended and the other works.
    pub async fn replace(&self, seat: usize) {
        let successor = self.launch(seat);
        let predecessor = self.seats[seat].lock().unwrap().replace(successor);
        if let Some(Working { process, log }) = predecessor {
            let code = meanwhile(|| process.terminate(DRAINED_WITHIN));
            // 1: a server was away meanwhile, and it had to leave something undone.
            if !matches!(code, 0 | 1) {
                self.deserted.lock().unwrap().push(format!("{}, replaced, ended with exit code {code}", log.display()));
            }
        }
        self.started(seat).await;
    }

    /// SIGTERM for everybody; returns their exit codes.
    pub fn dismiss(&self) -> Vec<i32> {
        let leaving: Vec<Working> = self.seats.iter().filter_map(|seat| seat.lock().unwrap().take()).collect();
        meanwhile(|| leaving.into_iter().map(|working| working.process.terminate(DRAINED_WITHIN)).collect())
    }

    /// kill -9 for everybody who is left.
    pub fn clear(&self) {
        (0..WORKERS).for_each(|seat| self.kill(seat));
    }

    /// Who ended without being asked to, though it had started.
    pub fn deserted(&self) -> Vec<String> {
        self.deserted.lock().unwrap().clone()
    }

    /// Orders whose alarm came when they had been closed already, as the workers' logs have it.
    pub fn alarmed_too_late(&self) -> HashSet<Uuid> {
        let logs = std::fs::read_dir(&self.logs).expect("the folder of logs").map(|entry| entry.unwrap().path());
        let texts = logs.filter_map(|log| std::fs::read_to_string(log).ok());
        texts.flat_map(|text| text.lines().filter_map(alarmed_too_late).collect::<Vec<_>>()).collect()
    }

    /// A worker that finds no database when it starts says so and ends; that is not desertion.
    fn look_after(&self, seat: usize) {
        let mut place = self.seats[seat].lock().unwrap();
        let Some(working) = &mut *place else { return };
        let Some(code) = working.process.ended() else { return };
        if working.has_started() {
            self.deserted.lock().unwrap().push(format!("{} ended with exit code {code}", working.log.display()));
        }
        *place = Some(self.launch(seat));
    }
}

/// The order of whom this line of a log says so.
fn alarmed_too_late(line: &str) -> Option<Uuid> {
    let is_it = line.contains(r#"outcome="already_closed""#) && line.contains(r#"asked_by="alarm""#);
    let (_, behind) = line.split_once("order_id=").filter(|_| is_it)?;
    behind.split(' ').next()?.parse().ok()
}

async fn supervise(crew: std::sync::Weak<Crew>) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let Some(crew) = crew.upgrade() else { return };
        (0..WORKERS).for_each(|seat| crew.look_after(seat));
    }
}
