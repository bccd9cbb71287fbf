//! Promises that need several servers: a RabbitMQ cluster that loses the leader of a queue, a Postgres that fails over
//! to its standby, under load.
//!
//! Not part of the normal suite; `scripts/test-failover` runs it. It prints its measurements.

mod broker_leader;
mod cluster;
mod database_primary;
mod forwarder;
mod traffic;
