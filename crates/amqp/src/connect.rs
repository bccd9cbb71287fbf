//! One connection to RabbitMQ: opens it, and explains a refusal in one sentence.
//!
//! Knows nothing of alarms or queues. Does not recover a connection: code that uses one drops it at the first error and
//! opens another, because lapin's own recovery never tells a consumer that its unacknowledged deliveries are void.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use amq_protocol::frame::AMQPFrame;
use amq_protocol::frame::parsing::parse_frame;
pub use lapin::Connection;
use lapin::protocol::AMQPClass;
use lapin::protocol::connection::AMQPMethod;
use lapin::types::{AMQPValue, FieldTable};
use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo, SASLMechanism};
use lapin::{AsyncTcpStream, ConnectionProperties, ErrorKind};
use order_timeout_core::address::AmqpAddress;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use secrecy::ExposeSecret;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::nesting::{self, ShallowStream};
use crate::{AmqpSettings, tls};

/// RabbitMQ's default `frame_max`.
const LARGEST_FRAME_BYTES: u32 = 131_072;

/// AMQP reply codes, from the AMQP 0-9-1 specification, section 1.2 "reply-code".
pub mod reply_code {
    /// `reply-success` of the specification: a close without a fault.
    pub const CONTENT_OK: u16 = 200;
    /// The user lacks rights on an object, which closes the channel; RabbitMQ also sends it for a failed login.
    pub const ACCESS_REFUSED: u16 = 403;
    /// The exchange or queue does not exist; closes the channel.
    pub const NOT_FOUND: u16 = 404;
    /// The object exists with other arguments, or a limit is reached; closes the channel.
    pub const PRECONDITION_FAILED: u16 = 406;
    /// The broker's for an invalid frame, which closes the connection; also lapin's own, for a frame that is too large.
    pub const FRAME_ERROR: u16 = 501;
    /// RabbitMQ's up to 3.13 for an unknown exchange type; closes the connection.
    pub const COMMAND_INVALID: u16 = 503;
    /// The virtual host is missing or closed to this user, or the limit of connections is reached.
    pub const NOT_ALLOWED: u16 = 530;
    /// The broker failed on a request or a message; closes the connection.
    pub const INTERNAL_ERROR: u16 = 541;
}

/// Why there is no connection. Each variant holds one whole sentence.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BrokerError {
    /// A retry will not help: credentials, virtual host, rights, or objects that differ.
    #[error("{0}")]
    Refused(String),
    /// A retry may help: a network error, a timeout, a broker that is starting.
    #[error("{0}")]
    Away(String),
}

/// Opens a connection within `connect_timeout`. `rabbitmqctl list_connections client_properties` shows its name,
/// `order-timeout {name}`.
///
/// # Errors
/// [`BrokerError`] with the broker's address, never its password.
pub async fn connect(settings: &AmqpSettings, name: &str) -> Result<Connection, BrokerError> {
    let (uri, connector) = prepare(settings)?;
    let place = address(&uri);
    let properties = ConnectionProperties::default().with_connection_name(format!("order-timeout {name}").into());
    match tokio::time::timeout(settings.connect_timeout, open(uri.clone(), connector, properties)).await {
        Ok(Ok(connection)) => Ok(connection),
        Ok(Err(error)) => Err(connect_error(&error, &place, &uri, settings)),
        Err(_) => Err(timeout_error(&uri, settings)),
    }
}

/// Opens one more connection and closes it: a broker may be out of file handles after it has opened the files of many
/// queues. `open` is an open connection, which shows that the broker runs.
///
/// # Errors
/// [`BrokerError::Away`] with this explanation if `open` is still connected, otherwise the error of [`connect`].
pub async fn require_another_connection(settings: &AmqpSettings, open: &Connection) -> Result<(), BrokerError> {
    match connect(settings, "start").await {
        Ok(connection) => {
            close(&connection, settings.connect_timeout).await;
            Ok(())
        }
        Err(fault) if open.status().connected() => Err(BrokerError::Away(format!(
            "the broker took one connection and takes no further one ({fault}). If it accepts TCP and answers no handshake, it is out of file descriptors: RabbitMQ 3 sets three aside for each queue. See \"File Descriptors\" in `rabbitmqctl status`, raise its limit (LimitNOFILE) to 65536, and restart it"
        ))),
        Err(fault) => Err(fault),
    }
}

