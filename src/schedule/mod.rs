//! Step 1, schedule: the publisher function, called when an order is created.
//!
//! Chooses the route by [`lane`] and waits for the confirm. Reads no order and no database; a failure is an error that
//! says "not scheduled", never a silent loss and never a hang.

pub mod deadline;
pub mod lane;
pub mod outbox;

use lapin::options::ExchangeDeclareOptions;
use lapin::{Connection, ExchangeKind};

use crate::alarm::Returns;
use crate::broker::{self, BrokerError, reply, reply_code};
use crate::config::{Settings, Strategy};
use crate::confirm::{ConfirmedPublisher, Outgoing, PublishError};
use crate::envelope::{self, AlarmHeaders};
use crate::message::Alarm;
use crate::order::{Deadline, OrderId, OrderIdError, Timestamp};
use lane::Lanes;

/// The library's entry point: schedules alarms for orders.
///
/// Cheap to clone; all clones share one connection. Connect once when the service starts.
///
/// ```no_run
/// use std::time::{Duration, SystemTime};
/// use order_timeout::{Publisher, Settings};
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// // config/default.toml, the file named here, and ORDER_TIMEOUT__… from the environment
/// let settings = Settings::load(None, &[])?;
/// let publisher = Publisher::connect(&settings).await?;
///
/// // … the order has just been committed with this deadline in its row …
/// let deadline = SystemTime::now() + Duration::from_secs(30 * 60);
/// publisher.schedule("01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4b", deadline).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Publisher {
    confirmed: ConfirmedPublisher,
    lanes: Lanes,
}

/// Why an alarm is not known to be scheduled. Schedule it again: a second alarm for the same order does no harm.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    #[error("not scheduled: {0}")]
    OrderId(#[from] OrderIdError),
    #[error("not scheduled: the deadline lies further ahead than delay.max_delay allows; is its unit right?")]
    TooFar,
    #[error("not scheduled: {0}")]
    Publish(#[from] PublishError),
}

/// The failure of some alarms of [`Publisher::schedule_all`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} of {} alarms not scheduled; the first: order {}: {}", failed.len(), failed.len() + scheduled, failed[0].0, failed[0].1)]
pub struct ScheduleManyError {
    /// How many were confirmed.
    pub scheduled: usize,
    /// The others, never empty, each with its reason.
    pub failed: Vec<(OrderId, ScheduleError)>,
}

impl Publisher {
    /// Connects to the broker and verifies that alarms can be published.
    ///
    /// # Errors
    /// [`BrokerError`], within `amqp.connect_timeout`, if there is no connection, or an exchange for alarms is missing.
    pub async fn connect(settings: &Settings) -> Result<Self, BrokerError> {
        let lanes = Lanes::new(settings);
        let connecting = async {
            verify_exchanges(settings, &lanes).await?;
            ConfirmedPublisher::connect(&settings.amqp, "publisher").await
        };
        let confirmed = broker::within_connect_timeout(&settings.amqp, connecting).await?;
        Ok(Self { confirmed, lanes })
    }

    /// Schedules one alarm; resolves when the broker has confirmed it.
    ///
    /// # Errors
    /// [`ScheduleError`], within `amqp.connect_timeout` + `amqp.confirm_timeout`, under any number of concurrent calls.
    pub async fn schedule(
        &self,
        order_id: impl AsRef<str>,
        deadline: impl Into<Deadline>,
    ) -> Result<(), ScheduleError> {
        let (order_id, deadline) = (OrderId::new(order_id)?, deadline.into());
        self.ensure_near(deadline)?;
        Ok(self.confirmed.publish(self.message(order_id, deadline)).await?)
    }

    /// Schedules many alarms with pipelined confirms. Each alarm's delay is computed when it is sent: if that takes
    /// longer than a lane's tolerance of a second, the last ones go through the wheel.
    ///
    /// # Errors
    /// [`ScheduleManyError`] lists those that failed; all others are safe. A broker that does not answer for
    /// `amqp.connect_timeout` + `amqp.confirm_timeout` ends it; the rest is not tried.
    pub async fn schedule_all<D: Into<Deadline>>(
        &self,
        alarms: impl IntoIterator<Item = (OrderId, D)>,
    ) -> Result<usize, ScheduleManyError> {
        let (mut accepted, mut failed) = (Vec::new(), Vec::new());
        for (order_id, deadline) in alarms {
            let deadline = deadline.into();
            match self.ensure_near(deadline) {
                Ok(()) => accepted.push((order_id, deadline)),
                Err(fault) => failed.push((order_id, fault)),
            }
        }
        let total = accepted.len() + failed.len();
        // A copy, because with a closure over references callers could not spawn this future.
        let messages = accepted.clone().into_iter().map(|(order_id, deadline)| self.message(order_id, deadline));
        let results = self.confirmed.publish_all(messages).await;
        let ids = accepted.into_iter().map(|(order_id, _)| order_id);
        failed.extend(ids.zip(results).filter_map(|(id, result)| Some((id, result.err()?.into()))));
        if failed.is_empty() { Ok(total) } else { Err(ScheduleManyError { scheduled: total - failed.len(), failed }) }
    }

    fn ensure_near(&self, deadline: Deadline) -> Result<(), ScheduleError> {
        let furthest = Timestamp::now_by_local_clock() + self.lanes.max_delay();
        if deadline <= furthest { Ok(()) } else { Err(ScheduleError::TooFar) }
    }

    /// To be sent at once: its TTL counts from now.
    fn message(&self, order_id: OrderId, deadline: Deadline) -> Outgoing {
        let now = Timestamp::now_by_local_clock();
        let route = self.lanes.route(&order_id, deadline, now);
        let headers =
            AlarmHeaders { attempt: 0, first_published_at: now, traceparent: None, returns: Returns::default() };
        envelope::address(&Alarm { order_id, deadline }, route, headers)
    }
}

/// Checks that the exchanges for alarms exist, on a connection that may be closed by the reply.
async fn verify_exchanges(settings: &Settings, lanes: &Lanes) -> Result<(), BrokerError> {
    let connection = broker::connect(&settings.amqp, "publisher check").await?;
    for exchange in lanes.route_exchanges() {
        verify_exchange(&connection, &exchange, settings.delay.strategy).await?;
    }
    broker::close(&connection, settings.amqp.connect_timeout).await;
    Ok(())
}

async fn verify_exchange(connection: &Connection, name: &str, strategy: Strategy) -> Result<(), BrokerError> {
    let Err(error) = check_exchange(connection, name).await else { return Ok(()) };
    let hint = match strategy {
        Strategy::DeadLetter => "run `order-timeout setup` with the namespace of this publisher",
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

async fn check_exchange(connection: &Connection, name: &str) -> lapin::Result<()> {
    let channel = connection.create_channel().await?;
    // Passive: asks without declaring, which needs no rights at all.
    let options = ExchangeDeclareOptions { passive: true, ..Default::default() };
    channel.exchange_declare(name.into(), ExchangeKind::Direct, options, Default::default()).await
}
