//! The settings of a publisher, with a worker's defaults.
//!
//! Only [`PublisherBuilder::connect`] opens a connection. A publisher and its worker must agree on namespace, strategy,
//! lanes, lane shards and lead; a test of the worker holds these defaults equal to `config/default.toml`.

use std::collections::BTreeMap;
use std::time::Duration;

use order_timeout_amqp::AmqpSettings;
use order_timeout_amqp::topology::Names;
use order_timeout_core::InvalidSetting;
use order_timeout_core::delay::{DelaySettings, KindLanes, Lane, Strategy};
use order_timeout_core::kind::Kind;

use super::{ConnectError, Publisher};

const DAY: Duration = Duration::from_secs(86_400);

/// Builds a [`Publisher`]. A setting that is not given has the default value of a worker. [`PublisherBuilder::connect`]
/// checks the values; its error names the worker's setting, such as `delay.lanes`.
#[derive(Debug, Clone)]
pub struct PublisherBuilder {
    pub(super) amqp: AmqpSettings,
    pub(super) namespace: String,
    pub(super) delay: DelaySettings,
    /// The lanes of the kinds besides the default one.
    kinds: BTreeMap<Kind, Vec<Lane>>,
}

impl PublisherBuilder {
    pub(super) fn new(url: impl Into<String>) -> Self {
        let amqp = AmqpSettings {
            url: url.into().into(),
            url_file: String::new(),
            ca_file: String::new(),
            client_cert_file: String::new(),
            client_key_file: String::new(),
            heartbeat: Duration::from_secs(5),
            connect_timeout: Duration::from_secs(5),
            confirm_timeout: Duration::from_secs(5),
        };
        let delay = DelaySettings {
            strategy: Strategy::DeadLetter,
            lanes: vec![Lane::from(Duration::from_secs(30 * 60))],
            lane_shards: 4,
            lead: Duration::from_secs(20),
            max_delay: 3_650 * DAY,
            rings: Vec::new(),
        };
        Self { amqp, namespace: "order".to_owned(), delay, kinds: BTreeMap::new() }
    }

    /// A publisher with the settings of a worker: for programs that load the worker's configuration.
    #[doc(hidden)] // For the worker itself and its tests.
    #[must_use]
    pub fn of_worker(
        namespace: &str,
        amqp: &AmqpSettings,
        delay: &DelaySettings,
        kinds: impl IntoIterator<Item = (Kind, Vec<Lane>)>,
    ) -> Self {
        let (kinds, delay) = (kinds.into_iter().collect(), DelaySettings { rings: Vec::new(), ..delay.clone() });
        Self { amqp: amqp.clone(), namespace: namespace.to_owned(), delay, kinds }
    }

