//! Sends the events of a worker without a broker to one address of the shop's, signed as the Standard Webhooks
//! specification says (<https://www.standardwebhooks.com>).
//!
//! Uses the client of the providers, and knows none of them. Sends each event once: the caller knows what to send again.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::{StreamExt, stream};
use hyper::Method;
use hyper::header::{HeaderName, HeaderValue};
use order_timeout_core::InvalidSetting;
use ring::hmac;
use secrecy::{ExposeSecret, SecretString};
use url::Url;

use crate::call_error::CallError;
use crate::client::{Client, Outgoing, json_body, secret_header};
use crate::settings::{LimitsSettings, checked_url};
use crate::{local_clock, retry_after, secret_file};

/// The section of the settings.
const SECTION: &str = "announce";
/// Requests at a time.
pub const CONCURRENCY: usize = 16;
/// The most that the client's rate limit can be; it spaces requests by a millisecond at least.
const REQUESTS_PER_S: u32 = 10_000;
/// Events that are sent before their answers are written down: four for each request at a time, so that a batch takes at
/// most four timeouts.
pub const BATCH_SIZE: usize = 4 * CONCURRENCY;
/// How a key is written (Standard Webhooks, "Signature scheme").
const KEY_PREFIX: &str = "whsec_";
/// The lengths of a key that the specification recommends.
const KEY_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// An event to be sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The same each time that it is sent.
    pub id: String,
    /// Names in lower case, and their values.
    pub headers: Vec<(&'static str, String)>,
    /// JSON.
    pub body: Vec<u8>,
}

/// Why an event is not known to have arrived. It may have arrived all the same, except if it was not sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WebhookError {
    /// No connection could be opened, for this reason. Another event would fare no better.
    #[error("the webhook cannot be reached ({0}); start its receiver, or correct announce.webhook")]
    Unreachable(String),
    /// The receiver did not answer with a status from 200 to 299. Another event may be accepted.
    #[error("the webhook does not accept an event: {why}")]
    Refused {
        /// The answer, or that there is none.
        why: String,
        /// How long the receiver asks to be left alone with it.
        retry_after: Option<Duration>,
    },
    /// It was not sent, because the requests before it got no answer.
    #[error("the event was not sent, because the webhook gave no answer to the {CONCURRENCY} before it")]
    NotSent,
}

impl WebhookError {
    /// Whether this event was refused individually, so that others may be accepted.
    #[must_use]
    pub fn is_event_specific(&self) -> bool {
        matches!(self, Self::Refused { .. })
    }

    /// How long the receiver asks to be left alone with this event.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Refused { retry_after, .. } => *retry_after,
            Self::Unreachable(_) | Self::NotSent => None,
        }
    }
}

/// A receiver of events.
pub struct Webhook {
    client: Client,
    /// A slash if the address ends in one, which the client leaves out.
    path: &'static str,
    key: hmac::Key,
    /// The host, for logs: a path may be meant to be kept secret.
    host: String,
}

impl std::fmt::Debug for Webhook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Webhook").field("host", &self.host).finish_non_exhaustive()
    }
}

/// Whether events can be sent to this address.
///
/// # Errors
/// [`InvalidSetting`] of `announce.webhook` if it is not `https`, or `http` to this machine, or has an account, a query or
/// a fragment. Repeats no part of it.
pub fn validate_url(url: &str) -> Result<Url, InvalidSetting> {
    checked_url(url).map_err(|why| InvalidSetting::new(format!("{SECTION}.webhook"), why))
}

impl Webhook {
    /// Reads the key and prepares the client. Opens no connection. `timeout`: of one request, its answer included.
    ///
    /// # Errors
    /// [`InvalidSetting`] for an address that cannot be used, or a file that cannot be read or holds no key or certificate.
    pub fn new(url: &str, key_file: &Path, ca_file: Option<&Path>, timeout: Duration) -> Result<Self, InvalidSetting> {
        let url = validate_url(url)?;
        let key = read_key(key_file)?;
        let limits = LimitsSettings {
            concurrency: CONCURRENCY as u32,
            requests_per_s: REQUESTS_PER_S,
            timeout,
            queue_timeout: timeout,
            ..LimitsSettings::default()
        };
        let path = if url.path().ends_with('/') { "/" } else { "" };
        let host = url.host_str().unwrap_or_default().to_owned();
        let client = Client::to(SECTION, &url, "webhook_ca_file", ca_file, &limits)?;
        Ok(Self { client, path, key, host })
    }

    /// The host that events are sent to.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Sends events, [`CONCURRENCY`] at a time, and returns one result for each, in their order. Stops if the receiver
    /// cannot be reached, or gives no answer to as many requests as are under way.
    pub async fn send_all(&self, events: Vec<Event>) -> Vec<Result<(), WebhookError>> {
        let progress = Progress::default();
        let sending = events.into_iter().map(|event| self.send_unless_stopped(event, &progress));
        stream::iter(sending).buffered(CONCURRENCY).collect().await
    }

    async fn send_unless_stopped(&self, event: Event, progress: &Progress) -> Result<(), WebhookError> {
        if progress.is_stopped.load(Ordering::Relaxed) {
            return Err(WebhookError::NotSent);
        }
        let (result, was_answered) = self.send(event).await;
        progress.note(&result, was_answered);
        result
    }

