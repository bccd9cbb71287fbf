//! What Postgres alone and the broker alone do for a plain client, measured in the same run. Who takes more care than a
//! plain client, or has a better moment of a noisy machine, may come out above it.

pub mod broker;
pub mod postgres;
