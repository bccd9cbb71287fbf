//! PayPal: orders v2 with one purchase unit, and the void of an authorization that is pending.
//!
//! Read on 2026-11-27 in developer.paypal.com and in github.com/paypal/paypal-rest-api-specifications,
//! `checkout_orders_v2` 2.13 and `payments_payment_v2` 2.5. PayPal has no call that closes an order before it is authorised
//! or captured. Only the shop's own server can capture it, so the shop's promise
//! ([`shop_captures_only_open_orders`](PaypalSettings)) closes it, and without that nothing does.

use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hyper::Method;
use hyper::header::AUTHORIZATION;
use order_timeout_core::InvalidSetting;
use order_timeout_core::payment::{Attempt, Money};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::call_error::CallError;
use crate::client::{Client, Outgoing, accept_json, form_body, json_body, secret_header};
use crate::protocol::{Protocol, path_segment, require_reference};
use crate::settings::PaypalSettings;
use crate::table::{
    ASK, BOTH, CANCEL, Call, Field, Is, Meaning, NotKnown, Row, Said, Table, Verdict, decide, field, text,
};
use crate::{money, secret_file};

const ORDER: &str = "order";
const AUTHORIZATION_OF_ORDER: &str = "authorization";

const ORDER_STATUS: &str = "developer.paypal.com/docs/api/orders/v2/#orders_get, `status`";
const CAPTURE_STATUS: &str = "developer.paypal.com/docs/api/orders/v2/#orders_get, status of `captures`";
const AUTHORIZATION_STATUS: &str = "developer.paypal.com/docs/api/orders/v2/#orders_get, status of `authorizations`";
const ONE_CAPTURE: &str =
    "developer.paypal.com/docs/api/orders/v2/#orders_capture, ORDER_ALREADY_CAPTURED: one per order";
const ONE_AUTHORIZATION: &str =
    "developer.paypal.com/docs/api/orders/v2/#orders_authorize, ORDER_ALREADY_AUTHORIZED: one per order";
const AUTHORIZATION_EXPIRED: &str =
    "developer.paypal.com/docs/api/payments/v2/#authorizations_get, `status` in its earlier form; 2.5 does not list it";
const GONE: &str =
    "developer.paypal.com/docs/api/orders/v2/#orders_get, 404 and `links`: three hours to send the payer there";
const VOID: &str = "developer.paypal.com/docs/api/payments/v2/#authorizations_void";

const CAPTURED_IN_PART: &str = "its authorization was captured in part; check it at PayPal, and settle it by hand";
const REAUTHORISED: &str = "its authorization was renewed and has to be voided by hand";
const NO_AUTHORIZATION: &str = "it names an authorization that it does not know";

const STATUS: &str = "/status";
const CAPTURE: &str = "/purchase_units/0/payments/captures/0/status";
const AUTHORIZED: &str = "/purchase_units/0/payments/authorizations/0/status";
const ISSUE: &str = "/details/0/issue";
/// Put into the order before it is looked up.
const PROMISED: Field = field("/shop_captures_only_open_orders", Is::True);
const COMPLETED: Field = text(STATUS, "COMPLETED");
/// PayPal captures such an order itself, so the shop cannot promise anything.
const CAPTURED_BY_PAYPAL: &str = "ORDER_COMPLETE_ON_PAYMENT_APPROVAL";

const fn order(calls: &'static [Call], fields: &'static [Field], meaning: Meaning, source: &'static str) -> Row {
    Row { calls, resource: ORDER, http_status: 200, fields, meaning, source }
}

const fn void(http_status: u16, fields: &'static [Field], meaning: Meaning) -> Row {
    Row { calls: CANCEL, resource: AUTHORIZATION_OF_ORDER, http_status, fields, meaning, source: VOID }
}

