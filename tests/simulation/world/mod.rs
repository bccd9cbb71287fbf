//! A world without I/O for the production engine, hold and wheel: orders, a broker, a database, and time, all in
//! memory.
//!
//! Behaves as the real servers do, as far as it matters to an order: rows are closed by one atomic statement that skips
//! locked rows, queues are first in first out, an unacknowledged message is redelivered when its session ends, a slot
//! releases only its head. Decides nothing about an alarm; known bugs can be switched on ([`Mutant`]). Records whatever
//! takes effect ([`Event`]).

mod brake;
mod broker;
mod closing;
mod database;
mod mutant_engine;
mod provider;
mod shop;
mod worker;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use order_timeout_core::alarm::{DeliveredAlarm, Receipt, Returns, SourceQueue};
use order_timeout_core::delay::wheel::{Ring, Wheel};
use order_timeout_core::engine::{ClosingPolicy, Lease, Policy};
use order_timeout_core::kind::Kind;
use order_timeout_core::message::Alarm;
use order_timeout_core::order::{Deadline, OrderId, Timestamp};

use crate::events::Event;
use brake::Brake;
pub use brake::BrakeSetup;
use broker::Waiting;
use closing::CloseAttempt;
use database::OutboxRow;
pub use database::{Row, Status};
pub use provider::{CustomerAct, Truth};
pub use shop::Scheduling;
pub use worker::{Fault, PendingSort, WORKERS};

/// A bug that has been shipped somewhere, or might be, and that the oracle must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    /// None: the production code in a correct world.
    Sound,

    // In the steps around the engine.
    AckBeforeCommit,
    /// Select, then update by id alone.
    NoStatusGuard,
    /// The sweep's close does not skip a row that a payment has locked.
    SweepIgnoresPayment,
    /// Stock is returned for every alarm that finds the order closed.
    StockPerDelivery,
    /// The old message of a re-armed alarm is acknowledged before the new one is confirmed.
    AckBeforeConfirm,
    /// A slot is written again before its last lap has left it.
    TwoLapsInOneSlot,
    /// A retry comes back at once, however long it should wait at the broker.
    RetriesAtOnce,

    // In the engine's own rules.
    /// An alarm that is held and delivered again in a newer session is acknowledged as a duplicate of itself.
    AcknowledgesRedelivery,
    /// An order that is not due yet counts as finished.
    DropsNotDue,
    /// A locked row counts as closed.
    TakesBusyForClosed,
    /// An order that the sweep could not close is never retried.
    ForgetsFailed,
    /// A pass of the sweep ends at an order that cannot be closed.
    FailureEndsPass,
    /// The sweep runs once a minute.
    SweepsEveryMinute,
    /// An alarm is held longer than to its deadline.
    HoldsTooLong,
    /// Orders are never read ahead, however late alarms are.
    ReadsNothingAhead,
    /// Nothing follows from alarms that are missing shortly before their deadlines.
    OverlooksMissingAlarms,

    /// A worker that starts does not read that closing is paused already.
    BrakeForgetsOnRestart,

    // In the closing protocol with a payment provider.
    /// An attempt counts as closed if the provider gives no answer.
    ReleasesOnUnknown,
    /// A settlement compares neither the status nor the lease.
    SettlesTwice,
    /// An attempt is cancelled without being asked about first.
    CancelsBeforeAsking,
    /// After a crash, what was to be cancelled counts as closed, whatever the answer was.
    ResumeSkipsVerdict,
    /// An order is closed as soon as one of its attempts is.
    OneVerdictDecides,
    /// The close statement takes no notice of attempts.
    ClosesUnasked,
}

impl Mutant {
    /// Whether its bug is in the closing protocol with a provider.
    pub fn needs_provider(self) -> bool {
        matches!(
            self,
            Self::ReleasesOnUnknown
                | Self::SettlesTwice
                | Self::CancelsBeforeAsking
                | Self::ResumeSkipsVerdict
                | Self::OneVerdictDecides
                | Self::ClosesUnasked
        )
    }
}

