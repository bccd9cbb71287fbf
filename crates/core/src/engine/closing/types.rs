//! What goes in and out of the closing protocol: claims, calls, endings, and the limits.
//!
//! Data only: nothing is decided here.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::order::{CloseError, Deadline, OrderId, Timestamp};
use crate::payment::{Answer, Attempt, Money};

/// The limits of the closing protocol. The worker fills in its settings.
#[derive(Debug, Clone)]
pub struct ClosingPolicy {
    /// The queues that this worker serves, and how many orders of each may be with it at a time: one for each provider that it
    /// can ask, by name, so that one that does not answer takes up its own number only. The empty name is for orders without
    /// an attempt.
    pub queues: BTreeMap<String, usize>,
    /// How long an order belongs to the worker that took it, unless it renews the lease, which it does when a third is over.
    /// After a crash another worker takes the order over when it is over.
    pub lease: Duration,
    /// How often the worker looks for orders that are due, beside those that it knows of: another worker may have
    /// crashed.
    pub resume_every: Duration,
    /// How long an order waits for a customer who is paying, once.
    pub in_progress_wait: Duration,
    /// The pause after the first round without an answer. It doubles with each further one.
    pub retry_first: Duration,
    /// The longest pause, also if a provider asks for a longer one.
    pub retry_longest: Duration,
    /// After so many rounds without an answer the order is unresolved.
    pub max_rounds: u32,
    /// The most orders in one statement.
    pub batch_size: usize,
}

/// Names one period in which an order belongs to one worker. Every write about the order carries it, so that a worker
/// whose lease has run out changes nothing. No two of one order are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lease(pub i64);

/// What the shop has recorded of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recorded {
    /// Nothing yet.
    Open,
    /// Its money has arrived, though the order is not paid.
    Paid,
}

/// An attempt to pay an order that is being closed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimedAttempt {
    /// What the provider is asked about.
    pub attempt: Attempt,
    /// What is known of it without asking.
    pub recorded: Recorded,
    /// When it was begun, by the database's clock.
    pub begun_at: Timestamp,
    /// After this moment the provider takes no payment for it, as the shop has told it.
    pub payable_until: Option<Timestamp>,
}

/// An order in the state `closing` that belongs to this worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The order.
    pub order_id: OrderId,
    /// Until when it belongs to this worker is in the database.
    pub lease: Lease,
    /// Which provider's queue it waited in; empty if it has no attempt.
    pub queue: String,
    /// How many rounds ended without an answer.
    pub rounds: u32,
    /// Whether it has waited for a customer who was paying.
    pub has_waited: bool,
    /// Whether a worker has written a verdict about it before, also one for which no provider was asked.
    pub was_judged: bool,
    /// Every attempt that is not decided: neither closed, nor late money, nor refunded.
    pub attempts: Vec<ClaimedAttempt>,
}

/// What is asked of a provider.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CallKind {
    /// Whether the attempt is paid.
    Ask,
    /// To make sure that it cannot be paid any more.
    Cancel,
}

impl CallKind {
    /// The word for logs and for the history.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ask => "ask",
            Self::Cancel => "cancel",
        }
    }
}

/// One call to a provider. It may be repeated at any time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The order, and the lease under which it is made.
    pub order_id: OrderId,
    /// As above.
    pub lease: Lease,
    /// Which attempt of the claim it is about, from 0.
    pub number: usize,
    /// What is asked.
    pub kind: CallKind,
    /// About which attempt.
    pub attempt: Attempt,
}

/// Identifies an attempt: the provider's name and what it knows the attempt by.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttemptKey {
    /// The provider's name in the settings.
    pub provider: String,
    /// What the provider knows the attempt by.
    pub reference: String,
}

impl AttemptKey {
    pub(super) fn of(attempt: &Attempt) -> Self {
        Self { provider: attempt.provider.clone(), reference: attempt.reference.clone() }
    }
}

/// Why a person must look at an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum UnresolvedReason {
    /// Paid, but not what the attempt or the order costs.
    AmountDiffers,
    /// It was paid and the money was given back: a step is missing.
    Refunded,
    /// The shop has recorded a payment that the provider does not know.
    RecordedPaid,
    /// The provider has not said often enough that an attempt cannot be paid any more.
    NoAnswer,
    /// The database refuses the order's change: a constraint or a trigger.
    Refused,
    /// Its deadline was removed while it was being closed.
    NoDeadline,
    /// No live worker can ask the provider of its attempt. Written and taken back by what compares the workers' settings.
    NoProvider,
}

impl UnresolvedReason {
    /// The word in `close_attempts.unresolved_reason`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AmountDiffers => "amount_differs",
            Self::Refunded => "refunded",
            Self::RecordedPaid => "recorded_paid",
            Self::NoAnswer => "no_answer",
            Self::Refused => "refused",
            Self::NoDeadline => "no_deadline",
            Self::NoProvider => "no_provider",
        }
    }
}

/// What an order that is not finished waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// To be asked about.
    Claimed,
    /// A customer who is paying.
    InProgress,
    /// An answer that was missing.
    NoAnswer,
    /// A person.
    Unresolved(UnresolvedReason),
}

