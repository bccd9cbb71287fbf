//! The worker's engine: decides what happens next with each alarm and each overdue order. `input.rs` and `action.rs`
//! hold what goes in and out, `work_item.rs` an order that is being worked on, `decide.rs` the outcome table,
//! `apply.rs` what a decision means for a work item, `ready_queues.rs`, `rearm_queue.rs` and `retry_list.rs` what waits, `batching.rs`
//! what is closed next, `lock_wait.rs` which batches wait for locks, `availability.rs` whether the database closes
//! anything, `sweep.rs` the safety net, `look_ahead.rs` how far it reads, `arrivals.rs` whether alarms come in time, `circulation.rs` what the broker returns early,
//! `brake.rs` how much may be closed before that looks usual, `closing/` the
//! closing protocol with a payment provider, `order_backoff.rs` how long an order waits before the next try, `policy.rs` the limits, `snapshot.rs` the read side.
//!
//! Pure: inputs come in with the database's time, actions go out. No I/O, no clock, no task. The worker, a dependent of
//! this crate, runs the actions; a test can drive the same engine through any interleaving.

mod action;
mod apply;
mod arrivals;
mod availability;
mod batching;
mod brake;
mod circulation;
mod closing;
mod decide;
mod input;
mod lock_wait;
mod look_ahead;
mod order_backoff;
mod policy;
mod ready_queues;
mod rearm_queue;
mod retry_list;
mod snapshot;
mod sweep;
mod work_item;

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use crate::alarm::{
    DeadLetter, Death, DeathReason, Delivered, DeliveredAlarm, ParkReason, Rearm, Receipt, Settlement, SourceQueue,
    Wanted,
};
use crate::brake::Counts;
use crate::hold::Hold;
use crate::kind::Kind;
use crate::message::Alarm;
use crate::order::{CloseResult, Deadline, OrderId, Outcome, Overdue, SweepPage, SweptPage, Timestamp};
pub use action::Action;
use arrivals::Arrivals;
use availability::Availability;
pub use availability::Unavailable;
use brake::Brake;
use circulation::{Circulation, circulates, explain_death};
use closing::Closing;
pub use closing::{
    AttemptKey, Call, CallKind, Claim, ClaimedAttempt, ClosingAction, ClosingInput, ClosingPolicy, EndOutcome, Ended,
    Ending, EndingKind, Lease, PaidEnding, Postponement, Recorded, ResumePage, Step, UnresolvedReason,
};
pub use input::Input;
use lock_wait::LockWaitBudget;
use look_ahead::LookAhead;
pub use look_ahead::Share;
pub use order_backoff::LONGEST_RETRY_FACTOR;
pub use policy::Policy;
use ready_queues::ReadyQueues;
use rearm_queue::RearmQueue;
use retry_list::{FailureScope, RetryList};
pub use snapshot::Snapshot;
use sweep::{LastTry, Sweep};
pub use work_item::{Batch, BatchResult, LockMode, Origin, WorkItem};

/// How far the time may go back without counting as a clock change: readings of one clock differ by less.
const MAX_CLOCK_JITTER: Duration = Duration::from_secs(1);

/// How many held alarms are woken before actions are computed. Enough to fill a batch of the usual size for both of the
/// usual closers. If a large number were woken at once, the first batch would wait until the last of them is.
const MAX_WOKEN_AT_ONCE: usize = 2_048;

/// How many alarms one statement parks: a body has at most 16 KiB, so this is some megabytes. One statement runs at a
/// time, so that a flood of unreadable messages does not use up the sweep's connections.
const MAX_PARKED_AT_ONCE: usize = 256;

/// How many alarms may be on their way to the broker: a few windows of confirms. Each publish has a timeout from when it is
/// handed out, and what has timed out is published again, although the broker may have it.
const MAX_REARMING: usize = 4_000;

/// How long after its deadline an order counts as read ahead: twice as long as the worker's reading of the clock may be
/// ahead of the database's.
const JUST_PASSED: Duration = Duration::from_millis(500);

