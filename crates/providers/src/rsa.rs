//! RSA signatures with SHA-256 (PKCS #1 v1.5), as WeChat Pay and Alipay use them: ours are made, theirs are verified.
//!
//! No error and no debug output contains any part of a key.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use order_timeout_core::InvalidSetting;
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, SubjectPublicKeyInfoDer};
use secrecy::ExposeSecret;
use std::fmt::Write as _;
use std::path::Path;
use webpki::ring::RSA_PKCS1_2048_8192_SHA256;
use webpki::{EndEntityCert, RawPublicKeyEntity};

use crate::call_error::CallError;
use crate::secret_file;

/// Signs requests.
pub(crate) struct Signer {
    key: RsaKeyPair,
    random: SystemRandom,
}

/// Verifies answers.
pub(crate) enum Verifier {
    Key(SubjectPublicKeyInfoDer<'static>),
    Certificate(CertificateDer<'static>),
}

/// A signature that does not match what it is said to sign, or is no signature.
#[derive(Debug, thiserror::Error)]
#[error("its signature does not match its content")]
pub(crate) struct SignatureError;

impl Signer {
    /// Reads a private key: PEM (PKCS #1 or #8), or the same without its heading, as Alipay's key tool writes it.
    ///
    /// # Errors
    /// [`InvalidSetting`] if the file cannot be read, or holds no RSA key of 2048 to 4096 bits.
    pub(crate) fn read(section: &str, key: &str, path: &Path) -> Result<Self, InvalidSetting> {
        let text = secret_file::read_text(section, key, path)?;
        let Some(key_pair) = key_pair(text.expose_secret()) else {
            let why = format!(
                "names {path:?}, which holds no RSA private key of 2048 to 4096 bits without a passphrase (-----BEGIN PRIVATE KEY-----); write the key into it"
            );
            return Err(InvalidSetting::new(format!("{section}.{key}"), why));
        };
        Ok(Self { key: key_pair, random: SystemRandom::new() })
    }

    /// The signature, in Base64.
    pub(crate) fn sign(&self, message: &[u8]) -> Result<String, CallError> {
        let mut signature = vec![0; self.key.public().modulus_len()];
        self.key
            .sign(&RSA_PKCS1_SHA256, &self.random, message, &mut signature)
            .map_err(|_| CallError::NotSent("the request could not be signed; this machine gives no random numbers"))?;
        Ok(STANDARD.encode(signature))
    }
}

fn key_pair(text: &str) -> Option<RsaKeyPair> {
    let der = if text.starts_with("-----") {
        PrivateKeyDer::from_pem_slice(text.as_bytes()).ok()?
    } else {
        PrivateKeyDer::try_from(decoded(text)?).ok()?
    };
    match &der {
        PrivateKeyDer::Pkcs8(key) => RsaKeyPair::from_pkcs8(key.secret_pkcs8_der()).ok(),
        PrivateKeyDer::Pkcs1(key) => RsaKeyPair::from_der(key.secret_pkcs1_der()).ok(),
        _ => None,
    }
}

/// Base64 over several lines.
fn decoded(text: &str) -> Option<Vec<u8>> {
    STANDARD.decode(text.split_ascii_whitespace().collect::<String>()).ok()
}

impl Verifier {
    /// Reads a public key or a certificate: PEM, or a public key without its heading, as Alipay's console shows it.
    ///
    /// # Errors
    /// [`InvalidSetting`] if the file cannot be read, or holds neither.
    pub(crate) fn read(section: &str, key: &str, path: &Path) -> Result<Self, InvalidSetting> {
        let text = secret_file::read_text(section, key, path)?;
        let text = text.expose_secret();
        let read = if text.starts_with("-----BEGIN CERTIFICATE") {
            CertificateDer::from_pem_slice(text.as_bytes()).ok().map(Self::Certificate)
        } else if text.starts_with("-----") {
            SubjectPublicKeyInfoDer::from_pem_slice(text.as_bytes()).ok().map(Self::Key)
        } else {
            decoded(text).map(|der| Self::Key(der.into()))
        };
        let usable = read.filter(|verifier| match verifier {
            Self::Key(key) => RawPublicKeyEntity::try_from(key).is_ok(),
            Self::Certificate(certificate) => EndEntityCert::try_from(certificate).is_ok(),
        });
        usable.ok_or_else(|| {
            let why = format!(
                "names {path:?}, which holds neither a public key (-----BEGIN PUBLIC KEY-----) nor a certificate; write the provider's key into it"
            );
            InvalidSetting::new(format!("{section}.{key}"), why)
        })
    }

    /// Verifies a signature in Base64.
    ///
    /// # Errors
    /// [`SignatureError`] if it is not this key's signature of the message.
    pub(crate) fn verify(&self, message: &[u8], signature: &str) -> Result<(), SignatureError> {
        let signature = STANDARD.decode(signature).map_err(|_| SignatureError)?;
        let verified = match self {
            Self::Key(key) => RawPublicKeyEntity::try_from(key)
                .and_then(|key| key.verify_signature(RSA_PKCS1_2048_8192_SHA256, message, &signature)),
            Self::Certificate(certificate) => EndEntityCert::try_from(certificate)
                .and_then(|entity| entity.verify_signature(RSA_PKCS1_2048_8192_SHA256, message, &signature)),
        };
        verified.map_err(|_| SignatureError)
    }

    /// The serial number of a certificate in hexadecimal, as WeChat Pay names it; `None` for a bare key.
    pub(crate) fn serial(&self) -> Option<String> {
        let Self::Certificate(certificate) = self else { return None };
        let entity = EndEntityCert::try_from(certificate).ok()?;
        let mut serial = String::new();
        // A leading zero byte only says that the number is positive.
        for byte in entity.serial().iter().skip_while(|byte| **byte == 0) {
            let _ = write!(serial, "{byte:02X}");
        }
        Some(serial)
    }
}
