//! WeChat Pay, API v3, for merchants of their own, in China and elsewhere: query and close by `out_trade_no`. Read on
//! 2026-11-27 in pay.weixin.qq.com, where the pages are of 2024 and 2025.
//!
//! No answer decides anything unless its signature was verified.

use std::time::Duration;

use hyper::Method;
use hyper::header::{AUTHORIZATION, HeaderName, HeaderValue};
use order_timeout_core::InvalidSetting;
use order_timeout_core::payment::{Attempt, Money};
use secrecy::SecretString;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::call_error::CallError;
use crate::client::{Client, Outgoing, Reply, accept_json, json_body, secret_header};
use crate::protocol::{Protocol, path_segment};
use crate::rsa::{Signer, Verifier};
use crate::settings::WechatSettings;
use crate::table::{ASK, BOTH, CANCEL, Call, Meaning, NotKnown, Row, Said, Table, Verdict, decide, text};
use crate::{local_clock, money};

const QUERY: &str = "pay.weixin.qq.com/doc/v3/merchant/4013070356, `trade_state`";
const CLOSE: &str = "pay.weixin.qq.com/doc/v3/merchant/4013070360";
/// The same list for both calls.
const ERRORS: &str = "pay.weixin.qq.com/doc/v3/merchant/4012556398, error codes";
const FORMER_ERRORS: &str = "pay.weixin.qq.com/wiki/doc/apiv3/apis/chapter3_1_2.shtml, error codes";

const OUR_REQUEST: &str = "it refuses the request as malformed; check merchant_id and the attempt's reference";
const OUR_KEYS: &str =
    "it refuses the signature; check private_key_file, certificate_serial and the clock of this machine";
const OUR_RIGHTS: &str = "it refuses this merchant; check merchant_id and its rights";
const BUSY: &str = "it accepts no more requests for now";
const FAILED: &str = "it failed";

const fn state(name: &'static [crate::table::Field], meaning: Meaning) -> Row {
    Row { calls: ASK, resource: "", http_status: 200, fields: name, meaning, source: QUERY }
}

const fn error(
    calls: &'static [Call],
    http_status: u16,
    code: &'static [crate::table::Field],
    meaning: Meaning,
) -> Row {
    Row { calls, resource: "", http_status, fields: code, meaning, source: ERRORS }
}

const STATE: &str = "/trade_state";
const CODE: &str = "/code";

const ROWS: &[Row] = &[
    state(&[text(STATE, "SUCCESS")], Meaning::Paid),
    state(&[text(STATE, "REFUND")], Meaning::Refunded),
    state(&[text(STATE, "NOTPAY")], Meaning::Open),
    state(&[text(STATE, "CLOSED")], Meaning::Closed),
    // Only of payments by code: reversed, and whatever was taken was given back in the same step.
    state(&[text(STATE, "REVOKED")], Meaning::Closed),
    state(&[text(STATE, "USERPAYING")], Meaning::InProgress),
    // The payment failed; that the customer cannot try again is not documented. Closing it gives certainty.
    state(&[text(STATE, "PAYERROR")], Meaning::Open),
    Row { calls: CANCEL, resource: "", http_status: 204, fields: &[], meaning: Meaning::Closed, source: CLOSE },
    error(BOTH, 202, &[text(CODE, "USER_PAYING")], Meaning::InProgress),
    error(BOTH, 404, &[text(CODE, "ORDER_NOT_EXIST")], Meaning::NotKnown),
    Row { source: FORMER_ERRORS, ..error(BOTH, 404, &[text(CODE, "ORDERNOTEXIST")], Meaning::NotKnown) },
    error(BOTH, 400, &[text(CODE, "ORDER_CLOSED")], Meaning::Closed),
    // For example that the order was paid.
    error(CANCEL, 400, &[text(CODE, "INVALID_REQUEST")], Meaning::AskAgain),
    error(CANCEL, 403, &[text(CODE, "TRADE_ERROR")], Meaning::AskAgain),
    error(ASK, 400, &[text(CODE, "INVALID_REQUEST")], Meaning::Unknown(OUR_REQUEST)),
    error(ASK, 403, &[text(CODE, "TRADE_ERROR")], Meaning::Unknown(FAILED)),
    error(BOTH, 400, &[text(CODE, "PARAM_ERROR")], Meaning::Unknown(OUR_REQUEST)),
    error(BOTH, 400, &[text(CODE, "MCH_NOT_EXISTS")], Meaning::Unknown(OUR_RIGHTS)),
    error(BOTH, 400, &[text(CODE, "APPID_MCHID_NOT_MATCH")], Meaning::Unknown(OUR_RIGHTS)),
    error(BOTH, 401, &[text(CODE, "SIGN_ERROR")], Meaning::Unknown(OUR_KEYS)),
    error(BOTH, 403, &[text(CODE, "NO_AUTH")], Meaning::Unknown(OUR_RIGHTS)),
    error(BOTH, 403, &[text(CODE, "RULE_LIMIT")], Meaning::Unknown(OUR_RIGHTS)),
    error(BOTH, 403, &[text(CODE, "ACCOUNT_ERROR")], Meaning::Unknown(FAILED)),
    error(BOTH, 403, &[text(CODE, "NOT_ENOUGH")], Meaning::Unknown(FAILED)),
    error(BOTH, 403, &[text(CODE, "OUT_TRADE_NO_USED")], Meaning::Unknown(OUR_REQUEST)),
    error(BOTH, 429, &[text(CODE, "FREQUENCY_LIMITED")], Meaning::Unknown(BUSY)),
    error(BOTH, 500, &[text(CODE, "SYSTEM_ERROR")], Meaning::Unknown(FAILED)),
    error(BOTH, 500, &[text(CODE, "BANK_ERROR")], Meaning::Unknown(FAILED)),
    error(BOTH, 500, &[text(CODE, "INVALID_TRANSACTIONID")], Meaning::Unknown(FAILED)),
    error(BOTH, 500, &[text(CODE, "OPENID_MISMATCH")], Meaning::Unknown(FAILED)),
];

