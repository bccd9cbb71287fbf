//! Prints each order that was closed, once:
//!
//! ```sh
//! cargo run -p order-timeout-client --example listen
//! ```
//!
//! Reads `AMQP_URL`, and ends after `EVENTS` of them if that is set.

use std::collections::HashSet;
use std::error::Error;
use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Connection, ConnectionProperties};
use order_timeout_client::OrderClosed;

const QUEUE: &str = "shop.order-closed";

/// Your code. An error here makes the broker deliver the event again.
fn handle(event: &OrderClosed) -> Result<(), Box<dyn Error>> {
    println!("closed: order {} by {:?}", event.order_id, event.closed_by);
    Ok(())
}

async fn listen(url: &str, handled: &mut HashSet<String>, wanted: usize) -> Result<(), Box<dyn Error>> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
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
    while let Some(delivery) = events.next().await.transpose()? {
        // Events are delivered at least once, each under one message id.
        let id = delivery.properties.message_id().as_ref().map(ToString::to_string).unwrap_or_default();
        if !handled.contains(&id) {
            handle(&serde_json::from_slice(&delivery.data)?)?;
            handled.insert(id);
        }
        // After the event has been handled, or it would be lost with this process.
        delivery.ack(BasicAckOptions::default()).await?;
        if handled.len() >= wanted {
            // Sends the last acknowledgement.
            channel.close(200, "done".into()).await?;
            return Ok(());
        }
    }
    // The queue was deleted.
    Err("the broker cancelled the consumer".into())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("AMQP_URL").unwrap_or("amqp://guest:guest@localhost:5672/%2f".into());
    let wanted = std::env::var("EVENTS").ok().map_or(Ok(usize::MAX), |count| count.parse())?;
    // A real service keeps the ids in its database, in the transaction that handles the event.
    let mut handled = HashSet::new();
    while handled.len() < wanted {
        if let Err(error) = listen(&url, &mut handled, wanted).await {
            // The broker restarts, the network fails, or the queue is deleted. The broker delivers again what was not
            // acknowledged.
            println!("connecting again in a second: {error}");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
    Ok(())
}
