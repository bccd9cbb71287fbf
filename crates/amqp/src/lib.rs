//! RabbitMQ for [order-timeout](https://github.com/order-timeout/order-timeout): connections that explain a refusal in
//! one sentence, publishing with confirms, the routes of alarms, and the declared topology.
//!
//! Knows alarms as messages, no order and no decision. Applications depend on `order-timeout-client`, which re-exports
//! what they need. Every async function must run in a tokio runtime with its I/O and time drivers; outside of one it
//! panics.

pub mod connect;
pub mod envelope;
mod nesting;
pub mod publisher;
mod settings;
pub mod tls;
pub mod topology;

pub use settings::{ADDRESS_FORM, ADDRESS_SCHEMES, AmqpSettings};
