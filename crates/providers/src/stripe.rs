//! Stripe: payment intents (`pi_…`) and checkout sessions (`cs_…`).
//!
//! The API version is pinned: what a status means may change with another.

use hyper::Method;
use hyper::header::{AUTHORIZATION, HeaderName, HeaderValue};
use order_timeout_core::InvalidSetting;
use order_timeout_core::payment::{Attempt, Money};
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use uuid::Uuid;

use crate::call_error::CallError;
use crate::client::{Client, Outgoing, Reply, accept_json, form_body, secret_header};
use crate::protocol::{Protocol, path_segment};
use crate::settings::StripeSettings;
use crate::table::{ASK, BOTH, CANCEL, Call, Field, Is, Meaning, Row, Said, Verdict, decide, field, text};
use crate::{money, secret_file};

/// The version that the table describes.
const API_VERSION: &str = "2024-06-20";

const INTENT: &str = "payment intent";
const SESSION: &str = "checkout session";

const INTENT_STATUS: &str = "docs.stripe.com/api/payment_intents/object, `status`";
const CHARGE: &str = "docs.stripe.com/api/charges/object, `amount_refunded`";
const INTENT_CANCEL: &str = "docs.stripe.com/api/payment_intents/cancel";
const SESSION_STATUS: &str = "docs.stripe.com/api/checkout/sessions/object, `status`";
const SESSION_PAYMENT: &str = "docs.stripe.com/api/checkout/sessions/object, `payment_status`";
const SESSION_EXPIRE: &str = "docs.stripe.com/api/checkout/sessions/expire";
const ERRORS: &str = "docs.stripe.com/api/errors";
const ERROR_CODES: &str = "docs.stripe.com/error-codes";

const NO_PERMISSION: &str = "its key may not make this call; allow it to write payment intents and checkout sessions";
const OTHER_KEY: &str = "it does not know the secret key; write the key of the right account and mode into its file";
const CONFLICT: &str = "another request for the same payment is under way";
const BUSY: &str = "it accepts no more requests for now";
const FAILED: &str = "it failed";
const NO_PAYMENT: &str = "the session ended without a payment being required; check the order, and settle it by hand";
const DELAYED_FAILED: &str =
    "the session is complete and its delayed payment failed; check it in the dashboard, and settle the order by hand";

const fn intent(calls: &'static [Call], fields: &'static [Field], meaning: Meaning, source: &'static str) -> Row {
    Row { calls, resource: INTENT, http_status: 200, fields, meaning, source }
}

const fn session(calls: &'static [Call], fields: &'static [Field], meaning: Meaning, source: &'static str) -> Row {
    Row { calls, resource: SESSION, http_status: 200, fields, meaning, source }
}

const fn refused(resource: &'static str, http_status: u16, error: &'static [Field], why: &'static str) -> Row {
    Row { calls: BOTH, resource, http_status, fields: error, meaning: Meaning::Unknown(why), source: ERRORS }
}

const STATUS: &str = "/status";
const PAYMENT_STATUS: &str = "/payment_status";
const TYPE: &str = "/error/type";
const CODE: &str = "/error/code";
const SESSION_INTENT: &str = "/payment_intent/status";
const SUCCEEDED: Field = text(STATUS, "succeeded");
const COMPLETE: Field = text(STATUS, "complete");
const EXPIRED: Field = text(STATUS, "expired");
const PAID: Field = text(PAYMENT_STATUS, "paid");
const UNPAID: Field = text(PAYMENT_STATUS, "unpaid");
// The charge is expanded, so it says 0 where nothing was given back.
const REFUNDED: Field = field("/latest_charge/amount_refunded", Is::Positive);
const CHARGED: Field = field("/latest_charge/amount_refunded", Is::Zero);
const SESSION_REFUNDED: Field = field("/payment_intent/latest_charge/amount_refunded", Is::Positive);
const SESSION_CHARGED: Field = field("/payment_intent/latest_charge/amount_refunded", Is::Zero);
const MISSING: &[Field] = &[text(CODE, "resource_missing")];
const INVALID: &[Field] = &[text(TYPE, "invalid_request_error")];

