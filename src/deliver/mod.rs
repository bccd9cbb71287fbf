//! Step 3, DELIVER: one consumer session. Prefetch, consume, read, settle; and an end that is always noticed.
//!
//! A session is one connection with its channels. At the first error of any of them all of it is dropped, the broker
//! delivers again what was not acknowledged, and the supervisor in `worker/` opens the next. No SQL, no decision
//! what becomes of an alarm.

pub mod unacked_tags;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{join_all, try_join_all};
use lapin::options::{BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, Consumer, Event};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::debug;
use uuid::Uuid;

use crate::alarm::{
    DeadLetter, Death, DeathReason, Delivered, DeliveredAlarm, ParkReason, Receipt, Returns, Settlement, SourceQueue,
};
use crate::broker::{self, BrokerError, EndKind};
use crate::canary;
use crate::config::{AmqpSettings, Settings};
use crate::message::{Alarm, HEADER_ATTEMPT, HEADER_EARLY_RETURNS, HEADER_RETURNS_AT, HEADER_TRACEPARENT};
use crate::order::Timestamp;
use crate::topology::{Names, Sight, Topology, TopologyError};
use unacked_tags::{AckPlan, UnackedTags};

/// What the broker gave up on comes rarely. But where a policy expires or drops alarms they come all at once, and in the
/// parked queue the same policy would lose them.
const PARKED_PREFETCH: u16 = 1_000;
/// As many early returns as are told apart.
const MOST_EARLY_RETURNS: u32 = 1_000;
/// The last of the year 9999.
const LAST_MILLISECOND: i64 = 253_402_300_799_999;
/// How long the broker may take to answer a goodbye.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long after a channel's error the connection may take to say its own.
const REASON_TIMEOUT: Duration = Duration::from_millis(200);
/// How long a session's end may take: first the channels' goodbye, then the connection's.
pub(crate) const LONGEST_CLOSE: Duration = CLOSE_TIMEOUT.saturating_mul(2);

/// An open session.
#[derive(Debug)]
pub struct Session {
    number: u64,
    connection: Arc<Connection>,
    lines: Vec<ConsumerChannel>,
    ended: Ended,
}

/// Why a session ended, or did not open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionEnd {
    pub kind: EndKind,
    /// One sentence.
    pub why: String,
}

impl SessionEnd {
    /// An end that says nothing of any message.
    pub fn other(why: impl Into<String>) -> Self {
        Self { kind: EndKind::Other, why: why.into() }
    }

    fn of(error: &lapin::Error) -> Self {
        let kind = broker::end_kind(error);
        let why = match kind {
            // Of what it could not parse the client knows no more than that.
            EndKind::Unreadable => match broker::reply(error) {
                Some((_, size)) => format!("the AMQP client cannot read a message that the broker delivered ({size})"),
                None => "the AMQP client cannot read a message that the broker delivered".into(),
            },
            EndKind::BrokerFailed => {
                format!("the broker itself failed ({error}), as RabbitMQ 3 does over a message that it cannot deliver")
            }
            EndKind::Other => error.to_string(),
        };
        Self { kind, why }
    }
}

/// Why no session was opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// It was open for the broker, which delivered at once.
    #[error("{}", .0.why)]
    Ended(SessionEnd),
}

/// The first reason for the end of a session, and that there is one.
#[derive(Debug, Clone, Default)]
struct Ended {
    token: CancellationToken,
    reason: Arc<Mutex<Option<SessionEnd>>>,
}

impl Ended {
    fn note(&self, end: SessionEnd) {
        self.reason.lock().expect("no holder panics").get_or_insert(end);
        self.token.cancel();
    }

    async fn reason(&self) -> SessionEnd {
        self.token.cancelled().await;
        let reason = self.reason.lock().expect("no holder panics").clone();
        reason.unwrap_or_else(|| SessionEnd::other("it was closed"))
    }
}

/// Where a session puts what it reads.
#[derive(Debug, Clone)]
pub struct Inboxes {
    pub alarms: mpsc::UnboundedSender<Delivered>,
    /// The ids of canaries, which are acknowledged at once.
    pub canaries: mpsc::UnboundedSender<Uuid>,
}

/// What a session is opened as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opening {
    /// Marks its receipts.
    pub number: u64,
    /// Whether something of the deployment must be there already. So a mistyped namespace is refused by a worker that
    /// starts, while one that has seen the objects declares again even all of them.
    pub must_be_set_up: bool,
}

