//! A world without I/O for the production desk, hold and wheel: orders, a broker, a database, and time, all in memory.
//!
//! Keeps to what the real ones do, as far as an order's life can tell: rows are closed by one atomic statement that
//! skips locked rows, queues are first in first out, an unacknowledged message is delivered again when its session ends,
//! a slot lets go of its head only. Decides nothing about an alarm; known bugs can be switched on ([`Mutant`]).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use order_timeout::alarm::{Alarm, ArmJob, Delivered, Inlet, Parcel, Receipt, Settlement, Wanted};
use order_timeout::desk::{Answer, Batch, Desk, Errand, News, Policy};
use order_timeout::message::TimeoutDue;
use order_timeout::order::{
    CloseFault, ClosedBy, Deadline, Finding, Found, Moment, OrderId, Outcome, Overdue, SweepPage, SweepPlace, SweptPage,
};
use order_timeout::wheel::{Place, Ring, Wheel};

/// A bug that somebody has shipped somewhere, and that the oracle must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    /// None: the production code in a correct world.
    Sound,
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
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Unpaid,
    Paid,
    Closed,
}

#[derive(Debug, Clone)]
pub struct Row {
    pub status: Status,
    pub deadline: Deadline,
    /// A payment holds the row's lock.
    pub paying: bool,
    pub closes: u32,
    pub stock_returned: u32,
    pub events: u32,
    pub closed_early: bool,
    /// Whether its alarm reached the broker or the outbox, so that it must never be without one.
    pub has_alarm: bool,
    /// A trigger refuses to close it, and fails whatever batch it is in.
    pub refuses: bool,
}

/// How an order's alarm is scheduled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheduling {
    /// Published after the commit.
    Published,
    /// In the order's transaction.
    InTransaction,
    /// Its publisher died: only the sweep knows of it.
    Forgotten,
}

#[derive(Debug, Clone)]
struct Waiting {
    alarm: Alarm,
    fires_at: Moment,
}

/// An errand between its hand-out and its report.
#[derive(Debug)]
enum Underway {
    Close { batch: Batch, read: Option<HashMap<OrderId, Finding>>, answer: Option<Answer> },
    Arm { jobs: Vec<ArmJob>, written: bool },
    Park { parcels: Vec<(Parcel, Receipt)>, written: bool },
    Sweep { page: SweepPage, found: Option<SweptPage> },
}

/// What becomes of an errand's next stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Done,
    /// It happens, and the worker hears of a broken connection.
    AnswerIsLost,
    /// A deadlock or a timeout: nothing happens. Only a close can have it.
    Transient,
}

/// A running worker.
struct Worker {
    desk: Desk,
    /// `None` while the broker is away, or while the desk wants no deliveries.
    session: Option<u64>,
    next_tag: u64,
    underway: Vec<Underway>,
    stopping: bool,
}

/// How many workers there are, running or not.
pub const WORKERS: usize = 2;

pub struct World {
    mutant: Mutant,
    /// The broker's time, which only goes forward.
    now: Moment,
    /// How far the database's clock was set ahead of it, or back.
    clock_set_ms: i64,
    /// By how much the worker's idea of the database's time is wrong.
    pub skew_ms: i64,
    pub rows: BTreeMap<OrderId, Row>,
    pub database_is_away: bool,
    broker_is_away: bool,
    /// The broker confirms nothing that the worker publishes.
    pub broker_refuses: bool,
    wheel: Wheel,
    timeout: VecDeque<Alarm>,
    arm: VecDeque<Alarm>,
    slots: BTreeMap<(usize, u16), VecDeque<Waiting>>,
    unacknowledged: BTreeMap<Receipt, (Inlet, Alarm)>,
    parked: Vec<OrderId>,
    /// Order, deadline, and whether the broker has confirmed it; marked rows are gone.
    alarm_outbox: Vec<(OrderId, Deadline, bool)>,
    workers: [Option<Worker>; WORKERS],
    sessions: u64,
    /// The worst that a slot kept a message behind another, as long as nobody had set the clock by which slots are
    /// chosen.
    pub worst_blocked: Duration,
    clock_was_set: bool,
}

