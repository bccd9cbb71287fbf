//! The outboxes: rows that a transaction has committed, published by one worker at a time. `relay.rs` is what both have in
//! common, `alarm_relay.rs` publishes alarms, `event_relay.rs` events with the `trace_contexts.rs` of their alarms.
//! `traced.rs` makes spans of what is published, `destination.rs` is what receives it. `reminders.rs` writes events before
//! deadlines.
//!
//! Decides nothing about orders.

pub mod alarm_relay;
pub mod destination;
pub mod event_relay;
mod pace;
pub mod relay;
pub mod reminders;
pub mod trace_contexts;
mod traced;
