//! Step 2, rearm: declares a slot of the wheel when the first message needs it, so that a deployment has only the queues
//! that its delays use.
//!
//! Remembers what it has declared and asks the broker once for each slot. Publishes nothing and deletes nothing.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex};

use order_timeout_amqp::publisher::{ConfirmedPublisher, PublishError};
use order_timeout_amqp::topology::{Declared, Names, Slot, Slots, TopologyError, declare_slots};
use order_timeout_core::delay::{Placement, Strategy};
use tracing::debug;

use crate::config::Settings;

/// Declares slots over the publishing connection, which the messages take as well. Clones share what they know.
#[derive(Debug, Clone)]
pub struct SlotDeclarer {
    names: Names,
    /// `None` for a strategy without a wheel.
    slots: Option<Slots>,
    confirmed: ConfirmedPublisher,
    /// The queues that exist, as far as this process knows.
    known: Arc<Mutex<HashSet<String>>>,
    /// Why the broker refused the last declaration.
    refusal: Arc<Mutex<Option<String>>>,
}

/// Why slots could not be declared.
#[derive(Debug, thiserror::Error)]
pub enum SlotError {
    /// There is no usable connection to the broker.
    #[error(transparent)]
    NotConnected(#[from] PublishError),
    /// The broker refuses a declaration.
    #[error(transparent)]
    Topology(#[from] TopologyError),
}

impl SlotError {
    /// Whether no slot could be declared at all, so that trying another is pointless.
    #[must_use]
    pub fn is_broker_wide(&self) -> bool {
        matches!(self, Self::NotConnected(_) | Self::Topology(TopologyError::Failed { .. }))
    }
}

impl SlotDeclarer {
    /// # Panics
    /// If the rings of `settings` do not mesh, which `Settings::validate` refuses.
    #[must_use]
    pub fn new(settings: &Settings, confirmed: ConfirmedPublisher) -> Self {
        let slots = (settings.delay.strategy == Strategy::DeadLetter).then(|| settings.slots());
        Self { names: settings.names(), slots, confirmed, known: Arc::default(), refusal: Arc::default() }
    }

    /// Declares the slots among these placements that are not known to exist.
    ///
    /// # Errors
    /// [`SlotError`]; a message for one of these slots may then be returned as unroutable.
    pub async fn require(&self, placements: impl IntoIterator<Item = Placement>) -> Result<(), SlotError> {
        let missing: BTreeMap<String, Slot> = {
            let known = self.known.lock().expect("no holder panics");
            let slots = placements.into_iter().filter_map(|placement| self.slot_of(&placement));
            slots.map(|slot| (slot.queue.name.clone(), slot)).filter(|(name, _)| !known.contains(name)).collect()
        };
        if missing.is_empty() {
            return Ok(());
        }
        let connection = self.confirmed.connection().await?;
        let slots: Vec<Slot> = missing.into_values().collect();
        let Declared { queues, fault } = declare_slots(&self.names, &slots, &connection).await;
        debug!(asked = slots.len(), declared = queues.len(), "declared slots of the wheel");
        self.known.lock().expect("no holder panics").extend(queues);
        let is_refusal = |fault: &&TopologyError| !matches!(fault, TopologyError::Failed { .. });
        *self.refusal.lock().expect("no holder panics") = fault.as_ref().filter(is_refusal).map(ToString::to_string);
        fault.map_or(Ok(()), |fault| Err(fault.into()))
    }

    /// Why the broker refuses to declare a slot that an alarm needs, for `degraded`.
    #[must_use]
    pub fn why_refused(&self) -> Option<String> {
        self.refusal.lock().expect("no holder panics").clone()
    }

    /// Whether this message waits in a slot that is not known to exist.
    #[must_use]
    pub fn is_unknown(&self, placement: &Placement) -> bool {
        let slot = self.slot_of(placement);
        slot.is_some_and(|slot| !self.known.lock().expect("no holder panics").contains(&slot.queue.name))
    }

    /// Forgets all slots, because a message was returned: one of them was deleted, or the exchange with its bindings.
    pub fn forget(&self) {
        self.known.lock().expect("no holder panics").clear();
    }

    fn slot_of(&self, placement: &Placement) -> Option<Slot> {
        let Placement::Slot { ring, slot, .. } = placement else { return None };
        self.slots.as_ref()?.find(ring, *slot)
    }
}