/// The address with the additions of the settings, and the TLS connector if it is an `amqps://` address.
fn prepare(settings: &AmqpSettings) -> Result<(AMQPUri, Option<TlsConnector>), BrokerError> {
    tls::choose_crypto_provider();
    let mut uri = address_of(settings)?;
    let connector = match uri.scheme {
        AMQPScheme::AMQP => None,
        AMQPScheme::AMQPS => Some(tls_connector(settings).map_err(BrokerError::Refused)?),
    };
    let heartbeat_s = settings.heartbeat.as_secs().try_into().unwrap_or(u16::MAX);
    uri.query.heartbeat.get_or_insert(heartbeat_s);
    // Always a limit, even with a broker that sets none: lapin reserves memory for 32 frames in each direction.
    uri.query.frame_max.get_or_insert(LARGEST_FRAME_BYTES);
    Ok((uri, connector))
}

/// Bytes in both directions, with or without TLS.
pub trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> ByteStream for T {}

/// A connection before the AMQP handshake, inside TLS for `amqps://`.
pub type BrokerStream = Box<dyn ByteStream>;

/// Connects like [`connect`], with the same certificates and timeout, without the AMQP handshake.
///
/// # Errors
/// [`BrokerError`] with the broker's address, never its password. Rights and credentials are not checked yet.
pub async fn connect_raw(settings: &AmqpSettings) -> Result<BrokerStream, BrokerError> {
    let (uri, connector) = prepare(settings)?;
    match tokio::time::timeout(settings.connect_timeout, open_stream(&uri, connector.as_ref())).await {
        Ok(opened) => opened.map_err(|error| connect_error(&error.into(), &address(&uri), &uri, settings)),
        Err(_) => Err(timeout_error(&uri, settings)),
    }
}

/// How a broker introduces itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Such as `RabbitMQ`.
    pub product: String,
    /// Such as `3.10.8`.
    pub version: String,
}

impl Server {
    /// Why our queues may not be kept as they were declared, unless this is RabbitMQ: others ignore arguments that they do not know.
    #[must_use]
    pub fn why_unsuitable(&self) -> Option<String> {
        let name = format!("{} {}", self.product, self.version);
        (self.product != "RabbitMQ").then(|| {
            format!(
                "the broker calls itself {:?}, and order-timeout needs RabbitMQ: others need not keep quorum queues and at-least-once dead-lettering",
                name.trim()
            )
        })
    }
}

/// Asks the broker what it is. lapin keeps that to itself.
///
/// # Errors
/// [`BrokerError`] if it cannot be reached, or does not answer in AMQP.
pub async fn server(settings: &AmqpSettings) -> Result<Server, BrokerError> {
    let mut stream = connect_raw(settings).await?;
    let asked = within_connect_timeout(settings, async {
        let greeting = greeting(&mut stream).await;
        greeting.map_err(|error| BrokerError::Away(format!("the broker does not say what it is: {error}")))
    });
    let properties = asked.await?;
    let text = |name: &str| match properties.inner().get(name) {
        Some(AMQPValue::LongString(text)) => text.to_string(),
        _ => String::new(),
    };
    Ok(Server { product: text("product"), version: text("version") })
}

/// The properties in the first frame of the broker.
async fn greeting(stream: &mut BrokerStream) -> io::Result<FieldTable> {
    stream.write_all(b"AMQP\x00\x00\x09\x01").await?;
    let mut bytes = Vec::new();
    loop {
        let mut more = [0; 1_024];
        match stream.read(&mut more).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => bytes.extend_from_slice(&more[..read]),
        }
        match parse_frame(bytes.as_slice()) {
            Ok((_, AMQPFrame::Method(0, AMQPClass::Connection(AMQPMethod::Start(start))))) => {
                return Ok(start.server_properties);
            }
            Err(error) if error.is_incomplete() => {}
            _ => return Err(io::Error::other("it does not answer in AMQP")),
        }
    }
}

/// lapin's I/O thread gets an open stream, so that it ends when `connect_timeout` drops this.
async fn open(
    uri: AMQPUri,
    connector: Option<TlsConnector>,
    properties: ConnectionProperties,
) -> lapin::Result<Connection> {
    let stream = Mutex::new(Some(ShallowStream::new(open_stream(&uri, connector.as_ref()).await?)));
    // Called once, because the properties allow no second attempt.
    let connect = async move |_, _| {
        let stream = stream.lock().unwrap_or_else(PoisonError::into_inner).take();
        stream.map(AsyncTcpStream::Plain).ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionAborted).into())
    };
    Connection::connector(uri, nesting::runtime(), connect, properties).await
}