pub struct World {
    mutant: Mutant,
    seen: BTreeSet<Event>,
    /// Whether any message moved in this step of undisturbed time, or any order was tried.
    has_changed: bool,
    first_worker: usize,
    stops_at: Option<PendingSort>,
    /// The broker's time, which only goes forward.
    now: Timestamp,
    /// How far the database's clock was set ahead of it, or back.
    clock_set_ms: i64,
    clock_was_set: bool,
    /// By how much the workers' idea of the database's time is wrong.
    skew_ms: i64,
    clocks_were_off: bool,
    pub rows: BTreeMap<OrderId, Row>,
    database_is_away: bool,
    /// Rows not yet marked as sent; marked rows are gone.
    alarm_outbox: Vec<OutboxRow>,
    parked: Vec<OrderId>,
    broker_is_away: bool,
    /// The broker confirms nothing that the worker publishes.
    broker_refuses: bool,
    broker_is_silent: bool,
    wheel: Wheel,
    timeout: VecDeque<DeliveredAlarm>,
    arm: VecDeque<DeliveredAlarm>,
    slots: BTreeMap<(usize, u16), VecDeque<Waiting>>,
    unacknowledged: BTreeMap<Receipt, (SourceQueue, DeliveredAlarm)>,
    sessions: u64,
    workers: [Option<worker::Worker>; WORKERS],
    /// How many alarms there were for orders that do not exist.
    alarms_without_order: usize,
    /// The longest time that a slot kept a message behind another, as long as the clock by which slots are chosen was
    /// not set.
    pub worst_blocked: Duration,
    /// A retry that waits at the broker for too short or much too long.
    pub misplaced_retry: Option<String>,
    has_provider: bool,
    provider_is_away: bool,
    /// How often a worker was started.
    starts: u32,
    /// The number of the pause of closing that lasts, as its row in the database has it.
    pause: Option<u32>,
    pauses: u32,
    /// `None`: it is off.
    brake: Option<Brake>,
    /// Work that closes orders, handed out during a pause that the worker had read.
    pub closed_in_pause: Option<String>,
    close_attempts: BTreeMap<OrderId, CloseAttempt>,
    leases: i64,
    /// Attempts that were asked about, with the lease.
    asked: BTreeSet<(Lease, String)>,
    /// An attempt that was cancelled although it was not asked about under the same lease.
    pub cancelled_unasked: Option<String>,
}

fn ring(name: &str, unit_s: u64, early_ms: u64) -> Ring {
    Ring { name: name.into(), unit: Duration::from_secs(unit_s), slots: 12, early: Duration::from_millis(early_ms) }
}

/// A worker's loop turns at least this often even if nothing wakes it (`runtime/event_loop.rs`).
const MAX_SLEEP: Duration = Duration::from_secs(1);

/// How every worker decides. `missing_for`, `max_attempts` and `requeue_after` are small, so that they end within a
/// history.
pub fn policy() -> Policy {
    Policy {
        kind: Kind::ORDER,
        other_kinds: BTreeSet::new(),
        hold_max: Duration::from_millis(3_500),
        max_delay: Duration::from_secs(3_600),
        batch_size: 3,
        linger: Duration::from_millis(2),
        closers: 2,
        retry_first: Duration::from_millis(50),
        retry_longest: Duration::from_secs(1),
        missing_for: Duration::from_secs(5),
        max_attempts: 2,
        requeue_after: Duration::from_secs(4),
        longest_try: Duration::from_secs(8),
        sweep_every: Duration::from_millis(250),
        sweep_grace: Duration::from_millis(500),
        sweep_page: 4,
        look_ahead: Duration::from_millis(500),
        lead: Duration::from_secs(20),
        has_no_alarms: false,
        pause_share: 1.0,
    }
}

/// How the closing protocol waits. Short, so that its rounds end within a history.
pub fn closing_policy() -> ClosingPolicy {
    ClosingPolicy {
        queues: ["", "paypal", "stripe"].map(|queue| (queue.to_owned(), 2)).into(),
        lease: Duration::from_secs(2),
        resume_every: Duration::from_secs(1),
        in_progress_wait: Duration::from_millis(1_500),
        retry_first: Duration::from_millis(500),
        retry_longest: Duration::from_secs(2),
        max_rounds: 4,
        batch_size: 3,
    }
}

