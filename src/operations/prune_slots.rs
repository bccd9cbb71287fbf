//! Deletes the wheel's slots that are empty, so that a deployment has only the queues that its delays use.
//!
//! Deletes no other queue, and none that holds a message.

use order_timeout_amqp::connect::{self, BrokerError};
use order_timeout_amqp::topology::{Pruned, Slot, Slots, TopologyError, prunable, prune};
use order_timeout_core::delay::{RingSettings, Strategy};

use crate::config::Settings;

/// Why slots could not be pruned.
#[derive(Debug, thiserror::Error)]
pub enum PruneError {
    /// There is no connection.
    #[error(transparent)]
    Broker(#[from] BrokerError),
    /// The broker refuses to inspect, unbind or delete a queue.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    #[error(
        "delay.strategy is not \"dead-letter\", so this deployment has no wheel; name its former rings with --ring, such as --ring 5s-22"
    )]
    /// There is nothing to prune.
    NoWheel,
}

/// What pruning does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Does {
    /// It says what it would delete.
    Look,
    /// It deletes.
    Delete,
}

/// Prunes the rings of the settings, and `former`: rings that the settings no longer have.
///
/// # Errors
/// [`PruneError`]; what was deleted before it stays deleted.
pub async fn prune_slots(settings: &Settings, former: &[RingSettings], does: Does) -> Result<Pruned, PruneError> {
    let names = settings.names();
    let slots: Vec<Slot> = if settings.delay.strategy == Strategy::DeadLetter {
        let rings = settings.delay.rings.iter().chain(former);
        rings.flat_map(|ring| Slots::of_ring(&names, ring)).collect()
    } else if former.is_empty() {
        return Err(PruneError::NoWheel);
    } else {
        former.iter().flat_map(|ring| Slots::of_ring(&names, ring)).collect()
    };
    let connection = connect::connect(&settings.amqp, "prune").await?;
    let pruned = match does {
        Does::Look => prunable(&names, &slots, &connection).await,
        Does::Delete => prune(&names, &slots, &connection).await,
    };
    connect::close(&connection, settings.amqp.connect_timeout).await;
    Ok(pruned?)
}
