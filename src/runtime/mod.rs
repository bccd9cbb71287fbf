//! The composition root: starts the tasks, connects them, and drains them at the end.
//!
//! Decides nothing about alarms (that is `order-timeout-core`), and contains no statement and no frame. `event_loop.rs`
//! passes inputs and actions between the engine and the effects; `supervisor.rs` keeps a consumer session open;
//! `ack_batcher.rs` batches settlements; `quarantine.rs` moves messages aside that end every session; `outboxes.rs`
//! empties the outboxes, `local_outboxes.rs` those of a worker without a broker; `inspections.rs` checks what the worker needs of the database, `broker_inspections.rs` why
//! alarms do not arrive; `give_way.rs` lets both wait for idle closers; `warnings.rs` logs what an operator
//! must know about the database and about orders.

mod ack_batcher;
mod broker_inspections;
mod event_loop;
mod give_way;
mod inspections;
mod local_outboxes;
mod outboxes;
mod quarantine;
mod supervisor;
mod warnings;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use order_timeout_amqp::connect::{self, BrokerError};
use order_timeout_amqp::publisher::ConfirmedPublisher;
use order_timeout_amqp::topology::DECLARE_TIMEOUT;
use order_timeout_core::alarm::{Delivered, Receipt, Settlement};
use order_timeout_core::clock::DatabaseClock;
use order_timeout_core::engine::{Input, Policy};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use uuid::Uuid;

use crate::config::Settings;
use crate::deliver::{Inboxes, LONGEST_CLOSE, OpenError, Opening, Session, SessionEnd};
use crate::effects::close::Closer;
use crate::effects::rearm::Rearmer;
use crate::effects::slots::SlotDeclarer;
use crate::effects::sweep::Sweeper;
use crate::effects::{Effects, clock};
use crate::http::{HttpError, HttpServer, LIVEZ, METRICS, READYZ, Site};
use crate::loop_backoff::LONGEST_PAUSE;
use crate::observe::health::Loop;
use crate::observe::inspect::contract_watch::ContractWatch;
use crate::observe::recorder::Recorder;
use crate::operations::{first_backlog, orders_statements};
use crate::outbox::alarm_relay::AlarmRelay;
use crate::outbox::event_relay::EventRelay;
use crate::outbox::local::LocalOutboxes;
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{self, Database, DatabaseError, one_line};
use crate::stack;
use ack_batcher::AckBatcher;
use broker_inspections::{BrokerInput, BrokerInspections};
use event_loop::{EventLoop, Outputs};
use give_way::GiveWay;
use inspections::Inspections;
use local_outboxes::LocalOutboxesLoop;
use outboxes::Outboxes;
use quarantine::Quarantine;
use supervisor::{Listeners, Phase, Supervisor};

/// Connections besides the closers': sweep, parking, both outboxes and their lock, and two for inspections, so that no
/// other task waits for those.
const OTHER_CONNECTIONS: u32 = 6;
/// How long a loop may make no progress, in addition to the time limits of its calls.
const LOOP_MARGIN: Duration = Duration::from_secs(60);
/// Database calls of the outbox loop in one round: two ages, the lock, the refused count, parked alarms, and for each
/// outbox: read, mark as refused, mark as sent, mark unlocked rows, and delete old rows; and the trace contexts.
const CALLS_PER_TURN: u32 = 16;
/// Overdue orders per query: more than a batch, and little memory.
const SWEEP_PAGE: usize = 1_000;

/// Why a worker could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The database cannot be used.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// The broker cannot be used.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The pages cannot be served.
    #[error(transparent)]
    Http(#[from] HttpError),
}

/// A worker that is ready to run.
#[derive(Debug)]
pub struct Worker {
    settings: Settings,
    policy: Policy,
    closer: Closer,
    sweeper: Sweeper,
    database: Database,
    clock: DatabaseClock,
    /// `None` if `delay.strategy` is `database`.
    broker: Option<Broker>,
    recorder: Recorder,
    http: Option<HttpServer>,
}

