//! The worker's desk: what is done next with each alarm. Every decision stands here, and the branching on what a
//! close found is the one `match` in `Desk::after_close`.
//!
//! Pure: news comes in with the database's time, errands go out. No I/O, no clock, no task. `worker.rs` runs the
//! errands for real; the same desk can be driven through any interleaving in a test.

use std::collections::VecDeque;
use std::time::Duration;

use crate::alarm::{Alarm, Delivered, Inlet, Parcel, ParkReason, Receipt, Settlement};
use crate::hold::Hold;
use crate::order::{Deadline, Moment, OrderId, Outcome};

/// The bounds within which the desk decides. Each stands in `config/default.toml` with its reason.
#[derive(Debug, Clone)]
pub struct Policy {
    pub hold_max: Duration,
    pub max_delay: Duration,
    pub batch_size: usize,
    pub linger: Duration,
    pub closers: usize,
    pub retry_first: Duration,
    pub retry_longest: Duration,
    pub missing_for: Duration,
    pub max_attempts: u32,
    pub away_patience: Duration,
}

/// An alarm under way through the worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    pub alarm: Alarm,
    pub receipt: Receipt,
    /// How often it was put back for a moment without going through the broker.
    pub pauses: u32,
}

/// What the close statement found for one order, or why it could not be asked.
pub type Finding = Result<Found, CloseFault>;

/// One row of the close statement's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    pub outcome: Outcome,
    /// The deadline in the row, where the order exists.
    pub deadline: Option<Deadline>,
}

/// Why one order's close did not come to an outcome.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CloseFault {
    /// Somebody held a lock too long, a deadlock, a serialization failure, a timeout: try again, nobody is to blame.
    #[error("{0}")]
    Transient(String),
    /// This order cannot be closed as things stand: a constraint, a trigger, a value.
    #[error("{0}")]
    OfTheOrder(String),
    /// No order can be closed: the database is away, read-only, or does not know our statement.
    #[error("{0}")]
    Away(String),
}

/// What the desk hears.
#[derive(Debug)]
pub enum News {
    Delivered(Delivered),
    /// A batch came back from a closer: one finding per case.
    Closed(Vec<(Case, Finding)>),
    /// These alarms stand confirmed in the broker under a new message.
    Armed(Vec<Receipt>),
    /// These stand committed in `parked_alarms`.
    Parked(Vec<Receipt>),
}

/// What the desk wants done.
#[derive(Debug, PartialEq, Eq)]
pub enum Errand {
    Close(Vec<Case>),
    /// Publish a fresh alarm, confirmed, then report [`News::Armed`].
    Arm(Vec<ArmJob>),
    Park(Vec<(Parcel, Receipt)>),
    Settle(Vec<(Receipt, Settlement)>),
}

/// A fresh alarm to be written, and the receipt of the old one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArmJob {
    pub alarm: Alarm,
    pub receipt: Receipt,
    pub wanted: Wanted,
}

/// When an armed alarm should come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Shortly before its deadline.
    BeforeDeadline,
    /// Not before this moment: a retry.
    NotBefore(Moment),
}

/// What happens next with a case. Chosen by the pure functions below, carried out by `Desk::carry_out`.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Next {
    /// Nothing left to do.
    Ack,
    /// Wait for this deadline, in the hold or in the wheel.
    AwaitDeadline(Deadline),
    /// Back in a moment; nobody is to blame.
    Pause,
    /// Something is wrong with this one; back after a while that grows.
    Retry,
    Park(ParkReason, String),
}

/// Everything the worker has in hand.
#[derive(Debug)]
pub struct Desk {
    policy: Policy,
    hold: Hold<Case>,
    /// Due, never tried.
    fresh: Lingering,
    /// Due, tried before.
    again: Lingering,
    idle_closers: usize,
    away: Option<Away>,
    draining: bool,
    arm: Vec<ArmJob>,
    park: Vec<(Parcel, Receipt)>,
    settle: Vec<(Receipt, Settlement)>,
}

/// Those who are due and wait for a batch to fill.
#[derive(Debug, Default)]
struct Lingering {
    cases: VecDeque<Case>,
    /// When the longest-waiting of them came; `None` while nobody waits.
    since: Option<Moment>,
}

impl Lingering {
    fn push(&mut self, case: Case, now: Moment) {
        self.since.get_or_insert(now);
        self.cases.push_back(case);
    }

