//! Stripe: payment intents (`pi_…`) and checkout sessions (`cs_…`).
//!
//! The API version is pinned: what a status means may change with another. Read on 2026-11-27 in docs.stripe.com.

use hyper::Method;
use hyper::header::{AUTHORIZATION, HeaderName, HeaderValue};
use order_timeout_core::InvalidSetting;
use order_timeout_core::payment::{Attempt, Money};
use secrecy::{ExposeSecret, SecretString};
use serde_json::Value;
use uuid::Uuid;

use crate::call_error::CallError;
use crate::client::{Client, Outgoing, Reply, accept_json, form_body, secret_header};
use crate::protocol::{Protocol, path_segment, require_reference};
use crate::settings::StripeSettings;
use crate::table::{
    ASK, BOTH, CANCEL, Call, Field, Is, Meaning, NotKnown, Row, Said, Table, Verdict, decide, field, text,
};
use crate::{money, secret_file};

/// The version that the table describes. Since this one `amount_refunded` says nothing of the uncaptured rest of an
/// authorisation (support.stripe.com, "Changes to balance transaction behavior for partial capture").
const API_VERSION: &str = "2025-03-31.basil";

const INTENT: &str = "payment intent";
const SESSION: &str = "checkout session";

const INTENT_STATUS: &str = "docs.stripe.com/api/payment_intents/object, `status`";
const NEXT_ACTION: &str = "docs.stripe.com/api/payment_intents/object, `next_action.type`";
const TRANSFER: &str = "docs.stripe.com/payments/bank-transfers/accept-a-payment, underpayments";
const CHARGE: &str = "docs.stripe.com/api/charges/object, `amount_refunded`";
const INTENT_CANCEL: &str = "docs.stripe.com/api/payment_intents/cancel";
const SESSION_STATUS: &str = "docs.stripe.com/api/checkout/sessions/object, `status`";
const SESSION_PAYMENT: &str = "docs.stripe.com/api/checkout/sessions/object, `payment_status`";
const SESSION_EXPIRE: &str = "docs.stripe.com/api/checkout/sessions/expire";
const ERRORS: &str = "docs.stripe.com/api/errors, docs.stripe.com/error-codes";
const ERROR_CODES: &str = "docs.stripe.com/error-codes";

const NO_PERMISSION: &str =
    "its key may not make this call; allow it to write Payment Intents and Checkout Sessions and to read Charges";
const OTHER_KEY: &str = "it does not know the secret key; write the key of the right account and mode into its file";
const NO_ACCESS: &str = "its key has no access to the connected account; correct account, or the key";
const PARTLY_FUNDED: &str =
    "a part of the bank transfer has arrived, and a cancel would leave it in the customer's balance; settle it by hand";
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

/// Of both resources.
const fn refused(http_status: u16, error: &'static [Field], meaning: Meaning) -> Row {
    Row { calls: BOTH, resource: "", http_status, fields: error, meaning, source: ERRORS }
}

const STATUS: &str = "/status";
const PAYMENT_STATUS: &str = "/payment_status";
const TYPE: &str = "/error/type";
const CODE: &str = "/error/code";
const SESSION_INTENT: &str = "/payment_intent/status";
/// Put into the answer before it is looked up.
const FUNDED: Field = field("/partly_funded", Is::True);
const ACTION: Field = text(STATUS, "requires_action");
const ACTION_TYPE: &str = "/next_action/type";
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

