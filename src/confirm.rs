//! Publishes with confirms: a message counts as safe when the broker has confirmed it *and* every message of its window
//! is confirmed without this one having been returned.
//!
//! The second condition is needed because lapin may attach a returned message to the confirm of another message when
//! publishes are pipelined. Returns are therefore matched by message id, after the window is complete. Two channels
//! take jobs from the queue in turn, so that one publishes while the other waits.
//!
//! Knows messages and exchanges, not alarms. Never retries: the caller decides.

use std::collections::HashSet;
use std::sync::{Arc, Mutex as Lock};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesOrdered;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable, ShortString};
use lapin::{BasicProperties, Channel, Confirmation, Connection, PublisherConfirm};
use tokio::sync::{Mutex, Notify, mpsc, oneshot};

use crate::broker::{self, BrokerError, reply_code};
use crate::config::AmqpSettings;
use crate::message::{AMQP_MAX_SHORT_STRING_BYTES, LONGEST_TTL};

/// The most outstanding confirms per channel. lapin walks over all of them for each reply, so more is slower.
pub const WINDOW: usize = 1_000;
/// Channels that take turns.
const CHANNELS: usize = 2;
/// Windows of one `publish_all` that are in flight at once: the next ones are queued while the channels publish the
/// first. Not more, because each has a timeout from the time it is submitted.
const WINDOWS_AT_ONCE: usize = 2 * CHANNELS;
/// Jobs that may be queued before `publish` itself waits.
const QUEUED_JOBS: usize = 1_024;
/// AMQP delivery mode 2: written to disk. A dead letter keeps the mode of its message.
const PERSISTENT: u8 = 2;

/// A message to be published.
#[derive(Debug, Clone, PartialEq)]
pub struct Outgoing {
    pub exchange: String,
    pub routing_key: String,
    pub body: Vec<u8>,
    /// Identifies the message to its receiver, and its return to the publisher. Unique within a window.
    pub message_id: String,
    /// AMQP property `type`.
    pub message_type: String,
    pub content_type: &'static str,
    /// Seconds since the epoch, as AMQP has it.
    pub timestamp_s: u64,
    /// AMQP property `expiration`.
    pub ttl: Option<Duration>,
    pub headers: Vec<(&'static str, AMQPValue)>,
    /// Whether a message that reaches no queue is a failure.
    pub mandatory: bool,
}

/// Why a message is not known to be safe at the broker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PublishError {
    #[error("the broker refused the message (nack); is a queue full, or has it lost its leader?")]
    Nacked,
    #[error("no queue is bound for it ({0}); run `order-timeout setup` with the settings of this publisher")]
    Unroutable(String),
    #[error("its exchange is not there ({0}); run `order-timeout setup` with the settings of this publisher")]
    NoExchange(String),
    #[error("the broker did not confirm within {0:?}; it may be overloaded or cut off")]
    TimedOut(Duration),
    #[error("the broker blocks publishers; it is short of memory or disk")]
    Blocked,
    #[error(
        "the broker does not let this user publish ({0}); grant it write rights there with rabbitmqctl set_permissions"
    )]
    Refused(String),
    #[error("the broker closed the channel: {0}")]
    ChannelClosed(String),
    #[error("{0}")]
    NotConnected(BrokerError),
    #[error("its {what} cannot be sent: {why}")]
    Unsendable { what: &'static str, why: String },
    #[error("this publisher was shut down")]
    ShutDown,
}

impl PublishError {
    /// Whether no message can be sent at all.
    #[must_use]
    pub fn is_broker_wide(&self) -> bool {
        matches!(self, Self::TimedOut(_) | Self::Blocked | Self::NotConnected(_) | Self::ShutDown)
    }

    /// Whether this message was refused individually, so that others may be accepted.
    #[must_use]
    pub fn is_message_specific(&self) -> bool {
        matches!(self, Self::Nacked | Self::Unroutable(_) | Self::Unsendable { .. })
    }
}

type PublishResults = Vec<Result<(), PublishError>>;

/// The messages of one caller: at most a window.
struct Job {
    messages: Vec<Outgoing>,
    results: oneshot::Sender<PublishResults>,
}

/// Signals that a message was unroutable: its exchange does not exist, or no queue is bound for it.
#[derive(Debug, Default)]
pub struct MissingRoute {
    noted: Notify,
    route: Lock<Option<String>>,
}

