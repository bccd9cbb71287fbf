//! Checks that settings fit together: every rule beyond a value's form. Each violation is one sentence that names the
//! fix.
//!
//! Pure: reads nothing but the settings.

use std::time::Duration;

use order_timeout_amqp::topology::{MAX_SHARDS, Names};
use order_timeout_core::InvalidSetting;
use order_timeout_core::address::PostgresAddress;
use order_timeout_providers::webhook::validate_url;
use secrecy::ExposeSecret;
use sqlx::postgres::PgConnectOptions;

use super::{
    AnnounceSettings, DatabaseSettings, OrdersSettings, POSTGRES_FORM, Settings, SettingsError, TracesSettings,
};

const AMQP_MAX_PREFETCH: u16 = u16::MAX;
/// A round of the relay takes up to four of them, and the next one waits.
const LONGEST_WEBHOOK: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(86_400);

/// Of a value that is not UTF-8.
pub(super) const NOT_UTF8: &str = "is not UTF-8; in an address, write such a letter as %C3%A4";

impl Settings {
    /// Every rule that spans more than one value's form.
    ///
    /// # Errors
    /// [`SettingsError`] for the first rule that is broken.
    pub fn validate(&self) -> Result<(), SettingsError> {
        Names::validate(&self.namespace)?;
        self.amqp.validate()?;
        self.validate_timeouts()?;
        self.delay.validate()?;
        self.validate_worker()?;
        self.orders.validate()?;
        self.validate_closing()?;
        self.validate_kinds()?;
        self.traces.validate()?;
        self.validate_http()?;
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
            return Err(SettingsError::of("database.url", NOT_UTF8));
        }
        database.parse::<PostgresAddress>().map_err(|fault| SettingsError::of_address("database.url", &fault))?;
        if database.parse::<PgConnectOptions>().is_err() {
            return Err(SettingsError::of("database.url", format!("is not a Postgres address; write {POSTGRES_FORM}")));
        }
        self.database.validate_tls()
    }

    fn validate_timeouts(&self) -> Result<(), SettingsError> {
        for (key, value) in [
            ("database.acquire_timeout", self.database.acquire_timeout),
            ("database.statement_timeout", self.database.statement_timeout),
            ("database.lock_timeout", self.database.lock_timeout),
        ] {
            InvalidSetting::within(key, value, Duration::from_millis(1), Duration::from_secs(3_600))?;
        }
        // Otherwise the statement timeout would hide that a lock was the cause.
        if self.database.lock_timeout >= self.database.statement_timeout {
            let why = format!(
                "must be shorter than database.statement_timeout, which is {}",
                humantime::format_duration(self.database.statement_timeout)
            );
            return Err(SettingsError::of("database.lock_timeout", why));
        }
        Ok(())
    }

    fn validate_worker(&self) -> Result<(), SettingsError> {
        let worker = &self.worker;
        self.delay.validate_hold(worker.hold_max)?;
        InvalidSetting::between("worker.shards", worker.shards, 1, MAX_SHARDS)?;
        InvalidSetting::between("worker.prefetch", worker.prefetch, 1, AMQP_MAX_PREFETCH)?;
        InvalidSetting::between("worker.schedule_prefetch", worker.schedule_prefetch, 1, AMQP_MAX_PREFETCH)?;
        InvalidSetting::between("worker.batch_size", worker.batch_size, 1, 10_000)?;
        InvalidSetting::between("worker.closers", worker.closers, 1, 32)?;
        InvalidSetting::between("announce.batch_size", self.announce.batch_size, 1, 10_000)?;
        InvalidSetting::between("brake.times_usual", self.brake.times_usual, 2, 1_000)?;
        InvalidSetting::between("brake.always_allowed", self.brake.always_allowed, 1, u32::MAX)?;
        for (key, value, least, most) in [
            ("worker.linger", worker.linger, Duration::ZERO, Duration::from_secs(1)),
            ("worker.requeue_after", worker.requeue_after, Duration::from_millis(1), Duration::from_secs(3_600)),
            ("worker.shutdown_grace", worker.shutdown_grace, Duration::ZERO, Duration::from_secs(3_600)),
            ("sweep.every", self.sweep.every, Duration::from_millis(10), Duration::from_secs(60)),
            ("sweep.grace", self.sweep.grace, Duration::ZERO, Duration::from_secs(3_600)),
            ("sweep.look_ahead", self.sweep.look_ahead, Duration::ZERO, worker.hold_max),
            ("announce.poll", self.announce.poll, Duration::from_millis(1), Duration::from_secs(60)),
            ("announce.keep", self.announce.keep, Duration::ZERO, 3_650 * DAY),
            ("announce.webhook_timeout", self.announce.webhook_timeout, Duration::from_millis(100), LONGEST_WEBHOOK),
            ("parked.keep", self.parked.keep, Duration::ZERO, 3_650 * DAY),
        ] {
            InvalidSetting::within(key, value, least, most)?;
        }
        self.validate_shards()?;
        self.validate_without_broker()?;
        self.validate_retry()
    }

    /// The page needs a listener, and the token a page.
    fn validate_http(&self) -> Result<(), SettingsError> {
        if self.http.page && self.http.listen.0.is_none() {
            let why = "is true, but http.listen is empty; set that to the address of the page";
            return Err(SettingsError::of("http.page", why));
        }
        if !self.http.token_file.is_empty() && !self.http.page {
            let why = "names a file, but http.page is false, so nothing asks for the token; set http.page to true, or leave it empty";
            return Err(SettingsError::of("http.token_file", why));
        }
        Ok(())
    }

    /// The settings that matter only without a broker.
    fn validate_without_broker(&self) -> Result<(), SettingsError> {
        let (sweep, announce) = (&self.sweep, &self.announce);
        // An order that falls due between two readings is found by the later one.
        if !sweep.look_ahead.is_zero() && sweep.look_ahead < 2 * sweep.every {
            let least = humantime::format_duration(2 * sweep.every);
            let why = format!(
                "must be at least twice sweep.every, {least}, or orders fall due before they are read; 0s turns it off"
            );
            return Err(SettingsError::of("sweep.look_ahead", why));
        }
        if self.delay.strategy.needs_broker() {
            let given = [("announce.notify", &announce.notify), ("announce.webhook", &announce.webhook)];
            let Some((key, _)) = given.into_iter().find(|(_, value)| !value.is_empty()) else { return Ok(()) };
            let why =
                "is only for delay.strategy = \"database\"; with a broker, events go to its exchange. Leave it out";
            return Err(SettingsError::of(key, why));
        }
        if sweep.look_ahead.is_zero() {
            let why =
                "must not be 0s with delay.strategy = \"database\", which reads orders ahead and knows no other way";
            return Err(SettingsError::of("sweep.look_ahead", why));
        }
        // PostgreSQL: a channel is an identifier, of fewer than 64 bytes.
        let channel = &announce.notify;
        if channel.len() > 63 {
            return Err(SettingsError::of("announce.notify", format!("{channel:?} is longer than 63 bytes")));
        }
        announce.validate_webhook()
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
        InvalidSetting::within("retry.longest", retry.longest, Duration::from_millis(1), Duration::from_secs(60))?;
        InvalidSetting::within("retry.first", retry.first, Duration::from_millis(1), retry.longest)?;
        InvalidSetting::within("retry.missing_for", retry.missing_for, Duration::ZERO, 7 * DAY)?;
        InvalidSetting::between("retry.max_attempts", retry.max_attempts, 0, 1_000)?;
        Ok(self.delay.validate_longest_retry(retry.longest_wait())?)
    }
}

