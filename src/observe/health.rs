//! Whether the worker is alive and whether it is ready, and if not, why not: one line for each problem.
//!
//! Stores what the loops report and compares it with the time; no I/O. `http/probes.rs` serves it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use order_timeout_core::kind::Kind;

use crate::observe::degraded::{Cause, Change, Degraded, Problem};
use crate::sanitize;

/// How often an idle loop reports that it runs.
pub const BEAT_EVERY: Duration = Duration::from_secs(1);

/// What the worker as a whole is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifecycle {
    /// Connecting, and declaring exchanges and queues.
    Starting,
    /// Consuming and closing.
    Running,
    /// Finishing the work in flight.
    Stopping,
}

/// The result of a liveness or readiness check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Whether the check found nothing that it fails for.
    pub is_healthy: bool,
    /// What it fails for; then each pause and what degrades the worker. A kind is named if the worker has several.
    pub problems: Vec<Problem>,
    /// The word for all is well.
    healthy: &'static str,
}

impl Report {
    fn new(healthy: &'static str, problems: Vec<Problem>) -> Self {
        Self { is_healthy: problems.is_empty(), problems, healthy }
    }

    /// Adds what does not change the result: pauses, and causes of degradation.
    fn with(mut self, problems: impl IntoIterator<Item = Problem>) -> Self {
        self.problems.extend(problems);
        self
    }

    /// One for each problem, after the word if all is well.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let healthy = self.is_healthy.then(|| self.healthy.to_owned());
        healthy.into_iter().chain(self.problems.iter().map(one_line)).collect()
    }
}

/// A server's error text may have several lines.
fn one_line(problem: &Problem) -> String {
    sanitize::one_line(&problem.line()).into_owned()
}

/// When a loop last began an iteration.
#[derive(Debug)]
pub struct Beat {
    name: &'static str,
    began: Instant,
    /// In milliseconds since `began`.
    last_ms: AtomicU64,
}

impl Beat {
    fn new(name: &'static str) -> Self {
        Self { name, began: Instant::now(), last_ms: AtomicU64::new(0) }
    }

    /// The loop begins an iteration.
    pub fn note(&self) {
        self.note_at(Instant::now());
    }

    fn note_at(&self, now: Instant) {
        let since = u64::try_from(now.saturating_duration_since(self.began).as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(since, Ordering::Relaxed);
    }

    /// The sentence about a loop without progress for longer than this.
    fn why_stalled(&self, longest: Duration, now: Instant) -> Option<Problem> {
        let beat = self.began + Duration::from_millis(self.last_ms.load(Ordering::Relaxed));
        let stalled_for = now.saturating_duration_since(beat);
        let what = format!("the {} has made no progress for {} s", self.name, stalled_for.as_secs());
        (stalled_for > longest).then(|| Problem::described(Cause::Stalled, what))
    }
}

/// The state of the worker's health.
#[derive(Debug)]
pub struct Health {
    /// How long one iteration of a loop may take.
    longest_iteration: Duration,
    /// Empties the outboxes.
    pub outboxes: Beat,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    lifecycle: Lifecycle,
    /// At least one in a worker that runs.
    kinds: Vec<Arc<KindHealth>>,
    degraded: Degraded,
}

/// The health of one kind: its loops, its session, and what its statements meet in the database.
#[derive(Debug)]
pub struct KindHealth {
    kind: Kind,
    /// Passes inputs to the engine and runs its actions.
    pub event_loop: Beat,
    /// Keeps the consumer session open. Only with a broker.
    pub supervisor: Beat,
    state: Mutex<KindState>,
}

#[derive(Debug)]
struct KindState {
    /// Whether its loops run. A kind that could not start yet has none.
    has_started: bool,
    has_broker: bool,
    /// Nothing could be closed, re-armed or parked for so long that the alarms were requeued.
    is_paused: bool,
    /// Why there is no consumer session; `None` while there is one.
    no_session: Option<String>,
    /// Why the database is unusable; `None` while it is usable.
    no_database: Option<String>,
    /// Why closing is paused, a sentence for each pause; none while it is not.
    closing_paused: Vec<String>,
}

impl KindHealth {
    /// Its loops are started: from now on each must make progress.
    pub fn note_started(&self) {
        self.event_loop.note();
        self.supervisor.note();
        self.state().has_started = true;
    }

    /// There is no broker, so neither a session nor a supervisor is expected.
    pub fn note_no_broker(&self) {
        self.state().has_broker = false;
    }

