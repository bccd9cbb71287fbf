//! Checks whether the objects of a deployment exist, without declaring any.
//!
//! Changes nothing on the broker, but for a probe that expires at once. Arguments are compared by declaring what exists,
//! and bindings cannot be read over AMQP 0-9-1.

use std::time::Duration;

use futures_util::future::join_all;
use lapin::options::{
    BasicGetOptions, BasicNackOptions, BasicPublishOptions, ConfirmSelectOptions, ExchangeDeclareOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Channel, Connection, ExchangeKind};
use uuid::Uuid;

use super::{Names, Object, Queue, Slots, Topology, TopologyError, declare_queue, explain, open_channel};
use crate::connect::{reply, reply_code};

/// AMQP property `type` of a message that tests the broker. Workers acknowledge it and do nothing else.
pub const PROBE_TYPE: &str = "order.timeout.probe.v1";
/// How often a look at one queue is repeated because it met the end of another channel.
const MOST_TRIES: u32 = 10;
/// The timeout of a check.
const LOOK_TIMEOUT: Duration = Duration::from_secs(10);

/// What the broker reports about one queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeenQueue {
    /// As in [`Names`], with the namespace.
    pub name: String,
    /// Messages that are not delivered yet; AMQP `queue.declare-ok`, `message-count`.
    pub ready: u32,
    /// Of every client, not only of this worker; AMQP `queue.declare-ok`, `consumer-count`.
    pub consumers: u32,
}

/// The first message of a delay queue, as far as it decides when it leaves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// Whether it has a time of its own; otherwise it stays for as long as the queue keeps any message.
    pub has_expiration: bool,
    /// AMQP property `app-id`, or `""`.
    pub app_id: String,
}

/// Takes the first message of a queue and gives it back, within 10 seconds; `None` if the queue is empty.
///
/// # Errors
/// [`TopologyError::Failed`] if the broker does not answer, or the user may not read the queue.
pub async fn peek(connection: &Connection, queue: &str) -> Result<Option<Head>, TopologyError> {
    look(connection, |channel: Channel| async move {
        let failed = |error: lapin::Error| TopologyError::Failed {
            object: format!("the first message of {queue:?}"),
            why: error.to_string(),
        };
        let Some(message) = channel.basic_get(queue.into(), BasicGetOptions::default()).await.map_err(failed)? else {
            return Ok(None);
        };
        let properties = &message.delivery.properties;
        let app_id = properties.app_id().as_ref().map_or_else(String::new, ToString::to_string);
        let head = Head { has_expiration: properties.expiration().is_some(), app_id };
        // Not reject, which RabbitMQ 4.3 counts toward the delivery limit.
        message.delivery.acker.nack(BasicNackOptions { multiple: false, requeue: true }).await.map_err(failed)?;
        Ok(Some(head))
    })
    .await
}

/// How the objects on the broker differ from those of a deployment.
#[derive(Debug, Default)]
pub struct Comparison {
    /// One for each object that is missing, has other arguments, or may not be declared.
    pub faults: Vec<TopologyError>,
    /// The queues that exist, whatever their arguments.
    pub queues: Vec<SeenQueue>,
}

impl Topology {
    /// Compares every exchange and every queue with its arguments, within 10 seconds. Declares none that is missing.
    ///
    /// # Errors
    /// [`TopologyError::Failed`] if the broker does not answer.
    pub async fn compare(&self, connection: &Connection) -> Result<Comparison, TopologyError> {
        within_time(async {
            let mut comparison = Comparison::default();
            for exchange in &self.exchanges {
                let compare = |channel: Channel| async move {
                    let there = look_at_exchange(&channel, &exchange.name).await;
                    there.map_err(|error| self.explain(Object::Exchange(&exchange.name), &error))?;
                    self.declare_exchange(&channel, exchange).await
                };
                comparison.faults.extend(on_own_channel(connection, &exchange.name, compare).await?.err());
            }
            for queue in &self.queues {
                comparison.compare(connection, &self.names, queue).await?;
            }
            Ok(comparison)
        })
        .await
    }

    /// Checks that every exchange and every queue exists, and has our arguments if no worker consumes it, within 10 seconds.
    ///
    /// # Errors
    /// [`TopologyError`] names the first that is missing, differs or may not be compared; [`TopologyError::Failed`] if the
    /// broker does not answer.
    pub async fn inspect(&self, connection: &Connection) -> Result<(), TopologyError> {
        within_time(async {
            self.require_all(connection).await?;
            self.require_arguments(connection).await
        })
        .await
    }

    async fn require_all(&self, connection: &Connection) -> Result<(), TopologyError> {
        let channel = open_channel(connection).await?;
        // All at once; the first that is missing closes the channel, and the rest get no reply.
        let exchanges = join_all(self.exchanges.iter().map(|exchange| look_at_exchange(&channel, &exchange.name)));
        for (exchange, there) in self.exchanges.iter().zip(exchanges.await) {
            there.map_err(|error| self.explain(Object::Exchange(&exchange.name), &error))?;
        }
        let queues = join_all(self.queues.iter().map(|queue| look_at_queue(&channel, &queue.name)));
        for (queue, there) in self.queues.iter().zip(queues.await) {
            there.map_err(|error| self.explain(Object::Queue(&queue.name), &error))?;
        }
        let _closed_or_gone = channel.close(reply_code::CONTENT_OK, "seen".into()).await;
        Ok(())
    }

