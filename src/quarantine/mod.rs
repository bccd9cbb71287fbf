//! Finds the messages that the AMQP client cannot read, reports them, and moves them into `parked_alarms`.
//!
//! One such message ends every consumer session to which it is delivered, and the broker redelivers it to the next. So
//! our own reader, which accepts any bytes, searches the queues; readable messages go back to the broker unchanged.
//! Never acknowledges a message before its row is committed, and decides nothing about alarms.

mod frame;
mod link;
mod message;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use order_timeout_amqp::AmqpSettings;
use order_timeout_amqp::connect::{BrokerError, reply_code};
use order_timeout_core::alarm::{DeadLetter, ParkReason};
use order_timeout_core::kind::Kind;
use order_timeout_core::message::Alarm;
use serde::Serialize;

use crate::config::Settings;
use crate::postgres::parked_alarms;
use crate::postgres::{Database, one_line};
use link::{Link, Received};
use message::Message;

/// The most unacknowledged messages of a consumer; when it is full, another consumer is added. A quorum queue delivers
/// a consumer's share in one piece, which takes seconds of silence if it is tens of thousands.
const PREFETCH: u16 = 5_000;
/// After this much silence the broker is asked whether more is ready.
const IDLE_BEFORE_ASKING: Duration = Duration::from_millis(300);
/// After this much more silence the ready messages are not delivered to us.
const IDLE_BEFORE_GIVING_UP: Duration = Duration::from_secs(5);
/// Unreadable messages that are stored, and then acknowledged, at a time.
const STORE_BATCH_SIZE: usize = 100;
/// Unreadable messages that a report lists; the rest is counted.
const MOST_LISTED: usize = 1_000;
/// Messages that are fetched one by one to find the one on which the broker fails.
const MOST_FETCHED_SINGLY: u64 = 10_000;

/// The limits of a search.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Messages of one queue.
    pub messages: u64,
    /// Time for one queue.
    pub time: Duration,
}

impl Bounds {
    /// For a worker, which has no session during the search.
    pub const WORKER: Self = Self { messages: 1_000_000, time: Duration::from_secs(60) };
    /// For a command, which may take longer.
    pub const BY_HAND: Self = Self { messages: 10_000_000, time: Duration::from_secs(3_600) };
}

/// How a broker introduces itself. The AMQP client does not show this. Empty where the broker says nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Server {
    /// Such as `RabbitMQ`.
    pub product: String,
    /// Such as `3.10.8`.
    pub version: String,
    /// The name of the cluster, or of the only node.
    pub cluster: String,
}

/// Asks the broker what it is.
///
/// # Errors
/// [`QuarantineError`] if it cannot be reached.
pub async fn server(settings: &AmqpSettings) -> Result<Server, QuarantineError> {
    let link = Link::open(settings).await?;
    let server = link.server().clone();
    link.close().await?;
    Ok(server)
}

/// A message that the AMQP client cannot read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Found {
    /// The queue in which it was.
    pub queue: String,
    /// Counted from 1, in the order of delivery.
    pub position: u64,
    /// Why it cannot be read.
    pub why: String,
    /// The size of its body.
    pub body_bytes: u64,
    /// The order in its body, if that is an alarm.
    pub order_id: Option<String>,
    /// Whether it was stored and taken out of the queue.
    pub moved: bool,
}

/// The result of a search through one queue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The searched queue.
    pub queue: String,
    /// Messages that were read.
    pub searched: u64,
    /// Unreadable ones.
    pub unreadable: u64,
    /// The first of them.
    pub found: Vec<Found>,
    /// Why it did not reach the end of the queue, if it did not.
    pub stopped: Option<String>,
}

