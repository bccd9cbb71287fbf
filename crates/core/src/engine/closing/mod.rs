//! The closing protocol with a payment provider: an order that is unpaid and due is claimed (`closing`), its attempts to
//! pay are asked about and cancelled at the provider, and only then it is closed, settled as paid, or left to a person.
//! `attempt.rs` holds the answer table, `claimed_order.rs` what all attempts of an order mean together, `end_queue.rs`
//! what waits for a statement, `types.rs` what goes in and out.
//!
//! Pure, like the whole engine. Keeps nothing that a crash may lose: an order that waits does so in the table
//! `close_attempts`, and comes back from there, to this worker or to another. An alarm is acknowledged as soon as its
//! order is claimed.

mod attempt;
mod claimed_order;
mod end_queue;
mod types;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::brake::ProviderCounts;
use crate::order::{CloseError, OrderId, Timestamp};
use claimed_order::{ClaimedOrder, OrderVerdict};
use end_queue::EndQueue;
pub use types::{
    AttemptKey, Call, CallKind, Claim, ClaimedAttempt, ClosingAction, ClosingInput, ClosingPolicy, EndOutcome, Ended,
    Ending, EndingKind, Lease, PaidEnding, Postponement, Recorded, ResumePage, Step, UnresolvedReason,
};

/// Between two pages, so that a page is not one order for each that was finished.
const MIN_RESUME_PAUSE: Duration = Duration::from_millis(5);

/// The pause before an order is tried again whose row or stock another session has locked; it doubles, up to
/// [`LONGEST_END_PAUSE`].
const FIRST_END_PAUSE: Duration = Duration::from_millis(25);
const LONGEST_END_PAUSE: Duration = Duration::from_secs(1);

/// So often a lease is renewed before it would be over.
const RENEWALS_IN_LEASE: u32 = 3;

/// How a verdict is written.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    Close(Ending),
    SettlePaid(PaidEnding),
    Postpone(Postponement),
}

impl End {
    fn kind(&self) -> EndingKind {
        match self {
            Self::Close(_) => EndingKind::Close,
            Self::SettlePaid(_) => EndingKind::SettlePaid,
            Self::Postpone(_) => EndingKind::Postpone,
        }
    }
}

/// An order of this worker, and how it ends once that is known.
#[derive(Debug)]
struct Order {
    claimed: ClaimedOrder,
    end: Option<End>,
    /// How often its statement found a lock or no database.
    pauses: u32,
    /// The brake was told of it.
    is_counted: bool,
    /// When its lease began, or was renewed.
    leased_at: Timestamp,
}

/// The orders that belong to this worker, and when it looks for more.
#[derive(Debug)]
pub(super) struct Closing {
    policy: ClosingPolicy,
    pause_share: f64,
    orders: BTreeMap<OrderId, Order>,
    /// Orders with calls that may have to be made.
    to_call: Vec<OrderId>,
    ends: EndQueue,
    resume_at: Timestamp,
    resumed_at: Timestamp,
    /// The page that was asked for and has not come.
    asked: Option<ResumePage>,
    /// Queues in which more orders may wait than the last page could take.
    full: BTreeSet<String>,
    failures: u32,
    draining: bool,
    is_paused: bool,
    /// What providers answered about orders, for the brake: each order once, with its first verdict.
    answers: ProviderCounts,
}

impl Closing {
    /// `pause_share`: as in the engine's policy.
    pub fn new(policy: ClosingPolicy, pause_share: f64) -> Self {
        let never = Timestamp::from_unix_micros(i64::MIN);
        Self {
            policy,
            pause_share,
            orders: BTreeMap::new(),
            to_call: Vec::new(),
            ends: EndQueue::default(),
            resume_at: never,
            resumed_at: never,
            asked: None,
            full: BTreeSet::new(),
            failures: 0,
            draining: false,
            is_paused: false,
            answers: ProviderCounts::default(),
        }
    }

    /// How many orders belong to this worker.
    pub fn len(&self) -> usize {
        self.orders.len()
    }

    /// What providers answered since the last call.
    pub fn take_answer_counts(&mut self) -> ProviderCounts {
        std::mem::take(&mut self.answers)
    }

    /// Orders were claimed: they wait to be taken over.
    pub fn note_claimed(&mut self, now: Timestamp) {
        self.resume_at = self.resume_at.min(now);
    }

