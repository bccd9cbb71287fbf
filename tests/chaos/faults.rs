//! Carries one fault out, lets it last, and undoes it.
//!
//! A fault has ended when what was broken answers again: a server that accepts connections, a worker that says it
//! works.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use lapin::BasicProperties;
use lapin::options::{QueueDeleteOptions, QueuePurgeOptions};
use order_timeout::database;
use order_timeout::order::Timestamp;
use order_timeout::topology::{DUE_KEY, Topology};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::crew::WORKERS;
use crate::fate::ARTICLES;
use crate::plan::{Excuses, Fault, Kind};
use crate::premises::Premises;
use crate::shop::article_name;
use crate::support::away::{is_consumed, meanwhile};
use crate::support::proxy::{Direction, Then};
use crate::support::{Order, TestEnv, wait_for};

/// How often what is done again and again is done.
const AGAIN_AFTER: Duration = Duration::from_millis(250);
/// Orders whose rows are locked at once.
const LOCKED_AT_ONCE: i64 = 5;
/// Alarms sent again, of those that wait.
const DOUBLED_AT_ONCE: i64 = 300;

/// A fault that is over.
#[derive(Debug, Clone)]
pub struct Carried {
    pub kind: Kind,
    pub from: Timestamp,
    pub until: Timestamp,
    /// Whose close it may have held up.
    pub whom: Whom,
    /// How often something was there to be hit, for a fault that needs somebody in its way; `None` for one that hits
    /// whoever is there.
    pub hits: Option<usize>,
    /// For whom alarms were sent that are not their own.
    pub forged: Vec<Uuid>,
}

/// What came of a fault.
#[derive(Default)]
struct Harm {
    whom: Whom,
    hits: Option<usize>,
    forged: Vec<Uuid>,
}

impl Harm {
    fn hits(hits: usize) -> Self {
        Self { hits: Some(hits), ..Self::default() }
    }
}

/// Whose close a fault may have held up.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub enum Whom {
    #[default]
    Nobody,
    Everybody,
    Orders(Vec<Uuid>),
    Article(String),
}

impl fmt::Display for Carried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {:.1} s", self.kind.name(), self.until.since(self.from).as_secs_f64())
    }
}

pub async fn carry_out(premises: Arc<Premises>, fault: Fault) -> Carried {
    premises.wait(fault.after).await;
    let from = Timestamp::now_by_local_clock();
    let harm = Trouble { premises: &premises, fault }.make().await;
    let until = Timestamp::now_by_local_clock();
    let whom = match fault.kind.excuses() {
        Excuses::Nobody => Whom::Nobody,
        Excuses::Everybody => Whom::Everybody,
        Excuses::TheLocked => harm.whom,
    };
    Carried { kind: fault.kind, from, until, whom, hits: harm.hits, forged: harm.forged }
}

struct Trouble<'a> {
    premises: &'a Premises,
    fault: Fault,
}

