//! The engine with its closing effects on a real database, one action at a time, so that a test can end it between any
//! two steps; and a payment provider with a scripted truth.
//!
//! Runs what a worker runs, and decides nothing.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use order_timeout::effects::close::Closer;
use order_timeout::effects::closing::{AnswerFuture, ClosingEffects, Providers};
use order_timeout::operations::orders_statements;
use order_timeout::postgres::warm_connections::WarmConnections;
use order_timeout::postgres::{self, Database};
use order_timeout_core::alarm::{Delivered, DeliveredAlarm, Receipt, Returns, Settlement, SourceQueue};
use order_timeout_core::engine::{Action, CallKind, ClosingAction, ClosingInput, ClosingPolicy, Engine, Input, Policy};
use order_timeout_core::kind::Kind;
use order_timeout_core::message::Alarm;
use order_timeout_core::order::{OrderId, SweptPage, Timestamp};
use order_timeout_core::payment::{Answer, Attempt};
use order_timeout_testkit::{Order, TIMEOUT, TestEnv};

/// Short, so that what a crash leaves is taken over soon; long enough for a machine that stalls.
pub const LEASE: Duration = Duration::from_secs(2);

pub fn closing_policy() -> ClosingPolicy {
    ClosingPolicy {
        queues: ["", "stripe"].map(|queue| (queue.to_owned(), 100)).into(),
        lease: LEASE,
        resume_every: Duration::from_millis(50),
        in_progress_wait: Duration::from_millis(200),
        retry_first: Duration::from_millis(50),
        retry_longest: Duration::from_millis(200),
        max_rounds: 3,
        batch_size: 100,
    }
}

fn policy() -> Policy {
    Policy {
        kind: Kind::ORDER,
        other_kinds: BTreeSet::new(),
        hold_max: Duration::from_secs(15),
        max_delay: Duration::from_secs(86_400),
        batch_size: 100,
        linger: Duration::from_millis(2),
        closers: 2,
        retry_first: Duration::from_millis(50),
        retry_longest: Duration::from_secs(1),
        missing_for: Duration::from_secs(30),
        max_attempts: 2,
        requeue_after: Duration::from_secs(10),
        longest_try: Duration::from_secs(4),
        sweep_every: Duration::from_secs(100_000),
        sweep_grace: Duration::from_millis(500),
        sweep_page: 100,
        look_ahead: Duration::from_millis(500),
        lead: Duration::from_secs(20),
        has_no_alarms: false,
        pause_share: 1.0,
    }
}

/// A step of the protocol that has taken effect, before the engine is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Claimed,
    TakenOver,
    Asked,
    Cancelled,
    Closed,
    SettledAsPaid,
    Postponed,
}

fn step_of(action: &Action) -> Option<Step> {
    Some(match action {
        Action::Close(_) => Step::Claimed,
        Action::Closing(ClosingAction::Resume(_)) => Step::TakenOver,
        Action::Closing(ClosingAction::Call(call)) if call.kind == CallKind::Ask => Step::Asked,
        Action::Closing(ClosingAction::Call(_)) => Step::Cancelled,
        Action::Closing(ClosingAction::CloseClaimed(_)) => Step::Closed,
        Action::Closing(ClosingAction::SettlePaid(_)) => Step::SettledAsPaid,
        Action::Closing(ClosingAction::Postpone(_)) => Step::Postponed,
        _ => return None,
    })
}

/// A provider at which each call for a reference has the next of its scripted answers; the last one is repeated.
#[derive(Default)]
pub struct Provider {
    scripts: Mutex<HashMap<(String, CallKind), VecDeque<Answer>>>,
    calls: Mutex<Vec<(String, CallKind)>>,
}

impl Provider {
    /// The answers to this call about the attempt with this reference.
    pub fn script(&self, reference: &str, kind: CallKind, answers: impl IntoIterator<Item = Answer>) {
        self.scripts.lock().unwrap().insert((reference.to_owned(), kind), answers.into_iter().collect());
    }

