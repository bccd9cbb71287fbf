//! One HTTP client per provider, and one for the webhook: every request is rate limited, ends in time, follows no redirect, and reads no more than
//! a provider's answers have.
//!
//! Knows no provider, and tries nothing again. No error repeats a header or a body.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{DATE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER, USER_AGENT};
use hyper::http::response::Parts;
use hyper::{Method, Request, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::{self, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use order_timeout_core::{InvalidSetting, with_causes};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use tokio::time::timeout;
use url::Url;

use crate::call_error::CallError;
use crate::rate::Rate;
use crate::settings::{LimitsSettings, base_url};
use crate::{local_clock, retry_after, secret_file, strict_json};

/// The longest answer that is read. A checkout session with all that is expanded here has about 20 kB.
pub(crate) const LONGEST_ANSWER_BYTES: usize = 1024 * 1024;

/// How long a body may take that is not used.
const UNUSED_BODY_TIMEOUT: Duration = Duration::from_secs(1);

/// Load balancers close idle connections after a minute or more; well below it, so that few requests meet a closed one.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// The client of one provider.
pub(crate) struct Client {
    inner: legacy::Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// Without a slash at its end.
    base: String,
    /// The path of `base`: some signatures cover it.
    base_path: String,
    rate: Rate,
    timeout: Duration,
    queue_timeout: Duration,
    section: String,
}

/// A request below the provider's address.
pub(crate) struct Outgoing {
    pub(crate) method: Method,
    /// Begins with `/`, or is empty; encoded.
    pub(crate) path_and_query: String,
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    pub(crate) body: Vec<u8>,
}

/// A whole answer, with a status below 500 that is neither a redirect nor 429.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Client {
    pub(crate) fn new(
        section: &str,
        url: &str,
        ca_file: Option<&Path>,
        limits: &LimitsSettings,
    ) -> Result<Self, InvalidSetting> {
        Self::to(section, &base_url(section, url)?, "ca_file", ca_file, limits)
    }

    /// A client of an address that `checked_url` has let through. `ca_key`: the setting in the section that names `ca_file`.
    ///
    /// # Errors
    /// [`InvalidSetting`] of that setting, if no CA can be read from it.
    pub(crate) fn to(
        section: &str,
        url: &Url,
        ca_key: &str,
        ca_file: Option<&Path>,
        limits: &LimitsSettings,
    ) -> Result<Self, InvalidSetting> {
        let connector = HttpsConnectorBuilder::new().with_tls_config(tls(section, url, ca_key, ca_file)?);
        // `checked_url` lets plain HTTP through only to this machine.
        let connector = connector.https_or_http().enable_http1().build();
        let inner = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIMEOUT)
            .pool_max_idle_per_host(limits.concurrency as usize)
            // Only requests of which no byte was sent, because the connection had been closed: no second try.
            .retry_canceled_requests(true)
            .build(connector);
        Ok(Self {
            inner,
            base: url.as_str().trim_end_matches('/').to_owned(),
            base_path: url.path().trim_end_matches('/').to_owned(),
            rate: Rate::new(limits.requests_per_s),
            timeout: limits.timeout,
            queue_timeout: limits.queue_timeout,
            section: section.to_owned(),
        })
    }

    /// The key of the provider's settings, such as `providers.stripe`.
    pub(crate) fn section(&self) -> &str {
        &self.section
    }

    /// The path and query that the server sees.
    pub(crate) fn full_path(&self, path_and_query: &str) -> String {
        format!("{}{path_and_query}", self.base_path)
    }

    /// Sends a request when it is its turn, and reads the whole answer.
    ///
    /// # Errors
    /// [`CallError`] for everything but a whole answer that may be in a provider's table.
    pub(crate) async fn send(&self, outgoing: Outgoing) -> Result<Reply, CallError> {
        let request = self.in_turn(outgoing).await?;
        self.in_time(self.exchange(request)).await
    }

    /// The same where the status decides: a body that is too long, slow or cut off changes nothing. The reply has none.
    ///
    /// # Errors
    /// [`CallError`] as of [`Self::send`].
    pub(crate) async fn send_for_status(&self, outgoing: Outgoing) -> Result<Reply, CallError> {
        let request = self.in_turn(outgoing).await?;
        let (head, body) = self.in_time(self.begin(request)).await?;
        // So that the connection can be used again.
        let _ = timeout(UNUSED_BODY_TIMEOUT, Limited::new(body, LONGEST_ANSWER_BYTES).collect()).await;
        Ok(Reply { status: head.status.as_u16(), headers: head.headers, body: Bytes::new() })
    }

    async fn in_turn(&self, outgoing: Outgoing) -> Result<Request<Full<Bytes>>, CallError> {
        let turn = timeout(self.queue_timeout, self.rate.turn()).await;
        turn.map_err(|_| CallError::QueueFull(self.section.clone()))?;
        self.request(outgoing)
    }

    async fn in_time<T>(&self, answer: impl Future<Output = Result<T, CallError>>) -> Result<T, CallError> {
        timeout(self.timeout, answer).await.unwrap_or(Err(CallError::TimedOut(self.timeout)))
    }

    fn request(&self, outgoing: Outgoing) -> Result<Request<Full<Bytes>>, CallError> {
        let invalid = CallError::InvalidAttempt("no request can be made of the attempt's reference");
        let uri: Uri = format!("{}{}", self.base, outgoing.path_and_query).parse().map_err(|_| invalid.clone())?;
        let mut request = Request::new(Full::new(Bytes::from(outgoing.body)));
        (*request.method_mut(), *request.uri_mut()) = (outgoing.method, uri);
        let headers = request.headers_mut();
        headers.extend(outgoing.headers.into_iter().map(|(name, value)| (Some(name), value)));
        // WeChat Pay and PayPal refuse requests without it.
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("order-timeout/", env!("CARGO_PKG_VERSION"))));
        Ok(request)
    }

    /// Sends the request and reads the answer up to its body.
    async fn begin(&self, request: Request<Full<Bytes>>) -> Result<(Parts, Incoming), CallError> {
        let answer = self.inner.request(request).await.map_err(|error| connection_error(&error))?;
        let (head, body) = answer.into_parts();
        let status = head.status.as_u16();
        let pause = || {
            let header = |name| head.headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
            retry_after::pause(header(RETRY_AFTER)?, header(DATE), local_clock::now())
        };
        match status {
            300..400 => Err(CallError::Redirected(status)),
            429 => Err(CallError::Throttled { retry_after: pause() }),
            500.. => Err(CallError::Failed { status, retry_after: pause() }),
            _ => Ok((head, body)),
        }
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Reply, CallError> {
        let (head, body) = self.begin(request).await?;
        let body = Limited::new(body, LONGEST_ANSWER_BYTES).collect().await.map_err(|error| {
            if error.is::<LengthLimitError>() { CallError::TooLong(LONGEST_ANSWER_BYTES) } else { CallError::Cut }
        })?;
        Ok(Reply { status: head.status.as_u16(), headers: head.headers, body: body.to_bytes() })
    }
}

