//! Carries one fault out, keeps it up, and undoes it.
//!
//! A fault ends when the broken part works again: a server accepts connections, a worker reports that it has started.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use lapin::BasicProperties;
use lapin::options::{QueueDeleteOptions, QueuePurgeOptions};
use order_timeout_amqp::topology::DUE_KEY;
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::away::{is_consumed, meanwhile};
use order_timeout_testkit::payment_service::{Outage, PaymentService};
use order_timeout_testkit::proxy::{Direction, Then};
use order_timeout_testkit::{Order, TestEnv, wait_for};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::environment::Environment;
use crate::history::ARTICLES;
use crate::plan::{Excuses, Fault, Kind};
use crate::shop::article_name;
use crate::workers::WORKERS;

/// The pause between repetitions of a repeated fault.
const REPEAT_INTERVAL: Duration = Duration::from_millis(250);
/// Orders with rows locked at once.
const LOCKED_AT_ONCE: i64 = 5;
/// Unpaid orders that get additional alarms.
const DOUBLED_AT_ONCE: i64 = 300;

/// A fault of the payment provider lasts until a request has met it, but no longer than this.
const MET_WITHIN: Duration = Duration::from_secs(10);

/// A fault that is over.
#[derive(Debug, Clone)]
pub struct CompletedFault {
    pub kind: Kind,
    pub from: Timestamp,
    pub until: Timestamp,
    /// The orders that it may have delayed.
    pub affected: Affected,
    /// How many targets were hit, for a fault that needs one; `None` for a fault that always hits.
    pub hits: Option<usize>,
    /// Orders for which additional alarms were sent.
    pub forged: Vec<Uuid>,
}

/// The effect of a fault.
#[derive(Default)]
struct FaultEffect {
    affected: Affected,
    hits: Option<usize>,
    forged: Vec<Uuid>,
}

impl FaultEffect {
    fn hits(hits: usize) -> Self {
        Self { hits: Some(hits), ..Self::default() }
    }
}

/// The orders that a fault may have delayed.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub enum Affected {
    #[default]
    None,
    All,
    Orders(Vec<Uuid>),
    Article(String),
    /// Those with an attempt at the payment provider.
    AtProvider,
}

impl fmt::Display for CompletedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {:.1} s", self.kind.name(), self.until.since(self.from).as_secs_f64())
    }
}

pub async fn carry_out(environment: Arc<Environment>, fault: Fault) -> CompletedFault {
    environment.wait(fault.after).await;
    let from = Timestamp::now_by_local_clock();
    let effect = FaultRun { environment: &environment, fault }.run().await;
    let until = Timestamp::now_by_local_clock();
    let affected = match fault.kind.excuses() {
        Excuses::None => Affected::None,
        Excuses::All => Affected::All,
        Excuses::AtProvider => Affected::AtProvider,
        Excuses::Locked => effect.affected,
    };
    CompletedFault { kind: fault.kind, from, until, affected, hits: effect.hits, forged: effect.forged }
}

struct FaultRun<'a> {
    environment: &'a Environment,
    fault: Fault,
}

