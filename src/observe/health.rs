//! Whether the worker is alive and whether it is ready, and if not, why not: one line for each problem.
//!
//! Stores what the loops report and compares it with the time; no I/O. `http/probes.rs` serves it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::observe::degraded::{Cause, Change, Degraded};
use crate::sanitize;

/// How often an idle loop reports that it runs.
pub const BEAT_EVERY: Duration = Duration::from_secs(1);

/// The loops that the worker consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loop {
    /// Passes inputs to the engine and runs its actions.
    EventLoop,
    /// Empties the outboxes.
    Outboxes,
    /// Keeps the consumer session open.
    Supervisor,
}

impl Loop {
    /// Every loop of a worker with a broker.
    pub const ALL: [Self; 3] = [Self::EventLoop, Self::Outboxes, Self::Supervisor];

    const fn name(self) -> &'static str {
        match self {
            Self::EventLoop => "event loop",
            Self::Outboxes => "outbox loop",
            Self::Supervisor => "supervisor loop",
        }
    }
}

/// What the worker as a whole is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifecycle {
    /// Connecting, and declaring exchanges and queues.
    Starting,
    /// Consuming and closing.
    Running,
    /// Nothing could be closed, re-armed or parked for so long that the alarms were requeued.
    Paused,
    /// Finishing the work in flight.
    Stopping,
}

/// The result of a liveness or readiness check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Whether the check found no problem.
    pub is_healthy: bool,
    /// One for each problem, or a single one if there is none; then one for each cause of degradation.
    pub lines: Vec<String>,
}

impl Report {
    fn new(healthy: &str, problems: Vec<String>) -> Self {
        if problems.is_empty() {
            return Self { is_healthy: true, lines: vec![healthy.to_owned()] };
        }
        Self { is_healthy: false, lines: problems.into_iter().map(one_line).collect() }
    }

    /// Adds the causes of degradation, which do not change the result.
    fn with_degraded(mut self, degraded: &Degraded) -> Self {
        self.lines.extend(degraded.lines().into_iter().map(one_line));
        self
    }
}

/// A server's error text may have several lines.
fn one_line(text: String) -> String {
    sanitize::one_line(&text).into_owned()
}

/// The state of the worker's health.
#[derive(Debug)]
pub struct Health {
    began: Instant,
    /// How long one iteration of a loop may take.
    longest_iteration: Duration,
    /// When each loop last began an iteration, in milliseconds since `began`.
    beats: [AtomicU64; Loop::ALL.len()],
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    lifecycle: Lifecycle,
    /// Those that are watched.
    loops: Vec<Loop>,
    /// Why there is no consumer session; `None` while there is one.
    no_session: Option<String>,
    /// Why the database is unusable; `None` while it is usable.
    no_database: Option<String>,
    degraded: Degraded,
}

impl Health {
    /// The health of a worker that is starting.
    #[must_use]
    pub fn new(longest_iteration: Duration) -> Self {
        let state = State {
            lifecycle: Lifecycle::Starting,
            loops: Vec::new(),
            no_session: Some("none was opened yet".into()),
            no_database: None,
            degraded: Degraded::default(),
        };
        Self { began: Instant::now(), longest_iteration, beats: Default::default(), state: Mutex::new(state) }
    }

    /// This loop begins an iteration.
    pub fn beat(&self, of: Loop) {
        self.beat_at(of, Instant::now());
    }

    fn beat_at(&self, of: Loop, now: Instant) {
        let since = u64::try_from(now.saturating_duration_since(self.began).as_millis()).unwrap_or(u64::MAX);
        self.beats[of as usize].store(since, Ordering::Relaxed);
    }

    /// These loops are started: from now on each must make progress.
    pub fn mark_running(&self, loops: &[Loop]) {
        loops.iter().for_each(|of| self.beat(*of));
        let mut state = self.state();
        state.loops = loops.to_vec();
        state.lifecycle = Lifecycle::Running;
    }

    /// Records what the worker as a whole is doing.
    pub fn note_lifecycle(&self, lifecycle: Lifecycle) {
        self.state().lifecycle = lifecycle;
    }

    /// A consumer session is open, or why none is.
    pub fn note_session(&self, no_session: Option<&str>) {
        note(&mut self.state().no_session, no_session);
    }

    /// The database is usable, or why it is not.
    pub fn note_database(&self, no_database: Option<&str>) {
        note(&mut self.state().no_database, no_database);
    }

    /// A check has found why a cause holds, or that it does not.
    pub fn note_degraded(&self, cause: Cause, why: Option<&str>) -> Change {
        self.state().degraded.note(cause, why, Instant::now())
    }

