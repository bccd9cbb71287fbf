//! Schedules the timeout of one order through RabbitMQ:
//!
//! ```sh
//! cargo run -p order-timeout-client --example schedule -- ORDER_ID MINUTES
//! ```
//!
//! Reads `AMQP_URL`. Run `order-timeout setup` first.

use std::error::Error;
use std::time::{Duration, SystemTime};

use order_timeout_client::Publisher;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let order_id = arguments.next().ok_or("give the order's id")?;
    let minutes: u64 = arguments.next().ok_or("give the minutes until its deadline")?.parse()?;
    let url = std::env::var("AMQP_URL").unwrap_or("amqp://guest:guest@localhost:5672/%2f".into());

    // Once, when the service starts.
    let publisher = Publisher::connect(url).await?;

    // For each order, after it has been committed with this deadline.
    let deadline = SystemTime::now() + Duration::from_secs(60 * minutes);
    publisher.schedule(&order_id, deadline).await?;
    println!("scheduled: order {order_id} in {minutes} minutes");
    Ok(())
}
