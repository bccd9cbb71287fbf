//! Settings: where they come from, what they must be, and one sentence for each thing that is wrong with them.
//!
//! How they are loaded stands in `load.rs`. No I/O after loading, no default outside `config/default.toml`, and no secret in any output: addresses with
//! passwords are [`SecretString`]s and errors never repeat a value of theirs.

use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::wheel::{BadWheel, Ring, Wheel};

mod load;

/// The documented defaults, embedded so that a worker runs without any file.
pub const DEFAULTS: &str = include_str!("../config/default.toml");

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
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{}{}: {why}", if key.is_some() { "setting " } else { "settings" }, key.as_deref().unwrap_or_default(), origin.as_ref().map_or_else(String::new, |origin| format!(" (from {origin})")))]
pub struct BadSettings {
    key: Option<String>,
    origin: Option<String>,
    why: String,
}

impl BadSettings {
    fn of(key: &str, why: impl std::fmt::Display) -> Self {
        Self { key: Some(key.to_owned()), origin: None, why: why.to_string() }
    }
}

impl Settings {
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