impl MissingRoute {
    /// Wakes the waiting task; `route` describes the missing route.
    pub fn note(&self, route: String) {
        *self.route.lock().expect("no holder panics") = Some(route);
        self.noted.notify_one();
    }

    /// Resolves with the name of a missing route when there is one.
    pub async fn noted(&self) -> String {
        self.noted.notified().await;
        self.route.lock().expect("no holder panics").take().unwrap_or_default()
    }
}

/// A handle to a publishing connection. Cheap to clone; the connection ends with the last handle.
#[derive(Debug, Clone)]
pub struct ConfirmedPublisher {
    jobs: mpsc::Sender<Job>,
    /// How long a job may take from the time it is submitted, including the time in the queue.
    timeout: Duration,
    missing_route: Arc<MissingRoute>,
}

impl ConfirmedPublisher {
    /// Connects, so that wrong credentials are reported now and not at the first message.
    ///
    /// # Errors
    /// [`BrokerError`] if there is no connection.
    pub async fn connect(settings: &AmqpSettings, name: &'static str) -> Result<Self, BrokerError> {
        let shared = SharedConnection::new(settings, name);
        shared.connection().await?;
        Ok(Self::over(shared))
    }

    /// Connects when the first message is published: for a worker that must run while the broker is unavailable.
    #[must_use]
    pub fn connect_lazily(settings: &AmqpSettings, name: &'static str) -> Self {
        Self::over(SharedConnection::new(settings, name))
    }

    fn over(shared: SharedConnection) -> Self {
        let (jobs, receiver) = mpsc::channel(QUEUED_JOBS);
        let timeout = shared.settings.connect_timeout + shared.settings.confirm_timeout;
        let missing_route = shared.missing_route.clone();
        let (shared, queue) = (Arc::new(shared), Arc::new(Mutex::new(JobQueue { receiver, next: None })));
        for _ in 0..CHANNELS {
            tokio::spawn(PublishChannel { shared: shared.clone(), queue: queue.clone(), channel: None }.run());
        }
        Self { jobs, timeout, missing_route }
    }

    /// Signalled when a message is unroutable.
    #[must_use]
    pub fn missing_route(&self) -> Arc<MissingRoute> {
        self.missing_route.clone()
    }

    /// Publishes one message.
    ///
    /// # Errors
    /// [`PublishError`] if it is not known to be safe, within `connect_timeout` + `confirm_timeout`.
    pub async fn publish(&self, message: Outgoing) -> Result<(), PublishError> {
        self.submit(vec![message]).await.pop().unwrap_or(Err(PublishError::ShutDown))
    }

    /// Publishes many messages, pipelined. Returns one result for each, in their order. If a whole window fails because
    /// the broker does not answer, which takes as long as in [`Self::publish`], the rest is not tried.
    ///
    /// The iterator is asked for each message shortly before it is sent, because a TTL counts from when the broker has
    /// it.
    pub async fn publish_all(
        &self,
        messages: impl IntoIterator<Item = Outgoing, IntoIter: ExactSizeIterator>,
    ) -> Vec<Result<(), PublishError>> {
        let mut messages = messages.into_iter().peekable();
        let count = messages.len();
        let mut waiting = FuturesOrdered::new();
        let mut results = PublishResults::new();
        let mut broker_fault = None;
        loop {
            while broker_fault.is_none() && waiting.len() < WINDOWS_AT_ONCE && messages.peek().is_some() {
                waiting.push_back(self.submit(messages.by_ref().take(WINDOW).collect()));
            }
            let Some(window) = waiting.next().await else { break };
            broker_fault = broker_fault.or_else(|| fault_of_whole_window(&window));
            results.extend(window);
        }
        if let Some(fault) = broker_fault {
            results.resize(count, Err(fault));
        }
        results
    }

    async fn submit(&self, messages: Vec<Outgoing>) -> PublishResults {
        let count = messages.len();
        let (results, receiver) = oneshot::channel();
        let finished = async {
            self.jobs.send(Job { messages, results }).await.ok()?;
            receiver.await.ok()
        };
        match tokio::time::timeout(self.timeout, finished).await {
            Ok(results) => results.unwrap_or_else(|| vec![Err(PublishError::ShutDown); count]),
            Err(_) => vec![Err(PublishError::TimedOut(self.timeout)); count],
        }
    }
}

