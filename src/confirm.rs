//! Publishing and knowing that it arrived: a message counts as safe when the broker has confirmed it *and* the whole
//! window it was sent in has been answered without its return.
//!
//! The second half is needed because lapin may hand a returned message to the confirm of a neighbour when publishes
//! are pipelined. Returns are therefore matched by message id, after the window is complete. Two channels work through
//! the queue of jobs in turn, so that one publishes while the other waits.
//!
//! Knows messages and exchanges, nothing of alarms; never retries, so that its caller decides.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, PublisherConfirm};
use tokio::sync::{Mutex, mpsc, oneshot};

use crate::broker::{self, BrokerFault};
use crate::config::AmqpSettings;

/// Confirms outstanding per channel. lapin looks at every outstanding one for each answer, so more is slower.
pub const WINDOW: usize = 1_000;
/// Channels that take turns.
const CHANNELS: usize = 2;
/// Jobs that may queue up before `publish` itself waits.
const QUEUED_JOBS: usize = 1_024;
/// AMQP delivery mode 2: written to disk. A dead letter keeps the mode of its message.
const PERSISTENT: u8 = 2;

/// A message on its way out.
#[derive(Debug, Clone, PartialEq)]
pub struct Outgoing {
    pub exchange: String,
    pub routing_key: String,
    pub body: Vec<u8>,
    /// Identifies the message to its receiver, and its return to us. Unique within a window.
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

/// Why a message is not safely in the broker's hands.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotConfirmed {
    #[error("the broker refused the message (nack); is a queue full, or has it lost its leader?")]
    Nacked,
    #[error("no queue is bound for it ({0}); run `order-timeout setup` with the settings of this publisher")]
    Unroutable(String),
    #[error("the broker did not confirm within {0:?}; it may be overloaded or cut off")]
    TimedOut(Duration),
    #[error("the broker blocks publishers; it is short of memory or disk")]
    Blocked,
    #[error("the broker closed the channel: {0}")]
    ChannelClosed(String),
    #[error("{0}")]
    NotConnected(BrokerFault),
    #[error("this publisher was shut down")]
    ShutDown,
}

type Answer = Vec<Result<(), NotConfirmed>>;

struct Job {
    messages: Vec<Outgoing>,
    answer: oneshot::Sender<Answer>,
}

/// A handle to a publishing connection. Cheap to clone; the connection ends with the last handle.
#[derive(Debug, Clone)]
pub struct ConfirmedPublisher {
    jobs: mpsc::Sender<Job>,
}

impl ConfirmedPublisher {
    /// Connects, so that wrong credentials are heard of now and not at the first message.
    ///
    /// # Errors
    /// [`BrokerFault`] if there is no connection.
    pub async fn connect(settings: &AmqpSettings, name: &'static str) -> Result<Self, BrokerFault> {
        let line = Line::new(settings, name);
        line.connection().await?;
        Ok(Self::over(line))
    }

    /// Connects when the first message is published: for a worker that must run while the broker is away.
    #[must_use]
    pub fn connect_lazily(settings: &AmqpSettings, name: &'static str) -> Self {
        Self::over(Line::new(settings, name))
    }

    fn over(line: Line) -> Self {
        let (jobs, queue) = mpsc::channel(QUEUED_JOBS);
        let (line, queue) = (Arc::new(line), Arc::new(Mutex::new(queue)));
        for _ in 0..CHANNELS {
            tokio::spawn(Pipe { line: line.clone(), queue: queue.clone(), channel: None }.run());
        }
        Self { jobs }
    }

    /// Publishes one message.
    ///
    /// # Errors
    /// [`NotConfirmed`] if it is not known to be safe, in bounded time.
    pub async fn publish(&self, message: Outgoing) -> Result<(), NotConfirmed> {
        self.submit(vec![message]).await.pop().unwrap_or(Err(NotConfirmed::ShutDown))
    }