    /// Of objects that exist: declaring one of them compares it.
    async fn require_arguments(&self, connection: &Connection) -> Result<(), TopologyError> {
        let channel = open_channel(connection).await?;
        // Asking for the type of a plugin that was disabled ends the connection up to RabbitMQ 3.13.
        let exchanges = self.exchanges.iter().filter(|exchange| exchange.arguments.is_empty());
        for compared in join_all(exchanges.map(|exchange| self.declare_exchange(&channel, exchange))).await {
            compared?;
        }
        let queues = || self.queues.iter().filter(|queue| !self.consumed.contains(&queue.name));
        let compared = join_all(queues().map(|queue| declare_queue(&channel, queue, false))).await;
        for (queue, compared) in queues().zip(compared) {
            compared.map_err(|error| self.explain(Object::Queue(&queue.name), &error))?;
        }
        let _closed_or_gone = channel.close(reply_code::CONTENT_OK, "seen".into()).await;
        Ok(())
    }

    /// Counts the messages and consumers of the processing queues, within 10 seconds. Checks nothing else.
    ///
    /// # Errors
    /// [`TopologyError::Missing`] names the first that does not exist; [`TopologyError::Failed`] if the broker does not
    /// answer.
    pub async fn count_processing(&self, connection: &Connection) -> Result<Vec<SeenQueue>, TopologyError> {
        look(connection, |channel: Channel| async move {
            let looks = join_all(self.processing.iter().map(|name| look_at_queue(&channel, name)));
            let mut queues = Vec::new();
            for (name, there) in self.processing.iter().zip(looks.await) {
                queues.push(there.map_err(|error| self.explain(Object::Queue(name), &error))?);
            }
            Ok(queues)
        })
        .await
    }

    /// The first exchange that accepts a message whose key is bound to no queue. Only an alternate exchange makes that
    /// happen: if a queue is missing, alarms go elsewhere and the publisher is told that they are scheduled.
    ///
    /// # Errors
    /// [`TopologyError::Refused`] if the user may not publish to one of them; [`TopologyError::Failed`] if the broker does
    /// not answer within 10 seconds.
    pub async fn exchange_with_alternate(&self, connection: &Connection) -> Result<Option<String>, TopologyError> {
        look(connection, |channel: Channel| async move {
            let failed =
                |error: lapin::Error| TopologyError::Failed { object: "a probe".into(), why: error.to_string() };
            channel.confirm_select(ConfirmSelectOptions::default()).await.map_err(failed)?;
            for exchange in self.exchanges.iter().filter(|exchange| exchange.kind == "direct") {
                let returned = returns_the_unroutable(&channel, &exchange.name).await;
                if !returned.map_err(|error| self.explain(Object::Exchange(&exchange.name), &error))? {
                    return Ok(Some(exchange.name.clone()));
                }
            }
            Ok(None)
        })
        .await
    }

    /// Whether one more queue can be declared: declares one that is gone with its channel's connection, and deletes it.
    ///
    /// # Errors
    /// [`TopologyError`] says why not.
    pub async fn require_room(&self, connection: &Connection) -> Result<(), TopologyError> {
        look(connection, |channel: Channel| async move {
            let name = format!("{}.room.{}", self.names.namespace(), Uuid::now_v7());
            let options = QueueDeclareOptions { exclusive: true, auto_delete: true, ..Default::default() };
            let declared = channel.queue_declare(name.as_str().into(), options, FieldTable::default()).await;
            declared.map_err(|error| self.explain(Object::Queue("a slot of the wheel"), &error))?;
            let _gone = channel.queue_delete(name.as_str().into(), QueueDeleteOptions::default()).await;
            Ok(())
        })
        .await
    }

    /// Refuses a namespace without any object: most likely its name is mistyped.
    ///
    /// # Errors
    /// [`TopologyError::NeverSetUp`] if there is none; [`TopologyError::Failed`] if the broker does not answer within
    /// 10 seconds.
    pub async fn require_some(&self, connection: &Connection) -> Result<(), TopologyError> {
        within_time(async {
            // The processing side only, which every deployment has.
            for name in self.processing.iter().chain([&self.names.schedule(), &self.names.parked()]) {
                let channel = open_channel(connection).await?;
                let there = look_at_queue(&channel, name).await;
                if !there.is_err_and(|error| is_missing(&error)) {
                    return Ok(());
                }
            }
            for exchange in &self.exchanges {
                let channel = open_channel(connection).await?;
                if !look_at_exchange(&channel, &exchange.name).await.is_err_and(|error| is_missing(&error)) {
                    return Ok(());
                }
            }
            Err(TopologyError::NeverSetUp { namespace: self.names.namespace().to_owned() })
        })
        .await
    }
}