    fn is_empty(&self) -> bool {
        self.cases.is_empty()
    }

    /// A full batch at once, a smaller one after `linger`.
    fn ready_at(&self, policy: &Policy) -> Option<Moment> {
        let linger = if self.cases.len() >= policy.batch_size { Duration::ZERO } else { policy.linger };
        Some(self.since? + linger)
    }

    fn is_ready(&self, now: Moment, policy: &Policy) -> bool {
        self.ready_at(policy).is_some_and(|moment| moment <= now)
    }

    fn take(&mut self, policy: &Policy) -> Option<Vec<Case>> {
        let size = self.cases.len().min(policy.batch_size);
        let batch: Vec<Case> = self.cases.drain(..size).collect();
        self.since = self.since.filter(|_| !self.cases.is_empty());
        (!batch.is_empty()).then_some(batch)
    }

    fn drain(&mut self) -> Vec<Case> {
        self.since = None;
        self.cases.drain(..).collect()
    }
}

/// The database does not close anything: since when, and when it is asked next.
#[derive(Debug, Clone, Copy)]
struct Away {
    since: Moment,
    ask_again_at: Moment,
    asked: u32,
}

impl Desk {
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        let idle_closers = policy.closers;
        Self {
            policy,
            hold: Hold::default(),
            fresh: Lingering::default(),
            again: Lingering::default(),
            idle_closers,
            away: None,
            draining: false,
            arm: Vec::new(),
            park: Vec::new(),
            settle: Vec::new(),
        }
    }

    /// Takes note of what happened. `now` is the database's time.
    pub fn hear(&mut self, news: News, now: Moment) {
        match news {
            News::Delivered(delivered) => self.receive(delivered, now),
            News::Closed(findings) => self.conclude(findings, now),
            News::Armed(receipts) | News::Parked(receipts) => {
                self.settle.extend(receipts.into_iter().map(|receipt| (receipt, Settlement::Ack)));
            }
        }
    }

    /// Everything that can be done at `now`.
    pub fn errands(&mut self, now: Moment) -> Vec<Errand> {
        for case in self.hold.wake(now) {
            self.place(case, now);
        }
        let mut errands = Vec::new();
        while let Some(batch) = self.next_batch(now) {
            errands.push(Errand::Close(batch));
        }
        if !self.arm.is_empty() {
            errands.push(Errand::Arm(std::mem::take(&mut self.arm)));
        }
        if !self.park.is_empty() {
            errands.push(Errand::Park(std::mem::take(&mut self.park)));
        }
        if !self.settle.is_empty() {
            errands.push(Errand::Settle(std::mem::take(&mut self.settle)));
        }
        errands
    }

    /// When [`Desk::errands`] has something new to say even if no news comes.
    #[must_use]
    pub fn wake_at(&self) -> Option<Moment> {
        let batch_at = match self.away {
            Some(away) => {
                let somebody_waits = !self.fresh.is_empty() || !self.again.is_empty();
                (self.closers_are_idle() && somebody_waits).then_some(away.ask_again_at)
            }
            None => {
                let fresh_at = self.fresh.ready_at(&self.policy).filter(|_| self.idle_closers > 0);
                let again_at = self.again.ready_at(&self.policy).filter(|_| self.closer_to_spare());
                [fresh_at, again_at].into_iter().flatten().min()
            }
        };
        [self.hold.next_wake(), batch_at].into_iter().flatten().min()
    }

    /// Whether the broker should go on delivering. Not while the database has been away for long: what we cannot
    /// close must not stay unacknowledged until the broker loses patience.
    #[must_use]
    pub fn wants_deliveries(&self, now: Moment) -> bool {
        self.away.is_none_or(|away| now.since(away.since) < self.policy.away_patience)
    }

    /// Stops taking anything new and gives back to the broker whatever is not in a closer's hands.
    pub fn drain(&mut self) {
        self.draining = true;
        let waiting = [self.hold.drain(), self.fresh.drain(), self.again.drain()].into_iter().flatten();
        self.settle.extend(waiting.map(|case| (case.receipt, Settlement::Requeue)));
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

    fn receive(&mut self, delivered: Delivered, now: Moment) {
        let Delivered { receipt, inlet, content } = delivered;
        if self.draining {
            self.settle.push((receipt, Settlement::Requeue));
            return;
        }
        match content {
            Err(parcel) => self.park.push((parcel, receipt)),
            Ok(alarm) if inlet == Inlet::Parked => {
                let detail = "the broker dead-lettered it; look at the worker's log around its deliveries";
                self.park.push((Parcel::of(&alarm, ParkReason::BrokerGaveUp, detail), receipt));
            }
            Ok(alarm) if alarm.deadline() > now + self.policy.max_delay => {
                let detail = "the deadline lies further ahead than delay.max_delay allows; correct it at the publisher";
                self.park.push((Parcel::of(&alarm, ParkReason::TooFar, detail), receipt));
            }
            Ok(mut alarm) => {
                // A publisher whose clock runs ahead must not make its message younger than it is.
                alarm.born = Some(alarm.born.map_or(now, |born| born.min(now)));
                match inlet {
                    // The inbox is never held back: what is due soon is sent on to the processing queue, or it would
                    // fill the inbox's prefetch window and everything behind it would wait.
                    Inlet::Arm => self.arm.push(ArmJob { alarm, receipt, wanted: Wanted::BeforeDeadline }),
                    Inlet::Timeout | Inlet::Parked => self.place(Case { alarm, receipt, pauses: 0 }, now),
                }
            }
        }
    }

    /// Puts a case where its deadline says: the wheel, the hold, or the next batch.
    fn place(&mut self, case: Case, now: Moment) {
        let deadline = case.alarm.deadline();
        if deadline > now + self.policy.hold_max {
            self.arm.push(ArmJob { alarm: case.alarm, receipt: case.receipt, wanted: Wanted::BeforeDeadline });
        } else if deadline > now {
            self.wait_until(deadline, case);
        } else if case.pauses == 0 && case.alarm.attempt == 0 {
            self.fresh.push(case, now);
        } else {
            self.again.push(case, now);
        }
    }

    fn wait_until(&mut self, moment: Moment, case: Case) {
        let key = (case.alarm.order_id().clone(), case.alarm.deadline());
        let Err(newcomer) = self.hold.wait(key.clone(), moment, case) else { return };
        let waiting = self.hold.get_mut(&key).expect("wait() hands back only what is there already");
        if newcomer.receipt.session < waiting.receipt.session {
            return; // the newcomer's receipt is void, there is nothing to settle
        }
        if waiting.receipt.session < newcomer.receipt.session {
            // The one that waits came in an earlier session and the broker has just delivered it again: from now on
            // this receipt stands for it. Acknowledging it here would leave the order with no alarm at the broker.
            waiting.receipt = newcomer.receipt;
        } else if waiting.receipt != newcomer.receipt {
            self.settle.push((newcomer.receipt, Settlement::Ack));
        }
    }

    fn next_batch(&mut self, now: Moment) -> Option<Vec<Case>> {
        let batch = match self.away {
            // One closer asks whether the database is back; the others wait for its answer.
            Some(away) if now < away.ask_again_at || !self.closers_are_idle() => return None,
            Some(_) if self.fresh.is_empty() => self.again.take(&self.policy)?,
            Some(_) => self.fresh.take(&self.policy)?,
            None if self.idle_closers > 0 && self.fresh.is_ready(now, &self.policy) => self.fresh.take(&self.policy)?,
            None if self.closer_to_spare() && self.again.is_ready(now, &self.policy) => {
                self.again.take(&self.policy)?
            }
            None => return None,
        };
        self.idle_closers -= 1;
        Some(batch)
    }

    /// What was tried before never takes the last idle closer, so that trouble does not delay the rest.
    fn closer_to_spare(&self) -> bool {
        self.idle_closers > usize::from(self.policy.closers > 1)
    }

    fn conclude(&mut self, findings: Vec<(Case, Finding)>, now: Moment) {
        self.idle_closers += 1;
        self.note_whether_away(&findings, now);
        for (case, finding) in findings {
            let next = self.after_close(&case, finding, now);
            self.carry_out(case, next, now);
        }
    }

    fn note_whether_away(&mut self, findings: &[(Case, Finding)], now: Moment) {
        if !findings.iter().any(|(_, finding)| matches!(finding, Err(CloseFault::Away(_)))) {
            self.away = None;
            return;
        }
        let (since, asked) = self.away.map_or((now, 0), |away| (away.since, away.asked + 1));
        let pause = self.doubling(asked).min(self.policy.retry_longest);
        self.away = Some(Away { since, asked, ask_again_at: now + pause });
    }

    /// What to do with an alarm once its order was looked at: the whole outcome table, in one place.
    fn after_close(&self, case: &Case, finding: Finding, now: Moment) -> Next {
        match finding {
            Ok(Found { outcome, deadline }) => match outcome {
                Outcome::Closed | Outcome::Paid | Outcome::AlreadyClosed => Next::Ack,
                // Driven from its own index by whoever asks the provider, never from an unacknowledged message.
                Outcome::Closing => Next::Ack,
                Outcome::NotDue => Next::AwaitDeadline(deadline.unwrap_or(case.alarm.deadline())),
                Outcome::Busy => Next::Pause,
                Outcome::Malformed => Next::Park(
                    ParkReason::MalformedId,
                    "the order id is not of the form the orders table uses; correct it at the publisher".into(),
                ),
                Outcome::Unknown if now.since(case.alarm.born.unwrap_or(now)) <= self.policy.missing_for => Next::Retry,
                Outcome::Unknown => Next::Park(
                    ParkReason::UnknownOrder,
                    "no such order in the orders table; was its transaction rolled back, or does the publisher use another database?".into(),
                ),
            },
            Err(CloseFault::Transient(_) | CloseFault::Away(_)) => Next::Pause,
            Err(CloseFault::OfTheOrder(why)) if case.alarm.attempt >= self.policy.max_attempts => {
                Next::Park(ParkReason::CloseFailed, why)
            }
            Err(CloseFault::OfTheOrder(_)) => Next::Retry,
        }
    }

    fn carry_out(&mut self, case: Case, next: Next, now: Moment) {
        if self.draining && next != Next::Ack {
            self.settle.push((case.receipt, Settlement::Requeue));
            return;
        }
        match next {
            Next::Ack => self.settle.push((case.receipt, Settlement::Ack)),
            Next::AwaitDeadline(deadline) => self.await_deadline(case, deadline, now),
            Next::Pause => self.pause(case, now),
            Next::Retry => self.retry(case, now),
            Next::Park(reason, why) => self.park.push((Parcel::of(&case.alarm, reason, why), case.receipt)),
        }
    }

    fn await_deadline(&mut self, mut case: Case, deadline: Deadline, now: Moment) {
        case.alarm.due.deadline = deadline;
        case.pauses = 0;
        if deadline <= now {
            // Our idea of the database's time ran ahead of it by less than a batch took: wait, do not spin.
            self.wait_until(now + Duration::from_millis(1), case);
        } else {
            self.place(case, now);
        }
    }

    /// Back within `retry_longest`, without counting it as a failure.
    fn pause(&mut self, mut case: Case, now: Moment) {
        let wait = self.doubling(case.pauses).min(self.policy.retry_longest);
        case.pauses = case.pauses.saturating_add(1);
        self.wait_until(now + wait, case);
    }

    /// Back after a wait that doubles; the short ones here, the long ones at the broker, so that troubled alarms do
    /// not fill the prefetch window.
    fn retry(&mut self, mut case: Case, now: Moment) {
        let wait = self.doubling(case.pauses);
        if case.alarm.attempt == 0 && wait <= self.policy.retry_longest {
            self.pause(case, now);
            return;
        }
        let wait = self.policy.retry_longest * 2_u32.saturating_pow(case.alarm.attempt.min(5));
        // Saturating: the first attempt's number came with the message.
        case.alarm.attempt = case.alarm.attempt.saturating_add(1);
        self.arm.push(ArmJob { alarm: case.alarm, receipt: case.receipt, wanted: Wanted::NotBefore(now + wait) });
    }

    fn doubling(&self, times: u32) -> Duration {
        self.policy.retry_first * 2_u32.saturating_pow(times.min(16))
    }
}

/// Hands the findings of a batch to its cases. Two cases may speak of one order; an order without a row is unknown.
#[must_use]
pub fn match_findings(
    batch: Vec<Case>,
    findings: &std::collections::HashMap<OrderId, Finding>,
) -> Vec<(Case, Finding)> {
    let unknown = Ok(Found { outcome: Outcome::Unknown, deadline: None });
    batch
        .into_iter()
        .map(|case| {
            let finding = findings.get(case.alarm.order_id()).unwrap_or(&unknown).clone();
            (case, finding)
        })
        .collect()
}

#[cfg(test)]
mod tests;
