//! The promises of order-timeout, one file each, all against a real RabbitMQ and a real Postgres.

mod support;

mod acknowledgement_timeout;
mod announce;
mod arming;
mod broker_away;
mod broker_restart;
mod close_on_time;
mod command_line;
mod compose;
mod crash;
mod database_away;
mod deadline;
mod degraded_database;
mod delayed_exchange;
mod health;
mod hostile;
mod least_privilege;
mod outbox;
mod outcomes;
mod own_orders;
mod parked;
mod plan;
mod publisher;
mod readme;
mod redelivery;
mod secrets;
mod shards;
mod sweep;
mod tidy;
mod tls;
mod topology;
