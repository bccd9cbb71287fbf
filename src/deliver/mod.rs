//! Step 3, deliver: one consumer session. Sets prefetch, consumes, reads, settles, and always notices its end.
//!
//! A session is one connection with its channels, for one kind: what blocks one kind's connection blocks no other's. The first error of any of them ends the whole session, the broker
//! redelivers unacknowledged messages, and the supervisor in `runtime/` opens the next session. No SQL, no decisions
//! about alarms.

pub mod unacked_tags;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{join_all, try_join_all};
use lapin::options::{BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, Consumer, Event};
use order_timeout_amqp::connect::{self, BrokerError, EndKind};
use order_timeout_amqp::topology::{PROBE_TYPE, Topology, TopologyError};
use order_timeout_core::alarm::{
    DeadLetter, Death, DeathReason, Delivered, DeliveredAlarm, ParkReason, Receipt, Returns, Settlement, SourceQueue,
};
use order_timeout_core::kind::Kind;
use order_timeout_core::message::{
    Alarm, HEADER_ATTEMPT, HEADER_EARLY_RETURNS, HEADER_RETURNS_AT, HEADER_TRACEPARENT, MAX_TRACEPARENT_BYTES,
};
use order_timeout_core::order::Timestamp;
use tokio::sync::{SetOnce, mpsc};
use tracing::debug;

use crate::config::Settings;
use unacked_tags::{AckPlan, UnackedTags};

/// Dead letters of the inbox and the processing queue are rare. But if a policy expires or drops alarms, many come at
/// once, and the same policy would delete them from the parked queue.
const PARKED_PREFETCH: u16 = 1_000;
/// The highest count of early returns that is distinguished.
const MAX_EARLY_RETURNS: u32 = 1_000;
/// The last of the year 9999.
const LAST_MILLISECOND: i64 = 253_402_300_799_999;
/// The timeout of closing channels and the connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// How long to wait for the connection's error after a channel's error.
const REASON_TIMEOUT: Duration = Duration::from_millis(200);
/// The longest that closing a session takes: first the channels, then the connection.
pub(crate) const LONGEST_CLOSE: Duration = CLOSE_TIMEOUT.saturating_mul(2);

/// An open session.
#[derive(Debug)]
pub struct Session {
    kind: Kind,
    number: u64,
    connection: Arc<Connection>,
    consumers: Vec<ConsumerChannel>,
    ended: Ended,
}

/// Why a session ended, or did not open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionEnd {
    /// Whether a message has caused it.
    pub kind: EndKind,
    /// One sentence.
    pub why: String,
}

impl SessionEnd {
    /// An end that no message has caused.
    pub fn other(why: impl Into<String>) -> Self {
        Self { kind: EndKind::Other, why: why.into() }
    }

    fn of(error: &lapin::Error) -> Self {
        let kind = connect::end_kind(error);
        let why = match kind {
            // The client knows nothing about the bytes that it could not parse.
            EndKind::Unreadable => match connect::reply(error) {
                Some((_, size)) => format!("the AMQP client cannot read a message that the broker delivered ({size})"),
                None => "the AMQP client cannot read a message that the broker delivered".into(),
            },
            EndKind::BrokerFailed => {
                format!("the broker itself failed ({error}), as RabbitMQ does over a message that it cannot deliver")
            }
            EndKind::AckTimeout => ack_timeout_reason(error),
            EndKind::Other => with_unacked_hint(error.to_string()),
        };
        Self { kind, why }
    }
}

/// The delivery that took too long is held, or cannot be closed. So the timeout is below what the worker may need.
fn ack_timeout_reason(error: &lapin::Error) -> String {
    let text = connect::reply(error).map_or_else(|| error.to_string(), |(_, text)| text);
    let what = text.split(". This timeout").next().unwrap_or(&text);
    format!("the broker closed a channel because an alarm was not acknowledged in time ({what}); {ACK_TIMEOUT_HINT}")
}

