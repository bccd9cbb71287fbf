//! Every exchange, queue, binding and argument: declared and verified here, in one place. `names.rs` has their names,
//! `error.rs` why one could not be declared, `slots.rs` the wheel's queues, which are declared when they are needed,
//! `definitions_file.rs` writes the rest as a RabbitMQ definitions file, `inspect.rs` checks for a worker whether they
//! exist, and `publishing.rs` for a publisher.
//!
//! Never deletes an exchange or a queue: if one exists with other arguments, the error names it and says how to migrate. It
//! removes only the bindings of another number of shards, which would deliver every alarm twice.

mod definitions_file;
mod error;
mod inspect;
mod names;
mod publishing;
mod slots;

use std::collections::BTreeMap;
use std::time::Duration;

use lapin::options::{
    ExchangeBindOptions, ExchangeDeclareOptions, ExchangeUnbindOptions, QueueBindOptions, QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, Connection, ExchangeKind};
use order_timeout_core::delay::{KindLanes, Lane, Strategy};
use order_timeout_core::kind::Kind;
use serde::Serialize;

use crate::connect::{reply, reply_code};

pub use error::TopologyError;
use error::{Object, explain};
pub use inspect::{Comparison, Head, PROBE_TYPE, SeenQueue, peek};
pub use names::{DUE_KEY, Names, in_shell};
pub use publishing::require_alarm_exchanges;
pub use slots::{Declared, Slot, Slots, declare_slots};

/// How many buckets of the consistent hash belong to one queue: the same for each.
const SHARD_WEIGHT: &str = "1";
/// The routing key of dead letters from the inbox and the processing queue.
const PARKED_KEY: &str = "parked";

/// A queue's argument.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Argument {
    /// Sent as an AMQP long string.
    Text(String),
    /// Sent as a signed 64-bit integer, such as `x-message-ttl` in milliseconds.
    Number(i64),
}

/// An exchange to declare. Durable, like every object here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exchange {
    /// As in [`Names`], with the namespace.
    pub name: String,
    /// `direct`, `fanout`, `topic`, `x-consistent-hash` or `x-delayed-message`.
    pub kind: &'static str,
    /// Those of the plugins' exchange types; empty for the others.
    pub arguments: BTreeMap<&'static str, Argument>,
}

/// A queue to declare. Always a durable quorum queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Queue {
    /// As in [`Names`], with the namespace.
    pub name: String,
    /// All of its arguments, `x-queue-type` included.
    pub arguments: BTreeMap<&'static str, Argument>,
}

/// The destination of a binding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// A queue's name.
    Queue(String),
    /// An exchange's name: exchange-to-exchange bindings are RabbitMQ's extension.
    Exchange(String),
}

impl Destination {
    /// Of the queue or the exchange; one name may belong to both.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Queue(name) | Self::Exchange(name) => name,
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Self::Queue(_) => "queue",
            Self::Exchange(_) => "exchange",
        }
    }
}

/// A binding to declare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// The source.
    pub exchange: String,
    /// Where the source routes a matching message.
    pub destination: Destination,
    /// Empty where a fanout ignores it; the weight of a queue on `x-consistent-hash`.
    pub routing_key: String,
}

/// All objects of one deployment but for the wheel's queues ([`Slots`]). The processing side is first, so that no message is dead-lettered to a missing
/// exchange while the rest is being declared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Declared first, in this order.
    pub exchanges: Vec<Exchange>,
    /// Declared after the exchanges, in this order.
    pub queues: Vec<Queue>,
    /// Declared last, in this order.
    pub bindings: Vec<Binding>,
    /// Bindings of another number of shards; removed after the others exist.
    outdated: Vec<Binding>,
    /// The kind of each queue that is not shared by all kinds.
    owners: BTreeMap<String, Kind>,
    /// Queues that are only verified.
    consumed: Vec<String>,
    /// Queues from which workers of one kind take what is due.
    processing: Vec<String>,
    names: Names,
}

/// The kind that a binding belongs to. Bindings between exchanges are the default kind's: they lead to its shards.
fn owner_of<'a>(owners: &'a BTreeMap<String, Kind>, binding: &Binding) -> Option<&'a Kind> {
    match &binding.destination {
        Destination::Queue(queue) => owners.get(queue),
        Destination::Exchange(_) => owners.values().find(|kind| kind.is_default()),
    }
}

