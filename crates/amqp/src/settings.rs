//! The section `amqp` of the settings: the broker's address, its certificates and the timeouts of its clients.
//!
//! Has no defaults: the worker's are in `config/default.toml`, a publisher's in the client's builder. No I/O, and no
//! error repeats a part of an address, which may contain a password.

use std::time::Duration;

use order_timeout_core::InvalidSetting;
use order_timeout_core::address::AmqpAddress;
use order_timeout_core::duration;
use order_timeout_core::message::AMQP_MAX_SHORT_STRING_BYTES;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::tls::TlsFiles;

/// The form of an address, as error messages show it.
pub const ADDRESS_FORM: &str = "amqp://user:password@host:5672/vhost";
/// The texts with a scheme in error messages about an address, besides [`ADDRESS_FORM`]; the first is the required
/// beginning. The worker withholds an error message that contains any other address.
pub const ADDRESS_SCHEMES: [&str; 3] = ["amqp:// or amqps://", "begins with amqp://", "write amqps://"];

/// How to reach the broker.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AmqpSettings {
    /// `amqp://` or `amqps://`, with user, password and virtual host; see [`ADDRESS_FORM`].
    pub url: SecretString,
    /// A file with the address instead; empty for none. The code that loads the settings copies its content to `url`;
    /// this crate never reads it.
    pub url_file: String,
    /// A PEM file with the only CAs to trust; empty for the system's.
    pub ca_file: String,
    /// A PEM file with the client's certificate chain; empty for none.
    pub client_cert_file: String,
    /// A PEM file with the key of that certificate, without a passphrase; empty for none.
    pub client_key_file: String,
    /// The interval of heartbeats that is offered to the broker, in whole seconds: 1 second to 10 minutes. A parameter
    /// `heartbeat` in the address overrides it.
    #[serde(deserialize_with = "duration::read")]
    pub heartbeat: Duration,
    /// The timeout of opening a connection, handshake included: 1 millisecond to 1 hour.
    #[serde(deserialize_with = "duration::read")]
    pub connect_timeout: Duration,
    /// The timeout of a window of confirms, from when its first message is sent: 1 millisecond to 1 hour.
    #[serde(deserialize_with = "duration::read")]
    pub confirm_timeout: Duration,
}

impl AmqpSettings {
    /// The certificate files that are named here.
    #[must_use]
    pub fn tls_files(&self) -> TlsFiles<'_> {
        TlsFiles {
            section: "amqp",
            ca_file: &self.ca_file,
            client_cert_file: &self.client_cert_file,
            client_key_file: &self.client_key_file,
        }
    }

    /// Checks every rule for this section. Reads no file and opens no connection.
    ///
    /// # Errors
    /// [`InvalidSetting`] for the first rule that is broken.
    pub fn validate(&self) -> Result<(), InvalidSetting> {
        let invalid_url = |why: &str| Err(InvalidSetting::new("amqp.url", why));
        let url = self.url.expose_secret();
        if !(url.starts_with("amqp://") || url.starts_with("amqps://")) {
            return invalid_url(&format!("must begin with {}, such as {ADDRESS_FORM}", ADDRESS_SCHEMES[0]));
        }
        let parsed: AmqpAddress = match url.parse() {
            Ok(parsed) => parsed,
            Err(fault) => return invalid_url(&format!("{fault} (its form: {ADDRESS_FORM})")),
        };
        if parsed.vhost.is_empty() {
            return invalid_url("names no virtual host behind its last \"/\"; write /%2f for the default virtual host");
        }
        if parsed.vhost.len() > AMQP_MAX_SHORT_STRING_BYTES {
            return invalid_url(&format!("its virtual host has more than {AMQP_MAX_SHORT_STRING_BYTES} bytes"));
        }
        let files = self.tls_files();
        files.validate()?;
        if files.is_any() && url.starts_with("amqp://") {
            return invalid_url(
                "begins with amqp:// while certificates are named, so the connection would not be encrypted; write amqps:// or name no certificates",
            );
        }
        for (key, value) in
            [("amqp.connect_timeout", self.connect_timeout), ("amqp.confirm_timeout", self.confirm_timeout)]
        {
            InvalidSetting::within(key, value, Duration::from_millis(1), Duration::from_secs(3_600))?;
        }
        InvalidSetting::within("amqp.heartbeat", self.heartbeat, Duration::from_secs(1), Duration::from_secs(600))
    }
}