fn ring(name: &str, unit_s: u64, early_ms: u64) -> Ring {
    Ring { name: name.into(), unit: Duration::from_secs(unit_s), slots: 12, early: Duration::from_millis(early_ms) }
}

fn policy() -> Policy {
    Policy {
        hold_max: Duration::from_millis(3_500),
        max_delay: Duration::from_secs(3_600),
        batch_size: 3,
        linger: Duration::from_millis(2),
        closers: 2,
        retry_first: Duration::from_millis(50),
        retry_longest: Duration::from_secs(1),
        missing_for: Duration::from_secs(30),
        max_attempts: 3,
        away_patience: Duration::from_secs(10),
        sweep_every: Duration::from_millis(250),
        sweep_grace: Duration::from_millis(500),
        sweep_page: 4,
    }
}

impl World {
    pub fn new(mutant: Mutant) -> Self {
        Self {
            mutant,
            now: Moment::from_unix_micros(1_000_000_000_000),
            clock_set_ms: 0,
            skew_ms: 0,
            rows: BTreeMap::new(),
            database_is_away: false,
            broker_is_away: false,
            broker_refuses: false,
            wheel: Wheel::new(vec![ring("1s", 1, 500), ring("5s", 5, 1_000)]).expect("these rings mesh"),
            timeout: VecDeque::new(),
            arm: VecDeque::new(),
            slots: BTreeMap::new(),
            unacknowledged: BTreeMap::new(),
            parked: Vec::new(),
            alarm_outbox: Vec::new(),
            workers: [const { None }; WORKERS],
            sessions: 0,
            worst_blocked: Duration::ZERO,
            clock_was_set: false,
        }
    }

    // ------------------------------------------------------------------------------------------------ the shop

    pub fn create(&mut self, delay: Duration, scheduling: Scheduling) {
        let order_id = OrderId::new(format!("order-{}", self.rows.len())).expect("a good id");
        let now = self.database_time();
        let deadline = now + delay;
        let has_alarm = match scheduling {
            Scheduling::Published if self.broker_is_away => false,
            Scheduling::Published => {
                self.arm.push_back(alarm(&order_id, deadline, now));
                true
            }
            Scheduling::InTransaction => {
                self.alarm_outbox.push((order_id.clone(), deadline, false));
                true
            }
            Scheduling::Forgotten => false,
        };
        let row = Row {
            status: Status::Unpaid,
            deadline,
            paying: false,
            closes: 0,
            stock_returned: 0,
            events: 0,
            closed_early: false,
            has_alarm,
            refuses: false,
        };
        self.rows.insert(order_id, row);
    }

    fn nth_row(&mut self, n: usize) -> Option<&mut Row> {
        let count = self.rows.len();
        self.rows.values_mut().nth(n.checked_rem(count)?)
    }

    /// Takes the row's lock and finds it unpaid, or gives up.
    pub fn begin_payment(&mut self, n: usize) {
        if let Some(row) = self.nth_row(n) {
            row.paying |= row.status == Status::Unpaid;
        }
    }

    /// Commits every payment that is under way.
    pub fn commit_payments(&mut self) {
        for row in self.rows.values_mut().filter(|row| row.paying) {
            row.paying = false;
            row.status = Status::Paid;
        }
    }

    /// Sets another deadline, later or earlier.
    pub fn extend(&mut self, n: usize, delay: Duration) {
        let now = self.database_time();
        if let Some(row) = self.nth_row(n).filter(|row| row.status == Status::Unpaid && !row.paying) {
            row.deadline = now + delay;
        }
    }

    /// A trigger on the orders table begins, or ceases, to refuse this one.
    pub fn refuse(&mut self, n: usize, refuses: bool) {
        if let Some(row) = self.nth_row(n) {
            row.refuses = refuses;
        }
    }

    // -------------------------------------------------------------------------------------------------- clocks

    fn database_time(&self) -> Moment {
        shifted(self.now, self.clock_set_ms)
    }

    fn worker_time(&self) -> Moment {
        shifted(self.database_time(), self.skew_ms)
    }

    /// Somebody sets the database's clock, or another server with another clock takes over.
    pub fn set_clock(&mut self, ms: i64) {
        self.clock_set_ms = ms;
        self.clock_was_set = true;
    }