impl World {
    pub fn new(mutant: Mutant, has_provider: bool, brake: Option<BrakeSetup>) -> Self {
        Self {
            mutant,
            has_provider,
            brake: brake.map(Brake::new),
            provider_is_away: false,
            starts: 0,
            pause: None,
            pauses: 0,
            closed_in_pause: None,
            close_attempts: BTreeMap::new(),
            leases: 0,
            asked: BTreeSet::new(),
            cancelled_unasked: None,
            seen: BTreeSet::new(),
            has_changed: false,
            first_worker: 0,
            stops_at: None,
            now: Timestamp::from_unix_micros(1_000_000_000_000),
            clock_set_ms: 0,
            clock_was_set: false,
            skew_ms: 0,
            clocks_were_off: false,
            rows: BTreeMap::new(),
            database_is_away: false,
            alarm_outbox: Vec::new(),
            parked: Vec::new(),
            broker_is_away: false,
            broker_refuses: false,
            broker_is_silent: false,
            wheel: Wheel::new(vec![ring("1s", 1, 500), ring("5s", 5, 1_000)]).expect("these rings mesh"),
            timeout: VecDeque::new(),
            arm: VecDeque::new(),
            slots: BTreeMap::new(),
            unacknowledged: BTreeMap::new(),
            sessions: 0,
            workers: [const { None }; WORKERS],
            alarms_without_order: 0,
            worst_blocked: Duration::ZERO,
            misplaced_retry: None,
        }
    }

    /// What has taken effect so far.
    pub fn seen(&self) -> &BTreeSet<Event> {
        &self.seen
    }

    pub fn note(&mut self, event: Event) {
        self.seen.insert(event);
    }

    fn note_if(&mut self, took_effect: bool, event: Event) {
        if took_effect {
            self.note(event);
        }
    }

    // -------------------------------------------------------------------------------------------------- clocks

    pub fn database_time(&self) -> Timestamp {
        shifted(self.now, self.clock_set_ms)
    }

    fn worker_time(&self) -> Timestamp {
        shifted(self.database_time(), self.skew_ms)
    }

    /// Makes the workers' idea of the database's time wrong by this much.
    pub fn skew(&mut self, ms: i64) {
        self.skew_ms = ms;
        self.clocks_were_off |= ms != 0;
        self.note_if(ms != 0, Event::WorkerClockSkewed);
    }

    pub fn workers_are_behind(&self) -> Duration {
        Duration::from_millis((-self.skew_ms).max(0).unsigned_abs())
    }

    /// Sets the database's clock, as a person does or a failover to a server with another clock.
    pub fn set_clock(&mut self, ms: i64) {
        self.note_if(ms > self.clock_set_ms, Event::ClockSetForward);
        self.note_if(ms < self.clock_set_ms, Event::ClockSetBack);
        self.clock_set_ms = ms;
        self.clock_was_set = true;
    }

    /// Whether all clocks have always agreed.
    pub fn clocks_agree(&self) -> bool {
        !self.clock_was_set && !self.clocks_were_off
    }

    // ------------------------------------------------------------------------------------------ the course of time

    /// Lets undisturbed time pass to the next moment at which anything happens, no further than `end` (in the broker's
    /// time): a slot releases its head, or a worker wants to be woken. Then the relay runs, and every worker does what
    /// there is to do. Returns whether anything changed.
    ///
    /// If a worker does not become idle, or would be woken at once again.
    pub fn run_to_next_event(&mut self, end: Timestamp) -> Result<bool, String> {
        let latest = self.now + MAX_SLEEP;
        let next = [self.next_wake(), self.next_release()].into_iter().flatten().chain([latest, end]).min();
        self.has_changed = false;
        self.advance(next.unwrap_or(latest).since(self.now));
        self.relay();
        self.mark_relayed(false);
        self.run_workers()?;
        Ok(self.has_changed)
    }

    /// The same, but the first action of this sort stays pending. Returns whether there is one.
    ///
    /// # Errors
    /// As above.
    pub fn run_to_next(&mut self, sort: PendingSort, end: Timestamp) -> Result<bool, String> {
        self.stops_at = Some(sort);
        let result = self.run_to_next_event(end);
        self.stops_at = None;
        result.map(|_| (0..WORKERS).any(|worker| self.has_pending(worker, sort)))
    }

