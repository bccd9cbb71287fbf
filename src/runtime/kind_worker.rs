//! What the worker has of its own for each kind: engine and event loop, closers, sweep, consumer session, and the
//! inspections of its statements and of its path through the broker. So a kind's failure, lock or flood delays no other.
//!
//! Starts and connects these tasks; decides nothing. What all kinds share is [`Shared`].

use std::sync::Arc;
use std::time::Duration;

use order_timeout_amqp::connect::BrokerError;
use order_timeout_amqp::publisher::ConfirmedPublisher;
use order_timeout_core::alarm::Delivered;
use order_timeout_core::clock::DatabaseClock;
use order_timeout_core::engine::{ClosingPolicy, Input, Policy};
use order_timeout_core::kind::Kind;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Span, debug, info_span, warn};

use super::ack_batcher::AckBatcher;
use super::active_kinds::{ActiveKinds, ToKind};
use super::broker_inspections::{BrokerInput, BrokerInspections};
use super::event_loop::{EventLoop, Outputs};
use super::inspections::inspect_plans;
use super::reminders::keep_announcing;
use super::supervisor::{self, Consumption, Listeners, Phase, Supervisor};
use super::{GiveUp, StartError};
use crate::config::Settings;
use crate::config::kinds::CONNECTIONS_OF_CLOSING;
use crate::deliver::{OpenError, Opening, Session, SessionEnd};
use crate::effects::brake::Brake;
use crate::effects::close::Closer;
use crate::effects::closing::{ClosingEffects, ConfiguredProviders};
use crate::effects::closing_watch::ClosingWatch;
use crate::effects::due_count::DueCounter;
use crate::effects::handled::HandledOrders;
use crate::effects::orders::Orders;
use crate::effects::rearm::Rearmer;
use crate::effects::slots::SlotDeclarer;
use crate::effects::sweep::Sweeper;
use crate::effects::{Effects, clock};
use crate::give_way::{BusyKinds, GiveWay};
use crate::handler::{ErasedHandler, Handlers};
use crate::observe::inspect::contract_watch::ContractWatch;
use crate::observe::recorder::KindRecorder;
use crate::operations::{first_backlog, orders_statements};
use crate::outbox::reminders::Reminders;
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{Database, DatabaseError, one_line};

/// Overdue orders per query: more than a batch, and little memory.
const SWEEP_PAGE: usize = 1_000;

/// One kind, ready to run.
pub(super) struct KindWorker {
    kind: Kind,
    policy: Policy,
    /// Closes, or claims orders of which a payment provider must be asked.
    orders: Orders,
    closing: Option<(ClosingPolicy, ClosingEffects)>,
    clock: DatabaseClock,
    /// `None` if `delay.strategy` is `database`.
    consumption: Option<Opened>,
    inputs: Channel<Input>,
    closing_watch: ClosingWatch,
    /// News for the inspections of the broker.
    broker_inputs: Channel<BrokerInput>,
    recorder: KindRecorder,
}

/// Both ends of a channel, until its tasks are started.
#[derive(Debug)]
struct Channel<T> {
    sender: mpsc::UnboundedSender<T>,
    receiver: mpsc::UnboundedReceiver<T>,
}

impl<T> Channel<T> {
    fn new() -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        Self { sender, receiver }
    }
}

/// What a kind has of a broker: its first session, unless the broker is away, and where all sessions deliver.
#[derive(Debug)]
struct Opened {
    first_session: Option<Session>,
    alarms: Channel<Delivered>,
}

/// What all kinds of a worker share.
pub(super) struct Shared {
    pub settings: Settings,
    pub handlers: Handlers,
    pub database: Database,
    /// `None` without a broker.
    pub publishing: Option<Publishing>,
    pub busy_kinds: BusyKinds,
    /// Whether there are several kinds, so that log lines name theirs.
    pub names_kinds: bool,
    pub active_kinds: ActiveKinds,
    /// Ends what is needed until the last order is announced.
    pub outboxes_end: CancellationToken,
    pub stop: CancellationToken,
    pub give_up: GiveUp,
}

