//! A careful shop: it takes orders all the while, moves deadlines, pays, and says again whatever it does not know to
//! have been done. It keeps books of its own, of what it was told is committed; against those the tables are held.
//!
//! It reaches the database by itself and the broker by the same network as the workers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use order_timeout::backoff::Backoff;
use order_timeout::database::Timestamptz;
use order_timeout::order::Timestamp;
use order_timeout::{Publisher, schedule_in};
use secrecy::ExposeSecret;
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::fate::{ARTICLES, Change, Fate, Payment, Way};
use crate::support::{TestEnv, checkout};

/// What each article starts with.
pub const IN_STOCK: i64 = 1_000_000;
/// How long before its moment a payment stands ready, its transaction open.
const READY: Duration = Duration::from_millis(4);
/// More than are at work at once while the database is well; few enough not to fall upon one that has just come back.
const CONNECTIONS: u32 = 16;

/// What the shop knows of an order.
#[derive(Debug, Clone)]
pub struct Life {
    pub id: Uuid,
    pub article: String,
    pub created_at: Timestamp,
    /// The deadline last committed.
    pub deadline: Timestamp,
    /// When the shop heard of the last commit that set the deadline. Nobody can close before a deadline is there.
    pub known_at: Timestamp,
    /// Since when an alarm that leads to this deadline is known to be safe: confirmed by the broker, or committed beside
    /// the order. `None` where the shop gave up.
    pub alarmed_at: Option<Timestamp>,
    /// Somebody locks its row around the deadline, to pay.
    pub contested: bool,
    pub paid: bool,
}

/// While a payment that was declined in the end kept its article's stock locked: for every order of this article.
#[derive(Debug, Clone)]
pub struct Declined {
    pub article: String,
    pub from: Timestamp,
    pub until: Timestamp,
}

/// All that the shop knows in the end.
pub struct Books {
    pub lives: Vec<Life>,
    pub declined: Vec<Declined>,
}

/// What has happened so far.
#[derive(Debug, Default)]
pub struct Counters {
    pub taken: AtomicUsize,
    pub paid: AtomicUsize,
    /// Payments within the last millisecond or during the close that came in time.
    pub paid_in_the_nick_of_time: AtomicUsize,
    pub paid_too_late: AtomicUsize,
    /// Whatever failed, or was not known to have succeeded, and was said again.
    pub said_again: AtomicUsize,
}

/// An open shop.
pub struct Shop {
    pub counters: Arc<Counters>,
    stop: CancellationToken,
    running: JoinHandle<Books>,
}

/// What all orders of a shop share.
struct Counter {
    pool: PgPool,
    publisher: Publisher,
    counters: Arc<Counters>,
    declined: Mutex<Vec<Declined>>,
}

pub fn article_name(number: usize) -> String {
    format!("article-{number}")
}

impl Shop {
    /// Takes so many orders a second. The publisher may be behind a network that breaks.
    pub async fn open(env: &TestEnv, publisher: Publisher, seed: u64, orders_per_second: f64) -> Self {
        for article in 0..ARTICLES {
            env.stock(&article_name(article), IN_STOCK).await;
        }
        let pool = PgPoolOptions::new().max_connections(CONNECTIONS).acquire_timeout(Duration::from_secs(5));
        let pool = pool.connect(env.settings.database.url.expose_secret()).await.unwrap();
        let (counters, stop) = (Arc::<Counters>::default(), CancellationToken::new());
        let counter = Arc::new(Counter { pool, publisher, counters: counters.clone(), declined: Mutex::default() });
        let running = tokio::spawn(take_orders(counter, seed, orders_per_second, stop.clone()));
        Self { counters, stop, running }
    }

    /// Takes no more orders, and waits for the end of each that was taken.
    pub async fn shut(self) -> Books {
        self.stop.cancel();
        self.running.await.unwrap()
    }
}

async fn take_orders(shop: Arc<Counter>, seed: u64, orders_per_second: f64, stop: CancellationToken) -> Books {
    let mut lives = JoinSet::new();
    let mut beat = tokio::time::interval(Duration::from_secs_f64(1.0 / orders_per_second));
    for number in 0_u64.. {
        tokio::select! {
            () = stop.cancelled() => break,
            _ = beat.tick() => {}
        }
        let at_the_counter = shop.clone();
        lives.spawn(async move { at_the_counter.live(Fate::of(seed, number)).await });
    }
    let lives = lives.join_all().await;
    let declined = std::mem::take(&mut *shop.declined.lock().unwrap());
    Books { lives, declined }
}

