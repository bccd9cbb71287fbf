//! One connection to RabbitMQ: how it is opened, and what its refusals mean in one sentence.
//!
//! Knows nothing of alarms or queues. There is no automatic recovery here: whoever uses a connection drops it at the
//! first error and opens another (lapin's own recovery never tells a consumer that its unacknowledged deliveries are
//! void).

use std::time::Duration;

use lapin::uri::AMQPUri;
use lapin::{Connection, ConnectionProperties, ErrorKind};
use secrecy::ExposeSecret;

use crate::config::AmqpSettings;

/// AMQP reply codes, from the AMQP 0-9-1 specification, section 1.2 "reply-code".
pub mod reply_code {
    pub const CONTENT_OK: u16 = 200;
    pub const ACCESS_REFUSED: u16 = 403;
    pub const NOT_FOUND: u16 = 404;
    pub const PRECONDITION_FAILED: u16 = 406;
    pub const COMMAND_INVALID: u16 = 503;
    pub const NOT_ALLOWED: u16 = 530;
}

/// Why there is no connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BrokerFault {
    /// Trying again will not help: credentials, virtual host, rights, or objects that differ.
    #[error("{0}")]
    Refused(String),
    /// It may come back: a network error, a timeout, a broker that is starting.
    #[error("{0}")]
    Away(String),
}

/// Opens a connection within `connect_timeout`. `name` is shown by `rabbitmqctl list_connections`.
///
/// # Errors
/// [`BrokerFault`] with the broker's address, never its password.
pub async fn connect(settings: &AmqpSettings, name: &str) -> Result<Connection, BrokerFault> {
    choose_crypto_provider();
    let mut uri = address_of(settings)?;
    let heartbeat_s = settings.heartbeat.as_secs().try_into().unwrap_or(u16::MAX);
    uri.query.heartbeat.get_or_insert(heartbeat_s);
    let place = address(&uri);
    let properties = ConnectionProperties::default().with_connection_name(format!("order-timeout {name}").into());
    match tokio::time::timeout(settings.connect_timeout, Connection::connect_uri(uri.clone(), properties)).await {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(error)) => Err(why_not_connected(&error, &place, &uri)),
        Err(_) => Err(did_not_answer(&uri, settings)),
    }
}

/// What to say when `connect_timeout` has passed.
fn did_not_answer(uri: &AMQPUri, settings: &AmqpSettings) -> BrokerFault {
    let (place, patience) = (address(uri), settings.connect_timeout);
    BrokerFault::Away(format!("the broker at {place} did not answer within {patience:?}; is it running there?"))
}

/// Does several things with the broker within one `connect_timeout`: a broker that accepts and never answers is as good
/// as none, wherever it falls silent.
///
/// # Errors
/// [`BrokerFault`], that of `things` or that they took too long.
pub async fn within_connect_timeout<T>(
    settings: &AmqpSettings,
    things: impl Future<Output = Result<T, BrokerFault>>,
) -> Result<T, BrokerFault> {
    match tokio::time::timeout(settings.connect_timeout, things).await {
        Ok(done) => done,
        Err(_) => Err(did_not_answer(&address_of(settings)?, settings)),
    }
}

fn address_of(settings: &AmqpSettings) -> Result<AMQPUri, BrokerFault> {
    settings.url.expose_secret().parse().map_err(|_| {
        BrokerFault::Refused("amqp.url is not an AMQP address; write amqp://user:password@host:5672/vhost".into())
    })
}

/// Both of our clients use ring, and rustls wants to be told before the first TLS connection. A program that embeds the
/// library and has chosen already keeps its choice.
fn choose_crypto_provider() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Another thread may have been faster, with the same choice.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

/// Host, port and virtual host, without the password.
fn address(uri: &AMQPUri) -> String {
    format!("{}:{}, virtual host {:?}", uri.authority.host, uri.authority.port, uri.vhost)
}

fn why_not_connected(error: &lapin::Error, place: &str, uri: &AMQPUri) -> BrokerFault {
    let user = &uri.authority.userinfo.username;
    match reply(error) {
        Some((reply_code::ACCESS_REFUSED, _)) => BrokerFault::Refused(format!(
            "the broker at {place} refuses user {user:?}; check the name and password in amqp.url"
        )),
        Some((reply_code::NOT_ALLOWED, text)) => BrokerFault::Refused(format!(
            "the broker at {place} does not let user {user:?} in ({text}); create the virtual host or grant the user rights on it with rabbitmqctl"
        )),
        Some((code, text)) => {
            BrokerFault::Away(format!("the broker at {place} ended the connection with {code} {text}"))
        }
        None => BrokerFault::Away(format!("the broker at {place} cannot be reached ({error}); is it running there?")),
    }
}

/// The AMQP reply code and text of an error, if the broker sent one.
#[must_use]
pub fn reply(error: &lapin::Error) -> Option<(u16, String)> {
    match error.kind() {
        ErrorKind::ProtocolError(amqp) => Some((amqp.get_id(), amqp.get_message().to_string())),
        _ => None,
    }
}

/// Closes a connection, waiting no longer than `patience`: a blocked one would never answer.
pub async fn close(connection: &Connection, patience: Duration) {
    let closing = connection.close(reply_code::CONTENT_OK, "done".into());
    let _answered_or_given_up = tokio::time::timeout(patience, closing).await;
}
