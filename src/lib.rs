//! Closes unpaid orders in Postgres exactly when their time is up, woken by RabbitMQ delayed messages: the worker.
//!
//! ```text
//! 1 SCHEDULE ──► 2 DELAY (broker) ──► 3 DELIVER ──► 4 HOLD ──► 5 CLOSE ────────► 6 ANNOUNCE
//! order-timeout- delay queues         deliver/      core       effects/close.rs  outbox/event_relay.rs
//! client             ▲                    │ early, far            ▲
//!                    └── REARM ◄──────────┘                       │
//!                        effects/rearm.rs            the safety net: effects/sweep.rs
//! ```
//!
//! The order's row decides; a message only wakes the worker. [`runtime`] connects the steps, `order-timeout-core` decides
//! what happens next with each alarm, and no step imports another. Services that schedule orders depend on
//! `order-timeout-client` instead.

pub mod config;

pub mod deliver;
pub mod effects;
pub mod handler;
pub mod outbox;
pub mod runtime;

pub mod cli;
mod give_way;
pub mod http;
pub mod loop_backoff;
pub mod mapping;
pub mod observe;
pub mod operations;
pub mod postgres;
pub mod sanitize;

pub use config::{Settings, SettingsError};
pub use runtime::{StartError, Worker};
