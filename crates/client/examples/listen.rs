//! Prints each order that was closed, once:
//!
//! ```sh
//! cargo run -p order-timeout-client --example listen
//! ```
//!
//! Reads `AMQP_URL`, and ends after `EVENTS` of them if that is set. An event may be delivered more than once: its
//! message id tells.

use std::collections::HashSet;
use std::error::Error;

use futures_util::StreamExt;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, ConnectionProperties};
use order_timeout_client::OrderClosed;

const QUEUE: &str = "shop.order-closed";

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("AMQP_URL").unwrap_or("amqp://guest:guest@localhost:5672/%2f".into());
    let wanted: Option<usize> = std::env::var("EVENTS").ok().map(|count| count.parse()).transpose()?;
    let connection = Connection::connect(&url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;

    // A queue of this service's own: it keeps the events while the service does not run.
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
    let durable = QueueDeclareOptions { durable: true, ..Default::default() };
    channel.queue_declare(QUEUE.into(), durable, arguments).await?;
    let bind = QueueBindOptions::default();
    channel.queue_bind(QUEUE.into(), "order.events".into(), "order.closed".into(), bind, FieldTable::default()).await?;

    channel.basic_qos(100, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions::default();
    let mut events = channel.basic_consume(QUEUE.into(), "".into(), options, FieldTable::default()).await?;
    println!("listening: {QUEUE}");

    // A real service keeps the ids in its database, in the transaction that handles the event.
    let mut handled = HashSet::new();
    while wanted.is_none_or(|wanted| handled.len() < wanted) {
        let Some(delivery) = events.next().await.transpose()? else { break };
        let id = delivery.properties.message_id().as_ref().map(ToString::to_string);
        if handled.insert(id) {
            let event: OrderClosed = serde_json::from_slice(&delivery.data)?;
            println!("closed: order {} by {:?}", event.order_id, event.closed_by);
        }
        // After the event has been handled, or it would be lost with this process.
        delivery.ack(BasicAckOptions::default()).await?;
    }
    Ok(())
}
