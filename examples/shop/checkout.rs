//! Where orders are created and paid: what a shop that uses the library does with its own database.

use anyhow::Context;
use order_timeout_client::Publisher;
use order_timeout_core::clock::{ClockSample, DatabaseClock};
use order_timeout_core::order::Timestamp;
use sqlx::{PgPool, Row};
use time::OffsetDateTime;
use tokio::time::{Instant, sleep_until};
use uuid::Uuid;

use crate::plan::{Article, Customer};
use crate::progress::Progress;

/// The checkout: the shop's database and publisher.
#[derive(Debug, Clone)]
pub struct Checkout {
    pool: PgPool,
    /// `None` without a broker: the worker reads the deadline from the row.
    publisher: Option<Publisher>,
    clock: DatabaseClock,
}

/// The result of one customer.
#[derive(Debug, Clone, Copy)]
pub struct Served {
    pub deadline: Timestamp,
    pub payment: PaymentOutcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PaymentOutcome {
    NotTried,
    Paid,
    /// The order had been closed: the customer is told so and is not charged.
    TooLate,
}

/// How many orders are still open, and how many were closed.
#[derive(Debug, Clone, Copy)]
pub struct Decided {
    pub open: usize,
    pub closed: usize,
}

impl Checkout {
    /// Fills the stock and reads the database's clock.
    pub async fn open(pool: PgPool, publisher: Option<Publisher>, articles: &[Article]) -> anyhow::Result<Self> {
        let ids: Vec<&str> = articles.iter().map(|article| article.id.as_str()).collect();
        let available: Vec<i64> = articles.iter().map(|article| article.initial).collect();
        sqlx::query("INSERT INTO stock (article_id, available) SELECT * FROM unnest($1::text[], $2::bigint[])")
            .bind(&ids)
            .bind(&available)
            .execute(&pool)
            .await
            .context("the stock could not be filled")?;
        let clock = read_clock(&pool).await.context("the database's clock could not be read")?;
        Ok(Self { pool, publisher, clock })
    }

    /// One customer from ordering to paying, or not paying.
    pub async fn serve(&self, customer: &Customer, progress: &Progress) -> anyhow::Result<Served> {
        let deadline = self.create(customer).await.context("an order could not be created")?;
        // After the commit: an alarm for an order that was rolled back would find nothing.
        if let Some(publisher) = &self.publisher {
            publisher.schedule(customer.order_id.to_string(), deadline).await?;
        }
        progress.created();
        let payment = match customer.payment {
            None => PaymentOutcome::NotTried,
            Some(payment) => {
                let moment = payment.moment(self.clock.now(), deadline);
                sleep_until(self.instant_of(moment)).await;
                self.pay(customer).await.context("a payment failed")?
            }
        };
        match payment {
            PaymentOutcome::Paid => progress.paid(),
            PaymentOutcome::TooLate => progress.too_late(),
            PaymentOutcome::NotTried => {}
        }
        Ok(Served { deadline, payment })
    }

    /// Order, items, history and reservation in one transaction. Returns the deadline, which the database's clock sets.
    async fn create(&self, customer: &Customer) -> sqlx::Result<Timestamp> {
        let mut transaction = self.pool.begin().await?;
        let expires_at: OffsetDateTime = sqlx::query_scalar(
            "INSERT INTO orders (id, expires_at) VALUES ($1, clock_timestamp() + $2 * interval '1 microsecond')
             RETURNING expires_at",
        )
        .bind(customer.order_id)
        .bind(customer.time_to_pay.as_micros() as i64)
        .fetch_one(&mut *transaction)
        .await?;
        sqlx::query("INSERT INTO order_events (order_id, event) VALUES ($1, 'created')")
            .bind(customer.order_id)
            .execute(&mut *transaction)
            .await?;
        for item in &customer.basket {
            sqlx::query("INSERT INTO order_items (order_id, article_id, quantity) VALUES ($1, $2, $3)")
                .bind(customer.order_id)
                .bind(&item.article_id)
                .bind(item.quantity)
                .execute(&mut *transaction)
                .await?;
        }
        // Last, and in article order: every customer needs these rows, so they are locked briefly and without deadlock.
        for item in &customer.basket {
            sqlx::query("UPDATE stock SET available = available - $2, reserved = reserved + $2 WHERE article_id = $1")
                .bind(&item.article_id)
                .bind(item.quantity)
                .execute(&mut *transaction)
                .await?;
        }
        transaction.commit().await?;
        Ok(Timestamp::from(expires_at))
    }

    /// The other side of the race. `status = 'unpaid'` in the WHERE decides it: Postgres waits for a close that holds
    /// the row and then tests again.
    async fn pay(&self, customer: &Customer) -> sqlx::Result<PaymentOutcome> {
        let mut transaction = self.pool.begin().await?;
        let won = sqlx::query(
            "UPDATE orders SET status = 'paid', paid_at = clock_timestamp() WHERE id = $1 AND status = 'unpaid'
             RETURNING id",
        )
        .bind(customer.order_id)
        .fetch_optional(&mut *transaction)
        .await?;
        if won.is_none() {
            // The close has given the stock back, so it cannot be sold.
            transaction.rollback().await?;
            return Ok(PaymentOutcome::TooLate);
        }
        sqlx::query("INSERT INTO order_events (order_id, event) VALUES ($1, 'paid')")
            .bind(customer.order_id)
            .execute(&mut *transaction)
            .await?;
        for item in &customer.basket {
            sqlx::query("UPDATE stock SET reserved = reserved - $2 WHERE article_id = $1")
                .bind(&item.article_id)
                .bind(item.quantity)
                .execute(&mut *transaction)
                .await?;
        }
        transaction.commit().await?;
        Ok(PaymentOutcome::Paid)
    }

    pub async fn count_decided(&self, orders: &[Uuid]) -> anyhow::Result<Decided> {
        let row = sqlx::query(
            "SELECT count(*) FILTER (WHERE status IN ('unpaid', 'closing')) AS open,
                    count(*) FILTER (WHERE status = 'closed') AS closed
             FROM orders WHERE id = ANY ($1)",
        )
        .bind(orders)
        .fetch_one(&self.pool)
        .await
        .context("the orders could not be counted")?;
        let count = |column| -> anyhow::Result<usize> { Ok(row.try_get::<i64, _>(column)?.try_into()?) };
        Ok(Decided { open: count("open")?, closed: count("closed")? })
    }

    /// The instant at which the database's clock will show this time.
    pub fn instant_of(&self, moment: Timestamp) -> Instant {
        Instant::from_std(self.clock.instant_of(moment))
    }
}

/// Takes several readings and uses the most precise one, because payments need milliseconds.
async fn read_clock(pool: &PgPool) -> sqlx::Result<DatabaseClock> {
    let mut clock = DatabaseClock::new(sample_clock(pool).await?);
    for _ in 0..4 {
        clock.learn(sample_clock(pool).await?);
    }
    Ok(clock)
}

async fn sample_clock(pool: &PgPool) -> sqlx::Result<ClockSample> {
    let mut connection = pool.acquire().await?;
    let asked = std::time::Instant::now();
    let now: OffsetDateTime = sqlx::query_scalar("SELECT clock_timestamp()").fetch_one(&mut *connection).await?;
    Ok(ClockSample { asked, answered: std::time::Instant::now(), database: Timestamp::from(now) })
}