impl AnnounceSettings {
    /// A webhook needs a key and no channel beside it; nothing else needs the key.
    fn validate_webhook(&self) -> Result<(), SettingsError> {
        if self.webhook.is_empty() {
            let files = [("webhook_key_file", &self.webhook_key_file), ("webhook_ca_file", &self.webhook_ca_file)];
            let Some((key, _)) = files.into_iter().find(|(_, file)| !file.is_empty()) else { return Ok(()) };
            let why =
                "names a file, but announce.webhook is empty; set that to the address of the receiver, or leave it out";
            return Err(SettingsError::of(&format!("announce.{key}"), why));
        }
        if !self.notify.is_empty() {
            let why = "is given, and so is announce.notify; events are announced in one way, so leave one of them out";
            return Err(SettingsError::of("announce.webhook", why));
        }
        if self.webhook_key_file.is_empty() {
            let why = "is empty, so the receiver could not tell events from requests of others; name a file with a key (`echo whsec_$(openssl rand -base64 32)`)";
            return Err(SettingsError::of("announce.webhook_key_file", why));
        }
        validate_url(&self.webhook)?;
        Ok(())
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
        if let Some((unknown, _)) = parameters.iter().find(|(key, _)| !is_known(key)) {
            let why = format!("has the parameter {unknown:?}, which the client library does not know; leave it out");
            return Err(SettingsError::of("database.url", why));
        }
        let files = self.tls_files();
        files.validate()?;
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

/// Whether sqlx knows this parameter (sqlx-postgres, `PgConnectOptions::parse_from_url`).
fn is_known(parameter: &str) -> bool {
    let is_of_tls = PG_TLS_FILES.iter().any(|(_, names)| names.contains(&parameter)) || PG_SSLMODE.contains(&parameter);
    let others = "host hostaddr port dbname user password application_name options statement-cache-capacity";
    is_of_tls || others.split(' ').any(|known| known == parameter) || parameter.starts_with("options[")
}

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

impl TracesSettings {
    fn validate(&self) -> Result<(), SettingsError> {
        // Without a user and a password, because settings are shown.
        let is_usable = |url: &url::Url| {
            let is_plain = url.username().is_empty() && url.password().is_none() && url.query().is_none();
            url.scheme() == "http" && url.has_host() && is_plain
        };
        let endpoint = &self.endpoint;
        if !endpoint.is_empty() && !url::Url::parse(endpoint).is_ok_and(|url| is_usable(&url)) {
            let why =
                "is not the address of a collector; give scheme http, host and port 4318, as in config/default.toml";
            return Err(SettingsError::of("traces.endpoint", why));
        }
        if self.service_name.is_empty() {
            return Err(SettingsError::of("traces.service_name", "is empty; name this service"));
        }
        Ok(())
    }
}
