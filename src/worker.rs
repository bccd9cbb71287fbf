//! The composition root: spawns the steps, joins them, supervises the consumer session, and drains on the way out.
//!
//! Decides nothing about alarms (that is `desk.rs`) and knows no statement and no frame (those are the steps').

use std::time::Duration;

use sqlx::PgPool;
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};

use std::sync::Arc;

use crate::alarm::{Delivered, Parcel, Receipt, Settlement};
use crate::announce::{Announcer, Round};
use crate::arm::Armer;
use crate::broker::BrokerFault;
use crate::clock::{ClockSample, DatabaseClock};
use crate::close::Closer;
use crate::config::Settings;
use crate::confirm::ConfirmedPublisher;
use crate::database::{self, DatabaseFault};
use crate::deliver::Session;
use crate::desk::{Case, Desk, Errand, News, Policy, match_findings};
use crate::order::{ClosedBy, OrderId, Outcome};
use crate::park;
use crate::patience::Pauses;
use crate::topology::Names;

/// How often the database's clock is read.
const CLOCK_SAMPLE_EVERY: Duration = Duration::from_secs(1);
/// Connections besides the closers': parking, announcing and its lock.
const OTHER_CONNECTIONS: u32 = 4;
/// How often old events are deleted from the outbox.
const FORGET_EVERY: Duration = Duration::from_secs(60);
/// News taken in at once before errands are looked at: enough to amortise, short enough not to hold up a batch.
const NEWS_AT_ONCE: usize = 256;

