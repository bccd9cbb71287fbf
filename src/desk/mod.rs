//! The worker's desk: what is done next with each alarm and each overdue order. Every decision stands here and in the
//! files below: `news.rs` holds the words that go in and out, `verdict.rs` the outcome table, `conclude.rs` what it means
//! for a case, `queue.rs` who waits, `batches.rs` who goes next, `locks.rs` who waits for a lock, `outage.rs` whether
//! anything is closed at all, `sweep.rs` the safety net.
//!
//! Pure: news comes in with the database's time, errands go out. No I/O, no clock, no task. `worker/` runs the errands
//! for real; the same desk can be driven through any interleaving in a test.

mod batches;
mod conclude;
mod locks;
mod news;
mod outage;
mod policy;
mod queue;
mod sweep;
mod verdict;

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use crate::alarm::{Alarm, ArmJob, Delivered, Inlet, Parcel, ParkReason, Receipt, Settlement, Wanted};
use crate::hold::Hold;
use crate::message::TimeoutDue;
use crate::order::{Deadline, Moment, OrderId, Overdue, SweptPage};
use locks::Patience;
pub use news::{Answer, Batch, Case, Errand, News, Origin, Wait};
use outage::Outage;
pub use policy::Policy;
use queue::{Cause, Later, Lingering};
use sweep::{LastTry, Sweep};

/// By how much the time may go back without anybody minding: readings of one clock differ by less.
const LONGEST_JITTER: Duration = Duration::from_secs(1);

/// Those of one moment that are woken before errands are looked at. Enough to fill a batch of the usual size for both of
/// the usual closers; were all of a great many woken at once, the first batch would wait until the last of them is.
const WOKEN_AT_ONCE: usize = 2_048;

/// Alarms parked by one statement: their bodies are 16 KiB at most, so some megabytes. And one statement at a time, so
/// that somebody's heap of nonsense does not take the sweep's connections.
const PARKED_AT_ONCE: usize = 256;

/// Everything the worker has in hand.
#[derive(Debug)]
pub struct Desk {
    policy: Policy,
    hold: Hold<Case>,
    /// Due, never tried.
    fresh: Lingering,
    /// The same, but delivered so late that the sweep is at them as well. Apart from the fresh: while a batch waits for a
    /// lock, nobody else can close those it waits with.
    late: Lingering,
    /// Due, tried before.
    again: Lingering,
    /// Found by the sweep, never tried.
    overdue: Lingering,
    /// Found by the sweep, and somebody else had them when they were tried. Apart from those never tried: that one may be
    /// a worker that cannot close them, and in a batch with others they would take those apart.
    busy: Lingering,
    /// Batches that waited for a lock in vain, with when they did: tried again whole, without waiting.
    hurried: VecDeque<(Batch, Moment)>,
    /// Parts of batches that failed, with when they did.
    parts: VecDeque<(Batch, Moment)>,
    patience: Patience,
    /// Orders that are due and wait for a closer or are with one, and how often each. The sweep leaves them alone.
    in_hand: HashMap<OrderId, u32>,
    idle_closers: usize,
    trouble_had_last_closer: bool,
    outage: Outage,
    sweep: Sweep,
    session: u64,
    broker_is_here: bool,
    draining: bool,
    arm: Vec<ArmJob>,
    arm_later: Later<ArmJob>,
    park: VecDeque<(Parcel, Receipt)>,
    park_later: Later<(Parcel, Receipt)>,
    /// How many are being parked.
    parking: usize,
    settle: Vec<(Receipt, Settlement)>,
    /// The latest time it was told.
    latest: Moment,
    swept: u64,
}

