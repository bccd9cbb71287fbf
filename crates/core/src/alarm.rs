//! An alarm as the worker handles it: what the message said, the receipt that settles it, and why it is parked.
//!
//! The engine and the worker's steps deliver, rearm and park share these types, so that no step imports another. Data
//! only: no I/O.

use crate::kind::Kind;
use crate::message::{Alarm, MAX_BODY_BYTES};
use crate::order::{Deadline, OrderId, Timestamp};

/// Which queue a message came out of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SourceQueue {
    /// The processing queue: alarms that are due, or will be within seconds.
    Timeout,
    /// The inbox for alarms that are to be written into the wheel.
    Inbox,
    /// The queue of messages that the broker itself dead-lettered.
    Parked,
}

impl SourceQueue {
    /// The queue's word in metric labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Inbox => "schedule",
            Self::Parked => "parked",
        }
    }
}

/// What settles one delivery. Void as soon as its session has ended: the broker redelivers the message then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Receipt {
    /// Counts the consumer sessions of this process.
    pub session: u64,
    /// Which of the session's channels.
    pub channel: u8,
    /// AMQP delivery tag: counts up from 1 on each channel.
    pub tag: u64,
}

/// How a delivery is settled with the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settlement {
    /// It is finished: `basic.ack`.
    Ack,
    /// Another worker takes it, or this one later: `basic.nack` with requeue.
    Requeue,
}

/// A message that could be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliveredAlarm {
    /// The body. The engine replaces its deadline by the row's if the close statement finds the order not due.
    pub alarm: Alarm,
    /// How often handling it has failed and it went back through the broker.
    pub attempt: u32,
    /// When the message was published, if its publisher says so. The engine fills in when it was first seen.
    pub first_published_at: Option<Timestamp>,
    /// W3C trace context of the publisher.
    pub traceparent: Option<String>,
    /// Read from the headers that the worker writes when it rearms an alarm; the default for a publisher's message.
    pub returns: Returns,
}

/// When the broker is to return an alarm that a worker wrote, and how often it was early before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Returns {
    /// When the slot of the alarm releases it, by the database's clock; `None` if it was not to wait.
    pub due_at: Option<Timestamp>,
    /// How often in a row it came back well before that.
    pub early: u32,
}

impl From<Alarm> for DeliveredAlarm {
    /// An alarm about which no message says more.
    fn from(alarm: Alarm) -> Self {
        Self { alarm, attempt: 0, first_published_at: None, traceparent: None, returns: Returns::default() }
    }
}

impl DeliveredAlarm {
    /// The order that the body names.
    #[must_use]
    pub fn order_id(&self) -> &OrderId {
        &self.alarm.order_id
    }

    /// The deadline in the body, which the engine may have replaced by the row's.
    #[must_use]
    pub fn deadline(&self) -> Deadline {
        self.alarm.deadline
    }
}

/// A new alarm to be written, and the receipt of the old one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rearm {
    /// What the new message contains, with the attempts and early returns counted so far.
    pub alarm: DeliveredAlarm,
    /// The old message, which the engine acknowledges only after the broker has confirmed the new one.
    pub receipt: Receipt,
    /// Decides where the new message waits.
    pub wanted: Wanted,
}

/// When a rearmed alarm should come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Shortly before its deadline.
    BeforeDeadline,
    /// Not before this time: a retry.
    NotBefore(Timestamp),
    /// At once, through the processing queue: its window has room for held-back alarms.
    AtOnce,
}

/// Why the broker took a message out of a queue and dead-lettered it, as it says itself (`x-death`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Death {
    /// The engine goes on with an alarm that a policy removed, and parks one that was rejected or returned too often.
    pub reason: DeathReason,
    /// The queue that it was taken out of.
    pub queue: String,
}

/// RabbitMQ's reasons for dead-lettering a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeathReason {
    /// Its TTL expired.
    Expired,
    /// The queue was too long.
    MaxLength,
    /// A consumer rejected it.
    Rejected,
    /// It was returned to the queue too often.
    DeliveryLimit,
}