impl Shared {
    /// For log lines about this kind.
    pub fn span_of(&self, kind: &Kind) -> Span {
        if self.names_kinds { info_span!("worker", %kind) } else { Span::none() }
    }
}

/// The connection that publishes, and the wheel's slots that are known to exist on it.
#[derive(Debug, Clone)]
pub(super) struct Publishing {
    pub confirmed: ConfirmedPublisher,
    pub slots: SlotDeclarer,
}

/// The tasks of one kind.
pub(super) struct RunningKind {
    /// Ends when all work in flight is finished or given up.
    pub event_loop: JoinHandle<()>,
    /// Ends when all settlements are sent.
    pub supervising: Option<JoinHandle<()>>,
    /// Ends with `outboxes_end`. `None` if the kind has no statements.
    pub inspecting: Option<JoinHandle<()>>,
    /// Ends with the stop. `None` if the kind has no reminders.
    pub reminding: Option<JoinHandle<()>>,
    /// Ends with the stop, except for a pending call to database or broker.
    pub broker_inspecting: Option<JoinHandle<()>>,
}

impl KindWorker {
    /// Prepares the kind's statements, and opens the connections of its closers.
    ///
    /// # Errors
    /// [`StartError`] if a statement is unusable, or the first backlog is too large.
    pub async fn prepare(
        settings: &Settings,
        kind: &Kind,
        database: &Database,
        handlers: &Handlers,
        recorder: KindRecorder,
    ) -> Result<Self, StartError> {
        let (orders, most_at_once) = match handlers.get(kind) {
            Some(handler) => (handled(settings, handler).await?, usize::MAX),
            None => by_statements(settings, kind, database).await?,
        };
        let closing = closing_with_provider(settings, kind).await?;
        if let Some((_, effects)) = &closing {
            recorder.provider_loads(&effects.provider_loads());
        }
        let policy = policy(settings, kind, most_at_once);
        if let Err(error) = orders.warm_up().await {
            debug!(error, "connections for closers could not be made ready; they are tried again");
        }
        let clock = read_clock(orders.connections())
            .await
            .map_err(|error| DatabaseError(format!("the database's clock cannot be read: {}", one_line(&error))))?;
        let (inputs, broker_inputs) = (Channel::new(), Channel::new());
        let kind = kind.clone();
        let mut closing_watch = {
            let (connections, inputs) = (orders.connections().clone(), inputs.sender.clone());
            // What falls due is counted by the overdue statement, so orders of a handler have no brake.
            let brake = settings.brake.bounds().zip(orders.statements()).map(|(bounds, (_, sweeper))| {
                let counter = DueCounter::new(kind.clone(), database.clone(), sweeper.statement());
                Brake::new(kind.clone(), connections.clone(), counter, bounds)
            });
            ClosingWatch::new(kind.clone(), connections, inputs, brake, recorder.clone())
        };
        // It is the engine's first input: a worker that starts during a pause closes nothing.
        closing_watch.begin().await.map_err(|error| {
            DatabaseError(format!(
                "closing_pauses cannot be read: {}; GRANT SELECT, INSERT ON it to the worker's role",
                one_line(&error)
            ))
        })?;
        Ok(Self {
            kind,
            policy,
            orders,
            closing,
            clock,
            consumption: None,
            inputs,
            closing_watch,
            broker_inputs,
            recorder,
        })
    }