impl Counter {
    async fn live(&self, fate: Fate) -> Life {
        let mut life = self.create(&fate).await;
        self.counters.taken.fetch_add(1, Ordering::Relaxed);
        life.alarmed_at = self.alarmed(&life, fate.way).await;
        self.change(&fate, &mut life).await;
        self.settle(&fate, &mut life).await;
        life
    }

    /// Says it until it is known to be done.
    async fn insist<T, F: Future<Output = Result<T, sqlx::Error>>>(&self, mut attempt: impl FnMut() -> F) -> T {
        let mut pauses = Backoff::new();
        loop {
            match attempt().await {
                Ok(done) => return done,
                Err(_) => _ = self.counters.said_again.fetch_add(1, Ordering::Relaxed),
            }
            tokio::time::sleep(pauses.next_pause()).await;
        }
    }

    async fn create(&self, fate: &Fate) -> Life {
        let (id, article) = (Uuid::now_v7(), article_name(fate.article));
        let deadline = self.insist(|| self.commit_order(id, &article, fate)).await;
        let contested = fate.payment.is_at_the_deadline();
        let known_at = Timestamp::now_by_local_clock();
        Life { id, article, created_at: known_at, deadline, known_at, alarmed_at: None, contested, paid: false }
    }

    /// Since when an alarm for the deadline just committed is safe.
    async fn alarmed(&self, life: &Life, way: Way) -> Option<Timestamp> {
        match way {
            Way::Publisher => self.schedule(life).await,
            Way::ScheduleIn | Way::PlainInsert => Some(life.known_at),
        }
    }

    async fn commit_order(&self, id: Uuid, article: &str, fate: &Fate) -> Result<Timestamp, sqlx::Error> {
        let mut transaction = self.pool.begin().await?;
        let taken = checkout::take_orders(&mut transaction, &[id], article, fate.delay).await?;
        let deadline = taken.first().ok_or(sqlx::Error::RowNotFound)?.1;
        write_alarm(&mut transaction, fate.way, id, deadline).await?;
        transaction.commit().await?;
        Ok(deadline)
    }

    /// Until it succeeds or is of no use any more: then the sweep must do without the alarm.
    async fn schedule(&self, life: &Life) -> Option<Timestamp> {
        let mut pauses = Backoff::new();
        while Timestamp::now_by_local_clock() < life.deadline {
            if self.publisher.schedule(life.id.to_string(), life.deadline).await.is_ok() {
                return Some(Timestamp::now_by_local_clock());
            }
            self.counters.said_again.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(pauses.next_pause()).await;
        }
        None
    }

    async fn change(&self, fate: &Fate, life: &mut Life) {
        let (after, shift) = match fate.change {
            Change::None => return,
            Change::Extended { after, by } => (after, fate.delay.mul_f64(1.0 - after) + by),
            Change::Shortened { after, left } => (after, left),
        };
        wait_until(life.deadline - fate.delay.mul_f64(1.0 - after)).await;
        let (id, schedules) = (life.id, matches!(fate.change, Change::Shortened { .. }));
        let deadline = self.insist(|| self.commit_change(id, shift, schedules.then_some(fate.way))).await;
        if deadline == life.deadline {
            return;
        }
        (life.deadline, life.known_at) = (deadline, Timestamp::now_by_local_clock());
        if schedules {
            life.alarmed_at = self.alarmed(life, fate.way).await;
        }
    }

    /// The deadline that the order has now: the new one, or, where it was closed before, whichever was in force. That may
    /// be the new one as well, of an earlier try whose answer was lost.
    async fn commit_change(&self, id: Uuid, left: Duration, schedule: Option<Way>) -> Result<Timestamp, sqlx::Error> {
        let mut transaction = self.pool.begin().await?;
        let moved: Option<Timestamptz> = sqlx::query_scalar(
            "UPDATE orders SET expires_at = clock_timestamp() + make_interval(secs => $2)
             WHERE id = $1 AND status = 'unpaid' RETURNING expires_at",
        )
        .bind(id)
        .bind(left.as_secs_f64())
        .fetch_optional(&mut *transaction)
        .await?;
        if let (Some(Timestamptz(deadline)), Some(way)) = (moved, schedule) {
            write_alarm(&mut transaction, way, id, deadline).await?;
        }
        transaction.commit().await?;
        let Timestamptz(deadline) = match moved {
            Some(deadline) => deadline,
            None => {
                let found = sqlx::query_scalar("SELECT expires_at FROM orders WHERE id = $1").bind(id);
                found.fetch_one(&self.pool).await?
            }
        };
        Ok(deadline)
    }

