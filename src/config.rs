//! Settings: where they come from, what they must be, and one sentence for each thing that is wrong with them.
//!
//! How they are loaded stands in `load.rs`. No I/O after loading, no default outside `config/default.toml`, and no secret in any output: addresses with
//! passwords are [`SecretString`]s and errors never repeat a value of theirs.

use std::net::SocketAddr;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::message::{AMQP_MAX_SHORT_STRING_BYTES, LONGEST_TTL};
use crate::tls::TlsFiles;
use crate::wheel::{BadWheel, Ring, Wheel};

mod load;

/// The documented defaults, embedded so that a worker runs without any file.
pub const DEFAULTS: &str = include_str!("../config/default.toml");

const AMQP_MAX_PREFETCH: u16 = u16::MAX;
/// Each takes up to 16 queues, and the broker pays for every one.
const MAX_LANES: usize = 64;
/// RabbitMQ takes the channel away from a consumer that has not acknowledged for 30 minutes.
const LONGEST_HOLD: Duration = Duration::from_secs(20 * 60);
const DAY: Duration = Duration::from_secs(86_400);

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
    pub url_file: String,
    pub ca_file: String,
    pub client_cert_file: String,
    pub client_key_file: String,
    #[serde(with = "humantime_serde")]
    pub acquire_timeout: Duration,
    #[serde(with = "humantime_serde")]
    pub statement_timeout: Duration,
    #[serde(with = "humantime_serde")]
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

    /// Whether the server must have a certificate that is checked because certificates are named and nothing else is
    /// said.
    #[must_use]
    pub fn verifies_by_default(&self) -> bool {
        let parameters = parameters_of(self.url.expose_secret());
        let names_one = PG_TLS_FILES.iter().any(|(_, names)| parameter(&parameters, names).is_some());
        (self.tls_files().is_any() || names_one) && parameter(&parameters, &PG_SSLMODE).is_none()
    }

    fn validate_tls(&self) -> Result<(), BadSettings> {
        let parameters = parameters_of(self.url.expose_secret());
        // The client library would ignore it, with a warning that shows its value.
        let is_known = |key: &str| PG_PARAMETERS.contains(&key) || key.starts_with("options[");
        if let Some((unknown, _)) = parameters.iter().find(|(key, _)| !is_known(key)) {
            let why = format!("has the parameter {unknown:?}, which the client library does not know; leave it out");
            return Err(BadSettings::of("database.url", why));
        }
        let files = self.tls_files();
        validate_pair(files)?;
        let settings = [files.ca_file, files.client_cert_file, files.client_key_file];
        let mut named = files.is_any().then_some("the settings name");
        for (setting, (key, names)) in settings.into_iter().zip(PG_TLS_FILES) {
            if parameter(&parameters, &names).is_none() {
                continue;
            }
            named = Some("its parameters name");
            if !setting.is_empty() {
                let why = format!("is given, and so is {} in database.url; leave one of them out", names[0]);
                return Err(BadSettings::of(key, why));
            }
        }
        match (named, parameter(&parameters, &PG_SSLMODE)) {
            (Some(named), Some(mode)) if !["verify-full", "verify-ca"].contains(&mode) => {
                let why = format!(
                    "says sslmode={mode}, which checks nothing, while {named} certificates; write sslmode=verify-full or leave it out"
                );
                Err(BadSettings::of("database.url", why))
            }
            _ => Ok(()),
        }
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

/// What sqlx knows in the query of an address (sqlx-postgres, `PgConnectOptions::parse_from_url`), each TLS file with its other names.
const PG_PARAMETERS: [&str; 18] = [
    "sslmode",
    "ssl-mode",
    "sslrootcert",
    "ssl-root-cert",
    "ssl-ca",
    "sslcert",
    "ssl-cert",
    "sslkey",
    "ssl-key",
    "statement-cache-capacity",
    "host",
    "hostaddr",
    "port",
    "dbname",
    "user",
    "password",
    "application_name",
    "options",
];
const PG_SSLMODE: [&str; 2] = ["sslmode", "ssl-mode"];
/// The setting, and the parameters that mean the same.
const PG_TLS_FILES: [(&str, [&str; 3]); 3] = [
    ("database.ca_file", ["sslrootcert", "ssl-root-cert", "ssl-ca"]),
    ("database.client_cert_file", ["sslcert", "ssl-cert", "ssl-cert"]),
    ("database.client_key_file", ["sslkey", "ssl-key", "ssl-key"]),
];

/// The parameters in an address' query.
fn parameters_of(url: &str) -> Vec<(String, String)> {
    url::Url::parse(url).map_or_else(|_| Vec::new(), |url| url.query_pairs().into_owned().collect())
}

/// The value of the first parameter with one of these names.
fn parameter<'a>(parameters: &'a [(String, String)], names: &[&str]) -> Option<&'a str> {
    parameters.iter().find(|(key, _)| names.contains(&key.as_str())).map(|(_, value)| value.as_str())
}