    pub fn handle(&mut self, input: ClosingInput, now: Timestamp) {
        match input {
            ClosingInput::Resumed(claims) => self.take_over(claims, now),
            ClosingInput::NotResumed(_) => {
                self.asked = None;
                self.resume_at = now + self.pause(FIRST_END_PAUSE, self.failures, LONGEST_END_PAUSE);
                self.failures = self.failures.saturating_add(1);
            }
            ClosingInput::Answered(call, answer) => {
                let Some(order) = self.orders.get_mut(&call.order_id) else { return };
                if order.claimed.claim.lease == call.lease && order.end.is_none() {
                    order.claimed.take_answer(call.number, call.kind, &answer, now);
                    self.conclude(&call.order_id, now);
                    self.to_call.push(call.order_id);
                }
            }
            ClosingInput::Ended(kind, ended) => {
                self.ends.finished(kind);
                ended.into_iter().for_each(|one| self.end(one, now));
            }
        }
    }

    pub fn poll_actions(&mut self, now: Timestamp) -> Vec<ClosingAction> {
        let mut actions = Vec::new();
        if !self.is_paused {
            actions.extend(self.next_page(now).map(ClosingAction::Resume));
            for id in std::mem::take(&mut self.to_call) {
                if let Some(order) = self.orders.get_mut(&id).filter(|order| order.end.is_none()) {
                    actions.extend(order.claimed.take_calls().into_iter().map(ClosingAction::Call));
                }
            }
        }
        for kind in self.kinds_of_ends() {
            let ids = self.ends.take(kind, self.policy.batch_size, now);
            if !ids.is_empty() {
                actions.push(self.end_action(kind, &ids));
            }
        }
        actions
    }

    fn end_action(&self, kind: EndingKind, ids: &[OrderId]) -> ClosingAction {
        let ends = ids.iter().filter_map(|id| self.orders.get(id)?.end.clone());
        match kind {
            EndingKind::Close => ClosingAction::CloseClaimed(
                ends.filter_map(|end| if let End::Close(ending) = end { Some(ending) } else { None }).collect(),
            ),
            EndingKind::SettlePaid => ClosingAction::SettlePaid(
                ends.filter_map(|end| if let End::SettlePaid(ending) = end { Some(ending) } else { None }).collect(),
            ),
            EndingKind::Postpone => ClosingAction::Postpone(
                ends.filter_map(|end| if let End::Postpone(ending) = end { Some(ending) } else { None }).collect(),
            ),
        }
    }

    pub fn next_wakeup(&self) -> Option<Timestamp> {
        let page_at = self.page_ready_at().filter(|_| !self.is_paused);
        self.kinds_of_ends().filter_map(|kind| self.ends.ready_at(kind)).chain(page_at).min()
    }