impl Reply {
    /// The body as JSON. `Null` for an answer without a body (204).
    ///
    /// # Errors
    /// [`CallError::Unreadable`] for anything that is not JSON; [`CallError::Refused`] if the answer refuses the keys.
    pub(crate) fn json(&self, section: &str) -> Result<Value, CallError> {
        let status = self.status;
        if self.body.is_empty() && status == 204 {
            return Ok(Value::Null);
        }
        strict_json::parse(&self.body).map_err(|_| match status {
            // A gateway's page in front of the provider.
            401 | 403 => CallError::Refused { status, section: section.to_owned() },
            _ => CallError::Unreadable { status },
        })
    }

    /// A header that is given once, as text.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.get_all(name).iter();
        match (values.next(), values.next()) {
            (Some(value), None) => value.to_str().ok(),
            _ => None,
        }
    }
}

/// A header whose value is a secret: marked, so that no debug output shows it.
///
/// # Errors
/// Never for a text that `secret_file::read_token` has read.
pub(crate) fn secret_header(text: &SecretString) -> Result<HeaderValue, CallError> {
    let mut value = HeaderValue::from_str(text.expose_secret())
        .map_err(|_| CallError::NotSent("a key cannot be sent in a header"))?;
    value.set_sensitive(true);
    Ok(value)
}

fn connection_error(error: &legacy::Error) -> CallError {
    if !error.is_connect() {
        return CallError::Cut;
    }
    let cause = std::error::Error::source(error).map_or_else(|| error.to_string(), with_causes);
    CallError::Unreachable(cause)
}

fn tls(section: &str, url: &Url, ca_key: &str, ca_file: Option<&Path>) -> Result<ClientConfig, InvalidSetting> {
    let mut roots = RootCertStore::empty();
    match ca_file {
        Some(path) => {
            for certificate in certificates(section, ca_key, path)? {
                roots.add(certificate).map_err(|error| {
                    InvalidSetting::new(
                        format!("{section}.{ca_key}"),
                        format!(
                            "names {path:?}, which holds an unusable certificate ({error}); name a PEM file of CAs"
                        ),
                    )
                })?;
            }
        }
        // Plain HTTP to this machine.
        None if url.scheme() != "https" => {}
        None => {
            let native = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(native.certs);
            if roots.is_empty() {
                let why =
                    "is not given, and this machine trusts no CA; install ca-certificates, or name the file of a CA";
                return Err(InvalidSetting::new(format!("{section}.{ca_key}"), why));
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.map_err(|error| InvalidSetting::new(format!("{section}.url"), format!("TLS: {error}")))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

fn certificates(section: &str, ca_key: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, InvalidSetting> {
    let text = secret_file::read_text(section, ca_key, path)?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.expose_secret().as_bytes()).collect();
    match read {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        _ => {
            let why = format!("names {path:?}, which holds no certificate in PEM form (-----BEGIN CERTIFICATE-----)");
            Err(InvalidSetting::new(format!("{section}.{ca_key}"), why))
        }
    }
}

/// The body is JSON.
pub(crate) fn json_body() -> (HeaderName, HeaderValue) {
    (hyper::header::CONTENT_TYPE, HeaderValue::from_static("application/json"))
}

/// The only form of answer that providers document.
pub(crate) fn accept_json() -> (HeaderName, HeaderValue) {
    (hyper::header::ACCEPT, HeaderValue::from_static("application/json"))
}

/// The body of a form.
pub(crate) fn form_body() -> (HeaderName, HeaderValue) {
    (hyper::header::CONTENT_TYPE, HeaderValue::from_static("application/x-www-form-urlencoded;charset=utf-8"))
}