/// The shop gives the number: WeChat Pay knows it when the shop has placed the order there.
pub(crate) const TABLE: Table = Table { kind: "wechat", not_known: NotKnown::NotBegun, rows: ROWS };

/// The paths in China, and elsewhere (pay.weixin.qq.com/doc/global/v3/zh/4013014223 and the pages beside it).
const PATHS: [&str; 2] = ["/v3/pay/transactions", "/v3/global/transactions"];

/// How far the time in an answer may be from this machine's: the window of WeChat Pay's own libraries.
const LARGEST_CLOCK_DIFFERENCE: Duration = Duration::from_secs(300);

/// The client of one merchant.
pub(crate) struct Wechat {
    client: Client,
    path: &'static str,
    merchant_id: String,
    certificate_serial: String,
    signer: Signer,
    /// By the id that answers name in `Wechatpay-Serial`.
    platform_keys: Vec<(String, Verifier)>,
}

impl Wechat {
    pub(crate) fn new(section: &str, settings: &WechatSettings) -> Result<Self, InvalidSetting> {
        let platform_keys = settings.platform_keys.iter().enumerate().map(|(index, key)| {
            let name = format!("platform_keys[{index}]");
            let verifier = Verifier::read(section, &format!("{name}.file"), &key.file)?;
            let id = match (&key.id, verifier.serial()) {
                (None, Some(serial)) => serial,
                (Some(id), None) => id.clone(),
                (None, None) => {
                    let why =
                        "is missing; write the id of the public key (PUB_KEY_ID_…), which the merchant platform shows";
                    return Err(InvalidSetting::new(format!("{section}.{name}.id"), why));
                }
                (Some(_), Some(_)) => {
                    let why = "is given for a certificate, which has its serial number itself; leave it out";
                    return Err(InvalidSetting::new(format!("{section}.{name}.id"), why));
                }
            };
            Ok((id, verifier))
        });
        Ok(Self {
            client: Client::new(section, settings.url(), settings.ca_file.as_deref(), &settings.limits)?,
            path: PATHS[usize::from(settings.global)],
            merchant_id: settings.merchant_id.clone(),
            certificate_serial: settings.certificate_serial.clone(),
            signer: Signer::read(section, "private_key_file", &settings.private_key_file)?,
            platform_keys: platform_keys.collect::<Result<_, _>>()?,
        })
    }

    /// `pay.weixin.qq.com/wiki/doc/apiv3/wechatpay/wechatpay4_0.shtml`: method, path with query, time, nonce and body, each with a line
    /// break behind it.
    fn authorization(&self, method: &Method, path: &str, body: &str) -> Result<HeaderValue, CallError> {
        let (timestamp, nonce) = (local_clock::unix_seconds(), Uuid::now_v7().simple().to_string().to_uppercase());
        let path = self.client.full_path(path);
        let signature = self.signer.sign(format!("{method}\n{path}\n{timestamp}\n{nonce}\n{body}\n").as_bytes())?;
        let Self { merchant_id, certificate_serial, .. } = self;
        let value = format!(
            "WECHATPAY2-SHA256-RSA2048 mchid=\"{merchant_id}\",nonce_str=\"{nonce}\",signature=\"{signature}\",timestamp=\"{timestamp}\",serial_no=\"{certificate_serial}\""
        );
        secret_header(&SecretString::from(value))
    }

