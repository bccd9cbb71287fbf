//! Settings: their types, and one sentence for each error in them.
//!
//! `load.rs` loads them, `validate.rs` checks that they fit together. No I/O after loading, no default outside the folder
//! `config`, and no secret in any output: addresses with passwords are [`SecretString`]s and errors never
//! repeat their value.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use order_timeout_amqp::tls::TlsFiles;
use order_timeout_amqp::topology::{Names, Slots, Topology};
use order_timeout_amqp::{ADDRESS_FORM as AMQP_FORM, ADDRESS_SCHEMES as AMQP_SCHEMES, AmqpSettings};
use order_timeout_client::PublisherBuilder;
use order_timeout_core::address::{AddressError, AmqpAddress};
use order_timeout_core::brake::Bounds;
use order_timeout_core::delay::{DelaySettings, Strategy};
use order_timeout_core::engine::LONGEST_RETRY_FACTOR;
use order_timeout_core::kind::Kind;
use order_timeout_core::{InvalidSetting, duration, one_of_its_words};
use order_timeout_providers::ProvidersSettings;
use order_timeout_providers::settings::URL_EXAMPLE;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

mod effective;
pub mod kinds;
mod load;
mod providers;
mod secret_files;
mod validate;

pub use effective::EffectiveSetting;
use kinds::KindSettings;
pub use load::DatabaseUse;

/// The defaults, embedded so that a worker runs without any file: the documented settings, and those that only benchmarks
/// and tests turn. No key is in both.
pub const DEFAULTS: [&str; 2] = [include_str!("../config/default.toml"), include_str!("../config/expert.toml")];

/// All settings. Documented in `config/default.toml` and `config/expert.toml`, nowhere else.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // each field is documented beside its default in config/default.toml
pub struct Settings {
    pub namespace: String,
    pub amqp: AmqpSettings,
    pub database: DatabaseSettings,
    pub delay: DelaySettings,
    pub worker: WorkerSettings,
    pub retry: RetrySettings,
    pub sweep: SweepSettings,
    pub brake: BrakeSettings,
    pub announce: AnnounceSettings,
    pub parked: ParkedSettings,
    pub http: HttpSettings,
    pub orders: OrdersSettings,
    pub kinds: BTreeMap<Kind, KindSettings>,
    pub traces: TracesSettings,
    pub providers: ProvidersSettings,
    pub closing: ClosingSettings,
    pub log: LogSettings,
    /// The files with secrets that are named, by key. Not a setting: collected when settings are loaded.
    #[serde(skip)]
    pub(crate) secret_files: Vec<(String, String)>,
}

/// The section `database`, documented in `config/default.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // as those of Settings
pub struct DatabaseSettings {
    pub url: SecretString,
    pub url_file: String,
    pub ca_file: String,
    pub client_cert_file: String,
    pub client_key_file: String,
    pub time_zone: String,
    #[serde(deserialize_with = "duration::read")]
    pub acquire_timeout: Duration,
    #[serde(deserialize_with = "duration::read")]
    pub statement_timeout: Duration,
    #[serde(deserialize_with = "duration::read")]
    pub lock_timeout: Duration,
}

impl DatabaseSettings {
    /// Whether there is an address ([`DatabaseUse::IfGiven`]).
    #[must_use]
    pub fn is_given(&self) -> bool {
        !self.url.expose_secret().is_empty()
    }

    /// The certificate files that are named here, not in the address.
    #[must_use]
    pub fn tls_files(&self) -> TlsFiles<'_> {
        TlsFiles {
            section: "database",
            ca_file: &self.ca_file,
            client_cert_file: &self.client_cert_file,
            client_key_file: &self.client_key_file,
        }
    }

    /// Whether the address is the one in `config/default.toml`.
    #[must_use]
    pub fn is_default_address(&self) -> bool {
        self.url.expose_secret() == Settings::defaults().database.url.expose_secret()
    }

    /// The address of another database on the same server, for programs that create their own.
    ///
    /// # Panics
    /// If the address is not valid, which [`Settings::validate_database`] refuses.
    #[must_use]
    pub fn url_of(&self, database: &str) -> SecretString {
        let mut url =
            url::Url::parse(self.url.expose_secret()).expect("validated settings have an address that parses");
        url.set_path(database);
        // A name in the query would take precedence over the path.
        let others: Vec<(String, String)> = url.query_pairs().into_owned().filter(|(key, _)| key != "dbname").collect();
        url.set_query(None);
        if !others.is_empty() {
            url.query_pairs_mut().extend_pairs(others);
        }
        String::from(url).into()
    }
}

