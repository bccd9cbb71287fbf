//! Why an exchange, a queue or a binding could not be declared or verified, and what to do about it.
//!
//! Knows the broker's replies; declares nothing.

use std::fmt;

use super::{Binding, Names, in_shell};
use crate::connect::{reply, reply_code};

/// What was to be declared, as an error names it.
#[derive(Debug, Clone, Copy)]
pub(super) enum Object<'a> {
    Exchange(&'a str),
    Queue(&'a str),
    Binding(&'a Binding),
}

impl Object<'_> {
    /// How to remove the existing object. rabbitmqctl has no command that deletes an exchange.
    fn removal(self, names: &Names) -> String {
        match self {
            Self::Exchange(_) => "delete it on the management pages or with `rabbitmqadmin delete exchange`".to_owned(),
            Self::Queue(queue) => format!(
                "let it run empty, delete it with `rabbitmqctl delete_queue{} {}`",
                names.vhost_option(),
                in_shell(queue)
            ),
            Self::Binding(_) => "delete its queue".to_owned(),
        }
    }
}

impl fmt::Display for Object<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exchange(name) => write!(f, "exchange {name:?}"),
            Self::Queue(name) => write!(f, "queue {name:?}"),
            Self::Binding(binding) => {
                write!(f, "binding of {:?} to {:?}", binding.destination.name(), binding.exchange)
            }
        }
    }
}

/// Why the objects could not be declared or verified.
///
/// `object` is the kind and name of the object, such as `queue "order.timeout"`; `why` is the broker's reply text or
/// the client's error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// The broker answers 406 (PRECONDITION_FAILED). A retry does not help: RabbitMQ never changes an existing object.
    #[error(
        "{object} exists with other arguments: {difference}; to move over, choose another `namespace`, or stop publishers and workers, {removal} and run `order-timeout setup`"
    )]
    Differs {
        /// The existing object.
        object: String,
        /// The broker's reply text, which names the first argument that differs.
        difference: String,
        /// How to delete the object, as a part of the sentence.
        removal: String,
    },
    /// The broker answers 403 (ACCESS_REFUSED). A retry helps only after the user has been granted the rights.
    #[error(
        "the broker does not let this user declare or use {object} ({why}); grant it configure, write and read rights with `{grant}`"
    )]
    Refused {
        /// The object that the user may not declare or check.
        object: String,
        /// The broker's reply text, which names the missing right.
        why: String,
        /// The command that grants them, but for the user's name.
        grant: String,
    },
    /// The virtual host or the cluster has as many queues as it may have. A retry helps only after the limit was raised.
    #[error(
        "{object} cannot be declared: {why}; raise the limit with `{raise}`, or cluster_queue_limit in rabbitmq.conf"
    )]
    QueueLimit {
        /// The object that is missing.
        object: String,
        /// The broker's reply text, which names the limit.
        why: String,
        /// The command that takes the limit away.
        raise: String,
    },
    /// The plugin for delayed messages is not enabled. A retry helps only after it has been enabled.
    #[error(
        "this broker has no exchange type x-delayed-message ({why}); enable the rabbitmq_delayed_message_exchange plugin (it exists for brokers up to 4.2), or set delay.strategy = \"dead-letter\""
    )]
    NoDelayedExchange {
        /// The client's error: 503 up to RabbitMQ 3.13, 406 from 4.0.
        why: String,
    },
    /// Several shards need a plugin that is not enabled. A retry helps only after it has been enabled.
    #[error(
        "this broker has no exchange type x-consistent-hash ({why}); it comes with RabbitMQ, enable it with `rabbitmq-plugins enable rabbitmq_consistent_hash_exchange`, or set worker.shards = 1"
    )]
    NoHashExchange {
        /// The client's error: 503 up to RabbitMQ 3.13, 406 from 4.0.
        why: String,
    },
    /// The broker answers 404 (NOT_FOUND) to a check, or one end of a binding was deleted. A retry helps after the
    /// object has been declared again.
    #[error("{object} is not there ({why})")]
    Missing {
        /// The first object that is missing.
        object: String,
        /// The broker's reply text.
        why: String,
    },
    /// No object of the namespace exists. A retry helps only after `order-timeout setup`.
    #[error(
        "nothing of namespace {namespace:?} is on this virtual host; run `order-timeout setup` with these settings, or correct `namespace` or the virtual host in `amqp.url`"
    )]
    NeverSetUp {
        /// As in the settings; most likely mistyped.
        namespace: String,
    },
    /// Anything else: a timeout, a lost connection, or a limit of queues. A retry may help.
    #[error("{object} could not be declared: {why}")]
    Failed {
        /// What was being declared or checked when it failed.
        object: String,
        /// The client's error, or what to do about a limit or a timeout.
        why: String,
    },
}

impl TopologyError {
    /// Whether the broker's reply names another object than the one that was declared.
    pub(super) fn is_about_another_object(&self) -> bool {
        let (object, reply) = match self {
            Self::Differs { object, difference, .. } => (object, difference),
            Self::Missing { object, why } => (object, why),
            _ => return false,
        };
        let named = ["queue '", "exchange '"].into_iter().find_map(|before| reply.split_once(before));
        let named = named.and_then(|(_, rest)| rest.split_once('\'')).map(|(name, _)| name);
        named.is_some_and(|name| !object.contains(&format!("{name:?}")))
    }
}

pub(super) fn explain(names: &Names, object: Object<'_>, error: &lapin::Error) -> TopologyError {
    let (object, removal) = (object.to_string(), object.removal(names));
    match reply(error) {
        // RabbitMQ, rabbit_amqqueue.erl and rabbit_queue_type.erl: "queue limit in vhost '~s' (~p) is reached", and
        // "in cluster".
        Some((reply_code::PRECONDITION_FAILED, why)) if why.contains("is reached") => {
            let raise = format!(r#"rabbitmqctl set_vhost_limits{} '{{"max-queues": -1}}'"#, names.vhost_option());
            TopologyError::QueueLimit { object, why, raise }
        }
        Some((reply_code::PRECONDITION_FAILED, difference)) => TopologyError::Differs { object, difference, removal },
        Some((reply_code::NOT_FOUND, why)) => TopologyError::Missing { object, why },
        Some((reply_code::ACCESS_REFUSED, why)) => TopologyError::Refused { object, why, grant: names.grant("USER") },
        _ => TopologyError::Failed { object, why: error.to_string() },
    }
}