    /// Publishes many messages, pipelined. One answer for each, in their order.
    pub async fn publish_all(&self, messages: Vec<Outgoing>) -> Vec<Result<(), NotConfirmed>> {
        let mut waiting = Vec::new();
        let mut messages = messages.into_iter().peekable();
        while messages.peek().is_some() {
            waiting.push(self.submit(messages.by_ref().take(WINDOW).collect()));
        }
        join_all(waiting).await.concat()
    }

    async fn submit(&self, messages: Vec<Outgoing>) -> Answer {
        let count = messages.len();
        let (answer, answered) = oneshot::channel();
        if self.jobs.send(Job { messages, answer }).await.is_err() {
            return vec![Err(NotConfirmed::ShutDown); count];
        }
        answered.await.unwrap_or_else(|_| vec![Err(NotConfirmed::ShutDown); count])
    }
}

/// The connection that the pipes share; opened again when it is found broken.
struct Line {
    settings: AmqpSettings,
    name: &'static str,
    current: Mutex<Option<Arc<Connection>>>,
}

impl Line {
    fn new(settings: &AmqpSettings, name: &'static str) -> Self {
        Self { settings: settings.clone(), name, current: Mutex::new(None) }
    }

    async fn connection(&self) -> Result<Arc<Connection>, BrokerFault> {
        let mut current = self.current.lock().await;
        if let Some(connection) = current.as_ref().filter(|connection| connection.status().connected()) {
            return Ok(connection.clone());
        }
        let connection = Arc::new(broker::connect(&self.settings, self.name).await?);
        *current = Some(connection.clone());
        Ok(connection)
    }

    async fn open_channel(&self) -> Result<(Arc<Connection>, Channel), NotConfirmed> {
        let connection = self.connection().await.map_err(NotConfirmed::NotConnected)?;
        if connection.status().blocked() {
            return Err(NotConfirmed::Blocked);
        }
        let closed = |error: lapin::Error| NotConfirmed::ChannelClosed(error.to_string());
        let opening = async {
            let channel = connection.create_channel().await.map_err(closed)?;
            channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(closed)?;
            Ok(channel)
        };
        let patience = self.settings.confirm_timeout;
        let channel = tokio::time::timeout(patience, opening).await.map_err(|_| NotConfirmed::TimedOut(patience))??;
        Ok((connection, channel))
    }
}

/// One channel working through the queue of jobs, a window at a time.
struct Pipe {
    line: Arc<Line>,
    queue: Arc<Mutex<mpsc::Receiver<Job>>>,
    channel: Option<(Arc<Connection>, Channel)>,
}

impl Pipe {
    async fn run(mut self) {
        while let Some(jobs) = self.next_window().await {
            let messages: Vec<&Outgoing> = jobs.iter().flat_map(|job| &job.messages).collect();
            let mut answers = self.publish_window(&messages).await.into_iter();
            for job in jobs {
                // A caller that has gone away does not want its answer.
                let _ = job.answer.send(answers.by_ref().take(job.messages.len()).collect());
            }
        }
        if let Some((connection, _)) = self.channel.take() {
            broker::close(&connection, Duration::from_secs(1)).await;
        }
    }

    /// Whatever is queued, up to a window; waits for the first. `None` when the last handle is gone.
    async fn next_window(&self) -> Option<Vec<Job>> {
        let mut queue = self.queue.lock().await;
        let first = queue.recv().await?;
        let mut count = first.messages.len();
        let mut jobs = vec![first];
        while count < WINDOW {
            let Ok(job) = queue.try_recv() else { break };
            count += job.messages.len();
            jobs.push(job);
        }
        Some(jobs)
    }

