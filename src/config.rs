//! Settings: where they come from, what they must be, and one sentence for each thing that is wrong with them.
//!
//! How they are loaded stands in `load.rs`, what goes together in `validate.rs`. No I/O after loading, no default outside
//! `config/default.toml`, and no secret in any output: addresses with passwords are [`SecretString`]s and errors never
//! repeat a value of theirs.

use std::net::SocketAddr;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use serde::de::value::{Error as NotAWord, StrDeserializer};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};

use crate::tls::TlsFiles;
use crate::wheel::{Ring, Wheel, WheelError};
use address::AddressError;

pub(crate) mod address;
pub(crate) mod duration;
mod effective;
mod load;
mod validate;

pub use effective::EffectiveSetting;
pub(crate) use validate::MAX_SHARDS;

/// The documented defaults, embedded so that a worker runs without any file.
pub const DEFAULTS: &str = include_str!("../config/default.toml");

/// Everything that can be set. Documented in `config/default.toml`, nowhere else.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)] // each field's documentation stands beside its default in config/default.toml
pub struct Settings {
    pub namespace: String,
    pub amqp: AmqpSettings,
    pub database: DatabaseSettings,
    pub delay: DelaySettings,
    pub worker: WorkerSettings,
    pub retry: RetrySettings,
    pub sweep: SweepSettings,
    pub announce: AnnounceSettings,
    pub parked: ParkedSettings,
    pub http: HttpSettings,
    pub orders: OrdersSettings,
    pub log: LogSettings,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AmqpSettings {
    pub url: SecretString,
    pub url_file: String,
    pub ca_file: String,
    pub client_cert_file: String,
    pub client_key_file: String,
    #[serde(deserialize_with = "duration::read")]
    pub heartbeat: Duration,
    #[serde(deserialize_with = "duration::read")]
    pub connect_timeout: Duration,
    #[serde(deserialize_with = "duration::read")]
    pub confirm_timeout: Duration,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
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

impl AmqpSettings {
    /// The certificates that are named here.
    #[must_use]
    pub fn tls_files(&self) -> TlsFiles<'_> {
        TlsFiles {
            section: "amqp",
            ca_file: &self.ca_file,
            client_cert_file: &self.client_cert_file,
            client_key_file: &self.client_key_file,
        }
    }
}

impl DatabaseSettings {
    /// Whether there is an address ([`Settings::load_with_database_if_given`]).
    #[must_use]
    pub fn is_given(&self) -> bool {
        !self.url.expose_secret().is_empty()
    }

    /// The certificates that are named here, and not in the address.
    #[must_use]
    pub fn tls_files(&self) -> TlsFiles<'_> {
        TlsFiles {
            section: "database",
            ca_file: &self.ca_file,
            client_cert_file: &self.client_cert_file,
            client_key_file: &self.client_key_file,
        }
    }

    /// Whether the address is the one that `config/default.toml` has.
    #[must_use]
    pub fn is_default_address(&self) -> bool {
        self.url.expose_secret() == Settings::defaults().database.url.expose_secret()
    }

