//! Finds the messages that the AMQP client cannot read, names them, and moves them aside into `parked_alarms`.
//!
//! One such message ends every consumer session that it is delivered to, and the broker delivers it to the next. So the
//! queues are looked through by a reader of our own that takes any bytes; what the client can read goes back to the
//! broker untouched. Never acknowledges a message before its row is committed, and decides nothing about alarms.

mod frame;
mod link;
mod message;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::alarm::{DeadLetter, ParkReason};
use crate::broker::{BrokerError, reply_code};
use crate::config::{AmqpSettings, Settings};
use crate::database::{Database, one_line};
use crate::message::Alarm;
use crate::park;
use crate::topology::Names;
use link::{Link, Received};
use message::Message;

/// The most that a consumer has unacknowledged; one more consumer takes over where it is full. A quorum queue gives a
/// consumer its share in one piece, over which it is silent for seconds if that is tens of thousands.
const PREFETCH: u16 = 5_000;
/// After this much silence the broker is asked whether more is ready; after this much more, it is not delivered to us.
const SILENCE_AT_THE_END: Duration = Duration::from_millis(300);
const SILENCE_BEFORE_THE_END: Duration = Duration::from_secs(5);
/// Unreadable messages that are stored, and then acknowledged, at a time.
const STORED_AT_ONCE: usize = 100;
/// Unreadable messages that a report lists; the rest is counted.
const LISTED: usize = 1_000;
/// Messages that are taken one by one to find the one that the broker fails over.
const TAKEN_SINGLY: u64 = 10_000;

/// How far a search goes.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Messages of one queue.
    pub messages: u64,
    /// Time for one queue.
    pub time: Duration,
}

impl Bounds {
    /// For a worker, which opens no session meanwhile.
    pub const OF_A_WORKER: Self = Self { messages: 1_000_000, time: Duration::from_secs(60) };
    /// For a person, who may wait.
    pub const BY_HAND: Self = Self { messages: 10_000_000, time: Duration::from_secs(3_600) };
}

/// A message that the AMQP client cannot read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Found {
    pub queue: String,
    /// Counted from 1 at the front of what the broker delivered.
    pub position: u64,
    pub why: String,
    pub body_bytes: u64,
    /// The order that its body speaks of, if that is an alarm.
    pub order_id: Option<String>,
    pub moved: bool,
}

/// What a search through one queue came to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    pub queue: String,
    /// Messages looked at.
    pub searched: u64,
    /// Unreadable ones.
    pub unreadable: u64,
    /// The first of them.
    pub found: Vec<Found>,
    /// Why it did not reach the end of the queue, if it did not.
    pub stopped: Option<String>,
}

/// Why a search failed. What it had stored and acknowledged by then stays so; all else is back in its queue.
#[derive(Debug, Clone, thiserror::Error)]
pub enum QuarantineError {
    #[error(transparent)]
    Broker(#[from] BrokerError),
    #[error("the broker at {place} could not be searched: {why}")]
    Broken { place: String, why: String },
    #[error("the broker at {place} ended the search with {code} {text}")]
    Closed { place: String, code: u16, text: String },
    #[error(
        "the broker itself fails over the message at position {position} of {queue} (541 INTERNAL_ERROR), so no AMQP 0-9-1 client can be delivered it; docs/OPERATING.md, \"A message that the broker cannot deliver\", says how to take it out"
    )]
    Undeliverable { queue: String, position: u64 },
    #[error("an unreadable message was found in {queue} but cannot be stored: {why}; fix the database")]
    NotStored { queue: String, why: String },
}

impl QuarantineError {
    /// Whether the broker failed inside, most likely over one of the messages.
    #[must_use]
    pub fn is_internal_error(&self) -> bool {
        matches!(self, Self::Closed { code, .. } if *code == reply_code::INTERNAL_ERROR)
    }

    fn is_missing_queue(&self) -> bool {
        matches!(self, Self::Closed { code, .. } if *code == reply_code::NOT_FOUND)
    }
}

/// The queues that these settings have a worker consume.
#[must_use]
pub fn queues(settings: &Settings) -> Vec<String> {
    let names = Names::new(&settings.namespace);
    let shards: BTreeSet<u8> = settings.worker.shard_of_each_channel().into_iter().collect();
    let shards = shards.into_iter().map(|shard| names.shard(shard));
    shards.chain([names.arm(), names.parked()]).collect()
}