    /// Lets this much time pass at once, and then every worker does what there is to do.
    ///
    /// # Errors
    /// As above.
    pub fn skip(&mut self, time: Duration) -> Result<(), String> {
        self.advance(time);
        self.run_workers()
    }

    /// The broker's time.
    pub fn now(&self) -> Timestamp {
        self.now
    }

    // -------------------------------------------------------------------------------------------------- the pause

    /// The brake of any worker trips, or a person pauses closing.
    pub fn pause_closing(&mut self) {
        if self.pause.is_none() && !self.database_is_away {
            self.pauses += 1;
            self.pause = Some(self.pauses);
            self.note(Event::ClosingPaused);
        }
    }

    pub fn resume_closing(&mut self) {
        if !self.database_is_away && self.pause.take().is_some() {
            self.note(Event::ClosingResumed);
            let now = self.database_time();
            if let Some(brake) = &mut self.brake {
                brake.resumed_at = brake.resumed_at.max(Some(now));
            }
        }
    }

    /// How often closing was paused.
    pub fn pauses(&self) -> u32 {
        self.pauses
    }

    pub fn closing_is_paused(&self) -> bool {
        self.pause.is_some()
    }

    /// Ends every fault; pending actions stay as they are.
    pub fn end_faults(&mut self) {
        self.set_database_away(false);
        self.resume_closing();
        self.set_broker_away(false);
        self.set_broker_refuses(false);
        self.set_broker_silent(false);
        self.skew(0);
        self.set_provider_away(false);
        self.end_payments_in_progress();
        (0..self.rows.len()).for_each(|row| self.refuse(row, false));
        self.commit_payments();
    }

    /// The orders that still have an alarm: at the broker, with a worker, in the outbox, or parked.
    pub fn orders_with_alarm(&self) -> BTreeSet<&OrderId> {
        let messages = self.messages().map(|(alarm, _)| alarm.order_id());
        messages.chain(&self.parked).chain(self.alarm_outbox.iter().map(|row| &row.order_id)).collect()
    }

    /// The orders with an alarm that will be in time if nothing more goes wrong: one that was not tried before, for the
    /// row's deadline or an earlier one, and not on its way back from a failure.
    pub fn with_timely_alarm(&self) -> BTreeSet<OrderId> {
        if self.broker_is_away || self.broker_refuses || self.broker_is_silent || !self.clocks_agree() {
            return BTreeSet::new();
        }
        let at_the_broker = self.messages().filter(|(alarm, is_retry)| alarm.attempt == 0 && !is_retry);
        let at_the_broker = at_the_broker.map(|(alarm, _)| (alarm.order_id(), alarm.deadline()));
        // The relay leaves overdue orders to the sweep.
        let relayed_soon = self.database_time() + Duration::from_secs(1);
        let not_relayed_yet = self.alarm_outbox.iter().filter(|row| !row.confirmed && row.deadline > relayed_soon);
        at_the_broker
            .chain(not_relayed_yet.map(|row| (&row.order_id, row.deadline)))
            .filter(|(order_id, deadline)| self.rows.get(*order_id).is_some_and(|row| *deadline <= row.deadline))
            .map(|(order_id, _)| order_id.clone())
            .collect()
    }

    /// Every unacknowledged message at the broker, and whether it waits there after a failure.
    fn messages(&self) -> impl Iterator<Item = (&DeliveredAlarm, bool)> {
        let slots = self.slots.values().flatten().map(|waiting| (&waiting.alarm, waiting.is_retry));
        let queues = self.timeout.iter().chain(&self.arm).map(|alarm| (alarm, false));
        slots.chain(queues).chain(self.unacknowledged.values().map(|(_, alarm)| (alarm, false)))
    }
}

fn shifted(moment: Timestamp, ms: i64) -> Timestamp {
    let by = Duration::from_millis(ms.unsigned_abs());
    if ms < 0 { moment - by } else { moment + by }
}

fn alarm(order_id: &OrderId, deadline: Deadline, first_published_at: Timestamp) -> DeliveredAlarm {
    let alarm = Alarm::new(order_id.clone(), deadline);
    DeliveredAlarm {
        alarm,
        attempt: 0,
        first_published_at: Some(first_published_at),
        traceparent: None,
        returns: Returns::default(),
    }
}
