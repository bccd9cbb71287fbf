//! Opens connections to Postgres, and explains in one sentence why one cannot be used.
//!
//! Runs no statement of a step. No sentence contains the password.

use std::fmt;
use std::time::Duration;

use order_timeout_amqp::tls::{self, TlsFiles};
use order_timeout_core::address::{PostgresAddress, PostgresServer};
use secrecy::ExposeSecret;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use sqlx::{Connection, PgConnection};

use super::error::{DatabaseError, one_line, sqlstate};
use super::session::{Session, pooler_hint, refuse_shared_sessions};
use crate::config::DatabaseSettings;

/// Identifies a worker's connections in `pg_stat_activity`.
pub(super) const APPLICATION_NAME: &str = "order-timeout";

/// The parameters of each session of a worker.
pub(super) fn parameters(settings: &DatabaseSettings) -> [(&'static str, String); 6] {
    let millis = |duration: Duration| duration.as_millis().max(1).to_string();
    [
        // sqlx sends no cancel request when a future is dropped: the server must end abandoned statements.
        ("statement_timeout", millis(settings.statement_timeout)),
        ("lock_timeout", millis(settings.lock_timeout)),
        ("idle_in_transaction_session_timeout", millis(settings.statement_timeout)),
        // A plan is cached. One made while the tables were small would scan them whole, each time, until the tables
        // that a flash sale has filled are analysed.
        ("enable_seqscan", "off".into()),
        // So the generic plan is as good as a custom one, and the first five executions need no planning.
        ("plan_cache_mode", "force_generic_plan".into()),
        // Compiling a plan takes longer than any of our statements, and without enable_seqscan some plans look costly.
        ("jit", "off".into()),
    ]
}

/// Connects and determines the parameters of sessions; refuses a pooler that shares sessions among connections.
pub(super) async fn first_connection(
    options: &PgConnectOptions,
    settings: &DatabaseSettings,
    parameters: impl IntoIterator<Item = (&'static str, String)>,
) -> Result<(PgConnection, Session), DatabaseError> {
    let (timeout, files) = (settings.acquire_timeout, settings.tls_files());
    let mut connection = connect_once(options, timeout, files).await?;
    // Before any parameter is set: in a shared session it would affect other clients. A server without a second free
    // connection is not such a pooler, and reports the lack later.
    if let Ok(mut other) = connect_once(options, timeout, files).await {
        in_time(options, timeout, refuse_shared_sessions(&mut connection, &mut other)).await?;
        let _ = other.close().await;
    }
    let session = Session::find(&mut connection, options, &settings.time_zone, parameters);
    let session = in_time(options, timeout, session).await?;
    in_time(options, timeout, session.settle(&mut connection)).await?;
    Ok((connection, session))
}

/// Runs a query that checks a session before its use, with a time limit.
pub(super) async fn in_time<T>(
    options: &PgConnectOptions,
    timeout: Duration,
    asked: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, DatabaseError> {
    let place = address(options);
    match tokio::time::timeout(timeout, asked).await {
        Ok(answer) => answer.map_err(|error| DatabaseError(why_unusable(&error, &place))),
        Err(_) => Err(DatabaseError(format!("the database at {place} did not answer within {timeout:?}"))),
    }
}

pub(super) fn why_unusable(error: &sqlx::Error, place: &str) -> String {
    let hint = match sqlstate(error).as_deref() {
        // invalid_parameter_value, undefined_object (an unknown parameter), insufficient_privilege
        Some("22023" | "42704" | "42501") => "; correct options in database.url, or database.time_zone",
        _ => "",
    };
    format!("the database at {place} cannot be used: {}{hint}", one_line(error))
}

pub(super) async fn connect_once(
    options: &PgConnectOptions,
    timeout: Duration,
    files: TlsFiles<'_>,
) -> Result<PgConnection, DatabaseError> {
    let place = address(options);
    match tokio::time::timeout(timeout, PgConnection::connect_with(options)).await {
        Ok(connected) => connected.map_err(|error| DatabaseError(why_not_connected(&error, &place, files))),
        Err(_) => Err(DatabaseError(format!(
            "the database at {place} did not answer within {timeout:?}; is it running there?"
        ))),
    }
}

/// The address as the client library's options, with the certificates that the settings name.
pub(super) fn connect_options(settings: &DatabaseSettings) -> Result<PgConnectOptions, DatabaseError> {
    tls::choose_crypto_provider();
    let mut options = parsed(settings)?;
    // A named CA means that the server's certificate and host name must be verified.
    if settings.verifies_by_default() {
        options = options.ssl_mode(PgSslMode::VerifyFull);
    }
    let certificates = settings.tls_files().read().map_err(DatabaseError)?;
    if let Some(ca) = certificates.ca {
        options = options.ssl_root_cert_from_pem(ca);
    }
    if let Some(client) = certificates.client {
        options = options.ssl_client_cert_from_pem(client.chain).ssl_client_key_from_pem(client.key);
    }
    // The client library sets it by default and poolers refuse it; none of our statements returns a float as text.
    Ok(options.application_name(APPLICATION_NAME).extra_float_digits(None))
}

/// The server that the settings name: host, port and database, without the password.
///
/// # Errors
/// [`DatabaseError`] if the address is not valid.
pub fn place(settings: &DatabaseSettings) -> Result<String, DatabaseError> {
    parsed(settings).map(|options| address(&options))
}

fn parsed(settings: &DatabaseSettings) -> Result<PgConnectOptions, DatabaseError> {
    let url = settings.url.expose_secret();
    let refused = |why: &dyn fmt::Display| DatabaseError(format!("database.url {why}"));
    let address: PostgresAddress = url.parse().map_err(|fault| refused(&fault))?;
    let options: PgConnectOptions = url.parse().map_err(|_| refused(&"is not a Postgres address"))?;
    // The port of the address, not of the environment (PGPORT). An IPv6 address without its brackets: with them the
    // client library would resolve it as a name.
    let options = options.port(address.port);
    Ok(match address.server {
        PostgresServer::Tcp(host) => options.host(&host.for_connecting()),
        PostgresServer::Socket(directory) => options.socket(directory),
    })
}

pub(super) fn address(options: &PgConnectOptions) -> String {
    let database = options.get_database().unwrap_or("(the user's)");
    let server = match options.get_socket() {
        Some(directory) => directory.display().to_string(),
        // As it is written in an address.
        None if options.get_host().contains(':') => format!("[{}]", options.get_host()),
        None => options.get_host().to_owned(),
    };
    format!("{server}:{}, database {database:?}", options.get_port())
}

pub(super) fn why_not_connected(error: &sqlx::Error, place: &str, files: TlsFiles<'_>) -> String {
    if let Some(fault) = error.as_database_error() {
        if let Some(hint) = fault.code().and_then(|code| pooler_hint(&code, fault.message())) {
            return format!("the database at {place} refuses: {}; {hint}", fault.message());
        }
        let hint = match fault.code().as_deref() {
            Some("3D000") => "create it with createdb, or correct database.url",
            Some("28000") if fault.message().contains("client certificate") => {
                "name one in database.client_cert_file and its key in database.client_key_file"
            }
            // PostgreSQL 13 says the latter.
            Some("28000") if ["no encryption", "SSL off"].iter().any(|words| fault.message().contains(words)) => {
                "if it wants TLS, write sslmode=verify-full in database.url"
            }
            Some("28P01" | "28000") => "check the user and password in database.url",
            Some("53300") => "it has no connection left; raise max_connections or run fewer workers",
            _ => "correct database.url or fix the database",
        };
        return format!("the database at {place} refuses: {}; {hint}", fault.message());
    }
    if let Some(why) = why_not_by_tls(error) {
        return format!("no secure connection to the database at {place} is possible: {why}");
    }
    match error {
        sqlx::Error::Protocol(_) => Some("what answers there is not Postgres; correct the port in database.url".into()),
        sqlx::Error::Io(cut) if files.is_any() => tls::why_cut(cut, files),
        _ => None,
    }
    .map_or_else(
        || format!("the database at {place} cannot be reached ({error}); is it running there?"),
        |why| format!("the connection to the database at {place} failed: {why}"),
    )
}

/// The TLS error behind it, if there is one, in words.
fn why_not_by_tls(error: &sqlx::Error) -> Option<String> {
    const PLAIN: &str = "sslmode=disable for a server without TLS";
    match error {
        sqlx::Error::Io(error) => tls::why(error, "database", PLAIN),
        sqlx::Error::Tls(fault) => Some(match fault.downcast_ref() {
            Some(fault) => tls::explain(fault, "database", PLAIN),
            None => format!("{fault}; enable TLS on it (ssl = on), or write {PLAIN} in database.url"),
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;

    #[test]
    fn client_options_name_address_server() {
        let of = |url: &str| {
            let mut settings = Settings::defaults().database;
            settings.url = url.to_owned().into();
            parsed(&settings)
        };
        for (url, host, port, shown) in [
            ("postgres://u@[2001:db8::1]/d", "2001:db8::1", 5432, "[2001:db8::1]:5432, database \"d\""),
            ("postgres:///d?host=::1&port=6432", "::1", 6432, "[::1]:6432, database \"d\""),
            ("postgres://u@db.example:6432/d", "db.example", 6432, "db.example:6432, database \"d\""),
        ] {
            let options = of(url).unwrap();
            assert_eq!((options.get_host(), options.get_port(), options.get_socket()), (host, port, None), "{url}");
            assert_eq!(address(&options), shown);
        }
        let socket = of("postgres://u@localhost/d?host=/run/pg").unwrap();
        assert_eq!(socket.get_socket().unwrap().to_str(), Some("/run/pg"));
        assert_eq!(address(&socket), "/run/pg:5432, database \"d\"");
        assert!(of("postgres:///d").unwrap_err().0.contains("names no host"));
    }
}
