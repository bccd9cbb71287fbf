//! The worker's engine: what is done next with each alarm and each overdue order. Every decision stands here and in the
//! files below: `news.rs` holds the words that go in and out, `decide.rs` the outcome table, `apply.rs` what it means
//! for a item, `ready_queue.rs` who waits, `batching.rs` who goes next, `lock_wait.rs` who waits for a lock, `availability.rs` whether
//! anything is closed at all, `sweep.rs` the safety net, `circulation.rs` what the broker returns before its time.
//!
//! Pure: news comes in with the database's time, actions go out. No I/O, no clock, no task. `worker/` runs the actions
//! for real; the same engine can be driven through any interleaving in a test.

mod action;
mod apply;
mod availability;
mod batching;
mod circulation;
mod decide;
mod input;
mod lock_wait;
mod policy;
mod ready_queue;
mod retry_list;
mod sweep;
mod work_item;

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use crate::alarm::{
    DeadLetter, Death, DeathReason, Delivered, DeliveredAlarm, ParkReason, Rearm, Receipt, Returns, Settlement,
    SourceQueue, Wanted,
};
use crate::hold::Hold;
use crate::message::Alarm;
use crate::order::{Deadline, OrderId, Overdue, SweptPage, Timestamp};
pub use action::Action;
use availability::Availability;
use circulation::{Circulation, circulates, given_up};
pub use input::Input;
use lock_wait::LockWaitBudget;
pub use policy::Policy;
use ready_queue::ReadyQueue;
use retry_list::{FailureScope, RetryList};
use sweep::{LastTry, Sweep};
pub use work_item::{Batch, BatchResult, LockMode, Origin, WorkItem};

/// By how much the time may go back without anybody minding: readings of one clock differ by less.
const LONGEST_JITTER: Duration = Duration::from_secs(1);

/// Those of one moment that are woken before actions are looked at. Enough to fill a batch of the usual size for both of
/// the usual closers; were all of a great many woken at once, the first batch would wait until the last of them is.
const WOKEN_AT_ONCE: usize = 2_048;

/// Alarms parked by one statement: their bodies are 16 KiB at most, so some megabytes. And one statement at a time, so
/// that somebody's heap of nonsense does not take the sweep's connections.
const PARKED_AT_ONCE: usize = 256;

/// Everything the worker has in hand.
#[derive(Debug)]
pub struct Engine {
    policy: Policy,
    hold: Hold<WorkItem>,
    /// Due, never tried.
    fresh: ReadyQueue,
    /// The same, but delivered so late that the sweep is at them as well. Apart from the fresh: while a batch waits for a
    /// lock, nobody else can close those it waits with.
    late: ReadyQueue,
    /// Due, tried before.
    retries: ReadyQueue,
    /// CloseOutcome by the sweep, never tried.
    overdue: ReadyQueue,
    /// CloseOutcome by the sweep, and somebody else had them when they were tried. Apart from those never tried: that one may be
    /// a worker that cannot close them, and in a batch with others they would take those apart.
    busy: ReadyQueue,
    /// Batches that waited for a lock in vain, with when they did: tried again whole, without waiting.
    retry_nowait: VecDeque<(Batch, Timestamp)>,
    /// SplitBatches of batches that failed, with when they did.
    split_batches: VecDeque<(Batch, Timestamp)>,
    lock_waits: LockWaitBudget,
    /// Orders that are due and wait for a closer or are with one, and how often each. The sweep leaves them alone.
    in_flight: HashMap<OrderId, u32>,
    idle_closers: usize,
    trouble_had_last_closer: bool,
    availability: Availability,
    sweep: Sweep,
    session: u64,
    broker_is_here: bool,
    draining: bool,
    arm: Vec<Rearm>,
    arm_later: RetryList<Rearm>,
    circulation: Circulation,
    park: VecDeque<(DeadLetter, Receipt)>,
    park_later: RetryList<(DeadLetter, Receipt)>,
    /// How many are being parked.
    parking: usize,
    settle: Vec<(Receipt, Settlement)>,
    /// The latest time it was told.
    latest: Timestamp,
    swept: u64,
}