    /// As the worker's `namespace`: the prefix of every exchange and queue, 1 to 60 ASCII letters, digits, `-` or `_`.
    /// `order` by default.
    #[must_use]
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = namespace.into();
        self
    }

    /// As the worker's `delay.lanes`: the delays that have queues of their own, which saves a hop. At most 64, each in
    /// whole milliseconds. An alarm with any other delay goes through the wheel. 30 minutes by default.
    #[must_use]
    pub fn lanes(mut self, delays: impl IntoIterator<Item = Duration>) -> Self {
        self.delay.lanes = delays.into_iter().map(Lane::from).collect();
        self
    }

    /// As the worker's `kinds.NAME.lanes`: the delays of this kind that have queues of their own. Alarms of a kind that is not
    /// named here go through the wheel. The lanes of [`Kind::ORDER`] are those of [`PublisherBuilder::lanes`].
    #[must_use]
    pub fn kind(mut self, kind: Kind, lanes: impl IntoIterator<Item = Duration>) -> Self {
        if kind.is_default() {
            return self.lanes(lanes);
        }
        self.kinds.insert(kind, lanes.into_iter().map(Lane::from).collect());
        self
    }

    pub(super) fn lanes_by_kind(&self) -> KindLanes {
        KindLanes::new(self.delay.clone(), self.kinds.clone())
    }

    /// As the worker's `delay.lane_shards`: queues for each lane, 1 to 16. 4 by default.
    #[must_use]
    pub fn lane_shards(mut self, shards: u8) -> Self {
        self.delay.lane_shards = shards;
        self
    }

    /// As the worker's `delay.lead`: how long before its deadline an alarm is to reach a worker, at most 10 minutes. 20
    /// seconds by default.
    #[must_use]
    pub fn lead(mut self, lead: Duration) -> Self {
        self.delay.lead = lead;
        self
    }

    /// For a worker with `delay.strategy = "delayed-exchange"`, which has no lanes. `dead-letter` by default. Deprecated on
    /// RabbitMQ, as that strategy is: no release of its plugin runs on RabbitMQ 4.3.
    #[must_use]
    pub fn delayed_exchange(mut self) -> Self {
        self.delay.strategy = Strategy::DelayedExchange;
        self
    }

    /// As the worker's `delay.max_delay`: how far ahead a deadline may be; one beyond it fails with
    /// [`ScheduleError::TooFar`](crate::ScheduleError::TooFar). 3650 days by default.
    #[must_use]
    pub fn max_delay(mut self, max_delay: Duration) -> Self {
        self.delay.max_delay = max_delay;
        self
    }

    /// The path of a PEM file with the only CAs to trust; read for every connection. Requires an `amqps://` address.
    /// The system's CAs by default.
    #[must_use]
    pub fn ca_file(mut self, path: impl Into<String>) -> Self {
        self.amqp.ca_file = path.into();
        self
    }

    /// The paths of PEM files with the client's certificate chain and its key, which has no passphrase. They are read
    /// for every connection, so that a renewed certificate is used without a restart. Requires an `amqps://` address.
    /// None by default.
    #[must_use]
    pub fn client_certificate(mut self, chain_path: impl Into<String>, key_path: impl Into<String>) -> Self {
        self.amqp.client_cert_file = chain_path.into();
        self.amqp.client_key_file = key_path.into();
        self
    }

    /// The interval of heartbeats that is offered to the broker, 1 second to 10 minutes; a silent connection is closed
    /// after two. A parameter `heartbeat` in the address overrides it. 5 seconds by default.
    #[must_use]
    pub fn heartbeat(mut self, interval: Duration) -> Self {
        self.amqp.heartbeat = interval;
        self
    }

    /// The timeout of opening a connection, handshake included; 1 millisecond to 1 hour. 5 seconds by default.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.amqp.connect_timeout = timeout;
        self
    }

    /// The timeout of a confirm from when its message is sent, 1 millisecond to 1 hour. 5 seconds by default.
    #[must_use]
    pub fn confirm_timeout(mut self, timeout: Duration) -> Self {
        self.amqp.confirm_timeout = timeout;
        self
    }

    pub(super) fn validate(&self) -> Result<(), InvalidSetting> {
        Names::validate(&self.namespace)?;
        self.amqp.validate()?;
        if !self.delay.strategy.needs_broker() {
            let why =
                "is \"database\", so there is no alarm to schedule: the worker reads the deadline from the order's row";
            return Err(InvalidSetting::new("delay.strategy", why));
        }
        self.lanes_by_kind().validate()
    }

    /// Checks the settings, connects to the broker, and verifies that the exchanges for alarms exist.
    ///
    /// # Errors
    /// [`ConnectError`] for an invalid setting, if there is no connection within `connect_timeout`, or if an exchange
    /// for alarms is missing.
    ///
    /// # Panics
    /// Outside a tokio runtime with its I/O and time drivers.
    pub async fn connect(&self) -> Result<Publisher, ConnectError> {
        Publisher::open(self).await
    }

    /// A publisher that connects when the first alarm is scheduled: for a service that is to start while the broker is
    /// unavailable. Nothing is verified until then.
    ///
    /// # Errors
    /// [`InvalidSetting`] for an unusable setting.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn connect_lazily(&self) -> Result<Publisher, InvalidSetting> {
        Publisher::open_lazily(self)
    }
}
