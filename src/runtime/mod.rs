//! The composition root: starts the tasks, connects them, and drains them at the end.
//!
//! Decides nothing about alarms (that is `order-timeout-core`), and contains no statement and no frame. `kind_worker.rs` is
//! what each kind has of its own, `kind_start.rs` starts them, `active_kinds.rs` has those that run, `tasks.rs` waits for them; `event_loop.rs` passes inputs and actions between its engine and the effects;
//! `supervisor.rs` keeps its consumer session open; `ack_batcher.rs` batches settlements; `outboxes.rs` empties the outboxes,
//! `events_turns.rs` lets the events in both wait for busy closers; `inspections.rs` checks what the worker needs of the database, `broker_inspections.rs` why alarms do not arrive;
//! `../give_way.rs` lets both wait for idle closers; `warnings.rs` logs what an operator must know about the database and about
//! orders.

mod ack_batcher;
mod active_kinds;
mod broker_inspections;
mod event_loop;
mod events_turns;
mod inspections;
mod kind_start;
mod kind_worker;
mod outboxes;
mod reminders;
mod supervisor;
mod tasks;
mod warnings;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use order_timeout_amqp::connect::{self, BrokerError};
use order_timeout_amqp::publisher::ConfirmedPublisher;
use order_timeout_amqp::topology::DECLARE_TIMEOUT;
use order_timeout_core::InvalidSetting;
use order_timeout_core::kind::Kind;
use order_timeout_providers::webhook::{self, Webhook};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config::Settings;
use crate::config::kinds::OrdersOf;
use crate::deliver::LONGEST_CLOSE;
use crate::effects::slots::SlotDeclarer;
use crate::give_way::{BusyKinds, GiveWay};
use crate::handler::Handlers;
use crate::http::{HttpError, HttpServer, LIVEZ, METRICS, READYZ, Site};
use crate::loop_backoff::LONGEST_PAUSE;
use crate::observe::recorder::Recorder;
use crate::observe::traces::{Step, Traces, TracesError};
use crate::operations::orders_statements;
use crate::outbox::alarm_relay::AlarmRelay;
use crate::outbox::event_relay::EventRelay;
use crate::postgres::{self, Database, DatabaseError, shop_settings};
use active_kinds::ActiveKinds;
use kind_start::UnusableKind;
use kind_worker::{KindWorker, Publishing, RunningKind, Shared};
use outboxes::Outboxes;
use tasks::Tasks;

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
    /// A kind cannot have the handler that it is given.
    #[error("{0}")]
    Handler(String),
    /// A payment provider, or the webhook, cannot be used.
    #[error("setting {0}")]
    Provider(#[from] InvalidSetting),
    /// The pages cannot be served.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// Traces cannot be exported.
    #[error(transparent)]
    Traces(#[from] TracesError),
}

/// A worker that is ready to run.
pub struct Worker {
    settings: Settings,
    database: Database,
    /// At least one.
    kinds: Vec<KindWorker>,
    handlers: Handlers,
    /// Those whose start is tried again.
    unusable: Vec<UnusableKind>,
    busy_kinds: BusyKinds,
    recorder: Recorder,
    /// Where events go without a broker.
    webhook: Option<Webhook>,
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
        Self::start_with(settings, Handlers::none()).await
    }

    /// The same, with code of the embedding program for the kinds that have a handler. Such a kind is served besides those of
    /// `worker.kinds`.
    ///
    /// # Errors
    /// As of [`Self::start`]; also [`StartError::Handler`].
    pub async fn start_with(mut settings: Settings, handlers: Handlers) -> Result<Self, StartError> {
        handle_kinds(&mut settings, &handlers)?;
        warn_about_settings(&settings);
        let webhook = open_webhook(&settings)?;
        let busy_kinds = BusyKinds::new();
        let traces = Traces::start(&settings.traces, GiveWay::to(&busy_kinds))?;
        let recorder = Recorder::new(longest_turn(&settings), traces);
        // First, so that it answers what the worker waits for while it starts.
        let http = open_http(&settings, &recorder, GiveWay::to(&busy_kinds)).await?;
        let served: Vec<Kind> = settings.served_kinds().into_iter().collect();
        let database = Database::connect(&settings.database, settings.connections_besides_closers()).await?;
        postgres::require_migrated(&database).await?;
        if database.is_for_tests() {
            warn!("this database was made for tests: `order-timeout testing advance` moves its clock");
        }
        shop_settings::write(&database, &settings).await?;
        for kind in &served {
            orders_statements::require_readable_files(&settings, kind).await?;
        }
        let (mut kinds, unusable) = kind_start::prepare_all(&settings, served, &database, &handlers, &recorder).await?;
        if settings.delay.strategy.needs_broker() {
            open_sessions(&settings, &mut kinds, unusable.is_empty()).await?;
        }
        if let Some(server) = &http {
            let address = server.address();
            info!(%address, "health and metrics at http://{address}{LIVEZ}, {READYZ} and {METRICS}");
            if settings.http.page {
                info!(%address, "the page is at http://{address}/");
            }
        }
        Ok(Self { settings, database, kinds, handlers, unusable, busy_kinds, recorder, webhook, http })
    }

    /// The address of the HTTP server; `None` if `http.listen` is empty.
    #[must_use]
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(HttpServer::address)
    }

    /// Runs until `stop` is cancelled, then finishes the work in flight within `worker.shutdown_grace`. Returns whether
    /// all of it was finished in time.
    ///
    /// # Panics
    /// At once when a task that closes orders has panicked; the other kinds then finish their work in flight.
    pub async fn run(self, stop: CancellationToken) -> bool {
        let Self { settings, database, kinds, handlers, unusable, busy_kinds, recorder, webhook, http } = self;
        // Its own, so that a panic can stop the tasks.
        let stop = stop.child_token();
        // Until the end, because stopping is observed as well.
        let _shown = http;
        let give_up = GiveUp::after(settings.worker.shutdown_grace, stop.clone());
        let shared = Arc::new(Shared {
            publishing: publishing(&settings),
            busy_kinds,
            names_kinds: kinds.len() + unusable.len() > 1,
            active_kinds: ActiveKinds::default(),
            outboxes_end: CancellationToken::new(),
            stop,
            give_up: give_up.clone(),
            settings,
            handlers,
            database,
        });
        let relaying = start_outboxes(&shared, webhook, &recorder);
        let running: Vec<RunningKind> = kinds.into_iter().map(|kind| kind.start(&shared)).collect();
        recorder.health.mark_running();
        let inspecting = tokio::spawn(inspections::inspect(shared.clone(), recorder.clone()));
        log_start(&shared);
        let mut tasks = Tasks::new(vec![relaying, inspecting], shared.outboxes_end.clone());
        running.into_iter().for_each(|kind| tasks.add(kind));
        unusable.into_iter().for_each(|kind| tasks.add_starting(tokio::spawn(kind.start(shared.clone()))));
        if let Err(failed) = tasks.wait_for_event_loops().await
            && failed.is_panic()
        {
            shared.stop.cancel();
            shared.outboxes_end.cancel();
            std::panic::resume_unwind(failed.into_panic());
        }

        let in_time = tokio::select! {
            () = tasks.finish() => true,
            () = give_up.moment() => {
                warn!("not everything was finished within worker.shutdown_grace; the broker delivers the rest again");
                false
            }
        };
        recorder.traces.finish().await;
        info!(in_time, "worker stopped");
        in_time
    }
}

