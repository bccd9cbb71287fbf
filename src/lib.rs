//! Closes unpaid orders in Postgres exactly when their time is up, woken by RabbitMQ delayed messages.
//!
//! ```text
//! 1 SCHEDULE ──► DELAY (broker) ──► 3 DELIVER ──► 4 HOLD ──► 5 CLOSE ──► 6 ANNOUNCE
//! schedule/      topology.rs        deliver/      hold.rs    close.rs    announce.rs
//!                                       │ early, far             ▲
//!                                       ▼                        │
//!                                    2 ARM  arm.rs ──► wheel.rs  (back through the broker)
//! ```
//!
//! The order's row decides; a message only wakes the worker. [`worker`] joins the steps, [`desk`] decides what is done
//! next with each alarm, and no step imports another.
//!
//! What a publisher needs is re-exported here: [`Publisher`], [`Settings`], [`OrderId`], [`Deadline`], and what can go
//! wrong: [`BadSettings`], [`BrokerFault`], [`NotScheduled`], [`NotAllScheduled`], [`NotConfirmed`].

pub mod alarm;
pub mod clock;
pub mod config;
pub mod envelope;
pub mod message;
pub mod order;
pub mod topology;
pub mod wheel;

pub mod schedule;

pub mod arm;
pub mod deliver;
pub mod hold;

pub mod close;
pub mod contract;
pub mod desk;
pub mod sweep;

pub mod announce;
pub mod park;

pub mod broker;
pub mod cli;
pub mod confirm;
pub mod database;
pub mod degraded;
pub mod health;
pub mod http;
pub mod inspect;
pub mod metrics;
pub mod patience;
pub mod relay;
pub mod telemetry;
pub mod tls;
pub mod worker;

pub use broker::BrokerFault;
pub use config::{BadSettings, Settings};
pub use confirm::NotConfirmed;
pub use order::{Deadline, Moment, OrderId};
pub use schedule::deadline::{Moved, NotMoved, move_deadline_in};
pub use schedule::outbox::{NotWritten, schedule_in};
pub use schedule::{NotAllScheduled, NotScheduled, Publisher};
