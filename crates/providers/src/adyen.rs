//! Adyen: payment links (`PL…`) of the Checkout API, which can be read and expired.
//!
//! Sessions and single payments are not supported. A session is read only with the `sessionResult` from the customer's
//! browser, and that status is not updated; no call reads a payment by its reference; a cancel answers `received`, and its
//! result comes in a webhook alone. Read on 2026-11-27 in github.com/Adyen/adyen-openapi,
//! `json/CheckoutService-v72.json`.

use hyper::Method;
use hyper::header::HeaderName;
use order_timeout_core::InvalidSetting;
use order_timeout_core::payment::{Attempt, Money};
use secrecy::SecretString;
use serde_json::{Value, json};

use crate::call_error::CallError;
use crate::client::{Client, Outgoing, accept_json, json_body, secret_header};
use crate::protocol::{Protocol, path_segment, require_reference};
use crate::settings::AdyenSettings;
use crate::table::{
    ASK, BOTH, CANCEL, Call, Field, Is, Meaning, NotKnown, Row, Said, Table, Verdict, decide, field, text,
};
use crate::{money, secret_file};

const GET: &str = "docs.adyen.com/api-explorer/Checkout/72/get/paymentLinks/(linkId), `status`";
const PATCH: &str = "docs.adyen.com/api-explorer/Checkout/72/patch/paymentLinks/(linkId)";
/// The description lists 200, 400, 401, 403, 422 and 500 for both calls.
const NO_DOCUMENT: &str = "not documented: the description of both calls has no 404";

const REUSABLE: &str = "the link may be paid several times, so its state says nothing of one order; settle it by hand";
const MALFORMED: &str = "it refuses the request as malformed; check the attempt's reference";

const fn link(calls: &'static [Call], fields: &'static [Field], meaning: Meaning, source: &'static str) -> Row {
    Row { calls, resource: "", http_status: 200, fields, meaning, source }
}

const STATUS: &str = "/status";

/// `paid` is listed in the description but not explained, so it has no row.
const ROWS: &[Row] = &[
    link(BOTH, &[field("/reusable", Is::True)], Meaning::Unknown(REUSABLE), GET),
    link(ASK, &[text(STATUS, "active")], Meaning::Open, GET),
    link(ASK, &[text(STATUS, "completed")], Meaning::Paid, GET),
    link(ASK, &[text(STATUS, "paymentPending")], Meaning::InProgress, GET),
    link(BOTH, &[text(STATUS, "expired")], Meaning::Closed, GET),
    Row { calls: CANCEL, resource: "", http_status: 422, fields: &[], meaning: Meaning::AskAgain, source: PATCH },
    Row { calls: ASK, resource: "", http_status: 422, fields: &[], meaning: Meaning::Unknown(MALFORMED), source: GET },
    Row { calls: BOTH, resource: "", http_status: 400, fields: &[], meaning: Meaning::Unknown(MALFORMED), source: GET },
    Row { calls: BOTH, resource: "", http_status: 404, fields: &[], meaning: Meaning::NotKnown, source: NO_DOCUMENT },
];

pub(crate) const TABLE: Table = Table { kind: "adyen", not_known: NotKnown::OtherAccount, rows: ROWS };

/// The client of one merchant.
pub(crate) struct Adyen {
    client: Client,
    key: SecretString,
}

impl Adyen {
    pub(crate) fn new(section: &str, settings: &AdyenSettings) -> Result<Self, InvalidSetting> {
        Ok(Self {
            client: Client::new(section, &settings.url, settings.ca_file.as_deref(), &settings.limits)?,
            key: secret_file::read_token(section, "api_key_file", &settings.api_key_file)?,
        })
    }
}

/// What the link was for: it is paid once, and in full.
fn paid(link: &Value) -> Option<Money> {
    money::from_minor(link["amount"]["value"].as_i64()?, link["amount"]["currency"].as_str()?)
}

impl Protocol for Adyen {
    const NO_PAYMENT: &'static str = "PL0000000000000000";

    async fn call(&self, call: Call, attempt: &Attempt) -> Result<Verdict, CallError> {
        if !attempt.reference.starts_with("PL") {
            return Err(CallError::InvalidAttempt("the attempt's reference is not a payment link (PL…)"));
        }
        let (method, body) = match call {
            Call::Ask => (Method::GET, String::new()),
            Call::Cancel => (Method::PATCH, json!({ "status": "expired" }).to_string()),
        };
        let key = (HeaderName::from_static("x-api-key"), secret_header(&self.key)?);
        let mut headers = vec![accept_json(), key];
        if call == Call::Cancel {
            headers.push(json_body());
        }
        let path_and_query = format!("/paymentLinks/{}", path_segment(&attempt.reference)?);
        let reply = self.client.send(Outgoing { method, path_and_query, headers, body: body.into_bytes() }).await?;
        let (section, status) = (self.client.section(), reply.status);
        let body = reply.json(section)?;
        if status == 200 {
            require_reference(&body["id"], &attempt.reference, status)?;
        }
        let said = Said { call, resource: "", http_status: status, body: &body };
        decide(&TABLE, said, section, || paid(&body).map(Some).ok_or(CallError::Unreadable { status }))
    }
}
