//! Strict parsers for the addresses of the broker and the database: the host in an address is the host that is
//! connected to, or the address is refused. The worker and the publishers read their settings with them, because the
//! clients' own parsers guess: lapin takes an IPv6 address and a missing host for localhost, sqlx takes a missing port from
//! the environment, and ignores an unknown parameter with a warning that shows its value.
//!
//! Pure. No default replaces an unreadable part, and no error repeats a part of an address: it may be a piece of a
//! password.

use std::borrow::Cow;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use percent_encoding::percent_decode_str;

/// Why an address is refused: the rest of a sentence that begins with the setting's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct AddressError(String);

/// A host. An IPv6 address has brackets when displayed, but not when connecting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Host {
    /// ASCII letters, digits, `-`, `_` and `.`; never a number that a resolver would read as an IPv4 address.
    Name(String),
    /// Four numbers from 0 to 255; shorter forms are refused.
    V4(Ipv4Addr),
    /// Without a zone.
    V6(Ipv6Addr),
}

/// The address of a RabbitMQ server.
#[derive(Clone, PartialEq, Eq)]
pub struct AmqpAddress {
    /// The scheme: `amqps` if true, `amqp` if false.
    pub is_tls: bool,
    /// Decoded; `guest` if the address has no account.
    pub user: String,
    /// Decoded; `guest` if the address has no account, and empty if a certificate replaces it.
    pub password: String,
    /// The server to connect to; never a default.
    pub host: Host,
    /// 1 to 65535; the scheme's default is 5672, or 5671 for TLS.
    pub port: u16,
    /// Decoded; `/` if the address has no path, and empty if its path is a single slash.
    pub vhost: String,
    /// In seconds, if the address has one.
    pub heartbeat_s: Option<u16>,
    /// One of [`AMQP_MECHANISMS`], if the address has one.
    pub mechanism: Option<String>,
}

/// The server in the address of a Postgres. The client library reads everything else in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PostgresAddress {
    /// From the authority, or from the parameters `host` and `hostaddr`.
    pub server: PostgresServer,
    /// 1 to 65535, from the authority or from the parameter `port`; 5432 if neither names one.
    pub port: u16,
}

/// Where a Postgres listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PostgresServer {
    /// A host to connect to over TCP.
    Tcp(Host),
    /// The directory of a Unix socket, an absolute path.
    Socket(String),
}

/// The words that lapin knows for `auth_mechanism`.
pub const AMQP_MECHANISMS: [&str; 5] = ["plain", "amqplain", "external", "anonymous", "rabbit-cr-demo"];

/// The same bounds as for `amqp.heartbeat`.
const HEARTBEAT_S: std::ops::RangeInclusive<u16> = 1..=600;

/// Parameters of an AMQP address, by their names in RabbitMQ's clients, and what to do instead.
const AMQP_INSTEAD: [(&str, &str); 6] = [
    ("connection_timeout", "leave it out and set amqp.connect_timeout"),
    ("frame_max", "leave it out; the program chooses the frame size that fits its own limits"),
    ("channel_max", "leave it out; the program opens as many channels as worker.shards needs"),
    ("cacertfile", "leave it out and set amqp.ca_file"),
    ("certfile", "leave it out and set amqp.client_cert_file"),
    ("keyfile", "leave it out and set amqp.client_key_file"),
];

/// Parameters of a Postgres address, or of the server in `options`, that a setting governs.
const POSTGRES_INSTEAD: [(&str, &str); 4] = [
    ("connect_timeout", "leave it out and set database.acquire_timeout"),
    ("statement_timeout", "leave it out and set database.statement_timeout"),
    (
        "idle_in_transaction_session_timeout",
        "leave it out and set database.statement_timeout, which applies to it as well",
    ),
    ("lock_timeout", "leave it out and set database.lock_timeout"),
];

const DEFAULT_AMQP_PORT: u16 = 5672;
const DEFAULT_AMQPS_PORT: u16 = 5671;
const DEFAULT_POSTGRES_PORT: u16 = 5432;
/// The default account of RabbitMQ, for addresses without one.
const DEFAULT_AMQP_ACCOUNT: &str = "guest";

impl FromStr for AmqpAddress {
    type Err = AddressError;