/// Why no message of a window was sent, if none was.
fn fault_of_whole_window(results: &PublishResults) -> Option<PublishError> {
    let all = results.iter().all(|result| result.as_ref().is_err_and(PublishError::is_broker_wide));
    results.first().filter(|_| all)?.clone().err()
}

/// The connection that the channels share; reopened when it is broken.
struct SharedConnection {
    settings: AmqpSettings,
    name: &'static str,
    current: Mutex<Option<Arc<Connection>>>,
    missing_route: Arc<MissingRoute>,
}

impl SharedConnection {
    fn new(settings: &AmqpSettings, name: &'static str) -> Self {
        Self { settings: settings.clone(), name, current: Mutex::new(None), missing_route: Arc::default() }
    }

    async fn connection(&self) -> Result<Arc<Connection>, BrokerError> {
        let mut current = self.current.lock().await;
        if let Some(connection) = current.as_ref().filter(|connection| connection.status().connected()) {
            return Ok(connection.clone());
        }
        let connection = Arc::new(broker::connect(&self.settings, self.name).await?);
        *current = Some(connection.clone());
        Ok(connection)
    }

    async fn open_channel(&self) -> Result<(Arc<Connection>, Channel), PublishError> {
        let connection = self.connection().await.map_err(PublishError::NotConnected)?;
        if connection.status().blocked() {
            return Err(PublishError::Blocked);
        }
        let opening = async {
            let channel = connection.create_channel().await.map_err(|error| closed(&error))?;
            channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(|error| closed(&error))?;
            Ok(channel)
        };
        let timeout = self.settings.confirm_timeout;
        let channel = tokio::time::timeout(timeout, opening).await.map_err(|_| PublishError::TimedOut(timeout))??;
        Ok((connection, channel))
    }
}

/// The queued jobs, and the one that did not fit into the last window.
struct JobQueue {
    receiver: mpsc::Receiver<Job>,
    next: Option<Job>,
}

impl JobQueue {
    /// Takes the queued jobs, up to a window; waits for the first. `None` when the last handle is dropped.
    async fn next_window(&mut self) -> Option<Vec<Job>> {
        let mut jobs: Vec<Job> = Vec::new();
        let mut count = 0;
        loop {
            let job = match self.next.take() {
                Some(job) => job,
                None if jobs.is_empty() => self.receiver.recv().await?,
                None => match self.receiver.try_recv() {
                    Ok(job) => job,
                    Err(_) => return Some(jobs),
                },
            };
            // Its caller's timeout has ended, and a stalled broker must not get messages whose result is not needed.
            if job.results.is_closed() {
                continue;
            }
            count += job.messages.len();
            if count > WINDOW && !jobs.is_empty() {
                self.next = Some(job);
                return Some(jobs);
            }
            jobs.push(job);
        }
    }
}

/// One channel that takes jobs from the queue, a window at a time.
struct PublishChannel {
    shared: Arc<SharedConnection>,
    queue: Arc<Mutex<JobQueue>>,
    channel: Option<(Arc<Connection>, Channel)>,
}

impl PublishChannel {
    async fn run(mut self) {
        while let Some(jobs) = self.next_jobs().await {
            let messages: Vec<&Outgoing> = jobs.iter().flat_map(|job| &job.messages).collect();
            let mut results = self.publish_window(&messages).await.into_iter();
            for job in jobs {
                // A caller that has gone does not need its result.
                let _ = job.results.send(results.by_ref().take(job.messages.len()).collect());
            }
        }
        if let Some((connection, _)) = self.channel.take() {
            broker::close(&connection, Duration::from_secs(1)).await;
        }
    }

    async fn next_jobs(&self) -> Option<Vec<Job>> {
        self.queue.lock().await.next_window().await
    }