/// With TLS if there is a connector. lapin's own TLS would trust the system's CAs in addition to the configured one, fail on
/// a system without any, and compile fifty crates more.
async fn open_stream(uri: &AMQPUri, connector: Option<&TlsConnector>) -> io::Result<BrokerStream> {
    let host = uri.authority.host.as_str();
    let plain = TcpStream::connect((host, uri.authority.port)).await?;
    plain.set_nodelay(true)?;
    let Some(connector) = connector else { return Ok(Box::new(plain)) };
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    Ok(Box::new(connector.connect(name, plain).await?))
}

/// The trusted CAs and the client certificate. The server's certificate must be for the host name in the address.
fn tls_connector(settings: &AmqpSettings) -> Result<TlsConnector, String> {
    let certificates = settings.tls_files().read()?;
    let unusable = |fault: &dyn std::fmt::Display| format!("the certificates named in amqp cannot be used: {fault}");
    let mut trusted = RootCertStore::empty();
    trusted.add_parsable_certificates(match &certificates.ca {
        Some(ca) => tls::certificates(ca).map_err(|fault| unusable(&fault))?,
        None => rustls_native_certs::load_native_certs().certs,
    });
    if trusted.is_empty() && certificates.ca.is_none() {
        return Err(
            "this machine trusts no CA; install ca-certificates, or name the file of your CA in amqp.ca_file".into()
        );
    }
    let trusting = ClientConfig::builder().with_root_certificates(trusted);
    let config = match &certificates.client {
        Some(client) => {
            let (chain, key) = client.parts().map_err(|fault| unusable(&fault))?;
            trusting.with_client_auth_cert(chain, key).map_err(|fault| tls::explain(&fault, "amqp", PLAIN))?
        }
        None => trusting.with_no_client_auth(),
    };
    Ok(Arc::new(config).into())
}

/// What to write for a broker without TLS.
const PLAIN: &str = "amqp:// for a broker without TLS";
const TLS: &str = "For a port with TLS write amqps:// in amqp.url";

/// The error when `connect_timeout` has passed.
fn timeout_error(uri: &AMQPUri, settings: &AmqpSettings) -> BrokerError {
    let (place, timeout) = (address(uri), settings.connect_timeout);
    BrokerError::Away(format!("the broker at {place} did not answer within {timeout:?}; is it running there?"))
}

/// Runs several requests within one `connect_timeout`, because a broker may stop answering at any of them.
///
/// # Errors
/// [`BrokerError`] of `requests`, or [`BrokerError::Away`] after the timeout.
pub async fn within_connect_timeout<T>(
    settings: &AmqpSettings,
    requests: impl Future<Output = Result<T, BrokerError>>,
) -> Result<T, BrokerError> {
    match tokio::time::timeout(settings.connect_timeout, requests).await {
        Ok(done) => done,
        Err(_) => Err(timeout_error(&address_of(settings)?, settings)),
    }
}

/// The server of the settings: host, port and virtual host, without the password.
///
/// # Errors
/// [`BrokerError::Refused`] if the address is invalid.
pub fn place(settings: &AmqpSettings) -> Result<String, BrokerError> {
    address_of(settings).map(|uri| address(&uri))
}

/// The client library's own parser takes an IPv6 address for localhost.
fn address_of(settings: &AmqpSettings) -> Result<AMQPUri, BrokerError> {
    let parsed = settings.url.expose_secret().parse::<AmqpAddress>();
    let parsed = parsed.map_err(|fault| BrokerError::Refused(format!("amqp.url {fault}")))?;
    let host = parsed.host.for_connecting();
    let userinfo = AMQPUserInfo { username: parsed.user, password: parsed.password };
    let mechanism: Option<SASLMechanism> = parsed.mechanism.and_then(|word| word.parse().ok());
    Ok(AMQPUri {
        scheme: if parsed.is_tls { AMQPScheme::AMQPS } else { AMQPScheme::AMQP },
        authority: AMQPAuthority { userinfo, host, port: parsed.port },
        vhost: parsed.vhost,
        query: AMQPQueryString {
            heartbeat: parsed.heartbeat_s,
            auth_mechanism: mechanism,
            ..AMQPQueryString::default()
        },
    })
}

fn address(uri: &AMQPUri) -> String {
    let host = &uri.authority.host;
    // As written in an address.
    let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
    format!("{host}:{}, virtual host {:?}", uri.authority.port, uri.vhost)
}

