//! What Postgres alone and the broker alone achieve with a plain client, measured in the same run. A more careful
//! client, or a better moment of a noisy machine, may exceed it.

pub mod broker;
pub mod postgres;