    /// Whether every loop makes progress. Starting and stopping have time limits of their own.
    #[must_use]
    pub fn is_alive(&self) -> Report {
        self.is_alive_at(Instant::now())
    }

    fn is_alive_at(&self, now: Instant) -> Report {
        let state = self.state();
        let is_watched = matches!(state.lifecycle, Lifecycle::Running | Lifecycle::Paused);
        let stalled = state.loops.iter().copied().filter(|_| is_watched).filter_map(|of| {
            let beat = self.began + Duration::from_millis(self.beats[of as usize].load(Ordering::Relaxed));
            let stalled_for = now.saturating_duration_since(beat);
            (stalled_for > self.longest_iteration)
                .then(|| format!("the {} has made no progress for {} s", of.name(), stalled_for.as_secs()))
        });
        Report::new("alive", stalled.collect())
    }

    /// Whether alarms are consumed and orders can be closed.
    #[must_use]
    pub fn is_ready(&self) -> Report {
        let state = self.state();
        let mut problems = Vec::new();
        match state.lifecycle {
            Lifecycle::Starting => problems.push("worker: starting".to_owned()),
            Lifecycle::Stopping => problems.push("worker: stopping".to_owned()),
            Lifecycle::Paused => problems.push(
                "worker: consuming is paused, because nothing could be closed, re-armed or parked for worker.requeue_after"
                    .into(),
            ),
            // In every other state no session is expected.
            Lifecycle::Running => {
                let no_session = state.no_session.iter();
                problems.extend(no_session.map(|why| format!("broker: no consumer session is open: {why}")));
            }
        }
        if state.lifecycle != Lifecycle::Stopping {
            problems.extend(state.no_database.iter().map(|why| format!("database: {why}")));
        }
        Report::new("ready", problems).with_degraded(&state.degraded)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }
}

/// The event loop reports in every iteration; only a change is written.
fn note(known: &mut Option<String>, reported: Option<&str>) {
    if known.as_deref() != reported {
        *known = reported.map(str::to_owned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST_ITERATION: Duration = Duration::from_secs(60);

    fn running() -> Health {
        let health = Health::new(LONGEST_ITERATION);
        health.mark_running(&Loop::ALL);
        health.note_session(None);
        health
    }

    #[test]
    fn names_stalled_loops() {
        let health = running();
        let later = Instant::now() + LONGEST_ITERATION + Duration::from_secs(13);
        health.beat_at(Loop::EventLoop, later);
        assert!(health.is_alive().is_healthy);
        let report = health.is_alive_at(later);
        assert!(!report.is_healthy);
        assert_eq!(
            report.lines,
            ["the outbox loop has made no progress for 73 s", "the supervisor loop has made no progress for 73 s"]
        );
    }

    #[test]
    fn starting_or_stopping_worker_is_alive() {
        let health = Health::new(LONGEST_ITERATION);
        let later = Instant::now() + 2 * LONGEST_ITERATION;
        assert!(health.is_alive_at(later).is_healthy);
        health.mark_running(&Loop::ALL);
        assert!(!health.is_alive_at(later).is_healthy);
        health.note_lifecycle(Lifecycle::Stopping);
        assert!(health.is_alive_at(later).is_healthy);
    }

    #[test]
    fn reports_each_problem_in_one_line() {
        let health = running();
        assert_eq!(health.is_ready(), Report { is_healthy: true, lines: vec!["ready".into()] });
        health.note_session(Some("the broker\nis away"));
        health.note_database(Some("connection refused"));
        assert_eq!(
            health.is_ready().lines,
            ["broker: no consumer session is open: the broker is away", "database: connection refused"]
        );
        health.note_session(None);
        assert_eq!(health.is_ready().lines, ["database: connection refused"]);
        health.note_lifecycle(Lifecycle::Stopping);
        assert_eq!(health.is_ready().lines, ["worker: stopping"]);
    }

    #[test]
    fn degraded_worker_stays_ready() {
        let health = running();
        health.note_degraded(Cause::Schema, Some("the index\nis missing"));
        assert_eq!(
            health.is_ready(),
            Report { is_healthy: true, lines: vec!["ready".into(), "degraded: schema: the index is missing".into()] }
        );
        health.note_database(Some("connection refused"));
        assert!(!health.is_ready().is_healthy);
    }

    #[test]
    fn starting_or_paused_worker_is_not_ready() {
        assert_eq!(Health::new(LONGEST_ITERATION).is_ready().lines, ["worker: starting"]);
        let health = running();
        health.note_lifecycle(Lifecycle::Paused);
        health.note_session(Some("consuming is paused"));
        let report = health.is_ready();
        assert!(
            !report.is_healthy && report.lines.len() == 1 && report.lines[0].contains("requeue_after"),
            "{report:?}"
        );
    }
}
