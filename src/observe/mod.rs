//! What operators see: logs, metrics, health, and why a worker is degraded. `inspect/` looks for causes; `recorder.rs` turns inputs into counts, `close_log.rs` closes into a log
//! line, `last_hour.rs` into figures for the page, `served_kinds.rs` lists what is recorded of each kind, `zones.rs` compares
//! the deadlines of alarms and rows, `traces/` exports spans.
//!
//! Observes; changes nothing about an order or an alarm.

mod close_log;
pub mod degraded;
pub mod health;
pub mod inspect;
pub mod last_hour;
pub mod logging;
pub mod metrics;
pub(crate) mod recorder;
pub mod served_kinds;
pub mod traces;
mod zones;