/// Notes in the settings which kinds have a handler.
fn handle_kinds(settings: &mut Settings, handlers: &Handlers) -> Result<(), StartError> {
    for (kind, handler) in handlers.iter() {
        let fault = |why: &str| {
            Err(StartError::Handler(format!("the kind {kind:?} is given a handler, {why}", kind = kind.as_str())))
        };
        if !settings.all_kinds().contains(kind) {
            return fault("but is not in the settings; add [kinds.NAME], and its lanes if it has any");
        }
        let has_statements = matches!(settings.orders_of(kind), Some(OrdersOf::Statements { .. }));
        if has_statements || settings.table_of(kind).is_some() {
            return fault("and a table or statements in the settings; leave one of them out");
        }
        if !settings.reminders_of(kind).is_empty() {
            return fault("and reminders, which need an overdue statement; leave `remind` out");
        }
        if !settings.delay.strategy.needs_broker() && !handler.finds_overdue() {
            return fault(
                "which finds no overdue orders, and with delay.strategy = \"database\" no alarm comes; implement OverdueSource, and pass it to Handlers::with",
            );
        }
        settings.kinds.entry(kind.clone()).or_default().is_handled = true;
    }
    Ok(())
}

fn warn_about_settings(settings: &Settings) {
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

/// Opens the first session of each kind, unless the broker is away. `are_all`: whether these are all kinds of the worker.
async fn open_sessions(settings: &Settings, kinds: &mut [KindWorker], are_all: bool) -> Result<(), BrokerError> {
    let is_only = are_all && kinds.len() == 1;
    // At the same time, so that a broker that does not answer is waited for once.
    let opening = kinds.iter_mut().map(|kind| kind.open_session(settings, is_only));
    try_join_all(opening).await?;
    // With all sessions open: the connection for publishing comes on top of them.
    let last = kinds.iter().rev().find_map(KindWorker::first_session);
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
    let time_zone = format!("{} ({})", zone.name, zone.origin);
    let database = postgres::place(&settings.database).expect("validated settings have an address");
    let broker = match settings.delay.strategy.needs_broker() {
        true => connect::place(&settings.amqp).expect("validated settings have an address"),
        false => "none (delay.strategy = \"database\")".to_owned(),
    };
    let kinds: Vec<String> = settings.served_kinds().iter().map(Kind::to_string).collect();
    let kinds = kinds.join(", ");
    info!(namespace = %settings.namespace, kinds, database, broker, time_zone, "worker started");
}

/// `None` if `delay.strategy` is `database`.
fn publishing(settings: &Settings) -> Option<Publishing> {
    settings.delay.strategy.needs_broker().then(|| {
        let confirmed = ConfirmedPublisher::connect_lazily(&settings.amqp, "worker publishing");
        Publishing { slots: SlotDeclarer::new(settings, confirmed.clone()), confirmed }
    })
}

/// `None` if `announce.webhook` is empty.
fn open_webhook(settings: &Settings) -> Result<Option<Webhook>, InvalidSetting> {
    let announce = &settings.announce;
    if announce.webhook.is_empty() {
        return Ok(None);
    }
    let ca_file = Some(Path::new(&announce.webhook_ca_file)).filter(|path| !path.as_os_str().is_empty());
    Webhook::new(&announce.webhook, Path::new(&announce.webhook_key_file), ca_file, announce.webhook_timeout).map(Some)
}

fn start_outboxes(shared: &Shared, webhook: Option<Webhook>, recorder: &Recorder) -> JoinHandle<()> {
    let (settings, database) = (&shared.settings, shared.database.clone());
    let (size, keep) = (settings.announce.batch_size, settings.announce.keep);
    let confirmed = shared.publishing.as_ref().map(|publishing| publishing.confirmed.clone());
    let mut alarms = AlarmRelay::new(database.clone(), confirmed.clone(), settings, size, keep);
    let mut events = match (confirmed, webhook) {
        (Some(confirmed), _) => EventRelay::new(database.clone(), confirmed, &settings.names(), size, keep),
        (None, Some(webhook)) => EventRelay::by_webhook(database.clone(), webhook, size, keep),
        (None, None) => EventRelay::by_notify(database.clone(), &settings.announce.notify, size, keep),
    };
    alarms.outbox.trace(Step::Schedule, recorder.traces.clone());
    events.outbox.trace(Step::Announce, recorder.traces.clone());
    let (poll, keep_parked, busy) = (settings.announce.poll, settings.parked.keep, shared.busy_kinds.clone());
    let outboxes = Outboxes::new(database, alarms, events, poll, keep_parked, busy, recorder.clone());
    tokio::spawn(outboxes.keep_empty(shared.outboxes_end.clone()))
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
async fn open_http(
    settings: &Settings,
    recorder: &Recorder,
    give_way: GiveWay,
) -> Result<Option<HttpServer>, HttpError> {
    let Some(listen) = settings.http.listen.0 else { return Ok(None) };
    let site = match settings.http.page {
        true => Some(Site::new(settings, recorder.pages(), recorder.kinds.clone(), give_way)?),
        false => None,
    };
    HttpServer::open(listen, recorder.pages(), site).await.map(Some)
}

/// The longest that one round of a loop may take: all its calls to broker and database, each within its own time limit,
/// plus a margin for a machine under heavy load.
fn longest_turn(settings: &Settings) -> Duration {
    let broker = settings.amqp.connect_timeout + settings.amqp.confirm_timeout;
    let database = settings.database.acquire_timeout + settings.database.statement_timeout;
    let webhook = settings.announce.webhook_timeout * (webhook::BATCH_SIZE / webhook::CONCURRENCY) as u32;
    let of_outboxes = settings.announce.poll + 2 * broker + webhook + CALLS_PER_TURN * database;
    // Closes a session, waits, opens another, closes that as well, and waits again.
    let of_supervisor = 2 * (LONGEST_CLOSE + LONGEST_PAUSE + broker) + 2 * DECLARE_TIMEOUT;
    LOOP_MARGIN + of_outboxes.max(of_supervisor)
}
