//! Closes unpaid orders in Postgres exactly when their time is up, woken by RabbitMQ delayed messages.
//!
//! ```text
//! 1 SCHEDULE ──► DELAY (broker) ──► 3 DELIVER ──► 4 HOLD ──► 5 CLOSE ──► 6 ANNOUNCE
//! schedule/      topology.rs        deliver/      hold.rs    close.rs    announce.rs
//!                                       │ early, far             ▲
//!                                       ▼                        │
//!                                    2 RE-ARM  rearm.rs ──► wheel.rs  (back through the broker)
//! ```
//!
//! The order's row decides; a message only wakes the worker. [`worker`] connects the steps, [`engine`] decides what
//! happens next with each alarm, and no step imports another.
//!
//! What a publisher needs is re-exported here: [`Publisher`], [`Settings`], [`OrderId`], [`Deadline`], and the errors
//! [`SettingsError`], [`BrokerError`], [`ScheduleError`], [`ScheduleManyError`], [`PublishError`].

pub mod alarm;
pub mod canary;
pub mod clock;
pub mod config;
pub mod envelope;
pub mod message;
pub mod order;
pub mod topology;
pub mod wheel;

pub mod schedule;

pub mod deliver;
pub mod hold;
pub mod rearm;

pub mod close;
pub mod contract;
pub mod engine;
pub mod sweep;

pub mod announce;
pub mod park;

pub mod backoff;
pub mod broker;
pub mod cli;
pub mod confirm;
pub mod database;
pub mod degraded;
pub mod health;
pub mod http;
pub mod inspect;
pub mod logging;
pub mod metrics;
pub mod quarantine;
pub mod relay;
pub mod sanitize;
mod session;
pub mod tls;
pub mod worker;

pub use broker::BrokerError;
pub use config::{Settings, SettingsError};
pub use confirm::PublishError;
pub use order::{Deadline, OrderId, Timestamp};
pub use schedule::deadline::{MoveDeadlineError, Moved, move_deadline_in};
pub use schedule::outbox::{OutboxError, schedule_in};
pub use schedule::{Publisher, ScheduleError, ScheduleManyError};
