//! Whether the worker is alive and whether it is ready, and if not, why not: one line for each thing that is amiss.
//!
//! Remembers what it is told by the loops and judges by the time; no I/O. How it is shown is `http.rs`.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::degraded::{Cause, Change, Degraded};
use crate::sanitize;

/// How often a loop that has nothing to do shows that it turns.
pub const BEAT_EVERY: Duration = Duration::from_secs(1);

/// The loops that the worker consists of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loop {
    /// Carries news and actions between engine and steps.
    EventLoop,
    /// Empties the outboxes.
    Outboxes,
    /// Keeps the consumer session open.
    Supervisor,
}

impl Loop {
    const ALL: [Self; 3] = [Self::EventLoop, Self::Outboxes, Self::Supervisor];

    const fn name(self) -> &'static str {
        match self {
            Self::EventLoop => "floor",
            Self::Outboxes => "outbox",
            Self::Supervisor => "supervisor",
        }
    }
}

/// What the worker as a whole is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifecycle {
    Starting,
    Working,
    /// Nothing could be closed, armed or parked for so long that the alarms were given back.
    Resting,
    /// Finishing what it has begun.
    Stopping,
}

/// An answer to "are you well?".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    pub is_healthy: bool,
    /// One for each thing that is amiss, or one that says that nothing is; then one for each cause that degrades it.
    pub lines: Vec<String>,
}

impl Report {
    fn new(all_is_well: &str, amiss: Vec<String>) -> Self {
        if amiss.is_empty() {
            return Self { is_healthy: true, lines: vec![all_is_well.to_owned()] };
        }
        Self { is_healthy: false, lines: amiss.into_iter().map(one_line).collect() }
    }

    /// Adds what is wrong although the answer stays the same.
    fn with_degraded(mut self, degraded: &Degraded) -> Self {
        self.lines.extend(degraded.lines().into_iter().map(one_line));
        self
    }
}

/// What a server says may have several lines.
fn one_line(text: String) -> String {
    sanitize::one_line(&text).into_owned()
}

/// What is known of the worker's health.
#[derive(Debug)]
pub struct Health {
    began: Instant,
    /// How long a loop may take for one turn.
    longest_turn: Duration,
    /// When each loop last began a turn, in milliseconds since `began`.
    beats: [AtomicU64; Loop::ALL.len()],
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    stage: Lifecycle,
    /// Why there is no consumer session; `None` while there is one.
    no_session: Option<String>,
    /// Why the database is of no use; `None` while it is.
    no_database: Option<String>,
    degraded: Degraded,
}

impl Health {
    /// Of a worker that is starting.
    #[must_use]
    pub fn new(longest_turn: Duration) -> Self {
        let state = State {
            stage: Lifecycle::Starting,
            no_session: Some("none was opened yet".into()),
            no_database: None,
            degraded: Degraded::default(),
        };
        Self { began: Instant::now(), longest_turn, beats: Default::default(), state: Mutex::new(state) }
    }

    /// This loop begins a turn.
    pub fn beat(&self, of: Loop) {
        self.beat_at(of, Instant::now());
    }

    fn beat_at(&self, of: Loop, now: Instant) {
        let since = u64::try_from(now.saturating_duration_since(self.began).as_millis()).unwrap_or(u64::MAX);
        self.beats[of as usize].store(since, Ordering::Relaxed);
    }

    /// The loops are started: from now on they must turn.
    pub fn mark_running(&self) {
        Loop::ALL.into_iter().for_each(|of| self.beat(of));
        self.note_lifecycle(Lifecycle::Working);
    }