impl Topology {
    /// What these settings ask for; `shards` is the number of processing queues of the default kind, 1 to [`MAX_SHARDS`].
    /// Expects validated settings. It is the default kind whose queues are looked at ([`Topology::seen_by`]).
    #[must_use]
    pub fn new(names: &Names, lanes: &KindLanes, strategy: Strategy, shards: u8) -> Self {
        let mut topology = Self {
            exchanges: Vec::new(),
            queues: Vec::new(),
            bindings: Vec::new(),
            outdated: Vec::new(),
            owners: BTreeMap::new(),
            consumed: Vec::new(),
            processing: (0..shards).map(|shard| names.shard(shard)).collect(),
            names: names.clone(),
        };
        topology.add_processing_side(names, shards);
        let others: Vec<&Kind> = lanes.iter().map(|(kind, _)| kind).filter(|kind| !kind.is_default()).collect();
        for kind in &others {
            topology.add_queue_of_kind(names, kind);
        }
        match strategy {
            Strategy::DeadLetter => {
                topology.exchange(names.delay(), "direct");
                for (kind, delay) in lanes.iter() {
                    topology.add_lanes(names, kind, &delay.lanes, delay.lane_shards);
                }
                topology.exchange(names.wheel(), "direct");
            }
            Strategy::DelayedExchange => topology.add_delayed_exchange(names, shards, &others),
            Strategy::Database => {}
        }
        topology
    }

    /// What a worker of this kind looks at: the shared objects and the kind's own, and of the processing queues only the
    /// kind's.
    #[must_use]
    pub fn seen_by(mut self, kind: &Kind) -> Self {
        if !kind.is_default() {
            self.processing = vec![self.names.timeout_of(kind)];
        }
        self.only(|owner| owner.is_none_or(|owner| owner == kind))
    }

    /// The objects that all kinds share.
    #[must_use]
    pub fn shared(&self) -> Self {
        self.clone().only(|owner| owner.is_none())
    }

    /// The objects that only this kind has. They need the shared ones.
    #[must_use]
    pub fn of_kind(&self, kind: &Kind) -> Self {
        let own = self.clone().only(|owner| owner == Some(kind));
        Self { exchanges: Vec::new(), ..own }
    }

    /// All exchanges, and the queues and bindings with such an owner.
    fn only(mut self, is_wanted: impl Fn(Option<&Kind>) -> bool) -> Self {
        let owners = &self.owners;
        self.queues.retain(|queue| is_wanted(owners.get(&queue.name)));
        let is_wanted_binding = |binding: &Binding| is_wanted(owner_of(owners, binding));
        self.bindings.retain(is_wanted_binding);
        self.outdated.retain(is_wanted_binding);
        self
    }

    fn add_processing_side(&mut self, names: &Names, shards: u8) {
        self.exchange(names.events(), "topic");
        self.exchange(names.parked(), "fanout");
        self.exchange(names.due(), "direct");
        // Fanout: publishers in other languages need no routing key.
        self.exchange(names.schedule(), "fanout");
        self.queue(names.parked(), quorum(&[("x-delivery-limit", Argument::Number(DELIVERY_LIMIT))]));
        (0..shards).for_each(|shard| self.queue_of(&Kind::ORDER, names.shard(shard), consumed(names)));
        self.queue(names.schedule(), consumed(names));
        self.bind(names.parked(), names.parked(), PARKED_KEY);
        self.bind(names.schedule(), names.schedule(), "");
        if shards > 1 {
            // By message id: all due messages have the same routing key, and a dead letter keeps its properties.
            let hashed_by = BTreeMap::from([("hash-property", Argument::Text("message_id".into()))]);
            self.exchanges.push(Exchange { name: names.shards(), kind: CONSISTENT_HASH, arguments: hashed_by });
            (0..shards).for_each(|shard| self.bind(names.shards(), names.shard(shard), SHARD_WEIGHT));
            // Queues of a larger number of shards, which workers may not consume any more.
            let unwanted = (shards..MAX_SHARDS).map(|shard| to_queue(names.shards(), names.shard(shard), SHARD_WEIGHT));
            self.outdated.extend(unwanted);
        }
        self.bind_to_processing(names.due(), names, shards);
    }