    fn outgoing(&self, call: Call, reference: &str) -> Result<Outgoing, CallError> {
        let path = format!("{}/out-trade-no/{}", self.path, path_segment(reference)?);
        let (method, path, body) = match call {
            Call::Ask => (Method::GET, format!("{path}?mchid={}", self.merchant_id), String::new()),
            Call::Cancel => (Method::POST, format!("{path}/close"), json!({ "mchid": self.merchant_id }).to_string()),
        };
        let mut headers = vec![accept_json(), (AUTHORIZATION, self.authorization(&method, &path, &body)?)];
        if call == Call::Cancel {
            headers.push(json_body());
        }
        // Asks for answers that are signed with this public key: WeChat Pay may still use a certificate otherwise.
        if let Some((id, Verifier::Key(_))) = self.platform_keys.first()
            && let Ok(id) = HeaderValue::from_str(id)
        {
            headers.push((HeaderName::from_static("wechatpay-serial"), id));
        }
        Ok(Outgoing { method, path_and_query: path, headers, body: body.into_bytes() })
    }

    /// `pay.weixin.qq.com/wiki/doc/apiv3/wechatpay/wechatpay4_1.shtml`: time, nonce and body, each with a line break behind it.
    fn verify(&self, reply: &Reply) -> Result<(), CallError> {
        let untrusted = |why: String| Err(CallError::Untrusted(why));
        let header = |name| reply.header(name);
        let (Some(timestamp), Some(nonce), Some(signature), Some(serial)) = (
            header("wechatpay-timestamp"),
            header("wechatpay-nonce"),
            header("wechatpay-signature"),
            header("wechatpay-serial"),
        ) else {
            return untrusted("it is not signed".into());
        };
        let Some((_, key)) = self.platform_keys.iter().find(|(id, _)| id == serial) else {
            let section = self.client.section();
            return untrusted(format!(
                "it is signed with a key that {section}.platform_keys does not name; add that key"
            ));
        };
        let mut message = format!("{timestamp}\n{nonce}\n").into_bytes();
        message.extend_from_slice(&reply.body);
        message.push(b'\n');
        key.verify(&message, signature).map_err(|error| CallError::Untrusted(error.to_string()))?;
        // After the signature: now the time is WeChat Pay's word.
        let difference = timestamp.parse().ok().map(|signed: u64| signed.abs_diff(local_clock::unix_seconds()));
        match difference {
            Some(seconds) if seconds < LARGEST_CLOCK_DIFFERENCE.as_secs() => Ok(()),
            Some(seconds) => untrusted(format!(
                "it was signed {seconds} s away from this machine's time; set the clock of this machine right"
            )),
            None => untrusted("its time of signing is no number".into()),
        }
    }

    fn verdict(&self, call: Call, attempt: &Attempt, reply: &Reply) -> Result<Verdict, CallError> {
        let (section, status) = (self.client.section(), reply.status);
        let body = reply.json(section)?;
        let said = Said { call, resource: "", http_status: status, body: &body };
        let verdict = decide(&TABLE, said, section, || paid(&body).ok_or(CallError::Unreadable { status }))?;
        // A refused request may be unsigned, and decides nothing: `decide` has returned its reason.
        self.verify(reply)?;
        if status == 200 {
            let is = |name: &str, expected: &str| body[name].as_str() == Some(expected);
            if !is("out_trade_no", &attempt.reference) || !is("mchid", &self.merchant_id) {
                return Err(CallError::OtherPayment);
            }
        }
        Ok(verdict)
    }
}

/// The outer `None`: unreadable. The inner one: the answer has no amount, which is an optional field.
fn paid(body: &Value) -> Option<Option<Money>> {
    let amount = &body["amount"];
    if amount.is_null() {
        return Some(None);
    }
    let currency = if amount["currency"].is_null() { "CNY" } else { amount["currency"].as_str()? };
    money::from_minor(amount["total"].as_i64()?, currency).map(Some)
}

impl Protocol for Wechat {
    const NO_PAYMENT: &'static str = "order-timeout-asks-0000000000000";

    async fn call(&self, call: Call, attempt: &Attempt) -> Result<Verdict, CallError> {
        let reply = self.client.send(self.outgoing(call, &attempt.reference)?).await?;
        self.verdict(call, attempt, &reply)
    }
}
