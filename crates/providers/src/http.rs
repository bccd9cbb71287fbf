//! A payment service of the shop's own, behind the plain contract in `docs/PROVIDERS.md`: two calls, JSON.
//!
//! Knows no other provider.

use std::fmt::Write as _;

use hyper::Method;
use hyper::header::{AUTHORIZATION, HeaderName, HeaderValue};
use order_timeout_core::InvalidSetting;
use order_timeout_core::payment::{Attempt, Money};
use ring::hmac;
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};

use crate::call_error::CallError;
use crate::client::{Client, Outgoing, Reply, accept_json, json_body, secret_header};
use crate::protocol::{Protocol, require_reference};
use crate::settings::HttpSettings;
use crate::table::{BOTH, Call, Meaning, NotKnown, Row, Said, Table, Verdict, decide, text};
use crate::{local_clock, money, secret_file};

const CONTRACT: &str = "`docs/provider-contract.openapi.yaml`";

const fn state(state: &'static [crate::table::Field], meaning: Meaning) -> Row {
    Row { calls: BOTH, resource: "", http_status: 200, fields: state, meaning, source: CONTRACT }
}

/// The answers of the contract.
const ROWS: &[Row] = &[
    state(&[text("/state", "paid")], Meaning::Paid),
    state(&[text("/state", "open")], Meaning::Open),
    state(&[text("/state", "in_progress")], Meaning::InProgress),
    state(&[text("/state", "pending")], Meaning::Pending),
    state(&[text("/state", "closed")], Meaning::Closed),
    state(&[text("/state", "refunded")], Meaning::Refunded),
    state(&[text("/state", "absent")], Meaning::NotKnown),
];

/// The contract promises that `absent` is said of a payment that was not begun.
pub(crate) const TABLE: Table = Table { kind: "http", not_known: NotKnown::NotBegun, rows: ROWS };

/// A shorter key can be guessed.
const SHORTEST_KEY_BYTES: usize = 32;

/// The client of one payment service.
pub(crate) struct Http {
    client: Client,
    token: Option<SecretString>,
    key: Option<hmac::Key>,
}

impl Http {
    pub(crate) fn new(section: &str, settings: &HttpSettings) -> Result<Self, InvalidSetting> {
        let client = Client::new(section, &settings.url, settings.ca_file.as_deref(), &settings.limits)?;
        let token = settings.bearer_token_file.as_deref();
        let token = token.map(|path| secret_file::read_token(section, "bearer_token_file", path)).transpose()?;
        let token = token.map(|token| SecretString::from(format!("Bearer {}", token.expose_secret())));
        let key = settings.hmac_key_file.as_deref();
        let key = key.map(|path| secret_file::read_text(section, "hmac_key_file", path)).transpose()?;
        if key.as_ref().is_some_and(|key| key.expose_secret().len() < SHORTEST_KEY_BYTES) {
            let why = format!(
                "names a file with fewer than {SHORTEST_KEY_BYTES} characters; write a random key into it (openssl rand -hex 32)"
            );
            return Err(InvalidSetting::new(format!("{section}.hmac_key_file"), why));
        }
        let key = key.map(|key| hmac::Key::new(hmac::HMAC_SHA256, key.expose_secret().as_bytes()));
        Ok(Self { client, token, key })
    }

    fn headers(&self, path: &str, body: &str) -> Result<Vec<(HeaderName, HeaderValue)>, CallError> {
        let mut headers = vec![json_body(), accept_json()];
        if let Some(token) = &self.token {
            headers.push((AUTHORIZATION, secret_header(token)?));
        }
        if let Some(key) = &self.key {
            let timestamp = local_clock::unix_seconds();
            let signed = format!("{timestamp}\nPOST\n{}\n{body}", self.client.full_path(path));
            let mut signature = String::from("v1=");
            for byte in hmac::sign(key, signed.as_bytes()).as_ref() {
                let _ = write!(signature, "{byte:02x}");
            }
            headers.push((HeaderName::from_static("order-timeout-timestamp"), timestamp.into()));
            let signature = secret_header(&signature.into())?;
            headers.push((HeaderName::from_static("order-timeout-signature"), signature));
        }
        Ok(headers)
    }

    fn verdict(&self, call: Call, attempt: &Attempt, reply: &Reply) -> Result<Verdict, CallError> {
        let body = reply.json(self.client.section())?;
        let said = Said { call, resource: "", http_status: reply.status, body: &body };
        let unreadable = CallError::Unreadable { status: reply.status };
        if reply.status == 200 {
            require_reference(&body["reference"], &attempt.reference, reply.status)?;
        }
        decide(&TABLE, said, self.client.section(), || paid(&body).map(Some).ok_or(unreadable))
    }
}

/// The contract demands the amount of what was paid.
fn paid(body: &Value) -> Option<Money> {
    money::from_minor(body["amount_minor"].as_i64()?, body["currency"].as_str()?)
}

impl Protocol for Http {
    const NO_PAYMENT: &'static str = "order-timeout-asks-whether-the-keys-are-right";

    async fn call(&self, call: Call, attempt: &Attempt) -> Result<Verdict, CallError> {
        let path = match call {
            Call::Ask => "/ask",
            Call::Cancel => "/cancel",
        };
        let body = json!({
            "reference": attempt.reference,
            "amount_minor": attempt.money.amount_minor,
            "currency": attempt.money.currency.as_str(),
        })
        .to_string();
        let headers = self.headers(path, &body)?;
        let outgoing =
            Outgoing { method: Method::POST, path_and_query: path.to_owned(), headers, body: body.into_bytes() };
        self.verdict(call, attempt, &self.client.send(outgoing).await?)
    }
}