    // ---------------------------------------------------------------------------------------------- the broker

    /// Lets time pass and slots let go.
    pub fn advance(&mut self, by: Duration) {
        self.now = self.now + by;
        if self.broker_is_away {
            return;
        }
        let now = self.now;
        for ((ring, _), slot) in &mut self.slots {
            while slot.front().is_some_and(|head| head.fires_at <= now) {
                let let_go = slot.pop_front().expect("it has a head");
                // What waits behind a head that fires later is blocked.
                let target = if *ring == 0 { &mut self.timeout } else { &mut self.arm };
                target.push_back(let_go.alarm);
            }
            let blocked = slot.iter().map(|waiting| now.since(waiting.fires_at)).max().unwrap_or_default();
            if !self.clock_was_set {
                self.worst_blocked = self.worst_blocked.max(blocked);
            }
        }
    }

    /// Goes away with every session, or comes back.
    pub fn set_broker_away(&mut self, away: bool) {
        self.broker_is_away = away;
        if away {
            (0..WORKERS).for_each(|worker| self.lose_session(worker));
        }
    }

    /// The broker delivers again what a lost acknowledgement had settled.
    pub fn duplicate(&mut self, n: usize) {
        let messages: Vec<Alarm> =
            self.timeout.iter().chain(self.unacknowledged.values().map(|(_, alarm)| alarm)).cloned().collect();
        if !messages.is_empty() {
            self.timeout.push_back(messages[n % messages.len()].clone());
        }
    }

    /// What was not acknowledged in a session is delivered again.
    fn end_session(&mut self, session: u64) {
        let mut ended = Vec::new();
        self.unacknowledged.retain(|receipt, message| {
            let stays = receipt.session != session;
            if !stays {
                ended.push(message.clone());
            }
            stays
        });
        for (inlet, alarm) in ended.into_iter().rev() {
            if inlet == Inlet::Arm { self.arm.push_front(alarm) } else { self.timeout.push_front(alarm) }
        }
    }

    fn settle(&mut self, settlements: Vec<(Receipt, Settlement)>) {
        for (receipt, settlement) in settlements {
            let Some((inlet, alarm)) = self.unacknowledged.remove(&receipt) else { continue };
            if settlement == Settlement::Requeue {
                if inlet == Inlet::Arm { self.arm.push_front(alarm) } else { self.timeout.push_front(alarm) }
            }
        }
    }

    // ---------------------------------------------------------------------------------------------- the worker

    pub fn start(&mut self, worker: usize) {
        self.workers[worker].get_or_insert_with(|| Worker {
            desk: Desk::new(policy()),
            session: None,
            next_tag: 1,
            underway: Vec::new(),
            stopping: false,
        });
    }

    /// kill -9: what was executed stays executed, nobody is told.
    pub fn crash(&mut self, worker: usize) {
        if let Some(session) = self.workers[worker].take().and_then(|worker| worker.session) {
            self.end_session(session);
        }
    }

    /// SIGTERM: it takes nothing new, finishes what it has begun, and ends.
    pub fn stop(&mut self, worker: usize) {
        if let Some(worker) = self.workers[worker].as_mut().filter(|worker| !worker.stopping) {
            worker.stopping = true;
            worker.desk.drain();
        }
    }

    pub fn lose_session(&mut self, worker: usize) {
        let now = self.worker_time();
        let Some(worker) = &mut self.workers[worker] else { return };
        if let Some(session) = worker.session.take() {
            worker.desk.hear(News::SessionEnded, now);
            self.end_session(session);
        }
    }

    /// Opens and closes the session as the desk wants it, and as the broker lets it.
    fn supervise(&mut self, worker: &mut Worker, now: Moment) {
        match (worker.session, worker.desk.wants_deliveries(now)) {
            _ if worker.stopping => {}
            (Some(session), false) => {
                worker.session = None;
                worker.desk.hear(News::SessionEnded, now);
                self.end_session(session);
            }
            (None, true) if !self.broker_is_away => {
                self.sessions += 1;
                (worker.session, worker.next_tag) = (Some(self.sessions), 1);
                worker.desk.hear(News::SessionOpened(self.sessions), now);
            }
            (None, _) | (Some(_), true) => {}
        }
    }

