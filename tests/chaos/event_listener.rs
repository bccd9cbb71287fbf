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

/// What an event says of its order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Announced {
    Closed,
    /// A payment provider had its money when it was to be closed.
    Settled,
    /// A payment provider's answers did not decide.
    Unresolved,
}

/// One event, by its id.
#[derive(Debug, Clone)]
pub struct ReceivedEvent {
    pub order_id: String,
    pub what: Announced,
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
    let (what, order_id) = read(delivery);
    let mut events = events.lock().unwrap();
    let first = ReceivedEvent { order_id: order_id.clone(), what, times: 0 };
    let received = events.entry(id).or_insert(first);
    assert_eq!((received.what, &received.order_id), (what, &order_id), "one id, one order");
    if !delivery.redelivered || received.times == 0 {
        received.times += 1;
    }
}

/// What it says, and of which order.
fn read(delivery: &Delivery) -> (Announced, String) {
    let sort = delivery.properties.kind().as_ref().expect("an event has a type").as_str();
    let what = match sort {
        "order.closed.v1" => {
            let closed: OrderClosed =
                serde_json::from_slice(&delivery.data).expect("an event says which order was closed");
            return (Announced::Closed, closed.order_id.to_string());
        }
        "order.paid_late_settled.v1" => Announced::Settled,
        "order.unresolved.v1" => Announced::Unresolved,
        _ => panic!("no part of a run announces {sort}: {}", String::from_utf8_lossy(&delivery.data)),
    };
    let event: serde_json::Value = serde_json::from_slice(&delivery.data).expect("an event is JSON");
    (what, event["order_id"].as_str().expect("an event names its order").to_owned())
}
