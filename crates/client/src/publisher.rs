//! Schedules alarms through RabbitMQ; waits for the confirm.
//!
//! Reads no order and no database. A failure is always an error that says "not scheduled", and every call ends within
//! its timeouts. Decides no retry: the caller may call again.

mod builder;
mod error;

use order_timeout_amqp::connect;
use order_timeout_amqp::envelope::{self, Route};
use order_timeout_amqp::publisher::{ConfirmedPublisher, Outgoing};
use order_timeout_amqp::topology::{Names, require_alarm_exchanges};
use order_timeout_core::InvalidSetting;
use order_timeout_core::delay::KindLanes;
use order_timeout_core::kind::Kind;
use order_timeout_core::message::Alarm;
use order_timeout_core::order::{OrderId, Timestamp};

pub use builder::PublisherBuilder;
pub use error::{ConnectError, ScheduleError, ScheduleManyError};

#[cfg(feature = "testing")]
use crate::testing::Scheduled;

/// Schedules alarms for orders.
///
/// Cheap to clone. All clones share one connection; it is opened again by the next call after it is lost, and closed
/// with the last clone. Connect once, when the service starts. Needs a tokio runtime, and must be used while the
/// runtime in which it was connected is running.
///
/// A publisher must agree with its worker on namespace, strategy, lanes, lane shards and lead. [`Publisher::connect`]
/// uses a worker's defaults; [`Publisher::builder`] sets others:
///
/// ```no_run
/// use std::time::{Duration, SystemTime};
///
/// use order_timeout_client::Publisher;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let publisher = Publisher::builder("amqps://shop:secret@rabbitmq.internal/orders")
///     .ca_file("/etc/ssl/our-ca.pem")
///     .lanes([Duration::from_secs(15 * 60), Duration::from_secs(30 * 60)])
///     .connect()
///     .await?;
///
/// // … the order has just been committed with this deadline in its row …
/// let deadline = SystemTime::now() + Duration::from_secs(30 * 60);
/// publisher.schedule("01939f6e-7a3c-7c11-9d1a-6b1f0e2d3c4b", deadline).await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct Publisher {
    target: Target,
    names: Names,
    lanes: KindLanes,
    max_delay: std::time::Duration,
}

/// As `rabbitmqctl list_connections` shows it, behind `order-timeout`.
const CONNECTION_NAME: &str = "publisher";

/// Where alarms go.
#[derive(Debug, Clone)]
enum Target {
    Broker(ConfirmedPublisher),
    #[cfg(feature = "testing")]
    Memory(Scheduled),
}

impl Publisher {
    /// Connects to the broker with a worker's default settings, and verifies that the exchanges for alarms exist. `url`
    /// is `amqp://` or `amqps://` with user, password and virtual host (`/%2f` for the default one).
    ///
    /// # Errors
    /// [`ConnectError`] for an invalid address, if there is no connection within 5 seconds, or if an exchange for
    /// alarms is missing.
    ///
    /// # Panics
    /// Outside a tokio runtime with its I/O and time drivers.
    pub async fn connect(url: impl Into<String>) -> Result<Self, ConnectError> {
        Self::builder(url).connect().await
    }

    /// Begins a publisher with other settings; [`PublisherBuilder::connect`] checks them.
    #[must_use]
    pub fn builder(url: impl Into<String>) -> PublisherBuilder {
        PublisherBuilder::new(url)
    }

    async fn open(builder: &PublisherBuilder) -> Result<Self, ConnectError> {
        builder.validate()?;
        let (amqp, names) = (&builder.amqp, Names::new(&builder.namespace));
        let connecting = async {
            require_alarm_exchanges(amqp, &names, builder.delay.strategy).await?;
            ConfirmedPublisher::connect(amqp, CONNECTION_NAME).await
        };
        let confirmed = connect::within_connect_timeout(amqp, connecting).await?;
        Ok(Self::over(builder, Target::Broker(confirmed)))
    }

    fn open_lazily(builder: &PublisherBuilder) -> Result<Self, InvalidSetting> {
        builder.validate()?;
        let confirmed = ConfirmedPublisher::connect_lazily(&builder.amqp, CONNECTION_NAME);
        Ok(Self::over(builder, Target::Broker(confirmed)))
    }

    fn over(builder: &PublisherBuilder, target: Target) -> Self {
        let PublisherBuilder { namespace, delay, .. } = builder;
        Self { target, names: Names::new(namespace), lanes: builder.lanes_by_kind(), max_delay: delay.max_delay }
    }

    /// A publisher that only records what is scheduled.
    #[cfg(feature = "testing")]
    pub(crate) fn in_memory(scheduled: Scheduled) -> Self {
        Self::over(&PublisherBuilder::new(""), Target::Memory(scheduled))
    }

    /// Schedules one alarm; resolves when the broker has confirmed it. `deadline` is the one in the order's row. It may
    /// be in the past: the order is then closed as soon as the alarm arrives.
    ///
    /// # Errors
    /// [`ScheduleError`], within `connect_timeout` + `confirm_timeout`, under any number of concurrent calls.
    pub async fn schedule(
        &self,
        order_id: impl AsRef<str>,
        deadline: impl Into<Timestamp>,
    ) -> Result<(), ScheduleError> {
        self.schedule_kind(&Kind::ORDER, order_id, deadline).await
    }