    /// An attempt that can still be paid, until it is cancelled.
    pub fn open(&self, reference: &str) {
        self.script(reference, CallKind::Ask, [Answer::Open]);
        self.script(reference, CallKind::Cancel, [Answer::Closed]);
    }

    /// An attempt about which both calls have the same answer.
    pub fn always(&self, reference: &str, answer: &Answer) {
        self.script(reference, CallKind::Ask, [answer.clone()]);
        self.script(reference, CallKind::Cancel, [answer.clone()]);
    }

    /// How many calls of this kind were made about all attempts.
    pub fn calls(&self, kind: CallKind) -> usize {
        self.calls.lock().unwrap().iter().filter(|(_, made)| *made == kind).count()
    }

    /// How many calls of this kind were made about this attempt.
    pub fn calls_about(&self, reference: &str, kind: CallKind) -> usize {
        self.calls.lock().unwrap().iter().filter(|(one, made)| one == reference && *made == kind).count()
    }

    fn answer(&self, attempt: &Attempt, kind: CallKind) -> Answer {
        self.calls.lock().unwrap().push((attempt.reference.clone(), kind));
        let mut scripts = self.scripts.lock().unwrap();
        let script = scripts.get_mut(&(attempt.reference.clone(), kind));
        let script = script.unwrap_or_else(|| panic!("no answer to {kind:?} {attempt:?}"));
        let answer = if script.len() > 1 { script.pop_front() } else { script.front().cloned() };
        let answer = answer.expect("a script has at least one answer");
        // What is cancelled stays so, and what is paid stays paid.
        if matches!(answer, Answer::Closed | Answer::Paid { .. }) {
            for kind in [CallKind::Ask, CallKind::Cancel] {
                scripts.insert((attempt.reference.clone(), kind), VecDeque::from([answer.clone()]));
            }
        }
        answer
    }
}

impl Providers for Provider {
    fn ask<'a>(&'a self, attempt: &'a Attempt) -> AnswerFuture<'a> {
        Box::pin(async move { self.answer(attempt, CallKind::Ask) })
    }

    fn cancel<'a>(&'a self, attempt: &'a Attempt) -> AnswerFuture<'a> {
        Box::pin(async move { self.answer(attempt, CallKind::Cancel) })
    }
}

/// What a worker runs for the closing protocol. Dropping it is kill -9.
pub struct Driver {
    engine: Engine,
    closer: Closer,
    effects: ClosingEffects,
    database: Database,
    acknowledged: usize,
    next_tag: u64,
}

impl Driver {
    pub async fn start(env: &TestEnv, providers: Arc<Provider>) -> Self {
        Self::start_with(env, providers, closing_policy()).await
    }

    pub async fn start_with(env: &TestEnv, providers: Arc<Provider>, closing: ClosingPolicy) -> Self {
        let database = Database::connect(&env.settings.database, 2).await.unwrap();
        let closers = Database::connect(&env.settings.database, 2).await.unwrap();
        let statements = orders_statements::statements(&database, &env.settings, &Kind::ORDER).await.unwrap();
        let closer = Closer::prepare(WarmConnections::new(closers), statements.close).await.unwrap();
        let of = orders_statements::claimed_kind(&database, &env.settings, &Kind::ORDER).await.unwrap();
        let effects = ClosingEffects::new(database.clone(), of, providers);
        let engine = Engine::with_provider(policy(), closing);
        Self { engine, closer, effects, database, acknowledged: 0, next_tag: 0 }
    }

    pub async fn now(&self) -> Timestamp {
        self.database.run(postgres::now).await.unwrap()
    }

    /// Delivers the orders' alarms.
    pub async fn deliver(&mut self, orders: &[Order]) {
        let alarms: Vec<_> = orders.iter().map(|order| (order.order_id(), order.deadline)).collect();
        self.deliver_alarms(&alarms).await;
    }