/// The section `worker`, documented in `config/default.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // as those of Settings
pub struct WorkerSettings {
    #[serde(deserialize_with = "duration::read")]
    pub hold_max: Duration,
    pub kinds: Vec<Kind>,
    pub shards: u8,
    pub take_shards: Vec<u8>,
    pub prefetch: u16,
    pub schedule_prefetch: u16,
    pub batch_size: usize,
    #[serde(deserialize_with = "duration::read")]
    pub linger: Duration,
    pub closers: usize,
    #[serde(deserialize_with = "duration::read")]
    pub requeue_after: Duration,
    #[serde(deserialize_with = "duration::read")]
    pub shutdown_grace: Duration,
}

impl WorkerSettings {
    /// The processing queue of the default kind that each channel consumes: the named ones, or all. A channel is one
    /// process in the broker and uses one core, so a single queue has two channels.
    fn shard_of_each_channel(&self) -> Vec<u8> {
        let mut taken: Vec<u8> =
            if self.take_shards.is_empty() { (0..self.shards).collect() } else { self.take_shards.clone() };
        if let [alone] = taken[..] {
            taken.push(alone);
        }
        taken
    }

    /// The processing queue of this kind that each channel consumes.
    #[must_use]
    pub fn queue_of_each_channel(&self, names: &Names, kind: &Kind) -> Vec<String> {
        if kind.is_default() {
            return self.shard_of_each_channel().into_iter().map(|shard| names.shard(shard)).collect();
        }
        // Two channels of one queue, for the same reason.
        vec![names.timeout_of(kind); 2]
    }
}

/// The section `retry`, documented in `config/default.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // as those of Settings
pub struct RetrySettings {
    #[serde(deserialize_with = "duration::read")]
    pub first: Duration,
    #[serde(deserialize_with = "duration::read")]
    pub longest: Duration,
    #[serde(deserialize_with = "duration::read")]
    pub missing_for: Duration,
    pub max_attempts: u32,
}

impl RetrySettings {
    /// The longest wait of a retry at the broker: the engine doubles `longest` five times.
    #[must_use]
    pub fn longest_wait(&self) -> Duration {
        self.longest.saturating_mul(LONGEST_RETRY_FACTOR)
    }
}

/// The section `sweep`, documented in `config/default.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // as those of Settings
pub struct SweepSettings {
    #[serde(deserialize_with = "duration::read")]
    pub every: Duration,
    #[serde(deserialize_with = "duration::read")]
    pub grace: Duration,
    #[serde(deserialize_with = "duration::read")]
    pub look_ahead: Duration,
    pub first_backlog: u32,
}

/// The section `brake`, documented in `config/default.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // as those of Settings
pub struct BrakeSettings {
    pub enabled: bool,
    pub times_usual: u32,
    pub always_allowed: u32,
}

impl BrakeSettings {
    /// The bounds; `None` if it is off.
    #[must_use]
    pub fn bounds(&self) -> Option<Bounds> {
        let &Self { enabled, times_usual, always_allowed } = self;
        enabled.then_some(Bounds { times_usual, floor: always_allowed })
    }
}

/// The section `announce`, documented in `config/default.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // as those of Settings
pub struct AnnounceSettings {
    #[serde(deserialize_with = "duration::read")]
    pub poll: Duration,
    pub batch_size: usize,
    #[serde(deserialize_with = "duration::read")]
    pub keep: Duration,
    pub notify: String,
    pub webhook: String,
    pub webhook_key_file: String,
    pub webhook_ca_file: String,
    #[serde(deserialize_with = "duration::read")]
    pub webhook_timeout: Duration,
}

/// The section `parked`, documented in `config/default.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // as those of Settings
pub struct ParkedSettings {
    #[serde(deserialize_with = "duration::read")]
    pub keep: Duration,
}

/// The section `http`, documented in `config/default.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // as those of Settings
pub struct HttpSettings {
    pub listen: Listen,
    pub page: bool,
    pub hosts: Vec<HostName>,
    pub token_file: String,
}

/// A name or an address, as a browser sends it: small letters, punycode, no dot at the end.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct HostName(pub url::Host);

impl HostName {
    /// `None` if the text is neither. A port is not a part of it.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        url::Host::parse(text.strip_suffix('.').unwrap_or(text)).ok().map(Self)
    }
}

impl TryFrom<String> for HostName {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let why =
            || format!("{text:?} is not the name of a host; write it like ops.example, without scheme, port and *");
        Self::new(text.trim()).filter(|_| !text.contains('*')).ok_or_else(why)
    }
}

/// An IP address and port to listen at; `None` for nowhere. Not a host name: resolving it would be I/O, and might yield
/// an unexpected address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Listen(pub Option<SocketAddr>);

impl TryFrom<String> for Listen {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(Self(None));
        }
        let why = |_| {
            format!(
                "{text:?} is not an IP address with a port; write 127.0.0.1:9394 or [::1]:9394, or leave it empty for no health and metrics"
            )
        };
        text.parse().map(|address| Self(Some(address))).map_err(why)
    }
}

/// The section `orders`, documented in `config/default.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // as those of Settings
pub struct OrdersSettings {
    pub close_sql: String,
    pub overdue_sql: String,
    pub pay_after_deadline: bool,
}