/// Shared brokers end a channel or a connection with more unacknowledged messages than they allow.
fn with_unacked_hint(why: String) -> String {
    if why.to_ascii_lowercase().contains("unack") {
        format!(
            "{why}; the broker limits unacknowledged messages: set worker.prefetch and worker.schedule_prefetch so that a worker's channels stay below its limit (docs/operating/deploy.md)"
        )
    } else {
        why
    }
}

/// What to do about a consumer timeout.
const ACK_TIMEOUT_HINT: &str = "the consumer timeout of its queue (consumer-timeout in a policy, consumer_timeout in rabbitmq.conf) must be well above worker.hold_max and worker.requeue_after";

/// Why no session was opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The broker is unavailable, or refused it.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// What only this kind has on the broker differs, or may not be declared. Sessions of other kinds are not affected.
    #[error("{0}")]
    OwnObjects(String),
    /// The broker had opened it and delivered a message that ended it.
    #[error("{}", .0.why)]
    Ended(SessionEnd),
}

/// What was declared again: an error for the objects that all kinds share, else a result for each kind.
pub type DeclaredAgain = Result<BTreeMap<Kind, Result<(), TopologyError>>, TopologyError>;

/// The first reason for the end of a session.
#[derive(Debug, Clone, Default)]
struct Ended(Arc<SetOnce<SessionEnd>>);

impl Ended {
    fn note(&self, end: SessionEnd) {
        // A later end follows from the first.
        let _ = self.0.set(end);
    }

    async fn reason(&self) -> SessionEnd {
        self.0.wait().await.clone()
    }
}