    /// One processing queue for each kind besides the default one: a kind's flood or failure fills only its own.
    fn add_queue_of_kind(&mut self, names: &Names, kind: &Kind) {
        self.queue_of(kind, names.timeout_of(kind), consumed(names));
        self.bind(names.due(), names.timeout_of(kind), &Names::due_key(kind));
    }

    /// Binds directly to the only processing queue, or to the exchange that distributes over the shards; never both.
    fn bind_to_processing(&mut self, exchange: String, names: &Names, shards: u8) {
        let to = |destination| Binding { exchange: exchange.clone(), destination, routing_key: DUE_KEY.to_owned() };
        let (direct, sharded) = (to(Destination::Queue(names.timeout())), to(Destination::Exchange(names.shards())));
        let (wanted, outdated) = if shards > 1 { (sharded, direct) } else { (direct, sharded) };
        self.bindings.push(wanted);
        self.outdated.push(outdated);
    }

    fn add_lanes(&mut self, names: &Names, kind: &Kind, lanes: &[Lane], shards: u8) {
        for lane in lanes {
            for shard in 0..shards {
                let queue = names.lane_queue(kind, &lane.name, shard);
                let to_processing = dead_lettering_by_key(&names.due(), &Names::due_key(kind));
                self.queue_of(kind, queue.clone(), with_queue_ttl(to_processing, lane.longest_ttl()));
                self.bind(names.delay(), queue.clone(), &Names::lane_key(kind, &lane.name, shard));
                if shard == 0 {
                    // For publishers that do not shard. To one queue only: a key bound to four delivers four copies.
                    self.bind(names.delay(), queue, &Names::whole_lane_key(kind, &lane.name));
                }
            }
        }
    }

    fn add_delayed_exchange(&mut self, names: &Names, shards: u8, others: &[&Kind]) {
        self.exchanges.push(Exchange {
            name: names.delayed(),
            kind: DELAYED_MESSAGE,
            arguments: BTreeMap::from([("x-delayed-type", Argument::Text("direct".into()))]),
        });
        self.bind_to_processing(names.delayed(), names, shards);
        for kind in others {
            self.bind(names.delayed(), names.timeout_of(kind), &Names::due_key(kind));
        }
    }

    fn exchange(&mut self, name: String, kind: &'static str) {
        self.exchanges.push(Exchange { name, kind, arguments: BTreeMap::new() });
    }

    fn queue(&mut self, name: String, arguments: BTreeMap<&'static str, Argument>) {
        self.queues.push(Queue { name, arguments });
    }

    fn queue_of(&mut self, kind: &Kind, name: String, arguments: BTreeMap<&'static str, Argument>) {
        self.owners.insert(name.clone(), kind.clone());
        self.queue(name, arguments);
    }

    fn bind(&mut self, exchange: String, queue: String, routing_key: &str) {
        self.bindings.push(to_queue(exchange, queue, routing_key));
    }

    /// The same objects, but these queues are only verified, because they have consumers. If a consumed queue is
    /// deleted, it must not be declared again before its consumer is cancelled: RabbitMQ 3 tries to consume again for
    /// the client, and if it finds the queue, it forgets that it did (rabbit_channel.erl,
    /// `handle_consuming_queue_down_or_eol`). Such a consumer exists and receives nothing.
    #[must_use]
    pub fn but_for_consumed(self, consumed: Vec<String>) -> Self {
        Self { consumed, ..self }
    }

    /// Declares what is missing and verifies what exists, within [`DECLARE_TIMEOUT`]. Idempotent. An error leaves what
    /// was declared before it.
    ///
    /// # Errors
    /// [`TopologyError`] for the first object that fails; it names the object.
    pub async fn declare(&self, connection: &Connection) -> Result<(), TopologyError> {
        // A broker out of file handles accepts a declaration and never answers it.
        match tokio::time::timeout(DECLARE_TIMEOUT, self.declare_all(connection)).await {
            Ok(declared) => declared,
            Err(_) => Err(TopologyError::Failed {
                object: "the queues".into(),
                why: format!(
                    "the broker did not answer within {DECLARE_TIMEOUT:?}; is it out of file handles (rabbitmqctl status)?"
                ),
            }),
        }
    }