/// A cancel reads the order as well, and voids its authorization if that is pending.
const ROWS: &[Row] = &[
    order(BOTH, &[COMPLETED, text(CAPTURE, "COMPLETED")], Meaning::Paid, CAPTURE_STATUS),
    // An eCheck takes days, and so does a review.
    order(BOTH, &[COMPLETED, text(CAPTURE, "PENDING")], Meaning::Pending, CAPTURE_STATUS),
    order(BOTH, &[COMPLETED, text(CAPTURE, "REFUNDED")], Meaning::Refunded, CAPTURE_STATUS),
    order(BOTH, &[COMPLETED, text(CAPTURE, "PARTIALLY_REFUNDED")], Meaning::Refunded, CAPTURE_STATUS),
    order(BOTH, &[COMPLETED, text("/intent", "CAPTURE"), text(CAPTURE, "DECLINED")], Meaning::Closed, ONE_CAPTURE),
    order(BOTH, &[COMPLETED, text("/intent", "CAPTURE"), text(CAPTURE, "FAILED")], Meaning::Closed, ONE_CAPTURE),
    // Authorised, and held for the shop until the shop captures it, which it may try again.
    order(
        BOTH,
        &[COMPLETED, text(AUTHORIZED, "CREATED"), field(CAPTURE, Is::Missing)],
        Meaning::Paid,
        AUTHORIZATION_STATUS,
    ),
    order(
        BOTH,
        &[COMPLETED, text(AUTHORIZED, "CAPTURED"), field(CAPTURE, Is::Missing)],
        Meaning::Paid,
        AUTHORIZATION_STATUS,
    ),
    order(
        BOTH,
        &[COMPLETED, text(AUTHORIZED, "PARTIALLY_CAPTURED"), field(CAPTURE, Is::Missing)],
        Meaning::Unknown(CAPTURED_IN_PART),
        AUTHORIZATION_STATUS,
    ),
    // A cancel voids it.
    order(
        ASK,
        &[COMPLETED, text(AUTHORIZED, "PENDING"), field(CAPTURE, Is::Missing)],
        Meaning::InProgress,
        AUTHORIZATION_STATUS,
    ),
    order(
        BOTH,
        &[COMPLETED, text(AUTHORIZED, "VOIDED"), field(CAPTURE, Is::Missing)],
        Meaning::Closed,
        AUTHORIZATION_STATUS,
    ),
    order(
        BOTH,
        &[COMPLETED, text(AUTHORIZED, "DENIED"), field(CAPTURE, Is::Missing)],
        Meaning::Closed,
        ONE_AUTHORIZATION,
    ),
    order(
        BOTH,
        &[COMPLETED, text(AUTHORIZED, "EXPIRED"), field(CAPTURE, Is::Missing)],
        Meaning::Closed,
        AUTHORIZATION_EXPIRED,
    ),
    order(BOTH, &[text(STATUS, "VOIDED")], Meaning::Closed, ORDER_STATUS),
    order(CANCEL, &[text(STATUS, "CREATED"), PROMISED], Meaning::Closed, ORDER_STATUS),
    order(CANCEL, &[text(STATUS, "SAVED"), PROMISED], Meaning::Closed, ORDER_STATUS),
    order(CANCEL, &[text(STATUS, "PAYER_ACTION_REQUIRED"), PROMISED], Meaning::Closed, ORDER_STATUS),
    order(CANCEL, &[text(STATUS, "APPROVED"), PROMISED], Meaning::Closed, ORDER_STATUS),
    order(BOTH, &[text(STATUS, "CREATED")], Meaning::Open, ORDER_STATUS),
    order(BOTH, &[text(STATUS, "SAVED")], Meaning::Open, ORDER_STATUS),
    order(BOTH, &[text(STATUS, "PAYER_ACTION_REQUIRED")], Meaning::Open, ORDER_STATUS),
    // The customer has agreed, and the shop's server is about to capture.
    order(BOTH, &[text(STATUS, "APPROVED")], Meaning::InProgress, ORDER_STATUS),
    Row {
        calls: BOTH,
        resource: ORDER,
        http_status: 404,
        fields: &[text(ISSUE, "INVALID_RESOURCE_ID")],
        meaning: Meaning::NotKnown,
        source: GONE,
    },
    void(204, &[], Meaning::Closed),
    void(200, &[text(STATUS, "VOIDED")], Meaning::Closed),
    void(422, &[text(ISSUE, "PREVIOUSLY_VOIDED")], Meaning::Closed),
    void(422, &[text(ISSUE, "PREVIOUSLY_CAPTURED")], Meaning::AskAgain),
    void(422, &[text(ISSUE, "CANNOT_BE_VOIDED")], Meaning::Unknown(REAUTHORISED)),
    void(409, &[text(ISSUE, "PREVIOUS_REQUEST_IN_PROGRESS")], Meaning::InProgress),
    void(404, &[text(ISSUE, "INVALID_RESOURCE_ID")], Meaning::Unknown(NO_AUTHORIZATION)),
];