/// Why a worker could not start.
#[derive(Debug, thiserror::Error)]
pub enum StartFault {
    #[error(transparent)]
    Database(#[from] DatabaseFault),
    #[error(transparent)]
    Broker(#[from] BrokerFault),
}

/// A worker that is ready to run.
#[derive(Debug)]
pub struct Worker {
    settings: Settings,
    closer: Closer,
    pool: PgPool,
    clock: DatabaseClock,
    first_session: Option<Session>,
    inbox: mpsc::UnboundedReceiver<Delivered>,
    inbox_sender: mpsc::UnboundedSender<Delivered>,
}

impl Worker {
    /// Reaches the database and the broker and checks that both are as they must be. A broker that is merely away is
    /// waited for later; one that refuses us, or a database that cannot be used, is an error now.
    ///
    /// # Errors
    /// [`StartFault`], one sentence that says how to mend it.
    pub async fn start(settings: Settings) -> Result<Self, StartFault> {
        let closers = u32::try_from(settings.worker.closers).unwrap_or(u32::MAX);
        let closing_pool = database::connect(&settings.database, closers).await?;
        let pool = database::connect(&settings.database, OTHER_CONNECTIONS).await?;
        database::require_migrated(&pool).await?;
        let closer = Closer::prepare(closing_pool, &settings.orders.close_sql).await?;
        let clock = read_clock(&closer)
            .await
            .map_err(|error| DatabaseFault(format!("the database's clock cannot be read: {error}")))?;
        let (inbox_sender, inbox) = mpsc::unbounded_channel();
        let first_session = match Session::open(&settings, 1, inbox_sender.clone()).await {
            Ok(session) => Some(session),
            Err(BrokerFault::Away(why)) => {
                warn!(%why, "the broker is away; the worker starts without it and keeps trying");
                None
            }
            Err(refused @ BrokerFault::Refused(_)) => return Err(refused.into()),
        };
        Ok(Self { settings, closer, pool, clock, first_session, inbox, inbox_sender })
    }

    /// Works until `stop` is cancelled, then finishes what it has begun within `worker.shutdown_grace`. Returns
    /// whether everything was finished in time.
    pub async fn run(self, stop: CancellationToken) -> bool {
        let grace = self.settings.worker.shutdown_grace;
        let names = Names::new(&self.settings.namespace);
        let confirmed = ConfirmedPublisher::connect_lazily(&self.settings.amqp, "worker publishing");
        let announce_now = Arc::new(Notify::new());
        let announcing_ends = CancellationToken::new();
        let announcer = Announcer::new(
            self.pool.clone(),
            confirmed.clone(),
            &names,
            self.settings.announce.batch_size,
            self.settings.announce.keep,
        );
        let announcing = tokio::spawn(announce(
            announcer,
            self.settings.announce.poll,
            announce_now.clone(),
            announcing_ends.clone(),
        ));

        let (settlements, settlement_queue) = mpsc::unbounded_channel();
        let (phase, phase_seen) = watch::channel(Phase::Consume);
        let supervisor = Supervisor {
            settings: self.settings.clone(),
            inbox: self.inbox_sender,
            settlements: settlement_queue,
            phase: phase_seen,
            next_session: 2,
        };
        let supervising = tokio::spawn(supervisor.run(self.first_session));

        let (notes, note_queue) = mpsc::unbounded_channel();
        tokio::spawn(sample_clock(self.closer.clone(), notes.clone()));
        let floor = Floor {
            desk: Desk::new(policy(&self.settings)),
            clock: self.clock,
            steps: Steps {
                closer: self.closer,
                pool: self.pool,
                armer: Armer::new(&self.settings, confirmed),
                announce_now: announce_now.clone(),
                notes,
                tasks: TaskTracker::new(),
            },
            settlements,
            phase,
        };
        info!(namespace = %self.settings.namespace, "worker started");
        let stopped_in_time = floor.work(self.inbox, note_queue, stop, grace).await;
        let finish = async {
            // Whatever the floor has settled is written before the connection is closed.
            let _ = supervising.await;
            announcing_ends.cancel();
            announce_now.notify_one();
            let _ = announcing.await;
        };
        let finished = tokio::time::timeout(grace, finish).await.is_ok();
        info!(in_time = stopped_in_time && finished, "worker stopped");
        stopped_in_time && finished
    }
}

fn policy(settings: &Settings) -> Policy {
    Policy {
        hold_max: settings.worker.hold_max,
        max_delay: settings.delay.max_delay,
        batch_size: settings.worker.batch_size,
        linger: settings.worker.linger,
        closers: settings.worker.closers,
        retry_first: settings.retry.first,
        retry_longest: settings.retry.longest,
        missing_for: settings.retry.missing_for,
        max_attempts: settings.retry.max_attempts,
        away_patience: settings.worker.away_patience,
    }
}

/// What the floor hears from its own tasks.
enum Note {
    News(News),
    Clock(ClockSample),
}

/// What the supervisor of the consumer session is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Keep a session open.
    Consume,
    /// Keep none: what cannot be closed must not stay unacknowledged.
    Rest,
    /// Take nothing new, but go on settling.
    Drain,
    /// Write the last settlements and close.
    Close,
}

/// Where news comes in and errands go out.
struct Floor {
    desk: Desk,
    clock: DatabaseClock,
    steps: Steps,
    settlements: mpsc::UnboundedSender<Vec<(Receipt, Settlement)>>,
    phase: watch::Sender<Phase>,
}

impl Floor {
    async fn work(
        mut self,
        mut inbox: mpsc::UnboundedReceiver<Delivered>,
        mut notes: mpsc::UnboundedReceiver<Note>,
        stop: CancellationToken,
        grace: Duration,
    ) -> bool {
        let mut delivered = Vec::with_capacity(NEWS_AT_ONCE);
        let mut give_up_at = None;
        let mut inbox_is_open = true;
        loop {
            self.run_errands();
            // The notes last: a task ends only after it has sent its own.
            if give_up_at.is_some() && self.desk.closers_are_idle() && self.steps.tasks.is_empty() && notes.is_empty() {
                break;
            }
            let wake_at = self.desk.wake_at().map(|moment| self.clock.instant_of(moment));
            tokio::select! {
                biased;
                () = stop.cancelled(), if give_up_at.is_none() => {
                    give_up_at = Some(tokio::time::Instant::now() + grace);
                    self.begin_draining();
                }
                () = sleep_until(give_up_at), if give_up_at.is_some() => {
                    warn!("not everything was finished within worker.shutdown_grace; the broker delivers the rest again");
                    break;
                }
                Some(note) = notes.recv() => self.take(note),
                count = inbox.recv_many(&mut delivered, NEWS_AT_ONCE), if inbox_is_open => {
                    // Closed once the supervisor has ended, which on the way out it may do before the rest has.
                    inbox_is_open = count > 0;
                    let now = self.clock.now();
                    delivered.drain(..).for_each(|one| self.desk.hear(News::Delivered(one), now));
                }
                () = sleep_until(wake_at.map(Into::into)), if wake_at.is_some() => {}
            }
        }
        self.phase.send_replace(Phase::Close);
        give_up_at.is_some_and(|at| tokio::time::Instant::now() < at)
    }

    fn begin_draining(&mut self) {
        info!(held = self.desk.held(), "stopping: taking nothing new, finishing what is begun");
        self.phase.send_replace(Phase::Drain);
        self.desk.drain();
        self.steps.tasks.close();
    }

