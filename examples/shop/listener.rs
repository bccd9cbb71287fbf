//! The rest of the shop: a consumer of `order.closed` that counts events by message id, because an event may arrive
//! twice.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context;
use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{BasicConsumeOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Consumer};
use order_timeout::Settings;
use order_timeout_amqp::connect;
use order_timeout_amqp::connection::JoinedConnection;
use order_timeout_core::message::OrderClosed;
use tokio_util::task::AbortOnDropHandle;

use crate::progress::Progress;

const ORDER_CLOSED: &str = "order.closed";
const TIMEOUT: Duration = Duration::from_secs(2);

/// A running consumer.
#[derive(Debug)]
pub struct Listener {
    received: Arc<Mutex<ReceivedEvents>>,
    connection: JoinedConnection,
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

impl Listener {
    /// Binds its own queue and consumes it from now on. Events of other orders than `orders` are not counted.
    pub async fn start(
        settings: &Settings,
        queue: &str,
        orders: impl Iterator<Item = String>,
        progress: Progress,
    ) -> anyhow::Result<Self> {
        let connection = connect::connect(&settings.amqp, "shop events").await?;
        let channel = connection.create_channel().await.context("a channel for the events could not be opened")?;
        let consumer = subscribe(&channel, &settings.names().events(), queue)
            .await
            .with_context(|| format!("the event queue {queue:?} could not be set up"))?;
        let received = Arc::new(Mutex::new(ReceivedEvents::default()));
        let task = tokio::spawn(listen(channel, consumer, orders.collect(), received.clone(), progress));
        Ok(Self { received, connection, task: AbortOnDropHandle::new(task) })
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
        connect::close(&self.connection, TIMEOUT).await;
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
async fn listen(
    _channel: Channel,
    mut consumer: Consumer,
    orders: HashSet<String>,
    received: Arc<Mutex<ReceivedEvents>>,
    progress: Progress,
) {
    while let Some(Ok(delivery)) = consumer.next().await {
        match read(&delivery) {
            Ok((message_id, event)) if orders.contains(event.order_id.as_str()) => {
                let known = locked(&received).events.insert(message_id, event.order_id.into());
                if known.is_none() {
                    progress.closed();
                }
            }
            Ok(_other_order) => {}
            Err(why) => locked(&received).unreadable.push(why.to_string()),
        }
    }
}

fn read(delivery: &Delivery) -> anyhow::Result<(String, OrderClosed)> {
    let message_id = delivery.properties.message_id().as_ref().context("an event has no message id")?;
    let event = serde_json::from_slice(&delivery.data).context("an event is not an OrderClosed")?;
    Ok((message_id.to_string(), event))
}