    /// # Errors
    /// [`AddressError`] for an incomplete address, or one with a parameter that a setting governs.
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let (is_tls, rest) = match (text.strip_prefix("amqp://"), text.strip_prefix("amqps://")) {
            (Some(rest), _) => (false, rest),
            (None, Some(rest)) => (true, rest),
            (None, None) => return refuse("is not an AMQP address"),
        };
        let parts = Parts::of(rest)?;
        let (mut heartbeat_s, mut mechanism) = (None, None);
        for (name, value) in &parts.parameters {
            match name.as_str() {
                "heartbeat" => heartbeat_s = Some(heartbeat(value)?),
                "auth_mechanism" => mechanism = Some(known_mechanism(value)?),
                other => return Err(not_a_parameter(other, &AMQP_INSTEAD)),
            }
        }
        let (user, password) = match (parts.user, parts.password) {
            (Some(user), Some(password)) => (user, password),
            // The certificate authenticates the client.
            (Some(user), None) if mechanism.as_deref() == Some("external") => (user, String::new()),
            (Some(_), None) => return refuse("has a user and no password; write user:password before the host"),
            (None, _) => (DEFAULT_AMQP_ACCOUNT.to_owned(), DEFAULT_AMQP_ACCOUNT.to_owned()),
        };
        let Some(host) = parts.host else {
            return refuse("names no host; write localhost if this machine is meant");
        };
        let port = parts.port.unwrap_or(if is_tls { DEFAULT_AMQPS_PORT } else { DEFAULT_AMQP_PORT });
        let vhost = parts.path.unwrap_or_else(|| "/".to_owned());
        Ok(Self { is_tls, user, password, host: bracketed_host(host)?, port, vhost, heartbeat_s, mechanism })
    }
}

/// Without the password.
impl fmt::Debug for AmqpAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port, vhost, .. } = self;
        f.debug_struct("AmqpAddress").field("host", host).field("port", port).field("vhost", vhost).finish()
    }
}

impl FromStr for PostgresAddress {
    type Err = AddressError;

    /// # Errors
    /// [`AddressError`] for an incomplete address, or one with two servers or a parameter that a setting governs.
    fn from_str(text: &str) -> Result<Self, AddressError> {
        let rest = text.strip_prefix("postgres://").or_else(|| text.strip_prefix("postgresql://"));
        let Some(rest) = rest else { return refuse("is not a Postgres address") };
        let parts = Parts::of(rest)?;
        for (name, value) in &parts.parameters {
            refuse_what_a_setting_governs(name, value)?;
        }
        let port = match (parts.port, parts.parameter("port")) {
            (Some(_), Some(_)) => return refuse("gives its port twice; leave the parameter port out"),
            (Some(port), None) => port,
            (None, Some(port)) => read_port(port)?,
            (None, None) => DEFAULT_POSTGRES_PORT,
        };
        Ok(Self { server: postgres_server(&parts)?, port })
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::V4(address) => address.fmt(f),
            Self::V6(address) => write!(f, "[{address}]"),
        }
    }
}

impl Host {
    /// Without brackets, as for connecting.
    pub fn for_connecting(&self) -> String {
        match self {
            Self::V6(address) => address.to_string(),
            other => other.to_string(),
        }
    }

    /// Parses a host without brackets.
    fn plain(text: &str) -> Result<Self, AddressError> {
        match text.parse() {
            Ok(IpAddr::V4(address)) => return Ok(Self::V4(address)),
            Ok(IpAddr::V6(address)) => return Ok(Self::V6(address)),
            Err(_) => {}
        }
        if text.contains([':', '%']) {
            return refuse(
                "has an invalid host; write an IPv6 address without a zone (as in %eth0), and in brackets before a port, such as [2001:db8::1]:5432",
            );
        }
        if !text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)) {
            return refuse(
                "has an invalid host; a host name consists of ASCII letters, digits, \"-\", \"_\" and \".\"",
            );
        }
        // The system's resolver would read 10.1 as 10.0.0.1 and 2130706433 as 127.0.0.1.
        let last = text.trim_end_matches('.').rsplit('.').next().unwrap_or_default();
        let (digits, is_digit): (&str, fn(&u8) -> bool) = match last.strip_prefix("0x") {
            Some(digits) => (digits, u8::is_ascii_hexdigit),
            None => (last, u8::is_ascii_digit),
        };
        if digits.as_bytes().iter().all(is_digit) {
            return refuse("has a number as its host; write an IPv4 address with four numbers from 0 to 255");
        }
        Ok(Self::Name(text.to_owned()))
    }
}

/// The parts of an address, decoded.
struct Parts {
    user: Option<String>,
    password: Option<String>,
    /// As it is written, with brackets; not encoded, except for the directory of a socket.
    host: Option<String>,
    port: Option<u16>,
    /// Without the leading slash.
    path: Option<String>,
    parameters: Vec<(String, String)>,
}