/// Looks through one queue on a connection of its own. With a database, moves what is unreadable into `parked_alarms`;
/// without one, leaves everything where it is.
///
/// # Errors
/// [`QuarantineError`]. A queue that is not there has nothing in it.
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
    // Whatever the broker says to it: all that is acknowledged is stored, and the rest is given back with the connection.
    let _answered_or_gone = link.close().await;
    Ok(report)
}

/// Takes messages one by one until the broker fails over one: of several at once, none arrives.
///
/// # Errors
/// [`QuarantineError::Undeliverable`] with its position; another where it cannot be found.
pub async fn locate_undeliverable(settings: &AmqpSettings, queue: &str) -> Result<(), QuarantineError> {
    let mut link = Link::open(settings).await?;
    for position in 1..=TAKEN_SINGLY {
        match link.get(queue).await {
            Ok(Some(_)) => {}
            Ok(None) => break,
            Err(error) if error.is_internal_error() => {
                return Err(QuarantineError::Undeliverable { queue: queue.to_owned(), position });
            }
            Err(error) => return Err(error),
        }
    }
    let _answered_or_gone = link.close().await;
    Ok(())
}

impl Report {
    fn note(&mut self, found: Found) {
        self.unreadable += 1;
        if self.found.len() < LISTED {
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
    /// Everything stays unacknowledged until the connection is closed, so that each message is met once.
    async fn walk(&mut self, bounds: Bounds) -> Result<(), QuarantineError> {
        let began = Instant::now();
        self.link.prefetch(PREFETCH).await?;
        self.link.consume(self.queue).await?;
        let (mut room, mut acknowledged, mut owed) = (u64::from(PREFETCH), 0, false);
        loop {
            match self.link.receive(if owed { SILENCE_BEFORE_THE_END } else { SILENCE_AT_THE_END }).await? {
                Some(Received::Message(message)) => {
                    owed = false;
                    self.look_at(&message);
                }
                Some(Received::Ready(0)) => break,
                Some(Received::Ready(_)) => continue,
                // What a session has lost that just ended may still be on its way back into the queue.
                None if !owed => {
                    owed = true;
                    self.link.ask_for_ready(self.queue).await?;
                    continue;
                }
                None => {
                    let searched = self.report.searched;
                    self.report.stopped = Some(format!(
                        "after {searched} messages the broker delivered none of those that were ready for {SILENCE_BEFORE_THE_END:?}"
                    ));
                    break;
                }
            }
            if self.waiting.len() >= STORED_AT_ONCE {
                acknowledged += self.put_aside().await?;
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
        self.put_aside().await.map(drop)
    }

    /// Remembers nothing of a message that can be read.
    fn look_at(&mut self, message: &Message) {
        self.report.searched += 1;
        let Some(why) = message.why_unreadable(self.link.frame_max) else { return };
        let (queue, position) = (self.queue.to_owned(), self.report.searched);
        let detail = format!("at position {position} of {queue}, where the AMQP client cannot read it: {why}");
        let mut dead_letter = DeadLetter::unread(ParkReason::Unreadable, detail, &message.body);
        if let Ok(due) = Alarm::read(&message.body, None) {
            (dead_letter.order_id, dead_letter.deadline) = (Some(due.order_id), Some(due.deadline));
        }
        let order_id = dead_letter.order_id.as_ref().map(ToString::to_string);
        let found = Found { queue, position, why, body_bytes: message.body_bytes, order_id, moved: false };
        match self.store {
            Some(_) => self.waiting.push(Waiting { tag: message.tag, dead_letter, found }),
            None => self.report.note(found),
        }
    }

    /// Stores, then acknowledges. Returns how many.
    async fn put_aside(&mut self) -> Result<u64, QuarantineError> {
        let (Some(database), false) = (self.store, self.waiting.is_empty()) else { return Ok(0) };
        let waiting = std::mem::take(&mut self.waiting);
        let dead_letters: Vec<&DeadLetter> = waiting.iter().map(|waiting| &waiting.dead_letter).collect();
        park::park(database, &dead_letters)
            .await
            .map_err(|error| QuarantineError::NotStored { queue: self.queue.to_owned(), why: one_line(&error) })?;
        let tags: Vec<u64> = waiting.iter().map(|waiting| waiting.tag).collect();
        self.link.acknowledge(&tags).await?;
        waiting.into_iter().for_each(|waiting| self.report.note(Found { moved: true, ..waiting.found }));
        Ok(tags.len() as u64)
    }
}