impl Worker {
    /// Connects to the database and the broker and verifies both. A broker that cannot be reached is retried later; one that
    /// refuses the connection, or an unusable database, is an error now.
    ///
    /// # Errors
    /// [`StartError`], one sentence that says how to fix it.
    pub async fn start(settings: Settings) -> Result<Self, StartError> {
        if !stack::is_reserved() {
            warn!(
                "a message with deeply nested tables could end this process, because RUST_MIN_STACK is unset or too small; set it to 268435456, or call order_timeout::stack::reserve_for_parsing() first in main"
            );
        }
        if let Some(why) = settings.delay.strategy.deprecation() {
            warn!("{why}");
        }
        let recorder = Recorder::new(longest_turn(&settings));
        // First, so that it answers what the worker waits for while it starts.
        let http = open_http(&settings, &recorder).await?;
        let closers = u32::try_from(settings.worker.closers).unwrap_or(u32::MAX);
        // And one for reading the clock while all closers are busy.
        let closing = Database::connect(&settings.database, closers.saturating_add(1)).await?;
        let database = Database::connect(&settings.database, OTHER_CONNECTIONS).await?;
        postgres::require_migrated(&database).await?;
        let statements = orders_statements::statements(&database, &settings).await?;
        let closer = Closer::prepare(WarmConnections::new(closing), statements.close).await?;
        let policy = policy(&settings, closer.most_at_once().await);
        let sweeper = Sweeper::prepare(database.clone(), statements.overdue).await?;
        first_backlog::require_adopted(&database, &sweeper, &statements.orders, &settings).await?;
        if let Err(error) = closer.warm_up().await {
            debug!(error = one_line(&error), "connections for closers could not be made ready; they are tried again");
        }
        let clock = read_clock(closer.connections())
            .await
            .map_err(|error| DatabaseError(format!("the database's clock cannot be read: {}", one_line(&error))))?;
        let broker = match settings.delay.strategy.needs_broker() {
            true => Some(Broker::open(&settings).await?),
            false => None,
        };
        if let Some(server) = &http {
            let address = server.address();
            info!(%address, "health and metrics at http://{address}{LIVEZ}, {READYZ} and {METRICS}");
        }
        Ok(Self { settings, policy, closer, sweeper, database, clock, broker, recorder, http })
    }