/// A client certificate is of no use without its key, nor a key without its certificate.
fn validate_pair(files: TlsFiles<'_>) -> Result<(), BadSettings> {
    let section = files.section;
    let (given, missing) = match (files.client_cert_file, files.client_key_file) {
        (_, "") if !files.client_cert_file.is_empty() => ("client_cert_file", "client_key_file"),
        ("", key) if !key.is_empty() => ("client_key_file", "client_cert_file"),
        _ => return Ok(()),
    };
    let why = format!("is given without {section}.{missing}; the two go together");
    Err(BadSettings::of(&format!("{section}.{given}"), why))
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
pub struct SweepSettings {
    #[serde(with = "humantime_serde")]
    pub every: Duration,
    #[serde(with = "humantime_serde")]
    pub grace: Duration,
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

impl OrdersSettings {
    /// Both are about one table: ours or the user's.
    fn validate(&self) -> Result<(), BadSettings> {
        let (given, missing) = match (self.close_sql.is_empty(), self.overdue_sql.is_empty()) {
            (false, true) => ("orders.close_sql", "orders.overdue_sql"),
            (true, false) => ("orders.overdue_sql", "orders.close_sql"),
            (true, true) | (false, false) => return Ok(()),
        };
        let why = format!(
            "is given without {missing}, so the worker would look after two tables at once; give both, or neither"
        );
        Err(BadSettings::of(given, why))
    }
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

/// The addresses that our own sentences show.
const AMQP_FORM: &str = "amqp://user:password@host:5672/vhost";
const POSTGRES_FORM: &str = "postgres://user:password@host:5432/database";
const AMQP_SCHEMES: [&str; 3] = ["amqp:// or amqps://", "begins with amqp://", "write amqps://"];

impl BadSettings {
    fn of(key: &str, why: impl std::fmt::Display) -> Self {
        Self::new(Some(key.to_owned()), None, why.to_string())
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
    /// Every rule that spans more than one value's form.
    ///
    /// # Errors
    /// [`BadSettings`] for the first rule that is broken.
    pub fn validate(&self) -> Result<(), BadSettings> {
        self.validate_namespace()?;
        self.validate_addresses()?;
        self.validate_delay()?;
        self.validate_worker()?;
        self.orders.validate()?;
        tracing_subscriber::EnvFilter::try_new(&self.log.filter)
            .map(drop)
            .map_err(|fault| BadSettings::of("log.filter", format!("{fault}; write it like order_timeout=debug,info")))
    }

    /// Whether `database.url` can be one, and the certificates named beside it fit. Apart from [`Settings::validate`], because a program that only publishes has no
    /// need of it, and may have a `DATABASE_URL` of quite another kind.
    ///
    /// # Errors
    /// [`BadSettings`] if it is not the address of a Postgres.
    pub fn validate_database(&self) -> Result<(), BadSettings> {
        let database = self.database.url.expose_secret();
        let is_postgres = database.starts_with("postgres://") || database.starts_with("postgresql://");
        if is_postgres
            && url::Url::parse(database).is_ok()
            && database.parse::<sqlx::postgres::PgConnectOptions>().is_ok()
        {
            return self.database.validate_tls();
        }
        Err(BadSettings::of("database.url", format!("is not a Postgres address; write {POSTGRES_FORM}")))
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
        if self.namespace == "amq" {
            let why = "\"amq\" is the broker's own: it lets nobody declare what begins with \"amq.\"; choose another";
            return Err(BadSettings::of("namespace", why));
        }
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
                format!("must begin with {}, such as {AMQP_FORM}", AMQP_SCHEMES[0]),
            ));
        }
        let parsed = amqp.parse::<lapin::uri::AMQPUri>().map_err(|fault| {
            let why = format!(
                "is not an AMQP address ({fault}); write {AMQP_FORM}, with / # ? % in name and password percent-encoded"
            );
            BadSettings::of("amqp.url", why)
        })?;
        if parsed.vhost.len() > AMQP_MAX_SHORT_STRING_BYTES {
            let why = format!("its virtual host has more than {AMQP_MAX_SHORT_STRING_BYTES} bytes");
            return Err(BadSettings::of("amqp.url", why));
        }
        let files = self.amqp.tls_files();
        validate_pair(files)?;
        if files.is_any() && amqp.starts_with("amqp://") {
            let why = "begins with amqp:// while certificates are named, so it would go in the clear; write amqps:// or name none";
            return Err(BadSettings::of("amqp.url", why));
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
        validate_lanes(delay)?;
        self.validate_rings()
    }

    fn validate_rings(&self) -> Result<(), BadSettings> {
        let key = "delay.rings";
        for ring in &self.delay.rings {
            within(key, ring.unit, Duration::from_millis(1), LONGEST_TTL)?;
            whole_millis(key, ring.unit)?;
            // A slot's queue lets go of everything after a whole round.
            within(key, ring.unit * u32::from(ring.slots), Duration::ZERO, LONGEST_TTL)?;
            within(key, ring.early.unwrap_or_default(), Duration::ZERO, LONGEST_TTL)?;
        }
        self.wheel().map(drop).map_err(|fault| BadSettings::of(key, fault))
    }

    fn validate_worker(&self) -> Result<(), BadSettings> {
        let worker = &self.worker;
        // What the finest ring hands over is due at most lead + one unit later; two seconds are for the way.
        let finest = self.delay.rings[0].unit;
        let least_hold = self.delay.lead + finest + Duration::from_secs(2);
        if least_hold > LONGEST_HOLD {
            let [finest, longest] = [finest, LONGEST_HOLD].map(humantime::format_duration);
            let why = format!(
                "the finest ring's unit {finest} would make alarms wait in the worker for over {longest}; begin with a finer ring"
            );
            return Err(BadSettings::of("delay.rings", why));
        }
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
        for (key, value, least, most) in [
            ("worker.hold_max", worker.hold_max, Duration::ZERO, LONGEST_HOLD),
            ("worker.linger", worker.linger, Duration::ZERO, Duration::from_secs(1)),
            ("worker.away_patience", worker.away_patience, Duration::from_millis(1), Duration::from_secs(3_600)),
            ("worker.shutdown_grace", worker.shutdown_grace, Duration::ZERO, Duration::from_secs(3_600)),
            ("sweep.every", self.sweep.every, Duration::from_millis(10), Duration::from_secs(60)),
            ("sweep.grace", self.sweep.grace, Duration::ZERO, Duration::from_secs(3_600)),
            ("announce.poll", self.announce.poll, Duration::from_millis(1), Duration::from_secs(60)),
            ("announce.keep", self.announce.keep, Duration::ZERO, 3_650 * DAY),
        ] {
            within(key, value, least, most)?;
        }
        self.validate_retry()
    }

    fn validate_retry(&self) -> Result<(), BadSettings> {
        let retry = &self.retry;
        within("retry.longest", retry.longest, Duration::from_millis(1), Duration::from_secs(60))?;
        within("retry.first", retry.first, Duration::from_millis(1), retry.longest)?;
        within("retry.missing_for", retry.missing_for, Duration::ZERO, 7 * DAY)?;
        if retry.max_attempts > 1_000 {
            return Err(BadSettings::of("retry.max_attempts", format!("{} is more than 1000", retry.max_attempts)));
        }
        Ok(())
    }
}

fn validate_lanes(delay: &DelaySettings) -> Result<(), BadSettings> {
    let key = "delay.lanes";
    if delay.lanes.len() > MAX_LANES {
        let why = format!("{} lanes are more than {MAX_LANES}; the wheel takes every other delay", delay.lanes.len());
        return Err(BadSettings::of(key, why));
    }
    for lane in &delay.lanes {
        within(key, lane.delay, Duration::from_millis(1), delay.max_delay)?;
        within(key, lane.longest_ttl(), Duration::ZERO, LONGEST_TTL)?;
        whole_millis(key, lane.delay)?;
        if delay.lanes.iter().filter(|other| other.delay == lane.delay).count() > 1 {
            return Err(BadSettings::of(key, format!("{} is named twice; name it once", lane.name)));
        }
    }
    Ok(())
}

/// Milliseconds are what the broker counts in, and what queues are named by: two that differ by less would be one queue.
fn whole_millis(key: &str, value: Duration) -> Result<(), BadSettings> {
    if value.subsec_nanos().is_multiple_of(1_000_000) {
        return Ok(());
    }
    let value = humantime::format_duration(value);
    Err(BadSettings::of(key, format!("{value} is not a whole number of milliseconds")))
}

fn within(key: &str, value: Duration, least: Duration, most: Duration) -> Result<(), BadSettings> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let [value, least, most] = [value, least, most].map(humantime::format_duration);
    Err(BadSettings::of(key, format!("{value} is not between {least} and {most}")))
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
mod tests {
    use super::{Duration, ExposeSecret, Settings, load};
    use proptest::prelude::*;

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
    fn health_and_metrics_are_shown_to_this_machine_alone_unless_told_otherwise() {
        let listen = |overrides: &[&str]| load(&[], overrides).unwrap().http.listen.0;
        assert!(listen(&[]).is_some_and(|address| address.ip().is_loopback()));
        assert_eq!(listen(&["http.listen="]), None);
        assert_eq!(listen(&["http.listen=[::]:9394"]), Some("[::]:9394".parse().unwrap()));
    }

    #[test]
    fn a_publisher_does_not_mind_a_database_of_another_kind() {
        for url in ["mysql://shop:hunter2@h/shop", "sqlite::memory:", "", "postgres://u:hunter2@h:port/d"] {
            let settings = load(&[("DATABASE_URL", url)], &[]).unwrap();
            let fault = settings.validate_database().unwrap_err().to_string();
            assert!(fault.contains("database.url") && !fault.contains("hunter2"), "{fault}");
        }
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
        check(&[], &["database.acquire_timeout=2h"], &["database.acquire_timeout", "--set"]);
        check(&[], &["worker.hold_max=6s"], &["worker.hold_max", "12s"]);
        check(&[], &["nonsense"], &["--set", "="]);
        check(&[], &["delay.strategy=magic"], &["delay.strategy", "magic"]);
        check(&[], &["delay.lanes=30m,1800s"], &["delay.lanes", "twice"]);
        check(&[], &["http.listen=9394"], &["http.listen", "--set", "\"9394\"", "127.0.0.1:9394"]);
        check(&[("ORDER_TIMEOUT__HTTP__LISTEN", "localhost:9394")], &[], &["http.listen", "environment", "IP address"]);
    }

    #[test]
    fn an_address_in_the_wrong_place_is_never_repeated() {
        for address in
            ["amqp://shop:hunter2@host/v", "postgres://shop:hunter2@h/d?a=b", "shop:hunter2@host", "amqps://hunter2"]
        {
            let keys = load::every_key().into_iter().map(|key| format!("{key}={address}"));
            let without_a_key = ["", "=", " = 3", "delay.leed=", "x[0].y="].map(|before| format!("{before}{address}"));
            for text in keys.chain(without_a_key) {
                let fault = load(&[], &[&text]).map(drop);
                assert!(!format!("{fault:?}").contains("hunter2"), "{text}: {fault:?}");
            }
            for contents in [
                format!("namespace = {address:?}"),
                format!("{address:?} = 1"),
                format!("[{address:?}]\na = 1"),
                format!("delay = {{ lanes = [{address:?}], rings = [{{ unit = {address:?}, slots = 9 }}] }}"),
                format!("delay = {{ rings = [{{ {address:?} = 5 }}] }}"),
            ] {
                let fault = load_file(&contents).unwrap_err();
                assert!(!fault.contains("hunter2"), "{contents}: {fault}");
            }
        }
    }

    #[test]
    fn every_duration_and_number_has_a_bound() {
        for (setting, bound) in [
            ("amqp.heartbeat=11m", "10m"),
            ("amqp.connect_timeout=61m", "1h"),
            ("delay.lead=11m", "10m"),
            ("delay.max_delay=101years", "99years"),
            ("delay.lanes=3650d", "and 9years"),
            ("worker.hold_max=21m", "20m"),
            ("worker.away_patience=61m", "1h"),
            ("worker.shutdown_grace=18446744073709551615s", "1h"),
            ("announce.keep=3651d", "9years"),
            ("retry.missing_for=8d", "7days"),
            ("retry.max_attempts=1001", "1000"),
            ("delay.lanes=1500us", "whole number of milliseconds"),
        ] {
            let fault = load(&[], &[setting]).unwrap_err();
            let key = setting.split('=').next().unwrap();
            for part in [key, "--set", bound] {
                assert!(fault.contains(part), "{setting}: {fault:?} lacks {part:?}");
            }
        }
        let lanes = (1..=65).map(|minutes| format!("{minutes}m")).collect::<Vec<_>>().join(",");
        assert!(load(&[], &[&format!("delay.lanes={lanes}")]).unwrap_err().contains("more than 64"));
    }

    #[test]
    fn rings_beyond_what_the_broker_takes_are_refused() {
        for (ring, why) in [
            ("{ unit = \"10000000000s\", slots = 20 }", "is not between"),
            ("{ unit = \"18446744073709551615s\", slots = 65535 }", "is not between"),
            ("{ unit = \"200d\", slots = 20 }", "is not between"),
            ("{ unit = \"1h\", slots = 20 }", "begin with a finer ring"),
            ("{ unit = \"5s\", slots = 20, early = \"18446744073709551615s\" }", "is not between"),
            ("{ unit = \"1500500us\", slots = 20 }", "whole number of milliseconds"),
        ] {
            let fault = load_file(&format!("[delay]\nrings = [{ring}]\n")).unwrap_err();
            assert!(fault.contains("delay.rings") && fault.contains(why), "{ring}: {fault:?}");
        }
    }

    fn load_file(contents: &str) -> Result<Settings, String> {
        let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
        std::fs::write(file.path(), contents).unwrap();
        Settings::load_with_environment(Some(file.path()), Default::default(), &[]).map_err(|fault| fault.to_string())
    }

    /// What nobody means, but somebody will type.
    fn extreme_value() -> impl Strategy<Value = String> {
        let numbers = ["-1", "0", "1", "255", "256", "65535", "65536", "4294967296", "9223372036854775807", "1e400"];
        let far = ["18446744073709551615", "315360000", "9223372036854", "584554049253", "1000000", "1", "0"];
        let units = ["ns", "us", "ms", "s", "m", "h", "d", "years"];
        let words = [
            "",
            ",",
            "=",
            "amqp://h/?heartbeat=65536",
            "amqp://h:65535/?frame_max=0",
            "postgres://h",
            "\u{0}",
            "[",
            "true",
        ];
        prop_oneof![
            proptest::sample::select(numbers.to_vec()).prop_map(str::to_owned),
            (proptest::sample::select(far.to_vec()), proptest::sample::select(units.to_vec()))
                .prop_map(|(number, unit)| format!("{number}{unit}")),
            proptest::sample::select(words.to_vec()).prop_map(str::to_owned),
            (1_usize..400).prop_map(|length| format!("amqp://h/{}", "v".repeat(length))),
        ]
    }

    /// Everything that is built from settings before anything is reached.
    fn build(settings: &Settings) {
        let wheel = settings.wheel().expect("accepted rings mesh");
        let topology = crate::topology::Topology::new(settings);
        assert!(!topology.definitions("v").is_null());
        let lanes = crate::schedule::lane::Lanes::new(settings);
        let id = crate::OrderId::new("1").unwrap();
        for now in [i64::MIN, 0, 4_000_000_000_000_000, i64::MAX].map(crate::Moment::from_unix_micros) {
            for due in [now, now + settings.delay.max_delay, crate::Moment::from_unix_micros(i64::MAX)] {
                let _ = (wheel.place(due, now), wheel.place_retry(due, now), lanes.entry(&id, due, now));
            }
        }
        for wait in [settings.worker.shutdown_grace, settings.worker.hold_max, settings.worker.away_patience] {
            let _ = std::time::Instant::now() + wait;
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn no_value_of_any_setting_is_worse_than_refused(
            settings in proptest::collection::vec((any::<proptest::sample::Index>(), extreme_value()), 1..4),
        ) {
            let keys = load::every_key();
            let overrides: Vec<String> =
                settings.iter().map(|(index, value)| format!("{}={value}", index.get(&keys))).collect();
            let given: Vec<&str> = overrides.iter().map(String::as_str).collect();
            if let Ok(settings) = load(&[], &given) {
                build(&settings);
            }
        }

        #[test]
        fn no_rings_are_worse_than_refused(
            rings in proptest::collection::vec((extreme_value(), 0_u32..70_000, extreme_value()), 1..4), plain in any::<bool>(),
        ) {
            let rings: Vec<String> = rings
                .iter()
                .map(|(unit, slots, early)| {
                    let early = if plain { String::new() } else { format!(", early = {early:?}") };
                    format!("{{ unit = {unit:?}, slots = {slots}{early} }}")
                })
                .collect();
            if let Ok(settings) = load_file(&format!("[delay]\nrings = [{}]\n", rings.join(", "))) {
                build(&settings);
            }
        }
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