    async fn settle(&self, fate: &Fate, life: &mut Life) {
        let at = match fate.payment {
            Payment::Never => return,
            Payment::Early(part) => {
                let left = life.deadline.since(Timestamp::now_by_local_clock());
                life.deadline - left.mul_f64(1.0 - part)
            }
            Payment::LastMillisecond(before) => life.deadline - before,
            Payment::DuringTheClose(after) => life.deadline + after,
            Payment::Declined(held) => {
                // Nothing is known by it, so nothing need be said again.
                let _ = self.decline(life, life.deadline - held / 2, held).await;
                return;
            }
        };
        life.paid = self.pay(life.id, at, fate.pays_for).await;
        if life.paid && fate.pays_again {
            let again = self.pay(life.id, at, Duration::ZERO).await;
            assert!(again, "a payment said again finds the order paid");
        }
        self.count_payment(fate.payment, life.paid);
    }

    fn count_payment(&self, payment: Payment, paid: bool) {
        let counters = &self.counters;
        counters.paid.fetch_add(usize::from(paid), Ordering::Relaxed);
        if matches!(payment, Payment::LastMillisecond(_) | Payment::DuringTheClose(_)) {
            let which = if paid { &counters.paid_in_the_nick_of_time } else { &counters.paid_too_late };
            which.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns whether the order is paid.
    async fn pay(&self, id: Uuid, at: Timestamp, takes: Duration) -> bool {
        self.insist(|| self.try_to_pay(id, at, takes)).await
    }

    /// If an earlier answer was lost, this finds what became of it.
    async fn try_to_pay(&self, id: Uuid, at: Timestamp, takes: Duration) -> Result<bool, sqlx::Error> {
        let mut transaction = self.begin_for(at).await?;
        let paid = checkout::pay(&mut transaction, id).await?;
        tokio::time::sleep(takes).await;
        transaction.commit().await?;
        if paid {
            return Ok(true);
        }
        sqlx::query_scalar("SELECT status = 'paid' FROM orders WHERE id = $1").bind(id).fetch_one(&self.pool).await
    }

    async fn decline(&self, life: &Life, at: Timestamp, held: Duration) -> Result<(), sqlx::Error> {
        let mut transaction = self.begin_for(at).await?;
        if !checkout::pay(&mut transaction, life.id).await? {
            return Ok(());
        }
        let from = Timestamp::now_by_local_clock();
        tokio::time::sleep(held).await;
        let ended = transaction.rollback().await;
        let (article, until) = (life.article.clone(), Timestamp::now_by_local_clock());
        self.declined.lock().unwrap().push(Declined { article, from, until });
        ended
    }

    /// A transaction that is open when this moment comes, so that only one statement stands between it and the row.
    async fn begin_for(&self, at: Timestamp) -> Result<sqlx::Transaction<'static, sqlx::Postgres>, sqlx::Error> {
        wait_until(at - READY).await;
        let transaction = self.pool.begin().await?;
        wait_until(at).await;
        Ok(transaction)
    }
}

async fn write_alarm(
    transaction: &mut PgConnection,
    way: Way,
    id: Uuid,
    deadline: Timestamp,
) -> Result<(), sqlx::Error> {
    match way {
        Way::Publisher => Ok(()),
        Way::ScheduleIn => match schedule_in(transaction, id.to_string(), deadline).await {
            Ok(()) => Ok(()),
            Err(order_timeout::OutboxError::Database(error)) => Err(error),
            Err(fault) => panic!("{fault}"),
        },
        Way::PlainInsert => {
            let insert =
                "INSERT INTO alarm_outbox (order_id, deadline) SELECT id::text, expires_at FROM orders WHERE id = $1";
            sqlx::query(insert).bind(id).execute(transaction).await.map(drop)
        }
    }
}

/// To the microsecond, where a timer goes by milliseconds: the last of them is spent asking.
async fn wait_until(moment: Timestamp) {
    let left = moment.since(Timestamp::now_by_local_clock());
    if let Some(asleep) = left.checked_sub(Duration::from_millis(2)) {
        tokio::time::sleep(asleep).await;
    }
    let began = Instant::now();
    while Timestamp::now_by_local_clock() < moment && began.elapsed() < Duration::from_millis(5) {
        tokio::task::yield_now().await;
    }
}