fn connect_error(error: &lapin::Error, place: &str, uri: &AMQPUri, settings: &AmqpSettings) -> BrokerError {
    let user = &uri.authority.userinfo.username;
    if let Some(why) = tls_hint(error, uri) {
        return BrokerError::Refused(format!("the broker at {place} cannot be used with these TLS settings: {why}"));
    }
    match reply(error) {
        Some((reply_code::ACCESS_REFUSED, _)) => BrokerError::Refused(format!(
            "the broker at {place} refuses user {user:?}; check the name and password in amqp.url"
        )),
        // RabbitMQ, rabbit_reader.erl: "connection limit (~p) is reached", of the virtual host or of the user.
        Some((reply_code::NOT_ALLOWED, text)) if text.contains("is reached") => BrokerError::Away(format!(
            "the broker at {place} takes no further connection of user {user:?} ({text}); raise the limit with rabbitmqctl set_vhost_limits or set_user_limits, or run fewer workers"
        )),
        Some((reply_code::NOT_ALLOWED, text)) => BrokerError::Refused(format!(
            "the broker at {place} does not let user {user:?} in ({text}); create the virtual host or grant the user rights on it with rabbitmqctl"
        )),
        Some((code, text)) => {
            BrokerError::Away(format!("the broker at {place} ended the connection with {code} {text}"))
        }
        None => BrokerError::Away(match closed_by_tls_hint(error, uri, settings) {
            Some(why) => format!("the broker at {place} cannot be reached: {why}"),
            None if is_closed_by_server(error) => {
                format!(
                    "the broker at {place} cannot be reached ({error}); is it running there, and without TLS? {TLS}"
                )
            }
            None => format!("the broker at {place} cannot be reached ({error}); is it running there?"),
        }),
    }
}

/// The hint about TLS, if the error may be about TLS.
fn tls_hint(error: &lapin::Error, uri: &AMQPUri) -> Option<String> {
    match (error.kind(), &uri.scheme) {
        (ErrorKind::IOError(error), _) => tls::why(error, "amqp", PLAIN),
        // A TLS alert is not an AMQP frame.
        (ErrorKind::ParsingError(_), AMQPScheme::AMQP) => Some(format!("it does not answer in AMQP. {TLS}")),
        _ => None,
    }
}

/// Whether the server accepted the connection and closed it, as a TLS listener does on AMQP.
fn is_closed_by_server(error: &lapin::Error) -> bool {
    matches!(error.kind(), ErrorKind::IOError(error) if tls::is_cut(error))
}

