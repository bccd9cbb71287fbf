//! Where an alarm waits until shortly before its deadline: in a lane, in a slot of the wheel, or in the delayed
//! exchange.
//!
//! A publisher decides it with [`KindLanes`], the worker with [`wheel::Wheel`]. The result is a [`Placement`], without any
//! name of an exchange or a queue; `order-timeout-amqp` turns it into a route. Pure: settings, a deadline and a time go
//! in.

mod lanes;
mod settings;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod wheel;

use std::time::Duration;

use serde::Deserialize;

pub use lanes::KindLanes;
pub use settings::{DelaySettings, Lane, LaneError, RingSettings, duration_name};

/// How an alarm is delayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    /// A TTL for each message, in a queue that dead-letters into the processing queue.
    DeadLetter,
    /// An exchange of type `x-delayed-message`. Deprecated: [`Strategy::deprecation`].
    DelayedExchange,
    /// No alarm at all: the worker reads deadlines from the database shortly before they pass. Needs no broker.
    Database,
}

impl Strategy {
    /// Its word in the settings.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::DeadLetter => "dead-letter",
            Self::DelayedExchange => "delayed-exchange",
            Self::Database => "database",
        }
    }

    /// Whether alarms go through RabbitMQ.
    #[must_use]
    pub const fn needs_broker(self) -> bool {
        !matches!(self, Self::Database)
    }

    /// Why this strategy is deprecated and what to do, in one sentence; `None` if it is not.
    #[must_use]
    pub fn deprecation(self) -> Option<&'static str> {
        match self {
            Self::DeadLetter | Self::Database => None,
            Self::DelayedExchange => Some(
                "delay.strategy = \"delayed-exchange\" is deprecated: the repository of its plugin is archived, and no release runs on RabbitMQ 4.3; set \"dead-letter\", as docs/FROM-THE-PLUGIN.md describes",
            ),
        }
    }
}

/// Where an alarm waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// Nowhere: it goes straight to the processing queue.
    Due,
    /// In the inbox, until a worker places it into the wheel by the database's clock.
    Inbox,
    /// In one queue of a lane.
    Lane {
        /// The lane's name, such as `30m`.
        lane: String,
        /// The queue's number within the lane.
        shard: u8,
        /// Until it is dead-lettered into the processing queue.
        ttl: Duration,
    },
    /// In one slot of a ring of the wheel.
    Slot {
        /// The ring's name, such as `5s-22`.
        ring: String,
        /// The slot's number within the ring.
        slot: u16,
        /// Until it is dead-lettered: from the finest ring into the processing queue, else into the inbox.
        ttl: Duration,
    },
    /// In the delayed exchange for this long.
    DelayedExchange(Duration),
}