    pub fn note_lifecycle(&self, stage: Lifecycle) {
        self.state().stage = stage;
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

    /// Whether every loop turns. A worker that starts or stops has a time limit of its own for that.
    #[must_use]
    pub fn is_alive(&self) -> Report {
        self.is_alive_at(Instant::now())
    }

    fn is_alive_at(&self, now: Instant) -> Report {
        let must_turn = matches!(self.state().stage, Lifecycle::Working | Lifecycle::Resting);
        let still = Loop::ALL.into_iter().filter(|_| must_turn).filter_map(|of| {
            let beat = self.began + Duration::from_millis(self.beats[of as usize].load(Ordering::Relaxed));
            let still_for = now.saturating_duration_since(beat);
            (still_for > self.longest_turn)
                .then(|| format!("the {} loop has stood still for {} s", of.name(), still_for.as_secs()))
        });
        Report::new("alive", still.collect())
    }

    /// Whether alarms come in and orders can be closed.
    #[must_use]
    pub fn is_ready(&self) -> Report {
        let state = self.state();
        let mut amiss = Vec::new();
        match state.stage {
            Lifecycle::Starting => amiss.push("worker: it is starting".to_owned()),
            Lifecycle::Stopping => amiss.push("worker: it is stopping".to_owned()),
            Lifecycle::Resting => amiss.push(
                "worker: nothing could be closed, armed or parked for worker.requeue_after, so it takes no alarms"
                    .into(),
            ),
            // In every other stage it is as it should be that there is none.
            Lifecycle::Working => {
                amiss.extend(state.no_session.iter().map(|why| format!("broker: no consumer session is open: {why}")));
            }
        }
        if state.stage != Lifecycle::Stopping {
            amiss.extend(state.no_database.iter().map(|why| format!("database: {why}")));
        }
        Report::new("ready", amiss).with_degraded(&state.degraded)
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics holding it")
    }
}

/// The floor tells at every turn; only what is new is written.
fn note(known: &mut Option<String>, news: Option<&str>) {
    if known.as_deref() != news {
        *known = news.map(str::to_owned);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TURN: Duration = Duration::from_secs(60);

    fn working() -> Health {
        let health = Health::new(TURN);
        health.mark_running();
        health.note_session(None);
        health
    }

    #[test]
    fn a_loop_that_stands_still_is_named() {
        let health = working();
        let later = Instant::now() + TURN + Duration::from_secs(13);
        health.beat_at(Loop::EventLoop, later);
        assert!(health.is_alive().is_healthy);
        let report = health.is_alive_at(later);
        assert!(!report.is_healthy);
        assert_eq!(
            report.lines,
            ["the outbox loop has stood still for 73 s", "the supervisor loop has stood still for 73 s"]
        );
    }

    #[test]
    fn a_worker_that_starts_or_stops_need_not_turn() {
        let health = Health::new(TURN);
        let later = Instant::now() + 2 * TURN;
        assert!(health.is_alive_at(later).is_healthy);
        health.mark_running();
        assert!(!health.is_alive_at(later).is_healthy);
        health.note_lifecycle(Lifecycle::Stopping);
        assert!(health.is_alive_at(later).is_healthy);
    }

    #[test]
    fn what_is_amiss_is_said_in_a_line_each() {
        let health = working();
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
        assert_eq!(health.is_ready().lines, ["worker: it is stopping"]);
    }

    #[test]
    fn a_degraded_worker_stays_ready() {
        let health = working();
        health.note_degraded(Cause::Schema, Some("the index\nis missing"));
        assert_eq!(
            health.is_ready(),
            Report { is_healthy: true, lines: vec!["ready".into(), "degraded: schema: the index is missing".into()] }
        );
        health.note_database(Some("connection refused"));
        assert!(!health.is_ready().is_healthy);
    }

    #[test]
    fn a_worker_that_starts_or_rests_is_not_ready() {
        assert_eq!(Health::new(TURN).is_ready().lines, ["worker: it is starting"]);
        let health = working();
        health.note_lifecycle(Lifecycle::Resting);
        health.note_session(Some("it rests"));
        let report = health.is_ready();
        assert!(
            !report.is_healthy && report.lines.len() == 1 && report.lines[0].contains("requeue_after"),
            "{report:?}"
        );
    }
}