    /// Whether consuming is paused because alarms cannot be settled.
    pub fn note_paused(&self, is_paused: bool) {
        self.state().is_paused = is_paused;
    }

    /// A consumer session is open, or why none is.
    pub fn note_session(&self, no_session: Option<&str>) {
        self.state().no_session = no_session.map(str::to_owned);
    }

    /// The database is usable, or why it is not.
    pub fn note_database(&self, no_database: Option<&str>) {
        self.state().no_database = no_database.map(str::to_owned);
    }

    /// Closing is paused for these reasons, or is not.
    pub fn note_closing_paused(&self, why: &[String]) {
        self.state().closing_paused = why.to_vec();
    }

    fn paused(&self) -> Vec<Problem> {
        let described = |sentence: &String| Problem::described(Cause::ClosingPaused, sentence);
        self.state().closing_paused.iter().map(described).collect()
    }

    fn no_database(&self) -> Vec<Problem> {
        self.state().no_database.iter().map(|why| Problem::described(Cause::Database, why)).collect()
    }

    fn stalled(&self, longest: Duration, now: Instant) -> Vec<Problem> {
        let (has_started, has_broker) = {
            let state = self.state();
            (state.has_started, state.has_broker)
        };
        let loops = [(&self.event_loop, has_started), (&self.supervisor, has_started && has_broker)];
        let runs = loops.into_iter().filter(|(_, runs)| *runs);
        runs.filter_map(|(beat, _)| beat.why_stalled(longest, now)).collect()
    }

    fn problems(&self, lifecycle: Lifecycle) -> Vec<Problem> {
        let mut problems = Vec::new();
        {
            let state = self.state();
            // In every other state no session is expected.
            let expects_session = state.has_started && state.has_broker && state.closing_paused.is_empty();
            if lifecycle == Lifecycle::Running && state.is_paused {
                let what =
                    "consuming is paused, because nothing could be closed, re-armed or parked for worker.requeue_after";
                problems.push(Problem::described(Cause::Worker, what));
            } else if lifecycle == Lifecycle::Running && expects_session {
                let what = |why: &String| format!("no consumer session is open: {why}");
                problems.extend(state.no_session.iter().map(|why| Problem::described(Cause::Broker, what(why))));
            }
        }
        if lifecycle != Lifecycle::Stopping {
            problems.extend(self.no_database());
        }
        problems
    }

    fn state(&self) -> MutexGuard<'_, KindState> {
        self.state.lock().expect("no holder panics")
    }
}

impl Health {
    /// The health of a worker that is starting.
    #[must_use]
    pub fn new(longest_iteration: Duration) -> Self {
        let state = State { lifecycle: Lifecycle::Starting, kinds: Vec::new(), degraded: Degraded::default() };
        Self { longest_iteration, outboxes: Beat::new("outbox loop"), state: Mutex::new(state) }
    }

    /// Adds the health of one more kind.
    #[must_use]
    pub fn of_kind(&self, kind: &Kind) -> Arc<KindHealth> {
        let state = KindState {
            has_started: false,
            has_broker: true,
            is_paused: false,
            no_session: Some("none was opened yet".into()),
            no_database: None,
            closing_paused: Vec::new(),
        };
        let (event_loop, supervisor) = (Beat::new("event loop"), Beat::new("supervisor loop"));
        let health = Arc::new(KindHealth { kind: kind.clone(), event_loop, supervisor, state: Mutex::new(state) });
        self.state().kinds.push(health.clone());
        health
    }

    /// The worker's loops are started: from now on each must make progress.
    pub fn mark_running(&self) {
        self.outboxes.note();
        self.state().lifecycle = Lifecycle::Running;
    }

    /// The worker finishes the work in flight.
    pub fn mark_stopping(&self) {
        self.state().lifecycle = Lifecycle::Stopping;
    }

    /// A check has found the problems of a cause, or none; `kind` if it is about one kind only. `show` is told whether
    /// the cause holds, for whichever kind; no other report can come between.
    pub fn note_degraded(
        &self,
        cause: Cause,
        kind: Option<&Kind>,
        problems: Vec<Problem>,
        show: impl FnOnce(bool),
    ) -> Change {
        let mut state = self.state();
        let change = state.degraded.note(cause, kind, problems, Instant::now());
        show(state.degraded.holds(cause));
        change
    }