/// No order is read ahead while so many are held, of about a kilobyte each.
const MAX_HELD_WHILE_READING_AHEAD: usize = 200_000;

/// The state of everything that the worker is working on.
#[derive(Debug)]
pub struct Engine {
    policy: Policy,
    hold: Hold<WorkItem>,
    /// Due, and waiting for a closer.
    ready: ReadyQueues,
    lock_waits: LockWaitBudget,
    /// Orders that are due and wait for a closer or are with one, and how often each. The sweep skips them.
    in_flight: HashMap<OrderId, u32>,
    idle_closers: usize,
    retries_had_last_closer: bool,
    /// When the last batch of late alarms went to a closer.
    late_taken_at: Option<Timestamp>,
    availability: Availability,
    sweep: Sweep,
    look_ahead: LookAhead,
    arrivals: Arrivals,
    session: u64,
    is_consuming: bool,
    draining: bool,
    /// While it pauses closing, nothing is closed, swept or consumed.
    brake: Brake,
    rearms: RearmQueue,
    /// How many are handed out and not reported.
    rearming: usize,
    rearm_retries: RetryList<Rearm>,
    circulation: Circulation,
    /// `None` if no provider is asked: then orders are closed at once.
    closing: Option<Closing>,
    dead_letters: VecDeque<(DeadLetter, Receipt)>,
    park_retries: RetryList<(DeadLetter, Receipt)>,
    /// How many dead letters are being parked.
    parking: usize,
    settlements: Vec<(Receipt, Settlement)>,
    /// The latest time that the engine was given.
    latest_time: Timestamp,
    /// Whether the query for overdue orders has succeeded since it last failed.
    overdue_is_known: bool,
}