impl FaultRun<'_> {
    /// Carries the fault out, from its start to its end.
    async fn run(&self) -> FaultEffect {
        let (broker, database) = (&self.environment.broker, &self.environment.database);
        let (to_broker, to_database) = (&self.environment.to_broker, &self.environment.to_database);
        match self.fault.kind {
            Kind::BrokerKilled => self.around(|| broker.kill(), || broker.restart()).await,
            Kind::BrokerStopped => self.around(|| broker.stop(), || broker.restart()).await,
            Kind::BrokerHalted => self.around(|| broker.halt(), || broker.go_on()).await,
            Kind::BrokerOutOfMemory => {
                let watermark = |share| broker.ctl(&["set_vm_memory_high_watermark", share]);
                self.around(|| _ = watermark("0.00001"), || _ = watermark("0.6")).await;
            }
            Kind::BrokerClosesConnections => {
                self.around(|| _ = broker.ctl(&["close_all_connections", "for the test"]), || ()).await;
            }
            Kind::BrokerCutOff => self.around(|| to_broker.cut(), || to_broker.restore()).await,
            Kind::BrokerDeaf => {
                self.around(|| to_broker.stall_one_way(Direction::ToServer), || to_broker.restore()).await;
            }
            Kind::BrokerMute => {
                self.around(|| to_broker.stall_one_way(Direction::ToClient), || to_broker.restore()).await;
            }
            Kind::BrokerFarAway => {
                let by = Duration::from_millis(50 + self.fault.choice as u64 % 100);
                let both =
                    || [Direction::ToServer, Direction::ToClient].map(|direction| to_broker.delay(direction, by));
                self.around(|| _ = both(), || to_broker.restore()).await;
            }
            Kind::BrokerHalfClosed => self.around(|| to_broker.half_close(), || to_broker.restore()).await,
            Kind::DatabaseKilled => self.around(|| database.kill(), || database.restart()).await,
            Kind::DatabaseRestarted => meanwhile(|| database.restart()),
            Kind::DatabaseHalted => self.around(|| database.halt(), || database.go_on()).await,
            Kind::DatabaseReadOnly => self.read_only().await,
            Kind::DatabaseEndsSessions => return self.end_sessions().await,
            Kind::DatabaseCutOff => self.around(|| to_database.cut(), || to_database.restore()).await,
            Kind::DatabaseStalled => self.around(|| to_database.stall(), || to_database.restore()).await,
            Kind::DatabaseAnswersLost => return self.lose_answers().await,
            Kind::DatabaseFarAway => {
                let by = Duration::from_millis(5 + self.fault.choice as u64 % 15);
                let both =
                    || [Direction::ToServer, Direction::ToClient].map(|direction| to_database.delay(direction, by));
                self.around(|| _ = both(), || to_database.restore()).await;
            }
            Kind::OrdersLocked => return self.lock_orders().await,
            Kind::StockLocked => return self.lock_stock().await,
            Kind::WorkerKilled => {
                let (workers, slot) = (&self.environment.workers, self.slot());
                self.around(|| workers.kill(slot), || workers.start(slot)).await;
                workers.started(slot).await;
            }
            Kind::WorkerHalted => {
                let (workers, slot) = (&self.environment.workers, self.slot());
                self.around(|| workers.halt(slot), || workers.go_on(slot)).await;
            }
            Kind::WorkerReplaced => self.environment.workers.replace(self.slot()).await,
            Kind::EveryWorkerKilled => self.kill_every_worker().await,
            Kind::QueuePurged => return self.purge().await,
            Kind::QueueDeleted => self.delete_consumed_queue().await,
            Kind::DelayQueueDeleted => self.delete_delay_queue().await,
            Kind::AlarmsDoubled => return self.double_alarms().await,
            Kind::GarbageSent => return self.send_garbage().await,
            Kind::ProviderStopped => self.stop_provider().await,
            Kind::ProviderHalted => return self.break_provider(Outage::Hanging).await,
            Kind::ProviderFailing => return self.break_provider(Outage::Failing).await,
            Kind::ProviderHtml => return self.break_provider(Outage::Html).await,
            Kind::ProviderFarAway => {
                let (provider, by) = (self.provider(), Duration::from_millis(20 + self.fault.choice as u64 % 130));
                self.around(|| provider.set_pause(by), || provider.set_pause(Duration::ZERO)).await;
            }
            Kind::ProviderAnswersLost => return self.break_provider(Outage::LosingAnswers).await,
        }
        // These faults always hit.
        FaultEffect::default()
    }

    async fn around(&self, begin: impl FnOnce(), end: impl FnOnce()) {
        meanwhile(begin);
        self.environment.wait(self.fault.hold).await;
        meanwhile(end);
    }

    /// Waits, and then returns whether a repeated fault continues.
    async fn waits_for_next_round(&self, began: Timestamp) -> bool {
        self.environment.wait(REPEAT_INTERVAL).await;
        Timestamp::now_by_local_clock() < began + self.fault.hold && !self.environment.interrupted.is_cancelled()
    }

    fn slot(&self) -> usize {
        self.fault.choice % WORKERS
    }

    fn env(&self) -> &TestEnv {
        &self.environment.env
    }

    fn provider(&self) -> &PaymentService {
        self.environment.provider.as_deref().expect("a plan with faults of a provider is for runs that have one")
    }

    async fn stop_provider(&self) {
        let provider = self.provider();
        self.around(|| provider.set_outage(Some(Outage::Refusing)), || provider.set_outage(None)).await;
        wait_for("the payment provider", async || provider.is_listening()).await;
    }

    async fn break_provider(&self, outage: Outage) -> FaultEffect {
        let (provider, began) = (self.provider(), Timestamp::now_by_local_clock());
        let before = provider.failed_requests();
        let failed = || provider.failed_requests() - before;
        provider.set_outage(Some(outage));
        self.environment.wait(self.fault.hold).await;
        while failed() == 0
            && Timestamp::now_by_local_clock() < began + MET_WITHIN
            && !self.environment.interrupted.is_cancelled()
        {
            self.environment.wait(REPEAT_INTERVAL).await;
        }
        provider.set_outage(None);
        FaultEffect::hits(failed())
    }

    async fn read_only(&self) {
        self.configure("ALTER SYSTEM SET default_transaction_read_only = on").await;
        self.environment.wait(self.fault.hold).await;
        self.configure("ALTER SYSTEM RESET default_transaction_read_only").await;
        let shown = "SELECT current_setting('default_transaction_read_only') = 'off'";
        wait_for("a database that takes writes", async || {
            sqlx::query_scalar(shown).fetch_one(&self.env().pool).await.unwrap()
        })
        .await;
    }

    /// Also applies to open connections.
    async fn configure(&self, statement: &'static str) {
        for statement in [statement, "SELECT pg_reload_conf()"] {
            sqlx::query(statement).execute(&self.env().pool).await.unwrap();
        }
    }

    async fn end_sessions(&self) -> FaultEffect {
        let mut ended = 0;
        let began = Timestamp::now_by_local_clock();
        let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'order-timeout'";
        while self.waits_for_next_round(began).await {
            ended += sqlx::query(end).execute(&self.env().pool).await.unwrap().rows_affected();
        }
        FaultEffect::hits(usize::try_from(ended).unwrap())
    }

    async fn lose_answers(&self) -> FaultEffect {
        let mut traps = Vec::new();
        let began = Timestamp::now_by_local_clock();
        let next = "SELECT id::text FROM orders WHERE status = 'unpaid' AND expires_at > clock_timestamp()
                    ORDER BY expires_at LIMIT 1";
        while self.waits_for_next_round(began).await {
            let next: Option<String> = sqlx::query_scalar(next).fetch_optional(&self.env().pool).await.unwrap();
            if let Some(id) = next {
                // It does not matter whether it is closed or paid first.
                traps.push(self.environment.to_database.cut_at(&id, Then::CutAtAnswer));
            }
        }
        self.environment.to_database.restore();
        FaultEffect::hits(traps.iter().filter(|was_hit| was_hit()).count())
    }

    async fn lock_orders(&self) -> FaultEffect {
        let mut transaction = self.env().pool.begin().await.unwrap();
        let orders = sqlx::query_scalar(
            "SELECT id FROM orders WHERE status = 'unpaid' AND expires_at > clock_timestamp()
             ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED",
        );
        let orders: Vec<Uuid> = orders.bind(LOCKED_AT_ONCE).fetch_all(&mut *transaction).await.unwrap();
        self.environment.wait(self.fault.hold).await;
        transaction.rollback().await.unwrap();
        FaultEffect { hits: Some(orders.len()), affected: Affected::Orders(orders), ..FaultEffect::default() }
    }

    async fn lock_stock(&self) -> FaultEffect {
        let article = article_name(self.fault.choice % ARTICLES);
        let mut transaction = self.env().pool.begin().await.unwrap();
        let lock = sqlx::query("SELECT FROM stock WHERE article_id = $1 FOR UPDATE").bind(&article);
        lock.execute(&mut *transaction).await.unwrap();
        self.environment.wait(self.fault.hold).await;
        transaction.rollback().await.unwrap();
        FaultEffect { affected: Affected::Article(article), ..FaultEffect::default() }
    }

    /// Over when the first of them works again.
    async fn kill_every_worker(&self) {
        let workers = &self.environment.workers;
        let all = |what: &dyn Fn(usize)| (0..WORKERS).for_each(what);
        self.around(|| all(&|slot| workers.kill(slot)), || all(&|slot| workers.start(slot))).await;
        wait_for("a worker", async || (0..WORKERS).any(|slot| workers.has_started(slot))).await;
    }

    async fn purge(&self) -> FaultEffect {
        let (mut env, names) = (self.environment.with_broker_channel().await, self.env().names());
        let mut discarded = 0;
        for queue in self.delay_queues(&env).await.into_iter().chain([names.timeout(), names.schedule()]) {
            let options = QueuePurgeOptions::default();
            match env.channel().queue_purge(queue.as_str().into(), options).await {
                Ok(purged) => discarded += purged,
                // RabbitMQ 3.10 does so for a queue without a leader, which a broker that was killed while it was declared
                // may leave. Its messages stay.
                Err(_) => env = self.environment.with_broker_channel().await,
            }
        }
        FaultEffect::hits(usize::try_from(discarded).unwrap())
    }

    /// Lanes, and the slots that exist.
    async fn delay_queues(&self, env: &TestEnv) -> Vec<String> {
        let names = env.names();
        let consumed = [names.timeout(), names.schedule(), names.parked()];
        let mut queues = Vec::new();
        for queue in env.settings.queue_names().into_iter().filter(|name| !consumed.contains(name)) {
            if env.depth_if_any(&queue).await.is_some() {
                queues.push(queue);
            }
        }
        queues
    }

    /// The worker re-declares it and continues to consume.
    async fn delete_consumed_queue(&self) {
        let names = self.env().names();
        let queue = [names.timeout(), names.schedule()][self.fault.choice % 2].clone();
        let env = self.environment.with_broker_channel().await;
        env.channel().queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        wait_for("the queue, consumed again", async || is_consumed(&env, &queue).await).await;
    }

    async fn delete_delay_queue(&self) {
        let env = self.environment.with_broker_channel().await;
        let mut queues = self.delay_queues(&env).await;
        let queue = queues.swap_remove(self.fault.choice % queues.len());
        env.channel().queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        self.environment.wait(self.fault.hold).await;
        // A slot is declared again by the worker.
        env.settings.topology().declare(env.broker()).await.unwrap();
    }

    async fn double_alarms(&self) -> FaultEffect {
        let unpaid: Vec<(Uuid, OffsetDateTime)> =
            sqlx::query_as("SELECT id, expires_at FROM orders WHERE status = 'unpaid' ORDER BY expires_at LIMIT $1")
                .bind(DOUBLED_AT_ONCE)
                .fetch_all(&self.env().pool)
                .await
                .unwrap();
        let orders: Vec<Order> =
            unpaid.into_iter().map(|(id, at)| Order { id, deadline: Timestamp::from(at) }).collect();
        let env = self.environment.with_broker_channel().await;
        env.deliver(&orders).await;
        env.deliver(&orders).await;
        FaultEffect { forged: orders.iter().map(|order| order.id).collect(), ..FaultEffect::hits(orders.len()) }
    }

    async fn send_garbage(&self) -> FaultEffect {
        let (env, now) = (self.environment.with_broker_channel().await, Timestamp::now_by_local_clock());
        let (due, hour) = (env.names().due(), Duration::from_secs(3600));
        let bodies: [&[u8]; 4] = [
            b"",
            b"no alarm",
            br#"{"order_id":"not-a-uuid","deadline":"2020-01-01T00:00:00Z"}"#,
            br#"{"order_id":7,"deadline":{}}"#,
        ];
        for body in bodies {
            env.publish_raw(&due, DUE_KEY, body, BasicProperties::default()).await;
        }
        let some: Vec<Uuid> =
            sqlx::query_scalar("SELECT id FROM orders ORDER BY random() LIMIT 50").fetch_all(&env.pool).await.unwrap();
        // For unpaid and finished orders, with a deadline that their rows do not have; and one for no order.
        let wrong = some.iter().map(|id| Order { id: *id, deadline: now - hour });
        let unknown = Order { id: Uuid::now_v7(), deadline: now };
        let wrong: Vec<Order> = wrong.chain([unknown]).collect();
        env.deliver(&wrong).await;
        FaultEffect { forged: some, ..FaultEffect::default() }
    }
}