/// Looks at the broker over a session's connection.
#[derive(Debug, Clone)]
pub struct Inspector {
    topology: Topology,
    connection: Arc<Connection>,
    amqp: Arc<AmqpSettings>,
}

impl Inspector {
    /// # Errors
    /// [`TopologyError`] names what is missing.
    pub async fn look(&self) -> Result<Sight, TopologyError> {
        self.topology.look(&self.connection).await
    }

    /// Over a connection of its own: RabbitMQ stops reading from one that publishes while it blocks publishers, and what a
    /// session has to acknowledge or give back would wait with it.
    ///
    /// # Errors
    /// [`TopologyError`] names which processing queue is missing.
    pub async fn look_at_processing(&self) -> Result<Sight, TopologyError> {
        self.topology.look_at_processing(&self.connection).await
    }

    /// # Errors
    /// [`TopologyError`] if the broker does not say.
    pub async fn exchange_with_alternate(&self) -> Result<Option<String>, TopologyError> {
        let connection =
            broker::connect(&self.amqp, "worker testing").await.map_err(|fault| TopologyError::Failed {
                object: "a connection to test for alternate exchanges".into(),
                why: fault.to_string(),
            })?;
        let found = self.topology.exchange_with_alternate(&connection).await;
        broker::close(&connection, CLOSE_TIMEOUT).await;
        found
    }
}

/// One channel with its consumer.
#[derive(Debug, Clone)]
struct ConsumerChannel {
    source: SourceQueue,
    channel: Channel,
    consumer_tag: String,
    unacked: Arc<Mutex<UnackedTags>>,
}

impl Session {
    /// Connects, declares what is missing, and starts consuming into `inboxes`.
    ///
    /// # Errors
    /// [`OpenError`]; `Refused` where trying again will not help.
    pub async fn open(settings: &Settings, opening: Opening, inboxes: Inboxes) -> Result<Self, OpenError> {
        let connection = Arc::new(broker::connect(&settings.amqp, "worker").await?);
        if let Err(fault) = declare(&Topology::new(settings), opening, &connection).await {
            broker::close(&connection, CLOSE_TIMEOUT).await;
            return Err(fault.into());
        }
        let mut session = Self { number: opening.number, connection, lines: Vec::new(), ended: Ended::default() };
        session.listen_for_unreadable();
        let (timeout, ended) = (settings.amqp.connect_timeout, session.ended.clone());
        let why_not = tokio::select! {
            // First: what was asked when the client gave up may never be answered.
            biased;
            end = ended.reason() => OpenError::Ended(end),
            consuming = tokio::time::timeout(timeout, session.consume_all(settings, &inboxes)) => match consuming {
                Ok(Ok(())) => return Ok(session),
                Ok(Err(error)) => session.why_not_open(&error).await,
                Err(_) => consuming_failed(&format!("the broker did not answer within {timeout:?}")),
            },
        };
        broker::close(&session.connection, CLOSE_TIMEOUT).await;
        Err(why_not)
    }

    /// The connection says once why it ended; its channels may say that they are closed, or nothing.
    fn listen_for_unreadable(&self) {
        let (events, ended) = (self.connection.events_listener(), self.ended.clone());
        tokio::spawn(async move {
            let mut events = std::pin::pin!(events);
            while let Some(event) = events.next().await {
                if let Event::Error(error) = event
                    && broker::end_kind(&error) != EndKind::Other
                {
                    return ended.note(SessionEnd::of(&error));
                }
            }
        });
    }

    /// What an error of a channel's means, once the connection has had its say.
    async fn why_not_open(&self, error: &lapin::Error) -> OpenError {
        match self.end_after(error).await {
            SessionEnd { kind: EndKind::Other, why } => consuming_failed(&why),
            end => OpenError::Ended(end),
        }
    }

    /// Why the session ended, given that a channel of it met this error.
    pub async fn end_after(&self, error: &lapin::Error) -> SessionEnd {
        let end = SessionEnd::of(error);
        match tokio::time::timeout(REASON_TIMEOUT, self.ended.reason()).await {
            Ok(reason) if end.kind == EndKind::Other => reason,
            _ => end,
        }
    }

    async fn consume_all(&mut self, settings: &Settings, inboxes: &Inboxes) -> lapin::Result<()> {
        for (index, source) in (0..).zip(sources(settings)) {
            let line = self.consume(index, source, inboxes.clone()).await?;
            self.lines.push(line);
        }
        Ok(())
    }

