//! Deletes slots of the wheel that are empty. A worker declares a slot again when the next message needs it.
//!
//! Deletes no queue in which a message was seen: quorum queues refuse `if-empty`, so a slot is first unbound, then given
//! time for messages on their way, and deleted only if it is empty then. Two messages are not seen: one that a worker,
//! which has bound the slot again meanwhile, publishes between the last look and the deletion, and one that the broker is
//! just dead-lettering. The sweep closes their orders.

use std::time::Duration;

use lapin::Connection;
use lapin::options::{BasicGetOptions, QueueDeleteOptions};
use lapin::types::FieldTable;

use super::inspect::find_queue;
use super::{Names, Object, Slot, TopologyError, bind, explain, open_channel};
use crate::connect::reply_code;

/// How long messages that were routed before the binding was removed may take to reach their queue: more than a
/// publisher's confirm takes on a busy broker.
const ON_THEIR_WAY: Duration = Duration::from_secs(2);

/// What became of the slots.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Queues that were empty and are deleted.
    pub deleted: Vec<String>,
    /// Queues that hold messages, with their number, and stay as they are.
    pub kept: Vec<(String, u32)>,
    /// Queues whose messages cannot be seen, with the reason: one without a leader does not keep the others.
    pub unknown: Vec<(String, String)>,
}

/// What [`prune`] would do now: `deleted` is what it would delete.
///
/// # Errors
/// [`TopologyError`] if the connection is lost.
pub async fn prunable(names: &Names, slots: &[Slot], connection: &Connection) -> Result<Pruned, TopologyError> {
    let (empty, mut pruned) = sort(names, slots, connection).await?;
    pruned.deleted = empty.into_iter().map(|slot| slot.queue.name.clone()).collect();
    Ok(pruned)
}

/// Those that are empty, and the others.
async fn sort<'a>(
    names: &Names,
    slots: &'a [Slot],
    connection: &Connection,
) -> Result<(Vec<&'a Slot>, Pruned), TopologyError> {
    let (mut empty, mut pruned) = (Vec::new(), Pruned::default());
    for slot in slots {
        let queue = slot.queue.name.clone();
        match messages_in(slot, connection).await {
            Ok(None) => {}
            Ok(Some(0)) => empty.push(slot),
            Ok(Some(messages)) => pruned.kept.push((queue, messages)),
            Err(error) => {
                let why = explain(names, Object::Queue(&queue), &error);
                if !connection.status().connected() {
                    return Err(why);
                }
                pruned.unknown.push((queue, why.to_string()));
            }
        }
    }
    Ok((empty, pruned))
}

/// Deletes those of these slots that exist and are empty.
///
/// # Errors
/// [`TopologyError`] for the first queue that the broker does not let this user unbind or delete, or if the connection is lost.
pub async fn prune(names: &Names, slots: &[Slot], connection: &Connection) -> Result<Pruned, TopologyError> {
    let failed = |object: Object<'_>, error: &lapin::Error| explain(names, object, error);
    let (empty, mut pruned) = sort(names, slots, connection).await?;
    let channel = open_channel(connection).await?;
    for slot in &empty {
        let (queue, from) = (slot.queue.name.as_str().into(), slot.binding.exchange.as_str().into());
        let unbound =
            channel.queue_unbind(queue, from, slot.binding.routing_key.as_str().into(), FieldTable::default());
        unbound.await.map_err(|error| failed(Object::Binding(&slot.binding), &error))?;
    }
    if !empty.is_empty() {
        tokio::time::sleep(ON_THEIR_WAY).await;
    }
    for slot in empty {
        let name = &slot.queue.name;
        match messages_in(slot, connection).await.map_err(|error| failed(Object::Queue(name), &error))? {
            None => {}
            Some(0) => {
                let deleted = channel.queue_delete(name.as_str().into(), QueueDeleteOptions::default()).await;
                deleted.map_err(|error| failed(Object::Queue(name), &error))?;
                pruned.deleted.push(name.clone());
            }
            Some(messages) => {
                // It was written meanwhile, and stays in use.
                bind(&channel, &slot.binding).await.map_err(|error| failed(Object::Binding(&slot.binding), &error))?;
                pruned.kept.push((name.clone(), messages));
            }
        }
    }
    let _closed_or_gone = channel.close(reply_code::CONTENT_OK, "pruned".into()).await;
    Ok(pruned)
}

/// `None` if the queue does not exist.
async fn messages_in(slot: &Slot, connection: &Connection) -> lapin::Result<Option<u32>> {
    let Some(seen) = find_queue(connection, &slot.queue.name).await? else { return Ok(None) };
    if seen.ready > 0 {
        return Ok(Some(seen.ready));
    }
    // RabbitMQ also reports 0 for a queue without a leader; reading from that one fails.
    let channel = connection.create_channel().await?;
    let got = channel.basic_get(slot.queue.name.as_str().into(), BasicGetOptions { no_ack: false }).await?;
    let messages = u32::from(got.is_some());
    // Returns what was read.
    channel.close(reply_code::CONTENT_OK, "looked".into()).await?;
    Ok(Some(messages))
}
