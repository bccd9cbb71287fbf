//! What the addresses say by themselves: whether connections to other machines are encrypted, and whether a password is
//! one that is publicly known.
//!
//! Opens no connection. No sentence contains a password.

use order_timeout_core::address::{AmqpAddress, Host, PostgresAddress, PostgresServer};
use secrecy::ExposeSecret;
use url::Url;

use super::check::{CheckName, Checks, Finding};
use crate::config::Settings;

/// Passwords of RabbitMQ's default account, of `definitions.json` and of `docker-compose.yml`, and those that are tried
/// first.
const KNOWN_PASSWORDS: [&str; 11] = [
    "guest",
    "worker-dev",
    "publisher-dev",
    "order_timeout",
    "order-timeout-dev",
    "postgres",
    "password",
    "secret",
    "changeme",
    "admin",
    "123456",
];

pub(super) fn examine(settings: &Settings, checks: &mut Checks) {
    if let Ok(address) = settings.database.url.expose_secret().parse::<PostgresAddress>() {
        let url = Url::parse(settings.database.url.expose_secret()).ok();
        let parameter = |name: &str| {
            let pairs = url.as_ref()?.query_pairs();
            pairs.into_iter().find(|(key, _)| key == name).map(|(_, value)| value.into_owned())
        };
        let is_here = match &address.server {
            PostgresServer::Tcp(host) => is_loopback(host),
            PostgresServer::Socket(_) => true,
        };
        let mode = parameter("sslmode").or_else(|| parameter("ssl-mode"));
        let verifies = settings.database.verifies_by_default()
            || mode.is_some_and(|mode| ["verify-full", "verify-ca"].contains(&mode.as_str()));
        if !is_here && !verifies {
            checks.warning(CheckName::DatabaseTls, database_tls());
        }
        let user = url.as_ref().map(|url| url.username().to_owned()).unwrap_or_default();
        let password = url.as_ref().and_then(|url| url.password().map(str::to_owned)).or_else(|| parameter("password"));
        if password.is_some_and(|password| is_known(&user, &password)) {
            checks.warning(
                CheckName::DatabasePassword,
                password_of("database", &user, &format!("psql -c '\\password {user}'"), "database.url"),
            );
        }
    }
    if !settings.delay.strategy.needs_broker() {
        return;
    }
    if let Ok(address) = settings.amqp.url.expose_secret().parse::<AmqpAddress>() {
        let is_here = is_loopback(&address.host);
        if !is_here && !address.is_tls {
            checks.warning(CheckName::BrokerTls, broker_tls());
        }
        // RabbitMQ lets its account guest in from its own machine only, unless it is told otherwise.
        let is_usual = is_here && address.user == "guest" && address.password == "guest";
        if !is_usual && is_known(&address.user, &address.password) {
            let user = &address.user;
            checks.warning(
                CheckName::BrokerPassword,
                password_of("broker", user, &format!("rabbitmqctl change_password {user}"), "amqp.url"),
            );
        }
    }
}

/// Whether it is this machine, as far as the address shows.
pub(super) fn is_loopback(host: &Host) -> bool {
    let text = host.for_connecting();
    text == "localhost" || text.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn is_known(user: &str, password: &str) -> bool {
    KNOWN_PASSWORDS.contains(&password) || (!password.is_empty() && password == user)
}

fn database_tls() -> Finding {
    Finding::new(
        "the connection to the database on another machine is not encrypted, or does not verify the server",
        "between the machines, others can read and change what is closed, and the password",
        "write sslmode=verify-full into database.url, and name the CA in database.ca_file if it is your own (docs/operating/deploy.md, \"TLS\")",
    )
}

fn broker_tls() -> Finding {
    Finding::new(
        "the connection to the broker on another machine is not encrypted",
        "between the machines, others can read and change alarms, and the password",
        "write amqps:// in amqp.url, and name the CA in amqp.ca_file if it is your own (docs/operating/deploy.md, \"TLS\")",
    )
}

fn password_of(server: &str, user: &str, change: &str, setting: &str) -> Finding {
    Finding::new(
        format!("the password of user {user:?} of the {server} is one that is publicly known or its own name"),
        "each client that reaches the server can close orders or send alarms",
        format!("change it with {change}, and in {setting}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operations::doctor::Verdict;

    fn found(amqp: &str, database: &str) -> Vec<CheckName> {
        let mut settings = Settings::defaults();
        (settings.amqp.url, settings.database.url) = (amqp.to_owned().into(), database.to_owned().into());
        let mut checks = Checks::default();
        examine(&settings, &mut checks);
        let report = checks.report(&[]);
        assert!(report.checks.iter().all(|check| matches!(check.verdict, Verdict::Warning(_))));
        report.findings().map(|(name, _)| name).collect()
    }

    #[test]
    fn connections_to_other_machines_need_tls() {
        use CheckName::{BrokerPassword, BrokerTls, DatabaseTls};
        let (here, there) = ("amqp://guest:guest@127.0.0.1:5672/%2f", "amqp://shop:s3cret-4711@rabbit.internal/orders");
        let (local, remote) = ("postgres://u:s3cret-4711@localhost/shop", "postgres://u:s3cret-4711@db.internal/shop");
        assert_eq!(found(here, local), []);
        assert_eq!(found(there, local), [BrokerTls]);
        assert_eq!(found("amqps://shop:s3cret-4711@rabbit.internal/orders", local), []);
        assert_eq!(found("amqps://guest:guest@rabbit.internal/orders", local), [BrokerPassword]);
        assert_eq!(found(here, remote), [DatabaseTls]);
        assert_eq!(found(here, &format!("{remote}?sslmode=require")), [DatabaseTls]);
        assert_eq!(found(here, &format!("{remote}?sslmode=verify-full")), []);
        assert_eq!(found(here, "postgres://u@/shop?host=/run/postgresql"), []);
    }

    #[test]
    fn known_passwords_are_found() {
        use CheckName::{BrokerPassword, DatabasePassword};
        let development = "amqp://order-worker:worker-dev@127.0.0.1/orders";
        assert_eq!(found(development, "postgres://u@127.0.0.1/shop"), [BrokerPassword]);
        let named = "postgres://shop:shop@127.0.0.1/shop";
        assert_eq!(found("amqp://guest:guest@[::1]/%2f", named), [DatabasePassword]);
        let parameter = "postgres://shop@127.0.0.1/shop?password=postgres";
        assert_eq!(found("amqp://guest:guest@localhost/%2f", parameter), [DatabasePassword]);
    }
}