    async fn consume(&self, index: u8, source: ConsumedQueue, inboxes: Inboxes) -> lapin::Result<ConsumerChannel> {
        let ConsumedQueue { source, queue, prefetch } = source;
        let channel = self.connection.create_channel().await?;
        // Before consuming: lapin buffers deliveries without bound.
        channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
        let consumer_tag = format!("order-timeout-{}-{index}", std::process::id());
        let options = BasicConsumeOptions { no_local: false, no_ack: false, exclusive: false, nowait: false };
        let consumer = channel
            .basic_consume(queue.as_str().into(), consumer_tag.as_str().into(), options, FieldTable::default())
            .await?;
        let line = ConsumerChannel { source, channel, consumer_tag, unacked: Arc::default() };
        let reader = Reader { session: self.number, channel: index, source, unacked: line.unacked.clone(), inboxes };
        let ended = self.ended.clone();
        tokio::spawn(async move { ended.note(reader.read_all(consumer).await) });
        Ok(line)
    }

    /// Declares objects that were deleted since, except the queues that are consumed here: deleting one of those ends the
    /// session, and the next session declares it. The session may go on and end meanwhile.
    ///
    /// # Errors
    /// [`TopologyError`] names the object.
    pub fn declare_again(&self, settings: &Settings) -> impl Future<Output = Result<(), TopologyError>> + use<> {
        let consumed = sources(settings).into_iter().map(|source| source.queue).collect();
        let (topology, connection) = (Topology::new(settings).but_for_consumed(consumed), self.connection.clone());
        async move { topology.declare(&connection).await }
    }

    /// Whether the broker takes one more connection, such as the worker's own for publishing.
    ///
    /// # Errors
    /// [`BrokerError`] if it does not.
    pub async fn require_another_connection(&self, settings: &Settings) -> Result<(), BrokerError> {
        broker::require_another_connection(&settings.amqp, &self.connection).await
    }

    /// For looking at the broker over this session's connection.
    #[must_use]
    pub fn inspector(&self, settings: &Settings) -> Inspector {
        Inspector {
            topology: Topology::new(settings),
            connection: self.connection.clone(),
            amqp: Arc::new(settings.amqp.clone()),
        }
    }

    /// The number that marks this session's receipts.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whether the acknowledgement may wait for a while, which holds for deliveries from a processing queue. The prefetch
    /// windows of the other queues are small.
    #[must_use]
    pub fn may_settle_later(&self, receipt: Receipt) -> bool {
        self.lines.get(usize::from(receipt.channel)).is_none_or(|line| line.source == SourceQueue::Timeout)
    }

    /// Resolves when any part of the session has ended, with the reason. A stream that just ends counts: the queue was
    /// deleted, or the server cancelled the consumer.
    pub async fn ended(&self) -> SessionEnd {
        self.ended.reason().await
    }

    /// Settles deliveries of this session; receipts of others are void and left out.
    ///
    /// # Errors
    /// lapin's; the session is over then.
    pub async fn settle(&self, settlements: &[(Receipt, Settlement)]) -> lapin::Result<()> {
        let lines = (0..).zip(&self.lines);
        // All of them, whatever one of them says: a channel may have ended alone.
        join_all(lines.map(|(index, line)| self.settle_on(index, line, settlements))).await.into_iter().collect()
    }

    async fn settle_on(
        &self,
        index: u8,
        line: &ConsumerChannel,
        settlements: &[(Receipt, Settlement)],
    ) -> lapin::Result<()> {
        for kind in [Settlement::Ack, Settlement::Requeue] {
            let ours =
                |(receipt, _): &&(Receipt, Settlement)| receipt.session == self.number && receipt.channel == index;
            let tags = settlements.iter().filter(ours).filter(|(_, k)| *k == kind).map(|(receipt, _)| receipt.tag);
            let plan = line.unacked.lock().expect("no holder panics").close(tags);
            line.send(kind, plan).await?;
        }
        Ok(())
    }

    /// Stops the broker from delivering more; what is on its way still arrives. Part of a shutdown.
    pub async fn cancel(&self) {
        for line in &self.lines {
            let cancelled =
                line.channel.basic_cancel(line.consumer_tag.as_str().into(), BasicCancelOptions::default()).await;
            if let Err(error) = cancelled {
                debug!(%error, "a consumer was gone before it was cancelled");
            }
        }
    }

