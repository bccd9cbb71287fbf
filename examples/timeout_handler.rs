//! Times something out that is in no table: tickets in the memory of this program, each held for five seconds.
//!
//! ```sh
//! cargo run --example timeout_handler
//! ```
//!
//! Reads `ORDER_TIMEOUT__…` as the command does. Run `order-timeout setup` with the kind `ticket` in its settings first:
//! `printf '[kinds.ticket]\n' > ticket.toml; order-timeout setup --config ticket.toml`. A program that keeps its tickets in a
//! database or behind an API does the same there; what must hold is said at `TimeoutHandler`.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use order_timeout::handler::{
    Answers, CloseError, CloseOutcome, ClosedBy, Deadline, Due, Handlers, OrderId, Outcome, Overdue, OverduePage,
    OverdueSource, TimeoutHandler, Timestamp,
};
use order_timeout::{Settings, Worker};
use order_timeout_core::kind::Kind;
use tokio_util::sync::CancellationToken;

/// The tickets that are held, by their ids. One that is sold or free again is removed.
#[derive(Clone, Default)]
struct Tickets(Arc<Mutex<BTreeMap<OrderId, Deadline>>>);

impl Tickets {
    /// The rule of every handler: look at the thing itself under its lock, and decide by what it says.
    fn release(&self, due: &Due) -> CloseOutcome {
        let mut held = self.0.lock().expect("no holder panics");
        let now = Timestamp::now_by_local_clock();
        let Some(deadline) = held.get(&due.order_id).copied() else {
            return CloseOutcome { outcome: Outcome::AlreadyClosed, deadline: None };
        };
        // It was held for longer meanwhile: the alarm waits for the new deadline.
        if deadline > now.max(due.deadline) {
            return CloseOutcome { outcome: Outcome::NotDue, deadline: Some(deadline) };
        }
        held.remove(&due.order_id);
        println!("ticket {} is free again", due.order_id);
        CloseOutcome { outcome: Outcome::Closed, deadline: Some(deadline) }
    }
}

impl TimeoutHandler for Tickets {
    async fn time_out(&self, due: &[Due], _by: ClosedBy) -> Result<Answers, CloseError> {
        Ok(due.iter().map(|due| (due.order_id.clone(), Ok(self.release(due)))).collect::<HashMap<_, _>>())
    }
}

impl OverdueSource for Tickets {
    async fn overdue(&self, page: &OverduePage) -> Result<Vec<Overdue>, String> {
        let held = self.0.lock().expect("no holder panics");
        let mut overdue: Vec<Overdue> = held
            .iter()
            .filter(|(_, deadline)| **deadline <= page.horizon)
            .map(|(order_id, deadline)| Overdue { order_id: order_id.clone(), deadline: *deadline })
            .collect();
        overdue.sort_by(|one, other| (one.deadline, &one.order_id).cmp(&(other.deadline, &other.order_id)));
        let is_behind = |one: &Overdue| match &page.after {
            Some(after) => (one.deadline, one.order_id.as_str()) > (after.deadline, after.id.as_str()),
            None => true,
        };
        overdue.retain(is_behind);
        overdue.truncate(page.limit);
        Ok(overdue)
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(run())
}

async fn run() -> Result<(), Box<dyn std::error::Error>> {
    let mut settings = Settings::load_with_database(None, &[])?;
    let ticket = Kind::new("ticket")?;
    settings.kinds.entry(ticket.clone()).or_default();
    let tickets = Tickets::default();
    let publisher = settings.publisher().connect().await?;
    let worker = Worker::start_with(settings, Handlers::none().with(ticket.clone(), tickets.clone())).await?;
    let stop = CancellationToken::new();
    let running = tokio::spawn(worker.run(stop.clone()));

    for number in 1..=3 {
        let (id, deadline) = (format!("row-7-seat-{number}"), Timestamp::now_by_local_clock() + Duration::from_secs(5));
        tickets.0.lock().expect("no holder panics").insert(OrderId::new(&id)?, deadline);
        publisher.schedule_kind(&ticket, id, deadline).await?;
    }
    println!("three tickets are held for five seconds");
    while !tickets.0.lock().expect("no holder panics").is_empty() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    stop.cancel();
    running.await?;
    Ok(())
}