/// The documented answers.
pub(crate) const TABLE: &[Row] = &[
    intent(ASK, &[SUCCEEDED, REFUNDED], Meaning::Refunded, CHARGE),
    intent(ASK, &[SUCCEEDED, CHARGED], Meaning::Paid, INTENT_STATUS),
    // The customer has authorised the payment, and it is held for the shop until the shop captures it.
    intent(ASK, &[text(STATUS, "requires_capture")], Meaning::Paid, INTENT_STATUS),
    intent(ASK, &[text(STATUS, "processing")], Meaning::InProgress, INTENT_STATUS),
    intent(ASK, &[text(STATUS, "requires_action")], Meaning::InProgress, INTENT_STATUS),
    intent(ASK, &[text(STATUS, "requires_payment_method")], Meaning::Open, INTENT_STATUS),
    intent(ASK, &[text(STATUS, "requires_confirmation")], Meaning::Open, INTENT_STATUS),
    intent(BOTH, &[text(STATUS, "canceled")], Meaning::Closed, INTENT_CANCEL),
    Row {
        calls: CANCEL,
        resource: INTENT,
        http_status: 400,
        fields: &[text(CODE, "payment_intent_unexpected_state")],
        meaning: Meaning::AskAgain,
        source: ERROR_CODES,
    },
    Row {
        calls: BOTH,
        resource: INTENT,
        http_status: 404,
        fields: MISSING,
        meaning: Meaning::Absent,
        source: ERROR_CODES,
    },
    session(ASK, &[COMPLETE, PAID, SESSION_REFUNDED], Meaning::Refunded, CHARGE),
    session(ASK, &[COMPLETE, PAID, SESSION_CHARGED], Meaning::Paid, SESSION_PAYMENT),
    // Of a subscription: its payment is in the invoice.
    session(ASK, &[COMPLETE, PAID, field("/payment_intent", Is::Missing)], Meaning::Paid, SESSION_PAYMENT),
    session(
        ASK,
        &[COMPLETE, text(PAYMENT_STATUS, "no_payment_required")],
        Meaning::Unknown(NO_PAYMENT),
        SESSION_PAYMENT,
    ),
    session(
        ASK,
        &[COMPLETE, UNPAID, text(SESSION_INTENT, "requires_payment_method")],
        Meaning::Unknown(DELAYED_FAILED),
        SESSION_PAYMENT,
    ),
    session(ASK, &[COMPLETE, UNPAID, text(SESSION_INTENT, "canceled")], Meaning::Closed, INTENT_STATUS),
    session(ASK, &[COMPLETE, UNPAID, text(SESSION_INTENT, "requires_capture")], Meaning::Paid, INTENT_STATUS),
    session(ASK, &[COMPLETE, UNPAID], Meaning::InProgress, SESSION_PAYMENT),
    // A payment that was under way when the session expired.
    session(BOTH, &[EXPIRED, text(SESSION_INTENT, "processing")], Meaning::InProgress, INTENT_STATUS),
    session(BOTH, &[EXPIRED, text(SESSION_INTENT, "succeeded"), SESSION_REFUNDED], Meaning::Refunded, CHARGE),
    session(BOTH, &[EXPIRED, text(SESSION_INTENT, "succeeded"), SESSION_CHARGED], Meaning::Paid, INTENT_STATUS),
    session(BOTH, &[EXPIRED, text(SESSION_INTENT, "requires_capture")], Meaning::Paid, INTENT_STATUS),
    // The customer confirms it with the bank: the session's expiry does not end that.
    session(BOTH, &[EXPIRED, text(SESSION_INTENT, "requires_action")], Meaning::InProgress, INTENT_STATUS),
    session(BOTH, &[EXPIRED, UNPAID], Meaning::Closed, SESSION_STATUS),
    session(ASK, &[text(STATUS, "open"), text(SESSION_INTENT, "processing")], Meaning::InProgress, INTENT_STATUS),
    session(ASK, &[text(STATUS, "open"), UNPAID], Meaning::Open, SESSION_STATUS),
    Row {
        calls: BOTH,
        resource: SESSION,
        http_status: 404,
        fields: MISSING,
        meaning: Meaning::Absent,
        source: ERROR_CODES,
    },
    // "Returns an error if the Checkout Session has already expired or isn't in an expireable state": without a code.
    Row {
        calls: CANCEL,
        resource: SESSION,
        http_status: 400,
        fields: INVALID,
        meaning: Meaning::AskAgain,
        source: SESSION_EXPIRE,
    },
    refused(INTENT, 401, INVALID, OTHER_KEY),
    refused(INTENT, 403, INVALID, NO_PERMISSION),
    refused(INTENT, 409, &[text(TYPE, "idempotency_error")], CONFLICT),
    refused(INTENT, 429, &[text(CODE, "rate_limit")], BUSY),
    refused(INTENT, 429, &[text(CODE, "lock_timeout")], CONFLICT),
    refused(INTENT, 500, &[text(TYPE, "api_error")], FAILED),
    refused(SESSION, 401, INVALID, OTHER_KEY),
    refused(SESSION, 403, INVALID, NO_PERMISSION),
    refused(SESSION, 409, &[text(TYPE, "idempotency_error")], CONFLICT),
    refused(SESSION, 429, &[text(CODE, "rate_limit")], BUSY),
    refused(SESSION, 429, &[text(CODE, "lock_timeout")], CONFLICT),
    refused(SESSION, 500, &[text(TYPE, "api_error")], FAILED),
];