    /// The address of another database on the same server, for programs that make one of their own.
    ///
    /// # Panics
    /// If the address is none, which [`Settings::validate_database`] refuses.
    #[must_use]
    pub fn url_of(&self, database: &str) -> SecretString {
        let mut url =
            url::Url::parse(self.url.expose_secret()).expect("validated settings have an address that parses");
        url.set_path(database);
        // A name in the query would win over the path.
        let others: Vec<(String, String)> = url.query_pairs().into_owned().filter(|(key, _)| key != "dbname").collect();
        url.set_query(None);
        if !others.is_empty() {
            url.query_pairs_mut().extend_pairs(others);
        }
        String::from(url).into()
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DelaySettings {
    #[serde(deserialize_with = "one_of_its_words")]
    pub strategy: Strategy,
    pub lanes: Vec<Lane>,
    pub lane_shards: u8,
    #[serde(deserialize_with = "duration::read")]
    pub lead: Duration,
    #[serde(deserialize_with = "duration::read")]
    pub max_delay: Duration,
    pub rings: Vec<RingSettings>,
}

/// Reads an enum as serde does from text: its error names the words that would do, and that of the config crate does not.
fn one_of_its_words<'de, D: Deserializer<'de>, T: DeserializeOwned>(deserializer: D) -> Result<T, D::Error> {
    let word = String::deserialize(deserializer)?;
    T::deserialize(StrDeserializer::<NotAWord>::new(&word)).map_err(D::Error::custom)
}

/// How an alarm is delayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Strategy {
    DeadLetter,
    DelayedExchange,
}

/// A standard delay: its length, and the name by which queues and routing keys know it (`30m`).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Lane {
    pub name: String,
    pub delay: Duration,
}

/// How far a delay may be from its lane's, at least and at most: half the lead between these two.
const LANE_TOLERANCE: std::ops::RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(1);

impl Lane {
    /// The longest TTL that a publisher gives an alarm in this lane. Its TTL is the delay plus at most the tolerance less
    /// the lead, and a tolerance above the least is never above the lead: so this holds for every lead, and the lead may
    /// be changed without another queue argument.
    #[must_use]
    pub fn longest_ttl(&self) -> Duration {
        self.delay.saturating_add(*LANE_TOLERANCE.start())
    }
}

impl DelaySettings {
    /// How far a delay may be from a lane's and still take it. The TTLs in one queue may then differ by twice as much, by
    /// which a message can be held up behind another; the lead makes up for that.
    #[must_use]
    pub fn lane_tolerance(&self) -> Duration {
        (self.lead / 2).clamp(*LANE_TOLERANCE.start(), *LANE_TOLERANCE.end())
    }
}

