//! Step 2, rearm: declares a slot of the wheel when the first message needs it, so that a deployment has only the queues
//! that its delays use.
//!
//! Remembers what it has declared and asks the broker once for each slot, and which slots do not confirm what is
//! published into them. Publishes no alarm and deletes nothing.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use order_timeout_amqp::envelope::carbon_copy;
use order_timeout_amqp::publisher::{ConfirmedPublisher, Outgoing, PublishError};
use order_timeout_amqp::topology::{Declared, Names, PROBE_TYPE, Slot, Slots, TopologyError, declare_slots};
use order_timeout_core::delay::{Placement, Strategy};
use order_timeout_core::kind::Kind;
use order_timeout_core::message::CONTENT_TYPE;
use tracing::debug;
use uuid::Uuid;

use crate::config::Settings;

/// Declares slots over the publishing connection, which the messages take as well. Clones share what they know.
#[derive(Debug, Clone)]
pub struct SlotDeclarer {
    names: Names,
    /// `None` for a strategy without a wheel.
    slots: Option<Slots>,
    confirmed: ConfirmedPublisher,
    /// The queues that exist, as far as this process knows, and when it declared them.
    known: Arc<Mutex<HashMap<String, Instant>>>,
    /// The queues that last confirmed nothing.
    unconfirmed: Arc<Mutex<BTreeMap<String, Unconfirmed>>>,
    /// Why the broker refused the last declaration.
    refusal: Arc<Mutex<Option<String>>>,
}

/// A queue into which messages were published without a confirm.
#[derive(Debug, Clone, Copy)]
struct Unconfirmed {
    /// Attempts in a row; one that may be over in a moment counts half.
    half_failures: u32,
    last: Instant,
}

impl Unconfirmed {
    fn is_avoided(self) -> bool {
        self.half_failures >= 2
    }
}

