//! A kind whose orders the embedding program handles itself has the same guarantees: exact closes, retries, parking and the
//! sweep.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use order_timeout::handler::{
    Answers, CloseError, CloseOutcome, ClosedBy, Deadline, Due, Handlers, OrderId, Outcome, Overdue, OverduePage,
    OverdueSource, TimeoutHandler, Timestamp,
};
use order_timeout::{Settings, Worker};
use order_timeout_core::delay::Strategy;
use order_timeout_testkit::{TestEnv, wait_for};
use tokio_util::sync::CancellationToken;

use crate::kinds::kind;

const SECOND: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Paid,
    Closed(ClosedBy),
}

/// Orders in memory: state, deadline, and when each was closed.
#[derive(Clone, Default)]
pub struct Memory {
    orders: Arc<Mutex<BTreeMap<OrderId, (State, Deadline)>>>,
    lateness: Arc<Mutex<Vec<Duration>>>,
    early: Arc<Mutex<Vec<OrderId>>>,
}

impl Memory {
    fn put(&self, id: &str, deadline: Deadline) {
        self.orders.lock().unwrap().insert(OrderId::new(id).unwrap(), (State::Open, deadline));
    }

    fn pay(&self, id: &str) {
        self.orders.lock().unwrap().get_mut(&OrderId::new(id).unwrap()).unwrap().0 = State::Paid;
    }

    fn state(&self, id: &str) -> State {
        self.orders.lock().unwrap()[&OrderId::new(id).unwrap()].0
    }
}

impl TimeoutHandler for Memory {
    async fn time_out(&self, due: &[Due], by: ClosedBy) -> Result<Answers, CloseError> {
        assert!(!due.iter().any(|due| due.order_id.as_str() == "panic"), "as a fault of the handler would");
        let mut orders = self.orders.lock().unwrap();
        let now = Timestamp::now_by_local_clock();
        let time_out = |due: &Due| {
            let Some((state, deadline)) = orders.get_mut(&due.order_id) else {
                return (due.order_id.clone(), Ok(CloseOutcome { outcome: Outcome::Unknown, deadline: None }));
            };
            let outcome = match state {
                State::Closed(_) => Outcome::AlreadyClosed,
                State::Paid => Outcome::Paid,
                // The test's clock and the database's are that of one machine.
                State::Open if *deadline > due.deadline => Outcome::NotDue,
                State::Open => {
                    *state = State::Closed(by);
                    self.lateness.lock().unwrap().push(now.since(*deadline));
                    if now < *deadline {
                        self.early.lock().unwrap().push(due.order_id.clone());
                    }
                    Outcome::Closed
                }
            };
            (due.order_id.clone(), Ok(CloseOutcome { outcome, deadline: Some(*deadline) }))
        };
        Ok(due.iter().map(time_out).collect())
    }
}

impl OverdueSource for Memory {
    async fn overdue(&self, page: &OverduePage) -> Result<Vec<Overdue>, String> {
        let orders = self.orders.lock().unwrap();
        let open = orders.iter().filter(|(_, (state, deadline))| *state == State::Open && *deadline <= page.horizon);
        let mut overdue: Vec<Overdue> =
            open.map(|(id, (_, deadline))| Overdue { order_id: id.clone(), deadline: *deadline }).collect();
        overdue.sort_by(|one, other| (one.deadline, &one.order_id).cmp(&(other.deadline, &other.order_id)));
        let after = page.after.as_ref();
        overdue.retain(|one| {
            after.is_none_or(|after| (one.deadline, one.order_id.as_str()) > (after.deadline, after.id.as_str()))
        });
        overdue.truncate(page.limit);
        Ok(overdue)
    }
}

fn with_ticket(settings: &mut Settings) {
    settings.kinds.entry(kind("ticket")).or_default();
    // Longer than a machine stalls, because the sweep would close what is to be closed by alarm.
    settings.sweep.grace = 10 * SECOND;
    settings.retry.first = SECOND / 5;
}