    /// Opens the kind's first session, unless the broker is away. `is_only`: whether the worker has no other kind; of
    /// several, one whose own objects are unusable does not keep the others.
    ///
    /// # Errors
    /// [`BrokerError::Refused`] if a retry will not help.
    pub async fn open_session(&mut self, settings: &Settings, is_only: bool) -> Result<(), BrokerError> {
        let alarms = Channel::new();
        let opening = Opening { number: supervisor::FIRST_SESSION, must_be_set_up: true };
        let first_session = match Session::open(settings, &self.kind, opening, alarms.sender.clone()).await {
            Ok(session) => Some(session),
            Err(OpenError::Broker(BrokerError::Away(why))) => {
                warn!(kind = %self.kind, %why, "the broker is away; the worker starts without it and keeps trying");
                None
            }
            // The next try meets the same error and handles it.
            Err(OpenError::Ended(SessionEnd { why, .. })) => {
                warn!(
                    kind = %self.kind, %why,
                    "the consumer session ended as it began; the worker starts without one and keeps trying"
                );
                None
            }
            Err(OpenError::OwnObjects(why)) if !is_only => {
                warn!(kind = %self.kind, %why, "the kind starts without a consumer session and keeps trying");
                self.recorder.health.note_session(Some(&why));
                // As in the supervisor.
                let _ = self.broker_inputs.sender.send(BrokerInput::NotDeclared(why));
                None
            }
            Err(OpenError::OwnObjects(why)) => return Err(BrokerError::Refused(why)),
            Err(OpenError::Broker(refused @ BrokerError::Refused(_))) => return Err(refused),
        };
        self.consumption = Some(Opened { first_session, alarms });
        Ok(())
    }

    /// Leaves it to the supervisor to open the first session, because the others of the worker are open.
    pub fn expect_sessions(&mut self) {
        self.consumption = Some(Opened { first_session: None, alarms: Channel::new() });
    }

    /// The session that is open before the worker runs.
    pub fn first_session(&self) -> Option<&Session> {
        self.consumption.as_ref().and_then(|consumption| consumption.first_session.as_ref())
    }

    /// Starts the kind's tasks.
    pub fn start(self, shared: &Shared) -> RunningKind {
        let span = shared.span_of(&self.kind);
        let channels =
            ToKind { inputs: self.inputs.sender.clone(), broker_inspections: self.broker_inputs.sender.clone() };
        shared.active_kinds.add(self.kind.clone(), channels);
        self.recorder.health.note_started();
        let (settlements, settlement_queue) = mpsc::unbounded_channel();
        let (clock_readings, clock_reading_queue) = mpsc::unbounded_channel();
        let (phase, phase_seen) = watch::channel(Phase::Consume);
        let (closing, closing_seen) = shared.busy_kinds.flag();
        let (close_name, overdue_name) = orders_statements::names(&shared.settings, &self.kind);
        let inspecting = self.orders.statements().map(|statements| {
            let (closer, sweeper) = statements;
            let plans = orders_statements::plans(&shared.settings, &self.kind, closer, sweeper);
            let (database, give_way) = (shared.database.clone(), GiveWay::to(&shared.busy_kinds));
            let inspected =
                inspect_plans(plans, database, give_way, self.recorder.clone(), shared.outboxes_end.clone());
            tokio::spawn(inspected.instrument(span.clone()))
        });
        let reminding = self.start_reminders(shared, &span);
        let closing_reports = self.closing_watch.reports();
        tokio::spawn(
            clock::sample_clock(self.orders.clone(), self.closing_watch, clock_readings).instrument(span.clone()),
        );
        let inputs = self.inputs.sender.clone();
        let consuming = self.consumption.zip(shared.publishing.clone()).map(|(opened, publishing)| {
            let start = BrokerSide {
                kind: self.kind,
                inputs: inputs.clone(),
                inspections: self.broker_inputs.sender.clone(),
                inspection_queue: self.broker_inputs.receiver,
                ack_batcher: AckBatcher::new(settlement_queue, closing_seen, shared.settings.worker.prefetch.into()),
                phase: phase_seen,
                recorder: self.recorder.clone(),
            };
            start.start(opened, publishing, shared, &span)
        });
        let (inbox, rearmer, supervising, broker_inspecting) = match consuming {
            Some(Consuming { inbox, rearmer, supervising, inspecting }) => {
                (inbox, Some(rearmer), Some(supervising), Some(inspecting))
            }
            None => {
                self.recorder.health.note_no_broker();
                // Nothing is delivered: it is closed from the start, as after the supervisor's end.
                let (_, inbox) = mpsc::unbounded_channel();
                (inbox, None, None, None)
            }
        };
        let database = shared.database.clone();
        let (closing_policy, closing_effects) = self.closing.unzip();
        let recorder = self.recorder.clone();
        let effects = Effects::new(self.orders, closing_effects, database, rearmer, inputs, recorder);
        let contract = ContractWatch::new(close_name, overdue_name, std::time::Instant::now());
        let inspections = self.broker_inputs.sender;
        let outputs = Outputs { settlements, phase, inspections, closing_reports, closing };
        let event_loop =
            EventLoop::new(self.policy, closing_policy, contract, self.clock, effects, outputs, self.recorder);
        let (stop, give_up) = (shared.stop.clone(), shared.give_up.clone());
        let work = event_loop.work(inbox, self.inputs.receiver, clock_reading_queue, stop, give_up);
        RunningKind {
            event_loop: tokio::spawn(work.instrument(span)),
            supervising,
            inspecting,
            reminding,
            broker_inspecting,
        }
    }
}