const ROWS: &[Row] = &[
    intent(ASK, &[SUCCEEDED, REFUNDED], Meaning::Refunded, CHARGE),
    intent(ASK, &[SUCCEEDED, CHARGED], Meaning::Paid, INTENT_STATUS),
    // The customer has authorised the payment, and it is held for the shop until the shop captures it.
    intent(ASK, &[text(STATUS, "requires_capture")], Meaning::Paid, INTENT_STATUS),
    // A debit takes up to 14 days.
    intent(ASK, &[text(STATUS, "processing")], Meaning::Pending, INTENT_STATUS),
    intent(ASK, &[ACTION, FUNDED], Meaning::Unknown(PARTLY_FUNDED), TRANSFER),
    // A transfer or a voucher, for which the customer has days. A cancel ends it.
    intent(ASK, &[ACTION, text(ACTION_TYPE, "display_bank_transfer_instructions")], Meaning::Open, NEXT_ACTION),
    intent(ASK, &[ACTION, text(ACTION_TYPE, "boleto_display_details")], Meaning::Open, NEXT_ACTION),
    intent(ASK, &[ACTION, text(ACTION_TYPE, "konbini_display_details")], Meaning::Open, NEXT_ACTION),
    intent(ASK, &[ACTION, text(ACTION_TYPE, "multibanco_display_details")], Meaning::Open, NEXT_ACTION),
    intent(ASK, &[ACTION, text(ACTION_TYPE, "oxxo_display_details")], Meaning::Open, NEXT_ACTION),
    intent(ASK, &[ACTION, text(ACTION_TYPE, "verify_with_microdeposits")], Meaning::Open, NEXT_ACTION),
    // The customer is at the bank's page, or has the code on the screen.
    intent(ASK, &[ACTION], Meaning::InProgress, INTENT_STATUS),
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
    session(ASK, &[COMPLETE, UNPAID, FUNDED], Meaning::Unknown(PARTLY_FUNDED), TRANSFER),
    // A debit, a transfer or a voucher: a complete session cannot be expired, so what the bank says is waited for.
    session(ASK, &[COMPLETE, UNPAID], Meaning::Pending, SESSION_PAYMENT),
    // A payment that was under way when the session expired.
    session(BOTH, &[EXPIRED, text(SESSION_INTENT, "processing")], Meaning::Pending, INTENT_STATUS),
    session(BOTH, &[EXPIRED, text(SESSION_INTENT, "succeeded"), SESSION_REFUNDED], Meaning::Refunded, CHARGE),
    session(BOTH, &[EXPIRED, text(SESSION_INTENT, "succeeded"), SESSION_CHARGED], Meaning::Paid, INTENT_STATUS),
    session(BOTH, &[EXPIRED, text(SESSION_INTENT, "requires_capture")], Meaning::Paid, INTENT_STATUS),
    // The customer confirms it with the bank: the session's expiry does not end that.
    session(BOTH, &[EXPIRED, text(SESSION_INTENT, "requires_action")], Meaning::InProgress, INTENT_STATUS),
    session(BOTH, &[EXPIRED, UNPAID], Meaning::Closed, SESSION_STATUS),
    session(ASK, &[text(STATUS, "open"), text(SESSION_INTENT, "processing")], Meaning::Pending, INTENT_STATUS),
    session(ASK, &[text(STATUS, "open"), UNPAID], Meaning::Open, SESSION_STATUS),
    // "Returns an error if the Checkout Session has already expired or isn't in an expireable state": without a code.
    Row {
        calls: CANCEL,
        resource: SESSION,
        http_status: 400,
        fields: INVALID,
        meaning: Meaning::AskAgain,
        source: SESSION_EXPIRE,
    },
    refused(404, MISSING, Meaning::NotKnown),
    refused(401, INVALID, Meaning::Unknown(OTHER_KEY)),
    refused(403, &[text(CODE, "account_invalid")], Meaning::Unknown(NO_ACCESS)),
    refused(403, INVALID, Meaning::Unknown(NO_PERMISSION)),
    refused(409, &[text(TYPE, "idempotency_error")], Meaning::Unknown(CONFLICT)),
    refused(429, &[text(CODE, "rate_limit")], Meaning::Unknown(BUSY)),
    refused(429, &[text(CODE, "lock_timeout")], Meaning::Unknown(CONFLICT)),
    refused(500, &[text(TYPE, "api_error")], Meaning::Unknown(FAILED)),
];

/// Stripe gives the numbers, and forgets none.
pub(crate) const TABLE: Table = Table { kind: "stripe", not_known: NotKnown::OtherAccount, rows: ROWS };

/// The client of one Stripe account.
pub(crate) struct Stripe {
    client: Client,
    /// The connected account whose payments are asked about.
    account: Option<HeaderValue>,
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

    /// What was captured, and what is held. A session has the sum itself.
    fn money(self, object: &Value) -> Option<Money> {
        let amount = match self {
            Self::Intent => object["amount_received"].as_i64()?.checked_add(object["amount_capturable"].as_i64()?)?,
            Self::Session => object["amount_total"].as_i64()?,
        };
        money::from_minor(amount, object["currency"].as_str()?)
    }

    /// Whether a bank transfer has brought less than was asked for.
    fn is_partly_funded(self, object: &Value) -> bool {
        let intent = if self == Self::Intent { object } else { &object["payment_intent"] };
        let remaining = &intent["next_action"]["display_bank_transfer_instructions"]["amount_remaining"];
        matches!((remaining.as_i64(), intent["amount"].as_i64()), (Some(remaining), Some(whole)) if remaining < whole)
    }
}

impl Stripe {
    pub(crate) fn new(section: &str, settings: &StripeSettings) -> Result<Self, InvalidSetting> {
        let key = secret_file::read_token(section, "secret_key_file", &settings.secret_key_file)?;
        let client = Client::new(section, &settings.url, settings.ca_file.as_deref(), &settings.limits)?;
        let account = settings.account.as_deref().map(HeaderValue::from_str).transpose();
        let account = account.map_err(|_| InvalidSetting::new(format!("{section}.account"), "is no account's id"))?;
        Ok(Self { client, account, authorization: format!("Bearer {}", key.expose_secret()).into() })
    }

    fn outgoing(&self, call: Call, resource: Resource, reference: &str) -> Result<Outgoing, CallError> {
        let ((path, verb), id) = (resource.path(), path_segment(reference)?);
        let version = (HeaderName::from_static("stripe-version"), HeaderValue::from_static(API_VERSION));
        let mut headers = vec![accept_json(), version, (AUTHORIZATION, secret_header(&self.authorization)?)];
        headers.extend(self.account.clone().map(|account| (HeaderName::from_static("stripe-account"), account)));
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
        let mut body = reply.json(section)?;
        if status == 200 {
            require_reference(&body["id"], reference, status)?;
            body["partly_funded"] = resource.is_partly_funded(&body).into();
        }
        let said = Said { call, resource: resource.name(), http_status: status, body: &body };
        decide(&TABLE, said, section, || resource.money(&body).map(Some).ok_or(CallError::Unreadable { status }))
    }
}

impl Protocol for Stripe {
    const NO_PAYMENT: &'static str = "pi_0000000000000000OrderTimeout";

    async fn call(&self, call: Call, attempt: &Attempt) -> Result<Verdict, CallError> {
        let resource = Resource::of(&attempt.reference)?;
        let outgoing = self.outgoing(call, resource, &attempt.reference)?;
        let reply = self.client.send(outgoing).await?;
        self.verdict(call, resource, &attempt.reference, &reply)
    }
}
