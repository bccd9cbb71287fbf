//! Runs a worker inside another program, until Ctrl-C:
//!
//! ```sh
//! cargo run --example embed_worker
//! ```
//!
//! Reads `ORDER_TIMEOUT__…` as the command does. Run `order-timeout setup` first.

use order_timeout::{Settings, Worker};
use tokio_util::sync::CancellationToken;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(run())
}

async fn run() -> Result<(), Box<dyn std::error::Error>> {
    // config/default.toml is embedded; a file of your own would be the first argument.
    let settings = Settings::load_with_database(None, &[])?;
    let worker = Worker::start(settings).await?;
    println!("worker started");

    let stop = CancellationToken::new();
    let stopping = stop.clone();
    tokio::spawn(async move {
        let _ = tokio::signal::ctrl_c().await;
        stopping.cancel();
    });
    let finished_in_time = worker.run(stop).await;
    println!("worker stopped; all work finished: {finished_in_time}");
    Ok(())
}