impl Desk {
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        let idle_closers = policy.closers;
        Self {
            policy,
            hold: Hold::default(),
            fresh: Lingering::default(),
            late: Lingering::default(),
            again: Lingering::default(),
            overdue: Lingering::default(),
            busy: Lingering::default(),
            hurried: VecDeque::new(),
            parts: VecDeque::new(),
            patience: Patience::default(),
            in_hand: HashMap::new(),
            idle_closers,
            trouble_had_last_closer: false,
            outage: Outage::default(),
            sweep: Sweep::new(),
            session: 0,
            broker_is_here: false,
            draining: false,
            arm: Vec::new(),
            arm_later: Later::default(),
            park: VecDeque::new(),
            park_later: Later::default(),
            parking: 0,
            settle: Vec::new(),
            latest: Moment::from_unix_micros(i64::MIN),
            swept: 0,
        }
    }

    /// Takes note of what happened. `now` is the database's time.
    pub fn hear(&mut self, news: News, now: Moment) {
        self.note_time(now);
        match news {
            News::Delivered(delivered) => self.receive(delivered, now),
            News::Closed(batch, answer) => self.conclude(batch, answer, now),
            News::Armed(receipts) => {
                self.arm_later.succeeded(&receipts);
                self.acknowledge(receipts);
            }
            News::NotArmed(jobs) => self.arm_again(jobs, Cause::Everybodys, now),
            News::ArmRefused(jobs) => self.arm_again(jobs, Cause::Its, now),
            News::Parked(receipts) => {
                self.parking -= receipts.len();
                self.park_later.succeeded(&receipts);
                self.acknowledge(receipts);
            }
            News::NotParked(parcels) => self.park_again(parcels, Cause::Everybodys, now),
            News::ParkRefused(parcels) => self.park_again(parcels, Cause::Its, now),
            News::Swept(page) => self.take_overdue(page, now),
            News::NotSwept => self.sweep.not_found(&self.policy, now),
            News::SessionOpened(number) => {
                self.session = self.session.max(number);
                self.broker_is_here = true;
                // What came in a session that has ended is delivered again; done here as well it would be done twice.
                self.arm_later.keep_from(number);
                self.park_later.keep_from(number);
            }
            News::SessionEnded => {
                self.broker_is_here = false;
                // Their receipts are void and they are delivered again. One is kept, to find out when arming works.
                self.arm_later.keep_one();
            }
        }
    }

    /// What can be done at `now`. Where more is due than fits into a round, [`Desk::wake_at`] says so.
    pub fn errands(&mut self, now: Moment) -> Vec<Errand> {
        self.note_time(now);
        if self.held_ready_at().is_some_and(|ready_at| ready_at <= now) {
            let lingered_since = now - self.policy.linger;
            for case in self.hold.wake(now, WOKEN_AT_ONCE) {
                self.place(case, now, lingered_since);
            }
        }
        let mut errands = Vec::new();
        while let Some(batch) = self.next_batch(now) {
            errands.push(Errand::Close(batch));
        }
        if self.wants_overdue()
            && let Some(page) = self.sweep.page(&self.policy, self.broker_is_here, now)
        {
            errands.push(Errand::Sweep(page));
        }
        self.arm.extend(self.arm_later.take_ready(now));
        self.park.extend(self.park_later.take_ready(now));
        if !self.arm.is_empty() {
            errands.push(Errand::Arm(std::mem::take(&mut self.arm)));
        }
        if self.parking == 0 && !self.park.is_empty() {
            self.parking = self.park.len().min(PARKED_AT_ONCE);
            errands.push(Errand::Park(self.park.drain(..self.parking).collect()));
        }
        if !self.settle.is_empty() {
            errands.push(Errand::Settle(std::mem::take(&mut self.settle)));
        }
        errands
    }

    /// When [`Desk::errands`] has something new to say even if no news comes.
    #[must_use]
    pub fn wake_at(&self) -> Option<Moment> {
        let sweep_at = self.sweep.ready_at().filter(|_| self.wants_overdue());
        [self.held_ready_at(), self.batch_ready_at(), sweep_at, self.arm_later.ready_at(), self.park_later.ready_at()]
            .into_iter()
            .flatten()
            .min()
    }

    /// When those who are held are woken: with the last that falls due within `linger` of the first, or with whom a batch
    /// is full. Who comes after is known here, so nobody waits for company that does not come.
    fn held_ready_at(&self) -> Option<Moment> {
        let first = self.hold.next_wake()?;
        self.hold.last_wake_by(first + self.policy.linger, self.policy.batch_size)
    }

    /// Whether the broker should go on delivering. Not while nothing could be closed, armed or parked for long: what we
    /// cannot settle must not stay unacknowledged until the broker loses patience.
    #[must_use]
    pub fn wants_deliveries(&self, now: Moment) -> bool {
        let failing_for =
            [self.outage.away_for(now), self.arm_later.failing_for(now), self.park_later.failing_for(now)];
        failing_for.into_iter().flatten().all(|failing_for| failing_for < self.policy.away_patience)
    }

    /// Why the database closes nothing of what is due, if that is so and the orders are not to blame.
    #[must_use]
    pub fn why_it_closes_nothing(&self, now: Moment) -> Option<&str> {
        self.outage.why_nothing(&self.policy, now)
    }

    /// Whether the database does not answer. It is not asked for overdue orders then.
    #[must_use]
    pub fn database_is_away(&self) -> bool {
        self.outage.is_away()
    }

    /// Stops taking anything new and gives back to the broker whatever is not in a closer's hands.
    pub fn drain(&mut self) {
        self.draining = true;
        let mut waiting = self.hold.drain();
        for queue in [&mut self.fresh, &mut self.late, &mut self.again, &mut self.overdue, &mut self.busy] {
            waiting.extend(queue.take(usize::MAX));
        }
        waiting.extend(self.hurried.drain(..).chain(self.parts.drain(..)).flat_map(|(batch, _)| batch.cases));
        let jobs = self.arm_later.drain().into_iter().map(|job| job.receipt);
        let parcels = self.park_later.drain().into_iter().map(|(_, receipt)| receipt);
        let unparked = self.park.drain(..).map(|(_, receipt)| receipt);
        let receipts: Vec<Receipt> =
            waiting.iter().filter_map(receipt_of).chain(jobs).chain(parcels).chain(unparked).collect();
        self.give_back(receipts);
    }

    /// Whether no closer has work in hand.
    #[must_use]
    pub fn closers_are_idle(&self) -> bool {
        self.idle_closers == self.policy.closers
    }

    /// How many alarms wait for their deadline.
    #[must_use]
    pub fn held(&self) -> usize {
        self.hold.len()
    }

    /// Whether a consumer session is open, so that alarms can come.
    #[must_use]
    pub fn broker_is_here(&self) -> bool {
        self.broker_is_here
    }

    /// How many overdue orders could not be closed and are left alone for a while.
    #[must_use]
    pub fn troubled(&self) -> usize {
        self.sweep.troubled()
    }

    /// Whether this overdue order could not be closed when it was last tried.
    #[must_use]
    pub fn is_troubled(&self, order_id: &OrderId) -> bool {
        self.sweep.is_troubled(order_id)
    }

    /// The deadline of the oldest overdue order, as the sweep found it last.
    #[must_use]
    pub fn oldest_overdue(&self) -> Option<Deadline> {
        self.sweep.oldest()
    }

    /// How many overdue orders the sweep has taken up so far because no alarm here spoke for them.
    #[must_use]
    pub fn swept(&self) -> u64 {
        self.swept
    }

    fn note_time(&mut self, now: Moment) {
        if now + LONGEST_JITTER < self.latest {
            self.latest = now;
            self.clock_was_set_back(now);
        }
        self.latest = self.latest.max(now);
    }

    /// Deadlines are the database's time and stand as they are. A pause is a wait: it must not become longer by the
    /// hour that somebody has set the clock back, so every pause ends now.
    fn clock_was_set_back(&mut self, now: Moment) {
        for case in self.hold.drain() {
            self.place(case, now, now);
        }
        for queue in [&mut self.fresh, &mut self.late, &mut self.again, &mut self.overdue, &mut self.busy] {
            queue.clock_was_set_back(now);
        }
        for (_, since) in self.hurried.iter_mut().chain(&mut self.parts) {
            *since = now.min(*since);
        }
        self.patience.clock_was_set_back();
        self.outage.clock_was_set_back(now);
        self.arm_later.clock_was_set_back(now);
        self.park_later.clock_was_set_back(now);
        self.sweep.clock_was_set_back(now);
    }

    fn acknowledge(&mut self, receipts: impl IntoIterator<Item = Receipt>) {
        self.settle.extend(receipts.into_iter().map(|receipt| (receipt, Settlement::Ack)));
    }

    fn give_back(&mut self, receipts: impl IntoIterator<Item = Receipt>) {
        self.settle.extend(receipts.into_iter().map(|receipt| (receipt, Settlement::Requeue)));
    }

    fn receive(&mut self, delivered: Delivered, now: Moment) {
        let Delivered { receipt, inlet, content } = delivered;
        if self.draining {
            return self.give_back([receipt]);
        }
        match content {
            Err(parcel) => self.park.push_back((parcel, receipt)),
            Ok(mut alarm) => {
                let is_too_far = alarm.deadline() > now + self.policy.max_delay;
                // A publisher whose clock runs ahead must not make its message younger than it is.
                alarm.born = Some(alarm.born.map_or(now, |born| born.min(now)));
                match inlet {
                    Inlet::Parked => {
                        let detail = "the broker dead-lettered it; look at the worker's log around its deliveries";
                        self.park.push_back((Parcel::of(&alarm, ParkReason::BrokerGaveUp, detail), receipt));
                    }
                    Inlet::Arm | Inlet::Timeout if is_too_far => {
                        let detail =
                            "the deadline lies further ahead than delay.max_delay allows; correct it at the publisher";
                        self.park.push_back((Parcel::of(&alarm, ParkReason::TooFar, detail), receipt));
                    }
                    // The inbox is never held back: what is due soon is sent on to the processing queue, or it would
                    // fill the inbox's prefetch window and everything behind it would wait. What came in a session that
                    // has ended is delivered again.
                    Inlet::Arm if self.has_ended(receipt.session) => {}
                    Inlet::Arm => self.arm.push(ArmJob { alarm, receipt, wanted: Wanted::BeforeDeadline }),
                    Inlet::Timeout => self.take_in(Case::new(alarm, Origin::Delivered(receipt)), now),
                }
            }
        }
    }

    /// Those of a session that has ended are delivered again.
    fn arm_again(&mut self, mut jobs: Vec<ArmJob>, cause: Cause, now: Moment) {
        if self.draining {
            return self.give_back(jobs.into_iter().map(|job| job.receipt));
        }
        jobs.retain(|job| job.receipt.session >= self.session);
        self.arm_later.put(jobs, cause, now, &self.policy);
        if self.broker_is_here {
            let given_up = self.arm_later.take_impatient(now, self.policy.away_patience);
            self.give_back(given_up.into_iter().map(|job| job.receipt));
        }
    }

    /// The same for what is to be parked.
    fn park_again(&mut self, mut parcels: Vec<(Parcel, Receipt)>, cause: Cause, now: Moment) {
        self.parking -= parcels.len();
        if self.draining {
            return self.give_back(parcels.into_iter().map(|(_, receipt)| receipt));
        }
        parcels.retain(|(_, receipt)| receipt.session >= self.session);
        self.park_later.put(parcels, cause, now, &self.policy);
        if self.broker_is_here {
            let given_up = self.park_later.take_impatient(now, self.policy.away_patience);
            self.give_back(given_up.into_iter().map(|(_, receipt)| receipt));
        }
    }

    /// Puts a case where its deadline says: the wheel, the hold, or the next batch, for company in which it has lingered
    /// since `since`.
    fn place(&mut self, case: Case, now: Moment, since: Moment) {
        let deadline = case.alarm.deadline();
        if deadline > now + self.policy.hold_max {
            self.arm(case, Wanted::BeforeDeadline);
        } else if deadline > now {
            self.wait_until(deadline, case);
        } else {
            self.take_in_hand(case.alarm.order_id());
            if self.comes_again(&case, now) { self.again.push(case, since) } else { self.fresh.push(case, since) }
        }
    }

    fn take_in(&mut self, case: Case, now: Moment) {
        let sweep_is_at_it = case.alarm.deadline() + self.policy.sweep_grace < now;
        if sweep_is_at_it && !self.comes_again(&case, now) {
            self.take_in_hand(case.alarm.order_id());
            self.late.push(case, now);
        } else {
            self.place(case, now, now);
        }
    }

    fn comes_again(&self, case: &Case, now: Moment) -> bool {
        case.was_tried() || self.patience.has_just_failed(case.alarm.order_id(), now)
    }

    /// Only what was delivered can be armed; what the sweep finds has its row. And only in its session: what came in one
    /// that has ended is delivered again, and armed as well it would be at the broker twice.
    fn arm(&mut self, case: Case, wanted: Wanted) {
        if let Origin::Delivered(receipt) = case.origin
            && !self.has_ended(receipt.session)
        {
            self.arm.push(ArmJob { alarm: case.alarm, receipt, wanted });
        }
    }

    /// A session's first deliveries may be heard of before it is itself.
    fn has_ended(&self, session: u64) -> bool {
        session < self.session || (session == self.session && !self.broker_is_here)
    }

    fn wait_until(&mut self, moment: Moment, case: Case) {
        let key = (case.alarm.order_id().clone(), case.alarm.deadline());
        let Err(newcomer) = self.hold.wait(key.clone(), moment, case) else { return };
        let waiting = self.hold.get_mut(&key).expect("wait() hands back only what is there already");
        let (Origin::Delivered(new), Origin::Delivered(old)) = (newcomer.origin, waiting.origin) else { return };
        if new.session < old.session {
            return; // the newcomer's receipt is void, there is nothing to settle
        }
        if old.session < new.session {
            // The one that waits came in an earlier session and the broker has just delivered it again: from now on
            // this receipt stands for it. Acknowledging it here would leave the order with no alarm at the broker.
            waiting.origin = newcomer.origin;
        } else if old != new {
            self.settle.push((new, Settlement::Ack));
        }
    }

    /// No further page while the last one is not worked off: what is overdue after a long night would not fit in
    /// memory. And none while nothing can be closed.
    fn wants_overdue(&self) -> bool {
        !self.draining && !self.outage.is_away() && self.overdue.len() + self.busy.len() < self.policy.sweep_page
    }

    fn take_overdue(&mut self, page: SweptPage, now: Moment) {
        let mut failed_before = Vec::new();
        let closers_are_behind = self.idle_closers == 0 && self.fresh.len() + self.late.len() > 0;
        let says_nothing_new = closers_are_behind
            && !page.orders.is_empty()
            && page.orders.iter().all(|one| self.has_its_alarm(&key_of(one)));
        let wanted = self.sweep.found(page, &self.policy, now);
        // In a great burst, page after page of what the closers are at would only take Postgres' time from them.
        if says_nothing_new {
            self.sweep.cut_short(&self.policy, now);
        }
        for overdue in wanted {
            let key = key_of(&overdue);
            if self.has_its_alarm(&key) || self.draining {
                continue;
            }
            self.take_in_hand(&key.0);
            let last_try = self.sweep.last_try(&key.0);
            self.swept += 1;
            let due = TimeoutDue { order_id: key.0, deadline: key.1 };
            let alarm = Alarm { due, attempt: 0, born: None, traceparent: None };
            let case = Case::new(alarm, Origin::Swept);
            match last_try {
                LastTry::None => self.overdue.push(case, now),
                LastTry::Busy => self.busy.push(case, now),
                LastTry::Failed => failed_before.push(case),
            }
        }
        self.try_again_apart(failed_before, now);
    }

    fn has_its_alarm(&self, key: &(OrderId, Deadline)) -> bool {
        self.in_hand.contains_key(&key.0) || self.hold.contains(key)
    }

    fn take_in_hand(&mut self, order_id: &OrderId) {
        *self.in_hand.entry(order_id.clone()).or_default() += 1;
    }

    fn put_down(&mut self, order_id: &OrderId) {
        if let Some(count) = self.in_hand.get_mut(order_id) {
            *count -= 1;
            if *count == 0 {
                self.in_hand.remove(order_id);
            }
        }
    }
}

fn key_of(overdue: &Overdue) -> (OrderId, Deadline) {
    (overdue.order_id.clone(), overdue.deadline)
}

fn receipt_of(case: &Case) -> Option<Receipt> {
    match case.origin {
        Origin::Delivered(receipt) => Some(receipt),
        Origin::Swept => None,
    }
}

#[cfg(test)]
mod tests;