/// Why a search failed. Messages that were stored and acknowledged before stay so; all others are back in their queue.
#[derive(Debug, Clone, thiserror::Error)]
pub enum QuarantineError {
    /// The broker is unavailable, or refused the login.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The connection ended, or what came over it is not AMQP.
    #[error("the broker at {place} could not be searched: {why}")]
    Broken {
        /// Host and port of the broker.
        place: String,
        /// What was wrong.
        why: String,
    },
    /// The broker closed the connection, with this code and text.
    #[error("the broker at {place} ended the search with {code} {text}")]
    Closed {
        /// Host and port of the broker.
        place: String,
        /// AMQP's reply code.
        code: u16,
        /// The broker's text.
        text: String,
    },
    /// The broker cannot deliver the message at this position of the queue.
    #[error(
        "the broker itself fails on the message at position {position} of {queue} (541 INTERNAL_ERROR), so it cannot be delivered to any AMQP 0-9-1 client; docs/operating/troubleshoot.md, \"A message that the broker cannot deliver\", describes how to remove it"
    )]
    Undeliverable {
        /// The queue's name.
        queue: String,
        /// Counted from 1, in the order of delivery.
        position: u64,
    },
    /// The database did not take an unreadable message, which stays in its queue.
    #[error("an unreadable message was found in {queue} but cannot be stored: {why}; fix the database")]
    NotStored {
        /// The queue's name.
        queue: String,
        /// What the database said.
        why: String,
    },
}

impl QuarantineError {
    /// Whether the broker failed internally, most likely on one of the messages.
    #[must_use]
    pub fn is_internal_error(&self) -> bool {
        matches!(self, Self::Closed { code, .. } if *code == reply_code::INTERNAL_ERROR)
    }

    fn is_missing_queue(&self) -> bool {
        matches!(self, Self::Closed { code, .. } if *code == reply_code::NOT_FOUND)
    }
}

/// The queues that a worker with these settings consumes.
#[must_use]
pub fn queues<'a>(settings: &Settings, kinds: impl IntoIterator<Item = &'a Kind>) -> Vec<String> {
    let names = settings.names();
    let processing = kinds.into_iter().flat_map(|kind| settings.worker.queue_of_each_channel(&names, kind));
    let processing: BTreeSet<String> = processing.collect();
    processing.into_iter().chain([names.schedule(), names.parked()]).collect()
}

/// Searches one queue on its own connection. With a database, moves unreadable messages into `parked_alarms`; without
/// one, leaves every message in its queue.
///
/// # Errors
/// [`QuarantineError`]. A missing queue counts as empty.
pub async fn search(
    settings: &AmqpSettings,
    queue: &str,
    bounds: Bounds,
    store: Option<&Database>,
) -> Result<Report, QuarantineError> {
    let link = Link::open(settings).await?;
    let mut search = Search { link, queue, store, report: Report::default(), waiting: Vec::new() };
    search.report.queue = queue.to_owned();
    match search.walk(bounds).await {
        Ok(()) => {}
        Err(error) if error.is_missing_queue() => return Ok(search.report),
        Err(error) => return Err(error),
    }
    let Search { link, report, .. } = search;
    // An error while closing is ignored: every acknowledged message is stored, and the rest is requeued with the
    // connection.
    let _ = link.close().await;
    Ok(report)
}

/// Fetches messages one by one until the broker fails on one: of several at once, none arrives.
///
/// # Errors
/// [`QuarantineError::Undeliverable`] with its position; another error if it cannot be found.
pub async fn locate_undeliverable(settings: &AmqpSettings, queue: &str) -> Result<(), QuarantineError> {
    let mut link = Link::open(settings).await?;
    for position in 1..=MOST_FETCHED_SINGLY {
        match link.get(queue).await {
            Ok(Some(_)) => {}
            Ok(None) => break,
            Err(error) if error.is_internal_error() => {
                return Err(QuarantineError::Undeliverable { queue: queue.to_owned(), position });
            }
            Err(error) => return Err(error),
        }
    }
    let _ = link.close().await;
    Ok(())
}

impl Report {
    fn note(&mut self, found: Found) {
        self.unreadable += 1;
        if self.found.len() < MOST_LISTED {
            self.found.push(found);
        }
    }
}

/// An unreadable message that is not stored yet.
struct Waiting {
    tag: u64,
    dead_letter: DeadLetter,
    found: Found,
}