    async fn publish_window(&mut self, messages: &[&Outgoing]) -> PublishResults {
        let (connection, channel) = match self.take_channel().await {
            Ok(open) => open,
            Err(fault) => return vec![Err(fault); messages.len()],
        };
        if connection.status().blocked() {
            self.channel = Some((connection, channel));
            return vec![Err(PublishError::Blocked); messages.len()];
        }
        let timeout = self.shared.settings.confirm_timeout;
        let mut results = match tokio::time::timeout(timeout, send_and_await(&channel, messages)).await {
            Ok(results) => results,
            // On a blocked connection lapin writes nothing, so a window that began before the notice ends here.
            Err(_) if connection.status().blocked() => vec![Err(PublishError::Blocked); messages.len()],
            Err(_) => vec![Err(PublishError::TimedOut(timeout)); messages.len()],
        };
        if !connection.status().connected() {
            results.iter_mut().for_each(attribute_to_connection);
        }
        let is_unroutable =
            |result: &Result<_, _>| matches!(result, Err(PublishError::Unroutable(_) | PublishError::NoExchange(_)));
        if let Some(at) = results.iter().position(is_unroutable) {
            let Outgoing { exchange, routing_key, .. } = messages[at];
            self.shared
                .missing_route
                .note(format!("exchange {exchange:?} led to no queue for routing key {routing_key:?}"));
        }
        if results.iter().all(leaves_channel_usable) {
            self.channel = Some((connection, channel));
        }
        results
    }

    async fn take_channel(&mut self) -> Result<(Arc<Connection>, Channel), PublishError> {
        match self.channel.take().filter(|(_, channel)| channel.status().connected()) {
            Some(open) => Ok(open),
            None => self.shared.open_channel().await,
        }
    }
}

/// A channel that was closed with its connection gives no reason for the messages published on it.
fn attribute_to_connection(result: &mut Result<(), PublishError>) {
    if let Err(PublishError::ChannelClosed(why)) = result {
        *result = Err(PublishError::NotConnected(BrokerError::Away(std::mem::take(why))));
    }
}

fn leaves_channel_usable(result: &Result<(), PublishError>) -> bool {
    use PublishError::{Nacked, Unroutable, Unsendable};
    matches!(result, Ok(()) | Err(Nacked | Unroutable(_) | Unsendable { .. }))
}

/// Publishes a window and waits for all of its confirms, after which no return can be misattributed.
async fn send_and_await(channel: &Channel, messages: &[&Outgoing]) -> PublishResults {
    // At once, in their order: lapin's publish returns when its I/O thread has written the frame, and awaiting each
    // before the next would wake that thread for every message.
    let confirms: Vec<Result<PublisherConfirm, PublishError>> =
        join_all(messages.iter().map(|message| send(channel, message))).await;
    let mut returned = HashSet::new();
    let mut returned_text = String::new();
    let mut results = PublishResults::with_capacity(messages.len());
    for sent in confirms {
        let confirmation = match sent {
            Ok(confirm) => confirm.await.map_err(|error| closed(&error)),
            Err(fault) => Err(fault),
        };
        results.push(match confirmation {
            Ok(confirmation) => {
                let result = if confirmation.is_nack() { Err(PublishError::Nacked) } else { Ok(()) };
                if matches!(confirmation, Confirmation::NotRequested) {
                    unreachable!("the channel is in confirm mode");
                }
                if let Some(message) = confirmation.take_message() {
                    returned_text = format!("{} {}", message.reply_code, message.reply_text);
                    returned.extend(message.delivery.properties.message_id().as_ref().map(ToString::to_string));
                }
                result
            }
            Err(fault) => Err(fault),
        });
    }
    for (message, result) in messages.iter().zip(&mut results) {
        if result.is_ok() && returned.contains(&message.message_id) {
            *result = Err(PublishError::Unroutable(returned_text.clone()));
        }
    }
    results
}

async fn send(channel: &Channel, message: &Outgoing) -> Result<PublisherConfirm, PublishError> {
    let options = BasicPublishOptions { mandatory: message.mandatory, immediate: false };
    let exchange = short("exchange", &message.exchange)?;
    let routing_key = short("routing key", &message.routing_key)?;
    let properties = properties(message)?;
    let published = channel.basic_publish(exchange, routing_key, options, &message.body, properties).await;
    published.map_err(|error| closed(&error))
}

/// What an error of a channel means for the messages published on it.
fn closed(error: &lapin::Error) -> PublishError {
    match broker::reply(error) {
        Some((reply_code::ACCESS_REFUSED, why)) => PublishError::Refused(why),
        Some((reply_code::NOT_FOUND, why)) => PublishError::NoExchange(why),
        _ => PublishError::ChannelClosed(error.to_string()),
    }
}

/// AMQP's short strings hold 255 bytes; lapin panics on a longer one.
fn short(what: &'static str, text: &str) -> Result<ShortString, PublishError> {
    ShortString::try_new(text).map_err(|_| {
        let why = format!("it has {} bytes, more than the {AMQP_MAX_SHORT_STRING_BYTES} that AMQP allows", text.len());
        PublishError::Unsendable { what, why }
    })
}

