//! The composition root: starts the tasks, connects them, and drains them at the end.
//!
//! Decides nothing about alarms (that is `order-timeout-core`), and contains no statement and no frame. `kind_worker.rs` is
//! what each kind has of its own; `event_loop.rs` passes inputs and actions between its engine and the effects;
//! `supervisor.rs` keeps its consumer session open; `ack_batcher.rs` batches settlements; `quarantine.rs` moves messages
//! aside that end every session; `outboxes.rs` empties the outboxes, `local_outboxes.rs` those of a worker without a broker;
//! `inspections.rs` checks what the worker needs of the database, `broker_inspections.rs` why alarms do not arrive;
//! `give_way.rs` lets both wait for idle closers; `warnings.rs` logs what an operator must know about the database and about
//! orders.

mod ack_batcher;
mod broker_inspections;
mod event_loop;
mod give_way;
mod inspections;
mod kind_worker;
mod local_outboxes;
mod outboxes;
mod quarantine;
mod reminders;
mod supervisor;
mod warnings;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join_all, try_join_all};
use order_timeout_amqp::connect::{self, BrokerError};
use order_timeout_amqp::publisher::ConfirmedPublisher;
use order_timeout_amqp::topology::DECLARE_TIMEOUT;
use order_timeout_core::InvalidSetting;
use order_timeout_core::kind::Kind;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config::Settings;
use crate::deliver::LONGEST_CLOSE;
use crate::effects::slots::SlotDeclarer;
use crate::http::{HttpError, HttpServer, LIVEZ, METRICS, READYZ};
use crate::loop_backoff::LONGEST_PAUSE;
use crate::observe::recorder::Recorder;
use crate::outbox::alarm_relay::AlarmRelay;
use crate::outbox::event_relay::EventRelay;
use crate::outbox::local::LocalOutboxes;
use crate::postgres::{self, Database, DatabaseError, shop_settings};
use crate::stack;
use give_way::{BusyKinds, GiveWay};
use inspections::Inspections;
use kind_worker::{KindWorker, Publishing, RunningKind, Shared};
use local_outboxes::LocalOutboxesLoop;
use outboxes::Outboxes;

