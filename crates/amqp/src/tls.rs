//! TLS: the certificates that the settings name, and one sentence for each kind of failed handshake.
//!
//! Used for the broker by [`connect`](crate::connect) and for Postgres by the worker. Opens no connection and shows no
//! key. The connecting code calls [`TlsFiles::read`]: for the broker before every connection, so that a renewed
//! certificate is used without a restart; for Postgres once for its pool.

use std::io::{self, Read};

use order_timeout_core::InvalidSetting;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{AlertDescription, CertificateError};

/// Larger than any certificate bundle.
const LARGEST_FILE_BYTES: u64 = 8 * 1024 * 1024;

/// The TLS settings of one section; an empty path means none.
#[derive(Debug, Clone, Copy)]
pub struct TlsFiles<'a> {
    /// `amqp` or `database`, for the sentences.
    pub section: &'static str,
    /// A path to the trusted CAs.
    pub ca_file: &'a str,
    /// A path to the client's certificate chain.
    pub client_cert_file: &'a str,
    /// A path to that certificate's private key, without a passphrase.
    pub client_key_file: &'a str,
}

/// The contents of the files; each was checked to contain PEM of its kind.
#[derive(Clone, Default)]
pub struct Certificates {
    /// One or more certificates, as PEM; `None` if no file is named.
    pub ca: Option<Vec<u8>>,
    /// `None` unless both a certificate and its key are named.
    pub client: Option<ClientCertificate>,
}

/// A certificate chain and its private key.
#[derive(Clone)]
pub struct ClientCertificate {
    /// PEM; the client's own certificate first, then the intermediate ones.
    pub chain: Vec<u8>,
    /// PEM, without a passphrase.
    pub key: Vec<u8>,
}

/// Makes ring the default provider of rustls, which needs one before the first TLS connection, to the broker as to
/// Postgres. If the program has already chosen a provider, its choice is kept.
pub fn choose_crypto_provider() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Another thread may have installed the same provider first.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}

impl TlsFiles<'_> {
    /// Whether any file is named.
    #[must_use]
    pub fn is_any(&self) -> bool {
        [self.ca_file, self.client_cert_file, self.client_key_file].iter().any(|path| !path.is_empty())
    }

    /// Checks that a client certificate and its key are named together: one is useless without the other.
    ///
    /// # Errors
    /// [`InvalidSetting`] names the one that is given and the one that is missing.
    pub fn validate(&self) -> Result<(), InvalidSetting> {
        let section = self.section;
        let (given, missing) = match (self.client_cert_file, self.client_key_file) {
            (_, "") if !self.client_cert_file.is_empty() => ("client_cert_file", "client_key_file"),
            ("", key) if !key.is_empty() => ("client_key_file", "client_cert_file"),
            _ => return Ok(()),
        };
        let why = format!("is given without {section}.{missing}; the two go together");
        Err(InvalidSetting::new(format!("{section}.{given}"), why))
    }

    /// Reads the named files, up to 8 MiB of each.
    ///
    /// # Errors
    /// One sentence that names the setting and the path: the file cannot be read, or holds no PEM of the expected kind.
    pub fn read(&self) -> Result<Certificates, String> {
        let ca = self.optional("ca_file", self.ca_file, is_certificates)?;
        let chain = self.optional("client_cert_file", self.client_cert_file, is_certificates)?;
        let key = self.optional("client_key_file", self.client_key_file, is_key)?;
        let client = chain.zip(key).map(|(chain, key)| ClientCertificate { chain, key });
        Ok(Certificates { ca, client })
    }

    fn optional(
        &self,
        name: &str,
        path: &str,
        check: fn(&[u8]) -> Result<(), &'static str>,
    ) -> Result<Option<Vec<u8>>, String> {
        if path.is_empty() {
            return Ok(None);
        }
        let section = self.section;
        let bytes = read_file(path).map_err(|error| {
            format!("{section}.{name} names {path:?}, which cannot be read: {error}; name a file that exists and is readable")
        })?;
        check(&bytes).map_err(|holds| format!("{section}.{name} names {path:?}, which holds {holds}"))?;
        Ok(Some(bytes))
    }
}

fn read_file(path: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(LARGEST_FILE_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn is_certificates(pem: &[u8]) -> Result<(), &'static str> {
    match certificates(pem) {
        Ok(found) if !found.is_empty() => Ok(()),
        _ => Err("no certificate in PEM form (-----BEGIN CERTIFICATE-----)"),
    }
}

fn is_key(pem: &[u8]) -> Result<(), &'static str> {
    // A key with a passphrase has another PEM heading, and a passphrase cannot be asked for.
    let is_key = PrivateKeyDer::from_pem_slice(pem).is_ok();
    is_key.then_some(()).ok_or("no private key in PEM form without a passphrase (-----BEGIN PRIVATE KEY-----)")
}

/// The certificates in the contents of a PEM file, in their order; empty if it contains none.
///
/// # Errors
/// rustls' error if a section of the file is malformed.
pub fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, rustls::pki_types::pem::Error> {
    CertificateDer::pem_slice_iter(pem).collect()
}

impl ClientCertificate {
    /// The chain and the key as rustls types.
    ///
    /// # Errors
    /// rustls' error if a section is malformed, or if there is no key.
    pub fn parts(
        &self,
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), rustls::pki_types::pem::Error> {
        Ok((certificates(&self.chain)?, PrivateKeyDer::from_pem_slice(&self.key)?))
    }
}

