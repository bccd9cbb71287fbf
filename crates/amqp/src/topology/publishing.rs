//! Checks that the exchanges exist that a publisher of alarms needs, without declaring any.
//!
//! Changes nothing on the broker, and needs no rights on it.

use lapin::Connection;
use order_timeout_core::delay::Strategy;

use super::Names;
use super::inspect::look_at_exchange;
use crate::AmqpSettings;
use crate::connect::{self, BrokerError, reply, reply_code};

/// Checks the exchanges of this strategy. Opens a connection of its own for it, because the broker may close the
/// connection with its reply.
///
/// # Errors
/// [`BrokerError::Refused`] names the exchange that is missing, and how to fix it; [`BrokerError::Away`] if the
/// connection is lost. Otherwise the error of [`connect::connect`].
pub async fn require_alarm_exchanges(
    settings: &AmqpSettings,
    names: &Names,
    strategy: Strategy,
) -> Result<(), BrokerError> {
    let exchanges = match strategy {
        Strategy::DeadLetter => vec![names.schedule(), names.delay()],
        Strategy::DelayedExchange => vec![names.delayed()],
        Strategy::Database => Vec::new(),
    };
    let connection = connect::connect(settings, "publisher check").await?;
    for exchange in exchanges {
        require_exchange(&connection, &exchange, strategy).await?;
    }
    connect::close(&connection, settings.connect_timeout).await;
    Ok(())
}

async fn require_exchange(connection: &Connection, name: &str, strategy: Strategy) -> Result<(), BrokerError> {
    // Without declaring it, which needs no rights at all.
    let look = async { look_at_exchange(&connection.create_channel().await?, name).await };
    let Err(error) = look.await else { return Ok(()) };
    let hint = match strategy {
        Strategy::DeadLetter | Strategy::Database => "run `order-timeout setup` with the namespace of this publisher",
        Strategy::DelayedExchange => {
            "enable the rabbitmq_delayed_message_exchange plugin (brokers up to 4.2) and run `order-timeout setup`, or set delay.strategy = \"dead-letter\""
        }
    };
    match reply(&error) {
        // It exists, with another type than the declaration names.
        Some((reply_code::PRECONDITION_FAILED, _)) => Ok(()),
        Some((code @ (reply_code::NOT_FOUND | reply_code::COMMAND_INVALID), text)) => {
            Err(BrokerError::Refused(format!("exchange {name:?} is not there ({code} {text}); {hint}")))
        }
        Some((code @ reply_code::ACCESS_REFUSED, text)) => Err(BrokerError::Refused(format!(
            "this user may not check exchange {name:?} ({code} {text}); grant it rights on it with rabbitmqctl set_permissions"
        ))),
        _ => Err(BrokerError::Away(format!(
            "the connection to the broker was lost while checking exchange {name:?} ({error})"
        ))),
    }
}