    /// The address of the HTTP server; `None` if `http.listen` is empty.
    #[must_use]
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(HttpServer::address)
    }

    /// Runs until `stop` is cancelled, then finishes the work in flight within `worker.shutdown_grace`. Returns whether
    /// all of it was finished in time.
    pub async fn run(self, stop: CancellationToken) -> bool {
        let (settings, recorder) = (self.settings, self.recorder);
        // Until the end, because stopping is observed as well.
        let _shown = self.http;
        let give_up = GiveUp::after(settings.worker.shutdown_grace, stop.clone());
        let outboxes_end = CancellationToken::new();
        let (closing, closing_seen) = watch::channel(false);
        let give_way = GiveWay::to(closing_seen.clone());
        let (inputs, input_queue) = mpsc::unbounded_channel();
        let (settlements, settlement_queue) = mpsc::unbounded_channel();
        let (clock_readings, clock_reading_queue) = mpsc::unbounded_channel();
        let (phase, phase_seen) = watch::channel(Phase::Consume);
        let (broker_inputs, broker_input_queue) = mpsc::unbounded_channel();

        let inspections = Inspections::new(
            &settings,
            self.database.clone(),
            &self.closer,
            &self.sweeper,
            inputs.clone(),
            give_way.clone(),
            recorder.clone(),
        );
        let (inbox, rearmer, tasks) = match self.broker {
            Some(broker) => {
                recorder.health.mark_running(&Loop::ALL);
                let channels = BrokerChannels {
                    inputs: inputs.clone(),
                    inspections: broker_inputs.clone(),
                    inspection_queue: broker_input_queue,
                    settlement_queue,
                    phase: phase_seen,
                    closing: closing_seen,
                };
                let database = self.database.clone();
                let started = broker.start(&settings, database, channels, give_way, &outboxes_end, &stop, &recorder);
                (started.inbox, Some(started.rearmer), started.tasks)
            }
            None => {
                recorder.health.mark_running(&[Loop::EventLoop, Loop::Outboxes]);
                recorder.health.note_session(None);
                // Nothing is delivered: it is closed from the start, as after the supervisor's end.
                let (_, inbox) = mpsc::unbounded_channel();
                let relaying = start_local_outboxes(&settings, &self.database, &outboxes_end, &recorder);
                (inbox, None, Tasks { relaying, with_broker: None })
            }
        };
        let inspecting = tokio::spawn(inspections.go_on(outboxes_end.clone()));
        tokio::spawn(clock::sample_clock(self.closer.clone(), clock_readings));
        let zone = self.database.time_zone();
        let time_zone = format!("{} ({})", zone.name, zone.origin.as_str());
        let effects = Effects::new(self.closer, self.sweeper, self.database, rearmer, inputs, recorder.clone());
        let (close_name, overdue_name) = orders_statements::names(&settings);
        let contract = ContractWatch::new(close_name, overdue_name, std::time::Instant::now());
        let outputs = Outputs { settlements, phase, inspections: broker_inputs, closing };
        let event_loop = EventLoop::new(self.policy, contract, self.clock, effects, outputs, recorder);
        let database = postgres::place(&settings.database).expect("validated settings have an address");
        let broker = match settings.delay.strategy.needs_broker() {
            true => connect::place(&settings.amqp).expect("validated settings have an address"),
            false => "none (delay.strategy = \"database\")".to_owned(),
        };
        info!(namespace = %settings.namespace, database, broker, time_zone, "worker started");
        event_loop.work(inbox, input_queue, clock_reading_queue, stop, give_up.clone()).await;

        let in_time = tokio::select! {
            () = tasks.finish(inspecting, &outboxes_end) => true,
            () = give_up.moment() => {
                warn!("not everything was finished within worker.shutdown_grace; the broker delivers the rest again");
                false
            }
        };
        info!(in_time, "worker stopped");
        in_time
    }
}

/// What a worker with a broker has besides.
#[derive(Debug)]
struct Broker {
    first_session: Option<Session>,
    inbox: mpsc::UnboundedReceiver<Delivered>,
    canaries: mpsc::UnboundedReceiver<Uuid>,
    inboxes: Inboxes,
}

/// The channels between the event loop and the tasks that exist only with a broker.
struct BrokerChannels {
    inputs: mpsc::UnboundedSender<Input>,
    inspections: mpsc::UnboundedSender<BrokerInput>,
    inspection_queue: mpsc::UnboundedReceiver<BrokerInput>,
    settlement_queue: mpsc::UnboundedReceiver<Vec<(Receipt, Settlement)>>,
    phase: watch::Receiver<Phase>,
    closing: watch::Receiver<bool>,
}

/// What the event loop needs of a started broker side.
struct StartedBroker {
    inbox: mpsc::UnboundedReceiver<Delivered>,
    rearmer: Rearmer,
    tasks: Tasks,
}

/// The tasks that are awaited at the end.
struct Tasks {
    relaying: JoinHandle<()>,
    /// The supervisor, and the inspections of the broker.
    with_broker: Option<(JoinHandle<()>, JoinHandle<()>)>,
}