    /// While closing is paused, an order that is proved to be paid is still settled, and what is given back is written;
    /// no provider is asked or told anything, and no order is taken over or closed.
    pub fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
    }

    /// The statements that may run: while closing is paused, those that close no order.
    fn kinds_of_ends(&self) -> impl Iterator<Item = EndingKind> + use<> {
        let is_paused = self.is_paused;
        EndQueue::KINDS.into_iter().filter(move |kind| !is_paused || *kind != EndingKind::Close)
    }

    /// Gives back what is not being written at this moment. A call that is under way may be repeated by another worker.
    pub fn drain(&mut self, now: Timestamp) {
        self.draining = true;
        let asked: Vec<OrderId> =
            self.orders.iter().filter(|(_, order)| order.end.is_none()).map(|(id, _)| id.clone()).collect();
        asked.into_iter().for_each(|id| self.give_back(&id, now));
    }

    /// Times in the table stay as they are: an order that waits there does so by as much longer as the clock was set
    /// back.
    pub fn clock_was_set_back(&mut self, now: Timestamp) {
        self.resume_at = now.min(self.resume_at);
        self.resumed_at = now.min(self.resumed_at);
        self.ends.clock_was_set_back(now);
    }

    // ---------------------------------------------------------------------------------------------- taking over

    fn page_ready_at(&self) -> Option<Timestamp> {
        (self.asked.is_none() && !self.draining).then(|| self.resume_at.max(self.resumed_at + MIN_RESUME_PAUSE))
    }

    fn next_page(&mut self, now: Timestamp) -> Option<ResumePage> {
        if self.page_ready_at()? > now {
            return None;
        }
        let rooms = self.room_by_queue();
        let full = rooms.iter().filter(|(_, room)| **room == 0).map(|(queue, _)| (*queue).to_owned()).collect();
        let limits: Vec<(String, usize)> =
            rooms.into_iter().filter(|(_, room)| *room > 0).map(|(queue, room)| (queue.to_owned(), room)).collect();
        let is_old = |order: &Order| order.leased_at + self.policy.lease / RENEWALS_IN_LEASE <= now;
        let old = self.orders.iter().filter(|(_, order)| is_old(order));
        let renewed = old.map(|(id, order)| (id.clone(), order.claimed.claim.lease)).collect();
        let page = ResumePage { lease: self.policy.lease, limits, renewed };
        self.full = full;
        self.resumed_at = now;
        self.resume_at = now + self.policy.resume_every;
        self.asked = Some(page.clone());
        Some(page)
    }

    /// How many more orders of each queue this worker can take.
    fn room_by_queue(&self) -> BTreeMap<&str, usize> {
        let mut rooms: BTreeMap<&str, usize> =
            self.policy.queues.iter().map(|(queue, most)| (queue.as_str(), *most)).collect();
        for Order { claimed, .. } in self.orders.values() {
            let providers = claimed.claim.attempts.iter().map(|one| one.attempt.provider.as_str());
            let mut queues: Vec<&str> = providers.filter(|provider| claimed.needs(provider)).collect();
            // One that waits for no call any more counts until it is written.
            queues.push(&claimed.claim.queue);
            queues.sort_unstable();
            queues.dedup();
            for queue in queues {
                rooms.entry(queue).and_modify(|room| *room = room.saturating_sub(1));
            }
        }
        rooms
    }

    fn take_over(&mut self, claims: Vec<Claim>, now: Timestamp) {
        self.failures = 0;
        if let Some(page) = self.asked.take() {
            for (id, lease) in &page.renewed {
                if let Some(order) = self.orders.get_mut(id).filter(|order| order.claimed.claim.lease == *lease) {
                    order.leased_at = self.resumed_at;
                }
            }
            self.full.extend(full_queues(page, &claims));
        }
        for claim in claims {
            let id = claim.order_id.clone();
            let full = self.full_provider_of(&claim);
            // If it is here already, its lease has run out: answers to the calls of the earlier one are ignored.
            self.ends.remove(&id);
            let is_counted = claim.was_judged || self.orders.get(&id).is_some_and(|order| order.is_counted);
            let claimed = ClaimedOrder::new(claim);
            let order = Order { claimed, end: None, pauses: 0, is_counted, leased_at: self.resumed_at };
            self.orders.insert(id.clone(), order);
            self.to_call.push(id.clone());
            match full {
                _ if self.draining => self.give_back(&id, now),
                Some(provider) => self.postpone(&id, |end| end.queue = provider, now),
                None => self.conclude(&id, now),
            }
        }
    }

    /// A provider that this order needs, that is not the one whose queue it comes from, and that has no room.
    fn full_provider_of(&self, claim: &Claim) -> Option<String> {
        let providers = claim.attempts.iter().map(|one| &one.attempt.provider);
        let mut others = providers.filter(|provider| **provider != claim.queue).peekable();
        others.peek()?;
        let room = self.room_by_queue();
        others.find(|provider| room.get(provider.as_str()) == Some(&0)).cloned()
    }

    /// Looks for more orders if there is room in a queue in which more may wait.
    fn note_room(&mut self, now: Timestamp) {
        if self.full.is_empty() {
            return;
        }
        let room = self.room_by_queue();
        if self.full.iter().any(|queue| room.get(queue.as_str()) != Some(&0)) {
            self.resume_at = self.resume_at.min(now);
        }
    }

    // --------------------------------------------------------------------------------------------------- ending

    /// Decides how an order ends, if no call about it is missing.
    fn conclude(&mut self, id: &OrderId, now: Timestamp) {
        let Some(order) = self.orders.get_mut(id) else { return };
        let Some((verdict, closed)) = order.claimed.verdict() else { return };
        let (rounds, has_waited) = (order.claimed.claim.rounds, order.claimed.claim.has_waited);
        if !std::mem::replace(&mut order.is_counted, true) {
            note_answer(&mut self.answers, &order.claimed.claim, &verdict);
        }
        match verdict {
            OrderVerdict::Close => self.end_with(id, now, |ending| End::Close(Ending { closed, ..ending })),
            OrderVerdict::SettlePaid { paid, differing, refunded } => self.end_with(id, now, |ending| {
                let ending = Ending { closed, ..ending };
                End::SettlePaid(PaidEnding { ending, paid, differing, refunded })
            }),
            OrderVerdict::Wait(provider) => {
                // A second wait is one for a bank, and may last for days.
                let wait = if has_waited { self.policy.retry_longest } else { self.policy.in_progress_wait };
                let until = now + wait;
                let change = |end: &mut Postponement| {
                    (end.step, end.until, end.queue) = (Step::InProgress, until, provider);
                    end.has_waited = true;
                    end.ending.closed = closed;
                };
                self.postpone(id, change, now);
            }
            OrderVerdict::AskAgain { provider, retry_after, is_round } => {
                let (step, until, rounds) = match is_round {
                    true => self.next_round(rounds, retry_after, UnresolvedReason::NoAnswer, now),
                    // It is known that nothing was learnt, and often until when: only the provider's answers count.
                    false => (Step::NoAnswer, self.pause_without_round(rounds, retry_after, now), rounds),
                };
                let change = |end: &mut Postponement| {
                    (end.step, end.until, end.queue, end.rounds) = (step, until, provider, rounds);
                    end.ending.closed = closed;
                };
                self.postpone(id, change, now);
            }
            OrderVerdict::Unresolved(reason) => {
                let change = |end: &mut Postponement| {
                    end.step = Step::Unresolved(reason);
                    end.ending.closed = closed;
                };
                self.postpone(id, change, now);
            }
        }
    }

    /// What an order waits for after a round without a verdict, until when, and how many rounds there were.
    fn next_round(
        &self,
        rounds: u32,
        retry_after: Option<Duration>,
        reason: UnresolvedReason,
        now: Timestamp,
    ) -> (Step, Timestamp, u32) {
        let after = rounds.saturating_add(1);
        if after >= self.policy.max_rounds {
            return (Step::Unresolved(reason), now, after);
        }
        (Step::NoAnswer, self.pause_until(rounds, retry_after, now), after)
    }

    fn pause_until(&self, rounds: u32, retry_after: Option<Duration>, now: Timestamp) -> Timestamp {
        let pause = self.pause(self.policy.retry_first, rounds, self.policy.retry_longest);
        // Longer than the longest pause would keep the order from its list for as long as the provider likes.
        let asked_for = retry_after.unwrap_or_default().min(self.policy.retry_longest);
        now + pause.max(asked_for)
    }

    fn pause_without_round(&self, rounds: u32, known: Option<Duration>, now: Timestamp) -> Timestamp {
        known.map_or_else(|| self.pause_until(rounds, None, now), |pause| now + pause.min(self.policy.retry_longest))
    }

    fn pause(&self, first: Duration, times: u32, longest: Duration) -> Duration {
        first.saturating_mul(2_u32.saturating_pow(times.min(16))).min(longest).mul_f64(self.pause_share)
    }

    /// Writes the order down so that it can be taken over at once.
    fn give_back(&mut self, id: &OrderId, now: Timestamp) {
        self.postpone(id, |_| {}, now);
    }

    /// Writes the order down as it was claimed, with this change.
    fn postpone(&mut self, id: &OrderId, change: impl FnOnce(&mut Postponement), now: Timestamp) {
        let Some(order) = self.orders.get(id) else { return };
        let Claim { queue, rounds, has_waited, .. } = order.claimed.claim.clone();
        self.end_with(id, now, |ending| {
            let mut end = Postponement { ending, step: Step::Claimed, until: now, queue, rounds, has_waited };
            change(&mut end);
            End::Postpone(end)
        });
    }

    fn end_with(&mut self, id: &OrderId, now: Timestamp, make: impl FnOnce(Ending) -> End) {
        let Some(order) = self.orders.get_mut(id) else { return };
        let claimed = &order.claimed;
        let (lease, answers) = (claimed.claim.lease, claimed.answers().to_owned());
        let end = make(Ending { order_id: id.clone(), lease, closed: Vec::new(), answers });
        self.ends.put(end.kind(), id.clone(), now);
        order.end = Some(end);
    }

    /// What the statement of an order's end has found.
    fn end(&mut self, ended: Ended, now: Timestamp) {
        let Ended { order_id: id, lease, outcome } = ended;
        let Some(order) = self.orders.get(&id) else { return };
        let Some(end) = order.end.as_ref().filter(|_| order.claimed.claim.lease == lease) else { return };
        let kind = end.kind();
        match (outcome, kind) {
            (Ok(EndOutcome::NoDeadline), _) => self.leave_to_person(&id, UnresolvedReason::NoDeadline, now),
            (Ok(EndOutcome::Kept), _) => self.refuse(&id, "a trigger keeps the order as it is", now),
            (Ok(EndOutcome::AmountDiffers), _) => self.leave_to_person(&id, UnresolvedReason::AmountDiffers, now),
            (Ok(EndOutcome::NotDue(deadline)), _) => self.postpone(&id, |end| end.until = deadline, now),
            (Ok(EndOutcome::AttemptsChanged), _) => self.give_back(&id, now),
            (Ok(EndOutcome::Busy), _)
            | (Err(CloseError::Locked(_) | CloseError::Transient(_) | CloseError::Unavailable(_)), _)
                if !self.draining =>
            {
                self.try_again(&id, now);
            }
            (Err(CloseError::Rejected(why)), EndingKind::Close | EndingKind::SettlePaid) if !self.draining => {
                self.refuse(&id, &format!("the database refuses: {why}"), now);
            }
            // Finished; or another worker has it; or it cannot be written, and comes back when its lease is over.
            (Ok(_) | Err(_), _) => self.leave(&id, now),
        }
    }

    /// The database does not change the order.
    fn refuse(&mut self, id: &OrderId, why: &str, now: Timestamp) {
        let Some(order) = self.orders.get(id) else { return };
        let rounds = order.claimed.claim.rounds;
        let (step, until, rounds) = self.next_round(rounds, None, UnresolvedReason::Refused, now);
        let change = |end: &mut Postponement| {
            (end.step, end.until, end.rounds) = (step, until, rounds);
            // The last words that the list of unresolved orders needs.
            end.ending.answers = format!("{}; {why}", end.ending.answers);
        };
        self.postpone(id, change, now);
    }

    fn leave_to_person(&mut self, id: &OrderId, reason: UnresolvedReason, now: Timestamp) {
        self.postpone(id, |end| end.step = Step::Unresolved(reason), now);
    }

    fn try_again(&mut self, id: &OrderId, now: Timestamp) {
        let Some(order) = self.orders.get_mut(id) else { return };
        let times = order.pauses;
        order.pauses = times.saturating_add(1);
        let Some(kind) = order.end.as_ref().map(End::kind) else { return };
        let pause = self.pause(FIRST_END_PAUSE, times, LONGEST_END_PAUSE);
        self.ends.put(kind, id.clone(), now + pause);
    }

    /// The order is not this worker's any more. It is looked at when its pause is over, if it has one.
    fn leave(&mut self, id: &OrderId, now: Timestamp) {
        if let Some(Order { end: Some(End::Postpone(end)), .. }) = self.orders.remove(id)
            && end.step.reason().is_none()
        {
            self.resume_at = self.resume_at.min(end.until.max(now));
        }
        self.note_room(now);
    }
}

/// The first verdict about an order that was asked about. An order whose provider was not asked, because its circuit
/// breaker was open, is without an answer, too.
fn note_answer(answers: &mut ProviderCounts, claim: &Claim, verdict: &OrderVerdict) {
    if claim.rounds == 0 && !claim.has_waited && !claim.attempts.is_empty() {
        answers.asked += 1;
        answers.paid += u64::from(matches!(verdict, OrderVerdict::SettlePaid { .. }));
        answers.unknown += u64::from(matches!(verdict, OrderVerdict::AskAgain { .. }));
    }
}

/// The queues of which the page took as many orders as it could.
fn full_queues(page: ResumePage, claims: &[Claim]) -> BTreeSet<String> {
    let mut left: BTreeMap<String, usize> = page.limits.into_iter().collect();
    for claim in claims {
        left.entry(claim.queue.clone()).and_modify(|left| *left = left.saturating_sub(1));
    }
    left.into_iter().filter(|(_, left)| *left == 0).map(|(queue, _)| queue).collect()
}

#[cfg(test)]
mod tests;