/// PayPal gives the numbers, and forgets an order whose payer was not sent to it, or has not paid, within three hours; an
/// account can have more by contract. Not in the documents but at two shops: it answers 404 then
/// (github.com/shopware/SwagPayPal/pull/679, github.com/paypal/Checkout-PHP-SDK/issues/84).
pub(crate) const TABLE: Table =
    Table { kind: "paypal", not_known: NotKnown::Forgotten { after: Duration::from_secs(3 * 3_600) }, rows: ROWS };

/// A token is renewed so long before it expires: a request may wait for its turn, and clocks differ.
const RENEWED_BEFORE: Duration = Duration::from_secs(120);

/// The client of one PayPal app.
pub(crate) struct Paypal {
    client: Client,
    credentials: SecretString,
    shop_captures_only_open_orders: bool,
    /// Locked while a token is asked for, so that a burst of calls asks once.
    token: Mutex<Option<Token>>,
}

struct Token {
    authorization: SecretString,
    until: Instant,
}

impl Paypal {
    pub(crate) fn new(section: &str, settings: &PaypalSettings) -> Result<Self, InvalidSetting> {
        let secret = secret_file::read_token(section, "client_secret_file", &settings.client_secret_file)?;
        let credentials = STANDARD.encode(format!("{}:{}", settings.client_id, secret.expose_secret()));
        Ok(Self {
            client: Client::new(section, &settings.url, settings.ca_file.as_deref(), &settings.limits)?,
            credentials: format!("Basic {credentials}").into(),
            shop_captures_only_open_orders: settings.shop_captures_only_open_orders,
            token: Mutex::default(),
        })
    }

    /// The token for the next request, from the cache while it is valid.
    async fn authorization(&self) -> Result<SecretString, CallError> {
        let mut token = self.token.lock().await;
        if let Some(valid) = token.as_ref().filter(|token| Instant::now() < token.until) {
            return Ok(valid.authorization.clone());
        }
        let new = self.new_token().await?;
        Ok(token.insert(new).authorization.clone())
    }

    /// `developer.paypal.com/api/rest/authentication`.
    async fn new_token(&self) -> Result<Token, CallError> {
        let asked_at = Instant::now();
        let outgoing = Outgoing {
            method: Method::POST,
            path_and_query: "/v1/oauth2/token".to_owned(),
            headers: vec![accept_json(), form_body(), (AUTHORIZATION, secret_header(&self.credentials)?)],
            body: b"grant_type=client_credentials".to_vec(),
        };
        let reply = self.client.send(outgoing).await?;
        let (section, status) = (self.client.section(), reply.status);
        let body = reply.json(section)?;
        match (status, body["access_token"].as_str(), body["expires_in"].as_u64()) {
            (200, Some(token), Some(seconds)) if token.bytes().all(|byte| byte.is_ascii_graphic()) => Ok(Token {
                authorization: format!("Bearer {token}").into(),
                // A day at most, whatever the answer says; PayPal's tokens are valid for nine hours.
                until: (asked_at + Duration::from_secs(seconds.min(86_400)))
                    .checked_sub(RENEWED_BEFORE)
                    .unwrap_or(asked_at),
            }),
            (400 | 401 | 403, ..) => Err(CallError::Refused { status, section: section.to_owned() }),
            _ => Err(CallError::Unreadable { status }),
        }
    }

