//! A consumer of the shop's events that counts what it hears, by id, whatever happens to the broker.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt;
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use order_timeout::broker;
use order_timeout::config::AmqpSettings;
use order_timeout::message::OrderClosed;
use tokio_util::task::AbortOnDropHandle;
use uuid::Uuid;

use crate::support::TestEnv;
use crate::support::away::keep_events;

/// Before the next try to reach the broker.
const PAUSE: Duration = Duration::from_millis(500);
const AT_ONCE: u16 = 200;

/// One event, by its id.
#[derive(Debug, Clone)]
pub struct Heard {
    pub order_id: String,
    /// How often it was sent; what the broker delivered again because our acknowledgement was lost does not count.
    pub times: usize,
}

type Events = Arc<Mutex<HashMap<Uuid, Heard>>>;

pub struct Ear {
    events: Events,
    _listening: AbortOnDropHandle<()>,
}

impl Ear {
    /// Hears every event from now on: the queue outlives the broker and our connections.
    pub async fn open(env: &TestEnv) -> Self {
        let queue = keep_events(env).await;
        let events = Events::default();
        let listening = tokio::spawn(listen(env.settings.amqp.clone(), queue, events.clone()));
        Self { events, _listening: AbortOnDropHandle::new(listening) }
    }

    pub fn count(&self) -> usize {
        self.events.lock().unwrap().len()
    }

    pub fn heard(&self) -> HashMap<Uuid, Heard> {
        self.events.lock().unwrap().clone()
    }
}

async fn listen(settings: AmqpSettings, queue: String, events: Events) {
    loop {
        // Whatever went wrong: what was not acknowledged comes again.
        let _ = listen_once(&settings, &queue, &events).await;
        tokio::time::sleep(PAUSE).await;
    }
}

async fn listen_once(
    settings: &AmqpSettings,
    queue: &str,
    events: &Events,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let connection = broker::connect(settings, "chaos events").await?;
    let channel = connection.create_channel().await?;
    channel.basic_qos(AT_ONCE, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    let mut deliveries = channel.basic_consume(queue.into(), "ear".into(), options, FieldTable::default()).await?;
    while let Some(delivery) = deliveries.next().await {
        let delivery = delivery?;
        take_down(&delivery, events);
        delivery.ack(BasicAckOptions::default()).await?;
    }
    Ok(())
}

fn take_down(delivery: &Delivery, events: &Events) {
    let id = delivery.properties.message_id().as_ref().expect("an event has an id");
    let id = Uuid::parse_str(id.as_str()).expect("an event's id is a uuid");
    let closed: OrderClosed = serde_json::from_slice(&delivery.data).expect("an event says which order was closed");
    let mut events = events.lock().unwrap();
    let heard = events.entry(id).or_insert(Heard { order_id: closed.order_id.to_string(), times: 0 });
    assert_eq!(heard.order_id, closed.order_id.to_string(), "one id, one order");
    if !delivery.redelivered || heard.times == 0 {
        heard.times += 1;
    }
}