    fn take(&mut self, note: Note) {
        match note {
            Note::News(news) => self.desk.hear(news, self.clock.now()),
            Note::Clock(sample) => self.clock.learn(sample),
        }
    }

    fn run_errands(&mut self) {
        let now = self.clock.now();
        for errand in self.desk.errands(now) {
            match errand {
                Errand::Close(batch) => self.steps.close(batch, self.clock),
                Errand::Arm(jobs) => {
                    let armer = self.steps.armer.clone();
                    let clock = self.clock;
                    self.steps.spawn(async move { News::Armed(armer.write(jobs, clock).await) });
                }
                Errand::Park(parcels) => {
                    let pool = self.steps.pool.clone();
                    self.steps.spawn(async move { News::Parked(park_all(&pool, parcels).await) });
                }
                // With the supervisor gone there is no session, and every receipt is void.
                Errand::Settle(settlements) => drop(self.settlements.send(settlements)),
            }
        }
        self.note_whether_to_consume(self.desk.wants_deliveries(now));
    }

    fn note_whether_to_consume(&self, wanted: bool) {
        self.phase.send_if_modified(|phase| {
            let next = match (*phase, wanted) {
                (Phase::Consume, false) => Phase::Rest,
                (Phase::Rest, true) => Phase::Consume,
                (unchanged, _) => unchanged,
            };
            std::mem::replace(phase, next) != next
        });
    }
}

async fn sleep_until(at: Option<tokio::time::Instant>) {
    if let Some(at) = at {
        tokio::time::sleep_until(at).await;
    }
}

/// The steps, and the way back for what they found.
struct Steps {
    closer: Closer,
    pool: PgPool,
    armer: Armer,
    announce_now: Arc<Notify>,
    notes: mpsc::UnboundedSender<Note>,
    tasks: TaskTracker,
}

impl Steps {
    fn spawn(&self, errand: impl Future<Output = News> + Send + 'static) {
        let notes = self.notes.clone();
        self.tasks.spawn(async move {
            // With the floor gone nobody needs the news.
            let _ = notes.send(Note::News(errand.await));
        });
    }

    fn close(&self, batch: Vec<Case>, clock: DatabaseClock) {
        let (closer, announce_now) = (self.closer.clone(), self.announce_now.clone());
        self.spawn(async move {
            let ids: Vec<OrderId> = batch.iter().map(|case| case.alarm.order_id().clone()).collect();
            let began = clock.now();
            let findings = closer.close(&ids, ClosedBy::Alarm).await;
            let now = clock.now();
            debug!(orders = ids.len(), took_ms = now.since(began).as_secs_f64() * 1e3, "batch looked at");
            let mut closed = 0_usize;
            for (order_id, finding) in &findings {
                match finding {
                    Ok(found) if found.outcome == Outcome::Closed => {
                        closed += 1;
                        let lateness_ms = found.deadline.map(|deadline| now.since(deadline).as_secs_f64() * 1e3);
                        debug!(%order_id, lateness_ms, closed_by = ClosedBy::Alarm.as_str(), "order {order_id} closed");
                    }
                    Ok(_) => {}
                    Err(fault) => debug!(%order_id, ?fault, "order {order_id} could not be closed; it is tried again"),
                }
            }
            if closed > 0 {
                announce_now.notify_one();
            }
            News::Closed(match_findings(batch, &findings))
        });
    }
}

/// Parks until the rows are committed, however long that takes: the deliveries stay unacknowledged meanwhile.
async fn park_all(pool: &PgPool, parcels: Vec<(Parcel, Receipt)>) -> Vec<Receipt> {
    let mut pauses = Pauses::new();
    let contents: Vec<&Parcel> = parcels.iter().map(|(parcel, _)| parcel).collect();
    while let Err(error) = park::park(pool, &contents).await {
        warn!(%error, alarms = parcels.len(), "alarms could not be parked; they stay unacknowledged and are tried again");
        tokio::time::sleep(pauses.next_pause()).await;
    }
    for parcel in contents {
        let order_id = parcel.order_id.as_ref().map_or("", OrderId::as_str);
        warn!(order_id, reason = parcel.reason.as_str(), detail = %parcel.detail, "alarm parked");
    }
    parcels.into_iter().map(|(_, receipt)| receipt).collect()
}

/// Several readings, the finest of which counts.
async fn read_clock(closer: &Closer) -> Result<DatabaseClock, sqlx::Error> {
    let mut clock = DatabaseClock::new(closer.sample_clock().await?);
    for _ in 0..4 {
        clock.learn(closer.sample_clock().await?);
    }
    Ok(clock)
}

async fn sample_clock(closer: Closer, notes: mpsc::UnboundedSender<Note>) {
    let mut ticks = tokio::time::interval(CLOCK_SAMPLE_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match closer.sample_clock().await {
            Ok(sample) if notes.send(Note::Clock(sample)).is_err() => return,
            Ok(_) => {}
            Err(error) => debug!(%error, "the database's clock could not be read; the last reading is carried on"),
        }
    }
}

/// Keeps one consumer session open, whatever happens to the broker, and writes the settlements of its deliveries.
struct Supervisor {
    settings: Settings,
    inbox: mpsc::UnboundedSender<Delivered>,
    settlements: mpsc::UnboundedReceiver<Vec<(Receipt, Settlement)>>,
    phase: watch::Receiver<Phase>,
    next_session: u64,
}

impl Supervisor {
    async fn run(mut self, first: Option<Session>) {
        let mut session = first;
        let mut pauses = Pauses::new();
        loop {
            if let Some(open) = session.take() {
                // Only a session that was opened resets the patience.
                pauses = Pauses::new();
                self.attend(open).await;
            }
            if !self.wait_until_wanted().await {
                return;
            }
            match Session::open(&self.settings, self.next_session, self.inbox.clone()).await {
                Ok(open) => {
                    info!(session = self.next_session, "consuming again");
                    session = Some(open);
                }
                Err(fault) => {
                    let pause = pauses.next_pause();
                    warn!(%fault, again_in_ms = pause.as_millis(), "no consumer session");
                    self.pause(pause).await;
                }
            }
            self.next_session += 1;
        }
    }