/// How a session is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opening {
    /// The session number in its receipts.
    pub number: u64,
    /// Whether an object of the deployment must exist already. A starting worker so refuses a mistyped namespace, while
    /// a worker that has seen the objects may declare all of them again.
    pub must_be_set_up: bool,
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
    /// Connects, declares what is missing, and starts consuming into `alarms`: alarms, and messages that are to be parked.
    ///
    /// # Errors
    /// [`OpenError`]; `Refused` if a retry will not help.
    pub async fn open(
        settings: &Settings,
        kind: &Kind,
        opening: Opening,
        alarms: mpsc::UnboundedSender<Delivered>,
    ) -> Result<Self, OpenError> {
        let name = if kind.is_default() { "worker".to_owned() } else { format!("worker {kind}") };
        let connection = Arc::new(connect::connect(&settings.amqp, &name).await?);
        if let Err(fault) = declare(&settings.topology(), kind, opening, &connection).await {
            connect::close(&connection, CLOSE_TIMEOUT).await;
            return Err(fault);
        }
        let mut session = Self {
            kind: kind.clone(),
            number: opening.number,
            connection,
            consumers: Vec::new(),
            ended: Ended::default(),
        };
        session.listen_for_unreadable();
        let (timeout, ended) = (settings.amqp.connect_timeout, session.ended.clone());
        let fault = tokio::select! {
            // First: after the client has given up, a pending request may never complete.
            biased;
            end = ended.reason() => OpenError::Ended(end),
            consuming = tokio::time::timeout(timeout, session.consume_all(settings, &alarms)) => match consuming {
                Ok(Ok(())) => return Ok(session),
                Ok(Err(error)) => session.open_error(&error).await,
                Err(_) => consuming_failed(&format!("the broker did not answer within {timeout:?}")),
            },
        };
        connect::close(&session.connection, CLOSE_TIMEOUT).await;
        Err(fault)
    }

    /// Listens to the connection, which reports once why it ended. Its channels may only report that they are closed,
    /// or nothing.
    fn listen_for_unreadable(&self) {
        let (events, ended) = (self.connection.events_listener(), self.ended.clone());
        tokio::spawn(async move {
            let mut events = std::pin::pin!(events);
            while let Some(event) = events.next().await {
                if let Event::Error(error) = event
                    && connect::end_kind(&error) != EndKind::Other
                {
                    return ended.note(SessionEnd::of(&error));
                }
            }
        });
    }

    /// What a channel's error means, given the connection's own error.
    async fn open_error(&self, error: &lapin::Error) -> OpenError {
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

    async fn consume_all(
        &mut self,
        settings: &Settings,
        alarms: &mpsc::UnboundedSender<Delivered>,
    ) -> lapin::Result<()> {
        let sources = sources(settings, &self.kind);
        for (index, queue) in (0..).zip(sources) {
            let consumer = self.consume(index, queue, alarms.clone()).await?;
            self.consumers.push(consumer);
        }
        Ok(())
    }

    async fn consume(
        &self,
        index: u8,
        queue: ConsumedQueue,
        alarms: mpsc::UnboundedSender<Delivered>,
    ) -> lapin::Result<ConsumerChannel> {
        let ConsumedQueue { source, queue, prefetch } = queue;
        let channel = self.connection.create_channel().await?;
        // Before consuming: lapin buffers deliveries without bound.
        channel.basic_qos(prefetch, BasicQosOptions::default()).await?;
        let consumer_tag = format!("order-timeout-{}-{index}", std::process::id());
        let options = BasicConsumeOptions { no_local: false, no_ack: false, exclusive: false, nowait: false };
        let consumer = channel
            .basic_consume(queue.as_str().into(), consumer_tag.as_str().into(), options, FieldTable::default())
            .await?;
        let consumer_channel = ConsumerChannel { source, channel, consumer_tag, unacked: Arc::default() };
        let reader =
            Reader { session: self.number, channel: index, source, unacked: consumer_channel.unacked.clone(), alarms };
        let ended = self.ended.clone();
        tokio::spawn(async move { ended.note(reader.read_all(consumer).await) });
        Ok(consumer_channel)
    }

    /// Declares objects that were deleted since, except the queues that this worker consumes: deleting one of those ends its
    /// session, and the next session declares it. The session may go on and end meanwhile.
    pub fn declare_again(&self, settings: &Settings) -> impl Future<Output = DeclaredAgain> + use<> {
        let (topology, connection) = (topology_of_workers(settings), self.connection.clone());
        async move { topology.declare_by_kind(&connection).await }
    }

    /// Checks that the broker accepts one more connection, such as the worker's own for publishing.
    ///
    /// # Errors
    /// [`BrokerError`] if it does not.
    pub async fn require_another_connection(&self, settings: &Settings) -> Result<(), BrokerError> {
        connect::require_another_connection(&settings.amqp, &self.connection).await
    }

    /// The connection, for looking at the broker.
    #[must_use]
    pub fn connection(&self) -> Arc<Connection> {
        self.connection.clone()
    }

    /// The session number in this session's receipts.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Whether the acknowledgement may wait for a while, which holds for deliveries from a processing queue. The prefetch
    /// windows of the other queues are small.
    #[must_use]
    pub fn may_settle_later(&self, receipt: Receipt) -> bool {
        self.consumers.get(usize::from(receipt.channel)).is_none_or(|consumer| consumer.source == SourceQueue::Timeout)
    }

    /// Resolves with the reason when any part of the session has ended. A stream that ends without an error counts: the
    /// queue was deleted, or the server cancelled the consumer.
    pub async fn ended(&self) -> SessionEnd {
        self.ended.reason().await
    }

    /// Settles deliveries of this session; receipts of others are void and left out.
    ///
    /// # Errors
    /// lapin's; the session must be closed then.
    pub async fn settle(&self, settlements: &[(Receipt, Settlement)]) -> lapin::Result<()> {
        let consumers = (0..).zip(&self.consumers);
        // All channels, even if one fails: it may have ended alone.
        join_all(consumers.map(|(index, consumer)| self.settle_on(index, consumer, settlements)))
            .await
            .into_iter()
            .collect()
    }

    async fn settle_on(
        &self,
        index: u8,
        consumer: &ConsumerChannel,
        settlements: &[(Receipt, Settlement)],
    ) -> lapin::Result<()> {
        for kind in [Settlement::Ack, Settlement::Requeue] {
            let is_ours =
                |(receipt, _): &&(Receipt, Settlement)| receipt.session == self.number && receipt.channel == index;
            let tags = settlements.iter().filter(is_ours).filter(|(_, k)| *k == kind).map(|(receipt, _)| receipt.tag);
            let plan = consumer.unacked.lock().expect("no holder panics").close(tags);
            consumer.send(kind, plan).await?;
        }
        Ok(())
    }

    /// Stops new deliveries; those on their way still arrive. Part of a shutdown.
    pub async fn cancel(&self) {
        for consumer in &self.consumers {
            let cancelled = consumer
                .channel
                .basic_cancel(consumer.consumer_tag.as_str().into(), BasicCancelOptions::default())
                .await;
            if let Err(error) = cancelled {
                debug!(%error, "a consumer had ended before it was cancelled");
            }
        }
    }

    /// Closes the channels and the connection; the broker redelivers unacknowledged messages.
    pub async fn close(self) {
        // Each separately: a channel replies after it has processed all earlier acknowledgements, while the close of
        // the connection may overtake them.
        let closing = self
            .consumers
            .iter()
            .map(|consumer| consumer.channel.close(connect::reply_code::CONTENT_OK, "done".into()));
        let _closed_or_timed_out = tokio::time::timeout(CLOSE_TIMEOUT, join_all(closing)).await;
        connect::close(&self.connection, CLOSE_TIMEOUT).await;
    }
}

