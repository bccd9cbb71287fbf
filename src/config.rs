//! Settings: where they come from, what they must be, and one sentence for each thing that is wrong with them.
//!
//! No I/O after loading, no default outside `config/default.toml`, and no secret in any output: addresses with
//! passwords are [`SecretString`]s and errors never repeat a value of theirs.

use std::path::Path;
use std::time::Duration;

use config::{Config, ConfigError, Environment, File, FileFormat, Map, Value, ValueKind};
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::wheel::{BadWheel, Ring, Wheel};

/// The documented defaults, embedded so that a worker runs without any file.
pub const DEFAULTS: &str = include_str!("../config/default.toml");

const ENV_PREFIX: &str = "ORDER_TIMEOUT";
const AMQP_MAX_PREFETCH: u16 = u16::MAX;

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
    pub announce: AnnounceSettings,
    pub orders: OrdersSettings,
    pub log: LogSettings,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AmqpSettings {
    pub url: SecretString,
    #[serde(with = "humantime_serde")]
    pub heartbeat: Duration,
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    #[serde(with = "humantime_serde")]
    pub confirm_timeout: Duration,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatabaseSettings {
    pub url: SecretString,
    #[serde(with = "humantime_serde")]
    pub acquire_timeout: Duration,
    #[serde(with = "humantime_serde")]
    pub statement_timeout: Duration,
    #[serde(with = "humantime_serde")]
    pub lock_timeout: Duration,
}

impl DatabaseSettings {
    /// The address of another database on the same server, for programs that make one of their own.
    ///
    /// # Panics
    /// If the address is none, which [`Settings::validate`] refuses.
    #[must_use]
    pub fn url_of(&self, database: &str) -> SecretString {
        let mut url =
            url::Url::parse(self.url.expose_secret()).expect("validated settings have an address that parses");
        url.set_path(database);
        String::from(url).into()
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DelaySettings {
    pub strategy: Strategy,
    pub lanes: Vec<Lane>,
    pub lane_shards: u8,
    #[serde(with = "humantime_serde")]
    pub lead: Duration,
    #[serde(with = "humantime_serde")]
    pub max_delay: Duration,
    pub rings: Vec<RingSettings>,
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

impl TryFrom<String> for Lane {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let delay = humantime::parse_duration(text.trim())
            .map_err(|fault| format!("{text:?} is not a duration such as 30m ({fault})"))?;
        // Written back by one rule, so that "1800s" and "30m" mean the same queue.
        Ok(Self { name: duration_name(delay), delay })
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RingSettings {
    #[serde(with = "humantime_serde")]
    pub unit: Duration,
    pub slots: u16,
    #[serde(default, with = "humantime_serde")]
    pub early: Option<Duration>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerSettings {
    #[serde(with = "humantime_serde")]
    pub hold_max: Duration,
    pub prefetch: u16,
    pub arm_prefetch: u16,
    pub batch_size: usize,
    #[serde(with = "humantime_serde")]
    pub linger: Duration,
    pub closers: usize,
    #[serde(with = "humantime_serde")]
    pub away_patience: Duration,
    #[serde(with = "humantime_serde")]
    pub shutdown_grace: Duration,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RetrySettings {
    #[serde(with = "humantime_serde")]
    pub first: Duration,
    #[serde(with = "humantime_serde")]
    pub longest: Duration,
    #[serde(with = "humantime_serde")]
    pub missing_for: Duration,
    pub max_attempts: u32,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AnnounceSettings {
    #[serde(with = "humantime_serde")]
    pub poll: Duration,
    pub batch_size: usize,
    #[serde(with = "humantime_serde")]
    pub keep: Duration,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OrdersSettings {
    pub close_sql: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LogSettings {
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
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct BadSettings(String);

impl BadSettings {
    fn of(key: &str, why: impl std::fmt::Display) -> Self {
        Self(format!("setting {key}: {why}"))
    }
}

impl Settings {
    /// Loads defaults, then `file`, then the environment, then `overrides` (`KEY=VALUE`), and checks the result.
    ///
    /// # Errors
    /// [`BadSettings`]: an unknown key, a value of the wrong form, a file that is not there, or values that do not
    /// fit together; with key and origin.
    pub fn load(file: Option<&Path>, overrides: &[String]) -> Result<Self, BadSettings> {
        Self::load_with_environment(file, std::env::vars().collect(), overrides)
    }

    /// The defaults alone, for a program that fills in its own addresses.
    #[must_use]
    pub fn defaults() -> Self {
        Self::load_with_environment(None, Map::new(), &[]).expect("config/default.toml is tested to be valid")
    }

    /// [`Settings::load`] with the environment given.
    ///
    /// # Errors
    /// As [`Settings::load`].
    pub fn load_with_environment(
        file: Option<&Path>,
        mut environment: Map<String, String>,
        overrides: &[String],
    ) -> Result<Self, BadSettings> {
        let mut builder = Config::builder().add_source(File::from_str(DEFAULTS, FileFormat::Toml));
        if let Some(path) = file {
            if !path.is_file() {
                return Err(BadSettings(format!(
                    "there is no settings file {}; correct --config or leave it out",
                    path.display()
                )));
            }
            builder = builder.add_source(File::from(path).format(FileFormat::Toml));
        }
        if let Some(url) = environment.get("DATABASE_URL").cloned() {
            environment.entry(format!("{ENV_PREFIX}__DATABASE__URL")).or_insert(url);
        }
        let environment_source = Environment::with_prefix(ENV_PREFIX)
            .prefix_separator("__")
            .separator("__")
            .list_separator(",")
            .with_list_parse_key("delay.lanes")
            .try_parsing(true)
            .source(Some(environment));
        builder = builder.add_source(environment_source);
        for text in overrides {
            let (key, value) = text
                .split_once('=')
                .ok_or_else(|| BadSettings(format!("--set {text:?} has no \"=\"; write it as --set delay.lead=3s")))?;
            builder = builder.set_override(key.trim(), override_value(key.trim(), value)).map_err(explain)?;
        }
        let merged = builder.build().map_err(explain)?;
        refuse_unknown_keys(&merged)?;
        let origins = leaf_keys(&merged.cache);
        let settings: Self = merged.try_deserialize().map_err(|fault| explain_from(fault, &origins))?;
        settings.validate()?;
        Ok(settings)
    }

    /// Every rule that spans more than one value's form.
    ///
    /// # Errors
    /// [`BadSettings`] for the first rule that is broken.
    pub fn validate(&self) -> Result<(), BadSettings> {
        self.validate_namespace()?;
        self.validate_addresses()?;
        self.validate_delay()?;
        self.validate_worker()?;
        tracing_subscriber::EnvFilter::try_new(&self.log.filter)
            .map(drop)
            .map_err(|fault| BadSettings::of("log.filter", format!("{fault}; write it like order_timeout=debug,info")))
    }

    /// The wheel's rings as arithmetic.
    ///
    /// # Errors
    /// [`BadWheel`] where they do not mesh.
    pub fn wheel(&self) -> Result<Wheel, BadWheel> {
        let rings = self.delay.rings.iter().enumerate().map(|(index, ring)| Ring {
            name: duration_name(ring.unit),
            unit: ring.unit,
            slots: ring.slots,
            // The finest ring hands over to the worker's hold, the coarser ones to the next finer ring.
            early: if index == 0 { self.delay.lead } else { ring.early.unwrap_or(ring.unit / 6) },
        });
        Wheel::new(rings.collect())
    }

    fn validate_namespace(&self) -> Result<(), BadSettings> {
        let fits = (1..=60).contains(&self.namespace.len())
            && self.namespace.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        if fits {
            return Ok(());
        }
        Err(BadSettings::of(
            "namespace",
            format!(
                "{:?} must be 1 to 60 letters, digits, \"-\" or \"_\", for it begins the name of every queue",
                self.namespace
            ),
        ))
    }

    fn validate_addresses(&self) -> Result<(), BadSettings> {
        let amqp = self.amqp.url.expose_secret();
        if !(amqp.starts_with("amqp://") || amqp.starts_with("amqps://")) {
            return Err(BadSettings::of(
                "amqp.url",
                "must begin with amqp:// or amqps://, such as amqp://user:password@host:5672/vhost",
            ));
        }
        if let Err(fault) = amqp.parse::<lapin::uri::AMQPUri>() {
            return Err(BadSettings::of(
                "amqp.url",
                format!("is not an AMQP address ({fault}); write amqp://user:password@host:5672/vhost"),
            ));
        }
        let database = self.database.url.expose_secret();
        let is_postgres = database.starts_with("postgres://") || database.starts_with("postgresql://");
        if !is_postgres
            || url::Url::parse(database).is_err()
            || database.parse::<sqlx::postgres::PgConnectOptions>().is_err()
        {
            return Err(BadSettings::of(
                "database.url",
                "is not a Postgres address; write postgres://user:password@host:5432/database",
            ));
        }
        for (key, value) in [
            ("amqp.heartbeat", self.amqp.heartbeat),
            ("amqp.connect_timeout", self.amqp.connect_timeout),
            ("amqp.confirm_timeout", self.amqp.confirm_timeout),
            ("database.acquire_timeout", self.database.acquire_timeout),
            ("database.statement_timeout", self.database.statement_timeout),
            ("database.lock_timeout", self.database.lock_timeout),
        ] {
            within(key, value, Duration::from_millis(1), Duration::from_secs(3_600))?;
        }
        within("amqp.heartbeat", self.amqp.heartbeat, Duration::from_secs(1), Duration::from_secs(600))
    }

    fn validate_delay(&self) -> Result<(), BadSettings> {
        let delay = &self.delay;
        if !(1..=16).contains(&delay.lane_shards) {
            return Err(BadSettings::of("delay.lane_shards", format!("{} is not between 1 and 16", delay.lane_shards)));
        }
        within("delay.lead", delay.lead, Duration::ZERO, Duration::from_secs(600))?;
        within("delay.max_delay", delay.max_delay, Duration::from_secs(1), Duration::from_secs(36_500 * 86_400))?;
        for lane in &delay.lanes {
            within("delay.lanes", lane.delay, Duration::from_millis(1), delay.max_delay)?;
            if delay.lanes.iter().filter(|other| other.delay == lane.delay).count() > 1 {
                return Err(BadSettings::of("delay.lanes", format!("{} is named twice; name it once", lane.name)));
            }
        }
        self.wheel().map(drop).map_err(|fault| BadSettings::of("delay.rings", fault))
    }

    fn validate_worker(&self) -> Result<(), BadSettings> {
        let worker = &self.worker;
        // What the finest ring hands over is due at most lead + one unit later; two seconds are for the way.
        let least_hold = self.delay.lead + self.delay.rings[0].unit + Duration::from_secs(2);
        if worker.hold_max < least_hold {
            return Err(BadSettings::of(
                "worker.hold_max",
                format!(
                    "{} is shorter than delay.lead + the finest ring's unit + 2s = {}; alarms would go round instead of waiting",
                    humantime::format_duration(worker.hold_max),
                    humantime::format_duration(least_hold)
                ),
            ));
        }
        for (key, value, most) in [
            ("worker.prefetch", usize::from(worker.prefetch), usize::from(AMQP_MAX_PREFETCH)),
            ("worker.arm_prefetch", usize::from(worker.arm_prefetch), usize::from(AMQP_MAX_PREFETCH)),
            ("worker.batch_size", worker.batch_size, 10_000),
            ("worker.closers", worker.closers, 32),
            ("announce.batch_size", self.announce.batch_size, 10_000),
        ] {
            if !(1..=most).contains(&value) {
                return Err(BadSettings::of(key, format!("{value} is not between 1 and {most}")));
            }
        }
        within("worker.linger", worker.linger, Duration::ZERO, Duration::from_secs(1))?;
        within("retry.first", self.retry.first, Duration::from_millis(1), self.retry.longest)?;
        within("retry.longest", self.retry.longest, Duration::from_millis(1), Duration::from_secs(60))?;
        within("announce.poll", self.announce.poll, Duration::from_millis(1), Duration::from_secs(60))
    }
}

fn within(key: &str, value: Duration, least: Duration, most: Duration) -> Result<(), BadSettings> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let [value, least, most] = [value, least, most].map(humantime::format_duration);
    Err(BadSettings::of(key, format!("{value} is not between {least} and {most}")))
}

/// The name of a duration in queue names and routing keys: its largest whole unit, such as `90s`, `30m`, `2h`.
#[must_use]
pub fn duration_name(duration: Duration) -> String {
    let millis = duration.as_millis();
    for (unit, in_millis) in [("h", 3_600_000), ("m", 60_000), ("s", 1_000)] {
        if millis >= in_millis && millis.is_multiple_of(in_millis) {
            return format!("{}{unit}", millis / in_millis);
        }
    }
    format!("{millis}ms")
}

fn override_value(key: &str, value: &str) -> Value {
    if key == "delay.lanes" {
        let lanes: Vec<String> = value.split(',').map(|lane| lane.trim().to_owned()).collect();
        return Value::new(Some(&"--set".to_owned()), lanes);
    }
    Value::new(Some(&"--set".to_owned()), value)
}

/// Refuses keys that `config/default.toml` does not have. Done here rather than by serde so that the sentence can say
/// where the key stands and what was probably meant.
fn refuse_unknown_keys(merged: &Config) -> Result<(), BadSettings> {
    let known = leaf_keys(
        &Config::builder().add_source(File::from_str(DEFAULTS, FileFormat::Toml)).build().map_err(explain)?.cache,
    );
    for (key, origin) in leaf_keys(&merged.cache) {
        if known.iter().any(|(name, _)| *name == key) {
            continue;
        }
        let likeness = |name: &str| strsim::normalized_damerau_levenshtein(name, &key);
        let meant = known.iter().max_by(|(a, _), (b, _)| likeness(a).total_cmp(&likeness(b)));
        let meant = meant.map_or_else(String::new, |(name, _)| format!("; did you mean {name}?"));
        return Err(BadSettings(format!("there is no setting {key} (from {}){meant}", origin_name(origin.as_deref()))));
    }
    Ok(())
}

/// Every key that holds a value rather than a section, with the origin of its value.
fn leaf_keys(root: &Value) -> Vec<(String, Option<String>)> {
    fn walk(prefix: &str, value: &Value, into: &mut Vec<(String, Option<String>)>) {
        match &value.kind {
            ValueKind::Table(table) => {
                for (key, value) in table {
                    let key = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                    walk(&key, value, into);
                }
            }
            _ => into.push((prefix.to_owned(), value.origin().map(str::to_owned))),
        }
    }
    let mut keys = Vec::new();
    walk("", root, &mut keys);
    keys.sort();
    keys
}

fn origin_name(origin: Option<&str>) -> &str {
    match origin {
        Some("the environment") | None => "the environment",
        Some(other) => other,
    }
}

fn explain(error: ConfigError) -> BadSettings {
    explain_from(error, &[])
}

/// `origins`: where each key's value came from, for the faults that do not carry it.
fn explain_from(error: ConfigError, origins: &[(String, Option<String>)]) -> BadSettings {
    fn parts(error: &ConfigError) -> (Option<String>, Option<String>, String) {
        match error {
            ConfigError::Type { origin, unexpected, expected, key } => {
                // An address may hold a password, so its value is never repeated.
                let secret = key.as_deref().is_some_and(|key| key.ends_with("url"));
                let found = if secret { "another kind of value".to_owned() } else { unexpected.to_string() };
                (key.clone(), origin.clone(), format!("expected {expected}, found {found}"))
            }
            ConfigError::At { error, origin, key } => {
                let (_, inner_origin, why) = parts(error);
                (key.clone(), origin.clone().or(inner_origin), why)
            }
            ConfigError::FileParse { uri, cause } => {
                let first_line =
                    cause.to_string().lines().map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join(" ");
                (None, uri.clone(), format!("the file is not valid TOML: {first_line}"))
            }
            other => (None, None, other.to_string()),
        }
    }
    let (key, origin, why) = parts(&error);
    let known_origin =
        origins.iter().find(|(name, _)| key.as_deref().and_then(|key| key.split('[').next()) == Some(name));
    let origin = origin.or_else(|| known_origin.and_then(|(_, origin)| origin.clone()));
    let from = origin.map_or_else(String::new, |origin| format!(" (from {})", origin_name(Some(&origin))));
    match key {
        Some(key) => BadSettings(format!("setting {key}{from}: {why}")),
        None => BadSettings(format!("settings{from}: {why}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(environment: &[(&str, &str)], overrides: &[&str]) -> Result<Settings, String> {
        let environment = environment.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        let overrides: Vec<String> = overrides.iter().map(|text| (*text).to_owned()).collect();
        Settings::load_with_environment(None, environment, &overrides).map_err(|fault| fault.to_string())
    }

    #[test]
    fn the_defaults_are_valid() {
        let settings = Settings::defaults();
        assert_eq!(settings.delay.lanes[0].name, "30m");
        assert_eq!(settings.delay.lead, Duration::from_secs(5));
    }

    #[test]
    fn the_environment_overrides_the_defaults_and_set_overrides_the_environment() {
        let settings = load(
            &[
                ("ORDER_TIMEOUT__DELAY__LANES", "15m,7200s"),
                ("ORDER_TIMEOUT__DELAY__LEAD", "3s"),
                ("ORDER_TIMEOUT__WORKER__CLOSERS", "3"),
            ],
            &["delay.lead=2s"],
        )
        .unwrap();
        assert_eq!(settings.delay.lanes.iter().map(|l| l.name.as_str()).collect::<Vec<_>>(), ["15m", "2h"]);
        assert_eq!(settings.delay.lead, Duration::from_secs(2));
        assert_eq!(settings.worker.closers, 3);
    }

    #[test]
    fn database_url_is_read_unless_the_longer_name_is_set() {
        let short = load(&[("DATABASE_URL", "postgres://a@h/short")], &[]).unwrap();
        assert_eq!(short.database.url.expose_secret(), "postgres://a@h/short");
        let both = load(
            &[("DATABASE_URL", "postgres://a@h/short"), ("ORDER_TIMEOUT__DATABASE__URL", "postgres://a@h/long")],
            &[],
        )
        .unwrap();
        assert_eq!(both.database.url.expose_secret(), "postgres://a@h/long");
    }

    #[test]
    fn each_fault_names_its_key_and_origin() {
        let check = |environment: &[(&str, &str)], overrides: &[&str], expect: &[&str]| {
            let fault = load(environment, overrides).unwrap_err();
            for part in expect {
                assert!(fault.contains(part), "{fault:?} lacks {part:?}");
            }
        };
        check(&[("ORDER_TIMEOUT__DELAY__LEED", "3s")], &[], &["delay.leed", "environment", "did you mean delay.lead?"]);
        check(&[("ORDER_TIMEOUT__DELAY__LEAD", "3 parsecs")], &[], &["delay.lead", "environment", "parsecs"]);
        check(&[], &["worker.closers=many"], &["worker.closers", "--set"]);
        check(&[("ORDER_TIMEOUT__AMQP__URL", "http://x:hunter2@y")], &[], &["amqp.url", "amqp://"]);
        check(&[], &["worker.hold_max=6s"], &["worker.hold_max", "12s"]);
        check(&[], &["nonsense"], &["--set", "="]);
        check(&[], &["delay.strategy=magic"], &["delay.strategy", "magic"]);
        check(&[], &["delay.lanes=30m,1800s"], &["delay.lanes", "twice"]);
    }

    #[test]
    fn no_fault_repeats_a_password() {
        for url in ["http://x:hunter2@y", "postgres://u:hunter2@[bad", "amqp://u:hunter2@host:notaport/"] {
            for key in ["amqp.url", "database.url"] {
                let fault = load(&[], &[&format!("{key}={url}")]).map(drop);
                assert!(!format!("{fault:?}").contains("hunter2"), "{fault:?}");
            }
        }
        let settings = load(&[("ORDER_TIMEOUT__AMQP__URL", "amqp://u:hunter2@h/")], &[]).unwrap();
        assert!(!format!("{settings:?}").contains("hunter2"));
    }
}