impl DeathReason {
    /// The reason that the broker's word means, if it is known.
    #[must_use]
    pub fn of_word(word: &[u8]) -> Option<Self> {
        match word {
            b"expired" => Some(Self::Expired),
            b"maxlen" => Some(Self::MaxLength),
            b"rejected" => Some(Self::Rejected),
            b"delivery_limit" => Some(Self::DeliveryLimit),
            _ => None,
        }
    }
}

/// Why an alarm is parked for a person. The word is stored in `parked_alarms.reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ParkReason {
    /// The message is not an alarm.
    Unreadable,
    /// The order id is not of the form the orders table uses.
    MalformedId,
    /// The deadline lies further ahead than `delay.max_delay`.
    TooFar,
    /// No such order, long after its transaction must have ended.
    UnknownOrder,
    /// The settings have no kind of the name that the message gives.
    UnknownKind,
    /// Closing this order failed again and again.
    CloseFailed,
    /// The broker dead-lettered it out of the inbox or the processing queue: returned too often, or rejected.
    BrokerGaveUp,
}

impl ParkReason {
    /// The words of all reasons.
    pub const WORDS: [&str; 7] = [
        Self::Unreadable.as_str(),
        Self::MalformedId.as_str(),
        Self::TooFar.as_str(),
        Self::UnknownOrder.as_str(),
        Self::UnknownKind.as_str(),
        Self::CloseFailed.as_str(),
        Self::BrokerGaveUp.as_str(),
    ];

    /// The word in `parked_alarms.reason` and in metric labels.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unreadable => "unreadable",
            Self::MalformedId => "malformed_id",
            Self::TooFar => "too_far",
            Self::UnknownOrder => "unknown_order",
            Self::UnknownKind => "unknown_kind",
            Self::CloseFailed => "close_failed",
            Self::BrokerGaveUp => "broker_gave_up",
        }
    }
}

/// A row for `parked_alarms`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLetter {
    /// The kind of fault.
    pub reason: ParkReason,
    /// One sentence that names the fault.
    pub detail: String,
    /// The kind that the alarm names; the default one if the message could not be read.
    pub kind: Kind,
    /// The order that the alarm names; `None` if the message could not be read.
    pub order_id: Option<OrderId>,
    /// The alarm's deadline; `None` if the message could not be read.
    pub deadline: Option<Deadline>,
    /// How often handling the alarm had failed before and it went back through the broker; 0 for an unreadable message.
    pub attempts: u32,
    /// The body of the alarm, or of an unreadable message as it was delivered, cut at [`MAX_BODY_BYTES`].
    pub body: Vec<u8>,
}

impl DeadLetter {
    /// Parks a message that could not be read as an alarm.
    #[must_use]
    pub fn unread(reason: ParkReason, detail: impl Into<String>, body: &[u8]) -> Self {
        let body = body[..body.len().min(MAX_BODY_BYTES)].to_vec();
        Self { reason, detail: detail.into(), kind: Kind::ORDER, order_id: None, deadline: None, attempts: 0, body }
    }

    /// Parks an alarm that was understood but could not be handled.
    #[must_use]
    pub fn of(alarm: &DeliveredAlarm, reason: ParkReason, detail: impl Into<String>) -> Self {
        Self {
            reason,
            detail: detail.into(),
            kind: alarm.alarm.kind.clone(),
            order_id: Some(alarm.alarm.order_id.clone()),
            deadline: Some(alarm.alarm.deadline),
            attempts: alarm.attempt,
            body: alarm.alarm.to_bytes(),
        }
    }
}

/// One message out of the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivered {
    /// Settles this delivery.
    pub receipt: Receipt,
    /// Decides whether the alarm is held, rearmed or parked.
    pub source: SourceQueue,
    /// The alarm, or the dead letter that the message becomes.
    pub content: Result<DeliveredAlarm, DeadLetter>,
    /// Why the broker took it out of the queue that it was in before, if the message says so.
    pub death: Option<Death>,
}