impl Parts {
    /// Splits what follows `scheme://`.
    fn of(text: &str) -> Result<Self, AddressError> {
        if text.chars().any(|character| character.is_whitespace() || character.is_control()) {
            return refuse("has a space, a line break or a control character; write a space as %20, or leave it out");
        }
        if text.contains('#') {
            return refuse("has a #; in a name or password write it as %23");
        }
        let (text, query) = split_at_first(text, '?');
        let (authority, path) = split_at_first(text, '/');
        // The password contains an unescaped / or ?, so a piece of the password would be taken for the host.
        if path.into_iter().chain(query).any(|behind| behind.contains('@')) {
            return refuse(
                "has an @ behind its host; in the user name, the password and everything after them write @ as %40, / as %2F, ? as %3F and % as %25",
            );
        }
        let (account, place) = match authority.rsplit_once('@') {
            Some((account, place)) => (Some(account), place),
            None => (None, authority),
        };
        let (user, password) = match account.map(|account| split_at_first(account, ':')) {
            Some(("", _)) => return refuse("has an @ and no user name before it"),
            Some((user, password)) => (Some(decoded(user)?), password.map(decoded).transpose()?),
            None => (None, None),
        };
        let (host, port) = host_and_port(place)?;
        Ok(Self {
            user,
            password,
            host: Some(host.to_owned()).filter(|host| !host.is_empty()),
            port: port.map(read_port).transpose()?,
            path: path.map(decoded).transpose()?,
            parameters: parameters(query.unwrap_or_default())?,
        })
    }

    fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

fn split_at_first(text: &str, separator: char) -> (&str, Option<&str>) {
    text.split_once(separator).map_or((text, None), |(before, behind)| (before, Some(behind)))
}

fn host_and_port(place: &str) -> Result<(&str, Option<&str>), AddressError> {
    if place.starts_with('[') {
        let Some(end) = place.find(']') else {
            return refuse("has a [ and no ] behind it; write an IPv6 address in brackets, such as [2001:db8::1]");
        };
        let (host, behind) = place.split_at(end + 1);
        return match behind.strip_prefix(':') {
            Some(port) => Ok((host, Some(port))),
            None if behind.is_empty() => Ok((host, None)),
            None => refuse("has something between its ] and its port; write it like [2001:db8::1]:5672"),
        };
    }
    if place.matches(':').count() > 1 {
        return refuse("has several colons in its host; write an IPv6 address in brackets, such as [2001:db8::1]");
    }
    let (host, port) = split_at_first(place, ':');
    Ok((host, port))
}

fn bracketed_host(text: String) -> Result<Host, AddressError> {
    let Some(inner) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) else { return Host::plain(&text) };
    if inner.contains('%') {
        return refuse(
            "has an IPv6 address with a zone (as in %25eth0), which is not supported; write an address without a zone, or a host name",
        );
    }
    let address = inner.parse().map(Host::V6);
    address.or_else(|_| refuse("has something in brackets that is not an IPv6 address; write it like [2001:db8::1]"))
}

fn read_port(text: &str) -> Result<u16, AddressError> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(port) if is_number && port > 0 => Ok(port),
        _ => refuse(
            "has a port that is not a number from 1 to 65535; if it is a piece of the password, percent-encode / : # ? % in it",
        ),
    }
}

fn parameters(query: &str) -> Result<Vec<(String, String)>, AddressError> {
    let mut parameters: Vec<(String, String)> = Vec::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = split_at_first(pair, '=');
        // A + is a space, as in HTML forms; the client libraries do the same.
        let [name, value] = [name, value.unwrap_or_default()].map(|text| decoded(&text.replace('+', " ")));
        let (name, value) = (name?, value?);
        // Of duplicates, one library takes the first and another the last. `options` may repeat: they are concatenated.
        if name != "options" && parameters.iter().any(|(known, _)| *known == name) {
            return Err(AddressError(format!("gives the parameter {} twice; give it once", shown(&name))));
        }
        parameters.push((name, value));
    }
    Ok(parameters)
}

fn decoded(text: &str) -> Result<String, AddressError> {
    let is_escape = |behind: &str| behind.len() >= 2 && behind.bytes().take(2).all(|byte| byte.is_ascii_hexdigit());
    if !text.split('%').skip(1).all(is_escape) {
        return refuse(BARE_PERCENT);
    }
    let decoded = percent_decode_str(text).decode_utf8().map(Cow::into_owned);
    decoded.or_else(|_| refuse("has percent-encoded bytes that are not UTF-8; write ä as %C3%A4"))
}

const BARE_PERCENT: &str = "has a % that is not followed by two hexadecimal digits; write a percent sign as %25";