/// Describes a TLS error as the end of a sentence about the server; `None` if it is another error. `section` is the
/// settings' section, `plain` what to write for a server without TLS.
#[must_use]
pub fn why(error: &io::Error, section: &str, plain: &str) -> Option<String> {
    fault_in(error).map(|fault| explain(fault, section, plain))
}

/// rustls' own error, at any depth of wrapping.
fn fault_in(error: &io::Error) -> Option<&rustls::Error> {
    let inner = error.get_ref()?;
    match inner.downcast_ref::<io::Error>() {
        Some(wrapped) => fault_in(wrapped),
        None => inner.downcast_ref(),
    }
}

/// As [`why`], for an error of rustls itself.
#[must_use]
pub fn explain(fault: &rustls::Error, section: &str, plain: &str) -> String {
    match fault {
        rustls::Error::InvalidCertificate(fault) => why_not_trusted(fault, section),
        rustls::Error::AlertReceived(alert) => why_not_let_in(*alert, section),
        rustls::Error::InconsistentKeys(_) => format!(
            "{section}.client_key_file is not the key of the certificate in {section}.client_cert_file; name the two that belong together"
        ),
        // The server sent something that is not a TLS record.
        rustls::Error::InvalidMessage(_) => {
            format!("it does not speak TLS on this port; name the port that does in {section}.url, or {plain}")
        }
        rustls::Error::PeerIncompatible(fault) => {
            format!("it supports no secure TLS version ({fault:?}); enable TLS 1.2 or 1.3 on it")
        }
        other => format!("TLS failed ({other}); see the server's log for details"),
    }
}

fn why_not_trusted(fault: &CertificateError, section: &str) -> String {
    match fault {
        CertificateError::UnknownIssuer => format!(
            "its certificate is signed by a CA that is not trusted here; name the file of the right CA in {section}.ca_file"
        ),
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "its certificate has expired; renew it on the server, or set the clock of this machine right".into()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "its certificate is not valid yet; set the clocks of both machines right".into()
        }
        CertificateError::NotValidForName => format!(
            "its certificate is for another host name; write the name it has in {section}.url, or give the server one for this name"
        ),
        CertificateError::NotValidForNameContext { presented, .. } => format!(
            "its certificate is for {}, not for this host name; write a name it has in {section}.url, or give the server one for this name",
            presented.iter().map(|name| bare(name)).collect::<Vec<_>>().join(", ")
        ),
        CertificateError::Revoked => "its certificate was revoked; give the server another".into(),
        other => format!("its certificate cannot be trusted ({other}); give the server another"),
    }
}

/// The name inside `DnsName("…")` or `IpAddress(…)`.
fn bare(name: &str) -> &str {
    name.split_once('(').map_or(name, |(_, rest)| rest.trim_end_matches(')'))
}

/// Whether the peer accepted the connection and then closed it.
#[must_use]
pub fn is_cut(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof)
}

/// The most likely cause if a connection was closed right after the TLS handshake, as the end of a sentence about the
/// server; `None` if [`is_cut`] is false. Under TLS 1.3 a server checks the
/// client's certificate after the client has begun to send, and the alert of a server that then closes may be lost.
#[must_use]
pub fn why_cut(error: &io::Error, files: TlsFiles<'_>) -> Option<String> {
    if !is_cut(error) {
        return None;
    }
    let alert = match files.client_cert_file {
        "" => AlertDescription::CertificateRequired,
        _ => AlertDescription::CertificateUnknown,
    };
    let likely = why_not_let_in(alert, files.section);
    Some(format!("it closed the connection right after the TLS handshake; if it is running, most likely {likely}"))
}

fn why_not_let_in(alert: AlertDescription, section: &str) -> String {
    match alert {
        // TLS 1.2 has no specific alert for a missing certificate.
        AlertDescription::CertificateRequired | AlertDescription::HandshakeFailure => format!(
            "it demands a client certificate; name one in {section}.client_cert_file and its key in {section}.client_key_file"
        ),
        AlertDescription::UnknownCA
        | AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateRevoked
        | AlertDescription::CertificateExpired
        | AlertDescription::CertificateUnknown
        | AlertDescription::AccessDenied
        | AlertDescription::DecryptError => format!(
            "it does not accept the certificate in {section}.client_cert_file; name one that is valid and signed by a CA that it trusts"
        ),
        other => format!("it aborted the TLS handshake ({other:?}); see the server's log for details"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_tls_error_at_any_depth() {
        let fault = rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let wrapped = io::Error::other(io::Error::new(io::ErrorKind::InvalidData, fault));
        assert!(why(&wrapped, "amqp", "").unwrap().contains("amqp.ca_file"));
        assert_eq!(why(&io::Error::other("a cable was cut"), "amqp", ""), None);
    }

    #[test]
    fn invalid_file_is_named_with_setting() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "-----BEGIN NONSENSE-----").unwrap();
        let path = file.path().to_str().unwrap();
        let with =
            |ca_file, client_key_file| TlsFiles { section: "amqp", ca_file, client_cert_file: "", client_key_file };
        for (files, name) in [(with(path, ""), "amqp.ca_file"), (with("", path), "amqp.client_key_file")] {
            let why = files.read().map(drop).unwrap_err();
            assert!(
                why.contains(name) && why.contains(path) && why.contains("PEM") && !why.contains("NONSENSE"),
                "{why}"
            );
        }
        let why = with("/nowhere/ca.pem", "").read().map(drop).unwrap_err();
        assert!(why.contains("/nowhere/ca.pem") && why.contains("cannot be read"), "{why}");
    }
}
