//! The pure part of [order-timeout](https://github.com/order-timeout/order-timeout): what an order, a deadline and an
//! alarm are, where an alarm waits, and the engine that decides what happens to it next.
//!
//! Does no I/O, and every decision is told the time. Two functions read a clock of this machine:
//! [`order::Timestamp::now_by_local_clock`], whose time only a publisher may put into an alarm, and
//! [`clock::DatabaseClock::now`], which reads the monotonic clock. Applications depend on `order-timeout-client`, which
//! re-exports what they need.

pub mod address;
pub mod alarm;
pub mod brake;
pub mod clock;
pub mod delay;
pub mod duration;
pub mod engine;
mod error_chain;
pub mod hold;
pub mod kind;
pub mod message;
pub mod order;
pub mod payment;
pub mod problem;
mod setting;

pub use error_chain::with_causes;
pub use setting::{InvalidSetting, one_of_its_words};