impl Step {
    /// The word in `close_attempts.step`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Claimed => "claimed",
            Self::InProgress => "in_progress",
            Self::NoAnswer => "no_answer",
            Self::Unresolved(_) => "unresolved",
        }
    }

    /// Why a person must look at it.
    #[must_use]
    pub const fn reason(self) -> Option<UnresolvedReason> {
        match self {
            Self::Unresolved(reason) => Some(reason),
            Self::Claimed | Self::InProgress | Self::NoAnswer => None,
        }
    }
}

/// How an order leaves this worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    /// The order, and the lease without which nothing is written.
    pub order_id: OrderId,
    /// As above.
    pub lease: Lease,
    /// Attempts that are proved to be closed.
    pub closed: Vec<AttemptKey>,
    /// What the providers answered, for the history and for the list of unresolved orders.
    pub answers: String,
}

/// An order that is settled as paid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PaidEnding {
    /// As of every ending.
    pub ending: Ending,
    /// The attempts whose money was taken; at least one.
    pub paid: Vec<AttemptKey>,
    /// Attempts of which another amount was received than they were to pay: late money, because the order is paid.
    pub differing: Vec<(AttemptKey, Money)>,
    /// Attempts that were paid and given back.
    pub refunded: Vec<AttemptKey>,
}

/// An order that stays `closing`, and when it is looked at again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Postponement {
    /// As of every ending.
    pub ending: Ending,
    /// What it waits for. An unresolved order is not looked at again.
    pub step: Step,
    /// Not before this.
    pub until: Timestamp,
    /// Which provider's queue it waits in.
    pub queue: String,
    /// How many rounds ended without an answer.
    pub rounds: u32,
    /// Whether it has had its wait for a customer who is paying.
    pub has_waited: bool,
}

/// A page of orders to take over: those whose time has come and whose lease is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResumePage {
    /// How long the orders belong to this worker.
    pub lease: Duration,
    /// The queues that have room, sorted, and how many orders can be taken of each.
    pub limits: Vec<(String, usize)>,
    /// Orders that this worker goes on with, whose leases are renewed.
    pub renewed: Vec<(OrderId, Lease)>,
}

/// What the closing protocol wants done.
#[derive(Debug, PartialEq, Eq)]
pub enum ClosingAction {
    /// Take orders over, then report `ClosingInput::Resumed` or `ClosingInput::NotResumed`.
    Resume(ResumePage),
    /// Make this call, then report `ClosingInput::Answered`.
    Call(Call),
    /// Close these, then report `ClosingInput::Ended`.
    CloseClaimed(Vec<Ending>),
    /// Settle these as paid, then report the same.
    SettlePaid(Vec<PaidEnding>),
    /// Write these down and give their leases back, then report the same.
    Postpone(Vec<Postponement>),
}

/// Which of the three statements an order ends with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EndingKind {
    /// `ClosingAction::CloseClaimed`
    Close,
    /// `ClosingAction::SettlePaid`
    SettlePaid,
    /// `ClosingAction::Postpone`
    Postpone,
}

/// What the statement found for one order. The words are those of the column `outcome`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndOutcome {
    /// The order is closed, and its stock is back.
    Closed,
    /// The order is paid, and its stock is consumed.
    Settled,
    /// It is written down and waits.
    Postponed,
    /// Another payment came first: nothing was to be done.
    AlreadyPaid,
    /// It was closed, cancelled or deleted meanwhile, or made unpaid again.
    AlreadyClosed,
    /// The same, and the money of its attempts is recorded as late.
    PaidLate,
    /// A trigger keeps the order as it is.
    Kept,
    /// It has no deadline any more.
    NoDeadline,
    /// The lease has run out, or the order is unresolved: another worker, or a person, has it now.
    LeaseLost,
    /// Another session holds a lock on the order or its stock.
    Busy,
    /// By the database's clock it is not due until then: the clock was set back.
    NotDue(Deadline),
    /// It has an attempt about which nothing was asked.
    AttemptsChanged,
    /// What was paid does not cover what the order costs.
    AmountDiffers,
}

impl EndOutcome {
    /// The word for [`EndOutcome::NotDue`], of which a constant has no value.
    pub const NOT_DUE: &'static str = "not_due";
    /// The word for [`EndOutcome::NoDeadline`].
    pub const NO_DEADLINE: &'static str = "no_deadline";

    /// The word in metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Settled => "settled",
            Self::Postponed => "postponed",
            Self::AlreadyPaid => "already_paid",
            Self::AlreadyClosed => "already_closed",
            Self::PaidLate => "paid_late",
            Self::Kept => "kept",
            Self::NoDeadline => Self::NO_DEADLINE,
            Self::LeaseLost => "lease_lost",
            Self::Busy => "busy",
            Self::NotDue(_) => Self::NOT_DUE,
            Self::AttemptsChanged => "attempts_changed",
            Self::AmountDiffers => "amount_differs",
        }
    }
}

/// An order with the outcome of its statement, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// The order, and the lease of its ending.
    pub order_id: OrderId,
    /// As above.
    pub lease: Lease,
    /// What was found.
    pub outcome: Result<EndOutcome, CloseError>,
}

/// What the closing protocol is told.
#[derive(Debug)]
pub enum ClosingInput {
    /// These orders belong to this worker now.
    Resumed(Vec<Claim>),
    /// The query for them failed, for this reason.
    NotResumed(String),
    /// A provider's answer to this call.
    Answered(Call, Answer),
    /// What became of the orders of one `CloseClaimed`, `SettlePaid` or `Postpone`.
    Ended(EndingKind, Vec<Ended>),
}