    /// Closes the channels and the connection; the broker delivers again whatever was not acknowledged.
    pub async fn close(self) {
        // Each by itself: a channel answers when it has taken in every acknowledgement before, while the end of the
        // connection may overtake them.
        let closing = self.lines.iter().map(|line| line.channel.close(broker::reply_code::CONTENT_OK, "done".into()));
        let _answered_or_given_up = tokio::time::timeout(CLOSE_TIMEOUT, join_all(closing)).await;
        broker::close(&self.connection, CLOSE_TIMEOUT).await;
    }
}

fn consuming_failed(why: &str) -> OpenError {
    BrokerError::Away(format!("consuming could not start: {why}")).into()
}

async fn declare(topology: &Topology, opening: Opening, connection: &Connection) -> Result<(), BrokerError> {
    let declared = async {
        if opening.must_be_set_up {
            topology.require_some(connection).await?;
        }
        topology.declare(connection).await
    };
    declared.await.map_err(|fault| match fault {
        TopologyError::Failed { .. } | TopologyError::Missing { .. } => BrokerError::Away(fault.to_string()),
        TopologyError::Differs { .. }
        | TopologyError::Refused { .. }
        | TopologyError::NeverSetUp { .. }
        | TopologyError::NoDelayedExchange { .. }
        | TopologyError::NoHashExchange { .. } => BrokerError::Refused(fault.to_string()),
    })
}

/// A queue to consume from.
struct ConsumedQueue {
    source: SourceQueue,
    queue: String,
    prefetch: u16,
}

/// The queues of a session, in the order of its channels.
fn sources(settings: &Settings) -> Vec<ConsumedQueue> {
    let (names, worker) = (Names::new(&settings.namespace), &settings.worker);
    let due = worker.shard_of_each_channel().into_iter();
    let due = due.map(|shard| (SourceQueue::Timeout, names.shard(shard), worker.prefetch));
    let rest = [
        (SourceQueue::Inbox, names.arm(), worker.arm_prefetch),
        (SourceQueue::Parked, names.parked(), PARKED_PREFETCH),
    ];
    due.chain(rest).map(|(source, queue, prefetch)| ConsumedQueue { source, queue, prefetch }).collect()
}

impl ConsumerChannel {
    /// All at once: to await each before the next would wake lapin's I/O thread for every frame.
    async fn send(&self, kind: Settlement, plan: AckPlan) -> lapin::Result<()> {
        let singles = plan.single.into_iter().map(|tag| (tag, false));
        let all = plan.up_to.map(|tag| (tag, true)).into_iter().chain(singles);
        try_join_all(all.map(|(tag, multiple)| self.send_one(kind, tag, multiple))).await.map(drop)
    }

    async fn send_one(&self, kind: Settlement, tag: u64, multiple: bool) -> lapin::Result<()> {
        match kind {
            Settlement::Ack => self.channel.basic_ack(tag, BasicAckOptions { multiple }).await,
            Settlement::Requeue => self.channel.basic_nack(tag, BasicNackOptions { multiple, requeue: true }).await,
        }
    }
}

/// Reads one consumer's deliveries.
struct Reader {
    session: u64,
    channel: u8,
    source: SourceQueue,
    unacked: Arc<Mutex<UnackedTags>>,
    inboxes: Inboxes,
}

impl Reader {
    /// Until the consumer ends; says why it did.
    async fn read_all(self, mut consumer: Consumer) -> SessionEnd {
        while let Some(delivery) = consumer.next().await {
            let delivery = match delivery {
                Ok(delivery) => delivery,
                Err(error) => return SessionEnd::of(&error),
            };
            if let Some(id) = canary_in(&delivery.properties) {
                // Before the next is read: a frame that acknowledges the next could acknowledge this one as well.
                if let Err(error) = delivery.acker.ack(BasicAckOptions::default()).await {
                    return SessionEnd::of(&error);
                }
                // With the inspections gone its arrival is no news.
                let _ = self.inboxes.canaries.send(id);
                continue;
            }
            let receipt = Receipt { session: self.session, channel: self.channel, tag: delivery.delivery_tag };
            self.unacked.lock().expect("no holder panics").open(receipt.tag);
            let properties = &delivery.properties;
            let content = read(&delivery.data, properties);
            let death = self.needs_death(&content).then(|| last_death(properties)).flatten();
            let delivered = Delivered { receipt, source: self.source, content, death };
            if self.inboxes.alarms.send(delivered).is_err() {
                return SessionEnd::other("the worker has stopped");
            }
        }
        SessionEnd::other(
            "the broker cancelled the consumer; was its queue deleted, or a delivery kept for its consumer_timeout?",
        )
    }