    async fn publish_window(&mut self, messages: &[&Outgoing]) -> Answer {
        let (connection, channel) = match self.take_channel().await {
            Ok(open) => open,
            Err(fault) => return vec![Err(fault); messages.len()],
        };
        if connection.status().blocked() {
            self.channel = Some((connection, channel));
            return vec![Err(NotConfirmed::Blocked); messages.len()];
        }
        let patience = self.line.settings.confirm_timeout;
        let answer = match tokio::time::timeout(patience, send_and_await(&channel, messages)).await {
            Ok(answer) => answer,
            // On a blocked connection lapin writes nothing, so a window begun before the notice ends here.
            Err(_) if connection.status().blocked() => vec![Err(NotConfirmed::Blocked); messages.len()],
            Err(_) => vec![Err(NotConfirmed::TimedOut(patience)); messages.len()],
        };
        let is_clean = answer
            .iter()
            .all(|result| matches!(result, Ok(()) | Err(NotConfirmed::Nacked | NotConfirmed::Unroutable(_))));
        if is_clean {
            self.channel = Some((connection, channel));
        }
        answer
    }

    async fn take_channel(&mut self) -> Result<(Arc<Connection>, Channel), NotConfirmed> {
        match self.channel.take().filter(|(_, channel)| channel.status().connected()) {
            Some(open) => Ok(open),
            None => self.line.open_channel().await,
        }
    }
}

/// Publishes a window and waits for all of its confirms, so that no return can be misattributed any more.
async fn send_and_await(channel: &Channel, messages: &[&Outgoing]) -> Answer {
    let mut confirms: Vec<lapin::Result<PublisherConfirm>> = Vec::with_capacity(messages.len());
    for message in messages {
        confirms.push(send(channel, message).await);
    }
    let mut returned = HashSet::new();
    let mut returned_text = String::new();
    let mut answer = Answer::with_capacity(messages.len());
    for sent in confirms {
        let confirmation = match sent {
            Ok(confirm) => confirm.await,
            Err(error) => Err(error),
        };
        answer.push(match confirmation {
            Ok(confirmation) => {
                let verdict = if confirmation.is_nack() { Err(NotConfirmed::Nacked) } else { Ok(()) };
                if matches!(confirmation, Confirmation::NotRequested) {
                    unreachable!("the channel is in confirm mode");
                }
                if let Some(message) = confirmation.take_message() {
                    returned_text = format!("{} {}", message.reply_code, message.reply_text);
                    returned.extend(message.delivery.properties.message_id().as_ref().map(ToString::to_string));
                }
                verdict
            }
            Err(error) => Err(NotConfirmed::ChannelClosed(error.to_string())),
        });
    }
    for (message, verdict) in messages.iter().zip(&mut answer) {
        if verdict.is_ok() && returned.contains(&message.message_id) {
            *verdict = Err(NotConfirmed::Unroutable(returned_text.clone()));
        }
    }
    answer
}

async fn send(channel: &Channel, message: &Outgoing) -> lapin::Result<PublisherConfirm> {
    let options = BasicPublishOptions { mandatory: message.mandatory, immediate: false };
    channel
        .basic_publish(
            message.exchange.as_str().into(),
            message.routing_key.as_str().into(),
            options,
            &message.body,
            properties(message),
        )
        .await
}

fn properties(message: &Outgoing) -> BasicProperties {
    let mut properties = BasicProperties::default()
        .with_delivery_mode(PERSISTENT)
        .with_content_type(message.content_type.into())
        .with_type(message.message_type.as_str().into())
        .with_message_id(message.message_id.as_str().into())
        .with_timestamp(message.timestamp_s)
        .with_app_id("order-timeout".into());
    if let Some(ttl) = message.ttl {
        // A decimal string of milliseconds; a negative one would be 406 and close the channel.
        properties = properties.with_expiration(ttl.as_millis().to_string().into());
    }
    if !message.headers.is_empty() {
        let mut table = FieldTable::default();
        for (key, value) in &message.headers {
            table.insert((*key).into(), value.clone());
        }
        properties = properties.with_headers(table);
    }
    properties
}
