//! Checks that settings fit together: every rule beyond a value's form. Each violation is one sentence that names the
//! fix.
//!
//! Pure: reads nothing but the settings.

use std::time::Duration;

use secrecy::ExposeSecret;

use super::address::{AmqpAddress, PostgresAddress};
use super::{
    AMQP_FORM, AMQP_SCHEMES, DatabaseSettings, DelaySettings, OrdersSettings, POSTGRES_FORM, Settings, SettingsError,
};
use crate::message::{AMQP_MAX_SHORT_STRING_BYTES, LONGEST_TTL};
use crate::tls::TlsFiles;

const AMQP_MAX_PREFETCH: u16 = u16::MAX;
/// Each lane has up to 16 queues, and every queue costs the broker resources.
const MAX_LANES: usize = 64;
/// In all rings together. Each slot is a queue; a broker on two cores declares 150 a second, and all must be declared
/// within `DECLARE_TIMEOUT`. A hundred and fifty slots cover years.
const MAX_SLOTS: usize = 2_000;
/// Each shard is a channel of every worker that consumes it.
pub(crate) const MAX_SHARDS: u8 = 64;
/// RabbitMQ closes the channel of a consumer that has not acknowledged for 30 minutes.
const LONGEST_HOLD: Duration = Duration::from_secs(20 * 60);
const DAY: Duration = Duration::from_secs(86_400);

/// The fix for an address that is not UTF-8.
pub(super) const NOT_UTF8: &str = "in an address, write such a letter as %C3%A4";

impl Settings {
    /// Every rule that spans more than one value's form.
    ///
    /// # Errors
    /// [`SettingsError`] for the first rule that is broken.
    pub fn validate(&self) -> Result<(), SettingsError> {
        self.validate_namespace()?;
        self.validate_addresses()?;
        self.validate_delay()?;
        self.validate_worker()?;
        self.orders.validate()?;
        tracing_subscriber::EnvFilter::try_new(&self.log.filter).map(drop).map_err(|fault| {
            SettingsError::of("log.filter", format!("{fault}; write it like order_timeout=debug,info"))
        })
    }

    /// Whether `database.url` is a valid address, and the certificates named beside it fit. Separate from
    /// [`Settings::validate`], because a publisher does not need it, and may have a `DATABASE_URL` of another kind.
    ///
    /// # Errors
    /// [`SettingsError`] if it is not the address of a Postgres.
    pub fn validate_database(&self) -> Result<(), SettingsError> {
        let database = self.database.url.expose_secret();
        if database.contains(char::REPLACEMENT_CHARACTER) {
            return Err(SettingsError::of("database.url", format!("is not UTF-8; {NOT_UTF8}")));
        }
        if database.contains('#') {
            let why = "contains a #, after which nothing is read; in a user name or password write it percent-encoded, as %23";
            return Err(SettingsError::of("database.url", why));
        }
        let is_postgres = database.starts_with("postgres://") || database.starts_with("postgresql://");
        if is_postgres {
            PostgresAddress::parse(database).map_err(|fault| SettingsError::of_address("database.url", &fault))?;
        }
        if is_postgres
            && url::Url::parse(database).is_ok()
            && database.parse::<sqlx::postgres::PgConnectOptions>().is_ok()
        {
            return self.database.validate_tls();
        }
        Err(SettingsError::of("database.url", format!("is not a Postgres address; write {POSTGRES_FORM}")))
    }

    fn validate_namespace(&self) -> Result<(), SettingsError> {
        let fits = (1..=60).contains(&self.namespace.len())
            && self.namespace.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
        if self.namespace == "amq" {
            let why =
                "\"amq\" is reserved: the broker refuses to declare names that begin with \"amq.\"; choose another";
            return Err(SettingsError::of("namespace", why));
        }
        if fits {
            return Ok(());
        }
        Err(SettingsError::of(
            "namespace",
            format!(
                "{:?} must be 1 to 60 letters, digits, \"-\" or \"_\", because it is the prefix of every queue name",
                self.namespace
            ),
        ))
    }