    /// One turn of a worker's loop: take what is delivered, hand out what can be done.
    pub fn turn(&mut self, n: usize) {
        let now = self.worker_time();
        let Some(mut worker) = self.workers[n].take() else { return };
        self.supervise(&mut worker, now);
        if let Some(session) = worker.session.filter(|_| !worker.stopping) {
            self.deliver(&mut worker, session, now);
        }
        self.hand_out(&mut worker, now);
        if worker.stopping && worker.underway.is_empty() && worker.desk.closers_are_idle() {
            if let Some(session) = worker.session {
                self.end_session(session);
            }
        } else {
            self.workers[n] = Some(worker);
        }
    }

    fn deliver(&mut self, worker: &mut Worker, session: u64, now: Moment) {
        for inlet in [Inlet::Timeout, Inlet::Arm] {
            let queue = if inlet == Inlet::Arm { &mut self.arm } else { &mut self.timeout };
            for alarm in queue.drain(..) {
                let receipt = Receipt { session, channel: 0, tag: worker.next_tag };
                worker.next_tag += 1;
                self.unacknowledged.insert(receipt, (inlet, alarm.clone()));
                worker.desk.hear(News::Delivered(Delivered { receipt, inlet, content: Ok(alarm) }), now);
            }
        }
    }

    fn hand_out(&mut self, worker: &mut Worker, now: Moment) {
        for errand in worker.desk.errands(now) {
            match errand {
                Errand::Settle(settlements) => self.settle(settlements),
                Errand::Close(batch) => {
                    if self.mutant == Mutant::AckBeforeCommit {
                        self.settle(receipts(&batch).map(|receipt| (receipt, Settlement::Ack)).collect());
                    }
                    worker.underway.push(Underway::Close { batch, read: None, answer: None });
                }
                Errand::Arm(jobs) => {
                    if self.mutant == Mutant::AckBeforeConfirm {
                        self.settle(jobs.iter().map(|job| (job.receipt, Settlement::Ack)).collect());
                    }
                    worker.underway.push(Underway::Arm { jobs, written: false });
                }
                Errand::Park(parcels) => worker.underway.push(Underway::Park { parcels, written: false }),
                Errand::Sweep(page) => worker.underway.push(Underway::Sweep { page, found: None }),
            }
        }
    }

    /// Takes the nth errand of a worker one stage further: it happens, then it is reported.
    pub fn progress(&mut self, worker: usize, n: usize, fate: Fate) {
        let Some(mut running) = self.workers[worker].take() else { return };
        if !running.underway.is_empty() {
            let errand = running.underway.swap_remove(n % running.underway.len());
            let now = self.worker_time();
            match self.next_stage(errand, fate) {
                Ok(underway) => running.underway.push(underway),
                Err(news) => running.desk.hear(news, now),
            }
        }
        self.workers[worker] = Some(running);
    }

    /// The errand one stage further, or the news of its end.
    fn next_stage(&mut self, errand: Underway, fate: Fate) -> Result<Underway, News> {
        match errand {
            Underway::Close { batch, answer: Some(answer), .. } => Err(News::Closed(batch, answer)),
            Underway::Close { batch, read: None, .. } if self.mutant == Mutant::NoStatusGuard => {
                let read = Some(batch.cases.iter().filter_map(|case| self.look_at(&case.alarm.due.order_id)).collect());
                Ok(Underway::Close { batch, read, answer: None })
            }
            Underway::Close { batch, read, .. } => {
                let answer = Some(self.answer(&batch, read, fate));
                Ok(Underway::Close { batch, read: None, answer })
            }
            Underway::Arm { jobs, written: false } if self.broker_refuses || self.broker_is_away => {
                Err(News::NotArmed(jobs))
            }
            Underway::Arm { jobs, written: false } => {
                jobs.iter().for_each(|job| self.write_alarm(job));
                Ok(Underway::Arm { jobs, written: true })
            }
            Underway::Arm { jobs, .. } if fate == Fate::AnswerIsLost => Err(News::NotArmed(jobs)),
            Underway::Arm { jobs, .. } => Err(News::Armed(jobs.into_iter().map(|job| job.receipt).collect())),
            Underway::Park { parcels, written: false } if self.database_is_away => Err(News::NotParked(parcels)),
            Underway::Park { parcels, written: false } => {
                self.parked.extend(parcels.iter().filter_map(|(parcel, _)| parcel.order_id.clone()));
                Ok(Underway::Park { parcels, written: true })
            }
            Underway::Park { parcels, .. } if fate == Fate::AnswerIsLost => Err(News::NotParked(parcels)),
            Underway::Park { parcels, .. } => {
                Err(News::Parked(parcels.into_iter().map(|(_, receipt)| receipt).collect()))
            }
            Underway::Sweep { found: None, .. } if self.database_is_away => Err(News::NotSwept),
            Underway::Sweep { page, found: None } => {
                let found = Some(self.overdue(&page));
                Ok(Underway::Sweep { page, found })
            }
            Underway::Sweep { found: Some(found), .. } => Err(News::Swept(found)),
        }
    }

