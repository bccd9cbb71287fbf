//! Why a message is not known to be safe at the broker.
//!
//! Decides no retry: the publisher reports, the caller decides.

use std::time::Duration;

use crate::connect::{self, BrokerError, reply_code};

/// Why a message is not known to be safe at the broker. It may have arrived all the same, except if it is `Unroutable`
/// or `Unsendable`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// `basic.nack`. A retry helps once the queue has room, or a leader.
    #[error("the broker refused the message (nack); is a queue full, or has it lost its leader?")]
    Nacked,
    /// `basic.return`, with its reply code and text. A retry helps after the queue has been declared again.
    #[error("no queue is bound for it ({0}); run `order-timeout setup` with the settings of this publisher")]
    Unroutable(String),
    /// The broker closed the channel with 404 (NOT_FOUND) and this text, which fails every unconfirmed message of the
    /// window. A retry helps after the exchange has been declared again.
    #[error("its exchange is not there ({0}); run `order-timeout setup` with the settings of this publisher")]
    NoExchange(String),
    /// No confirm within this time, which is `confirm_timeout`, or `connect_timeout` + `confirm_timeout` if the message
    /// waited in the publisher's queue. A retry may help; the message may then arrive twice.
    #[error("the broker did not confirm within {0:?}; it may be overloaded or cut off")]
    TimedOut(Duration),
    /// No confirm within this time, which is `confirm_timeout`, although the broker confirmed messages that were sent
    /// later. A retry may help; the message may then arrive twice.
    #[error(
        "the broker did not confirm within {0:?}, while it confirms other messages; has its queue lost its leader (rabbitmq-queues quorum_status QUEUE)?"
    )]
    Unconfirmed(Duration),
    /// The broker sent `connection.blocked`. A retry helps once it has sent `connection.unblocked`.
    #[error("the broker blocks publishers; it is short of memory or disk")]
    Blocked,
    /// The broker closed the channel with 403 (ACCESS_REFUSED) and this text. A retry helps only after the user has
    /// been granted the rights.
    #[error(
        "the broker does not let this user publish ({0}); grant it write rights there with rabbitmqctl set_permissions"
    )]
    Refused(String),
    /// For another reason, given here. A retry uses a new channel and may help.
    #[error("the broker closed the channel: {0}")]
    ChannelClosed(String),
    /// None could be opened, or it was lost before the confirm. A retry helps unless the cause is
    /// [`BrokerError::Refused`].
    #[error("there is no connection to the broker")]
    NotConnected(#[source] BrokerError),
    /// AMQP cannot express the message, so it was never sent. A retry never helps.
    #[error("its {what} cannot be sent: {why}")]
    Unsendable {
        /// `exchange`, `routing key`, `type`, `message id` or `expiration`.
        what: &'static str,
        /// The limit and by what it is exceeded, as the rest of the sentence.
        why: String,
    },
    /// The runtime in which the publisher was created has ended. A retry with this publisher never helps.
    #[error("this publisher was shut down")]
    ShutDown,
}

impl PublishError {
    /// Whether no message can be sent at all, so that trying the next one is pointless.
    #[must_use]
    pub fn is_broker_wide(&self) -> bool {
        matches!(self, Self::TimedOut(_) | Self::Blocked | Self::NotConnected(_) | Self::ShutDown)
    }

    /// Whether this message was refused individually, so that others may be accepted. An error that closes the channel
    /// (`NoExchange`, `Refused`, `ChannelClosed`) is neither this nor broker-wide: it may be due to another message.
    #[must_use]
    pub fn is_message_specific(&self) -> bool {
        matches!(self, Self::Nacked | Self::Unroutable(_) | Self::Unconfirmed(_) | Self::Unsendable { .. })
    }
}

/// What an error of a channel means for the messages published on it.
pub(super) fn closed(error: &lapin::Error) -> PublishError {
    match connect::reply(error) {
        Some((reply_code::ACCESS_REFUSED, why)) => PublishError::Refused(why),
        Some((reply_code::NOT_FOUND, why)) => PublishError::NoExchange(why),
        _ => PublishError::ChannelClosed(error.to_string()),
    }
}