/// RabbitMQ 3.10 refuses messages (nack) for a moment after a quorum queue was declared, until it has a leader.
const NACKS_WHEN_NEW_FOR: Duration = Duration::from_secs(5);

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
        Self {
            names: settings.names(),
            slots,
            confirmed,
            known: Arc::default(),
            unconfirmed: Arc::default(),
            refusal: Arc::default(),
        }
    }

    /// Declares the slots among these placements that are not known to exist.
    ///
    /// # Errors
    /// [`SlotError`]; a message for one of these slots may then be returned as unroutable.
    pub async fn require(&self, placements: impl IntoIterator<Item = Placement>) -> Result<(), SlotError> {
        let missing: BTreeMap<String, Slot> = {
            let known = self.known.lock().expect("no holder panics");
            let slots = placements.into_iter().filter_map(|placement| self.slot_of(&placement));
            slots.map(|slot| (slot.queue.name.clone(), slot)).filter(|(name, _)| !known.contains_key(name)).collect()
        };
        if missing.is_empty() {
            return Ok(());
        }
        let connection = self.confirmed.connection().await?;
        let slots: Vec<Slot> = missing.into_values().collect();
        let Declared { queues, fault } = declare_slots(&self.names, &slots, &connection).await;
        debug!(asked = slots.len(), declared = queues.len(), "declared slots of the wheel");
        let now = Instant::now();
        self.known.lock().expect("no holder panics").extend(queues.into_iter().map(|queue| (queue, now)));
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
        slot.is_some_and(|slot| !self.known.lock().expect("no holder panics").contains_key(&slot.queue.name))
    }

    /// Forgets all slots, because a message was returned: one of them was deleted, or the exchange with its bindings.
    pub fn forget(&self) {
        self.known.lock().expect("no holder panics").clear();
    }

    /// What became of a message for this placement, in the attempt that began then.
    pub fn note_result(&self, placement: &Placement, result: &Result<(), PublishError>, began: Instant) {
        // The usual case costs nothing.
        if (result.is_err() || self.has_suspects())
            && let Some(slot) = self.slot_of(placement)
        {
            self.note_result_of(slot.queue.name, result, began);
        }
    }

    fn note_result_of(&self, queue: String, result: &Result<(), PublishError>, began: Instant) {
        match result {
            Ok(()) => _ = self.unconfirmed.lock().expect("no holder panics").remove(&queue),
            // The broker confirmed others.
            Err(PublishError::Unconfirmed(_)) => self.note_failure(queue, 2, began),
            Err(PublishError::Nacked) if self.is_new(&queue) => {}
            // The broker may answer nothing, or the queue elect a new leader: only the second time in a row counts.
            Err(PublishError::TimedOut(_) | PublishError::Nacked) => self.note_failure(queue, 1, began),
            Err(_) => {}
        }
    }

    fn is_new(&self, queue: &str) -> bool {
        let known = self.known.lock().expect("no holder panics");
        known.get(queue).is_some_and(|declared_at| declared_at.elapsed() < NACKS_WHEN_NEW_FOR)
    }

    /// All messages of one attempt fail once, as do attempts at the same time.
    fn note_failure(&self, queue: String, halves: u32, began: Instant) {
        let mut unconfirmed = self.unconfirmed.lock().expect("no holder panics");
        let half_failures = match unconfirmed.get(&queue) {
            Some(known) if known.last >= began => known.half_failures.max(halves),
            Some(known) => known.half_failures.saturating_add(halves),
            None => halves,
        };
        unconfirmed.insert(queue, Unconfirmed { half_failures, last: Instant::now() });
    }

    /// Publishes a probe into each slot that did not confirm, so that it is used again as soon as it confirms. One that was
    /// deleted is declared again when an alarm needs it.
    pub async fn probe(&self) {
        let suspects: Vec<String> = self.unconfirmed.lock().expect("no holder panics").keys().cloned().collect();
        let Some(slots) = self.slots.as_ref().filter(|_| !suspects.is_empty()) else { return };
        let slots: Vec<Slot> = slots.all().filter(|slot| suspects.contains(&slot.queue.name)).collect();
        let began = Instant::now();
        let results = self.confirmed.publish_all(slots.iter().map(probe)).await;
        for (slot, result) in slots.into_iter().zip(results) {
            debug!(queue = slot.queue.name, ?result, "probed a slot that did not confirm");
            if let Err(PublishError::Unroutable(_)) = result {
                self.known.lock().expect("no holder panics").remove(&slot.queue.name);
                self.unconfirmed.lock().expect("no holder panics").remove(&slot.queue.name);
            }
            self.note_result_of(slot.queue.name, &result, began);
        }
    }

    /// Whether any slot did not confirm the last message.
    #[must_use]
    pub fn has_suspects(&self) -> bool {
        !self.unconfirmed.lock().expect("no holder panics").is_empty()
    }

    /// The queue of this placement, if it did not confirm the last message.
    #[must_use]
    pub fn suspect(&self, placement: &Placement) -> Option<String> {
        let queue = self.slot_of(placement)?.queue.name;
        self.unconfirmed.lock().expect("no holder panics").contains_key(&queue).then_some(queue)
    }

    /// Whether this message would wait in a slot that confirms nothing. RabbitMQ leaves a quorum queue without a leader if
    /// it is killed while the queue is declared, and no restart gives it one.
    #[must_use]
    pub fn is_avoided(&self, placement: &Placement) -> bool {
        let unconfirmed = self.unconfirmed.lock().expect("no holder panics");
        !unconfirmed.is_empty()
            && self
                .slot_of(placement)
                .and_then(|slot| unconfirmed.get(&slot.queue.name).copied())
                .is_some_and(Unconfirmed::is_avoided)
    }

    /// Which slots confirm nothing and what to do, for `degraded`.
    #[must_use]
    pub fn why_avoided(&self) -> Option<String> {
        let unconfirmed = self.unconfirmed.lock().expect("no holder panics");
        let avoided = unconfirmed.iter().filter(|(_, slot)| slot.is_avoided());
        let queues: Vec<&str> = avoided.map(|(queue, _)| queue.as_str()).collect();
        let first = queues.first()?;
        Some(format!(
            "{} of the wheel's queues confirm nothing that is published into them: {}; alarms wait in other slots; see `rabbitmq-queues quorum_status{vhost} {first}`; if it has no leader and holds no message, delete it with `rabbitmqctl delete_queue{vhost} {first}`, and the worker declares it again",
            queues.len(),
            queues.iter().take(3).copied().collect::<Vec<_>>().join(", "),
            vhost = self.names.vhost_option(),
        ))
    }

    fn slot_of(&self, placement: &Placement) -> Option<Slot> {
        let Placement::Slot { ring, slot, .. } = placement else { return None };
        self.slots.as_ref()?.find(ring, *slot)
    }
}

/// A message that leaves the slot at once, and that a worker acknowledges.
fn probe(slot: &Slot) -> Outgoing {
    Outgoing {
        exchange: slot.binding.exchange.clone(),
        routing_key: slot.binding.routing_key.clone(),
        body: Vec::new(),
        message_id: Uuid::now_v7().to_string(),
        message_type: PROBE_TYPE.into(),
        content_type: CONTENT_TYPE,
        timestamp_s: 0,
        ttl: Some(Duration::ZERO),
        // A dead letter without a binding would stay in its slot.
        headers: vec![carbon_copy(Names::due_key(&Kind::ORDER))],
        mandatory: true,
        sender_declares_queue: true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn failed_batch_counts_once() {
        let settings = Settings::defaults();
        let slots = SlotDeclarer::new(&settings, ConfirmedPublisher::connect_lazily(&settings.amqp, "slots"));
        let ring = settings.delay.wheel().expect("the defaults have a wheel").rings()[0].name.clone();
        let placement = Placement::Slot { ring, slot: 0, ttl: Duration::from_secs(1) };
        let late = Err(PublishError::TimedOut(Duration::from_secs(5)));
        let first = Instant::now();
        slots.note_result(&placement, &late, first);
        slots.note_result(&placement, &late, first);
        assert!(slots.has_suspects() && !slots.is_avoided(&placement));
        assert_eq!(slots.why_avoided(), None);
        slots.note_result(&placement, &late, Instant::now());
        assert!(slots.is_avoided(&placement));
        slots.note_result(&placement, &Ok(()), Instant::now());
        assert!(!slots.has_suspects());
    }
}