    /// Delivers alarms of these orders.
    pub async fn deliver_alarms(&mut self, alarms: &[(OrderId, Timestamp)]) {
        let now = self.now().await;
        for (order_id, deadline) in alarms.iter().cloned() {
            self.next_tag += 1;
            let alarm = Alarm { kind: Kind::ORDER, order_id, deadline };
            let content = Ok(DeliveredAlarm {
                alarm,
                attempt: 0,
                first_published_at: None,
                traceparent: None,
                returns: Returns::default(),
            });
            let receipt = Receipt { session: 1, channel: 0, tag: self.next_tag };
            let source = SourceQueue::Timeout;
            self.engine.handle(Input::Delivered(Delivered { receipt, source, content, death: None }), now);
        }
    }

    /// How many alarms were acknowledged.
    pub fn acknowledged(&self) -> usize {
        self.acknowledged
    }

    /// Runs one action, and returns what the engine is to be told.
    async fn execute(&mut self, action: Action) -> Option<Input> {
        match action {
            Action::Close(batch) => {
                let ids: Vec<OrderId> = batch.items.iter().map(|item| item.alarm.order_id().clone()).collect();
                let result = self.closer.close(&ids, batch.by, batch.waits_for_locks()).await;
                Some(Input::Closed(batch, result))
            }
            Action::Closing(action) => Some(Input::Closing(self.effects.run(action).await)),
            Action::Sweep(_) => Some(Input::Swept(SweptPage { orders: vec![], next: None })),
            Action::Settle(settlements) => {
                self.acknowledged += settlements.iter().filter(|(_, how)| *how == Settlement::Ack).count();
                None
            }
            other => panic!("unexpected {other:?}"),
        }
    }

    /// Runs everything that there is to do now. With `end_after`, stops when this step has taken effect, before the
    /// engine is told; returns whether it has.
    pub async fn turn(&mut self, end_after: Option<Step>) -> bool {
        let actions = self.engine.poll_actions(self.now().await);
        for action in actions {
            let step = step_of(&action);
            let is_empty = matches!(&action, Action::Close(batch) if batch.items.is_empty());
            let input = self.execute(action).await;
            let has_effect = !matches!(&input, Some(Input::Closing(resumed)) if took_nothing_over(resumed));
            if end_after.is_some() && step == end_after && has_effect && !is_empty {
                return true;
            }
            if let Some(input) = input {
                let now = self.now().await;
                self.engine.handle(input, now);
            }
        }
        false
    }

    /// Runs until this step has taken effect; then the driver must be dropped.
    pub async fn run_until_step(&mut self, step: Step) {
        let began = Instant::now();
        while !self.turn(Some(step)).await {
            assert!(began.elapsed() < TIMEOUT, "never {step:?}");
            self.rest().await;
        }
    }

    /// Runs until this query counts so many.
    pub async fn run_until(&mut self, env: &TestEnv, count: &'static str, wanted: i64) {
        let began = Instant::now();
        while env.count(count).await != wanted {
            assert!(began.elapsed() < TIMEOUT, "not {wanted} within {TIMEOUT:?}: {count}");
            self.turn(None).await;
            self.rest().await;
        }
    }

    /// Waits until the engine has something to do, 20 ms at most.
    async fn rest(&self) {
        let now = self.now().await;
        let longest = Duration::from_millis(20);
        let rest = self.engine.next_wakeup().map_or(longest, |at| at.since(now).min(longest));
        tokio::time::sleep(rest).await;
    }

    /// Stops as a worker does at SIGTERM: what it has is written down.
    pub async fn stop(mut self) {
        self.engine.drain();
        while self.engine.snapshot(self.now().await).asked_about > 0 {
            self.turn(None).await;
        }
    }
}

fn took_nothing_over(input: &ClosingInput) -> bool {
    matches!(input, ClosingInput::Resumed(claims) if claims.is_empty())
}