    /// Whether every loop makes progress. Starting and stopping have time limits of their own.
    #[must_use]
    pub fn is_alive(&self) -> Report {
        self.is_alive_at(Instant::now())
    }

    fn is_alive_at(&self, now: Instant) -> Report {
        let state = self.state();
        let longest = self.longest_iteration;
        let mut stalled = Vec::new();
        if state.lifecycle == Lifecycle::Running {
            stalled = state.of_each_kind(|kind| kind.stalled(longest, now));
            stalled.extend(self.outboxes.why_stalled(longest, now));
        }
        Report::new("alive", stalled)
    }

    /// Whether alarms are consumed and orders can be closed, of every kind.
    #[must_use]
    pub fn is_ready(&self) -> Report {
        let state = self.state();
        let mut problems = Vec::new();
        match state.lifecycle {
            Lifecycle::Starting => problems.push(Problem::described(Cause::Worker, "starting")),
            Lifecycle::Stopping => problems.push(Problem::described(Cause::Worker, "stopping")),
            Lifecycle::Running => {}
        }
        problems.extend(state.of_each_kind(|kind| kind.problems(state.lifecycle)));
        // A paused worker is ready: another one would be paused as well, and an upgrade must not wait for it.
        let paused = state.of_each_kind(KindHealth::paused);
        let degraded = state.degraded.problems().map(|problem| state.named(problem));
        Report::new("ready", problems).with(paused).with(degraded)
    }

    /// What is wrong with this kind alone: its problems, then the causes of degradation that are about it.
    #[must_use]
    pub fn problems_of(&self, kind: &Kind) -> Vec<Problem> {
        let state = self.state();
        let of_kind = state.kinds.iter().find(|health| health.kind == *kind);
        let problems = of_kind.map_or_else(Vec::new, |health| health.problems(state.lifecycle));
        let degraded = state.degraded.problems().filter(|problem| problem.kind.as_ref() == Some(kind));
        problems.into_iter().chain(degraded.map(|problem| problem.of_kind(None))).collect()
    }

    /// Whether orders of every kind are closed: closing is not paused, and the database is usable.
    #[must_use]
    pub fn is_closing(&self) -> Report {
        let state = self.state();
        let mut problems = state.of_each_kind(KindHealth::paused);
        problems.extend(state.of_each_kind(KindHealth::no_database));
        if state.lifecycle == Lifecycle::Starting {
            problems.push(Problem::described(Cause::Worker, "starting"));
        }
        Report::new("closing", problems)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no holder panics")
    }
}

impl State {
    /// Without its kind if the worker has no other.
    fn named(&self, problem: Problem) -> Problem {
        match &self.kinds[..] {
            [only] if problem.kind.as_ref() == Some(&only.kind) => problem.of_kind(None),
            _ => problem,
        }
    }