    /// Settles what comes until the session ends or is no longer wanted.
    async fn attend(&mut self, session: Session) {
        let mut cancelled = false;
        loop {
            let phase = *self.phase.borrow_and_update();
            match phase {
                Phase::Consume => {}
                Phase::Drain if cancelled => {}
                Phase::Drain => {
                    session.cancel().await;
                    cancelled = true;
                }
                Phase::Rest | Phase::Close => {
                    while let Ok(settlements) = self.settlements.try_recv() {
                        if let Err(error) = session.settle(&settlements).await {
                            warn!(%error, "the last deliveries could not be settled; the broker delivers them again");
                        }
                    }
                    session.close().await;
                    return;
                }
            }
            tokio::select! {
                why = session.ended(), if !cancelled => {
                    warn!(%why, "the consumer session ended; the broker delivers again what was not acknowledged");
                    return session.close().await;
                }
                Some(settlements) = self.settlements.recv() => {
                    if let Err(error) = session.settle(&settlements).await {
                        warn!(%error, "deliveries could not be settled; the session is over");
                        return session.close().await;
                    }
                }
                _ = self.phase.changed() => {}
            }
        }
    }

    /// Returns false when there will be no further session.
    async fn wait_until_wanted(&mut self) -> bool {
        let phase = self.phase.wait_for(|phase| *phase != Phase::Rest).await.map_or(Phase::Close, |phase| *phase);
        phase == Phase::Consume
    }

    /// Waits, but not for a worker that stops.
    async fn pause(&mut self, pause: Duration) {
        let stopping = self.phase.wait_for(|phase| matches!(phase, Phase::Drain | Phase::Close));
        let _ = tokio::time::timeout(pause, stopping).await;
    }
}

/// Announces until told to end, then sends what is left.
async fn announce(mut announcer: Announcer, poll: Duration, now: Arc<Notify>, ends: CancellationToken) {
    let mut pauses = Pauses::new();
    let mut forget_at = tokio::time::Instant::now() + FORGET_EVERY;
    loop {
        let pause = match announcer.round().await {
            Ok(Round::Sent(count)) => {
                debug!(count, "events announced");
                pauses = Pauses::new();
                Duration::ZERO
            }
            Ok(Round::Empty) => poll,
            Ok(Round::NotOurs) => poll.max(Duration::from_secs(1)),
            Err(fault) => {
                let pause = pauses.next_pause();
                warn!(%fault, "events could not be announced; they stay in the outbox and are tried again");
                pause
            }
        };
        if ends.is_cancelled() && !pause.is_zero() {
            return announcer.resign().await;
        }
        if tokio::time::Instant::now() >= forget_at {
            forget_at = tokio::time::Instant::now() + FORGET_EVERY;
            if let Err(fault) = announcer.forget_old().await {
                warn!(%fault, "old events could not be deleted from the outbox");
            }
        }
        tokio::select! {
            () = now.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}
