//! One publishing channel: publishes a window of messages and waits for all of their confirms.
//!
//! Never retries, and never has two windows in flight, so that a return can be attributed.

use std::collections::HashSet;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use lapin::options::BasicPublishOptions;
use lapin::{Channel, Confirmation, Connection, PublisherConfirm};
use tokio::sync::Mutex;

use super::error::closed;
use super::job_queue::{Job, JobQueue};
use super::outgoing::{properties, short};
use super::shared_connection::SharedConnection;
use super::{Outgoing, PublishError, PublishResults};
use crate::connect::{self, BrokerError};

/// One channel that takes jobs from the queue, a window at a time.
pub(super) struct PublishChannel {
    pub(super) shared: Arc<SharedConnection>,
    pub(super) queue: Arc<Mutex<JobQueue>>,
    pub(super) channel: Option<(Arc<Connection>, Channel)>,
}

impl PublishChannel {
    pub(super) async fn run(mut self) {
        while let Some(jobs) = self.next_jobs().await {
            let messages: Vec<&Outgoing> = jobs.iter().flat_map(|job| &job.messages).collect();
            let mut results = self.publish_window(&messages).await.into_iter();
            for job in jobs {
                // A caller that has gone does not need its result.
                let _ = job.results.send(results.by_ref().take(job.messages.len()).collect());
            }
        }
        if let Some((connection, _)) = self.channel.take() {
            connect::close(&connection, Duration::from_secs(1)).await;
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
        let mut results = send_and_await(&channel, messages, timeout).await;
        // Then the last confirm came just now; in an incomplete window it may be as old as the timeout.
        if results.iter().all(Result::is_ok) {
            self.shared.note_confirm();
        }
        if connection.status().blocked() {
            // On a blocked connection lapin writes nothing, so a window that began before the notice ends here.
            results
                .iter_mut()
                .filter(|result| is_unanswered(result))
                .for_each(|late| *late = Err(PublishError::Blocked));
        } else if !connection.status().connected() {
            results.iter_mut().for_each(attribute_to_connection);
        } else {
            attribute_to_queues(&mut results, self.shared.last_confirm().is_some_and(|ago| ago < timeout / 2));
        }
        let misses_a_route = |result: &Result<_, _>, message: &Outgoing| match result {
            Err(PublishError::Unroutable(_)) => !message.sender_declares_queue,
            Err(PublishError::NoExchange(_)) => true,
            _ => false,
        };
        let missed = results.iter().zip(messages).find(|(result, message)| misses_a_route(result, message));
        if let Some((_, Outgoing { exchange, routing_key, .. })) = missed {
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

fn is_unanswered(result: &Result<(), PublishError>) -> bool {
    matches!(result, Err(PublishError::TimedOut(_)))
}

/// A broker that confirms what was sent later, on this channel or another one, does answer: then a message without a
/// confirm has a queue that accepts nothing. `others_confirmed`: another channel had a confirm while this one waited.
fn attribute_to_queues(results: &mut PublishResults, others_confirmed: bool) {
    let last_answered = results.iter().rposition(|result| !is_unanswered(result)).unwrap_or(0);
    for (number, result) in results.iter_mut().enumerate() {
        if let Err(PublishError::TimedOut(waited)) = result
            && (number < last_answered || others_confirmed)
        {
            *result = Err(PublishError::Unconfirmed(*waited));
        }
    }
}

fn leaves_channel_usable(result: &Result<(), PublishError>) -> bool {
    use PublishError::{Nacked, Unroutable, Unsendable};
    matches!(result, Ok(()) | Err(Nacked | Unroutable(_) | Unsendable { .. }))
}

/// Publishes a window and waits for all of its confirms, after which no return can be misattributed. A message that is
/// not confirmed within `timeout` does not take the others' results with it.
async fn send_and_await(channel: &Channel, messages: &[&Outgoing], timeout: Duration) -> PublishResults {
    let mut timed_out = pin!(tokio::time::sleep(timeout));
    // At once, in their order: lapin's publish returns when its I/O thread has written the frame, and awaiting each
    // before the next would wake that thread for every message.
    let sending = join_all(messages.iter().map(|message| send(channel, message)));
    let Either::Left((confirms, _)) = select(pin!(sending), &mut timed_out).await else {
        return vec![Err(PublishError::TimedOut(timeout)); messages.len()];
    };
    let mut returned = HashSet::new();
    let mut returned_text = String::new();
    let mut results = PublishResults::with_capacity(messages.len());
    for sent in confirms {
        let confirmation = match sent {
            // The confirm is polled first: when the time is over, those that have arrived still count.
            Ok(confirm) => match select(pin!(confirm), &mut timed_out).await {
                Either::Left((confirmation, _)) => confirmation.map_err(|error| closed(&error)),
                Either::Right(_) => Err(PublishError::TimedOut(timeout)),
            },
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