impl Engine {
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        let idle_closers = policy.closers;
        Self {
            policy,
            hold: Hold::default(),
            fresh: ReadyQueue::default(),
            late: ReadyQueue::default(),
            retries: ReadyQueue::default(),
            overdue: ReadyQueue::default(),
            busy: ReadyQueue::default(),
            retry_nowait: VecDeque::new(),
            split_batches: VecDeque::new(),
            lock_waits: LockWaitBudget::default(),
            in_flight: HashMap::new(),
            idle_closers,
            trouble_had_last_closer: false,
            availability: Availability::default(),
            sweep: Sweep::new(),
            session: 0,
            broker_is_here: false,
            draining: false,
            arm: Vec::new(),
            arm_later: RetryList::default(),
            circulation: Circulation::default(),
            park: VecDeque::new(),
            park_later: RetryList::default(),
            parking: 0,
            settle: Vec::new(),
            latest: Timestamp::from_unix_micros(i64::MIN),
            swept: 0,
        }
    }

    /// Takes note of what happened. `now` is the database's time.
    pub fn handle(&mut self, news: Input, now: Timestamp) {
        self.note_time(now);
        match news {
            Input::Delivered(delivered) => self.receive(delivered, now),
            Input::Closed(batch, answer) => self.apply_results(batch, answer, now),
            Input::Rearmed(receipts) => {
                self.arm_later.succeeded(&receipts);
                self.acknowledge(receipts);
            }
            Input::NotRearmed(jobs) => self.arm_again(jobs, FailureScope::Shared, now),
            Input::RearmRefused(jobs) => self.arm_again(jobs, FailureScope::Individual, now),
            Input::Parked(receipts) => {
                self.parking -= receipts.len();
                self.park_later.succeeded(&receipts);
                self.acknowledge(receipts);
            }
            Input::NotParked(dead_letters) => self.park_again(dead_letters, FailureScope::Shared, now),
            Input::ParkRefused(dead_letters) => self.park_again(dead_letters, FailureScope::Individual, now),
            Input::Swept(page) => self.take_overdue(page, now),
            Input::NotSwept => self.sweep.not_found(&self.policy, now),
            Input::SessionOpened(number) => {
                self.session = self.session.max(number);
                self.broker_is_here = true;
                // What came in a session that has ended is delivered again; done here as well it would be done twice.
                self.arm_later.keep_from(number);
                self.circulation.keep_from(number);
                self.park_later.keep_from(number);
            }
            Input::SessionEnded => {
                self.broker_is_here = false;
                // Their receipts are void and they are delivered again. One is kept, to find out when arming works.
                self.arm_later.keep_one();
                self.circulation.keep_from(self.session + 1);
            }
        }
    }

    /// What can be done at `now`. Where more is due than fits into a round, [`Engine::next_wakeup`] says so.
    pub fn poll_actions(&mut self, now: Timestamp) -> Vec<Action> {
        self.note_time(now);
        if self.held_ready_at().is_some_and(|ready_at| ready_at <= now) {
            let lingered_since = now - self.policy.linger;
            for item in self.hold.wake(now, WOKEN_AT_ONCE) {
                self.place(item, now, lingered_since);
            }
        }
        self.release_held_back(now);
        let mut actions = Vec::new();
        while let Some(batch) = self.next_batch(now) {
            actions.push(Action::Close(batch));
        }
        if self.wants_overdue()
            && let Some(page) = self.sweep.page(&self.policy, self.broker_is_here, now)
        {
            actions.push(Action::Sweep(page));
        }
        self.arm.extend(self.arm_later.take_ready(now));
        self.park.extend(self.park_later.take_ready(now));
        if !self.arm.is_empty() {
            actions.push(Action::Rearm(std::mem::take(&mut self.arm)));
        }
        if self.parking == 0 && !self.park.is_empty() {
            self.parking = self.park.len().min(PARKED_AT_ONCE);
            actions.push(Action::Park(self.park.drain(..self.parking).collect()));
        }
        if !self.settle.is_empty() {
            actions.push(Action::Settle(std::mem::take(&mut self.settle)));
        }
        actions
    }

    /// When [`Engine::poll_actions`] has something new to say even if no news comes.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        let sweep_at = self.sweep.ready_at().filter(|_| self.wants_overdue());
        let (arm_at, park_at) = (self.arm_later.ready_at(), self.park_later.ready_at());
        [self.held_ready_at(), self.batch_ready_at(), sweep_at, arm_at, self.circulation.ready_at(), park_at]
            .into_iter()
            .flatten()
            .min()
    }

    /// When those who are held are woken: with the last that falls due within `linger` of the first, or with whom a batch
    /// is full. Who comes after is known here, so nobody waits for company that does not come.
    fn held_ready_at(&self) -> Option<Timestamp> {
        let first = self.hold.next_wake()?;
        self.hold.last_wake_by(first + self.policy.linger, self.policy.batch_size)
    }

    /// Whether the broker should go on delivering. Not while nothing could be closed, armed or parked for long: what we
    /// cannot settle must not stay unacknowledged until consumer_timeout.
    #[must_use]
    pub fn wants_deliveries(&self, now: Timestamp) -> bool {
        let failing_for =
            [self.availability.away_for(now), self.arm_later.failing_for(now), self.park_later.failing_for(now)];
        failing_for.into_iter().flatten().all(|failing_for| failing_for < self.policy.requeue_after)
    }

    /// Why the database closes nothing of what is due, if that is so and the orders are not to blame.
    #[must_use]
    pub fn unavailable_reason(&self, now: Timestamp) -> Option<&str> {
        self.availability.why_nothing(&self.policy, now)
    }

    /// Whether the database does not answer. It is not asked for overdue orders then.
    #[must_use]
    pub fn database_is_away(&self) -> bool {
        self.availability.is_away()
    }

    /// Stops taking anything new and gives back to the broker whatever is not in a closer's hands.
    pub fn drain(&mut self) {
        self.draining = true;
        let mut waiting = self.hold.drain();
        for queue in [&mut self.fresh, &mut self.late, &mut self.retries, &mut self.overdue, &mut self.busy] {
            waiting.extend(queue.take(usize::MAX));
        }
        waiting
            .extend(self.retry_nowait.drain(..).chain(self.split_batches.drain(..)).flat_map(|(batch, _)| batch.items));
        let jobs = self.arm_later.drain().into_iter().map(|job| job.receipt);
        let dead_letters = self.park_later.drain().into_iter().map(|(_, receipt)| receipt);
        let unparked = self.park.drain(..).map(|(_, receipt)| receipt);
        let receipts: Vec<Receipt> =
            waiting.iter().filter_map(receipt_of).chain(jobs).chain(dead_letters).chain(unparked).collect();
        let held_back = self.circulation.drain();
        self.give_back(held_back);
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

    /// How many alarms are held back because the broker returns them before their time.
    #[must_use]
    pub fn held_back(&self) -> usize {
        self.circulation.len()
    }

    /// How often the broker has returned an alarm before its time so far.
    #[must_use]
    pub fn early_returns(&self) -> u64 {
        self.circulation.counted()
    }

    /// Why alarms come back from the broker again and again, if they do.
    #[must_use]
    pub fn why_alarms_circulate(&self, now: Timestamp) -> Option<String> {
        self.circulation.why_alarms_circulate(now)
    }

    /// What the broker does with messages of the inbox and the processing queue that it should not, if it does.
    #[must_use]
    pub fn why_broker_policy(&self, now: Timestamp) -> Option<&str> {
        self.circulation.why_broker_policy(now)
    }

    /// Whether a consumer session is open, so that alarms can come.
    #[must_use]
    pub fn broker_is_here(&self) -> bool {
        self.broker_is_here
    }

    /// How many overdue orders could not be closed and are left alone for a while.
    #[must_use]
    pub fn backed_off(&self) -> usize {
        self.sweep.backed_off()
    }

    /// Whether this overdue order could not be closed when it was last tried.
    #[must_use]
    pub fn is_backed_off(&self, order_id: &OrderId) -> bool {
        self.sweep.is_backed_off(order_id)
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

    fn note_time(&mut self, now: Timestamp) {
        if now + LONGEST_JITTER < self.latest {
            self.latest = now;
            self.clock_was_set_back(now);
        }
        self.latest = self.latest.max(now);
    }

    /// Deadlines are the database's time and stand as they are. A pause is a wait: it must not become longer by the
    /// hour that somebody has set the clock back, so every pause ends now.
    fn clock_was_set_back(&mut self, now: Timestamp) {
        for item in self.hold.drain() {
            self.place(item, now, now);
        }
        for queue in [&mut self.fresh, &mut self.late, &mut self.retries, &mut self.overdue, &mut self.busy] {
            queue.clock_was_set_back(now);
        }
        for (_, since) in self.retry_nowait.iter_mut().chain(&mut self.split_batches) {
            *since = now.min(*since);
        }
        self.lock_waits.clock_was_set_back();
        self.availability.clock_was_set_back(now);
        self.arm_later.clock_was_set_back(now);
        self.circulation.clock_was_set_back(now);
        self.park_later.clock_was_set_back(now);
        self.sweep.clock_was_set_back(now);
    }

    fn acknowledge(&mut self, receipts: impl IntoIterator<Item = Receipt>) {
        self.settle.extend(receipts.into_iter().map(|receipt| (receipt, Settlement::Ack)));
    }

    fn give_back(&mut self, receipts: impl IntoIterator<Item = Receipt>) {
        self.settle.extend(receipts.into_iter().map(|receipt| (receipt, Settlement::Requeue)));
    }

    fn receive(&mut self, delivered: Delivered, now: Timestamp) {
        let Delivered { receipt, source, content, death } = delivered;
        if self.draining {
            return self.give_back([receipt]);
        }
        match content {
            Err(dead_letter) => self.park.push_back((dead_letter, receipt)),
            Ok(mut alarm) => {
                let is_too_far = alarm.deadline() > now + self.policy.max_delay;
                // A publisher whose clock runs ahead must not make its message younger than it is.
                alarm.first_published_at =
                    Some(alarm.first_published_at.map_or(now, |first_published_at| first_published_at.min(now)));
                let early_before = alarm.returns.early;
                self.circulation.note_return(&mut alarm, death.as_ref(), now);
                match source {
                    SourceQueue::Parked => self.receive_given_up(alarm, early_before, receipt, death, now),
                    SourceQueue::Inbox | SourceQueue::Timeout if is_too_far => {
                        let detail =
                            "the deadline lies further ahead than delay.max_delay allows; correct it at the publisher";
                        self.park.push_back((DeadLetter::of(&alarm, ParkReason::TooFar, detail), receipt));
                    }
                    // The inbox is never held back: what is due soon is sent on to the processing queue, or it would
                    // fill the inbox's prefetch window and everything behind it would wait. What came in a session that
                    // has ended is delivered again.
                    SourceQueue::Inbox if self.has_ended(receipt.session) => {}
                    // Held back it would fill that window as well. That of the processing queue has room.
                    SourceQueue::Inbox if circulates(&alarm) => {
                        self.arm.push(Rearm { alarm, receipt, wanted: Wanted::AtOnce });
                    }
                    SourceQueue::Inbox => self.arm.push(Rearm { alarm, receipt, wanted: Wanted::BeforeDeadline }),
                    SourceQueue::Timeout => self.take_in(WorkItem::new(alarm, Origin::Delivered(receipt)), now),
                }
            }
        }
    }

    /// What the broker itself took out of the inbox or the processing queue. What a policy has done is not the alarm's
    /// fault, and it goes on; what was returned or rejected is for a person.
    fn receive_given_up(
        &mut self,
        mut alarm: DeliveredAlarm,
        early_before: u32,
        receipt: Receipt,
        death: Option<Death>,
        now: Timestamp,
    ) {
        let is_too_far = alarm.deadline() > now + self.policy.max_delay;
        let detail = match death {
            Some(death) if matches!(death.reason, DeathReason::Expired | DeathReason::MaxLength) && !is_too_far => {
                self.circulation.note_rescued(&mut alarm, early_before, &death, now);
                if alarm.deadline() <= now || circulates(&alarm) {
                    self.take_in(WorkItem::new(alarm, Origin::Delivered(receipt)), now);
                } else if !self.has_ended(receipt.session) {
                    // Not held, for the same reason as in the inbox.
                    self.arm.push(Rearm { alarm, receipt, wanted: Wanted::BeforeDeadline });
                }
                return;
            }
            Some(death) => {
                self.circulation.note_policy(&death, now);
                given_up(&death)
            }
            None => "the broker dead-lettered it; look at the worker's log around its deliveries".to_owned(),
        };
        self.park.push_back((DeadLetter::of(&alarm, ParkReason::BrokerGaveUp, detail), receipt));
    }

    /// Arms those whose turn it is, and takes in those whose deadline is near.
    fn release_held_back(&mut self, now: Timestamp) {
        for (alarm, receipt) in self.circulation.take_leaving(now) {
            if alarm.deadline() <= now + self.policy.hold_max {
                self.place(WorkItem::new(alarm, Origin::Delivered(receipt)), now, now);
            } else {
                self.arm.push(Rearm { alarm, receipt, wanted: Wanted::BeforeDeadline });
            }
        }
        let ready = self.circulation.take_ready(now).into_iter();
        self.arm.extend(ready.map(|(alarm, receipt)| Rearm { alarm, receipt, wanted: Wanted::BeforeDeadline }));
    }

    /// Those of a session that has ended are delivered again.
    fn arm_again(&mut self, mut jobs: Vec<Rearm>, cause: FailureScope, now: Timestamp) {
        if self.draining {
            return self.give_back(jobs.into_iter().map(|job| job.receipt));
        }
        jobs.retain(|job| job.receipt.session >= self.session);
        self.arm_later.put(jobs, cause, now, &self.policy);
        if self.broker_is_here {
            let given_up = self.arm_later.take_expired(now, self.policy.requeue_after);
            self.give_back(given_up.into_iter().map(|job| job.receipt));
        }
    }

    /// The same for what is to be parked.
    fn park_again(&mut self, mut dead_letters: Vec<(DeadLetter, Receipt)>, cause: FailureScope, now: Timestamp) {
        self.parking -= dead_letters.len();
        if self.draining {
            return self.give_back(dead_letters.into_iter().map(|(_, receipt)| receipt));
        }
        dead_letters.retain(|(_, receipt)| receipt.session >= self.session);
        self.park_later.put(dead_letters, cause, now, &self.policy);
        if self.broker_is_here {
            let given_up = self.park_later.take_expired(now, self.policy.requeue_after);
            self.give_back(given_up.into_iter().map(|(_, receipt)| receipt));
        }
    }

    /// Puts a item where its deadline says: the wheel, the hold, or the next batch, for company in which it has lingered
    /// since `since`.
    fn place(&mut self, item: WorkItem, now: Timestamp, since: Timestamp) {
        let deadline = item.alarm.deadline();
        if deadline > now + self.policy.hold_max {
            self.arm(item, Wanted::BeforeDeadline);
        } else if deadline > now {
            self.wait_until(deadline, item);
        } else {
            self.mark_in_flight(item.alarm.order_id());
            if self.comes_again(&item, now) { self.retries.push(item, since) } else { self.fresh.push(item, since) }
        }
    }

    fn take_in(&mut self, item: WorkItem, now: Timestamp) {
        let sweep_is_at_it = item.alarm.deadline() + self.policy.sweep_grace < now;
        if sweep_is_at_it && !self.comes_again(&item, now) {
            self.mark_in_flight(item.alarm.order_id());
            self.late.push(item, now);
        } else {
            self.place(item, now, now);
        }
    }

    fn comes_again(&self, item: &WorkItem, now: Timestamp) -> bool {
        item.was_tried() || self.lock_waits.has_just_failed(item.alarm.order_id(), now)
    }

    /// Only what was delivered can be armed; what the sweep finds has its row. And only in its session: what came in one
    /// that has ended is delivered again, and armed as well it would be at the broker twice.
    fn arm(&mut self, item: WorkItem, wanted: Wanted) {
        if let Origin::Delivered(receipt) = item.origin
            && !self.has_ended(receipt.session)
        {
            let held_back = if wanted == Wanted::BeforeDeadline && circulates(&item.alarm) {
                self.circulation.hold_back(item.alarm, receipt, &self.policy, self.latest)
            } else {
                Some((item.alarm, receipt))
            };
            self.arm.extend(held_back.map(|(alarm, receipt)| Rearm { alarm, receipt, wanted }));
        }
    }

    /// A session's first deliveries may be heard of before it is itself.
    fn has_ended(&self, session: u64) -> bool {
        session < self.session || (session == self.session && !self.broker_is_here)
    }

    fn wait_until(&mut self, moment: Timestamp, item: WorkItem) {
        let key = (item.alarm.order_id().clone(), item.alarm.deadline());
        let Err(newcomer) = self.hold.wait(key.clone(), moment, item) else { return };
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
        !self.draining && !self.availability.is_away() && self.overdue.len() + self.busy.len() < self.policy.sweep_page
    }

    fn take_overdue(&mut self, page: SweptPage, now: Timestamp) {
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
            self.mark_in_flight(&key.0);
            let last_try = self.sweep.last_try(&key.0);
            self.swept += 1;
            let alarm = Alarm { order_id: key.0, deadline: key.1 };
            let alarm = DeliveredAlarm {
                alarm,
                attempt: 0,
                first_published_at: None,
                traceparent: None,
                returns: Returns::default(),
            };
            let item = WorkItem::new(alarm, Origin::Swept);
            match last_try {
                LastTry::None => self.overdue.push(item, now),
                LastTry::Busy => self.busy.push(item, now),
                LastTry::Failed => failed_before.push(item),
            }
        }
        self.try_again_apart(failed_before, now);
    }

    fn has_its_alarm(&self, key: &(OrderId, Deadline)) -> bool {
        self.in_flight.contains_key(&key.0) || self.hold.contains(key)
    }

    fn mark_in_flight(&mut self, order_id: &OrderId) {
        *self.in_flight.entry(order_id.clone()).or_default() += 1;
    }

    fn clear_in_flight(&mut self, order_id: &OrderId) {
        if let Some(count) = self.in_flight.get_mut(order_id) {
            *count -= 1;
            if *count == 0 {
                self.in_flight.remove(order_id);
            }
        }
    }
}

fn key_of(overdue: &Overdue) -> (OrderId, Deadline) {
    (overdue.order_id.clone(), overdue.deadline)
}

fn receipt_of(item: &WorkItem) -> Option<Receipt> {
    match item.origin {
        Origin::Delivered(receipt) => Some(receipt),
        Origin::Swept => None,
    }
}

#[cfg(test)]
mod tests;