    /// The result, and whether the receiver answered at all.
    async fn send(&self, event: Event) -> (Result<(), WebhookError>, bool) {
        let outgoing = match self.request(event) {
            Ok(outgoing) => outgoing,
            Err(fault) => return (Err(refused(&fault, None)), true),
        };
        match self.client.send_for_status(outgoing).await {
            Ok(reply) if (200..300).contains(&reply.status) => (Ok(()), true),
            Ok(reply) => {
                let pause = reply
                    .header("retry-after")
                    .and_then(|value| retry_after::pause(value, reply.header("date"), local_clock::now()));
                (
                    Err(WebhookError::Refused { why: format!("it answers HTTP {}", reply.status), retry_after: pause }),
                    true,
                )
            }
            Err(CallError::Unreachable(why)) => (Err(WebhookError::Unreachable(why)), false),
            Err(fault @ (CallError::TimedOut(_) | CallError::Cut)) => (Err(refused(&fault, None)), false),
            Err(fault) => (Err(refused(&fault, fault.retry_after())), true),
        }
    }

    fn request(&self, event: Event) -> Result<Outgoing, CallError> {
        let timestamp = local_clock::unix_seconds();
        let signature = SecretString::from(signature(&self.key, &event.id, timestamp, &event.body));
        let invalid = CallError::NotSent("a header of it is not visible ASCII; write other texts into event_outbox");
        let value = |text: &str| HeaderValue::from_str(text).map_err(|_| invalid.clone());
        let mut headers = vec![
            json_body(),
            (HeaderName::from_static("webhook-id"), value(&event.id)?),
            (HeaderName::from_static("webhook-timestamp"), timestamp.into()),
            (HeaderName::from_static("webhook-signature"), secret_header(&signature)?),
        ];
        for (name, text) in &event.headers {
            headers.push((HeaderName::from_static(name), value(text)?));
        }
        Ok(Outgoing { method: Method::POST, path_and_query: self.path.to_owned(), headers, body: event.body })
    }
}

/// What a batch has learnt of the receiver.
#[derive(Default)]
struct Progress {
    is_stopped: AtomicBool,
    /// Requests without an answer since the last answer.
    unanswered: AtomicUsize,
}

impl Progress {
    fn note(&self, result: &Result<(), WebhookError>, was_answered: bool) {
        if was_answered {
            self.unanswered.store(0, Ordering::Relaxed);
        } else if matches!(result, Err(WebhookError::Unreachable(_)))
            || self.unanswered.fetch_add(1, Ordering::Relaxed) + 1 >= CONCURRENCY
        {
            self.is_stopped.store(true, Ordering::Relaxed);
        }
    }
}

fn refused(fault: &CallError, retry_after: Option<Duration>) -> WebhookError {
    WebhookError::Refused { why: fault.to_string(), retry_after }
}

fn read_key(path: &Path) -> Result<hmac::Key, InvalidSetting> {
    let text = secret_file::read_text(SECTION, "webhook_key_file", path)?;
    let bytes = text.expose_secret().strip_prefix(KEY_PREFIX).and_then(|key| STANDARD.decode(key).ok());
    match bytes {
        Some(bytes) if KEY_BYTES.contains(&bytes.len()) => Ok(hmac::Key::new(hmac::HMAC_SHA256, &bytes)),
        _ => {
            let (least, most) = (KEY_BYTES.start(), KEY_BYTES.end());
            let why = format!(
                "names {path:?}, which holds no key: one line, {KEY_PREFIX} and then {least} to {most} bytes in base64; `echo {KEY_PREFIX}$(openssl rand -base64 32)` makes one"
            );
            Err(InvalidSetting::new(format!("{SECTION}.webhook_key_file"), why))
        }
    }
}

/// Standard Webhooks, "Signature scheme": of `id.timestamp.body`.
fn signature(key: &hmac::Key, id: &str, timestamp: u64, body: &[u8]) -> String {
    let mut context = hmac::Context::with_key(key);
    context.update(format!("{id}.{timestamp}.").as_bytes());
    context.update(body);
    format!("v1,{}", STANDARD.encode(context.sign()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_file(text: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        file
    }

    #[test]
    fn signs_like_the_reference_library() {
        // By the Python library standardwebhooks 1.0.0.
        let key = read_key(key_file("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n").path()).unwrap();
        let signed = signature(&key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, br#"{"test": 2432232314}"#);
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn unusable_keys_are_refused() {
        for text in ["MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_c2hvcnQ=", "whsec_*", "whsec_"] {
            let fault = read_key(key_file(text).path()).unwrap_err().to_string();
            assert!(fault.contains("announce.webhook_key_file") && fault.contains("openssl rand"), "{fault}");
            assert!(!fault.contains("MfKQ") && !fault.contains("c2hv"), "{fault}");
        }
    }

    #[test]
    fn address_must_keep_events_secret() {
        for url in
            ["http://shop.example.com/", "ftp://127.0.0.1/", "https://a:b@shop.example.com/", "shop", "https://x/?a"]
        {
            assert!(validate_url(url).is_err(), "{url}");
        }
        for url in ["https://shop.example.com/events", "http://127.0.0.1:8080", "http://[::1]:8080/"] {
            assert!(validate_url(url).is_ok(), "{url}");
        }
    }

    #[test]
    fn silent_receiver_stops_a_batch() {
        let silent = || Err(refused(&CallError::Cut, None));
        let progress = Progress::default();
        (1..CONCURRENCY).for_each(|_| progress.note(&silent(), false));
        progress.note(&Ok(()), true);
        (1..CONCURRENCY).for_each(|_| progress.note(&silent(), false));
        assert!(!progress.is_stopped.load(Ordering::Relaxed));
        progress.note(&silent(), false);
        assert!(progress.is_stopped.load(Ordering::Relaxed));
        let progress = Progress::default();
        progress.note(&Err(WebhookError::Unreachable(String::new())), false);
        assert!(progress.is_stopped.load(Ordering::Relaxed));
    }
}