impl Broker {
    /// Opens the first session, unless the broker is away.
    async fn open(settings: &Settings) -> Result<Self, BrokerError> {
        let (alarms, inbox) = mpsc::unbounded_channel();
        let (canaries_sender, canaries) = mpsc::unbounded_channel();
        let inboxes = Inboxes { alarms, canaries: canaries_sender };
        let opening = Opening { number: supervisor::FIRST_SESSION, must_be_set_up: true, wants_former_inbox: true };
        let first_session = match Session::open(settings, opening, inboxes.clone()).await {
            Ok(session) => {
                if let Err(fault) = session.require_another_connection(settings).await {
                    warn!(%fault, "the worker starts, but cannot publish now");
                }
                Some(session)
            }
            Err(OpenError::Broker(BrokerError::Away(why))) => {
                warn!(%why, "the broker is away; the worker starts without it and keeps trying");
                None
            }
            // The next try meets the same error and handles it.
            Err(OpenError::Ended(SessionEnd { why, .. })) => {
                warn!(%why, "the consumer session ended as it began; the worker starts without one and keeps trying");
                None
            }
            Err(OpenError::Broker(refused @ BrokerError::Refused(_))) => return Err(refused),
        };
        Ok(Self { first_session, inbox, canaries, inboxes })
    }

    #[allow(clippy::too_many_arguments)]
    fn start(
        self,
        settings: &Settings,
        database: Database,
        channels: BrokerChannels,
        give_way: GiveWay,
        outboxes_end: &CancellationToken,
        stop: &CancellationToken,
        recorder: &Recorder,
    ) -> StartedBroker {
        let confirmed = ConfirmedPublisher::connect_lazily(&settings.amqp, "worker publishing");
        let outboxes = outboxes(settings, &database, &confirmed, channels.closing.clone(), recorder.clone());
        let relaying = tokio::spawn(outboxes.keep_empty(outboxes_end.clone()));
        let slots = SlotDeclarer::new(settings, confirmed.clone());
        let inspections = BrokerInspections::new(
            settings,
            database.clone(),
            confirmed.clone(),
            slots.clone(),
            give_way,
            recorder.clone(),
        );
        let inspecting = tokio::spawn(inspections.run(channels.inspection_queue, self.canaries, stop.clone()));
        let supervisor = Supervisor::new(
            settings.clone(),
            self.inboxes,
            AckBatcher::new(channels.settlement_queue, channels.closing, settings.worker.prefetch.into()),
            channels.phase,
            Listeners { inputs: channels.inputs, inspections: channels.inspections },
            confirmed.missing_route(),
            Quarantine::new(settings.clone(), database, recorder.clone()),
        );
        let supervising = tokio::spawn(supervisor.run(self.first_session));
        let rearmer = Rearmer::new(settings, confirmed, slots);
        StartedBroker {
            inbox: self.inbox,
            rearmer,
            tasks: Tasks { relaying, with_broker: Some((supervising, inspecting)) },
        }
    }
}

impl Tasks {
    async fn finish(self, inspecting: JoinHandle<()>, outboxes_end: &CancellationToken) {
        let (supervising, broker_inspecting) = self.with_broker.unzip();
        if let Some(supervising) = supervising {
            // All settlements of the event loop are sent before the connection is closed.
            let _ = supervising.await;
        }
        outboxes_end.cancel();
        let _ = tokio::join!(self.relaying, inspecting);
        // It ends with the stop, except for a pending call to database or broker.
        if let Some(mut inspecting) = broker_inspecting
            && tokio::time::timeout(broker_inspections::DEREGISTER_TIMEOUT, &mut inspecting).await.is_err()
        {
            inspecting.abort();
        }
    }
}

fn start_local_outboxes(
    settings: &Settings,
    database: &Database,
    outboxes_end: &CancellationToken,
    recorder: &Recorder,
) -> JoinHandle<()> {
    let channel = Some(settings.announce.notify.clone()).filter(|channel| !channel.is_empty());
    let outboxes = LocalOutboxes::new(database.clone(), channel, settings.announce.keep, settings.parked.keep);
    let outboxes = LocalOutboxesLoop::new(outboxes, settings.announce.poll, recorder.clone());
    tokio::spawn(outboxes.keep_empty(outboxes_end.clone()))
}

/// The time at which a stopping worker no longer waits for anything.
#[derive(Debug, Clone)]
struct GiveUp {
    stop: CancellationToken,
    grace: Duration,
    at: Arc<std::sync::OnceLock<Instant>>,
}