    fn validate_addresses(&self) -> Result<(), SettingsError> {
        let amqp = self.amqp.url.expose_secret();
        if !(amqp.starts_with("amqp://") || amqp.starts_with("amqps://")) {
            return Err(SettingsError::of(
                "amqp.url",
                format!("must begin with {}, such as {AMQP_FORM}", AMQP_SCHEMES[0]),
            ));
        }
        let parsed = AmqpAddress::parse(amqp).map_err(|fault| SettingsError::of_address("amqp.url", &fault))?;
        if parsed.vhost.is_empty() {
            let why = "names no virtual host behind its last \"/\"; write /%2f for the default virtual host";
            return Err(SettingsError::of("amqp.url", why));
        }
        if parsed.vhost.len() > AMQP_MAX_SHORT_STRING_BYTES {
            let why = format!("its virtual host has more than {AMQP_MAX_SHORT_STRING_BYTES} bytes");
            return Err(SettingsError::of("amqp.url", why));
        }
        let files = self.amqp.tls_files();
        validate_pair(files)?;
        if files.is_any() && amqp.starts_with("amqp://") {
            let why = "begins with amqp:// while certificates are named, so the connection would not be encrypted; write amqps:// or name no certificates";
            return Err(SettingsError::of("amqp.url", why));
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
        // Otherwise the statement timeout would hide that a lock was the cause.
        if self.database.lock_timeout >= self.database.statement_timeout {
            let why = format!(
                "must be shorter than database.statement_timeout, which is {}",
                humantime::format_duration(self.database.statement_timeout)
            );
            return Err(SettingsError::of("database.lock_timeout", why));
        }
        within("amqp.heartbeat", self.amqp.heartbeat, Duration::from_secs(1), Duration::from_secs(600))
    }

    fn validate_delay(&self) -> Result<(), SettingsError> {
        let delay = &self.delay;
        if !(1..=16).contains(&delay.lane_shards) {
            return Err(SettingsError::of(
                "delay.lane_shards",
                format!("{} is not between 1 and 16", delay.lane_shards),
            ));
        }
        within("delay.lead", delay.lead, Duration::ZERO, Duration::from_secs(600))?;
        within("delay.max_delay", delay.max_delay, Duration::from_secs(1), Duration::from_secs(36_500 * 86_400))?;
        validate_lanes(delay)?;
        self.validate_rings()
    }

    fn validate_rings(&self) -> Result<(), SettingsError> {
        let key = "delay.rings";
        for ring in &self.delay.rings {
            within(key, ring.unit, Duration::from_millis(1), LONGEST_TTL)?;
            whole_millis(key, ring.unit)?;
            // A slot's queue expires its messages after at most a whole round.
            within(key, ring.unit * u32::from(ring.slots), Duration::ZERO, LONGEST_TTL)?;
            within(key, ring.early.unwrap_or_default(), Duration::ZERO, LONGEST_TTL)?;
        }
        let slots: usize = self.delay.rings.iter().map(|ring| usize::from(ring.slots)).sum();
        if slots > MAX_SLOTS {
            let why = format!(
                "{slots} slots are more than {MAX_SLOTS}, and each is a queue; give the rings fewer, the coarser ones with longer units"
            );
            return Err(SettingsError::of(key, why));
        }
        self.wheel().map_err(|fault| SettingsError::of(key, fault))?;
        if self.delay.rings[0].early.is_some() {
            let why = "the finest ring has an early, which would be ignored, because that ring's slots expire delay.lead before their unit; leave it out";
            return Err(SettingsError::of(key, why));
        }
        Ok(())
    }

    fn validate_worker(&self) -> Result<(), SettingsError> {
        let worker = &self.worker;
        // An alarm from the finest ring is due at most lead + one unit later; two seconds are for its delivery.
        let finest = self.delay.rings[0].unit;
        let least_hold = self.delay.lead + finest + Duration::from_secs(2);
        if least_hold > LONGEST_HOLD {
            let [finest, longest] = [finest, LONGEST_HOLD].map(humantime::format_duration);
            let why = format!(
                "the finest ring's unit {finest} would make alarms wait in the worker for over {longest}; begin with a finer ring"
            );
            return Err(SettingsError::of("delay.rings", why));
        }
        if worker.hold_max < least_hold {
            return Err(SettingsError::of(
                "worker.hold_max",
                format!(
                    "{} is shorter than delay.lead + the finest ring's unit + 2s = {}; alarms would circulate through the wheel instead of waiting in the worker",
                    humantime::format_duration(worker.hold_max),
                    humantime::format_duration(least_hold)
                ),
            ));
        }
        for (key, value, most) in [
            ("worker.shards", usize::from(worker.shards), usize::from(MAX_SHARDS)),
            ("worker.prefetch", usize::from(worker.prefetch), usize::from(AMQP_MAX_PREFETCH)),
            ("worker.arm_prefetch", usize::from(worker.arm_prefetch), usize::from(AMQP_MAX_PREFETCH)),
            ("worker.batch_size", worker.batch_size, 10_000),
            ("worker.closers", worker.closers, 32),
            ("announce.batch_size", self.announce.batch_size, 10_000),
        ] {
            if !(1..=most).contains(&value) {
                return Err(SettingsError::of(key, format!("{value} is not between 1 and {most}")));
            }
        }
        for (key, value, least, most) in [
            ("worker.hold_max", worker.hold_max, Duration::ZERO, LONGEST_HOLD),
            ("worker.linger", worker.linger, Duration::ZERO, Duration::from_secs(1)),
            ("worker.requeue_after", worker.requeue_after, Duration::from_millis(1), Duration::from_secs(3_600)),
            ("worker.shutdown_grace", worker.shutdown_grace, Duration::ZERO, Duration::from_secs(3_600)),
            ("sweep.every", self.sweep.every, Duration::from_millis(10), Duration::from_secs(60)),
            ("sweep.grace", self.sweep.grace, Duration::ZERO, Duration::from_secs(3_600)),
            ("announce.poll", self.announce.poll, Duration::from_millis(1), Duration::from_secs(60)),
            ("announce.keep", self.announce.keep, Duration::ZERO, 3_650 * DAY),
            ("parked.keep", self.parked.keep, Duration::ZERO, 3_650 * DAY),
        ] {
            within(key, value, least, most)?;
        }
        self.validate_shards()?;
        self.validate_retry()
    }

    fn validate_shards(&self) -> Result<(), SettingsError> {
        let (key, worker) = ("worker.take_shards", &self.worker);
        for (index, shard) in worker.take_shards.iter().enumerate() {
            if *shard >= worker.shards {
                let why = format!("there is no shard {shard}; worker.shards = {} counts from 0", worker.shards);
                return Err(SettingsError::of(key, why));
            }
            if worker.take_shards[..index].contains(shard) {
                return Err(SettingsError::of(key, format!("{shard} is named twice; name it once")));
            }
        }
        Ok(())
    }

    fn validate_retry(&self) -> Result<(), SettingsError> {
        let retry = &self.retry;
        within("retry.longest", retry.longest, Duration::from_millis(1), Duration::from_secs(60))?;
        within("retry.first", retry.first, Duration::from_millis(1), retry.longest)?;
        within("retry.missing_for", retry.missing_for, Duration::ZERO, 7 * DAY)?;
        if retry.max_attempts > 1_000 {
            return Err(SettingsError::of("retry.max_attempts", format!("{} is more than 1000", retry.max_attempts)));
        }
        self.validate_longest_retry()
    }

    /// A retry that waits longer than the wheel's furthest slot would come back early, and fail again early.
    fn validate_longest_retry(&self) -> Result<(), SettingsError> {
        let key = "delay.rings";
        let kept = self.wheel().map_err(|fault| SettingsError::of(key, fault))?.longest_wait();
        if self.retry.longest_wait() <= kept {
            return Ok(());
        }
        let [wanted, kept] = [self.retry.longest_wait(), kept].map(humantime::format_duration);
        let why = format!(
            "the rings can keep an alarm waiting for {kept} at most (5/6 · slots · unit, less one unit), but a retry waits for up to 32 times retry.longest = {wanted}; add a coarser ring, give the last one more slots, or make retry.longest shorter"
        );
        Err(SettingsError::of(key, why))
    }
}

impl DatabaseSettings {
    /// Whether the server's certificate is verified because certificates are named and no sslmode is given.
    #[must_use]
    pub fn verifies_by_default(&self) -> bool {
        let parameters = parameters_of(self.url.expose_secret());
        let names_one = PG_TLS_FILES.iter().any(|(_, names)| parameter(&parameters, names).is_some());
        (self.tls_files().is_any() || names_one) && parameter(&parameters, &PG_SSLMODE).is_none()
    }