impl Engine {
    /// Without alarms, and with all closers idle. The first sweep is `sweep_every` after the first
    /// [`Engine::poll_actions`].
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        let idle_closers = policy.closers;
        Self {
            policy,
            hold: Hold::default(),
            ready: ReadyQueues::default(),
            lock_waits: LockWaitBudget::default(),
            in_flight: HashMap::new(),
            idle_closers,
            retries_had_last_closer: false,
            late_taken_at: None,
            availability: Availability::default(),
            sweep: Sweep::new(),
            look_ahead: LookAhead::new(),
            arrivals: Arrivals::default(),
            session: 0,
            is_consuming: false,
            draining: false,
            brake: Brake::default(),
            rearms: RearmQueue::default(),
            rearming: 0,
            rearm_retries: RetryList::default(),
            circulation: Circulation::default(),
            closing: None,
            dead_letters: VecDeque::new(),
            park_retries: RetryList::default(),
            parking: 0,
            settlements: Vec::new(),
            latest_time: Timestamp::from_unix_micros(i64::MIN),
            overdue_is_known: false,
        }
    }

    /// The same for orders that a payment provider is asked about before they are closed.
    #[must_use]
    pub fn with_provider(policy: Policy, closing: ClosingPolicy) -> Self {
        let closing = Some(Closing::new(closing, policy.pause_share));
        Self { closing, brake: Brake::of_claims(), ..Self::new(policy) }
    }

    /// Takes in what happened. `now` is the database's time.
    ///
    /// # Panics
    /// With overflow checks, if more is reported than [`Action::Park`] or [`Action::Rearm`] handed out.
    pub fn handle(&mut self, input: Input, now: Timestamp) {
        self.note_time(now);
        match input {
            Input::Delivered(delivered) => self.receive(delivered, now),
            Input::Closed(batch, result) => {
                self.note_claimed(&result, now);
                self.brake.note_result(&batch, &result);
                self.update_closing_pause();
                self.apply_results(batch, result, now);
            }
            Input::Closing(input) => {
                if let Some(closing) = &mut self.closing {
                    closing.handle(input, now);
                }
            }
            Input::Rearmed(receipts) => {
                self.rearming -= receipts.len();
                self.rearm_retries.succeeded(&receipts);
                self.acknowledge(receipts);
            }
            Input::NotRearmed(rearms) => self.retry_rearms(rearms, FailureScope::Shared, now),
            Input::RearmRefused(rearms) => self.retry_rearms(rearms, FailureScope::Individual, now),
            Input::Parked(receipts) => {
                self.parking -= receipts.len();
                self.park_retries.succeeded(&receipts);
                self.acknowledge(receipts);
            }
            Input::NotParked(dead_letters) => self.retry_parks(dead_letters, FailureScope::Shared, now),
            Input::ParkRefused(dead_letters) => self.retry_parks(dead_letters, FailureScope::Individual, now),
            Input::Swept(page) => {
                self.overdue_is_known = true;
                self.availability.note_swept();
                match self.arrivals.take_looking() {
                    true => self.note_arrivals(&page, now),
                    false => self.accept_overdue(page, now),
                }
            }
            Input::NotSwept(reason) => {
                self.overdue_is_known = false;
                self.availability.note_not_swept(reason, now);
                self.arrivals.take_looking();
                self.sweep.page_failed(&self.policy, now);
            }
            Input::ShareChanged(share) => self.look_ahead.set_share(share),
            Input::ClosingPaused => {
                self.brake.set_paused(true);
                self.update_closing_pause();
            }
            Input::ClosingResumed => {
                self.brake.set_paused(false);
                self.update_closing_pause();
            }
            Input::BrakeNotJudged => self.brake.note_not_judged(),
            Input::BrakeLimits(limits) => {
                self.brake.set_limits(limits);
                self.update_closing_pause();
            }
            Input::ClockRead => self.availability.note_clock(None),
            Input::ClockSetAhead => self.look_ahead.clock_was_set_ahead(now),
            Input::ClockNotRead(reason) => self.availability.note_clock(Some(reason)),
            Input::SessionOpened(number) => {
                self.session = self.session.max(number);
                self.is_consuming = true;
                self.look_ahead.session_opened(now);
                // The broker redelivers what came in an ended session; keeping it here as well would do it twice.
                self.rearms.keep_from(number);
                self.rearm_retries.keep_from(number);
                self.park_retries.keep_from(number);
            }
            Input::SessionEnded => {
                self.is_consuming = false;
                self.look_ahead.session_ended();
                let ended = self.session;
                self.rearms.keep_from(ended + 1);
                // The receipts are void and the broker redelivers the messages. One rearm is kept, to find out when
                // rearming works again.
                self.rearm_retries.keep_one();
            }
        }
    }

    /// What is to be done at `now`. If more is due than fits into one call, [`Engine::next_wakeup`] says so.
    pub fn poll_actions(&mut self, now: Timestamp) -> Vec<Action> {
        self.note_time(now);
        if self.hold_ready_at().is_some_and(|ready_at| ready_at <= now) {
            let lingered_since = now - self.policy.linger;
            for item in self.hold.wake(now, MAX_WOKEN_AT_ONCE) {
                self.place(item, now, lingered_since);
            }
        }
        let mut actions = Vec::new();
        while let Some(batch) = self.next_batch(now) {
            actions.push(Action::Close(batch));
        }
        // First: what has tripped this worker trips the others, which read the pause once a second.
        actions.extend(self.brake.take_wants_report().then_some(Action::ReportCounts));
        actions.extend(self.brake.take_trip().map(Action::PauseClosing));
        if let Some(closing) = &mut self.closing {
            actions.extend(closing.poll_actions(now).into_iter().map(Action::Closing));
        }
        actions.extend(self.next_page(now).map(Action::Sweep));
        self.rearm_retries.take_ready(now).into_iter().for_each(|rearm| self.rearms.push(rearm));
        self.dead_letters.extend(self.park_retries.take_ready(now));
        actions.extend(self.next_rearms().map(Action::Rearm));
        if self.parking == 0 && !self.dead_letters.is_empty() {
            self.parking = self.dead_letters.len().min(MAX_PARKED_AT_ONCE);
            actions.push(Action::Park(self.dead_letters.drain(..self.parking).collect()));
        }
        if !self.settlements.is_empty() {
            actions.push(Action::Settle(std::mem::take(&mut self.settlements)));
        }
        actions
    }

    fn reads_ahead(&self) -> bool {
        self.look_ahead.is_active(&self.policy, self.is_consuming, self.latest_time)
    }

    /// A look at arrivals goes before a pass, which then reads ahead if it must. It wakes nothing by itself: passes are as
    /// frequent.
    fn next_page(&mut self, now: Timestamp) -> Option<SweepPage> {
        if !self.wants_sweep_page() {
            return None;
        }
        if self.sweep.is_due(now) && !self.reads_ahead() {
            let look = self.arrivals.page(&self.policy, self.look_ahead.workers(), now);
            if look.is_some() {
                return look;
            }
        }
        let has_room = self.hold.len() < MAX_HELD_WHILE_READING_AHEAD;
        let reach = self.look_ahead.reach(&self.policy, self.is_consuming, has_room, now);
        let page = self.sweep.page(&self.policy, reach, now)?;
        self.look_ahead.page_asked(self.is_consuming, now);
        Some(page)
    }

    fn next_rearms(&mut self) -> Option<Vec<Rearm>> {
        let rearms = self.rearms.take(MAX_REARMING.saturating_sub(self.rearming));
        self.rearming += rearms.len();
        (!rearms.is_empty()).then_some(rearms)
    }

    /// When [`Engine::poll_actions`] has something new even without another input.
    #[must_use]
    pub fn next_wakeup(&self) -> Option<Timestamp> {
        let sweep_at = self.sweep.ready_at().filter(|_| self.wants_sweep_page());
        let (rearm_at, park_at) = (self.rearm_retries.ready_at(), self.park_retries.ready_at());
        let closing_at = self.closing.as_ref().and_then(Closing::next_wakeup);
        [self.hold_ready_at(), self.batch_ready_at(), sweep_at, rearm_at, park_at, closing_at]
            .into_iter()
            .flatten()
            .min()
    }

    /// When held alarms are woken: with the last one that falls due within `linger` of the first, or with the one that
    /// fills a batch. Later deadlines are known here, so no alarm waits for others that do not come.
    fn hold_ready_at(&self) -> Option<Timestamp> {
        let first = self.hold.next_wake()?;
        self.hold.last_wake_by(first + self.policy.linger, self.policy.batch_size)
    }

    /// Whether the broker should go on delivering. It should not after closing, rearming or parking has been impossible
    /// for long, or while closing is paused: messages that cannot be settled must not stay unacknowledged until
    /// consumer_timeout.
    #[must_use]
    pub fn wants_deliveries(&self, now: Timestamp) -> bool {
        let failing_for = [
            self.availability.unavailable_for(now),
            self.rearm_retries.failing_for(now),
            self.park_retries.failing_for(now),
        ];
        !self.is_paused()
            && failing_for.into_iter().flatten().all(|failing_for| failing_for < self.policy.requeue_after)
    }

    /// What the engine works on and what it has found out.
    #[must_use]
    pub fn snapshot(&self, now: Timestamp) -> Snapshot<'_> {
        let (closed_without_alarm, closed_in_time) = self.look_ahead.counts();
        Snapshot {
            held: self.hold.len(),
            asked_about: self.closing.as_ref().map_or(0, Closing::len),
            early_returns: self.circulation.early_return_count(),
            backed_off: self.sweep.backed_off(),
            oldest_overdue: self.sweep.oldest(),
            overdue_is_known: self.overdue_is_known && !self.availability.is_unavailable() && !self.is_paused(),
            closing_is_paused: self.is_paused(),
            is_consuming: self.is_consuming,
            closed_without_alarm,
            closed_in_time,
            closers_are_idle: self.closers_are_idle(),
            unavailable: self.availability.verdict(&self.policy, now),
            circulation: self.circulation.reason(now),
        }
    }

    /// Stops accepting alarms and returns to the broker every alarm that is not with a closer, and to the other workers
    /// every order that a provider is asked about.
    pub fn drain(&mut self) {
        self.draining = true;
        let mut waiting = self.hold.drain();
        waiting.extend(self.ready.drain());
        let rearms =
            self.rearm_retries.drain().into_iter().chain(self.rearms.take(usize::MAX)).map(|rearm| rearm.receipt);
        let dead_letters = self.park_retries.drain().into_iter().map(|(_, receipt)| receipt);
        let unparked = self.dead_letters.drain(..).map(|(_, receipt)| receipt);
        let receipts: Vec<Receipt> =
            waiting.iter().filter_map(receipt_of).chain(rearms).chain(dead_letters).chain(unparked).collect();
        self.requeue(receipts);
        let now = self.latest_time;
        if let Some(closing) = &mut self.closing {
            closing.drain(now);
        }
    }

    /// Whether no closer is working.
    #[must_use]
    pub fn closers_are_idle(&self) -> bool {
        self.idle_closers == self.policy.closers
    }

    /// What was closed and found paid since the last call, for the brake of all workers.
    pub fn take_counts(&mut self) -> Counts {
        let answers = self.closing.as_mut().map(Closing::take_answer_counts).unwrap_or_default();
        Counts { answers, ..self.brake.take_counts() }
    }

    /// Whether this overdue order could not be closed when it was last tried.
    #[must_use]
    pub fn is_backed_off(&self, order_id: &OrderId) -> bool {
        self.sweep.is_backed_off(order_id)
    }

    fn note_time(&mut self, now: Timestamp) {
        if now + MAX_CLOCK_JITTER < self.latest_time {
            self.latest_time = now;
            self.clock_was_set_back(now);
        }
        self.latest_time = self.latest_time.max(now);
    }

    /// Deadlines are in the database's time and do not change. A pause must not become longer by the hour that the
    /// clock was set back, so every pause ends now.
    fn clock_was_set_back(&mut self, now: Timestamp) {
        for item in self.hold.drain() {
            self.place(item, now, now);
        }
        self.ready.clock_was_set_back(now);
        self.late_taken_at = None;
        self.lock_waits.clock_was_set_back();
        self.availability.clock_was_set_back(now);
        self.rearm_retries.clock_was_set_back(now);
        self.circulation.clock_was_set_back(now);
        self.park_retries.clock_was_set_back(now);
        self.sweep.clock_was_set_back(now);
        self.look_ahead.clock_was_set_back(now);
        self.arrivals.clock_was_set_back();
        if let Some(closing) = &mut self.closing {
            closing.clock_was_set_back(now);
        }
    }

    fn is_paused(&self) -> bool {
        self.brake.is_paused()
    }

    fn update_closing_pause(&mut self) {
        let is_paused = self.is_paused();
        if let Some(closing) = &mut self.closing {
            closing.set_paused(is_paused);
        }
    }

    /// Claimed orders wait in the database; the closing protocol takes them over from there.
    fn note_claimed(&mut self, result: &BatchResult, now: Timestamp) {
        let is_claimed = |found: &CloseResult| matches!(found, Ok(found) if found.outcome == Outcome::Claimed);
        if let (Some(closing), Ok(results)) = (&mut self.closing, result)
            && results.values().any(is_claimed)
        {
            closing.note_claimed(now);
        }
    }

    fn acknowledge(&mut self, receipts: impl IntoIterator<Item = Receipt>) {
        self.settlements.extend(receipts.into_iter().map(|receipt| (receipt, Settlement::Ack)));
    }

    fn requeue(&mut self, receipts: impl IntoIterator<Item = Receipt>) {
        self.settlements.extend(receipts.into_iter().map(|receipt| (receipt, Settlement::Requeue)));
    }

    fn receive(&mut self, delivered: Delivered, now: Timestamp) {
        let Delivered { receipt, source, content, death } = delivered;
        if self.draining {
            return self.requeue([receipt]);
        }
        match content {
            Err(dead_letter) => self.dead_letters.push_back((dead_letter, receipt)),
            Ok(mut alarm) => {
                let is_too_far = alarm.deadline() > now + self.policy.max_delay;
                // A publisher whose clock runs ahead must not make its message look younger than it is.
                alarm.first_published_at =
                    Some(alarm.first_published_at.map_or(now, |first_published_at| first_published_at.min(now)));
                let early_before = alarm.returns.early;
                self.circulation.note_return(&mut alarm, now);
                let is_own = alarm.alarm.kind == self.policy.kind;
                if !is_own && !self.policy.other_kinds.contains(&alarm.alarm.kind) {
                    let detail = unknown_kind(&alarm.alarm.kind);
                    return self
                        .dead_letters
                        .push_back((DeadLetter::of(&alarm, ParkReason::UnknownKind, detail), receipt));
                }
                match source {
                    SourceQueue::Parked => self.receive_dead_lettered(alarm, early_before, receipt, death, now),
                    SourceQueue::Inbox | SourceQueue::Timeout if is_too_far => {
                        let detail =
                            "the deadline lies further ahead than delay.max_delay allows; correct it at the publisher";
                        self.dead_letters.push_back((DeadLetter::of(&alarm, ParkReason::TooFar, detail), receipt));
                    }
                    // Alarms from the inbox are never held here: an alarm that is due soon is sent on to the processing
                    // queue of its kind. Otherwise it would fill the inbox's prefetch window and everything behind it would wait.
                    // The broker redelivers what came in an ended session.
                    SourceQueue::Inbox if self.session_has_ended(receipt.session) => {}
                    SourceQueue::Timeout if !is_own && self.session_has_ended(receipt.session) => {}
                    // Waiting for a token, it would fill that window as well. The processing queue's window has room.
                    SourceQueue::Inbox if circulates(&alarm) => {
                        self.rearms.push(Rearm { alarm, receipt, wanted: Wanted::AtOnce });
                    }
                    SourceQueue::Inbox => self.rearms.push(Rearm { alarm, receipt, wanted: Wanted::BeforeDeadline }),
                    // Published with the key of another kind's queue.
                    SourceQueue::Timeout if !is_own => self.forward(alarm, receipt),
                    SourceQueue::Timeout => self.accept(WorkItem::new(alarm, Origin::Delivered(receipt)), now),
                }
            }
        }
    }

    /// Handles a message that the broker itself took out of the inbox or the processing queue. What a policy has done
    /// is not the alarm's fault, so the alarm goes on; what was returned too often or rejected is parked for a person.
    fn receive_dead_lettered(
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
                alarm.returns.early = alarm.returns.early.max(early_before.saturating_add(1));
                if alarm.alarm.kind != self.policy.kind {
                    if !self.session_has_ended(receipt.session) {
                        self.forward(alarm, receipt);
                    }
                } else if alarm.deadline() <= now || circulates(&alarm) {
                    self.accept(WorkItem::new(alarm, Origin::Delivered(receipt)), now);
                } else if !self.session_has_ended(receipt.session) {
                    // Not held here, for the same reason as in the inbox.
                    self.rearms.push(Rearm { alarm, receipt, wanted: Wanted::BeforeDeadline });
                }
                return;
            }
            Some(death) => explain_death(&death),
            None => "the broker dead-lettered it; look at the worker's log around its deliveries".to_owned(),
        };
        self.dead_letters.push_back((DeadLetter::of(&alarm, ParkReason::BrokerGaveUp, detail), receipt));
    }

    /// Sends an alarm of another kind on to where that kind's engine gets it, which also has it wait for a token if it circulates.
    fn forward(&mut self, alarm: DeliveredAlarm, receipt: Receipt) {
        let wanted = if circulates(&alarm) { Wanted::AtOnce } else { Wanted::BeforeDeadline };
        self.rearms.push(Rearm { alarm, receipt, wanted });
    }

    /// Plans another try for rearms that failed. The broker redelivers what came in an ended session.
    fn retry_rearms(&mut self, mut rearms: Vec<Rearm>, scope: FailureScope, now: Timestamp) {
        self.rearming -= rearms.len();
        if self.draining {
            return self.requeue(rearms.into_iter().map(|rearm| rearm.receipt));
        }
        rearms.retain(|rearm| rearm.receipt.session >= self.session);
        self.rearm_retries.put(rearms, scope, now, &self.policy);
        if self.is_consuming {
            let expired = self.rearm_retries.take_expired(now, self.policy.requeue_after);
            self.requeue(expired.into_iter().map(|rearm| rearm.receipt));
        }
    }

    /// The same for dead letters.
    fn retry_parks(&mut self, mut dead_letters: Vec<(DeadLetter, Receipt)>, scope: FailureScope, now: Timestamp) {
        self.parking -= dead_letters.len();
        if self.draining {
            return self.requeue(dead_letters.into_iter().map(|(_, receipt)| receipt));
        }
        dead_letters.retain(|(_, receipt)| receipt.session >= self.session);
        self.park_retries.put(dead_letters, scope, now, &self.policy);
        if self.is_consuming {
            let expired = self.park_retries.take_expired(now, self.policy.requeue_after);
            self.requeue(expired.into_iter().map(|(_, receipt)| receipt));
        }
    }

    /// Puts a work item where its deadline says: the wheel, the hold, or the next batch, for which it has lingered
    /// since `since`.
    fn place(&mut self, item: WorkItem, now: Timestamp, since: Timestamp) {
        let deadline = item.alarm.deadline();
        if deadline > now + self.policy.hold_max {
            self.rearm(item, Wanted::BeforeDeadline);
        } else if deadline > now {
            self.hold_until(deadline, item);
        } else {
            self.mark_in_flight(item.alarm.order_id());
            match (item.origin, self.is_retry(&item, now)) {
                (Origin::LookedAhead, false) => self.ready.looked_ahead.push(item, since),
                (Origin::LookedAhead | Origin::Swept, _) => self.ready.overdue.push(item, since),
                (Origin::Delivered(_), true) => self.ready.retries.push(item, since),
                (Origin::Delivered(_), false) => self.ready.fresh.push(item, since),
            }
        }
    }

    fn accept(&mut self, item: WorkItem, now: Timestamp) {
        let sweep_finds_it = item.alarm.deadline() + self.policy.sweep_grace < now;
        if sweep_finds_it && !self.is_retry(&item, now) {
            self.mark_in_flight(item.alarm.order_id());
            self.ready.late.push(item, now);
        } else {
            self.place(item, now, now);
        }
    }

    fn is_retry(&self, item: &WorkItem, now: Timestamp) -> bool {
        item.was_tried() || self.lock_waits.has_just_failed(item.alarm.order_id(), now)
    }

    /// Only a delivered alarm is rearmed; an order found by the sweep has its row. And only in its own session: the
    /// broker redelivers what came in an ended session, so rearming it would put it at the broker twice.
    fn rearm(&mut self, item: WorkItem, wanted: Wanted) {
        if let Origin::Delivered(receipt) = item.origin
            && !self.session_has_ended(receipt.session)
        {
            if wanted == Wanted::BeforeDeadline && circulates(&item.alarm) && !item.has_token {
                return self.wait_for_token(item);
            }
            self.rearms.push(Rearm { alarm: item.alarm, receipt, wanted });
        }
    }

    /// Held until then, or until it is held for its deadline anyway.
    fn wait_for_token(&mut self, item: WorkItem) {
        let usable_at = self.circulation.take_token(self.latest_time);
        let held_from = item.alarm.deadline() - self.policy.hold_max;
        self.hold_until(usable_at.min(held_from), WorkItem { has_token: true, ..item });
    }

    /// A session's first deliveries may arrive before the input that opens it.
    fn session_has_ended(&self, session: u64) -> bool {
        session < self.session || (session == self.session && !self.is_consuming)
    }

    fn hold_until(&mut self, moment: Timestamp, item: WorkItem) {
        let key = (item.alarm.order_id().clone(), item.alarm.deadline());
        let Err(redelivered) = self.hold.wait(key.clone(), moment, item) else { return };
        let waiting = self.hold.get_mut(&key).expect("wait() returns only an alarm that is already held");
        if waiting.origin == Origin::LookedAhead {
            // From now on there is a delivery to settle.
            *waiting = redelivered;
            return;
        }
        let (Origin::Delivered(new), Origin::Delivered(old)) = (redelivered.origin, waiting.origin) else { return };
        if new.session < old.session {
            return; // the new receipt is void, there is nothing to settle
        }
        if old.session < new.session {
            // The held alarm came in an earlier session and the broker has just redelivered it: from now on it has this
            // receipt. Acknowledging the redelivery would leave the order without an alarm at the broker.
            waiting.origin = redelivered.origin;
        } else if old != new {
            self.settlements.push((new, Settlement::Ack));
        }
    }

    /// No further page before the last one is worked off: after a long outage the overdue orders would not fit in
    /// memory. And none while nothing can be closed.
    fn wants_sweep_page(&self) -> bool {
        !self.draining
            && !self.arrivals.is_looking()
            && !self.is_paused()
            && !self.availability.is_unavailable()
            && self.ready.swept_len() < self.policy.sweep_page
            && self.ready.looked_ahead.len() < self.policy.sweep_page
    }

    /// Notes whether the alarms of these orders, which are about to fall due, are here.
    fn note_arrivals(&mut self, page: &SweptPage, now: Timestamp) {
        for order in &page.orders {
            let is_here = self.has_alarm(&key_of(order)) || !self.look_ahead.must_be_here(order.deadline, &self.policy);
            if self.arrivals.note(order, is_here, self.look_ahead.workers()) {
                self.look_ahead.note_missing(now);
            }
        }
    }

    fn accept_overdue(&mut self, page: SweptPage, now: Timestamp) {
        let mut failed_before = Vec::new();
        let closers_are_behind = self.idle_closers == 0 && self.ready.has_fresh_alarms();
        let looks_ahead = self.reads_ahead();
        let nothing_is_new =
            closers_are_behind && !page.orders.is_empty() && page.orders.iter().all(|one| self.has_alarm(&key_of(one)));
        let wanted = self.sweep.take_page(page, &self.policy, now);
        // In a large burst, page after page of orders that the closers already have would only take Postgres' time from
        // them.
        if nothing_is_new {
            self.sweep.cut_short(&self.policy, now);
        }
        for overdue in wanted {
            let key = key_of(&overdue);
            if self.has_alarm(&key) || self.draining {
                continue;
            }
            if looks_ahead && self.look_ahead.leaves_to_others(&overdue, &self.policy, now) {
                continue;
            }
            let alarm = Alarm { kind: self.policy.kind.clone(), order_id: key.0.clone(), deadline: key.1 };
            let last_try = self.sweep.last_try(&key.0);
            // By the worker's reading of the clock it may have passed a little before it does by the database's.
            let has_just_passed = looks_ahead && last_try == LastTry::None && now < key.1 + JUST_PASSED;
            if key.1 > now || has_just_passed {
                self.place(WorkItem::new(alarm.into(), Origin::LookedAhead), now, now);
                continue;
            }
            self.mark_in_flight(&key.0);
            let item = WorkItem::new(alarm.into(), Origin::Swept);
            match last_try {
                LastTry::None => self.ready.overdue.push(item, now),
                LastTry::Busy => self.ready.busy.push(item, now),
                LastTry::Failed => failed_before.push(item),
            }
        }
        self.queue_failed_before(failed_before, now);
    }

    fn has_alarm(&self, key: &(OrderId, Deadline)) -> bool {
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

fn unknown_kind(kind: &Kind) -> String {
    format!(
        "the kind \"{kind}\" is not configured here; add [kinds.{kind}] to the settings of all workers and run `order-timeout setup`, or correct it at the publisher"
    )
}

fn key_of(overdue: &Overdue) -> (OrderId, Deadline) {
    (overdue.order_id.clone(), overdue.deadline)
}

fn receipt_of(item: &WorkItem) -> Option<Receipt> {
    match item.origin {
        Origin::Delivered(receipt) => Some(receipt),
        Origin::LookedAhead | Origin::Swept => None,
    }
}

#[cfg(test)]
pub(crate) mod tests;