impl Trouble<'_> {
    /// From the first harm to its end.
    async fn make(&self) -> Harm {
        let (broker, database) = (&self.premises.broker, &self.premises.database);
        let (to_broker, to_database) = (&self.premises.to_broker, &self.premises.to_database);
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
                let both = || [Direction::ToServer, Direction::ToClient].map(|way| to_broker.delay(way, by));
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
                let both = || [Direction::ToServer, Direction::ToClient].map(|way| to_database.delay(way, by));
                self.around(|| _ = both(), || to_database.restore()).await;
            }
            Kind::OrdersLocked => return self.lock_orders().await,
            Kind::StockLocked => return self.lock_stock().await,
            Kind::WorkerKilled => {
                let (crew, seat) = (&self.premises.crew, self.seat());
                self.around(|| crew.kill(seat), || crew.start(seat)).await;
                crew.started(seat).await;
            }
            Kind::WorkerHalted => {
                let (crew, seat) = (&self.premises.crew, self.seat());
                self.around(|| crew.halt(seat), || crew.go_on(seat)).await;
            }
            Kind::WorkerReplaced => self.premises.crew.replace(self.seat()).await,
            Kind::EveryWorkerKilled => self.kill_every_worker().await,
            Kind::QueuePurged => return self.purge().await,
            Kind::QueueDeleted => self.delete_consumed_queue().await,
            Kind::DelayQueueDeleted => self.delete_delay_queue().await,
            Kind::AlarmsDoubled => return self.double_alarms().await,
            Kind::GarbageSent => return self.send_garbage().await,
        }
        // It hits whoever is there.
        Harm::default()
    }

    async fn around(&self, begin: impl FnOnce(), end: impl FnOnce()) {
        meanwhile(begin);
        self.premises.wait(self.fault.hold).await;
        meanwhile(end);
    }

    /// Whether what is done again and again is to be done once more; waits before it says so.
    async fn goes_on(&self, began: Timestamp) -> bool {
        self.premises.wait(AGAIN_AFTER).await;
        Timestamp::now_by_local_clock() < began + self.fault.hold && !self.premises.interrupted.is_cancelled()
    }

    fn seat(&self) -> usize {
        self.fault.choice % WORKERS
    }

    fn env(&self) -> &TestEnv {
        &self.premises.env
    }

    async fn read_only(&self) {
        self.configure("ALTER SYSTEM SET default_transaction_read_only = on").await;
        self.premises.wait(self.fault.hold).await;
        self.configure("ALTER SYSTEM RESET default_transaction_read_only").await;
        let shown = "SELECT current_setting('default_transaction_read_only') = 'off'";
        wait_for("a database that takes writes", async || {
            sqlx::query_scalar(shown).fetch_one(&self.env().pool).await.unwrap()
        })
        .await;
    }

    /// In force for open connections, too.
    async fn configure(&self, statement: &'static str) {
        for statement in [statement, "SELECT pg_reload_conf()"] {
            sqlx::query(statement).execute(&self.env().pool).await.unwrap();
        }
    }

    async fn end_sessions(&self) -> Harm {
        let mut ended = 0;
        let began = Timestamp::now_by_local_clock();
        let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'order-timeout'";
        while self.goes_on(began).await {
            ended += sqlx::query(end).execute(&self.env().pool).await.unwrap().rows_affected();
        }
        Harm::hits(usize::try_from(ended).unwrap())
    }

    async fn lose_answers(&self) -> Harm {
        let mut traps = Vec::new();
        let began = Timestamp::now_by_local_clock();
        let next = "SELECT id::text FROM orders WHERE status = 'unpaid' AND expires_at > clock_timestamp()
                    ORDER BY expires_at LIMIT 1";
        while self.goes_on(began).await {
            let next: Option<String> = sqlx::query_scalar(next).fetch_optional(&self.env().pool).await.unwrap();
            if let Some(id) = next {
                // Whether it is closed or paid first is all the same.
                traps.push(self.premises.to_database.cut_at(&id, Then::CutAtAnswer));
            }
        }
        self.premises.to_database.restore();
        Harm::hits(traps.iter().filter(|is_sprung| is_sprung()).count())
    }

    async fn lock_orders(&self) -> Harm {
        let mut transaction = self.env().pool.begin().await.unwrap();
        let orders = sqlx::query_scalar(
            "SELECT id FROM orders WHERE status = 'unpaid' AND expires_at > clock_timestamp()
             ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED",
        );
        let orders: Vec<Uuid> = orders.bind(LOCKED_AT_ONCE).fetch_all(&mut *transaction).await.unwrap();
        self.premises.wait(self.fault.hold).await;
        transaction.rollback().await.unwrap();
        Harm { hits: Some(orders.len()), whom: Whom::Orders(orders), ..Harm::default() }
    }

    async fn lock_stock(&self) -> Harm {
        let article = article_name(self.fault.choice % ARTICLES);
        let mut transaction = self.env().pool.begin().await.unwrap();
        let lock = sqlx::query("SELECT FROM stock WHERE article_id = $1 FOR UPDATE").bind(&article);
        lock.execute(&mut *transaction).await.unwrap();
        self.premises.wait(self.fault.hold).await;
        transaction.rollback().await.unwrap();
        Harm { whom: Whom::Article(article), ..Harm::default() }
    }

    /// Over when the first of them works again.
    async fn kill_every_worker(&self) {
        let crew = &self.premises.crew;
        let all = |what: &dyn Fn(usize)| (0..WORKERS).for_each(what);
        self.around(|| all(&|seat| crew.kill(seat)), || all(&|seat| crew.start(seat))).await;
        wait_for("a worker", async || (0..WORKERS).any(|seat| crew.has_started(seat))).await;
    }

    async fn purge(&self) -> Harm {
        let (env, names) = (self.premises.at_the_broker().await, self.env().names());
        let mut thrown_away = 0;
        for queue in self.delay_queues().into_iter().chain([names.timeout(), names.arm()]) {
            let options = QueuePurgeOptions::default();
            thrown_away += env.channel.queue_purge(queue.as_str().into(), options).await.unwrap();
        }
        Harm::hits(usize::try_from(thrown_away).unwrap())
    }

    /// Lanes and slots.
    fn delay_queues(&self) -> Vec<String> {
        let names = self.env().names();
        let consumed = [names.timeout(), names.arm(), names.parked()];
        let queues = Topology::new(&self.env().settings).queues.into_iter().map(|queue| queue.name);
        queues.filter(|name| !consumed.contains(name)).collect()
    }

    /// The worker declares it again and goes on consuming.
    async fn delete_consumed_queue(&self) {
        let names = self.env().names();
        let queue = [names.timeout(), names.arm()][self.fault.choice % 2].clone();
        let env = self.premises.at_the_broker().await;
        env.channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        wait_for("the queue, consumed again", async || is_consumed(&env, &queue).await).await;
    }

    async fn delete_delay_queue(&self) {
        let mut queues = self.delay_queues();
        let queue = queues.swap_remove(self.fault.choice % queues.len());
        let env = self.premises.at_the_broker().await;
        env.channel.queue_delete(queue.as_str().into(), QueueDeleteOptions::default()).await.unwrap();
        self.premises.wait(self.fault.hold).await;
        Topology::new(&env.settings).declare(&env.broker).await.unwrap();
    }

    async fn double_alarms(&self) -> Harm {
        let unpaid: Vec<(Uuid, OffsetDateTime)> =
            sqlx::query_as("SELECT id, expires_at FROM orders WHERE status = 'unpaid' ORDER BY expires_at LIMIT $1")
                .bind(DOUBLED_AT_ONCE)
                .fetch_all(&self.env().pool)
                .await
                .unwrap();
        let orders: Vec<Order> =
            unpaid.into_iter().map(|(id, at)| Order { id, deadline: database::moment(at) }).collect();
        let env = self.premises.at_the_broker().await;
        env.deliver(&orders).await;
        env.deliver(&orders).await;
        Harm { forged: orders.iter().map(|order| order.id).collect(), ..Harm::hits(orders.len()) }
    }

    async fn send_garbage(&self) -> Harm {
        let (env, now) = (self.premises.at_the_broker().await, Timestamp::now_by_local_clock());
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
        // Of living orders and dead ones, with a deadline that their rows do not have; and one of no order.
        let wrong = some.iter().map(|id| Order { id: *id, deadline: now - hour });
        let unknown = Order { id: Uuid::now_v7(), deadline: now };
        let wrong: Vec<Order> = wrong.chain([unknown]).collect();
        env.deliver(&wrong).await;
        Harm { forged: some, ..Harm::default() }
    }
}
