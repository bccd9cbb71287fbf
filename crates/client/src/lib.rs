//! Schedules the timeout of an unpaid order. [order-timeout](https://github.com/order-timeout/order-timeout), a worker
//! beside RabbitMQ and Postgres, closes the order if it is still unpaid at its deadline.
//!
//! The deadline is in the order's row; an *alarm* wakes the worker at that time. An alarm can be scheduled in two ways;
//! choose one.
//!
//! * **In the order's own transaction** (feature `postgres`): [`postgres::schedule`] inserts one row into
//!   `alarm_outbox`, and the worker publishes it. The order and its alarm are committed together or not at all, and
//!   the shop needs no connection to the broker. [`postgres::move_deadline`] changes the deadline later, and
//!   [`postgres::payment_received`] reports a payment from a provider's callback.
//! * **Through RabbitMQ** (feature `amqp`, the default): [`Publisher::schedule`] publishes an alarm after the order has
//!   been committed, and returns when the broker has confirmed it.
//!
//! If an alarm is lost or never sent, the worker's sweep finds the overdue order: it is closed up to a second late
//! instead of not at all. A second alarm for the same order does no harm, so a failed call may be repeated. The row
//! decides what happens: an alarm never closes an order before the deadline in the order's row, and an order that was
//! paid or cancelled needs no call.
//!
//! # Example
//!
//! Through RabbitMQ:
//!
//! ```no_run
//! # #[cfg(feature = "amqp")]
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::{Duration, SystemTime};
//!
//! use order_timeout_client::Publisher;
//!
//! let publisher = Publisher::connect("amqp://guest:guest@localhost:5672/%2f").await?;
//! // … the order has just been committed with this deadline in its row …
//! let deadline = SystemTime::now() + Duration::from_secs(30 * 60);
//! publisher.schedule("01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4b", deadline).await?;
//! # Ok(())
//! # }
//! ```
//!
//! In the order's own transaction (feature `postgres`):
//!
//! ```no_run
//! # #[cfg(feature = "postgres")]
//! # async fn example(pool: sqlx::PgPool, id: &str) -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::{Duration, SystemTime};
//!
//! use order_timeout_client::postgres;
//!
//! let deadline = SystemTime::now() + Duration::from_secs(30 * 60);
//! let mut transaction = pool.begin().await?;
//! // … INSERT INTO orders …, with this deadline …
//! postgres::schedule(&mut transaction, id, deadline).await?;
//! transaction.commit().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Events
//!
//! The worker publishes an event for each order that it closes. Its body is JSON, which [`OrderClosed`] reads with
//! serde.
//!
//! # Features
//!
//! * `amqp` (default): [`Publisher`].
//! * `postgres`: the module [`postgres`], for sqlx 0.9. Without default features, no AMQP library is compiled.
//! * `chrono`: `chrono::DateTime` as a deadline, beside [`std::time::SystemTime`] and `time::OffsetDateTime`.
//! * `testing`: the module [`testing`] for a shop's own tests: an in-memory publisher, and with `postgres` a clock that moves.

#![cfg_attr(
    not(all(feature = "amqp", feature = "postgres", feature = "testing")),
    allow(rustdoc::broken_intra_doc_links)
)]

#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "amqp")]
mod publisher;
#[cfg(feature = "testing")]
pub mod testing;

#[cfg(feature = "amqp")]
pub use order_timeout_amqp::connect::BrokerError;
#[cfg(feature = "amqp")]
pub use order_timeout_amqp::publisher::PublishError;
pub use order_timeout_core::kind::{Kind, KindError};
pub use order_timeout_core::message::OrderClosed;
pub use order_timeout_core::order::{ClosedBy, OrderId, OrderIdError, Timestamp};
#[cfg(feature = "postgres")]
pub use order_timeout_core::payment;
pub use order_timeout_core::{InvalidSetting, with_causes};
#[cfg(feature = "amqp")]
pub use publisher::{ConnectError, Publisher, PublisherBuilder, ScheduleError, ScheduleManyError};