/// The section `traces`, documented in `config/default.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // as those of Settings
pub struct TracesSettings {
    pub endpoint: String,
    pub service_name: String,
}

/// The section `closing`, documented in `config/default.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // as those of Settings
pub struct ClosingSettings {
    #[serde(deserialize_with = "duration::read")]
    pub in_progress_wait: Duration,
    #[serde(deserialize_with = "duration::read")]
    pub retry_first: Duration,
    #[serde(deserialize_with = "duration::read")]
    pub retry_longest: Duration,
    pub max_rounds: u32,
}

/// The section `log`, documented in `config/default.toml`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // as those of Settings
pub struct LogSettings {
    #[serde(deserialize_with = "one_of_its_words")]
    pub format: LogFormat,
    pub filter: String,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines for people.
    Human,
    /// One JSON object a line.
    Json,
}

/// An error in the settings: one sentence with the key and the origin of its value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{}{}: {why}", if key.is_some() { "setting " } else { "settings" }, key.as_deref().unwrap_or_default(), origin.as_ref().map_or_else(String::new, |origin| format!(" (from {origin})")))]
pub struct SettingsError {
    key: Option<String>,
    origin: Option<String>,
    why: String,
}

/// The example address in our own sentences.
const POSTGRES_FORM: &str = "postgres://user:password@host:5432/database";
/// What our own sentences say of other addresses.
const URL_FORMS: [&str; 4] = [URL_EXAMPLE, "begins with http://", "begin with https://", "write https://"];

impl SettingsError {
    fn of(key: &str, why: impl std::fmt::Display) -> Self {
        Self::new(Some(key.to_owned()), None, why.to_string())
    }

    /// Why an address is refused, without repeating any part of it.
    fn of_address(key: &str, why: &AddressError) -> Self {
        Self { key: Some(key.to_owned()), origin: None, why: format!("{why} (its form: {POSTGRES_FORM})") }
    }

    /// The only constructor for an error that may repeat a value. An address is never repeated, whatever setting it was
    /// given to, because it may contain a password.
    fn new(key: Option<String>, origin: Option<String>, why: String) -> Self {
        let ours = [AMQP_FORM, POSTGRES_FORM].into_iter().chain(AMQP_SCHEMES).chain(URL_FORMS);
        let theirs = ours.fold(why.clone(), |text, form| text.replace(form, ""));
        let why = if has_an_address(&theirs) {
            "an address was given in the wrong place; it is not repeated here, because it may contain a password"
                .to_owned()
        } else {
            why
        };
        Self { key: key.filter(|key| is_a_key(key)), origin, why }
    }
}

fn has_an_address(text: &str) -> bool {
    text.contains("://") || text.contains('@')
}

/// Whether this could be the name of a setting: anything else may be a value in the wrong place.
fn is_a_key(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-[]".contains(&b))
}

impl From<InvalidSetting> for SettingsError {
    fn from(InvalidSetting { key, why }: InvalidSetting) -> Self {
        match key.as_str() {
            // It repeats no part of the address, and says which of its characters to encode.
            "amqp.url" => Self { key: Some(key), origin: None, why },
            _ => Self::of(&key, why),
        }
    }
}

impl Settings {
    /// The names of the deployment's exchanges and queues.
    #[must_use]
    pub fn names(&self) -> Names {
        let names = Names::new(&self.namespace);
        // An address that is not valid is refused elsewhere.
        match self.amqp.url.expose_secret().parse::<AmqpAddress>() {
            Ok(address) => names.on_vhost(&address.vhost),
            Err(_) => names,
        }
    }

    /// Every exchange and queue of the deployment, except for the slots of the wheel.
    ///
    #[must_use]
    pub fn topology(&self) -> Topology {
        Topology::new(&self.names(), &self.lanes(), self.delay.strategy, self.worker.shards)
    }

    /// The slots of the wheel, which a worker declares when the first message needs them.
    ///
    /// # Panics
    /// If the rings do not mesh, which [`Settings::validate`] refuses.
    #[must_use]
    pub fn slots(&self) -> Slots {
        Slots::new(&self.names(), self.delay.wheel().expect("validated settings have rings that mesh"))
    }

    /// The name of every queue that the deployment may have, slots of the wheel included.
    #[must_use]
    pub fn queue_names(&self) -> Vec<String> {
        let declared = self.topology().queues.into_iter().map(|queue| queue.name);
        let has_wheel = self.delay.strategy == Strategy::DeadLetter;
        let slots = has_wheel.then(|| self.slots().all().map(|slot| slot.queue.name).collect::<Vec<_>>());
        declared.chain(slots.into_iter().flatten()).collect()
    }

    /// A publisher for workers with these settings.
    #[must_use]
    pub fn publisher(&self) -> PublisherBuilder {
        PublisherBuilder::of_worker(&self.namespace, &self.amqp, &self.delay, self.lanes_of_other_kinds())
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod topology_tests;