/// Connections besides the closers': sweep, parking, both outboxes and their lock, and two for inspections, so that no
/// other task waits for those.
const OTHER_CONNECTIONS: u32 = 6;
/// How many more each further kind needs: sweep, parking, and two for inspections. A kind never has more than these in use,
/// so that one whose queries hang takes none from the others.
const CONNECTIONS_OF_KIND: u32 = 4;
/// How long a loop may make no progress, in addition to the time limits of its calls.
const LOOP_MARGIN: Duration = Duration::from_secs(60);
/// Database calls of the outbox loop in one round: two ages, the lock, the refused count, parked alarms, and for each
/// outbox: read, mark as refused, mark as sent, mark unlocked rows, and delete old rows; and the trace contexts.
const CALLS_PER_TURN: u32 = 16;
/// Why a worker could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The database cannot be used.
    #[error(transparent)]
    Database(#[from] DatabaseError),
    /// The broker cannot be used.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// A payment provider cannot be used.
    #[error("setting {0}")]
    Provider(#[from] InvalidSetting),
    /// The pages cannot be served.
    #[error(transparent)]
    Http(#[from] HttpError),
}

/// A worker that is ready to run.
pub struct Worker {
    settings: Settings,
    database: Database,
    /// At least one.
    kinds: Vec<KindWorker>,
    recorder: Recorder,
    http: Option<HttpServer>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}

impl Worker {
    /// Connects to the database and the broker and verifies both. A broker that cannot be reached is retried later; one that
    /// refuses the connection, or an unusable database, is an error now.
    ///
    /// # Errors
    /// [`StartError`], one sentence that says how to fix it.
    pub async fn start(settings: Settings) -> Result<Self, StartError> {
        warn_about_settings(&settings);
        let recorder = Recorder::new(longest_turn(&settings));
        // First, so that it answers what the worker waits for while it starts.
        let http = open_http(&settings, &recorder).await?;
        let served: Vec<Kind> = settings.served_kinds().into_iter().collect();
        let further = u32::try_from(served.len().saturating_sub(1)).unwrap_or(u32::MAX);
        let reminding = served.iter().filter(|kind| !settings.reminders_of(kind).is_empty()).count();
        let connections = OTHER_CONNECTIONS
            .saturating_add(further.saturating_mul(CONNECTIONS_OF_KIND))
            .saturating_add(u32::try_from(reminding).unwrap_or(u32::MAX));
        let database = Database::connect(&settings.database, connections).await?;
        postgres::require_migrated(&database).await?;
        shop_settings::write(&database, &settings.orders).await?;
        let mut kinds = Vec::with_capacity(served.len());
        for kind in &served {
            kinds.push(KindWorker::prepare(&settings, kind, &database, &recorder).await?);
        }
        if settings.delay.strategy.needs_broker() {
            open_sessions(&settings, &mut kinds).await?;
        }
        if let Some(server) = &http {
            let address = server.address();
            info!(%address, "health and metrics at http://{address}{LIVEZ}, {READYZ} and {METRICS}");
        }
        Ok(Self { settings, database, kinds, recorder, http })
    }

    /// The address of the HTTP server; `None` if `http.listen` is empty.
    #[must_use]
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(HttpServer::address)
    }

    /// Runs until `stop` is cancelled, then finishes the work in flight within `worker.shutdown_grace`. Returns whether
    /// all of it was finished in time.
    pub async fn run(self, stop: CancellationToken) -> bool {
        let Self { settings, database, kinds, recorder, http } = self;
        // Until the end, because stopping is observed as well.
        let _shown = http;
        let give_up = GiveUp::after(settings.worker.shutdown_grace, stop.clone());
        let shared = Shared {
            publishing: publishing(&settings),
            busy_kinds: BusyKinds::new(),
            names_kinds: kinds.len() > 1,
            broker_inspections: kinds.iter().map(KindWorker::broker_inputs).collect(),
            outboxes_end: CancellationToken::new(),
            stop,
            give_up: give_up.clone(),
            settings,
            database,
        };
        recorder.health.mark_running();
        let relaying = start_outboxes(&shared, &recorder);
        let inspecting = start_inspections(&shared, &kinds, &recorder);
        let running: Vec<RunningKind> = kinds.into_iter().map(|kind| kind.start(&shared)).collect();
        log_start(&shared);
        let tasks = Tasks::of(running, relaying, inspecting, shared.outboxes_end.clone());
        let tasks = tasks.wait_for_event_loops().await;

        let in_time = tokio::select! {
            () = tasks.finish() => true,
            () = give_up.moment() => {
                warn!("not everything was finished within worker.shutdown_grace; the broker delivers the rest again");
                false
            }
        };
        info!(in_time, "worker stopped");
        in_time
    }
}

fn warn_about_settings(settings: &Settings) {
    if !stack::is_reserved() {
        warn!(
            "a message with deeply nested tables could end this process, because RUST_MIN_STACK is unset or too small; set it to 268435456, or call order_timeout::stack::reserve_for_parsing() first in main"
        );
    }
    if let Some(why) = settings.delay.strategy.deprecation() {
        warn!("{why}");
    }
    let served = settings.served_kinds();
    for kind in settings.all_kinds().difference(&served).filter(|_| settings.worker.kinds.is_empty()) {
        warn!(
            %kind,
            "no orders are named for this kind, so this worker only sends its alarms on; another worker must serve it, or give it kinds.{kind}.table or its close_sql and overdue_sql"
        );
    }
}

/// Opens the first session of each kind, unless the broker is away.
async fn open_sessions(settings: &Settings, kinds: &mut [KindWorker]) -> Result<(), BrokerError> {
    // At the same time, so that a broker that does not answer is waited for once.
    let opening = kinds.iter_mut().enumerate().map(|(index, kind)| kind.open_session(settings, index == 0));
    try_join_all(opening).await?;
    // With all sessions open: the connection for publishing comes on top of them.
    let last = kinds.last().and_then(KindWorker::first_session);
    if let Some(session) = last
        && let Err(fault) = session.require_another_connection(settings).await
    {
        warn!(%fault, "the worker starts, but cannot publish now");
    }
    Ok(())
}

fn log_start(shared: &Shared) {
    let settings = &shared.settings;
    let zone = shared.database.time_zone();
    let time_zone = format!("{} ({})", zone.name, zone.origin.as_str());
    let database = postgres::place(&settings.database).expect("validated settings have an address");
    let broker = match settings.delay.strategy.needs_broker() {
        true => connect::place(&settings.amqp).expect("validated settings have an address"),
        false => "none (delay.strategy = \"database\")".to_owned(),
    };
    let kinds: Vec<String> = settings.served_kinds().iter().map(Kind::to_string).collect();
    let kinds = kinds.join(", ");
    info!(namespace = %settings.namespace, kinds, database, broker, time_zone, "worker started");
}

/// The tasks that are awaited at the end.
struct Tasks {
    event_loops: Vec<JoinHandle<()>>,
    supervising: Vec<JoinHandle<()>>,
    outboxes_end: CancellationToken,
    /// They end with `outboxes_end`: the outboxes, and the inspections of the database.
    until_outboxes_end: Vec<JoinHandle<()>>,
    broker_inspecting: Vec<JoinHandle<()>>,
}

impl Tasks {
    fn of(
        kinds: Vec<RunningKind>,
        relaying: JoinHandle<()>,
        inspecting: JoinHandle<()>,
        outboxes_end: CancellationToken,
    ) -> Self {
        let mut tasks = Self {
            event_loops: Vec::new(),
            supervising: Vec::new(),
            outboxes_end,
            until_outboxes_end: vec![relaying, inspecting],
            broker_inspecting: Vec::new(),
        };
        for kind in kinds {
            tasks.event_loops.push(kind.event_loop);
            tasks.supervising.extend(kind.supervising);
            tasks.until_outboxes_end.push(kind.inspecting);
            tasks.until_outboxes_end.extend(kind.reminding);
            tasks.broker_inspecting.extend(kind.broker_inspecting);
        }
        tasks
    }

    /// They end with the stop, each when its work in flight is finished or given up.
    async fn wait_for_event_loops(mut self) -> Self {
        for ended in join_all(self.event_loops.drain(..)).await {
            if let Err(failed) = ended
                && failed.is_panic()
            {
                std::panic::resume_unwind(failed.into_panic());
            }
        }
        self
    }

    async fn finish(self) {
        // All settlements of the event loops are sent before the connections are closed.
        join_all(self.supervising).await;
        self.outboxes_end.cancel();
        join_all(self.until_outboxes_end).await;
        let ending = self.broker_inspecting.into_iter().map(|mut inspecting| async move {
            if tokio::time::timeout(broker_inspections::DEREGISTER_TIMEOUT, &mut inspecting).await.is_err() {
                inspecting.abort();
            }
        });
        join_all(ending).await;
    }
}

/// `None` if `delay.strategy` is `database`.
fn publishing(settings: &Settings) -> Option<Publishing> {
    settings.delay.strategy.needs_broker().then(|| {
        let confirmed = ConfirmedPublisher::connect_lazily(&settings.amqp, "worker publishing");
        Publishing { slots: SlotDeclarer::new(settings, confirmed.clone()), confirmed }
    })
}

fn start_inspections(shared: &Shared, kinds: &[KindWorker], recorder: &Recorder) -> JoinHandle<()> {
    let inspections = Inspections::new(
        &shared.settings,
        shared.database.clone(),
        kinds.iter().map(KindWorker::inputs).collect(),
        GiveWay::to(&shared.busy_kinds),
        recorder.clone(),
    );
    tokio::spawn(inspections.go_on(shared.outboxes_end.clone()))
}

fn start_outboxes(shared: &Shared, recorder: &Recorder) -> JoinHandle<()> {
    let ends = shared.outboxes_end.clone();
    match &shared.publishing {
        Some(publishing) => tokio::spawn(outboxes(shared, publishing, recorder.clone()).keep_empty(ends)),
        None => tokio::spawn(local_outboxes(shared, recorder.clone()).keep_empty(ends)),
    }
}

fn local_outboxes(shared: &Shared, recorder: Recorder) -> LocalOutboxesLoop {
    let (settings, database) = (&shared.settings, shared.database.clone());
    let channel = Some(settings.announce.notify.clone()).filter(|channel| !channel.is_empty());
    let outboxes = LocalOutboxes::new(database, channel, settings.announce.keep, settings.parked.keep);
    LocalOutboxesLoop::new(outboxes, settings.announce.poll, recorder)
}

fn outboxes(shared: &Shared, publishing: &Publishing, recorder: Recorder) -> Outboxes {
    let (settings, database) = (&shared.settings, &shared.database);
    let (size, keep) = (settings.announce.batch_size, settings.announce.keep);
    let names = settings.names();
    let alarms = AlarmRelay::new(database.clone(), publishing.confirmed.clone(), settings, size, keep);
    let events = EventRelay::new(database.clone(), publishing.confirmed.clone(), &names, size, keep);
    let (poll, keep_parked) = (settings.announce.poll, settings.parked.keep);
    let busy = shared.busy_kinds.watched();
    Outboxes::new(database.clone(), alarms, events, poll, keep_parked, busy, recorder)
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