fn heartbeat(value: &str) -> Result<u16, AddressError> {
    match value.parse() {
        Ok(seconds) if HEARTBEAT_S.contains(&seconds) => Ok(seconds),
        _ => refuse(
            "has a parameter heartbeat that is not a number of seconds from 1 to 600; leave it out and set amqp.heartbeat",
        ),
    }
}

fn known_mechanism(value: &str) -> Result<String, AddressError> {
    let word = value.to_ascii_lowercase();
    if AMQP_MECHANISMS.contains(&word.as_str()) {
        return Ok(word);
    }
    refuse("has an auth_mechanism that the client library does not know; write plain or external, or leave it out")
}

fn not_a_parameter(name: &str, instead: &[(&str, &str)]) -> AddressError {
    match instead.iter().find(|(known, _)| *known == name) {
        Some((_, instead)) => AddressError(format!("has the parameter {name:?}; {instead}")),
        None => AddressError(format!("has the parameter {}, which is not supported; leave it out", shown(name))),
    }
}

/// A parameter's name, unless it may be a piece of something else.
fn shown(name: &str) -> &str {
    let is_a_name = |name: &str| name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-[]".contains(&byte));
    if is_a_name(name) { name } else { "with an invalid name" }
}

/// As Postgres compares names of server settings: they are case-insensitive, and may have `-` for `_` after `--`; in
/// `options`, `\` is the escape character (PostgreSQL source, `guc.c` and `pg_split_opts`).
fn folded(text: &str) -> String {
    text.to_ascii_lowercase().replace('-', "_").replace('\\', "")
}

/// Whether folded `options` set this name: it is not the end of a longer one, such as `deadlock_timeout`.
fn is_set(options: &str, name: &str) -> bool {
    options.match_indices(&format!("{name}=")).any(|(at, _)| {
        let before = &options[..at];
        // `-c` or `--`, folded, or a space.
        let is_longer = before.ends_with(|c: char| c == '_' || c == '.' || c.is_ascii_alphanumeric());
        !is_longer || before.ends_with("_c") || before.ends_with("__")
    })
}

/// Refuses a server setting that a setting of ours governs, as a parameter, in `options[name]`, or set in `options`.
fn refuse_what_a_setting_governs(name: &str, value: &str) -> Result<(), AddressError> {
    let (name, value) = (folded(name), folded(value));
    let is_governed = |governed: &str| {
        name == governed || name == format!("options[{governed}]") || (name == "options" && is_set(&value, governed))
    };
    match POSTGRES_INSTEAD.iter().find(|(governed, _)| is_governed(governed)) {
        Some((governed, _)) => Err(not_a_parameter(governed, &POSTGRES_INSTEAD)),
        None => Ok(()),
    }
}

fn postgres_server(parts: &Parts) -> Result<PostgresServer, AddressError> {
    let in_authority = parts.host.clone().map(authority_server).transpose()?;
    let in_query = match (parts.parameter("host"), parts.parameter("hostaddr")) {
        (Some(_), Some(_)) => return refuse("has both host and hostaddr as parameters; leave one of them out"),
        (Some(""), None) | (None, Some("")) => return refuse("has an empty host as a parameter; leave it out"),
        (Some(directory), None) if directory.starts_with('/') => Some(PostgresServer::Socket(directory.to_owned())),
        (None, Some(address)) if address.parse::<IpAddr>().is_err() => {
            return refuse("has a hostaddr that is not an IP address; write an address, or the name as host");
        }
        (host, address) => host.or(address).map(Host::plain).transpose()?.map(PostgresServer::Tcp),
    };
    match (in_authority, in_query) {
        (Some(one), Some(other)) if one == other => Ok(one),
        // The host before the slash is a placeholder that the address syntax requires.
        (Some(PostgresServer::Tcp(_)), Some(socket @ PostgresServer::Socket(_))) => Ok(socket),
        (Some(_), Some(_)) => refuse("names two servers, as its host and as a parameter; leave one of them out"),
        (Some(one), None) | (None, Some(one)) => Ok(one),
        (None, None) => refuse(
            "names no host; write localhost if this machine is meant, or ?host=/var/run/postgresql for its socket",
        ),
    }
}

fn authority_server(host: String) -> Result<PostgresServer, AddressError> {
    if host.starts_with('[') {
        return bracketed_host(host).map(PostgresServer::Tcp);
    }
    // The directory of a socket is encoded; a host name contains nothing to encode.
    match decoded(&host)? {
        directory if directory.starts_with('/') => Ok(PostgresServer::Socket(directory)),
        _ => Host::plain(&host).map(PostgresServer::Tcp),
    }
}

fn refuse<T>(why: &str) -> Result<T, AddressError> {
    Err(AddressError(why.to_owned()))
}

#[cfg(test)]
mod tests;