    /// The same for another kind of deadline than that of an unpaid order. The kind must be one of the worker's settings: an
    /// alarm of an unknown kind is parked there.
    ///
    /// ```no_run
    /// use std::time::{Duration, SystemTime};
    ///
    /// use order_timeout_client::{Kind, Publisher};
    ///
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let acceptance = Kind::new("acceptance")?;
    /// let publisher = Publisher::builder("amqp://guest:guest@localhost:5672/%2f")
    ///     .kind(acceptance.clone(), [Duration::from_secs(5 * 60)])
    ///     .connect()
    ///     .await?;
    ///
    /// // … the order was paid, and its row says until when the merchant must accept it …
    /// publisher.schedule_kind(&acceptance, "order-7", SystemTime::now() + Duration::from_secs(5 * 60)).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Publisher::schedule`].
    pub async fn schedule_kind(
        &self,
        kind: &Kind,
        order_id: impl AsRef<str>,
        deadline: impl Into<Timestamp>,
    ) -> Result<(), ScheduleError> {
        let alarm = Alarm { kind: kind.clone(), order_id: OrderId::new(order_id)?, deadline: deadline.into() };
        self.ensure_near(alarm.deadline)?;
        let published = match &self.target {
            Target::Broker(confirmed) => confirmed.publish(self.message(&alarm)).await,
            #[cfg(feature = "testing")]
            Target::Memory(scheduled) => scheduled.record(alarm),
        };
        Ok(published?)
    }

    /// Schedules many alarms with pipelined confirms. Each alarm's delay is computed
    /// when the alarm is sent. Sending many may take longer than a lane's tolerance (half the lead, at most a second);
    /// the last ones then go through the wheel, which is as exact.
    ///
    /// ```no_run
    /// use std::time::{Duration, SystemTime};
    ///
    /// use order_timeout_client::{Publisher, with_causes};
    ///
    /// # async fn example(publisher: Publisher) -> Result<(), Box<dyn std::error::Error>> {
    /// let deadline = SystemTime::now() + Duration::from_secs(30 * 60);
    /// if let Err(error) = publisher.schedule_all([("order-7", deadline), ("order-8", deadline)]).await {
    ///     for (order_id, why) in &error.failed {
    ///         eprintln!("{order_id}: {}", with_causes(why));
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ScheduleManyError`] lists those that failed; all others are confirmed. If the broker does not answer for
    /// `connect_timeout` + `confirm_timeout`, the rest is not tried and fails with the same error.
    pub async fn schedule_all<I: AsRef<str>, D: Into<Timestamp>>(
        &self,
        alarms: impl IntoIterator<Item = (I, D)>,
    ) -> Result<(), ScheduleManyError> {
        self.schedule_all_kind(&Kind::ORDER, alarms).await
    }

    /// The same for another kind of deadline, as [`Publisher::schedule_kind`].
    ///
    /// # Errors
    /// As [`Publisher::schedule_all`].
    pub async fn schedule_all_kind<I: AsRef<str>, D: Into<Timestamp>>(
        &self,
        kind: &Kind,
        alarms: impl IntoIterator<Item = (I, D)>,
    ) -> Result<(), ScheduleManyError> {
        let (mut accepted, mut failed) = (Vec::new(), Vec::new());
        for (id, deadline) in alarms {
            let deadline = deadline.into();
            match OrderId::new(&id).map_err(ScheduleError::from).and_then(|id| self.ensure_near(deadline).map(|()| id))
            {
                Ok(order_id) => accepted.push(Alarm { kind: kind.clone(), order_id, deadline }),
                Err(fault) => failed.push((id.as_ref().to_owned(), fault)),
            }
        }
        let total = accepted.len() + failed.len();
        let messages = accepted.clone();
        let results = match &self.target {
            // Lazily, because a TTL counts from when its message is sent.
            Target::Broker(confirmed) => {
                confirmed.publish_all(messages.into_iter().map(|alarm| self.message(&alarm))).await
            }
            #[cfg(feature = "testing")]
            Target::Memory(scheduled) => messages.into_iter().map(|alarm| scheduled.record(alarm)).collect(),
        };
        let ids = accepted.into_iter().map(|alarm| alarm.order_id.as_str().to_owned());
        failed.extend(ids.zip(results).filter_map(|(id, result)| Some((id, result.err()?.into()))));
        if failed.is_empty() { Ok(()) } else { Err(ScheduleManyError { scheduled: total - failed.len(), failed }) }
    }

    fn ensure_near(&self, deadline: Timestamp) -> Result<(), ScheduleError> {
        let furthest = Timestamp::now_by_local_clock() + self.max_delay;
        if deadline <= furthest { Ok(()) } else { Err(ScheduleError::TooFar) }
    }

    /// To be sent at once: its TTL counts from now.
    fn message(&self, alarm: &Alarm) -> Outgoing {
        let now = Timestamp::now_by_local_clock();
        let placement = self.lanes.place(&alarm.kind, &alarm.order_id, alarm.deadline, now);
        let route = Route::to(&placement, &alarm.kind, &self.names);
        envelope::address(alarm.clone().into(), route, now)
    }
}