    fn validate_tls(&self) -> Result<(), SettingsError> {
        let parameters = parameters_of(self.url.expose_secret());
        // The client library would ignore it, with a warning that shows its value.
        let is_known = |key: &str| PG_PARAMETERS.contains(&key) || key.starts_with("options[");
        if let Some((unknown, _)) = parameters.iter().find(|(key, _)| !is_known(key)) {
            let why = format!("has the parameter {unknown:?}, which the client library does not know; leave it out");
            return Err(SettingsError::of("database.url", why));
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
                return Err(SettingsError::of(key, why));
            }
        }
        match (named, parameter(&parameters, &PG_SSLMODE)) {
            (Some(named), Some(mode)) if !["verify-full", "verify-ca"].contains(&mode) => {
                let why = format!(
                    "says sslmode={mode}, which checks nothing, while {named} certificates; write sslmode=verify-full or leave it out"
                );
                Err(SettingsError::of("database.url", why))
            }
            _ => Ok(()),
        }
    }
}

impl OrdersSettings {
    /// Both statements must be about the same table: ours or the user's.
    fn validate(&self) -> Result<(), SettingsError> {
        let (given, missing) = match (self.close_sql.is_empty(), self.overdue_sql.is_empty()) {
            (false, true) => ("orders.close_sql", "orders.overdue_sql"),
            (true, false) => ("orders.overdue_sql", "orders.close_sql"),
            (true, true) | (false, false) => return Ok(()),
        };
        let why =
            format!("is given without {missing}, so the worker would use two tables at once; give both, or neither");
        Err(SettingsError::of(given, why))
    }
}