    /// Each alarm out of a delay queue has died there. Why is asked only of what the broker gave up on, and of what it has
    /// returned early before.
    fn needs_death(&self, content: &Result<DeliveredAlarm, DeadLetter>) -> bool {
        self.source == SourceQueue::Parked || content.as_ref().is_ok_and(|alarm| alarm.returns.early > 0)
    }
}

fn canary_in(properties: &BasicProperties) -> Option<Uuid> {
    let [message_type, message_id] = [properties.kind(), properties.message_id()]
        .map(|property| property.as_ref().map(lapin::types::ShortString::as_str));
    canary::read(message_type, message_id)
}

/// Reads a message, as it was delivered, as an alarm, or says as what it must be parked.
///
/// # Errors
/// The [`DeadLetter`] that a message becomes which is not an alarm.
pub fn read(body: &[u8], properties: &BasicProperties) -> Result<DeliveredAlarm, DeadLetter> {
    let message_type = properties.kind().as_ref().map(lapin::types::ShortString::as_str);
    let alarm = Alarm::read(body, message_type)
        .map_err(|fault| DeadLetter::unread(ParkReason::Unreadable, fault.to_string(), body))?;
    let headers = properties.headers().as_ref();
    let header = |name: &str| headers.and_then(|table| table.inner().get(name));
    Ok(DeliveredAlarm {
        alarm,
        attempt: header(HEADER_ATTEMPT).and_then(whole_number).unwrap_or(0),
        first_published_at: properties.timestamp().map(moment_of_timestamp),
        traceparent: header(HEADER_TRACEPARENT).and_then(short_text),
        returns: Returns {
            due_at: header(HEADER_RETURNS_AT).and_then(moment_of_millis),
            early: header(HEADER_EARLY_RETURNS).and_then(whole_number).unwrap_or(0).min(MOST_EARLY_RETURNS),
        },
    })
}

/// Why the broker took a message out of the queue that it was in last. RabbitMQ puts the last death first; from 4.0 it
/// says so in headers of its own as well.
fn last_death(properties: &BasicProperties) -> Option<Death> {
    let headers = properties.headers().as_ref()?.inner();
    let text = |value: Option<&AMQPValue>| match value {
        Some(AMQPValue::LongString(text)) => Some(text.as_bytes().to_vec()),
        Some(AMQPValue::ShortString(text)) => Some(text.as_str().as_bytes().to_vec()),
        _ => None,
    };
    let (reason, queue) = match headers.get("x-last-death-reason") {
        Some(reason) => (text(Some(reason)), text(headers.get("x-last-death-queue"))),
        None => {
            let AMQPValue::FieldArray(deaths) = headers.get("x-death")? else { return None };
            let AMQPValue::FieldTable(death) = deaths.as_slice().first()? else { return None };
            (text(death.inner().get("reason")), text(death.inner().get("queue")))
        }
    };
    let reason = DeathReason::of_word(&reason?)?;
    Some(Death { reason, queue: String::from_utf8_lossy(&queue.unwrap_or_default()).into_owned() })
}

/// A time as the rearmer writes it. One before 1970 or after the year 9999 is nonsense.
fn moment_of_millis(value: &AMQPValue) -> Option<Timestamp> {
    let AMQPValue::LongLongInt(millis) = value else { return None };
    (0..=LAST_MILLISECOND).contains(millis).then(|| Timestamp::from_unix_micros(millis * 1_000))
}

/// AMQP timestamps are seconds; one beyond what a moment holds is as good as the end of time.
fn moment_of_timestamp(seconds: u64) -> Timestamp {
    Timestamp::from_unix_micros(i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1_000_000))
}

/// Publishers in other languages choose the width of the integer.
fn whole_number(value: &AMQPValue) -> Option<u32> {
    let number = match value {
        AMQPValue::ShortShortInt(n) => i64::from(*n),
        AMQPValue::ShortShortUInt(n) => i64::from(*n),
        AMQPValue::ShortInt(n) => i64::from(*n),
        AMQPValue::ShortUInt(n) => i64::from(*n),
        AMQPValue::LongInt(n) => i64::from(*n),
        AMQPValue::LongUInt(n) => i64::from(*n),
        AMQPValue::LongLongInt(n) => *n,
        _ => return None,
    };
    u32::try_from(number).ok()
}

/// A W3C traceparent has 55 characters; anything much longer is not one.
fn short_text(value: &AMQPValue) -> Option<String> {
    let AMQPValue::LongString(text) = value else { return None };
    let text = std::str::from_utf8(text.as_bytes()).ok()?;
    (text.len() <= 200).then(|| text.to_owned())
}
