//! The composition root: starts the tasks, connects them, and drains them at the end.
//!
//! Decides nothing about alarms (that is `order-timeout-core`), and contains no statement and no frame. `event_loop.rs`
//! passes inputs and actions between the engine and the effects; `supervisor.rs` keeps a consumer session open;
//! `ack_batcher.rs` batches settlements; `quarantine.rs` moves messages aside that end every session; `outboxes.rs`
//! empties the outboxes; `inspections.rs` checks what the worker needs of the database, `broker_inspections.rs` why
//! alarms do not arrive; `give_way.rs` lets both wait for idle closers; `warnings.rs` logs what an operator
//! must know about the database and about orders.

mod ack_batcher;
mod broker_inspections;
mod event_loop;
mod give_way;
mod inspections;
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
use order_timeout_core::alarm::Delivered;
use order_timeout_core::clock::DatabaseClock;
use order_timeout_core::engine::Policy;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use uuid::Uuid;

use crate::config::Settings;
use crate::deliver::{Inboxes, LONGEST_CLOSE, OpenError, Opening, Session, SessionEnd};
use crate::effects::close::Closer;
use crate::effects::rearm::Rearmer;
use crate::effects::sweep::Sweeper;
use crate::effects::{Effects, clock};
use crate::http::{HttpError, HttpServer, LIVEZ, METRICS, READYZ};
use crate::loop_backoff::LONGEST_PAUSE;
use crate::observe::inspect::contract_watch::ContractWatch;
use crate::observe::recorder::Recorder;
use crate::operations::{first_backlog, orders_statements};
use crate::outbox::alarm_relay::AlarmRelay;
use crate::outbox::event_relay::EventRelay;
use crate::postgres::warm_connections::WarmConnections;
use crate::postgres::{self, Database, DatabaseError, one_line};
use crate::stack;
use ack_batcher::AckBatcher;
use broker_inspections::BrokerInspections;
use event_loop::{EventLoop, Outputs};
use give_way::GiveWay;
use inspections::Inspections;
use outboxes::Outboxes;
use quarantine::Quarantine;
use supervisor::{Listeners, Phase, Supervisor};

/// Connections besides the closers': sweep, parking, both outboxes and their lock, and two for inspections, so that no
/// other task waits for those.
const OTHER_CONNECTIONS: u32 = 6;
/// How long a loop may make no progress, in addition to the time limits of its calls.
const LOOP_MARGIN: Duration = Duration::from_secs(60);
/// Database calls of the outbox loop in one round: two ages, the lock, the refused count, parked alarms, and for each
/// outbox: read, mark as refused, mark as sent, mark unlocked rows, and delete old rows.
const CALLS_PER_TURN: u32 = 15;
/// Overdue orders per query: more than a batch, and little memory.
const SWEEP_PAGE: usize = 1_000;