fn validate_lanes(delay: &DelaySettings) -> Result<(), SettingsError> {
    let key = "delay.lanes";
    if delay.lanes.len() > MAX_LANES {
        let why = format!("{} lanes are more than {MAX_LANES}; the wheel takes every other delay", delay.lanes.len());
        return Err(SettingsError::of(key, why));
    }
    for lane in &delay.lanes {
        within(key, lane.delay, Duration::from_millis(1), delay.max_delay)?;
        within(key, lane.longest_ttl(), Duration::ZERO, LONGEST_TTL)?;
        whole_millis(key, lane.delay)?;
        if delay.lanes.iter().filter(|other| other.delay == lane.delay).count() > 1 {
            return Err(SettingsError::of(key, format!("{} is named twice; name it once", lane.name)));
        }
    }
    Ok(())
}

/// The broker counts in milliseconds, and so do queue names: two durations that differ by less would be the same queue.
fn whole_millis(key: &str, value: Duration) -> Result<(), SettingsError> {
    if value.subsec_nanos().is_multiple_of(1_000_000) {
        return Ok(());
    }
    let value = humantime::format_duration(value);
    Err(SettingsError::of(key, format!("{value} is not a whole number of milliseconds")))
}

fn within(key: &str, value: Duration, least: Duration, most: Duration) -> Result<(), SettingsError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let [value, least, most] = [value, least, most].map(humantime::format_duration);
    Err(SettingsError::of(key, format!("{value} is not between {least} and {most}")))
}

/// The query parameters that sqlx knows (sqlx-postgres, `PgConnectOptions::parse_from_url`), TLS files with their
/// aliases.
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
/// The setting, and the parameters with the same meaning.
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

/// A client certificate is useless without its key, and a key without its certificate.
fn validate_pair(files: TlsFiles<'_>) -> Result<(), SettingsError> {
    let section = files.section;
    let (given, missing) = match (files.client_cert_file, files.client_key_file) {
        (_, "") if !files.client_cert_file.is_empty() => ("client_cert_file", "client_key_file"),
        ("", key) if !key.is_empty() => ("client_key_file", "client_cert_file"),
        _ => return Ok(()),
    };
    let why = format!("is given without {section}.{missing}; the two go together");
    Err(SettingsError::of(&format!("{section}.{given}"), why))
}