impl Comparison {
    async fn compare(&mut self, connection: &Connection, names: &Names, queue: &Queue) -> Result<(), TopologyError> {
        let explain = |error: lapin::Error| explain(names, Object::Queue(&queue.name), &error);
        let look = |channel: Channel| async move { look_at_queue(&channel, &queue.name).await.map_err(explain) };
        match on_own_channel(connection, &queue.name, look).await? {
            Ok(seen) => self.queues.push(seen),
            Err(missing) => {
                self.faults.push(missing);
                return Ok(());
            }
        }
        let declare = |channel: Channel| async move { declare_queue(&channel, queue, false).await.map_err(explain) };
        self.faults.extend(on_own_channel(connection, &queue.name, declare).await?.err());
        Ok(())
    }
}

impl Slots {
    /// Compares the slots that exist, within 10 seconds; a slot that is missing is not needed yet. Uses up a channel of the
    /// connection for each missing one.
    ///
    /// # Errors
    /// [`TopologyError::Failed`] if the broker does not answer.
    pub async fn compare(&self, connection: &Connection) -> Result<Comparison, TopologyError> {
        within_time(async {
            let mut comparison = Comparison::default();
            for slot in self.all() {
                comparison.compare(connection, self.names(), &slot.queue).await?;
            }
            comparison.faults.retain(|fault| !matches!(fault, TopologyError::Missing { .. }));
            Ok(comparison)
        })
        .await
    }
}

/// Sends a request about the object of this name on a channel of its own, because a refusal closes it.
async fn on_own_channel<T, F: Future<Output = Result<T, TopologyError>>>(
    connection: &Connection,
    name: &str,
    send: impl Fn(Channel) -> F,
) -> Result<Result<T, TopologyError>, TopologyError> {
    let of_this_one = format!("'{name}'");
    let mut tries = 0;
    loop {
        tries += 1;
        let channel = open_channel(connection).await?;
        match send(channel.clone()).await {
            Ok(done) => {
                let _closed_or_gone = channel.close(reply_code::CONTENT_OK, "seen".into()).await;
                return Ok(Ok(done));
            }
            // The end of an earlier channel: the client may report it to the next one, which has the same number.
            Err(fault) if tries < MOST_TRIES && !fault.to_string().contains(&of_this_one) => {}
            Err(fault @ TopologyError::Failed { .. }) => return Err(fault),
            Err(fault) => return Ok(Err(fault)),
        }
    }
}

/// Looks on a new channel, within 10 seconds.
async fn look<T, F: Future<Output = Result<T, TopologyError>>>(
    connection: &Connection,
    looking: impl FnOnce(Channel) -> F,
) -> Result<T, TopologyError> {
    within_time(async {
        let channel = open_channel(connection).await?;
        let seen = looking(channel.clone()).await?;
        let _closed_or_gone = channel.close(reply_code::CONTENT_OK, "seen".into()).await;
        Ok(seen)
    })
    .await
}

async fn within_time<T>(looking: impl Future<Output = Result<T, TopologyError>>) -> Result<T, TopologyError> {
    let looked = tokio::time::timeout(LOOK_TIMEOUT, looking).await;
    looked.unwrap_or_else(|_| {
        let why = format!("the broker did not say within {LOOK_TIMEOUT:?} whether they are there");
        Err(TopologyError::Failed { object: "the queues".into(), why })
    })
}

pub(super) async fn look_at_exchange(channel: &Channel, name: &str) -> lapin::Result<()> {
    let options = ExchangeDeclareOptions { passive: true, ..Default::default() };
    // For a passive declaration the type does not matter.
    channel.exchange_declare(name.into(), ExchangeKind::Direct, options, FieldTable::default()).await
}

async fn look_at_queue(channel: &Channel, name: &str) -> lapin::Result<SeenQueue> {
    let options = QueueDeclareOptions { passive: true, ..Default::default() };
    let seen = channel.queue_declare(name.into(), options, FieldTable::default()).await?;
    Ok(SeenQueue { name: name.to_owned(), ready: seen.message_count(), consumers: seen.consumer_count() })
}

/// Publishes a message that expires where it arrives, if it arrives anywhere.
async fn returns_the_unroutable(channel: &Channel, exchange: &str) -> lapin::Result<bool> {
    let key = format!("bound-to-nothing-{}", Uuid::now_v7());
    let options = BasicPublishOptions { mandatory: true, ..Default::default() };
    let properties = BasicProperties::default()
        .with_expiration("0".into())
        .with_type(PROBE_TYPE.into())
        .with_app_id("order-timeout".into());
    let confirm = channel.basic_publish(exchange.into(), key.into(), options, b"{}", properties).await?;
    Ok(confirm.await?.take_message().is_some())
}

fn is_missing(error: &lapin::Error) -> bool {
    reply(error).is_some_and(|(code, _)| code == reply_code::NOT_FOUND)
}