impl GiveUp {
    fn after(grace: Duration, stop: CancellationToken) -> Self {
        Self { stop, grace, at: Arc::default() }
    }

    /// Resolves `grace` after the stop.
    async fn moment(&self) {
        self.stop.cancelled().await;
        let at = self.at.get_or_init(|| Instant::now() + self.grace);
        tokio::time::sleep_until(*at).await;
    }
}

fn outboxes(
    settings: &Settings,
    database: &Database,
    confirmed: &ConfirmedPublisher,
    closing: watch::Receiver<bool>,
    recorder: Recorder,
) -> Outboxes {
    let (size, keep) = (settings.announce.batch_size, settings.announce.keep);
    let names = settings.names();
    let alarms = AlarmRelay::new(database.clone(), confirmed.clone(), settings, size, keep);
    let events = EventRelay::new(database.clone(), confirmed.clone(), &names, size, keep);
    let (poll, keep_parked) = (settings.announce.poll, settings.parked.keep);
    Outboxes::new(database.clone(), alarms, events, poll, keep_parked, closing, recorder)
}

/// Opens the HTTP server for health and metrics, if it is configured. A worker whose address is taken does not start: it
/// could not be monitored, and requests to that address would reach another worker.
async fn open_http(settings: &Settings, recorder: &Recorder) -> Result<Option<HttpServer>, HttpError> {
    let Some(listen) = settings.http.listen.0 else { return Ok(None) };
    let site = match settings.http.page {
        true => Some(Site::new(settings, recorder.pages(), recorder.last_hour.clone())?),
        false => None,
    };
    HttpServer::open(listen, recorder.pages(), site).await.map(Some)
}

/// The longest that one round of a loop may take: all its calls to broker and database, each within its own time limit,
/// plus a margin for a machine under heavy load.
fn longest_turn(settings: &Settings) -> Duration {
    let broker = settings.amqp.connect_timeout + settings.amqp.confirm_timeout;
    let database = settings.database.acquire_timeout + settings.database.statement_timeout;
    let of_outboxes = settings.announce.poll + 2 * broker + CALLS_PER_TURN * database;
    // Closes a session, waits, opens another, closes that as well, and waits again.
    let of_supervisor = 2 * (LONGEST_CLOSE + LONGEST_PAUSE + broker) + DECLARE_TIMEOUT;
    LOOP_MARGIN + of_outboxes.max(of_supervisor)
}

/// The engine's policy according to the settings. `most_at_once` is the largest batch that the connections favour.
fn policy(settings: &Settings, most_at_once: usize) -> Policy {
    Policy {
        hold_max: settings.worker.hold_max,
        max_delay: settings.delay.max_delay,
        batch_size: settings.worker.batch_size.min(most_at_once),
        linger: settings.worker.linger,
        closers: settings.worker.closers,
        retry_first: settings.retry.first,
        retry_longest: settings.retry.longest,
        missing_for: settings.retry.missing_for,
        max_attempts: settings.retry.max_attempts,
        requeue_after: settings.worker.requeue_after,
        // The prefetch window of one of the two channels: due alarms are delivered through the other.
        held_back_max: usize::from(settings.worker.prefetch),
        longest_try: settings.database.acquire_timeout + settings.database.statement_timeout,
        sweep_every: settings.sweep.every,
        sweep_grace: settings.sweep.grace,
        sweep_page: SWEEP_PAGE,
        look_ahead: settings.sweep.look_ahead,
        has_no_alarms: !settings.delay.strategy.needs_broker(),
        pause_share: fastrand::f64() / 2.0 + 0.5,
    }
}

/// Several readings, of which the most precise counts.
async fn read_clock(connections: &WarmConnections) -> Result<DatabaseClock, sqlx::Error> {
    let mut clock = DatabaseClock::new(connections.sample_clock().await?);
    for _ in 0..4 {
        clock.learn(connections.sample_clock().await?);
    }
    Ok(clock)
}
