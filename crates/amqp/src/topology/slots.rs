//! The wheel's queues: which slot has which queue, arguments and binding, and declaring some of them.
//!
//! A worker declares a slot when the first message needs it, so that a deployment has only the queues that its delays
//! use. Deletes nothing.

use std::time::Duration;

use lapin::{Channel, Connection};
use order_timeout_core::delay::wheel::Wheel;

use super::{
    Binding, Names, Object, Queue, TopologyError, bind, dead_lettering, declare_queue, explain, open_channel, to_queue,
    with_queue_ttl,
};
use crate::connect::reply_code;

/// The timeout of declaring slots. A batch of alarms needs few, and waits for them.
const DECLARE_TIMEOUT: Duration = Duration::from_secs(10);

/// One slot of the wheel: a queue, and the binding through which it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// A quorum queue with a TTL, without consumers.
    pub queue: Queue,
    /// From [`Names::wheel`], with the slot's own routing key.
    pub binding: Binding,
}

/// All slots of a wheel.
#[derive(Debug, Clone)]
pub struct Slots {
    names: Names,
    wheel: Wheel,
}

impl Slots {
    /// The slots of this wheel under these names.
    #[must_use]
    pub fn new(names: &Names, wheel: Wheel) -> Self {
        Self { names: names.clone(), wheel }
    }

    pub(super) fn names(&self) -> &Names {
        &self.names
    }

    /// Every slot of every ring, finest ring first.
    pub fn all(&self) -> impl Iterator<Item = Slot> {
        let rings = self.wheel.rings().iter();
        rings.flat_map(|ring| (0..ring.slots).filter_map(|slot| self.find(&ring.name, slot)))
    }

    /// The slot of this number in the ring of this name; `None` if the wheel has none.
    #[must_use]
    pub fn find(&self, ring: &str, slot: u16) -> Option<Slot> {
        let index = self.wheel.rings().iter().position(|one| one.name == ring)?;
        let ring = self.wheel.rings().get(index).filter(|ring| slot < ring.slots)?;
        // Alarms of coarse slots go through the inbox into a finer ring, so that they never block an alarm that is due.
        let exchange = if index == 0 { self.names.due() } else { self.names.schedule() };
        // Without a routing key of its own: all kinds share the slot, and each alarm names its kind's key in the header CC,
        // which a dead letter keeps. It matches nothing on the wheel's exchange. The inbox is a fanout and ignores keys.
        let arguments = with_queue_ttl(dead_lettering(&exchange), ring.span());
        let name = self.names.slot_queue(&ring.name, slot);
        let binding = to_queue(self.names.wheel(), name.clone(), &Names::slot_key(&ring.name, slot));
        Some(Slot { queue: Queue { name, arguments }, binding })
    }
}

/// Which slots were declared, and why not the others.
#[derive(Debug, Default)]
pub struct Declared {
    /// The names of the queues that exist and are bound.
    pub queues: Vec<String>,
    /// The first slot that failed.
    pub fault: Option<TopologyError>,
}

/// Declares these slots and their bindings, within 10 seconds. Idempotent. A slot that the broker refuses does not keep
/// the others from being declared.
pub async fn declare_slots(names: &Names, slots: &[Slot], connection: &Connection) -> Declared {
    let mut declared = Declared::default();
    if tokio::time::timeout(DECLARE_TIMEOUT, declare_each(names, slots, connection, &mut declared)).await.is_err() {
        let why = format!(
            "the broker did not answer within {DECLARE_TIMEOUT:?}; is it out of file handles (rabbitmqctl status)?"
        );
        declared.fault.get_or_insert(TopologyError::Failed { object: "a slot of the wheel".into(), why });
    }
    declared
}

async fn declare_each(names: &Names, slots: &[Slot], connection: &Connection, declared: &mut Declared) {
    let mut open = None;
    for slot in slots {
        let channel = match open.take() {
            Some(channel) => channel,
            None => match open_channel(connection).await {
                Ok(channel) => channel,
                Err(fault) => {
                    declared.fault.get_or_insert(fault);
                    return;
                }
            },
        };
        match declare_slot(names, slot, &channel).await {
            Ok(()) => {
                declared.queues.push(slot.queue.name.clone());
                open = Some(channel);
            }
            // The refusal has closed the channel.
            Err(fault) => {
                declared.fault.get_or_insert(fault);
            }
        }
    }
    if let Some(channel) = open {
        let _closed_or_gone = channel.close(reply_code::CONTENT_OK, "declared".into()).await;
    }
}

async fn declare_slot(names: &Names, slot: &Slot, channel: &Channel) -> Result<(), TopologyError> {
    let declared = declare_queue(channel, &slot.queue, false).await;
    declared.map_err(|error| explain(names, Object::Queue(&slot.queue.name), &error))?;
    let bound = bind(channel, &slot.binding).await;
    bound.map_err(|error| explain(names, Object::Binding(&slot.binding), &error))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use order_timeout_core::delay::wheel::Ring;

    use super::*;
    use crate::topology::Argument;

    fn slots() -> Slots {
        let ring = |name: &str, unit_s, slots| Ring {
            name: name.into(),
            unit: Duration::from_secs(unit_s),
            slots,
            early: Duration::ZERO,
        };
        let wheel = Wheel::new(vec![ring("5s-22", 5, 22), ring("1m-15", 60, 15)]).unwrap();
        Slots::new(&Names::new("order"), wheel)
    }

    fn argument(slot: &Slot, name: &str) -> Argument {
        slot.queue.arguments[name].clone()
    }

    #[test]
    fn slot_releases_into_next_finer_step() {
        let fine = slots().find("5s-22", 21).unwrap();
        assert_eq!(fine.queue.name, "order.wheel.5s-22.21");
        assert_eq!(argument(&fine, "x-dead-letter-exchange"), Argument::Text("order.due".into()));
        assert_eq!(argument(&fine, "x-message-ttl"), Argument::Number(110_000));
        assert!(!fine.queue.arguments.contains_key("x-dead-letter-routing-key"), "{fine:?}");
        let coarse = slots().find("1m-15", 0).unwrap();
        assert_eq!(
            (coarse.binding.exchange.as_str(), coarse.binding.routing_key.as_str()),
            ("order.wheel", "1m-15.00")
        );
        assert_eq!(argument(&coarse, "x-dead-letter-exchange"), Argument::Text("order.schedule".into()));
        assert_eq!(argument(&coarse, "x-dead-letter-strategy"), Argument::Text("at-least-once".into()));
    }

    #[test]
    fn all_slots_are_distinct() {
        let mut names: Vec<String> = slots().all().map(|slot| slot.queue.name).collect();
        assert_eq!(names.len(), 37);
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 37);
        assert_eq!((slots().find("5s-22", 22), slots().find("5s", 0)), (None, None));
    }
}