impl TryFrom<String> for Lane {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let delay = duration::parse(text.trim())
            .map_err(|fault| format!("{text:?} is not a duration such as 30m ({fault})"))?;
        // Written back by one rule, so that "1800s" and "30m" mean the same queue.
        Ok(Self { name: duration_name(delay), delay })
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RingSettings {
    #[serde(deserialize_with = "duration::read")]
    pub unit: Duration,
    pub slots: u16,
    #[serde(default, deserialize_with = "duration::read_if_given")]
    pub early: Option<Duration>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerSettings {
    #[serde(deserialize_with = "duration::read")]
    pub hold_max: Duration,
    pub shards: u8,
    pub take_shards: Vec<u8>,
    pub prefetch: u16,
    pub arm_prefetch: u16,
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
    /// The processing queue that each channel consumes: those that are named, or all. A channel is one process in the
    /// broker and one core of it, so a queue that is alone has two.
    #[must_use]
    pub fn shard_of_each_channel(&self) -> Vec<u8> {
        let mut taken: Vec<u8> =
            if self.take_shards.is_empty() { (0..self.shards).collect() } else { self.take_shards.clone() };
        if let [alone] = taken[..] {
            taken.push(alone);
        }
        taken
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
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
    /// The longest that a retry waits at the broker: the engine doubles `longest` five times.
    #[must_use]
    pub fn longest_wait(&self) -> Duration {
        self.longest.saturating_mul(32)
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SweepSettings {
    #[serde(deserialize_with = "duration::read")]
    pub every: Duration,
    #[serde(deserialize_with = "duration::read")]
    pub grace: Duration,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnnounceSettings {
    #[serde(deserialize_with = "duration::read")]
    pub poll: Duration,
    pub batch_size: usize,
    #[serde(deserialize_with = "duration::read")]
    pub keep: Duration,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ParkedSettings {
    #[serde(deserialize_with = "duration::read")]
    pub keep: Duration,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpSettings {
    pub listen: Listen,
}

/// An address and port to listen at; `None` for nowhere. Not a host's name: looking it up would be I/O, and might find
/// another address than the one that was meant.
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
                "{text:?} is not an IP address with a port; write 127.0.0.1:9394, [::1]:9394, or nothing at all for no health and metrics"
            )
        };
        text.parse().map(|address| Self(Some(address))).map_err(why)
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OrdersSettings {
    pub close_sql: String,
    pub overdue_sql: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogSettings {
    #[serde(deserialize_with = "one_of_its_words")]
    pub format: LogFormat,
    pub filter: String,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    Human,
    Json,
}

/// What is wrong with the settings: one sentence with the key and where its value came from.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{}{}: {why}", if key.is_some() { "setting " } else { "settings" }, key.as_deref().unwrap_or_default(), origin.as_ref().map_or_else(String::new, |origin| format!(" (from {origin})")))]
pub struct SettingsError {
    key: Option<String>,
    origin: Option<String>,
    why: String,
}

/// The addresses that our own sentences show.
const AMQP_FORM: &str = "amqp://user:password@host:5672/vhost";
const POSTGRES_FORM: &str = "postgres://user:password@host:5432/database";
const AMQP_SCHEMES: [&str; 3] = ["amqp:// or amqps://", "begins with amqp://", "write amqps://"];

impl SettingsError {
    fn of(key: &str, why: impl std::fmt::Display) -> Self {
        Self::new(Some(key.to_owned()), None, why.to_string())
    }

    /// Why an address is refused, which never repeats a part of it.
    fn of_address(key: &str, why: &AddressError) -> Self {
        let form = if key == "amqp.url" { AMQP_FORM } else { POSTGRES_FORM };
        Self { key: Some(key.to_owned()), origin: None, why: format!("{why} (its form: {form})") }
    }

    /// The one door to a fault that may repeat a value. An address is not repeated, whatever setting it was given to,
    /// for it may hold a password.
    fn new(key: Option<String>, origin: Option<String>, why: String) -> Self {
        let ours = [AMQP_FORM, POSTGRES_FORM].into_iter().chain(AMQP_SCHEMES);
        let theirs = ours.fold(why.clone(), |text, form| text.replace(form, ""));
        let why = if has_an_address(&theirs) {
            "an address stands where none belongs; it is not repeated here, for it may hold a password".to_owned()
        } else {
            why
        };
        Self { key: key.filter(|key| is_a_key(key)), origin, why }
    }
}

fn has_an_address(text: &str) -> bool {
    text.contains("://") || text.contains('@')
}

/// Whether this could name a setting: anything else may be a value that was given in its place.
fn is_a_key(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-[]".contains(&b))
}

impl Settings {
    /// The wheel's rings as arithmetic.
    ///
    /// # Errors
    /// [`WheelError`] where they do not mesh.
    pub fn wheel(&self) -> Result<Wheel, WheelError> {
        let rings = self.delay.rings.iter().enumerate().map(|(index, ring)| Ring {
            name: duration_name(ring.unit),
            unit: ring.unit,
            slots: ring.slots,
            // The finest ring hands over to the worker's hold. Each coarser one to the next finer, which must have everything
            // before it lets go in its turn.
            early: if index == 0 {
                self.delay.lead
            } else {
                self.delay.lead.saturating_add(ring.early.unwrap_or(ring.unit / 6))
            },
        });
        Wheel::new(rings.collect())
    }
}

/// The name of a duration in queue names and routing keys: its largest whole unit, such as `90s`, `30m`, `2h`.
fn duration_name(duration: Duration) -> String {
    let millis = duration.as_millis();
    for (unit, in_millis) in [("h", 3_600_000), ("m", 60_000), ("s", 1_000)] {
        if millis >= in_millis && millis.is_multiple_of(in_millis) {
            return format!("{}{unit}", millis / in_millis);
        }
    }
    format!("{millis}ms")
}

#[cfg(test)]
mod tests;
