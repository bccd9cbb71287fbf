//! The rest of the shop: a consumer of `order.closed` that counts events by message id, because an event may arrive
//! twice. It consumes a queue, or listens to a channel of Postgres if there is no broker.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{BasicConsumeOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, Consumer};
use order_timeout::Settings;
use order_timeout_amqp::connect;
use order_timeout_core::message::OrderClosed;
use serde_json::Value;
use sqlx::PgPool;
use sqlx::postgres::PgListener;
use tokio_util::task::AbortOnDropHandle;

use crate::environment::EVENT_CHANNEL;
use crate::progress::Progress;

const ORDER_CLOSED: &str = "order.closed";
const TIMEOUT: Duration = Duration::from_secs(2);

/// A running consumer.
#[derive(Debug)]
pub struct Listener {
    received: Arc<Mutex<ReceivedEvents>>,
    /// `None` without a broker.
    connection: Option<Connection>,
    task: AbortOnDropHandle<()>,
}

/// What the consumer has received of this run's orders.
#[derive(Debug, Clone, Default)]
pub struct ReceivedEvents {
    /// Message id → order id.
    pub events: HashMap<String, String>,
    /// Why an event could not be read.
    pub unreadable: Vec<String>,
}

/// Where the events come from.
pub enum EventSource<'a> {
    /// The events exchange, through a queue of this name.
    Queue { settings: &'a Settings, queue: String },
    /// The channel `EVENT_CHANNEL` of this database.
    Channel(&'a PgPool),
}

impl Listener {
    /// Listens from now on. Events of other orders than `orders` are not counted.
    pub async fn start(
        source: EventSource<'_>,
        orders: impl Iterator<Item = String>,
        progress: Progress,
    ) -> anyhow::Result<Self> {
        let orders: HashSet<String> = orders.collect();
        match source {
            EventSource::Queue { settings, queue } => Self::consume(settings, &queue, orders, progress).await,
            EventSource::Channel(pool) => Self::listen_to_channel(pool, orders, progress).await,
        }
    }

    async fn listen_to_channel(pool: &PgPool, orders: HashSet<String>, progress: Progress) -> anyhow::Result<Self> {
        let mut channel = PgListener::connect_with(pool).await.context("the event channel cannot be reached")?;
        channel.listen(EVENT_CHANNEL).await.context("the event channel cannot be listened to")?;
        let received = Arc::new(Mutex::new(ReceivedEvents::default()));
        let counted = Counted { orders, received: received.clone(), progress };
        let task = tokio::spawn(async move {
            while let Ok(notification) = channel.recv().await {
                counted.note(read_notification(notification.payload()));
            }
        });
        Ok(Self { received, connection: None, task: AbortOnDropHandle::new(task) })
    }

    /// Binds its own queue and consumes it.
    async fn consume(
        settings: &Settings,
        queue: &str,
        orders: HashSet<String>,
        progress: Progress,
    ) -> anyhow::Result<Self> {
        let connection = connect::connect(&settings.amqp, "shop events").await?;
        let channel = connection.create_channel().await.context("a channel for the events could not be opened")?;
        let consumer = subscribe(&channel, &settings.names().events(), queue)
            .await
            .with_context(|| format!("the event queue {queue:?} could not be set up"))?;
        let received = Arc::new(Mutex::new(ReceivedEvents::default()));
        let counted = Counted { orders, received: received.clone(), progress };
        let task = tokio::spawn(listen(channel, consumer, counted));
        Ok(Self { received, connection: Some(connection), task: AbortOnDropHandle::new(task) })
    }

    /// How many distinct events of this run have arrived.
    pub fn count(&self) -> usize {
        locked(&self.received).events.len()
    }

    /// Whether no further events will arrive.
    pub fn has_ended(&self) -> bool {
        self.task.is_finished()
    }

    /// Stops consuming. The queue is removed with the connection.
    pub async fn close(self) -> ReceivedEvents {
        self.task.abort();
        if let Some(connection) = &self.connection {
            connect::close(connection, TIMEOUT).await;
        }
        locked(&self.received).clone()
    }
}

fn locked(received: &Mutex<ReceivedEvents>) -> std::sync::MutexGuard<'_, ReceivedEvents> {
    received.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn subscribe(channel: &Channel, exchange: &str, queue: &str) -> lapin::Result<Consumer> {
    // Exclusive: removed with this connection, however the program ends. A real consumer's queue would be durable.
    let options = QueueDeclareOptions { exclusive: true, ..Default::default() };
    channel.queue_declare(queue.into(), options, FieldTable::default()).await?;
    channel
        .queue_bind(
            queue.into(),
            exchange.into(),
            ORDER_CLOSED.into(),
            QueueBindOptions::default(),
            FieldTable::default(),
        )
        .await?;
    // Acknowledged on delivery: if this program dies, the count is not needed any more.
    let options = BasicConsumeOptions { no_ack: true, ..Default::default() };
    channel.basic_consume(queue.into(), "shop".into(), options, FieldTable::default()).await
}

/// `_channel` is held because dropping the last handle closes it.
async fn listen(_channel: Channel, mut consumer: Consumer, counted: Counted) {
    while let Some(Ok(delivery)) = consumer.next().await {
        counted.note(read(&delivery));
    }
}

/// What is counted, and where.
struct Counted {
    orders: HashSet<String>,
    received: Arc<Mutex<ReceivedEvents>>,
    progress: Progress,
}

impl Counted {
    fn note(&self, event: anyhow::Result<(String, OrderClosed)>) {
        match event {
            Ok((message_id, event)) if self.orders.contains(event.order_id.as_str()) => {
                let known = locked(&self.received).events.insert(message_id, event.order_id.into());
                if known.is_none() {
                    self.progress.closed();
                }
            }
            Ok(_other_order) => {}
            Err(why) => locked(&self.received).unreadable.push(why.to_string()),
        }
    }
}

/// A notification is the message as JSON, with its id and its body.
fn read_notification(text: &str) -> anyhow::Result<(String, OrderClosed)> {
    let mut message: Value = serde_json::from_str(text).context("a notification is no JSON")?;
    let event = serde_json::from_value(message["payload"].take()).context("an event is not an OrderClosed")?;
    Ok((message["id"].as_str().context("a notification has no id")?.to_owned(), event))
}

fn read(delivery: &Delivery) -> anyhow::Result<(String, OrderClosed)> {
    let message_id = delivery.properties.message_id().as_ref().context("an event has no message id")?;
    let event = serde_json::from_slice(&delivery.data).context("an event is not an OrderClosed")?;
    Ok((message_id.to_string(), event))
}
