//! For a shop's own tests: an in-memory publisher, which opens no connection and waits for nothing; and `advance`, with which a
//! test need not wait for a deadline.
//!
//! ```
//! use std::time::{Duration, SystemTime};
//!
//! # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
//! let (publisher, scheduled) = order_timeout_client::testing::publisher();
//!
//! // The code under test gets the publisher as it would in production.
//! let deadline = SystemTime::now() + Duration::from_secs(30 * 60);
//! publisher.schedule("order-7", deadline).await.unwrap();
//! assert_eq!(scheduled.deadline_of("order-7"), Some(deadline.into()));
//!
//! // Tests what the shop does when the broker is unavailable.
//! scheduled.fail_with(Some(order_timeout_client::PublishError::Blocked));
//! assert!(publisher.schedule("order-8", deadline).await.is_err());
//! assert_eq!(scheduled.alarms().len(), 1);
//! # });
//! ```

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
#[cfg(feature = "postgres")]
use std::time::Duration;

use order_timeout_amqp::publisher::PublishError;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::Alarm;
use order_timeout_core::order::{OrderId, Timestamp};

use crate::Publisher;
#[cfg(feature = "postgres")]
use crate::postgres::Timestamptz;

/// A publisher that only records, and its records. It refuses ids and deadlines as a real one with default settings
/// does.
#[must_use]
pub fn publisher() -> (Publisher, Scheduled) {
    let scheduled = Scheduled::default();
    (Publisher::in_memory(scheduled.clone()), scheduled)
}

/// What was scheduled. Clones share their records.
#[derive(Debug, Clone, Default)]
pub struct Scheduled(Arc<Mutex<Records>>);

#[derive(Debug, Default)]
struct Records {
    alarms: Vec<Alarm>,
    fault: Option<PublishError>,
}

impl Scheduled {
    /// Every alarm of the default kind that was scheduled, in the order of the calls; without those that failed.
    #[must_use]
    pub fn alarms(&self) -> Vec<(OrderId, Timestamp)> {
        self.alarms_of(&Kind::ORDER)
    }

    /// The same of this kind.
    #[must_use]
    pub fn alarms_of(&self, kind: &Kind) -> Vec<(OrderId, Timestamp)> {
        let records = self.records();
        let of_kind = records.alarms.iter().filter(|alarm| alarm.kind == *kind);
        of_kind.map(|alarm| (alarm.order_id.clone(), alarm.deadline)).collect()
    }

    /// The deadline of the last alarm of the default kind for this order, if there is one.
    #[must_use]
    pub fn deadline_of(&self, order_id: &str) -> Option<Timestamp> {
        self.alarms().into_iter().rev().find(|(id, _)| id.as_str() == order_id).map(|(_, deadline)| deadline)
    }

    /// Makes every alarm from now on fail with this error; `None` ends that.
    pub fn fail_with(&self, fault: Option<PublishError>) {
        self.records().fault = fault;
    }

    pub(crate) fn record(&self, alarm: Alarm) -> Result<(), PublishError> {
        let mut records = self.records();
        match &records.fault {
            Some(fault) => Err(fault.clone()),
            None => {
                records.alarms.push(alarm);
                Ok(())
            }
        }
    }

    /// A test that panics while it holds the lock leaves the records valid.
    fn records(&self) -> MutexGuard<'_, Records> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why the clock is not known to have moved; the cause is in `source()`.
#[cfg(feature = "postgres")]
#[derive(Debug, thiserror::Error)]
#[error("the clock is not moved{}", hint(.0))]
pub struct AdvanceError(#[from] sqlx::Error);

#[cfg(feature = "postgres")]
fn hint(error: &sqlx::Error) -> &'static str {
    match error.as_database_error().and_then(|refusal| refusal.code()).as_deref() {
        // invalid_schema_name
        Some("3F000") => {
            ", because this database was not made for tests; create one with `order-timeout setup --for-tests`"
        }
        _ => "",
    }
}

/// Moves the clock of a database that `order-timeout setup --for-tests` has made, and returns what it says then. Takes effect at
/// once, also within a transaction: a running worker closes what fell due meanwhile.
///
/// ```no_run
/// # async fn example(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
///
/// // … the shop creates an order that is to be paid within 30 minutes …
/// order_timeout_client::testing::advance(&pool, Duration::from_secs(30 * 60)).await?;
/// // … and soon the order is closed …
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`AdvanceError`], on any other database.
#[cfg(feature = "postgres")]
pub async fn advance(executor: impl sqlx::PgExecutor<'_>, step: Duration) -> Result<Timestamp, AdvanceError> {
    let advance = "SELECT order_timeout_clock.advance(make_interval(secs => $1))";
    let Timestamptz(now) = sqlx::query_scalar(advance).bind(step.as_secs_f64()).fetch_one(executor).await?;
    Ok(now)
}