/// The AMQP properties of a message.
///
/// # Errors
/// [`PublishError::Unsendable`] if AMQP cannot express it.
pub fn properties(message: &Outgoing) -> Result<BasicProperties, PublishError> {
    let mut properties = BasicProperties::default()
        .with_delivery_mode(PERSISTENT)
        .with_content_type(message.content_type.into())
        .with_type(short("type", &message.message_type)?)
        .with_message_id(short("message id", &message.message_id)?)
        .with_timestamp(message.timestamp_s)
        .with_app_id("order-timeout".into());
    if let Some(ttl) = message.ttl {
        properties = properties.with_expiration(expiration(ttl)?);
    }
    if !message.headers.is_empty() {
        let mut table = FieldTable::default();
        for (key, value) in &message.headers {
            table.insert((*key).into(), value.clone());
        }
        properties = properties.with_headers(table);
    }
    Ok(properties)
}

/// A decimal string of milliseconds. An invalid one would close the channel and so fail the other messages of the
/// window.
fn expiration(ttl: Duration) -> Result<ShortString, PublishError> {
    if ttl > LONGEST_TTL {
        let [ttl, longest] = [ttl, LONGEST_TTL].map(|duration| duration.as_millis());
        let why = format!("{ttl} ms are more than the {longest} for which RabbitMQ keeps a message");
        return Err(PublishError::Unsendable { what: "expiration", why });
    }
    short("expiration", &ttl.as_millis().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> Outgoing {
        Outgoing {
            exchange: "order.events".into(),
            routing_key: "order.closed".into(),
            body: Vec::new(),
            message_id: "1".into(),
            message_type: "order.closed.v1".into(),
            content_type: "application/json",
            timestamp_s: 0,
            ttl: None,
            headers: Vec::new(),
            mandatory: false,
        }
    }

    #[tokio::test]
    async fn messages_are_requested_window_by_window() {
        let (jobs, _never_finished) = mpsc::channel(QUEUED_JOBS);
        let timeout = Duration::from_millis(10);
        let publisher = ConfirmedPublisher { jobs, timeout, missing_route: Arc::default() };
        let (all, mut asked_for) = (10 * WINDOWS_AT_ONCE * WINDOW, 0);
        let messages = (0..all).map(|_| {
            asked_for += 1;
            message()
        });
        let results = publisher.publish_all(messages).await;
        assert_eq!(results, vec![Err(PublishError::TimedOut(timeout)); all]);
        assert!(asked_for <= WINDOWS_AT_ONCE * WINDOW + 1, "{asked_for}");
    }

    #[tokio::test]
    async fn windows_never_exceed_limit() {
        let (jobs, receiver) = mpsc::channel(QUEUED_JOBS);
        let mut waiting = Vec::new();
        for count in [999, 1, 1, 999, 600, 600, 400, WINDOW, 3] {
            let (results, receiver) = oneshot::channel();
            jobs.try_send(Job { messages: vec![message(); count], results }).ok().unwrap();
            waiting.push(receiver);
        }
        // The caller has gone.
        drop(waiting.remove(8));
        drop(jobs);
        let mut queue = JobQueue { receiver, next: None };
        let mut windows = Vec::new();
        while let Some(jobs) = queue.next_window().await {
            windows.push(jobs.iter().map(|job| job.messages.len()).collect::<Vec<_>>());
        }
        assert_eq!(windows, [vec![999, 1], vec![1, 999], vec![600], vec![600, 400], vec![WINDOW]]);
    }

    #[test]
    fn property_beyond_amqp_limit_is_named() {
        let long = "ü".repeat(128);
        for (what, outgoing) in [
            ("type", Outgoing { message_type: long.clone(), ..message() }),
            ("message id", Outgoing { message_id: long.clone(), ..message() }),
            ("expiration", Outgoing { ttl: Some(Duration::MAX), ..message() }),
            ("expiration", Outgoing { ttl: Some(LONGEST_TTL + Duration::from_millis(1)), ..message() }),
        ] {
            let fault = properties(&outgoing).unwrap_err().to_string();
            assert!(fault.starts_with(&format!("its {what} cannot be sent: ")), "{fault}");
        }
        assert!(properties(&Outgoing { ttl: Some(LONGEST_TTL), message_id: "x".repeat(255), ..message() }).is_ok());
    }
}
