//! The outboxes: rows that a transaction has committed, published by one worker at a time. `relay.rs` is what both have in
//! common, `alarm_relay.rs` publishes alarms, `event_relay.rs` events with the `trace_contexts.rs` of their alarms.
//! `traced.rs` makes spans of what is published, `destination.rs` is the broker or a webhook. `local.rs` is for a worker without a broker, `reminders.rs` writes events before deadlines, `alarms.rs` is what becomes of alarms.
//!
//! Decides nothing about orders.

pub mod alarm_relay;
pub mod alarms;
pub mod destination;
pub mod event_relay;
pub mod local;
mod pace;
pub mod relay;
pub mod reminders;
pub mod trace_contexts;
mod traced;