fn consuming_failed(why: &str) -> OpenError {
    BrokerError::Away(format!("consuming could not start: {why}")).into()
}

/// The shared objects, then the kind's own.
async fn declare(topology: &Topology, kind: &Kind, opening: Opening, connection: &Connection) -> Result<(), OpenError> {
    if opening.must_be_set_up {
        topology.clone().seen_by(kind).require_some(connection).await.map_err(broker_error)?;
    }
    topology.shared().declare(connection).await.map_err(broker_error)?;
    topology.of_kind(kind).declare(connection).await.map_err(|fault| match broker_error(fault) {
        BrokerError::Refused(why) => OpenError::OwnObjects(why),
        away @ BrokerError::Away(_) => away.into(),
    })
}

fn broker_error(fault: TopologyError) -> BrokerError {
    match fault {
        TopologyError::Failed { .. } | TopologyError::Missing { .. } | TopologyError::QueueLimit { .. } => {
            BrokerError::Away(fault.to_string())
        }
        TopologyError::Differs { .. }
        | TopologyError::Refused { .. }
        | TopologyError::NeverSetUp { .. }
        | TopologyError::NoDelayedExchange { .. }
        | TopologyError::NoHashExchange { .. } => BrokerError::Refused(fault.to_string()),
    }
}

/// All objects; those that this worker consumes are only verified.
pub(crate) fn topology_of_workers(settings: &Settings) -> Topology {
    let of_kinds = settings.served_kinds().into_iter().flat_map(|kind| sources(settings, &kind));
    settings.topology().but_for_consumed(of_kinds.map(|source| source.queue).collect())
}

/// A queue to consume from.
struct ConsumedQueue {
    source: SourceQueue,
    queue: String,
    prefetch: u16,
}

/// The queues of a kind's session, in the order of its channels. All kinds share the inbox and the parked queue: an alarm of
/// another kind is sent on at once, so that a kind whose session is away holds up no other.
fn sources(settings: &Settings, kind: &Kind) -> Vec<ConsumedQueue> {
    let (names, worker) = (settings.names(), &settings.worker);
    let processing = worker.queue_of_each_channel(&names, kind).into_iter();
    let processing = processing.map(|queue| (SourceQueue::Timeout, queue, worker.prefetch));
    let rest = [
        (SourceQueue::Inbox, names.schedule(), worker.schedule_prefetch),
        (SourceQueue::Parked, names.parked(), PARKED_PREFETCH),
    ];
    processing.chain(rest).map(|(source, queue, prefetch)| ConsumedQueue { source, queue, prefetch }).collect()
}

/// What takes every message out of the queues that a session consumes, the most likely one first.
pub fn purge_commands(settings: &Settings, kind: &Kind) -> String {
    let vhost = settings.names().vhost_option();
    let purge = |source: ConsumedQueue| format!("`rabbitmqctl purge_queue{vhost} {}`", source.queue);
    sources(settings, kind).into_iter().map(purge).collect::<Vec<_>>().join(", or ")
}