/// The client of one Stripe account.
pub(crate) struct Stripe {
    client: Client,
    authorization: SecretString,
}

/// What a reference names, by its prefix.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Resource {
    Intent,
    Session,
}

impl Resource {
    fn of(reference: &str) -> Result<Self, CallError> {
        match reference.get(..3) {
            Some("pi_") => Ok(Self::Intent),
            Some("cs_") => Ok(Self::Session),
            _ => Err(CallError::InvalidAttempt(
                "the attempt's reference is neither a payment intent (pi_…) nor a checkout session (cs_…)",
            )),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Intent => INTENT,
            Self::Session => SESSION,
        }
    }

    /// The path to the object, and the verb that closes it.
    fn path(self) -> (&'static str, &'static str) {
        match self {
            Self::Intent => ("/v1/payment_intents/", "/cancel"),
            Self::Session => ("/v1/checkout/sessions/", "/expire"),
        }
    }

    /// What is returned in full: whether money was given back stands in the charge.
    fn expand(self) -> &'static str {
        match self {
            Self::Intent => "expand%5B%5D=latest_charge",
            Self::Session => "expand%5B%5D=payment_intent.latest_charge",
        }
    }

    fn money(self, object: &Value) -> Option<Money> {
        let amount = match (self, object["status"].as_str()) {
            (Self::Intent, Some("requires_capture")) => &object["amount_capturable"],
            (Self::Intent, _) => &object["amount_received"],
            (Self::Session, _) => &object["amount_total"],
        };
        money::from_minor(amount.as_i64()?, object["currency"].as_str()?)
    }
}

impl Stripe {
    pub(crate) fn new(section: &str, settings: &StripeSettings) -> Result<Self, InvalidSetting> {
        let key = secret_file::read_token(section, "secret_key_file", &settings.secret_key_file)?;
        let client = Client::new(section, &settings.url, settings.ca_file.as_deref(), &settings.limits)?;
        Ok(Self { client, authorization: format!("Bearer {}", key.expose_secret()).into() })
    }

    fn outgoing(&self, call: Call, resource: Resource, reference: &str) -> Result<Outgoing, CallError> {
        let ((path, verb), id) = (resource.path(), path_segment(reference)?);
        let version = (HeaderName::from_static("stripe-version"), HeaderValue::from_static(API_VERSION));
        let mut headers = vec![accept_json(), version, (AUTHORIZATION, secret_header(&self.authorization)?)];
        let expand = resource.expand();
        if call == Call::Ask {
            let path_and_query = format!("{path}{id}?{expand}");
            return Ok(Outgoing { method: Method::GET, path_and_query, headers, body: Vec::new() });
        }
        headers.push(form_body());
        // A new key for each call. Stripe replays the answer to a key for a day, so one key for the attempt would repeat a
        // refusal whose reason has gone; cancelling twice is harmless without it.
        let key = HeaderValue::from_str(&Uuid::now_v7().to_string());
        headers.extend(key.ok().map(|key| (HeaderName::from_static("idempotency-key"), key)));
        Ok(Outgoing { method: Method::POST, path_and_query: format!("{path}{id}{verb}"), headers, body: expand.into() })
    }

    fn verdict(&self, call: Call, resource: Resource, reference: &str, reply: &Reply) -> Result<Verdict, CallError> {
        let (section, status) = (self.client.section(), reply.status);
        let body = reply.json(section)?;
        if status == 200 {
            match body["id"].as_str() {
                Some(id) if id == reference => {}
                Some(_) => return Err(CallError::OtherPayment),
                None => return Err(CallError::Unreadable { status }),
            }
        }
        let said = Said { call, resource: resource.name(), http_status: status, body: &body };
        decide(TABLE, said, section, || resource.money(&body).map(Some).ok_or(CallError::Unreadable { status }))
    }
}

impl Protocol for Stripe {
    async fn call(&self, call: Call, attempt: &Attempt) -> Result<Verdict, CallError> {
        let resource = Resource::of(&attempt.reference)?;
        let outgoing = self.outgoing(call, resource, &attempt.reference)?;
        let reply = self.client.send(outgoing).await?;
        self.verdict(call, resource, &attempt.reference, &reply)
    }
}