/// The hint about TLS for a connection that was closed.
fn closed_by_tls_hint(error: &lapin::Error, uri: &AMQPUri, settings: &AmqpSettings) -> Option<String> {
    match (error.kind(), &uri.scheme) {
        (ErrorKind::IOError(error), AMQPScheme::AMQPS) => tls::why_cut(error, settings.tls_files()),
        _ => None,
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

/// What ended a connection that was open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndKind {
    /// The AMQP client cannot parse some bytes. They belong to a message, because everything else comes from the broker
    /// itself. The next connection will get the same message.
    Unreadable,
    /// The broker had an internal error, as RabbitMQ 3 has with a message that it cannot convert to AMQP 0-9-1.
    BrokerFailed,
    /// A delivery was not acknowledged within the broker's `consumer_timeout`. RabbitMQ up to 4.2 closes the channel then;
    /// later versions cancel the consumer, which is no error.
    AckTimeout,
    /// Anything else, such as a network failure.
    Other,
}

/// Classifies an error of an open connection.
#[must_use]
pub fn end_kind(error: &lapin::Error) -> EndKind {
    match reply(error) {
        // lapin's own text in io_loop.rs; an error from the broker about our frames has another text.
        Some((reply_code::FRAME_ERROR, text)) if text.starts_with("frame too large:") => EndKind::Unreadable,
        Some((reply_code::INTERNAL_ERROR, _)) => EndKind::BrokerFailed,
        // RabbitMQ, rabbit_channel.erl: "delivery acknowledgement on channel ~w timed out".
        Some((reply_code::PRECONDITION_FAILED, text)) if text.contains("delivery acknowledgement on channel") => {
            EndKind::AckTimeout
        }
        None if matches!(error.kind(), ErrorKind::ParsingError(_)) => EndKind::Unreadable,
        _ => EndKind::Other,
    }
}

/// Closes a connection within `timeout`: a blocked one would never reply. An error is ignored, because the connection
/// is not needed again.
pub async fn close(connection: &Connection, timeout: Duration) {
    let closing = connection.close(reply_code::CONTENT_OK, "done".into());
    let _closed_or_timed_out = tokio::time::timeout(timeout, closing).await;
}

#[cfg(test)]
mod tests {
    use lapin::ConnectionState;
    use lapin::protocol::{AMQPError, AMQPErrorKind, AMQPHardError, AMQPSoftError};

    use super::*;
    use order_timeout_core::address::AMQP_MECHANISMS;

    fn kind_of(kind: ErrorKind) -> EndKind {
        end_kind(&kind.into())
    }

    fn hard(error: AMQPHardError, text: &str) -> ErrorKind {
        ErrorKind::ProtocolError(AMQPError::new(AMQPErrorKind::Hard(error), text.into()))
    }

    #[test]
    fn only_unreadable_bytes_count_as_unreadable() {
        // A header frame with a property `type` of one byte that is no UTF-8.
        let frame = b"\x02\0\x01\0\0\0\x10\0\x3c\0\0\0\0\0\0\0\0\0\0\0\x20\x01\xff\xce";
        let unparsed = parse_frame(&frame[..]).unwrap_err();
        assert_eq!(kind_of(ErrorKind::ParsingError(unparsed)), EndKind::Unreadable);
        let too_large = hard(AMQPHardError::FRAMEERROR, "frame too large: 131100 bytes");
        assert_eq!(kind_of(too_large), EndKind::Unreadable);
        assert_eq!(kind_of(hard(AMQPHardError::INTERNALERROR, "INTERNAL_ERROR")), EndKind::BrokerFailed);
        for other in [
            hard(AMQPHardError::FRAMEERROR, "FRAME_ERROR - type 2, all octets = <<>>: {frame_too_large,9,8}"),
            hard(AMQPHardError::CONNECTIONFORCED, "CONNECTION_FORCED - broker forced connection closure"),
            hard(AMQPHardError::UNEXPECTEDFRAME, "UNEXPECTED_FRAME"),
            ErrorKind::ProtocolError(AMQPError::new(AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND), "no queue".into())),
            ErrorKind::IOError(Arc::new(io::Error::from(io::ErrorKind::ConnectionReset))),
            ErrorKind::InvalidConnectionState(ConnectionState::Error),
            ErrorKind::MissingHeartbeatError,
        ] {
            assert_eq!(kind_of(other.clone()), EndKind::Other, "{other:?}");
        }
    }

    #[test]
    fn acknowledgement_timeout_is_recognized() {
        let precondition = |text: &str| {
            ErrorKind::ProtocolError(AMQPError::new(
                AMQPErrorKind::Soft(AMQPSoftError::PRECONDITIONFAILED),
                text.into(),
            ))
        };
        let timeout = "PRECONDITION_FAILED - delivery acknowledgement on channel 2 timed out. Timeout value used: 5000 ms. This timeout value can be configured, see consumers doc guide to learn more";
        assert_eq!(kind_of(precondition(timeout)), EndKind::AckTimeout);
        assert_eq!(kind_of(precondition("PRECONDITION_FAILED - unknown delivery tag 7")), EndKind::Other);
    }

    #[test]
    fn client_gets_host_of_address() {
        let uri_of = |url: &str| {
            let settings = AmqpSettings {
                url: url.to_owned().into(),
                url_file: String::new(),
                ca_file: String::new(),
                client_cert_file: String::new(),
                client_key_file: String::new(),
                heartbeat: Duration::from_secs(10),
                connect_timeout: Duration::from_secs(5),
                confirm_timeout: Duration::from_secs(5),
            };
            address_of(&settings)
        };
        let uri =
            uri_of("amqps://sh%C3%B6p:p%40ss@[2001:db8::1]:5673/v%2f?heartbeat=30&auth_mechanism=external").unwrap();
        let account = AMQPUserInfo { username: "shöp".into(), password: "p@ss".into() };
        assert_eq!(uri.authority, AMQPAuthority { userinfo: account, host: "2001:db8::1".into(), port: 5673 });
        assert_eq!((uri.scheme.clone(), uri.vhost.as_str()), (AMQPScheme::AMQPS, "v/"));
        assert_eq!((uri.query.heartbeat, uri.query.auth_mechanism), (Some(30), Some(SASLMechanism::External)));
        assert_eq!(address(&uri), "[2001:db8::1]:5673, virtual host \"v/\"");
        assert!(matches!(uri_of("amqp:///v"), Err(BrokerError::Refused(why)) if why.contains("names no host")));
    }

    #[test]
    fn knows_every_mechanism_of_addresses() {
        for word in AMQP_MECHANISMS {
            assert!(word.parse::<SASLMechanism>().is_ok(), "{word}");
        }
    }
}
