//! Why an exchange, a queue or a binding could not be declared or verified, and what to do about it.
//!
//! Knows the broker's replies; declares nothing.

use std::fmt;

use super::Binding;
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
    fn removal(self) -> &'static str {
        match self {
            Self::Exchange(_) => "delete it on the management pages or with `rabbitmqadmin delete exchange`",
            Self::Queue(_) | Self::Binding(_) => "let it run empty, delete it with `rabbitmqctl delete_queue`",
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
        removal: &'static str,
    },
    /// The broker answers 403 (ACCESS_REFUSED). A retry helps only after the user has been granted the rights.
    #[error(
        "the broker does not let this user declare {object} ({why}); grant it configure, write and read rights on \"^{namespace}\\.\" with rabbitmqctl set_permissions"
    )]
    Refused {
        /// The object that the user may not declare or check.
        object: String,
        /// The broker's reply text, which names the missing right.
        why: String,
        /// For the pattern of the rights in the sentence.
        namespace: String,
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

pub(super) fn explain(namespace: &str, object: Object<'_>, error: &lapin::Error) -> TopologyError {
    let (object, removal) = (object.to_string(), object.removal());
    match reply(error) {
        // RabbitMQ, rabbit_amqqueue.erl and rabbit_queue_type.erl: "queue limit in vhost '~s' (~p) is reached", and
        // "in cluster".
        Some((reply_code::PRECONDITION_FAILED, limit)) if limit.contains("is reached") => TopologyError::Failed {
            object,
            why: format!(
                "{limit}; raise it with rabbitmqctl set_vhost_limits, or cluster_queue_limit in rabbitmq.conf"
            ),
        },
        Some((reply_code::PRECONDITION_FAILED, difference)) => TopologyError::Differs { object, difference, removal },
        Some((reply_code::NOT_FOUND, why)) => TopologyError::Missing { object, why },
        Some((reply_code::ACCESS_REFUSED, why)) => {
            TopologyError::Refused { object, why, namespace: namespace.to_owned() }
        }
        _ => TopologyError::Failed { object, why: error.to_string() },
    }
}