    /// Declares the shared objects, then those of each kind. One kind's fault stops no other's.
    ///
    /// # Errors
    /// [`TopologyError`] for the first shared object that fails. The result has one for each kind.
    pub async fn declare_by_kind(
        &self,
        connection: &Connection,
    ) -> Result<BTreeMap<Kind, Result<(), TopologyError>>, TopologyError> {
        self.shared().declare(connection).await?;
        let mut declared = BTreeMap::new();
        for kind in self.owners.values() {
            if !declared.contains_key(kind) {
                let own = self.of_kind(kind);
                let mut result = own.declare(connection).await;
                // The end of an earlier channel: the client may report it to the next one, which has the same number.
                for _ in 1..MOST_TRIES {
                    if !result.as_ref().is_err_and(TopologyError::is_about_another_object) {
                        break;
                    }
                    result = own.declare(connection).await;
                }
                declared.insert(kind.clone(), result);
            }
        }
        Ok(declared)
    }

    async fn declare_all(&self, connection: &Connection) -> Result<(), TopologyError> {
        let channel = open_channel(connection).await?;
        for exchange in &self.exchanges {
            self.declare_exchange(&channel, exchange).await?;
        }
        for queue in &self.queues {
            let passive = self.consumed.contains(&queue.name);
            let declared = declare_queue(&channel, queue, passive).await;
            declared.map_err(|error| self.explain(Object::Queue(&queue.name), &error))?;
        }
        for binding in &self.bindings {
            bind(&channel, binding).await.map_err(|error| self.explain(Object::Binding(binding), &error))?;
        }
        // Last: for a moment there are two routes, never none.
        for binding in &self.outdated {
            unbind(&channel, binding).await.map_err(|error| self.explain(Object::Binding(binding), &error))?;
        }
        let _closed_or_gone = channel.close(reply_code::CONTENT_OK, "declared".into()).await;
        Ok(())
    }

    async fn declare_exchange(&self, channel: &Channel, exchange: &Exchange) -> Result<(), TopologyError> {
        let kind = match exchange.kind {
            "direct" => ExchangeKind::Direct,
            "fanout" => ExchangeKind::Fanout,
            "topic" => ExchangeKind::Topic,
            other => ExchangeKind::Custom(other.to_owned()),
        };
        let options = ExchangeDeclareOptions { durable: true, ..Default::default() };
        let declared =
            channel.exchange_declare(exchange.name.as_str().into(), kind, options, table(&exchange.arguments)).await;
        let Err(error) = declared else { return Ok(()) };
        // An unknown exchange type is 503 and ends the connection up to 3.13; from 4.0 it is 406 and ends the channel.
        let type_is_missing = reply(&error).is_some_and(|(code, text)| {
            code == reply_code::COMMAND_INVALID
                || text.contains("unknown exchange type")
                || text.contains("invalid exchange type")
        });
        Err(match exchange.kind {
            DELAYED_MESSAGE if type_is_missing => TopologyError::NoDelayedExchange { why: error.to_string() },
            CONSISTENT_HASH if type_is_missing => TopologyError::NoHashExchange { why: error.to_string() },
            _ => self.explain(Object::Exchange(&exchange.name), &error),
        })
    }

    fn explain(&self, object: Object<'_>, error: &lapin::Error) -> TopologyError {
        explain(&self.names, object, error)
    }
}

/// How often one kind's objects are declared again because of the end of another channel.
const MOST_TRIES: u32 = 10;
/// The most processing queues: each is a channel of every worker that consumes it.
pub const MAX_SHARDS: u8 = 64;

/// The timeout of declaring everything; 64 lanes of 16 queues take some seconds on a fast machine.
pub const DECLARE_TIMEOUT: Duration = Duration::from_secs(60);

/// How often an alarm may be returned before the broker dead-letters it. A million, because `attempt` is our limit: −1
/// dead-letters at the first return on 3.10, and without the argument 4.x does so after twenty lost connections.
const DELIVERY_LIMIT: i64 = 1_000_000;

/// Exchange types of plugins: one that comes with RabbitMQ and is not enabled, and one that does not.
const CONSISTENT_HASH: &str = "x-consistent-hash";
const DELAYED_MESSAGE: &str = "x-delayed-message";