struct Search<'a> {
    link: Link,
    queue: &'a str,
    store: Option<&'a Database>,
    report: Report,
    waiting: Vec<Waiting>,
}

impl Search<'_> {
    /// Readable messages stay unacknowledged until the connection is closed, so that each message is delivered once.
    async fn walk(&mut self, bounds: Bounds) -> Result<(), QuarantineError> {
        let began = Instant::now();
        self.link.prefetch(PREFETCH).await?;
        self.link.consume(self.queue).await?;
        let (mut room, mut acknowledged, mut has_asked) = (u64::from(PREFETCH), 0, false);
        loop {
            match self.link.receive(if has_asked { IDLE_BEFORE_GIVING_UP } else { IDLE_BEFORE_ASKING }).await? {
                Some(Received::Message(message)) => {
                    has_asked = false;
                    self.check(&message);
                }
                Some(Received::Ready(0)) => break,
                Some(Received::Ready(_)) => continue,
                // Messages of a session that has just ended may still be on their way back into the queue.
                None if !has_asked => {
                    has_asked = true;
                    self.link.ask_for_ready(self.queue).await?;
                    continue;
                }
                None => {
                    let searched = self.report.searched;
                    self.report.stopped = Some(format!(
                        "after {searched} messages the broker delivered none of the ready ones for {IDLE_BEFORE_GIVING_UP:?}"
                    ));
                    break;
                }
            }
            if self.waiting.len() >= STORE_BATCH_SIZE {
                acknowledged += self.store_waiting().await?;
            }
            if self.report.searched - acknowledged >= room {
                self.link.consume(self.queue).await?;
                room += u64::from(PREFETCH);
            }
            if self.report.searched >= bounds.messages || began.elapsed() >= bounds.time {
                let Bounds { messages, time } = bounds;
                self.report.stopped = Some(format!(
                    "stopped after {} messages; the bounds are {messages} messages and {time:?} for a queue",
                    self.report.searched
                ));
                break;
            }
        }
        self.store_waiting().await.map(drop)
    }

    /// Records a message if it is unreadable.
    fn check(&mut self, message: &Message) {
        self.report.searched += 1;
        let Some(why) = message.why_unreadable(self.link.frame_max) else { return };
        let (queue, position) = (self.queue.to_owned(), self.report.searched);
        let detail = format!("at position {position} of {queue}, unreadable for the AMQP client: {why}");
        let mut dead_letter = DeadLetter::unread(ParkReason::Unreadable, detail, &message.body);
        if let Ok(alarm) = Alarm::read(&message.body, None) {
            (dead_letter.order_id, dead_letter.deadline) = (Some(alarm.order_id), Some(alarm.deadline));
        }
        let order_id = dead_letter.order_id.as_ref().map(ToString::to_string);
        let found = Found { queue, position, why, body_bytes: message.body_bytes, order_id, moved: false };
        match self.store {
            Some(_) => self.waiting.push(Waiting { tag: message.tag, dead_letter, found }),
            None => self.report.note(found),
        }
    }

    /// Stores the waiting messages, then acknowledges them. Returns their number.
    async fn store_waiting(&mut self) -> Result<u64, QuarantineError> {
        let (Some(database), false) = (self.store, self.waiting.is_empty()) else { return Ok(0) };
        let waiting = std::mem::take(&mut self.waiting);
        let dead_letters: Vec<&DeadLetter> = waiting.iter().map(|waiting| &waiting.dead_letter).collect();
        parked_alarms::insert(database, &dead_letters)
            .await
            .map_err(|error| QuarantineError::NotStored { queue: self.queue.to_owned(), why: one_line(&error) })?;
        let tags: Vec<u64> = waiting.iter().map(|waiting| waiting.tag).collect();
        self.link.acknowledge(&tags).await?;
        waiting.into_iter().for_each(|waiting| self.report.note(Found { moved: true, ..waiting.found }));
        Ok(tags.len() as u64)
    }
}