impl KindWorker {
    fn start_reminders(&self, shared: &Shared, span: &Span) -> Option<JoinHandle<()>> {
        let before = shared.settings.reminders_of(&self.kind);
        if before.is_empty() {
            return None;
        }
        // A kind without statements has none: `Worker::start_with` refuses it.
        let (_, sweeper) = self.orders.statements()?;
        let overdue = sweeper.statement();
        let reminders = Reminders::new(shared.database.clone(), overdue, self.kind.as_str(), before);
        let announcing = keep_announcing(reminders, self.recorder.clone(), shared.stop.clone());
        Some(tokio::spawn(announcing.instrument(span.clone())))
    }
}

/// What the tasks of a kind need that exist only with a broker.
struct BrokerSide {
    kind: Kind,
    inputs: mpsc::UnboundedSender<Input>,
    inspections: mpsc::UnboundedSender<BrokerInput>,
    inspection_queue: mpsc::UnboundedReceiver<BrokerInput>,
    ack_batcher: AckBatcher,
    phase: watch::Receiver<Phase>,
    recorder: KindRecorder,
}

/// These tasks, and what the event loop needs of them.
struct Consuming {
    inbox: mpsc::UnboundedReceiver<Delivered>,
    rearmer: Rearmer,
    supervising: JoinHandle<()>,
    inspecting: JoinHandle<()>,
}

impl BrokerSide {
    fn start(self, opened: Opened, publishing: Publishing, shared: &Shared, span: &Span) -> Consuming {
        let settings = &shared.settings;
        let inspections = BrokerInspections::new(
            settings,
            &self.kind,
            publishing.clone(),
            GiveWay::to(&shared.busy_kinds),
            self.recorder.clone(),
        );
        let inspecting = inspections.run(self.inspection_queue, shared.stop.clone());
        let supervisor = Supervisor::new(
            Consumption { settings: settings.clone(), kind: self.kind.clone(), alarms: opened.alarms.sender },
            self.ack_batcher,
            self.phase,
            Listeners { inputs: self.inputs, inspections: self.inspections, active_kinds: shared.active_kinds.clone() },
            publishing.confirmed.missing_route(),
            self.recorder,
        );
        let supervising = supervisor.run(opened.first_session);
        Consuming {
            inbox: opened.alarms.receiver,
            rearmer: Rearmer::new(settings, publishing.confirmed, publishing.slots),
            supervising: tokio::spawn(supervising.instrument(span.clone())),
            inspecting: tokio::spawn(inspecting.instrument(span.clone())),
        }
    }
}