/// Quorum: replicated, and what is confirmed has been written to disk by a majority.
fn quorum(more: &[(&'static str, Argument)]) -> BTreeMap<&'static str, Argument> {
    let mut arguments = BTreeMap::from([("x-queue-type", Argument::Text("quorum".into()))]);
    arguments.extend(more.iter().cloned());
    arguments
}

/// A queue that workers consume.
fn consumed(names: &Names) -> BTreeMap<&'static str, Argument> {
    let mut arguments = dead_lettering_by_key(&names.parked(), PARKED_KEY);
    arguments.insert("x-delivery-limit", Argument::Number(DELIVERY_LIMIT));
    arguments
}

/// The same with one routing key for all dead letters, whatever theirs were.
fn dead_lettering_by_key(exchange: &str, routing_key: &str) -> BTreeMap<&'static str, Argument> {
    let mut arguments = dead_lettering(exchange);
    arguments.insert("x-dead-letter-routing-key", Argument::Text(routing_key.to_owned()));
    arguments
}

/// A quorum queue whose dead letters reach `exchange` even if that takes several tries. Never `x-expires`: it would
/// delete the queue with its messages. A dead letter keeps its routing keys, the header `CC` included.
fn dead_lettering(exchange: &str) -> BTreeMap<&'static str, Argument> {
    quorum(&[
        ("x-dead-letter-exchange", Argument::Text(exchange.to_owned())),
        // A dead letter leaves its queue when the target has confirmed it; "at-most-once", the default, only sends it.
        ("x-dead-letter-strategy", Argument::Text("at-least-once".into())),
        // Without it, at-least-once silently becomes at-most-once.
        ("x-overflow", Argument::Text("reject-publish".into())),
    ])
}

/// Adds a TTL for all messages of the queue. These queues have no consumer, so a foreign message without `expiration`
/// would stay at the head forever and block those behind it. The broker uses the shorter of this and the message's own
/// TTL, so it must not be shorter than any TTL that we publish.
fn with_queue_ttl(
    mut arguments: BTreeMap<&'static str, Argument>,
    longest_ttl: Duration,
) -> BTreeMap<&'static str, Argument> {
    let ttl_ms = i64::try_from(longest_ttl.as_millis()).unwrap_or(i64::MAX);
    arguments.insert("x-message-ttl", Argument::Number(ttl_ms));
    arguments
}

fn table(arguments: &BTreeMap<&'static str, Argument>) -> FieldTable {
    let mut table = FieldTable::default();
    for (key, value) in arguments {
        let value = match value {
            Argument::Text(text) => AMQPValue::LongString(text.as_str().into()),
            Argument::Number(number) => AMQPValue::LongLongInt(*number),
        };
        table.insert((*key).into(), value);
    }
    table
}

async fn declare_queue(channel: &Channel, queue: &Queue, passive: bool) -> lapin::Result<()> {
    let options = QueueDeclareOptions { durable: true, passive, ..Default::default() };
    channel.queue_declare(queue.name.as_str().into(), options, table(&queue.arguments)).await.map(drop)
}

async fn bind(channel: &Channel, binding: &Binding) -> lapin::Result<()> {
    let (from, key) = (binding.exchange.as_str().into(), binding.routing_key.as_str().into());
    match &binding.destination {
        Destination::Queue(queue) => {
            let options = QueueBindOptions::default();
            channel.queue_bind(queue.as_str().into(), from, key, options, FieldTable::default()).await
        }
        Destination::Exchange(exchange) => {
            let options = ExchangeBindOptions::default();
            channel.exchange_bind(exchange.as_str().into(), from, key, options, FieldTable::default()).await
        }
    }
}

fn to_queue(exchange: String, queue: String, routing_key: &str) -> Binding {
    Binding { exchange, destination: Destination::Queue(queue), routing_key: routing_key.to_owned() }
}

/// Removing a binding or naming an exchange that does not exist is no error for the broker (tried on 3.10, 4.0 and
/// 4.3).
async fn unbind(channel: &Channel, binding: &Binding) -> lapin::Result<()> {
    let (from, key) = (binding.exchange.as_str().into(), binding.routing_key.as_str().into());
    match &binding.destination {
        Destination::Queue(queue) => {
            channel.queue_unbind(queue.as_str().into(), from, key, FieldTable::default()).await
        }
        Destination::Exchange(exchange) => {
            let options = ExchangeUnbindOptions::default();
            channel.exchange_unbind(exchange.as_str().into(), from, key, options, FieldTable::default()).await
        }
    }
}

async fn open_channel(connection: &Connection) -> Result<Channel, TopologyError> {
    let opened = connection.create_channel().await;
    opened.map_err(|error| TopologyError::Failed { object: "a channel".into(), why: error.to_string() })
}