/// Why a worker could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Broker(#[from] BrokerError),
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
    first_session: Option<Session>,
    inbox: mpsc::UnboundedReceiver<Delivered>,
    canaries: mpsc::UnboundedReceiver<Uuid>,
    inboxes: Inboxes,
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
        let (alarms, inbox) = mpsc::unbounded_channel();
        let (canaries_sender, canaries) = mpsc::unbounded_channel();
        let inboxes = Inboxes { alarms, canaries: canaries_sender };
        let opening = Opening { number: supervisor::FIRST_SESSION, must_be_set_up: true, wants_former_inbox: true };
        let first_session = match Session::open(&settings, opening, inboxes.clone()).await {
            Ok(session) => {
                if let Err(fault) = session.require_another_connection(&settings).await {
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
            Err(OpenError::Broker(refused @ BrokerError::Refused(_))) => return Err(refused.into()),
        };
        if let Some(server) = &http {
            let address = server.address();
            info!(%address, "health and metrics at http://{address}{LIVEZ}, {READYZ} and {METRICS}");
        }
        Ok(Self {
            settings,
            policy,
            closer,
            sweeper,
            database,
            clock,
            first_session,
            inbox,
            canaries,
            inboxes,
            recorder,
            http,
        })
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
        let confirmed = ConfirmedPublisher::connect_lazily(&settings.amqp, "worker publishing");
        let give_up = GiveUp::after(settings.worker.shutdown_grace, stop.clone());

        let outboxes_end = CancellationToken::new();
        let (closing, closing_seen) = watch::channel(false);
        let outboxes = outboxes(&settings, &self.database, &confirmed, closing_seen.clone(), recorder.clone());
        recorder.health.mark_running();
        let relaying = tokio::spawn(outboxes.keep_empty(outboxes_end.clone()));

        let give_way = GiveWay::to(closing_seen.clone());
        let (database, for_plans) = (self.database.clone(), give_way.clone());
        let inspections =
            Inspections::new(&settings, database, &self.closer, &self.sweeper, for_plans, recorder.clone());
        let inspecting = tokio::spawn(inspections.go_on(outboxes_end.clone()));

        let (settlements, settlement_queue) = mpsc::unbounded_channel();
        let (inputs, input_queue) = mpsc::unbounded_channel();
        let (clock_readings, clock_reading_queue) = mpsc::unbounded_channel();
        let (phase, phase_seen) = watch::channel(Phase::Consume);
        let (broker_inputs, broker_input_queue) = mpsc::unbounded_channel();
        let inspections =
            BrokerInspections::new(&settings, self.database.clone(), confirmed.clone(), give_way, recorder.clone());
        let mut inspecting_broker = tokio::spawn(inspections.run(broker_input_queue, self.canaries, stop.clone()));
        let supervisor = Supervisor::new(
            settings.clone(),
            self.inboxes,
            AckBatcher::new(settlement_queue, closing_seen, settings.worker.prefetch.into()),
            phase_seen,
            Listeners { inputs: inputs.clone(), inspections: broker_inputs.clone() },
            confirmed.missing_route(),
            Quarantine::new(settings.clone(), self.database.clone(), recorder.clone()),
        );
        let supervising = tokio::spawn(supervisor.run(self.first_session));

        tokio::spawn(clock::sample_clock(self.closer.clone(), clock_readings));
        let rearmer = Rearmer::new(&settings, confirmed);
        let zone = self.database.time_zone();
        let time_zone = format!("{} ({})", zone.name, zone.origin.as_str());
        let effects = Effects::new(self.closer, self.sweeper, self.database, rearmer, inputs, recorder.clone());
        let (close_name, overdue_name) = orders_statements::names(&settings);
        let contract = ContractWatch::new(close_name, overdue_name, std::time::Instant::now());
        let outputs = Outputs { settlements, phase, inspections: broker_inputs, closing };
        let event_loop = EventLoop::new(self.policy, contract, self.clock, effects, outputs, recorder);
        let database = postgres::place(&settings.database).expect("validated settings have an address");
        let broker = connect::place(&settings.amqp).expect("validated settings have an address");
        info!(namespace = %settings.namespace, database, broker, time_zone, "worker started");
        event_loop.work(self.inbox, input_queue, clock_reading_queue, stop, give_up.clone()).await;

        let finish = async {
            // All settlements of the event loop are sent before the connection is closed.
            let _ = supervising.await;
            outboxes_end.cancel();
            let _ = tokio::join!(relaying, inspecting);
            // It ends with the stop, except for a pending call to database or broker.
            if tokio::time::timeout(broker_inspections::DEREGISTER_TIMEOUT, &mut inspecting_broker).await.is_err() {
                inspecting_broker.abort();
            }
        };
        let in_time = tokio::select! {
            () = finish => true,
            () = give_up.moment() => {
                warn!("not everything was finished within worker.shutdown_grace; the broker delivers the rest again");
                false
            }
        };
        info!(in_time, "worker stopped");
        in_time
    }
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
    HttpServer::open(listen, recorder.pages()).await.map(Some)
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
        // Half of the prefetch window: due alarms are delivered through the other half.
        held_back_max: usize::from(settings.worker.prefetch),
        longest_try: settings.database.acquire_timeout + settings.database.statement_timeout,
        sweep_every: settings.sweep.every,
        sweep_grace: settings.sweep.grace,
        sweep_page: SWEEP_PAGE,
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
