//! A careful shop: it creates orders continuously, moves deadlines, takes payments, and repeats every operation that it
//! does not know to have succeeded. It keeps records of what it was told is committed, and the tables are checked
//! against those.
//!
//! It reaches the database directly and the broker through the same proxy as the workers. Its customers pay at the payment
//! provider whatever the provider's interface for the workers is doing.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use order_timeout::loop_backoff::Backoff;
use order_timeout_client::Publisher;
use order_timeout_client::payment::{Attempt, Currency, Money};
use order_timeout_client::postgres::{self, Timestamptz, payment_received};
use order_timeout_core::order::Timestamp;
use order_timeout_testkit::payment_service::{Fault, PaymentService};
use order_timeout_testkit::{TestEnv, checkout};
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgConnection, PgPool};
use tokio::task::{JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::environment::PROVIDER;
use crate::history::{ARTICLES, AtProvider, Change, History, Payment, ScheduleMethod};

/// The initial stock of each article.
pub const IN_STOCK: i64 = 1_000_000;
/// Far longer than a fault and the queue for connections behind it. On a busy machine, an operation that gets its turn just
/// before its time is over does not open a connection any more, and neither does any that queues behind it.
const ACQUIRED_WITHIN: Duration = Duration::from_secs(30);
/// How long after the last order was taken the shop must have finished with all: the longest delay, and the time in which
/// an operation succeeds at the latest on a busy machine.
const LAST_ORDER: Duration = Duration::from_secs(90);
/// What an order with an attempt at the payment provider costs.
const PRICE_MINOR: i64 = 1_999;
/// How long before its time a payment opens its transaction.
const OPEN_BEFORE: Duration = Duration::from_millis(4);
/// More than are busy at once on a healthy database; few enough not to overload one that has just come back.
const CONNECTIONS: u32 = 16;

/// What the shop knows of an order.
#[derive(Debug, Clone)]
pub struct OrderRecord {
    pub id: Uuid,
    pub article: String,
    pub created_at: Timestamp,
    /// The deadline last committed.
    pub deadline: Timestamp,
    /// When the shop learned of the last commit that set the deadline. An order cannot be closed before its deadline
    /// exists.
    pub confirmed_at: Timestamp,
    /// Since when an alarm for this deadline is known to be safe: confirmed by the broker, or committed with the order.
    /// `None` if the shop gave up.
    pub alarmed_at: Option<Timestamp>,
    /// A payment locks its row around the deadline.
    pub contested: bool,
    /// Paid in the tables; with an attempt at the payment provider: there.
    pub paid: bool,
    pub at_provider: Option<AtProvider>,
}

/// The time in which a finally declined payment locked its article's stock, for every order of this article.
#[derive(Debug, Clone)]
pub struct Declined {
    pub article: String,
    pub from: Timestamp,
    pub until: Timestamp,
}

/// All that the shop knows at the end.
pub struct ShopRecords {
    pub records: Vec<OrderRecord>,
    pub declined: Vec<Declined>,
}

/// What has happened so far.
#[derive(Debug, Default)]
pub struct Counters {
    pub taken: AtomicUsize,
    pub paid: AtomicUsize,
    /// Payments within the last millisecond or during the close that succeeded.
    pub paid_at_deadline: AtomicUsize,
    pub paid_too_late: AtomicUsize,
    /// Operations that failed, or were not known to have succeeded, and were repeated.
    pub repeated: AtomicUsize,
}

/// An open shop.
pub struct Shop {
    pub counters: Arc<Counters>,
    stop: CancellationToken,
    running: JoinHandle<ShopRecords>,
}

/// What all orders of a shop share.
struct Shared {
    pool: PgPool,
    publisher: Publisher,
    provider: Option<Arc<PaymentService>>,
    counters: Arc<Counters>,
    declined: Mutex<Vec<Declined>>,
    /// Orders that the shop still has something to do with: what was begun last.
    busy: Mutex<BTreeMap<u64, String>>,
}

pub fn article_name(number: usize) -> String {
    format!("article-{number}")
}

impl Shop {
    /// Creates this many orders a second. The publisher may be behind a failing proxy. With a payment provider, a third of
    /// the orders have an attempt there.
    pub async fn open(
        env: &TestEnv,
        publisher: Publisher,
        provider: Option<Arc<PaymentService>>,
        seed: u64,
        orders_per_second: f64,
    ) -> Self {
        for article in 0..ARTICLES {
            env.stock(&article_name(article), IN_STOCK).await;
        }
        let pool = PgPoolOptions::new().max_connections(CONNECTIONS).acquire_timeout(ACQUIRED_WITHIN);
        let pool = pool.connect_with((*env.pool.connect_options()).clone()).await.unwrap();
        let (counters, stop) = (Arc::<Counters>::default(), CancellationToken::new());
        let (declined, busy) = (Mutex::default(), Mutex::default());
        let shared = Arc::new(Shared { pool, publisher, provider, counters: counters.clone(), declined, busy });
        let running = tokio::spawn(take_orders(shared, seed, orders_per_second, stop.clone()));
        Self { counters, stop, running }
    }

    /// Creates no more orders, and waits for the end of those that exist.
    pub async fn shut(self) -> ShopRecords {
        self.stop.cancel();
        self.running.await.unwrap()
    }
}

async fn take_orders(shop: Arc<Shared>, seed: u64, orders_per_second: f64, stop: CancellationToken) -> ShopRecords {
    let mut records = JoinSet::new();
    let mut beat = tokio::time::interval(Duration::from_secs_f64(1.0 / orders_per_second));
    for number in 0_u64.. {
        tokio::select! {
            () = stop.cancelled() => break,
            _ = beat.tick() => {}
        }
        let shared = shop.clone();
        let history = History::of(seed, number, shared.provider.is_some());
        records.spawn(async move {
            shared.busy.lock().unwrap().insert(number, format!("{history:?}"));
            let record = shared.run_order(history).await;
            shared.busy.lock().unwrap().remove(&number);
            record
        });
    }
    let records = tokio::time::timeout(LAST_ORDER, records.join_all()).await;
    let records = records.unwrap_or_else(|_| panic!("the shop does not finish {:#?}", shop.busy.lock().unwrap()));
    let declined = std::mem::take(&mut *shop.declined.lock().unwrap());
    ShopRecords { records, declined }
}

impl Shared {
    async fn run_order(&self, history: History) -> OrderRecord {
        let mut record = self.create(&history).await;
        self.counters.taken.fetch_add(1, Ordering::Relaxed);
        record.alarmed_at = self.alarmed(&record, history.method).await;
        self.change(&history, &mut record).await;
        match history.at_provider {
            Some(planned) => self.pay_at_provider(planned, &mut record).await,
            None => self.pay_as_planned(&history, &mut record).await,
        }
        record
    }

    /// Repeats an operation until it is known to have succeeded.
    async fn retry_until_done<T, E, F: Future<Output = Result<T, E>>>(&self, mut attempt: impl FnMut() -> F) -> T {
        let mut backoff = Backoff::new();
        loop {
            match attempt().await {
                Ok(done) => return done,
                Err(_) => _ = self.counters.repeated.fetch_add(1, Ordering::Relaxed),
            }
            tokio::time::sleep(backoff.next_pause()).await;
        }
    }

    async fn create(&self, history: &History) -> OrderRecord {
        let (id, article) = (Uuid::now_v7(), article_name(history.article));
        if let (Some(AtProvider::NeverAnswered), Some(provider)) = (history.at_provider, &self.provider) {
            provider.fail(&id.to_string(), Some(Fault::Error));
        }
        let deadline = self.retry_until_done(|| self.commit_order(id, &article, history)).await;
        let contested = history.payment.is_at_the_deadline();
        let confirmed_at = Timestamp::now_by_local_clock();
        OrderRecord {
            id,
            article,
            created_at: confirmed_at,
            deadline,
            confirmed_at,
            alarmed_at: None,
            contested,
            paid: false,
            at_provider: history.at_provider,
        }
    }

    /// Since when an alarm for the deadline just committed is safe.
    async fn alarmed(&self, record: &OrderRecord, method: ScheduleMethod) -> Option<Timestamp> {
        match method {
            ScheduleMethod::Publisher => self.schedule(record).await,
            ScheduleMethod::ScheduleIn | ScheduleMethod::PlainInsert => Some(record.confirmed_at),
        }
    }

    async fn commit_order(&self, id: Uuid, article: &str, history: &History) -> Result<Timestamp, sqlx::Error> {
        let mut transaction = self.pool.begin().await?;
        let taken = checkout::take_orders(&mut transaction, &[id], article, history.delay).await?;
        let deadline = taken.first().ok_or(sqlx::Error::RowNotFound)?.1;
        if history.at_provider.is_some() {
            begin_attempt(&mut transaction, id).await?;
        }
        write_alarm(&mut transaction, history.method, id, deadline).await?;
        transaction.commit().await?;
        Ok(deadline)
    }

    /// Until it succeeds or the deadline has passed: then the sweep must close the order without the alarm.
    async fn schedule(&self, record: &OrderRecord) -> Option<Timestamp> {
        let mut backoff = Backoff::new();
        while Timestamp::now_by_local_clock() < record.deadline {
            if self.publisher.schedule(record.id.to_string(), record.deadline).await.is_ok() {
                return Some(Timestamp::now_by_local_clock());
            }
            self.counters.repeated.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(backoff.next_pause()).await;
        }
        None
    }

    async fn change(&self, history: &History, record: &mut OrderRecord) {
        let (after, shift) = match history.change {
            Change::None => return,
            Change::Extended { after, by } => (after, history.delay.mul_f64(1.0 - after) + by),
            Change::Shortened { after, left } => (after, left),
        };
        wait_until(record.deadline - history.delay.mul_f64(1.0 - after)).await;
        let (id, schedules) = (record.id, matches!(history.change, Change::Shortened { .. }));
        let deadline =
            self.retry_until_done(|| self.commit_change(id, shift, schedules.then_some(history.method))).await;
        if deadline == record.deadline {
            return;
        }
        (record.deadline, record.confirmed_at) = (deadline, Timestamp::now_by_local_clock());
        if schedules {
            record.alarmed_at = self.alarmed(record, history.method).await;
        }
    }

    /// The deadline that the order has now: the new one or, if the order was closed before, the one in force. That may
    /// be the new one too, if an earlier attempt was committed without an answer.
    async fn commit_change(
        &self,
        id: Uuid,
        left: Duration,
        schedule: Option<ScheduleMethod>,
    ) -> Result<Timestamp, sqlx::Error> {
        let mut transaction = self.pool.begin().await?;
        let moved: Option<Timestamptz> = sqlx::query_scalar(
            "UPDATE orders SET expires_at = clock_timestamp() + make_interval(secs => $2)
             WHERE id = $1 AND status = 'unpaid' RETURNING expires_at",
        )
        .bind(id)
        .bind(left.as_secs_f64())
        .fetch_optional(&mut *transaction)
        .await?;
        if let (Some(Timestamptz(deadline)), Some(method)) = (moved, schedule) {
            write_alarm(&mut transaction, method, id, deadline).await?;
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

    /// The customer pays at the provider, which reports it or does not.
    async fn pay_at_provider(&self, planned: AtProvider, record: &mut OrderRecord) {
        let left = || record.deadline.since(Timestamp::now_by_local_clock());
        let (at, callback) = match planned {
            AtProvider::NeverPaid | AtProvider::NeverAnswered => return,
            AtProvider::Paid { after, callback } => (record.deadline - left().mul_f64(1.0 - after), Some(callback)),
            AtProvider::DeadWebhook { after } => (record.deadline - left().mul_f64(1.0 - after), None),
            AtProvider::Race { after, callback } => {
                (record.deadline - AtProvider::RACE_BEGINS_BEFORE + after, callback)
            }
        };
        wait_until(at).await;
        let provider = self.provider.as_ref().expect("a history at a provider is for runs that have one");
        record.paid = provider.pay(&record.id.to_string());
        if matches!(planned, AtProvider::Race { .. }) {
            self.count_race(record.paid);
        }
        self.counters.paid.fetch_add(usize::from(record.paid), Ordering::Relaxed);
        if let (true, Some(callback)) = (record.paid, callback) {
            wait_until(at + callback).await;
            self.report_payment(record.id).await;
        }
    }

    /// What the provider's callback does.
    async fn report_payment(&self, id: Uuid) {
        let money = Money { amount_minor: PRICE_MINOR, currency: Currency::new("EUR").expect("a currency") };
        let attempt = Attempt { provider: PROVIDER.to_owned(), reference: id.to_string(), money };
        // What it has found is read from the tables.
        let _ = self.retry_until_done(|| payment_received(&self.pool, id.to_string(), &attempt)).await;
    }

    async fn pay_as_planned(&self, history: &History, record: &mut OrderRecord) {
        let at = match history.payment {
            Payment::Never => return,
            Payment::Early(part) => {
                let left = record.deadline.since(Timestamp::now_by_local_clock());
                record.deadline - left.mul_f64(1.0 - part)
            }
            Payment::LastMillisecond(before) => record.deadline - before,
            Payment::DuringTheClose(after) => record.deadline + after,
            Payment::Declined(held) => {
                // The result is not used, so a failure need not be repeated.
                let _ = self.decline(record, record.deadline - held / 2, held).await;
                return;
            }
        };
        record.paid = self.pay(record.id, at, history.pays_for).await;
        if record.paid && history.pays_again {
            let again = self.pay(record.id, at, Duration::ZERO).await;
            assert!(again, "a repeated payment finds the order paid");
        }
        self.count_payment(history.payment, record.paid);
    }

    fn count_payment(&self, payment: Payment, paid: bool) {
        let counters = &self.counters;
        counters.paid.fetch_add(usize::from(paid), Ordering::Relaxed);
        if matches!(payment, Payment::LastMillisecond(_) | Payment::DuringTheClose(_)) {
            self.count_race(paid);
        }
    }

    fn count_race(&self, paid: bool) {
        let which = if paid { &self.counters.paid_at_deadline } else { &self.counters.paid_too_late };
        which.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether the order is paid.
    async fn pay(&self, id: Uuid, at: Timestamp, takes: Duration) -> bool {
        self.retry_until_done(|| self.try_to_pay(id, at, takes)).await
    }

    /// If the answer of an earlier attempt was lost, this finds its result.
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

    async fn decline(&self, record: &OrderRecord, at: Timestamp, held: Duration) -> Result<(), sqlx::Error> {
        let mut transaction = self.begin_for(at).await?;
        if !checkout::pay(&mut transaction, record.id).await? {
            return Ok(());
        }
        let from = Timestamp::now_by_local_clock();
        tokio::time::sleep(held).await;
        let ended = transaction.rollback().await;
        let (article, until) = (record.article.clone(), Timestamp::now_by_local_clock());
        self.declined.lock().unwrap().push(Declined { article, from, until });
        ended
    }

    /// A transaction that is open at this time, so that only one statement is left before the row is locked.
    async fn begin_for(&self, at: Timestamp) -> Result<sqlx::Transaction<'static, sqlx::Postgres>, sqlx::Error> {
        wait_until(at - OPEN_BEFORE).await;
        let transaction = self.pool.begin().await?;
        wait_until(at).await;
        Ok(transaction)
    }
}

/// Before the customer is sent to the provider: what the order costs, and the attempt, with the order's id as its
/// reference.
async fn begin_attempt(transaction: &mut PgConnection, id: Uuid) -> Result<(), sqlx::Error> {
    sqlx::query(
        "WITH priced AS (UPDATE orders SET amount_minor = $2, currency = 'EUR' WHERE id = $1 AND amount_minor IS NULL)
         INSERT INTO payment_attempts (provider, reference, order_id, amount_minor, currency)
         VALUES ($3, $1::text, $1::text, $2, 'EUR') ON CONFLICT DO NOTHING",
    )
    .bind(id)
    .bind(PRICE_MINOR)
    .bind(PROVIDER)
    .execute(transaction)
    .await
    .map(drop)
}

async fn write_alarm(
    transaction: &mut PgConnection,
    method: ScheduleMethod,
    id: Uuid,
    deadline: Timestamp,
) -> Result<(), sqlx::Error> {
    match method {
        ScheduleMethod::Publisher => Ok(()),
        ScheduleMethod::ScheduleIn => match postgres::schedule(transaction, id.to_string(), deadline).await {
            Ok(()) => Ok(()),
            Err(postgres::ScheduleError::Database(error)) => Err(error),
            Err(fault) => panic!("{fault}"),
        },
        ScheduleMethod::PlainInsert => {
            let insert =
                "INSERT INTO alarm_outbox (order_id, deadline) SELECT id::text, expires_at FROM orders WHERE id = $1";
            sqlx::query(insert).bind(id).execute(transaction).await.map(drop)
        }
    }
}

/// Precise to the microsecond, while a timer is precise to milliseconds: the last of them are spent polling.
async fn wait_until(time: Timestamp) {
    let left = time.since(Timestamp::now_by_local_clock());
    if let Some(asleep) = left.checked_sub(Duration::from_millis(2)) {
        tokio::time::sleep(asleep).await;
    }
    let began = Instant::now();
    while Timestamp::now_by_local_clock() < time && began.elapsed() < Duration::from_millis(5) {
        tokio::task::yield_now().await;
    }
}
