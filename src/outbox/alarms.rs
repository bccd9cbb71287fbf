//! The outbox of alarms: with a broker they are relayed to it; without one they stay until their deadline.
//!
//! Joins the two, so that one loop empties the outboxes; decides nothing.

use std::time::Duration;

use super::alarm_relay::AlarmRelay;
use super::local::LocalOutboxes;
use super::relay::{Backlog, RelayError, Relayed};

/// What is done with alarms.
#[derive(Debug)]
pub enum Alarms {
    /// They are published.
    Relayed(Box<AlarmRelay>),
    /// They stay, because there is no broker.
    Kept(LocalOutboxes),
}

impl Alarms {
    /// Publishes one batch.
    ///
    /// # Errors
    /// As of [`AlarmRelay::round`].
    pub async fn round(&mut self) -> Result<Relayed, RelayError> {
        match self {
            Self::Relayed(relay) => relay.round().await,
            Self::Kept(_) => Ok(Relayed::default()),
        }
    }

    /// What waits to be published.
    ///
    /// # Errors
    /// As of [`AlarmRelay::backlog`].
    pub async fn backlog(&self) -> Result<Backlog, RelayError> {
        match self {
            Self::Relayed(relay) => relay.backlog().await,
            Self::Kept(_) => Ok(Backlog { age: Duration::ZERO, new_age: Duration::ZERO, last_sent: None }),
        }
    }

    /// Deletes some of the old rows; returns whether there are more. Without a broker, an alarm whose deadline has passed
    /// is marked first.
    ///
    /// # Errors
    /// sqlx's.
    pub async fn forget_old(&self) -> Result<bool, sqlx::Error> {
        match self {
            Self::Relayed(relay) => relay.forget_old().await,
            Self::Kept(outboxes) => outboxes.clean_up().await,
        }
    }
}