    /// What is wrong with each kind, which is named if there are several.
    fn of_each_kind(&self, problems: impl Fn(&KindHealth) -> Vec<Problem>) -> Vec<Problem> {
        let of_kind = |health: &Arc<KindHealth>| {
            let named = |problem: Problem| self.named(problem.of_kind(Some(&health.kind)));
            problems(health).into_iter().map(named).collect::<Vec<_>>()
        };
        self.kinds.iter().flat_map(of_kind).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST_ITERATION: Duration = Duration::from_secs(60);

    /// A running worker of these kinds.
    fn running(kinds: &[&str]) -> (Health, Vec<Arc<KindHealth>>) {
        let health = Health::new(LONGEST_ITERATION);
        let kinds = kinds.iter().map(|kind| health.of_kind(&Kind::new(kind).unwrap())).collect::<Vec<_>>();
        health.mark_running();
        kinds.iter().for_each(|kind| kind.note_started());
        kinds.iter().for_each(|kind| kind.note_session(None));
        (health, kinds)
    }

    #[test]
    fn names_stalled_loops() {
        let (health, kinds) = running(&["order"]);
        let later = Instant::now() + LONGEST_ITERATION + Duration::from_secs(13);
        kinds[0].event_loop.note_at(later);
        assert!(health.is_alive().is_healthy);
        let report = health.is_alive_at(later);
        assert!(!report.is_healthy);
        assert_eq!(
            report.lines(),
            ["the supervisor loop has made no progress for 73 s", "the outbox loop has made no progress for 73 s"]
        );
        kinds[0].note_no_broker();
        assert_eq!(health.is_alive_at(later).lines(), ["the outbox loop has made no progress for 73 s"]);
    }

    #[test]
    fn lines_name_one_of_several_kinds() {
        let (health, kinds) = running(&["order", "acceptance"]);
        let later = Instant::now() + LONGEST_ITERATION + Duration::from_secs(13);
        health.outboxes.note_at(later);
        kinds[0].event_loop.note_at(later);
        kinds.iter().for_each(|kind| kind.supervisor.note_at(later));
        let line = "kind acceptance: the event loop has made no progress for 73 s";
        assert_eq!(health.is_alive_at(later).lines(), [line]);
        kinds[1].note_database(Some("a table is missing"));
        health.note_degraded(
            Cause::Schema,
            None,
            vec![Problem::described(Cause::Schema, "an index is missing")],
            |_| (),
        );
        health.note_degraded(
            Cause::OrdersContract,
            Some(&kinds[1].kind),
            vec![Problem::described(Cause::OrdersContract, "pages are not sorted")],
            |_| (),
        );
        assert_eq!(
            health.is_ready().lines(),
            [
                "kind acceptance: database: a table is missing",
                "degraded: schema: an index is missing",
                "degraded: orders_contract: kind acceptance: pages are not sorted"
            ]
        );
        let of_kind = ["database: a table is missing", "degraded: orders_contract: pages are not sorted"];
        assert_eq!(health.problems_of(&kinds[1].kind).iter().map(Problem::title).collect::<Vec<_>>(), of_kind);
        assert!(health.problems_of(&kinds[0].kind).is_empty(), "the schema is about all kinds");
    }

    #[test]
    fn kind_without_loops_stalls_nothing() {
        let (health, _) = running(&["order"]);
        let waiting = health.of_kind(&Kind::new("acceptance").unwrap());
        waiting.note_database(Some("a table is missing"));
        assert_eq!(health.is_ready().lines(), ["kind acceptance: database: a table is missing"]);
        let later = Instant::now() + 2 * LONGEST_ITERATION;
        assert!(health.is_alive_at(later).lines().iter().all(|line| !line.contains("acceptance")));
        waiting.note_started();
        assert!(health.is_alive_at(later).lines().iter().any(|line| line.contains("kind acceptance: the event loop")));
    }

    #[test]
    fn starting_or_stopping_worker_is_alive() {
        let health = Health::new(LONGEST_ITERATION);
        let later = Instant::now() + 2 * LONGEST_ITERATION;
        assert!(health.is_alive_at(later).is_healthy);
        let (health, _) = running(&["order"]);
        assert!(!health.is_alive_at(later).is_healthy);
        health.mark_stopping();
        assert!(health.is_alive_at(later).is_healthy);
    }

    #[test]
    fn reports_each_problem_in_one_line() {
        let (health, kinds) = running(&["order"]);
        let kind = &kinds[0];
        assert!(health.is_ready().is_healthy);
        assert_eq!(health.is_ready().lines(), ["ready"]);
        kind.note_session(Some("the broker\nis away"));
        kind.note_database(Some("connection refused"));
        assert_eq!(
            health.is_ready().lines(),
            ["broker: no consumer session is open: the broker is away", "database: connection refused"]
        );
        kind.note_session(None);
        assert_eq!(health.is_ready().lines(), ["database: connection refused"]);
        health.mark_stopping();
        assert_eq!(health.is_ready().lines(), ["worker: stopping"]);
    }

    #[test]
    fn degraded_worker_stays_ready() {
        let (health, kinds) = running(&["order"]);
        health.note_degraded(
            Cause::Schema,
            None,
            vec![Problem::described(Cause::Schema, "the index\nis missing")],
            |_| (),
        );
        assert!(health.is_ready().is_healthy);
        assert_eq!(health.is_ready().lines(), ["ready", "degraded: schema: the index is missing"]);
        kinds[0].note_database(Some("connection refused"));
        assert!(!health.is_ready().is_healthy);
    }

    #[test]
    fn starting_or_paused_worker_is_not_ready() {
        assert_eq!(Health::new(LONGEST_ITERATION).is_ready().lines(), ["worker: starting"]);
        let (health, kinds) = running(&["order"]);
        kinds[0].note_paused(true);
        kinds[0].note_session(Some("consuming is paused"));
        let report = health.is_ready();
        assert!(
            !report.is_healthy && report.lines().len() == 1 && report.lines()[0].contains("requeue_after"),
            "{report:?}"
        );
    }
}
