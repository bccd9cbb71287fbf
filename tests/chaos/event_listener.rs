//! A consumer of the shop's events that counts the received ones by id, whatever happens to the broker.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use order_timeout_amqp::AmqpSettings;
use order_timeout_amqp::connect;
use order_timeout_core::message::OrderClosed;
use order_timeout_testkit::TestEnv;
use order_timeout_testkit::away::keep_events;
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

/// Pause before the next attempt to reach the broker.
const PAUSE: Duration = Duration::from_millis(500);
const PREFETCH: u16 = 200;

/// One event, by its id.
#[derive(Debug, Clone)]
pub struct ReceivedEvent {
    pub order_id: String,
    /// How often it was sent; redeliveries because our acknowledgement was lost do not count.
    pub times: usize,
}

type Events = Arc<Mutex<HashMap<Uuid, ReceivedEvent>>>;

pub struct EventListener {
    events: Events,
    _listening: AbortOnDropHandle<()>,
}

impl EventListener {
    /// Receives every event from now on: the queue outlives the broker and our connections.
    pub async fn open(env: &TestEnv) -> Self {
        let queue = keep_events(env).await;
        let events = Events::default();
        let listening = tokio::spawn(listen(env.settings.amqp.clone(), queue, events.clone()));
        Self { events, _listening: AbortOnDropHandle::new(listening) }
    }

    pub fn count(&self) -> usize {
        self.events.lock().unwrap().len()
    }

    pub fn received(&self) -> HashMap<Uuid, ReceivedEvent> {
        self.events.lock().unwrap().clone()
    }
}

async fn listen(settings: AmqpSettings, queue: String, events: Events) {
    loop {
        // Errors are ignored: unacknowledged events are redelivered.
        let _ = listen_once(&settings, &queue, &events).await;
        tokio::time::sleep(PAUSE).await;
    }
}

async fn listen_once(
    settings: &AmqpSettings,
    queue: &str,
    events: &Events,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let connection = connect::connect(settings, "chaos events").await?;
    let channel = connection.create_channel().await?;
    channel.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    let mut deliveries =
        channel.basic_consume(queue.into(), "chaos-listener".into(), options, FieldTable::default()).await?;
    while let Some(delivery) = deliveries.next().await {
        let delivery = delivery?;
        record(&delivery, events);
        delivery.ack(BasicAckOptions::default()).await?;
    }
    Ok(())
}

fn record(delivery: &Delivery, events: &Events) {
    let id = delivery.properties.message_id().as_ref().expect("an event has an id");
    let id = Uuid::parse_str(id.as_str()).expect("an event's id is a uuid");
    let closed: OrderClosed = serde_json::from_slice(&delivery.data).expect("an event says which order was closed");
    let mut events = events.lock().unwrap();
    let received = events.entry(id).or_insert(ReceivedEvent { order_id: closed.order_id.to_string(), times: 0 });
    assert_eq!(received.order_id, closed.order_id.to_string(), "one id, one order");
    if !delivery.redelivered || received.times == 0 {
        received.times += 1;
    }
}