    /// What the database answers to a batch.
    fn answer(&mut self, batch: &Batch, read: Option<HashMap<OrderId, Finding>>, fate: Fate) -> Answer {
        let away = || CloseFault::Away("the connection is gone".into());
        let is_refused =
            |id: &OrderId| self.rows.get(id).is_some_and(|row| row.refuses && row.status == Status::Unpaid);
        if self.database_is_away {
            return Err(away());
        }
        if fate == Fate::Transient {
            return Err(CloseFault::Transient("deadlock detected".into()));
        }
        if batch.cases.iter().any(|case| is_refused(case.alarm.order_id())) {
            return Err(CloseFault::OfTheOrder("a trigger says no".into()));
        }
        let found = self.close(batch, read);
        if fate == Fate::AnswerIsLost { Err(away()) } else { Ok(found) }
    }

    fn write_alarm(&mut self, job: &ArmJob) {
        let now = self.worker_time();
        let place = match job.wanted {
            Wanted::BeforeDeadline => self.wheel.place(job.alarm.deadline(), now),
            Wanted::NotBefore(moment) => self.wheel.place_retry(moment, now),
        };
        match place {
            Place::Due => self.timeout.push_back(job.alarm.clone()),
            Place::Slot { ring, slot, ttl } => {
                let slot = if self.mutant == Mutant::TwoLapsInOneSlot { slot % 3 } else { slot };
                let waiting = Waiting { alarm: job.alarm.clone(), fires_at: self.now + ttl };
                self.slots.entry((ring, slot)).or_default().push_back(waiting);
            }
        }
    }

    // -------------------------------------------------------------------------------------------- the database

    fn look_at(&self, order_id: &OrderId) -> Option<(OrderId, Finding)> {
        let row = self.rows.get(order_id)?;
        let outcome = match row.status {
            _ if row.paying => Outcome::Busy,
            Status::Paid => Outcome::Paid,
            Status::Closed => Outcome::AlreadyClosed,
            Status::Unpaid if row.deadline > self.database_time() => Outcome::NotDue,
            Status::Unpaid => Outcome::Closed,
        };
        Some((order_id.clone(), Ok(Found { outcome, deadline: Some(row.deadline) })))
    }

    /// What `sql/close.sql` does, or what was read before is acted on whatever has happened since.
    fn close(&mut self, batch: &Batch, read: Option<HashMap<OrderId, Finding>>) -> HashMap<OrderId, Finding> {
        let (now, mut findings) = (self.database_time(), HashMap::new());
        for order_id in batch.cases.iter().map(|case| &case.alarm.due.order_id) {
            if findings.contains_key(order_id) {
                continue;
            }
            let seen = read.as_ref().map_or_else(
                || self.look_at(order_id),
                |read| read.get_key_value(order_id).map(|(id, finding)| (id.clone(), finding.clone())),
            );
            let Some((order_id, Ok(mut found))) = seen else { continue };
            let row = self.rows.get_mut(&order_id).expect("it was looked at");
            let ignores_lock = self.mutant == Mutant::SweepIgnoresPayment && batch.by == ClosedBy::Sweep;
            if ignores_lock && found.outcome == Outcome::Busy && row.deadline <= now {
                found.outcome = Outcome::Closed;
            }
            if self.mutant == Mutant::StockPerDelivery && found.outcome == Outcome::AlreadyClosed {
                row.stock_returned += 1;
            }
            if found.outcome == Outcome::Closed {
                row.status = Status::Closed;
                row.closes += 1;
                row.stock_returned += 1;
                row.events += 1;
                row.closed_early |= row.deadline > now;
            }
            findings.insert(order_id, Ok(found));
        }
        findings
    }