    async fn send(&self, method: Method, path: String, body: Vec<u8>) -> Result<(u16, Value), CallError> {
        let authorization = secret_header(&self.authorization().await?)?;
        let mut headers = vec![accept_json(), (AUTHORIZATION, authorization)];
        if method == Method::POST {
            headers.push(json_body());
        }
        let reply = self.client.send(Outgoing { method, path_and_query: path, headers, body }).await?;
        if reply.status == 401 {
            // Revoked before its time. The next call asks for another.
            *self.token.lock().await = None;
        }
        Ok((reply.status, reply.json(self.client.section())?))
    }

    /// Reads the order, and checks that it is the one asked for and has one payment at most.
    async fn order(&self, reference: &str) -> Result<(u16, Value), CallError> {
        let path = format!("/v2/checkout/orders/{}", path_segment(reference)?);
        let (status, mut order) = self.send(Method::GET, path, Vec::new()).await?;
        if status != 200 {
            return Ok((status, order));
        }
        require_reference(&order["id"], reference, status)?;
        let count = |pointer| order.pointer(pointer).and_then(Value::as_array).map_or(0, Vec::len);
        let payments = ["/purchase_units/0/payments/captures", "/purchase_units/0/payments/authorizations"];
        if count("/purchase_units") > 1 || payments.into_iter().any(|pointer| count(pointer) > 1) {
            return Err(CallError::Undecided(
                "the order has several purchase units, captures or authorizations; check it at PayPal, and settle it by hand",
            ));
        }
        let is_promised = self.shop_captures_only_open_orders && order["processing_instruction"] != CAPTURED_BY_PAYPAL;
        order["shop_captures_only_open_orders"] = is_promised.into();
        Ok((status, order))
    }

    fn decide(&self, call: Call, resource: &'static str, http_status: u16, body: &Value) -> Result<Verdict, CallError> {
        let said = Said { call, resource, http_status, body };
        decide(&TABLE, said, self.client.section(), || {
            paid(body).map(Some).ok_or(CallError::Unreadable { status: http_status })
        })
    }

    async fn void(&self, authorization: &str) -> Result<Verdict, CallError> {
        let path = format!("/v2/payments/authorizations/{}/void", path_segment(authorization)?);
        let (status, body) = self.send(Method::POST, path, json!({}).to_string().into_bytes()).await?;
        self.decide(Call::Cancel, AUTHORIZATION_OF_ORDER, status, &body)
    }
}

/// The id of an authorization that PayPal has not decided about, and of which nothing was captured.
fn pending_authorization(order: &Value) -> Option<&str> {
    let is_pending = order.pointer(AUTHORIZED)?.as_str() == Some("PENDING") && order.pointer(CAPTURE).is_none();
    let id = order.pointer("/purchase_units/0/payments/authorizations/0/id")?.as_str()?;
    is_pending.then_some(id)
}

/// What was captured, or else what was authorised.
fn paid(order: &Value) -> Option<Money> {
    let payments = order.pointer("/purchase_units/0/payments")?;
    let payment = payments.pointer("/captures/0").or_else(|| payments.pointer("/authorizations/0"))?;
    money::from_decimal(payment["amount"]["value"].as_str()?, payment["amount"]["currency_code"].as_str()?)
}

impl Protocol for Paypal {
    const NO_PAYMENT: &'static str = "0RDERT1ME0VT00000";

    async fn call(&self, call: Call, attempt: &Attempt) -> Result<Verdict, CallError> {
        let (status, order) = self.order(&attempt.reference).await?;
        match pending_authorization(&order) {
            Some(authorization) if call == Call::Cancel => self.void(authorization).await,
            _ => self.decide(call, ORDER, status, &order),
        }
    }
}
