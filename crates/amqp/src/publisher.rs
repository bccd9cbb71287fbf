//! Publishes with confirms: a message counts as safe when the broker has confirmed it *and* every message of its window
//! is confirmed without this one having been returned.
//!
//! The second condition is needed because lapin may attach a returned message to the confirm of another message when
//! publishes are pipelined. Returns are therefore matched by message id, after the window is complete. Two channels
//! take jobs from the queue in turn, so that one publishes while the other waits.
//!
//! Knows messages and exchanges, not alarms. Never retries: the caller decides.

mod channel;
mod error;
mod job_queue;
mod missing_route;
mod outgoing;
mod shared_connection;

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;
use lapin::Connection;
use tokio::sync::{Mutex, mpsc, oneshot};

use crate::AmqpSettings;
use crate::connect::BrokerError;
use channel::PublishChannel;
pub use error::PublishError;
use job_queue::{Job, JobQueue};
pub use missing_route::MissingRoute;
pub use outgoing::{Outgoing, properties};
use shared_connection::SharedConnection;

/// The most outstanding confirms per channel. lapin walks over all of them for each reply, so more is slower.
pub const WINDOW: usize = 1_000;
/// Channels that take turns.
const CHANNELS: usize = 2;
/// Windows of one `publish_all` that are in flight at once: the next ones are queued while the channels publish the
/// first. Not more, because each has a timeout from the time it is submitted.
const WINDOWS_AT_ONCE: usize = 2 * CHANNELS;
/// Jobs that may be queued before `publish` itself waits.
const QUEUED_JOBS: usize = 1_024;

type PublishResults = Vec<Result<(), PublishError>>;

/// A handle to a publishing connection. Cheap to clone; the connection ends with the last handle.
#[derive(Debug, Clone)]
pub struct ConfirmedPublisher {
    jobs: mpsc::Sender<Job>,
    /// How long a job may take from the time it is submitted, including the time in the queue.
    timeout: Duration,
    shared: Arc<SharedConnection>,
}

impl ConfirmedPublisher {
    /// Connects, so that wrong credentials are reported now and not at the first message. `name` becomes a part of the
    /// connection's name, as in [`connect`](crate::connect::connect).
    ///
    /// # Errors
    /// [`BrokerError`] if there is no connection.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub async fn connect(settings: &AmqpSettings, name: &'static str) -> Result<Self, BrokerError> {
        let shared = SharedConnection::new(settings, name);
        shared.connection().await?;
        Ok(Self::over(shared))
    }

    /// Connects when the first message is published: for a worker that must run while the broker is unavailable.
    ///
    /// # Panics
    /// Outside a tokio runtime, in which it starts its tasks.
    #[must_use]
    pub fn connect_lazily(settings: &AmqpSettings, name: &'static str) -> Self {
        Self::over(SharedConnection::new(settings, name))
    }

    fn over(shared: SharedConnection) -> Self {
        let (jobs, receiver) = mpsc::channel(QUEUED_JOBS);
        let timeout = shared.settings.connect_timeout + shared.settings.confirm_timeout;
        let (shared, queue) = (Arc::new(shared), Arc::new(Mutex::new(JobQueue { receiver, next: None })));
        for _ in 0..CHANNELS {
            tokio::spawn(PublishChannel { shared: shared.clone(), queue: queue.clone(), channel: None }.run());
        }
        Self { jobs, timeout, shared }
    }

    /// Signalled when a message is unroutable. All clones of this handle share it.
    #[must_use]
    pub fn missing_route(&self) -> Arc<MissingRoute> {
        self.shared.missing_route.clone()
    }

    /// The connection of the messages, opened if there is none, for declaring what they need.
    ///
    /// # Errors
    /// [`PublishError::NotConnected`] if there is none, [`PublishError::Blocked`] while the broker reads nothing from it.
    pub async fn connection(&self) -> Result<Arc<Connection>, PublishError> {
        self.shared.usable_connection().await
    }

    /// Publishes one message. Returns within `connect_timeout` + `confirm_timeout`.
    ///
    /// # Errors
    /// [`PublishError`] if the message is not known to be safe; the broker may have it all the same.
    pub async fn publish(&self, message: Outgoing) -> Result<(), PublishError> {
        self.submit(vec![message]).await.pop().unwrap_or(Err(PublishError::ShutDown))
    }

    /// Publishes many messages, pipelined. Returns one result for each, in their order; a message's error is the same
    /// as in [`Self::publish`]. If a whole window fails because the broker does not answer, which takes as long as in
    /// [`Self::publish`], the rest is not tried.
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

#[cfg(test)]
mod tests {
    use super::outgoing::tests::message;
    use super::*;

    #[tokio::test]
    async fn messages_are_requested_window_by_window() {
        let (jobs, _never_finished) = mpsc::channel(QUEUED_JOBS);
        let timeout = Duration::from_millis(10);
        let settings = AmqpSettings {
            url: "amqp://guest:guest@localhost".into(),
            url_file: String::new(),
            ca_file: String::new(),
            client_cert_file: String::new(),
            client_key_file: String::new(),
            heartbeat: timeout,
            connect_timeout: timeout,
            confirm_timeout: timeout,
        };
        let shared = Arc::new(SharedConnection::new(&settings, "test"));
        let publisher = ConfirmedPublisher { jobs, timeout, shared };
        let (all, mut asked_for) = (10 * WINDOWS_AT_ONCE * WINDOW, 0);
        let messages = (0..all).map(|_| {
            asked_for += 1;
            message()
        });
        let results = publisher.publish_all(messages).await;
        assert_eq!(results, vec![Err(PublishError::TimedOut(timeout)); all]);
        assert!(asked_for <= WINDOWS_AT_ONCE * WINDOW + 1, "{asked_for}");
    }
}