    /// What `sql/overdue.sql` does.
    fn overdue(&self, page: &SweepPage) -> SweptPage {
        let key = |overdue: &Overdue| (overdue.deadline, overdue.order_id.as_str().to_owned());
        let after = page.after.as_ref().map(|place| (place.deadline, place.id.clone()));
        let unpaid = self.rows.iter().filter(|(_, row)| row.status == Status::Unpaid);
        let mut orders: Vec<Overdue> = unpaid
            .filter(|(_, row)| row.deadline + page.grace <= self.database_time())
            .map(|(id, row)| Overdue { order_id: id.clone(), deadline: row.deadline })
            .filter(|overdue| after.as_ref().is_none_or(|after| key(overdue) > *after))
            .collect();
        orders.sort_by_key(key);
        orders.truncate(page.limit);
        let last = orders.last().filter(|_| orders.len() == page.limit);
        let next = last.map(|last| SweepPlace { deadline: last.deadline, id: last.order_id.as_str().to_owned() });
        SweptPage { orders, next }
    }

    /// The relay's first half: publish what stands in the outbox.
    pub fn relay(&mut self) {
        if self.broker_is_away || self.database_is_away {
            return;
        }
        let now = self.database_time();
        for (order_id, deadline, confirmed) in self.alarm_outbox.iter_mut().filter(|(.., confirmed)| !confirmed) {
            *confirmed = true;
            if *deadline > now {
                self.arm.push_back(alarm(order_id, *deadline, now));
            } else if let Some(row) = self.rows.get_mut(order_id) {
                // Left to the sweep.
                row.has_alarm = false;
            }
        }
    }

    /// The second: mark it. A crash between the two publishes again.
    pub fn mark_relayed(&mut self, crashed: bool) {
        if crashed {
            self.alarm_outbox.iter_mut().for_each(|(.., confirmed)| *confirmed = false);
        } else {
            self.alarm_outbox.retain(|(.., confirmed)| !confirmed);
        }
    }

    /// Whether every worker takes deliveries.
    pub fn all_are_consuming(&self) -> bool {
        self.workers.iter().all(|worker| worker.as_ref().is_some_and(|worker| worker.session.is_some()))
    }

    /// The orders that an alarm still speaks for: at the broker, in somebody's hands, in the outbox, or parked.
    pub fn spoken_for(&self) -> Vec<&OrderId> {
        let slots = self.slots.values().flatten().map(|waiting| &waiting.alarm);
        let messages = self.timeout.iter().chain(&self.arm).chain(slots);
        let messages = messages.chain(self.unacknowledged.values().map(|(_, alarm)| alarm)).map(Alarm::order_id);
        messages.chain(&self.parked).chain(self.alarm_outbox.iter().map(|(order_id, ..)| order_id)).collect()
    }
}

fn shifted(moment: Moment, ms: i64) -> Moment {
    let by = Duration::from_millis(ms.unsigned_abs());
    if ms < 0 { moment - by } else { moment + by }
}

fn alarm(order_id: &OrderId, deadline: Deadline, born: Moment) -> Alarm {
    let due = TimeoutDue { order_id: order_id.clone(), deadline };
    Alarm { due, attempt: 0, born: Some(born), traceparent: None }
}

fn receipts(batch: &Batch) -> impl Iterator<Item = Receipt> {
    use order_timeout::desk::Origin;
    batch.cases.iter().filter_map(|case| match case.origin {
        Origin::Delivered(receipt) => Some(receipt),
        Origin::Swept => None,
    })
}