impl ConsumerChannel {
    /// All at once: awaiting each before the next would wake lapin's I/O thread for every frame.
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
    alarms: mpsc::UnboundedSender<Delivered>,
}

impl Reader {
    /// Reads until the consumer ends, and returns why it ended.
    async fn read_all(self, mut consumer: Consumer) -> SessionEnd {
        while let Some(delivery) = consumer.next().await {
            let delivery = match delivery {
                Ok(delivery) => delivery,
                Err(error) => return SessionEnd::of(&error),
            };
            if delivery.properties.kind().as_ref().is_some_and(|kind| kind.as_str() == PROBE_TYPE) {
                // Before the next delivery is read: a frame that acknowledges the next could include this one.
                if let Err(error) = delivery.acker.ack(BasicAckOptions::default()).await {
                    return SessionEnd::of(&error);
                }
                continue;
            }
            let receipt = Receipt { session: self.session, channel: self.channel, tag: delivery.delivery_tag };
            self.unacked.lock().expect("no holder panics").open(receipt.tag);
            let properties = &delivery.properties;
            let content = read(&delivery.data, properties);
            let death = self.needs_death(&content).then(|| last_death(properties)).flatten();
            let delivered = Delivered { receipt, source: self.source, content, death };
            if self.alarms.send(delivered).is_err() {
                return SessionEnd::other("the worker has stopped");
            }
        }
        SessionEnd::other(format!(
            "the broker cancelled the consumer; was its queue deleted, or a delivery kept for too long? {ACK_TIMEOUT_HINT}"
        ))
    }

    /// Every alarm from a delay queue has been dead-lettered there. The reason matters only for messages from the
    /// parked queue, and for alarms that were returned early before.
    fn needs_death(&self, content: &Result<DeliveredAlarm, DeadLetter>) -> bool {
        self.source == SourceQueue::Parked || content.as_ref().is_ok_and(|alarm| alarm.returns.early > 0)
    }
}

/// Reads a delivered message as an alarm, or as the dead letter that is to be parked.
///
/// # Errors
/// The [`DeadLetter`] of a message that is not an alarm.
pub fn read(body: &[u8], properties: &BasicProperties) -> Result<DeliveredAlarm, DeadLetter> {
    let message_type = properties.kind().as_ref().map(lapin::types::ShortString::as_str);
    let alarm = Alarm::read(body, message_type)
        .map_err(|fault| DeadLetter::unread(ParkReason::Unreadable, fault.to_string(), body))?;
    let headers = properties.headers().as_ref();
    let header = |name: &str| headers.and_then(|table| table.inner().get(name));
    Ok(DeliveredAlarm {
        alarm,
        attempt: header(HEADER_ATTEMPT).and_then(whole_number).unwrap_or(0),
        first_published_at: properties.timestamp().map(timestamp_from_seconds),
        traceparent: header(HEADER_TRACEPARENT).and_then(short_text),
        returns: Returns {
            due_at: header(HEADER_RETURNS_AT).and_then(timestamp_from_millis),
            early: header(HEADER_EARLY_RETURNS).and_then(whole_number).unwrap_or(0).min(MAX_EARLY_RETURNS),
        },
    })
}

/// Why the broker took a message out of its last queue. RabbitMQ lists the last death first; from 4.0 on it is also in
/// separate headers.
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

/// A time as the rearmer writes it. Times before 1970 or after the year 9999 are invalid.
fn timestamp_from_millis(value: &AMQPValue) -> Option<Timestamp> {
    let AMQPValue::LongLongInt(millis) = value else { return None };
    (0..=LAST_MILLISECOND).contains(millis).then(|| Timestamp::from_unix_micros(millis * 1_000))
}

/// AMQP timestamps are seconds; one beyond the range of a [`Timestamp`] saturates.
fn timestamp_from_seconds(seconds: u64) -> Timestamp {
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

/// A W3C trace context; anything much longer is none.
fn short_text(value: &AMQPValue) -> Option<String> {
    let AMQPValue::LongString(text) = value else { return None };
    let text = std::str::from_utf8(text.as_bytes()).ok()?;
    (text.len() <= MAX_TRACEPARENT_BYTES).then(|| text.to_owned())
}