/// The kind's statements on connections of their own, and how many orders one can close at once.
async fn by_statements(settings: &Settings, kind: &Kind, database: &Database) -> Result<(Orders, usize), StartError> {
    let closers = u32::try_from(settings.worker.closers).unwrap_or(u32::MAX);
    // And one for reading the clock while all closers are busy.
    let closing = Database::connect(&settings.database, closers.saturating_add(1)).await?;
    let statements = orders_statements::statements(database, settings, kind).await?;
    orders_statements::require_attempts_are_asked_about(database, kind, &statements.close).await?;
    orders_statements::require_functions(database, kind, &statements.functions).await?;
    let closer = Closer::prepare(WarmConnections::new(closing), statements.close).await?;
    let most_at_once = closer.most_at_once().await;
    let sweeper = Sweeper::prepare(database.clone(), statements.overdue).await?;
    let orders = first_backlog::adoptable(&statements.orders, &statements.defined_by, &sweeper);
    first_backlog::require_adopted(database, &sweeper, &orders, settings, kind).await?;
    Ok((Orders::Statements { closer, sweeper }, most_at_once))
}

/// The program's own code; the one connection is for reading the clock.
async fn handled(settings: &Settings, handler: Arc<dyn ErasedHandler>) -> Result<Orders, StartError> {
    let connections = WarmConnections::new(Database::connect(&settings.database, 1).await?);
    Ok(Orders::Handled { handled: HandledOrders::new(handler, longest_try(settings)), connections })
}

/// How long one try of a close may take.
fn longest_try(settings: &Settings) -> Duration {
    settings.database.acquire_timeout + settings.database.statement_timeout
}

/// The engine's policy according to the settings. `most_at_once` is the largest batch that the connections favour.
fn policy(settings: &Settings, kind: &Kind, most_at_once: usize) -> Policy {
    let mut other_kinds = settings.all_kinds();
    other_kinds.remove(kind);
    let has_no_alarms = !settings.delay.strategy.needs_broker();
    Policy {
        kind: kind.clone(),
        other_kinds,
        hold_max: settings.worker.hold_max,
        max_delay: settings.delay.max_delay,
        batch_size: settings.worker.batch_size.min(most_at_once),
        // It buys a cheaper database at the price of lateness: worth it beside a broker, which needs the processors too.
        linger: if has_no_alarms { Duration::ZERO } else { settings.worker.linger },
        closers: settings.worker.closers,
        retry_first: settings.retry.first,
        retry_longest: settings.retry.longest,
        missing_for: settings.retry.missing_for,
        max_attempts: settings.retry.max_attempts,
        requeue_after: settings.worker.requeue_after,
        longest_try: longest_try(settings),
        sweep_every: settings.sweep.every,
        sweep_grace: settings.sweep.grace,
        sweep_page: SWEEP_PAGE,
        look_ahead: settings.sweep.look_ahead,
        lead: settings.delay.lead,
        has_no_alarms,
        pause_share: fastrand::f64() / 2.0 + 0.5,
    }
}

/// `None` if no provider is asked about orders of this kind.
async fn closing_with_provider(
    settings: &Settings,
    kind: &Kind,
) -> Result<Option<(ClosingPolicy, ClosingEffects)>, StartError> {
    let Some(policy) = settings.closing_policy(kind) else { return Ok(None) };
    let providers = ConfiguredProviders::new(&settings.provider_settings_of(kind))?;
    // Of its own: closers must not wait for these statements, nor they for closers.
    let database = Database::connect(&settings.database, CONNECTIONS_OF_CLOSING).await?;
    let of = orders_statements::claimed_kind(&database, settings, kind).await?;
    Ok(Some((policy, ClosingEffects::new(database, of, Arc::new(providers)))))
}

/// Several readings, of which the most precise counts.
async fn read_clock(connections: &WarmConnections) -> Result<DatabaseClock, sqlx::Error> {
    let mut clock = DatabaseClock::new(connections.sample_clock().await?);
    for _ in 0..4 {
        clock.learn(connections.sample_clock().await?);
    }
    Ok(clock)
}