async fn start(env: &TestEnv, handlers: Handlers) -> (CancellationToken, tokio::task::JoinHandle<bool>) {
    let worker = Worker::start_with(env.settings.clone(), handlers).await.unwrap();
    let stop = CancellationToken::new();
    (stop.clone(), tokio::spawn(worker.run(stop)))
}

#[test]
fn handler_times_orders_out() {
    TestEnv::builder().settings(with_ticket).run(async |env| {
        let (memory, ticket) = (Memory::default(), kind("ticket"));
        let (stop, running) = start(&env, Handlers::none().with(ticket.clone(), memory.clone())).await;
        let publisher = env.publisher().await;
        let now = Timestamp::now_by_local_clock();
        let schedule = async |id: &str, deadline| {
            publisher.schedule_kind(&ticket, id.to_owned(), deadline).await.unwrap();
        };
        for (id, delay) in [("near", 2 * SECOND), ("far", 7 * SECOND), ("paid", 2 * SECOND), ("swept", SECOND)] {
            memory.put(id, now + delay);
        }
        for (id, delay) in [("near", 2 * SECOND), ("far", 7 * SECOND), ("paid", 2 * SECOND)] {
            schedule(id, now + delay).await;
        }
        memory.pay("paid");
        // Its deadline was moved after it was scheduled.
        memory.put("moved", now + 4 * SECOND);
        schedule("moved", now + 2 * SECOND).await;
        // No other order waits for the one at which the handler panics.
        schedule("panic", now + 2 * SECOND).await;
        let are_closed =
            async || ["near", "far", "moved"].map(|id| memory.state(id)) == [State::Closed(ClosedBy::Alarm); 3];
        wait_for("the closes by alarm", are_closed).await;
        wait_for("the close by the sweep", async || memory.state("swept") == State::Closed(ClosedBy::Sweep)).await;
        wait_for("the panicking order parked", async || !env.parked().await.is_empty()).await;
        let parked = env.parked().await;
        assert!(parked.len() == 1 && parked[0].1.contains("handler panicked"), "{parked:?}");
        assert_eq!((memory.state("paid"), memory.early.lock().unwrap().clone()), (State::Paid, Vec::new()));
        println!("{:?}", memory.lateness.lock().unwrap());
        // The default kind is closed by statement beside it.
        let order = env.order(SECOND).await;
        publisher.schedule(order.id.to_string(), order.deadline).await.unwrap();
        wait_for("the order's close", async || env.status(&order).await == "closed").await;
        stop.cancel();
        assert!(running.await.unwrap());
        env.assert_drained().await;
    });
}

#[test]
fn handler_closes_without_broker() {
    let adjust = |settings: &mut Settings| {
        with_ticket(settings);
        settings.delay.strategy = Strategy::Database;
    };
    TestEnv::builder().settings(adjust).run(async |env| {
        let (memory, ticket) = (Memory::default(), kind("ticket"));
        let alarms_only = Handlers::none().with_alarms_only(ticket.clone(), memory.clone());
        let fault = Worker::start_with(env.settings.clone(), alarms_only).await.unwrap_err().to_string();
        assert!(fault.contains("finds no overdue orders"), "{fault}");
        let (stop, running) = start(&env, Handlers::none().with(ticket, memory.clone())).await;
        memory.put("seat", Timestamp::now_by_local_clock() + 3 * SECOND);
        wait_for("the close", async || memory.state("seat") == State::Closed(ClosedBy::LookAhead)).await;
        assert!(memory.early.lock().unwrap().is_empty());
        stop.cancel();
        assert!(running.await.unwrap());
    });
}

#[test]
fn misplaced_handlers_are_refused() {
    let adjust = |settings: &mut Settings| crate::kinds::mapped(settings, "acceptance");
    TestEnv::builder().without_broker().settings(adjust).run(async |env| {
        for (name, why) in [("acceptance", "a table or statements"), ("trial", "is not in the settings")] {
            let handlers = Handlers::none().with(kind(name), Memory::default());
            let fault = Worker::start_with(env.settings.clone(), handlers).await.unwrap_err().to_string();
            assert!(fault.contains(why), "{fault}");
        }
    });
}
