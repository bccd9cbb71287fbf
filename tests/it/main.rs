//! The promises of order-timeout, one file each, all against a real RabbitMQ and a real Postgres.

mod support;

mod announce;
mod broker_restart;
mod close_on_time;
mod command_line;
mod compose;
mod crash;
mod delayed_exchange;
mod least_privilege;
mod outcomes;
mod parked;
mod publisher;
mod tidy;
mod topology;
